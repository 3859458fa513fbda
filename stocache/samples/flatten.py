"""Take a sample apart, into containers and leaves; and walk through it."""

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.samples.leaves.type_lookup import (
    Unfit,
    name_of,
)
from stocache.samples.pytree import SUBCLASSED, Container, check_attribute, is_image, is_namedtuple, is_object, state_of
from stocache.system.objects import attribute_of, base_of, slots_of, static_attribute, vars_of

_LEAVES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, complex, str, bytes})


_ATOMS = frozenset({int, float, bool, complex, str, bytes, type(None), np.bool_})  # immutable: a sample may hold one twice


def flatten_one(value: Any) -> tuple[Container, list[Any]] | None:
    """Return the container and the parts of ``value``; None for a leaf, or where they would not make it again."""
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
    if cls in _BY_TYPE:
        return _BY_TYPE[cls](value)
    if isinstance(value, tuple):
        return _flatten_tuple(value) or _flatten_subclass(value)
    if isinstance(value, Tensor):
        try:
            plain = value.as_subclass(Tensor)
        except Exception:  # its data is elsewhere
            return None
        return Container("tensor", cls, ("data", "attributes")), [plain, dict(vars(value))]
    if isinstance(value, Mapping) and (mapping := _flatten_mapping(value)) is not None:
        return mapping
    if is_image(cls):
        if (pages := attribute_of(value, "n_frames", 1)) > 1:
            raise Unfit(f"is an image of {pages} pages, of which one would be kept", "Return a list of images", final=True)
        try:
            return _flatten_image(value)
        except Exception:  # its file is truncated, or was closed before it was read
            return None
    return _flatten_object(value) if base_of(cls) is object else _flatten_subclass(value)


def _flatten_tuple(value: Any) -> tuple[Container, list[Any]] | None:
    cls = type(value)
    if not is_namedtuple(cls):
        return _checked(Container("tuple", cls, tuple(range(len(value)))), list(value), value)
    return None if _attributes_of(value) else (Container("namedtuple", cls, value._fields), list(value))


def _flatten_mapping(value: Any) -> tuple[Container, list[Any]] | None:
    sized = static_attribute(type(value), "batch_size") is not None
    try:
        extra = tuple(value.batch_size) if sized else ()
        container = Container("tensordict" if sized else "mapping", type(value), tuple(value.keys()), extra)
        return _checked(container, [value[key] for key in container.keys], value)
    except Exception:  # whatever the class raises
        return None


def _flatten_image(image: Any) -> tuple[Container, list[Any]] | None:
    """Return the state of an image; and its Exif data, where that is not in ``image.info`` but in its file, as of a TIFF."""
    info, mode, size, *rest = image.__getstate__()
    state = [info, mode, tuple(size), *rest]  # of a subclass of tuple where a library has replaced Image.size
    container = Container("image", type(image), tuple(range(len(state))))
    if "exif" in info or not (exif := image.getexif()):
        return container, state
    if exif.keys() & _IFDS:  # their tags are in the file
        return None
    return dataclasses.replace(container, keys=(*container.keys, "exif")), [*state, dict(exif)]


_IFDS = {0x8769, 0x8825, 0xA005, 0x014A}  # tags of Exif that are places of further tags


def _flatten_object(value: object) -> tuple[Container, list[Any]] | None:
    """Return the attributes of an object; None where two of them are one, or it has only its identity."""
    cls, attributes = type(value), _attributes_of(value)
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if field.name in attributes]
        names += [name for name in attributes if name not in names]
        return Container("dataclass", cls, tuple(names)), [attributes[name] for name in names]
    if not attributes or not is_object(cls) or not _are_apart(value):
        return None
    return Container("object", cls, tuple(attributes)), list(attributes.values())


def _flatten_subclass(value: Any) -> tuple[Container, list[Any]] | None:
    """Return the value without its class, and the attributes that the class does not give it; None where it has others."""
    cls, base = type(value), base_of(type(value))
    if base not in SUBCLASSED or static_attribute(cls, "__del__") is not None:
        return None
    try:
        plain = SUBCLASSED[base].plain(value)
        again = SUBCLASSED[base].make(cls, plain)
        own, given = _attributes_of(value), _attributes_of(again)
        same = type(again) is cls and given.keys() <= own.keys() and (base is not np.ndarray or again.dtype == value.dtype)
        own = {name: attribute for name, attribute in own.items() if not (name in given and _is_given(attribute, given[name]))}
        for name in own:
            check_attribute(cls, cls.__name__, name)
    except Exception:  # whatever the class raises for an array; or the attribute is a property
        return None
    return (Container("subclass", cls, ("data", "attributes")), [plain, own]) if same and _are_apart(value) else None


