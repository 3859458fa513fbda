"""The global random number generators of Python, numpy and torch: read, seeded and set back in a few microseconds.

NOTE [ Reading generators ]
    ``random.getstate`` takes 13 us, and ``np.random.get_state`` 60 us, because they make objects of 625 numbers. Both
    generators are Mersenne Twisters, and here their memory is copied instead, in 0.1 us. numpy's C interface gives the
    address of its generator. The memory of Python's generator lies behind the header of the object. It is read there only if a
    test with a second generator has confirmed this layout. Else ``random.getstate`` is called.

    A generator can hold one more number: normal numbers are made in pairs, and the second is kept for the next call. Python has
    it as an attribute. numpy shows it only in ``get_state``. But a number is kept only by a call that draws, which changes the
    memory. So ``get_state`` is not called again for memory that was seen without a kept number. (Exception: if
    ``np.random.set_state`` goes back to just before a kept number was used, that number may be lost.)
"""

import contextlib
import ctypes
import os
import pickle
import random
import struct
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from stocache.system.objects import vars_of


class Generator(Protocol):
    """A global generator."""

    def read(self) -> Any:
        """Return the state. It can be compared."""

    def restore(self, state: Any) -> None:
        """Set the state that `read` returned."""

    def seed(self, number: int) -> None:
        """Seed the generator with a number below 2**64."""


_PYTHON_TWISTER = struct.Struct("=i624I")  # the position, and the numbers; numpy has the position at the end
_Twister = ctypes.c_char * _PYTHON_TWISTER.size
_TorchState = ctypes.c_char * torch.default_generator.get_state().numel()


class PythonGenerator:
    """The generator behind the functions of ``random``."""

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]  # a bound method
        self._memory = _memory_of(self._generator) if _has_known_layout() else None

    def read(self) -> Any:
        """Return the state. It can be compared."""
        if self._memory is None:
            return random.getstate()
        return self._memory.raw, self._generator.gauss_next

    def restore(self, state: Any) -> None:
        """Set the state that `read` returned."""
        random.setstate(state if self._memory is None else (random.Random.VERSION, _python_numbers(state[0]), state[1]))

    def seed(self, number: int) -> None:
        """Seed the generator with a number below 2**64."""
        random.seed(number)


def _memory_of(generator: random.Random) -> Any:
    return _Twister.from_address(id(generator) + object.__basicsize__)


def _python_numbers(memory: bytes) -> tuple[int, ...]:
    position, *numbers = _PYTHON_TWISTER.unpack(memory)
    return (*numbers, position)


def _has_known_layout() -> bool:
    """Whether the memory of Python's generators is known; see NOTE [ Reading generators ]."""
    base = random.Random.__mro__[1]
    if sys.implementation.name != "cpython" or base.__basicsize__ < object.__basicsize__ + _PYTHON_TWISTER.size:
        return False
    probe = random.Random(1)
    probe.random()
    numbers: tuple[int, ...] = probe.getstate()[1]
    return _python_numbers(_memory_of(probe).raw) == numbers


class NumpyGenerator:
    """The generator behind the functions of ``np.random``."""

    def __init__(self) -> None:
        self._without_kept = b""  # memory that was seen without a kept number

    def memory(self) -> Any:
        """Return the memory of the generator, without the kept number; None if it is not a Mersenne Twister."""
        numbers = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it
        return _Twister.from_address(numbers.ctypes.state_address) if type(numbers) is np.random.MT19937 else None

    def read(self) -> bytes:
        """Return the state. It can be compared."""
        memory = self.memory()
        numbers: bytes = b"" if memory is None else memory.raw  # read once: other threads may draw
        if numbers and numbers == self._without_kept:
            return numbers
        state: Any = np.random.get_state(legacy=False)
        if not numbers or state["has_gauss"]:
            return pickle.dumps(state)
        self._without_kept = numbers
        return numbers

    def restore(self, state: bytes) -> None:
        """Set the state that `read` returned."""
        if len(state) == _PYTHON_TWISTER.size:
            np.random.seed(0)  # forgets the kept number
            self.memory().raw = state
        else:
            self._without_kept = b""
            np.random.set_state(pickle.loads(state))

    def seed(self, number: int) -> None:
        """Seed the generator with a number below 2**64, of which a Mersenne Twister takes 32 bits."""
        numbers = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(numbers) is np.random.MT19937:
            np.random.seed(number & 0xFFFFFFFF)
        else:
            np.random.set_state(dict(type(numbers)(number).state))


class TorchGenerator:
    """torch's generator of the CPU."""

    def read(self) -> bytes:
        """Return the state. It can be compared."""
        state = torch.default_generator.get_state()
        return _TorchState.from_address(state.data_ptr()).raw

    def restore(self, state: bytes) -> None:
        """Set the state that `read` returned."""
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seed(self, number: int) -> None:
        """Seed the generator with a number below 2**64. It does not touch other devices, as ``torch.manual_seed`` does."""
        torch.default_generator.manual_seed(number)


PYTHON, NUMPY, TORCH = PythonGenerator(), NumpyGenerator(), TorchGenerator()
GENERATORS: tuple[Generator, ...] = PYTHON, NUMPY, TORCH


