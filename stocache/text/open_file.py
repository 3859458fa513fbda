"""Read an open file at any byte, and decompress gzip, bz2 and zstd in bounded memory."""

import bz2
import gzip
import zlib
from typing import IO, Any

from stocache.errors import StreamError

_FEED = 1 << 16  # bytes of compressed data that are read at a time
_WINDOW = 1 << 27  # most bytes that zstd may look back, and so keep in memory: the most it writes without --long=28
_BLOCKS = 16  # zstd blocks that are decompressed at a time, each to at most 128 KiB
_FRAME_HEADER = 18  # bytes of the longest header of a zstd frame
_SKIPPABLE = [bytes([0x50 + n]) for n in range(16)]  # first bytes of zstd frames that hold no text


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

    def __init__(self, raw: IO[bytes], compression: str, path: str) -> None:
        super().__init__(raw)
        self._compression, self._path = compression, path
        self._kept, self._at = b"", 0
        self._stream = self._rewind()

    def _rewind(self) -> Any:
        self._raw.seek(0)
        self._kept, self._at, self.damage = b"", 0, None
        if self._compression == "gzip":
            return gzip.GzipFile(fileobj=self._raw)
        if self._compression == "bz2":
            return bz2.BZ2File(self._raw)
        return _ZstdStream(self._path, self._raw)

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
    """A zstd file that is decompressed a few blocks at a time, and that reports an incomplete last frame.

    The library's ``decompressobj`` does not limit its output: 64 KiB of input may become 2 GiB. But a frame is a header and
    then blocks; each block begins with its length, and becomes 128 KiB at most. So this feeds it a few blocks at a time.
    Source: RFC 8878, section 3.1.1.
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
        self._complete = False  # True if they reach to the end of the frame
        self._summed = False  # True if a checksum follows the last block

    def read1(self, nbytes: int) -> bytes:
        """Return up to ``nbytes``; b"" only at the end."""
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
        """Begin the next frame. Return False at the end of the file."""
        while len(self._rest) < _FRAME_HEADER and self._read_more():
            pass
        if not self._rest:
            return False
        if self._rest[:1] in _SKIPPABLE and self._rest[1:4] == b"\x2a\x4d\x18":
            self._due, self._complete = 8 + int.from_bytes(self._rest[4:8], "little"), True
        else:
            try:
                self._due = self._library.frame_header_size(self._rest)
                header = self._library.get_frame_parameters(self._rest)
            except self._library.ZstdError as error:
                if len(self._rest) < _FRAME_HEADER:
                    raise EOFError("the last frame is not complete") from None
                raise OSError(str(error)) from None
            if header.window_size > _WINDOW:
                raise OSError(f"a frame wants {header.window_size >> 20} MiB of memory, {_WINDOW >> 20} MiB are allowed")
            self._complete, self._summed = False, header.has_checksum
        self._frame = self._new()
        return True

    def _few_blocks(self) -> int:
        """Return how many bytes of the rest may be decompressed; 0 if it holds too few."""
        for _ in range(_BLOCKS):
            if self._complete or self._due + 3 > len(self._rest):
                break
            head = int.from_bytes(self._rest[self._due : self._due + 3], "little")
            self._complete = bool(head & 1)
            self._due += 3 + (1 if head >> 1 & 3 == 1 else head >> 3)  # a block may be one byte, repeated
            self._due += 4 if self._complete and self._summed else 0
        return min(self._due, len(self._rest))


def _read_all(file: Any, nbytes: int) -> bytes:
    """Return ``nbytes``; fewer only at the end. One read may return fewer before it."""
    data = file.read(nbytes)
    if len(data) == nbytes or not data:
        return bytes(data)
    parts = [data]
    while nbytes > (got := sum(map(len, parts))) and (more := file.read(nbytes - got)):
        parts.append(more)
    return b"".join(parts)
