"""Segmentation as with albumentations: an image and a mask, changed together, returned in a dict."""

import os

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network

import albumentations as A
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tests.programs.running import run


class Segmentation(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 48

    def __getitem__(self, idx):
        image = np.random.default_rng(idx).integers(0, 256, (60 + idx, 70, 3), dtype=np.uint8)
        mask = (image[..., 0] > 128).astype(np.uint8)
        augmented = self.transform(image=image, mask=mask)
        return {"image": augmented["image"], "mask": augmented["mask"], "name": str(idx)}


def main(wrap, folder, num_workers=0, start_method="fork"):
    """Collect the batches of three epochs."""
    transform = A.Compose(
        [
            A.LongestMaxSize(64),
            A.PadIfNeeded(64, 64),
            A.RandomCrop(48, 48),
            A.HorizontalFlip(p=0.5),
            A.RandomBrightnessContrast(p=0.5),
            A.Normalize(),
            A.ToTensorV2(),
        ],
        seed=7,
    )
    dataset = wrap(Segmentation(transform))
    torch.manual_seed(0)
    context = start_method if num_workers else None
    options = {"num_workers": num_workers, "multiprocessing_context": context, "persistent_workers": context == "spawn"}
    loader = DataLoader(dataset, 8, shuffle=True, **options)
    return [list(loader) for epoch in range(3)]


if __name__ == "__main__":
    run(main)
