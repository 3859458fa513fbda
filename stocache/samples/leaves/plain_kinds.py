"""The kinds of Python's numbers, lists of numbers, bytes, texts, members of enums and pickled objects."""

import pickle
import struct
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from stocache.samples.leaves.kind import (
    BYTES,
    NUMBER,
    TEXT,
    Description,
    Differs,
    Encoded,
    Kind,
    Leaf,
    Leaves,
    Make,
    Step,
    Write,
    no_bytes,
)
from stocache.samples.leaves.texts import TEXT_NAMES, TEXTS
from stocache.samples.leaves.type_lookup import Unfit, a, enum_class, member_name, member_of, name_of
from stocache.system.objects import is_decoder


class _Number(NamedTuple):
    """How numbers of one type are stored: numpy's dtype for them, the stream, and their bytes."""

    dtype: str
    stream: int
    codec: struct.Struct


NUMBERS: dict[type, _Number] = {
    int: _Number("<i8", 0, struct.Struct("q")),
    float: _Number("<f8", 0, struct.Struct("d")),
    complex: _Number("<c16", 0, struct.Struct("dd")),
    bool: _Number("?", BYTES, struct.Struct("?")),
}
_NUMBER_TYPES = {cls.__name__: cls for cls in NUMBERS}
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple}


@dataclass(frozen=True)
class NumberKind(Kind):
    """A Python int of 64 bits, float, bool or complex. A larger int is encoded as the kind "long"."""

    name, types, dims = "number", tuple(NUMBERS), 0
    type: type[int] | type[float] | type[complex]

    @classmethod
    def parse(cls, type_name: Any) -> "NumberKind":
        return cls(_NUMBER_TYPES[type_name])

    @property
    def itemsize(self) -> int:
        return NUMBERS[self.type].codec.size

    @property
    def stream(self) -> int:
        return NUMBERS[self.type].stream

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        number = type(value)
        if number is int and not -(2**63) <= value < 2**63:
            return TextKind.encode(value)  # of the kind "long"
        return ("number", number.__name__), NUMBERS[number].stream, _pack_number(value), ()

    def writer(self, description: Description) -> Write:
        number, stream, pack = self.type, self.stream, NUMBERS[self.type].codec.pack

        def write(value: object, leaves: Leaves) -> None:
            if type(value) is not number:
                raise Differs
            try:
                leaves.streams[stream].append(pack(value))
            except struct.error:  # of the kind "long"
                raise Differs from None

        return super().writer(description) if number is complex else write

    def step(self) -> Step:
        if self.type is complex:
            return super().step()
        return self.stream, NUMBER, self.itemsize, NUMBERS[self.type].codec.unpack_from

    def maker(self) -> Make:
        unpack = NUMBERS[self.type].codec.unpack_from
        if self.type is complex:
            return lambda buffer, at, count, shape, copy=False: complex(*unpack(buffer, at))
        return lambda buffer, at, count, shape, copy=False: unpack(buffer, at)[0]

    def pack(self, value: Any, leaf: Leaf) -> bytes:
        if type(value) is not self.type:
            raise Unfit(f"is {value!r:.100}, {a(value)}; the cache holds {leaf}")
        try:
            return _pack_number(value)
        except struct.error:
            raise Unfit(f"is {value!r:.100}, which exceeds 64 bits", "Give such numbers as arrays or str") from None

    def text(self, shape: tuple[int, ...]) -> str:
        return self.type.__name__


def _pack_number(value: Any) -> bytes:
    pack = NUMBERS[type(value)].codec.pack
    return pack(value.real, value.imag) if type(value) is complex else pack(value)


