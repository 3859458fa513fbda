"""Time loads of samples, and run short epochs of the real loader over samples in memory, cached and not.

The process that does it is a child: see `stocache.system.loading.children`.
"""

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker  # for get_worker_info, which has no public counterpart

from stocache.cache.shared import SharedCache
from stocache.datasets.cached import CachedDataset
from stocache.errors import CodecError, SampleError
from stocache.loader.choice.model import UNCACHED
from stocache.samples.codecs import Codec
from stocache.system.limits import MIB
from stocache.system.waiting import cpu_seconds

LoadMany = Callable[[list[int]], Iterable[Any]]
"""Called with indices. Returns, or yields, their samples."""

MakeLoader = Callable[..., Any]
"""Makes a DataLoader from a dataset and the arguments of torch's DataLoader."""

_MOST_TOGETHER = 32  # groups
_WARM_UP_LOADS = 16  # samples

CACHE_BYTES = 160 * MIB  # of a cache to measure: more than the CPU caches hold
_FILL_S = 0.8  # to fill one
_ROUND_S, _ROUNDS = 0.1, 3  # at least, for the epochs of one setting
_WARM_UP, _WARM_UP_S = 2, 0.2  # epochs that are not timed; and seconds, up to which there are 3 more for each worker
_CHUNK = 32  # samples that are put into a cache together


