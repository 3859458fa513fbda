"""torch's iterators and queues, with less time for each batch.

NOTE [ The time of a small batch ]
    Half of the time that a small batch of text takes in the loop is not for the batch. torch tells the profiler about each,
    even if none is on. Python's queues make a selector for each wait, in the loop and in the workers. Without these two our
    loader is ahead of torch's, whatever its own bookkeeping adds.
"""

import copy
import multiprocessing
import multiprocessing.queues
import select
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import dataloader as torch_dataloader

BaseIterator: Any = torch_dataloader._BaseDataLoaderIter
DatasetKind: Any = torch_dataloader._DatasetKind


class QuickIterator(BaseIterator):  # type: ignore[misc]
    """An iterator of torch that tells the profiler about its batches only while one is on."""

    def __next__(self) -> Any:
        iterable = self._dataset_kind == DatasetKind.Iterable  # torch compares its length
        if iterable or self._sampler_iter is None or torch.autograd.profiler._is_profiler_enabled:
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data


class MainIterator(QuickIterator, torch_dataloader._SingleProcessDataLoaderIter):
    """An iterator that loads batches itself."""


class ProcessIterator(QuickIterator, torch_dataloader._MultiProcessingDataLoaderIter):
    """An iterator whose workers are processes."""


class QuickQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """A queue between processes whose ``get`` waits by one system call."""

    def _reset(self, *args: Any, **kwargs: Any) -> None:
        super()._reset(*args, **kwargs)  # type: ignore[misc]
        self._poll = partial(_poll, self._reader)  # type: ignore[attr-defined]


def _poll(reader: Any, timeout: float = 0.0) -> bool:
    """Whether something can be read within ``timeout`` seconds."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout * 1000)))


def with_quick_queues(context: Any) -> BaseContext:
    """Return a context of multiprocessing whose queues are quick; the default context for None."""
    concrete: BaseContext = (context or multiprocessing).get_context()
    if type(concrete).Queue is not BaseContext.Queue:  # the user's own
        return concrete
    quick = copy.copy(concrete)
    quick.Queue = partial(QuickQueue, ctx=concrete)  # type: ignore[method-assign]
    return quick
