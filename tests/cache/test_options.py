"""Options: each is a field of one class, given in an object of that class or spelled out; errors name the right class."""

import dataclasses
import inspect
import pickle

import pytest
import torch
from torch.utils.data import TensorDataset

import stocache
from stocache import AuditOptions, CachedDataset, CacheOptions, KeyedCache, RaggedCache, SampleOptions, SharedCache
from stocache.cache.options import ALL_OPTIONS, SHARING
from stocache.errors import LimitError

SAMPLES = TensorDataset(torch.arange(6))
SHAPE = (3,)


def dataset(*objects, **options):
    CachedDataset(SAMPLES, *objects, **options).close()


def shared(size, **options):
    SharedCache(size, 4, SHAPE, **options).close()


def ragged(size, **options):
    RaggedCache(size, 4, **options).close()


WRONG = [  # what is given, the error, and what it says
    (
        lambda: dataset("1MB", plcement="prefix"),
        TypeError,
        r"CachedDataset has no option 'plcement'\. Did you mean placement\?",
    ),
    (lambda: dataset("1MB", colour="red"), TypeError, r"CachedDataset has no option 'colour'\.$"),
    (lambda: dataset(CacheOptions("1MB"), persist=True), LimitError, "persist is one of the CacheOptions that were given"),
    (
        lambda: dataset("1MB", SampleOptions(probe=2), split=False),
        LimitError,
        "split is one of the SampleOptions that were given",
    ),
    (lambda: dataset("1MB", AuditOptions(), audit=0), LimitError, "audit is one of the AuditOptions that were given"),
    (lambda: dataset(CacheOptions("1MB"), CacheOptions("2MB")), LimitError, "CacheOptions is given twice"),
    (lambda: dataset("1MB", CacheOptions("2MB")), LimitError, "CacheOptions is given twice"),
    (lambda: dataset(SampleOptions(), SampleOptions()), LimitError, "SampleOptions is given twice"),
    (lambda: shared("1MB", codec="lz4"), TypeError, r"SharedCache has no option 'codec'\.$"),
    (
        lambda: shared(CacheOptions("1MB", allow_pickle=True)),
        LimitError,
        "SharedCache: allow_pickle of the CacheOptions has no",
    ),
    (lambda: shared(CacheOptions("1MB"), fingerprint="v1"), LimitError, "fingerprint is one of the CacheOptions"),
    (lambda: ragged("1MB", disk="/nvme"), TypeError, "RaggedCache has no option 'disk'"),
    (lambda: ragged(CacheOptions("1MB", disk="d", disk_limit=1)), LimitError, "disk of the CacheOptions has no effect here"),
    (lambda: KeyedCache("1MB", admission="cost"), TypeError, "KeyedCache has no option 'admission'"),
    (lambda: KeyedCache(CacheOptions("1MB", narrow=True)), LimitError, "narrow of the CacheOptions has no effect here"),
    (lambda: stocache.cached("1MB", on_busy="raise"), TypeError, "cached has no option 'on_busy'"),
    (lambda: stocache.cached("1MB", audit=2), LimitError, "audit=2 is not a share of the time"),
    (
        lambda: stocache.CachedIterable([1], "1MB", audit=0),
        TypeError,
        r"CachedIterable has no option 'audit'\. It is an option of Audit",
    ),
    (lambda: AuditOptions(audit=True), LimitError, "audit=True is not a share of the time"),
    (lambda: AuditOptions(on_change="warn"), LimitError, "on_change='warn' is unknown"),
    (lambda: SampleOptions(cut="first"), LimitError, "cut='first' is unknown. Use None or 'latest' or 'smallest'"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_an_option_that_is_wrong_here_is_an_error_that_names_the_right_place(number):
    make, error, text = WRONG[number]
    with pytest.raises(error, match=text):
        make()


def test_options_are_given_in_objects_or_spelled_out():
    objects = CacheOptions("1MB", fingerprint="v1"), SampleOptions(probe=2, variable=True), AuditOptions(on_change="raise")
    spelled = {"fingerprint": "v1", "probe": 2, "variable": True, "on_change": "raise"}
    for given, options in ((objects, {}), (objects[::-1], {}), (("1MB",), spelled), ((), {"size_limit_gib": "1MB"} | spelled)):
        with CachedDataset(SAMPLES, *given, **options) as made:
            assert isinstance(made.cache, RaggedCache)
            assert (made._fingerprint, made._audit.on_change, made[5]) == ("v1", "raise", (torch.tensor(5),))


@pytest.mark.parametrize("kind", ALL_OPTIONS)
def test_options_pickle_and_can_be_replaced(kind):
    options = kind()
    assert pickle.loads(pickle.dumps(options)) == options == dataclasses.replace(options)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        options.name = "other"


def test_no_option_is_in_two_classes_and_signatures_show_all():
    names = [name for names in ALL_OPTIONS.values() for name in names]
    assert len(names) == len(set(names))
    assert {*names} < {*inspect.signature(CachedDataset).parameters}
    assert [*inspect.signature(SharedCache).parameters][-len(SHARING) :] == [*SHARING]
    assert "options" not in inspect.signature(stocache.cached).parameters
