"""Say in one line why the trainer waited, and which change would remove the wait.

NOTE [ The verdict ]
    The trainer waits if the workers need longer for a batch than the trainer for its step. The time of the workers in an epoch
    is recorded in parts: loading samples that were not cached, making the rest (reading cached ones, transforms), collating,
    handing over. The largest part is the *limit*, unless the cause lies elsewhere: workers that are starting, a ring whose
    buffers are all held, a GIL that the threads wait for. The effect of a change follows from the parts: W workers that need c
    seconds each for a batch deliver one every c / W seconds. If that is longer than the step, the trainer waits for the
    difference. No number of workers is faster than the CPUs: steps and batches together need their CPU seconds.

    More workers are suggested only if they save more time than their start takes; and more of them than CPUs only if they
    mostly wait, and twice as many as now at most, because a disk or a server may not serve more at once.
"""

import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stocache.observe.recording import record
from stocache.observe.recording.gil import LOOK_S
from stocache.observe.recording.histogram import EMPTY_DISTRIBUTION, Distribution
from stocache.observe.recording.record import Counted
from stocache.system.figures import format_seconds, plural, round_digits
from stocache.system.limits import GIB, format_size
from stocache.system.platform import here

Limit = Literal[
    "source", "cold cache", "transform", "collate", "workers", "ring", "GIL", "hand-over", "start", "stalls", "unknown"
]

SILENT = 0.05  # share of its time; no verdict if the trainer waits less
_SHORTEST_S = 0.01  # of waiting; no verdict if it is less
_OUTSIDE = 0.2  # share of batches sent without the ring, from which the ring is the limit
_HELD = 0.5  # share of looks that find the GIL held, from which the GIL is the limit
_LOOKS = 3  # at the GIL that are enough
_ONE, _ALL = (0.7, 1.5), 0.9  # CPUs that threads waiting for the GIL use in all; share of its time a thread wants a CPU
_FASTER = 1.2  # times as fast, from which a change is mentioned
_FEW = 3  # batches; if there are more, one of them should not make up half of the waiting
_SLOW = 5.0  # times the median, from which a sample is slow
_IDLE = 0.6  # share of their time; workers that are busy for less are idle
_WAIT = 0.5  # share of its time for which a worker wants a CPU; one that wants it for less mostly waits
_HIT_S = 5e-5  # for a sample; one that takes less is not worth caching
_FORK_S, _SPAWN_S = 0.25, 2.0  # to start and to end a worker process, at most
_OVERHEAD = 32  # bytes of a cache for each sample of the dataset, at most

_LEFT = (
    "the dataset makes each sample, because samples depend on more than their index (see the warning); move random steps to "
    "transform=, or set on_change='keep'"
)
TRY = "stocache.advise(dataset) measures what a cache would change"
"""Where samples take the time, and it is not known whether they can be cached. ``stocache run`` tries it."""
_REMOVES, _LITTLE = "would remove it", "helps little"


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
        steps_s: the part of it in which the program did its own work: from one batch to the request for the next.
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
    steps_s: float = 0.0
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

    @property
    def overhead_s(self) -> float:
        """The rest of the time: to start and to end the iterator and its workers."""
        return max(0.0, self.seconds - self.waited_s - self.steps_s)


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
        cpu_s: CPU seconds of all threads of this process in the epoch.
        cache: returns the state of the cache; None if the dataset has no open cache.
        left: whether the dataset has stopped using its cache.
        rest: what the dataset's program runs each time for a cached sample: lines and transforms, in brackets; or empty.
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
    rest: str = ""
    cpu_s: float = 0.0


def judge(stats: LoaderEpochStats, facts: EpochFacts) -> Verdict | None:
    """Return why the trainer waited; None if it hardly waited. See NOTE [ The verdict ]."""
    share, lost_s = stats.waited_share, stats.waited_s + stats.overhead_s * facts.starts_workers
    if lost_s < max(SILENT * stats.seconds, _SHORTEST_S) or not stats.batches:
        return None
    waited = f"the trainer waited {share:.0%} of the time ({format_seconds(stats.waited_s)} of {format_seconds(stats.seconds)})"
    parts = _Parts(stats, facts)
    if not parts.work_s and not facts.left:
        return Verdict("unknown", share, waited)
    limit, text = parts.find()
    return Verdict(limit, share, f"{waited}; {text}")


