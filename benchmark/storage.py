"""Prepared storage beside LitData, MosaicML streaming and the article's blocks of torch.save: preparing, reading, caching.

    python -m benchmark storage prepare SOURCE   # MB/s until it is on disk, and the size there
    python -m benchmark storage read SOURCE      # random and windowed samples/s, sequential MB/s, cold and warm
    python -m benchmark storage all SOURCE       # both of these, for all contenders in one run
    python -m benchmark storage cache SOURCE     # blocks read per epoch through a CachedDataset

Sources: ``images`` (uint8 tensors 3x64x64), ``text`` (str of 1 KB); with ``--folder DIR`` of JPEG files ``photos`` (the bytes)
and ``decoded`` (uint8 tensors 3x224x224, decoded and resized); each with a number. All write blocks of 8 MB. MB are a million
bytes of samples. ``the disk`` writes as many bytes without samples: nothing that is on the disk at the end is faster.

Each measurement is made in a process of its own, forked for that, so the maps, threads, open files and shared memory of a
contender are gone after it. Contenders take turns, round by round, and figures are medians. Samples are read in batches of 64.
Tensors are stacked; otherwise a contender that maps its files would return without having read them. The others come as a list.

*Cold*: the files' pages are dropped before the clock starts, and nothing of the contender is open yet, so worker processes are
started under the clock. *Warm*: a pass over the same loader goes before; its workers stay.

The contenders do not do the same work. stocache checks each sample against a checksum, and synchronises its blocks with the
disk. The others do neither by themselves (so their files are synchronised under the clock, too). LitData and
MosaicML streaming are read with options that make them faster than their defaults, where we found one (see their classes).
"""

import argparse
import gc
import logging
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from benchmark.support.measuring import settle
from benchmark.support.peers import clean_mosaic, mosaic
from benchmark.support.stores import (
    BATCH,
    CONTENDERS,
    WINDOW,
    DecodedPhotos,
    Disk,
    Images,
    OwnLoader,
    Photos,
    Source,
    Store,
    Texts,
    Unmixed,
    Writer,
    fork,
    loading,
    one_by_one,
)
from stocache import BlockSampler, CachedDataset, OnDiskBlockDataStorage, StorageDataset, prepare
from stocache.system.limits import MIB
from stocache.tools.bench import drop_pages

CLAIM = "Prepared blocks are written and read faster than those of LitData, MosaicML streaming and torch.save."
NEEDS = (("litdata", "litdata", "prepare", "read", "all"), ("streaming", "mosaicml-streaming", "prepare", "read", "all"))

# ---------------------------------------------------------------------------------------------------- measuring


def apart(work: Callable[[], Any]) -> Any:
    """Return the result of ``work``, called in a process of its own."""
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sending.send(work()))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        raise SystemExit("a measurement failed; its error is above") from None
    finally:
        process.join()


