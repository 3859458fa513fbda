"""Choose between worker processes and worker threads: ``worker_method="auto"``.

Two threads make samples as fast as two processes, and start much faster, if making a sample leaves the GIL free. Two
measurements decide that: how often the GIL is held while one thread makes samples (by *looks*, see recording/gil.py), and the
speed-up of two threads over one. Threads are chosen if both favour them: the first misjudges samples that hold the GIL often
but briefly, and the second is inexact on a busy machine. The time that threads wait for a CPU does not count, because other
programs may use it. A child process makes the samples, so that the user's dataset stays as it is.

Threads are chosen in any case where forked processes would stall (NOTE [ Stalled processes ]), and processes where samples draw
from the global random number generators, of which processes have their own.
"""

import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from stocache.cache.base import SlotState
from stocache.datasets.cached import CachedDataset, layers
from stocache.loader.threads.copies import copy_dataset, find_open_handle, find_running, holds_generator
from stocache.loader.threads.loading import would_stall
from stocache.observe.recording.gil import LATE_S, LOOK_S, queued_seconds
from stocache.system.children import in_children
from stocache.system.objects import attribute_of, has_state
from stocache.system.rng import RngMonitor

logger = logging.getLogger("stocache")

METHODS = "multiprocessing", "thread", "auto"

_CACHED = 0.9  # the share of samples in the cache, from which batches are mostly gathered, which leaves the GIL free
_SPEED_UP = 1.2  # of two threads over one, from which threads are chosen
_MOST_HELD = 0.5  # the share of looks that find the GIL held, from which processes are chosen
_ROUND_S, _TRIAL_S, _ROUNDS = 0.01, 0.1, 3
_PATIENCE_S = 30.0  # for one round
_DRAWS = "samples draw"


def choose_method(dataset: Any, hooks: bool, trial: "GilTrial") -> str:
    """Return "thread" or "multiprocessing" for the workers of a loader, and log why."""
    method, reason = _choose(dataset, hooks, trial)
    if method == "multiprocessing" and trial.stalls(layers(dataset)[-1]):
        method, reason = "thread", "forked processes would stall"
    logger.info("worker_method='auto' chooses %r: %s", method, reason)
    return method


def _choose(dataset: Any, hooks: bool, trial: "GilTrial") -> tuple[str, str]:
    if attribute_of(dataset, "thread_safe") is False:
        return "multiprocessing", "the dataset has thread_safe = False"
    if isinstance(dataset, IterableDataset) or has_state(dataset) or holds_generator(dataset):
        return "multiprocessing", "the dataset is iterable, or has a state or a generator of its own"
    if hooks:
        return "multiprocessing", "sample_seed has hooks, which may set objects that threads share"
    handle = find_open_handle(dataset) or find_running(dataset)
    if handle is not None:
        return "multiprocessing", f"threads would share {handle}"
    cached = next((layer for layer in layers(dataset) if isinstance(layer, CachedDataset)), None)
    if cached is not None and not cached.is_transformed and _share_of(cached) >= _CACHED:
        return "thread", f"{_share_of(cached):.0%} of the samples are cached"
    if (os.cpu_count() or 1) < 2:
        return "thread", "there is one CPU"
    speed_up = trial.speed_up(dataset)
    if speed_up is None:
        return "multiprocessing", "threads could not be tried"
    if trial.draws:
        return "multiprocessing", "samples draw from the global random number generators, which threads share"
    better = speed_up >= _SPEED_UP and trial.held <= _MOST_HELD
    reason = f"one thread holds the GIL for {trial.held:.0%} of its time, two make {speed_up:.2f} times as many samples"
    return "thread" if better else "multiprocessing", reason


def _share_of(dataset: CachedDataset) -> float:
    states = dataset.cache.aux_array.numpy()
    return float((states == SlotState.SET).mean()) if len(states) else 1.0


