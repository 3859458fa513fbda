"""Bad moments: interrupts, garbage collections and kills at every step of what takes locks, and processes that are stopped."""

import contextlib
import dis
import fcntl
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch

from stocache import BusyError, RaggedCache, SharedCache, SharedCacheDDP, StorageError, prepare
from stocache.cache import base
from stocache.cache.arena import Arena
from stocache.cache.slots import SlotArrays
from stocache.shm import registry, segment
from stocache.shm.segment import Segment
from stocache.storage import local, remote
from stocache.system import waiting
from tests.support.faults import claimed
from tests.support.processes import in_child

NAME, N = "test-moments", 6
TRACED = (
    "directory.py",
    "named.py",
    "segment.py",
    "layout.py",
    "arena.py",
    "admission.py",
    "protocol.py",
    "contextlib.py",
    "weakref.py",
)

# After these, CPython looks for signals, and runs what the garbage collector has found
_STOPS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


class at_step:
    """Run an action at the k-th step within stocache (and what it calls of the standard library) at which a signal may come."""

    def __init__(self, k, action):
        if sys.version_info < (3, 11):
            pytest.skip("Python 3.10 has other instructions")
        self.left, self.action, self.came = k, action, False
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
        if event == "opcode" and frame.f_lasti in self._stops_in(frame.f_code) and not self.came:
            self.left -= 1
            if self.left < 0:
                self.came = True
                self.action()
        return self._step

    def _stops_in(self, code):
        if code not in self._stops:
            instructions = list(dis.get_instructions(code))
            pairs = [
                (before.offset, after.offset) for before, after in itertools.pairwise(instructions) if before.opname in _STOPS
            ]
            # A signal is raised at the call, a trace function at the step after it: the same only under the same handler
            self._stops[code] = {after for before, after in pairs if handler_at(code, before) == handler_at(code, after)}
        return self._stops[code]


def handler_at(code, offset):
    """Return where an exception that is raised at an instruction is handled."""
    entries = dis._parse_exception_table(code)
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


def interrupt():
    raise KeyboardInterrupt


def make(**options):
    return SharedCacheDDP(1, N, (4,), **{"name": NAME} | options)


def value(idx):
    return torch.full((4,), idx + 1, dtype=torch.uint8)


