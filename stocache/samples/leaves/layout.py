"""Read and write the values of leaves: the order of their dimensions in memory, their bytes, and values made of bytes.

NOTE [ Orders ]
    A tensor or array may be dense, but have its dimensions in another order in memory: channels_last, Fortran order, a permuted
    image. It is stored as it lies in memory, and comes back with the same strides. Its *order* lists the dimensions from the
    largest stride to the smallest; it is None for the order of C. A value that is not dense is stored in the order of C.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.leaves.type_lookup import Unfit, a, class_text

DimOrder: TypeAlias = tuple[int, ...] | None
"""See NOTE [ Orders ]."""


Make: TypeAlias = Callable[..., Any]
"""Makes a leaf, given a buffer, the position in it, the number of values there, their shape as they lie, and perhaps True for a
private copy. Else it may keep the buffer: tensors and arrays are views of it."""


BARE_NODES = 1 << 16
"""See NOTE [ Items without bytes ]."""


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


NUMBER_CODECS = {int: struct.Struct("q"), float: struct.Struct("d"), bool: struct.Struct("?"), complex: struct.Struct("dd")}


def pack_number(value: object) -> bytes:
    """Return the bytes of a Python int of 64 bits, float, bool or complex."""
    pack = NUMBER_CODECS[type(value)].pack
    return pack(value.real, value.imag) if type(value) is complex else pack(value)


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
