"""SIGKILLs of processes that fill a disk cache, at random moments."""

import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stocache import CachedDataset, DiskCache
from tests.support.disks import COUNT, KINDS, Samples, loaded, open_disk, sample
from tests.support.equality import same

WAYS = "get_or_load_many", "behind"
_PATIENCE_S = 30.0


class Killed(NamedTuple):
    """What became of a trial.

    Attributes:
        midway: whether the process was killed before it was done.
        there: how many samples the folder had then.
    """

    midway: bool
    there: int


def kill_trial(seed: int, folder: str, way: str, kind: str | None = None) -> Killed:
    """Kill a process that fills a folder, have others go on, and read all samples.

    Args:
        seed: of everything that is drawn.
        folder: does not exist yet.
        way: one of `WAYS`: through a `DiskCache`, or through a `CachedDataset` whose thread writes behind.
        kind: of samples; by default drawn.

    Raises:
        AssertionError: a sample was wrong or is not there in the end, or a process failed or hung.
    """
    rng = random.Random(seed)
    kind = kind or rng.choice(KINDS)
    fill, longest_s = (_fill, 0.012) if way == "get_or_load_many" else (_fill_behind, 0.045)
    orders = [rng.sample(range(COUNT), COUNT) for _ in range(3)]
    shares = rng.random() < 0.5  # the processes are forked from one that has the folder open, or each opens it
    early = rng.random() < 0.3  # the clock starts before it does
    with contextlib.ExitStack() as stack:
        ready, write_end = os.pipe()
        stack.callback(os.close, ready)
        stack.callback(os.close, write_end)
        opened = stack.enter_context(_open(way, kind, folder)) if shares else None
        victim = _fork(fill, way, kind, folder, opened, orders[0], write_end, early)
        rival = _fork(fill, way, kind, folder, opened, orders[1], write_end) if rng.random() < 0.5 else None
        os.read(ready, 1)
        time.sleep(rng.random() ** 2 * longest_s)
        os.kill(victim, signal.SIGKILL)
        midway = os.WIFSIGNALED(os.waitpid(victim, 0)[1])
        there = os.stat(f"{folder}/samples").st_size if os.path.exists(f"{folder}/samples") else 0
        survivor = _fork(fill, way, kind, folder, opened, orders[2], write_end)
        for pid in filter(None, (rival, survivor)):
            assert _wait(pid) == 0, f"seed {seed}: a survivor failed or hangs"
    with open_disk(kind, folder) as cache:
        assert loaded(cache, kind) == [], f"seed {seed}: samples are missing"
        assert cache.stats().damaged == 0
        assert loaded(cache, kind) == []
        full = os.stat(f"{folder}/samples").st_size
    return Killed(midway, there * COUNT // full)


def _open(way: str, kind: str, folder: str) -> "DiskCache | CachedDataset":
    if way == "get_or_load_many":
        return open_disk(kind, folder)
    codec = {"codec": "zstd"} if kind == "zstd" else {}
    variable = None if kind == "rows" else True
    return CachedDataset(
        Samples(kind), 0, disk=folder, disk_limit="1GB", fingerprint="1", split=False, probe=0 if variable else 2,
        variable=variable, **codec,
    )  # fmt: skip


def _fill(opened: Any, kind: str, order: list[int]) -> None:
    for first in range(0, COUNT, 8):
        indices = order[first : first + 8]
        found = opened.get_or_load_many(indices, lambda indices: [sample(kind, idx) for idx in indices])
        assert all(same(value, sample(kind, idx)) for idx, value in zip(indices, found, strict=True))


def _fill_behind(opened: Any, kind: str, order: list[int]) -> None:
    for first in range(0, COUNT, 8):
        indices = order[first : first + 8]
        assert all(same(value, sample(kind, idx)) for idx, value in zip(indices, opened.__getitems__(indices), strict=True))


def _fork(
    fill: Callable[[Any, str, list[int]], None],
    way: str,
    kind: str,
    folder: str,
    opened: Any,
    order: list[int],
    ready: int,
    early: bool = False,
) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.settrace(None)
            torch.set_num_threads(1)  # as in a DataLoader's worker
            if early:
                os.write(ready, b"x")
            with opened or _open(way, kind, folder) as cache:
                if not early:
                    os.write(ready, b"x")
                fill(cache, kind, order)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _wait(pid: int) -> int | str:
    """Return the status of a child when it has ended; kill it, and return "hangs", if it takes too long."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.0005)
