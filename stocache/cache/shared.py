"""SharedCache: slots of a fixed shape in shared memory, one per resident sample."""

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stocache.cache.allocate import EMPTY, SET, Blueprint, OnBusy, mark_outsiders, open_memory
from stocache.cache.base import SampleCache
from stocache.cache.placement import Placement, residency
from stocache.cache.slots import SlotArrays, column_offsets
from stocache.cache.stats import FILLS, HITS, REFUSED
from stocache.errors import CacheNameError, SampleError, SampleIndexError, SegmentError
from stocache.samples.indices import check_indices, check_len
from stocache.samples.spec import Structure
from stocache.shm.named import Plan
from stocache.shm.segment import Segment
from stocache.system.limits import affordable_slots, asked_slots, format_size

logger = logging.getLogger("stocache")


class SharedCache(SampleCache):
    """A cache of samples in shared memory, one copy for all processes of a training job.

    Make it in the parent process, keep it in your dataset, and ask it before you load:

        x = self.cache.get_slot(idx)
        if x is None:                      # empty, or not resident
            x = load(idx)
            self.cache.set_slot(idx, x)    # a no-op where idx is not resident

    Workers share it whatever the start method (fork, spawn, forkserver). When the limit is below the size of the dataset,
    that share of it is cached and the rest always misses. Memory is taken as slots are filled; when the machine has none to
    give, samples stay uncached and training goes on.

    Args:
        size_limit_gib: GiB for the cache on this machine: 32, 0.5, "32GiB", "500MB"; "auto" for what the machine can spare
            (`limits.recommended_limit`); 0 for no cache. Covers slots and one state byte per sample; about 80 KB of
            header and counters come on top.
        dataset_len: samples in the whole dataset.
        data_dims: shape of one sample without the batch dimension; or a dict or tuple of shapes, or a `Structure`, for
            samples of several parts, which `get_slot` then returns as a dict or tuple.
        dtype: torch dtype of the sample; or the same containers as ``data_dims`` with a dtype each.
        placement: which samples are resident: "prefix", the first ones; "scattered", evenly spread; or a `Placement`.
        name: a name to find the cache by. Every process of this user on this machine that asks for the same name, with the
            same other arguments, gets the same cache: DDP ranks, other jobs, notebooks. The first one makes it. It goes
            with the last one; what is left behind by processes that were killed is taken over, filled as it is.
        persist: have a named cache stay without processes, so that the next run starts warm; ``stocache rm`` removes it.
        fingerprint: a string that says which data a named cache holds, and in which form: whatever changes the samples must
            change it. What was left behind with another fingerprint is not used.
        on_busy: what to do when another process, which is stopped perhaps, has kept the lock of the named caches for 10
            seconds: "uncached" for a cache that holds nothing, with a warning; or "raise".

    Raises:
        LimitError: the limit is no size, or leaves no room for one slot.
        SampleError: ``data_dims`` or ``dtype`` do not describe samples of a fixed size.
        CacheNameError: ``name`` has characters a name cannot have; or there is none, and ``persist`` or ``fingerprint``.
        MismatchError: the name is in use for a cache of other arguments.
        SegmentError: under that name is something of another user, a link, or a damaged file.
        BusyError: another process keeps the lock, and ``on_busy`` is "raise".

    Where another user has taken the place of this user's caches, they are in the user's runtime directory, if that is in
    memory; else a named cache is not shared, and each rank has its part of the limit. A limit above what the machine can give
    is lowered to that. Where no shared memory can be had at all, the cache holds nothing. Each with a warning on the logger
    "stocache".
    Source: the API and the idea of stocaching 0.2 (C. Jones, MIT).
    """

    _RELEASED = (*SampleCache._RELEASED, "_columns", "_load")

    def __init__(
        self,
        size_limit_gib: float | str,
        dataset_len: int,
        data_dims: Any,
        dtype: Any = torch.uint8,
        *,
        placement: Literal["prefix", "scattered"] | Placement = "prefix",
        name: str | None = None,
        persist: bool = False,
        fingerprint: str | None = None,
        on_busy: OnBusy = "uncached",
    ) -> None:
        structure = data_dims if isinstance(data_dims, Structure) else Structure.from_dims(data_dims, dtype)
        dataset_len = check_len(dataset_len)
        placement = placement if isinstance(placement, Placement) else Placement(placement)
        blueprint = _Blueprint(size_limit_gib, dataset_len, structure, placement)
        segment, slots = open_memory(blueprint, name, persist, fingerprint, on_busy)
        self._assemble(structure, placement, dataset_len, slots, segment)
        logger.info("%r", self)

    @classmethod
    def like(cls, sample: Any, size_limit_gib: float | str, dataset_len: int, **options: Any) -> "SharedCache":
        """Return a cache for samples that look like ``sample``: tensors, numpy arrays and numbers in dicts, lists, tuples,
        namedtuples and dataclasses. `get_slot` returns the same. ``options`` are the other arguments of the class.

        Raises:
            SampleError: a part of ``sample`` has no fixed size.
        """
        return cls(size_limit_gib, dataset_len, Structure.of(sample), **options)

    def _assemble(self, structure: Structure, placement: Placement, dataset_len: int, slots: int, segment: Segment) -> None:
        """Set every attribute; what follows from the arguments is rebuilt in each process rather than pickled."""
        self._share(segment, dataset_len)
        self._structure, self._placement, self._slots = structure, placement, slots
        self._residency = residency(placement, dataset_len, slots)
        self._slot = operator.index if self._residency.identity else self._residency.slot
        self._columns = SlotArrays(structure, segment, slots)
        self._load = self._columns.load
        self._gathers_from = 1 if self._columns.has_large else SampleCache._gathers_from
        self._samples, self._room = str(structure), f"{slots} ({format_size(slots * structure.nbytes)})"

    # ------------------------------------------------------------------------------------------------ how samples are held

    def _encode(self, value: Any, where: str) -> list[Any]:
        return self._structure.encode(value, where)

    def _store(self, idx: int, encoded: list[Any], cost_s: float | None) -> int:
        self._states[idx] = EMPTY  # also while it is overwritten; whose memory is reserved then
        return FILLS if self._columns.write(self._slot(idx), encoded) else REFUSED

    def _refused(self, idx: int) -> bool:
        return self._columns.refused(self._slot(idx))

    def _load_many(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> list[Any]:
        return self._columns.private_samples(self._residency.slots(torch.from_numpy(indices)))

    def _forget(self) -> None:
        self._segment.forget()

    def _amounts(self, filled: int) -> dict[str, int]:
        return {"slots": self._slots, "slot_bytes": self.slot_bytes, "capacity_bytes": self._slots * self.slot_bytes}

    # ------------------------------------------------------------------------------------------------ many samples

    def get_slots(self, indices: Sequence[int] | Tensor, *, out: Any = None) -> tuple[Any, Tensor]:
        """Return the samples ``indices`` in one gather, and which of them were there.

        Args:
            indices: B sample indices, in any order, repeats allowed: a list, range, numpy array or int64 tensor.
            out: memory for the rows, contiguous, as an earlier call returned them. Reusing it is twice as fast as new memory.

        Returns:
            ``(rows, mask)``: rows of shape (B, *data_dims) in the cache's dtype (in the containers the cache was made
            for; Python numbers become a tensor, leaves of numpy a numpy array), zero where the sample is not cached; mask,
            a bool tensor of shape (B,), True where it is.

        Raises:
            SampleIndexError: an index is no integer or outside the dataset.
            SampleError: ``out`` does not fit.

        Safe from any process and thread; hits take no lock.
        """
        index = check_indices(indices, self._dataset_len, "get_slots")
        columns, count = self._columns, len(index)
        items = columns.new_batch(count) if out is None else columns.split_batch(out, count, "get_slots: out", contiguous=True)
        mask, hits = self._gather_hits(index, items)
        if hits < count:
            columns.erase(torch.from_numpy(~mask), items)
            self._miss_many(index[~mask])
        return self._structure.unflatten(items), torch.from_numpy(mask)

    def _gather_hits(self, index: np.ndarray[Any, np.dtype[np.int64]], items: list[Any]) -> tuple[Any, int]:
        """Copy those of the samples that are set into their rows of a contiguous batch; return which, and how many."""
        mask = self.set_among(index)
        hits = int(np.count_nonzero(mask))
        if hits:
            # a hit's row is gathered in place of each that is missing: its memory is safe to touch
            there = index if hits == len(index) else np.where(mask, index, index[mask.argmax()])
            self._columns.gather(self._residency.slots(torch.from_numpy(there)), items)
        self._segment.counters[HITS] += hits
        return mask, hits

    @property
    def structure(self) -> Structure:
        """What each sample looks like."""
        return self._structure

    def has(self, indices: Sequence[int]) -> bool:
        """Whether all of the samples ``indices`` are cached."""
        return bool((self._aux.numpy()[check_indices(indices, self._dataset_len, "has")] == SET).all())

    def samples_of(self, items: list[Any], count: int) -> list[Any]:
        """Return the ``count`` samples whose bytes are the rows of ``items``, one uint8 tensor for each leaf."""
        batch = self._columns.new_batch(count)
        for row in range(count):
            self._columns.put(batch, row, [item[row].numpy() for item in items])
        return self._columns.samples(batch, count)

    def fill_batch(
        self, indices: Sequence[int], items: list[Tensor], load: Callable[[list[int]], Iterable[Any]]
    ) -> list[Any] | None:
        """Write the samples ``indices`` into memory of the caller's; those that miss come from ``load``.

        Args:
            indices: B sample indices.
            items: one contiguous tensor for each leaf of the structure, of any dtype, of B times the bytes of the leaf.
            load: as in `get_or_load_many`.

        Returns:
            None; or the samples in a list, when one that was loaded does not fit, and ``items`` hold nothing of use.
        """
        index = check_indices(indices, self._dataset_len, "fill_batch")
        mask, hits = self._gather_hits(index, items)
        if hits == len(index):
            return None
        loaded = self.get_or_load_many(index[~mask], load, strict=False)
        try:
            for row, sample in zip(np.flatnonzero(~mask).tolist(), loaded, strict=True):
                self._columns.put(items, row, self._structure.encode(sample, "sample"))
        except SampleError:
            samples, found = iter(loaded), iter(self._load_many(index[mask]))
            return [next(found if is_hit else samples) for is_hit in mask.tolist()]
        return None

    def set_slots(
        self, indices: Sequence[int] | Tensor, values: Any, allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Cache B samples: `set_slot` for each of ``indices`` with its row of ``values``, a batch as `get_slots` returns it.

        Raises:
            SampleError: ``values`` does not hold B rows of the cache's dtype and shape. Nothing has been stored.
            SampleIndexError, SlotError: as `set_slot`; samples before the one at fault are stored.
        """
        index = check_indices(indices, self._dataset_len, "set_slots")
        items = self._columns.split_batch(values, len(index), "set_slots: values")
        for idx, value in zip(index.tolist(), self._columns.samples(items, len(index)), strict=True):
            self.set_slot(idx, value, allow_oob_idx, allow_overwrite)

    # ------------------------------------------------------------------------------------------------ the memory itself

    @property
    def array(self) -> Any:
        """The live slots: a tensor of shape (slots, *data_dims); for caches of several parts, their containers of tensors.

        Writing to it neither checks nor marks anything. Reserves the memory of *all* slots, since a page the machine
        cannot give would kill the process that touches it.

        Raises:
            SegmentError: the machine does not give that memory.
        """
        self._reserve_raw(0, self._slots)
        return self._columns.array

    @property
    def placement(self) -> Placement:
        """Which samples are resident."""
        return self._placement

    def __len__(self) -> int:
        """Return the number of slots, at most ``dataset_len``."""
        return self._slots

    def __getitem__(self, slot: Any) -> Any:
        """Return the live memory of a slot, set or not. With placement "prefix", slot numbers are sample indices."""
        if not isinstance(slot, int):
            return self.array[slot]
        slot = self._raw_slot(slot)
        return self._columns.rows(slot)

    def __setitem__(self, slot: Any, value: Any) -> None:
        """Write to the memory of a slot without marking it as set; an integer slot takes only what fits unchanged."""
        if not isinstance(slot, int):
            self.array[slot] = value
            return
        slot = self._raw_slot(slot)
        self._columns.write(slot, self._structure.encode(value, f"cache[{slot}]"))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sample."""
        return self._structure.nbytes

    def __getstate__(self) -> tuple[Any, ...]:
        return self._structure, self._placement, self._dataset_len, self._slots, self._segment

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._assemble(*state)
        if self._segment.backing == "none":  # nothing is shared then, the states neither
            mark_outsiders(self._segment.control, self._residency)

    def _reserve_raw(self, start: int, stop: int) -> None:
        with self._segment.guard:
            if not self._columns.reserve(start, stop):
                raise SegmentError(
                    f"slots {start} to {stop - 1} need {format_size((stop - start) * self.slot_bytes)}, which the machine does "
                    f"not give. Use get_slot and set_slot, which pass such slots by, or lower size_limit_gib."
                )

    def _raw_slot(self, slot: int) -> int:
        if not -self._slots <= slot < self._slots:
            raise SampleIndexError(f"cache[{slot}]: outside the cache of {self._slots} slots.")
        slot %= self._slots
        self._reserve_raw(slot, slot + 1)
        return slot


class SharedCacheDDP(SharedCache):
    """A `SharedCache` that is found by its name: one copy for all DDP ranks, and all jobs, of this user on this machine.

        cache = SharedCacheDDP(32, len(dataset), (3, 224, 224), name="imagenet-224", fingerprint="resize 224, v1")

    Each rank makes it so, whether started by torchrun, `torch.multiprocessing.spawn` or by hand, before or after a process
    group exists; none is needed.

    ``name`` is required; all else, ``options`` included, is as in `SharedCache`.
    Source: announced as a plan by the article on stocaching (C. Jones).
    """

    def __init__(
        self,
        size_limit_gib: float | str,
        dataset_len: int,
        data_dims: Any,
        dtype: Any = torch.uint8,
        *,
        name: str,
        **options: Any,
    ) -> None:
        if name is None:
            raise CacheNameError("SharedCacheDDP needs a name that all ranks give. For a cache without, use SharedCache.")
        super().__init__(size_limit_gib, dataset_len, data_dims, dtype, name=name, **options)


class _Blueprint(Blueprint):
    """The memory of a `SharedCache`: a state byte per sample, and columns."""

    def __init__(self, limit: float | str, dataset_len: int, structure: Structure, placement: Placement) -> None:
        self._limit, self._dataset_len, self._structure, self._placement = limit, dataset_len, structure, placement
        asked = asked_slots(limit, dataset_len, structure.nbytes)
        self.wanted = {"dataset_len": dataset_len, "samples": structure.identity, "placement": str(placement)}
        if asked is not None:  # "auto" takes what is there, else ranks that look at different moments would not agree
            self.wanted["slots"] = asked

    def afford(self, named: bool) -> int:
        return affordable_slots(self._limit, self._dataset_len, self._structure.nbytes, named)

    def plan(self, capacity: int) -> Plan:
        chosen = residency(self._placement, self._dataset_len, capacity)
        return Plan(
            control_bytes=self._dataset_len,
            data_bytes=column_offsets(self._structure, capacity)[-1],
            identity={"slots": capacity} | self.wanted,
            facts={"dataset_len": self._dataset_len, "capacity": capacity, "slot_bytes": self._structure.nbytes},
            initialise=lambda control: mark_outsiders(control, chosen),
        )
