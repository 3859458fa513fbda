"""SharedCache in one process: what it does beyond the contract of all caches."""

import errno
import os
import pickle
import random

import numpy as np
import pytest
import torch

from stocache import LimitError, SampleError, SampleIndexError, SegmentError, SharedCache
from stocache.shm import extents
from stocache.system import limits
from stocache.system.limits import GIB, MIB, Memory
from tests.support.containers import Box, Point
from tests.support.equality import same
from tests.support.faults import claimed
from tests.support.makers import DIMS, SLOTS, N, in_blocks, in_shm, sample, scattered
from tests.support.samples import DTYPES


@pytest.fixture(params=[in_shm, scattered, in_blocks], ids=lambda maker: maker.__name__)
def cache(request):
    with request.param() as cache:
        yield cache


def test_batches_are_read_and_written_as_their_samples_are(cache, resident, outside):
    cached = resident[::2]
    _, mask = cache.get_slots([*cached, outside[0]] * 2)
    assert not mask.any()
    cache.set_slots([*cached, outside[0]] * 2, torch.stack([sample(idx) for idx in (*cached, outside[0])] * 2))
    for count in (0, 1, 2, 50):
        indices = random.choices(range(N), k=count)
        rows, mask = cache.get_slots(indices)
        assert rows.shape == (count, *DIMS)
        assert mask.tolist() == [idx in cached for idx in indices]
        for row, idx in zip(rows, indices, strict=True):
            assert same(row, sample(idx) if idx in cached else torch.zeros_like(row))
            assert idx not in cached or same(row, cache.get_slot(idx))
    cache.clear()
    assert not cache.array.any()


def test_stats_and_repr_say_what_happened(cache, resident, outside):
    cache.get_slot(resident[0])
    cache.get_slot(outside[0])
    cache.set_slot(resident[0], sample(0))
    cache.get_slots([resident[0], resident[0], resident[1], outside[1]])
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.fills, stats.races, stats.refused) == (2, 4, 1, 0, 0)
    assert (stats.dataset_len, stats.slots, stats.filled, stats.slot_bytes, stats.filled_bytes) == (N, SLOTS, 1, 60, 60)
    assert stats.reserved_bytes == 768  # 12 slots of 60 bytes, in whole cache lines: one extent
    assert (stats.hit_rate, stats.fill_fraction) == pytest.approx((2 / 6, 1 / 20))
    assert repr(cache) == (
        f"<SharedCache of uint8[3, 4, 5]: 1 of 20 samples cached, room for 720 B in {cache._segment.backing}, hit rate 33%>"
    )


def test_slots_can_be_read_and_written_by_number():
    with in_shm() as cache:
        assert cache.array.shape == (SLOTS, *DIMS)
        cache[0], cache[SLOTS - 1] = sample(0), sample(1)
        assert same([cache[0], cache[-1], cache[0:1]], [sample(0), sample(1), sample(0)[None]])
        cache.array[2, 1] = 5
        cache[0:2] = 7
        assert (cache[2][1] == 5).all()
        assert (cache[1] == 7).all()
        for slot in (SLOTS, -SLOTS - 1):
            with pytest.raises(SampleIndexError, match=rf"cache\[{slot}\]: outside the cache of 12 slots"):
                cache[slot]
        with pytest.raises(SampleError, match=r"cache\[0\]: value is torch.float32, the cache holds torch.uint8"):
            cache[0] = torch.zeros(DIMS)
        assert len(list(cache)) == SLOTS
        assert not cache.aux_array[:SLOTS].any()  # nothing is marked by that


@pytest.mark.parametrize("dims", [(), (1,), (3, 5), (7, 1, 3), (0, 4)])
def test_every_dtype_comes_back_bit_for_bit(dims):
    for dtype in DTYPES:
        values = torch.randint(0, 2, (9, *dims)).to(torch.float32).to(dtype)
        with SharedCache(1, 9, dims, dtype) as cache:
            for idx, value in enumerate(values):
                cache.set_slot(idx, value)
            rows, _ = cache.get_slots([8, 0, 4])
            for idx, value in [*((idx, cache.get_slot(idx)) for idx in range(9)), *zip((8, 0, 4), rows, strict=True)]:
                assert value.dtype == dtype
                assert value.shape == dims
                assert value.view(-1).view(torch.uint8).tolist() == values[idx].view(-1).view(torch.uint8).tolist()


