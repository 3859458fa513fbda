"""Write the keys of a `KeyedCache` as bytes: equal keys of one type alike, and all others differently.

NOTE [ Keys ]
    The bytes of a key are those of `marshal`, in a version that writes equal values of one type alike in all processes. They
    begin with the type, so 1, 1.0, True and "1" are different keys, unlike in a dict: a function may return something else for
    each of them. A path is written as a list with its text, a member of an enum as a list of its class and its name: a list is
    no key. The bytes are stored in front of the value and compared whenever their hash is found, so two keys never share a
    value, whatever their hashes. `decode` reads these types only, and checks each size: `marshal.loads` trusts its bytes.
"""

import enum
import functools
import marshal
import math
import struct
import sys
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np
from xxhash import xxh3_128_intdigest

from stocache.errors import CacheKeyError, SegmentError

_VERSION = 2  # of marshal: later ones write a value in another way if something else refers to it
_pack_length = struct.Struct("<Q").pack
_PADDING = [bytes(-size & 7) for size in range(8)]
_MOST_NESTED = 50  # tuples
_AS_THEY_ARE = frozenset((str, bytes, int, bool, type(None)))
_BASES: tuple[Any, ...] = str, bytes, int, float


Key: TypeAlias = tuple[bytes, int]
"""A key as it is stored: its *prefix*, which lies before the record of the value, and the XXH3-128 of its bytes. The prefix is
the length of the bytes, and the bytes, up to a multiple of 8. (A plain tuple: a class would cost a tenth of a hit.)"""


def key_of(key: Any) -> Key:
    """Return a key as it is stored.

    Raises:
        CacheKeyError: it is of another type than str, bytes, int, bool, None, float, an enum, a path, or a tuple of these; or
            NaN, which equals nothing.
    """
    kind = type(key)
    if kind not in _AS_THEY_ARE and not (kind is tuple and _AS_THEY_ARE.issuperset(map(type, key))):
        key = _plain(key)
    text = marshal.dumps(key, _VERSION)
    size = len(text)
    return _pack_length(size) + text + _PADDING[size & 7], xxh3_128_intdigest(text)


def _plain(key: Any, depth: int = 0) -> Any:
    """Return a key as marshal can write it."""
    kind = type(key)
    if kind in _AS_THEY_ARE:
        return key
    if kind is float:
        if math.isnan(key):
            raise CacheKeyError("NaN equals nothing, so it cannot be a key. Use None.")
        return key
    if isinstance(key, tuple):  # also a namedtuple, which equals a tuple
        if depth >= _MOST_NESTED:
            raise CacheKeyError(f"a key has more than {_MOST_NESTED} tuples within one another. Make it flatter.")
        return tuple([part if type(part) in _AS_THEY_ARE else _plain(part, depth + 1) for part in key])
    if isinstance(key, enum.Enum):
        cls = f"{kind.__module__}:{kind.__qualname__}".replace("__mp_main__", "__main__")
        return [cls, key.value if isinstance(key, enum.Flag) else key.name]
    if isinstance(key, PurePath):
        return [str(key)]
    if isinstance(key, np.generic) and key.dtype.kind in "biufSU" and not isinstance(item := key.item(), np.longdouble):
        return _plain(item, depth)
    for base in _BASES:  # of a subclass, whatever it overrides
        if isinstance(key, base):
            return _plain(*base.__getnewargs__(key))
    raise CacheKeyError(
        f"a key of type {kind.__name__} has no bytes that stay the same: {key!r:.100}. Use str, bytes, int, bool, None, "
        f"float, an enum member, a path, or a tuple of these; of an array or a list, tuple(x)."
    )


def decode(prefix: memoryview) -> Any:
    """Return the key whose prefix is at the beginning of memory.

    Raises:
        CacheKeyError: it is a member of an enum whose module is not imported here.
        SegmentError: there is no key.
    """
    try:
        return _given(_read(prefix, 8)[0])
    except (LookupError, TypeError, AttributeError, ValueError, struct.error, RecursionError):
        raise SegmentError("the cache is damaged: one of its keys is none.") from None


_CONSTANTS = {b"N": None, b"T": True, b"F": False}


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    """Return a value that marshal has written at an offset, and the offset behind it."""
    kind, at = bytes(data[at : at + 1]), at + 1
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if kind == b"g":
        return struct.unpack_from("<d", data, at)[0], at + 8
    (size,), at = struct.unpack_from("<i", data, at), at + 4
    if kind == b"i":
        return size, at
    if kind == b"l":  # digits of 15 bits; the size has the sign
        number = sum(digit << 15 * place for place, digit in enumerate(struct.unpack_from(f"<{abs(size)}H", data, at)))
        return number if size > 0 else -number, at + 2 * abs(size)
    if kind in (b"u", b"s"):
        (text,) = struct.unpack_from(f"{size}s", data, at)
        return text if kind == b"s" else text.decode("utf-8", "surrogatepass"), at + size
    parts = []
    for _ in range(size):
        part, at = _read(data, at)
        parts.append(part)
    return {b"(": tuple, b"[": list}[kind](parts), at


def _given(plain: Any) -> Any:
    """Return the key that `_plain` has made plain."""
    if isinstance(plain, tuple):
        return tuple(map(_given, plain))
    if not isinstance(plain, list):
        return plain
    if len(plain) == 1:
        return Path(plain[0])
    (module, qualname), member = plain[0].split(":"), plain[1]
    try:
        found: Any = functools.reduce(getattr, qualname.split("."), sys.modules.get(module))
        return found(member) if isinstance(member, int) else found[member]
    except (AttributeError, KeyError):
        raise CacheKeyError(f"a key is {qualname}.{member}, and {module} is not imported here. Import it first.") from None
