"""The control bytes of a `KeyedCache`: the words of its arena, and the words of the table of keys.

arena      as of a `RaggedCache` without samples, see NOTE [ Control of an arena ]
state      how many levels the table has, and 256 times how often they were dropped
stopped    1 if a function has found that the values are wrong by now
removed    how many keys were removed since all were dropped
offset     for each level: where its cells are in the data
bits       for each level: the logarithm of their number
count      for each level: how many keys it has or has had
"""

from stocache.cache import arena
from stocache.errors import SegmentError

BY_KEY = "values by key"
"""Identifies the segment of a `KeyedCache` among the segments of other caches."""

LEVELS = 20
STATE, STOPPED, REMOVED, OFFSET = range(4)
BITS, COUNT = OFFSET + LEVELS, OFFSET + 2 * LEVELS

AT = arena.control_bytes(0)
CONTROL_BYTES = AT + 8 * (COUNT + LEVELS)


def count_keys(control: bytes) -> int:
    """Return the number of keys, given the control bytes. It may be too high by one for each process that was killed."""
    if len(control) < CONTROL_BYTES:
        raise SegmentError("is damaged: its control is too small.")
    words = memoryview(control)[AT:CONTROL_BYTES].cast("Q")
    return max(0, sum(words[COUNT : COUNT + min(words[STATE] & 255, LEVELS)]) - words[REMOVED])
