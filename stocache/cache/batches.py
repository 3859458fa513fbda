"""Gather a batch from a cache in one step, where default_collate would stack sample by sample."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map  # documented, for extending default_collate

from stocache.cache.shared import SharedCache
from stocache.errors import SampleError
from stocache.samples.spec import Structure, TensorLeaf

Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Called with a shape and a dtype. Returns an uninitialised tensor in memory of its choice, or None if it has no room."""

Load: TypeAlias = Callable[[list[int]], Iterable[Any]]
"""Called with indices. Returns, or yields, their samples."""

_KINDS = {"dict", "list", "tuple", "namedtuple"}  # containers that do not depend on the size of the batch

_PATTERN = 1  # a byte that is valid in every dtype, also bool


@dataclass(frozen=True)
class BatchSpec:
    """The batches that default_collate makes of a cache's samples: their containers, dtypes and shapes.

    Attributes:
        structure: the structure of a batch of two samples.
    """

    structure: Structure

    @classmethod
    def of(cls, cache: SharedCache) -> "BatchSpec | None":
        """Return the spec of batches from ``cache``; None if default_collate does more than stack the samples' bytes.

        To find out, it collates two samples, once for each cache and each state of torch's collate functions.
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
        rows = [torch.full((2, leaf.nbytes), _PATTERN, dtype=torch.uint8) for leaf in leaves]
        try:
            batch = default_collate(cache.samples_of(rows, 2))
            structure = Structure.of(batch, exact=True)
            tensors = structure.columns(batch)
        except (SampleError, TypeError, RuntimeError, ValueError, AttributeError):  # it cannot collate these
            return None
        if any(container.kind not in _KINDS for container in structure.containers) or len(tensors) != len(leaves):
            return None
        for tensor, leaf in zip(tensors, leaves, strict=True):
            if type(tensor) is not Tensor or tuple(tensor.shape) != (2, *getattr(leaf, "shape", ())):
                return None
            if not tensor.is_contiguous() or tensor.nbytes != 2 * leaf.nbytes:
                return None
            if not (tensor.view(torch.uint8) == _PATTERN).all():
                return None
        return cls(structure)

    def empty(self, count: int, empty: Empty) -> list[Tensor] | None:
        """Return uninitialised tensors for ``count`` samples, made by ``empty``; None if it returns None."""
        tensors = []
        for leaf in self.structure.leaves:
            assert isinstance(leaf, TensorLeaf)
            tensor = empty((count, *leaf.shape[1:]), leaf.dtype)
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors


_known: "weakref.WeakKeyDictionary[SharedCache, tuple[dict[Any, Any], BatchSpec | None]]" = weakref.WeakKeyDictionary()


class LazyBatch:
    """A batch whose samples have not been read yet. It can be read as a list of samples, or gathered as a collated batch."""

    def __init__(self, cache: SharedCache, indices: Sequence[int], load: Load, spec: BatchSpec) -> None:
        self._cache, self._indices, self._load, self._spec = cache, indices, load, spec
        self._samples: list[Any] | None = None

    def load_with(self, load: Callable[[Load, Sequence[int], list[int]], Iterable[Any]]) -> None:
        """Load missing samples with ``load``. It gets the present function, the indices of the batch, and those to load."""
        self._load = partial(load, self._load, self._indices)

    def read(self) -> list[Any]:
        """Return the samples."""
        if self._samples is None:
            self._samples = self._cache.get_or_load_many(self._indices, self._load, strict=False)
        return self._samples

    @property
    def cached(self) -> bool:
        """Whether all samples are in the cache."""
        return self._cache.has(self._indices)

    def gather(self, empty: Empty) -> Any:
        """Return the batch as default_collate makes it, in tensors made by ``empty``; None if it has to be read as a list."""
        tensors = self._spec.empty(len(self._indices), empty) if len(self._indices) and self._samples is None else None
        if tensors is None:
            return None
        self._samples = self._cache.fill_batch(self._indices, tensors, self._load)
        return None if self._samples is not None else self._spec.structure.unflatten(tensors)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: Any) -> Any:
        return self.read()[position]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())
