"""DataLoader: torch's DataLoader, with batches in shared memory that is used again and again.

NOTE [ How torch's DataLoader is used ]
    `DataLoader` is a subclass of torch's, and keeps the arguments that the user gave. torch makes each iterator from a copy of
    the loader, in which three arguments are replaced. ``collate_fn`` becomes `RingCollate`, which writes the batch into the
    ring and returns a handle. The sampler becomes `Order`, which can be resumed. A `CachedDataset` becomes a view of itself
    that returns a `LazyBatch`. Of torch's methods only ``__iter__`` is overridden. Three private names of torch are used:
    ``DataLoader._iterator``, which holds the iterator of persistent workers, and that iterator's ``_workers``, its processes,
    and ``_shutdown_workers``, which ends them. Lightning uses the first and the last in the same way.
"""

import contextlib
import copy
import functools
import inspect
import multiprocessing
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import IterableDataset

from stocache.datasets.cached import CachedDataset, with_lazy_batches
from stocache.errors import ClosedError, LimitError, StateError, WorkerError
from stocache.loader.collate import Gatherer, RingCollate, as_is, stacks
from stocache.loader.order import Order, Progress, RequestContext, layers, samplers_in, set_epoch
from stocache.loader.ring import Ring
from stocache.loader.worker_group import WorkerGroup, is_timeout, try_to_start
from stocache.samplers.locality import LocalityDistributedSampler
from stocache.samples.indices import length_of
from stocache.shm.pool import Pool
from stocache.system import rng
from stocache.system.children import fork_lock
from stocache.system.deprecation import old_name

_SIGNATURE = inspect.signature(torch.utils.data.DataLoader.__init__)
_STATE_VERSION = 1
_SPARE = 8  # buffers of a worker beyond those it prefetches, for batches that the user holds; unused ones take no memory


