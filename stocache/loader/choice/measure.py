"""Measure the costs of samples and batches of a dataset on this machine, in child processes, within a time limit.

NOTE [ Measurements ]
    One process loads samples, each twice: the second time, their files are in the page cache. Then one process for each CPU, at
    most `_MOST_WORKERS`, loads the same samples and more, because shared CPU caches and memory make all of them slower. Samples
    that were loaded fill small caches, one without a codec and one for each codec. The real loader runs a few short epochs over
    these, and over samples that are not cached. The CPU time of the workers and of the main process is read from Linux, so the
    time of other programs does not count. From two batch sizes follow the cost of a sample and the cost of a batch.

    The epochs of a setting are not measured but predicted from these (model.py).
"""

import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from stocache.datasets.loaders import SampleLoader
from stocache.datasets.transforms.planning import plan_split
from stocache.datasets.transforms.splitting import Split
from stocache.errors import DatasetError, StocacheError, WorkerError
from stocache.loader.choice.model import UNCACHED, BatchCosts, Costs, WayCosts, simulate
from stocache.loader.choice.trials import (
    CACHE_BYTES,
    EpochRun,
    EpochTrials,
    FilledCache,
    LoadMany,
    Loads,
    MakeLoader,
    nbytes_of,
    run_epochs,
    time_busy_loads,
    time_loads,
)
from stocache.system.limits import MIB, recommended_limit
from stocache.system.loading.children import ChildError, SlowError, StalledError, in_children
from stocache.system.loading.fallback import run_here
from stocache.system.objects import get_many_of
from stocache.system.platform import here

logger = logging.getLogger("stocache")

_T = TypeVar("_T")

_ALONE_S, _BUSY_S = 1.5, 2.0  # for loads, where they are fast
_FIRST_SHARE, _ALONE_SHARE, _EPOCHS_SHARE = 0.5, 0.35, 0.8  # of the time that is left, at most
_SPLIT_LOADS = 80  # loads for finding out where to split transforms
_KEPT, _KEPT_BYTES = 256, 96 * MIB  # samples that are kept to fill caches
_MOST_ORDERED = 200_000  # indices
_MOST = 8192  # samples of a short epoch
_MOST_WORKERS = 16  # that are started
_SPARE_S = 1.0  # to end all processes


def count_cores() -> int:
    """Return the number of CPUs that this process may use."""
    return here.usable_cpus()


def measure_costs(dataset: object, **options: Any) -> Costs:
    """Return the costs of samples and batches of a map-style dataset; see NOTE [ Measurements ].

    Args:
        options: the other attributes of `CostStudy`.

    Raises:
        DatasetError: no sample was loaded in time.
        WorkerError: a child process died.
        Exception: the error of the first sample that cannot be loaded.

    The dataset, and the random generators of this process, stay as they are: child processes load the samples; or if these
    would stall, this process does, with copies (NOTE [ Loading in this process ]).
    """
    return CostStudy(dataset, **options).run()


