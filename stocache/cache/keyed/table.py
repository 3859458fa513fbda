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
"""

from collections.abc import Iterator

import numpy as np

from stocache.cache.arena import Arena
from stocache.cache.keyed.keys import Key, length_of
from stocache.cache.keyed.layout import AT, BITS, CONTROL_BYTES, COUNT, FIRST, LEVELS, OFFSET, STATE, WORDS_OF_LEVEL
from stocache.errors import SegmentError
from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import Segment

_LEAST_BITS, _MOST_BITS = 6, 40
_SHARE = 64  # of the capacity that the first level takes at most
_RECORD = (1 << 48) - 1  # of a cell: the offset of its record, divided by 8, plus 1


class KeyTable:
    """The table of keys, as one process sees it."""

    def __init__(self, segment: Segment, records: Arena) -> None:
        self._segment, self._arena = segment, records
        self._words = segment.control[AT:CONTROL_BYTES].cast("Q")
        self._memory = segment.view(0, segment.data_bytes)
        self._state = 0
        self._levels: list[tuple[memoryview, int]] = []  # the cells and their number less one, the newest first

    def find(self, key: Key) -> int:
        """Return the offset of the record of a key; -1 if it is not there. Takes no lock."""
        if self._words[STATE] != self._state:
            self._read()
        if WEAKLY_ORDERED:
            fence()
        prefix, number = key
        tag, memory, size = number >> 112, self._memory, len(prefix)
        for cells, mask in self._levels:
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
        level = self._newest(room)
        if level < 0:
            return False
        cells, mask = self._levels[0]
        number = key[1]
        at = number & mask
        while cells[at]:
            at = at + 1 & mask
        self._words[FIRST + WORDS_OF_LEVEL * level + COUNT] += 1
        fence()
        cells[at] = number >> 112 << 48 | (record >> 3) + 1
        return True

    def _newest(self, room: int) -> int:
        """Return the number of the newest level, which has room for a cell; -1 if there is none."""
        if self._words[STATE] != self._state:
            self._read()
        level = (self._state & 255) - 1
        if level < 0:
            keys = self._arena.capacity // max(64, room)
            most = (self._arena.capacity // (8 * _SHARE)).bit_length() - 1
            return 0 if self._grow(max(_LEAST_BITS, min((4 * keys // 3).bit_length(), most))) else -1
        cells, count = len(self._levels[0][0]), self._words[FIRST + WORDS_OF_LEVEL * level + COUNT]
        if 4 * count >= 3 * cells and self._grow(cells.bit_length() + 1):
            return level + 1
        return level if count < cells - 1 else -1

    def _grow(self, bits: int) -> bool:
        """Add a level of ``1 << bits`` cells, if there is room and memory for it."""
        level = self._state & 255
        at = self._arena.take(8 << bits) if level < LEVELS else -1
        if at < 0:
            return False
        begin = FIRST + WORDS_OF_LEVEL * level
        self._words[begin + OFFSET], self._words[begin + BITS], self._words[begin + COUNT] = at, bits, 0
        fence()
        self._words[STATE] = self._state + 1
        self._read()
        return True

    def _read(self) -> None:
        """Look where the levels are.

        Raises:
            SegmentError: one lies outside of the reserved memory.
        """
        state = self._words[STATE]
        if WEAKLY_ORDERED:
            fence()
        levels: list[tuple[memoryview, int]] = []
        for begin in range(FIRST, FIRST + WORDS_OF_LEVEL * (state & 255), WORDS_OF_LEVEL):
            at, bits = self._words[begin + OFFSET], self._words[begin + BITS]
            if bits > _MOST_BITS or not self._segment.extents.has(at, at + (8 << bits)):
                raise SegmentError("the cache is damaged: its table of keys lies outside of its memory.")
            levels.insert(0, (self._segment.view(at, 8 << bits).cast("Q"), (1 << bits) - 1))
        self._levels, self._state = levels, state

    def __len__(self) -> int:
        if self._words[STATE] != self._state:
            self._read()
        return sum(int(np.count_nonzero(np.frombuffer(cells, np.uint64))) for cells, _ in self._levels)

    def texts(self) -> Iterator[bytes]:
        """Yield the bytes of each key."""
        if self._words[STATE] != self._state:
            self._read()
        for cells, _ in self._levels:
            numbers = np.frombuffer(cells, np.uint64)
            for word in numbers[numbers != 0].tolist():
                at = (word & _RECORD) - 1 << 3
                yield self._memory[at + 8 : at + 8 + length_of(self._memory[at : at + 8])].tobytes()

    def clear(self) -> None:
        """Drop all keys. No process may be reading or writing."""
        self._words[STATE] = (self._words[STATE] & ~255) + 256
