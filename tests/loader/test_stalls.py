"""A forked child that waits for a lock or a thread that it does not have is given up, and this process loads with a copy."""

import multiprocessing
import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stocache
from stocache import CachedDataset
from stocache.system import waiting
from stocache.system.loading.fallback import in_children_or_here
from stocache.system.waiting import StallWatch
from tests.support.processes import wait_until

N = 40


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A child that waits in this way is given up soon."""
    monkeypatch.setattr(waiting, "_LIMITS_S", (60.0, 0.6, 0.3))


class Doubles(Dataset):
    """Doubles numbers in a pool that was used before, and adds random numbers in its transform, if it has one."""

    def __init__(self, transform=None):
        self.pool, self.made, self.seen, self.transform = ThreadPoolExecutor(1), 0, [], transform
        self.pool.submit(int).result()

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.made += 1
        self.seen.append(idx)
        sample = torch.tensor([self.pool.submit(lambda: 2.0 * idx).result()])
        return sample if self.transform is None else self.transform(sample)


def augment(sample):
    return sample + torch.rand(1)


def epoch(dataset):
    return torch.cat(list(DataLoader(dataset, 8, shuffle=True, generator=torch.Generator().manual_seed(3))))


@pytest.mark.parametrize("transform", [None, augment])
def test_a_dataset_with_a_pool_is_cached_as_any_other_and_stays_as_it_was(transform, caplog):
    torch.manual_seed(5)
    dataset, plain = Doubles(transform), epoch(Doubles(transform))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with CachedDataset(dataset, 0.01) as cached:
        assert cached.warm(progress=False).total.filled == N
        assert (dataset.made, dataset.seen) == (0, [])
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(epoch(cached), plain)
        assert not cached.is_left
    assert caplog.text.count("a lock or a thread which it does not have") == 1
    assert "worker_method='thread'" in caplog.text


def test_auto_chooses_threads_or_no_workers():
    loader = stocache.DataLoader(Doubles(), 8, num_workers=2, worker_method="auto", multiprocessing_context="fork")
    assert type(iter(loader)._batches).__name__ == "ThreadIterator"
    assert stocache.DataLoader(Doubles(), 8, num_workers="auto").num_workers == 0


def stuck_after(count):
    lock = threading.Lock()
    threading.Thread(target=lock.acquire).start()
    wait_until(lock.locked)
    here = os.getpid()

    def job():
        for number in range(4):
            if number == count and os.getpid() != here:
                lock.acquire()
            yield number

    return job


def test_items_that_came_before_the_stall_are_not_repeated():
    assert sorted(in_children_or_here(None, [stuck_after(2), stuck_after(0)])) == sorted([*range(4)] * 2)


def waits(lock, timeout):
    lock.acquire(timeout=timeout)


locked, shared, waiting_queue = threading.Lock(), multiprocessing.get_context("fork").Lock(), queue.Queue()
STALLED = {
    "lock": locked.acquire, "queue": waiting_queue.get, "timeout": lambda: waits(locked, 60),
    "polls": lambda: [waits(locked, 0.05) for _ in range(1000)],
}  # fmt: skip
OTHERS = {
    "sleep": lambda: time.sleep(60), "lock of processes": shared.acquire, "pipe": lambda: os.read(os.pipe()[0], 1),
    "busy": lambda: any(iter(int, 1)),
}  # fmt: skip


def test_only_waits_that_nobody_can_end_are_stalls():
    for lock in (locked, shared):
        lock.acquire(False)
    pids, found = {}, set()
    for name, wait in (STALLED | OTHERS).items():
        pids[name] = os.fork()
        if pids[name] == 0:
            wait()
            os._exit(0)
    watches, begun = {name: StallWatch(pid) for name, pid in pids.items()}, time.monotonic()
    try:
        while time.monotonic() < begun + 1 or (found < {*STALLED} and time.monotonic() < begun + 60):
            found |= {name for name, watch in watches.items() if watch.is_stalled()}
            time.sleep(0.1)
        assert found == {*STALLED}
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