def test_values_that_would_not_come_back_are_refused():
    zeros = torch.zeros(2, 3, dtype=torch.uint8)
    with SharedCache(1, 3, (2, 3)) as cache:
        for value, message in (
            (torch.zeros(2, 3), "value is torch.float32, the cache holds torch.uint8; it would be changed. Convert it first"),
            (zeros[0], r"value has shape \(3,\), the cache holds \(2, 3\); nothing is broadcast"),
            (np.zeros((2, 3), object), "value is ndarray; can't convert np.ndarray of type numpy.object_"),
            ([[0, 0, 0], [0, 0, 0]], r"value is list; the cache holds uint8\[2, 3\]. Convert it"),
            (zeros.to(torch.int8), "value is torch.int8"), (zeros[:1], r"shape \(1, 3\)"), (zeros.t(), r"shape \(3, 2\)"),
            (zeros.to("meta"), "on meta"), (zeros.to_sparse(), "sparse_coo tensor"), (5, r"value has shape \(\)"),
            (np.zeros((2, 3)), "value is torch.float64"), (300, "value is 300; "), (None, "value is NoneType"),
        ):  # fmt: skip
            with pytest.raises(SampleError, match=rf"set_slot\(0\): .*{message}"):
                cache.set_slot(0, value)
            assert cache.get_slot(0) is None


def test_values_of_any_layout_are_stored_right():
    base = sample(0, (6, 4))
    with SharedCache(1, 20, (4, 6)) as cache:
        for idx, value in enumerate([base.t(), base.t().contiguous(), base.t().numpy(), sample(0, (8, 12))[::2, ::2]]):
            cache.set_slot(idx, value)
            assert torch.equal(cache.get_slot(idx), torch.as_tensor(value))
    read_only = np.ones(3, np.float32)
    read_only.flags.writeable = False
    trained = torch.nn.Parameter(torch.ones(3))
    with SharedCache(1, 9, (3,), torch.float32) as cache:
        for idx, value in enumerate([trained, trained * 1, torch.ones(()).expand(3), np.ones(3, ">f4"), read_only]):
            cache.set_slot(idx, value)
            assert same(cache.get_slot(idx), torch.ones(3))
            assert not cache.get_slot(idx).requires_grad
    with SharedCache(1, 9, (2,), torch.complex64) as cache:
        cache.set_slot(0, torch.tensor([1 + 2j, 3 - 1j]).conj())
        assert cache.get_slot(0).tolist() == [1 - 2j, 3 + 1j]
        cache.set_slot(1, torch.view_as_complex(torch.tensor([[1.0, -2.0], [3.0, 1.0]])).imag.neg().to(torch.complex64))
        assert cache.get_slot(1).tolist() == [2, -1]


@pytest.mark.parametrize(("dtype", "good", "bad"), [
    (torch.int64, (5, np.int64(5)), (np.int32(5), 2**63, float("nan"))), (torch.uint8, (255,), (256, -1, 0.7)),
    (torch.float32, (0.5,), (0.1,)), (torch.float64, (0.1,), ()), (torch.bool, (True,), (2,)),
    (torch.float16, (float("nan"),), ()),
], ids=str)  # fmt: skip
def test_scalar_slots_take_numbers_that_survive(dtype, good, bad):
    with SharedCache(1, 3, (), dtype) as cache:
        for value in bad:
            with pytest.raises(SampleError, match=r"set_slot\(0\): .*(value is|exceeds)"):
                cache.set_slot(0, value)
            assert cache.get_slot(0) is None
        for value in good:
            cache.set_slot(0, value, allow_overwrite=True)
            assert repr(cache.get_slot(0).item()) == repr(np.asarray(value).item())


def parts(idx):
    rng = np.random.default_rng(idx)
    return {
        "image": sample(idx),
        "mask": rng.integers(0, 2, (4, 5)).astype(bool),
        "box": Box(Point(rng.random(), np.float32(rng.random())), int(rng.integers(-(2**62), 2**62))),
        "when": np.array(f"2026-01-{idx + 1:02d}", "datetime64[D]"),
        "rest": [idx % 2 == 0, complex(idx, -1), None, torch.tensor(idx, dtype=torch.bfloat16)],
    }


