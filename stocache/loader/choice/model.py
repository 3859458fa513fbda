"""Predict the seconds of an epoch for a setting, from measured costs. The result depends on the arguments only.

A *load* makes one sample from the dataset. A *way* is the path of samples into batches: from the cache, with a codec or without
one; or from the dataset (`UNCACHED`).

NOTE [ An epoch as events ]
    An epoch is simulated batch by batch. Worker w makes the batches w, w + W, w + 2 W, ... of W workers, as torch's DataLoader
    gives them out, and has at most ``prefetch_factor`` of them that the main process has not taken. Batches come in order: the
    main process takes a batch, hands out the next one, and then does its step. Processes that run at the same time share the
    CPUs evenly. A worker that waits for a disk or a server needs a CPU only for a part of its time. The training step is
    assumed to run on a GPU and use no CPU time.

    Of a long epoch only the first batches are simulated; it goes on at the rate of the second half of them. A short one is
    simulated several times, and the mean is taken. The loads of batches are drawn from the measured ones with a fixed seed, and
    rescaled to their mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

PREFETCH = 2  # torch's default

_Counts: TypeAlias = NDArray[np.int64]
_Seconds: TypeAlias = NDArray[np.float64]

_PLAYED = 160  # batches, and at least four of each worker
_EPOCHS = 8  # that are simulated at most, if they are short: which worker gets the slow batches matters then
_TINY_S = 1e-12


UNCACHED = "uncached"
"""The way of samples that are not cached. Its costs are those of batches without the loads."""


@dataclass(frozen=True)
class BatchCosts:
    """The costs of batches with a number of workers: a part for each sample, and a part for each batch.

    Attributes:
        sample_s, batch_s: CPU seconds of the worker; without workers, of the main process.
        main_sample_s, main_batch_s: CPU seconds of the main process; 0 without workers.
        start_s, start_sample_s: seconds that an epoch takes beyond the model, with persistent workers.
        wake_s: seconds for which a worker waits for each batch.

    A batch of n samples costs ``batch_s + n * sample_s``. ``batch_s`` may be negative: samples of large batches cost more.
    An epoch of such batches takes ``start_s + n * start_sample_s`` beyond the model, which may be negative, too.
    """

    sample_s: float
    batch_s: float
    main_sample_s: float = 0.0
    main_batch_s: float = 0.0
    start_s: float = 0.0
    start_sample_s: float = 0.0
    wake_s: float = 0.0

    def start_of(self, batch_size: int) -> float:
        """Return the seconds that an epoch takes beyond the model, with this batch size."""
        return self.start_s + batch_size * self.start_sample_s

    def mixed(self, other: "BatchCosts", share: float) -> "BatchCosts":
        """Return the costs of batches of which ``share`` is as ``other``, and the rest as this one."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return BatchCosts(*(one + share * (another - one) for one, another in pairs))


@dataclass(frozen=True)
class WayCosts:
    """The costs of one way.

    Attributes:
        by_workers: the costs of batches, by the number of workers.
        sample_bytes: bytes of a sample in the cache.
        extra_bytes: further bytes of the cache for each sample of the dataset.
        fill_s: CPU seconds to put one sample into the cache.
    """

    by_workers: Mapping[int, BatchCosts]
    sample_bytes: float = 0.0
    extra_bytes: float = 0.0
    fill_s: float = 0.0

    def at(self, workers: int) -> BatchCosts:
        """Return the costs for a number of workers: interpolated between measured ones; beyond them, those of the nearest."""
        if workers in self.by_workers or not workers:
            return self.by_workers[workers]
        known = sorted(number for number in self.by_workers if number)
        low = max((number for number in known if number < workers), default=known[0])
        high = min((number for number in known if number > workers), default=known[-1])
        share = (workers - low) / (high - low) if high > low else 0.0
        return self.by_workers[low].mixed(self.by_workers[high], share)

    def nbytes(self, samples: int) -> float:
        """Return the bytes of a cache for ``samples`` samples."""
        return samples * (self.sample_bytes + self.extra_bytes)


