"""Caches to run the contract on: each class, backing, placement and way to come by one; room for SLOTS of N samples."""

import os
import pickle
import shutil
import tempfile
import weakref

import pytest
import torch

from stocache import KeyedCache, Placement, RaggedCache, SharedCache, SharedCacheDDP
from stocache.cache import arena
from stocache.cache.disk.cache import DiskCache
from stocache.cache.disk.samples_file import DATA_OFFSET, index_bytes
from stocache.samples.spec import Structure
from stocache.system import limits
from tests.support.processes import in_child

N, SLOTS, DIMS = 20, 12, (3, 4, 5)
LIMIT = f"{N + SLOTS * 60}B"


def sample(idx, dims=DIMS, dtype=torch.uint8):
    return torch.randint(0, 256, dims, generator=torch.Generator().manual_seed(idx)).to(dtype)


def fill(cache):
    for idx in range(N):
        cache.set_slot(idx, sample(idx))


def copied(cache):
    """A copy by pickle. The original lives until it is made."""
    return pickle.loads(pickle.dumps(cache))


def called(**makers):
    """Give makers of caches the names by which tests show them."""
    for name, maker in makers.items():
        maker.__name__ = name
    return makers.values()


def in_shm():
    return SharedCache(LIMIT, N, DIMS)


def scattered():
    return SharedCache(LIMIT, N, DIMS, placement="scattered")


def in_blocks():
    return SharedCache(LIMIT, N, DIMS, placement=Placement("scattered", unit=4))


def left_behind(make):
    """A cache that another process made and filled, and did not close."""

    def use():
        cache = make()
        fill(cache)
        cache.clear()
        os._exit(0)

    assert in_child(use) == 0
    return make()


def in_memfd():
    room, limits.shm_free = limits.shm_free, lambda: 0
    try:
        cache = in_shm()
    finally:
        limits.shm_free = room
    assert " in memfd," in repr(cache)
    return cache


SHARED = [in_shm, in_memfd, scattered, in_blocks]
SHARED += called(
    unpickled=lambda: copied(in_shm()),
    named=lambda: SharedCache(LIMIT, N, DIMS, name="contract", fingerprint="1"),
    ddp=lambda: SharedCacheDDP(LIMIT, N, DIMS, name="contract"),
    attached=lambda: left_behind(lambda: SharedCacheDDP(LIMIT, N, DIMS, name="contract", fingerprint="1")),
)


def ragged(**options):
    limit = arena.control_bytes(N) + 40 + SLOTS * 80  # a kind of sample takes 40 bytes, each of them 80
    cache = RaggedCache(f"{limit}B", N, **options)
    cache.aux_array[SLOTS:] = 2  # as after looking for room in vain
    return cache


def codec(name):
    """Return a codec's name; skip the test if its package is not installed."""
    pytest.importorskip({"zstd": "zstandard"}.get(name, name), reason=f"{name} comes with the extra codecs")
    return name


def ragged_named():
    return ragged(name="contract", fingerprint="1")


RAGGED = [ragged, ragged_named]
RAGGED += called(
    ragged_zstd=lambda: ragged(codec=codec("zstd")),
    ragged_unpickled=lambda: copied(ragged()),
    ragged_attached=lambda: left_behind(ragged_named),
)


def disk(record_bytes=None, folder=None, **options):
    """A cache in a new folder, which goes with the cache; with ``record_bytes``, for samples of any size."""
    if record_bytes is None:
        options["structure"], room = Structure.from_dims(DIMS, torch.uint8), 60 + 4 + 8
    else:
        room = record_bytes
    limit = f"{index_bytes(N) + DATA_OFFSET + SLOTS * room}B"
    cache = DiskCache(folder, limit, N, **options) if folder else disk_in(lambda path: DiskCache(path, limit, N, **options))
    if record_bytes is not None:
        cache.aux_array[SLOTS:] = 2  # as after looking for room in vain
    return cache


def disk_records():
    return disk(112)


def keyed():
    return KeyedCache("1MB")


def disk_in(make):
    """A cache that a function makes in a new folder, which goes with it."""
    path = tempfile.mkdtemp()
    cache = make(path)
    weakref.finalize(cache, shutil.rmtree, path)
    return cache


DISK = [disk, disk_records]
DISK += called(
    disk_zstd=lambda: disk(112, codec=codec("zstd")),
    disk_unpickled=lambda: disk_in(lambda path: copied(disk(folder=path))),
    disk_reopened=lambda: disk_in(lambda path: left_behind(lambda: disk(folder=path, fingerprint="1"))),
)
