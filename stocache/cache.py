"""SharedCache: slots of a fixed shape in shared memory, one per resident sample, written once, read without a lock.

NOTE [ Publishing a slot ]
    Writers of one slot exclude each other: threads by the segment's guard, processes by the slot's record lock. The one who
    has both looks at the state byte again, copies the sample in, lets the fence lock go and takes it again, and only then
    sets the byte to SET. Releasing a lock and then taking one keeps the two stores in that order on every processor, also
    on ARM. Killed before the byte is set, a writer leaves an empty slot and a lock the kernel drops; the next one to miss
    fills it. Since a set slot never changes again, a reader needs no lock: the byte, then the row.

NOTE [ Races and errors ]
    Whoever missed a slot will set it, and may find that somebody else was faster: that is no error, the samples are equal.
    Setting a slot that is set *without* having missed it is one, for then two samples claim one index. So each process
    remembers what it has missed and not yet set, and how often (threads may miss one slot together).
"""

import logging
import operator
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from stocache.columns import Columns
from stocache.errors import CacheNameError, ClosedError, SampleIndexError, SegmentError, SlotError
from stocache.indices import check_index, check_indices, check_len
from stocache.limits import format_size
from stocache.opening import EMPTY, OOB, SET, mark_outsiders, open_named, open_own
from stocache.placement import Placement, Residency
from stocache.segment import Segment
from stocache.stats import FILLS, HITS, MISSES, RACES, REFUSED, CacheStats
from stocache.structure import Structure

logger = logging.getLogger("stocache")


class SlotState(IntEnum):
    """The state of a sample, as `SharedCache.aux_array` holds it."""

    EMPTY = 0
    SET = 1
    OOB = 2
    """Out of bounds of the cache: in the dataset, but not resident."""


_RELEASED = ("_segment", "_states", "_aux", "_columns", "_load")  # attributes that hold memory: what close() lets go


