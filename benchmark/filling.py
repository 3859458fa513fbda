"""What filling the cache costs: the first epoch, calls for samples of each size, and SIGKILLs in the middle of it.

python -m benchmark filling first-epoch [--folder PHOTOS]   # with and without the cache; beside a bare copy of the same bytes
python -m benchmark filling blocks                          # blocks of prepared samples, admitted behind the batches
python -m benchmark filling sizes                           # the calls that fill, for samples of 1 KB to 1 MB
python -m benchmark filling kill --kills 1000               # batched filling and block admission, killed at any moment

The *bare copy* is the limit: as many bytes are written into a new memfd, by one thread, in the fastest of three ways. All
contenders take turns, round by round; figures are medians, and differences and ratios are those of the same round. Memory is
taken and released before each clock starts, and a round that is not counted goes first. torch has one thread.

``first-epoch``: *first batch* is the time from asking the loader for an iterator to its first batch. Making the cache, which
loads a few samples to see what they are, is not part of the epoch and has a column of its own.
"""

import argparse
import contextlib
import gc
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

import stocache
from benchmark.sigkill import Filling, holdings, samples, trial
from benchmark.support.measuring import machine, settle
from benchmark.support.peers import stocaching
from stocache import CachedDataset, RaggedCache, SharedCache, StorageDataset, prepare
from stocache.datasets.loaders import BlockLoader
from stocache.storage.preparation.sources import load_jpeg
from stocache.system.limits import MIB
from stocache.tools.bench import find_jpegs, photo_folder

CLAIM = "Filling the cache costs the first epoch at most 1.5 times a bare copy of the bytes, and survives kills at any moment."
NEEDS = (
    ("PIL", '-e ".[bench]"'),
    ("datasets", '-e ".[test]"', "first-epoch"),
    ("stocaching", "--no-deps stocaching==0.2.1", "sizes"),
)

DIMS = (3, 64, 64)
ROW = 3 * 64 * 64
PHOTO = 256

# ---------------------------------------------------------------------------------------------------- the bare copy


def _allocate_and_write(fd: int, data: memoryview) -> None:
    os.posix_fallocate(fd, 0, len(data))
    _write(fd, data)


def _write(fd: int, data: memoryview) -> None:
    for at in range(0, len(data), MIB):
        os.pwrite(fd, data[at : at + MIB], at)


def _copy_into_map(fd: int, data: memoryview) -> None:
    with mmap.mmap(fd, len(data)) as memory:
        memory[:] = data


BARE_COPIES: dict[str, Callable[[int, memoryview], None]] = {
    "posix_fallocate, pwrite": _allocate_and_write,
    "pwrite": _write,
    "mmap, memcpy": _copy_into_map,
}


def bare_copy(way: str, data: memoryview) -> float:
    """Return the seconds that it takes to make a memfd with these bytes."""
    settle(len(data))
    began = time.perf_counter()
    fd = os.memfd_create("bare-copy")
    os.ftruncate(fd, len(data))
    BARE_COPIES[way](fd, data)
    took = time.perf_counter() - began
    os.close(fd)
    return took


def random_bytes(count: int) -> torch.Tensor:
    """Return that many bytes."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def fastest(copies: dict[str, list[float]]) -> str:
    """Return the way of the bare copy that had the least median."""
    return min(copies, key=lambda way: statistics.median(copies[way]))


def ratio(added: Iterable[float], base: Iterable[float]) -> float:
    """Return the median over the rounds of what was added, as a share of the base in the same round."""
    return statistics.median(mine / other for mine, other in zip(added, base, strict=True))


# ---------------------------------------------------------------------------------------------------- the first epoch


class Packed(Dataset[Any]):
    """Images in one tensor, each with a label."""

    def __init__(self, count: int) -> None:
        self.images = random_bytes(count * ROW).view(count, *DIMS)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, idx: int) -> Any:
        return self.images[idx], idx % 1000


class Mapped(Dataset[Any]):
    """The same images in a file that is mapped into memory."""

    def __init__(self, images: torch.Tensor, path: Path) -> None:
        images.numpy().tofile(path)
        self.images = np.memmap(path, np.uint8, "r", shape=tuple(images.shape))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, idx: int) -> Any:
        return np.array(self.images[idx]), idx % 1000


class Encoded(Dataset[Any]):
    """Bytes of varying length, each with a label."""

    def __init__(self, images: torch.Tensor) -> None:
        self.data, self.count = images.numpy().tobytes(), len(images)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Any:
        return self.data[idx * ROW : (idx + 1) * ROW - idx % 4096], idx % 1000


class Photos(Dataset[Any]):
    """Photographs, decoded and resized, each with a label."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> Any:
        return load_jpeg(self.paths[idx], PHOTO), idx % 1000


