"""torch's iterators and queues, with less time for each batch.

NOTE [ The time of a small batch ]
    Half of the time of a small batch of text is overhead. torch reports each batch to the profiler, even if none is on.
    Python's queues make a selector for each wait, and have a thread send each message, in the loop and in the workers. Without
    these our loader is faster than torch's, in spite of its own bookkeeping.

    A message is sent by the thread that has it, if it can be written at once: POSIX says that a pipe which is ready for writing
    takes PIPE_BUF bytes. After the first message that has to wait, a queue is as slow as Python's. So the order stays.

NOTE [ The next epoch ]
    With ``prefetch_epochs=True``, persistent workers that have no more batches to make begin the batches of the next epoch.
    `Order` foresees their indices with copies of the samplers, and sets the generators back. When the epoch begins, it is asked
    for its first requests as ever. If they are the same, the batches that were made ahead are taken. Otherwise they are
    dropped, and each worker sets its generators back to where they were before it made the first of them. After three epochs in
    a row that began otherwise, none is foreseen any more: the program draws from the generator of its sampler between two
    epochs, say.
"""

import copy
import itertools
import multiprocessing
import multiprocessing.queues
import select
import weakref
from collections import deque
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader as torch_dataloader

from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.loader.workers.requests import ahead
from stocache.samples.indices import as_array
from stocache.system.platform import here

BaseIterator: Any = torch_dataloader._BaseDataLoaderIter
DatasetKind: Any = torch_dataloader._DatasetKind


def next_batch(iterator: Any) -> Any:
    """Return the next batch as ``__next__`` of torch's iterators does, but report it to the profiler only while one is on."""
    iterable = iterator._dataset_kind == DatasetKind.Iterable  # torch compares its length
    if iterable or iterator._sampler_iter is None or torch.autograd.profiler._is_profiler_enabled:
        return BaseIterator.__next__(iterator)
    data = iterator._next_data()
    iterator._num_yielded += 1
    return data


class MainIterator(torch_dataloader._SingleProcessDataLoaderIter):
    """An iterator that loads batches itself."""

    __next__ = next_batch

    def is_ready(self) -> bool:
        """Return whether the next batch can be had without waiting, and without code of the dataset."""
        return False


class AheadIterator(MainIterator):
    """A `MainIterator` over a dataset that returns a `LazyBatch`. It asks for some of them before the loop does.

    A GPU then learns the next batches during a training step, and plans several of them together.
    """

    _dataset: Any
    _collate_fn: Any

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._at_once: int = self._index_sampler.at_once
        self._waiting: deque[LazyBatch | Exception] = deque()

    def _next_data(self) -> Any:
        if not self._waiting:
            self._ask()
        batch = self._waiting.popleft()
        if isinstance(batch, Exception):
            raise batch
        return self._collate_fn(batch)

    def _ask(self) -> None:
        """Ask for some batches. An error of the sampler comes after the batches before it."""
        lists: list[Any] = []
        ended: list[Exception] = []
        try:
            while len(lists) < self._at_once:
                lists.append(next(self._sampler_iter))
        except Exception as error:
            if not lists:
                raise
            ended = [] if isinstance(error, StopIteration) else [error]
        self._waiting += [*self._batches(lists), *ended]

    def _batches(self, lists: list[Any]) -> list[LazyBatch | Exception]:
        """Return the batches of several lists of indices, or errors in their place."""
        arrays = list(map(as_array, lists)) if len(lists) > 1 else []
        if arrays and all(isinstance(each, np.ndarray) for each in arrays):
            try:
                together: LazyBatch = self._dataset.__getitems__(np.concatenate(arrays))
                return [*together.split(list(map(len, arrays)))]
            except Exception as error:
                return [error, *map(self._batch, lists[1:])]
        return list(map(self._batch, lists))

    def _batch(self, indices: Any) -> LazyBatch | Exception:
        try:
            return self._dataset.__getitems__(indices)  # type: ignore[no-any-return]
        except Exception as error:
            return error

    def is_ready(self) -> bool:
        """Return whether all samples of the next batch are cached."""
        try:
            if not self._waiting:
                self._ask()
            batch = self._waiting[0]
            return isinstance(batch, LazyBatch) and batch.cached
        except StopIteration:
            return False
        except Exception as error:  # raised when the batch is requested
            if not self._waiting:
                self._waiting.append(error)
            return False


