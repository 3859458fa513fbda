"""Know which samples of a cache are set: one state byte per sample, set once and read without a lock."""

import time
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from stocache.cache.loading import LoadingCache
from stocache.cache.stats import EMPTY, HITS, MISSES, MISSING, OOB, SET
from stocache.errors import SampleIndexError
from stocache.samples.indices import check_index
from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import FREE_THREADED, Segment

_T = TypeVar("_T", default=Any)  # the samples
_Indices = NDArray[np.int64]


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

    def encode(self, sample: object, where: str, /) -> Any:
        """Return a sample encoded for `write`. Raises SampleError, whose message begins with ``where``."""

    def encode_many(self, samples: list[Any]) -> list[Any] | None:
        """Return samples encoded for `write_many`; None if a sample does not fit: `encode` says which, and why."""

    def write_many(self, items: list[Any], encoded: Sequence[Any]) -> list[int | None]:
        """Write encoded samples where `load` finds them. This thread has the claims to write them; the guard is free.

        Return for each the counter to raise, if any; FILLS means that the sample was written.
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


class SampleStates(LoadingCache[_T]):
    """The state of each sample of a cache, and the samples that are set. `SampleCache` is the whole cache."""

    _store: SampleStore

    def _share(self, segment: Segment, dataset_len: int, store: SampleStore, samples: str, room: str) -> None:
        """Set the attributes of all caches; again in each process, because they are not pickled.

        ``samples`` and ``room`` describe the samples, and how many of them there is room for, in messages.
        """
        self._attach(segment, store, dataset_len)
        self._dataset_len, self._samples, self._room, self._slot = dataset_len, samples, room, store.slot
        self._states = segment.control[:dataset_len]
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")  # which torch.frombuffer refuses
        self._aux = torch.frombuffer(self._states, dtype=torch.uint8) if dataset_len else nothing
        if segment.backing == "none":  # then nothing is shared, and nothing can be cached
            self._aux.numpy().fill(OOB)

    def hit(self, idx: int, copy: bool) -> Any:
        """Return sample ``idx`` if it is set; else MISSING, also if ``idx`` is not an index. Other methods try this first."""
        try:
            if not 0 <= idx < self._dataset_len or self._states[idx] != SET:
                return MISSING
        except (TypeError, ValueError, RuntimeError):  # not an integer; _index says so
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

    def _miss(self, idx: int, since: float) -> None:
        """Count a miss, and remember it if the sample can be set."""
        self._segment.count(MISSES)
        if self._states[idx] != OOB:
            self._note_miss(idx, since)

    def _miss_many(self, indices: _Indices) -> None:
        now = time.perf_counter()
        for idx in indices.tolist():
            self._miss(idx, now)

    @property
    def dataset_len(self) -> int:
        """The number of samples of the dataset."""
        return self._dataset_len

    @property
    def aux_array(self) -> Tensor:
        """The live state of each sample, uint8 of shape (dataset_len,): 0 empty, 1 set, 2 outside the cache."""
        return self._aux

    def _index(self, idx: Any, call: str) -> int:
        return check_index(idx, self._dataset_len, call)

    def _outside(self, idx: int, call: str) -> NoReturn:
        raise SampleIndexError(
            f"{call}({idx}): the sample lies outside the cache, which has room for {self._room}; the dataset has "
            f"{self._dataset_len} samples. Raise size_limit_gib, or pass allow_oob_idx=True."
        )
