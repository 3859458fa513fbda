"""The table of a `KeyedCache`: where in the arena the record of each key is.

NOTE [ The table of keys ]
    The table has levels. Each is a hash table with open addressing that lies in the arena, like a record. A cell has 8 bytes:
    16 bits of the key's hash, and the offset of its record; 0 is an empty cell. When the newest level is three quarters full, a
    level with four times as many cells follows. Nothing is moved, so readers need no lock: they look through the levels, from
    the newest on. The first level is made for as many keys as fit into the cache if all are like the first. So a cache of equal
    parts has one level, and no cache has to know how many keys will come.

    A writer takes room for the record and writes it. With the arena's lock held, it looks for the key again, raises the number
    of keys, and sets the cell. If it is killed in between, it leaves a gap in the arena, and no key. A number that is raised
    before its cell is set may be too high by one afterwards, never too low: so a level always has an empty cell, where a search
    for a key that is not there ends.

    The cell of a key that is removed becomes `_GONE`, which is not empty, so searches continue past it. No key is ever found
    there: its offset lies outside of the memory. Neither the cell nor the record is used again until all keys are dropped.
    So a reader that has found a record reads it to the end.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stocache.cache.arena import Arena
from stocache.cache.keyed.keys import Key, length_of
from stocache.cache.keyed.layout import (
    AT,
    BITS,
    CONTROL_BYTES,
    COUNT,
    FIRST,
    LEVELS,
    OFFSET,
    REMOVED,
    STATE,
    STOPPED,
    WORDS_OF_LEVEL,
)
from stocache.errors import SegmentError
from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import Segment

_LEAST_BITS, _MOST_BITS = 6, 40
_SHARE = 64  # of the capacity that the first level takes at most
_RECORD = (1 << 48) - 1  # of a cell: the offset of its record, divided by 8, plus 1
_GONE = _RECORD  # a cell whose key was removed


_Levels: TypeAlias = tuple[int, list[tuple[memoryview, int]]]
"""The state word that they were read with, and for each level, the newest first, the cells and their number less one."""


class KeyTable:
    """The table of keys, as one process sees it."""

    def __init__(self, segment: Segment, records: Arena) -> None:
        self._segment, self._arena = segment, records
        self._words = segment.control[AT:CONTROL_BYTES].cast("Q")
        self._memory = segment.view(0, segment.data_bytes)
        self._seen: _Levels = 0, []  # in one attribute, as other threads set it meanwhile

    def find(self, key: Key) -> int:
        """Return the offset of the record of a key; -1 if it is not there. Takes no lock."""
        state, levels = self._seen
        if self._words[STATE] != state:
            _, levels = self._read()
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

    def add(self, key: Key, record: int, room: int) -> bool:
        """Add a key that is not there, with the offset of its prefix. With the arena's lock held.

        ``room``: the bytes of the record. Returns False if there is no room for a cell.
        """
        state, levels = self._with_room(self._read(), room)
        if not levels:
            return False
        level, (cells, mask) = (state & 255) - 1, levels[0]
        number = key[1]
        at = number & mask
        while cells[at]:
            at = at + 1 & mask
        self._words[FIRST + WORDS_OF_LEVEL * level + COUNT] += 1
        fence()
        cells[at] = number >> 112 << 48 | (record >> 3) + 1
        return True

    def remove(self, key: Key) -> bool:
        """Remove a key. Return whether it was there. With the arena's lock held."""
        found = self.find(key)
        word = key[1] >> 112 << 48 | (found - len(key[0]) >> 3) + 1
        for cells, mask in self._read()[1] if found >= 0 else []:
            at = key[1] & mask
            while cells[at]:
                if cells[at] == word:
                    cells[at] = _GONE
                    self._words[REMOVED] += 1
                    return True
                at = at + 1 & mask
        return False

    def _with_room(self, found: "_Levels", room: int) -> "_Levels":
        """Return the levels, of which the newest has room for a cell; none if there is no room."""
        state, levels = found
        if not levels:
            keys = self._arena.capacity // max(64, room)
            most = (self._arena.capacity // (8 * _SHARE)).bit_length() - 1
            return self._grow(state, max(_LEAST_BITS, min((4 * keys // 3).bit_length(), most)))
        cells, count = len(levels[0][0]), self._words[FIRST + WORDS_OF_LEVEL * (len(levels) - 1) + COUNT]
        if 4 * count >= 3 * cells and (grown := self._grow(state, cells.bit_length() + 1))[1]:
            return grown
        return found if count < cells - 1 else (state, [])

    def _grow(self, state: int, bits: int) -> "_Levels":
        """Add a level of ``1 << bits`` cells. Return all levels; none if there is no room or memory for it."""
        level = state & 255
        at = self._arena.take(8 << bits) if level < LEVELS else -1
        if at < 0:
            return state, []
        begin = FIRST + WORDS_OF_LEVEL * level
        self._words[begin + OFFSET], self._words[begin + BITS], self._words[begin + COUNT] = at, bits, 0
        fence()
        self._words[STATE] = state + 1
        return self._read()

    def _read(self) -> "_Levels":
        """Look where the levels are.

        Raises:
            SegmentError: one lies outside of the reserved memory.
        """
        state = self._words[STATE]
        if state == self._seen[0]:
            return self._seen
        if WEAKLY_ORDERED:
            fence()
        levels: list[tuple[memoryview, int]] = []
        for begin in range(FIRST, FIRST + WORDS_OF_LEVEL * (state & 255), WORDS_OF_LEVEL):
            at, bits = self._words[begin + OFFSET], self._words[begin + BITS]
            if bits > _MOST_BITS or not self._segment.extents.has(at, at + (8 << bits)):
                raise SegmentError("the cache is damaged: its table of keys lies outside of its memory.")
            levels.insert(0, (self._segment.view(at, 8 << bits).cast("Q"), (1 << bits) - 1))
        self._seen = state, levels
        return self._seen

    @property
    def stopped(self) -> bool:
        """Whether the values are not to be served any more."""
        return self._words[STOPPED] != 0

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._words[STOPPED] = stopped

    @property
    def generation(self) -> int:
        """How often all keys were dropped."""
        return self._words[STATE] >> 8

    def __len__(self) -> int:
        return sum(map(len, self._words_of_keys()))

    def texts(self) -> Iterator[bytes]:
        """Yield the bytes of each key."""
        for numbers in self._words_of_keys():
            for word in numbers.tolist():
                at = (word & _RECORD) - 1 << 3
                yield self._memory[at + 8 : at + 8 + length_of(self._memory[at : at + 8])].tobytes()

    def _words_of_keys(self) -> "Iterator[NDArray[np.uint64]]":
        """Yield the cells of each level that have keys."""
        for cells, _ in self._read()[1]:
            numbers = np.frombuffer(cells, np.uint64)
            yield numbers[(numbers != 0) & (numbers != _GONE)]

    def clear(self) -> None:
        """Drop all keys. No process may be reading or writing."""
        self._words[REMOVED] = 0
        self._words[STATE] = (self._words[STATE] & ~255) + 256
