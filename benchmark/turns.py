"""Hits, misses, fills, warm batches and block reads of this tree and of an earlier one, in turns.

    git worktree add ../before COMMIT
    python -m benchmark turns --folder ../before

Each round starts one process for each tree, in an order that rotates, and takes the median of several passes within it. The
tables have the medians of the rounds, and the ratio of this tree to the earlier one in each round: median, least and most.
Without an earlier tree, this one is compared with itself, which shows the noise.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmark.support.harness import Figures, Run, experiment

CLAIM = "A change of structure leaves hits, misses, fills, warm batches and block reads at most 3 % slower than before."

ROOT = Path(__file__).parents[1]


def measured(part: str, tree: Path, passes: int) -> dict[str, float]:
    """Return the microseconds of each operation of a tree."""
    path = str(ROOT / "benchmark" / "support" / "operations.py")
    code = f"import runpy; runpy.run_path({path!r}, run_name='__main__')"  # its folder has a module datasets
    command = [sys.executable, "-c", code, part, str(passes)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, cwd=tree)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(run: Run, part: str) -> None:
    """Print the table of a part of the operations."""
    trees = {"before": (run.folder or ROOT).resolve(), "now": ROOT}
    found = run.results({name: partial(measured, part, tree, run.size(15, 1)) for name, tree in trees.items()}, warm_up=0)
    table = run.table("µs", "before", "now", "now to before")
    for operation in found["now"][0]:
        took = Figures({name: [each[operation] for each in rounds] for name, rounds in found.items()})
        table.row(operation, took.median("before"), took.median("now"), took.spread("now", "before"))
    run.claim("no operation takes more than 3 % longer", max(table.column("now to before")), most=1.03)


@experiment(rounds=7)
def costs(run: Run) -> None:
    """Samples and blocks."""
    compare(run, "costs")


@experiment(rounds=7)
def loaders(run: Run) -> None:
    """Batches: warm, with transforms, in first epochs, and at the start of an epoch."""
    compare(run, "loaders")
