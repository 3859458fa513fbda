"""Gather a batch from a cache in one step, where default_collate would stack sample by sample."""

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map  # documented, for extending default_collate

from stocache.cache.columns import as_bytes
from stocache.cache.shared import NextTier, SharedCache
from stocache.errors import SampleError
from stocache.samples.indices import check_indices
from stocache.samples.spec import Structure
from stocache.shm.pool import NUMPY_DTYPES

Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Called with a shape and a dtype. Returns an uninitialised tensor in memory of its choice, or None if it has no room."""

Load: TypeAlias = Callable[[list[int]], Iterable[Any]]
"""Called with indices. Returns, or yields, their samples."""

LoadWith: TypeAlias = Callable[[Load, Sequence[int], list[int]], Iterable[object]]
"""Called with a function that loads, the indices of a batch, and those to load."""

_KINDS = {"dict", "list", "tuple", "namedtuple"}  # containers that do not depend on the size of the batch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

_PATTERN = 1  # a byte that is valid in every dtype, also bool


@dataclass(frozen=True)
class BatchSpec:
    """The batches that default_collate makes of a cache's samples: their containers, dtypes and shapes.

    Attributes:
        structure: the structure of a batch of two samples.
        on_device: whether a GPU gathers the samples that are cached: `LazyBatch.gather` returns a `PlannedBatch`.
    """

    structure: Structure
    on_device: bool = False

    @functools.cached_property
    def join(self) -> Callable[[Any], Any]:
        """The function that puts the tensors of a batch into its containers."""
        return self.structure.joiner()

    @functools.cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape of a sample, and the dtype, for each tensor of a batch."""
        leaves: Any = self.structure.leaves
        return [(leaf.shape[1:], leaf.kind.dtype) for leaf in leaves]

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one sample in a batch."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes)

    @classmethod
    def of(cls, cache: SharedCache) -> "BatchSpec | None":
        """Return the spec of batches from ``cache``; None if default_collate does more than stack the samples' bytes.

        To find out, it collates two samples, once for each cache and each state of torch's collate functions. What a function
        of the user does may depend on the values.
        """
        known = _known.get(cache)
        if known is None or known[0] != default_collate_fn_map:
            known = _known[cache] = dict(default_collate_fn_map), cls._find_out(cache)
        return known[1]

    @classmethod
    def _find_out(cls, cache: SharedCache) -> "BatchSpec | None":
        leaves = cache.structure.leaves
        if any(leaf.kind.order is not None for leaf in leaves):  # default_collate stacks in C order
            return None
        rows = [torch.full((2, leaf.batch_bytes), _PATTERN, dtype=torch.uint8, device="cpu") for leaf in leaves]
        spec, tensors = cls.collated(cache.samples_of(rows, 2)) or (None, [])
        if len(tensors) != len(leaves):
            return None
        for tensor, leaf in zip(tensors, leaves, strict=True):
            if tuple(tensor.shape) != (2, *leaf.shape) or tensor.nbytes != 2 * leaf.batch_bytes:
                return None
            if not (tensor.view(torch.uint8) == _PATTERN).all():
                return None
        return spec

    @classmethod
    def collated(cls, samples: list[Any]) -> "tuple[BatchSpec, list[Tensor]] | None":
        """Return the spec and the tensors of a batch of samples; None if default_collate does more than stack tensors."""
        functions = {kind: own if only_collates(own) else _refuse for kind, own in default_collate_fn_map.items()}
        try:
            batch = collate(samples, collate_fn_map=functions)
            structure = Structure.of(batch, exact=True)
            tensors = structure.columns(batch)
        except (SampleError, TypeError, RuntimeError, ValueError, AttributeError):  # it cannot collate these
            return None
        if any(container.kind not in _KINDS for container in structure.containers):
            return None
        if not all(type(tensor) is Tensor and tensor.ndim and tensor.is_contiguous() for tensor in tensors):
            return None
        return cls(structure), tensors

    def empty(self, count: int, empty: Empty) -> list[Tensor] | None:
        """Return uninitialised tensors for ``count`` samples, made by ``empty``; None if it returns None."""
        tensors = []
        for shape, dtype in self.shapes:
            tensor = empty((count, *shape), dtype)
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors


