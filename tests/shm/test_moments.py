"""Bad moments: interrupts, garbage collections and kills at every step of what takes locks, and processes that are stopped."""

import contextlib
import ctypes
import dis
import gc
import itertools
import os
import pickle
import re
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stocache import BusyError, CachedDataset, RaggedCache, SharedCache, SharedCacheDDP, StorageError, prepare
from stocache.cache import arena, base, columns, loading, records, slots
from stocache.cache.slots import SlotArrays
from stocache.shm import claims, layout, locks, named, registry, segment
from stocache.shm.extents import Extents
from stocache.shm.locks import fence
from stocache.storage import local
from stocache.system import limits, waiting
from stocache.system.platform import here
from tests.support.equality import same
from tests.support.processes import in_child, stop, stopped
from tests.support.traces import CLONE_NEWNS, MS_REC, MS_SLAVE

NAME, N = "test-moments", 6
MODULES = arena, loading, claims, columns, layout, named, records, registry, segment, slots, contextlib, weakref
TRACED = {os.path.basename(module.__file__) for module in MODULES}

# After these, CPython looks for signals, and runs what the garbage collector has found
_STOPS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}

by_step = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has other instructions")


class at_step:
    """Run an action at the k-th step within stocache (and the standard library) at which a signal may come; note all places."""

    def __init__(self, k, action):
        self.k, self.action, self.places = k, action, []
        self._stops = {}

    def __enter__(self):
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if a frame has asked before settrace
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *exception):
        sys.settrace(self._before)

    def _enter_frame(self, frame, event, argument):
        if os.path.basename(frame.f_code.co_filename) not in TRACED:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode" and frame.f_lasti in self._stops_in(frame.f_code):
            self.places.append((frame.f_code, frame.f_lasti, frame.f_back.f_code))
            if len(self.places) == self.k + 1:
                self.action()
        return self._step

    def _stops_in(self, code):
        if code not in self._stops:
            each = itertools.pairwise(dis.get_instructions(code))
            pairs = [(before.offset, after.offset) for before, after in each if before.opname in _STOPS]
            # A signal is raised at the call, a trace function at the step after it: the same only under the same handler
            self._stops[code] = {after for before, after in pairs if handler_at(code, before) == handler_at(code, after)}
        return self._stops[code]


def handler_at(code, offset):
    """Return where an exception that is raised at an instruction is handled."""
    entries = dis._parse_exception_table(code)
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


def steps_of(work, every):
    """Return the numbers of the steps of ``work`` at which a signal may come: one for each ``every``-th place in the code.

    All of them take a minute; `benchmark/moments.py` takes other moments.
    """
    with at_step(-1, None) as counted:
        work()
    first = {place: k for k, place in reversed([*enumerate(counted.places)])}
    assert len(first) > 20
    return sorted(first.values())[::every]


unraisable = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts of finalizers


def interrupt():
    raise KeyboardInterrupt


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def make(**options):
    return SharedCacheDDP(1, N, (4,), **{"name": NAME} | options)


def value(idx):
    return torch.full((4,), idx + 1, dtype=torch.uint8)


def values(indices):
    return [value(idx) for idx in indices]


def is_locked(path):
    """Whether somebody has the lock of a directory."""
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
        fd = os.open(path, os.O_RDONLY)
        stack.callback(os.close, fd)
        return not here.lock_file(fd)
    return False


def open_and_close():
    with make() as cache:
        cache.get_or_load(1, value)


def interrupted(work, every, before=int):
    """Interrupt work at steps, one after the other. Yield their numbers, each when that has happened."""
    kept = []  # as a notebook keeps the last error, and with it all frames
    before()
    for k in steps_of(work, every):
        before()
        with at_step(k, interrupt):
            try:
                work()
            except KeyboardInterrupt as error:
                kept.append(error)
        yield k
    assert kept


