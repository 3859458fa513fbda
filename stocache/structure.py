"""The structure of a sample: a tree of containers whose leaves each have one fixed dtype and shape.

A cache keeps one column of memory per leaf. `Structure` takes samples apart into the bytes of their leaves, checking every
value against the leaf it must fit, and puts values together again into the same containers.

Containers: dict (also OrderedDict), list, tuple, namedtuple, dataclass, None. Leaves: tensors, numpy arrays and scalars,
Python int, float, bool and complex. Nothing is converted unless the value survives it unchanged.
"""

import dataclasses
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.errors import SampleError

# ---------------------------------------------------------------------------------------------------- leaves


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor of a fixed dtype and shape, held in its own bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def encode(self, value: Any, where: str) -> Any:
        """Return the bytes of ``value``, a buffer; of any strides, on any device, with or without gradient.

        Numpy arrays of the same dtype and shape are taken too, and numbers where the shape is ``()``.

        Raises:
            SampleError: it has another dtype, shape or layout, or no data.
        """
        if not isinstance(value, Tensor):
            value = self._tensor(value, where)
        if value.dtype != self.dtype:
            raise SampleError(
                f"{where}: value is {value.dtype}, the cache holds {self.dtype}; it would be changed. "
                f"Convert it first, or build the cache with dtype={value.dtype}."
            )
        if value.shape != self.shape:
            raise SampleError(
                f"{where}: value has shape {tuple(value.shape)}, the cache holds {self.shape}; nothing is broadcast. "
                f"Reshape it first, or build the cache with data_dims={tuple(value.shape)}."
            )
        try:
            return np.ascontiguousarray(value.numpy())
        except (TypeError, RuntimeError):  # what numpy cannot show: bfloat16, a GPU's memory, gradients, lazy conjugates
            pass
        if value.layout != torch.strided or value.is_meta:
            raise SampleError(f"{where}: value is a {value.layout} tensor on {value.device}. Give a dense tensor with data.")
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return plain.view(-1).view(torch.uint8).numpy()

    def _tensor(self, value: Any, where: str) -> Tensor:
        problem: object = f"the cache holds {self}"
        try:
            if isinstance(value, np.ndarray | np.generic):
                # copied: torch warns of read-only arrays and takes native byte order only
                return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
            if isinstance(value, bool | int | float | complex):
                tensor = torch.tensor(value, dtype=self.dtype)
                if tensor.item() == value or value != value:  # NaN is no other value
                    return tensor
                problem = f"it would become {tensor.item()!r} in the cache's {self.dtype}"
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            problem = error
        shown = f"{value!r:.100}" if isinstance(value, bool | int | float | complex) else type(value).__name__
        raise SampleError(f"{where}: value is {shown}; {problem}. Convert it to a tensor first.")

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class ArrayLeaf:
    """A numpy array of a fixed dtype and shape, or (``scalar``) a numpy scalar."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    scalar: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def encode(self, value: Any, where: str) -> Any:
        """Return the bytes of ``value``, a buffer; of any strides.

        Raises:
            SampleError: it is no array (no scalar), or has another dtype or shape.
        """
        if not isinstance(value, np.generic if self.scalar else np.ndarray):
            raise SampleError(f"{where}: value is a {type(value).__name__}, the cache holds {self}.")
        if isinstance(value, np.ma.MaskedArray):
            raise SampleError(f"{where}: a masked array would lose its mask. Give the data and the mask as two arrays.")
        if value.dtype != self.dtype or value.shape != self.shape:
            raise SampleError(f"{where}: value is numpy {value.dtype.str}{list(value.shape)}, the cache holds {self}.")
        return np.asarray(value, order="C").reshape(-1).view(np.uint8)

    def __str__(self) -> str:
        return f"numpy {self.dtype.str}{list(self.shape)}" + " scalar" * self.scalar


@dataclass(frozen=True)
class NumberLeaf:
    """A Python int, float, bool or complex, held in 8, 8, 1 or 16 bytes."""

    type: type[int] | type[float] | type[complex]

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of a batch of these."""
        return {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}[self.type]

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize

    @property
    def codec(self) -> struct.Struct:
        """The layout of one value."""
        return _CODECS[self.type]

    def encode(self, value: Any, where: str) -> Any:
        """Return the bytes of ``value``.

        Raises:
            SampleError: it has another type, or is an int beyond 64 bits.
        """
        if type(value) is not self.type:
            raise SampleError(f"{where}: value {value!r:.100} is a {type(value).__name__}, the cache holds {self}.")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise SampleError(f"{where}: {value!r:.100} exceeds 64 bits. Give such numbers as arrays or str.")
        return self.codec.pack(value.real, value.imag) if self.type is complex else self.codec.pack(value)

    def __str__(self) -> str:
        return self.type.__name__


