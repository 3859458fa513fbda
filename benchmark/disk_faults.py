"""Kill, cut and flip what a disk cache is made of, and read all samples each time: is each one right, and found again?

    python -m benchmark disk_faults kills [--trials 1000]    # SIGKILLs of processes that fill it
    python -m benchmark disk_faults cuts  [--trials 200]     # power cuts: unsynced pages and sectors are dropped
    python -m benchmark disk_faults flips [--trials 10000]   # single bits
    sudo python -m benchmark disk_faults full                # a disk of 100 MB for 150 MB, three epochs

A wrong sample, an error of any kind, or a process that hangs ends the run. After each fault all samples are read twice: the
first time those that were lost come from the dataset, the second time none may; and the next opening has to find all.
"""

import argparse
import collections
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from benchmark.sigkill import holdings
from benchmark.support.diskkills import WAYS, kill_trial
from stocache import CachedDataset, DataLoader, DiskError
from tests.support.disks import COUNT, KINDS, after_power_cut, contents, flip, loaded, mounted, open_disk, put
from tests.support.traces import mount_private

CLAIM = "After SIGKILLs, power cuts and flipped bits, a disk cache gives no wrong sample, and has all of them again."

_Rows = dict[str, collections.Counter[str]]


def kills(trials: int, seed: int, folder: str) -> _Rows:
    """Kill a process in each trial while it fills, in each way; the folder is new each time."""
    rows: _Rows = collections.defaultdict(collections.Counter)
    for number in tqdm(range(trials), unit="kill"):
        way = WAYS[number % len(WAYS)]
        outcome = kill_trial(seed + number, f"{folder}/{number}", way)
        rows[way].update(trials=1, midway=outcome.midway, partly=outcome.midway and 0 < outcome.there < COUNT)
    return rows


def cuts(trials: int, seed: int, folder: str) -> _Rows:
    """Cut the power in each trial, up to three times over one folder, while samples are written; then read all."""
    rows: _Rows = collections.defaultdict(collections.Counter)
    for number in tqdm(range(trials), unit="cut"):
        rng, path, count = random.Random(seed + number), f"{folder}/{number // 3}", 200
        kind = KINDS[number // 3 % len(KINDS)]
        before = contents(path) if os.path.exists(path) else {}
        with open_disk(kind, path, count) as cache:
            first = loaded(cache, kind, rng.sample(range(count), 60))
            if rng.random() < 0.5:
                before = contents(path)  # the kernel has written everything by then
            written = first + loaded(cache, kind, rng.sample(range(count), 60))
        put(path, after_power_cut(rng, before, contents(path)))
        indices = range(count) if number % 3 == 2 else rng.sample(range(count), 100)
        rows[kind].update(trials=1, written=len(written), read=len(indices), **_read_all(kind, path, count, indices))
    return rows


def flips(trials: int, seed: int, folder: str) -> _Rows:
    """Flip one bit in each trial, in a file that is drawn by its size, or the manifest."""
    rows: _Rows = collections.defaultdict(collections.Counter)
    for number, kind in enumerate(KINDS):
        rng, path = random.Random(seed), f"{folder}/{kind}"
        with open_disk(kind, path) as cache:
            loaded(cache, kind)
        with open(f"{path}/cache.json", "rb") as file:
            files = contents(path) | {"cache.json": file.read()}
        for _ in tqdm(range((trials + number) // len(KINDS)), unit="flip"):
            name = rng.choice(["samples", "samples", "index", "cache.json"])
            put(path, {name: flip(rng, files[name])})
            if name == "cache.json":
                try:
                    open_disk(kind, path)
                    raise SystemExit(f"{name}: a flipped bit was not found")
                except DiskError:
                    rows[f"{kind}, {name}"].update(trials=1, refused=1)
            else:
                found = _read_all(kind, path, COUNT, range(COUNT))
                rows[f"{kind}, {name}"].update(trials=1, harmless=not found["loaded again"], **found)
            put(path, files)
    return rows


def full(trials: int, seed: int, folder: str) -> _Rows:
    """Train on a tmpfs of 100 MB with 150 MB of samples; and again while another file takes what is free."""
    rows: _Rows = collections.defaultdict(collections.Counter)
    kept, large = OneSize(1500), f"{folder}/others"
    for number in range(trials):
        with mounted(folder, "size=100m,mode=700"):
            with CachedDataset(kept, 0, disk=f"{folder}/disk", disk_limit="1GB", fingerprint="1", split=False) as dataset:
                for epoch in range(3):
                    for batch, (images, indices) in enumerate(DataLoader(dataset, 50, shuffle=True, num_workers=2)):
                        if number % 2 and (epoch, batch) == (0, 8):
                            _fill(large)
                        assert torch.equal(images, torch.stack([kept[idx][0] for idx in indices.tolist()]))
                stats = dataset.disk_cache.stats()
            rows[f"100 MB, {'others fill the rest' if number % 2 else 'alone'}"].update(
                trials=1, samples=4500, on_disk=stats.filled, hits=stats.hits
            )
            del dataset
    return rows


def _fill(path: str) -> None:
    """Write a file until the disk is full."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


class OneSize(Dataset[Any]):
    """``count`` samples of 100 KB."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Any:
        return torch.full((100_000,), idx % 251, dtype=torch.uint8), idx


def _read_all(kind: str, path: str, count: int, indices: "range | list[int]") -> dict[str, int]:
    """Read samples twice, and once more after the folder was opened again; return how many were lost."""
    with open_disk(kind, path, count) as cache:
        lost, damaged = loaded(cache, kind, indices), cache.stats().damaged
        assert loaded(cache, kind, indices) == [], "a sample was not written again"
    with open_disk(kind, path, count) as cache:
        assert loaded(cache, kind, indices) == [], "a sample is missing in the next run"
    return {"loaded again": len(lost), "damaged": damaged}


_PARTS: dict[str, tuple[Callable[[int, int, str], _Rows], int]] = {
    "kills": (kills, 1000),
    "cuts": (cuts, 200),
    "flips": (flips, 10_000),
    "full": (full, 2),
}


def main() -> None:
    """Run the trials and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=_PARTS)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run, usual = _PARTS[arguments.part]
    torch.set_num_threads(1)  # threads of torch that wait would take the CPUs from the workers
    if arguments.part == "full" and not mount_private():
        raise SystemExit("mounting needs root")
    tqdm.get_lock()  # takes a page of /dev/shm
    before = holdings()
    with tempfile.TemporaryDirectory(prefix="disk-faults-") as folder:
        rows = run(arguments.trials or usual, arguments.seed, folder)
    after = holdings()
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"| | {' | '.join(names)} | wrong |\n| --- |{' ---: |' * (len(names) + 1)}")
    for title, row in sorted(rows.items()):
        print(f"| {title} | {' | '.join(f'{row[name]:,}' for name in names)} | 0 |")
    print(f"before {before}\nafter  {after}")
    sys.exit(before != after)


if __name__ == "__main__":
    main()
