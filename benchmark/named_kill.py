"""Seeded SIGKILLs among processes that make, join, fill, replace and remove one named cache: no file stays.

    python -m benchmark named_kill --trials 1000

Each trial forks five to eight processes over one name. Users open the cache again and again, fill part of it and compare all
hits; their samples depend on the fingerprint they ask for, so that a stale one shows. Removers take the cache away, by force or
not. At random moments one to three are killed, or all at once. The survivors must end by themselves, in time. Then a
new run takes over or replaces the remaining cache and must find it whole. After "rm --dead" no file, directory or page may be
left.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial

import torch
from tqdm import tqdm

from benchmark.support.processes import fork, wait
from stocache import MismatchError, SegmentError, SharedCacheDDP
from stocache.shm import named, registry
from stocache.shm.segment import Segment
from stocache.tools.cli import listing

CLAIM = "SIGKILL among makers, users and removers of one named cache leaves no wrong sample, deadlock or leak."

N, SLOT_BYTES = 24, 3 * 4096 + 64  # slots that share pages
NAME = "named-kill"
FINGERPRINTS = ("v1", "v2")
DEADLINE_S = 60


def sample(fingerprint: str, idx: int) -> torch.Tensor:
    """Return a sample whose every byte depends on its index and the fingerprint."""
    factor = 2 * idx + 1 + 100 * FINGERPRINTS.index(fingerprint)
    return (torch.arange(SLOT_BYTES) % 251 * factor % 256).to(torch.uint8)


SAMPLES = {(fingerprint, idx): sample(fingerprint, idx) for fingerprint in FINGERPRINTS for idx in range(N)}


def _open(fingerprint: str, persist: bool = False) -> SharedCacheDDP:
    return SharedCacheDDP(1, N, (SLOT_BYTES,), name=NAME, persist=persist, fingerprint=fingerprint)


def _fill(cache: SharedCacheDDP, fingerprint: str, indices: list[int]) -> None:
    for idx in indices:
        value = cache.get_or_load(idx, lambda idx: SAMPLES[fingerprint, idx])
        assert torch.equal(value, SAMPLES[fingerprint, idx]), f"sample {idx} of {fingerprint} is wrong"


def _use(rng: random.Random) -> None:
    """Open, fill and close the cache a few times."""
    for _ in range(rng.randint(2, 5)):
        fingerprint = rng.choice(("v1", "v1", "v1", "v2"))
        with contextlib.suppress(MismatchError), _open(fingerprint) as cache:
            _fill(cache, fingerprint, rng.sample(range(N), rng.randint(1, N)))
            if rng.random() < 0.2:  # a worker that holds it longer than its parent
                pid = os.fork()
                if pid == 0:
                    _fill(cache, fingerprint, list(range(N)))
                    cache.close()
                    os._exit(0)
                cache.close()
                os.waitpid(pid, 0)


def _remove(rng: random.Random) -> None:
    for _ in range(rng.randint(5, 30)):
        with contextlib.suppress(SegmentError):  # it is in use, or does not exist
            named.remove(registry.path_of(NAME), force=rng.random() < 0.3)
        time.sleep(rng.random() * 0.002)


def trial(seed: int) -> Counter[str]:
    """Run one trial; return the counts.

    Raises:
        AssertionError: a sample was wrong, a survivor failed or hung, or a file was left.
    """
    rng = random.Random(seed)
    roles = [_use] * rng.randint(4, 6) + [_remove] * rng.randint(1, 2)
    pids = [fork(partial(role, random.Random(rng.randrange(1 << 30)))) for role in roles]
    victims = rng.sample(range(len(pids)), rng.choice((1, 2, 3, len(pids), len(pids))))
    happened: Counter[str] = Counter()
    for number, victim in enumerate(victims):
        if number == 0 or len(victims) < len(pids):
            time.sleep(rng.random() ** 2 * 0.02)
        os.kill(pids[victim], signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    for number, (pid, role) in enumerate(zip(pids, roles, strict=True)):
        status = wait(pid, deadline, f"seed {seed}: process {number} hangs")
        if os.WIFSIGNALED(status):
            happened["removers killed" if role is _remove else "users killed"] += 1
        else:
            assert status == 0, f"seed {seed}: process {number} failed"
    _wait_for_orphans(deadline)

    for cache in _left():  # at most one, and a worker may be about to remove it
        happened["caches left behind"] += 1
        happened["of them with samples"] += cache.stats.filled > 0
    kill = rng.random() < 0.5
    pid = fork(partial(_next_run, kill))
    status = wait(pid, deadline, f"seed {seed}: the next run hangs")
    assert status == (signal.SIGKILL if kill else 0), f"seed {seed}: the next run failed"
    for cache in _left():
        assert cache.state == "dead", f"seed {seed}: {cache}"
        named.remove(cache.path)
    assert not _left(), f"seed {seed}"
    return happened


def _left() -> list[listing.NamedCache]:
    """Return the cache of that name, if it exists; not those of other programs."""
    return [cache for cache in listing.find() if cache.name == NAME]


def _next_run(kill: bool) -> None:
    cache = _open("v1")
    _fill(cache, "v1", list(range(N)))
    assert cache.stats().filled == N
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    cache.close()


def _wait_for_orphans(deadline: float) -> None:
    """Wait for the workers of killed users, which hold the cache until they end."""
    path = registry.path_of(NAME)
    while any(cache.path == path and cache.alive for cache in listing.find()):
        assert time.monotonic() < deadline, "a worker hangs"
        time.sleep(0.0005)


def main() -> None:
    """Run the trials and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    Segment.create(0, 0)  # the children inherit the fork handlers of the first segment
    happened: Counter[str] = Counter()
    began = time.monotonic()
    for number in tqdm(range(arguments.trials), unit="trial"):
        happened += trial(arguments.seed + number)
    print(
        f"{arguments.trials} trials in {time.monotonic() - began:.0f} s: "
        + ", ".join(f"{n} {what}" for what, n in happened.items())
    )
    print("wrong samples 0, hangs 0, failures of survivors 0, leaks 0: a trial that finds one raises")
    sys.exit(0)


if __name__ == "__main__":
    main()
