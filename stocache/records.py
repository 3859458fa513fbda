"""Samples of any size as records: every leaf in its own bytes, and a skeleton that says what they make.

NOTE [ Records ]
    A record has three parts: a head, the bytes of the leaves, and integers.

    head       16 bytes: bytes of the leaves as stored; number of the skeleton; how many integers, how wide each is (1, 2, 4 or
               8 bytes, whatever the largest needs), and whether the leaves are compressed
    leaves     in four streams, first those whose values want to begin at a multiple of 8 bytes, then 4, 2, 1: so each lies
               where it can be used in place, without gaps
    integers   bytes of each stream but the last; then, in the order of the skeleton, what varies: shapes and lengths

    The skeleton has all that is the same for samples of one kind: containers, keys, types of leaves, dtypes, numbers of
    dimensions. It is kept once for all of them (see arena.py), as a nested tuple written as a Python literal. A list is told by
    the kinds of its items, however many there are, and a list of numbers is stored as an array.
"""

import ast
import functools
import importlib
import pickle
import struct
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from torch import Tensor

from stocache.containers import split
from stocache.errors import SampleError
from stocache.structure import NUMBER_CODECS, array_bytes, check_dtype, check_exact, tensor_bytes

Skeleton: TypeAlias = tuple[Any, ...]

HEAD = struct.Struct("<QII")
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
ALIGNMENTS = (8, 4, 2, 1)  # of the streams, by number
BYTES = 3  # the stream of what needs no alignment

NUMBERS: dict[type, tuple[str, int]] = {int: ("<i8", 0), float: ("<f8", 0), complex: ("<c16", 0), bool: ("?", BYTES)}
NUMBER_TYPES = {cls.__name__: cls for cls in NUMBERS}

# ---------------------------------------------------------------------------------------------------- writing


class Record:
    """A sample taken apart.

    Attributes:
        skeleton: what it is, but for sizes and values.
        streams: the buffers of its leaves.
        integers: shapes and lengths.

    Raises:
        SampleError: a leaf is of a type that has no bytes of its own, and ``allow_pickle`` is False; or would not come back the
            same: on a GPU, with a gradient.
    """

    def __init__(self, sample: Any, where: str = "sample", allow_pickle: bool = False) -> None:
        self.streams: tuple[list[Any], ...] = ([], [], [], [])
        self.integers: list[int] = []
        self._allow_pickle = allow_pickle
        self.skeleton = self._take(sample, where)

    def pack(self) -> tuple[bytes, list[int]]:
        """Return the bytes of the leaves, and all integers."""
        parts = [b"".join(stream) for stream in self.streams if stream]
        return b"".join(parts), [*map(len, parts[:-1]), *self.integers]

    def _take(self, value: Any, where: str) -> Skeleton:
        """Add a value, and return its skeleton."""
        cls = type(value)
        if cls in NUMBERS:
            return self._take_number(value)
        if cls is str:
            return self._take_bytes("str", value.encode("utf-8", "surrogatepass"))
        if cls is bytes:
            return self._take_bytes("bytes", value)
        if (cls is list or cls is tuple) and value:
            return self._take_sequence(value, where)
        parted = None if cls is Tensor or cls is np.ndarray or isinstance(value, np.generic) else split(value)
        if parted is None:
            return self._take_leaf(value, where)
        container, parts = parted
        children = tuple(self._take(part, f"{where}[{key!r}]") for key, part in zip(container.keys, parts, strict=True))
        return "in", container.kind, name_of(container.cls, where), container.keys, container.extra, children

    def _take_leaf(self, value: Any, where: str) -> Skeleton:
        if isinstance(value, Tensor):
            check_exact(value, Tensor, where)
            dtype = check_dtype(value.dtype)
            self._add(stream_of(dtype.itemsize), tensor_bytes(value, where))
            self.integers += value.shape
            return "tensor", str(dtype).removeprefix("torch."), value.dim()
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            descr = array_descr(value, where)
            self._add(array_stream(value.dtype), array_bytes(value))
            self.integers += value.shape
            return "scalar" if isinstance(value, np.generic) else "array", descr, value.ndim
        return self._take_bytes("pickle", pickled(value, where, self._allow_pickle))

    def _take_number(self, value: Any) -> Skeleton:
        cls = type(value)
        if cls is int and not -(2**63) <= value < 2**63:
            return self._take_bytes("long", long_bytes(value))
        self._add(NUMBERS[cls][1], number_bytes(value))
        return ("number", cls.__name__)

    def _take_bytes(self, kind: str, data: bytes) -> Skeleton:
        self._add(BYTES, data)
        self.integers.append(len(data))
        return (kind,)

    def _take_sequence(self, values: Any, where: str) -> Skeleton:
        cls, types = type(values), set(map(type, values))
        if len(types) == 1 and (kind := types.pop()) in NUMBERS:
            dtype, stream = NUMBERS[kind]
            try:
                self._add(stream, np.array(values, dtype=dtype).view(np.uint8))
                self.integers.append(len(values))
                return "numbers", cls.__name__, kind.__name__
            except OverflowError:  # an int beyond 64 bits
                pass
        outer, items = self.integers, []
        for position, value in enumerate(values):
            self.integers = []
            items.append((self._take(value, f"{where}[{position}]"), self.integers))
        self.integers = outer
        kinds = sorted({skeleton for skeleton, _ in items}, key=repr)
        if cls is tuple and len(kinds) > 1:
            for _, own in items:
                self.integers += own
            children = tuple(skeleton for skeleton, _ in items)
            return "in", "tuple", "builtins:tuple", tuple(range(len(values))), (), children
        self.integers.append(len(values))
        for skeleton, own in items:  # of several kinds, each item says of which it is
            self.integers += own if len(kinds) == 1 else [kinds.index(skeleton), *own]
        return "items", cls.__name__, tuple(kinds)

    def _add(self, stream: int, buffer: Any) -> None:
        self.streams[stream].append(buffer)


