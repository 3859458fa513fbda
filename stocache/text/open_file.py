"""Read an open file at any byte, and decompress gzip, bz2 and zstd in bounded memory."""

import bz2
import gzip
import zlib
from typing import IO, Any

_PIECE = 1 << 16  # bytes that zstd decompresses at a time: what comes before damage is not lost


class OpenFile:
    """A file that can be read at any byte.

    Attributes:
        damage: why compressed data ends too early, once that point has been read; None before, and for sound files.
    """

    damage: str | None = None

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from ``offset`` on; fewer only at the end of the file."""
        self._raw.seek(offset)
        return _read_all(self._raw, nbytes)

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


class CompressedFile(OpenFile):
    """A compressed file. Offsets count decompressed bytes; reading at a lower offset starts again from the beginning.

    Keeps the bytes it read last, since a search for a line end reads beyond it and then goes back.
    """

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        super().__init__(raw)
        self._compression = compression
        self._kept, self._at = b"", 0
        self._stream = self._rewind()

    def _rewind(self) -> Any:
        self._raw.seek(0)
        self._kept, self._at, self.damage = b"", 0, None
        if self._compression == "gzip":
            return gzip.GzipFile(fileobj=self._raw)
        if self._compression == "bz2":
            return bz2.BZ2File(self._raw)
        return _ZstdStream(self._raw)

    def read_at(self, offset: int, nbytes: int) -> bytes:  # noqa: D102
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
        """Add the next bytes to the kept ones. Return False at the end."""
        parts = [self._kept]
        try:
            while self.damage is None and nbytes > 0 and (part := self._stream.read1(nbytes)):
                parts.append(part)
                nbytes -= len(part)
        except EOFError as error:
            self.damage = f"its {self._compression} data is cut: {error}"
        except (OSError, zlib.error) as error:
            self.damage = f"its {self._compression} data is damaged: {error}"
        self._kept = b"".join(parts)
        return len(parts) > 1


class _ZstdStream:
    """A zstd file that pyarrow decompresses. Unlike the library zstandard, it reports an incomplete last frame."""

    def __init__(self, raw: IO[bytes]) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(_Borrowed(raw), "r"), "zstd")

    def read1(self, nbytes: int) -> bytes:
        """Return up to ``nbytes``; b"" only at the end."""
        try:
            return bytes(self._stream.read(min(nbytes, _PIECE)))
        except OSError as error:
            if "Truncated" in str(error):
                raise EOFError("the last frame is not complete") from None
            if "too much memory" in str(error):
                raise OSError("a frame wants more than the 128 MiB of memory that are allowed") from None
            raise


class _Borrowed:
    """A file that pyarrow does not close when it lets go of it."""

    closed = False

    def __init__(self, raw: IO[bytes]) -> None:
        self.read = raw.read

    def close(self) -> None:
        """Leave the file open."""


def _read_all(file: Any, nbytes: int) -> bytes:
    """Return ``nbytes``; fewer only at the end. One read may return fewer before it."""
    data = file.read(nbytes)
    if len(data) == nbytes or not data:
        return bytes(data)
    parts = [data]
    while nbytes > (got := sum(map(len, parts))) and (more := file.read(nbytes - got)):
        parts.append(more)
    return b"".join(parts)
