"""Folders at an fsspec URL: files read and written there, or fetched once per machine (extra ``remote``)."""

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

from stocache.errors import DamagedError, LimitError, StorageError
from stocache.system.hashing import BytesLike, checksum
from stocache.system.limits import format_size, parse_size
from stocache.system.urls import file_system
from stocache.system.waiting import describe_first, flock_owners, try_flock, wait_until

logger = logging.getLogger("stocache")

_PART = ".part"
_STANDSTILL_S = 30.0  # seconds without a byte, after which the fetching of another process is no longer waited for
_HEAD = 64 << 10  # bytes read when a file is opened: most often all that is wanted of it


class RemoteStore:
    """A folder at a URL, with what `local.LocalStore` has. Connects anew in each process.

    Args:
        url: as fsspec understands it: s3://, gs://, https://, memory:// and so on.
        options: for the fsspec file system.

    Raises:
        StorageError: fsspec, or what it needs for this URL, is not installed; of each method, whatever the file system raises.
    """

    def __init__(self, url: str, options: dict[str, Any] | None) -> None:
        self.path, self._options = url.rstrip("/"), options or {}
        file_system(self.path, self._options, StorageError)

    @contextlib.contextmanager
    def at(self, name: str, done: str) -> Iterator[tuple[Any, str]]:
        """Give the file system, and the path of a file in it, to something that cannot be ``done`` if that raises an error."""
        fs, path = file_system(self.path, self._options, StorageError)
        try:
            fs.invalidate_cache()  # of listings: others write, too
            yield fs, f"{path}/{name}".rstrip("/")
        except FileNotFoundError:
            raise
        except Exception as error:
            raise StorageError(f"{self.path}/{name} cannot be {done}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def locked(self, wait: bool = True) -> Iterator[None]:
        """Make the folder. It cannot be locked: that nobody else prepares there is up to the user."""
        self.make("")
        yield

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        with self.at(name, "looked for") as (fs, path):
            return bool(fs.exists(path))

    def names(self, name: str = "") -> list[str]:
        """Return the names of what is in the folder, or in a folder in it; none if there is no such folder."""
        with contextlib.suppress(FileNotFoundError), self.at(name, "listed") as (fs, path):
            paths = [found.rstrip("/") for found in fs.ls(path, detail=False)]
            return [found.rpartition("/")[2] for found in paths if not path.endswith(found)]  # some list the folder itself
        return []

    def open(self, name: str) -> "RemoteFile":
        """Return a file, to be read in pieces.

        Raises:
            FileNotFoundError: there is none.
        """
        return RemoteFile(self, name)

    def read(self, name: str) -> bytes:
        """Return the content of a file, as it is now.

        Raises:
            FileNotFoundError: there is none.
        """
        with self.at(name, "read") as (fs, path):
            return bytes(fs.cat_file(path))

    def get(self, name: str, local: str) -> None:
        """Copy a file to a path here.

        Raises:
            FileNotFoundError: there is none.
        """
        with self.at(name, "fetched") as (fs, path):
            fs.get_file(path, local)

    def write(self, name: str, *pieces: BytesLike) -> None:
        """Write a file. Whole, or not at all, if the file system sees to that, as object stores do."""
        with self.at(name, "written") as (fs, path):
            fs.pipe_file(path, b"".join(pieces))

    def make(self, name: str) -> None:
        """Make a folder in it, where the file system has such a thing."""
        with self.at(name, "made") as (fs, path):
            fs.makedirs(path, exist_ok=True)

    def remove(self, name: str, folder: bool = False) -> None:
        """Remove a file, or a ``folder`` with all that is in it; if there is one."""
        with contextlib.suppress(FileNotFoundError), self.at(name, "removed") as (fs, path):
            fs.rm(path, recursive=folder)


class RemoteFile:
    """A file in a folder at a URL, as a `block.ByteSource`."""

    def __init__(self, folder: RemoteStore, name: str) -> None:
        self._folder, self._name = folder, name
        with folder.at(name, "opened") as (fs, path):
            self.nbytes = int(fs.size(path))
        self._head = self._cat(0, min(_HEAD, self.nbytes))

    def _cat(self, at: int, end: int) -> bytes:
        if at == end:  # for which some send all there is
            return b""
        with self._folder.at(self._name, "read") as (fs, path):
            return bytes(fs.cat_file(path, start=at, end=end))

    def read(self, at: int, nbytes: int, writable: bool = True) -> tuple[Any, int]:
        """See `block.ByteSource`."""
        end = at + nbytes
        data = self._head[at:end] if end <= len(self._head) else self._cat(at, end)
        if len(data) < nbytes:
            raise ValueError("it is cut")
        return (bytearray(data) if writable else data), 0

    def prefetch(self) -> None:
        """Do nothing: who reads more of it has it fetched."""


class Mirror:
    """The files of a remote folder that were needed lately.

    Args:
        remote: the folder.
        local_folder: where to; None for one in the user's cache directory, named by the URL.
        limit: bytes of it, or a str such as "50GB"; the files that were not used for longest go first.

    Raises:
        LimitError: no such size.

    Any number of processes and threads may fetch: one does, and the others wait for it as long as it gets on. Killed, it leaves
    a file that the next one writes over.
    """

    def __init__(self, remote: RemoteStore, local_folder: str | None, limit: int | str) -> None:
        self._remote = remote
        self._limit = parse_size(limit, "local_limit") if isinstance(limit, str) else limit
        if type(self._limit) is not int or self._limit < 1:
            raise LimitError(f"local_limit={limit!r} is no number of bytes. Use for example '50GB'.")
        if local_folder is None:
            home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            local_folder = os.path.join(home, "stocache", checksum(remote.path.encode()))
        self.folder = local_folder

    def forget(self, name: str) -> None:
        """Remove what was fetched of a file, which may have changed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    def fetch(self, name: str) -> str:
        """Return the path of a file, here; it stays until the limit is reached by others.

        Raises:
            DamagedError: there is none.
            StorageError: it cannot be fetched.
        """
        local = os.path.join(self.folder, name)
        while not _touched(local):
            os.makedirs(os.path.dirname(local), exist_ok=True)
            with _locked(local + _PART) as part:
                if part is None:  # who fetches it is stopped, perhaps
                    self._download(name, local, f"{local}.{uuid.uuid4().int}{_PART}")
                elif not os.path.exists(local) and _is(part, local + _PART):  # else another one has it done meanwhile
                    self._download(name, local, local + _PART)
        return local

    def _download(self, name: str, local: str, part: str) -> None:
        try:
            self._remote.get(name, part)
            self._make_room(os.path.getsize(part))
            os.rename(part, local)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            if isinstance(error, FileNotFoundError):
                raise DamagedError(f"{self._remote.path}/{name} is missing. Prepare it (again).") from None
            raise

    def _make_room(self, nbytes: int) -> None:
        """Remove the files that were not used for longest, until ``nbytes`` more are within the limit."""
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
            if total <= self._limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # those who have it open go on reading
            total -= size

    def __repr__(self) -> str:
        return f"{self._remote.path}, of which up to {format_size(self._limit)} in {self.folder}"


def _touched(path: str) -> bool:
    """Say that a file is in use, if it is there."""
    try:
        os.utime(path, ns=(time.time_ns(), time.time_ns()))
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int | None]:
    """Keep all others from this file; the kernel unlocks it when its holder dies.

    None where another process has it, and has not written to it for `_STANDSTILL_S`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not (locked := wait_until(lambda: try_flock(fd), _STANDSTILL_S)):
            if os.fstat(fd).st_mtime < time.time() - _STANDSTILL_S:
                logger.warning("%s is fetched twice: %s does not get on.", path, describe_first(flock_owners(fd)))
                break
        yield fd if locked else None
    finally:
        os.close(fd)


def _is(fd: int, path: str) -> bool:
    """Whether that path still leads to this file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
