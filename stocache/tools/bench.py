"""Measure epochs over a dataset, cold and warm, at several cached fractions: the experiment of stocaching.

The dataset is the user's, or a folder of JPEGs, each decoded with Pillow and resized to a uint8 tensor. For each fraction, a
new cache serves a cold epoch, which fills it, and a warm epoch, which reads from it. Needs the extra ``bench``.
Source of the experiment: C. Jones, "Eliminating Dataloading Bottlenecks in PyTorch with Stochastic Caching", 2023.
"""

import csv
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.table import Column, Table
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate
from tqdm import tqdm

from stocache.cache.placement import Placement, ordering_of
from stocache.datasets.cached import CachedDataset
from stocache.loader.dataloader import DataLoader
from stocache.storage.preparation.sources import load_jpeg
from stocache.system.loading.fallback import would_stall
from stocache.system.objects import TorchLoader
from stocache.system.platform import here


class JpegFolder(Dataset[Tensor]):
    """Photos as uint8 tensors of shape (3, size, size)."""

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self.paths, self.size = paths, size
        load_jpeg(paths[0], size)  # imports on first use are not part of the first epoch

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> Tensor:
        return load_jpeg(self.paths[idx], self.size)


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
        here.sync()  # the page cache cannot drop pages that are not written yet
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
        with path.open("rb") as file:
            here.drop_pages(file.fileno())


class PartlyCached(ConcatDataset[Any]):
    """The samples of a map-style dataset: first a share of them, evenly spread, in a `CachedDataset`; then the others.

    A share, not a limit in bytes: that would need the size of every sample.
    """

    def __init__(self, dataset: Any, share: float, allow_pickle: bool = False) -> None:
        length = len(dataset)
        order = ordering_of(Placement("scattered"), length).samples(np.arange(length)).tolist()
        part, self._rest = (Subset(dataset, rows) for rows in (order[: round(share * length)], order[round(share * length) :]))
        self._cached = CachedDataset(part, audit=0, allow_pickle=allow_pickle) if len(part) else None
        super().__init__([self._rest] if self._cached is None else [self._cached, self._rest])

    def count_reads(self, epochs: int) -> int:
        """Return how many samples were read from the dataset, to make the cache and in a number of epochs."""
        return epochs * len(self._rest) + (0 if self._cached is None else self._cached.cache.stats().misses)

    def close(self) -> None:
        """Close the cache."""
        if self._cached is not None:
            self._cached.close()


def collate_or_list(samples: list[Any]) -> Any:
    """Return a batch of samples, as a list if torch cannot put them together."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, ValueError, KeyError):
        return samples


class EpochTiming(NamedTuple):
    """One measured epoch.

    Attributes:
        fraction: share of the dataset the cache may hold.
        phase: "cold" for the first epoch over an empty cache, "warm" for the second.
        seconds: wall time, from asking for the first batch to receiving the last; for the first epoch from making the cache.
        samples: samples in all batches.
        reads: samples read from their files or from the dataset, not from the cache.
    """

    fraction: float
    phase: str
    seconds: float
    samples: int
    reads: int


def sweep(
    dataset: Any,
    fractions: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    *,
    workers: int = 2,
    batch_size: int = 32,
    repeats: int = 1,
    before_epoch: Callable[[], None] = lambda: None,
    make: Callable[[Any, float], Any] = PartlyCached,
    phases: Sequence[str] = ("cold", "warm"),
    collate_fn: Callable[[list[Any]], Any] = collate_or_list,
    seed: int = 0,
) -> list[EpochTiming]:
    """Run a cold and a warm epoch at each fraction, ``repeats`` times; return all epochs.

    The time and the reads of the first epoch include those of `CachedDataset`, which loads some samples to find their
    structure. There are no workers if forked ones would stall.

    Args:
        dataset: a map-style dataset.
        fractions: shares of the dataset to cache, in [0, 1]; 0 runs without a cache.
        workers, batch_size, collate_fn: as for torch's DataLoader.
        repeats: number of sweeps; every other one runs backwards, so that a drift of the machine's speed affects all fractions.
        before_epoch: called before each epoch, outside its time.
        make: makes the dataset with a cache, a `PartlyCached` or one with the same methods.
        phases: names of the epochs over each cache.
        seed: of the shuffling.
    """
    length, epochs = len(dataset), []
    if workers and would_stall(dataset):
        workers = 0
    make_loader: Any = TorchLoader if here.SHARES_MEMORY else partial(DataLoader, worker_method="thread")
    options = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate_fn}
    with tqdm(total=repeats * len(fractions) * len(phases) * length, unit="sample", smoothing=0.05) as bar:
        for repeat in range(repeats):
            for fraction in fractions if repeat % 2 == 0 else reversed(fractions):
                before_epoch()
                start, reads = time.perf_counter(), 0
                with closing(make(dataset, fraction)) as cached:
                    generator = torch.Generator().manual_seed(seed + repeat)
                    loader = make_loader(cached, shuffle=True, generator=generator, **options)
                    for done, phase in enumerate(phases, 1):
                        bar.set_description(f"{fraction:.0%} cached, {phase} epoch")
                        if done > 1:
                            before_epoch()
                            start = time.perf_counter()
                        for _ in loader:
                            bar.update(min(batch_size, length - bar.n % length))
                        seconds, before, reads = time.perf_counter() - start, reads, cached.count_reads(done)
                        epochs.append(EpochTiming(fraction, phase, seconds, length, reads - before))
                    del loader  # its workers use the cache too
    return epochs


class SweepRow(NamedTuple):
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
    groups = defaultdict[tuple[float, str], list[EpochTiming]](list)
    for epoch in epochs:
        groups[epoch.fraction, epoch.phase].append(epoch)
    seconds = {key: statistics.median(epoch.seconds for epoch in group) for key, group in groups.items()}
    reads = {key: max(epoch.reads for epoch in group) for key, group in groups.items()}
    samples, uncached_s, rows = epochs[0].samples, seconds.get((0, "cold"), float("nan")), []
    for fraction in sorted({epoch.fraction for epoch in epochs}):
        cold, warm = (fraction, "cold"), (fraction, "warm")
        rates = samples / seconds[cold], samples / seconds[warm]
        shares = 1 - reads[warm] / samples, seconds[cold] / uncached_s - 1
        rows.append(SweepRow(fraction, seconds[cold], seconds[warm], *rates, reads[cold], reads[warm], *shares))
    return rows


_HEADINGS = ("cached", "cold s", "warm s", "cold /s", "warm /s", "cold reads", "warm reads", "hit rate", "1st epoch")
_FORMATS = ("{:.0%}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.0f}", "{}", "{}", "{:.1%}", "{:+.1%}")


def table(rows: Sequence[SweepRow]) -> Table:
    """Return the rows as a table, which is Markdown if there is room for its columns."""
    view = Table(*(Column(heading, justify="right") for heading in _HEADINGS), box=box.MARKDOWN, pad_edge=False)
    for row in rows:
        view.add_row(*(form.format(value) for form, value in zip(_FORMATS, row, strict=True)))
    return view


def write_csv(rows: Sequence[SweepRow], path: Path) -> None:
    """Write the rows, one line each, with a header."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([SweepRow._fields, *rows])


def draw(rows: Sequence[SweepRow], path: Path, title: str) -> None:
    """Draw the seconds of both epochs over the cached fraction into a file, whose ending names the format."""
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
