"""Describe the kinds of leaves: each class turns values of one kind into bytes, and reads them from records.

NOTE [ Kinds of leaves ]
    A leaf is a part of a sample that has no parts. An object of a class below describes leaves that are alike: tensors of one
    dtype, number of dimensions and order of these. A treedef has the same facts: ("tensor", "float32", 2), see
    NOTE [ Records ]. A tensor or array that is made of small integers is stored as these if that is asked for:
    ("narrow", ("tensor", "float32", 2), ...), see NOTE [ Narrow values ].

    To add a kind, write a class, and list it in `_ALL`. A value that has a text needs only a row in texts.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from stocache.samples.leaves.arrays import ArrayKind, ScalarKind, TensorKind, array_dim_order_of, check_dense, dim_order_of
from stocache.samples.leaves.kind import (
    DenseKind,
    Description,
    Differs,
    Encoded,
    Kind,
    Leaf,
    Leaves,
    Make,
    Write,
    no_bytes,
    stream_of,
)
from stocache.samples.leaves.narrow import Narrowing, find
from stocache.samples.leaves.plain_kinds import NUMBERS, EnumKind, NumberKind, NumbersKind, PickleKind, TextKind, decoder_error
from stocache.samples.leaves.type_lookup import Unfit, a
from stocache.system.objects import is_decoder


def kind_of(description: Description) -> Kind:
    """Return the kind of a leaf in a record. Raises ValueError, TypeError or LookupError if it is not one."""
    name, *facts = description
    return KINDS[name].parse(*facts) if name in KINDS else TextKind(name, *facts)


def encode_other(value: object) -> Encoded:
    """Return a leaf that is not of a type in `ENCODERS`, encoded.

    Raises:
        Unfit: it is not of any kind, or would not come back the same.
    """
    for base, kind in _BY_BASE.items():
        if isinstance(value, base):
            return kind.encode(value)
    raise decoder_error(value) if is_decoder(type(value)) else no_bytes(value)


@dataclass(frozen=True)
class NarrowKind(DenseKind):
    """Tensors or arrays whose numbers are made of small integers, and stored as these; see NOTE [ Narrow values ].

    A value is taken only if what comes back is the same to the last bit.

    Attributes:
        wide: the kind of the values themselves.
        narrowing: how they are made; in records without the sizes of channels, which their shapes say.
        last: the channels are the last dimension in memory, not the first.
    """

    name = "narrow"
    wide: Any
    narrowing: Narrowing
    last: bool = False

    @classmethod
    def parse(cls, leaf: Any, stored: Any, divisor: Any, factor: Any, mean: Any, std: Any, last: Any) -> "NarrowKind":
        wide = kind_of(leaf)
        if wide.array_dtype is None or not all(type(n) in (int, float) and n for n in (divisor, factor, *std)):
            raise ValueError(f"{leaf!r:.80} does not hold numbers")
        if stored not in ("|u1", "<i2", "<u2") or len(mean) != len(std) or not all(type(number) is float for number in mean):
            raise ValueError(f"{stored!r:.20}, {mean!r:.80}: this is no way to make numbers")
        return cls(wide, Narrowing(wide.array_dtype.str, stored, divisor, factor, tuple(mean), tuple(std)), bool(last))

    @property
    def dtype(self) -> Any:
        """The dtype of what is stored."""
        return np.dtype(self.narrowing.stored)

    @property
    def dims(self) -> int:
        return self.wide.dims  # type: ignore[no-any-return]

    @property
    def order(self) -> Any:
        return self.wide.order

    @classmethod
    def encode(cls, value: object) -> Encoded:
        raise Unfit("is encoded as its values are")

    def nbytes(self, stored: tuple[int, ...]) -> int:
        return super().nbytes(stored) // self.narrowing.share

    def _for(self, shape: Sequence[int]) -> Narrowing:
        """Return the steps for values of a shape. Raises Differs: it has no values, or other channels."""
        channels, narrowing = len(self.narrowing.mean), self.narrowing
        if narrowing.channels > 1:  # those of a row
            return narrowing
        if not math.prod(shape) or (channels > 1 and channels != shape[-1 if self.last else 0]):
            raise Differs(f"values of shape {list(shape)} are not made so")
        if channels < 2:  # one mean for all values, or none
            return narrowing
        return replace(narrowing, channels=channels, inner=1 if self.last else math.prod(shape[1:]))

    def writer(self, description: Description) -> Write:
        write_wide, own_stream, dtype = self.wide.writer(description[1]), self.wide.stream, self.wide.array_dtype

        def write(value: object, leaves: Leaves) -> None:
            own = Leaves()
            write_wide(value, own)
            narrow = self._for(own.integers).narrow(np.frombuffer(own.streams[own_stream][0], dtype))
            if narrow is None:
                raise Differs
            leaves.streams[self.stream].append(narrow)
            leaves.integers.extend(own.integers)

        return write

    def maker(self) -> Make:
        make_wide, wide, stored, share = self.wide.maker(), self.wide.array_dtype, self.dtype, self.narrowing.share

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Any:
            out = np.empty(count, wide)
            with np.errstate(all="ignore"):  # of forged numbers
                self._for(shape).widen(np.frombuffer(buffer, stored, count // share, at), out)
            return make_wide(out.data, 0, count, shape, False)

        return make

    def pack(self, value: Any, leaf: Leaf) -> Any:
        narrow = self.narrowing.narrow(numbers_of(self.wide.pack(value, leaf), self.wide.array_dtype))
        if narrow is None:
            raise Unfit(f"is not made of {self.narrowing}, as {leaf} has to be", "Leave narrow out")
        return narrow.view(np.uint8)

    def text(self, shape: tuple[int, ...]) -> str:
        return f"{self.wide.text(shape)} of {self.narrowing}"


def numbers_of(data: Any, dtype: Any) -> Any:
    """Return the bytes of a tensor or array as numbers in one dimension."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).view(dtype)


