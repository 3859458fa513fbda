"""Write the keys of a `KeyedCache` as bytes: equal keys of one type alike, and all others differently.

NOTE [ Keys ]
    The bytes of a key are written by `marshal`, in a version that writes equal values of one type alike in all processes. They
    begin with the type, so 1, 1.0, True and "1" are different keys, unlike in a dict: a function may return something else for
    each of them. A path is written as a list with its text, a member of an enum as a list of its class and its name: a list is
    no key. The bytes are stored in front of the value and compared whenever their hash is found, so two keys never share a
    value, whatever their hashes. They are never made a key again: `marshal.loads` trusts its bytes.
"""

import enum
import marshal
import math
import struct
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
from xxhash import xxh3_128_intdigest

from stocache.errors import CacheKeyError

_VERSION = 2  # of marshal: later ones write a value in a different way if something else refers to it
_pack_length = struct.Struct("<Q").pack
_PADDING = [bytes(-size & 7) for size in range(8)]
_MOST_NESTED = 50  # tuples
_AS_THEY_ARE = frozenset((str, bytes, int, bool, type(None)))
_BASES: tuple[Any, ...] = str, bytes, int, float


Key: TypeAlias = tuple[bytes, int]
"""A stored key: its *prefix*, which lies before the record of the value, and the XXH3-128 of its bytes. The prefix is
the length of the bytes, and the bytes, up to a multiple of 8. (A plain tuple: a class would cost a tenth of a hit.)"""


def key_of(key: Any) -> Key:
    """Return a key as it is stored.

    Raises:
        CacheKeyError: it is of a different type than str, bytes, int, bool, None, float, an enum, a path, or a tuple of these;
            or NaN, which equals nothing.
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
