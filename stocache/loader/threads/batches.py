"""The batches that worker threads are making, and the tasks of which they consist; see NOTE [ Batches made by threads ]."""

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.loader.threads.crew import Crew, Stopped, ThreadWorker
from stocache.loader.threads.info import Generators
from stocache.loader.workers.requests import EpochIndices, ThreadRequest, count_samples


class Batch:
    """A batch that threads are making. If it ``is_shared``, threads share its samples.

    Attributes:
        request: the request of the sampler.
        number: of the batch in the epoch.
        worker: the worker whose process would make it.
        index: of its samples.
        count: the number of its samples.
        samples: the samples that are made.
        made: which of its parts are made.
        errors: of parts, by their numbers.
        lazy: the samples, if they come from a cache.
        group: the group with which the batch is gathered, if it is wholly cached.
        data: the batch, when it is done; its samples, when it is ready.
        error: the error to raise instead.
        ready: whether its samples are made, and the loop is to collate them.
        done: whether ``data`` or ``error`` is set.
        maker: the number of the thread that finished it; None for the loop itself.
        ended: whether the iterable dataset of the worker had no more samples.
    """

    def __init__(self, crew: Crew, request: ThreadRequest, worker: ThreadWorker, is_shared: bool) -> None:
        self.crew, self.request, self.worker = crew, request, worker
        self.number, self.index = request.number, request.index
        indices = self.index.indices if isinstance(self.index, EpochIndices) else self.index
        self.count = len(indices) if is_shared else count_samples(indices)
        self.samples: Any = [None] * self.count
        self.made: list[bool] = []
        self.errors: dict[int, ExceptionWrapper] = {}
        self._left: deque[bool] = deque()
        self.lazy: LazyBatch | None = None
        self.group: Group | None = None
        self.data: Any = None
        self.error: ExceptionWrapper | None = None
        self.done = self.ended = self.ready = False
        self.maker: int | None = None
        worker.undone.add(self.number)

    def divide(self, parts: Sequence[Sequence[int] | None]) -> "list[Part]":
        """Divide the samples into parts, each of some positions; None for all."""
        self.made, self._left = [False] * len(parts), deque([True] + [False] * (len(parts) - 1))
        return [Part(self, number, rows) for number, rows in enumerate(parts)]

    def note_made(self, number: int) -> bool:
        """Note that a part is made. Return whether it was the last one."""
        self.made[number] = True
        return self._left.pop()  # one thread gets True

    def finish(self, data: object = None, error: ExceptionWrapper | None = None) -> None:
        """Set the result for the loop."""
        self.data, self.error, self.done = data, error, True
        self.worker.undone.discard(self.number)
        self.samples = self.lazy = None
        self.crew.tell_loop()
        self.crew.tell_progress()

    def is_next(self) -> bool:
        """Whether all batches before it in its stream are done."""
        return not any(number < self.number for number in list(self.worker.undone))


class Part:
    """The task of a thread: some samples of a batch, which it makes one after the other.

    Attributes:
        number: of the part in the batch.
    """

    def __init__(self, batch: Batch, number: int, rows: Sequence[int] | None) -> None:
        self.batch, self.number, self._rows = batch, number, rows

    def make(self, worker: ThreadWorker) -> None:
        """Make the samples with the dataset of a worker."""
        batch, rows = self.batch, self._rows
        if rows is None:
            batch.samples = worker.fetcher.fetch(batch.index)
        elif rows and batch.lazy is not None:
            batch.lazy.take_loaded(worker.fetcher.fetch(_part_of(batch.index, rows)).load_all())
        elif rows:
            for row, sample in zip(rows, worker.fetcher.fetch(_part_of(batch.index, rows)), strict=True):
                batch.samples[row] = sample

    def __len__(self) -> int:
        return self.batch.count if self._rows is None else len(self._rows)

    def generators(self) -> Generators:
        """Return the generators of the stream, when it is the turn of these samples."""
        self.batch.crew.await_turn(self._is_next)
        return self.batch.worker.stream

    def _is_next(self) -> bool:
        if any(number < self.number for number in list(self.batch.errors)):  # a worker process would not make these samples
            raise Stopped
        return self.batch.is_next() and all(self.batch.made[: self.number])


class Group:
    """Batches that are wholly cached, and gathered together.

    It does not keep the batches alive, which refer to it. An iterator that dies frees them at once.

    Attributes:
        size: the number of batches.
        lazy: all their samples.
    """

    def __init__(self, batches: list[Batch], lazy: LazyBatch) -> None:
        self.size, self.lazy, self._left = len(batches), lazy, deque([[weakref.ref(batch) for batch in batches]])
        for batch in batches:
            batch.group = self

    def take(self) -> list[Batch]:
        """Return the batches, to gather them; none if another thread has taken them, or the iterator has died."""
        try:
            batches = [reference() for reference in self._left.pop()]
        except IndexError:
            return []
        return [batch for batch in batches if batch is not None]


def _part_of(index: Any, rows: Sequence[int]) -> Any:
    """Return the index of several samples of a batch."""
    if isinstance(index, EpochIndices):
        return EpochIndices(index.epoch, _part_of(index.indices, rows))
    return index[list(rows)] if isinstance(index, np.ndarray) else [index[row] for row in rows]
