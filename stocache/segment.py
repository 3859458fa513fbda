"""One segment of shared memory: created without a name, reserved before it is written, locked by the kernel, counted.

Layout of the file, all of it sparse until used:

    0            header: magic, format version, sizes; whether the user has been warned
    4096         counter rows, one for each process that is attached now
    + 64 KiB     extent states, one byte for each extent of the data
    control      the owner's bytes, reserved from the start (a cache keeps one state byte per sample here)
    data         the owner's data, a multiple of 2 MiB into the file, reserved extent by extent

NOTE [ Kernel record locks ]
    All locks are fcntl record locks on byte ranges far beyond the end of the file. The kernel drops them when their process
    ends, however it ends, so a SIGKILL leaves no lock behind. They belong to the process, hence `Segment.guard` for its
    threads; a forked child owns none of its parent's; and closing *any* descriptor of the file drops all of them. So a
    process has one `Segment` per file (`_attached`), and every descriptor it comes by lives as long as that; the duplicate
    inside Python's mmap (until 3.13) as long as the last view, which can outlive it.
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache import limits
from stocache.errors import SegmentError
from stocache.limits import MIB, format_size

logger = logging.getLogger("stocache")

_HEADER = struct.Struct("<8sQQQQ")  # magic, version, control bytes, data bytes, extent bytes
_MAGIC, _VERSION = b"stocache", 1
_WARNED_AT = 4095  # set once somebody has warned that the machine gives no more
_ROWS_AT, _ROWS, _ROW_WORDS = 4096, 1024, 8
_EXTENTS_AT = _ROWS_AT + _ROWS * _ROW_WORDS * 8
_HUGE_PAGE = 2 * MIB

_UNRESERVED, _RESERVED, _REFUSED = range(3)

# Lock space: record locks need no bytes behind them, so each kind has a stretch of offsets of its own.
_ROW_LOCKS, _EXTENTS_LOCK, _OWNER_LOCKS = 1 << 40, 1 << 41, 1 << 42

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet named in the mmap module

_attached: "weakref.WeakValueDictionary[tuple[int, int], Segment]" = weakref.WeakValueDictionary()
_attaching = threading.Lock()


class Segment:
    """Shared memory of this process and of all it is handed to. Lives until its last holder, in any process, lets go.

    Attributes:
        control: the owner's always-reserved bytes.
        counters: eight 64-bit words that only this process writes; `totals` sums them over all processes, past ones too.
        guard: lock for the threads of this process; take it before `try_lock` and `reserve`.
        fence: a lock this process always holds. Whoever holds the guard lets it go and takes it again to order stores.
        backing: "/dev/shm", "memfd", or "none" when the machine gives no shared memory: then there is control but no data.
    """

    control: memoryview
    counters: memoryview
    guard: threading.Lock
    fence: threading.Lock

    def __init__(self, fd: int, control_bytes: int, data_bytes: int, extent_bytes: int, backing: str) -> None:
        self.backing = backing
        self.data_bytes = data_bytes
        self.extent_bytes = extent_bytes
        self._fds = [fd] if fd >= 0 else []  # ours from here on, whatever happens
        self._control_bytes = control_bytes
        self._control_at, self._data_at, size = _layout(control_bytes, data_bytes, extent_bytes)
        # A private duplicate of fd lives in the mmap object until Python 3.13 and its trackfd
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) and fd >= 0 else {}
        self._mmap = mmap.mmap(fd, size, **options)
        self._huge = data_bytes >= _HUGE_PAGE and self._ask_for_huge_pages()
        self._bytes = memoryview(self._mmap)
        self._extents = self._bytes[_EXTENTS_AT : self._control_at]
        self.control = self._bytes[self._control_at : self._control_at + control_bytes]
        self._enter_process()
        if self._fds:
            status = os.fstat(fd)
            self._key = (status.st_dev, status.st_ino)
            _attached[self._key] = self
            _watch_forks()

    def _enter_process(self) -> None:
        """Take a counter row and fresh locks: when attaching, and again in each forked child."""
        self.guard, self.fence = threading.Lock(), threading.Lock()
        self.fence.acquire()
        # A row goes from a process that ended to the next that comes, which counts on from there: no count is lost. The
        # last row is for whoever finds the others taken; its counts may lose some to races.
        if self._fds:
            row = next((row for row in range(_ROWS - 1) if self._lock(_ROW_LOCKS + row)), _ROWS - 1)
        else:
            row = os.getpid() % _ROWS
        at = _ROWS_AT + row * _ROW_WORDS * 8
        self.counters = self._bytes[at : at + _ROW_WORDS * 8].cast("Q")

    @classmethod
    def create(cls, control_bytes: int, data_bytes: int) -> "Segment":
        """Return a new anonymous segment with ``control_bytes`` reserved and room for ``data_bytes`` to be reserved later.

        Where no shared memory can be had, its backing is "none" and its data has 0 bytes.
        """
        extent_bytes = _extent_bytes(data_bytes)
        control_at, _, size = _layout(control_bytes, data_bytes, extent_bytes)
        for backing in _backings(control_bytes + data_bytes):
            fd = _open_anonymous(backing)
            if fd is None:
                continue
            try:
                os.ftruncate(fd, size)
                os.posix_fallocate(fd, 0, control_at + control_bytes)
                os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, control_bytes, data_bytes, extent_bytes), 0)
            except OSError as error:
                os.close(fd)
                logger.debug("no segment in %s: %s", backing, error)
                continue
            try:
                return cls(fd, control_bytes, data_bytes, extent_bytes, backing)
            except OSError as error:  # no address space to map it, say under ulimit -v
                logger.debug("cannot map the segment in %s: %s", backing, error)
        return cls(-1, control_bytes, 0, extent_bytes, "none")

    # ------------------------------------------------------------------------------------------------ memory

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """Return the uint8 tensor over ``nbytes`` of data from ``offset``; it keeps the memory mapped, also past this object.

        Touch only what is reserved: the kernel answers a page it cannot give with SIGBUS, reading included.
        """
        if nbytes == 0:  # which torch.frombuffer refuses
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mmap, dtype=torch.uint8, offset=self._data_at + offset, count=nbytes)

    def write(self, offset: int, buffer: Any, nbytes: int) -> None:
        """Write a buffer of ``nbytes`` to reserved data.

        By pwrite, not through the mapping: a page written whole is neither faulted in nor zeroed first, which halves the
        cost of filling (measured: 35 against 70 µs for 192 KiB); and should memory be gone after all, it is an error.
        """
        done = 0
        while done < nbytes:  # Linux writes at most 2 GiB at once
            rest = memoryview(buffer).cast("B")[done:] if done else buffer
            written = os.pwrite(self._fds[0], rest, self._data_at + offset + done)
            if written == 0:
                raise SegmentError(f"{self.backing} takes no more bytes.")
            done += written

    def reserve(self, start: int, stop: int) -> bool:
        """Make data bytes ``[start, stop)`` safe to touch; False when the machine will not give them, now or before.

        Whole extents are reserved, each once. Call with `guard` held.
        """
        for extent in range(start // self.extent_bytes, -(-stop // self.extent_bytes)):
            if self._extents[extent] != _RESERVED and not self._reserve_extent(extent):
                return False
        return True

    def _reserve_extent(self, extent: int) -> bool:
        self._lock(_EXTENTS_LOCK, wait=True)  # one for all extents: together they must not take more than is spare
        try:
            if self._extents[extent] == _UNRESERVED:
                problem = self._allocate(*self._span(extent))
                self._extents[extent] = _REFUSED if problem else _RESERVED
                if problem:
                    self._warn_refused(problem)
            return self._extents[extent] == _RESERVED
        finally:
            fcntl.lockf(self._fds[0], fcntl.LOCK_UN, 1, _EXTENTS_LOCK)

    def _span(self, extent: int) -> tuple[int, int]:
        """Return where an extent begins in the file and how many bytes it has."""
        start = extent * self.extent_bytes
        return self._data_at + start, min(self.extent_bytes, self.data_bytes - start)

    def _allocate(self, at: int, nbytes: int) -> str:
        """Reserve memory behind part of the file; return why not, or ""."""
        memory = limits.memory()
        if memory.spare < nbytes:
            return f"{format_size(memory.available)} of memory are available, of which {format_size(memory.floor)} stay free"
        if self._huge:
            # Under the "advise" policy only a fault through the advised mapping brings a huge page; fallocate would fill the
            # range with small ones. What this leaves undone (an old kernel, no memory) fallocate does, or reports.
            try:
                self._mmap.madvise(_MADV_POPULATE_WRITE, at, nbytes)
            except OSError as error:
                logger.debug("madvise(MADV_POPULATE_WRITE): %s", error)
        try:
            os.posix_fallocate(self._fds[0], at, nbytes)
        except OSError as error:
            self._mmap.madvise(mmap.MADV_REMOVE, at, nbytes)
            return f"{self.backing} gave no more: {os.strerror(error.errno or errno.ENOSPC)}"
        return ""

    def _warn_refused(self, problem: str) -> None:
        if self._bytes[_WARNED_AT]:  # by whichever process met the first refusal
            return
        self._bytes[_WARNED_AT] = True
        logger.warning(
            "cache stops growing at %s of %s: %s. Samples beyond stay uncached, training goes on. "
            "Lower size_limit_gib, or free memory; in Docker raise --memory or --shm-size.",
            format_size(self.reserved_bytes), format_size(self.data_bytes), problem,
        )  # fmt: skip

    def forget(self) -> None:
        """Zero all reserved data and give refused extents another chance. The owner sees to it that nobody writes."""
        for extent in range(self._extent_count):
            if self._extents[extent] == _RESERVED:
                at, nbytes = self._span(extent)
                self.tensor(at - self._data_at, nbytes).zero_()
            else:
                self._extents[extent] = _UNRESERVED

    @property
    def _extent_count(self) -> int:
        return -(-self.data_bytes // self.extent_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of data that are backed by memory now."""
        return sum(self._span(e)[1] for e in range(self._extent_count) if self._extents[e] == _RESERVED)

    @property
    def huge_pages(self) -> bool:
        """Whether the kernel may back this process's mapping with huge pages."""
        return self._huge

    def _ask_for_huge_pages(self) -> bool:
        """A page table entry for 2 MiB instead of 4 KiB: without, each process pays 2 MiB of page tables per GiB."""
        try:
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            return False
        return self.backing == "memfd" and limits.memfd_huge_policy() in _HUGE_POLICIES

    # ------------------------------------------------------------------------------------------------ locks and counters

    def try_lock(self, number: int) -> bool:
        """Take the owner's lock ``number`` for this process; False when another has it. Call with `guard` held."""
        try:  # not through _lock: this stands on the path of every fill
            fcntl.lockf(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWNER_LOCKS + number)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def lock_all(self, count: int) -> None:
        """Take the owner's locks ``[0, count)``, waiting for those that others have. Call with `guard` held."""
        self._lock(_OWNER_LOCKS, length=count, wait=True)

    def unlock(self, number: int, count: int = 1) -> None:
        """Give the owner's lock ``number``, and the ``count - 1`` after it, back."""
        fcntl.lockf(self._fds[0], fcntl.LOCK_UN, count, _OWNER_LOCKS + number)

    def _lock(self, offset: int, length: int = 1, wait: bool = False) -> bool:
        while True:
            try:
                fcntl.lockf(self._fds[0], fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), length, offset)
                return True
            except (BlockingIOError, PermissionError):
                return False
            except OSError as error:
                # The kernel looks for circles by process, so threads waiting for different caches may look like one
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(0.001)

    def totals(self) -> list[int]:
        """Return the sums of the `counters` of all processes that are or were attached."""
        rows = np.frombuffer(self._mmap, dtype=np.uint64, offset=_ROWS_AT, count=_ROWS * _ROW_WORDS)
        return [int(total) for total in rows.reshape(_ROWS, _ROW_WORDS).sum(axis=0)]

    # ------------------------------------------------------------------------------------------------ crossing processes

    def __reduce__(self) -> tuple[Callable[..., "Segment"], tuple[Any, ...]]:
        """Pickle as a handle: a descriptor for a process being spawned, the path of ours for one already running."""
        if not self._fds:
            return _blank, (self._control_bytes, self.extent_bytes)
        spawning = get_spawning_popen() is not None
        handle = DupFd(self._fds[0]) if spawning else f"/proc/{os.getpid()}/fd/{self._fds[0]}"
        return _attach, (self._key, handle, self.backing)

    def __del__(self) -> None:
        for fd in getattr(self, "_fds", ()):
            os.close(fd)


