"""The contract of all caches: the whole of it for each class, and the life of a cache for each way to come by one."""

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from stocache import ClosedError, KeyedCache, RaggedCache, SampleError, SampleIndexError, SegmentError, SharedCache, SlotError
from stocache.cache.disk.cache import DiskCache
from stocache.cache.stats import SlotState
from stocache.system import limits
from stocache.system.limits import GIB, MIB, Memory
from tests.support.equality import same
from tests.support.faults import claimed, no_shared_memory
from tests.support.makers import DISK, RAGGED, SHARED, SLOTS, N, disk, disk_records, fill, keyed, ragged, sample, scattered
from tests.support.processes import run_all, stop, stopped, wait_until


@pytest.fixture(params=[scattered, ragged, disk, disk_records], ids=lambda maker: maker.__name__)
def cache(request):
    with request.param() as cache:
        yield cache


def one_kind(*makers):
    return pytest.mark.parametrize("cache", makers, indirect=True, ids=lambda maker: maker.__name__)


all_kinds = one_kind(scattered, ragged, disk, disk_records, keyed)


@pytest.mark.linux
@one_kind(*SHARED, *RAGGED, *DISK)
def test_a_cache_keeps_what_it_has_room_for_however_it_was_come_by(cache, resident, outside):
    assert len(resident) == SLOTS
    assert cache.aux_array.dtype == torch.uint8
    assert cache.aux_array.tolist() == [SlotState.EMPTY if idx in resident else SlotState.OOB for idx in range(N)]
    copy = pickle.loads(pickle.dumps(cache))
    copy.set_slot(resident[0], sample(resident[0]))
    copy.close()
    reads = []
    for epoch in range(3):
        reads.append(0)
        for idx in torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist():
            value = cache.get_slot(idx)
            if value is None:
                reads[-1] += 1
                cache.set_slot(idx, sample(idx))
            else:
                assert same(value, sample(idx))
                value.zero_()  # the caller's own
    assert reads == [N - 1, N - SLOTS, N - SLOTS]
    rows, mask = cache.get_slots([*resident, outside[0]])
    assert all(map(same, rows[:SLOTS], map(sample, resident)))
    assert mask.tolist() == [True] * SLOTS + [False]
    cache.clear()
    assert cache.get_slots(range(N))[1].sum() == 0
    assert (cache.aux_array[resident] == SlotState.EMPTY).all()
    loads = []
    for _ in range(2):
        for idx in range(N):
            assert same(cache.get_or_load(idx, lambda idx: loads.append(idx) or sample(idx)), sample(idx))
    assert sorted(loads) == sorted([*resident, *outside, *outside])
    assert (cache.aux_array[resident] == SlotState.SET).all()
    assert cache.stats().fills == 2 * SLOTS


def test_indices_are_integers_of_any_kind_and_all_else_is_refused(cache, resident):
    for number, kind in zip(resident, [np.int64, np.uint8, torch.tensor, int], strict=False):
        assert cache.get_slot(kind(number)) is None
        cache.set_slot(kind(number), sample(number))
        assert same(cache.get_slot(kind(number)), sample(number))
    nonsense = [1.0, "1", None, torch.tensor([1, 2]), torch.tensor(1.0), np.array([1, 2]), slice(2), [1]]
    for indices, message in (
        ([-1, N, N + 1, -N, 10**30], f"outside the dataset of {N} samples"),
        (nonsense, "a sample index is one integer, not a"),
    ):
        for idx in indices:
            for use in (cache.get_slot, lambda idx: cache.set_slot(idx, sample(0)), lambda idx: cache.get_or_load(idx, sample)):
                with pytest.raises(SampleIndexError, match=message):
                    use(idx)
    with pytest.raises(SampleIndexError, match="get_or_load_many: indices"):
        cache.get_or_load_many([N], sample)


def test_samples_are_copies_unless_the_memory_is_asked_for_and_are_overwritten_if_allowed(cache, resident):
    value = sample(0)
    cache.set_slot(resident[0], value)
    value.zero_()
    cache.get_slot(resident[0]).zero_()
    cache.get_or_load_many([resident[0]], None)[0].zero_()
    assert same(cache.get_slot(resident[0]), sample(0))
    with pytest.raises(SlotError, match=rf"set_slot\({resident[0]}\): the slot is set. Ask get_slot first"):
        cache.set_slot(resident[0], sample(1))
    cache.set_slot(resident[0], sample(2), allow_overwrite=True)
    assert same(cache.get_slot(resident[0]), sample(2))
    view = cache.get_slot(resident[0], copy=False).fill_(9)
    is_shared = not isinstance(cache, DiskCache)  # what is on a disk has no view
    assert same(cache.get_slot(resident[0]), view if is_shared else sample(2))


