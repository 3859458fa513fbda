"""SharedCache in one process: what it does beyond the contract of all caches."""

import errno
import os
import pickle
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from stocache import SampleError, SampleIndexError, SharedCache, SlotError
from tests.support.containers import Box, Point
from tests.support.equality import identical, same
from tests.support.makers import DIMS, SLOTS, N, in_shm, sample
from tests.support.samples import DTYPES


def test_stats_and_repr_say_what_happened():
    with in_shm() as cache:
        cache.get_slot(0)
        cache.get_slot(N - 1)  # outside
        cache.set_slot(0, sample(0))
        cache.get_slots([0, 0, 1, N - 2])
        stats, backing = cache.stats(), cache._segment.backing
        assert (stats.hits, stats.misses, stats.fills, stats.races, stats.refused) == (2, 4, 1, 0, 0)
        assert (stats.dataset_len, stats.slots, stats.filled, stats.slot_bytes, stats.filled_bytes) == (N, SLOTS, 1, 60, 60)
        assert stats.reserved_bytes == 768  # 12 slots of 60 bytes, in whole cache lines: one extent
        assert (stats.hit_rate, stats.fill_fraction) == pytest.approx((2 / 6, 1 / 20))
        assert repr(cache) == (
            f"<SharedCache of uint8[3, 4, 5]: 1 of 20 samples cached, room for 720 B in {backing}, hit rate 33%>"
        )


def test_slots_can_be_read_and_written_by_number():
    with in_shm() as cache:
        cache[0:2] = 7
        cache[SLOTS - 1] = sample(1)
        assert (cache[0:2] == 7).all()
        assert same(cache[-1], sample(1))
        with pytest.raises(SampleIndexError, match=rf"cache\[{SLOTS}\]: outside the cache of 12 slots"):
            cache[SLOTS]
        with pytest.raises(SampleError, match=r"cache\[0\]: value is torch.float32, the cache holds torch.uint8"):
            cache[0] = torch.zeros(DIMS)
        assert not cache.aux_array[:SLOTS].any()  # nothing is marked by that


@pytest.mark.parametrize("dims", [(), (1,), (3, 5), (7, 1, 3), (0, 4)])
def test_every_dtype_comes_back_bit_for_bit(dims):
    for dtype in DTYPES:
        values = torch.randint(0, 2, (9, *dims)).to(torch.float32).to(dtype)
        with SharedCache(1, 9, dims, dtype) as cache:
            for idx, value in enumerate(values):
                cache.set_slot(idx, value)
            assert all(map(identical, map(cache.get_slot, range(9)), values))
            assert identical(cache.get_slots([8, 0, 4])[0], values[[8, 0, 4]])


def test_values_that_would_not_come_back_are_refused():
    zeros = torch.zeros(2, 3, dtype=torch.uint8)
    with SharedCache(1, 3, (2, 3)) as cache:
        for value, message in (
            (torch.zeros(2, 3), "value is torch.float32, the cache holds torch.uint8; it would be changed. Convert it first"),
            (zeros[0], r"value has shape \(3,\), the cache holds \(2, 3\); nothing is broadcast"),
            (np.zeros((2, 3), object), "value is ndarray; can't convert np.ndarray of type numpy.object_"),
            ([[0, 0, 0], [0, 0, 0]], r"value is list; the cache holds uint8\[2, 3\]. Convert it"),
            (zeros.to_sparse(), "sparse_coo tensor"), (5, r"value has shape \(\)"), (300, "value is 300; "),
        ):  # fmt: skip
            with pytest.raises(SampleError, match=rf"set_slot\(0\): .*{message}"):
                cache.set_slot(0, value)
            assert cache.get_slot(0) is None


GRID, COMPLEX = sample(0, (4, 6)), torch.tensor([1 + 2j, 3 - 1j])
READ_ONLY, TRAINED = np.ones(3, np.float32), torch.nn.Parameter(torch.ones(3))
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(("values", "stored"), [
    ([GRID.t().contiguous().t(), GRID.numpy(), GRID.repeat_interleave(2, 1)[:, ::2]], GRID),
    ([TRAINED, TRAINED * 1, torch.ones(()).expand(3), np.ones(3, ">f4"), READ_ONLY], torch.ones(3)),
    ([COMPLEX.conj()], torch.tensor([1 - 2j, 3 + 1j])), ([COMPLEX.conj().imag], torch.tensor([-2.0, 1.0])),
])  # fmt: skip
def test_values_of_any_layout_are_stored_right(values, stored):
    with SharedCache(1, len(values), stored.shape, stored.dtype) as cache:
        for idx, value in enumerate(values):
            cache.set_slot(idx, value)
            assert same(cache.get_slot(idx), stored)
            assert not cache.get_slot(idx).requires_grad


def test_scalar_slots_take_numbers_that_survive():
    for dtype, good, bad in (
        (torch.int64, np.int64(5), 2**63), (torch.uint8, 255, 256), (torch.float32, float("nan"), 0.1), (torch.bool, True, 2),
    ):  # fmt: skip
        with SharedCache(1, 3, (), dtype) as cache:
            with pytest.raises(SampleError, match=r"set_slot\(0\): .*(value is|exceeds)"):
                cache.set_slot(0, bad)
            cache.set_slot(0, good)
            assert repr(cache.get_slot(0).item()) == repr(np.asarray(good).item())


