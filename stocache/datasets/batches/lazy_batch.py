"""Gather a batch in one step: default_collate would stack sample by sample."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.datasets.batches.planned import GatherPlan, PlannedBatch
from stocache.datasets.batches.rows import BatchRows, CacheRows, LoadWith
from stocache.datasets.batches.spec import BatchSpec, Empty
from stocache.samples.indices import check_indices
from stocache.shm.pool import NUMPY_DTYPES

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _split(tensor: Tensor, starts: list[int], ends: list[int]) -> list[Tensor]:
    """Return the rows of a tensor in parts. Each has a storage of its own, so that it is saved without the others."""
    known = tensor.dtype in NUMPY_DTYPES
    rows = (tensor if known else tensor.view(_INTEGERS[tensor.itemsize])).numpy()
    parts = [torch.from_numpy(rows[start:end]) for start, end in zip(starts, ends, strict=True)]
    return parts if known else [part.view(tensor.dtype) for part in parts]


class LazyBatch:
    """A batch whose samples have not been read yet. It can be read as a list of samples, or gathered as a collated batch.

    Args:
        spec: the batches of the source.
        rows: the samples in their source.
        planned: what a GPU gathers, if all samples were found to be cached.
    """

    def __init__(self, spec: BatchSpec, rows: BatchRows, planned: PlannedBatch | None = None) -> None:
        self._spec, self._rows, self._planned = spec, rows, planned
        self._samples: list[Any] | None = None
        self.before_each: Callable[[int], None] | None = None  # called before a sample is made by itself

    def split(self, sizes: list[int]) -> "list[LazyBatch]":
        """Return batches of some sizes with the samples of this one, which a GPU gathers; together, if all are cached."""
        whole = cast("CacheRows", self._rows)
        plan = GatherPlan(cast("NDArray[np.int64]", whole.hits), sizes) if whole.find() else None
        batches = []
        for number, (size, end) in enumerate(zip(sizes, itertools.accumulate(sizes), strict=True)):
            planned = None if plan is None else PlannedBatch(plan, number)
            hits = None if planned is None else planned.indices
            rows = replace(whole, indices=whole.indices[end - size : end], hits=hits, claimed=set(), loaded={})
            batches.append(LazyBatch(self._spec, rows, planned))
        return batches

    def claim_missing(self) -> list[int]:
        """Claim the samples that are not cached. Return the positions in the batch to load: these, and those never cached.

        A sample that another thread or process is loading is waited for when the batch is gathered. Then the samples of the
        next tier are read, too.
        """
        return self._rows.claim_missing()

    @property
    def on_device(self) -> bool:
        """Whether a GPU gathers what is cached."""
        return self._spec.on_device

    @property
    def cached(self) -> bool:
        """Whether all samples are in the cache."""
        return self._rows.find()

    def load_all(self) -> dict[int, Any]:
        """Return the samples, by index, without asking the cache. A second `LazyBatch` has claimed them."""
        return self._rows.load_ahead()

    def take_loaded(self, samples: dict[int, Any]) -> None:
        """Take samples that were loaded ahead: `gather` and `read` cache them. Threads may call it at the same time."""
        self._rows.take_loaded(samples)

    def release_claims(self) -> None:
        """Let others load the samples that this batch has claimed and not cached."""
        self._rows.release_claims()

    def load_with(self, load: LoadWith) -> None:
        """Load missing samples with ``load``. It gets the present function, the indices of the batch, and those to load."""
        self._rows.load_with(load)

    def load_as(self, other: "LazyBatch") -> None:
        """Load missing samples as a second batch of the same samples does."""
        self._rows.load_as(other._rows)

    def read(self) -> list[Any]:
        """Return the samples."""
        if self._samples is None:
            self._samples = self._rows.read()
        return self._samples

    def gather(self, empty: Empty, joined: bool = True) -> Any:
        """Return the batch as default_collate makes it, in tensors made by ``empty``; None if it has to be read as a list.

        If it is not ``joined``, return only the tensors. If a GPU gathers, return a `PlannedBatch`.
        """
        if not self._rows.gathers:
            return None
        if self._spec.on_device:
            return self._load_missing(empty)
        tensors = self._spec.empty(len(self), empty) if len(self) else None
        if tensors is None or not self._rows.fill(tensors):
            return None
        return self._spec.join(tensors) if joined else tensors

    def _load_missing(self, empty: Empty) -> PlannedBatch | None:
        """Load the samples that are not cached into tensors made by ``empty``, and return them with the indices of all."""
        part = cast("CacheRows", self._rows)
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
        return self._rows.nbytes

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
        return len(self._rows.indices)

    def __getitem__(self, position: Any) -> Any:
        return self.read()[position]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())
