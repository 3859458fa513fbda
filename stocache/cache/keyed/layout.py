"""The control bytes of a `KeyedCache`: the words of its arena, and those of the table of keys.

arena      as of a `RaggedCache` without samples, see NOTE [ Control of an arena ]
state      how many levels the table has, and 256 times how often they were dropped
stopped    1 where a function has found that the values are wrong by now
levels     for each: the offset of its cells in the data, the logarithm of their number, and how many keys it has
"""

import struct

from stocache.cache import arena
from stocache.errors import SegmentError

BY_KEY = "values by key"
"""Identifies the segment of a `KeyedCache` among those of other caches."""

STATE, STOPPED, FIRST = 0, 1, 2
OFFSET, BITS, COUNT = range(3)
WORDS_OF_LEVEL, LEVELS = 3, 20

AT = arena.control_bytes(0)
_WORDS = struct.Struct(f"{FIRST + WORDS_OF_LEVEL * LEVELS}Q")
CONTROL_BYTES = AT + _WORDS.size


def count_keys(control: bytes) -> int:
    """Return the number of keys, given the control bytes. It is too high by one for each writer that was killed."""
    if len(control) < CONTROL_BYTES:
        raise SegmentError("is damaged: its control is too small.")
    words = _WORDS.unpack_from(control, AT)
    return sum(words[FIRST + WORDS_OF_LEVEL * level + COUNT] for level in range(min(words[STATE] & 255, LEVELS)))
