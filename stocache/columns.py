"""The columns of a cache: for each leaf of a sample, an array of slots in shared memory.

A column neither writes nor locks nor knows which slots are set; that is the cache's part. Single values are read by memmove,
at half the cost of a torch copy of 12 KB; batches by one index_select over the widest words that a row divides into, at 1.1
to 1.3 times the speed of bytes (both measured). Either way it is bytes that move, so every dtype is alike.
"""

import struct
from ctypes import memmove
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.errors import SampleError
from stocache.structure import ArrayLeaf, Leaf, NumberLeaf, TensorLeaf

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Column:
    """``slots`` values of one leaf, one after the other in ``memory``, a uint8 tensor.

    Attributes:
        array: all slots as one live tensor, or numpy array for leaves of numpy; the first dimension is ``slots``.
    """

    array: Any

    def __init__(self, leaf: Leaf, memory: Tensor, slots: int) -> None:
        self.nbytes = leaf.nbytes
        self._rows = memory.view(slots, self.nbytes)
        self._address = memory.data_ptr()

    def load(self, slot: int, copy: bool) -> Any:
        """Return the value in ``slot``: a private copy, or (where the type has views) the live memory itself."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Return the bytes of ``value``, as the leaf's ``fit`` returned it: a buffer of ``nbytes``."""
        raise NotImplementedError

    def batch(self, count: int) -> Any:
        """Return uninitialised memory of the kind `gather` fills: ``count`` values along a first dimension."""
        raise NotImplementedError

    def check_batch(self, batch: Any, count: int, where: str) -> None:
        """Raise SampleError unless ``batch`` has the type, dtype and shape of ``self.batch(count)``."""
        expected = self.batch(0)
        shape = (count, *expected.shape[1:])
        if not isinstance(batch, type(expected)) or batch.dtype != expected.dtype or tuple(batch.shape) != shape:
            given = f"{getattr(batch, 'dtype', type(batch).__name__)}{list(getattr(batch, 'shape', ()))}"
            raise SampleError(f"{where} is {given}, expected {expected.dtype}{list(shape)} ({type(expected).__name__}).")

    def row(self, batch: Any, position: int) -> Any:
        """Return one value of a batch, as ``fit`` of the leaf takes it."""
        return batch[position]

    def gather(self, slots: Tensor, out: Any) -> None:
        """Copy the values of ``slots`` (int64, 1-D) into ``out``, a contiguous batch of as many."""
        if self.nbytes:
            target = self._bytes(out)
            addresses = (self.nbytes, self._rows.data_ptr(), target.data_ptr(), target.storage_offset())
            word = next(word for word in _WORDS if all(n % word.itemsize == 0 for n in addresses))
            torch.index_select(self._rows.view(word), 0, slots, out=target.view(word))

    def erase(self, mask: Tensor, out: Any) -> None:
        """Zero the values of a contiguous batch where ``mask`` (bool, 1-D) is True."""
        if self.nbytes:
            self._bytes(out)[mask] = 0

    def _bytes(self, batch: Any) -> Tensor:
        flat = (
            batch.view(-1).view(torch.uint8)
            if isinstance(batch, Tensor)
            else torch.from_numpy(batch.reshape(-1).view(np.uint8))
        )
        return flat.view(-1, self.nbytes)


class _TensorColumn(Column):
    def __init__(self, leaf: TensorLeaf, memory: Tensor, slots: int) -> None:
        super().__init__(leaf, memory, slots)
        self.array = memory.view(leaf.dtype).view(slots, *leaf.shape)
        self._like = torch.empty(leaf.shape, dtype=leaf.dtype)

    def load(self, slot: int, copy: bool) -> Tensor:
        if not copy:
            view: Tensor = self.array[slot]
            return view
        value = torch.empty_like(self._like)
        memmove(value.data_ptr(), self._address + slot * self.nbytes, self.nbytes)
        return value

    def encode(self, value: Tensor) -> Any:
        return value.view(-1).view(torch.uint8).numpy()

    def batch(self, count: int) -> Tensor:
        return self._like.new_empty((count, *self._like.shape))


class _ArrayColumn(Column):
    def __init__(self, leaf: ArrayLeaf, memory: Tensor, slots: int) -> None:
        super().__init__(leaf, memory, slots)
        self.array = np.ndarray((slots, *leaf.shape), leaf.dtype, memory.numpy())
        self._leaf = leaf

    def load(self, slot: int, copy: bool) -> Any:
        if self._leaf.scalar:
            return self.array[slot]
        view = self.array[slot, ...]  # the dots keep an array of no dimensions an array
        return view.copy() if copy else view

    def encode(self, value: Any) -> Any:
        return np.asarray(value, order="C").reshape(-1).view(np.uint8)

    def batch(self, count: int) -> np.ndarray[Any, Any]:
        return np.empty((count, *self._leaf.shape), self._leaf.dtype)

    def row(self, batch: np.ndarray[Any, Any], position: int) -> Any:
        return batch[position] if self._leaf.scalar else batch[position, ...]


_FORMATS = {int: "q", float: "d", bool: "?", complex: "dd"}


class _NumberColumn(Column):
    def __init__(self, leaf: NumberLeaf, memory: Tensor, slots: int) -> None:
        super().__init__(leaf, memory, slots)
        self.array = memory.view(leaf.dtype)
        self._memory = memory.numpy().data
        self._type = leaf.type
        self._struct = struct.Struct(_FORMATS[leaf.type])

    def load(self, slot: int, copy: bool) -> Any:
        numbers = self._struct.unpack_from(self._memory, slot * self.nbytes)
        return complex(*numbers) if self._type is complex else numbers[0]

    def encode(self, value: Any) -> Any:
        return self._struct.pack(value.real, value.imag) if self._type is complex else self._struct.pack(value)

    def batch(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self.array.dtype)

    def row(self, batch: Tensor, position: int) -> Any:
        return batch[position].item()


def make_column(leaf: Leaf, memory: Tensor, slots: int) -> Column:
    """Return the column of ``slots`` values of ``leaf`` over ``memory``, a uint8 tensor of exactly their bytes."""
    if isinstance(leaf, TensorLeaf):
        return _TensorColumn(leaf, memory, slots)
    if isinstance(leaf, ArrayLeaf):
        return _ArrayColumn(leaf, memory, slots)
    return _NumberColumn(leaf, memory, slots)
