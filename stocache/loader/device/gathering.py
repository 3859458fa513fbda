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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.columns import as_bytes
from stocache.cache.shared import SharedCache
from stocache.datasets.batches import BatchGroup, BatchSpec, GroupPart, PartialBatch
from stocache.loader.device.cuda import Staging
from stocache.loader.device.kernels import copy_rows, select_rows
from stocache.loader.device.mapping import MappedSegment
from stocache.loader.device.plans import Admitted, Plan, Rows, RowSource
from stocache.loader.device.tier import DeviceTier
from stocache.shm.pool import pinned_memory
from stocache.system.limits import MIB

logger = logging.getLogger("stocache")

_SMALL = 1024  # bytes of a value, up to which the CPU gathers its column
_TOGETHER = 64 * MIB  # bytes of planned batches that are gathered at once


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
        self._row_bytes = sum(columns[number].nbytes for number in self._large)
        self._tier: DeviceTier | None = None
        self._counts = {"from_tier": 0, "from_cache": 0, "from_host": 0}

    def gather(self, batch: PartialBatch | GroupPart) -> tuple[Any, list[Tensor]]:
        """Return the batch on the device, and its tensors there. Call it on the stream of the device.

        Raises:
            ClosedError: the cache is closed.
        """
        # see NOTE [ Where a sample comes from ], NOTE [ Batches that are planned together ]
        if isinstance(batch, GroupPart):
            plan = self._plan_of(batch.group)
            if plan is not None and self._gather_step(plan, batch.number // plan.together):
                return self._take(plan, batch.number)
            batch.group.plan = None
            batch = PartialBatch(batch.indices)
        if batch.positions is not None and len(batch.positions) == len(batch.indices):  # in order
            self._counts["from_host"] += len(batch.indices)
            tensors = [rows.to(self._cuda.device, non_blocking=True) for rows in batch.tensors]
            return self._join(tensors), tensors
        alone = self._plan(batch, [len(batch.indices)])
        while not self._gather_step(alone, 0):  # another thread has released the tier
            alone = self._plan(batch, [len(batch.indices)])
        return self._take(alone, 0)

    def take(self, batch: GroupPart) -> tuple[Any, list[Tensor], Any] | None:
        """Return a batch that was gathered together with an earlier one, its tensors, and their event; None for others."""
        plan: Plan | None = batch.group.plan
        if plan is None or batch.number not in plan.gathered:
            return None
        return *self._take(plan, batch.number), plan.event

    def _plan_of(self, group: BatchGroup) -> Plan | None:
        """Return the plan of a group; None if its batches have to be planned when they are asked for."""
        tier, _ = self._tier, self._cache.slot_arrays  # an error if the cache is closed
        if not group.was_met:
            group.was_met = True
            readable = self._mapped.is_complete and all(self._view(self._mapped, each) is not None for each in self._small)
            if readable and (not self._limit or (tier is not None and tier.is_full)):
                group.plan = self._plan(PartialBatch(group.indices), np.diff(group.ends, prepend=0).tolist())
        plan: Plan | None = group.plan
        return plan

    def _plan(self, batch: PartialBatch, sizes: list[int]) -> Plan:
        """Plan a batch, or several one after the other, of some sizes."""
        index, loaded, arrays = batch.indices, batch.positions, self._cache.slot_arrays
        together = max(1, min(len(sizes), _TOGETHER // max(1, sizes[0] * self._row_bytes)))
        starts = np.unique([0, *np.cumsum(sizes)[together - 1 :: together], len(index)])
        version = _version_of(self._open_tier() if self._large else None)
        hits = None if loaded is None else np.delete(np.arange(len(index)), loaded)
        slots = arrays.slots_of(index if hits is None else index[hits])
        copy = copy_rows if together == 1 else select_rows  # small batches are no large one
        sources = self._sources(hits, slots, copy) if self._large else []
        if loaded is not None and self._large:
            sources.append(self._of_host(loaded, [batch.tensors[number] for number in self._large]))
        staging = Staging()
        if len(sizes) == 1:
            small = [staging.add(self._small_column(number, hits, slots, batch)) for number in self._small]
        else:
            chosen = staging.add(slots)
        for source in sources:
            source.stage(staging, starts)
        admitted = self._admit(sources, staging)
        staging.send(self._cuda.device)
        for source in sources:
            source.receive(staging)
        if admitted is not None:
            admitted.receive(staging)
        values: dict[int, Sequence[Tensor]]
        if len(sizes) == 1:
            places = zip(small, map(self._shapes.__getitem__, self._small), strict=True)
            parts = [[staging.at(place, (len(index), *shape), dtype).data] for place, (shape, dtype) in places]
            values = dict(zip(self._small, parts, strict=True))
        else:
            values = {number: self._small_parts(number, staging.indices(chosen), sizes) for number in self._small}
        return Plan(sizes, together, version, sources, values, admitted)

    def _small_parts(self, number: int, slots: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        """Begin to gather a small column of several batches. ``slots``: of their samples, on the device."""
        out = self._empty(len(slots), number)
        select_rows(self._view(self._mapped, number), slots, _as_words(out, self._dtypes[number]))
        return self._separate(out, sizes, number)

    def _separate(self, values: Tensor, sizes: list[int], number: int) -> list[Tensor]:
        """Copy the values of several batches to memory of their own."""
        parts = [self._empty(size, number) for size in sizes]
        torch.split_with_sizes_copy(values, sizes, out=parts)
        return parts

    def _take(self, plan: Plan, number: int) -> tuple[Any, list[Tensor]]:
        """Take a batch of a plan that was gathered."""
        large, small = iter(plan.gathered.pop(number)), plan.small
        tensors = [small[column][number] if column in small else next(large) for column in range(len(self._shapes))]
        return self._join(tensors), tensors

    def _gather_step(self, plan: Plan, step: int) -> bool:
        """Begin to gather the large columns of the batches of a step. Return False if the tier has other rows than planned."""
        tier = self._tier
        of_tier = [] if tier is None else tier.rows  # for all columns: meanwhile a thread may find no memory, and release it
        if _version_of(tier) != plan.version:
            return False
        first = step * plan.together
        sizes = plan.sizes[first : first + plan.together]
        gathered: list[list[Tensor]] = [[] for _ in sizes]
        for k, number in enumerate(self._large):
            out = self._empty(sum(sizes), number)
            words = _as_words(out, self._dtypes[number])
            for source in plan.sources:
                source.copy_to(words, k, step, of_tier)
            if plan.admitted is not None:
                plan.admitted.copy_from(words, k, of_tier)
            parts = [out] if len(sizes) == 1 else self._separate(out, sizes, number)
            for own, part in zip(gathered, parts, strict=True):
                own.append(part)
        if plan.admitted is not None:
            plan.admitted.keep(plan.version)
        for source in plan.sources:
            self._counts[source.kind] += source.sizes[step]
        plan.event = self._cuda.mark()  # before the batches can be taken, also after an interrupt
        plan.gathered.update(enumerate(gathered, first))
        return True

    def _empty(self, count: int, number: int) -> Tensor:
        """Return uninitialised values of a column on the device."""
        shape, dtype = self._shapes[number]
        return torch.empty((count, *shape), dtype=dtype, device=self._cuda.device)

    def _small_column(self, number: int, hits: Rows | None, slots: Rows, batch: PartialBatch) -> NDArray[np.uint8]:
        """Return the values of a small column of the whole batch, as bytes."""
        column = self._cache.slot_arrays.columns[number]
        of_hits = np.empty((len(slots), column.nbytes), np.uint8)
        column.gather(slots, of_hits, parallel=False)
        if hits is None:
            return of_hits
        values = np.empty((len(batch.indices), column.nbytes), np.uint8)
        values[hits], values[batch.positions] = of_hits, as_bytes(batch.tensors[number])
        return values

    def _sources(self, hits: Rows | None, slots: Rows, copy: Callable[..., None]) -> list[RowSource]:
        """Return the sources of the large columns of samples, given their positions, None for all, and slots."""
        mapped, tier = self._mapped, self._open_tier()
        if tier is None and mapped.is_complete:
            return [RowSource("from_cache", hits, slots, self._views(mapped).__getitem__, copy)]
        sources, positions = list[RowSource](), np.arange(len(slots)) if hits is None else hits
        if tier is not None and (there := (numbers := tier.numbers(slots)) >= 0).any():
            kept = hits if there.all() else positions[there]
            sources.append(RowSource("from_tier", kept, numbers[there], None))
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
            sources.append(RowSource("from_cache", positions[covered], slots[covered], views.__getitem__, copy))
        if not covered.all():
            rows = list(map(partial(self._gathered, slots[~covered]), self._large))
            sources.append(self._of_host(positions[~covered], rows))
        return sources

    def _views(self, mapped: MappedSegment) -> list[Any]:
        """Return the slots of each large column as the device reads them; None for those that it cannot read yet."""
        return [self._view(mapped, number) for number in self._large]

    def _view(self, mapped: MappedSegment, number: int) -> Any:
        arrays = self._cache.slot_arrays
        return mapped.view(self._cuda, arrays.places[number][0], arrays.columns[number].words)

    def _gathered(self, slots: Rows, number: int) -> Tensor:
        """Return the values of some slots for a large column, gathered by the CPU into pinned memory."""
        column, (shape, dtype) = self._cache.slot_arrays.columns[number], self._shapes[number]
        rows = pinned_memory(len(slots) * column.nbytes).view(dtype).view(len(slots), *shape)
        column.gather(slots, rows, parallel=False)
        return rows

    def _of_host(self, positions: Rows, tensors: list[Tensor]) -> RowSource:
        """Return the source of rows in host memory, which are copied; ``tensors``: of each large column."""

        def sent(k: int) -> Tensor:
            return _as_words(tensors[k].to(self._cuda.device, non_blocking=True), self._dtypes[self._large[k]])

        return RowSource("from_host", positions, np.arange(len(positions)), sent)

    def _open_tier(self) -> DeviceTier | None:
        if self._tier is None and self._limit:
            words = [self._cache.slot_arrays.columns[number].words for number in self._large]
            self._tier = DeviceTier(self._limit, len(self._cache), [(each.dtype, each.shape[1]) for each in words], self._cuda)
        return self._tier

    def _admit(self, sources: list[RowSource], staging: Staging) -> "Admitted | None":
        """Give rows of the tier to samples from the cache. Return them; None if there are none."""
        source = next((source for source in sources if source.kind == "from_cache"), None)
        if source is None or self._tier is None or self._tier.is_full:
            return None
        which, numbers = self._tier.admit(source.numbers)
        positions = which if source.positions is None else source.positions[which]
        return Admitted(self._tier, source.numbers[which], positions, numbers, staging) if len(which) else None

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


def _version_of(tier: DeviceTier | None) -> int:
    return -1 if tier is None else tier.version
