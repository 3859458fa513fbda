"""Follow the samples of a cached dataset into the results of its methods: parts of the dataset, and loaders over it."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from stocache.samples.indices import length_of, spread
from stocache.system.describe import describe
from stocache.system.generators import Kept, own_generators
from stocache.system.objects import TorchLoader

logger = logging.getLogger("stocache")

_COMPARED = 4  # samples of a part and of the whole
_MOST = 8  # results of one call

_warned: set[tuple[type, str]] = set()


class FollowedMethod:
    """A method of a dataset that returns cached datasets in place of parts of the dataset, or of loaders over it.

    Args:
        method: of the dataset.
        follow: called with the result.
    """

    def __init__(self, method: Callable[..., object], follow: Callable[[str, Any], object]) -> None:
        functools.update_wrapper(self, method)
        self._method, self._follow = method, follow

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self._follow(self._method.__name__, self._method(*args, **kwargs))


def follow(name: str, result: Any, cached: Any, view: Callable[[Any, Any], object], rows: Any = None) -> Any:
    """Return the result of a method of a dataset over the cached dataset; the result itself where it holds no samples of it.

    Args:
        name: of the method.
        view: called with a part of the dataset and its rows; returns the cached part.
        rows: of the part that is expected, or None.
    """
    dataset = cached.dataset
    if result is dataset:
        return cached
    if type(result) in (list, tuple) and len(result) <= _MOST:
        followed = [follow(name, each, cached, view) for each in result]
        changed = any(one is not other for one, other in zip(followed, result, strict=True))
        return type(result)(followed) if changed else result
    if type(result) is Subset and result.dataset is dataset:
        return Subset(cached, result.indices)
    if isinstance(result, TorchLoader):
        inner = follow(name, result.dataset, cached, view)
        if inner is result.dataset:
            return result
        loader = copy.copy(result)
        vars(loader)["dataset"] = inner  # a loader refuses that it is set
        return loader
    if not is_part(result, dataset):
        return result
    rows = rows if rows is not None and are_indices(result, dataset, rows) else indices_of(result, dataset)
    if rows is not None:
        return view(result, rows)
    if (type(dataset), name) not in _warned:
        _warned.add((type(dataset), name))
        logger.warning(
            "%s.%s() returns a dataset without the cache, because the rows of its samples are not known. Call it before "
            "CachedDataset, or wrap its result.", type(dataset).__name__, name,
        )  # fmt: skip
    return result


def is_part(value: object, dataset: object) -> bool:
    """Return whether a value is a dataset of the same class, which may have some of the samples."""
    return type(value) is type(dataset) and value is not dataset and hasattr(value, "__dict__")


def indices_of(part: object, whole: Any) -> "NDArray[Any] | None":
    """Return the numbers that the samples of a part have in the whole; None where they are not known.

    They are found by an attribute that holds indices or names of the samples, and proven with some samples.
    """
    count, length = length_of(part), length_of(whole)
    if count is None or length is None:
        return None
    for name, values in getattr(part, "__dict__", {}).items():
        rows = _positions(values, vars(whole).get(name), count, length)
        if rows is not None and are_indices(part, whole, rows):
            return rows
    return None


def are_indices(part: Any, whole: Any, rows: Any) -> bool:
    """Return whether some samples of a part are those of the whole at ``rows``, made from the same random numbers."""
    if length_of(part) != len(rows):
        return False
    own = [*own_generators(part), *own_generators(whole)]
    try:
        for position in spread(len(rows), _COMPARED):
            with Kept(own):
                one = describe(part[position], strides=False)
            with Kept(own):
                if one != describe(whole[int(rows[position])], strides=False):
                    return False
    except Exception:  # of the dataset, which may take other indices
        return False
    return True


def _positions(values: object, before: object, count: int, length: int) -> "NDArray[Any] | None":
    """Return where ``values`` are in ``before``; None stands for all numbers."""
    before = range(length) if before is None else before
    kinds = list, tuple, range, np.ndarray, Tensor
    if not (isinstance(values, kinds) and isinstance(before, kinds) and len(values) == count and len(before) == length):
        return None
    before, values = (each.tolist() if isinstance(each, np.ndarray | Tensor) else each for each in (before, values))
    if values is before or not all(isinstance(value, int | str) for value in values[:1]):
        return None
    try:
        places = {value: number for number, value in enumerate(before)}
        return np.array([places[value] for value in values], np.int64) if len(places) == length else None
    except (TypeError, KeyError):
        return None
