"""Compute which samples are resident, and in which slot: by arithmetic that is the same in every process, without messages.

With a new order in each epoch every sample is read once an epoch, so no policy serves more than never evicting. The only choice
left is *which* samples are kept. `Placement` is that choice, `Ordering` applies it to a dataset, and `Residency` to a cache.

NOTE [ Ordering ]
    A placement orders the samples of a dataset, block by block, and divides the ordering evenly among the nodes. The cache of a
    node keeps the samples at the beginning of its part, as many as it has slots. A cache that is larger than the part begins
    earlier instead, and ends where the part ends. So the caches of P nodes overlap only where one is larger than its part. Of
    two samples of a part, the node is more likely to have the first, and the next node is more likely to have the second as
    well. All nodes know that, without knowing how large the caches of the others are.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stocache.errors import LimitError
from stocache.system.hashing import checksum
from stocache.system.ranks import ranks_here


class BlockBounds:
    """Blocks of varying numbers of samples, for `Placement`: block b has the samples ``bounds[b]`` to ``bounds[b + 1] - 1``.

    Raises:
        LimitError: the bounds do not ascend from 0.
    """

    def __init__(self, bounds: Any) -> None:
        self.bounds = np.asarray(bounds, dtype=np.int64)
        if not (self.bounds.ndim == 1 and len(self.bounds) and self.bounds[0] == 0 and (np.diff(self.bounds) > 0).all()):
            raise LimitError(f"bounds of blocks must ascend from 0, got {self.bounds.tolist()!r:.100}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockBounds) and np.array_equal(self.bounds, other.bounds)

    def __hash__(self) -> int:
        return hash(self.bounds.tobytes())

    def __repr__(self) -> str:  # part of the identity of a named cache, so it must not change
        return f"Units({len(self.bounds) - 1} of {self.bounds[-1]} samples, {checksum(self.bounds.tobytes())})"


@dataclass(frozen=True)
class Placement:
    """The choice of the resident samples.

    Attributes:
        order: "prefix" keeps the first samples, and slot = index, as stocaching does. "scattered" spreads the resident samples
            evenly over all indices, so that every class and every range of the data has its share.
        unit: samples in a block; or the `BlockBounds` of blocks of varying size. Whole blocks are kept: for data that is read
            by the block.
        node, nodes: number of this machine, and of all machines. Each machine has its own part: their caches are disjoint.

    Raises:
        LimitError: the order is unknown, ``unit`` or ``nodes`` is below 1, or ``node`` is outside ``[0, nodes)``.

    Examples:
        >>> for node in range(2):
        ...     placement = Placement("scattered", node=node, nodes=2)
        ...     with SharedCache("20KB", dataset_len=8, data_dims=(4000,), placement=placement) as cache:
        ...         for idx in range(8):
        ...             cache.set_slot(idx, torch.zeros(4000, dtype=torch.uint8))
        ...         print([idx for idx in range(8) if cache.get_slot(idx) is not None])
        [0, 2, 5, 7]
        [1, 3, 4, 6]
    """

    order: Literal["prefix", "scattered"] = "prefix"
    unit: int | BlockBounds = 1
    node: int = 0
    nodes: int = 1

    @classmethod
    def from_env(cls, order: Literal["prefix", "scattered"] = "scattered", unit: int | BlockBounds = 1) -> "Placement":
        """Return the placement of this machine in a distributed training, from the environment of torchrun or Slurm."""
        ranks = ranks_here()
        return cls(order, unit, ranks.node, ranks.nodes)

    def __post_init__(self) -> None:
        if self.order not in ("prefix", "scattered"):
            raise LimitError(f"placement {self.order!r} is unknown. Use 'prefix' or 'scattered'.")
        if (isinstance(self.unit, int) and self.unit < 1) or self.nodes < 1 or not 0 <= self.node < self.nodes:
            raise LimitError(
                f"placement needs unit >= 1, nodes >= 1 and 0 <= node < nodes, got unit={self.unit}, "
                f"node={self.node}, nodes={self.nodes}."
            )


def ordering_of(placement: Placement, dataset_len: int) -> "Ordering | BlockOrdering":
    """Return the ordering of ``dataset_len`` samples by a placement.

    Raises:
        LimitError: its blocks have another number of samples, or are too many.
    """
    if isinstance(placement.unit, int):
        return Ordering(placement, dataset_len)
    if placement.unit.bounds[-1] != dataset_len:
        raise LimitError(
            f"the placement has blocks of {placement.unit.bounds[-1]} samples in all, the dataset has {dataset_len}."
        )
    return BlockOrdering(placement)


class Ordering:
    """The order of the samples of a dataset, in blocks of ``unit`` samples; see NOTE [ Ordering ].

    If scattered, block b of F full blocks goes to place a·b mod F. The number a is next to F / golden ratio and coprime to F:
    any range of places is then evenly spread over the blocks (three-distance theorem). A last block that is not full keeps the
    last place, so that there are no gaps.

    Attributes:
        bounds: an array of nodes + 1 positions: node p has the positions ``bounds[p]`` to ``bounds[p + 1] - 1``.
    """

    def __init__(self, placement: Placement, dataset_len: int) -> None:
        assert isinstance(placement.unit, int)  # else see BlockOrdering
        self.unit, self.full, self.blocks = placement.unit, dataset_len // placement.unit, -(-dataset_len // placement.unit)
        self.factor = _spread(self.full) if placement.order == "scattered" else 1
        self._inverse = pow(self.factor, -1, self.full) if self.full > 1 else 1
        if max(self.factor, self._inverse) * self.full >= 2**63:
            raise LimitError(f"scattered placement of {self.full} blocks exceeds 64-bit arithmetic. Raise unit.")
        self._parts = np.array([node * self.blocks // placement.nodes for node in range(placement.nodes + 1)])
        self.bounds = np.minimum(self._parts * self.unit, dataset_len)

    def positions(self, indices: Any) -> Any:
        """Return the positions of samples, an int64 array or tensor of indices."""
        return self.places(indices // self.unit) * self.unit + indices % self.unit

    def samples(self, positions: Any) -> Any:
        """Return the indices of the samples at ``positions``, an int64 array or tensor."""
        return self._times(positions // self.unit, self._inverse) * self.unit + positions % self.unit

    def places(self, blocks: Any) -> Any:
        """Return the places of blocks, an int64 array or tensor of block numbers."""
        return blocks if self.factor == 1 else self._times(blocks, self.factor)

    def _times(self, blocks: Any, factor: int) -> Any:
        return blocks * factor % max(1, self.full) + (blocks >= self.full) * self.full

    def head(self, node: int, slots: int) -> int:
        """Return how many samples at the beginning of a node's part are in a cache with ``slots`` slots."""
        first, last = self.bounds[node : node + 2].tolist()
        return int(min(last - first, slots // self.unit * self.unit))

    def begin(self, node: int, resident: int) -> int:
        """Return the place at which the cache of a node begins that keeps ``resident`` blocks."""
        first, last = self._parts[node : node + 2].tolist()
        return int(first if resident <= last - first else (last - resident) % self.blocks)


class BlockOrdering:
    """An `Ordering` of blocks of varying size: a table of blocks takes the place of arithmetic.

    Attributes:
        bounds: as in `Ordering`. They are beginnings of blocks.
        block_bounds: the index of the first sample of each block, and the number of samples.
        order: the blocks in their order.
        begins: the position of the first sample of each block in that order, and the number of samples.
    """

    def __init__(self, placement: Placement) -> None:
        assert isinstance(placement.unit, BlockBounds)  # else see Ordering
        bounds = self.block_bounds = placement.unit.bounds
        count = len(bounds) - 1
        self.order = np.arange(count)
        if placement.order == "scattered":
            self.order = np.argsort(self.order * _spread(count) % count)
        self.begins = np.append(0, np.cumsum(np.diff(bounds)[self.order]))
        self._gaps = np.empty(count, np.int64)  # by block: position less index of its samples
        self._gaps[self.order] = self.begins[:-1] - bounds[self.order]
        ideal = np.array([node * int(bounds[-1]) // placement.nodes for node in range(placement.nodes + 1)])
        self.bounds = self.begins[np.searchsorted(self.begins, ideal, side="right") - 1]

    def positions(self, indices: Any) -> Any:
        """Return the positions of samples, an int64 array of indices."""
        return indices + self._gaps[self.block_of(indices)]

    def samples(self, positions: Any) -> Any:
        """Return the indices of the samples at ``positions``, an int64 array."""
        return positions - self._gaps[self.order[np.searchsorted(self.begins, positions, side="right") - 1]]

    def block_of(self, indices: Any) -> Any:
        """Return the block of a sample, or of an array of samples."""
        return np.searchsorted(self.block_bounds, indices, side="right") - 1

    def head(self, node: int, slots: int) -> int:
        """Return how many samples at the beginning of a node's part are in a cache with ``slots`` slots."""
        first, last = self.bounds[node : node + 2].tolist()
        whole = int(self.begins[np.searchsorted(self.begins, first + slots, side="right") - 1])
        return int(min(last, whole) - first)

    def begin(self, node: int, slots: int) -> int:
        """Return the place at which the cache of a node begins that has ``slots`` slots."""
        first, last = self.bounds[node : node + 2].tolist()
        slots = min(slots, int(self.begins[-1]))
        position = first if slots <= last - first else (last - slots) % int(self.begins[-1])
        return int(np.searchsorted(self.begins[:-1], position)) % max(1, len(self.order))


def residency(placement: Placement, dataset_len: int, slots: int) -> "Residency | BlockResidency":
    """Return which of ``dataset_len`` samples are resident in ``slots`` slots, and in which slot, by a placement.

    Raises:
        LimitError: its blocks have another number of samples, or are too many.
    """
    if slots >= dataset_len:  # slot = index
        placement = Placement("prefix", placement.unit)
    ordering = ordering_of(placement, dataset_len)
    if isinstance(ordering, Ordering):
        return Residency(ordering, placement.node, dataset_len, slots)
    return BlockResidency(ordering, placement.node, dataset_len, slots)


class Residency:
    """The resident samples of an ordering: up to ``slots`` samples, whole blocks, from a node's place on."""

    def __init__(self, ordering: Ordering, node: int, dataset_len: int, slots: int) -> None:
        self.dataset_len, self.slot_count, self._ordering = dataset_len, slots, ordering
        self._unit, self._full, self._factor, self._blocks = ordering.unit, ordering.full, ordering.factor, ordering.blocks
        self._resident = self._blocks if slots >= dataset_len else slots // self._unit
        self._shift = ordering.begin(node, self._resident)
        self.identity = self._factor == 1 and self._shift == 0
        """Whether the slot of a resident sample is its index."""

    def slot(self, idx: int) -> int:
        """Return the slot of a resident sample."""
        block, offset = divmod(operator.index(idx), self._unit)
        if block < self._full:
            block = block * self._factor % self._full
        return (block - self._shift) % self._blocks * self._unit + offset

    def slots(self, indices: Any) -> Any:
        """Return the slots of resident samples. Both are int64 arrays or tensors."""
        if self.identity:
            return indices
        block, offset = self._positions(indices)
        return block * self._unit + offset

    def resident(self, indices: Any) -> Any:
        """Return which samples of an int64 tensor or array are resident, as bools."""
        return self._positions(indices)[0] < self._resident

    def _positions(self, indices: Any) -> tuple[Any, Any]:
        block, offset = self._ordering.places(indices // self._unit), indices % self._unit
        if self._shift:
            block = (block - self._shift) % self._blocks
        return block, offset


class BlockResidency:
    """A `Residency` of blocks of varying size: the blocks from a node's place on, as long as they fit."""

    def __init__(self, ordering: BlockOrdering, node: int, dataset_len: int, slots: int) -> None:
        self.dataset_len, self.slot_count, self._block_of = dataset_len, slots, ordering.block_of
        self.identity = slots >= dataset_len
        begin = ordering.begin(node, slots)
        order, sizes = np.roll(ordering.order, -begin), np.roll(np.diff(ordering.begins), -begin)
        ends = np.cumsum(sizes)
        self._resident = np.zeros(len(order), bool)
        self._resident[order] = ends <= slots
        self._base = np.empty(len(order), np.int64)  # by block: slot less index of its samples
        self._base[order] = ends - sizes - ordering.block_bounds[order]

    def slot(self, idx: int) -> int:
        """Return the slot of a resident sample."""
        idx = operator.index(idx)
        return idx + int(self._base[self._block_of(idx)])

    def slots(self, indices: Any) -> Any:
        """Return the slots of resident samples. Both are int64 arrays or tensors."""
        gaps = self._base[self._block_of(np.asarray(indices))]
        return indices + (torch.from_numpy(gaps) if isinstance(indices, Tensor) else gaps)

    def resident(self, indices: Any) -> Any:
        """Return which samples of an int64 tensor or array are resident, as a bool tensor."""
        return torch.from_numpy(self._resident[self._block_of(np.asarray(indices))])


def _spread(n: int) -> int:
    """Return the number nearest above n / golden ratio that is coprime to n; 1 for the smallest n."""
    a = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(a, n) > 1:
        a += 1
    return a % n if n > 1 else 1
