"""Store the samples of a SharedCache in columns: for each leaf of a sample, an array of slots in shared memory.

A `Column` has the values of one leaf; `SlotArrays` has all columns, and a sample is a row of them. Batches are read by one
index_select over the widest words that divide a row, at 1.1 to 1.3 times the speed of bytes (measured). Only bytes are copied,
so all dtypes work in the same way.
"""

import logging
import operator
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.placement import BlockResidency, Residency
from stocache.cache.stats import EMPTY, FILLS, REFUSED
from stocache.errors import SampleError
from stocache.samples.leaves.fixed import ArrayLeaf, Leaf, NarrowLeaf, NumberLeaf, TensorLeaf
from stocache.samples.spec import Structure
from stocache.shm.layout import RESERVED_EXTENT
from stocache.shm.pool import NUMPY_DTYPES, Pool
from stocache.shm.private import PrivateViews
from stocache.shm.segment import Segment

logger = logging.getLogger("stocache")

_FACTS = operator.attrgetter("dtype", "shape", "device", "layout", "requires_grad")  # of tensors that can be stacked
_SCATTERED = 2048  # the most bytes of a value that is written through the mapping; pwrite costs more (measured)
_LARGE = 1 << 16  # bytes of a value, from which a view that is copied on write costs less than a copy
_ALIGNMENT = 64  # of a column: a cache line, and more than any dtype needs
_WIDENED = 1 << 16  # bytes that are widened at a time, so that they stay in the cache of the CPU
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

_Indices = NDArray[np.int64]


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


def _is_contiguous(batch: Any) -> bool:
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


class _NarrowColumn(Column):
    """Slots of integers of which the values are made. What is read is widened once, into the batch."""

    is_ordered = True

    def __init__(self, leaf: NarrowLeaf, memory: Tensor, slots: int, pool: Pool) -> None:
        super().__init__(leaf, memory, slots, pool)
        self._leaf, self.array = leaf, self._rows
        self._wide: Column = _COLUMNS[type(leaf.wide)](leaf.wide, memory[:0], 0, pool)
        self._like = self._wide._like
        self.batch, self.values = self._wide.batch, self._wide.values  # type: ignore[method-assign]

    def load(self, slot: int, copy: bool) -> Any:
        return self.decode(self._memory, slot * self.nbytes, True)

    def gathered(self, slots: _Indices) -> Any:
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


_COLUMNS: dict[type[Leaf], Any] = {TensorLeaf: _TensorColumn, ArrayLeaf: _ArrayColumn, NumberLeaf: _NumberColumn}
_COLUMNS[NarrowLeaf] = _NarrowColumn