def arrow_rows(images: torch.Tensor, folder: Path) -> Any:
    """Return the images, each with a label, as rows of fixed size in an Arrow file."""
    import datasets  # type: ignore[import-untyped]

    features = datasets.Features(
        {"image": datasets.Sequence(datasets.Value("uint8"), length=ROW), "label": datasets.Value("uint8")}
    )
    rows = ({"image": image, "label": idx % 256} for idx, image in enumerate(images.view(-1, ROW).numpy()))
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "rows.arrow"), features=features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return datasets.Dataset.from_file(str(folder / "rows.arrow")).with_format("numpy", dtype=np.uint8)


class Source(NamedTuple):
    """What an epoch is over, and the most that caching may add to it."""

    make: Callable[[argparse.Namespace, Path], Any]
    bar: float
    sample_bytes: int = ROW + 8
    batch: int = 256
    of_epoch: bool = False
    """Whether the bar is a share of the epoch; else it is a multiple of the bare copy."""


SOURCES = {
    "packed tensor": Source(lambda options, folder: Packed(options.samples), 1.5),
    "memory map": Source(lambda options, folder: Mapped(Packed(options.samples).images, folder / "images"), 1.5),
    "Arrow rows": Source(lambda options, folder: arrow_rows(Packed(options.samples).images, folder), 1.5, ROW + 1),
    "prepared tensors": Source(lambda options, folder: _prepared(Packed(options.samples), folder), 2),
    "prepared bytes": Source(
        lambda options, folder: _prepared(Encoded(Packed(options.samples).images), folder), 2, ROW - 4096 // 2 + 8
    ),
    "JPEG decoding": Source(
        lambda options, folder: Photos(find_jpegs(options.folder or photo_folder(options.photos))),
        0.03,
        3 * PHOTO * PHOTO + 8,
        64,
        True,
    ),
}


def _prepared(source: Any, folder: Path) -> StorageDataset[Any]:
    return StorageDataset(prepare(source, folder / "prepared", progress=False))


def epoch(dataset: Any, batch: int, workers: int, seed: int) -> tuple[float, float]:
    """Return how long a shuffled epoch takes, and how long its first batch."""
    generator = torch.Generator().manual_seed(seed)
    loader = stocache.DataLoader(dataset, batch, shuffle=True, num_workers=workers, generator=generator)
    first_s = None
    began = time.perf_counter()
    for _ in loader:
        if first_s is None:
            first_s = time.perf_counter() - began
    assert first_s is not None
    return time.perf_counter() - began, first_s


class Round(NamedTuple):
    """The seconds of a round."""

    without: float
    first_without: float
    with_cache: float
    first_with: float
    making: float

    @property
    def added(self) -> float:
        """What caching added to the epoch."""
        return self.with_cache - self.without


def one_round(dataset: Any, source: Source, workers: int, seed: int) -> Round:
    """Run an epoch without the cache, and one that fills it; in odd rounds the other way round."""
    nbytes = len(dataset) * source.sample_bytes
    found: dict[str, tuple[float, ...]] = {}
    for name in ("without", "with")[:: -1 if seed % 2 else 1]:
        gc.collect()
        settle(2 * nbytes)
        if name == "without":
            found[name] = epoch(dataset, source.batch, workers, seed)
            continue
        began = time.perf_counter()
        with CachedDataset(dataset, f"{nbytes + nbytes // 4 + 4 * MIB}B") as cached:
            making = time.perf_counter() - began
            found[name] = (*epoch(cached, source.batch, workers, seed), making)
            assert cached.stats().total.filled == len(dataset), cached
    return Round(*found["without"], *found["with"])


def first_epoch(options: argparse.Namespace) -> None:
    """Print what filling the cache adds to an epoch."""
    print(
        "| source | workers | without, s | with, s | added, µs a sample | bare copy, µs (the fastest way) | ratio | bar | met ",
        end="",
    )
    print("| first batch without, with, ms | ratio | at most 1.3 | making the cache, ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: |")
    for name in options.sources:
        source = SOURCES[name]
        with tempfile.TemporaryDirectory() as folder:
            dataset = source.make(options, Path(folder))
            for workers in options.workers:
                print(_first_epoch_row(name, source, dataset, workers, options.repeats), flush=True)


