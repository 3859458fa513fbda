"""The gap between two epochs: the wait for the first batch of an epoch, beside the waits for the others."""

import statistics
import time
from functools import partial
from typing import Any

import torch

from benchmark.support.datasets import Made
from benchmark.support.harness import Figures, Run, experiment
from stocache import DataLoader
from tests.support.disturbed import SAMPLERS, play

CLAIM = "With prefetch_epochs the loop waits for the first batch of an epoch no longer than for the others."

EPOCHS, SIZE = 20, 16
WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
STEPS_MS = {
    "10 ms a step, 1 ms a sample": (10, 1),
    "1 ms a step, 1 ms a sample": (1, 1),
    "20 ms a step, 2 ms a sample": (20, 2),
}


def waits(loader: Any, step_s: float) -> tuple[float, float, float]:
    """Run a loop; return the median waits for first batches, from epoch 2 on, and for the other batches, and the sum of all."""
    first, others = list[float](), list[float]()
    for epoch in range(EPOCHS):
        asked = time.perf_counter()
        for number, _ in enumerate(loader):
            (others if number or not epoch else first).append(time.perf_counter() - asked)
            time.sleep(step_s)
            asked = time.perf_counter()
    return statistics.median(first), statistics.median(others), sum(first) + sum(others)


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


@experiment(rounds=100, quick=2)
def disturbed(run: Run) -> None:
    """Programs of 100 epochs with and without prefetch_epochs: batches, random numbers and states are equal."""
    wrong, samplers = 0, list(SAMPLERS)
    for seed in run.seeds():
        program = partial(play, samplers[seed // 2 % len(samplers)], seed, 100, sample_seed=None if seed % 4 < 2 else 3)
        wrong += program() != program(prefetch_epochs=True)
    run.table("epochs", "programs that differ").row(100 * run.rounds, wrong)
    run.claim("nothing differs", wrong == 0)
