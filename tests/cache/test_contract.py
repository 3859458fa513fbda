"""The contract of all caches: every class, backing, placement and way to come by one passes it."""

import contextlib
import os
import pickle
import threading

import numpy as np
import pytest
import torch

from stocache import ClosedError, SampleError, SampleIndexError, SlotError, SlotState
from stocache.disk.cache import DiskCache
from tests.support.equality import same
from tests.support.faults import claimed
from tests.support.makers import DISK, RAGGED, SHARED, SLOTS, N, fill, sample


@pytest.fixture(params=[*SHARED, *RAGGED, *DISK], ids=lambda maker: maker.__name__)
def cache(request):
    cache = request.param()
    yield cache
    cache.close()


def test_a_slot_is_empty_then_set_and_stays(cache, resident):
    for idx in resident:
        assert cache.get_slot(idx) is None
        cache.set_slot(idx, sample(idx))
        assert same(cache.get_slot(idx), sample(idx))
    for idx in resident:
        assert same(cache.get_slot(idx), sample(idx))


def test_aux_array_tells_the_states(cache, resident, outside):
    cache.set_slot(resident[0], sample(0))
    assert cache.aux_array.dtype == torch.uint8
    assert cache.aux_array.shape == (N,)
    assert cache.aux_array[resident[0]] == 1
    assert (cache.aux_array[resident[1:]] == 0).all()
    assert (cache.aux_array[outside] == 2).all()


def test_samples_outside_the_cache_miss_for_ever(cache, outside):
    for idx in outside:
        cache.set_slot(idx, sample(idx))
        assert cache.get_slot(idx) is None
        with pytest.raises(
            SampleIndexError, match=rf"get_slot\({idx}\): the sample lies outside the cache, which has room for 1"
        ):
            cache.get_slot(idx, allow_oob_idx=False)
        with pytest.raises(SampleIndexError, match=rf"set_slot\({idx}\): the sample lies outside the cache"):
            cache.set_slot(idx, sample(idx), allow_oob_idx=False)


@pytest.mark.parametrize("idx", [-1, N, N + 1, -N, 10**30])
def test_indices_outside_the_dataset_are_errors(cache, idx):
    with pytest.raises(SampleIndexError, match=f"outside the dataset of {N} samples"):
        cache.get_slot(idx)
    with pytest.raises(SampleIndexError, match=f"outside the dataset of {N} samples"):
        cache.set_slot(idx, sample(0))


@pytest.mark.parametrize("idx", [1.0, "1", None, torch.tensor([1, 2]), torch.tensor(1.0), np.array([1, 2]), slice(2), [1]])
def test_what_is_no_integer_is_no_index(cache, idx):
    with pytest.raises(SampleIndexError, match="a sample index is one integer, not a"):
        cache.get_slot(idx)
    with pytest.raises(SampleIndexError, match="a sample index is one integer, not a"):
        cache.set_slot(idx, sample(0))


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor, int])
def test_integers_of_numpy_and_torch_are_indices(cache, resident, kind):
    idx = kind(resident[3])
    assert cache.get_slot(idx) is None
    cache.set_slot(idx, sample(3))
    assert same(cache.get_slot(idx), sample(3))
    assert same(cache.get_slot(resident[3]), sample(3))


def test_reading_an_empty_slot_can_be_forbidden(cache, resident):
    with pytest.raises(SlotError, match=rf"get_slot\({resident[0]}\): the slot is empty"):
        cache.get_slot(resident[0], allow_empty_slot=False)


def test_overwriting_must_be_allowed(cache, resident):
    idx = resident[0]
    cache.set_slot(idx, sample(1))
    with pytest.raises(SlotError, match=rf"set_slot\({idx}\): the slot is set. Ask get_slot first"):
        cache.set_slot(idx, sample(2))
    assert same(cache.get_slot(idx), sample(1))
    cache.set_slot(idx, sample(2), allow_overwrite=True)
    assert same(cache.get_slot(idx), sample(2))


def test_who_missed_and_comes_late_is_ignored(cache, resident):
    idx = resident[0]
    assert cache.get_slot(idx) is None
    assert cache.get_slot(idx) is None  # as two threads would
    cache.set_slot(idx, sample(1))
    cache.set_slot(idx, sample(2))
    assert same(cache.get_slot(idx), sample(1))
    assert cache.stats().races == 1
    with pytest.raises(SlotError, match="the slot is set"):
        cache.set_slot(idx, sample(2))


