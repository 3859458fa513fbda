"""Deliver the batches of an iterator on a GPU: `DeviceBatches`.

NOTE [ Two batches ahead ]
    When the loop asks for a batch, the copies of the next ones are begun too, up to `_AHEAD`, if that needs no waiting and no
    code of the dataset (``is_ready`` of the iterator). So they overlap with the training step, and the order of random draws
    stays. Small batches that are gathered together are begun while the loop has those before them.
    An error of a batch is raised in its turn.

    The batch in host memory is kept until its copy has ended, which an event says: a buffer of the ring must not be used again
    before.

NOTE [ Events in forked children ]
    CUDA does not work in a forked child. There the end of an event, or of a tensor that was passed to ``record_stream``, aborts
    the process (C++ destructors that raise). A worker process is such a child, and its garbage collector may find what was
    garbage of its parent. So once batches are on a GPU, forked children leave the objects of their parents alone:
    ``gc.freeze()`` excludes all that exist from collection, in the child only, at no cost.
"""

import copy
import dataclasses
import functools
import gc
import os
import weakref
from collections import deque
from collections.abc import Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.cache.shared import SharedCache
from stocache.datasets.batches.planned import PlannedBatch
from stocache.loader.device.cuda import Cuda
from stocache.loader.device.gathering import DeviceGatherer, DeviceStats
from stocache.system.platform import here

_AHEAD = 2


@dataclass
class _Waiting:
    """A batch that the loop has not asked for yet.

    Attributes:
        host: the batch of the iterator.
        worker: the number of the worker that made it.
        error: raised in place of the batch.
        placed: what `DeviceStage.place` has returned for it; None before.
    """

    host: Any = None
    worker: int | None = None
    error: Exception | None = None
    placed: tuple[Any, list[Tensor], Any] | None = None


class _Mover:
    """Moves the tensors of one batch, and objects that have ``to``, to a device. Containers are those that torch pins."""

    def __init__(self, cuda: Any, gatherer: DeviceGatherer | None) -> None:
        self._cuda, self._gatherer = cuda, gatherer
        self.tensors: list[Tensor] = []  # on the device, whose memory has to be kept
        self._done: dict[int, Any] = {}  # a batch may have the same tensor twice

    def moved(self, value: object) -> Any:
        """Return a value with its tensors on the device."""
        if type(value) is PlannedBatch:
            assert self._gatherer is not None
            batch, tensors = self._gatherer.gather(value)
            self.tensors += tensors
            return batch
        if isinstance(value, Tensor) or callable(getattr(type(value), "to", None)):
            if id(value) not in self._done:
                self._done[id(value)] = self._to_device(value)
            return self._done[id(value)]
        if isinstance(value, np.ndarray):
            return value.copy()  # it may lie in the ring, which is used again when the copies of the batch have ended
        if isinstance(value, str | bytes | bytearray):
            return value
        if isinstance(value, Mapping):
            return self._changed(value, {key: self.moved(part) for key, part in value.items()})
        if isinstance(value, tuple):
            moved = tuple(map(self.moved, value))
            return moved if type(value) is tuple else type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
        if isinstance(value, MutableSequence):
            return self._changed(value, dict(enumerate(map(self.moved, value))))
        if dataclasses.is_dataclass(value):
            changed = copy.copy(value)
            for item in dataclasses.fields(value):
                object.__setattr__(changed, item.name, self.moved(getattr(value, item.name)))
            return changed
        return value

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
            moved: Tensor = value.to(self._cuda.device, non_blocking=True)
            self.tensors.append(moved)
            return moved
        with self._cuda.on_step():  # its parts are not known here
            try:
                return value.to(self._cuda.device, non_blocking=True)
            except TypeError:
                return value.to(self._cuda.device)

    @staticmethod
    def _changed(value: object, parts: dict[Any, Any]) -> Any:
        """Return a copy of a container with other parts."""
        if not isinstance(value, MutableMapping | MutableSequence):
            return parts
        changed = copy.copy(value)
        for key, part in parts.items():
            changed[key] = part
        return changed


