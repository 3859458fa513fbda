"""The tier on a disk: random hits beside bare reads and other caches on a disk, and epochs beside memory.

Folders are temporary ones: TMPDIR chooses the disk.

``reads``: rows of uint8, some 250 MB of each size, in batches of 64 in random order. *bare*: `preadv` of each row into its
place in the memory of a batch, by as many threads; nothing is checked. *bare, checked*: the same, and each row is hashed, and
compared with a checksum behind it. *stocache*: `DiskCache.fill` into the same memory, every row under its checksum. The others
return a sample each, which is copied into the batch. All are forked processes of their own. *Cold*: the files' pages are
dropped before each pass.
"""

# ruff: noqa: D102  # `Contender` describes the methods

import itertools
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from benchmark.support.datasets import Made
from benchmark.support.harness import Figures, Run, experiment
from benchmark.support.measuring import run_threads, settle
from benchmark.support.processes import in_fork
from benchmark.support.stores import LitData, Mosaic, Source, rows
from stocache import CachedDataset, DataLoader, DiskCache
from stocache.samples.spec import Structure
from stocache.tools.bench import drop_pages

CLAIM = "Samples that do not fit in memory are read from a local disk at its own rate."

BATCH = 64

Fill = Callable[[np.ndarray[Any, Any], torch.Tensor], None]
"""Reads rows into the memory of a batch. Each thread has its own."""


# ---------------------------------------------------------------------------------------------------- random hits


class Contender(ABC):
    """Rows in a folder."""

    name: str

    def __init__(self, folder: Path, source: Source, data: torch.Tensor) -> None:
        self.folder, self.source, self.data = folder / type(self).__name__, source, data
        self.nbytes = data[0].numel()

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
        self.folder.write_bytes(self.data.numpy().tobytes())

    def open(self) -> Callable[[], Fill]:
        fd = os.open(self.folder, os.O_RDONLY)

        def fill(rows: np.ndarray[Any, Any], batch: torch.Tensor) -> None:
            memory = batch.view(len(rows), self.nbytes).numpy()
            for at, row in enumerate(rows.tolist()):
                os.preadv(fd, [memory[at]], row * self.nbytes)

        return lambda: fill


class Checked(Bare):
    """The same with the XXH3-64 of each row behind it, as `DiskCache` has it."""

    name = "bare, checked"

    def write(self) -> None:
        with self.folder.open("wb") as file:
            for row in self.data.numpy():
                file.write(row.tobytes() + xxhash.xxh3_64_intdigest(row).to_bytes(8, "little"))

    def open(self) -> Callable[[], Fill]:
        fd = os.open(self.folder, os.O_RDONLY)

        def fill(rows: np.ndarray[Any, Any], batch: torch.Tensor) -> None:
            memory, checksum = batch.view(len(rows), self.nbytes).numpy(), bytearray(8)
            for at, row in enumerate(rows.tolist()):
                os.preadv(fd, [memory[at], checksum], row * (self.nbytes + 8))
                assert xxhash.xxh3_64_intdigest(memory[at]) == int.from_bytes(checksum, "little")

        return lambda: fill


class Stocache(Contender):
    """This library."""

    name = "stocache"

    def _cache(self) -> DiskCache:
        structure = Structure.from_dims(tuple(self.data.shape[1:]), torch.uint8)
        return DiskCache(self.folder, "4GB", len(self.source), structure=structure, fingerprint="1")

    def write(self) -> None:
        with self._cache() as cache:
            for batch in torch.arange(len(self.source)).split(256):
                cache.get_or_load_many(batch.tolist(), lambda indices: [self.data[idx] for idx in indices])

    def open(self) -> Callable[[], Fill]:
        cache = self._cache()

        def fill(rows: np.ndarray[Any, Any], batch: torch.Tensor) -> None:
            assert len(cache.fill(rows, np.arange(len(rows)), [batch])) == len(rows)

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

    def _cache(self) -> Any:
        import diskcache

        return diskcache.Cache(str(self.folder), size_limit=1 << 40)

    def write(self) -> None:
        with self._cache() as cache:
            for idx, row in enumerate(self.data.numpy()):
                cache[idx] = row

    def open(self) -> Callable[[], Fill]:
        cache = self._cache()
        return lambda: by_sample(cache.__getitem__)