def in_turns(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Make each measurement once per round, starting with another one each round; return the medians."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    names = list(measures)
    for number in range(rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(apart(measures[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def rate(loader: Iterable[Any], seconds: float) -> float:
    """Return the samples per second of a pass, or of its part within ``seconds``."""
    count, began = 0, time.perf_counter()
    took = 0.0
    for _, labels in loader:
        count += len(labels)
        took = time.perf_counter() - began
        if took > seconds:
            break
    return count / took


def reading(store: Store, make: Callable[[int], Iterable[Any]], workers: int, warm: bool, seconds: float) -> float:
    """Return how many samples are read per second."""
    loader, files = make(workers), store.files()
    if warm:
        for path in files:
            path.read_bytes()
        rate(loader, math.inf if workers else seconds / 2)  # workers would first finish their requests
    else:
        os.sync()
        drop_pages(files)
    gc.collect()
    settle(64 * MIB if warm else sum(path.stat().st_size for path in files))
    return rate(loader, seconds)


def check(store: Store, source: Any) -> None:
    """Read some samples by number, and all of them in both orders.

    Raises:
        AssertionError: they are not those that were prepared.
    """
    wanted = random.Random(1).sample(range(len(source)), BATCH)
    pairs = [pair for values, labels in store.random(wanted, 0) for pair in zip(values, labels, strict=True)]
    assert [label for _, label in pairs] == wanted, f"{store.name}: other samples than {wanted}"
    assert all(_same(value, source[label][0]) for value, label in pairs), store.name
    for loader in (store.sequential(0), store.windowed(2)):
        seen: list[int] = []
        for values, labels in loader:
            assert _same(values[0], source[labels[0]][0]), store.name
            seen += labels
        assert sorted(seen) == list(range(len(source))), f"{store.name} does not give each sample once"


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# ---------------------------------------------------------------------------------------------------- experiments


def preparing(source: Source, folder: Path, block_bytes: int, rounds: int) -> None:
    """How fast the samples come to the disk, and their size there."""

    def speed(store: Writer, workers: int) -> float:
        shutil.rmtree(store.folder, ignore_errors=True)
        os.sync()
        settle(2 * source.nbytes)
        began = time.perf_counter()
        store.prepare(source, workers)
        for path in store.files():
            synchronise(path)
        return source.nbytes / 1e6 / (time.perf_counter() - began)

    stores: list[Writer] = [make(folder, block_bytes) for make in (*CONTENDERS, Disk)]
    speeds = []
    for workers in (0, 2):
        measures = {store.name: partial(speed, store, workers) for store in stores if store.parallel or not workers}
        speeds.append(in_turns(measures, rounds))
    print("\n| store | MB/s, no workers | MB/s, 2 workers | MB on disk | of the samples |\n| --- | ---: | ---: | ---: | ---: |")
    for store in stores:
        if isinstance(store, Store):
            apart(partial(check, store, source))
        nbytes = sum(path.stat().st_size for path in store.files())
        shown = " | ".join(f"{found[store.name]:.0f}" if store.name in found else "" for found in speeds)
        print(f"| {store.name} | {shown} | {nbytes / 1e6:.1f} | {nbytes / source.nbytes:.4f} |", flush=True)
        shutil.rmtree(store.folder)


ALONE = "Random reads per second, each sample by itself"


def synchronise(path: Path) -> None:
    """Wait until a file is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reads(source: Source, folder: Path, block_bytes: int, rounds: int, seconds: float) -> None:
    """How fast samples come in random, windowed and sequential order, from cold and from warm pages."""
    stores = [make(folder, block_bytes) for make in CONTENDERS]
    unmixed, own = Unmixed(folder, block_bytes), OwnLoader(folder, block_bytes)
    for store in stores:
        apart(partial(store.prepare, source, 0))
        apart(partial(check, store, source))
    apart(partial(check, own, source))
    ours, *others = stores
    readers = [ours, own, *others]
    order = random.Random(0).sample(range(len(source)), min(len(source), Store.reads))
    at_random = {store: partial(store.random, order[: store.reads]) for store in readers}
    tables: dict[str, dict[str, tuple[Store, Callable[[int], Iterable[Any]]]]] = {
        "Random reads per second": {store.name: (store, make) for store, make in at_random.items()},
        ALONE: {
            store.name: (store, lambda workers, make=make: one_by_one(make(workers)))
            for store, make in at_random.items()
            if store is not own
        },
        "Samples per second, shuffled, by window in blocks": {
            f"{store.name}: {store.window}": (store, store.windowed) for store in [ours, unmixed, own, *others]
        },
        "MB per second, sequentially": {f"{store.name}{store.by}": (store, store.sequential) for store in readers},
    }
    for title, rows in tables.items():
        columns: dict[str, dict[str, float]] = {}
        for workers in (0,) if title == ALONE else (0, 2):
            for warm in (False, True):
                measures = {name: partial(reading, store, make, workers, warm, seconds) for name, (store, make) in rows.items()}
                columns[f"{workers or 'no'} workers, {'warm' if warm else 'cold'}"] = in_turns(measures, rounds)
        each = source.nbytes / len(source) / 1e6 if title.startswith("MB") else 1
        print(f"\n| {title} | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
        for name in rows:
            print(f"| {name} | {' | '.join(f'{found[name] * each:,.0f}' for found in columns.values())} |", flush=True)
    for store in stores:
        shutil.rmtree(store.folder)


class Counting(OnDiskBlockDataStorage[Any, Any]):
    """A storage that notes each block that any process reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen = torch.zeros(len(self.index.blocks), dtype=torch.uint8).share_memory_()

    def load_sample(self, idx: int) -> Any:
        """Note the block, and read."""
        self.seen[idx // self.block_size] = 1
        return super().load_sample(idx)

    def load_block(self, b: int) -> list[Any]:
        """Note the block, and read."""
        self.seen[b] = 1
        return super().load_block(b)


def caching(source: Source, folder: Path) -> None:
    """How many blocks are read in each epoch when a part of the dataset is cached."""
    blocks = 32
    prepare(source, folder / "cached", block_size=math.ceil(len(source) / blocks), progress=False)
    print("\n| cached | workers | blocks read in epoch 1 | epoch 2 | epoch 3 | MB in the cache |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for fraction in (0, 0.5, 1):
        for workers in (0, 2):
            storage = Counting(folder / "cached")
            dataset = StorageDataset(storage)
            own = 1 if isinstance(source, Images) else 40  # bytes that the cache takes for a sample besides those of the sample
            limit = f"{fraction * source.nbytes + own * len(source):.0f}B" if fraction else 0
            with CachedDataset(dataset, limit, audit=0) as cached:
                sampler = BlockSampler(dataset.indices, storage.block_size, True, window=WINDOW)
                loader = loading(cached, workers, sampler=sampler)
                touched = []
                for _ in range(3):
                    storage.seen.zero_()  # the constructor reads samples, too
                    assert sum(len(labels) for _, labels in loader) == len(source)
                    touched.append(f"{int(storage.seen.sum())} of {len(storage.seen)}")
                used = cached.stats().total.filled_bytes / 1e6
            print(f"| {fraction:.0%} | {workers} | {' | '.join(touched)} | {used:.0f} |", flush=True)
            del loader
    shutil.rmtree(folder / "cached")


def main() -> None:
    """Run one of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["prepare", "read", "all", "cache"])
    parser.add_argument("source", choices=["images", "text", "photos", "decoded"])
    parser.add_argument("--samples", type=int, help="images (default: 20,000) or rows of text (default: 100,000)")
    parser.add_argument("--folder", type=Path, help="of photos")
    parser.add_argument("--repeat", type=int, default=10, help="how many times each photo is stored")
    parser.add_argument("--block-bytes", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1, help="after which reading stops")
    parser.add_argument("--workdir", type=Path, default=Path(), help="on the disk to be measured; a folder is made there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    resource_tracker.ensure_running()  # one for all processes, or each would complain of names that the others remove
    with scratch(arguments.workdir) as folder:
        source = make_source(arguments)
        print(f"\n### {len(source):,} samples of ({source.name}), {source.nbytes / 1e6:.0f} MB", flush=True)
        if arguments.experiment in ("prepare", "all"):
            preparing(source, folder, arguments.block_bytes, arguments.rounds)
        if arguments.experiment in ("read", "all"):
            reads(source, folder, arguments.block_bytes, arguments.rounds, arguments.seconds)
        if arguments.experiment == "cache":
            caching(source, folder)


def make_source(arguments: argparse.Namespace) -> Source:
    """Return the source that the arguments ask for."""
    if arguments.source == "images":
        return Images(arguments.samples or 20_000)
    if arguments.source == "text":
        return Texts(arguments.samples or 100_000)
    if arguments.folder is None:
        raise SystemExit(f"{arguments.source} needs --folder, with JPEG files.")
    return (Photos if arguments.source == "photos" else DecodedPhotos)(arguments.folder, arguments.repeat)


@contextmanager
def scratch(workdir: Path) -> Iterator[Path]:
    """Make a folder for everything, the temporary files of the peers included; remove it and all they have left."""
    mosaic()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=workdir, prefix="storage-") as path:
        tempfile.tempdir = path
        try:
            yield Path(path).resolve()
        finally:
            tempfile.tempdir = None
            clean_mosaic()


if __name__ == "__main__":
    main()
