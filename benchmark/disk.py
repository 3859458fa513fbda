"""The tier on a disk: random hits beside bare reads and other caches on a disk, epochs beside memory, and reads of the source.

    python -m benchmark disk reads     # random hits per second, cold and warm, by 1 and 2 threads
    python -m benchmark disk epochs    # epochs over a slow source: without a cache, with memory, with memory and a disk
    python -m benchmark disk once      # how often the source is read in three runs of three epochs

``reads``: rows of uint8 of 12 KB, 150 KB and 1 MB, some 250 MB of each, in batches of 64 in random order. *bare*: `preadv` of
each row into its place in the memory of a batch, by as many threads; nothing is checked. *bare, checked*: the same, and each
row is hashed, and compared with a checksum behind it. *stocache*: `DiskCache.fill` into the same memory, every row under its
checksum. The others return a sample each, which is copied into the batch. All are forked processes of their own that take
turns; figures are medians. *Cold*: the files' pages are dropped before each pass.

``epochs``: a source of 10 ms a sample, 2 workers, batches of 32, a step of some ms for each batch.
"""

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from benchmark.storage import apart
from benchmark.support.measuring import machine, settle
from benchmark.support.stores import Images, LitData, Mosaic
from stocache import CachedDataset, DataLoader, DiskCache
from stocache.samples.spec import Structure
from stocache.tools.bench import drop_pages

CLAIM = "Samples that do not fit in memory are read from the source once, and then from a local disk at its own rate."
NEEDS = (
    ("litdata", "litdata", "reads"),
    ("streaming", "mosaicml-streaming", "reads"),
    ("diskcache", "diskcache", "reads"),
    ("lmdb", "lmdb", "reads"),
    ("joblib", "joblib", "reads"),
)

BATCH = 64
SHAPES = {"12 KB": ((3, 64, 64), 20_000), "150 KB": ((3, 224, 224), 1_700), "1 MB": ((3, 592, 592), 240)}

Fill = Callable[[np.ndarray[Any, Any], torch.Tensor], None]
"""Reads rows into the memory of a batch. Each thread has its own."""


# ---------------------------------------------------------------------------------------------------- contenders


