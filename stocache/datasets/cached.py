"""CachedDataset: one line around any map-style dataset, and its samples are read from their source once."""

import contextlib
import copy
import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset
from tqdm import tqdm

from stocache.cache.base import MISSING, SlotState
from stocache.cache.batches import BatchSpec, LazyBatch
from stocache.cache.options import OnBusy
from stocache.cache.placement import Placement
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache
from stocache.datasets.by_block import BlockLoader, units_of
from stocache.datasets.epochs import DatasetStats, Epochs
from stocache.datasets.indexing import Combine, indices_in, way_to
from stocache.datasets.probing import Probe, probe_samples
from stocache.errors import ClosedError, DatasetError, LimitError, MismatchError, SampleError
from stocache.samples.indices import check_index, check_indices, check_len, length_of
from stocache.samples.record_encoder import Record
from stocache.samples.spec import Structure
from stocache.shm.named import DETAIL, identity_of
from stocache.system.children import in_children_or_here
from stocache.system.deprecation import old_name, renamed_arguments
from stocache.system.limits import parse_size, recommended_limit
from stocache.system.ranks import is_first_rank
from stocache.transforms import huggingface
from stocache.transforms.cutting import plan_split, warn_of_random_parts
from stocache.transforms.parts import PartTransform, as_transform
from stocache.transforms.splitting import Split

logger = logging.getLogger("stocache")

_Self = TypeVar("_Self", bound="CachedDataset")