class NumbersKind(Kind):
    """A list or tuple of Python numbers of one type, stored as an array."""

    name = "numbers"

    def __init__(self, class_name: Any, type_name: Any) -> None:
        self._class, number = SEQUENCES[class_name], NUMBERS[_NUMBER_TYPES[type_name]]
        self._dtype, self.stream, self.itemsize = np.dtype(number.dtype), number.stream, number.codec.size

    @classmethod
    def encode(cls, value: Any) -> Encoded:
        """See `Kind.encode`. Raises Differs if the items are not numbers of one type and 64 bits."""
        number, *others = set(map(type, value))
        if others or number not in NUMBERS:
            raise Differs
        dtype, stream, _ = NUMBERS[number]
        try:
            data = np.array(value, dtype=dtype).view(np.uint8)
        except OverflowError:
            raise Differs from None
        return ("numbers", type(value).__name__, number.__name__), stream, data, (len(value),)

    def holds(self, value: Any) -> bool:
        return type(value) is self._class and bool(value)

    def maker(self) -> Make:
        cls, dtype = self._class, self._dtype

        def make(buffer: Any, at: int, count: int, shape: tuple[int, ...], copy: bool = False) -> Any:
            return cls(np.frombuffer(buffer, dtype, count, at).tolist() if count else [])

        return make


class TextKind(Kind):
    """The values of one row of texts.py, whose name is that of the kind."""

    types, dims = tuple(cls for cls in TEXT_NAMES if cls not in NUMBERS), TEXT

    def __init__(self, name: Any) -> None:
        self._cls, self._to_bytes, self._from_bytes = TEXTS[name]

    @classmethod
    def encode(cls, value: object) -> Encoded:
        name = TEXT_NAMES[type(value)]
        data = TEXTS[name].to_bytes(value)
        if data is None:
            raise no_bytes(value)
        return (name,), BYTES, data, (len(data),)

    def writer(self, description: Description) -> Write:
        cls, to_bytes = self._cls, self._to_bytes

        def write(value: object, leaves: Leaves) -> None:
            data = to_bytes(value) if type(value) is cls else None
            if data is None:
                raise Differs
            leaves.streams[BYTES].append(data)
            leaves.integers.append(len(data))

        return super().writer(description) if cls is int else write  # an int may be of the kind "number"

    def maker(self) -> Make:
        return self._from_bytes


class EnumKind(Kind):
    """The members of one enum class. Their bytes are their names."""

    name, base, dims = "enum", Enum, TEXT

    def __init__(self, class_name: Any) -> None:
        self._class = class_name

    @classmethod
    def encode(cls, value: object) -> Encoded:
        owner, data = member_bytes(value)
        return ("enum", owner), BYTES, data, (len(data),)

    def maker(self) -> Make:
        cls = enum_class(self._class)
        return lambda data: member_of(cls, str(data, "utf-8"))


def member_bytes(member: object) -> tuple[str, bytes]:
    """Return the name of the class of an enum member, and its own name as bytes.

    Raises:
        Unfit: they do not lead back to it.
    """
    name = member_name(member)
    if name is None:
        raise no_bytes(member)
    return name_of(type(member)), name.encode()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        """Refuse a decoder, whose pickle would hold a pointer."""
        if is_decoder(type(value)):
            raise decoder_error(value)
        return NotImplemented


def decoder_error(value: object) -> Unfit:
    """Return the error of an object that decodes audio or video."""
    remedy = "Return the decoded data, or the bytes of the file, and decode these after the cache"
    return Unfit(f"is {a(value)}, whose state is not in its attributes", remedy, final=True)


class PickleKind(Kind):
    """Values that are pickled, if that is allowed."""

    name, dims = "pickle", TEXT

    @classmethod
    def encode(cls, value: object) -> Encoded:
        buffer = BytesIO()
        try:
            _Pickler(buffer, protocol=5).dump(value)
            data = buffer.getvalue()
        except Unfit:  # a decoder
            raise
        except Exception as error:  # whatever the class raises
            raise Unfit(f"is {a(value)}, which cannot be pickled: {error}") from error
        return ("pickle",), BYTES, data, (len(data),)

    def maker(self) -> Make:
        return pickle.loads
