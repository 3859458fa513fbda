"""What filling the cache costs, in the first epoch and by the block.

The *bare copy* is the limit: as many bytes are written into a new memfd, by one thread, by `pwrite`, which is the fastest way.
Memory is taken and released before each clock starts. torch has one thread. Making the cache, which loads a few samples to see
what they are, is not part of the first epoch.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stocache
from benchmark.support.datasets import PHOTO, Made
from benchmark.support.datasets import photos as decoded_photos
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import epoch_s, settle
from stocache import CachedDataset, StorageDataset, prepare
from stocache.datasets.loaders import BlockLoader
from stocache.system.limits import MIB

CLAIM = "Filling the cache costs the first epoch at most 1.5 times a bare copy of the bytes."

DIMS = (3, 64, 64)
ROW = 3 * 64 * 64


def bare_copy(nbytes: int) -> float:
    """Return the seconds that it takes to make a memfd with as many bytes."""
    data = memoryview(random_bytes(nbytes).numpy())
    settle(nbytes)
    began = time.perf_counter()
    fd = os.memfd_create("bare-copy")
    os.ftruncate(fd, nbytes)
    for at in range(0, nbytes, MIB):
        os.pwrite(fd, data[at : at + MIB], at)
    took = time.perf_counter() - began
    os.close(fd)
    return took


def random_bytes(count: int) -> torch.Tensor:
    """Return that many bytes."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------------------------------------- the first epoch


def packed(count: int) -> Made:
    """Return images in one tensor, each with a label."""
    images = random_bytes(count * ROW).view(count, *DIMS)
    return Made(count, lambda idx: (images[idx], idx % 1000))


def mapped(count: int, folder: Path) -> Made:
    """Return the same images in a file that is mapped into memory."""
    random_bytes(count * ROW).numpy().tofile(folder / "images")
    images = np.memmap(folder / "images", np.uint8, "r", shape=(count, *DIMS))
    return Made(count, lambda idx: (np.array(images[idx]), idx % 1000))


def encoded(count: int) -> Made:
    """Return bytes of varying length, each with a label."""
    data = random_bytes(count * ROW).numpy().tobytes()
    return Made(count, lambda idx: (data[idx * ROW : (idx + 1) * ROW - idx % 4096], idx % 1000))


def arrow_rows(count: int, folder: Path) -> Any:
    """Return the images, each with a label, as rows of fixed size in an Arrow file."""
    import datasets  # type: ignore[import-untyped]

    features = datasets.Features(
        {"image": datasets.Sequence(datasets.Value("uint8"), length=ROW), "label": datasets.Value("uint8")}
    )
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "rows.arrow"), features=features) as writer:
        for idx, image in enumerate(random_bytes(count * ROW).view(count, ROW).numpy()):
            writer.write({"image": image, "label": idx % 256})
        writer.finalize()
    return datasets.Dataset.from_file(str(folder / "rows.arrow")).with_format("numpy", dtype=np.uint8)


def prepared(source: Made, folder: Path) -> StorageDataset[Any]:
    """Return samples in a prepared folder."""
    return StorageDataset(prepare(source, folder / "prepared", progress=False))


def epoch(dataset: Any, batch: int, workers: int) -> float:
    """Return the seconds of a shuffled epoch."""
    return epoch_s(stocache.DataLoader(dataset, batch, shuffle=True, num_workers=workers))


def filling_epoch(dataset: Any, batch: int, workers: int, nbytes: int) -> float:
    """Return the seconds of an epoch that fills a cache."""
    gc.collect()
    settle(2 * nbytes)
    with CachedDataset(dataset, f"{nbytes + nbytes // 4 + 4 * MIB}B") as cached:
        took = epoch(cached, batch, workers)
        assert cached.stats().total.filled == len(dataset), cached
    return took


