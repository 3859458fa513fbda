"""Export the counts of named caches and loaders as metrics, as text or over HTTP, in the formats of OpenMetrics and Prometheus.

Nothing is kept between two scrapes: each reads shared memory. It needs prometheus-client, the extra ``metrics``, but not torch.
"""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest

from stocache.observe.recording import record
from stocache.observe.recording.histogram import BOUNDS_S, PER_DOUBLING
from stocache.observe.recording.record import Counted
from stocache.tools.cli import listing
from stocache.tools.cli.listing import NamedCache, NamedFile, NamedLoader
from stocache.tools.cli.output import echo, fail

CACHE_LABELS = ("name", "kind")
LOADER_LABELS = ("cache", "loader", "rank", "pid")

_SHORTEST_S, _LONGEST_S = 5e-6, 300.0
_LAST = np.arange(np.searchsorted(BOUNDS_S, _SHORTEST_S), np.searchsorted(BOUNDS_S, _LONGEST_S), PER_DOUBLING)

BUCKET_BOUNDS = tuple(str(float(f"{bound:.6g}")) for bound in BOUNDS_S[_LAST])
"""The label ``le`` of the buckets, except the last. Rounded: the last digits of a power differ from machine to machine."""

_Rows: TypeAlias = list[tuple[list[str], Any]]  # labels, and the object whose values they are for

_MOST_PROBLEMS = 20  # that are described


_Metric: TypeAlias = tuple[type[Metric], str, str, Callable[[Any], Any]]
"""A metric of which each cache, loader or worker has one value.

Its class; its name without the prefix and ``_total``, which ends with the unit, if there is one; a text; and a function that
returns the value from the object itself; of a histogram, its buckets and the sum.
"""


def _sum(word: int, unit: float = 1) -> Callable[[Any], float]:
    return lambda loader: float(loader.counted.sum(word) / unit)


def _histogram(word: int) -> Callable[[NamedLoader], Any]:
    def value(loader: NamedLoader) -> tuple[list[tuple[str, int]], float]:
        assert loader.counted is not None
        counts = np.cumsum(loader.counted.counts(word))
        within = zip(BUCKET_BOUNDS, counts[_LAST].tolist(), strict=True)
        return [*within, ("+Inf", int(counts[-1]))], loader.counted.sum(word) / 1e9

    return value


_COUNTER, _GAUGE, _HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

_OF_CACHE: tuple[_Metric, ...] = (
    (_GAUGE, "alive", "1 if a process uses the cache, else 0.", attrgetter("alive")),
    (_GAUGE, "processes", "Processes that use the cache, as far as they are visible.", lambda cache: len(cache.holders)),
    (_GAUGE, "memory_bytes", "Memory that the cache takes, with states and counters.", attrgetter("memory_bytes")),
    (_GAUGE, "created_timestamp_seconds", "When the cache was created, seconds since 1970.", attrgetter("created")),
    (_COUNTER, "hits", "Samples that were served from the cache.", attrgetter("stats.hits")),
    (_COUNTER, "misses", "Samples that were asked for and not cached.", attrgetter("stats.misses")),
    (_COUNTER, "fills", "Samples that were cached.", attrgetter("stats.fills")),
    (_COUNTER, "races", "Samples that another process or thread had cached first.", attrgetter("stats.races")),
    (_COUNTER, "refused", "Samples not cached because the machine gave no memory.", attrgetter("stats.refused")),
    (_COUNTER, "rejected", "Samples that were not cached because they did not fit.", attrgetter("stats.rejected")),
    (_COUNTER, "damaged", "Samples that were lost from the disk.", attrgetter("stats.damaged")),
    (_COUNTER, "load_seconds", "Time in which missed samples were loaded, over all processes and threads.",
        attrgetter("stats.load_s")),
    (_COUNTER, "read_seconds", "Time in which samples were read from the disk, over all processes and threads.",
        attrgetter("stats.read_s")),
    (_GAUGE, "dataset_samples", "Samples of the dataset.", attrgetter("stats.dataset_len")),
    (_GAUGE, "capacity_samples", "The most samples that can be cached.", attrgetter("stats.slots")),
    (_GAUGE, "filled_samples", "Samples that are cached now.", attrgetter("stats.filled")),
    (_GAUGE, "filled_bytes", "Bytes of the samples that are cached now.", attrgetter("stats.filled_bytes")),
    (_GAUGE, "capacity_bytes", "Bytes of samples that the cache can hold.", attrgetter("stats.capacity_bytes")),
)  # fmt: skip
_OF_LOADER: tuple[_Metric, ...] = (
    (_GAUGE, "alive", "1 if the loader's process or a worker runs, 0 if they were killed.", attrgetter("alive")),
    (_GAUGE, "workers", "Workers of the loader.", attrgetter("counted.workers")),
    (_GAUGE, "created_timestamp_seconds", "When the loader began to record, seconds since 1970.", attrgetter("created")),
    (_COUNTER, "batches", "Batches that were made. Some of them wait to be used.", attrgetter("counted.batches")),
    (_COUNTER, "samples", "Samples of the batches that were made.", _sum(record.SAMPLES_MADE)),
    (_COUNTER, "make_seconds", "Time in which samples were made, without loading: reads of the cache, transforms.",
        _sum(record.MAKE_NS, 1e9)),
    (_COUNTER, "cpu_seconds", "CPU time of the threads that make batches.", _sum(record.CPU_NS, 1e9)),
    (_COUNTER, "queued_seconds", "Time in which these threads could run, but the CPUs were busy.",
        _sum(record.QUEUED_NS, 1e9)),
    (_COUNTER, "gil_looks", "How often a waiting loop looked whether another thread holds the GIL.", _sum(record.LOOKS)),
    (_COUNTER, "gil_held", "How often another thread held it.", _sum(record.HELD)),
    (_HISTOGRAM, "wait_seconds", "How long the loop waited for each batch.", _histogram(record.WAIT_NS)),
    (_HISTOGRAM, "load_seconds", "How long each sample took that was not in memory.", _histogram(record.LOAD_NS)),
    (_HISTOGRAM, "collate_seconds", "How long it took to put each batch together, without loading.",
        _histogram(record.COLLATE_NS)),
    (_HISTOGRAM, "hand_over_seconds", "How long it took to bring each batch from a worker process to the loop.",
        _histogram(record.HAND_OVER_NS)),
)  # fmt: skip
_OF_WORKER: tuple[_Metric, ...] = (  # a loader with the rows of one worker
    (_COUNTER, "worker_wait_seconds", "Time in which the loop waited for batches of this worker.", _sum(record.WAIT_NS, 1e9)),
    (_COUNTER, "worker_batches", "Batches of this worker that the loop has received.",
        lambda loader: int(loader.counted.counts(record.WAIT_NS).sum())),
)  # fmt: skip


