"""Count the requests of a cached dataset in each epoch.

NOTE [ Epochs ]
    Samples are requested in worker processes, which do not know epochs. The counters in shared memory know how many samples all
    processes have requested together. The main process reads them when an epoch begins.

    A `stocache.DataLoader` owns the epochs of its dataset: it says when its loops begin (`EpochCounter.loop_begins`), and logs
    each one. Several loaders may read one dataset, say for training and for validation. So an epoch ends when a loader begins
    that has begun in it before, or when all loaders that have begun in it are gone.

    Other loaders do not say it. There `set_epoch` begins an epoch; or an epoch is as many requests as the dataset has samples.
    The main process looks whenever it touches the dataset: samplers ask for its length when an epoch begins, and a process that
    starts workers forks them, or pickles the dataset for them. Up to 5 % of the requests may be missing, because a last batch
    was dropped, if two readings in a row are equal (RandomSampler asks twice) or workers start.
"""

import contextlib
import logging
import os
import time
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from stocache.errors import ClosedError
from stocache.system.platform import here
from stocache.system.ranks import is_first_rank

logger = logging.getLogger("stocache")


class HasCounts(Protocol):
    """A cache whose requests are counted."""

    def counts(self) -> tuple[int, int, int]:
        """Return the hits, misses and fills of all processes."""
        ...


@dataclass(frozen=True)
class EpochStats:
    """The counts of one epoch. Those of a dataset are of all processes that share the cache.

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
    """Finds the ends of epochs, in the process that made it; see NOTE [ Epochs ]."""

    def __init__(self, dataset_len: int, cache: HasCounts) -> None:
        self._dataset_len, self._pid = dataset_len, os.getpid()
        self._complete: list[EpochStats] = []
        self._cache: weakref.ref[HasCounts] | None = weakref.ref(cache)
        self._epoch: int | None = None  # the last one that was set
        self._requests = {"epoch": -1, "loop": -1}  # of the cache in all, when the last epoch was set, and the last loop began
        self._warned = not here.SHARES_MEMORY  # where workers count for themselves
        self.begin(cache)
        _counters.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": None, "_loops": []}  # another process does not count epochs

    def begin(self, cache: HasCounts) -> None:
        """Begin an epoch. Requests since the end of the last one are not counted."""
        self._began_at, self._began_with = time.monotonic(), cache.counts()
        self._last_requests = -1  # at the last update
        self._loops: list[weakref.ref[Any]] = []  # the loaders that have begun in the epoch

    @property
    def _living(self) -> list[Any]:
        return [loader for loop in self._loops if (loader := loop()) is not None]

    def loop_begins(self, cache: HasCounts, loader: object, expected: bool) -> None:
        """Note that a loop over a loader begins. ``expected``: whether an earlier one must have asked the cache for samples."""
        again, gone = any(each is loader for each in self._living), bool(self._loops) and not self._living
        self._note_requests(cache, "loop", "a loop over a loader" if again and expected else None)
        self.update(cache, begins=again or gone, workers_start=True)
        if not any(each is loader for each in self._living):
            self._loops.append(weakref.ref(loader))

    def _note_requests(self, cache: HasCounts, kind: str, ended: str | None) -> None:
        """Note that an epoch is set or a loop begins. Warn once if another has ``ended`` in which no sample was requested."""
        requests = sum(cache.counts()[:2])
        if ended is not None and requests == self._requests[kind] and not self._warned and is_first_rank():
            self._warned = True
            logger.warning(
                "%s has ended, and no sample was requested from the cache: they come from elsewhere, perhaps from the dataset "
                "within. Give the CachedDataset to the loader.", ended,
            )  # fmt: skip
        self._requests[kind] = requests

    def update(self, cache: HasCounts, begins: bool = False, workers_start: bool = False, epoch: int | None = None) -> None:
        """End the running epoch if it is complete, or if another one ``begins``: number ``epoch``, where it is known."""
        if os.getpid() != self._pid:  # a worker
            return
        if epoch is not None:
            follows = self._epoch is not None and epoch == self._epoch + 1
            self._note_requests(cache, "epoch", f"epoch {self._epoch}" if follows else None)
            self._epoch = epoch
        running = self._running(cache)
        requests = running.hits + running.misses
        almost = requests >= 0.95 * self._dataset_len and (workers_start or requests == self._last_requests)
        self._last_requests = requests
        complete = not self._living and (almost or requests >= self._dataset_len)
        if requests and (begins or complete):
            self._complete.append(running)
            if is_first_rank() and not self._loops:  # else the loader logs it
                logger.info("epoch %d: %s", len(self._complete), running)
            self.begin(cache)
        elif begins:
            self._loops = []

    def workers_start(self) -> None:
        """Note that this process starts workers, or forks for another reason."""
        cache = None if self._cache is None else self._cache()
        if cache is not None:
            with contextlib.suppress(ClosedError):
                self.update(cache, workers_start=True)

    def stats(self, cache: HasCounts) -> tuple[EpochStats, ...]:
        """Return the counts of all epochs; of the running one, too, if it has requests."""
        running = self._running(cache)
        return (*self._complete, running) if running.hits + running.misses else tuple(self._complete)

    def _running(self, cache: HasCounts) -> EpochStats:
        hits, misses, fills = (now - then for now, then in zip(cache.counts(), self._began_with, strict=True))
        return EpochStats(hits, misses, fills, time.monotonic() - self._began_at)


_counters: "weakref.WeakSet[EpochCounter]" = weakref.WeakSet()


def _before_fork() -> None:
    for counter in list(_counters):
        counter.workers_start()


here.at_fork(before=_before_fork)
