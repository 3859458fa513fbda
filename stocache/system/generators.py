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
import functools
import os
import pickle
import random
import re
import struct
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from stocache.system.objects import vars_of

PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # a bound method
NUMPY: Any = np.random.random_sample.__self__  # type: ignore[attr-defined]
GENERATORS: tuple[Any, ...] = PYTHON, NUMPY, torch.default_generator
"""The generators behind the functions of ``random`` and ``np.random``, and torch's of the CPU."""

GENERATOR_TYPES = np.random.Generator, np.random.RandomState, random.Random, torch.Generator

_PYTHON_TWISTER = struct.Struct("=i624I")  # the position, and the numbers; numpy has the position at the end
_Twister = ctypes.c_char * _PYTHON_TWISTER.size
_without_kept = b""  # memory of numpy's generator that was seen without a kept number


def read_generator(generator: Any) -> Any:
    """Return the state of a generator. It can be compared."""
    global _without_kept
    if generator is PYTHON and _python_memory is not None:
        return _python_memory.raw, generator.gauss_next
    memory = memory_of_numpy() if generator is NUMPY else None
    numbers: bytes = b"" if memory is None else memory.raw  # read once: other threads may draw
    if numbers and numbers == _without_kept:
        return numbers
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
        if not numbers or state["has_gauss"]:
            return pickle.dumps(state)
        _without_kept = numbers
        return numbers
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())
    return generator.getstate() if isinstance(generator, random.Random) else pickle.dumps(generator.bit_generator.state)


def restore_generator(generator: Any, state: Any) -> None:
    """Set the state that `read_generator` returned."""
    global _without_kept
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        if generator is PYTHON and type(state[0]) is bytes:
            _python_memory.raw, generator.gauss_next = state
        else:
            generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    elif generator is NUMPY and len(state) == _PYTHON_TWISTER.size:
        np.random.seed(0)  # forgets the kept number
        memory_of_numpy().raw = _without_kept = state
    else:
        _without_kept = b""
        generator.set_state(pickle.loads(state))


def seed_generator(generator: Any, number: int) -> None:
    """Seed one of `GENERATORS` with a number below 2**64, of which a Mersenne Twister of numpy takes 32 bits.

    It does not touch other devices, as ``torch.manual_seed`` does.
    """
    if generator is PYTHON:
        random.seed(number)
    elif generator is not NUMPY:
        generator.manual_seed(number)
    elif memory_of_numpy() is not None:
        np.random.seed(number & 0xFFFFFFFF)
    else:
        np.random.set_state(dict(type(np.random.get_bit_generator())(number).state))  # type: ignore[attr-defined]


def memory_of_numpy() -> Any:
    """Return the memory of numpy's generator, without the kept number; None if it is not a Mersenne Twister."""
    numbers = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it
    return _Twister.from_address(numbers.ctypes.state_address) if type(numbers) is np.random.MT19937 else None


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


_python_memory: Any = _memory_of(PYTHON) if _has_known_layout() else None


def read(numbers: Iterable[int] = range(len(GENERATORS))) -> dict[int, Any]:
    """Return the states of generators, by their numbers in `GENERATORS`."""
    return {number: read_generator(GENERATORS[number]) for number in numbers}


def restore_all(states: Mapping[int, object]) -> None:
    """Set the states that `read` returned."""
    for number, state in states.items():
        restore_generator(GENERATORS[number], state)


def seed_all(numbers: Iterable[int]) -> None:
    """Seed each of `GENERATORS` with its number."""
    for generator, number in zip(GENERATORS, numbers, strict=False):
        seed_generator(generator, number)


_LoadMany: TypeAlias = Callable[[list[int]], Iterable[Any]]


_Keep: TypeAlias = Callable[[], AbstractContextManager[object]]


class _Keeping(threading.local):
    """How this thread keeps the generators while a sample is loaded; None while samples are not seeded."""

    keep: _Keep | None = None


_here = _Keeping()


@contextlib.contextmanager
def seeded_samples(keep: _Keep | None = None) -> Iterator[None]:
    """Run a block that makes samples for which the generators are seeded, so that loading must leave them as they are.

    ``keep``: leaves them so in a ``with`` block; by default a `Kept` of the global ones.
    """
    outer, _here.keep = _here.keep, keep or partial(Kept, ())
    try:
        yield
    finally:
        _here.keep = outer


def _load_kept(keep: _Keep, load: Callable[[int], object], idx: int) -> Any:
    with keep():
        return load(idx)


def undrawn(load: Callable[[int], object]) -> Callable[[int], Any]:
    """Return a function that loads a sample for a cache, and that leaves the generators alone while `seeded_samples` are made.

    So the transforms after the cache get the same random numbers whether or not the sample had to be loaded.
    """
    return load if _here.keep is None else partial(_load_kept, _here.keep, load)


def undrawn_many(load_many: _LoadMany, load: Callable[[int], object]) -> _LoadMany:
    """Return a function that loads several samples, and that leaves the generators alone as that of `undrawn` does."""
    return load_many if _here.keep is None else partial(map, partial(_load_kept, _here.keep, load))


