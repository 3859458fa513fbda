"""Gather batches of cached samples on a GPU, which reads the slots of the cache itself: `DeviceGatherer`.

NOTE [ Where a sample comes from ]
    A batch arrives as a `PlannedBatch`: the indices of its samples, and the samples that were not in the cache. Small columns,
    such as labels, are gathered by the CPU, and go to the GPU together with the numbers of the rows. Of the large ones a sample
    is in one of three places (`RowSource`):

    - a row of the `DeviceTier`, if ``device_limit_gib`` has one for it. The GPU copies it at the rate of its memory.
    - a slot of the cache whose memory is registered. The GPU copies it over the bus, with no work of the CPU.
    - memory of this process: it was loaded for this batch, or its slot is not registered. The CPU has gathered it.

    The state of a sample was read before its index was sent. It may have become SET since, which is only a miss; it never
    reverts. So the GPU needs no states. The numbers of the slots come from `SlotArrays.slots_of`, on the CPU: as many bytes as
    the indices, and 3 µs for 256 (the same arithmetic on the GPU would be eight kernels of 5 µs each to start).

NOTE [ Batches that are gathered together ]
    A call of CUDA costs the CPU 2 to 60 µs, whatever its size. So if all samples are cached and registered, small batches are
    gathered together, up to 64 MiB, by one kernel for each column, small columns too. Their numbers go to the GPU in one copy.
    Each batch is then copied to memory of its own: a batch that the user holds keeps no others.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.columns import as_bytes
from stocache.cache.shared import SharedCache
from stocache.datasets.batches import BatchSpec, PlannedBatch
from stocache.loader.device.cuda import send_together
from stocache.loader.device.kernels import copy_rows, select_rows
from stocache.loader.device.mapping import MappedSegment
from stocache.loader.device.tier import DeviceTier, release_when_full
from stocache.shm.pool import pinned_memory
from stocache.system.limits import MIB, format_size

logger = logging.getLogger("stocache")

_SMALL = 1024  # bytes of a value, up to which the CPU gathers its column
_TOGETHER = 64 * MIB  # bytes of large columns that are gathered at once

Rows: TypeAlias = NDArray[np.int64]
"""Numbers of rows, or positions in batches."""


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


@dataclass
class RowSource:
    """Rows that the device can read, and which samples of the gathered batches they are.

    Attributes:
        kind: the attribute of `DeviceStats` that counts them.
        positions: of the samples in the batches, ascending: an array, and a tensor of the device as soon as it was sent.
        numbers: of the rows, likewise.
        rows: all rows of each column, as words, by the number of the column.
    """

    kind: str
    positions: Any
    numbers: Any
    rows: Mapping[int, Any]


class DeviceGatherer:
    """Makes batches of a cache's samples on a device. Threads may share it.

    Args:
        cache: the cache.
        cuda: the device.

    Attributes:
        limit: bytes of device memory for samples; 0 as soon as the model has needed them.
        together: how many batches were gathered together the last time.
    """

    def __init__(self, cache: SharedCache, cuda: Any, limit: int) -> None:
        spec = BatchSpec.of(cache)
        assert spec is not None  # else no `PlannedBatch` is made
        self._cache, self._cuda, self._shapes, self._join = cache, cuda, spec.shapes, spec.join
        columns = cache.slot_arrays.columns
        self._large = [number for number, column in enumerate(columns) if column.nbytes > _SMALL]
        self._small = [number for number, column in enumerate(columns) if column.nbytes <= _SMALL]
        self._dtypes = [column.words.dtype for column in columns]
        self._row_bytes = sum(columns[number].nbytes for number in self._large)
        self._tier: DeviceTier | None = None
        self.limit, self.together = limit if self._large else 0, 1
        self._lock = threading.RLock()
        self._counts = {"from_tier": 0, "from_cache": 0, "from_host": 0}

    def gather(self, batch: PlannedBatch) -> tuple[Any, list[Tensor]]:
        """Return the batch on the device, and its tensors there. Call it on the stream of the device.

        Raises:
            ClosedError: the cache is closed.
        """
        if batch.positions is not None and len(batch.positions) == len(batch.indices):  # in order
            self._counts["from_host"] += len(batch.indices)
            tensors = [rows.to(self._cuda.device, non_blocking=True) for rows in batch.tensors]
            return self._join(tensors), tensors
        with self._lock:  # meanwhile no other thread gives the rows of the tier to other samples
            if batch.gathered is None:
                self._gather(self._with_following(batch))
        data, tensors, _ = batch.take()
        return data, tensors

    def _with_following(self, batch: PlannedBatch) -> list[PlannedBatch]:
        """Return a batch, and the batches after it that are gathered with it."""
        # see NOTE [ Batches that are gathered together ]
        batches, admits = [batch], self.limit and (self._tier is None or not self._tier.is_full)
        if batch.following is None or admits or not self._mapped.is_complete or self._views(self._small) is None:
            return batches
        while (following := batches[-1].following) is not None and following.gathered is None:
            batches.append(following)
        most = max(1, _TOGETHER // max(1, self._row_bytes * len(batch.indices)))
        parts = -(-len(batches) // most)
        return batches[: -(-len(batches) // parts)]  # about as many each time

    def _gather(self, batches: list[PlannedBatch]) -> None:
        """Begin to gather batches."""
        first, alone, sizes = batches[0], len(batches) == 1, [len(batch.indices) for batch in batches]
        count, indices = sum(sizes), np.concatenate([batch.indices for batch in batches])
        positions = np.arange(count)
        if first.positions is not None:  # it is alone
            positions = np.delete(positions, first.positions)
            indices = indices[positions]
        slots, tier = self._cache.slot_arrays.slots_of(indices), self._open_tier()
        sources = self._sources(first, positions, slots, tier)
        admitted, kept = _admitted(sources, tier)
        copies, small = [*sources], dict[int, Any]()
        if alone:
            small = {number: self._small_column(number, first, positions, slots) for number in self._small}
        else:
            copies.append(RowSource("from_cache", positions, slots, self._views(self._small) or {}))
        arrays = [array for each in (*copies, *admitted) for array in (each.positions, each.numbers)]
        sent = send_together([*arrays, *small.values()], self._cuda.device)
        for each in (*copies, *admitted):
            each.positions, each.numbers, *sent = sent
        small = dict(zip(small, sent, strict=True))
        gathered: list[list[Tensor]] = [[] for _ in batches]
        for number, (shape, dtype) in enumerate(self._shapes):
            if number in small:  # a view that may be changed while a view of another column has a gradient
                parts = [small[number].view(dtype).view(count, *shape).data]
            else:
                out = self._empty(count, number)
                words = self._as_words(out, number)
                for each in copies:
                    if number in each.rows:
                        copy = copy_rows if alone and each.kind == "from_cache" else select_rows
                        copy(each.rows[number], each.numbers, words, each.positions if len(each.numbers) < count else None)
                for each in admitted:
                    select_rows(words, each.positions, each.rows[number], each.numbers)
                parts = [out] if alone else self._separate(out, sizes, number)
            for own, part in zip(gathered, parts, strict=True):
                own.append(part)
        if tier is not None and kept:
            tier.keep(*kept)
        for source in sources:
            self._counts[source.kind] += len(source.numbers)
        event, self.together = self._cuda.mark(), len(batches)
        for batch, tensors in zip(batches, gathered, strict=True):
            batch.gathered, batch.following = (self._join(tensors), tensors, event), None

    def _sources(self, batch: PlannedBatch, positions: Rows, slots: Rows, tier: DeviceTier | None) -> list[RowSource]:
        """Return the sources of the large columns. ``positions``, ``slots``: of the samples that are in the cache."""
        sources = list[RowSource]()
        if not self._large:
            return sources
        if batch.positions is not None:
            sources.append(self._of_host(batch.positions, batch.tensors.__getitem__))
        if tier is not None:
            numbers = tier.numbers(slots)
            kept = numbers >= 0
            sources.append(RowSource("from_tier", positions[kept], numbers[kept], tier.rows))
            positions, slots = positions[~kept], slots[~kept]
        mapped, arrays, views = self._mapped, self._cache.slot_arrays, self._views(self._large)
        readable = np.full(len(slots), views is not None)
        if not mapped.is_complete:
            for number in self._large:
                readable &= mapped.registered[arrays.extents_of(slots, arrays.places[number])].all(1)
            if not readable.all():
                mapped.ask()
        if not readable.all():
            sources.append(self._of_host(positions[~readable], partial(self._gathered, slots[~readable])))
            positions, slots = positions[readable], slots[readable]
        sources.append(RowSource("from_cache", positions, slots, views or {}))
        return [source for source in sources if len(source.numbers)]

    def _of_host(self, positions: Rows, values: Callable[[int], Tensor]) -> RowSource:
        """Return the source of samples in host memory, which are sent. ``values``: returns those of a column."""
        rows = {number: values(number).to(self._cuda.device, non_blocking=True) for number in self._large}
        words = {number: self._as_words(own, number) for number, own in rows.items()}
        return RowSource("from_host", positions, np.arange(len(positions)), words)

    def _gathered(self, slots: Rows, number: int) -> Tensor:
        """Return the values of some slots for a column, gathered by the CPU into pinned memory."""
        column, (shape, dtype) = self._cache.slot_arrays.columns[number], self._shapes[number]
        rows = pinned_memory(len(slots) * column.nbytes).view(dtype).view(len(slots), *shape)
        column.gather(slots, rows, parallel=False)
        return rows

    def _small_column(self, number: int, batch: PlannedBatch, positions: Rows, slots: Rows) -> NDArray[np.uint8]:
        """Return the values of a small column as bytes. ``positions``, ``slots``: of the samples that are in the cache."""
        column = self._cache.slot_arrays.columns[number]
        cached = np.empty((len(slots), column.nbytes), np.uint8)
        column.gather(slots, cached, parallel=False)
        if batch.positions is None:
            return cached
        values = np.empty((len(batch.indices), column.nbytes), np.uint8)
        values[positions], values[batch.positions] = cached, as_bytes(batch.tensors[number])
        return values

    def _views(self, numbers: list[int]) -> dict[int, Tensor] | None:
        """Return the slots of columns as the device reads them; None if it cannot read the first ones yet."""
        mapped, arrays = self._mapped, self._cache.slot_arrays
        views = {each: mapped.view(self._cuda, arrays.places[each][0], arrays.columns[each].words) for each in numbers}
        known = {number: view for number, view in views.items() if view is not None}
        return known if len(known) == len(views) else None

    def _as_words(self, values: Tensor, number: int) -> Tensor:
        """Return contiguous values of a column as a matrix of words over the same memory."""
        words: Tensor = values.view(len(values), -1).view(self._dtypes[number])
        return words

    def _empty(self, count: int, number: int) -> Tensor:
        """Return uninitialised values of a column on the device."""
        shape, dtype = self._shapes[number]
        return torch.empty((count, *shape), dtype=dtype, device=self._cuda.device)

    def _separate(self, values: Tensor, sizes: list[int], number: int) -> list[Tensor]:
        """Copy the values of several batches to memory of their own."""
        parts = [self._empty(size, number) for size in sizes]
        torch.split_with_sizes_copy(values, sizes, out=parts)
        return parts

    def _open_tier(self) -> DeviceTier | None:
        if self._tier is None and self.limit:
            words = {number: self._cache.slot_arrays.columns[number].words for number in self._large}
            self._tier = DeviceTier(self.limit, len(self._cache), words, self._cuda)
            release_when_full(self)
        return self._tier

    def begin_epoch(self) -> None:
        """Empty the tier if samples were overwritten, or the cache was cleared, since it has taken its samples."""
        with self._lock:
            if self._tier is not None and not self._cache.closed:
                stats = self._cache.stats()
                self._tier.keep_since(stats.fills - stats.filled)

    def release(self, device: int | None = None) -> None:
        """Do without a tier from now on: the model needs its memory. ``device``: the one that has none left; None for any."""
        if not self.limit or device not in (None, self._cuda.device.index):
            return
        tier, self._tier, self.limit = self._tier, None, 0  # a batch that is being gathered keeps the rows of the tier
        if tier is None:
            logger.warning("%s has no memory for device_limit_gib: samples stay in the cache.", self._cuda.device)
        else:
            logger.warning(
                "%s is out of memory. The %s of cached samples on it are given back to the model. Lower device_limit_gib.",
                self._cuda.device, format_size(tier.nbytes),
            )  # fmt: skip

    @property
    def _mapped(self) -> MappedSegment:
        return MappedSegment.of(self._cache.slot_arrays.segment, self._cuda)

    def wait(self) -> None:
        """Wait until the device may read all samples that are cached now."""
        self._mapped.wait()

    def stats(self) -> DeviceStats:
        """Return the counts so far, and the memory that is in use."""
        tier, registered = self._tier, 0 if self._cache.closed else self._mapped.nbytes
        return DeviceStats(**self._counts, tier_bytes=0 if tier is None else tier.nbytes, registered_bytes=registered)


def _admitted(sources: list[RowSource], tier: DeviceTier | None) -> tuple[list[RowSource], tuple[Rows, ...]]:
    """Return the samples from the cache that get rows of the tier, if there are some, and what to `keep` in it."""
    source = next((source for source in sources if source.kind == "from_cache"), None)
    if source is None or tier is None or tier.is_full:
        return [], ()
    which, numbers = tier.admit(source.numbers)
    kept = source.numbers[which], numbers
    return ([RowSource("from_tier", source.positions[which], numbers, tier.rows)], kept) if len(which) else ([], ())
