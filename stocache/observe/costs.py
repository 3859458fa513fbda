"""The measured parts of an epoch: the costs of samples and batches on this machine.

A *load* makes one sample from the dataset. A *way* is the path of samples into batches: from the cache, with a codec or without
one; or from the dataset (`UNCACHED`).
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

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
        return _between(self.by_workers, workers)

    def nbytes(self, samples: int) -> float:
        """Return the bytes of a cache for ``samples`` samples."""
        return samples * (self.sample_bytes + self.extra_bytes)


def _between(by_workers: Mapping[int, BatchCosts], workers: int) -> BatchCosts:
    if workers in by_workers or not workers:
        return by_workers[workers]
    known = sorted(number for number in by_workers if number)
    above = bisect.bisect(known, workers)
    if above in (0, len(known)):
        return by_workers[known[min(above, len(known) - 1)]]
    low, high = known[above - 1], known[above]
    share = (workers - low) / (high - low)
    one, other = by_workers[low], by_workers[high]
    return BatchCosts(*(a + share * (b - a) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)))


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
