"""Run short epochs of the real loader over samples in memory, cached and not."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import worker as torch_worker  # for get_worker_info, which has no public counterpart

from stocache.cache.shared import SharedCache
from stocache.datasets.cached import CachedDataset
from stocache.errors import CodecError, SampleError
from stocache.observe.costs import UNCACHED
from stocache.samples.codecs import Codec
from stocache.system.limits import MIB
from stocache.system.waiting import cpu_seconds

MakeLoader = Callable[..., Any]
"""Makes a DataLoader from a dataset and the arguments of torch's DataLoader."""

CACHE_BYTES = 160 * MIB  # of a cache to measure: more than the CPU caches hold
_FILL_S = 0.8  # to fill one
_ROUND_S, _ROUNDS = 0.1, 3  # at least, for the epochs of one setting
_WARM_UP, _WARM_UP_S = 2, 0.2  # epochs that are not timed; and seconds, up to which there are 3 more for each worker
_CHUNK = 32  # samples that are put into a cache together


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


class SkippedWay(NamedTuple):
    """A way that does not work, and why."""

    way: str | None
    reason: str


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


class _Repeated(Dataset[Any]):
    """A dataset that repeats some samples up to ``length``."""

    def __init__(self, samples: Sequence[Any], length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int) -> Any:
        return self._samples[idx % len(self._samples)]


def run_epochs(
    samples: Sequence[Any], finish: Callable[[Any], Any] | None, trials: EpochTrials
) -> Iterator[FilledCache | EpochRun | SkippedWay]:
    """Yield the costs of epochs over ``samples``. ``finish`` is called with each sample after the cache.

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
                yield SkippedWay(way, str(error))
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
                        yield _run(way, dataset, workers, size, collate_fn, trials.make_loader)


def _prepare(
    way: str | None, samples: Sequence[Any], finish: Callable[[Any], Any] | None, trials: EpochTrials
) -> tuple[CachedDataset, FilledCache, Callable[[list[Any]], Any]]:
    """Return a dataset for a way, with its cache filled, the costs of filling it, and the collate function."""
    about, least = max(1, nbytes_of(samples[0])), 2 * max(trials.batch_sizes)
    length = max(least, min(trials.most, trials.cache_bytes // about))
    limit = 0 if way == UNCACHED else 4 * trials.cache_bytes + 2 * length * about
    if limit:
        with _cached(samples, length, limit, None, way, trials.allow_pickle) as first:
            length = min(length, max(least, _length_for(first, samples)))
    dataset = _cached(samples, length, limit, finish, way, trials.allow_pickle)
    fill_s = _fill(dataset, samples, range(length)) / length if limit else 0.0
    stats = dataset.cache.stats()
    shared = isinstance(dataset.cache, SharedCache)  # whose capacity is that of all samples, if the limit is more
    extra = 0.0 if not limit else 1.0 if shared else (limit - stats.capacity_bytes) / length
    collate_fn = trials.collate_fn or _collate_for([dataset[0], dataset[min(1, length - 1)]])
    batch_bytes = nbytes_of(collate_fn([dataset[0]]))
    return dataset, FilledCache(way, length, float(stats.slot_bytes), extra, fill_s, batch_bytes), collate_fn


def _cached(
    samples: Sequence[Any], length: int, limit: int, finish: Callable[[Any], Any] | None, way: str | None, allow_pickle: bool
) -> CachedDataset:
    options: Any = {"codec": None if way == UNCACHED else way, "split": False, "audit": 0, "allow_pickle": allow_pickle}
    return CachedDataset(_Repeated(samples, length), f"{limit}B", transform=finish, **options)


def _length_for(dataset: CachedDataset, samples: Sequence[Any]) -> int:
    """Return how many samples can be put into a cache in `_FILL_S`."""
    count = min(16, len(dataset))
    took_s = _fill(dataset, samples, range(count)) / max(1, count)
    return int(_FILL_S / max(took_s, 1e-9))


def _fill(dataset: CachedDataset, samples: Sequence[Any], indices: range) -> float:
    """Put samples into the cache. Return the CPU seconds."""
    cpu_s, count = time.process_time(), len(samples)
    for start in range(0, len(indices), _CHUNK):
        some = list(indices[start : start + _CHUNK])
        dataset.cache.get_or_load_many(some, lambda wanted: [samples[idx % count] for idx in wanted], copy=False, strict=False)
    return time.process_time() - cpu_s


def _collate_for(samples: list[Any]) -> Callable[[list[Any]], Any]:
    """Return torch's collate function; `list` if it does not take such samples."""
    try:
        default_collate(samples)
    except (TypeError, RuntimeError, ValueError, KeyError, AttributeError):
        return list
    return default_collate


def _run(
    way: str | None,
    dataset: CachedDataset,
    workers: int,
    size: int,
    collate_fn: Callable[[list[Any]], Any],
    make_loader: MakeLoader,
) -> EpochRun:
    loader = make_loader(
        dataset, batch_size=size, shuffle=True, num_workers=workers, persistent_workers=workers > 0, collate_fn=collate_fn
    )
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
    _end(loader, workers)
    return EpochRun(way, workers, size, len(dataset), statistics.median(seconds), main_s, workers_s, begin_s)


def _end(loader: Any, workers: int) -> None:
    """End the workers of a loader, and wait until they have ended."""
    if workers:
        loader._iterator = None
        children = multiprocessing.active_children()
        del loader
        for child in children:
            child.join(5)


def nbytes_of(value: Any) -> int:
    """Return the approximate number of bytes of the values in a sample or a batch."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return sum(leaf.nbytes if isinstance(leaf, Tensor) or hasattr(leaf, "nbytes") else _plain_bytes(leaf) for leaf in leaves)


def _plain_bytes(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, str | bytes | bytearray) else 8
