"""Photographs with random crops: `CachedDataset` beside MONAI's CacheDataset and the transforms alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import monai.data
import monai.transforms
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import epoch_s
from stocache import CachedDataset, DataLoader
from tests.support.lookalikes import ImageFolder, pil_loader, training

CLAIM = "Random crops over cached photographs run near the speed of the transforms alone."


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


@experiment(rounds=7)
def rates(run: Run) -> None:
    """Images per second of warm epochs, each photograph four times."""
    torch.set_num_threads(1)
    samples = [(str(path), number % 10) for number, path in enumerate(run.photos(160)[: run.size(160, 24)] * 4)]
    transform = training(224)
    images = {path: pil_loader(path) for path, _ in samples}
    in_memory = Made(len(samples), lambda idx: (transform(images[samples[idx][0]]), samples[idx][1]))
    plain = ImageFolder(transform=transform, samples=samples)
    steps = monai.transforms.Compose([Load(), Augment(transform)], map_items=False)
    of_monai = monai.data.CacheDataset(samples, steps, num_workers=1, progress=False)
    with CachedDataset(plain, 4) as decoded, CachedDataset(plain, 4, store="encoded") as encoded:
        contenders: dict[str, tuple[Callable[..., Any], Any]] = {
            "the transforms alone, of images in memory": (DataLoader, in_memory),
            "the transforms alone, torch's loader": (TorchDataLoader, in_memory),
            "the dataset, uncached, torch's loader": (TorchDataLoader, plain),
            "`CachedDataset`": (DataLoader, decoded),
            "`CachedDataset`, torch's loader": (TorchDataLoader, decoded),
            '`CachedDataset(store="encoded")`': (DataLoader, encoded),
            "MONAI's CacheDataset, torch's loader": (TorchDataLoader, of_monai),
        }
        limit = next(iter(contenders))
        table = run.table("loader", "workers", "images/s", "of the transforms alone")
        for workers in (2, 0):
            options = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
            loaders = {
                name: make(dataset, 32, shuffle=True, num_workers=workers, **options)
                for name, (make, dataset) in contenders.items()
            }
            # until each worker has touched most of the cache
            took = run.turns({name: partial(epoch_s, loader) for name, loader in loaders.items()}, warm_up=4)
            for name in took:
                table.row(name, workers, len(samples) / took.median(name), took.ratio(limit, name))
            del loaders
        sizes = [cached.cache.stats().slot_bytes / 1e3 for cached in (decoded, encoded)]
    shares = table.column("of the transforms alone", loader="`CachedDataset`")
    run.claim("crops are as fast as the transforms alone", min(shares), least=0.8)
    print(f"\nA sample takes {sizes[0]:,.0f} KB decoded, {sizes[1]:,.0f} KB encoded.")
