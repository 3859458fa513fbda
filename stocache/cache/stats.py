"""What a cache has done and holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from stocache.system.deprecation import old_name

# The state byte of a sample, as in SlotState; plain ints, for an enum look-up costs as much as the byte itself
EMPTY, SET, OOB = range(3)

# The words of Segment.counters, one row of them per process
HITS, MISSES, FILLS, RACES, REFUSED, REJECTED = range(6)


@dataclass(frozen=True)
class CacheStats:
    """What a cache has done and holds, over all processes that use it or have used it.

    Attributes:
        hits: samples served from the cache.
        misses: samples that were asked for and not there: each is one read of the source.
        fills: slots set.
        races: sets that came too late, because another process or thread was faster. They changed nothing.
        refused: sets that were dropped because the machine gave no memory for their slots.
        rejected: samples that were loaded and did not fit, of another structure than the cache holds.
        dataset_len: samples in the dataset.
        slots: samples that may become resident, at most.
        filled: samples that are resident now.
        slot_bytes: bytes of one sample; where sizes vary, of the average resident one, as it is stored.
        capacity_bytes: bytes of samples the cache may hold.
        reserved_bytes: memory they take now.

    Free-threaded Python may lose counts where threads share a cache; elsewhere they are exact.
    """

    hits: int
    misses: int
    fills: int
    races: int
    refused: int
    rejected: int
    dataset_len: int
    slots: int
    filled: int
    slot_bytes: int
    capacity_bytes: int
    reserved_bytes: int

    @classmethod
    def of(cls, counts: Sequence[int], **amounts: int) -> "CacheStats":
        """Return the statistics for the sums of the counters and the other attributes."""
        return cls(*counts[: REJECTED + 1], **amounts)

    @property
    def hit_rate(self) -> float:
        """Hits among all gets; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    misfits = old_name("misfits", "rejected")

    @property
    def filled_bytes(self) -> int:
        """Bytes of the resident samples."""
        return self.filled * self.slot_bytes

    @property
    def fill_fraction(self) -> float:
        """Resident samples among all samples of the dataset: the hit rate of the next epoch."""
        return self.filled / max(1, self.dataset_len)
