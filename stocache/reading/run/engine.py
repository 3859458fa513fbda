"""A graph run by worker processes, and by a dispatching one before them where it has a part that cannot be replicated.

NOTE [ One engine ]
    The processes are those of `stocache.DataLoader`, which is torch's: it has requests in flight to each worker in turn, gets
    their answers in that order, and notices who dies. Here a request says how many elements a worker may make, and its answer
    is those that it made: as many as that, or as come in 20 ms. The answers are put together by the elements' keys, so the
    order does not depend on who made how many when. A worker is asked for so many elements at a time as the prefetching
    counts say.

    The dispatching process is one worker of a second such loader, whose answers are parcels for the workers. The main process
    sends them along with its requests, as workers use them up. They are handed out in turn, so where one worker uses up more of
    them than another, as its filter drops more, the other's wait here.
"""

import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from stocache.errors import WorkerError
from stocache.loader.collate import as_is
from stocache.loader.dataloader import DataLoader
from stocache.reading.graph.feed import Parcel, parcel_ref
from stocache.reading.graph.graph import DataPipe
from stocache.reading.run.replica import Elements, InitFn, ReplicaEpoch, ResetFn
from stocache.reading.run.stream import GraphPosition, Stream
from stocache.reading.run.workers import GO_ON, IDLE, Dispatcher, Request, Worker

_IN_FLIGHT = 2  # requests to each worker