@experiment(rounds=5, needs="datasets")
def first_epoch(run: Run) -> None:
    """What filling the cache adds to an epoch, beside a bare copy of the same bytes."""
    torch.set_num_threads(1)  # as in a DataLoader's worker
    count, paths = run.size(16_384, 1_024), run.photos(1000)
    sources: dict[str, tuple[Callable[[Path], Any], int]] = {  # with the bytes of a sample
        "packed tensor": (lambda folder: packed(count), ROW + 8),
        "memory map": (lambda folder: mapped(count, folder), ROW + 8),
        "Arrow rows": (lambda folder: arrow_rows(count, folder), ROW + 1),
        "prepared tensors": (lambda folder: prepared(packed(count), folder), ROW + 8),
        "prepared bytes": (lambda folder: prepared(encoded(count), folder), ROW - 4096 // 2 + 8),
        "JPEG decoding": (lambda folder: decoded_photos(run.size(len(paths), 64), paths), 3 * PHOTO * PHOTO + 8),
    }
    times = "without, s", "with, s", "added, µs a sample", "bare copy, µs", "bare copies", "of the epoch"
    table = run.table("source", "workers", *times)
    for name, (make, sample_bytes) in run.chosen(dict(list(sources.items())[:: run.size(1, 3)])).items():
        batch = 64 if "JPEG" in name else 256
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                dataset = make(Path(folder))
                nbytes = len(dataset) * sample_bytes
                took = run.turns(
                    {
                        "without": partial(epoch, dataset, batch, workers),
                        "with": partial(filling_epoch, dataset, batch, workers, nbytes),
                        "bare copy": partial(bare_copy, nbytes),
                    }
                )
            took["added"] = [more - less for more, less in zip(took["with"], took["without"], strict=True)]
            each_us = [1e6 * took.median(what) / len(dataset) for what in ("added", "bare copy")]
            shares = took.ratio("added", "bare copy"), took.ratio("added", "without")
            table.row(name, workers, took.median("without"), took.median("with"), *each_us, *shares)
    copies = [copies for name in sources if "JPEG" not in name for copies in table.column("bare copies", source=name)]
    run.claim("filling adds 1.5 bare copies", max(copies, default=0), most=1.5)


# ---------------------------------------------------------------------------------------------------- blocks

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]


def short_text(idx: int) -> Any:
    """Return a short text, with a label."""
    return {"text": " ".join(WORDS[(idx + at) % len(WORDS)] for at in range(5 + idx % 20)), "label": idx % 10}


def detection(count: int) -> Made:
    """Return tensors of varying size, boxes, numbers and the name of a file."""
    images = random_bytes(count * ROW).view(count, *DIMS)

    def target(idx: int) -> Any:
        boxes, labels = torch.zeros(idx % 5, 4), list(range(idx % 5))
        return {"image": images[idx, :, : 32 + idx % 32], "boxes": boxes, "labels": labels, "file": f"{idx}.jpg"}

    return Made(count, target)


def admission(dataset: StorageDataset[Any], sizes: list[int]) -> float:
    """Return the seconds that it takes to admit all blocks; note the bytes in the cache."""
    with CachedDataset(dataset, "2GiB") as cached:
        assert isinstance(cached._loader, BlockLoader)
        settle(512 * MIB)
        began = time.perf_counter()
        for block in range(len(dataset.storage.index.blocks)):  # type: ignore[attr-defined]
            cached._loader.admit(block)
        took, stats = time.perf_counter() - began, cached.cache.stats()
        assert stats.filled == len(dataset), cached
        sizes.append(stats.filled * stats.slot_bytes)
        return took


@experiment(rounds=5)
def blocks(run: Run) -> None:
    """Blocks of prepared samples, admitted behind the batches."""
    torch.set_num_threads(1)
    table = run.table("samples", "bytes", "admitted, µs a sample", "bare copy, µs", "bare copies")
    count = run.size(16_384, 1_024)
    kinds = {"tensors": packed, "bytes": encoded, "short texts": partial(Made, make=short_text), "detection": detection}
    for name, make in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            dataset, sizes = prepared(make(count), Path(folder)), list[int]()
            admission(dataset, sizes)
            took = run.turns({"admitted": partial(admission, dataset, sizes), "bare copy": partial(bare_copy, sizes[0])})
        each_us = (1e6 * took.median(each) / count for each in took)
        table.row(name, sizes[0] // count, *each_us, took.ratio("admitted", "bare copy"))
