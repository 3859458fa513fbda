"""Export the counts of named caches and loaders as metrics, in the text formats of OpenMetrics and Prometheus.

Nothing is kept between two scrapes: each reads shared memory. It needs prometheus-client, the extra ``metrics``, but not torch.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest

from stocache.cache.stats import CacheStats
from stocache.cli import listing
from stocache.cli.listing import NamedCache, NamedFile, NamedLoader
from stocache.observe.recording.histogram import BOUNDS_S, PER_DOUBLING
from stocache.observe.recording.record import (
    COLLATE_NS,
    CPU_NS,
    HAND_OVER_NS,
    HELD,
    LOAD_NS,
    LOOKS,
    MAKE_NS,
    QUEUED_NS,
    SAMPLES_MADE,
    WAIT_NS,
    Counted,
)

CACHE_LABELS = ("name", "kind")
LOADER_LABELS = ("cache", "loader", "rank", "pid")

_SHORTEST_S, _LONGEST_S = 5e-6, 300.0
_LAST = np.arange(np.searchsorted(BOUNDS_S, _SHORTEST_S), np.searchsorted(BOUNDS_S, _LONGEST_S), PER_DOUBLING)

BUCKET_BOUNDS = tuple(str(float(f"{bound:.6g}")) for bound in BOUNDS_S[_LAST])
"""The label ``le`` of the buckets, except the last. Rounded: the last digits of a power differ from machine to machine."""

_MOST_PROBLEMS = 20  # that are described

_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


# ---------------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True)
class _Metric:
    """A metric of which each cache or loader has one value.

    Attributes:
        name: without the prefix and ``_total``.
        value: returns the value from `NamedCache.stats`, `NamedLoader.counted`, or the object itself.
    """

    family: type[_Family]
    name: str
    text: str
    value: Callable[[Any], float]
    unit: str = ""

    def make(self, prefix: str, labels: Sequence[str]) -> _Family:
        return self.family(f"{prefix}_{self.name}", self.text, labels=labels, unit=self.unit)


def _seconds(word: int) -> Callable[[Counted], float]:
    return lambda counted: counted.sum(word) / 1e9


def _sum(word: int) -> Callable[[Counted], float]:
    return lambda counted: counted.sum(word)


_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily

_OF_CACHE = (  # of the NamedCache
    _Metric(_GAUGE, "alive", "1 if a process uses the cache, else 0.", lambda cache: cache.alive),
    _Metric(_GAUGE, "processes", "Processes that use the cache, as far as they are visible.", lambda cache: len(cache.holders)),
    _Metric(_GAUGE, "memory_bytes", "Memory that the cache takes, with states and counters.", lambda cache: cache.memory_bytes,
        "bytes"),
    _Metric(_GAUGE, "created_timestamp_seconds", "When the cache was created, seconds since 1970.", lambda cache: cache.created,
        "seconds"),
)  # fmt: skip
_OF_STATS: tuple[_Metric, ...] = (  # of its CacheStats
    _Metric(_COUNTER, "hits", "Samples that were served from the cache.", lambda stats: stats.hits),
    _Metric(_COUNTER, "misses", "Samples that were asked for and not cached.", lambda stats: stats.misses),
    _Metric(_COUNTER, "fills", "Samples that were cached.", lambda stats: stats.fills),
    _Metric(_COUNTER, "races", "Samples that another process or thread had cached first.", lambda stats: stats.races),
    _Metric(_COUNTER, "refused", "Samples not cached because the machine gave no memory.", lambda stats: stats.refused),
    _Metric(_COUNTER, "rejected", "Samples that were not cached because they did not fit.", lambda stats: stats.rejected),
    _Metric(_COUNTER, "damaged", "Samples that were lost from the disk.", lambda stats: stats.damaged),
    _Metric(_COUNTER, "load_seconds", "Time in which missed samples were loaded, over all processes and threads.",
        lambda stats: stats.load_s, "seconds"),
    _Metric(_COUNTER, "read_seconds", "Time in which samples were read from the disk, over all processes and threads.",
        lambda stats: stats.read_s, "seconds"),
    _Metric(_GAUGE, "dataset_samples", "Samples of the dataset.", lambda stats: stats.dataset_len),
    _Metric(_GAUGE, "capacity_samples", "The most samples that can be cached.", lambda stats: stats.slots),
    _Metric(_GAUGE, "filled_samples", "Samples that are cached now.", lambda stats: stats.filled),
    _Metric(_GAUGE, "filled_bytes", "Bytes of the samples that are cached now.", lambda stats: stats.filled_bytes, "bytes"),
    _Metric(_GAUGE, "capacity_bytes", "Bytes of samples that the cache can hold.", lambda stats: stats.capacity_bytes, "bytes"),
)  # fmt: skip
_OF_LOADER = (  # of the NamedLoader
    _Metric(_GAUGE, "alive", "1 if the loader's process or a worker runs, 0 if they were killed.", lambda loader: loader.alive),
    _Metric(_GAUGE, "workers", "Workers of the loader.", lambda loader: loader.counted.workers),
    _Metric(_GAUGE, "created_timestamp_seconds", "When the loader began to record, in seconds since 1970.",
        lambda loader: loader.created, "seconds"),
)  # fmt: skip
_OF_COUNTED: tuple[_Metric, ...] = (  # of its counts
    _Metric(_COUNTER, "batches", "Batches that were made. Some of them wait to be used.", lambda counted: counted.batches),
    _Metric(_COUNTER, "samples", "Samples of the batches that were made.", _sum(SAMPLES_MADE)),
    _Metric(_COUNTER, "make_seconds", "Time in which samples were made, without loading: reads of the cache, transforms.",
        _seconds(MAKE_NS), "seconds"),
    _Metric(_COUNTER, "cpu_seconds", "CPU time of the threads that make batches.", _seconds(CPU_NS), "seconds"),
    _Metric(_COUNTER, "queued_seconds", "Time in which these threads could run, but the CPUs were busy.",
        _seconds(QUEUED_NS), "seconds"),
    _Metric(_COUNTER, "gil_looks", "How often a waiting loop looked whether another thread holds the GIL.", _sum(LOOKS)),
    _Metric(_COUNTER, "gil_held", "How often another thread held it.", _sum(HELD)),
)  # fmt: skip
_HISTOGRAMS = (
    (WAIT_NS, "wait_seconds", "How long the loop waited for each batch."),
    (LOAD_NS, "load_seconds", "How long each sample took that was not in memory."),
    (COLLATE_NS, "collate_seconds", "How long it took to put each batch together, without loading."),
    (HAND_OVER_NS, "hand_over_seconds", "How long it took to bring each batch from a worker process to the loop."),
)


@dataclass
class _Families:
    """The families of one scrape, empty at first."""

    users: bool
    cache: list[tuple[_Metric, _Family]] = field(default_factory=list)
    stats: list[tuple[_Metric, _Family]] = field(default_factory=list)
    loader: list[tuple[_Metric, _Family]] = field(default_factory=list)
    counted: list[tuple[_Metric, _Family]] = field(default_factory=list)
    histograms: list[tuple[int, HistogramMetricFamily]] = field(default_factory=list)

    def __post_init__(self) -> None:
        user = ("user",) if self.users else ()
        of_cache, of_loader = (*CACHE_LABELS, *user), (*LOADER_LABELS, *user)
        self.cache = [(each, each.make("stocache_cache", of_cache)) for each in _OF_CACHE]
        self.stats = [(each, each.make("stocache_cache", of_cache)) for each in _OF_STATS]
        self.loader = [(each, each.make("stocache_loader", of_loader)) for each in _OF_LOADER]
        self.counted = [(each, each.make("stocache_loader", of_loader)) for each in _OF_COUNTED]
        self.histograms = [
            (word, HistogramMetricFamily(f"stocache_loader_{name}", text, labels=of_loader, unit="seconds"))
            for word, name, text in _HISTOGRAMS
        ]
        of_worker = (*LOADER_LABELS, "worker", *user)
        self.worker_waits = CounterMetricFamily(
            "stocache_loader_worker_wait_seconds", "Time in which the loop waited for batches of this worker.",
            labels=of_worker, unit="seconds",
        )  # fmt: skip
        self.worker_batches = CounterMetricFamily(
            "stocache_loader_worker_batches", "Batches of this worker that the loop has received.", labels=of_worker
        )
        self.unreadable = GaugeMetricFamily("stocache_unreadable_files", "Files that are not a readable cache or loader.")
        self.problem = InfoMetricFamily(
            "stocache_unreadable_file", f"Why a file cannot be read; of the first {_MOST_PROBLEMS}.", labels=("file", *user)
        )

    def __iter__(self) -> Iterator[Metric]:
        yield from (family for part in (self.cache, self.stats, self.loader, self.counted) for _, family in part)
        yield from (family for _, family in self.histograms)
        yield from (self.worker_waits, self.worker_batches, self.unreadable, self.problem)

    def add_cache(self, cache: NamedCache, labels: Sequence[str]) -> None:
        for of, family in self.cache:
            family.add_metric(labels, of.value(cache))
        for of, family in self.stats:
            stats: CacheStats | None = cache.stats
            family.add_metric(labels, of.value(stats))

    def add_loader(self, loader: NamedLoader, labels: Sequence[str], user: Sequence[str]) -> None:
        counted = loader.counted
        assert counted is not None
        for of, family in self.loader:
            family.add_metric([*labels, *user], of.value(loader))
        for of, family in self.counted:
            family.add_metric([*labels, *user], of.value(counted))
        for word, histogram in self.histograms:
            counts = np.cumsum(counted.counts(word))
            within = zip(BUCKET_BOUNDS, counts[_LAST].tolist(), strict=True)
            histogram.add_metric([*labels, *user], [*within, ("+Inf", int(counts[-1]))], counted.sum(word) / 1e9)
        for worker in range(counted.workers):
            rows = Counted(counted.rows[[1 + worker, 1 + counted.workers + worker]])
            self.worker_waits.add_metric([*labels, str(worker), *user], rows.sum(WAIT_NS) / 1e9)
            self.worker_batches.add_metric([*labels, str(worker), *user], int(rows.counts(WAIT_NS).sum()))

    def add_problems(self, files: Sequence[NamedFile]) -> None:
        self.unreadable.add_metric([], len(files))
        for file in files[:_MOST_PROBLEMS]:
            about = {"problem": file.problem.removeprefix(f"{file.path} ")}
            self.problem.add_metric([file.path, *([file.user] if self.users else [])], about)


# ---------------------------------------------------------------------------------------------------- the collector


class Collector:
    """Collects the metrics of the caches and loaders of the user ``uid``, as `listing.find` takes it.

    Files are not trusted. One that cannot be read is counted in ``stocache_unreadable_files``, and left out elsewhere.
    """

    def __init__(self, uid: int | None = None) -> None:
        self._uid = uid

    def describe(self) -> Iterator[Metric]:
        """Yield all metrics, without values."""
        yield from _Families(self._uid == -1)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with the values of now."""
        families = _Families(self._uid == -1)
        caches, loaders = listing.find(self._uid), listing.find_loaders(self._uid)
        names, paths = _Names(), dict[str, str]()  # the label of each cache, by its path
        for cache in caches:
            if not cache.problem:
                user = [cache.user] if families.users else []
                paths[cache.path] = label = names.unique(cache.name, cache.kind, *user)
                families.add_cache(cache, [label, cache.kind, *user])
        for loader in loaders:
            if not loader.problem:
                user = [loader.user] if families.users else []
                cache_label = paths.get(f"{os.path.dirname(loader.path)}/{loader.cache}", loader.cache)
                label = names.unique(loader.name, "loader", *user)
                families.add_loader(loader, [cache_label, label, str(loader.rank), str(loader.pid)], user)
        files: list[NamedFile] = [*caches, *loaders]
        families.add_problems([file for file in files if file.problem])
        yield from families


class _Names:
    """Gives the second cache of a name, which may be in another directory, another label: series must differ."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, tuple[str, ...]]] = set()
        self._numbers: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def unique(self, name: str, *others: str) -> str:
        """Return the name, or "name (2)" if a file with the same other labels has it."""
        label = name
        while (label, others) in self._taken:
            self._numbers[name, others] += 1
            label = f"{name} ({self._numbers[name, others] + 1})"
        self._taken.add((label, others))
        return label


def registry_of(uid: int | None = None) -> CollectorRegistry:
    """Return a registry that has the metrics of stocache only."""
    registry = CollectorRegistry()
    registry.register(Collector(uid))
    return registry


def text_of(uid: int | None = None) -> str:
    """Return all metrics in the text format of OpenMetrics."""
    return str(generate_latest(registry_of(uid)), "utf-8")  # type: ignore[no-untyped-call]
