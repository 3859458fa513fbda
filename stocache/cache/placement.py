"""Compute which samples are resident, and in which slot: by arithmetic that is the same in every process, without messages.

With a new order in each epoch every sample is read once an epoch, so no policy serves more than never evicting. The only choice
left is *which* samples are kept. `Placement` is that choice, `Ordering` applies it to a dataset, and `Residency` to a cache.

NOTE [ Ordering ]
    A placement orders the samples of a dataset, block by block, and divides the ordering evenly among the nodes. The cache of a
    node keeps the samples at the beginning of its part, as many as it has slots. A cache that is larger than the part begins
    earlier instead, and ends where the part ends. So the caches of P nodes overlap only if one is larger than its part. Of
    two samples of a part, the node is more likely to have the first, and the next node is more likely to have the second as
    well. All nodes know that, without knowing how large the caches of the others are.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stocache.errors import LimitError
from stocache.system.hashing import checksum
from stocache.system.ranks import ranks_here

_Indices: TypeAlias = NDArray[np.int64]


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


def ordering_of(placement: Placement, dataset_len: int) -> "Ordering":
    """Return the ordering of ``dataset_len`` samples by a placement.

    Raises:
        LimitError: its blocks have a different number of samples, or are too many.
    """
    if isinstance(placement.unit, int):
        return Ordering(placement, dataset_len)
    if placement.unit.bounds[-1] != dataset_len:
        raise LimitError(
            f"the placement has blocks of {placement.unit.bounds[-1]} samples in all, the dataset has {dataset_len}."
        )
    return BlockOrdering(placement, dataset_len)


class Ordering:
    """The order of the samples of a dataset, in blocks of ``unit`` samples; see NOTE [ Ordering ].

    If scattered, block b of F full blocks goes to place a·b mod F. The number a is next to F / golden ratio and coprime to F:
    any range of places is then evenly spread over the blocks (three-distance theorem). A last block that is not full keeps the
    last place, so that there are no gaps.

    Attributes:
        dataset_len: the number of samples.
        in_line: whether the position of each sample is its index.
        bounds: an array of nodes + 1 positions: node p has the positions ``bounds[p]`` to ``bounds[p + 1] - 1``. They are
            beginnings of blocks.
    """

    def __init__(self, placement: Placement, dataset_len: int) -> None:
        self.dataset_len = dataset_len
        self.in_line = not self._arrange(placement.unit, placement.order == "scattered")
        self.bounds = self._floor(np.arange(placement.nodes + 1) * dataset_len // placement.nodes)

    def _arrange(self, unit: Any, scattered: bool) -> bool:
        """Compute the order of the blocks. Return whether it differs from the order of their indices."""
        self._unit: int = unit
        self._full = self.dataset_len // unit
        self._factor = _spread(self._full) if scattered else 1
        self._inverse = pow(self._factor, -1, self._full) if self._full > 1 else 1
        if max(self._factor, self._inverse) * self._full >= 2**63:
            raise LimitError(f"scattered placement of {self._full} blocks exceeds 64-bit arithmetic. Raise unit.")
        return self._factor != 1

    def position(self, begin: int, idx: int) -> int:
        """Return the position of a sample, counted from ``begin`` on and around the end."""
        block, offset = divmod(operator.index(idx), self._unit)
        if block < self._full:
            block = block * self._factor % self._full
        return (block * self._unit + offset - begin) % self.dataset_len

    def positions(self, indices: _Indices, begin: int = 0) -> Any:
        """Return the positions of samples, as `position` does."""
        found = self._moved(indices, self._factor)
        return (found - begin) % self.dataset_len if begin else found

    def samples(self, positions: _Indices) -> Any:
        """Return the indices of the samples at ``positions``."""
        return self._moved(positions, self._inverse)

    def _moved(self, numbers: _Indices, factor: int) -> Any:
        """Multiply the numbers of full blocks by a factor, modulo their count."""
        if factor == 1:
            return numbers
        blocks = numbers // self._unit
        places = blocks * factor % max(1, self._full) + (blocks >= self._full) * self._full
        return places * self._unit + numbers % self._unit

    def _floor(self, positions: Any) -> Any:
        """Return the last beginnings of blocks, or the end of all, that are not behind positions."""
        return np.where(positions < self.dataset_len, positions // self._unit * self._unit, self.dataset_len)

    def _ceil(self, position: int) -> int:
        """Return the first beginning of a block, or the end of all, that is not before a position."""
        return min(-(-position // self._unit) * self._unit, self.dataset_len)

    def head(self, node: int, slots: int) -> int:
        """Return how many samples at the beginning of a node's part are in a cache with ``slots`` slots."""
        first, last = self.bounds[node : node + 2].tolist()
        return int(min(last, self._floor(first + slots)) - first)

    def window(self, node: int, slots: int) -> tuple[int, int]:
        """Return at which position the cache of a node begins that has ``slots`` slots, and how many samples it keeps."""
        if slots >= self.dataset_len:
            return 0, self.dataset_len
        first, last = self.bounds[node : node + 2].tolist()
        if slots <= last - first:
            return first, self.head(node, slots)
        begin = self._ceil((last - slots) % self.dataset_len) % self.dataset_len
        return begin, (last - begin) % self.dataset_len