class DeviceStage:
    """Copies the batches of a loader to a device; see NOTE [ Two batches ahead ].

    Attributes:
        cuda: the device.
        gatherer: makes the batches of a cache's samples; None if the CPU makes them.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda: Any = Cuda(device)
        self.gatherer: DeviceGatherer | None = None
        _leave_objects_of_parents()
        self._copied: deque[tuple[Any, Any]] = deque()  # the events and the batches in host memory
        weakref.finalize(self, _finish, self.cuda, self._copied, os.getpid()).atexit = False

    def gather_from(self, cache: SharedCache) -> None:
        """Have the device gather the samples of a cache."""
        if self.gatherer is None:
            self.gatherer = DeviceGatherer(cache, self.cuda)

    def place(self, batch: Any) -> tuple[Any, list[Tensor], Any]:
        """Begin to copy a batch. Return it on the device, its tensors there, and the event at the end of their copies.

        Raises:
            OutOfMemoryError: of torch: the device has no memory for it.
        """
        if type(batch) is PlannedBatch and batch.number in batch.plan.gathered:  # with a batch before it
            return batch.plan.gathered.pop(batch.number)
        while self._copied and self._copied[0][0].query():
            self._copied.popleft()
        with self.cuda.copying():
            mover = _Mover(self.cuda, self.gatherer)
            moved = mover.moved(batch)
            event = self.cuda.mark()
        if type(batch) is not PlannedBatch or batch.plan.tensors:  # it has memory of the host
            self._copied.append((event, batch))
        return moved, mover.tensors, event

    @property
    def ahead(self) -> int:
        """How many batches to begin before the loop asks for them."""
        return max(_AHEAD, 0 if self.gatherer is None else self.gatherer.together)

    def stats(self) -> DeviceStats:
        """Return where the gathered samples came from."""
        return DeviceStats() if self.gatherer is None else self.gatherer.stats()


def _finish(cuda: Any, copied: deque[tuple[Any, Any]], pid: int) -> None:
    if pid != os.getpid():
        _of_parents.append(copied)
    elif copied:
        cuda.wait()
        copied.clear()


_of_parents: list[Any] = []  # objects that must not end in this forked child


@functools.cache
def _leave_objects_of_parents() -> None:
    # see NOTE [ Events in forked children ]
    here.at_fork(after_in_child=gc.freeze)


class DeviceBatches:
    """The batches of an iterator, on a device, for one epoch.

    Attributes:
        last_worker: the number of the worker that made the last batch; None if that is not known.
    """

    last_worker: int | None = None

    def __init__(self, batches: Any, stage: DeviceStage) -> None:
        self._batches, self._stage = batches, stage
        self._waiting: deque[_Waiting] = deque()

    def __next__(self) -> Any:
        # see NOTE [ Two batches ahead ]
        if not self._waiting:
            self._ask()
        waiting = self._waiting.popleft()
        if waiting.error is not None:
            raise waiting.error
        data, tensors, event = waiting.placed or self._stage.place(waiting.host)
        self._look_ahead()
        self._stage.cuda.hand_over(event, tensors)
        self.last_worker = waiting.worker
        return data

    def _look_ahead(self) -> None:
        while len(self._waiting) < self._stage.ahead and self._batches.is_ready():
            self._ask()
            waiting = self._waiting[-1]
            if waiting.error is not None:
                return
            try:
                waiting.placed = self._stage.place(waiting.host)
            except Exception:  # it is tried again when the loop asks for the batch, and raised then
                return

    def _ask(self) -> None:
        try:
            batch = next(self._batches)
        except Exception as error:
            self._waiting.append(_Waiting(error=error))
        else:
            self._waiting.append(_Waiting(batch, getattr(self._batches, "last_worker", None)))
