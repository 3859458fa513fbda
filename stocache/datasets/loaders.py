"""Load the samples that a cache misses: from any dataset, or by the block from a storage.

NOTE [ Admitting blocks ]
    In front of a storage of blocks, the cache admits whole blocks. With 64 samples a block and memory for 90 % of them, caching
    single samples saves 0.1 % of the block reads; caching whole blocks saves 90 %. So a thread that misses a sample which may
    be cached reads its whole block, and offers all samples of the block to the cache. When several threads and processes miss
    samples of one block at a time, one of them reads it and the others wait. They wait for nothing else meanwhile, so there is
    no deadlock. Samples that may not be cached are read one by one; so are all samples of a block when one of them cannot be
    read.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from stocache.cache.base import SampleCache, SlotState
from stocache.cache.placement import BlockBounds
from stocache.cache.stats import MISSING

logger = logging.getLogger("stocache")


class SampleLoader:
    """Loads samples from a map-style dataset: by its own ``__getitems__``, where it has one, or one by one.

    Attributes:
        load: called with an index; returns a sample.
        load_many: called with a list of indices; returns, or yields, their samples.
    """

    __slots__ = ("_dataset", "load", "load_many")  # hidden from libraries that look through attributes for datasets

    load: Callable[[int], Any]
    load_many: Callable[[list[int]], Iterable[Any]]

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.load = dataset, partial(operator.getitem, dataset)
        self.load_many = getattr(dataset, "__getitems__", None) or partial(map, self.load)

    def __reduce__(self) -> Any:
        return SampleLoader, (self._dataset,)


class BlockLoader:
    """Loads samples of a storage by the block where they may be cached; see NOTE [ Admitting blocks ]."""

    __slots__ = ("_bounds", "_cache", "_dataset")

    def __init__(self, dataset: Any, cache: SampleCache) -> None:
        self._dataset, self._cache = dataset, cache
        self._bounds: np.ndarray[Any, Any] = dataset.block_bounds

    def load(self, idx: int) -> Any:
        """Return sample ``idx``."""
        return self.load_many([idx])[0]

    def load_many(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``."""
        blocks = (np.searchsorted(self._bounds, indices, side="right") - 1).tolist()
        found: dict[int, Any] = {}
        for block, group in groupby(sorted(zip(blocks, indices, strict=True)), key=lambda pair: pair[0]):
            found.update(self._load_from(block, [idx for _, idx in group]))
        return [found[idx] for idx in indices]

    def _load_from(self, block: int, indices: list[int]) -> Iterable[tuple[int, Any]]:
        cache = self._cache
        if any(map(cache.fillable, indices)):
            with cache.claim(block):
                members = range(int(self._bounds[block]), int(self._bounds[block + 1]))
                if any(map(cache.fillable, indices)) and (samples := self._load_block(members)) is not None:
                    cache.set_if_empty(members, samples)
                    return [(idx, samples[idx - members.start]) for idx in indices]
        found = {idx: cache.peek(idx) for idx in indices}  # another thread or process may have read the block meanwhile
        missing = [idx for idx in indices if found[idx] is MISSING]
        found.update(zip(missing, self._dataset.__getitems__(missing), strict=True))
        return found.items()

    def _load_block(self, indices: range) -> list[Any] | None:
        """Return the samples of a block, or None when one of them raises: the wanted ones are then loaded one by one."""
        try:
            return list(self._dataset.__getitems__(indices))
        except Exception as error:
            logger.debug("samples %d to %d: %s", indices.start, indices.stop - 1, str(error))
            return None

    def uncached(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks of the storage that are not cached."""
        indices, size = self._dataset.indices, self._dataset.storage.block_size
        states = self._cache.aux_array.numpy()
        return [b for b in blocks if states[np.searchsorted(indices, b * size)] != SlotState.SET]

    def by_block(self, indices: list[int]) -> list[list[int]]:
        """Return ``indices`` in lists, one for each run of samples of one block."""
        blocks = np.searchsorted(self._bounds, indices, side="right").tolist()
        return [[idx for _, idx in group] for _, group in groupby(zip(blocks, indices, strict=True), key=lambda pair: pair[0])]


def admission_unit(dataset: Any) -> int | BlockBounds | None:
    """Return the unit of admission for a dataset of blocks: their size, or their bounds. None for any other dataset."""
    bounds = getattr(dataset, "block_bounds", None)
    if bounds is None:
        return None
    sizes = np.diff(bounds)
    regular = (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]
    return int(sizes[0]) if regular else BlockBounds(bounds)
