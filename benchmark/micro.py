"""The cost of single calls: construction, get_slot, set_slot, get_slots, page tables; stocaching and memcpy in the same run.

    python -m benchmark micro

Contenders take turns, round by round; figures are medians over the rounds, so a drift of the machine affects all alike.
"""

import argparse
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from ctypes import memmove
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmark.support.measuring import alternate, settle
from benchmark.support.peers import stocaching
from stocache import SharedCache
from stocache.system import limits
from stocache.system.limits import GIB, MIB, format_size

CLAIM = "A cache is made in under 50 ms, a hit costs no more than in stocaching, a batch is gathered at 80 % of memcpy."
NEEDS = (("stocaching", "--no-deps stocaching==0.2.1"),)

DIMS = (3, 64, 64)
ROW = 3 * 64 * 64


def construction() -> None:
    """Time and resident memory of making a cache."""
    print("\n### Construction\n\n| cache | ms | resident memory grows by |\n| --- | ---: | ---: |")
    process = psutil.Process()
    SharedCache("1MiB", 10, DIMS).close()
    stocaching(MIB, 10, DIMS)
    samples = 16 * GIB // (ROW + 1)
    for name, make in {
        "stocache, 16 GiB, all resident": lambda: SharedCache(16, samples, DIMS),
        "stocache, 16 GiB, half resident, prefix": lambda: SharedCache(16, 2 * samples, DIMS),
        "stocache, 16 GiB, half resident, scattered": lambda: SharedCache(16, 2 * samples, DIMS, placement="scattered"),
        "stocaching, 1 GiB": lambda: stocaching(GIB, samples // 16, DIMS),
    }.items():
        times, growth = [], []
        for _ in range(3):
            before = process.memory_info().rss
            start = time.perf_counter()
            cache = make()
            times.append(time.perf_counter() - start)
            growth.append(process.memory_info().rss - before)
            del cache
        print(f"| {name} | {statistics.median(times) * 1e3:.1f} | {format_size(statistics.median(growth))} |")


def single_calls(rounds: int) -> None:
    """get_slot and set_slot at 3 x 64 x 64 uint8, one sample at a time."""
    samples, calls = 20_000, 20_000
    ours, theirs = SharedCache(1, samples, DIMS), stocaching(GIB, samples, DIMS)
    pair = SharedCache.like((torch.zeros(DIMS, dtype=torch.uint8), 0), 1, samples)
    image = torch.randint(0, 256, DIMS, dtype=torch.uint8)
    for idx in range(samples):
        ours.set_slot(idx, image)
        theirs.set_slot(idx, image)
        pair.set_slot(idx, (image, idx))
    order = random.Random(0).choices(range(samples), k=calls)
    buffer, base = torch.empty(DIMS, dtype=torch.uint8), ours.array.data_ptr()

    def copy_row(idx: int) -> None:
        memmove(buffer.data_ptr(), base + idx * ROW, ROW)

    def each(call: Callable[[int], object]) -> Callable[[], None]:
        def run() -> None:
            for idx in order:
                call(idx)

        return run

    medians = alternate(
        {
            "stocaching get_slot (a view)": each(theirs.get_slot),
            "get_slot(copy=False)": each(partial(ours.get_slot, copy=False)),
            "get_slot": each(ours.get_slot),
            "get_slot of (image, int)": each(pair.get_slot),
            "memcpy of one row": each(copy_row),
            "empty loop": each(lambda idx: None),
        },
        rounds,
        calls,
    )
    peer, memcpy = medians["stocaching get_slot (a view)"], medians["memcpy of one row"] - medians["empty loop"]
    print("\n### One sample, 3x64x64 uint8\n")
    print("| call | µs | of stocaching's | of stocaching's + memcpy |\n| --- | ---: | ---: | ---: |")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds * 1e6:.2f} | {seconds / peer:.2f} | {seconds / (peer + memcpy):.2f} |")

    def refill(cache: object) -> Callable[[], None]:
        def run() -> None:
            for idx in range(samples):
                cache.set_slot(idx, image, True, True)  # type: ignore[attr-defined]

        return run

    medians = alternate({"stocaching set_slot": refill(theirs), "set_slot": refill(ours)}, max(3, rounds // 3), samples)
    for name, seconds in medians.items():
        print(f"| {name}, memory already there | {seconds * 1e6:.2f} | {seconds / medians['stocaching set_slot']:.2f} | |")


def batches(rounds: int) -> None:
    """get_slots of 256 random rows into a reused buffer, beside memcpy of as many bytes and beside stocaching."""
    count = 256
    print(f"\n### {count} random rows into a reused buffer, GB/s\n")
    print("| row bytes | threads | one memcpy | memcpy row by row | get_slots | of one memcpy | of row by row | stocaching |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for row in (3 * 64 * 64, 4 * 64 * 192, 3 * 224 * 224):
            speeds = {name: count * row / seconds / 1e9 for name, seconds in _time_batches(row, count, rounds).items()}
            ours, one, by_row, theirs = speeds["ours"], speeds["memcpy"], speeds["rows"], speeds["stocaching"]
            print(
                f"| {row} | {threads} | {one:.1f} | {by_row:.1f} | {ours:.1f} | {ours / one:.0%} | {ours / by_row:.0%} "
                f"| {theirs:.1f} |"
            )


def _time_batches(row: int, count: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each contender for ``count`` rows of ``row`` bytes out of 768 MiB."""
    samples = 768 * MIB // row
    theirs = stocaching(GIB, samples, (row,))
    value = torch.randint(0, 256, (row,), dtype=torch.uint8)
    with SharedCache(1, samples, (row,)) as cache:
        for idx in range(samples):
            cache.set_slot(idx, value)
            theirs.set_slot(idx, value)
        rng, array = random.Random(0), cache.array
        rows = array.numpy()
        buffer = torch.empty(count, row, dtype=torch.uint8)
        into = buffer.numpy()
        contenders: dict[str, Callable[[list[int]], object]] = {
            "memcpy": lambda order: buffer.copy_(array[order[0] % (samples - count) :][:count]),
            "rows": lambda order: np.take(rows, order, axis=0, out=into, mode="clip"),  # numpy's loop of memcpy
            "ours": lambda order: cache.get_slots(order, out=buffer),
            "stocaching": lambda order: torch.stack([theirs.get_slot(idx) for idx in order], out=buffer),
        }
        orders = [rng.sample(range(samples), count) for _ in range(10 * rounds)]
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for order in orders:
            for name, contender in contenders.items():
                start = time.perf_counter()
                contender(order)
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def page_tables(gib: float) -> None:
    """VmPTE of the process that fills a cache and of one that reads all of it."""
    print(f"\n### Page tables for a filled cache of {gib:g} GiB (memfd huge pages: {limits.memfd_huge_policy()})")
    row = (3, 256, 256)
    samples = int(gib * GIB) // (3 * 256 * 256 + 1)
    with SharedCache(gib, samples, row) as cache:
        before = _vm_pte()
        value = torch.zeros(row, dtype=torch.uint8)
        for idx in range(samples):
            cache.set_slot(idx, value)
        filler = _vm_pte() - before
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            before = _vm_pte()
            for idx in range(samples):
                cache.get_slot(idx)
            os.write(write_end, str(_vm_pte() - before).encode())
            os._exit(0)
        reader = int(os.read(read_end, 100))
        os.wait()
        os.close(read_end)
        os.close(write_end)
        print(
            f"\n| backing | process that fills | process that reads all |\n| --- | ---: | ---: |\n"
            f"| {cache._segment.backing} | {filler / 1024:.1f} MiB | {reader / 1024:.1f} MiB |"
        )


def _vm_pte() -> int:
    match = re.search(r"VmPTE:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1])


def main() -> None:
    """Run the named sections, by default all."""
    sections = ("construction", "single", "batches", "page-tables")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=sections, help=", ".join(sections))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page-tables-gib", type=float, default=4)
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    if "construction" in arguments.sections:
        construction()
    torch.set_num_threads(1)
    if "single" in arguments.sections:
        settle(2 * GIB)
        single_calls(arguments.rounds)
    torch.set_num_threads(threads)
    if "batches" in arguments.sections:
        settle(4 * GIB)
        batches(arguments.rounds)
    torch.set_num_threads(1)
    if "page-tables" in arguments.sections:
        page_tables(arguments.page_tables_gib)


if __name__ == "__main__":
    main()
