"""Files of text, wherever they are: found by path, glob or URL, decompressed as they are read, and told when they change."""

import bz2
import glob
import gzip
import os
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from stocache.errors import DamagedError, StreamError
from stocache.system.hashing import checksum
from stocache.system.urls import file_system, is_url

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_ENDS = 1 << 16  # bytes at either end of a file that tell whether it is another one
_FEED = 1 << 16  # compressed bytes at a time
_WINDOW = 1 << 27  # bytes that zstd may look back, and so keep in memory: as many as it writes without being told --long=28
_BLOCKS = 16  # of zstd at a time, of 128 KiB each
_FRAME_HEADER = 18  # bytes of the longest
_SKIPPABLE = [bytes([0x50 + n]) for n in range(16)]  # first bytes of frames that hold no text


@dataclass(frozen=True)
class TextFile:
    """A file as it was when it was found.

    Attributes:
        path: as the user knows it: of a file here, or a URL.
        size: bytes, as stored.
        stamp: when, or in what version, it was written last, as the file system says it.
        ends: checksum of its first and last 64 KiB.
        compression: "gzip", "bz2", "zstd", or None.
        options: for the fsspec file system.
    """

    path: str
    size: int
    stamp: str
    ends: str
    compression: str | None
    options: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def open(self) -> "OpenFile":
        """Return it, to be read from.

        Raises:
            DamagedError: it has changed since it was found.
        """
        self.check()
        raw: IO[bytes] = _open_raw(self.path, self.options)
        if self.compression is None:
            return OpenFile(raw)
        try:
            return _Inflated(self, raw)
        except BaseException:
            raw.close()
            raise

    def check(self) -> None:
        """Raise DamagedError if a local file has another size or time than when it was found, or is gone."""
        try:
            changed = not is_url(self.path) and _facts(os.stat(self.path)) != (self.size, self.stamp)
        except FileNotFoundError:
            raise DamagedError(f"{self.path} is gone.") from None
        if changed:
            raise DamagedError(f"{self.path} has changed while it was being read. The next epoch will read it as it is then.")


def find_files(paths: Paths, storage_options: dict[str, Any] | None = None) -> list[TextFile]:
    """Return the files that are meant by one or more paths, globs and URLs, each glob sorted.

    Raises:
        FileNotFoundError: there is none.
        StreamError: there is no path at all, or what a URL needs is not installed.
    """
    options = storage_options or {}
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found = [file for path in paths for file in _expand(os.fspath(path), options)]
    if not found:
        raise StreamError("a StreamLoader needs at least one file, got none.")
    return [_found(path, options) for path in found]


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


