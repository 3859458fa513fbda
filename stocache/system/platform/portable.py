"""What every system offers: memory of this process, which its threads share, and locks of files.

There are no locks of bytes, because no other process has the memory; see `stocache.shm.segment`. What is of use only if
processes share memory, or a child is forked to load samples, is in `linux` alone.
"""

import contextlib
import errno
import getpass
import hashlib
import mmap
import os
import select
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from stocache.system.platform.many_reads import Columns, Indices

_fcntl: Any = None
_msvcrt: Any = None  # if there is neither, files are locked against nobody
_resource: Any = None
with contextlib.suppress(ImportError):
    import fcntl as _fcntl  # macOS, BSD
with contextlib.suppress(ImportError):
    import msvcrt as _msvcrt  # Windows
with contextlib.suppress(ImportError):
    import resource as _resource  # macOS, BSD

SHARES_MEMORY = False
OPEN_FILES = ""

PIPE_BYTES: int = getattr(select, "PIPE_BUF", 0)
CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # as on Windows

_positions = threading.Lock()  # of files, if they must be moved to read elsewhere
_LOCKED_AT = 1 << 30  # the byte that stands for a whole file on Windows, behind its end
_FILES = 8192  # that a process may have open on Windows


def lock_byte(fd: int, offset: int) -> bool:
    """Take the lock of one byte of a file: no other process has it."""
    return True


def unlock_byte(fd: int, offset: int) -> None:
    """Release the lock of a byte."""


def holder_of_byte(fd: int, offset: int) -> int | None:
    """Return the process that has the lock of a byte: None, as no other process has it."""
    return None


def lock_file(fd: int, shared: bool = False) -> bool:
    """Take the lock of an open file, or a share of it; False if other processes have it. Windows knows no shares."""
    try:
        if _fcntl is not None:
            _fcntl.flock(fd, (_fcntl.LOCK_SH if shared else _fcntl.LOCK_EX) | _fcntl.LOCK_NB)
        elif _msvcrt is not None and not shared:
            os.lseek(fd, _LOCKED_AT, os.SEEK_SET)
            _msvcrt.locking(fd, _msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):  # errors of flock and of msvcrt
        return False
    return True


def unlock_file(fd: int) -> None:
    """Release the lock of an open file."""
    if _fcntl is not None:
        _fcntl.flock(fd, _fcntl.LOCK_UN)
    elif _msvcrt is not None:
        try:
            os.lseek(fd, _LOCKED_AT, os.SEEK_SET)
            _msvcrt.locking(fd, _msvcrt.LK_UNLCK, 1)
        except OSError:  # it was not locked
            pass


def open_mode(fd: int) -> int:
    """Return the flags with which a file may have been opened: they are not known."""
    return os.O_RDWR


def reserve(fd: int, at: int, nbytes: int) -> None:
    """Give a part of a file its memory: the system does so when it is written."""


def _pread(fd: int, nbytes: int, at: int) -> bytes:
    with _positions:
        os.lseek(fd, at, os.SEEK_SET)
        return os.read(fd, nbytes)


def _pwrite(fd: int, data: Any, at: int) -> int:
    with _positions:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, data)


pread, pwrite = getattr(os, "pread", _pread), getattr(os, "pwrite", _pwrite)
"""Read from a descriptor at an offset, or write there."""


def preadv(fd: int, buffers: Sequence[Any], at: int, wait: bool = True) -> int:
    """Read into buffers. Without ``wait``, raise BlockingIOError: no system but Linux says what its page cache has."""
    if not wait:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    done = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        data = pread(fd, len(view), at + done)
        view[: len(data)] = data
        done += len(data)
        if len(data) < len(view):
            break
    return done


def read_rows(fd: int, at: "Indices", columns: "Columns", rows: "Indices", wait: bool) -> list[int]:
    """Read rows of a file into the memory of a batch; see `many_reads.read_rows`."""
    from stocache.system.platform import many_reads  # not above: light commands do without numpy

    return many_reads.read_row_by_row(preadv, fd, at, columns, rows, wait)