def is_locked(path):
    """Whether the lock of a directory is taken; by whomever."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def remove_leftover():
    Path(registry.path_of(NAME)).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.rmdir(registry.directory_of())


@pytest.fixture(autouse=True)
def _clean():
    yield
    gc.collect()
    remove_leftover()


def steps_of(work):
    """Return how many steps ``work`` takes at which a signal may come."""
    with at_step(1 << 60, interrupt) as counted:
        work()
    return (1 << 60) - counted.left


# ---------------------------------------------------------------------------------------------------- interrupts


def open_and_close():
    with make() as cache:
        cache.get_or_load(1, value)


def open_twice():
    with make() as first, make() as second:
        assert first.array.data_ptr() == second.array.data_ptr()


def take_over():
    open_and_close()


EVERY = [pytest.param(10, marks=pytest.mark.slow), 40]  # steps between two trials; all of them take minutes


unraisable = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts of finalizers


@unraisable
@pytest.mark.leaves_descriptors  # an interrupt may come between the opening of a file and its first name: it has no lock yet
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("work", [open_and_close, open_twice, take_over])
def test_an_interrupt_at_any_step_leaves_no_lock(work, every, caplog):
    caplog.set_level(logging.ERROR, "stocache")
    work()
    steps = steps_of(work)
    assert steps > 100
    kept = []  # as a notebook keeps the last error, and with it all frames
    for k in range(0, steps, every):
        if work is take_over:
            in_child(lambda: (make(persist=True), os.kill(os.getpid(), signal.SIGKILL)))
        with at_step(k, interrupt):
            try:
                work()
            except KeyboardInterrupt as error:
                kept.append(error)
        assert not is_locked(registry.directory_of()), f"step {k} of {steps}"
        assert not registry.attaching.locked(), f"step {k} of {steps}"
        if k % 20 == 0:
            assert in_child(open_and_close) == 0
        if work is take_over:
            remove_leftover()
    assert kept
    kept.clear()
    gc.collect()
    segment._leave_all()
    open_and_close()
    assert not Path(registry.path_of(NAME)).exists()


def fill_and_clear(cache):
    cache.set_slot(0, value(0))
    cache.get_or_load(1, value)
    cache.get_or_load_many([2, 3], lambda indices: list(map(value, indices)))
    with cache.claim(0):
        pass
    cache.clear()


def is_free(cache):
    """Raise unless this process, which is another, can take every lock of a cache."""
    with cache._segment.guard:
        for number in range(N + 1):
            assert cache._segment.try_lock(number), f"lock {number} is taken"
        assert cache._segment._lock(segment._EXTENTS_LOCK)


@pytest.mark.leaves_descriptors
@unraisable
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", [lambda: SharedCache(1, N, (4,)), lambda: RaggedCache(1, N)], ids=["shared", "ragged"])
def test_an_interrupt_at_any_step_of_filling_leaves_no_lock_of_the_cache(kind, every):
    with kind() as cache:
        steps = steps_of(lambda: fill_and_clear(cache))
    kept = []
    for k in range(0, steps, every):
        with kind() as cache:
            with at_step(k, interrupt):
                try:
                    fill_and_clear(cache)
                except KeyboardInterrupt as error:
                    kept.append(error)
            assert not cache._segment.guard.locked(), f"step {k}"
            assert in_child(is_free, cache) == 0, f"step {k} of {steps}"
            for idx in range(N):
                found = cache.get_slot(idx)
                assert found is None or torch.equal(found, value(idx))
    kept.clear()


# ---------------------------------------------------------------------------------------------------- garbage


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has other instructions")
@pytest.mark.parametrize("every", EVERY)
def test_a_collection_at_any_step_leaves_what_is_gone_without_waiting_for_itself(every):
    def drop():
        cache = make(name="test-moments-gone")
        cache.itself = cache
        cache.set_slot(1, value(1))

    def trial(k):
        gc.freeze()  # or each collection walks through all that is imported
        gc.disable()
        drop()
        with at_step(k, gc.collect):
            open_and_close()
        gc.collect()
        assert not Path(registry.path_of("test-moments-gone")).exists(), "it was not left"

    def all_trials():
        for k in range(0, steps_of(open_and_close), every):
            trial(k)

    assert in_child(all_trials, timeout_s=300) == 0


def test_what_a_finalizer_cannot_do_now_is_done_later():
    done = []
    with registry.attaching:
        registry.when_free(lambda: done.append(1))
        assert not done
    registry.run_due_tasks()
    assert done == [1]


# ---------------------------------------------------------------------------------------------------- kills


def die():
    os.kill(os.getpid(), signal.SIGKILL)


SAMPLES = ["text", 7, {"a": torch.arange(5)}, [1.5, None], b"bytes" * 100, (1, "x")]


def again(cache):
    """Return a cache of the same memory that knows nothing yet, as in a new process."""
    fresh = RaggedCache.__new__(RaggedCache)
    fresh.__setstate__(cache.__getstate__())
    return fresh


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize("admission", ["all", "cost"])
def test_a_kill_at_any_step_of_clear_leaves_a_cache_that_works(admission, every):
    def fill(cache):
        for idx in range(N):
            for _ in range(3):
                cache.get_or_load(idx, lambda idx: SAMPLES[idx])

    with RaggedCache(1, N, admission=admission) as cache:
        fill(cache)
        steps = steps_of(cache.clear)

    def check(cache):
        fresh = again(cache)
        for idx in range(N):
            found = fresh.get_slot(idx)
            assert found is None or repr(found) == repr(SAMPLES[idx])
        fill(fresh)
        assert [repr(fresh.get_slot(idx)) for idx in range(N)] == list(map(repr, SAMPLES))

    for k in range(0, steps, every):
        with RaggedCache(1, N, admission=admission) as cache:
            fill(cache)

            def clear_and_die(cache=cache, k=k):
                with at_step(k, die):
                    cache.clear()

            assert in_child(clear_and_die) in (signal.SIGKILL, 0)
            if k % 4 == 0:
                assert in_child(check, cache) == 0, f"step {k} of {steps}"
            check(cache)


def test_clear_makes_room_again_where_samples_are_admitted_by_cost():
    with RaggedCache("40KB", 100, admission="cost") as cache:
        for _ in range(2):
            for idx in range(100):
                cache.get_or_load(idx, lambda idx: torch.zeros(100))
        kept = cache.stats().filled
        assert kept > 50
        cache.clear()
        for _ in range(2):
            for idx in range(100):
                cache.get_or_load(idx, lambda idx: torch.zeros(100))
        assert cache.stats().filled >= kept - 1


# ---------------------------------------------------------------------------------------------------- stopped processes


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(segment, "PATIENCE_S", 0.2)
    monkeypatch.setattr(registry, "PATIENCE_S", 0.2)


@contextlib.contextmanager
def stopped(action):
    """Fork a child that runs an action which stops it; give its pid, and then kill it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    try:
        assert os.WIFSTOPPED(status), "the child did not stop"
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_sample_stays_uncached_when_a_stopped_process_reserves_memory(impatient, monkeypatch, caplog):
    with SharedCache(1, N, (4,)) as cache:

        def reserve():
            monkeypatch.setattr(Segment, "_allocate", lambda *arguments: stop())
            cache.set_slot(0, value(0))

        with stopped(reserve) as pid:
            began = time.monotonic()
            for idx in range(1, N):
                assert torch.equal(cache.get_or_load(idx, value), value(idx))
            assert time.monotonic() - began < 5 * 0.2 + 3
            assert cache.stats().filled == 0
            assert f"process {pid} (" in caplog.text
            assert ", which is stopped has kept a lock of the cache" in caplog.text
            assert caplog.text.count("has kept a lock") == 1
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            for idx in range(N):
                cache.get_or_load(idx, value)
            assert cache.stats().filled == N


