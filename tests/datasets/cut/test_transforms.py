"""A program is cut in its first random transform: the deterministic beginning runs before the cache, the rest after it.

Every sample of every epoch is that of the dataset without a cache, bit for bit, and so are the random numbers.
"""

import logging
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset

from stocache import CachedDataset, DatasetError, LimitError, deterministic, split_transforms
from stocache.datasets.transforms.pipelines import open_pipeline
from stocache.system.describe import describe, difference
from tests.support.epochs import EPOCHS, difference_of, epochs

pytest.importorskip("PIL.Image", reason="PIL is not installed")
from PIL import Image

from tests.support import lookalikes as vision
from tests.support.lookalikes import CenterCrop, Compose, ImageFolder, PILToTensor, RandomCrop, Resize, ToTensor, training

N = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(N):
        (root / f"class{number % 3}").mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (30 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"class{number % 3}" / f"{number:02}.png")
    return root


def middle(size=16):
    """Deterministic, random, deterministic."""
    return Compose([Resize(24), CenterCrop(20), RandomCrop(size), vision.RandomHorizontalFlip(), ToTensor()])


NORMALIZE = vision.Normalize([0.5] * 3, [0.2] * 3)


def plus_noise(target):
    return target + random.random()


def augment(image):
    return middle()(image)


class Detection(vision.VisionDataset):
    """Images with boxes, whose ``transforms`` take both."""

    def __len__(self):
        return N

    def __getitem__(self, idx):
        image = Image.fromarray((np.arange((20 + idx) * 90).reshape(-1, 30, 3) + idx).astype(np.uint8))
        return self.transforms(image, {"boxes": torch.tensor([[1.0, 2.0, 8.0, 9.0]]) + idx})


class Transformed(Dataset):
    """What people write to give the parts of a split transforms of their own."""

    def __init__(self, subset, transform):
        self.subset, self.tfm = subset, transform

    def __len__(self):
        return len(self.subset)

    def __getitem__(self, idx):
        image, target = self.subset[idx]
        return (image if self.tfm is None else self.tfm(image)), target


MADE = {
    "training": lambda folder: ImageFolder(folder, training(16)),
    "middle": lambda folder: ImageFolder(folder, middle()),
    "target": lambda folder: ImageFolder(folder, middle(), target_transform=plus_noise),
    "opaque": lambda folder: ImageFolder(folder, augment),
    "joint": lambda _: Detection(vision.JointCompose([vision.ToImage(), vision.RandomVerticalFlip()])),
    "parts": lambda folder: Transformed(ImageFolder(folder, Compose([Resize(24), RandomCrop(20)])), training(16)),
    "concatenated": lambda folder: ConcatDataset([ImageFolder(folder, middle()), ImageFolder(folder, training(16))]),
}


def check(cached, plain, loader="torch"):
    """Demand the samples and the random numbers of the dataset without a cache."""
    assert difference_of(epochs(plain, loader), epochs(cached, loader)) is None


def kind_of_cached(cached):
    """Return the class of the first image, or tensor, in the part of a sample that is cached."""
    parts = [next(filter(None, map(cached.cache.get_slot, range(N))))]
    for part in parts:
        if isinstance(part, Image.Image | torch.Tensor):
            return type(part)
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, tuple | list) else ()
    raise AssertionError(parts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "loader"), [*((name, "torch") for name in MADE), ("concatenated", "torch, 2 workers")])
