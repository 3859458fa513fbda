"""Take a sample apart, into containers and leaves; walk through it; write and read the names of its containers and their keys.

Keys are written as Python literals, so that 1, 1.0 and True stay apart.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.samples.leaves.plain_kinds import member_bytes
from stocache.samples.leaves.type_lookup import Unfit, Unresolved, enum_class, find_class, member_of, name_of
from stocache.samples.pytree import Container, check_class, check_image, is_image, is_namedtuple
from stocache.system.objects import attribute_of, base_of, slots_of, vars_of

_LEAVES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, complex, str, bytes})


def flatten_one(value: Any) -> tuple[Container, list[Any]] | None:
    """Return the container and the parts of ``value``; None for a leaf, or if they would not make it again."""
    cls = type(value)
    if cls in _LEAVES:
        return None
    if cls is dict or cls is OrderedDict:
        return Container("dict", cls, tuple(value)), list(value.values())
    if cls is list or cls is tuple:
        return Container(cls.__name__, cls, tuple(range(len(value)))), list(value)
    if value is None:
        return Container("none", cls, ()), []
    if isinstance(value, Enum):
        return None
    if cls is np.memmap:
        return Container("memmap", cls, ("data",)), [np.asarray(value)]  # now in memory
    if isinstance(value, tuple):
        return _flatten_tuple(value)
    if isinstance(value, Tensor):
        try:
            plain = value.as_subclass(Tensor)
        except Exception:  # its data is elsewhere
            return None
        return Container("tensor", cls, ("data", "attributes")), [plain, dict(vars(value))]
    if is_image(cls):
        if (pages := attribute_of(value, "n_frames", 1)) > 1:
            raise Unfit(f"is an image of {pages} pages, of which one would be kept", "Return a list of images", final=True)
        try:
            return _flatten_image(value)
        except Exception:  # its file is truncated, or was closed before it was read
            return None
    return _flatten_dataclass(value) if dataclasses.is_dataclass(cls) and base_of(cls) is object else None


def _flatten_tuple(value: Any) -> tuple[Container, list[Any]] | None:
    cls = type(value)
    if _attributes_of(value):
        return None
    named = is_namedtuple(cls)
    keys = value._fields if named else tuple(range(len(value)))
    return Container("namedtuple" if named else "tuple", cls, keys), list(value)


def _flatten_image(image: Any) -> tuple[Container, list[Any]] | None:
    """Return the state of an image; and its Exif data, if that is not in ``image.info`` but in its file, as of a TIFF."""
    info, mode, size, *rest = image.__getstate__()
    state = [info, mode, tuple(size), *rest]  # of a subclass of tuple if a library has replaced Image.size
    container = Container("image", type(image), tuple(range(len(state))))
    if "exif" in info or not (exif := image.getexif()):
        return container, state
    if exif.keys() & _IFDS:  # their tags are in the file
        return None
    return dataclasses.replace(container, keys=(*container.keys, "exif")), [*state, dict(exif)]


_IFDS = {0x8769, 0x8825, 0xA005, 0x014A}  # tags of Exif that are places of further tags


def _flatten_dataclass(value: Any) -> tuple[Container, list[Any]]:
    """Return the attributes of a dataclass, its fields first."""
    cls, attributes = type(value), _attributes_of(value)
    names = [field.name for field in dataclasses.fields(cls) if field.name in attributes]
    names += [name for name in attributes if name not in names]
    return Container("dataclass", cls, tuple(names)), [attributes[name] for name in names]


def _attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object, in its slots as well, without asking its class."""
    attributes = dict(vars_of(value))
    for slot, item in slots_of(value):
        attributes.setdefault(slot.__name__, item)
    return attributes


def tree_map(function: Callable[[Any], object], tree: object) -> Any:
    """Return a tree of containers with ``function`` applied to each leaf."""
    found = flatten_one(tree)
    if found is None:
        return function(tree)
    container, parts = found
    return container.unflatten_fn()([tree_map(function, part) for part in parts])


def leaves(tree: object) -> list[Any]:
    """Return the leaves of a tree, in order."""
    found = flatten_one(tree)
    return [tree] if found is None else [leaf for part in found[1] for leaf in leaves(part)]


_PLAIN_CONTAINERS = frozenset({dict, list, tuple, type(None)})


def name_container(container: Container, parts: object) -> str:
    """Return the name of a container's class.

    Raises:
        Unfit: the container could not be put together again if its class is only looked up.
    """
    cls, kind = container.cls, container.kind
    name = name_of(cls)
    if cls not in _PLAIN_CONTAINERS:
        try:
            check_class(kind, cls, name, container.keys)
            if kind == "image":
                check_image(parts)
        except (Unresolved, ValueError, TypeError) as error:
            raise Unfit(f"is a {cls.__name__}, which could not be put together again: {str(error).rstrip('.')}") from None
    return name


def container_of(kind: Any, name: Any, keys: Any, is_coded: bool, parts: int) -> Container:
    """Return the container that stored data describes, of ``parts`` parts; ``keys`` as `keys_to_literals` writes them.

    Raises:
        Unresolved: its class is not here, has changed, or may not be used so.
        ValueError, TypeError: it is not a container.
    """
    cls, keys = find_class(name), keys_from_literals(keys, is_coded)
    if len(keys) != parts:
        raise ValueError("a container has more or fewer keys than parts")
    hash(keys)
    check_class(kind, cls, name, keys)
    return Container(kind, cls, keys)


_PLAIN_KEYS = {str, int, bytes, type(None)}  # keys that records write unchanged; of others they write the type, too
_CODECS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{cls: (cls, cls) for cls in (str, int, bytes, bool)},
    **{float: (float.hex, float.fromhex), complex: (str, complex), type(None): (str, lambda text: None)},
}
_READERS = {cls.__name__: read for cls, (_, read) in _CODECS.items()}


def keys_to_literals(keys: tuple[object, ...]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return keys as a record writes them, and ("coded",) if their types are written, too, else ().

    Raises:
        Unfit: one cannot be written down.
    """
    if set(map(type, keys)) <= _PLAIN_KEYS:
        return keys, ()
    return tuple(map(_to_literal, keys)), ("coded",)


def keys_from_literals(keys: Any, coded: bool) -> tuple[Any, ...]:
    """Undo `keys_to_literals`.

    Raises:
        LookupError, ValueError, TypeError: they are not such keys.
        Unresolved: the class of an enum member is not here.
    """
    if coded:
        return tuple(map(_from_literal, keys))
    if type(keys) is not tuple or not set(map(type, keys)) <= _PLAIN_KEYS:
        raise ValueError(f"{keys!r:.80} are not keys")
    return keys


def _to_literal(key: object) -> Any:
    if type(key) is tuple:
        return "tuple", tuple(map(_to_literal, key))
    if isinstance(key, Enum):
        name, data = member_bytes(key)
        return "enum", name, data.decode()
    if type(key) not in _CODECS:
        raise Unfit(f"has a key, {key!r:.100}, that is not a str, number, enum member or tuple of such", "Use others")
    return type(key).__name__, _CODECS[type(key)][0](key)


def _from_literal(code: Any) -> Any:
    kind, value, *rest = code
    if kind == "tuple":
        return tuple(map(_from_literal, value))
    if kind == "enum":
        return member_of(enum_class(value), *rest)
    return _READERS[kind](value)
