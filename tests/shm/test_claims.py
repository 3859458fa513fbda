"""Claims of many samples at once: who has them, and that they end with their process."""

import os
import signal
import threading

import numpy as np
import pytest
import torch

from stocache import SharedCache
from stocache.shm.layout import ROWS

N = 50
SOME = np.array([3, 4, 9, 20])


@pytest.fixture
def cache():
    with SharedCache(1, N, (4,)) as cache:
        yield cache


@pytest.fixture
def claims(cache):
    return cache._claims


def to_load(claims, indices):
    taken = set()
    claims.to_load(np.array(indices), taken)
    return taken


def to_write(claims, indices):
    taken = set()
    claims.to_write(np.array(indices), taken)
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


def test_a_sample_is_claimed_once_in_a_process(claims):
    assert to_load(claims, SOME) == {3, 4, 9, 20}
    assert to_load(claims, [9, 10]) == {10}
    claims.end_loading({3, 4, 9, 20})
    assert to_load(claims, [9, 10]) == {9}


def test_who_writes_may_take_a_claim_to_load_and_excludes_writers(claims):
    loading = to_load(claims, SOME)
    writing = to_write(claims, [3, 5])
    assert writing == {3, 5}
    assert to_write(claims, [3, 5, 6]) == {6}
    assert to_load(claims, [5]) == set()
    claims.end_loading(loading)
    assert to_write(claims, [3, 4]) == {4}  # 3 is still being written
    claims.end_writing({3, 4, 5, 6})
    assert to_load(claims, [3, 4, 5, 6]) == {3, 4, 5, 6}


@pytest.mark.parametrize("take", [to_load, to_write])
def test_claims_end_with_their_process(cache, claims, take):
    other = Other(lambda: take(claims, SOME))
    assert to_load(claims, [2, *SOME]) == {2}
    assert to_write(claims, SOME) == (set() if take is to_write else set(SOME.tolist()))
    claims.end_writing(set(SOME.tolist()))
    other.kill()
    assert to_write(claims, SOME) == set(SOME.tolist())


def test_a_new_process_in_the_row_of_an_ended_one_has_not_its_claims(cache, claims):
    first = Other(lambda: to_write(claims, SOME))
    first.kill()
    second = Other(lambda: to_write(claims, [30]))  # takes over the row
    assert to_write(claims, [*SOME, 30]) == set(SOME.tolist())
    second.kill()


def test_a_forked_child_has_not_the_claims_of_its_parent(claims):
    assert to_write(claims, SOME) == set(SOME.tolist())
    pid = os.fork()
    if pid == 0:
        os._exit(to_write(claims, [*SOME, 5]) != {5})
    assert os.waitpid(pid, 0)[1] == 0
    assert to_load(claims, SOME) == set()


def test_a_process_without_a_row_reads_and_does_not_fill(cache, monkeypatch):
    cache.set_slot(0, torch.zeros(4, dtype=torch.uint8))
    pid = os.fork()
    if pid == 0:
        cache._segment.holder = 0  # as when all of the rows are taken
        cache.get_or_load_many([0, 1], lambda indices: [torch.ones(4, dtype=torch.uint8)] * len(indices))
        os._exit(cache.stats().filled != 1 or cache.get_slot(0) is None)
    assert os.waitpid(pid, 0)[1] == 0
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

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert (stats.filled, stats.fills, stats.races) == (N, N, 0)
    assert not cache._claims._words.any()
