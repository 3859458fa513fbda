"""Look through datasets that take their samples from others: `walk`, and `locate` for one sample.

A *wrapper* is torch's Subset, ConcatDataset or StackDataset, or an object with a dataset in the attribute ``dataset``: a cached
dataset, or a class of the user's own. A wrapper *passes on* samples if each of its own is one of an inner dataset, unchanged.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, StackDataset, Subset

from stocache.system.objects import vars_of


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


def makers(dataset: object) -> list[Any]:
    """Return the datasets that make the samples which a dataset passes on; of one that makes its own samples, itself."""
    return [found for found in walk(dataset, passes_on) if not passes_on(found)]


def locate(dataset: Any, idx: int) -> tuple[Any, int]:
    """Return the dataset that makes sample ``idx``, and the index of the sample there."""
    while True:
        if _is(dataset, Subset):
            dataset, idx = dataset.dataset, int(dataset.indices[idx])
        elif _is(dataset, ConcatDataset):
            number, idx = branch_of(dataset, idx)
            dataset = dataset.datasets[number]
        else:
            return dataset, idx


def branch_of(dataset: ConcatDataset[Any], idx: int) -> tuple[int, int]:
    """Return the number of the dataset that makes sample ``idx`` of a ConcatDataset, and the index of the sample there."""
    idx += len(dataset) if idx < 0 else 0
    number = bisect.bisect_right(dataset.cumulative_sizes, idx)
    return number, idx - (dataset.cumulative_sizes[number - 1] if number else 0)


def through_subsets(dataset: Any, indices: Sequence[object] = ()) -> tuple[Any, Sequence[Any]]:
    """Return the dataset that is asked for a batch of samples of Subsets, and their indices there."""
    while _is(dataset, Subset):
        dataset, indices = dataset.dataset, [dataset.indices[idx] for idx in indices]
    return dataset, indices
