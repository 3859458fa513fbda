"""What Linux gives: memory that processes share, and locks of the kernel that end with their process."""

import fcntl
import mmap
import os
import resource
import struct
from collections.abc import Callable

SHARES_MEMORY = True
"""Whether processes can share a cache."""

OPEN_FILES = "/proc/self/fd"
"""The directory of the descriptors of this process, by which a forked child opens files anew; "" where there is none."""

CLOSED_ON_EXEC = os.O_CLOEXEC
SYNCS_FOLDERS = True
"""Whether the entries of a folder must be written to the disk like a file."""

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
"""Options of `mmap.mmap` for memory that a forked child does not share."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: kind, whence, start, length, process


# ---------------------------------------------------------------------------------------------------- locks


def lock_byte(fd: int, offset: int) -> bool:
    """Take the lock of one byte of a file for this process; False if another process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock_byte(fd: int, offset: int) -> None:
    """Release the lock of a byte, if this process has it."""
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, offset)


def holder_of_byte(fd: int, offset: int) -> int | None:
    """Return the process that has the lock of a byte; 0 if it is not visible from here, None if no other process has it."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def lock_file(fd: int, shared: bool = False) -> bool:
    """Take the lock of an open file, or a share of it; False if other processes have it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_file(fd: int) -> None:
    """Release the lock of an open file."""
    fcntl.flock(fd, fcntl.LOCK_UN)


# ---------------------------------------------------------------------------------------------------- memory and files


def reserve(fd: int, at: int, nbytes: int) -> None:
    """Give a part of a file its memory now, so that writing there cannot fail."""
    os.posix_fallocate(fd, at, nbytes)


def seal(fd: int) -> None:
    """Forbid to shrink or grow a file in memory: SIGBUS kills the reader of a truncated one."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


pread, preadv = os.pread, os.preadv
"""Read from a descriptor at an offset, and leave its position."""


def open_folder(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a folder, to lock it or to open files in it."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read_ahead(fd: int, at: int, nbytes: int) -> None:
    """Have the system read a part of a file into the page cache."""
    os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_WILLNEED)


def drop_pages(fd: int, at: int = 0, nbytes: int = 0) -> None:
    """Have the system drop a part of a file from the page cache; 0 bytes for all."""
    os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_DONTNEED)


def open_mode(fd: int) -> int:
    """Return the flags with which a file was opened."""
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def limit_of(name: str) -> tuple[int, int]:
    """Return a limit of this process, such as "NOFILE", and the most to which it can be raised; -1 for none."""
    return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))


# ---------------------------------------------------------------------------------------------------- processes


def user() -> int:
    """Return the number of the user of this process, as ``st_uid`` of a file has it."""
    return os.geteuid()


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def at_fork(**hooks: Callable[[], object]) -> None:
    """Call functions ``before`` a fork, ``after_in_parent`` and ``after_in_child``."""
    os.register_at_fork(**hooks)
