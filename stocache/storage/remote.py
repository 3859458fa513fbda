"""Read and write the files of a folder at an fsspec URL, and copy them once per machine (extra ``remote``)."""

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

from stocache.errors import DamagedError, LimitError, StorageError
from stocache.storage.files import HEAD_BYTES, ByteSource
from stocache.storage.urls import file_system
from stocache.system.hashing import BytesLike, checksum
from stocache.system.limits import format_size, parse_size
from stocache.system.platform import here
from stocache.system.waiting import describe_first, flock_owners, wait_until

logger = logging.getLogger("stocache")

_PART = ".part"
_STANDSTILL_S = 30.0  # seconds without a new byte, after which a process no longer waits for another one's download


class RemoteStore:
    """A folder at a URL, with the methods of `local.LocalStore`. Each process makes its own connection.

    Args:
        url: a URL that fsspec knows: s3://, gs://, https://, memory:// and so on.
        options: for the fsspec file system.

    Raises:
        StorageError: fsspec, or a package that it needs for this URL, is not installed. Every method raises it for errors of
            the file system.
    """

    def __init__(self, url: str, options: dict[str, Any] | None) -> None:
        self.path, self._options = url.rstrip("/"), options or {}
        file_system(self.path, self._options, StorageError)

    @contextlib.contextmanager
    def at(self, name: str, done: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path of a file in it.

        An error within, other than FileNotFoundError, becomes a StorageError: the file "cannot be ``done``".
        """
        fs, path = file_system(self.path, self._options, StorageError)
        try:
            fs.invalidate_cache()  # its cache of listings: other processes write too
            yield fs, f"{path}/{name}".rstrip("/")
        except FileNotFoundError:
            raise
        except Exception as error:
            raise StorageError(f"{self.path}/{name} cannot be {done}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def locked(self, wait: bool = True) -> Iterator[None]:
        """Make the folder. A URL cannot be locked: the user runs one preparation at a time."""
        self.make("")
        yield

    def exists(self, name: str) -> bool:
        """Return whether the file exists."""
        with self.at(name, "looked for") as (fs, path):
            return bool(fs.exists(path))

    def names(self, name: str = "") -> list[str]:
        """Return the names in the folder, or in a subfolder; [] if it does not exist."""
        with contextlib.suppress(FileNotFoundError), self.at(name, "listed") as (fs, path):
            paths = [found.rstrip("/") for found in fs.ls(path, detail=False)]
            return [found.rpartition("/")[2] for found in paths if not path.endswith(found)]  # some list the folder itself
        return []

    def open(self, name: str) -> "RemoteFile":
        """Open a file, to read it in pieces.

        Raises:
            FileNotFoundError: it does not exist.
        """
        return RemoteFile(self, name)

    def read(self, name: str) -> bytes:
        """Return the current content of a file.

        Raises:
            FileNotFoundError: it does not exist.
        """
        with self.at(name, "read") as (fs, path):
            return bytes(fs.cat_file(path))

    def get(self, name: str, local: str) -> None:
        """Copy a file to a local path.

        Raises:
            FileNotFoundError: it does not exist.
        """
        with self.at(name, "fetched") as (fs, path):
            fs.get_file(path, local)

    def write(self, name: str, *pieces: BytesLike) -> None:
        """Write a file. Object stores write all of it or nothing; other file systems may leave a part."""
        with self.at(name, "written") as (fs, path):
            fs.pipe_file(path, b"".join(pieces))

    def make(self, name: str) -> None:
        """Make a subfolder, if the file system has folders."""
        with self.at(name, "made") as (fs, path):
            fs.makedirs(path, exist_ok=True)

    def remove(self, name: str, folder: bool = False) -> None:
        """Remove a file, or with ``folder`` a subfolder and its content, if it exists."""
        with contextlib.suppress(FileNotFoundError), self.at(name, "removed") as (fs, path):
            fs.rm(path, recursive=folder)


class RemoteFile(ByteSource):
    """A file in a folder at a URL. `Mirror` copies one that is read often."""

    def __init__(self, folder: RemoteStore, name: str) -> None:
        self._folder, self._name = folder, name
        with folder.at(name, "opened") as (fs, path):
            self.nbytes = int(fs.size(path))
        self._head = self._cat(0, min(HEAD_BYTES, self.nbytes))

    def _cat(self, at: int, end: int) -> bytes:
        if at == end:  # some servers answer an empty range with the whole file
            return b""
        with self._folder.at(self._name, "read") as (fs, path):
            return bytes(fs.cat_file(path, start=at, end=end))

    def read(self, at: int, nbytes: int, writable: bool = True) -> tuple[Any, int]:
        """See `files.ByteSource`."""
        end = at + nbytes
        data = self._head[at:end] if end <= len(self._head) else self._cat(at, end)
        if len(data) < nbytes:
            raise ValueError("it is truncated")
        return (bytearray(data) if writable else data), 0


class Mirror:
    """Local copies of the files of a remote folder, up to a limit.

    Args:
        remote: the folder.
        local_folder: where the copies are; None for a folder in the user's cache directory, named by the URL.
        limit: bytes of the copies, or a str such as "50GB". The least recently used files are removed first.

    Attributes:
        limit: bytes of the copies.

    Raises:
        LimitError: ``limit`` is not a size.

    Any number of processes and threads may fetch a file: one downloads it, and the others wait as long as it makes progress. If
    it is killed, it leaves a part that the next one overwrites.
    """

    def __init__(self, remote: RemoteStore, local_folder: str | None, limit: int | str) -> None:
        self._remote = remote
        self.limit = parse_size(limit, "local_limit") if isinstance(limit, str) else limit
        if type(self.limit) is not int or self.limit < 1:
            raise LimitError(f"local_limit={limit!r} is not a number of bytes. Use for example '50GB'.")
        if local_folder is None:
            home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            local_folder = os.path.join(home, "stocache", checksum(remote.path.encode()))
        self.folder = local_folder

    def forget(self, name: str) -> None:
        """Remove the copy of a file that may have changed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    def fetch(self, name: str) -> str:
        """Return the path of the local copy of a file; download it if needed. It may be removed when other files need room.

        Raises:
            DamagedError: the file does not exist.
            StorageError: it cannot be downloaded.
        """
        local = os.path.join(self.folder, name)
        while not _touched(local):
            os.makedirs(os.path.dirname(local), exist_ok=True)
            with _locked(local + _PART) as part:
                if part is None:  # the process that downloads it may be stopped
                    self._download(name, local, f"{local}.{uuid.uuid4().int}{_PART}")
                elif not os.path.exists(local) and _is(part, local + _PART):  # else another process completed it meanwhile
                    self._download(name, local, local + _PART)
        return local

    def _download(self, name: str, local: str, part: str) -> None:
        try:
            self._remote.get(name, part)
            self._make_room(os.path.getsize(part))
            here.rename_open(part, local)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            if isinstance(error, FileNotFoundError):
                raise DamagedError(f"{self._remote.path}/{name} is missing. Prepare it (again).") from None
            raise

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently used files, until ``nbytes`` more fit within the limit."""
        files = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(folder, name)
                    facts = os.stat(path)
                    if not name.endswith(_PART):
                        files.append((facts.st_mtime_ns, facts.st_size, path))
        total = nbytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                break
            with contextlib.suppress(FileNotFoundError):
                here.unlink_open(path)  # a process that has it open can still read it
            total -= size

    def __repr__(self) -> str:
        return f"{self._remote.path}, of which up to {format_size(self.limit)} in {self.folder}"


def _touched(path: str) -> bool:
    """Set the time of a file to now, and return whether it exists."""
    try:
        os.utime(path, ns=(time.time_ns(), time.time_ns()))
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int | None]:
    """Open a file and hold its lock, which the kernel releases if this process dies.

    Yields None if another process has the lock, and has not written to the file for `_STANDSTILL_S`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | here.CLOSED_ON_EXEC, 0o644)
    try:
        while not (locked := wait_until(lambda: here.lock_file(fd), _STANDSTILL_S)):
            if os.fstat(fd).st_mtime < time.time() - _STANDSTILL_S:
                logger.warning("%s is fetched twice: %s makes no progress.", path, describe_first(flock_owners(fd)))
                break
        yield fd if locked else None
    finally:
        os.close(fd)


def _is(fd: int, path: str) -> bool:
    """Return whether ``path`` still names the file of descriptor ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
