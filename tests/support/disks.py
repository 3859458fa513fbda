"""Caches on a disk, and what kills, power cuts and decay do to their files."""

import contextlib
import ctypes
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from stocache import DiskCache
from stocache.samples.spec import Structure
from tests.support.equality import same

KINDS = "rows", "records", "zstd"
COUNT = 64
FILES = "samples", "index"


def row(idx):
    """A sample of one structure, a page and a half long, whose every byte depends on its index."""
    return ((torch.arange(6001) * (idx + 1) + idx) % 251).to(torch.uint8), idx


def record(idx):
    """A sample of a different size for each index, up to three pages."""
    pixels = np.arange(idx * 37 % 401 * 30, dtype=np.uint32) * (idx + 1) % 251
    return {"pixels": torch.from_numpy(pixels.astype(np.uint8)), "text": f"{idx} " * (idx % 7), "maybe": [idx] * (idx % 3)}


def sample(kind, idx):
    return row(idx) if kind == "rows" else record(idx)


class Samples(Dataset):
    """The samples of a kind, and the indices that were read."""

    def __init__(self, kind, count=COUNT):
        self.kind, self.count, self.read = kind, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, idx):
        self.read.append(idx)
        return sample(self.kind, idx)


def open_disk(kind, folder, count=COUNT, limit="1GB", **options):
    """Return a `DiskCache` for the samples of a kind."""
    if kind == "rows":
        options["structure"] = Structure.of(row(0))
    elif kind == "zstd":
        options["codec"] = "zstd"
    return DiskCache(folder, limit, count, **({"fingerprint": "1"} | options))


def loaded(cache, kind, indices=None):
    """Read samples through a cache, and demand that they are right; return which of them were loaded."""
    read = []

    def load(idx):
        read.append(idx)
        return sample(kind, idx)

    for idx in range(cache.dataset_len) if indices is None else indices:
        assert same(cache.get_or_load(idx, load), sample(kind, idx)), f"sample {idx} is wrong"
    return read


def contents(folder):
    """Return the bytes of the files that hold samples."""
    return {name: Path(folder, name).read_bytes() for name in FILES}


def put(folder, files):
    """Give files other bytes, in place."""
    for name, data in files.items():
        Path(folder, name).write_bytes(data)


def after_power_cut(rng, before, now):
    """Return what a disk may hold after a power cut: ``before`` was synced, and of what came since, any pages or sectors.

    A page that was not written holds its earlier bytes, or zeros; a file that has grown may be shorter again.
    """
    return {name: _cut(rng, before.get(name, b""), data) for name, data in now.items()}


def _cut(rng, before, now):
    size = rng.choice([len(now), rng.randint(min(len(before), len(now)), len(now))])
    share, unit = rng.choice([0.0, 0.1, 0.5, 0.9]), rng.choice([512, 4096])
    found = bytearray(size)
    for at in range(0, size, unit):
        old, new = before[at : at + unit], now[at : at + unit]
        part = rng.choice([old, bytes(len(old))]) if old != new and rng.random() < share else new
        found[at : at + unit] = part[: size - at].ljust(min(unit, size - at), b"\0")
    return bytes(found)


def flip(rng, data):
    """Return bytes with one bit flipped."""
    found = bytearray(data)
    found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


@contextlib.contextmanager
def mounted(folder, options, kind="tmpfs"):
    """Mount a file system on a folder, for processes of this mount namespace; OSError if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(kind.encode(), os.fsencode(folder), kind.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH
