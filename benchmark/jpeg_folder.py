"""The experiment of ``stocache bench`` beside stocaching in the same run: overhead of the first epoch, linearity, exact reads.

    python -m benchmark jpeg_folder overhead --rounds 15
    python -m benchmark jpeg_folder profile
    python -m benchmark jpeg_folder linearity

``overhead``: each round runs the cold epoch without a cache, over an empty stocache and over an empty stocaching, one after the
other, each being first in turn; the figure is the median over the rounds of the ratio to the epoch without a cache in the
same round. ``profile``: where the time goes, in one process: loading a photo, and each step of caching it. ``linearity``: the
sweep over cached fractions, cold and warm.
"""

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset

from benchmark.support.measuring import settle
from benchmark.support.peers import stocaching
from stocache.cache.shared import SharedCache
from stocache.samples.spec import Structure
from stocache.shm.claims import Claims
from stocache.shm.segment import Segment
from stocache.tools import bench

CLAIM = "Filling the cache costs the first epoch at most 3 %; warm time falls in a straight line with the cached share."
NEEDS = (("PIL", '-e ".[bench]"'), ("stocaching", "--no-deps stocaching==0.2.1"))

SIZE = 256
SAMPLE_BYTES = 3 * SIZE * SIZE


def our_cache(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> SharedCache:
    """Return a `SharedCache`."""
    return SharedCache(f"{limit_bytes}B", dataset_len, data_dims)


class CachedPhotos(Dataset[Tensor]):
    """Photos behind a cache with get_slot and set_slot, of which a share has room; counts what it reads."""

    def __init__(self, photos: bench.JpegFolder, share: float, make: Callable[..., Any]) -> None:
        self._photos, count = photos, len(photos)
        self._reads = torch.zeros(count, dtype=torch.int64).share_memory_()
        slots = round(share * count)
        self._cache = make(slots * SAMPLE_BYTES + count, count, (3, SIZE, SIZE)) if slots else None

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


def overhead(paths: list[Path], workers: int, rounds: int) -> None:
    """Print how much longer the first epoch takes when it fills a cache, for ours and for stocaching."""
    making: dict[str, list[float]] = {"stocache": [], "stocaching": []}
    makers = {"stocache": our_cache, "stocaching": stocaching}
    photos = bench.JpegFolder(paths, SIZE)

    def cold_epoch(name: str, seed: int) -> float:
        making_s = 0.0

        def make(photos: bench.JpegFolder, share: float) -> CachedPhotos:
            nonlocal making_s
            start = time.perf_counter()
            cached = CachedPhotos(photos, share, makers[name] if share else our_cache)
            making_s = time.perf_counter() - start
            return cached

        (epoch,) = bench.sweep(
            photos,
            [0.0 if name == "none" else 1.0],
            phases=("cold",),
            workers=workers,
            make=make,
            before_epoch=lambda: prepare(paths),
            seed=seed,
        )
        assert epoch.reads == len(paths)
        if name in making:
            making[name].append(making_s)
        return epoch.seconds - making_s

    names = ["none", "stocache", "stocaching"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            seconds[name].append(cold_epoch(name, number))
    for name in names[1:]:
        ratios = [mine / base - 1 for mine, base in zip(seconds[name], seconds["none"], strict=True)]
        with_making = [ratio + made / base for ratio, made, base in zip(ratios, making[name], seconds["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {workers} | {name} | {statistics.median(seconds['none']):.2f} | {statistics.median(seconds[name]):.2f} "
            f"| {middle:+.1%} | {low:+.1%} to {high:+.1%} | {statistics.median(with_making):+.1%} |",
            flush=True,
        )


def profile(paths: list[Path], rounds: int) -> None:
    """Print the time of loading a photo and of caching it, step by step, in one process without a DataLoader."""
    steps = {"encode": Structure, "to_write": Claims, "_reserve_extents": Segment, "write": Segment, "unlock": Segment}
    spent: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, make in (("stocache", our_cache), ("stocaching", stocaching), ("stocache, step by step", our_cache)):
            prepare(paths)
            cache = make(len(paths) * (SAMPLE_BYTES + 1), len(paths), (3, SIZE, SIZE))
            with contextlib.ExitStack() as patches:
                if "step" in name:
                    for step, owner in steps.items():
                        timer = _timed(getattr(owner, step), spent.setdefault(f"of which {step}", []))
                        patches.enter_context(mock.patch.object(owner, step, timer))
                for idx in random.Random(number).sample(range(len(paths)), len(paths)):
                    start = time.perf_counter()
                    image = bench.load_jpeg(paths[idx], SIZE)
                    loaded = time.perf_counter()
                    cache.get_slot(idx)
                    cache.set_slot(idx, image)
                    spent.setdefault("loading", []).append(loaded - start)
                    spent.setdefault(name, []).append(time.perf_counter() - loaded)
    loading = statistics.fmean(spent["loading"])
    print("| | µs per sample | of loading |\n| --- | ---: | ---: |")
    for name, seconds in spent.items():
        # a step that only some samples take counts by its share
        mean = sum(seconds) / (rounds * len(paths) * (3 if name == "loading" else 1))
        print(f"| {name} | {mean * 1e6:.0f} | {mean / loading:.1%} |")


def _timed(function: Callable[..., object], seconds: list[float]) -> Callable[..., object]:
    def timed(*arguments: object) -> object:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds.append(time.perf_counter() - start)

    return timed


def linearity(paths: list[Path], workers: int, repeats: int) -> None:
    """Print the sweep over cached fractions."""
    epochs = bench.sweep(
        bench.JpegFolder(paths, SIZE),
        workers=workers,
        repeats=repeats,
        make=lambda photos, share: CachedPhotos(photos, share, our_cache),
        before_epoch=lambda: prepare(paths),
    )
    rows = bench.summarize(epochs)
    print(f"\n### {workers} workers\n")
    Console(width=120).print(bench.table(rows))
    r = statistics.correlation(*zip(*((row.fraction, row.warm_s) for row in rows), strict=True))
    print(f"Warm seconds over cached share: R² {r**2:.4f}.", flush=True)
    for row in rows:
        assert row.warm_reads == len(paths) - round(row.fraction * len(paths)), row


def main() -> None:
    """Run the experiment that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("overhead", "profile", "linearity"))
    parser.add_argument("folder", type=Path, nargs="?", help="JPEGs; by default generated photos of 512 x 512")
    parser.add_argument("--repeat-folder", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in a DataLoader worker
    paths = bench.find_jpegs(arguments.folder or bench.photo_folder(1000)) * arguments.repeat_folder
    print(f"{len(paths)} photos, cold pages, 3x256x256 uint8, batches of 32, {arguments.rounds} rounds\n")
    if arguments.experiment == "profile":
        profile(paths, arguments.rounds)
        return
    if arguments.experiment == "overhead":
        print("| workers | cache | epoch without, s | first epoch, s | overhead | quartiles | with making the cache |")
        print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for workers in arguments.workers:
        (overhead if arguments.experiment == "overhead" else linearity)(paths, workers, arguments.rounds)


if __name__ == "__main__":
    main()
