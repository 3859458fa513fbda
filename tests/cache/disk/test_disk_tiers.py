"""Tiers search memory, then the disk, then the source, and keep in both what they found last."""

import pickle
from contextlib import closing

import pytest

from stocache import CacheOptions
from stocache.cache.disk.tiers import Tiers
from stocache.errors import MismatchError
from tests.support.disks import loaded, record
from tests.support.equality import same


def test_each_sample_is_loaded_once_and_what_the_disk_has_is_kept_in_memory(tmp_path):
    def opened(memory, **options):
        options = CacheOptions(memory, disk=tmp_path / "disk", disk_limit="1MB", fingerprint="1", **options)
        return closing(Tiers.of_any_size(options, 20))

    with opened("60KB", admission="cost") as cache:
        assert loaded(cache, "records", [*range(20)] * 2) == list(range(20))
    with opened("1MB") as cache, closing(pickle.loads(pickle.dumps(cache))) as copied:  # shares both tiers
        assert same([tiers.hit(3, True) for tiers in (cache, copied, cache)], [record(3)] * 3)
        memory, disk = cache.stats()
        assert (memory.filled, memory.hits, disk.hits) == (1, 2, 1)
        assert loaded(cache, "records", range(20)) == []
    with opened(0) as cache:
        assert loaded(cache, "records", range(20)) == []
    with pytest.raises(MismatchError, match="is for other samples"):
        opened("1MB", allow_pickle=True)
