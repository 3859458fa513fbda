"""Look through datasets that take their samples from others: `walk`, `locate`; and through the values in them: `parts_of`,
`values_in`.

A *wrapper* is torch's Subset, ConcatDataset or StackDataset, or an object with a dataset in the attribute ``dataset``: a cached
dataset, or a class of the user's own. A wrapper *passes on* samples if each of its own is one of an inner dataset, unchanged.
"""

import bisect
import contextlib
import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from stocache.system.objects import attributes_of_class, is_module_of_library, mro, slots_of, takes_epoch, vars_of

_MOST_PARTS, _MOST_ITEMS, _MOST_LEVELS = 2000, 32, 6
_SMALL = (int, float, complex, str, bytes, type(None), np.generic)
_LONGEST = 200  # characters of a text, or items, that are looked at


def _is(dataset: Any, cls: Any) -> bool:
    """Return whether a dataset takes its samples from others as torch's class does."""
    if not issubclass(type(dataset), cls) or "__getitems__" in vars_of(dataset):
        return False
    return all(getattr(type(dataset), name, None) is method for name, method in _METHODS[cls].items())


_METHODS = {  # of torch, which a program may have replaced in the class meanwhile
    cls: {name: getattr(cls, name, None) for name in ("__getitem__", "__getitems__")} for cls in (Subset, ConcatDataset)
}


def passes_on(dataset: object) -> bool:
    """Return whether a dataset passes on samples of others, as torch's Subset and ConcatDataset do."""
    return _is(dataset, Subset) or _is(dataset, ConcatDataset)


def inner_datasets(dataset: Any) -> list[Any]:
    """Return the datasets from which a wrapper takes its samples; of any other dataset, none."""
    if issubclass(type(dataset), ConcatDataset | StackDataset):
        inner = dataset.datasets
        return list(inner.values() if isinstance(inner, dict) else inner)
    found = vars_of(dataset).get("dataset")
    return [] if found is None else [found]


def walk(dataset: object, through: Callable[[Any], bool] = lambda dataset: True) -> Iterator[Any]:
    """Yield a dataset and those within it, each once, a wrapper before what it wraps.

    Args:
        through: whether to look into a wrapper; all are looked into if it is left out.
    """
    seen, waiting = set[int](), [dataset]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += reversed(inner_datasets(found) if through(found) else [])


def set_epoch(dataset: object, epoch: int) -> None:
    """Set the epoch of a dataset; or if it has no ``set_epoch``, of the outermost datasets within it that have one."""
    for found in walk(dataset, through=lambda wrapper: not takes_epoch(wrapper)):
        if takes_epoch(found):
            found.set_epoch(epoch)


def makers(dataset: object) -> list[Any]:
    """Return the datasets that make the samples which a dataset passes on; of one that makes its own samples, itself."""
    return [found for found in walk(dataset, passes_on) if not passes_on(found)]


def locate(dataset: Any, idx: int) -> tuple[Any, int]:
    """Return the dataset that makes sample ``idx``, and the index of the sample there."""
    while True:
        if _is(dataset, Subset):
            dataset, idx = dataset.dataset, int(dataset.indices[idx])
        elif _is(dataset, ConcatDataset):
            idx += len(dataset) if idx < 0 else 0
            number = bisect.bisect_right(dataset.cumulative_sizes, idx)
            dataset, idx = dataset.datasets[number], idx - (dataset.cumulative_sizes[number - 1] if number else 0)
        else:
            return dataset, idx


def through_subsets(dataset: Any, indices: Sequence[object] = ()) -> tuple[Any, Sequence[Any]]:
    """Return the dataset that is asked for a batch of samples of Subsets, and their indices there."""
    while _is(dataset, Subset):
        dataset, indices = dataset.dataset, [dataset.indices[idx] for idx in indices]
    return dataset, indices


