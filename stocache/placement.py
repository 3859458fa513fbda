"""Which samples are resident, and in which slot: pure arithmetic, the same in every process without a table or a message.

Under per-epoch shuffling every sample is read once an epoch, so no policy serves more than never evicting; what remains to
choose is *which* share is kept. `Placement` is that choice, `Residency` the choice applied to one dataset and one cache.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stocache.checksums import checksum
from stocache.errors import LimitError


class Units:
    """Units of varying numbers of samples, for `Placement`: unit u is the samples ``bounds[u]`` to ``bounds[u + 1] - 1``.

    Raises:
        LimitError: the bounds do not ascend from 0.
    """

    def __init__(self, bounds: Any) -> None:
        self.bounds = np.asarray(bounds, dtype=np.int64)
        if not (self.bounds.ndim == 1 and len(self.bounds) and self.bounds[0] == 0 and (np.diff(self.bounds) > 0).all()):
            raise LimitError(f"bounds of units must ascend from 0, got {self.bounds.tolist()!r:.100}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Units) and np.array_equal(self.bounds, other.bounds)

    def __hash__(self) -> int:
        return hash(self.bounds.tobytes())

    def __repr__(self) -> str:  # what named caches are compared by
        return f"Units({len(self.bounds) - 1} of {self.bounds[-1]} samples, {checksum(self.bounds.tobytes())})"


@dataclass(frozen=True)
class Placement:
    """How the resident samples are chosen.

    Attributes:
        order: "prefix" keeps the first samples, slot = index, as stocaching does. "scattered" spreads the residents evenly
            over the index space, so that every class and every stretch of the data holds its share.
        unit: samples are admitted in whole blocks of this many, or of these `Units`, for data that is read by the block.
        node, nodes: this machine's number among ``nodes``; each holds a window of its own, so that the caches add up.

    Raises:
        LimitError: an unknown order, a unit or number of nodes below 1, or a node outside ``[0, nodes)``.
    """

    order: Literal["prefix", "scattered"] = "prefix"
    unit: int | Units = 1
    node: int = 0
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.order not in ("prefix", "scattered"):
            raise LimitError(f"placement {self.order!r} is unknown. Use 'prefix' or 'scattered'.")
        if (isinstance(self.unit, int) and self.unit < 1) or self.nodes < 1 or not 0 <= self.node < self.nodes:
            raise LimitError(
                f"placement needs unit >= 1, nodes >= 1 and 0 <= node < nodes, got unit={self.unit}, "
                f"node={self.node}, nodes={self.nodes}."
            )


def residency(placement: Placement, dataset_len: int, slots: int) -> "Residency | UnitResidency":
    """Return a placement applied to ``dataset_len`` samples, of which up to ``slots`` are to be resident.

    Raises:
        LimitError: its units are of another number of samples.
    """
    if isinstance(placement.unit, int):
        return Residency(placement, dataset_len, slots)
    if placement.unit.bounds[-1] != dataset_len:
        raise LimitError(f"the placement has units of {placement.unit.bounds[-1]} samples, the dataset has {dataset_len}.")
    return UnitResidency(placement, slots)


class Residency:
    """A placement applied: ``dataset_len`` samples, of which up to ``slots`` are resident.

    Blocks of ``unit`` samples are permuted (scattered: block b goes to position a·b mod F, a coprime to F next to F/golden
    ratio, so that any window of positions is evenly spread over the blocks: the three-distance theorem), the positions are
    rotated by this node's window, and the blocks at the first positions are resident. A last block that is not full keeps
    the last position, which makes positions and slots meet without gaps.
    """

    def __init__(self, placement: Placement, dataset_len: int, slots: int) -> None:
        unit = placement.unit
        assert isinstance(unit, int)  # else see UnitResidency
        self.dataset_len = dataset_len
        self.slot_count = slots
        self._unit = unit
        self._full = dataset_len // unit
        self._blocks = -(-dataset_len // unit)
        self._resident = self._blocks if slots >= dataset_len else slots // unit
        partial = self._resident < self._blocks
        self._factor = _spread(self._full) if partial and placement.order == "scattered" else 1
        self._shift = placement.node * self._resident % self._blocks if partial else 0
        if self._factor * self._full >= 2**63:
            raise LimitError(f"scattered placement of {self._full} blocks exceeds 64-bit arithmetic. Raise unit.")
        self.identity = self._factor == 1 and self._shift == 0
        """Whether the slot of a resident sample is its index."""

    def slot(self, idx: int) -> int:
        """Return the slot of a sample known to be resident."""
        block, offset = divmod(operator.index(idx), self._unit)
        if block < self._full:
            block = block * self._factor % self._full
        return (block - self._shift) % self._blocks * self._unit + offset

    def slots(self, indices: Tensor) -> Tensor:
        """Return the slots of samples known to be resident, an int64 tensor as ``indices``."""
        if self.identity:
            return indices
        block, offset = self._positions(indices)
        return block * self._unit + offset

    def resident(self, indices: Tensor) -> Tensor:
        """Return which samples of an int64 tensor are resident, as a bool tensor."""
        return self._positions(indices)[0] < self._resident

    def _positions(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        block, offset = indices // self._unit, indices % self._unit
        if self._factor != 1:
            block = torch.where(block < self._full, block * self._factor % self._full, block)
        if self._shift:
            block = (block - self._shift) % self._blocks
        return block, offset


class UnitResidency:
    """A placement by units of varying size, applied; as `Residency`, with a table of the units in place of arithmetic.

    Units are taken in the order of their positions, from this node's window on, as long as they fit.
    """

    def __init__(self, placement: Placement, slots: int) -> None:
        assert isinstance(placement.unit, Units)  # else see Residency
        bounds = self._bounds = placement.unit.bounds
        self.dataset_len, self.slot_count = int(bounds[-1]), slots
        self.identity = slots >= self.dataset_len
        count = len(bounds) - 1
        order = np.arange(count)
        if not self.identity:
            if placement.order == "scattered":
                order = np.argsort(order * _spread(count) % count)
            begins = np.cumsum(np.append(0, np.diff(bounds)[order]))
            shift = placement.node * slots % self.dataset_len
            order = np.roll(order, 1 - np.searchsorted(begins, shift, side="right"))
        sizes = np.diff(bounds)[order]
        ends = np.cumsum(sizes)
        self._resident = np.zeros(count, bool)
        self._resident[order] = ends <= slots
        self._base = np.empty(count, np.int64)  # the slot of each unit's first sample, less the sample
        self._base[order] = ends - sizes - bounds[order]

    def slot(self, idx: int) -> int:
        """Return the slot of a sample known to be resident."""
        idx = operator.index(idx)
        return idx + int(self._base[self._unit(idx)])

    def slots(self, indices: Tensor) -> Tensor:
        """Return the slots of samples known to be resident, an int64 tensor as ``indices``."""
        return indices + torch.from_numpy(self._base[self._unit(indices.numpy())])

    def resident(self, indices: Tensor) -> Tensor:
        """Return which samples of an int64 tensor are resident, as a bool tensor."""
        return torch.from_numpy(self._resident[self._unit(indices.numpy())])

    def _unit(self, idx: Any) -> Any:
        return np.searchsorted(self._bounds, idx, side="right") - 1


def _spread(n: int) -> int:
    """Return the number nearest above n / golden ratio that is coprime to n; 1 for the smallest n."""
    a = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(a, n) > 1:
        a += 1
    return a % n if n > 1 else 1