def test_get_slot_returns_a_private_copy(cache, resident):
    cache.set_slot(resident[0], sample(0))
    cache.get_slot(resident[0]).zero_()
    assert same(cache.get_slot(resident[0]), sample(0))


def test_copy_false_is_the_memory_itself(cache, resident):
    if getattr(cache, "_codec", None) or isinstance(cache, DiskCache):
        pytest.skip("what is compressed or on a disk has no view")
    cache.set_slot(resident[0], sample(0))
    cache.get_slot(resident[0], copy=False).fill_(9)
    assert (cache.get_slot(resident[0]) == 9).all()


def test_the_cached_value_does_not_follow_the_given_one(cache, resident):
    value = sample(0)
    cache.set_slot(resident[0], value)
    value.zero_()
    assert same(cache.get_slot(resident[0]), sample(0))


def test_reads_after_the_first_epoch_are_exactly_those_outside(cache):
    reads = []
    for epoch in range(3):
        reads.append(0)
        for idx in torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist():
            if cache.get_slot(idx) is None:
                reads[-1] += 1
                cache.set_slot(idx, sample(idx))
    assert reads == [N, N - SLOTS, N - SLOTS]


def test_a_closed_cache_says_so(cache, resident):
    fill(cache)
    view = cache.get_slot(resident[0], copy=False)
    cache.close()
    cache.close()
    for use in (
        lambda: cache.get_slot(0),
        lambda: cache.get_slots([0]),
        lambda: cache.get_or_load(0, sample),
        lambda: cache.get_or_load_many([0], lambda indices: map(sample, indices)),
        lambda: cache.set_slot(0, sample(0)),
        lambda: cache.aux_array,
        lambda: cache.clear(),
        lambda: cache.counts(),
        lambda: cache.stats(),
        lambda: pickle.dumps(cache),
    ):
        with pytest.raises(ClosedError, match="the cache is closed"):
            use()
    assert "closed" in repr(cache)
    assert same(view, sample(resident[0]))
    with pytest.raises(AttributeError, match="no attribute 'get_solt'"):
        cache.get_solt(0)


def test_copies_share_the_memory_and_close_alone(cache, resident):
    copy = pickle.loads(pickle.dumps(cache))
    copy.set_slot(resident[0], sample(0))
    assert same(cache.get_slot(resident[0]), sample(0))
    copy.close()
    assert same(cache.get_slot(resident[0]), sample(0))


def test_threads_that_race_for_slots_agree(cache, resident):
    barrier = threading.Barrier(8)
    errors = []

    def work():
        barrier.wait()
        try:
            for idx in resident * 5:
                got = cache.get_slot(idx)
                if got is None:
                    cache.set_slot(idx, sample(idx))
                elif not same(got, sample(idx)):
                    errors.append(idx)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    stats = cache.stats()
    assert stats.fills == SLOTS
    assert stats.fills + stats.races == stats.misses


def test_get_or_load_loads_once_what_may_be_cached(cache, resident, outside):
    loads = []

    def load(idx):
        loads.append(idx)
        return sample(idx)

    for _ in range(2):
        for idx in range(N):
            assert torch.equal(cache.get_or_load(idx, load), sample(idx))
    assert sorted(loads) == sorted([*resident, *outside, *outside])
    stats = cache.stats()
    assert (stats.misses, stats.hits, stats.fills) == (len(loads), len(resident), len(resident))


def test_get_or_load_gives_up_its_claim_when_the_load_fails(cache, resident):
    def fail(idx):
        raise OSError("the disk is gone")

    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            cache.get_or_load(resident[0], fail)
    with pytest.raises(SampleError, match=r"value is|requires a gradient"):
        cache.get_or_load(resident[0], lambda idx: sample(idx, dtype=torch.float32).requires_grad_())
    assert torch.equal(cache.get_or_load(resident[0], sample, timeout_s=0), sample(resident[0]))
    with pytest.raises(SampleIndexError, match=r"get_or_load\(20\): outside the dataset"):
        cache.get_or_load(N, sample)


