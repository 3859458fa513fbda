"""Share a segment of memory between processes: map it, write it, count in it, and send it to other processes. One module,
because a process has one table of the segments that it is attached to, with one descriptor each.

`Extents` reserves its memory before it is touched, and `FileLocks` locks parts of it.
"""

import contextlib
import functools
import logging
import mmap
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import util
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeVar

from stocache.errors import SegmentError
from stocache.shm import registry
from stocache.shm.extents import Extents
from stocache.shm.layout import (
    COUNTER_ROWS,
    COUNTER_WORDS,
    COUNTERS_AT,
    EXTENTS_AT,
    HUGE_PAGE,
    PERSISTS_AT,
    RANKS_AT,
    Layout,
    sum_rows,
)
from stocache.shm.locks import OWNER_LOCKS, ROW_LOCKS, FileLocks
from stocache.system import limits
from stocache.system.platform import here
from stocache.system.waiting import FileKey, identify

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("stocache")

_GENERATION, _GENERATIONS = COUNTER_WORDS - 1, 1 << 20  # a word of a counter row, and how many values of it differ

MOST_BUFFERS = 1024  # the most that one pwritev takes: IOV_MAX of Linux

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
        extents: reserves the data.
        locks: the locks of the file; see NOTE [ Kernel file locks ].
        holder: a number that identifies this process among all that have ever attached. 0 if too many are attached.
        guard: lock for the threads of this process. Take it before a lock of the file, and before reserving.
        backing: "/dev/shm", "memfd", or "none" if the machine has no shared memory; then it has control bytes, but no data.
            "process" is memory of this process alone, if the platform shares none.
    """

    control: memoryview
    counters: memoryview
    extents: Extents
    locks: FileLocks
    guard: threading.Lock

    def __init__(self, fds: list[int], layout: Layout, backing: str, path: str | None = None) -> None:
        self.layout, self.backing, self.path, self._pid = layout, backing, path, os.getpid()
        self.data_bytes, self._data_at = layout.data_bytes, layout.data_at
        self._fds = fds  # ours from here on, whatever happens: code that closes one removes it from the list
        self._key = identify(fds[0]) if fds else (-1, secrets.randbits(63))  # the second of memory without a file
        if self._fds:
            task = functools.partial(_leave, self._key, fds, path)
            if path is not None:
                _to_leave[self._key] = task
            weakref.finalize(self, registry.when_free, task).atexit = False  # see _leave_at_exit
        self._mmap = self._map()
        self._huge = self.data_bytes >= HUGE_PAGE and self._ask_for_huge_pages()
        self._bytes = memoryview(self._mmap)
        self.control = self._bytes[layout.control_at : layout.control_at + layout.control_bytes]
        self._enter_process()
        if self._fds or self._is_own:  # others have nothing that a forked child must not use
            _watch_processes()
            _attached[self._key] = self

    def _map(self) -> mmap.mmap:
        if not self._fds:  # private, so that a forked child writes to memory of its own
            return mmap.mmap(-1, self.layout.size, **(here.PRIVATE if self.backing == "process" else {}))
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
        self.guard = threading.Lock()
        # Without a GIL. An interrupt could leave a lock locked
        self._counting: Any = threading.Lock() if FREE_THREADED else contextlib.nullcontext()
        self.locks = FileLocks(self._fds, self.path or self.backing)
        self.extents = Extents(self.layout, self._mmap, self._fds, self.locks, self.backing, self._huge)
        # A process reuses the counter row of one that has exited, and keeps adding to it. The last row is shared by all
        # processes that find the others taken; races may lose some of its counts.
        if self._fds:
            row = next((row for row in range(COUNTER_ROWS - 1) if self.locks.take(ROW_LOCKS + row)), COUNTER_ROWS - 1)
        else:
            row = 0 if self.backing == "process" else os.getpid() % COUNTER_ROWS
        self.counters = self._row(row)
        self.counters[_GENERATION] += 1  # with the row's lock held: this ends the claims of the row's last process
        self.holder = self._holder_in(row) if row < COUNTER_ROWS - 1 and (self._fds or self._is_own) else 0

    @property
    def _is_own(self) -> bool:
        """Whether this process has made the segment, of its own memory. A forked child reads it, and caches nothing."""
        return self.backing == "process" and os.getpid() == self._pid

    def _row(self, row: int) -> memoryview:
        at = COUNTERS_AT + row * COUNTER_WORDS * 8
        return self._bytes[at : at + COUNTER_WORDS * 8].cast("Q")

    def _holder_in(self, row: int) -> int:
        return self._row(row)[_GENERATION] % _GENERATIONS * COUNTER_ROWS + row + 1

    @classmethod
    def create(
        cls,
        control_bytes: int,
        data_bytes: int,
        extent_bytes: int | None = None,
        descriptor: bytes = b"",
        *,
        for_threads: bool = False,
    ) -> "Segment":
        """Return a new anonymous segment: ``control_bytes`` are reserved now, ``data_bytes`` can be reserved later.

        If the machine has no shared memory, its backing is "none" and its data has 0 bytes. ``extent_bytes``: see
        `Layout.for_sizes`. ``for_threads``: memory of this process is of use, too, if the platform shares none.
        """
        if not here.SHARES_MEMORY:
            with contextlib.suppress(OSError, MemoryError):
                layout = Layout.for_sizes(control_bytes, data_bytes * for_threads, descriptor, extent_bytes)
                return cls([], layout, "process" if for_threads else "none")
            return _blank(control_bytes)
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
                    here.seal(fd)
            except OSError as error:
                os.close(fd)
                logger.debug("no segment in %s: %s", backing, error)
                continue
            try:
                return cls([fd], layout, backing)
            except OSError as error:  # no address space to map it, say under ulimit -v
                logger.debug("cannot map the segment in %s: %s", backing, error)
        return _blank(control_bytes)

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
        if not self._fds:
            return self._copy(offset, [buffer])
        done = 0
        while done < nbytes:  # Linux writes at most 2 GiB at once
            rest = memoryview(buffer).cast("B")[done:] if done else buffer
            written = os.pwrite(self._fds[0], rest, self._data_at + offset + done)
            if written == 0:
                raise SegmentError(f"{self.backing} takes no more bytes.")
            done += written

    def write_rows(self, rows: Iterable[tuple[int, Any]], nbytes: int) -> None:
        """Write buffers of ``nbytes`` each to reserved data, given as pairs of an offset and a buffer; see `write`."""
        if not self._fds:
            for offset, buffer in rows:
                self._copy(offset, [buffer])
            return
        fd, data_at = self._fds[0], self._data_at
        for offset, buffer in rows:
            if os.pwrite(fd, buffer, data_at + offset) != nbytes:
                self.write(offset, buffer, nbytes)

    def write_all(self, offset: int, buffers: list[Any], nbytes: int) -> None:
        """Write buffers, ``nbytes`` together, to reserved data, one behind the other; see `write`. The first is not empty."""
        if not self._fds:
            return self._copy(offset, buffers)
        done = 0
        while done < nbytes:  # Linux writes at most 2 GiB at once
            written = os.pwritev(self._fds[0], buffers[:MOST_BUFFERS], self._data_at + offset + done)
            if written == 0:
                raise SegmentError(f"{self.backing} takes no more bytes.")
            done += written
            if done < nbytes:
                buffers = _behind(buffers, written)

    def _copy(self, offset: int, buffers: list[Any]) -> None:
        """Copy buffers to data, one behind the other, in memory of this process."""
        at = self._data_at + offset
        for buffer in buffers:
            view = PickleBuffer(buffer).raw()
            self._bytes[at : at + len(view)] = view
            at += len(view)

    @property
    def ranks(self) -> int:
        """How many ranks have attached to a segment without a name; 0 if it is not shared by ranks."""
        return self._bytes[RANKS_AT]

    def _ask_for_huge_pages(self) -> bool:
        """Ask for page table entries of 2 MiB instead of 4 KiB: else each process needs 2 MiB of page tables per GiB."""
        if not self._fds:
            return False
        try:
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            return False
        return self.backing == "memfd" and limits.memfd_huge_policy() in _HUGE_POLICIES

    def is_held(self, holder: int) -> bool:
        """Return whether the process of a `holder` is attached: its row is locked, and has the same generation."""
        if holder == self.holder:
            return True
        row = (holder - 1) % COUNTER_ROWS
        return not self.locks.is_free(ROW_LOCKS + row) and self._holder_in(row) == holder

    def wait_for_holder(self, holder: int, ready: Callable[[], bool], timeout_s: float) -> int | None:
        """Wait for the process of a `holder`: as `FileLocks.wait_for`."""
        return self.locks.wait_for(ROW_LOCKS + (holder - 1) % COUNTER_ROWS, ready, timeout_s)

    def pid_of(self, holder: int) -> int:
        """Return the process of a `holder`; 0 if it is not visible from here, or has ended."""
        return self.locks.holder_of(ROW_LOCKS + (holder - 1) % COUNTER_ROWS)

    def try_lock(self, number: int) -> bool:
        """Take the owner's lock ``number`` for this process; False if another process has it. Call it with `guard` held."""
        return self.locks.take(OWNER_LOCKS + number)

    def unlock(self, number: int) -> None:
        """Release the owner's lock ``number``. Call it with `guard` held."""
        self.locks.release(OWNER_LOCKS + number)

    def run_locked(self, number: int, work: Callable[[], _Result], late: _Result) -> _Result:
        """Return ``work()``, run with the owner's lock ``number`` held: as `FileLocks.run`. Call it with `guard` held."""
        return self.locks.run(OWNER_LOCKS + number, work, late)

    def count(self, counter: int, amount: int = 1) -> None:
        """Add to one of the `counters`, from any thread: the GIL, if there is one, is not released between load and store."""
        with self._counting:
            self.counters[counter] += amount

    def totals(self) -> list[int]:
        """Return the sums of the `counters` of all processes, also of the processes that have exited."""
        return sum_rows(self._bytes[COUNTERS_AT:EXTENTS_AT])

    def __reduce__(self) -> tuple[Callable[..., "Segment"], tuple[Any, ...]]:
        """Pickle as a handle: a descriptor for a process that is being spawned, the path of ours for a running process."""
        if not self._fds:
            return _of_this_process, (self._key, self.layout.control_bytes)
        spawning = get_spawning_popen() is not None
        handle = DupFd(self._fds[0]) if spawning else f"/proc/{os.getpid()}/fd/{self._fds[0]}"
        return _attach, (self._key, handle, self.backing, self.path)

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


