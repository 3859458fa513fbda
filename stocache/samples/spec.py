"""Describe samples of one structure: a tree of containers whose leaves each have a fixed dtype and shape.

A cache of such samples has one column of memory per leaf. `Structure` takes a sample apart into the bytes of its leaves, checks
every value against its leaf, and puts values together again into the same containers.

A leaf is a tensor, a numpy array or scalar, or a Python int, float, bool or complex. A value is converted only where the result
equals it.

NOTE [ Orders ]
    A tensor or array may be dense, but have its dimensions in another order in memory: channels_last, Fortran order, a permuted
    image. It is stored as it lies in memory, and comes back with the same strides. Its *order* lists the dimensions from the
    largest stride to the smallest; it is None for the order of C. A value that is not dense is stored in the order of C.
"""

import contextlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.narrow import Narrowing, find
from stocache.samples.pytree import Container, Parts, class_text, flatten_one, joiner_of, key_text, sample_error
from stocache.samples.type_lookup import Unfit, a

DimOrder: TypeAlias = tuple[int, ...] | None
"""See NOTE [ Orders ]."""

Make: TypeAlias = Callable[..., Any]
"""Makes a leaf, given a buffer, the position in it, the number of values there, their shape as they lie, and perhaps True for a
private copy. Else it may keep the buffer: tensors and arrays are views of it."""

BARE_NODES = 1 << 16
"""See NOTE [ Items without bytes ]."""


class _FixedLeaf:
    """A leaf of a fixed dtype and shape."""

    dtype: Any
    shape: tuple[int, ...] = ()
    order: DimOrder = None

    @property
    def count(self) -> int:
        """Numbers in a value."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return self.count * int(self.dtype.itemsize)

    @property
    def batch_bytes(self) -> int:
        """Bytes of one value in a batch."""
        return self.nbytes

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of a value in memory."""
        return self.shape if self.order is None else tuple(self.shape[dim] for dim in self.order)

    @property
    def back(self) -> DimOrder:
        """The permutation of the dimensions in memory to those of the value; None where they are the same."""
        return None if self.order is None else inverse(self.order, len(self.shape))

    def _maker(self) -> Make:
        raise NotImplementedError

    def decoder(self) -> Callable[..., Any]:
        """Return the function that makes a value, given a buffer, the position of its bytes there, and whether to copy them."""
        make, count, stored = self._maker(), self.count, self.stored
        return lambda buffer, at, copy: make(buffer, at, count, stored, copy)

    def example(self) -> Any:
        """Return a value of zeros."""
        return self.decoder()(bytearray(self.nbytes), 0, False)

    @property
    def _ordered(self) -> str:
        return "" if self.order is None else f" order {list(self.order)}"


