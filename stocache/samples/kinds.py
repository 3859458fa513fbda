"""Describe the kinds of leaves: each class turns values of one kind into bytes, and reads them from records and columns.

NOTE [ Kinds of leaves ]
    A leaf is a part of a sample that has no parts. An object of a class below describes leaves that are alike: tensors of one
    dtype, number of dimensions and order of these. Records and blocks write the same facts:

        record   ("tensor", "float32", 2)                                         in a treedef, see NOTE [ Records ]
        block    {"kind": "tensor", "dtype": "float32", "shape": [3, 4], ...}     in a structure, see NOTE [ Columns ]

    A tensor or array that is made of small integers is stored as these where that is asked for, only in records:
    ("narrow", ("tensor", "float32", 2), ...), see NOTE [ Narrow values ].

    To add a kind, write a class, and list it in `_ALL`. A value that has a text needs only a row in texts.py.
"""

import functools
import math
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from io import BytesIO
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.lib.format import dtype_to_descr
from torch import Tensor

from stocache.samples.narrow import Narrowing, find
from stocache.samples.spec import (
    BARE_NODES,
    NUMBER_CODECS,
    DimOrder,
    Make,
    array_bytes,
    array_dim_order_of,
    array_maker,
    check_exact,
    dim_order_of,
    inverse,
    number_maker,
    numpy_dtype_of,
    pack_number,
    scalar_maker,
    tensor_bytes,
    tensor_maker,
)
from stocache.samples.texts import TEXT_NAMES, TEXTS
from stocache.samples.type_lookup import (
    TORCH_DTYPES,
    Unfit,
    Unresolved,
    a,
    check_dims,
    enum_class,
    member_name,
    member_of,
    name_of,
    numpy_dtype,
    torch_dtype,
)
from stocache.system.objects import is_decoder

Description: TypeAlias = tuple[Any, ...]
"""The name of a kind, and the facts that its constructor takes."""

Encoded: TypeAlias = tuple[Description, int, Any, tuple[int, ...]]
"""A leaf: its description, the stream of its bytes in a record, its bytes, and its shape as they lie."""

Write: TypeAlias = Callable[[Any, "Leaves"], None]
"""Takes a value of one structure, and adds its leaves. Raises Differs or Unfit where the value is not of that structure."""

ALIGNMENTS = (8, 4, 2, 1)  # of the streams of a record, by number
BYTES = 3  # the stream of values that need no alignment

DAMAGED_RECORD = "the cache is damaged: a sample reaches beyond its record."

