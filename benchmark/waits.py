"""What it costs to record where the time goes, and whether what is reported is right.

``overhead``: one loader runs epochs that are recorded, as they always are, and epochs in which worker processes do not
record, and the rows to record in are replaced by an object that does nothing. (Two loaders would differ by up to 5 %, because
the memory of their batches lies elsewhere. Replacing functions of this process makes what runs after that up to 4 % slower.)
*Noise*: recorded epochs to recorded epochs.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils.data import TensorDataset, default_collate

import stocache
from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import epoch_s, settle
from stocache import CachedDataset
from stocache.loader import collate as loader_collate
from stocache.loader import thread_maker
from stocache.loader.workers import requests
from stocache.observe.recording.record import TimingRecord

CLAIM = "Recording waits costs under 1 %, and the verdict finds eight bottlenecks."

OBEYED_S = 0.02
"""For workers to obey a signal."""


class NoRow:
    """A `TimingRow` that records nothing."""

    def add(self, *arguments: Any) -> None:
        """Do nothing."""

    begin = begin_step = add_later = add_making = add_collating = add_gathered = add_loads = add_look = write = add


NO_ROW = NoRow()


def no_row(*_: object) -> NoRow:
    """Return the row that records nothing."""
    return NO_ROW


def no_row_here() -> None:
    """Say that this process does not record. (A mock that returns None takes 10 µs.)"""


def no_record(workers: int) -> Any:
    """Return a `TimingRecord` that records nothing."""
    record: Any = TimingRecord(workers, False)
    counted = record.read()
    record.main, record.row, record.read = NO_ROW, no_row, lambda: counted
    return record


@contextlib.contextmanager
def rows_replaced() -> Iterator[None]:
    """Let the worker threads of this process, or the worker that it is, record nothing."""
    with (
        mock.patch.object(requests, "row_here", no_row),
        mock.patch.object(thread_maker, "row_here", no_row),
        mock.patch.object(loader_collate, "row_here", no_row_here),
    ):
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
    kept, loader._stocache._record = loader._stocache._record, no_record(loader.num_workers)
    for pid in workers:
        os.kill(pid, signal.SIGUSR1)
    # Only where it must be: what runs in a process in which functions were replaced is slower afterwards, by 1 %
    with contextlib.nullcontext() if workers else rows_replaced():
        time.sleep(OBEYED_S)
        yield
    for pid in workers:
        os.kill(pid, signal.SIGUSR2)
    loader._stocache._record = kept
    time.sleep(OBEYED_S)


def epochs_s(loader: Any, passes: int, off: bool) -> float:
    """Return the seconds of several epochs, recorded or not."""
    with not_recording(loader) if off else contextlib.nullcontext():
        return sum(epoch_s(loader) for _ in range(passes))


@experiment(rounds=15)
def overhead(run: Run) -> None:
    """Epochs with and without recording."""
    settle(run.size(2, 1) << 30)
    processes = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": obey}
    threads = {"num_workers": 2, "persistent_workers": True, "worker_method": "thread"}
    small, large, texts = (3, 64, 64), (3, 224, 224), ()
    rows: list[tuple[str, tuple[int, ...], int, dict[str, Any], int, float]] = [
        ("cached 3x64x64, 2 processes", small, 256, processes, 4, 1),
        ("cached 3x64x64, 2 processes", small, 32, processes, 1, 1),
        ("cached 3x224x224, 2 processes", large, 256, processes, 4, 1),
        ("cached 3x64x64, 2 threads", small, 256, threads, 8, 1),
        ("cached 3x64x64, no workers", small, 256, {}, 8, 1),
        ("3x64x64, a tenth cached, 2 processes", small, 256, processes, 1, 0.1),
        ("3x64x64 tensors, no cache, 2 processes", small, 256, processes, 2, 0),
        ("short strings, no cache, 2 processes", texts, 32, processes, 1, 0),
    ]
    table = run.table("loop", "batch", "ms a batch", "recorded to not", "noise")
    for name, dims, batch, options, passes, cached in rows:
        count = {small: 20_000, large: 4_000, texts: 100_000}[dims] // run.size(1, 10)
        dataset: Any = Made(count, "sample {}".format)
        if dims:
            dataset = TensorDataset(torch.randint(0, 256, (count, *dims), dtype=torch.uint8), torch.arange(count))
        if cached:
            dataset = CachedDataset(dataset, "1GiB" if cached == 1 else f"{count * 12296 * cached / 1e6:.0f}MB")
            dataset.warm(progress=False)
        loader = stocache.DataLoader(dataset, batch, shuffle=True, **options)
        contenders = {"recorded": False, "not": True, "recorded again": False}
        took = run.turns({each: partial(epochs_s, loader, passes, off) for each, off in contenders.items()}, warm_up=2)
        loader.end_workers()
        ms = 1e3 * took.median("not") / passes / len(loader)
        table.row(name, batch, ms, took.spread("recorded", "not"), took.spread("recorded again", "recorded"))
        if cached:
            dataset.close()
    run.claim("recording costs 1 %, batches of 256", max(table.column("recorded to not", batch=256)), most=1.01)


# ---------------------------------------------------------------------------------------------------- bottlenecks

N, BATCH = 240, 20
NEEDED_GIB = "1MB"  # all samples


def burn(cost_s: float) -> None:
    """Run Python for that long, and hold the GIL."""
    until = time.thread_time() + cost_s
    while time.thread_time() < until:
        pass


@dataclass(frozen=True)
class Slow:
    """A function that burns ``cost_s``, and calls a different one."""

    cost_s: float
    function: Callable[[Any], Any] = tuple

    def __call__(self, value: Any) -> Any:
        """Burn, and return what the function returns."""
        burn(self.cost_s)
        return self.function(value)


def cached(
    cost_s: float = 0.0, limit: str = NEEDED_GIB, wait: Callable[[float], None] = time.sleep, size: int = 32, **options: Any
) -> Callable[[], CachedDataset]:
    """Return a function that caches samples that take ``cost_s`` to load: waiting, as for a disk or a network, or in Python."""

    def load(idx: int) -> tuple[torch.Tensor, int]:
        wait(cost_s)
        return torch.full((3, size, size), idx % 251, dtype=torch.uint8), idx

    return lambda: CachedDataset(Made(N, load), limit, **options)


@dataclass
class Bottleneck:
    """A loop whose last epoch has one limit.

    Attributes:
        limit: what the verdict must name; None if it must be silent.
        says: a regular expression that its text must match.
        step_s: the training step, which leaves the CPU free.
        epochs: how many to run.
        hold: how many batches the loop holds.
    """

    limit: str | None
    says: str
    dataset: Callable[[], CachedDataset]
    step_s: float = 0.01
    epochs: int = 2
    hold: int = 0
    warm: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def verdict(self) -> Any:
        """Run all epochs; return the last verdict."""
        with self.dataset() as dataset:
            if self.warm:
                dataset.warm(progress=False)
            defaults = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True}
            loader = stocache.DataLoader(dataset, shuffle=True, **defaults | self.options)
            held = deque(maxlen=self.hold)
            for _ in range(self.epochs):
                for batch in loader:
                    held.append(batch)
                    del batch
                    time.sleep(self.step_s)
            found = loader.stats().verdict
            held.clear()
            loader.end_workers()
        return found


LOADING, EACH = r"loading \d+ uncached samples of \d[\d.]* ms each is the limit", r"\d[\d.]* ms each"

BOTTLENECKS = {
    "slow source": Bottleneck("source", LOADING + r"; size_limit_gib=0\.00\d+ would remove it", cached(0.004, "0.4MB")),
    "slow transform": Bottleneck(
        "transform",
        rf"transforming {N} cached samples, {EACH}, is the limit; only cheaper transforms",
        cached(transform=Slow(0.003)),
        warm=True,
    ),
    "slow collate": Bottleneck(
        "collate",
        rf"collating {N // BATCH} batches of {EACH} is the limit",
        cached(transform=tuple),
        warm=True,
        options={"collate_fn": Slow(0.06, default_collate)},
    ),
    "too few workers": Bottleneck(
        "workers",
        rf"1 worker is too few for batches of {EACH}; num_workers=\d would (remove it|cut it to \d+%)",
        cached(transform=Slow(0.001)),
        step_s=0.012,
        warm=True,
        options={"num_workers": 1},
    ),
    "full ring": Bottleneck(
        "ring",
        r"\d+ of \d+ batches found the ring full, with \d+ buffers for each worker",
        cached(0.0, "200MB", size=256),
        step_s=0.0,
        hold=200,
        warm=True,
        options={"batch_size": 4},
    ),
    "GIL-bound": Bottleneck(
        "GIL",
        r"worker threads (hold the GIL \d+% of the time|wait for each other's GIL), so one works at a time; "
        r"worker_method='multiprocessing' would let 2 work at once",
        cached(0.002, wait=burn, transform=Slow(0.002)),
        step_s=0.001,
        options={"worker_method": "thread"},
    ),
    "slow trainer": Bottleneck(None, "", cached(), step_s=0.03, warm=True),
    "cold cache": Bottleneck(
        "cold cache", LOADING + ", which filled the cache; the next epoch finds 100%", cached(0.004), epochs=1
    ),
}


@experiment(rounds=5)
def bottlenecks(run: Run) -> None:
    """What the verdict says of loops that are slow on purpose."""
    settle(2 << 30)
    table, all_right = run.table("bottleneck", "right", "the last verdict"), True
    for name, bottleneck in run.chosen(BOTTLENECKS).items():
        right, text = 0, "(silent)"
        for _ in range(run.rounds):
            verdict = bottleneck.verdict()
            text = "(silent)" if verdict is None else verdict.text
            named = None if verdict is None else verdict.limit
            right += named == bottleneck.limit and (verdict is None or re.search(bottleneck.says, text) is not None)
        table.row(name, f"{right} of {run.rounds}", text)
        all_right &= right == run.rounds
    run.claim("the verdict finds eight bottlenecks", all_right)
