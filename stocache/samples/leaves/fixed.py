"""The leaves of samples of one structure: each has one dtype and shape, and checks its values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.samples.leaves.kind import stream_of_dtype
from stocache.samples.leaves.layout import (
    DimOrder,
    Make,
    array_bytes,
    array_dim_order_of,
    array_maker,
    check_dense,
    check_exact,
    dim_order_of,
    dtype_text,
    inverse,
    number_maker,
    pack_number,
    scalar_maker,
    tensor_bytes,
    tensor_maker,
)
from stocache.samples.leaves.narrow import Narrowing
from stocache.samples.leaves.type_lookup import Unfit, a


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
    def stream(self) -> int:
        """The stream of a record or row that holds the value."""
        return stream_of_dtype(self.dtype)

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
        narrow = self.narrowing.narrow(numbers_of(self.wide, value, self.wide_dtype))
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


def numbers_of(leaf: TensorLeaf | ArrayLeaf, value: object, dtype: Any) -> NDArray[Any]:
    """Return the numbers of a value in one dimension, viewed as ``dtype``, as they lie in memory."""
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
