"""Files at an fsspec URL, fetched whole, once per machine, into a local folder of limited size (extra ``remote``)."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Any

from stocache.checksums import checksum
from stocache.errors import DamagedError, LimitError, StocacheError, StorageError
from stocache.limits import format_size, parse_size

_PART = ".part"


class Mirror:
    """The files of a remote folder that were needed lately.

    Args:
        url: the folder, as fsspec understands it: s3://, gs://, https://, memory:// and so on.
        local_folder: where to; None for one in the user's cache directory, named by the URL.
        limit: bytes of it, or a str such as "50GB"; the files that were not used for longest go first.
        storage_options: for the fsspec file system.

    Raises:
        StorageError: fsspec, or what it needs for this URL, is not installed.
        LimitError: no such size.

    Any number of processes and threads may fetch: one does, and the others wait for it. Killed, it leaves a file that the next
    one writes over.
    """

    def __init__(self, url: str, local_folder: str | None, limit: int | str, storage_options: dict[str, Any] | None) -> None:
        self.url, self._options = url.rstrip("/"), storage_options or {}
        self._limit = parse_size(limit, "local_limit") if isinstance(limit, str) else limit
        if type(self._limit) is not int or self._limit < 1:
            raise LimitError(f"local_limit={limit!r} is no number of bytes. Use for example '50GB'.")
        if local_folder is None:
            home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            local_folder = os.path.join(home, "stocache", checksum(self.url.encode()))
        self.folder = local_folder
        self._connect()

    def _connect(self) -> tuple[Any, str]:
        return file_system(self.url, self._options, StorageError)

    def exists(self, name: str) -> bool:
        """Whether there is such a file at the URL."""
        fs, path = self._connect()
        return bool(fs.exists(f"{path}/{name}"))

    def read(self, name: str) -> bytes:
        """Return the content of a file, as it is at the URL now.

        Raises:
            FileNotFoundError: there is none.
        """
        fs, path = self._connect()
        return bytes(fs.cat_file(f"{path}/{name}"))

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
                if not os.path.exists(local) and _is(part, local + _PART):  # else another one has it done meanwhile
                    self._download(name, local)
        return local

    def _download(self, name: str, local: str) -> None:
        fs, path = self._connect()
        try:
            fs.get_file(f"{path}/{name}", local + _PART)
        except FileNotFoundError:
            os.unlink(local + _PART)
            raise DamagedError(f"{self.url}/{name} is missing. Prepare it (again).") from None
        except Exception as error:  # whatever the file system raises
            raise StorageError(f"{self.url}/{name} cannot be fetched: {type(error).__name__}: {error}") from error
        self._make_room(os.path.getsize(local + _PART))
        os.rename(local + _PART, local)

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
        return f"{self.url}, of which up to {format_size(self._limit)} in {self.folder}"


def file_system(url: str, options: dict[str, Any], problem: type[StocacheError]) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it; in each process anew, since few survive a fork.

    Raises:
        problem: fsspec, or what it needs for this URL, is not installed.
    """
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise problem(f"{url} cannot be opened: {error}. pip install 'stocache[remote]', and what it names.") from None
    return fs, path


def _touched(path: str) -> bool:
    """Say that a file is in use, if it is there."""
    try:
        os.utime(path, ns=(time.time_ns(), time.time_ns()))
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Keep all others from this file; the kernel unlocks it when its holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _is(fd: int, path: str) -> bool:
    """Whether that path still leads to this file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
