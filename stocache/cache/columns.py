"""The columns of a SharedCache: for each leaf of a sample, an array of slots in shared memory.

Batches are read by one index_select over the widest words that divide a row, at 1.1 to 1.3 times the speed of bytes (measured).
Only bytes are copied, so all dtypes work in the same way.
"""

import operator
from abc import ABC
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.leaves.fixed import ArrayLeaf, Leaf, NarrowLeaf, NumberLeaf, TensorLeaf
from stocache.shm.pool import NUMPY_DTYPES, Pool

_Indices = NDArray[np.int64]
_FACTS = operator.attrgetter("dtype", "shape", "device", "layout", "requires_grad")  # of tensors that can be stacked


SCATTERED = 2048  # the most bytes of a value that is written through the mapping; pwrite costs more (measured)


LARGE_VALUE = 1 << 16  # bytes of a value, from which a view that is copied on write costs less than a copy


ALIGNMENT = 64  # of a column: a cache line, and more than any dtype needs


_WIDENED = 1 << 16  # bytes that are widened at a time, so that they stay in the cache of the CPU


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Column(ABC):
    """``slots`` values of one leaf, one after the other in ``memory``, a uint8 tensor.

    Attributes:
        array: all slots as one live tensor; a numpy array if the leaf is one. The first dimension is ``slots``.

    If the leaf has an order (see NOTE [ Orders ]), slots hold values as they lie in memory; batches are in C order.
    """

    array: Any
    _like: Any  # memory for one value, of the type of batches
    _back: tuple[int, ...] | None

    def __init__(self, leaf: Leaf, memory: Tensor, slots: int, pool: Pool) -> None:
        self.nbytes, self._pool, self._stored = leaf.nbytes, pool, leaf.stored
        self._back = None if leaf.back is None else (0, *(dim + 1 for dim in leaf.back))
        self.decode, self._memory = leaf.decoder(), memory.numpy().data
        self._rows = memory.view(slots, self.nbytes)
        word = next(word for word in _WORDS if self.nbytes % word.itemsize == 0 == memory.data_ptr() % word.itemsize)
        self._words = self._rows.view(word) if self.nbytes else self._rows
        self._array = self._words.numpy()

    @property
    def words(self) -> Tensor:
        """The live slots as rows of the widest words that divide them."""
        return self._words

    @property
    def is_ordered(self) -> bool:
        """Whether slots have another form than batches: another order of dimensions, or fewer bytes."""
        return self._back is not None

    def load(self, slot: int, copy: bool) -> Any:
        """Return the value in ``slot``: a private copy; or the live memory itself, if the type has views."""
        return self.decode(self._memory, slot * self.nbytes, True) if copy else self.array[slot]

    def batch(self, count: int) -> Any:
        """Return uninitialised memory for `gather`: ``count`` values along a first dimension."""
        return torch.empty((count, *self._like.shape), dtype=self._like.dtype, device="cpu")

    def check_batch(self, batch: Any, count: int, where: str) -> None:
        """Raise SampleError unless ``batch`` has the type, dtype and shape of ``self.batch(count)``."""
        like = self._like
        if type(batch) is type(like) and batch.dtype == like.dtype and tuple(batch.shape) == (count, *like.shape):
            return
        given = f"{getattr(batch, 'dtype', type(batch).__name__)}{list(getattr(batch, 'shape', ()))}"
        raise SampleError(f"{where} is {given}, expected {like.dtype}{[count, *like.shape]} ({type(like).__name__}).")

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
        out = self._pooled((len(slots), *self._stored))
        if self.nbytes:
            self._gather(slots, out)
        return self._ordered(out)

    def _pooled(self, shape: tuple[int, ...]) -> Any:
        return self._pool.empty(shape, self._like.dtype)

    def _ordered(self, rows: Any) -> Any:
        """Return rows, which have the shape that they have in memory, with the dimensions of the leaf."""
        if self._back is None:
            return rows
        return rows.permute(self._back) if isinstance(rows, Tensor) else rows.transpose(self._back)

    def _gather(self, slots: _Indices, out: Any, parallel: bool = True) -> None:
        if not (parallel and torch.get_num_threads() > 1) and (rows := _as_words(out, self._array.dtype)) is not None:
            self._array.take(slots, 0, rows, "clip")  # releases the GIL once; torch's functions do so each time (measured)
            return
        target = _as_matrix(out)
        offset = target.storage_offset() * target.itemsize
        aligned = target.data_ptr() % self._words.itemsize == 0 == offset % self._words.itemsize
        source = self._words if aligned else self._rows
        torch.index_select(source, 0, torch.from_numpy(slots), out=target.view(source.dtype))

    def takes(self, values: Sequence[object]) -> bool:
        """Return whether `stack` may be tried for values: they are plain ones of the leaf's type, dtype and shape."""
        return False

    def stack(self, values: Sequence[object], out: Any) -> bool:
        """Copy values into a contiguous batch of as many. Return False if they do not fit after all."""
        raise NotImplementedError

    def scatter(self, slots: _Indices, data: bytes) -> None:
        """Write values, one after the other in ``data``, into reserved slots through the mapping of the memory."""
        if self.nbytes:
            rows = np.frombuffer(data, np.uint8).reshape(len(slots), self.nbytes)
            if self._words.itemsize == 1:
                self._rows.numpy()[slots] = rows
            else:
                words = self._words.numpy()
                words[slots] = rows.view(words.dtype)

    def put(self, row: Any, buffer: Any) -> None:
        """Write the encoded bytes of a value into a row of `as_bytes`."""
        if self.nbytes:
            row[...] = np.frombuffer(buffer, np.uint8)

    def erase(self, mask: Tensor, out: Any) -> None:
        """Zero the values of a contiguous batch where ``mask`` (bool, 1-D) is True."""
        if self.nbytes:
            as_bytes(out)[mask.numpy()] = 0  # not by torch: a forked child does not have its threads


