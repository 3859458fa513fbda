"""The random number generators of Python, numpy and torch: their states, taken and put back."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

States: TypeAlias = dict[str, Any]
"""Tensors, lists, strings and numbers only, which every way of saving takes."""


def states(generators: Sequence[torch.Generator] = ()) -> States:
    """Return the states of the global generators, and of ``generators``."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }


def put_back(taken: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Put the generators into the states that were taken."""
    version, numbers, gauss = taken["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = taken["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(taken["torch"])
    for generator, state in zip(generators, taken["generators"], strict=True):
        generator.set_state(state)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put the global generators back, after the block, to where they were before."""
    before = states()
    try:
        yield
    finally:
        put_back(before)
