"""Read, seed and set back the random number generators of Python, numpy and torch.

NOTE [ Reading generators ]
    ``np.random.get_state`` takes 32 us. So the memory of numpy's generator is copied instead, in 0.1 us: numpy's interface for
    ctypes has its address. ``random.getstate`` takes 8 us.

    numpy's generator can hold one more number: normal numbers are made in pairs, and the second is kept for the next call. Only
    ``get_state`` shows it. But a number is kept only by a call that draws, which changes the memory. So ``get_state`` is not
    called again for memory that was seen without a kept number. (Exception: if ``np.random.set_state`` goes back to just before
    a kept number was used, that number may be lost.)
"""

import base64
import binascii
import ctypes
import functools
import linecache
import pickle
import random
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from stocache.errors import StateError
from stocache.system.objects import is_of_library, is_of_python

_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # a bound method
_NUMPY: Any = np.random.random_sample.__self__  # type: ignore[attr-defined]
GENERATORS: tuple[Any, ...] = _PYTHON, _NUMPY, torch.default_generator
"""The generators behind the functions of ``random`` and ``np.random``, and torch's of the CPU."""

GENERATOR_TYPES = np.random.Generator, np.random.RandomState, random.Random, torch.Generator

_TWISTER_BYTES = 625 * 4  # of a Mersenne Twister of numpy: its numbers and its position
_without_kept = b""  # memory of numpy's generator that was seen without a kept number


def read_generator(generator: Any) -> Any:
    """Return the state of a generator. It can be compared."""
    global _without_kept
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    memory = _memory_of_numpy() if generator is _NUMPY else None
    numbers: bytes = b"" if memory is None else memory.raw  # read once: other threads may draw
    if numbers and numbers == _without_kept:
        return numbers
    state: Any = generator.get_state(legacy=False)
    if not numbers or state["has_gauss"]:
        return pickle.dumps(state)
    _without_kept = numbers
    return numbers


def restore_generator(generator: Any, state: Any) -> None:
    """Set the state that `read_generator` returned."""
    global _without_kept
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    elif generator is _NUMPY and len(state) == _TWISTER_BYTES:
        np.random.seed(0)  # forgets the kept number
        _memory_of_numpy().raw = _without_kept = state
    else:
        _without_kept = b""
        generator.set_state(pickle.loads(state))


def _memory_of_numpy() -> Any:
    """Return the memory of numpy's generator, without the kept number; None if it is not a Mersenne Twister."""
    numbers = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it
    known = type(numbers) is np.random.MT19937
    return (ctypes.c_char * _TWISTER_BYTES).from_address(numbers.ctypes.state_address) if known else None


def read() -> dict[int, Any]:
    """Return the states of `GENERATORS`, by their numbers there."""
    return dict(enumerate(map(read_generator, GENERATORS)))


def restore_all(states: Mapping[int, object]) -> None:
    """Set the states that `read` returned."""
    for number, state in states.items():
        restore_generator(GENERATORS[number], state)


def seed_all(numbers: Sequence[int]) -> None:
    """Seed `GENERATORS` with numbers below 2**64, of which a Mersenne Twister of numpy takes 32 bits.

    It does not touch other devices, as ``torch.manual_seed`` does.
    """
    random.seed(numbers[0])
    if _memory_of_numpy() is not None:
        np.random.seed(numbers[1] & 0xFFFFFFFF)
    else:
        np.random.set_state(dict(type(np.random.get_bit_generator())(numbers[1]).state))  # type: ignore[attr-defined]
    torch.default_generator.manual_seed(numbers[2])


class Kept:
    """The states of generators. As a ``with`` block it restores them at its end.

    Args:
        own: generators of a dataset.
        global_too: whether to keep the global ones as well.
    """

    def __init__(self, own: Iterable[object] = (), global_too: bool = True) -> None:
        self._generators = [*(GENERATORS if global_too else ()), *own]
        self._before = self.now()

    def now(self) -> list[Any]:
        """Return the states now, to compare them."""
        return list(map(read_generator, self._generators))

    def drawn(self) -> bool:
        """Whether a generator has been drawn from."""
        return list(map(_end_of, self.now())) != list(map(_end_of, self._before))

    def restore(self) -> None:
        """Set the generators back."""
        for generator, state in zip(self._generators, self._before, strict=True):
            restore_generator(generator, state)

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def _end_of(state: Any) -> Any:
    """Return the part of a state that each draw changes.

    A Mersenne Twister of Python moves its position, the last number, until it makes all its numbers anew. To compare all 625
    takes 10 us.
    """
    is_twister = type(state) is tuple and len(state) == 3 and state[0] == random.Random.VERSION
    return (state[1][-4:], state[2]) if is_twister else state


def in_worker_thread() -> bool:
    """Whether this is a worker thread, which shares the global generators with others and with the training loop."""
    return get_worker_info() is not None and threading.current_thread() is not threading.main_thread()


@functools.lru_cache(4096)  # torch's check of a class takes 1 us
def is_generator_class(cls: type) -> bool:
    """Whether objects of a class are generators whose state can be read: not those of the system's numbers."""
    return issubclass(cls, GENERATOR_TYPES) and not issubclass(cls, random.SystemRandom)


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
