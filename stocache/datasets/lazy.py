"""Make datasets that return batches which have read nothing yet, also of several caches: `with_lazy_batches`."""

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from stocache.cache.shared import SharedCache
from stocache.datasets.batches import BatchSpec, Empty, LazyBatch, Load
from stocache.datasets.cached import is_cache
from stocache.system.walking import branch_of, inner_datasets, passes_on, through_subsets


class JoinedBatch(LazyBatch):
    """A batch of samples of several caches, which have one structure.

    Args:
        parts: the batch of each cache, and the positions of its samples in this one; by the number of the cache.
        length: the number of samples.
        spec: the batches of each cache.
    """

    def __init__(self, parts: dict[int, tuple[LazyBatch, NDArray[np.int64]]], length: int, spec: BatchSpec) -> None:
        self._parts, self._length, self._spec = parts, length, spec
        self._hits, self._samples, self._direct = None, None, False

    def claim_missing(self) -> list[int]:
        """Claim the samples that are not cached, as `LazyBatch` does."""
        return [row for part, positions in self._parts.values() for row in positions[part.claim_missing()].tolist()]

    @property
    def found_all(self) -> bool:
        """Whether `claim_missing` has found all samples in the caches."""
        return all(part.found_all for part, _ in self._parts.values())

    def load_all(self) -> dict[int, Any]:
        """Return the result of `LazyBatch.load_all` for each cache, by its number."""
        return {number: part.load_all() for number, (part, _) in self._parts.items()}

    def take_loaded(self, samples: dict[int, Any]) -> None:
        """Take samples that were loaded ahead, as `load_all` returns them."""
        for number, loaded in samples.items():
            self._parts[number][0].take_loaded(loaded)

    def release_claims(self) -> None:
        """Let others load the samples that this batch has claimed and not cached."""
        for part, _ in self._parts.values():
            part.release_claims()

    def load_with(self, load: Callable[[Load, Sequence[int], list[int]], Iterable[object]]) -> None:
        """Load missing samples with ``load``, as `LazyBatch` does. It gets -1 in place of the indices in other caches."""

        def load_part(positions: NDArray[np.int64], own: Load, inner: Sequence[int], missing: list[int]) -> Iterable[Any]:
            indices = np.full(self._length, -1)
            indices[positions] = inner
            return load(own, indices.tolist(), missing)

        for part, positions in self._parts.values():
            part.load_with(partial(load_part, positions))

    def load_as(self, other: LazyBatch) -> None:
        """Load missing samples as another batch of the same samples does."""
        assert isinstance(other, JoinedBatch)
        for number, (part, _) in self._parts.items():
            part.load_as(other._parts[number][0])

    def read(self) -> list[Any]:
        """Return the samples."""
        if self._samples is None:
            places = [(row, at, part) for part, rows in self._parts.values() for at, row in enumerate(rows.tolist())]
            in_order = sorted(places, key=operator.itemgetter(0))  # as without a cache: samples may draw random numbers
            self._samples = [part.read_one(at) for _, at, part in in_order]
        return self._samples

    @property
    def cached(self) -> bool:
        """Whether all samples are in the caches."""
        return all(part.cached for part, _ in self._parts.values())

    def gather(self, empty: Empty, joined: bool = True) -> Any:
        """Return the batch as `LazyBatch` does."""
        if len(self._parts) == 1:
            return next(iter(self._parts.values()))[0].gather(empty, joined)
        tensors = self._spec.empty(self._length, empty) if self._length else None
        if tensors is None:
            return None
        for part, positions in self._parts.values():
            own = part.gather(_new, joined=False)
            if own is None:
                return None
            for tensor, rows in zip(tensors, own, strict=True):
                _rows_of(tensor)[positions] = _rows_of(rows)
        return self._spec.join(tensors) if joined else tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the collated batch."""
        return sum(part.nbytes for part, _ in self._parts.values())

    def __len__(self) -> int:
        return self._length


def _rows_of(tensor: Tensor) -> NDArray[Any]:
    """Return the bytes of each row of a tensor."""
    rows: NDArray[Any] = tensor.view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8).numpy()
    return rows


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


class LazyConcat(ConcatDataset[Any]):
    """A ConcatDataset of cached datasets whose ``__getitems__`` returns a `JoinedBatch`."""

    datasets: list[Any]

    def __init__(self, dataset: ConcatDataset[Any], datasets: list[Any], spec: BatchSpec) -> None:
        vars(self).update(vars(dataset) | {"datasets": datasets})
        self._batch_spec = spec

    def __getitems__(self, indices: Sequence[int]) -> JoinedBatch:
        """Return the samples ``indices`` as a batch that has read nothing yet."""
        branches: dict[int, tuple[list[int], list[int]]] = {}
        for position, idx in enumerate(indices):
            number, inner_idx = branch_of(self, int(idx))
            positions, inner = branches.setdefault(number, ([], []))
            positions.append(position)
            inner.append(inner_idx)
        parts = {
            number: (self.datasets[number].__getitems__(inner), np.array(positions))
            for number, (positions, inner) in branches.items()
        }
        return JoinedBatch(parts, len(indices), self._batch_spec)


def with_lazy_batches(dataset: Any, on_device: bool = False) -> Any:
    """Return a copy of a dataset whose ``__getitems__`` returns a `LazyBatch`, which has read nothing yet.

    ``on_device``: a GPU gathers the samples that are cached, where the dataset is not a ConcatDataset; see `BatchSpec`.

    None where batches cannot be gathered: the samples are not those of cached datasets of one structure, passed on by torch's
    Subset and ConcatDataset; or they are transformed, or vary in size.
    """
    if type(dataset) in (Subset, ConcatDataset):
        if not passes_on(dataset):
            return None
        on_device = on_device and type(dataset) is Subset
        lazy = [with_lazy_batches(inner, on_device) for inner in inner_datasets(dataset)]
        specs: list[Any] = [None if inner is None else through_subsets(inner)[0]._batch_spec for inner in lazy]
        if any(spec is None or spec != specs[0] for spec in specs):
            return None
        if type(dataset) is ConcatDataset:
            return LazyConcat(dataset, lazy, specs[0])
        subset = copy.copy(dataset)
        subset.dataset = lazy[0]
        return subset
    if not is_cache(dataset) or dataset.is_transformed or not isinstance(dataset.cache, SharedCache) or dataset.is_left:
        return None
    spec = BatchSpec.of(dataset.cache)
    on_device = on_device and not dataset.cache.structure.is_narrow  # a GPU would copy the bytes
    if spec is None:
        return None
    cached = copy.copy(dataset)
    vars(cached)["_batch_spec"] = dataclasses.replace(spec, on_device=on_device)
    return cached
