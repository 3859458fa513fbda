"""Get and set the states of the random number generators of Python, numpy and torch."""

import base64
import binascii
import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from stocache.errors import StateError
from stocache.system.generators import NUMPY, PYTHON, TORCH, is_of_library

States: TypeAlias = dict[str, Any]
"""Holds only tensors, lists, strings and numbers, so that it can be saved in any way."""


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


def to_json(taken: States) -> dict[str, Any]:
    """Return states as strings, numbers, lists and dicts, which JSON can save."""
    version, numbers, gauss = taken["python"]
    return {
        "python": [version, _to_text(np.array(numbers, np.uint64)), gauss],
        "numpy": _numpy_to_json(taken["numpy"]),
        "torch": _to_text(taken["torch"].numpy()),
        "generators": [_to_text(state.numpy()) for state in taken["generators"]],
    }


def from_json(saved: Any) -> States:
    """Return the states that `to_json` was given.

    Raises:
        StateError: ``saved`` is damaged: no generator could have these states.
    """
    try:
        version, numbers, gauss = saved["python"]
        taken: States = {
            "python": [version, _from_text(numbers, np.uint64).tolist(), None if gauss is None else float(gauss)],
            "numpy": _numpy_from_json(saved["numpy"]),
            "torch": torch.from_numpy(_from_text(saved["torch"], np.uint8)),
            "generators": [torch.from_numpy(_from_text(state, np.uint8)) for state in saved["generators"]],
        }
        _check(taken)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError, binascii.Error) as error:
        raise StateError(f"the states of the random number generators are damaged: {error}") from error
    return taken


def _check(taken: States) -> None:
    """Try states on generators that nobody uses."""
    version, numbers, gauss = taken["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    numpy_state = _arrays(taken["numpy"])
    if numpy_state["bit_generator"] == "MT19937" and not 0 <= numpy_state["state"]["pos"] <= 624:
        raise ValueError("the position of numpy's generator")  # numpy does not check it, and would read beyond its memory
    np.random.RandomState(getattr(np.random, _bit_generator(numpy_state))(0)).set_state(numpy_state)
    for state in (taken["torch"], *taken["generators"]):
        torch.Generator().set_state(state)


def _bit_generator(numpy_state: Any) -> str:
    name = numpy_state["bit_generator"]
    if name not in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"):
        raise ValueError("the kind of numpy's generator")
    return str(name)


def _to_text(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _from_text(text: str, dtype: Any) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype)


def _numpy_to_json(state: Any) -> Any:
    """Return a state of numpy with text in place of tensors."""
    if isinstance(state, dict):
        return {key: _numpy_to_json(value) for key, value in state.items()}
    return [_to_text(state.numpy())] if isinstance(state, torch.Tensor) else state


def _numpy_from_json(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _numpy_from_json(value) for key, value in state.items()}
    return torch.from_numpy(_from_text(state[0], np.int64)) if isinstance(state, list) else state


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators after the block."""
    before = states()
    try:
        yield
    finally:
        set_rng_state(before)


class RngMonitor:
    """Notices whether the global generators have been drawn from since it was made. A check costs a few us."""

    def __init__(self) -> None:
        self._before = fingerprint()

    def changed(self) -> bool:
        """Whether a generator has been drawn from."""
        return fingerprint() != self._before


class LineOfDraw:
    """A ``with`` block that finds the line of the user's code that draws from a global generator first. It is slow.

    Attributes:
        text: the file and the number of the line; None if nothing was drawn.
    """

    text: str | None = None

    def __enter__(self) -> "LineOfDraw":
        self._before, self._tracer = fingerprint(), sys.gettrace()
        self._line: tuple[str, int] | None = None
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._tracer)
        self._look()

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if is_of_library(path) or self.text is not None:
            return None
        self._look()
        self._line = path, frame.f_lineno
        return self._trace

    def _look(self) -> None:
        if self.text is None and self._line is not None and fingerprint() != self._before:
            self.text = "{}:{}".format(*self._line)


def disturb() -> None:
    """Draw from each of the global generators."""
    random.random()
    np.random.random_sample()
    torch.rand(1, device="cpu")


def fingerprint() -> tuple[Any, ...]:
    """Return a value for each global generator. It changes when the generator is drawn from."""
    memory = NUMPY.memory()
    numpy_state = repr(np.random.get_bit_generator().state) if memory is None else memory.raw  # type: ignore[attr-defined]
    return PYTHON.read(), TORCH.read(), numpy_state
