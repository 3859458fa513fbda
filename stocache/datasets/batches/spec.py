"""The form of the batches that default_collate makes: containers, dtypes and shapes."""

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map  # documented, for extending default_collate

from stocache.cache.shared import SharedCache
from stocache.errors import SampleError
from stocache.samples.spec import Structure

Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Called with a shape and a dtype. Returns an uninitialised tensor in memory of its choice, or None if it has no room."""

_KINDS = {"dict", "list", "tuple", "namedtuple"}  # containers that do not depend on the size of the batch

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
        texts = (getattr(getattr(leaf.kind, "dtype", None), "kind", "") == "U" for leaf in leaves)
        if any(texts) or any(leaf.kind.order is not None for leaf in leaves):  # default_collate stacks in C order
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