def test_a_sample_stays_uncached_when_a_stopped_process_has_the_arena(impatient, monkeypatch):
    with RaggedCache(1, N) as cache:
        cache.set_slot(0, "first")

        def append():
            monkeypatch.setattr(Arena, "take", lambda *arguments: stop())
            cache.set_slot(1, "second")

        with stopped(append):
            assert cache.get_or_load(2, str) == "2"
            assert cache.get_or_load(2, str) == "2"
            assert cache.get_slot(0) == "first"
            assert cache.stats().filled == 1
        assert cache.get_or_load(2, str) == "2"
        assert cache.stats().filled == 2


def test_a_stopped_process_that_loads_is_waited_for_once_and_not_for_each_sample(monkeypatch):
    with SharedCache(1, 64, (4,)) as cache:

        def load(indices):
            stop()
            return map(value, indices)

        with stopped(lambda: cache.get_or_load_many(range(64), load)):
            waits = []
            monkeypatch.setattr(segment, "wait_until", lambda ready, timeout_s: waits.append(timeout_s) or ready())
            samples = cache.get_or_load_many(range(64), lambda indices: list(map(value, indices)), timeout_s=0.3)
            assert [sample[0].item() for sample in samples] == [idx + 1 for idx in range(64)]
            assert waits == [0.3]
            assert cache.stats().filled == 64


def test_clear_says_which_stopped_process_is_writing(impatient, monkeypatch):
    with SharedCache(1, N, (4,)) as cache:
        cache.set_slot(0, value(0))

        def write():
            monkeypatch.setattr(SlotArrays, "write", lambda *arguments: stop())
            cache.set_slot(1, value(1))

        with stopped(write) as pid:
            with pytest.raises(BusyError, match=rf"clear: process {pid} \(.*\), which is stopped keeps the lock of a slot"):
                cache.clear()
            assert torch.equal(cache.get_slot(0), value(0))
        cache.clear()
        assert cache.get_slot(0) is None


def hold_directory():
    registry.run_locked(registry.directory_of(), lambda at: stop(), create=True)


def test_a_stopped_process_with_the_lock_of_the_directory_is_named(impatient, caplog):
    with stopped(hold_directory) as pid:
        message = rf"stocache-\d+ has been locked by process {pid} \(.*\), which is stopped since \d\d:\d\d:\d\d"
        with pytest.raises(BusyError, match=message):
            make(on_busy="raise")
        began = time.monotonic()
        with make() as cache:  # without a second wait
            assert cache.get_or_load(1, value)[0] == 2
            assert len(cache) == 0
        assert time.monotonic() - began < 5
        assert f"cache '{NAME}' holds nothing" in caplog.text
    with make() as cache:
        assert len(cache) == N


