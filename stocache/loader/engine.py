"""The engine of a `DataLoader`: what the loader holds and does that is not torch's.

NOTE [ How torch's DataLoader is used ]
    `DataLoader` is a subclass of torch's, and keeps the arguments that the user gave. torch makes each iterator from a
    different loader, an `_IteratedLoader`, which has these arguments, some of them replaced. ``collate_fn`` becomes
    `RingCollate`, which writes the batch into the ring and returns a message; or `ThreadCollate`, if the workers are threads.
    The sampler becomes `Order`, which can be resumed. A `CachedDataset` becomes a view of itself that returns a `LazyBatch`;
    with ``sample_seed``, any dataset becomes a `SeededDataset`. Datasets that have a state get the wrappers of
    workers/states.py. The `_IteratedLoader` overrides torch's private ``_get_iterator``: it makes subclasses of torch's
    iterators. More private names of torch are ``DataLoader._iterator``, which holds the iterator of persistent workers, and
    that iterator's ``_workers``, its processes, and ``_shutdown_workers``, which ends them. Lightning uses the first and the
    last in the same way.

NOTE [ Names of a loader ]
    Programs write subclasses of torch's DataLoader, with attributes and methods of any name. So a loader has one attribute of
    ours, ``_stocache``, which is its engine. The engine never calls a method of the loader, and reads and sets only attributes
    that torch's loader has. A subclass that makes torch's iterators in its own way (``_get_iterator``) gets torch's.
"""

import copy
import dataclasses
import inspect
import logging
import multiprocessing
import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from stocache.datasets.cached import CachedDataset
from stocache.datasets.failing import Guard, guarded
from stocache.datasets.lazy import with_lazy_batches
from stocache.errors import LimitError
from stocache.loader.collate import MainCollate, RingCollate, ThreadCollate, stacks
from stocache.loader.epochs import EpochLog, LoaderStats, RunningEpoch
from stocache.loader.iteration import Iteration, LateIteration
from stocache.loader.order import Order, Progress, known_length, samplers_in
from stocache.loader.resumable import ResumableEngine
from stocache.loader.sample_seed import SampleSeed, as_sample_seed, is_pure, seeded
from stocache.loader.samplers.locality import LocalityDistributedSampler
from stocache.loader.thread_iterator import ThreadIterator
from stocache.loader.threads import METHODS
from stocache.loader.torch_iterators import AheadIterator, MainIterator, ProcessIterator, with_quick_queues
from stocache.loader.worker_group import WorkerGroup, try_to_start
from stocache.loader.workers.requests import RequestContext
from stocache.observe.recording.record import HAND_OVER_NS, SAMPLES_MADE, WAIT_NS, TimingRecord
from stocache.shm.pool import Pool
from stocache.shm.ring.ring import Ring
from stocache.system.loading.children import fork_lock
from stocache.system.objects import TorchLoader, takes_epoch
from stocache.system.platform import here
from stocache.system.ranks import ranks_here
from stocache.system.walking import through_subsets, walk

if TYPE_CHECKING:  # without ``device`` nothing of a GPU is imported
    from stocache.loader.device.batches import DeviceStage

logger = logging.getLogger("stocache")

SIGNATURE = inspect.signature(TorchLoader.__init__)
_ARGUMENTS = SIGNATURE.parameters.keys() - {"self", "shuffle"}  # which are attributes, too
_MAKING = "_get_iterator", "_index_sampler", "_auto_collation"  # names of torch by which a loader makes its iterators
_SPARE = 8  # buffers of a worker beyond those it prefetches, for batches that the user holds; unused ones take no memory