@all_kinds
def test_a_closed_cache_says_so(cache, resident):
    get = cache.get if isinstance(cache, KeyedCache) else cache.get_slot
    cache.get_or_load(resident[0], sample)
    view = get(resident[0], copy=False)
    cache.close()
    cache.close()
    uses = [
        lambda: get(0), lambda: cache.get_or_load(0, sample), lambda: cache.get_or_load_many([0], list), lambda: cache.clear(),
        lambda: cache.stats(), lambda: cache.counts(), lambda: pickle.dumps(cache),
    ]  # fmt: skip
    if isinstance(cache, KeyedCache):
        uses += [lambda: cache.put(1, 1), lambda: 1 in cache, lambda: len(cache)]
    else:
        uses += [lambda: cache.get_slots([0]), lambda: cache.set_slot(0, sample(0)), lambda: cache.aux_array]
    for use in uses:
        with pytest.raises(ClosedError, match="the cache is closed"):
            use()
    assert "closed" in repr(cache)
    assert same(view, sample(resident[0]))
    with pytest.raises(AttributeError, match="no attribute 'get_solt'"):
        cache.get_solt(0)


@pytest.mark.parametrize("by", ["threads", pytest.param("processes", marks=pytest.mark.linux)])
def test_all_that_race_for_slots_agree(cache, resident, by):
    barrier = (threading if by == "threads" else multiprocessing).Barrier(4)

    def work(number):
        barrier.wait(60)
        for idx in random.Random(number // 2).sample(resident, SLOTS) * 3:  # two have the same order
            got = cache.get_slot(idx)
            if got is None:
                cache.set_slot(idx, sample(idx))
            else:
                assert same(got, sample(idx))

    if by == "threads":
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    else:
        run_all(multiprocessing.get_context("fork"), 4, work)
    stats = cache.stats()
    assert stats.fills == SLOTS
    assert stats.fills + stats.races == stats.misses
    assert stats.hits + stats.misses == 4 * 3 * SLOTS


@all_kinds
def test_a_claim_is_given_up_when_the_load_fails(cache, resident):
    def fail(indices):
        if cache.stats().filled:
            yield from map(sample, indices[:2])
        raise OSError("the disk is gone")

    bad = sample(0, dtype=torch.float32).requires_grad_()  # of the wrong dtype for one kind, with a gradient for the other
    for load, error, message in (
        (lambda: cache.get_or_load(resident[0], lambda idx: next(fail([idx]))), OSError, "the disk is gone"),
        (lambda: cache.get_or_load(resident[0], lambda idx: bad), SampleError, r"value is|requires a gradient"),
        (lambda: [cache.get_or_load(resident[0], sample), cache.get_or_load_many(resident, fail)], OSError, "the disk is gone"),
        (lambda: cache.get_or_load_many(resident, lambda indices: []), ValueError, "zip"),
    ):
        with pytest.raises(error, match=message):
            load()
        assert not cache._claims._words.any()
    assert cache.stats().filled == 3  # loaded one by one, they are kept up to the failure
    assert cache.get_or_load(resident[3], lambda idx: bad, strict=False) is bad
    assert cache.stats().rejected == 1
    assert all(same(cache.get_or_load(idx, None), sample(idx)) for idx in resident[:3])


@all_kinds
def test_threads_that_want_one_sample_load_it_once(cache, resident):
    came, loads = [], []

    def load(idx):
        loads.append(idx)
        wait_until(lambda: len(came) == 8)
        threading.Event().wait(0.02)  # nobody sets it: time for the others to ask
        return sample(idx)

    want = lambda number: came.append(number) or cache.get_or_load(resident[0], load)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(value, sample(resident[0])) for value in pool.map(want, range(8)))
    assert loads == [resident[0]]


