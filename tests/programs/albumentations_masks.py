"""Segmentation as with albumentations: an image and a mask, changed together, returned in a dict."""

import os

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network

import albumentations as A
import numpy as np
from torch.utils.data import Dataset

from tests.programs.running import epochs


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


def main(wrap, folder, **options):
    """Collect the batches of three epochs."""
    steps = [A.LongestMaxSize(64), A.PadIfNeeded(64, 64), A.RandomCrop(48, 48), A.HorizontalFlip(p=0.5)]
    steps += [A.RandomBrightnessContrast(p=0.5), A.Normalize(), A.ToTensorV2()]
    return epochs(wrap(Segmentation(A.Compose(steps, seed=7))), **options)
