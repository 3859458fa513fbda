"""Iterate a graph of DataPipes through a reading service: `DataLoader2`."""

import contextlib
import copy
import functools
import itertools
import json
import pickle
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from stocache.errors import GraphError, StateError
from stocache.reading.graph.graph import Adapt, DataPipe, clone, is_random, pipes_of
from stocache.reading.graph.pipes import InOrder
from stocache.reading.graph.replay import drop, trace
from stocache.reading.graph.seeds import SeedGenerator, check_seed, epoch_seed, random_seed
from stocache.reading.interfaces import ReadingServiceInterface
from stocache.reading.services import RunningService, completed, find_running, keeps_position
from stocache.reading.states import from_text, initialized, service_state, to_text
from stocache.system.loading import watch
from stocache.system.state import StateForm

_SEED = (int, NoneType)
_FORM = StateForm(
    "DataLoader2",
    2,
    position={"seed": _SEED, "epoch": (int,), "epoch_seed": _SEED, "delivered": (int,)},
    parts={"graph": (str, NoneType), "service": (dict, str, NoneType)},
    optional=("graph",),
    limit=1 << 64,  # of seeds
)


@dataclass(frozen=True)
class _Begun:
    """An epoch that was begun, and its position.

    Attributes:
        seed: of the epoch.
        delivered: elements that were delivered.
        service: the state of the reading service; None if it keeps no position.
    """

    seed: int
    delivered: int
    service: Any


class Shuffle:
    """An adapter, for ``datapipe_adapter_fn``, that switches all shuffles of a graph on or off.

    Args:
        enable: True switches them on; a graph without a shuffle gets one at its end, with a warning. False switches them off.
            None changes nothing.
    """

    def __init__(self, enable: bool | None = True) -> None:
        self.enable = enable

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """Return the graph."""
        if self.enable is None:
            return datapipe
        shufflers: list[Any] = [pipe for pipe in pipes_of(datapipe) if is_random(pipe) and hasattr(type(pipe), "set_shuffle")]
        if not shufflers and self.enable:
            warnings.warn(
                "the graph has no shuffle, so one was added at its end. Its buffer of 10000 may be too small.", stacklevel=2
            )
            datapipe = datapipe.shuffle()
            shufflers = [datapipe]
        for shuffler in shufflers:
            shuffler.set_shuffle(self.enable)
        return datapipe


