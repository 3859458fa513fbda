"""Leaves that are neither tensors, arrays nor numbers: how a value of each kind becomes bytes, and comes back from them.

A kind is of one exact type: a subclass of date or Path may hold more than its text says, and is not of that kind. Reading runs
no code that the bytes could choose; see NOTE [ Names in data ].
"""

import functools
import importlib.util
import json
import os
import pathlib
import re
import zoneinfo
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Flag
from fractions import Fraction
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import torch

from stocache.errors import SampleError
from stocache.samples.type_lookup import TORCH_DTYPES, Unresolved, find_class, import_class, is_class, member_of, torch_dtype


class Unfit(SampleError):
    """Why a part of a sample cannot be stored, said of the part: "is a lock, which has no bytes of its own".

    The way to the part is added by the containers around it, from the inside out; see `pytree.told`.

    Attributes:
        problem, remedy: what is wrong, and what to do; neither ends with a full stop.
        final: whether pickling is not the way out.
        steps: containers and keys in them, from the inside out.
        row: of samples that are taken apart together, the row of the one at fault.
    """

    def __init__(self, problem: str, remedy: str = "", final: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.remedy, self.final = problem, remedy, final
        self.steps: list[tuple[Any, Any]] = []
        self.row = 0

    def within(self, container: Any, key: Any) -> "Unfit":
        """Return the same error, of a part of ``container``."""
        self.steps.append((container, key))
        return self


def a(value: Any) -> str:
    """Return the name of a value's type, with an article."""
    return f"a {type(value).__name__}"


# ---------------------------------------------------------------------------------------------------- names

_classes: dict[str, Any] = {}


def name_of(cls: Any) -> str:
    """Return the name by which every process finds a class or a function.

    Raises:
        Unfit: it has none: it was defined within a function, or replaced.
    """
    module, path = getattr(cls, "__module__", None), getattr(cls, "__qualname__", None)
    name = f"{'__main__' if module == '__mp_main__' else module}:{path}"  # what spawn calls the script in a child
    if _classes.get(name) is not cls:
        try:
            found = find_class(name) if is_class(cls) else import_class(name)
        except (Unresolved, ImportError, AttributeError, ValueError):
            found = None
        if found is not cls:
            raise Unfit(f"is of a class that other processes do not find as {name}", "Define it at the top of a module")
        _classes[name] = cls
    return name


# ---------------------------------------------------------------------------------------------------- enum members


def member_name(member: Any) -> str | None:
    """Return the name of an enum member, of combined flags "A|B", with the bits that have no name as a number at the end; None
    where that does not lead back to it."""
    cls, name = type(member), member._name_
    try:
        if cls.__members__.get(name) is not member:
            if not isinstance(member, Flag):
                return None
            value, rest, names = member._value_, member._value_, []
            for name, single in cls.__members__.items():
                if single._value_ and value & single._value_ == single._value_:
                    names.append(name)
                    rest &= ~single._value_
            name = "|".join(names + [str(rest)] * bool(rest or not names))
        again = member_of(cls, name)
    except Exception:  # whatever a class does that makes its members in another way
        return None
    return name if again is member or (again == member and type(again) is cls) else None


# ---------------------------------------------------------------------------------------------------- values


class Kind(NamedTuple):
    """A kind of leaf: its type; its bytes, None for a value that would not come back the same; and the value of bytes."""

    cls: Any
    to_bytes: Callable[[Any], bytes | None]
    from_bytes: Callable[[Any], Any]


def _text(cls: Any, write: Callable[[Any], str | None], read: Callable[[str], Any]) -> Kind:
    """Return a kind whose bytes are text."""

    def to_bytes(value: Any) -> bytes | None:
        text = write(value)
        return None if text is None else text.encode("utf-8", "surrogatepass")

    def from_bytes(data: Any) -> Any:
        try:
            return read(str(data, "utf-8", "surrogatepass"))
        except Exception as error:  # whatever the class raises
            raise ValueError(f"{bytes(data)!r:.50} is not a {cls.__name__}: {error}") from None

    return Kind(cls, to_bytes, from_bytes)


def _integers(*numbers: int) -> str:
    return " ".join(f"{number:x}" for number in numbers)  # decimal digits are limited to 4300


def _parsed(text: str) -> list[int]:
    return [int(number, 16) for number in text.split()]


def _write_clock(value: Any) -> str | None:
    """Return a time or datetime as text: without its zone, its fold, its zone."""
    zone = _write_zone(value.tzinfo)
    return json.dumps([value.replace(tzinfo=None).isoformat(), value.fold, *zone]) if zone is not None else None


def _read_clock(cls: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        iso, fold, *zone = json.loads(text)
        return cls.fromisoformat(iso).replace(fold=fold, tzinfo=_read_zone(zone))

    return read


def _write_zone(zone: tzinfo | None) -> list[Any] | None:
    """Return nothing for no zone, a key, or an offset (and a name); None for zones of other classes."""
    if zone is None:
        return []
    if type(zone) is ZoneInfo:
        return [zone.key] if zone.key is not None else None
    if type(zone) is timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [[offset.days, offset.seconds, offset.microseconds], *name]
    return None


def _read_zone(zone: list[Any]) -> tzinfo | None:
    if not zone:
        return None
    if isinstance(zone[0], str):
        return _zone_of(zone[0])
    return timezone(timedelta(*zone[0]), *zone[1:])


_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,3}")


@functools.lru_cache(maxsize=512)
def _zone_of(key: str) -> tzinfo:
    """Return the time zone of a key. The package tzdata, where the system has no zones, is imported only for a zone it has.

    Raises:
        ValueError: there is none.
    """
    there = _ZONE.fullmatch(key) and any(os.path.isfile(os.path.join(folder, key)) for folder in zoneinfo.TZPATH)
    if not there and _ZONE.fullmatch(key):
        spec = importlib.util.find_spec("tzdata")  # imports nothing
        there = spec is not None and any(
            os.path.isfile(os.path.join(folder, "zoneinfo", key)) for folder in spec.submodule_search_locations or ()
        )
    if not there:
        raise ValueError("there is no such time zone here")
    return ZoneInfo(key)


def _write_dtype(dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return name if name in TORCH_DTYPES else None


KINDS: dict[str, Kind] = {
    "str": _text(str, str, str),
    "bytes": Kind(bytes, bytes, bytes),
    "bytearray": Kind(bytearray, bytes, bytearray),
    "range": _text(range, lambda value: _integers(value.start, value.stop, value.step), lambda text: range(*_parsed(text))),
    "date": _text(date, date.isoformat, date.fromisoformat),
    "time": _text(time, _write_clock, _read_clock(time)),
    "datetime": _text(datetime, _write_clock, _read_clock(datetime)),
    "timedelta": _text(
        timedelta,
        lambda value: _integers(value.days, value.seconds, value.microseconds),
        lambda text: timedelta(*_parsed(text)),
    ),
    "Decimal": _text(Decimal, str, Decimal),
    "Fraction": _text(
        Fraction, lambda value: _integers(value.numerator, value.denominator), lambda text: Fraction(*_parsed(text))
    ),
    "torch.dtype": _text(torch.dtype, _write_dtype, torch_dtype),
    "torch.device": _text(torch.device, str, torch.device),
} | {
    cls.__name__: _text(cls, str, cls)
    for cls in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}

KIND_NAMES: dict[type, str] = {kind.cls: name for name, kind in KINDS.items()}
"""By exact type."""


def long_bytes(value: int) -> bytes:
    """Return the bytes of an int of any size, the kind "long"."""
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


FROM_BYTES: dict[str, Callable[[Any], Any]] = {name: kind.from_bytes for name, kind in KINDS.items()} | {
    "long": lambda data: int.from_bytes(data, "little", signed=True)
}
"""What makes values of each kind of bytes, which may be a memoryview."""
