"""The arena of a RaggedCache: where records of any size are appended, one after the other, never moved nor freed.

NOTE [ Control of an arena ]
    The control of the segment holds, each part at a multiple of 8 bytes:

    states     one byte per sample
    words      8 numbers of 64 bits: `_USED` and the others below
    offsets    8 bytes per sample: where its record is in the data
    the rest   is the admission's (see admission.py)

    Room is taken by raising `_USED` under the arena's lock; the bytes are written after that, without it. A process killed in
    between leaves a gap, no damage. Skeletons (see record_encoder.py) are appended too, each leading to the one before, and
    numbered: a number is never given twice, also not after clear().
"""

import struct
from collections.abc import Callable
from typing import TypeVar

from stocache.errors import SegmentError
from stocache.shm.load_order import WEAKLY_ORDERED, order_loads
from stocache.shm.segment import Segment

_Result = TypeVar("_Result")

_USED, _GENERATION, _NEWEST, _COUNT = range(4)
_WORDS = 8
WORDS_BYTES = 8 * _WORDS

NO_ROOM, NO_MEMORY = -1, -2
"""What `Arena.append` returns instead of an offset: it is full; or the machine gives no more memory, or another process keeps
the lock."""

_SKELETON = struct.Struct("<QII")  # one past the offset of the skeleton before, number, bytes of text


def words_at(dataset_len: int) -> int:
    """Return where the words are in control."""
    return -(-dataset_len // 8) * 8


def control_bytes(dataset_len: int) -> int:
    """Return the bytes of control that an arena needs: 9 per sample, and 64."""
    return words_at(dataset_len) + 8 * (_WORDS + dataset_len)


def amounts(words: bytes | memoryview, dataset_len: int, capacity: int, filled: int) -> dict[str, int]:
    """Return what statistics say of an arena, given its words."""
    used = memoryview(words)[: 8 * _WORDS].cast("Q")[_USED]
    return {"slots": dataset_len, "slot_bytes": used // max(1, filled), "capacity_bytes": capacity}


class Arena:
    """The arena in a segment, for ``dataset_len`` samples.

    Attributes:
        offsets: where the record of each sample is, once it is set.
        capacity: bytes there are for records.
    """

    def __init__(self, segment: Segment, dataset_len: int) -> None:
        self._segment = segment
        self._lock_number = dataset_len  # the numbers below are those of the samples
        start, end = words_at(dataset_len), control_bytes(dataset_len)
        self._words = segment.control[start : start + 8 * _WORDS].cast("Q")
        self.offsets = segment.control[start + 8 * _WORDS : end].cast("Q")
        self.capacity = segment.data_bytes
        self._generation = -1
        self._numbers: dict[bytes, int] = {}
        self._texts: dict[int, bytes] = {}

    def run_locked(self, work: Callable[[], _Result], late: _Result) -> _Result:
        """Return ``work()``, with the arena's lock held; see `Segment.run_locked`."""
        return self._segment.run_locked(self._lock_number, 1, work, late)

    @property
    def used(self) -> int:
        """Bytes taken so far."""
        return self._words[_USED]

    @property
    def refused(self) -> bool:
        """Whether the machine has refused the memory for the next record."""
        used = self._words[_USED]
        return used < self.capacity and self._segment.refused(used, used + 1)

    def append(self, blob: bytes) -> int:
        """Store bytes at a multiple of 8; return where, or NO_ROOM or NO_MEMORY. With the segment's guard held."""
        at = self.run_locked(lambda: self._take(len(blob)), NO_MEMORY)
        if at >= 0:
            self._segment.write(at, blob, len(blob))
        return at

    def _take(self, nbytes: int) -> int:
        at = self._words[_USED]
        end = at + (nbytes + 7 & ~7)
        if end > self.capacity:
            return NO_ROOM
        if not self._segment.reserve(at, end):
            return NO_MEMORY
        self._words[_USED] = end
        return at

    def number_of(self, text: bytes) -> int:
        """Return the number of a skeleton, which is stored if it is new; or NO_ROOM or NO_MEMORY. With the guard held."""
        if self._generation != self._words[_GENERATION]:
            self._generation = self._words[_GENERATION]
            self._numbers.clear()
        number = self._numbers.get(text)
        if number is not None:
            return number
        return self.run_locked(lambda: self._add(text), NO_MEMORY)

    def _add(self, text: bytes) -> int:
        self._learn()
        if text in self._numbers:
            return self._numbers[text]
        at = self._take(_SKELETON.size + len(text))
        if at < 0:
            return at
        number = self._words[_COUNT]
        blob = _SKELETON.pack(self._words[_NEWEST], number, len(text)) + text
        self._segment.write(at, blob, len(blob))
        self._words[_COUNT] = number + 1
        self._words[_NEWEST] = at + 1
        self._numbers[text] = number
        self._texts[number] = text
        return number

    def skeleton(self, number: int) -> bytes:
        """Return the skeleton of that number; b"" where there is none."""
        if number not in self._texts:
            self._learn()
        return self._texts.get(number, b"")

    def _learn(self) -> None:
        """Read the skeletons, from the newest back to the first that is known.

        Raises:
            SegmentError: one is not within the memory that is reserved.
        """
        newest = self._words[_NEWEST]
        if WEAKLY_ORDERED:
            order_loads()
        while newest:
            before, number, nbytes = _SKELETON.unpack(self._part(newest - 1, _SKELETON.size))
            if number in self._texts and self._texts[number] in self._numbers:
                return
            text = self._part(newest - 1 + _SKELETON.size, nbytes)
            self._texts[number] = text
            self._numbers[text] = number
            newest = before

    def _part(self, at: int, nbytes: int) -> bytes:
        """Return bytes of the arena, where another process says that they are."""
        if not self._segment.has(at, at + nbytes):
            raise SegmentError("the cache is damaged: what tells its samples lies outside of its memory.")
        return bytes(self._segment.view(at, nbytes))

    def clear(self) -> None:
        """Begin anew; nobody may be reading or writing. Skeletons are numbered on, so nobody takes an old one for a new.

        Killed after any of the steps, the arena is sound: first writers look for skeletons anew, then they find none, then
        the room is free again. The bytes may be zeroed after that.
        """
        self._words[_GENERATION] += 1
        self._words[_NEWEST] = 0
        self._words[_USED] = 0
