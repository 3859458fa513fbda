"""The transforms that a dataset holds, and a twin of the dataset that runs something else in their place.

NOTE [ Twins ]
    A twin is the same dataset in all but some attributes. It is of a subclass made for it, which has these attributes; all
    others are in the same ``__dict__``. So what the dataset opens, counts or is given later, the twin has too, and the other
    way round. Nothing in the dataset itself changes: it goes on with its own transforms, wherever else it is used.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from stocache.transforms.known import is_known

HIDES_TRANSFORMS = "_hides_transforms"
"""An attribute of classes of datasets that run the transforms of those within by themselves: other caches."""

_CONVENTIONAL = frozenset({"transform", "transforms", "target_transform"})
_MOST = 64  # datasets, or transforms, in a list or dict of them
_DEEP = 8  # datasets within each other


class Site(NamedTuple):
    """Where a dataset holds a transform.

    Attributes:
        way: from the dataset to the one that holds it: names of attributes, and positions or keys in these.
        name: the attribute.
        key: the position or key in it, where it is a list or a dict of transforms.
    """

    way: tuple[tuple[str, Any], ...]
    name: str
    key: Any = None

    def __str__(self) -> str:
        steps = [*self.way, (self.name, self.key)]
        return ".".join(name if key is None else f"{name}[{key!r}]" for name, key in steps)


def find_sites(dataset: Any) -> dict[Site, Any]:
    """Return the transforms of a dataset and of the datasets within it; None where there might be one."""
    return dict(_sites(dataset, (), set()))


def _sites(dataset: Any, way: tuple[tuple[str, Any], ...], seen: set[int]) -> Iterator[tuple[Site, Any]]:
    if id(dataset) in seen or len(way) > _DEEP or not hasattr(dataset, "__dict__") or hasattr(type(dataset), HIDES_TRANSFORMS):
        return
    seen.add(id(dataset))
    held = dict(vars(dataset))
    for name in _CONVENTIONAL - held.keys():  # of the class; a property leads to an attribute that is found by itself
        if name in dir(type(dataset)) and not isinstance(getattr(type(dataset), name, None), property):
            held[name] = getattr(dataset, name, None)
    for name, value in held.items():
        if value is None and name in _CONVENTIONAL:
            yield Site(way, name), None
        elif _is_dataset(value):
            yield from _sites(value, (*way, (name, None)), seen)
        elif _is_transform(name, value):
            yield Site(way, name), value
        elif type(value) in (list, tuple, dict) and 0 < len(value) <= _MOST:
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                if _is_dataset(part):
                    yield from _sites(part, (*way, (name, key)), seen)
                elif _is_transform(name, part):
                    yield Site(way, name, key), part


def _is_dataset(value: Any) -> bool:
    if isinstance(value, Dataset) or callable(value):
        return isinstance(value, Dataset)
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__") and bool(_CONVENTIONAL & _own(value).keys())


def _own(value: Any) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


def _is_transform(name: str, value: Any) -> bool:
    """Whether it is a transform: of a class that is known, or called so."""
    if not callable(value) or isinstance(value, Dataset):
        return False
    named = "transform" in name.lower() or "augment" in name.lower()
    return named or is_known(type(value))


def holder_of(dataset: Any, site: Site) -> Any:
    """Return the dataset that holds a transform."""
    for name, key in site.way:
        dataset = getattr(dataset, name)
        dataset = dataset if key is None else dataset[key]
    return dataset


def transform_at(dataset: Any, site: Site) -> Any:
    """Return the transform that is there now, or None."""
    value = getattr(holder_of(dataset, site), site.name, None)
    try:
        return value if site.key is None or value is None else value[site.key]
    except LookupError:
        return None


# ---------------------------------------------------------------------------------------------------- twins


def twin_of(dataset: Any, instead: Mapping[Site, Any]) -> Any:
    """Return a twin of ``dataset`` that has other transforms; see NOTE [ Twins ].

    Raises:
        TypeError: its class allows no subclass, or its objects have no ``__dict__``.
    """
    attributes: dict[str, Any] = {}
    inner: dict[tuple[str, Any], dict[Site, Any]] = {}
    for site, value in instead.items():
        if site.way:
            inner.setdefault(site.way[0], {})[Site(site.way[1:], site.name, site.key)] = value
        else:
            _put(dataset, attributes, site.name, site.key, value)
    for (name, key), its in inner.items():
        held = getattr(dataset, name)
        _put(dataset, attributes, name, key, twin_of(held if key is None else held[key], its))
    cls = type(dataset)
    properties: dict[str, Any] = {name: _instead(name, value) for name, value in attributes.items()}
    properties |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    twin = object.__new__(metaclass(cls.__name__, (cls,), properties))
    twin.__dict__ = dataset.__dict__
    return twin


def _put(dataset: Any, attributes: dict[str, Any], name: str, key: Any, value: Any) -> None:
    if key is None:
        attributes[name] = value
        return
    held = attributes.get(name)
    if held is None:
        original = getattr(dataset, name)
        held = dict(original) if isinstance(original, dict) else list(original)
    held[key] = value
    attributes[name] = held


def _instead(name: str, value: Any) -> property:
    def put(self: Any, new: Any) -> None:
        vars(self)[name] = new

    return property(lambda self: value, put)


# ---------------------------------------------------------------------------------------------------- calls


class Call(NamedTuple):
    """What a dataset called a transform with, and what it got."""

    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Calls(threading.local):
    """The calls of transforms in this thread, while samples are loaded."""

    def __init__(self) -> None:
        self.made: list[Call] = []


class Tap:
    """What a twin has in place of a transform: calls something else, and notes the call.

    Args:
        original: the transform; other attributes are those of this.
        run: called in its place.
    """

    __slots__ = ("_calls", "_original", "_run", "_site")

    def __init__(self, site: Site, original: Any, run: Callable[..., Any], calls: Calls) -> None:
        self._site, self._original, self._run, self._calls = site, original, run, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what runs in its place."""
        result = self._run(*args, **kwargs)
        self._calls.made.append(Call(self._site, args, kwargs, result))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
