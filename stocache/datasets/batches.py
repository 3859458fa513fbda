"""Gather a batch from a cache in one step, where default_collate would stack sample by sample."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map  # documented, for extending default_collate

from stocache.cache.shared import NextTier, SharedCache
from stocache.errors import SampleError
from stocache.samples.indices import check_indices
from stocache.samples.spec import Structure
from stocache.shm.pool import NUMPY_DTYPES

Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Called with a shape and a dtype. Returns an uninitialised tensor in memory of its choice, or None if it has no room."""

Load: TypeAlias = Callable[[list[int]], Iterable[Any]]
"""Called with indices. Returns, or yields, their samples."""

_KINDS = {"dict", "list", "tuple", "namedtuple"}  # containers that do not depend on the size of the batch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

_PATTERN = 1  # a byte that is valid in every dtype, also bool


@dataclass(frozen=True)
class BatchSpec:
    """The batches that default_collate makes of a cache's samples: their containers, dtypes and shapes.

    Attributes:
        structure: the structure of a batch of two samples.
        on_device: whether a GPU gathers the samples that are cached: `LazyBatch.gather` returns a `PartialBatch` or a
            `GroupPart`.
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
        return [(leaf.shape[1:], leaf.dtype) for leaf in leaves]

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
        if any(getattr(leaf, "order", None) is not None for leaf in leaves):  # default_collate stacks in C order
            return None
        rows = [torch.full((2, leaf.batch_bytes), _PATTERN, dtype=torch.uint8, device="cpu") for leaf in leaves]
        try:
            functions = {kind: own if only_collates(own) else _refuse for kind, own in default_collate_fn_map.items()}
            batch = collate(cache.samples_of(rows, 2), collate_fn_map=functions)
            structure = Structure.of(batch, exact=True)
            tensors = structure.columns(batch)
        except (SampleError, TypeError, RuntimeError, ValueError, AttributeError):  # it cannot collate these
            return None
        if any(container.kind not in _KINDS for container in structure.containers) or len(tensors) != len(leaves):
            return None
        for tensor, leaf in zip(tensors, leaves, strict=True):
            if type(tensor) is not Tensor or tuple(tensor.shape) != (2, *getattr(leaf, "shape", ())):
                return None
            if not tensor.is_contiguous() or tensor.nbytes != 2 * leaf.batch_bytes:
                return None
            if not (tensor.view(torch.uint8) == _PATTERN).all():
                return None
        return cls(structure)

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


class PartialBatch(NamedTuple):
    """A batch of which only those samples were loaded that are not in the cache.

    Attributes:
        indices: of all B samples, int64 of shape (B,).
        positions: in the batch, of the k samples that were loaded: int64 of shape (k,), ascending; None for k = 0.
        tensors: for each leaf of the samples the values of these, of shape (k, ...); empty for k = 0.
    """

    indices: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None
    tensors: Sequence[Tensor] = ()


@dataclass(eq=False)
class BatchGroup:
    """Batches whose samples are all in the cache.

    Attributes:
        indices: of all samples, batch after batch.
        ends: where each batch ends in ``indices``.
        was_met, plan: whether a GPU has gathered one of them, and how it gathers them; None if it does so one at a time.
    """

    indices: NDArray[np.int64]
    ends: list[int]
    was_met: bool = False
    plan: Any = None


class GroupPart(NamedTuple):
    """One batch of a group."""

    group: BatchGroup
    number: int

    @property
    def indices(self) -> NDArray[np.int64]:
        """The indices of its samples."""
        group, number = self
        return group.indices[group.ends[number - 1] if number else 0 : group.ends[number]]


def _split(tensor: Tensor, starts: list[int], ends: list[int]) -> list[Tensor]:
    """Return the rows of a tensor in parts. Each has a storage of its own, so that it is saved without the others."""
    known = tensor.dtype in NUMPY_DTYPES
    rows = (tensor if known else tensor.view(_INTEGERS[tensor.itemsize])).numpy()
    parts = [torch.from_numpy(rows[start:end]) for start, end in zip(starts, ends, strict=True)]
    return parts if known else [part.view(tensor.dtype) for part in parts]


class LazyBatch:
    """A batch whose samples have not been read yet. It can be read as a list of samples, or gathered as a collated batch.

    Args:
        cache: keeps the samples.
        indices: of the samples.
        load: loads those that are not cached.
        spec: the batches of the cache.
        next_tier: the cache behind that one, or None.
        direct: whether all samples are loaded when the batch is read, in its order: those that are cached may not be served.
    """

    def __init__(
        self, cache: SharedCache, indices: Sequence[int], load: Load, spec: BatchSpec, next_tier: NextTier | None = None,
        direct: bool = False,
    ) -> None:  # fmt: skip
        self._cache, self._indices, self._load, self._spec = cache, indices, load, spec
        self._next_tier, self._direct = next_tier, direct
        self._samples: list[Any] | None = None
        self._claimed: set[int] = set()  # by `claim_missing`
        self._hits: NDArray[np.int64] | None = None  # if it has found that all are cached
        self._part: GroupPart | None = None  # of a group that was found to be cached
        self._loaded: dict[int, Any] = {}

    def split(self, sizes: list[int]) -> "list[LazyBatch]":
        """Return batches of some sizes with the samples of this one. If all are cached, a GPU plans them together."""
        ends, hits = np.cumsum(sizes).tolist(), self._hits if self.cached else None
        group = BatchGroup(hits, ends) if hits is not None and self._spec.on_device else None
        parts = []
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            indices = self._indices[end - size : end]
            part = LazyBatch(self._cache, indices, self._load, self._spec, self._next_tier, self._direct)
            part._hits = None if hits is None else hits[end - size : end]
            part._part = None if group is None else GroupPart(group, number)
            parts.append(part)
        return parts

    def claim_missing(self) -> list[int]:
        """Claim the samples that are not cached. Return the positions in the batch to load: these, and those never cached.

        A sample that another thread or process is loading is waited for when the batch is gathered. Then those of the next tier
        are read, too.
        """
        if self._direct:
            return []
        indices = check_indices(self._indices, self._cache.dataset_len, "batch")
        is_set = self._cache.set_among(indices)
        if is_set.all():
            self._hits = indices
            return []
        rows: dict[int, int] = {}
        if self._next_tier is not None:
            is_set |= self._cache.outside(indices) & self._next_tier.has_rows(indices)
        for row in np.flatnonzero(~is_set).tolist():
            rows.setdefault(int(indices[row]), row)
        self._cache.claim_to_load(list(rows), self._claimed)
        others = {idx for idx in rows if idx not in self._claimed and (self._cache.fillable(idx) or self._cache.has([idx]))}
        return [row for idx, row in rows.items() if idx not in others]

    @property
    def on_device(self) -> bool:
        """Whether a GPU gathers what is cached."""
        return self._spec.on_device

    @property
    def found_all(self) -> bool:
        """Whether `claim_missing`, or `cached`, has found all samples in the cache."""
        return self._hits is not None

    def load_all(self) -> dict[int, Any]:
        """Return the samples, by index, without asking the cache. Another `LazyBatch` has claimed them."""
        indices = [int(idx) for idx in self._indices]
        return dict(zip(indices, self._cache.load_ahead(indices, self._load), strict=True))

    def take_loaded(self, samples: dict[int, Any]) -> None:
        """Take samples that were loaded ahead: `gather` and `read` cache them. Threads may call it at the same time."""
        self._loaded.update(samples)

    def _load_rest(self, indices: list[int]) -> Iterable[Any]:
        if not self._loaded:
            return self._load(indices)
        rest = [idx for idx in indices if idx not in self._loaded]
        samples = dict(zip(rest, self._load(rest), strict=True)) if rest else {}
        return [self._loaded[idx] if idx in self._loaded else samples[idx] for idx in indices]

    def release_claims(self) -> None:
        """Let others load the samples that this batch has claimed and not cached."""
        self._cache.end_loading(self._claimed)

    def load_with(self, load: Callable[[Load, Sequence[int], list[int]], Iterable[object]]) -> None:
        """Load missing samples with ``load``. It gets the present function, the indices of the batch, and those to load."""
        self._load = partial(load, self._load, self._indices)

    def load_as(self, other: "LazyBatch") -> None:
        """Load missing samples as another batch of the same samples does."""
        self._load = other._load

    def read(self) -> list[Any]:
        """Return the samples."""
        if self._samples is None and self._direct:
            self._samples = list(self._load(list(self._indices)))
        elif self._samples is None:
            self._samples = self._cache.get_or_load_many(
                self._indices, self._load_rest, strict=False, claimed=self._claimed, ahead=self._loaded
            )
        return self._samples

    def read_one(self, position: int) -> Any:
        """Return one sample. If it is loaded in any case, no others are."""
        return next(iter(self._load([self._indices[position]]))) if self._direct else self.read()[position]

    @property
    def cached(self) -> bool:
        """Whether all samples are in the cache."""
        if self._hits is None and not self._direct:
            index = check_indices(self._indices, self._cache.dataset_len, "batch")
            self._hits = index if self._cache.set_among(index).all() else None
        return self._hits is not None

    def gather(self, empty: Empty, joined: bool = True) -> Any:
        """Return the batch as default_collate makes it, in tensors made by ``empty``; None if it has to be read as a list.

        If it is not ``joined``, return only the tensors. If a GPU gathers, return a `PartialBatch`, or a `GroupPart`.
        """
        if self._direct or BatchSpec.of(self._cache) is None:  # default_collate was extended since
            return None
        if self._spec.on_device:
            return self._load_missing(empty)
        tensors = self._spec.empty(len(self._indices), empty) if len(self._indices) and self._samples is None else None
        if tensors is None:
            return None
        if self._hits is not None:
            self._cache.gather(self._hits, tensors)
        else:
            rest = self._load_rest, self._claimed, self._next_tier, self._loaded
            self._samples = self._cache.fill_batch(self._indices, tensors, *rest)
            if self._samples is not None:
                return None
        return self._spec.join(tensors) if joined else tensors

    def _load_missing(self, empty: Empty) -> PartialBatch | GroupPart | None:
        """Load the samples that are not cached into tensors made by ``empty``, and return them with the indices of all."""
        if self._samples is not None:
            return None
        if self._hits is not None:
            self._cache.count_hits(len(self._hits))
            return PartialBatch(self._hits) if self._part is None else self._part
        index = check_indices(self._indices, self._cache.dataset_len, "batch")
        mask = self._cache.set_among(index)
        positions = np.flatnonzero(~mask)
        self._cache.count_hits(len(index) - len(positions))
        if not len(positions):
            return PartialBatch(index)
        tensors, missing = self._spec.empty(len(positions), empty), index[positions].tolist()
        if tensors is None:
            return None
        samples = self._cache.fill_batch(missing, tensors, self._load_rest, self._claimed, self._next_tier, self._loaded)
        if samples is not None:  # they do not fit: it has to be read as a list
            self._loaded.update(zip(missing, samples, strict=True))
            return None
        return PartialBatch(index, positions, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the collated batch."""
        return len(self._indices) * self._cache.slot_bytes

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
        return len(self._indices)

    def __getitem__(self, position: Any) -> Any:
        return self.read()[position]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())
