"""The kinds of tensors and numpy arrays: the order of their dimensions in memory, their bytes, and values made of bytes."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.lib.format import dtype_to_descr
from numpy.typing import NDArray
from torch import Tensor

from stocache.samples.leaves.kind import (
    BARE_NODES,
    DenseKind,
    Description,
    DimOrder,
    Encoded,
    Kind,
    Leaf,
    Make,
    Write,
    no_bytes,
    stream_of,
)
from stocache.samples.leaves.type_lookup import MAX_DIMS, Unfit, a, check_size, numpy_dtype, torch_dtype


@dataclass(frozen=True)
class TensorKind(DenseKind):
    """Tensors of one dtype and number of dimensions, and one order of them; see NOTE [ Orders ]."""

    name, types, base = "tensor", (Tensor,), Tensor
    dtype: torch.dtype
    dims: int
    order: DimOrder = None

    @classmethod
    def parse(cls, dtype: Any, dims: Any, order: Any = None) -> "TensorKind":
        return cls(torch_dtype(dtype), check_size(dims, MAX_DIMS + 1), _checked_order(order, dims))

    @property
    def array_dtype(self) -> Any:
        """The dtype that numpy has for the values; None if it has none."""
        return _array_dtype(self.dtype)

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        check_exact(value, Tensor)
        order = dim_order_of(value)
        if order is not None:
            value = value.permute(order)
        data = tensor_bytes(value)
        description = ("tensor", str(value.dtype).removeprefix("torch."), value.dim(), *_given(order))
        return description, stream_of(value.dtype), data, tuple(value.shape)

    def maker(self) -> Make:
        dtype, known, back = self.dtype, self.array_dtype, self.back
        numbers = np.dtype(f"i{self.itemsize}") if known is None else known  # numpy does not have bfloat16, for one

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Tensor:
            if not count:
                value = torch.empty(shape, dtype=dtype, device="cpu")
            else:  # at a third of the cost of frombuffer; copies at less than memory of torch (both measured)
                array: Any = np.ndarray(shape, numbers, buffer, at)
                value = torch.from_numpy(array.copy() if copy else array)
                value = value if known is not None else value.view(dtype)
            return value if back is None else value.permute(back)

        return make

    def pack(self, value: Any, leaf: Leaf) -> Any:
        """See `Kind.pack`. The tensor may be of any strides, on any device, with or without gradient.

        Unless the leaf is ``exact``, a numpy array of the same dtype and shape is taken, too, and a number if the shape is ().
        """
        if leaf.exact:
            check_exact(value, Tensor)
        elif not isinstance(value, Tensor):
            value = self._tensor(value, leaf)
        if value.dtype != self.dtype:
            raise Unfit(
                f"is {value.dtype}, the cache holds {self.dtype}; it would be changed",
                f"Convert it first, or build the cache with dtype={value.dtype}",
            )
        if value.shape != leaf.shape:
            raise Unfit(
                f"has shape {tuple(value.shape)}, the cache holds {leaf.shape}; nothing is broadcast",
                f"Reshape it first, or build the cache with data_dims={tuple(value.shape)}",
            )
        return tensor_bytes(value if self.order is None else value.permute(self.order))

    def _tensor(self, value: object, leaf: Leaf) -> Tensor:
        problem: object = f"the cache holds {leaf}"
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

    def text(self, shape: tuple[int, ...]) -> str:
        return str(self.dtype).removeprefix("torch.") + super().text(shape)


@dataclass(frozen=True)
class ArrayKind(DenseKind):
    """Numpy arrays of one dtype and number of dimensions, and one order of them; see NOTE [ Orders ]."""

    name, base = "array", np.ndarray
    types: ClassVar[tuple[type, ...]] = (np.ndarray,)
    dtype: np.dtype[Any]
    dims: int
    order: DimOrder = None

    @classmethod
    def parse(cls, dtype: Any, dims: Any, order: Any = None) -> "ArrayKind":
        return cls(numpy_dtype(dtype), check_size(dims, MAX_DIMS + 1), _checked_order(order, dims))

    @property
    def array_dtype(self) -> Any:
        """The dtype of the values."""
        return self.dtype

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        if value.dtype.hasobject:
            raise no_bytes(value)
        if cls is ArrayKind:
            check_exact(value, np.ndarray)
        key, order = _dtype_to_key(value.dtype), array_dim_order_of(value)
        if order is not None:
            value = value.transpose(order)
        return (cls.name, key, value.ndim, *_given(order)), stream_of(value.dtype), array_bytes(value), value.shape

    def maker(self) -> Make:
        dtype, back = self.dtype, self.back

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Any:
            value: Any
            if count and dtype.itemsize:
                value = np.ndarray(shape, dtype, buffer, at)
                value = value.copy() if copy else value
            else:
                value = _empty_array(shape, dtype)
            return value if back is None else value.transpose(back)

        return make

    def pack(self, value: Any, leaf: Leaf) -> Any:
        if not isinstance(value, self.base):
            raise Unfit(f"is {a(value)}, the cache holds {leaf}")
        if leaf.exact and self.base is np.ndarray:
            check_exact(value, np.ndarray)
        if isinstance(value, np.ma.MaskedArray):
            raise Unfit("is a masked array, which would lose its mask", "Give the data and the mask as two arrays")
        if value.dtype != self.dtype or value.shape != leaf.shape:
            raise Unfit(f"is numpy {_dtype_text(value.dtype)}{list(value.shape)}, the cache holds {leaf}")
        return array_bytes(value if self.order is None else value.transpose(self.order))

    def text(self, shape: tuple[int, ...]) -> str:
        return f"numpy {_dtype_text(self.dtype)}{super().text(shape)}"


class ScalarKind(ArrayKind):
    """Numpy scalars of one dtype."""

    name, base = "scalar", np.generic
    types = ()

    @classmethod
    def parse(cls, dtype: Any, dims: Any, order: Any = None) -> "ScalarKind":
        return cls(numpy_dtype(dtype), 0)  # whatever a forged text says, a scalar has no dimensions

    def writer(self, description: Description) -> Write:
        return Kind.writer(self, description)

    def maker(self) -> Make:
        make = super().maker()
        # always copied: records would be views
        return lambda buffer, at, count, shape, copy=False: make(buffer, at, count, shape, True)[()]

    def text(self, shape: tuple[int, ...]) -> str:
        return f"{super().text(shape)} scalar"


def _dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a numpy dtype as text; dtypes that differ have different texts."""
    plain = dtype.kind in "biufcSUVMmO" and dtype.names is None and dtype.subdtype is None
    return dtype.str if plain and np.dtype(dtype.str) == dtype else str(dtype)  # it has fields, or is of a library


