"""One cache, many processes: every start method, races, counts, and the DataLoader."""

import copy
import multiprocessing
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stocache import SegmentError, SharedCache

N, DIMS = 64, (3, 8, 8)
HALF = f"{N + N // 2 * 192}B"


def sample(idx):
    return torch.randint(0, 256, DIMS, dtype=torch.uint8, generator=torch.Generator().manual_seed(idx))


def fill_share(number, cache, count):
    for idx in range(number, N, count):
        assert cache.get_slot(idx) is None
        cache.set_slot(idx, sample(idx))


def fill_everything(number, cache):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(number)).tolist()
    for idx in order * 3:
        value = cache.get_slot(idx)
        if value is None:
            cache.set_slot(idx, sample(idx))
        else:
            assert torch.equal(value, sample(idx))


def check_everything(number, cache):
    for idx in range(N):
        assert torch.equal(cache.get_slot(idx), sample(idx))


def test_what_one_process_sets_every_process_gets(run_processes):
    with SharedCache(1, N, DIMS) as cache:
        run_processes(2, fill_share, cache, 2)
        check_everything(0, cache)
        run_processes(1, check_everything, cache)
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.fills, stats.races, stats.filled) == (2 * N, N, N, 0, N)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
def test_processes_that_race_for_every_slot_agree(run_processes):
    with SharedCache(1, N, DIMS, placement="scattered") as cache:
        run_processes(3, fill_everything, cache)
        check_everything(0, cache)
        stats = cache.stats()
        assert stats.fills == N
        assert stats.fills + stats.races == stats.misses
        assert stats.hits + stats.misses == 3 * 3 * N + N


def overwrite_from_queue(number, queue, done):
    cache = queue.get()
    cache.set_slot(number, sample(number))
    done.put(True)


def test_a_cache_goes_through_a_queue(start_method):
    context = multiprocessing.get_context(start_method)
    queue, done = context.Queue(), context.Queue()
    process = context.Process(target=overwrite_from_queue, args=(7, queue, done))
    process.start()
    with SharedCache(1, N, DIMS) as cache:
        queue.put(cache)
        assert done.get(timeout=25)
        assert torch.equal(cache.get_slot(7), sample(7))
    process.join()
    process.close()
    for each in (queue, done):
        each.close()
        each.join_thread()


def use_two_that_are_one(number, first, second, other):
    first.set_slot(number, sample(number))
    assert torch.equal(second.get_slot(number), sample(number))
    assert first.array.data_ptr() == second.array.data_ptr()
    assert other.get_slot(number) is None


def test_caches_over_one_segment_cross_together(run_processes):
    with SharedCache(1, N, DIMS) as first, SharedCache(1, N, DIMS) as other:
        second = copy.deepcopy(first)
        run_processes(1, use_two_that_are_one, first, second, other)
        assert torch.equal(second.get_slot(0), sample(0))
        second.close()


def attach_too_late(number, payload):
    with pytest.raises(SegmentError, match="cannot attach to the cache through /proc/"):
        pickle.loads(payload)


def test_attaching_to_a_cache_that_is_gone_is_a_clear_error(run_processes):
    with SharedCache(1, N, DIMS) as cache:
        payload = pickle.dumps(cache)
    run_processes(1, attach_too_late, payload)


def test_the_parent_may_close_before_the_child_attaches():
    """A spawned child holds the descriptor itself, so nobody needs to wait for it."""
    context = multiprocessing.get_context("spawn")
    cache = SharedCache(1, N, DIMS)
    for idx in range(N):
        cache.set_slot(idx, sample(idx))
    process = context.Process(target=check_everything, args=(0, cache))
    process.start()
    cache.close()
    process.join()
    assert process.exitcode == 0
    process.close()


class Counting(Dataset):
    """Returns (index, sample, 1 if it was read from the source)."""

    def __init__(self, cache):
        self.cache = cache

    def __len__(self):
        return N

    def __getitem__(self, idx):
        value = self.cache.get_slot(idx) if self.cache is not None else None
        if value is not None:
            return idx, value, 0
        self.cache is None or self.cache.set_slot(idx, sample(idx))
        return idx, sample(idx), 1


def epochs(cache, workers, method, persistent, count=3):
    """Return for each epoch the order, whether all values were right, and the reads."""
    loader = DataLoader(
        Counting(cache),
        batch_size=8,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
        persistent_workers=persistent,
        generator=torch.Generator().manual_seed(0),
    )
    result = []
    for _ in range(count):
        batches = list(loader)
        order = torch.cat([batch[0] for batch in batches]).tolist()
        right = all(
            torch.equal(value, sample(idx)) for batch in batches for idx, value in zip(batch[0].tolist(), batch[1], strict=True)
        )
        result.append((order, right, sum(int(batch[2].sum()) for batch in batches)))
    return result


@pytest.mark.parametrize(
    ("start_method", "persistent"), [("fork", False), ("fork", True), ("spawn", True), ("forkserver", True)]
)
def test_dataloader_reads_exactly_what_is_not_resident(start_method, persistent):
    plain = epochs(None, 2, "fork", persistent)
    with SharedCache(HALF, N, DIMS, placement="scattered") as cache:
        cached = epochs(cache, 2, start_method, persistent)
        assert [reads for _, _, reads in cached] == [N, N // 2, N // 2]
        assert all(right for _, right, _ in cached)
        assert [order for order, _, _ in cached] == [order for order, _, _ in plain]  # no random number was taken
        assert cache.stats().misses == 2 * N
        assert cache.stats().hits == N


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_reads_do_not_depend_on_the_number_of_workers(workers):
    with SharedCache(HALF, N, DIMS) as cache:
        assert [reads for _, _, reads in epochs(cache, workers, "fork", workers > 0)] == [N, N // 2, N // 2]


def test_a_child_forked_while_a_thread_holds_the_guard_goes_on():
    with SharedCache(1, N, DIMS) as cache:
        with cache._segment.guard:
            process = multiprocessing.get_context("fork").Process(target=fill_share, args=(0, cache, 1))
            process.start()
            process.join(20)
            code = process.exitcode
            process.kill()
            process.join()
            process.close()
        assert code == 0
        check_everything(0, cache)
