"""Samples that are needed before the user's loop are loaded in a child process, and nothing is seen of that here."""

import io
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import zipfile

import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from stocache import CachedDataset, DatasetError, RaggedCache, SharedCache, WorkerError, prepare
from stocache.datasets import probing
from stocache.system.children import ChildError, in_children

N = 400


class Numbers(Dataset):
    """Numbers 0 to N-1; what a test's dataset does besides is in `load`."""

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.load(idx)
        return torch.tensor([idx])

    def load(self, idx):
        """Do nothing."""


# ------------------------------------------------------------------------------------------------ datasets that open lazily


class Lazy(Dataset):
    """The idiom of every tutorial: the file is opened when the first sample is asked for."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return N

    def __getitem__(self, idx):
        if self.file is None:
            self.file = self.open()
        return self.read(idx)


class LazyFile(Lazy):
    def open(self):
        return open(self.path, "rb", buffering=0)

    def read(self, idx):
        self.file.seek(idx * 64)
        return int.from_bytes(self.file.read(64), "little")


class LazyZip(Lazy):
    def open(self):
        return zipfile.ZipFile(self.path)

    def read(self, idx):
        return int(self.file.read(str(idx)))


class LazyLMDB(Lazy):
    def open(self):
        return lmdb.open(self.path, readonly=True, lock=False)

    def read(self, idx):
        with self.file.begin() as transaction:
            return int(transaction.get(str(idx).encode()))


@pytest.fixture(params=[LazyFile, LazyZip, LazyLMDB])
def lazy(request, tmp_path):
    path = str(tmp_path / "data")
    if request.param is LazyFile:
        with open(path, "wb") as file:
            file.write(b"".join(idx.to_bytes(64, "little") for idx in range(N)))
    elif request.param is LazyZip:
        with zipfile.ZipFile(path, "w") as file:
            for idx in range(N):
                file.writestr(str(idx), str(idx))
    else:
        with lmdb.open(path) as file, file.begin(write=True) as transaction:
            for idx in range(N):
                transaction.put(str(idx).encode(), str(idx).encode())
    return lambda: request.param(path)


def numbers(dataset, workers, start_method):
    context = start_method if workers else None
    loader = DataLoader(dataset, 8, shuffle=True, num_workers=workers, multiprocessing_context=context)
    return sorted(number for batch in loader for number in batch.tolist())


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(
    ("workers", "start_method"), [(4, "fork"), pytest.param(1, "spawn", marks=pytest.mark.slow), (1, "forkserver"), (0, "none")]
)
@pytest.mark.parametrize("warmed", [False, True])
@pytest.mark.sampled(3)
def test_a_dataset_that_opens_its_file_lazily_stays_closed_here(lazy, workers, start_method, warmed):
    if start_method in ("spawn", "forkserver") and warmed:
        return  # seconds each
    train, val = lazy(), lazy()
    with CachedDataset(train, 0.01) as cached, CachedDataset(val, 0.01) as other:
        if warmed:
            cached.warm(num_workers=2, progress=False)
            other.warm(num_workers=0, progress=False)
        assert train.file is None is val.file
        for _ in range(2):
            assert numbers(cached, workers, start_method) == list(range(N))
        assert cached.stats().total.filled == N
        if train.file is not None:
            train.file.close()


def test_prepare_leaves_the_dataset_as_it_is(lazy, tmp_path):
    for workers in (0, 2):
        dataset = lazy()
        with prepare(dataset, tmp_path / f"prepared{workers}", num_workers=workers, progress=False) as storage:
            assert [storage.load_sample(idx) for idx in range(N)] == list(range(N))
        assert dataset.file is None


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_file_that_is_open_here_keeps_its_position(tmp_path, buffering):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 1000)

    class Eager(Numbers):
        def __init__(self):
            self.file = open(path, "rb", buffering)  # noqa: SIM115

        def load(self, idx):
            self.file.seek(idx * 100)
            self.file.read(100)

    dataset = Eager()
    with dataset.file as file:
        file.seek(1000)
        file.read(3)
        position = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        with CachedDataset(dataset, 0.01) as cached:
            cached.warm(progress=False)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == position
        assert file.read() == path.read_bytes()[1003:]


def test_a_child_works_as_a_worker_does():
    parent = os.getpid()

    class Curious(Numbers):
        def load(self, idx):
            info = get_worker_info()
            assert os.getpid() != parent
            assert (info.id, info.num_workers, info.dataset is self) == (0, 1, True)
            assert torch.get_num_threads() == 1
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    threads, handler = torch.get_num_threads(), signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        CachedDataset(Curious(), 0.01).close()
    finally:
        signal.signal(signal.SIGTERM, handler)
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


def in_daemon(results):
    with CachedDataset(Numbers(), 0.01) as cached:
        cached.warm(num_workers=2, progress=False)
        results.send(cached.stats().total.filled)


def test_a_daemonic_process_may_cache_too():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=in_daemon, args=(sender,), daemon=True)
    process.start()
    assert receiver.poll(25)
    assert receiver.recv() == N
    process.join(25)
    process.close()
    receiver.close()
    sender.close()


# ------------------------------------------------------------------------------------------------ datasets that misbehave


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"signal 9 \(SIGKILL\)"),
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: sys.exit(4), "exited with code 4"),
    ],
)
def test_a_dataset_that_ends_its_process_is_an_error(end, message):
    class Deadly(Numbers):
        def load(self, idx):
            end()

    with pytest.raises(WorkerError, match=rf"probing sample 0: the child process \d+.*{message}.*example="):
        CachedDataset(Deadly(), 0.01)
    with CachedDataset(Deadly(), 0.01, probe=0) as cached:
        with pytest.raises(WorkerError, match="the child process"):
            cached.warm(progress=False)


def test_a_later_sample_that_ends_its_process_leaves_those_before(caplog):
    class Deadly(Numbers):
        def load(self, idx):
            if idx == N - 1:
                os._exit(3)

    with CachedDataset(Deadly(), 0.01) as cached:
        assert isinstance(cached.cache, SharedCache)
        assert cached.stats().total.filled == 7
    assert f"probing sample {N - 1}: the child process" in caplog.text


HANGING = """
import time, torch, stocache