class LoaderEngine(ResumableEngine):
    """The engine of a loader; see NOTE [ Names of a loader ]. The arguments are the arguments of `DataLoader`.

    Args:
        make_loader: makes other loaders, to try worker threads.

    Attributes:
        log: the figures of the epochs, which may outlive the loader.
        served: the dataset that is iterated in place of the loader's own; None for its own.
        in_iter: whether ``__iter__`` of torch's loader asks for an iterator.
        while_starting: returns the context in which the workers of a dataset are started.
    """

    def __init__(
        self,
        loader: TorchLoader[Any],
        make_loader: Callable[..., Any],
        snapshot_every_n_steps: int | None,
        sample_seed: int | SampleSeed | None,
        worker_method: str | None,
        device: Any,
        on_error: Any,
        prefetch_epochs: bool,
    ) -> None:
        self._begin_alone()
        self._loader, self._make_loader = weakref.ref(loader), make_loader
        self.while_starting: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        self.snapshot_every_n_steps = None if snapshot_every_n_steps is None else operator.index(snapshot_every_n_steps)
        planned = loader.sampler.batch_size if isinstance(loader.sampler, LocalityDistributedSampler) else None
        if planned is not None and loader.batch_size not in (planned, None):
            raise LimitError(
                f"the sampler makes batches of {planned} samples, but batch_size={loader.batch_size}. Make them equal."
            )
        self.sample_seed = as_sample_seed(sample_seed, loader.dataset)
        self.on_error, self._guard = on_error, None if on_error is None else Guard(on_error, loader.dataset)
        if worker_method not in (None, *METHODS):
            raise ValueError(f"worker_method must be one of {', '.join(map(repr, METHODS))}, got {worker_method!r:.100}")
        self.worker_method = worker_method or self._default_method()
        if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
            if worker_method == "thread":
                logger.warning("worker_method='thread' has no effect: a graph of DataPipes needs worker processes.")
            self.worker_method = "multiprocessing"
        self._chosen_method: str | None = None  # by worker_method="auto"
        if device is not None:
            from stocache.loader.device.cuda import as_device  # here: few loaders need a GPU

            device = as_device(device)
        self.device, self.prefetch_epochs = device, prefetch_epochs
        self.warned: set[str] = set()  # warnings about worker threads that were logged
        self._epoch: int | None = None
        self._reset_position()

    def _begin_alone(self) -> None:
        """Set the attributes of one engine, of which a copy has its own, as they are at first."""
        self._uses_threads = self.in_iter = False
        self._ring: Ring | None = None
        self._pool = Pool()  # for batches without workers
        self._record: TimingRecord | None = None
        self._stage: DeviceStage | None = None
        self.log = EpochLog()
        self.served: Any = None
        self.unused: weakref.finalize[Any, Any] | None = None  # until the first iterator; see `_warn_of_lost` in dataloader.py

    def __getstate__(self) -> dict[str, Any]:
        fresh = object.__new__(LoaderEngine)
        fresh._begin_alone()
        return super().__getstate__() | vars(fresh)

    def iterate(self) -> Any:
        """Return an iterator over the batches. After `load_state_dict` the first one continues where the state was taken."""
        order = self._order()
        if not any(map(takes_epoch, samplers_in(self.index_source))):
            return self.begin()
        if self._promised:
            self._leave_resumed_epoch()  # the earlier iterator has resumed it, as with torchdata
        self._promised = self._loaded is not None
        if self._loaded is None:
            self._progress = dataclasses.replace(self._progress, finished=True)  # a state describes the epoch to come
        loader, epochs = self.loader, order.epochs()
        return LateIteration(lambda: engine_of(loader).begin(epochs))  # it holds the loader, which may have no other holder

    def begin(self, epochs: list[int | None] | None = None) -> "Iteration":
        """Begin an epoch. ``epochs``: the samplers' epochs when the user asked for the iterator; see `LateIteration`."""
        if epochs is not None and epochs != self._order().epochs():
            self._leave_resumed_epoch()
        progress = self._next_progress()
        if self._worker_group is not None and (self._worker_group.is_unfit or getattr(self.loader._iterator, "ended", False)):
            self.end_workers()
        if self.unused is not None:
            self.unused.detach()
        if self._worker_group is not None and isinstance(self.loader._iterator, ThreadIterator):
            self._worker_group.busy = True
            self.loader._iterator.finish_epoch()  # before the figures of this epoch begin
        epoch = self._begin_epoch()
        if self._worker_group is None or self.loader._iterator is None:  # which is torch's only with persistent workers
            made = progress.workers_made
            batches, group = self._make_iterator(progress)
            self._workers_made = (made or progress.made) if self.loader.persistent_workers else None
        else:
            group, self._worker_states = self._worker_group, self._worker_states.next_epoch()
            group.busy = True
            with group.order.rng_during_creation(progress), group.explain_errors():
                batches = TorchLoader.__iter__(self.loader)
        self._worker_group = group if self.loader.persistent_workers else None
        self._progress, self._loaded, self._iterations = progress, None, self._iterations + 1
        self._worker_states.begin(progress.delivered, progress.turn)
        epoch.ring, epoch.threads = group.ring, self._uses_threads
        if not self._is_iterable:
            length = known_length(self.index_source)
            epoch.expected = None if length is None else length - progress.delivered
        group.busy = False
        source = batches
        if self._stage is not None:
            from stocache.loader.device.batches import DeviceBatches

            source = DeviceBatches(batches, self._stage)
        return Iteration(batches, source, progress, group, self._worker_states, self._in_order, epoch, self.log)

    def _begin_epoch(self) -> RunningEpoch:
        persistent = bool(self.loader.num_workers and self.loader.persistent_workers)
        cached = self._cached_datasets
        for dataset in cached:
            dataset.begin_loop(self, self._progress.delivered > (self._progress.resumed or 0))
        first = cached[0] if cached else None
        return self.log.begin(self.record, first, min(self.loader.num_workers, self.record.workers), persistent, self._ring)

    def _make_iterator(self, progress: Progress) -> "tuple[Any, WorkerGroup]":
        # see NOTE [ How torch's DataLoader is used ]
        loader, batched = self.loader, self.loader.batch_sampler is not None
        seed, alone = self.sample_seed, not loader.num_workers
        stacking = batched and stacks(loader.collate_fn) and (seed is None or is_pure(loader.collate_fn))
        gathers = stacking and not (seed is not None and seed.hooks)
        lazy = with_lazy_batches(self.source, on_device=self.device is not None) if gathers else None
        self._open_device(lazy)
        if self._pool.pinned != self._pins:
            self._pool = Pool(self._pins)
        self._uses_threads = not alone and self._choose_method() == "thread"
        order = self._order()
        dataset, collate_fn = self.source if lazy is None else lazy, loader.collate_fn
        if self._guard is not None:
            self.log.guard = self._guard
            self._guard.epoch = self._epoch or 0
            dataset = guarded(dataset, self._guard)
        if seed is not None:
            dataset, collate_fn = seeded(dataset, collate_fn, seed, lazy is not None, batched)
        replaced: dict[str, Any] = {"batch_sampler" if batched else "sampler": order}
        if self.device is not None:
            replaced |= {"pin_memory": False}  # the ring and the pool are pinned
        ring = None if alone or self._uses_threads else self.ring
        iteration = 0 if ring is None else ring.begin()
        collate: Any
        if alone:
            collate = MainCollate(collate_fn, batched, self.record.main, stacking, self._pool)
            order.arrays = lazy is not None
            # A state describes the delivered batches
            if self.device is not None and lazy is not None and order.may_run_ahead and not self._keeps_states:
                order.at_once = order.most_at_once if seed is None and _gathered_on_device(lazy) is not None else 1
        else:
            order.context = RequestContext(ring, iteration, arrays=lazy is not None, epoch=self._epoch)
            if ring is None:
                collate = ThreadCollate(collate_fn, stacking, self._pool)
            else:
                ring.record, ring.note_hand_over = self.record, partial(self.record.main.add_later, HAND_OVER_NS)
                collate = RingCollate(collate_fn, stacking, ring, iteration)
        replaced |= self._with_states(dataset, collate)
        if ring is None:
            return self._torch_iterator(order, progress, replaced), WorkerGroup(order, persistent=loader.persistent_workers)
        replaced |= {"multiprocessing_context": (context := with_quick_queues(loader.multiprocessing_context))}
        group = WorkerGroup(order, ring if iteration else None, self._start_method, persistent=loader.persistent_workers)
        try:
            with group.explain_errors():
                try_to_start(context)
                iterator = self._torch_iterator(order, progress, replaced)
        except BaseException:
            ring.end(iteration)
            raise
        weakref.finalize(iterator, ring.end, iteration).atexit = False
        group.workers = tuple(iterator._workers)  # multiprocessing forgets processes that have ended
        group.watch()
        return iterator, group

    def _choose_method(self) -> str:
        """Return "thread" or "multiprocessing" for the workers of the next iterator."""
        if self.worker_method != "auto":
            return self.worker_method
        if self._chosen_method is None:
            from stocache.loader.choice.choice import choose_method
            from stocache.loader.choice.measure import Study

            loader, hooks = self.loader, self.sample_seed is not None and bool(self.sample_seed.hooks)
            tried = (loader.num_workers,), (loader.batch_size,), ("multiprocessing", "thread")
            study = Study(self._make_loader, *tried, collate_fn=loader.collate_fn)
            self._chosen_method = choose_method(self.source, hooks, study, self._start_method == "fork")
        return self._chosen_method

    def _open_device(self, lazy: Any) -> None:
        """Have batches delivered on the device; cached samples are gathered there if the dataset has lazy batches for it."""
        if self.device is None:
            return
        from stocache.loader.device.batches import DeviceStage

        if self._stage is None:
            self._stage = DeviceStage(self.device)
        if (cached := _gathered_on_device(lazy)) is not None:
            self._stage.gather_from(cached.cache)

    def _torch_iterator(self, order: Order, progress: Progress, replaced: dict[str, Any]) -> Any:
        """Return an iterator of torch over a changed loader, made with the random generators as an epoch needs them."""
        with order.rng_during_creation(progress), fork_lock():
            changed = torch_loader_of(self.loader, replaced | {"_iterator": None}, _IteratedLoader)
            iterator = TorchLoader.__iter__(changed)
            if changed._iterator is not None:  # of persistent workers
                self.loader._iterator = changed._iterator
            if not self.loader.num_workers and progress.resumed is not None:
                # Workers are sent batches at once; torch would skip the delivered ones at the first `next`. An iterator that is
                # not used leaves the generators where the epoch left them, for the next one
                next(iterator._sampler_iter)
        return iterator

    @property
    def source(self) -> Any:
        """The dataset that is iterated."""
        return self.loader.dataset if self.served is None else self.served

    def _default_method(self) -> str:
        if here.SHARES_MEMORY or not self.loader.num_workers or not self._cached_datasets or self.sample_seed is not None:
            return "multiprocessing"  # threads share the generators that a sample seed sets
        logger.warning(
            "worker_method='thread': on this system a cache is memory of one process, which its threads share. Worker "
            "processes (worker_method='multiprocessing') would load each sample from the dataset."
        )
        return "thread"

    @property
    def _start_method(self) -> str:
        return (self.loader.multiprocessing_context or multiprocessing).get_start_method()  # type: ignore[no-any-return]

    @property
    def _pins(self) -> bool:
        return self.device is not None or (self.loader.pin_memory and torch.cuda.is_available())

    @property
    def ring(self) -> Ring:
        """The ring of the workers, made at first use. Each worker has two lanes, because two iterators may overlap."""
        if self._ring is None or not self._ring.mine:
            depth = _SPARE + (self.loader.prefetch_factor or 0)
            self._ring = Ring(2 * self.loader.num_workers, depth, pinned=self._pins, keeps=self.device is None)
        return self._ring

    @property
    def record(self) -> TimingRecord:
        """Where the loader and its workers record how long the steps of loading take, made at first use."""
        grown = self._record is not None and self._worker_group is None and self._record.workers < self.loader.num_workers
        if self._record is None or not self._record.mine or grown:
            name = next((cached.cache.shared_name for cached in self._cached_datasets if not cached.cache.closed), None)
            has_processes = self.loader.num_workers > 0 and self.worker_method != "thread"
            self._record = TimingRecord(self.loader.num_workers, has_processes, name, ranks_here().rank)
        return self._record

    def dead_worker(self) -> str | None:
        """Return how a persistent worker died; None while all live."""
        return None if self._worker_group is None else self._worker_group.death()

    def stats(self) -> LoaderStats:
        """Return the counts and times of the loader so far."""
        counted = (self._record or TimingRecord(0, shared=False)).read()
        times, samples = counted.distributions(), counted.sum(SAMPLES_MADE)
        is_open = any(not cached.cache.closed for cached in self._cached_datasets)
        ring, epochs = self._ring, self.log.epochs()
        guards = [self._guard, *(cached._guard for cached in self._cached_datasets)]
        retried, failed = next((guard.failures.counts() for guard in guards if guard is not None), (0, ()))
        return LoaderStats(
            batches=times["wait"].count,
            waited_s=counted.sum(WAIT_NS) / 1e9,
            ring=0 if ring is None else ring.received,
            fallbacks={} if ring is None else {reason: count for reason, count in ring.fallbacks.items() if count},
            ring_bytes=0 if ring is None else ring.nbytes,
            hit_rate=max(0, samples - times["load"].count) / max(1, samples) if is_open else None,
            ring_occupancy=None if ring is None else ring.occupancy,
            device=None if self._stage is None else self._stage.stats(),
            epochs=epochs,
            verdict=next((epoch.verdict for epoch in reversed(epochs) if epoch.complete), None),
            retried=retried,
            failed=failed,
            **times,
        )

    @property
    def _cached_datasets(self) -> list[CachedDataset]:
        """The outermost cached datasets within the dataset."""
        found = walk(self.source, through=lambda wrapper: not isinstance(wrapper, CachedDataset))
        return [dataset for dataset in found if isinstance(dataset, CachedDataset)]


