"""Prepared storage beside LitData, MosaicML streaming and the article's blocks of torch.save: preparing and reading.

Sources (``--only``): images (uint8 tensors 3x64x64), text (str of 1 KB), photos (bytes of JPEG files), decoded (uint8 tensors
3x224x224, decoded and resized); each with a number. All write blocks of 8 MB. MB are a million bytes of samples. Folders are
temporary ones: TMPDIR chooses the disk.

Each measurement is made in a process of its own, forked for that, so the maps, threads, open files and shared memory of a
contender are gone after it. Samples are read in batches of 64. Tensors are stacked; otherwise a contender that maps its files
would return without having read them. The others come as a list.

*Cold*: the files' pages are dropped before the clock starts, and nothing of the contender is open yet, so worker processes are
started under the clock. *Warm*: a pass over the same loader goes before; its workers stay.

The contenders do not do the same work. stocache checks each sample against a checksum, and synchronises its blocks with the
disk. The others do neither by themselves (so their files are synchronised under the clock, too). LitData and
MosaicML streaming are read with options that make them faster than their defaults, if we found one (see their classes).
"""

import gc
import itertools
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from benchmark.support import stores
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import settle
from benchmark.support.peers import clean_mosaic, mosaic
from benchmark.support.processes import in_fork
from benchmark.support.stores import BATCH, Article, LitData, Mosaic, OwnLoader, Source, Stocache, Store
from stocache.system.limits import MIB
from stocache.tools.bench import drop_pages

CLAIM = "Prepared blocks are written and read faster than those of LitData, MosaicML streaming and torch.save."

BLOCK_BYTES = 8_000_000


def sources(run: Run) -> Iterator[tuple[str, Source, Path]]:
    """Yield each source, and a folder for everything, the temporary files of the peers included."""
    torch.set_num_threads(1)
    resource_tracker.ensure_running()  # one for all processes, or each would complain of names that the others remove
    mosaic()
    makers: dict[str, Callable[[], Source]] = {
        "images": lambda: stores.rows(run.size(20_000, 1_000), 3, 64, 64),
        "text": lambda: stores.texts(run.size(100_000, 5_000)),
        "photos": lambda: stores.photos(run.photos(160) * 10),
        "decoded": lambda: stores.decoded_photos(run.photos(160) * 10),
    }
    for name, make in run.chosen(dict(list(makers.items())[: run.size(None, 2)])).items():
        with tempfile.TemporaryDirectory(prefix="storage-") as path:
            tempfile.tempdir = path
            try:
                yield name, make(), Path(path).resolve()
            finally:
                tempfile.tempdir = None
                clean_mosaic()


def written(source: Source, folder: Path, files: Callable[[], Iterable[Path]], write: Callable[[], None]) -> float:
    """Return the MB per second in which samples come to the disk."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    settle(2 * source.nbytes)
    began = time.perf_counter()
    write()
    for path in files():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return source.nbytes / 1e6 / (time.perf_counter() - began)


@experiment(rounds=5, needs="litdata streaming")
def preparing(run: Run) -> None:
    """MB per second until one process has the samples on the disk, and their size there."""
    table = run.table("source", "store", "MB/s", "of the samples, on disk", "stocache to it")
    for name, source, folder in sources(run):
        contenders: list[Store] = [make(folder, BLOCK_BYTES) for make in (Stocache, LitData, Mosaic, Article)]
        bare = folder / "bare"
        measured = {
            store.name: partial(written, source, store.folder, store.files, partial(store.prepare, source))
            for store in contenders
        }
        write = partial(stores.write_bare, bare, source.nbytes, BLOCK_BYTES)
        measured["the disk: write and fsync alone"] = partial(written, source, bare, bare.iterdir, write)
        speed = run.turns({each: partial(in_fork, measure) for each, measure in measured.items()}, warm_up=0)
        sizes = {store.name: sum(path.stat().st_size for path in store.files()) for store in contenders}
        for each in speed:
            share = sizes[each] / source.nbytes if each in sizes else None
            table.row(name, each, speed.median(each), share, speed.ratio("stocache", each))
    shares = [share for peer in (LitData, Mosaic, Article) for share in table.column("stocache to it", store=peer.name)]
    run.claim("preparing is at least as fast as with LitData, MosaicML streaming and torch.save", min(shares), least=1)


def check(store: Store, source: Source) -> None:
    """Read some samples by number, and all of them in both orders.

    Raises:
        AssertionError: they are not the samples that were prepared.
    """
    wanted = random.Random(1).sample(range(len(source)), BATCH)
    pairs = [pair for values, labels in store.random(wanted, 0) for pair in zip(values, labels, strict=True)]
    assert [label for _, label in pairs] == wanted, f"{store.name}: other samples than {wanted}"
    assert all(_same(value, source[label][0]) for value, label in pairs), store.name
    for loader in (store.sequential(0), store.shuffled(2)):
        seen: list[int] = []
        for values, labels in loader:
            assert _same(values[0], source[labels[0]][0]), store.name
            seen += labels
        assert sorted(seen) == list(range(len(source))), f"{store.name} does not give each sample once"


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


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


@experiment(rounds=5, needs="litdata streaming")
def read(run: Run) -> None:
    """Samples per second at random, shuffled within a block, and in sequence, from cold and from warm pages."""
    columns = list(itertools.product((0, 2), (False, True)))
    titles = [f"{workers or 'no'} workers, {'warm' if warm else 'cold'}" for workers, warm in columns]
    table, shares = run.table("source", "order", "store", *titles, "MB of a sample"), []
    for name, source, folder in sources(run):
        readers: list[Store] = [make(folder, BLOCK_BYTES) for make in (Stocache, OwnLoader, LitData, Mosaic, Article)]
        for store in readers:
            if not isinstance(store, OwnLoader):
                in_fork(partial(store.prepare, source))
            in_fork(partial(check, store, source))
        order = random.Random(0).sample(range(len(source)), min(len(source), Store.reads))
        orders: dict[str, Callable[[Store], Callable[[int], Iterable[Any]]]] = {
            "random": lambda store, order=order: partial(store.random, order[: store.reads]),  # type: ignore[misc]
            "shuffled": lambda store: store.shuffled,
            "sequential": lambda store: store.sequential,
        }
        for kind, make in orders.items():
            found = [
                run.turns(
                    {
                        store.name: partial(in_fork, partial(reading, store, make(store), *column, run.size(1.0, 0.1)))
                        for store in readers
                    },
                    warm_up=0,
                )
                for column in columns
            ]
            for store in readers:
                medians = (rates.median(store.name) for rates in found)
                table.row(name, kind, store.name, *medians, source.nbytes / len(source) / 1e6)
            shares += [found[-1].ratio(OwnLoader.name, store.name) for store in readers[2:]]
    run.claim("warm reads by 2 workers of our DataLoader are at least as fast as with all three", min(shares), least=1)
