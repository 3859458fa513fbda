"""Get and set the states of the random number generators of Python, numpy and torch."""

import base64
import binascii
import contextlib
import linecache
import random
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from stocache.errors import StateError
from stocache.system.generators import PYTHON, is_of_library, is_of_python, memory_of_numpy, read_generator

States: TypeAlias = dict[str, Any]
"""Holds only strings, numbers, lists and dicts, so that JSON can save it."""


def states(generators: Sequence[torch.Generator] = ()) -> States:
    """Return the states of the global generators and of ``generators``."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, _to_text(np.array(numbers, np.uint64)), gauss],
        "numpy": _numpy_to_json(np.random.get_state(legacy=False)),
        "torch": _to_text(torch.get_rng_state().numpy()),
        "generators": [_to_text(generator.get_state().numpy()) for generator in generators],
    }


def set_rng_state(taken: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Set the generators to states that `states` returned."""
    python, numpy_state, torch_state, own = _decoded(taken)
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)


def checked(saved: Any) -> States:
    """Return saved states, which were tried on generators that nobody uses.

    Raises:
        StateError: ``saved`` is damaged: no generator could have these states.
    """
    try:
        python, numpy_state, torch_state, own = _decoded(saved)
        random.Random().setstate(python)
        if numpy_state["bit_generator"] == "MT19937" and not 0 <= numpy_state["state"]["pos"] <= 624:
            raise ValueError("the position of numpy's generator")  # numpy does not check it, and would read beyond its memory
        np.random.RandomState(getattr(np.random, _bit_generator(numpy_state))(0)).set_state(numpy_state)
        for state in (torch_state, *own):
            torch.Generator().set_state(state)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError, binascii.Error) as error:
        raise StateError(f"the states of the random number generators are damaged: {error}") from error
    return saved  # type: ignore[no-any-return]


def _decoded(saved: Any) -> tuple[Any, Any, Any, list[Any]]:
    """Return the states of Python, numpy, torch and the other generators as these take them."""
    version, numbers, gauss = saved["python"]
    python = version, tuple(_from_text(numbers, np.uint64).tolist()), None if gauss is None else float(gauss)
    own = [torch.from_numpy(_from_text(state, np.uint8)) for state in (saved["torch"], *saved["generators"])]
    return python, _numpy_from_json(saved["numpy"]), own[0], own[1:]


def _bit_generator(numpy_state: Any) -> str:
    name = numpy_state["bit_generator"]
    if name not in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"):
        raise ValueError("the kind of numpy's generator")
    return str(name)


def _to_text(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _from_text(text: str, dtype: Any) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype)


def _numpy_to_json(state: object) -> Any:
    """Return a state of numpy with text in a list in place of arrays."""
    if isinstance(state, dict):
        return {key: _numpy_to_json(value) for key, value in state.items()}
    return [_to_text(state.astype(np.int64))] if isinstance(state, np.ndarray) else state


def _numpy_from_json(state: object) -> Any:
    if isinstance(state, dict):
        return {key: _numpy_from_json(value) for key, value in state.items()}
    return _from_text(state[0], np.int64).astype(np.uint64) if isinstance(state, list) else state


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


class LineOfSeed:
    """A ``with`` block that finds the line of code that first takes a seed, or random bytes, from the system. It is slow.

    Python's library does so for names of files and the like. So do libraries that ask the system directly. These do not count,
    nor does code that runs while a module is imported.

    Attributes:
        text: the file and the number of the line; None if there is no such line.
    """

    text: str | None = None
    _left = 1_000_000  # calls to look at, which takes about a second

    def __enter__(self) -> "LineOfSeed":
        self._outer, self._here = sys.getprofile(), sys._getframe(1)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(self._outer)

    def _look(self, frame: Any, event: str, function: Any) -> None:
        if event == "call":
            seeds = frame.f_code is random.Random.seed.__code__ and frame.f_locals.get("a", 0) is None
        else:
            seeds = event == "c_call" and function.__name__ in _SEEDING and type(function.__self__) in _SYSTEM
        self._left -= 1
        if self._left <= 0:
            sys.setprofile(self._outer)
        if not seeds or self.text is not None:
            return
        direct, callers = frame, []
        while frame is not None and frame is not self._here:
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in _OF_GENERATORS:
                callers.append(frame)
            frame = frame.f_back
        path = callers[0].f_code.co_filename if callers else ""
        of_library = is_of_python(path) or (is_of_library(path) and callers[0] is direct)
        if not callers or of_library or any("importlib" in caller.f_code.co_filename for caller in callers):
            return
        # numpy asks the system for each RandomState(seed), too, before it takes the seed
        if not _SEEDED_STATE.search(linecache.getline(path, callers[0].f_lineno)):
            self.text = f"{path}:{callers[0].f_lineno}"


_SEEDED_STATE = re.compile(r"RandomState\(\s*(?!\s|\)|None\s*\))")
_SEEDING = {"urandom", "getrandom", "seed"}
_SYSTEM = ModuleType, torch.Generator  # os, and a generator that seeds itself
_OF_GENERATORS = {"random", "secrets", "numpy", "torch"}


def fingerprint() -> tuple[Any, ...]:
    """Return a value for each global generator. It changes when the generator is drawn from."""
    memory = memory_of_numpy()
    numpy_state = repr(np.random.get_bit_generator().state) if memory is None else memory.raw  # type: ignore[attr-defined]
    return read_generator(PYTHON), read_generator(torch.default_generator), numpy_state
