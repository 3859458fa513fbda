"""MONAI: `CacheDataset` with the signature of MONAI's, and one copy of the data for all workers and ranks.

    from stocache.integrations.monai import CacheDataset    # in place of: from monai.data import CacheDataset

Tried with MONAI 1.6.1. Samples are cached when they are first wanted, so ``num_workers`` and ``progress`` have no effect here.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from monai.data.dataset import Dataset

from stocache.datasets.cached import CachedDataset


class CacheDataset(CachedDataset[Any]):
    """A `CachedDataset` of MONAI's ``Dataset(data, transform)``: its random transforms run after the cache.

    Args:
        data, transform: as of MONAI.
        cache_num, cache_rate: cache no more than this number of items, or this share of them: the first, and the few that are
            looked at when this is made.
        options: the options of `CachedDataset`, as ``size_limit_gib`` and ``name``.
    """

    def __init__(
        self,
        data: Sequence[Any],
        transform: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        cache_num: int = sys.maxsize,
        cache_rate: float = 1.0,
        num_workers: int | None = 1,
        progress: bool = True,
        **options: Any,
    ) -> None:
        copied = ("copy_cache", "as_contiguous", "hash_as_key", "hash_func", "runtime_cache")  # of MONAI, without effect here
        super().__init__(Dataset(data, transform), **{name: value for name, value in options.items() if name not in copied})
        most = min(cache_num, int(len(data) * cache_rate), len(data))
        self.cache.exclude(range(most, len(data)))
