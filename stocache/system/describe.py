"""Describe any value by plain tuples that are equal when the values are: types, dtypes, shapes, strides and bytes."""

import enum
import functools
import hashlib
import io
import struct
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.system.objects import base_of, is_decoder, vars_of


def describe(value: Any, strides: bool = True, _above: tuple[int, ...] = ()) -> Any:
    """Return a description of ``value`` in tuples, str and numbers.

    A value of an unknown class is described by its attributes; if the class is written in C, by its pickled state; an open
    file by its position. A value without these (a lock, a handle of a library, a decoder) is described by its class alone.
    Without ``strides``, strides do not count.
    """
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.").replace("__mp_main__.", "__main__.")
    if id(value) in _above:
        return name, "itself", len(_above) - _above.index(id(value))
    if cls in (bool, int, str, type(None)):
        return name, value
    if cls in (float, complex):
        return name, struct.pack("2d", value.real, value.imag)
    if cls in (bytes, bytearray):
        return name, len(value), _digest(value)
    if isinstance(value, enum.Enum):
        return name, value.name
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        return name, getattr(value, "__qualname__", value.__name__)
    if isinstance(value, io.IOBase):
        return name, "closed" if value.closed else value.tell() if value.seekable() else "open"

    if is_decoder(cls):
        return name

    def inner(part: object) -> Any:
        return describe(part, strides, (*_above, id(value)))

    if isinstance(value, types.MethodType):
        return name, value.__name__, inner(value.__self__)
    if isinstance(value, functools.partial):
        return name, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, Tensor):
        return name, *_tensor(value, strides), inner(vars_of(value))
    if isinstance(value, np.ndarray | np.generic):
        data = inner(value.tolist()) if value.dtype.hasobject else _digest(np.asarray(value).tobytes())
        own = None if isinstance(value, np.memmap) else inner(vars_of(value))  # of a subclass: a mask; not where it lies
        return name, value.dtype.str, value.shape, value.strides if strides else None, data, own
    if isinstance(value, dict):
        own = vars_of(value)
        items = tuple((inner(key), "an address" if _is_address(key, part) else inner(part)) for key, part in value.items())
        return name, items, inner(own) if own else None
    if isinstance(value, list | tuple):
        return name, tuple(map(inner, value))
    if isinstance(value, str | int | float | bytes):  # of a subclass, which may have attributes
        return name, *map(repr, value.__getnewargs__()), inner(vars_of(value))
    if isinstance(value, set | frozenset):
        return name, tuple(sorted(map(inner, value), key=repr))
    if isinstance(value, Mapping):
        return name, tuple((inner(key), inner(part)) for key, part in value.items())
    if name.startswith("PIL.") and hasattr(value, "tobytes"):
        return name, value.mode, value.size, _digest(value.tobytes())
    state = None if base_of(cls) is object and cls.__dictoffset__ else _state(value, inner)  # a class in C holds more
    return name, inner(vars_of(value)) if state is None else state


def _is_address(key: object, value: object) -> bool:
    """Whether a value is the ``id()`` of an object, which MONAI notes for each transform that it applies."""
    return type(value) is int and value > 1 << 40 and isinstance(key, enum.Enum) and key.value == "id"


def _state(value: Any, inner: Any) -> Any:
    """Return the pickled state of a value; None if it cannot be pickled."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # a class that cannot be pickled may raise anything
        return None
    return reduced if isinstance(reduced, str) else tuple(inner(list(part) if _is_iterator(part) else part) for part in reduced)


def _is_iterator(part: object) -> bool:
    return hasattr(part, "__next__")


def _tensor(value: Tensor, strides: bool) -> tuple[Any, ...]:
    plain = value.detach() if type(value) is Tensor else value.detach().as_subclass(Tensor)
    if plain.layout != torch.strided:
        return str(plain.layout), str(plain.dtype), tuple(plain.shape), describe(plain.to_dense(), strides)
    flat = torch.empty(plain.numel(), dtype=plain.dtype, device="cpu")
    flat.copy_(plain.reshape(-1))  # a single element may have any stride
    form = str(plain.dtype), tuple(plain.shape), plain.stride() if strides else None, str(plain.device), value.requires_grad
    return *form, _digest(flat.view(torch.uint8).numpy().tobytes())


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def difference(one: object, other: object, where: str = "") -> str | None:
    """Return where two descriptions differ first, and how; None when they are equal."""
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        for place, (mine, others) in enumerate(zip(one, other, strict=True)):
            if (found := difference(mine, others, f"{where}.{place}")) is not None:
                label = one[0][1] if place == 1 and type(one[0]) is tuple and len(one[0]) == 2 else None
                return f"in {label!r}: {found}" if isinstance(label, str | int) else found
        return None
    same = one == other and type(one) is type(other)
    digests = type(one) is str and len(one) == 32 == len(str(other)) and not one.strip("0123456789abcdef")  # see `_digest`
    return None if same else "other values" if digests else f"{where}: {one!r:.200} is not {other!r:.200}"
