"""Take the containers of a sample apart, and put them together again as before.

A container is a dict, OrderedDict, list, tuple, namedtuple, dataclass or None; a subclass of Tensor (MetaTensor, tv_tensors),
whose parts are the plain tensor and its attributes; a PIL image, whose parts are the state that it pickles, and Exif data; a
memmap of numpy, whose part is the array.

To add a kind of container, write a row of `_KINDS` and a branch of `flatten_one`.
"""

import json
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.leaves.type_lookup import Unfit, Unresolved, check_size, class_text, derives, is_class
from stocache.system.objects import static_attribute

DEEP = 60
"""The most containers within each other."""


@dataclass(frozen=True)
class Container:
    """A container without its parts.

    Attributes:
        kind: the way to put it together, a key of `_KINDS`.
        keys: one for each part.
    """

    kind: str
    cls: Any
    keys: tuple[Any, ...]

    def unflatten_fn(self) -> Callable[[list[Any]], Any]:
        """Return the function that makes the container of its parts."""
        cls, keys = self.cls, self.keys
        if self.kind == "dict":
            return lambda parts: cls(zip(keys, parts, strict=True))
        return cls if cls in (list, tuple) else partial(_KINDS[self.kind].make, self)


def key_text(key: Any) -> str:
    """Return a key as text; keys that differ in type or value, such as 1, True, "1" and 1.0, have different texts."""
    cls = type(key)
    if isinstance(key, Enum):
        return f"{class_text(cls)}.{key._name_ if key._name_ is not None else key._value_!r}"
    if cls is tuple:
        return f"({', '.join(map(key_text, key))}{',' * (len(key) == 1)})"
    return repr(key) if cls in _PLAIN_KEYS else f"{class_text(cls)}({key!r})"


_PLAIN_KEYS = frozenset({str, int, float, bool, complex, bytes, type(None)})


def _make_tuple(container: Container, parts: list[Any]) -> Any:
    """Make a tuple without the code of its class, unless that is written in C: `torch.Size` and the like need it."""
    new: Any = static_attribute(container.cls, "__new__")
    return (new if type(new) is _BUILTIN else tuple.__new__)(container.cls, parts)


_BUILTIN: Any = type(len)


def _make_dataclass(container: Container, parts: list[Any]) -> Any:
    value = object.__new__(container.cls)  # its fields are as they were; __post_init__ must not run again
    for name, part in zip(container.keys, parts, strict=True):
        object.__setattr__(value, name, part)
    return value


def _make_tensor(container: Container, parts: list[Any]) -> Any:
    tensor, attributes = parts
    if type(tensor) is not Tensor or type(attributes) is not dict:
        raise ValueError(f"a {container.cls.__name__} is made of a tensor and a dict of its attributes")
    value = tensor.as_subclass(container.cls)
    value.__dict__.update(attributes)
    return value


def _make_image(container: Container, parts: list[Any]) -> Any:
    check_image(parts)
    image, has_exif = container.cls.__new__(container.cls), container.keys[-1] == "exif"
    image.__setstate__(parts[: len(parts) - has_exif])
    if has_exif:
        image.getexif().update(parts[-1])
    return image


def is_namedtuple(cls: type) -> bool:
    """Return whether a class is a namedtuple."""
    return derives(cls, tuple) and type(static_attribute(cls, "_fields")) is tuple


def is_image(cls: type) -> bool:
    """Return whether a class is one of Pillow's images."""
    images = sys.modules.get("PIL.Image")
    return images is not None and derives(cls, images.Image)


def _are_positions(cls: Any, keys: tuple[Any, ...]) -> bool:
    return keys == tuple(range(len(keys)))


def _is_settable(cls: Any, key: Any) -> bool:
    """Return whether setting an attribute of a dataclass runs no code, and does not change its class."""
    if type(key) is not str or key in ("__class__", "__dict__", "__weakref__"):
        return False
    found = type(static_attribute(cls, key))
    return found is MemberDescriptorType or static_attribute(found, "__set__") is None


class _ContainerKind(NamedTuple):
    """A way to put containers together.

    Attributes:
        fits: whether it suits a class; asks only the method resolution order, see NOTE [ Names in data ].
        has: whether a container of the class may have these keys.
        make: makes a container of its parts; of a dict or list not used.
    """

    fits: Callable[[type], bool]
    has: Callable[[Any, tuple[Any, ...]], bool] = lambda cls, keys: True
    make: Callable[[Container, list[Any]], Any] = lambda container, parts: parts


_KINDS: dict[str, _ContainerKind] = {
    "dict": _ContainerKind(lambda cls: cls in (dict, OrderedDict)),
    "list": _ContainerKind(lambda cls: cls is list, _are_positions),
    "tuple": _ContainerKind(lambda cls: derives(cls, tuple), _are_positions, _make_tuple),
    "none": _ContainerKind(lambda cls: cls is type(None), lambda cls, keys: not keys, lambda container, parts: None),
    "namedtuple": _ContainerKind(is_namedtuple, lambda cls, keys: keys == static_attribute(cls, "_fields"), _make_tuple),
    "dataclass": _ContainerKind(
        lambda cls: type(static_attribute(cls, "__dataclass_fields__")) is dict,
        lambda cls, keys: all(_is_settable(cls, key) for key in keys),
        _make_dataclass,
    ),
    "tensor": _ContainerKind(lambda cls: derives(cls, Tensor), lambda cls, keys: len(keys) == 2, _make_tensor),
    "image": _ContainerKind(is_image, lambda cls, keys: len(keys) >= 5, _make_image),
    "memmap": _ContainerKind(
        lambda cls: cls is np.memmap, lambda cls, keys: len(keys) == 1, lambda container, parts: parts[0].view(np.memmap)
    ),
}


