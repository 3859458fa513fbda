"""Write and read values that have a text or bytes of their own: str, dates, paths, Decimals and more, a row for each type.

A row is for one exact type: a subclass of date or Path may hold more than its text says. Reading a value runs no code that its
bytes could choose; see NOTE [ Names in data ].
"""

import functools
import importlib.util
import json
import os
import pathlib
import zoneinfo
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import torch

from stocache.samples.leaves.type_lookup import TORCH_DTYPES, torch_dtype


class Text(NamedTuple):
    """How values of one type become bytes and come back.

    Attributes:
        cls: the type.
        to_bytes: returns the bytes of a value; None if the value would not come back the same.
        from_bytes: returns the value of a buffer.
    """

    cls: Any
    to_bytes: Callable[[Any], bytes | None]
    from_bytes: Callable[[Any], Any]


def _text(cls: Any, write: Callable[[Any], str | None], read: Callable[[str], object]) -> Text:
    """Return a row whose bytes are text, given the functions that write and read the text."""

    def to_bytes(value: object) -> bytes | None:
        text = write(value)
        return None if text is None else text.encode("utf-8", "surrogatepass")

    def from_bytes(data: Any) -> Any:
        try:
            return read(str(data, "utf-8", "surrogatepass"))
        except Exception as error:  # whatever the class raises
            raise ValueError(f"{bytes(data)!r:.50} is not a {cls.__name__}: {error}") from None

    return Text(cls, to_bytes, from_bytes)


def _integers(*numbers: int) -> str:
    return " ".join(f"{number:x}" for number in numbers)  # Python limits decimal digits to 4300


def _parsed(text: str) -> list[int]:
    return [int(number, 16) for number in text.split()]


def _write_clock(value: Any) -> str | None:
    """Return a time or datetime as text, a JSON list: ISO form without a zone, fold, zone. None as `_write_zone`."""
    zone = _write_zone(value.tzinfo)
    return json.dumps([value.replace(tzinfo=None).isoformat(), value.fold, *zone]) if zone is not None else None


def _read_clock(cls: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        iso, fold, *zone = json.loads(text)
        return cls.fromisoformat(iso).replace(fold=fold, tzinfo=_read_zone(zone))

    return read


def _write_zone(zone: tzinfo | None) -> list[Any] | None:
    """Return a zone as a list: of nothing, a key, or an offset and perhaps a name. None for zones of other classes."""
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


@functools.lru_cache(maxsize=512)
def _zone_of(key: str) -> tzinfo:
    """Return the time zone of a key. ZoneInfo imports the package tzdata only for a zone that it has and the system does not.

    Raises:
        ValueError: the zone is not here.
    """
    spec = importlib.util.find_spec("tzdata")  # imports nothing
    packages = [] if spec is None else spec.submodule_search_locations or []
    folders = [*zoneinfo.TZPATH, *(os.path.join(package, "zoneinfo") for package in packages)]
    if not any(os.path.isfile(os.path.join(folder, key)) for folder in folders):
        raise ValueError("there is no such time zone here")
    return ZoneInfo(key)  # refuses keys that lead out of these folders


_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

TEXTS: dict[str, Text] = {
    "str": _text(str, str, str),
    "bytes": Text(bytes, bytes, bytes),
    "bytearray": Text(bytearray, bytes, bytearray),
    "long": Text(  # an int beyond 64 bits
        int,
        lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
        lambda data: int.from_bytes(data, "little", signed=True),
    ),
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
    "torch.dtype": _text(torch.dtype, _DTYPE_NAMES.get, torch_dtype),
    "torch.device": _text(torch.device, str, torch.device),
} | {
    cls.__name__: _text(cls, str, cls)
    for cls in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}
"""The rows, by the name of the kind in records and blocks."""

TEXT_NAMES: dict[type, str] = {text.cls: name for name, text in TEXTS.items()}
"""The names of the rows, by exact type."""
