"""Worker threads beside worker processes: cached batches, photographs, the choice of "auto", slow samples, a long run.

python -m benchmark threads warm                       # everything is cached; the limit is two threads that only gather
python -m benchmark threads photos [--folder PHOTOS]   # JPEG decoding: rate, time to the first batch, memory
python -m benchmark threads gil                        # what worker_method="auto" chooses, and what its trial costs
python -m benchmark threads slow                       # one sample in ten takes 20 times as long
python -m benchmark threads soak --batches 100000      # memory, threads, and batches that are held

All contenders take turns, round by round, in an order that rotates; figures are medians, and ratios are medians of the ratios
within a round. A round that is not counted goes first. Peers that are not installed have empty cells: torch's DataLoader over
stocaching (``pip install --no-deps stocaching==0.2.1``), SPDL (``pip install spdl==0.8.0``), grain (``pip install grain``),
dataloader-rs (``pip install dataloader-rs``, from Python 3.13 on).

``warm``: the *bare* threads gather rows by ``torch.index_select``, with indices that were drawn before, into memory that they
use again: each into one buffer, or into eight in turn, as a loader must whose user may hold batches. *With torch's sampler*
means eight buffers, too, and that the main thread draws the indices meanwhile, as it must in any loader. SPDL's threads run
``torch.index_select`` on the same rows, those of dataloader-rs collate rows of the same tensors; it shuffles by itself. Workers
are kept. An epoch is several passes over the samples.

``photos``: each contender has a fresh interpreter in each round, which has decoded one photograph. The first epoch gives the
time from ``iter()`` to the first batch. *Start* is that time without decoding: without the share that the first batch has in an
epoch. The second epoch, with the workers kept, gives the rate; SPDL and grain start their threads again. In the middle of the
third, the memory (PSS) of the interpreter and all its descendants is read. *Added* is what it had not before the first epoch.

``gil``: a new loader in each round. Its first epoch includes the trial of "auto"; its second does not. Both start the workers.

``slow``: the *costs* of an epoch are the seconds that samples take in as many bare threads, which share one list of them. Times
of ``next()`` are those after the first batch. The *limit* is computed from the costs: batches in order, if a free
worker takes the next sample, and nothing else costs. Workers are kept.
"""

import argparse
import functools
import gc
import hashlib
import heapq
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, RandomSampler, TensorDataset, default_collate
from tqdm import tqdm

import stocache
from benchmark.__main__ import is_missing
from benchmark.filling import Photos
from benchmark.loader import Images, epoch, filled
from benchmark.support.measuring import machine, pss, settle
from benchmark.support.peers import in_rust
from stocache import CachedDataset
from stocache.system.limits import MIB, format_size
from stocache.tools.bench import find_jpegs, photo_folder

CLAIM = "Worker threads load as fast as processes where the GIL is free, start in 50 ms, and need half of their memory."
NEEDS = (("PIL", '-e ".[bench]"'),)

PREFETCH = 2  # batches of each worker
NOISE = 0.02  # a ratio of 0.98 is "not slower"

Result = TypeVar("Result")


def take_turns(contenders: dict[str, Callable[[], Result]], repeats: int) -> dict[str, list[Result]]:
    """Return what each contender returns in each round; a round that is not counted goes first."""
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(repeats + 1):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            result = contenders[name]()
            if number:
                results[name].append(result)
    return results


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the median over the rounds of one figure to another."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def _met(is_met: bool) -> str:
    return "yes" if is_met else "no"


def _row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _header(*names: str) -> None:
    _row(*names)
    _row(*("---" for _ in names))


def ours(dataset: Any, batch: int, workers: int, method: str, **options: Any) -> Any:
    """Return our loader; it shuffles, unless it has a sampler, and keeps its workers."""
    options = {"persistent_workers": True, "shuffle": "sampler" not in options, "prefetch_factor": PREFETCH} | options
    return stocache.DataLoader(dataset, batch, num_workers=workers, worker_method=method, **options)


def in_torch(dataset: Any, batch: int, workers: int, **options: Any) -> Any:
    """Return torch's loader with the same options."""
    options = {"persistent_workers": True, "shuffle": "sampler" not in options, "prefetch_factor": PREFETCH} | options
    return torch.utils.data.DataLoader(dataset, batch, num_workers=workers, **options)


