"""Tiers search memory, then the disk, then the source, and keep in both what they found last."""

import contextlib
import pickle

import pytest

from stocache import CacheOptions
from stocache.cache.disk.store import DiskStore
from stocache.cache.disk.tiers import Tiers
from stocache.errors import MismatchError
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


@pytest.mark.parametrize("options", [{}, {"admission": "cost"}, {"codec": "zstd"}, {"allow_pickle": True}], ids=str)
def test_each_sample_is_loaded_once_and_found_in_later_runs_whatever_the_options_of_the_memory(options, opened):
    if "codec" in options:
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    for memory in ("60KB", "1MB", 0):
        assert loaded(opened(memory, **options), "records", [*ALL, *ALL]) == (list(ALL) if memory == "60KB" else [])
    if options and "admission" not in options:  # the bound of the memory alone
        with pytest.raises(MismatchError, match="is for other samples"):
            opened()


def test_a_hit_of_the_disk_is_kept_in_memory(opened):
    loaded(opened(), "records", ALL)
    cache = opened("1MB")
    with contextlib.closing(pickle.loads(pickle.dumps(cache))) as copied:  # shares both tiers
        assert same([tiers.hit(3, True) for tiers in (cache, copied, cache)], [record(3)] * 3)
    memory, disk = cache.stats()
    assert (memory.filled, memory.hits, disk.hits) == (1, 2, 1)