@dataclass(frozen=True)
class TensorLeaf(_FixedLeaf):
    """A tensor of a fixed dtype and shape, held in its own bytes.

    Attributes:
        exact: whether it takes only values that come back the same.
        order: the order of its dimensions in memory; see NOTE [ Orders ]. It takes values of any order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    exact: bool = False
    order: DimOrder = None

    def encode(self, value: Any) -> Any:
        """Return the bytes of ``value``, a buffer; of any strides, on any device, with or without gradient.

        Unless ``exact``, it also takes numpy arrays of the same dtype and shape, and numbers where the shape is ``()``.

        Raises:
            Unfit: it has another dtype, shape or layout, or no data.
        """
        if self.exact:
            check_exact(value, Tensor)
        elif not isinstance(value, Tensor):
            value = self._tensor(value)
        if value.dtype != self.dtype:
            raise Unfit(
                f"is {value.dtype}, the cache holds {self.dtype}; it would be changed",
                f"Convert it first, or build the cache with dtype={value.dtype}",
            )
        if value.shape != self.shape:
            raise Unfit(
                f"has shape {tuple(value.shape)}, the cache holds {self.shape}; nothing is broadcast",
                f"Reshape it first, or build the cache with data_dims={tuple(value.shape)}",
            )
        return tensor_bytes(value if self.order is None else value.permute(self.order))

    def _tensor(self, value: object) -> Tensor:
        problem: object = f"the cache holds {self}"
        try:
            if isinstance(value, np.ndarray | np.generic):
                # copied: torch warns of read-only arrays and takes native byte order only
                return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
            if isinstance(value, bool | int | float | complex):
                tensor = torch.tensor(value, dtype=self.dtype, device="cpu")
                if tensor.item() == value or value != value:  # NaN differs from itself
                    return tensor
                problem = f"it would become {tensor.item()!r} in the cache's {self.dtype}"
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            problem = error
        shown = f"{value!r:.100}" if isinstance(value, bool | int | float | complex) else type(value).__name__
        raise Unfit(f"is {shown}; {problem}", "Convert it to a tensor first")

    def _maker(self) -> Make:
        return tensor_maker(self.dtype, self.back)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{self._ordered}"


@dataclass(frozen=True)
class ArrayLeaf(_FixedLeaf):
    """A numpy array of a fixed dtype and shape, or (``scalar``) a numpy scalar; ``exact`` and ``order`` as in `TensorLeaf`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    scalar: bool = False
    exact: bool = False
    order: DimOrder = None

    def encode(self, value: object) -> Any:
        """Return the bytes of ``value``, a buffer; of any strides.

        Raises:
            Unfit: it is not an array (not a scalar), or has another dtype or shape.
        """
        if not isinstance(value, np.generic if self.scalar else np.ndarray):
            raise Unfit(f"is {a(value)}, the cache holds {self}")
        if self.exact and not self.scalar:
            check_exact(value, np.ndarray)
        if isinstance(value, np.ma.MaskedArray):
            raise Unfit("is a masked array, which would lose its mask", "Give the data and the mask as two arrays")
        if value.dtype != self.dtype or value.shape != self.shape:
            raise Unfit(f"is numpy {dtype_text(value.dtype)}{list(value.shape)}, the cache holds {self}")
        array: Any = value
        return array_bytes(array if self.order is None else array.transpose(self.order))

    def _maker(self) -> Make:
        return scalar_maker(self.dtype) if self.scalar else array_maker(self.dtype, self.back)

    def __str__(self) -> str:
        return f"numpy {dtype_text(self.dtype)}{list(self.shape)}" + " scalar" * self.scalar + self._ordered


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a numpy dtype as text, ``<f4`` or ``{'a': <i2, 'b': <f8[3]}``; dtypes that differ have different texts.

    The text of a record has offsets and the whole size where the fields are not packed one after the other.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{dtype_text(base)}{list(shape)}"
    if dtype.names is None:
        plain = dtype.kind in "biufcSUVMmO" and np.dtype(dtype.str) == dtype  # else it is of a library, such as ml_dtypes
        return dtype.str if plain else f"{dtype.str}({class_text(dtype.type)} {dtype.name})"
    fields, end, packed = [], 0, True
    for name in dtype.names:
        its: Any = dict(dtype.fields or {})[name]
        packed &= its[1] == end
        end = its[1] + its[0].itemsize
        fields.append((name, its))
    packed &= end == dtype.itemsize and not dtype.isalignedstruct
    text = ", ".join(
        f"{name!r}{f' titled {its[2]!r}' if len(its) > 2 else ''}: {dtype_text(its[0])}"
        + (f" at {its[1]}" if not packed else "")
        for name, its in fields
    )
    size = "" if packed else f"; {dtype.itemsize} bytes" + ", aligned" * dtype.isalignedstruct
    return f"{{{text}{size}}}" + ("" if dtype.type is np.void else f"({class_text(dtype.type)})")


