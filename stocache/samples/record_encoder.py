"""Samples of any size as records: every leaf in its own bytes, and a skeleton that says what they make.

NOTE [ Records ]
    A record has three parts: a head, the bytes of the leaves, and integers.

    head       16 bytes: bytes of the leaves as stored; number of the skeleton; how many integers, how wide each is (1, 2, 4 or
               8 bytes, whatever the largest needs), and whether the leaves are compressed
    leaves     in four streams, first those whose values want to begin at a multiple of 8 bytes, then 4, 2, 1: so each lies
               where it can be used in place, without gaps
    integers   bytes of each stream but the last; then, in the order of the skeleton, what varies: shapes and lengths

    The skeleton has all that is the same for samples of one kind: containers, keys, types of leaves, dtypes, numbers of
    dimensions, and their order where it is not that of C (then shapes are stored as the values lie in memory). It is kept once
    for all of them (see arena.py), as a nested tuple written as a Python literal. A list is told by the kinds of its items,
    however many there are, and a list of numbers is stored as an array. Keys are written as they are where all are str, int,
    bytes or None; else with their types, and enum members by class and name. The name of an enum member that is a value is in
    its bytes: a skeleton holds for all members.

NOTE [ Items without bytes ]
    A list of None, or of empty dicts, has a length and nothing else, so a forged length would make objects without end. So what
    a list may make is bounded by the bytes it comes from: each item makes so many *bare* nodes (containers, and values of no
    bytes and no sizes), and all lists of a record may make as many as `BARE_NODES` and one for each byte and integer in it.
    Where a sample has more, zeros are put behind its leaves. Blocks count in the same way (see NOTE [ Columns ]).
"""

import ast
import functools
import math
import pickle
import struct
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.format import dtype_to_descr
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.kinds import KIND_NAMES, KINDS, Unfit, a, long_bytes, member_name, name_of
from stocache.samples.pytree import DEEP, Container, split, told
from stocache.samples.spec import NUMBER_CODECS, array_bytes, array_order_of, check_exact, order_of, tensor_bytes
from stocache.samples.type_lookup import (
    FACTORIES,
    TORCH_DTYPES,
    Unresolved,
    check_class,
    check_image,
    enum_class,
    factory_of,
    member_of,
    numpy_dtype,
)

Skeleton: TypeAlias = tuple[Any, ...]

HEAD = struct.Struct("<QII")
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
ALIGNMENTS = (8, 4, 2, 1)  # of the streams, by number
BYTES = 3  # the stream of what needs no alignment

NUMBERS: dict[type, tuple[str, int]] = {int: ("<i8", 0), float: ("<f8", 0), complex: ("<c16", 0), bool: ("?", BYTES)}
NUMBER_TYPES = {cls.__name__: cls for cls in NUMBERS}

BARE_NODES = 1 << 16
"""See NOTE [ Items without bytes ]."""

# ---------------------------------------------------------------------------------------------------- writing


