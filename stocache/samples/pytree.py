"""Take the containers of a sample apart, and put them together again as they were.

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
from types import GetSetDescriptorType, MemberDescriptorType
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

    @property
    def identity(self) -> str:
        """Its class as text, with the modules of classes that are not Python's own types."""
        return class_text(self.cls)

    def __str__(self) -> str:
        return str(self.cls.__name__)


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
    """Make a subclass without its own code, unless that is written in C: `torch.Size` and the like need it."""
    new: Any = static_attribute(container.cls, "__new__")
    return (new if type(new) is _BUILTIN else tuple.__new__)(container.cls, parts)


_BUILTIN: Any = type(len)


def _make_namedtuple(container: Container, parts: list[Any]) -> Any:
    if len(parts) != len(container.keys):
        raise ValueError(f"a {container} of {len(parts)} parts has {len(container.keys)} fields")
    return tuple.__new__(container.cls, parts)


def _make_dataclass(container: Container, parts: list[Any]) -> Any:
    value = object.__new__(container.cls)  # its fields are as they were; __post_init__ must not run again
    for name, part in zip(container.keys, parts, strict=True):
        object.__setattr__(value, name, part)
    return value


def _make_tensor(container: Container, parts: list[Any]) -> Any:
    tensor, attributes = parts
    if type(tensor) is not Tensor or type(attributes) is not dict:
        raise ValueError(f"a {container} is made of a tensor and a dict of its attributes")
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


class _ContainerKind(NamedTuple):
    """A way to put containers together.

    Attributes:
        fits: whether it suits a class; asks only the method resolution order, see NOTE [ Names in data ].
        make: makes a container of its parts; of a dict or list not used.
        parts: how many parts there always are; None where that varies.
    """

    fits: Callable[[type], bool]
    make: Callable[[Container, list[Any]], Any] = lambda container, parts: parts
    parts: int | None = None


_KINDS: dict[str, _ContainerKind] = {
    "dict": _ContainerKind(lambda cls: cls in (dict, OrderedDict)),
    "list": _ContainerKind(lambda cls: cls is list),
    "tuple": _ContainerKind(lambda cls: derives(cls, tuple), _make_tuple),
    "none": _ContainerKind(lambda cls: cls is type(None), lambda container, parts: None, 0),
    "namedtuple": _ContainerKind(is_namedtuple, _make_namedtuple),
    "dataclass": _ContainerKind(lambda cls: type(static_attribute(cls, "__dataclass_fields__")) is dict, _make_dataclass),
    "tensor": _ContainerKind(lambda cls: derives(cls, Tensor), _make_tensor, 2),
    "image": _ContainerKind(is_image, _make_image),
    "memmap": _ContainerKind(lambda cls: cls is np.memmap, lambda container, parts: parts[0].view(np.memmap), 1),
}


def check_class(kind: str, cls: Any, name: str, keys: tuple[object, ...]) -> None:
    """Raise Unresolved unless a class may be a container of a kind, with these keys.

    See NOTE [ Names in data ].
    """
    its = _KINDS.get(kind)
    if its is None or not (is_class(cls) and its.fits(cls)):
        raise Unresolved(f"its samples are made of {name:.300}, which is not of kind {kind}.")
    if kind == "namedtuple" and (fields := static_attribute(cls, "_fields")) != keys:
        raise Unresolved(f"its samples are made of {name} with the fields {list(keys)}, and now it has {list(fields)}.")
    positions = keys[:-1] if kind == "image" and keys[-1:] == ("exif",) else keys
    if kind in ("list", "tuple", "image") and positions != tuple(range(len(positions))):
        raise Unresolved(f"its samples are made of {name} with keys that are not positions.")
    if its.parts not in (None, len(keys)) or (kind == "image" and len(positions) < 5):
        raise Unresolved(f"its samples are made of {name} with {len(keys)} parts.")
    if kind == "dataclass":
        for key in keys:
            check_attribute(cls, name, key)


def check_attribute(cls: type, name: str, key: object) -> None:
    """Raise Unresolved where setting an attribute of a dataclass would run code, or change its class."""
    if type(key) is not str or key in ("__class__", "__dict__", "__weakref__"):
        raise Unresolved(f"its samples are made of {name} with the attribute {key!r:.50}.")
    found = static_attribute(cls, key)
    if type(found) not in (type(None), MemberDescriptorType) and (
        type(found) is GetSetDescriptorType or static_attribute(type(found), "__set__") is not None
    ):
        raise Unresolved(f"its samples are made of {name}, whose attribute {key} is a property.")


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

    def containers(self) -> Iterator[Container]:
        """Yield the containers, from the outside in."""
        yield self.container
        for child in self.children:
            if isinstance(child, Tree):
                yield from child.containers()

    def leaves(self) -> Iterator[Any]:
        """Yield what stands for the leaves, in order."""
        for child in self.children:
            if isinstance(child, Tree):
                yield from child.leaves()
            else:
                yield child

    def with_leaves(self, leaves: Iterator[Any]) -> "Tree":
        """Return the same tree of other leaves."""
        parts = (child.with_leaves(leaves) if isinstance(child, Tree) else next(leaves) for child in self.children)
        return Tree(self.container, tuple(parts))


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
