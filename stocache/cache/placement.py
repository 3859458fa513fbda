"""Which samples are resident, and in which slot: pure arithmetic, the same in every process without a table or a message.

Under per-epoch shuffling every sample is read once an epoch, so no policy serves more than never evicting; what remains to
choose is *which* share is kept. `Placement` is that choice, `Ordering` the choice applied to one dataset, and `Residency`
to one cache for it.

NOTE [ Ordering ]
    A placement puts the samples of a dataset into a line, unit by unit, and parts the line evenly among the nodes. A node's
    cache keeps what stands at the beginning of that node's part, as far as it goes. One that goes further than the part begins
    earlier instead, and ends where the part ends. So the caches of P nodes add up, whatever each of them holds. And of any two
    samples of a part, the one that stands further ahead is the one its node is more likely to have, and the one that stands
    further behind the one the next node is more likely to have as well: all nodes know that, without knowing how large the
    caches of the others are.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stocache.errors import LimitError
from stocache.system.deprecation import warn_renamed
from stocache.system.hashing import checksum
from stocache.system.ranks import ranks_here


class BlockBounds:
    """Units of varying numbers of samples, for `Placement`: unit u is the samples ``bounds[u]`` to ``bounds[u + 1] - 1``.

    Raises:
        LimitError: the bounds do not ascend from 0.
    """

    def __init__(self, bounds: Any) -> None:
        self.bounds = np.asarray(bounds, dtype=np.int64)
        if not (self.bounds.ndim == 1 and len(self.bounds) and self.bounds[0] == 0 and (np.diff(self.bounds) > 0).all()):
            raise LimitError(f"bounds of units must ascend from 0, got {self.bounds.tolist()!r:.100}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockBounds) and np.array_equal(self.bounds, other.bounds)

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
        unit: samples are admitted in whole blocks of this many, or of these `BlockBounds`, for data that is read by the block.
        node, nodes: this machine's number among ``nodes``; each has a part of its own, so that the caches add up.

    Raises:
        LimitError: an unknown order, a unit or number of nodes below 1, or a node outside ``[0, nodes)``.
    """

    order: Literal["prefix", "scattered"] = "prefix"
    unit: int | BlockBounds = 1
    node: int = 0
    nodes: int = 1

    @classmethod
    def from_env(cls, order: Literal["prefix", "scattered"] = "scattered", unit: int | BlockBounds = 1) -> "Placement":
        """Return the placement of this machine among those of a distributed training, as torchrun or Slurm say."""
        ranks = ranks_here()
        return cls(order, unit, ranks.node, ranks.nodes)

    @classmethod
    def here(cls, order: Literal["prefix", "scattered"] = "scattered", unit: int | BlockBounds = 1) -> "Placement":
        """Deprecated: use `from_env`."""
        warn_renamed("Placement.here", "Placement.from_env")
        return cls.from_env(order, unit)

    def __post_init__(self) -> None:
        if self.order not in ("prefix", "scattered"):
            raise LimitError(f"placement {self.order!r} is unknown. Use 'prefix' or 'scattered'.")
        if (isinstance(self.unit, int) and self.unit < 1) or self.nodes < 1 or not 0 <= self.node < self.nodes:
            raise LimitError(
                f"placement needs unit >= 1, nodes >= 1 and 0 <= node < nodes, got unit={self.unit}, "
                f"node={self.node}, nodes={self.nodes}."
            )


def ordering_of(placement: Placement, dataset_len: int) -> "Ordering | BlockOrdering":
    """Return a placement applied to ``dataset_len`` samples.

    Raises:
        LimitError: its units are of another number of samples, or too many.
    """
    if isinstance(placement.unit, int):
        return Ordering(placement, dataset_len)
    if placement.unit.bounds[-1] != dataset_len:
        raise LimitError(f"the placement has units of {placement.unit.bounds[-1]} samples, the dataset has {dataset_len}.")
    return BlockOrdering(placement)


