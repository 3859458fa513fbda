"""Turn the samples of a disk cache into bytes: *rows*, if all have one structure, or *records* of any size."""

import base64
import functools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stocache.cache.slots import as_bytes, make_column
from stocache.errors import SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.record_decoder import RecordReader
from stocache.samples.record_encoder import RecordPacker, integers_codec
from stocache.samples.spec import Structure
from stocache.samples.type_lookup import NotImported
from stocache.shm.pool import Pool
from stocache.shm.segment import MOST_BUFFERS

_FOOT = struct.Struct("<QII")  # behind a record: bytes of its leaves, the number for its integers, bytes of its treedef
_MOST = 1 << 26  # bytes of an example
_MOST_AT_ONCE = 1 << 30  # bytes of a row that is read into a batch; Linux reads at most 2 GiB at once
_READERS = 1024  # readers of treedefs that a process keeps

_Bytes = NDArray[np.uint8]


class SampleFormat(Protocol):
    """How samples become bytes and samples again.

    Attributes:
        nbytes: bytes of each sample; None if they vary.
        fills_batches: whether `Rows.buffers` can be read into.
        unreadable: why `decode` raised NotImported in this process, if it did.
    """

    nbytes: int | None
    fills_batches: bool
    unreadable: str

    def encode(self, sample: Any, where: str, /) -> list[Any]:
        """Return the bytes of a sample, in buffers that may be its own memory. Raises SampleError, which names ``where``."""

    def decode(self, data: _Bytes, nbytes: int, /) -> Any:
        """Return the sample in the first ``nbytes`` of memory that the sample may keep.

        Raises:
            SegmentError: it is damaged.
            NotImported: it has a class of a module that is not imported here.
        """


class Rows:
    """Samples of one structure: the values of their leaves, each at a multiple of 8 bytes.

    Attributes:
        nbytes: bytes of a sample.
        fills_batches: whether rows can be read into the memory of a batch.
    """

    unreadable = ""

    def __init__(self, structure: Structure) -> None:
        self._encode, self._join, pool = structure.encode, structure.joiner(), Pool()
        memory = [torch.empty(leaf.nbytes, dtype=torch.uint8, device="cpu") for leaf in structure.leaves]
        self._columns = [make_column(leaf, each, 1, pool) for leaf, each in zip(structure.leaves, memory, strict=True)]
        self._places, self._gaps, end = list[int](), list[int](), 0
        for column in self._columns:
            gap = -end & 7
            self._gaps.append(gap)
            self._places.append(end + gap)
            end += gap + column.nbytes
        self.nbytes = end
        self.fills_batches = 2 * len(self._columns) < MOST_BUFFERS and end < _MOST_AT_ONCE
        self.fills_batches &= not any(column.is_ordered for column in self._columns)

    def encode(self, sample: Any, where: str) -> list[Any]:
        """See `SampleFormat`."""
        buffers = []
        for gap, buffer in zip(self._gaps, self._encode(sample, where), strict=True):
            if gap:
                buffers.append(bytes(gap))
            buffers.append(buffer)
        return buffers

    def decode(self, data: _Bytes, nbytes: int) -> Any:
        """See `SampleFormat`."""
        if nbytes != self.nbytes:
            raise SegmentError(f"a sample has {nbytes} bytes, expected {self.nbytes}")
        return self._join([column.decode(data, at) for column, at in zip(self._columns, self._places, strict=True)])

    def buffers(self, items: list[Any], rows: Sequence[int]) -> list[list[Any]]:
        """Return the memory of rows of a contiguous batch, for each row as buffers that one sample fills."""
        parts: list[Any] = []
        for gap, item in zip(self._gaps, map(as_bytes, items), strict=True):
            if gap:
                parts.append([bytearray(gap)] * len(rows))
            parts.append([item[row] for row in rows])
        return list(map(list, zip(*parts, strict=True))) if parts else [[] for _ in rows]


class Records:
    """Samples of any size: records as those of a `RaggedCache`, each with the text of its treedef behind it."""

    nbytes = None
    fills_batches = False

    def __init__(self, allow_pickle: bool, codec: Codec | None) -> None:
        self.unreadable = ""
        self._allow_pickle, self._codec, self._packer = allow_pickle, codec, RecordPacker(allow_pickle, codec)
        self._reader = functools.lru_cache(_READERS)(lambda text: RecordReader(text, allow_pickle))

    def encode(self, sample: Any, where: str) -> list[Any]:
        """See `SampleFormat`."""
        record = self._packer.pack(sample, where)
        foot = _FOOT.pack(record.nbytes, record.packed, len(record.treedef))
        return [*record.leaves, record.tail, record.treedef, foot]

    def decode(self, data: _Bytes, nbytes: int) -> Any:
        """See `SampleFormat`."""
        memory = memoryview(data)  # type: ignore[arg-type]
        try:
            leaves, packed, text_bytes = _FOOT.unpack_from(memory, nbytes - _FOOT.size)
            end = nbytes - _FOOT.size - text_bytes
            integers = integers_codec(packed).unpack_from(memory, leaves)
            reader = self._reader(bytes(memory[end : end + text_bytes]))
            if packed & RecordPacker.COMPRESSED:
                if self._codec is None:
                    raise SegmentError("a sample is compressed")
                memory = memoryview(bytearray(self._codec.decompress(memory[:leaves], reader.nbytes(integers))))
                data, leaves = np.frombuffer(memory, np.uint8), len(memory)
            return reader.read(memory, data.ctypes.data, 0, leaves, integers, False)
        except NotImported as error:
            self.unreadable = str(error)
            raise
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise SegmentError(str(error)) from error


def pack_example(sample: Any) -> str:
    """Return a sample as text."""
    return base64.b64encode(zlib.compress(b"".join(Records(False, None).encode(sample, "sample")))).decode()


def unpack_example(text: str) -> Any:
    """Return the sample in a text that `pack_example` has made. Raises ValueError, SegmentError or NotImported."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text), _MOST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return Records(False, None).decode(np.frombuffer(bytearray(data), np.uint8), len(data))
