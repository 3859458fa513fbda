"""Count the requests of a cached dataset in each epoch.

NOTE [ Epochs ]
    Samples are requested in worker processes, which do not know epochs. The counters in shared memory know how many samples all
    processes have requested together. The main process reads them when an epoch begins.

    A `stocache.DataLoader` owns the epochs of its dataset: it says when its loops begin (`EpochCounter.loop_begins`), and logs
    each one. Several loaders may read one dataset, say for training and for validation. So an epoch ends when a loader begins
    that has begun in it before, or when all loaders that have begun in it are gone.

    Other loaders do not say it. With them, an epoch ends when `set_epoch` of the dataset begins the next one. Without
    `set_epoch`, all requests are one epoch.
"""

import logging
import os
import time
import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

from stocache.system.platform import here
from stocache.system.ranks import is_first_rank

logger = logging.getLogger("stocache")


RequestCounts: TypeAlias = tuple[int, int, int]
"""The hits, misses and fills of a cache, of all processes since it was made."""


@dataclass(frozen=True)
class EpochStats:
    """The counts of one epoch. The counts of a dataset are of all processes that share the cache.

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

    def __str__(self) -> str:
        return (
            f"{self.hits + self.misses} samples requested, {100 * self.hit_rate:.1f} % from the cache, {self.misses} read from "
            f"the dataset, {self.fills} newly cached, {self.seconds:.1f} s"
        )


class EpochCounter:
    """Divides the requests of a cache into epochs, in the process that made it; see NOTE [ Epochs ]."""

    def __init__(self, counts: RequestCounts) -> None:
        self._pid = os.getpid()
        self._complete: list[EpochStats] = []
        self._epoch: int | None = None  # the last one that was set
        self._requests = {"epoch": -1, "loop": -1}  # of the cache in all, when the last epoch was set, and the last loop began
        self._warned = not here.SHARES_MEMORY  # if workers count for themselves
        self.begin(counts)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loops": []}  # another process does not count epochs

    def begin(self, counts: RequestCounts) -> None:
        """Begin an epoch. Requests since the end of the last one are not counted."""
        self._began_at, self._began_with = time.monotonic(), counts
        self._loops: list[weakref.ref[Any]] = []  # the loaders that have begun in the epoch

    def loop_begins(self, counts: RequestCounts, loader: object, expected: bool) -> None:
        """Note that a loop over a loader begins. ``expected``: whether an earlier one must have asked the cache for samples."""
        living = [each for loop in self._loops if (each := loop()) is not None]
        again = any(each is loader for each in living)
        self._note_requests(counts, "loop", "a loop over a loader" if again and expected else None)
        if again or (self._loops and not living):
            self._begin_next(counts)
        self._loops.append(weakref.ref(loader))

    def epoch_is_set(self, counts: RequestCounts, epoch: int, expected: bool) -> None:
        """Note that an epoch is set. ``expected``: whether the one before it must have asked the cache for samples."""
        if os.getpid() != self._pid:  # a worker
            return
        if expected:
            follows = self._epoch is not None and epoch == self._epoch + 1
            self._note_requests(counts, "epoch", f"epoch {self._epoch}" if follows else None)
            self._epoch = epoch
        self._begin_next(counts)

    def _note_requests(self, counts: RequestCounts, kind: str, ended: str | None) -> None:
        """Note that an epoch is set or a loop begins. Warn once if an epoch has ``ended`` in which no sample was requested."""
        requests = sum(counts[:2])
        if ended is not None and requests == self._requests[kind] and not self._warned and is_first_rank():
            self._warned = True
            logger.warning(
                "%s has ended, and no sample was requested from the cache: they come from elsewhere, perhaps from the dataset "
                "within. Give the CachedDataset to the loader.", ended,
            )  # fmt: skip
        self._requests[kind] = requests

    def _begin_next(self, counts: RequestCounts) -> None:
        """Begin the next epoch. The one that ends counts if samples were requested in it."""
        ended = self._running(counts)
        if ended.hits + ended.misses:
            self._complete.append(ended)
            if is_first_rank() and not self._loops:  # else the loader logs it
                logger.info("epoch %d: %s", len(self._complete), ended)
        self.begin(counts)

    def stats(self, counts: RequestCounts) -> tuple[EpochStats, ...]:
        """Return the counts of all epochs; of the running one, too, if it has requests."""
        running = self._running(counts)
        return (*self._complete, running) if running.hits + running.misses else tuple(self._complete)

    def _running(self, counts: RequestCounts) -> EpochStats:
        hits, misses, fills = (now - then for now, then in zip(counts, self._began_with, strict=True))
        return EpochStats(hits, misses, fills, time.monotonic() - self._began_at)
