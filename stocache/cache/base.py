"""Publish samples to all processes: one state byte per sample, set once and read without a lock. One process loads a miss.

A cache publishes samples; its `SampleStore` has their bytes: `SlotArrays` in a `SharedCache`, `RecordStore` in a `RaggedCache`.

NOTE [ Publishing a slot ]
    Writers of one slot exclude each other by claims (NOTE [ Claims ]). A writer claims all samples of a batch at once, reads
    their state bytes again, copies the samples in, releases a lock and takes it again, and only then sets the bytes to
    SET. Releasing a lock and then taking one keeps the two stores in order on every CPU, also on ARM. A writer that is
    killed before it sets the bytes leaves empty slots, and its claims end with it; the next process to miss the samples fills
    the slots. A set slot never changes again. So a reader needs no lock: it reads the byte, then the row, in this order
    (NOTE [ Reading in order ]).

NOTE [ Races and errors ]
    A process that missed a sample will set it, and may find that another one was faster. That is not an error: the samples are
    equal. But setting a set slot *without* having missed it is an error: two samples then have one index. So each process
    remembers the samples that it has missed and not yet set, and how often (threads may miss one sample together).

NOTE [ Nested loads ]
    Loading a sample may need other samples: A needs B, and in another process B needs A. Each process has claimed its own one
    and would wait for the other's. So a thread that loads a sample under a claim does not wait for claims of samples: it loads
    them at once, though another process may be loading them too. The same holds for a sample that its own load asks for. Within
    the load of a sample a thread waits for claims of blocks only, and within the load of a block it does not wait. A cache on a
    disk, which a cache in memory asks for its misses, may be waited for: a thread that has claimed a sample there waits for no
    other.
"""

import contextlib
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.allocate import CacheLayout, Proof, open_memory, open_own
from stocache.cache.options import CacheOptions
from stocache.cache.stats import EMPTY, FILLS, HITS, LOAD_NS, MISSES, MISSING, OOB, RACES, REFUSED, REJECTED, SET, CacheStats
from stocache.errors import BusyError, ClosedError, SampleError, SampleIndexError, SlotError
from stocache.observe.recording.record import note_loads
from stocache.observe.recording.spans import LOAD, in_spans, span
from stocache.samples.indices import check_index, check_indices
from stocache.shm.agreement import Agreement, has_agreement
from stocache.shm.claims import BLOCKS, Claims
from stocache.shm.extents import REJECTED_WARNING
from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import FREE_THREADED, Segment
from stocache.shm.siblings import count_ranks
from stocache.system.limits import parse_size, recommended_limit
from stocache.system.waiting import LOCK_TIMEOUT_S, describe_process, wait_until

logger = logging.getLogger("stocache")

_WRITTEN_S = 0.1  # to wait for another rank that is writing a sample
_PART_S = 0.02  # samples that were loaded in this time are published together

_Self = TypeVar("_Self", bound="SampleCache")
_Indices = NDArray[np.int64]


class _Loading(threading.local):
    """Whether this thread is loading samples, or a block, under its own claims; see NOTE [ Nested loads ]."""

    samples = block = False


_loading = _Loading()


class SlotState(IntEnum):
    """The state of a sample, as ``cache.aux_array`` holds it."""

    EMPTY = 0
    SET = 1
    OOB = 2
    """Out of bounds of the cache: in the dataset, but without a slot."""


class SampleStore(Protocol):
    """How the samples of a cache are stored and read. The cache takes the locks, and knows which samples are set.

    Attributes:
        gathers_from: the size from which batches are read by `load_many`; smaller ones are faster sample by sample.
        unreadable: why `load` returned MISSING in this process, if it did: the module of a sample's class is not imported here.
        may_miss: whether `load` may return MISSING for a sample that was set, because it is damaged. The sample is EMPTY then.
    """

    gathers_from: int
    may_miss: bool

    @property
    def unreadable(self) -> str:
        """See the attributes."""

    def encode(self, sample: Any, where: str, /) -> Any:
        """Return a sample encoded for `write`. Raises SampleError, whose message begins with ``where``."""

    def encode_many(self, samples: list[Any]) -> list[Any] | None:
        """Return samples encoded for `write_many`; None if a sample does not fit: `encode` says which, and why."""

    def write_many(self, indices: list[int], encoded: Sequence[Any], costs_s: Sequence[float | None]) -> list[int | None]:
        """Write encoded samples where `load` finds them. This thread has the claims to write them; the guard is free.

        Return for each the counter to raise, if any; FILLS means that the sample was written.
        ``costs_s``: the seconds that each took to load; None if that is not known.
        """

    def slot(self, idx: int, /) -> int:
        """Return the slot of a sample that is set."""

    def load(self, slot: int, copy: bool, /) -> Any:
        """Return the sample in a slot; a private copy if asked for. MISSING if this process cannot read it."""

    def load_many(self, indices: _Indices) -> list[Any]:
        """Return private copies of samples. All of them are set."""

    def refused(self, idx: int) -> bool:
        """Return whether the machine has refused the memory for a sample that is not set."""

    def has_room_for(self, states: NDArray[np.uint8]) -> bool:
        """Return whether all samples that are EMPTY will have room, if they are as large as those that are SET."""

    def has_room(self, encoded: Collection[Any]) -> bool:
        """Return whether all of these encoded samples, none of which is outside the cache, can be written."""

    def clear(self) -> None:
        """Drop all samples. No process writes, and no sample is set."""

    def amounts(self, filled: int) -> dict[str, int]:
        """Return ``slots``, ``slot_bytes`` and ``capacity_bytes`` of `CacheStats` for ``filled`` cached samples."""