class Record:
    """A sample taken apart.

    Attributes:
        skeleton: what it is, but for sizes and values.
        streams: the buffers of its leaves.
        integers: shapes and lengths.

    Raises:
        SampleError: a part has no bytes of its own, and ``allow_pickle`` is False or it does not pickle; or it would not come
            back the same: on a GPU, with a gradient.
    """

    def __init__(self, sample: Any, where: str = "sample", allow_pickle: bool = False) -> None:
        self.streams: tuple[list[Any], ...] = ([], [], [], [])
        self.integers: list[int] = []
        self._allow_pickle, self._bare = allow_pickle, 0
        try:
            self.skeleton = self._take(sample, 0)
        except Unfit as error:
            raise told(error, where, pickles=not allow_pickle) from error.__cause__

    def pack(self) -> tuple[bytes, list[int]]:
        """Return the bytes of the leaves, and all integers."""
        parts = [b"".join(stream) for stream in self.streams if stream]
        integers = [*map(len, parts[:-1]), *self.integers]
        if self._bare > BARE_NODES:  # see NOTE [ Items without bytes ]
            parts.append(bytes(max(0, self._bare - BARE_NODES - sum(map(len, parts)) - len(integers))))
        return b"".join(parts), integers

    def _take(self, value: Any, depth: int) -> Skeleton:
        """Add a value, and return its skeleton."""
        cls = type(value)
        if cls in NUMBERS:
            return self._take_number(value)
        if not self._allow_pickle:
            return self._take_parts(value, depth)
        before = [len(stream) for stream in self.streams], self.integers, len(self.integers)
        bare = self._bare
        try:
            return self._take_parts(value, depth)
        except Unfit as error:
            if error.final:
                raise
            try:
                data = pickled(value)
            except Unfit as failure:
                raise (error if error.steps else failure) from failure.__cause__
        lengths, self.integers, count = before
        for stream, length in zip(self.streams, lengths, strict=True):
            del stream[length:]
        del self.integers[count:]
        self._bare = bare
        return self._take_bytes("pickle", data)

    def _take_parts(self, value: Any, depth: int) -> Skeleton:
        cls = type(value)
        if cls in KIND_NAMES:
            return self._take_bytes(*kind_bytes(value))
        if (cls is list or cls is tuple) and value:
            return self._take_sequence(value, depth)
        if cls is Tensor or cls is np.ndarray or (parted := split(value)) is None:
            return self._take_leaf(value)
        if depth >= DEEP:
            raise too_deep()
        container, parts = parted
        name, keys, extra = name_of(container.cls), container.keys, literal_extra(container)
        check_container(container, name, extra, parts, self._allow_pickle)
        coded = None if set(map(type, keys)) <= _PLAIN else tuple(map(_coded, keys))
        children = []
        for key, part in zip(keys, parts, strict=True):
            try:
                children.append(self._take(part, depth + 1))
            except Unfit as error:
                raise error.within(container, key) from error.__cause__
        if coded is None:
            return "in", container.kind, name, keys, extra, tuple(children)
        return "in", container.kind, name, coded, extra, tuple(children), "coded"

    def _take_leaf(self, value: Any) -> Skeleton:
        if isinstance(value, Enum):
            name, data = member_bytes(value)
            return (*self._take_bytes("enum", data), name)
        skeleton, stream, data, shape = dense_leaf(value)
        self._add(stream, data)
        self.integers += shape
        return skeleton

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

    def _take_sequence(self, values: Any, depth: int) -> Skeleton:
        cls, types = type(values), set(map(type, values))
        if len(types) == 1 and (kind := types.pop()) in NUMBERS:
            dtype, stream = NUMBERS[kind]
            try:
                self._add(stream, np.array(values, dtype=dtype).view(np.uint8))
                self.integers.append(len(values))
                return "numbers", cls.__name__, kind.__name__
            except OverflowError:  # an int beyond 64 bits
                pass
        if depth >= DEEP:
            raise too_deep()
        outer, items = self.integers, []
        for position, value in enumerate(values):
            self.integers = []
            try:
                items.append((self._take(value, depth + 1), self.integers))
            except Unfit as error:
                raise error.within(Container(cls.__name__, cls, ()), position) from error.__cause__
        self.integers = outer
        kinds = sorted({skeleton for skeleton, _ in items}, key=repr)
        if cls is tuple and len(kinds) > 1:
            for _, own in items:
                self.integers += own
            children = tuple(skeleton for skeleton, _ in items)
            return "in", "tuple", "builtins:tuple", tuple(range(len(values))), (), children
        self.integers.append(len(values))
        self._bare += len(values) * max(map(bare_nodes, kinds))
        for skeleton, own in items:  # of several kinds, each item says of which it is
            self.integers += own if len(kinds) == 1 else [kinds.index(skeleton), *own]
        return "items", cls.__name__, tuple(kinds)

    def _add(self, stream: int, buffer: Any) -> None:
        self.streams[stream].append(buffer)


class PackedRecord(NamedTuple):
    """A sample as plain bytes and numbers, to send and to compare: its skeleton, the bytes of its leaves, and all integers."""

    skeleton: bytes
    data: bytes
    integers: list[int]

    @property
    def has_pickles(self) -> bool:
        """Whether a part is a pickle. Equal objects may have different ones."""
        return b"'pickle'" in self.skeleton


def pack_sample(sample: Any, where: str = "sample") -> PackedRecord:
    """Return a sample as a packed record, pickled where it cannot be otherwise. Raises SampleError as `Record`."""
    record = Record(sample, where, allow_pickle=True)
    return PackedRecord(write_skeleton(record.skeleton), *record.pack())


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


def check_container(container: Container, name: str, extra: Any, parts: Any, allow_pickle: bool) -> None:
    """Raise Unfit unless a container can be put together again where its class is only looked up."""
    if container.cls in _PLAIN_CONTAINERS:
        return
    try:
        check_class(container.kind, container.cls, name, container.keys, extra)
        if container.kind == "image":
            check_image(parts)
    except (Unresolved, ValueError, TypeError) as error:
        raise Unfit(f"is a {container.cls.__name__}, which could not be put together again: {str(error).rstrip('.')}") from None
    if container.kind == "defaultdict" and not allow_pickle and extra[0] is not None and extra[0] not in FACTORIES:
        raise Unfit(
            f"has the default_factory {extra[0]}, and only those of Python's own types are called when it is read",
            "Use one of them",
        )