@all_kinds
def test_a_process_waits_for_the_load_of_another_but_not_for_the_dead_or_for_ever(cache, resident):
    idx = resident[0]
    with stopped(lambda: cache.get_or_load(idx, lambda idx: stop())):
        assert torch.equal(cache.get_or_load(idx, sample, timeout_s=0.01), sample(idx))
        cache.clear()
    with stopped(lambda: cache.get_or_load(idx, lambda idx: stop())) as pid:
        killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        killer.start()
        assert torch.equal(cache.get_or_load(idx, sample, timeout_s=1000), sample(idx))
        killer.join()


def test_many_are_loaded_with_one_call_and_only_what_is_missing(cache, resident, outside):
    calls = []
    load = lambda indices: calls.append(indices) or map(sample, indices)
    cache.set_slot(resident[1], sample(resident[1]))
    wanted = [outside[0], *resident[:4], resident[2], outside[0]]
    samples = cache.get_or_load_many(wanted, load)
    assert all(map(same, samples, map(sample, wanted)))
    assert calls == [[outside[0], resident[0], *resident[2:4]], [outside[0]]]  # the second time it is asked for
    samples[1].zero_()
    samples[5].zero_()
    assert all(map(same, cache.get_or_load_many(resident[:4], load), map(sample, resident[:4])))
    assert len(calls) == 2
    stats = cache.stats()
    assert (stats.misses, stats.fills, stats.hits) == (5, 4, 1 + 1 + 4)
    assert cache.get_or_load_many([], load) == []


def test_many_wait_for_what_another_is_loading(cache, resident):
    first, second = resident[:2]
    another, calls = contextlib.ExitStack(), []
    another.enter_context(claimed(cache, first))

    def load(indices):
        calls.append(indices)
        if second in indices:  # meanwhile the other is done
            cache.set_slot(first, sample(first))
            another.close()
        return [sample(idx) for idx in indices]

    samples = cache.get_or_load_many([first, second], load, timeout_s=1000)
    assert all(map(same, samples, [sample(first), sample(second)]))
    assert calls == [[second]]


@pytest.mark.parametrize("make", [partial(SharedCache, data_dims=(MIB,)), RaggedCache], ids=["slots", "records"])
def test_samples_stay_uncached_when_memory_runs_low_and_get_another_chance(make, monkeypatch, caplog):
    load = lambda idx: torch.full((MIB,), idx, dtype=torch.uint8)
    with make("40MB", 10) as cache:
        with monkeypatch.context() as patched:
            patched.setattr(limits, "memory", lambda: Memory(GIB, 0))
            for idx in [*range(4, 10)] * 2:
                assert same(cache.get_or_load(idx, load), load(idx))
            with claimed(cache, 5):  # nobody waits for what cannot be kept
                cache.get_or_load(5, load, timeout_s=1000)
        assert (cache.stats().filled, cache.stats().refused) == (0, 13)
        (record,) = caplog.records
        assert "cache stops growing at 0 B of" in record.message
        if isinstance(cache, SharedCache):
            for use, slots in ((lambda: cache.array, "0 to 9 need 10.0 MiB"), (lambda: cache[9], "9 to 9 need 1.0 MiB")):
                with pytest.raises(SegmentError, match=f"slots {slots}, which the machine does not give"):
                    use()
        cache.clear()
        for idx in range(10):
            cache.set_slot(idx, load(idx))
        assert cache.stats().filled == 10


@pytest.mark.linux
@pytest.mark.parametrize("make", [partial(SharedCache, data_dims=sample(0).shape), RaggedCache], ids=["slots", "records"])
def test_caches_without_samples_a_limit_or_memory_hold_nothing(make, monkeypatch, caplog):
    with make(1, 0) as empty:
        assert len(empty.get_slots([])[0]) == len(empty.aux_array) == empty.stats().hit_rate == 0
        with pytest.raises(SampleIndexError, match="outside the dataset of 0 samples"):
            empty.get_slot(0)
    without_limit = make(0, N)
    no_shared_memory(monkeypatch)
    for cache in (without_limit, make(1, N)):
        with cache, pickle.loads(pickle.dumps(cache)) as copy:
            for each in (cache, copy):
                fill(each)
                assert (each.aux_array == SlotState.OOB).all()
                assert not each.get_slots(range(N))[1].any()
            cache.clear()
    (record,) = caplog.records
    assert "no shared memory: /no/such/dir cannot be written" in record.message
