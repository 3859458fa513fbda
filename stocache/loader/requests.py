"""What the loader sends to its workers with each batch of indices."""

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset, get_worker_info

from stocache.datasets.cached import CachedDataset
from stocache.ring.ring import Ring, ring_of


@dataclass
class RequestContext:
    """What worker processes get with each batch of indices.

    Attributes:
        iteration: the number of the iteration in the ring.
        arrays: whether the workers get lists of indices as arrays, which a `CachedDataset` accepts.
        epoch: the epoch that the user has set, or None.
    """

    ring: Ring
    iteration: int
    arrays: bool = False
    epoch: int | None = None


class EpochIndices(NamedTuple):
    """A batch of indices, or one index, for a dataset that seeds samples."""

    epoch: int
    indices: Any


class NoIndices:
    """The class stands for the indices of a batch that is dropped. See worker_state.py."""


class BatchRequest:
    """A batch of indices for a worker process. It unpickles to the indices themselves, or to `EpochIndices`."""

    __slots__ = ("_content",)

    def __init__(self, context: RequestContext, number: int, index: Any, sample_epoch: int | None = None) -> None:
        self._content = context.ring.key, context.iteration, number, context.epoch, sample_epoch, context.arrays, index

    def __reduce__(self) -> tuple[Any, ...]:
        *message, index = self._content
        return _unpickle_request, (*message, *_pack_indices(index))


_epoch: int | None = None  # the epoch that was set in this worker
_current = 0  # the number of the request that this worker answers


def current_request() -> int:
    """Return the number of the request that this worker answers."""
    return _current


def _unpickle_request(
    key: str, iteration: int, number: int, epoch: int | None, sample_epoch: int | None, arrays: bool, index: Any, width: int
) -> Any:
    global _epoch, _current
    _current = number
    lane = ring_of(key).lane(iteration)
    if lane is not None:
        lane.record_request(number)
    worker = get_worker_info()
    if epoch is not None and epoch != _epoch and worker is not None:
        _epoch = epoch
        set_epoch(worker.dataset, epoch)
    if width:
        unpacked = _unpack_indices(index, width)
        index = unpacked if arrays else unpacked.tolist()
    return index if sample_epoch is None else EpochIndices(sample_epoch, index)


def _pack_indices(index: Any) -> tuple[Any, int]:
    """Return indices as bytes, and the bytes of each; or the unchanged indices and 0, if they are not plain integers.

    All get as many bytes as the largest needs. pickle takes five for each integer above 65535: over 1 KiB for a batch of 256.
    """
    if type(index) is not list or not index or not type(index[0]) is int is type(index[-1]):
        return index, 0
    try:
        wide = np.frombuffer(array("I", index), np.uint8).reshape(-1, 4)
    except (TypeError, OverflowError):  # not integers, negative, or too large
        return index, 0
    width = 4 if wide[:, 3].any() else 3 if wide[:, 2].any() else 2
    return wide[:, :width].tobytes(), width


def _unpack_indices(data: bytes, width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    wide = np.zeros((len(data) // width, 8), np.uint8)
    wide[:, :width] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return wide.view(np.int64).ravel()


def layers(dataset: Any) -> list[Any]:
    """Return a dataset, and the datasets that it wraps."""
    found = [dataset]
    while isinstance(dataset, Subset | CachedDataset):
        dataset = dataset.dataset
        found.append(dataset)
    return found


def set_epoch(dataset: Any, epoch: int) -> None:
    """Set the epoch of the first dataset, from the outermost inwards, that has ``set_epoch``."""
    for layer in layers(dataset):
        if hasattr(layer, "set_epoch"):
            layer.set_epoch(epoch)
            return
