"""DataLoader2: a graph of DataPipes, and the reading service that runs it."""

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
    """Switch all shuffles of a graph on or off: an adapter, for ``datapipe_adapter_fn``.

    Args:
        enable: True to switch them on, and put one at the end where there is none, with a warning; False to switch them off;
            None to leave them.
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
                "the graph has no shuffle, so one is put at its end. Its buffer of 10000 may be too small.", stacklevel=2
            )
            datapipe = datapipe.shuffle()
            shufflers = [datapipe]
        for shuffler in shufflers:
            shuffler.set_shuffle(self.enable)
        return datapipe


class DataLoader2:
    """Iterate a graph of DataPipes as a reading service runs it.

        loader = DataLoader2(pipe, reading_service=MultiProcessingReadingService(num_workers=8))
        for epoch in range(3):
            for batch in loader: ...
        loader.shutdown()

    The order of an epoch depends on the seed and the epoch's number only: those of one seed differ from each other, and are the
    same in every run. It has one iterator at a time. A `state_dict` can be taken after any element, and the loader that it is
    given to delivers the rest of the epoch, and the epochs after it, as this one would.

    Args:
        datapipe: the end of the graph, of which a copy is used; None where `load_state_dict` follows.
        datapipe_adapter_fn: what is called with the graph, and returns the graph; or several.
        reading_service: which service runs it, of which a copy is used; by default an `InProcessReadingService`.

    Attributes:
        reading_service: the copy.

    Source: the interface of torchdata 0.9.
    """

    def __init__(
        self,
        datapipe: DataPipe | None,
        datapipe_adapter_fn: Adapt | Iterable[Adapt] | None = None,
        reading_service: ReadingServiceInterface | None = None,
    ) -> None:
        self._terminated = True  # until there is something to end
        self._adapters = list(datapipe_adapter_fn) if isinstance(datapipe_adapter_fn, Iterable) else [datapipe_adapter_fn]
        self.datapipe = None if datapipe is None else self._adapted(clone(datapipe))
        self.reading_service = completed(copy.deepcopy(reading_service))
        self._source = self.datapipe  # as it was before the service changed it
        self._initialized = False
        self._seed: int | None = None
        self._epoch = 0  # the number of the next one
        self._iterator: Iterator[Any] | None = None  # of the epoch that has begun
        self._iterators = itertools.count()
        self._valid: int | None = None  # the number of the newest: naming it itself would keep both alive
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
        """Begin the next epoch, unless nothing was taken of the one that has begun; an older iterator is invalid then.

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
        self._iterator = None  # which ends what it has in hand
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
            raise GraphError("the DataLoader2 has no graph. Give it one, or load_state_dict.")
        datapipe = clone(self.datapipe)
        if state is None:
            self.datapipe = self.reading_service.initialize(datapipe)
        else:
            self.datapipe = self.reading_service.restore(datapipe, state)  # type: ignore[attr-defined]
        self._initialized = True

    def _next(self, number: int) -> Any:
        if number != self._valid or self._iterator is None:
            raise GraphError(
                "this iterator has been invalidated, as another one was made of the same DataLoader2, or it was shut down. A "
                "DataLoader2 has one iterator at a time."
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
        """Return how many elements an epoch has, of this rank and all its workers.

        Raises:
            TypeError: a pipe of the graph has no length.
        """
        self._initialize()
        return len(self.datapipe)  # type: ignore[arg-type]

    def seed(self, seed: int) -> None:
        """Let the next epoch be the first one of a seed, in ``[0, 2**64)``.

        Raises:
            ValueError: it is no such number.
        """
        self._seed, self._epoch = check_seed(seed), 0

    def pause(self, paused: bool = True) -> None:
        """Let the threads of this process rest, or go on; while paused, iterating stops."""
        self.paused = paused
        for pipe in pipes_of(self.datapipe):  # type: ignore[arg-type]
            act = getattr(type(pipe), "pause" if paused else "resume", None)
            if act is not None:
                act(pipe)

    # ------------------------------------------------------------------------------------------------ ending

    def shutdown(self) -> None:
        """End the service, with its processes and threads. The loader cannot be iterated any more."""
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
        """Return where the loader stands, after the elements it has delivered: for a checkpoint.

        ``serialized_datapipe`` is the pickled graph, for `from_state`; None where it does not pickle.
        """
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        midway = not self._finished and self._iterator is not None
        kept, dropped = self._kept() if midway else (None, 0)
        return {
            "version": _STATE_VERSION,
            "serialized_datapipe": self._serialized,
            "reading_service_state": kept,
            "randomness_state": (self._seed, self._epoch - midway),
            "delivered": self._delivered if midway else 0,
            "dropped": dropped,
        }

    def _kept(self) -> tuple[bytes | None, int]:
        """Return what the service keeps, and how many elements are to be dropped once more when it goes on from there."""
        running, dropped = find_running(self.reading_service), self._delivered
        if running is not None:
            pipe, count = trace(self.datapipe, self._delivered)[-1]  # type: ignore[arg-type]
            traced = pipe is running.stream
            running.delivered, dropped = (count, 0) if traced else (0, self._delivered)
        elif is_checkpointable(self.reading_service):
            dropped = 0  # the user's own knows where it is
        if not is_checkpointable(self.reading_service):
            return None, dropped
        kept: bytes = self.reading_service.checkpoint()  # type: ignore[attr-defined]
        return kept, dropped

    @functools.cached_property
    def _serialized(self) -> bytes | None:
        try:
            return pickle.dumps(self._source)
        except Exception:  # whatever pickling raises
            return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was taken: the next iterator delivers what followed.

        The loader keeps its graph, which must be the one of the state; where it has none, it takes the state's.

        Raises:
            StateError: it is no state of a DataLoader2, this one has begun to iterate, or there is no graph.
        """
        if not isinstance(state_dict, dict) or state_dict.get("version") != _STATE_VERSION or "dropped" not in state_dict:
            raise StateError(f"{state_dict!r:.100} is no state of a DataLoader2 of this version of stocache.")
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
        """Return a loader that goes on where a state was taken, with the graph of that state, which is unpickled.

        Raises:
            StateError: as `load_state_dict`.
        """
        loader = cls(None, None, reading_service)
        loader.load_state_dict(state)
        return loader

    def _restore_checkpoint_beginning_of_epoch(self) -> None:
        """After `load_state_dict`: begin the state's epoch from its beginning. Source: torchdata's name for it."""
        if self._loaded is not None:
            self._loaded |= {"reading_service_state": None, "delivered": 0, "dropped": 0}


class DataLoader2Iterator(Iterator[Any]):
    """The iterator of a `DataLoader2`, until the next one is made."""

    def __init__(self, dataloader: DataLoader2, iterator_id: int) -> None:
        self.dataloader, self.iterator_id = dataloader, iterator_id
        self.limit_threshold: int | None = None
        self.limit_counter = 0

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            GraphError: another iterator was made, or the loader was shut down.
            WorkerError: a process has died.
        """
        element = self.dataloader._next(self.iterator_id)
        if self.limit_threshold is not None:
            self.limit_counter += 1
            if self.limit_counter >= self.limit_threshold:
                self.limit_counter = 0
                self.dataloader.pause()
        return element

    def limit(self, num_batches: int | None) -> None:
        """Pause after every ``num_batches`` elements from now on, as if the epoch had ended, until `resume`; None for never.

        Raises:
            ValueError: ``num_batches`` is less than 1.
        """
        if num_batches is not None and num_batches < 1:
            raise ValueError(f"num_batches={num_batches} is less than 1.")
        self.limit_threshold, self.limit_counter = num_batches, 0

    def resume(self) -> None:
        """Go on after a pause."""
        if not self.dataloader.paused:
            warnings.warn("the DataLoader2 is not paused, so there is nothing to resume.", stacklevel=2)
        else:
            self.dataloader.pause(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.dataloader._iterator is None:
            raise AttributeError(name)
        return getattr(self.dataloader._iterator, name)
