"""Write samples behind the process that loaded them: in a thread, within a bound of memory.

NOTE [ Writing at exit ]
    A process writes its waiting samples before it ends, a worker of a DataLoader as well. Such a worker closes its shared
    memory before Python waits for threads; so the threads are daemons, and a finalizer of multiprocessing, which runs before
    that, waits for them. A disk that hangs is waited for 60 seconds.
"""

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import util
from typing import Any, NamedTuple

from stocache.errors import ClosedError

logger = logging.getLogger("stocache")

_MOST_BYTES = 64 << 20  # that wait to be written
_TOGETHER = 128  # samples that are written together
_ENOUGH_BYTES = 4 << 20  # are written at once; fewer wait for others
_REST_S = 0.002
_IDLE_S = 0.2  # after which the thread ends
_LONGEST_S = 60.0  # to wait for a disk that accepts no writes

_Publish = Callable[[list[int], list[Any], list[None]], None]


class _Sample(NamedTuple):
    publish: _Publish
    wanted: Callable[[int], bool]
    idx: int
    data: bytes


class BehindWriter:
    """Publishes samples in a thread, in the order in which they come. The thread ends when there is nothing to write.

    See NOTE [ Writing at exit ].
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._tasks: deque[_Sample | Callable[[], None]] = deque()
        self._bytes = self._flushing = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def put(self, publish: _Publish, wanted: Callable[[int], bool], idx: int, data: bytes) -> None:
        """Have ``publish`` called with a sample if it is ``wanted`` then. Wait if too much is waiting already.

        If the disk accepts no writes for `_LONGEST_S`, the sample is not written.
        """
        self._enter_process()
        with self._changed:
            if self._changed.wait_for(lambda: self._bytes <= _MOST_BYTES, _LONGEST_S):
                self._bytes += len(data)
                self._add(_Sample(publish, wanted, idx, data))

    def then(self, act: Callable[[], None]) -> None:
        """Have ``act`` called after all samples that were put before are written."""
        self._enter_process()
        with self._changed:
            if self._tasks or self._is_writing:
                self._add(act)
                return
        act()

    def flush(self) -> None:
        """Wait until everything is written; 60 seconds at most."""
        self._enter_process()
        with self._changed:
            if self._thread is threading.current_thread():
                return
            self._flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._tasks and not self._is_writing, _LONGEST_S)
            self._flushing -= 1

    def _enter_process(self) -> None:
        if self._pid != os.getpid():  # a forked child: its parent writes its own samples
            _writers.clear()
            self._begin()

    def _add(self, task: _Sample | Callable[[], None]) -> None:
        self._tasks.append(task)
        if self._thread is None:
            if not _writers:  # not before: a process that is spawned forgets its finalizers after unpickling
                util.Finalize(None, _flush_all, exitpriority=0)
            _writers.add(self)
            self._thread = threading.Thread(target=self._run, name="stocache writes to disk", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the machine, or an interpreter that goes down, gives no more threads
                self._thread = None
                self._write()
        elif self._bytes >= _ENOUGH_BYTES:
            self._changed.notify_all()

    def _run(self) -> None:
        while self._wait():
            self._write()

    def _write(self) -> None:
        samples, acts = self._take()
        try:
            _publish(samples)
        except Exception as error:  # the next ones may succeed; a sample that is missing is loaded again
            logger.debug("not written: %s", error)
        for act in acts:
            with contextlib.suppress(ClosedError):  # while the disk did not take the samples before
                act()
        with self._changed:
            self._is_writing = False
            self._bytes -= sum(len(sample.data) for sample in samples)
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for tasks, and for others that may come behind them. Return False if none came for a while."""
        with self._changed:
            if not self._tasks:
                self._changed.wait_for(lambda: self._tasks or self._flushing, _IDLE_S)
                if not self._tasks:
                    self._thread = None
                    return False
                self._changed.wait_for(lambda: self._bytes >= _ENOUGH_BYTES or self._flushing, _REST_S)
            self._is_writing = True
            return True

    def _take(self) -> tuple[list[_Sample], list[Callable[[], None]]]:
        """Take samples to write together, and the callbacks to call after them."""
        samples, acts = list[_Sample](), list[Callable[[], None]]()
        with self._changed:
            while self._tasks and len(samples) < _TOGETHER:
                task = self._tasks.popleft()
                if isinstance(task, _Sample):
                    samples.append(task)
                else:
                    acts.append(task)
        return samples, acts


def _publish(samples: list[_Sample]) -> None:
    wanted = [sample for sample in samples if sample.wanted(sample.idx)]
    if wanted:
        samples[0].publish([sample.idx for sample in wanted], [[sample.data] for sample in wanted], [None] * len(wanted))


_writers: "weakref.WeakSet[BehindWriter]" = weakref.WeakSet()  # of this process


def _flush_all() -> None:
    for writer in list(_writers):
        writer.flush()
