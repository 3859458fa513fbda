"""A TieredCache searches memory, then the disk, then the source, and keeps in both what it found last."""

import contextlib
import pickle

import pytest
import torch

from stocache import CacheOptions
from stocache.cache.stats import MISSING
from stocache.disk.store import DiskStore
from stocache.disk.tiers import TieredCache
from stocache.errors import ClosedError, MismatchError, SampleError
from tests.support.equality import same

pytestmark = pytest.mark.quick

COUNT = 20


def sample(idx):
    return {"row": torch.full((idx + 1,), idx), "name": str(idx)}


class Source:
    def __init__(self):
        self.loaded = []

    def __call__(self, idx):
        self.loaded.append(idx)
        return sample(idx)

    def check(self, cache, indices):
        """Load samples through a cache, and demand that they are right."""
        for idx in indices:
            assert same(cache.get_or_load(idx, self), sample(idx))


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a cache over one folder; it closes the one before."""
    with contextlib.ExitStack() as stack:

        def open_cache(memory=0, **options):
            stack.close()
            options = {"disk": tmp_path / "disk", "disk_limit": "1MB", "fingerprint": "1"} | options
            return stack.enter_context(contextlib.closing(TieredCache(CacheOptions(memory, **options), COUNT)))

        yield open_cache


TWICE = [*range(COUNT), *range(COUNT)]


def test_what_was_loaded_before_closing_is_written(opened, source, monkeypatch):
    monkeypatch.setattr(DiskStore, "has_room_for", lambda *_: False)  # so what memory keeps is not written
    cache = opened("2KB")
    source.check(cache, range(COUNT))
    kept = cache.memory.stats().filled
    cache.close()
    assert 0 < kept < COUNT
    assert opened(0).stats()[1].filled == COUNT - kept


def test_each_sample_is_loaded_once_in_two_runs_and_a_hit_of_the_disk_is_kept_in_memory(opened, source):
    for run in range(2):
        cache = opened()
        assert (cache.hit(3, True) is MISSING) == (run == 0)
        source.check(cache, TWICE)
        memory, disk = cache.stats()
        assert (memory.filled, disk.filled) == (0, COUNT)
        assert disk.misses == (0 if run else COUNT)
    cache = opened("1MB")
    for _ in range(3):
        assert same(cache.hit(3, True), sample(3))
    memory, disk = cache.stats()
    assert (memory.filled, memory.hits, disk.hits) == (1, 2, 1)
    assert source.loaded == list(range(COUNT))


@pytest.mark.parametrize("options", [{"admission": "cost"}, {"codec": "zstd"}, {"allow_pickle": True}], ids=str)
def test_the_options_of_the_memory_go_together_with_a_disk(options, opened, source):
    if "codec" in options:
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    for memory in ("5KB", "1MB", 0):
        source.check(opened(memory, **options), TWICE)
    assert source.loaded == list(range(COUNT))
    if "admission" not in options:  # that of the memory alone
        with pytest.raises(MismatchError, match="is for other samples"):
            opened()


def test_a_copy_by_pickle_shares_both_tiers(opened, source):
    cache = opened("400B")
    copied = pickle.loads(pickle.dumps(cache))
    source.check(cache, range(COUNT))
    cache.disk.flush()
    assert all(same(copied.hit(idx, True), sample(idx)) for idx in range(COUNT))
    copied.close()


def test_errors_of_the_source_and_samples_that_do_not_fit(opened, source):
    cache = opened("1MB")
    with pytest.raises(ZeroDivisionError, match="by zero"):
        cache.get_or_load(3, lambda idx: idx / 0)
    with pytest.raises(SampleError, match="set_slot"):
        cache.get_or_load(3, lambda idx: object())
    assert type(cache.get_or_load(4, lambda idx: object(), strict=False)) is object
    source.check(cache, [3])
    for _ in range(2):
        cache.close()
    with pytest.raises(ClosedError, match="the cache is closed"):
        cache.get_or_load(3, source)
