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

from benchmark.support.datasets import PHOTO
from benchmark.support.harness import Figures, Run, experiment
from benchmark.support.measuring import settle
from benchmark.support.peers import OverSlots, stocaching
from stocache.cache.shared import SharedCache
from stocache.tools import bench

CLAIM = "Filling the cache costs the first epoch at most 3 %; warm time falls in a straight line with the cached share."

SAMPLE_BYTES = 3 * PHOTO * PHOTO


def our_cache(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> SharedCache:
    """Return a `SharedCache`."""
    return SharedCache(f"{limit_bytes}B", dataset_len, data_dims)


class Photos(bench.JpegFolder):
    """Photos, which count how often they are read."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths, PHOTO)
        self.reads = torch.zeros(len(paths), dtype=torch.int64).share_memory_()

    def __getitem__(self, idx: int) -> Tensor:
        self.reads[idx] += 1
        return super().__getitem__(idx)


class CachedPhotos(OverSlots):
    """Photos behind a cache that has room for a share of them."""

    def __init__(self, make: Callable[..., Any], photos: Photos, share: float) -> None:
        began, count = time.perf_counter(), len(photos)
        limit = round(share * count) * SAMPLE_BYTES + count if share else 0
        super().__init__(photos, make(limit, count, (3, PHOTO, PHOTO)), labels=False)
        self.making_s = time.perf_counter() - began
        photos.reads.zero_()

    def count_reads(self, epochs: int) -> int:
        """Return how many photos were read."""
        return int(self.source.reads.sum())

    def close(self) -> None:
        """Close the cache, if it can be closed."""
        if isinstance(self.cache, SharedCache):
            self.cache.close()


def prepare(paths: list[Path]) -> None:
    """Drop the files from the page cache, and make sure that memory for the cache is there before the clock starts."""
    bench.drop_pages(paths)
    settle(len(paths) * SAMPLE_BYTES * 3 // 2)


def cold_epoch(paths: list[Path], workers: int, make_cache: Callable[..., Any] | None, making: list[float]) -> float:
    """Return the seconds of a cold epoch; note the seconds of making its cache apart from them."""
    made: list[CachedPhotos] = []

    def make(photos: Photos, share: float) -> CachedPhotos:
        made.append(CachedPhotos(make_cache or our_cache, photos, share))
        return made[-1]

    (epoch,) = bench.sweep(
        Photos(paths),
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
            Photos(paths),
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