class Rows(Images):
    """Random rows of any shape."""

    def __init__(self, shape: tuple[int, ...], samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.data = torch.randint(0, 256, (samples, *shape), dtype=torch.uint8, generator=generator)
        self.nbytes, self.column = self.data.numel(), f"ndarray:uint8:{','.join(map(str, shape))}"


class Contender(ABC):
    """Rows in a folder."""

    name: str

    def __init__(self, folder: Path, source: Rows) -> None:
        self.folder, self.source = folder / type(self).__name__, source

    @abstractmethod
    def write(self) -> None:
        """Write all rows."""

    @abstractmethod
    def open(self) -> Callable[[], Fill]:
        """Open the folder in this process. Return what makes a `Fill` for a thread."""


class Bare(Contender):
    """One file, without checksums."""

    name = "bare"

    def write(self) -> None:
        """See `Contender`."""
        self.folder.mkdir()
        (self.folder / "rows").write_bytes(self.source.data.numpy().tobytes())

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        fd, nbytes = os.open(self.folder / "rows", os.O_RDONLY), self.source.data[0].numel()

        def fill(rows: np.ndarray[Any, Any], batch: torch.Tensor) -> None:
            memory = batch.view(len(rows), nbytes).numpy()
            for at, row in enumerate(rows.tolist()):
                os.preadv(fd, [memory[at]], row * nbytes)

        return lambda: fill


class Checked(Bare):
    """The same with the XXH3-64 of each row behind it, as `DiskCache` has it."""

    name = "bare, checked"

    def write(self) -> None:
        """See `Contender`."""
        self.folder.mkdir()
        with (self.folder / "rows").open("wb") as file:
            for row in self.source.data.flatten(1).numpy():
                file.write(row.tobytes() + xxhash.xxh3_64_intdigest(row).to_bytes(8, "little"))

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        fd, nbytes = os.open(self.folder / "rows", os.O_RDONLY), self.source.data[0].numel()

        def fill(rows: np.ndarray[Any, Any], batch: torch.Tensor) -> None:
            memory, checksum = batch.view(len(rows), nbytes).numpy(), bytearray(8)
            for at, row in enumerate(rows.tolist()):
                os.preadv(fd, [memory[at], checksum], row * (nbytes + 8))
                assert xxhash.xxh3_64_intdigest(memory[at]) == int.from_bytes(checksum, "little")

        return lambda: fill


class Stocache(Contender):
    """This library."""

    name = "stocache"

    def _cache(self) -> DiskCache:
        structure = Structure.from_dims(tuple(self.source.data.shape[1:]), torch.uint8)
        return DiskCache(self.folder, "4GB", len(self.source), structure=structure, fingerprint="1")

    def write(self) -> None:
        """See `Contender`."""
        with self._cache() as cache:
            for first in range(0, len(self.source), 256):
                rows = range(first, min(first + 256, len(self.source)))
                cache.get_or_load_many(list(rows), lambda indices: [self.source.data[idx] for idx in indices])

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        cache = self._cache()

        def fill(rows: np.ndarray[Any, Any], batch: torch.Tensor) -> None:
            found = cache.fill(rows, np.arange(len(rows)), [batch])
            assert len(found) == len(rows)

        return lambda: fill


def by_sample(load: Callable[[int], Any]) -> Fill:
    """Return what reads each row by itself, and copies it."""

    def fill(rows: np.ndarray[Any, Any], batch: torch.Tensor) -> None:
        memory = batch.numpy()
        for at, row in enumerate(rows.tolist()):
            memory[at] = load(row)

    return fill


class DiskCacheLibrary(Contender):
    """diskcache: pickled arrays, in files beyond 32 KiB."""

    name = "diskcache"

    def write(self) -> None:
        """See `Contender`."""
        import diskcache

        with diskcache.Cache(str(self.folder), size_limit=1 << 40) as cache:
            for idx in range(len(self.source)):
                cache[idx] = self.source.data[idx].numpy()

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        import diskcache

        cache = diskcache.Cache(str(self.folder))
        return lambda: by_sample(cache.__getitem__)


class Lmdb(Contender):
    """LMDB: bytes in a map."""

    name = "LMDB"

    def write(self) -> None:
        """See `Contender`."""
        import lmdb

        with lmdb.open(str(self.folder), map_size=1 << 32) as environment:
            for first in range(0, len(self.source), 256):
                with environment.begin(write=True) as transaction:
                    for idx in range(first, min(first + 256, len(self.source))):
                        transaction.put(idx.to_bytes(8, "big"), self.source.data[idx].numpy().tobytes())

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        import lmdb

        environment = lmdb.open(str(self.folder), readonly=True, lock=False, readahead=False)
        shape = tuple(self.source.data.shape[1:])

        def fill() -> Fill:
            transaction = environment.begin(buffers=True)
            return by_sample(lambda row: np.frombuffer(transaction.get(row.to_bytes(8, "big")), np.uint8).reshape(shape))

        return fill


class Joblib(Contender):
    """joblib.Memory, with maps of its files."""

    name = "joblib.Memory"

    def _load(self) -> Callable[[int], Any]:
        import joblib

        memory = joblib.Memory(str(self.folder), mmap_mode="r", verbose=0)
        source = self.source

        def row(idx: int) -> Any:
            return source.data[idx].numpy()

        load: Callable[[int], Any] = memory.cache(row)
        return load

    def write(self) -> None:
        """See `Contender`."""
        load = self._load()
        for idx in range(len(self.source)):
            load(idx)

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        return lambda: by_sample(self._load())


class _Pairs(Contender):
    store: type[LitData | Mosaic]

    def __init__(self, folder: Path, source: Rows) -> None:
        super().__init__(folder, source)
        self._store = self.store(self.folder, 8 << 20)
        self.folder = self._store.folder

    def write(self) -> None:
        """See `Contender`."""
        self.folder.parent.mkdir(exist_ok=True)
        self._store.prepare(self.source, 0)


class LitDataCache(_Pairs):
    """LitData's local chunks."""

    name, store = "LitData", LitData

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        import litdata

        def fill() -> Fill:  # threads cannot share a dataset
            dataset = litdata.StreamingDataset(str(self.folder), batch_decode=0)
            return by_sample(lambda row: dataset[row][0])

        return fill


class MosaicCache(_Pairs):
    """MosaicML's local shards."""

    name, store = "MosaicML streaming", Mosaic

    def open(self) -> Callable[[], Fill]:
        """See `Contender`."""
        from benchmark.support.peers import mosaic

        def fill() -> Fill:
            dataset = mosaic().LocalDataset(str(self.folder))
            return by_sample(lambda row: dataset[row]["value"])

        return fill


CONTENDERS = [Bare, Checked, Stocache, LitDataCache, MosaicCache, DiskCacheLibrary, Lmdb, Joblib]

# ---------------------------------------------------------------------------------------------------- random hits


def rate_of(contender: Contender, threads: int, cold: bool, seconds: float) -> float:
    """Return rows per second, read by ``threads`` threads in random order, until all were read or the time is over."""
    make, shape, count = contender.open(), contender.source.data.shape[1:], len(contender.source)
    order = np.random.default_rng(1).permutation(count)
    files = [path for path in contender.folder.rglob("*") if path.is_file()]
    batches = [order[at : at + BATCH] for at in range(0, count - BATCH + 1, BATCH)]
    memory = [torch.zeros(BATCH, *shape, dtype=torch.uint8) for _ in range(threads)]
    fills = [make() for _ in range(threads)]
    fills[0](batches[0], memory[0])
    assert torch.equal(memory[0], contender.source.data[torch.from_numpy(batches[0])]), contender.name
    if not cold:
        for path in files:
            path.read_bytes()
        for rows in batches[: len(batches) // 4]:
            fills[0](rows, memory[0])
    settle(64 << 20)
    if cold:
        drop_pages(files)
    waiting, done = iter(batches), [0] * threads
    until = time.perf_counter() + seconds

    def run(number: int) -> None:
        for rows in waiting:  # next() of a list's iterator is atomic
            fills[number](rows, memory[number])
            done[number] += len(rows)
            if time.perf_counter() > until:
                return

    began = time.perf_counter()
    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - began)


def reads(folder: Path, rounds: int, seconds: float, sizes: list[str]) -> None:
    """Print the tables of random hits."""
    columns = list(itertools.product((1, 2), (True, False)))
    for size in sizes:
        shape, count = SHAPES[size]
        source = Rows(shape, count)
        place = folder / size.replace(" ", "")
        place.mkdir()
        contenders = [kind(place, source) for kind in CONTENDERS]
        for contender in contenders:
            contender.write()
        os.sync()
        rates: dict[tuple[int, tuple[int, bool]], list[float]] = {}
        for turn in range(rounds):
            for column in columns:
                for offset in range(len(contenders)):
                    at = (turn + offset) % len(contenders)
                    rates.setdefault((at, column), []).append(apart(partial(rate_of, contenders[at], *column, seconds)))
        print(f"\n{count:,} rows of {size}, per second\n")
        titles = [f"{threads} thread{'s' * (threads > 1)}, {'cold' if cold else 'warm'}" for threads, cold in columns]
        print("| cache | " + " | ".join(titles) + " |")
        print("| --- |" + " ---: |" * len(columns))
        for at, contender in enumerate(contenders):
            print(f"| {contender.name} | " + " | ".join(f"{statistics.median(rates[at, c]):,.0f}" for c in columns) + " |")
        ours = CONTENDERS.index(Stocache)
        for at in range(ours):
            ratios = [statistics.median(map(lambda a, b: a / b, rates[ours, c], rates[at, c])) for c in columns]
            print(f"| stocache to {contenders[at].name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True)
        shutil.rmtree(place)


# ---------------------------------------------------------------------------------------------------- epochs


class Slow(Dataset[Any]):
    """Images that take some time, and a file that has a byte for each time that one was loaded."""

    def __init__(self, samples: int, seconds: float, count: Path, shape: tuple[int, ...] = (3, 224, 224)) -> None:
        self.samples, self.seconds, self.count, self.shape = samples, seconds, count, shape

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> Any:
        with open(self.count, "ab") as file:
            file.write(b".")
        time.sleep(self.seconds)
        return torch.full(self.shape, idx % 251, dtype=torch.uint8), idx

    def counted(self) -> int:
        """Return how often samples were loaded since the last call."""
        count = self.count.stat().st_size if self.count.exists() else 0
        self.count.write_bytes(b"")
        return count


def epoch(loader: Any, step_s: float) -> float:
    """Return the seconds of an epoch in which each batch takes a step; check the samples."""
    began = time.perf_counter()
    for images, labels in loader:
        assert torch.equal(images[:, 0, 0, 0].long(), labels % 251)
        time.sleep(step_s)
    return time.perf_counter() - began


def epochs(folder: Path, rounds: int, samples: int, seconds: float, steps_s: list[float]) -> None:
    """Print the times of first and later epochs."""
    sample_bytes = 3 * 224 * 224 + 8
    quarter = f"{int(0.25 * samples) * sample_bytes + 2 * samples}B"
    whole = f"{2 * samples * sample_bytes}B"
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for turn, step_s in itertools.product(range(rounds), steps_s):
        contenders: dict[str, dict[str, Any]] = {
            "memory 1": {"size_limit_gib": whole},
            "memory 0.25": {"size_limit_gib": quarter},
            "memory 0.25, disk 0.75": {"size_limit_gib": quarter, "disk": folder / f"{turn}-{step_s}", "disk_limit": "4GB"},
            "memory 0, disk 1": {"size_limit_gib": 0, "disk": folder / f"0-{turn}-{step_s}", "disk_limit": "4GB"},
        }
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            source = Slow(samples, seconds, folder / "count")
            with CachedDataset(source, fingerprint=None, audit=0, **contenders[name]) as cached:
                loader = DataLoader(cached, 32, shuffle=True, num_workers=2, persistent_workers=True)
                first = epoch(loader, step_s)
                later = [epoch(loader, step_s) for _ in range(3)]
                del loader
            found.setdefault((name, step_s), []).append((first, statistics.median(later)))
    print("\n| cache | step, ms | first epoch, s | to memory 0.25 | later epochs, s | to memory 1 |\n| --- |" + " ---: |" * 5)
    for (name, step_s), pairs in found.items():
        first, later = (statistics.median(column) for column in zip(*pairs, strict=True))
        to_quarter = statistics.median(map(lambda a, b: a[0] / b[0], pairs, found["memory 0.25", step_s]))
        to_whole = statistics.median(map(lambda a, b: a[1] / b[1], pairs, found["memory 1", step_s]))
        print(f"| {name} | {1000 * step_s:.0f} | {first:.2f} | {to_quarter:.3f} | {later:.3f} | {to_whole:.2f} |", flush=True)


# ---------------------------------------------------------------------------------------------------- reads of the source


def once(folder: Path, samples: int) -> None:
    """Print how often the source was read in three runs of three epochs."""
    shape, nbytes = (3, 32, 32), 3 * 32 * 32 + 8
    print("\n| in memory | workers | jobs | first run | second | third |\n| ---: | ---: | --- | ---: | ---: | ---: |")
    settings = [(c, workers, "1") for c in (0.0, 0.25, 0.5) for workers in (0, 2, 4)]
    settings += [(c, 2, kind) for c in (0.0, 0.25, 0.5) for kind in ("2 ranks", "2 jobs at once")]
    for number, (c, workers, kind) in enumerate(settings):
        source = Slow(samples, 0.0, folder / f"count{number}", shape)
        limit: Any = f"{int(c * samples) * nbytes + 2 * samples}B" if c else 0
        options = {"size_limit_gib": limit, "disk": folder / str(number), "disk_limit": "1GB", "fingerprint": "1"}
        if kind == "2 ranks":
            options["name"] = f"benchmark-disk-{os.getpid()}"

        def job(rank: int) -> None:
            sampler = torch.utils.data.DistributedSampler(source, 2, rank) if kind == "2 ranks" else None  # noqa: B023
            with CachedDataset(source, example=source_example(shape), audit=0, **options) as cached:  # noqa: B023
                loader = DataLoader(cached, 32, shuffle=sampler is None, sampler=sampler, num_workers=workers)  # noqa: B023
                for _ in range(3):
                    epoch(loader, 0.0)

        counts = []
        for _ in range(3):
            for _ in _together(job, 1 if kind == "1" else 2):
                pass
            counts.append(source.counted())
        print(f"| {c} | {workers} | {kind} | " + " | ".join(f"{count:,}" for count in counts) + " |", flush=True)


def source_example(shape: tuple[int, ...]) -> Any:
    """Return a sample, in place of the probe: it would load some samples more than once."""
    return torch.zeros(shape, dtype=torch.uint8), 0


def _together(job: Callable[[int], None], count: int) -> Iterator[None]:
    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=job, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
        yield


def main() -> None:
    """Run one experiment."""
    parser = argparse.ArgumentParser(prog="python -m benchmark disk", description=__doc__.split("\n")[0])
    parser.add_argument("experiment", choices=("reads", "epochs", "once"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="at most, for each measurement of reads")
    parser.add_argument("--sizes", default=",".join(SHAPES), help="of rows")
    parser.add_argument("--samples", type=int, default=1000, help="of the slow source")
    parser.add_argument("--cost-ms", type=float, default=10.0, help="of a sample of the slow source")
    parser.add_argument("--steps-ms", default="0,20", help="of a batch")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default one for temporary files")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of more workers than CPUs
    torch.set_num_threads(1)  # its pool would hang in forked children
    print(machine())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.experiment == "reads":
            reads(Path(name), options.rounds, options.seconds, options.sizes.split(","))
        elif options.experiment == "epochs":
            steps_s = [float(step) / 1000 for step in options.steps_ms.split(",")]
            epochs(Path(name), options.rounds, options.samples, options.cost_ms / 1000, steps_s)
        else:
            once(Path(name), options.samples)


if __name__ == "__main__":
    main()