@by_step
@unraisable
@pytest.mark.leaves_descriptors  # an interrupt may come between the opening of a file and its first name: it has no lock yet
@pytest.mark.parametrize("is_left", [False, True])
def test_an_interrupt_at_any_step_leaves_no_lock(is_left, remove_left):
    def leave_behind():
        remove_left()
        in_child(lambda: (make(persist=True), die()))

    open_and_close()
    for k in interrupted(open_and_close, 71, leave_behind if is_left else int):
        assert not is_locked(registry.directory_of()), f"step {k}"
        assert not registry.attaching.locked(), f"step {k}"
        assert in_child(open_and_close) == 0, f"step {k}"
    remove_left()
    segment._leave_all()
    open_and_close()
    assert not Path(registry.path_of(NAME)).exists()


def is_free(cache):
    """Raise unless this process, a different one, can take every lock of a cache."""
    with cache._segment.guard:
        assert all(cache._segment.try_lock(number) for number in range(N + 1))
        assert cache._segment.locks.take(locks.EXTENTS_LOCK)


@by_step
@unraisable
@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("kind", [lambda: SharedCache(1, N, (4,)), lambda: RaggedCache("1MB", N)], ids=["shared", "ragged"])
def test_an_interrupt_at_any_step_of_filling_leaves_no_lock_of_the_cache(kind):
    caches = [kind()]

    def fill_and_clear():
        cache = caches[-1]
        cache.set_slot(0, value(0))
        cache.get_or_load(1, value)
        cache.get_or_load_many([2, 3], values)
        with cache.claim(0):
            pass
        cache.clear()

    for k in interrupted(fill_and_clear, 31):
        with caches.pop() as cache:
            assert not cache._segment.guard.locked(), f"step {k}"
            assert in_child(is_free, cache) == 0, f"step {k}"
            for idx in range(N):
                found = cache.get_slot(idx)
                assert found is None or torch.equal(found, value(idx))
        caches.append(kind())
    caches.pop().close()


@by_step
def test_a_collection_at_any_step_leaves_what_is_gone_without_waiting_for_itself():
    def trial(k):
        cache = make(name="test-moments-gone")
        cache.itself = cache
        cache.set_slot(1, value(1))
        del cache
        with at_step(k, gc.collect):
            open_and_close()
        gc.collect()
        assert not Path(registry.path_of("test-moments-gone")).exists(), f"step {k}: it was not left"

    def all_trials():
        gc.freeze()  # or each collection walks through all that is imported
        gc.disable()
        for k in steps_of(open_and_close, 71):
            trial(k)

    assert in_child(all_trials, timeout_s=300) == 0


SAMPLES = ["text", 7, {"a": torch.arange(5)}, [1.5, None], b"bytes" * 100, (1, "x")]


def check_and_fill(cache):
    with pickle.loads(pickle.dumps(cache)) as fresh:  # it knows nothing yet, as in a new process
        for idx in [*range(N)] * 3:  # when cost decides, some are admitted later
            assert same(fresh.get_or_load(idx, SAMPLES.__getitem__), SAMPLES[idx])
        assert fresh.stats().filled == N


@by_step
@pytest.mark.parametrize("admission", ["all", "cost"])
def test_a_kill_at_any_step_of_clear_leaves_a_cache_that_works(admission):
    def clear_and_die():
        with at_step(k, die):
            cache.clear()

    with RaggedCache("1MB", N, admission=admission) as cache:
        check_and_fill(cache)
        steps = steps_of(cache.clear, 7)
    for k in steps:
        with RaggedCache("1MB", N, admission=admission) as cache:
            check_and_fill(cache)
            assert in_child(clear_and_die) == signal.SIGKILL
            assert in_child(check_and_fill, cache) == 0, f"step {k}"
            check_and_fill(cache)


@pytest.fixture
def waits(monkeypatch):
    """The seconds of each wait for another process. None takes any time."""
    waits = []
    for module in (locks, registry, loading):
        monkeypatch.setattr(module, "wait_until", lambda ready, timeout_s: waits.append(timeout_s) or ready())
    return waits


