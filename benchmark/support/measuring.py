"""Calls, epochs, threads, and the memory of processes."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch


def settle(nbytes: int) -> None:
    """Take and release memory, so that a hypervisor that has reclaimed free pages gives them back before the clock starts."""
    torch.ones(nbytes, dtype=torch.uint8)


def for_each(arguments: Iterable[Any], call: Callable[[Any], object]) -> None:
    """Call something with each argument."""
    for argument in arguments:
        call(argument)


def epoch_s(loader: Iterable[object]) -> float:
    """Return the seconds of an epoch."""
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


def run_threads(function: Callable[[Any], None], arguments: Iterable[Any]) -> float:
    """Return the seconds in which threads, one for each argument, call a function."""
    threads = [threading.Thread(target=function, args=(argument,)) for argument in arguments]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


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
