"""Batches that a GPU gathers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(eq=False)
class GatherPlan:
    """Batches that a GPU gathers: their samples, and where these come from.

    Attributes:
        indices: of all samples, batch after batch, int64 of shape (B,).
        sizes: of the batches.
        positions: of the k samples that were not in the cache, and were loaded: int64 of shape (k,), ascending; None for k = 0.
        tensors: for each leaf of the samples the values of these, of shape (k, ...); empty for k = 0.
        together: how many batches are gathered in one step; 0 if each is planned alone.
        sources: of the samples' large columns, as `RowSource`; None before the samples are looked up.
        small: the small columns of each batch, by their number.
        gathered: the batches on the GPU, their tensors, and the event at their end, by number, until they are taken.
    """

    indices: NDArray[np.int64]
    sizes: list[int]
    positions: NDArray[np.int64] | None = None
    tensors: Sequence[Tensor] = ()
    together: int = 1
    sources: Sequence[Any] | None = None
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