def _gathered_on_device(lazy: Any) -> Any:
    """Return the cached dataset whose samples a GPU gathers; None if it gathers none."""
    cached = None if lazy is None else through_subsets(lazy)[0]
    return cached if isinstance(cached, CachedDataset) and cached.gathers_on_device else None


def engine_of(loader: Any) -> LoaderEngine:
    """Return the engine of a loader. A copy of a loader gets its own.

    Raises:
        AttributeError: the constructor of the loader has not run.
    """
    engine: LoaderEngine | None = vars(loader).get("_stocache")
    if engine is None:
        return loader._stocache  # type: ignore[no-any-return]  # of the loader to which it passes on, as accelerate's do
    if engine.loader is not loader:
        engine = vars(loader)["_stocache"] = copy.copy(engine)
        engine._loader = weakref.ref(loader)
    return engine


def makes_iterators(loader: TorchLoader[Any], base: type, *names: str) -> bool:
    """Whether a subclass of ``base`` makes torch's iterators in its own way: it overrides one of these names of torch."""
    return any(getattr(type(loader), name) is not getattr(base, name) for name in names or _MAKING)


def torch_loader_of(loader: Any, replaced: dict[str, Any], kind: type = TorchLoader) -> Any:
    """Return a loader of torch with the attributes of a loader, some of them replaced.

    It is not of the loader's class, whose ``__del__`` would end what the loader still uses.
    """
    made: Any = object.__new__(kind)
    vars(made).update(vars(loader))
    vars(made).update({name: getattr(loader, name) for name in _ARGUMENTS - vars(loader).keys()})  # some are properties
    for name, value in replaced.items():
        object.__setattr__(made, name, value)  # torch's __setattr__ refuses these names, to protect loaders in use
    return made


class _IteratedLoader(TorchLoader[Any]):
    """A loader from which torch makes an iterator of ours."""

    _stocache: LoaderEngine

    def _get_iterator(self) -> Any:
        engine = self._stocache
        if not self.num_workers:
            return AheadIterator(self) if self._index_sampler.at_once else MainIterator(self)
        with engine.while_starting(engine.source):
            if engine._uses_threads:
                return ThreadIterator(self)
            self.check_worker_number_rationality()
            return ProcessIterator(self)
