"""Caches to run the contract on: each class, backing, placement and way to come by one; room for SLOTS of N samples."""

import os
import pickle

import torch

from stocache import Placement, RaggedCache, SharedCache, SharedCacheDDP
from stocache.shm import layout
from stocache.system import limits

N, SLOTS, DIMS = 20, 12, (3, 4, 5)
LIMIT = f"{N + SLOTS * 60}B"


def sample(idx, dims=DIMS, dtype=torch.uint8):
    return torch.randint(0, 256, dims, generator=torch.Generator().manual_seed(idx)).to(dtype)


def fill(cache):
    for idx in range(N):
        cache.set_slot(idx, sample(idx))


def in_shm():
    return SharedCache(LIMIT, N, DIMS)


def scattered():
    return SharedCache(LIMIT, N, DIMS, placement="scattered")


def in_blocks():
    return SharedCache(LIMIT, N, DIMS, placement=Placement("scattered", unit=4))


def unpickled():
    cache = SharedCache(LIMIT, N, DIMS)
    return pickle.loads(pickle.dumps(cache))


def named():
    return SharedCache(LIMIT, N, DIMS, name="contract", fingerprint="1")


def ddp():
    return SharedCacheDDP(LIMIT, N, DIMS, name="contract")


def attached():
    """A cache that another process made and filled, and left for us."""
    pid = os.fork()
    if pid == 0:
        with SharedCacheDDP(LIMIT, N, DIMS, name="contract", persist=True, fingerprint="1") as cache:
            fill(cache)
            cache.clear()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    cache = SharedCacheDDP(LIMIT, N, DIMS, name="contract", fingerprint="1")
    os.pwrite(cache._segment._fds[0], b"\0", layout.PERSISTS_AT)  # let it go with this test
    return cache


def in_memfd():
    room, limits.shm_free = limits.shm_free, lambda: 0
    try:
        cache = in_shm()
    finally:
        limits.shm_free = room
    assert cache._segment.backing == "memfd"
    return cache


SHARED = [in_shm, in_memfd, scattered, in_blocks, unpickled, named, ddp, attached]


def ragged(**options):
    control = RaggedCache(0, N, **options)._segment.layout.control_bytes
    cache = RaggedCache(f"{control + 40 + SLOTS * 80}B", N, **options)  # a kind of sample takes 40 bytes, each of them 80
    cache.aux_array[SLOTS:] = 2  # as after looking for room in vain
    return cache


def ragged_zstd():
    return ragged(codec="zstd")


def ragged_lz4():
    return ragged(codec="lz4")


def ragged_named():
    return ragged(name="contract", fingerprint="1")


def ragged_unpickled():
    cache = ragged()
    return pickle.loads(pickle.dumps(cache))


def ragged_attached():
    pid = os.fork()
    if pid == 0:
        cache = ragged(name="contract", persist=True)
        fill(cache)
        cache.clear()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    cache = ragged(name="contract")
    os.pwrite(cache._segment.fd, b"\0", layout.PERSISTS_AT)
    return cache


RAGGED = [ragged, ragged_zstd, ragged_lz4, ragged_named, ragged_unpickled, ragged_attached]
