"""Append records of any size to the arena of a RaggedCache. They are never moved, and never freed one by one.

NOTE [ Control of an arena ]
    The control bytes of the segment hold, each part at a multiple of 8 bytes:

    states     one byte per sample
    words      8 numbers of 64 bits: `_USED` and the others below
    offsets    8 bytes per sample: where its record is in the data
    the rest   belongs to the admission (see admission.py)

    A writer takes room by raising `_USED` under the arena's lock. It writes the bytes after that, without the lock. If it is
    killed in between, it leaves a gap, and no damage. Treedefs (the structure of samples, see record_encoder.py) are appended
    too. Each points to the one before, and has a number. A number is never used twice, also not after clear().
"""

import struct
from collections.abc import Callable, Iterable
from typing import TypeVar

from stocache.errors import SegmentError
from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import Segment

_Result = TypeVar("_Result")

_USED, _GENERATION, _NEWEST, _COUNT = range(4)
_WORDS = 8
_LOCK = 1  # of the owner's locks; 0 is the lock of the claims
WORDS_BYTES = 8 * _WORDS

NO_ROOM, MEMORY_REFUSED = -1, -2
"""`Arena.take` returns these instead of an offset. NO_ROOM: the arena is full.

MEMORY_REFUSED: the machine has no more memory, or another process does not release the lock.
"""

_TREEDEF = struct.Struct("<QII")  # offset of the treedef before, plus 1; number; bytes of text


def words_at(dataset_len: int) -> int:
    """Return the offset of the words in the control bytes."""
    return -(-dataset_len // 8) * 8


def control_bytes(dataset_len: int) -> int:
    """Return the number of control bytes that an arena needs: 9 per sample, and 64."""
    return words_at(dataset_len) + 8 * (_WORDS + dataset_len)


def amounts(words: bytes | memoryview, dataset_len: int, capacity: int, filled: int) -> dict[str, int]:
    """Return the attributes of `CacheStats` that depend on an arena, given its words."""
    used = memoryview(words)[: 8 * _WORDS].cast("Q")[_USED]
    return {"slots": dataset_len, "slot_bytes": used // max(1, filled), "capacity_bytes": capacity}


class Arena:
    """The arena in a segment, for ``dataset_len`` samples.

    Attributes:
        offsets: the offset of each sample's record. Valid if the sample is set.
        capacity: bytes for records.
    """

    def __init__(self, segment: Segment, dataset_len: int) -> None:
        self._segment = segment
        start, end = words_at(dataset_len), control_bytes(dataset_len)
        self._words = segment.control[start : start + 8 * _WORDS].cast("Q")
        self.offsets = segment.control[start + 8 * _WORDS : end].cast("Q")
        self.capacity = segment.data_bytes
        self._generation = -1
        self._numbers: dict[bytes, int] = {}
        self._texts: dict[int, bytes] = {}

    def run_locked(self, work: Callable[[], _Result], late: _Result) -> _Result:
        """Return ``work()``, run with the arena's lock held; ``late`` if another process does not release the lock."""
        return self._segment.run_locked(_LOCK, work, late)

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._words[_USED]

    @property
    def refused(self) -> bool:
        """Whether the machine has refused the memory for the next record."""
        used = self._words[_USED]
        return used < self.capacity and self._segment.extents.refused(used, used + 1)

    def take(self, nbytes: int) -> int:
        """Take room at a multiple of 8. Return its offset, or NO_ROOM or MEMORY_REFUSED. With the arena's lock held."""
        at = self._words[_USED]
        end = at + (nbytes + 7 & ~7)
        if end > self.capacity:
            return NO_ROOM
        if not self._segment.extents.reserve(at, end):
            return MEMORY_REFUSED
        self._words[_USED] = end
        return at

    def number_of(self, text: bytes) -> int:
        """Return the number of a treedef, or NO_ROOM or MEMORY_REFUSED. Store it if it is new. With the arena's lock held."""
        if self._generation != self._words[_GENERATION]:
            self._generation = self._words[_GENERATION]
            self._numbers.clear()
        number = self._numbers.get(text)
        return self._add(text) if number is None else number

    def _add(self, text: bytes) -> int:
        self._read_treedefs()
        if text in self._numbers:
            return self._numbers[text]
        at = self.take(_TREEDEF.size + len(text))
        if at < 0:
            return at
        number = self._words[_COUNT]
        blob = _TREEDEF.pack(self._words[_NEWEST], number, len(text)) + text
        self._segment.write(at, blob, len(blob))
        self._words[_COUNT] = number + 1
        self._words[_NEWEST] = at + 1
        self._numbers[text] = number
        self._texts[number] = text
        return number

    @staticmethod
    def bytes_of(texts: Iterable[bytes]) -> int:
        """Return the bytes that treedefs take."""
        return sum(_TREEDEF.size + len(text) + 7 & ~7 for text in texts)

    def treedef(self, number: int) -> bytes:
        """Return the treedef of a number; b"" if it does not exist."""
        if number not in self._texts:
            self._read_treedefs()
        return self._texts.get(number, b"")

    def _read_treedefs(self) -> None:
        """Read the treedefs, from the newest back to the first known one.

        Raises:
            SegmentError: one lies outside of the reserved memory.
        """
        newest = self._words[_NEWEST]
        if WEAKLY_ORDERED:
            fence()
        while newest:
            before, number, nbytes = _TREEDEF.unpack(self._part(newest - 1, _TREEDEF.size))
            if number in self._texts and self._texts[number] in self._numbers:
                return
            text = self._part(newest - 1 + _TREEDEF.size, nbytes)
            self._texts[number] = text
            self._numbers[text] = number
            newest = before

    def _part(self, at: int, nbytes: int) -> bytes:
        """Return bytes of the arena at an offset that another process has written, after checking it."""
        if not self._segment.extents.has(at, at + nbytes):
            raise SegmentError("the cache is damaged: the structure of its samples lies outside of its memory.")
        return bytes(self._segment.view(at, nbytes))

    def clear(self) -> None:
        """Free all room. No process may be reading or writing. The numbers of treedefs go on, so that none is used twice.

        If this process is killed after any of the steps, the arena is sound: first writers read the treedefs again, then the
        list of treedefs is empty, then the room is free. The bytes may be zeroed after that.
        """
        self._words[_GENERATION] += 1
        self._words[_NEWEST] = 0
        self._words[_USED] = 0
