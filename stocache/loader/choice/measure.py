"""Run short epochs of the real loader over a part of a dataset, in a child process, for each setting that is worth a try.

NOTE [ Measurements ]
    A child process loads some samples one by one. From their times follows the number of samples of an epoch. With one cache,
    the epochs of all settings run over the same part of the dataset, in which there are some batches for each worker. If
    samples are slow, the batches are smaller. The first epoch of a setting is not timed: it starts the workers and fills the
    cache, whose limit is as large a share of the part as the limit of the setting is of the dataset. Of the others the shortest
    counts, because other programs only make an epoch longer. The numbers of workers are tried in order, until more of them make
    epochs no shorter.
"""

import contextlib
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import Subset, default_collate
from torch.utils.data._utils import worker as torch_worker  # for get_worker_info, which has no public counterpart

from stocache.datasets.cached import CachedDataset
from stocache.datasets.loaders import SampleLoader
from stocache.errors import CodecError, DatasetError, SampleError
from stocache.system.generators import Kept
from stocache.system.limits import MIB, recommended_limit
from stocache.system.loading.children import ChildError, SlowError, in_children
from stocache.system.loading.fallback import run_here

logger = logging.getLogger("stocache")

MakeLoader = Callable[..., Any]
"""Makes a DataLoader from a dataset and the arguments of `DataLoader`."""

SAME = 1.05  # settings whose times differ by less are taken to be equally fast

_LOADS, _LOADS_S = 64, 0.5  # samples that are loaded one by one
_SPLIT_LOADS = 80  # loads for finding out where to split transforms
_BATCHES = 4  # of each worker in an epoch, at least
_BATCH_S = 0.1  # of a batch, at most
_EPOCH_S, _TIMED_S = 0.1, 0.3  # of an epoch without workers, and of all of a setting, at least
_FILL_S = 2.0  # for loading the samples of a cache, at most
_MOST = 8192  # samples of an epoch
_EPOCHS_SHARE = 0.8  # of the time, after which no epoch goes on
_OVERHEAD = 32  # bytes of a cache for each sample of the dataset, at most


@dataclass(frozen=True)
class Setting:
    """Options of a loader and of the cache of its dataset; no cache if ``limit_bytes`` is 0."""

    workers: int
    batch_size: int
    limit_bytes: int = 0
    codec: str | None = None
    method: str = "multiprocessing"


class Epoch(NamedTuple):
    """A setting, and the seconds of an epoch for each of its samples."""

    setting: Setting
    sample_s: float

    def with_step(self, step_s: float) -> float:
        """Return the seconds for each sample, if the training step takes ``step_s`` of them and no CPU time."""
        return max(self.sample_s, step_s) if self.setting.workers else self.sample_s + step_s


class Samples(NamedTuple):
    """What is known of samples.

    Attributes:
        timed: number of samples that were loaded.
        load_s: the mean seconds of a load.
        draws: whether samples draw from the global random number generators.
        cached_bytes: bytes of a sample in the cache, by codec.
        left_out: the reasons why codecs are not among these.
    """

    timed: int
    load_s: float
    draws: bool
    cached_bytes: Mapping[str | None, float]
    left_out: tuple[str, ...] = ()

    def limit_for(self, codec: str | None, length: int) -> int:
        """Return the bytes of a cache that holds ``length`` samples."""
        return int(length * (self.cached_bytes[codec] + _OVERHEAD)) + MIB