def read(numbers: Iterable[int] = range(len(GENERATORS))) -> dict[int, Any]:
    """Return the states of generators, by their numbers in `GENERATORS`."""
    return {number: GENERATORS[number].read() for number in numbers}


# ---------------------------------------------------------------------------------------------------- while a sample is made


_LoadMany: TypeAlias = Callable[[list[int]], Iterable[Any]]


class _SeededSample(threading.local):
    """The `SeededSample` that this thread makes now, or None."""

    now: "SeededSample | None" = None


_sample = _SeededSample()


class SeededSample:
    """A ``with`` block that makes samples for which the generators are seeded, so that loading must leave them as they are."""

    def __enter__(self) -> None:
        self._outer, _sample.now = _sample.now, self

    def __exit__(self, *exception: object) -> None:
        _sample.now = self._outer

    def run(self, load: Callable[[int], Any], idx: int) -> Any:
        """Return ``load(idx)``, and leave the generators as they are."""
        before = read()
        try:
            return load(idx)
        finally:
            for number, state in read().items():
                if state != before[number]:
                    GENERATORS[number].restore(before[number])


def undrawn(load: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a function that loads a sample for a cache, and that leaves the generators alone while a `SeededSample` is made.

    So the transforms after the cache get the same random numbers whether or not the sample had to be loaded.
    """
    return load if _sample.now is None else partial(_sample.now.run, load)


def undrawn_many(load_many: _LoadMany, load: Callable[[int], Any]) -> _LoadMany:
    """Return a function that loads several samples, and that leaves the generators alone as that of `undrawn` does."""
    return load_many if _sample.now is None else partial(map, partial(_sample.now.run, load))


# ---------------------------------------------------------------------------------------------------- of a dataset


_MOST_PARTS, _MOST_ITEMS, _MOST_LEVELS = 2000, 32, 6


_LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_of_library(path: str) -> bool:
    """Whether a file of code belongs to a library, to Python or to this package, not to the user."""
    return path.startswith(_LIBRARIES) or "site-packages" in path


def parts_of(
    value: Any, name: str = "dataset", follow: Callable[[Any], bool] = lambda value: True
) -> Iterator[tuple[str, Any]]:
    """Yield the values in an object's attributes, lists, tuples and dicts, to some depth, with names such as ``dataset.size``.

    Args:
        follow: whether to look into a value.
    """
    seen, waiting = set(), deque([(name, value, 0)])
    for _ in range(_MOST_PARTS):
        if not waiting:
            return
        name, value, level = waiting.popleft()
        yield name, value
        if level == _MOST_LEVELS or id(value) in seen or isinstance(value, torch.Tensor | np.ndarray | type | ModuleType):
            continue
        seen.add(id(value))
        if not follow(value):
            continue
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, list | tuple | deque):
            inner = ((f"{name}[{number}]", item) for number, item in enumerate(islice(list(value), _MOST_ITEMS)))
        elif isinstance(value, FunctionType | MethodType | partial):
            inner = ((f"{name}: {key}", item) for key, item in _bound_values(value))
        elif type(value) is dict:
            inner = ((f"{name}[{key!r:.40}]", item) for key, item in islice(list(value.items()), _MOST_ITEMS))
        else:
            inner = ((f"{name}.{key}", item) for key, item in list(vars_of(value).items()))
        waiting.extend((key, item, level + 1) for key, item in inner)


def _bound_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function holds: a method's object, a partial's arguments, variables of the enclosing function."""
    if isinstance(function, MethodType):
        yield "self", function.__self__
    elif isinstance(function, partial):
        yield from (("function", function.func), ("arguments", function.args), ("options", function.keywords))
    else:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                yield name, cell.cell_contents


def in_worker_thread() -> bool:
    """Whether this is a worker thread, which shares the global generators with others and with the training loop."""
    return get_worker_info() is not None and threading.current_thread() is not threading.main_thread()


class Kept:
    """The states of generators. As a ``with`` block it restores them at its end.

    Args:
        own: generators of a dataset.
        global_too: whether to keep the global ones as well.
    """

    def __init__(self, own: Iterable[Any], global_too: bool = True) -> None:
        self._before, self._own = read() if global_too else {}, [(each, _state_of(each)) for each in own]

    def now(self) -> tuple[Any, ...]:
        """Return the states now, to compare them."""
        return read(self._before), [repr(_state_of(each)) for each, _ in self._own]

    def drawn(self) -> bool:
        """Whether a generator has been drawn from."""
        return self.now() != (self._before, [repr(state) for _, state in self._own])

    def restore(self) -> None:
        """Set the generators back."""
        for number, state in read(self._before).items():
            if state != self._before[number]:
                GENERATORS[number].restore(self._before[number])
        for each, state in self._own:
            _restore(each, state)

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


_KINDS = np.random.Generator, np.random.RandomState, random.Random, torch.Generator


def own_generators(dataset: Any) -> list[Any]:
    """Return the generators that a dataset holds."""
    return [part for _, part in parts_of(dataset) if isinstance(part, _KINDS)]


def global_generators() -> list[Any]:
    """Return the generators that are global variables of the user's modules."""
    modules = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    own = [names for names in modules if not is_of_library(names.get("__file__") or "")]
    return [value for names in own for value in list(names.values()) if isinstance(value, _KINDS)]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else bytes(generator.get_state().numpy())


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