def pwritev(fd: int, buffers: Sequence[Any], at: int) -> int:
    """Write buffers at an offset."""
    return pwrite(fd, b"".join(buffers), at)


def rename_open(old: str, new: str) -> None:
    """Give a file that this process has open a different name, which may be taken; on Windows, give that name to a copy."""
    try:
        os.replace(old, new)
    except PermissionError:
        copy = f"{old}.{uuid.uuid4().int}"
        shutil.copyfile(old, copy)
        os.replace(copy, new)


def unlink_open(path: str) -> None:
    """Remove a file that a process may have open; Windows keeps such a file."""
    with contextlib.suppress(PermissionError):
        os.unlink(path)


def disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file takes on its disk."""
    return status.st_size


class Directory:
    """A folder. Links in it are not followed.

    Its lock is the lock of a file of the temporary folder, because Windows has no descriptors of folders.

    Raises:
        OSError: it cannot be read; NotADirectoryError if it is a file.
    """

    fd = -1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._left = os.path.realpath(path), list[str]()
        os.scandir(self.path).close()  # which raises what opening it would; each written block makes a Directory

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor of a file in it."""
        path = os.path.join(self.path, name)
        if os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return os.open(path, flags | CLOSED_ON_EXEC, 0o600)

    def stat(self, name: str = "") -> os.stat_result:
        """Return the status of a file in it, or its own."""
        return os.lstat(os.path.join(self.path, name) if name else self.path)

    def names(self) -> list[str]:
        """Return the names in it."""
        return os.listdir(self.path)

    def rename(self, old: str, new: str) -> None:
        """Give a file a different name, which may be taken."""
        os.replace(os.path.join(self.path, old), os.path.join(self.path, new))

    def remove(self, *names: str) -> None:
        """Remove files, if they are there; on Windows one that is open here is removed by `close`."""
        for name in names:
            try:
                os.unlink(os.path.join(self.path, name))
            except FileNotFoundError:
                pass
            except PermissionError:
                if name in self._left:
                    raise
                self._left.append(name)

    def free_bytes(self) -> int:
        """Return the bytes that this user may still write on its disk."""
        return shutil.disk_usage(self.path).free

    def sync(self) -> None:
        """Write its names to the disk: the system does."""

    def lock(self) -> bool:
        """Take its lock; False if another process has it."""
        if self.fd < 0:
            name = f"stocache-{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]}.lock"
            self.fd = os.open(os.path.join(tempfile.gettempdir(), name), os.O_RDWR | os.O_CREAT | CLOSED_ON_EXEC, 0o600)
        return lock_file(self.fd)

    def close(self) -> None:
        """Release its lock. Twice is fine."""
        self.remove(*self._left)
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            unlock_file(fd)
            os.close(fd)


def read_ahead(fd: int, at: int, nbytes: int) -> None:
    """Have the system read a part of a file into the page cache: it does when it is read."""


def drop_pages(fd: int, at: int = 0, nbytes: int = 0) -> None:
    """Have the system drop a part of a file from the page cache: it does when it needs the memory."""


sync: Callable[[], None] = getattr(os, "sync", lambda: None)
"""Write all files to their disks, if a program may ask for that."""


def limit_of(name: str) -> tuple[int, int]:
    """Return a limit of this process, such as "NOFILE", and the most to which it can be raised; `sys.maxsize` for none."""
    if _resource is None:
        soft = hard = _FILES if name == "NOFILE" else sys.maxsize
    else:
        soft, hard = _resource.getrlimit(getattr(_resource, f"RLIMIT_{name}"))
    return (soft if soft >= 0 else sys.maxsize), (hard if hard >= 0 else sys.maxsize)


user: Callable[[], int] = getattr(os, "geteuid", int)
"""Return the number of the user of this process, as ``st_uid`` of a file has it: on Windows 0."""


def name_of_user(uid: int) -> str:
    """Return the name of a user."""
    return getpass.getuser()


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1


def at_fork(**hooks: Callable[[], object]) -> None:
    """Call functions ``before`` a fork, ``after_in_parent`` and ``after_in_child``, if the system has forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)
