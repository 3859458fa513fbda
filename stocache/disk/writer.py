"""Write samples behind the process that loaded them: in a thread, within a bound of memory."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("stocache")

_MOST_BYTES = 64 << 20  # that wait to be written
_TOGETHER = 128  # samples that are written together
_LONGEST_S = 60.0  # to wait for a disk that does not take what is written
_DROP_EVERY = 32 << 20  # bytes, after which the pages that were written are dropped

_Publish = Callable[[list[int], list[Any], list[None]], None]


class BehindWriter:
    """Publishes samples in a thread, in the order in which they come. The thread ends when there is nothing to write.

    It is not a daemon: so a process that ends has written everything.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._tasks: deque[tuple[_Publish | None, int, Any]] = deque()
        self._bytes = 0
        self._thread: threading.Thread | None = None

    def put(self, publish: _Publish, idx: int, data: bytes) -> None:
        """Have ``publish`` called with a sample. Wait if too much is waiting already; do without it if the disk hangs."""
        self._enter_process()
        deadline = time.monotonic() + _LONGEST_S
        with self._changed:
            while self._bytes > _MOST_BYTES and time.monotonic() < deadline:
                self._changed.wait(1.0)
            if self._bytes <= _MOST_BYTES:
                self._add(publish, idx, data)

    def then(self, act: Callable[[], None]) -> None:
        """Have ``act`` called after all that was put before."""
        self._enter_process()
        with self._changed:
            if self._tasks or self._thread is not None:
                self._add(None, 0, act)
                return
        act()

    def flush(self) -> None:
        """Wait until everything is written; 60 seconds at most."""
        self._enter_process()
        deadline = time.monotonic() + _LONGEST_S
        with self._changed:
            while self._thread is not None and time.monotonic() < deadline and self._thread is not threading.current_thread():
                self._changed.wait(1.0)

    def _enter_process(self) -> None:
        if self._pid != os.getpid():  # a forked child: what its parent has to write is not for it to write
            self._begin()

    def _add(self, publish: _Publish | None, idx: int, data: Any) -> None:
        self._tasks.append((publish, idx, data))
        self._bytes += len(data) if publish is not None else 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stocache writes to disk")
            self._thread.start()

    def _run(self) -> None:
        while batch := self._next():
            publish = batch[0][0]
            try:
                if publish is None:
                    batch[0][2]()
                else:
                    publish([idx for _, idx, _ in batch], [[data] for _, _, data in batch], [None] * len(batch))
            except Exception as error:  # the next ones may go well; a sample that is missing is loaded again
                logger.debug("not written: %s", error)
            with self._changed:
                self._bytes -= sum(len(data) for publish, _, data in batch if publish is not None)
                self._changed.notify_all()

    def _next(self) -> list[tuple[_Publish | None, int, Any]]:
        """Return samples to write together, or one other task; nothing if there is nothing more to do."""
        with self._changed:
            batch: list[tuple[_Publish | None, int, Any]] = []
            while self._tasks and len(batch) < _TOGETHER and (not batch or (batch[0][0] and self._tasks[0][0])):
                batch.append(self._tasks.popleft())
            if not batch:
                self._thread = None
                self._changed.notify_all()
            return batch
