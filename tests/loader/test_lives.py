"""Workers that ended between two loops are started anew, and an iterator may pass from thread to thread."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import stocache
from stocache import CachedDataset
from stocache.observe.recording import record
from tests.support.images import Images
from tests.support.loading import THREADS
from tests.support.processes import in_child

PERSISTENT = {"num_workers": 2, "persistent_workers": True}
THREADED = {**THREADS, "persistent_workers": True}


def labels(batches):
    return [labels.tolist() for _, labels in batches]


ALL = labels(torch.utils.data.DataLoader(Images(30), 4))


def interrupt_processes(loader):
    for worker in loader._iterator._workers:
        os.kill(worker.pid, signal.SIGINT)
        worker.join(30)


def end_threads(loader):
    loader._iterator._threads.stop(30)


@pytest.mark.parametrize(("options", "interrupt"), [(PERSISTENT, interrupt_processes), (THREADED, end_threads)])
def test_persistent_workers_that_ended_between_two_loops_are_started_anew(options, interrupt):
    loader = stocache.DataLoader(CachedDataset(Images(30), "1MB"), 4, **options)
    next(iter(loader))
    interrupt(loader)
    assert labels(loader) == labels(loader) == ALL


def test_a_forked_child_starts_its_own_persistent_threads():
    loader = stocache.DataLoader(Images(30), 4, **THREADED)
    assert labels(loader) == ALL
    assert in_child(lambda: labels(loader) == ALL or os._exit(1)) == 0
    assert labels(loader) == ALL


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, PERSISTENT, THREADS, THREADED], ids=str)
def test_each_batch_may_be_asked_for_by_another_thread(options, monkeypatch):
    monkeypatch.setattr(record, "_LOOK_NS", 0)  # note CPU times, which each thread has of its own, at each batch
    loader = stocache.DataLoader(CachedDataset(Images(30), "1MB"), 4, **options)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for _ in range(2):
            batches = iter(loader)  # what a thread of an executor forks ends with an error, as Python joins the thread there
            found = [(first, second)[number % 2].submit(next, batches).result() for number in range(len(ALL))]
            assert labels(found) == ALL
            with pytest.raises(StopIteration):
                next(batches)
    assert loader.stats().batches == 2 * len(ALL)