def _first_epoch_row(name: str, source: Source, dataset: Any, workers: int, repeats: int) -> str:
    count = len(dataset)
    data = random_bytes(count * source.sample_bytes).numpy().data
    rounds: list[Round] = []
    copies: dict[str, list[float]] = {way: [] for way in BARE_COPIES}
    for number in range(repeats + 1):  # the first is not counted
        took, copied = one_round(dataset, source, workers, number), {way: bare_copy(way, data) for way in BARE_COPIES}
        if number:
            rounds.append(took)
            for way, seconds in copied.items():
                copies[way].append(seconds)
    without, first_without, with_cache, first_with, making = map(statistics.median, zip(*rounds, strict=True))
    added, way = [each.added for each in rounds], fastest(copies)
    share = ratio(added, [each.without for each in rounds] if source.of_epoch else copies[way])
    first = ratio([each.first_with for each in rounds], [each.first_without for each in rounds])
    shown = f"{share:.1%} of the epoch | {source.bar:.0%}" if source.of_epoch else f"{share:.2f} | {source.bar}"
    return (
        f"| {name} | {workers} | {without:.3f} | {with_cache:.3f} | {statistics.median(added) / count * 1e6:.1f} "
        f"| {statistics.median(copies[way]) / count * 1e6:.1f} ({way}) | {shown} | {_met(share <= source.bar)} "
        f"| {first_without * 1e3:.1f}, {first_with * 1e3:.1f} | {first:.2f} | {_met(first <= 1.3)} | {making * 1e3:.0f} |"
    )


def _met(is_met: bool) -> str:
    return "yes" if is_met else "no"


# ---------------------------------------------------------------------------------------------------- blocks

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]


class Texts(Dataset[Any]):
    """Short texts, each with a label."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Any:
        return {"text": " ".join(WORDS[(idx + at) % len(WORDS)] for at in range(5 + idx % 20)), "label": idx % 10}


class Targets(Dataset[Any]):
    """Tensors of varying size, boxes, numbers and the name of a file."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, idx: int) -> Any:
        boxes, labels = torch.zeros(idx % 5, 4), list(range(idx % 5))
        return {"image": self.images[idx, :, : 32 + idx % 32], "boxes": boxes, "labels": labels, "file": f"{idx}.jpg"}


BLOCKS: dict[str, Callable[[int], Dataset[Any]]] = {
    "tensors": Packed,
    "bytes": lambda count: Encoded(Packed(count).images),
    "short texts": Texts,
    "detection": lambda count: Targets(Packed(count).images),
}


def admission(dataset: StorageDataset[Any], made: bool) -> tuple[float, int]:
    """Return the seconds that it takes to admit all blocks, and the bytes that the cache holds then; samples may be made."""
    with CachedDataset(dataset, "2GiB") as cached, contextlib.ExitStack() as patches:
        if made:
            patches.enter_context(mock.patch.object(BlockLoader, "_copy", return_value=False))
        assert isinstance(cached._loader, BlockLoader)
        settle(512 * MIB)
        began = time.perf_counter()
        for block in range(len(dataset.storage.index.blocks)):  # type: ignore[attr-defined]
            cached._loader.admit(block)
        took, stats = time.perf_counter() - began, cached.cache.stats()
        assert stats.filled == len(dataset), cached
        return took, stats.filled * stats.slot_bytes