class GilTrial:
    """Measures once, for all iterators of a loader, how many samples two threads make in the time of one.

    Args:
        forks: whether worker processes of the loader are forked.

    Attributes:
        held: the share of its time for which one thread holds the GIL.
        draws: whether samples draw from the global random number generators.
    """

    def __init__(self, forks: bool = False) -> None:
        self._tried, self.held, self.draws = False, 0.0, False
        self._speed_up: float | None = None
        self._stalls = None if forks else False

    def speed_up(self, dataset: Any) -> float | None:
        """Return the speed-up of two threads over one; None if it could not be measured."""
        if not self._tried:
            self._tried = True
            try:
                found = list(in_children([partial(_measure, dataset)], dataset, _PATIENCE_S))
            except Exception as error:  # of a sample: it is raised again when the sample is requested
                logger.debug("threads could not be tried: %s", str(error))
            else:
                self.draws = _DRAWS in found
                rounds = [numbers for numbers in found if numbers != _DRAWS]
                alone_s, together_s, held, looks = (sum(numbers) for numbers in zip((0.0,) * 4, *rounds, strict=True))
                self._speed_up = 2 * alone_s / together_s if together_s > 0 else None
                self.held = held / max(1, looks)
        return self._speed_up

    def stalls(self, dataset: Any) -> bool:
        """Return whether forked processes that load samples would stall."""
        if self._stalls is None:
            self._stalls = self._speed_up is None and would_stall(dataset)
        return self._stalls


def _measure(dataset: Any) -> Iterator[tuple[float, float, int, int] | str]:
    """Yield the seconds of one thread and of two in each round, the looks that found the GIL held, and all looks.

    And `_DRAWS`, if samples draw random numbers.

    Runs in a child process.
    """
    datasets = copy_dataset(dataset), copy_dataset(dataset)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    sys.setswitchinterval(_ROUND_S / 10)  # else a round is too short for threads to take turns
    began, monitor = time.perf_counter(), RngMonitor()
    for mine in datasets:  # opens files
        mine[order.pop()]
    if monitor.changed():
        yield _DRAWS
    cost_s = (time.perf_counter() - began) / 2
    count, rounds = max(1, int(_ROUND_S / max(cost_s, 1e-7))), 0
    while rounds < _ROUNDS or time.perf_counter() - began < _TRIAL_S:
        count = min(count, len(order) // 4)
        if not count:
            return
        parts = [[order.pop() for _ in range(count)] for _ in range(4)]
        yield _time(datasets[:1], parts), _time(datasets, parts[1:3]), *_sample_gil(datasets[0], parts[3])
        rounds += 1


def _time(datasets: Sequence[Any], parts: list[list[int]]) -> float:
    """Return the mean time in which threads, one for each dataset, load their parts."""
    ready, begin, began = threading.Semaphore(0), threading.Event(), 0.0
    before_s: dict[int, float] = {}

    def load(dataset: Any, part: list[int]) -> float:
        own, cpu_s = threading.get_native_id(), time.thread_time()
        before_s[own] = 0.0
        ready.release()
        begin.wait()
        for idx in part:
            dataset[idx]
        ended, queued_s = time.perf_counter(), queued_seconds(own)
        return max(ended - began - (queued_s - before_s[own]), time.thread_time() - cpu_s)

    with ThreadPoolExecutor(len(datasets)) as threads:
        took_s = [threads.submit(load, *arguments) for arguments in zip(datasets, parts, strict=False)]
        for _ in datasets:
            ready.acquire()
        before_s.update({thread: queued_seconds(thread) for thread in before_s})  # to subtract later waits for a CPU
        began = time.perf_counter()
        begin.set()
        return statistics.mean(took.result() for took in took_s)


def _sample_gil(dataset: Any, part: list[int]) -> tuple[int, int]:
    """Look at the GIL while a thread loads samples. Return how often it was held, and how often it was looked at."""
    held = looks = 0
    own = threading.get_native_id()
    with ThreadPoolExecutor(1) as threads:
        loaded = threads.submit(lambda: [dataset[idx] for idx in part] and None)
        while not loaded.done():
            queued_s, began = queued_seconds(own), time.perf_counter()
            time.sleep(LOOK_S)
            held += time.perf_counter() - began - (queued_seconds(own) - queued_s) > LOOK_S + LATE_S
            looks += 1
        loaded.result()
    return held, looks