def all_attached() -> list[Segment]:
    """Return all segments of this process."""
    return list(_attached.values())


def attached(key: FileKey) -> Segment | None:
    """Return the segment that this process has of a file. Call it with `registry.attaching` held."""
    return _attached.get(key)


def abandon(key: FileKey, fds: list[int]) -> None:
    """Close the descriptors of a file after attaching has failed. Call it with `registry.attaching` held."""
    _attached.pop(key, None)
    while fds:
        registry.close(fds.pop())


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
    size of /dev/shm does not limit it. A memfd also comes first if the kernel offers huge pages for it: /dev/shm has them only
    if it was mounted with huge=.
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


def _of_this_process(key: FileKey, control_bytes: int) -> Segment:
    """Return the segment without a file that this process has; in another process one that caches nothing."""
    return _attached.get(key) or _blank(control_bytes)


def _attach(key: FileKey, handle: Any, backing: str, path: str | None) -> Segment:
    """Return the segment of a pickled handle: the one that this process has, or a new one."""
    try:
        with registry.attaching:  # two threads must not make two segments of one file
            segment = _attached.get(key)
            if segment is None:
                return _attach_anew(key, handle, backing, path)
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
        status = os.stat(path)  # before opening: if it is a different segment, closing it would drop that segment's locks
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
        here.at_fork(after_in_child=_enter_child)
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
