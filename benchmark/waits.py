"""What it costs to record where the time goes, and whether what is reported is right.

python -m benchmark waits overhead [--rounds 15] [--scrape]   # epochs with and without recording, in turns
python -m benchmark waits percentiles                         # of the buckets, beside the exact ones
python -m benchmark waits bottlenecks [--repeats 5]           # loops that are slow on purpose, and what the verdict says
python -m benchmark waits trace --out trace.json              # a trace of torch's profiler, to open in Perfetto

``overhead``: one loader runs epochs that are recorded, as they always are, and epochs in which worker processes do not
record, and the rows to record in are replaced by an object that does nothing. They take turns, in an order that alternates.
(Two loaders would differ by up to 5 %, because the memory of their batches lies elsewhere. Replacing functions of this process
makes what runs after that up to 4 % slower.) The overhead is the median of the ratios of neighbours, less 1, with the interval
in which that median lies with 95 % (by the order statistics of the ratios). *Noise*: the same, where both are recorded.
``--scrape``: meanwhile another process runs ``stocache metrics`` once a second.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

import stocache
from benchmark.support.bottlenecks import BOTTLENECKS
from benchmark.support.measuring import machine, settle
from stocache import CachedDataset
from stocache.loader import collate as loader_collate
from stocache.loader import thread_maker
from stocache.loader.workers import requests
from stocache.observe.recording import record
from stocache.observe.recording.histogram import BUCKETS, Distribution, bucket_of

CLAIM = "Recording waits costs under 1 %, percentiles are exact within 2 %, and the verdict finds eight bottlenecks."

_Z = 1.96
_OBEYED_S = 0.02  # for workers to obey a signal


class Texts(Dataset[str]):
    """Short strings, of which batches are small."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, idx: int) -> str:
        return f"sample {idx}"


class NoRow:
    """A `Row` that records nothing."""

    def add(self, *arguments: Any) -> None:
        """Do nothing."""

    begin = begin_step = add_later = add_making = add_collating = add_gathered = add_loads = add_look = write = add


class NoRecord:
    """A `TimingRecord` that records nothing. Its ``read`` returns an empty record."""

    mine = True

    def __init__(self, workers: int) -> None:
        self.main = NoRow()
        self._counted = record.TimingRecord(workers, False).read()

    def row(self, number: int) -> NoRow:
        """Return the row that records nothing."""
        return self.main

    def read(self) -> record.Counted:
        """Return counts of zero."""
        return self._counted

    def write(self) -> None:
        """Do nothing."""

    def claim(self, worker: int) -> None:
        """Return no row."""


NO_ROW = NoRow()


def no_row() -> NoRow:
    """Return the row that records nothing."""
    return NO_ROW


def no_row_here() -> None:
    """Say that this process does not record. (A mock that returns None takes 10 µs.)"""


@contextlib.contextmanager
def rows_replaced() -> Iterator[None]:
    """Let the worker threads of this process, or the worker that it is, record nothing."""
    with contextlib.ExitStack() as patches:
        for module in (requests, thread_maker):
            patches.enter_context(mock.patch.object(module, "row_here", no_row))
        patches.enter_context(mock.patch.object(loader_collate, "row_here", no_row_here))
        yield


def obey(worker: int) -> None:
    """Let a worker process stop recording at SIGUSR1, and go on at SIGUSR2."""
    patches = contextlib.ExitStack()
    signal.signal(signal.SIGUSR1, lambda *_: patches.enter_context(rows_replaced()))
    signal.signal(signal.SIGUSR2, lambda *_: patches.close())


@contextlib.contextmanager
def not_recording(loader: Any) -> Iterator[None]:
    """Let a loader and its workers record nothing."""
    workers = [process.pid for process in multiprocessing.active_children()]
    kept, loader._stocache._record = loader._stocache._record, NoRecord(loader.num_workers)
    for pid in workers:
        os.kill(pid, signal.SIGUSR1)
    # Only where it must be: what runs in a process where functions were replaced is slower afterwards, by 1 %
    with contextlib.nullcontext() if workers else rows_replaced():
        time.sleep(_OBEYED_S)
        yield
    for pid in workers:
        os.kill(pid, signal.SIGUSR2)
    loader._stocache._record = kept
    time.sleep(_OBEYED_S)