@dataclass(frozen=True)
class Costs:
    """The measured costs of a dataset on a machine.

    Attributes:
        samples: samples of the dataset.
        cores: CPUs that this process may use.
        loads_s: seconds of each load that was timed: of a sample that was loaded before, with one process at work.
        cpu_share: the share of that time for which the process was on a CPU; for the rest it waited.
        busy_ratio: CPU time of a load while all CPUs load, divided by that of a load alone.
        cold_ratio: time of the first load of a sample, divided by that of a later one.
        batch_sizes: the smallest and the largest that were measured.
        ways: the costs of batches: `UNCACHED`, and by codec, of which None is the cache without a codec.
        batch_bytes: bytes of one sample in a batch.
        worker_start_s: seconds to start one worker.
        thread_speed_up: samples that two threads make in the time of one; None if it was not measured.
        gil_share: the share of its time for which a thread that loads holds the GIL.
        timed: number of loads that were timed.
        has_transform: whether transforms of the dataset run after the cache. They are part of each way.
        took_s: seconds that measuring took.
        missing: the measurements that failed, and why; a sentence each.
        stalls: whether forked workers would stall.
    """

    samples: int
    cores: int
    loads_s: tuple[float, ...]
    ways: Mapping[str | None, WayCosts]
    batch_sizes: tuple[int, int] = (1, 1 << 30)
    cpu_share: float = 1.0
    busy_ratio: float = 1.0
    cold_ratio: float = 1.0
    batch_bytes: float = 0.0
    worker_start_s: float = 0.0
    thread_speed_up: float | None = None
    gil_share: float = 0.0
    timed: int = 0
    has_transform: bool = False
    took_s: float = 0.0
    missing: tuple[str, ...] = ()
    stalls: bool = False

    @property
    def load_s(self) -> float:
        """The mean seconds of a load."""
        return sum(self.loads_s) / len(self.loads_s)

    def contention(self, workers: int) -> float:
        """Return the CPU time of a load while ``workers`` workers load, divided by that of a load alone."""
        others = max(1, self.cores - 1)
        return 1 + (self.busy_ratio - 1) * min(max(workers, 1) - 1, others) / others


@dataclass(frozen=True)
class Setting:
    """One way to load a dataset.

    Attributes:
        limit_bytes: of the cache; 0 without one.
        workers: of the DataLoader.
        codec: of the cache.
        batch_size: samples in a batch.
        prefetch_factor: batches that each worker makes ahead.
    """

    limit_bytes: int
    workers: int
    codec: str | None
    batch_size: int
    prefetch_factor: int = PREFETCH


@dataclass(frozen=True)
class Forecast:
    """The predicted epochs of a setting.

    Attributes:
        setting: the setting.
        cached_share: the share of the samples that the cache holds.
        epoch_s: seconds of a later epoch.
        first_epoch_s: seconds of the first epoch, which starts the workers and fills the cache.
        wait_share: the share of a later epoch for which the training loop waits for batches.
        memory_bytes: memory of the cache and of the batches in flight.
    """

    setting: Setting
    cached_share: float
    epoch_s: float
    first_epoch_s: float
    wait_share: float
    memory_bytes: int


def cached_share(costs: Costs, limit_bytes: int, codec: str | None) -> float:
    """Return the share of the samples that a cache of ``limit_bytes`` holds."""
    if codec not in costs.ways:
        return 0.0
    way = costs.ways[codec]
    room = limit_bytes - costs.samples * way.extra_bytes
    if room <= 0 or not costs.samples:
        return 0.0
    return min(1.0, room / max(1.0, costs.samples * way.sample_bytes))


def predict(costs: Costs, setting: Setting, step_s: float = 0.0) -> Forecast:
    """Return the forecast of a setting, with a training step of ``step_s`` seconds for each batch."""
    share = cached_share(costs, setting.limit_bytes, setting.codec) if setting.limit_bytes else 0.0
    epoch_s, waited_s = _epoch(costs, setting, share, step_s, cold=False)
    first_s, _ = _epoch(costs, setting, share, step_s, cold=True)
    first_s += costs.worker_start_s * setting.workers
    held = setting.workers * (setting.prefetch_factor + 1) + 1
    memory = min(setting.limit_bytes, costs.ways[setting.codec].nbytes(costs.samples)) if share else 0
    memory += held * min(setting.batch_size, costs.samples) * costs.batch_bytes
    return Forecast(setting, share, epoch_s, first_s, min(1.0, waited_s / max(epoch_s, _TINY_S)), math.ceil(memory))


