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
import math
import pickle
import struct
from collections.abc import Callable, Iterator
from ctypes import memmove
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from torch import Tensor

from stocache.containers import Container, split
from stocache.errors import SampleError, SegmentError
from stocache.structure import array_bytes, check_dtype, check_exact, tensor_bytes

Skeleton: TypeAlias = tuple[Any, ...]

HEAD = struct.Struct("<QII")
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_ALIGNMENTS = (8, 4, 2, 1)  # of the streams, by number
_BYTES = 3  # the stream of what needs no alignment

_NUMBERS: dict[type, tuple[str, int]] = {int: ("<i8", 0), float: ("<f8", 0), complex: ("<c16", 0), bool: ("?", _BYTES)}
_NUMBER_CODECS = {int: struct.Struct("<q"), float: struct.Struct("<d"), complex: struct.Struct("<dd"), bool: struct.Struct("?")}
_NUMBER_TYPES = {cls.__name__: cls for cls in _NUMBERS}

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
        if cls in _NUMBERS:
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
        return "in", container.kind, _name(container.cls, where), container.keys, container.extra, children

    def _take_leaf(self, value: Any, where: str) -> Skeleton:
        if isinstance(value, Tensor):
            check_exact(value, Tensor, where)
            dtype = check_dtype(value.dtype)
            self._add(_stream(dtype.itemsize), tensor_bytes(value, where))
            self.integers += value.shape
            return "tensor", str(dtype).removeprefix("torch."), value.dim()
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            scalar = isinstance(value, np.generic)
            if not scalar:
                check_exact(value, np.ndarray, where)
            descr = _freeze(dtype_to_descr(value.dtype))
            if _thaw(descr) != value.dtype:
                raise SampleError(f"{where}: the dtype {value.dtype} cannot be written down. Use a plain one.")
            self._add(_array_stream(value.dtype), array_bytes(value))
            self.integers += value.shape
            return "scalar" if scalar else "array", descr, value.ndim
        if not self._allow_pickle:
            raise SampleError(
                f"{where}: a {type(value).__name__} has no bytes of its own. Turn it into tensors, arrays, numbers, str or "
                f"bytes, or pass allow_pickle=True."
            )
        try:
            return self._take_bytes("pickle", pickle.dumps(value, protocol=5))
        except Exception as error:  # whatever the class raises
            raise SampleError(f"{where}: a {type(value).__name__} cannot be pickled: {error}") from error

    def _take_number(self, value: Any) -> Skeleton:
        cls = type(value)
        if cls is int and not -(2**63) <= value < 2**63:
            return self._take_bytes("long", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        codec = _NUMBER_CODECS[cls]
        self._add(_NUMBERS[cls][1], codec.pack(value.real, value.imag) if cls is complex else codec.pack(value))
        return ("number", cls.__name__)

    def _take_bytes(self, kind: str, data: bytes) -> Skeleton:
        self._add(_BYTES, data)
        self.integers.append(len(data))
        return (kind,)

    def _take_sequence(self, values: Any, where: str) -> Skeleton:
        cls, types = type(values), set(map(type, values))
        if len(types) == 1 and (kind := types.pop()) in _NUMBERS:
            dtype, stream = _NUMBERS[kind]
            try:
                self._add(stream, np.array(values, dtype=dtype).view(np.uint8))
                self.integers.append(len(values))
                return "numbers", cls.__name__, kind.__name__
            except OverflowError:  # an int beyond 64 bits
                pass
        start = len(self.integers)
        children, ends = [], []
        for position, value in enumerate(values):
            children.append(self._take(value, f"{where}[{position}]"))
            ends.append(len(self.integers))
        kinds = sorted(set(children), key=repr)
        if cls is tuple and len(kinds) > 1:
            return "in", "tuple", "builtins:tuple", tuple(range(len(values))), (), tuple(children)
        if len(kinds) > 1:  # say before each item's integers of which kind it is
            for end, child in zip([start, *ends[:-1]][::-1], children[::-1], strict=True):
                self.integers.insert(end, kinds.index(child))
        self.integers.insert(start, len(values))
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


def _stream(alignment: int) -> int:
    return _ALIGNMENTS.index(min(alignment, 8)) if alignment in (1, 2, 4, 8, 16) else _BYTES


def _array_stream(dtype: np.dtype[Any]) -> int:
    return _BYTES if dtype.kind == "V" else _stream(dtype.alignment)  # records may have lost their alignment on the way


def _freeze(descr: Any) -> Any:
    return tuple(map(_freeze, descr)) if isinstance(descr, list | tuple) else descr


def write_skeleton(skeleton: Skeleton) -> bytes:
    """Return a skeleton as text.

    Raises:
        SampleError: a key of a mapping is no str, number, bool, bytes or None, or tuple of such.
    """
    text = repr(skeleton)
    try:
        good = repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError):
        good = False
    if not good:
        raise SampleError(f"sample: the keys of its mappings are not all str, numbers or tuples of such: {text:.300}")
    return text.encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------------------------------------------- reading


