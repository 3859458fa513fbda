"""Count the events of a cache, and describe its content."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from stocache.system.figures import flat_numbers

if TYPE_CHECKING:
    from stocache.observe.recording.epochs import EpochStats  # which imports torch


class SlotState(IntEnum):
    """The state of a sample, as ``cache.aux_array`` holds it."""

    EMPTY = 0
    SET = 1
    OOB = 2
    """Out of bounds of the cache: in the dataset, but without a slot."""


# The same as plain ints: an enum look-up costs as much as the byte itself
EMPTY, SET, OOB = range(3)

MISSING: Any = object()
"""Stands for a sample that is not there. (None may be a sample.)"""

# The words of Segment.counters, of which each process has a row
HITS, MISSES, FILLS, RACES, REFUSED, REJECTED, DAMAGED, LOAD_NS, READ_NS = range(9)


@dataclass(frozen=True)
class CacheStats:
    """The events and the content of a cache, over all processes that use it or have used it.

    Attributes:
        hits: samples served from the cache.
        misses: samples that were requested and not cached. Each is one read of the source.
        fills: slots that were set.
        races: sets that came too late, because another process or thread was faster. They changed nothing.
        refused: sets that were dropped, because the machine gave no memory for their slots.
        rejected: loaded samples that did not fit: their structure differs from the structure of the cache.
        damaged: samples that were lost from the disk: damaged, truncated or unreadable. Each is a miss, and is written again.
        dataset_len: samples in the dataset.
        slots: the most samples that can be cached.
        filled: samples that are cached now.
        slot_bytes: bytes of one sample; if sizes vary, the average of the cached ones, as stored.
        capacity_bytes: bytes of samples that the cache can hold.
        reserved_bytes: memory that is reserved for samples now.
        load_s: seconds in which samples that were missed were loaded, the sum over all processes and threads.
        read_s: seconds in which samples were read from a disk, the sum over all. Memory is not timed.

    Counts are exact, also if threads share a cache.
    """

    hits: int
    misses: int
    fills: int
    races: int
    refused: int
    rejected: int
    damaged: int
    dataset_len: int
    slots: int
    filled: int
    slot_bytes: int
    capacity_bytes: int
    reserved_bytes: int
    load_s: float = 0.0
    read_s: float = 0.0

    @classmethod
    def of(cls, counts: Sequence[int], **amounts: int) -> "CacheStats":
        """Return the statistics from the sums of the counters and from the other attributes."""
        stats = cls(*counts[: DAMAGED + 1], **amounts)
        return replace(stats, load_s=counts[LOAD_NS] / 1e9, read_s=counts[READ_NS] / 1e9)

    @property
    def hit_rate(self) -> float:
        """Hits among all gets; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def flat(self, prefix: str = "cache") -> dict[str, float]:
        """Return all numbers in one dict, as ``{"cache/hits": 7, "cache/hit_rate": 0.5}``."""
        rates = {"hit_rate": self.hit_rate, "fill_fraction": self.fill_fraction, "filled_bytes": self.filled_bytes}
        return flat_numbers(prefix, self, rates)

    @property
    def filled_bytes(self) -> int:
        """Bytes of the cached samples."""
        return self.filled * self.slot_bytes

    @property
    def fill_fraction(self) -> float:
        """Cached samples among all samples of the dataset: the hit rate of the next epoch."""
        return self.filled / max(1, self.dataset_len)


@dataclass(frozen=True)
class DatasetStats:
    """The counts of a `CachedDataset`.

    Attributes:
        total: the counts since the cache was made, and its content.
        epochs: the counts of each epoch, in order; the last one may still be running. Only hits in memory count as hits. An
            epoch begins with a loop over a `stocache.DataLoader`, and with ``set_epoch`` of the dataset.
        disk: the counts of the disk behind the memory, if there is one. Its misses are the reads of the dataset.
        compared: cached samples that were loaded from the dataset as well, by all processes, to compare them.
        left: whether the cache is not served any more, because samples depend on more than their index.
        ranks: how many ranks of this job on this machine use the cache. All counts are of all of them.
        cut: which lines of the dataset's program are cached, and which run each time; empty if whole samples are cached.
        decoders: if samples are not cached: how many results of decoders came from memory, of each library.
        retried: how often samples were loaded again after an error, by all processes. See ``on_error``.
        failed: the samples that could not be loaded, and were replaced, at most 1000.
    """

    total: CacheStats
    epochs: "tuple[EpochStats, ...]"
    disk: CacheStats | None = None
    compared: int = 0
    left: bool = False
    ranks: int = 1
    cut: str = ""
    decoders: str = ""
    retried: int = 0
    failed: tuple[int, ...] = ()

    def flat(self, prefix: str = "cache") -> dict[str, float]:
        """Return all numbers in one dict, for W&B, MLflow, TensorBoard or Lightning's ``log_dict``.

        ``cache/hits`` is in total, ``cache/epoch_hits`` of the last epoch, and ``cache/disk_hits`` of the disk.
        """
        numbers = self.total.flat(prefix) | {f"{prefix}/compared": self.compared, f"{prefix}/left": int(self.left)}
        numbers |= {f"{prefix}/retried": self.retried, f"{prefix}/failed": len(self.failed)}
        if self.epochs:
            epoch = self.epochs[-1]
            numbers |= flat_numbers(f"{prefix}/epoch_", epoch, {"hit_rate": epoch.hit_rate})
        if self.disk is not None:
            numbers |= self.disk.flat(f"{prefix}/disk_")
        return numbers
