"""What a cache has done and holds."""

from collections.abc import Sequence
from dataclasses import dataclass

# The words of Segment.counters, one row of them per process
HITS, MISSES, FILLS, RACES, REFUSED = range(5)


@dataclass(frozen=True)
class CacheStats:
    """What a cache has done and holds, over all processes that use it or have used it.

    Attributes:
        hits: samples served from the cache.
        misses: samples that were asked for and not there: each is one read of the source.
        fills: slots set.
        races: sets that came too late, because another process or thread was faster. They changed nothing.
        refused: sets that were dropped because the machine gave no memory for their slots.
        dataset_len: samples in the dataset.
        slots: samples that may become resident.
        filled: samples that are resident now.
        slot_bytes: bytes of one sample.
        reserved_bytes: memory the slots take now.

    Free-threaded Python may lose counts where threads share a cache; elsewhere they are exact.
    """

    hits: int
    misses: int
    fills: int
    races: int
    refused: int
    dataset_len: int
    slots: int
    filled: int
    slot_bytes: int
    reserved_bytes: int

    @classmethod
    def of(cls, counts: Sequence[int], **amounts: int) -> "CacheStats":
        """Return the statistics for the sums of the counters and the other attributes."""
        return cls(counts[HITS], counts[MISSES], counts[FILLS], counts[RACES], counts[REFUSED], **amounts)

    @property
    def hit_rate(self) -> float:
        """Hits among all gets; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def filled_bytes(self) -> int:
        """Bytes of the resident samples."""
        return self.filled * self.slot_bytes

    @property
    def fill_fraction(self) -> float:
        """Resident samples among all samples of the dataset: the hit rate of the next epoch."""
        return self.filled / max(1, self.dataset_len)
