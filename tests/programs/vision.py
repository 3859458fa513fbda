"""The plain torch vision style: an ImageFolder over photographs, resized before the cache and augmented after it."""

import os
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tests.programs.running import run

SIZE = 96


class ImageFolder(Dataset):
    """As torchvision's: one folder for each class."""

    def __init__(self, root, transform=None, target_transform=None):
        self.root = root
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = [
            (str(path), self.class_to_idx[name]) for name in self.classes for path in sorted((root / name).iterdir())
        ]
        self.targets = [target for _, target in self.samples]
        self.transform, self.target_transform = transform, target_transform

    def __getitem__(self, index):
        path, target = self.samples[index]
        with open(path, "rb") as f:
            sample = Image.open(f).convert("RGB")
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target

    def __len__(self):
        return len(self.samples)


def resize(image):
    """Resize the shorter side, and cut out the middle: uint8 of (3, SIZE, SIZE)."""
    scale = SIZE / min(image.size)
    image = image.resize((max(SIZE, round(image.width * scale)), max(SIZE, round(image.height * scale))))
    left, top = (image.width - SIZE) // 2, (image.height - SIZE) // 2
    image = image.crop((left, top, left + SIZE, top + SIZE))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def augment_image(image):
    """Flip, cut out, change the brightness, normalise: with the generators of Python, numpy and torch."""
    if random.random() < 0.5:
        image = image.flip(-1)
    top, left = torch.randint(0, SIZE - 64 + 1, (2,)).tolist()
    image = image[:, top : top + 64, left : left + 64].float().div(255)
    image = image.mul_(np.random.uniform(0.6, 1.4)).clamp_(0, 1)
    return image.sub_(0.45).div_(0.225)


def augment(sample):
    image, target = sample
    return augment_image(image), target


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main(wrap, folder, num_workers=0, start_method="fork", by_part=False):
    """Collect the batches of three epochs."""
    if not (folder / "train").exists():
        for photo in sorted(Path(os.environ["STOCACHE_TEST_PHOTOS"]).glob("*.JPEG")):
            name = photo.stem.split("_")[-1][0].lower()
            (folder / "train" / name).mkdir(parents=True, exist_ok=True)
            (folder / "train" / name / photo.name).symlink_to(photo)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    dataset = ImageFolder(folder / "train", transform=resize)
    dataset = wrap(dataset, transform={0: augment_image} if by_part else augment)
    loader = DataLoader(
        dataset,
        batch_size=32,
        shuffle=True,
        num_workers=num_workers,
        worker_init_fn=seed_worker,
        generator=generator,
        multiprocessing_context=start_method if num_workers else None,
        persistent_workers=num_workers > 0,
    )
    return [list(loader) for epoch in range(3)]


if __name__ == "__main__":
    run(main)
