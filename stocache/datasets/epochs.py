"""Statistics of a cached dataset, by epochs.

NOTE [ Epochs ]
    Samples are asked for in worker processes, which know nothing of epochs. The counters in shared memory know how many were
    asked for by all processes together, and an epoch is as many as the dataset has samples. They are looked at in the main
    process whenever it touches the dataset: samplers ask for its length when an epoch begins, and the one before is complete.
    Up to 5 % may be missing (a last batch that is dropped) if two looks in a row find the same, as RandomSampler takes them. So
    `stats` has an entry for each epoch, and it is logged, without a call in the training loop; `set_epoch` says it outright.
"""

import logging
import os
import time
from dataclasses import dataclass

from stocache.cache.base import SampleCache
from stocache.cache.stats import CacheStats
from stocache.system.ranks import is_first_rank

logger = logging.getLogger("stocache")


@dataclass(frozen=True)
class EpochStats:
    """What happened in one epoch: in as many requests as the dataset has samples, by all processes that share the cache.

    Attributes:
        hits: samples served from the cache.
        misses: samples read from the source.
        fills: samples newly cached.
        seconds: how long it took.
    """

    hits: int
    misses: int
    fills: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Hits among all requests; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True)
class DatasetStats:
    """What a `CachedDataset` has done.

    Attributes:
        total: since the cache was made, and what it holds.
        epochs: one after the other; the last one may still be running.
    """

    total: CacheStats
    epochs: tuple[EpochStats, ...]


class Epochs:
    """Where one epoch ends and the next begins, for the process that makes it; see NOTE [ Epochs ]."""

    def __init__(self, dataset_len: int, cache: SampleCache) -> None:
        self._dataset_len, self._pid = dataset_len, os.getpid()
        self._over: list[EpochStats] = []
        self.begin(cache)

    def begin(self, cache: SampleCache) -> None:
        """Begin an epoch; what came since the last one belongs to none."""
        self._began_at, self._began_with = time.monotonic(), cache.counts()
        self._seen = -1  # requests at the last look

    def look(self, cache: SampleCache, begins: bool = False) -> None:
        """Close the running epoch if it is complete, or another one ``begins``."""
        if os.getpid() != self._pid:  # a worker
            return
        epoch = self._running(cache)
        asked = epoch.hits + epoch.misses
        complete = asked >= self._dataset_len or (asked >= 0.95 * self._dataset_len and asked == self._seen)
        self._seen = asked
        if asked and (complete or begins):
            self._over.append(epoch)
            self.begin(cache)
            if is_first_rank():
                logger.info(
                    "epoch %d: %d samples asked for, %.1f %% from the cache, %d read from the dataset, %d newly cached, %.1f s",
                    len(self._over), asked, 100 * epoch.hit_rate, epoch.misses, epoch.fills, epoch.seconds,
                )  # fmt: skip

    def stats(self, cache: SampleCache) -> tuple[EpochStats, ...]:
        """Return all epochs, also the running one if it has begun."""
        running = self._running(cache)
        return (*self._over, running) if running.hits + running.misses else tuple(self._over)

    def _running(self, cache: SampleCache) -> EpochStats:
        hits, misses, fills = (now - then for now, then in zip(cache.counts(), self._began_with, strict=True))
        return EpochStats(hits, misses, fills, time.monotonic() - self._began_at)