def inner_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in the attributes or items of an object, and of a function, with their names."""
    if isinstance(value, torch.Tensor | np.ndarray | type | ModuleType):
        return
    if isinstance(value, list | tuple | deque):
        yield from ((f"{name}[{number}]", item) for number, item in enumerate(islice(list(value), _MOST_ITEMS)))
    elif isinstance(value, FunctionType | MethodType | partial):
        yield from ((f"{name}: {key}", item) for key, item in _bound_values(value))
    elif type(value) is dict:
        yield from ((f"{name}[{key!r:.40}]", item) for key, item in islice(list(value.items()), _MOST_ITEMS))
    else:
        slots = ((slot.__name__, item) for slot, item in slots_of(value)) if is_own(value) else ()
        yield from ((f"{name}.{key}", item) for key, item in (*vars_of(value).items(), *slots))


def is_own(value: object) -> bool:
    """Whether a value is a plain container, a function, or an object of the user's that threads do not share."""
    kind = type(value)
    if vars_of(value).get("thread_safe") or getattr(kind, "thread_safe", False) is True:
        return False
    return kind.__module__ == "builtins" or kind in (deque, partial) or not is_module_of_library(kind.__module__)


def is_own_or_dataset(value: object) -> bool:
    """Whether a value is of the user, as `is_own` says, or a dataset of torch or of another library."""
    return is_own(value) or isinstance(value, Dataset)


def parts_of(
    value: object,
    name: str = "dataset",
    follow: Callable[[Any], bool] = lambda value: True,
    inner: Callable[[str, Any], Iterable[tuple[str, Any]]] = inner_parts,
    most: int = _MOST_PARTS,
    levels: int = _MOST_LEVELS,
) -> Iterator[tuple[str, Any]]:
    """Yield the values in an object's attributes, lists, tuples and dicts, to some depth, with names such as ``dataset.size``.

    Args:
        follow: whether to look into a value. It is asked after the value was yielded.
        inner: returns the parts of a value, with their names.
        most: yield no more values. levels: look no deeper.
    """
    seen, waiting = set(), deque([(name, value, 0)])
    for _ in range(most):
        if not waiting:
            return
        name, value, level = waiting.popleft()
        yield name, value
        if level < levels and id(value) not in seen:
            seen.add(id(value))
            if follow(value):
                waiting.extend((key, item, level + 1) for key, item in inner(name, value))


def part_text(name: str, part: object) -> str:
    """Return the name of a part with its class."""
    return f"{name}, a {type(part).__module__}.{type(part).__qualname__}"


def attribute_in(name: str) -> str | None:
    """Return the attribute of the dataset in the name of one of its parts; None for an entry of a dataset that is a list."""
    return found[1] if (found := re.match(r"dataset\.(\w+)", name)) else None


def _bound_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function holds: a method's object, a partial's arguments, variables of the enclosing function."""
    if isinstance(function, MethodType):
        yield "self", function.__self__
    elif isinstance(function, partial):
        yield from (("function", function.func), ("arguments", function.args), ("options", function.keywords))
    else:
        yield from (("defaults", function.__defaults__), ("options", function.__kwdefaults__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                yield name, cell.cell_contents


def values_in(root: object, name: str, keys: Set[str], objects: Set[str]) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """Yield the attributes of an object, of the user's objects in it, and of their classes: where they are, those that count,
    and what to put in front of their names. Small values count if they have one of ``keys``, any others one of ``objects``.
    """
    for part_name, part in parts_of(root, name, follow=is_own_or_dataset):
        classes = map(attributes_of_class, mro(type(part))) if is_own(part) else ()
        for own in (vars_of(part), *classes):
            if held := small_values(own, keys) | {key: own[key] for key in objects & own.keys()}:
                yield own, held, f"{part_name}."


def small_values(own: Mapping[str, Any], keys: Set[str]) -> dict[str, Any]:
    """Return copies of the small values that have one of ``keys``."""
    return {key: copy.deepcopy(own[key]) for key in keys & own.keys() if is_small(own[key])}


def is_small(value: object, most: int = _LONGEST) -> bool:
    """Whether a value is a number or a short text, or a list, tuple or dict of at most ``most`` small values in all."""
    if type(value) in (list, tuple, dict):
        items: Any = value.values() if isinstance(value, dict) else value
        return 0 < len(items) <= most and all(is_small(item, most // len(items)) for item in items)
    return isinstance(value, _SMALL) and not (isinstance(value, str | bytes) and len(value) > _LONGEST)
