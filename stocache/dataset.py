"""CachedDataset: one line around any map-style dataset, and its samples are read from their source once."""

import contextlib
import copy
import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tqdm import tqdm

from stocache import randomness
from stocache.blockwise import Blockwise, units_of
from stocache.cache import SharedCache
from stocache.epochs import DatasetStats, Epochs, is_first_rank
from stocache.errors import ClosedError, DatasetError, LimitError, SampleError
from stocache.gathering import BatchForm, Unread
from stocache.indices import check_index, check_len
from stocache.limits import parse_size
from stocache.placement import Placement
from stocache.protocol import MISSING, SlotState
from stocache.ragged import RaggedCache
from stocache.records import Record
from stocache.structure import Structure

logger = logging.getLogger("stocache")

_Self = TypeVar("_Self", bound="CachedDataset")


class CachedDataset(Dataset[Any]):
    """Any map-style dataset, cached in shared memory: one copy for all workers, ranks and (with a name) jobs of the machine.

        dataset = CachedDataset(ImageFolder("photos", transform=resize), size_limit_gib=32, transform=augment)
        loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)

    The first epoch fills the cache while training runs; from the second on, only what did not fit is read from the dataset. The
    samples, their order and the random numbers are those of the dataset without a cache.

    Args:
        dataset: has ``__len__`` and ``__getitem__``: of torch, torchvision, Hugging Face, MONAI, or your own. Its samples must
            be the same each time: what is random belongs into ``transform``. They may be any tree of tensors, numpy arrays,
            numbers, str, bytes and None in containers (`RaggedCache` says which), and come back equal.
        size_limit_gib: GiB for the cache on this machine, as for `SharedCache`; "auto" for what the machine can spare.
        transform: called with each sample after the cache; what it returns is the sample. It gets a private copy.
        name, persist, fingerprint: as for `SharedCache`: to share the cache with other jobs, and later runs.
        placement: which samples are cached when all have one shape and not all fit: "scattered", evenly spread; "prefix", the
            first; or a `Placement`: ``Placement.here()`` gives each of several machines its own. Samples of varying size are
            kept in the order in which they come. In front of a `StorageDataset` of blocks, whole blocks are, and each is read
            once for that (NOTE [ Admitting blocks ]).
        variable: whether samples vary in size. None finds out. True keeps them in a `RaggedCache`, whatever they look like;
            False in a `SharedCache`, which is faster, and needs one structure, dtypes and shapes.
        probe: how many samples, evenly spread, to load for finding that out. They are kept, unless
            they have to be timed for ``admit="cost"``.
        copy: False to return views of the cache itself where nothing is done to them afterwards: writing to one changes all
            later epochs. With a ``transform`` samples are copied all the same.
        admit, codec, allow_pickle: as for `RaggedCache`, where "cost" and a codec lead to.

    Attributes:
        dataset: the dataset within. Its own attributes (``classes``, ``targets``) are found here too.
        cache: the `SharedCache` or `RaggedCache`.

    Raises:
        DatasetError: the dataset is iterable, or has no length.
        LimitError: the limit is no size, or too small; options that do not go together.
        SampleError: the samples cannot be cached, or (``variable=False``) differ in shape.
        CodecError, CacheNameError, MismatchError, SegmentError: as for the caches.

    A sample that does not fit the cache later is served uncached and counted (``stats().total.misfits``), with one warning.
    What the dataset raises passes through.
    """

    def __init__(
        self,
        dataset: Any,
        size_limit_gib: float | str = "auto",
        *,
        transform: Callable[[Any], Any] | None = None,
        name: str | None = None,
        persist: bool = False,
        fingerprint: str | None = None,
        placement: Literal["prefix", "scattered"] | Placement = "scattered",
        variable: bool | None = None,
        probe: int = 8,
        copy: bool = True,
        admit: Literal["all", "cost"] = "all",
        codec: Literal["zstd", "lz4"] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        length = _check_dataset(dataset)
        self.dataset = dataset
        self.transform = transform
        self._fingerprint = fingerprint
        self._len = length
        self._form: BatchForm | None = None  # of batches that are to be read later; see reading_later
        self._copy = copy or transform is not None
        options: dict[str, Any] = {"name": name, "persist": persist, "fingerprint": fingerprint}
        compact = admit != "all" or codec is not None
        if variable is False and compact:
            raise LimitError("admit='cost' and a codec are for samples of varying size. Leave variable=False out.")
        switched_off = size_limit_gib != "auto" and parse_size(size_limit_gib) == 0
        self._blockwise: Blockwise | None = None
        placed = placement if isinstance(placement, Placement) else Placement(placement)
        unit = units_of(dataset) if admit == "all" and placed.unit == 1 and not switched_off else None
        probed = {} if switched_off else _probe(dataset, length, probe)
        structure = _common_structure(probed, (True if compact else variable), allow_pickle)
        self.cache: SharedCache | RaggedCache
        if structure is not None:
            if unit is not None:
                placed = dataclasses.replace(placed, unit=unit)
            self.cache = SharedCache(size_limit_gib, length, structure, placement=placed, **options)
        elif placed == Placement("scattered"):
            options |= {"admit": admit, "codec": codec, "allow_pickle": allow_pickle}
            self.cache = RaggedCache(size_limit_gib, length, **options)
        else:
            raise LimitError(
                f"placement={placement!r} is for samples of one shape. Those of varying size are kept in the order in which "
                f"they come; leave it out."
            )
        if unit is not None:
            self._blockwise = Blockwise(dataset, self.cache)
            if self.cache.stats().capacity_bytes and bool((self.cache.aux_array == SlotState.OOB).all()):
                logger.warning("size_limit_gib=%s is less than a block of the storage: nothing is cached.", size_limit_gib)
        elif admit == "all":  # else their cost would have to be known
            self.cache.get_or_load_many(list(probed), lambda indices: [probed[idx] for idx in indices], strict=False)
        self._epochs = Epochs(length, self.cache)

    # ------------------------------------------------------------------------------------------------ samples

    def __len__(self) -> int:
        """Return the number of samples."""
        self._epochs.look(self.cache)
        return self._len

    def __getitem__(self, idx: int) -> Any:
        """Return sample ``idx``, from the cache or the dataset, transformed. A negative ``idx`` counts from the end.

        Raises:
            SampleIndexError: ``idx`` is no integer or outside the dataset.
        """
        if not (type(idx) is int and idx >= 0):
            idx = self._from_end(idx)
        sample = self.cache.hit(idx, self._copy)
        if sample is MISSING:
            sample = self.cache.get_or_load(idx, self._load, copy=self._copy, strict=False)
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any] | Unread:
        """Return the samples ``indices``; hits in one gather, misses from the ``__getitems__`` of the dataset if it has one.

        Raises:
            SampleIndexError: an index is no integer or outside the dataset.
        """
        if len(indices) and (indices.min() if isinstance(indices, np.ndarray) else min(indices)) < 0:
            indices = [self._from_end(idx) for idx in indices]
        if self._form is not None and self.transform is None and isinstance(self.cache, SharedCache):
            return Unread(self.cache, indices, self._load_many, self._form)
        samples = self.cache.get_or_load_many(indices, self._load_many, copy=self._copy, strict=False)
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def _load(self, idx: int) -> Any:
        return self.dataset[idx] if self._blockwise is None else self._blockwise.load([idx])[0]

    def _load_many(self, indices: list[int]) -> Iterable[Any]:
        if self._blockwise is not None:
            return self._blockwise.load(indices)
        together = getattr(self.dataset, "__getitems__", None)
        loaded: Iterable[Any] = map(self._load, indices) if together is None else together(indices)
        return loaded

    def _from_end(self, idx: Any) -> int:
        with contextlib.suppress(TypeError):  # no integer; check_index says so
            idx = operator.index(idx)
            idx = idx + self._len if -self._len <= idx < 0 else idx
        return check_index(idx, self._len, "dataset")

    def expect(self, blocks: Iterable[int]) -> None:
        """Have blocks of the storage read ahead, but for those that are cached; a `BlockSampler` says which."""
        self.dataset.expect(blocks if self._blockwise is None else self._blockwise.uncached(blocks))

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not here; not during unpickling, when nothing is
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    # ------------------------------------------------------------------------------------------------ filling ahead

    def warm(self, num_workers: int = 0, progress: bool = True) -> DatasetStats:
        """Fill the cache now, and return `stats`.

        Args:
            num_workers: processes to load with, as for a DataLoader; 0 for this one.
            progress: show a bar (not on ranks above 0).

        Ranks and jobs that share the cache may all call it: each begins at another place, and none loads what another does.
        """
        with tqdm(unit="sample", desc="warming the cache", disable=not (progress and is_first_rank())) as bar:
            for _ in range(2):  # of samples admitted by cost, some are decided when they are asked for again
                wanted = torch.nonzero(self.cache.aux_array == SlotState.EMPTY).flatten().tolist()
                if bar.n and not self.cache.revises:
                    break
                begin = os.getpid() * 40503 % max(1, len(wanted))
                bar.total = bar.n + len(wanted)
                wanted = wanted[begin:] + wanted[:begin]
                batches = [wanted[at : at + 16] for at in range(0, len(wanted), 16)]
                loader = DataLoader(
                    _Filling(self._load, self.cache, self._len),
                    batch_sampler=batches if self._blockwise is None else self._blockwise.batches(wanted),
                    collate_fn=len,
                    num_workers=num_workers,
                    generator=torch.Generator(),  # or it would draw from the global one
                )
                for count in loader:
                    bar.update(count)
        self._epochs.begin(self.cache)  # this was none
        return self.stats()

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


