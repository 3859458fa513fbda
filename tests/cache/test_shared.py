"""SharedCache in one process: what it does beyond the contract of all caches."""

import errno
import os
import pickle
import random

import numpy as np
import pytest
import torch

from stocache import LimitError, SampleError, SampleIndexError, SegmentError, SharedCache
from stocache.shm import segment as segment_module
from stocache.system import limits
from stocache.system.limits import GIB, MIB, Memory
from tests.support.containers import Box, Point
from tests.support.equality import same
from tests.support.faults import claimed, no_shared_memory
from tests.support.makers import DIMS, LIMIT, SHARED, SLOTS, N, fill, in_shm, sample


@pytest.fixture(params=SHARED, ids=lambda maker: maker.__name__)
def cache(request):
    cache = request.param()
    yield cache
    cache.close()


# ------------------------------------------------------------------------------------------------ slots


def test_as_many_slots_as_the_limit_pays_for(cache, resident):
    assert len(cache) == SLOTS
    assert len(resident) == SLOTS


def test_clear_empties_and_zeroes_everything(cache, resident, outside):
    fill(cache)
    cache.clear()
    assert (cache.aux_array[resident] == 0).all()
    assert (cache.aux_array[outside] == 2).all()
    assert not cache.array.any()
    fill(cache)
    assert same(cache.get_slot(resident[-1]), sample(resident[-1]))


def test_get_slots_equals_get_slot_for_each(cache, resident):
    fill(cache)
    cache.clear()
    for idx in resident[::2]:
        cache.set_slot(idx, sample(idx))
    rng = random.Random(0)
    for count in (0, 1, 2, 50):
        indices = [rng.randrange(N) for _ in range(count)]
        rows, mask = cache.get_slots(indices)
        assert rows.shape == (count, *DIMS)
        assert mask.tolist() == [idx in resident[::2] for idx in indices]
        for row, idx in zip(rows, indices, strict=True):
            expected = cache.get_slot(idx)
            assert same(row, torch.zeros_like(row) if expected is None else expected)


def test_set_slots_equals_set_slot_for_each(cache, resident, outside):
    indices = [*resident, outside[0]]
    _, mask = cache.get_slots(indices + indices)
    assert not mask.any()
    cache.set_slots(indices + indices, torch.stack([sample(idx) for idx in indices] * 2))
    rows, mask = cache.get_slots(resident)
    assert mask.all()
    assert same(rows, torch.stack([sample(idx) for idx in resident]))


def test_stats_count_what_happened(cache, resident, outside):
    cache.get_slot(resident[0])
    cache.get_slot(outside[0])
    cache.set_slot(resident[0], sample(0))
    cache.get_slots([resident[0], resident[0], resident[1], outside[1]])
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.fills, stats.races, stats.refused) == (2, 4, 1, 0, 0)
    assert (stats.dataset_len, stats.slots, stats.filled, stats.slot_bytes) == (N, SLOTS, 1, 60)
    assert stats.filled_bytes == 60
    assert stats.reserved_bytes == 768  # 12 slots of 60 bytes, in whole cache lines: one extent
    assert stats.hit_rate == pytest.approx(2 / 6)
    assert stats.fill_fraction == pytest.approx(1 / 20)


# ------------------------------------------------------------------------------------------------ the memory itself


def test_array_is_all_slots_live(cache):
    assert cache.array.shape == (SLOTS, *DIMS)
    cache.array[2, 1] = 5
    assert (cache[2][1] == 5).all()
    assert cache.get_slots(range(N))[1].sum() == 0  # nothing is marked by that


def test_slots_can_be_read_and_written_by_number(cache):
    cache[0] = sample(0)
    cache[SLOTS - 1] = sample(1)
    assert same(cache[0], sample(0))
    assert same(cache[-1], sample(1))
    assert same(cache[0:1], sample(0)[None])
    cache[0:2] = 7
    assert (cache[1] == 7).all()
    for slot in (SLOTS, -SLOTS - 1):
        with pytest.raises(SampleIndexError, match=rf"cache\[{slot}\]: outside the cache of 12 slots"):
            cache[slot]
    with pytest.raises(SampleError, match=r"cache\[0\]: value is torch.float32, the cache holds torch.uint8"):
        cache[0] = torch.zeros(DIMS)
    assert len(list(cache)) == SLOTS


