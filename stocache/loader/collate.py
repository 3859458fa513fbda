"""Make the batches of a DataLoader: in worker processes into the ring, or in this process into memory of a pool."""

import contextlib
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map  # documented, for extending it

from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.datasets.batches.planned import PlannedBatch
from stocache.datasets.batches.spec import Empty
from stocache.loader.sample_seed import is_pure
from stocache.loader.threads.info import worker_info
from stocache.loader.workers.requests import count_samples
from stocache.observe.recording.record import HAND_OVER_NS, TimingRow, row_here
from stocache.shm.pool import Pool, keep_freed_memory
from stocache.shm.ring.ring import NO_BUFFER, NO_LANE, NO_MEMORY, RemoteCall, Ring, fallback
from stocache.system.spans import COLLATE, span

_clock_ns = time.perf_counter_ns
_STACK: Any = collate_tensor_fn
_LARGE = 1 << 20  # bytes of a stacked tensor, from which malloc may take new memory for it, whose pages fault
_MOST_HELD = 4  # pieces of the pool, which it keeps for the next batches


def extend_default_collate() -> None:
    """Let default_collate stack tensors with `_stack_anywhere`, even if code of the user calls it."""
    if default_collate_fn_map.get(Tensor) is _STACK:
        default_collate_fn_map[Tensor] = _stack_anywhere


def stacks(collate_fn: object) -> bool:
    """Whether a collate function is default_collate, and torch's own function, or ours in its place, stacks its tensors."""
    return collate_fn is default_collate and default_collate_fn_map.get(Tensor) in (_STACK, _stack_anywhere)


class RingCollate:
    """The collate function of worker processes: it writes a batch into the ring, and returns a message.

    Args:
        collate_fn: the user's collate function.
        stacking: whether it `stacks`, so that tensors can be stacked straight into the ring.
        ring, iteration: the ring, and the number of the iteration in it.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], object], stacking: bool, ring: Ring, iteration: int) -> None:
        self._collate_fn, self._stacking = collate_fn, stacking
        self._ring, self._iteration = ring, iteration

    def __call__(self, samples: object) -> Any:
        """Return the message to send for a list of samples, or for a `LazyBatch`."""
        keep_freed_memory()
        row = row_here()
        if row is None:
            batch, pack = self._collate(samples)
            return pack(batch)
        made_ns, loaded_ns = _clock_ns(), row.loaded_ns
        with span(COLLATE):
            batch, pack = self._collate(samples)
        collated_ns = _clock_ns()
        row.add_batch(made_ns, loaded_ns, collated_ns)
        message = pack(batch)
        if message.function is pickle.loads:  # a small batch: the receiver does not note how long it took to pack
            row.add(HAND_OVER_NS, _clock_ns() - collated_ns)
        return message

    def _collate(self, samples: Any) -> tuple[Any, Callable[[Any], RemoteCall]]:
        """Return the batch, and a function that packs it."""
        extend_default_collate()
        lane = self._ring.lane(self._iteration)
        buffer = lane if lane is not None and lane.take() else None
        if isinstance(samples, LazyBatch):
            batch = None if buffer is None else samples.gather(buffer.empty)
            if buffer is not None and batch is not None:
                return batch, partial(buffer.publish, kind=None if type(batch) is PlannedBatch else len(samples))
            samples = samples.read()
        if buffer is None:
            reason = NO_BUFFER if lane is not None else NO_LANE if self._ring.works else NO_MEMORY
            return self._collate_fn(samples), partial(fallback, self._ring.key, reason)
        if self._stacking and stacks(self._collate_fn):  # the user may extend default_collate in each worker
            into_buffer = default_collate_fn_map | {Tensor: partial(_stack, buffer.empty)}
            return collate(samples, collate_fn_map=into_buffer), buffer.publish
        return self._collate_fn(samples), buffer.publish


class ThreadCollate:
    """The collate function of worker threads: it makes batches in memory of a pool if it can.

    Args:
        collate_fn, stacking: as for `RingCollate`.
        pool: memory for the tensors.

    Attributes:
        is_pure: whether it may be called for any batch, by any thread.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], object], stacking: bool, pool: Pool) -> None:
        extend_default_collate()
        self._collate_fn, self._pool = collate_fn, pool
        self.is_pure = is_pure(collate_fn)
        self._stacking = stacking and self.is_pure

    def __call__(self, samples: Any) -> Any:
        """Return the batch of a list of samples, or of a `LazyBatch`."""
        if isinstance(samples, LazyBatch):
            return _gather(samples, self._pool)
        if self._stacking and stacks(self._collate_fn):
            return collate(samples, collate_fn_map=default_collate_fn_map | {Tensor: partial(_stack, self._pool.empty)})
        return self._collate_fn(samples)

    def gather(self, lazy: LazyBatch, sizes: list[int]) -> list[Any] | None:
        """Return batches of some sizes with the samples of a lazy one; None if they have to be collated one by one."""
        return lazy.gather_parts(sizes, self._pool.empty)