def reading_later(dataset: Any) -> Any:
    """Return a copy of a dataset whose ``__getitems__`` reads nothing, but returns an `Unread`.

    None where nothing can be gathered: it is no `CachedDataset`, nor a Subset of one, or has a transform, or samples vary.
    """
    if type(dataset) is Subset:
        later = reading_later(dataset.dataset)
    elif isinstance(dataset, CachedDataset) and dataset.transform is None and isinstance(dataset.cache, SharedCache):
        later = BatchForm.of(dataset.cache) if type(dataset).__getitems__ is CachedDataset.__getitems__ else None
    else:
        later = None
    if later is None:
        return None
    changed = copy.copy(dataset)
    vars(changed)["_form" if isinstance(later, BatchForm) else "dataset"] = later
    return changed


# ---------------------------------------------------------------------------------------------------- probing


def _check_dataset(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        DatasetError: it is none.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DatasetError(
            f"{kind} has no samples by number, which a cache needs. Give a map-style dataset, with __len__ and __getitem__: "
            f"list({kind.lower()}) where it fits in memory; of Hugging Face, load it with streaming=False."
        )
    try:
        return check_len(len(dataset))
    except (TypeError, NotImplementedError) as error:
        raise DatasetError(f"{kind} has no length, which a cache needs: {error}. Define __len__.") from error


def _probe(dataset: Any, length: int, count: int) -> dict[int, Any]:
    """Load ``count`` samples, evenly spread; those that fail are left for later.

    Raises:
        LimitError: ``count`` is no positive integer.
        Exception: what the dataset raises, when all fail.
    """
    if not isinstance(count, int) or count < 1:
        raise LimitError(f"probe={count!r} is no number of samples. Use 1 or more.")
    probed: dict[int, Any] = {}
    failure = None
    with randomness.kept():
        for idx in np.unique(np.linspace(0, length - 1, min(count, length)).round().astype(int)).tolist():
            try:
                probed[idx] = dataset[idx]
            except Exception as error:
                failure = error
    if failure is not None and not probed:
        raise failure
    return probed


def _common_structure(probed: dict[int, Any], variable: bool | None, allow_pickle: bool) -> Structure | None:
    """Return what the samples have in common when all are of one structure, with the same dtypes and shapes; else None.

    Raises:
        SampleError: none of them can be cached; or they differ, and ``variable`` is False.
    """
    if not probed:
        return None
    difference = "variable=True"
    if variable is not True:
        try:
            structure = Structure.of(next(iter(probed.values())), exact=True)
            for idx, sample in probed.items():
                structure.encode(sample, f"sample {idx}")
        except SampleError as error:
            if variable is False:
                raise
            difference = str(error)
        else:
            logger.info("probed samples %s: all are %s", list(probed), structure)
            return structure
    problems = []
    for idx, sample in probed.items():
        try:
            Record(sample, f"sample {idx}", allow_pickle)
        except SampleError as error:
            problems.append(error)
    if len(problems) == len(probed):
        raise problems[0]
    logger.info("probed samples %s: kept as samples of varying size (%s)", list(probed), difference)
    return None


# ---------------------------------------------------------------------------------------------------- inside


class _Filling(Dataset[None]):
    """Samples that, when asked for, are put into the cache, and not returned."""

    def __init__(self, load: Callable[[int], Any], cache: SharedCache | RaggedCache, length: int) -> None:
        self._load, self._cache, self._len = load, cache, length

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, idx: int) -> None:
        if self._cache.aux_array[idx] == SlotState.EMPTY:
            self._cache.get_or_load(idx, self._load, copy=False, strict=False)
