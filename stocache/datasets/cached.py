"""Cache any map-style dataset in shared memory with one line around it: `CachedDataset`."""

import contextlib
import dataclasses
import inspect
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, Protocol, overload

import numpy as np
from torch.utils.data import Dataset
from tqdm import tqdm
from typing_extensions import TypeVar

from stocache.cache.disk.tiers import Tiers
from stocache.cache.options import CacheOptions, OnBusy
from stocache.cache.placement import Placement
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache
from stocache.cache.stats import MISSING, DatasetStats
from stocache.datasets.audit import Audit, OnChange
from stocache.datasets.batches import BatchSpec, DirectBatch, LazyBatch
from stocache.datasets.indexing import Collate, differ_in_size, find_collate, indices_in, pads
from stocache.datasets.loaders import BlockLoader, SampleLoader
from stocache.datasets.parts import follow, is_part
from stocache.datasets.proxy import DatasetProxy
from stocache.datasets.transforms.part_transform import PartTransform, as_transform
from stocache.errors import DatasetError, LimitError, SampleError
from stocache.observe.recording.epochs import EpochCounter
from stocache.samples.indices import check_index, check_indices, length_of
from stocache.storage.dataset import StorageDataset
from stocache.system.generators import in_worker_thread, undrawn, undrawn_many
from stocache.system.loading.fallback import in_children_or_here, run_here
from stocache.system.objects import get_many_of, takes_epoch
from stocache.system.ranks import is_first_rank

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)  # the samples
_T_co = TypeVar("_T_co", covariant=True)
_Self = TypeVar("_Self", bound="CachedDataset")

_LARGE = 1 << 16  # bytes of a sample


