"""The kinds of tensors and numpy arrays."""

import functools
from typing import Any, ClassVar

import numpy as np
from numpy.lib.format import dtype_to_descr
from torch import Tensor

from stocache.samples.leaves.kind import (
    Description,
    Encoded,
    Kind,
    Leaves,
    Write,
    hashable,
    no_bytes,
    stream_of,
    stream_of_dtype,
)
from stocache.samples.leaves.layout import (
    DimOrder,
    Make,
    array_bytes,
    array_dim_order_of,
    array_maker,
    check_exact,
    dim_order_of,
    inverse,
    numpy_dtype_of,
    scalar_maker,
    tensor_bytes,
    tensor_maker,
)
from stocache.samples.leaves.type_lookup import (
    TORCH_DTYPES,
    Unfit,
    check_dims,
    numpy_dtype,
    torch_dtype,
)


class TensorKind(Kind):
    """Tensors of one dtype and number of dimensions, and one order of them; see NOTE [ Orders ]."""

    name, types, base = "tensor", (Tensor,), Tensor

    def __init__(self, dtype: Any, dims: Any, order: Any = None) -> None:
        self._dtype, self.dims = torch_dtype(dtype), check_dims(dims)
        self.itemsize = self._dtype.itemsize
        self.stream = stream_of(self.itemsize)
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
        return ("tensor", name, dims, *_given(order)), stream_of(dtype.itemsize), data, tuple(value.shape)

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


class ArrayKind(Kind):
    """Numpy arrays of one dtype and number of dimensions, and one order of them; see NOTE [ Orders ]."""

    name = "array"
    types: ClassVar[tuple[type, ...]] = (np.ndarray,)
    base = np.ndarray

    def __init__(self, dtype: Any, dims: Any, order: Any = None) -> None:
        self._dtype, self.dims = dtype_from_key(dtype), check_dims(dims)
        self.itemsize = self._dtype.itemsize
        self.stream = stream_of_dtype(self._dtype)
        self._back = None if order is None else inverse(order, dims)

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        if value.dtype.hasobject:
            raise no_bytes(value)
        if cls is ArrayKind:
            check_exact(value, np.ndarray)
        key, order = _dtype_to_key(value.dtype), array_dim_order_of(value)
        if order is not None:
            value = value.transpose(order)
        return (cls.name, key, value.ndim, *_given(order)), stream_of_dtype(value.dtype), array_bytes(value), value.shape

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


def dtype_of(kind: Kind) -> "np.dtype[Any] | None":
    """Return numpy's dtype for tensors or arrays; None where it does not know it, or for another kind."""
    if type(kind) is ArrayKind:
        return kind._dtype
    return numpy_dtype_of(kind._dtype) if type(kind) is TensorKind else None


class ScalarKind(ArrayKind):
    """Numpy scalars of one dtype."""

    name = "scalar"
    types = ()
    base = np.generic

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


@functools.lru_cache(maxsize=1024)
def _dtype_to_key(dtype: np.dtype[Any]) -> Any:
    """Return the description of a numpy dtype, without lists, which could not be hashed.

    Raises:
        Unfit: it would not come back the same.
    """
    try:
        key = hashable(dtype_to_descr(dtype))
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
