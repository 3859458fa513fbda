"""Loops of which one part is too slow: each has the limit that the verdict must find in its last epoch."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

import stocache
from stocache import CachedDataset

N, BATCH = 240, 20
NEEDED_GIB = "1MB"  # all samples


def burn(cost_s: float) -> None:
    """Run Python for that long, and hold the GIL."""
    until = time.thread_time() + cost_s
    while time.thread_time() < until:
        pass


@dataclass(frozen=True)
class Source(Dataset):
    """Samples that take ``cost_s`` to load: waiting, as for a disk or a network, or in Python."""

    cost_s: float = 0.0
    wait: Callable[[float], None] = time.sleep
    size: int = 32

    def __len__(self) -> int:
        return N

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        self.wait(self.cost_s)
        return torch.full((3, self.size, self.size), idx % 251, dtype=torch.uint8), idx


@dataclass(frozen=True)
class Slow:
    """A function that burns ``cost_s``, and calls another one."""

    cost_s: float
    function: Callable[[Any], Any] = tuple

    def __call__(self, value: Any) -> Any:
        """Burn, and return what the function returns."""
        burn(self.cost_s)
        return self.function(value)


def cached(
    cost_s: float = 0.0, limit: str = NEEDED_GIB, wait: Callable[[float], None] = time.sleep, size: int = 32, **options: Any
) -> Callable[[], CachedDataset]:
    """Return a function that caches a `Source`."""
    return lambda: CachedDataset(Source(cost_s, wait, size), limit, **options)


@dataclass
class Bottleneck:
    """A loop whose last epoch has one limit.

    Attributes:
        limit: what the verdict must name; None if it must be silent.
        says: a regular expression that its text must match.
        step_s: the training step, which leaves the CPU free.
        epochs: how many to run.
        hold: how many batches the loop holds.
    """

    limit: str | None
    says: str
    dataset: Callable[[], CachedDataset]
    step_s: float = 0.01
    epochs: int = 2
    hold: int = 0
    warm: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[Any]:
        """Run all epochs, and give the loader."""
        dataset = self.dataset()
        if self.warm:
            dataset.warm(progress=False)
        defaults = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True}
        loader = stocache.DataLoader(dataset, shuffle=True, **defaults | self.options)
        held = deque(maxlen=self.hold)
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
            dataset.close()


LOADING, EACH = r"loading \d+ uncached samples of \d[\d.]* ms each is the limit", r"\d[\d.]* ms each"

BOTTLENECKS = {
    "slow source": Bottleneck("source", LOADING + r"; size_limit_gib=0\.00\d+ would remove it", cached(0.004, "0.4MB")),
    "slow transform": Bottleneck(
        "transform",
        rf"transforming {N} cached samples, {EACH}, is the limit; only cheaper transforms",
        cached(transform=Slow(0.003)),
        warm=True,
    ),
    "slow collate": Bottleneck(
        "collate",
        rf"collating {N // BATCH} batches of {EACH} is the limit",
        cached(transform=tuple),
        warm=True,
        options={"collate_fn": Slow(0.06, default_collate)},
    ),
    "too few workers": Bottleneck(
        "workers",
        rf"1 worker is too few for batches of {EACH}; num_workers=\d would (remove it|cut it to \d+%)",
        cached(transform=Slow(0.001)),
        step_s=0.012,
        warm=True,
        options={"num_workers": 1},
    ),
    "full ring": Bottleneck(
        "ring",
        r"\d+ of \d+ batches found the ring full, with \d+ buffers for each worker",
        cached(0.0, "200MB", size=256),
        step_s=0.0,
        hold=200,
        warm=True,
        options={"batch_size": 4},
    ),
    "GIL-bound": Bottleneck(
        "GIL",
        r"worker threads (hold the GIL \d+% of the time|wait for each other's GIL), so one works at a time; "
        r"worker_method='multiprocessing' would let 2 work at once",
        cached(0.002, wait=burn, transform=Slow(0.002)),
        step_s=0.001,
        options={"worker_method": "thread"},
    ),
    "slow trainer": Bottleneck(None, "", cached(), step_s=0.03, warm=True),
    "cold cache": Bottleneck(
        "cold cache", LOADING + ", which filled the cache; the next epoch finds 100%", cached(0.004), epochs=1
    ),
}