_DAMAGED = "the cache is damaged: a sample reaches beyond its record."


class Reader:
    """Where reading a record stands.

    Attributes:
        memory: the buffer the leaves are in.
        address: where it begins in memory.
        at: where each stream stands.
        end: where the leaves end.
        integers: the iterator over those that are left.
        copy: whether tensors and arrays are to be private copies; else views of ``memory``.
    """

    __slots__ = ("address", "at", "copy", "end", "integers", "memory")

    def __init__(self, memory: Any, address: int, at: list[int], end: int, integers: Iterator[int], copy: bool) -> None:
        self.memory, self.address, self.at, self.end, self.integers, self.copy = memory, address, at, end, integers, copy

    def take(self, stream: int, nbytes: int) -> int:
        """Return where the next ``nbytes`` of a stream are."""
        at = self.at[stream]
        after = self.at[stream] = at + nbytes
        if after > self.end:
            raise SegmentError(_DAMAGED)
        return at


_Read: TypeAlias = Callable[[Reader], Any]


def reader_of(text: bytes, allow_pickle: bool) -> Callable[[Any, int, int, int, tuple[int, ...], bool], Any]:
    """Return the function that reads samples of a skeleton: ``read(memory, address, start, nbytes, integers, copy)``.

    Raises:
        SegmentError: the text is no skeleton, or of classes that are not here or have changed; or something was pickled, and
            ``allow_pickle`` is False.
    """
    try:
        skeleton = ast.literal_eval(text.decode("utf-8", "surrogatepass"))
        streams = sorted(_streams(skeleton))
        read = _compile(skeleton, allow_pickle)
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, IndexError, ImportError) as error:
        raise SegmentError(f"the cache holds samples that cannot be read here: {error}. Skeleton: {text[:200]!r}") from error
    inner, last = streams[:-1], streams[-1] if streams else 0
    plan, join = _plan(skeleton)

    def read_record(memory: Any, address: int, start: int, nbytes: int, integers: tuple[int, ...], copy: bool) -> Any:
        at, end = [start] * len(_ALIGNMENTS), start + nbytes
        for length, stream in zip(integers, inner):  # noqa: B905  integers has more than these
            at[stream] = start
            start += length
        at[last] = start
        if not copy or not plan:
            return read(Reader(memory, address, at, end, iter(integers[len(inner) :]), copy))
        values, used = [], len(inner)
        for stream, new, dims, unpack, size in plan:
            here = at[stream]
            if unpack is None:
                value = new(*integers[used : used + dims]) if dims else new(())
                used += dims
                size = value.nbytes
                if here + size > end:
                    raise SegmentError(_DAMAGED)
                memmove(value.data_ptr(), address + here, size)
            else:
                (value,) = unpack(memory, here)
            at[stream] = here + size
            values.append(value)
        return join(values)

    return read_record


def _plan(skeleton: Skeleton) -> tuple[list[tuple[int, Any, int, Any, int]], Callable[[list[Any]], Any]]:
    """Return the leaves of one container of tensors and numbers, and what puts them together; no leaves for all else.

    Such samples, (image, label) and the like, are most there are, and reading them in one loop takes two thirds of the time.
    """
    if skeleton[0] != "in":
        return [], list
    _, kind, name, keys, extra, children = skeleton
    plan: list[tuple[int, Any, int, Any, int]] = []
    for child in children:
        if child[0] == "tensor":
            dtype = getattr(torch, child[1])
            plan.append((_stream(dtype.itemsize), torch.empty(0, dtype=dtype).new_empty, child[2], None, 0))
        elif child[0] == "number" and child[1] != "complex":
            codec = _NUMBER_CODECS[_NUMBER_TYPES[child[1]]]
            plan.append((_NUMBERS[_NUMBER_TYPES[child[1]]][1], None, 0, codec.unpack_from, codec.size))
        else:
            return [], list
    return plan, Container(kind, _class(name), keys, extra).joiner()


def _streams(skeleton: Skeleton) -> set[int]:
    """Return the streams that a skeleton has leaves in."""
    kind = skeleton[0]
    if kind == "in":
        return set().union(*map(_streams, skeleton[5]))
    if kind == "items":
        return set().union(*map(_streams, skeleton[2]))
    if kind == "tensor":
        return {_stream(getattr(torch, skeleton[1]).itemsize)}
    if kind in ("array", "scalar"):
        return {_array_stream(_thaw(skeleton[1]))}
    if kind in ("number", "numbers"):
        return {_NUMBERS[_NUMBER_TYPES[skeleton[-1]]][1]}
    return {_BYTES}


