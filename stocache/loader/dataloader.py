"""DataLoader: torch's DataLoader, with batches in shared memory that is reused.

NOTE [ How torch's DataLoader is used ]
    `DataLoader` is a subclass of torch's, and keeps the arguments that the user gave. torch makes each iterator from a copy of
    the loader, in which some arguments are replaced. ``collate_fn`` becomes `RingCollate`, which writes the batch into the
    ring and returns a handle; or `ThreadCollate`, if the workers are threads. The sampler becomes `Order`, which can be
    resumed. A `CachedDataset` becomes a view of itself that returns a `LazyBatch`; with ``sample_seed``, any dataset becomes a
    `SeededDataset`. Datasets that have a state get the wrappers of workers/states.py. Of torch's methods ``__iter__`` is
    overridden, and the private ``_get_iterator``, which makes subclasses of torch's iterators. More private names of torch are
    ``DataLoader._iterator``, which holds the iterator of persistent workers, and that iterator's ``_workers``, its processes,
    and ``_shutdown_workers``, which ends them. Lightning uses the first and the last in the same way.
"""

import dataclasses
import functools
import gc
import inspect
import logging
import multiprocessing
import operator
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from stocache.datasets.cached import CachedDataset
from stocache.datasets.lazy import with_lazy_batches
from stocache.errors import LimitError
from stocache.loader.collate import MainCollate, RingCollate, ThreadCollate, stacks
from stocache.loader.epochs import EpochLog, LoaderStats, RunningEpoch
from stocache.loader.iteration import Iteration, LateIteration
from stocache.loader.order import Order, Progress, known_length
from stocache.loader.resumable import ResumableLoader
from stocache.loader.sample_seed import SampleSeed, ThreadSeededDataset, as_sample_seed, is_pure, seeded
from stocache.loader.samplers.locality import LocalityDistributedSampler
from stocache.loader.thread_iterator import ThreadIterator
from stocache.loader.threads import METHODS
from stocache.loader.torch_iterators import AheadIterator, MainIterator, ProcessIterator, with_quick_queues
from stocache.loader.worker_group import WorkerGroup, try_to_start
from stocache.loader.workers.requests import RequestContext
from stocache.observe.recording.record import TimingRecord
from stocache.shm.pool import Pool
from stocache.shm.ring.ring import Ring
from stocache.system.limits import parse_size
from stocache.system.loading.children import fork_lock
from stocache.system.objects import TorchLoader
from stocache.system.platform import here
from stocache.system.ranks import ranks_here
from stocache.system.walking import through_subsets, walk

if TYPE_CHECKING:  # without ``device`` nothing of a GPU is imported
    from stocache.loader.choice.choice import MethodTrial
    from stocache.loader.device.batches import DeviceStage

logger = logging.getLogger("stocache")

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., None])

SIGNATURE = inspect.signature(TorchLoader.__init__)
_SPARE = 8  # buffers of a worker beyond those it prefetches, for batches that the user holds; unused ones take no memory


def with_arguments_of_torch(function: _F) -> _F:
    """Give ``function`` the signature of torch's loader and its own arguments. Lightning recreates a loader from it."""
    parameters = inspect.signature(function).parameters.values()
    own = [value for value in parameters if value.kind is value.KEYWORD_ONLY and value.name not in SIGNATURE.parameters]
    function.__signature__ = SIGNATURE.replace(parameters=[*SIGNATURE.parameters.values(), *own])  # type: ignore[attr-defined]
    return function


