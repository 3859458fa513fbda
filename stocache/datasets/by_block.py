"""Loading by the block: the samples of one block of a storage are admitted together, and read once for that.

NOTE [ Admitting blocks ]
    In front of a storage of blocks, the unit of admission is the block: at 64 samples a block and 90 % of the memory, caching
    any samples saves 0.1 % of the reads of blocks, caching whole blocks saves 90 %. So whoever misses a sample that may be
    cached reads the whole block, and offers all of its samples to the cache. Of all threads and processes that miss samples of
    one block at a time, one does so, and the others wait for it; they wait for nothing else meanwhile, so there is no deadlock.
    Samples that are not to be cached are read by themselves, and so are all of a block of which one cannot be read.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from stocache.cache.base import MISSING, SampleCache, SlotState
from stocache.cache.placement import BlockBounds

logger = logging.getLogger("stocache")


def units_of(dataset: Any) -> int | BlockBounds | None:
    """Return the blocks a dataset is read by: their size, or where they begin; None when it is read by the sample."""
    bounds = getattr(dataset, "block_bounds", None)
    if bounds is None:
        return None
    sizes = np.diff(bounds)
    regular = (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]
    return int(sizes[0]) if regular else BlockBounds(bounds)


class BlockLoader:
    """Loads samples for a cache, by the block where they may be cached."""

    def __init__(self, dataset: Any, cache: SampleCache) -> None:
        self._dataset, self._cache = dataset, cache
        self._bounds: np.ndarray[Any, Any] = dataset.block_bounds

    def load(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``, which were missed."""
        blocks = (np.searchsorted(self._bounds, indices, side="right") - 1).tolist()
        found: dict[int, Any] = {}
        for block, group in groupby(sorted(zip(blocks, indices, strict=True)), key=lambda pair: pair[0]):
            found.update(self._load_from(block, [idx for _, idx in group]))
        return [found[idx] for idx in indices]

    def _load_from(self, block: int, wanted: list[int]) -> Iterable[tuple[int, Any]]:
        cache = self._cache
        if any(map(cache.fillable, wanted)):
            with cache.claim(block):
                mates = range(int(self._bounds[block]), int(self._bounds[block + 1]))
                if any(map(cache.fillable, wanted)) and (samples := self._block(mates)) is not None:
                    cache.set_if_empty(mates, samples)
                    return [(idx, samples[idx - mates.start]) for idx in wanted]
        there = {idx: cache.peek(idx) for idx in wanted}  # another one may have read the block meanwhile
        missing = [idx for idx in wanted if there[idx] is MISSING]
        there.update(zip(missing, self._dataset.__getitems__(missing), strict=True))
        return there.items()

    def _block(self, mates: range) -> list[Any] | None:
        """Return the samples of a block; None where one raises: those that are wanted are then loaded by themselves."""
        try:
            return list(self._dataset.__getitems__(mates))
        except Exception as error:
            logger.debug("samples %d to %d: %s", mates.start, mates.stop - 1, str(error))
            return None

    def uncached(self, blocks: Iterable[int]) -> list[int]:
        """Return those blocks of the storage that are not cached."""
        indices, size = self._dataset.indices, self._dataset.storage.block_size
        states = self._cache.aux_array.numpy()
        return [b for b in blocks if states[np.searchsorted(indices, b * size)] != SlotState.SET]

    def batches(self, wanted: list[int]) -> list[list[int]]:
        """Return indices by the block."""
        blocks = np.searchsorted(self._bounds, wanted, side="right").tolist()
        return [[idx for _, idx in group] for _, group in groupby(zip(blocks, wanted, strict=True), key=lambda pair: pair[0])]
