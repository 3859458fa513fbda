"""The requests that the loader sends to its workers, one for each batch of indices."""

import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from stocache.datasets.batches.views import behind_views
from stocache.observe.recording.record import record_here, row_here
from stocache.samples.indices import as_array
from stocache.shm.ring.ring import RemoteCall, Ring, ring_of
from stocache.system.generators import Kept
from stocache.system.loading.code import own_generators
from stocache.system.walking import set_epoch


@dataclass
class RequestContext:
    """The values that each request carries besides its indices.

    Attributes:
        ring: of worker processes; None if the workers are threads.
        iteration: the number of the iteration in the ring.
        arrays: whether the workers get lists of indices as arrays, which a `CachedDataset` accepts.
        epoch: the epoch that the user has set, or None.
    """

    ring: Ring | None
    iteration: int
    arrays: bool = False
    epoch: int | None = None


class EpochIndices(NamedTuple):
    """A batch of indices, or one index, for a dataset that seeds samples."""

    epoch: int
    indices: Any


class _Answering(threading.local):
    """The request that a thread answers.

    Attributes:
        number: of the request.
        indices: that it works on, or `EpochIndices`.
    """

    number = 0
    indices: Any = None


answering = _Answering()
"""The request that this thread answers."""


class ThreadRequest(NamedTuple):
    """A batch of indices for a worker thread.

    Attributes:
        number: of the batch in the epoch.
        epoch: the epoch that the user has set, or None.
        index: the indices, or `EpochIndices`.
    """

    number: int
    epoch: int | None
    index: Any

    def note(self) -> None:
        """Note that this thread works on the request."""
        answering.number, answering.indices = self.number, self.index


def request(context: RequestContext, number: int, index: Any, sample_epoch: int | None) -> "RemoteCall | ThreadRequest":
    """Return the request for a batch. In a worker process it unpickles to the indices themselves, or to `EpochIndices`."""
    if context.ring is not None:
        packed = _pack_indices(index) if context.arrays else (index,)
        return RemoteCall(_take_request, context.ring.key, context.iteration, number, context.epoch, sample_epoch, *packed)
    index = as_array(index) if context.arrays else index
    return ThreadRequest(number, context.epoch, index if sample_epoch is None else EpochIndices(sample_epoch, index))


def count_samples(indices: Any) -> int:
    """Return how many samples are requested: by a batch of indices, or by one index."""
    return len(indices) if isinstance(indices, list | tuple | np.ndarray) else 1


_epoch: int | None = None  # the epoch that was set in this worker process


def _take_request(
    key: str, iteration: int, number: int, epoch: int | None, sample_epoch: int | None, index: Any, dtype: str = ""
) -> Any:
    global _epoch
    answering.number, began_ns = number, time.perf_counter_ns()
    ring = ring_of(key)
    lane = ring.lane(iteration)
    if lane is not None:
        lane.record_request(number)
    row = row_here()
    if row is None and ring.record is not None and (worker := get_worker_info()) is not None:
        row = ring.record.claim(worker.id)
        record_here(row)
    if epoch is not None and epoch != _epoch and (worker := get_worker_info()) is not None:
        _epoch = epoch
        set_epoch(worker.dataset, epoch)
    if dtype:
        index = np.frombuffer(index, dtype).astype(np.int64)
    if row is not None:
        row.begin_step(began_ns, count_samples(index))
    return index if sample_epoch is None else EpochIndices(sample_epoch, index)


_kept: tuple[int, Kept] | None = None  # in this worker process: an epoch, and the generators before its first batch


def ahead(request: RemoteCall, epoch: int, dropped: int) -> RemoteCall:
    """Return a request for a batch of an epoch that may be dropped.

    Args:
        request: of the batch.
        epoch: the number of the epoch among those that were foreseen; 0 for an epoch that has begun.
        dropped: the number of the last one that was dropped: the generators are set back to where they were before it.
    """
    return RemoteCall(_take_ahead, epoch, dropped, request)


def _take_ahead(epoch: int, dropped: int, indices: Any) -> Any:
    global _kept
    if _kept is not None and _kept[0] == dropped:
        _kept[1].restore()
        _kept = None
    if epoch and (_kept is None or _kept[0] != epoch) and (worker := get_worker_info()) is not None:
        _kept = epoch, Kept(own_generators(behind_views(worker.dataset)))
    return indices


def _pack_indices(index: Any) -> tuple[Any, str]:
    """Return indices as bytes, and their dtype; or the unchanged indices and "", if they are not plain integers.

    The dtype is the smallest that holds all. pickle takes five bytes for each integer above 65535.
    """
    numbers = as_array(index)
    if type(numbers) is not np.ndarray or numbers.dtype != np.int64 or numbers.ndim != 1 or not len(numbers):
        return index, ""
    packed = numbers.astype(np.min_scalar_type(numbers.view(np.uint64).max()))  # a negative one is huge
    return packed.tobytes(), packed.dtype.char