# ------------------------------------------------------------------------------------------------ values


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(), (1,), (3, 5), (7, 1, 3)])
def test_every_dtype_comes_back_bit_for_bit(dtype, dims):
    raw = torch.randint(0, 2, (9, *dims), generator=torch.Generator().manual_seed(0))
    values = raw.to(torch.float32).to(dtype)
    with SharedCache(1, 9, dims, dtype) as cache:
        for idx, value in enumerate(values):
            cache.set_slot(idx, value)
        for idx, value in enumerate(values):
            got = cache.get_slot(idx)
            assert got.dtype == dtype
            assert got.shape == dims
            assert torch.equal(got.view(-1).view(torch.uint8), value.contiguous().view(-1).view(torch.uint8))
        rows, mask = cache.get_slots([8, 0, 4])
        assert mask.all()
        assert torch.equal(rows.view(-1).view(torch.uint8), values.view(9, -1).view(torch.uint8)[[8, 0, 4]].view(-1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), "value is torch.float32, the cache holds torch.uint8; it would be changed. Convert it first"),
        (torch.zeros(2, 3, dtype=torch.int8), "value is torch.int8"),
        (torch.zeros(3, dtype=torch.uint8), r"value has shape \(3,\), the cache holds \(2, 3\); nothing is broadcast"),
        (torch.zeros(1, 3, dtype=torch.uint8), r"shape \(1, 3\)"),
        (torch.zeros(3, 2, dtype=torch.uint8), r"shape \(3, 2\)"),
        (torch.zeros(2, 3, dtype=torch.uint8, device="meta"), "on meta"),
        (torch.zeros(2, 3, dtype=torch.uint8).to_sparse(), "sparse_coo tensor"),
        (np.zeros((2, 3)), "value is torch.float64"),
        (np.zeros((2, 3), object), "value is ndarray; can't convert np.ndarray of type numpy.object_"),
        (5, r"value has shape \(\)"),
        (300, "value is 300; "),
        ([[0, 0, 0], [0, 0, 0]], r"value is list; the cache holds uint8\[2, 3\]. Convert it"),
        (None, "value is NoneType"),
        ("abc", "value is str"),
    ],
)
def test_values_that_would_not_come_back_are_refused(value, message):
    with SharedCache(1, 3, (2, 3)) as cache:
        with pytest.raises(SampleError, match=rf"set_slot\(0\): .*{message}"):
            cache.set_slot(0, value)
        assert cache.get_slot(0) is None


def test_values_of_any_layout_are_stored_right():
    base = sample(0, (6, 4))
    with SharedCache(1, 20, (4, 6)) as cache:
        for idx, value in enumerate([base.t(), base.t().contiguous(), base.t().numpy(), sample(0, (8, 12))[::2, ::2]]):
            cache.set_slot(idx, value)
            assert torch.equal(cache.get_slot(idx), torch.as_tensor(value))
    with SharedCache(1, 9, (3,), torch.float32) as cache:
        cache.set_slot(0, torch.ones(3, requires_grad=True))
        assert not cache.get_slot(0).requires_grad
        cache.set_slot(1, torch.nn.Parameter(torch.ones(3)))
        cache.set_slot(2, torch.ones(()).expand(3))
        cache.set_slot(3, np.ones(3, ">f4"))
        read_only = np.ones(3, np.float32)
        read_only.flags.writeable = False
        cache.set_slot(4, read_only)
        assert all(torch.equal(cache.get_slot(idx), torch.ones(3)) for idx in range(5))
    with SharedCache(1, 9, (2,), torch.complex64) as cache:
        cache.set_slot(0, torch.tensor([1 + 2j, 3 - 1j]).conj())
        assert cache.get_slot(0).tolist() == [1 - 2j, 3 + 1j]
        cache.set_slot(1, torch.view_as_complex(torch.tensor([[1.0, -2.0], [3.0, 1.0]])).imag.neg().to(torch.complex64))
        assert cache.get_slot(1).tolist() == [2, -1]


@pytest.mark.parametrize(
    ("dtype", "value", "ok"),
    [
        (torch.int64, 5, True),
        (torch.uint8, 255, True),
        (torch.uint8, 256, False),
        (torch.uint8, -1, False),
        (torch.uint8, 0.7, False),
        (torch.float32, 0.5, True),
        (torch.float32, 0.1, False),
        (torch.float64, 0.1, True),
        (torch.bool, True, True),
        (torch.bool, 2, False),
        (torch.int64, np.int64(5), True),
        (torch.int64, np.int32(5), False),
        (torch.int64, 2**63, False),
    ],
)
def test_scalar_slots_take_numbers_that_survive(dtype, value, ok):
    with SharedCache(1, 3, (), dtype) as cache:
        if ok:
            cache.set_slot(0, value)
            assert cache.get_slot(0).item() == value
        else:
            with pytest.raises(SampleError, match=r"set_slot\(0\)"):
                cache.set_slot(0, value)
            assert cache.get_slot(0) is None


