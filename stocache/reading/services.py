"""Reading services, which run the graph of a `DataLoader2`."""

import contextlib
import warnings
from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import multiprocessing

from stocache.cache.disk.cache import DiskCache
from stocache.cache.ragged import RaggedCache
from stocache.errors import ClosedError, StateError
from stocache.reading.graph.caching import put_cache
from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import Adapt, DataPipe, replaced
from stocache.reading.graph.pipes import Prefetcher
from stocache.reading.graph.replay import trace
from stocache.reading.graph.seeds import SeedGenerator, Seeding
from stocache.reading.graph.sharding import CountedPipe, dispatched_end, replicable_end, worker_share
from stocache.reading.interfaces import ReadingServiceInterface
from stocache.reading.ranks import DistributedReadingService
from stocache.reading.run.divide import Length, max_buffered, without_prefetching
from stocache.reading.run.engine import GraphPlan, WorkerStream
from stocache.reading.run.replica import InitFn, Replica, ReplicaEpoch, ResetFn, Resume, WorkerInfo, clock_of
from stocache.reading.run.stream import GraphPosition, LocalStream, Stream
from stocache.reading.states import StatefulService, initialized, is_checkpointable, service_state
from stocache.samples.indices import length_of
from stocache.system import generators as rng
from stocache.system.generators import States
from stocache.system.state import StateForm

_DISPATCHER = (1 << 32) - 1  # stands for a worker number in seeds


_RUNNING = StateForm(
    "reading service",
    1,
    position={"workers": (int,), "counts": (list,), "count": (int,), "passed": (int, NoneType), "drawn": (bool,)},
    parts={"rng_begun": (dict, NoneType), "rng_now": (dict, NoneType)},
)
_SEQUENTIAL = StateForm("SequentialReadingService", 1, {}, {"services": (list,)})


class RunningService(StatefulService):
    """A service that runs the replicable part of a graph. A `Stream` yields its elements to the rest.

    Attributes:
        stream: the stream; None before `initialize`.
        delivered: elements of the stream that were delivered; the loader sets it before a checkpoint.
    """

    stream: Stream | None = None
    _restored: GraphPosition | None = None
    _rng_states: tuple[States, States] | None = None  # at the beginning of the restored epoch, and when the state was taken
    delivered = 0
    _seeding: Seeding

    @property
    def begun(self) -> int:
        """The number of elements after which the current epoch began here."""
        assert self.stream is not None, "it was initialized"
        return self.stream.begun.count

    def json_state(self) -> dict[str, Any]:
        """Return the position of the stream, and the states of this process's generators if it makes the elements."""
        assert self.stream is not None, "it was initialized"
        begun = now = None
        if isinstance(self.stream, LocalStream):
            begun, now = self.stream.rng_states()
        position = self.stream.position(self.delivered)
        if not self.delivered:  # all elements will be made again
            now = begun
        return _RUNNING.make({}, vars(position) | {"counts": list(position.counts)}, {"rng_begun": begun, "rng_now": now})

    def restore_json(self, datapipe: DataPipe, state: object) -> DataPipe:
        """Return the graph, to continue from a state."""
        position, parts = _RUNNING.read(state, {})
        self._restored = GraphPosition.of(position)
        if None not in parts.values():
            self._rng_states = _global_rng(parts["rng_begun"]), _global_rng(parts["rng_now"])
        return self.initialize(datapipe)

    def finalize(self) -> None:
        """End the stream."""
        if self.stream is not None:
            self.stream.close()

    def __del__(self) -> None:
        self.finalize()

    def _put_stream(self, datapipe: DataPipe, part: DataPipe, stream: Stream) -> DataPipe:
        """Replace a part of the graph by a stream."""
        self.stream = stream
        return replaced(datapipe, part, stream)  # type: ignore[no-any-return]

    def _run_here(self, datapipe: DataPipe, init_fn: InitFn | None, reset_fn: ResetFn | None) -> DataPipe:
        """Let this process run the part that workers could run."""
        part = whole = replicable_end(datapipe)
        self._seeding = Seeding(datapipe)
        dispatched = dispatched_end(part)
        if dispatched is not None:
            part = replaced(part, dispatched, CountedPipe(dispatched))
        self._seeding.divide(part)
        buffered, length = max_buffered(datapipe, whole), Length(datapipe, part, 1)
        replica = Replica(worker_share(part, 1, 0), WorkerInfo(1, 0), init_fn, reset_fn, alone=False)
        return self._put_stream(datapipe, whole, LocalStream(replica, buffered, length))

    def _begin_here(self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None) -> None:
        begun, self._restored = self._restored, None
        rng_states, self._rng_states = self._rng_states, None
        (resume,) = [Resume()] if begun is None else begun.resumed(0)
        (seeds,) = self._seeding.draw(seed_generator)
        assert isinstance(self.stream, LocalStream), "it was initialized"
        self.stream.begin_epoch([ReplicaEpoch(seeds, seed_generator, iter_reset_fn, resume)], begun, rng_states)


