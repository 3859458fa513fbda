"""Store the samples of a RaggedCache as records in an arena.

With ``admission="cost"`` a cache keeps the samples that cost most to load per byte. A cache saves the time that its samples
take to load. For limited bytes, the samples with the highest cost per byte save most (Dantzig's rule for the
knapsack, whose error is less than one sample). If all costs are equal, these are the smallest samples: of log-normal sizes
(sigma 1) the smallest 56 % of samples fit into 20 % of the bytes.

NOTE [ Measuring and admitting ]
    The first load of each sample is timed, and its bytes are added to a histogram over cost per byte, in shared memory: 255
    bins of 15 % each. From the top down, bins are admitted as long as their bytes (scaled up from the measured samples to all
    samples) fit into the capacity. For the next bin, as many samples are admitted as fit into the rest. So most samples to keep
    are kept in the first epoch, if its order is random. Samples that came too early to decide are decided at their next load.
"""

import itertools
import math
import operator
import struct
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stocache.cache import arena
from stocache.cache.arena import MEMORY_REFUSED, NO_ROOM, Arena
from stocache.cache.options import CacheOptions
from stocache.cache.stats import EMPTY, FILLS, MISSING, OOB, REFUSED, SET
from stocache.cache.store import SampleStore
from stocache.errors import SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.leaves.type_lookup import NotImported
from stocache.samples.record_decoder import RecordReader, reader_of_cache
from stocache.samples.record_encoder import HEAD, EncodedRecord, RecordEncoder
from stocache.shm.segment import MOST_BUFFERS, Segment

_unpack_head = HEAD.unpack_from
_READERS = 4096  # readers of treedefs that a process keeps
_JOINED = 2048  # mean bytes of buffers, below which joining them costs less than passing each to the kernel (measured)
_MANY = 64  # records, for which room is taken at once
_NOT_ADMITTED = -3  # in place of an offset, beside NO_ROOM and MEMORY_REFUSED


def control_bytes(dataset_len: int, options: CacheOptions) -> int:
    """Return the number of control bytes that a cache with these options needs."""
    for_admission = admission_bytes(dataset_len) if options.admission == "cost" else 0
    return arena.control_bytes(dataset_len) + for_admission


