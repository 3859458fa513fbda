"""Tiers: samples in shared memory, behind it in a folder on a local disk if there is one, and else from the source."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stocache.cache.disk.cache import DiskCache
from stocache.cache.loading import only
from stocache.cache.options import CacheOptions
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache
from stocache.cache.stats import EMPTY, MISSING, CacheStats

LoadMany = Callable[[list[int]], Iterable[Any]]


class Tiers:
    """A cache in memory, and a `DiskCache` behind it, or None.

    A sample that is not in memory comes from the disk, or else from the source. Samples from the source are written to the disk
    behind the caller. Memory keeps the samples that it has room for, from either.

    Args:
        memory, disk: the caches.
        expected_len: the number of samples, if their ``dataset_len`` is an upper bound.
    """

    thread_safe = True

    def __init__(self, memory: SharedCache | RaggedCache, disk: DiskCache | None, expected_len: int | None = None) -> None:
        self.memory, self.disk, self._expected_len = memory, disk, expected_len

    @classmethod
    def of_any_size(cls, options: CacheOptions, dataset_len: int, expected_len: int | None = None) -> "Tiers":
        """Return a `RaggedCache` with these options, and a disk behind it if they name one.

        Raises:
            DiskError: the folder cannot be a disk cache.
            LimitError, CodecError, CacheNameError, MismatchError, SegmentError, BusyError: as for the two caches.
        """
        return cls(RaggedCache.from_options(options, dataset_len), DiskCache.behind(options, dataset_len), expected_len)

    def hit(self, idx: int, copy: bool) -> Any:
        """Return sample ``idx`` if it is in memory or on the disk; else MISSING. ``copy`` as for `RaggedCache.get_slot`."""
        sample = self.memory.hit(idx, copy)
        if sample is not MISSING or self.disk is None or not self.disk.holds(idx):
            return sample
        try:
            return self.memory.get_or_load(idx, self._load_from_disk, copy=copy, strict=False)
        except _LostError:
            return MISSING

    def _load_from_disk(self, idx: int) -> Any:
        assert self.disk is not None
        sample = self.disk.hit(idx, True)
        if sample is MISSING:
            raise _LostError
        return sample

    def get_or_load(self, idx: int, load: Callable[[int], object], *, copy: bool = True, strict: bool = True) -> Any:
        """Return sample ``idx`` from memory, from the disk, or else from ``load(idx)``, which both then keep.

        The arguments and errors are the same as for `RaggedCache.get_or_load`. A sample that only the disk does not take is
        returned all the same.
        """
        if self.disk is not None:
            load = partial(only, self.behind(partial(map, load)))
        return self.memory.get_or_load(idx, load, copy=copy, strict=strict)

    def behind(self, load_many: LoadMany) -> LoadMany:
        """Return a function that loads samples from the disk, and the samples that are not there with ``load_many``."""
        if self.disk is None:
            return load_many
        serve = partial(self.disk.serve, load_many, self.memory.keeps, expected=self._expected_len)
        if self.memory.may_admit_later:  # each is timed by itself
            return lambda indices: (serve([idx])[0] for idx in indices)
        return serve

    def unfilled(self, indices: NDArray[np.int64]) -> list[int]:
        """Return which of the samples ``indices`` a tier may keep, and does not."""
        empty = self.memory.aux_array.numpy()[indices] == EMPTY
        if self.disk is not None:
            empty |= self.disk.aux_array.numpy()[indices] == EMPTY
        unfilled: list[int] = indices[empty].tolist()
        return unfilled

    def fill(self, indices: Sequence[int], load_many: LoadMany) -> None:
        """Have each tier keep the samples ``indices`` for which it has room. The disk gets them from memory if it can."""
        self.memory.get_or_load_many(_empty(self.memory, indices), self.behind(load_many), copy=False, strict=False)
        if self.disk is not None:
            self.disk.flush()
            load = partial(self.memory.get_or_load_many, load=load_many, strict=False)
            self.disk.get_or_load_many(_empty(self.disk, indices), load, strict=False)

    def stats(self) -> tuple[CacheStats, CacheStats | None]:
        """Return the counts of the memory and of the disk. The misses of the last of them are reads of the source."""
        return self.memory.stats(), None if self.disk is None else self.disk.stats()

    def close(self) -> None:
        """Write the waiting samples, close the files, and release the memory, in this process. Twice is fine."""
        if self.disk is not None:
            self.disk.close()  # first: which samples are written depends on the samples in memory
        self.memory.close()


def _empty(cache: SharedCache | RaggedCache | DiskCache, indices: Sequence[int]) -> list[int]:
    return [idx for idx in indices if cache.aux_array[idx] == EMPTY]


class _LostError(Exception):
    """A sample was on the disk, and is damaged."""