def test_nan_is_a_value_of_a_float_slot_and_of_no_other():
    with SharedCache(1, 3, (), torch.float16) as cache:
        cache.set_slot(0, float("nan"))
        assert cache.get_slot(0).isnan()
    with SharedCache(1, 3, (), torch.int64) as cache, pytest.raises(SampleError, match="value is nan"):
        cache.set_slot(0, float("nan"))


# ------------------------------------------------------------------------------------------------ samples of several parts


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
        for idx in range(10):
            assert cache.get_slot(idx) is None
            cache.set_slot(idx, parts(idx))
        for idx in range(10):
            assert same(cache.get_slot(idx), parts(idx))
        got = cache.get_slot(0)
        got["image"].zero_()
        got["mask"][:] = False
        assert same(cache.get_slot(0), parts(0))
        cache.get_slot(0, copy=False)["mask"][:] = True
        assert cache.get_slot(0)["mask"].all()


def test_batches_of_several_parts():
    with SharedCache.like(parts(0), 1, 10) as cache:
        for idx in range(5):
            cache.set_slot(idx, parts(idx))
        rows, mask = cache.get_slots([4, 7, 0])
        assert mask.tolist() == [True, False, True]
        assert torch.equal(rows["image"], torch.stack([sample(4), torch.zeros_like(sample(0)), sample(0)]))
        assert (rows["mask"] == np.stack([parts(4)["mask"], np.zeros((4, 5), bool), parts(0)["mask"]])).all()
        assert rows["box"].label.tolist() == [parts(4)["box"].label, 0, parts(0)["box"].label]
        assert rows["when"].dtype == np.dtype("datetime64[D]")
        assert rows["rest"][1].tolist() == [4 - 1j, 0, 0 - 1j]
        again, _ = cache.get_slots([0, 1, 2], out=rows)
        assert again["image"].data_ptr() == rows["image"].data_ptr()
        cache.set_slots([5, 6, 7], again)
        assert same(cache.get_slot(6), parts(1))


def test_dict_and_tuple_of_shapes():
    with SharedCache(1, 4, {"x": (2,), "y": ()}, {"x": torch.float32, "y": torch.int64}) as cache:
        cache.set_slot(1, {"x": torch.ones(2), "y": torch.tensor(3)})
        assert same(cache.get_slot(1), {"x": torch.ones(2), "y": torch.tensor(3)})
        assert cache.slot_bytes == 16
        assert cache.array["x"].shape == (4, 2)
        cache[2] = {"x": torch.zeros(2), "y": 7}
        assert cache[2]["y"] == 7
        with pytest.raises(SampleError, match=r'set_slot\(0\): sample\["x"\] has shape \(3,\)'):
            cache.set_slot(0, {"x": torch.ones(3), "y": torch.tensor(3)})
    with SharedCache(1, 4, ((2,), ()), torch.float32) as cache:
        cache.set_slot(0, (torch.ones(2), torch.tensor(3.0)))
        assert same(cache.get_slot(0), (torch.ones(2), torch.tensor(3.0)))


def test_a_namedtuple_of_shapes_and_a_record_are_samples():
    with SharedCache(1, 4, Point((2,), ()), torch.float32) as cache:
        cache.set_slot(0, Point(torch.ones(2), torch.tensor(3.0)))
        assert same(cache.get_slot(0), Point(torch.ones(2), torch.tensor(3.0)))
    record = np.zeros(1, dtype=[("x", "i4"), ("y", "f4")])[0]
    with SharedCache.like(record, 1, 4) as cache:
        cache.set_slot(0, record)
        cache.get_slot(0)["x"] = 99
        assert cache.get_slot(0)["x"] == 0
    with pytest.raises(SampleError, match="would lose its mask"):
        SharedCache.like(np.ma.masked_array([1.0, 2.0], [True, False]), 1, 4)


def test_a_write_in_pieces_is_whole(monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, buffer, offset: real(fd, memoryview(buffer).cast("B")[:7], offset))
    with SharedCache(1, N, DIMS) as cache:
        fill(cache)
        assert same(cache.get_slot(7), sample(7))


