"""Datasets and transforms like those of torchvision, of which there is no build for every torch.

They have the names and modules of torchvision's classes, by which these are recognised, and draw their random numbers in the
same way. They pickle by a function, as their modules may not exist.
"""

import contextlib
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

with contextlib.suppress(ImportError):  # names of transforms can be looked at without
    from PIL import Image

V1, V2, DATASETS = "torchvision.transforms.transforms", "torchvision.transforms.v2._transform", "torchvision.datasets.vision"

_classes = {}


def _of(module):
    def name(cls):
        _classes[f"{module}:{cls.__name__}"] = cls
        cls.__module__ = module
        cls.__reduce__ = lambda self: (_rebuild, (f"{module}:{cls.__name__}", vars(self)))
        return cls

    return name


def _rebuild(name, state):
    made = object.__new__(_classes[name])
    vars(made).update(state)
    return made


@_of(V1)
class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for transform in self.transforms:
            img = transform(img)
        return img


class _Sized:
    def __init__(self, size):
        self.size = size

    def __repr__(self):
        return f"{type(self).__name__}(size={self.size})"

    def crop(self, img, left, top):
        return img.crop((left, top, left + self.size, top + self.size))


@_of(V1)
class Resize(_Sized):
    def __call__(self, img):
        sides = [max(self.size, int(side * self.size / min(img.size))) for side in img.size]
        return img.resize(sides, Image.Resampling.BILINEAR)


@_of(V1)
class CenterCrop(_Sized):
    def __call__(self, img):
        return self.crop(img, (img.width - self.size) // 2, (img.height - self.size) // 2)


@_of(V1)
class RandomCrop(_Sized):
    def __call__(self, img):
        left = int(torch.randint(0, img.width - self.size + 1, (1,)))
        return self.crop(img, left, int(torch.randint(0, img.height - self.size + 1, (1,))))


@_of(V1)
class RandomResizedCrop:
    def __init__(self, size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)):
        self.size, self.scale, self.ratio = size, scale, ratio

    def box(self, width, height):
        area = width * height * torch.empty(1).uniform_(*self.scale).item()
        aspect = math.exp(torch.empty(1).uniform_(*map(math.log, self.ratio)).item())
        w, h = min(width, round(math.sqrt(area * aspect))), min(height, round(math.sqrt(area / aspect)))
        top, left = int(torch.randint(0, height - h + 1, (1,))), int(torch.randint(0, width - w + 1, (1,)))
        return left, top, left + w, top + h

    def __call__(self, img):
        return img.crop(self.box(*img.size)).resize((self.size, self.size), Image.Resampling.BILINEAR)


@_of(V1)
class RandomHorizontalFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, img):
        return img.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < self.p else img


@_of(V1)
class PILToTensor:
    def __call__(self, img):
        array = np.array(img)
        return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1).contiguous()


@_of(V1)
class ToTensor(PILToTensor):
    def __call__(self, img):
        return super().__call__(img).float().div(255)


@_of(V1)
class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, tensor):
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return tensor.clone().sub_(mean).div_(std)


@_of(V1)
class Lambda:
    def __init__(self, lambd):
        self.lambd = lambd

    def __call__(self, img):
        return self.lambd(img)


class JointCompose(torch.nn.Module):
    """The second version's, which takes several inputs."""

    def __init__(self, transforms):
        super().__init__()
        self.transforms = transforms

    def forward(self, *inputs):
        for transform in self.transforms:
            inputs = transform(*inputs)
        return inputs


JointCompose.__name__ = JointCompose.__qualname__ = "Compose"
_of(V2)(JointCompose)


@_of(V2)
class ToImage:
    def __call__(self, image, target):
        return PILToTensor()(image), target


@_of(V2)
class RandomVerticalFlip:
    def __call__(self, image, target):
        if torch.rand(1) >= 0.5:
            return image, target
        boxes = target["boxes"].clone()
        boxes[:, [1, 3]] = image.shape[-2] - boxes[:, [3, 1]]
        return image.flip(-2), target | {"boxes": boxes}


@_of(DATASETS)
class StandardTransform:
    def __init__(self, transform=None, target_transform=None):
        self.transform, self.target_transform = transform, target_transform

    def __call__(self, image, target):
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


def pil_loader(path):
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


class VisionDataset(Dataset):
    """The base of torchvision's datasets: three attributes, of which ``transforms`` holds the other two."""

    def __init__(self, transforms=None, transform=None, target_transform=None):
        self.transform, self.target_transform = transform, target_transform
        if transform is not None or target_transform is not None:
            transforms = StandardTransform(transform, target_transform)
        self.transforms = transforms


class ImageFolder(VisionDataset):
    """One folder for each class; or ``samples``, paths and classes."""

    def __init__(self, root=None, transform=None, target_transform=None, loader=pil_loader, samples=None):
        super().__init__(transform=transform, target_transform=target_transform)
        if samples is None:
            paths = sorted(str(path) for path in Path(root).glob("*/*"))
            classes = sorted({os.path.dirname(path) for path in paths})
            samples = [(path, classes.index(os.path.dirname(path))) for path in paths]
        self.samples, self.loader = samples, loader

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, target = self.samples[index]
        sample = self.loader(path)
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target


def training(size=224):
    """The transforms of nearly every training script."""
    return Compose(
        [RandomResizedCrop(size), RandomHorizontalFlip(), ToTensor(), Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    )