_PLAIN_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, type(None)})


@functools.lru_cache(maxsize=1024)
def bare_nodes(skeleton: Skeleton) -> int:
    """Return how many bare nodes a value of a skeleton has, outside of lists in it; see NOTE [ Items without bytes ]."""
    kind = skeleton[0]
    if kind == "in":
        return 1 + sum(map(bare_nodes, skeleton[5]))
    if kind == "tensor":
        return int(skeleton[2] == 0 and not TORCH_DTYPES[skeleton[1]].itemsize)
    if kind in ("array", "scalar"):
        return int(skeleton[2] == 0 and not dtype_from_key(skeleton[1]).itemsize)
    return 0


def dtype_to_key(descr: Any) -> Any:
    """Return a dtype's description without lists, which could not be hashed."""
    return tuple(map(dtype_to_key, descr)) if isinstance(descr, list | tuple) else descr


def dense_leaf(value: Any) -> tuple[Skeleton, int, Any, tuple[int, ...]]:
    """Return what a tensor, numpy array or scalar is, the stream it belongs to, its bytes, and its shape as they lie.

    Raises:
        Unfit: it is something else, or would not come back the same.
    """
    if isinstance(value, Tensor):
        check_exact(value, Tensor)
        order = order_of(value)
        if order is not None:
            value = value.permute(order)
        data = tensor_bytes(value)
        dtype, dims, name = value.dtype, value.dim(), str(value.dtype).removeprefix("torch.")
        if name not in TORCH_DTYPES:
            raise Unfit(f"is of {dtype}, which could not be read back", "Convert it first")
        skeleton = ("tensor", name, dims, *(() if order is None else (order,)))
        return skeleton, stream_of(dtype.itemsize), data, tuple(value.shape)
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return ("scalar", _descr(value.dtype), value.ndim), array_stream(value.dtype), array_bytes(value), value.shape
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        check_exact(value, np.ndarray)
        descr, order = _descr(value.dtype), array_order_of(value)
        if order is not None:
            value = value.transpose(order)
        skeleton = ("array", descr, value.ndim, *(() if order is None else (order,)))
        return skeleton, array_stream(value.dtype), array_bytes(value), value.shape
    raise no_bytes(value)


@functools.lru_cache(maxsize=1024)
def _descr(dtype: np.dtype[Any]) -> Any:
    """Return what names a dtype.

    Raises:
        Unfit: it would not come back the same.
    """
    try:
        descr = dtype_to_key(dtype_to_descr(dtype))
        same = dtype_from_key(descr) == dtype
    except Exception:  # whatever numpy's and others' dtypes raise
        same = False
    if not same:
        raise Unfit(f"has the dtype {dtype}, which cannot be written down", "Use a plain one")
    return descr


def number_bytes(value: Any) -> bytes:
    """Return the bytes of an int of 64 bits, a float, bool or complex."""
    codec = NUMBER_CODECS[type(value)]
    return codec.pack(value.real, value.imag) if isinstance(value, complex) else codec.pack(value)


def kind_bytes(value: Any) -> tuple[str, bytes]:
    """Return the kind of a value that is of one of `kinds.KINDS`, and its bytes.

    Raises:
        Unfit: it would not come back the same.
    """
    name = KIND_NAMES[type(value)]
    data = KINDS[name].to_bytes(value)
    if data is None:
        raise no_bytes(value)
    return name, data


def member_bytes(member: Any) -> tuple[str, bytes]:
    """Return the name of the class of an enum member, and its own name as bytes.

    Raises:
        Unfit: they do not lead back to it.
    """
    name = member_name(member)
    if name is None:
        raise no_bytes(member)
    return name_of(type(member)), name.encode()


def no_bytes(value: Any) -> Unfit:
    """Return the error of a value that is not of any kind that can be stored."""
    return Unfit(f"is {a(value)}, which has no bytes of its own", "Turn it into tensors, arrays, numbers, str or bytes")


def too_deep() -> Unfit:
    """Return the error of a container that is within too many others."""
    return Unfit(f"is a container within {DEEP} others, which is the limit", "Use fewer levels")


