"""The plain torchvision style: an ImageFolder over photographs, split at random into train and val, transforms inside."""

import os
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from tests.programs.running import run
from tests.support.lookalikes import (
    CenterCrop,
    Compose,
    ImageFolder,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

SIZE = 96


def jitter(image):
    """Change the brightness, with the generator of numpy, and flip, with that of Python."""
    image = image.mul(np.random.uniform(0.6, 1.4)).clamp_(0, 1)
    return image.flip(-1) if random.random() < 0.5 else image


TRAIN = Compose(
    [
        Resize(SIZE),
        RandomResizedCrop(64),
        RandomHorizontalFlip(),
        ToTensor(),
        jitter,
        Normalize([0.485, 0.456, 0.406], [0.2] * 3),
    ]
)
VAL = Compose([Resize(SIZE), CenterCrop(64), ToTensor(), Normalize([0.485, 0.456, 0.406], [0.2] * 3)])


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main(wrap, folder, num_workers=0, start_method="fork", **options):
    """Collect the batches of three epochs of training and validation."""
    if not (folder / "train").exists():
        for photo in sorted(Path(os.environ["STOCACHE_TEST_PHOTOS"]).glob("*.JPEG")):
            name = photo.stem.split("_")[-1][0].lower()
            (folder / "train" / name).mkdir(parents=True, exist_ok=True)
            (folder / "train" / name / photo.name).symlink_to(photo)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    whole = ImageFolder(folder / "train", transform=TRAIN), ImageFolder(folder / "train", transform=VAL)
    indices = torch.randperm(len(whole[0]), generator=generator).tolist()
    datasets = [wrap(Subset(whole[0], indices[:128]), **options), wrap(Subset(whole[1], indices[128:]), **options)]
    loaders = [
        DataLoader(
            dataset,
            batch_size=32,
            shuffle=dataset is datasets[0],
            num_workers=num_workers,
            worker_init_fn=seed_worker,
            generator=generator,
            multiprocessing_context=start_method if num_workers else None,
            persistent_workers=num_workers > 0,
        )
        for dataset in datasets
    ]
    return [list(loader) for epoch in range(3) for loader in loaders]


if __name__ == "__main__":
    run(main)
