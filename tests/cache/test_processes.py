"""One cache, many processes: every start method, races and counts."""

import copy
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch

from stocache import RaggedCache, SegmentError, SharedCache
from stocache.shm import registry
from tests.support.makers import DIMS, sample
from tests.support.processes import in_child

N = 64


def fill(cache, indices=range(N)):
    for idx in indices:
        value = cache.get_slot(idx)
        if value is None:
            cache.set_slot(idx, sample(idx))
        else:
            assert torch.equal(value, sample(idx))


def is_named():
    return Path(registry.path_of("crossing")).exists()


def use_in_child(first, second, ragged, others, gone, queue):
    fill(first, range(1, N))
    assert torch.equal(second.get_slot(1), sample(1))
    assert first.array.data_ptr() == second.array.data_ptr()
    assert ragged.get_slot(1) == {"text": "1"}
    ragged.set_slot(2, [2])
    for other in others:
        assert torch.equal(other.get_slot(5), sample(5))
    assert is_named()
    with pytest.raises(SegmentError, match="cannot attach to the cache through /proc/"):
        pickle.loads(gone)
    queue.get(timeout=60).set_slot(7, sample(7))


def test_caches_cross_to_a_process_of_any_start_method(start_method):
    context = multiprocessing.get_context(start_method)
    queue = context.Queue()
    with SharedCache(1, N, DIMS) as cache:
        gone = pickle.dumps(cache)
    first, closed, sent = (SharedCache(1, N, DIMS) for _ in range(3))
    second, ragged, named = copy.deepcopy(first), RaggedCache("1MB", N), SharedCache(1, N, DIMS, name="crossing")
    first.set_slot(0, sample(0))
    ragged.set_slot(1, {"text": "1"})
    for cache in (closed, named):
        cache.set_slot(5, sample(5))
    process = context.Process(target=use_in_child, args=(first, second, ragged, (closed, named), gone, queue))
    process.start()
    for cache in (closed, named, second):  # the child may still be on its way
        cache.close()
    assert is_named()
    queue.put(sent)
    process.join(60)
    assert process.exitcode == 0
    process.close()
    queue.close()
    queue.join_thread()
    assert not is_named()  # the child was the last to have it
    fill(first)
    assert ragged.get_slot(2) == [2]
    assert torch.equal(sent.get_slot(7), sample(7))
    stats = first.stats()
    assert (stats.hits, stats.misses, stats.fills, stats.races, stats.filled) == (N + 1, N - 1, N, 0, N)
    for cache in (first, sent, ragged):
        cache.close()


def test_a_child_forked_while_a_thread_holds_the_guard_goes_on():
    with SharedCache(1, N, DIMS) as cache:
        with cache._segment.guard:
            assert in_child(fill, cache) == 0
        assert cache.stats().filled == N
