"""Publish samples to all processes: a sample is set after its bytes are there, once, and never changes.

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
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from stocache.cache.states import SampleStates
from stocache.cache.stats import EMPTY, FILLS, MISSING, OOB, RACES, REFUSED, REJECTED, SET
from stocache.errors import SampleError, SlotError
from stocache.samples.record_encoder import EncodedRecord
from stocache.shm.extents import REJECTED_WARNING
from stocache.shm.locks import fence
from stocache.shm.segment import Segment

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)  # the samples
_Indices = NDArray[np.int64]


def count_rejected(segment: Segment) -> bool:
    """Count a sample that a cache cannot store. Return whether it is the first one, in any process: then warn."""
    with segment.guard:
        segment.counters[REJECTED] += 1
        return segment.extents.first_to_warn(REJECTED_WARNING)


class PublishingCache(SampleStates, Generic[_T]):
    """A cache whose samples the caller sets."""

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
        idx = self._index(idx, "set_slot")
        if self._states[idx] == OOB:
            if not allow_oob_idx:
                self._outside(idx, "set_slot")
            return
        self._set(idx, value, allow_overwrite)

    def _set(self, idx: int, value: object, overwrite: bool = False) -> None:
        """Encode and publish a sample, and count the outcome. Raises SampleError and SlotError."""
        encoded = self._store.encode(value, f"set_slot({idx})")
        self._publish([idx], self._with_costs([encoded], [self._cost_of(idx, overwrite)]), overwrite)

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
            self._publish(indices.tolist(), self._with_costs(encode(), costs_s), allow_overwrite)

    def _with_costs(self, encoded: list[Any], costs_s: Sequence[float | None]) -> list[Any]:
        """Return encoded samples; with the seconds that each took to load, if they are records that are admitted by cost."""
        if not self.may_admit_later:
            return encoded
        # At half the cost of _replace
        return [each and EncodedRecord._make((*each[:-1], cost_s)) for each, cost_s in zip(encoded, costs_s, strict=True)]

    def _publish(
        self, indices: list[int], encoded: Sequence[object], overwrite: bool = False, count_races: bool = True
    ) -> None:
        """Store samples, each once in ``indices``, and count the outcomes. See NOTE [ Publishing a slot ]."""
        segment, states, taken = self._segment, self._states, set[int]()
        fillable, count = (EMPTY, SET) if overwrite else (EMPTY,), len(indices)
        try:
            self._claims.to_write(indices, taken)
            free = [idx for idx in indices if idx in taken and states[idx] in fillable]
            if len(free) < count:
                left = set(free)
                encoded = [each for idx, each in zip(indices, encoded, strict=True) if idx in left]
                indices = free
            counters = self._write(indices, encoded)
            filled = indices
            if counters.count(FILLS) < len(indices):
                filled = [idx for idx, counter in zip(indices, counters, strict=True) if counter == FILLS]
            with segment.guard:
                fence()
                for idx in filled:
                    states[idx] = SET
                fence()
                segment.counters[FILLS] += len(filled)
                if len(filled) < count:
                    segment.counters[REFUSED] += counters.count(REFUSED)
                    segment.counters[RACES] += (count - len(free)) * count_races
        finally:
            self._claims.end_writing(taken)

    def _write(self, indices: list[int], encoded: Sequence[object]) -> list[int | None]:
        """Write samples as `SampleStore.write_many` does. Reserved memory does not run out; if it does, the job goes on."""
        try:
            return self._store.write_many(indices, encoded) if indices else []
        except OSError as error:
            logger.warning("sample %d stays uncached: %s", indices[0], str(error))
            return [REFUSED] * len(indices)

    def set_if_empty(self, indices: Iterable[int], values: Iterable[object]) -> None:
        """Cache neighbours of a miss. All or nothing: if they do not all fit, none is cached, now or later."""
        encoded: dict[int, Any] = {}
        for idx, value in zip(indices, values, strict=True):
            if self._states[idx] == EMPTY:
                with contextlib.suppress(SampleError):  # reported when this sample is requested
                    encoded[idx] = self._store.encode(value, f"sample {idx}")
        self._publish_all(list(encoded), list(encoded.values()))

    def set_encoded_if_empty(self, encoded: Mapping[int, object]) -> None:
        """Cache samples as `set_if_empty` does, given their encoded form from the store's ``encode``, by index."""
        empty = [idx for idx in encoded if self._states[idx] == EMPTY]
        self._publish_all(empty, [encoded[idx] for idx in empty])

    def _publish_all(self, indices: list[int], encoded: list[Any]) -> None:
        """Cache encoded samples that are empty. If they do not all fit, exclude them all."""
        if self._store.has_room(encoded):
            self._publish(indices, encoded, count_races=False)
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
        encoded = self._with_costs(encoded, costs_s)
        if len(rows) < len(indices):
            indices, encoded = [indices[row] for row in rows], [encoded[row] for row in rows]
        if rows:
            self._publish(indices, encoded)

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
        self.exclude([idx])
        if count_rejected(self._segment):
            logger.warning(
                "sample %d does not fit and stays uncached. So will others like it, without a warning: %s", idx, problem
            )
