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
from dataclasses import replace
from typing import Any

import numpy as np

from stocache.samples.leaves.array_kinds import ArrayKind, ScalarKind, TensorKind, dtype_of
from stocache.samples.leaves.kind import Description, Differs, Encoded, Kind, Leaves, Write, no_bytes, stream_of
from stocache.samples.leaves.layout import (
    Make,
)
from stocache.samples.leaves.narrow import Narrowing, find
from stocache.samples.leaves.plain_kinds import EnumKind, NumberKind, NumbersKind, PickleKind, TextKind, decoder_error
from stocache.samples.leaves.type_lookup import (
    Unfit,
)
from stocache.system.objects import is_decoder


def encode_pickle(value: object) -> Encoded:
    """Return a value, pickled. Raises Unfit where it does not pickle."""
    return PickleKind.encode(value)


def kind_of(description: Description) -> Kind:
    """Return the kind of a leaf in a record. Raises ValueError, TypeError or LookupError where it is not one."""
    name, *facts = description
    return KINDS[name](*facts) if name in KINDS else TextKind(name, *facts)


def encode_other(value: object) -> Encoded:
    """Return a leaf that is not of a type in `ENCODERS`, encoded.

    Raises:
        Unfit: it is not of any kind, or would not come back the same.
    """
    for base, kind in _BY_BASE.items():
        if isinstance(value, base):
            return kind.encode(value)
    raise decoder_error(value) if is_decoder(type(value)) else no_bytes(value)


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
        dtype = dtype_of(self._kind)
        if dtype is None or not all(type(number) in (int, float) and number for number in (divisor, factor, *std)):
            raise ValueError(f"{leaf!r:.80} does not hold numbers")
        if stored not in ("|u1", "<i2", "<u2") or len(mean) != len(std) or not all(type(number) is float for number in mean):
            raise ValueError(f"{stored!r:.20}, {mean!r:.80}: this is no way to make numbers")
        self._leaf, self._last, self.dims = leaf, bool(last), self._kind.dims
        self._narrowing = Narrowing(dtype.str, stored, divisor, factor, tuple(mean), tuple(std))
        self.itemsize = np.dtype(stored).itemsize
        self.stream = stream_of(self.itemsize)

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


def narrowed(encoded: Encoded) -> Encoded:
    """Return a leaf as the integers that it is made of, if that is so."""
    description, _, data, shape = encoded
    dtype = dtype_of(kind_of(description)) if description[0] in ("tensor", "array") else None
    if dtype is None or dtype.hasobject or not dtype.itemsize or not math.prod(shape):
        return encoded
    values = np.frombuffer(data, dtype)
    way = find([values], shape, for_all=False)
    if way is None:
        return encoded
    facts = way.stored, way.divisor, way.factor, way.mean, way.std, way.inner == 1
    return ("narrow", description, *facts), stream_of(np.dtype(way.stored).itemsize), way.narrow(values), shape


_ALL: tuple[type[Kind], ...] = (
    *(EnumKind, TensorKind, ScalarKind, ArrayKind, _NarrowKind),  # of several bases the first counts
    *(NumberKind, NumbersKind, TextKind, PickleKind),
)


_BY_BASE = {kind.base: kind for kind in _ALL if kind.base is not None}


KINDS: dict[str, type[Any]] = {kind.name: kind for kind in _ALL if kind is not TextKind}
"""The kinds by name; all other names are those of texts.py."""


ENCODERS: dict[type, Callable[[Any], Encoded]] = {cls: kind.encode for kind in _ALL for cls in kind.types}
"""The functions that encode leaves, by exact type; `encode_other` takes those of other types."""


def encoder_of(value: Any) -> Callable[[Any], Encoded] | None:
    """Return the function that encodes a value; None where it has parts, or is for `encode_other`."""
    return ENCODERS.get(type(value))