def _stack(empty: Empty, batch: list[Tensor], *, collate_fn_map: object) -> Tensor:
    """Stack tensors as default_collate does in a worker, but into memory from ``empty``."""
    first = batch[0]
    if _is_plain(first):
        out = empty((len(batch), *first.shape), first.dtype)
        if out is not None:
            return torch.stack(batch, 0, out=out)
    return _stack_anywhere(batch, collate_fn_map=collate_fn_map)


def _stack_anywhere(batch: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
    """Stack tensors as default_collate does, in its own memory if there is no shared memory for them, or in a thread."""
    try:
        with worker_info(None):  # of this thread, which sends nothing to another process
            stacked: Tensor = _STACK(batch, collate_fn_map=collate_fn_map)
    except RuntimeError:
        if not _is_plain(batch[0]):
            raise
        stacked = torch.stack(batch, 0)
    return stacked


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized)
    )


def as_is(samples: object) -> Any:
    """Return ``samples`` unchanged: the collate function of iterators that do not collate."""
    return samples


class MainCollate:
    """The collate function of a loader without workers: the function of the user, timed. A `LazyBatch` is gathered.

    Args:
        collate_fn: the user's collate function.
        batched: whether the loader makes batches of samples.
        row: of the main process.
        stacking: whether it `stacks`.
        pool: memory for gathered tensors, and for large stacked ones.
    """

    def __init__(self, collate_fn: Callable[[Any], object], batched: bool, row: TimingRow, stacking: bool, pool: Pool) -> None:
        self._collate_fn, self._batched, self._row, self._stacking, self._pool = collate_fn, batched, row, stacking, pool

    def __call__(self, samples: object) -> Any:
        """Return the batch of a list of samples, of a `LazyBatch`, or of one sample."""
        if isinstance(samples, LazyBatch):
            self._row.add_making(len(samples))
            batch = _gather(samples, self._pool)
        else:
            self._row.add_making(count_samples(samples) if self._batched else 1)
            with span(COLLATE):
                batch = self._collate(samples)
        self._row.add_collating()
        return batch

    def _collate(self, samples: Any) -> object:
        if not (self._stacking and stacks(self._collate_fn)):
            return self._collate_fn(samples)
        return collate(samples, collate_fn_map=default_collate_fn_map | {Tensor: partial(_stack_large, self._pool)})


def _stack_large(pool: Pool, batch: list[Tensor], *, collate_fn_map: object) -> Tensor:
    """Stack tensors as default_collate does without workers, but large ones into memory of a pool, unless much of it is held.

    Only if the result is the same: without ``out`` torch finds a dtype for all and a memory format, and keeps gradients.
    """
    first = batch[0]
    large = _is_plain(first) and first.nbytes * len(batch) >= _LARGE and pool.leased < _MOST_HELD
    if large and all(_is_like(tensor, first) for tensor in batch):
        with contextlib.suppress(RuntimeError):  # with forward gradients, which it cannot see
            return torch.stack(batch, 0, out=pool.empty((len(batch), *first.shape), first.dtype))
    stacked: Tensor = _STACK(batch, collate_fn_map=collate_fn_map)
    return stacked


def _is_like(tensor: Tensor, first: Tensor) -> bool:
    alike = _is_plain(tensor) and tensor.dtype == first.dtype and tensor.shape == first.shape and tensor.is_contiguous()
    return alike and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def _gather(lazy: LazyBatch, pool: Pool) -> Any:
    batch = lazy.gather(pool.empty)
    return default_collate(lazy.read()) if batch is None else batch