class Lmdb(Contender):
    """LMDB: bytes in a map."""

    name = "LMDB"

    def _opened(self, **options: Any) -> Any:
        import lmdb

        return lmdb.open(str(self.folder), map_size=1 << 32, **options)

    def write(self) -> None:
        with self._opened() as environment, environment.begin(write=True) as transaction:
            for idx, row in enumerate(self.data.numpy()):
                transaction.put(idx.to_bytes(8, "big"), row.tobytes())

    def open(self) -> Callable[[], Fill]:
        environment, shape = self._opened(readonly=True, lock=False, readahead=False), tuple(self.data.shape[1:])

        def fill() -> Fill:
            transaction = environment.begin(buffers=True)
            return by_sample(lambda row: np.frombuffer(transaction.get(row.to_bytes(8, "big")), np.uint8).reshape(shape))

        return fill


class Joblib(Contender):
    """joblib.Memory, with maps of its files."""

    name = "joblib.Memory"

    def _load(self) -> Callable[[int], Any]:
        import joblib

        data = self.data

        def row(idx: int) -> Any:
            return data[idx].numpy()

        load: Callable[[int], Any] = joblib.Memory(str(self.folder), mmap_mode="r", verbose=0).cache(row)
        return load

    def write(self) -> None:
        load = self._load()
        for idx in range(len(self.source)):
            load(idx)

    def open(self) -> Callable[[], Fill]:
        return lambda: by_sample(self._load())


class Prepared(Contender):
    """Prepared samples of a library, in local files of 8 MiB, of which each thread opens a dataset of its own."""

    make: type[LitData] | type[Mosaic]
    value: int | str
    """What stands in a sample for the row."""

    def write(self) -> None:
        self.folder.mkdir()
        self.make(self.folder, 8 << 20).prepare(self.source)

    def open(self) -> Callable[[], Fill]:
        def fill() -> Fill:
            dataset = self.make(self.folder, 0).by_number()
            return by_sample(lambda row: dataset[row][self.value])

        return fill


class LitDataCache(Prepared):
    """LitData's local chunks."""

    name, make, value = "LitData", LitData, 0


class MosaicCache(Prepared):
    """MosaicML's local shards."""

    name, make, value = "MosaicML streaming", Mosaic, "value"


def rate_of(contender: Contender, threads: int, cold: bool, seconds: float) -> float:
    """Return rows per second, read by ``threads`` threads in random order, until all were read or the time is over."""
    make, shape, count = contender.open(), contender.data.shape[1:], len(contender.source)
    order = np.random.default_rng(1).permutation(count)
    files = [path for path in [contender.folder, *contender.folder.rglob("*")] if path.is_file()]
    batches = [order[at : at + BATCH] for at in range(0, count - BATCH + 1, BATCH)]
    memory = [torch.zeros(BATCH, *shape, dtype=torch.uint8) for _ in range(threads)]
    fills = [make() for _ in range(threads)]
    fills[0](batches[0], memory[0])
    assert torch.equal(memory[0], contender.data[torch.from_numpy(batches[0])]), contender.name
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

    def read(number: int) -> None:
        for rows in waiting:  # next() of a list's iterator is atomic
            fills[number](rows, memory[number])
            done[number] += len(rows)
            if time.perf_counter() > until:
                return

    took = run_threads(read, range(threads))
    return sum(done) / took