class Ordering:
    """The samples of a dataset in line; see NOTE [ Ordering ].

    Blocks of ``unit`` samples are permuted (scattered: block b goes to place a·b mod F, a coprime to F next to F/golden ratio,
    so that any stretch of places is evenly spread over the blocks: the three-distance theorem). A last block that is not full
    keeps the last place, so that there are no gaps.

    Attributes:
        bounds: an array of nodes + 1 positions: node p has those from ``bounds[p]`` to ``bounds[p + 1] - 1``.
    """

    def __init__(self, placement: Placement, dataset_len: int) -> None:
        assert isinstance(placement.unit, int)  # else see UnitLine
        self.unit, self.full, self.blocks = placement.unit, dataset_len // placement.unit, -(-dataset_len // placement.unit)
        self.factor = _spread(self.full) if placement.order == "scattered" else 1
        self._inverse = pow(self.factor, -1, self.full) if self.full > 1 else 1
        if max(self.factor, self._inverse) * self.full >= 2**63:
            raise LimitError(f"scattered placement of {self.full} blocks exceeds 64-bit arithmetic. Raise unit.")
        self._parts = np.array([node * self.blocks // placement.nodes for node in range(placement.nodes + 1)])
        self.bounds = np.minimum(self._parts * self.unit, dataset_len)

    def positions(self, indices: Any) -> Any:
        """Return where samples stand, for an int64 array or tensor of their numbers."""
        return self.places(indices // self.unit) * self.unit + indices % self.unit

    def samples(self, positions: Any) -> Any:
        """Return the numbers of the samples that stand at these positions, an int64 array or tensor as they are."""
        return self._times(positions // self.unit, self._inverse) * self.unit + positions % self.unit

    def places(self, blocks: Any) -> Any:
        """Return the places of blocks, of an int64 array or tensor."""
        return blocks if self.factor == 1 else self._times(blocks, self.factor)

    def _times(self, blocks: Any, factor: int) -> Any:
        return blocks * factor % max(1, self.full) + (blocks >= self.full) * self.full

    def head(self, node: int, slots: int) -> int:
        """Return how many samples at the beginning of a node's part a cache of so many slots holds."""
        first, last = self.bounds[node : node + 2].tolist()
        return int(min(last - first, slots // self.unit * self.unit))

    def begin(self, node: int, resident: int) -> int:
        """Return the place at which the cache of a node begins, which keeps so many blocks."""
        first, last = self._parts[node : node + 2].tolist()
        return int(first if resident <= last - first else (last - resident) % self.blocks)


class BlockOrdering:
    """As `Ordering`, of units of varying size, with a table of them in place of arithmetic.

    Attributes:
        bounds: as of `Ordering`; where units begin.
        unit_bounds: the samples with which the units begin, and how many samples there are.
        order: the units in line.
        begins: the positions at which they begin, and where the last one ends.
    """

    def __init__(self, placement: Placement) -> None:
        assert isinstance(placement.unit, BlockBounds)  # else see Line
        bounds = self.unit_bounds = placement.unit.bounds
        count = len(bounds) - 1
        self.order = np.arange(count)
        if placement.order == "scattered":
            self.order = np.argsort(self.order * _spread(count) % count)
        self.begins = np.append(0, np.cumsum(np.diff(bounds)[self.order]))
        self._gaps = np.empty(count, np.int64)  # from the number of a sample to its position, by units
        self._gaps[self.order] = self.begins[:-1] - bounds[self.order]
        ideal = np.array([node * int(bounds[-1]) // placement.nodes for node in range(placement.nodes + 1)])
        self.bounds = self.begins[np.searchsorted(self.begins, ideal, side="right") - 1]

    def positions(self, indices: Any) -> Any:
        """Return where samples stand, for an int64 array of their numbers."""
        return indices + self._gaps[self.unit_of(indices)]

    def samples(self, positions: Any) -> Any:
        """Return the numbers of the samples that stand at these positions, an int64 array."""
        return positions - self._gaps[self.order[np.searchsorted(self.begins, positions, side="right") - 1]]

    def unit_of(self, indices: Any) -> Any:
        """Return the unit of a sample, or of an array of them."""
        return np.searchsorted(self.unit_bounds, indices, side="right") - 1

    def head(self, node: int, slots: int) -> int:
        """Return how many samples at the beginning of a node's part a cache of so many slots holds."""
        first, last = self.bounds[node : node + 2].tolist()
        whole = int(self.begins[np.searchsorted(self.begins, first + slots, side="right") - 1])
        return int(min(last, whole) - first)

    def begin(self, node: int, slots: int) -> int:
        """Return the place at which the cache of a node begins, which has so many slots."""
        first, last = self.bounds[node : node + 2].tolist()
        slots = min(slots, int(self.begins[-1]))
        position = first if slots <= last - first else (last - slots) % int(self.begins[-1])
        return int(np.searchsorted(self.begins[:-1], position)) % max(1, len(self.order))


def residency(placement: Placement, dataset_len: int, slots: int) -> "Residency | BlockResidency":
    """Return a placement applied to ``dataset_len`` samples, of which up to ``slots`` are to be resident.

    Raises:
        LimitError: its units are of another number of samples, or too many.
    """
    if slots >= dataset_len:  # every sample has the slot of its number
        placement = Placement("prefix", placement.unit)
    ordering = ordering_of(placement, dataset_len)
    if isinstance(ordering, Ordering):
        return Residency(ordering, placement.node, dataset_len, slots)
    return BlockResidency(ordering, placement.node, dataset_len, slots)


class Residency:
    """A line of which up to ``slots`` samples are resident: the blocks from a node's place on."""

    def __init__(self, ordering: Ordering, node: int, dataset_len: int, slots: int) -> None:
        self.dataset_len, self.slot_count, self._ordering = dataset_len, slots, ordering
        self._unit, self._full, self._factor, self._blocks = ordering.unit, ordering.full, ordering.factor, ordering.blocks
        self._resident = self._blocks if slots >= dataset_len else slots // self._unit
        self._shift = ordering.begin(node, self._resident)
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
        block, offset = self._ordering.places(indices // self._unit), indices % self._unit
        if self._shift:
            block = (block - self._shift) % self._blocks
        return block, offset


class BlockResidency:
    """As `Residency`, of units of varying size: those from a node's place on, as long as they fit."""

    def __init__(self, ordering: BlockOrdering, node: int, dataset_len: int, slots: int) -> None:
        self.dataset_len, self.slot_count, self._unit_of = dataset_len, slots, ordering.unit_of
        self.identity = slots >= dataset_len
        begin = ordering.begin(node, slots)
        order, sizes = np.roll(ordering.order, -begin), np.roll(np.diff(ordering.begins), -begin)
        ends = np.cumsum(sizes)
        self._resident = np.zeros(len(order), bool)
        self._resident[order] = ends <= slots
        self._base = np.empty(len(order), np.int64)  # the slot of each unit's first sample, less the sample
        self._base[order] = ends - sizes - ordering.unit_bounds[order]

    def slot(self, idx: int) -> int:
        """Return the slot of a sample known to be resident."""
        idx = operator.index(idx)
        return idx + int(self._base[self._unit_of(idx)])

    def slots(self, indices: Tensor) -> Tensor:
        """Return the slots of samples known to be resident, an int64 tensor as ``indices``."""
        return indices + torch.from_numpy(self._base[self._unit_of(indices.numpy())])

    def resident(self, indices: Tensor) -> Tensor:
        """Return which samples of an int64 tensor are resident, as a bool tensor."""
        return torch.from_numpy(self._resident[self._unit_of(indices.numpy())])


def _spread(n: int) -> int:
    """Return the number nearest above n / golden ratio that is coprime to n; 1 for the smallest n."""
    a = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(a, n) > 1:
        a += 1
    return a % n if n > 1 else 1
