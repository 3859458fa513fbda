"""Samples that are needed before the user's loop are loaded in a child process, and nothing is seen of that here."""

import io
import multiprocessing
import os
import random
import signal
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from stocache import CachedDataset, DatasetError, RaggedCache, SharedCache, WorkerError, prepare
from stocache.datasets import probing
from stocache.system.loading import children
from stocache.system.loading.children import in_children
from tests.support.processes import wait_until

N = 100


class Numbers(Dataset):
    """Numbers 0 to N-1; what a test's dataset does besides is ``load``."""

    def __init__(self, load=lambda idx: None, result=lambda idx: torch.tensor([idx])):
        self.load, self.result = load, result

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.load(idx)
        return self.result(idx)


def filled(dataset, workers=0, **options):
    """How many samples of a dataset are cached by `warm`."""
    with CachedDataset(dataset, 0.01, **options) as cached:
        cached.warm(num_workers=workers, progress=False)
        return cached.stats().total.filled


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_opens_its_file_lazily_stays_closed_here(tmp_path, workers):  # tests/programs/lazy_files.py has more
    def read(idx):
        if not dataset.files:
            dataset.files.append(open(tmp_path / "data", "rb"))  # noqa: SIM115
        dataset.files[0].seek(idx)
        return dataset.files[0].read(1)[0]

    (tmp_path / "data").write_bytes(bytes(range(N)))
    dataset = Numbers(result=read)
    dataset.files = []
    assert filled(dataset, workers) == N
    with prepare(dataset, tmp_path / "prepared", num_workers=workers, progress=False) as storage:
        assert [storage.load_sample(idx) for idx in range(N)] == list(range(N))
    assert dataset.files == []


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_file_that_is_open_here_keeps_its_position(tmp_path, buffering):
    (path := tmp_path / "data").write_bytes(bytes(range(256)) * 1000)
    with open(path, "rb", buffering) as file:
        file.seek(1000)
        file.read(3)
        position = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        assert filled(Numbers(lambda idx: (file.seek(idx * 100), file.read(100)))) == N
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == position
        assert file.read() == path.read_bytes()[1003:]


