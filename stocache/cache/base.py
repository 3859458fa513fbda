"""SampleCache: the samples of a dataset by their index, whatever has their bytes. One module, because all of it is about the
state byte that each sample has: it is set once, and read without a lock."""

import contextlib
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from stocache.cache.loading import LoadingCache, load_in_parts, nested, nesting, only
from stocache.cache.stats import EMPTY, HITS, MISSES, MISSING, OOB, SET, CacheStats
from stocache.cache.store import SampleStore
from stocache.errors import SampleError, SampleIndexError, SlotError
from stocache.samples.indices import check_index, check_indices
from stocache.shm.claims import BLOCKS
from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import FREE_THREADED, Segment
from stocache.system.limits import format_size

_T = TypeVar("_T", default=Any)  # the samples
_Indices = NDArray[np.int64]


class SampleCache(LoadingCache[_T]):
    """The base of the caches of samples: everything but how samples are stored."""

    _store: SampleStore

    def _share(self, segment: Segment, dataset_len: int, store: SampleStore, samples: str) -> None:
        """Set the attributes of all caches; again in each process, because they are not pickled. ``samples``: for messages."""
        self._attach(segment, store, dataset_len)
        self._dataset_len, self._samples, self._slot = dataset_len, samples, store.slot
        self._states = segment.control[:dataset_len]
        self._aux = torch.from_numpy(np.asarray(self._states))
        if segment.backing == "none":  # then nothing is shared, and nothing can be cached
            self._aux.numpy().fill(OOB)

    def hit(self, idx: int, copy: bool) -> Any:
        """Return sample ``idx`` if it is set; else MISSING, also if ``idx`` is not an index. Other methods try this first."""
        try:
            if not 0 <= idx < self._dataset_len or self._states[idx] != SET:
                return MISSING
        except (TypeError, ValueError, RuntimeError):  # not an integer; check_index says so
            return MISSING
        if WEAKLY_ORDERED:
            fence()
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
        return mask

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

    def _miss(self, indices: list[int]) -> None:
        """Count misses, and remember the misses of samples that can be set."""
        now = time.perf_counter()
        self._warn_of_unreadable(indices)
        self._segment.count(MISSES, len(indices))
        for idx in indices:
            if self._states[idx] != OOB:
                self._note_miss(idx, now)

    @property
    def dataset_len(self) -> int:
        """The number of samples of the dataset."""
        return self._dataset_len

    @property
    def aux_array(self) -> Tensor:
        """The live state of each sample, uint8 of shape (dataset_len,): 0 empty, 1 set, 2 outside the cache."""
        return self._aux

    def _outside(self, idx: int, call: str) -> NoReturn:
        raise SampleIndexError(
            f"{call}({idx}): the sample lies outside the cache, {self!r}. Raise size_limit_gib, or pass allow_oob_idx=True."
        )

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
        idx = check_index(idx, self._dataset_len, "get_slot")
        if self._states[idx] == OOB:
            if not allow_oob_idx:
                self._outside(idx, "get_slot")
            self._segment.count(MISSES)
            return None
        if not allow_empty_slot:
            if self._store.unreadable and self.holds(idx):
                raise SlotError(self._store.unreadable)
            raise SlotError(f"get_slot({idx}): the slot is empty. Set it first, or pass allow_empty_slot=True.")
        self._miss([idx])
        return None

    def set_slot(self, idx: int, value: _T, allow_oob_idx: bool = True, allow_overwrite: bool = False) -> None:
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
        idx = check_index(idx, self._dataset_len, "set_slot")
        if self._states[idx] != OOB:
            encoded = self._store.encode(value, f"set_slot({idx})")
            self._publish([idx], self._with_costs([encoded], [self._cost_of(idx, allow_overwrite)]), allow_overwrite)
        elif not allow_oob_idx:
            self._outside(idx, "set_slot")

    def _cost_of(self, idx: int, overwrite: bool) -> float | None:
        """Return the seconds since this process missed a sample that it is about to set, and forget that it did.

        Raises:
            SlotError: the sample is set, and this process has not missed it.
        """
        missed, since = self._take_miss(idx)
        if not missed and self._states[idx] == SET and not overwrite and self._segment.ranks < 2:
            raise SlotError(f"set_slot({idx}): the slot is set. Ask get_slot first, or pass allow_overwrite=True.")
        return time.perf_counter() - since if missed else None

    def _set_many(self, index: _Indices, encode: Callable[[slice], list[Any]], allow_oob_idx: bool, overwrite: bool) -> None:
        """Set the samples that ``encode`` returns for a range of rows: as `set_slot` does, at once if that is the same."""
        states = self._aux.numpy()[index]
        are_alike = (states == EMPTY).all() or ((states != OOB).all() and overwrite)
        step = max(1, len(index)) if are_alike and len(np.unique(index)) == len(index) else 1
        for begin in range(0, len(index), step):
            rows = slice(begin, begin + step)
            indices = index[rows].tolist()
            if self._states[indices[0]] != OOB:
                encoded, costs_s = encode(rows), [self._cost_of(idx, overwrite) for idx in indices]
                self._publish(indices, self._with_costs(encoded, costs_s), overwrite)
            elif not allow_oob_idx:
                self._outside(indices[0], "set_slot")

    def get_slots(self, indices: Sequence[int] | Tensor) -> tuple[list[_T | None], Tensor]:
        """Return the samples ``indices``, with None for missing ones, and a mask of the cached ones.

        Returns:
            ``(samples, mask)``: a list of B samples, and a bool tensor of shape (B,).

        Raises:
            SampleIndexError: an index is not an integer or lies outside the dataset.
        """
        index = check_indices(indices, self._dataset_len, "get_slots")
        samples = [self.hit(idx, True) for idx in index.tolist()]
        mask = np.array([sample is not MISSING for sample in samples], dtype=bool)
        self._miss(index[~mask].tolist())
        return [None if sample is MISSING else sample for sample in samples], torch.from_numpy(mask)

    def set_slots(
        self, indices: Sequence[int] | Tensor, values: Sequence[_T], allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Cache B samples: `set_slot` for each of ``indices`` with its item of ``values``.

        Raises:
            SampleError: there are not B values, and nothing is stored; or as `set_slot`.
            SampleIndexError, SlotError: as `set_slot`. The samples before the wrong one are stored.
        """
        index = check_indices(indices, self._dataset_len, "set_slots")
        if len(values) != len(index):
            raise SampleError(f"set_slots: {len(values)} values for {len(index)} indices.")

        def encode(rows: slice) -> list[Any]:
            pairs = zip(index[rows].tolist(), values[rows], strict=True)
            return [self._store.encode(value, f"set_slot({idx})") for idx, value in pairs]

        self._set_many(index, encode, allow_oob_idx, allow_overwrite)

    def set_if_empty(self, indices: Iterable[int], values: Iterable[object]) -> None:
        """Cache neighbours of a miss. All or nothing: if they do not all fit, none is cached, now or later."""
        encoded: dict[int, Any] = {}
        for idx, value in zip(indices, values, strict=True):
            if self._states[idx] == EMPTY:
                with contextlib.suppress(SampleError):  # reported when this sample is requested
                    encoded[idx] = self._store.encode(value, f"sample {idx}")
        self.set_encoded_if_empty(encoded)

    def set_encoded_if_empty(self, encoded: Mapping[int, object]) -> None:
        """Cache samples as `set_if_empty` does, given their encoded form from the store's ``encode``, by index."""
        empty = self._empty(list(encoded))
        records = [encoded[idx] for idx in empty]
        if self._store.has_room(records):
            self._publish(empty, records, count_races=False)
        else:
            self.exclude(empty)

    def exclude(self, indices: Iterable[int]) -> None:
        """Mark samples as outside the cache, except samples that are set or being written."""
        taken = set[int]()
        try:
            self._claims.to_write(list(indices), taken)
            for idx in taken:
                if self._states[idx] == EMPTY:
                    self._states[idx] = OOB
        finally:
            self._claims.end_writing(taken)

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
        idx = check_index(idx, self._dataset_len, "get_or_load")
        return self._load_one(idx, partial(load, idx), copy, strict, timeout_s)

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
        """Return the samples ``indices``. Load the missing ones with one call of ``load``, and cache them.

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
            self._load_many(
                indices.tolist(), samples, load,
                copy=copy, strict=strict, timeout_s=timeout_s, claimed=claimed, ahead=ahead,
            )  # fmt: skip
        return samples

    def each(
        self, indices: Sequence[int] | _Indices, load: Callable[[list[int]], Iterable[Any]], *, copy: bool, strict: bool
    ) -> Iterator[Any]:
        """Yield the samples ``indices`` as `get_or_load_many` returns them, but read a cached sample when it is its turn.

        So the memory of a large sample that the caller has dropped is used again for the next one.
        """
        indices = check_indices(indices, self._dataset_len, "each")
        missing = dict.fromkeys(indices[self._aux.numpy()[indices] != SET].tolist())
        loaded = dict(zip(missing, self.get_or_load_many(list(missing), load, copy=copy, strict=strict), strict=True))
        for idx in indices.tolist():
            yield loaded.pop(idx) if idx in loaded else self.get_or_load(idx, partial(only, load), copy=copy, strict=strict)

    def claim_to_load(self, indices: list[int], taken: set[int]) -> None:
        """Claim samples that are not cached; add to ``taken`` the samples that can be cached and that nobody else is loading.

        Until `end_loading`, other threads and processes wait for them.
        """
        empty = self._empty(indices)
        if empty and self.fillable(empty[0]):
            self._claims.to_load(empty, taken)
            if cached := {idx for idx in taken if self._states[idx] != EMPTY}:  # by others, before they were claimed
                self._claims.end_loading(cached)
                taken -= cached

    def load_ahead(self, indices: list[int], load: Callable[[list[int]], Iterable[object]]) -> list[Any]:
        """Return ``load(indices)`` for samples that were claimed, and count the time. See ``ahead`` of `get_or_load_many`."""
        samples: list[Any] = []
        with nested(True):
            for _, loaded, costs_s in load_in_parts(indices, load):
                self._note_loads(costs_s)
                samples += loaded
        return samples

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

    def _empty(self, items: list[int]) -> list[int]:
        states = self._states
        return [idx for idx in items if states[idx] == EMPTY]

    def _claim_to_write(self, items: list[int], taken: set[int], overwrite: bool) -> list[int]:
        states, writable = self._states, (EMPTY, SET) if overwrite else (EMPTY,)
        self._claims.to_write(items, taken)
        return [idx for idx in items if idx in taken and states[idx] in writable]

    def _set(self, items: list[int]) -> None:
        states = self._states
        fence()
        for idx in items:
            states[idx] = SET
        fence()

    def _reject(self, item: int, problem: str) -> None:
        self.exclude([item])
        super()._reject(item, problem)

    def _shown(self, item: int) -> str:
        return f"sample {item}"

    def _count(self) -> tuple[int, int]:
        return int(np.count_nonzero(self._aux.numpy() == SET)), self._dataset_len

    def _describe(self, stats: CacheStats) -> str:
        cached, room = f"{stats.filled} of {stats.dataset_len} samples cached", format_size(stats.capacity_bytes)
        return f"{self._samples}: {cached}, room for {room}"