@dataclass(frozen=True)
class NumberLeaf(_FixedLeaf):
    """A Python int, float, bool or complex, held in 8, 8, 1 or 16 bytes."""

    type: type[int] | type[float] | type[complex]

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of a batch of these."""
        return {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}[self.type]

    def encode(self, value: object) -> Any:
        """Return the bytes of ``value``.

        Raises:
            Unfit: it has another type, or is an int beyond 64 bits.
        """
        if type(value) is not self.type:
            raise Unfit(f"is {value!r:.100}, {a(value)}; the cache holds {self}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise Unfit(f"is {value!r:.100}, which exceeds 64 bits", "Give such numbers as arrays or str")
        return pack_number(value)

    def _maker(self) -> Make:
        return number_maker(self.type)

    def __str__(self) -> str:
        return self.type.__name__


NUMBER_CODECS = {int: struct.Struct("q"), float: struct.Struct("d"), bool: struct.Struct("?"), complex: struct.Struct("dd")}


def pack_number(value: object) -> bytes:
    """Return the bytes of a Python int of 64 bits, float, bool or complex."""
    pack = NUMBER_CODECS[type(value)].pack
    return pack(value.real, value.imag) if type(value) is complex else pack(value)


@dataclass(frozen=True)
class NarrowLeaf(_FixedLeaf):
    """A tensor or array whose numbers are made of small integers, and stored as these; see NOTE [ Narrow values ].

    A value is taken only if what comes back is the same to the last bit.

    Attributes:
        wide: the leaf of the values themselves.
        narrowing: how they are made.
    """

    wide: TensorLeaf | ArrayLeaf
    narrowing: Narrowing

    @property
    def dtype(self) -> Any:
        """The dtype of what is stored."""
        return np.dtype(self.narrowing.stored)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of a value."""
        return self.wide.shape

    @property
    def order(self) -> DimOrder:  # type: ignore[override]
        """The order of its dimensions in memory."""
        return self.wide.order

    @property
    def count(self) -> int:
        """Integers of which a value is made."""
        return self.wide.count // self.narrowing.share

    @property
    def batch_bytes(self) -> int:
        """Bytes of one value in a batch."""
        return self.wide.nbytes

    @property
    def wide_dtype(self) -> Any:
        """The dtype of the values, for numpy."""
        return np.dtype(self.narrowing.wide)

    def encode(self, value: object) -> Any:
        """Return the integers that a value is made of. Raises Unfit as the wide leaf, or because it is made otherwise."""
        narrow = self.narrowing.narrow(_numbers_of(self.wide, value, self.wide_dtype))
        if narrow is None:
            raise Unfit(f"is not made of {self.narrowing}, as {self} has to be", "Leave narrow out")
        return narrow.view(np.uint8)

    def decoder(self) -> Callable[..., Any]:
        """See `_FixedLeaf.decoder`. What is made is always a copy."""
        make, count, wide, stored, dtype = self.wide._maker(), self.count, self.wide.count, self.stored, self.dtype

        def decode(buffer: Any, at: int, copy: bool) -> Any:
            out = np.empty(wide, self.wide_dtype)
            self.narrowing.widen(np.frombuffer(buffer, dtype, count, at), out)
            return make(out.data, 0, wide, stored, False)

        return decode

    def __str__(self) -> str:
        return f"{self.wide} of {self.narrowing}"


def _numbers_of(leaf: TensorLeaf | ArrayLeaf, value: object, dtype: Any) -> NDArray[Any]:
    return np.ascontiguousarray(leaf.encode(value)).reshape(-1).view(np.uint8).view(dtype)


Leaf: TypeAlias = TensorLeaf | ArrayLeaf | NumberLeaf | NarrowLeaf


def leaf_of(value: Any, exact: bool = False) -> Leaf:
    """Return the leaf that holds values like ``value``."""
    leaf: Leaf
    if isinstance(value, Tensor):
        if value.is_nested or value.is_quantized:
            check_dense(value)  # raises: a nested one has no shape, a quantized one has a scale besides
        leaf = TensorLeaf(value.dtype, tuple(value.shape), exact, dim_order_of(value))
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise Unfit("is a numpy array of Python objects, which has no fixed size", "Give numbers, or a list")
        leaf = ArrayLeaf(value.dtype, value.shape, isinstance(value, np.generic), exact, array_dim_order_of(value))
    elif type(value) in (int, float, bool, complex):
        leaf = NumberLeaf(type(value))
    else:
        raise Unfit(
            f"is {a(value)}, which has no fixed size",
            "A sample is made of tensors, numpy arrays and numbers in dicts, lists, tuples and dataclasses; RaggedCache also "
            "holds str, bytes and more",
        )
    leaf.encode(value)  # refuses now, not in epoch 1, a value that cannot be stored
    return leaf