def only_collates(function: object) -> bool:
    """Whether a function for `default_collate` is of torch, or of a library whose functions draw nothing, and only stack."""
    return str(getattr(function, "__module__", "")).split(".")[0] in _LIBRARIES


_LIBRARIES = {"torch", "stocache", "monai", "tensordict"}


def _refuse(samples: object, *, collate_fn_map: object = None) -> None:
    raise TypeError("a function of the user collates these")


_known: "weakref.WeakKeyDictionary[SharedCache, tuple[dict[Any, Any], BatchSpec | None]]" = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class GatherPlan:
    """Batches that a GPU gathers: their samples, and where these come from.

    Attributes:
        indices: of all samples, batch after batch, int64 of shape (B,).
        sizes: of the batches.
        positions: of the k samples that were not in the cache, and were loaded: int64 of shape (k,), ascending; None for k = 0.
        tensors: for each leaf of the samples the values of these, of shape (k, ...); empty for k = 0.
        version: of the rows of the GPU when the samples were looked up; None before.
        together: how many batches are gathered in one step; 0 if each is planned alone.
        sources: of the samples' large columns, as `RowSource`.
        small: the small columns of each batch, by their number.
        gathered: the batches on the GPU, their tensors, and the event at their end, by number, until they are taken.
    """

    indices: NDArray[np.int64]
    sizes: list[int]
    positions: NDArray[np.int64] | None = None
    tensors: Sequence[Tensor] = ()
    version: int | None = None
    together: int = 1
    sources: Sequence[Any] = ()
    small: dict[int, list[Tensor]] = field(default_factory=dict)
    gathered: dict[int, tuple[Any, list[Tensor], Any]] = field(default_factory=dict)


class PlannedBatch(NamedTuple):
    """One batch of a plan."""

    plan: GatherPlan
    number: int = 0

    @classmethod
    def alone(cls, indices: NDArray[np.int64], *loaded: Any) -> "PlannedBatch":
        """Return a batch that is gathered alone. ``loaded``: positions and tensors of its plan."""
        return cls(GatherPlan(indices, [len(indices)], *loaded))

    @property
    def indices(self) -> NDArray[np.int64]:
        """The indices of its samples."""
        plan, number = self
        begin = sum(plan.sizes[:number])
        return plan.indices[begin : begin + plan.sizes[number]]


def _split(tensor: Tensor, starts: list[int], ends: list[int]) -> list[Tensor]:
    """Return the rows of a tensor in parts. Each has a storage of its own, so that it is saved without the others."""
    known = tensor.dtype in NUMPY_DTYPES
    rows = (tensor if known else tensor.view(_INTEGERS[tensor.itemsize])).numpy()
    parts = [torch.from_numpy(rows[start:end]) for start, end in zip(starts, ends, strict=True)]
    return parts if known else [part.view(tensor.dtype) for part in parts]


