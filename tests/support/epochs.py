"""Epochs over a dataset with several loaders, as descriptions: those with a cache are compared with those without one."""

import builtins
import contextlib
import io
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

import stocache
from stocache.system import generators
from stocache.system.describe import describe, difference
from stocache.system.loading.code import own_generators

EPOCHS = 3
LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (DataLoader, {}), "torch, 2 workers": (DataLoader, {"num_workers": 2}),
    "torch, persistent": (DataLoader, {"num_workers": 2, "persistent_workers": True}),
    "ours": (stocache.DataLoader, {}), "ours, 2 workers": (stocache.DataLoader, {"num_workers": 2}),
    "ours, persistent": (stocache.DataLoader, {"num_workers": 2, "persistent_workers": True}),
    "ours, thread": (stocache.DataLoader, {"num_workers": 1, "worker_method": "thread"}),
    "ours, threads": (stocache.DataLoader, {"num_workers": 2, "worker_method": "thread"}),
}  # fmt: skip


class Epoch(NamedTuple):
    """Descriptions of samples and of the generators after them, and the files that were opened."""

    samples: list[Any]
    generators: Any
    files: list[str]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def epochs(dataset: Any, loader: str, batch: int = 4, inner: Any = (), change: Any = None, files: Any = ()) -> list[Epoch]:
    """Return the epochs of a loader.

    Args:
        dataset: the dataset, which may be cached.
        loader: a key of `LOADERS`.
        batch: the size of batches.
        inner: the dataset without a cache, whose own generators are described as well.
        change: called with both datasets and the number of an epoch, before it.
        files: a list that `opened` fills.
    """
    seed(3)
    make, options = LOADERS[loader]
    loop, found = None, []
    for epoch in range(EPOCHS):
        if change is not None:
            change(dataset, inner, epoch)
        before = len(files)
        if loop is None or "persistent" not in loader:
            loop = make(dataset, batch, shuffle=True, collate_fn=list, **options)
        samples = [describe(sample, strides=False) for each in loop for sample in each]
        own = list(map(generators.read_generator, own_generators(inner)))
        found.append(Epoch(samples, None if "thread" in loader else describe((generators.read(), own)), list(files[before:])))
    return found


def difference_of(one: list[Epoch], other: list[Epoch]) -> str | None:
    """Return where samples or generators of epochs differ; None if nowhere."""
    return difference(*(describe([epoch[:2] for epoch in each]) for each in (one, other)))


@contextlib.contextmanager
def opened(folder: Path) -> Any:
    """Note the files of a folder that this process opens."""
    paths: list[str] = []
    before = builtins.open

    def opening(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).startswith(str(folder)):
            paths.append(str(file))
        return before(file, *arguments, **options)

    builtins.open = io.open = opening  # type: ignore[assignment]
    try:
        yield paths
    finally:
        builtins.open = io.open = before