class SlotArrays:
    """The `SampleStore` of a SharedCache: the columns of all slots, one after the other in the data of a segment.

    Attributes:
        segment, columns: the memory, and the columns in it.
        places: of each column: its offset in the data, and the bytes of a value.
        slot: returns the slot of a resident sample.
        load: returns the sample in a slot: ``load(slot, copy)``; a private copy, or views of the live memory.
        encode: returns the bytes of a sample: one buffer for each column.
    """

    unreadable = ""
    may_miss = False
    slot: Callable[[int], int]
    load: Callable[[int, bool], Any]
    encode: Callable[[Any, str], list[Any]]

    def __init__(self, structure: Structure, segment: Segment, residency: Residency | BlockResidency) -> None:
        self._structure, self.segment, self._residency = structure, segment, residency
        self._states = segment.control[: residency.dataset_len]
        leaves, slots = structure.leaves, residency.slot_count
        self.places = list(zip(column_offsets(structure, slots), (leaf.nbytes for leaf in leaves), strict=False))
        pool = Pool()
        self.columns: list[Column] = [
            _COLUMNS[type(leaf)](leaf, segment.tensor(offset, slots * nbytes), slots, pool)
            for leaf, (offset, nbytes) in zip(leaves, self.places, strict=True)
        ]
        # the columns whose values are leased instead of copied; see NOTE [ Private views ]
        self._large = [column.nbytes >= _LARGE and not isinstance(column, _NarrowColumn) for column in self.columns]
        self._private: PrivateViews | None = None
        self.gathers_from = 1 if any(self._large) else 16  # measured
        self.slot = operator.index if residency.identity else residency.slot
        self._join = join = structure.joiner()
        loads = [column.load for column in self.columns]
        self.load = (lambda slot, copy: join([load(slot, copy) for load in loads])) if structure.containers else loads[0]
        self.encode = structure.encode

    def encode_many(self, samples: list[Any]) -> list[list[Any]] | None:
        """Return the bytes of samples: small ones lie in one buffer for each column. None if one does not fit."""
        if self._structure.nbytes < _LARGE and (encoded := self.pack(samples)) is not None:
            return encoded
        try:
            return [self.encode(sample, "") for sample in samples]
        except SampleError:
            return None

    def pack(self, samples: list[Any], items: list[Any] | None = None, rows: list[int] | None = None) -> list[list[Any]] | None:
        """Copy samples into ``rows`` of a contiguous batch, by default a new one, and return their bytes there.

        Return None, with undefined rows, if the samples are not all alike: then each has to be looked at.
        """
        parted = self._structure.part(samples)
        if parted is None:
            return None
        batches = []
        begin, count = (rows[0], len(samples)) if rows else (0, len(samples))
        in_row = rows is None or rows == list(range(begin, begin + count))
        for column, values, item in zip(self.columns, parted, items or repeat(None), strict=False):
            if not column.takes(values):
                return None
            place = item[begin : begin + count] if item is not None and in_row else column.batch(count)
            if not column.stack(values, place):
                return None
            if item is not None and not in_row:
                as_bytes(item)[rows] = as_bytes(place)
            batches.append(place)
        return self.buffers(batches, count)

    def buffers(self, items: list[Any], count: int) -> list[list[Any]]:
        """Return the bytes of the samples of a batch, as `encode` does for each; views of it where it is contiguous."""
        if any(column.is_ordered for column in self.columns) or not all(map(_is_contiguous, items)):
            return [self.encode(sample, "batch") for sample in self.samples(items, count)]
        return list(map(list, zip(*(list(as_bytes(item)) for item in items), strict=True))) if items else [[]] * count

    def slots_of(self, indices: _Indices) -> _Indices:
        """Return the slots of resident samples."""
        slots: _Indices = self._residency.slots(indices)
        return slots

    def write_many(self, indices: list[int], encoded: Sequence[list[Any]]) -> list[int | None]:
        """Write the encoded bytes of samples into their slots. Return FILLS for each, or REFUSED if its memory is refused."""
        if len(indices) == 1:  # at a third of the cost
            return [self._write_one(indices[0], encoded[0])]
        slots = self.slots_of(np.array(indices, np.int64))
        counters: list[int | None] = [FILLS] * len(slots)
        np.asarray(self._states)[indices] = EMPTY  # nobody reads them while they are written
        safe = self._reserve(slots)
        if not safe.all():
            counters = [FILLS if fits else REFUSED for fits in safe.tolist()]
            slots, encoded = slots[safe], [encoded[row] for row in np.flatnonzero(safe).tolist()]
        for (offset, nbytes), column, values in zip(self.places, self.columns, zip(*encoded, strict=True), strict=False):
            if nbytes <= _SCATTERED:
                column.scatter(slots, b"".join(values))
            else:
                self.segment.write_rows(zip((offset + slots * nbytes).tolist(), values, strict=True), nbytes)
        return counters

    def _write_one(self, idx: int, encoded: list[Any]) -> int:
        slot = self.slot(idx)
        self._states[idx] = EMPTY
        with self.segment.guard:
            if not self.reserve(slot, slot + 1):
                return REFUSED
        self.write_slot(slot, encoded)
        return FILLS

    def _reserve(self, slots: _Indices) -> "NDArray[np.bool_]":
        """Reserve the memory of slots. Return for each whether it is safe to touch."""
        states = np.frombuffer(self.segment.extents.states, np.uint8)
        extents = np.concatenate([np.empty((len(slots), 0), np.int64), *map(partial(self.extents_of, slots), self.places)], 1)
        missing = states[extents] != RESERVED_EXTENT
        if missing.any():
            with self.segment.guard:
                self.segment.extents.reserve_extents(np.unique(extents[missing]).tolist())
            missing = states[extents] != RESERVED_EXTENT
        safe: NDArray[np.bool_] = ~missing.any(1)
        return safe

    def extents_of(self, slots: _Indices, place: tuple[int, int]) -> _Indices:
        """Return for each slot the extents of the segment that its value lies in. ``place``: of the column."""
        size, (offset, nbytes) = self.segment.layout.extent_bytes, place
        begin = (offset + slots * nbytes)[:, None]
        most = np.arange((nbytes - 2) // size + 2 if nbytes else 0)  # a value of 2 bytes may touch 2 extents
        extents: _Indices = np.minimum(begin // size + most, (begin + nbytes - 1) // size)
        return extents

    def write_slot(self, slot: int, encoded: list[Any]) -> None:
        """Write the encoded bytes of a sample into a reserved slot."""
        for (offset, nbytes), buffer in zip(self.places, encoded, strict=True):
            self.segment.write(offset + slot * nbytes, buffer, nbytes)

    def reserve(self, start: int, stop: int) -> bool:
        """Make the memory of slots ``[start, stop)`` safe to touch; see `Segment.reserve`."""
        return all(self.segment.extents.reserve(at + start * nbytes, at + stop * nbytes) for at, nbytes in self.places)

    def refused(self, idx: int) -> bool:
        """Return whether the machine has refused the memory for a sample; see `Segment.refused`."""
        slot = self.slot(idx)
        return any(self.segment.extents.refused(at + slot * nbytes, at + (slot + 1) * nbytes) for at, nbytes in self.places)

    def has_room_for(self, states: NDArray[np.uint8]) -> bool:
        """Return whether samples have room: those that are not outside the cache have a slot."""
        return True

    def has_room(self, encoded: Collection[object]) -> bool:
        """Return whether samples have room: those that are not outside the cache have a slot."""
        return True

    def clear(self) -> None:
        """Zero all slots."""
        self.segment.extents.clear()

    def amounts(self, filled: int) -> dict[str, int]:
        """Return the attributes of `CacheStats` that depend on the slots."""
        slots, slot_bytes = self._residency.slot_count, self._structure.nbytes
        return {"slots": slots, "slot_bytes": slot_bytes, "capacity_bytes": slots * slot_bytes}

    @property
    def array(self) -> Any:
        """The live arrays of all columns, in the containers of the sample."""
        return self._join([column.array for column in self.columns])

    def rows(self, slot: int) -> Any:
        """Return the live rows of a slot, in the containers of the sample."""
        return self._join([column.array[slot] for column in self.columns])

    def new_batch(self, count: int) -> list[Any]:
        """Return uninitialised memory for ``count`` samples: a list with a batch of each column."""
        return [column.batch(count) for column in self.columns]

    def split_batch(self, batch: object, count: int, where: str, contiguous: bool = False) -> list[Any]:
        """Return the list of columns of a batch in containers, after checking that it holds ``count`` samples.

        Raises:
            SampleError: it does not, or it must be ``contiguous`` and is not.
        """
        items = self._structure.columns(batch, where)
        for column, item in zip(self.columns, items, strict=True):
            column.check_batch(item, count, where)
            if contiguous and not _is_contiguous(item):
                raise SampleError(f"{where} is not contiguous. Give memory as get_slots returns it.")
        return items

    def gather(self, indices: _Indices, items: list[Any], parallel: bool = True) -> None:
        """Copy samples into a contiguous batch of as many. All of them are set. ``parallel``: see `Column.gather`."""
        slots = self.slots_of(indices)
        for column, item in zip(self.columns, items, strict=True):
            column.gather(slots, item, parallel)

    def load_many(self, indices: _Indices) -> list[Any]:
        """Return private copies of samples. All of them are set.

        They are views of a batch whose memory is used again later, or of leased memory.
        """
        slots = self.slots_of(indices)
        if not any(self._large) or (private := self._private_views()) is None:
            return self._made([column.values(column.gathered(slots)) for column in self.columns], len(slots))
        numbers = slots.tolist()
        memory, usable = private.lease(numbers)
        values = []
        for column, large, (offset, nbytes) in zip(self.columns, self._large, self.places, strict=True):
            if large:
                begin = self.segment.layout.data_at + offset
                leased = [column.decode(memory, begin + slot * nbytes, False) for slot in numbers]
                if not all(usable):
                    pairs = zip(leased, usable, numbers, strict=True)
                    leased = [value if may else column.load(slot, True) for value, may, slot in pairs]
                values.append(leased)
            else:
                values.append(column.values(column.gathered(slots)))
        return self._made(values, len(numbers))

    def _private_views(self) -> PrivateViews | None:
        if self._private is None:
            at = self.segment.layout.data_at
            places = zip(self._large, self.places, strict=True)
            leased = [(at + offset, nbytes) for large, (offset, nbytes) in places if large]
            try:
                self._private = PrivateViews(self.segment.fd, self.segment.layout.size, leased, self._residency.slot_count)
            except OSError as error:  # no address space
                logger.debug("no private mapping: %s", error)
                self._large = [False] * len(self._large)
        return self._private

    def put(self, items: list[Any], row: int, buffers: list[Any]) -> None:
        """Write the encoded bytes of a sample into a row of a contiguous batch."""
        for column, item, buffer in zip(self.columns, items, buffers, strict=True):
            column.put(as_bytes(item)[row], buffer)

    def erase(self, mask: Tensor, items: list[Any]) -> None:
        """Zero the samples of a contiguous batch where ``mask`` (bool, 1-D) is True."""
        for column, item in zip(self.columns, items, strict=True):
            column.erase(mask, item)

    def samples(self, items: list[Any], count: int) -> list[Any]:
        """Return the ``count`` samples of a batch; their tensors and arrays are views of it."""
        return self._made([column.values(item) for column, item in zip(self.columns, items, strict=True)], count)

    def _made(self, values: list[list[Any]], count: int) -> list[Any]:
        rows: Iterable[Any] = zip(*values, strict=True) if values else repeat((), count)
        return list(map(self._join, rows))


def column_offsets(structure: Structure, slots: int) -> list[int]:
    """Return the offset of each column in the data of the segment, and last the number of bytes of data."""
    offsets = [0]
    for leaf in structure.leaves:
        end = offsets[-1] + slots * leaf.nbytes
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    return offsets
