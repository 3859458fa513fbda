"""The store of a KeyedCache: keys and their records in an arena, and the table of the keys."""

from collections.abc import Sequence
from typing import Any

from stocache.cache.arena import MEMORY_REFUSED
from stocache.cache.keyed.keys import Key
from stocache.cache.keyed.table import KeyTable
from stocache.cache.options import CacheOptions
from stocache.cache.records import RecordStore
from stocache.cache.stats import FILLS, RACES, REFUSED
from stocache.samples.record_encoder import EncodedRecord
from stocache.shm.segment import Segment

_RACED = -4  # in place of an offset, as MEMORY_REFUSED: the key is there by now


class KeyedStore(RecordStore):
    """Records of values, behind the bytes of their keys. The slot of a value is the offset of its record.

    It publishes what it writes: see NOTE [ The table of keys ].
    """

    def __init__(self, segment: Segment, options: CacheOptions) -> None:
        super().__init__(segment, 0, options)
        self._offsets: Any = range(segment.data_bytes)  # each slot is its own offset
        self.table = KeyTable(segment, self.arena)

    def _place_all(self, items: list[Key], encoded: Sequence[EncodedRecord]) -> list[tuple[int, int]]:
        return list(map(self._place, items, encoded))

    def _place(self, key: Key, record: EncodedRecord) -> tuple[int, int]:
        if self.table.find(key) >= 0:
            return _RACED, 0
        number = self.arena.number_of(record.treedef)
        return (self.arena.take(len(key[0]) + record.room) if number >= 0 else number), number

    def _parts(self, key: Key, record: EncodedRecord, number: int) -> tuple[int, tuple[Any, ...]]:
        room, parts = super()._parts(key, record, number)
        return len(key[0]) + room, (key[0], *parts)

    def _enter(self, items: list[Key], encoded: Sequence[EncodedRecord], places: list[tuple[int, int]]) -> list[int | None]:
        refused: list[int | None] = [REFUSED] * len(items)
        with self._segment.guard:
            return self.arena.run_locked(lambda: list(map(self._add, items, encoded, places)), refused)

    def _add(self, key: Key, record: EncodedRecord, place: tuple[int, int]) -> int | None:
        """Have readers find a record that was written at a place. With the arena's lock held. Return the counter to raise."""
        at, _ = place
        if at < 0:
            return {_RACED: RACES, MEMORY_REFUSED: REFUSED}.get(at)
        if self.table.find(key) >= 0:  # another process was faster
            return RACES
        return FILLS if self.table.add(key, at, record.room) else None

    def remove(self, key: Key) -> bool | None:
        """Remove a key. Return whether it was there; None if another process does not release the lock."""
        with self._segment.guard:
            return self.arena.run_locked(lambda: self.table.remove(key), None)

    def clear(self) -> None:
        """Drop all keys, and free all room."""
        self.table.clear()
        super().clear()

    def amounts(self, filled: int) -> dict[str, int]:
        """See `SampleStore`."""
        return super().amounts(filled) | {"slots": filled}
