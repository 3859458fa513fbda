"""Find the transforms that a dataset holds, and patch a dataset so that it calls others in their place.

A *site* is a place where a dataset holds a transform.

NOTE [ Patched datasets ]
    A patched dataset equals the original in all but some attributes. Its class is a subclass made for it, which defines these
    attributes as properties. All other attributes are in the ``__dict__`` that both share. So an
    attribute that is set later in one of them, say a file or a counter, is in the other as well. The original does not change:
    it goes on with its own transforms, wherever else it is used.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.nn import ModuleList
from torch.utils.data import Dataset

from stocache.datasets.transforms.known import is_known
from stocache.system.objects import attribute_of, vars_of

HIDES_TRANSFORMS = "_hides_transforms"
"""An attribute of dataset classes that run the transforms of the datasets within them by themselves: other caches."""

_CONVENTIONAL = frozenset({"transform", "transforms", "target_transform"})
_MAX_ITEMS = 64  # datasets, or transforms, in a list or dict of them
_MAX_DEPTH = 8  # datasets within each other


class Site(NamedTuple):
    """Where a dataset holds a transform.

    Attributes:
        path: from the dataset to the one that holds the transform: pairs of an attribute and a position or key in it, or None.
        name: the attribute that holds the transform.
        key: the position or key in that attribute, where it is a list or a dict of transforms.
    """

    path: tuple[tuple[str, Any], ...]
    name: str
    key: Any = None

    def __str__(self) -> str:
        steps = [*self.path, (self.name, self.key)]
        return ".".join(name if key is None else f"{name}[{key!r}]" for name, key in steps)


def find_sites(dataset: object) -> dict[Site, Any]:
    """Return the transforms of a dataset and of the datasets within it; None for an attribute that could hold one."""
    return dict(_find_sites(dataset, (), set()))


def _find_sites(dataset: object, path: tuple[tuple[str, object], ...], seen: set[int]) -> Iterator[tuple[Site, Any]]:
    if id(dataset) in seen or len(path) > _MAX_DEPTH:
        return
    if not type(dataset).__dictoffset__ or hasattr(type(dataset), HIDES_TRANSFORMS):
        return
    seen.add(id(dataset))
    attributes = dict(vars(dataset))
    for name in _CONVENTIONAL - attributes.keys():  # of the class; a property leads to an attribute that is found by itself
        if name in dir(type(dataset)) and not isinstance(getattr(type(dataset), name, None), property):
            attributes[name] = getattr(dataset, name, None)
    for name, value in attributes.items():
        if value is None and name in _CONVENTIONAL:
            yield Site(path, name), None
        elif _is_dataset(value):
            yield from _find_sites(value, (*path, (name, None)), seen)
        elif _is_transform(name, value):
            yield Site(path, name), value
        elif type(value) in (list, tuple, dict) and 0 < len(value) <= _MAX_ITEMS:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if _is_dataset(item):
                    yield from _find_sites(item, (*path, (name, key)), seen)
                elif _is_transform(name, item):
                    yield Site(path, name, key), item


def _is_dataset(value: object) -> bool:
    if isinstance(value, Dataset) or callable(value):
        return isinstance(value, Dataset)
    conventional = bool(_CONVENTIONAL & vars_of(value).keys())
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__") and conventional


def _is_transform(name: str, value: object) -> bool:
    """Whether an attribute is a transform: its name says so, or its class is known."""
    if not callable(value) or isinstance(value, Dataset):
        return False
    named = "transform" in name.lower() or "augment" in name.lower()
    return named or is_known(type(value))


def find_holder(dataset: Any, site: Site) -> Any:
    """Return the dataset that holds the transform of a site."""
    for name, key in site.path:
        dataset = getattr(dataset, name)
        dataset = dataset if key is None else dataset[key]
    return dataset


def find_transform(dataset: object, site: Site) -> Any:
    """Return the transform that is at a site now, or None."""
    value = attribute_of(find_holder(dataset, site), site.name)
    try:
        return value if site.key is None or value is None else value[site.key]
    except LookupError:
        return None


def patch(dataset: object, transforms: Mapping[Site, object]) -> Any:
    """Return a patched dataset that has ``transforms`` at their sites; see NOTE [ Patched datasets ].

    Raises:
        TypeError: the class of ``dataset`` allows no subclass, or its objects have no ``__dict__``.
    """
    attributes: dict[str, Any] = {}
    nested: dict[tuple[str, Any], dict[Site, Any]] = {}
    for site, transform in transforms.items():
        if site.path:
            nested.setdefault(site.path[0], {})[Site(site.path[1:], site.name, site.key)] = transform
        else:
            _put(dataset, attributes, site.name, site.key, transform)
    for (name, key), inner in nested.items():
        value = getattr(dataset, name)
        _put(dataset, attributes, name, key, patch(value if key is None else value[key], inner))
    cls = type(dataset)
    namespace: dict[str, Any] = {name: _make_property(name, value) for name, value in attributes.items()}
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    patched = object.__new__(metaclass(cls.__name__, (cls,), namespace))
    patched.__dict__ = dataset.__dict__
    return patched


def _put(dataset: Any, attributes: dict[str, Any], name: str, key: Any, value: Any) -> None:
    if key is None:
        attributes[name] = value
        return
    items = attributes.get(name)
    if items is None:
        original = getattr(dataset, name)
        items = dict(original) if isinstance(original, dict) else list(original)
    items[key] = value
    attributes[name] = items


def _make_property(name: str, value: object) -> property:
    def set_original(self: Any, new: object) -> None:
        vars(self)[name] = new

    return property(lambda self: value, set_original)


class StandIn:
    """Takes the place of a transform in a patched dataset. It has the class, the attributes and the items of the original.

    Args:
        original: the transform.
        run: called in its place.
        steps: the replacements of the steps that the transform consists of, by their ids.
    """

    __slots__ = ("_original", "_run", "_steps")

    def __init__(self, original: Any, run: Callable[..., object], steps: Mapping[int, object] = MappingProxyType({})) -> None:
        self._original, self._run, self._steps = original, run, steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``run`` returns."""
        return self._run(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        return self._replaced(getattr(self._original, name))

    def _replaced(self, value: object) -> Any:
        """Return the replacement of a step, or a list with those of steps."""
        if isinstance(value, list | tuple | ModuleList) and any(id(step) in self._steps for step in value):
            return [self._steps.get(id(step), step) for step in value]
        return self._steps.get(id(value), value)

    def __len__(self) -> int:
        return len(self._original)

    def __bool__(self) -> bool:
        return bool(self._original)

    def __iter__(self) -> Iterator[Any]:
        return map(self._replaced, self._original)

    def __getitem__(self, key: Any) -> Any:
        return self._replaced(self._original[key])
