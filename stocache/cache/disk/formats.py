"""Turn the samples of a disk cache into bytes: *rows*, if all have one structure, *records* of any size, or values by key."""

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stocache.cache.columns import as_bytes
from stocache.errors import SegmentError
from stocache.samples.record_decoder import Records
from stocache.samples.rows import RowLayout
from stocache.samples.spec import Structure
from stocache.shm.segment import MOST_BUFFERS

_MOST = 1 << 26  # bytes of an example
_MOST_AT_ONCE = 1 << 30  # bytes of a row that is read into a batch; Linux reads at most 2 GiB at once

_Bytes = NDArray[np.uint8]


class Rows(RowLayout):
    """Samples of one structure, as rows (NOTE [ Rows ]). It has the attributes and methods of `Records`.

    Attributes:
        fills_batches: whether rows can be read into the memory of a batch: `columns` returns where.
    """

    unreadable = ""

    def __init__(self, structure: Structure) -> None:
        super().__init__(structure)
        leaves = structure.leaves
        self._encode, self._join = structure.encode, structure.joiner()
        # The user may keep a small part of a sample, such as a label: it does not hold the memory of the others
        self._parts = [
            (leaf.decoder(), at, 4 * leaf.nbytes < self.nbytes) for leaf, at in zip(leaves, self.begins, strict=True)
        ]
        self.fills_batches = 0 < len(leaves) < MOST_BUFFERS - 1 and self.nbytes < _MOST_AT_ONCE
        self.fills_batches &= all(leaf.order is None for leaf in leaves) and not structure.is_narrow

    def encode(self, sample: object, where: str) -> list[Any]:
        """See `Records`."""
        buffers = self._encode(sample, where)
        return [*map(buffers.__getitem__, self.order), bytes(self.gap)]

    def decode(self, data: _Bytes, nbytes: int) -> Any:
        """See `Records`."""
        if nbytes != self.nbytes:
            raise SegmentError(f"a sample has {nbytes} bytes, expected {self.nbytes}")
        return self._join([decode(data, at, copy) for decode, at, copy in self._parts])

    def columns(self, items: list[Any]) -> list[_Bytes]:
        """Return a contiguous batch as columns of bytes: one row of all of them is what `encode` makes of a sample."""
        columns = [as_bytes(items[number]) for number in self.order]
        return [*columns, np.empty((len(columns[0]), self.gap), np.uint8)] if self.gap else columns


class Values(Records):
    """Values by key: each is a record behind the prefix of its key, which begins with the length of the key's bytes."""

    def encode(self, sample: Any, where: str) -> list[Any]:
        """Return the bytes of a pair of a prefix and a record."""
        return [sample[0], *self.buffers(sample[1])]

    def decode(self, data: Any, nbytes: int, copy: bool | None = None) -> tuple[bytes, Any]:
        """Return the prefix and the value. See `Records`."""
        memory = memoryview(data)
        begin = 8 + (int.from_bytes(memory[:8], "little") + 7 & ~7)
        return bytes(memory[:begin]), super().decode(memory[begin:], nbytes - begin, copy)


def pack_example(sample: object) -> str:
    """Return a sample as text."""
    return base64.b64encode(zlib.compress(b"".join(Records(allow_pickle=False).encode(sample, "sample")))).decode()


def unpack_example(text: str) -> Any:
    """Return the sample in a text that `pack_example` has made. Raises ValueError, SegmentError or NotImported."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text), _MOST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return Records(allow_pickle=False).decode(bytearray(data), len(data))
