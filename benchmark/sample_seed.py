"""What ``DataLoader(sample_seed=17)`` costs a sample."""

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from stocache import DataLoader, SampleSeed
from stocache.loader.order import EpochIndices
from stocache.loader.sample_seed import SeededDataset

CLAIM = "With sample_seed a sample costs about 10 us more in large batches."

SEED, SAMPLES = 17, 4096
BATCHES = 1, 8, 32, 256


def numbers(draws: int, count: int) -> Made:
    """Return samples that draw from none, one or all three of the generators."""
    value = torch.zeros(16)

    def sample(idx: int) -> Any:
        if draws > 0:
            torch.rand(())
        if draws > 1:
            np.random.random_sample()
            random.random()
        return value

    return Made(count, sample)


def added_us(run: Run, plain: Callable[[], object], seeded: Callable[[], object], count: int) -> tuple[float, float]:
    """Return the CPU microseconds that seeding adds to each of ``count`` samples, and of a sample without it."""

    def cpu_s(call: Callable[[], object]) -> float:  # others use the machine, too
        began = time.process_time()
        call()
        return time.process_time() - began

    took = run.turns({"plain": partial(cpu_s, plain), "seeded": partial(cpu_s, seeded)})
    took["added"] = [after - before for before, after in zip(took["plain"], took["seeded"], strict=True)]
    return 1e6 * took.median("added") / count, 1e6 * took.median("plain") / count


def in_main(run: Run, draws: int, batch: int) -> tuple[float, float]:
    """Measure loops over the loader without workers."""
    dataset = numbers(draws, min(SAMPLES, 512 * batch))
    plain, seeded = (DataLoader(dataset, batch, sample_seed=seed) for seed in (None, SEED))
    return added_us(run, partial(deque, plain, 0), partial(deque, seeded, 0), len(dataset))


def making(run: Run, draws: int, batch: int) -> tuple[float, float]:
    """Measure what a worker does for its batches, without the way through the queues."""
    dataset, indices, count = numbers(draws, SAMPLES), list(range(batch)), max(1, 2048 // batch)
    seeded = SeededDataset(dataset, SampleSeed(SEED), False)

    def without() -> None:
        for _ in range(count):
            [dataset[idx] for idx in indices]

    def with_seeds() -> None:
        for _ in range(count):
            seeded.__getitems__(EpochIndices(0, indices))

    return added_us(run, without, with_seeds, count * batch)


@experiment(rounds=21, quick=3)
def cost(run: Run) -> None:
    """CPU microseconds per sample, beside the same loader without sample_seed."""
    torch.set_num_threads(1)
    table = run.table("in", "batch", "no generator drawn from", "torch's", "all three", "a sample without sample_seed")
    in_worker = Made(len(BATCHES), lambda number: [making(run, draws, BATCHES[number]) for draws in (0, 1, 3)])
    for number, found in enumerate(DataLoader(in_worker, None, num_workers=1)):
        of_main = [in_main(run, draws, BATCHES[number]) for draws in (0, 1, 3)]
        for where, each in (("the main process", of_main), ("a worker", found)):
            table.row(where, BATCHES[number], *(added for added, _ in each), each[0][1])
    run.claim("sample_seed costs 10 us a sample in batches of 256", max(of_main[-1][0], found[-1][0]), most=10)
