"""Gathered batches are what default_collate makes of the samples; when that is more than stacking, they are not gathered."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate

from stocache import CachedDataset, SharedCache
from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.datasets.batches.rows import CacheRows
from stocache.datasets.batches.spec import BatchSpec
from stocache.datasets.lazy import with_lazy_batches
from stocache.samples.spec import Structure
from tests.support.equality import everywhere, identical, same

Pair = namedtuple("Pair", "image label")
N = 12
new = lambda shape, dtype: torch.empty(shape, dtype=dtype)


def filled(samples, limit=0.1, indices=range(N), **options):
    cache = SharedCache.like(samples[0], limit, N, **options)
    for idx in indices:
        cache.set_slot(idx, samples[idx])
    return cache


def lazy(cache, samples, indices, loads):
    """A batch of samples that notes which it loads."""
    load = lambda missing: loads.extend(missing) or [samples[idx] for idx in missing]
    return LazyBatch(BatchSpec.of(cache), CacheRows(cache, indices, load))


def images(n=N):
    return [torch.randint(0, 256, (3, 4, 5), generator=torch.Generator().manual_seed(idx)).to(torch.uint8) for idx in range(n)]


KINDS = {
    "tuple": lambda: [(image, idx) for idx, image in enumerate(images())],
    "namedtuple": lambda: [Pair(image, idx % 2 == 0) for idx, image in enumerate(images())],
    "dict": lambda: [{"x": image.to(torch.bfloat16), "nested": {"y": (idx, [idx])}} for idx, image in enumerate(images())],
    "arrays": lambda: [{"a": image.numpy(), "b": np.array(idx), "c": np.int16(idx)} for idx, image in enumerate(images())],
    "scalars": lambda: [(np.float16(idx / 4), np.complex64(idx)) for idx in range(N)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gathered_batch_is_that_of_default_collate_and_what_it_loads_is_cached(kind):
    samples = KINDS[kind]()
    for cached, indices in ((range(N), [3]), ([1, 5], [1, 5, 1, 11, 0]), ((), range(N))):
        with filled(samples, 1, cached) as cache:
            unread = lazy(cache, samples, indices, loads := [])
            assert unread.cached == (not {*indices} - {*cached})
            assert same(unread.gather(new), default_collate([samples[idx] for idx in indices]))
            assert sorted(loads) == sorted({*indices} - {*cached})  # each once
            assert all(identical(cache.get_slot(idx), samples[idx]) for idx in indices)
    samples = KINDS["tuple"]()
    with filled(samples, f"{N + 5 * 68}B") as cache:  # leaves samples out
        assert same(lazy(cache, samples, range(N), []).gather(new), default_collate(samples))


def test_what_default_collate_does_not_simply_stack_is_not_gathered():
    for sample in (None, {"x": None}, (torch.zeros(2), 1j), np.zeros(3, ">i4"), np.array("2020", "M8[D]"), np.str_("L")):
        with SharedCache.like(sample, 0.1, 3) as cache:
            assert BatchSpec.of(cache) is None


permuted = lambda n=N: [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in images(n)]
ORDERED = {
    "tuple": lambda: [(image, idx) for idx, image in enumerate(permuted(20))],
    "channels_last": lambda: [image[None].to(memory_format=torch.channels_last) for image in images(20)],
    "Fortran": lambda: [{"x": np.asfortranarray(image.numpy())} for image in images()],
}


@pytest.mark.parametrize("kind", ORDERED)
def test_samples_in_another_order_come_back_and_are_collated_as_they_were(kind):
    samples = ORDERED[kind]()
    with CachedDataset(samples, 0.1) as dataset:
        assert isinstance(dataset.cache, SharedCache)
        dataset.warm(progress=False)
        assert BatchSpec.of(dataset.cache) is None
        assert with_lazy_batches(dataset) is None
        found = dataset.__getitems__(range(len(samples)))
        assert everywhere(identical, found, samples)
        assert everywhere(identical, dataset.cache.get_slot(1, copy=False), samples[1])
        batch, wanted = default_collate(found), default_collate(samples)
        assert same(batch, wanted)
        assert str(Structure.of(batch)) == str(Structure.of(wanted))  # strides, too


def test_a_misfit_is_read_with_all_others_and_loaded_once():
    samples = images()
    samples[4] = torch.zeros(3, 4, 6, dtype=torch.uint8)
    for cached in ([], [0]):
        loads = []
        with filled(samples, 1, cached) as cache:
            unread = lazy(cache, samples, [0, 4, 2], loads)
            assert unread.gather(new) is None
            assert same(list(unread), [samples[idx] for idx in (0, 4, 2)])
            assert sorted(loads) == [0, 2, 4][len(cached) :]
            assert unread.gather(new) is None  # it is read already


def test_reading_later_is_for_cached_datasets_that_can_be_gathered():
    samples = KINDS["tuple"]()
    with CachedDataset(samples, 0.1) as dataset:
        unread = with_lazy_batches(dataset).__getitems__([2, 3])
        assert unread.gather(lambda shape, dtype: None) is None  # no memory
        assert (len(unread), same([unread[0], unread[1]], samples[2:4])) == (2, True)
        batch = with_lazy_batches(dataset).__getitems__([-1, 0]).gather(new)
        assert same(batch, default_collate([samples[-1], samples[0]]))
        assert isinstance(dataset.__getitems__([1]), list)  # the original reads now
        part = with_lazy_batches(Subset(Subset(dataset, [5, 6, 7]), [2, 0]))
        assert same(part.__getitems__([0, 1]).gather(new), default_collate([samples[7], samples[5]]))
    assert with_lazy_batches(samples) is None
    assert with_lazy_batches(Subset(samples, [1])) is None
    for unfit in (CachedDataset(samples, 0.1, transform=len), CachedDataset([torch.zeros(n) for n in range(4)], 0.1)):
        with unfit:
            assert with_lazy_batches(unfit) is None
