"""Runs a program of this folder, plain or with the one line, and writes down what came of it.

    python -m tests.programs.vision plain|cached|both FOLDER OPTIONS OUT

OPTIONS are those of the program, as JSON. OUT becomes a pickle of plain values: see `run`. "both" are two processes at a time,
which work in the folders "plain" and "cached" of this one; what the program imports is imported once.
"""

import json
import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from benchmark.support.describe import describe, difference
from stocache import CachedDataset

WARNED = "stocache warned:"

_handler = logging.StreamHandler()  # here, and so in workers that are spawned, too: they import the program
_handler.setLevel("WARNING")
_handler.setFormatter(logging.Formatter(f"{WARNED} %(message)s"))
logging.getLogger("stocache").addHandler(_handler)


class Transformed(Dataset):
    """What ``CachedDataset(dataset, transform=...)`` is, without a cache."""

    def __init__(self, dataset, transform):
        self.dataset, self.transform = dataset, transform

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, idx):
        sample = self.dataset[idx]
        if not isinstance(self.transform, dict):
            return self.transform(sample)
        parts = list(sample)
        for key, transform in self.transform.items():
            parts[key] = transform(parts[key])
        return type(sample)(parts)


def plain(dataset, transform=None, **options):
    """The identity, but for the transform that comes after the cache."""
    return dataset if transform is None else Transformed(dataset, transform)


class Cached:
    """The one line, and a look at the dataset before and after."""

    def __init__(self):
        self.caches: list[Any] = []  # not the datasets: some close their files when they are gone
        self.changes: list[str | None] = []

    def __call__(self, dataset, **options):
        before = describe(dataset)
        cached = CachedDataset(dataset, **{"size_limit_gib": 0.05, **options})
        self.caches.append(cached.cache)
        self.changes.append(difference(before, describe(dataset)))
        return cached


def both() -> None:
    """Go on as two processes, one for each way; the first process waits for them, and ends."""
    ways = {}
    for way in ("plain", "cached"):
        pid = os.fork()
        if pid == 0:
            os.chdir(way)
            sys.argv[1] = way  # also for the ranks that Lightning starts
            return
        ways[pid] = way
    statuses = {way: os.waitpid(pid, 0)[1] for pid, way in ways.items()}
    sys.exit(f"statuses: {statuses}" if any(statuses.values()) else 0)


def run(main: Callable[..., Any]) -> None:
    """Run ``main(wrap, folder, **options)`` as the command line says, and write its results, described.

    The pickle holds a dict: "results"; of each wrapped dataset its "stats" at the end; and what wrapping it has changed in the
    dataset, "changes". Other ranks than the first write theirs beside it.
    """
    if sys.argv[1] == "both":
        both()
    way, folder, options, out = sys.argv[1:]
    wrap = Cached() if way == "cached" else plain
    results = main(wrap, Path(folder), **json.loads(options))
    done = {"results": describe(results), "stats": [], "changes": []}
    if isinstance(wrap, Cached):
        done["stats"] = [vars(cache.stats()) for cache in wrap.caches]
        done["changes"] = wrap.changes
    rank = os.environ.get("LOCAL_RANK", "0")
    Path(out if rank == "0" else f"{out}.{rank}").write_bytes(pickle.dumps(done))
