"""Kill, cut and flip what a disk cache is made of, and read all samples each time: is each one right, and found again?

After each fault all samples are read twice. The first time the lost ones come from the dataset, the second time none may; and
the next opening has to find all.
"""

import contextlib
import functools
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.support.faults import Step, kill_one, trials
from benchmark.support.harness import NotHereError, Run, experiment
from stocache import CachedDataset, DiskCache, DiskError
from tests.support import disks
from tests.support.disks import COUNT, KINDS, contents, loaded, open_disk, put
from tests.support.equality import same
from tests.support.traces import mount_private

CLAIM = "After SIGKILLs, power cuts and flipped bits, a disk cache returns no wrong sample, and has all of them again."

# ---------------------------------------------------------------------------------------------------- kills


def _open_behind(kind: str, folder: str) -> CachedDataset:
    """Return a dataset whose thread writes samples behind it."""
    variable = None if kind == "rows" else True
    codec = "zstd" if kind == "zstd" else None
    return CachedDataset(
        disks.Samples(kind), 0, disk=folder, disk_limit="1GB", fingerprint="1", split=False, probe=0 if variable else 2,
        variable=variable, codec=codec,
    )  # fmt: skip


def _read(opened: DiskCache | CachedDataset, kind: str, indices: list[int]) -> list[Any]:
    if isinstance(opened, DiskCache):
        return opened.get_or_load_many(indices, lambda indices: [disks.sample(kind, idx) for idx in indices])
    return opened.__getitems__(indices)


WAYS: dict[str, Callable[[str, str], Any]] = {"get_or_load_many": open_disk, "behind": _open_behind}
"""How a folder is opened."""


def kill(way: str, seed: int) -> Counter[str]:
    """Kill a process that fills a folder, have others go on, and read all samples."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    make = WAYS[way]
    shares = rng.random() < 0.5  # the processes are forked from one that has the folder open, or each opens it
    with tempfile.TemporaryDirectory() as parent, contextlib.ExitStack() as stack:
        folder = f"{parent}/disk"
        opened = stack.enter_context(make(kind, folder)) if shares else None

        def fill(order: list[int], step: Step) -> None:
            step()
            with opened or make(kind, folder) as cache:
                for first in range(0, COUNT, 8):
                    step()
                    indices = order[first : first + 8]
                    found = _read(cache, kind, indices)
                    assert all(same(value, disks.sample(kind, idx)) for idx, value in zip(indices, found, strict=True))

        def size() -> int:
            return sum(path.stat().st_size for path in Path(folder).glob("samples"))

        midway, there = kill_one(rng, COUNT, fill, 1 + COUNT // 8, size)
        stack.close()
        lost = _read_all(kind, folder)
        assert not any(lost.values()), "samples are missing"
        return Counter({"midway": midway, "with a part written": midway and 0 < there < size()})


def _read_all(kind: str, path: str, count: int = COUNT, indices: Sequence[int] | None = None) -> Counter[str]:
    """Read samples twice, and once more after the folder was opened again; return how many were lost."""
    with open_disk(kind, path, count) as cache:
        lost, damaged = loaded(cache, kind, indices), cache.stats().damaged
        assert loaded(cache, kind, indices) == [], "a sample was not written again"
    with open_disk(kind, path, count) as cache:
        assert loaded(cache, kind, indices) == [], "a sample is missing in the next run"
    return Counter({"loaded again": len(lost), "damaged": damaged})


@experiment(rounds=500, quick=10)
def kills(run: Run) -> None:
    """Kill processes that fill a folder, through a DiskCache or behind a CachedDataset."""
    trials(run, {way: partial(kill, way) for way in WAYS})


# ---------------------------------------------------------------------------------------------------- cuts and flips


def cut(kind: str, seed: int) -> Counter[str]:
    """Cut the power three times over one folder, while samples are written; read samples each time, at last all."""
    rng, counts, count = random.Random(seed), Counter[str](), 200
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/disk"
        for number in range(3):
            before = contents(path) if number else {}
            with open_disk(kind, path, count) as cache:
                written = loaded(cache, kind, rng.sample(range(count), 60))
                if rng.random() < 0.5:
                    before = contents(path)  # the kernel has written everything by then
                written += loaded(cache, kind, rng.sample(range(count), 60))
            put(path, disks.after_power_cut(rng, before, contents(path)))
            indices = range(count) if number == 2 else rng.sample(range(count), 100)
            counts.update(cuts=1, written=len(written), read=len(indices), **_read_all(kind, path, count, indices))
    return counts


@experiment(rounds=23, quick=2)
def cuts(run: Run) -> None:
    """Cut the power: drop pages and sectors that were not synced."""
    trials(run, {kind: partial(cut, kind) for kind in KINDS})


@functools.cache
def _filled(kind: str) -> tuple[tempfile.TemporaryDirectory[str], dict[str, bytes]]:
    """Return a folder that has all samples, and its files."""
    folder = tempfile.TemporaryDirectory(prefix="disk-faults-")
    with open_disk(kind, folder.name) as cache:
        loaded(cache, kind)
    with open(f"{folder.name}/cache.json", "rb") as file:
        return folder, contents(folder.name) | {"cache.json": file.read()}


def flip_bit(kind: str, name: str, seed: int) -> Counter[str]:
    """Flip one bit of a file."""
    folder, files = _filled(kind)
    put(folder.name, {name: disks.flip(random.Random(seed), files[name])})
    try:
        found = _read_all(kind, folder.name)
        assert name != "cache.json", "a flipped bit was not found"
        return found + Counter(harmless=not found["loaded again"])
    except DiskError:
        assert name == "cache.json", "only the manifest is refused"
        return Counter(refused=1)
    finally:
        put(folder.name, files)


@experiment(rounds=1111, quick=10)
def flips(run: Run) -> None:
    """Flip single bits of the samples, the index and the manifest."""
    files = itertools.product(KINDS, ("samples", "index", "cache.json"))
    trials(run, {f"{kind}, {name}": partial(flip_bit, kind, name) for kind, name in files})


# ---------------------------------------------------------------------------------------------------- a full disk


def fill_up(beside: bool, seed: int) -> Counter[str]:
    """Fill a disk that is too small; if ``beside``, a second file takes what is free."""
    kind, count = random.Random(seed).choice(KINDS), 3000
    with tempfile.TemporaryDirectory() as folder, disks.mounted(folder, "size=8m,mode=700"):
        with open_disk(kind, f"{folder}/disk", count) as cache:
            loaded(cache, kind, range(300))
            with contextlib.suppress(OSError), open(f"{folder}/other", "wb", buffering=0) as file:
                while beside:
                    file.write(bytes(1 << 20))
            loaded(cache, kind)
            filled = cache.stats().filled
            assert len(loaded(cache, kind)) == count - filled, "a sample on the disk was loaded again"
    return Counter({"samples": count, "on the disk": filled})


@experiment(rounds=3, needs="root")
def full(run: Run) -> None:
    """Fill a disk of 8 MB with samples of 18 MB, alone and beside a second file."""
    if not mount_private():
        raise NotHereError("this process may not mount")
    trials(run, {"alone": partial(fill_up, False), "another file fills the rest": partial(fill_up, True)})