class Hanging(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, idx):
        print("loading", flush=True)
        time.sleep(600)

stocache.CachedDataset(Hanging(), 0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.sampled(3)
def test_ctrl_c_ends_a_dataset_that_hangs_and_no_process_is_left(number):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", HANGING], **options) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=20)
        assert ("KeyboardInterrupt" in stderr) == (number == signal.SIGINT)
        deadline = time.monotonic() + 10
        while _group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _group_lives(process.pid)


def _group_lives(pid):
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_dataset_that_hangs_is_done_without_after_a_while(caplog, monkeypatch):
    class Hanging(Numbers):
        def load(self, idx):
            time.sleep(600)

    monkeypatch.setattr(probing, "_PATIENCE_S", 0.5)
    with CachedDataset(Hanging(), 0.01) as cached:
        assert isinstance(cached.cache, RaggedCache)
    assert "sample 0 is not loaded after" in caplog.text


def test_slow_samples_are_probed_less(monkeypatch):
    class Slow(Numbers):
        loads = torch.zeros(1, dtype=torch.int64).share_memory_()

        def load(self, idx):
            self.loads += 1

    monkeypatch.setattr(probing, "_BUDGET_S", 0)
    with CachedDataset(Slow(), 0.01) as cached:
        assert isinstance(cached.cache, SharedCache)
        assert cached.stats().total.filled == 2
    assert Slow.loads.item() == 3  # the first of the two is loaded twice
    del Slow.loads


def test_what_a_dataset_prints_is_printed_once(capfd):
    class Talking(Numbers):
        def load(self, idx):
            print(f"loading {idx}")  # noqa: T201

    print("before", end=" ")  # noqa: T201
    CachedDataset(Talking(), 0.01, probe=2).close()
    assert capfd.readouterr().out == f"before loading 0\nloading 0\nloading {N - 1}\n"


def test_an_exception_that_does_not_pickle_is_told(caplog):
    class LocalError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    class Failing(Numbers):
        def load(self, idx):
            raise LocalError("one", "two")

    with pytest.raises(DatasetError, match=r"probing sample 0 of Failing.*LocalError: one and two") as caught:
        CachedDataset(Failing(), 0.01)
    assert "raise LocalError" in str(caught.value.__cause__.__cause__)
    with CachedDataset(Failing(), 0.01, probe=0) as cached, pytest.raises(DatasetError, match="LocalError: one and two"):
        cached.warm(progress=False)


# ------------------------------------------------------------------------------------------------ when a child cannot load


class AgainstForks(Numbers):
    """Refuses to work in another process than that which made it."""

    def __init__(self):
        self.pid = os.getpid()

    def load(self, idx):
        if os.getpid() != self.pid:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


def test_what_a_child_cannot_load_is_loaded_here_with_one_warning(caplog):
    with CachedDataset(AgainstForks(), 0.01) as cached:
        assert isinstance(cached.cache, SharedCache)
        cached.warm(progress=False)
        assert cached.stats().total.filled == N
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "cannot be loaded in a child process (RuntimeError: Cannot re-initialize CUDA" in warning
    assert "forked workers share them" in warning
    caplog.clear()
    with CachedDataset(AgainstForks(), 0.01, probe=0) as cached:
        cached.warm(progress=False)
        assert cached.stats().total.filled == N
    assert caplog.text.count("cannot be loaded in a child process") == 1


def test_without_a_child_process_samples_are_loaded_here(monkeypatch, caplog):
    def no_fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    with CachedDataset(Numbers(), 0.01) as cached:
        cached.warm(num_workers=2, progress=False)
        assert cached.stats().total.filled == N
    assert caplog.text.count("cannot be loaded in a child process (ChildError: no child process can be made") == 1
    with pytest.raises(ChildError, match="no child process can be made"):
        next(in_children([lambda: iter([1])], None))


class NotReady(Numbers):
    """Made ready by a worker_init_fn, as DLIO's."""

    reader = None

    def load(self, idx):
        self.reader(idx)


def make_ready(worker):
    get_worker_info().dataset.reader = io.BytesIO().seek


def test_a_dataset_that_a_worker_init_fn_makes_ready_needs_an_example_or_no_probe():
    with pytest.raises(TypeError, match=r"probing sample 0 of NotReady.*worker_init_fn.*example=sample.*probe=0.*not callable"):
        CachedDataset(NotReady(), 0.01)
    for options, kind in (({"example": torch.tensor([1])}, SharedCache), ({"probe": 0}, RaggedCache)):
        with CachedDataset(NotReady(), 0.01, **options) as cached:
            assert isinstance(cached.cache, kind)
            for _ in range(2):
                loader = DataLoader(cached, 50, num_workers=2, worker_init_fn=make_ready, multiprocessing_context="fork")
                assert torch.cat(list(loader)).flatten().tolist() == list(range(N))
            assert cached.stats().total.filled == N
            assert cached.dataset.reader is None


# ------------------------------------------------------------------------------------------------ randomness before the cache


class Drawing(Numbers):
    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, idx):
        return self.draw(idx)


