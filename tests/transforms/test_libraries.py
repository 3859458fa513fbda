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


def albumentations_with_boxes():
    library = pytest.importorskip("albumentations", reason="albumentations is not installed")
    boxes = library.BboxParams(format="pascal_voc", label_fields=["labels"])
    transform = library.Compose([library.HorizontalFlip(p=0.5), library.RandomBrightnessContrast()], boxes, seed=0)

    def make(its, idx):
        out = its.transform(
            image=pixels(idx), bboxes=[[1, 2, 9, 12], [3, 3, 20, 20]][: 1 + idx % 2], labels=[1, 2][: 1 + idx % 2]
        )
        target = {"boxes": torch.as_tensor(out["bboxes"]), "labels": torch.as_tensor(out["labels"])}
        return torch.from_numpy(out["image"].transpose(2, 0, 1)), target

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


def torchio():
    library = pytest.importorskip("torchio", reason="torchio is not installed")
    scans = [library.Subject(scan=library.ScalarImage(tensor=torch.from_numpy(pixels(idx, 1, 8, 8, 8)))) for idx in range(N)]
    return library.SubjectsDataset(scans, transform=library.Compose([library.RandomFlip(axes=0), library.RandomNoise()]))


def graphs():
    library = pytest.importorskip("torch_geometric.transforms", reason="torch_geometric is not installed")
    from torch_geometric.data import Data

    def make(its, idx):
        return its.transform(Data(pos=torch.from_numpy(pixels(idx, 9, 3)).float(), y=idx))

    return Made(make, transform=library.Compose([library.RandomJitter(0.1), library.RandomFlip(0)]))


def torchvision(joint):
    pytest.importorskip("PIL.Image", reason="PIL is not installed")
    vision = importlib.import_module("tests.support.lookalikes")
    transform = vision.Compose([vision.RandomCrop(16), vision.RandomHorizontalFlip(), vision.ToTensor()])

    def make(its, idx):
        image, mask = vision.Image.fromarray(pixels(idx)), vision.Image.fromarray(pixels(idx, 24, 24))
        if not joint:
            return its.transform(image) * 2 - 1, idx
        if random.random() < 0.5:  # in code, so that image and mask are flipped alike
            image, mask = (each.transpose(vision.Image.Transpose.FLIP_LEFT_RIGHT) for each in (image, mask))
        return torch.from_numpy(np.asarray(image).copy()), torch.from_numpy(np.asarray(mask).copy())

    return Made(make, **({} if joint else {"transform": transform}))


def opencv():
    library = pytest.importorskip("cv2", reason="OpenCV is not installed")
    flip = lambda image: library.flip(image, 1) if random.random() < 0.5 else image
    return Made(lambda its, idx: library.resize(its.transform(pixels(idx)), (12, 12)), transform=flip)


PICKLED = {"allow_pickle": True}
ROWS = {
    "albumentations": (albumentations, "split", {}), "boxes": (albumentations_with_boxes, "split", {}),
    "Kornia": (kornia, "split", {}),
    "audiomentations": (audiomentations, "split", {}), "MONAI": (lambda: monai("Dataset"), "split", {}),
    "MONAI CacheDataset": (lambda: monai("CacheDataset"), None, {}), "torchio": (torchio, "split", PICKLED),
    "torch_geometric": (graphs, "split", PICKLED), "torchvision": (lambda: torchvision(False), "split", {}),
    "joint in code": (lambda: torchvision(True), "uncached", {}), "OpenCV": (opencv, "uncached", {}),
}  # fmt: skip


def epochs(dataset):
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    loader = DataLoader(dataset, 3, shuffle=True, collate_fn=list)
    return [[describe(sample, strides=False) for batch in loader for sample in batch] for _ in range(EPOCHS)]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", ROWS)
def test_idioms_of_libraries_are_split_or_uncached(name):
    make, way, options = ROWS[name]
    expected = epochs(make())
    assert len({repr(sorted(map(repr, epoch))) for epoch in expected}) == EPOCHS  # it is random
    with CachedDataset(make(), 1, **options) as cached:
        assert difference(expected, epochs(cached)) is None
        assert way in (None, "uncached" if cached.stats().left else "split" if cached._has_rest else "cached")
