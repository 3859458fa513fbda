"""Go on when samples of a dataset cannot be loaded: `Failures`, which all workers share, and the dataset of a loader.

NOTE [ Samples that fail ]
    The guard stands around the whole making of a sample, also around a cache: what is cached is loaded as always, and a
    substitute is the sample of its own index. So nothing is cached under the index of a sample that failed. A batch is made in
    one step as without the guard. If that fails, its samples are made one by one, and only the samples that fail are loaded
    again or replaced. The random generators are set back before each attempt: a sample that loads at the second attempt is
    equal to one that loaded at the first, and the following samples draw the same numbers.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import get_worker_info

from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.datasets.batches.spec import Empty
from stocache.datasets.batches.views import DatasetView
from stocache.errors import DatasetError, SampleError
from stocache.samples.indices import after_each, length_of
from stocache.shm.segment import Segment
from stocache.shm.tables.arrays import new_segment
from stocache.system.generators import Kept, in_worker_thread
from stocache.system.objects import attribute_of
from stocache.system.on_error import TooManyFailed, may_go_on, parse_on_error

logger = logging.getLogger("stocache")

_T = TypeVar("_T")

_RETRIED = 0  # the counter of the segment
_MOST_LISTED = 1000
_MOST_SUBSTITUTES = 8  # of one sample, each of which fails


class Failures:
    """Which samples have failed, and how often one was loaded again. Shared by all processes that have this object.

    Without shared memory each process has a table of its own, and counts no attempts.

    Args:
        length: number of samples.
    """

    thread_safe = True

    def __init__(self, length: int) -> None:
        self._length, self._segment = length, None
        with contextlib.suppress(SampleError):
            self._segment = new_segment(length)
        self._open()

    def _open(self) -> None:
        memory = bytearray(self._length) if self._segment is None else self._segment.view(0, self._length)
        self._failed = np.frombuffer(memory, np.uint8)

    def __getstate__(self) -> tuple[int, Segment | None]:
        return self._length, self._segment

    def __setstate__(self, state: tuple[int, Segment | None]) -> None:
        self._length, self._segment = state
        self._open()

    def note_retry(self) -> None:
        """Count a sample, or a batch, that is loaded again."""
        if self._segment is not None:
            self._segment.count(_RETRIED)

    def note_failed(self, index: int) -> int:
        """Note that a sample was replaced. Return how many samples were, so far."""
        self._failed[index] = 1
        return int(np.count_nonzero(self._failed))

    def counts(self) -> tuple[int, tuple[int, ...]]:
        """Return how often samples were loaded again, and the samples that were replaced, in order, at most 1000."""
        retried = 0 if self._segment is None else self._segment.totals()[_RETRIED]
        return retried, tuple(np.flatnonzero(self._failed)[:_MOST_LISTED].tolist())

    def __str__(self) -> str:
        """Say how many samples were replaced, and which are the first three; empty if none was."""
        failed = list(map(str, np.flatnonzero(self._failed)))
        first = ", ".join(failed[:3]) + ", ..." * (len(failed) > 3)
        said = f"{len(failed)} of {self._length} samples could not be loaded, and others took their places: {first}"
        return said if failed else ""


class Guard:
    """Makes samples of a dataset, and goes on when one fails; see NOTE [ Samples that fail ].

    Args:
        on_error: as a user has given it.
        dataset: has the samples.

    Attributes:
        epoch: chooses the substitutes of this epoch.
        failures: those so far, of all processes.

    Raises:
        LimitError: ``on_error`` is not a `Retry`, a `Skip`, or one of each.
        DatasetError: there are substitutes, and the dataset has no length.
    """

    def __init__(self, on_error: Any, dataset: Any) -> None:
        self.retry, self.skip = parse_on_error(on_error)
        length, self.epoch = length_of(dataset), 0
        if length is None:
            raise DatasetError(
                f"on_error needs a map-style dataset: {type(dataset).__name__} has no length. Catch the errors in its iterator."
            )
        self._length, self.failures, self._warned = length, Failures(length), False

    def one(self, get: Callable[[int], _T], index: Any) -> _T:
        """Return ``get(index)``, or of a substitute."""
        kept = _kept_here()
        try:
            return self._try(partial(get, index), kept)
        except Exception as error:
            return self._replace(get, index, error, kept)

    def each(
        self, get: Callable[[Any], Any], indices: Sequence[Any], before_each: Callable[[int], None] | None = None
    ) -> list[Any]:
        """Return the samples of a batch, each made by itself, after a call of ``before_each`` with its position."""
        return [self.one(get, index) for index in after_each(before_each, indices)]

    def many(
        self,
        get_many: Callable[[Any], Any],
        get: Callable[[Any], Any],
        indices: Sequence[Any],
        before_each: Callable[[int], None] | None = None,
    ) -> Any:
        """Return ``get_many(indices)``; after an error, the samples one by one."""
        kept = _kept_here()
        try:
            batch = get_many(indices)
            if isinstance(batch, LazyBatch):
                return GuardedBatch(batch, self, get, indices)
            return list(batch) if isinstance(batch, Iterator) else batch
        except Exception as error:
            if not self.helps(error):
                raise
        kept.restore()
        self.failures.note_retry()
        return self.each(get, indices, before_each)

    def helps(self, error: Exception) -> bool:
        """Return whether samples that failed with an error are loaded again, or replaced."""
        return may_go_on(error) and (self.skip is not None or (self.retry is not None and self.retry.covers(error)))

    def _try(self, load: Callable[[], _T], kept: Any) -> _T:
        if self.retry is None:
            return load()
        return self.retry.call(load, partial(self._begin_again, kept))

    def _begin_again(self, kept: Any) -> None:
        kept.restore()
        self.failures.note_retry()

    def _replace(self, get: Callable[[int], _T], index: Any, error: Exception, kept: Any) -> _T:
        if self.skip is None or not may_go_on(error):
            raise error
        at = operator.index(index) % max(1, self._length)
        self._note(at, error)
        for other in islice(self.skip.substitutes(self.epoch, at, self._length), _MOST_SUBSTITUTES):
            kept.restore()
            try:
                return self._try(partial(get, other), kept)
            except Exception as again:
                if not may_go_on(again):
                    raise
                self._note(other, again)
        raise TooManyFailed(
            f"sample {at} cannot be loaded, and neither can {_MOST_SUBSTITUTES} samples that were tried in its place: "
            f"{self.failures}"
        ) from error

    def _note(self, index: int, error: Exception) -> None:
        assert self.skip is not None
        most = self.skip.most(self._length)
        if self.failures.note_failed(index) > most:
            raise TooManyFailed(
                f"{self.failures}. Skip(at_most={self.skip.at_most}) allows {most}. Mend these samples, or allow more."
            ) from error

    def warn(self) -> None:
        """Warn of the samples that were replaced: once, and not in a worker, whose parent does."""
        if not self._warned and get_worker_info() is None and (text := str(self.failures)):
            self._warned = True
            logger.warning("%s. stats() lists them; dataset[index] raises the error.", text)


class GuardedBatch(LazyBatch):
    """A `LazyBatch` whose samples are read one by one if one of them fails.

    Args:
        batch: the batch.
        guard: goes on when a sample fails.
        get: returns one sample.
        indices: of the samples.
    """

    def __init__(self, batch: LazyBatch, guard: Guard, get: Callable[[Any], Any], indices: Sequence[Any]) -> None:
        vars(self).update(vars(batch))
        self._guard, self._get, self._indices = guard, get, indices

    def _try(self, work: Callable[[], _T]) -> _T | None:
        """Return ``work()``; None if a sample failed: then the samples have been read one by one."""
        kept = _kept_here()
        try:
            return work()
        except Exception as error:
            if not self._guard.helps(error):
                raise
        kept.restore()
        self.release_claims()  # else the samples would be waited for below
        self._guard.failures.note_retry()
        self._samples = self._guard.each(self._get, self._indices, self.before_each)
        return None

    def gather(self, empty: Empty, joined: bool = True) -> Any:
        """Return what `LazyBatch.gather` returns; None if a sample failed, so that the batch is read."""
        return None if self._samples is not None else self._try(partial(super().gather, empty, joined))

    def read(self) -> list[Any]:
        """Return the samples."""
        if self._samples is None:
            self._try(super().read)  # which sets them, too
        return self._samples or []

    def load_all(self) -> dict[int, Any]:
        """Return what `LazyBatch.load_all` returns; nothing if a sample failed: it will fail again in `gather`."""
        try:
            return super().load_all()
        except Exception as error:
            if not self._guard.helps(error):
                raise
            self._guard.failures.note_retry()
            return {}

    def split(self, sizes: list[int]) -> list[LazyBatch]:
        """Return what `LazyBatch.split` returns, as batches that are read one by one if a sample fails."""
        ends = accumulate(sizes)
        parts = [self._indices[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [
            GuardedBatch(batch, self._guard, self._get, part) for batch, part in zip(super().split(sizes), parts, strict=True)
        ]


class GuardedDataset(DatasetView):
    """A dataset of a loader that goes on when samples fail. One that makes whole batches becomes a `GuardedBatches`."""

    __slots__ = ("guard",)

    def __init__(self, dataset: Any, guard: Guard) -> None:
        self.dataset, self.guard = dataset, guard

    def __reduce__(self) -> Any:
        return type(self), (self.dataset, self.guard)

    def __getitem__(self, index: Any) -> Any:
        return self.guard.one(self.dataset.__getitem__, index)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, and of the substitutes."""
        self.guard.epoch = epoch
        super().set_epoch(epoch)


class GuardedBatches(GuardedDataset):
    """A `GuardedDataset` that makes whole batches."""

    __slots__ = ()

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the samples of a batch, or a `GuardedBatch`."""
        return self.guard.many(self.dataset.__getitems__, self.dataset.__getitem__, indices)


def guarded(dataset: Any, guard: Guard) -> GuardedDataset:
    """Return a dataset for a loader that goes on when samples of ``dataset`` fail."""
    return (GuardedBatches if attribute_of(dataset, "__getitems__") else GuardedDataset)(dataset, guard)


def _kept_here() -> Any:
    """Return the states of the generators from which samples draw: the global ones, or the generators of a worker thread."""
    return get_worker_info().rng.own.kept_now() if in_worker_thread() else Kept()  # type: ignore[union-attr]
