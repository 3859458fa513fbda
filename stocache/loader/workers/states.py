"""The states of a dataset and its iterator in each worker process: taken with the batches, and restored.

NOTE [ States of workers ]
    A dataset may have a state (``state_dict`` and ``load_state_dict``), and so may the iterator of an iterable dataset. Each
    worker has its own copy of both, so a loader's state holds one `WorkerState` for each worker. torch's worker process runs as
    it is; the loader gives it three wrappers. `StatefulIterable` takes the place of an iterable dataset. It restores the
    dataset and its iterator, and counts the samples. `StatefulCollate` sends the state of the worker with each batch.
    `StatefulInit` runs the user's ``worker_init_fn``, and then restores a map-style dataset. If neither an iterable dataset nor
    its iterator has a state, the worker skips as many samples as it had taken.

    torch asks the workers in turn, beginning with the first. After a resume our iterators begin with the worker whose turn it
    was.

    With ``snapshot_every_n_steps=k``, a worker sends its state only with its last batch before each multiple of k. The state of
    the loader is then the state after the last multiple, with the number of batches to load and drop after it. Persistent
    workers of a map-style dataset send each state that has changed, because the next epoch begins with the last one.

    Source: the contract of torchdata's StatefulDataLoader.
"""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from stocache.errors import StateError
from stocache.loader.workers.requests import answering
from stocache.system.objects import has_state

logger = logging.getLogger("stocache")


def state_of(value: Any) -> Any:
    """Return the state of an object; None if it does not have one."""
    return value.state_dict() if has_state(value) else None


def restore(value: Any, state: Any) -> None:
    """Restore an object to a state that `state_of` returned.

    Raises:
        StateError: the object does not have ``load_state_dict``.
    """
    if state is None:
        return
    if not has_state(value):
        raise StateError(f"the state has a part for a {type(value).__name__}, but this one does not have load_state_dict.")
    value.load_state_dict(state)


@dataclass(frozen=True)
class WorkerState:
    """The state of one worker.

    Attributes:
        dataset: the state of its dataset; None if it does not have one, or if the iterator is the dataset.
        iterator: the state of the iterator of its iterable dataset; None if it does not have one.
        samples: number of samples that it took from the iterator in this epoch.
        ended: whether the iterator has ended; without ``samples``, the state of the epoch before.
    """

    dataset: Any = None
    iterator: Any = None
    samples: int = 0
    ended: bool = False

    @classmethod
    def read(cls, saved: object) -> "WorkerState | None":
        """Return the state whose ``vars`` were saved.

        Raises:
            StateError: it is damaged.
        """
        if saved is None:
            return None
        state = cls(**saved) if isinstance(saved, dict) and set(saved) == set(vars(cls())) else None
        if state is None or type(state.samples) is not int or state.samples < 0 or type(state.ended) is not bool:
            raise StateError(f"the state of a worker is damaged: {saved!r:.100}.")
        return state


class StateBatch(NamedTuple):
    """A batch, and the state of its worker after it. A tuple, so that torch pins the batch in it.

    Attributes:
        batch: the batch; None if ``dropped``.
        worker: the number of the worker.
        number: the number of the request.
        state: the pickled `WorkerState`; None if it is not sent, or has not changed.
        dropped: whether the batch has no samples, and only brings the state.
    """

    batch: Any
    worker: int
    number: int
    state: bytes | None
    dropped: bool = False


_FILLER = object()
"""A sample of a batch that is dropped."""


class StatefulIterable(IterableDataset[Any]):
    """An iterable dataset whose position is known, and restored in the first epoch.

    Args:
        dataset: of the user.
        states: the state to restore in each worker, or None.
        batch_size: samples in a batch; 1 if the loader does not batch.
        drop_last: whether the last batch is dropped if it has fewer samples.
    """

    def __init__(self, dataset: Any, states: "Sequence[WorkerState | None]", batch_size: int, drop_last: bool) -> None:
        self.dataset, self._states = dataset, states
        self._batch_size, self._drop_last = batch_size, drop_last
        self._iterator: _CountingIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        state = self._states[0 if worker is None else worker.id] if self._states else None
        self._states = ()  # the next epoch begins at its start
        self._iterator = _CountingIterator(self.dataset, state or WorkerState(), self._batch_size, self._drop_last)
        return self._iterator

    @property
    def state(self) -> WorkerState | None:
        """The state after the last sample; None before the iterator is made."""
        return None if self._iterator is None else self._iterator.state


class StatefulDataPipe(StatefulIterable, IterDataPipe[Any]):
    """A `StatefulIterable` over a DataPipe. torch finds the pipes behind it, and shards and seeds them."""


class _CountingIterator:
    """The iterator of an iterable dataset, restored to a state.

    At its end in a worker, it fills up a batch that is dropped, so that the last state is sent.
    """

    def __init__(self, dataset: Any, state: WorkerState, batch_size: int, drop_last: bool) -> None:
        restore(dataset, state.dataset)
        before = copy.deepcopy(state_of(dataset)) if state.ended else None
        self._dataset, self._iterator = dataset, iter(dataset)
        restore(self._iterator, state.iterator)
        stateful = has_state(dataset) or has_state(self._iterator)
        if state.ended and stateful and not has_state(self._iterator):
            if next(self._iterator, _FILLER) is not _FILLER:  # a generator takes the state when it is asked, as with torchdata
                restore(dataset, before)  # it has begun the next epoch
            if not state.samples:
                self._iterator = iter(dataset)
        self._samples, self._ended = state.samples, state.ended and bool(state.samples)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._fillers, self._room = 0, batch_size  # room in the batch that is made
        self._tells_end = stateful and get_worker_info() is not None
        if state.samples and not state.ended and not stateful:
            logger.warning(
                "neither the dataset nor its iterator has state_dict and load_state_dict: %d samples are loaded and skipped "
                "to resume.",
                state.samples,
            )
            for done in range(state.samples):
                if next(self._iterator, _FILLER) is _FILLER:
                    raise StateError(
                        f"the dataset has {done} samples for this worker; the state was taken after {state.samples}."
                    )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._fillers:
            self._fillers -= 1
            return _FILLER
        if self._ended:
            raise StopIteration
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            if not self._tells_end or (self._room < self._batch_size and not self._drop_last):
                raise
            self._fillers = self._room - 1
            return _FILLER
        self._samples += 1
        self._room = self._room - 1 or self._batch_size
        return sample

    @property
    def state(self) -> WorkerState:
        own = None if self._iterator is self._dataset else state_of(self._dataset)
        return WorkerState(own, state_of(self._iterator), self._samples, self._ended)


