"""What every system gives: memory of this process, which its threads share, and locks of files.

There are no locks of bytes, because no other process has the memory; see `stocache.shm.segment`. What is of use only where
processes share memory, or a child is forked to load samples, is in `linux` alone.
"""

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psutil

_fcntl: Any = None
_msvcrt: Any = None  # if there is neither, files are locked against nobody
with contextlib.suppress(ImportError):
    import fcntl as _fcntl  # macOS, BSD
with contextlib.suppress(ImportError):
    import msvcrt as _msvcrt  # Windows

SHARES_MEMORY = False
OPEN_FILES = ""
SYNCS_FOLDERS = sys.platform != "win32"  # which does so by itself

CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # as on Windows

_positions = threading.Lock()  # of files, where they must be moved to read elsewhere
_LOCKED_AT = 1 << 30  # the byte that stands for a whole file on Windows, behind its end
_FILES = 512  # that a program in C may have open on Windows


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
    except OSError:
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


def reserve(fd: int, at: int, nbytes: int) -> None:
    """Give a part of a file its memory: the system does so when it is written."""


def _pread(fd: int, nbytes: int, at: int) -> bytes:
    with _positions:
        os.lseek(fd, at, os.SEEK_SET)
        return os.read(fd, nbytes)


def _preadv(fd: int, buffers: Sequence[Any], at: int) -> int:
    data = _pread(fd, sum(memoryview(buffer).nbytes for buffer in buffers), at)
    done = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        part = data[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
    return done


pread, preadv = getattr(os, "pread", _pread), getattr(os, "preadv", _preadv)


def open_folder(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a folder, to lock it or to open files in it."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | CLOSED_ON_EXEC)


def read_ahead(fd: int, at: int, nbytes: int) -> None:
    """Have the system read a part of a file into the page cache: it does when it is read."""


def drop_pages(fd: int, at: int = 0, nbytes: int = 0) -> None:
    """Have the system drop a part of a file from the page cache: it does when it needs the memory."""


def limit_of(name: str) -> tuple[int, int]:
    """Return a limit of this process, such as "NOFILE", and the most to which it can be raised; -1 for none."""
    try:
        import resource
    except ImportError:
        return (_FILES, _FILES) if name == "NOFILE" else (-1, -1)
    return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))


def user() -> int:
    """Return the number of the user of this process, as ``st_uid`` of a file has it: 0 on Windows."""
    return os.geteuid() if sys.platform != "win32" else 0


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1


def at_fork(**hooks: Callable[[], object]) -> None:
    """Call functions ``before`` a fork, ``after_in_parent`` and ``after_in_child``, where the system has forks."""
    if sys.platform != "win32":
        os.register_at_fork(**hooks)
