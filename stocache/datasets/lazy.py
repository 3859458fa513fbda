"""Make datasets that return batches which have read nothing yet, also of several caches: `with_lazy_batches`."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from stocache.cache.shared import SharedCache
from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.datasets.batches.rows import CacheRows
from stocache.datasets.batches.spec import BatchSpec
from stocache.datasets.batches.table import LazyTable, lazy_table
from stocache.datasets.cached import is_cache
from stocache.system.walking import inner_datasets, passes_on, through_subsets


class LazyConcat(ConcatDataset[Any]):
    """A ConcatDataset of cached datasets whose ``__getitems__`` returns a `LazyBatch`."""

    datasets: list[Any]

    def __init__(self, dataset: ConcatDataset[Any], datasets: list[Any], spec: BatchSpec) -> None:
        vars(self).update(vars(dataset) | {"datasets": datasets})
        self._batch_spec = spec

    def __getitems__(self, indices: Sequence[int]) -> LazyBatch:
        """Return the samples ``indices`` as a batch that has read nothing yet."""
        index = indices if isinstance(indices, np.ndarray) else np.array(list(map(int, indices)), np.int64)
        index = np.where(index < 0, index + len(self), index)
        numbers = np.searchsorted(self.cumulative_sizes, index, side="right")
        begins, parts = [0, *self.cumulative_sizes], list[CacheRows]()
        for number in dict.fromkeys(numbers.tolist()):
            rows = np.flatnonzero(numbers == number)
            own = self.datasets[number].__getitems__(index[rows] - begins[number])
            if len(rows) == len(index):
                return own  # type: ignore[no-any-return]
            parts += [replace(part, rows=rows if part.rows is None else rows[part.rows]) for part in own.parts]
        return LazyBatch(self._batch_spec, parts, len(indices))


def returns_lazy_batches(dataset: Any) -> bool:
    """Return whether the batches of a dataset, which `with_lazy_batches` may have returned, are each a `LazyBatch`."""
    return isinstance(dataset, LazyConcat | LazyTable) or (is_cache(dataset) and dataset.is_lazy)


def with_lazy_batches(dataset: Any, on_device: bool = False) -> Any:
    """Return a copy of a dataset whose ``__getitems__`` returns a `LazyBatch`, which has read nothing yet.

    ``on_device``: a GPU gathers the samples that are cached, if the dataset is not a ConcatDataset; see `BatchSpec`.

    None if batches cannot be gathered: the samples are not the samples of cached datasets of one structure, passed on by
    torch's Subset and ConcatDataset; or they are transformed, or vary in size.
    """
    if type(dataset) in (Subset, ConcatDataset):
        if not passes_on(dataset):
            return None
        on_device = on_device and type(dataset) is Subset
        lazy = [with_lazy_batches(inner, on_device) for inner in inner_datasets(dataset)]
        specs: list[Any] = [None if inner is None else through_subsets(inner)[0]._batch_spec for inner in lazy]
        if any(spec is None or spec != specs[0] for spec in specs):
            return None
        if type(dataset) is ConcatDataset:
            return LazyConcat(dataset, lazy, specs[0])
        subset = copy.copy(dataset)
        subset.dataset = lazy[0]
        return subset
    if not is_cache(dataset):
        return lazy_table(dataset)
    if dataset.is_transformed or not isinstance(dataset.cache, SharedCache) or dataset.is_left:
        return None
    spec = BatchSpec.of(dataset.cache)
    on_device = on_device and not dataset.cache.structure.is_narrow  # a GPU would copy the bytes
    if spec is None:
        return None
    cached = object.__new__(type(dataset))
    vars(cached).update(vars(dataset), _batch_spec=replace(spec, on_device=on_device))
    return cached
