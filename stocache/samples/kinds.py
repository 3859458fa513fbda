"""Describe the kinds of leaves: each class turns values of one kind into bytes, and reads them from records and columns.

NOTE [ Kinds of leaves ]
    A leaf is a part of a sample that has no parts. An object of a class below describes leaves that are alike: tensors of one
    dtype, number of dimensions and order of these. Records and blocks write the same facts:

        record   ("tensor", "float32", 2)                                         in a treedef, see NOTE [ Records ]
        block    {"kind": "tensor", "dtype": "float32", "shape": [3, 4], ...}     in a structure, see NOTE [ Columns ]

    To add a kind, write a class, and list it in `_ALL`. A value that has a text needs only a row in texts.py.
"""

import functools
import math
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from ctypes import memmove
from enum import Enum
from io import BytesIO
from itertools import islice
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.lib.format import dtype_to_descr
from torch import Tensor

from stocache.errors import SegmentError
from stocache.samples.spec import (
    NUMBER_CODECS,
    DimOrder,
    array_bytes,
    array_dim_order_of,
    check_exact,
    dim_order_of,
    inverse,
    tensor_bytes,
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

Make: TypeAlias = Callable[[Any, int, int, tuple[int, ...]], Any]
"""Makes a leaf, given a buffer, the position in it, the number of values there, and their shape. It may keep the buffer."""

Write: TypeAlias = Callable[[Any, "Leaves"], None]
"""Takes a value of one structure, and adds its leaves. Raises Differs or Unfit where the value is not of that structure."""

ALIGNMENTS = (8, 4, 2, 1)  # of the streams of a record, by number
BYTES = 3  # the stream of values that need no alignment

BARE_NODES = 1 << 16
"""See NOTE [ Items without bytes ]."""

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


class Cursor:
    """The state of reading one record.

    Attributes:
        memory: the buffer that holds the leaves.
        address: its address in memory.
        at: the position in each stream.
        end: the end of the leaves.
        integers: an iterator over the integers not yet used.
        copy: True to make private copies of tensors and arrays; False to make views of ``memory``.
        bare: bare nodes that lists may still make; see NOTE [ Items without bytes ].
    """

    __slots__ = ("address", "at", "bare", "copy", "end", "integers", "memory")

    def __init__(
        self, memory: Any, address: int, at: list[int], end: int, integers: Iterator[int], copy: bool, bare: int
    ) -> None:
        self.memory, self.address, self.at, self.end, self.integers, self.copy = memory, address, at, end, integers, copy
        self.bare = bare

    def items(self, bare: int) -> int:
        """Return the next length of a list whose items have ``bare`` bare nodes each."""
        count = next(self.integers)
        self.bare -= count * bare
        if self.bare < 0:
            raise SegmentError(DAMAGED_RECORD)
        return count

    def take(self, stream: int, nbytes: int) -> int:
        """Return the position of the next ``nbytes`` of a stream, and pass them."""
        at = self.at[stream]
        after = self.at[stream] = at + nbytes
        if after > self.end:
            raise SegmentError(DAMAGED_RECORD)
        return at


Read: TypeAlias = Callable[[Cursor], Any]
Size: TypeAlias = int | Callable[[Iterator[int]], int]
"""The bytes that leaves take in a record, or the function that counts them, given the integers."""

Step: TypeAlias = tuple[int, int, Any, Any, Any]
"""A leaf in the loop that reads samples without lists: its stream; how many integers it takes; its bytes (of tensors by shape;
None where the integer says it); what makes an empty tensor; what makes other values, of their bytes or of memory and place."""


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

    @classmethod
    @abstractmethod
    def encode(cls, value: Any) -> Encoded:
        """Return a value, encoded. Raises Unfit where it would not come back the same."""

    def holds(self, value: Any) -> bool:
        """Return whether `encode` is for values of this type. They may be of another kind all the same."""
        return type(value) in self.types

    def writer(self, description: Description) -> Write:
        """Return the function that adds a leaf to a record as `encode` returns it; ``description`` is that of the kind."""
        stream, holds, encode = self.stream, self.holds, self.encode

        def write(value: Any, leaves: Leaves) -> None:
            if not holds(value):
                raise Differs
            its, _, data, shape = encode(value)
            if its != description:
                raise Differs
            leaves.streams[stream].append(data)
            leaves.integers.extend(shape)

        return write

    @abstractmethod
    def reader(self, trusted: bool) -> Read:
        """Return the function that reads a leaf from a record; ``trusted`` as in `type_lookup.resolve`. Raises Unresolved."""

    @abstractmethod
    def maker(self, trusted: bool) -> Make:
        """Return the function that makes a leaf of a part of a column; ``trusted`` as in `type_lookup.resolve`.

        Raises:
            Unresolved: its class is not here, or may not be used.
        """

    def checker(self, trusted: bool) -> Callable[[Any], Any] | None:
        """Return the function that makes a value of its bytes, and raises where they do not make one; None where any bytes do.

        Raises Unresolved as `maker`.
        """
        return None

    def step(self) -> Step | None:
        """Return how the loop for samples without lists reads it; None where that loop cannot."""
        return None

    @property
    def size(self) -> Size:
        """The bytes of a leaf in a record."""
        dims, itemsize = self.dims, self.itemsize
        return (lambda integers: math.prod([next(integers) for _ in range(dims)]) * itemsize) if dims else itemsize

    def bare(self, shape: tuple[int, ...]) -> int:
        """Return 1 where leaves of one shape have no bytes, else 0; see NOTE [ Items without bytes ]."""
        return int(not math.prod(shape) * self.itemsize)


def encode_pickle(value: Any) -> Encoded:
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


def encode_other(value: Any) -> Encoded:
    """Return a leaf that is not of a type in `ENCODERS`, encoded.

    Raises:
        Unfit: it is not of any kind, or would not come back the same.
    """
    for base, kind in _BY_BASE.items():
        if isinstance(value, base):
            return kind.encode(value)
    raise decoder_error(value) if is_decoder(type(value)) else no_bytes(value)


def no_bytes(value: Any) -> Unfit:
    """Return the error of a value that is not of any kind that can be stored."""
    return Unfit(
        f"is {a(value)}, which has no bytes of its own", "Turn it into tensors, arrays, numbers, str or bytes before the cache"
    )


# ---------------------------------------------------------------------------------------------------- tensors


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
        try:
            dtype = torch.empty(0, dtype=self._dtype, device="cpu").numpy().dtype
        except TypeError:  # numpy does not know it
            return rest

        def write(value: Any, leaves: Leaves) -> None:
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

    def _new(self) -> Callable[..., Tensor]:
        """Return the function that makes an uninitialised tensor, given its sizes as they lie in memory."""
        new: Callable[..., Tensor] = torch.empty(0, dtype=self._dtype, device="cpu").new_empty
        back = self._back
        return new if back is None else lambda *stored: new(*stored).permute(back)

    def reader(self, trusted: bool) -> Read:
        dtype, dims, stream, size, new, back = self._dtype, self.dims, self.stream, self.itemsize, self._new(), self._back

        def read(cursor: Cursor) -> Tensor:
            shape = list(islice(cursor.integers, dims))
            if len(shape) != dims:
                raise SegmentError(DAMAGED_RECORD)
            count = math.prod(shape)
            at = cursor.take(stream, count * size)
            if not count:
                return new(*shape) if shape else new(())
            if cursor.copy:
                value = new(*shape) if shape else new(())
                memmove(value.data_ptr(), cursor.address + at, count * size)
                return value
            value = torch.frombuffer(cursor.memory, dtype=dtype, count=count, offset=at).view(shape)
            return value if back is None else value.permute(back)

        return read

    def step(self) -> Step:
        return self.stream, self.dims, _Sizes(self.itemsize), self._new(), None

    def maker(self, trusted: bool) -> Make:
        dtype, back = self._dtype, self._back

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Tensor:
            if count:
                value = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shape)
            else:
                value = torch.empty(shape, dtype=dtype, device="cpu")
            return value if back is None else value.permute(back)

        return make