@dataclass
class StatefulCollate:
    """The collate function of workers that have a state: it returns a `StateBatch`.

    Attributes:
        collate: makes the batch.
        every: the ``snapshot_every_n_steps`` of the loader.
        iterable: the iterable dataset; None for a map-style one.
    """

    collate: Callable[[Any], Any]
    every: int
    iterable: StatefulIterable | None
    _sent: bytes | None = None

    def __call__(self, samples: object) -> StateBatch:
        """Return the batch of some samples, with the state of this worker."""
        worker: Any = get_worker_info()
        number = answering.number
        dropped = samples is _FILLER or (type(samples) is list and bool(samples) and samples[-1] is _FILLER)
        batch = None if dropped else self.collate(samples)
        ended = self.iterable is not None and self.iterable.state is not None and self.iterable.state.ended
        another_comes = -(number + 1) % self.every >= worker.num_workers  # before the snapshot
        if another_comes and not dropped and not ended:
            return StateBatch(batch, worker.id, number, None)
        if self.iterable is not None:
            return StateBatch(batch, worker.id, number, pickle.dumps(self.iterable.state), dropped)
        state = pickle.dumps(WorkerState(state_of(worker.dataset)))
        sent, self._sent = self._sent, state
        return StateBatch(batch, worker.id, number, None if state == sent else state, dropped)


@dataclass
class StatefulInit:
    """The ``worker_init_fn`` of workers that have a state.

    Attributes:
        init: of the user, or None.
        states: the state to restore in each worker, or None.
    """

    init: Callable[[int], Any] | None
    states: "Sequence[WorkerState | None]"

    def __call__(self, number: int) -> None:
        """Run the user's function, and restore the dataset of worker ``number``."""
        info: Any = get_worker_info()
        iterable = isinstance(info.dataset, StatefulIterable)
        if iterable:
            object.__setattr__(info, "dataset", info.dataset.dataset)  # torch refuses it otherwise; users expect their own
        if self.init is not None:
            self.init(number)
        state = self.states[number] if self.states else None
        if not iterable and state is not None:
            restore(info.dataset, state.dataset)


@dataclass
class WorkerStates:
    """The states of the workers in one epoch, as far as the process of the loader has received them.

    Attributes:
        count: number of workers.
        every: the ``snapshot_every_n_steps`` of the loader.
        states: the newest state of each worker, pickled or not; None while it is as the worker began.
        turn: the worker whose batch comes next.
        snapshot: batches delivered, states and turn at the last snapshot; None if ``every`` is 1.
    """

    count: int
    every: int = 1
    states: list[Any] = field(default_factory=list)
    turn: int = 0
    snapshot: tuple[int, list[Any], int] | None = None
    _number: int = 0  # the request before which the snapshot was taken

    def __post_init__(self) -> None:
        self.states = self.states or [None] * self.count

    def begin(self, delivered: int, turn: int) -> None:
        """Take the first snapshot of an epoch, whose first batch worker ``turn`` makes."""
        self.turn = turn
        self.snapshot = (delivered, list(self.states), self.turn) if self.every > 1 else None

    def note(self, batch: StateBatch, delivered: int) -> None:
        """Note a batch that is delivered now, after ``delivered`` others."""
        if batch.dropped:
            self.states[batch.worker] = batch.state or self.states[batch.worker]
            return
        begins = batch.number // self.every * self.every
        if begins > self._number:
            self._take(begins, delivered)
        if batch.state is not None:
            self.states[batch.worker] = batch.state
        self.turn = (batch.worker + 1) % self.count
        if (batch.number + 1) % self.every == 0:
            self._take(batch.number + 1, delivered + 1)

    def note_error(self) -> None:
        """Note that an error took the place of a batch."""
        self.turn = (self.turn + 1) % self.count

    def _take(self, number: int, delivered: int) -> None:
        if self.every > 1:
            self._number, self.snapshot = number, (delivered, list(self.states), self.turn)

    def at(self, delivered: int) -> tuple[int, list[Any], int]:
        """Return the batches delivered, states and turn to resume from."""
        since, states, turn = self.snapshot or (delivered, self.states, self.turn)
        return since, [_saved(state) for state in states], turn

    def next_epoch(self) -> "WorkerStates":
        """Return the states at the beginning of the next epoch of the same workers: their datasets stay unchanged."""
        datasets = [(_saved(state) or {}).get("dataset") for state in self.states]
        return WorkerStates(self.count, self.every, [None if own is None else WorkerState(own, ended=True) for own in datasets])


def _saved(state: bytes | WorkerState | None) -> dict[str, Any] | None:
    """Return a state, which one of this loader's workers may have pickled, as a dict; None if it holds nothing."""
    known = pickle.loads(state) if isinstance(state, bytes) else state
    if known is None or (known.dataset is None and known.iterator is None and not known.samples and not known.ended):
        return None
    return dict(vars(known))
