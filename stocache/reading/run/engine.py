"""Run a graph in worker processes, and its part that cannot be replicated in one dispatching process before them.

NOTE [ One engine ]
    The processes belong to a `stocache.DataLoader`, which is torch's. It sends requests to the workers in turn, gets the
    answers in that order, and notices when a worker dies. A request says how many elements the worker may make, a number that
    follows from the prefetch counts. The answer holds the elements made, up to that number or for ``_SLICE_S``. The main
    process merges the answers by the keys of the elements, so the order does not depend on the speed of the workers.

    The dispatching process is the one worker of a second such loader. Its answers are parcels for the workers. The main process
    sends a parcel along with a request when a worker needs more elements. Elements are dispatched in turn. If one worker uses
    more of them than another, because its filter drops more, the parcels of the other wait here.
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
from stocache.loader.engine import engine_of
from stocache.reading.graph.feed import Parcel, parcel_ref
from stocache.reading.graph.graph import DataPipe
from stocache.reading.run.replica import Elements, InitFn, ReplicaEpoch, ResetFn
from stocache.reading.run.stream import GraphPosition, Stream
from stocache.reading.run.workers import GO_ON, IDLE, Dispatcher, Request, WorkerPart

_IN_FLIGHT = 2  # unanswered requests to each worker


class WorkerStream(Stream):
    """A stream whose elements worker processes make.

    Args:
        plan: the parts of the graph, and how to run them.
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
        self._dispatcher: DataLoader[Any] | None = None
        ring = None
        if plan.dispatched is not None:
            dispatcher = Dispatcher(plan.dispatched, plan.num_workers, self._limit, plan.reset_fn)
            rounds = _Requests(self._next_dispatch)
            self._dispatcher = DataLoader(dispatcher, sampler=rounds, num_workers=1, generator=torch.Generator(), **options)
            ring = engine_of(self._dispatcher).ring
        self._ring = ring
        worker = WorkerPart(plan.end, plan.num_workers, plan.init_fn, plan.reset_fn, ring)
        requests = _Requests(self._next_request)
        self._loader = DataLoader(
            worker, sampler=requests, num_workers=plan.num_workers, generator=torch.Generator(), **options
        )

    def begin_epoch(
        self, epochs: list[ReplicaEpoch], begun: GraphPosition | None, dispatched: ReplicaEpoch | None = None
    ) -> None:
        """Set the next epoch: the instructions for each worker, and for the dispatching process if there is one."""
        super().begin_epoch(epochs, begun)
        self._dispatched = dispatched

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
        """Return a parcel for a worker that has used most of its elements; None if it has enough, or no more come."""
        if state.waiting + sum(parcel.size for _, parcel in state.in_flight if parcel is not None) >= self._limit:
            return None
        while not state.parcels and not self._all_dispatched and self._problem is None:
            try:
                parcels, self._all_dispatched, drawn = next(self._rounds)
            except Exception as problem:  # not raised here: torch may be starting workers, and would abandon them
                self._problem = problem
                break
            self.drawn = self.drawn or drawn
            for receiver, parcel in zip(self._states, parcels, strict=True):
                if parcel is not None:
                    receiver.parcels.append(Parcel(*parcel))
        return state.parcels.popleft() if state.parcels else None

    def _next_dispatch(self) -> bytes | None:
        # The first requests come before the workers are started, and ask for nothing. If the process died at work meanwhile,
        # torch would raise that in a signal handler, while it starts the workers
        number = next(self._dispatches)
        if number < _IN_FLIGHT:
            return IDLE
        if number == _IN_FLIGHT:
            return _pickled(self._dispatched)
        return None if self._all_dispatched else GO_ON

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._merged()
        except RuntimeError as error:  # raised for a dead worker, wherever this process is at that moment
            for loader, process in ((self._loader, "a worker"), (self._dispatcher, "the dispatching process")):
                death = None if loader is None else engine_of(loader).dead_worker()
                if death is not None:
                    raise WorkerError(f"{process} is gone: {death}") from error
            raise

    def _merged(self) -> Iterator[Any]:
        self._states = [_WorkerState(_pickled(epoch)) for epoch in self._epochs]
        self._turns, self._dispatches = itertools.cycle(range(self.workers)), itertools.count()
        self._all_dispatched, self._problem = self._dispatcher is None, None
        self._rounds = iter(()) if self._dispatcher is None else iter(self._dispatcher)
        answers = iter(self._loader)
        heap = [(-1, worker) for worker in range(self.workers)]  # least key of the next element of each worker
        while heap:
            least, worker = heap[0]
            state = self._states[worker]
            if not state.made and not state.ended and state.until <= least:
                self._accept(*next(answers))
            elif not state.made and state.ended:
                heapq.heappop(heap)
            elif state.made and state.made[0][0] <= least:
                key, element = state.made.popleft()
                self._give(worker, key * self.workers + worker + 1 if state.ordered else None)
                heapq.heapreplace(heap, (state.made[0][0] if state.made else state.until, worker))
                yield element
            else:
                heapq.heapreplace(heap, (state.made[0][0] if state.made else state.until, worker))
        for answer in answers:
            self._accept(*answer)

    def _accept(self, worker: int, waiting: int, made: Elements) -> None:
        """Store the answer of a worker."""
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
    """The parts of a graph, and how to run them.

    Attributes:
        end: the last pipe of the workers' part.
        dispatched: the last pipe of the dispatching process's part; None without such a part.
        num_workers: number of workers.
        context: start method of the processes.
        prefetch: elements that each worker may make in advance.
        init_fn, reset_fn: the user's functions, called in each worker.
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
    """The main process's record of a worker.

    Attributes:
        epoch: the pickled epoch to send with its next request, if any.
        made: keys and elements that were not delivered yet.
        in_flight: limit and parcel of each unanswered request.
        parcels: parcels to send to it next.
        waiting: dispatched elements that it had not used at its last answer.
        until, ended, ordered: from its last answer; see `Elements`.
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
    # here, so that errors are raised: a queue pickles in a thread of its own, where they are lost
    return bytes(ForkingPickler.dumps(epoch))


class _Requests:
    """A sampler that calls a method for each element, until it returns None. It does not keep the method's object alive."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = weakref.WeakMethod(ask)

    def __iter__(self) -> Iterator[Any]:
        return iter(self, None)

    def __call__(self) -> Any:
        ask = self._ask()
        return None if ask is None else ask()
