"""The gap between two epochs: the wait for the first batch of an epoch, beside the waits for the others."""

import random
import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from benchmark.support.datasets import Made
from benchmark.support.harness import Figures, Run, experiment
from stocache import BlockSampler, DataLoader
from stocache.system import generators

CLAIM = "With prefetch_epochs the loop waits for the first batch of an epoch no longer than for the others."

EPOCHS, SIZE, LENGTH = 20, 16, 24
WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
STEPS_MS = {
    "10 ms a step, 1 ms a sample": (10, 1),
    "1 ms a step, 1 ms a sample": (1, 1),
    "20 ms a step, 2 ms a sample": (20, 2),
}


class Waits(NamedTuple):
    """Medians of the waits for the first batches of the epochs after the first one, and for all others; their sum."""

    first_s: float
    others_s: float
    sum_s: float


def waits(loader: Any, step_s: float) -> Waits:
    """Run the epochs of a loop."""
    first, others = list[float](), list[float]()
    for epoch in range(EPOCHS):
        asked = time.perf_counter()
        for number, _ in enumerate(loader):
            (others if number or not epoch else first).append(time.perf_counter() - asked)
            time.sleep(step_s)
            asked = time.perf_counter()
    return Waits(statistics.median(first), statistics.median(others), sum(first) + sum(others))


def slow(sample_ms: float, idx: int) -> torch.Tensor:
    """Return a small image after a while, as from a disk."""
    time.sleep(sample_ms / 1000)
    return torch.full((3, 32, 32), idx % 256, dtype=torch.uint8)


@experiment(rounds=3)
def gap(run: Run) -> None:
    """Milliseconds that the loop waits, over 20 epochs of 10 batches of 16 samples, by 2 workers that persist."""
    table = run.table("loop", "loader", "first batch", "other batches", "waits of torch's")
    for name, (step_ms, sample_ms) in run.chosen(STEPS_MS).items():
        data, kept = Made(160, partial(slow, sample_ms)), {"batch_size": SIZE, "shuffle": True, **WORKERS}
        loaders = {"torch": torch.utils.data.DataLoader(data, **kept), "stocache": DataLoader(data, **kept)}
        loaders["prefetch_epochs"] = DataLoader(data, prefetch_epochs=True, **kept)
        found = run.results({each: partial(waits, loader, step_ms / 1000) for each, loader in loaders.items()}, warm_up=0)
        first, others, total = Figures.columns(found)
        for each in loaders:
            table.row(name, each, 1000 * first.median(each), 1000 * others.median(each), total.ratio(each, "torch"))
        most = max(1.2 * others.median("prefetch_epochs"), 0.0005)
        run.claim(f"{name}: the first batch comes as soon as the others", first.median("prefetch_epochs"), most=most)
        del loaders


class Draws(Made):
    """Samples of random numbers of all kinds, and the epoch."""

    def __init__(self) -> None:
        super().__init__(LENGTH, self.draw)
        self.epoch, self.own = 0, np.random.default_rng(3)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self.epoch = epoch

    def draw(self, idx: int) -> torch.Tensor:
        """Return a sample."""
        drawn = random.random(), float(np.random.rand()), float(torch.rand(1)), float(self.own.random())
        return torch.tensor([idx, self.epoch, *drawn], dtype=torch.float64)


def samplers(data: Draws) -> list[dict[str, Any]]:
    """Return the arguments of loaders by which samples come in several orders."""
    weighted, ranks = WeightedRandomSampler([1.0] * LENGTH, LENGTH), DistributedSampler(data, 2, 1, seed=4)
    blocks = BlockSampler(range(LENGTH), 5, shuffle=True, seed=4)
    return [{"shuffle": True}, {}, {"sampler": weighted}, {"sampler": ranks}, {"sampler": blocks}]


def play(seed: int, epochs: int, **options: Any) -> list[Any]:
    """Return the batches, random states and positions of a program; half of them disturb the loader between two epochs."""
    generators.seed_all([7, 7, 7])
    chance, data, found = random.Random(seed), Draws(), list[Any]()
    seeded = {"sample_seed": 3} if seed % 2 else {}
    loader = DataLoader(data, 4, **WORKERS, **samplers(data)[seed % 5], **seeded, **options)
    disturbs = chance.random() < 0.5
    for epoch in range(epochs):
        if not disturbs or chance.random() < 0.8:
            loader.set_epoch(epoch)
        stop = chance.randrange(1, 7) if disturbs and chance.random() < 0.1 else 7
        for number, batch in enumerate(loader, 1):
            found.append(batch.tolist())
            if number == stop:
                break
        found.append((generators.states([]), loader.state_dict()["position"]))
        way = chance.choice(["draw", "state", "nothing", "nothing", "nothing"]) if disturbs else "nothing"
        if way == "draw":
            torch.rand(1)
        elif way == "state":
            loader.load_state_dict(loader.state_dict())
    return found


@experiment(rounds=100, quick=2)
def disturbed(run: Run) -> None:
    """Programs of 100 epochs with and without prefetch_epochs: batches, random numbers and states are equal."""
    wrong = sum(play(seed, 100) != play(seed, 100, prefetch_epochs=True) for seed in run.seeds())
    run.table("epochs", "programs that differ").row(100 * run.rounds, wrong)
    run.claim("nothing differs", wrong == 0)
