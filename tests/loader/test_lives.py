"""Workers that ended between two loops are started anew, and an iterator may pass from thread to thread."""

import contextlib
import ctypes
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import stocache
from stocache import CachedDataset, WorkerError
from stocache.timing import record
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


def interrupt_threads(loader):
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("stocache worker")]
    while all(thread.is_alive() for thread in threads):  # one that makes a batch takes the error for one of the dataset
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
        with contextlib.suppress(WorkerError, KeyboardInterrupt):  # an idle thread hears of it when it wakes up
            list(loader)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("options", "interrupt"), [(PERSISTENT, interrupt_processes), (THREADED, interrupt_threads)])
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


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}, {"num_workers": 2}, PERSISTENT, THREADS, THREADED], ids=str)
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
