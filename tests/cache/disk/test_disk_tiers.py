"""Tiers search memory, then the disk, then the source, and keep in both what they found last."""

import contextlib
import pickle

import pytest

from stocache import CacheOptions
from stocache.cache.disk.store import DiskStore
from stocache.cache.disk.tiers import Tiers
from stocache.cache.stats import MISSING
from stocache.errors import ClosedError, MismatchError, SampleError
from tests.support.disks import loaded, record
from tests.support.equality import same

ALL = range(20)


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a cache over one folder; it closes the one before."""
    with contextlib.ExitStack() as stack:

        def open_cache(memory=0, **options):
            stack.close()
            options = {"disk": tmp_path / "disk", "disk_limit": "1MB", "fingerprint": "1"} | options
            return stack.enter_context(contextlib.closing(Tiers.of_any_size(CacheOptions(memory, **options), len(ALL))))

        yield open_cache


def test_what_was_loaded_before_closing_is_written(opened, monkeypatch):
    monkeypatch.setattr(DiskStore, "has_room_for", lambda *_: False)  # so what memory keeps is not written
    cache = opened("60KB")
    loaded(cache, "records", ALL)
    kept = cache.memory.stats().filled
    cache.close()
    assert 0 < kept < len(ALL)
    written = opened(0).stats()[1].filled
    assert written in (len(ALL) - kept, len(ALL) - kept - 1)  # the writer may look at the first one before memory refuses it


def test_each_sample_is_loaded_once_in_two_runs_and_a_hit_of_the_disk_is_kept_in_memory(opened):
    for run in range(2):
        cache = opened()
        assert (cache.hit(3, True) is MISSING) == (run == 0)
        assert loaded(cache, "records", [*ALL, *ALL]) == ([] if run else list(ALL))
        memory, disk = cache.stats()
        assert (memory.filled, disk.filled, disk.misses) == (0, len(ALL), 0 if run else len(ALL))
    cache = opened("1MB")
    copied = pickle.loads(pickle.dumps(cache))  # shares both tiers
    for its in (cache, copied, cache):
        assert same(its.hit(3, True), record(3))
    memory, disk = cache.stats()
    assert (memory.filled, memory.hits, disk.hits) == (1, 2, 1)
    copied.close()


@pytest.mark.parametrize("options", [{"admission": "cost"}, {"codec": "zstd"}, {"allow_pickle": True}], ids=str)
def test_the_options_of_the_memory_go_together_with_a_disk(options, opened):
    if "codec" in options:
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    for memory in ("60KB", "1MB", 0):
        assert loaded(opened(memory, **options), "records", [*ALL, *ALL]) == (list(ALL) if memory == "60KB" else [])
    if "admission" not in options:  # that of the memory alone
        with pytest.raises(MismatchError, match="is for other samples"):
            opened()


def test_errors_of_the_source_and_samples_that_do_not_fit(opened):
    cache = opened("1MB")
    with pytest.raises(ZeroDivisionError, match="by zero"):
        cache.get_or_load(3, lambda idx: idx / 0)
    with pytest.raises(SampleError, match="sample 3"):
        cache.get_or_load(3, lambda idx: object())
    assert type(cache.get_or_load(4, lambda idx: object(), strict=False)) is object
    loaded(cache, "records", [3])
    for _ in range(2):
        cache.close()
    with pytest.raises(ClosedError, match="the cache is closed"):
        cache.get_or_load(3, record)
