"""The protocol of every cache: one state byte per sample, set once and read without a lock; misses loaded by one of all.

How the samples themselves are held is the part of the subclasses: `SharedCache`, `RaggedCache`.

NOTE [ Publishing a slot ]
    Writers of one slot exclude each other: threads by the segment's guard, processes by the slot's record lock. The one who
    has both looks at the state byte again, copies the sample in, lets the fence lock go and takes it again, and only then
    sets the byte to SET. Releasing a lock and then taking one keeps the two stores in that order on every processor, also
    on ARM. Killed before the byte is set, a writer leaves an empty slot and a lock the kernel drops; the next one to miss
    fills it. Since a set slot never changes again, a reader needs no lock: the byte, then the row, in this order (NOTE
    [ Reading in order ]).

NOTE [ Races and errors ]
    Whoever missed a slot will set it, and may find that somebody else was faster: that is no error, the samples are equal.
    Setting a slot that is set *without* having missed it is one, for then two samples claim one index. So each process
    remembers what it has missed and not yet set, and how often (threads may miss one slot together).

NOTE [ Nested loads ]
    The load of a sample may need others: A needs B, and in another process B needs A. Each has claimed its own and would wait
    for the other's. So a thread that loads under a claim waits for no claim: what it needs it loads at once, though another
    may be loading it, too. The same holds for a sample that is asked for within its own load. Only claims of blocks are waited
    for within the load of a sample: who loads a block waits for nobody.
"""

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from stocache.cache.stats import EMPTY, FILLS, HITS, MISSES, OOB, RACES, REFUSED, REJECTED, SET, CacheStats
from stocache.errors import BusyError, ClosedError, SampleError, SampleIndexError, SlotError
from stocache.samples.indices import check_index, check_indices
from stocache.shm.load_order import WEAKLY_ORDERED, order_loads
from stocache.shm.segment import MISFIT_WARNING, Segment
from stocache.system.waiting import describe_process

logger = logging.getLogger("stocache")

_Self = TypeVar("_Self", bound="SampleCache")
_Indices = np.ndarray[Any, np.dtype[np.int64]]


class _Loading(threading.local):
    """Whether this thread loads samples, or a block, under claims of its own; see NOTE [ Nested loads ]."""

    samples = block = False


_loading = _Loading()

MISSING: Any = object()
"""What `SampleCache.hit` returns instead of a sample, which may be None."""


class SlotState(IntEnum):
    """The state of a sample, as ``cache.aux_array`` holds it."""

    EMPTY = 0
    SET = 1
    OOB = 2
    """Out of bounds of the cache: in the dataset, but not to be resident."""