def _layout(control_bytes: int, data_bytes: int, extent_bytes: int) -> tuple[int, int, int]:
    """Return where control begins, where data begins, and the size of the whole file."""
    control_at = _round_up(_EXTENTS_AT + -(-data_bytes // extent_bytes), 4096)
    data_at = _round_up(control_at + control_bytes, _HUGE_PAGE) if data_bytes else control_at + control_bytes
    return control_at, data_at, data_at + data_bytes


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _extent_bytes(data_bytes: int) -> int:
    """Return the grain of reservation: 64 MiB, and less for small data, so that a refusal costs at most a 16th of it."""
    return min(max(_round_up(data_bytes // 16, _HUGE_PAGE), _HUGE_PAGE), 64 * MIB)


_HUGE_POLICIES = ("always", "within_size", "advise", "force")


def _backings(nbytes: int) -> list[str]:
    """Return where to try to create a segment of ``nbytes``, best first.

    /dev/shm when it has the room, for there an administrator sees and limits it; else a memfd, which is not bounded by the
    size of /dev/shm; at last /dev/shm all the same, whatever its room. Where the kernel would give a memfd huge pages, it
    comes first: /dev/shm gets none unless it was mounted with huge=.
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


def _blank(control_bytes: int, extent_bytes: int) -> Segment:
    return Segment(-1, control_bytes, 0, extent_bytes, "none")


def _attach(key: tuple[int, int], handle: Any, backing: str) -> Segment:
    """Return the segment behind a pickled handle: the one this process has, or a new attachment."""
    with _attaching:  # two threads must not make two segments of one file
        segment = _attached.get(key)
        if segment is not None:
            if not isinstance(handle, str) and (fd := handle.detach()) not in segment._fds:
                segment._fds.append(fd)  # closing it would drop this process's locks
            return segment
        fd = _open_path(key, handle) if isinstance(handle, str) else handle.detach()
        os.set_inheritable(fd, False)
        magic, version, control_bytes, data_bytes, extent_bytes = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if (magic, version) != (_MAGIC, _VERSION):
            os.close(fd)
            raise SegmentError(f"segment has format {magic!r} version {version}, this stocache reads {_MAGIC!r} {_VERSION}.")
        return Segment(fd, control_bytes, data_bytes, extent_bytes, backing)


def _open_path(key: tuple[int, int], path: str) -> int:
    try:
        status = os.stat(path)  # before opening: closing what turns out to be another segment would drop its locks
        if (status.st_dev, status.st_ino) == key:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentError(
            f"cannot attach to the cache through {path}: {error.strerror}. The process that pickled it must be alive, on this "
            f"machine, and of the same user."
        ) from error
    raise SegmentError(f"cannot attach to the cache through {path}: its process has closed it.")


_watching_forks = False


def _watch_forks() -> None:
    """Have forked children enter each segment; registered with the first segment, not on import."""
    global _watching_forks
    if not _watching_forks:
        _watching_forks = True
        os.register_at_fork(after_in_child=_enter_child)


def _enter_child() -> None:
    global _attaching
    _attaching = threading.Lock()
    for segment in list(_attached.values()):
        segment._enter_process()