def _flatten_objects(value: Any) -> tuple[Container, list[Any]] | None:
    """Return the items and the shape of an array of objects; None where it has them in another order than that of C."""
    if value.dtype.kind != "O" or not value.flags.c_contiguous:
        return None
    return Container("objects", np.ndarray, ("items", "shape")), [value.reshape(-1).tolist(), value.shape]


def _attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object, in its slots as well, without asking its class."""
    attributes = dict(vars_of(value))
    for slot, item in slots_of(value):
        attributes.setdefault(slot.__name__, item)
    return attributes


def _is_given(attribute: object, given: object) -> bool:
    return attribute is given or (type(attribute) is type(given) is dict and not attribute and not given)


def _are_apart(value: object) -> bool:
    """Return whether an object has no part twice, nor itself as a part: the copies would change apart from each other."""
    seen, waiting = set[int](), [value]
    while waiting:
        part = waiting.pop()
        is_own = base_of(type(part)) is object and not isinstance(part, _FIXED)
        if is_own or isinstance(part, _CHANGING):
            if id(part) in seen:
                return False
            seen.add(id(part))
        if isinstance(part, dict):
            waiting += dict.values(part)
        elif isinstance(part, list | tuple) and not set(map(type, inner := _items_of(part))) <= _ATOMS:
            waiting += inner
        if is_own or isinstance(part, dict | list | tuple):
            waiting += _attributes_of(part).values()
    return True


def _items_of(values: Any) -> list[Any]:
    return list((list if isinstance(values, list) else tuple).__iter__(values))


_FIXED = Enum, PurePath, Fraction


_CHANGING = Tensor, np.ndarray, list, dict, set, deque, bytearray


def _flatten_set(value: Any) -> tuple[Container, list[Any]]:
    same = set(map(type, value)) <= {str} or set(map(type, value)) <= {int}
    items = sorted(value, key=None if same else repr)  # so that equal samples make equal blocks
    return Container("set", type(value), ("items",)), [items]


def _flatten_defaultdict(value: Any) -> tuple[Container, list[Any]] | None:
    if value.default_factory is not None:
        try:
            name_of(value.default_factory)
        except Unfit:
            return None
    return Container("defaultdict", defaultdict, tuple(value), (value.default_factory,)), list(value.values())


_BY_TYPE: dict[type, Callable[[Any], tuple[Container, list[Any]] | None]] = {
    set: _flatten_set,
    frozenset: _flatten_set,
    deque: lambda value: (Container("deque", deque, ("items", "maxlen")), [list(value), value.maxlen]),
    slice: lambda value: (Container("slice", slice, ("start", "stop", "step")), [value.start, value.stop, value.step]),
    defaultdict: _flatten_defaultdict,
    np.ndarray: _flatten_objects,
    np.memmap: lambda value: (Container("memmap", np.memmap, ("data",)), [np.asarray(value)]),  # now in memory
}


def _checked(container: Container, parts: list[Any], value: object) -> tuple[Container, list[Any]] | None:
    """Return container and parts; None where they would make a value that differs from ``value``."""
    try:
        again = container.unflatten_fn()(parts)
        same = type(again) is type(value) and state_of(again, container) == state_of(value, container)
        if isinstance(value, Mapping):
            same = same and tuple(again.keys()) == container.keys
    except Exception:  # the class is made in another way
        return None
    return (container, parts) if same else None


def tree_map(function: Callable[[Any], object], tree: object) -> Any:
    """Return a tree of containers with ``function`` applied to each leaf."""
    found = flatten_one(tree)
    if found is None:
        return function(tree)
    container, parts = found
    return container.unflatten_fn()([tree_map(function, part) for part in parts])


def leaves(tree: object) -> list[Any]:
    """Return the leaves of a tree, in order."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def echoes_index(samples: Mapping[int, object]) -> bool:
    """Return whether all samples hold their index: a number that has the type of the index."""
    return bool(samples) and all(_holds(sample, idx) for idx, sample in samples.items())


def _holds(tree: object, idx: int) -> bool:
    parted = flatten_one(tree)
    return type(tree) is int and tree == idx if parted is None else any(_holds(part, idx) for part in parted[1])