_KNOWN = {  # to safetensors, in all its versions
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class Differs(Exception):
    """A value is not of the structure that a `Write` was made for."""


class Leaves:
    """The state of writing one record.

    Attributes:
        streams: the buffers of the leaves, which may be the memory of the sample.
        integers: shapes and lengths.
        bare: bare nodes in lists; see NOTE [ Items without bytes ].
    """

    __slots__ = ("bare", "integers", "streams")

    def __init__(self) -> None:
        self.streams: tuple[list[Any], ...] = ([], [], [], [])
        self.integers: list[int] = []
        self.bare = 0

    def pack(self) -> tuple[bytes, list[int]]:
        """Return the bytes of the leaves, and all integers."""
        leaves, _, integers = self.parts()
        return b"".join(leaves), integers

    def parts(self) -> tuple[list[Any], int, list[int]]:
        """Return the buffers of the leaves, their bytes, and all integers."""
        leaves: list[Any] = []
        lengths = []
        for stream in self.streams:
            if stream:
                leaves += stream
                lengths.append(sum([len(part) if type(part) is bytes else part.nbytes for part in stream]))
        integers, nbytes = [*lengths[:-1], *self.integers], sum(lengths)
        if self.bare > BARE_NODES:  # see NOTE [ Items without bytes ]
            leaves.append(bytes(padding := max(0, self.bare - BARE_NODES - nbytes - len(integers))))
            nbytes += padding
        return leaves, nbytes, integers

    def lengths(self) -> tuple[list[int], int, int]:
        """Return the present lengths, for `cut`."""
        return list(map(len, self.streams)), len(self.integers), self.bare

    def cut(self, lengths: tuple[list[int], int, int]) -> None:
        """Drop everything that was added since ``lengths``."""
        streams, integers, self.bare = lengths
        for stream, length in zip(self.streams, streams, strict=True):
            del stream[length:]
        del self.integers[integers:]


Step: TypeAlias = tuple[int, int, int, Callable[..., Any]]
"""How a leaf is read from a record: its stream; how many sizes it has; bytes of one value; and a `Make`.

In place of the number of sizes: NUMBER, and the last is `struct.Struct.unpack_from` of one number; TEXT, one size, and the
last makes a value of its bytes; ITEMS, a list, and the last is the function that reads it.
"""

NUMBER, TEXT, ITEMS = -1, -2, -3


class Kind(ABC):
    """A kind of leaf, as its constructor's arguments describe it.

    Attributes:
        name: the name of the kind in records and blocks.
        types: its values are of these exact types,
        base: or of any subclass of this one.
        fields: the constructor's arguments as a block names them; "dims" is not written, "order" only where it is given.
        stream: the stream of a record that holds the bytes.
        itemsize: bytes of one value.
        dims: how many sizes a record holds for each leaf.
        writable: whether a value that is read from a column keeps the buffer, and the user may write to it.
        stored_as: the dtype of its column, and the dimensions that one value takes there.
        of_any_bytes: whether any bytes of the right number make a value.

    Constructors raise ValueError, TypeError or LookupError for arguments that describe nothing: they may be forged.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[type, ...]] = ()
    base: ClassVar[type | None] = None
    fields: ClassVar[tuple[str, ...]] = ()
    writable: ClassVar[bool] = False
    stream = BYTES
    itemsize = 1
    dims = 1
    stored_as: tuple[torch.dtype, tuple[int, ...]] = torch.uint8, ()
    of_any_bytes = True

    @classmethod
    @abstractmethod
    def encode(cls, value: object) -> Encoded:
        """Return a value, encoded. Raises Unfit where it would not come back the same."""

    def holds(self, value: object) -> bool:
        """Return whether `encode` is for values of this type. They may be of another kind all the same."""
        return type(value) in self.types

    def writer(self, description: Description) -> Write:
        """Return the function that adds a leaf to a record as `encode` returns it; ``description`` is that of the kind."""
        stream, holds, encode = self.stream, self.holds, self.encode

        def write(value: object, leaves: Leaves) -> None:
            if not holds(value):
                raise Differs
            its, _, data, shape = encode(value)
            if its != description:
                raise Differs
            leaves.streams[stream].append(data)
            leaves.integers.extend(shape)

        return write

    def step(self, trusted: bool) -> Step:
        """Return how a leaf is read from a record; ``trusted`` as in `type_lookup.resolve`. Raises Unresolved."""
        return self.stream, self.dims, self.itemsize, self.maker(trusted)

    @abstractmethod
    def maker(self, trusted: bool) -> Make:
        """Return the function that makes a leaf of a part of a column; ``trusted`` as in `type_lookup.resolve`.

        Raises:
            Unresolved: its class is not here, or may not be used.
        """

    def make_all(self, pieces: list[Any]) -> list[Any] | None:
        """Return the leaves of buffers, faster than one by one; None where there is no faster way. It may raise anything."""
        return None

    def bare(self, shape: tuple[int, ...]) -> int:
        """Return 1 where leaves of one shape have no bytes, else 0; see NOTE [ Items without bytes ]."""
        return int(not math.prod(shape) * self.itemsize)


def encode_pickle(value: object) -> Encoded:
    """Return a value, pickled. Raises Unfit where it does not pickle."""
    return _PickleKind.encode(value)


def kind_of(description: Description) -> Kind:
    """Return the kind of a leaf in a record. Raises ValueError, TypeError or LookupError where it is not one."""
    name, *facts = description
    return KINDS[name](*facts) if name in KINDS else _TextKind(name, *facts)


def kind_in(tree: dict[str, Any]) -> Kind:
    """Return the kind of a leaf in the structure of a block. Raises as `kind_of`."""
    return kind_of(description_in(tree))


def description_in(tree: dict[str, Any]) -> Description:
    """Return the description in a treedef of a leaf in a block's structure. Raises LookupError or TypeError for no leaf."""
    name = tree["kind"]
    facts = [
        tree[field] if field != "dims" else len(tree["shape"]) if "shape" in tree else tree["dims"]
        for field in (KINDS[name].fields if name in KINDS else ())
        if field != "order" or field in tree
    ]
    return (name, *map(_hashable, facts))


def encode_other(value: object) -> Encoded:
    """Return a leaf that is not of a type in `ENCODERS`, encoded.

    Raises:
        Unfit: it is not of any kind, or would not come back the same.
    """
    for base, kind in _BY_BASE.items():
        if isinstance(value, base):
            return kind.encode(value)
    raise decoder_error(value) if is_decoder(type(value)) else no_bytes(value)


def no_bytes(value: object) -> Unfit:
    """Return the error of a value that is not of any kind that can be stored."""
    return Unfit(
        f"is {a(value)}, which has no bytes of its own", "Turn it into tensors, arrays, numbers, str or bytes before the cache"
    )


def _stream_of(alignment: int) -> int:
    """Return the stream of values whose addresses should be multiples of ``alignment``."""
    return ALIGNMENTS.index(min(alignment, 8)) if alignment in (1, 2, 4, 8, 16) else BYTES


class _TensorKind(Kind):
    """Tensors of one dtype and number of dimensions, and one order of them; see NOTE [ Orders ]."""

    name, types, base = "tensor", (Tensor,), Tensor
    fields, writable = ("dtype", "dims", "order"), True

    def __init__(self, dtype: Any, dims: Any, order: Any = None) -> None:
        self._dtype, self.dims = torch_dtype(dtype), check_dims(dims)
        self.itemsize = self._dtype.itemsize
        self.stream = _stream_of(self.itemsize)
        self.stored_as = (self._dtype, ()) if self._dtype in _KNOWN else (torch.uint8, (self.itemsize,))
        self._back = None if order is None else inverse(order, dims)

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        check_exact(value, Tensor)
        order = dim_order_of(value)
        if order is not None:
            value = value.permute(order)
        data = tensor_bytes(value)
        dtype, dims, name = value.dtype, value.dim(), str(value.dtype).removeprefix("torch.")
        if name not in TORCH_DTYPES:
            raise Unfit(f"is of {dtype}, which could not be read back", "Convert it first")
        return ("tensor", name, dims, *_given(order)), _stream_of(dtype.itemsize), data, tuple(value.shape)

    def writer(self, description: Description) -> Write:
        rest, stream, dims = super().writer(description), self.stream, self.dims
        dtype = numpy_dtype_of(self._dtype)
        if dtype is None:
            return rest

        def write(value: object, leaves: Leaves) -> None:
            if type(value) is Tensor:
                try:
                    array = value.numpy()
                except (TypeError, RuntimeError):  # see tensor_bytes
                    return rest(value, leaves)
                if array.dtype == dtype and array.ndim == dims and array.flags.c_contiguous:
                    leaves.streams[stream].append(array)
                    leaves.integers.extend(array.shape)
                    return None
            return rest(value, leaves)

        return write if self._back is None else rest

    def maker(self, trusted: bool) -> Make:
        return tensor_maker(self._dtype, self._back)


def _given(order: DimOrder) -> tuple[DimOrder, ...]:
    return () if order is None else (order,)


class _ArrayKind(Kind):
    """Numpy arrays of one dtype and number of dimensions, and one order of them; see NOTE [ Orders ]."""

    name = "array"
    types: ClassVar[tuple[type, ...]] = (np.ndarray,)
    base = np.ndarray
    fields = ("dtype", "dims", "order")
    writable = True

    def __init__(self, dtype: Any, dims: Any, order: Any = None) -> None:
        self._dtype, self.dims = dtype_from_key(dtype), check_dims(dims)
        self.itemsize = self._dtype.itemsize
        self.stream, self.stored_as = _array_stream(self._dtype), _stored_as(self._dtype)
        self._back = None if order is None else inverse(order, dims)

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        if value.dtype.hasobject:
            raise no_bytes(value)
        if cls is _ArrayKind:
            check_exact(value, np.ndarray)
        key, order = _dtype_to_key(value.dtype), array_dim_order_of(value)
        if order is not None:
            value = value.transpose(order)
        return (cls.name, key, value.ndim, *_given(order)), _array_stream(value.dtype), array_bytes(value), value.shape

    def writer(self, description: Description) -> Write:
        rest, stream, dims, dtype = super().writer(description), self.stream, self.dims, self._dtype

        def write(value: object, leaves: Leaves) -> None:
            if type(value) is np.ndarray and value.dtype == dtype and value.ndim == dims and value.flags.c_contiguous:
                leaves.streams[stream].append(value)
                leaves.integers.extend(value.shape)
            else:
                rest(value, leaves)

        return write if self._back is None and dtype.kind in "biufc" else rest  # others need not be buffers

    def maker(self, trusted: bool) -> Make:
        return array_maker(self._dtype, self._back)


class _NarrowKind(Kind):
    """Tensors or arrays whose numbers are made of small integers, in records; see NOTE [ Narrow values ].

    Args:
        leaf: the description of the values themselves.
        last: the channels are the last dimension in memory, not the first.
        others: as in `Narrowing`.
    """

    name = "narrow"

    def __init__(self, leaf: Any, stored: Any, divisor: Any, factor: Any, mean: Any, std: Any, last: Any) -> None:
        self._kind = kind_of(leaf)
        dtype = _dtype_of(self._kind)
        if dtype is None or not all(type(number) in (int, float) and number for number in (divisor, factor, *std)):
            raise ValueError(f"{leaf!r:.80} does not hold numbers")
        if stored not in ("|u1", "<i2", "<u2") or len(mean) != len(std) or not all(type(number) is float for number in mean):
            raise ValueError(f"{stored!r:.20}, {mean!r:.80}: this is no way to make numbers")
        self._leaf, self._last, self.dims = leaf, bool(last), self._kind.dims
        self._narrowing = Narrowing(dtype.str, stored, divisor, factor, tuple(mean), tuple(std))
        self.itemsize = np.dtype(stored).itemsize
        self.stream = _stream_of(self.itemsize)

    @classmethod
    def encode(cls, value: object) -> Encoded:
        raise Unfit("is encoded as its values are")

    def _for(self, shape: Sequence[int]) -> Narrowing:
        """Return the steps for values of a shape. Raises Differs: it has no values, or other channels."""
        channels = len(self._narrowing.mean)
        if not math.prod(shape) or (channels > 1 and channels != shape[-1 if self._last else 0]):
            raise Differs(f"values of shape {list(shape)} are not made so")
        if channels < 2:  # one mean for all values, or none
            return self._narrowing
        return replace(self._narrowing, channels=channels, inner=1 if self._last else math.prod(shape[1:]))

    def writer(self, description: Description) -> Write:
        write_wide, stream, dtype = self._kind.writer(self._leaf), self._kind.stream, np.dtype(self._narrowing.wide)

        def write(value: object, leaves: Leaves) -> None:
            own = Leaves()
            write_wide(value, own)
            narrow = self._for(own.integers).narrow(np.frombuffer(own.streams[stream][0], dtype))
            if narrow is None:
                raise Differs
            leaves.streams[self.stream].append(narrow)
            leaves.integers.extend(own.integers)

        return write

    def maker(self, trusted: bool) -> Make:
        make_wide, wide, stored = self._kind.maker(trusted), np.dtype(self._narrowing.wide), np.dtype(self._narrowing.stored)

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Any:
            out = np.empty(count, wide)
            with np.errstate(all="ignore"):  # of forged numbers
                self._for(shape).widen(np.frombuffer(buffer, stored, count, at), out)
            return make_wide(out.data, 0, count, shape, False)

        return make


def _dtype_of(kind: Kind) -> "np.dtype[Any] | None":
    """Return numpy's dtype for tensors or arrays; None where it does not know it, or for another kind."""
    if type(kind) is _ArrayKind:
        return kind._dtype
    return numpy_dtype_of(kind._dtype) if type(kind) is _TensorKind else None


def narrowed(encoded: Encoded) -> Encoded:
    """Return a leaf as the integers that it is made of, if that is so."""
    description, _, data, shape = encoded
    dtype = _dtype_of(kind_of(description)) if description[0] in ("tensor", "array") else None
    if dtype is None or dtype.hasobject or not dtype.itemsize or not math.prod(shape):
        return encoded
    values = np.frombuffer(data, dtype)
    way = find([values], shape, for_all=False)
    if way is None:
        return encoded
    facts = way.stored, way.divisor, way.factor, way.mean, way.std, way.inner == 1
    return ("narrow", description, *facts), _stream_of(np.dtype(way.stored).itemsize), way.narrow(values), shape


class _ScalarKind(_ArrayKind):
    """Numpy scalars of one dtype."""

    name = "scalar"
    types = ()
    base = np.generic
    writable = False

    def __init__(self, dtype: Any, dims: Any) -> None:
        super().__init__(dtype, dims)
        if dims:
            raise ValueError("a scalar has no dimensions")

    def holds(self, value: object) -> bool:
        return type(value) is self._dtype.type

    def writer(self, description: Description) -> Write:
        return Kind.writer(self, description)

    def maker(self, trusted: bool) -> Make:
        return scalar_maker(self._dtype)


def _array_stream(dtype: np.dtype[Any]) -> int:
    return BYTES if dtype.kind == "V" else _stream_of(dtype.alignment)  # fields of records need not be aligned


def _stored_as(dtype: np.dtype[Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    if dtype.kind in "biuf" and dtype.isnative:
        known: Any = getattr(torch, dtype.name, None)
        if known in _KNOWN:
            return known, ()
    return torch.uint8, (dtype.itemsize,)


def _hashable(descr: Any) -> Any:
    return tuple(map(_hashable, descr)) if isinstance(descr, list | tuple) else descr


@functools.lru_cache(maxsize=1024)
def _dtype_to_key(dtype: np.dtype[Any]) -> Any:
    """Return the description of a numpy dtype, without lists, which could not be hashed.

    Raises:
        Unfit: it would not come back the same.
    """
    try:
        key = _hashable(dtype_to_descr(dtype))
        same = dtype_from_key(key) == dtype
    except Exception:  # whatever a dtype of another library raises
        same = False
    if not same:
        raise Unfit(f"has the dtype {dtype}, which cannot be written down", "Use a plain one")
    return key


def dtype_from_key(key: object) -> np.dtype[Any]:
    """Return the numpy dtype of a description. Raises ValueError as `type_lookup.numpy_dtype`."""
    return _plain_dtype(key) if type(key) is str else numpy_dtype(key)


_plain_dtype = functools.lru_cache(maxsize=1024)(numpy_dtype)


NUMBERS: dict[type, tuple[str, int]] = {int: ("<i8", 0), float: ("<f8", 0), complex: ("<c16", 0), bool: ("?", BYTES)}
"""The dtype and the stream of each type of numbers."""

_NUMBER_TYPES = {cls.__name__: cls for cls in NUMBERS}


class _NumberKind(Kind):
    """A Python int of 64 bits, float, bool or complex. A larger int is encoded as the kind "long"."""

    name, types, fields, dims = "number", tuple(NUMBERS), ("type",), 0

    def __init__(self, type_name: Any) -> None:
        self._type = _NUMBER_TYPES[type_name]
        dtype, self.stream = NUMBERS[self._type]
        self._codec, self.stored_as = NUMBER_CODECS[self._type], _stored_as(np.dtype(dtype))
        self.itemsize = self._codec.size

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        number = type(value)
        if number is int and not -(2**63) <= value < 2**63:
            return _TextKind.encode(value)  # of the kind "long"
        return ("number", number.__name__), NUMBERS[number][1], pack_number(value), ()

    def writer(self, description: Description) -> Write:
        number, stream, pack = self._type, self.stream, self._codec.pack

        def write(value: object, leaves: Leaves) -> None:
            if type(value) is not number:
                raise Differs
            try:
                leaves.streams[stream].append(pack(value))
            except struct.error:  # of the kind "long"
                raise Differs from None

        return super().writer(description) if number is complex else write

    def step(self, trusted: bool) -> Step:
        if self._type is complex:
            return super().step(trusted)
        return self.stream, NUMBER, self.itemsize, self._codec.unpack_from

    def maker(self, trusted: bool) -> Make:
        return number_maker(self._type)

    def make_all(self, pieces: list[Any]) -> list[Any] | None:
        values: list[Any] = np.frombuffer(b"".join(pieces), NUMBERS[self._type][0]).tolist()
        return values


class _NumbersKind(Kind):
    """A list or tuple of Python numbers of one type, stored as an array."""

    name, fields = "numbers", ("class", "type")

    def __init__(self, class_name: Any, type_name: Any) -> None:
        self._class = sequence_class(class_name)
        dtype, self.stream = NUMBERS[_NUMBER_TYPES[type_name]]
        self._dtype = np.dtype(dtype)
        self.itemsize, self.stored_as = self._dtype.itemsize, _stored_as(self._dtype)

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        number = type(value[0])
        dtype, stream = NUMBERS[number]
        data = np.array(value, dtype=dtype).view(np.uint8)
        return ("numbers", type(value).__name__, number.__name__), stream, data, (len(value),)

    def writer(self, description: Description) -> Write:
        cls, stream = self._class, self.stream

        def write(value: Any, leaves: Leaves) -> None:
            encoded = encode_numbers(value) if type(value) is cls and value else None
            if encoded is None or encoded[0] != description:
                raise Differs
            leaves.streams[stream].append(encoded[2])
            leaves.integers.append(len(value))

        return write

    def maker(self, trusted: bool) -> Make:
        cls, dtype = self._class, self._dtype

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Any:
            return cls(np.frombuffer(buffer, dtype, count, at).tolist() if count else [])

        return make


def encode_numbers(values: Any) -> Encoded | None:
    """Return a list or tuple as `_NumbersKind` encodes it; None where its items are not numbers of one type and 64 bits."""
    types = set(map(type, values))
    if len(types) != 1 or types.pop() not in NUMBERS:
        return None
    try:
        return _NumbersKind.encode(values)
    except OverflowError:
        return None


def sequence_class(name: object) -> type:
    """Return list or tuple. Raises ValueError where the name is another one."""
    if name not in ("list", "tuple"):
        raise ValueError(f"{name!r:.50} is not a list or tuple")
    return list if name == "list" else tuple


class _BytesKind(Kind):
    """Values that are made of any number of bytes."""

    of_any_bytes = False

    @abstractmethod
    def from_bytes(self, trusted: bool) -> Callable[[Any], Any]:
        """Return the function that makes a value of a buffer; ``trusted`` as in `type_lookup.resolve`. Raises Unresolved."""

    def step(self, trusted: bool) -> Step:
        return BYTES, TEXT, 1, self.from_bytes(trusted)

    def maker(self, trusted: bool) -> Make:
        from_bytes = self.from_bytes(trusted)

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Any:
            return from_bytes(buffer if len(buffer) == count else memoryview(buffer)[at : at + count])

        return make


class _TextKind(_BytesKind):
    """The values of one row of texts.py, whose name is that of the kind."""

    types = tuple(cls for cls in TEXT_NAMES if cls not in NUMBERS)

    def __init__(self, name: Any) -> None:
        self._cls, self._to_bytes, self._from_bytes = TEXTS[name]
        self.of_any_bytes = self._cls in (bytes, bytearray, int)

    @classmethod
    def encode(cls, value: object) -> Encoded:
        name = TEXT_NAMES[type(value)]
        data = TEXTS[name].to_bytes(value)
        if data is None:
            raise no_bytes(value)
        return (name,), BYTES, data, (len(data),)

    def writer(self, description: Description) -> Write:
        cls, to_bytes = self._cls, self._to_bytes

        def write(value: object, leaves: Leaves) -> None:
            data = to_bytes(value) if type(value) is cls else None
            if data is None:
                raise Differs
            leaves.streams[BYTES].append(data)
            leaves.integers.append(len(data))

        return super().writer(description) if cls is int else write  # an int may be of the kind "number"

    def from_bytes(self, trusted: bool) -> Callable[[Any], Any]:
        return self._from_bytes

    def make_all(self, pieces: list[Any]) -> list[Any] | None:
        return list(map(bytes.decode, pieces)) if self._cls is str and type(pieces[0]) is bytes else None


class _EnumKind(_BytesKind):
    """The members of one enum class. Their bytes are their names."""

    name, base, fields = "enum", Enum, ("class",)

    def __init__(self, class_name: Any) -> None:
        self._class = class_name

    def holds(self, value: object) -> bool:
        return isinstance(value, Enum)

    @classmethod
    def encode(cls, value: object) -> Encoded:
        owner, data = member_bytes(value)
        return ("enum", owner), BYTES, data, (len(data),)

    def from_bytes(self, trusted: bool) -> Callable[[Any], Any]:
        cls = enum_class(self._class, trusted)
        return lambda data: member_of(cls, str(data, "utf-8"))


def member_bytes(member: object) -> tuple[str, bytes]:
    """Return the name of the class of an enum member, and its own name as bytes.

    Raises:
        Unfit: they do not lead back to it.
    """
    name = member_name(member)
    if name is None:
        raise no_bytes(member)
    return name_of(type(member)), name.encode()


class _LiveError(Unfit):
    """The error of a decoder."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        """Refuse a decoder, whose pickle would hold a pointer."""
        if is_decoder(type(value)):
            raise decoder_error(value)
        return NotImplemented


def decoder_error(value: object) -> Unfit:
    """Return the error of an object that decodes audio or video."""
    remedy = "Return the decoded data, or the bytes of the file, and decode these after the cache"
    return _LiveError(f"is {a(value)}, whose state is not in its attributes", remedy, final=True)


class _PickleKind(_BytesKind):
    """Values that are pickled, where that is allowed."""

    name = "pickle"

    @classmethod
    def encode(cls, value: object) -> Encoded:
        buffer = BytesIO()
        try:
            _Pickler(buffer, protocol=5).dump(value)
            data = buffer.getvalue()
        except _LiveError:
            raise
        except Exception as error:  # whatever the class raises
            raise Unfit(f"is {a(value)}, which cannot be pickled: {error}") from error
        return ("pickle",), BYTES, data, (len(data),)

    def from_bytes(self, trusted: bool) -> Callable[[Any], Any]:
        if not trusted:
            raise Unresolved("its samples are partly pickled. To run the code that the pickles name, pass allow_pickle=True.")
        return pickle.loads


_ALL: tuple[type[Kind], ...] = (
    *(_EnumKind, _TensorKind, _ScalarKind, _ArrayKind, _NarrowKind),  # of several bases the first counts
    *(_NumberKind, _NumbersKind, _TextKind, _PickleKind),
)
_BY_BASE = {kind.base: kind for kind in _ALL if kind.base is not None}

KINDS: dict[str, type[Any]] = {kind.name: kind for kind in _ALL if kind is not _TextKind}
"""The kinds by name; all other names are those of texts.py."""

ENCODERS: dict[type, Callable[[Any], Encoded]] = {cls: kind.encode for kind in _ALL for cls in kind.types}
"""The functions that encode leaves, by exact type; `encode_other` takes those of other types."""


_Leaves: TypeAlias = tuple[Description, list[tuple[bytes, tuple[int, ...]]]]


def _encode_texts(values: Sequence[str]) -> _Leaves:
    data = [value.encode("utf-8", "surrogatepass") for value in values]
    return ("str",), [(each, (len(each),)) for each in data]


def _encode_integers(values: Sequence[int]) -> _Leaves | None:
    try:
        words = np.array(values, np.int64)
    except OverflowError:
        return None
    return ("number", "int"), [(each, ()) for each in words.view("V8").tolist()]


BULK_ENCODERS: dict[type, Callable[[Any], _Leaves | None]] = {str: _encode_texts, int: _encode_integers}
"""Functions that encode many leaves of one type at once, as `ENCODERS` do: they return the key of their kind, and their bytes
and shapes; None where they cannot."""


def encoder_of(value: Any) -> Callable[[Any], Encoded] | None:
    """Return the function that encodes a value; None where it has parts, or is for `encode_other`."""
    cls = type(value)
    return None if cls is np.ndarray and value.dtype.hasobject else ENCODERS.get(cls)
