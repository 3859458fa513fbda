"""Choose among settings by their forecasts; choose the number of workers of a loader, and whether they are threads.

NOTE [ Threads or processes ]
    Two threads make samples as fast as two processes, and start much faster, if making a sample leaves the GIL free. Two
    measurements decide that: how often the GIL is held while one thread makes samples (by *looks*, see recording/gil.py), and
    the speed-up of two threads over one. Threads are chosen if both favour them: the first misjudges samples that hold the GIL
    often but briefly, and the second is inexact on a busy machine. The time that threads wait for a CPU does not count, because
    other programs may use it. A child process makes the samples, so that the user's dataset stays as it is.

    Threads are chosen in any case where forked processes would stall (NOTE [ Stalled processes ]), and processes where samples
    draw from the global random number generators, of which processes have their own.
"""

import logging
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from stocache.cache.ragged import RaggedCache
from stocache.datasets.cached import CachedDataset
from stocache.loader.choice.measure import count_cores, measure_costs
from stocache.loader.choice.model import Costs, Forecast, Setting, cached_share, predict
from stocache.loader.choice.trials import MakeLoader
from stocache.observe.recording.gil import look, queued_seconds
from stocache.system.figures import format_seconds, round_digits
from stocache.system.limits import GIB, MIB
from stocache.system.loading.children import in_children
from stocache.system.loading.copies import copy_dataset, find_open_handle, find_running, holds_generator
from stocache.system.loading.fallback import run_here, would_stall
from stocache.system.objects import attribute_of, has_state
from stocache.system.platform import here
from stocache.system.rng import RngMonitor
from stocache.system.walking import makers, passes_on, walk

logger = logging.getLogger("stocache")

SAME = 1.02  # settings whose times differ by less are taken to be equally fast
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the largest limit that is of use
_ROOM = 1.02  # of a cache that holds all samples, to the bytes that were measured
_MOST_WORKERS = 128
_AUTO_S = 10.0  # for num_workers="auto"
_FALLBACK = 8

_CACHED = 0.9  # the share of samples in the cache, from which batches are mostly gathered, which leaves the GIL free
_SPEED_UP = 1.2  # of two threads over one, from which threads are chosen
_MOST_HELD = 0.5  # the share of looks that find the GIL held, from which processes are chosen
_ROUND_S, _TRIAL_S, _ROUNDS = 0.01, 0.1, 3
_PATIENCE_S = 30.0  # for one round
_DRAWS = "samples draw"


def worker_counts(costs: Costs) -> list[int]:
    """Return the numbers of workers that are worth a forecast. torch warns of more than there are CPUs."""
    most = 0 if costs.stalls else min(costs.cores, _MOST_WORKERS)
    return sorted({0, most, *(2**power for power in range(most.bit_length()) if 2**power < most)})


def limits_gib(costs: Costs, codec: str | None, most_bytes: int) -> list[float]:
    """Return the values of ``size_limit_gib`` that are worth a forecast, besides 0. Only the last may hold all samples."""
    if codec not in costs.ways:
        return []
    needed = costs.ways[codec].nbytes(costs.samples) * _ROOM + MIB
    room = min(needed, most_bytes)
    limits = [round_digits(share * room / GIB, 3, up=True) for share in _SHARES]
    if needed > most_bytes:
        limits[-1] = round_digits(room / GIB, 3, up=False)
    parts = [limit for limit in limits[:-1] if cached_share(costs, int(limit * GIB), codec) < 1]
    return [limit for limit in [*parts, limits[-1]] if 0 < limit * GIB <= most_bytes]


def candidates(costs: Costs, batch_sizes: Sequence[int], most_bytes: int) -> list[Setting]:
    """Return all settings to choose among, with caches of at most ``most_bytes``."""
    caches: list[tuple[float, str | None]] = [(0.0, None)]
    caches += [(limit, codec) for codec in (None, "lz4", "zstd") for limit in limits_gib(costs, codec, most_bytes)]
    return [
        Setting(int(limit * GIB), workers, codec, size)
        for limit, codec in caches
        for workers in worker_counts(costs)
        for size in batch_sizes
    ]