own = np.random.default_rng(0)
TWICE = "sample 0 was different the second time it was loaded; every epoch will see the first version. Put random transforms"
DRAWN = "sample 0 was made with random numbers; every epoch will see the first version. Put random transforms"


@pytest.mark.parametrize(
    ("draw", "warning"),
    [
        (lambda idx: idx + random.random(), TWICE),
        (lambda idx: idx + np.random.rand(), TWICE),
        (lambda idx: torch.rand(3), TWICE),
        (lambda idx: own.random(), TWICE),  # which no generator of the libraries shows
        (lambda idx: (torch.rand(1) > 2).item(), DRAWN),
    ],
)
def test_what_is_random_before_the_cache_is_told_once(draw, warning, caplog):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), own.bit_generator.state
    CachedDataset(Drawing(draw), 0.01).close()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning in told
    assert states == (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), own.bit_generator.state
    )  # fmt: skip


@pytest.mark.parametrize("draw", [lambda idx: idx, lambda idx: float("nan"), lambda idx: {"a": [str(idx), None]}])
def test_what_is_the_same_each_time_is_not_told(draw, caplog):
    CachedDataset(Drawing(draw), 0.01).close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_proc_samples_are_loaded_in_this_process(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("stocache.system.children._OPEN_FILES", str(tmp_path / "fd"))
    cached = CachedDataset([torch.full((2,), n) for n in range(9)], 0.01)
    assert cached.warm().total.filled == 9
    assert "/proc is hidden), so this process loads them" in caplog.text


@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit()", "raise KeyboardInterrupt", "os.kill(os.getpid(), 40)"])
def test_a_child_that_ends_is_an_error_however_it_ends(ending):
    def job():
        yield 1
        exec(ending)

    items = in_children([job], None)
    assert next(items) == 1
    with pytest.raises(
        WorkerError, match=r"which loads samples, (exited with code [01]|was killed by signal 40 \(SIGRTMIN\+6\))"
    ):
        list(items)
