"""Old names work for one version, and warn."""

import pytest

from stocache import (
    BlockSampler,
    CachedDataset,
    DataLoader,
    InMemoryDataStorage,
    Placement,
    RaggedCache,
    StorageDataset,
    StreamLoader,
)


def test_admit_is_admission(tmp_path):
    for make in (lambda **options: RaggedCache("1MB", 4, **options), lambda **options: CachedDataset([1, 2], "1MB", **options)):
        with pytest.warns(DeprecationWarning, match=r"admit= is now admission=\. The old name goes with the next version\."):
            cache = make(admit="cost")
        with cache, pytest.raises(TypeError, match=r"admit= is the old name of admission=\. Pass admission= only\."):
            with pytest.warns(DeprecationWarning, match="admit="):
                make(admit="cost", admission="all")


def test_an_unknown_value_under_the_old_name_is_refused():
    with pytest.warns(DeprecationWarning, match="admit="), pytest.raises(ValueError, match="admission='lru' is unknown"):
        RaggedCache("1MB", 4, admit="lru")


def test_misfits_is_rejected():
    with RaggedCache("1MB", 4) as cache:
        with pytest.warns(DeprecationWarning, match="misfits is now rejected"):
            assert cache.stats().misfits == cache.stats().rejected == 0


def test_outside_is_fallbacks():
    with pytest.warns(DeprecationWarning, match="outside is now fallbacks"):
        assert DataLoader([1, 2]).stats().outside == {}


def test_here_is_from_env():
    with pytest.warns(DeprecationWarning, match="Placement.here is now Placement.from_env"):
        assert Placement.here() == Placement.from_env()


def test_ahead_is_prefetch():
    wanted = []
    with pytest.warns(DeprecationWarning, match="ahead= is now prefetch="):
        sampler = BlockSampler(range(8), 2, False, window=1, ahead=wanted.extend)
    assert sorted(sampler) == list(range(8))
    assert wanted


def test_count_is_count_rows(tmp_path):
    (tmp_path / "rows.tsv").write_text("1\t2\n" * 5)
    with pytest.warns(DeprecationWarning, match="count= is now count_rows="):
        loader = StreamLoader(tmp_path / "rows.tsv", 2, 4, count=True, drop_last=False)
    with loader:
        assert len(loader) == 3


def test_expect_is_prefetch_blocks(tmp_path):
    storage = InMemoryDataStorage(tmp_path / "samples")
    storage.start_preparation()
    storage.save_sample(1)
    storage.finish_preparation(None)
    dataset = StorageDataset(storage)
    with pytest.warns(DeprecationWarning, match="expect is now prefetch_blocks"):
        assert dataset.expect([0]) is None
