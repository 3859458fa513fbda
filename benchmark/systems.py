"""A warm epoch by worker threads if processes share no memory, beside one on Linux: the same program, in turn.

Where they share none is played by `tests/system/platform/portable`, which hides from stocache what only Linux offers.
"""

import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import epoch_s
from benchmark.support.processes import in_interpreter
from stocache import CachedDataset, DataLoader
from stocache.system.platform import here

CLAIM = "A warm epoch by worker threads is as fast on a system without shared memory as on Linux (0.95)."

HIDING = Path(__file__).parents[1] / "tests" / "system" / "platform" / "portable"
KINDS = {"3x64x64": (20_000, (3, 64, 64)), "3x224x224": (2_000, (3, 224, 224))}


def filled(shape: tuple[int, ...], idx: int) -> Any:
    """Return an image of one value, and its label."""
    return torch.full(shape, idx % 251, dtype=torch.uint8), idx


def epoch_of(kind: str, epochs: int, portable: bool) -> float:
    """Return the median seconds of warm epochs."""
    assert here.SHARES_MEMORY is not portable
    count, shape = KINDS[kind]
    with CachedDataset(Made(count, partial(filled, shape)), "1GiB", audit=0) as dataset:
        loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=2, worker_method="thread")
        seconds = [epoch_s(loader) for _ in range(1 + epochs)]
        assert dataset.stats().epochs[-1].hit_rate == 1
    return statistics.median(seconds[1:])


@experiment(rounds=7)
def epochs(run: Run) -> None:
    """Samples per second of warm epochs, in processes of their own."""
    table = run.table("samples", "Linux, samples/s", "without shared memory", "of the rate")
    path = os.environ.get("PYTHONPATH", "")
    environments = {"Linux": path, "without": f"{HIDING}{os.pathsep}{path}"}
    for kind, (count, _) in KINDS.items():
        took = run.turns(
            {
                name: partial(
                    in_interpreter, epoch_of, kind, run.size(7, 2), name == "without", env=os.environ | {"PYTHONPATH": path}
                )
                for name, path in environments.items()
            },
            warm_up=0,
        )
        table.row(kind, count / took.median("Linux"), count / took.median("without"), took.spread("Linux", "without"))
    run.claim("without shared memory an epoch comes at 0.95", min(table.column("of the rate")), least=0.95)
