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
from stocache.system.limits import GIB, format_size

Limit = Literal["source", "cold cache", "transform", "collate", "workers", "ring", "GIL", "hand-over", "start", "stalls"]

_SILENT = 0.05  # share of its time; no verdict if the trainer waits less
_SHORTEST_S = 0.01  # of waiting; no verdict if it is less
_OUTSIDE = 0.2  # share of batches sent without the ring, from which the ring is the limit
_HELD = 0.5  # share of looks that find the GIL held, from which the GIL is the limit
_LOOKS = 3  # at the GIL that are enough
_ONE, _ALL = (0.7, 1.5), 0.9  # CPUs that threads waiting for the GIL use in all; share of its time a thread wants a CPU
_FASTER = 1.2  # times as fast, from which a change is mentioned
_SLOW = 5.0  # times the median, from which a sample is slow
_IDLE = 0.6  # share of their time; workers that are busy for less are idle

_LEFT = (
    "the dataset makes each sample, because samples depend on more than their index (see the warning); move random steps to "
    "transform=, or set on_change='keep'"
)


@dataclass(frozen=True)
class CacheFacts:
    """The state of the cache after an epoch.

    Attributes:
        fills: samples that were cached in the epoch, by all processes.
        filled: samples that are cached now.
        dataset_len: samples of the dataset.
        sample_bytes: of one sample in the cache; 0 if none is cached.
        overhead_bytes: of the cache, besides samples.
        room_bytes: the largest cache that the machine can give, this one included.
        disk: whether there is a disk cache as well.
    """

    fills: int
    filled: int
    dataset_len: int
    sample_bytes: int
    overhead_bytes: int
    room_bytes: int
    disk: bool = False


@dataclass(frozen=True)
class EpochFacts:
    """The measurements of an epoch of a loader.

    Attributes:
        counted: the counts of the record in it.
        seconds, waited_s: its duration, and the part of it in which the trainer waited.
        first_wait_s: how long it waited for the first batch.
        batches: delivered.
        samples, misses: made, and those of them that were not in memory.
        workers: number of workers.
        threads: whether they are threads.
        starts_workers: whether processes were started for this epoch.
        persistent: whether they serve the next epochs, too.
        outside: batches that were sent without the ring, because all of its buffers were held.
        buffers: of the ring, for each worker.
        cores: CPUs that this process may use.
        cache: returns the state of the cache; None if the dataset has no open cache.
        left: whether the dataset has stopped using its cache.
    """

    counted: Counted
    seconds: float
    waited_s: float
    first_wait_s: float
    batches: int
    samples: int
    misses: int
    workers: int
    threads: bool
    starts_workers: bool
    persistent: bool
    outside: int
    buffers: int
    cores: int
    cache: Callable[[], CacheFacts] | None
    left: bool = False


@dataclass(frozen=True)
class Verdict:
    """The reason why the trainer waited.

    Attributes:
        limit: the part that was the limit.
        share: the share of the time for which the trainer waited.
        text: the reason in one line, with the change that would remove it.
    """

    limit: Limit
    share: float
    text: str

    def __str__(self) -> str:
        return self.text


def judge(facts: EpochFacts) -> Verdict | None:
    """Return why the trainer waited; None if it hardly waited. See NOTE [ The verdict ]."""
    share = facts.waited_s / facts.seconds if facts.seconds > 0 else 0.0
    if share < _SILENT or facts.waited_s < _SHORTEST_S or not facts.batches:
        return None
    waited = f"the trainer waited {share:.0%} of the time ({_seconds(facts.waited_s)} of {_seconds(facts.seconds)})"
    if facts.left:
        return Verdict("source", share, f"{waited}; {_LEFT}")
    limit, text = _Parts(facts).find()
    return Verdict(limit, share, f"{waited}; {text}")


