"""Gather batches of cached samples on a GPU, which reads the slots of the cache itself: `DeviceGatherer`.

NOTE [ Where a sample comes from ]
    A batch arrives as the indices of its samples, with the samples that were not in the cache (`GatherPlan`). Small columns,
    such as labels, are gathered by the CPU, and go to the GPU together with the numbers of the rows. The large columns of a
    sample are in one of two places (`RowSource`):

    - a slot of the cache whose memory is registered. The GPU copies it over the bus, with no work of the CPU.
    - memory of this process: it was loaded for this batch, or its slot is not registered. The CPU has gathered it.

    The state of a sample was read before its index was sent. It may have become SET since, which is only a miss; it never
    reverts. So the GPU needs no states. The numbers of the slots come from `SlotArrays.slots_of`, on the CPU: as many bytes as
    the indices, and 3 µs for 256 (the same arithmetic on the GPU would be eight kernels of 5 µs each to start).

NOTE [ Batches that are planned together ]
    A call of CUDA costs the CPU 2 to 60 µs, whatever its size. So without workers, and with worker threads, up to 64 batches
    have one `GatherPlan`, if all samples are cached and registered: their rows are found at once and go to the GPU in one copy,
    and it gathers their small columns at once, too. Small batches are gathered in steps, by one kernel up to 64 MiB together,
    and then copied to memory of their own: a batch that the user holds keeps no others.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.columns import as_bytes
from stocache.cache.shared import SharedCache
from stocache.datasets.batches.planned import GatherPlan, PlannedBatch
from stocache.datasets.batches.spec import BatchSpec
from stocache.loader.device.cuda import send_together
from stocache.loader.device.kernels import copy_rows, select_rows
from stocache.loader.device.mapping import MappedSegment
from stocache.shm.pool import pinned_memory
from stocache.system.limits import MIB

_SMALL = 1024  # bytes of a value, up to which the CPU gathers its column
_TOGETHER = 64 * MIB  # bytes of large columns that are gathered at once

Rows: TypeAlias = NDArray[np.int64]
"""Numbers of rows, or positions in batches."""


@dataclass(frozen=True)
class DeviceStats:
    """Where the samples came from that a loader has gathered on a GPU.

    Attributes:
        from_cache: from the cache in the memory of the host, read by the device.
        from_host: loaded, or gathered by the CPU, and copied.
        registered_bytes: memory of the cache that the device may read.
    """

    from_cache: int = 0
    from_host: int = 0
    registered_bytes: int = 0


@dataclass
class RowSource:
    """Rows that the device can read, and which samples of a plan they are.

    Attributes:
        kind: the attribute of `DeviceStats` that counts them.
        positions: of the samples in all batches of the plan, ascending.
        numbers: of the rows.
        rows: all rows of each large column, as words, by its number.
        steps: the numbers, and the positions in the step, on the device, for each step.
    """

    kind: str
    positions: Rows
    numbers: Rows
    rows: Mapping[int, Tensor]
    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class DeviceGatherer:
    """Makes batches of a cache's samples on a device. Threads may share it.

    Args:
        cache: the cache.
        cuda: the device.

    Attributes:
        together: how many batches the steps of the last plan have.
    """

    def __init__(self, cache: SharedCache, cuda: Any) -> None:
        spec = BatchSpec.of(cache)
        assert spec is not None  # else no `PlannedBatch` is made
        self._cache, self._cuda, self._shapes, self._join = cache, cuda, spec.shapes, spec.join
        columns = cache.slot_arrays.columns
        self._large = [number for number, column in enumerate(columns) if column.nbytes > _SMALL]
        self._small = [number for number, column in enumerate(columns) if column.nbytes <= _SMALL]
        self._dtypes = [column.words.dtype for column in columns]
        self._row_bytes = sum(columns[number].nbytes for number in self._large)
        self.together = 1
        self._lock = threading.RLock()
        self._counts = {"from_cache": 0, "from_host": 0}

    def gather(self, batch: PlannedBatch) -> tuple[Any, list[Tensor]]:
        """Return the batch on the device, and its tensors there. Call it on the stream of the device.

        Raises:
            ClosedError: the cache is closed.
        """
        plan, number = batch
        if plan.positions is not None and len(plan.positions) == len(plan.indices):  # in order
            self._counts["from_host"] += len(plan.indices)
            tensors = [rows.to(self._cuda.device, non_blocking=True) for rows in plan.tensors]
            return self._join(tensors), tensors
        with self._lock:
            _ = self._cache.slot_arrays  # an error if it is closed
            if number not in plan.gathered:
                if len(plan.sizes) > 1 and plan.sources is None and not (plan.together and self._may_plan_together()):
                    plan.together = 0
                    plan, number = PlannedBatch.alone(batch.indices)
                if plan.sources is None:
                    self._plan(plan)
                self._gather(plan, number // plan.together)
        data, tensors, _ = plan.gathered.pop(number)
        return data, tensors

    def _may_plan_together(self) -> bool:
        """Whether the device can read all samples; see NOTE [ Batches that are planned together ]."""
        return self._mapped.is_complete and self._views(self._small) is not None

    def _plan(self, plan: GatherPlan) -> None:
        """Look the samples of a plan up, and send the numbers of their rows to the device."""
        sizes, count, alone = plan.sizes, len(plan.indices), len(plan.sizes) == 1
        together = max(1, min(len(sizes), _TOGETHER // max(1, sizes[0] * self._row_bytes)))
        positions, indices = np.arange(count), plan.indices
        if plan.positions is not None:
            positions = np.delete(positions, plan.positions)
            indices = indices[positions]
        slots = self._cache.slot_arrays.slots_of(indices)
        sources = self._sources(plan, positions, slots)
        starts = np.unique([0, *np.cumsum(sizes)[together - 1 :: together], count])
        arrays, lengths = list[NDArray[Any]](), list[list[int]]()
        for each in sources:
            own = np.diff(np.searchsorted(each.positions, starts))
            arrays += each.numbers, each.positions - np.repeat(starts[:-1], own)
            lengths.append(own.tolist())
        arrays += [self._small_column(number, plan, positions, slots) for number in self._small] if alone else [slots]
        sent = send_together(arrays, self._cuda.device)
        for each, parts in zip(sources, lengths, strict=True):
            numbers, places, *sent = sent
            each.steps = list(zip(torch.split(numbers, parts), torch.split(places, parts), strict=True))
        if alone:
            for number, values in zip(self._small, sent, strict=True):
                shape, dtype = self._shapes[number]  # .data: it may be changed while a different column has a gradient
                plan.small[number] = [values.view(dtype).view(count, *shape).data]
        else:
            for number, view in (self._views(self._small) or {}).items():
                plan.small[number] = self._column(number, sizes, partial(select_rows, view, *sent))
        plan.sources, plan.together, self.together = sources, together, together

    def _column(self, number: int, sizes: list[int], copy: Callable[[Tensor], None]) -> list[Tensor]:
        """Return a column of batches of some sizes, each in memory of its own. ``copy``: writes the words of all."""
        shape, dtype = self._shapes[number]
        empty = partial(torch.empty, dtype=dtype, device=self._cuda.device)
        out = empty((sum(sizes), *shape))
        copy(self._as_words(out, number))
        if len(sizes) == 1:
            return [out]
        parts = [empty((size, *shape)) for size in sizes]
        torch.split_with_sizes_copy(out, sizes, out=parts)
        return parts

    def _gather(self, plan: GatherPlan, step: int) -> None:
        """Begin to gather the batches of a step."""
        first, sources = step * plan.together, plan.sources or ()
        sizes = plan.sizes[first : first + plan.together]
        large = dict[int, list[Tensor]]()

        def copy(number: int, words: Tensor) -> None:
            for source in sources:
                numbers, positions = source.steps[step]
                if len(numbers):
                    copy_from = copy_rows if source.kind == "from_cache" and plan.together == 1 else select_rows
                    copy_from(source.rows[number], numbers, words, positions if len(numbers) < len(words) else None)

        for number in self._large:
            large[number] = self._column(number, sizes, partial(copy, number))
        for source in sources:
            self._counts[source.kind] += len(source.steps[step][0])
        event = self._cuda.mark()
        for at in range(len(sizes)):
            own = {number: parts[at] for number, parts in large.items()}
            own |= {number: parts[first + at] for number, parts in plan.small.items()}
            tensors = [own[number] for number in range(len(self._shapes))]
            plan.gathered[first + at] = self._join(tensors), tensors, event
        if len(plan.sizes) == 1:
            plan.sources = ()  # with the rows that were sent to the device; the host's are kept until they are copied

    def _sources(self, plan: GatherPlan, positions: Rows, slots: Rows) -> list[RowSource]:
        """Return the sources of the large columns. ``positions``, ``slots``: of the samples that are in the cache."""
        sources = list[RowSource]()
        if not self._large:
            return sources
        if plan.positions is not None:
            sources.append(self._of_host(plan.positions, plan.tensors.__getitem__))
        mapped, arrays, views = self._mapped, self._cache.slot_arrays, self._views(self._large)
        readable = np.full(len(slots), views is not None)
        if not mapped.is_complete:
            for number in self._large:
                readable &= mapped.registered[arrays.extents_of(slots, arrays.places[number])].all(1)
        if not readable.all():
            mapped.ask()
            sources.append(self._of_host(positions[~readable], partial(self._gathered, slots[~readable])))
            positions, slots = positions[readable], slots[readable]
        sources.append(RowSource("from_cache", positions, slots, views or {}))
        return [source for source in sources if len(source.numbers)]

    def _of_host(self, positions: Rows, values: Callable[[int], Tensor]) -> RowSource:
        """Return the source of samples in host memory, which are sent. ``values``: returns the values of a column."""
        words = {each: self._as_words(values(each).to(self._cuda.device, non_blocking=True), each) for each in self._large}
        return RowSource("from_host", positions, np.arange(len(positions)), words)

    def _gathered(self, slots: Rows, number: int) -> Tensor:
        """Return the values of some slots for a column, gathered by the CPU into pinned memory."""
        column, (shape, dtype) = self._cache.slot_arrays.columns[number], self._shapes[number]
        rows = pinned_memory(len(slots) * column.nbytes).view(dtype).view(len(slots), *shape)
        column.gather(slots, rows, parallel=False)
        return rows

    def _small_column(self, number: int, plan: GatherPlan, positions: Rows, slots: Rows) -> NDArray[np.uint8]:
        """Return the values of a small column as bytes. ``positions``, ``slots``: of the samples that are in the cache."""
        column = self._cache.slot_arrays.columns[number]
        cached = np.empty((len(slots), column.nbytes), np.uint8)
        column.gather(slots, cached, parallel=False)
        if plan.positions is None:
            return cached
        values = np.empty((len(plan.indices), column.nbytes), np.uint8)
        values[positions], values[plan.positions] = cached, as_bytes(plan.tensors[number])
        return values

    def _views(self, numbers: list[int]) -> dict[int, Tensor] | None:
        """Return the slots of columns as the device reads them; None if it cannot read the first ones yet."""
        mapped, arrays = self._mapped, self._cache.slot_arrays
        views: Any = {each: mapped.view(self._cuda, arrays.places[each][0], arrays.columns[each].words) for each in numbers}
        return None if any(view is None for view in views.values()) else views

    def _as_words(self, values: Tensor, number: int) -> Tensor:
        """Return contiguous values of a column as a matrix of words over the same memory."""
        words: Tensor = values.view(len(values), -1).view(self._dtypes[number])
        return words

    @property
    def _mapped(self) -> MappedSegment:
        return MappedSegment.of(self._cache.slot_arrays.segment, self._cuda)

    def wait(self) -> None:
        """Wait until the device may read all samples that are cached now."""
        self._mapped.wait()

    def stats(self) -> DeviceStats:
        """Return the counts so far, and the memory that is in use."""
        return DeviceStats(**self._counts, registered_bytes=0 if self._cache.closed else self._mapped.nbytes)