def narrowed(encoded: Encoded) -> Encoded:
    """Return a leaf as the integers that it is made of, if that is so."""
    description, _, data, shape = encoded
    dtype = kind_of(description).array_dtype if description[0] in ("tensor", "array") else None
    if dtype is None or dtype.hasobject or not dtype.itemsize or not math.prod(shape):
        return encoded
    values = np.frombuffer(data, dtype)
    way = find([values], shape, for_all=False)
    if way is None:
        return encoded
    facts = way.stored, way.divisor, way.factor, way.mean, way.std, way.inner == 1
    return ("narrow", description, *facts), stream_of(np.dtype(way.stored)), way.narrow(values), shape


def leaf_of(value: Any, exact: bool = False) -> Leaf:
    """Return the leaf that holds values like ``value``."""
    kind: Kind
    if isinstance(value, Tensor):
        check_dense(value)  # before its shape is asked for: a nested one has none
        kind = TensorKind(value.dtype, value.dim(), dim_order_of(value))
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise Unfit("is a numpy array of Python objects, which has no fixed size", "Give numbers, or a list")
        cls = ScalarKind if isinstance(value, np.generic) else ArrayKind
        kind = cls(value.dtype, value.ndim, array_dim_order_of(value))
    elif type(value) in NUMBERS:
        kind = NumberKind(type(value))
    else:
        raise Unfit(
            f"is {a(value)}, which has no fixed size",
            "A sample is made of tensors, numpy arrays and numbers in dicts, lists, tuples and dataclasses; RaggedCache also "
            "holds str, bytes and more",
        )
    shape = tuple(getattr(value, "shape", ()))
    leaf = Leaf(kind, shape if kind.order is None else tuple(shape[dim] for dim in kind.order), exact)
    leaf.encode(value)  # refuses now, not in epoch 1, a value that cannot be stored
    return leaf


_ALL: tuple[type[Kind], ...] = (
    *(EnumKind, TensorKind, ScalarKind, ArrayKind, NarrowKind),  # of several bases the first counts
    *(NumberKind, NumbersKind, TextKind, PickleKind),
)


_BY_BASE = {kind.base: kind for kind in _ALL if kind.base is not None}


KINDS: dict[str, type[Any]] = {kind.name: kind for kind in _ALL if kind is not TextKind}
"""The kinds by name; all other names are those of texts.py."""


ENCODERS: dict[type, Callable[[Any], Encoded]] = {cls: kind.encode for kind in _ALL for cls in kind.types}
"""The functions that encode leaves, by exact type; `encode_other` takes those of other types."""
