"""Hits, misses, fills, warm batches and block reads of this tree and of an earlier one, in turns.

python -m benchmark turns --before TREE [--rounds N]

TREE is a checkout of an earlier state, say ``git worktree add ../before COMMIT``. Each round starts one process for each tree,
in alternate order, and takes the median of several passes within it. The table has the median of the rounds, and the ratio of
this tree to the earlier one in each round: median, least and most.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLAIM = "A change of structure leaves hits, misses, fills, warm batches and block reads at most 3 % slower than before."

SHAPE, COUNT, BATCH = (3, 64, 64), 4096, 256


def costs() -> dict[str, float]:
    """Return the microseconds of each operation: of a sample, or of a batch of 256."""
    import torch
    from torch.utils.data import TensorDataset

    from stocache import CachedDataset, DataLoader, RaggedCache, SharedCache, StorageDataset, prepare
    from stocache.storage.storage import OnDiskBlockDataStorage

    found: dict[str, float] = {}
    torch.manual_seed(0)
    order = torch.randperm(COUNT).tolist()
    images = torch.randint(0, 256, (COUNT, *SHAPE), dtype=torch.uint8)

    def note(name: str, work: Callable[[], object], units: int, passes: int = 7) -> None:
        times = []
        for number in range(passes + 1):
            began = time.perf_counter()
            work()
            if number:
                times.append((time.perf_counter() - began) / units * 1e6)
        found[name] = statistics.median(times)

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
        for name, options in (
            ("without workers", {"num_workers": 0}),
            ("2 processes", {"num_workers": 2, "persistent_workers": True}),
            ("2 threads", {"num_workers": 2, "worker_method": "thread", "persistent_workers": True}),
        ):
            loader = DataLoader(dataset, BATCH, shuffle=True, **options)
            note(f"warm batch, {name}", lambda loader=loader: [None for _ in loader], COUNT // BATCH, 15)

    def first_epoch() -> None:
        with CachedDataset(source, 1, audit=0) as dataset:
            for _ in DataLoader(dataset, BATCH):
                pass

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
    from stocache import CachedDataset, KeyedCache, StorageDataset, prepare
    from stocache.storage.block import encode
    from stocache.storage.storage import OnDiskBlockDataStorage

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmark turns")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the tree before")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    trees = {"before": arguments.before.resolve(), "now": Path(__file__).parents[1]}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(arguments.rounds):
        for name in list(trees)[:: -1 if number % 2 else 1]:
            environment = {**os.environ, "PYTHONPATH": str(trees[name])}
            printed = subprocess.run(
                [sys.executable, __file__, "costs"], capture_output=True, check=True, env=environment, cwd=trees[name]
            ).stdout
            rounds[name].append(json.loads(printed.splitlines()[-1]))
    print("| µs | before | now | now to before | rounds |\n| --- | ---: | ---: | ---: | ---: |")
    for operation in rounds["now"][0]:
        before, now = ([each[operation] for each in rounds[name]] for name in trees)
        ratios = [mine / theirs for mine, theirs in zip(now, before, strict=True)]
        medians = [statistics.median(each) for each in (before, now, ratios)]
        print(
            f"| {operation} | {medians[0]:.2f} | {medians[1]:.2f} | {medians[2]:.3f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["costs"]:
        print(json.dumps(costs()))
    else:
        main()