class BlockOrdering(Ordering):
    """An `Ordering` of blocks of varying size: a table of blocks takes the place of arithmetic."""

    def _arrange(self, unit: Any, scattered: bool) -> bool:
        bounds = self._bounds_of_blocks = unit.bounds
        count = len(bounds) - 1
        self._order = np.arange(count)
        if scattered:
            self._order = np.argsort(self._order * _spread(count) % count)
        self._begins = np.append(0, np.cumsum(np.diff(bounds)[self._order]))  # the position of each block in that order
        self._gaps = np.empty(count, np.int64)  # by block: position less index of its samples
        self._gaps[self._order] = self._begins[:-1] - bounds[self._order]
        return scattered

    def position(self, begin: int, idx: int) -> int:
        """See `Ordering`."""
        idx = operator.index(idx)
        return (idx + int(self._gap_of(idx)) - begin) % self.dataset_len

    def positions(self, indices: _Indices, begin: int = 0) -> Any:
        """See `Ordering`."""
        return (indices + self._gap_of(indices) - begin) % self.dataset_len

    def samples(self, positions: _Indices) -> Any:
        """See `Ordering`."""
        return positions - self._gaps[self._order[np.searchsorted(self._begins, positions, side="right") - 1]]

    def _gap_of(self, indices: Any) -> Any:
        return self._gaps[np.searchsorted(self._bounds_of_blocks, indices, side="right") - 1]

    def _floor(self, positions: Any) -> Any:
        return self._begins[np.searchsorted(self._begins, positions, side="right") - 1]

    def _ceil(self, position: int) -> int:
        return int(self._begins[np.searchsorted(self._begins, position)])


def residency(placement: Placement, dataset_len: int, slots: int) -> "Residency":
    """Return which of ``dataset_len`` samples are resident in ``slots`` slots, and in which slot, by a placement.

    Raises:
        LimitError: its blocks have another number of samples, or are too many.
    """
    if slots >= dataset_len:  # slot = index
        placement = Placement("prefix", placement.unit)
    return Residency(ordering_of(placement, dataset_len), placement.node, slots)


class Residency:
    """The resident samples of an ordering: up to ``slots`` samples, whole blocks, from a node's position on.

    Attributes:
        identity: whether the slot of a resident sample is its index.
        slot: returns the slot of a resident sample.
    """

    slot: Callable[[int], int]

    def __init__(self, ordering: Ordering, node: int, slots: int) -> None:
        self.dataset_len, self.slot_count, self._ordering = ordering.dataset_len, slots, ordering
        self._begin, self._count = ordering.window(node, slots)
        self.identity = ordering.in_line and self._begin == 0
        self.slot = partial(ordering.position, self._begin)

    def slots(self, indices: _Indices) -> _Indices:
        """Return the slots of resident samples."""
        slots: _Indices = indices if self.identity else self._ordering.positions(indices, self._begin)
        return slots

    def resident(self, indices: _Indices) -> NDArray[np.bool_]:
        """Return which samples are resident."""
        resident: NDArray[np.bool_] = self._ordering.positions(indices, self._begin) < self._count
        return resident


def _spread(n: int) -> int:
    """Return the number nearest above n / golden ratio that is coprime to n; 1 for the smallest n."""
    a = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(a, n) > 1:
        a += 1
    return a % n if n > 1 else 1