def _given(order: DimOrder) -> tuple[DimOrder, ...]:
    return () if order is None else (order,)


class _Sizes(dict[tuple[int, ...], int]):
    """The bytes of values by shape: looking them up costs a third of computing them."""

    def __init__(self, itemsize: int) -> None:
        super().__init__()
        self._itemsize = itemsize

    def __missing__(self, shape: tuple[int, ...]) -> int:
        nbytes = math.prod(shape) * self._itemsize
        if len(self) < _SHAPES:
            self[shape] = nbytes
        return nbytes


_SHAPES = 1024  # the most shapes that are remembered for a leaf


# ---------------------------------------------------------------------------------------------------- numpy


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

        def write(value: Any, leaves: Leaves) -> None:
            if type(value) is np.ndarray and value.dtype == dtype and value.ndim == dims and value.flags.c_contiguous:
                leaves.streams[stream].append(value)
                leaves.integers.extend(value.shape)
            else:
                rest(value, leaves)

        return write if self._back is None and dtype.kind in "biufc" else rest  # others need not be buffers

    def reader(self, trusted: bool) -> Read:
        dtype, dims, stream, back = self._dtype, self.dims, self.stream, self._back

        def read(cursor: Cursor) -> Any:
            shape = list(islice(cursor.integers, dims))
            if len(shape) != dims:
                raise SegmentError(DAMAGED_RECORD)
            nbytes = math.prod(shape) * dtype.itemsize
            at = cursor.take(stream, nbytes)
            value: Any = np.ndarray(shape, dtype, cursor.memory, at) if nbytes else _empty_array(shape, dtype)
            value = value.copy() if cursor.copy and nbytes else value
            return value if back is None else value.transpose(back)

        return read

    def maker(self, trusted: bool) -> Make:
        dtype, back = self._dtype, self._back

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Any:
            whole = count and dtype.itemsize
            value: Any = np.ndarray(shape, dtype, buffer, at) if whole else _empty_array(shape, dtype)
            return value if back is None else value.transpose(back)

        return make


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

    def holds(self, value: Any) -> bool:
        return type(value) is self._dtype.type

    def writer(self, description: Description) -> Write:
        return Kind.writer(self, description)

    def reader(self, trusted: bool) -> Read:
        make, stream, size = self.maker(trusted), self.stream, self.itemsize
        return lambda cursor: make(cursor.memory, cursor.take(stream, size), 1, ())

    def maker(self, trusted: bool) -> Make:
        make = super().maker(trusted)
        return lambda buffer, at, count, shape: make(buffer, at, count, shape).copy()[()]  # or records would be views


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