class DataLoader(ResumableLoader[_T]):
    """torch's DataLoader with the same arguments and the same batches, and less copying.

        loader = DataLoader(CachedDataset(dataset, 32), batch_size=256, shuffle=True, num_workers=8)

    Worker processes write batches into a ring of buffers in shared memory, and send a few hundred bytes that say where a batch
    is. Samples of a `CachedDataset` without a transform are gathered straight into a buffer. A buffer is used again when the
    last view of its batch is gone: a batch is never overwritten while you hold it, and you may hold many. Values, order and
    random numbers are those of torch's DataLoader. A batch that does not go through the ring (no free buffer, no memory,
    small and without tensors) is sent as torch sends it.

    Args:
        dataset, batch_size, shuffle, sampler, batch_sampler, collate_fn, drop_last, generator, in_order: as for torch's
            DataLoader, which has ``in_order`` from torch 2.6 on.
        timeout, worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers, pin_memory, pin_memory_device:
            likewise.
        num_workers: as for torch's DataLoader; or "auto": a child process runs short epochs with 0, 1, 2, 4, ... workers for up
            to 10 s, and the fewest workers are chosen with which these are as fast as with any other number. The choice is
            logged, and becomes the attribute ``num_workers``. An iterable dataset gets 0; one that cannot be measured, one for
            each CPU, at most 8. If it is 0, ``prefetch_factor``, ``persistent_workers`` and ``multiprocessing_context`` have no
            effect.
        snapshot_every_n_steps: with which batches workers send the state of a dataset that has one: with those of every n-th
            step. A loader that resumes between two of them loads up to n - 1 batches, and drops them. None and 0 are 1.
        worker_method: "multiprocessing" for worker processes; "thread" for threads of this process, which need no start, no
            pickling and no shared memory, and are as fast where making a sample leaves the GIL free (decoding, reading, numpy,
            torch); "auto" tries both, and logs what it chooses. Each thread has its own copy of the dataset object, and
            shares its data; see NOTE [ A dataset for each thread ]. (The name is that of torch's ``WorkerInfo``.) None stands
            for processes; for threads where the dataset is cached and the system shares no memory between processes.
        device: a GPU, such as "cuda", on which batches are delivered. They are copied, two ahead, on a stream of its own, from
            pinned memory, whatever ``pin_memory`` is. Samples of a `CachedDataset` that are in memory are read by the GPU
            itself. "cuda" is the current device when the first iterator is made. Parts that are no tensors stay on the host.
            None and "cpu" are as without it.
        device_limit_gib: GiB of the device's memory for cached samples, which are then gathered at the rate of that memory. The
            first samples that come stay. If the training step finds no memory later, they give way. No effect on the CPU.
        sample_seed: a number, or a `SampleSeed`, from which each sample gets random numbers of its own: the same samples with
            any number of workers and ranks, any batch size, cached or not, resumed or not. Read the limits of `SampleSeed`.

    Raises:
        ValueError, TypeError: as torch's DataLoader; also for ``worker_method``, ``snapshot_every_n_steps`` and ``device``.
        LimitError: the `LocalityDistributedSampler` was made for another batch size; ``sample_seed`` is not a seed;
            ``device_limit_gib`` is not a size.
        DatasetError: ``sample_seed`` was given for an iterable dataset; while iterating: worker threads cannot use the dataset.
        WorkerError: while iterating: a worker died, or none can start. The message names its process, signal and batch.

    Examples:
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
        >>> next(iter(loader))
        [tensor([0, 1])]
        >>> resumed = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
        >>> resumed.load_state_dict(loader.state_dict())
        >>> list(resumed)
        [[tensor([2, 3])], [tensor([4, 5])]]
    """

    @functools.wraps(TorchLoader.__init__)  # type: ignore[misc]  # for its types
    @with_arguments_of_torch
    def __init__(
        self,
        dataset: Any,
        *args: Any,
        snapshot_every_n_steps: int | None = 1,
        sample_seed: int | SampleSeed | None = None,
        worker_method: str | None = None,
        device: Any = None,
        device_limit_gib: float | str = 0,
        **kwargs: Any,
    ) -> None:
        arguments: dict[str, Any] = SIGNATURE.bind(self, dataset, *args, **kwargs).arguments
        if arguments.get("num_workers") == "auto":
            from stocache.loader.choice.choice import (
                with_chosen_workers,  # here, as imports are half of the time of `stocache run`
            )

            arguments = with_chosen_workers(dataset, arguments, DataLoader, worker_method)
            args, kwargs = (), arguments
        super().__init__(dataset, *args, **kwargs)
        self.snapshot_every_n_steps = None if snapshot_every_n_steps is None else operator.index(snapshot_every_n_steps)
        planned = self.sampler.batch_size if isinstance(self.sampler, LocalityDistributedSampler) else None
        if planned is not None and self.batch_size not in (planned, None):
            raise LimitError(
                f"the sampler makes batches of {planned} samples, but batch_size={self.batch_size}. Make them equal."
            )
        self.sample_seed = as_sample_seed(sample_seed, dataset)
        if worker_method not in (None, *METHODS):
            raise ValueError(f"worker_method must be one of {', '.join(map(repr, METHODS))}, got {worker_method!r:.100}")
        self.worker_method = worker_method or self._default_method()
        self._trial: MethodTrial | None = None  # of worker_method="auto"
        if device is not None:
            from stocache.loader.device.cuda import as_device  # here: few loaders need a GPU

            device = as_device(device)
        self.device, self.device_limit_gib = device, device_limit_gib
        self._device_limit = parse_size(device_limit_gib, "device_limit_gib")
        self._warned: set[str] = set()  # warnings about worker threads that were logged
        self._epoch: int | None = None
        self._reset_position()
        vars(self).update(_fresh())
        options = {"sample_seed": self.sample_seed is not None, "worker_method": worker_method not in (None, "multiprocessing")}
        options |= {"device": self.device is not None}
        lost = [name for name, given in options.items() if given]
        if lost:
            self._unused = weakref.finalize(self, _warn_of_lost, lost, id(dataset), os.getpid())

    # Attributes of one object; a copy makes its own, also in another process
    _uses_threads: bool  # by the newest workers
    _ring: Ring | None
    _pool: Pool  # for batches without workers
    _record: TimingRecord | None
    _log: EpochLog
    _stage: "DeviceStage | None"
    _unused: "weakref.finalize[Any, Any] | None"  # until the first iterator; see `_warn_of_lost`

    def __iter__(self) -> Any:
        """Return an iterator over the batches. After `load_state_dict` the first one continues where the state was taken."""
        order = self._order()
        if not order.has_epochs:
            return self._begin()
        if self._promised:
            self._leave_resumed_epoch()  # it is that of the earlier iterator, as with torchdata
        self._promised = self._loaded is not None
        if self._loaded is None:
            self._progress = dataclasses.replace(self._progress, finished=True)  # a state is that of the epoch to come
        return LateIteration(functools.partial(self._begin, order.epochs(every=True)))

    def _begin(self, epochs: list[int | None] | None = None) -> "Iteration":
        """Begin an epoch. ``epochs``: those of the samplers when the user asked for the iterator; see `LateIteration`."""
        if epochs is not None and epochs != self._order().epochs(every=True):
            self._leave_resumed_epoch()
        progress = self._next_progress()
        if self._worker_group is not None and (self._worker_group.is_unfit or getattr(self._iterator, "ended", False)):
            self.end_workers()
        if self._unused is not None:
            self._unused.detach()
        if isinstance(self._iterator, ThreadIterator):
            self._iterator.drop_gathers()  # before the figures of this epoch begin
        epoch = self._begin_epoch()
        if self._iterator is None or self._worker_group is None:  # torch sets _iterator only for persistent workers
            made = progress.workers_made
            batches, group = self._make_iterator(progress)
            self._workers_made = (made or progress.made) if self.persistent_workers else None
        else:
            group, self._worker_states = self._worker_group, self._worker_states.next_epoch()
            group.busy = True
            with group.order.rng_during_creation(progress), group.explain_errors():
                batches = super().__iter__()
        self._worker_group = group if self.persistent_workers else None
        self._progress, self._loaded, self._iterations = progress, None, self._iterations + 1
        self._worker_states.begin(progress.delivered)
        epoch.ring, epoch.threads = group.ring, self._uses_threads
        if not self._is_iterable:
            length = known_length(self._index_source)
            epoch.expected = None if length is None else length - progress.delivered
        group.busy = False
        if self._stage is not None:
            batches = self._stage.delivered(batches)
        return Iteration(batches, progress, group, self._worker_states, self._in_order, epoch, self._log)

    def _begin_epoch(self) -> RunningEpoch:
        for cached in self._cached_datasets:
            cached.begin_loop(self, looped=self._progress.delivered > (self._progress.resumed or 0))
        persistent = bool(self.num_workers and self.persistent_workers)
        first = next(iter(self._cached_datasets), None)
        return self._log.begin(self.record, first, min(self.num_workers, self.record.workers), persistent, self._ring)

    def _make_iterator(self, progress: Progress) -> "tuple[Any, WorkerGroup]":
        # see NOTE [ How torch's DataLoader is used ]
        seed, alone = self.sample_seed, not self.num_workers
        stacking = self.batch_sampler is not None and stacks(self.collate_fn) and (seed is None or is_pure(self.collate_fn))
        gathers = stacking and not (seed is not None and seed.hooks)
        lazy = with_lazy_batches(self.source, on_device=self.device is not None) if gathers else None
        self._open_device(lazy)
        if self._pool.pinned != self._pins:
            self._pool = Pool(self._pins)
        method = self.worker_method
        if method == "auto" and not alone:
            from stocache.loader.choice.choice import MethodTrial, choose_method

            self._trial = self._trial or MethodTrial(
                DataLoader, self.num_workers, self.batch_size, self.collate_fn, self._start_method == "fork"
            )
            method = choose_method(self.source, seed is not None and bool(seed.hooks), self._trial)
        self._uses_threads = method == "thread" and not alone
        order = self._order()
        dataset, collate_fn = self.source if lazy is None else lazy, self.collate_fn
        if seed is not None and self._uses_threads:
            dataset = ThreadSeededDataset(dataset, seed, lazy is not None)
        elif seed is not None:
            dataset, collate_fn = seeded(dataset, collate_fn, seed, lazy is not None, self.batch_sampler is not None)
        replaced: dict[str, Any] = {"batch_sampler" if self.batch_sampler is not None else "sampler": order}
        if self.device is not None:
            replaced |= {"pin_memory": False}  # the ring and the pool are pinned
        if alone:
            collate_here = MainCollate(collate_fn, self.batch_sampler is not None, self.record.main, stacking, self._pool)
            replaced |= {"dataset": self._restored_here(dataset), "collate_fn": collate_here}
            # A state is that of the delivered batches
            if self.device is not None and lazy is not None and order.may_run_ahead and not self._keeps_states:
                order.at_once = order.most_at_once if seed is None and _gathered_on_device(lazy) is not None else 1
            return self._torch_iterator(order, progress, replaced), WorkerGroup(order)
        ring = None if self._uses_threads else self.ring
        iteration = 0 if ring is None else ring.begin()
        order.context = RequestContext(ring, iteration, arrays=lazy is not None, epoch=self._epoch)
        if ring is None:
            collate: Any = ThreadCollate(collate_fn, stacking, self.batch_sampler is not None, self._pool, seed)
        else:
            ring.record = self.record
            collate = RingCollate(collate_fn, stacking, ring, iteration)
        replaced |= self._restored_in_workers(dataset, collate)
        order.final_requests = self._final_requests
        if ring is None:
            return self._torch_iterator(order, progress, replaced), WorkerGroup(order, persistent=self.persistent_workers)
        replaced |= {"multiprocessing_context": (context := with_quick_queues(self.multiprocessing_context))}
        group = WorkerGroup(order, ring if iteration else None, self._start_method, persistent=self.persistent_workers)
        try:
            with group.explain_errors():
                try_to_start(context)
                iterator = self._torch_iterator(order, progress, replaced)
        except BaseException:
            ring.end(iteration)
            raise
        weakref.finalize(iterator, ring.end, iteration).atexit = False
        group.workers = tuple(iterator._workers)  # multiprocessing forgets those that have ended
        group.watch()
        return iterator, group

    def _open_device(self, lazy: Any) -> None:
        """Have batches delivered on the device; cached samples are gathered there if the dataset has lazy batches for it."""
        if self.device is None:
            return
        from stocache.loader.device.batches import DeviceStage

        if self._stage is None:
            self._stage = DeviceStage(self.device)
        if (cached := _gathered_on_device(lazy)) is not None:
            self._stage.gather_from(cached.cache, self._device_limit)

    @property
    def _final_requests(self) -> int:
        """How many requests without indices end an epoch; see `Order`."""
        needs = self._worker_states.every > 1 and self.persistent_workers and not self._is_iterable and self._keeps_states
        return self.num_workers if needs else 0

    def _get_iterator(self) -> Any:
        if self._uses_threads:
            return ThreadIterator(self)
        if not self.num_workers:
            order = self._index_source
            return AheadIterator(self) if isinstance(order, Order) and order.at_once else MainIterator(self)
        self.check_worker_number_rationality()
        return ProcessIterator(self)

    def _torch_iterator(self, order: Order, progress: Progress, replaced: dict[str, Any]) -> Any:
        """Return the iterator of `iterate_changed`, made with the random generators as an epoch needs them."""
        with order.rng_during_creation(progress), fork_lock():
            iterator = self.iterate_changed(replaced | {"_iterator": None})
            if not self.num_workers:
                order.skip_delivered()
        return iterator

    def iterate_changed(self, replaced: dict[str, Any]) -> Any:
        """Return the iterator that torch makes from a copy of this loader with some attributes replaced."""
        changed = self.changed(replaced)
        iterator = TorchLoader.__iter__(changed)
        self._iterator = changed._iterator
        return iterator

    def changed(self, replaced: dict[str, Any]) -> Any:
        """Return a copy of this loader with some attributes replaced."""
        changed = object.__new__(type(self))
        vars(changed).update(vars(self))
        for name, value in replaced.items():
            object.__setattr__(changed, name, value)  # torch's __setattr__ refuses these names, to protect loaders in use
        return changed

    @property
    def source(self) -> Any:
        """The dataset that is iterated."""
        return self.dataset

    def _default_method(self) -> str:
        if here.SHARES_MEMORY or not self.num_workers or not self._cached_datasets or self.sample_seed is not None:
            return "multiprocessing"  # threads share the generators that a sample seed sets
        logger.warning(
            "worker_method='thread': on this system a cache is memory of one process, which its threads share. Worker "
            "processes (worker_method='multiprocessing') would load each sample from the dataset."
        )
        return "thread"

    @property
    def _start_method(self) -> str:
        return (self.multiprocessing_context or multiprocessing).get_start_method()  # type: ignore[no-any-return]

    @property
    def _pins(self) -> bool:
        return self.device is not None or (self.pin_memory and torch.cuda.is_available())

    @property
    def ring(self) -> Ring:
        """The ring of the workers, made at first use. Each worker has two lanes, because two iterators may overlap."""
        if self._ring is None or not self._ring.mine:
            depth = _SPARE + (self.prefetch_factor or 0)
            self._ring = Ring(2 * self.num_workers, depth, pinned=self._pins, keeps=self.device is None)
        return self._ring

    @property
    def record(self) -> TimingRecord:
        """Where the loader and its workers record how long the steps of loading take, made at first use."""
        grown = self._record is not None and self._worker_group is None and self._record.workers < self.num_workers
        if self._record is None or not self._record.mine or grown:
            name = next((cached.cache.shared_name for cached in self._cached_datasets if not cached.cache.closed), None)
            has_processes = self.num_workers > 0 and self.worker_method != "thread"
            self._record = TimingRecord(self.num_workers, has_processes, name, ranks_here().rank)
        return self._record

    @property
    def has_workers(self) -> bool:
        """Whether persistent workers run."""
        return self._worker_group is not None

    def dead_worker(self) -> str | None:
        """Return how a persistent worker died; None while all live."""
        return None if self._worker_group is None else self._worker_group.death()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | _fresh()

    @property
    def log(self) -> EpochLog:
        """The figures of the epochs, which may outlive the loader."""
        return self._log

    def stats(self) -> LoaderStats:
        """Return the counts and times of the loader so far."""
        is_open = any(not cached.cache.closed for cached in self._cached_datasets)
        device = None if self._stage is None else self._stage.stats()
        return LoaderStats.of(self._record, self._ring, self._log.epochs(), is_open, device)

    @property
    def _cached_datasets(self) -> list[CachedDataset]:
        """The outermost cached datasets within the dataset."""
        found = walk(self.source, through=lambda wrapper: not isinstance(wrapper, CachedDataset))
        return [dataset for dataset in found if isinstance(dataset, CachedDataset)]


