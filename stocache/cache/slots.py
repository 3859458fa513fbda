"""Store the samples of a SharedCache in columns: `SlotArrays` has a `Column` for each leaf, and a sample is a row of them."""

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stocache.cache.columns import ALIGNMENT, LARGE_VALUE, SCATTERED, Column, as_bytes, is_contiguous, make_column
from stocache.cache.placement import Residency
from stocache.cache.stats import EMPTY, FILLS, REFUSED, SET
from stocache.cache.store import SampleStore
from stocache.errors import SampleError
from stocache.samples.spec import Structure
from stocache.shm.layout import RESERVED_EXTENT
from stocache.shm.pool import Pool
from stocache.shm.private import PrivateViews
from stocache.shm.segment import Segment

logger = logging.getLogger("stocache")


_Indices = NDArray[np.int64]


class SlotArrays(SampleStore):
    """The `SampleStore` of a SharedCache: the columns of all slots, one after the other in the data of a segment.

    Attributes:
        segment, columns: the memory, and the columns in it.
        places: of each column: its offset in the data, and the bytes of a value.
        slot: returns the slot of a resident sample,
        slots_of: those of an array of samples.
        load: returns the sample in a slot: ``load(slot, copy)``; a private copy, or views of the live memory.
        encode: returns the bytes of a sample: one buffer for each column.
    """

    slot: Callable[[int], int]
    slots_of: Callable[[_Indices], _Indices]
    load: Callable[[int, bool], Any]
    encode: Callable[[Any, str], list[Any]]

    def __init__(self, structure: Structure, segment: Segment, residency: Residency) -> None:
        self._structure, self.segment, self._residency = structure, segment, residency
        self._states = segment.control[: residency.dataset_len]
        leaves, slots = structure.leaves, residency.slot_count
        self.places = list(zip(column_offsets(structure, slots), (leaf.nbytes for leaf in leaves), strict=False))
        pool = Pool()
        self.columns: list[Column] = [
            make_column(leaf, segment.tensor(offset, slots * nbytes), slots, pool)
            for leaf, (offset, nbytes) in zip(leaves, self.places, strict=True)
        ]
        # the columns whose values are leased instead of copied; see NOTE [ Private views ]
        self._large = [column.nbytes >= LARGE_VALUE and column.narrowing is None for column in self.columns]
        self._private: PrivateViews | None = None
        self.gathers_from = 1 if any(self._large) else 16  # measured
        self.slot = operator.index if residency.identity else residency.slot
        self._join = join = structure.joiner()
        loads = [column.load for column in self.columns]
        self.load = (lambda slot, copy: join([load(slot, copy) for load in loads])) if structure.containers else loads[0]
        self.encode, self.slots_of = structure.encode, residency.slots

    def encode_many(self, samples: list[Any]) -> list[list[Any]] | None:
        """Return the bytes of samples: small ones lie in one buffer for each column. None if one does not fit."""
        if self._structure.nbytes < LARGE_VALUE and (encoded := self.pack(samples, self.new_batch(len(samples)))) is not None:
            return encoded
        return super().encode_many(samples)

    def pack(self, samples: list[Any], items: list[Any]) -> list[list[Any]] | None:
        """Copy samples into a contiguous batch of as many, and return their bytes there.

        Return None, with undefined rows, if the samples are not all alike: then each has to be looked at.
        """
        parted = self._structure.part(samples)
        if parted is None:
            return None
        stacked = (column.stack(*pair) for column, *pair in zip(self.columns, parted, items, strict=False))
        return self.buffers(items, len(samples)) if all(stacked) else None

    def buffers(self, items: list[Any], count: int) -> list[list[Any]]:
        """Return the bytes of the samples of a batch, as `encode` does for each; views of it if it is contiguous."""
        if any(column.is_ordered for column in self.columns) or not all(map(is_contiguous, items)):
            return [self.encode(sample, "batch") for sample in self.samples(items, count)]
        return list(map(list, zip(*(list(as_bytes(item)) for item in items), strict=True))) if items else [[]] * count

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
            if nbytes <= SCATTERED:
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

    def clear(self) -> None:
        """See `SampleStore`. All slots are zeroed."""
        states = np.asarray(self._states)
        states[states == SET] = EMPTY
        self.segment.extents.clear()

    def amounts(self, filled: int) -> dict[str, int]:
        """Return the attributes of `CacheStats` that depend on the slots."""
        slots, slot_bytes = self._residency.slot_count, self._structure.nbytes
        return {"slots": slots, "slot_bytes": slot_bytes, "capacity_bytes": slots * slot_bytes}

    def rows(self, slot: Any) -> Any:
        """Return the live rows of a slot, or of many, in the containers of the sample."""
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
            if contiguous and not is_contiguous(item):
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

    def erase(self, mask: NDArray[np.bool_], items: list[Any]) -> None:
        """Zero the samples of a contiguous batch where ``mask`` (1-D) is True."""
        for column, item in zip(self.columns, items, strict=True):
            if column.nbytes:
                as_bytes(item)[mask] = 0  # not by torch: a forked child does not have its threads

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
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
    return offsets
