"""The figures of a loader, and of each of its epochs: how long the trainer waited, how long each part took, the verdict."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from stocache.cache.base import SampleCache
from stocache.cache.shared import SharedCache
from stocache.datasets.cached import CachedDataset
from stocache.datasets.failing import Guard
from stocache.datasets.proxy import rest_of_cut
from stocache.observe.recording.epochs import EpochStats
from stocache.observe.recording.histogram import EMPTY_DISTRIBUTION, Distribution
from stocache.observe.recording.record import SAMPLES_MADE, WAIT_NS, TimingRecord
from stocache.observe.verdict import CacheFacts, EpochFacts, LoaderEpochStats, Verdict, judge
from stocache.shm.ring.ring import NO_BUFFER, Ring
from stocache.system import limits
from stocache.system.figures import flat_numbers
from stocache.system.platform import here
from stocache.system.ranks import is_first_rank

if TYPE_CHECKING:  # without ``device`` nothing of a GPU is imported
    from stocache.loader.device.gathering import DeviceStats

logger = logging.getLogger("stocache")

_KEPT = 1000  # epochs
_EVERY = 8  # batches between two readings of the ring's occupancy
_WRITE_NS = 250_000_000  # between two writes of the record, for `stocache metrics`


@dataclass(frozen=True)
class LoaderStats:
    """Counts and times of a `DataLoader`, over all its iterators.

    Attributes:
        batches: number of batches delivered.
        waited_s: seconds for which the loop waited for batches.
        ring: batches that arrived through the ring.
        fallbacks: number of batches that workers sent without the ring, as torch does, by reason.
        ring_bytes: memory that the ring takes now.
        hit_rate: share of samples that were in memory, of all that this process and its workers requested; None if the dataset
            is not a `CachedDataset`, or is closed.
        wait: how long the loop waited for each batch.
        load: how long it took to load each sample that was not in memory.
        collate: how long collating or gathering each batch took, without loading.
        hand_over: how long it took to pack each batch in a worker process, and to unpack it here.
        ring_occupancy: the share of the ring's buffers that hold a batch now; None if the workers are not processes.
        device: where the samples came from that a GPU has gathered; None without ``device``.
        epochs: the figures of each epoch, in order, of the last 1000; the last one may still be running.
        verdict: why the trainer waited in the last epoch that has ended; None if it hardly waited.
        retried: how often samples were loaded again after an error. See ``on_error``.
        failed: the samples that could not be loaded, and were replaced, at most 1000.
    """

    batches: int
    waited_s: float
    ring: int
    fallbacks: dict[str, int]
    ring_bytes: int
    hit_rate: float | None
    wait: Distribution = EMPTY_DISTRIBUTION
    load: Distribution = EMPTY_DISTRIBUTION
    collate: Distribution = EMPTY_DISTRIBUTION
    hand_over: Distribution = EMPTY_DISTRIBUTION
    ring_occupancy: float | None = None
    device: "DeviceStats | None" = None
    epochs: tuple[LoaderEpochStats, ...] = ()
    verdict: Verdict | None = None
    retried: int = 0
    failed: tuple[int, ...] = ()

    def flat(self, prefix: str = "loader") -> dict[str, float]:
        """Return all numbers in one dict, for W&B, MLflow, TensorBoard or Lightning's ``log_dict``.

        ``loader/wait_p95_s`` is over all epochs, ``loader/epoch_wait_p95_s`` of the last epoch, and
        ``loader/epoch_worker_0_wait_p95_s`` of worker 0 in it. Counts of batches by reason add up to ``loader/fallbacks``.
        """
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        own |= {"fallbacks": sum(self.fallbacks.values()), "verdict": None, "failed": len(self.failed)}
        if not self.epochs:
            return flat_numbers(prefix, own)
        epoch = self.epochs[-1]
        last = {item.name: getattr(epoch, item.name) for item in fields(epoch) if item.name != "verdict"}
        last |= {"hit_rate": epoch.hit_rate, "waited_share": epoch.waited_share}
        last |= {f"worker_{number}_wait": wait for number, wait in enumerate(epoch.wait_by_worker)}
        return flat_numbers(prefix, own, {"epoch": last})


@dataclass
class RunningEpoch:
    """A running epoch, and the parts of the loader that it uses. It holds no loader: the iterator may outlive the loader.

    Attributes:
        dataset: the `CachedDataset`, if there is one.
        ring: of worker processes, from the first iteration on.
        threads: whether the workers are threads.
        expected: the number of batches; None if that is not known.
    """

    number: int
    record: TimingRecord
    dataset: CachedDataset | None
    workers: int
    persistent: bool
    ring: Ring | None = None
    threads: bool = False
    expected: int | None = None

    def __post_init__(self) -> None:
        # `last_ns`: when the last batch came, or the iterator was ready
        self.began_ns = self.last_ns = time.perf_counter_ns()
        self._began_cpu_s, self.cpu_s = time.process_time(), 0.0
        self._write_at_ns = self.began_ns
        self._rows = {worker: self.record.row(1 + worker) for worker in range(self.workers)} | {None: self.record.main}
        self._counted, self._outside, self._fills = self.record.read(), self._count_outside(), self._count_fills()
        self.first_wait_s = self._occupancy = 0.0
        self.waited_ns = self.steps_ns = self.batches = self._looks = 0

    @property
    def _cache(self) -> SampleCache | None:
        """The cache, while it is open."""
        return None if self.dataset is None or self.dataset.cache.closed else self.dataset.cache

    def _count_outside(self) -> int:
        return 0 if self.ring is None else self.ring.fallbacks[NO_BUFFER]

    def _count_fills(self) -> int:
        return 0 if self._cache is None else self._cache.counts()[2]

    def note_request(self, now_ns: int) -> None:
        """Note that the loop asks for a batch: since the last one came, the program made its step."""
        if self.batches:
            self.steps_ns += now_ns - self.last_ns
        else:  # the program did something else before it began to iterate
            self.began_ns += now_ns - self.last_ns
        self.last_ns = now_ns

    def note_batch(self, now_ns: int, duration_ns: int, worker: int | None) -> None:
        """Note that a batch came, when, how long the loop waited for it, and which worker made it, if known."""
        self._rows.get(worker, self.record.main).add_later(WAIT_NS, duration_ns)  # there were more workers when they began
        self.note_request(now_ns - duration_ns)
        if not self.batches:
            self.first_wait_s = duration_ns / 1e9
        self.waited_ns += duration_ns
        self.batches += 1
        self.last_ns = now_ns
        if self.ring is not None and self.batches % _EVERY == 1:
            self._occupancy += self.ring.occupancy
            self._looks += 1
        if now_ns > self._write_at_ns:
            self.record.write()
            self._write_at_ns, self.cpu_s = now_ns + _WRITE_NS, time.process_time() - self._began_cpu_s

    def figures(self, until_ns: int = 0, judged: bool = False) -> LoaderEpochStats:
        """Return the figures of the epoch, until a time or its last batch. ``judged``: it is over, and has a verdict."""
        counted = self.record.read().since(self._counted)
        times, samples = counted.distributions(), counted.sum(SAMPLES_MADE)
        misses = times["load"].count
        stats = LoaderEpochStats(
            number=self.number,
            batches=self.batches,
            samples=samples,
            hits=None if self.dataset is None else max(0, samples - misses),
            misses=None if self.dataset is None else misses,
            seconds=((until_ns or self.last_ns) - self.began_ns) / 1e9,
            waited_s=self.waited_ns / 1e9,
            steps_s=self.steps_ns / 1e9,
            wait_by_worker=tuple(counted.distribution(WAIT_NS, 1 + worker) for worker in range(counted.workers)),
            ring_occupancy=self._occupancy / self._looks if self._looks else None,
            outside=self._count_outside() - self._outside,
            **times,
        )
        if not judged:
            return stats
        facts = EpochFacts(
            counted=counted,
            first_wait_s=self.first_wait_s,
            workers=self.workers,
            threads=self.threads,
            starts_workers=self.workers > 0 and not self.threads and not (self.persistent and self.number),
            persistent=self.persistent,
            buffers=0 if self.ring is None else self.ring.depth,
            cores=here.usable_cpus(),
            cache=None if self._cache is None else partial(self._cache_facts, self._cache),
            left=self.dataset is not None and self.dataset.is_left,
            rest="" if self.dataset is None else rest_of_cut(self.dataset),
            cpu_s=self.cpu_s,
        )
        return replace(stats, complete=True, verdict=judge(stats, facts))

    def requests(self, stats: LoaderEpochStats) -> EpochStats | None:
        """Return the requests of the cache in the epoch; None without one."""
        if stats.hits is None or stats.misses is None:
            return None
        return EpochStats(stats.hits, stats.misses, max(0, self._count_fills() - self._fills), stats.seconds)

    def _cache_facts(self, cache: SampleCache) -> CacheFacts:
        stats = cache.stats()
        return CacheFacts(
            fills=stats.fills - self._fills,
            filled=stats.filled,
            dataset_len=stats.dataset_len,
            sample_bytes=stats.slot_bytes if stats.filled or isinstance(cache, SharedCache) else 0,
            room_bytes=limits.shared_memory_room() + stats.reserved_bytes,
            disk=self.dataset is not None and self.dataset.disk_cache is not None,
        )


class EpochLog:
    """Keeps the figures of the last ``_KEPT`` epochs of one loader."""

    def __init__(self) -> None:
        self._done: deque[LoaderEpochStats] = deque(maxlen=_KEPT)
        self._running: RunningEpoch | None = None
        self._count = 0
        self.guard: Guard | None = None
        self.on_epoch: Callable[[LoaderEpochStats], None] | None = None
        """Called with the figures of each epoch that has ended."""

    def begin(
        self, record: TimingRecord, dataset: CachedDataset | None, workers: int, persistent: bool, ring: Ring | None
    ) -> RunningEpoch:
        """Begin an epoch, and end one that was left early."""
        self.leave()
        self._running = RunningEpoch(self._count, record, dataset, workers, persistent, ring)
        self._count += 1
        return self._running

    def leave(self) -> None:
        """End an epoch that was left early, at the time of its last batch."""
        if self._running is not None:
            self.end(self._running, self._running.last_ns)

    def end(self, epoch: RunningEpoch, at_ns: int = 0) -> None:
        """End an epoch, now or at an earlier time, unless it has ended or had no batches. Log it in one line."""
        if epoch is not self._running:
            return
        self._running = None
        if self.guard is not None:
            self.guard.warn()
        if not epoch.batches:
            return
        stats = epoch.figures(at_ns or time.perf_counter_ns(), judged=True)
        self._done.append(stats)
        if self.on_epoch is not None:
            self.on_epoch(stats)
        said = [str(part) for part in (epoch.requests(stats), stats.verdict) if part is not None]
        if said and is_first_rank():
            logger.info("epoch %d: %s", epoch.number + 1, "; ".join(said))

    def epochs(self) -> tuple[LoaderEpochStats, ...]:
        """Return the figures of all epochs; of the running one, too, if it has batches."""
        running = self._running
        if running is None or not running.batches:
            return tuple(self._done)
        return (*self._done, running.figures(judged=running.batches == running.expected))
