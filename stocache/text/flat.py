"""The flat arguments that `StreamLoader` had before its formats and options; they work for one version and warn."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, ParamSpec

from stocache.cache.options import CacheOptions
from stocache.errors import StreamError
from stocache.system.deprecation import warn_renamed
from stocache.text.formats import CsvFormat, CustomFormat, FixedWidthFormat, JsonLinesFormat, TextFormat
from stocache.text.options import ReadOptions, check_choice

_P = ParamSpec("_P")


@dataclass(frozen=True)
class _CsvFormat(CsvFormat):
    """A `CsvFormat` from format="delimited", which the states of that time contain."""

    kind: ClassVar[str | None] = "delimited"


_FORMATS: dict[str | None, type[TextFormat]] = {
    None: CsvFormat,
    "delimited": _CsvFormat,
    "fixed": FixedWidthFormat,
    "jsonl": JsonLinesFormat,
}
_SHORT = ("delimiter", "skip_header", "columns", "label_columns")  # these stay
_FORMAT = ("widths", "parse", "dtype", "label_dtype", "comments", "nan", "on_error", "max_line_bytes")
_CACHE = ("name", "persist", "fingerprint")
_READ = ("engine", "multiprocessing_context", "storage_options", "progress")


def flat_arguments(init: Callable[_P, None]) -> Callable[_P, None]:
    """Return ``StreamLoader.__init__`` with support for the old flat arguments."""

    @functools.wraps(init)
    def call(*arguments: _P.args, **options: _P.kwargs) -> None:
        _group(options)
        init(*arguments, **options)

    return call


def _group(flat: dict[str, Any]) -> None:
    """Replace flat arguments by the objects they belong to."""
    kind = flat.pop("format") if isinstance(flat.get("format"), str) else None
    which = _format_class(kind, flat.get("parse"), flat.get("widths"))
    given = _take(flat, _FORMAT, "format", which)
    if kind is not None:
        warn_renamed(f"format={kind!r}", f"format={_name(which)}(…)", stacklevel=5)
    if kind is not None or given:
        given |= {name: flat.pop(name) for name in _SHORT if name in flat}
        known = {field.name for field in fields(which)}
        flat["format"] = which(**{name: value for name, value in ({"delimiter": "\t"} | given).items() if name in known})
    if given := _take(flat, _CACHE, "cache", CacheOptions):
        flat["cache"] = CacheOptions(flat.pop("size_limit_gib", None) or 0, **given)
    if given := _take(flat, _READ, "read", ReadOptions):
        flat["read"] = ReadOptions(**given)


def _format_class(kind: str | None, parse: Any, widths: Any) -> type[TextFormat]:
    check_choice("format", kind, tuple(_FORMATS))
    if parse is not None and kind is not None:
        raise StreamError(f"parse and format={kind!r} are two ways to parse. Give one.")
    if (widths is None) == (kind == "fixed"):
        raise StreamError(f"format={kind!r} with widths={widths}: widths are for format='fixed', which needs them.")
    return _FORMATS[kind] if parse is None else CustomFormat


def _take(flat: dict[str, Any], names: tuple[str, ...], group: str, kind: type) -> dict[str, Any]:
    """Remove the arguments of a group, and warn of each. Raises StreamError if the group is given, too."""
    given = {name: flat.pop(name) for name in names if name in flat}
    if given and flat.get(group) is not None:
        raise StreamError(f"{min(given)} belongs to {group}=. Pass it to {type(flat[group]).__name__}.")
    for name in given:
        warn_renamed(f"{name}=", f"{group}={_name(kind)}({name}=…)", stacklevel=6)
    return given


def _name(kind: type) -> str:
    return kind.__name__.lstrip("_")
