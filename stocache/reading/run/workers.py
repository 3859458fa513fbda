"""Define datasets that run in worker processes. Their indices are requests, for elements or for parcels of elements."""

import pickle
import traceback
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset

from stocache.errors import WorkerError
from stocache.reading.graph.feed import Feed, ParcelRef, ParcelWriter, unpack_parcel
from stocache.reading.graph.graph import DataPipe, pipes_of
from stocache.reading.graph.sharding import worker_share
from stocache.reading.run.replica import Elements, FedReplica, InitFn, Replica, ResetFn, WorkerInfo
from stocache.shm.ring.ring import Ring

IDLE, GO_ON = b"idle", b"go on"  # requests to the dispatching process that do not begin an epoch


def caught(error: Exception, where: str) -> ExceptionWrapper:
    """Return an error as torch sends it from its workers: it is raised in the main process, with its traceback and place.

    A type that the main process cannot have becomes a `WorkerError`. Source: the words of torchdata 0.9 for the place.
    """
    if isinstance(error, StopIteration) or not _pickles(type(error)):
        error = WorkerError(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
    return ExceptionWrapper((type(error), error, error.__traceback__), f"in {where}")  # type: ignore[no-untyped-call]


def _pickles(kind: type) -> bool:
    try:
        return pickle.loads(pickle.dumps(kind)) is kind
    except Exception:
        return False


class Request(NamedTuple):
    """A request to a worker.

    Attributes:
        worker: number of the worker.
        limit: most elements to make.
        epoch: a pickled `ReplicaEpoch` to begin; None to continue.
        parcel: dispatched elements, or None.
        closed: whether no more parcels follow.
    """

    worker: int
    limit: int
    epoch: bytes | None
    parcel: ParcelRef | None
    closed: bool


class WorkerPart(Dataset[Any]):
    """The workers' part of a graph, as a map-style dataset whose indices are requests."""

    def __init__(
        self, end: DataPipe, num_workers: int, init_fn: InitFn | None, reset_fn: ResetFn | None, ring: Ring | None
    ) -> None:
        self._end, self._num_workers, self._init_fn, self._reset_fn, self._ring = end, num_workers, init_fn, reset_fn, ring
        self._replica: Replica | None = None

    def __getitem__(self, request: Request) -> tuple[int, int, Elements] | ExceptionWrapper:
        try:
            return self._answer(request)
        except Exception as error:
            return caught(error, f"worker process {request.worker}")

    def _answer(self, request: Request) -> tuple[int, int, Elements]:
        if request.epoch is not None:
            if self._replica is None:
                self._replica = self._make_replica(request.worker)
            self._replica.begin(pickle.loads(request.epoch))
        replica = self._replica
        assert replica is not None, "the first request begins an epoch"
        if not isinstance(replica, FedReplica):
            return request.worker, 0, replica.take(request.limit)
        elements = [] if request.parcel is None or self._ring is None else unpack_parcel(request.parcel, self._ring)
        replica.feed.add(elements, request.closed)
        made = replica.take(request.limit)
        return request.worker, replica.feed.waiting, made

    def _make_replica(self, worker: int) -> Replica:
        end = worker_share(self._end, self._num_workers, worker)
        arguments = end, WorkerInfo(self._num_workers, worker), self._init_fn, self._reset_fn, True
        feeds: list[Any] = [pipe for pipe in pipes_of(end) if isinstance(pipe, Feed)]
        return FedReplica(feeds[0], *arguments) if feeds else Replica(*arguments)


class Dispatcher(Dataset[Any]):
    """The dispatched part of a graph, as a dataset whose items are rounds of parcels, one parcel for each worker.

    Indices are a pickled `ReplicaEpoch` to begin an epoch, `GO_ON` for the next round, or `IDLE` for an empty round.
    """

    def __init__(self, end: DataPipe, num_workers: int, limit: int, reset_fn: ResetFn | None) -> None:
        self._end, self._num_workers, self._limit, self._reset_fn = end, num_workers, limit, reset_fn
        self._replica: Replica | None = None
        self._packer = ParcelWriter()

    def __getitem__(self, epoch: bytes) -> tuple[list[tuple[Any, ...] | None], bool, bool] | ExceptionWrapper:
        try:
            return self._round(epoch)
        except Exception as error:
            return caught(error, "dispatching process")

    def _round(self, epoch: bytes) -> tuple[list[tuple[Any, ...] | None], bool, bool]:
        if epoch == IDLE:
            return [None] * self._num_workers, False, False
        if epoch != GO_ON:
            if self._replica is None:
                end = worker_share(self._end, 1, 0)
                self._replica = Replica(end, WorkerInfo(self._num_workers, 0), None, self._reset_fn, True)
            self._begun = pickle.loads(epoch)
            self._replica.begin(self._begun)
        replica = self._replica
        assert replica is not None, "the first request begins an epoch"
        made = replica.take(self._limit * self._num_workers)
        first = replica.count - len(made.elements)
        shares: list[list[Any]] = [[] for _ in range(self._num_workers)]
        for number, element in enumerate(made.elements, first):
            turn, worker = divmod(number, self._num_workers)
            if turn >= self._begun.sent[worker]:
                shares[worker].append(element)
        self._packer.clear()
        return [tuple(self._packer.parcel(elements)) if elements else None for elements in shares], made.ended, made.drawn
