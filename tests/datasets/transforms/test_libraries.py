"""The widest idioms of libraries of random transforms: split or uncached, and equal to the run without a cache."""

import importlib
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stocache import CachedDataset
from stocache.system.describe import describe, difference

N, EPOCHS = 6, 3


def pixels(idx, *shape):
    return np.random.RandomState(idx).randint(0, 256, shape or (24, 24, 3)).astype(np.uint8)


class Made(Dataset):
    """A dataset with transforms as attributes, whose samples a function makes."""

    def __init__(self, make, **transforms):
        self.make = make
        vars(self).update(transforms)

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return self.make(self, idx)


def albumentations():
    library = pytest.importorskip("albumentations", reason="albumentations is not installed")
    transform = library.Compose([library.RandomCrop(16, 16), library.HorizontalFlip(), library.Normalize()], seed=0)

    def make(its, idx):
        out = its.transform(image=pixels(idx), mask=pixels(idx, 24, 24) // 128)
        return torch.from_numpy(out["image"]).permute(2, 0, 1), torch.from_numpy(out["mask"]).long()

    return Made(make, transform=transform)


def kornia():
    library = pytest.importorskip("kornia.augmentation", reason="Kornia is not installed")
    transform = torch.nn.Sequential(library.RandomHorizontalFlip(p=0.5), library.RandomAffine(10.0, p=0.5))
    return Made(lambda its, idx: (its.augment(torch.from_numpy(pixels(idx, 1, 3, 16, 16)) / 255)[0], idx), augment=transform)


def audiomentations():
    library = pytest.importorskip("audiomentations", reason="audiomentations is not installed")
    transform = library.Compose([library.Gain(p=0.5), library.PolarityInversion(p=0.5), library.AddGaussianNoise(p=0.5)])

    def make(its, idx):
        wave = pixels(idx, 800).astype(np.float32) / 255
        return torch.from_numpy(its.transform(samples=wave, sample_rate=8000)).unsqueeze(0)

    return Made(make, transform=transform)


def monai(cls):
    data = pytest.importorskip("monai.data", reason="MONAI is not installed")
    library = pytest.importorskip("monai.transforms")
    steps = [library.EnsureChannelFirstd("image", channel_dim="no_channel"), library.ScaleIntensityd("image")]
    steps += [library.RandRotate90d("image", prob=0.5), library.RandSpatialCropd("image", 8, random_size=False)]
    files = [{"image": pixels(idx, 12, 12, 12).astype(np.float32), "label": idx} for idx in range(N)]
    return getattr(data, cls)(
        files, library.Compose(steps).set_random_state(0), **({"progress": False} if cls[0] == "C" else {})
    )


def torchvision():
    pytest.importorskip("PIL.Image", reason="PIL is not installed")
    vision = importlib.import_module("tests.support.lookalikes")
    transform = vision.Compose([vision.RandomCrop(16), vision.RandomHorizontalFlip(), vision.ToTensor()])

    return Made(lambda its, idx: (its.transform(vision.Image.fromarray(pixels(idx))) * 2 - 1, idx), transform=transform)


ROWS = {
    "albumentations": (albumentations, "split"), "Kornia": (kornia, "split"), "audiomentations": (audiomentations, "split"),
    "MONAI": (lambda: monai("Dataset"), "split"), "MONAI CacheDataset": (lambda: monai("CacheDataset"), None),
    "torchvision": (torchvision, "split"),
}  # fmt: skip


def epochs(dataset):
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    loader = DataLoader(dataset, 3, shuffle=True, collate_fn=list)
    return [[describe(sample, strides=False) for batch in loader for sample in batch] for _ in range(EPOCHS)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", ROWS)
def test_idioms_of_libraries_are_split_or_uncached(name):
    make, way = ROWS[name]
    expected = epochs(make())
    assert len({repr(sorted(map(repr, epoch))) for epoch in expected}) == EPOCHS  # it is random
    with CachedDataset(make(), 1) as cached:
        assert difference(expected, epochs(cached)) is None
        assert way in (None, "uncached" if cached.stats().left else "split" if cached._has_rest else "cached")
