"""Seeded signals at random moments among processes that share one named cache: the others continue, and no fault or file stays.

    python -m benchmark moments --signal kill --count 10000
    python -m benchmark moments --signal int --count 2000
    python -m benchmark moments --signal stop --count 2000

A trial is one cache of a name, with samples of one shape or of any size, and four processes that do a few of these at random:
create or attach, fill (alone and many at once), read, remove by force or not. Each gets a signal at a random moment:

    kill    it ends; the others continue
    int     a KeyboardInterrupt; the process keeps the error, as a notebook does, and continues with the next task
    stop    it stops until the others have ended

In a second part one process clears the cache again and again until the signal comes, and a new one opens
the cache and fills it. Every sample that is read is compared with the expected one. The others must end by themselves. At the
end no file, directory or memory may be left.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmark.support.processes import fork, wait
from stocache import MismatchError, RaggedCache, SegmentError, SharedCache
from stocache.shm import named, registry, segment
from stocache.system import limits
from stocache.tools.cli import listing

CLAIM = "Signals at any moment leave no wrong sample, no hang and no file of a named cache."

N, NAME, DEADLINE_S = 24, "moments", 30
SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "stop": signal.SIGSTOP}
PATIENCE_S = 0.1  # for a stopped process; the default would cost 5 to 10 seconds for each lock it has


def fixed(idx: int) -> torch.Tensor:
    """Return a sample of a fixed shape whose every byte depends on its index."""
    return (torch.arange(3 * 4096 + 64) % 251 * (2 * idx + 1) % 256).to(torch.uint8)


def ragged(idx: int) -> Any:
    """Return a sample of one of several kinds and sizes."""
    kinds: list[Any] = [f"text {idx}" * idx, {"label": idx, "boxes": torch.full((idx, 4), float(idx))}, [idx, None, b"x" * idx]]
    return kinds[idx % 3]


SAMPLES = {False: [fixed(idx) for idx in range(N)], True: [ragged(idx) for idx in range(N)]}


def same(one: Any, other: Any) -> bool:
    """Whether two samples are equal."""
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)


def open_cache(kind: bool) -> SharedCache | RaggedCache:
    """Return the cache of a trial, found or made."""
    if kind:
        return RaggedCache("8MB", N, name=NAME, fingerprint="ragged")
    return SharedCache(1, N, (3 * 4096 + 64,), name=NAME, fingerprint="fixed")


def fill(cache: Any, kind: bool, indices: list[int], many: bool) -> None:
    """Load missing samples, and compare all."""
    if many:
        found = cache.get_or_load_many(indices, lambda its: [SAMPLES[kind][idx] for idx in its], timeout_s=PATIENCE_S)
    else:
        found = [cache.get_or_load(idx, SAMPLES[kind].__getitem__, timeout_s=PATIENCE_S) for idx in indices]
    for idx, value in zip(indices, found, strict=True):
        if not same(value, SAMPLES[kind][idx]):
            raise AssertionError(f"sample {idx} is wrong")


def use(rng: random.Random, kind: bool) -> None:
    """Remove the cache, or open it and fill it."""
    if rng.random() < 0.15:
        with contextlib.suppress(SegmentError):  # it is in use, or does not exist
            named.remove(registry.path_of(NAME), force=rng.random() < 0.3)
        return
    with contextlib.suppress(MismatchError), open_cache(kind) as cache:
        fill(cache, kind, rng.sample(range(N), rng.randint(1, N)), rng.random() < 0.5)


def clear(rng: random.Random, kind: bool) -> None:
    """Fill and clear for a second, or until a signal comes; Python loses an interrupt in a finalizer."""
    deadline = time.monotonic() + 1
    with open_cache(kind) as cache:
        while time.monotonic() < deadline:
            fill(cache, kind, list(range(N)), rng.random() < 0.5)
            cache.clear()


def user(seed: int, kind: bool) -> Callable[[], None]:
    """Return the role of a process that uses the cache a few times, and continues after interrupts."""

    def play() -> None:
        rng, kept = random.Random(seed), []
        for _ in range(rng.randint(2, 5)):
            try:
                use(rng, kind)
            except KeyboardInterrupt as error:
                kept.append(error)

    return play


def clearer(seed: int, kind: bool) -> Callable[[], None]:
    """Return the role of a process that clears until it is interrupted."""

    def play() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            clear(random.Random(seed), kind)

    return play


def checker(kind: bool) -> Callable[[], None]:
    """Return the role of a new process that opens the cache as it is, compares its samples and fills it."""

    def play() -> None:
        with open_cache(kind) as cache:
            for idx in range(N):
                value = cache.get_slot(idx)
                assert value is None or same(value, SAMPLES[kind][idx]), f"sample {idx} is wrong"
            fill(cache, kind, list(range(N)), True)

    return play


class Processes:
    """The processes of one trial, all of which must end."""

    def __init__(self, seed: int) -> None:
        self.seed, self.running, self.stopped = seed, set[int](), set[int]()
        self.outcome: Counter[str] = Counter()

    def start(self, role: Callable[[], None]) -> int:
        """Start one."""
        pid = fork(role)
        self.running.add(pid)
        return pid

    def send(self, pid: int, number: int) -> None:
        """Send one a signal, if it is still running."""
        if pid in self.running and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, number)
            self.outcome["signals"] += 1
            if number == signal.SIGSTOP:
                self.stopped.add(pid)

    def finish(self) -> None:
        """Wait until all that are not stopped have ended; then let the stopped ones continue and end."""
        self._wait(self.running - self.stopped)
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        self._wait(self.running)

    def _wait(self, pids: set[int]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for pid in list(pids):
            status = wait(pid, deadline, f"seed {self.seed}: process {pid} hangs")
            self.running.remove(pid)
            if os.WIFSIGNALED(status):
                self.outcome["killed"] += 1
            else:
                assert status == 0, f"seed {self.seed}: a process failed"


def trial(name: str, seed: int) -> Counter[str]:
    """Run one trial; return the counts. Raises AssertionError: a sample is wrong, a process hangs, or a file is left."""
    rng, number, processes = random.Random(seed), SIGNALS[name], Processes(seed)
    kind = rng.random() < 0.5
    pids = [processes.start(user(rng.randrange(1 << 30), kind)) for _ in range(4)]
    for pid in rng.sample(pids, rng.randint(1, 4)):
        time.sleep(rng.random() ** 2 * 0.02)
        processes.send(pid, number)
    processes.finish()

    pid = processes.start(clearer(rng.randrange(1 << 30), kind))
    time.sleep(0.004 + rng.random() * 0.03)
    processes.send(pid, number)
    if name == "stop":  # it would clear for ever
        new = processes.start(checker(kind))
        processes._wait({new})
        os.kill(pid, signal.SIGKILL)
        processes.stopped.discard(pid)
    processes.finish()
    processes._wait({processes.start(checker(kind))})
    left = [cache for cache in listing.find() if cache.name == NAME]
    for cache in left:
        processes.outcome["files left by the killed"] += 1
        assert cache.state == "dead", f"seed {seed}: {cache}"
        named.remove(cache.path)
    return processes.outcome


def main() -> None:
    """Run the trials and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", choices=SIGNALS, default="kill")
    parser.add_argument("--count", type=int, default=1000, help="signals")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.signal == "stop":
        segment.PATIENCE_S = registry.DIRECTORY_PATIENCE_S = PATIENCE_S
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    segment.Segment.create(0, 0)  # the children inherit the fork handlers of the first segment
    happened: Counter[str] = Counter()
    began, seed = time.monotonic(), arguments.seed
    with tqdm(total=arguments.count, unit="signal") as bar:  # its own lock takes a page of /dev/shm
        free = limits.shm_free()
        while happened["signals"] < arguments.count:
            outcome = trial(arguments.signal, seed)
            happened += outcome
            bar.update(outcome["signals"])
            seed += 1
    counts = ", ".join(f"{count} {what}" for what, count in sorted(happened.items()))
    print(f"{seed - arguments.seed} trials in {time.monotonic() - began:.0f} s: {counts}")
    assert not Path(registry.path_of(NAME)).exists()
    print(f"wrong samples 0, hangs over {DEADLINE_S} s 0, failures 0, files left 0: a trial that finds one raises")
    print(f"memory of /dev/shm that was free before and is not now: {max(0, free - limits.shm_free())} bytes")
    sys.exit(0)


if __name__ == "__main__":
    main()