def test_zero_byte_samples_are_samples():
    with SharedCache(1, 3, (0, 4)) as cache:
        cache.set_slot(1, torch.zeros(0, 4, dtype=torch.uint8))
        assert cache.get_slot(1).shape == (0, 4)
        rows, mask = cache.get_slots([0, 1])
        assert rows.shape == (2, 0, 4)
        assert mask.tolist() == [False, True]


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize(
    "indices",
    [
        [2, 0],
        range(2, -1, -2),
        np.array([2, 0]),
        np.array([2, 0], np.int32),
        np.array([0, 2])[::-1],
        torch.tensor([2, 0]),
        (2, 0),
    ],
)
def test_get_slots_takes_indices_of_any_kind(indices):
    with SharedCache(1, 4, (3,)) as cache:
        for idx in range(4):
            cache.set_slot(idx, sample(idx, (3,)))
        assert same(cache.get_slots(indices)[0], torch.stack([sample(2, (3,)), sample(0, (3,))]))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 4], "indices from 0 to 4 reach outside the dataset of 4 samples"),
        ([-1], "indices from -1 to -1"),
        ([0.5], "indices are float64"),
        ([True], "indices are bool"),
        ([[0, 1]], r"indices are int64\[1, 2\]"),
        (3, r"indices are int64\[\]"),
        ("01", r"indices are <U2\[\]"),
        (["a"], "indices are <U1"),
        ([[0], [0, 1]], "indices are a list that does not hold integers"),
        ([0, 2**64], "indices are object"),
    ],
)
def test_get_slots_refuses_what_are_no_indices(indices, message):
    with SharedCache(1, 4, (3,)) as cache, pytest.raises(SampleIndexError, match=message):
        cache.get_slots(indices)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 3), r"out is torch.float32\[2, 3\], expected torch.uint8\[2, 3\]"),
        (torch.zeros(3, 3, dtype=torch.uint8), r"out is torch.uint8\[3, 3\]"),
        (np.zeros((2, 3), np.uint8), "expected torch.uint8"),
        (torch.zeros(3, 2, dtype=torch.uint8).t(), "out is not contiguous"),
        ([], "out is list"),
    ],
)
def test_get_slots_refuses_an_out_that_does_not_fit(out, message):
    with SharedCache(1, 4, (3,)) as cache, pytest.raises(SampleError, match=message):
        cache.get_slots([0, 1], out=out)


def test_get_slots_fills_an_out_that_is_not_aligned():
    with SharedCache(1, 4, (8,)) as cache:
        for idx in range(4):
            cache.set_slot(idx, sample(idx, (8,)))
        out = torch.zeros(17, dtype=torch.uint8)[1:].view(2, 8)
        rows, _ = cache.get_slots([3, 1], out=out)
        assert rows is out
        assert same(rows, torch.stack([sample(3, (8,)), sample(1, (8,))]))


def test_set_slots_checks_the_batch_before_it_stores_any():
    with SharedCache(1, 4, (3,)) as cache:
        with pytest.raises(SampleError, match=r"set_slots: values is torch.uint8\[3, 3\], expected torch.uint8\[2, 3\]"):
            cache.set_slots([0, 1], torch.zeros(3, 3, dtype=torch.uint8))
        assert cache.stats().filled == 0


# ------------------------------------------------------------------------------------------------ limits and life


@pytest.mark.parametrize("limit", [-1, float("nan"), "nonsense", None])
def test_a_limit_that_is_no_size_is_refused(limit):
    with pytest.raises(LimitError, match="size_limit_gib="):
        SharedCache(limit, 10, (3,))


def test_a_limit_too_small_for_one_slot_is_refused():
    with pytest.raises(
        LimitError, match=r"cache holds 0 slots: size_limit_gib=0.0001 leaves 7374 bytes after the 100000-byte state"
    ):
        SharedCache(0.0001, 100_000, (3, 64, 64))


@pytest.mark.parametrize(
    ("dataset_len", "message"), [(-1, "dataset_len=-1 is negative"), (1.5, "not an integer"), (None, "not an integer")]
)
def test_a_length_that_is_none_is_refused(dataset_len, message):
    with pytest.raises(LimitError, match=message):
        SharedCache(1, dataset_len, (3,))


def test_an_unsupported_dtype_is_a_value_error_as_in_stocaching():
    with pytest.raises(ValueError, match="is not a torch dtype"):
        SharedCache(1, 10, (3,), "uint8")


def test_a_dataset_of_no_samples_has_a_cache_of_none():
    with SharedCache(1, 0, (3,)) as cache:
        assert len(cache) == 0
        assert cache.array.shape == (0, 3)
        assert cache.get_slots([])[0].shape == (0, 3)
        assert cache.stats().hit_rate == 0
        with pytest.raises(SampleIndexError, match="outside the dataset of 0 samples"):
            cache.get_slot(0)


def test_limit_zero_is_a_cache_that_holds_nothing():
    with SharedCache(0, 5, (3,)) as cache:
        assert cache.get_slot(4) is None
        cache.set_slot(4, sample(0, (3,)))
        assert cache.get_slot(4) is None
        cache.clear()
        assert cache.stats().misses == 2


