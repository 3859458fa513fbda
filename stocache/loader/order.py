"""In what order a DataLoader's batches come, where an epoch stands in it, and how it is resumed there.

NOTE [ Resuming ]
    Orders come from random number generators, and only the sampler knows how. So what is saved is the states the generators
    had when the epoch began, and the number of batches that were delivered. To resume, the generators are put back for the
    moment, the sampler begins again, and the batches of indices that were delivered are skipped: none of their samples is
    loaded. An iterator draws when it is made (the seed of the workers), its sampler when it begins or when it is asked for the
    first time; all three moments are kept. Afterwards the global generators are as the user had them; those that belong to the
    loader and its samplers stay where the replay has brought them, so that the epochs to come are the same too.
"""

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, get_worker_info

from stocache.datasets.cached import CachedDataset
from stocache.loader.ring import Ring, ring_of
from stocache.samplers.block import ResumableSampler
from stocache.system import rng
from stocache.system.rng import States

_DEEP = 8  # samplers within each other, at most


@dataclass
class Progress:
    """Where one epoch stands.

    Attributes:
        delivered: batches the user has got, or an error instead.
        finished: whether there are no more.
        made: states of the generators when the iterator was made.
        begun: states when its sampler began; None before.
        asked: states when the sampler was asked for the first time; None before.
        sampler: what the sampler's own ``state_dict`` said when it began, if it has one.
        resumed: batches that are skipped, as an earlier iteration delivered them; None when the epoch was begun here.
        skip_rng_draw: whether creating this iterator must not advance the generators, because it replaces an existing one.
    """

    delivered: int = 0
    finished: bool = False
    made: States | None = None
    begun: States | None = None
    asked: States | None = None
    sampler: Any = None
    resumed: int | None = None
    skip_rng_draw: bool = False


@dataclass
class Order:
    """The sampler that an iterator draws from: that of the loader, numbered and resumable.

    Attributes:
        sampler: of batches of indices, or, without automatic batching, of indices.
        generators: those that belong to the loader and its samplers.
        progress: of the epoch that is begun next.
        context: goes to the worker processes with each batch of indices; None without workers.
    """

    sampler: Any
    generators: list[torch.Generator]
    progress: Progress = field(default_factory=Progress)
    context: "RequestContext | None" = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        progress = self.progress
        if progress.resumed is not None:
            with rng.preserve_rng_state():
                self.restore(progress.begun, progress.sampler)
                return self._numbered(progress, iter(self.sampler))
        if progress.skip_rng_draw:
            self.restore(progress.made, None)
        progress.begun, progress.sampler = rng.states(self.generators), self.sampler_state()
        return self._numbered(progress, iter(self.sampler))

    def _numbered(self, progress: Progress, indices: Iterator[Any]) -> Iterator[Any]:
        number, head = progress.resumed or 0, []
        if progress.resumed is None:
            progress.asked = rng.states(self.generators)
        else:
            with rng.preserve_rng_state():
                self.restore(progress.asked, None)
                head = list(islice(indices, number + 1))[number:]  # one more: the sampler may begin with the first
        for index in chain(head, indices):
            yield index if self.context is None else BatchRequest(self.context, number, index)
            number += 1

    @contextlib.contextmanager
    def rng_during_creation(self, progress: Progress) -> Iterator[None]:
        """Surround the making of an iterator, which draws random numbers."""
        self.progress = progress
        if progress.resumed is None:
            progress.made = rng.states(self.generators)
            yield
        else:
            with rng.preserve_rng_state():
                self.restore(progress.made, None)
                yield

    def restore(self, taken: States | None, sampler_state: Any) -> None:
        """Put all generators, and the sampler where it can be, into states that were taken."""
        if taken is not None:
            rng.set_rng_state(taken, self.generators)
        if sampler_state is not None:
            for sampler, state in zip(self._stateful(), sampler_state, strict=True):
                sampler.load_state_dict(state)

    def sampler_state(self) -> list[Any] | None:
        """Return what the samplers say of the epoch that begins, in the protocol of torchdata's Stateful; None when none does.

        One of ours is asked for just that: its ``state_dict`` may still tell of an epoch that was broken off.
        """
        states = [
            sampler.upcoming() if isinstance(sampler, ResumableSampler) else sampler.state_dict()
            for sampler in self._stateful()
        ]
        return states or None

    def _stateful(self) -> list[Any]:
        return [sampler for sampler in samplers_in(self.sampler) if hasattr(sampler, "load_state_dict")]


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler, and those it draws from."""
    found: list[Any] = []
    while sampler is not None and len(found) < _DEEP:
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return found


def layers(dataset: Any) -> list[Any]:
    """Return a dataset, and those within it that it takes its samples from unchanged, or transformed."""
    found = [dataset]
    while isinstance(dataset, Subset | CachedDataset):
        dataset = dataset.dataset
        found.append(dataset)
    return found


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell the dataset which epoch begins, or the first one within it that wants to know."""
    for layer in layers(dataset):
        if hasattr(layer, "set_epoch"):
            layer.set_epoch(epoch)
            return


# ---------------------------------------------------------------------------------------------------- to workers


@dataclass
class RequestContext:
    """What goes to worker processes with each batch of indices.

    Attributes:
        iteration: of the ring.
        arrays: whether lists of indices are to arrive as arrays, which a dataset of ours takes as well.
        epoch: what the user has set; None when nothing.
    """

    ring: Ring
    iteration: int
    arrays: bool = False
    epoch: int | None = None


class BatchRequest:
    """Indices on their way to a worker process, where they are unpickled as what they are."""

    __slots__ = ("_content",)

    def __init__(self, context: RequestContext, number: int, index: Any) -> None:
        self._content = context.ring.key, context.iteration, number, context.epoch, context.arrays, index

    def __reduce__(self) -> tuple[Any, ...]:
        *message, index = self._content
        return _unpickle_request, (*message, *_pack_indices(index))


_epoch: int | None = None  # that this worker's dataset has been told


def _unpickle_request(key: str, iteration: int, number: int, epoch: int | None, arrays: bool, index: Any, width: int) -> Any:
    global _epoch
    lane = ring_of(key).lane(iteration)
    if lane is not None:
        lane.record_request(number)
    worker = get_worker_info()
    if epoch is not None and epoch != _epoch and worker is not None:
        _epoch = epoch
        set_epoch(worker.dataset, epoch)
    if not width:
        return index
    unpacked = _unpack_indices(index, width)
    return unpacked if arrays else unpacked.tolist()


def _pack_indices(index: Any) -> tuple[Any, int]:
    """Return indices in as few bytes as the largest of them needs, and how many; or as they are, and 0.

    A list of Python integers above 65535 is pickled in five bytes each: more than a KiB for a batch of 256.
    """
    if type(index) is not list or not index or not type(index[0]) is int is type(index[-1]):
        return index, 0
    try:
        wide = np.frombuffer(array("I", index), np.uint8).reshape(-1, 4)
    except (TypeError, OverflowError):  # no integers, negative, or large
        return index, 0
    width = 4 if wide[:, 3].any() else 3 if wide[:, 2].any() else 2
    return wide[:, :width].tobytes(), width


def _unpack_indices(data: bytes, width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    wide = np.zeros((len(data) // width, 8), np.uint8)
    wide[:, :width] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return wide.view(np.int64).ravel()
