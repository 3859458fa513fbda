"""Keep the directory of a user's named segments: lock it, check its files, and find out which processes hold them.

NOTE [ Holding a file ]
    Every process that uses a named segment has a shared flock on its open file description. Forked children, and processes that
    were sent the descriptor, share it. The kernel drops it when the last of them ends, however that ends. So a process that
    gets the exclusive flock, through a description of its own, knows that no process holds the segment. A flock on the
    directory makes making, attaching, leaving and removing exclude each other: each of them works on facts that stay true.

NOTE [ Locks and forks ]
    A flock belongs to the open file description, which a fork shares. A child that another thread forks at the wrong moment
    would keep the lock when its parent is killed. So `_momentary` lists the descriptors that hold these locks for a moment, and
    a child closes them first.

NOTE [ Interrupts and finalizers ]
    An interrupt (Ctrl-C) may come between any two steps, also at the first step of a function that cleans up. So a descriptor
    is noted before it is locked, the lock is released before the descriptor is forgotten, and `run_locked` releases twice.

    The garbage collector may also run there, and find a segment that is not used any more. Leaving it takes the lock of
    the directory, which this thread may hold, or be about to take. So finalizers only register a task (`when_free`). It
    runs at once if `attaching` is free; else the thread that holds `attaching` runs it afterwards.

NOTE [ Whose directory ]
    Every user may write to /dev/shm, so a directory with the name of ours may be another user's. It is opened once, without
    following links; owner and mode are checked on the open descriptor; and all files in it are opened through that descriptor.
    If another user has taken the name, this user's caches are not shared.
"""

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from stocache.errors import BusyError, CacheNameError, SegmentError
from stocache.shm.layout import persists
from stocache.system import limits
from stocache.system.platform import here
from stocache.system.waiting import (
    FileKey,
    describe_first,
    flock_owners,
    identify,
    is_at_work,
    listed_locks,
    printable,
    wait_until,
)

logger = logging.getLogger("stocache")

_PREFIX = "stocache-"  # and the number of the user
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")

DIRECTORY_PATIENCE_S = 10.0
"""Seconds to wait for the lock of a directory."""

_LONGEST_S = 60.0  # while other processes take the lock in turn, or its holder is running
_LEAVING_S = 1.0  # when a segment is left; a later process removes a file that stays

attaching = threading.Lock()
"""Held while this process makes, attaches or leaves a segment."""

_momentary: set[int] = set()
_timed_out: set[str] = set()  # directories whose lock could not be taken in time
_due_tasks: deque[Callable[[], None]] = deque()

_Result = TypeVar("_Result")


class ForeignError(SegmentError):
    """Another user has taken the path of this user's directory."""