@dataclass(frozen=True)
class Study:
    """The settings to try.

    Attributes:
        make_loader: makes the loader.
        workers: numbers of workers, in increasing order.
        batch_sizes: samples of a batch.
        methods: values of ``worker_method``; threads are left out if samples draw from the global generators.
        codecs: the ways to cache that are of interest.
        choose_caches: returns limits in bytes and codecs.
        collate_fn: of the user; None for torch's, or for lists if that does not work.
        options: further arguments of `CachedDataset`.
        time_limit_s: seconds after which it ends.
        step_s: of the training step, for each sample.
        on_progress: called with the seconds so far, and the setting that was measured last.
    """

    make_loader: MakeLoader
    workers: Sequence[int]
    batch_sizes: Sequence[int]
    methods: Sequence[str] = ("multiprocessing",)
    codecs: Sequence[str | None] = ()
    choose_caches: Callable[[Samples], Sequence[tuple[int, str | None]]] = lambda samples: [(0, None)]
    collate_fn: Callable[[list[Any]], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    time_limit_s: float = 10.0
    step_s: float = 0.0
    on_progress: Callable[[float, str], None] = lambda seconds, what: None


def measure(dataset: Any, study: Study) -> tuple[Samples, list[Epoch]]:
    """Return what is known of the samples, and the epochs that could be run in time; see NOTE [ Measurements ].

    Raises:
        DatasetError: no sample was loaded in time.
        WorkerError: a child process died.
        Exception: the error of a sample that cannot be loaded.

    If no child process can load samples, or if these would stall, this process does, with a copy of the dataset and without
    workers. The dataset, and the random generators of this process, stay unchanged.
    """
    began, found = time.monotonic(), list[Any]()
    until, patience_s = began + study.time_limit_s * _EPOCHS_SHARE, study.time_limit_s / 2
    try:
        with closing(in_children([partial(_run, dataset, study, until)], dataset, patience_s)) as items:
            for item in items:
                found.append(item)
                if isinstance(item, Epoch):
                    study.on_progress(time.monotonic() - began, f"{item.setting.workers} workers")
    except SlowError as error:
        if not found:
            raise DatasetError(f"{type(dataset).__name__}: no sample was loaded in {patience_s:.0f} s: {error}") from error
    except ChildError as error:
        logger.debug("settings with workers are left out: %s", str(error))
        alone = replace(study, workers=(0,), methods=("multiprocessing",))
        found = list(run_here(partial(_run, dataset, alone, until)))
    return found[0], found[1:]


def _run(dataset: Any, study: Study, until: float) -> Iterator[Samples | Epoch]:
    told, torch_worker._worker_info = torch_worker._worker_info, None  # in a worker torch stacks into shared memory
    try:
        with _quiet():
            order = random.Random(0).sample(range(len(dataset)), min(len(dataset), _MOST))
            samples = _load(dataset, study, order, until)
            yield samples
            for limit, codec in study.choose_caches(samples):
                yield from _run_epochs(dataset, study, samples, order, limit, codec, until)
    finally:
        torch_worker._worker_info = told


def _load(dataset: Any, study: Study, order: Sequence[int], until: float) -> Samples:
    """Load some samples one by one, and put as many into a cache for each codec."""
    load_many, monitor, began = SampleLoader(dataset).load_many, Kept(), time.monotonic()
    seconds = list[float]()
    for idx in order[:_LOADS]:
        if len(seconds) > 1 and time.monotonic() - began > _LOADS_S:
            break
        start = time.perf_counter()
        list(load_many([idx]))
        seconds.append(time.perf_counter() - start)
    load_s, draws = statistics.mean(seconds[1:] or seconds), monitor.drawn()  # the first opens files
    cached_bytes, left_out = {}, list[str]()
    for codec in study.codecs:
        try:
            with _cache(Subset(dataset, order[: len(seconds)]), sys.maxsize, codec, study, load_s, until) as cached:
                for idx in range(len(cached)):
                    cached[idx]
                cached_bytes[codec] = float(cached.cache.stats().slot_bytes)
        except (SampleError, CodecError) as error:
            left_out.append(f"{'the cache' if codec is None else f'codec={codec!r}'} is left out: {error}")
    return Samples(len(seconds), load_s, draws, cached_bytes, tuple(left_out))


def _cache(part: Any, limit: int, codec: str | None, study: Study, load_s: float, until: float) -> CachedDataset:
    split = load_s * _SPLIT_LOADS < (until - time.monotonic()) / 2
    limit = min(limit, recommended_limit() // 4)
    options: Any = {"codec": codec, "split": split, "audit": 0, **study.options}
    return CachedDataset(part, f"{limit}B", **options)


def _run_epochs(
    dataset: Any, study: Study, samples: Samples, order: list[int], limit: int, codec: str | None, until: float
) -> Iterator[Epoch]:
    """Yield the epochs with one cache, or with none."""
    length = len(dataset)
    share = min(1.0, limit / samples.limit_for(codec, length)) if limit else 0.0
    missed_s = max(samples.load_s * (1 - share), 1e-9)
    most = max(2, int(_FILL_S / max(samples.load_s, 1e-9))) if limit else _MOST
    sizes = {size: max(1, min(size, int(_BATCH_S / missed_s), most // 2)) for size in study.batch_sizes}
    count = max(_BATCHES * max(1, *study.workers) * max(sizes.values()), int(_EPOCH_S / missed_s))
    part: Any = Subset(dataset, order[: min(count, most)])
    if limit or study.options.get("transform") is not None:
        part = _cache(part, limit * len(part) // length + MIB * (share == 1), codec, study, samples.load_s, until)
    with part if isinstance(part, CachedDataset) else nullcontext():
        collate_fn = study.collate_fn or _collate_for([part[0], part[min(1, len(part) - 1)]])
        for method in study.methods:
            if method == "thread" and samples.draws:
                continue
            for size, timed_size in sizes.items():
                best_s = math.inf
                for workers in study.workers:
                    if not workers and method != study.methods[0]:
                        continue
                    options = {"num_workers": workers, "persistent_workers": workers > 0, "worker_method": method}
                    loader = study.make_loader(part, timed_size, shuffle=True, collate_fn=collate_fn, **options)
                    sample_s = _time(loader, len(part), until)
                    loader.end_workers()
                    if sample_s is None:
                        return
                    yield Epoch(Setting(workers, size, limit, codec, method), sample_s)
                    if (workers > 1 and sample_s * SAME > best_s) or (workers and sample_s <= study.step_s):
                        break
                    best_s = min(best_s, sample_s)


def _time(loader: Any, samples: int, until: float) -> float | None:
    """Return the seconds of the shortest epoch for each sample; None if the time is over before one ends."""
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds[1:]) < _TIMED_S:
        start = time.perf_counter()
        for _ in loader:
            if time.monotonic() > until:
                return min(seconds[1:]) / samples if seconds[1:] else None
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) / samples


def _collate_for(samples: list[Any]) -> Callable[[list[Any]], Any]:
    """Return torch's collate function; `list` if it does not take such samples."""
    try:
        default_collate(samples)
    except (TypeError, RuntimeError, ValueError, KeyError, AttributeError):
        return list
    return default_collate


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