def test_a_sample_stays_uncached_when_a_stopped_process_reserves_memory(waits, monkeypatch, caplog):
    def reserve():
        monkeypatch.setattr(Extents, "_allocate", lambda *arguments: stop())
        cache.set_slot(0, value(0))

    with SharedCache(1, N, (4,)) as cache:
        with stopped(reserve) as pid:
            for idx in range(1, N):
                assert torch.equal(cache.get_or_load(idx, value), value(idx))
            assert (waits, cache.stats().filled) == ([locks.LOCK_TIMEOUT_S], 0)  # once for all
            (record,) = caplog.records
            assert re.search(rf"process {pid} \(.*, which is stopped has kept a lock of the cache", record.message)
        cache.get_or_load_many(range(N), values)
        assert cache.stats().filled == N


def test_a_stopped_process_that_loads_is_waited_for_once_and_not_for_each_sample(waits):
    with SharedCache(1, 64, (4,)) as cache, stopped(lambda: cache.get_or_load_many(range(64), lambda indices: stop())):
        samples = cache.get_or_load_many(range(64), values, timeout_s=3)
        assert [sample[0].item() for sample in samples] == [idx + 1 for idx in range(64)]
        assert (waits, cache.stats().filled) == ([3], 64)


def test_clear_says_which_stopped_process_is_writing(waits, monkeypatch):
    def write():
        monkeypatch.setattr(SlotArrays, "write_many", lambda *arguments: stop())
        cache.set_slot(1, value(1))

    with SharedCache(1, N, (4,)) as cache:
        cache.set_slot(0, value(0))
        with stopped(write) as pid:
            with pytest.raises(BusyError, match=rf"clear: process {pid} \(.*\), which is stopped holds the lock of a slot"):
                cache.clear()
            assert torch.equal(cache.get_slot(0), value(0))
        cache.clear()
        assert cache.get_slot(0) is None


def hold_directory():
    registry.run_locked(registry.directory_of(), lambda at: stop(), create=True)


def test_a_stopped_process_with_the_lock_of_the_directory_is_named(waits, caplog):
    with stopped(hold_directory) as pid:
        message = rf"stocache-\d+ has been locked by process {pid} \(.*\), which is stopped since \d\d:\d\d:\d\d"
        with pytest.raises(BusyError, match=message):
            make(on_busy="raise")
        with make() as cache:  # without a second wait
            assert (cache.get_or_load(1, value)[0], len(cache)) == (2, 0)
        assert waits == [registry.DIRECTORY_PATIENCE_S, 0]
        assert f"cache '{NAME}' holds nothing" in caplog.text
    with make() as cache:
        assert len(cache) == N
    with pytest.raises(ValueError, match=r"on_busy='wait' is unknown\. Use 'uncached' or 'raise'"):
        make(on_busy="wait")


def test_leaving_does_not_wait_for_long(waits):
    cache = make()
    waits.clear()
    with stopped(hold_directory):
        cache.close()
        assert waits == [registry._LEAVING_S] == [1]
    assert Path(registry.path_of(NAME)).exists()  # what the next one takes over
    with make() as cache:
        assert cache.stats().filled == 0


def test_a_process_that_is_at_work_is_waited_for_longer(monkeypatch):
    waits, directory = [], registry.directory_of()
    os.mkdir(directory, 0o700)
    fd = os.open(directory, os.O_RDONLY)
    assert here.lock_file(fd)  # this process is at work

    def wait(condition, timeout_s):
        waits.append(timeout_s)
        if len(waits) == 3:
            here.unlock_file(fd)
        return condition()

    monkeypatch.setattr(registry, "wait_until", wait)
    make(on_busy="raise").close()
    os.close(fd)
    assert waits[:3] == [registry.DIRECTORY_PATIENCE_S] * 3
    assert not waiting.is_at_work(2**22 + 1)  # nobody
    assert waiting.describe_process(None) == "a process of another container"