@pytest.mark.parametrize("here", [lambda *_: None, signal.SIG_IGN], ids=["handled", "ignored"])
def test_a_child_works_as_a_worker_does(here):
    """Handlers, say for a checkpoint, are for this process. But what ignores Ctrl-C, after nohup, does so in children, too."""
    parent, threads = os.getpid(), torch.get_num_threads()

    def look(idx):
        info = get_worker_info()
        assert os.getpid() != parent
        assert (info.id, info.num_workers, info.dataset is dataset) == (0, 1, True)
        assert torch.get_num_threads() == 1
        for number in before:
            assert signal.getsignal(number) == (signal.SIG_IGN if here is signal.SIG_IGN else signal.SIG_DFL)

    dataset = Numbers(look)
    before = {number: signal.signal(number, here) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        CachedDataset(dataset, 0.01).close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert get_worker_info() is None
    assert torch.get_num_threads() == threads


def test_children_draw_their_own_random_numbers():
    def draw():
        yield random.random(), np.random.rand(), torch.rand(1).item()

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = (sorted(in_children([draw, draw], None)) for _ in range(2))
    assert first == second
    assert len({number for drawn in first for number in drawn}) == 6
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_dataset_prints_is_printed_once(capfd):
    print("before", end=" ")  # noqa: T201
    CachedDataset(Numbers(lambda idx: print(f"loading {idx}")), 0.01, probe=2).close()  # noqa: T201
    assert capfd.readouterr().out == f"before loading 0\nloading 0\nloading {N - 1}\n"


ENDS = {
    r"signal 9 \(SIGKILL\)": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exited with code 0": lambda: os._exit(0), "exited with code 4": lambda: sys.exit(4),
}  # fmt: skip


@pytest.mark.parametrize("message", ENDS)
def test_a_dataset_that_ends_its_process_is_an_error(message, caplog):
    end = ENDS[message]
    with pytest.raises(WorkerError, match=rf"probing sample 0: the child process \d+.*{message}.*example="):
        CachedDataset(Numbers(lambda idx: end()), 0.01)
    with pytest.raises(WorkerError, match=rf"the child process \d+, which loads samples, .*{message}"):
        filled(Numbers(lambda idx: end()), probe=0)
    with CachedDataset(Numbers(lambda idx: idx == N - 1 and end()), 0.01) as cached:  # those before it are kept
        assert isinstance(cached.cache, SharedCache)
        assert cached.stats().total.filled == 7
    assert f"probing sample {N - 1}: the child process" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ctrl_c_ends_a_dataset_that_hangs_and_no_process_is_left(number):
    def hang():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            CachedDataset(Numbers(lambda idx: (sender.send(os.getpid()), time.sleep(90))), 0.01)
        except KeyboardInterrupt:
            sys.exit(7)

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, sender:
        process = context.Process(target=hang)
        process.start()
        assert receiver.poll(60)
        child = receiver.recv()
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == (7 if number == signal.SIGINT else -number)
        assert wait_until(lambda: has_ended(child))
        process.close()


def has_ended(pid):
    """Whether a process has ended, if only as a zombie: init may wait for none."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_dataset_that_hangs_is_done_without_and_slow_samples_are_probed_less(caplog, monkeypatch):
    monkeypatch.setattr(probing, "_PATIENCE_S", 3)  # in which the child says that it begins, also beside other programs
    monkeypatch.setattr(children, "_POLL_S", 0.05)
    monkeypatch.setattr(children, "_SLOW_S", 0.01)
    with CachedDataset(Numbers(lambda idx: time.sleep(600)), 0.01) as cached:
        assert isinstance(cached.cache, RaggedCache)
    assert caplog.text.count("waited 0 s for a sample so far, which the child process") == 1
    assert "sample 0 is not loaded after" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(probing, "_BUDGET_S", 0)
    loads = torch.zeros(1, dtype=torch.int64).share_memory_()
    with CachedDataset(Numbers(lambda idx: loads.add_(1)), 0.01) as cached:
        assert isinstance(cached.cache, SharedCache)
        assert cached.stats().total.filled == 2
    assert loads.item() == 3  # the first of the two is loaded twice


def test_an_exception_that_does_not_pickle_is_described(caplog):
    class LocalError(Exception):
        pass

    def fail(idx):
        raise LocalError("one and two")

    with pytest.raises(DatasetError, match=r"probing sample 0 of Numbers.*LocalError: one and two") as caught:
        CachedDataset(Numbers(fail), 0.01)
    assert "raise LocalError" in str(caught.value.__cause__.__cause__)
    with pytest.raises(DatasetError, match="LocalError: one and two"):
        filled(Numbers(fail), probe=0)


def test_what_a_child_cannot_load_is_loaded_here_with_one_warning(caplog, monkeypatch):
    parent = os.getpid()

    def refuse_forks(idx):
        if os.getpid() != parent:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    for options in ({}, {"probe": 0}):
        caplog.clear()
        assert filled(Numbers(refuse_forks), **options) == N
        (record,) = caplog.records
        assert "cannot be loaded in a child process (RuntimeError: Cannot re-initialize CUDA" in record.getMessage()
        assert "forked workers share them" in record.getMessage()
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.omppool", sys)  # numba ends its forked processes
    assert filled(Numbers(lambda idx: os.getpid() == parent or os.kill(os.getpid(), signal.SIGTERM))) == N
    assert "numba.config.THREADING_LAYER" in caplog.text


def test_without_child_processes_samples_are_loaded_here(monkeypatch, caplog):  # without /proc: test_portable.py
    def no_fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    assert filled(Numbers(), 2, probe=0) == N
    assert caplog.text.count("cannot be loaded in a child process (ChildError: no child process can be made") == 1


def make_ready(worker):
    get_worker_info().dataset.load = io.BytesIO().seek


def test_a_dataset_that_a_worker_init_fn_makes_ready_needs_an_example_or_no_probe():
    with pytest.raises(TypeError, match=r"probing sample 0 of Numbers.*worker_init_fn.*example=sample.*probe=0.*not callable"):
        CachedDataset(Numbers(None), 0.01)
    for options, kind in (({"example": torch.tensor([1])}, SharedCache), ({"probe": 0}, RaggedCache)):
        with CachedDataset(Numbers(None), 0.01, **options) as cached:
            assert isinstance(cached.cache, kind)
            loader = DataLoader(cached, 50, num_workers=2, worker_init_fn=make_ready, multiprocessing_context="fork")
            assert torch.cat(list(loader)).flatten().tolist() == list(range(N))
            assert cached.stats().total.filled == N
            assert cached.dataset.load is None


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_processes_that_a_child_has_started_end_with_it_although_they_do_not_notice(start_method):
    def job():
        started = multiprocessing.get_context(start_method).Process(target=time.sleep, args=(600,))
        started.start()
        yield started.pid
        time.sleep(600)

    items = in_children([job], None)
    pid = next(items)
    assert not has_ended(pid)
    items.close()
    assert wait_until(lambda: has_ended(pid))
