"""Where the samples of a batch come from: a cache, or a source that has them all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.shared import NextTier, SharedCache
from stocache.datasets.batches.spec import BatchSpec
from stocache.samples.indices import check_indices

Load: TypeAlias = Callable[[list[int]], Iterable[Any]]
"""Called with indices. Returns, or yields, their samples."""

LoadWith: TypeAlias = Callable[[Load, Sequence[int], list[int]], Iterable[object]]
"""Called with a function that loads, the indices of a batch, and those to load."""


class BatchRows:
    """The samples of a batch. The samples of this class are all there, as the rows of a table are.

    Attributes:
        indices: of the samples, in their source.
    """

    indices: Any

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

    def load_ahead(self) -> dict[int, Any]:
        """Load all samples, without asking the cache. Return them by index."""
        return {}

    def take_loaded(self, loaded: dict[int, Any]) -> None:
        """Take the samples that were loaded ahead."""

    def release_claims(self) -> None:
        """Let others load the samples that were claimed and not cached."""

    def load_with(self, load: "LoadWith") -> None:
        """Load missing samples with ``load``; see `LazyBatch.load_with`."""

    def load_as(self, other: Any) -> None:
        """Load missing samples as other rows of the same source do."""

    def read(self) -> list[Any]:
        """Return the samples."""
        raise NotImplementedError

    def fill(self, tensors: list[Tensor]) -> bool:
        """Write the samples into the rows of a batch. Return False if one does not fit, and they have to be read."""
        raise NotImplementedError


@dataclass(eq=False)
class CacheRows(BatchRows):
    """The samples of a batch of a cache.

    Attributes:
        cache: keeps the samples.
        indices: of the samples, in the cache.
        load: loads the samples that are not cached.
        next_tier: the cache behind that one, or None.
        direct: whether all samples are loaded when the batch is read, in its order: cached samples may not be served.
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
        return [at for idx, at in first.items() if idx not in others]

    def find(self) -> bool:
        """Return whether all samples are cached."""
        if self.hits is None and not self.direct:
            index = check_indices(self.indices, self.cache.dataset_len, "batch")
            self.hits = index if self.cache.set_among(index).all() else None
        return self.hits is not None

    def load_ahead(self) -> dict[int, Any]:
        """Load all samples, without asking the cache. Return them by index."""
        indices = [int(idx) for idx in self.indices]
        return dict(zip(indices, self.cache.load_ahead(indices, self.load), strict=True))

    def take_loaded(self, loaded: dict[int, Any]) -> None:
        """Take the samples that were loaded ahead."""
        self.loaded.update(loaded)

    def release_claims(self) -> None:
        """Let others load the samples that were claimed and not cached."""
        self.cache.end_loading(self.claimed)

    def load_with(self, load: "LoadWith") -> None:
        """Load missing samples with ``load``; see `LazyBatch.load_with`."""
        self.load = partial(load, self.load, self.indices)

    def load_as(self, other: "CacheRows") -> None:
        """Load missing samples as other rows of the same cache do."""
        self.load = other.load

    def load_rest(self, indices: list[int]) -> Iterable[Any]:
        """Load samples, unless they were loaded ahead."""
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

    def fill(self, tensors: list[Tensor]) -> bool:
        """Write the samples into the rows of a batch. Return False if one does not fit, and they have to be read."""
        if self.hits is not None:
            self.cache.gather(self.hits, tensors)
        else:
            rest = self.load_rest, self.claimed, self.next_tier, self.loaded
            self.samples = self.cache.fill_batch(self.indices, tensors, *rest)
        return self.samples is None
