"""Loops of which one part is too slow: each has the limit that the verdict must find in its last epoch."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

import stocache
from stocache import CachedDataset

N, BATCH = 240, 20
SHAPE = (3, 32, 32)
NEEDED_GIB = "1MB"  # all samples


class Source(Dataset):
    """Samples that take ``cost_s`` to load, as from a disk or a network."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s

    def __len__(self) -> int:
        return N

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        if self.cost_s:
            time.sleep(self.cost_s)
        return torch.full(SHAPE, idx % 251, dtype=torch.uint8), idx


class Python(Source):
    """Samples that hold the GIL for ``cost_s``."""

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        burn(self.cost_s)
        return torch.full(SHAPE, idx % 251, dtype=torch.uint8), idx


def burn(cost_s: float) -> int:
    """Run Python for so long."""
    until, count = time.thread_time() + cost_s, 0
    while time.thread_time() < until:
        count += 1
    return count


@dataclass(frozen=True)
class Transform:
    """A transform that takes ``cost_s`` a sample, on a processor or waiting."""

    cost_s: float
    burns: bool = True

    def __call__(self, sample: Any) -> Any:
        burn(self.cost_s) if self.burns else time.sleep(self.cost_s)
        return sample


@dataclass(frozen=True)
class Collate:
    """A collate function that takes ``cost_s`` a batch."""

    cost_s: float

    def __call__(self, samples: list[Any]) -> Any:
        burn(self.cost_s)
        return default_collate(samples)


@dataclass
class Bottleneck:
    """A loop whose last epoch has one limit.

    Attributes:
        limit: what the verdict must name; None if it must be silent.
        says: a regular expression that its text must match.
        step_s: the training step, which leaves the processors free.
        epochs: how many to run.
        hold: how many batches the loop holds.
    """

    limit: str | None
    says: str
    dataset: Callable[[], Any]
    step_s: float = 0.01
    epochs: int = 2
    hold: int = 0
    warm: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def running(self):
        """Run all epochs, and give the loader."""
        dataset = self.dataset()
        if self.warm:
            dataset.warm(progress=False)
        defaults = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True}
        loader = stocache.DataLoader(dataset, shuffle=True, **defaults | self.options)
        held: deque[Any] = deque(maxlen=self.hold)
        try:
            for _ in range(self.epochs):
                for batch in loader:
                    held.append(batch)
                    del batch
                    time.sleep(self.step_s)
            yield loader
        finally:
            held.clear()
            loader.end_workers()
            if isinstance(dataset, CachedDataset):
                dataset.close()


BOTTLENECKS = {
    "slow source": Bottleneck(
        "source",
        r"loading \d+ uncached samples of \d[\d.]* ms each is the limit; size_limit_gib=0\.00\d+ would remove it",
        lambda: CachedDataset(Source(0.004), "0.4MB"),
    ),
    "slow transform": Bottleneck(
        "transform",
        rf"transforming {N} cached samples, \d[\d.]* ms each, is the limit; do what is the same in each epoch before the cache",
        lambda: CachedDataset(Source(), NEEDED_GIB, transform=Transform(0.003)),
        warm=True,
    ),
    "slow collate": Bottleneck(
        "collate",
        rf"collating {N // BATCH} batches of \d[\d.]* ms each is the limit",
        lambda: CachedDataset(Source(), NEEDED_GIB, transform=Transform(0.0)),
        warm=True,
        options={"collate_fn": Collate(0.06)},
    ),
    "too few workers": Bottleneck(
        "workers",
        r"1 worker is too few for batches of \d[\d.]* ms each; num_workers=\d would (remove it|cut it to \d+%)",
        lambda: CachedDataset(Source(), NEEDED_GIB, transform=Transform(0.001)),
        step_s=0.012,
        warm=True,
        options={"num_workers": 1},
    ),
    "full ring": Bottleneck(
        "ring",
        r"\d+ of \d+ batches found the ring full, with \d+ buffers for each worker",
        lambda: CachedDataset(Large(), "200MB"),
        step_s=0.0,
        hold=200,
        warm=True,
        options={"batch_size": 4},
    ),
    "GIL-bound": Bottleneck(
        "GIL",
        r"worker threads (hold the GIL \d+% of the time|wait for each other's GIL), so one works at a time; "
        r"worker_method='multiprocessing' would let 2 work at once",
        lambda: CachedDataset(Python(0.002), NEEDED_GIB, transform=Transform(0.002)),
        step_s=0.001,
        options={"worker_method": "thread"},
    ),
    "slow trainer": Bottleneck(None, "", lambda: CachedDataset(Source(), NEEDED_GIB), step_s=0.03, warm=True),
    "cold cache": Bottleneck(
        "cold cache",
        r"loading \d+ uncached samples of \d[\d.]* ms each is the limit, which filled the cache; the next epoch finds 100%",
        lambda: CachedDataset(Source(0.004), NEEDED_GIB),
        epochs=1,
    ),
}


class Large(Source):
    """Samples of 192 KB."""

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 256, 256), idx % 251, dtype=torch.uint8), idx