class SharedCache:
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

    Raises:
        LimitError: the limit is no size, or leaves no room for one slot.
        SampleError: ``data_dims`` or ``dtype`` do not describe samples of a fixed size.
        CacheNameError: ``name`` has characters a name cannot have; or there is none, and ``persist`` or ``fingerprint``.
        MismatchError: the name is in use for a cache of other arguments.
        SegmentError: under that name is something of another user, a link, or a damaged file.

    A limit above what the machine can give is lowered to that, with a warning on the logger "stocache". Where no shared
    memory can be had at all, the cache holds nothing, with a warning.
    Source: the API and the idea of stocaching 0.2 (C. Jones, MIT).
    """

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
    ) -> None:
        structure = data_dims if isinstance(data_dims, Structure) else Structure.from_dims(data_dims, dtype)
        dataset_len = check_len(dataset_len)
        placement = placement if isinstance(placement, Placement) else Placement(placement)
        if name is not None:
            slots, segment = open_named(name, persist, fingerprint, size_limit_gib, dataset_len, structure, placement)
        elif persist or fingerprint is not None:
            raise CacheNameError("persist and fingerprint are for caches with a name. Give one.")
        else:
            slots, segment = open_own(size_limit_gib, dataset_len, structure, placement)
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
        self._structure, self._placement, self._dataset_len, self._slots = structure, placement, dataset_len, slots
        self._segment = segment
        self._states = segment.control
        self._aux = torch.frombuffer(segment.control, dtype=torch.uint8) if dataset_len else torch.empty(0, dtype=torch.uint8)
        self._residency = Residency(placement, dataset_len, slots)
        self._slot = operator.index if self._residency.identity else self._residency.slot
        self._columns = Columns(structure, segment, slots)
        self._load = self._columns.load
        self._missed: dict[int, int] = {}  # see NOTE [ Races and errors ]

    # ------------------------------------------------------------------------------------------------ one sample

    def get_slot(self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True, *, copy: bool = True) -> Any | None:
        """Return sample ``idx``, or None when it is not cached.

        Args:
            idx: sample index in ``[0, dataset_len)``; it may lie outside the cache.
            allow_oob_idx: False raises when the sample lies outside the cache, instead of returning None.
            allow_empty_slot: False raises when the slot is empty, instead of returning None.
            copy: False returns a view of the shared memory itself: writing to it changes every later epoch.

        Returns:
            A tensor of shape ``data_dims`` in the cache's dtype, or the containers the cache was made for.

        Raises:
            SampleIndexError: ``idx`` is no integer or outside the dataset; or outside the cache, when not allowed.
            SlotError: the slot is empty, when not allowed.

        Safe from any process and thread; a hit takes no lock. Copies ``slot_bytes`` bytes.
        Source: the API of stocaching 0.2 (C. Jones, MIT).
        """
        try:
            state = self._states[idx] if 0 <= idx < self._dataset_len else None
        except (TypeError, ValueError, RuntimeError):  # not an integer; _index says so
            state = None
        if state == SET:
            self._segment.counters[HITS] += 1
            return self._load(self._slot(idx), copy)
        idx = self._index(idx, "get_slot")
        if state == OOB:
            if not allow_oob_idx:
                self._outside(idx, "get_slot")
        elif not allow_empty_slot:
            raise SlotError(f"get_slot({idx}): the slot is empty. Set it first, or pass allow_empty_slot=True.")
        else:
            self._remember_miss(idx)
        self._segment.counters[MISSES] += 1
        return None

    def set_slot(self, idx: int, value: Any, allow_oob_idx: bool = True, allow_overwrite: bool = False) -> None:
        """Cache ``value`` as sample ``idx``; does nothing when the sample lies outside the cache.

        Args:
            idx: sample index in ``[0, dataset_len)``.
            value: the sample, of exactly the cache's dtype and shape; any strides, device and requires_grad. Copied.
            allow_oob_idx: False raises when the sample lies outside the cache.
            allow_overwrite: True replaces a sample that is cached already. Readers at that moment may get a mixture.

        Raises:
            SampleIndexError: ``idx`` is no integer or outside the dataset; or outside the cache, when not allowed.
            SampleError: ``value`` would not come back as it is. Nothing has been stored.
            SlotError: the slot is set already, and this process did not find it empty before.

        Safe from any process and thread: of several that set one slot, the first wins and the others do nothing.
        """
        idx = self._index(idx, "set_slot")
        if self._states[idx] == OOB:
            if not allow_oob_idx:
                self._outside(idx, "set_slot")
            return
        buffers = self._structure.encode(value, f"set_slot({idx})")
        segment = self._segment
        with segment.guard:
            missed = self._missed.pop(idx, 0)
            if missed > 1:
                self._missed[idx] = missed - 1
            if not missed and self._states[idx] == SET and not allow_overwrite:
                raise SlotError(f"set_slot({idx}): the slot is set. Ask get_slot first, or pass allow_overwrite=True.")
            if not segment.try_lock(idx):
                segment.counters[RACES] += 1
                return
            try:
                segment.counters[self._publish(idx, buffers, allow_overwrite)] += 1
            finally:
                segment.unlock(idx)

    def _publish(self, idx: int, buffers: list[Any], overwrite: bool) -> int:
        """Store the bytes of sample ``idx``, whose lock is held; return what became of it: the counter to raise."""
        # see NOTE [ Publishing a slot ]
        if self._states[idx] == SET and not overwrite:
            return RACES
        slot = self._slot(idx)
        try:
            if not self._columns.reserve(slot, slot + 1):
                return REFUSED
            self._states[idx] = EMPTY
            self._columns.write(slot, buffers)
        except OSError as error:  # reserved memory does not run out; if it ever does, the sample is uncached, not the job dead
            logger.warning("sample %d stays uncached: %s", idx, str(error))
            return REFUSED
        self._segment.fence.acquire(blocking=False)  # held already, unless an interrupt came between the next two
        self._segment.fence.release()
        self._segment.fence.acquire()
        self._states[idx] = SET
        return FILLS

    def get_or_load(self, idx: int, load: Callable[[int], Any], *, timeout_s: float = 10.0) -> Any:
        """Return sample ``idx`` from the cache, or else from ``load(idx)``, which is then cached.

        Of all threads, processes and jobs that want an empty sample at one time, one loads it and the others wait. So jobs that
        read in the same order (the same seed, a sweep) do not all read the source.

        Args:
            idx: sample index in ``[0, dataset_len)``; where it lies outside the cache, everyone loads for himself.
            load: called with ``idx``; what it raises passes through, and the next one to want the sample loads it.
            timeout_s: seconds to wait for the load of another, who may be paused, before loading too. The dead never hold it.

        Returns:
            A private copy, or what ``load`` returned.

        Raises:
            SampleIndexError: ``idx`` is no integer or outside the dataset.
            SampleError: what ``load`` returned does not fit the cache.
        """
        idx = self._index(idx, "get_or_load")
        may_fill = self._states[idx] == EMPTY and not self._columns.refused(self._slot(idx))
        claimed = may_fill and self._claim(idx, timeout_s)
        try:
            value = self.get_slot(idx)
            if value is None:
                value = load(idx)
                self.set_slot(idx, value)
            return value
        finally:
            if claimed:
                self._segment.release_claim(idx)

    def _claim(self, idx: int, timeout_s: float) -> bool:
        """Wait until sample ``idx`` is ours to load (True), or has been set, or the time is over."""
        pause_s, deadline = 0.0002, time.monotonic() + timeout_s
        while not self._segment.try_claim(idx):
            if self._states[idx] == SET or time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        return True

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
        states = self._aux.numpy()[index]  # numpy: its calls cost a third of torch's, which at 12 KB a row is felt
        mask = states == SET
        hits = int(np.count_nonzero(mask))
        if hits:
            # a hit's row is gathered in place of each that is missing: its memory is safe to touch
            there = index if hits == count else np.where(mask, index, index[mask.argmax()])
            columns.gather(self._residency.slots(torch.from_numpy(there)), items)
        self._segment.counters[HITS] += hits
        if hits < count:
            self._segment.counters[MISSES] += count - hits
            columns.erase(torch.from_numpy(~mask), items)
            for idx in index[states == EMPTY].tolist():
                self._remember_miss(idx)
        return self._structure.unflatten(items), torch.from_numpy(mask)

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
        for position, idx in enumerate(index.tolist()):
            self.set_slot(idx, self._columns.sample(items, position), allow_oob_idx, allow_overwrite)

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
    def aux_array(self) -> Tensor:
        """The live state of every sample, uint8 of shape (dataset_len,): 0 empty, 1 set, 2 outside the cache."""
        return self._aux

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

    def clear(self) -> None:
        """Empty and zero all slots; their memory stays reserved. Waits for writers; nobody should be reading meanwhile."""
        segment = self._segment
        if not self._slots:
            return
        with segment.guard:
            segment.lock_all(self._dataset_len)
            try:
                self._aux.masked_fill_(self._aux == SET, EMPTY)
                segment.forget()
            finally:
                segment.unlock(0, self._dataset_len)

    # ------------------------------------------------------------------------------------------------ life

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sample."""
        return self._structure.nbytes

    def stats(self) -> CacheStats:
        """Return the counts and amounts of now, summed over all processes. Reads one byte per sample."""
        return CacheStats.of(
            self._segment.totals(),
            dataset_len=self._dataset_len,
            slots=self._slots,
            filled=int((self._aux == SET).count_nonzero()),
            slot_bytes=self.slot_bytes,
            reserved_bytes=self._segment.reserved_bytes,
        )

    def close(self) -> None:
        """Let this process's hold of the memory go; it returns to the machine with the last holder. Twice is fine.

        Views from ``copy=False``, ``cache[i]`` and ``array`` stay valid, and hold the memory.
        """
        for name in _RELEASED:
            self.__dict__.pop(name, None)

    def __enter__(self) -> "SharedCache":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # else every misspelt attribute would pass

        def __getattr__(self, name: str) -> NoReturn:
            # Costs nothing while the attributes are there, which a check in each method would
            if name in _RELEASED:
                raise ClosedError("the cache is closed. Make a new one, or close it later.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> tuple[Any, ...]:
        return self._structure, self._placement, self._dataset_len, self._slots, self._segment

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._assemble(*state)
        if self._segment.backing == "none":  # nothing is shared then, the states neither
            mark_outsiders(self._segment.control, self._residency)

    def __repr__(self) -> str:
        name = type(self).__name__
        if "_segment" not in self.__dict__:
            return f"<{name}, closed>"
        stats = self.stats()
        capacity = format_size(self._slots * self.slot_bytes)
        return (
            f"<{name} of {self._structure}: {stats.filled} of {self._dataset_len} samples cached, room for {self._slots} "
            f"({capacity} in {self._segment.path or self._segment.backing}), hit rate {stats.hit_rate:.0%}>"
        )

    # ------------------------------------------------------------------------------------------------ inside

    def _index(self, idx: Any, call: str) -> int:
        self._segment  # noqa: B018  raises when closed
        return check_index(idx, self._dataset_len, call)

    def _outside(self, idx: int, call: str) -> NoReturn:
        raise SampleIndexError(
            f"{call}({idx}): the sample lies outside the cache, which holds {self._slots} of {self._dataset_len}. "
            f"Raise size_limit_gib, or pass allow_oob_idx=True."
        )

    def _remember_miss(self, idx: int) -> None:
        with self._segment.guard:
            self._missed[idx] = self._missed.get(idx, 0) + 1

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