class RecordStore(SampleStore):
    """The `SampleStore` of a RaggedCache. The slot of a sample is its index."""

    unreadable = ""
    slot = staticmethod(operator.index)

    def __init__(self, segment: Segment, dataset_len: int, options: CacheOptions) -> None:
        self._segment, self._dataset_len, self._allow_pickle = segment, dataset_len, options.allow_pickle
        self._states = segment.control[:dataset_len]
        self._codec = Codec(options.codec) if options.codec is not None else None
        self._encoder = RecordEncoder(options.allow_pickle, self._codec, bool(options.narrow))
        self.arena = Arena(segment, dataset_len)
        self._offsets = self.arena.offsets
        self._memory = segment.view(0, segment.data_bytes)
        self._readers: dict[int, RecordReader] = {}
        self._admission = None
        if options.admission == "cost":
            control = segment.control[arena.control_bytes(dataset_len) :]
            self._admission = CostAdmission(control, dataset_len, segment.data_bytes)

    def encode(self, sample: object, where: str) -> EncodedRecord:
        """Return the parts of a sample's record, compressed if that makes it smaller."""
        return self._encoder.pack(sample, where)

    def write_many(self, items: list[Any], encoded: Sequence[EncodedRecord]) -> list[int | None]:
        """Append the records of samples that are admitted, as long as there is room. See `SampleStore.write_many`.

        It takes the arena's lock once, and writes records that lie one behind the other together.
        """
        with self._segment.guard:
            places = self.arena.run_locked(lambda: self._place_all(items, encoded), None)
        if places is None:
            return [REFUSED] * len(items)
        buffers: list[Any] = []  # to be written from ``begin`` to ``end``
        begin = end = 0
        for item, record, (at, number) in zip(items, encoded, places, strict=True):
            if at >= 0:
                room, parts = self._parts(item, record, number)
                if at != end or len(buffers) + len(parts) > MOST_BUFFERS:  # a treedef may lie between
                    self._write(begin, buffers, end - begin)
                    begin, buffers = at, []
                buffers += parts
                end = at + room
        self._write(begin, buffers, end - begin)
        return self._enter(items, encoded, places)

    def _parts(self, item: Any, record: EncodedRecord, number: int) -> tuple[int, tuple[Any, ...]]:
        """Return the bytes that a record takes in the arena, and the buffers to write there."""
        return record.room, (HEAD.pack(record.nbytes, number, record.packed), *record.leaves, record.tail)

    def _enter(self, items: list[Any], encoded: Sequence[EncodedRecord], places: list[tuple[int, int]]) -> list[int | None]:
        """Note where records have been written, and which have no room. Return for each the counter to raise."""
        counters: list[int | None] = []
        for idx, (at, _) in zip(items, places, strict=True):
            if at >= 0:
                self._offsets[idx] = at
            elif at == NO_ROOM and self._states[idx] == EMPTY:
                self._states[idx] = OOB  # room is never freed
            counters.append(FILLS if at >= 0 else REFUSED if at == MEMORY_REFUSED else None)
        return counters

    def _place_all(self, items: list[Any], encoded: Sequence[EncodedRecord]) -> list[tuple[int, int]]:
        """Take room for records, at once for many of one treedef; see `_place`. With the arena's lock held."""
        if len(encoded) < _MANY or (self._admission is not None and any(record.cost_s is not None for record in encoded)):
            return list(map(self._place, items, encoded))
        places: list[tuple[int, int]] = []
        for treedef, run in itertools.groupby(encoded, key=operator.attrgetter("treedef")):
            rooms, number = [record.room for record in run], self.arena.number_of(treedef)
            begin = self.arena.take(sum(rooms)) if number >= 0 else number
            if begin >= 0:
                places += zip(itertools.accumulate(rooms[:-1], initial=begin), itertools.repeat(number), strict=False)
            else:
                rows = slice(len(places), len(places) + len(rooms))
                places += map(self._place, items[rows], encoded[rows])
        return places

    def _place(self, idx: Any, record: EncodedRecord) -> tuple[int, int]:
        """Take room for a record. Return its offset, or a negative number; and its treedef. With the arena's lock held."""
        if self._admission is not None and record.cost_s is not None:
            decision = self._admission.decide(idx, record.cost_s, record.room, self.arena.used)
            if decision != YES:
                if decision == NEVER:
                    self._states[idx] = OOB
                return _NOT_ADMITTED, 0
        number = self.arena.number_of(record.treedef)
        return (self.arena.take(record.room) if number >= 0 else number), number

    def _write(self, at: int, buffers: list[Any], nbytes: int) -> None:
        """Write ``buffers`` (``nbytes`` in total) at offset ``at``."""
        if nbytes < _JOINED * len(buffers):
            self._segment.write(at, b"".join(buffers), nbytes)
        else:
            self._segment.write_all(at, buffers, nbytes)

    def has_room_for(self, states: NDArray[np.uint8]) -> bool:
        """Return whether all samples that are EMPTY will have room, with a quarter to spare."""
        empty, filled = (int(np.count_nonzero(states == state)) for state in (EMPTY, SET))
        return filled > 0 and 1.25 * empty * self.arena.used / filled <= self.arena.capacity - self.arena.used

    def has_room(self, encoded: Collection[EncodedRecord]) -> bool:
        """Return whether all of these records fit into the arena."""
        return sum(record.room for record in encoded) <= self.arena.capacity - self.arena.used

    def refused(self, idx: int) -> bool:
        """Return whether the machine has refused the memory for the next record."""
        return self.arena.refused

    def load(self, idx: int, copy: bool) -> Any:
        """Return a sample; MISSING if its class is in a module that is not imported here. Raises SegmentError."""
        memory, at = self._memory, self._offsets[idx]
        try:
            nbytes, number, packed = _unpack_head(memory, at)
            reader = self._readers.get(number) or self._reader(number)
            return reader.read(memory, at + HEAD.size, nbytes, packed, copy)
        except (struct.error, OverflowError, MemoryError):
            raise SegmentError(f"the cache is damaged: the record of sample {idx} reaches beyond it.") from None
        except NotImported as error:  # that is a miss
            self.unreadable = str(error)
            return MISSING

    def load_many(self, indices: NDArray[np.int64]) -> list[Any]:
        """Return private copies of samples."""
        return [self.load(idx, True) for idx in indices.tolist()]

    def _reader(self, number: int) -> RecordReader:
        """Return the reader for records of a treedef. Raises NotImported: it needs a module that is not imported here."""
        if len(self._readers) >= _READERS:
            self._readers.clear()
        reader = self._readers[number] = reader_of_cache(self.arena.treedef(number), self._allow_pickle, self._codec)
        return reader

    def clear(self) -> None:
        """Free all room. The costs of the samples stay known."""
        np.asarray(self._states).fill(EMPTY if self._segment.data_bytes else OOB)
        self.arena.clear()
        if self._admission is not None:
            self._admission.clear()
        self._segment.extents.clear()

    def amounts(self, filled: int) -> dict[str, int]:
        """Return the attributes of `CacheStats` that depend on the arena."""
        words = self._segment.control[arena.words_at(self._dataset_len) :]
        return arena.amounts(words, self._dataset_len, self._segment.data_bytes, filled)