def pickled(value: Any) -> bytes:
    """Return the pickle of a value. Raises Unfit where it has none."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever the class raises
        raise Unfit(f"is {a(value)}, which cannot be pickled: {error}") from error


# ---------------------------------------------------------------------------------------------------- keys and extras

_PLAIN = {str, int, bytes, type(None)}  # keys that are written as they are; of others the type is told: True and 1.0 equal 1
_CODED: dict[type, Callable[[Any], Any]] = {
    str: str,
    int: int,
    bytes: bytes,
    type(None): str,
    bool: bool,
    float: float.hex,
    complex: str,
}
_DECODED: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "int": int,
    "bytes": bytes,
    "bool": bool,
    "float": float.fromhex,
    "complex": complex,
}


def check_key(key: Any) -> None:
    """Raise Unfit unless a key of a container can be written down."""
    if type(key) is tuple:
        for part in key:
            check_key(part)
    elif isinstance(key, Enum):
        member_bytes(key)
    elif type(key) not in _CODED:
        raise Unfit(f"has a key, {key!r:.100}, that is not a str, number, enum member or tuple of such", "Use others")


def _coded(key: Any) -> Any:
    """Return what tells a key, and its type, in a literal."""
    check_key(key)
    if type(key) is tuple:
        return "tuple", tuple(map(_coded, key))
    if isinstance(key, Enum):
        name, data = member_bytes(key)
        return "enum", name, data.decode()
    return type(key).__name__, _CODED[type(key)](key)


def decoded(code: Any, trusted: bool = False) -> Any:
    """Return the key of a code; ``trusted`` as in `type_lookup.resolve`.

    Raises:
        KeyError, ValueError, TypeError: it is not a code.
        Unresolved: its class is not here.
    """
    kind, value, *rest = code
    if kind == "tuple":
        return tuple(decoded(part, trusted) for part in value)
    if kind == "enum":
        return member_of(enum_class(value, trusted), *rest)
    return None if kind == "NoneType" else _DECODED[kind](value)


def check_plain_keys(keys: Any) -> tuple[Any, ...]:
    """Return keys that are written as they are. Raises ValueError where they are not such."""
    if type(keys) is not tuple or not set(map(type, keys)) <= _PLAIN:
        raise ValueError(f"{keys!r:.80} are not keys")
    return keys


def literal_extra(container: Container) -> tuple[Any, ...]:
    """Return the extra of a container with names in place of functions. Raises Unfit where one has no name."""
    if container.kind != "defaultdict":
        return container.extra
    return tuple(None if factory is None else name_of(factory) for factory in container.extra)


def read_extra(kind: str, extra: Any, trusted: bool = False) -> tuple[Any, ...]:
    """Undo `literal_extra`; ``trusted`` as in `type_lookup.resolve`.

    Raises:
        Unresolved: a name is not here, or not allowed.
    """
    if kind != "defaultdict":
        return tuple(extra)
    (name,) = extra
    return (factory_of(name, trusted),)


# ---------------------------------------------------------------------------------------------------- skeletons


def parse_skeleton(text: str) -> Any:
    """Return what a skeleton's text says. Raises ValueError, SyntaxError, RecursionError or MemoryError (of the parser)."""
    try:
        return ast.literal_eval(text)
    except SystemError:  # python/cpython#106905: something was parsed meanwhile, by a finalizer or another thread
        return ast.literal_eval(text)


@functools.lru_cache(maxsize=1024)
def write_skeleton(skeleton: Skeleton) -> bytes:
    """Return a skeleton as text.

    Raises:
        SampleError: what it says cannot be read again: a container's own attributes are not literals.
    """
    text = ""
    try:
        text = repr(skeleton)
        good = repr(parse_skeleton(text)) == text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        good = False
    if not good:
        raise SampleError(f"sample: what its containers are cannot be written down: {text:.300}")
    return text.encode("utf-8", "surrogatepass")


def dtype_from_key(descr: Any) -> np.dtype[Any]:
    """Return the numpy dtype that a skeleton names. Raises ValueError as `type_lookup.numpy_dtype`."""
    return _thawed(descr) if type(descr) is str else numpy_dtype(descr)


def empty_array(shape: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array that has no bytes: of no values, or of a dtype of none.

    `numpy.empty` would allocate one value all the same, of whatever size the dtype claims.

    Raises:
        ValueError: its sizes are too large.
    """
    if dtype.kind not in "SU" or dtype.itemsize:
        return np.ndarray(shape, dtype, bytearray())
    if math.prod(shape) > BARE_NODES:  # numpy makes one character of none
        raise ValueError(f"an array of shape {list(shape)} has no bytes")
    return np.zeros(shape, dtype)


_thawed = functools.lru_cache(maxsize=1024)(numpy_dtype)
