"""Old names work for one version, and warn."""

from functools import partial

import pytest

from stocache import BlockSampler, CachedDataset, DataLoader, Placement, RaggedCache, StorageDataset, StreamLoader
from tests.support.storages import FilePerSample, save


def renamed(old, new):
    return pytest.warns(DeprecationWarning, match=f"{old} is now {new}")


def test_admit_is_admission():
    for make in (partial(RaggedCache, "1MB", 4), partial(CachedDataset, [1], "1MB")):
        with renamed("admit=", r"admission=\. The old name goes with the next version\."):
            cache = make(admit="cost")
        with cache, renamed("admit=", "admission="), pytest.raises(ValueError, match="admission='lru' is unknown"):
            make(admit="lru")
        with renamed("admit=", "admission="), pytest.raises(TypeError, match=r"admit= is the old name of admission=\. Pass"):
            make(admit="cost", admission="all")


def test_counts_have_new_names():
    with RaggedCache("1MB", 4) as cache, renamed("misfits", "rejected"):
        assert cache.stats().misfits == cache.stats().rejected == 0
    with renamed("outside", "fallbacks"):
        assert DataLoader([1, 2]).stats().outside == {}


def test_methods_and_options_have_new_names(tmp_path):
    with renamed("Placement.here", "Placement.from_env"):
        assert Placement.here() == Placement.from_env()
    wanted = []
    with renamed("ahead=", "prefetch="):
        sampler = BlockSampler(range(8), 2, False, window=1, ahead=wanted.extend)
    assert sorted(sampler) == list(range(8))
    assert wanted
    with renamed("expect", "prefetch_blocks"):
        assert StorageDataset(save(FilePerSample(tmp_path / "samples"), 1), [0]).expect([0]) is None


def test_count_is_count_rows(tmp_path):
    pytest.importorskip("pyarrow", reason="it reads the rows")
    (tmp_path / "rows.tsv").write_text("1\t2\n" * 5)
    with renamed("count=", "count_rows="):
        loader = StreamLoader(tmp_path / "rows.tsv", 2, 4, count=True, drop_last=False)
    with loader:
        assert len(loader) == 3