def _compile(skeleton: Skeleton, allow_pickle: bool) -> _Read:
    """Return the function that reads what a skeleton describes."""
    kind, *rest = skeleton
    if kind == "in":
        return _read_container(skeleton, allow_pickle)
    if kind == "items":
        return _read_items(list if rest[0] == "list" else tuple, [_compile(item, allow_pickle) for item in rest[1]])
    if kind == "tensor":
        return _read_tensor(getattr(torch, rest[0]), rest[1])
    if kind in ("array", "scalar"):
        return _read_array(_thaw(rest[0]), rest[1], kind == "scalar")
    if kind == "number":
        return _read_number(_NUMBER_TYPES[rest[0]])
    if kind == "numbers":
        return _read_numbers(list if rest[0] == "list" else tuple, *_NUMBERS[_NUMBER_TYPES[rest[1]]])
    if kind == "pickle" and not allow_pickle:
        raise ValueError("something in them was pickled, which needs allow_pickle=True")
    return _read_bytes(_FROM_BYTES[kind])


_FROM_BYTES: dict[str, Callable[[memoryview], Any]] = {
    "str": lambda data: str(data, "utf-8", "surrogatepass"),
    "bytes": bytes,
    "long": lambda data: int.from_bytes(data, "little", signed=True),
    "pickle": pickle.loads,
}


def _read_container(skeleton: Skeleton, allow_pickle: bool) -> _Read:
    _, kind, name, keys, extra, children = skeleton
    cls = _class(name)
    if kind == "namedtuple" and cls._fields != keys:
        raise ValueError(f"{name} had the fields {list(keys)}, it has {list(cls._fields)}")
    join, reads = Container(kind, cls, keys, extra).joiner(), [_compile(child, allow_pickle) for child in children]
    return lambda reader: join([read(reader) for read in reads])


def _read_items(cls: type, reads: list[_Read]) -> _Read:
    if len(reads) == 1:
        (read,) = reads
        return lambda reader: cls([read(reader) for _ in range(next(reader.integers))])
    return lambda reader: cls([reads[next(reader.integers)](reader) for _ in range(next(reader.integers))])


def _read_tensor(dtype: torch.dtype, dims: int) -> _Read:
    stream, size = _stream(dtype.itemsize), dtype.itemsize
    new = torch.empty(0, dtype=dtype).new_empty

    def read(reader: Reader) -> Tensor:
        shape = list(islice(reader.integers, dims))
        count = math.prod(shape)
        at = reader.take(stream, count * size)
        if not count:
            return new(shape)
        if reader.copy:
            value = new(shape)
            memmove(value.data_ptr(), reader.address + at, count * size)
            return value
        return torch.frombuffer(reader.memory, dtype=dtype, count=count, offset=at).view(shape)

    return read


def _read_array(dtype: np.dtype[Any], dims: int, scalar: bool) -> _Read:
    stream = _array_stream(dtype)

    def read(reader: Reader) -> Any:
        shape = list(islice(reader.integers, dims))
        count = math.prod(shape)
        at = reader.take(stream, count * dtype.itemsize)
        value: Any = np.ndarray(shape, dtype, reader.memory, at) if count * dtype.itemsize else np.empty(shape, dtype)
        if scalar:
            return value.copy()[()]
        return value.copy() if reader.copy else value

    return read


def _read_number(cls: type) -> _Read:
    codec, stream = _NUMBER_CODECS[cls], _NUMBERS[cls][1]
    unpack, size = codec.unpack_from, codec.size

    def read(reader: Reader) -> Any:
        numbers = unpack(reader.memory, reader.take(stream, size))
        return complex(*numbers) if cls is complex else numbers[0]

    return read


def _read_numbers(cls: type, dtype: str, stream: int) -> _Read:
    size = np.dtype(dtype).itemsize

    def read(reader: Reader) -> Any:
        count = next(reader.integers)
        values = np.frombuffer(reader.memory, dtype, count, reader.take(stream, count * size)).tolist()
        return values if cls is list else tuple(values)

    return read


def _read_bytes(make: Callable[[memoryview], Any]) -> _Read:
    def read(reader: Reader) -> Any:
        nbytes = next(reader.integers)
        at = reader.take(_BYTES, nbytes)
        return make(memoryview(reader.memory)[at : at + nbytes])

    return read


def _thaw(descr: Any) -> np.dtype[Any]:
    return descr_to_dtype(_lists(descr) if isinstance(descr, tuple) else descr)


def _lists(descr: Any) -> Any:
    """Undo `_freeze`: the fields of a record are a list of tuples, a subarray is a tuple."""
    if isinstance(descr, tuple) and descr and all(isinstance(field, tuple) for field in descr):
        return [(field[0], _lists(field[1]), *field[2:]) for field in descr]
    return descr


# ---------------------------------------------------------------------------------------------------- classes

_classes: dict[str, Any] = {}


def _name(cls: Any, where: str) -> str:
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


def _class(name: str) -> Any:
    if name not in _classes:
        _classes[name] = _find(name)
    return _classes[name]


def _find(name: str) -> Any:
    if name == "builtins:NoneType":
        return type(None)
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))
