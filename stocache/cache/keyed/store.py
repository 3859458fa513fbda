"""The store of a KeyedCache: keys and their records in an arena."""

from typing import Any

from stocache.cache.keyed.keys import Key
from stocache.cache.options import CacheOptions
from stocache.cache.records import RecordStore
from stocache.samples.record_encoder import HEAD, EncodedRecord
from stocache.shm.segment import Segment


class KeyedStore(RecordStore):
    """Records of values, behind the bytes of their keys. The slot of a value is the offset of its record."""

    def __init__(self, segment: Segment, options: CacheOptions) -> None:
        super().__init__(segment, 0, options)
        self._offsets: Any = range(segment.data_bytes)  # each slot is its own offset

    def place(self, key: Key, record: EncodedRecord) -> tuple[int, int]:
        """Take room for a key and its record: as `RecordStore.write_many` does for samples. With the arena's lock held."""
        number = self.arena.number_of(record.treedef)
        return (self.arena.take(len(key[0]) + record.room) if number >= 0 else number), number

    def write(self, key: Key, record: EncodedRecord, at: int, number: int) -> None:
        """Write a key and its record."""
        head = HEAD.pack(record.nbytes, number, record.packed)
        self._write(at, [key[0], head, *record.leaves, record.tail], len(key[0]) + record.room)
