"""Small datasets with the shapes of published programs: what is cached of each, wrong samples, and the time.

A sample is wrong if it differs from the sample of the dataset without a cache, in the same loader, with the same seeds, in
three epochs; the states of the generators after an epoch count as a sample. Files are the files that a warm epoch of torch's
loader opens without workers, of the files of a plain one. Pictures have 192 pixels a side. Times are the times of a sample,
plain and warm in turns.
"""

import copy
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from benchmark.support.faults import differing
from benchmark.support.harness import Figures, Run, experiment
from benchmark.support.measuring import for_each
from stocache import CachedDataset
from tests.support import shapes
from tests.support.epochs import LOADERS, epochs, opened
from tests.support.shapes import SHAPES, N, outcome

CLAIM = "What a program does before it draws random numbers is cached, and every sample and random number stays the same."


def row(run: Run, name: str, loaders: tuple[str, ...]) -> tuple[Counter[str], Figures, tuple[str, str, str]]:
    """Return the wrong samples of a shape by loader, the seconds of a sample, and what becomes of the shape."""
    wrong = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as paths:
        made = SHAPES[name].make(Path(folder))
        for loader in loaders:
            plain, inner = copy.deepcopy(made), copy.deepcopy(made)
            expected = epochs(plain, loader, inner=plain, files=paths)
            with CachedDataset(inner, 1) as cached:
                found = epochs(cached, loader, inner=inner, files=paths)
                wrong[loader] = differing(found, expected)
                if loader == "torch":
                    contenders = {"plain": plain, "warm": cached}
                    took = run.turns({way: partial(for_each, range(N), of.__getitem__) for way, of in contenders.items()}, N)
                    becomes, files = outcome(cached), f"{len(found[-1].files)} of {len(expected[-1].files)}"
                    text = cached._split.text if "cut" in becomes else ""
    return wrong, took, (becomes, text.removeprefix("cached: ").partition("; run each time")[0][:70], files)


@experiment(rounds=15, quick=2)
def programs(run: Run) -> None:
    """Compare the samples of all shapes of tests/support/shapes.py in seven loaders, and time them."""
    shapes.scale = 8
    torch.set_num_threads(1)  # as in workers
    loaders = tuple(name for name in LOADERS if name != "ours, threads")  # which draw in no order
    titles = "shape", "becomes", "what is cached", "files when warm", "wrong", "plain, us", "warm, us", "times as fast"
    table = run.table(*titles)
    for name in list(run.chosen(SHAPES))[:: run.size(1, 4)]:
        wrong, took, words = row(run, name, run.size(loaders, ("torch",)))
        table.row(name, *words, wrong.total(), *(took.median(each) * 1e6 for each in took), took.ratio("plain", "warm"))
    run.claim("no sample is wrong", not any(table.column("wrong")))
