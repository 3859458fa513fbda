"""Prepared storage beside LitData, MosaicML streaming and the article's blocks of torch.save: preparing, reading, caching.

    python -m benchmark storage prepare [--folder DIR]   # MB/s until it is on disk, and the size there
    python -m benchmark storage read [--folder DIR]      # random and windowed samples/s, sequential MB/s, cold and warm
    python -m benchmark storage cache [--folder DIR]     # blocks read per epoch through a CachedDataset

Samples are (uint8 tensor 3x64x64, int) and, with ``--folder``, (bytes of a JPEG file, int), which are not decoded. All write
blocks of 8 MB. MB are a million bytes of samples.

Each measurement is made in a process of its own, forked for that, so the maps, threads, open files and shared memory of a
contender are gone after it. Contenders take turns, round by round, and figures are medians. Samples are read in batches of 64.
Images are stacked; otherwise a contender that maps its files would return without having read them. Photos come as a list.

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
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmark.support.measuring import settle
from benchmark.support.peers import clean_mosaic, mosaic
from stocache import BlockSampler, CachedDataset, OnDiskBlockDataStorage, StorageDataset, prepare
from stocache.cli.bench import drop_pages, find_jpegs
from stocache.system.limits import MIB

CLAIM = "Prepared blocks are written and read faster than those of LitData, MosaicML streaming and torch.save."
NEEDS = (
    ("litdata", "litdata", "prepare", "read"),
    ("streaming", "mosaicml-streaming", "prepare", "read"),
)

BLOCK_BYTES, BATCH, WINDOW = 8_000_000, 64, 16
SHAPE = (3, 64, 64)
fork = multiprocessing.get_context("fork")

# ---------------------------------------------------------------------------------------------------- the samples


class Images(Dataset[Any]):
    """Random images and their numbers, from memory."""

    name = "3x64x64 uint8, label"

    def __init__(self, samples: int) -> None:
        self.data = torch.randint(0, 256, (samples, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.nbytes = self.data.numel() + 8 * samples

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, idx: int) -> Any:
        return self.data[idx].clone(), idx


class Photos(Dataset[Any]):
    """The bytes of JPEG files and a number, from files; all of them several times."""

    name = "JPEG bytes, label"

    def __init__(self, folder: Path, repeat: int) -> None:
        self.paths = find_jpegs(folder) * repeat
        self.nbytes = sum(path.stat().st_size + 8 for path in self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> Any:
        return self.paths[idx].read_bytes(), idx


def _pair(sample: Any) -> tuple[Any, int]:
    return (sample["value"], sample["label"]) if isinstance(sample, dict) else sample


def collate(samples: list[Any]) -> tuple[Any, list[int]]:
    """Make a batch for which all bytes of its samples have been read."""
    values, labels = zip(*map(_pair, samples), strict=True)
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values), list(labels)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values)), list(labels)
    return list(map(bytes, values)), list(labels)


# ---------------------------------------------------------------------------------------------------- contenders


class Store(ABC):
    """A contender: a folder that it prepares and reads."""

    name: str
    parallel = True
    """Whether it can be prepared by several processes."""
    reads = 2048
    """How many samples to read at random."""
    by = ""
    """What reads sequentially, where it is not the same as in windowed order."""
    window: str
    """Among how many blocks its windowed order shuffles at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / type(self).__name__

    @abstractmethod
    def prepare(self, source: Any, workers: int) -> None:
        """Write all samples of a dataset."""

    @abstractmethod
    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Return an iterable over batches of samples in the order given."""

    @abstractmethod
    def windowed(self, workers: int) -> Iterable[Any]:
        """Return an iterable over batches in the contender's own shuffled order, in which each block is one stretch."""

    @abstractmethod
    def sequential(self, workers: int) -> Iterable[Any]:
        """Return an iterable over batches in order."""

    def files(self) -> list[Path]:
        """Return all that it has written."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


def loading(dataset: Any, workers: int, make: Any = DataLoader, **options: Any) -> Iterable[Any]:
    """Return a DataLoader, the same for all."""
    fixed = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    loader: Iterable[Any] = make(dataset, **{"batch_size": BATCH} | fixed | options)
    return loader


class Stocache(Store):
    """This library."""

    name = "stocache"
    by = ": load_block; with workers BlockSampler(shuffle=False)"
    window = str(WINDOW)

    def prepare(self, source: Any, workers: int) -> None:
        """Write by `stocache.prepare`."""
        prepare(source, self.folder, num_workers=workers, block_bytes=BLOCK_BYTES, progress=False)

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by `StorageDataset`."""
        return loading(StorageDataset(OnDiskBlockDataStorage(self.folder)), workers, sampler=order)

    def windowed(self, workers: int, shuffle: bool = True, window: int = WINDOW) -> Iterable[Any]:
        """Read by `BlockSampler`."""
        storage: OnDiskBlockDataStorage[Any, Any] = OnDiskBlockDataStorage(self.folder)
        dataset = StorageDataset(storage)
        sampler = BlockSampler(dataset.indices, storage.block_size, shuffle, window=window, prefetch=dataset.prefetch_blocks)
        return loading(dataset, workers, sampler=sampler)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read whole blocks in this process; in workers by `BlockSampler`."""
        return self.windowed(workers, shuffle=False) if workers else loading(_WholeBlocks(self.folder), 0)


class _WholeBlocks(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.storage: OnDiskBlockDataStorage[Any, Any] = OnDiskBlockDataStorage(folder)

    def __iter__(self) -> Iterator[Any]:
        for b in range(len(self.storage.index.blocks)):
            yield from self.storage.load_block(b)


class Unmixed(Stocache):
    """This library, shuffling as far as LitData and the article do."""

    window = "1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / Stocache.__name__

    def windowed(self, workers: int, shuffle: bool = True, window: int = 1) -> Iterable[Any]:
        """Read by `BlockSampler`, shuffling within each block."""
        return super().windowed(workers, shuffle, window)


class LitData(Store):
    """LitData, as its README says; on a local disk it maps its files."""

    name = "LitData"
    window = "1, in runs of 256 samples"

    def prepare(self, source: Any, workers: int) -> None:
        """Write by `litdata.optimize`: with at least one worker, forked, because spawned ones import torch under the clock."""
        import litdata

        inputs, options = list(range(len(source))), {"num_workers": max(1, workers), "keep_data_ordered": True}
        litdata.optimize(
            source.__getitem__, inputs, str(self.folder), chunk_bytes=BLOCK_BYTES, start_method="fork", verbose=False, **options
        )

    def _dataset(self, **options: Any) -> Any:
        import litdata

        return litdata.StreamingDataset(str(self.folder), **options)

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by ``dataset[i]``, which by default decodes 32 images each time."""
        return loading(_ByNumber(self._dataset(batch_decode=0)), workers, sampler=order)

    def windowed(self, workers: int) -> Iterable[Any]:
        """Read by its loader, which by default decodes 32 images each time, too, and shuffles 256."""
        return self._loading(workers, shuffle=True, batch_decode=256)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its loader."""
        return self._loading(workers)

    def _loading(self, workers: int, **options: Any) -> Iterable[Any]:
        import litdata

        return loading(self._dataset(**options), workers, litdata.StreamingDataLoader)


class _ByNumber(Dataset[Any]):
    """A dataset that torch takes for one to iterate over, though it has ``__getitem__``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, idx: int) -> Any:
        return self.dataset[idx]