class Loads(NamedTuple):
    """The times of some loads.

    Attributes:
        indices: the samples.
        first_s: the seconds of each, when it was loaded first; empty if that was not timed.
        again_s: the seconds of each, when it was loaded again; empty if there was no time for that.
        cpu_s: CPU seconds of all of ``again_s``; without them, of ``first_s``.
    """

    indices: tuple[int, ...]
    first_s: tuple[float, ...]
    again_s: tuple[float, ...]
    cpu_s: float

    @property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of each, when it was loaded last."""
        return self.again_s or self.first_s


def time_loads(
    load_many: LoadMany, indices: Sequence[int], group: int, budget_s: float, keep: Callable[[Any], None]
) -> Iterator[Loads]:
    """Load each sample twice, for ``budget_s``; at least one sample once. Yield the loads of some samples together.

    Args:
        group: samples for each call of ``load_many``.
        keep: called with each sample.

    A sample is loaded again after up to 31 others, as in an epoch, where it is not in the CPU caches.
    """
    began, most, left, longest_s = time.perf_counter(), 1, iter(indices), 0.0
    while part := tuple(islice(left, most * group)):
        if longest_s and time.perf_counter() - began + longest_s > budget_s:
            return
        first_s, cpu_s = _time(load_many, part, group, keep)
        again_s: tuple[float, ...] = ()
        if time.perf_counter() - began + sum(first_s) <= budget_s:
            again_s, cpu_s = _time(load_many, part, group)
        longest_s = sum(first_s) + sum(again_s)
        if most < _MOST_TOGETHER and longest_s < budget_s / 16:
            most, longest_s = 2 * most, 2 * longest_s
        yield Loads(part, first_s, again_s, cpu_s)


def time_busy_loads(load_many: LoadMany, parts: Sequence[Sequence[int]], group: int, budget_s: float) -> Iterator[Loads]:
    """Load ``parts`` for ``budget_s``, while other processes load other samples. Yield one item for each part.

    The first loads are not timed: a forked process copies the pages that it writes to.
    """
    began = time.perf_counter()
    _time(load_many, parts[0][:_WARM_UP_LOADS], 1, until=began + budget_s / 10)
    for part in parts:
        again_s, cpu_s = _time(load_many, part, group, until=began + budget_s)
        yield Loads(tuple(part[: len(again_s)]), (), again_s, cpu_s)


def _time(
    load_many: LoadMany,
    indices: Sequence[int],
    group: int,
    keep: Callable[[Any], None] = lambda sample: None,
    until: float = math.inf,
) -> tuple[tuple[float, ...], float]:
    """Return the seconds of each load, and the CPU seconds. The time of a call is divided evenly among its samples."""
    seconds, left, cpu_s = list[float](), iter(indices), time.process_time()
    while time.perf_counter() < until and (part := list(islice(left, group))):
        began = time.perf_counter()
        samples = list(load_many(part))
        seconds += [(time.perf_counter() - began) / len(part)] * len(part)
        for sample in samples:
            keep(sample)
    return tuple(seconds), time.process_time() - cpu_s


class FilledCache(NamedTuple):
    """The samples of one way in memory, and the costs of filling. ``way`` is a codec, None or `UNCACHED`."""

    way: str | None
    samples: int
    sample_bytes: float
    extra_bytes: float
    fill_s: float
    batch_bytes: float


class EpochRun(NamedTuple):
    """Epochs of one setting: the median of their seconds, and the mean CPU seconds of an epoch.

    Attributes:
        begin_s: seconds from the start of the first epoch to its first batch.
        main_s: CPU seconds of the main process in an epoch.
        workers_s: CPU seconds of all workers in an epoch.
    """

    way: str | None
    workers: int
    batch_size: int
    samples: int
    epoch_s: float
    main_s: float
    workers_s: float
    begin_s: float

    @property
    def batches(self) -> int:
        """The batches of an epoch."""
        return -(-self.samples // self.batch_size)


@dataclass(frozen=True)
class EpochTrials:
    """The epochs to run.

    Attributes:
        ways: codecs, None for the cache without one, and `UNCACHED`.
        workers: numbers of workers, the most important first.
        batch_sizes: two sizes, or one.
        most: the largest number of samples of an epoch.
        cache_bytes: of each cache.
        make_loader: makes the loader.
        collate_fn: the collate function of the user; None for torch's, or for lists where that does not work.
        passes: how often all epochs are run.
        until: the time, of `time.monotonic`, from which no more epochs begin.
        allow_pickle: as for `CachedDataset`.
    """

    ways: Sequence[str | None]
    workers: Sequence[int]
    batch_sizes: Sequence[int]
    most: int
    cache_bytes: int
    make_loader: MakeLoader
    collate_fn: Callable[[list[Any]], Any] | None
    passes: int
    until: float
    allow_pickle: bool = False


def run_epochs(
    samples: Sequence[object], finish: Callable[[Any], object] | None, trials: EpochTrials
) -> Iterator[FilledCache | EpochRun | str]:
    """Yield the costs of epochs over ``samples``; of a way that does not work, the reason. ``finish`` runs after the cache.

    In each pass all epochs are run once: another program that is busy for a moment disturbs an epoch in one pass only.
    """
    torch_worker._worker_info = None  # this child stands for the main process: in a worker, torch stacks into shared memory
    with ExitStack() as stack:
        datasets: list[tuple[str | None, CachedDataset, Callable[[list[Any]], Any]]] = []
        for way in trials.ways:
            if time.monotonic() > trials.until:
                break
            try:
                if way not in (None, UNCACHED):
                    Codec(str(way))
                dataset, cached, collate_fn = _prepare(way, samples, finish, trials)
            except (SampleError, CodecError) as error:
                yield f"{'the cache' if way is None else f'codec={way!r}'} is left out: {error}"
            else:
                stack.enter_context(dataset)
                datasets.append((way, dataset, collate_fn))
                yield cached
        for _ in range(trials.passes):
            for workers in trials.workers:
                for size in trials.batch_sizes:
                    for way, dataset, collate_fn in datasets:
                        if time.monotonic() > trials.until:
                            return
                        options = {"batch_size": size, "persistent_workers": workers > 0, "collate_fn": collate_fn}
                        loader = trials.make_loader(dataset, shuffle=True, num_workers=workers, **options)
                        times = _run(loader, workers)
                        _end(loader, workers)
                        yield EpochRun(way, workers, size, len(dataset), *times)


def _prepare(
    way: str | None, samples: Sequence[object], finish: Callable[[Any], object] | None, trials: EpochTrials
) -> tuple[CachedDataset, FilledCache, Callable[[list[Any]], Any]]:
    """Return a dataset for a way, with its cache filled, the costs of filling it, and the collate function."""

    def cached(length: int, finish: Callable[[Any], object] | None) -> CachedDataset:
        options: Any = {"codec": None if way == UNCACHED else way, "allow_pickle": trials.allow_pickle}
        return CachedDataset(repeated[:length], f"{limit}B", transform=finish, split=False, audit=0, **options)

    about, least = max(1, nbytes_of(samples[0])), 2 * max(trials.batch_sizes)
    length = max(least, min(trials.most, trials.cache_bytes // about))
    repeated = [samples[idx % len(samples)] for idx in range(length)]
    limit = 0 if way == UNCACHED else 4 * trials.cache_bytes + 2 * length * about
    if limit:
        with cached(length, None) as first:
            each_s = _fill(first, repeated[:16])
        length = min(length, max(least, int(_FILL_S / max(each_s, 1e-9))))
    dataset = cached(length, finish)
    fill_s = _fill(dataset, repeated[:length]) if limit else 0.0
    stats = dataset.cache.stats()
    shared = isinstance(dataset.cache, SharedCache)  # whose capacity is that of all samples, if the limit is more
    extra = 0.0 if not limit else 1.0 if shared else (limit - stats.capacity_bytes) / length
    collate_fn = trials.collate_fn or _collate_for([dataset[0], dataset[min(1, length - 1)]])
    batch_bytes = nbytes_of(collate_fn([dataset[0]]))
    return dataset, FilledCache(way, length, float(stats.slot_bytes), extra, fill_s, batch_bytes), collate_fn


def _fill(dataset: CachedDataset, samples: Sequence[object]) -> float:
    """Put samples into the cache, from index 0 on. Return the CPU seconds of each."""
    cpu_s, indices = time.process_time(), range(len(samples))
    for start in range(0, len(samples), _CHUNK):
        some = list(indices[start : start + _CHUNK])
        dataset.cache.get_or_load_many(some, partial(map, samples.__getitem__), copy=False, strict=False)
    return (time.process_time() - cpu_s) / max(1, len(samples))


def _collate_for(samples: list[Any]) -> Callable[[list[Any]], Any]:
    """Return torch's collate function; `list` if it does not take such samples."""
    try:
        default_collate(samples)
    except (TypeError, RuntimeError, ValueError, KeyError, AttributeError):
        return list
    return default_collate