def _given(order: DimOrder) -> tuple[DimOrder, ...]:
    return () if order is None else (order,)


def _checked_order(order: Any, dims: int) -> DimOrder:
    """Return an order of ``dims`` dimensions. Raises ValueError if it is not one."""
    if order is not None and sorted(order) != list(range(dims)):
        raise ValueError(f"{order!r:.50} is not an order of dimensions")
    return order  # type: ignore[no-any-return]


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


def _array_dtype(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


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


def check_exact(value: Any, cls: Any) -> None:
    """Raise Unfit unless ``value`` is a plain ``cls`` and would come back with all it has: device, gradient, mask."""
    displaced = isinstance(value, Tensor) and (not value.is_cpu or value.requires_grad)
    if type(value) is not cls and type(value) is not np.memmap:  # a memmap comes back as an array in memory
        raise Unfit(f"is {a(value)}, the cache returns {cls.__name__}s", "Convert it first", final=displaced)
    if displaced:
        raise Unfit(
            f"is on {value.device}{' and requires a gradient' * value.requires_grad}, the cache returns plain CPU tensors",
            "Leave that to the transform, which runs after the cache",
            final=True,
        )


def _hashable(descr: Any) -> Any:
    """Return a description with tuples in place of its lists."""
    return tuple(map(_hashable, descr)) if isinstance(descr, list | tuple) else descr


@functools.lru_cache(maxsize=1024)
def _dtype_to_key(dtype: np.dtype[Any]) -> Any:
    """Return the description of a numpy dtype, without lists, which could not be hashed.

    Raises:
        Unfit: it would not come back the same.
    """
    try:
        key = _hashable(dtype_to_descr(dtype))
        same = numpy_dtype(key) == dtype
    except Exception:  # whatever a dtype of another library raises
        same = False
    if not same:
        raise Unfit(f"has the dtype {dtype}, which cannot be written down", "Use a plain one")
    return key
