"""The DataLoader beside torch's: warm epochs over a cache, uncached datasets with transforms, page faults, bytes in queues."""

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import stocache
from benchmark.support.datasets import Made, images, photos
from benchmark.support.harness import Figures, Run, experiment, is_missing
from benchmark.support.measuring import epoch_s, settle
from benchmark.support.peers import filled, in_rust
from stocache import CachedDataset

CLAIM = "Warm batches come 4 times as fast as through torch's DataLoader; without a cache they are never slower."

BATCH, WORKERS = 256, 2
SMALL, LARGE = (3, 64, 64), (3, 224, 224)
OPTIONS: dict[str, Any] = {"shuffle": True, "num_workers": WORKERS, "persistent_workers": True}
TORCH = torch.utils.data.DataLoader


def epochs(run: Run, loaders: dict[str, Iterable[Any]]) -> Figures:
    """Return the seconds of epochs that take turns."""
    # until each worker has touched most of the cache, whose pages are mapped into it one by one
    return run.turns({name: partial(epoch_s, loader) for name, loader in loaders.items()}, warm_up=3)


def name_of(dims: tuple[int, ...], labels: bool) -> str:
    """Return the name of images."""
    return f"{'x'.join(map(str, dims))} uint8{', label' * labels}"


@experiment(rounds=5, needs="stocaching")
def warm(run: Run) -> None:
    """Samples per second with everything cached, shuffled, workers kept from epoch to epoch."""
    table = run.table("samples", "torch over stocaching", "torch over stocache", "ours", "torch's ratio", "our ratio")
    for dims, count in ((SMALL, run.size(81_920, 4_096)), (LARGE, run.size(20_480, 1_024))):
        for labels in (False, True):
            settle(4 * count * torch.Size(dims).numel())
            theirs, cached = filled(images(count, dims, labels))
            loaders: dict[str, Iterable[Any]] = {
                "torch over stocaching": TORCH(theirs, BATCH, **OPTIONS),
                "torch over stocache": TORCH(cached, BATCH, **OPTIONS),
                "ours": stocache.DataLoader(cached, BATCH, **OPTIONS),
            }
            took = epochs(run, loaders)
            ratios = (took.ratio("torch over stocaching", name) for name in ("torch over stocache", "ours"))
            table.row(name_of(dims, labels), *(count / took.median(name) for name in took), *ratios)
            del loaders, theirs, cached
            gc.collect()
    run.claim("torch's DataLoader over stocache is as fast as over stocaching", min(table.column("torch's ratio")), least=1)
    run.claim("ours is 4 times as fast", min(table.column("our ratio")), least=4)


