"""Time the loads of samples in this process, which is a child: see `stocache.system.children`."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

_MOST_TOGETHER = 32  # groups
_WARM_UP = 16  # samples

LoadMany = Callable[[list[int]], Iterable[Any]]
"""Called with indices. Returns, or yields, their samples."""


class Loads(NamedTuple):
    """The times of some loads.

    Attributes:
        indices: the samples.
        first_s: the seconds of each, when it was loaded first; empty if that was not timed.
        again_s: the seconds of each, when it was loaded again; empty if there was no time for that.
        cpu_s: CPU seconds of all of ``again_s``; without them, of ``first_s``.
    """

    indices: tuple[int, ...]
    first_s: tuple[float, ...]
    again_s: tuple[float, ...]
    cpu_s: float


def time_loads(
    load_many: LoadMany, indices: Sequence[int], group: int, budget_s: float, keep: Callable[[Any], None]
) -> Iterator[Loads]:
    """Load each sample twice, for ``budget_s``; at least one sample once. Yield the loads of some samples together.

    Args:
        group: samples for each call of ``load_many``.
        keep: called with each sample.

    A sample is loaded again after up to 31 others, as in an epoch, where it is not in the CPU caches.
    """
    began, most, left, longest_s = time.perf_counter(), 1, iter(indices), 0.0
    while part := tuple(islice(left, most * group)):
        spent_s = time.perf_counter() - began
        if longest_s and spent_s + longest_s > budget_s:
            return
        cpu_s = time.process_time()
        first_s = _time_all(load_many, part, group, keep)
        cpu_s = time.process_time() - cpu_s
        again_s: tuple[float, ...] = ()
        if time.perf_counter() - began + sum(first_s) <= budget_s:
            cpu_s = time.process_time()
            again_s = _time_all(load_many, part, group, _forget)
            cpu_s = time.process_time() - cpu_s
        took_s = sum(first_s) + sum(again_s)
        if most < _MOST_TOGETHER and took_s < budget_s / 16:
            most, took_s = 2 * most, 2 * took_s
        longest_s = took_s
        yield Loads(part, first_s, again_s, cpu_s)


def time_busy_loads(load_many: LoadMany, parts: Sequence[Sequence[int]], group: int, budget_s: float) -> Iterator[Loads]:
    """Load ``parts`` for ``budget_s``, while other processes load other samples. Yield one item for each part.

    The first loads are not timed: a forked process copies the pages that it writes to.
    """
    began = time.perf_counter()
    for idx in parts[0][:_WARM_UP]:
        list(load_many([idx]))
        if time.perf_counter() - began > budget_s / 10:
            break
    for part in parts:
        left, done, seconds, cpu_s = iter(part), list[int](), list[float](), time.process_time()
        while time.perf_counter() - began < budget_s and (some := tuple(islice(left, group))):
            again_s, _ = _time(load_many, some)
            done += some
            seconds += again_s
        yield Loads(tuple(done), (), tuple(seconds), time.process_time() - cpu_s)


def _time_all(load_many: LoadMany, indices: Sequence[int], group: int, keep: Callable[[Any], None]) -> tuple[float, ...]:
    seconds: list[float] = []
    left = iter(indices)
    while part := tuple(islice(left, group)):
        each_s, samples = _time(load_many, part)
        seconds += each_s
        for sample in samples:
            keep(sample)
    return tuple(seconds)


def _forget(sample: Any) -> None:
    pass


def _time(load_many: LoadMany, indices: Sequence[int]) -> tuple[tuple[float, ...], list[Any]]:
    """Return the seconds of each load, and the samples. The time of a call is divided evenly among its samples."""
    began = time.perf_counter()
    samples = list(load_many(list(indices)))
    each_s = (time.perf_counter() - began) / len(indices)
    return (each_s,) * len(indices), samples