_CODECS = {int: struct.Struct("q"), float: struct.Struct("d"), bool: struct.Struct("?"), complex: struct.Struct("dd")}

Leaf: TypeAlias = TensorLeaf | ArrayLeaf | NumberLeaf


def _leaf(value: Any, where: str) -> Leaf:
    """Return the leaf that holds ``value`` and its like."""
    leaf: Leaf
    if isinstance(value, Tensor):
        leaf = TensorLeaf(check_dtype(value.dtype), tuple(value.shape))
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise SampleError(f"{where}: a numpy array of Python objects has no fixed size. Give numbers, or a list.")
        leaf = ArrayLeaf(value.dtype, value.shape, isinstance(value, np.generic))
    elif type(value) in (int, float, bool, complex):
        leaf = NumberLeaf(type(value))
    else:
        raise SampleError(
            f"{where}: a {type(value).__name__} has no fixed size. A sample is made of tensors, numpy arrays and "
            f"numbers in dicts, lists, tuples and dataclasses."
        )
    leaf.encode(value, where)  # what cannot be stored is refused now, not in epoch 1
    return leaf


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


# ---------------------------------------------------------------------------------------------------- containers


@dataclass(frozen=True)
class _Container:
    cls: type
    keys: tuple[Any, ...]
    children: "tuple[Node, ...]"

    def __str__(self) -> str:
        inner = ", ".join(f"{key!r}: {child}" for key, child in zip(self.keys, self.children, strict=True))
        return f"{self.cls.__name__}({inner})"


Node: TypeAlias = _Container | Leaf