def rank(forecasts: Sequence[Forecast], count: int) -> list[Forecast]:
    """Return the best forecasts, the best first. Of equally fast ones the cheaper is the better.

    Cheaper means: without a codec, then with fewer workers, then with less memory.
    """
    left, best = sorted(forecasts, key=lambda forecast: forecast.epoch_s), list[Forecast]()
    while left and len(best) < count:
        as_fast = [forecast for forecast in left if forecast.epoch_s <= left[0].epoch_s * SAME]
        best.append(min(as_fast, key=_price))
        left.remove(best[-1])
    return best


def _price(forecast: Forecast) -> tuple[bool, int, int, float]:
    setting = forecast.setting
    return setting.codec is not None, setting.workers, forecast.memory_bytes, forecast.epoch_s


def with_chosen_workers(dataset: object, arguments: Mapping[str, Any], make_loader: MakeLoader) -> dict[str, Any]:
    """Return arguments of torch's DataLoader with a number in place of ``num_workers="auto"``, and log why.

    It is the smallest number with which an epoch is predicted to be as fast as it can be if the training step takes no time;
    never more than there are CPUs. The costs of samples and batches are measured for up to 10 s. An iterable dataset gets 0
    workers, because each would yield all samples. A dataset that cannot be measured gets one for each CPU, at most 8. If it is
    0, arguments that torch refuses without workers are left out.

    Args:
        arguments: of the constructor, without default values; "self" and "dataset" are left out of the result.
    """
    chosen = {name: value for name, value in arguments.items() if name not in ("self", "dataset")}
    size = chosen.get("batch_size", getattr(chosen.get("batch_sampler"), "batch_size", 1))
    size = size if isinstance(size, int) and size > 0 else 1
    chosen["num_workers"], reason = _choose_number(dataset, size, chosen.get("collate_fn"), make_loader)
    logger.info("num_workers='auto' chooses %d: %s", chosen["num_workers"], reason)
    if not chosen["num_workers"]:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            chosen.pop(name, None)
    return chosen


