"""Containers as records describe them: the name of the class and the keys, written and read.

Keys are written as Python literals, so that 1, 1.0 and True stay apart.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from stocache.samples.flatten import flatten_one
from stocache.samples.leaves.kind import Encoded
from stocache.samples.leaves.kinds import encode_other, encoder_of
from stocache.samples.leaves.plain_kinds import encode_numbers, member_bytes
from stocache.samples.leaves.type_lookup import (
    Unfit,
    Unresolved,
    enum_class,
    member_of,
    name_of,
    resolve,
)
from stocache.samples.pytree import DEEP, Container, check_class, check_image

_PLAIN_CONTAINERS = frozenset({dict, list, tuple, type(None)})


def name_container(container: Container, parts: object) -> str:
    """Return the name of a container's class.

    Raises:
        Unfit: the container could not be put together again where its class is only looked up.
    """
    cls, kind = container.cls, container.kind
    name = name_of(cls)
    if cls not in _PLAIN_CONTAINERS:
        try:
            check_class(kind, cls, name, container.keys, container.extra)
            if kind == "image":
                check_image(parts)
        except (Unresolved, ValueError, TypeError) as error:
            raise Unfit(f"is a {cls.__name__}, which could not be put together again: {str(error).rstrip('.')}") from None
    return name


def container_of(kind: Any, name: Any, keys: tuple[object, ...], extra: Any, parts: int, trusted: bool) -> Container:
    """Return the container that stored data describes, of ``parts`` parts; ``trusted`` as in `type_lookup.resolve`.

    Raises:
        Unresolved: its class is not here, has changed, or may not be used so.
        ValueError, TypeError: it is not a container.
    """
    cls = resolve(name, trusted)
    if len(keys) != parts:
        raise ValueError("a container has more or fewer keys than parts")
    hash(keys)
    check_class(kind, cls, name, keys, extra)
    return Container(kind, cls, keys, tuple(extra))


def take_apart(value: Any, depth: int) -> tuple[Encoded | None, Container, Sequence[Any]]:
    """Return a leaf, encoded; or the container of a value, and its parts.

    A list or tuple of numbers is a leaf; of others the container is without keys.

    Args:
        depth: how many containers the value is in.

    Raises:
        Unfit: it is not of any kind, would not come back the same, or is within too many containers.
    """
    encode, sequence = encoder_of(value), _SEQUENCES.get(type(value))
    parted: tuple[Container, Sequence[Any]] | None = None
    if encode is not None:
        encoded: Encoded | None = encode(value)
    elif sequence is not None:
        encoded, parted = encode_numbers(value), (sequence, value)
    else:
        parted = flatten_one(value)
        encoded = encode_other(value) if parted is None else None
    if encoded is not None or parted is None:
        return encoded, _LEAF, ()
    if depth >= DEEP:
        raise Unfit(f"is a container within {DEEP} others, which is the limit", "Use fewer levels")
    return None, *parted


_LEAF = Container("none", type(None), ())
_SEQUENCES = {cls: Container(cls.__name__, cls, ()) for cls in (list, tuple)}


_PLAIN_KEYS = {str, int, bytes, type(None)}  # keys that records write as they are; of others they write the type, too
_CODECS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{cls: (cls, cls) for cls in (str, int, bytes, bool)},
    **{float: (float.hex, float.fromhex), complex: (str, complex), type(None): (str, lambda text: None)},
}
_READERS = {cls.__name__: read for cls, (_, read) in _CODECS.items()}


def _check_key(key: object) -> None:
    """Raise Unfit unless a key can be written down."""
    if type(key) is tuple:
        for part in key:
            _check_key(part)
    elif isinstance(key, Enum):
        member_bytes(key)
    elif type(key) not in _CODECS:
        raise Unfit(f"has a key, {key!r:.100}, that is not a str, number, enum member or tuple of such", "Use others")


def keys_to_literals(keys: tuple[object, ...]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return keys as a record writes them, and ("coded",) where their types are written, too, else ().

    Raises:
        Unfit: one cannot be written down.
    """
    if set(map(type, keys)) <= _PLAIN_KEYS:
        return keys, ()
    return tuple(map(_to_literal, keys)), ("coded",)


def keys_from_literals(keys: Any, coded: bool, trusted: bool) -> tuple[Any, ...]:
    """Undo `keys_to_literals`; ``trusted`` as in `type_lookup.resolve`.

    Raises:
        LookupError, ValueError, TypeError: they are not such keys.
        Unresolved: the class of an enum member is not here.
    """
    if coded:
        return tuple(_from_literal(key, trusted) for key in keys)
    if type(keys) is not tuple or not set(map(type, keys)) <= _PLAIN_KEYS:
        raise ValueError(f"{keys!r:.80} are not keys")
    return keys


def _to_literal(key: object) -> Any:
    _check_key(key)
    if type(key) is tuple:
        return "tuple", tuple(map(_to_literal, key))
    if isinstance(key, Enum):
        name, data = member_bytes(key)
        return "enum", name, data.decode()
    return type(key).__name__, _CODECS[type(key)][0](key)


def _from_literal(code: Any, trusted: bool) -> Any:
    kind, value, *rest = code
    if kind == "tuple":
        return tuple(_from_literal(part, trusted) for part in value)
    if kind == "enum":
        return member_of(enum_class(value, trusted), *rest)
    return _READERS[kind](value)
