"""The random number generators of Python, numpy and torch: their states, taken and put back."""

import contextlib
import ctypes
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

States: TypeAlias = dict[str, Any]
"""Tensors, lists, strings and numbers only, which every way of saving takes."""

_MT19937_BYTES = 625 * 4  # 624 numbers, and the position among them


def states(generators: Sequence[torch.Generator] = ()) -> States:
    """Return the states of the global generators, and of ``generators``."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }


def _plain(state: Any) -> Any:
    """Return a state of numpy's with tensors for its arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return torch.from_numpy(state.astype(np.int64)) if isinstance(state, np.ndarray) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return state.numpy().astype(np.uint64) if isinstance(state, torch.Tensor) else state


def set_rng_state(taken: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Put the generators into the states that were taken."""
    version, numbers, gauss = taken["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(_arrays(taken["numpy"]))
    torch.set_rng_state(taken["torch"])
    for generator, state in zip(generators, taken["generators"], strict=True):
        generator.set_state(state)


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Put the global generators back, after the block, to where they were before."""
    before = states()
    try:
        yield
    finally:
        set_rng_state(before)


class RngMonitor:
    """Tells whether anybody has drawn from the global generators since it was made, in some 10 us."""

    def __init__(self) -> None:
        self._before = fingerprint()

    def changed(self) -> bool:
        """Whether anybody has drawn."""
        return fingerprint() != self._before


def disturb() -> None:
    """Draw from each of the global generators."""
    random.random()
    np.random.random_sample()
    torch.rand(1)


def fingerprint() -> tuple[Any, ...]:
    """Return something for each of the global generators that differs when it has been drawn from."""
    numbers = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it
    if isinstance(numbers, np.random.MT19937):  # by its memory: numpy takes 40 us to tell its state
        told: Any = ctypes.string_at(numbers.ctypes.state_address, _MT19937_BYTES)
    else:
        told = repr(numbers.state)
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), told