class DataLoader2:
    """Iterate a graph of DataPipes that a reading service runs.

        loader = DataLoader2(pipe, reading_service=MultiProcessingReadingService(num_workers=8))
        for epoch in range(3):
            for batch in loader: ...
        loader.shutdown()

    After `seed` the order of an epoch depends only on the seed and the number of the epoch. The epochs of one seed differ from
    each other, and are the same in every run. Without `seed` each epoch draws its seed from torch's global generator when it
    begins, as with torch's DataLoader. So ``torch.manual_seed`` decides the order. The draw is one number, with every reading
    service. Ranks take the seed of rank 0.

    A loader has one iterator at a time. A `state_dict` can be taken after any element. A loader that loads it delivers the rest
    of the epoch, and the following epochs, as this one would. Without `seed` the following epochs come from torch's global
    generator, so save and set its state too: ``torch.get_rng_state``, ``torch.set_rng_state``.

    Args:
        datapipe: the last pipe of the graph, which is copied; None if `load_state_dict` follows.
        datapipe_adapter_fn: a function, or several, called with the graph; returns the graph.
        reading_service: the service that runs the graph, which is copied; by default an `InProcessReadingService`.

    Attributes:
        reading_service: the copy of the service.

    Source: the interface of torchdata 0.9.
    """

    def __init__(
        self,
        datapipe: DataPipe | None,
        datapipe_adapter_fn: Adapt | Iterable[Adapt] | None = None,
        reading_service: ReadingServiceInterface | None = None,
    ) -> None:
        self._terminated = True  # until __init__ has made something to end
        self._adapters = list(datapipe_adapter_fn) if isinstance(datapipe_adapter_fn, Iterable) else [datapipe_adapter_fn]
        self.datapipe = None if datapipe is None else self._adapted(clone(datapipe))
        self.reading_service = completed(copy.deepcopy(reading_service))
        self._source = self.datapipe  # before the service changes it
        self._initialized = False
        self._seed: int | None = None  # the user's
        self._epoch = 0  # the number of the next epoch since `seed`
        self._epoch_seed = 0  # of the current epoch
        self._iterator: Iterator[Any] | None = None  # of the current epoch
        self._iterators = itertools.count()
        self._valid: int | None = None  # the number of the newest iterator: a reference to it would be a cycle
        self._delivered = 0
        self._taken = False  # whether an element of the current epoch was taken from this loader
        self._finished = True
        self._loaded: _Begun | None = None
        self.paused = False
        self._terminated = False

    def _adapted(self, datapipe: DataPipe) -> DataPipe:
        if isinstance(datapipe, MapDataPipe):
            datapipe = InOrder(datapipe)
        for adapt in self._adapters:
            datapipe = datapipe if adapt is None else adapt(datapipe)
        return datapipe

    def __iter__(self) -> "DataLoader2Iterator":
        """Begin the next epoch, unless no element of the current one was taken here. Older iterators become invalid.

        Raises:
            GraphError: the loader is shut down, or has no graph.
        """
        if self._terminated:
            raise GraphError("the DataLoader2 is shut down. Make another one.")
        if self._iterator is None or self._taken or self._finished:
            self._begin()
        self._valid = next(self._iterators)
        return DataLoader2Iterator(self, self._valid)

    def _begin(self) -> None:
        self._iterator = None  # this ends the older iteration
        loaded, self._loaded = self._loaded, None
        self._epoch_seed = self._next_seed() if loaded is None else loaded.seed
        self._delivered = 0 if loaded is None else loaded.delivered
        try:
            self._initialize(None if loaded is None else loaded.service)
            change = self.reading_service.initialize_iteration(SeedGenerator(self._epoch_seed))
            if change is not None:
                self.datapipe = change(self.datapipe)  # type: ignore[arg-type]
            iterator: Iterator[Any] = iter(self.datapipe)  # type: ignore[arg-type]
            if loaded is not None:
                self._drop_delivered(iterator)
            self._iterator = watch.current.iterate(self, lambda: iterator)
        except Exception:
            self.shutdown()
            raise
        self._taken = self._finished = self.paused = False

    def _next_seed(self) -> int:
        """Return the seed of the next epoch."""
        if self._seed is None:
            return random_seed()
        self._epoch += 1
        return epoch_seed(self._seed, self._epoch - 1)

    def _drop_delivered(self, iterator: Iterator[object]) -> None:
        """Drop the delivered elements that an iterator yields again, because the service could not begin after them."""
        running = find_running(self.reading_service)
        if running is not None:
            used, dropped = self._used(running)
            if running.begun != used:
                raise StateError(
                    f"the state is damaged, or belongs to another graph: {self._delivered} elements of the loader are made "
                    f"from {used} of the reading service, which begins after {running.begun}."
                )
        else:
            dropped = 0 if keeps_position(self.reading_service) else self._delivered
        drop(iterator, dropped)

    def _used(self, running: RunningService) -> tuple[int, int]:
        """Return how many of its elements a service need not give again, and how many of the loader's are then dropped."""
        pipe, count = trace(self.datapipe, self._delivered)[-1]  # type: ignore[arg-type]
        return (count, 0) if pipe is running.stream else (0, self._delivered)

    def _initialize(self, state: object = None) -> None:
        if self._initialized:
            return
        if self.datapipe is None:
            raise GraphError("the DataLoader2 has no graph. Pass datapipe=, or call load_state_dict.")
        self.datapipe = initialized(self.reading_service, clone(self.datapipe), state)
        self._initialized = True

    def _next(self, number: int) -> Any:
        if number != self._valid or self._iterator is None:
            raise GraphError(
                "this iterator has been invalidated: the DataLoader2 was shut down, or has a newer iterator. It has one "
                "iterator at a time."
            )
        if self.paused or self._finished:
            raise StopIteration
        try:
            element = next(self._iterator)
        except StopIteration:
            self._finished = True
            self.reading_service.finalize_iteration()
            raise
        except Exception:
            self.shutdown()
            raise
        self._delivered += 1
        self._taken = True
        return element

    def __len__(self) -> int:
        """Return the number of elements in an epoch, for this rank with all its workers.

        Raises:
            TypeError: a pipe of the graph has no length.
        """
        self._initialize()
        return len(self.datapipe)  # type: ignore[arg-type]

    def seed(self, seed: int) -> None:
        """Make the next epoch the first one of a seed.

        Raises:
            ValueError: the seed is not an integer in ``[0, 2**64)``.
        """
        self._seed, self._epoch = check_seed(seed), 0

    def pause(self, paused: bool = True) -> None:
        """Pause or resume the threads of this process. A paused loader yields no elements."""
        self.paused = paused
        for pipe in pipes_of(self.datapipe):  # type: ignore[arg-type]
            act = getattr(type(pipe), "pause" if paused else "resume", None)
            if act is not None:
                act(pipe)

    def shutdown(self) -> None:
        """End the service, with its processes and threads. The loader cannot be iterated afterwards."""
        if self._terminated:
            return
        self._terminated = True
        self._iterator = None
        self.reading_service.finalize_iteration()
        self.reading_service.finalize()

    def __enter__(self) -> "DataLoader2":
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ may have raised
            self.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, after the elements it has delivered, for a checkpoint.

        JSON can save it. It holds the graph, pickled, for `from_state`; not if the graph does not pickle.
        """
        begun = self._loaded
        if begun is None and not self._finished and self._iterator is not None:
            running = find_running(self.reading_service)
            if running is not None:
                running.delivered, _ = self._used(running)
            begun = _Begun(self._epoch_seed, self._delivered, service_state(self.reading_service))
        seed, delivered, service = (None, 0, None) if begun is None else (begun.seed, begun.delivered, begun.service)
        return _FORM.make(
            self._identity(),
            {"seed": self._seed, "epoch": self._epoch, "epoch_seed": seed, "delivered": delivered},
            {"graph": self._serialized, "service": copy.deepcopy(service)},
        )

    def _identity(self) -> dict[str, Any]:
        return {"graph": None if self._source is None else [type(pipe).__name__ for pipe in pipes_of(self._source)]}

    @functools.cached_property
    def _serialized(self) -> str | None:
        try:
            return to_text(pickle.dumps(self._source))
        except Exception:  # pickling may raise anything
            return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state was taken. The next iterator delivers the elements that followed.

        The loader keeps its graph, which must be the graph of the state; then nothing in the state is unpickled. A loader
        without a graph unpickles the state's, which may run any code: load only a state that you trust.

        Raises:
            StateError: it is not a state of a DataLoader2 with this graph, it is damaged, this loader has begun to iterate, or
                neither of them has a graph. The next iterator raises it if the state does not fit the reading service.
        """
        if self._initialized:
            raise StateError("the DataLoader2 has begun to iterate. Load the state into a new one.")
        position, parts = _FORM.read(state_dict, self._identity())
        seed, delivered = position["epoch_seed"], position["delivered"]
        try:
            service = json.loads(json.dumps(parts["service"]))
            for each in (seed, position["seed"]):
                check_seed(0 if each is None else each)
        except (TypeError, ValueError, RecursionError) as error:
            raise StateError(f"the state of a DataLoader2 is damaged: {error}") from error
        if seed is None and (delivered, service) != (0, None):
            raise StateError(f"the state of a DataLoader2 is damaged: it has {delivered} elements, and no epoch.")
        if self.datapipe is None:
            self.datapipe = self._source = self._adapted(_unpickled(parts["graph"]))
        self._seed, self._epoch = position["seed"], position["epoch"]
        self._loaded = None if seed is None else _Begun(seed, delivered, service)

    @classmethod
    def from_state(cls, state: dict[str, Any], reading_service: ReadingServiceInterface | None = None) -> "DataLoader2":
        """Return a loader that continues where a state was taken, with the state's graph.

        The graph is unpickled, which may run any code: load only a state that you trust. As in torchdata.

        Raises:
            StateError: as `load_state_dict`.
        """
        loader = cls(None, None, reading_service)
        loader.load_state_dict(state)
        return loader

    def _restore_checkpoint_beginning_of_epoch(self) -> None:
        """After `load_state_dict`: begin the epoch of the state from its start. Source: torchdata's name."""
        if self._loaded is not None:
            self._loaded = replace(self._loaded, delivered=0, service=None)