def _gathered_on_device(lazy: Any) -> Any:
    """Return the cached dataset whose samples a GPU gathers; None where it gathers none."""
    cached = None if lazy is None else through_subsets(lazy)[0]
    return cached if isinstance(cached, CachedDataset) and cached.gathers_on_device else None


def _fresh() -> dict[str, Any]:
    """Return the attributes that belong to one loader object alone, as they are at first."""
    own: dict[str, Any] = {"_ring": None, "_stage": None, "_record": None, "_unused": None, "_uses_threads": False}
    return own | {"_pool": Pool(), "_log": EpochLog()}


_said_lost = False  # the warning below


def _warn_of_lost(options: list[str], dataset: int, pid: int) -> None:
    """Warn, once, if a loader that was never iterated is gone, and a loader of torch's has its dataset in its place.

    Libraries make such a loader from the arguments of torch that ours has. The options that torch's does not have are lost.
    """
    global _said_lost
    if _said_lost or os.getpid() != pid:
        return
    loaders = (each for each in gc.get_objects() if issubclass(type(each), TorchLoader) and not isinstance(each, DataLoader))
    if any(id(vars(each).get("dataset")) == dataset for each in loaders):
        _said_lost = True
        logger.warning(
            "a library has made torch's own loader of a stocache.DataLoader, where %s has no effect. Iterate over the loader "
            "that you made, or leave the option out.",
            " and ".join(options),
        )
