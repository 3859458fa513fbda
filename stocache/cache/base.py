"""Caches that load what they miss: of all processes that want a sample, one loads it, and the others wait.

A cache publishes samples; its `SampleStore` has their bytes: `SlotArrays` in a `SharedCache`, `RecordStore` in a `RaggedCache`.

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
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from stocache.cache.allocate import CacheLayout, Proof, open_memory
from stocache.cache.options import CacheOptions
from stocache.cache.publishing import PublishingCache
from stocache.cache.stats import EMPTY, FILLS, HITS, LOAD_NS, MISSES, MISSING, OOB, SET, CacheStats
from stocache.errors import BusyError, SlotError
from stocache.observe.recording.record import note_loads
from stocache.samples.indices import check_indices
from stocache.shm.claims import BLOCKS
from stocache.shm.segment import Segment
from stocache.shm.siblings import count_ranks
from stocache.system.spans import LOAD, in_spans, span
from stocache.system.waiting import LOCK_TIMEOUT_S, describe_process, wait_until

logger = logging.getLogger("stocache")

_PART_S = 0.02  # samples that were loaded in this time are published together

_T = TypeVar("_T", default=Any)  # the samples
_K = TypeVar("_K")  # what identifies them
_Indices = NDArray[np.int64]


class Nesting(threading.local):
    """Whether this thread is loading samples, or a block, under its own claims; see NOTE [ Nested loads ]."""

    samples = block = False


nesting = Nesting()


@contextlib.contextmanager
def nested(samples: bool) -> Iterator[None]:
    """Run a block as one that loads ``samples`` under a claim, or as one that may wait for samples."""
    outer, nesting.samples = nesting.samples, samples
    try:
        yield
    finally:
        nesting.samples = outer


def load_in_parts(
    keys: list[_K], load: Callable[[list[_K]], Iterable[object]], segment: Segment
) -> Iterator[tuple[dict[_K, Any], list[float]]]:
    """Load samples, in parts that take `_PART_S` each. Yield the samples of a part by key, and their costs. Count misses.

    The keys, such as indices, are all different. The cost of a sample is its share of the call, and the seconds that the result
    of the call takes to yield it.

    Raises:
        ValueError: there are fewer or more samples than keys.
    """
    if not keys:
        return
    started = began = time.perf_counter()
    with span(LOAD):
        values = load(keys)
    segment.count(MISSES, len(keys))
    share_s, began = (time.perf_counter() - began) / len(keys), time.perf_counter()
    loaded: dict[_K, Any] = {}
    costs_s: list[float] = []
    try:
        for key, value in zip(keys, in_spans(LOAD, values), strict=True):
            loaded[key] = value
            now = time.perf_counter()
            costs_s.append(share_s + now - began)
            began = now
            if now - started > _PART_S and type(values) is not list:  # a list was made at once
                yield loaded, costs_s
                loaded, costs_s = {}, []
                started = began = time.perf_counter()
    except Exception:
        if loaded:
            yield loaded, costs_s
        raise
    if loaded:
        yield loaded, costs_s


class SampleCache(PublishingCache[_T]):
    """The base of all caches: everything but how samples are stored."""

    def get_slot(self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True, *, copy: bool = True) -> _T | None:
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
        value: _T = self.hit(idx, copy)
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

    def get_or_load(
        self, idx: int, load: Callable[[int], _T], *, copy: bool = True, strict: bool = True, timeout_s: float = 10.0
    ) -> _T:
        """Return sample ``idx`` from the cache, or else from ``load(idx)``, which is then cached.

        If several threads, processes or jobs want a sample that is not cached, one loads it and the others wait.

        Args:
            idx: sample index in ``[0, dataset_len)``. If it lies outside the cache, each caller loads the sample itself.
            load: called with ``idx``. Its errors pass through; then the next caller loads the sample.
            copy: as in `get_slot`.
            strict: False returns a sample that does not fit the cache all the same: uncached, counted (``rejected``), with one
                warning.
            timeout_s: seconds to wait for another living process that is loading the sample. Then this process loads it too.

        Returns:
            The sample: a private copy, or the object that ``load`` returned.

        Raises:
            SampleIndexError: ``idx`` is not an integer or lies outside the dataset.
            SampleError: the loaded sample does not fit the cache.
        """
        value: _T = self.hit(idx, copy)
        if value is not MISSING:
            return value
        idx = self._index(idx, "get_or_load")
        outer, taken = nesting.samples, set[int]()
        try:
            if self.fillable(idx):
                if outer or nesting.block:  # see NOTE [ Nested loads ]
                    self._claims.to_load([idx], taken)
                else:
                    self._claims.wait_to_load(idx, taken, timeout_s, lambda: self._states[idx] == SET)
            nesting.samples = outer or bool(taken)
            value = self.hit(idx, copy)
            if value is MISSING:
                began = time.perf_counter()
                self._segment.count(MISSES)
                with span(LOAD):
                    value = load(idx)
                cost_s = time.perf_counter() - began
                self._note_loads([cost_s])
                self._keep([idx], [value], [cost_s], strict)
            return value
        finally:
            nesting.samples = outer
            self.end_loading(taken)

    def get_or_load_many(
        self,
        indices: Sequence[int] | _Indices | Tensor,
        load: Callable[[list[int]], Iterable[_T]],
        *,
        copy: bool = True,
        strict: bool = True,
        timeout_s: float = 10.0,
        claimed: Collection[int] = (),
        ahead: Container[int] = (),
    ) -> list[_T]:
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
        load: Callable[[list[int]], Iterable[object]],
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
        outer, taken, states = nesting.samples, set[int](), self._states
        try:
            empty = [idx for idx in rows if states[idx] == EMPTY and idx not in claimed]
            if empty:
                self._claims.to_load(empty, taken)
            nesting.samples = outer or bool(taken)
            missing = [idx for idx in rows if idx in taken or idx in claimed or not self.fillable(idx)]
            if taken or claimed or not self._store.unreadable:
                missing = [idx for idx in missing if states[idx] != SET]  # set meanwhile
            for loaded, costs_s in load_in_parts(missing, load, self._segment):
                self._note_loads([cost_s for idx, cost_s in zip(loaded, costs_s, strict=True) if idx not in ahead])
                places = [rows[idx] for idx in loaded]
                for row, value in zip(places, loaded.values(), strict=True):
                    samples[row] = value
                self._keep(list(loaded), list(loaded.values()), costs_s, strict, encode_rows and partial(encode_rows, places))
        finally:
            nesting.samples = outer
            self.end_loading(taken)

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

    def loading(self, indices: list[int], load: Callable[[list[int]], Iterable[object]]) -> list[Any]:
        """Return ``load(indices)`` for samples that were claimed. See NOTE [ Nested loads ]."""
        with nested(True):
            return list(load(indices))

    def load_ahead(self, indices: list[int], load: Callable[[list[int]], Iterable[object]]) -> list[Any]:
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
    def claimed(self, indices: Iterable[int]) -> Iterator[list[int]]:
        """Claim the samples among ``indices`` that can be cached and are not, and that nobody is loading. Yield these."""
        taken = set[int]()
        try:
            self.claim_to_load(list(indices), taken)
            with nested(nesting.samples or bool(taken)):
                yield sorted(taken)
        finally:
            self.end_loading(taken)

    @contextlib.contextmanager
    def claim(self, number: int, timeout_s: float = 10.0) -> Iterator[None]:
        """Exclude all threads and processes that claim the same number, say of a block. Wait ``timeout_s`` at most for them."""
        outer, taken = nesting.block, set[int]()
        try:
            if self._segment.holder:
                word = self._dataset_len + number % BLOCKS
                self._claims.wait_to_load(word, taken, 0.0 if outer else timeout_s, lambda: False)
            nesting.block = True
            yield
        finally:
            nesting.block = outer
            self.end_loading(taken)

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

    @property
    def serves_ranks(self) -> bool:
        """Whether other ranks of this job may use the cache, now or later."""
        return self._segment.ranks > 0

    @property
    def ranks(self) -> int:
        """How many ranks of this job use the cache: 1 if it is not shared."""
        return max(1, count_ranks(self._segment.key)) if self._segment.ranks else 1

    def stats(self) -> CacheStats:
        """Return the current counts and sizes, summed over all processes. Reads one byte per sample."""
        filled = int(np.count_nonzero(self._aux.numpy() == SET))
        sizes = {"dataset_len": self._dataset_len, "filled": filled, "reserved_bytes": self._segment.extents.reserved_bytes}
        return CacheStats.of(self._segment.totals(), **sizes, **self._store.amounts(filled))

    def counts(self) -> tuple[int, int, int]:
        """Return the hits, misses and fills of all processes so far. Cheaper than `stats`."""
        totals = self._segment.totals()
        return totals[HITS], totals[MISSES], totals[FILLS]

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


class MemoryCache(SampleCache[_T]):
    """The base of the caches in shared memory, with or without a name."""

    def _open_memory(self, layout: CacheLayout, options: CacheOptions, proof: Proof | None, parts: tuple[object, ...]) -> None:
        """Make this the cache of other processes, or a new one. ``parts``: what it is made of and pickled with."""
        self.__setstate__((parts, *open_memory(layout, options, proof)))
        logger.info("%r", self)

    def settle(self) -> int:
        """Reserve no more memory where samples vary in size. Return the bytes that this cache may have."""
        return self._segment.data_bytes

    def __getstate__(self) -> tuple[Any, ...]:
        return self._parts, self._segment, self._capacity

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._parts, _, self._capacity = state
        self._assemble(*state)

    def _assemble(self, parts: tuple[object, ...], segment: Segment, capacity: int) -> None:
        """Set all attributes that follow from the arguments: each process computes them again."""
        raise NotImplementedError