def test_a_wrong_choice_for_that_is_refused():
    with pytest.raises(ValueError, match=r"on_busy='wait' is unknown\. Use 'uncached' or 'raise'"):
        make(on_busy="wait")


def test_a_process_that_is_at_work_is_waited_for_longer(monkeypatch):
    monkeypatch.setattr(registry, "PATIENCE_S", 0.1)

    def work(at):
        os.write(begun, b"x")
        time.sleep(0.4)

    ready, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        registry.run_locked(registry.directory_of(), work, create=True)
        os._exit(0)
    os.read(ready, 1)
    with make(on_busy="raise") as cache:
        assert len(cache) == N
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(begun)


def test_leaving_does_not_wait_for_long(monkeypatch):
    monkeypatch.setattr(registry, "_LEAVING_S", 0.1)
    cache = make()
    with stopped(hold_directory):
        began = time.monotonic()
        cache.close()
        assert time.monotonic() - began < 5
    assert Path(registry.path_of(NAME)).exists()  # what the next one takes over
    with make() as cache:
        assert cache.stats().filled == 0


def test_a_process_is_described_as_far_as_it_can_be_seen(monkeypatch):
    assert waiting.describe_process(0) == waiting.describe_process(None) == "a process of another container"
    assert waiting.describe_process(2**22 + 1) == f"process {2**22 + 1}"
    assert waiting.describe_process(os.getpid()).startswith(f"process {os.getpid()} (")
    assert not waiting.is_at_work(2**22 + 1)
    assert waiting.is_at_work(os.getpid())


def test_a_stopped_process_that_fetches_a_file_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "_STANDSTILL_S", 0.2)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "block").write_bytes(b"content")
    folder = remote.RemoteStore(f"file://{tmp_path}/far", None)
    mirror = remote.Mirror(folder, str(tmp_path / "near"), "1GB")

    def fetch():
        monkeypatch.setattr(remote.RemoteStore, "get", lambda *arguments: stop())
        mirror.fetch("block")

    with stopped(fetch):
        path = Path(mirror.fetch("block"))
        assert path.read_bytes() == b"content"
    assert sorted(name.name for name in path.parent.iterdir()) == ["block", "block.part"]  # which the next fetch uses


def test_a_stopped_process_that_prepares_a_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "_REPORT_S", 0.05)
    monkeypatch.setattr(local, "_STANDSTILL_S", 0.3)

    def hold():
        with local.LocalStore(str(tmp_path)).locked():
            stop()

    with stopped(hold) as pid:
        message = rf"is being prepared by process {pid} \(.*\), which is stopped, which makes no progress"
        with pytest.raises(StorageError, match=message):
            prepare([torch.zeros(3)] * 4, tmp_path, num_workers=0, progress=False)
    prepare([torch.zeros(3)] * 4, tmp_path, num_workers=0, progress=False)


# ---------------------------------------------------------------------------------------------------- loads within loads


