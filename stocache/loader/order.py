"""The order of a DataLoader's batches, the position of an epoch in it, and how an epoch is resumed.

NOTE [ Resuming ]
    Only the sampler knows how it turns random numbers into an order. So a state holds the states of the generators at the
    beginning of the epoch, and the number of delivered batches. To resume, the generators are set back, the sampler begins
    again, and the delivered batches of indices are skipped; their samples are not loaded. Random numbers are drawn at three
    moments: when the iterator is made (the workers' seed), when the sampler begins, and when it is first asked for a batch. The
    state holds the generators at all three. Afterwards the global generators are restored for the user. The generators of the
    loader and its samplers stay where the replay left them, so that the following epochs are the same too.

    A sampler with a state of its own may draw from generators that the loader cannot set. So its state after each batch is
    kept, too. If the sampler has a different state after the replay, the kept one is restored, and the sampler goes on from
    there.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stocache.errors import StateError
from stocache.loader.samplers.block import BlockSampler, ResumableSampler
from stocache.loader.samplers.locality import LocalityDistributedSampler
from stocache.loader.workers.requests import EpochIndices, RequestContext, request
from stocache.system import generators as rng
from stocache.system.objects import has_state, rest_of, takes_epoch
from stocache.system.state import equal_states

_DRAW_FIRST = {
    BatchSampler,
    BlockSampler,
    DistributedSampler,
    LocalityDistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}
_MOST_PLANNED, _SAMPLES_PLANNED = 64, 16384  # batches, and samples, that are asked for at once
_DEEP = 8  # most samplers nested in each other


@dataclass
class Progress:
    """The position of one epoch.

    Attributes:
        delivered: batches delivered to the user, or errors in their place.
        ahead: the numbers of batches that were delivered before their turn, with ``in_order=False``.
        finished: whether the epoch has ended.
        made: states of the generators when the iterator was made, for JSON.
        begun: states when the sampler began; None before.
        asked: states when the sampler was first asked for a batch; None before.
        samplers: states of the samplers when they began, if any has one.
        epochs: the epochs of the samplers that have ``set_epoch``.
        now: states of the samplers after the batches that were delivered; None if they do not have one.
        resumed: batches to skip, because an earlier iterator delivered them; None for an epoch that begins here.
        replay: batches to load and drop, because the states of the workers are older; see workers/states.py.
        turn: the worker that makes the first batch.
        sample_epoch: the epoch from which samples are seeded; None without ``sample_seed``.
        skip_rng_draw: whether creating this iterator must not advance the generators, because it replaces an existing one.
        workers_made: states of the generators when the workers were made that this iterator's workers replace.
        asked_for: the numbers of batches that are not delivered, and the states of the samplers after them, if any has one.
    """

    delivered: int = 0
    ahead: set[int] = field(default_factory=set)
    finished: bool = False
    made: dict[str, Any] | None = None
    begun: dict[str, Any] | None = None
    asked: dict[str, Any] | None = None
    samplers: list[Any] | None = None
    epochs: list[int | None] | None = None
    now: list[Any] | None = None
    resumed: int | None = None
    replay: int = 0
    turn: int = 0
    sample_epoch: int | None = None
    skip_rng_draw: bool = False
    workers_made: dict[str, Any] | None = None
    asked_for: deque[tuple[int, list[Any]]] = field(default_factory=deque)

    def deliver(self, number: int | None = None) -> None:
        """Note that a batch was delivered: the next one, or ``number``."""
        if number is None or number == self.delivered:
            self.delivered += 1
            while self.delivered in self.ahead:
                self.ahead.remove(self.delivered)
                self.delivered += 1
        else:
            self.ahead.add(number)
        while self.asked_for and self.asked_for[0][0] < self.delivered:
            self.now = self.asked_for.popleft()[1]


@dataclass
class Order:
    """The sampler of an iterator: the loader's own sampler, whose batches are numbered and can be resumed.

    Attributes:
        sampler: yields batches of indices; or single indices, if the loader does not batch.
        generators: the generators that the loader and its samplers own.
        endless: whether the dataset is iterable: its indices are not numbers, and do not end.
        progress: the epoch that begins next.
        context: sent to the workers with each batch of indices; None without workers.
        at_once: how many batches an `AheadIterator` asks for at a time; 0 for any other iterator.
        arrays: whether batches of indices may be arrays.
        error: the error of the sampler; None without one.
        begun: an iterator that was begun already, for the next ``iter``; None without one.
    """

    sampler: Any
    generators: list[torch.Generator]
    endless: bool = False
    progress: Progress = field(default_factory=Progress)
    context: RequestContext | None = None
    at_once: int = 0
    arrays: bool = False
    error: Exception | None = None
    begun: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if (begun := self.begun) is not None:
            self.begun = None
            return begun
        progress = self.progress
        if progress.resumed is not None:
            with rng.Kept():
                self.restore(progress.begun, progress.samplers, progress.epochs)
                progress.epochs = self.epochs()  # of samplers that the state does not have
                numbered = self._numbered(progress, self._begin_sampler())
        else:
            if progress.skip_rng_draw:
                self.restore(progress.made)
            progress.begun, progress.samplers, progress.epochs = self.rng_state(), self.sampler_states(), self.epochs()
            numbered = self._numbered(progress, self._begin_sampler())
        if (made := progress.workers_made) is not None:  # torch draws the seed of the workers now, and then begins again
            # without workers torch does not begin again
            progress.workers_made = self.rng_state() if self.context is None else None
            self.restore(made)
        return numbered

    def foresee(self, count: int) -> list[Any]:
        """Return the first requests of the next epoch, if nobody draws from the generators until it begins, or skips epochs."""
        assert self.context is not None  # there are workers
        epoch, sample_epoch = self.context.epoch, self.progress.sample_epoch
        context = replace(self.context, epoch=None if epoch is None else epoch + 1)
        try:
            with rng.Kept(self.generators):
                indices = list(islice(begin(_in_next_epoch(self.sampler), context.arrays), count))
        except Exception:  # of a sampler: it is raised when the epoch begins
            indices = []
        sample_epoch = None if sample_epoch is None else sample_epoch + 1
        return [request(context, number, index, sample_epoch) for number, index in enumerate(indices)]

    def _begin_sampler(self) -> Iterator[Any]:
        return begin(self.sampler, self.arrays or (self.context is not None and self.context.arrays))

    def _numbered(self, progress: Progress, indices: Iterator[object]) -> Iterator[Any]:
        number, head = 0, []
        if progress.resumed is None:
            progress.asked = self.rng_state()
        elif not self.endless:
            self.restore(progress.asked)
            number, begun, indices = progress.resumed, indices, self._skip(progress, indices)
            if not number or indices is not begun:
                head = list(islice(rest_of(indices), 1))  # a sampler may draw at its first batch
        if self.context is None and progress.resumed is not None:
            yield None  # after it skipped the delivered batches
        resumed = frozenset(progress.ahead)
        tracked = self._tracked(indices)
        try:
            for index in chain(head, rest_of(indices)):
                if tracked:
                    progress.asked_for.append((number, _states_of(tracked)))
                if number not in resumed:
                    yield self._request(progress, number, index)
                number += 1
        except Exception as error:
            self.error = error
            raise

    def _request(self, progress: Progress, number: int, index: Any) -> Any:
        if self.context is not None:
            return request(self.context, number, index, progress.sample_epoch)
        return index if progress.sample_epoch is None else EpochIndices(progress.sample_epoch, index)

    def _skip(self, progress: Progress, indices: Iterator[object]) -> Iterator[Any]:
        """Return an iterator over the indices after the delivered ones."""
        skipped = sum(1 for _ in islice(rest_of(indices), progress.resumed))
        tracked = self._tracked(indices)
        if progress.now is None or (skipped == progress.resumed and equal_states(_states_of(tracked), progress.now)):
            return indices
        if len(tracked) != len(progress.now):
            raise StateError("the samplers of this loader do not have the states that were saved. Use the same samplers.")
        for value, state in zip(tracked, progress.now, strict=True):
            if value is not indices:
                value.load_state_dict(state)
        resumed: Any = self._begin_sampler()
        if tracked[-1] is indices:
            resumed.load_state_dict(progress.now[-1])
        return resumed  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def rng_during_creation(self, progress: Progress) -> Iterator[None]:
        """Set the generators for the creation of an iterator, which draws random numbers."""
        self.progress = progress
        if progress.resumed is None:
            progress.made = self.rng_state()
            yield
            self.restore(progress.workers_made)
        else:
            with rng.Kept():
                self.restore(progress.made)
                yield

    def rng_state(self) -> dict[str, Any]:
        """Return the states of the global generators, and of the generators that the loader and its samplers own, for JSON."""
        return rng.states(self.generators)

    def restore(self, taken: Any, samplers: list[Any] | None = None, epochs: list[int | None] | None = None) -> None:
        """Set the generators, the epochs of samplers, and samplers that have states, to saved ones."""
        if taken is not None:
            rng.set_rng_state(taken, self.generators)
        for sampler, epoch in zip(samplers_in(self.sampler), epochs or (), strict=False):
            if epoch is not None and epoch_of(sampler) is not None:
                sampler.set_epoch(epoch)
        for sampler, state in zip(self._stateful(), samplers or (), strict=False):
            sampler.load_state_dict(state)

    def sampler_states(self) -> list[Any] | None:
        """Return the states of the samplers for the epoch that begins; None if no sampler has ``state_dict``.

        A sampler of stocache is asked for ``upcoming``, because its ``state_dict`` may still describe an unfinished epoch.
        Source: the protocol of torchdata's Stateful.
        """
        states = [
            sampler.upcoming() if isinstance(sampler, ResumableSampler) else copy.deepcopy(sampler.state_dict())
            for sampler in self._stateful()
        ]
        return states or None

    def epochs(self) -> list[int | None]:
        """Return the epoch of each sampler; None if a sampler does not have ``set_epoch``."""
        return list(map(epoch_of, samplers_in(self.sampler)))

    @property
    def may_run_ahead(self) -> bool:
        """Whether indices may be requested further ahead, without a change to any random number.

        Such samplers draw all numbers at the beginning, or from a generator that they make for each epoch. A `RandomSampler`
        draws from the user's generator once more at its end: after a loop that is left early, that would have a different
        state.
        """
        found = samplers_in(self.sampler)
        return all(type(sampler) in _DRAW_FIRST for sampler in found) and not any(
            isinstance(sampler, RandomSampler) and sampler.generator is not None for sampler in found
        )

    @property
    def most_at_once(self) -> int:
        """How many batches may be asked for at once, if they may be requested ahead; few that are large.

        Batches of a sampler that counts what it gave are asked for one at a time.
        """
        size = getattr(self.sampler, "batch_size", None)
        if type(size) is not int or any(isinstance(sampler, ResumableSampler) for sampler in samplers_in(self.sampler)):
            return 1
        return max(1, min(_MOST_PLANNED, _SAMPLES_PLANNED // size))

    def _stateful(self) -> list[Any]:
        return [sampler for sampler in samplers_in(self.sampler) if has_state(sampler)]

    def _tracked(self, indices: Iterator[object]) -> list[Any]:
        """Return the samplers, and the iterator over the batches, whose states are kept after each batch."""
        tracked = [sampler for sampler in self._stateful() if not isinstance(sampler, ResumableSampler)]
        return [*tracked, indices] if has_state(indices) else tracked


def begin(sampler: Any, as_arrays: bool = False) -> Iterator[Any]:
    """Return ``iter(sampler)``, or for shuffled batches an iterator that yields the same at less cost.

    torch's samplers pass each index through two iterators: 18 µs for a batch of 256; this takes 2 (measured).
    ``as_arrays``: these batches may be arrays.
    """
    inner = getattr(sampler, "sampler", None)
    if (
        type(sampler) is BatchSampler
        and type(inner) is RandomSampler
        and (BatchSampler.__iter__, RandomSampler.__iter__) == _ITERS
        and inner.generator is None
        and not inner.replacement
        and inner.num_samples == len(inner.data_source) > 0
    ):
        return _shuffled(sampler, inner, as_arrays)
    return iter(sampler)


_ITERS = BatchSampler.__iter__, RandomSampler.__iter__


def _shuffled(sampler: BatchSampler, inner: RandomSampler, as_arrays: bool) -> Iterator[Any]:
    generator = torch.Generator()
    generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(len(inner.data_source), generator=generator, device="cpu").numpy()
    begin, drop_last, size = 0, sampler.drop_last, sampler.batch_size
    while True:
        size = size if drop_last else sampler.batch_size  # which the user may set at any time
        batch = order[begin : begin + size]
        if len(batch) < (size if drop_last else 1):
            return
        yield batch if as_arrays else batch.tolist()
        begin += size


def _in_next_epoch(sampler: Any) -> Any:
    """Return a copy of a sampler of `_DRAW_FIRST`, with the samplers inside it, in the epoch that follows."""
    copied = copy.copy(sampler)
    if isinstance(sampler, BatchSampler):
        copied.sampler = _in_next_epoch(sampler.sampler)
    if isinstance(sampler, DistributedSampler) and not (isinstance(sampler, ResumableSampler) and sampler.advances_epoch):
        copied.set_epoch(sampler.epoch + 1)
    return copied


def _states_of(values: list[Any]) -> list[Any]:
    return [copy.deepcopy(value.state_dict()) for value in values]


def epoch_of(sampler: Any) -> int | None:
    """Return the epoch of a sampler; None if it does not have ``set_epoch``."""
    epoch = getattr(sampler, "epoch", None)
    return epoch if type(epoch) is int and takes_epoch(sampler) else None


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler, and the samplers inside it."""
    found: list[Any] = []
    while sampler is not None and len(found) < _DEEP:
        found.append(sampler)
        inner = getattr(sampler, "sampler", None)  # perhaps an array, which has no truth value
        sampler = inner if inner is not None else getattr(sampler, "batch_sampler", None)
    return found


def known_length(sampler: Any) -> int | None:
    """Return the length of a sampler of torch or ours; None for others: theirs may raise, draw, or iterate."""
    return len(sampler) if all(type(each) in _DRAW_FIRST for each in samplers_in(sampler)) else None
