"""Run tasks in threads that wait for them.

NOTE [ Threads that end ]
    The threads hold the queue of tasks, and not the object that the user holds. When that object dies, its finalizer stops the
    queue, and each thread ends after its task. The finalizer may run in any thread at any moment, so it takes no lock:
    the queue is made of deques and a SimpleQueue, whose ``put`` may interrupt itself. For the end of a program, see
    NOTE [ Threads at exit ].
"""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from stocache.errors import WorkerError
from stocache.system.background import join_all, start_daemon

_POLL_S = 0.001  # between looks whether another thread has taken its task

Task = Callable[[int], None]
"""Called with the number of the thread. It must not raise."""


class _Tasks:
    """The tasks that threads are to run: the urgent ones first, and each kind in order."""

    def __init__(self, count: int, most_others: int | None) -> None:
        self.count, self.stopped, self.ended = count, False, False  # ``ended``: whether a thread has
        self._urgent: deque[Task] = deque()
        self._others: deque[Task] = deque()
        self._own: list[deque[Task]] = [deque() for _ in range(count)]  # of each thread
        self._permits = deque([None] * (count if most_others is None else most_others))  # to run one of the others
        self._tokens: SimpleQueue[None] = SimpleQueue()  # one for each task, and one for each thread to end

    def put(self, task: Task, urgent: bool = True) -> None:
        (self._urgent if urgent else self._others).append(task)
        self._tokens.put(None)

    def put_own(self, task: Task, number: int) -> None:
        self._own[number].append(task)
        self._tokens.put(None)

    def take(self, number: int) -> Task | None:
        """Wait for a task of thread ``number``; None to end."""
        while True:
            self._tokens.get()
            if self.stopped:
                return None
            with contextlib.suppress(IndexError):
                return self._own[number].popleft()
            with contextlib.suppress(IndexError):
                return self._urgent.popleft()
            with contextlib.suppress(IndexError):
                self._permits.pop()
                try:
                    return partial(self._run_other, self._others.popleft())
                except IndexError:
                    self._release()
            if any(self._own):  # it was the token of a task for another thread, which may be busy
                self._tokens.put(None)
                time.sleep(_POLL_S)

    def _run_other(self, task: Task, number: int) -> None:
        try:
            task(number)
        finally:
            self._release()

    def _release(self) -> None:
        self._permits.append(None)
        if self._others:  # the thread that had its token may have found no permit
            self._tokens.put(None)

    def drop(self) -> None:
        self._urgent.clear()
        self._others.clear()
        for own in self._own:
            own.clear()

    def stop(self) -> None:
        self.stopped = True
        self.drop()
        for _ in range(self.count):
            self._tokens.put(None)


class WorkerThreads:
    """Threads that run tasks until this object dies, or is stopped.

    Args:
        count: number of threads.
        begin, end: called in each thread with its number, before its first task and after its last. They must not raise.
        most_others: how many tasks that are not urgent may run at a time. By default as many as there are threads.
        name: of the threads.

    Raises:
        WorkerError: a thread cannot be started.
    """

    def __init__(
        self, count: int, begin: Task, end: Task, most_others: int | None = None, name: str = "stocache worker"
    ) -> None:
        self._tasks, self.pid = _Tasks(count, most_others), os.getpid()
        self._threads: list[threading.Thread] = []
        began: SimpleQueue[None] = SimpleQueue()
        intra_op = torch.get_num_threads()
        weakref.finalize(self, self._tasks.stop).atexit = False
        try:
            for number in range(count):
                arguments = self._tasks, number, begin, end, began
                self._threads.append(start_daemon(_run, arguments, f"{name} {number}", self._tasks.stop))
        except RuntimeError as error:
            self._tasks.stop()
            raise WorkerError(f"the DataLoader cannot start worker thread {len(self._threads)} of {count}: {error}") from error
        finally:
            for _ in self._threads:
                began.get()
            torch.set_num_threads(intra_op)  # a worker has set 1 for itself, and for threads that begin later

    @property
    def put(self) -> Callable[..., None]:
        """A function that has a thread run a task, with ``urgent=False`` after others. It does not keep this object alive."""
        return self._tasks.put

    def put_own(self, task: Task, number: int) -> None:
        """Have the thread ``number`` run a task, after the one that it runs now."""
        self._tasks.put_own(task, number)

    def drop(self) -> None:
        """Drop all tasks that have not begun."""
        self._tasks.drop()

    @property
    def stopped(self) -> Callable[[], bool]:
        """A function that returns whether the threads were stopped. It does not keep this object alive."""
        tasks = self._tasks
        return lambda: tasks.stopped

    @property
    def ended(self) -> bool:
        """Whether a thread has ended, or was stopped; True in a forked child, which does not have the threads."""
        return self._tasks.stopped or self._tasks.ended or self.pid != os.getpid()

    def stop(self, patience_s: float = 0.0) -> None:
        """Drop all tasks that have not begun, and end the threads. Wait ``patience_s`` for tasks that have begun."""
        self._tasks.stop()
        if self.pid == os.getpid():
            join_all(self._threads, patience_s)


def stop_all(pools: Sequence[WorkerThreads], patience_s: float) -> None:
    """End the threads of several pools. Wait ``patience_s``, in all, for tasks that have begun."""
    until = time.monotonic() + patience_s
    for threads in pools:
        threads.stop()
    for threads in pools:
        threads.stop(max(0.0, until - time.monotonic()))


def _run(tasks: _Tasks, number: int, begin: Task, end: Task, began: "SimpleQueue[None]") -> None:
    try:
        torch.set_num_threads(1)
        began.put(None)
        begin(number)
        del begin
        while (task := tasks.take(number)) is not None:
            task(number)
            del task  # its result belongs to somebody else
        end(number)
    finally:
        tasks.ended = True


def wait_for(queue: "SimpleQueue[Any]", timeout_s: float) -> bool:
    """Wait until something is in a queue, and take it. Return False after ``timeout_s``; Ctrl-C interrupts the wait."""
    try:
        queue.get(timeout=timeout_s)
    except Empty:
        return False
    return True