def test_a_stopped_process_that_prepares_a_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "_REPORT_S", 0.05)
    monkeypatch.setattr(local, "_STANDSTILL_S", 0.3)
    run = lambda: prepare([torch.zeros(3)] * 4, tmp_path, num_workers=0, progress=False)

    def hold():
        holding = local.LocalStore(str(tmp_path)).locked()
        holding.__enter__()
        return holding

    with stopped(hold) as pid:
        with pytest.raises(StorageError, match=rf"prepared by process {pid} \(.*\), which is stopped, which makes no progress"):
            run()
    run()


def test_samples_that_need_each_other_or_themselves_are_loaded_at_once(waits):
    barrier = threading.Barrier(2, timeout=60)
    loads = []

    def load(idx):
        loads.append(idx)
        if loads.count(idx) == 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait()
            cache.get_or_load(1 - idx, load)
        return value(idx)

    with SharedCache(1, N, (4,)) as cache, ThreadPoolExecutor(2) as pool:
        assert [sample[0].item() for sample in pool.map(lambda idx: cache.get_or_load(idx, load), (0, 1))] == [1, 2]
        assert cache.stats().filled == 2
    with SharedCache(1, N, (4,)) as cache:
        assert torch.equal(cache.get_or_load(1, lambda idx: cache.get_or_load(idx, value)), value(1))
        found = cache.get_or_load_many([2, 3], lambda indices: [cache.get_or_load_many([idx], values)[0] for idx in indices])
        assert [sample[0].item() for sample in found] == [3, 4]
        assert cache.stats().filled == 3
    assert not any(waits)


def use_caches():
    for name in (None, "test-moments-hidden"):
        with SharedCache(1, N, (4,), name=name) as cache:
            assert torch.equal(cache.get_or_load(1, value), value(1))
            assert torch.equal(cache.get_slot(1), value(1))
        with CachedDataset(values(range(20)), 0.1, name=name and name + "-d", probe=0) as dataset:
            assert all(torch.equal(dataset[idx], value(idx)) for idx in [*range(20)] * 2)
            assert dataset.cache.stats().filled == 20


def test_caches_work_where_proc_is_hidden():
    libc = ctypes.CDLL(None)

    def hide():
        assert libc.unshare(CLONE_NEWNS) == 0
        assert libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None) == 0
        assert libc.mount(b"tmpfs", b"/proc", b"tmpfs", 0, None) == 0

    if in_child(hide) != 0:
        pytest.skip("needs root and mount namespaces")
    assert in_child(lambda: (hide(), use_caches())) == 0


def test_caches_work_without_dev_shm(monkeypatch, caplog):
    monkeypatch.setattr(limits, "SHM_DIR", "/no/such/dir")
    use_caches()
    assert re.search("Cache 'test-moments-hidden' is not shared.*/no/such/dir", caplog.text)


def test_readers_order_their_loads_where_the_processor_does_not(monkeypatch):
    fence()
    assert in_child(fence) == 0  # it takes no lock of others
    ordered = []
    monkeypatch.setattr(base, "WEAKLY_ORDERED", True)
    monkeypatch.setattr(base, "fence", lambda: ordered.append(1))
    out = [torch.empty(2, 4, dtype=torch.uint8)]
    with SharedCache(1, N, (4,)) as cache:
        cache.set_slots([1, 2], torch.stack(values([1, 2])))
        for name, *arguments in (
            ("get_slot", 1), ("peek", 1), ("get_slots", [1, 2]), ("get_or_load", 1, value), ("get_or_load_many", [1, 2], list),
            ("fill_batch", [1, 2], out, list),
        ):  # fmt: skip
            ordered.clear()
            getattr(cache, name)(*arguments)
            assert ordered, name