def test_samples_and_random_numbers_are_those_without_a_cache(name, loader, folder, caplog):
    dataset = MADE[name](folder)
    before = describe(dataset)
    with CachedDataset(dataset, 0.1) as cached:
        assert difference(before, describe(dataset)) is None
        check(cached, MADE[name](folder), loader)
        total, probed = cached.stats().total, min(8, len(cached))
        assert (total.misses, total.hits, total.rejected) == (len(dataset), (EPOCHS - 1) * len(dataset) + probed, 0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_transform_with_an_equal_beginning_keeps_what_is_cached_and_others_begin_anew(folder):
    with CachedDataset(ImageFolder(folder, middle()), 0.1) as cached:
        cached.warm(progress=False)
        cached.transform = Compose([Resize(24), CenterCrop(20), RandomCrop(8), PILToTensor()])  # of equal steps, not the same
        assert cached[0][0].shape == (3, 8, 8)
        assert cached.stats().total.filled == N
        for other in (Compose([Resize(28), RandomCrop(8)]), None, augment):
            cached.transform = other
            assert cached.stats().total.filled < N
            check(cached, ImageFolder(folder, other))
        cached.dataset.transform = training(16)  # behind the cache
        check(cached, MADE["training"](folder))
    dataset = ImageFolder(folder, middle())
    with CachedDataset(dataset, 0.1, name="fixed", on_change="raise") as cached:
        before, way = dataset.transform, "set everything that samples depend on before CachedDataset"
        with pytest.raises(DatasetError, match=f"a transform of ImageFolder was set.*{way}"):
            cached.transform = training(16)
        assert dataset.transform is before


FIXED = [Resize(24), CenterCrop(20), ToTensor(), NORMALIZE]
FLOATS = 20 * 20 * 3 * 4 * N
TENSOR, IMAGE, LESS = torch.Tensor, Image.Image, f"{FLOATS * 6 // 10}B"


@pytest.mark.parametrize(
    ("cut", "limit", "kind"), [(None, 1, TENSOR), ("latest", LESS, TENSOR), ("smallest", 1, IMAGE), (None, LESS, IMAGE)]
)
def test_the_cut_is_the_latest_while_everything_fits(cut, limit, kind, folder, caplog, monkeypatch):
    monkeypatch.setattr("stocache.datasets.cut.planning._NEGLIGIBLE_S", 1.0)  # a busy machine measures more than there is
    caplog.set_level(logging.INFO)
    with CachedDataset(ImageFolder(folder, Compose(FIXED)), limit, cut=cut) as cached:
        assert issubclass(kind_of_cached(cached), kind)
        check(cached, ImageFolder(folder, Compose(FIXED)))
        assert (cached.stats().total.filled == N) == (cut != "latest")
    lines = [record.message for record in caplog.records if record.message.startswith("cached: ")]
    if kind is Image.Image:
        assert "ImageFolder.__getitem__, Resize, CenterCrop; run each time: " in lines[0]
        assert re.search(r"ToTensor, Normalize \(1\.\d KiB a sample, saves", lines[0])


@pytest.mark.linux
@pytest.mark.parametrize("loader", ["torch", "torch, 2 workers"])
def test_encoded_files_are_decoded_after_the_cache(folder, loader):
    with CachedDataset(MADE["training"](folder), 0.1, store="encoded") as cached:
        (state,) = [part for name, part in cached.cache.get_slot(0).items() if "inner" in name]
        assert state["args"] == (Path(cached.samples[0][0]).read_bytes(),)
        check(cached, MADE["training"](folder), loader)
        assert cached.stats().total.misses == N
    CachedDataset(MADE["training"](folder), 0, store="encoded").close()  # which caches nothing, and raises no error
    for dataset in ([torch.zeros(3)] * 4, MADE["joint"](folder)):
        with pytest.raises(DatasetError, match=r"store='encoded' is for datasets that load each file by an attribute `loader`"):
            CachedDataset(dataset, 0.1, store="encoded")


def test_another_beginning_is_another_cache_and_another_end_is_the_same(folder):
    options = {"name": "split", "fingerprint": "v1"}
    with CachedDataset(ImageFolder(folder, middle()), 0.1, **options) as first:
        first.warm(progress=False)
        fixed = Compose([*middle().transforms[:2], ToTensor()])  # which would be cut elsewhere by itself
        with CachedDataset(ImageFolder(folder, fixed), 0.1, **options) as second:
            assert second.stats().total.filled == N
            assert issubclass(kind_of_cached(second), Image.Image)
            check(second, ImageFolder(folder, fixed))
        other = Compose([Resize(26), *middle().transforms[1:]])
        with pytest.raises(ValueError, match="before the cache: #"):
            CachedDataset(ImageFolder(folder, other), 0.1, **options)


@pytest.mark.linux
@pytest.mark.parametrize("options", [{"probe": 0}, {"example": (torch.zeros(3, 16, 16), 0)}])
def test_without_a_probe_nothing_is_cut(options, folder, caplog):
    with CachedDataset(ImageFolder(folder, training(16)), 0.1, **options) as cached:
        check(cached, MADE["training"](folder))
    assert "random numbers are drawn to load sample" in caplog.text
    with pytest.raises(LimitError, match="store='encoded' is for samples that are probed"):
        CachedDataset(ImageFolder(folder), 0.1, store="encoded", probe=0)


def test_split_transforms_cuts_at_the_first_random_step():
    for transform, before, after in (
        (middle(), 2, 3), (vision.StandardTransform(middle(), None), 0, 1), (Compose([]), 0, 0),
        (Compose([Resize(4), ToTensor(), NORMALIZE]), 3, 0), (deterministic(lambda image: image), 1, 0),
        (torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout()), 1, 1), ((np.asarray, torch.from_numpy, augment), 2, 1),
        (Compose([Compose([Resize(4), Compose([RandomCrop(2)])]), ToTensor()]), 1, 2),
        ([vision.Lambda(float), vision.Lambda(augment)], 1, 1),
    ):  # fmt: skip
        parts = split_transforms(transform)
        assert all(map(callable, parts))
        assert [len(open_pipeline(part).steps) for part in parts] == [before, after]