def in_spdl(source: Any, function: Callable[[Any], Any], batch: int | None, workers: int) -> Any:
    """Return a loader of SPDL, whose threads call the function for each item, and collate if there is a batch size."""
    import spdl.dataloader  # not above: interpreters that measure other contenders shall not hold it

    return spdl.dataloader.DataLoader(
        source,
        preprocessor=function,
        batch_size=batch,
        aggregator=default_collate if batch else None,
        buffer_size=PREFETCH * workers,
        num_threads=workers,
        output_order="input",
    )


def in_grain(dataset: Any, batch: int, workers: int) -> Any:
    """Return a dataset of grain that makes each batch in a thread, as its documentation shows."""
    import grain

    batches = grain.MapDataset.source(dataset).shuffle(seed=0).batch(batch, batch_fn=default_collate)
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=PREFETCH * workers))


# ---------------------------------------------------------------------------------------------------- cached batches

SHAPES = {(3, 64, 64): 0.75, (3, 224, 224): 0.85}  # of samples, each with its bar
BARE_THREADS = 2
HELD = 8  # buffers of each bare thread
PASSES = 4  # over the samples in an epoch


def warm(options: argparse.Namespace) -> None:
    """Print the rates of batches from a full cache."""
    peers = "torch over stocaching", "SPDL", "dataloader-rs"
    bare = f"bare, {BARE_THREADS} threads", f"bare, {HELD} buffers each", "bare, with torch's sampler"
    names = *bare, "threads", "processes", *peers
    rates = (f"{name}, /s" for name in names)
    _header("samples", "batch", "workers", *rates, "threads to bare", "bar", "met", *(f"to {name}" for name in bare[1:]))
    for dims, bar in SHAPES.items():
        count = max(1, options.mb * MIB // int(np.prod(dims)))
        settle(4 * options.mb * MIB)
        source = Images(count, dims, labels=True)
        if is_missing("stocaching"):
            theirs, cached = None, CachedDataset(source, 4)
            cached.warm(progress=False)
        else:
            theirs, cached = filled(source)
        for batch in options.batch or (256, 32):
            for workers in options.workers or (1, 2, 4):
                found = _warm_rates(cached, theirs, batch, workers, options.repeats)
                cells = [f"{statistics.median(found[name]):,.0f}" if name in found else "" for name in names]
                share, *others = (ratio(found["threads"], found[name]) for name in bare)
                name = f"{'x'.join(map(str, dims))} uint8, label"
                _row(
                    name, batch, workers, *cells, f"{share:.2f}", bar, _met(share >= bar), *(f"{other:.2f}" for other in others)
                )
        del theirs, cached
        gc.collect()


def _warm_rates(cached: Any, theirs: Any, batch: int, workers: int, repeats: int) -> dict[str, list[float]]:
    """Return the samples per second of each contender, round by round."""
    count = len(cached)
    images, labels = cached.cache.array
    columns = images.flatten(1).view(torch.int64), labels
    drawn = [indices for _ in range(PASSES) for indices in torch.randperm(count).split(batch)]
    memory = [
        [[column.new_zeros(batch, *column.shape[1:]) for column in columns] for _ in range(HELD)] for _ in range(BARE_THREADS)
    ]

    def loader(make: Callable[..., Any], dataset: Any, *arguments: Any) -> Callable[[], float]:
        sampler = RandomSampler(dataset, num_samples=PASSES * count)
        return functools.partial(epoch, make(dataset, batch, workers, *arguments, sampler=sampler))

    contenders: dict[str, Callable[[], float]] = {}  # processes are forked before there are threads
    if theirs is not None:
        contenders["torch over stocaching"] = loader(in_torch, theirs)
    contenders["processes"] = loader(ours, cached, "multiprocessing")
    contenders["threads"] = loader(ours, cached, "thread")
    contenders[f"bare, {BARE_THREADS} threads"] = lambda: bare_gather(columns, drawn, [buffers[:1] for buffers in memory])
    contenders[f"bare, {HELD} buffers each"] = lambda: bare_gather(columns, drawn, memory)
    sampler = BatchSampler(RandomSampler(range(count), num_samples=PASSES * count), batch, drop_last=False)
    contenders["bare, with torch's sampler"] = lambda: bare_gather(columns, sampler, memory)
    if not is_missing("spdl"):
        gather = functools.partial(_gather, columns)
        contenders["SPDL"] = functools.partial(epoch, in_spdl(drawn, gather, None, workers))
    if not is_missing("dataloader_rs"):
        loader_in_rust = in_rust(TensorDataset(images, labels), batch, workers, prefetch=PREFETCH)
        contenders["dataloader-rs"] = lambda: sum(epoch(loader_in_rust) for _ in range(PASSES))
    for contender in contenders.values():
        contender()  # until each worker has touched most of the cache, whose pages are mapped into it one by one
    return {name: [PASSES * count / took for took in times] for name, times in take_turns(contenders, repeats).items()}


def _gather(columns: Iterable[Tensor], indices: Tensor) -> list[Tensor]:
    return [torch.index_select(column, 0, indices) for column in columns]


def bare_gather(columns: Iterable[Tensor], batches: Iterable[Any], memory: list[list[list[Tensor]]]) -> float:
    """Return the seconds in which threads gather batches, each into its own buffers in turn, while this thread draws them."""
    drawn: SimpleQueue[Any] = SimpleQueue()

    def gather(buffers: list[list[Tensor]]) -> None:
        for buffer in cycle(buffers):
            indices = drawn.get()
            if indices is None:
                return
            indices = torch.as_tensor(indices)
            for column, rows in zip(columns, buffer, strict=True):
                torch.index_select(column, 0, indices, out=rows[: len(indices)])

    def draw() -> None:
        for indices in batches:
            drawn.put(indices)
        for _ in memory:
            drawn.put(None)

    return run_threads(gather, memory, draw)


def run_threads(function: Callable[[Any], None], arguments: list[Any], meanwhile: Callable[[], None] = lambda: None) -> float:
    """Return the seconds in which threads, one for each argument, call a function. This thread calls ``meanwhile``."""
    threads = [threading.Thread(target=function, args=(argument,)) for argument in arguments]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------------------- photographs

DECODERS: dict[str, tuple[str, Callable[[Any, int, int], Any]]] = {  # each with the module that it needs
    "threads": ("stocache", lambda *arguments: ours(*arguments, "thread")),
    "processes, fork": ("stocache", lambda *arguments: ours(*arguments, "multiprocessing", multiprocessing_context="fork")),
    "processes, spawn": ("stocache", lambda *arguments: ours(*arguments, "multiprocessing", multiprocessing_context="spawn")),
    "torch, fork": ("torch", lambda *arguments: in_torch(*arguments, multiprocessing_context="fork")),
    "SPDL, threads": (
        "spdl",
        lambda photos, *arguments: in_spdl(torch.randperm(len(photos)).tolist(), photos.__getitem__, *arguments),
    ),
    "grain, threads": ("grain", in_grain),
    "dataloader-rs, threads": ("dataloader_rs", lambda *arguments: in_rust(*arguments, prefetch=PREFETCH)),
}


class PhotoRun(NamedTuple):
    """What a contender needs for photographs; or, of each, what it needs in each round."""

    rate: Any
    first_s: Any
    start_s: Any
    nbytes: Any
    added: Any


def photos(options: argparse.Namespace) -> None:
    """Print rates, times to the first batch, and memory, where the samples are photographs."""
    found = find_jpegs(options.folder or photo_folder(min(options.photos, 160)))
    paths = [path for path, _ in zip(cycle(found), range(options.photos), strict=False)]
    for path in found:
        path.read_bytes()  # into the page cache
    workers, batch = (options.workers or [2])[0], (options.batch or [32])[0]
    names = [name for name, (module, _) in DECODERS.items() if not is_missing(module)]
    runs: dict[str, list[PhotoRun]] = {name: [] for name in names}
    for number in range(options.repeats):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            runs[name].append(_in_fresh_interpreter(photo_run, name, paths, batch, workers))
    print(f"{len(paths)} samples of {len(found)} photographs, batches of {batch}, {workers} workers\n")
    _header(
        "contender", "photos/s", "to fork", "first batch, ms", "start, ms", "memory, MiB", "to fork", "to spawn", "added, MiB"
    )
    columns = {name: PhotoRun(*zip(*each, strict=True)) for name, each in runs.items()}
    forked, spawned = columns["processes, fork"], columns["processes, spawn"]
    for name in DECODERS:
        if name not in columns:
            _row(name, *[""] * 8)
            continue
        each = columns[name]
        rate, first_s, start_s, nbytes, added = map(statistics.median, each)
        to_rate, *to_bytes = (
            ratio(each.rate, forked.rate),
            ratio(each.nbytes, forked.nbytes),
            ratio(each.nbytes, spawned.nbytes),
        )
        times = f"{rate:,.0f}", f"{to_rate:.2f}", f"{first_s * 1e3:,.0f}", f"{start_s * 1e3:,.0f}"
        _row(name, *times, f"{nbytes / MIB:,.0f}", *(f"{share:.2f}" for share in to_bytes), f"{added / MIB:,.0f}")
    mine = columns["threads"]
    rate, start_ms = ratio(mine.rate, forked.rate), statistics.median(mine.start_s) * 1e3
    print()
    _header("threads", "bar", "figure", "met")
    _row("rate to that of processes, fork", f"at least {1 - NOISE}", f"{rate:.2f}", _met(rate >= 1 - NOISE))
    _row("start", "at most 50 ms", f"{start_ms:,.0f} ms", _met(start_ms <= 50))
    for name, base in (("fork", forked), ("spawn", spawned)):
        share = ratio(mine.nbytes, base.nbytes)
        _row(f"memory to that of processes, {name}", "at most 0.5", f"{share:.2f}", _met(share <= 0.5))


def _in_fresh_interpreter(function: Callable[..., Result], *arguments: Any) -> Result:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def photo_run(name: str, paths: list[Path], batch: int, workers: int) -> PhotoRun:
    """Run three epochs of one contender."""
    torch.set_num_threads(1)
    dataset: Any = Photos(paths)
    dataset[0]  # loads the decoder
    _, make = DECODERS[name]
    loader = make(dataset, batch, workers)
    before, first_s = pss(os.getpid()), 0.0
    began = time.perf_counter()
    for _ in loader:
        first_s = first_s or time.perf_counter() - began
    took_s = epoch(loader)
    nbytes, middle = 0, len(paths) // batch // 2
    for number, _ in enumerate(loader):
        if number == middle:
            nbytes = pss(os.getpid())
    share = min(1.0, batch / len(paths))
    return PhotoRun(len(paths) / took_s, first_s, first_s - share * took_s, nbytes, nbytes - before)


# ---------------------------------------------------------------------------------------------------- the choice of "auto"


def python_work(steps: float) -> None:
    """Hold the GIL for that many steps."""
    for _ in range(int(steps)):
        pass


def c_work(steps: float) -> None:
    """Be busy for that many steps without the GIL."""
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", int(steps))


def steps_for(work: Callable[[float], None], seconds: float) -> float:
    """Return how many steps of some work take that long."""
    if work is time.sleep:
        return seconds
    times, steps = [], 2000
    for _ in range(20):
        began = time.perf_counter()
        work(steps)
        times.append(time.perf_counter() - began)
    return max(1.0, steps * seconds / statistics.median(times))


class Costly(Dataset[Any]):
    """Small images that take work to make: a number of steps for each."""

    def __init__(self, work: Callable[[float], None], steps: list[float]) -> None:
        self.work, self.steps = work, steps
        self.image = torch.zeros((3, 32, 32), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, idx: int) -> Any:
        self.work(self.steps[idx])
        return self.image, idx


class TwoEpochs(NamedTuple):
    """Samples per second of the two epochs of a loader."""

    first: float
    second: float
    uses_threads: bool


def gil(options: argparse.Namespace) -> None:
    """Print what "auto" chooses for samples that hold the GIL, and for samples that leave it free, and how fast that is."""
    workers, batch = (options.workers or [2])[0], (options.batch or [32])[0]
    names = "auto, first epoch", "auto, second", "processes, first epoch", "second", "threads, first epoch", "second"
    ratios = "first to processes", "second to processes", "second to threads"
    _header("samples of 1 ms", "auto chooses", *(f"{name}, /s" for name in names), *ratios, "bar of the second", "met")
    for kind, work, wanted in (("hold the GIL", python_work, "processes"), ("leave it free", c_work, "threads")):
        dataset = Costly(work, [steps_for(work, 0.001)] * (options.samples or 2000))

        def run(method: str, dataset: Any = dataset) -> TwoEpochs:
            loader = ours(dataset, batch, workers, method, persistent_workers=False)
            return TwoEpochs(*(len(dataset) / epoch(loader) for _ in range(2)), loader._stocache._uses_threads)

        methods = "auto", "multiprocessing", "thread"
        contenders = {method: functools.partial(run, method) for method in methods}
        runs = {name: list(zip(*each, strict=True)) for name, each in take_turns(contenders, options.repeats).items()}
        chosen = ["threads" if threads else "processes" for threads in runs["auto"][2]]
        cells = [f"{statistics.median(runs[method][column]):,.0f}" for method in methods for column in (0, 1)]
        first, second = (ratio(runs["auto"][column], runs["multiprocessing"][column]) for column in (0, 1))
        to_threads = ratio(runs["auto"][1], runs["thread"][1])
        often = f"{wanted}, {chosen.count(wanted)} of {len(chosen)} times"
        is_met = chosen.count(wanted) == len(chosen) and (second if wanted == "processes" else to_threads) >= 1 - NOISE
        bar = f"{wanted}, and {1 - NOISE} of their rate"
        _row(kind, often, *cells, f"{first:.2f}", f"{second:.2f}", f"{to_threads:.2f}", bar, _met(is_met))


# ---------------------------------------------------------------------------------------------------- slow samples

SLOW_SHARE, TIMES_SLOWER = 0.1, 20
COST_S = 0.0005  # of the other samples


class Steps(NamedTuple):
    """An epoch: its seconds; of the times of ``next()`` the median, the 99th percentile, and their ratio."""

    took_s: float
    p50_s: float
    p99_s: float
    spread: float


def slow(options: argparse.Namespace) -> None:
    """Print how even the times of ``next()`` are, where some samples are slow."""
    workers = (options.workers or [2])[0]
    _header(
        *("cost", "cached", "batch", "contender", "p50, ms", "p99, ms", "p99 to p50", "at most 1.5"),
        *("epoch to costs / workers", "within 5 %"),
    )
    for kind, work in (("sleep", time.sleep), ("busy", c_work)):
        step = steps_for(work, COST_S)
        drawn = random.Random(0).choices((1, TIMES_SLOWER), (1 - SLOW_SHARE, SLOW_SHARE), k=options.samples or 10_240)
        dataset = Costly(work, [step * times for times in drawn])
        _slow_rows(kind, dataset, workers, options)
        with CachedDataset(dataset, f"{len(dataset) // 2 * (dataset.image.numel() + 9)}B") as half:
            half.warm(progress=False)
            _slow_rows(kind, half, workers, options)


def _slow_rows(kind: str, dataset: Any, workers: int, options: argparse.Namespace) -> None:
    filled_share = dataset.stats().total.filled / len(dataset) if isinstance(dataset, CachedDataset) else 0
    for batch in options.batch or (32, 256):
        loaders = {
            "torch": in_torch(dataset, batch, workers),
            "processes": ours(dataset, batch, workers, "multiprocessing"),
            "threads": ours(dataset, batch, workers, "thread"),
        }
        contenders: dict[str, Callable[[], Any]] = {name: functools.partial(next_times, each) for name, each in loaders.items()}
        found = take_turns(contenders | {"costs": functools.partial(bare_costs, dataset, workers)}, options.repeats)
        costs = found.pop("costs")
        shares_s = [sum(costs_s) / workers for costs_s in costs]
        found["limit"] = [best_steps(costs_s, batch, workers) for costs_s in costs]
        for name in reversed(found):
            took_s, p50_s, p99_s, spreads = zip(*found[name], strict=True)
            spread, share = statistics.median(spreads), ratio(took_s, shares_s)
            mets = (_met(spread <= 1.5), _met(share <= 1.05)) if name == "threads" else ("", "")
            shown = f"{statistics.median(p50_s) * 1e3:.2f}", f"{statistics.median(p99_s) * 1e3:.2f}", f"{spread:.2f}"
            _row(kind, f"{filled_share:.0%}", batch, name, *shown, mets[0], f"{share:.3f}", mets[1])
        del loaders, contenders
        gc.collect()


def next_times(loader: Iterable[Any]) -> Steps:
    """Run an epoch, and look at the times of ``next()``."""
    began = time.perf_counter()
    return _steps([time.perf_counter() - began for _ in loader])


def _steps(ends_s: list[float]) -> Steps:
    """Return the figures of batches that come at these times."""
    p50_s, p99_s = np.quantile(np.diff(ends_s), (0.5, 0.99)).tolist()
    return Steps(ends_s[-1], p50_s, p99_s, p99_s / p50_s)


def bare_costs(dataset: Any, workers: int) -> list[float]:
    """Return the seconds that each sample takes, in the order in which as many threads take them."""
    left, costs_s = iter(enumerate(torch.randperm(len(dataset)).tolist())), [0.0] * len(dataset)

    def load(_: int) -> None:
        for at, idx in left:
            began = time.perf_counter()
            dataset[idx]
            costs_s[at] = time.perf_counter() - began

    run_threads(load, list(range(workers)))
    return costs_s


def best_steps(costs_s: list[float], batch: int, workers: int) -> Steps:
    """Return the figures of batches in order, if a free worker takes the next sample, and nothing else costs."""
    free_s, done_s = [0.0] * workers, []
    for cost_s in costs_s:
        end_s = heapq.heappop(free_s) + cost_s
        heapq.heappush(free_s, end_s)
        done_s.append(end_s)
    return _steps(np.maximum.accumulate(done_s)[batch - 1 :: batch].tolist())


# ---------------------------------------------------------------------------------------------------- a long run


def soak(options: argparse.Namespace) -> None:
    """Run for long; print a table of memory, threads and descriptors, and fail if anything was wrong or is left."""
    from benchmark.soak import Holder, Source

    rng, generator = random.Random(0), torch.manual_seed(0)
    full, half = CachedDataset(Source(), 1), CachedDataset(Source(), f"{len(Source()) * 3 * 24 * 24 // 2}B")
    full.warm(progress=False)
    before = len(os.listdir("/proc/self/task"))
    loaders = [
        ours(full, 16, 2, "thread", generator=generator),
        ours(full, 16, 4, "thread", persistent_workers=False),
        ours(half, 16, 2, "thread"),
        ours(Source(), 16, 2, "thread", persistent_workers=False, in_order=False),
    ]
    holder, done, left, tenth, memory = Holder(rng), 0, 0, max(1, options.batches // 10), []
    _header("batches", "resident memory", "threads", "descriptors")
    with tqdm(total=options.batches, unit="batch", file=sys.stderr) as bar:
        while done < options.batches:
            stop = rng.choice([rng.randrange(1, 400), 10**9])
            for number, (images, labels) in enumerate(rng.choice(loaders), 1):
                holder.take(images, labels)
                done += 1
                bar.update()
                if done % tenth == 0:
                    memory.append(psutil.Process().memory_info().rss)
                    counts = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
                    _row(f"{done:,}", format_size(memory[-1]), *counts)
                if number >= stop or done >= options.batches:
                    left += 1
                    break
    del loaders, images, labels
    gc.collect()
    threads_left = _wait_for_threads(before)
    print(f"\n{done:,} batches, {holder.checks:,} checksums, {holder.errors} wrong; {left} loops left early")
    print(f"resident memory at the end to that at a tenth: {memory[-1] / memory[0]:.3f}; {threads_left} threads left")
    if holder.errors or threads_left:
        raise SystemExit(1)


def _wait_for_threads(before: int) -> int:
    """Return how many threads there are beside those before. They have ten seconds to end."""
    until = time.monotonic() + 10
    while (count := len(os.listdir("/proc/self/task")) - before) > 0 and time.monotonic() < until:
        time.sleep(0.01)
    return count


def main() -> None:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["warm", "photos", "gil", "slow", "soak"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", help="1, 2 and 4 of warm; 2 of photos, gil and slow")
    parser.add_argument("--mb", type=int, default=1024, help="MiB of samples of each shape, for warm")
    parser.add_argument("--folder", type=Path, help="of photographs; by default they are generated")
    parser.add_argument("--photos", type=int, default=600, help="samples; each photograph is used several times")
    parser.add_argument("--batch", type=int, nargs="+", help="32 and 256 of warm and slow; 32 of photos and gil")
    parser.add_argument("--samples", type=int, help="2000 of gil, 10240 of slow")
    parser.add_argument("--batches", type=int, default=100_000, help="of soak")
    options = parser.parse_args()
    print(f"{machine()}\n")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs, which is wanted
    {"warm": warm, "photos": photos, "gil": gil, "slow": slow, "soak": soak}[options.part](options)


if __name__ == "__main__":
    main()