@dataclass
class CostStudy:
    """A measurement of the costs of a dataset.

    Attributes:
        batch_sizes: those of the settings to predict.
        make_loader: makes a DataLoader from the arguments of torch's.
        time_limit_s: seconds after which it ends. The fewer samples it could load by then, the less exact are the costs.
        codecs: the ways to cache that are of interest; those whose package is not installed are left out.
        collate_fn: makes the batches; None for torch's function, or for lists where that does not take the samples.
        transform: called with each sample after the cache, as `CachedDataset` does.
        allow_pickle: as for `CachedDataset`.
        passes: how often epochs are run; a disturbance of one pass is unlikely to be in the others, too.
        on_progress: called with the seconds so far, and the name of the measurement that begins.
    """

    dataset: Any
    batch_sizes: Sequence[int]
    make_loader: MakeLoader
    time_limit_s: float
    codecs: Sequence[str | None] = (None, "lz4", "zstd")
    collate_fn: Callable[[list[Any]], Any] | None = None
    transform: Callable[[Any], Any] | None = None
    allow_pickle: bool = False
    passes: int = 2
    on_progress: Callable[[float, str], None] = lambda seconds, what: None

    def __post_init__(self) -> None:
        self._length, self._cores, self._began = len(self.dataset), count_cores(), time.monotonic()
        largest, smallest = max(self.batch_sizes), min(self.batch_sizes)
        self._group = min(smallest, self._length) if get_many_of(self.dataset) is not None else 1
        self._sizes = (largest, max(1, min(smallest, largest // 4)))
        self._order = _random_order(self._length)
        self._items: list[Any] = []  # that the child has sent
        self._busy: list[Loads] = []  # while all CPUs load
        self._missing: list[str] = []
        self._split: Split | None = None  # if transforms run after the cache
        self._stalls = False  # whether children stall, or cannot be made, so that this process loads

    @property
    def _left_s(self) -> float:
        return self._began + self.time_limit_s - _SPARE_S - time.monotonic()

    def _report(self, what: str) -> None:
        self.on_progress(time.monotonic() - self._began, what)

    def _of(self, kind: type[_T]) -> list[_T]:
        return [item for item in self._items if isinstance(item, kind)]

    def run(self) -> Costs:
        """Return the costs."""
        self._report("loading samples")
        first = self._load_first()
        self._plan_split(first.first_s[0])
        self._measure_here(first.first_s[0])
        self._report("loading samples with all CPUs")
        self._measure_busy()
        costs = self._assemble(first)
        self._report("done")
        return costs

    def _load_first(self) -> Loads:
        """Return the first load of one sample."""
        patience_s = self._left_s * _FIRST_SHARE
        load_many = SampleLoader(self.dataset).load_many
        job = partial(time_loads, load_many, self._order[:1], 1, 0.0, lambda sample: None)
        try:
            with contextlib.closing(in_children([job], self.dataset, patience_s)) as items:
                return next(items)  # type: ignore[no-any-return]
        except SlowError as error:
            raise DatasetError(f"{type(self.dataset).__name__}: no sample was loaded in {patience_s:.0f} s: {error}") from error
        except ChildError as error:
            why = "forked workers would stall" if isinstance(error, StalledError) else f"{error}"
            self._stalls = True
            self._missing.append(f"{why}: settings with workers are left out; try worker threads")
            return next(run_here(job))  # type: ignore[no-any-return]

    def _plan_split(self, load_s: float) -> None:
        """Find out which transforms run after the cache, if that does not take long."""
        if load_s * _SPLIT_LOADS > self._left_s / 2:
            self._missing.append("samples are too slow to find out whether transforms can run after the cache")
            return
        with contextlib.suppress(StocacheError):
            split = plan_split(self.dataset, self._length, recommended_limit(), None, False, False)
            self._split = split if split is not None and split.has_rest else None

    def _measure_here(self, load_s: float) -> None:
        left_s = self._left_s
        try:
            job = partial(self._load_and_run, left_s, load_s)
            patience_s = max(0.5, left_s * _EPOCHS_SHARE)
            found_items = run_here(job) if self._stalls else in_children([job], self.dataset, patience_s)
            with contextlib.closing(found_items) as items:
                for item in items:
                    self._take(item)
                    if self._left_s < 0:
                        break
        except (ChildError, WorkerError) as error:
            if not self._of(Loads) and isinstance(error, WorkerError):
                raise
            self._missing.append(f"measuring ended early: {error}")

    def _take(self, item: object) -> None:
        self._items.append(item)
        if isinstance(item, FilledCache):
            self._report("batches, not cached" if item.way == UNCACHED else f"batches, cached, codec {item.way}")
        elif isinstance(item, EpochRun):
            self._report(f"batches of {item.batch_size} with {item.workers} workers")
        elif isinstance(item, str):
            self._missing.append(item)

    def _measure_busy(self) -> None:
        processes = 1 if self._stalls else min(self._cores, _MOST_WORKERS)
        loads = self._of(Loads)
        alone = [idx for each in loads if each.again_s for idx in each.indices]
        seconds = [second for each in loads for second in each.seconds]
        each_s = 2 * self._group * (statistics.mean(seconds) if seconds else 0.0)
        budget_s = min(_BUSY_S + each_s, self._left_s * 0.9)
        if processes < 2:
            return
        if not alone or budget_s < each_s:
            self._missing.append("loads with all CPUs were not timed; they are assumed to cost as much as alone")
            return
        rest = self._order[len(alone) :]
        jobs = [
            partial(self._load_busy, [alone[number::processes], rest[number::processes]], budget_s)
            for number in range(processes)
        ]
        try:
            with contextlib.closing(in_children(jobs, self.dataset, max(0.5, self._left_s))) as items:
                self._busy += items
        except (ChildError, WorkerError) as error:
            self._missing.append(f"loads with all CPUs were not timed: {error}")

    @property
    def _load_many(self) -> LoadMany:
        return SampleLoader(self.dataset).load_many if self._split is None else self._split.load_many

    def _load_and_run(self, left_s: float, load_s: float) -> Iterator[Any]:
        began, samples, size = time.monotonic(), list[Any](), 0

        def keep(sample: object) -> None:
            nonlocal size
            if not samples or (len(samples) < _KEPT and size < _KEPT_BYTES):
                samples.append(sample)
                size += nbytes_of(sample)

        finish = self.transform
        if self._split is not None:
            rest = partial(self._split.finish, self._order[0])
            finish = rest if finish is None else partial(_both, rest, finish)
        processes = min(self._cores, _MOST_WORKERS)
        workers = (0,) if self._stalls else (processes, 1, 0, min(2 * self._cores, _MOST_WORKERS))
        trials = EpochTrials(
            ways=(None, UNCACHED, *(codec for codec in self.codecs if codec is not None)),
            workers=tuple(dict.fromkeys(workers)),
            batch_sizes=tuple(dict.fromkeys(self._sizes)),
            most=min(self._length, _MOST),
            cache_bytes=min(CACHE_BYTES, recommended_limit() // 16),
            make_loader=self.make_loader,
            collate_fn=self.collate_fn,
            allow_pickle=self.allow_pickle,
            passes=self.passes,
            until=began + min(left_s * _EPOCHS_SHARE, left_s - _BUSY_S - 3 * self._group * load_s),
        )
        budget_s = min(left_s * _ALONE_SHARE, max(_ALONE_S, 8 * self._group * load_s))
        with _quiet():
            yield from time_loads(self._load_many, self._order, self._group, budget_s, keep)
            yield from run_epochs(samples, finish, trials)

    def _load_busy(self, parts: Sequence[Sequence[int]], budget_s: float) -> Iterator[Loads]:
        with _quiet():
            yield from time_busy_loads(self._load_many, parts, self._group, budget_s)

    def _assemble(self, first: Loads) -> Costs:
        loads = self._of(Loads) or [first]
        both = [each for each in loads if each.again_s]
        alone_s = [second for each in both or loads for second in each.seconds]
        cpu_s = sum(each.cpu_s for each in both or loads)
        loads_s, busy_ratio = self._with_busy(alone_s, cpu_s / len(alone_s))
        cold_s = sum(sum(each.first_s) for each in both) + first.first_s[0] * bool(both)
        again_s = sum(sum(each.again_s) for each in both) + (both[0].again_s[0] if both else 0.0)
        begins = [run.begin_s / run.workers for run in self._of(EpochRun) if run.workers > 1]
        return Costs(
            samples=self._length,
            cores=self._cores,
            loads_s=tuple(loads_s),
            ways=self._ways(),
            batch_sizes=(min(self._sizes), max(self._sizes)),
            cpu_share=min(1.0, cpu_s / max(sum(alone_s), 1e-12)),
            busy_ratio=busy_ratio,
            cold_ratio=max(1.0, cold_s / again_s) if again_s > 0 else 1.0,
            batch_bytes=max((cached.batch_bytes for cached in self._of(FilledCache)), default=0.0),
            worker_start_s=max(0.0, statistics.median(begins)) if begins else 0.0,
            timed=len(loads_s),
            has_transform=self._split is not None,
            took_s=time.monotonic() - self._began,
            missing=tuple(self._missing),
            stalls=self._stalls,
        )

    def _with_busy(self, alone_s: list[float], alone_cpu_s: float) -> tuple[list[float], float]:
        """Return the seconds of all loads as they would be alone, and the `Costs.busy_ratio`."""
        known = set(self._order[: len(alone_s)])
        same = [loads for loads in self._busy if loads.indices and loads.indices[0] in known]
        others = [loads for loads in self._busy if loads.indices and loads.indices[0] not in known]
        count = sum(len(loads.indices) for loads in same)
        if count < len(alone_s) / 2 or alone_cpu_s <= 0:
            return alone_s, 1.0
        ratio = sum(loads.cpu_s for loads in same) / count / alone_cpu_s
        slower = sum(second for loads in same for second in loads.again_s) / count / statistics.mean(alone_s)
        return alone_s + [second / slower for loads in others for second in loads.again_s], max(1.0, ratio)

    def _ways(self) -> Mapping[str | None, WayCosts]:
        ways, costs = {}, fit_costs(self._of(EpochRun), self._cores)
        for cached in self._of(FilledCache):
            by_workers = {workers: each for (way, workers), each in costs.items() if way == cached.way}
            if by_workers:
                fewest = by_workers[min(by_workers)]
                by_workers.setdefault(0, BatchCosts(fewest.sample_s, fewest.batch_s))  # about
                by_workers.setdefault(1, by_workers[min((number for number in by_workers if number), default=0)])
                ways[cached.way] = WayCosts(by_workers, cached.sample_bytes, cached.extra_bytes, cached.fill_s)
        if UNCACHED not in ways:
            ways[UNCACHED] = WayCosts({0: BatchCosts(0, 0), 1: BatchCosts(0, 0)})
            self._missing.append("batches could not be timed; they are assumed to cost nothing")
        return ways


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log errors only, and warn of nothing."""
    level = logger.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs, which is wanted
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _random_order(length: int) -> list[int]:
    """Return indices of a dataset in random order, each once: all of them, or as many as could be loaded in the time."""
    rng = np.random.default_rng(0)
    indices = np.arange(length) if length <= _MOST_ORDERED else np.unique(rng.integers(0, length, _MOST_ORDERED))
    order: list[int] = rng.permutation(indices).tolist()
    return order


def _both(first: Callable[[Any], object], second: Callable[[Any], object], sample: object) -> Any:
    return second(first(sample))


def fit_costs(runs: Sequence[EpochRun], cores: int) -> dict[tuple[str | None, int], BatchCosts]:
    """Return the costs that explain runs, by way and number of workers."""
    best: dict[tuple[str | None, int], list[EpochRun]] = {}
    for key in dict.fromkeys((run.way, run.workers) for run in runs):
        best[key] = _best_of([run for run in runs if (run.way, run.workers) == key])
    costs = {
        key: BatchCosts(*_line(own, "workers_s"), *_line(own, "main_s")) if key[1] else BatchCosts(*_line(own, "main_s"))
        for key, own in best.items()
    }
    # the time of a batch beyond the model is alike for all ways, and too small to be measured with one of them
    slopes = [(key[1], _slope(own, costs[key], cores)) for key, own in best.items() if key[1] and len(own) > 1]
    for key, own in best.items():
        if key[1]:
            alike = [slope for workers, slope in slopes if workers == key[1]]
            costs[key] = replace(costs[key], wake_s=max(0.0, statistics.median(alike)) if alike else 0.0)
            rests_s = {run.batch_size: _rest_s(run, costs[key], cores) for run in own}
            small, large = min(rests_s), max(rests_s)
            sample_s = (rests_s[large] - rests_s[small]) / (large - small) if large > small else 0.0
            costs[key] = replace(costs[key], start_s=rests_s[small] - small * sample_s, start_sample_s=sample_s)
    return costs


def _best_of(runs: Sequence[EpochRun]) -> list[EpochRun]:
    """Return one run for each batch size, with the shorter times of its passes."""
    best = []
    for size in dict.fromkeys(run.batch_size for run in runs):
        own = [run for run in runs if run.batch_size == size]
        least = {name: min(getattr(run, name) for run in own) for name in ("epoch_s", "main_s", "workers_s", "begin_s")}
        best.append(own[0]._replace(**least))
    return best


def _rest_s(run: EpochRun, costs: BatchCosts, cores: int) -> float:
    """Return the seconds that a run takes beyond the model."""
    cpu_s = [costs.batch_s + costs.sample_s * run.batch_size] * run.batches
    main_s = [costs.main_batch_s + costs.main_sample_s * run.batch_size] * run.batches
    return run.epoch_s - simulate(cpu_s, [costs.wake_s] * run.batches, main_s, 0.0, run.workers, cores)[-1]


def _slope(runs: Sequence[EpochRun], costs: BatchCosts, cores: int) -> float:
    """Return the seconds that one more batch of each worker takes beyond the model."""
    one, other = runs[0], runs[-1]
    more = (other.batches - one.batches) / one.workers
    return (_rest_s(other, costs, cores) - _rest_s(one, costs, cores)) / more if more else 0.0


def _line(runs: Sequence[EpochRun], name: str) -> tuple[float, float]:
    """Return the seconds of a sample and of a batch; all of them of the sample, if one batch size was measured.

    Those of a batch may be negative: samples of large batches cost more, because they do not stay in the CPU caches.
    """
    each_s = {run.batch_size: getattr(run, name) / run.batches for run in runs}
    small, large = min(each_s), max(each_s)
    if small == large:
        return each_s[large] / large, 0.0
    sample_s = max(0.0, (each_s[large] - each_s[small]) / (large - small))
    return sample_s, each_s[large] - sample_s * large