def test_auto_caches_a_small_dataset_whole():
    with SharedCache("auto", 100, DIMS) as cache:
        assert len(cache) == 100


def test_no_shared_memory_disables_the_cache_with_one_warning(monkeypatch, caplog):
    no_shared_memory(monkeypatch)
    with SharedCache(1, N, DIMS) as cache:
        fill(cache)
        assert len(cache) == 0
        assert cache.get_slot(0) is None
        assert not cache.get_slots(range(N))[1].any()
        copy = pickle.loads(pickle.dumps(cache))
        assert copy.get_slot(0) is None
        copy.set_slot(0, sample(0))
        assert (copy.aux_array == 2).all()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no shared memory" in caplog.text
    assert "--shm-size=2g" in caplog.text


def test_samples_stay_uncached_when_memory_runs_low_and_training_goes_on(monkeypatch, caplog):
    dims = (MIB,)
    monkeypatch.setattr(segment_module, "_LOOKED_AT_EVERY", 0)
    with SharedCache(1, 10, dims) as cache:
        for idx in range(4):
            cache.get_slot(idx)
            cache.set_slot(idx, torch.full(dims, idx, dtype=torch.uint8))
        monkeypatch.setattr(limits, "memory", lambda: Memory(GIB, 64 * MIB))
        for _ in range(2):
            for idx in range(4, 10):
                if cache.get_slot(idx) is None:
                    cache.set_slot(idx, torch.full(dims, idx, dtype=torch.uint8))
        stats = cache.stats()
        assert (stats.filled, stats.refused) == (4, 12)
        assert stats.reserved_bytes == 4 * MIB
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "cache stops growing at 4.0 MiB of 10.0 MiB" in caplog.text
        with pytest.raises(SegmentError, match=r"slots 0 to 9 need 10.0 MiB, which the machine does not give"):
            _ = cache.array
        with pytest.raises(SegmentError, match="slots 9 to 9 need"):
            cache[9]
        monkeypatch.undo()
        cache.clear()
        cache.set_slot(9, torch.ones(dims, dtype=torch.uint8))
        assert cache.get_slot(9).all()


def test_a_full_dev_shm_is_an_error_we_handle(monkeypatch, caplog):
    monkeypatch.setattr(segment_module, "_backings", lambda nbytes: ["/dev/shm"])
    with SharedCache(1, 4, (MIB,)) as cache:

        def full(fd, offset, length):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        cache.set_slot(0, torch.ones(MIB, dtype=torch.uint8))
        assert cache.get_slot(0) is None
        assert "/dev/shm gave no more: No space left on device" in caplog.text


@pytest.mark.parametrize("short", [True, False])
def test_a_write_that_fails_leaves_an_empty_slot(monkeypatch, caplog, short):
    real = os.pwrite

    def broken(fd, buffer, offset):
        if short:
            return real(fd, memoryview(buffer).cast("B")[:7], offset) if len(buffer) > 3 else 0
        raise OSError(errno.ENOSPC, "No space left on device")

    with SharedCache(1, 4, (4096,)) as cache:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", broken)
            cache.set_slot(2, sample(2, (4096,)))
        assert cache.get_slot(2) is None
        assert cache.stats().refused == 1
        assert "sample 2 stays uncached" in caplog.text
        cache.set_slot(2, sample(2, (4096,)))
        assert same(cache.get_slot(2), sample(2, (4096,)))


def test_a_pickle_is_small_however_large_the_cache():
    with SharedCache.like(parts(0), 15, 10**6) as cache:
        assert len(pickle.dumps(cache)) < 4096


def test_repr_says_what_a_person_wants_to_know():
    with SharedCache(LIMIT, N, DIMS) as cache:
        fill(cache)
        cache.get_slot(0)
        assert repr(cache) == (
            "<SharedCache of uint8[3, 4, 5]: 12 of 20 samples cached, room for 12 (720 B) in /dev/shm, hit rate 100%>"
        )


# ---------------------------------------------------------------------------------------------------- get_or_load


def test_refused_samples_are_not_waited_for(monkeypatch, caplog):
    with in_shm() as cache, monkeypatch.context() as patched:
        patched.setattr(limits, "memory", lambda: Memory(GIB, 0))
        assert torch.equal(cache.get_or_load(0, sample), sample(0))
        with claimed(cache, 1):
            assert torch.equal(cache.get_or_load(1, sample, timeout_s=1000), sample(1))
        assert cache.stats().refused == 2
