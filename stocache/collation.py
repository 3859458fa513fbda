"""How the batches of a DataLoader are made: by worker processes, into the ring; or by this process, from the cache."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map  # documented, for extending default_collate

from stocache.gathering import Empty, Unread
from stocache.ring import FULL, NO_LANE, NO_MEMORY, Ring, outside

_STACK = default_collate_fn_map[Tensor]


def stacks(collate_fn: Any) -> bool:
    """Whether a collate function is default_collate, with the way of stacking tensors that torch ships."""
    return collate_fn is default_collate and default_collate_fn_map[Tensor] is _STACK


class RingCollate:
    """What worker processes collate with: it writes batches into the ring, and returns what unpickles to them.

    Args:
        collate_fn: the user's.
        stacking: whether it `stacks`, and may be replaced by stacking into the ring.
        iteration: of the ring.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], stacking: bool, ring: Ring, iteration: int) -> None:
        self._collate_fn, self._stacking, self._ring, self._iteration = collate_fn, stacking, ring, iteration

    def __call__(self, samples: Any) -> Any:
        """Return what to send for a list of samples."""
        lane = self._ring.lane(self._iteration)
        buffer = None if lane is None else lane.take()
        if buffer is not None:
            if isinstance(samples, Unread):
                batch = samples.gather(buffer.empty)
                if batch is not None:
                    return buffer.ship(batch, kind=len(samples))
            return buffer.ship(self._collated(samples, buffer.empty))
        batch = self._collate_fn(samples.read() if isinstance(samples, Unread) else samples)
        reason = FULL if lane is not None else NO_LANE if self._ring.works else NO_MEMORY
        return outside(self._ring.key, batch, reason)

    def _collated(self, samples: Any, empty: Empty) -> Any:
        if self._stacking:
            return collate(list(samples), collate_fn_map={**default_collate_fn_map, Tensor: partial(_stack, empty)})
        return self._collate_fn(samples)


def _stack(empty: Empty, batch: list[Tensor], *, collate_fn_map: Any) -> Tensor:
    """Stack tensors as default_collate does in a worker, but into memory that ``empty`` gives."""
    first = batch[0]
    if type(first) is Tensor and first.layout == torch.strided and first.device.type == "cpu" and not first.is_nested:
        out = empty((len(batch), *first.shape), first.dtype)
        if out is not None:
            return torch.stack(batch, 0, out=out)
    stacked: Tensor = _STACK(batch, collate_fn_map=collate_fn_map)
    return stacked


def as_is(samples: Any) -> Any:
    """Return what is given, for an iterator that does not collate."""
    return samples


class Gatherer:
    """An iterator that gathers the batches another one names, into the ring; ``depth`` of them ahead in a thread.

    Gathering leaves the GIL to the training step. The thread gathers only what is in the cache: samples that have to be loaded
    are loaded by whoever asks for their batch, in the order in which they always were.
    """

    def __init__(self, unread: Iterator[Unread], ring: Ring, depth: int) -> None:
        self._unread, self._ring, self._depth = unread, ring, depth
        self._iteration = ring.begin()
        self._waiting: deque[tuple[Unread, Future[Any]]] = deque()
        self._thread = ThreadPoolExecutor(1, "stocache-gather")
        for end in (partial(self._thread.shutdown, wait=False), partial(ring.end, self._iteration)):
            weakref.finalize(self, end).atexit = False

    def __iter__(self) -> "Gatherer":
        return self

    def __len__(self) -> int:
        return len(self._unread)  # type: ignore[arg-type]  # torch's have one

    def __next__(self) -> Any:
        if not self._depth:
            return _gather(next(self._unread), self._ring, self._iteration)
        self._look_ahead()
        if not self._waiting:
            raise StopIteration
        unread, future = self._waiting.popleft()
        batch = future.result()
        if batch is None:
            batch = _gather(unread, self._ring, self._iteration)
        self._look_ahead()
        return batch

    def _look_ahead(self) -> None:
        for unread in islice(self._unread, self._depth - len(self._waiting)):
            self._waiting.append((unread, self._thread.submit(_gather_cached, unread, self._ring, self._iteration)))


def _gather_cached(unread: Unread, ring: Ring, iteration: int) -> Any:
    return _gather(unread, ring, iteration) if unread.cached else None


def _gather(unread: Unread, ring: Ring, iteration: int) -> Any:
    lane = ring.lane(iteration)
    buffer = None if lane is None else lane.take()
    batch = unread.gather(_new if buffer is None else buffer.empty)
    if batch is None:
        return default_collate(unread.read())
    return batch if buffer is None else buffer.ship(batch, kind=len(unread)).arrive()


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
