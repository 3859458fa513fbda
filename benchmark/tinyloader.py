"""The experiment of tinyloader: the time of a step against the number of workers, ours beside torch's and a naive loop.

    python -m benchmark tinyloader --plot step_time.png

A sample takes 0.5 ms to load (it sleeps), a step 0.1 s (it sleeps too), a batch has 64 samples: loading one takes a third of a
step, so one worker is enough to hide it, and the time above 0.1 s is the loader's own.
Source of the experiment: T. Koker, "DataLoaders Explained" (2020).
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

import stocache

CLAIM = "From one worker on, loading is hidden behind the training step."
NEEDS = (("matplotlib", '-e ".[bench]"', "--plot"),)

SAMPLES, LOAD_S, STEP_S, BATCH = 2048, 0.0005, 0.1, 64


class Sleeping(Dataset[Any]):
    """An image and a label that take half a millisecond to load."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, idx: int) -> Any:
        time.sleep(LOAD_S)
        return np.zeros((1, 28, 28)), 1


class Naive:
    """A loader of one process that loads each batch when it is asked for."""

    def __init__(self, dataset: Sleeping) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.dataset), BATCH):
            yield default_collate([self.dataset[idx] for idx in range(start, start + BATCH)])


def step_s(loader: Iterable[Any], epochs: int) -> float:
    """Return the seconds of a training step, start-up of the epoch included."""
    began, steps = time.perf_counter(), 0
    for _ in range(epochs):
        for _ in loader:
            time.sleep(STEP_S)
            steps += 1
    return (time.perf_counter() - began) / steps


def measure(workers: Iterable[int], epochs: int, rounds: int) -> list[tuple[int, float, float]]:
    """Return for each number of workers the median step of torch's loader, and of ours."""
    makers: list[Callable[..., Any]] = [torch.utils.data.DataLoader, stocache.DataLoader]
    rows = []
    for count in workers:
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for make, seconds in zip(makers, times, strict=True):
                seconds.append(step_s(make(Sleeping(), batch_size=BATCH, num_workers=count), epochs))
        rows.append((count, statistics.median(times[0]), statistics.median(times[1])))
        print(f"| {count} | {rows[-1][1] * 1e3:.1f} ms | {rows[-1][2] * 1e3:.1f} ms |", flush=True)
    return rows


def plot(rows: list[tuple[int, float, float]], naive_s: float, path: Path) -> None:
    """Draw step time against workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    counts, theirs, ours = zip(*rows, strict=True)
    axes.plot(counts, [1e3 * seconds for seconds in theirs], "o-", label="torch.utils.data.DataLoader")
    axes.plot(counts, [1e3 * seconds for seconds in ours], "s-", label="stocache.DataLoader")
    axes.axhline(1e3 * naive_s, color="gray", linestyle=":", label="naive loop")
    axes.axhline(1e3 * STEP_S, color="black", linewidth=0.8, label="the step itself")
    axes.set(
        xlabel="workers", ylabel="time of a step (ms)", ylim=(95, None), title=f"{BATCH} samples of 0.5 ms, steps of 100 ms"
    )
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the experiment, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=range(9))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    naive_s = step_s(Naive(Sleeping()), arguments.epochs)
    print(f"naive loop: {naive_s * 1e3:.1f} ms per step\n\n| workers | torch | ours |\n| ---: | ---: | ---: |")
    rows = measure(arguments.workers, arguments.epochs, arguments.rounds)
    if arguments.plot is not None:
        plot(rows, naive_s, arguments.plot)


if __name__ == "__main__":
    main()
