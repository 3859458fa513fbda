"""The experiment of ``stocache bench`` beside stocaching in the same run: overhead of the first epoch, linearity, exact reads.

Photos are read cold, resized to 3x256x256 uint8, and come in batches of 32, shuffled, with workers that are kept.
"""

import operator
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmark.support.datasets import PHOTO
from benchmark.support.harness import Figures, Run, experiment
from benchmark.support.measuring import settle
from benchmark.support.peers import stocaching
from stocache.cache.shared import SharedCache
from stocache.tools import bench

CLAIM = "Filling the cache costs the first epoch at most 3 %; warm time falls in a straight line with the cached share."

SAMPLE_BYTES = 3 * PHOTO * PHOTO


def our_cache(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> SharedCache:
    """Return a `SharedCache`."""
    return SharedCache(f"{limit_bytes}B", dataset_len, data_dims)


class CachedPhotos(Dataset[Tensor]):
    """Photos behind a cache with get_slot and set_slot, of which a share has room; counts what it reads."""

    def __init__(self, make: Callable[..., Any], photos: bench.JpegFolder, share: float) -> None:
        began = time.perf_counter()
        self._photos, count = photos, len(photos)
        self._reads = torch.zeros(count, dtype=torch.int64).share_memory_()
        slots = round(share * count)
        self._cache = make(slots * SAMPLE_BYTES + count, count, (3, PHOTO, PHOTO)) if slots else None
        self.making_s = time.perf_counter() - began

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, idx: int) -> Tensor:
        image: Tensor | None = self._cache.get_slot(idx) if self._cache is not None else None
        if image is None:
            self._reads[idx] += 1
            image = self._photos[idx]
            if self._cache is not None:
                self._cache.set_slot(idx, image)
        return image

    def count_reads(self, epochs: int) -> int:
        """Return how many photos were read."""
        return int(self._reads.sum())

    def close(self) -> None:
        """Close the cache, if it can be closed."""
        if isinstance(self._cache, SharedCache):
            self._cache.close()


def prepare(paths: list[Path]) -> None:
    """Drop the files from the page cache, and make sure that memory for the cache is there before the clock starts."""
    bench.drop_pages(paths)
    settle(len(paths) * SAMPLE_BYTES * 3 // 2)


def cold_epoch(paths: list[Path], workers: int, make_cache: Callable[..., Any] | None, making: list[float]) -> float:
    """Return the seconds of a cold epoch; note the seconds of making its cache apart from them."""
    made: list[CachedPhotos] = []

    def make(photos: bench.JpegFolder, share: float) -> CachedPhotos:
        made.append(CachedPhotos(make_cache or our_cache, photos, share))
        return made[-1]

    (epoch,) = bench.sweep(
        bench.JpegFolder(paths, PHOTO),
        [0.0 if make_cache is None else 1.0],
        phases=("cold",),
        workers=workers,
        make=make,
        before_epoch=partial(prepare, paths),
        seed=len(making),
    )
    assert epoch.reads == len(paths)
    making.append(made[0].making_s)
    return epoch.seconds - making[-1]


@experiment(rounds=15, needs="stocaching")
def overhead(run: Run) -> None:
    """How much longer the first epoch takes when it fills a cache, for ours and for stocaching."""
    torch.set_num_threads(1)  # as in a DataLoader's worker
    paths = run.photos(1000)[: run.size(None, 100)]
    makers = {"none": None, "stocache": our_cache, "stocaching": stocaching}
    table = run.table("workers", "cache", "epoch without, s", "first epoch, s", "to without", "with making the cache")
    for workers in run.size((0, 1, 2, 4), (2,)):
        making: dict[str, list[float]] = {name: [] for name in makers}
        took = run.turns(
            {name: partial(cold_epoch, paths, workers, make, making[name]) for name, make in makers.items()}, warm_up=0
        )
        for name in ("stocache", "stocaching"):
            both = Figures({name: list(map(operator.add, took[name], making[name])), "none": took["none"]})
            table.row(
                workers, name, took.median("none"), took.median(name), took.spread(name, "none"), both.ratio(name, "none")
            )
    ratios = table.column("to without", cache="stocache")
    run.claim("filling costs 3 %, the median over the numbers of workers", statistics.median(ratios), most=1.03)


@experiment(rounds=2)
def linearity(run: Run) -> None:
    """Cold and warm epochs over the cached share."""
    torch.set_num_threads(1)
    paths = run.photos(1000)[: run.size(None, 100)]
    table = run.table("workers", "cached", "reads", "cold, samples/s", "warm, samples/s")
    straight, exact = [], True
    for workers in run.size((0, 1, 2, 4), (0,)):
        epochs = bench.sweep(
            bench.JpegFolder(paths, PHOTO),
            workers=workers,
            repeats=run.rounds,
            make=partial(CachedPhotos, our_cache),
            before_epoch=partial(prepare, paths),
        )
        rows = bench.summarize(epochs)
        for row in rows:
            table.row(workers, f"{row.fraction:.0%}", row.warm_reads, row.cold_per_s, row.warm_per_s)
        r = statistics.correlation([row.fraction for row in rows], [row.warm_s for row in rows])
        straight.append(r**2)
        exact &= all(row.warm_reads == len(paths) - round(row.fraction * len(paths)) for row in rows)
    run.claim("warm time falls in a straight line (R²)", min(straight), least=0.99)
    run.claim("reads are those of samples that are not cached", exact)
