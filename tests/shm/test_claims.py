"""Claims of many samples at once: who has them, and that they end with their process."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stocache import SharedCache
from stocache.shm.layout import ROWS
from tests.support.processes import in_child

pytestmark = pytest.mark.quick

N = 50
SOME = [3, 4, 9, 20]


@pytest.fixture
def cache():
    with SharedCache(1, N, (4,)) as cache:
        yield cache


@pytest.fixture
def claims(cache):
    return cache._claims


def take(claim, indices):
    """Claim samples with ``claims.to_load`` or ``claims.to_write``; return those that were claimed."""
    taken = set()
    claim(np.array(indices), taken)
    return taken


class Other:
    """Another process that has claimed samples, until it is killed."""

    def __init__(self, claim):
        ready, self.go = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            claim()
            os.write(ready[1], b"x")
            os.read(self.go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        for fd in ready:
            os.close(fd)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in self.go:
            os.close(fd)


def test_a_sample_is_claimed_once_and_who_writes_may_take_a_claim_to_load(claims):
    loading = take(claims.to_load, SOME)
    assert loading == {3, 4, 9, 20}
    assert take(claims.to_load, [9, 10]) == {10}
    assert take(claims.to_write, [3, 5]) == {3, 5}
    assert take(claims.to_write, [3, 5, 6]) == {6}
    assert take(claims.to_load, [5]) == set()
    claims.end_loading(loading)
    assert take(claims.to_write, [3, 4]) == {4}  # 3 is still being written
    claims.end_writing({3, 4, 5, 6})
    assert take(claims.to_load, [3, 4, 5, 6, 9, 10]) == {3, 4, 5, 6, 9}


@pytest.mark.parametrize("way", ["to_load", "to_write"])
def test_claims_end_with_their_process(claims, way):
    other = Other(lambda: take(getattr(claims, way), SOME))
    assert take(claims.to_load, [2, *SOME]) == {2}
    assert take(claims.to_write, SOME) == (set() if way == "to_write" else set(SOME))
    claims.end_writing(set(SOME))
    other.kill()
    new = Other(lambda: take(claims.to_write, [30]))  # takes over the row
    assert take(claims.to_write, [*SOME, 30]) == set(SOME)
    new.kill()


def test_a_forked_child_has_not_the_claims_of_its_parent(claims):
    def check():
        assert take(claims.to_write, [*SOME, 5]) == {5}

    assert take(claims.to_write, SOME) == set(SOME)
    assert in_child(check) == 0
    assert take(claims.to_load, SOME) == set()


def test_a_process_without_a_row_reads_and_does_not_fill(cache):
    def use():
        cache._segment.holder = 0  # as when all of the rows are taken
        cache.get_or_load_many([0, 1], lambda indices: [torch.ones(4, dtype=torch.uint8)] * len(indices))
        assert cache.stats().filled == 1
        assert cache.get_slot(0) is not None

    cache.set_slot(0, torch.zeros(4, dtype=torch.uint8))
    assert in_child(use) == 0
    assert cache._segment.holder < 2**31
    assert (cache._segment.holder - 1) % ROWS < ROWS - 1


def test_threads_that_fill_together_write_each_sample_once(cache):
    def fill(number):
        indices = np.random.default_rng(number).permutation(N).tolist()
        for at in range(0, N, 10):
            part = indices[at : at + 10]
            for idx, sample in zip(part, cache.get_or_load_many(part, load), strict=True):
                assert (sample == idx).all()

    def load(indices):
        return [torch.full((4,), idx, dtype=torch.uint8) for idx in indices]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
    stats = cache.stats()
    assert (stats.filled, stats.fills, stats.races) == (N, N, 0)
    assert not cache._claims._words.any()
