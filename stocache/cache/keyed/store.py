"""The store of a KeyedCache: keys and their records in an arena, and the table of the keys.

NOTE [ The table of keys ]
    The table has levels. Each is a hash table with open addressing that lies in the arena, like a record. A cell has 8 bytes:
    16 bits of the key's hash, and the offset of its record; 0 is an empty cell. When the newest level is three quarters full, a
    level with four times as many cells follows. Nothing is moved, so readers need no lock: they look through the levels, from
    the newest on. The first level is made for as many keys as fit into the cache if all are like the first. So a cache of equal
    parts has one level, and no cache has to know how many keys will come.

    A writer takes room for the record and writes it. With the arena's lock held, it looks for the key again, raises the number
    of keys, and sets the cell. If it is killed in between, it leaves a gap in the arena, and no key. A number that is raised
    before its cell is set may be too high by one afterwards, never too low: so a level always has an empty cell, at which a
    search for a key that is not there ends.

    The cell of a key that is removed becomes `_GONE`, which is not empty, so searches continue past it. No key is ever found
    there: its offset lies outside of the memory. Neither the cell nor the record is used again until all keys are dropped.
    So a reader that has found a record reads it to the end.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from stocache.cache.arena import MEMORY_REFUSED
from stocache.cache.keyed.keys import Key
from stocache.cache.keyed.layout import AT, BITS, CONTROL_BYTES, COUNT, LEVELS, OFFSET, REMOVED, STATE
from stocache.cache.options import CacheOptions
from stocache.cache.records import RecordStore
from stocache.cache.stats import FILLS, RACES, REFUSED
from stocache.errors import SegmentError
from stocache.samples.record_encoder import EncodedRecord
from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import Segment

_LEAST_BITS, _MOST_BITS = 6, 40
_SHARE = 64  # of the capacity that the first level takes at most
_RECORD = (1 << 48) - 1  # of a cell: the offset of its record, divided by 8, plus 1
_GONE = _RECORD  # a cell whose key was removed


_Levels: TypeAlias = list[tuple[memoryview, int]]
"""For each level, the newest first, the cells and their number less one."""


class KeyedStore(RecordStore):
    """Records of values, behind the bytes of their keys. The slot of a value is the offset of its record.

    Attributes:
        words: of the table; see `stocache.cache.keyed.layout`.
    """

    def __init__(self, segment: Segment, options: CacheOptions) -> None:
        super().__init__(segment, 0, options)
        self._offsets: Any = range(segment.data_bytes)  # each slot is its own offset
        self.words = segment.control[AT:CONTROL_BYTES].cast("Q")
        self._seen: tuple[int, _Levels] = 0, []  # the state and its levels: in one attribute, as other threads set it meanwhile

    def find(self, key: Key) -> int:
        """Return the slot of a key; -1 if it is not there. Takes no lock."""
        state, levels = self._seen
        if self.words[STATE] != state:
            levels = self._levels()
        if WEAKLY_ORDERED:
            fence()
        prefix, number = key
        tag, memory, size = number >> 112, self._memory, len(prefix)
        for cells, mask in levels:
            at = number & mask
            while word := cells[at]:
                if word >> 48 == tag:
                    record = (word & _RECORD) - 1 << 3
                    if memory[record : record + size] == prefix:
                        return record + size
                at = at + 1 & mask
        return -1

    def _place_all(self, items: list[Key], encoded: Sequence[EncodedRecord]) -> list[tuple[int, int]]:
        return list(map(self._place, items, encoded))

    def _place(self, key: Key, record: EncodedRecord) -> tuple[int, int]:
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
        if place[0] < 0:
            return REFUSED if place[0] == MEMORY_REFUSED else None
        if self.find(key) >= 0:  # another process was faster
            return RACES
        levels = self._with_room(record.room)
        if not levels:
            return None
        cells, mask = levels[0]
        at = key[1] & mask
        while cells[at]:
            at = at + 1 & mask
        self.words[COUNT + len(levels) - 1] += 1
        fence()
        cells[at] = key[1] >> 112 << 48 | (place[0] >> 3) + 1
        return FILLS

    def remove(self, key: Key) -> bool | None:
        """Remove a key. Return whether it was there; None if another process does not release the lock."""
        with self._segment.guard:
            return self.arena.run_locked(lambda: self._remove(key), None)

    def _remove(self, key: Key) -> bool:
        found = self.find(key)
        word = key[1] >> 112 << 48 | (found - len(key[0]) >> 3) + 1
        for cells, mask in self._levels() if found >= 0 else []:
            at = key[1] & mask
            while cells[at] not in (word, 0):
                at = at + 1 & mask
            if cells[at]:
                cells[at] = _GONE
                self.words[REMOVED] += 1
        return found >= 0

    def _with_room(self, room: int) -> _Levels:
        """Return the levels, of which the newest has room for a cell; none if there is no room. ``room``: of a record."""
        levels = self._levels()
        if not levels:
            keys = self.arena.capacity // max(64, room)
            most = (self.arena.capacity // (8 * _SHARE)).bit_length() - 1
            return self._grow(max(_LEAST_BITS, min((4 * keys // 3).bit_length(), most)))
        cells, count = len(levels[0][0]), self.words[COUNT + len(levels) - 1]
        if 4 * count >= 3 * cells and (grown := self._grow(cells.bit_length() + 1)):
            return grown
        return levels if count < cells - 1 else []

    def _grow(self, bits: int) -> _Levels:
        """Add a level of ``1 << bits`` cells. Return all levels; none if there is no room or memory for it."""
        level = self.words[STATE] & 255
        at = self.arena.take(8 << bits) if level < LEVELS else -1
        if at < 0:
            return []
        self.words[OFFSET + level], self.words[BITS + level], self.words[COUNT + level] = at, bits, 0
        fence()
        self.words[STATE] += 1
        return self._levels()

    def _levels(self) -> _Levels:
        """Look where the levels are.

        Raises:
            SegmentError: one lies outside of the reserved memory.
        """
        state = self.words[STATE]
        if state == self._seen[0]:
            return self._seen[1]
        if WEAKLY_ORDERED:
            fence()
        levels: _Levels = []
        for level in range(state & 255):
            at, bits = self.words[OFFSET + level], self.words[BITS + level]
            if bits > _MOST_BITS or not self._segment.extents.has(at, at + (8 << bits)):
                raise SegmentError("the cache is damaged: its table of keys lies outside of its memory.")
            levels.insert(0, (self._segment.view(at, 8 << bits).cast("Q"), (1 << bits) - 1))
        self._seen = state, levels
        return levels

    @property
    def generation(self) -> int:
        """How often all keys were dropped."""
        return self.words[STATE] >> 8

    def __len__(self) -> int:
        """Return the number of keys."""
        levels = [np.frombuffer(cells, np.uint64) for cells, _ in self._levels()]
        return sum(int(np.count_nonzero((cells != 0) & (cells != _GONE))) for cells in levels)

    def clear(self) -> None:
        """Drop all keys, and free all room. No process may be reading or writing."""
        self.words[REMOVED] = 0
        self.words[STATE] = (self.words[STATE] & ~255) + 256
        super().clear()

    def amounts(self, filled: int) -> dict[str, int]:
        """See `SampleStore`."""
        return super().amounts(filled) | {"slots": filled}