def _run(loader: Any, workers: int) -> tuple[float, float, float, float]:
    """Return the seconds of an epoch, the CPU seconds of main process and workers in it, and the seconds to the first batch."""
    began, begin_s = time.perf_counter(), 0.0
    for number in range(_WARM_UP + 3 * workers):  # a worker gets other samples in each epoch, and maps their memory then
        if number >= _WARM_UP and time.perf_counter() - began > _WARM_UP_S:
            break
        for _ in loader:
            begin_s = begin_s or time.perf_counter() - began
    pids = [child.pid for child in multiprocessing.active_children()] if workers else []
    seconds: list[float] = []
    main_s, workers_s = time.process_time(), cpu_seconds(pids)
    while len(seconds) < _ROUNDS or sum(seconds) < _ROUND_S:
        began = time.perf_counter()
        for _ in loader:
            pass
        seconds.append(time.perf_counter() - began)
    count = len(seconds)
    main_s, workers_s = (time.process_time() - main_s) / count, (cpu_seconds(pids) - workers_s) / count
    return statistics.median(seconds), main_s, workers_s, begin_s


def _end(loader: Any, workers: int) -> None:
    """End the workers of a loader, and wait until they have ended."""
    if workers:
        loader._iterator = None
        for child in multiprocessing.active_children():
            child.join(5)


def nbytes_of(value: object) -> int:
    """Return the approximate number of bytes of the values in a sample or a batch."""
    count = 0
    for leaf in torch.utils._pytree.tree_leaves(value):
        text = isinstance(leaf, str | bytes | bytearray)
        count += leaf.nbytes if hasattr(leaf, "nbytes") else len(leaf) if text else 8
    return count
