"""A replica of a graph at work in one process: seeded for each epoch, brought to where it was, and asked for its elements.

NOTE [ Keys ]
    Each element has a key, and the elements of all workers are delivered in the order of (key, worker). Where the graph gives
    at most one element for each that its one shard lets through, the key counts the latter, so that the order is the one of the
    graph before it was sharded, whatever the number of workers. Elsewhere it counts the elements of the worker: they are
    delivered in turn.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data.datapipes.iter import Collator, Filter, Mapper

from stocache.errors import GraphError, WorkerError
from stocache.reading.graph.caching import SharedCacher
from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import Adapt, DataPipe, is_random, pipes_of
from stocache.reading.graph.replay import fast_forward, rewind
from stocache.reading.graph.seeds import SeedGenerator, is_pure, random_pipes
from stocache.reading.graph.sharding import Counted, Shard
from stocache.system.rng import RngMonitor

_SLICE_S = 0.02  # after which a worker hands over what it has, so that slow elements come one by one
_AT_MOST_ONE = (Mapper, Collator, Filter, SharedCacher)


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker is told of itself.

    Attributes:
        num_workers: how many there are.
        worker_id: which one it is, from 0.
    """

    num_workers: int
    worker_id: int


InitFn: TypeAlias = Callable[[DataPipe, WorkerInfo], DataPipe]
ResetFn: TypeAlias = Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe]


@dataclass(frozen=True)
class Resume:
    """Where a replica is to go on.

    Attributes:
        count: elements it has given.
        taken: elements its shard has let through for them; None where that does not tell them.
        again: whether all of them must be made again, as random numbers were drawn on the way.
    """

    count: int = 0
    taken: int | None = None
    again: bool = False


@dataclass(frozen=True)
class ReplicaEpoch:
    """What a replica is told at the beginning of an epoch.

    Attributes:
        seeds: for its random pipes, in the order of `random_pipes`; None where the pipe's is drawn from ``generator``.
        generator: of the replica.
        change: what is to be done to the graph.
        resume: where it begins.
        sent: to the dispatching process: how many of its elements each worker does not need, from the beginning.
    """

    seeds: list[int | None]
    generator: SeedGenerator
    change: Adapt | None = None
    resume: Resume = Resume()
    sent: tuple[int, ...] = ()


class Elements(NamedTuple):
    """What a replica has made.

    Attributes:
        elements, keys: see NOTE [ Keys ].
        until: the least key that the next element can have.
        ended: whether there are no more.
        ordered: whether keys count what the shard let through.
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
        datapipe: its end.
        info: which worker this is.
        init_fn, reset_fn: the user's; called once, and in each epoch.
        alone: whether the process is the worker's own, so that the global random number generators are seeded.

    Attributes:
        end: of the graph as it is now.
        iterator: of the epoch that is made.
        count: elements that were made in this epoch.
        replaying: surrounds the making of elements that were made before.
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
        self._watch, self._drawn, self._ended = RngMonitor(), False, False
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
            for _ in islice(iterator, count):
                pass
        self.replaying = contextlib.nullcontext
        yield from iterator

    def close(self) -> None:
        """Leave the epoch."""
        close = getattr(self.iterator, "close", None)
        if close is not None:
            close()
        self.iterator = iter(())

    @property
    def key(self) -> int:
        """The key of the newest element."""
        return (self.count if self.clock is None else self.clock.taken) - 1

    def take(self, limit: int) -> Elements:
        """Return the next elements: ``limit`` of them at most, or those that come in 20 ms, or one if that takes longer."""
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
        self._drawn = self._drawn or self._watch.changed()
        return self._drawn


class FedReplica(Replica):
    """A replica of what comes after a dispatched part, whose elements are handed to it with the requests for its own.

    Its graph asks for them when it wants to, so it runs in a thread, which rests where the feed is empty: the two threads take
    turns, and never run at the same time. So there must be no third one that reads it.
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
        self._thread = threading.Thread(target=self._run, name="stocache-replica", daemon=True)
        self._thread.start()

    def take(self, limit: int) -> Elements:
        """Return the next elements, as many as the feed allows."""
        if self._thread is None:
            raise WorkerError("the epoch could not begin, of which an earlier error tells.")
        self._begin_slice(limit)
        self._run_slice()
        return self._result()

    def close(self) -> None:
        """Leave the epoch."""
        if self._thread is not None:
            self._left = True
            self._go.release()
            self._thread.join()
            self._thread = None
        super().close()

    def _run_slice(self) -> None:
        self._go.release()
        self._rest.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # which holds this frame

    def _run(self) -> None:
        torch.set_num_threads(1)  # which torch says to a worker's first thread only
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
            raise GraphError("a pipe with a thread of its own reads what is dispatched. Put it before the dispatching pipe.")
        self._rest.release()
        self._go.acquire()
        if self._left:
            raise _EpochLeftError


class _EpochLeftError(BaseException):
    """The epoch is left while a graph waits for its feed."""


def clock_of(datapipe: DataPipe) -> Any:
    """Return the one shard, or feed, whose elements tell those at the end of a graph; None where there is none.

    Functions with random numbers of their own make others of the same element: behind them, there is none.
    """
    # see NOTE [ Keys ]
    pipe: Any = datapipe
    while type(pipe) in _AT_MOST_ONE and is_pure(getattr(pipe, "filter_fn", None) or getattr(pipe, "fn", None)):
        pipe = pipe.datapipe
    one_of_its_kind = isinstance(pipe, Feed | Counted) or (isinstance(pipe, Shard) and pipe.sharding_group_filter is None)
    return pipe if one_of_its_kind else None


def checked(datapipe: Any, function: Any) -> Any:
    """Return what a user's function made of a graph.

    Raises:
        GraphError: it is no graph.
    """
    try:
        pipes_of(datapipe)
    except GraphError:
        raise GraphError(f"{function} returned {type(datapipe).__name__}, and not the end of a graph of DataPipes.") from None
    return datapipe
