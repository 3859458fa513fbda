"""The order of a DataLoader's batches, the position of an epoch in it, and how an epoch is resumed.

NOTE [ Resuming ]
    Only the sampler knows how it turns random numbers into an order. So a state holds the states of the generators at the
    beginning of the epoch, and the number of delivered batches. To resume, the generators are set back, the sampler begins
    again, and the delivered batches of indices are skipped; their samples are not loaded. Random numbers are drawn at three
    moments: when the iterator is made (the workers' seed), when the sampler begins, and when it is first asked for a batch. The
    state holds the generators at all three. Afterwards the global generators are restored for the user. The generators of the
    loader and its samplers stay where the replay left them, so that the following epochs are the same too.
"""

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, get_worker_info

from stocache.datasets.cached import CachedDataset
from stocache.loader.ring import Ring, ring_of
from stocache.samplers.block import ResumableSampler
from stocache.system import rng
from stocache.system.rng import States

_DEEP = 8  # most samplers nested in each other


@dataclass
class Progress:
    """The position of one epoch.

    Attributes:
        delivered: batches delivered to the user, or errors in their place.
        finished: whether the epoch has ended.
        made: states of the generators when the iterator was made.
        begun: states when the sampler began; None before.
        asked: states when the sampler was first asked for a batch; None before.
        sampler: the sampler's own ``state_dict`` when it began, if it has one.
        resumed: batches to skip, because an earlier iterator delivered them; None for an epoch that begins here.
        sample_epoch: the epoch from which samples are seeded; None without ``sample_seed``.
        skip_rng_draw: whether creating this iterator must not advance the generators, because it replaces an existing one.
    """

    delivered: int = 0
    finished: bool = False
    made: States | None = None
    begun: States | None = None
    asked: States | None = None
    sampler: Any = None
    resumed: int | None = None
    sample_epoch: int | None = None
    skip_rng_draw: bool = False


@dataclass
class Order:
    """The sampler of an iterator: the loader's own sampler, whose batches are numbered and can be resumed.

    Attributes:
        sampler: gives batches of indices; or single indices, if the loader does not batch.
        generators: the generators that the loader and its samplers own.
        progress: the epoch that begins next.
        context: sent to the workers with each batch of indices; None without workers.
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
                head = list(islice(indices, number + 1))[number:]  # one more: a sampler may draw at its first batch
        for index in chain(head, indices):
            if self.context is not None:
                yield BatchRequest(self.context, number, index, progress.sample_epoch)
            else:
                yield index if progress.sample_epoch is None else EpochIndices(progress.sample_epoch, index)
            number += 1

    @contextlib.contextmanager
    def rng_during_creation(self, progress: Progress) -> Iterator[None]:
        """Set the generators for the creation of an iterator, which draws random numbers."""
        self.progress = progress
        if progress.resumed is None:
            progress.made = rng.states(self.generators)
            yield
        else:
            with rng.preserve_rng_state():
                self.restore(progress.made, None)
                yield

    def restore(self, taken: States | None, sampler_state: Any) -> None:
        """Set the generators, and samplers that have states, to saved states."""
        if taken is not None:
            rng.set_rng_state(taken, self.generators)
        if sampler_state is not None:
            for sampler, state in zip(self._stateful(), sampler_state, strict=True):
                sampler.load_state_dict(state)

    def sampler_state(self) -> list[Any] | None:
        """Return the states of the samplers for the epoch that begins; None if no sampler has ``state_dict``.

        A sampler of stocache is asked for ``upcoming``, because its ``state_dict`` may still describe an unfinished epoch.
        Source: the protocol of torchdata's Stateful.
        """
        states = [
            sampler.upcoming() if isinstance(sampler, ResumableSampler) else sampler.state_dict()
            for sampler in self._stateful()
        ]
        return states or None

    def _stateful(self) -> list[Any]:
        return [sampler for sampler in samplers_in(self.sampler) if hasattr(sampler, "load_state_dict")]


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler, and the samplers inside it."""
    found: list[Any] = []
    while sampler is not None and len(found) < _DEEP:
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return found


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


class EpochIndices(NamedTuple):
    """A batch of indices, or one index, for a dataset that seeds samples."""

    epoch: int
    indices: Any


# ---------------------------------------------------------------------------------------------------- to workers


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


class BatchRequest:
    """A batch of indices for a worker process. It unpickles to the indices themselves, or to `EpochIndices`."""

    __slots__ = ("_content",)

    def __init__(self, context: RequestContext, number: int, index: Any, sample_epoch: int | None) -> None:
        self._content = context.ring.key, context.iteration, number, context.epoch, sample_epoch, context.arrays, index

    def __reduce__(self) -> tuple[Any, ...]:
        *message, index = self._content
        return _unpickle_request, (*message, *_pack_indices(index))


_epoch: int | None = None  # the epoch that was set in this worker


def _unpickle_request(
    key: str, iteration: int, number: int, epoch: int | None, sample_epoch: int | None, arrays: bool, index: Any, width: int
) -> Any:
    global _epoch
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
