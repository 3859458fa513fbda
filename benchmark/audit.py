"""What the audit finds, and what it costs: kinds of samples that depend on more than their index, with several loaders.

A sample is wrong if it differs from the sample of the dataset without a cache, in the same loader, with the same seeds. If the
samples of two runs cannot be the same (the time, ``os.urandom``), an epoch that repeats another counts as wrong. The kinds are
those of tests/support/depending.py. Worker threads draw in no fixed order, so kinds that draw are left out there.
"""

import collections
import contextlib
import logging
import operator
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stocache
from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from stocache import CachedDataset
from tests.support.depending import KINDS
from tests.support.epochs import LOADERS, Epoch, epochs

CLAIM = "A sample that depends on more than its index is found before a wrong batch is handed over, for 1 % of the time."


def wrong(name: str, loader: str) -> int | None:
    """Return how many samples are wrong; None if threads would draw."""
    kind = KINDS[name]
    if "threads" in loader and (kind.change is None or "split" in name or name in ("transform set", "transform in place")):
        return None
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plain, inner = kind.make(Path(one)), kind.make(Path(other))
        expected = _texts(epochs(plain, loader, 8, plain, kind.change))
        with CachedDataset(inner, 1, **dict(kind.options)) as cached:
            found = _texts(epochs(cached, loader, 8, inner, kind.change))
    if kind.repeats is False:
        return sum(sorted(found[0]) == sorted(epoch) for epoch in found[1:]) * len(found[0])
    if kind.repeats is None:
        found, expected = list(map(sorted, found)), list(map(sorted, expected))
    return sum(sum(map(operator.ne, *pair)) for pair in zip(found, expected, strict=True))


def _texts(epochs: list[Epoch]) -> list[list[str]]:
    return [list(map(repr, epoch.samples)) for epoch in epochs]


@experiment()
def kinds(run: Run) -> None:
    """Compare the samples of three epochs, by kind and loader."""
    logging.getLogger("stocache").setLevel(logging.ERROR)
    loaders = run.size([name for name in LOADERS if name != "ours, thread"], ["torch", "ours, 2 workers"])
    table = run.table("kind", *loaders)
    for name in list(run.chosen(KINDS))[:: run.size(1, 5)]:
        table.row(name, *(wrong(name, loader) for loader in loaders))
    run.claim("no sample is wrong", not any(any(table.column(loader)) for loader in loaders))


def timed(cost_s: float, idx: int) -> torch.Tensor:
    """Return a sample that takes some time."""
    until = time.perf_counter() + cost_s
    if cost_s > 0.001:
        time.sleep(cost_s)
    while time.perf_counter() < until:
        pass
    return torch.full((3, 16, 16), idx % 251, dtype=torch.uint8)


@experiment(rounds=15, quick=2)
def cost(run: Run) -> None:
    """Time warm epochs over cheap and dear samples, with the audit and without."""
    logging.getLogger("stocache").setLevel(logging.ERROR)
    table = run.table("a sample, µs", "samples", "warm epoch without the audit, ms", "with it, ms", "loads of the audit")
    for cost_s, count in ((20e-6, 100_000), (2e-3, 10_000), (20e-3, 200)):
        with contextlib.ExitStack() as stack:
            source = Made(run.size(count, count // 100 + 64), partial(timed, cost_s))
            caches = [stack.enter_context(CachedDataset(source, 1, audit=audit, example=source[0])) for audit in (0, 0.01)]
            contenders: dict[str, Callable[[], Any]] = {}
            for name, cached in zip(("without", "with"), caches, strict=True):
                contenders[name] = partial(collections.deque, stocache.DataLoader(cached, 64, shuffle=True), 0)
                contenders[name]()
            before = caches[1].stats().compared
            took = run.turns(contenders)
            loads = (caches[1].stats().compared - before) / (run.rounds + 1)
        table.row(cost_s * 1e6, len(source), took.median("without") * 1e3, took.median("with") * 1e3, loads)