def _choose_number(
    dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], object] | None, make_loader: MakeLoader
) -> tuple[int, str]:
    if isinstance(dataset, IterableDataset):
        return 0, "the dataset is iterable, and each worker would yield all of its samples"
    if multiprocessing.current_process().daemon:
        return 0, "this process is daemonic, and may not start workers"
    cores = count_cores()
    fallback = min(cores, _FALLBACK)
    cached = dataset if isinstance(dataset, CachedDataset) else None
    source = dataset if cached is None else cached.dataset
    if holds_cache(source):
        return fallback, "the dataset wraps a CachedDataset, which is not measured"
    codec = cached.cache.codec if cached is not None and isinstance(cached.cache, RaggedCache) else None
    try:
        if not len(source):
            return 0, "the dataset has no samples"
        costs = measure_costs(
            source,
            batch_sizes=(batch_size,),
            make_loader=make_loader,
            time_limit_s=_AUTO_S,
            codecs=(codec,),
            collate_fn=collate_fn,
            transform=None if cached is None else cached.after_cache,
            passes=1,
        )
    except Exception as error:  # of a sample: it is raised again when the sample is requested
        return fallback, f"samples cannot be measured ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    limit = 0 if cached is None else cached.cache.stats().capacity_bytes
    codec = codec if codec in costs.ways else None
    forecasts = [predict(costs, Setting(limit, workers, codec, batch_size)) for workers in worker_counts(costs)]
    share = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)  # ranks of torchrun share the CPUs
    if share > 1:
        forecasts = [each for each in forecasts if each.setting.workers <= max(1, cores // share)]
    best = rank(forecasts, 1)[0]
    return best.setting.workers, (
        f"an epoch is predicted to take {format_seconds(best.epoch_s)} with {best.cached_share:.0%} of the samples cached; "
        + ", ".join(f"{each.setting.workers} workers: {format_seconds(each.epoch_s)}" for each in forecasts)
    )


def holds_cache(dataset: object) -> bool:
    """Return whether a dataset gets samples from a `CachedDataset`."""
    return any(isinstance(found, CachedDataset) for found in walk(dataset))


def choose_method(dataset: object, hooks: bool, trial: "GilTrial") -> str:
    """Return "thread" or "multiprocessing" for the workers of a loader, and log why."""
    method, reason = _choose_method(dataset, hooks, trial)
    *_, innermost = walk(dataset, through=lambda wrapper: passes_on(wrapper) or isinstance(wrapper, CachedDataset))
    if method == "multiprocessing" and trial.stalls(innermost):
        method, reason = "thread", "forked processes would stall"
    logger.info("worker_method='auto' chooses %r: %s", method, reason)
    return method


def _choose_method(dataset: object, hooks: bool, trial: "GilTrial") -> tuple[str, str]:
    if attribute_of(dataset, "thread_safe") is False:
        return "multiprocessing", "the dataset has thread_safe = False"
    if isinstance(dataset, IterableDataset) or has_state(dataset) or holds_generator(dataset):
        return "multiprocessing", "the dataset is iterable, or has a state or a generator of its own"
    if hooks:
        return "multiprocessing", "sample_seed has hooks, which may set objects that threads share"
    handle = find_open_handle(dataset) or find_running(dataset)
    if handle is not None:
        return "multiprocessing", f"threads would share {handle}"
    share = min(map(_gathered_share, makers(dataset)))
    if share >= _CACHED:
        return "thread", f"{share:.0%} of the samples are cached"
    if (os.cpu_count() or 1) < 2:
        return "thread", "there is one CPU"
    if not here.SHARES_MEMORY and holds_cache(dataset):
        return "thread", "on this system processes share no cache"
    speed_up = trial.speed_up(dataset)
    if speed_up is None:
        return "multiprocessing", "threads could not be tried"
    if trial.draws:
        return "multiprocessing", "samples draw from the global random number generators, which threads share"
    better = speed_up >= _SPEED_UP and trial.held <= _MOST_HELD
    reason = f"one thread holds the GIL for {trial.held:.0%} of its time, two make {speed_up:.2f} times as many samples"
    return "thread" if better else "multiprocessing", reason


def _gathered_share(dataset: Any) -> float:
    """Return the share of the samples that need only be gathered."""
    plain = isinstance(dataset, CachedDataset) and not dataset.is_transformed
    return dataset.cache.stats().fill_fraction if plain else 0.0


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

    def speed_up(self, dataset: object) -> float | None:
        """Return the speed-up of two threads over one; None if it could not be measured."""
        if not self._tried:
            self._tried = True
            trial = partial(_measure, dataset)
            try:
                found = list(in_children([trial], dataset, _PATIENCE_S) if here.OPEN_FILES else run_here(trial))
            except Exception as error:  # of a sample: it is raised again when the sample is requested
                logger.debug("threads could not be tried: %s", str(error))
            else:
                self.draws = _DRAWS in found
                rounds = [numbers for numbers in found if numbers != _DRAWS]
                alone_s, together_s, held, looks = (sum(numbers) for numbers in zip((0.0,) * 4, *rounds, strict=True))
                self._speed_up = 2 * alone_s / together_s if together_s > 0 else None
                self.held = held / max(1, looks)
        return self._speed_up

    def stalls(self, dataset: object) -> bool:
        """Return whether forked processes that load samples would stall."""
        if self._stalls is None:
            self._stalls = self._speed_up is None and would_stall(dataset)
        return self._stalls


def _measure(dataset: Any) -> Iterator[tuple[float, float, int, int] | str]:
    """Yield the seconds of one thread and of two in each round, the looks that found the GIL held, and all looks.

    And `_DRAWS`, if samples draw random numbers.

    Runs in a child process, where there are any.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_ROUND_S / 10)  # else a round is too short for threads to take turns
    try:
        yield from _measure_rounds(dataset)
    finally:
        sys.setswitchinterval(interval_s)


def _measure_rounds(dataset: Any) -> Iterator[tuple[float, float, int, int] | str]:
    datasets = copy_dataset(dataset), copy_dataset(dataset)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
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


def _time(datasets: Sequence[object], parts: list[list[int]]) -> float:
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
    """Look at the GIL while a thread loads samples. Return how often it was held, and the number of looks."""
    with ThreadPoolExecutor(1) as threads:
        loaded, found = threads.submit(lambda: [dataset[idx] for idx in part] and None), list[bool]()
        while not loaded.done():
            found.append(look()[1])
        loaded.result()
    return sum(found), len(found)