def test_two_samples_that_need_each_other_are_loaded_at_once(monkeypatch):
    barrier = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(segment, "wait_until", lambda *arguments: pytest.fail("waited"))
    loads = []

    def load(idx):
        loads.append(idx)
        if loads.count(idx) == 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait()
            cache.get_or_load(1 - idx, load)
        return value(idx)

    with SharedCache(1, N, (4,)) as cache:
        threads = [threading.Thread(target=cache.get_or_load, args=(idx, load)) for idx in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [cache.get_slot(idx)[0].item() for idx in (0, 1)] == [1, 2]


@pytest.mark.parametrize("many", [False, True])
def test_a_sample_that_is_asked_for_within_its_own_load_is_loaded(monkeypatch, many):
    monkeypatch.setattr(segment, "wait_until", lambda *arguments: pytest.fail("waited"))
    with SharedCache(1, N, (4,)) as cache:

        def load(idx):
            return cache.get_or_load(idx, value)

        def load_many(indices):
            return [cache.get_or_load_many([idx], lambda its: list(map(value, its)))[0] for idx in indices]

        if many:
            found = cache.get_or_load_many([2, 3], load_many)
            assert [sample[0].item() for sample in found] == [3, 4]
        else:
            assert torch.equal(cache.get_or_load(2, load), value(2))
        assert cache.stats().filled == (2 if many else 1)


def test_a_thread_waits_again_once_its_load_has_failed(monkeypatch):
    waits = []
    monkeypatch.setattr(segment, "wait_until", lambda *arguments: waits.append(arguments))
    with SharedCache(1, N, (4,)) as cache:
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            cache.get_or_load(1, lambda idx: 1 / 0)
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            cache.get_or_load_many([1, 2], lambda indices: (1 / 0 for _ in indices))
        with pytest.raises(ZeroDivisionError, match="division by zero"), cache.claim(1):
            raise ZeroDivisionError("division by zero")
        assert not waits
        with claimed(cache, 3):
            assert torch.equal(cache.get_or_load(3, value), value(3))
        assert len(waits) == 1


# ---------------------------------------------------------------------------------------------------- /proc, /dev/shm

CACHES = """
import logging, os, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
import torch
from stocache import CachedDataset, RaggedCache, SharedCache
for name in (None, "test-moments-hidden"):
    with SharedCache(1, 6, (4,), name=name) as cache:
        cache.get_or_load(1, lambda idx: torch.full((4,), idx, dtype=torch.uint8))
        assert cache.get_slot(1).tolist() == [1] * 4
        print(name, cache.stats().filled)
    with RaggedCache(1, 6, name=name and name + "-r") as cache:
        cache.get_or_load(1, str)
        assert cache.get_slot(1) == "1"
    with CachedDataset([torch.full((4,), idx) for idx in range(20)], 1, name=name and name + "-d") as dataset:
        for idx in range(20):
            assert dataset[idx].tolist() == [idx] * 4
        assert dataset.cache.stats().filled == 20
print("done")
"""

HIDE = {
    "proc": "mount -t tmpfs tmpfs /proc",
    "shm": "d=$(mktemp -d); mount -t tmpfs tmpfs $d; for f in null zero random urandom; do cp -a /dev/$f $d/; done; "
    "mount --bind $d /dev",
}


@pytest.mark.parametrize("what", HIDE)
def test_caches_work_where_it_is_hidden(what):
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c"]
    probe = subprocess.run([*command, HIDE[what]], capture_output=True, check=False)
    if os.geteuid() != 0 or probe.returncode:
        pytest.skip("needs root and mount namespaces")
    script = f'{HIDE[what]} && exec "$0" -c "$1"'
    result = subprocess.run(
        [*command, script, sys.executable, CACHES], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.stdout.endswith("done\n"), result.stdout + result.stderr
    assert ("There is no /dev/shm. Cache 'test-moments-hidden' is not shared" in result.stdout) == (what == "shm")


# ---------------------------------------------------------------------------------------------------- the order of loads


def test_readers_order_their_loads_where_the_processor_does_not(monkeypatch):
    ordered = []
    monkeypatch.setattr(base, "WEAKLY_ORDERED", True)
    monkeypatch.setattr(base, "order_loads", lambda: ordered.append(1))
    with SharedCache(1, N, (4,)) as shared, RaggedCache(1, N) as ragged:
        for cache in (shared, ragged):
            cache.set_slots([1, 2], torch.stack([value(1), value(2)]) if cache is shared else ["a", "b"])
            for read in (
                lambda cache=cache: cache.get_slot(1),
                lambda cache=cache: cache.peek(1),
                lambda cache=cache: cache.get_slots([1, 2]),
                lambda cache=cache: cache.get_or_load(1, value),
                lambda cache=cache: cache.get_or_load_many([1, 2], list),
            ):
                ordered.clear()
                read()
                assert ordered
        shared.fill_batch([1, 2], [torch.empty(2, 4, dtype=torch.uint8)], list)


def test_ordering_takes_no_lock_of_others():
    from stocache.shm.load_order import order_loads

    context = multiprocessing.get_context("fork")
    order_loads()
    child = context.Process(target=order_loads)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    child.close()