class ProcessIterator(torch_dataloader._MultiProcessingDataLoaderIter):
    """An iterator whose workers are processes.

    Attributes:
        last_worker: the number of the worker that made the last batch; None if that is not known.
    """

    __next__ = next_batch
    last_worker: int | None = None

    def __init__(self, loader: Any) -> None:
        self._foresees: bool = loader._stocache.foresees
        self._ahead: list[Any] = []  # requests of the next epoch
        self._ends_at: int | None = None  # the number of the first of them, as torch counts
        self._guesses = self._dropped = 0  # how many epochs were foreseen, and which of them was dropped last
        self._wrong = 0  # how many of the last ones were dropped
        super().__init__(loader)
        # The garbage collector may find the queues with the iterator, and close them before the iterator has ended its
        # workers. Python's queues have threads that keep them.
        key = next(_numbers)
        _kept[key] = [self._worker_result_queue, *self._index_queues]
        weakref.finalize(self, _kept.pop, key, None).atexit = False

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of its loader makes an iterator of its own

    def _next_index(self) -> Any:
        # see NOTE [ The next epoch ]
        try:
            index = super()._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            if not self._foresees or self._wrong >= _WRONG or self._ends_at is not None:
                raise
            self._ahead = self._index_sampler.foresee(self._prefetch_factor * self._num_workers)
            self._guesses, self._ends_at, self._sampler_iter = self._guesses + 1, self._send_idx, iter(self._ahead)
            self._worker_queue_idx_cycle = itertools.cycle(range(self._num_workers))
            index = super()._next_index()  # type: ignore[no-untyped-call]
        epoch = 0 if self._ends_at is None else self._guesses
        return ahead(index, epoch, self._dropped) if epoch or self._dropped else index

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._takes_ahead():
            for _ in range(self._prefetch_factor * self._num_workers - (self._send_idx - self._rcvd_idx)):
                self._try_put_index()
        else:
            super()._reset(loader, first_iter)

    def _takes_ahead(self) -> bool:
        """Begin the next epoch with the batches that were made ahead, if it begins with them."""
        if self._ends_at is None:
            return False
        order, (made, self._ahead) = self._index_sampler, (self._ahead, [])
        begun = iter(order)
        first = list(itertools.islice(begun, len(made)))
        if self._rcvd_idx != self._ends_at or [each.__reduce__() for each in first] != [each.__reduce__() for each in made]:
            order.begun = itertools.chain(first, begun)
            self._wrong, self._dropped, self._ends_at = self._wrong + 1, self._guesses, None
            return False
        self._sampler_iter = itertools.chain(first[self._send_idx - self._ends_at :], begun)
        self._num_yielded, self._wrong, self._ends_at = 0, 0, None
        return True

    def _next_data(self) -> Any:
        if self._rcvd_idx == self._ends_at:
            raise StopIteration
        return super()._next_data()  # type: ignore[no-untyped-call]

    def is_ready(self) -> bool:
        """Return whether the next batch, or another one, has arrived."""
        task = self._task_info.get(self._rcvd_idx, ())
        return len(task) == 2 or (len(task) == 1 and not self._data_queue.empty())

    def _try_put_index(self) -> None:
        if self._send_idx == 0:  # the first request of an epoch
            for _ in range(self._index_sampler.progress.turn):
                next(self._worker_queue_idx_cycle)
        super()._try_put_index()

    def _process_data(self, data: object, *worker: int) -> Any:
        self.last_worker = worker[0] if worker else None  # torch passes it from 2.6 on
        return super()._process_data(data, *worker)  # type: ignore[no-untyped-call]


_kept: dict[int, list[Any]] = {}
_numbers = itertools.count()
_WRONG = 3  # epochs in a row that began otherwise than foreseen, after which none is foreseen any more


_QueueOfPython: Any = multiprocessing.queues.Queue
_MOST = here.PIPE_BYTES - 4  # bytes of a message that is sent at once; its length comes first
_LOCK_S = 0.01  # to wait for another process that sends


class QuickQueue(_QueueOfPython):  # type: ignore[misc]
    """A queue between processes, for small messages; see NOTE [ The time of a small batch ]."""

    def _reset(self, *args: Any, **kwargs: Any) -> None:
        super()._reset(*args, **kwargs)
        self._poll = partial(_is_ready, self._reader, select.POLLIN)

    def put(self, obj: object, block: bool = True, timeout: float | None = None) -> None:
        """Send an object. Raises the error of pickling it, if no thread sends for this queue."""
        if self._thread is None and not self._closed:
            message = ForkingPickler.dumps(obj)
            if len(message) <= _MOST and self._send_now(message):
                return
        super().put(obj, block, timeout)

    def _send_now(self, message: object) -> bool:
        """Send a message if that need not wait; return whether it was sent."""
        if not self._wlock.acquire(True, _LOCK_S):
            return False
        try:
            if not _is_ready(self._writer, select.POLLOUT) or not self._sem.acquire(False):
                return False
            self._send_bytes(message)
            return True
        finally:
            self._wlock.release()


def _is_ready(pipe: Any, event: int, timeout: float = 0.0) -> bool:
    """Whether a pipe is ready for an event within ``timeout`` seconds."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, timeout * 1000)))


def with_quick_queues(context: Any) -> BaseContext:
    """Return a context of multiprocessing whose queues are quick; the default context for None."""
    concrete: BaseContext = (context or multiprocessing).get_context()
    if type(concrete).Queue is not BaseContext.Queue or not here.PIPE_BYTES:  # the user's own
        return concrete
    quick = copy.copy(concrete)
    quick.Queue = partial(QuickQueue, ctx=concrete)  # type: ignore[method-assign]
    return quick