class InProcessReadingService(RunningService):
    """Run the graph in this process.

    Maps draw their random numbers from this process's generators. A state holds the generators' states, and resuming sets them.

    Args:
        prefetch_cnt: elements that a thread takes in advance.
        init_fn: called once with the graph and a `WorkerInfo`; returns the graph.
        reset_fn: called in each epoch with the graph, a `WorkerInfo` and the `SeedGenerator`; returns the graph.

    Raises:
        ValueError: ``prefetch_cnt`` is negative.
    """

    def __init__(self, prefetch_cnt: int = 0, init_fn: InitFn | None = None, reset_fn: ResetFn | None = None) -> None:
        self._prefetch_cnt = check_count("prefetch_cnt", prefetch_cnt)
        self._init_fn, self._reset_fn = init_fn, reset_fn

    def initialize(self, datapipe: Any) -> DataPipe:
        """Return the graph, all of which this process runs."""
        if self._prefetch_cnt:
            datapipe = Prefetcher(datapipe, self._prefetch_cnt)
        return self._run_here(datapipe, self._init_fn, self._reset_fn)

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None = None) -> Adapt | None:
        """Begin an epoch."""
        self._begin_here(seed_generator, iter_reset_fn)
        return None


class MultiProcessingReadingService(RunningService):
    """Run a replica of the graph in each of several worker processes; one more process runs the dispatched part, if any.

    Elements come in the order of one process if only ``map``, ``filter``, ``collate`` and ``shared_cache`` follow the one
    ``sharding_filter`` or ``sharding_round_robin_dispatch``. Otherwise the workers deliver in turn, and a worker without
    elements is left out.

    Args:
        num_workers: number of workers; 0 runs the graph in this process, with a warning.
        multiprocessing_context: "fork", "spawn" or "forkserver"; None for Python's default.
        worker_prefetch_cnt: elements that each worker may make in advance.
        main_prefetch_cnt: elements that all workers together may make in addition.
        worker_init_fn: called once in each worker with the graph and a `WorkerInfo`; returns the graph.
        worker_reset_fn: called in each epoch, in each worker and in the dispatching process, with the graph, a `WorkerInfo` and
            the `SeedGenerator`; returns the graph.

    Raises:
        ValueError: a count is negative, or the start method does not exist.
        GraphError: at the beginning: the graph cannot be divided.
        WorkerError: while iterating: a process died.
    """

    def __init__(
        self,
        num_workers: int = 0,
        multiprocessing_context: str | None = None,
        worker_prefetch_cnt: int = 10,
        main_prefetch_cnt: int = 10,
        worker_init_fn: InitFn | None = None,
        worker_reset_fn: ResetFn | None = None,
    ) -> None:
        self.num_workers = check_count("num_workers", num_workers)
        if not num_workers:
            warnings.warn("num_workers=0 runs the graph in this process. Use InProcessReadingService.", stacklevel=2)
        if multiprocessing_context not in (None, *multiprocessing.get_all_start_methods()):
            methods = ", ".join(multiprocessing.get_all_start_methods())
            raise ValueError(
                f"multiprocessing_context={multiprocessing_context!r} is not a start method. Use one of {methods}."
            )
        self.multiprocessing_context = multiprocessing_context
        self.worker_prefetch_cnt = check_count("worker_prefetch_cnt", worker_prefetch_cnt)
        self.main_prefetch_cnt = check_count("main_prefetch_cnt", main_prefetch_cnt)
        self.worker_init_fn, self.worker_reset_fn = worker_init_fn, worker_reset_fn

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Return the part of the graph that stays in this process."""
        if not self.num_workers:
            return self._run_here(datapipe, self.worker_init_fn, self.worker_reset_fn)
        part = whole = replicable_end(datapipe)
        buffered, self._seeding = max_buffered(datapipe, part), Seeding(datapipe)
        dispatched, feed = dispatched_end(part), None
        if dispatched is not None:
            feed = Feed(length_of(dispatched))
            part = without_prefetching(replaced(part, dispatched, feed))
        self._part, self._feed = part, feed
        self._seeding.divide(*([part] if dispatched is None else [part, dispatched]))
        prefetch = self.worker_prefetch_cnt + -(-self.main_prefetch_cnt // self.num_workers)
        functions = self.worker_init_fn, self.worker_reset_fn
        plan = GraphPlan(part, dispatched, self.num_workers, self.multiprocessing_context, prefetch, *functions)
        return self._put_stream(datapipe, whole, WorkerStream(plan, buffered, Length(datapipe, part, self.num_workers)))

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None = None) -> Adapt | None:
        """Begin an epoch in the workers."""
        if not self.num_workers:
            self._begin_here(seed_generator, iter_reset_fn)
            return None
        begun, self._restored = self._restored, None
        resumes = [Resume()] * self.num_workers if begun is None else begun.resumed(self.num_workers)
        sent = [0] * self.num_workers
        if begun is not None and self._feed is not None:
            if any((self.worker_init_fn, self.worker_reset_fn, iter_reset_fn)):
                resumes = begun.again(self.num_workers)  # these functions may change the graph
            else:
                sent = [self._used(resume) for resume in resumes]
        for_workers, *for_dispatcher = self._seeding.draw(seed_generator)
        epochs = [
            ReplicaEpoch(for_workers, seed_generator.spawn(worker), iter_reset_fn, resume)
            for worker, resume in enumerate(resumes)
        ]
        unneeded = min(used * self.num_workers + worker for worker, used in enumerate(sent)) if any(sent) else 0
        dispatched = [
            ReplicaEpoch(seeds, seed_generator.spawn(_DISPATCHER), iter_reset_fn, Resume(unneeded), tuple(sent))
            for seeds in for_dispatcher
        ]
        assert isinstance(self.stream, WorkerStream), "it was initialized"
        self.stream.begin_epoch(epochs, begun, *dispatched)
        return None

    def _used(self, resume: Resume) -> int:
        """Return how many elements of its feed a worker will not need again."""
        if resume.again:
            return 0
        end, count = (self._part, resume.count) if resume.taken is None else (clock_of(self._part), resume.taken)
        pipe, used = trace(end, count)[-1]
        return used if pipe is self._feed else 0


class CachingReadingService(ReadingServiceInterface):
    """Cache the results of the graph's last chain of maps before the first random pipe, in shared memory.

        service = SequentialReadingService(CachingReadingService(32), MultiProcessingReadingService(8))

    Elements are numbered before the chain, and pass shuffles and shards with their numbers. So a cached element is neither read
    nor mapped, in any worker. Values and order are the same as with the graph without a cache. Maps behind a shuffle may be
    meant to vary, so they are not cached: put ``shared_cache`` into the graph yourself.

    Args:
        size_limit_gib: GiB for the cache on this machine, as for `RaggedCache`.
        key_fn: called with an element before the chain; returns its key, a unique integer in ``[0, dataset_len)``. None uses
            its number.
        dataset_len: number of elements; by default the length of the pipe before the chain.
        options: ``name`` (one cache for all ranks and jobs of this machine), ``persist``, ``fingerprint``, ``admission``,
            ``codec``, ``allow_pickle``, ``disk`` and ``disk_limit``, as for `CacheOptions`. Results that do not fit in memory
            are kept on the disk, also for later runs with the same fingerprint.

    Attributes:
        cache: the `RaggedCache`; None before the first epoch, or if nothing can be cached, with a warning.
        disk_cache: the `DiskCache` behind it, or None.
    """

    def __init__(
        self,
        size_limit_gib: float | str = "auto",
        key_fn: Callable[[Any], int] | None = None,
        *,
        dataset_len: int | None = None,
        **options: Any,
    ) -> None:
        self._arguments, self._options = (key_fn, size_limit_gib, dataset_len), options
        self.cache: RaggedCache | None = None
        self.disk_cache: DiskCache | None = None

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Return the graph with a cache in it."""
        datapipe, cacher = put_cache(datapipe, *self._arguments, **self._options)
        if cacher is not None:
            self.cache, self.disk_cache = cacher.cache, cacher.disk_cache
        return datapipe

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None = None) -> Adapt | None:
        """Do nothing: this service has no epochs."""
        return iter_reset_fn

    def finalize(self) -> None:
        """Wait until the disk has the results of this process; 60 seconds at most. Workers wait for their own results."""
        if self.disk_cache is not None:
            with contextlib.suppress(ClosedError):
                self.disk_cache.flush()