def images(dims: tuple[int, ...], count: int) -> TensorDataset:
    """Return a dataset of images and labels."""
    return TensorDataset(torch.randint(0, 256, (count, *dims), dtype=torch.uint8), torch.arange(count))


def compare(make: Callable[[], Any], rounds: int, passes: int, off: Any = not_recording) -> tuple[float, str, float]:
    """Return the median of (recording / not recording) - 1, its interval, and the milliseconds of a batch.

    ``off``: called with the loader, returns a context in which it does not record.
    """

    def run(loader: Any) -> float:
        began = time.perf_counter()
        for _ in range(passes):
            for _ in loader:
                pass
        return time.perf_counter() - began

    loader = make()
    run(loader)
    ratios, seconds = [], []
    for number in range(rounds + 2):
        took = {}
        for recording in (True, False) if number % 2 else (False, True):
            with contextlib.nullcontext() if recording else off(loader):
                took[recording] = run(loader)
        if number >= 2:
            ratios.append(took[True] / took[False])
            seconds.append(took[False])
    loader.end_workers()
    ratios.sort()
    spread = math.ceil(_Z * math.sqrt(len(ratios)) / 2)
    low, high = ratios[max(0, len(ratios) // 2 - spread)], ratios[min(len(ratios) - 1, len(ratios) // 2 + spread)]
    batches = len(loader) * passes
    return statistics.median(ratios) - 1, f"{low - 1:+.2%} to {high - 1:+.2%}", 1e3 * statistics.median(seconds) / batches


def overhead(rounds: int, scrape: bool) -> None:
    """Print what recording costs."""
    processes = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": obey}
    threads = {"num_workers": 2, "persistent_workers": True, "worker_method": "thread"}
    small, large = (3, 64, 64), (3, 224, 224)
    rows: list[tuple[str, tuple[int, ...] | None, int, dict[str, Any], int, float | str]] = [
        ("cached 3x64x64, 2 processes", small, 256, processes, 4, 1),
        ("cached 3x64x64, 2 processes", small, 32, processes, 1, 1),
        ("cached 3x224x224, 2 processes", large, 256, processes, 4, 1),
        ("cached 3x64x64, 2 threads", small, 256, threads, 8, 1),
        ("cached 3x64x64, no workers", small, 256, {}, 8, 1),
        ("3x64x64, a tenth cached, 2 processes", small, 256, processes, 1, 0.1),
        ("3x64x64 tensors, no cache, 2 processes", small, 256, processes, 2, 0),
        ("short strings, no cache, 2 processes", None, 32, processes, 1, 0),
    ]
    print(f"{machine()}\n\nmedians of {rounds} rounds{', a scrape each second' * scrape}\n")
    print("| loop | batch | ms a batch | overhead | noise | under 1 % |\n| --- | ---: | ---: | ---: | ---: | --- |")
    for name, dims, batch, options, passes, cached in rows:
        dataset: Any = Texts() if dims is None else images(dims, 20_000 if dims == small else 4_000)
        if cached:
            size = "1GiB" if cached == 1 else f"{len(dataset) * 12296 * cached / 1e6:.0f}MB"
            dataset = CachedDataset(dataset, size, name="waits-overhead" if scrape else None)
            dataset.warm(progress=False)
        scraper = subprocess.Popen([sys.executable, "-c", _SCRAPES]) if scrape else None

        def make(dataset: Any = dataset, batch: int = batch, options: dict[str, Any] = options) -> Any:
            return stocache.DataLoader(dataset, batch, shuffle=True, **options)

        median, interval, ms = compare(make, rounds, passes)
        same, same_interval, _ = compare(make, rounds, passes, contextlib.nullcontext)
        if scraper is not None:
            assert scraper.poll() is None, "the scraper has ended"
            scraper.kill()
            scraper.wait()
        met = "yes" if median < 0.01 else "no"
        noise = f"{same:+.2%}, {same_interval}"
        print(f"| {name} | {batch} | {ms:.3f} | {median:+.2%}, {interval} | {noise} | {met} |", flush=True)
        if isinstance(dataset, CachedDataset):
            dataset.close()


_SCRAPES = """
import time
from stocache.tools.cli import metrics
while True:
    assert 'stocache_' in metrics.text_of()
    time.sleep(1)
"""


def percentiles() -> None:
    """Print percentiles of the buckets beside the exact ones."""
    rng = np.random.default_rng(0)
    shapes = {
        "lognormal": rng.lognormal(-7, 2, 100_000),
        "Pareto": 1e-5 * (1 + rng.pareto(1.1, 100_000)),
        "two values": np.where(rng.random(100_000) < 0.9, 0.5e-3, 10e-3),
        "uniform": rng.uniform(1e-6, 1e-3, 100_000),
    }
    print("| durations | percentile | exact, ms | found, ms | error |\n| --- | ---: | ---: | ---: | ---: |")
    for name, seconds in shapes.items():
        counts = np.zeros(BUCKETS, np.int64)
        for second in seconds.tolist():
            counts[bucket_of(int(1e9 * second))] += 1
        found = Distribution.of(counts, int(1e9 * seconds.sum()))
        for share, value in ((50, found.p50_s), (95, found.p95_s), (99, found.p99_s), (100, found.max_s)):
            exact = float(np.percentile(seconds, share, method="inverted_cdf"))
            print(f"| {name} | {share} | {1e3 * exact:.4f} | {1e3 * value:.4f} | {value / exact - 1:+.2%} |")


def bottlenecks(repeats: int) -> None:
    """Print what the verdict says of loops that are slow on purpose."""
    print(f"{machine()}\n\n| bottleneck | right | the last verdict |\n| --- | --- | --- |")
    for name, bottleneck in BOTTLENECKS.items():
        right, text = 0, "(silent)"
        for _ in range(repeats):
            with bottleneck.running() as loader:
                verdict = loader.stats().verdict
            text = "(silent)" if verdict is None else verdict.text
            named = None if verdict is None else verdict.limit
            right += named == bottleneck.limit and (verdict is None or re.search(bottleneck.says, text) is not None)
        print(f"| {name} | {right} of {repeats} | {text} |", flush=True)


def trace(out: str) -> None:
    """Write a trace of three epochs: with worker processes, with worker threads, and without workers."""
    with CachedDataset(images((3, 64, 64), 2_000), "12MB") as dataset:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for options in ({"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}, {}):
                for images_, _ in stocache.DataLoader(dataset, 200, shuffle=True, **options):
                    with torch.profiler.record_function("training step"):
                        images_.float().mean()
    profile.export_chrome_trace(out)
    rows = [event for event in profile.key_averages() if event.key.startswith(("stocache", "training"))]
    print("| range | count | ms |\n| --- | ---: | ---: |")
    for event in sorted(rows, key=lambda event: -event.cpu_time_total):
        print(f"| {event.key} | {event.count} | {event.cpu_time_total / 1e3:.1f} |")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "percentiles", "bottlenecks", "trace"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scrape", action="store_true")
    parser.add_argument("--out", default="trace.json")
    arguments = parser.parse_args()
    settle(2 << 30)
    if arguments.what == "overhead":
        overhead(arguments.rounds, arguments.scrape)
    elif arguments.what == "percentiles":
        percentiles()
    elif arguments.what == "bottlenecks":
        bottlenecks(arguments.repeats)
    else:
        trace(arguments.out)


if __name__ == "__main__":
    main()
