"""DataLoader2 iterates a graph of DataPipes through a reading service."""

import contextlib
import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import MapDataPipe

from stocache.errors import GraphError, StateError
from stocache.reading.graph.graph import Adapt, DataPipe, clone, is_random, pipes_of
from stocache.reading.graph.pipes import InOrder
from stocache.reading.graph.replay import trace
from stocache.reading.graph.seeds import SeedGenerator, check_seed, epoch_seed, random_seed
from stocache.reading.interfaces import ReadingServiceInterface
from stocache.reading.services import completed, find_running, is_checkpointable

_STATE_VERSION = 1


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

    The order of an epoch depends only on the seed and the number of the epoch. The epochs of one seed differ from each other,
    and are the same in every run. A loader has one iterator at a time. A `state_dict` can be taken after any element. A loader
    that loads it delivers the rest of the epoch, and the following epochs, as this one would.

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
        self._seed: int | None = None
        self._epoch = 0  # the number of the next epoch
        self._iterator: Iterator[Any] | None = None  # of the current epoch
        self._iterators = itertools.count()
        self._valid: int | None = None  # the number of the newest iterator: a reference to it would be a cycle
        self._delivered = 0
        self._finished = True
        self._loaded: dict[str, Any] | None = None
        self.paused = False
        self._terminated = False

    def _adapted(self, datapipe: DataPipe) -> DataPipe:
        if isinstance(datapipe, MapDataPipe):
            datapipe = InOrder(datapipe)
        for adapt in self._adapters:
            datapipe = datapipe if adapt is None else adapt(datapipe)
        return datapipe

    # ------------------------------------------------------------------------------------------------ iterating

    def __iter__(self) -> "DataLoader2Iterator":
        """Begin the next epoch, unless no element of the current one was taken. Older iterators become invalid.

        Raises:
            GraphError: the loader is shut down, or has no graph.
        """
        if self._terminated:
            raise GraphError("the DataLoader2 is shut down. Make another one.")
        if self._iterator is None or self._delivered or self._finished:
            self._begin()
        self._valid = next(self._iterators)
        return DataLoader2Iterator(self, self._valid)

    def _begin(self) -> None:
        self._iterator = None  # this ends the older iteration
        loaded, self._loaded = self._loaded, None
        if self._seed is None:
            self._seed = random_seed()
        generator = SeedGenerator(epoch_seed(self._seed, self._epoch))
        try:
            self._initialize(None if loaded is None else loaded["reading_service_state"])
            change = self.reading_service.initialize_iteration(generator)
            if change is not None:
                self.datapipe = change(self.datapipe)  # type: ignore[arg-type]
            self._iterator = iter(self.datapipe)  # type: ignore[arg-type]
            self._delivered = 0 if loaded is None else loaded["delivered"]
            for _ in itertools.islice(self._iterator, 0 if loaded is None else loaded["dropped"]):
                pass
        except Exception:
            self.shutdown()
            raise
        self._epoch += 1
        self._finished = self.paused = False

    def _initialize(self, state: bytes | None = None) -> None:
        if self._initialized:
            return
        if self.datapipe is None:
            raise GraphError("the DataLoader2 has no graph. Pass datapipe=, or call load_state_dict.")
        datapipe = clone(self.datapipe)
        if state is None:
            self.datapipe = self.reading_service.initialize(datapipe)
        else:
            self.datapipe = self.reading_service.restore(datapipe, state)  # type: ignore[attr-defined]
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
        """Pause or resume the threads of this process. A paused loader gives no elements."""
        self.paused = paused
        for pipe in pipes_of(self.datapipe):  # type: ignore[arg-type]
            act = getattr(type(pipe), "pause" if paused else "resume", None)
            if act is not None:
                act(pipe)

    # ------------------------------------------------------------------------------------------------ ending

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

    # ------------------------------------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, after the elements it has delivered, for a checkpoint.

        ``serialized_datapipe`` is the pickled graph, for `from_state`; None if the graph does not pickle.
        """
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        midway = not self._finished and self._iterator is not None
        kept, dropped = self._service_state() if midway else (None, 0)
        return {
            "version": _STATE_VERSION,
            "serialized_datapipe": self._serialized,
            "reading_service_state": kept,
            "randomness_state": (self._seed, self._epoch - midway),
            "delivered": self._delivered if midway else 0,
            "dropped": dropped,
        }

    def _service_state(self) -> tuple[bytes | None, int]:
        """Return the checkpoint of the service, and the number of elements to drop after it resumes."""
        running, dropped = find_running(self.reading_service), self._delivered
        if running is not None:
            pipe, count = trace(self.datapipe, self._delivered)[-1]  # type: ignore[arg-type]
            traced = pipe is running.stream
            running.delivered, dropped = (count, 0) if traced else (0, self._delivered)
        elif is_checkpointable(self.reading_service):
            dropped = 0  # a service of the user restores its own position
        if not is_checkpointable(self.reading_service):
            return None, dropped
        kept: bytes = self.reading_service.checkpoint()  # type: ignore[attr-defined]
        return kept, dropped

    @functools.cached_property
    def _serialized(self) -> bytes | None:
        try:
            return pickle.dumps(self._source)
        except Exception:  # pickling may raise anything
            return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state was taken. The next iterator delivers the elements that followed.

        The loader keeps its graph, which must be that of the state. A loader without a graph takes the state's.

        Raises:
            StateError: it is not a state of a DataLoader2, this loader has begun to iterate, or neither has a graph.
        """
        if not isinstance(state_dict, dict) or state_dict.get("version") != _STATE_VERSION or "dropped" not in state_dict:
            raise StateError(f"not a DataLoader2 state of this version of stocache: {state_dict!r:.100}.")
        if self._initialized:
            raise StateError("the DataLoader2 has begun to iterate. Load the state into a new one.")
        if self.datapipe is None:
            serialized = state_dict["serialized_datapipe"]
            if serialized is None:
                raise StateError(
                    "the graph of the state did not pickle. Make the loader with the same graph, then load the state."
                )
            self.datapipe = self._source = self._adapted(pickle.loads(serialized))
        self._seed, self._epoch = state_dict["randomness_state"]
        self._loaded = copy.deepcopy(state_dict)

    @classmethod
    def from_state(cls, state: dict[str, Any], reading_service: ReadingServiceInterface | None = None) -> "DataLoader2":
        """Return a loader that continues where a state was taken, with the state's graph, which is unpickled.

        Raises:
            StateError: as `load_state_dict`.
        """
        loader = cls(None, None, reading_service)
        loader.load_state_dict(state)
        return loader

    def _restore_checkpoint_beginning_of_epoch(self) -> None:
        """After `load_state_dict`: begin the epoch of the state from its start. Source: torchdata's name."""
        if self._loaded is not None:
            self._loaded |= {"reading_service_state": None, "delivered": 0, "dropped": 0}


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