def _as_words(batch: Any, dtype: Any) -> Any:
    """Return a contiguous batch as an array of two dimensions over the same memory; None if numpy cannot."""
    if isinstance(batch, Tensor):
        if batch.dtype not in NUMPY_DTYPES:
            return None
        batch = batch.numpy()
    rows = batch.reshape(len(batch), -1).view(dtype)
    return rows if rows.flags.aligned else None


def is_contiguous(batch: Any) -> bool:
    """Return whether the values of a tensor or array lie one after another."""
    return bool(batch.is_contiguous() if isinstance(batch, Tensor) else batch.flags.c_contiguous)


def _as_matrix(batch: Any) -> Tensor:
    """Return a contiguous batch of any dtype as a tensor of two dimensions over the same memory."""
    if isinstance(batch, Tensor):
        return batch.view(len(batch), -1)
    return torch.from_numpy(batch.reshape(len(batch), -1).view(np.uint8))


class _TensorColumn(Column):
    def __init__(self, leaf: TensorLeaf, memory: Tensor, slots: int, pool: Pool) -> None:
        super().__init__(leaf, memory, slots, pool)
        self.array = self._ordered(memory.view(leaf.dtype).view(slots, *self._stored))
        self._like = self._ordered(torch.empty((1, *self._stored), dtype=leaf.dtype, device="cpu"))[0]

    def takes(self, values: Sequence[Any]) -> bool:
        first = values[0]
        return (
            set(map(type, values)) == {Tensor}
            and self._back is None
            and first.device.type == "cpu"
            and set(map(_FACTS, values)) == {(self._like.dtype, self._like.shape, first.device, torch.strided, False)}
        )

    def stack(self, values: Sequence[Any], out: Any) -> bool:
        if any(value.is_quantized for value in values[:1]):
            return False
        torch.stack(list(values), out=out.view(self._like.dtype).view(len(values), *self._stored))
        return True


class _ArrayColumn(Column):
    def __init__(self, leaf: ArrayLeaf, memory: Tensor, slots: int, pool: Pool) -> None:
        super().__init__(leaf, memory, slots, pool)
        self.array = self._ordered(np.ndarray((slots, *self._stored), leaf.dtype, memory.numpy()))
        self._like = np.empty(leaf.shape, leaf.dtype)
        self._scalar = leaf.scalar

    def load(self, slot: int, copy: bool) -> Any:
        if self._scalar:
            value = self.array[slot]
            return value.copy() if copy and isinstance(value, np.void) else value  # records are views, others are not
        view = self.array[slot, ...]  # the dots keep an array of 0 dimensions an array
        return view.copy("K") if copy else view

    def takes(self, values: Sequence[Any]) -> bool:
        dtype, types = self._like.dtype, set(map(type, values))
        if self._scalar:
            return types == {dtype.type} and dtype.kind in "biufc" and dtype.isnative
        if self._back is not None or types != {np.ndarray}:
            return False
        return all(value.dtype == dtype and value.shape == self._like.shape for value in values)

    def stack(self, values: Sequence[Any], out: Any) -> bool:
        rows = as_bytes(out).reshape(-1).view(self._like.dtype).reshape(len(values), *self._stored)
        if self._scalar:
            rows[...] = values
        else:
            np.stack(values, out=rows)
        return True

    def batch(self, count: int) -> NDArray[Any]:
        return np.empty((count, *self._like.shape), self._like.dtype)

    def _pooled(self, shape: tuple[int, ...]) -> NDArray[Any]:
        memory = self._pool.empty((shape[0] * self.nbytes,), torch.uint8)
        rows: NDArray[Any] = np.ndarray(shape, self._like.dtype, memory.numpy())
        return rows

    def values(self, batch: NDArray[Any]) -> list[Any]:
        return list(batch) if self._scalar or batch.ndim > 1 else [batch[position, ...] for position in range(len(batch))]