def check_class(kind: str, cls: Any, name: str, keys: tuple[object, ...]) -> None:
    """Raise Unresolved unless a class may be a container of a kind, with these keys. See NOTE [ Names in data ]."""
    its = _KINDS.get(kind)
    if its is None or not (is_class(cls) and its.fits(cls)):
        raise Unresolved(f"its samples are made of {name:.300}, which is not of kind {kind}.")
    if not its.has(cls, keys):
        raise Unresolved(f"its samples are made of {name:.300} with the parts {keys!r:.200}, which it cannot have here.")


_PIXEL_BITS = {"1": 1, "L": 8, "P": 8, "LA": 16, "PA": 16, "La": 16, "RGB": 24, "YCbCr": 24, "LAB": 24, "HSV": 24} | {
    **{"RGBA": 32, "RGBX": 32, "RGBa": 32, "CMYK": 32, "I": 32, "F": 32},
    **{"I;16": 16, "I;16L": 16, "I;16B": 16, "I;16N": 16},
}


_EMPTY_SIDE = 1 << 16  # the longest side of an image whose other side is 0


def check_image(parts: Any) -> None:
    """Raise ValueError unless the state of a PIL image has as many bytes of pixels as its mode and size take."""
    _, mode, size, _, data = parts[:5]
    bits = _PIXEL_BITS.get(mode) if type(mode) is str else None
    if bits is None or type(size) not in (tuple, list) or len(size) != 2:
        raise ValueError(f"an image cannot have the mode {mode!r:.50} and the size {size!r:.50}")
    width, height = map(check_size, size)
    wanted = (width * bits + 7) // 8 * height
    if len(data) != wanted or (not wanted and max(width, height) > _EMPTY_SIDE):
        raise ValueError(f"an image of {width} x {height} pixels takes {wanted} bytes, and has {len(data)}")


@dataclass(frozen=True)
class Tree:
    """A container, and of each part the tree; in place of one, whatever stands for a leaf."""

    container: Container
    children: tuple[Any, ...]


def containers_of(tree: Any) -> list[Container]:
    """Return the containers of a tree, from the outside in."""
    return [tree.container, *chain(*map(containers_of, tree.children))] if isinstance(tree, Tree) else []


def leaves_of(tree: Any) -> list[Any]:
    """Return what stands for the leaves of a tree, in order."""
    return list(chain(*map(leaves_of, tree.children))) if isinstance(tree, Tree) else [tree]


def with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return the same tree of other leaves."""
    if not isinstance(tree, Tree):
        return next(leaves)
    return Tree(tree.container, tuple([with_leaves(child, leaves) for child in tree.children]))


def joiner_of(tree: Any) -> Callable[[Any], Any]:
    """Return the function that makes a value of the sequence of its leaves; of one leaf, if ``tree`` is not a `Tree`."""
    if not isinstance(tree, Tree):
        return operator.itemgetter(0)
    if not any(isinstance(child, Tree) for child in tree.children):
        return tree.container.unflatten_fn()
    join = _joiner(tree)
    return lambda leaves: join(iter(leaves))


def _joiner(tree: Any) -> Callable[[Iterator[Any]], Any]:
    """Return the function that takes leaves from an iterator, and puts them together."""
    if not isinstance(tree, Tree):
        return next
    unflatten, joins = tree.container.unflatten_fn(), list(map(_joiner, tree.children))
    return lambda leaves: unflatten([join(leaves) for join in joins])


def sample_error(error: Unfit, where: str, root: str = "sample", pickles: bool = False) -> SampleError:
    """Return an error that names the part at fault as its user would write it: ``sample 3: sample["image"].meta["space"] is``.

    Args:
        where: the sample: "sample 3", "set_slot(3)".
        root: the name of the sample in the path to the part.
        pickles: whether allow_pickle=True would help, unless the error is final.
    """
    path = _path(error)
    remedy = error.remedy
    if pickles and not error.final:
        remedy += ", or pass allow_pickle=True" if remedy else "Pass allow_pickle=True"
    subject = f"{root}{path}" if path else "value"
    prefix = "" if path and where == root else f"{where}: "
    return SampleError(f"{prefix}{subject} {error.problem}." + f" {remedy}." * bool(remedy))


def _path(error: Unfit) -> str:
    text, owner = "", None  # the class whose attributes come next
    for container, key in reversed(error.steps):
        attributes, owner = owner, None
        if attributes is not None:
            text += _attribute(attributes, key)
        elif container.kind == "tensor":
            owner = container.cls if key == "attributes" else None
        elif container.kind in ("dataclass", "namedtuple"):
            text += _attribute(container.cls, key)
        elif container.kind == "image":
            text += ".info" if key == 0 else ""
        else:
            text += f"[{_shown(key)}]"
    return text if len(text) <= 300 else f"{text[:120]}…{text[-120:]}"


def _attribute(cls: Any, name: object) -> str:
    public = str(name).removeprefix("_")
    return f".{public if isinstance(getattr(cls, public, None), property) else name}"


def _shown(key: object) -> str:
    if isinstance(key, str):  # also a member of a str-Enum: it is equal
        return json.dumps(str.__str__(key), ensure_ascii=not key.isprintable())
    return f"{type(key).__qualname__}.{key.name}" if isinstance(key, Enum) else repr(key)
