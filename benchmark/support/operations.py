"""Microseconds of operations of the stocache on the path: run by `benchmark.turns`, with this tree and an earlier one."""

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

from stocache import CachedDataset, DataLoader, KeyedCache, RaggedCache, SharedCache, StorageDataset, StreamLoader, prepare
from stocache.storage.block import encode
from stocache.storage.storage import OnDiskBlockDataStorage

SHAPE, COUNT, BATCH = (3, 64, 64), 4096, 256

WORKERS: dict[str, dict[str, Any]] = {
    "without workers": {},
    "2 processes": {"num_workers": 2, "persistent_workers": True},
    "2 threads": {"num_workers": 2, "worker_method": "thread", "persistent_workers": True},
}


def note_in(found: dict[str, float], name: str, work: Callable[[], object], units: int, passes: int = 7) -> None:
    """Note the microseconds of a unit of work, the median of several passes."""
    times = []
    for number in range(min(passes, int(sys.argv[2])) + 1):
        began = time.perf_counter()
        work()
        if number:
            times.append((time.perf_counter() - began) / units * 1e6)
    found[name] = statistics.median(times)


def costs() -> dict[str, float]:
    """Return the microseconds of each operation: of a sample, or of a batch of 256."""
    found: dict[str, float] = {}
    note = partial(note_in, found)
    torch.manual_seed(0)
    order = torch.randperm(COUNT).tolist()
    images = torch.randint(0, 256, (COUNT, *SHAPE), dtype=torch.uint8)
    with SharedCache(1, COUNT, SHAPE) as cache:
        for idx in range(COUNT):
            cache.set_slot(idx, images[idx])
        note("hit, view", lambda: [cache.get_slot(idx, copy=False) for idx in order], COUNT)
        note("hit, copy", lambda: [cache.get_slot(idx) for idx in order], COUNT)
    with SharedCache("1MB", COUNT, SHAPE) as cache:
        outside = list(range(COUNT // 2, COUNT))
        note("miss outside the cache", lambda: [cache.get_slot(idx) for idx in outside], len(outside))
    with RaggedCache(1, COUNT) as ragged:
        note("fill of a RaggedCache", lambda: (ragged.clear(), [ragged.set_slot(idx, images[idx]) for idx in order]), COUNT)
        note("hit of a RaggedCache", lambda: [ragged.get_slot(idx) for idx in order], COUNT)
    with SharedCache(1, COUNT, SHAPE) as cache:
        note("fill of a SharedCache", lambda: (cache.clear(), [cache.set_slot(idx, images[idx]) for idx in order]), COUNT)

    source = TensorDataset(images, torch.arange(COUNT))
    with CachedDataset(source, 1, audit=0) as dataset:
        note("sample of a full CachedDataset", lambda: [dataset[idx] for idx in order], COUNT)
        for name, options in WORKERS.items():
            loader = DataLoader(dataset, BATCH, shuffle=True, **options)
            note(f"warm batch, {name}", lambda loader=loader: deque(loader, 0), COUNT // BATCH, 15)

    def first_epoch() -> None:
        with CachedDataset(source, 1, audit=0) as dataset:
            deque(DataLoader(dataset, BATCH), 0)

    note("first epoch, a batch", first_epoch, COUNT // BATCH, 5)
    with tempfile.TemporaryDirectory() as folder:
        prepare(source, f"{folder}/blocks", block_size=64, progress=False)
        blocks = StorageDataset(OnDiskBlockDataStorage(f"{folder}/blocks"))
        note("sample of a block, in sequence", lambda: [blocks[idx] for idx in range(COUNT)], COUNT)
        note("sample of a block, at random", lambda: [blocks[idx] for idx in order], COUNT)
    for kind, samples in {
        "JPEG": [(bytes(100_000 + idx), idx) for idx in range(128)],
        "text": [("a" * (150 + idx % 100), idx) for idx in range(COUNT)],
        "row of 10 floats": [(torch.full((10,), idx / 7), idx) for idx in range(COUNT)],
        "detection": [
            {"image": images[idx, :, : 40 + idx % 9], "boxes": torch.rand(idx % 7, 4), "labels": [1] * (idx % 7)}
            for idx in range(512)
        ],
    }.items():  # fmt: skip
        note_codec(kind, samples, note)
    return found


def note_codec(kind: str, samples: list[Any], note: Callable[..., None]) -> None:
    """Note the microseconds of a sample that is turned into bytes, and back, in each place that keeps some."""
    count, size = len(samples), len(samples) // 8
    batches = [random.Random(at).sample(range(count), 32) for at in range(count // 32)]
    note(f"{kind}: block, written", lambda: encode(samples), count)
    with tempfile.TemporaryDirectory() as folder:
        prepare(samples, f"{folder}/blocks", block_size=size, progress=False)
        storage = OnDiskBlockDataStorage[Any, Any](f"{folder}/blocks")
        blocks = StorageDataset(storage)
        note(f"{kind}: block, read whole", lambda: [storage.load_block(number) for number in range(8)], count)
        note(
            f"{kind}: block, batches in sequence",
            lambda: [blocks.__getitems__(range(at, at + 16)) for at in range(0, count, 16)],
            count,
        )
        note(f"{kind}: block, batches at random", lambda: [blocks.__getitems__(batch) for batch in batches], 32 * len(batches))

        def admit() -> None:
            with CachedDataset(blocks, 1) as dataset:
                for number in range(8):
                    dataset._loader.admit(number)

        note(f"{kind}: block, admitted", admit, count)
        with CachedDataset(samples, f"{200 * count}B", disk=f"{folder}/disk", disk_limit="1GB", audit=0) as dataset:
            dataset.warm(progress=False)
            note(f"{kind}: disk, batches", lambda: [dataset.__getitems__(batch) for batch in batches], 32 * len(batches))
    with KeyedCache(1) as keyed:
        note(f"{kind}: key, filled", lambda: (keyed.clear(), [keyed.put(idx, samples[idx]) for idx in range(count)]), count)
        note(f"{kind}: key, hit", lambda: [keyed.get(idx) for idx in range(count)], count)


def _flipped(image: Any) -> Any:
    return image.flip(-1)


def loaders() -> dict[str, float]:
    """Return the microseconds of a batch, and of the first batch of an epoch."""
    found: dict[str, float] = {}
    note = partial(note_in, found)
    torch.manual_seed(0)
    sources: dict[str, Any] = {
        f"3x{side}x{side}": TensorDataset(torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8), torch.arange(count))
        for side, count in ((64, COUNT), (224, 512))
    }
    sources["ragged"] = [(torch.zeros(1000 + idx % 9000, dtype=torch.uint8), idx) for idx in range(1024)]
    for kind, source in sources.items():
        options = {"collate_fn": list} if kind == "ragged" else {}
        for transform in (None, {0: _flipped}):
            with CachedDataset(source, 1, audit=0, transform=transform) as dataset:
                dataset.warm(progress=False)
                for (name, workers), batch in itertools.product(WORKERS.items(), (32, BATCH)):
                    loader = DataLoader(dataset, batch, shuffle=True, **workers, **options)
                    words = f"{kind}, {batch}, {name}{', transform' if transform else ''}"
                    note(words, lambda loader=loader: deque(loader, 0), len(source) // batch, 9)
                    if (transform, batch) == (None, 32):
                        note(f"{words}: first batch", lambda loader=loader: next(iter(loader)), 1, 15)
                    del loader
    for name, workers in WORKERS.items():

        def first(workers: dict[str, Any] = workers) -> None:
            with CachedDataset(sources["3x64x64"], 1, audit=0) as dataset:
                deque(DataLoader(dataset, BATCH, shuffle=True, **workers), 0)

        note(f"first epoch, {name}", first, COUNT // BATCH, 5)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.writelines(f"{row}\t{row / 7}\t{row % 5}\n" for row in range(100_000))
        file.flush()
        with StreamLoader(file.name, 1000, 50_000, size_limit_gib="100MB") as stream:
            note("text, cached", lambda: deque(stream, 0), 100)
    return found


if __name__ == "__main__":
    print(json.dumps({"costs": costs, "loaders": loaders}[sys.argv[1]]()))
