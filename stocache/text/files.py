"""Find text files by path, glob or URL, read them at any byte, and detect changes."""

import glob
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from stocache.errors import DamagedError, StreamError
from stocache.storage.urls import file_system, is_url
from stocache.system.hashing import checksum
from stocache.system.on_error import Retry
from stocache.text.open_file import CompressedFile, OpenFile

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_ENDS = 1 << 16  # bytes at either end of a file; their checksum detects changes


@dataclass(frozen=True)
class TextFile:
    """A file as it was when it was found.

    Attributes:
        path: as the user gave it, or as the glob found it; may be a URL.
        size: bytes, as stored.
        stamp: time or version of the last write, as the file system reports it.
        ends: checksum of its first and last ``_ENDS`` bytes.
        compression: "gzip", "bz2", "zstd", or None.
        options: for the fsspec file system.
    """

    path: str
    size: int
    stamp: str
    ends: str
    compression: str | None
    options: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def open(self) -> OpenFile:
        """Open the file for reading.

        Raises:
            DamagedError: it has changed since it was found.
        """
        self.check()
        raw: IO[bytes] = _open_raw(self.path, self.options)
        if self.compression is None:
            return OpenFile(raw)
        return CompressedFile(raw, self.compression)

    def check(self) -> None:
        """Raise DamagedError if a local file is gone, or has a different size or time than when it was found."""
        try:
            changed = not is_url(self.path) and _size_and_stamp(os.stat(self.path)) != (self.size, self.stamp)
        except FileNotFoundError:
            raise DamagedError(f"{self.path} is gone.") from None
        if changed:
            raise DamagedError(f"{self.path} has changed while it was being read. The next epoch will read it as it is then.")


class FileReader:
    """Reads some files at any byte, and keeps the last one open.

    Safe from any thread. A copy in another process opens the file itself.
    """

    _open: tuple[int, OpenFile] | None  # with its number

    def __init__(self, files: Sequence[TextFile], retry: Retry | None = None) -> None:
        self._files, self._retry = files, retry
        self._reset()

    def read_at(self, number: int, offset: int, nbytes: int) -> tuple[bytes, str | None]:
        """Return bytes of a file, and the damage if the file ends before them because of it."""
        with self._locked():
            read = partial(self._read_at, number, offset, nbytes)
            return read() if self._retry is None else self._retry.call(read, self._close)

    def _read_at(self, number: int, offset: int, nbytes: int) -> tuple[bytes, str | None]:
        if self._open is None or self._open[0] != number:
            self._close()
            self._open = number, self._files[number].open()
        file = self._open[1]
        data = file.read_at(offset, nbytes)
        return data, file.damage if len(data) < nbytes else None

    def close(self) -> None:
        """Close the open file. Reading opens it again."""
        with self._locked():
            self._close()

    def _locked(self, getpid: Callable[[], int] = os.getpid) -> threading.Lock:  # at exit the module may be gone before
        if self._pid != getpid():  # forked: the file's position is shared with the parent, and the lock may stay locked
            self._reset()
        return self._lock

    def _reset(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._open = None

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()

    def __getstate__(self) -> tuple[Sequence[TextFile], Retry | None]:
        return self._files, self._retry

    def __setstate__(self, state: tuple[Sequence[TextFile], Retry | None]) -> None:
        self._files, self._retry = state
        self._reset()


def find_files(paths: Paths, storage_options: dict[str, Any] | None = None) -> list[TextFile]:
    """Return the files of one or more paths, globs and URLs; the files of a glob are sorted.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches nothing.
        StreamError: there is no path; a file is not a regular file of text; or a package that a URL needs is not installed.
    """
    options = storage_options or {}
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found = [file for path in paths for file in _expand(os.fspath(path), options)]
    if not found:
        raise StreamError("a StreamLoader needs at least one file, got none.")
    return [_describe(path, options) for path in found]


def _expand(path: str, options: dict[str, Any]) -> list[str]:
    if is_url(path):
        scheme = path.partition("://")[0]
        if not glob.has_magic(path.partition("?")[0] if scheme.startswith("http") else path):
            return [path]
        fs, inside = file_system(path, options, StreamError)
        matches = [fs.unstrip_protocol(name) for name in sorted(fs.glob(inside))]
    else:
        if not glob.has_magic(path) or os.path.exists(path):
            return [path]
        matches = [name for name in sorted(glob.glob(path, recursive=True)) if not os.path.isdir(name)]
    if not matches:
        raise FileNotFoundError(f"no file matches {path}")
    return matches


def _describe(path: str, options: dict[str, Any]) -> TextFile:
    if not is_url(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise StreamError(f"{path} is not a regular file, so it cannot be read twice. Give a file.")
    with _open_raw(path, options) as file:
        if is_url(path):
            info = file.fs.info(file.path) if hasattr(file, "fs") and hasattr(file, "path") else {}
            size = file.seek(0, os.SEEK_END)
            stamp = "".join(str(info.get(key, "")) for key in ("ETag", "etag", "mtime", "LastModified", "created"))
        else:
            size, stamp = _size_and_stamp(os.fstat(file.fileno()))
        file.seek(0)
        head = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        tail = file.read(_ENDS)
    compression = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if compression is None and head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise StreamError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8")
    return TextFile(path, size, stamp, checksum(head, tail), compression, options)


def _size_and_stamp(found: os.stat_result) -> tuple[int, str]:
    return found.st_size, str(found.st_mtime_ns)


def _open_raw(path: str, options: dict[str, Any]) -> Any:
    """Open a file without decompression; a local one without a buffer."""
    if not is_url(path):
        return open(path, "rb", buffering=0)
    fs, inside = file_system(path, options, StreamError)
    return fs.open(inside, "rb")
