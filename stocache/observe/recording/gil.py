"""Find out how often other threads hold the GIL, while a thread waits for them anyway.

A *look* is one sample of that: a sleep of a moment, and whether the thread got the GIL back in time.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from stocache.system.platform import here

LOOK_S, _LATE_S = 0.0007, 0.00025
"""Seconds that a look sleeps; and the delay of its end from which the GIL counts as held."""

_EACH_S, _SOON_S = 0.02, 0.001  # between looks; between the first ones, so that a short epoch has some
_FIRST = 16


def look(wait: Callable[[float], object] = time.sleep) -> tuple[Any, bool]:
    """Return the result of ``wait(LOOK_S)``, and whether it ended late, because another thread held the GIL.

    A thread that sleeps for a moment has to take the GIL to go on. Time spent waiting for a CPU does not count, because other
    programs may use the CPU.
    """
    queued_s, began = queued_seconds(), time.perf_counter()
    came, most_s = wait(LOOK_S), LOOK_S + _LATE_S
    took_s = time.perf_counter() - began
    return came, took_s > most_s and took_s - (queued_seconds() - queued_s) > most_s


class GilWatch:
    """Looks at the GIL now and then, while its thread waits for the batches of an epoch.

    Args:
        tell: called after each look: with True if the GIL was held.
    """

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self._tell, self._next_look, self._first, self._idle = tell, 0.0, _FIRST, 0

    def wait(self, wait: Callable[[float], bool], timeout_s: float) -> bool:
        """Return the result of ``wait(timeout_s)``: whether the event came in time. Look at the GIL if a look is due."""
        if time.perf_counter() < self._next_look or timeout_s <= LOOK_S:
            return wait(timeout_s)
        came, late = look(wait)
        if late or not came:
            self._tell(late)
            pause_s = _SOON_S if self._first > 0 else _EACH_S
            self._first -= 1
        else:  # the event came before the end of the look, which shows nothing, and costs more than a small batch
            self._idle += 1
            pause_s = min(_EACH_S, self._idle * _SOON_S)
        self._next_look = time.perf_counter() + pause_s
        return bool(came) or wait(timeout_s - LOOK_S)


def queued_seconds() -> float:
    """Return the seconds for which this thread could run but waited for a CPU.

    0 if Linux does not report it. Source: the second number of schedstat, see sched-stats in the documentation of Linux.
    """
    path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
    with contextlib.suppress(OSError, LookupError, ValueError):
        fd = os.open(path, os.O_RDONLY | here.CLOSED_ON_EXEC)  # a Path takes four times as long
        try:
            return int(os.read(fd, 100).split()[1]) / 1e9
        finally:
            os.close(fd)
    return 0.0
