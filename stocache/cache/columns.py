"""The columns of a SharedCache: for each leaf of a sample, an array of slots in shared memory.

Batches are read by one index_select over the widest words that divide a row, at 1.1 to 1.3 times the speed of bytes (measured).
Only bytes are copied, so all dtypes work in the same way.
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.leaves.arrays import ArrayKind, ScalarKind, TensorKind
from stocache.samples.leaves.kind import Leaf
from stocache.samples.leaves.kinds import NarrowKind
from stocache.samples.leaves.plain_kinds import NumberKind
from stocache.shm.pool import Pool

_Indices = NDArray[np.int64]
_FACTS = operator.attrgetter("dtype", "shape", "device", "layout", "requires_grad")  # of tensors that can be stacked


SCATTERED = 2048  # the most bytes of a value that is written through the mapping; pwrite costs more (measured)


LARGE_VALUE = 1 << 16  # bytes of a value, from which a view that is copied on write costs less than a copy


ALIGNMENT = 64  # of a column: a cache line, and more than any dtype needs


_WIDENED = 1 << 16  # bytes that are widened at a time, so that they stay in the cache of the CPU


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Column:
    """``slots`` values of one leaf, one after the other in ``memory``, a uint8 tensor. Batches of them are tensors.

    Attributes:
        array: all slots as one live tensor; a numpy array if the leaf is one. The first dimension is ``slots``.
        words: the live slots as rows of the widest words that divide them.
        narrowing: how values are made, if slots hold small integers of which they are made. What is read is widened once, into
            the batch.
        is_ordered: whether slots have a different form than batches: a different order of dimensions, or fewer bytes.

    If the leaf has an order (see NOTE [ Orders ]), slots hold values as they lie in memory; batches are in C order.
    """

    _type: Any = Tensor  # of batches
    _has_views = True

    def __init__(self, leaf: Leaf, memory: Tensor, slots: int, pool: Pool) -> None:
        self.nbytes, self._pool, self._leaf, self._stored = leaf.nbytes, pool, leaf, leaf.stored
        self.narrowing = leaf.kind.narrowing if isinstance(leaf.kind, NarrowKind) else None
        self._dtype: Any = self._dtype_of(leaf.kind if self.narrowing is None else leaf.kind.wide)
        self._back = None if leaf.kind.back is None else (0, *(dim + 1 for dim in leaf.kind.back))
        self.is_ordered = self._back is not None or self.narrowing is not None
        self.decode, self._memory = leaf.decoder(), memory.numpy().data
        self._rows = memory.view(slots, self.nbytes)
        word = next(word for word in _WORDS if self.nbytes % word.itemsize == 0 == memory.data_ptr() % word.itemsize)
        self.words = self._rows.view(word) if self.nbytes else self._rows
        self._array = self.words.numpy()
        self.array: Any = self._rows if self.narrowing is not None else self._ordered(self._view(memory, slots))

    def _dtype_of(self, kind: Any) -> Any:
        return kind.dtype

    def _view(self, memory: Any, count: int) -> Any:
        """Return ``count`` values in memory as a tensor or array, in the shape that they have there."""
        return memory.view(self._dtype).view(count, *self._stored)

    def load(self, slot: int, copy: bool) -> Any:
        """Return the value in ``slot``: a private copy; or the live memory itself, if the type has views."""
        if copy or not self._has_views or self.narrowing is not None:
            return self.decode(self._memory, slot * self.nbytes, copy)
        return self.array[slot]

    def batch(self, count: int) -> Any:
        """Return uninitialised memory for `gather`: ``count`` values along a first dimension."""
        return torch.empty((count, *self._leaf.shape), dtype=self._dtype, device="cpu")

    def check_batch(self, batch: Any, count: int, where: str) -> None:
        """Raise SampleError unless ``batch`` has the type, dtype and shape of ``self.batch(count)``."""
        shape = (count, *self._leaf.shape)
        if type(batch) is not self._type or batch.dtype != self._dtype or tuple(batch.shape) != shape:
            given = f"{getattr(batch, 'dtype', type(batch).__name__)}{list(getattr(batch, 'shape', ()))}"
            raise SampleError(f"{where} is {given}, expected {self._dtype}{list(shape)} ({self._type.__name__}).")

    def values(self, batch: Any) -> list[Any]:
        """Return the values of a batch in the type of the leaf; tensors and arrays are views of the batch."""
        return list(batch)

    def gather(self, slots: _Indices, out: Any, parallel: bool = True) -> None:
        """Copy the values of ``slots`` (int64, 1-D) into ``out``, a contiguous batch of as many.

        ``parallel``: by the threads that torch has for one call.
        """
        if self._back is not None:
            out[...] = self.gathered(slots)
        elif self.nbytes:
            self._gather(slots, out, parallel)

    def gathered(self, slots: _Indices) -> Any:
        """Return the values of ``slots`` in new memory, each in the order of the leaf."""
        out = self._pooled(len(slots))
        if self.nbytes:
            self._gather(slots, out)
        return self._ordered(out)

    def _pooled(self, count: int) -> Any:
        return self._pool.empty((count, *self._stored), self._dtype)

    def _ordered(self, rows: Any) -> Any:
        """Return rows, which have the shape that they have in memory, with the dimensions of the leaf."""
        if self._back is None:
            return rows
        return rows.permute(self._back) if isinstance(rows, Tensor) else rows.transpose(self._back)

    def _gather(self, slots: _Indices, out: Any, parallel: bool = True) -> None:
        if self.narrowing is not None:
            return self._widen(slots, as_bytes(out))
        source, words = self.words, as_bytes(out, self._array.dtype)
        if not words.flags.aligned:
            source, words = self._rows, as_bytes(out)
        if parallel and torch.get_num_threads() > 1:
            torch.index_select(source, 0, torch.from_numpy(slots), out=torch.from_numpy(words))
        else:
            source.numpy().take(slots, 0, words, "clip")  # releases the GIL once; torch's functions do so each time (measured)
        return None

    def _widen(self, slots: _Indices, out: Any) -> None:
        kind, step = self._leaf.kind, max(1, _WIDENED // self.nbytes)
        narrow, wide = self._rows.numpy().view(kind.dtype), out.view(kind.wide.array_dtype)
        for begin in range(0, len(slots), step):
            some = slots[begin : begin + step] if step > 1 else slots[begin]
            kind.narrowing.widen(narrow[some], wide[begin : begin + step])

    def stack(self, values: Sequence[Any], out: Any) -> bool:
        """Copy values into a contiguous batch of as many.

        Return False, with undefined rows, unless they are plain ones of the leaf's type, dtype and shape.
        """
        if self.is_ordered or set(map(type, values)) != {Tensor} or values[0].device.type != "cpu":
            return False
        if set(map(_FACTS, values)) != {(self._dtype, self._leaf.shape, values[0].device, torch.strided, False)}:
            return False
        torch.stack(list(values), out=out.view(self._dtype).view(len(values), *self._stored))
        return True

    def scatter(self, slots: _Indices, data: bytes) -> None:
        """Write values, one after the other in ``data``, into reserved slots through the mapping of the memory."""
        if self.nbytes:
            self._array[slots] = np.frombuffer(data, self._array.dtype).reshape(len(slots), -1)

    def put(self, row: Any, buffer: Any) -> None:
        """Write the encoded bytes of a value into a row of `as_bytes`."""
        if self.narrowing is not None:
            self.narrowing.widen(np.frombuffer(buffer, self.narrowing.stored), row.view(self.narrowing.wide))
        elif self.nbytes:
            row[...] = np.frombuffer(buffer, np.uint8)


class _ArrayColumn(Column):
    _type = np.ndarray

    def _view(self, memory: Any, count: int) -> Any:
        return np.ndarray((count, *self._stored), self._dtype, memory.numpy())

    def load(self, slot: int, copy: bool) -> Any:
        if self.narrowing is not None:
            return super().load(slot, copy)
        view = self.array[slot, ...]  # the dots keep an array of 0 dimensions an array
        return view.copy("K") if copy else view

    def stack(self, values: Sequence[Any], out: Any) -> bool:
        if self.is_ordered or set(map(type, values)) != {np.ndarray}:
            return False
        if any(value.dtype != self._dtype or value.shape != self._leaf.shape for value in values):
            return False
        np.stack(values, out=self._stacked(out))
        return True

    def _stacked(self, out: Any) -> Any:
        return as_bytes(out).reshape(-1).view(self._dtype).reshape(len(out), *self._stored)

    def batch(self, count: int) -> NDArray[Any]:
        return np.empty((count, *self._leaf.shape), self._dtype)

    def _pooled(self, count: int) -> Any:
        return self._view(self._pool.empty((count * self._leaf.batch_bytes,), torch.uint8), count)

    def values(self, batch: NDArray[Any]) -> list[Any]:
        return list(batch) if batch.ndim > 1 else [batch[position, ...] for position in range(len(batch))]


class _ScalarColumn(_ArrayColumn):
    def load(self, slot: int, copy: bool) -> Any:
        value = self.array[slot]
        return value.copy() if copy and isinstance(value, np.void) else value  # records are views, others are not

    def stack(self, values: Sequence[Any], out: Any) -> bool:
        dtype = self._dtype
        if set(map(type, values)) != {dtype.type} or dtype.kind not in "biufc" or not dtype.isnative:
            return False
        self._stacked(out)[...] = values
        return True

    def values(self, batch: NDArray[Any]) -> list[Any]:
        return list(batch)


class _NumberColumn(Column):
    _has_views = False

    def _dtype_of(self, kind: Any) -> Any:
        return _NUMBERS[kind.type]

    def stack(self, values: Sequence[Any], out: Any) -> bool:
        if set(map(type, values)) != {self._leaf.kind.type}:
            return False
        try:
            out.view(self._dtype)[...] = torch.tensor(values, dtype=self._dtype, device="cpu")
        except (OverflowError, RuntimeError):  # an int beyond 64 bits
            return False
        return True

    def values(self, batch: Tensor) -> list[Any]:
        return batch.tolist()


_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}
_COLUMNS = dict[Any, Any]({TensorKind: Column, ArrayKind: _ArrayColumn, ScalarKind: _ScalarColumn, NumberKind: _NumberColumn})


def make_column(leaf: Leaf, memory: Tensor, slots: int, pool: Pool) -> Column:
    """Return the column of a leaf."""
    kind = leaf.kind.wide if isinstance(leaf.kind, NarrowKind) else leaf.kind
    column: Column = _COLUMNS[type(kind)](leaf, memory, slots, pool)
    return column


def is_contiguous(batch: Any) -> bool:
    """Return whether the values of a tensor or array lie one after another."""
    return bool(batch.is_contiguous() if isinstance(batch, Tensor) else batch.flags.c_contiguous)


def as_bytes(batch: Any, dtype: Any = np.uint8) -> NDArray[Any]:
    """Return a contiguous batch of any dtype as an array of bytes (or ``dtype``) of two dimensions over the same memory."""
    if isinstance(batch, Tensor):
        try:
            batch = batch.numpy()  # a view by torch releases the GIL, and waits for it if another thread loads
        except TypeError:  # numpy does not have the dtype
            batch = batch.view(len(batch), -1).view(torch.uint8).numpy()
    matrix: NDArray[Any] = batch.reshape(len(batch), -1).view(dtype)
    return matrix