def blocks(options: argparse.Namespace) -> None:
    """Print what it costs to admit blocks, by copying and by making the samples."""
    print("µs a sample. The folder is in the page cache.\n")
    print("| samples | bytes | copied | made | bare copy (the fastest way) | copied, ratio | made, ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, make in BLOCKS.items():
        with tempfile.TemporaryDirectory() as folder:
            dataset = _prepared(make(options.samples), Path(folder))
            seconds: dict[bool, list[float]] = {False: [], True: []}
            copies: dict[str, list[float]] = {way: [] for way in BARE_COPIES}
            for number in range(options.repeats + 1):  # the first is not counted
                gc.collect()
                took = {made: admission(dataset, made) for made in seconds}
                data = memoryview(bytes(took[False][1]))
                copied = {way: bare_copy(way, data) for way in BARE_COPIES}
                if number:
                    for made, times in seconds.items():
                        times.append(took[made][0])
                    for way, times in copies.items():
                        times.append(copied[way])
            way = fastest(copies)
            medians = [statistics.median(times) / len(dataset) * 1e6 for times in (*seconds.values(), copies[way])]
            ratios = [f"{ratio(times, copies[way]):.1f}" for times in seconds.values()]
            shown = " | ".join(f"{median:.2f}" for median in medians)
            print(f"| {name} | {len(data) // len(dataset)} | {shown} ({way}) | {' | '.join(ratios)} |", flush=True)


# ---------------------------------------------------------------------------------------------------- samples of each size

KB = 1024
SIZES = (1 * KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, 1024 * KB)
MOST_SAMPLES = 65_536

Batches = list[tuple[list[int], torch.Tensor]]
"""Indices, and a batch of their samples."""


def _set_slots(cache: Any, batches: Batches) -> None:
    for indices, rows in batches:
        cache.set_slots(indices, rows)


def _set_slot(cache: Any, batches: Batches) -> None:
    for indices, rows in batches:
        for idx, row in zip(indices, rows.unbind(), strict=True):
            cache.set_slot(idx, row)


def _get_or_load_many(cache: Any, batches: Batches) -> None:
    for indices, rows in batches:
        cache.get_or_load_many(indices, lambda _, rows=rows: rows.unbind())


def sizes(options: argparse.Namespace) -> None:
    """Print the time of filling, per sample, for samples of each size."""

    def uniform(count: int, nbytes: int) -> SharedCache:
        return SharedCache(f"{count * (nbytes + 1)}B", count, (nbytes,))

    def ragged(count: int, nbytes: int) -> RaggedCache:
        return RaggedCache(f"{count * (nbytes + 1024) + 4 * MIB}B", count)

    def theirs(count: int, nbytes: int) -> Any:
        return stocaching(count * (nbytes + 1), count, (nbytes,))

    calls: dict[str, tuple[Callable[[int, int], Any], Callable[[Any, Batches], None]]] = {
        "set_slots": (uniform, _set_slots),
        "set_slot": (uniform, _set_slot),
        "get_or_load_many": (uniform, _get_or_load_many),
        "RaggedCache set_slot": (ragged, _set_slot),
        "RaggedCache get_or_load_many": (ragged, _get_or_load_many),
        "stocaching set_slot": (theirs, _set_slot),
    }
    print("µs a sample. stocaching takes its memory when it is made, so the time with making it is beside it.\n")
    print(f"| sample | order | {' | '.join(calls)} | with making it | bare copy (the fastest way) |")
    print(f"| ---: | --- |{' ---: |' * (len(calls) + 2)}")
    for nbytes in options.sizes:
        count = max(1, min(MOST_SAMPLES, options.total_mb * MIB // nbytes))
        data = random_bytes(count * nbytes).view(count, nbytes)
        batch = 256 if nbytes < 64 * KB else 16
        for order in ("in sequence", "random"):
            seconds: dict[str, list[float]] = {name: [] for name in (*calls, "making")}
            copies: dict[str, list[float]] = {way: [] for way in BARE_COPIES}
            for number in range(options.repeats + 1):  # the first is not counted
                indices = list(range(count))
                if order == "random":
                    random.Random(number).shuffle(indices)
                batches = list(
                    zip((indices[at : at + batch] for at in range(0, count, batch)), torch.split(data, batch), strict=True)
                )
                took: dict[str, float] = {}
                for name, (make, fill) in calls.items():
                    settle(data.numel())
                    made = time.perf_counter()
                    cache = make(count, nbytes)
                    began = time.perf_counter()
                    fill(cache, batches)
                    took[name], took["making"] = time.perf_counter() - began, began - made  # the last one is stocaching
                    assert torch.equal(cache.get_slot(indices[-1]), data[-1]), name
                    del cache
                    gc.collect()
                copied = {way: bare_copy(way, data.view(-1).numpy().data) for way in BARE_COPIES}
                if number:
                    for times, now in ((seconds, took), (copies, copied)):
                        for name, value in now.items():
                            times[name].append(value)
            medians = {name: statistics.median(times) / count * 1e6 for name, times in seconds.items()}
            making, way = medians.pop("making") + medians["stocaching set_slot"], fastest(copies)
            shown = " | ".join(f"{each:.1f}" for each in (*medians.values(), making))
            bare = statistics.median(copies[way]) / count * 1e6
            print(f"| {nbytes // KB} KB | {order} | {shown} | {bare:.1f} ({way}) |", flush=True)


# ---------------------------------------------------------------------------------------------------- kills

BATCH = 16
EXPECTED = (samples(96, (64, 1024)), samples(1024, (3, 25, 40)))  # slots of whole pages, and slots that share pages


def _batches(order: list[int]) -> list[list[int]]:
    return [order[at : at + BATCH] for at in range(0, len(order), BATCH)]


def _uniform(rng: random.Random, expected: torch.Tensor) -> SharedCache:
    return SharedCache(1, len(expected), expected[0].shape, placement=rng.choice(["prefix", "scattered"]))


def by_set_slots(rng: random.Random) -> Filling:
    """Fill a cache with `set_slots`."""
    expected = rng.choice(EXPECTED)
    cache = _uniform(rng, expected)

    def fill(order: list[int]) -> None:
        for batch in _batches(order):
            _, there = cache.get_slots(batch)
            left = torch.tensor(batch)[~there]
            cache.set_slots(left, expected[left])

    return Filling(cache, fill, expected, BATCH)


def by_get_or_load_many(rng: random.Random) -> Filling:
    """Fill a cache with `get_or_load_many`."""
    expected = rng.choice(EXPECTED)
    cache = _uniform(rng, expected) if rng.random() < 0.5 else RaggedCache(1, len(expected))

    def fill(order: list[int]) -> None:
        for batch in _batches(order):
            cache.get_or_load_many(batch, lambda indices: expected[indices].unbind())

    return Filling(cache, fill, expected, BATCH)


VARYING = [[sample.flatten()[idx % 40 * 7 :] for idx, sample in enumerate(expected)] for expected in EXPECTED]


def by_block(folder: Path, samples_of: Sequence[Sequence[torch.Tensor]]) -> Callable[[random.Random], Filling]:
    """Prepare samples in a folder; return a function that fills a cache in front of some of them by admitting blocks."""
    prepared = [
        (prepare(expected, folder / f"{number}", block_size=len(expected) // 12, progress=False), expected)
        for number, expected in enumerate(samples_of)
    ]

    def make(rng: random.Random) -> Filling:
        storage, expected = rng.choice(prepared)
        cached = CachedDataset(StorageDataset(storage), 1, example=expected[0], variable=samples_of is VARYING)
        assert isinstance(cached._loader, BlockLoader)
        loader, size = cached._loader, storage.block_size

        def fill(order: list[int]) -> None:
            for block in dict.fromkeys(idx // size for idx in order):
                loader.admit(block)

        return Filling(cached.cache, fill, expected, size)

    return make


def _longest_s(make: Callable[[random.Random], Filling]) -> float:
    """Return how long a process takes to fill the cache when nothing disturbs it; the longest of a few."""
    longest_s = 0.0
    for seed in range(8):
        cache, fill, expected, _ = make(random.Random(seed))
        began = time.perf_counter()
        fill(list(range(len(expected))))
        longest_s = max(longest_s, time.perf_counter() - began)
        cache.close()
    return longest_s


def kill(options: argparse.Namespace) -> None:
    """Print the counts of kills in the middle of filling, for each way to fill."""
    print("| filled by | kills while filling | with part of the slots set | samples checked | wrong | stuck |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "set_slots": by_set_slots,
            "get_or_load_many": by_get_or_load_many,
            "blocks to slots": by_block(Path(folder, "slots"), EXPECTED),
            "blocks to records": by_block(Path(folder, "records"), VARYING),
        }
        for name in options.ways or ways:
            make = ways[name]
            longest_s, kills, partly, checked, seed = _longest_s(make), 0, 0, 0, options.seed
            with tqdm(total=options.kills, unit="kill") as bar:
                before = holdings()
                while kills < options.kills:
                    outcome = trial(seed, make, longest_s)
                    seed, checked = seed + 1, checked + outcome.filled + outcome.slots
                    if outcome.killed:
                        kills, partly = kills + 1, partly + (0 < outcome.filled < outcome.slots)
                        bar.update()
                assert holdings() == before, f"{holdings()}; before {before}"
            print(f"| {name} | {kills} | {partly} | {checked} | 0 | 0 |", flush=True)
    print(
        "\nA trial that finds a wrong sample, a lock that stays, a process that hangs or fails, or memory that is left raises."
    )


def main() -> None:
    """Run one of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["first-epoch", "blocks", "sizes", "kill"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=16_384, help="of first-epoch, but for photographs, and of blocks")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), help="of first-epoch")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="of first-epoch")
    parser.add_argument("--folder", type=Path, help="of photographs, for first-epoch; by default they are generated")
    parser.add_argument("--photos", type=int, default=1000, help="how many to generate")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a sample, for sizes")
    parser.add_argument("--total-mb", type=int, default=256, help="of samples, for sizes")
    parser.add_argument("--kills", type=int, default=1000, help="for each way to fill")
    parser.add_argument("--ways", nargs="+", help="to fill, for kill; by default all")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial of kill")
    options = parser.parse_args()
    print(f"{machine()}\n")
    torch.set_num_threads(1)  # as in a DataLoader's worker
    {"first-epoch": first_epoch, "blocks": blocks, "sizes": sizes, "kill": kill}[options.experiment](options)


if __name__ == "__main__":
    main()