class BatchRows:
    """The samples of a batch that are of one source. The samples of this class are all there, as the rows of a table are.

    Attributes:
        indices: of the samples, in their source.
        rows: of the samples in the batch; None if it has no others.
    """

    indices: Any
    rows: NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the samples in a collated batch."""
        raise NotImplementedError

    @property
    def gathers(self) -> bool:
        """Whether the samples can be written into the rows of a batch."""
        return True

    def claim_missing(self) -> list[int]:
        """Claim the samples that are not there. Return their rows; see `LazyBatch.claim_missing`."""
        return []

    def find(self) -> bool:
        """Return whether all samples are there."""
        return True

    def load_ahead(self, loaded: dict[SharedCache, dict[int, Any]]) -> None:
        """Load all samples, and add them to ``loaded``, without asking the cache."""

    def take_loaded(self, loaded: dict[SharedCache, dict[int, Any]]) -> None:
        """Take the samples that were loaded ahead."""

    def release_claims(self) -> None:
        """Let others load the samples that were claimed and not cached."""

    def load_with(self, load: "LoadWith", length: int) -> None:
        """Load missing samples with ``load``; see `LazyBatch.load_with`. ``length``: of the batch."""

    def load_as(self, other: Any) -> None:
        """Load missing samples as other rows of the same source do."""

    def read(self) -> list[Any]:
        """Return the samples."""
        raise NotImplementedError

    def read_one(self, at: int) -> Any:
        """Return one sample. If it is loaded in any case, no others are."""
        return self.read()[at]

    def fill(self, tensors: list[Tensor]) -> bool:
        """Write the samples into the rows of a batch. Return False if one does not fit, and they have to be read."""
        raise NotImplementedError


@dataclass(eq=False)
class CacheRows(BatchRows):
    """The samples of a batch that are of one cache.

    Attributes:
        cache: keeps the samples.
        indices: of the samples, in the cache.
        load: loads those that are not cached.
        next_tier: the cache behind that one, or None.
        direct: whether all samples are loaded when the batch is read, in its order: those that are cached may not be served.
        rows: of the samples in the batch; None if it has no others.
        hits: the indices, as soon as all samples were found to be cached.
        claimed: the samples that were claimed to load them.
        loaded: the samples that were loaded ahead, by index.
        samples: the samples, as soon as they were read.
    """

    cache: SharedCache
    indices: Sequence[int]
    load: Load
    next_tier: NextTier | None = None
    direct: bool = False
    rows: NDArray[np.int64] | None = None
    hits: NDArray[np.int64] | None = None
    claimed: set[int] = field(default_factory=set)
    loaded: dict[int, Any] = field(default_factory=dict)
    samples: list[Any] | None = None

    @property
    def gathers(self) -> bool:
        """Whether the samples can be gathered. default_collate may have been extended since the batch was made."""
        return not self.direct and self.samples is None and BatchSpec.of(self.cache) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the samples in a collated batch."""
        return len(self.indices) * self.cache.slot_bytes

    def claim_missing(self) -> list[int]:
        """Claim the samples that are not cached. Return their rows; see `LazyBatch.claim_missing`."""
        if self.direct or self.find():
            return []
        indices = check_indices(self.indices, self.cache.dataset_len, "batch")
        is_set = self.cache.set_among(indices)
        first: dict[int, int] = {}  # by sample: where it is first
        if self.next_tier is not None:
            is_set |= self.cache.outside(indices) & self.next_tier.has_rows(indices)
        for at in np.flatnonzero(~is_set).tolist():
            first.setdefault(int(indices[at]), at)
        self.cache.claim_to_load(list(first), self.claimed)
        others = {idx for idx in first if idx not in self.claimed and (self.cache.fillable(idx) or self.cache.holds(idx))}
        missing = [at for idx, at in first.items() if idx not in others]
        return missing if self.rows is None else self.rows[missing].tolist()

    def find(self) -> bool:
        """Return whether all samples are cached."""
        if self.hits is None and not self.direct:
            index = check_indices(self.indices, self.cache.dataset_len, "batch")
            self.hits = index if self.cache.set_among(index).all() else None
        return self.hits is not None

    def load_ahead(self, loaded: dict[SharedCache, dict[int, Any]]) -> None:
        """Load all samples, and add them to ``loaded``, without asking the cache."""
        indices = [int(idx) for idx in self.indices]
        samples = self.cache.load_ahead(indices, self.load)
        loaded.setdefault(self.cache, {}).update(zip(indices, samples, strict=True))

    def take_loaded(self, loaded: dict[SharedCache, dict[int, Any]]) -> None:
        """Take the samples that were loaded ahead."""
        self.loaded.update(loaded.get(self.cache, {}))

    def release_claims(self) -> None:
        """Let others load the samples that were claimed and not cached."""
        self.cache.end_loading(self.claimed)

    def load_with(self, load: "LoadWith", length: int) -> None:
        """Load missing samples with ``load``; see `LazyBatch.load_with`. ``length``: of the batch."""
        indices: Any = self.indices
        if self.rows is not None:
            indices = np.full(length, -1)
            indices[self.rows] = self.indices
        self.load = partial(load, self.load, indices)

    def load_as(self, other: "CacheRows") -> None:
        """Load missing samples as other rows of the same cache do."""
        self.load = other.load

    def load_rest(self, indices: list[int]) -> Iterable[Any]:
        """Load samples, those that were not loaded ahead."""
        if not self.loaded:
            return self.load(indices)
        rest = [idx for idx in indices if idx not in self.loaded]
        samples = self.loaded | (dict(zip(rest, self.load(rest), strict=True)) if rest else {})
        return [samples[idx] for idx in indices]

    def read(self) -> list[Any]:
        """Return the samples."""
        if self.samples is None and self.direct:
            self.samples = list(self.load(list(self.indices)))
        elif self.samples is None:
            load = self.cache.get_or_load_many
            self.samples = load(self.indices, self.load_rest, strict=False, claimed=self.claimed, ahead=self.loaded)
        return self.samples

    def read_one(self, at: int) -> Any:
        """Return one sample. If it is loaded in any case, no others are."""
        return next(iter(self.load([self.indices[at]]))) if self.direct else self.read()[at]

    def fill(self, tensors: list[Tensor]) -> bool:
        """Write the samples into the rows of a batch. Return False if one does not fit, and they have to be read."""
        if self.hits is not None:
            self.cache.gather(self.hits, tensors)
        else:
            rest = self.load_rest, self.claimed, self.next_tier, self.loaded
            self.samples = self.cache.fill_batch(self.indices, tensors, *rest)
        return self.samples is None


