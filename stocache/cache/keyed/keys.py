"""Write the keys of a `KeyedCache` as bytes: equal keys of one type alike, and all others differently.

NOTE [ Keys ]
    The bytes of a key begin with its type, so 1, 1.0, True and "1" are different keys, unlike in a dict: a function may return
    something else for each of them. A tuple has the length of each part before it. The bytes are stored in front of the value
    and compared whenever their hash is found, so two keys never share a value, whatever their hashes.
"""

import enum
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np
from xxhash import xxh3_128_intdigest

from stocache.errors import CacheKeyError

_LENGTH = struct.Struct("<Q")
_pack_length = _LENGTH.pack
_PADDING = [bytes(-size & 7) for size in range(8)]
_FLOAT = struct.Struct("<d")
_MOST_NESTED = 50  # tuples


Key: TypeAlias = tuple[bytes, int]
"""A key as it is stored: its *prefix*, which lies before the record of the value, and the XXH3-128 of its bytes. The prefix is
the length of the bytes, and the bytes, up to a multiple of 8. (A plain tuple: a class would cost a tenth of a hit.)"""


def key_of(key: object) -> Key:
    """Return a key as it is stored.

    Raises:
        CacheKeyError: it is of another type than str, bytes, int, bool, None, float, an enum, a path, or a tuple of these; or
            NaN, which equals nothing.
    """
    encode = _ENCODERS.get(type(key))
    text = _encode(key) if encode is None else encode(key)
    size = len(text)
    return _pack_length(size) + text + _PADDING[size & 7], xxh3_128_intdigest(text)


def length_of(head: bytes | memoryview) -> int:
    """Return the length of the bytes of a key, given the beginning of its prefix."""
    return int(_LENGTH.unpack_from(head)[0])


def _encode(key: object, depth: int = 0) -> bytes:
    encode = _ENCODERS.get(type(key))
    if encode is not None:
        return encode(key)
    if isinstance(key, tuple):  # also a namedtuple, which equals a tuple
        if depth >= _MOST_NESTED:
            raise CacheKeyError(f"a key has more than {_MOST_NESTED} tuples within one another. Make it flatter.")
        texts = [b"("]
        for part in key:
            encode = _ENCODERS.get(type(part))
            text = _encode(part, depth + 1) if encode is None else encode(part)
            texts += _pack_length(len(text)), text
        return b"".join(texts)
    if isinstance(key, enum.Enum):
        cls = f"{type(key).__module__}:{type(key).__qualname__}".replace("__mp_main__", "__main__")
        if isinstance(key, enum.Flag):
            return b"g" + _text(f"{cls}:{key.value}")
        return b"e" + _text(f"{cls}:{key.name}")
    if isinstance(key, PurePath):
        return b"p" + _text(str(key))
    if isinstance(key, np.generic) and key.dtype.kind in "biufSU" and not isinstance(item := key.item(), np.longdouble):
        return _encode(item, depth)
    for base, plain in _PLAIN.items():  # of a subclass, whatever it overrides
        if isinstance(key, base):
            return _ENCODERS[base](plain(key))
    raise CacheKeyError(
        f"a key of type {type(key).__name__} has no bytes that stay the same: {key!r:.100}. Use str, bytes, int, bool, None, "
        f"float, an enum member, a path, or a tuple of these; of an array or a list, tuple(x)."
    )


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _number(number: float) -> bytes:
    if math.isnan(number):
        raise CacheKeyError("NaN equals nothing, so it cannot be a key. Use None.")
    return b"f" + _FLOAT.pack(number)


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    str: lambda key: b"s" + _text(key),
    bytes: lambda key: b"b" + key,
    bool: lambda key: b"t" if key else b"u",
    int: lambda key: b"i" + key.to_bytes((key.bit_length() + 8) // 8, "little", signed=True),
    float: _number,
    type(None): lambda key: b"n",
}


_PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    bytes: lambda key: b"".join([key]),
    int: int.__index__,
    float: float.__float__,
}


def decode(text: bytes) -> Any:
    """Return the key that has these bytes.

    Raises:
        CacheKeyError: it is a member of an enum whose module is not imported here.
    """
    kind, rest = text[:1], text[1:]
    if kind == b"(":
        parts = []
        while rest:
            length = length_of(rest)
            parts.append(decode(rest[_LENGTH.size : _LENGTH.size + length]))
            rest = rest[_LENGTH.size + length :]
        return tuple(parts)
    if kind in (b"e", b"g"):
        return _member(rest.decode("utf-8", "surrogatepass"), kind == b"g")
    return _DECODERS[kind](rest)


def _member(text: str, is_flag: bool) -> Any:
    module, qualname, name = text.split(":", 2)
    found: Any = sys.modules.get(module)
    try:
        for part in qualname.split("."):
            found = getattr(found, part)
        return found(int(name)) if is_flag else found[name]
    except (AttributeError, KeyError):
        raise CacheKeyError(f"a key is {qualname}.{name}, and {module} is not imported here. Import it first.") from None


_DECODERS: dict[bytes, Callable[[bytes], Any]] = {
    b"s": lambda rest: rest.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"t": lambda rest: True,
    b"u": lambda rest: False,
    b"i": lambda rest: int.from_bytes(rest, "little", signed=True),
    b"f": lambda rest: _FLOAT.unpack(rest)[0],
    b"n": lambda rest: None,
    b"p": lambda rest: Path(rest.decode("utf-8", "surrogatepass")),
}
