"""Read files in pieces: a file on disk by pread, a file in memory."""

import contextlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from stocache.system.platform import here

HEAD_BYTES = 64 << 10
"""Bytes read when a file is opened: of a block the header, the checksums and offsets, and the first samples."""
_ZEROED = 8 << 10  # bytes of a buffer, from which zeroing it costs more than making it without
_STEP = 128 << 10  # bytes to read ahead in one call: of a longer range the kernel may read only the beginning


class ByteSource(ABC):
    """A file that is read in pieces."""

    nbytes: int

    @abstractmethod
    def read(self, at: int, nbytes: int, writable: bool = True) -> tuple[Any, int]:
        """Return a buffer with ``nbytes`` bytes of the file from offset ``at``, and their offset in that buffer.

        If ``writable``, the buffer is a new one that the caller may change; else the caller may only read it.

        Raises:
            ValueError: the file ends before.
        """

    def prefetch(self, at: int = 0, nbytes: int | None = None) -> None:  # noqa: B027
        """Ask for ``nbytes`` from offset ``at``, by default all, to be read ahead, if that is possible."""

    def close(self) -> None:  # noqa: B027
        """Close the file until it is read again, if it is open. Keep none of its bytes in memory."""


class _Descriptor:
    """An open file. It is closed with the last reference to it, so never while a thread reads."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | here.CLOSED_ON_EXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit the module may be gone before
        if self.fd >= 0:
            close(self.fd)


class File(ByteSource):
    """A file on disk that is read in pieces. It is closed with the last reference to it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: _Descriptor | None = _Descriptor(path)
        self.nbytes = os.fstat(self._descriptor.fd).st_size
        self._head = b""

    def open(self) -> "File":
        """Read the beginning of the file."""
        self.prefetch(0, HEAD_BYTES)  # else the kernel, which takes it for a sequential read, reads four times as much
        self._head = here.pread(self._opened().fd, HEAD_BYTES, 0)
        return self

    def close(self) -> None:
        """See `ByteSource`."""
        self._descriptor, self._head = None, b""

    def _opened(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            descriptor = self._descriptor = _Descriptor(self._path)
        return descriptor

    def read(self, at: int, nbytes: int, writable: bool = True) -> tuple[Any, int]:
        """See `ByteSource`."""
        end, head = at + nbytes, self._head  # another thread may close the file
        if end <= len(head):
            return (bytearray(head[at:end]), 0) if writable else (head, at)
        if end > self.nbytes:
            raise ValueError("it is truncated")
        descriptor = self._descriptor or self._opened()
        if not writable and len(data := here.pread(descriptor.fd, nbytes, at)) == nbytes:
            return data, 0
        buffer: Any = np.empty(nbytes, np.uint8) if writable and nbytes >= _ZEROED else bytearray(nbytes)
        done = here.preadv(descriptor.fd, [buffer], at)
        while done < nbytes:  # one call reads at most 2 GiB
            more = here.preadv(descriptor.fd, [memoryview(buffer)[done:]], at + done)
            if not more:
                raise ValueError("it is truncated")
            done += more
        return buffer, 0

    def prefetch(self, at: int = 0, nbytes: int | None = None) -> None:
        """Ask the kernel to read a part of the file ahead; see `ByteSource`."""
        end = self.nbytes if nbytes is None else at + nbytes
        if end > len(self._head):
            with contextlib.suppress(OSError):  # a file that is gone is an error when it is read
                descriptor = self._opened()
                for begin in range(at, end, _STEP):
                    here.read_ahead(descriptor.fd, begin, min(_STEP, end - begin))


class BytesFile(ByteSource):
    """A file in memory, in pieces. Each read is within one of them."""

    def __init__(self, *pieces: Any) -> None:
        *self._begins, self.nbytes = accumulate(map(len, pieces), initial=0)
        self._pieces = pieces

    def read(self, at: int, nbytes: int, writable: bool = True) -> tuple[Any, int]:
        """See `ByteSource`."""
        number = bisect_right(self._begins, at) - 1
        data, at = self._pieces[number], at - self._begins[number]
        if at + nbytes > len(data):
            raise ValueError("it is truncated")
        return (bytearray(data[at : at + nbytes]), 0) if writable else (data, at)