def dim_order_of(value: Tensor) -> DimOrder:
    """Return the order of a tensor, None for the order of C; see NOTE [ Orders ]."""
    if value.layout != torch.strided or value.is_contiguous():
        return None
    order = _falling(value.stride(), value.shape)
    return order if value.permute(order).is_contiguous() else None


def array_dim_order_of(value: Any) -> DimOrder:
    """Return the order of a numpy array, None for the order of C; see NOTE [ Orders ]."""
    if value.flags.c_contiguous:
        return None
    order = _falling(value.strides, value.shape)
    return order if value.transpose(order).flags.c_contiguous else None


def _falling(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1)))


def inverse(order: Sequence[int], dims: int) -> tuple[int, ...]:
    """Return the permutation that undoes an order of ``dims`` dimensions.

    Raises:
        ValueError: it is not such an order.
    """
    if sorted(order) != list(range(dims)):
        raise ValueError(f"{order!r:.50} is not an order of dimensions")
    return tuple(sorted(range(dims), key=order.__getitem__))


def tensor_bytes(value: Tensor) -> NDArray[Any]:
    """Return the values of a tensor, of any strides and on any device, as one contiguous buffer.

    Raises:
        Unfit: it has another layout, or no data.
    """
    try:
        return np.ascontiguousarray(value.numpy())
    except (TypeError, RuntimeError):  # numpy cannot show bfloat16, a GPU's memory, gradients, lazy conjugates
        pass
    check_dense(value)
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy()


def check_dense(value: Tensor) -> None:
    """Raise Unfit unless a tensor is its values and nothing else."""
    if value.is_quantized:
        raise Unfit("is a quantized tensor, which holds its scale outside of its bytes", "Give dequantized values")
    if value.layout != torch.strided or value.is_meta or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout)
        raise Unfit(f"is a {layout} tensor on {value.device}", "Give a dense tensor with data")


def array_bytes(value: Any) -> NDArray[Any]:
    """Return the values of a numpy array or scalar, of any strides, as one buffer."""
    if not value.dtype.itemsize:  # of an empty str numpy makes one character
        return np.empty(0, np.uint8)
    return np.asarray(value, order="C").reshape(-1).view(np.uint8)


