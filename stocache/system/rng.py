"""Get and set the states of the random number generators of Python, numpy and torch."""

import contextlib
import ctypes
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

States: TypeAlias = dict[str, Any]
"""Holds only tensors, lists, strings and numbers, so that it can be saved in any way."""

_MT19937_BYTES = 625 * 4  # 624 numbers and a position


def states(generators: Sequence[torch.Generator] = ()) -> States:
    """Return the states of the global generators and of ``generators``."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }


def _plain(state: Any) -> Any:
    """Return a state of numpy with tensors in place of arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return torch.from_numpy(state.astype(np.int64)) if isinstance(state, np.ndarray) else state


def _arrays(state: Any) -> Any:
    """Return a state of numpy with arrays in place of tensors."""
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return state.numpy().astype(np.uint64) if isinstance(state, torch.Tensor) else state


def set_rng_state(taken: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Set the generators to states that `states` returned."""
    version, numbers, gauss = taken["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(_arrays(taken["numpy"]))
    torch.set_rng_state(taken["torch"])
    for generator, state in zip(generators, taken["generators"], strict=True):
        generator.set_state(state)


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators after the block."""
    before = states()
    try:
        yield
    finally:
        set_rng_state(before)


class RngMonitor:
    """Notices whether the global generators have been drawn from since it was made. A look costs about 10 us."""

    def __init__(self) -> None:
        self._before = fingerprint()

    def changed(self) -> bool:
        """Whether a generator has been drawn from."""
        return fingerprint() != self._before


def disturb() -> None:
    """Draw from each of the global generators."""
    random.random()
    np.random.random_sample()
    torch.rand(1)


def fingerprint() -> tuple[Any, ...]:
    """Return a value for each global generator. It changes when the generator is drawn from."""
    numbers = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it
    if isinstance(numbers, np.random.MT19937):  # read through numpy's C interface: its `state` takes 40 us
        numpy_state: Any = ctypes.string_at(numbers.ctypes.state_address, _MT19937_BYTES)
    else:
        numpy_state = repr(numbers.state)
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), numpy_state