def path_of(name: str) -> str:
    """Return the path of a named segment of this user.

    Raises:
        CacheNameError: ``name`` is not a valid name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CacheNameError(
            f"name={name!r:.120} cannot name a cache. Use up to 100 letters, digits, '.', '_' and '-', not beginning with '.' "
            f"or '-'."
        )
    return f"{directory_of()}/{name}"


def directory_of() -> str:
    """Return the directory of the named segments of this user; see NOTE [ Whose directory ]."""
    return f"{limits.SHM_DIR}/{_PREFIX}{here.user()}"


def run_locked(path: str, work: Callable[[int | None], _Result], create: bool = False) -> _Result:
    """Return ``work(descriptor)``, with the lock of a directory held.

    The descriptor is the descriptor of the directory; None if the directory does not exist and ``create`` is False. Afterwards
    the directory is removed if it is empty.

    Raises:
        ForeignError: it belongs to another user.
        SegmentError: it is not a directory, or others may write to it.
        BusyError: another process holds the lock.
        OSError: it cannot be made.
    """
    return run_attaching(lambda: _run_locked(path, work, create, DIRECTORY_PATIENCE_S))


def run_attaching(work: Callable[[], _Result]) -> _Result:
    """Return ``work()``, run while no other thread of this process makes, attaches or leaves a segment."""
    try:
        with attaching:
            return work()
    finally:
        run_due_tasks()


def when_free(task: Callable[[], None]) -> None:
    """Run a task when `attaching` is free. It may be run twice. See NOTE [ Interrupts and finalizers ]."""
    _due_tasks.append(task)
    run_due_tasks()


def run_due_tasks() -> None:
    """Run the tasks of `when_free`, unless a thread holds `attaching`."""
    while _due_tasks and not attaching.locked():
        with attaching:
            if _due_tasks:
                _due_tasks[0]()
                _due_tasks.popleft()


def _run_locked(path: str, work: Callable[[int | None], _Result], create: bool, wait_s: float) -> _Result:
    lock = _Lock(path)
    try:
        return work(lock.take(create, wait_s))
    finally:
        try:
            lock.release()
        finally:  # again: an interrupt may have come before the first
            lock.release()


class _Lock:
    """The lock of a directory. Use it with `attaching` held."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self._taken = False

    def take(self, create: bool, wait_s: float) -> int | None:
        """Open the directory, check it, and lock it."""
        while self._open(create):
            assert self._fd is not None
            _momentary.add(self._fd)
            self._wait(self._fd, wait_s)
            if _leads_to(self._path, self._fd):
                # From here on release() may remove the directory; before, the path may lead to a new one of another process
                self._taken = True
                os.utime(self._fd)  # shows to waiting processes since when it is locked
                return self._fd
            self.release()  # it was removed while we waited
        return None

    def release(self) -> None:
        """Release the lock. Twice is fine."""
        fd = self._fd
        if fd is None:
            return
        if self._taken:
            self._taken = False
            with contextlib.suppress(OSError):
                os.rmdir(self._path)
        here.unlock_file(fd)
        self._fd = None  # before it is closed: the number may be a different file's then
        _momentary.discard(fd)
        os.close(fd)

    def _open(self, create: bool) -> bool:
        """Open the directory, and check it; False if it does not exist."""
        path = self._path
        if not here.SHARES_MEMORY:  # nothing has a name there
            return False
        while True:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o700)
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                if create:
                    continue  # another process removed its last segment, and the directory with it
                return False
            except OSError as error:  # a link, a file, or a directory that we may not open
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue
                _check_owner(path, status, ForeignError)
                if not stat.S_ISDIR(status.st_mode):
                    raise SegmentError(f"{path} is not a directory. Remove it.") from None
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):  # else it has become one since
                    raise
                continue
            status = os.fstat(self._fd)
            _check_owner(path, status, ForeignError)
            _check_mode(path, status, "chmod 700")
            return True

    def _wait(self, fd: int, wait_s: float) -> None:
        """Take the flock. Wait as long as other processes take it in turn, or its holder is running."""
        if self._path in _timed_out:
            wait_s = 0.0
        deadline = time.monotonic() + min(_LONGEST_S, 6 * wait_s)
        while True:
            since = os.fstat(fd).st_mtime
            if wait_until(lambda: here.lock_file(fd), wait_s):
                _timed_out.discard(self._path)
                return
            pids = flock_owners(fd)
            if time.monotonic() > deadline or (os.fstat(fd).st_mtime == since and not any(map(is_at_work, pids))):
                break
        _timed_out.add(self._path)
        raise BusyError(
            f"{self._path} has been locked by {describe_first(pids)} since "
            f"{time.strftime('%H:%M:%S', time.localtime(since))}, which should take milliseconds. Resume or end it."
        )


