"""Signals at random moments among processes that share one named cache.

A trial is one cache of a name, with samples of one shape or of any size. Users open it a few times with one of two
fingerprints, on which the samples depend, fill a part of it, alone or many at once, and compare all samples; some fork a worker
that holds the cache longer. Removers remove it, by force or not. Some of these processes get a signal at a random moment, or
all at once:

    kill    it ends; the others continue
    int     a KeyboardInterrupt; the process keeps the error, as a notebook does, and continues with the next task
    stop    it stops until the others have ended

Then one process clears the cache again and again until the signal comes. The others must end by themselves. At last a new
process opens the cache unchanged, compares its samples and fills it. After that no file, directory or memory may be left.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmark.support.faults import trials
from benchmark.support.harness import Run, experiment
from benchmark.support.processes import fork, wait
from stocache import MismatchError, RaggedCache, SegmentError, SharedCache
from stocache.shm import named, registry
from stocache.shm import segment as segments
from stocache.tools.cli import listing
from tests.support.equality import same

CLAIM = "Signals at any moment leave no wrong sample, no hang and no file of a named cache."

N, NAME = 24, "moments"
SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "stop": signal.SIGSTOP}
PATIENCE_S = 0.1  # for a stopped process; the default would cost 5 to 10 seconds for each lock it has
FINGERPRINTS = "v1", "v2"


def fixed(idx: int, factor: int) -> torch.Tensor:
    """Return a sample of a fixed shape, whose slot ends within a page, and whose every byte depends on its index."""
    return (torch.arange(3 * 4096 + 64) % 251 * factor % 256).to(torch.uint8)


def ragged(idx: int, factor: int) -> Any:
    """Return a sample of one of several kinds and sizes."""
    boxes = {"label": factor, "boxes": torch.full((idx, 4), float(factor))}
    return (f"text {factor}" * idx, boxes, [None, b"x" * factor])[idx % 3]


Make = Callable[[int, int], Any]
SAMPLES = {
    (make, fingerprint): [make(idx, 2 * idx + 1 + 100 * number) for idx in range(N)]
    for make in (fixed, ragged)
    for number, fingerprint in enumerate(FINGERPRINTS)
}


def open_cache(make: Make, fingerprint: str) -> SharedCache | RaggedCache:
    """Return the cache of a trial, found or made."""
    if make is ragged:
        return RaggedCache("8MB", N, name=NAME, fingerprint=fingerprint)
    return SharedCache(1, N, SAMPLES[make, fingerprint][0].shape, name=NAME, fingerprint=fingerprint)


def fill(cache: Any, expected: Sequence[Any], indices: Sequence[int], many: bool) -> None:
    """Load missing samples, and compare all."""
    if many:
        found = cache.get_or_load_many(indices, lambda its: [expected[idx] for idx in its], timeout_s=PATIENCE_S)
    else:
        found = [cache.get_or_load(idx, expected.__getitem__, timeout_s=PATIENCE_S) for idx in indices]
    for idx, value in zip(indices, found, strict=True):
        assert same(value, expected[idx]), f"sample {idx} is wrong"


def use(rng: random.Random, make: Make) -> None:
    """Open the cache and fill a part of it; at times with a worker that holds it longer."""
    fingerprint = rng.choice(("v1", "v1", "v1", "v2"))
    with contextlib.suppress(MismatchError), open_cache(make, fingerprint) as cache:
        fill(cache, SAMPLES[make, fingerprint], rng.sample(range(N), rng.randint(1, N)), rng.random() < 0.5)
        if rng.random() < 0.2:
            worker = fork(partial(fill, cache, SAMPLES[make, fingerprint], range(N), False))
            cache.close()
            assert os.waitpid(worker, 0)[1] == 0, "a worker failed"


def remove(rng: random.Random, make: Make) -> None:
    """Remove the cache again and again, whatever it is."""
    for _ in range(rng.randint(2, 10)):
        with contextlib.suppress(SegmentError):  # it is in use, or does not exist
            named.remove(registry.path_of(NAME), force=rng.random() < 0.3)
        time.sleep(rng.random() * 0.002)


def clear(rng: random.Random, make: Make) -> None:
    """Fill and clear for a second, or until a signal comes; Python loses an interrupt in a finalizer."""
    deadline = time.monotonic() + 1
    with open_cache(make, "v1") as cache:
        while time.monotonic() < deadline:
            fill(cache, SAMPLES[make, "v1"], range(N), rng.random() < 0.5)
            cache.clear()


def check(make: Make, rng: random.Random | None = None) -> None:
    """Open the cache unchanged, compare its samples and fill it.

    ``rng``: if no other process has the cache. It draws whether this process is killed, so that the cache stays.
    """
    expected = SAMPLES[make, "v1"]
    with open_cache(make, "v1") as cache:
        for idx in range(N):
            value = cache.get_slot(idx)
            assert value is None or same(value, expected[idx]), f"sample {idx} is wrong"
        fill(cache, expected, range(N), True)
        if rng is not None:
            assert cache.stats().filled == N
            if rng.random() < 0.5:
                os.kill(os.getpid(), signal.SIGKILL)


def play(task: Callable[[random.Random, Make], None], rng: random.Random, make: Make) -> None:
    """Do a task a few times; continue after interrupts."""
    kept = []
    for _ in range(rng.randint(2, 5)):
        try:
            task(rng, make)
        except KeyboardInterrupt as error:
            kept.append(error)


def send(pid: int, number: int) -> bool:
    """Send a process a signal, if it is still running."""
    running = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    if running:
        os.kill(pid, number)
    return running


def end(*pids: int) -> int:
    """Wait for processes, which must end well or be killed; return how many were killed."""
    statuses = [wait(pid, 30) for pid in pids]
    assert all(os.WIFSIGNALED(status) or status == 0 for status in statuses), "a process failed"
    return sum(map(os.WIFSIGNALED, statuses))


def end_workers() -> None:
    """Wait for the workers of processes that were killed."""
    deadline = time.monotonic() + 30
    while any(cache.alive for cache in named_caches()):
        assert time.monotonic() < deadline, "a worker hangs"
        time.sleep(0.0005)


def named_caches() -> list[Any]:
    """Return the cache of the trials, if it is there."""
    return [cache for cache in listing.find() if cache.name == NAME]


def trial(number: int, seed: int) -> Counter[str]:
    """Send processes a signal; return what happened. AssertionError: a sample is wrong, a process hangs, or a file is left."""
    rng, stops = random.Random(seed), number == signal.SIGSTOP
    if stops:
        segments.PATIENCE_S = registry.DIRECTORY_PATIENCE_S = PATIENCE_S
    make = rng.choice((fixed, ragged))
    tasks = [use] * rng.randint(4, 6) + [remove] * rng.randint(1, 2)
    pids = [fork(partial(play, task, random.Random(rng.random()), make)) for task in tasks]
    victims, hit = rng.sample(pids, rng.choice((1, 2, 3, len(pids)))), list[int]()
    for at, pid in enumerate(victims):
        if at == 0 or len(victims) < len(pids):
            time.sleep(rng.random() ** 2 * 0.02)
        hit += [pid] if send(pid, number) else []
    killed = end(*(pid for pid in pids if not (stops and pid in hit)))
    for pid in hit if stops else ():
        os.kill(pid, signal.SIGCONT)
        killed += end(pid)
    end_workers()

    pid = fork(partial(clear, rng, make))
    time.sleep(0.004 + rng.random() * 0.03)
    hit += [pid] if send(pid, number) else []
    if stops:
        end(fork(partial(check, make)))
        os.kill(pid, signal.SIGKILL)  # it would clear for ever
    killed += end(pid)
    left = len(named_caches())
    end(fork(partial(check, make, rng)))
    for cache in named_caches():
        assert cache.state == "dead", str(cache)
        named.remove(cache.path)
    assert not named_caches(), "a file is left"
    return Counter({"signals": len(hit), "killed": killed, "caches that the killed have left": left})


@experiment(rounds=1000, quick=3)
def signals(run: Run) -> None:
    """Kill, interrupt or stop processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    segments.Segment.create(0, 0)  # the children inherit the fork handlers of the first segment
    trials(run, {name: partial(trial, number) for name, number in SIGNALS.items()})