class LazyBatch:
    """A batch whose samples have not been read yet. It can be read as a list of samples, or gathered as a collated batch.

    Args:
        spec: the batches of each cache.
        parts: the samples of each cache.
        length: the number of samples.
        planned: what a GPU gathers, if all samples were found to be cached.
    """

    def __init__(self, spec: BatchSpec, parts: Sequence[BatchRows], length: int, planned: PlannedBatch | None = None) -> None:
        self._spec, self.parts, self._length, self._planned = spec, parts, length, planned
        self._samples: list[Any] | None = None
        self.before_each: Callable[[int], None] | None = None  # called before a sample is made by itself

    def split(self, sizes: list[int]) -> "list[LazyBatch]":
        """Return batches of some sizes with the samples of this one, which a GPU gathers; together, if all are cached."""
        (whole,) = cast("Sequence[CacheRows]", self.parts)
        plan = GatherPlan(cast("NDArray[np.int64]", whole.hits), sizes) if whole.find() else None
        batches = []
        for number, (size, end) in enumerate(zip(sizes, itertools.accumulate(sizes), strict=True)):
            planned = None if plan is None else PlannedBatch(plan, number)
            hits = None if planned is None else planned.indices
            part = replace(whole, indices=whole.indices[end - size : end], hits=hits, claimed=set(), loaded={})
            batches.append(LazyBatch(self._spec, [part], size, planned))
        return batches

    def claim_missing(self) -> list[int]:
        """Claim the samples that are not cached. Return the positions in the batch to load: these, and those never cached.

        A sample that another thread or process is loading is waited for when the batch is gathered. Then those of the next tier
        are read, too.
        """
        return [row for part in self.parts for row in part.claim_missing()]

    @property
    def on_device(self) -> bool:
        """Whether a GPU gathers what is cached."""
        return self._spec.on_device

    @property
    def cached(self) -> bool:
        """Whether all samples are in the caches."""
        return all(part.find() for part in self.parts)

    def load_all(self) -> dict[SharedCache, dict[int, Any]]:
        """Return the samples, by cache and index, without asking the caches. Another `LazyBatch` has claimed them."""
        loaded: dict[SharedCache, dict[int, Any]] = {}
        for part in self.parts:
            part.load_ahead(loaded)
        return loaded

    def take_loaded(self, samples: dict[SharedCache, dict[int, Any]]) -> None:
        """Take samples that were loaded ahead: `gather` and `read` cache them. Threads may call it at the same time."""
        for part in self.parts:
            part.take_loaded(samples)

    def release_claims(self) -> None:
        """Let others load the samples that this batch has claimed and not cached."""
        for part in self.parts:
            part.release_claims()

    def load_with(self, load: LoadWith) -> None:
        """Load missing samples with ``load``.

        It gets the present function, the indices of the batch, and those to load. The index of a sample of another cache is -1.
        """
        for part in self.parts:
            part.load_with(load, self._length)

    def load_as(self, other: "LazyBatch") -> None:
        """Load missing samples as another batch of the same samples does."""
        for part, own in zip(self.parts, other.parts, strict=True):
            part.load_as(own)

    def read(self) -> list[Any]:
        """Return the samples."""
        if self._samples is None and len(self.parts) == 1:
            self._samples = self.parts[0].read()
        elif self._samples is None:
            places = [(row, at, part) for part in self.parts for at, row in enumerate(cast(Any, part.rows).tolist())]
            in_order = sorted(places, key=operator.itemgetter(0))  # as without a cache: samples may draw random numbers
            self._samples = [part.read_one(at) for _, at, part in in_order]
        return self._samples

    def gather(self, empty: Empty, joined: bool = True) -> Any:
        """Return the batch as default_collate makes it, in tensors made by ``empty``; None if it has to be read as a list.

        If it is not ``joined``, return only the tensors. If a GPU gathers, return a `PlannedBatch`.
        """
        if not all(part.gathers for part in self.parts):
            return None
        if self._spec.on_device:
            return self._load_missing(empty)
        tensors = self._spec.empty(self._length, empty) if self._length else None
        if tensors is None or not all(self._fill(part, tensors) for part in self.parts):
            return None
        return self._spec.join(tensors) if joined else tensors

    def _fill(self, part: BatchRows, tensors: list[Tensor]) -> bool:
        """Write the samples of a source into their rows of the batch. Return False if they have to be read."""
        if part.rows is None:
            return part.fill(tensors)
        own = cast("list[Tensor]", self._spec.empty(len(part.indices), _new))
        filled = part.fill(own)
        for tensor, rows in zip(tensors, own, strict=True):
            as_bytes(tensor)[part.rows] = as_bytes(rows)
        return filled

    def _load_missing(self, empty: Empty) -> PlannedBatch | None:
        """Load the samples that are not cached into tensors made by ``empty``, and return them with the indices of all."""
        (part,) = cast("Sequence[CacheRows]", self.parts)
        index = check_indices(part.indices, part.cache.dataset_len, "batch") if part.hits is None else part.hits
        positions: Any = np.flatnonzero(~part.cache.set_among(index)) if part.hits is None else ()
        part.cache.count_hits(len(index) - len(positions))
        if not len(positions):
            return self._planned or PlannedBatch.alone(index)
        missing = replace(part, indices=index[positions].tolist())
        tensors = self._spec.empty(len(positions), empty)
        if tensors is None:
            return None
        if not missing.fill(tensors):
            part.loaded.update(zip(missing.indices, missing.samples or (), strict=True))
            return None
        return PlannedBatch.alone(index, positions, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the collated batch."""
        return sum(part.nbytes for part in self.parts)

    def gather_parts(self, sizes: list[int], empty: Empty) -> list[Any] | None:
        """Return the result of `gather` for batches of some sizes with the samples of this one, after one gather of all.

        None if they have to be read as lists.
        """
        if self._spec.on_device:
            return [part.gather(empty) for part in self.split(sizes)]
        tensors = self.gather(empty, joined=False)
        if tensors is None:
            return None
        if len(sizes) == 1:
            return [self._spec.join(tensors)]
        ends = list(itertools.accumulate(sizes))
        columns = [_split(tensor, [0, *ends[:-1]], ends) for tensor in tensors]
        return [self._spec.join(own) for own in zip(*columns, strict=True)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: Any) -> Any:
        return self.read()[position]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")
