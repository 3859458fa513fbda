"""Work behind the caller, in daemon threads that end before the interpreter ends.

NOTE [ Threads at exit ]
    A daemon thread does not keep the program from ending. But before Python 3.14, a thread that requests the GIL of an
    interpreter that is shutting down is ended inside that request (see PyEval_RestoreThread in Python's documentation). If the
    request comes from C++ code, such as torch's, the whole process aborts: "terminate called without an active exception". So
    when the program ends, the threads of `start_daemon`, also the threads whose owner is gone, are stopped after their current
    task, such as a user's slow sample, and waited for, 10 seconds in all.

NOTE [ Finishing at exit ]
    What waits to be written is written before the process ends, also in a worker of a DataLoader. Such a worker calls no
    function of `atexit`, and closes its shared memory before Python waits for threads; so a finalizer of multiprocessing, which
    runs before that, waits for the writing. A disk that hangs is waited for 60 seconds.
"""

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from multiprocessing import util
from typing import Any

logger = logging.getLogger("stocache")

_TASK_S = 10.0  # to wait at exit for the current tasks of all threads
_IDLE_S = 0.2  # after which a thread ends
_LONGEST_S = 60.0  # to wait for a disk that accepts no writes

_running: dict[threading.Thread, Callable[[], None]] = {}


