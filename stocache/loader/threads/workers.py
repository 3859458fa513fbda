"""Run tasks in threads that wait for them.

NOTE [ Threads that end ]
    The threads hold the queue of tasks, and not the object that the user holds. When that object dies, its finalizer stops the
    queue, and each thread ends after its task. The finalizer may run in any thread at any moment, so it takes no lock: it only
    clears lists, and each thread waits at a SimpleQueue, whose ``put`` may interrupt itself. For the end of a program, see
    NOTE [ Threads at exit ].
"""

import heapq
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count as count_up
from queue import Empty, SimpleQueue
from typing import Any

import torch

from stocache.errors import WorkerError
from stocache.system.background import join_all, start_daemon

Task = Callable[[int], None]
"""Called with the number of the thread. It must not raise."""


class Tasks:
    """The tasks that threads are to run. It does not keep the threads alive.

    A thread takes the tasks for itself first, then the tasks for any thread by batch, then the tasks that may wait.

    Attributes:
        stopped: whether the threads are to end.
        ended: whether one has.
    """

    def __init__(self, count: int) -> None:
        self.stopped = self.ended = False
        self._for_any: list[tuple[int, int, Task]] = []  # a heap
        self._numbers, self._lock = count_up(), threading.Lock()
        self._may_wait: deque[Task] = deque()
        self._own: list[deque[Task]] = [deque() for _ in range(count)]  # of each thread
        self._calls: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(count)]  # wake a thread
        self._idle: deque[int] = deque()  # threads that wait, or are about to

    def put(self, task: Task, thread: int | None = None, may_wait: bool = False, batch: int = 0) -> None:
        """Have a thread run a task. If it ``may_wait``, run it after the others.

        Args:
            thread: the number of the thread; None for any.
            batch: the number of its batch. Tasks of earlier batches are run first: samples that draw random numbers wait for
                these, and the tasks of a batch may come after the tasks of later ones.
        """
        if thread is not None:
            self._own[thread].append(task)
            self._calls[thread].put(None)
            return
        if may_wait:
            self._may_wait.append(task)
        else:
            with self._lock:
                heapq.heappush(self._for_any, (batch, next(self._numbers), task))
        self._call_one()

    def _call_one(self) -> None:
        if self._idle:
            with suppress(IndexError):
                self._calls[self._idle.popleft()].put(None)

    def take(self, thread: int) -> Task | None:
        """Wait for a task; return None when the thread is to end."""
        while not self.stopped:
            if (task := self._next(thread)) is not None:
                return task
            self._idle.append(thread)
            task = self._next(thread)  # which may have come before this thread was idle
            if task is None and not self.stopped:
                self._calls[thread].get()
            try:
                self._idle.remove(thread)
            except ValueError:
                if task is not None:  # this thread was called for a different one
                    self._call_one()
            if task is not None:
                return task
        return None

    def _next(self, thread: int) -> Task | None:
        with suppress(IndexError):
            return self._own[thread].popleft()
        with suppress(IndexError), self._lock:
            return heapq.heappop(self._for_any)[-1]
        with suppress(IndexError):
            return self._may_wait.popleft()
        return None

    def drop(self) -> None:
        """Drop all tasks that have not begun."""
        self._for_any.clear()
        for tasks in (*self._own, self._may_wait):
            tasks.clear()

    def stop(self) -> None:
        """Drop all tasks that have not begun, and end the threads."""
        self.stopped = True
        self.drop()
        for call in self._calls:
            call.put(None)


class WorkerThreads:
    """Threads that run tasks until this object dies, or is stopped.

    Args:
        count: number of threads.
        begin: called in each thread with its number, before its first task. It must not raise.
        end: called in each thread after its last task. It must not raise.
        patience_s: to wait for ``begin``.

    Attributes:
        tasks: the tasks that they run.

    Raises:
        WorkerError: a thread cannot be started.
    """

    def __init__(self, count: int, begin: Task, end: Callable[[], None], patience_s: float) -> None:
        self.tasks, self._pid = Tasks(count), os.getpid()
        self._threads: list[threading.Thread] = []
        began: SimpleQueue[None] = SimpleQueue()
        intra_op = torch.get_num_threads()
        weakref.finalize(self, self.tasks.stop).atexit = False
        try:
            for number in range(count):
                arguments: Any = self.tasks, number, begin, end, began
                self._threads.append(start_daemon(_run, arguments, f"stocache worker {number}", self.tasks.stop))
        except RuntimeError as error:
            self.tasks.stop()
            raise WorkerError(f"the DataLoader cannot start worker thread {len(self._threads)} of {count}: {error}") from error
        finally:
            with suppress(Empty):
                for _ in self._threads:
                    began.get(timeout=patience_s)
            torch.set_num_threads(intra_op)  # a worker has set 1 for itself, and for threads that begin later

    @property
    def ended(self) -> bool:
        """Whether a thread has ended, or was stopped; True in a forked child, which does not have the threads."""
        return self.tasks.stopped or self.tasks.ended or self._pid != os.getpid()

    def stop(self, patience_s: float = 0.0) -> None:
        """Drop all tasks that have not begun, and end the threads. Wait ``patience_s`` for tasks that have begun."""
        self.tasks.stop()
        if self._pid == os.getpid():
            join_all(self._threads, patience_s)


def _run(tasks: Tasks, number: int, begin: Task, end: Callable[[], None], began: "SimpleQueue[None]") -> None:
    try:
        torch.set_num_threads(1)
        begin(number)
        began.put(None)
        del begin
        while (task := tasks.take(number)) is not None:
            task(number)
            del task  # its result belongs to somebody else
        end()
    finally:
        tasks.ended = True
        tasks.drop()  # which came from a task of another thread meanwhile
