"""The figures of each epoch of a loader: how long the trainer waited, how long each part took, and the verdict."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from stocache.cache.base import SampleCache
from stocache.cache.shared import SharedCache
from stocache.observe.recording.histogram import EMPTY_DISTRIBUTION, Distribution
from stocache.observe.recording.record import COLLATE_NS, HAND_OVER_NS, LOAD_NS, SAMPLES_MADE, WAIT_NS, TimingRecord
from stocache.observe.verdict import CacheFacts, EpochFacts, Verdict, judge
from stocache.ring.ring import NO_BUFFER, Ring
from stocache.system import limits
from stocache.system.ranks import is_first_rank

logger = logging.getLogger("stocache")

_KEPT = 1000  # epochs
_EVERY = 8  # batches between two readings of the ring's occupancy
_WRITE_NS = 250_000_000  # between two writes of the record, for `stocache metrics`
_OVERHEAD = 32  # bytes of a cache for each sample of the dataset, at most


@dataclass(frozen=True)
class LoaderEpochStats:
    """The figures of one epoch of a loader, for this process and its workers. Add the counts of several ranks.

    Attributes:
        number: of the epoch since the loader was made, from 0.
        batches: batches delivered.
        samples: samples of the batches that were made.
        hits, misses: those of them that were in memory, and that were not; None if the dataset is not a `CachedDataset`.
        seconds: duration of the epoch.
        waited_s: the part of it in which the loop waited for batches.
        wait: how long it waited for each batch.
        wait_by_worker: the same for the batches of each worker.
        load: how long each sample took that was not in memory.
        collate: how long collating or gathering each batch took, without loading.
        hand_over: how long it took to pack each batch in a worker process, and to unpack it here.
        ring_occupancy: the mean share of the ring's buffers that held a batch; None if the workers are not processes.
        outside: batches that were sent without the ring, because all of its buffers were held.
        complete: whether it is over: all batches were delivered, or the loop has left it.
        verdict: why the trainer waited; None if it hardly waited, or the epoch is not over.
    """

    number: int
    batches: int = 0
    samples: int = 0
    hits: int | None = None
    misses: int | None = None
    seconds: float = 0.0
    waited_s: float = 0.0
    wait: Distribution = EMPTY_DISTRIBUTION
    wait_by_worker: tuple[Distribution, ...] = ()
    load: Distribution = EMPTY_DISTRIBUTION
    collate: Distribution = EMPTY_DISTRIBUTION
    hand_over: Distribution = EMPTY_DISTRIBUTION
    ring_occupancy: float | None = None
    outside: int = 0
    complete: bool = False
    verdict: Verdict | None = None

    @property
    def hit_rate(self) -> float | None:
        """Share of hits among all requests; None without a cache."""
        return None if self.hits is None or self.misses is None else self.hits / max(1, self.hits + self.misses)

    @property
    def waited_share(self) -> float:
        """Share of the time in which the loop waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0