class _NumberColumn(Column):
    def __init__(self, leaf: NumberLeaf, memory: Tensor, slots: int, pool: Pool) -> None:
        super().__init__(leaf, memory, slots, pool)
        self.array = memory.view(leaf.dtype)
        self._like = torch.empty((), dtype=leaf.dtype, device="cpu")
        self._type = leaf.type

    def load(self, slot: int, copy: bool) -> Any:
        return self.decode(self._memory, slot * self.nbytes, False)

    def takes(self, values: Sequence[object]) -> bool:
        return set(map(type, values)) == {self._type}

    def stack(self, values: Sequence[object], out: Any) -> bool:
        try:
            out.view(self._like.dtype)[...] = torch.tensor(values, dtype=self._like.dtype, device="cpu")
        except (OverflowError, RuntimeError):  # an int beyond 64 bits
            return False
        return True

    def values(self, batch: Tensor) -> list[Any]:
        return batch.tolist()


class NarrowColumn(Column):
    """Slots of integers of which the values are made. What is read is widened once, into the batch."""

    is_ordered = True

    def __init__(self, leaf: NarrowLeaf, memory: Tensor, slots: int, pool: Pool) -> None:
        super().__init__(leaf, memory, slots, pool)
        self._leaf, self.array = leaf, self._rows
        self._wide: Column = COLUMNS[type(leaf.wide)](leaf.wide, memory[:0], 0, pool)
        self._like = self._wide._like
        self.batch, self.values = self._wide.batch, self._wide.values  # type: ignore[method-assign]

    def load(self, slot: int, copy: bool) -> Any:
        """Return the value in a slot, widened."""
        return self.decode(self._memory, slot * self.nbytes, True)

    def gathered(self, slots: _Indices) -> Any:
        """Return a batch of the values in some slots, widened."""
        out = self._wide._pooled((len(slots), *self._stored))
        self._gather(slots, out)
        return self._wide._ordered(out)

    def _gather(self, slots: _Indices, out: Any, parallel: bool = True) -> None:
        rows, wide = self._rows.numpy().view(self._leaf.dtype), as_bytes(out).view(self._leaf.wide_dtype)
        widen = self._leaf.narrowing.widen
        count = _WIDENED // self.nbytes
        if count < 2:
            for row, slot in zip(wide, slots.tolist(), strict=True):
                widen(rows[slot], row)
        else:
            for begin in range(0, len(slots), count):
                widen(rows[slots[begin : begin + count]], wide[begin : begin + count])

    def put(self, row: Any, buffer: Any) -> None:
        """Widen the numbers of one value into a row of a batch."""
        self._leaf.narrowing.widen(np.frombuffer(buffer, self._leaf.dtype), row.view(self._leaf.wide_dtype))


def as_bytes(batch: Any) -> NDArray[np.uint8]:
    """Return a contiguous batch of any dtype as an array of bytes of two dimensions over the same memory."""
    if isinstance(batch, Tensor):
        try:
            batch = batch.numpy()  # a view by torch releases the GIL, and waits for it where another thread loads
        except TypeError:  # numpy does not have the dtype
            batch = _as_matrix(batch).view(torch.uint8).numpy()
    matrix: NDArray[np.uint8] = batch.reshape(len(batch), -1).view(np.uint8)
    return matrix


COLUMNS: dict[type[Leaf], Any] = {TensorLeaf: _TensorColumn, ArrayLeaf: _ArrayColumn, NumberLeaf: _NumberColumn}
