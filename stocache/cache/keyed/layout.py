"""The control bytes of a `KeyedCache`: the words of its arena, and those of the table of keys.

arena      as of a `RaggedCache` without samples, see NOTE [ Control of an arena ]
state      how many levels the table has, and 256 times how often they were dropped
stopped    1 if a function has found that the values are wrong by now
removed    how many keys were removed since all were dropped
levels     for each: the offset of its cells in the data, the logarithm of their number, and how many keys it has or has had
"""

import struct

from stocache.cache import arena
from stocache.errors import SegmentError

BY_KEY = "values by key"
"""Identifies the segment of a `KeyedCache` among those of other caches."""

STATE, STOPPED, REMOVED, FIRST = range(4)
OFFSET, BITS, COUNT = range(3)
WORDS_OF_LEVEL, LEVELS = 3, 20

AT = arena.control_bytes(0)
_WORDS = struct.Struct(f"{FIRST + WORDS_OF_LEVEL * LEVELS}Q")
CONTROL_BYTES = AT + _WORDS.size


def count_keys(control: bytes) -> int:
    """Return the number of keys, given the control bytes. It may be too high by one for each process that was killed."""
    if len(control) < CONTROL_BYTES:
        raise SegmentError("is damaged: its control is too small.")
    words = _WORDS.unpack_from(control, AT)
    counts: list[int] = [words[FIRST + WORDS_OF_LEVEL * level + COUNT] for level in range(min(words[STATE] & 255, LEVELS))]
    removed: int = words[REMOVED]
    return max(0, sum(counts) - removed)
