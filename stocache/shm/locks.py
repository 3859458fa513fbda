"""Lock parts of a segment, and keep the order of loads and stores in it.

NOTE [ Kernel file locks ]
    All locks are fcntl locks (POSIX record locks) on byte ranges far beyond the end of the file. The kernel drops them when
    their process ends, however it ends, so a SIGKILL does not leave a lock behind. They belong to the process: `Segment.guard`
    is for its threads, and a forked child does not own the locks of its parent. Closing *any* descriptor of the file drops all
    of them. So a process has one `Segment` per file, and all its descriptors of the file live as long as that.
    The duplicate inside Python's mmap (until 3.13) lives as long as the last view, which may be longer.

NOTE [ Reading in order ]
    A reader loads the state byte of a sample, and then, if it is SET, the bytes of the sample. x86 performs loads in program
    order. ARM, POWER and RISC-V may perform the second load first, although it depends on a comparison of the first: a control
    dependency orders later stores, not later loads. A reader could then find the byte set and the sample not written.

    So on these CPUs a reader releases a lock and takes it again between the two loads. A release waits for all earlier
    loads and stores. Later ones wait for an acquire. And a release is performed before an acquire that follows it (on ARMv8,
    STLR and LDAR; section B2.3.11 of the Arm Architecture Reference Manual). No other thread knows this lock, because a
    contended lock may be taken without these instructions. The writer does the same between its stores, on every CPU
    (NOTE [ Publishing a slot ]).
"""

import logging
import platform
import time
from _thread import allocate_lock
from collections.abc import Callable
from typing import TypeVar

from stocache.system.platform import here
from stocache.system.waiting import LOCK_TIMEOUT_S, describe_process, wait_until

logger = logging.getLogger("stocache")

# File locks need no bytes behind them, so each kind of lock has its own range of offsets.
ROW_LOCKS, EXTENTS_LOCK, OWNER_LOCKS = 1 << 40, 1 << 41, 1 << 42

WEAKLY_ORDERED = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")
"""Whether a reader needs `fence` on this CPU."""

_WAITED_TO_IDLE = 6.0  # back-off: after waits of t seconds for a process, do not wait for it again for 6 t

_Result = TypeVar("_Result")


def fence() -> None:
    """Perform all loads and stores before this call before all those after it; see NOTE [ Reading in order ]."""
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class FileLocks:
    """The locks of one file, as one process sees them. Call the methods with the segment's guard held.

    Args:
        fds: descriptors of the file, of which the first is used.
        where: where the file is, for a warning.
    """

    def __init__(self, fds: list[int], where: str) -> None:
        self._fds, self._where = fds or [-1], where  # the platform has no locks of bytes if segments have no file
        self._timed_out: dict[int, tuple[float, float]] = {}  # by process that held a lock: when to wait again; seconds waited
        self._warned_of: set[int] = set()  # processes

    def take(self, offset: int) -> bool:
        """Take a lock; False if another process has it."""
        return here.lock_byte(self._fds[0], offset)

    def release(self, offset: int) -> None:
        """Release a lock, if this process has it."""
        here.unlock_byte(self._fds[0], offset)

    def run(self, offset: int, work: Callable[[], _Result], late: _Result) -> _Result:
        """Return ``work()``, run with a lock held that is usually held for microseconds. Not reentrant.

        Return ``late``, with a warning, if another process holds it for `LOCK_TIMEOUT_S`.
        """
        try:
            try:
                return work() if self._wait(offset) else late
            finally:
                self.release(offset)
        except BaseException:  # an interrupt may have come before the lock was released
            self.release(offset)
            raise

    def _wait(self, offset: int) -> bool:
        if self.take(offset):
            return True
        pid = self.wait_for(offset, lambda: self.take(offset), LOCK_TIMEOUT_S)
        if pid is not None and pid not in self._warned_of:
            self._warned_of.add(pid)
            logger.warning(
                "%s has kept a lock of the cache in %s for %.0f s, which should take microseconds. Samples that need it stay "
                "uncached, training goes on. Resume or end that process.",
                describe_process(pid), self._where, LOCK_TIMEOUT_S,
            )  # fmt: skip
        return pid is None

    def wait_for(self, offset: int, ready: Callable[[], bool], timeout_s: float) -> int | None:
        """Wait until ``ready()``, and return None. After ``timeout_s`` return the process that has the lock; 0 if not visible.

        Back-off: after a timeout, the same process is not waited for during `_WAITED_TO_IDLE` times the time waited for it.
        The guard need not be held.
        """
        pid = self.holder_of(offset)
        again_at, _ = self._timed_out.get(pid, (0.0, 0.0))
        if time.monotonic() < again_at:
            return None if ready() else pid
        if wait_until(ready, timeout_s) or not timeout_s or ready():
            return None
        pid = self.holder_of(offset)
        _, waited_s = self._timed_out.get(pid, (0.0, 0.0))
        waited_s += timeout_s
        self._timed_out[pid] = time.monotonic() + _WAITED_TO_IDLE * waited_s, waited_s
        return pid

    def is_free(self, offset: int) -> bool:
        """Return whether no other process has a lock."""
        return here.holder_of_byte(self._fds[0], offset) is None

    def holder_of(self, offset: int) -> int:
        """Return the process that has a lock; 0 if it is not visible from here, or the lock is free."""
        return here.holder_of_byte(self._fds[0], offset) or 0