class _Parts:
    """The seconds of an epoch, by part."""

    def __init__(self, stats: LoaderEpochStats, facts: EpochFacts) -> None:
        counted, cores = facts.counted, facts.cores
        self.stats, self.facts, self.workers = stats, facts, max(1, facts.workers)
        words = record.LOAD_NS, record.MAKE_NS, record.COLLATE_NS, record.HAND_OVER_NS
        self.load_s, self.make_s, self.collate_s, self.hand_over_s = (counted.sum(word) / 1e9 for word in words)
        self.work_s = self.load_s + self.make_s + self.collate_s + self.hand_over_s
        made_s = self.work_s - self.hand_over_s
        self.alone_s = stats.steps_s + made_s if made_s else math.inf  # of an epoch without workers; inf if nothing is recorded
        self.batch_s = self.work_s / stats.batches
        self.step_s = stats.steps_s / stats.batches
        self.starting_s = stats.overhead_s + max(0.0, facts.first_wait_s - self.batch_s) if facts.starts_workers else 0.0
        seen = counted.of_workers(record.SEEN_BUSY_NS)
        # the share of its time for which a worker is on a CPU, and for which it is on one or waits for one
        self.on_cpu_share = counted.of_workers(record.CPU_NS) / seen if seen > 0 else 1.0
        self.wants_cpu_share = min(1.0, self.on_cpu_share + counted.of_workers(record.QUEUED_NS) / seen) if seen > 0 else 1.0
        own = 0.0 if facts.workers and not facts.threads else min(1.0, self.on_cpu_share)
        self.steps_cpu_s = max(0.0, facts.cpu_s - own * self.work_s)
        # the workers that are useful at most; and the workers that would keep up with the trainer, if there may be as many
        waiting = min(int(cores / max(0.05, self.wants_cpu_share)), 2 * facts.workers)
        most = max(cores, waiting) if self.wants_cpu_share <= _WAIT else cores
        self.needed = min(most, math.ceil(1.05 * self.batch_s / self.step_s)) if self.step_s else most
        self.more = self._more_workers()

    def find(self) -> tuple[Limit, str]:
        """Return the limit, and the text about it."""
        stats, facts = self.stats, self.facts
        parts = {"load": self.load_s, "make": self.make_s, "collate": self.collate_s, "hand over": self.hand_over_s}
        largest = max(parts, key=lambda name: parts[name])
        if facts.left:
            return "source", f"{_LEFT}{facts.rest}"
        if self.starting_s > 0.5 * (stats.waited_s + stats.overhead_s):
            remedy = "the next epochs use the same workers" if facts.persistent else "persistent_workers=True would do it once"
            alone = self._alone() if not facts.persistent and self.starting_s > self.alone_s else ""
            return "start", f"starting and ending the workers took {format_seconds(self.starting_s)}; {alone or remedy}"
        if stats.outside >= _OUTSIDE * stats.batches and self.load_s + self.make_s < 0.5 * self.work_s:
            full = f"found the ring full, with {facts.buffers} buffers for each worker, and were copied"
            remedy = "hold fewer batches at a time, or raise prefetch_factor, which adds buffers"
            return "ring", f"{stats.outside} of {stats.batches} batches {full}; {remedy}"
        if facts.threads and self._shares_gil():
            return self._gil()
        if stats.wait.count > _FEW and stats.wait.max_s > 0.5 * stats.waited_s:
            which = "the first batch" if facts.first_wait_s > 0.5 * stats.waited_s else "one batch"
            took = f"{format_seconds(stats.wait.max_s)}, half of the batches at most {format_seconds(stats.wait.p50_s)}"
            return "stalls", f"{which} took {took}"
        if largest == "load":
            return self._load()
        enough = self.more.endswith(_REMOVES) if facts.cache is None else self.more and facts.workers < facts.cores
        if largest == "make" and enough:
            return self._few_workers()
        sample_s = self.make_s / max(1, stats.samples)
        if largest == "make" and facts.cache is None:
            each = f"making {self._each(stats.samples, 'sample', self.make_s)} is the limit"
            return "source", f"{each}; {TRY}" if sample_s > _HIT_S else each
        if largest == "make":
            each = f"reading and transforming {plural(stats.samples, 'cached sample')}, {format_seconds(sample_s)} each"
            return "transform", f"{each}{facts.rest}, is the limit; {self.more or 'only cheaper transforms would remove it'}"
        if largest == "collate":
            each = self._each(stats.batches, "batch", self.collate_s)
            return "collate", f"collating {each} is the limit; {self.more or 'only cheaper batches would remove it'}"
        each = f"handing over {self._each(stats.batches, 'batch', self.hand_over_s)} is the limit"
        remedy = self._alone() if stats.seconds > _FASTER * self.alone_s else "worker_method='thread' hands over nothing"
        return "hand-over", f"{each}; {remedy}"

    def _period_s(self, work_s: float, workers: int) -> float:
        """Return the predicted seconds from one batch to the next, with ``work_s`` of work in an epoch."""
        stats, cpu_s = self.stats, self.steps_cpu_s + min(1.0, self.on_cpu_share) * work_s
        batch_s = work_s / stats.batches
        period_s = max(self.step_s, batch_s / workers) if workers else self.step_s + batch_s
        return max(period_s, cpu_s / self.facts.cores / stats.batches)

    def _brings(self, work_s: float, workers: int) -> str:
        """Return the expected effect of this amount of work and number of workers."""
        stats, each_s = self.stats, max(1e-9, self._period_s(work_s, workers))
        share = max(0.0, each_s - self.step_s) / each_s
        if share < SILENT:
            return _REMOVES
        if share < 0.9 * stats.waited_share:
            return f"would cut it to {share:.0%}"
        faster = stats.seconds / (stats.batches * each_s)
        return f"would make the epoch {faster:.2g} times as fast" if faster >= _FASTER else _LITTLE

    def _more_workers(self) -> str:
        """Return the number of workers to take, and its effect; "" if more workers are not sure to be faster."""
        facts, brings = self.facts, self._brings(self.work_s, self.needed)
        starting_s = self.starting_s * self.needed / self.workers
        if not facts.workers:  # `allow_none`, so that the program may still choose
            method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
            starting_s = self.needed * (_FORK_S if method == "fork" else _SPAWN_S)
        saved_s = self.stats.seconds - self.stats.batches * self._period_s(self.work_s, self.needed)
        sure = self.needed > facts.workers and brings != _LITTLE and saved_s > starting_s * (not facts.persistent)
        return f"num_workers={self.needed} {brings}" if sure else ""

    def _shares_gil(self) -> bool:
        """Whether worker threads wait for the GIL: most looks find it held; or all threads together use about one CPU."""
        stats, looks, held = self.stats, self.facts.counted.sum(record.LOOKS), self.facts.counted.sum(record.HELD)
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
        idle = self.facts.workers > 1 and self.work_s < _IDLE * self.workers * self.stats.seconds
        return idle and self.stats.load.p99_s > _SLOW * self.stats.load.p50_s

    def _each(self, count: int, noun: str, seconds: float) -> str:
        return f"{plural(count, noun)} of {format_seconds(seconds / max(1, count))} each"

    def _load(self) -> tuple[Limit, str]:
        stats, load = self.stats, self.stats.load
        each = f"loading {self._each(load.count, 'uncached sample', self.load_s)} is the limit"
        if self.facts.cache is None:
            return "source", f"{each}; {self.more}" if self.more else each
        cache = self.facts.cache()
        if cache.fills >= 0.5 * load.count:
            kept = cache.filled / max(1, cache.dataset_len)
            return "cold cache", f"{each}, which filled the cache; the next epoch finds {kept:.0%} of the samples there"
        if not cache.sample_bytes:
            return "source", f"{each}, and the cache takes none of them"
        if cache.filled >= cache.dataset_len:
            return "source", f"{each}: all samples are cached, and these were loaded to compare them with the cache"
        needed, rest_s = cache.needed_bytes, self.work_s - self.load_s
        limit = f"size_limit_gib={round_digits(min(needed, cache.room_bytes) / GIB, 2, up=True):.10g}"
        if needed <= cache.room_bytes:
            return "source", f"{each}; {limit} {self._brings(rest_s, self.facts.workers)}"
        if self._stalls():
            what = f"some samples take {format_seconds(load.p99_s)}, half of them at most {format_seconds(load.p50_s)}"
            return "stalls", f"{what}, and batches come in order; a larger prefetch_factor lets others go on meanwhile"
        missing, found = max(0.0, 1 - cache.room_bytes / needed), load.count / max(1, stats.samples)
        brings = self._brings(rest_s + self.load_s * min(1.0, missing / found if found else 1.0), self.facts.workers)
        disk = "" if cache.disk else "; disk= keeps the rest on a local disk"
        return "source", f"{each}; all samples need {format_size(needed)}; {limit}, all that fits, {brings}{disk}"

    def _alone(self) -> str:
        return f"without workers (num_workers=0) the epoch would take {format_seconds(self.alone_s)}"

    def _few_workers(self) -> tuple[Limit, str]:
        busy, count = format_seconds(self.batch_s), self.facts.workers
        if not count:
            return "workers", f"this process makes the batches itself, {busy} each; {self.more}"
        are = "is" if count == 1 else "are"
        return "workers", f"{plural(count, 'worker')} {are} too few for batches of {busy} each; {self.more}"

    def _gil(self) -> tuple[Limit, str]:
        looks, held = self.facts.counted.sum(record.LOOKS), self.facts.counted.sum(record.HELD)
        how = f"hold the GIL {held / looks:.0%} of the time" if looks >= _LOOKS else "wait for the GIL"
        what = f"worker threads {how}, so one works at a time"
        if not here.SHARES_MEMORY:
            return "GIL", f"{what}; code that releases it, as Pillow, NumPy and torch do, would let them work at once"
        return "GIL", f"{what}; worker_method='multiprocessing' would let {self.facts.workers} work at once"
