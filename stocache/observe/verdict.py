"""Say in one line why the trainer waited, and which change would remove the wait.

NOTE [ The verdict ]
    The trainer waits if the workers need longer for a batch than the trainer for its step. The time of the workers in an epoch
    is recorded in parts: loading samples that were not cached, making the rest (reading cached ones, transforms), collating,
    handing over. The largest part is the *limit*, unless the cause lies elsewhere: workers that are starting, a ring whose
    buffers are all held, a GIL that the threads wait for. The effect of a change follows from the parts: W workers that need c
    seconds each for a batch deliver one every c / W seconds. If that is longer than the step, the trainer waits for the
    difference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stocache.observe.recording.gil import LOOK_S
from stocache.observe.recording.histogram import EMPTY_DISTRIBUTION, Distribution
from stocache.observe.recording.record import (
    COLLATE_NS,
    CPU_NS,
    HAND_OVER_NS,
    HELD,
    LOAD_NS,
    LOOKS,
    MAKE_NS,
    QUEUED_NS,
    SEEN_BUSY_NS,
    Counted,
)
from stocache.system.figures import format_seconds, plural, round_digits
from stocache.system.limits import GIB, format_size
from stocache.system.platform import here

Limit = Literal[
    "source", "cold cache", "transform", "collate", "workers", "ring", "GIL", "hand-over", "start", "stalls", "unknown"
]

_SILENT = 0.05  # share of its time; no verdict if the trainer waits less
_SHORTEST_S = 0.01  # of waiting; no verdict if it is less
_OUTSIDE = 0.2  # share of batches sent without the ring, from which the ring is the limit
_HELD = 0.5  # share of looks that find the GIL held, from which the GIL is the limit
_LOOKS = 3  # at the GIL that are enough
_ONE, _ALL = (0.7, 1.5), 0.9  # CPUs that threads waiting for the GIL use in all; share of its time a thread wants a CPU
_FASTER = 1.2  # times as fast, from which a change is mentioned
_SLOW = 5.0  # times the median, from which a sample is slow
_IDLE = 0.6  # share of their time; workers that are busy for less are idle
_OVERHEAD = 32  # bytes of a cache for each sample of the dataset, at most

_LEFT = (
    "the dataset makes each sample, because samples depend on more than their index (see the warning); move random steps to "
    "transform=, or set on_change='keep'"
)


@dataclass(frozen=True)
class Verdict:
    """The reason why the trainer waited.

    Attributes:
        limit: the part that was the limit; "unknown" if the parts were not timed.
        share: the share of the time for which the trainer waited.
        text: the reason in one line, with the change that would remove it.
    """

    limit: Limit
    share: float
    text: str

    def __str__(self) -> str:
        return self.text


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


@dataclass(frozen=True)
class CacheFacts:
    """The state of the cache after an epoch.

    Attributes:
        fills: samples that were cached in the epoch, by all processes.
        filled: samples that are cached now.
        dataset_len: samples of the dataset.
        sample_bytes: of one sample in the cache; 0 if none is cached.
        room_bytes: the largest cache that the machine can give, this one included.
        disk: whether there is a disk cache as well.
    """

    fills: int
    filled: int
    dataset_len: int
    sample_bytes: int
    room_bytes: int
    disk: bool = False

    @property
    def needed_bytes(self) -> int:
        """The bytes of a cache that holds all samples."""
        return self.dataset_len * (self.sample_bytes + _OVERHEAD)


@dataclass(frozen=True)
class EpochFacts:
    """The measurements of an epoch of a loader, besides its figures.

    Attributes:
        counted: the counts of the record in it.
        first_wait_s: how long the trainer waited for the first batch.
        workers: number of workers.
        threads: whether they are threads.
        starts_workers: whether processes were started for this epoch.
        persistent: whether they serve the next epochs, too.
        buffers: of the ring, for each worker.
        cores: CPUs that this process may use.
        cache: returns the state of the cache; None if the dataset has no open cache.
        left: whether the dataset has stopped using its cache.
    """

    counted: Counted
    first_wait_s: float
    workers: int
    threads: bool
    starts_workers: bool
    persistent: bool
    buffers: int
    cores: int
    cache: Callable[[], CacheFacts] | None
    left: bool = False


def judge(stats: LoaderEpochStats, facts: EpochFacts) -> Verdict | None:
    """Return why the trainer waited; None if it hardly waited. See NOTE [ The verdict ]."""
    share = stats.waited_share
    if share < _SILENT or stats.waited_s < _SHORTEST_S or not stats.batches:
        return None
    waited = f"the trainer waited {share:.0%} of the time ({format_seconds(stats.waited_s)} of {format_seconds(stats.seconds)})"
    if facts.left:
        return Verdict("source", share, f"{waited}; {_LEFT}")
    parts = _Parts(stats, facts)
    if not parts.work_s:
        return Verdict("unknown", share, waited)
    limit, text = parts.find()
    return Verdict(limit, share, f"{waited}; {text}")


class _Parts:
    """The seconds of an epoch, by part."""

    def __init__(self, stats: LoaderEpochStats, facts: EpochFacts) -> None:
        counted = facts.counted
        self.stats, self.facts, self.workers = stats, facts, max(1, facts.workers)
        words = LOAD_NS, MAKE_NS, COLLATE_NS, HAND_OVER_NS
        self.load_s, self.make_s, self.collate_s, self.hand_over_s = (counted.sum(word) / 1e9 for word in words)
        self.work_s = self.load_s + self.make_s + self.collate_s + self.hand_over_s
        self.batch_s = self.work_s / stats.batches
        self.step_s = max(0.0, stats.seconds - stats.waited_s) / stats.batches
        seen = counted.of_workers(SEEN_BUSY_NS)
        # the share of its time for which a worker is on a CPU, and for which it is on one or waits for one
        self.on_cpu_share = counted.of_workers(CPU_NS) / seen if seen > 0 else 1.0
        self.wants_cpu_share = min(1.0, self.on_cpu_share + counted.of_workers(QUEUED_NS) / seen) if seen > 0 else 1.0
        # the workers that keep all CPUs busy; and those that would keep up with the trainer, as far as there are CPUs for them
        most = max(1, int(facts.cores / max(0.05, self.wants_cpu_share)))
        self.needed = min(most, math.ceil(1.05 * self.batch_s / self.step_s)) if self.step_s else most

    def find(self) -> tuple[Limit, str]:
        """Return the limit, and the text about it."""
        stats, facts = self.stats, self.facts
        parts = {"load": self.load_s, "make": self.make_s, "collate": self.collate_s, "hand over": self.hand_over_s}
        largest = max(parts, key=lambda name: parts[name])
        starting_s = facts.first_wait_s - self.batch_s
        if facts.starts_workers and starting_s > 0.5 * stats.waited_s:
            remedy = "the next epochs use the same workers" if facts.persistent else "persistent_workers=True would do it once"
            return "start", f"starting the workers took {format_seconds(starting_s)}; {remedy}"
        if stats.outside >= _OUTSIDE * stats.batches and self.load_s + self.make_s < 0.5 * self.work_s:
            full = f"found the ring full, with {facts.buffers} buffers for each worker, and were copied"
            remedy = "hold fewer batches at a time, or raise prefetch_factor, which adds buffers"
            return "ring", f"{stats.outside} of {stats.batches} batches {full}; {remedy}"
        if facts.threads and self._shares_gil():
            return self._gil()
        if largest == "load":
            return self._load()
        more = self.needed > facts.workers
        if largest == "make" and facts.cache is None:
            if more and self._share_with(self.work_s, self.needed) < _SILENT:
                return self._more_workers()
            each = f"making {self._each(stats.samples, 'uncached sample', self.make_s)}"
            return "source", f"{each} is the limit; CachedDataset makes those once that draw no random numbers"
        if more and facts.workers < facts.cores and largest != "collate":
            return self._more_workers()
        if largest == "make":
            each = format_seconds(self.make_s / max(1, stats.samples))
            remedy = self._try_workers() if more else "move deterministic steps before the cache, or make them cheaper"
            return "transform", f"transforming {plural(stats.samples, 'cached sample')}, {each} each, is the limit; {remedy}"
        if largest == "collate":
            remedy = self._try_workers() if more else "only cheaper batches would remove it"
            return "collate", f"collating {self._each(stats.batches, 'batch', self.collate_s)} is the limit; {remedy}"
        each = self._each(stats.batches, "batch", self.hand_over_s)
        return "hand-over", f"handing over {each} is the limit; larger batches, or worker_method='thread', cost less"

    def _share_with(self, work_s: float, workers: int) -> float:
        """Return the predicted share of waiting, with ``work_s`` of work in an epoch."""
        wait_s = steady_wait_s(work_s / self.stats.batches, workers, self.step_s)
        return wait_s / max(1e-9, wait_s + self.step_s)

    def _brings(self, work_s: float, workers: int) -> str:
        """Return the expected effect of this amount of work and number of workers."""
        stats, share = self.stats, self._share_with(work_s, workers)
        if share < _SILENT:
            return "would remove it"
        if share < 0.9 * stats.waited_share:
            return f"would cut it to {share:.0%}"
        each_s = steady_wait_s(work_s / stats.batches, workers, self.step_s) + self.step_s
        faster = stats.seconds / max(1e-9, stats.batches * each_s)
        return f"would make the epoch {faster:.2g} times as fast" if faster >= _FASTER else "helps little"

    def _try_workers(self) -> str:
        return f"num_workers={self.needed} {self._brings(self.work_s, self.needed)}"

    def _shares_gil(self) -> bool:
        """Whether worker threads wait for the GIL: most looks find it held; or all threads together use about one CPU."""
        stats, looks, held = self.stats, self.facts.counted.sum(LOOKS), self.facts.counted.sum(HELD)
        is_held = held >= _HELD * looks
        if self.workers < 2:
            return False
        if looks >= _LOOKS:
            return is_held
        # Few looks: the loop hardly waited, or hardly got the GIL. Else it would look about once a batch
        hardly_got = stats.waited_s > 2 * LOOK_S * stats.batches and (is_held or stats.batches >= 2 * _LOOKS)
        have_one = _ONE[0] <= self.on_cpu_share * self.workers <= _ONE[1] and self.wants_cpu_share < _ALL
        return hardly_got and have_one

    def _stalls(self) -> bool:
        """Whether workers were idle although the trainer waited: a few slow samples hold up batches, which come in order."""
        load, idle = self.stats.load, self.work_s < _IDLE * self.workers * self.stats.seconds
        return self.facts.workers > 1 and idle and load.count > 0 and load.p99_s > _SLOW * load.p50_s

    def _each(self, count: int, noun: str, seconds: float) -> str:
        return f"{plural(count, noun)} of {format_seconds(seconds / max(1, count))} each"

    def _load(self) -> tuple[Limit, str]:
        stats, load = self.stats, self.stats.load
        each = f"loading {self._each(load.count, 'uncached sample', self.load_s)} is the limit"
        if self.facts.cache is None:
            return "source", f"{each}; {self._try_workers()}"
        cache = self.facts.cache()
        if cache.fills >= 0.5 * load.count:
            kept = cache.filled / max(1, cache.dataset_len)
            return "cold cache", f"{each}, which filled the cache; the next epoch finds {kept:.0%} of the samples there"
        if not cache.sample_bytes:
            return "source", f"{each}, and the cache takes none of them"
        needed, rest_s = cache.needed_bytes, self.work_s - self.load_s
        limit = f"size_limit_gib={round_digits(min(needed, cache.room_bytes) / GIB, 2, up=True):.10g}"
        if needed <= cache.room_bytes:
            return "source", f"{each}; {limit} {self._brings(rest_s, self.facts.workers)}"
        if self._stalls():
            what = f"some samples take {format_seconds(load.p99_s)}, half of them at most {format_seconds(load.p50_s)}"
            remedy = "worker_method='thread', or a larger prefetch_factor, lets others go on meanwhile"
            return "stalls", f"{what}, and batches come in order; {remedy}"
        missing, found = max(0.0, 1 - cache.room_bytes / needed), load.count / max(1, stats.samples)
        brings = self._brings(rest_s + self.load_s * min(1.0, missing / found if found else 1.0), self.facts.workers)
        disk = "" if cache.disk else "; disk= keeps the rest on a local disk"
        return "source", f"{each}; all samples need {format_size(needed)}; {limit}, all that fits, {brings}{disk}"

    def _more_workers(self) -> tuple[Limit, str]:
        busy = format_seconds(self.batch_s)
        if not self.facts.workers:
            return "workers", f"this process makes the batches itself, {busy} each; {self._try_workers()}"
        are = "is" if self.facts.workers == 1 else "are"
        few = f"{plural(self.facts.workers, 'worker')} {are} too few for batches of {busy} each"
        return "workers", f"{few}; {self._try_workers()}"

    def _gil(self) -> tuple[Limit, str]:
        looks, held = self.facts.counted.sum(LOOKS), self.facts.counted.sum(HELD)
        how = f"hold the GIL {held / looks:.0%} of the time" if looks >= _LOOKS else "wait for the GIL"
        what = f"worker threads {how}, so one works at a time"
        if not here.SHARES_MEMORY:
            return "GIL", f"{what}; code that releases it, as Pillow, NumPy and torch do, would let them work at once"
        return "GIL", f"{what}; worker_method='multiprocessing' would let {self.facts.workers} work at once"


def steady_wait_s(batch_s: float, workers: int, step_s: float) -> float:
    """Return the wait in seconds for each of many equal batches, which cost a worker ``batch_s`` seconds each.

    W workers deliver such a batch every ``batch_s / W`` seconds. The main process waits for what that exceeds its step by.
    """
    return max(0.0, batch_s / workers - step_s) if workers else batch_s
