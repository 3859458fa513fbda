"""What Linux offers: memory that processes share, and locks of the kernel that end with their process."""

import contextlib
import fcntl
import mmap
import os
import pwd
import resource
import select
import struct
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stocache.system.platform.many_reads import Columns, Indices

SHARES_MEMORY = True
"""Whether processes can share a cache."""

OPEN_FILES = "/proc/self/fd"
"""The directory of the descriptors of this process, by which a forked child opens files anew; "" if there is none."""

CLOSED_ON_EXEC = os.O_CLOEXEC

PIPE_BYTES = select.PIPE_BUF
"""The bytes that a pipe takes at once if `select.poll` finds it ready; 0 if it is not said."""

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
"""Options of `mmap.mmap` for memory that a forked child does not share."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: kind, whence, start, length, process


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


def reserve(fd: int, at: int, nbytes: int) -> None:
    """Give a part of a file its memory now, so that writing there cannot fail."""
    os.posix_fallocate(fd, at, nbytes)


def seal(fd: int) -> None:
    """Forbid to shrink or grow a file in memory: SIGBUS kills the reader of a truncated one."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


pread, pwrite, pwritev = os.pread, os.pwrite, os.pwritev
"""Read from a descriptor at an offset, or write there, and leave its position."""


def preadv(fd: int, buffers: Sequence[Any], at: int, wait: bool = True) -> int:
    """Read into buffers. Without ``wait``, raise BlockingIOError or read less if the page cache does not have all."""
    return os.preadv(fd, buffers, at, 0 if wait else os.RWF_NOWAIT)


def read_rows(fd: int, at: "Indices", columns: "Columns", rows: "Indices", wait: bool) -> list[int]:
    """Read rows of a file into the memory of a batch; see `many_reads.read_rows`."""
    from stocache.system.platform import many_reads  # not above: light commands do without numpy

    return many_reads.read_rows(preadv, fd, at, columns, rows, wait)


rename_open, unlink_open = os.replace, os.unlink
"""Rename a file that this process has open to a name that may be taken; remove a file that a process may have open."""


def disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file takes on its disk, if parts of it may have none."""
    return status.st_blocks * 512


class Directory:
    """An open folder: its files are found even if its path comes to name a different one, and links in it are not followed.

    Raises:
        OSError: it cannot be opened; NotADirectoryError if it is a file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        """The descriptor that `lock` locks."""

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor of a file in it, without waiting for a FIFO."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.fd)

    def stat(self, name: str = "") -> os.stat_result:
        """Return the status of a file in it, or its own."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False) if name else os.fstat(self.fd)

    def names(self) -> list[str]:
        """Return the names in it."""
        return os.listdir(self.fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file a different name, which may be taken, and write that to the disk."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def remove(self, *names: str) -> None:
        """Remove files, if they are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def free_bytes(self) -> int:
        """Return the bytes that this user may still write on its disk."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def sync(self) -> None:
        """Write its names to the disk."""
        os.fsync(self.fd)

    def lock(self) -> bool:
        """Take its lock; False if another process has it. Raises OSError on a file system without locks."""
        return lock_file(self.fd)

    def close(self) -> None:
        """Close it, and release its lock. Twice is fine."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with contextlib.suppress(OSError):
                unlock_file(fd)  # forked children have it open too
            os.close(fd)


def read_ahead(fd: int, at: int, nbytes: int) -> None:
    """Have the system read a part of a file into the page cache."""
    os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_WILLNEED)


def drop_pages(fd: int, at: int = 0, nbytes: int = 0) -> None:
    """Have the system drop a part of a file from the page cache; 0 bytes for all."""
    os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_DONTNEED)


sync = os.sync
"""Write all files to their disks."""


def open_mode(fd: int) -> int:
    """Return the flags with which a file was opened."""
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def limit_of(name: str) -> tuple[int, int]:
    """Return a limit of this process, such as "NOFILE", and the most to which it can be raised; `sys.maxsize` for none."""
    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return (soft if soft >= 0 else sys.maxsize), (hard if hard >= 0 else sys.maxsize)


def user() -> int:
    """Return the number of the user of this process, as ``st_uid`` of a file has it."""
    return os.geteuid()


def name_of_user(uid: int) -> str:
    """Return the name of a user. Raises KeyError or OverflowError if it has none."""
    return pwd.getpwuid(uid).pw_name


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def at_fork(**hooks: Callable[[], object]) -> None:
    """Call functions ``before`` a fork, ``after_in_parent`` and ``after_in_child``."""
    os.register_at_fork(**hooks)
