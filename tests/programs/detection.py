"""Detection as in torchvision's tutorial: images of varying size, targets as dicts of boxes, labels and masks.

The classes up to `BoundingBoxes` are those of torchvision.tv_tensors, shortened: boxes know their format and canvas.
"""

import enum

import numpy as np
import torch
from PIL import Image as PILImage
from torch.utils.data import Dataset

from tests.programs.running import epochs

BoundingBoxFormat = enum.Enum("BoundingBoxFormat", "XYXY")


class TVTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))


class Image(TVTensor): ...


class Mask(TVTensor): ...


class BoundingBoxes(TVTensor): ...


def make_boxes(data, canvas_size):
    boxes = data.as_subclass(BoundingBoxes)
    boxes.format, boxes.canvas_size = BoundingBoxFormat.XYXY, tuple(canvas_size)
    return boxes


class PennFudanDataset(Dataset):
    def __init__(self, root, permuted=False):
        self.root, self.permuted = root, permuted  # as torchvision's read_image and pil_to_tensor leave images
        self.imgs = sorted(path.name for path in (root / "PNGImages").iterdir())
        self.masks = sorted(path.name for path in (root / "PedMasks").iterdir())

    def __getitem__(self, idx):
        img = np.array(PILImage.open(self.root / "PNGImages" / self.imgs[idx]).convert("RGB"))
        mask = torch.from_numpy(np.array(PILImage.open(self.root / "PedMasks" / self.masks[idx])))
        obj_ids = torch.unique(mask)[1:]  # the first one is the background
        masks = (mask == obj_ids[:, None, None]).to(dtype=torch.uint8)
        boxes = torch.stack([extent(part) for part in masks]) if len(masks) else torch.zeros((0, 4))
        img = torch.from_numpy(img).permute(2, 0, 1)
        img = (img if self.permuted else img.contiguous()).as_subclass(Image)
        boxes = make_boxes(boxes, img.shape[-2:])
        area = (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0])
        labels, iscrowd = torch.ones(len(obj_ids), dtype=torch.int64), torch.zeros(len(obj_ids), dtype=torch.int64)
        return img, dict(boxes=boxes, masks=masks.as_subclass(Mask), labels=labels, image_id=idx, area=area, iscrowd=iscrowd)  # noqa: C408

    def __len__(self):
        return len(self.imgs)


def extent(mask):
    rows, columns = torch.nonzero(mask, as_tuple=True)
    return torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).to(torch.float32)


def random_flip(sample):
    """Flip image, boxes and masks, or not; what was one of the classes remains one."""
    img, target = sample
    if torch.rand(1) >= 0.5:
        return img, target
    boxes = target["boxes"]
    assert (boxes.canvas_size, boxes.format) == (tuple(img.shape[-2:]), BoundingBoxFormat.XYXY)
    flipped = boxes.as_subclass(torch.Tensor).clone()
    flipped[:, [0, 2]] = img.shape[-1] - boxes[:, [2, 0]]
    masks = target["masks"].flip(-1).as_subclass(Mask)
    return img.flip(-1).as_subclass(Image), {**target, "boxes": make_boxes(flipped, boxes.canvas_size), "masks": masks}


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


def main(wrap, folder, flip=False, permuted=False, **options):
    """Collect the batches of three epochs."""
    make(folder)
    dataset = wrap(PennFudanDataset(folder, permuted), **({"transform": random_flip} if flip else {}))
    return epochs(dataset, 4, collate_fn=collate_fn, **options)
