"""A warm epoch by worker threads where processes share no memory, beside one on Linux: the same program, in turn.

python -m benchmark systems

Where they share none is played by `tests/system/platform/portable`, which hides from stocache what only Linux gives.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from stocache import CachedDataset, DataLoader
from stocache.system.platform import here

CLAIM = "A warm epoch by worker threads is as fast on a system without shared memory as on Linux (0.95)."

HIDING = Path(__file__).parents[1] / "tests" / "platform" / "portable"
KINDS = {"3x64x64": (20_000, (3, 64, 64)), "3x224x224": (2_000, (3, 224, 224))}
EPOCHS, BATCH = 7, 256


class Filled(Dataset[Any]):
    """Images of one value."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.count, self.shape = count, shape

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        return torch.full(self.shape, idx % 251, dtype=torch.uint8), idx


def epochs_of(kind: str) -> float:
    """Return the samples per second of warm epochs, their median."""
    count, shape = KINDS[kind]
    with CachedDataset(Filled(count, shape), "1GiB", audit=0) as dataset:
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=2, worker_method="thread")
        seconds = []
        for _ in range(1 + EPOCHS):
            began = time.perf_counter()
            found = sum(len(numbers) for _, numbers in loader)
            seconds.append(time.perf_counter() - began)
            assert found == count
        assert dataset.stats().epochs[-1].hit_rate == 1
        return count / statistics.median(seconds[1:])


def run_in(portable: bool, kind: str) -> float:
    """Return what `epochs_of` returns in a process of its own."""
    env = os.environ | ({"PYTHONPATH": f"{HIDING}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"} if portable else {})
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.systems", "--kind", kind], env=env, check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert found["shares_memory"] is not portable
    return float(found["rate"])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kind", choices=KINDS, help="run one, and print its rate")
    arguments = parser.parse_args()
    if arguments.kind:
        print(json.dumps({"rate": epochs_of(arguments.kind), "shares_memory": here.SHARES_MEMORY}))
        return
    print("| samples | Linux, samples/s | without shared memory | ratio of each round |\n| --- | ---: | ---: | --- |")
    for kind in KINDS:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(arguments.rounds):
            for portable in (number % 2 == 1, number % 2 == 0):  # in turn
                rates[portable].append(run_in(portable, kind))
        linux, other = map(statistics.median, rates.values())
        ratios = sorted(without / with_it for with_it, without in zip(*rates.values(), strict=True))
        spread = f"median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"| {kind} | {linux:,.0f} | {other:,.0f} | {spread} |")


if __name__ == "__main__":
    main()
