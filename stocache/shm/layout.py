"""Lay out the file of a segment, and read and write its header.

A *segment* is a file in memory that processes share. Its *owner* is the cache or ring whose data it holds. An *extent* is the
part of the data that is reserved at a time.

    0            header: magic, format version, sizes, checksum; a descriptor in JSON; words that may change
    after it     `COUNTER_ROWS` counter rows of `COUNTER_WORDS` words, one row for each attached process
    EXTENTS_AT   extent states, one byte for each extent of the data
    control      bytes of the owner, reserved from the start (a cache keeps one state byte per sample here)
    data         data of the owner, at a multiple of 2 MiB, reserved extent by extent

The file is sparse until it is written. The header does not change once other processes can find the file, except for its last
words.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from stocache.errors import SegmentError
from stocache.system.limits import MIB, format_size
from stocache.system.platform import here

_HEADER = struct.Struct("<8sQQQQII")  # magic, version, control, data and extent bytes; bytes of the descriptor; CRC-32
_MAGIC, _VERSION = b"stocache", 4
LIMIT = struct.Struct("Q")
LIMIT_AT = 4080  # a `LIMIT`: how much of the data may be reserved; 0 for all of it
RANKS_AT = 4093  # how many ranks have attached, of the ranks that share a segment without a name
PERSISTS_AT = 4094  # set if the file stays when no process holds it
WARNED_AT = 4095  # bits: the warnings that a process has given
DESCRIPTOR_MAX = LIMIT_AT - _HEADER.size

COUNTERS_AT, COUNTER_ROWS, COUNTER_WORDS = 4096, 1024, 16
EXTENTS_AT = COUNTERS_AT + COUNTER_ROWS * COUNTER_WORDS * 8

UNRESERVED_EXTENT, RESERVED_EXTENT, REFUSED_EXTENT = range(3)  # the states of an extent

HUGE_PAGE = 2 * MIB
_CHUNK = MIB  # bytes that are read at a time
_ZEROS = bytes(4096)


@dataclass(frozen=True)
class Layout:
    """The sizes that fix every offset in the file.

    Attributes:
        descriptor: the owner's description of the data, up to `DESCRIPTOR_MAX` bytes; empty if no process looks for it.
    """

    control_bytes: int
    data_bytes: int
    extent_bytes: int
    descriptor: bytes = b""

    @classmethod
    def for_sizes(
        cls, control_bytes: int, data_bytes: int, descriptor: bytes = b"", extent_bytes: int | None = None
    ) -> "Layout":
        """Return the layout for new data. Extents have 2 MiB.

        ``extent_bytes``, a multiple of 4 KiB, sets a different size: a larger one for data that will be mostly holes, a smaller
        one for data that is written at random.
        """
        return cls(control_bytes, data_bytes, extent_bytes or HUGE_PAGE, descriptor)

    @property
    def extent_count(self) -> int:
        """The number of extents of the data."""
        return -(-self.data_bytes // self.extent_bytes)

    @property
    def control_at(self) -> int:
        """The offset of the control bytes."""
        return _round_up(EXTENTS_AT + self.extent_count, 4096)

    @property
    def data_at(self) -> int:
        """The offset of the data."""
        control_end = self.control_at + self.control_bytes
        return _round_up(control_end, HUGE_PAGE) if self.data_bytes else control_end

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data_at + self.data_bytes

    def span(self, extent: int) -> tuple[int, int]:
        """Return the offset of an extent in the file, and its size in bytes."""
        start = extent * self.extent_bytes
        return self.data_at + start, min(self.extent_bytes, self.data_bytes - start)

    def reserved_bytes(self, states: bytes | memoryview) -> int:
        """Return the bytes of data that are reserved, given the states of the extents."""
        return self._reserved_bytes(bytes(states), 0)

    def _reserved_bytes(self, states: bytes, first: int) -> int:
        """Return `reserved_bytes` of some of the extents, which begin with number ``first``."""
        count = states.count(RESERVED_EXTENT)
        last = self.extent_count - 1
        if first + len(states) > last and states[last - first : last - first + 1] == bytes([RESERVED_EXTENT]):
            return (count - 1) * self.extent_bytes + self.span(last)[1]
        return count * self.extent_bytes

    def allocate(self, fd: int) -> None:
        """Give a new, empty file its size and its header, and reserve memory for all but the data.

        Raises:
            OSError: the machine does not give the memory.
        """
        os.ftruncate(fd, self.size)
        here.reserve(fd, 0, self.control_at + self.control_bytes)
        os.pwrite(fd, self._pack(self._checksum()) + self.descriptor, 0)

    @classmethod
    def read(cls, fd: int) -> "Layout":
        """Read the layout of a file, and check it against the file.

        Raises:
            SegmentError: the file is not a segment, has a different format, is damaged or truncated. The message goes on after
                the path of the file: "is damaged: …".
        """
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise SegmentError(f"is not a segment of stocache: it begins with {header[:8]!r}, expected {_MAGIC!r}.")
        _, version, control_bytes, data_bytes, extent_bytes, descriptor_bytes, checksum = _HEADER.unpack(header)
        if version != _VERSION:
            raise SegmentError(f"has format version {version}, this stocache reads version {_VERSION}.")
        layout = cls(control_bytes, data_bytes, extent_bytes, os.pread(fd, min(descriptor_bytes, DESCRIPTOR_MAX), _HEADER.size))
        if layout._checksum() != checksum:
            raise SegmentError(f"has a damaged header (crc32 {layout._checksum():08x}, expected {checksum:08x}).")
        if extent_bytes == 0 or extent_bytes % 4096 or descriptor_bytes != len(layout.descriptor):
            raise SegmentError(f"is damaged: extents of {extent_bytes} bytes, {descriptor_bytes} bytes of descriptor.")
        # Before more is read: a forged header must not claim more than the file has
        layout._check_backed(fd, 0)
        layout._check_backed(fd, layout.count_reserved(fd))
        return layout

    def _check_backed(self, fd: int, reserved_bytes: int) -> None:
        """Raise SegmentError unless the file has the size and the memory that it needs with ``reserved_bytes`` of data."""
        status = os.fstat(fd)
        if status.st_size != self.size:
            raise SegmentError(f"is damaged: it has {status.st_size} bytes, its header says {self.size}.")
        backed = self.memory_bytes(reserved_bytes)
        if status.st_blocks * 512 < backed:  # another process truncated the file and extended it again
            raise SegmentError(
                f"is damaged: it has {format_size(status.st_blocks * 512)} of memory, expected {format_size(backed)}."
            )

    def promised_bytes(self, reserved_bytes: int, limit: int) -> int:
        """Return the bytes of data that may still be reserved. ``limit``: the most that may be reserved; 0 for all."""
        return max(0, min(limit or self.data_bytes, self.data_bytes) - reserved_bytes)

    def memory_bytes(self, reserved_bytes: int) -> int:
        """Return the memory that the file takes with ``reserved_bytes`` of data."""
        return _round_up(self.control_at + self.control_bytes, mmap.PAGESIZE) + _round_up(reserved_bytes, mmap.PAGESIZE)

    def count_reserved(self, fd: int) -> int:
        """Return the bytes of data that are reserved in a file."""
        return sum(self._reserved_bytes(states, first) for first, states in read_chunks(fd, EXTENTS_AT, self.extent_count))

    def _pack(self, checksum: int) -> bytes:
        sizes = self.control_bytes, self.data_bytes, self.extent_bytes, len(self.descriptor)
        return _HEADER.pack(_MAGIC, _VERSION, *sizes, checksum)

    def _checksum(self) -> int:
        return zlib.crc32(self._pack(0) + self.descriptor)


def read_chunks(fd: int, at: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield ``nbytes`` bytes of a file from ``at`` on in pieces, each with its offset from ``at``; fewer if the file ends."""
    for begin in range(0, nbytes, _CHUNK):
        yield begin, os.pread(fd, min(_CHUNK, nbytes - begin), at + begin)


def persists(fd: int) -> bool:
    """Return whether the file of a segment stays when no process holds it."""
    return os.pread(fd, 1, PERSISTS_AT) != b"\0"


def sum_rows(rows: bytes | memoryview) -> list[int]:
    """Return the sums of the counter rows. If a file is being truncated, only whole rows count."""
    row_bytes = 8 * COUNTER_WORDS
    data = bytes(rows[: len(rows) // row_bytes * row_bytes])
    used = len(data)
    while used and data.endswith(_ZEROS, 0, used):  # most rows are zero
        used -= len(_ZEROS)
    words = memoryview(data)[: _round_up(len(data[:used].rstrip(b"\0")), row_bytes)].cast("Q")
    return [sum(words[number::COUNTER_WORDS]) for number in range(COUNTER_WORDS)]


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
