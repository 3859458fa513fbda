"""States that tests put caches and this process into: what other processes do to them, and damage."""

import contextlib

import numpy as np

from stocache.shm import segment
from stocache.system import limits


@contextlib.contextmanager
def claimed(cache, idx):
    """Hold the claim of a sample, as another process does while it loads it."""
    taken = set()
    try:
        cache._claims.to_load(np.array([idx]), taken)
        assert taken
        yield
    finally:
        cache._claims.end_loading(taken)


@contextlib.contextmanager
def nothing_attached():
    """Be as another process, which has no segment attached yet."""
    attached = dict(segment._attached)
    segment._attached.clear()
    try:
        yield
    finally:
        segment._attached.update(attached)


def record(cache, idx):
    """Return the memory of a `RaggedCache` from the record of a sample on, to damage it."""
    store = cache._store
    return store._memory[store.arena.offsets[idx] :]


def misplace(cache, idx, place):
    """Have a `RaggedCache` look for the record of a sample elsewhere."""
    cache._store.arena.offsets[idx] = place


def no_shared_memory(monkeypatch):
    monkeypatch.setattr(limits, "open_memfd", lambda: None)
    monkeypatch.setattr(limits, "SHM_DIR", "/no/such/dir")
