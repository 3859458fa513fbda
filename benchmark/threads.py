"""Worker threads beside worker processes: cached batches, photographs, the choice of "auto", slow samples.

Peers that are not installed have empty cells: SPDL (``pip install spdl==0.8.0``), grain (``pip install grain``), dataloader-rs
(``pip install dataloader-rs``, from Python 3.13 on).

``warm``: the two *bare* threads gather rows by ``torch.index_select``, with indices that were drawn before, each into a buffer
that it uses again. SPDL's threads run ``torch.index_select`` on the same rows, the threads of dataloader-rs collate rows of the
same tensors; it shuffles by itself. Workers are kept. An epoch is several passes over the samples.

``photos``: each contender has a fresh interpreter in each round, which has decoded one photograph. The first epoch gives the
time from ``iter()`` to the first batch. *Start* is that time without decoding: without the share that the first batch has in an
epoch. The second epoch, with the workers kept, gives the rate; SPDL and grain start their threads again. In the middle of the
third, the memory (PSS) of the interpreter and all its descendants is read.

``gil``: a new loader in each round. Its first epoch includes the trial of "auto"; its second does not. Both start the workers.

``slow``: the *costs* of an epoch are the seconds that samples take in as many bare threads, which share one list of them. Times
of ``next()`` are those after the first batch. The *limit* is computed from the costs: batches in order, if a free
worker takes the next sample, and nothing else costs. Workers are kept.
"""

import functools
import gc
import hashlib
import heapq
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, TensorDataset

from benchmark.support.datasets import Made, images
from benchmark.support.datasets import photos as decoded_photos
from benchmark.support.harness import Figures, Run, experiment, is_missing
from benchmark.support.measuring import epoch_s, pss, run_threads, settle
from benchmark.support.peers import filled, in_grain, in_rust, in_spdl, in_torch, ours
from benchmark.support.processes import in_interpreter
from stocache import CachedDataset
from stocache.system.limits import MIB

CLAIM = "Worker threads load as fast as processes where the GIL is free, start in 50 ms, and need half of their memory."

WORKERS = 2
PASSES = 4
"""Over the samples, in an epoch of cached batches."""


# ---------------------------------------------------------------------------------------------------- cached batches


@experiment(rounds=5, needs="stocaching")
def warm(run: Run) -> None:
    """Samples per second from a full cache; the limit is two threads that only gather."""
    torch.set_num_threads(1)
    names = "bare", "threads", "processes", "torch over stocaching", "SPDL", "dataloader-rs"
    table = run.table("samples", "batch", "workers", *names, "threads to bare")
    bars = {(3, 64, 64): 0.75, (3, 224, 224): 0.85}
    for dims in bars:
        count = run.size(1024, 32) * MIB // int(np.prod(dims))
        settle(4 * count * int(np.prod(dims)))
        theirs, cached = filled(images(count, dims))
        for batch in run.size((256, 32), (256,)):
            for workers in run.size((1, 2, 4), (2,)):
                contenders = gathering(cached, theirs, batch, workers)
                # until each worker has touched most of the cache, whose pages are mapped into it one by one
                took = run.turns(contenders, warm_up=2)
                rates = (PASSES * count / took.median(name) if name in took else None for name in names)
                table.row("x".join(map(str, dims)), batch, workers, *rates, took.ratio("bare", "threads"))
                del contenders
        del theirs, cached
        gc.collect()
    shares = table.column("threads to bare", batch=256, workers=2)
    for share, (dims, least) in zip(shares, bars.items(), strict=True):
        run.claim(f"threads gather batches of {dims} at {least} of bare threads", share, least=least)


def gathering(cached: Any, theirs: Any, batch: int, workers: int) -> dict[str, Callable[[], float]]:
    """Return functions that run an epoch with each contender. Processes are forked before there are threads."""
    count, (rows, labels) = len(cached), cached.cache.array
    columns = rows.flatten(1).view(torch.int64), labels
    drawn = [indices for _ in range(PASSES) for indices in torch.randperm(count).split(batch)]
    options = {"sampler": RandomSampler(range(count), num_samples=PASSES * count)}
    contenders: dict[str, Callable[[], float]] = {
        "torch over stocaching": functools.partial(epoch_s, in_torch(theirs, batch, workers, **options)),
        "processes": functools.partial(epoch_s, ours(cached, batch, workers, "multiprocessing", **options)),
        "threads": functools.partial(epoch_s, ours(cached, batch, workers, "thread", **options)),
        "bare": functools.partial(bare_gather, columns, drawn),
    }
    if not is_missing("spdl"):
        select = functools.partial(_select, columns)
        contenders["SPDL"] = functools.partial(epoch_s, in_spdl(drawn, select, None, workers))
    if not is_missing("dataloader_rs"):
        loader = in_rust(TensorDataset(rows, labels), batch, workers)
        contenders["dataloader-rs"] = lambda: sum(epoch_s(loader) for _ in range(PASSES))
    return contenders