@experiment(rounds=5, needs="litdata streaming diskcache lmdb joblib")
def reads(run: Run) -> None:
    """Random hits per second, cold and warm, by 1 and 2 threads."""
    torch.set_num_threads(1)  # its pool would hang in forked children
    sizes = {"12 KB": ((3, 64, 64), 20_000), "150 KB": ((3, 224, 224), 1_700), "1 MB": ((3, 592, 592), 240)}
    table = run.table("rows", "threads", "pages", "cache", "rows/s", "stocache to it")
    for size, (shape, count) in run.chosen(dict(list(sizes.items())[: run.size(None, 1)])).items():
        source = rows(count // run.size(1, 4) + BATCH, *shape)
        data = torch.stack([source[idx][0] for idx in range(len(source))])
        with tempfile.TemporaryDirectory() as folder:
            kinds = Bare, Checked, Stocache, LitDataCache, MosaicCache, DiskCacheLibrary, Lmdb, Joblib
            contenders = [kind(Path(folder), source, data) for kind in kinds]
            for contender in contenders:
                in_fork(contender.write)
            os.sync()
            for threads, cold in itertools.product(run.size((1, 2), (2,)), (True, False)):
                rates = run.turns(
                    {
                        each.name: partial(in_fork, partial(rate_of, each, threads, cold, run.size(1.5, 0.1)))
                        for each in contenders
                    },
                    warm_up=0,
                )
                for name in rates:
                    cells = size, threads, "cold" if cold else "warm", name
                    table.row(*cells, rates.median(name), rates.ratio("stocache", name))
    for pages in ("cold", "warm"):
        shares = table.column("stocache to it", cache="bare", pages=pages)
        run.claim(f"{pages} random hits come at 0.8 of bare reads", min(shares), least=0.8)


# ---------------------------------------------------------------------------------------------------- epochs


def slow_image(idx: int) -> Any:
    """Return an image and a label, after 10 ms."""
    time.sleep(0.01)
    return torch.full((3, 224, 224), idx % 251, dtype=torch.uint8), idx


def checked_epoch(loader: Any, step_s: float) -> float:
    """Return the seconds of an epoch in which each batch takes a step; check the samples."""
    began = time.perf_counter()
    for images, labels in loader:
        assert torch.equal(images[:, 0, 0, 0].long(), labels % 251)
        time.sleep(step_s)
    return time.perf_counter() - began


def first_and_later(source: Made, options: dict[str, Any], step_s: float) -> tuple[float, float]:
    """Return the seconds of the first epoch, and of the third."""
    with tempfile.TemporaryDirectory() as folder:
        options = options | ({"disk": f"{folder}/disk"} if "disk_limit" in options else {})
        with CachedDataset(source, fingerprint=None, audit=0, **options) as cached:
            loader = DataLoader(cached, 32, shuffle=True, num_workers=2, persistent_workers=True)
            seconds = [checked_epoch(loader, step_s) for _ in range(3)]
            del loader
    return seconds[0], seconds[-1]


@experiment(rounds=5)
def epochs(run: Run) -> None:
    """Epochs over a source of 10 ms a sample: with memory, and with memory and a disk; without a step and with one of 20 ms."""
    torch.set_num_threads(1)
    samples, nbytes = run.size(1000, 128), 3 * 224 * 224 + 8
    quarter, whole = f"{samples // 4 * nbytes + 2 * samples}B", f"{2 * samples * nbytes}B"
    caches: dict[str, dict[str, Any]] = {
        "memory 1": {"size_limit_gib": whole},
        "memory 0.25": {"size_limit_gib": quarter},
        "memory 0.25, disk 0.75": {"size_limit_gib": quarter, "disk_limit": "4GB"},
        "memory 0, disk 1": {"size_limit_gib": 0, "disk_limit": "4GB"},
    }
    titles = "cache", "step, ms", "first epoch, s", "to memory 0.25", "later epochs, s", "to memory 1"
    table, both = run.table(*titles), "memory 0.25, disk 0.75"
    source = Made(samples, slow_image)
    for step_s in (0.0, 0.02):
        found = run.results(
            {name: partial(first_and_later, source, options, step_s) for name, options in caches.items()}, warm_up=0
        )
        first, later = Figures.columns(found)
        for name in caches:
            ratios = first.ratio(name, "memory 0.25"), later.ratio(name, "memory 1")
            table.row(name, 1e3 * step_s, first.median(name), ratios[0], later.median(name), ratios[1])
    run.claim("with a step, epochs take 1.15 of those from memory", later.ratio(both, "memory 1"), most=1.15)
    run.claim("filling adds 5 %", first.ratio(both, "memory 0.25"), most=1.05)
