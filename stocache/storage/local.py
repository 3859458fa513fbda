"""Where files are kept: a folder on disk, with all that writing and reading them takes, or one at a URL, with the same."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Any, TypeAlias

from stocache.errors import StorageError
from stocache.storage.block import File
from stocache.storage.remote import RemoteStore
from stocache.system.hashing import BytesLike
from stocache.system.urls import is_url
from stocache.system.waiting import describe_first, flock_owners, is_at_work, try_flock, wait_until

logger = logging.getLogger("stocache")

_REPORT_S = 30.0  # between two messages of whom a process waits for
_STANDSTILL_S = 300.0  # without a new file, or a sign of that process


class LocalStore:
    """A folder on a disk of this machine, or one that it shares with others."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    @contextlib.contextmanager
    def locked(self, wait: bool = True) -> Iterator[None]:
        """Make the folder, and keep all others from preparing there.

        Another process that prepares there is waited for, and named, as long as it gets on.

        Raises:
            StorageError: another process prepares there, and we are not to ``wait`` for it; or it does not get on.
        """
        os.makedirs(self.path, exist_ok=True)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                if not try_flock(fd):
                    if not wait:
                        raise StorageError(f"{self.path} is being prepared by another process. Wait for it, or end it.")
                    self._wait(fd)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF):  # file systems without locks
                    raise
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # for workers too, which have it open as long as an error's traceback holds them
            os.close(fd)

    def _wait(self, fd: int) -> None:
        """Wait for the lock of the folder, which another process has, while that is at work or files come."""
        moved, seen = time.monotonic(), self._newest()
        while not wait_until(lambda: try_flock(fd), _REPORT_S):
            pids = flock_owners(fd)
            who, newest = describe_first(pids), self._newest()
            if newest != seen or any(map(is_at_work, pids)):
                moved, seen = time.monotonic(), newest
            if time.monotonic() - moved > _STANDSTILL_S:
                raise StorageError(f"{self.path} is being prepared by {who}, which does not get on. End it, or have it go on.")
            logger.warning("waiting for %s, which is being prepared by %s.", self.path, who)

    def _newest(self) -> float:
        """Return when the last file came, or went."""
        folders = [self.path, *(entry.path for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))]
        return max(os.stat(folder).st_mtime for folder in folders)

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return os.path.exists(self._at(name))

    def names(self, name: str = "") -> list[str]:
        """Return the names of what is in the folder, or in a folder in it; none if there is no such folder."""
        try:
            return os.listdir(self._at(name))
        except FileNotFoundError:
            return []

    def open(self, name: str) -> File:
        """Return a file, to be read in pieces.

        Raises:
            FileNotFoundError: there is none.
        """
        return open_file(self._at(name))

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        with open(self._at(name), "rb") as file:
            return file.read()

    def write(self, name: str, *pieces: BytesLike) -> None:
        """Write a file whole, or not at all.

        Raises:
            OSError: the disk is full, or fails.
        """
        write_file(self._at(name), *pieces)

    def make(self, name: str) -> None:
        """Make a folder in it."""
        os.makedirs(self._at(name), exist_ok=True)

    def remove(self, name: str, folder: bool = False) -> None:
        """Remove a file, or a ``folder`` with all that is in it; if there is one."""
        if folder:
            shutil.rmtree(self._at(name), ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(name))


Folder: TypeAlias = LocalStore | RemoteStore


def folder_at(path: str, storage_options: dict[str, Any] | None = None) -> Folder:
    """Return the folder at a path, or, with these options for fsspec, at a URL.

    Raises:
        StorageError: it is a URL, and fsspec, or what it needs for that, is not installed.
    """
    return RemoteStore(path, storage_options) if is_url(path) else LocalStore(path)


def open_file(path: str) -> File:
    """Return a file on disk, to be read in pieces."""
    return File(path).open()


def write_file(path: str, *pieces: BytesLike) -> None:
    """Write a file, in pieces, whole, or not at all; another of that name is replaced.

    Raises:
        OSError: the disk is full, or fails.
    """
    temporary = f"{path}.{uuid.uuid4().int}.tmp"  # not a pid, which another machine may have given, too
    try:
        with open(temporary, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise OSError(
            error.errno, f"{error.strerror}. What is whole stays, and preparing again goes on from there. Writing", path
        ) from error
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
