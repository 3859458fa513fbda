"""Photographs with random crops: `CachedDataset` beside MONAI's CacheDataset and a cache written by hand.

python -m benchmark augment FOLDER [workers]    images per second of warm epochs
python -m benchmark augment FOLDER training     the losses of a small network, with the cache and without
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.data
import monai.transforms
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from stocache import CachedDataset, DataLoader
from tests.support.lookalikes import ImageFolder, pil_loader, training

CLAIM = "Random crops over cached photographs run near the speed of the transforms alone, with the same losses."
NEEDS = (("monai", '-e ".[test]"'),)

COPIES, BATCH, SIZE, ROUNDS = 4, 32, 224, 7


def photos(folder: str) -> list[tuple[str, int]]:
    """Return the paths of the photographs, each several times, with numbers for labels."""
    paths = sorted(str(path) for path in Path(folder).iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
    return [(path, number % 10) for number, path in enumerate(paths * COPIES)]


class Decoded(Dataset[Any]):
    """The transforms alone: all images are objects in memory."""

    def __init__(self, samples: list[tuple[str, int]], transform: Any) -> None:
        images = {path: pil_loader(path) for path, _ in samples}
        self.images, self.transform = [(images[path], label) for path, label in samples], transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, idx: int) -> Any:
        image, label = self.images[idx]
        return self.transform(image), label


class ByHand(Dataset[Any]):
    """A cache by hand: each worker keeps its decoded images in a dict."""

    def __init__(self, samples: list[tuple[str, int]], transform: Any) -> None:
        self.samples, self.transform, self.kept = samples, transform, {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> Any:
        path, label = self.samples[idx]
        if idx not in self.kept:
            self.kept[idx] = pil_loader(path)
        return self.transform(self.kept[idx]), label


class Load(monai.transforms.Transform):
    """The deterministic step."""

    def __call__(self, sample: Any) -> Any:
        """Return the image and its label."""
        return pil_loader(sample[0]), sample[1]


class Augment(monai.transforms.RandomizableTransform):
    """The random steps."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    def __call__(self, sample: Any) -> Any:
        """Return the image, transformed, and its label."""
        return self.transform(sample[0]), sample[1]


def throughput(folder: str, workers: int) -> None:
    """Print the table of images per second."""
    samples, transform = photos(folder), training(SIZE)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
    options |= {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    decoded = CachedDataset(ImageFolder(transform=transform, samples=samples), 4)
    encoded = CachedDataset(ImageFolder(transform=transform, samples=samples), 4, store="encoded")
    steps = monai.transforms.Compose([Load(), Augment(transform)], map_items=False)
    cache_dataset = monai.data.CacheDataset(samples, steps, num_workers=1, progress=False)
    loaders: dict[str, Callable[[], Any]] = {
        "the transforms alone, of images in memory": lambda: DataLoader(Decoded(samples, transform), **options),
        "the transforms alone, torch's loader": lambda: TorchDataLoader(Decoded(samples, transform), **options),
        "the dataset, uncached, torch's loader": lambda: TorchDataLoader(
            ImageFolder(transform=transform, samples=samples), **options
        ),
        "`CachedDataset`": lambda: DataLoader(decoded, **options),
        "`CachedDataset`, torch's loader": lambda: TorchDataLoader(decoded, **options),
        '`CachedDataset(store="encoded")`': lambda: DataLoader(encoded, **options),
        "MONAI's CacheDataset, torch's loader": lambda: TorchDataLoader(cache_dataset, **options),
        "by hand, a dict in each worker, torch's loader": lambda: TorchDataLoader(ByHand(samples, transform), **options),
    }
    running = {name: make() for name, make in loaders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for number in range(ROUNDS + 4):  # each worker fills a dict of its own
        for name, loader in running.items():
            began = time.perf_counter()
            for images, _ in loader:
                assert images.shape[1:] == (3, SIZE, SIZE)
            if number >= 4:
                seconds[name].append(time.perf_counter() - began)
    limit = statistics.median(seconds["the transforms alone, of images in memory"])
    print(f"| {workers} workers | images/s | of the transforms alone |\n| --- | ---: | ---: |")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"| {name} | {len(samples) / median:,.0f} | {limit / median:.2f} |")
    sizes = [cached.cache.stats().slot_bytes / 1e3 for cached in (decoded, encoded)]
    print(f"\nA sample takes {sizes[0]:,.0f} KB decoded, {sizes[1]:,.0f} KB encoded.")
    del running
    decoded.close()
    encoded.close()


def losses(samples: list[tuple[str, int]], cached: bool, workers: int) -> list[float]:
    """Train a small network for 5 epochs; return the loss of each step."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 16, 7, 4), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 5, 4), torch.nn.ReLU()),
        *(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    dataset: Any = ImageFolder(transform=training(96), samples=samples)
    if cached:
        dataset = CachedDataset(dataset, 4)
    context = "fork" if workers else None
    loader = TorchDataLoader(dataset, BATCH, shuffle=True, num_workers=workers, multiprocessing_context=context)
    found = []
    for _ in range(5):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def compare(folder: str) -> None:
    """Print the table of losses."""
    samples = photos(folder)
    print("| workers | steps | with the same loss | first and last loss |\n| ---: | ---: | ---: | --- |")
    for workers in (0, 2):
        plain, cached = (losses(samples, its, workers) for its in (False, True))
        same = sum(one == other for one, other in zip(plain, cached, strict=True))
        print(f"| {workers} | {len(plain)} | {same} | {cached[0]:.6f}, {cached[-1]:.6f} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if sys.argv[2:] == ["training"]:
        compare(sys.argv[1])
    else:
        throughput(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 2)
