"""Detection as in torchvision's tutorial: images of varying size, targets as dicts of boxes, labels and masks.

The classes up to `PennFudanDataset` are those of torchvision.tv_tensors, shortened: tensors that know the format of their boxes
and their canvas.
"""

import enum

import numpy as np
import torch
from PIL import Image as PILImage
from torch.utils.data import DataLoader, Dataset

from tests.programs.running import run


class TVTensor(torch.Tensor):
    @classmethod
    def _wrap(cls, tensor):
        return tensor.as_subclass(cls)

    def __new__(cls, data, *, dtype=None):
        return torch.as_tensor(data, dtype=dtype).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.clone, torch.Tensor.to, torch.Tensor.detach) and isinstance(args[0], cls):
            return cls._like(output, args[0])
        return output

    @classmethod
    def _like(cls, tensor, like):
        return tensor.as_subclass(cls)

    def __repr__(self, *, tensor_contents=None):
        return f"{type(self).__name__}({tuple(self.shape)})"


class Image(TVTensor):
    pass


class Mask(TVTensor):
    pass


class BoundingBoxFormat(str, enum.Enum):
    XYXY = "XYXY"
    XYWH = "XYWH"


class BoundingBoxes(TVTensor):
    format: BoundingBoxFormat
    canvas_size: tuple[int, int]

    def __new__(cls, data, *, format, canvas_size, dtype=None):
        return cls._with(torch.as_tensor(data, dtype=dtype), BoundingBoxFormat(format), tuple(canvas_size))

    @classmethod
    def _with(cls, tensor, format, canvas_size):
        boxes = tensor.as_subclass(cls)
        boxes.format = format
        boxes.canvas_size = canvas_size
        return boxes

    @classmethod
    def _like(cls, tensor, like):
        return cls._with(tensor, like.format, like.canvas_size)


class PennFudanDataset(Dataset):
    def __init__(self, root, transforms=None, permuted=False):
        self.root = root
        self.permuted = permuted  # as torchvision's read_image and pil_to_tensor leave it
        self.transforms = transforms
        self.imgs = sorted(path.name for path in (root / "PNGImages").iterdir())
        self.masks = sorted(path.name for path in (root / "PedMasks").iterdir())

    def __getitem__(self, idx):
        img = np.array(PILImage.open(self.root / "PNGImages" / self.imgs[idx]).convert("RGB"))
        mask = torch.from_numpy(np.array(PILImage.open(self.root / "PedMasks" / self.masks[idx])))
        obj_ids = torch.unique(mask)[1:]  # the first one is the background
        masks = (mask == obj_ids[:, None, None]).to(dtype=torch.uint8)
        boxes = torch.stack([extent(part) for part in masks]) if len(masks) else torch.zeros((0, 4))
        img = torch.from_numpy(img).permute(2, 0, 1)
        img = Image(img if self.permuted else img.contiguous())
        target = {
            "boxes": BoundingBoxes(boxes, format="XYXY", canvas_size=img.shape[-2:]),
            "masks": Mask(masks),
            "labels": torch.ones((len(obj_ids),), dtype=torch.int64),
            "image_id": idx,
            "area": (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0]),
            "iscrowd": torch.zeros((len(obj_ids),), dtype=torch.int64),
        }
        if self.transforms is not None:
            img, target = self.transforms(img, target)
        return img, target

    def __len__(self):
        return len(self.imgs)


def extent(mask):
    rows, columns = torch.nonzero(mask, as_tuple=True)
    return torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).to(torch.float32)


def random_flip(sample):
    """Flip image, boxes and masks, or not; what was one of the classes remains one."""
    img, target = sample
    if torch.rand(1) < 0.5:
        boxes, width = target["boxes"], img.shape[-1]
        assert boxes.canvas_size == tuple(img.shape[-2:])
        assert boxes.format is BoundingBoxFormat.XYXY
        flipped = boxes.clone()
        flipped[:, [0, 2]] = width - boxes[:, [2, 0]]
        img = Image(img.flip(-1))
        target = {**target, "boxes": flipped, "masks": Mask(target["masks"].flip(-1))}
    return img, target


def make(root, count=30):
    rng = np.random.default_rng(0)
    for name in ("PNGImages", "PedMasks"):
        (root / name).mkdir(parents=True)
    for number in range(count):
        height, width = 20 + number % 7, 24 + number % 5
        mask = np.zeros((height, width), dtype=np.uint8)
        for person in range(number % 4):
            mask[3 + person : 15, 6 * person : 6 * person + 4] = person + 1
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        PILImage.fromarray(image).save(root / "PNGImages" / f"{number:05d}.png")
        PILImage.fromarray(mask).save(root / "PedMasks" / f"{number:05d}_mask.png")


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


def main(wrap, folder, num_workers=0, start_method="fork", flip=False, permuted=False):
    """Collect the batches of three epochs."""
    if not (folder / "PNGImages").exists():
        make(folder)
    torch.manual_seed(0)
    dataset = PennFudanDataset(folder, permuted=permuted)
    dataset = wrap(dataset, transform=random_flip) if flip else wrap(dataset)
    loader = DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        num_workers=num_workers,
        multiprocessing_context=start_method if num_workers else None,
        persistent_workers=start_method == "spawn",
        collate_fn=collate_fn if start_method == "spawn" else lambda batch: tuple(zip(*batch)),  # noqa: B905
    )
    return [list(loader) for epoch in range(3)]


if __name__ == "__main__":
    run(main)
