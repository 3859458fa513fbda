"""TieredCache: samples of any size in shared memory, and behind it, if the options name one, in a folder on a local disk."""

from collections.abc import Callable
from typing import Any

from stocache.cache.options import CacheOptions
from stocache.cache.ragged import RaggedCache
from stocache.cache.stats import MISSING, CacheStats
from stocache.disk.cache import DiskCache


class TieredCache:
    """A `RaggedCache`, and a `DiskCache` behind it if the options name a disk.

    A sample that is not in memory comes from the disk, or else from the source. Samples from the source are written to the disk
    behind the caller. Memory keeps the samples that it has room for, from either.

    Args:
        options: of the cache in memory, and of the disk.
        dataset_len: samples in the whole dataset.
        expected_len: the number of samples, where ``dataset_len`` is an upper bound.

    Attributes:
        memory: the `RaggedCache`.
        disk: the `DiskCache`, or None.

    Raises:
        DiskError: the folder cannot be a disk cache.
        LimitError, CodecError, CacheNameError, MismatchError, SegmentError, BusyError: as for the two caches.
    """

    def __init__(self, options: CacheOptions, dataset_len: int, expected_len: int | None = None) -> None:
        self.memory, self._expected_len = RaggedCache.from_options(options, dataset_len), expected_len
        self.disk = DiskCache.from_options(options, dataset_len)

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

    def get_or_load(self, idx: int, load: Callable[[int], Any], *, copy: bool = True, strict: bool = True) -> Any:
        """Return sample ``idx`` from memory, from the disk, or else from ``load(idx)``, which both then keep.

        The arguments and errors are those of `RaggedCache.get_or_load`. A sample that only the disk does not take is returned
        all the same.
        """
        return self.memory.get_or_load(idx, load if self.disk is None else self._behind(load), copy=copy, strict=strict)

    def _behind(self, load: Callable[[int], Any]) -> Callable[[int], Any]:
        """Return a function that loads a sample from the disk, or with ``load``."""
        assert self.disk is not None
        serve, kept = self.disk.serve, self.memory.keeps
        return lambda idx: serve(lambda indices: map(load, indices), kept, [idx], self._expected_len)[0]

    def stats(self) -> tuple[CacheStats, CacheStats | None]:
        """Return the counts of the memory, and those of the disk. The misses of the last of them are reads of the source."""
        return self.memory.stats(), None if self.disk is None else self.disk.stats()

    def close(self) -> None:
        """Write the waiting samples, close the files, and release the memory, in this process. Twice is fine."""
        if self.disk is not None:
            self.disk.close()  # first: which samples are written depends on those in memory
        self.memory.close()


class _LostError(Exception):
    """A sample was on the disk, and is damaged."""