class SequentialReadingService(StatefulService):
    """Several services in sequence. Each gets the graph that the previous one returned."""

    def __init__(self, *reading_services: ReadingServiceInterface) -> None:
        self.reading_services: tuple[Any, ...] = reading_services

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Return the graph after each service has changed it, in order."""
        for service in self.reading_services:
            datapipe = service.initialize(datapipe)
        return datapipe

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None = None) -> Adapt | None:
        """Begin an epoch in each service, in order."""
        for service in self.reading_services:
            iter_reset_fn = service.initialize_iteration(seed_generator, iter_reset_fn)
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        """End an epoch in each service, the last one first."""
        for service in reversed(self.reading_services):
            service.finalize_iteration()

    def finalize(self) -> None:
        """End each service, the last one first."""
        for service in reversed(self.reading_services):
            service.finalize()

    def json_state(self) -> dict[str, Any]:
        """Return the states of the services."""
        return _SEQUENTIAL.make({}, {}, {"services": list(map(service_state, self.reading_services))})

    def restore_json(self, datapipe: DataPipe, state: object) -> DataPipe:
        """Return the graph after each service has changed it, in order."""
        _, parts = _SEQUENTIAL.read(state, {})
        states = parts["services"]
        if len(states) != len(self.reading_services):
            raise StateError(
                f"the state belongs to {len(states)} reading services in sequence, but here are {len(self.reading_services)}. "
                f"Use the same services."
            )
        for service, its_state in zip(self.reading_services, states, strict=True):
            datapipe = initialized(service, datapipe, its_state)
        return datapipe


def _global_rng(saved: object) -> States:
    """Return saved states of the global generators.

    Raises:
        StateError: they are damaged, or numpy's global generator is of a different kind here.
    """
    taken = rng.checked(saved)
    kind, here = taken["numpy"]["bit_generator"], rng.states()["numpy"]["bit_generator"]
    if kind != here or taken["generators"]:
        raise StateError(f"the state has other random number generators: numpy's is {kind}, and here it is {here}.")
    return taken


def keeps_position(service: object) -> bool:
    """Whether a service continues from its own position, or one in a sequence does."""
    if isinstance(service, SequentialReadingService):
        return any(map(keeps_position, service.reading_services))
    return is_checkpointable(service) and not isinstance(service, DistributedReadingService)


def find_running(service: object) -> RunningService | None:
    """Return the service that runs the graph, also inside a sequence; None if it is the user's own."""
    if isinstance(service, RunningService):
        return service
    within = map(find_running, service.reading_services) if isinstance(service, SequentialReadingService) else ()
    return next((found for found in within if found is not None), None)


def completed(service: ReadingServiceInterface | None) -> ReadingServiceInterface:
    """Return a service that runs the graph: with an `InProcessReadingService` added if no other does."""
    services = service.reading_services if isinstance(service, SequentialReadingService) else (service,)
    if service is None or not any(services):
        return InProcessReadingService()
    if all(isinstance(each, DistributedReadingService | CachingReadingService) for each in services):
        return SequentialReadingService(*services, InProcessReadingService())
    return service


def check_count(name: str, count: int) -> int:
    """Return a count that was checked.

    Raises:
        ValueError: it is not an integer of 0 or more.
    """
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{name}={count!r} must be an integer of 0 or more.")
    return count