class MapStyle(Protocol[_T_co]):
    """What a dataset needs: a length, and samples by their index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, idx: int, /) -> _T_co:
        """Return a sample."""


class CachedDataset(DatasetProxy[_T]):
    """Any map-style dataset, cached in shared memory: one copy for all workers, ranks and (with a name) jobs of the machine.

        dataset = CachedDataset(ImageFolder("photos", transform=train_transform), size_limit_gib=32)
        loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)

    The first epoch fills the cache while training runs. From the second on, only samples that did not fit are read from the
    dataset. The samples, their order and the random numbers are those of the dataset without a cache. Its transforms are split:
    the deterministic beginning runs before the cache, the rest after it (NOTE [ Splitting ]).

    A sample must depend on its index alone, apart from the transforms. That is checked while samples are served; see
    ``on_change``.

    Args:
        dataset: has ``__len__`` and ``__getitem__``: of torch, torchvision, Hugging Face, MONAI, or your own. A sample is any
            tree of tensors, numpy arrays, numbers, str, bytes and None in containers (`RaggedCache` lists them), and comes back
            equal.
        size_limit_gib: GiB for the cache on this machine; "auto" for the memory that the machine can spare. Or `CacheOptions`,
            which holds the options under *Where* and *Sharing*, too.

    What to cache:
        transform: called with each sample after the cache and after the dataset's own transforms; returns the final sample. It
            gets a private copy. Or a mapping from parts of the sample to functions of them: ``{0: augment}``,
            ``{"image": augment}``.
        split: False leaves all transforms of the dataset before the cache. Transforms that cannot be split stay there, too.
        cut: how many of the deterministic steps at the beginning of a transform run before the cache: "latest", all;
            "smallest", those after which a sample is smallest. None takes the latest cut at which all samples fit, else the
            smallest, but not one that saves next to nothing.
        store: "encoded" caches the bytes of image files, and decodes them after the cache: for datasets that call an attribute
            ``loader`` with a path, such as torchvision's folders, and for datasets of Hugging Face with images.
        narrow: True keeps numbers that are made of 8-bit or 16-bit integers as these (images as floats, also normalised ones,
            masks, grey images of three channels): two to eight times as many samples fit. Each sample is compared to the last
            bit before it is kept. One that is made otherwise is kept as it is, if samples vary in size; it stays uncached, if
            they have one shape and the probed ones are narrow. "auto" does so where not all samples would fit.
        placement: which samples are cached when all have one shape and not all fit: "scattered", evenly spread; "prefix", the
            first; or a `Placement`: ``Placement.from_env()`` gives each of several machines its own part. Samples of varying
            size are kept in the order in which they come. For a `StorageDataset` of blocks, whole blocks are cached, also of
            samples of varying size, which are then scattered as well (NOTE [ Admitting blocks ]).
        audit: the share of the time for loading samples that are cached from the dataset as well, to compare them. The first
            sample that each process serves in an epoch is compared in any case; with 0 no sample is. See NOTE [ The audit ].
        on_change: what happens when a sample is found to depend on more than its index: on random numbers that the dataset
            draws, an epoch, an attribute that was set, an edited file. "uncached": from then on the dataset makes each sample
            itself, as without a cache, with one warning that names the cause. "raise": a `DatasetError`. "keep": the cached
            samples are served, without a warning.

    Where: ``admission``, ``codec``, ``allow_pickle``, ``disk`` and ``disk_limit`` are those of `CacheOptions`. Admission by
    "cost" and a codec keep samples in a `RaggedCache`.

    Sharing: ``name``, ``persist``, ``fingerprint``, ``on_busy`` and ``share_ranks`` are those of `CacheOptions`. ``share=True``
    wraps a copy of the dataset whose lists, dicts and arrays of 1 MiB and more lie in shared memory (`stocache.share`).

    Speed:
        variable: whether samples vary in size. None finds out. True keeps them in a `RaggedCache` in any case; False in a
            `SharedCache`, which is faster, and needs samples of one structure with the same dtypes and shapes.
        probe: how many samples, evenly spread, to load in a child process to find that out; fewer where it takes long. They are
            cached, unless they have to be timed for ``admission="cost"``. With 0, samples are cached as ones of varying size.
        example: a sample as the dataset returns it, in place of the probe: for datasets that are slow, or not ready yet
            (``worker_init_fn`` makes them ready).
        copy: False returns views of the cache where no transform runs after it: writing to one changes all later epochs.
            With transforms after the cache, samples are copied in any case.

    Attributes:
        dataset: the wrapped dataset. Its own attributes (``classes``, ``targets``) can be read and set here, too.
        cache: the `SharedCache` or `RaggedCache`.
        disk_cache: the `DiskCache` behind it, or None.
        after_cache: the ``transform`` argument. It may be set.
        transform: the transform of the dataset; setting it splits it again. Where the dataset has none, ``after_cache``.

    Raises:
        DatasetError: the dataset is iterable, has no length, or is a mapping with other keys; ``transform`` is not callable, or
            samples have no such part; the dataset raises an error that cannot leave the child process; samples depend on more
            than their index, and ``on_change`` is "raise".
        WorkerError: the child process ended while it loaded a sample.
        LimitError: the limit is not a size, or too small; ``audit`` is not a share, or ``on_change`` is unknown; options
            contradict each other.
        SampleError: with ``variable=False``, the samples differ in shape, or are not tensors, arrays and numbers.
        CodecError, CacheNameError, MismatchError, SegmentError: as for the caches.

    The constructor does not change the dataset: samples are loaded in a child process (NOTE [ A child loads ]). A later sample
    that does not fit the cache is returned uncached and counted (``stats().total.rejected``), with one warning. Errors of the
    dataset pass through.

    Setting an attribute of the dataset here sets it there. Where samples are made with the attribute and some are cached, or
    where a transform does not begin like the one that cached samples were made with, ``on_change`` applies. For a Hugging Face
    dataset, ``select``, ``shuffle``, ``shard``, ``skip``, ``take`` and ``train_test_split`` return views of the cached dataset;
    methods that change it or make another one are a `DatasetError`.

    Examples:
        >>> with CachedDataset(TensorDataset(torch.arange(12)), size_limit_gib="1MB") as dataset:
        ...     for epoch in range(2):
        ...         batches = list(DataLoader(dataset, batch_size=4))
        ...     stats = dataset.stats()
        >>> batches[0], stats.epochs[1].hits, stats.epochs[1].misses
        ([tensor([0, 1, 2, 3])], 12, 0)
    """

    _hides_transforms = True  # of the wrapped dataset: they are split here
    _initialised = False

    def __init__(
        self,
        dataset: "Dataset[_T] | MapStyle[_T]",
        size_limit_gib: float | str | CacheOptions = "auto",
        *,
        transform: Callable[[Any], Any] | Mapping[Any, Any] | None = None,
        name: str | None = None,
        persist: bool = False,
        fingerprint: str | None = None,
        on_busy: OnBusy = "uncached",
        share_ranks: bool = True,
        share: bool = False,
        placement: Literal["prefix", "scattered"] | Placement = "scattered",
        variable: bool | None = None,
        probe: int = 8,
        example: Any = None,
        copy: bool = True,
        split: bool = True,
        cut: Literal["latest", "smallest"] | None = None,
        store: Literal["decoded", "encoded"] = "decoded",
        narrow: bool | Literal["auto"] = False,
        admission: Literal["all", "cost"] = "all",
        codec: Literal["zstd", "lz4"] | None = None,
        allow_pickle: bool = False,
        disk: str | os.PathLike[str] | None = None,
        disk_limit: float | str | None = None,
        audit: float = 0.01,
        on_change: OnChange = "uncached",
    ) -> None:
        given = locals()
        from stocache.datasets.wrapping import SampleOptions, check_dataset, wrap  # here: loaders start faster

        if share:
            from stocache.shm.tables.sharing import share as share_tables

            try:
                dataset = share_tables(dataset)
            except SampleError as error:
                logger.warning("share=True has no effect: %s", str(error))
        self._len = check_dataset(dataset)
        self.dataset: Any = dataset  # before others that hold it: MONAI walks through the attributes in order, and seeds them
        self.after_cache = as_transform(transform)
        self._copies = copy
        self._rows: Any = None  # of a view: its samples
        self._whole: Any = None  # of a view: the dataset that has all samples
        self._collates: dict[type, Collate | None] = {}  # how the dataset puts samples together, by the type of the index
        self._sizes_compared: set[type] = set()  # types of indices for which that was compared for samples of several sizes
        self._batch_spec: BatchSpec | None = None  # of lazy batches; see with_lazy_batches
        options = CacheOptions.of(**_those_of(CacheOptions, given))
        self._fingerprint = options.fingerprint
        samples = SampleOptions(**_those_of(SampleOptions, given))
        checked = type(dataset) is StorageDataset and dataset.reads_blocks  # by checksums
        self._audit = Audit(dataset, self._len, 0 if checked else audit, on_change)
        wrapped = wrap(dataset, self._len, options, samples)
        self.cache, self.disk_cache, self._loader = wrapped.cache, wrapped.disk, wrapped.loader
        self._tiers = Tiers(self.cache, self.disk_cache)
        self._split, self._plan = wrapped.split, wrapped.plan
        self._reads, self._loaded_here = wrapped.probe.reads, wrapped.probe.loaded_here
        if isinstance(self.after_cache, PartTransform) and not self._has_rest:
            for sample in list(wrapped.probe.named.values())[:1]:
                self.after_cache.check(sample)
        self._epochs = EpochCounter(self.cache.counts())
        if wrapped.probe.finding is not None:
            self._audit.change(wrapped.probe.finding)
        self._last_stats: DatasetStats | None = None  # when it was closed
        _warn_of_hidden(dataset, {*dir(type(self)), *vars(self)})
        self._initialised = True

    @property
    def transform(self) -> Any:
        """The transform of the dataset; where it has none, the one that runs after the cache."""
        return self.dataset.transform if self._has("transform") else self.after_cache

    @property
    def is_left(self) -> bool:
        """Whether the cache is not served any more, because samples depend on more than their index."""
        return self._audit.changed

    @property
    def _has_rest(self) -> bool:
        """Whether transforms of the dataset run after the cache."""
        return self._split is not None and self._split.has_rest

    @property
    def is_transformed(self) -> bool:
        """Whether any transforms run after the cache."""
        return self.after_cache is not None or self._has_rest

    @property
    def is_lazy(self) -> bool:
        """Whether ``__getitems__`` returns a `LazyBatch`; see `with_lazy_batches`."""
        return self._batch_spec is not None and not self.is_transformed

    @property
    def transforms_batches(self) -> bool:
        """Whether a transform of the dataset gets whole batches."""
        return self._split is not None and self._split.has_rest and self._split.takes_batches

    @property
    def gathers_on_device(self) -> bool:
        """Whether ``__getitems__`` returns batches for a GPU; see `BatchSpec`."""
        return self._batch_spec is not None and self._batch_spec.on_device

    @property
    def _copy(self) -> bool:
        return self._copies or self.is_transformed

    @property
    def _load_many(self) -> Callable[[list[int]], Iterable[Any]]:
        load_many = undrawn_many(self._audit.watched_many(self._loader), self._audit.watched(self._loader.load))
        return self._tiers.behind(load_many)

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            DatasetError: the dataset has become longer or shorter.
        """
        now = length_of(self.dataset)
        if now is not None and now != self._len:
            raise DatasetError(
                f"{type(self.dataset).__name__} had {self._len} samples when it was wrapped, and has {now} now. Wrap it when "
                f"it is complete, or wrap it again."
            )
        return self._len

    @overload
    def __getitem__(self, idx: int) -> _T: ...

    @overload
    def __getitem__(self, idx: Any) -> Any: ...

    def __getitem__(self, idx: Any) -> Any:
        """Return sample ``idx``, from the cache or the dataset, transformed. A negative ``idx`` counts from the end.

        A list, array, tensor or slice of indices, or the name of a column, returns the same as for the dataset; made from
        cached samples where the dataset makes it of its samples (see indexing.py).

        Raises:
            SampleIndexError: ``idx`` is outside the dataset, or cannot be an index.
            DatasetError: the dataset has become longer or shorter; or there is a ``transform``, and the result of the dataset
                for several indices is not made of its samples.
        """
        if not (type(idx) is int and 0 <= idx < self._len):
            if isinstance(idx, list | tuple | slice | range | str) or getattr(idx, "ndim", None):
                return self._get_many(idx)
            idx = self._check_index(idx)
        if self._rows is not None:
            idx = int(self._rows[idx])
        if self._split is not None and self._split.has_changed((idx,)):
            self._follow_transforms()
        if self._audit.is_due(1) and not self._audit.allows((idx,), self.cache, self._served, self._fresh):
            sample = self._source[idx]
            return sample if self.after_cache is None else self.after_cache(sample)
        sample = self.cache.hit(idx, self._copy)
        if sample is MISSING:
            load = undrawn(self._audit.watched(self._loader.load))
            sample = self._tiers.get_or_load(idx, load, copy=self._copy, strict=False)
        if self._split is not None and self._split.has_rest:
            sample = self._split.finish(idx, sample)
        return sample if self.after_cache is None else self.after_cache(sample)

    def __getitems__(self, indices: Sequence[int], before_each: Callable[[int], None] | None = None) -> list[Any] | LazyBatch:
        """Return the samples ``indices``. Hits come from one gather, misses from the ``__getitems__`` of the dataset if any.

        Args:
            indices: of samples. A negative one counts from the end.
            before_each: called with the position of each sample before its transforms, which then get one sample at a time.

        Raises:
            SampleIndexError: an index is not an integer, or is outside the dataset.
        """
        if get_many_of(self) is None:  # a subclass has a __getitem__ of its own
            return list(_load_each(self.__getitem__, indices, before_each or (lambda position: None)))
        try:
            if len(indices) and (indices.min() if isinstance(indices, np.ndarray) else min(indices)) < 0:
                indices = [self._check_index(idx) for idx in indices]
        except TypeError:  # not numbers, but whatever the dataset takes: pairs of an index and a size
            if self.is_lazy and self._batch_spec is not None and isinstance(self.cache, SharedCache):
                return DirectBatch(self.cache, indices, SampleLoader(self.dataset).load_many, self._batch_spec)
            return self._ask_each(self.dataset, indices, before_each)
        if self._rows is not None:
            indices = self._rows[check_indices(indices, self._len, "view")]
        if self._split is not None and self._split.has_changed(indices):
            self._follow_transforms()
        served = not self._audit.is_due(len(indices)) or self._audit.allows(indices, self.cache, self._served, self._fresh)
        if self._batch_spec is not None and isinstance(self.cache, SharedCache):
            if self.is_transformed:  # since the loop began
                return DirectBatch(self.cache, indices, self._replace(_batch_spec=None).__getitems__, self._batch_spec)
            if not served:
                return DirectBatch(self.cache, indices, SampleLoader(self._source).load_many, self._batch_spec)
            load_many = self._tiers.behind(self._audit.watched_many(self._loader))
            return LazyBatch(self.cache, indices, load_many, self._batch_spec, self.disk_cache)
        samples: Iterable[Any]
        if not served:
            return self._ask_each(self._source, check_indices(indices, len(self._source), "dataset").tolist(), before_each)
        large = isinstance(self.cache, RaggedCache) or self.cache.slot_bytes >= _LARGE
        if self.is_transformed and large:  # too large to be held all at once while they are transformed
            samples = self.cache.each(indices, self._load_many, copy=self._copy, strict=False)
        else:
            samples = self.cache.get_or_load_many(indices, self._load_many, copy=self._copy, strict=False)
        if before_each is not None:
            samples = _call_before_each(samples, before_each)
        if self._split is not None and self._split.has_rest:
            finish_many = self._split.finish_many if before_each is None else partial(map, self._split.finish)
            samples = finish_many(indices, samples)
        if self.after_cache is not None:
            samples = map(self.after_cache, samples)
        return samples if isinstance(samples, list) else list(samples)

    def _ask_each(self, dataset: object, keys: Sequence[Any], before_each: Callable[[int], None] | None) -> list[Any]:
        """Return the items of a dataset for some keys, without the cache."""
        loader = SampleLoader(dataset)
        samples = loader.load_many(list(keys)) if before_each is None else _load_each(loader.load, keys, before_each)
        return list(samples if self.after_cache is None else map(self.after_cache, samples))

    def _served(self, idx: int) -> Any:
        """Return sample ``idx``, which is cached, as it is served before the transform after the cache."""
        sample = self.cache.peek(idx)
        rest = None if sample is MISSING or self._split is None or not self._split.has_rest else self._split
        return sample if rest is None or in_worker_thread() else rest.finish(idx, sample)

    def _fresh(self, idx: int) -> Any:
        """Return the value that `_served` must equal. In worker threads without transforms, because others draw as well."""
        rest = self._split if self._split is not None and self._split.has_rest and in_worker_thread() else None
        return self._source[idx] if rest is None else rest.load(idx)

    def _get_many(self, key: object) -> Any:
        """Return the result of the dataset for several indices, or for a name."""
        indices, kind = indices_in(key, self._len), type(key)
        if not indices or (self._has_rest and self.after_cache is None):
            return self._with_cache(self.dataset[key], indices)
        own = indices
        if self._rows is not None:
            indices = self._rows[indices].tolist()
        if self._audit.is_due(len(indices)) and not self._audit.allows(indices, self.cache, self._served, self._fresh):
            self._collates[kind] = None
        if self._has_rest:
            self._collates[kind] = None
        elif kind not in self._collates:
            result = self.dataset[key]
            self._collates[kind] = None
            if not is_part(result, self.dataset):
                samples = self.cache.get_or_load_many(indices, self._load_many, strict=False)
                self._collates[kind] = find_collate(result, samples)
            if self.after_cache is None:
                return self._with_cache(result, own)
        collate = self._collates[kind]
        if collate is None:
            if self.after_cache is None:
                return self._with_cache(self.dataset[key], own)
            raise DatasetError(
                f"{type(self.dataset).__name__}[{key!r:.50}] is not made of its samples, so transform= cannot run on it. Ask "
                f"for one sample at a time, or leave the transform out."
            )
        samples = self.cache.get_or_load_many(indices, self._load_many, copy=self._copy, strict=False)
        if kind not in self._sizes_compared and differ_in_size(samples):
            self._sizes_compared.add(kind)
            if pads(collate, samples, self.dataset[key]):
                self._collates[kind] = None
                return self._get_many(key)
        if self.after_cache is not None:
            return collate([self.after_cache(sample) for sample in samples])
        try:
            return collate(samples)
        except Exception:  # they differ in shape, and the dataset does not stack them as it did others
            return self.dataset[key]

    def _with_cache(self, result: object, indices: list[int] | None) -> Any:
        """Return a result of the dataset for several indices, or for a name; a part of the dataset over the cache."""
        rows = None if indices is None else np.array(indices, np.int64)
        return follow("__getitem__", result, self, self._view, rows) if is_part(result, self.dataset) else result

    def _check_index(self, idx: Any) -> int:
        """Return an index as an int that counts from the start."""
        with contextlib.suppress(TypeError):  # not an integer; check_index says so
            idx = operator.index(idx)
            idx = idx + self._len if -self._len <= idx < 0 else idx
        if isinstance(idx, int) and idx >= self._len:
            len(self)  # raises where the dataset has become longer
        return check_index(idx, self._len, "dataset")

    def prefetch_blocks(self, blocks: Iterable[int]) -> None:
        """Have the storage read blocks ahead, except those that are cached. A `BlockSampler` calls it."""
        self.dataset.prefetch_blocks(self._loader.uncached(blocks) if isinstance(self._loader, BlockLoader) else blocks)

    def warm(self, num_workers: int = 1, progress: bool = True) -> DatasetStats:
        """Fill the cache now, and return `stats`.

        Args:
            num_workers: child processes that load. 0 counts as 1, because the dataset of this process must not change.
            progress: show a progress bar, except on ranks above 0.

        Raises:
            LimitError: ``num_workers`` is not a number of processes.
            WorkerError: a child died.
            Exception: an error of the dataset.

        Ranks and jobs that share the cache may all call it. Each begins at another place, and each sample is loaded once.
        """
        if not isinstance(num_workers, int) or num_workers < 0:
            raise LimitError(f"num_workers={num_workers!r} is not a number of processes. Use 0 or more.")
        with tqdm(unit="sample", desc="warming the cache", disable=not (progress and is_first_rank())) as bar:
            every = np.arange(self.cache.dataset_len) if self._rows is None else np.unique(self._rows)
            for _ in range(2):  # with admission by cost, some samples are admitted only at the second request
                indices = self._tiers.unfilled(every)
                if bar.n and not self.cache.may_admit_later:
                    break
                bar.total = bar.n + len(indices)
                if isinstance(self._loader, BlockLoader):
                    batches = self._loader.by_block(indices)
                else:
                    batches = [indices[at : at + 16] for at in range(0, len(indices), 16)]
                begin = os.getpid() * 40503 % max(1, len(batches))
                self._warm(batches[begin:] + batches[:begin], num_workers or 1, bar)
        self._epochs.begin(self.cache.counts())  # filling does not count as an epoch
        return self.stats()

    def _warm(self, batches: list[list[int]], num_workers: int, bar: Any) -> None:
        counts: Iterable[int]
        jobs = [partial(self._fill, batches[number::num_workers]) for number in range(min(num_workers, len(batches)))]
        if self._loaded_here:
            counts = chain.from_iterable(map(run_here, jobs))
        else:
            counts = in_children_or_here(self._source, jobs, proven=self._loaded_here is False)
        for count in counts:
            bar.update(count)

    def _fill(self, batches: list[list[int]]) -> Iterator[int]:
        """Fill the cache with samples, and yield the size of each batch."""
        for batch in batches:
            if isinstance(self._loader, BlockLoader):
                self._loader.copy_samples(batch)
            self._tiers.fill(batch, self._loader.load_many)
            yield len(batch)

    def stats(self) -> DatasetStats:
        """Return the counts of all processes, in total and for each epoch; after `close` those of that moment."""
        if self.cache.closed and self._last_stats is not None:
            return self._last_stats
        total, disk = self._tiers.stats()
        epochs = self._epochs.stats(self.cache.counts())
        return DatasetStats(total, epochs, disk, self._audit.compared, self._audit.changed, self.cache.ranks)

    def begin_loop(self, loader: Any, looped: bool) -> None:
        """Note that a loop over a loader begins. ``looped``: whether the last one got batches. `DataLoader` calls it."""
        self._follow_transforms()
        self._epochs.loop_begins(self.cache.counts(), loader, expected=looped and not self._audit.changed)
        if loader.num_workers and loader.persistent_workers:
            self._audit.meet_workers(started=loader.has_workers)
        self._audit.begin_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, for `stats` and the log; and in the dataset, if it has ``set_epoch``.

        A `stocache.DataLoader` begins epochs by itself.
        """
        self._epochs.epoch_is_set(self.cache.counts(), epoch, expected=not self._audit.changed)
        if takes_epoch(self.dataset):
            self.dataset.set_epoch(epoch)
        self._audit.begin_epoch()

    def close(self) -> None:
        """Close the cache. May be called twice."""
        if isinstance(self._loader, BlockLoader):
            self._loader.close()
        if not self.cache.closed:
            super().__setattr__("_last_stats", self.stats())
        self._tiers.close()
        self._audit.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        # Says nothing that reading changes: some compare it with that of the run that they resume
        return f"<{type(self).__name__} of {type(self.dataset).__name__} in a {type(self.cache).__name__}>"


def _those_of(options: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the given arguments that are fields of a class of options."""
    return {field.name: given[field.name] for field in dataclasses.fields(options) if field.name in given}