_BINS = 256  # bin 0: not measured yet
_PER_OCTAVE = 5
_LOWEST = -40  # log2 of seconds per byte: a picosecond
_ENOUGH = 32  # samples measured before any is admitted
_NEARLY_ALL = 0.95  # share of the samples measured, before one is refused for good

YES, LATER, NEVER = "yes", "later", "never"


def admission_bytes(dataset_len: int) -> int:
    """Return the number of control bytes for `CostAdmission`: 1 per sample, and 4 KiB."""
    return -(-dataset_len // 8) * 8 + 2 * 8 * _BINS


class CostAdmission:
    """Decides which samples are worth their bytes. Call it with the arena's lock held.

    Args:
        control: `admission_bytes` bytes of shared memory. They are zero at first.
        capacity: bytes for all samples.
    """

    def __init__(self, control: memoryview, dataset_len: int, capacity: int) -> None:
        self._bins = control[:dataset_len]  # the bin of each sample
        at = -(-dataset_len // 8) * 8
        self._bytes = np.frombuffer(control, np.uint64, _BINS, at)  # of the samples in each bin; bin 0 has the number measured
        self._kept = np.frombuffer(control, np.uint64, _BINS, at + 8 * _BINS)  # of the admitted samples in each bin
        self._dataset_len, self._capacity = dataset_len, capacity

    def clear(self) -> None:
        """Note that no sample is kept any more. The costs stay known."""
        self._kept.fill(0)

    def decide(self, idx: int, cost_s: float, nbytes: int, used: int = 0) -> str:
        """Return whether to keep a sample that took ``cost_s`` to load: YES; LATER (decide again); or NEVER.

        ``used``: bytes of the arena that are taken, which may be more than the bytes of the admitted samples.
        """
        again = self._bins[idx] != 0
        if not again:
            cost_per_byte = max(cost_s, 1e-9) / max(1, nbytes)
            number = round(_PER_OCTAVE * (math.log2(cost_per_byte) - _LOWEST))
            self._bins[idx] = number = min(max(number, 1), _BINS - 1)
            self._bytes[number] += np.uint64(nbytes)
            self._bytes[0] += np.uint64(1)
        measured = int(self._bytes[0])
        if measured < min(_ENOUGH, self._dataset_len):
            return LATER
        number = self._bins[idx]
        capacity = self._capacity - max(0, used - int(self._kept.sum()))
        rest = capacity - float(self._bytes[number + 1 :].sum()) * self._dataset_len / measured
        if not again:
            rest *= measured / self._dataset_len  # it is still an estimate
        if float(self._kept[1 : number + 1].sum()) + nbytes <= rest:
            self._kept[number] += np.uint64(nbytes)
            return YES
        return NEVER if again and measured >= _NEARLY_ALL * self._dataset_len else LATER