def _unpickled(text: str | None) -> DataPipe:
    """Return the graph of a state. It may run any code.

    Raises:
        StateError: the state has no graph, or a damaged one.
    """
    if text is None:
        raise StateError("the graph of the state did not pickle. Make the loader with the same graph, then load the state.")
    try:
        datapipe = pickle.loads(from_text(text))
    except Exception as error:  # unpickling may raise anything
        raise StateError(f"the graph of the state cannot be unpickled: {type(error).__name__}: {error}") from error
    if not isinstance(datapipe, IterDataPipe | MapDataPipe):
        raise StateError(f"the graph of the state is damaged: it is {type(datapipe).__name__}.")
    return datapipe


class DataLoader2Iterator(Iterator[Any]):
    """The iterator of a `DataLoader2`. It is valid until the next one is made."""

    def __init__(self, dataloader: DataLoader2, iterator_id: int) -> None:
        self.dataloader, self.iterator_id = dataloader, iterator_id
        self.limit_threshold: int | None = None
        self.limit_counter = 0

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            GraphError: a newer iterator was made, or the loader was shut down.
            WorkerError: a process died.
        """
        element = self.dataloader._next(self.iterator_id)
        if self.limit_threshold is not None:
            self.limit_counter += 1
            if self.limit_counter >= self.limit_threshold:
                self.limit_counter = 0
                self.dataloader.pause()
        return element

    def limit(self, num_batches: int | None) -> None:
        """Pause after every ``num_batches`` elements, as if the epoch had ended, until `resume`; None for never.

        Raises:
            ValueError: ``num_batches`` is less than 1.
        """
        if num_batches is not None and num_batches < 1:
            raise ValueError(f"num_batches={num_batches} is less than 1.")
        self.limit_threshold, self.limit_counter = num_batches, 0

    def resume(self) -> None:
        """Continue after a pause."""
        if not self.dataloader.paused:
            warnings.warn("the DataLoader2 is not paused, so there is nothing to resume.", stacklevel=2)
        else:
            self.dataloader.pause(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.dataloader._iterator is None:
            raise AttributeError(name)
        return getattr(self.dataloader._iterator, name)