def _select(columns: Iterable[Tensor], indices: Tensor) -> list[Tensor]:
    return [torch.index_select(column, 0, indices) for column in columns]


def bare_gather(columns: Sequence[Tensor], drawn: list[Tensor]) -> float:
    """Return the seconds in which two threads gather batches, each into a buffer of its own."""
    left = iter(drawn)

    def gather(buffer: list[Tensor]) -> None:
        for indices in left:  # next() of a list's iterator is atomic
            for column, rows in zip(columns, buffer, strict=True):
                torch.index_select(column, 0, indices, out=rows[: len(indices)])

    return run_threads(gather, [[column[: len(drawn[0])].clone() for column in columns] for _ in range(2)])


# ---------------------------------------------------------------------------------------------------- photographs

DECODERS: dict[str, tuple[str, Callable[[Any, int, int], Any]]] = {  # each with the module that it needs
    "threads": ("stocache", lambda *arguments: ours(*arguments, "thread")),
    "processes, fork": ("stocache", lambda *arguments: ours(*arguments, "multiprocessing", multiprocessing_context="fork")),
    "processes, spawn": ("stocache", lambda *arguments: ours(*arguments, "multiprocessing", multiprocessing_context="spawn")),
    "torch, fork": ("torch", lambda *arguments: in_torch(*arguments, multiprocessing_context="fork")),
    "SPDL, threads": (
        "spdl",
        lambda dataset, *arguments: in_spdl(torch.randperm(len(dataset)).tolist(), dataset.__getitem__, *arguments),
    ),
    "grain, threads": ("grain", in_grain),
    "dataloader-rs, threads": ("dataloader_rs", in_rust),
}


def photo_run(name: str, paths: list[str], count: int) -> tuple[float, float, float]:
    """Return the photographs per second of a contender, the seconds to start, and the bytes: three epochs, batches of 32."""
    torch.set_num_threads(1)
    dataset = decoded_photos(count, [Path(path) for path in paths])
    dataset[0]  # loads the decoder
    loader, first_s = DECODERS[name][1](dataset, 32, WORKERS), 0.0
    began = time.perf_counter()
    for _ in loader:
        first_s = first_s or time.perf_counter() - began
    took_s = epoch_s(loader)
    nbytes, middle = 0, count // 32 // 2
    for number, _ in enumerate(loader):
        if number == middle:
            nbytes = pss(os.getpid())
    return count / took_s, first_s - min(1.0, 32 / count) * took_s, nbytes


@experiment(rounds=5)
def photos(run: Run) -> None:
    """Rates, times to start, and memory, with photographs that are decoded."""
    found, count = [str(path) for path in run.photos(160)], run.size(600, 64)
    for path in found:
        Path(path).read_bytes()  # into the page cache
    names = [name for name, (module, _) in DECODERS.items() if not is_missing(module)]
    runs = run.results({name: functools.partial(in_interpreter, photo_run, name, found, count) for name in names}, warm_up=0)
    rate, start_s, nbytes = Figures.columns(runs)
    forked, spawned = "processes, fork", "processes, spawn"
    table = run.table("contender", "photos/s", "to fork", "start, ms", "memory, MiB", "memory to fork", "to spawn")
    for name in names:
        to_bytes = nbytes.ratio(name, forked), nbytes.ratio(name, spawned)
        table.row(
            name, rate.median(name), rate.ratio(name, forked), 1e3 * start_s.median(name), nbytes.median(name) / MIB, *to_bytes
        )
    run.claim("threads decode at the rate of processes", rate.ratio("threads", forked), least=0.98)
    run.claim("they start in 50 ms", 1e3 * start_s.median("threads"), most=50)
    run.claim("they need half of the memory of forked processes", nbytes.ratio("threads", forked), most=0.5)
    run.claim("they need half of the memory of spawned processes", nbytes.ratio("threads", spawned), most=0.5)


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


def costly(work: Callable[[float], None], steps: list[float]) -> Made:
    """Return small images that take work to make: a number of steps for each."""
    image = torch.zeros((3, 32, 32), dtype=torch.uint8)

    def sample(idx: int) -> Any:
        work(steps[idx])
        return image, idx

    return Made(len(steps), sample)


def second_epoch(dataset: Any, method: str) -> tuple[float, bool]:
    """Return the samples per second of the second epoch of a new loader, and whether it has used threads."""
    loader = ours(dataset, 32, WORKERS, method, persistent_workers=False)
    epoch_s(loader)
    return len(dataset) / epoch_s(loader), loader._stocache._uses_threads