def parts(idx):
    box = Box(Point(0.1 * idx, np.float32(idx)), 2**62 - idx)
    rest = [idx % 2 == 0, complex(idx, -1), None, torch.tensor(idx, dtype=torch.bfloat16)]
    return {"image": sample(idx), "mask": sample(idx).numpy() > 99, "box": box, "rest": rest}


def test_samples_of_several_parts_come_back_the_same():
    with SharedCache.like(parts(0), 15, 10**6) as cache:
        for idx in range(5):
            cache.set_slot(idx, parts(idx))
        got = cache.get_slot(0)
        got["image"].zero_()
        got["mask"][:] = False
        assert all(same(cache.get_slot(idx), parts(idx)) for idx in range(5))
        cache.get_slot(1, copy=False)["mask"][:] = True
        assert cache.get_slot(1)["mask"].all()
        rows, _ = cache.get_slots([4, 9, 0])
        assert torch.equal(rows["image"], torch.stack([sample(4), torch.zeros_like(sample(0)), sample(0)]))
        assert rows["rest"][1].tolist() == [4 - 1j, 0, 0 - 1j]
        again, _ = cache.get_slots([0, 2, 3], out=rows)
        assert again["image"].data_ptr() == rows["image"].data_ptr()
        cache.set_slots([5, 6, 7], again)
        assert same([cache.get_slot(idx) for idx in (5, 6, 7)], [parts(0), parts(2), parts(3)])
        cache[8] = parts(2)
        assert cache[8]["box"].label == parts(2)["box"].label
        with pytest.raises(SampleError, match=r'set_slot\(0\): sample\["image"\] has shape \(3,\)'):
            cache.set_slot(0, parts(0) | {"image": torch.ones(3, dtype=torch.uint8)}, allow_overwrite=True)
        assert len(pickle.dumps(cache)) < 4096  # however large the cache is


def test_indices_of_a_batch_are_integers_of_any_kind():
    arrays = [np.array([2, 0]), np.array([2, 0], np.int32), np.array([0, 2])[::-1], torch.tensor([2, 0])]
    with SharedCache(1, 4, (3,)) as cache:
        cache.set_slots(range(4), torch.stack([sample(idx, (3,)) for idx in range(4)]))
        for indices in ([2, 0], range(2, -1, -2), (2, 0), *arrays):
            assert same(cache.get_slots(indices)[0], torch.stack([sample(2, (3,)), sample(0, (3,))]))
        for indices, message in (
            ([0, 4], "indices from 0 to 4 reach outside the dataset of 4 samples"), ([0.5], "indices are float64"),
            ([True], "indices are bool"), (3, r"indices are int64\[\]"), ([[0], [0, 1]], "a list that does not hold integers"),
        ):  # fmt: skip
            with pytest.raises(SampleIndexError, match=message):
                cache.get_slots(indices)


def test_batches_go_to_memory_that_fits_and_come_from_it():
    with SharedCache(1, 4, (8,)) as cache:
        with pytest.raises(SampleError, match=r"set_slots: values is torch.uint8\[3, 8\], expected torch.uint8\[2, 8\]"):
            cache.set_slots([0, 1], torch.zeros(3, 8, dtype=torch.uint8))
        assert cache.stats().filled == 0
        cache.set_slots([3, 1], torch.stack([sample(3, (8,)), sample(1, (8,))], 1).t())  # not contiguous
        with pytest.raises(SlotError, match=r"set_slot\(2\): the slot is set"):
            cache.set_slots([2, 2], torch.zeros(2, 8, dtype=torch.uint8))
        out = torch.zeros(17, dtype=torch.uint8)[1:].view(2, 8)  # not aligned
        rows, _ = cache.get_slots([3, 1], out=out)
        assert rows is out
        assert same(rows, torch.stack([sample(3, (8,)), sample(1, (8,))]))
        for out, message in (
            (torch.zeros(2, 8), r"out is torch.float32\[2, 8\], expected torch.uint8\[2, 8\]"), ([], "out is list"),
            (torch.zeros(8, 2, dtype=torch.uint8).t(), "out is not contiguous"),
        ):  # fmt: skip
            with pytest.raises(SampleError, match=message):
                cache.get_slots([0, 1], out=out)


@pytest.mark.linux
@pytest.mark.parametrize("code", [0, errno.ENOSPC])
def test_a_write_that_ends_early_leaves_an_empty_slot(code, monkeypatch, caplog):
    with SharedCache(1, 4, (4096,)) as cache:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", Mock(side_effect=[7, 7, OSError(code, os.strerror(code)) if code else 0]))
            cache.set_slot(2, sample(2, (4096,)))
        assert (cache.get_slot(2), cache.stats().refused) == (None, 1)
        assert "sample 2 stays uncached" in caplog.text
        cache.set_slot(2, sample(2, (4096,)))
        assert same(cache.get_slot(2), sample(2, (4096,)))
