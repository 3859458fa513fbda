"""The experiment of tinyloader: the time of a step against the number of workers, ours beside torch's.

A sample takes 0.5 ms to load (it sleeps), a step 0.1 s (it sleeps too), a batch has 64 samples: loading one takes a third of a
step, so one worker is enough to hide it, and the time above 0.1 s is the loader's own.
Source of the experiment: T. Koker, "DataLoaders Explained" (2020).
"""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

import stocache
from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment

CLAIM = "From one worker on, loading is hidden behind the training step."

LOAD_S, STEP_S, BATCH = 0.0005, 0.1, 64


def sleeping(idx: int) -> Any:
    """Return an image and a label, after half a millisecond."""
    time.sleep(LOAD_S)
    return np.zeros((1, 28, 28)), 1


def step_s(make: Any, dataset: Made, workers: int) -> float:
    """Return the seconds of a training step, start-up of the epoch included."""
    loader: Iterable[Any] = make(dataset, BATCH, num_workers=workers)
    began, steps = time.perf_counter(), 0
    for _ in loader:
        time.sleep(STEP_S)
        steps += 1
    return (time.perf_counter() - began) / steps


@experiment(rounds=3)
def workers(run: Run) -> None:
    """Milliseconds of a step by the number of workers."""
    dataset, table = Made(run.size(2048, 640), sleeping), run.table("workers", "torch", "ours")
    makers = {"torch": torch.utils.data.DataLoader, "ours": stocache.DataLoader}
    for count in run.size(range(9), range(3)):
        took = run.turns({name: partial(step_s, make, dataset, count) for name, make in makers.items()}, warm_up=0)
        table.row(count, 1e3 * took.median("torch"), 1e3 * took.median("ours"))
    run.claim("from one worker on, a step takes 106 ms", max(table.column("ours")[1:]), most=106)
