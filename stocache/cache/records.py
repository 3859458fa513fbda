"""Store the samples of a RaggedCache as records in an arena."""

import operator
import struct
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stocache.cache import admission, arena
from stocache.cache.admission import LATER, NEVER, CostAdmission
from stocache.cache.arena import NO_MEMORY, Arena
from stocache.cache.options import CacheOptions
from stocache.cache.stats import EMPTY, FILLS, MISSING, OOB, REFUSED, SET
from stocache.errors import SampleError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.record_decoder import RecordReader
from stocache.samples.record_encoder import HEAD, Record, integers_codec, pack_integers, write_treedef
from stocache.samples.type_lookup import NotImported
from stocache.shm.segment import Segment

_unpack_head = HEAD.unpack_from
_COMPRESSED = 4  # a bit of the head's last number, between the width of the integers and their count
_READERS = 4096  # readers of treedefs that a process keeps


class EncodedRecord(NamedTuple):
    """The parts of a record, without its head and the number of its treedef."""

    treedef: bytes
    data: bytes
    packed: int
    tail: bytes

    @property
    def room(self) -> int:
        """Bytes of the arena that the record takes."""
        return HEAD.size + len(self.data) + len(self.tail) + 7 & ~7


def control_bytes(dataset_len: int, options: CacheOptions) -> int:
    """Return the number of control bytes that a cache with these options needs."""
    for_admission = admission.control_bytes(dataset_len) if options.admission == "cost" else 0
    return arena.control_bytes(dataset_len) + for_admission


class RecordStore:
    """The `SampleStore` of a RaggedCache. The slot of a sample is its index."""

    gathers_from = 16
    unreadable = ""
    slot = staticmethod(operator.index)

    def __init__(self, segment: Segment, dataset_len: int, options: CacheOptions) -> None:
        self._segment, self._dataset_len, self._allow_pickle = segment, dataset_len, options.allow_pickle
        self._states = segment.control[:dataset_len]
        self._codec = Codec(options.codec) if options.codec is not None else None
        self.arena = Arena(segment, dataset_len)
        self._offsets = self.arena.offsets
        self._memory = segment.view(0, segment.data_bytes)
        self._address = segment.tensor(0, segment.data_bytes).data_ptr()
        self._readers: dict[int, RecordReader] = {}
        self._reads: dict[int, Any] = {}  # their read functions: one look-up less for each sample
        self._admission = None
        if options.admission == "cost":
            control = segment.control[arena.control_bytes(dataset_len) :]
            self._admission = CostAdmission(control, dataset_len, segment.data_bytes)

    def encode(self, sample: Any, where: str) -> EncodedRecord:
        """Return the parts of a sample's record, compressed where that makes it smaller."""
        record = Record(sample, where, self._allow_pickle)
        data, integers = record.pack()
        tail, packed = pack_integers(integers)
        if self._codec is not None and (smaller := self._codec.compress(data)) is not None:
            data, packed = smaller, packed | _COMPRESSED
        return EncodedRecord(write_treedef(record.treedef), data, packed, tail)

    def encode_many(self, samples: list[Any]) -> list[EncodedRecord] | None:
        """Return the parts of samples' records; None if a sample does not fit."""
        try:
            return [self.encode(sample, "") for sample in samples]
        except SampleError:
            return None

    def write_many(
        self, indices: list[int], encoded: Sequence[EncodedRecord], costs_s: Sequence[float | None]
    ) -> list[int | None]:
        """Append records; see `write`."""
        with self._segment.guard:
            return [self.write(*each) for each in zip(indices, encoded, costs_s, strict=True)]

    def write(self, idx: int, encoded: EncodedRecord, cost_s: float | None) -> int | None:
        """Append a record if its sample is admitted and there is room. Return FILLS, REFUSED (no memory), or None."""
        if self._admission is not None and cost_s is not None:
            decide = partial(self._admission.decide, idx, cost_s, encoded.room, self.arena.used)
            decision = self.arena.run_locked(decide, LATER)
            if decision in (LATER, NEVER):
                if decision == NEVER:
                    self._states[idx] = OOB
                return None
        at = number = self.arena.number_of(encoded.treedef)
        if number >= 0:
            head = HEAD.pack(len(encoded.data), number, encoded.packed)
            at = self.arena.append(b"".join((head, encoded.data, encoded.tail)))
        if at == NO_MEMORY:
            return REFUSED
        if at < 0:
            if self._states[idx] == EMPTY:
                self._states[idx] = OOB  # room is never freed
            return None
        self._offsets[idx] = at
        return FILLS

    def has_room_for(self, states: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
        """Whether all samples that are EMPTY will have room, with a quarter to spare."""
        empty, filled = (int(np.count_nonzero(states == state)) for state in (EMPTY, SET))
        return filled > 0 and 1.25 * empty * self.arena.used / filled <= self.arena.capacity - self.arena.used

    def has_room(self, encoded: Collection[EncodedRecord]) -> bool:
        """Whether all of these records fit into the arena."""
        return sum(record.room for record in encoded) <= self.arena.capacity - self.arena.used

    def refused(self, idx: int) -> bool:
        """Whether the machine has refused the memory for the next record."""
        return self.arena.refused

    def load(self, idx: int, copy: bool) -> Any:
        """Return a sample; MISSING if its class is in a module that is not imported here. Raises SegmentError."""
        memory, at = self._memory, self._offsets[idx]
        try:
            nbytes, number, packed = _unpack_head(memory, at)
            at += HEAD.size
            integers = integers_codec(packed).unpack_from(memory, at + nbytes)
        except (struct.error, OverflowError, MemoryError):
            raise SegmentError(f"the cache is damaged: the record of sample {idx} reaches beyond it.") from None
        read = self._reads.get(number)
        if read is None:
            reader = self._reader(number)
            if reader is None:
                return MISSING
            read = reader.read
        if packed & _COMPRESSED:
            data = self._decompressed(memory[at : at + nbytes], self._readers[number].nbytes(integers))
            address = np.frombuffer(data, np.uint8).ctypes.data if data else 0
            return read(data, address, 0, len(data), integers, True)
        return read(memory, self._address, at, nbytes, integers, copy)

    def load_many(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> list[Any]:
        """Return private copies of samples."""
        return [self.load(idx, True) for idx in indices.tolist()]

    def _reader(self, number: int) -> RecordReader | None:
        """Return the reader for records of a treedef; None if it needs a module that is not imported here: that is a miss."""
        if len(self._readers) >= _READERS:
            self._readers.clear()
            self._reads.clear()
        try:
            reader = RecordReader(self.arena.treedef(number), self._allow_pickle)
        except NotImported as error:
            self.unreadable = str(error)
            return None
        self._readers[number], self._reads[number] = reader, reader.read
        return reader

    def _decompressed(self, data: Any, limit: int) -> bytes:
        if self._codec is None:
            raise SegmentError("the cache is damaged: it has a compressed sample, but no codec.")
        try:
            return self._codec.decompress(data, limit)
        except (ValueError, MemoryError) as error:
            raise SegmentError(f"the cache is damaged: {error}.") from error

    def clear(self) -> None:
        """Free all room. What the samples cost stays known."""
        self.arena.clear()
        if self._admission is not None:
            self._admission.clear()
        np.asarray(self._states).fill(EMPTY if self._segment.data_bytes else OOB)
        self._segment.clear()

    def amounts(self, filled: int) -> dict[str, int]:
        """Return the attributes of `CacheStats` that depend on the arena."""
        words = self._segment.control[arena.words_at(self._dataset_len) :]
        return arena.amounts(words, self._dataset_len, self._segment.data_bytes, filled)
