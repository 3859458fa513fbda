"""Options: each is a field of one class, given in an object of that class or spelled out; errors name the right class."""

import inspect
import sys

import pytest
import torch
from torch.utils.data import ChainDataset, TensorDataset

import stocache
from stocache import AuditOptions, CachedDataset, CacheOptions, KeyedCache, Placement, RaggedCache, SampleOptions, SharedCache
from stocache.cache.options import ALL_OPTIONS, SHARING
from stocache.cache.placement import residency
from stocache.errors import CodecError, DatasetError, DiskError, LimitError

SAMPLES = TensorDataset(torch.arange(6))


def dataset(*objects, **options):
    CachedDataset(SAMPLES, *objects, **options).close()


def shared(size, dataset_len=4, **options):
    SharedCache(size, dataset_len, (3,), **options).close()


def ragged(size, **options):
    RaggedCache(size, 60, **options).close()


WRONG = [  # what is given, the error, and what it says
    (lambda: dataset("1MB", plcement="prefix"), TypeError, r"has no option 'plcement'\. Did you mean placement\?"),
    (lambda: dataset("1MB", SampleOptions(), split=False), LimitError, "split is one of the SampleOptions that were given"),
    (lambda: dataset("1MB", CacheOptions("2MB")), LimitError, "CacheOptions is given twice"),
    (lambda: dataset("1MB", narrow="yes"), LimitError, r"narrow='yes' is unknown. Use True or False or 'auto'"),
    (lambda: shared("1MB", codec="lz4"), TypeError, r"SharedCache has no option 'codec'\.$"),
    (lambda: shared(CacheOptions(allow_pickle=True)), LimitError, "SharedCache: allow_pickle of the CacheOptions has no"),
    (lambda: shared("nonsense"), LimitError, "size_limit_gib="), (lambda: shared(1, 1.5), LimitError, "not an integer"),
    (lambda: shared(1, -1), LimitError, "dataset_len=-1 is negative"),
    (lambda: ragged("500B"), LimitError, "=500B leaves 0 bytes after the 608-byte state array. Raise"),
    (lambda: ragged("1MB", admission="lru"), LimitError, "admission='lru' is unknown. Use 'all' or 'cost'"),
    (lambda: ragged("1MB", codec="rar"), CodecError, "codec='rar' is unknown. Use 'zstd' or 'lz4', or None"),
    (lambda: ragged("1MB", codec="zstd"), CodecError, r"package that is not installed: pip install 'stocache\[codecs\]'"),
    (lambda: KeyedCache("1MB", disk="d"), LimitError, "go together"),
    (lambda: KeyedCache("1MB", disk="", disk_limit="1MB"), DiskError, "disk='' is not the path"),
    (lambda: stocache.cached("1MB", audit=2), LimitError, "audit=2 is not a share of the time"),
    (lambda: stocache.CachedIterable([1], "1MB", audit=0), TypeError, r"no option 'audit'\. It is an option of Audit"),
    (lambda: stocache.CachedIterable(5), DatasetError, "goes into CachedDataset"),
    (lambda: stocache.CachedIterable(iter([1, 2])), DatasetError, "again and again"),
    (lambda: CachedDataset(ChainDataset([]), "1MB"), DatasetError, "CachedIterable records"),
    (lambda: AuditOptions(on_change="warn"), LimitError, "on_change='warn' is unknown"),
    (lambda: Placement("random"), LimitError, "placement 'random' is unknown"),
    (lambda: Placement(unit=0), LimitError, "unit=0"), (lambda: Placement(node=2, nodes=2), LimitError, "node=2, nodes=2"),
    (lambda: residency(Placement("scattered"), 2**33, 10), LimitError, "exceeds 64-bit arithmetic"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "text"), WRONG)
def test_an_option_that_is_wrong_is_an_error_that_names_the_right_place(make, error, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(error, match=text):
        make()


def test_options_are_given_in_objects_or_spelled_out():
    objects = CacheOptions("1MB", fingerprint="v1"), SampleOptions(probe=2, variable=True), AuditOptions(on_change="raise")
    spelled = {"fingerprint": "v1", "probe": 2, "variable": True, "on_change": "raise"}
    for given, options in ((objects, {}), (objects[::-1], {}), (("1MB",), spelled), ((), {"size_limit_gib": "1MB"} | spelled)):
        with CachedDataset(SAMPLES, *given, **options) as made:
            assert isinstance(made.cache, RaggedCache)
            assert (made._fingerprint, made._audit.on_change, made[5]) == ("v1", "raise", (torch.tensor(5),))


def test_no_option_is_in_two_classes_and_signatures_show_all():
    names = [name for names in ALL_OPTIONS.values() for name in names]
    assert len(names) == len(set(names))
    assert {*names} < {*inspect.signature(CachedDataset).parameters}
    assert [*inspect.signature(SharedCache).parameters][-len(SHARING) :] == [*SHARING]
    assert "options" not in inspect.signature(stocache.cached).parameters
