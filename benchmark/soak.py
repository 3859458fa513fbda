"""A long run of the DataLoader with batches and views of them held at random: contents right, memory flat.

Every sample is a function of its index, so all that is held can be checked at any time: once when it comes, again at random,
and again when it is released. Loops are left early at random. With worker processes iterators overlap, and forked children
continue to read the batches that they inherited. Each tenth of the run is a row.
"""

import gc
import os
import random
import time
from functools import partial
from typing import Any

import psutil
import torch
from tqdm import tqdm

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.processes import fork, wait
from stocache import CachedDataset, DataLoader
from stocache.system.limits import MIB

CLAIM = "Over 100,000 batches no batch changes while it is held, and memory stays flat."

N, DIMS = 8192, (3, 24, 24)
TABLE = torch.randint(0, 256, (N, *DIMS), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.arange(1, TABLE[0].numel() + 1)
SUMS = TABLE.long().flatten(1) @ WEIGHTS  # a swap of two bytes changes the checksum, too


def row(idx: int) -> tuple[torch.Tensor, int]:
    """Return a row of the table, with its index."""
    return TABLE[idx].clone(), idx


SOURCE = Made(N, row)


def wrong(images: torch.Tensor, labels: torch.Tensor) -> int:
    """Return how many images are not the images of their labels, by checksum."""
    return int((images.long().flatten(1) @ WEIGHTS != SUMS[labels]).sum())


class Holder:
    """Parts of old batches that the user holds: all of one, some rows, a numpy array of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: list[tuple[Any, torch.Tensor]] = []
        self.checks = self.errors = 0

    def take(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Hold a part of a batch, or nothing; check and release others."""
        self._check(images, labels)
        start, stop = sorted(self.rng.sample(range(len(labels) + 1), 2))
        rows, of_rows = images[start:stop], labels[start:stop]
        for view, of in self.rng.choice([[], [(images, labels)], [(rows, of_rows)], [(rows.numpy(), of_rows)]]):
            self.held.append((view, of.clone() if self.rng.random() < 0.5 else of))
        while len(self.held) > self.most:
            view, of = self.held.pop(self.rng.randrange(len(self.held)))
            self._check(torch.as_tensor(view), of)
        if self.held and self.rng.random() < 0.1:
            view, of = self.rng.choice(self.held)
            self._check(torch.as_tensor(view), of)

    @property
    def most(self) -> int:
        """How many are held now: few, and at times more than the ring has buffers."""
        return 40 if self.checks // 20_000 % 2 else 3

    def _check(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.checks += 1
        self.errors += wrong(images, labels)

    def look_on(self) -> None:
        """Read what is held for a while, in a forked child."""
        for _ in range(5):
            time.sleep(0.05)
            assert not any(wrong(torch.as_tensor(view), of) for view, of in self.held), "an inherited batch is wrong"


def soak(run: Run, loaders: list[Any], overlap: bool) -> None:
    """Take batches of loaders in random turns; print a row for each tenth, and claim that nothing is wrong and memory is flat.

    ``overlap``: whether two loops may run at once, and children are forked.
    """
    rng, process = random.Random(run.seed), psutil.Process()
    holder, children, memory = Holder(rng), list[int](), list[float]()
    table = run.table("batches", "own memory, MiB", "shared, MiB", "threads", "descriptors")
    bar = tqdm(total=run.rounds, unit="batch", mininterval=1)
    while bar.n < run.rounds:
        iterators = [iter(rng.choice(loaders)) for _ in range(rng.choice([1, 1, 1, 2]) if overlap else 1)]
        stop = rng.choice([rng.randrange(1, 400), 10**9])
        for number, batches in enumerate(zip(*iterators, strict=False)):
            for batch in batches:
                holder.take(*batch)
                bar.update()
                if bar.n % max(1, run.rounds // 10) == 0:
                    gc.collect()
                    info = process.memory_info()
                    memory.append((info.rss - info.shared) / MIB)
                    table.row(bar.n, memory[-1], info.shared / MIB, process.num_threads(), process.num_fds())
            if overlap and rng.random() < 0.0005 and len(children) < 2:
                children.append(fork(holder.look_on))
            if len(children) == 2:
                holder.errors += sum(wait(pid) != 0 for pid in children)
                children.clear()
            if number >= stop or bar.n >= run.rounds:
                break
        del iterators, batches, batch
    bar.close()
    holder.errors += sum(wait(pid) != 0 for pid in children)
    print(f"\n{holder.checks:,} checksums")
    run.claim("no batch changes while it is held", holder.errors == 0)
    run.claim("memory at the end to that at a tenth", memory[-1] / memory[0], most=1.1)


def over(dataset: Any, **options: Any) -> Any:
    """Return a loader of small batches."""
    return DataLoader(dataset, 16, shuffle=True, **options)


@experiment(rounds=100_000, quick=500)
def processes(run: Run) -> None:
    """Hold batches of worker processes, and of the main process."""
    torch.set_num_threads(1)
    cached = CachedDataset(SOURCE, 1)
    loaders = [
        over(cached, num_workers=2),
        over(cached, num_workers=2, persistent_workers=True),
        over(SOURCE, num_workers=1),
        over(cached),
    ]
    soak(run, loaders, overlap=True)


@experiment(rounds=100_000, quick=500)
def threads(run: Run) -> None:
    """Hold batches of worker threads."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # or the first bar starts a thread
    before = len(os.listdir("/proc/self/task"))
    full, half = CachedDataset(SOURCE, 1), CachedDataset(SOURCE, f"{TABLE.numel() // 2}B")
    full.warm(progress=False)
    by_threads = partial(over, worker_method="thread")
    loaders = [
        by_threads(full, num_workers=2, persistent_workers=True),
        by_threads(full, num_workers=4),
        by_threads(half, num_workers=2, persistent_workers=True),
        by_threads(SOURCE, num_workers=2, in_order=False),
    ]
    soak(run, loaders, overlap=False)
    del loaders
    gc.collect()
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < until:
        time.sleep(0.01)
    run.claim("no thread is left", len(os.listdir("/proc/self/task")) <= before)