_MOST_PARTS, _MOST_ITEMS, _MOST_LEVELS = 2000, 32, 6


_LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_of_library(path: str) -> bool:
    """Whether a file of code belongs to a library, to Python or to this package, not to the user."""
    return path.startswith((*_LIBRARIES, "<frozen ")) or "site-packages" in path


def inner_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in the attributes or items of an object, and of a function, with their names."""
    if isinstance(value, torch.Tensor | np.ndarray | type | ModuleType):
        return
    if isinstance(value, list | tuple | deque):
        yield from ((f"{name}[{number}]", item) for number, item in enumerate(islice(list(value), _MOST_ITEMS)))
    elif isinstance(value, FunctionType | MethodType | partial):
        yield from ((f"{name}: {key}", item) for key, item in _bound_values(value))
    elif type(value) is dict:
        yield from ((f"{name}[{key!r:.40}]", item) for key, item in islice(list(value.items()), _MOST_ITEMS))
    else:
        yield from ((f"{name}.{key}", item) for key, item in list(vars_of(value).items()))


def is_of_python(path: str) -> bool:
    """Whether a file of code belongs to Python or to this package."""
    return path.startswith(_LIBRARIES) and "site-packages" not in path


@functools.cache
def _is_module_of_library(module: str) -> bool:
    return is_of_library(str(getattr(sys.modules.get(module), "__file__", None)))


def is_own(value: object) -> bool:
    """Whether a value is a plain container, a function, or an object of the user's that threads do not share."""
    kind = type(value)
    if vars_of(value).get("thread_safe") or getattr(kind, "thread_safe", False) is True:
        return False
    return kind.__module__ == "builtins" or kind in (deque, partial) or not _is_module_of_library(kind.__module__)


def is_own_or_dataset(value: object) -> bool:
    """Whether a value is of the user, as `is_own` says, or a dataset of torch or of another library."""
    return is_own(value) or isinstance(value, Dataset)


def parts_of(
    value: object,
    name: str = "dataset",
    follow: Callable[[Any], bool] = lambda value: True,
    inner: Callable[[str, Any], Iterable[tuple[str, Any]]] = inner_parts,
    most: int = _MOST_PARTS,
    levels: int = _MOST_LEVELS,
) -> Iterator[tuple[str, Any]]:
    """Yield the values in an object's attributes, lists, tuples and dicts, to some depth, with names such as ``dataset.size``.

    Args:
        follow: whether to look into a value. It is asked after the value was yielded.
        inner: returns the parts of a value, with their names.
        most: yield no more values. levels: look no deeper.
    """
    seen, waiting = set(), deque([(name, value, 0)])
    for _ in range(most):
        if not waiting:
            return
        name, value, level = waiting.popleft()
        yield name, value
        if level < levels and id(value) not in seen:
            seen.add(id(value))
            if follow(value):
                waiting.extend((key, item, level + 1) for key, item in inner(name, value))


def attribute_in(name: str) -> str | None:
    """Return the attribute of the dataset in the name of one of its parts; None for an entry of a dataset that is a list."""
    found = re.match(r"dataset\.(\w+)", name)
    return found and found[1]


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

    def __init__(self, own: Iterable[object], global_too: bool = True) -> None:
        self._own = list(own)
        self._before, self._own_before = read() if global_too else {}, list(map(read_generator, self._own))

    def now(self) -> tuple[Any, ...]:
        """Return the states now, to compare them."""
        return read(self._before), list(map(read_generator, self._own))

    def drawn(self) -> bool:
        """Whether a generator has been drawn from."""
        return self.now() != (self._before, self._own_before)

    def restore(self) -> None:
        """Set the generators back."""
        now = read(self._before)
        restore_all({number: state for number, state in self._before.items() if state != now[number]})
        for each, state in zip(self._own, self._own_before, strict=True):
            restore_generator(each, state)

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def own_generators(dataset: object) -> list[Any]:
    """Return the generators that a dataset holds."""
    return [part for _, part in parts_of(dataset) if is_generator(part)]


def is_generator(value: object) -> bool:
    """Whether a value is a generator whose state can be read: not one of the system's numbers."""
    return _is_generator_class(type(value))  # type: ignore[arg-type]


@functools.lru_cache(4096)  # torch's check of a class takes 1 us
def _is_generator_class(cls: type) -> bool:
    return issubclass(cls, GENERATOR_TYPES) and not issubclass(cls, random.SystemRandom)


def global_generators() -> list[Any]:
    """Return the generators that are global variables of the user's modules."""
    modules = [module for name, module in list(sys.modules.items()) if not _is_library(name.partition(".")[0])]
    names = [vars(module) for module in modules if isinstance(module, ModuleType)]
    return [value for each in names for value in list(each.values()) if is_generator(value)]


@functools.lru_cache(4096)
def _is_library(name: str) -> bool:
    """Whether a package or module belongs to a library or to Python."""
    path = getattr(sys.modules.get(name), "__file__", None)
    return is_of_library(path) if path else name in sys.stdlib_module_names