class WorkerStream(Stream):
    """A stream that worker processes make.

    Args:
        plan: the parts of the graph, and how they are run.
        max_buffered, length: as for `Stream`.
    """

    # see NOTE [ One engine ]

    def __init__(self, plan: "GraphPlan", max_buffered: int, length: Callable[[], int]) -> None:
        super().__init__(plan.num_workers, max_buffered, length)
        self._plan = plan
        self._all_dispatched = True
        self._rounds: Iterator[Any] = iter(())
        self._problem: Exception | None = None  # of the dispatching process
        self._limit = max(1, -(-plan.prefetch // _IN_FLIGHT))
        options: dict[str, Any] = {"batch_size": None, "prefetch_factor": _IN_FLIGHT, "persistent_workers": True}
        options |= {"multiprocessing_context": plan.context, "collate_fn": as_is}
        self._dispatcher: DataLoader | None = None
        ring = None
        if plan.dispatched is not None:
            dispatcher = Dispatcher(plan.dispatched, plan.num_workers, self._limit, plan.reset_fn)
            rounds = _Requests(self._next_dispatch)
            self._dispatcher = DataLoader(dispatcher, sampler=rounds, num_workers=1, generator=torch.Generator(), **options)
            ring = self._dispatcher.ring
        self._ring = ring
        worker = Worker(plan.end, plan.num_workers, plan.init_fn, plan.reset_fn, ring)
        requests = _Requests(self._next_request)
        self._loader = DataLoader(
            worker, sampler=requests, num_workers=plan.num_workers, generator=torch.Generator(), **options
        )

    def begin_epoch(
        self, epochs: list[ReplicaEpoch], begun: GraphPosition | None, dispatched: ReplicaEpoch | None = None
    ) -> None:
        """Say what the next iteration's epoch is to each worker, and to the dispatching process if there is one."""
        super().begin_epoch(epochs, begun)
        self._dispatched = dispatched

    # ------------------------------------------------------------------------------------------------ asking

    def _next_request(self) -> "Request | None":
        if all(state.ended for state in self._states):
            return None
        worker = next(self._turns)
        state = self._states[worker]
        room = (_IN_FLIGHT + 1) * self._limit - len(state.made) - sum(limit for limit, _ in state.in_flight)
        limit = 0 if state.ended else max(0, min(self._limit, room))
        epoch, state.epoch = state.epoch, None
        parcel = self._parcel_for(state) if self._dispatcher is not None and not state.ended else None
        state.in_flight.append((limit, parcel))
        ref = None if parcel is None or self._ring is None else parcel_ref(parcel, self._ring)
        return Request(worker, limit, epoch, ref, self._all_dispatched and not state.parcels)

    def _parcel_for(self, state: "_WorkerState") -> Parcel | None:
        """Return a parcel for a worker that has used up what it was sent; None for now, or when there are no more."""
        if state.waiting + sum(parcel.size for _, parcel in state.in_flight if parcel is not None) >= self._limit:
            return None
        while not state.parcels and not self._all_dispatched and self._problem is None:
            try:
                parcels, self._all_dispatched, drawn = next(self._rounds)
            except Exception as problem:  # not to be raised within torch, which may be starting workers, and would leave them
                self._problem = problem
                break
            self.drawn = self.drawn or drawn
            for its, parcel in zip(self._states, parcels, strict=True):
                if parcel is not None:
                    its.parcels.append(Parcel(*parcel))
        return state.parcels.popleft() if state.parcels else None

    def _next_dispatch(self) -> bytes | None:
        # The first requests are sent before the workers are started, and ask for nothing: if the process died meanwhile, torch
        # would raise that, by a signal, in the midst of starting them
        number = next(self._dispatches)
        if number < _IN_FLIGHT:
            return IDLE
        if number == _IN_FLIGHT:
            return _pickled(self._dispatched)
        return None if self._all_dispatched else GO_ON

    # ------------------------------------------------------------------------------------------------ putting together

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._merged()
        except RuntimeError as error:  # as which a death is raised, wherever this process is at that moment
            for loader, what in ((self._loader, "a worker"), (self._dispatcher, "the dispatching process")):
                death = None if loader is None else loader.dead_worker()
                if death is not None:
                    raise WorkerError(f"{what} is gone: {death}") from error
            raise

    def _merged(self) -> Iterator[Any]:
        self._states = [_WorkerState(_pickled(epoch)) for epoch in self._epochs]
        self._turns, self._dispatches = itertools.cycle(range(self.workers)), itertools.count()
        self._all_dispatched, self._problem = self._dispatcher is None, None
        self._rounds = iter(()) if self._dispatcher is None else iter(self._dispatcher)
        answers = iter(self._loader)
        heap = [(-1, worker) for worker in range(self.workers)]  # no element of a worker has a lesser key
        while heap:
            least, worker = heap[0]
            state = self._states[worker]
            if not state.made and not state.ended and state.until <= least:
                self._accept(*next(answers))
            elif not state.made and state.ended:
                heapq.heappop(heap)
            elif state.made and state.made[0][0] <= least:
                key, element = state.made.popleft()
                self._give(worker, key * self.workers + worker if state.ordered else None)
                heapq.heapreplace(heap, (state.made[0][0] if state.made else state.until, worker))
                yield element
            else:
                heapq.heapreplace(heap, (state.made[0][0] if state.made else state.until, worker))
        for answer in answers:
            self._accept(*answer)

    def _accept(self, worker: int, waiting: int, made: Elements) -> None:
        """Take over the answer of a worker."""
        state = self._states[worker]
        state.in_flight.popleft()
        state.waiting = waiting
        state.made.extend(zip(made.keys, made.elements, strict=True))
        state.until, state.ended, state.ordered = made.until, made.ended, made.ordered
        self.drawn = self.drawn or made.drawn
        if self._problem is not None:
            problem, self._problem = self._problem, None
            try:
                raise problem
            finally:
                del problem  # it holds this frame

    def close(self) -> None:
        """End the processes."""
        for loader in (self._loader, self._dispatcher):
            if loader is not None:
                loader.end_workers()


@dataclass
class GraphPlan:
    """The parts of a graph, and how they are run.

    Attributes:
        end: of what the workers have replicas of.
        dispatched: the end of what one process runs for all of them; None when there is no such part.
        prefetch: elements that each worker is asked for at a time.
    """

    end: DataPipe
    dispatched: DataPipe | None
    num_workers: int
    context: Any
    prefetch: int
    init_fn: InitFn | None
    reset_fn: ResetFn | None


@dataclass
class _WorkerState:
    """What the main process knows of a worker.

    Attributes:
        epoch: what it is to be told with its next request.
        made: keys and elements that were not delivered yet.
        in_flight: of each request that it has not answered, the limit and the parcel.
        parcels: what it is to be handed next.
        waiting: elements it was handed, and had not taken at its last answer.
        until, ended, ordered: as it said of itself; see `Elements`.
    """

    epoch: bytes | None
    made: deque[tuple[int, Any]] = field(default_factory=deque)
    in_flight: deque[tuple[int, Parcel | None]] = field(default_factory=deque)
    parcels: deque[Parcel] = field(default_factory=deque)
    waiting: int = 0
    until: int = -1
    ended: bool = False
    ordered: bool = False


def _pickled(epoch: ReplicaEpoch | None) -> bytes:
    # here, where it can be raised: what a queue's own thread cannot pickle is lost
    return bytes(ForkingPickler.dumps(epoch))


class _Requests:
    """A sampler whose elements are what a method returns, until None. It does not keep the method's object alive."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = weakref.WeakMethod(ask)

    def __iter__(self) -> Iterator[Any]:
        return iter(self, None)

    def __call__(self) -> Any:
        ask = self._ask()
        return None if ask is None else ask()