class SampleCache(ABC):
    """What `SharedCache` and `RaggedCache` have in common. A subclass says how samples are stored and read."""

    _RELEASED: ClassVar[tuple[str, ...]] = ("_segment", "_states", "_aux")
    """Attributes that hold memory. close() deletes them."""

    _gathers_from: int = 16
    """Batches of at least so many samples are read by `_load_many`; smaller ones are faster sample by sample (measured)."""

    _unreadable: str = ""
    """Why `_load` returned MISSING in this process, if it did: the module of a sample's class is not imported here."""

    _warned_of_unreadable: bool = False

    revises: bool = False
    """Whether a sample that was not kept when it was set may be kept when it is set again."""

    _slot: Callable[[int], int]
    """Returns the slot of a sample that is set. Given by the subclass: reading a sample calls it."""

    _load: Callable[[int, bool], Any]
    """Returns the sample in a slot: a private copy if the second argument is True. MISSING if it cannot be read here. Given by
    the subclass, as a method or an attribute: reading a sample calls it."""

    @abstractmethod
    def _encode(self, value: Any, where: str) -> Any:
        """Return what `_store` is to write. Raises SampleError, whose message begins with ``where``."""

    @abstractmethod
    def _store(self, idx: int, encoded: Any, cost_s: float | None) -> int | None:
        """Write an encoded sample where `_load` finds it. Return the counter to raise; FILLS means that the sample was stored.

        ``cost_s``: seconds since this process missed the sample; None if it did not.
        """

    @abstractmethod
    def _refused(self, idx: int) -> bool:
        """Whether the machine has refused the memory for a sample that is not set."""

    @abstractmethod
    def _load_many(self, index: _Indices) -> list[Any]:
        """Return private copies of samples. All of them are set."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop all samples. Every slot is locked, and none is set."""

    @abstractmethod
    def _amounts(self, filled: int) -> dict[str, int]:
        """Return ``slots``, ``slot_bytes`` and ``capacity_bytes`` of `CacheStats` for so many cached samples."""

    def _share(self, segment: Segment, dataset_len: int, samples: str, room: str) -> None:
        """Set the attributes of all caches; again in each process, because they are not pickled.

        ``samples`` and ``room`` describe the samples, and how many of them there is room for, in messages.
        """
        self._segment, self._dataset_len, self._samples, self._room = segment, dataset_len, samples, room
        self._states = segment.control[:dataset_len]
        self._aux = torch.frombuffer(self._states, dtype=torch.uint8) if dataset_len else torch.empty(0, dtype=torch.uint8)
        if segment.backing == "none":  # then nothing is shared, and nothing can be cached
            self._aux.numpy().fill(OOB)
        self._missed: dict[int, tuple[int, float]] = {}  # how often, and since when; see NOTE [ Races and errors ]

    # ------------------------------------------------------------------------------------------------ one sample

    def get_slot(self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True, *, copy: bool = True) -> Any | None:
        """Return sample ``idx``, or None when it is not cached.

        Args:
            idx: sample index in ``[0, dataset_len)``; it may lie outside the cache.
            allow_oob_idx: False raises when the sample lies outside the cache, instead of returning None.
            allow_empty_slot: False raises when the slot is empty, instead of returning None.
            copy: False returns a view of the shared memory itself: writing to it changes every later epoch.

        Returns:
            The sample as it was set.

        Raises:
            SampleIndexError: ``idx`` is no integer or outside the dataset; or outside the cache, when not allowed.
            SlotError: the slot is empty, when not allowed.

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
        if self._unreadable and self._states[idx] == SET:
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
        """Return sample ``idx`` if it is set; else, or where ``idx`` is no index, MISSING. The quick part of all other ways."""
        try:
            if not 0 <= idx < self._dataset_len or self._states[idx] != SET:
                return MISSING
        except (TypeError, ValueError, RuntimeError):  # not an integer; _index says so
            return MISSING
        if WEAKLY_ORDERED:
            order_loads()
        value = self._load(self._slot(idx), copy)
        if value is not MISSING:  # else it is of a class that is not imported here
            self._segment.counters[HITS] += 1
        return value

    def set_among(self, index: _Indices) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Return which of the samples ``index`` are set: these may be read from now on."""
        mask: np.ndarray[Any, np.dtype[np.bool_]] = self._aux.numpy()[index] == SET  # at a third of the cost of torch's
        if WEAKLY_ORDERED:
            order_loads()
        return mask

    def set_slot(self, idx: int, value: Any, allow_oob_idx: bool = True, allow_overwrite: bool = False) -> None:
        """Cache ``value`` as sample ``idx``; does nothing when the sample lies outside the cache.

        Args:
            idx: sample index in ``[0, dataset_len)``.
            value: the sample, which must be of exactly the dtypes and shapes the cache holds. Copied.
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
        encoded = self._encode(value, f"set_slot({idx})")
        segment = self._segment
        with segment.guard:
            missed, since = self._missed.pop(idx, (0, 0.0))
            if missed > 1:
                self._missed[idx] = missed - 1, since
            cost_s = time.perf_counter() - since if missed else None
            if not missed and self._states[idx] == SET and not allow_overwrite:
                raise SlotError(f"set_slot({idx}): the slot is set. Ask get_slot first, or pass allow_overwrite=True.")
            counter = self._publish(idx, encoded, allow_overwrite, cost_s)
            if counter is not None:
                segment.counters[counter] += 1

    def _publish(self, idx: int, encoded: Any, overwrite: bool, cost_s: float | None) -> int | None:
        """Store sample ``idx``, under the guard; return what became of it: the counter to raise, if any."""
        segment = self._segment
        try:
            try:
                return self._publish_locked(idx, encoded, overwrite, cost_s) if segment.try_lock(idx) else RACES
            finally:
                segment.unlock(idx)
        except BaseException:  # an interrupt may have come before the lock was given back
            segment.unlock(idx)
            raise

    def _publish_locked(self, idx: int, encoded: Any, overwrite: bool, cost_s: float | None) -> int | None:
        # see NOTE [ Publishing a slot ]
        if self._states[idx] == SET and not overwrite:
            return RACES
        try:
            counter = self._store(idx, encoded, cost_s)
        except OSError as error:  # reserved memory does not run out; if it ever does, the sample is uncached, not the job dead
            logger.warning("sample %d stays uncached: %s", idx, str(error))
            return REFUSED
        if counter != FILLS:
            return counter
        self._segment.fence.acquire(blocking=False)  # held already, unless an interrupt came between the next two
        self._segment.fence.release()
        self._segment.fence.acquire()
        self._states[idx] = SET
        return FILLS

    # ------------------------------------------------------------------------------------------------ loading what misses

    def get_or_load(
        self, idx: int, load: Callable[[int], Any], *, copy: bool = True, strict: bool = True, timeout_s: float = 10.0
    ) -> Any:
        """Return sample ``idx`` from the cache, or else from ``load(idx)``, which is then cached.

        Of all threads, processes and jobs that want an empty sample at one time, one loads it and the others wait. So jobs that
        read in the same order (the same seed, a sweep) do not all read the source.

        Args:
            idx: sample index in ``[0, dataset_len)``; where it lies outside the cache, everyone loads for himself.
            load: called with ``idx``; what it raises passes through, and the next one to want the sample loads it.
            copy: as in `get_slot`.
            strict: False for what does not fit the cache to be returned all the same: uncached, counted (``rejected``),
                with one warning.
            timeout_s: seconds to wait for the load of another, who may be paused, before loading too. The dead never hold it.

        Returns:
            The sample: a private copy, or what ``load`` returned.

        Raises:
            SampleIndexError: ``idx`` is no integer or outside the dataset.
            SampleError: what ``load`` returned does not fit the cache.
        """
        value = self.hit(idx, copy)
        if value is not MISSING:
            return value
        idx = self._index(idx, "get_or_load")
        claimed = self.fillable(idx) and self._wait(idx, timeout_s, lambda: self._states[idx] == SET)
        outer = _loading.samples
        _loading.samples = outer or claimed
        try:
            value = self.hit(idx, copy)
            if value is MISSING:
                self._miss(idx, time.perf_counter())
                value = load(idx)
                self._keep(idx, value, strict)
            return value
        finally:
            _loading.samples = outer
            if claimed:
                self._segment.release_claim(idx)

    def get_or_load_many(
        self,
        indices: Sequence[int] | Tensor,
        load: Callable[[list[int]], Iterable[Any]],
        *,
        copy: bool = True,
        strict: bool = True,
        timeout_s: float = 10.0,
    ) -> list[Any]:
        """Return the samples ``indices``: those that are cached, and the others from one call of ``load``, then cached.

        Args:
            indices: sample indices, in any order, repeats allowed.
            load: called with a list of indices; returns, or yields, their samples. Samples that another process is just loading
                are waited for after that, and if need be loaded with further calls.
            copy, strict, timeout_s: as in `get_or_load`.

        Raises:
            SampleIndexError, SampleError: as `get_or_load`.
        """
        index = check_indices(indices, self._dataset_len, "get_or_load_many")
        hit = self.set_among(index).tolist()
        there = index[hit]
        if copy and len(there) >= self._gathers_from:
            found = iter(self._load_many(there))
        else:
            found = (self._load(self._slot(idx), copy) for idx in there.tolist())
        samples = [next(found) if is_hit else MISSING for is_hit in hit]
        hits = sum(sample is not MISSING for sample in samples) if self._unreadable else len(there)
        self._segment.counters[HITS] += hits
        if hits == len(index):
            return samples
        missing: dict[int, int] = {}  # and where they are wanted first
        for position, idx in enumerate(index.tolist()):
            if not hit[position]:
                missing.setdefault(idx, position)
        claims = {idx for idx in missing if self.fillable(idx) and self._segment.try_claim(idx)}
        outer = _loading.samples
        _loading.samples = outer or bool(claims)
        try:
            wanted = [idx for idx in missing if self._states[idx] != SET and (idx in claims or not self.fillable(idx))]
            for idx, value in zip(wanted, self._timed(wanted, load), strict=True):
                self._keep(idx, value, strict)
                samples[missing[idx]] = value
                if idx in claims:
                    claims.remove(idx)
                    self._segment.release_claim(idx)
        finally:
            _loading.samples = outer
            for idx in claims:
                self._segment.release_claim(idx)
        for position, idx in enumerate(index.tolist()):  # claimed by others, or asked for twice
            if samples[position] is MISSING:
                samples[position] = self.get_or_load(
                    idx, lambda idx: next(iter(load([idx]))), copy=copy, strict=strict, timeout_s=timeout_s
                )
        return samples

    def each(
        self, indices: Sequence[int] | Tensor, load: Callable[[list[int]], Iterable[Any]], *, copy: bool, strict: bool
    ) -> Iterator[Any]:
        """Yield the samples ``indices`` as `get_or_load_many` returns them; cached ones are read when it is their turn.

        So the memory of a large sample that has been dealt with is used again for the next.
        """
        index = check_indices(indices, self._dataset_len, "each")
        missing = dict.fromkeys(index[self._aux.numpy()[index] != SET].tolist())
        loaded = dict(zip(missing, self.get_or_load_many(list(missing), load, copy=copy, strict=strict), strict=True))
        for idx in index.tolist():
            sample = loaded.pop(idx, MISSING)
            if sample is MISSING:
                sample = self.get_or_load(idx, lambda idx: next(iter(load([idx]))), copy=copy, strict=strict)
            yield sample

    def _timed(self, wanted: list[int], load: Callable[[list[int]], Iterable[Any]]) -> Iterator[Any]:
        """Yield what is loaded, noting for each sample since when it was missed: its share of the call, and its own time."""
        began = time.perf_counter()
        values = load(wanted) if wanted else ()
        share_s, began = (time.perf_counter() - began) / max(1, len(wanted)), time.perf_counter()
        for idx, value in zip(wanted, values, strict=True):
            self._miss(idx, began - share_s)
            yield value
            began = time.perf_counter()

    def fillable(self, idx: int) -> bool:
        """Whether sample ``idx`` is not cached, and may be."""
        return self._states[idx] == EMPTY and not self._refused(idx)

    def peek(self, idx: int) -> Any:
        """Return a copy of sample ``idx`` if it is set, else MISSING; counts nothing."""
        return self._load(self._slot(idx), True) if self.set_among(np.array([idx]))[0] else MISSING

    @contextlib.contextmanager
    def claim(self, number: int, timeout_s: float = 10.0) -> Iterator[None]:
        """Exclude all others that ask for the same number, of a block or whatever it may be; for so long at most."""
        claim = self._dataset_len + number
        claimed = self._segment.wait_for_claim(claim, 0.0 if _loading.block else timeout_s, lambda: False)
        outer, _loading.block = _loading.block, True
        try:
            yield
        finally:
            _loading.block = outer
            if claimed:
                self._segment.release_claim(claim)

    def set_if_empty(self, indices: Iterable[int], values: Iterable[Any]) -> None:
        """Cache samples that were loaded along with one that was missed, as far as they are empty, and fit."""
        for idx, value in zip(indices, values, strict=True):
            if self._states[idx] == EMPTY:
                with contextlib.suppress(SampleError):  # which is reported when it is asked for
                    self._set_if_empty(idx, self._encode(value, f"sample {idx}"))

    def _set_if_empty(self, idx: int, encoded: Any) -> None:
        with self._segment.guard:
            if self._publish(idx, encoded, False, None) == FILLS:
                self._segment.counters[FILLS] += 1

    def _exclude(self, idx: int) -> None:
        """Have sample ``idx`` stay uncached, unless it is cached, or just being stored; under the guard."""
        try:
            if self._segment.try_lock(idx) and self._states[idx] == EMPTY:
                self._states[idx] = OOB
        finally:
            self._segment.unlock(idx)

    def _wait(self, claim: int, timeout_s: float, over: Callable[[], bool]) -> bool:
        """Wait until the claim of a sample is ours (True), or waiting is ``over``, or the time is."""
        if _loading.samples or _loading.block:
            return self._segment.try_claim(claim)
        return self._segment.wait_for_claim(claim, timeout_s, over)

    def _miss(self, idx: int, since: float) -> None:
        """Count a miss, and remember it where the sample may be set."""
        self._segment.counters[MISSES] += 1
        if self._states[idx] != OOB:
            with self._segment.guard:
                self._missed[idx] = self._missed.get(idx, (0, since))[0] + 1, since

    def _warn_of_unreadable(self) -> None:
        """Say once why samples that are cached are missed here."""
        if not self._warned_of_unreadable:
            self._warned_of_unreadable = True
            logger.warning("%s Until then such samples are loaded again, and count as misses.", self._unreadable)

    def _miss_many(self, index: _Indices) -> None:
        now = time.perf_counter()
        for idx in index.tolist():
            self._miss(idx, now)

    def _keep(self, idx: int, value: Any, strict: bool) -> None:
        """Cache a loaded sample; what does not fit raises SampleError, or if not ``strict`` is passed by from now on."""
        if self._states[idx] == SET:  # by others, or with its block
            with self._segment.guard:
                self._missed.pop(idx, None)
            if self._unreadable and self.peek(idx) is MISSING:  # loading the sample has not imported its class
                self._warn_of_unreadable()
            return
        try:
            self.set_slot(idx, value)
        except SampleError as error:
            if strict:
                raise
            segment = self._segment
            with segment.guard:
                self._missed.pop(idx, None)
                segment.counters[REJECTED] += 1
                self._exclude(idx)
                first = segment.first_to_warn(MISFIT_WARNING)
            if first:  # as a str, for a handler that keeps the error would keep its traceback, and with it the memory
                logger.warning(
                    "sample %d does not fit and stays uncached; so will others like it, unmentioned: %s", idx, str(error)
                )

    # ------------------------------------------------------------------------------------------------ life

    @property
    def aux_array(self) -> Tensor:
        """The live state of every sample, uint8 of shape (dataset_len,): 0 empty, 1 set, 2 outside the cache."""
        return self._aux

    def clear(self) -> None:
        """Empty the cache; its memory stays reserved. Waits for writers; nobody should be reading meanwhile.

        Raises:
            BusyError: another process, which is stopped perhaps, is just writing a sample. Nothing is cleared.
        """
        segment = self._segment
        if segment.backing == "none":
            return

        def forget() -> bool:
            states = self._aux.numpy()
            states[states == SET] = EMPTY
            self._clear()
            return True

        with segment.guard:
            if not segment.run_locked(0, self._dataset_len, forget, False):
                owner = describe_process(segment.slot_owner(0, self._dataset_len))
                raise BusyError(f"clear: {owner} keeps the lock of a slot. Have it go on, or end it.")

    def stats(self) -> CacheStats:
        """Return the counts and amounts of now, summed over all processes. Reads one byte per sample."""
        filled = int(np.count_nonzero(self._aux.numpy() == SET))
        return CacheStats.of(
            self._segment.totals(),
            dataset_len=self._dataset_len,
            filled=filled,
            reserved_bytes=self._segment.reserved_bytes,
            **self._amounts(filled),
        )

    def counts(self) -> tuple[int, int, int]:
        """Return the hits, misses and fills so far, over all processes: a cheap part of `stats`."""
        totals = self._segment.totals()
        return totals[HITS], totals[MISSES], totals[FILLS]

    def close(self) -> None:
        """Let this process's hold of the memory go; it returns to the machine with the last holder. Twice is fine.

        Views of the memory (``copy=False``) stay valid, and hold it.
        """
        for name in self._RELEASED:
            self.__dict__.pop(name, None)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # else every misspelt attribute would pass

        def __getattr__(self, name: str) -> NoReturn:
            # Costs nothing while the attributes are there, which a check in each method would
            if name in self._RELEASED:
                raise ClosedError("the cache is closed. Make a new one, or close it later.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        name = type(self).__name__
        if "_segment" not in self.__dict__:
            return f"<{name}, closed>"
        stats = self.stats()
        return (
            f"<{name} of {self._samples}: {stats.filled} of {stats.dataset_len} samples cached, room for {self._room} in "
            f"{self._segment.path or self._segment.backing}, hit rate {stats.hit_rate:.0%}>"
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