class _Parts:
    """The seconds of an epoch, by part."""

    def __init__(self, facts: EpochFacts) -> None:
        counted = facts.counted
        self.facts, self.workers = facts, max(1, facts.workers)
        self.load_s, self.make_s = counted.sum(LOAD_NS) / 1e9, counted.sum(MAKE_NS) / 1e9
        self.collate_s, self.hand_over_s = counted.sum(COLLATE_NS) / 1e9, counted.sum(HAND_OVER_NS) / 1e9
        self.work_s = self.load_s + self.make_s + self.collate_s + self.hand_over_s
        self.step_s = max(0.0, facts.seconds - facts.waited_s) / facts.batches
        seen = counted.of_workers(SEEN_BUSY_NS)
        # the share of its time for which a worker is on a CPU, and for which it is on one or waits for one
        self.on_cpu_share = counted.of_workers(CPU_NS) / seen if seen > 0 else 1.0
        self.wants_cpu_share = min(1.0, self.on_cpu_share + counted.of_workers(QUEUED_NS) / seen) if seen > 0 else 1.0

    def find(self) -> tuple[Limit, str]:
        """Return the limit, and the text about it."""
        facts = self.facts
        parts = {"load": self.load_s, "make": self.make_s, "collate": self.collate_s, "hand over": self.hand_over_s}
        largest = max(parts, key=lambda name: parts[name])
        starting_s = facts.first_wait_s - self.work_s / facts.batches
        if facts.starts_workers and starting_s > 0.5 * facts.waited_s:
            return self._start(starting_s)
        if facts.outside >= _OUTSIDE * facts.batches and self.load_s + self.make_s < 0.5 * self.work_s:
            return self._ring()
        if facts.threads and self._shares_gil():
            return self._gil()
        if largest == "load":
            return self._load()
        if largest == "make" and facts.cache is None:
            return self._uncached()
        more = self._needed_workers() > facts.workers
        if more and facts.workers < facts.cores and largest != "collate":
            return self._more_workers()
        if largest == "make":
            what = f"transforming {facts.samples} cached samples, {_seconds(self.make_s / max(1, facts.samples))} each,"
            remedy = self._try_workers() if more else "move deterministic steps before the cache, or make them cheaper"
            return "transform", f"{what} is the limit; {remedy}"
        if largest == "collate":
            each = _seconds(self.collate_s / facts.batches)
            remedy = self._try_workers() if more else "only cheaper batches would remove it"
            return "collate", f"collating {facts.batches} batches of {each} each is the limit; {remedy}"
        each = _seconds(self.hand_over_s / facts.batches)
        remedy = "larger batches, or worker_method='thread', cost less"
        return "hand-over", f"handing over {facts.batches} batches of {each} each is the limit; {remedy}"

    # ------------------------------------------------------------------------------------------------ the effect of a change

    def _wait_s(self, work_s: float, workers: int) -> float:
        """Return the predicted wait for each batch, in seconds, with ``work_s`` of work in an epoch."""
        each_s = work_s / self.facts.batches
        return max(0.0, each_s / workers - self.step_s) if workers else each_s

    def _share_with(self, work_s: float, workers: int) -> float:
        wait_s = self._wait_s(work_s, workers)
        return wait_s / max(1e-9, wait_s + self.step_s)

    def _brings(self, work_s: float, workers: int) -> str:
        """Return the expected effect of this amount of work and number of workers."""
        facts, share = self.facts, self._share_with(work_s, workers)
        faster = facts.seconds / max(1e-9, facts.batches * (self._wait_s(work_s, workers) + self.step_s))
        if share < _SILENT:
            return "would remove it"
        if share < 0.9 * facts.waited_s / facts.seconds:
            return f"would cut it to {share:.0%}"
        return f"would make the epoch {faster:.2g} times as fast" if faster >= _FASTER else "helps little"

    @property
    def _most_workers(self) -> int:
        """The number of workers that keep all CPUs busy."""
        return max(1, int(self.facts.cores / max(0.05, self.wants_cpu_share)))

    def _needed_workers(self) -> int:
        """Return how many workers would keep up with the trainer, as far as there are CPUs for them."""
        if not self.step_s:
            return self._most_workers
        return min(self._most_workers, math.ceil(1.05 * self.work_s / self.facts.batches / self.step_s))

    def _try_workers(self) -> str:
        needed = self._needed_workers()
        return f"num_workers={needed} {self._brings(self.work_s, needed)}"

    def _shares_gil(self) -> bool:
        """Whether worker threads wait for the GIL: most looks find it held; or all threads together use about one CPU."""
        facts = self.facts
        looks, held = facts.counted.sum(LOOKS), facts.counted.sum(HELD)
        is_held = held >= _HELD * looks
        if self.workers < 2:
            return False
        if looks >= _LOOKS:
            return is_held
        # Few looks: the loop hardly waited, or hardly got the GIL. Else it would look about once a batch
        hardly_got = facts.waited_s > 2 * LOOK_S * facts.batches and (is_held or facts.batches >= 2 * _LOOKS)
        have_one = _ONE[0] <= self.on_cpu_share * self.workers <= _ONE[1] and self.wants_cpu_share < _ALL
        return hardly_got and have_one

    def _stalls(self) -> bool:
        """Whether workers were idle although the trainer waited: a few slow samples hold up batches, which come in order."""
        facts, load = self.facts, self.facts.counted.distribution(LOAD_NS)
        idle = self.work_s < _IDLE * self.workers * facts.seconds
        return facts.workers > 1 and idle and load.count > 0 and load.p99_s > _SLOW * load.p50_s

    # ------------------------------------------------------------------------------------------------ the texts

    def _load(self) -> tuple[Limit, str]:
        facts = self.facts
        each = f"loading {facts.misses} uncached samples of {_seconds(self.load_s / max(1, facts.misses))} each"
        if facts.cache is None:
            return "source", f"{each} is the limit; {self._try_workers()}"
        cache = facts.cache()
        if cache.fills >= 0.5 * facts.misses:
            kept = cache.filled / max(1, cache.dataset_len)
            return (
                "cold cache",
                f"{each} is the limit, which filled the cache; the next epoch finds {kept:.0%} of the samples there",
            )
        rest_s = self.work_s - self.load_s
        needed = cache.dataset_len * cache.sample_bytes + cache.overhead_bytes
        if not cache.sample_bytes:
            return "source", f"{each} is the limit, and the cache takes none of them"
        if needed <= cache.room_bytes:
            remedy = f"size_limit_gib={_gib(needed)} {self._brings(rest_s, facts.workers)}"
            return "source", f"{each} is the limit; {remedy}"
        if self._stalls():
            return self._stall()
        missing = max(0.0, 1 - cache.room_bytes / needed)
        found = facts.misses / max(1, facts.samples)
        left_s = rest_s + self.load_s * min(1.0, missing / found if found else 1.0)
        brings = self._brings(left_s, facts.workers)
        remedy = f"all samples need {format_size(needed)}; size_limit_gib={_gib(cache.room_bytes)}, all that fits, {brings}"
        return "source", f"{each} is the limit; {remedy}{'' if cache.disk else '; disk= keeps the rest on a local disk'}"

    def _uncached(self) -> tuple[Limit, str]:
        facts = self.facts
        each = f"making {facts.samples} uncached samples of {_seconds(self.make_s / max(1, facts.samples))} each"
        needed = self._needed_workers()
        if needed > facts.workers and self._share_with(self.work_s, needed) < _SILENT:
            return self._more_workers()
        return "source", f"{each} is the limit; CachedDataset would make them once"

    def _more_workers(self) -> tuple[Limit, str]:
        facts = self.facts
        busy = _seconds(self.work_s / facts.batches)
        if not facts.workers:
            return "workers", f"this process makes the batches itself, {busy} each; {self._try_workers()}"
        few = f"{facts.workers} worker{'s are' if facts.workers > 1 else ' is'} too few for batches of {busy} each"
        return "workers", f"{few}; {self._try_workers()}"

    def _start(self, starting_s: float) -> tuple[Limit, str]:
        if self.facts.persistent:
            return "start", f"starting the workers took {_seconds(starting_s)}; the next epochs use the same workers"
        return "start", f"starting the workers took {_seconds(starting_s)}; persistent_workers=True would do it once"

    def _ring(self) -> tuple[Limit, str]:
        facts = self.facts
        what = f"{facts.outside} of {facts.batches} batches found the ring full, with {facts.buffers} buffers for each worker"
        return "ring", f"{what}, and were copied; hold fewer batches at a time, or raise prefetch_factor, which adds buffers"

    def _gil(self) -> tuple[Limit, str]:
        facts = self.facts
        looks, held = facts.counted.sum(LOOKS), facts.counted.sum(HELD)
        how = f"hold the GIL {held / looks:.0%} of the time" if looks >= _LOOKS else "wait for the GIL"
        what = f"worker threads {how}, so one works at a time"
        return "GIL", f"{what}; worker_method='multiprocessing' would let {facts.workers} work at once"

    def _stall(self) -> tuple[Limit, str]:
        load = self.facts.counted.distribution(LOAD_NS)
        what = f"some samples take {_seconds(load.p99_s)}, half of them at most {_seconds(load.p50_s)}"
        remedy = "worker_method='thread', or a larger prefetch_factor, lets others go on meanwhile"
        return "stalls", f"{what}, and batches come in order; {remedy}"


def _seconds(seconds: float) -> str:
    """Return a duration with two or three digits, as "9.1 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.995 * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.2g} {unit}" if value < 9.95 else f"{value:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _gib(nbytes: float) -> str:
    """Return ``nbytes`` in GiB, rounded up to two significant digits."""
    gib = nbytes / GIB
    step = 10.0 ** (math.floor(math.log10(gib)) - 1) if gib > 0 else 1.0
    return f"{math.ceil(round(gib / step, 6)) * step:.10g}"