@dataclass(frozen=True)
class LoaderStats:
    """Counts and times of a `DataLoader`, over all its iterators.

    Attributes:
        batches: number of batches delivered.
        waited_s: seconds for which the loop waited for batches.
        ring: batches that arrived through the ring.
        fallbacks: batches that workers sent without the ring, as torch does, by reason.
        ring_bytes: memory that the ring takes now.
        hit_rate: share of samples found in the cache, of all that any process read since the loader was made; None if the
            dataset is not a `CachedDataset`.
    """

    batches: int
    waited_s: float
    ring: int
    fallbacks: dict[str, int]
    ring_bytes: int
    hit_rate: float | None

    outside = old_name("outside", "fallbacks")


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader with the same arguments and the same batches, and less copying.

        loader = DataLoader(CachedDataset(dataset, 32), batch_size=256, shuffle=True, num_workers=8)

    Worker processes write batches into a ring of buffers in shared memory, and send a few hundred bytes that say where a batch
    is. Samples of a `CachedDataset` without a transform are gathered straight into a buffer. A buffer is used again when the
    last view of its batch is gone: a batch is never overwritten while you hold it, and you may hold many. Values, order and
    random numbers are those of torch's DataLoader. A batch that cannot go through the ring (no free buffer, no memory, no
    tensors) is sent as torch sends it.

    Args:
        dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last, timeout,
            worker_init_fn, multiprocessing_context, generator, persistent_workers, in_order: as for torch's DataLoader, which
            has ``in_order`` from torch 2.6 on.
        prefetch_factor: as for torch's DataLoader. With ``num_workers=0``, and a cached dataset without a transform, the number
            of batches that a thread of this process gathers in advance.

    Raises:
        ValueError, TypeError: as torch's DataLoader.
        LimitError: the `LocalityDistributedSampler` was made for another batch size.
        WorkerError: while iterating: a worker died, or none can start. The message names its process, signal and batch.
    """

    @functools.wraps(torch.utils.data.DataLoader.__init__)  # type: ignore[misc]  # for its signature
    def __init__(self, dataset: Any, *args: Any, prefetch_factor: int | None = None, **kwargs: Any) -> None:
        alone = _SIGNATURE.bind(self, dataset, *args, **kwargs).arguments.get("num_workers", 0) == 0
        super().__init__(dataset, *args, prefetch_factor=None if alone else prefetch_factor, **kwargs)
        if alone:
            if prefetch_factor is not None and prefetch_factor < 0:
                raise ValueError("prefetch_factor option should be non-negative")
            self.prefetch_factor = prefetch_factor
        planned = self.sampler.batch_size if isinstance(self.sampler, LocalityDistributedSampler) else None
        if planned is not None and self.batch_size not in (planned, None):
            raise LimitError(
                f"the sampler makes batches of {planned} samples, but batch_size={self.batch_size}. Make them equal."
            )
        self._ring: Ring | None = None
        self._pool = Pool()  # for batches without workers
        self._worker_group: WorkerGroup | None = None  # of persistent workers
        self._progress = Progress(finished=True)
        self._loaded: dict[str, Any] | None = None  # the state from which the next iterator continues
        self._epoch: int | None = None
        self._totals = _Totals(self._cache_counts())

    # ------------------------------------------------------------------------------------------------ iterating

    def __iter__(self) -> Any:
        """Return an iterator over the batches. After `load_state_dict` the first one continues where the state was taken."""
        progress = self._next_progress()
        if self._worker_group is not None and self._worker_group.dead:
            self.end_workers()
        if self._iterator is None or self._worker_group is None:  # torch sets _iterator only for persistent workers
            batches, group = self._make_iterator(progress)
        else:
            group = self._worker_group
            with group.order.rng_during_creation(progress), group.explain_errors():
                batches = super().__iter__()
        self._worker_group = group if self.persistent_workers else None
        self._progress, self._loaded = progress, None
        return _Iteration(batches, progress, self._totals, group)

    def _make_iterator(self, progress: Progress) -> "tuple[Any, WorkerGroup]":
        # see NOTE [ How torch's DataLoader is used ]
        stacking = self.batch_sampler is not None and stacks(self.collate_fn)
        source = with_lazy_batches(self.dataset) if stacking else None
        order = self._order()
        replaced: dict[str, Any] = {"batch_sampler" if self.batch_sampler is not None else "sampler": order}
        if self.num_workers == 0:
            if source is None or self._pins:
                return self._torch_iterator(order, progress, replaced), WorkerGroup(order)
            replaced |= {"dataset": source, "collate_fn": as_is}
            lazy_batches = self._torch_iterator(order, progress, replaced)
            return Gatherer(lazy_batches, self._pool, self.prefetch_factor or 0), WorkerGroup(order)
        ring = self.ring
        iteration = ring.begin()
        order.context = RequestContext(ring, iteration, arrays=source is not None, epoch=self._epoch)
        replaced |= {"dataset": self.dataset if source is None else source}
        replaced |= {"collate_fn": RingCollate(self.collate_fn, stacking, ring, iteration)}
        group = WorkerGroup(order, ring if iteration else None, self._start_method, persistent=self.persistent_workers)
        try:
            with group.explain_errors():
                try_to_start(self.multiprocessing_context or multiprocessing.get_context())
                iterator = self._torch_iterator(order, progress, replaced)
        except BaseException:
            ring.end(iteration)
            raise
        weakref.finalize(iterator, ring.end, iteration).atexit = False
        group.workers = tuple(iterator._workers)  # multiprocessing forgets those that have ended
        group.watch()
        return iterator, group

    def _torch_iterator(self, order: Order, progress: Progress, replaced: dict[str, Any]) -> Any:
        """Return the iterator that torch makes from a copy of this loader with some attributes replaced."""
        changed = copy.copy(self)
        for name, value in replaced.items():
            object.__setattr__(changed, name, value)  # torch's __setattr__ refuses these names, to protect loaders in use
        with order.rng_during_creation(progress), fork_lock():
            iterator = torch.utils.data.DataLoader.__iter__(changed)
        self._iterator = changed._iterator
        return iterator

    @property
    def _index_source(self) -> Any:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def _order(self) -> Order:
        """Return the order of the batches, with the generators that the loader and its samplers own."""
        owned = [self.generator, *(value for sampler in samplers_in(self._index_source) for value in _attributes(sampler))]
        generators = {id(value): value for value in owned if isinstance(value, torch.Generator)}
        return Order(self._index_source, list(generators.values()))

    @property
    def _start_method(self) -> str:
        return (self.multiprocessing_context or multiprocessing).get_start_method()  # type: ignore[no-any-return]

    @property
    def _pins(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()

    @property
    def ring(self) -> Ring:
        """The ring of the workers, made at first use. Each worker has two lanes, because two iterators may overlap."""
        if self._ring is None or not self._ring.mine:
            depth = _SPARE + (self.prefetch_factor or 0)
            self._ring = Ring(2 * self.num_workers, depth, pinned=self._pins)
        return self._ring

    def dead_worker(self) -> str | None:
        """Return how a persistent worker died; None while all live."""
        return None if self._worker_group is None else self._worker_group.death()

    def end_workers(self) -> None:
        """End the persistent workers. The next iteration starts new ones."""
        # As Lightning does. The garbage collector may find the queues first, and then this takes 5 seconds a worker
        if self._iterator is not None and self._worker_group is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]
        self._iterator = self._worker_group = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_ring": None, "_worker_group": None, "_iterator": None}  # another process makes its own

    # ------------------------------------------------------------------------------------------------ resuming

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the dataset, where they have a ``set_epoch``; also in persistent workers.

        A worker learns the epoch with its first batch. An iterable dataset has made its iterator by then: if that already
        chose the samples, they are those of the previous epoch.
        """
        self._epoch = epoch
        for sampler in samplers_in(self._index_source):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        set_epoch(self.dataset, epoch)
        if self._worker_group is not None and self._worker_group.order.context is not None:
            self._worker_group.order.context.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, after the batches it has delivered, for a checkpoint.

        The state holds numbers, lists and tensors only. It does not cover random numbers drawn elsewhere, in transforms or by
        the model; nor a sampler's own generator that is not torch's, unless the sampler has ``state_dict`` and
        ``load_state_dict``.

        Raises:
            StateError: the dataset is iterable; or the loader has ``in_order=False`` and an epoch is not finished.
        """
        if isinstance(self.dataset, IterableDataset):
            raise StateError(
                "an iterable dataset has no numbered samples to skip. Use a map-style dataset, or do not save the loader."
            )
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        progress = self._progress
        if not getattr(self, "in_order", True) and self.num_workers > 1 and progress.delivered and not progress.finished:
            raise StateError("with in_order=False it is unknown which batches were delivered. Take states between epochs.")
        order = self._order()
        now = rng.states(order.generators)
        begun = None if progress.finished else progress.begun
        return {
            "version": _STATE_VERSION,
            "batches": progress.delivered,
            "finished": progress.finished,
            "workers_persist": self._worker_group is not None,
            "epoch": self._epoch,
            "made": progress.made or now,
            "begun": begun or now,
            "asked": (progress.asked if begun else None) or now,
            "sampler": progress.sampler if begun else order.sampler_state(),
            "identity": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. The next iterator delivers the batches that followed, and loads no others.

        Raises:
            StateError: ``state`` is not a state of this version, or of another dataset or batch size.
        """
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
            raise StateError(f"not a DataLoader state of this version of stocache: {state!r:.100}.")
        identity = self._identity()
        for name, saved in state["identity"].items():
            if saved != identity[name] and not (name == "fingerprint" and None in (saved, identity[name])):
                raise StateError(f"the state belongs to a DataLoader with {name} {saved!r}; this one has {identity[name]!r}.")
        order = self._order()
        if len(order.generators) != len(state["begun"]["generators"]):
            raise StateError(
                f"the state belongs to a DataLoader that has, with its samplers, {len(state['begun']['generators'])} random "
                f"number generators; this one has {len(order.generators)}. Pass generator= to both loaders, or to neither."
            )
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._loaded = None if state["finished"] else copy.deepcopy(state)
        if state["finished"]:
            with rng.preserve_rng_state():
                order.restore(state["begun"], state["sampler"])
            self._progress = Progress(finished=True, skip_rng_draw=state["workers_persist"])

    def _next_progress(self) -> Progress:
        if self._loaded is None:
            return Progress(skip_rng_draw=self._progress.skip_rng_draw and self._worker_group is None)
        parts = {key: self._loaded[key] for key in ("made", "begun", "asked", "sampler")}
        return Progress(delivered=self._loaded["batches"], resumed=self._loaded["batches"], **parts)

    def _identity(self) -> dict[str, Any]:
        """Return the properties that must be equal for a state to be resumed."""
        fingerprints = [
            getattr(layer, name, None) for layer in layers(self.dataset) for name in ("fingerprint", "_fingerprint")
        ]  # stocache and Hugging Face use the second name
        sampler, batch_size = self.sampler, self.batch_size
        if isinstance(sampler, LocalityDistributedSampler):  # other ranks may continue the same batches
            batch_size = sampler.global_batch_size
        return {
            "fingerprint": next((value for value in fingerprints if isinstance(value, str)), None),
            "samples": length_of(self.dataset),
            "batches": length_of(self._index_source),
            "batch_size": batch_size,
            "drop_last": self.drop_last,
        }

    # ------------------------------------------------------------------------------------------------ observing

    def stats(self) -> LoaderStats:
        """Return the counts and times of the loader so far."""
        ring, totals = self._ring, self._totals
        counts = self._cache_counts()
        hit_rate = None
        if counts is not None and totals.counts is not None:
            hits, misses = (now - then for now, then in zip(counts, totals.counts, strict=True))
            hit_rate = hits / max(1, hits + misses)
        return LoaderStats(
            batches=totals.batches,
            waited_s=totals.waited_s,
            ring=0 if ring is None else ring.received,
            fallbacks={} if ring is None else {reason: count for reason, count in ring.fallbacks.items() if count},
            ring_bytes=0 if ring is None else ring.nbytes,
            hit_rate=hit_rate,
        )

    def _cache_counts(self) -> tuple[int, int] | None:
        """Return hits and misses of the cache; None without a cache, or if it is closed."""
        for layer in layers(self.dataset):
            if isinstance(layer, CachedDataset):
                with contextlib.suppress(ClosedError):
                    return layer.cache.counts()[:2]
        return None