@pytest.mark.sampled(2)
def test_threads_that_want_one_sample_load_it_once(cache, resident):
    loads, barrier, loading = [], threading.Barrier(8), threading.Event()

    def load(idx):
        loads.append(idx)
        loading.wait(0.2)  # nobody sets it: time for the others to come
        return sample(idx)

    def want():
        barrier.wait(10)
        got.append(cache.get_or_load(resident[0], load))

    got = []
    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [resident[0]]
    assert all(torch.equal(value, sample(resident[0])) for value in got)


def test_hits_and_misses_of_threads_are_all_counted(cache, resident, outside):
    cache.set_slot(resident[0], sample(resident[0]))
    before, barrier, rounds = cache.stats(), threading.Barrier(4), 500

    def read():
        barrier.wait(10)
        for _ in range(rounds):
            cache.hit(resident[0], True)
            cache.get_slot(outside[0])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = cache.stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (4 * rounds, 4 * rounds)


def test_a_process_waits_for_the_load_of_another_but_not_for_the_dead_or_for_ever(cache, resident):
    idx, come, tell = resident[0], *os.pipe()
    die, kill = os.pipe()

    def load_until_killed(idx):
        os.write(tell, b"x")
        os.read(die, 1)
        os._exit(9)

    for action in ("outlast", "kill"):
        pid = os.fork()
        if pid == 0:
            cache.get_or_load(idx, load_until_killed)
        assert os.read(come, 1) == b"x"
        if action == "outlast":
            assert torch.equal(cache.get_or_load(idx, sample, timeout_s=0.01), sample(idx))
            cache.clear()
            os.kill(pid, 9)
        else:
            timer = threading.Timer(0.05, os.write, (kill, b"x"))
            timer.start()
            assert torch.equal(cache.get_or_load(idx, sample, timeout_s=1000), sample(idx))
            timer.join()
        os.waitpid(pid, 0)
    for fd in (come, tell, die, kill):
        os.close(fd)


def test_clear_empties_everything(cache, resident):
    fill(cache)
    cache.clear()
    assert (cache.aux_array != SlotState.SET).all()
    assert (cache.aux_array[resident] == SlotState.EMPTY).all()
    assert all(cache.get_slot(idx) is None for idx in range(N))
    fill(cache)
    assert cache.stats().filled == SLOTS
    assert all(same(cache.get_slot(idx), sample(idx)) for idx in resident)


def test_many_are_loaded_with_one_call_and_only_what_is_missing(cache, resident, outside):
    calls = []

    def load(indices):
        calls.append(indices)
        return [sample(idx) for idx in indices]

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
    with claimed(cache, resident[0]):  # no claim is left
        pass


def test_many_loaded_one_by_one_are_kept_up_to_a_failure(cache, resident):
    def load(indices):
        for idx in indices:
            if idx == resident[2]:
                raise OSError("the disk is gone")
            yield sample(idx)

    with pytest.raises(OSError, match="the disk is gone"):
        cache.get_or_load_many(resident, load)
    assert cache.stats().filled == 2
    assert same(cache.get_or_load(resident[2], sample, timeout_s=0), sample(resident[2]))
    with pytest.raises(ValueError, match="zip"):
        cache.get_or_load_many(resident, lambda indices: [])
    with pytest.raises(SampleIndexError, match="get_or_load_many: indices"):
        cache.get_or_load_many([N], load)


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


def test_what_does_not_fit_is_passed_by_if_not_strict(cache, resident, caplog):
    bad = sample(0, dtype=torch.float32).requires_grad_()  # of the wrong dtype for one kind, with a gradient for the other
    for idx in resident[:2]:
        for _ in range(2):
            assert cache.get_or_load(idx, lambda idx: bad, strict=False) is bad
    (third, fourth) = cache.get_or_load_many(resident[2:4], lambda indices: [bad, sample(3)], strict=False)
    assert third is bad
    assert same(fourth, sample(3))
    assert cache.stats().rejected == 3
    assert cache.stats().fills == 1
    assert cache.aux_array[resident[:3]].tolist() == [SlotState.OOB] * 3
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        f"sample {resident[0]} does not fit and stays uncached. So will others like it, without a warning: "
    )
