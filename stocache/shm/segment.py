"""Share a segment of memory between processes: reserve it before it is written, lock parts of it, and count in it.

NOTE [ Kernel file locks ]
    All locks are fcntl locks (POSIX record locks) on byte ranges far beyond the end of the file. The kernel drops them when
    their process ends, however it ends, so a SIGKILL does not leave a lock behind. They belong to the process: `Segment.guard`
    is for its threads, and a forked child does not own the locks of its parent. Closing *any* descriptor of the file drops all
    of them. So a process has one `Segment` per file (`_attached`), and all its descriptors of the file live as long as that.
    The duplicate inside Python's mmap (until 3.13) lives as long as the last view, which may be longer.
"""

import contextlib
import errno
import fcntl
import functools
import logging
import mmap
import os
import re
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import util
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeVar

from stocache.errors import SegmentError
from stocache.shm import registry
from stocache.shm.layout import (
    COUNTER_ROWS,
    COUNTER_WORDS,
    COUNTERS_AT,
    EXTENTS_AT,
    HUGE_PAGE,
    LIMIT,
    LIMIT_AT,
    PERSISTS_AT,
    RANKS_AT,
    REFUSED_EXTENT,
    RESERVED_EXTENT,
    UNRESERVED_EXTENT,
    WARNED_AT,
    Layout,
    sum_rows,
)
from stocache.system import limits
from stocache.system.limits import MIB, format_size
from stocache.system.waiting import LOCK_TIMEOUT_S, FileKey, describe_process, identify, wait_until

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("stocache")

# File locks need no bytes behind them, so each kind of lock has its own range of offsets.
ROW_LOCKS, _EXTENTS_LOCK, _OWNER_LOCKS, _CLAIM_LOCKS = 1 << 40, 1 << 41, 1 << 42, 1 << 43

_REFUSED_WARNING, REJECTED_WARNING, DISK_WARNING = 1, 2, 4  # bits of the byte of given warnings

_GENERATION, _GENERATIONS = COUNTER_WORDS - 1, 1 << 20  # a word of a counter row, and how many values of it differ

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: kind, whence, start, length, process
_WAITED_TO_IDLE = 6.0  # back-off: after waits of t seconds for a process, do not wait for it again for 6 t

_AT_ONCE = 16 * MIB  # bytes that are reserved under one lock
_LOOKED_AT_EVERY = 16 * MIB  # bytes that a process reserves at most before it looks again how much memory is left
MOST_BUFFERS = 1024  # the most that one pwritev takes: IOV_MAX of Linux
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet named in the mmap module

_Result = TypeVar("_Result")

FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether Python runs without the GIL: then ``x[0] += 1`` of two threads may count once."""

_attached: "weakref.WeakValueDictionary[FileKey, Segment]" = weakref.WeakValueDictionary()
_to_leave: dict[FileKey, Callable[[], None]] = {}  # tasks that leave named segments: an interrupt may have stopped one
_mapped: "weakref.WeakValueDictionary[FileKey, mmap.mmap]" = weakref.WeakValueDictionary()


class Segment:
    """Memory shared by this process and all processes that it is sent to. It lives until the last of them releases it.

    Attributes:
        control: bytes of the owner, always reserved.
        counters: `COUNTER_WORDS` words of 64 bits that only this process writes; `totals` sums them over all processes, also
            past ones. The last one is the generation of the row.
        extents: the state of each extent of the data, a byte of `layout`. Read it only.
        holder: a number that identifies this process among all that have ever attached. 0 if too many are attached.
        guard: lock for the threads of this process. Take it before `try_lock` and `reserve`.
        fence: a lock that this process always holds. A thread that holds the guard releases it and takes it again, to order
            stores.
        backing: "/dev/shm", "memfd", or "none" if the machine gives no shared memory; then it has control bytes, but no data.
        rank: a number of this process's rank among those that share a segment without a name; else 0.
    """

    control: memoryview
    counters: memoryview
    extents: memoryview
    guard: threading.Lock
    fence: threading.Lock
    rank: int = 0

    def __init__(self, fds: list[int], layout: Layout, backing: str, path: str | None = None) -> None:
        self.layout, self.backing, self.path = layout, backing, path
        self.data_bytes, self.extent_bytes = layout.data_bytes, layout.extent_bytes
        self._data_at = layout.data_at
        self._fds = fds  # ours from here on, whatever happens: code that closes one removes it from the list
        if self._fds:
            self._key = identify(fds[0])
            task = functools.partial(_leave, self._key, fds, path)
            if path is not None:
                _to_leave[self._key] = task
            weakref.finalize(self, registry.when_free, task).atexit = False  # see _leave_at_exit
        self._mmap = self._map()
        self._huge = self.data_bytes >= HUGE_PAGE and self._ask_for_huge_pages()
        self._bytes = memoryview(self._mmap)
        self.extents = self._bytes[EXTENTS_AT : layout.control_at]
        self.control = self._bytes[layout.control_at : layout.control_at + layout.control_bytes]
        self._enter_process()
        if self._fds:
            _watch_processes()
            _attached[self._key] = self

    def _map(self) -> mmap.mmap:
        if not self._fds:
            return mmap.mmap(-1, self.layout.size)
        mapping = _mapped.get(self._key)  # views may have kept the mapping of an earlier attachment
        if mapping is None:
            options: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # no duplicate of the descriptor
            if self.path is None:
                mapping = mmap.mmap(self._fds[0], self.layout.size, **options)
            else:  # a mapping keeps its open file description, and with it a flock: it needs one of its own
                path = f"/proc/self/fd/{self._fds[0]}"
                with open(path if os.path.exists(path) else self.path, "r+b", buffering=0) as file:
                    if identify(file.fileno()) != self._key:
                        raise SegmentError(f"{self.path} was replaced while it was opened.")
                    mapping = mmap.mmap(file.fileno(), self.layout.size, **options)
            _mapped[self._key] = mapping
        return mapping

    def _enter_process(self) -> None:
        """Take a counter row and fresh locks: when attaching, and again in each forked child."""
        self.guard, self.fence, self._counting = threading.Lock(), threading.Lock(), threading.Lock()
        self.fence.acquire()
        self._claims: set[int] = set()
        self._known_spare = 0  # bytes of memory that this process may reserve before it looks again how much is left
        self._timed_out: dict[int, tuple[float, float]] = {}  # by process that held a lock: when to wait again; seconds waited
        self._warned_of: set[int] = set()  # processes
        # A process reuses the counter row of one that has exited, and keeps adding to it. The last row is shared by all
        # processes that find the others taken; races may lose some of its counts.
        if self._fds:
            row = next((row for row in range(COUNTER_ROWS - 1) if self._lock(ROW_LOCKS + row)), COUNTER_ROWS - 1)
        else:
            row = os.getpid() % COUNTER_ROWS
        self.counters = self._row(row)
        self.counters[_GENERATION] += 1  # with the row's lock held: this ends the claims of the row's last process
        self.holder = self._holder_in(row) if self._fds and row < COUNTER_ROWS - 1 else 0

    def _row(self, row: int) -> memoryview:
        at = COUNTERS_AT + row * COUNTER_WORDS * 8
        return self._bytes[at : at + COUNTER_WORDS * 8].cast("Q")

    def _holder_in(self, row: int) -> int:
        return self._row(row)[_GENERATION] % _GENERATIONS * COUNTER_ROWS + row + 1

    @classmethod
    def create(cls, control_bytes: int, data_bytes: int, extent_bytes: int | None = None, descriptor: bytes = b"") -> "Segment":
        """Return a new anonymous segment: ``control_bytes`` are reserved now, ``data_bytes`` can be reserved later.

        If the machine gives no shared memory, its backing is "none" and its data has 0 bytes. ``extent_bytes``: see
        `Layout.for_sizes`.
        """
        if limits.memfd_huge_policy() in _HUGE_POLICIES:
            extent_bytes = max(extent_bytes or 0, HUGE_PAGE)
        layout = Layout.for_sizes(control_bytes, data_bytes, descriptor, extent_bytes)
        for backing in _backings(control_bytes + data_bytes):
            fd = _open_anonymous(backing)
            if fd is None:
                continue
            try:
                layout.allocate(fd)
                if backing == "memfd":  # SIGBUS kills the reader of a truncated file; files in /dev/shm cannot be sealed
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            except OSError as error:
                os.close(fd)
                logger.debug("no segment in %s: %s", backing, error)
                continue
            try:
                return cls([fd], layout, backing)
            except OSError as error:  # no address space to map it, say under ulimit -v
                logger.debug("cannot map the segment in %s: %s", backing, error)
        return _blank(control_bytes)

    # ------------------------------------------------------------------------------------------------ memory

    def tensor(self, offset: int, nbytes: int) -> "Tensor":
        """Return the uint8 tensor over ``nbytes`` of data from ``offset``. It keeps the memory mapped, also after this object.

        Touch reserved data only: if the kernel cannot give a page, it kills the process with SIGBUS, also for reading.
        """
        import torch  # here: commands that list and remove caches start much faster without it

        if nbytes == 0:  # which torch.frombuffer refuses
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._mmap, dtype=torch.uint8, offset=self._data_at + offset, count=nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the memoryview over ``nbytes`` of data from ``offset``, under the conditions of `tensor`."""
        return memoryview(self._mmap)[self._data_at + offset : self._data_at + offset + nbytes]

    def write(self, offset: int, buffer: Any, nbytes: int) -> None:
        """Write a buffer of ``nbytes`` to reserved data.

        It uses pwrite, not the mapping: whole pages are then neither faulted in nor zeroed first, which halves the cost of
        filling (measured: 35 against 70 µs for 192 KiB); and if memory runs out after all, it is an error.
        """
        done = 0
        while done < nbytes:  # Linux writes at most 2 GiB at once
            rest = memoryview(buffer).cast("B")[done:] if done else buffer
            written = os.pwrite(self._fds[0], rest, self._data_at + offset + done)
            if written == 0:
                raise SegmentError(f"{self.backing} takes no more bytes.")
            done += written

    def write_rows(self, rows: Iterable[tuple[int, Any]], nbytes: int) -> None:
        """Write buffers of ``nbytes`` each to reserved data, given as pairs of an offset and a buffer; see `write`."""
        fd, data_at = self._fds[0], self._data_at
        for offset, buffer in rows:
            if os.pwrite(fd, buffer, data_at + offset) != nbytes:
                self.write(offset, buffer, nbytes)

    def write_all(self, offset: int, buffers: list[Any], nbytes: int) -> None:
        """Write buffers, ``nbytes`` together, to reserved data, one behind the other; see `write`. The first is not empty."""
        done = 0
        while done < nbytes:
            written = os.pwritev(self._fds[0], buffers[:MOST_BUFFERS], self._data_at + offset + done)
            if written == 0:
                raise SegmentError(f"{self.backing} takes no more bytes.")
            done += written
            if done < nbytes:
                buffers = _behind(buffers, written)

    def reserve(self, start: int, stop: int, warn: bool = True) -> bool:
        """Make data bytes ``[start, stop)`` safe to touch. False if the machine does not give them, now or before.

        Whole extents are reserved, each once. Call it with `guard` held. ``warn``: log a warning that the cache stops growing.
        """
        extents = range(start // self.extent_bytes, -(-stop // self.extent_bytes))
        return self.has(start, stop) or self.reserve_extents(extents, warn)

    def reserve_extents(self, extents: Sequence[int], warn: bool = True) -> bool:
        """Reserve those of some extents, in ascending order, that are not; see `reserve`. Stop at the first that is refused.

        The lock is held for `_AT_ONCE` bytes at a time.
        """
        states, count = self.extents, max(1, _AT_ONCE // self.extent_bytes)
        wanted = [extent for extent in extents if states[extent] != RESERVED_EXTENT]
        return all(self._reserve_extents(wanted[at : at + count], warn) for at in range(0, len(wanted), count))

    def populate(self, start: int, stop: int) -> None:
        """Map reserved data ``[start, stop)`` into this process now, instead of page by page when it is touched."""
        at = (self._data_at + start) // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._mmap.madvise(_MADV_POPULATE_WRITE, at, self._data_at + stop - at)
        except OSError as error:  # an old kernel: then page by page
            logger.debug("madvise(MADV_POPULATE_WRITE): %s", error)

    def has(self, start: int, stop: int) -> bool:
        """Return whether data bytes ``[start, stop)`` exist and are reserved."""
        first, last = start // self.extent_bytes, -(-stop // self.extent_bytes)
        return stop <= self.data_bytes and self.extents[first:last].tobytes().count(RESERVED_EXTENT) == last - first

    def refused(self, start: int, stop: int) -> bool:
        """Return whether the machine has refused memory for some of the data bytes ``[start, stop)``."""
        return REFUSED_EXTENT in self.extents[start // self.extent_bytes : -(-stop // self.extent_bytes)].tobytes()

    def _reserve_extents(self, wanted: list[int], warn: bool) -> bool:
        states = self.extents
        try:
            if not self._wait(_EXTENTS_LOCK):  # one for all extents: together they must not take more than the spare memory
                return False
            for first, stop in _runs([extent for extent in wanted if states[extent] == UNRESERVED_EXTENT]):
                if not self._reserve_run(first, stop, warn):
                    return False
            return all(states[extent] == RESERVED_EXTENT for extent in wanted)
        finally:
            fcntl.lockf(self._fds[0], fcntl.LOCK_UN, 1, _EXTENTS_LOCK)

    def _reserve_run(self, first: int, stop: int, warn: bool) -> bool:
        """Reserve the extents ``[first, stop)`` together; or, if the machine does not give all of them, the first ones."""
        at, (last_at, last_bytes) = self.layout.span(first)[0], self.layout.span(stop - 1)
        problem = self._over_limit(last_at + last_bytes - at) or self._allocate(at, last_at + last_bytes - at)
        if problem and stop - first > 1:
            middle = (first + stop) // 2
            return self._reserve_run(first, middle, warn) and self._reserve_run(middle, stop, warn)
        self.extents[first:stop] = bytes([REFUSED_EXTENT if problem else RESERVED_EXTENT]) * (stop - first)
        if problem and warn:
            self._warn_refused(problem)
        return not problem

    def _over_limit(self, nbytes: int) -> str:
        """Return "", or why ``nbytes`` more may not be reserved."""
        if not self.limit or self.reserved_bytes + nbytes <= self.limit:
            return ""
        return f"its part of size_limit_gib is {format_size(self.limit)}, because the ranks of this job cache different samples"

    def _allocate(self, at: int, nbytes: int) -> str:
        """Reserve memory for a part of the file. Return "", or why it failed."""
        if self._known_spare < nbytes:
            memory = limits.memory()
            if memory.spare < nbytes:
                left, floor = format_size(memory.available), format_size(memory.floor)
                return f"{left} of memory are available, of which {floor} stay free"
            self._known_spare = nbytes + min(memory.spare // 64, _LOOKED_AT_EVERY)
        self._known_spare -= nbytes
        if self._huge:
            # Under the "advise" policy only a fault through the advised mapping brings huge pages; fallocate would fill the
            # range with small ones. Where this fails (an old kernel, no memory), fallocate does the rest, or reports the error.
            self.populate(at - self._data_at, at - self._data_at + nbytes)
        try:
            os.posix_fallocate(self._fds[0], at, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # give back the part that was taken, if the kernel can
                self._mmap.madvise(mmap.MADV_REMOVE, at, nbytes)
            return f"{self.backing} gave no more: {os.strerror(error.errno or errno.ENOSPC)}"
        return ""

    def first_to_warn(self, warning: int) -> bool:
        """Return whether no process has given this warning yet, and note that it is given. Call it with `guard` held."""
        try:
            self._wait(_EXTENTS_LOCK)  # else two processes may warn
            return self._first_to_warn(warning)
        finally:
            fcntl.lockf(self._fds[0], fcntl.LOCK_UN, 1, _EXTENTS_LOCK)

    def _first_to_warn(self, warning: int) -> bool:
        given = self._bytes[WARNED_AT]
        self._bytes[WARNED_AT] = given | warning
        return not given & warning

    def _warn_refused(self, problem: str) -> None:
        if not self._first_to_warn(_REFUSED_WARNING):
            return
        logger.warning(
            "cache stops growing at %s of %s: %s. Samples beyond stay uncached, training goes on. "
            "Lower size_limit_gib, or free memory; in Docker raise --memory or --shm-size.",
            format_size(self.reserved_bytes), format_size(self.data_bytes), problem,
        )  # fmt: skip

    def clear(self) -> None:
        """Zero all reserved data, and allow refused extents to be reserved again. Call it only while no process writes."""
        zeros = memoryview(bytes(MIB))
        for run in re.finditer(b"%c+" % RESERVED_EXTENT, self.extents):
            at, (last_at, last_bytes) = self.layout.span(run.start())[0], self.layout.span(run.end() - 1)
            for start in range(at, last_at + last_bytes, MIB):
                stop = min(start + MIB, last_at + last_bytes)
                self._bytes[start:stop] = zeros[: stop - start]
        self.extents[:] = self.extents.tobytes().replace(bytes([REFUSED_EXTENT]), bytes([UNRESERVED_EXTENT]))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of data that are reserved now."""
        return self.layout.reserved_bytes(self.extents)

    @property
    def limit(self) -> int:
        """Bytes of data that may be reserved; 0 for all of it."""
        return LIMIT.unpack_from(self._bytes, LIMIT_AT)[0]  # type: ignore[no-any-return]

    @limit.setter
    def limit(self, nbytes: int) -> None:
        LIMIT.pack_into(self._bytes, LIMIT_AT, max(1, nbytes))

    @property
    def ranks(self) -> int:
        """How many ranks have attached to a segment without a name; 0 if it is not shared by ranks."""
        return self._bytes[RANKS_AT]

    @property
    def promised_bytes(self) -> int:
        """Bytes of data that may still be reserved."""
        return self.layout.promised_bytes(self.reserved_bytes, self.limit)

    @staticmethod
    def all_attached() -> "list[Segment]":
        """Return all segments of this process."""
        return list(_attached.values())

    def _ask_for_huge_pages(self) -> bool:
        """Ask for page table entries of 2 MiB instead of 4 KiB: else each process needs 2 MiB of page tables per GiB."""
        try:
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            return False
        return self.backing == "memfd" and limits.memfd_huge_policy() in _HUGE_POLICIES

    # ------------------------------------------------------------------------------------------------ locks and counters

    def try_lock(self, number: int) -> bool:
        """Take the owner's lock ``number`` for this process; False if another process has it. Call it with `guard` held."""
        try:  # not through _lock: every fill runs this
            fcntl.lockf(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWNER_LOCKS + number)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def run_locked(self, number: int, count: int, work: Callable[[], _Result], late: _Result) -> _Result:
        """Return ``work()``, run with the owner's lock ``number`` and the ``count - 1`` after it held.

        Return ``late``, with a warning, if another process holds one of them for `LOCK_TIMEOUT_S`. Call it with `guard` held;
        it is not reentrant.
        """
        try:
            try:
                return work() if self._wait(_OWNER_LOCKS + number, count) else late
            finally:
                self.unlock(number, count)
        except BaseException:  # an interrupt may have come before the lock was released
            self.unlock(number, count)
            raise

    def unlock(self, number: int, count: int = 1) -> None:
        """Release the owner's lock ``number`` and the ``count - 1`` after it, if this process has them."""
        fcntl.lockf(self._fds[0], fcntl.LOCK_UN, count, _OWNER_LOCKS + number)

    def try_claim(self, number: int) -> bool:
        """Claim ``number`` for this thread; False if another thread or process has it. A claim ends with its process."""
        with self.guard:
            if number in self._claims or not self._lock(_CLAIM_LOCKS + number):
                return False
            self._claims.add(number)
            return True

    def release_claim(self, number: int) -> None:
        """Release a claim."""
        with self.guard:
            fcntl.lockf(self._fds[0], fcntl.LOCK_UN, 1, _CLAIM_LOCKS + number)
            self._claims.remove(number)

    def wait_for_claim(self, number: int, timeout_s: float, over: Callable[[], bool]) -> bool:
        """Wait until this thread has a claim (True), or ``over()`` is true or the time is over (False)."""
        if self.try_claim(number):
            return True
        claimed = False

        def ready() -> bool:
            nonlocal claimed
            claimed = self.try_claim(number)
            return claimed or over()

        self._wait_for(_CLAIM_LOCKS + number, 1, ready, timeout_s)
        return claimed

    def is_held(self, holder: int) -> bool:
        """Return whether the process of a `holder` is attached: its row is locked, and has the same generation."""
        if holder == self.holder:
            return True
        row = (holder - 1) % COUNTER_ROWS
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, ROW_LOCKS + row, 1, 0)
        locked = _FLOCK.unpack(fcntl.fcntl(self._fds[0], fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
        return locked and self._holder_in(row) == holder

    def wait_for_holder(self, holder: int, ready: Callable[[], bool], timeout_s: float) -> int | None:
        """Wait for the process of a `holder`: as `_wait_for`."""
        return self._wait_for(ROW_LOCKS + (holder - 1) % COUNTER_ROWS, 1, ready, timeout_s)

    def pid_of(self, holder: int) -> int:
        """Return the process of a `holder`; 0 if it is not visible from here, or has ended."""
        return self._holder_of(ROW_LOCKS + (holder - 1) % COUNTER_ROWS)

    def order_stores(self) -> None:
        """Perform all stores before this call before all stores after it. Call it with `guard` held."""
        self.fence.acquire(blocking=False)  # held already, unless an interrupt came between the next two
        self.fence.release()
        self.fence.acquire()

    def _lock(self, offset: int, length: int = 1) -> bool:
        try:
            fcntl.lockf(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB, length, offset)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _wait(self, offset: int, length: int = 1) -> bool:
        """Take a lock that is usually held for microseconds; False, with a warning, if another process does not release it."""
        if self._lock(offset, length):
            return True
        pid = self._wait_for(offset, length, lambda: self._lock(offset, length), LOCK_TIMEOUT_S)
        if pid is not None and pid not in self._warned_of:
            self._warned_of.add(pid)
            logger.warning(
                "%s has kept a lock of the cache in %s for %.0f s, which should take microseconds. Samples that need it stay "
                "uncached, training goes on. Resume or end that process.",
                describe_process(pid), self.path or self.backing, LOCK_TIMEOUT_S,
            )  # fmt: skip
        return pid is None

    def _wait_for(self, offset: int, length: int, ready: Callable[[], bool], timeout_s: float) -> int | None:
        """Wait until ``ready()``, and return None. After ``timeout_s`` return the process that has the lock; 0 if not visible.

        Back-off: after a timeout, the same process is not waited for during `_WAITED_TO_IDLE` times the time waited for it.
        """
        pid = self._holder_of(offset, length)
        again_at, _ = self._timed_out.get(pid, (0.0, 0.0))
        if time.monotonic() < again_at:
            return None if ready() else pid
        if wait_until(ready, timeout_s) or not timeout_s or ready():
            return None
        pid = self._holder_of(offset, length)
        _, waited_s = self._timed_out.get(pid, (0.0, 0.0))
        waited_s += timeout_s
        self._timed_out[pid] = time.monotonic() + _WAITED_TO_IDLE * waited_s, waited_s
        return pid

    def lock_holder(self, number: int, count: int = 1) -> int:
        """Return the process that has one of the owner's locks; 0 if it is not visible from here, or they are free."""
        return self._holder_of(_OWNER_LOCKS + number, count)

    def _holder_of(self, offset: int, length: int = 1) -> int:
        """Return the process that has a lock; 0 if it is not visible from here, or the lock is free."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, length, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fds[0], fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else max(0, pid)

    def count(self, counter: int, amount: int = 1) -> None:
        """Add to one of the `counters`, from any thread. Those that are always changed with `guard` held need no call."""
        with self._counting:
            self.counters[counter] += amount

    def totals(self) -> list[int]:
        """Return the sums of the `counters` of all processes, also of those that have exited."""
        return sum_rows(self._bytes[COUNTERS_AT:EXTENTS_AT])

    # ------------------------------------------------------------------------------------------------ crossing processes

    def __reduce__(self) -> tuple[Callable[..., "Segment"], tuple[Any, ...]]:
        """Pickle as a handle: a descriptor for a process that is being spawned, the path of ours for a running process."""
        if not self._fds:
            return _blank, (self.layout.control_bytes,)
        spawning = get_spawning_popen() is not None
        handle = DupFd(self._fds[0]) if spawning else f"/proc/{os.getpid()}/fd/{self._fds[0]}"
        return _attach, (self._key, handle, self.backing, self.path, self.rank)

    # ------------------------------------------------------------------------------------------------ names

    @property
    def key(self) -> FileKey:
        """The file of the segment."""
        return self._key

    @property
    def fd(self) -> int:
        """The descriptor of the file. Do not close it."""
        return self._fds[0]

    def persist(self) -> None:
        """Keep the file of a named segment when no process holds it any more."""
        self._bytes[PERSISTS_AT] = True


def attached(key: FileKey) -> Segment | None:
    """Return the segment that this process has of a file. Call it with `registry.attaching` held."""
    return _attached.get(key)


def abandon(key: FileKey, fds: list[int]) -> None:
    """Close the descriptors of a file after attaching has failed. Call it with `registry.attaching` held."""
    _attached.pop(key, None)
    while fds:
        registry.close(fds.pop())


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number of each run of consecutive ones, and the number after its last."""
    first = 0
    for row, number in enumerate(numbers, 1):
        if row == len(numbers) or numbers[row] != number + 1:
            yield numbers[first], number + 1
            first = row


def _behind(buffers: list[Any], nbytes: int) -> list[Any]:
    """Return the rest of buffers behind their first ``nbytes``, without empty buffers at its beginning."""
    for number, buffer in enumerate(buffers):
        view = PickleBuffer(buffer).raw()  # bytes, whatever the format of the buffer
        if nbytes < len(view):
            return [view[nbytes:], *buffers[number + 1 :]]
        nbytes -= len(view)
    return []


def _leave(key: FileKey, fds: list[int], path: str | None) -> None:
    """Close the descriptors of a segment that is gone. Remove the file of a named segment if no process holds it.

    Call it with `registry.attaching` held. A second call does nothing.
    """
    successor = _attached.get(key)
    if successor is not None:  # attached again meanwhile: closing these would drop its locks
        while fds:
            successor._fds.append(fds.pop())
        return
    while fds:
        os.close(fds.pop())
    if path is not None:
        _to_leave.pop(key, None)
        try:
            registry.remove_unheld(path, key)
        except OSError as error:
            logger.debug("cannot remove %s: %s", path, error)


_HUGE_POLICIES = ("always", "within_size", "advise", "force")


def _backings(nbytes: int) -> list[str]:
    """Return where to try to create a segment of ``nbytes``, best first.

    /dev/shm comes first if it has the room, because an administrator sees and limits it there. Else a memfd comes first: the
    size of /dev/shm does not limit it. A memfd also comes first if the kernel gives it huge pages: /dev/shm has them only if it
    was mounted with huge=.
    """
    huge = limits.memfd_huge_policy() in _HUGE_POLICIES
    return ["memfd", limits.SHM_DIR] if huge or limits.shm_room() < nbytes else [limits.SHM_DIR, "memfd"]


def _open_anonymous(backing: str) -> int | None:
    if backing == "memfd":
        return limits.open_memfd()
    try:
        return os.open(backing, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.debug("no file in %s: %s", backing, error)
        return None


def _blank(control_bytes: int) -> Segment:
    return Segment([], Layout.for_sizes(control_bytes, 0), "none")


def _attach(key: FileKey, handle: Any, backing: str, path: str | None, rank: int) -> Segment:
    """Return the segment of a pickled handle: the one that this process has, or a new one."""
    try:
        with registry.attaching:  # two threads must not make two segments of one file
            segment = _attached.get(key)
            if segment is None:
                segment = _attach_anew(key, handle, backing, path)
                segment.rank = rank
                return segment
            if not isinstance(handle, str) and (fd := handle.detach()) not in segment._fds:
                segment._fds.append(fd)  # closing it would drop this process's locks
            return segment
    finally:
        registry.run_due_tasks()


def _attach_anew(key: FileKey, handle: Any, backing: str, path: str | None) -> Segment:
    fds = [_open_path(key, handle) if isinstance(handle, str) else handle.detach()]
    try:
        os.set_inheritable(fds[0], False)
        layout = Layout.read(fds[0])
        if path is not None:
            registry.hold(fds[0])
        return Segment(fds, layout, backing, path)
    except BaseException as error:
        abandon(key, fds)
        if isinstance(error, OSError):
            raise SegmentError(f"cannot attach to the cache: its segment {error}") from None
        raise


def _open_path(key: FileKey, path: str) -> int:
    try:
        status = os.stat(path)  # before opening: if it is another segment, closing it would drop that segment's locks
        if (status.st_dev, status.st_ino) == key:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if identify(fd) == key:
                return fd
            os.close(fd)
    except OSError as error:
        raise SegmentError(
            f"cannot attach to the cache through {path}: {error.strerror}. The process that pickled it must be alive, on this "
            f"machine, and of the same user."
        ) from error
    raise SegmentError(f"cannot attach to the cache through {path}: its process has closed it.")


_watching = False


def _watch_processes() -> None:
    """Enter each segment in forked children, and leave them at exit. Set up with the first segment, not on import."""
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_enter_child)
        util.register_after_fork(Segment, lambda _: _leave_at_exit())  # multiprocessing forgets its finalizers in a child
        _leave_at_exit()


def _enter_child() -> None:
    registry.enter_child()
    for segment in list(_attached.values()):
        segment._enter_process()
    _leave_at_exit()


def _leave_at_exit() -> None:
    # Below 0: after multiprocessing has ended its daemonic children, such as DataLoader workers, which hold the segment too
    util.Finalize(None, _leave_all, exitpriority=-100)


def _leave_all() -> None:
    for key, task in list(_to_leave.items()):
        _attached.pop(key, None)
        registry.when_free(task)