class Mosaic(Store):
    """MosaicML streaming, as its documentation says."""

    name = "MosaicML streaming"
    window = str(WINDOW)

    def prepare(self, source: Any, workers: int) -> None:
        """Write by `MDSWriter`; in parallel by one for each worker, in folders of their own, whose indices are merged."""
        if not workers:
            self._write(source, range(len(source)), self.folder)
            return
        bounds = np.linspace(0, len(source), workers + 1).astype(int).tolist()
        parts = [(source, range(*bounds[rank : rank + 2]), self.folder / str(rank)) for rank in range(workers)]
        processes = [fork.Process(target=self._write, args=part) for part in parts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        mosaic().base.util.merge_index(str(self.folder), keep_local=True)

    def _write(self, source: Any, indices: range, folder: Path) -> None:
        image = isinstance(source, Images)
        columns = {"value": f"ndarray:uint8:{','.join(map(str, SHAPE))}" if image else "bytes", "label": "int"}
        with mosaic().MDSWriter(columns=columns, out=str(folder), size_limit=BLOCK_BYTES) as writer:
            for idx in indices:
                value, label = source[idx]
                writer.write({"value": value.numpy() if image else value, "label": label})

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by its dataset for local files, which needs no shared memory."""
        return loading(mosaic().LocalDataset(str(self.folder)), workers, sampler=order)

    def windowed(self, workers: int, shuffle: bool = True) -> Iterable[Any]:
        """Read by its loader, which shuffles about as many samples at a time as are in our window.

        It may download all ahead; otherwise it would check after each sample for the next ones.
        """
        clean_mosaic()
        streaming = mosaic()
        samples = len(streaming.LocalDataset(str(self.folder)))
        options = {"shuffle": shuffle, "batch_size": BATCH, "num_canonical_nodes": 1, "predownload": samples}
        options["shuffle_block_size"] = WINDOW * (samples // len(list(self.folder.rglob("*.mds"))))
        dataset = streaming.StreamingDataset(local=str(self.folder), **options)
        return loading(dataset, workers, streaming.StreamingDataLoader)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its loader."""
        return self.windowed(workers, shuffle=False)


class Article(Store):
    """The storage of the article on block storage: lists of samples written by torch.save, the last one loaded is kept."""

    name = "torch.save blocks"
    parallel = False
    reads = BATCH
    window = "1"

    def prepare(self, source: Any, workers: int) -> None:
        """Write a file for each block."""
        self.folder.mkdir()
        size = max(1, round(BLOCK_BYTES / (source.nbytes / len(source))))
        for number, first in enumerate(range(0, len(source), size)):
            block = [source[idx] for idx in range(first, min(first + size, len(source)))]
            torch.save(block, self.folder / f"block_{number}.pt")
        torch.save({"samples": len(source), "block_size": size}, self.folder / "info.pt")

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by number; in small batches, as otherwise one worker would do it all."""
        return loading(_Blocks(self.folder), workers, sampler=order, batch_size=BATCH // 4)

    def windowed(self, workers: int, shuffle: bool = True) -> Iterable[Any]:
        """Read by its sampler, which is ours with a window of one."""
        dataset = _Blocks(self.folder)
        return loading(dataset, workers, sampler=BlockSampler(range(len(dataset)), dataset.block_size, shuffle, window=1))

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its sampler."""
        return self.windowed(workers, shuffle=False)


class _Blocks(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        info = torch.load(folder / "info.pt", weights_only=True)
        self.folder, self.samples, self.block_size = folder, info["samples"], info["block_size"]
        self.number = -1
        self.block: list[Any] = []

    def __len__(self) -> int:
        return int(self.samples)

    def __getitem__(self, idx: int) -> Any:
        number, row = divmod(idx, self.block_size)
        if number != self.number:
            self.block, self.number = torch.load(self.folder / f"block_{number}.pt", weights_only=False), number
        return self.block[row]


CONTENDERS = (Stocache, LitData, Mosaic, Article)

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
    """Return the samples per second of a pass, or of its part within so many seconds."""
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


def preparing(source: Any, folder: Path, rounds: int) -> None:
    """How fast the samples come to the disk, and their size there."""

    def speed(store: Store, workers: int) -> float:
        shutil.rmtree(store.folder, ignore_errors=True)
        os.sync()
        settle(2 * source.nbytes)
        began = time.perf_counter()
        store.prepare(source, workers)
        for path in store.files():
            synchronise(path)
        return source.nbytes / 1e6 / (time.perf_counter() - began)

    stores = [make(folder) for make in CONTENDERS]
    speeds = []
    for workers in (0, 2):
        measures = {store.name: partial(speed, store, workers) for store in stores if store.parallel or not workers}
        speeds.append(in_turns(measures, rounds))
    print("\n| store | MB/s, no workers | MB/s, 2 workers | MB on disk | of the samples |\n| --- | ---: | ---: | ---: | ---: |")
    for store in stores:
        apart(partial(check, store, source))
        nbytes = sum(path.stat().st_size for path in store.files())
        shown = " | ".join(f"{found[store.name]:.0f}" if store.name in found else "" for found in speeds)
        print(f"| {store.name} | {shown} | {nbytes / 1e6:.1f} | {nbytes / source.nbytes:.4f} |", flush=True)
        shutil.rmtree(store.folder)


def synchronise(path: Path) -> None:
    """Wait until a file is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reads(source: Any, folder: Path, rounds: int, seconds: float) -> None:
    """How fast samples come in random, windowed and sequential order, from cold and from warm pages."""
    stores = [make(folder) for make in CONTENDERS]
    for store in stores:
        apart(partial(store.prepare, source, 0))
        apart(partial(check, store, source))
    order = random.Random(0).sample(range(len(source)), min(len(source), Store.reads))
    tables: dict[str, dict[str, tuple[Store, Callable[[int], Iterable[Any]]]]] = {
        "Random reads per second": {store.name: (store, partial(store.random, order[: store.reads])) for store in stores},
        "Samples per second, shuffled within windows of so many blocks": {
            f"{store.name}: {store.window}": (store, store.windowed) for store in [stores[0], Unmixed(folder), *stores[1:]]
        },
        "MB per second, sequentially": {f"{store.name}{store.by}": (store, store.sequential) for store in stores},
    }
    for title, rows in tables.items():
        columns: dict[str, dict[str, float]] = {}
        for workers in (0, 2):
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


def caching(source: Any, folder: Path) -> None:
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
            with CachedDataset(dataset, limit) as cached:
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
    parser.add_argument("experiment", choices=["prepare", "read", "cache"])
    parser.add_argument("--samples", type=int, default=20_000, help="images")
    parser.add_argument("--folder", type=Path, help="of photos; without it, only images")
    parser.add_argument("--repeat", type=int, default=10, help="how many times each photo is stored")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1, help="after which reading stops")
    parser.add_argument("--workdir", type=Path, default=Path(), help="on the disk to be measured; a folder is made there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    resource_tracker.ensure_running()  # one for all processes, or each would complain of names that the others remove
    sources: list[Callable[[], Any]] = [partial(Images, arguments.samples)]
    if arguments.folder is not None:
        sources.append(partial(Photos, arguments.folder, arguments.repeat))
    with scratch(arguments.workdir) as folder:
        for make in sources:
            source = make()
            print(f"\n### {len(source):,} samples of ({source.name}), {source.nbytes / 1e6:.0f} MB", flush=True)
            if arguments.experiment == "prepare":
                preparing(source, folder, arguments.rounds)
            elif arguments.experiment == "read":
                reads(source, folder, arguments.rounds, arguments.seconds)
            else:
                caching(source, folder)


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