def _found(path: str, options: dict[str, Any]) -> TextFile:
    if not is_url(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise StreamError(f"{path} is no regular file, so it cannot be read a second time.")
    with _open_raw(path, options) as file:
        if is_url(path):
            info = file.fs.info(file.path) if hasattr(file, "fs") and hasattr(file, "path") else {}
            size = file.seek(0, os.SEEK_END)
            stamp = "".join(str(info.get(key, "")) for key in ("ETag", "etag", "mtime", "LastModified", "created"))
        else:
            size, stamp = _facts(os.fstat(file.fileno()))
        file.seek(0)
        head = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        tail = file.read(_ENDS)
    compression = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if compression is None and head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise StreamError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8")
    return TextFile(path, size, stamp, checksum(head, tail), compression, options)


def _facts(found: os.stat_result) -> tuple[int, str]:
    return found.st_size, str(found.st_mtime_ns)


def _open_raw(path: str, options: dict[str, Any]) -> Any:
    """Return a file as it is stored, unbuffered where it is here."""
    if not is_url(path):
        return open(path, "rb", buffering=0)
    fs, inside = file_system(path, options, StreamError)
    return fs.open(inside, "rb")


class OpenFile:
    """A file that is read from any byte.

    Attributes:
        damage: why compressed data ends sooner than it should, once that has been reached; None where all is well.
    """

    damage: str | None = None

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from ``offset`` on, fewer only at the end of the file."""
        self._raw.seek(offset)
        return _read_all(self._raw, nbytes)

    def close(self) -> None:
        """Give the descriptor back."""
        self._raw.close()


class _Inflated(OpenFile):
    """A compressed file: bytes are counted as they come out of it, and going back means to begin again.

    What was read last is kept, since who looks for the end of a line reads beyond it.
    """

    def __init__(self, file: TextFile, raw: IO[bytes]) -> None:
        super().__init__(raw)
        self._file, self._kept, self._at = file, b"", 0
        self._stream = self._rewind()

    def _rewind(self) -> Any:
        self._raw.seek(0)
        self._kept, self._at, self.damage = b"", 0, None
        if self._file.compression == "gzip":
            return gzip.GzipFile(fileobj=self._raw)
        if self._file.compression == "bz2":
            return bz2.BZ2File(self._raw)
        return _ZstdStream(self._file.path, self._raw)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < self._at:
            self._stream = self._rewind()
        while (ahead := offset - self._at - len(self._kept)) > 0:
            self._at += len(self._kept)
            self._kept = b""
            if not self._read_on(min(1 << 20, ahead)):
                return b""
        begin = offset - self._at
        if (missing := begin + nbytes - len(self._kept)) > 0:
            self._kept, self._at, begin = self._kept[begin:], offset, 0
            self._read_on(missing)
        return self._kept[begin : begin + nbytes]

    def _read_on(self, nbytes: int) -> bool:
        """Add the next bytes to those kept; False when there are none."""
        parts = [self._kept]
        try:
            while self.damage is None and nbytes > 0 and (part := self._stream.read1(nbytes)):
                parts.append(part)
                nbytes -= len(part)
        except EOFError as error:
            self.damage = f"its {self._file.compression} data is cut: {error}"
        except (OSError, zlib.error) as error:
            self.damage = f"its {self._file.compression} data is damaged: {error}"
        self._kept = b"".join(parts)
        return len(parts) > 1


class _ZstdStream:
    """A zstd file as it is decompressed; unlike the readers of the library, it notices when the last frame is not complete.

    What the library's ``decompressobj`` makes of its input has no limit of its own: 64 KiB of it may become 2 GiB. But a frame
    is a header and then blocks, of which each becomes 128 KiB at most, and begins with its length. So it is fed few blocks at
    a time. Source: RFC 8878, section 3.1.1.
    """

    def __init__(self, path: str, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise StreamError(f"{path} is compressed with zstd. pip install 'stocache[codecs]'") from None
        self._library = zstandard
        self._new = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj
        self._raw, self._rest, self._out = raw, b"", b""
        self._frame: Any = None
        self._due = 0  # bytes from the beginning of the rest to the next block, or to the end of the frame
        self._complete = False  # whether it is the end
        self._summed = False  # whether a checksum follows the last block

    def read1(self, nbytes: int) -> bytes:
        """Return up to ``nbytes``, none only at the end."""
        while not self._out:
            if self._frame is None and not self._begin():
                return b""
            size = self._few_blocks()
            if not size:
                if self._complete and not self._due:
                    raise OSError("a frame does not end with its last block")
                if not self._read_more():
                    raise EOFError("the last frame is not complete")
                continue
            data, self._rest, self._due = self._rest[:size], self._rest[size:], self._due - size
            try:
                self._out = self._frame.decompress(data)
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data + self._rest, None
        out, self._out = self._out[:nbytes], self._out[nbytes:]
        return out

    def _read_more(self) -> bool:
        more = self._raw.read(_FEED)
        self._rest += more
        return bool(more)

    def _begin(self) -> bool:
        """Begin a frame; False when there is none."""
        while len(self._rest) < _FRAME_HEADER and self._read_more():
            pass
        if not self._rest:
            return False
        if self._rest[:1] in _SKIPPABLE and self._rest[1:4] == b"\x2a\x4d\x18":
            self._due, self._complete = 8 + int.from_bytes(self._rest[4:8], "little"), True
        else:
            try:
                self._due = self._library.frame_header_size(self._rest)
                its = self._library.get_frame_parameters(self._rest)
            except self._library.ZstdError as error:
                if len(self._rest) < _FRAME_HEADER:
                    raise EOFError("the last frame is not complete") from None
                raise OSError(str(error)) from None
            if its.window_size > _WINDOW:
                raise OSError(f"a frame wants {its.window_size >> 20} MiB of memory, {_WINDOW >> 20} MiB are allowed")
            self._complete, self._summed = False, its.has_checksum
        self._frame = self._new()
        return True

    def _few_blocks(self) -> int:
        """Return how many bytes of the rest may be decompressed; 0 when more of them are needed."""
        for _ in range(_BLOCKS):
            if self._complete or self._due + 3 > len(self._rest):
                break
            head = int.from_bytes(self._rest[self._due : self._due + 3], "little")
            self._complete = bool(head & 1)
            self._due += 3 + (1 if head >> 1 & 3 == 1 else head >> 3)  # a block may be one byte, repeated
            self._due += 4 if self._complete and self._summed else 0
        return min(self._due, len(self._rest))


def _read_all(file: Any, nbytes: int) -> bytes:
    """Return ``nbytes``, fewer only at the end: a read may be cut short."""
    data = file.read(nbytes)
    if len(data) == nbytes or not data:
        return bytes(data)
    parts = [data]
    while nbytes > (got := sum(map(len, parts))) and (more := file.read(nbytes - got)):
        parts.append(more)
    return b"".join(parts)
