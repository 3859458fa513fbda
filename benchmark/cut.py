"""Small datasets with the shapes of published programs: what is cached of each, wrong samples, and the time.

    python -m benchmark cut                  # all shapes of tests/support/shapes.py
    python -m benchmark cut --quick          # two loaders, few rounds
    python -m benchmark cut --shapes mixup   # some

A sample is wrong if it differs from that of the dataset without a cache, in the same loader, with the same seeds, in three
epochs; the states of the generators after an epoch count as a sample. Files are those that a warm epoch of torch's loader opens
without workers, of those of a plain one. Pictures have 24 times ``--scale`` pixels a side. Times are medians of a sample over
rounds, plain and warm in turns.
"""

import argparse
import copy
import logging
import operator
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from stocache import CachedDataset
from tests.support import shapes
from tests.support.epochs import LOADERS, Epoch, epochs, opened
from tests.support.shapes import SHAPES, N, outcome

CLAIM = "What a program does before it draws random numbers is cached, and every sample and random number stays the same."

QUICK = "torch", "ours, 2 workers"


def texts(epochs: list[Epoch]) -> list[str]:
    """Return what is compared."""
    return [repr(each) for epoch in epochs for each in (*epoch.samples, epoch.generators)]


def per_sample(dataset: Any) -> float:
    """Return the seconds of a sample, over all of a dataset."""
    began = time.perf_counter()
    for idx in range(N):
        dataset[idx]
    return (time.perf_counter() - began) / N


def row(name: str, loaders: tuple[str, ...], rounds: int) -> str:
    """Return what becomes of a shape."""
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as paths:
        made, wrong = SHAPES[name].make(Path(folder)), dict[str, int]()
        for loader in loaders:
            plain, inner = copy.deepcopy(made), copy.deepcopy(made)
            expected = epochs(plain, loader, inner=plain, files=paths)
            with CachedDataset(inner, 1) as cached:
                found = epochs(cached, loader, inner=inner, files=paths)
                wrong[loader] = sum(map(operator.ne, texts(found), texts(expected)))
                if loader != "torch":
                    continue
                times = [(per_sample(plain), per_sample(cached)) for _ in range(rounds)]
                split, becomes, opens = cached._split, outcome(cached), f"{len(found[-1].files)} of {len(expected[-1].files)}"
    without, warm = (statistics.median(each) * 1e6 for each in zip(*times, strict=True))
    text = "" if split is None or "cut" not in becomes else split.text.removeprefix("cached: ").partition("; run each time")[0]
    counts = ", ".join(f"{count} ({loader})" for loader, count in wrong.items() if count) or "0"
    text = text if len(text) < 70 else f"{text[:66]} ..."
    return f"| {name} | {becomes} | {text} | {counts} | {opens} | {without:.0f} | {warm:.0f} | {without / warm:.1f} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    options = parser.parse_args()
    shapes.scale = options.scale
    logging.getLogger("stocache").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as in workers
    print("| shape | becomes | what is cached | wrong samples | files when warm | plain, us | warm, us | times as fast |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    loaders = QUICK if options.quick else tuple(name for name in LOADERS if name != "ours, threads")  # which draw in no order
    for name in options.shapes:
        print(row(name, loaders, 5 if options.quick else options.rounds), flush=True)


if __name__ == "__main__":
    main()