def _epoch(costs: Costs, setting: Setting, share: float, step_s: float, cold: bool) -> tuple[float, float]:
    """Return the mean seconds of epochs, and those for which the main process waits."""
    batches = math.ceil(costs.samples / min(setting.batch_size, costs.samples))
    rng = np.random.default_rng(0)
    epochs = [_draw_epoch(costs, setting, share, step_s, cold, rng) for _ in range(max(1, min(_EPOCHS, _PLAYED // batches)))]
    total_s, waited_s = (sum(each) / len(epochs) for each in zip(*epochs, strict=True))
    return total_s, waited_s


def _draw_epoch(
    costs: Costs, setting: Setting, share: float, step_s: float, cold: bool, rng: np.random.Generator
) -> tuple[float, float]:
    size, workers = min(setting.batch_size, costs.samples), setting.workers
    batches = math.ceil(costs.samples / size)
    played = min(batches, max(_PLAYED, 4 * workers))
    missing = np.zeros(played, np.int64)
    sizes = np.full(played, size)
    if played == batches:
        sizes[-1] = costs.samples - size * (batches - 1)
    missed = 1.0 if cold else 1.0 - share
    if 0 < missed < 1:
        missing = _spread(rng.binomial(sizes, missed), sizes, missed)
    elif missed:
        missing = sizes
    loads_s: _Seconds = _draw(rng, costs.loads_s, missing) * (costs.cold_ratio if cold else 1.0)
    way = costs.ways.get(setting.codec, costs.ways[UNCACHED])  # the same where nothing is cached
    hit, miss = way.at(workers), costs.ways[UNCACHED].at(workers)
    missed_part = float(missing.sum() / sizes.sum())
    batch = hit.mixed(miss, missed_part)
    cpu_s: _Seconds = loads_s * costs.cpu_share * costs.contention(workers)
    cpu_s = np.maximum(0.0, cpu_s + missing * miss.sample_s + (sizes - missing) * hit.sample_s + batch.batch_s)
    if cold:
        cpu_s += missing * share * way.fill_s
    wait_s: _Seconds = loads_s * (1 - costs.cpu_share) + batch.wake_s
    main_s: _Seconds = np.maximum(0.0, batch.main_batch_s + batch.main_sample_s * sizes)
    start_s = batch.start_of(min(max(size, costs.batch_sizes[0]), costs.batch_sizes[1]))
    if not workers:
        each_s = cpu_s + wait_s
        busy_s = float(each_s.sum()) * costs.samples / float(sizes.sum())
        return start_s + busy_s + batches * step_s, start_s + busy_s
    taken_s = simulate(cpu_s, wait_s, main_s, step_s, workers, costs.cores, setting.prefetch_factor)
    total_s = taken_s[-1]
    if played < batches:
        half = played // 2
        total_s += (batches - played) * (taken_s[-1] - taken_s[half - 1]) / (played - half)
    total_s = max(total_s + start_s, total_s / 2, batches * step_s)
    return total_s, max(0.0, total_s - batches * step_s)


def _spread(drawn: _Counts, sizes: _Counts, share: float) -> _Counts:
    """Return numbers near the drawn ones whose sum is the expected one: an epoch misses a fixed number of samples."""
    surplus = int(drawn.sum()) - round(share * int(sizes.sum()))
    at = 0
    while surplus:
        step = 1 if surplus > 0 else -1
        if 0 <= drawn[at] - step <= sizes[at]:
            drawn[at] -= step
            surplus -= step
        at = (at + 1) % len(drawn)
    return drawn


def _draw(rng: np.random.Generator, loads_s: Sequence[float], counts: _Counts) -> _Seconds:
    """Return for each batch the sum of ``counts[i]`` load times, drawn from the measured ones and rescaled to their mean."""
    total = int(counts.sum())
    known: _Seconds = np.asarray(loads_s, np.float64)
    if not total:
        return np.zeros(len(counts))
    deck = np.tile(known, -(-total // len(known)))
    drawn = rng.permutation(deck)[:total]
    drawn *= known.mean() / max(drawn.mean(), _TINY_S)
    sums = np.concatenate([[0.0], np.cumsum(drawn)])
    ends = np.cumsum(counts)
    each: _Seconds = sums[ends] - sums[ends - counts]
    return each


def simulate(
    cpu_s: Sequence[float] | _Seconds,
    wait_s: Sequence[float] | _Seconds,
    main_s: Sequence[float] | _Seconds,
    step_s: float,
    workers: int,
    cores: int,
    prefetch_factor: int = PREFETCH,
) -> list[float]:
    """Return the time at which the main process has finished each batch; see NOTE [ An epoch as events ].

    Args:
        cpu_s, wait_s: for each batch, the CPU seconds of its worker, and the seconds for which it waits.
        main_s: for each batch, the CPU seconds of the main process to take it.
        step_s: seconds of the step after each batch, which uses no CPU time.
    """
    cpu, wait, main = (list(map(float, each)) for each in (cpu_s, wait_s, main_s))
    on_cpu = [cpu[batch] / max(cpu[batch] + wait[batch], _TINY_S) for batch in range(len(cpu))]  # shares of their time
    count, now, ends = len(cpu), 0.0, list[float]()
    issued, done = min(count, prefetch_factor * workers), [False] * count
    begun = list(range(workers))  # for each worker, the batch that it makes, or will make next
    left: dict[int, float] = {}  # for each worker that makes a batch: the share that is still to be made
    taking, main_left, step_left = False, 0.0, 0.0
    while len(ends) < count:
        for worker in range(workers):
            if worker not in left and begun[worker] < issued:
                left[worker] = 1.0
        if not taking and step_left <= 0 and done[len(ends)]:
            taking, main_left = True, main[len(ends)]
        slower = max(1.0, (taking + sum(on_cpu[begun[worker]] for worker in left)) / cores)
        takes_s = {worker: max(_TINY_S, cpu[begun[worker]] * slower + wait[begun[worker]]) for worker in left}
        main_s_left = main_left * slower if taking else step_left if step_left > 0 else math.inf
        next_s = min([main_s_left, *(left[worker] * took_s for worker, took_s in takes_s.items())])
        now += next_s
        for worker, took_s in takes_s.items():
            left[worker] -= next_s / took_s
            if left[worker] <= 1e-9:
                del left[worker]
                done[begun[worker]] = True
                begun[worker] += workers
        if taking:
            main_left -= next_s / slower
            if main_left <= _TINY_S:
                taking, step_left, issued = False, step_s, min(count, issued + 1)
                ends.append(now + step_s)
        elif step_left > 0:
            step_left -= next_s
            if step_left <= _TINY_S:
                step_left = 0.0
    return ends
