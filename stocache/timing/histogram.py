"""Count durations in logarithmic buckets, and read percentiles from the counts.

The bounds of a bucket differ by 4 %. A percentile is the middle of its bucket, so it is exact within 2 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_GROWTH = 1.04
_SHORTEST_NS, _LONGEST_NS = 250.0, 4e12  # shorter and longer durations are counted in the first and the last bucket
_SCALE = 1 / math.log(_GROWTH)
_SHIFT = math.log(_SHORTEST_NS) * _SCALE
_log = math.log  # a look-up less for each batch

BUCKETS = math.ceil(math.log(_LONGEST_NS) * _SCALE - _SHIFT)
"""The number of buckets."""

Counts = np.ndarray[Any, np.dtype[np.int64]]
"""How many durations each bucket has; of shape (BUCKETS,)."""

BOUNDS_S = _SHORTEST_NS / 1e9 * _GROWTH ** np.arange(1, BUCKETS + 1)
"""The upper bound of each bucket, in seconds."""

_MIDDLES_S = BOUNDS_S / math.sqrt(_GROWTH)


def bucket_of(duration_ns: float) -> int:
    """Return the bucket of a duration, in nanoseconds."""
    if _SHORTEST_NS < duration_ns < _LONGEST_NS:
        return int(_log(duration_ns) * _SCALE - _SHIFT)
    return 0 if duration_ns < _LONGEST_NS else BUCKETS - 1


def count_all(counts: Counts, durations_s: Sequence[float]) -> None:
    """Count durations, in seconds. At 0.1 µs each where there are many."""
    clipped = np.clip(np.asarray(durations_s) * 1e9, _SHORTEST_NS, _LONGEST_NS)
    buckets = np.minimum((np.log(clipped) * _SCALE - _SHIFT).astype(np.int64), BUCKETS - 1)
    np.add.at(counts, buckets, 1)


@dataclass(frozen=True)
class Distribution:
    """How long something took, in seconds. Percentiles and the maximum are exact within 2 %; 0 where ``count`` is 0.

    Attributes:
        count: how often it was measured.
        mean_s: the mean, exact.
        p50_s, p95_s, p99_s: so many percent took at most so long.
        max_s: the longest.
    """

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, counts: Counts, total_ns: int) -> "Distribution":
        """Return the distribution of counted durations, whose sum is ``total_ns`` nanoseconds."""
        count = int(counts.sum())
        if not count:
            return cls()
        ranks = [max(1, math.ceil(share * count)) for share in (0.5, 0.95, 0.99, 1.0)]
        found = np.searchsorted(np.cumsum(counts), ranks)
        return cls(count, total_ns / 1e9 / count, *_MIDDLES_S[found].tolist())


NOTHING = Distribution()
"""The distribution of what was never measured."""
