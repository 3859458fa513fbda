"""Make datasets that return batches which have read nothing yet: `with_lazy_batches`."""

import copy
from dataclasses import replace
from typing import Any

from torch.utils.data import Subset

from stocache.cache.shared import SharedCache
from stocache.datasets.batches.spec import BatchSpec
from stocache.datasets.batches.table import LazyTable, lazy_table
from stocache.datasets.cached import is_cache
from stocache.system.walking import passes_on


def returns_lazy_batches(dataset: Any) -> bool:
    """Return whether the batches of a dataset, which `with_lazy_batches` may have returned, are each a `LazyBatch`."""
    return isinstance(dataset, LazyTable) or (is_cache(dataset) and dataset.is_lazy)


def with_lazy_batches(dataset: Any, on_device: bool = False) -> Any:
    """Return a copy of a dataset whose ``__getitems__`` returns a `LazyBatch`, which has read nothing yet.

    ``on_device``: a GPU gathers the samples that are cached; see `BatchSpec`.

    None if batches cannot be gathered: the samples are not the samples of a cached dataset, passed on by torch's Subset; or
    they are transformed, or vary in size.
    """
    if type(dataset) is Subset:
        lazy = with_lazy_batches(dataset.dataset, on_device) if passes_on(dataset) else None
        if lazy is None:
            return None
        subset = copy.copy(dataset)
        subset.dataset = lazy
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