def dtype_from_key(key: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a description. Raises ValueError as `type_lookup.numpy_dtype`."""
    return _plain_dtype(key) if type(key) is str else numpy_dtype(key)


_plain_dtype = functools.lru_cache(maxsize=1024)(numpy_dtype)


def _empty_array(shape: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array without bytes: it has no values, or its dtype has a size of 0.

    `numpy.empty` would allocate one value all the same, of whatever size the dtype claims.

    Raises:
        ValueError: its sizes are too large.
    """
    if dtype.kind not in "SU" or dtype.itemsize:
        return np.ndarray(shape, dtype, bytearray())
    if math.prod(shape) > BARE_NODES:  # numpy takes memory for one character each
        raise ValueError(f"an array of shape {list(shape)} has no bytes")
    return np.zeros(shape, dtype)


# ---------------------------------------------------------------------------------------------------- Python's numbers

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
        codec = NUMBER_CODECS[number]
        data = codec.pack(value.real, value.imag) if number is complex else codec.pack(value)
        return ("number", number.__name__), NUMBERS[number][1], data, ()

    def writer(self, description: Description) -> Write:
        number, stream, pack = self._type, self.stream, self._codec.pack

        def write(value: Any, leaves: Leaves) -> None:
            if type(value) is not number:
                raise Differs
            try:
                leaves.streams[stream].append(pack(value))
            except struct.error:  # of the kind "long"
                raise Differs from None

        return super().writer(description) if number is complex else write

    def reader(self, trusted: bool) -> Read:
        unpack, stream, size = self._codec.unpack_from, self.stream, self.itemsize
        if self._type is complex:
            return lambda cursor: complex(*unpack(cursor.memory, cursor.take(stream, size)))
        return lambda cursor: unpack(cursor.memory, cursor.take(stream, size))[0]

    def step(self) -> Step | None:
        return None if self._type is complex else (self.stream, 0, self.itemsize, None, self._codec.unpack_from)

    def maker(self, trusted: bool) -> Make:
        unpack = self._codec.unpack_from
        if self._type is complex:
            return lambda buffer, at, count, shape: complex(*unpack(buffer, at))
        return lambda buffer, at, count, shape: unpack(buffer, at)[0]


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

    def reader(self, trusted: bool) -> Read:
        cls, dtype, stream, size = self._class, self._dtype, self.stream, self.itemsize

        def read(cursor: Cursor) -> Any:
            count = next(cursor.integers)
            at = cursor.take(stream, count * size)
            values = np.frombuffer(cursor.memory, dtype, count, at).tolist() if count else []
            return values if cls is list else tuple(values)

        return read

    def maker(self, trusted: bool) -> Make:
        cls, dtype = self._class, self._dtype
        return lambda buffer, at, count, shape: cls(np.frombuffer(buffer, dtype, count, at).tolist() if count else [])


def encode_numbers(values: Any) -> Encoded | None:
    """Return a list or tuple as `_NumbersKind` encodes it; None where its items are not numbers of one type and 64 bits."""
    types = set(map(type, values))
    if len(types) != 1 or types.pop() not in NUMBERS:
        return None
    try:
        return _NumbersKind.encode(values)
    except OverflowError:
        return None


def sequence_class(name: Any) -> type:
    """Return list or tuple. Raises ValueError where the name is another one."""
    if name not in ("list", "tuple"):
        raise ValueError(f"{name!r:.50} is not a list or tuple")
    return list if name == "list" else tuple


# ---------------------------------------------------------------------------------------------------- bytes


class _BytesKind(Kind):
    """Values that are made of any number of bytes."""

    @abstractmethod
    def from_bytes(self, trusted: bool) -> Callable[[Any], Any]:
        """Return the function that makes a value of a buffer; ``trusted`` as in `type_lookup.resolve`. Raises Unresolved."""

    def reader(self, trusted: bool) -> Read:
        return bytes_reader(self.from_bytes(trusted))

    def maker(self, trusted: bool) -> Make:
        make = self.from_bytes(trusted)
        return lambda buffer, at, count, shape: make(buffer if len(buffer) == count else memoryview(buffer)[at : at + count])

    def checker(self, trusted: bool) -> Callable[[Any], Any] | None:
        return self.from_bytes(trusted)


def bytes_reader(make: Callable[[memoryview], Any]) -> Read:
    """Return the function that reads a value from a record; ``make`` makes it of its bytes."""

    def read(cursor: Cursor) -> Any:
        nbytes = next(cursor.integers)
        at = cursor.take(BYTES, nbytes)
        return make(memoryview(cursor.memory)[at : at + nbytes])

    return read


class _TextKind(_BytesKind):
    """The values of one row of texts.py, whose name is that of the kind."""

    types = tuple(cls for cls in TEXT_NAMES if cls not in NUMBERS)

    def __init__(self, name: Any) -> None:
        self._cls, self._to_bytes, self._from_bytes = TEXTS[name]

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        name = TEXT_NAMES[type(value)]
        data = TEXTS[name].to_bytes(value)
        if data is None:
            raise no_bytes(value)
        return (name,), BYTES, data, (len(data),)

    def writer(self, description: Description) -> Write:
        cls, to_bytes = self._cls, self._to_bytes

        def write(value: Any, leaves: Leaves) -> None:
            data = to_bytes(value) if type(value) is cls else None
            if data is None:
                raise Differs
            leaves.streams[BYTES].append(data)
            leaves.integers.append(len(data))

        return super().writer(description) if cls is int else write  # an int may be of the kind "number"

    def step(self) -> Step:
        return BYTES, 1, None, None, self._from_bytes

    def from_bytes(self, trusted: bool) -> Callable[[Any], Any]:
        return self._from_bytes

    def checker(self, trusted: bool) -> Callable[[Any], Any] | None:
        return None if self._cls in (bytes, bytearray, int) else self._from_bytes


class _EnumKind(_BytesKind):
    """The members of one enum class. Their bytes are their names."""

    name, base, fields = "enum", Enum, ("class",)

    def __init__(self, class_name: Any) -> None:
        self._class = class_name

    def holds(self, value: Any) -> bool:
        return isinstance(value, Enum)

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        owner, data = member_bytes(value)
        return ("enum", owner), BYTES, data, (len(data),)

    def from_bytes(self, trusted: bool) -> Callable[[Any], Any]:
        cls = enum_class(self._class, trusted)
        return lambda data: member_of(cls, str(data, "utf-8"))


def member_bytes(member: Any) -> tuple[str, bytes]:
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
    def reducer_override(self, value: Any) -> Any:
        """Refuse a decoder, whose pickle would hold a pointer."""
        if is_decoder(type(value)):
            raise decoder_error(value)
        return NotImplemented


def decoder_error(value: Any) -> Unfit:
    """Return the error of an object that decodes audio or video."""
    remedy = "Return the decoded data, or the bytes of the file, and decode these after the cache"
    return _LiveError(f"is {a(value)}, whose state is not in its attributes", remedy, final=True)


class _PickleKind(_BytesKind):
    """Values that are pickled, where that is allowed."""

    name = "pickle"

    @classmethod
    def encode(cls, value: Any) -> Encoded:
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


# ---------------------------------------------------------------------------------------------------- all kinds

_ALL: tuple[type[Kind], ...] = (
    *(_EnumKind, _TensorKind, _ScalarKind, _ArrayKind),  # of several bases the first counts
    *(_NumberKind, _NumbersKind, _TextKind, _PickleKind),
)
_BY_BASE = {kind.base: kind for kind in _ALL if kind.base is not None}

KINDS: dict[str, type[Any]] = {kind.name: kind for kind in _ALL if kind is not _TextKind}
"""The kinds by name; all other names are those of texts.py."""

ENCODERS: dict[type, Callable[[Any], Encoded]] = {cls: kind.encode for kind in _ALL for cls in kind.types}
"""The functions that encode leaves, by exact type; `encode_other` takes those of other types."""


def encoder_of(value: Any) -> Callable[[Any], Encoded] | None:
    """Return the function that encodes a value; None where it has parts, or is for `encode_other`."""
    cls = type(value)
    return None if cls is np.ndarray and value.dtype.hasobject else ENCODERS.get(cls)