def test_samples_of_several_parts_come_back_the_same():
    with SharedCache.like(parts(0), 1, 10) as cache:
        for idx in range(5):
            cache.set_slot(idx, parts(idx))
        got = cache.get_slot(0)
        got["image"].zero_()
        got["mask"][:] = False
        assert all(same(cache.get_slot(idx), parts(idx)) for idx in range(5))
        cache.get_slot(1, copy=False)["mask"][:] = True
        assert cache.get_slot(1)["mask"].all()
        rows, _ = cache.get_slots([4, 7, 0])
        assert torch.equal(rows["image"], torch.stack([sample(4), torch.zeros_like(sample(0)), sample(0)]))
        assert (rows["mask"] == np.stack([parts(4)["mask"], np.zeros((4, 5), bool), parts(0)["mask"]])).all()
        assert rows["box"].label.tolist() == [parts(4)["box"].label, 0, parts(0)["box"].label]
        assert rows["when"].dtype == np.dtype("datetime64[D]")
        assert rows["rest"][1].tolist() == [4 - 1j, 0, 0 - 1j]
        again, _ = cache.get_slots([0, 2, 3], out=rows)
        assert again["image"].data_ptr() == rows["image"].data_ptr()
        cache.set_slots([5, 6, 7], again)
        assert same(cache.get_slot(6), parts(2))
        cache[8] = parts(2)
        assert cache[8]["box"].label == parts(2)["box"].label
        with pytest.raises(SampleError, match=r'set_slot\(0\): sample\["image"\] has shape \(3,\)'):
            cache.set_slot(0, parts(0) | {"image": torch.ones(3, dtype=torch.uint8)}, allow_overwrite=True)
    record = np.zeros(1, dtype=[("x", "i4"), ("y", "f4")])[0]
    with SharedCache.like(record, 15, 10**6) as cache:
        cache.set_slot(0, record)
        cache.get_slot(0)["x"] = 99
        assert cache.get_slot(0)["x"] == 0
        assert len(pickle.dumps(cache)) < 4096  # however large the cache is


def test_indices_of_a_batch_are_integers_of_any_kind():
    arrays = [np.array([2, 0]), np.array([2, 0], np.int32), np.array([0, 2])[::-1], torch.tensor([2, 0])]
    with SharedCache(1, 4, (3,)) as cache:
        cache.set_slots(range(4), torch.stack([sample(idx, (3,)) for idx in range(4)]))
        for indices in ([2, 0], range(2, -1, -2), (2, 0), *arrays):
            assert same(cache.get_slots(indices)[0], torch.stack([sample(2, (3,)), sample(0, (3,))]))
        for indices, message in (
            ([0, 4], "indices from 0 to 4 reach outside the dataset of 4 samples"), ([-1], "indices from -1 to -1"),
            ([0.5], "indices are float64"), ([True], "indices are bool"), ([[0, 1]], r"indices are int64\[1, 2\]"),
            (3, r"indices are int64\[\]"), ("01", r"indices are <U2\[\]"), (["a"], "indices are <U1"),
            ([[0], [0, 1]], "indices are a list that does not hold integers"), ([0, 2**64], "indices are object"),
        ):  # fmt: skip
            with pytest.raises(SampleIndexError, match=message):
                cache.get_slots(indices)


def test_batches_go_to_memory_that_fits_and_come_from_it():
    with SharedCache(1, 8, (100_000,)) as cache:
        cache.set_slots([1, 5], torch.ones(2, 100_000, dtype=torch.uint8))
        assert all(cache._segment.extents.has(idx * 100_000, (idx + 1) * 100_000) for idx in (1, 5))  # all of it is reserved
    with SharedCache(1, 4, (8,)) as cache:
        with pytest.raises(SampleError, match=r"set_slots: values is torch.uint8\[3, 8\], expected torch.uint8\[2, 8\]"):
            cache.set_slots([0, 1], torch.zeros(3, 8, dtype=torch.uint8))
        assert cache.stats().filled == 0
        cache.set_slots([3, 1], torch.stack([sample(3, (8,)), sample(1, (8,))]))
        out = torch.zeros(17, dtype=torch.uint8)[1:].view(2, 8)  # not aligned
        rows, _ = cache.get_slots([3, 1], out=out)
        assert rows is out
        assert same(rows, torch.stack([sample(3, (8,)), sample(1, (8,))]))
        for out, message in (
            (torch.zeros(2, 8), r"out is torch.float32\[2, 8\], expected torch.uint8\[2, 8\]"), ([], "out is list"),
            (torch.zeros(3, 8, dtype=torch.uint8), r"out is torch.uint8\[3, 8\]"),
            (np.zeros((2, 8), np.uint8), "expected torch.uint8"),
            (torch.zeros(8, 2, dtype=torch.uint8).t(), "out is not contiguous"),
        ):  # fmt: skip
            with pytest.raises(SampleError, match=message):
                cache.get_slots([0, 1], out=out)