@dataclass
class _Totals:
    """The running totals of `LoaderStats`; ``counts`` are hits and misses of the cache when the loader was made."""

    counts: tuple[int, int] | None
    batches: int = 0
    waited_s: float = 0.0


class _Iteration:
    """An iterator over batches that counts them, and explains the deaths of workers."""

    def __init__(self, batches: Iterator[Any], progress: Progress, totals: _Totals, group: WorkerGroup) -> None:
        self._batches, self._progress, self._totals, self._worker_group = batches, progress, totals, group

    def __iter__(self) -> "_Iteration":
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # __init__ has not run
            raise AttributeError(name)
        return getattr(self._batches, name)  # attributes of torch's iterator

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's iterators have a length

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            if self._worker_group.ring is not None:
                self._worker_group.ring.reap()
            batch = next(self._batches)
        except StopIteration:
            self._progress.finished = True
            raise
        except Exception as error:
            death = self._worker_group.explanation(error)
            if isinstance(error, WorkerError) and death is not None:
                raise
            if death is not None:
                raise WorkerError(death) from error
            if not is_timeout(error):
                self._progress.delivered += 1  # the error took the place of a batch
            raise
        finally:
            self._totals.waited_s += time.perf_counter() - began
        self._totals.batches += 1
        self._progress.delivered += 1
        return batch


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())
