"""Count what a cached dataset did in each epoch.

NOTE [ Epochs ]
    Samples are requested in worker processes, which do not know epochs. The counters in shared memory know how many samples all
    processes have requested together, and one epoch is as many requests as the dataset has samples. The main process reads the
    counters whenever it touches the dataset. Samplers ask for its length when an epoch begins, and by then the epoch before is
    complete. Up to 5 % of the requests may be missing, because a last batch was dropped, if two readings in a row are equal:
    RandomSampler asks twice. So `stats` has an entry for each epoch, and each epoch is logged, without a call in the training
    loop. `set_epoch` begins one explicitly.
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
    """The counts of one epoch: of as many requests as the dataset has samples, by all processes that share the cache.

    Attributes:
        hits: samples served from the cache.
        misses: samples read from the source.
        fills: samples newly cached.
        seconds: duration of the epoch.
    """

    hits: int
    misses: int
    fills: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Share of hits among all requests; 0 before the first request."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True)
class DatasetStats:
    """The counts of a `CachedDataset`.

    Attributes:
        total: the counts since the cache was made, and its content.
        epochs: the counts of each epoch, in order; the last one may still be running. Only hits in memory count as hits.
        disk: the counts of the disk behind the memory, if there is one. Its misses are the reads of the dataset.
    """

    total: CacheStats
    epochs: tuple[EpochStats, ...]
    disk: CacheStats | None = None


class EpochCounter:
    """Finds the ends of epochs, in the process that made it; see NOTE [ Epochs ]."""

    def __init__(self, dataset_len: int, cache: SampleCache) -> None:
        self._dataset_len, self._pid = dataset_len, os.getpid()
        self._complete: list[EpochStats] = []
        self.begin(cache)

    def begin(self, cache: SampleCache) -> None:
        """Begin an epoch. Requests since the end of the last one are not counted."""
        self._began_at, self._began_with = time.monotonic(), cache.counts()
        self._last_requests = -1  # at the last update

    def update(self, cache: SampleCache, begins: bool = False) -> None:
        """End the running epoch if it is complete, or if another one ``begins``."""
        if os.getpid() != self._pid:  # a worker
            return
        epoch = self._running(cache)
        requests = epoch.hits + epoch.misses
        almost = requests >= 0.95 * self._dataset_len and requests == self._last_requests
        self._last_requests = requests
        if requests and (begins or almost or requests >= self._dataset_len):
            self._complete.append(epoch)
            self.begin(cache)
            if is_first_rank():
                logger.info(
                    "epoch %d: %d samples requested, %.1f %% from the cache, %d read from the dataset, %d newly cached, %.1f s",
                    len(self._complete), requests, 100 * epoch.hit_rate, epoch.misses, epoch.fills, epoch.seconds,
                )  # fmt: skip

    def stats(self, cache: SampleCache) -> tuple[EpochStats, ...]:
        """Return the counts of all epochs; of the running one, too, if it has requests."""
        running = self._running(cache)
        return (*self._complete, running) if running.hits + running.misses else tuple(self._complete)

    def _running(self, cache: SampleCache) -> EpochStats:
        hits, misses, fills = (now - then for now, then in zip(cache.counts(), self._began_with, strict=True))
        return EpochStats(hits, misses, fills, time.monotonic() - self._began_at)