def test_a_limit_or_a_length_that_is_none_is_refused():
    for limit, dataset_len, message in (
        *((limit, 10, "size_limit_gib=") for limit in (-1, float("nan"), "nonsense", None)),
        *((1, -1, "dataset_len=-1 is negative"), (1, 1.5, "not an integer"), (1, None, "not an integer")),
    ):
        with pytest.raises(LimitError, match=message):
            SharedCache(limit, dataset_len, (3, 64, 64))


def test_caches_of_no_samples_or_no_bytes_hold_nothing_and_those_of_auto_a_small_dataset():
    with SharedCache(1, 0, (3,)) as cache:
        assert cache.array.shape == cache.get_slots([])[0].shape == (0, 3)
        assert (len(cache), cache.stats().hit_rate) == (0, 0)
        with pytest.raises(SampleIndexError, match="outside the dataset of 0 samples"):
            cache.get_slot(0)
    with SharedCache(0, 5, (3,)) as cache:
        cache.set_slot(4, sample(0, (3,)))
        assert cache.get_slot(4) is None
        cache.clear()
        assert cache.stats().misses == 1
    with SharedCache("auto", 100, DIMS) as cache:
        assert len(cache) == 100


def test_samples_stay_uncached_when_memory_runs_low_and_training_goes_on(monkeypatch, caplog):
    dims = (MIB,)
    monkeypatch.setattr(extents, "_LOOKED_AT_EVERY", 0)
    with SharedCache(1, 10, dims) as cache:
        cache.set_slots(range(4), torch.zeros(4, *dims, dtype=torch.uint8))
        monkeypatch.setattr(limits, "memory", lambda: Memory(GIB, 64 * MIB))
        for _ in range(2):
            for idx in range(4, 10):
                if cache.get_slot(idx) is None:
                    cache.set_slot(idx, torch.full(dims, idx, dtype=torch.uint8))
        with claimed(cache, 5):  # nobody waits for what cannot be kept
            assert cache.get_or_load(5, lambda idx: torch.ones(dims, dtype=torch.uint8), timeout_s=1000).all()
        stats = cache.stats()
        assert (stats.filled, stats.refused, stats.reserved_bytes) == (4, 13, 4 * MIB)
        (record,) = caplog.records
        assert "cache stops growing at 4.0 MiB of 10.0 MiB" in record.message
        for use, slots in ((lambda: cache.array, "0 to 9 need 10.0 MiB"), (lambda: cache[9], "9 to 9 need 1.0 MiB")):
            with pytest.raises(SegmentError, match=f"slots {slots}, which the machine does not give"):
                use()
        monkeypatch.undo()
        cache.clear()
        cache.set_slot(9, torch.ones(dims, dtype=torch.uint8))
        assert cache.get_slot(9).all()


@pytest.mark.linux
def test_a_write_in_pieces_is_whole_and_one_that_fails_leaves_an_empty_slot(monkeypatch, caplog):
    real = os.pwrite

    def fails(fd, buffer, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    def writes_some(fd, buffer, offset):
        return real(fd, memoryview(buffer).cast("B")[:7], offset)

    writes = [fails, lambda fd, buffer, offset: writes_some(fd, buffer, offset) if len(buffer) > 3 else 0]
    with SharedCache(1, 4, (4096,)) as cache:
        for refused, write in enumerate(writes, 1):
            with monkeypatch.context() as patched:
                patched.setattr(os, "pwrite", write)
                cache.set_slot(2, sample(2, (4096,)))
            assert cache.get_slot(2) is None
            assert cache.stats().refused == refused
            assert caplog.text.count("sample 2 stays uncached") == refused
        monkeypatch.setattr(os, "pwrite", writes_some)
        cache.set_slot(2, sample(2, (4096,)))
        assert same(cache.get_slot(2), sample(2, (4096,)))