def _split(sample: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Return the keys and parts of a container; None for a leaf."""
    if sample is None:
        return (), []
    if type(sample) in (dict, OrderedDict):
        return tuple(sample), list(sample.values())
    if isinstance(sample, tuple):
        return getattr(sample, "_fields", tuple(range(len(sample)))), list(sample)
    if type(sample) is list:
        return tuple(range(len(sample))), sample
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        names = tuple(field.name for field in dataclasses.fields(sample))
        return names, [getattr(sample, name) for name in names]
    return None


def _join(cls: type, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    """Undo `_split`."""
    if cls is type(None):
        return None
    if issubclass(cls, dict):
        return cls(zip(keys, parts, strict=True))
    if issubclass(cls, tuple):
        return cls(*parts) if hasattr(cls, "_fields") else cls(parts)
    if cls is list:
        return parts
    sample = object.__new__(cls)  # a dataclass: its fields as they were, without running __post_init__ on them again
    for name, part in zip(keys, parts, strict=True):
        object.__setattr__(sample, name, part)
    return sample


def _build(sample: Any, where: str, leaf: Callable[[Any, str], Leaf]) -> Node:
    split = _split(sample)
    if split is None:
        return leaf(sample, where)
    keys, parts = split
    children = tuple(_build(part, f"{where}[{key!r}]", leaf) for key, part in zip(keys, parts, strict=True))
    return _Container(type(sample), keys, children)


@dataclass(frozen=True)
class Structure:
    """What every sample of a cache looks like. Build one with `of` or `from_dims`."""

    root: Node

    @classmethod
    def of(cls, sample: Any) -> "Structure":
        """Return the structure of ``sample``.

        Raises:
            SampleError: it has a leaf of no fixed size.
        """
        return cls(_build(sample, "sample", _leaf))

    @classmethod
    def from_dims(cls, data_dims: Any, dtype: Any) -> "Structure":
        """Return the structure of tensors with shape ``data_dims``: a shape, or a dict or tuple of shapes.

        ``dtype`` is one torch dtype for all, or the same containers holding one dtype each.

        Raises:
            SampleError: the shapes are not shapes, the dtypes not dtypes, or their containers differ.
        """
        if _is_shape(data_dims):
            return cls(TensorLeaf(check_dtype(dtype), _shape(data_dims)))
        if type(data_dims) in (dict, OrderedDict):
            keys, dims = tuple(data_dims), list(data_dims.values())
        elif isinstance(data_dims, tuple | list) and not any(isinstance(n, int) for n in data_dims):
            keys, dims = getattr(data_dims, "_fields", tuple(range(len(data_dims)))), list(data_dims)
        else:
            raise SampleError(f"data_dims={data_dims!r} is not a shape such as (3, 64, 64), nor a dict or tuple of shapes.")
        if isinstance(dtype, dict | tuple | list):
            given = tuple(dtype) if isinstance(dtype, dict) else getattr(dtype, "_fields", tuple(range(len(dtype))))
            if type(dtype) is not type(data_dims) or set(given) != set(keys):
                raise SampleError(f"dtype={dtype!r} does not match data_dims={data_dims!r}. Give one dtype per shape.")
            dtypes = [dtype[key] for key in keys] if isinstance(dtype, dict) else list(dtype)
        else:
            dtypes = [dtype] * len(dims)
        children = tuple(cls.from_dims(d, t).root for d, t in zip(dims, dtypes, strict=True))
        return cls(_Container(type(data_dims), keys, children))

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves, in the order in which `encode` gives and `unflatten` takes them."""
        return list(_walk(self.root))

    @property
    def is_leaf(self) -> bool:
        """Whether a sample is one value, with no container around it."""
        return not isinstance(self.root, _Container)

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def encode(self, sample: Any, where: str = "sample") -> list[Any]:
        """Return the bytes of each leaf of ``sample``, as buffers; ``where`` names the sample in errors.

        Raises:
            SampleError: a container or a leaf differs from this structure.
        """
        if not isinstance(self.root, _Container):
            return [self.root.encode(sample, where)]
        buffers: list[Any] = []
        _flatten(self.root, sample, where, lambda leaf, value, at: buffers.append(leaf.encode(value, at)))
        return buffers

    def columns(self, batch: Any, where: str = "batch") -> list[Any]:
        """Return the leaf values of a batch, whose containers are this structure's, unchecked."""
        values: list[Any] = []
        _flatten(self.root, batch, where, lambda leaf, value, at: values.append(value))
        return values

    def unflatten(self, values: Sequence[Any]) -> Any:
        """Return the containers of this structure around ``values``, one per leaf."""
        return _unflatten(self.root, iter(values))

    def __str__(self) -> str:
        return str(self.root)


def _walk(node: Node) -> Iterator[Leaf]:
    if isinstance(node, _Container):
        for child in node.children:
            yield from _walk(child)
    else:
        yield node


def _flatten(node: Node, sample: Any, where: str, take: Callable[[Leaf, Any, str], None]) -> None:
    if not isinstance(node, _Container):
        take(node, sample, where)
        return
    split = _split(sample) if type(sample) is node.cls else None
    if split is None:
        raise SampleError(f"{where}: value is a {type(sample).__name__}, the cache holds {node}.")
    keys, parts = split
    if keys != node.keys:
        if node.cls is not dict or set(keys) != set(node.keys):
            raise SampleError(f"{where}: value has the entries {list(keys)}, the cache holds {list(node.keys)}.")
        parts = [sample[key] for key in node.keys]
    for key, child, part in zip(node.keys, node.children, parts, strict=True):
        _flatten(child, part, f"{where}[{key!r}]", take)


def _unflatten(node: Node, values: Iterator[Any]) -> Any:
    if not isinstance(node, _Container):
        return next(values)
    return _join(node.cls, node.keys, [_unflatten(child, values) for child in node.children])


def _is_shape(dims: Any) -> bool:
    return isinstance(dims, tuple | list) and all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in dims)


def _shape(dims: Sequence[int]) -> tuple[int, ...]:
    if any(n < 0 for n in dims):
        raise SampleError(f"data_dims={tuple(dims)} has a negative size.")
    return tuple(int(n) for n in dims)
