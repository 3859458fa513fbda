"""Turn the samples of a disk cache into bytes: *rows*, if all have one structure, *records* of any size, or values by key."""

import base64
import os
import zlib
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stocache.cache.columns import as_bytes
from stocache.cache.disk.folder import manifest_of
from stocache.cache.stats import MISSING
from stocache.errors import SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.record_decoder import Records
from stocache.samples.spec import RowLayout, Structure
from stocache.shm.segment import MOST_BUFFERS

_MOST = 1 << 26  # bytes of an example
_MOST_TEXT = 1 << 16  # bytes of its text
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
        self.fills_batches &= all(leaf.kind.order is None for leaf in leaves) and not structure.is_narrow

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


def make_form(
    structure: Structure | None, by_key: bool, codec: Literal["zstd", "lz4"] | None, allow_pickle: bool
) -> Rows | Records:
    """Return how the samples of a cache become bytes. Raises CodecError."""
    compressing = None if codec is None else Codec(codec)
    return Rows(structure) if structure is not None else (Values if by_key else Records)(allow_pickle, compressing)


def pack_example(structure: Structure | None) -> dict[str, str | None]:
    """Return an example of the samples as a fact for later runs, None if they vary in size; no fact if it is too long."""
    if structure is None:
        return {"example": None}
    data = b"".join(Records(allow_pickle=False).encode(structure.example(), "sample"))
    text = base64.b64encode(zlib.compress(data)).decode()
    return {"example": text} if len(text) <= _MOST_TEXT else {}


def known_example(disk: str | os.PathLike[str], dataset_len: int, fingerprint: str | None) -> Any:
    """Return a sample as a disk cache holds them; None if they vary in size; MISSING if there is no such cache."""
    manifest = manifest_of(disk)
    if manifest is None or (manifest["identity"]["dataset_len"], manifest["fingerprint"]) != (dataset_len, fingerprint):
        return MISSING
    try:
        if (text := manifest["facts"]["example"]) is None:
            return None
        data = zlib.decompressobj().decompress(base64.b64decode(text), _MOST)
        return Records(allow_pickle=False).decode(bytearray(data), len(data))
    except (ValueError, LookupError, TypeError, SegmentError, zlib.error):
        return MISSING