def pack_integers(integers: list[int]) -> tuple[bytes, int]:
    """Return integers in bytes, and for the head how many there are and how wide."""
    largest = max(integers, default=0)
    code = next(code for code, width in enumerate(_WIDTHS) if largest < 1 << 8 * width)
    packed = len(integers) << 3 | code
    return integers_codec(packed).pack(*integers), packed


@functools.lru_cache(maxsize=4096)
def integers_codec(packed: int) -> struct.Struct:
    """Return the layout of integers, given what the head says of them."""
    return struct.Struct(f"<{packed >> 3}{list(_WIDTHS.values())[packed & 3]}")


def stream_of(alignment: int) -> int:
    """Return the stream of values that want to begin at a multiple of so many bytes."""
    return ALIGNMENTS.index(min(alignment, 8)) if alignment in (1, 2, 4, 8, 16) else BYTES


def array_stream(dtype: np.dtype[Any]) -> int:
    """Return the stream of the values of a numpy array."""
    return BYTES if dtype.kind == "V" else stream_of(dtype.alignment)  # records may have lost their alignment on the way


def freeze(descr: Any) -> Any:
    """Return a dtype's description without lists, which could not be hashed."""
    return tuple(map(freeze, descr)) if isinstance(descr, list | tuple) else descr


def array_descr(value: Any, where: str) -> Any:
    """Return what names the dtype of a numpy array or scalar.

    Raises:
        SampleError: it would not come back the same.
    """
    if isinstance(value, np.ndarray):
        check_exact(value, np.ndarray, where)
    descr = freeze(dtype_to_descr(value.dtype))
    if thaw(descr) != value.dtype:
        raise SampleError(f"{where}: the dtype {value.dtype} cannot be written down. Use a plain one.")
    return descr


def number_bytes(value: Any) -> bytes:
    """Return the bytes of an int of 64 bits, a float, bool or complex."""
    codec = NUMBER_CODECS[type(value)]
    return codec.pack(value.real, value.imag) if isinstance(value, complex) else codec.pack(value)


def long_bytes(value: int) -> bytes:
    """Return the bytes of an int of any size."""
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def pickled(value: Any, where: str, allowed: bool, problem: str = "has no bytes of its own") -> bytes:
    """Return the pickle of a value, whose ``problem`` is why it cannot be stored otherwise.

    Raises:
        SampleError: it has none, or that is not ``allowed``.
    """
    if not allowed:
        raise SampleError(
            f"{where}: a {type(value).__name__} {problem}. Turn it into tensors, arrays, numbers, str or bytes, or pass "
            f"allow_pickle=True."
        )
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever the class raises
        raise SampleError(f"{where}: a {type(value).__name__} cannot be pickled: {error}") from error


def parse_skeleton(text: str) -> Any:
    """Return what a skeleton's text says. Raises ValueError or SyntaxError."""
    try:
        return ast.literal_eval(text)
    except SystemError:  # python/cpython#106905: something was parsed meanwhile, by a finalizer or another thread
        return ast.literal_eval(text)


def write_skeleton(skeleton: Skeleton) -> bytes:
    """Return a skeleton as text.

    Raises:
        SampleError: a key of a mapping is no str, number, bool, bytes or None, or tuple of such.
    """
    text = repr(skeleton)
    try:
        good = repr(parse_skeleton(text)) == text
    except (ValueError, SyntaxError):
        good = False
    if not good:
        raise SampleError(f"sample: the keys of its mappings are not all str, numbers or tuples of such: {text:.300}")
    return text.encode("utf-8", "surrogatepass")


def thaw(descr: Any) -> np.dtype[Any]:
    """Return the numpy dtype that a skeleton names."""
    return descr_to_dtype(_lists(descr) if isinstance(descr, tuple) else descr)


def _lists(descr: Any) -> Any:
    """Undo `freeze`: the fields of a record are a list of tuples, a subarray is a tuple."""
    if isinstance(descr, tuple) and descr and all(isinstance(field, tuple) for field in descr):
        return [(field[0], _lists(field[1]), *field[2:]) for field in descr]
    return descr


# ---------------------------------------------------------------------------------------------------- classes

_classes: dict[str, Any] = {}


def name_of(cls: Any, where: str) -> str:
    """Return the name by which every process finds a class.

    Raises:
        SampleError: there is none: it was defined within a function, or replaced.
    """
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__  # what spawn calls the script in a child
    name = f"{module}:{cls.__qualname__}"
    if _classes.get(name) is not cls:
        try:
            found = _find(name)
        except (ImportError, AttributeError):
            found = None
        if found is not cls:
            raise SampleError(f"{where}: other processes do not find {name}. Define it at the top of a module.")
        _classes[name] = cls
    return name


def class_of(name: str) -> Any:
    """Return the class that a skeleton names; imports its module, as pickle would, but calls nothing in it."""
    if name not in _classes:
        _classes[name] = _find(name)
    return _classes[name]


def _find(name: str) -> Any:
    if name == "builtins:NoneType":
        return type(None)
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))
