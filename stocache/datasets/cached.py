"""Cache any map-style dataset in shared memory with one line around it: `CachedDataset`. One module, because a third of it is
the page of that class.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, MapDataPipe, TensorDataset
from tqdm import tqdm
from typing_extensions import TypeVar

from stocache.cache.disk.tiers import Tiers
from stocache.cache.options import ALL_OPTIONS, AuditOptions, CacheOptions, SampleOptions, shows_options, take_options
from stocache.cache.ragged import RaggedCache
from stocache.cache.stats import MISSING, DatasetStats
from stocache.datasets.audit import Audit
from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.datasets.batches.rows import CacheRows
from stocache.datasets.batches.spec import BatchSpec
from stocache.datasets.decoders.cache import decoders_job
from stocache.datasets.failing import Guard
from stocache.datasets.loaders import BlockLoader, MapStyle, SampleLoader
from stocache.datasets.proxy import DatasetProxy, cut_of, decoders_of
from stocache.datasets.transforms.part_transform import PartTransform, as_transform
from stocache.errors import DatasetError, LimitError, SampleError
from stocache.observe.recording.epochs import EpochCounter
from stocache.samples.indices import after_each, check_indices
from stocache.storage.dataset import StorageDataset
from stocache.system.loading.fallback import in_children_or_here, run_here
from stocache.system.objects import newer_of, static_attribute, takes_epoch
from stocache.system.on_error import OnError
from stocache.system.ranks import is_first_rank
from stocache.system.walking import passes_on, walk

if TYPE_CHECKING:
    from stocache.datasets.wrapping import Wrapper

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)  # the samples
_Self = TypeVar("_Self", bound="CachedDataset")

_LARGE = 1 << 16  # bytes of a sample


class CachedDataset(DatasetProxy[_T]):
    """Any map-style dataset, cached in shared memory: one copy for all workers, ranks and (with a name) jobs of the machine.

        dataset = ImageFolder("photos", transform=train_transform)
        dataset = CachedDataset(dataset, size_limit_gib=32)
        loader = DataLoader(dataset, batch_size=256, shuffle=True)

    The first epoch fills the cache while training runs. From the second on, only samples that did not fit are read from the
    dataset. The samples, their order and the random numbers are the same as with the dataset without a cache. If the dataset
    draws random numbers, what its program does before that is cached, and the rest runs each time (NOTE [ Cut programs ]). The
    cached part must depend on the index alone; see ``on_change``. Else results of decoders are cached (NOTE [ Decoders ]).

    Args:
        dataset: has ``__len__`` and ``__getitem__``: of torch, torchvision, Hugging Face, MONAI, or your own. A sample is any
            tree of tensors, numpy arrays, numbers, str, bytes and None in containers (`RaggedCache` lists them), and comes back
            equal.
        size_limit_gib: GiB for the cache on this machine; "auto" for the memory that the machine can spare.
        transform: called with each sample after the cache and after the dataset's own transforms; returns the final sample. It
            gets a private copy. Or a mapping from parts of the sample to functions of them: ``{0: augment}``,
            ``{"image": augment}``.
        share: True wraps a copy of the dataset whose lists, dicts and arrays of 1 MiB and more lie in shared memory
            (`stocache.share`).
        on_error: what happens when a sample cannot be loaded: a `Retry`, a `Skip`, or a list of one of each. Without it the
            error is raised.
        objects: `CacheOptions` (also in place of the size), `SampleOptions` and `AuditOptions`. Their options can be spelled
            out instead, as arguments of their own.

    `CacheOptions` say where samples are kept and who shares them: ``name``, ``persist``, ``fingerprint``, ``on_busy``,
    ``share_ranks``, ``admission``, ``codec``, ``allow_pickle``, ``narrow``, ``disk``, ``disk_limit``. Admission by "cost" and a
    codec keep samples in a `RaggedCache`.

    `SampleOptions` say which samples are cached, and in which form: ``placement``, ``variable``, ``probe``, ``example``,
    ``copy``, ``split``, ``cut``, ``store``, ``decoders``.

    `AuditOptions` say how cached samples are compared with the dataset, and what happens when one differs: ``audit``,
    ``on_change``.

    Attributes:
        dataset: the wrapped dataset. Its own attributes (``classes``, ``targets``) can be read and set here, too.
        cache: the `SharedCache` or `RaggedCache`. disk_cache: the `DiskCache` behind it, or None.
        after_cache: the ``transform`` argument. It may be set.
        transform: the transform of the dataset; setting it cuts the program again. If the dataset has none, ``after_cache``.

    Raises:
        DatasetError: the dataset is iterable, has no length, or is a mapping with other keys; ``transform`` is not callable, or
            samples have no such part; the dataset raises an error that cannot leave the child process; samples depend on more
            than their index, and ``on_change`` is "raise".
        WorkerError: the child process ended while it loaded a sample.
        LimitError: an option is not a size or share, is too small, unknown, or contradicts a second one.
        SampleError: with ``variable=False``, the samples differ in shape, or are not tensors, arrays and numbers.
        CodecError, CacheNameError, MismatchError, SegmentError: as for the caches.

    Samples are loaded in a child process (NOTE [ A child loads ]), so the constructor does not change the dataset. A sample
    that does not fit the cache is returned uncached and counted, with one warning. Errors of the dataset pass through. Setting
    an attribute of the dataset here sets it there; ``on_change`` applies if cached samples were made with a different value.

    Only samples by their index are cached. Slices, lists, names and the dataset's own methods return what the dataset returns,
    without the cache. For a Hugging Face dataset, methods that choose rows (``select``, ``shuffle``) say so in a warning, and
    methods that change samples (``map``, ``set_format``) are a `DatasetError`.

    Examples:
        >>> with CachedDataset(TensorDataset(torch.arange(12)), size_limit_gib="1MB") as dataset:
        ...     for epoch in range(2):
        ...         batches = list(DataLoader(dataset, batch_size=4))
        ...     stats = dataset.stats()
        >>> batches[0], stats.epochs[1].hits, stats.epochs[1].misses
        ([tensor([0, 1, 2, 3])], 12, 0)
    """

    _initialised = False

    @shows_options(*chain.from_iterable(ALL_OPTIONS.values()))
    def __init__(
        self,
        dataset: "Dataset[_T] | MapStyle[_T]",
        size_limit_gib: float | str | CacheOptions | SampleOptions | AuditOptions = "auto",
        *objects: CacheOptions | SampleOptions | AuditOptions,
        transform: Callable[[Any], Any] | Mapping[Any, Any] | None = None,
        share: bool = False,
        on_error: OnError | None = None,
        **options: Any,
    ) -> None:
        from stocache.datasets.wrapping import Wrapper, check_dataset  # here: loaders start faster

        where, samples, checks = take_options("CachedDataset", [size_limit_gib, *objects], options, ALL_OPTIONS)
        if share:
            from stocache.shm.tables.sharing import share as share_tables

            try:
                dataset = share_tables(dataset)
            except SampleError as error:
                logger.warning("share=True has no effect: %s", str(error))
        self._len = check_dataset(dataset)
        self.dataset: Any = dataset  # before others that hold it: MONAI walks through the attributes in order, and seeds them
        self.after_cache = as_transform(transform)
        self._copies = samples.copy
        self._batch_spec: BatchSpec | None = None  # of lazy batches; see with_lazy_batches
        self._fingerprint = where.fingerprint
        checked = type(dataset) is StorageDataset and dataset.reads_blocks  # by checksums
        self._audit = Audit(dataset, self._len, dataclasses.replace(checks, audit=0) if checked else checks)
        self._wrapping, self._decoders_job = (where, samples), decoders_job()
        self._guard = None if on_error is None else Guard(on_error, dataset)
        wrapper = Wrapper(dataset, self._len, where, samples)
        wrapper.cut()
        self._take(wrapper)
        self._by_type: dict[type, bool] = {}  # for the classes of indices, whether samples depend on them
        self._last_stats: DatasetStats | None = None  # when it was closed
        self._warn_of_hidden()
        self._initialised = True
        self._serve_decoders()

    def _take(self, wrapper: "Wrapper") -> None:
        """Serve samples from a cache that is made for this dataset."""
        wrapper.make()
        probe, self._split = wrapper.probe, wrapper.split
        vars(self).update(cache=wrapper.cache, disk_cache=wrapper.disk, _loader=wrapper.loader)
        self._tiers = Tiers(self.cache, self.disk_cache)
        self._loaded_here = probe.loaded_here
        if isinstance(self.after_cache, PartTransform) and self._split is None:
            for sample in list(probe.named.values())[:1]:
                self.after_cache.check(sample)
        self._epochs = EpochCounter(self.cache.counts())
        self._audit.values.hold()
        self._audit.set_by_loads |= probe.keeps
        if probe.finding is not None:
            self._audit.change(probe.finding)
        if self.cache.dataset_len < self._len:  # it has no table of so many
            self._audit.leave()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped dataset, so that `isinstance` finds it; ``type()`` is ours. Code that knows it may ask.

        Not of one that wraps a dataset: its ``dataset`` would be taken for ours. Nor of a DataPipe, which torch serves
        otherwise.
        """
        dataset = vars(self).get("dataset")
        stands_in = isinstance(dataset, Dataset) and not isinstance(dataset, MapDataPipe) and not hasattr(dataset, "dataset")
        return type(dataset) if stands_in else type(self)

    @property
    def is_left(self) -> bool:
        """Whether the cache is not served any more, because samples depend on more than their index."""
        return self._audit.changed

    @property
    def is_transformed(self) -> bool:
        """Whether any transforms run after the cache."""
        return self.after_cache is not None or self._split is not None

    @property
    def is_lazy(self) -> bool:
        """Whether ``__getitems__`` returns a `LazyBatch`; see `with_lazy_batches`."""
        return self._batch_spec is not None and not self.is_transformed

    @property
    def transforms_batches(self) -> bool:
        """Whether a transform of the dataset gets whole batches."""
        return self._split is not None and self._split.takes_batches

    @property
    def gathers_on_device(self) -> bool:
        """Whether ``__getitems__`` returns batches for a GPU; see `BatchSpec`."""
        return self._batch_spec is not None and self._batch_spec.on_device

    @overload
    def __getitem__(self, idx: int) -> _T: ...

    @overload
    def __getitem__(self, idx: Any) -> Any: ...

    def __getitem__(self, idx: Any, *arguments: Any, **options: Any) -> Any:
        """Return sample ``idx``, from the cache or the dataset, transformed. A negative ``idx`` counts from the end.

        For a list, array, tensor, slice or name, or an index outside the dataset, return ``dataset[idx]`` of the wrapped
        dataset, without the cache. The same applies if there are more ``arguments`` or ``options``, which the ``__getitem__``
        of the dataset takes.

        Raises:
            DatasetError: ``idx`` is a list, array, tensor or slice, and there is a ``transform``, which takes one sample.
        """
        asked = idx
        if arguments or options:
            sample = self.dataset.__getitem__(idx, *arguments, **options)
            return sample if self.after_cache is None else self.after_cache(sample)
        if not (type(idx) is int and 0 <= idx < self._len):
            idx = self._number(idx)
            if idx is None:
                return self._ask(asked)
            if asked == idx and self._keeps_types([asked]):
                with contextlib.suppress(TypeError):  # the dataset takes only int
                    sample = self.dataset[asked]
                    return sample if self.after_cache is None else self.after_cache(sample)
        served = self._serves((idx,))
        sample = self.cache.hit(idx, self._copies or self.is_transformed) if served else MISSING
        if sample is MISSING:
            make = partial(self._make, served)
            return make(asked) if self._guard is None else self._guard.one(make, asked)
        if self._split is not None:
            sample = self._split.finish(asked if asked == idx else idx, sample)  # of the type that the dataset would get
        return sample if self.after_cache is None else self.after_cache(sample)

    def _make(self, served: bool, asked: Any) -> Any:
        """Return a sample that is not in the cache. If the cache is not ``served``, the dataset makes it."""
        if (idx := self._number(asked)) is None:
            return self._ask(asked)
        if not served:
            sample = self.dataset[idx]
        else:
            copy = self._copies or self.is_transformed
            sample = self._tiers.get_or_load(idx, self._load_one, copy=copy, strict=False)
            if self._split is not None:
                sample = self._split.finish(asked if asked == idx else idx, sample)
        return sample if self.after_cache is None else self.after_cache(sample)

    def __iter__(self) -> Iterator[Any]:
        """Iterate as the dataset does: without the cache if its class, as none of Python and no stream, has an ``__iter__``."""
        kind = type(self.dataset)
        by_number = kind.__module__ == "builtins" or isinstance(self.dataset, IterableDataset)
        own = not by_number and static_attribute(kind, "__iter__") is not None
        if own and self.after_cache is None:
            return iter(self.dataset)
        return map(self.__getitem__, range(len(self)))

    def __getitems__(self, indices: Sequence[int], before_each: Callable[[int], None] | None = None) -> list[Any] | LazyBatch:
        """Return the samples ``indices``. Hits come from one gather, misses from the ``__getitems__`` of the dataset if any.

        ``before_each`` is called with the position of each sample before the dataset makes it, or its transforms run. Both get
        one sample at a time then.

        """
        if newer_of(self) is None:  # a subclass has a __getitem__ of its own
            return list(map(self.__getitem__, after_each(before_each, indices)))
        if self._guard is not None:
            get_many = partial(self._get_many, before_each=before_each)
            samples: list[Any] | LazyBatch = self._guard.many(get_many, self.__getitem__, indices, before_each)
            return samples
        return self._get_many(indices, before_each)

    def _get_many(self, indices: Sequence[int], before_each: Callable[[int], None] | None) -> list[Any] | LazyBatch:
        return self._read(indices, before_each) if self._batch_spec is None else self._gather(indices, self._batch_spec)

    def _gather(self, indices: Sequence[Any], spec: BatchSpec) -> LazyBatch:
        """Return the samples ``indices`` as a batch that has read nothing yet."""
        numbers = None if self._keeps_types(indices) else self._numbers(indices)
        if numbers is None or not self._serves(numbers) or self.is_transformed:  # since the loop began
            return LazyBatch(spec, CacheRows(self.cache, indices, self._read, direct=True))
        return LazyBatch(spec, CacheRows(self.cache, numbers, self._load_missing, self.disk_cache))

    def _read(self, indices: Sequence[Any], before_each: Callable[[int], None] | None = None) -> list[Any]:
        """Return the samples ``indices``; from the dataset if they may not be served from the cache, or are not numbers."""
        if self._keeps_types(indices):
            return list(map(self.__getitem__, after_each(before_each, indices)))
        numbers = self._numbers(indices)
        if numbers is not None and self._serves(numbers):
            samples = self._read_cached(numbers, before_each)
        else:
            keys = list(indices) if numbers is None else check_indices(numbers, self._len, "dataset").tolist()
            load_many = SampleLoader(self.dataset).load_many
            singly = chain.from_iterable(load_many([key]) for key in after_each(before_each, keys))
            samples = load_many(keys) if before_each is None else singly
        if self.after_cache is not None:
            samples = map(self.after_cache, samples)
        return list(samples) if isinstance(samples, Iterator) else samples  # type: ignore[return-value]

    def _read_cached(self, indices: Sequence[int], before_each: Callable[[int], None] | None) -> Iterable[Any]:
        """Return samples of the cache, with the missing ones, after the transforms of the dataset."""
        large = isinstance(self.cache, RaggedCache) or self.cache.slot_bytes >= _LARGE
        # Large samples are not all held at once while they are transformed
        read = self.cache.each if self.is_transformed and large else self.cache.get_or_load_many
        copy = self._copies or self.is_transformed
        samples: Iterable[Any] = read(indices, self._load_missing, copy=copy, strict=False)
        if before_each is not None and self.is_transformed:
            samples = after_each(before_each, samples)
        if self._split is None:
            return samples
        return self._split.finish_many(indices, samples) if before_each is None else map(self._split.finish, indices, samples)

    def _load_missing(self, indices: list[int]) -> Iterable[Any]:
        """Return, or yield, samples that the cache misses: from the disk, or else from the dataset."""
        return self._tiers.behind(partial(self._audit.watch, self._loader.load_many))(indices)

    def _load_one(self, idx: int) -> Any:
        """Load a sample for the cache by itself, not by a ``__getitems__``."""
        return next(iter(self._audit.watch(partial(map, self._loader.load), [idx])))

    def _keeps_types(self, indices: Sequence[Any]) -> bool:
        """Return whether samples depend on the class of these indices: of numpy or torch, when they are computed with them."""
        others = {type(idx): idx for idx in indices if type(idx) is not int} if isinstance(indices, list) else {}
        for kind, idx in others.items():
            if kind not in self._by_type:
                self._by_type[kind] = isinstance(idx, bool | np.number | Tensor) and self._audit.depends_on_type(idx)
        return any(map(self._by_type.__getitem__, others))

    def _numbers(self, indices: Sequence[Any]) -> Sequence[int] | None:
        """Return indices that count from the start; None if they are not all of samples, but pairs, names or outside."""
        try:
            if len(indices):
                ends = (indices.min(), indices.max()) if isinstance(indices, np.ndarray) else (min(indices), max(indices))
                if ends[1] >= self._len or ends[0] < 0:
                    numbers = [number for idx in indices if (number := self._number(idx)) is not None]
                    return numbers if len(numbers) == len(indices) else None
        except TypeError:
            return None
        return indices

    def _serves(self, indices: Sequence[int]) -> bool:
        """Return whether the cache serves these samples, after comparing some when that is due; else the dataset makes them."""
        if not self._audit.is_due(len(indices)):
            return True
        if self._audit.values.new(transforms=True):
            self._follow_transforms()
        if self._audit.allows(indices, self.cache, self._loader.load):
            return True
        self._serve_decoders()
        return False

    def _ask(self, key: Any) -> Any:
        """Return the result of the dataset for a key that is not the index of one of its samples."""
        if self.after_cache is None or isinstance(key, str):  # a name is one of a column
            return self.dataset[key]
        if isinstance(key, list | tuple | slice | range) or getattr(key, "ndim", None):
            raise DatasetError(
                f"{type(self.dataset).__name__}[{key!r:.50}] is not one sample, so transform= cannot run on it. Ask for one "
                f"sample at a time, or leave the transform out."
            )
        return self.after_cache(self.dataset[key])

    def prefetch_blocks(self, blocks: Iterable[int]) -> None:
        """Have the storage read blocks ahead, except cached ones. A `BlockSampler` calls it."""
        self.dataset.prefetch_blocks(self._loader.uncached(blocks) if isinstance(self._loader, BlockLoader) else blocks)

    def warm(self, num_workers: int = 1, progress: bool = True) -> DatasetStats:
        """Fill the cache now, and return `stats`. Several ranks and jobs may call it: each sample is loaded once.

        Args:
            num_workers: child processes that load. 0 counts as 1, because the dataset of this process must not change.
            progress: show a progress bar, except on ranks above 0.

        Raises:
            LimitError: ``num_workers`` is not a number of processes.
            WorkerError: a child died.
            Exception: an error of the dataset.
        """
        if not isinstance(num_workers, int) or num_workers < 0:
            raise LimitError(f"num_workers={num_workers!r} is not a number of processes. Use 0 or more.")
        if self.is_left:
            return self.stats()
        with tqdm(unit="sample", desc="warming the cache", disable=not (progress and is_first_rank())) as bar:
            for _ in range(1 + self.cache.may_admit_later):  # by cost, some samples are admitted only at the second request
                indices = self._tiers.unfilled(np.arange(self._len))
                bar.total = bar.n + len(indices)
                for count in self._warm(indices, num_workers or 1):
                    bar.update(count)
        self._epochs.begin(self.cache.counts())  # filling does not count as an epoch
        return self.stats()

    def _warm(self, indices: list[int], num_workers: int) -> Iterable[int]:
        """Fill the cache in child processes, and yield how many samples each batch had."""
        if isinstance(self._loader, BlockLoader):
            batches = self._loader.by_block(indices)
        else:
            batches = [indices[at : at + 16] for at in range(0, len(indices), 16)]
        begin = os.getpid() * 40503 % max(1, len(batches))  # not where another rank begins
        batches = batches[begin:] + batches[:begin]
        jobs = [partial(self._fill, batches[number::num_workers]) for number in range(min(num_workers, len(batches)))]
        if self._loaded_here:
            return chain.from_iterable(map(run_here, jobs))
        return in_children_or_here(self.dataset, jobs, proven=self._loaded_here is False)

    def _fill(self, batches: list[list[int]]) -> Iterator[int]:
        """Fill the cache with samples, and yield the size of each batch."""
        for batch in batches:
            if isinstance(self._loader, BlockLoader):
                self._loader.copy_samples(batch)
            self._tiers.fill(batch, self._loader.load_many)
            yield len(batch)

    def stats(self) -> DatasetStats:
        """Return the counts of all processes, in total and for each epoch; after `close` the counts of that moment."""
        if self.cache.closed and self._last_stats is not None:
            return self._last_stats
        total, disk = self._tiers.stats()
        epochs = self._epochs.stats(self.cache.counts())
        audit, texts = self._audit, (cut_of(self), decoders_of(self))
        counts = (0, ()) if self._guard is None else self._guard.failures.counts()
        return DatasetStats(total, epochs, disk, audit.compared, audit.changed, self.cache.ranks, *texts, *counts)

    def begin_loop(self, loader: object, looped: bool) -> None:
        """Note that a loop over a loader begins. ``looped``: whether the last one got batches. `DataLoader` calls it."""
        self._follow_transforms()
        self._epochs.loop_begins(self.cache.counts(), loader, expected=looped and not self._audit.changed)
        self._audit.begin_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, for `stats` and the log; and in the dataset, if it has ``set_epoch``.

        A `stocache.DataLoader` begins epochs by itself.
        """
        self._epochs.epoch_is_set(self.cache.counts(), epoch, expected=not self._audit.changed)
        if self._guard is not None:
            self._guard.epoch = epoch
            self._guard.warn()
        if takes_epoch(self.dataset):
            self.dataset.set_epoch(epoch)
        self._audit.begin_epoch()

    def close(self) -> None:
        """Close the cache. May be called twice."""
        if isinstance(self._loader, BlockLoader):
            self._loader.close()
        if self._guard is not None:
            self._guard.warn()
        if not self.cache.closed:
            super().__setattr__("_last_stats", self.stats())
        self._tiers.close()
        self._audit.close()
        if self._decoders is not None:
            self._decoders.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        # Says nothing that reading changes: some programs compare it with the text of the run that they resume
        return f"<{type(self).__name__} of {type(self.dataset).__name__} in a {type(self.cache).__name__}>"


def is_cache(dataset: object) -> bool:
    """Return whether a dataset makes its samples as a `CachedDataset` does."""
    kind = type(dataset)
    return isinstance(dataset, CachedDataset) and all(
        getattr(kind, name) is getattr(CachedDataset, name) for name in ("__getitem__", "__getitems__")
    )


def draws_nothing(dataset: object) -> bool:
    """Whether all samples come from tensors or from a storage, perhaps through caches without transforms."""
    for each in walk(dataset):
        is_plain = type(each) is TensorDataset or (type(each) is StorageDataset and each.reads_blocks)
        if not (is_plain or passes_on(each) or (is_cache(each) and not each.is_transformed)):
            return False
    return True