class CachedDataset(Dataset[Any]):
    """Any map-style dataset, cached in shared memory: one copy for all workers, ranks and (with a name) jobs of the machine.

        dataset = CachedDataset(ImageFolder("photos", transform=train_transform), size_limit_gib=32)
        loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)

    The first epoch fills the cache while training runs; from the second on, only what did not fit is read from the dataset. The
    samples, their order and the random numbers are those of the dataset without a cache: its transforms are split, the
    deterministic beginning runs before the cache, and the rest after it (NOTE [ Splitting ]).

    Args:
        dataset: has ``__len__`` and ``__getitem__``: of torch, torchvision, Hugging Face, MONAI, or your own. Its samples must
            be the same each time, but for its transforms: other randomness belongs into ``transform``. They may be any tree of
            tensors, numpy arrays, numbers, str, bytes and None in containers (`RaggedCache` says which), and come back equal.
        size_limit_gib: GiB for the cache on this machine, as for `SharedCache`; "auto" for what the machine can spare.
        transform: called with each sample after the cache, and after the dataset's own transforms; what it returns is the
            sample. It gets a private copy. Or a mapping from parts of the sample to functions of these: ``{0: augment}``,
            ``{"image": augment}``.
        name, persist, fingerprint, on_busy: as for `SharedCache`: to share the cache with other jobs, and later runs.
        placement: which samples are cached when all have one shape and not all fit: "scattered", evenly spread; "prefix", the
            first; or a `Placement`: ``Placement.from_env()`` gives each of several machines its own. Samples of varying
            size are kept in the order in which they come. In front of a `StorageDataset` of blocks, whole blocks are, and each
            is read once for that (NOTE [ Admitting blocks ]).
        variable: whether samples vary in size. None finds out. True keeps them in a `RaggedCache`, whatever they look like;
            False in a `SharedCache`, which is faster, and needs one structure, dtypes and shapes.
        probe: how many samples, evenly spread, to load for finding that out, in a child process; fewer where that takes long.
            They are kept, unless they have to be timed for ``admission="cost"``. 0 loads none: samples are then kept as ones of
            varying size.
        example: a sample as the dataset returns it, in place of the probe: for datasets that are not ready yet
            (``worker_init_fn`` makes them ready), or slow.
        copy: False to return views of the cache itself where nothing is done to them afterwards: writing to one changes all
            later epochs. With transforms after the cache samples are copied all the same.
        split: False to leave all transforms of the dataset before the cache, as those are that cannot be followed.
        cut: which of the deterministic steps at the beginning of a transform run before the cache: "latest", all; "smallest",
            those after which a sample is smallest. None takes the latest cut at which all samples fit, else the smallest, but
            for one that saves next to nothing.
        store: "encoded" to cache the bytes of image files, and decode them after the cache: of datasets with a ``loader`` that
            is called with a path, as torchvision's folders, and of Hugging Face's with images.
        admission, codec, allow_pickle: as for `RaggedCache`, where "cost" and a codec lead to.

    Attributes:
        dataset: the dataset within. Its own attributes (``classes``, ``targets``) are found here too, and set there.
        cache: the `SharedCache` or `RaggedCache`.
        after_cache: what was given as ``transform``; it may be set.
        transform: that of the dataset; setting it splits it anew. Where the dataset has none, ``after_cache``.

    Raises:
        DatasetError: the dataset is iterable, has no length, or is a mapping of other keys; ``transform`` is not callable, or
            samples have no such part; the dataset raises an error of a kind that cannot leave the child process.
        WorkerError: loading a sample ended the child process.
        LimitError: the limit is no size, or too small; options that do not go together.
        SampleError: the samples cannot be cached, or (``variable=False``) differ in shape.
        CodecError, CacheNameError, MismatchError, SegmentError: as for the caches.

    Making it leaves the dataset as it is: samples are loaded in a child process (NOTE [ A child loads ]). A sample that does
    not fit the cache later is served uncached and counted (``stats().total.rejected``), with one warning. What the dataset
    raises passes through.

    Setting an attribute that the dataset has sets it there, unless its samples are made with it, and some are cached: that is a
    `DatasetError`. So is setting a transform that begins in another way than those which cached samples were made with. Of a
    Hugging Face dataset, ``select``, ``shuffle``, ``shard``, ``skip``, ``take`` and ``train_test_split`` return views of the
    cached one, and what changes it or makes another is a `DatasetError`.
    """

    _hides_transforms = True  # of the dataset within: they are split here

    @renamed_arguments(admit="admission")
    def __init__(
        self,
        dataset: Any,
        size_limit_gib: float | str = "auto",
        *,
        transform: Callable[[Any], Any] | Mapping[Any, Any] | None = None,
        name: str | None = None,
        persist: bool = False,
        fingerprint: str | None = None,
        on_busy: OnBusy = "uncached",
        placement: Literal["prefix", "scattered"] | Placement = "scattered",
        variable: bool | None = None,
        probe: int = 8,
        example: Any = None,
        copy: bool = True,
        split: bool = True,
        cut: Literal["latest", "smallest"] | None = None,
        store: Literal["decoded", "encoded"] = "decoded",
        admission: Literal["all", "cost"] = "all",
        codec: Literal["zstd", "lz4"] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        length = _check_dataset(dataset)
        self.dataset = dataset  # first, for those that walk through the attributes: MONAI seeds what it finds in their order
        self.after_cache = as_transform(transform)
        self._fingerprint = fingerprint
        self._len = length
        self._rows: np.ndarray[Any, Any] | None = None  # of a view: the samples it has
        self._whole: Any = None  # of a view: the dataset that they are loaded from
        self._ways: dict[type, Combine | None] = {}  # how the dataset puts several samples together, by type of index
        self._form: BatchSpec | None = None  # of batches that are to be read later; see reading_later
        self._split: Split | None = None  # how samples are made in two parts; see NOTE [ Splitting ]
        self._blockwise: BlockLoader | None = None
        self._asked_copy = copy
        if cut not in (None, "latest", "smallest") or store not in ("decoded", "encoded"):
            raise LimitError(f"cut={cut!r}, store={store!r}: cut is 'latest' or 'smallest', store is 'decoded' or 'encoded'.")
        if variable is False and (admission != "all" or codec is not None):
            raise LimitError("admission='cost' and a codec are for samples of varying size. Leave variable=False out.")
        switched_off = size_limit_gib != "auto" and parse_size(size_limit_gib) == 0
        placed = placement if isinstance(placement, Placement) else Placement(placement)
        unit = units_of(dataset) if admission == "all" and placed.unit == 1 and not switched_off else None
        self._splits = split and unit is None and not switched_off and length > 0

        def look() -> Probe:
            if switched_off:
                return Probe()
            return _look_at(dataset, length, probe, example, variable, self._split.load if self._split is not None else None)

        def make(found: Probe) -> SharedCache | RaggedCache:
            own, told = fingerprint, "" if self._split is None else self._split.told_before()
            if told and name is not None and isinstance(fingerprint, str | None):
                own = f"{fingerprint or ''}{DETAIL}{told}"
            options: dict[str, Any] = {"name": name, "persist": persist, "fingerprint": own, "on_busy": on_busy}
            structure = _common_structure(found, True if admission != "all" or codec is not None else variable, allow_pickle)
            if structure is not None:
                its = placed if unit is None else dataclasses.replace(placed, unit=unit)
                return SharedCache(size_limit_gib, length, structure, placement=its, **options)
            if placed == Placement("scattered"):
                return RaggedCache(
                    size_limit_gib, length, admission=admission, codec=codec, allow_pickle=allow_pickle, **options
                )
            raise LimitError(
                f"placement={placement!r} is for samples of one shape. Those of varying size are kept in the order in which "
                f"they come; leave it out."
            )

        loads = bool(probe) and example is None
        if store == "encoded" and not (split and loads and unit is None):
            raise LimitError("store='encoded' is for samples that are probed and split. Leave probe=, example= and split= out.")
        if self._splits and loads:
            limit = recommended_limit(name is not None) if size_limit_gib == "auto" else parse_size(size_limit_gib)
            self._plan = partial(plan_split, length=length, limit=limit, cut=cut, encoded=store == "encoded")
            self._split = self._plan(dataset, wanted=_told_of(name))
        elif self._splits:
            warn_of_random_parts(dataset, "no sample was loaded" if example is None else "only an example is known")
        found = look()
        try:
            self.cache = make(found)
        except MismatchError:  # another process may have made it at this moment, and cut elsewhere
            told = _told_of(name)
            if self._split is None or told in (None, self._split.told_before()):
                raise
            self._split = self._plan(dataset, wanted=told)
            found = look()
            self.cache = make(found)
        if self._splits and found.loaded_here:
            warn_of_random_parts(dataset, "no child process can load its samples")
        self._splits = self._split is not None
        self._reads, self._loaded_here, probed = found.reads, found.loaded_here, found.samples
        if isinstance(self.after_cache, PartTransform) and not self._has_rest:
            for sample in list(found.named.values())[:1]:
                self.after_cache.check(sample)
        if unit is not None:
            self._blockwise = BlockLoader(dataset, self.cache)
            if self.cache.stats().capacity_bytes and bool((self.cache.aux_array == SlotState.OOB).all()):
                logger.warning("size_limit_gib=%s is less than a block of the storage: nothing is cached.", size_limit_gib)
        elif admission == "all":  # else their cost would have to be known
            self.cache.get_or_load_many(list(probed), lambda indices: [probed[idx] for idx in indices], strict=False)
        self._epochs = Epochs(length, self.cache)
        self._made = True  # from here on attributes are set where they are read; see __setattr__

    @property
    def transform(self) -> Any:
        """The transform of the dataset; where it has none, the one that runs after the cache."""
        return self.dataset.transform if hasattr(self.dataset, "transform") else self.after_cache

    @property
    def _has_rest(self) -> bool:
        return self._split is not None and self._split.has_rest

    @property
    def _gathers(self) -> bool:
        """Whether batches are those of the cache as it has them."""
        return not self._is_transformed and isinstance(self.cache, SharedCache)

    @property
    def _is_transformed(self) -> bool:
        return self.after_cache is not None or self._has_rest

    @property
    def _reads_in_turn(self) -> bool:
        """Whether samples are too large to be held all at once while they are transformed."""
        return isinstance(self.cache, RaggedCache) or self.cache.slot_bytes >= _LARGE

    @property
    def _copy(self) -> bool:
        return self._asked_copy or self._is_transformed

    # ------------------------------------------------------------------------------------------------ samples

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            DatasetError: the dataset has become longer or shorter.
        """
        self._epochs.look(self.cache)
        now = length_of(self.dataset)
        if now is not None and now != self._len:
            raise DatasetError(
                f"{type(self.dataset).__name__} had {self._len} samples when it was wrapped, and has {now} now. Wrap it when "
                f"it is complete, or wrap it anew."
            )
        return self._len

    def __getitem__(self, idx: Any) -> Any:
        """Return sample ``idx``, from the cache or the dataset, transformed. A negative ``idx`` counts from the end.

        A list, array, tensor or slice of indices, or a name of a column, gives what it gives of the dataset; made of cached
        samples where the dataset makes it of its samples (see indexing.py).

        Raises:
            SampleIndexError: ``idx`` is outside the dataset, or cannot be an index.
            DatasetError: the dataset has become longer or shorter; or there is a ``transform``, and what the dataset returns
                for several indices is not made of its samples.
        """
        if not (type(idx) is int and 0 <= idx < self._len):
            if isinstance(idx, list | tuple | slice | range | str) or getattr(idx, "ndim", None):
                return self._several(idx)
            idx = self._from_end(idx)
        if self._rows is not None:
            idx = int(self._rows[idx])
        if self._split is not None and self._split.has_changed((idx,)):
            self._follow_transforms()
        sample = self.cache.hit(idx, self._copy)
        if sample is MISSING:
            sample = self.cache.get_or_load(idx, self._load, copy=self._copy, strict=False)
        if self._split is not None and self._split.has_rest:
            sample = self._split.finish(idx, sample)
        return sample if self.after_cache is None else self.after_cache(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any] | LazyBatch:
        """Return the samples ``indices``; hits in one gather, misses from the ``__getitems__`` of the dataset if it has one.

        Raises:
            SampleIndexError: an index is no integer or outside the dataset.
        """
        if len(indices) and (indices.min() if isinstance(indices, np.ndarray) else min(indices)) < 0:
            indices = [self._from_end(idx) for idx in indices]
        if self._rows is not None:
            indices = self._rows[check_indices(indices, self._len, "view")]
        if self._split is not None and self._split.has_changed(indices):
            self._follow_transforms()
        if self._form is not None and self._gathers and isinstance(self.cache, SharedCache):
            return LazyBatch(self.cache, indices, self._load_many, self._form)
        samples: Iterable[Any]
        if self._is_transformed and self._reads_in_turn:
            samples = self.cache.each(indices, self._load_many, copy=self._copy, strict=False)
        else:
            samples = self.cache.get_or_load_many(indices, self._load_many, copy=self._copy, strict=False)
        if self._split is not None and self._split.has_rest:
            samples = self._split.finish_many(indices, samples)
        if self.after_cache is not None:
            samples = map(self.after_cache, samples)
        return samples if isinstance(samples, list) else list(samples)

    def _several(self, key: Any) -> Any:
        """Return what the dataset returns for several indices, or for a name."""
        indices, kind = indices_in(key, self._len), type(key)
        if not indices or (self._has_rest and self.after_cache is None):
            return self.dataset[key]
        cached: Any = indices if self._rows is None else self._rows[indices]
        if self._has_rest:
            self._ways[kind] = None
        elif kind not in self._ways:
            answer = self.dataset[key]
            self._ways[kind] = way_to(answer, self.cache.get_or_load_many(cached, self._load_many, strict=False))
            if self.after_cache is None:
                return answer
        combine = self._ways[kind]
        if combine is None:
            if self.after_cache is None:
                return self.dataset[key]
            raise DatasetError(
                f"{type(self.dataset).__name__}[{key!r:.50}] is not made of its samples, so transform= cannot run on it. Ask "
                f"for one sample at a time, or leave the transform out."
            )
        samples = self.cache.get_or_load_many(cached, self._load_many, copy=self._copy, strict=False)
        return combine(samples if self.after_cache is None else [self.after_cache(sample) for sample in samples])

    @property
    def _source(self) -> Any:
        return self.dataset if self._whole is None else self._whole

    def _load(self, idx: int) -> Any:
        if self._split is not None and self._split.has_rest:
            return self._split.load(idx)
        return self._source[idx] if self._blockwise is None else self._blockwise.load([idx])[0]

    def _load_many(self, indices: list[int]) -> Iterable[Any]:
        if self._blockwise is not None:
            return self._blockwise.load(indices)
        if self._split is not None and self._split.has_rest:
            return self._split.load_many(indices)
        together = getattr(self._source, "__getitems__", None)
        loaded: Iterable[Any] = map(self._load, indices) if together is None else together(indices)
        return loaded

    def _from_end(self, idx: Any) -> int:
        with contextlib.suppress(TypeError):  # no integer; check_index says so
            idx = operator.index(idx)
            idx = idx + self._len if -self._len <= idx < 0 else idx
        if isinstance(idx, int) and idx >= self._len:
            len(self)  # raises where the dataset has become longer
        return check_index(idx, self._len, "dataset")

    def prefetch_blocks(self, blocks: Iterable[int]) -> None:
        """Have blocks of the storage read ahead, but for those that are cached; a `BlockSampler` says which."""
        self.dataset.prefetch_blocks(blocks if self._blockwise is None else self._blockwise.uncached(blocks))

    expect = old_name("expect", "prefetch_blocks")

    # ------------------------------------------------------------------------------------------------ the dataset's attributes

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not here; not during unpickling, when nothing is
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = huggingface.method_of(self.dataset, name, self._view)
        return getattr(self.dataset, name) if method is None else method

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" not in vars(self):
            super().__setattr__(name, value)
        elif name in ("dataset", "cache"):
            raise DatasetError(f"{name} of a CachedDataset cannot be replaced: the cache has its samples. Make a new one.")
        elif name == "after_cache" or (name == "transform" and not hasattr(self.dataset, name)):
            super().__setattr__("after_cache", as_transform(value))
        elif name != "transform" and (name in vars(self) or hasattr(type(self), name) or not hasattr(self.dataset, name)):
            super().__setattr__(name, value)
        elif self._splits and name in _MAKES_SAMPLES:
            self._set_transform(name, value)
        elif name in self._reads | _MAKES_SAMPLES and getattr(self.dataset, name) is not value and self._holds_samples():
            raise DatasetError(
                f"{name} of {type(self.dataset).__name__} cannot be set: its samples are made with it, and some are cached as "
                f"they were. Set it before CachedDataset. What is to run after the cache goes into CachedDataset(..., "
                f"transform=...); for one part of the samples, transform={{0: ...}} or {{'image': ...}}."
            )
        else:
            setattr(self.dataset, name, value)

    def _set_transform(self, name: str, value: Any) -> None:
        before = getattr(self.dataset, name)
        setattr(self.dataset, name, value)
        try:
            self._follow_transforms()
        except BaseException:
            setattr(self.dataset, name, before)
            raise

    def _follow_transforms(self) -> None:
        """Split anew where a transform of the dataset has been set or changed.

        Raises:
            DatasetError: cached samples were made with another beginning.
        """
        if self._split is not None and self._split.has_changed():
            old = self._split if self._holds_samples() else None
            split = self._plan(self._source, old=old)
            if split is None:
                raise DatasetError(
                    f"the transforms of {type(self._source).__name__} were changed, and cannot be split any more. Make a new "
                    f"CachedDataset."
                )
            self._split = split

    def __getstate__(self) -> dict[str, Any]:
        self._follow_transforms()
        return vars(self)

    def _holds_samples(self) -> bool:
        return bool((self.cache.aux_array == SlotState.SET).any())

    def _view(self, dataset: Any, rows: np.ndarray[Any, Any]) -> "CachedDataset":
        """Return this cached dataset with some of its samples; ``dataset`` is what has their attributes."""
        view = copy.copy(self)
        own = rows if self._rows is None else self._rows[rows]
        epochs = Epochs(len(rows), self.cache)
        vars(view).update(dataset=dataset, _rows=own, _whole=self._source, _len=len(rows), _ways={}, _epochs=epochs)
        return view

    # ------------------------------------------------------------------------------------------------ filling ahead

    def warm(self, num_workers: int = 1, progress: bool = True) -> DatasetStats:
        """Fill the cache now, and return `stats`.

        Args:
            num_workers: child processes to load with; 0 is 1, for the dataset of this process stays as it is.
            progress: show a bar (not on ranks above 0).

        Raises:
            LimitError: ``num_workers`` is not a number of processes.
            WorkerError: a child died.
            Exception: what the dataset raises.

        Ranks and jobs that share the cache may all call it: each begins at another place, and none loads what another does.
        """
        if not isinstance(num_workers, int) or num_workers < 0:
            raise LimitError(f"num_workers={num_workers!r} is not a number of processes. Use 0 or more.")
        with tqdm(unit="sample", desc="warming the cache", disable=not (progress and is_first_rank())) as bar:
            for _ in range(2):  # of samples admitted by cost, some are decided when they are asked for again
                wanted = self._unfilled()
                if bar.n and not self.cache.revises:
                    break
                begin = os.getpid() * 40503 % max(1, len(wanted))
                bar.total = bar.n + len(wanted)
                wanted = wanted[begin:] + wanted[:begin]
                batches = [wanted[at : at + 16] for at in range(0, len(wanted), 16)]
                self._warm(batches if self._blockwise is None else self._blockwise.batches(wanted), num_workers or 1, bar)
        self._epochs.begin(self.cache)  # this was none
        return self.stats()

    def _unfilled(self) -> list[int]:
        states = self.cache.aux_array.numpy()
        rows = np.arange(len(states)) if self._rows is None else np.unique(self._rows)
        unfilled: list[int] = rows[states[rows] == SlotState.EMPTY].tolist()
        return unfilled

    def _warm(self, batches: list[list[int]], num_workers: int, bar: Any) -> None:
        counts: Iterable[int]
        jobs = [partial(self._fill, batches[number::num_workers]) for number in range(min(num_workers, len(batches)))]
        if self._loaded_here:
            counts = chain.from_iterable(job() for job in jobs)
        else:
            counts = in_children_or_here(self._source, jobs, proven=self._loaded_here is False)
        for count in counts:
            bar.update(count)

    def _fill(self, batches: list[list[int]]) -> Iterator[int]:
        """Put samples into the cache, and yield how many, batch by batch."""
        for batch in batches:
            for idx in batch:
                if self.cache.aux_array[idx] == SlotState.EMPTY:
                    self.cache.get_or_load(idx, self._load, copy=False, strict=False)
            yield len(batch)

    # ------------------------------------------------------------------------------------------------ life

    def stats(self) -> DatasetStats:
        """Return what happened in total and in each epoch, over all processes."""
        self._epochs.look(self.cache)
        return DatasetStats(self.cache.stats(), self._epochs.stats(self.cache))

    def set_epoch(self, epoch: int) -> None:
        """Say that an epoch begins, which `stats` otherwise finds out; tells the dataset too, if it wants to know."""
        self._epochs.look(self.cache, begins=True)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def close(self) -> None:
        """Close the cache. Twice is fine."""
        with contextlib.suppress(ClosedError):
            self._epochs.look(self.cache)
        self.cache.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.dataset).__name__} in {self.cache!r}>"


def with_lazy_batches(dataset: Any) -> Any:
    """Return a copy of a dataset whose ``__getitems__`` reads nothing, but returns an `Unread`.

    None where nothing can be gathered: it is no `CachedDataset`, nor a Subset of one, or has a transform, or samples vary.
    """
    if type(dataset) is Subset:
        later = with_lazy_batches(dataset.dataset)
    elif isinstance(dataset, CachedDataset) and dataset._gathers:
        cache: Any = dataset.cache
        later = BatchSpec.of(cache) if type(dataset).__getitems__ is CachedDataset.__getitems__ else None
    else:
        later = None
    if later is None:
        return None
    changed = copy.copy(dataset)
    vars(changed)["_form" if isinstance(later, BatchSpec) else "dataset"] = later
    return changed


# ---------------------------------------------------------------------------------------------------- looking at the dataset

_LARGE = 1 << 16  # bytes of a sample

_MAKES_SAMPLES = frozenset({"transform", "transforms", "target_transform"})
"""Attributes that samples are made with, by the conventions of torchvision and timm, whether or not the probe saw it."""


def _check_dataset(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        DatasetError: it is not one.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DatasetError(
            f"{kind} has no samples by number, which a cache needs. Give a map-style dataset, with __len__ and __getitem__: "
            f"list({kind.lower()}) where it fits in memory; of Hugging Face, load it with streaming=False."
        )
    try:
        length = check_len(len(dataset))
    except (TypeError, NotImplementedError) as error:
        raise DatasetError(f"{kind} has no length, which a cache needs: {error}. Define __len__.") from error
    if isinstance(dataset, Mapping) and not all(idx in dataset for idx in {0, length - 1} if length):
        raise DatasetError(
            f"{kind} is a mapping with the keys {list(dataset)!r:.100}, not with the indices 0 to {length - 1}. Wrap one of "
            f"its values, CachedDataset({kind.lower()}[{next(iter(dataset))!r}]), or list({kind.lower()}.values())."
        )
    return length


def _told_of(name: str | None) -> str | None:
    """Return what ran before the cache of that name, if it is there."""
    identity = identity_of(name) if name is not None else None
    return None if identity is None else str(identity.get("fingerprint") or "").partition(DETAIL)[2]


def _look_at(
    dataset: Any, length: int, count: int, example: Any, variable: bool | None, load: Callable[[int], Any] | None
) -> Probe:
    """Return what is known of the samples: from an example, or the probe."""
    if not isinstance(count, int) or count < 0:
        raise LimitError(f"probe={count!r} is not a number of samples. Use 1 or more, or 0 for no probe.")
    if example is not None:
        return Probe(example=example)
    if count:
        return probe_samples(dataset, length, count, load)
    if variable is False:
        raise LimitError("variable=False needs to know what samples look like. Give example=sample, or leave probe=0 out.")
    return Probe()


def _common_structure(found: Probe, variable: bool | None, allow_pickle: bool) -> Structure | None:
    """Return what the samples have in common when all are of one structure, with the same dtypes and shapes; else None.

    Raises:
        SampleError: none of them can be cached; or they differ, and ``variable`` is False.
    """
    samples = found.named
    if not samples:
        return None
    names = f"probed samples {list(found.samples)}" if found.samples else "the example"
    difference = "variable=True"
    if variable is not True:
        try:
            structure = Structure.of(next(iter(samples.values())), exact=True)
            for name, sample in samples.items():
                structure.encode(sample, name)
        except SampleError as error:
            if variable is False:
                raise
            difference = str(error)
        else:
            logger.info("%s: all are %s", names, structure)
            return structure
    problems = []
    for name, sample in samples.items():
        try:
            Record(sample, name, allow_pickle)
        except SampleError as error:
            problems.append(error)
    if len(problems) == len(samples):
        raise problems[0]
    logger.info("%s: kept as samples of varying size (%s)", names, difference)
    return None