def _leads_to(path: str, fd: int) -> bool:
    """Return whether a path still leads to the file of a descriptor."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _check_owner(path: str, status: os.stat_result, problem: type[SegmentError]) -> None:
    if status.st_uid != here.user():
        raise problem(
            f"{path} belongs to user {status.st_uid}, not to {here.user()}. It is not used; have its owner remove it."
        )


def _check_mode(path: str, status: os.stat_result, remedy: str) -> None:
    if status.st_mode & 0o077:
        raise SegmentError(f"{path} is open to others (mode {status.st_mode & 0o777:o}). If it is yours: {remedy} {path}")


def key_of(at: int, path: str) -> FileKey | None:
    """Return the key of the file ``path`` in the directory ``at``; None if it does not exist.

    Raises:
        SegmentError: it is a link, a pipe or the like, belongs to another user, or is open to others.
    """
    try:
        status = os.stat(os.path.basename(path), dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return _checked(path, status)


def _checked(path: str, status: os.stat_result) -> FileKey:
    if not stat.S_ISREG(status.st_mode):
        kind = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"}.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise SegmentError(f"{printable(path)} is {kind}, so it is not used. Remove it.")
    _check_owner(printable(path), status, SegmentError)
    _check_mode(printable(path), status, "chmod 600")
    return status.st_dev, status.st_ino


def open_file(at: int, path: str) -> int | None:
    """Open a file that `key_of` has checked, and check it again; None if it was removed meanwhile.

    The caller passes the descriptor to `hold` or `close`.

    Raises:
        SegmentError: as `key_of`.
    """
    try:
        fd = os.open(os.path.basename(path), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        return None
    _momentary.add(fd)
    try:
        _checked(path, os.fstat(fd))
    except BaseException:
        close(fd)
        raise
    return fd


def hold(fd: int) -> None:
    """Take the shared flock on a descriptor, and keep it; see NOTE [ Holding a file ]."""
    if not here.lock_file(fd, shared=True):
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
    _momentary.discard(fd)


def close(fd: int) -> None:
    """Close a descriptor of this module."""
    _momentary.discard(fd)
    os.close(fd)


def is_held(fd: int) -> bool:
    """Return whether a process holds the file of a descriptor that does not itself hold it."""
    if not here.lock_file(fd):
        return True
    here.unlock_file(fd)
    return False


def remove_unheld(path: str, key: FileKey) -> bool:
    """Remove a named segment, unless a process holds it, it persists, or the path leads to a different file by now.

    Call it with `attaching` held.
    """

    def remove(at: int | None) -> bool:
        if at is None or key_of(at, path) != key:
            return False
        fd = open_file(at, path)
        if fd is None:
            return False
        try:
            if identify(fd) != key or is_held(fd) or persists(fd):
                return False
            os.unlink(os.path.basename(path), dir_fd=at)
            return True
        finally:
            close(fd)

    return _run_locked(os.path.dirname(path), remove, create=False, wait_s=_LEAVING_S)


def enter_child() -> None:
    """Close, in a forked child, the descriptors that its parent was using for a moment; see NOTE [ Locks and forks ]."""
    global attaching
    attaching = threading.Lock()
    for fd in _momentary:
        with contextlib.suppress(OSError):
            os.close(fd)
    _momentary.clear()


def lock_owners(first: int, count: int) -> dict[FileKey, list[int]]:
    """Return, for each file, the processes that have fcntl locks at offsets ``[first, first + count)``.

    The source is /proc/locks, which leaves out processes of other containers.
    """
    owners: dict[FileKey, set[int]] = {}
    for kind, _, pid, key, begin in listed_locks():
        if kind == "POSIX" and first <= begin < first + count:
            owners.setdefault(key, set()).add(pid)
    return {key: sorted(pids) for key, pids in owners.items()}


def paths_of(pid: int, key: FileKey) -> Iterator[str]:
    """Yield the paths through which a process has a file open. Raises OSError if it has ended or is another user's."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            status = os.stat(path)
            if (status.st_dev, status.st_ino) == key:
                yield path


def backing_of(path: str) -> str:
    """Return where the file is that a path of `paths_of` leads to."""
    return limits.SHM_DIR if os.readlink(path).startswith(f"{limits.SHM_DIR}/") else "memfd"


def deleted_files(pid: int, device: int) -> set[str]:
    """Return the former paths of deleted files on a device that a process has open.

    The set is empty if the process has ended or belongs to another user.
    """
    paths = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                path = os.readlink(link)
                if path.endswith(" (deleted)") and os.stat(link).st_dev == device:
                    paths.add(path.removesuffix(" (deleted)"))
    return paths