def numpy_dtype_of(dtype: torch.dtype) -> Any:
    """Return the dtype that numpy has for one of torch; None where it has none."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


def tensor_maker(dtype: torch.dtype, back: DimOrder) -> Make:
    """Return the function that makes tensors; ``back`` permutes their dimensions to those of the leaf."""
    known, itemsize = numpy_dtype_of(dtype), dtype.itemsize

    def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Tensor:
        if not count:
            value = torch.empty(shape, dtype=dtype, device="cpu")
        elif known is not None:  # at a third of the cost of frombuffer; copies at less than memory of torch (both measured)
            array: Any = np.ndarray(shape, known, buffer, at)
            value = torch.from_numpy(array.copy() if copy else array)
        else:
            buffer, at = (bytearray(buffer[at : at + count * itemsize]), 0) if copy else (buffer, at)
            value = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shape)
        return value if back is None else value.permute(back)

    return make


def array_maker(dtype: np.dtype[Any], back: DimOrder) -> Make:
    """Return the function that makes arrays; ``back`` as in `tensor_maker`."""

    def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Any:
        value: Any
        if count and dtype.itemsize:
            value = np.ndarray(shape, dtype, buffer, at)
            value = value.copy() if copy else value
        else:
            value = _empty_array(shape, dtype)
        return value if back is None else value.transpose(back)

    return make


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


def scalar_maker(dtype: np.dtype[Any]) -> Make:
    """Return the function that makes numpy scalars."""
    make = array_maker(dtype, None)
    return lambda buffer, at, count, shape, copy=False: make(buffer, at, count, shape, True)[()]  # or records would be views


def number_maker(number: type) -> Make:
    """Return the function that makes Python numbers."""
    unpack = NUMBER_CODECS[number].unpack_from
    if number is complex:
        return lambda buffer, at, count, shape, copy=False: complex(*unpack(buffer, at))
    return lambda buffer, at, count, shape, copy=False: unpack(buffer, at)[0]


def check_exact(value: object, cls: type) -> None:
    """Raise Unfit unless ``value`` is a plain ``cls`` and would come back with all it has: device, gradient, mask."""
    tensor = value if isinstance(value, Tensor) else None
    displaced = tensor is not None and (tensor.device.type != "cpu" or tensor.requires_grad)
    if type(value) is not cls and type(value) is not np.memmap:  # a memmap comes back as an array in memory
        raise Unfit(f"is {a(value)}, the cache gives {cls.__name__}s back", "Convert it first", final=displaced)
    if tensor is not None and displaced:
        raise Unfit(
            f"is on {tensor.device}{' and requires a gradient' * tensor.requires_grad}, the cache gives plain CPU tensors back",
            "Leave that to the transform, which runs after the cache",
            final=True,
        )


def check_dtype(dtype: Any) -> torch.dtype:
    """Return ``dtype`` if it is a torch dtype whose values each take a fixed number of whole bytes.

    Raises:
        SampleError: it is not (the quantized types, a numpy dtype, a string).
    """
    if not isinstance(dtype, torch.dtype):
        raise SampleError(f"dtype {dtype!r} is not a torch dtype. Use for example torch.uint8.")
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        raise SampleError(f"dtype {dtype} cannot be cached: quantized tensors hold their scale outside of their bytes.")
    return dtype


@dataclass(frozen=True)
class _Inner:
    """A container in the tree."""

    container: Container
    children: "tuple[Node, ...]"

    @property
    def identity(self) -> str:
        """The text of `__str__`, with the modules of classes."""
        return self._text(self.container.identity, [getattr(child, "identity", child) for child in self.children])

    def _text(self, name: str, children: Sequence[object]) -> str:
        inner = ", ".join(f"{key_text(key)}: {child}" for key, child in zip(self.container.keys, children, strict=True))
        return f"{name}({inner})"

    def __str__(self) -> str:
        return self._text(str(self.container), self.children)


Node: TypeAlias = _Inner | Leaf


def _build(sample: object, leaf: Callable[[Any], Leaf]) -> Node:
    parted = flatten_one(sample)
    if parted is None or parted[0].kind == "set":
        return leaf(sample)
    container, parts = parted
    children = []
    for key, part in zip(container.keys, parts, strict=True):
        try:
            children.append(_build(part, leaf))
        except Unfit as error:
            raise error.within(container, key) from error.__cause__
    return _Inner(container, tuple(children))


@dataclass(frozen=True)
class Structure:
    """The structure that all samples of a cache share. Make one with `of` or `from_dims`."""

    root: Node

    @classmethod
    def of(cls, sample: object, *, exact: bool = False) -> "Structure":
        """Return the structure of ``sample``.

        An ``exact`` one takes only samples that come back the same in every respect: no numpy array for a tensor, no GPU, no
        gradient.

        Raises:
            SampleError: a leaf has no fixed size, or (``exact``) would not come back the same.
        """
        try:
            return cls(_build(sample, partial(leaf_of, exact=exact)))
        except Unfit as error:
            raise sample_error(error, "sample") from error.__cause__

    @classmethod
    def from_dims(cls, data_dims: Any, dtype: Any) -> "Structure":
        """Return the structure of tensors with shape ``data_dims``: a shape, or a dict or tuple of shapes.

        ``dtype`` is one torch dtype for all, or the same containers holding one dtype each.

        Raises:
            SampleError: the shapes are not shapes, the dtypes not dtypes, or their containers differ.
        """
        if _is_shape(data_dims):
            return cls(TensorLeaf(check_dtype(dtype), _shape(data_dims)))
        parted = flatten_one(data_dims)
        if parted is None or not parted[1] or any(isinstance(part, int) for part in parted[1]):
            raise SampleError(f"data_dims={data_dims!r} is not a shape such as (3, 64, 64), nor a dict or tuple of shapes.")
        container, dims = parted
        dtypes = [dtype] * len(dims)
        if isinstance(dtype, dict | tuple | list):
            given = flatten_one(dtype)
            if given is None or given[0].cls is not container.cls or set(given[0].keys) != set(container.keys):
                raise SampleError(f"dtype={dtype!r} does not match data_dims={data_dims!r}. Give one dtype per shape.")
            by_key = dict(zip(given[0].keys, given[1], strict=True))
            dtypes = [by_key[key] for key in container.keys]
        return cls(_Inner(container, tuple(cls.from_dims(d, t).root for d, t in zip(dims, dtypes, strict=True))))

    def narrowed(self, samples: Sequence[object]) -> "Structure":
        """Return a structure that has a `NarrowLeaf` where the values of all ``samples`` are made of small integers."""
        values = self.part(samples)
        if not samples or values is None:
            return self
        return Structure(_with_leaves(self.root, map(_narrowest, self.leaves, values)))

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves, in the order in which `encode` gives and `unflatten` takes them."""
        return list(_walk(self.root))

    @property
    def containers(self) -> list[Container]:
        """The containers, from the outside in."""
        return list(_containers(self.root))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def is_narrow(self) -> bool:
        """Whether a leaf is stored in fewer bytes than it has in a batch."""
        return any(leaf.nbytes != leaf.batch_bytes for leaf in self.leaves)

    def encode(self, sample: object, where: str = "sample") -> list[Any]:
        """Return the bytes of each leaf of ``sample``, as buffers. ``where`` names the sample in errors.

        Raises:
            SampleError: a container or a leaf differs from this structure.
        """
        try:
            if not isinstance(self.root, _Inner):
                return [self.root.encode(sample)]
            buffers: list[Any] = []
            _flatten(self.root, sample, lambda leaf, value: buffers.append(leaf.encode(value)))
            return buffers
        except Unfit as error:
            raise sample_error(error, where) from error.__cause__

    def part(self, samples: Sequence[object]) -> list[Sequence[Any]] | None:
        """Return the values of each leaf of many samples, unchecked; None if their containers differ, or are of a rare kind."""
        return _part(self.root, samples)

    def columns(self, batch: object, where: str = "batch") -> list[Any]:
        """Return the values of the leaves of a batch, unchecked. Its containers must be those of this structure."""
        values: list[Any] = []
        try:
            _flatten(self.root, batch, lambda leaf, value: values.append(value))
        except Unfit as error:
            raise sample_error(error, where, "batch") from error.__cause__
        return values

    def unflatten(self, values: list[Any]) -> Any:
        """Return the containers of this structure around ``values``, one per leaf."""
        return self.joiner()(values)

    def joiner(self) -> Callable[[Any], Any]:
        """Return the function that puts a sequence of values, one per leaf, into the containers of this structure."""
        return joiner_of(_parts(self.root))

    def example(self) -> Any:
        """Return a sample of this structure, whose values are zeros and lie in memory as those of the cache do."""
        return self.unflatten([leaf.example() for leaf in self.leaves])

    @property
    def identity(self) -> str:
        """A text with whole dtypes, types of keys and modules of classes. Structures that differ have different texts.

        One exception: two classes that functions define under one name have the same text.
        """
        return str(getattr(self.root, "identity", self.root))

    def __str__(self) -> str:
        return str(self.root)


