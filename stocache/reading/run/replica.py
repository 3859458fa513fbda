"""Run one replica of a graph in a process: seed it for each epoch, resume it, and take elements from it.

NOTE [ Keys of elements ]
    Each element has a key. The elements of all workers are delivered in the order of (key, worker). If the graph has one shard,
    and makes at most one element from each that the shard passes on, then the key counts the elements the shard passed on: the
    order is the order of the graph before sharding, for any number of workers. Otherwise the key counts the elements of the
    worker: the workers deliver in turn.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data.datapipes.iter import Collator, Filter, Mapper

from stocache.errors import GraphError, WorkerError
from stocache.reading.graph.caching import SharedCacher
from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import Adapt, DataPipe, is_random, pipes_of
from stocache.reading.graph.replay import drop, fast_forward, rewind
from stocache.reading.graph.seeds import SeedGenerator, holds_no_generator, random_pipes
from stocache.reading.graph.sharding import CountedPipe, Shard
from stocache.system.background import start_daemon
from stocache.system.generators import Kept

_SLICE_S = 0.02  # a worker then sends the elements it has, so that slow elements come one by one
_AT_MOST_ONE = (Mapper, Collator, Filter, SharedCacher)


@dataclass(frozen=True)
class WorkerInfo:
    """The worker that calls a user's function.

    Attributes:
        num_workers: number of workers.
        worker_id: number of this worker, from 0.
    """

    num_workers: int
    worker_id: int


InitFn: TypeAlias = Callable[[DataPipe, WorkerInfo], DataPipe]
ResetFn: TypeAlias = Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe]


@dataclass(frozen=True)
class Resume:
    """The position from which a replica continues.

    Attributes:
        count: elements it has made.
        taken: elements that its shard has passed on for them; None if keys do not count these.
        again: whether all elements must be made again, because random numbers were drawn for them.
    """

    count: int = 0
    taken: int | None = None
    again: bool = False


@dataclass(frozen=True)
class ReplicaEpoch:
    """The instructions for a replica at the beginning of an epoch.

    Attributes:
        seeds: for its random pipes, in the order of `random_pipes`; None for a seed drawn from ``generator``.
        generator: the replica's generator of seeds.
        change: a function to apply to the graph.
        resume: where to begin.
        sent: for the dispatching process: how many of its first elements each worker does not need.
    """

    seeds: list[int | None]
    generator: SeedGenerator
    change: Adapt | None = None
    resume: Resume = Resume()
    sent: tuple[int, ...] = ()


class Elements(NamedTuple):
    """Elements that a replica has made.

    Attributes:
        elements, keys: see NOTE [ Keys of elements ].
        until: the least key that the next element can have.
        ended: whether these are the last elements.
        ordered: whether keys count the elements that the shard passed on.
        drawn: whether random numbers were drawn in this epoch.
    """

    elements: list[Any]
    keys: list[int]
    until: int
    ended: bool
    ordered: bool
    drawn: bool


class Replica:
    """A graph in one process.

    Args:
        datapipe: the last pipe of the graph.
        info: the number of this worker.
        init_fn, reset_fn: the user's functions, called once and in each epoch.
        alone: whether the process is a worker; then the global random number generators are seeded.

    Attributes:
        end: the last pipe of the graph as it is now.
        iterator: of the current epoch.
        count: elements made in this epoch.
        clock: the pipe whose elements keys count, or None; see NOTE [ Keys of elements ].
        replaying: returns the context in which elements are made again.
    """

    def __init__(
        self, datapipe: DataPipe, info: WorkerInfo, init_fn: InitFn | None, reset_fn: ResetFn | None, alone: bool
    ) -> None:
        self._random = random_pipes(datapipe)
        self.end = datapipe if init_fn is None else checked(init_fn(datapipe, info), init_fn)
        self._info, self._reset_fn, self._alone = info, reset_fn, alone
        self.iterator: Iterator[Any] = iter(())
        self.replaying: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def begin(self, epoch: ReplicaEpoch) -> None:
        """Begin an epoch."""
        self.close()
        if self._alone:
            random.seed(epoch.generator.generate_seed())
            torch.manual_seed(epoch.generator.generate_seed())
            np.random.seed(epoch.generator.generate_seed() >> 32)
        end = rewind(self.end)
        seeds = {id(pipe): seed for pipe, seed in zip(self._random, epoch.seeds, strict=True)}
        for pipe in pipes_of(end):
            if is_random(pipe):
                seed = seeds.get(id(pipe))
                pipe.set_seed(epoch.generator.generate_seed() if seed is None else seed)
        if epoch.change is not None:
            end = checked(epoch.change(end), epoch.change)
        if self._reset_fn is not None:
            end = checked(self._reset_fn(end, self._info, epoch.generator), self._reset_fn)
        self.clock = clock_of(end)
        self._watch, self._drawn, self._ended = Kept(), False, False
        self.end = end
        self.iterator = self._resumed(end, epoch.resume)

    def _resumed(self, end: DataPipe, resume: Resume) -> Iterator[Any]:
        self.count = resume.count
        if resume.again:
            return self._replayed(end, resume.count)
        if resume.taken is None or self.clock is None:
            self.end = fast_forward(end, resume.count)
        else:
            fast_forward(self.clock, resume.taken)
        return iter(self.end)

    def _replayed(self, end: DataPipe, count: int) -> Iterator[Any]:
        iterator = iter(end)
        with self.replaying():
            drop(iterator, count)
        self.replaying = contextlib.nullcontext
        yield from iterator

    def close(self) -> None:
        """End the epoch."""
        close = getattr(self.iterator, "close", None)
        if close is not None:
            close()
        self.iterator = iter(())

    @property
    def key(self) -> int:
        """The key of the newest element."""
        return (self.count if self.clock is None else self.clock.taken) - 1

    def take(self, limit: int) -> Elements:
        """Return the next elements: at most ``limit``, made in `_SLICE_S` seconds, or one if it takes longer."""
        self._begin_slice(limit)
        self._work()
        return self._result()

    def _begin_slice(self, limit: int) -> None:
        self._elements: list[Any] = []
        self._keys: list[int] = []
        self._limit, self._until = limit, perf_counter() + _SLICE_S

    def _work(self) -> None:
        while len(self._elements) < self._limit and not self._ended:
            try:
                element = next(self.iterator)
            except StopIteration:
                self._ended = True
                return
            self.count += 1
            self._elements.append(element)
            self._keys.append(self.key)
            if perf_counter() > self._until:
                return

    def _result(self) -> Elements:
        return Elements(self._elements, self._keys, self.key + 1, self._ended, self.clock is not None, self.drawn())

    def drawn(self) -> bool:
        """Whether random numbers were drawn from the global generators in this epoch."""
        self._drawn = self._drawn or self._watch.drawn()
        return self._drawn


class FedReplica(Replica):
    """A replica of the part behind the dispatched part. Dispatched elements come with the requests for its own elements.

    The graph reads dispatched elements whenever it needs them. So it runs in a thread, which waits when the feed is empty. The
    two threads take turns, and never run at the same time. No third thread may read the feed.
    """

    def __init__(self, feed: Feed, *args: Any) -> None:
        super().__init__(*args)
        self.feed = feed
        feed.on_empty = self._wait_for_feed
        self._go, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, epoch: ReplicaEpoch) -> None:
        """Begin an epoch."""
        super().begin(epoch)
        self.feed.begin()
        self._left = False
        self._thread = start_daemon(self._run, (), "stocache-replica", self._leave)

    def take(self, limit: int) -> Elements:
        """Return the next elements, as many as the elements in the feed allow."""
        if self._thread is None:
            raise WorkerError("the epoch could not begin. An earlier error says why.")
        self._begin_slice(limit)
        self._run_slice()
        return self._result()

    def close(self) -> None:
        """End the epoch."""
        if self._thread is not None:
            self._leave()
            self._thread.join()
            self._thread = None
        super().close()

    def _leave(self) -> None:
        self._left = True
        self._go.release()

    def _run_slice(self) -> None:
        self._go.release()
        self._rest.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # it holds this frame

    def _run(self) -> None:
        torch.set_num_threads(1)  # torch sets this for a worker's first thread only
        while True:
            self._go.acquire()
            if self._left:
                return
            try:
                self._work()
            except _EpochLeftError:
                return
            except BaseException as error:
                self._error = error
            self._rest.release()

    def _wait_for_feed(self) -> None:
        if threading.current_thread() is not self._thread:
            raise GraphError("a pipe with a thread of its own reads dispatched elements. Put it before the dispatching pipe.")
        self._rest.release()
        self._go.acquire()
        if self._left:
            raise _EpochLeftError


class _EpochLeftError(BaseException):
    """The epoch ends while a graph waits for its feed."""


def clock_of(datapipe: DataPipe) -> Any:
    """Return the one shard or feed whose elements keys count; None if the graph has no such pipe.

    A function with a random number generator can make different results from one element, so it has none before it.
    """
    # see NOTE [ Keys of elements ]
    pipe: Any = datapipe
    while type(pipe) in _AT_MOST_ONE and holds_no_generator(getattr(pipe, "filter_fn", None) or getattr(pipe, "fn", None)):
        pipe = pipe.datapipe
    one_of_its_kind = isinstance(pipe, Feed | CountedPipe) or (isinstance(pipe, Shard) and pipe.sharding_group_filter is None)
    return pipe if one_of_its_kind else None


def checked(datapipe: Any, function: Any) -> Any:
    """Return the graph that a user's function returned.

    Raises:
        GraphError: it is not a graph.
    """
    try:
        pipes_of(datapipe)
    except GraphError:
        raise GraphError(f"{function} returned {type(datapipe).__name__}. It must return the last pipe of a graph.") from None
    return datapipe
