"""Runs programs of this folder, plain or with the one line, and writes down what came of them.

    python -m tests.programs.running PROGRAM plain|cached FOLDER OPTIONS OUT
    python -m tests.programs.running rows '[["PROGRAM", OPTIONS], ...]'

OPTIONS are for the program's ``main``, as JSON. OUT becomes a pickle of plain values: see `run`. Rows run one by one, each
as two processes at a time, in the folders "0/plain", "0/cached", "1/plain" and so on; there OUT is "out.pickle".
"""

import importlib
import json
import logging
import os
import pickle
import signal
import sys
import zlib
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset

from stocache import CachedDataset
from stocache.system.describe import describe, difference

WARNED = "stocache warned:"
EPOCHS = int(os.environ.get("PROGRAM_EPOCHS", 3))  # more for benchmarks, which keep no batches

if __name__ in ("__main__", "__mp_main__"):  # also in workers that are spawned; not in a process of tests
    _handler = logging.StreamHandler()
    _handler.setLevel("WARNING")
    _handler.setFormatter(logging.Formatter(f"{WARNED} %(message)s"))
    logging.getLogger("stocache").addHandler(_handler)


def epochs(dataset, batch_size=8, num_workers=0, start_method="fork", **options):
    """Return the batches of the epochs of a loader; of many epochs their descriptions."""
    torch.manual_seed(0)
    context = start_method if num_workers else None
    workers = {"num_workers": num_workers, "multiprocessing_context": context, "persistent_workers": context == "spawn"}
    loader = DataLoader(dataset, batch_size, **{"shuffle": True} | workers | options)
    return [[batch if EPOCHS == 3 else zlib.crc32(repr(describe(batch)).encode()) for batch in loader] for _ in range(EPOCHS)]


class Transformed(Dataset):
    """What ``CachedDataset(dataset, transform=...)`` is, without a cache."""

    def __init__(self, dataset, transform):
        self.dataset, self.transform = dataset, transform

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, idx):
        return self.transform(self.dataset[idx])


def plain(dataset, transform=None, **options):
    """The identity, but for the transform that comes after the cache."""
    return dataset if transform is None else Transformed(dataset, transform)


class Followed(CachedDataset):
    """Notes its cache, also one that begins anew."""

    caches: ClassVar[dict[int, Any]] = {}  # not the datasets: some close their files when they are gone

    def _take(self, wrapped):
        super()._take(wrapped)
        self.caches[id(self)] = wrapped.cache


class Cached:
    """The one line, and a look at the dataset before and after."""

    def __init__(self):
        self.changes: list[str | None] = []

    def __call__(self, dataset, **options):
        before = describe(dataset)
        cached = Followed(dataset, **{"size_limit_gib": 0.05, **options})
        self.changes.append(difference(before, describe(dataset)))
        return cached


def run(program: str, way: str, folder: str, options: str, out: str) -> None:
    """Run ``main(wrap, folder, **options)`` of a program, and write its results, described.

    The pickle holds a dict: "results"; of each wrapped dataset its "stats" at the end; and what wrapping it has changed in the
    dataset, "changes".
    """
    wrap = Cached() if way == "cached" else plain
    results = importlib.import_module(f"tests.programs.{program}").main(wrap, Path(folder), **json.loads(options))
    stats = [vars(cache.stats()) for cache in Followed.caches.values()]
    done = {"results": describe(results), "stats": stats, "changes": getattr(wrap, "changes", [])}
    Path(out).write_bytes(pickle.dumps(done))


def run_rows(rows: list[tuple[str, dict[str, Any]]]) -> None:
    """Run each row in two processes, one for each way; what the programs import is imported once, here."""
    for number, (program, options) in enumerate(rows):
        importlib.import_module(f"tests.programs.{program}")
        ways = {}
        for way in ("plain", "cached"):
            pid = os.fork()
            if pid == 0:
                signal.alarm(400)  # one that hangs ends, and says so by its status
                Path(f"{number}/{way}/data").mkdir(parents=True)
                os.chdir(f"{number}/{way}")
                run(program, way, "data", json.dumps(options), "out.pickle")
                return
            ways[pid] = way
        statuses = {way: os.waitpid(pid, 0)[1] for pid, way in ways.items()}
        if any(statuses.values()):
            sys.exit(f"{program} {options}: statuses {statuses}")


if __name__ == "__main__":
    from tests.programs import running  # under this name, programs import it, too

    running.run_rows(json.loads(sys.argv[2])) if sys.argv[1] == "rows" else running.run(*sys.argv[1:])
