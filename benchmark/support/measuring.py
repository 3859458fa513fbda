"""Times of contenders that take turns, and the memory of processes."""

import argparse
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch

Result = TypeVar("Result")


def alternate(contenders: dict[str, Callable[[], object]], rounds: int, calls: int = 1) -> dict[str, float]:
    """Run each contender once per round, for ``calls`` calls; return its median seconds per call."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(times) for name, times in seconds.items()}


def machine() -> str:
    """Return a line that describes this machine and the versions in use."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = model[1] if model else platform.machine()
    memory_gib = psutil.virtual_memory().total / 1024**3
    python, linux = platform.python_version(), platform.release()
    versions = f"Python {python}, torch {torch.__version__}, numpy {np.__version__}"
    return f"{os.cpu_count()} cores ({processor}), {memory_gib:.0f} GiB, Linux {linux}; {versions}"


def run_one(description: str, experiments: dict[str, Callable[[int], None]], rounds: int) -> None:
    """Run the experiment that the command line names, with its ``--rounds``; print the machine first."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=experiments)
    parser.add_argument("--rounds", type=int, default=rounds)
    arguments = parser.parse_args()
    print(machine())
    experiments[arguments.experiment](arguments.rounds)


def settle(nbytes: int) -> None:
    """Take and release memory, so that a hypervisor that has reclaimed free pages gives them back before the clock starts."""
    torch.ones(nbytes, dtype=torch.uint8)


def pss(pid: int) -> int:
    """Return the bytes of a process and all its descendants; pages that they share count once."""
    process, total = psutil.Process(pid), 0
    for each in [process, *process.children(recursive=True)]:
        try:
            rollup = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return total


def others_s() -> float:
    """Return the CPU seconds that other programs have taken, from some time on: only differences have a meaning."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    total_s = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
    process = psutil.Process()
    own_s = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        try:
            own_s += sum(child.cpu_times()[:4])
        except psutil.Error:  # it has ended
            continue
    return total_s - own_s


def undisturbed(contender: Callable[[], Result], share: float = 0.1, tries: int = 4, patience_s: float = 120.0) -> Result:
    """Return what a contender returns while other programs take less than that share of a CPU.

    Wait for such a moment, for ``patience_s`` at most, and run it again if others have begun meanwhile. Of several tries the
    least disturbed one counts.
    """
    found: list[tuple[float, Result]] = []
    until = time.perf_counter() + patience_s
    while len(found) < tries:
        while _share_of_others(0.3, lambda: time.sleep(0.3))[0] > share and time.perf_counter() < until:
            pass
        found.append(_share_of_others(0.0, contender))
        if found[-1][0] <= share:
            break
    return min(found, key=lambda each: each[0])[1]


def _share_of_others(least_s: float, contender: Callable[[], Result]) -> tuple[float, Result]:
    """Return the share of a CPU that other programs take meanwhile, and the result."""
    began, others = time.perf_counter(), others_s()
    result = contender()
    return (others_s() - others) / max(least_s, time.perf_counter() - began, 1e-9), result
