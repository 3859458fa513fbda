"""Measure epochs over a dataset, cold and warm, at several cached fractions: the experiment of stocaching.

The dataset is the user's, or a folder of JPEGs, each decoded with Pillow and resized to a uint8 tensor. For each fraction, a
new cache serves a cold epoch, which fills it, and a warm epoch, which reads from it. Needs the extra ``bench``.
Source of the experiment: C. Jones, "Eliminating Dataloading Bottlenecks in PyTorch with Stochastic Caching", 2023.
"""

import csv
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from stocache.cache.shared import SharedCache
from stocache.cli.dataset import PartlyCached, collate_or_list, collate_values
from stocache.loader.threads.loading import would_stall
from stocache.preparation.images import load_jpeg
from stocache.system.objects import TorchLoader

CacheMaker = Callable[[int, int, tuple[int, ...]], Any]
"""Makes a cache from (size limit in bytes, dataset_len, data_dims): a `SharedCache`, or another with get_slot and set_slot."""


def our_cache(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> SharedCache:
    """Return a `SharedCache`."""
    return SharedCache(f"{limit_bytes}B", dataset_len, data_dims)


@dataclass(frozen=True)
class EpochTiming:
    """One measured epoch.

    Attributes:
        fraction: share of the dataset the cache may hold.
        phase: "cold" for the first epoch over an empty cache, "warm" for the second.
        seconds: wall time, from asking for the first batch to receiving the last.
        samples: samples in all batches.
        reads: samples read from their files or from the dataset, not from the cache.
    """

    fraction: float
    phase: str
    seconds: float
    samples: int
    reads: int


class JpegFolder(Dataset[tuple[Tensor, int]]):
    """Photos as uint8 tensors of shape (3, size, size), each with 1 if it was read from its file, 0 if from the cache."""

    def __init__(self, paths: Sequence[Path], size: int, cache: Any | None) -> None:
        self.paths, self.size, self.cache = paths, size, cache

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        image = self.cache.get_slot(idx) if self.cache is not None else None
        if image is not None:
            return image, 0
        image = load_jpeg(self.paths[idx], self.size)
        if self.cache is not None:
            self.cache.set_slot(idx, image)
        return image, 1


def find_jpegs(folder: Path) -> list[Path]:
    """Return the JPEG files under ``folder``, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file())


def photo_folder(count: int, size: int = 512) -> Path:
    """Return a folder of ``count`` generated JPEGs of size x size in the user's cache directory; generate it on first use."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache_home / "stocache" / f"photos-{count}x{size}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True)
        for number in tqdm(range(count), desc=f"generating photos in {folder}", unit="photo"):
            photo_like(number, size).save(unfinished / f"{number:06d}.jpg", quality=95)
        os.sync()  # the page cache cannot drop pages that are not written yet
        unfinished.rename(folder)
    return folder


def photo_like(seed: int, size: int) -> Any:
    """Return a random Pillow image that resembles a photo: noise of all scales (1/f) and a few sharp edges."""
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(seed)
    shapes = Image.new("RGB", (size, size))
    draw = ImageDraw.Draw(shapes)
    for _ in range(12):
        (left, right), (top, bottom) = np.sort(rng.integers(0, size, (2, 2))).tolist()
        draw.ellipse((left, top, right, bottom), fill=tuple(rng.integers(0, 256, 3).tolist()))
    pixels = np.asarray(shapes, np.float32)
    for octave in range(1, size.bit_length()):
        noise = Image.fromarray(rng.integers(0, 256, (2**octave, 2**octave, 3), np.uint8))
        pixels = pixels + np.asarray(noise.resize((size, size), Image.Resampling.BILINEAR), np.float32) * 0.88**octave
    return Image.fromarray((pixels * (255 / pixels.max())).astype(np.uint8))


def drop_pages(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, so that reading them reads the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def sweep(
    paths: Sequence[Path],
    fractions: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    *,
    phases: Sequence[str] = ("cold", "warm"),
    size: int = 256,
    workers: int = 2,
    batch_size: int = 32,
    repeats: int = 1,
    before_epoch: Callable[[], None] | None = None,
    make_cache: CacheMaker = our_cache,
    seed: int = 0,
) -> list[EpochTiming]:
    """Run a cold and a warm epoch at each fraction, ``repeats`` times; return all epochs.

    Args:
        paths: JPEG files.
        fractions: shares of the dataset to cache, in [0, 1]; 0 runs without a cache.
        phases: names of the epochs over each cache.
        size: edge length of the cached images.
        workers, batch_size: as for torch's DataLoader.
        repeats: number of sweeps; every other one runs backwards, so that a drift of the machine's speed affects all fractions.
        before_epoch: called before each epoch, outside its time; by default it drops the files from the page cache.
        make_cache: makes the cache that is measured.
        seed: of the shuffling.
    """
    load_jpeg(paths[0], size)  # imports on first use are not part of the first epoch

    @contextmanager
    def open_dataset(fraction: float) -> Iterator[Opened]:
        slots = round(fraction * len(paths))
        dims = (3, size, size)
        cache = make_cache(slots * 3 * size * size + len(paths), len(paths), dims) if slots else None
        yield Opened(JpegFolder(paths, size, cache))
        if isinstance(cache, SharedCache):
            cache.close()

    return _sweep(
        open_dataset,
        len(paths),
        fractions,
        phases,
        workers=workers,
        batch_size=batch_size,
        repeats=repeats,
        before_epoch=before_epoch or (lambda: drop_pages(paths)),
        seed=seed,
    )


def sweep_dataset(
    dataset: Any,
    fractions: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    *,
    workers: int = 2,
    batch_size: int = 32,
    repeats: int = 1,
    allow_pickle: bool = False,
    collate_fn: Callable[[list[Any]], Any] = collate_or_list,
    seed: int = 0,
) -> list[EpochTiming]:
    """Run `sweep` on a map-style dataset, in `CachedDataset`. Files stay in the page cache.

    The time and the reads of the first epoch include those of `CachedDataset`, which loads some to find their structure.
    Batches that torch's ``default_collate`` does not take, such as of samples of varying size, remain lists. There are no
    workers where forked ones would stall. ``allow_pickle`` is that of `CachedDataset`, ``collate_fn`` that of the DataLoader.
    """
    if workers and would_stall(dataset):
        workers = 0

    @contextmanager
    def open_dataset(fraction: float) -> Iterator[Opened]:
        start = time.perf_counter()
        partly = PartlyCached(dataset, fraction, allow_pickle)
        yield Opened(partly, time.perf_counter() - start, partly.count_cached())
        partly.close()

    return _sweep(
        open_dataset,
        len(dataset),
        fractions,
        ("cold", "warm"),
        workers=workers,
        batch_size=batch_size,
        repeats=repeats,
        before_epoch=lambda: None,
        seed=seed,
        collate=partial(collate_values, collate_fn),
    )


@dataclass(frozen=True)
class Opened:
    """A dataset with a new cache, whose samples come with 1 if they were read, 0 if not; and the time and reads of making it.

    Attributes:
        seconds: time that is part of the first epoch.
        reads: samples that were read meanwhile.
    """

    dataset: Dataset[tuple[Any, int]]
    seconds: float = 0.0
    reads: int = 0


def _sweep(
    open_dataset: Callable[[float], AbstractContextManager[Opened]],
    samples: int,
    fractions: Sequence[float],
    phases: Sequence[str],
    *,
    workers: int,
    batch_size: int,
    repeats: int,
    before_epoch: Callable[[], None],
    seed: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> list[EpochTiming]:
    epochs = []
    with tqdm(total=repeats * len(fractions) * len(phases) * samples, unit="sample", smoothing=0.05) as bar:
        for repeat in range(repeats):
            for fraction in fractions if repeat % 2 == 0 else reversed(fractions):
                with open_dataset(fraction) as opened:
                    loader = TorchLoader(
                        opened.dataset,
                        batch_size=batch_size,
                        shuffle=True,
                        num_workers=workers,
                        persistent_workers=workers > 0,
                        generator=torch.Generator().manual_seed(seed + repeat),
                        collate_fn=collate,
                    )
                    seconds, reads = opened.seconds, opened.reads
                    for phase in phases:
                        bar.set_description(f"{fraction:.0%} cached, {phase} epoch")
                        before_epoch()
                        epoch = _run_epoch(loader, fraction, phase, bar)
                        epochs.append(replace(epoch, seconds=epoch.seconds + seconds, reads=epoch.reads + reads))
                        seconds, reads = 0.0, 0
                    del loader  # its workers use the cache too
    return epochs


def _run_epoch(loader: TorchLoader[tuple[Any, int]], fraction: float, phase: str, bar: Any) -> EpochTiming:
    samples = reads = 0
    start = time.perf_counter()
    for _, read in loader:
        samples += len(read)
        reads += int(read.sum())
        bar.update(len(read))
    return EpochTiming(fraction, phase, time.perf_counter() - start, samples, reads)


# ---------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class SweepRow:
    """One fraction of a sweep; times are medians over its repeats.

    Attributes:
        fraction: share of the dataset the cache may hold.
        cold_s, warm_s: seconds of the first and second epoch.
        cold_per_s, warm_per_s: samples per second.
        cold_reads, warm_reads: samples that did not come from the cache; the maximum of all repeats.
        warm_hit_rate: share of the second epoch that came from the cache.
        first_epoch_overhead: how much longer the first epoch took than without a cache; NaN if fraction 0 was not run.
    """

    fraction: float
    cold_s: float
    warm_s: float
    cold_per_s: float
    warm_per_s: float
    cold_reads: int
    warm_reads: int
    warm_hit_rate: float
    first_epoch_overhead: float


def summarize(epochs: Sequence[EpochTiming]) -> list[SweepRow]:
    """Return one row per fraction, ascending."""

    def of(fraction: float, phase: str) -> list[EpochTiming]:
        return [epoch for epoch in epochs if (epoch.fraction, epoch.phase) == (fraction, phase)]

    def seconds(fraction: float, phase: str) -> float:
        return statistics.median([epoch.seconds for epoch in of(fraction, phase)] or [float("nan")])

    rows = []
    for fraction in sorted({epoch.fraction for epoch in epochs}):
        samples = of(fraction, "warm")[0].samples
        cold_s, warm_s = seconds(fraction, "cold"), seconds(fraction, "warm")
        cold_reads, warm_reads = (max(epoch.reads for epoch in of(fraction, phase)) for phase in ("cold", "warm"))
        rows.append(
            SweepRow(
                fraction,
                cold_s,
                warm_s,
                samples / cold_s,
                samples / warm_s,
                cold_reads,
                warm_reads,
                1 - warm_reads / samples,
                cold_s / seconds(0, "cold") - 1,
            )
        )
    return rows


def linearity(rows: Sequence[SweepRow]) -> float:
    """Return R² of a straight line through the seconds of warm epochs over the cached fraction, for 3 rows or more."""
    x, y = np.array([row.fraction for row in rows]), np.array([row.warm_s for row in rows])
    residuals = y - np.polyval(np.polyfit(x, y, 1), x)
    return float(1 - (residuals**2).sum() / ((y - y.mean()) ** 2).sum())


_HEADINGS = ("cached", "cold s", "warm s", "cold /s", "warm /s", "cold reads", "warm reads", "hit rate", "1st epoch")
_FORMATS = ("{:.0%}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.0f}", "{}", "{}", "{:.1%}", "{:+.1%}")


def format_table(rows: Sequence[SweepRow], width: int | None = None) -> str:
    """Return the rows as a Markdown table; as several tables, with some of the columns each, if it is wider than ``width``."""
    lines = [[form.format(value) for form, value in zip(_FORMATS, asdict(row).values(), strict=True)] for row in rows]
    columns = []
    for heading, *cells in zip(_HEADINGS, *lines, strict=True):
        longest = max(map(len, [heading, *cells]))
        columns.append([cell.rjust(longest) for cell in (heading, "-" * (longest - 1) + ":", *cells)])
    key, *others = columns
    tables = [[key]]
    for column in others:
        if width is not None and len(tables[-1]) > 1 and len(_join([*tables[-1], column])[0]) > width:
            tables.append([key])
        tables[-1].append(column)
    return "\n\n".join("\n".join(_join(table)) for table in tables)


def _join(columns: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True)]


def write_csv(rows: Sequence[SweepRow], path: Path) -> None:
    """Write the rows, one line each, with a header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SweepRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def plot(rows: Sequence[SweepRow], path: Path, title: str) -> None:
    """Draw the seconds of both epochs over the cached fraction into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    percent = [100 * row.fraction for row in rows]
    axes.plot(percent, [row.cold_s for row in rows], "o-", color="tab:red", label="first epoch (fills the cache)")
    axes.plot(percent, [row.warm_s for row in rows], "o-", color="tab:blue", label="second epoch (reads it)")
    axes.set(xlabel="share of the dataset cached (%)", ylabel="seconds per epoch", title=title, ylim=(0, None), xticks=percent)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
