"""The cost of single calls, beside stocaching and memcpy in the same run."""

import random
import re
import time
from collections.abc import Callable
from ctypes import memmove
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmark.support.harness import Figures, Run, experiment
from benchmark.support.measuring import for_each, settle
from benchmark.support.peers import stocaching
from benchmark.support.processes import in_fork
from stocache import SharedCache
from stocache.system import limits
from stocache.system.limits import GIB, MIB

CLAIM = "A cache is made in under 50 ms, a hit costs no more than in stocaching, a batch is gathered at 80 % of memcpy."

DIMS = (3, 64, 64)
ROW = 3 * 64 * 64


@experiment(rounds=3, needs="stocaching")
def construction(run: Run) -> None:
    """Time and resident memory of making a cache."""
    gib, process = run.size(16, 1), psutil.Process()
    samples = gib * GIB // (ROW + 1)

    def made(make: Callable[[], Any]) -> tuple[float, int]:
        before, began = process.memory_info().rss, time.perf_counter()
        cache = make()
        took, growth = time.perf_counter() - began, process.memory_info().rss - before
        del cache
        return took, growth

    makers: dict[str, Callable[[], Any]] = {
        "stocache, 16 GiB, all resident": lambda: SharedCache(gib, samples, DIMS),
        "stocache, 16 GiB, half resident, prefix": lambda: SharedCache(gib, 2 * samples, DIMS),
        "stocache, 16 GiB, half resident, scattered": lambda: SharedCache(gib, 2 * samples, DIMS, placement="scattered"),
        "stocaching, 1 GiB": lambda: stocaching(gib * GIB // 16, samples // 16, DIMS),
    }
    found = run.results({name: partial(made, make) for name, make in makers.items()})
    times, growths = Figures.columns(found)
    table = run.table("cache", "ms", "MiB of resident memory")
    for name in makers:
        table.row(name, 1e3 * times.median(name), growths.median(name) / MIB)
    ours = list(makers)[:-1]
    run.claim("a cache of 16 GiB is made in 50 ms", max(map(times.median, ours)), most=0.05)
    run.claim("with 8 MiB of memory", max(map(growths.median, ours)) / MIB, most=8)


@experiment(rounds=9, needs="stocaching")
def single(run: Run) -> None:
    """get_slot and set_slot of 3 x 64 x 64 uint8, one sample at a time."""
    samples = run.size(20_000, 2_000)
    torch.set_num_threads(1)
    settle(run.size(2, 1) * GIB)
    ours, theirs = SharedCache(1, samples, DIMS), stocaching(GIB, samples, DIMS)
    pair = SharedCache.like((torch.zeros(DIMS, dtype=torch.uint8), 0), 1, samples)
    image = torch.randint(0, 256, DIMS, dtype=torch.uint8)
    for idx in range(samples):
        pair.set_slot(idx, (image, idx))
        for cache in (ours, theirs):
            cache.set_slot(idx, image)
    order = random.Random(0).choices(range(samples), k=samples)
    buffer, base = torch.empty(DIMS, dtype=torch.uint8), ours.array.data_ptr()

    calls: dict[str, Callable[[int], object]] = {
        "stocaching get_slot (a view)": theirs.get_slot,
        "get_slot(copy=False)": partial(ours.get_slot, copy=False),
        "get_slot": ours.get_slot,
        "get_slot of (image, int)": pair.get_slot,
        "memcpy of one row": lambda idx: memmove(buffer.data_ptr(), base + idx * ROW, ROW),
        "empty loop": lambda idx: None,
        "stocaching set_slot, memory already there": lambda idx: theirs.set_slot(idx, image, True, True),
        "set_slot, memory already there": lambda idx: ours.set_slot(idx, image, True, True),
    }
    took = run.turns({name: partial(for_each, order, call) for name, call in calls.items()}, calls=samples)
    view, copy = took.median("get_slot(copy=False)"), took.median("get_slot")
    peer, memcpy = took.median("stocaching get_slot (a view)"), took.median("memcpy of one row") - took.median("empty loop")
    table = run.table("call", "µs", "of stocaching's get_slot", "of that and a memcpy")
    for name in took:
        table.row(name, 1e6 * took.median(name), took.median(name) / peer, took.median(name) / (peer + memcpy))
    run.claim("a view takes half of stocaching's time", view / peer, most=0.5)
    run.claim("a copy takes stocaching's time and a memcpy", copy / (peer + memcpy), most=1)


@experiment(rounds=90, quick=5, needs="stocaching")
def batches(run: Run) -> None:
    """get_slots of 256 random rows into a reused buffer, GB/s."""
    settle(run.size(4, 1) * GIB)
    speeds = "one memcpy", "memcpy row by row", "get_slots", "stocaching"
    table = run.table("row bytes", "threads", *speeds, "of one memcpy", "of row by row")
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for row in (3 * 64 * 64, 4 * 64 * 192, 3 * 224 * 224):
            took = gathered(run, row)
            shares = (took.median(name) / took.median("get_slots") for name in speeds[:2])
            table.row(row, threads, *(256 * row / took.median(name) / 1e9 for name in speeds), *shares)
    run.claim("rows are gathered at 80 % of one memcpy", min(table.column("of one memcpy")), least=0.8)


def gathered(run: Run, row: int) -> Figures:
    """Return the seconds of each contender for 256 rows of ``row`` bytes out of 768 MiB."""
    samples, value = run.size(768, 96) * MIB // row, torch.randint(0, 256, (row,), dtype=torch.uint8)
    theirs = stocaching(GIB, samples, (row,))
    with SharedCache(1, samples, (row,)) as cache:
        for idx in range(samples):
            cache.set_slot(idx, value)
            theirs.set_slot(idx, value)
        rng, array, buffer = random.Random(0), cache.array, torch.empty(256, row, dtype=torch.uint8)

        def timed(call: Callable[[list[int]], object]) -> Callable[[], float]:
            def once() -> float:
                rows, began = rng.sample(range(samples), 256), time.perf_counter()
                call(rows)
                return time.perf_counter() - began

            return once

        return run.turns(
            {
                "one memcpy": timed(lambda rows: buffer.copy_(array[rows[0] % (samples - 256) :][:256])),
                "memcpy row by row": timed(lambda rows: np.take(array.numpy(), rows, axis=0, out=buffer.numpy(), mode="clip")),
                "get_slots": timed(lambda rows: cache.get_slots(rows, out=buffer)),
                "stocaching": timed(lambda rows: torch.stack([theirs.get_slot(idx) for idx in rows], out=buffer)),
            }
        )


@experiment()
def page_tables(run: Run) -> None:
    """Page tables of the process that fills a cache of 4 GiB, and of one that reads all of it."""
    gib = run.size(4.0, 0.25)
    samples, value = int(gib * GIB) // (3 * 256 * 256 + 1), torch.zeros((3, 256, 256), dtype=torch.uint8)
    with SharedCache(gib, samples, (3, 256, 256)) as cache:
        filler = grown_by(samples, lambda idx: cache.set_slot(idx, value))
        reader = in_fork(partial(grown_by, samples, cache.get_slot))
        table = run.table("backing", "memfd huge pages", "process that fills, MiB", "process that reads all, MiB")
        table.row(cache._segment.backing, limits.memfd_huge_policy(), filler / 1024, reader / 1024)


def grown_by(samples: int, call: Callable[[int], object]) -> int:
    """Return the KiB by which the page tables of this process grow while it calls something for each sample."""
    before = page_table_kib()
    for_each(range(samples), call)
    return page_table_kib() - before


def page_table_kib() -> int:
    """Return the KiB of page tables of this process."""
    match = re.search(r"VmPTE:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1])
