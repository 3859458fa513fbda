"""Gather batches of cached samples on a GPU, which reads the slots of the cache itself: `DeviceGatherer`.

NOTE [ Where a sample comes from ]
    A batch arrives as the indices of its samples, with those that were not in the cache (`PartialBatch`). Small columns, such
    as labels, are gathered by the CPU, and go to the GPU together with the numbers of the rows. Of the large ones a sample is
    in one of three places:

    - a row of the `DeviceTier`, if ``device_limit_gib`` has one for it. The GPU copies it at the rate of its memory.
    - a slot of the cache whose memory is registered. The GPU copies it over the bus, with no work of the CPU.
    - memory of this process: it was loaded for this batch, or its slot is not registered. The CPU has gathered it.

    The state of a sample was read before its index was sent. It may have become SET since, which is only a miss; it never
    reverts. So the GPU needs no states. The numbers of the slots come from `SlotArrays.slots_of`, on the CPU: as many bytes as
    the indices, and 3 µs for 256 (the same arithmetic on the GPU would be eight kernels of 5 µs each to start).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.shared import SharedCache
from stocache.cache.slots import as_bytes
from stocache.datasets.batches import BatchSpec, PartialBatch
from stocache.loader.device.cuda import Staging
from stocache.loader.device.kernels import copy_rows, select_rows
from stocache.loader.device.mapping import MappedSegment
from stocache.loader.device.tier import DeviceTier
from stocache.shm.pool import pinned_memory

logger = logging.getLogger("stocache")

_SMALL = 1024  # bytes of a value, up to which the CPU gathers its column

_Rows = NDArray[np.int64]


@dataclass(frozen=True)
class DeviceStats:
    """Where the samples came from that a loader has gathered on a GPU.

    Attributes:
        from_tier: from the memory of the device.
        from_cache: from the cache in the memory of the host, read by the device.
        from_host: loaded, or gathered by the CPU, and copied.
        tier_bytes: memory of the device that holds samples.
        registered_bytes: memory of the cache that the device may read.
    """

    from_tier: int = 0
    from_cache: int = 0
    from_host: int = 0
    tier_bytes: int = 0
    registered_bytes: int = 0


class _Source:
    """Rows that the device can read, and their positions in a batch.

    Args:
        kind: the attribute of `DeviceStats` that counts them.
        positions: in the batch, ascending; None for all.
        numbers: of the rows.
        rows: returns all rows of the k-th large column, as words.
        copy: `copy_rows` or `select_rows`.
    """

    def __init__(
        self,
        kind: str,
        positions: _Rows | None,
        numbers: _Rows,
        rows: Callable[[int], Tensor],
        copy: Callable[..., None] = select_rows,
    ) -> None:
        self.kind, self.positions, self.numbers, self._rows, self._copy = kind, positions, numbers, rows, copy

    def stage(self, staging: Staging) -> None:
        """Add the numbers and the positions to what goes to the device."""
        self._places = staging.add(self.numbers), None if self.positions is None else staging.add(self.positions)

    def copy_to(self, out: Tensor, k: int, staging: Staging) -> None:
        """Copy the rows of the k-th large column into a batch."""
        numbers, positions = self._places
        to = None if positions is None else staging.indices(positions)
        self._copy(self._rows(k), staging.indices(numbers), out, to)


class _Admitted:
    """Samples of a batch that get rows of the tier.

    Args:
        tier: the tier.
        slots, positions, numbers: of the samples: their slots, their positions in the batch, and the rows.
        staging: what goes to the device.
    """

    def __init__(self, tier: DeviceTier, slots: _Rows, positions: _Rows, numbers: _Rows, staging: Staging) -> None:
        self._tier, self._slots, self._numbers = tier, slots, numbers
        self._places = staging.add(positions), staging.add(numbers)

    def copy_from(self, batch: Tensor, k: int, staging: Staging) -> None:
        """Copy the rows of the k-th large column out of a batch."""
        positions, numbers = map(staging.indices, self._places)
        self._tier.rows[k].index_copy_(0, numbers, batch.index_select(0, positions))

    def keep(self) -> None:
        """Serve the samples from the tier from now on."""
        self._tier.keep(self._slots, self._numbers)


class DeviceGatherer:
    """Makes batches of a cache's samples on a device.

    Args:
        cache: the cache.
        cuda: the device.
        limit: bytes of device memory for samples.
    """

    def __init__(self, cache: SharedCache, cuda: Any, limit: int) -> None:
        spec = BatchSpec.of(cache)
        assert spec is not None  # else no `PartialBatch` is made
        self._cache, self._cuda, self._limit, self._shapes, self._join = cache, cuda, limit, spec.shapes, spec.join
        columns = cache.slot_arrays.columns
        self._large = [number for number, column in enumerate(columns) if column.nbytes > _SMALL]
        self._small = [number for number, column in enumerate(columns) if column.nbytes <= _SMALL]
        self._dtypes = [column.words.dtype for column in columns]
        self._tier: DeviceTier | None = None
        self._counts = {"from_tier": 0, "from_cache": 0, "from_host": 0}

    def gather(self, batch: PartialBatch) -> tuple[Any, list[Tensor]]:
        """Return the batch on the device, and its tensors there. Call it on the stream of the device.

        Raises:
            ClosedError: the cache is closed.
        """
        # see NOTE [ Where a sample comes from ]
        index, loaded, arrays = batch.indices, batch.positions, self._cache.slot_arrays
        count, device = len(index), self._cuda.device
        if loaded is not None and len(loaded) == count:  # in order
            self._counts["from_host"] += count
            tensors = [rows.to(device, non_blocking=True) for rows in batch.tensors]
            return self._join(tensors), tensors
        hits = None if loaded is None else np.delete(np.arange(count), loaded)
        slots = arrays.slots_of(index if hits is None else index[hits])
        sources = self._sources(hits, slots) if self._large else []
        if loaded is not None and self._large:
            sources.append(self._of_host(loaded, [batch.tensors[number] for number in self._large]))
        staging = Staging()
        small = [staging.add(self._small_column(number, hits, slots, batch)) for number in self._small]
        for source in sources:
            source.stage(staging)
            self._counts[source.kind] += len(source.numbers)
        admitted = self._admit(sources, staging)
        staging.send(device)
        tensors = []
        places = iter(small)
        for number, (shape, dtype) in enumerate(self._shapes):
            if number in self._small:
                tensors.append(staging.at(next(places), (count, *shape), dtype))
                continue
            k, out = self._large.index(number), torch.empty((count, *shape), dtype=dtype, device=device)
            words = _as_words(out, self._dtypes[number])
            for source in sources:
                source.copy_to(words, k, staging)
            if admitted is not None:
                admitted.copy_from(words, k, staging)
            tensors.append(out)
        if admitted is not None:
            admitted.keep()
        return self._join(tensors), tensors

    def _small_column(self, number: int, hits: _Rows | None, slots: _Rows, batch: PartialBatch) -> NDArray[np.uint8]:
        """Return the values of a small column of the whole batch, as bytes."""
        column = self._cache.slot_arrays.columns[number]
        of_hits = np.empty((len(slots), column.nbytes), np.uint8)
        column.gather(slots, of_hits, parallel=False)
        if hits is None:
            return of_hits
        values = np.empty((len(batch.indices), column.nbytes), np.uint8)
        values[hits], values[batch.positions] = of_hits, as_bytes(batch.tensors[number])
        return values

    def _sources(self, hits: _Rows | None, slots: _Rows) -> list[_Source]:
        """Return the sources of the large columns of samples, given their positions, None for all, and slots."""
        mapped, tier = self._mapped, self._open_tier()
        if tier is None and mapped.is_complete:
            return [_Source("from_cache", hits, slots, self._views(mapped).__getitem__, copy_rows)]
        sources, positions = list[_Source](), np.arange(len(slots)) if hits is None else hits
        if tier is not None and (there := (numbers := tier.numbers(slots)) >= 0).any():
            kept = hits if there.all() else positions[there]
            sources.append(_Source("from_tier", kept, numbers[there], tier.rows.__getitem__))
            positions, slots = positions[~there], slots[~there]
        if not len(slots):
            return sources
        arrays, covered = self._cache.slot_arrays, np.ones(len(slots), bool)
        if not mapped.is_complete:
            for number in self._large:
                covered &= mapped.registered[arrays.extents_of(slots, arrays.places[number])].all(1)
            if not covered.all():
                mapped.ask()
        views = self._views(mapped)
        if any(view is None for view in views):
            covered[:] = False
        if covered.any():
            sources.append(_Source("from_cache", positions[covered], slots[covered], views.__getitem__, copy_rows))
        if not covered.all():
            rows = list(map(partial(self._gathered, slots[~covered]), self._large))
            sources.append(self._of_host(positions[~covered], rows))
        return sources

    def _views(self, mapped: MappedSegment) -> list[Any]:
        """Return the slots of each large column as the device reads them; None for those that it cannot read yet."""
        arrays = self._cache.slot_arrays
        return [mapped.view(self._cuda, arrays.places[number][0], arrays.columns[number].words) for number in self._large]

    def _gathered(self, slots: _Rows, number: int) -> Tensor:
        """Return the values of some slots for a large column, gathered by the CPU into pinned memory."""
        column, (shape, dtype) = self._cache.slot_arrays.columns[number], self._shapes[number]
        rows = pinned_memory(len(slots) * column.nbytes).view(dtype).view(len(slots), *shape)
        column.gather(slots, rows, parallel=False)
        return rows

    def _of_host(self, positions: _Rows, tensors: list[Tensor]) -> _Source:
        """Return the source of rows in host memory, which are copied; ``tensors``: of each large column."""

        def sent(k: int) -> Tensor:
            return _as_words(tensors[k].to(self._cuda.device, non_blocking=True), self._dtypes[self._large[k]])

        return _Source("from_host", positions, np.arange(len(positions)), sent)

    # ------------------------------------------------------------------------------------------------ the tier

    def _open_tier(self) -> DeviceTier | None:
        if self._tier is None and self._limit:
            words = [self._cache.slot_arrays.columns[number].words for number in self._large]
            self._tier = DeviceTier(self._limit, len(self._cache), [(each.dtype, each.shape[1]) for each in words], self._cuda)
        return self._tier

    def _admit(self, sources: list[_Source], staging: Staging) -> "_Admitted | None":
        """Give rows of the tier to samples from the cache. Return them; None if there are none."""
        source = next((source for source in sources if source.kind == "from_cache"), None)
        if source is None or self._tier is None or self._tier.is_full:
            return None
        which, numbers = self._tier.admit(source.numbers)
        positions = which if source.positions is None else source.positions[which]
        return _Admitted(self._tier, source.numbers[which], positions, numbers, staging) if len(which) else None

    def begin_epoch(self) -> None:
        """Empty the tier if samples were overwritten, or the cache was cleared, since it has taken its samples."""
        if self._tier is not None and not self._cache.closed:
            stats = self._cache.stats()
            self._tier.keep_since(stats.fills - stats.filled)

    def release(self) -> bool:
        """Do without a tier from now on. Return whether there was one, or was to be."""
        if not self._limit:
            return False
        tier, self._tier, self._limit = self._tier, None, 0
        if tier is None:
            logger.warning("%s has no memory for device_limit_gib: samples stay in the cache.", self._cuda.device)
        else:
            tier.release()
        return True

    # ------------------------------------------------------------------------------------------------ figures

    @property
    def _mapped(self) -> MappedSegment:
        return MappedSegment.of(self._cache.slot_arrays.segment, self._cuda)

    def wait(self) -> None:
        """Wait until the device may read all samples that are cached now."""
        self._mapped.wait()

    def stats(self) -> DeviceStats:
        """Return the counts so far, and the memory that is in use."""
        tier_bytes = 0 if self._tier is None else self._tier.nbytes
        registered_bytes = 0 if self._cache.closed else self._mapped.nbytes
        return DeviceStats(**self._counts, tier_bytes=tier_bytes, registered_bytes=registered_bytes)


def _as_words(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous rows of any shape as a matrix of words over the same memory."""
    words: Tensor = rows.view(len(rows), -1).view(dtype)
    return words