@dataclass
class RunningEpoch:
    """A running epoch, and the parts of the loader that it uses. It holds no loader: the iterator may outlive the loader.

    Attributes:
        cache: of the dataset, if it has one; ``disk``: whether there is a disk cache as well.
        ring: of worker processes, from the first iteration on.
        threads: whether the workers are threads.
        expected: the number of batches; None if that is not known.
        has_left: returns whether the dataset has stopped using its cache.
    """

    number: int
    record: TimingRecord
    cache: SampleCache | None
    disk: bool
    workers: int
    persistent: bool
    ring: Ring | None = None
    threads: bool = False
    expected: int | None = None
    has_left: Callable[[], bool] = bool

    def __post_init__(self) -> None:
        self.began_ns = self.last_ns = time.perf_counter_ns()  # `last_ns`: when the last batch came
        self._write_at_ns = self.began_ns
        self._rows = {worker: self.record.row(1 + worker) for worker in range(self.workers)} | {None: self.record.main}
        self.counted, self.outside, self.fills = self.record.read(), self.count_outside(), self.count_fills()
        self.first_wait_s = self.occupancy = 0.0
        self.waited_ns = self.batches = self.looks = 0

    def count_outside(self) -> int:
        """Return how many batches have found the ring full so far."""
        return 0 if self.ring is None else self.ring.fallbacks[NO_BUFFER]

    def count_fills(self) -> int:
        """Return how many samples were cached so far; 0 if the cache is closed."""
        return 0 if self.cache is None or self.cache.closed else self.cache.counts()[2]

    def note_batch(self, now_ns: int, duration_ns: int, worker: int | None) -> None:
        """Note that a batch came, when, how long the loop waited for it, and which worker made it, if known."""
        self._rows[worker].add_later(WAIT_NS, duration_ns)
        if not self.batches:
            self.first_wait_s = duration_ns / 1e9
        self.waited_ns += duration_ns
        self.batches += 1
        self.last_ns = now_ns
        if self.ring is not None and self.batches % _EVERY == 1:
            self.occupancy += self.ring.occupancy
            self.looks += 1
        if now_ns > self._write_at_ns:
            self.record.write()
            self._write_at_ns = now_ns + _WRITE_NS

    def figures(self, until_ns: int = 0) -> tuple[LoaderEpochStats, EpochFacts]:
        """Return the figures of the epoch, until now or an earlier time, and the facts for the verdict."""
        counted = self.record.read().since(self.counted)
        load, samples = counted.distribution(LOAD_NS), counted.sum(SAMPLES_MADE)
        seconds = ((until_ns or time.perf_counter_ns()) - self.began_ns) / 1e9
        outside = self.count_outside() - self.outside
        stats = LoaderEpochStats(
            number=self.number,
            batches=self.batches,
            samples=samples,
            hits=None if self.cache is None else max(0, samples - load.count),
            misses=None if self.cache is None else load.count,
            seconds=seconds,
            waited_s=self.waited_ns / 1e9,
            wait=counted.distribution(WAIT_NS),
            wait_by_worker=tuple(counted.distribution(WAIT_NS, 1 + worker) for worker in range(counted.workers)),
            load=load,
            collate=counted.distribution(COLLATE_NS),
            hand_over=counted.distribution(HAND_OVER_NS),
            ring_occupancy=self.occupancy / self.looks if self.looks else None,
            outside=outside,
        )
        facts = EpochFacts(
            counted=counted,
            seconds=seconds,
            waited_s=self.waited_ns / 1e9,
            first_wait_s=self.first_wait_s,
            batches=self.batches,
            samples=samples,
            misses=load.count,
            workers=self.workers,
            threads=self.threads,
            starts_workers=self.workers > 0 and not self.threads and not (self.persistent and self.number),
            persistent=self.persistent,
            outside=outside,
            buffers=0 if self.ring is None else self.ring.depth,
            cores=len(os.sched_getaffinity(0)),
            cache=None if self.cache is None or self.cache.closed else partial(self._cache_facts, self.cache),
            left=self.has_left(),
        )
        return stats, facts

    def finished(self, until_ns: int = 0) -> LoaderEpochStats:
        """Return the figures of the epoch, which is over, with the verdict."""
        stats, facts = self.figures(until_ns)
        return replace(stats, complete=True, verdict=judge(facts))

    def _cache_facts(self, cache: SampleCache) -> CacheFacts:
        stats = cache.stats()
        return CacheFacts(
            fills=stats.fills - self.fills,
            filled=stats.filled,
            dataset_len=stats.dataset_len,
            sample_bytes=stats.slot_bytes if stats.filled or isinstance(cache, SharedCache) else 0,
            overhead_bytes=_OVERHEAD * stats.dataset_len,
            room_bytes=limits.shared_memory_room() + stats.reserved_bytes,
            disk=self.disk,
        )


class EpochLog:
    """Keeps the figures of the last ``_KEPT`` epochs of one loader."""

    def __init__(self) -> None:
        self._done: deque[LoaderEpochStats] = deque(maxlen=_KEPT)
        self._running: RunningEpoch | None = None
        self._count = 0

    def begin(
        self, record: TimingRecord, cache: SampleCache | None, disk: bool, workers: int, persistent: bool, ring: Ring | None
    ) -> RunningEpoch:
        """Begin an epoch, and end one that was left early."""
        if self._running is not None:
            self.end(self._running, self._running.last_ns)
        self._running = RunningEpoch(self._count, record, cache, disk, workers, persistent, ring)
        self._count += 1
        return self._running

    def end(self, epoch: RunningEpoch, at_ns: int = 0) -> None:
        """End an epoch, now or at an earlier time, unless it has ended or had no batches."""
        if epoch is not self._running:
            return
        self._running = None
        if not epoch.batches:
            return
        stats = epoch.finished(at_ns)
        self._done.append(stats)
        if stats.verdict is not None and is_first_rank():
            logger.info("epoch %d: %s", epoch.number + 1, stats.verdict)

    def epochs(self) -> tuple[LoaderEpochStats, ...]:
        """Return the figures of all epochs; of the running one, too, if it has batches."""
        running = self._running
        if running is None or not running.batches:
            return tuple(self._done)
        return (*self._done, running.finished() if running.batches == running.expected else running.figures()[0])
