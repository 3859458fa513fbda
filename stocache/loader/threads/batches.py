"""The batches that worker threads are making; see NOTE [ Batches made by threads ]."""

import threading
import weakref
from queue import SimpleQueue
from typing import Any

from torch._utils import ExceptionWrapper

from stocache.datasets.batches import LazyBatch
from stocache.loader.threads.crew import Stopped, ThreadWorkers
from stocache.loader.threads.info import Generators
from stocache.loader.workers.requests import BatchRequest

NOT_MADE = object()
"""Stands for a sample of a batch that is still to be made."""


class Batch:
    """A batch that threads are making.

    Attributes:
        stream: the number of its random numbers' stream; or of its worker, if the dataset is bound.
        before: the batch before it in its stream, until that is done.
        data: the batch, when it is done.
        error: the error to raise instead.
        done: whether ``data`` or ``error`` is set.
        group: the group with which the batch is gathered, if it is wholly cached.
        maker: the number of the thread that finished it; None for the loop itself.
        ready: whether its samples are made, in ``data``, and the loop is to collate them.
        ended: whether the iterable dataset of the worker had no more samples.
    """

    def __init__(
        self, crew: ThreadWorkers, request: BatchRequest, stream: int, before: "Batch | None", finished: "SimpleQueue[None]"
    ) -> None:
        self._crew, self.request, self.stream, self.before, self._finished = crew, request, stream, before, finished
        self.data: Any = None
        self.error: ExceptionWrapper | None = None
        self.done = self.ended = self.ready = False
        self.group: Group | None = None
        self.maker: int | None = None
        self.index: Any = None
        self.samples: list[Any] = []
        self.lazy: LazyBatch | None = None
        self.errors: list[tuple[int, ExceptionWrapper]] = []
        self.runs_left = 0
        self.lock = threading.Lock()

    def finish(self, data: object = None, error: ExceptionWrapper | None = None) -> None:
        """Set the result for the loop."""
        self.data, self.error, self.done = data, error, True
        self.before = self.lazy = None
        self.samples = []
        self.wake()

    def wake(self) -> None:
        """Wake the loop, if it waits."""
        if self._crew.waiting:
            self._finished.put(None)

    def is_next(self) -> bool:
        """Whether all batches before it in its stream are done."""
        before = self.before
        return before is None or before.done

    def waits_for_loop(self) -> bool:
        """Whether the loop is to collate the batch before it."""
        before = self.before
        return before is not None and (before.ready or before.waits_for_loop())


class Group:
    """Batches that are wholly cached, and gathered together, by the thread that has taken ``claim``.

    It does not keep the batches alive, which refer to it. An iterator that dies frees them, and those before them, at once.

    Attributes:
        lazy: all their samples.
    """

    def __init__(self, batches: list[Batch], lazy: LazyBatch) -> None:
        self.batches, self.lazy, self.claim = [weakref.ref(batch) for batch in batches], lazy, threading.Lock()
        for batch in batches:
            batch.group = self


class Turn:
    """Gives a sample the generators of its stream, in its turn; see NOTE [ Random numbers in threads ]."""

    def __init__(self, crew: ThreadWorkers, batch: Batch) -> None:
        self._crew, self._batch, self.position = crew, batch, 0

    def generators(self) -> Generators:
        """Return the generators, when the turn of the sample has come."""
        self._crew.await_turn(self._is_mine, self._batch.waits_for_loop)
        return self._crew.streams[self._batch.stream]

    def _is_mine(self) -> bool:
        batch = self._batch
        if any(position < self.position for position, _ in batch.errors):  # a worker process would not make the sample
            raise Stopped
        return batch.is_next() and all(made is not NOT_MADE for made in batch.samples[: self.position])