def _families(prefix: str, metrics: Sequence[_Metric], labels: Sequence[str], rows: _Rows) -> Iterator[Metric]:
    """Yield some metrics, with one value for each row."""
    for kind, name, text, value_of in metrics:
        unit = name.rpartition("_")[2]
        options = {"labels": labels, "unit": unit if unit in ("bytes", "seconds") else ""}
        family: Any = kind(f"{prefix}_{name}", text, **options)  # type: ignore[arg-type]
        for values, of in rows:
            value = value_of(of)
            family.add_metric(values, *(value if kind is _HISTOGRAM else (value,)))
        yield family


def _metrics(files: Sequence[NamedFile]) -> Iterator[Metric]:
    """Yield all metrics, with the values of these caches and loaders."""
    of_caches, of_loaders, of_workers = (_Rows() for _ in range(3))
    readable, unreadable = ([file for file in files if bool(file.problem) is bad] for bad in (False, True))
    seen, paths = Counter[tuple[str, str]](), dict[str, str]()  # the label of each cache, by its path

    def unique(file: NamedFile) -> str:
        """Return the name of a file; of the second one of its kind with this name, a different one: series must differ."""
        seen[file.kind, file.name] += 1
        number = seen[file.kind, file.name]
        return file.name if number == 1 else f"{file.name} ({number})"

    for cache in readable:
        if isinstance(cache, NamedCache):
            paths[cache.path] = label = unique(cache)
            of_caches.append(([label, cache.kind], cache))
    for loader in readable:
        if isinstance(loader, NamedLoader) and loader.counted is not None:
            cache_label = paths.get(f"{os.path.dirname(loader.path)}/{loader.cache}", loader.cache)
            labels = [cache_label, unique(loader), str(loader.rank), str(loader.pid)]
            of_loaders.append((labels, loader))
            for worker in range(workers := loader.counted.workers):
                rows = Counted(loader.counted.rows[[1 + worker, 1 + workers + worker]])
                of_workers.append(([*labels, str(worker)], replace(loader, counted=rows)))
    yield from _families("stocache_cache", _OF_CACHE, CACHE_LABELS, of_caches)
    yield from _families("stocache_loader", _OF_LOADER, LOADER_LABELS, of_loaders)
    yield from _families("stocache_loader", _OF_WORKER, (*LOADER_LABELS, "worker"), of_workers)

    count = len(unreadable)
    yield GaugeMetricFamily("stocache_unreadable_files", "Files that are not a readable cache or loader.", count)
    why = f"Why a file cannot be read; of the first {_MOST_PROBLEMS}."
    described = InfoMetricFamily("stocache_unreadable_file", why, labels=("file",))
    for file in unreadable[:_MOST_PROBLEMS]:
        described.add_metric([file.path], {"problem": file.problem.removeprefix(f"{file.path} ")})
    yield described


class Collector:
    """Collects the metrics of the caches and loaders of this user.

    Files are not trusted. One that cannot be read is counted in ``stocache_unreadable_files``, and left out elsewhere.
    """

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with the values of now."""
        yield from _metrics(listing.find_all(count=True))


def registry_of() -> CollectorRegistry:
    """Return a registry that has the metrics of stocache only."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(Collector())
    return registry


def text_of() -> str:
    """Return all metrics in the text format of OpenMetrics."""
    return str(generate_latest(registry_of()), "utf-8")  # type: ignore[no-untyped-call]


def serve(address: str, port: int) -> None:
    """Serve the metrics of this user over HTTP, until Ctrl-C or SIGTERM."""
    with contextlib.suppress(KeyboardInterrupt):
        try:
            server, _ = start_http_server(port, address, registry_of())
        except OSError as error:
            fail(f"{address}, port {port}: {error.strerror or error}. Choose a different one, or end what uses it.")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        echo(f"serving http://{f'[{address}]' if ':' in address else address}:{server.server_port}/metrics until Ctrl-C")
        while True:
            time.sleep(60)