@experiment(rounds=5)
def gil(run: Run) -> None:
    """What worker_method="auto" chooses for samples of 1 ms, and samples per second in the second epoch."""
    torch.set_num_threads(1)
    table = run.table("samples", "worker_method", "second epoch, /s", "auto to it", "used threads")
    right = []
    methods = "auto", "multiprocessing", "thread"
    for kind, work, wanted in (("hold the GIL", python_work, "multiprocessing"), ("leave it free", c_work, "thread")):
        dataset = costly(work, [steps_for(work, 0.001)] * run.size(2000, 500))
        found = run.results({method: functools.partial(second_epoch, dataset, method) for method in methods})
        rate, uses_threads = Figures.columns(found)
        for method in methods:
            often = f"{sum(uses_threads[method]):.0f} of {run.rounds} times"
            table.row(kind, method, rate.median(method), rate.ratio("auto", method), often)
        right.append(sum(uses_threads["auto"]) == (run.rounds if wanted == "thread" else 0))
    shares = table.column("auto to it", samples="hold the GIL", worker_method="multiprocessing")
    shares += table.column("auto to it", samples="leave it free", worker_method="thread")
    run.claim("auto chooses processes for samples that hold the GIL, threads for the others", all(right))
    run.claim("and is not slower than what it chooses", min(shares), least=0.98)


# ---------------------------------------------------------------------------------------------------- slow samples


Steps = tuple[float, float]
"""An epoch: its seconds, and the 99th percentile of the times of ``next()`` to their median."""


def steps_of(ends_s: list[float]) -> Steps:
    """Return the figures of batches that come at these times."""
    p50_s, p99_s = np.quantile(np.diff(ends_s), (0.5, 0.99)).tolist()
    return ends_s[-1], p99_s / p50_s


def next_times(loader: Iterable[Any]) -> Steps:
    """Run an epoch, and look at the times of ``next()``."""
    began = time.perf_counter()
    return steps_of([time.perf_counter() - began for _ in loader])


def bare_costs(dataset: Any) -> list[float]:
    """Return the seconds that each sample takes, in the order in which as many threads take them."""
    left, costs_s = iter(enumerate(torch.randperm(len(dataset)).tolist())), [0.0] * len(dataset)

    def load(_: int) -> None:
        for at, idx in left:
            began = time.perf_counter()
            dataset[idx]
            costs_s[at] = time.perf_counter() - began

    run_threads(load, range(WORKERS))
    return costs_s


def best_steps(costs_s: list[float], batch: int) -> Steps:
    """Return the figures of batches in order, if a free worker takes the next sample, and nothing else costs."""
    free_s, done_s = [0.0] * WORKERS, []
    for cost_s in costs_s:
        end_s = heapq.heappop(free_s) + cost_s
        heapq.heappush(free_s, end_s)
        done_s.append(end_s)
    return steps_of(np.maximum.accumulate(done_s)[batch - 1 :: batch].tolist())


@experiment(rounds=5)
def slow(run: Run) -> None:
    """How even the times of ``next()`` are, if one sample in ten takes 20 times as long."""
    torch.set_num_threads(1)
    table = run.table("cost", "cached", "batch", "contender", "p99 to p50", "epoch to costs")
    for kind, work in (("sleep", time.sleep), ("busy", c_work)):
        step, count = steps_for(work, 0.0005), run.size(10_240, 1_024)
        dataset = costly(work, [step * times for times in random.Random(0).choices((1, 20), (0.9, 0.1), k=count)])
        with CachedDataset(dataset, f"{count // 2 * (3 * 32 * 32 + 9)}B") as half:
            half.warm(progress=False)
            for (cached, source), batch in ((case, batch) for case in (("0%", dataset), ("50%", half)) for batch in (32, 256)):
                took, spread = Figures.columns(slow_epochs(run, source, batch))
                for name in ("limit", "threads", "processes", "torch"):
                    table.row(kind, cached, batch, name, spread.median(name), took.ratio(name, "costs"))
    spreads = table.column("p99 to p50", contender="threads", batch=256)
    run.claim("threads stay within 5 % of the costs", max(table.column("epoch to costs", contender="threads")), most=1.05)
    run.claim("p99 of next() is within 1.5 of p50, batches of 256", max(spreads), most=1.5)


def slow_epochs(run: Run, dataset: Any, batch: int) -> dict[str, list[Steps]]:
    """Return the epochs of each loader, of the computed limit, and of the costs alone."""
    contenders: dict[str, Callable[[], Any]] = {
        "torch": functools.partial(next_times, in_torch(dataset, batch, WORKERS)),
        "processes": functools.partial(next_times, ours(dataset, batch, WORKERS, "multiprocessing")),
        "threads": functools.partial(next_times, ours(dataset, batch, WORKERS, "thread")),
        "costs": functools.partial(bare_costs, dataset),
    }
    found = run.results(contenders)
    costs = found.pop("costs")
    found["limit"] = [best_steps(costs_s, batch) for costs_s in costs]
    found["costs"] = [(sum(costs_s) / WORKERS, 0.0) for costs_s in costs]
    return found
