"""What may hold the parts of a sample: how each container is taken apart, and put together again as it was.

Dicts and other mappings (also TensorDicts), lists, tuples, namedtuples, dataclasses, None; subclasses of Tensor, whose parts
are the plain tensor and their attributes; PIL images, whose parts are the state they pickle.
"""

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAVES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, complex, str, bytes})


@dataclass(frozen=True)
class Container:
    """A container without its parts.

    Attributes:
        kind: the way to put it together: a key of the table below.
        keys: one for each part.
        extra: what is needed besides the parts: the batch size of a TensorDict.
    """

    kind: str
    cls: Any
    keys: tuple[Any, ...]
    extra: tuple[Any, ...] = ()

    def joiner(self) -> Callable[[list[Any]], Any]:
        """Return the function that makes the container of its parts."""
        return _JOINERS[self.kind](self)

    def __str__(self) -> str:
        return str(self.cls.__name__)


def split(value: Any) -> tuple[Container, list[Any]] | None:
    """Return the container and the parts of ``value``; None for a leaf, and for what could not be put together again."""
    cls = type(value)
    if cls in _LEAVES:
        return None
    if cls is dict or cls is OrderedDict:
        return Container("dict", cls, tuple(value)), list(value.values())
    if cls is list or cls is tuple:
        return Container(cls.__name__, cls, tuple(range(len(value)))), list(value)
    if value is None:
        return Container("none", cls, ()), []
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is None:
            return _checked(Container("tuple", cls, tuple(range(len(value)))), list(value), value)
        return Container("namedtuple", cls, fields), list(value)
    if isinstance(value, Tensor):
        attributes = dict(vars(value))
        return Container("tensor", cls, ("data", "attributes")), [value.as_subclass(Tensor), attributes]
    if isinstance(value, Mapping):
        extra = tuple(value.batch_size) if hasattr(value, "batch_size") else ()
        container = Container("tensordict" if hasattr(value, "batch_size") else "mapping", cls, tuple(value.keys()), extra)
        return _checked(container, [value[key] for key in container.keys], value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
        return Container("dataclass", cls, tuple(names)), [getattr(value, name) for name in names]
    images = sys.modules.get("PIL.Image")
    if images is not None and isinstance(value, images.Image):
        try:
            state = value.__getstate__()
        except Exception:  # a file that is cut, or closed before it was read
            return None
        return Container("image", cls, tuple(range(len(state)))), state
    return None


def _checked(container: Container, parts: list[Any], value: Any) -> tuple[Container, list[Any]] | None:
    """Return container and parts, unless what they make differs from ``value`` in more than the parts."""
    try:
        again = container.joiner()(parts)
        same = type(again) is type(value) and _state(again, container) == _state(value, container)
        if isinstance(value, Mapping):
            same = same and tuple(again.keys()) == container.keys
    except Exception:  # whatever a class does that is made in another way
        return None
    return (container, parts) if same else None


def _state(value: Any, container: Container) -> dict[str, Any]:
    """Return the attributes of a container, but for those that hold its parts."""
    return {
        name: attribute
        for name, attribute in getattr(value, "__dict__", {}).items()
        if not (isinstance(attribute, Mapping) and tuple(attribute) == container.keys)
    }


def _join_dict(container: Container) -> Callable[[list[Any]], Any]:
    cls, keys = container.cls, container.keys
    return lambda parts: cls(zip(keys, parts, strict=True))


def _join_mapping(container: Container) -> Callable[[list[Any]], Any]:
    cls, keys = container.cls, container.keys
    return lambda parts: cls(dict(zip(keys, parts, strict=True)))


def _join_tensordict(container: Container) -> Callable[[list[Any]], Any]:
    cls, keys, size = container.cls, container.keys, container.extra
    return lambda parts: cls(dict(zip(keys, parts, strict=True)), batch_size=size)


def _join_dataclass(container: Container) -> Callable[[list[Any]], Any]:
    cls, keys = container.cls, container.keys

    def join(parts: list[Any]) -> Any:
        value = object.__new__(cls)  # its fields as they were, without running __post_init__ on them again
        for name, part in zip(keys, parts, strict=True):
            object.__setattr__(value, name, part)
        return value

    return join


def _join_tensor(container: Container) -> Callable[[list[Any]], Any]:
    def join(parts: list[Any]) -> Any:
        tensor, attributes = parts
        value = tensor.as_subclass(container.cls)
        value.__dict__.update(attributes)
        return value

    return join


def _join_image(container: Container) -> Callable[[list[Any]], Any]:
    def join(parts: list[Any]) -> Any:
        image = container.cls.__new__(container.cls)
        image.__setstate__(parts)
        return image

    return join


_JOINERS: dict[str, Callable[[Container], Callable[[list[Any]], Any]]] = {
    "dict": _join_dict,
    "list": lambda container: list,
    "tuple": lambda container: container.cls,
    "none": lambda container: lambda parts: None,
    "namedtuple": lambda container: container.cls._make,
    "mapping": _join_mapping,
    "tensordict": _join_tensordict,
    "dataclass": _join_dataclass,
    "tensor": _join_tensor,
    "image": _join_image,
}


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of containers with ``function`` of each of its leaves in their place."""
    found = split(tree)
    if found is None:
        return function(tree)
    container, parts = found
    return container.joiner()([mapped(function, part) for part in parts])


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found
