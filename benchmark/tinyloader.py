"""The experiment of tinyloader: the time of a step against the number of workers, ours beside torch's and a naive loop.

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
from torch.utils.data import default_collate

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


def naive(dataset: Made, batch: int, num_workers: int) -> Iterable[Any]:
    """Return a loader that makes each batch when it is asked for."""
    for start in range(0, len(dataset), batch):
        yield default_collate([dataset[idx] for idx in range(start, start + batch)])


@experiment(rounds=3)
def workers(run: Run) -> None:
    """Milliseconds of a step by the number of workers."""
    dataset, table = Made(run.size(2048, 640), sleeping), run.table("workers", "naive", "torch", "ours")
    makers = {"naive": naive, "torch": torch.utils.data.DataLoader, "ours": stocache.DataLoader}
    for count in run.size(range(9), range(3)):
        chosen = makers if count == 0 else {name: make for name, make in makers.items() if name != "naive"}
        took = run.turns({name: partial(step_s, make, dataset, count) for name, make in chosen.items()}, warm_up=0)
        table.row(count, *(1e3 * took.median(name) if name in took else None for name in makers))
    run.claim("from one worker on, a step takes 106 ms", max(table.column("ours")[1:]), most=106)