def transformed(dims: tuple[int, ...], idx: int) -> Any:
    """Return an image as for training: cropped, flipped, of normalised floats."""
    image = torch.randint(0, 256, dims, dtype=torch.uint8)
    top, left = (int(torch.randint(0, size // 8, ())) for size in dims[1:])
    image = image[:, top : top + dims[1] * 7 // 8, left : left + dims[2] * 7 // 8]
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
    return image.float().div_(255).sub_(0.45).div_(0.225), idx


def mixed_up(samples: list[Any]) -> list[torch.Tensor]:
    """Collate as for mixup: default_collate, then new tensors made of its batch."""
    mixed, labels = torch.utils.data.default_collate(samples)
    return [mixed.roll(1, 0).mul_(0.3).add_(mixed, alpha=0.7), labels]


@experiment(rounds=5)
def uncached(run: Run) -> None:
    """Samples per second without a cache: the gain or cost of the ring alone."""
    vectors, part = torch.randn(102_400, 32), run.size(1, 10)

    def item(idx: int) -> Any:  # it costs nothing to load, so only the loader takes time
        return {"vector": vectors[idx], "label": idx, "name": str(idx)}

    small, large = (Made(count // part, partial(transformed, dims)) for count, dims in ((20_480, SMALL), (2_560, LARGE)))
    cases: dict[str, tuple[Made, int, Any]] = {
        "3x64x64, transforms": (small, BATCH, None),
        "3x224x224, transforms": (large, 64, None),
        "the same, mixup as collate_fn": (large, 64, mixed_up),
        "a vector, a number, a string": (Made(102_400 // part, item), BATCH, None),
        "the same, batches of 16": (Made(20_480 // part, item), 16, None),
        "the same, collate_fn=list": (Made(20_480 // part, item), BATCH, list),
        "photographs, decoded": (photos(640 // part, run.photos(160)), 64, None),
    }
    names = "torch", "dataloader-rs", "ours", "ours, threads"
    table = run.table("samples", "batch", *names, "ours to torch", "threads to dataloader-rs")
    for name, (dataset, batch, collate_fn) in run.chosen(cases).items():
        options = OPTIONS | {"batch_size": batch, "collate_fn": collate_fn}
        loaders: dict[str, Iterable[Any]] = {"torch": TORCH(dataset, **options)}
        if not is_missing("dataloader_rs"):
            loaders["dataloader-rs"] = in_rust(dataset, batch, WORKERS, collate_fn)
        loaders["ours"] = stocache.DataLoader(dataset, **options)
        loaders["ours, threads"] = stocache.DataLoader(dataset, **options, worker_method="thread")
        took = epochs(run, loaders)
        rates = [len(dataset) / took.median(each) if each in took else None for each in names]
        to_rust = took.ratio("dataloader-rs", "ours, threads") if "dataloader-rs" in took else None
        table.row(name, batch, *rates, took.ratio("torch", "ours"), to_rust)
        del loaders
        gc.collect()
    run.claim("without a cache ours is not slower than torch's", min(table.column("ours to torch")), least=1)


@experiment(rounds=5, needs="stocaching")
def costs(run: Run) -> None:
    """What a warm batch of 256 costs besides its time, in the process that iterates and its workers together."""
    table = run.table("samples", "loader", "page faults", "bytes through queues")
    for dims, count in ((SMALL, run.size(16_384, 2_048)), (LARGE, run.size(4_096, 512))):
        theirs, cached = filled(images(count, dims))
        makers = {"torch over stocaching": (TORCH, theirs), "ours": (stocache.DataLoader, cached)}
        for name, (make, dataset) in makers.items():
            written = torch.zeros(2, dtype=torch.int64).share_memory_()
            with counted_writes(written):
                loader = make(dataset, BATCH, **OPTIONS)
                for _ in range(run.size(20, 5)):  # until every worker has touched every page of the cache
                    epoch_s(loader)
                faults, sent = page_faults(), int(written.sum())
                for _ in range(run.rounds):
                    epoch_s(loader)
                faults, sent = page_faults() - faults, int(written.sum()) - sent
            batches = run.rounds * count // BATCH
            table.row(name_of(dims, True), name, faults / batches, sent / batches)
            del loader
            gc.collect()
        del theirs, cached, makers, dataset
    run.claim("a warm batch costs 20 page faults", max(table.column("page faults", loader="ours")), most=20)
    run.claim("and 1 KB through queues", max(table.column("bytes through queues", loader="ours")), most=1000)


def page_faults() -> int:
    """Return the minor page faults of this process and its workers so far."""
    pids = os.getpid(), *(child.pid for child in multiprocessing.active_children())
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[7]) for fields in stats)


@contextlib.contextmanager
def counted_writes(written: torch.Tensor) -> Iterator[None]:
    """Count the bytes in the pipes of multiprocessing's queues: ``written[0]`` by this process, ``[1]`` by forked ones."""
    write, parent = Connection._send_bytes, os.getpid()

    def counting(self: Any, data: Any) -> None:
        written[int(os.getpid() != parent)] += len(data)
        write(self, data)

    with mock.patch.object(Connection, "_send_bytes", counting):
        yield


def volume(nbytes: int, idx: int) -> Any:
    """Return a large sample."""
    return torch.full((nbytes,), idx, dtype=torch.uint8), idx


@experiment(rounds=5)
def large(run: Run) -> None:
    """Seconds for samples of 200 MB, in batches of 1, 2 and 4, and from a filled cache."""
    nbytes = run.size(200, 8) << 20
    table = run.table("samples of 200 MB", "torch", "ours", "torch / ours")
    with CachedDataset(Made(24, partial(volume, nbytes)), 6) as cached:
        cached.warm(progress=False)
        for name, dataset, batch in (
            ("16, batches of 1", Made(16, partial(volume, nbytes)), 1),
            ("24, batches of 2", Made(24, partial(volume, nbytes)), 2),
            ("16, batches of 4", Made(16, partial(volume, nbytes)), 4),
            ("24 from the cache, batches of 1", cached, 1),
        ):
            makers = {"torch": TORCH, "ours": stocache.DataLoader}
            contenders = {each: partial(first_epoch, make, dataset, batch) for each, make in makers.items()}
            took = run.turns(contenders, warm_up=0)
            table.row(name, took.median("torch"), took.median("ours"), took.ratio("torch", "ours"))
    run.claim("samples of 200 MB come no slower than from torch's DataLoader", min(table.column("torch / ours")), least=1)


def first_epoch(make: Any, dataset: Any, batch: int) -> float:
    """Return the seconds of the first epoch of a loader, whose workers start in it."""
    return epoch_s(make(dataset, batch, num_workers=WORKERS))