def _narrowest(leaf: Leaf, values: Sequence[object]) -> Leaf:
    """Return the leaf that stores some values in the fewest bytes."""
    if not isinstance(leaf, TensorLeaf | ArrayLeaf) or getattr(leaf, "scalar", False) or not leaf.count:
        return leaf
    dtype = leaf.dtype if isinstance(leaf, ArrayLeaf) else numpy_dtype_of(leaf.dtype)
    narrowing = None
    if dtype is not None:
        with contextlib.suppress(Unfit):  # a value is another one
            narrowing = find([_numbers_of(leaf, value, dtype) for value in values], leaf.stored)
    return leaf if narrowing is None else NarrowLeaf(leaf, narrowing)


def _with_leaves(node: Node, leaves: Iterator[Leaf]) -> Node:
    if not isinstance(node, _Inner):
        return next(leaves)
    return _Inner(node.container, tuple(_with_leaves(child, leaves) for child in node.children))


def _walk(node: Node) -> Iterator[Leaf]:
    if isinstance(node, _Inner):
        for child in node.children:
            yield from _walk(child)
    else:
        yield node


def _containers(node: Node) -> Iterator[Container]:
    if isinstance(node, _Inner):
        yield node.container
        for child in node.children:
            yield from _containers(child)


def _flatten(node: Node, sample: Any, take: Callable[[Leaf, Any], None]) -> None:
    if not isinstance(node, _Inner):
        take(node, sample)
        return
    wanted, parted = node.container, flatten_one(sample)
    if parted is None or parted[0].cls is not wanted.cls:
        raise Unfit(f"is {a(sample)}, the cache holds {node}")
    container, parts = parted
    alike = _keys_alike(container, wanted)
    if container != wanted or not alike:
        if container.cls is not dict or not alike:
            raise Unfit(f"has {_contents(container)}, the cache holds {_contents(wanted)}")
        parts = [sample[key] for key in wanted.keys]
    for key, child, part in zip(wanted.keys, node.children, parts, strict=True):
        try:
            _flatten(child, part, take)
        except Unfit as error:
            raise error.within(wanted, key) from error.__cause__