class SampleCache:
    """The base of all caches: everything but how samples are stored."""

    _RELEASED: ClassVar[tuple[str, ...]] = (
        "_segment",
        "_states",
        "_aux",
        "_store",
        "_load",
        "_claims",
        "_agreement",
    )
    """Attributes that hold memory. close() deletes them."""

    thread_safe = True  # worker threads share it

    _warned_of_unreadable: bool = False

    _records_loads: ClassVar[bool] = True  # False for a cache behind another one, which does

    _total_bytes: int = 0  # of a cache that is kept ready: the bytes that all ranks may have

    may_admit_later: bool = False
    """Whether a sample that was not kept when it was set may be kept when it is set again."""

    def _share(
        self,
        segment: Segment,
        dataset_len: int,
        store: SampleStore,
        samples: str,
        room: str,
        own: "SampleCache | None" = None,
        control_bytes: int = 0,
    ) -> None:
        """Set the attributes of all caches; again in each process, because they are not pickled.

        ``samples`` and ``room`` describe the samples, and how many of them there is room for, in messages. ``own``: a cache of
        this rank alone, if it shares this one with other ranks that may have other samples. ``control_bytes``: without those
        of the agreement with them and of the claims.
        """
        self._segment, self._dataset_len, self._samples, self._room = segment, dataset_len, samples, room
        self._store, self._slot, self._load = store, store.slot, store.load  # a look-up less for each hit
        self._claims = Claims(segment, dataset_len)
        self._states = segment.control[:dataset_len]
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")  # which torch.frombuffer refuses
        self._aux = torch.frombuffer(self._states, dtype=torch.uint8) if dataset_len else nothing
        if segment.backing == "none":  # then nothing is shared, and nothing can be cached
            self._aux.numpy().fill(OOB)
        self._agreement = None if own is None else Agreement(segment, control_bytes, dataset_len, own)
        self._missed: dict[int, tuple[int, float]] = {}  # how often, and since when; see NOTE [ Races and errors ]

    # ------------------------------------------------------------------------------------------------ one sample

    def get_slot(self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True, *, copy: bool = True) -> Any | None:
        """Return sample ``idx``, or None when it is not cached.

        Args:
            idx: sample index in ``[0, dataset_len)``; it may lie outside the cache.
            allow_oob_idx: False raises an error if the sample lies outside the cache, instead of returning None.
            allow_empty_slot: False raises an error if the slot is empty, instead of returning None.
            copy: False returns a view of the shared memory itself: writing to it changes every later epoch.

        Returns:
            The sample as it was set.

        Raises:
            SampleIndexError: ``idx`` is not an integer or lies outside the dataset; or outside the cache, if not allowed.
            SlotError: the slot is empty, if not allowed.

        Safe from any process and thread; a hit takes no lock. Copies the bytes of the sample.
        Source: the API of stocaching 0.2 (C. Jones, MIT).
        """
        value = self.hit(idx, copy)
        if value is not MISSING:
            return value
        idx = self._index(idx, "get_slot")
        outside = self._states[idx] == OOB
        if outside and not allow_oob_idx:
            self._outside(idx, "get_slot")
        if self._store.unreadable and self._states[idx] == SET:
            if not allow_empty_slot:
                raise SlotError(
                    f"get_slot({idx}): the sample is of a class whose module is not imported here. Import it first."
                )
            self._warn_of_unreadable()
        if not outside and not allow_empty_slot:
            raise SlotError(f"get_slot({idx}): the slot is empty. Set it first, or pass allow_empty_slot=True.")
        self._miss(idx, time.perf_counter())
        return None

    def hit(self, idx: int, copy: bool) -> Any:
        """Return sample ``idx`` if it is set; else MISSING, also if ``idx`` is not an index. Other methods try this first."""
        try:
            if not 0 <= idx < self._dataset_len or self._states[idx] != SET:
                return MISSING
        except (TypeError, ValueError, RuntimeError):  # not an integer; _index says so
            return MISSING
        if WEAKLY_ORDERED:
            fence()
        if self._agreement is not None and not self._agreement.allows(idx):
            return self._agreement.own.hit(idx, copy)
        value = self._load(self._slot(idx), copy)
        if value is not MISSING:  # else it is of a class that is not imported here
            if FREE_THREADED:
                self._segment.count(HITS)
            else:
                self._segment.counters[HITS] += 1  # faster, and the GIL keeps other threads from it
        return value

    def set_among(self, indices: _Indices) -> "NDArray[np.bool_]":
        """Return which of the samples ``indices`` are set: these may be read from now on."""
        mask: NDArray[np.bool_] = self._aux.numpy()[indices] == SET  # at a third of the cost of torch's
        if WEAKLY_ORDERED:
            fence()
        return mask if self._agreement is None else mask & self._agreement.allowed(indices)

    def _is_doubted(self, idx: int) -> bool:
        """Return whether a sample is set by a rank whose samples this rank has to compare. See NOTE [ Ranks that agree ]."""
        return self._agreement is not None and self._states[idx] == SET and not self._agreement.allows(idx)

    def _judge(self, idx: int, value: Any) -> None:
        """Compare a sample that another rank has set with the one that this rank has made."""
        if self._agreement is None:
            return
        wait_until(lambda: self._states[idx] != EMPTY or not self._claims.is_claimed(idx), _WRITTEN_S)
        if self._is_doubted(idx) and (held := self._load(self._slot(idx), True)) is not MISSING:  # else it cannot be read here
            self._agreement.judge(idx, held, value)

    def set_slot(self, idx: int, value: Any, allow_oob_idx: bool = True, allow_overwrite: bool = False) -> None:
        """Cache ``value`` as sample ``idx``. Do nothing if the sample lies outside the cache.

        Args:
            idx: sample index in ``[0, dataset_len)``.
            value: the sample, with exactly the dtypes and shapes that the cache holds. It is copied.
            allow_oob_idx: False raises an error if the sample lies outside the cache.
            allow_overwrite: True replaces a sample that is cached already. Processes that read it meanwhile may get a mixture.

        Raises:
            SampleIndexError: ``idx`` is not an integer or lies outside the dataset; or outside the cache, if not allowed.
            SampleError: ``value`` would not come back unchanged. Nothing is stored.
            SlotError: the slot is set already, and this process has not missed it before.

        Safe from any process and thread. If several set one slot, the first wins and the others do nothing.
        """
        idx = self._index(idx, "set_slot")
        if self._states[idx] == OOB:
            if not allow_oob_idx:
                self._outside(idx, "set_slot")
            return
        self._set(idx, value, allow_overwrite)

    def _set(self, idx: int, value: Any, overwrite: bool = False) -> None:
        """Encode and publish a sample, and count the outcome. Raises SampleError and SlotError."""
        encoded = self._store.encode(value, f"set_slot({idx})")
        self._publish([idx], [encoded], [self._cost_of(idx, overwrite)], overwrite)
        self._judge(idx, value)

    def _cost_of(self, idx: int, overwrite: bool) -> float | None:
        """Return the seconds since this process missed a sample that it is about to set, and forget that it did.

        Raises:
            SlotError: the sample is set, and this process has not missed it.
        """
        with self._segment.guard:
            missed, since = self._missed.pop(idx, (0, 0.0))
            if missed > 1:
                self._missed[idx] = missed - 1, since
        if not missed and self._states[idx] == SET and not overwrite and self._segment.ranks < 2:
            raise SlotError(f"set_slot({idx}): the slot is set. Ask get_slot first, or pass allow_overwrite=True.")
        return time.perf_counter() - since if missed else None

    def _set_many(
        self,
        indices: _Indices,
        encode: Callable[[], list[Any]],
        each: Callable[[], Iterable[Any]],
        allow_oob_idx: bool,
        allow_overwrite: bool,
    ) -> None:
        """Set many samples: as `set_slot` for each of ``each()``, at once where that is the same."""
        states = self._aux.numpy()[indices]
        if len(np.unique(indices)) < len(indices) or not (allow_overwrite or (states != SET).all()) or (states == OOB).any():
            for idx, value in zip(indices.tolist(), each(), strict=True):
                self.set_slot(idx, value, allow_oob_idx, allow_overwrite)
        elif len(indices):
            costs_s = [self._cost_of(idx, True) for idx in indices.tolist()]
            self._publish(indices.tolist(), encode(), costs_s, allow_overwrite)

    def _publish(
        self,
        indices: list[int],
        encoded: Sequence[Any],
        costs_s: Sequence[float | None],
        overwrite: bool = False,
        count_races: bool = True,
    ) -> None:
        """Store samples, each once in ``indices``, and count the outcomes. See NOTE [ Publishing a slot ]."""
        segment, states, taken = self._segment, self._states, set[int]()
        fillable, count = (EMPTY, SET) if overwrite else (EMPTY,), len(indices)
        try:
            self._claims.to_write(indices, taken)
            kept = [row for row, idx in enumerate(indices) if idx in taken and states[idx] in fillable]
            if len(kept) < count:
                indices = [indices[row] for row in kept]
                encoded, costs_s = [encoded[row] for row in kept], [costs_s[row] for row in kept]
            counters = self._write(indices, encoded, costs_s)
            filled = [idx for idx, counter in zip(indices, counters, strict=True) if counter == FILLS]
            if self._agreement is not None:
                self._agreement.note(filled)
            with segment.guard:
                fence()
                for idx in filled:
                    states[idx] = SET
                fence()
                segment.counters[FILLS] += len(filled)
                segment.counters[REFUSED] += counters.count(REFUSED)
                segment.counters[RACES] += (count - len(kept)) * count_races
        finally:
            self._claims.end_writing(taken)

    def _write(self, indices: list[int], encoded: Sequence[Any], costs_s: Sequence[float | None]) -> list[int | None]:
        """Write samples as `SampleStore.write_many` does. Reserved memory does not run out; if it does, the job goes on."""
        try:
            return self._store.write_many(indices, encoded, costs_s) if indices else []
        except OSError as error:
            logger.warning("sample %d stays uncached: %s", indices[0], str(error))
            return [REFUSED] * len(indices)

    # ------------------------------------------------------------------------------------------------ loading misses

    def get_or_load(
        self, idx: int, load: Callable[[int], Any], *, copy: bool = True, strict: bool = True, timeout_s: float = 10.0
    ) -> Any:
        """Return sample ``idx`` from the cache, or else from ``load(idx)``, which is then cached.

        If several threads, processes or jobs want a sample that is not cached, one loads it and the others wait. So jobs
        that read in the same order (the same seed, a sweep) do not all read the source.

        Args:
            idx: sample index in ``[0, dataset_len)``. If it lies outside the cache, each caller loads the sample itself.
            load: called with ``idx``. Its errors pass through; then the next caller loads the sample.
            copy: as in `get_slot`.
            strict: False returns a sample that does not fit the cache all the same: uncached, counted (``rejected``), with one
                warning.
            timeout_s: seconds to wait for another process that is loading the sample, and may be stopped. Then this process
                loads it too. A process that has died is not waited for.

        Returns:
            The sample: a private copy, or the object that ``load`` returned.

        Raises:
            SampleIndexError: ``idx`` is not an integer or lies outside the dataset.
            SampleError: the loaded sample does not fit the cache.
        """
        value = self.hit(idx, copy)
        if value is not MISSING:
            return value
        idx = self._index(idx, "get_or_load")
        outer, taken = _loading.samples, set[int]()
        try:
            if self.fillable(idx):
                if outer or _loading.block:  # see NOTE [ Nested loads ]
                    self._claims.to_load([idx], taken)
                else:
                    self._claims.wait_to_load(idx, taken, timeout_s, lambda: self._states[idx] == SET)
            _loading.samples = outer or bool(taken)
            value = self.hit(idx, copy)
            if value is MISSING:
                began = time.perf_counter()
                self._segment.count(MISSES)
                with span(LOAD):
                    value = load(idx)
                cost_s = time.perf_counter() - began
                self._note_loads([cost_s])
                self._keep([idx], [value], [cost_s], strict)
                self._judge(idx, value)
            return value
        finally:
            _loading.samples = outer
            if taken:
                self._claims.end_loading(taken)

    def get_or_load_many(
        self,
        indices: Sequence[int] | _Indices | Tensor,
        load: Callable[[list[int]], Iterable[Any]],
        *,
        copy: bool = True,
        strict: bool = True,
        timeout_s: float = 10.0,
        claimed: Collection[int] = (),
        ahead: Container[int] = (),
    ) -> list[Any]:
        """Return the samples ``indices``. Load those that are not cached with one call of ``load``, and cache them.

        Args:
            indices: sample indices, in any order, repeats allowed.
            load: called with a list of indices; returns or yields their samples. Samples that another process is loading are
                waited for after that, and loaded with further calls if needed.
            copy, strict, timeout_s: as in `get_or_load`.
            claimed: samples that the caller has claimed; see `claim_to_load`.
            ahead: samples that `load_ahead` has loaded; ``load`` only returns them.

        Raises:
            SampleIndexError, SampleError: as `get_or_load`.
        """
        indices = check_indices(indices, self._dataset_len, "get_or_load_many")
        is_set = self.set_among(indices)
        hits = indices if is_set.all() else indices[is_set]
        if copy and len(hits) >= self._store.gathers_from:
            found = iter(self._store.load_many(hits))
        else:
            found = (self._load(self._slot(idx), copy) for idx in hits.tolist())
        samples = list(found) if len(hits) == len(indices) else [next(found) if hit else MISSING for hit in is_set.tolist()]
        may_miss = self._store.unreadable or self._store.may_miss
        count = sum(sample is not MISSING for sample in samples) if may_miss else len(hits)
        self._segment.count(HITS, count)
        if count < len(indices):
            self._load_missing(indices, samples, load, None, strict, claimed, ahead)
            for row, idx in enumerate(indices.tolist()):  # claimed by another process, or repeated
                if samples[row] is MISSING:
                    samples[row] = self.get_or_load(
                        idx, lambda idx: next(iter(load([idx]))), copy=copy, strict=strict, timeout_s=timeout_s
                    )
        return samples

    def _load_missing(
        self,
        indices: _Indices,
        samples: list[Any],
        load: Callable[[list[int]], Iterable[Any]],
        encode_rows: Callable[[list[int], list[Any]], list[Any] | None] | None,
        strict: bool,
        claimed: Collection[int] = (),
        ahead: Container[int] = (),
    ) -> None:
        """Load and cache the samples that are MISSING in ``samples``, except those that others are loading. Put them there.

        ``encode_rows`` is called with rows of the batch and their samples, in place of `SampleStore.encode_many`. ``claimed``
        and ``ahead``: as for `get_or_load_many`.
        """
        rows: dict[int, int] = {}  # by index of a missing sample: its first row in the batch
        for row, idx in enumerate(indices.tolist()):
            if samples[row] is MISSING:
                rows.setdefault(idx, row)
        outer, taken, states = _loading.samples, set[int](), self._states
        try:
            empty = [idx for idx in rows if states[idx] == EMPTY and idx not in claimed]
            if empty:
                self._claims.to_load(empty, taken)
            _loading.samples = outer or bool(taken)
            missing = [idx for idx in rows if idx in taken or idx in claimed or not self.fillable(idx)]
            if taken or claimed or not self._store.unreadable:
                missing = [idx for idx in missing if states[idx] != SET or self._is_doubted(idx)]  # set meanwhile
            for part, values, costs_s in self._loaded(missing, load):
                self._note_loads([cost_s for idx, cost_s in zip(part, costs_s, strict=True) if idx not in ahead])
                places = [rows[idx] for idx in part]
                for row, value in zip(places, values, strict=True):
                    samples[row] = value
                self._keep(part, values, costs_s, strict, encode_rows and partial(encode_rows, places))
                if self._agreement is not None:
                    for idx, value in zip(part, values, strict=True):
                        self._judge(idx, value)
        finally:
            _loading.samples = outer
            if taken:
                self._claims.end_loading(taken)

    def each(
        self,
        indices: Sequence[int] | _Indices | Tensor,
        load: Callable[[list[int]], Iterable[Any]],
        *,
        copy: bool,
        strict: bool,
    ) -> Iterator[Any]:
        """Yield the samples ``indices`` as `get_or_load_many` returns them, but read a cached sample when it is its turn.

        So the memory of a large sample that the caller has dropped is used again for the next one.
        """
        indices = check_indices(indices, self._dataset_len, "each")
        missing = dict.fromkeys(indices[self._aux.numpy()[indices] != SET].tolist())
        loaded = dict(zip(missing, self.get_or_load_many(list(missing), load, copy=copy, strict=strict), strict=True))
        for idx in indices.tolist():
            sample = loaded.pop(idx, MISSING)
            if sample is MISSING:
                sample = self.get_or_load(idx, lambda idx: next(iter(load([idx]))), copy=copy, strict=strict)
            yield sample

    def _loaded(
        self, indices: list[int], load: Callable[[list[int]], Iterable[Any]]
    ) -> Iterator[tuple[list[int], list[Any], list[float]]]:
        """Load samples, in parts that take `_PART_S` each. Yield the indices of a part, its samples, and their costs.

        The cost of a sample is its share of the call, and the seconds that the result of the call takes to yield it.
        """
        if not indices:
            return
        started = began = time.perf_counter()
        with span(LOAD):
            values = load(indices)
        self._segment.count(MISSES, len(indices))
        share_s, began = (time.perf_counter() - began) / len(indices), time.perf_counter()
        part: list[int] = []
        loaded: list[Any] = []
        costs_s: list[float] = []
        try:
            for idx, value in zip(indices, in_spans(LOAD, values), strict=True):
                part.append(idx)
                loaded.append(value)
                now = time.perf_counter()
                costs_s.append(share_s + now - began)
                began = now
                if now - started > _PART_S and type(values) is not list:  # a list was made at once
                    yield part, loaded, costs_s
                    part, loaded, costs_s = [], [], []
                    started = began = time.perf_counter()
        except Exception:
            if part:
                yield part, loaded, costs_s
            raise
        if part:
            yield part, loaded, costs_s

    def holds_all(self) -> bool:
        """Return whether all samples that are not outside the cache will have room in it; an estimate if sizes vary."""
        return self._store.has_room_for(self._aux.numpy())

    def fillable(self, idx: int) -> bool:
        """Return whether sample ``idx`` is not cached, and can be. A process without its own counter row caches nothing."""
        return self._states[idx] == EMPTY and self._segment.holder > 0 and not self._store.refused(idx)

    def holds(self, idx: int) -> bool:
        """Return whether sample ``idx`` is cached."""
        return self._states[idx] == SET

    def keeps(self, idx: int) -> bool:
        """Return whether sample ``idx`` is cached, or will be. With admission by cost, only cached samples are sure to stay."""
        return self.holds(idx) or (not self.may_admit_later and self.fillable(idx))

    def peek(self, idx: int) -> Any:
        """Return a copy of sample ``idx`` if it is set, else MISSING. Do not count it."""
        return self._load(self._slot(idx), True) if self.set_among(np.array([idx]))[0] else MISSING

    def claim_to_load(self, indices: list[int], taken: set[int]) -> None:
        """Claim samples that are not cached; add to ``taken`` those that can be, and that nobody else is loading.

        Until `end_loading`, other threads and processes wait for them.
        """
        empty = [idx for idx in indices if self._states[idx] == EMPTY]
        if empty and self.fillable(empty[0]):
            self._claims.to_load(empty, taken)
            if cached := {idx for idx in taken if self._states[idx] != EMPTY}:  # by others, before they were claimed
                self._claims.end_loading(cached)
                taken -= cached

    def end_loading(self, taken: set[int]) -> None:
        """Release the claims that `claim_to_load` added to ``taken``, and empty it."""
        if taken:
            self._claims.end_loading(taken)
            taken.clear()

    def loading(self, indices: list[int], load: Callable[[list[int]], Iterable[Any]]) -> list[Any]:
        """Return ``load(indices)`` for samples that were claimed. See NOTE [ Nested loads ]."""
        outer, _loading.samples = _loading.samples, True
        try:
            return list(load(indices))
        finally:
            _loading.samples = outer

    def load_ahead(self, indices: list[int], load: Callable[[list[int]], Iterable[Any]]) -> list[Any]:
        """Return ``load(indices)`` for samples that were claimed, and count the time. See ``ahead`` of `get_or_load_many`."""
        costs_s: list[float] = []

        def load_timed(indices: list[int]) -> Iterator[Any]:
            began = time.perf_counter()
            values = load(indices)
            share_s, began = (time.perf_counter() - began) / max(1, len(indices)), time.perf_counter()
            for value in values:
                costs_s.append(share_s + time.perf_counter() - began)
                yield value
                began = time.perf_counter()

        try:
            with span(LOAD):
                return self.loading(indices, load_timed)
        finally:
            self._note_loads(costs_s)

    def _note_loads(self, costs_s: Sequence[float]) -> None:
        """Count the seconds that samples took to load."""
        if costs_s:
            self._segment.count(LOAD_NS, int(1e9 * sum(costs_s)))
            if self._records_loads:
                note_loads(costs_s)

    @contextlib.contextmanager
    def free_to_wait(self) -> Iterator[None]:
        """Let this thread wait for samples, although it loads those of another cache. See NOTE [ Nested loads ]."""
        outer, _loading.samples = _loading.samples, False
        try:
            yield
        finally:
            _loading.samples = outer

    @contextlib.contextmanager
    def claimed(self, indices: Iterable[int]) -> Iterator[list[int]]:
        """Claim the samples among ``indices`` that can be cached and are not, and that nobody is loading. Yield these."""
        outer, taken = _loading.samples, set[int]()
        try:
            self.claim_to_load(list(indices), taken)
            _loading.samples = outer or bool(taken)
            yield sorted(taken)
        finally:
            _loading.samples = outer
            self.end_loading(taken)

    @contextlib.contextmanager
    def claim(self, number: int, timeout_s: float = 10.0) -> Iterator[None]:
        """Exclude all threads and processes that claim the same number, say of a block. Wait ``timeout_s`` at most for them."""
        outer, taken = _loading.block, set[int]()
        try:
            if self._segment.holder:
                word = self._dataset_len + number % BLOCKS
                self._claims.wait_to_load(word, taken, 0.0 if outer else timeout_s, lambda: False)
            _loading.block = True
            yield
        finally:
            _loading.block = outer
            self.end_loading(taken)

    def set_if_empty(self, indices: Iterable[int], values: Iterable[Any]) -> None:
        """Cache neighbours of a miss. All or nothing: if they do not all fit, none is cached, now or later."""
        encoded: dict[int, Any] = {}
        for idx, value in zip(indices, values, strict=True):
            if self._states[idx] == EMPTY:
                with contextlib.suppress(SampleError):  # reported when this sample is requested
                    encoded[idx] = self._store.encode(value, f"sample {idx}")
        self._publish_all(list(encoded), list(encoded.values()))

    def set_encoded_if_empty(self, encoded: Mapping[int, Any]) -> None:
        """Cache samples as `set_if_empty` does, given their encoded form from the store's ``encode``, by index."""
        empty = [idx for idx in encoded if self._states[idx] == EMPTY]
        self._publish_all(empty, [encoded[idx] for idx in empty])

    def _publish_all(self, indices: list[int], encoded: list[Any]) -> None:
        """Cache encoded samples that are empty. If they do not all fit, exclude them all."""
        if self._store.has_room(encoded):
            self._publish(indices, encoded, [None] * len(indices), count_races=False)
        else:
            self.exclude(indices)

    def exclude(self, indices: Iterable[int]) -> None:
        """Mark samples as outside the cache, except those that are set or being written."""
        taken = set[int]()
        try:
            self._claims.to_write(list(indices), taken)
            for idx in taken:
                if self._states[idx] == EMPTY:
                    self._states[idx] = OOB
        finally:
            self._claims.end_writing(taken)

    def _miss(self, idx: int, since: float) -> None:
        """Count a miss, and remember it if the sample can be set."""
        self._segment.count(MISSES)
        if self._states[idx] != OOB:
            with self._segment.guard:
                self._missed[idx] = self._missed.get(idx, (0, since))[0] + 1, since

    def _warn_of_unreadable(self) -> None:
        """Warn once why samples are missed here although they are cached."""
        if not self._warned_of_unreadable:
            self._warned_of_unreadable = True
            logger.warning("%s Until then such samples are loaded again, and count as misses.", self._store.unreadable)

    def _miss_many(self, indices: _Indices) -> None:
        now = time.perf_counter()
        for idx in indices.tolist():
            self._miss(idx, now)

    def _keep(
        self,
        indices: list[int],
        values: list[Any],
        costs_s: list[float],
        strict: bool,
        encode: Callable[[list[Any]], list[Any] | None] | None = None,
    ) -> None:
        """Cache loaded samples. One that does not fit raises SampleError; if not ``strict``, it stays outside the cache."""
        states = self._states
        rows = [row for row, idx in enumerate(indices) if states[idx] == EMPTY]
        if self._store.unreadable and any(states[idx] == SET and self.peek(idx) is MISSING for idx in indices):
            self._warn_of_unreadable()  # loading the sample has not imported its class
        if encode is None and not strict and not rows:
            return  # all are outside the cache
        encoded = (encode or self._store.encode_many)(values) if encode or len(values) > 1 else None
        if encoded is None:
            encoded, rows = self._encode_each(indices, values, rows, strict)
        if len(rows) == len(indices):
            self._publish(indices, encoded, costs_s)
        elif rows:
            self._publish([indices[row] for row in rows], [encoded[row] for row in rows], [costs_s[row] for row in rows])

    def _encode_each(
        self, indices: list[int], values: list[Any], rows: Sequence[int], strict: bool
    ) -> tuple[list[Any], list[int]]:
        """Return the encoded samples by row, and the rows of those that fit; exclude the others, or raise SampleError."""
        encoded, fit = [None] * len(indices), []
        for row in rows:
            try:
                encoded[row] = self._store.encode(values[row], f"set_slot({indices[row]})")
                fit.append(row)
            except SampleError as error:
                if strict:
                    raise
                self._reject(indices[row], str(error))
        return encoded, fit

    def _reject(self, idx: int, problem: str) -> None:
        """Count a sample that does not fit, and warn of the first one."""
        segment = self._segment
        self.exclude([idx])
        with segment.guard:
            segment.counters[REJECTED] += 1
            first = segment.extents.first_to_warn(REJECTED_WARNING)
        if first:
            logger.warning(
                "sample %d does not fit and stays uncached. So will others like it, without a warning: %s", idx, problem
            )

    # ------------------------------------------------------------------------------------------------ life

    @property
    def dataset_len(self) -> int:
        """The number of samples of the dataset."""
        return self._dataset_len

    @property
    def shared_name(self) -> str | None:
        """The name under which other processes find the cache; None for a cache without a name."""
        return None if self._segment.path is None else os.path.basename(self._segment.path)

    @property
    def aux_array(self) -> Tensor:
        """The live state of each sample, uint8 of shape (dataset_len,): 0 empty, 1 set, 2 outside the cache."""
        return self._aux

    def clear(self) -> None:
        """Empty the cache; its memory stays reserved. Wait for writers. No process may read samples meanwhile.

        Raises:
            BusyError: another process, which may be stopped, is writing a sample; or other ranks use the cache. Nothing is
                cleared.
        """
        segment = self._segment
        if segment.backing == "none":
            return
        if segment.ranks > 1 and count_ranks(segment.key) > 1:
            raise BusyError("clear: other ranks of this job use the cache. Make a new one, or one with share_ranks=False.")

        def drop() -> None:
            states = self._aux.numpy()
            states[states == SET] = EMPTY
            self._store.clear()

        if not wait_until(lambda: self._claims.run_unwritten(drop), LOCK_TIMEOUT_S):
            raise BusyError(
                f"clear: {describe_process(segment.pid_of(self._claims.writer()))} holds the lock of a slot. Resume or end it."
            )

    def keep_ready(self, size_limit_gib: float | str) -> None:
        """Reserve nothing before `grow_beside`: this is the cache of one rank, in case that ranks have different samples."""
        self._total_bytes = recommended_limit() if size_limit_gib == "auto" else parse_size(size_limit_gib)
        self._segment.extents.limit = 1

    def grow_beside(self, shared: Segment) -> None:
        """Take a part of the bytes that the limit leaves beside a segment that ranks share, which grows no more."""
        used = shared.extents.reserved_bytes
        shared.extents.limit = used
        self._segment.extents.limit = (self._total_bytes - used) // max(2, shared.ranks)

    @property
    def _own(self) -> Any:
        """The cache of this rank alone; None where there is no agreement with other ranks. See NOTE [ Ranks that agree ]."""
        return None if self._agreement is None else self._agreement.own

    @property
    def serves_ranks(self) -> bool:
        """Whether other ranks of this job may use the cache, now or later."""
        return self._segment.rank > 0

    @property
    def ranks(self) -> int:
        """How many ranks of this job use the cache: 1 if it is not shared."""
        return max(1, count_ranks(self._segment.key)) if self._segment.ranks else 1

    def stats(self) -> CacheStats:
        """Return the current counts and sizes, summed over all processes. Reads one byte per sample."""
        filled = int(np.count_nonzero(self._aux.numpy() == SET))
        totals = self._segment.totals()
        if self._own is not None:
            totals = list(map(operator.add, totals, self._own._segment.totals()))
        return CacheStats.of(
            totals,
            dataset_len=self._dataset_len,
            filled=filled,
            reserved_bytes=self._segment.extents.reserved_bytes,
            **self._store.amounts(filled),
        )

    def counts(self) -> tuple[int, int, int]:
        """Return the hits, misses and fills of all processes so far. Cheaper than `stats`."""
        totals = self._segment.totals()
        return totals[HITS], totals[MISSES], totals[FILLS]

    def close(self) -> None:
        """Release the memory in this process. The machine has it back when all processes have done so. Twice is fine.

        Views of the memory (``copy=False``) stay valid, and keep it.
        """
        for name in self._RELEASED:
            self.__dict__.pop(name, None)

    @property
    def closed(self) -> bool:
        """Whether `close` was called in this process."""
        return "_segment" not in self.__dict__

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # else every misspelt attribute would pass

        def __getattr__(self, name: str) -> NoReturn:
            # Called only for missing attributes; a check in each method would cost time
            if name in self._RELEASED:
                raise ClosedError("the cache is closed. Make a new one, or close it later.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.closed:
            return f"<{name}, closed>"
        stats, ranks = self.stats(), self.ranks
        shared = f", shared by {ranks} ranks of this job" if ranks > 1 else ""
        return (
            f"<{name} of {self._samples}: {stats.filled} of {stats.dataset_len} samples cached, room for {self._room} in "
            f"{self._segment.path or self._segment.backing}{shared}, hit rate {stats.hit_rate:.0%}>"
        )

    # ------------------------------------------------------------------------------------------------ inside

    def _index(self, idx: Any, call: str) -> int:
        self._segment  # noqa: B018  raises when closed
        return check_index(idx, self._dataset_len, call)

    def _outside(self, idx: int, call: str) -> NoReturn:
        raise SampleIndexError(
            f"{call}({idx}): the sample lies outside the cache, which has room for {self._room}; the dataset has "
            f"{self._dataset_len} samples. Raise size_limit_gib, or pass allow_oob_idx=True."
        )


class MemoryCache(SampleCache):
    """The base of the caches in shared memory, with or without a name."""

    def _open_memory(self, layout: CacheLayout, options: CacheOptions, proof: Proof | None, parts: tuple[Any, ...]) -> None:
        """Make this the cache of other processes, or a new one. ``parts``: what it is made of and pickled with."""
        segment, capacity = open_memory(layout, options, proof)
        own = None
        if has_agreement(segment, layout.control_bytes, layout.dataset_len):
            own = type(self).__new__(type(self))
            own.__setstate__((parts, *open_own(layout, capacity), None))
            own.keep_ready(options.size_limit_gib)
        self.__setstate__((parts, segment, capacity, own))
        logger.info("%r", self)

    def settle(self) -> int:
        """Reserve no more memory where samples vary in size. Return the bytes that this cache may have."""
        return self._segment.data_bytes

    def __getstate__(self) -> tuple[Any, ...]:
        return self._parts, self._segment, self._capacity, self._own

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._parts, _, self._capacity, _ = state
        self._assemble(*state)

    def _assemble(self, parts: tuple[Any, ...], segment: Segment, capacity: int, own: "SampleCache | None") -> None:
        """Set all attributes that follow from the arguments: each process computes them again."""
        raise NotImplementedError