_SHARED_NAMES = frozenset({"dataset", "transform", "set_epoch", "prefetch_blocks", "expect"})
"""Names of ours with the same meaning as in a dataset."""
_said_hidden: set[tuple[type, str]] = set()


def _warn_of_hidden(dataset: object, own: set[str]) -> None:
    """Warn, once for each class, of public attributes of a dataset whose names a `CachedDataset` has for others."""
    missing = object()
    names = (name for name in sorted(own - _SHARED_NAMES) if name[0] != "_")
    hidden = ", ".join(name for name in names if inspect.getattr_static(dataset, name, missing) is not missing)
    if hidden and (type(dataset), hidden) not in _said_hidden and is_first_rank():
        _said_hidden.add((type(dataset), hidden))
        logger.warning(
            "a CachedDataset has attributes of its own called %s. Ask its `dataset` for those of %s.",
            hidden, type(dataset).__name__,
        )  # fmt: skip


def _call_before_each(samples: Iterable[object], function: Callable[[int], None]) -> Iterator[Any]:
    for position, sample in enumerate(samples):
        function(position)
        yield sample


def _load_each(load: Callable[[int], object], indices: Sequence[int], before_each: Callable[[int], None]) -> Iterator[Any]:
    for position, idx in enumerate(indices):
        before_each(position)
        yield load(idx)


def is_cache(dataset: object) -> bool:
    """Return whether a dataset makes its samples as a `CachedDataset` does."""
    kind = type(dataset)
    return isinstance(dataset, CachedDataset) and all(
        getattr(kind, name) is getattr(CachedDataset, name) for name in ("__getitem__", "__getitems__")
    )