def _part(node: Node, samples: Sequence[Any]) -> list[Sequence[Any]] | None:
    if not isinstance(node, _Inner):
        return [samples]
    kind, keys = node.container.kind, list(node.container.keys)
    parts: Iterable[Sequence[Any]]
    if set(map(type, samples)) != {node.container.cls}:
        return None
    if kind in ("tuple", "list", "namedtuple") and set(map(len, samples)) == {len(keys)}:
        parts = zip(*samples, strict=True)
    elif kind == "dict" and all(list(sample) == keys for sample in samples) and _are_str(chain(keys, *samples)):
        parts = zip(*(sample.values() for sample in samples), strict=True)
    elif kind == "memmap":
        parts = [list(map(np.asarray, samples))]
    else:
        return None
    columns: list[Sequence[Any]] = []
    for child, values in zip(node.children, parts, strict=False):  # no parts where there are no children
        inner = _part(child, values)
        if inner is None:
            return None
        columns += inner
    return columns


def _are_str(keys: Iterable[object]) -> bool:
    return set(map(type, keys)) == {str}


def _keys_alike(container: Container, wanted: Container) -> bool:
    """Return whether two containers have the same keys, in any order. Types count: 1 is not True, "a" is not a str-Enum."""
    if container.kind in ("list", "tuple"):
        return len(container.keys) == len(wanted.keys)
    own, others = ({key: type(key) for key in keys} for keys in (container.keys, wanted.keys))
    return own == others


def _contents(container: Container) -> str:
    entries = f"the entries {list(container.keys)}"
    if container.kind == "defaultdict":
        return f"{entries} and default_factory {container.extra[0]!r}"
    return entries + (f" and batch size {list(container.extra)}" if container.extra else "")


def _parts(node: Node) -> Parts:
    return (node.container.unflatten_fn(), list(map(_parts, node.children))) if isinstance(node, _Inner) else None


def _is_shape(dims: Any) -> bool:
    return isinstance(dims, tuple | list) and all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in dims)


def _shape(dims: Sequence[int]) -> tuple[int, ...]:
    if any(n < 0 for n in dims):
        raise SampleError(f"data_dims={tuple(dims)} has a negative size.")
    return tuple(int(n) for n in dims)
