"""Read, write and lock the files of a folder on disk; a folder at a URL has the same methods (`remote.RemoteStore`)."""

import contextlib
import errno
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Any, TypeAlias

from stocache.errors import StorageError
from stocache.storage.files import File
from stocache.storage.remote import RemoteStore
from stocache.storage.urls import is_url
from stocache.system.hashing import BytesLike
from stocache.system.platform import here
from stocache.system.waiting import describe_first, flock_owners, is_at_work, wait_until

logger = logging.getLogger("stocache")

_REPORT_S = 30.0  # seconds between two messages while a process waits for a second one
_STANDSTILL_S = 300.0  # seconds without a new file or a sign of life, after which it no longer waits


class LocalStore:
    """A folder on a disk of this machine, or on a network file system."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    @contextlib.contextmanager
    def locked(self, wait: bool = True) -> Iterator[None]:
        """Make the folder and hold its lock, so that no other process prepares there.

        If another process has the lock, wait for it as long as it makes progress, and log which process that is.

        Raises:
            StorageError: another process has the lock, and ``wait`` is False or it makes no progress.
        """
        os.makedirs(self.path, exist_ok=True)
        with contextlib.closing(here.Directory(self.path)) as folder:
            try:
                if not folder.lock():
                    if not wait:
                        raise StorageError(f"{self.path} is being prepared by another process. Wait for it, or end it.")
                    self._wait(folder)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF):  # file systems without locks
                    raise
            yield

    def _wait(self, folder: here.Directory) -> None:
        """Wait for the lock while its holder works or files change."""
        moved, seen = time.monotonic(), self._newest()
        while not wait_until(folder.lock, _REPORT_S):
            pids = flock_owners(folder.fd)
            who, newest = describe_first(pids), self._newest()
            if newest != seen or any(map(is_at_work, pids)):
                moved, seen = time.monotonic(), newest
            if time.monotonic() - moved > _STANDSTILL_S:
                raise StorageError(f"{self.path} is being prepared by {who}, which makes no progress. End or resume it.")
            logger.warning("waiting for %s, which is being prepared by %s.", self.path, who)

    def _newest(self) -> float:
        """Return when a file was last added or removed."""
        folders = [self.path, *(entry.path for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))]
        return max(os.stat(folder).st_mtime for folder in folders)

    def exists(self, name: str) -> bool:
        """Return whether the file exists."""
        return os.path.exists(self._at(name))

    def names(self, name: str = "") -> list[str]:
        """Return the names in the folder, or in a subfolder; [] if it does not exist."""
        try:
            return os.listdir(self._at(name))
        except FileNotFoundError:
            return []

    def open(self, name: str) -> File:
        """Open a file, to read it in pieces.

        Raises:
            FileNotFoundError: it does not exist.
        """
        return open_file(self._at(name))

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: it does not exist.
        """
        with open(self._at(name), "rb") as file:
            return file.read()

    def write(self, name: str, *pieces: BytesLike) -> None:
        """Write a file: all of it or nothing.

        Raises:
            OSError: the disk is full, or fails.
        """
        write_file(self._at(name), *pieces)

    def make(self, name: str) -> None:
        """Make a subfolder."""
        os.makedirs(self._at(name), exist_ok=True)

    def remove(self, name: str, folder: bool = False) -> None:
        """Remove a file, or with ``folder`` a subfolder and its content, if it exists."""
        if folder:
            shutil.rmtree(self._at(name), ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(name))


Folder: TypeAlias = LocalStore | RemoteStore


def folder_at(path: str, storage_options: dict[str, Any] | None = None) -> Folder:
    """Return the folder at a path or URL; ``storage_options`` are for fsspec.

    Raises:
        StorageError: ``path`` is a URL, and fsspec or a package that it needs is not installed.
    """
    return RemoteStore(path, storage_options) if is_url(path) else LocalStore(path)


def open_file(path: str) -> File:
    """Open a file on disk, to read it in pieces."""
    return File(path).open()


def write_file(path: str, *pieces: BytesLike) -> None:
    """Write a file from pieces: all of it or nothing. A file of that name is replaced.

    Raises:
        OSError: the disk is full, or fails.
    """
    temporary = f"{path}.{uuid.uuid4().int}.tmp"  # not the pid: a process of another machine may have the same
    try:
        with open(temporary, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise OSError(
            error.errno, f"{error.strerror}. Complete blocks stay, and preparing again continues from there. Writing", path
        ) from error
    with contextlib.closing(here.Directory(os.path.dirname(path) or ".")) as folder:
        folder.sync()