def start_daemon(
    run: Callable[..., None], arguments: tuple[object, ...], name: str, stop: Callable[[], None]
) -> threading.Thread:
    """Start a thread, which ``stop()`` ends when the program ends. Raises RuntimeError if it cannot be started."""

    def run_and_forget() -> None:
        try:
            run(*arguments)
        finally:
            del _running[thread]

    thread = threading.Thread(target=run_and_forget, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except RuntimeError:
        del _running[thread]
        raise
    return thread


def join_all(threads: Iterable[threading.Thread], patience_s: float) -> None:
    """Wait for several threads, at most ``patience_s`` in all."""
    until = time.monotonic() + patience_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


class Background:
    """Works through tasks in one daemon thread, in order. The thread ends when no task came for a while.

    If no thread can be started, the caller does the work. A forked child begins without tasks: its parent has them.

    Args:
        name: of the thread.
        work: called with a list of tasks, which it must not keep; by default it calls each. Errors are logged at level debug.
        together: how many tasks ``work`` may get at once.
        enough: the sum of sizes that wakes the thread; less waits for more tasks.
        most: the sum of sizes that may wait; `put` waits while there is more.
        idle_s: seconds without a task after which the thread ends; None keeps it until `stop`.
        last: called in the thread when it is stopped.
        finishes: whether a process that ends finishes the tasks; see NOTE [ Finishing at exit ]. Others are dropped.
    """

    _getpid = staticmethod(os.getpid)  # an object that is finalized last may find the names of modules gone

    def __init__(
        self,
        name: str,
        work: Callable[[list[Any]], None] | None = None,
        *,
        together: int = 1,
        enough: int = 0,
        most: float = math.inf,
        idle_s: float | None = _IDLE_S,
        last: Callable[[], None] | None = None,
        finishes: bool = False,
    ) -> None:
        self._name, self._work, self._together = name, work or _call_each, together
        self._enough, self._most, self._idle_s, self._last, self._finishes = enough, most, idle_s, last, finishes
        self._begin()

    def _begin(self) -> None:
        self._pid = self._getpid()
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Any, int]] = deque()
        self._size = self._flushing = 0
        self._working = self._held = False
        self._thread: threading.Thread | None = None

    def _enter_process(self) -> None:
        if self._pid != self._getpid():  # a forked child
            self._begin()

    def put(self, task: object, size: int = 0) -> None:
        """Have a task worked on. A task with a size waits for room, 60 seconds at most, and is dropped then."""
        self._enter_process()
        with self._changed:
            if size and not self._changed.wait_for(lambda: self._size <= self._most, _LONGEST_S):
                return
            self._tasks.append((task, size))
            self._size += size
            if self._thread is None:
                self._start()
            elif self._size >= self._enough:
                self._changed.notify_all()

    def _start(self) -> None:
        if self._finishes:
            finishing = _finishing.setdefault(self._pid, weakref.WeakSet())
            if not finishing:  # not before: a process that is spawned forgets its finalizers after unpickling
                util.Finalize(None, _flush_all, exitpriority=0)
            finishing.add(self)
        try:
            self._thread = start_daemon(self._run, (), self._name, self._end)
        except RuntimeError:  # the machine, or an interpreter that goes down, has no more threads
            while taken := self._take():
                self._work_on(taken)

    def submit(self, function: Callable[..., object], *arguments: Any) -> "Future[Any]":
        """Have a function called. Return its result to come, which `stop` cancels."""
        call = _Call(Future(), partial(function, *arguments))
        self.put(call)
        return call.future

    def flush(self) -> None:
        """Wait until all tasks are done, 60 seconds at most. The thread itself does not wait."""
        self._enter_process()
        with self._changed:
            if self._thread is not None and self._thread is threading.current_thread():
                return
            self._flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._thread is None or not (self._tasks or self._working), _LONGEST_S)
            finally:
                self._flushing -= 1

    def hold(self, held: bool) -> None:
        """Begin no task until ``hold(False)``. Return when the current one is done."""
        self._enter_process()
        with self._changed:
            self._held = held
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (held and self._working))

    def stop(self, timeout_s: float | None = 0.0) -> None:
        """Drop the tasks that wait, and end the thread after its current task. Wait ``timeout_s`` for that."""
        self._enter_process()
        with self._changed:
            self._idle_s, self._held = 0.0, False
            for task, size in self._tasks:
                self._size -= size
                if isinstance(task, _Call):
                    task.future.cancel()
            self._tasks.clear()
            if self._last is not None and self._thread is not None:
                self.put(self._last)
            self._changed.notify_all()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _end(self) -> None:
        """End the thread, because the program ends."""
        if self._finishes:
            self.flush()
        self.stop()

    def _run(self) -> None:
        try:
            while taken := self._wait():
                self._work_on(taken)
                del taken  # what a task refers to may end with it
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # it was interrupted
                    self._thread = None
                    self._changed.notify_all()

    def _wait(self) -> list[tuple[Any, int]]:
        """Wait for tasks, and take some. Return none if none came for a while."""
        with self._changed:
            self._changed.wait_for(self._goes_on, self._idle_s)
            taken = self._take()
            if not taken:
                self._thread = None
                self._changed.notify_all()
            return taken

    def _goes_on(self) -> bool:
        return (bool(self._tasks) and not self._held) or self._flushing > 0 or self._idle_s == 0.0

    def _take(self) -> list[tuple[Any, int]]:
        taken = [self._tasks.popleft() for _ in range(min(self._together, len(self._tasks)))]
        self._working = bool(taken)
        return taken

    def _work_on(self, taken: list[tuple[Any, int]]) -> None:
        try:
            self._work([task for task, _ in taken])
        except Exception as error:
            logger.debug("%s: %s", self._name, str(error))
        finally:
            with self._changed:
                self._working = False
                self._size -= sum(size for _, size in taken)
                self._changed.notify_all()


class _Call:
    """A task whose result somebody may wait for."""

    def __init__(self, future: "Future[Any]", function: Callable[[], object]) -> None:
        self.future, self._function = future, function

    def __call__(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                result = self._function()
            except BaseException as error:
                self.future.set_exception(error)
                self = None  # type: ignore[assignment]  # the error refers to this frame: it would be a cycle
            else:
                self.future.set_result(result)


def _call_each(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()


_finishing: dict[int, "weakref.WeakSet[Background]"] = {}  # by process


def _flush_all() -> None:
    for background in list(_finishing.get(os.getpid(), ())):
        background.flush()


@atexit.register
def _end_all() -> None:
    running = [(thread, stop) for thread, stop in list(_running.items()) if thread.is_alive()]  # forked children have none
    for _, stop in running:
        stop()
    join_all([thread for thread, _ in running], _TASK_S)
