"""Decide which samples each step of an epoch has, and which rank loads each: pure arithmetic, the same on all machines.

NOTE [ Assigning samples ]
    At each step all ranks together train on one *global batch*. The sum of gradients over it does not depend on which rank
    computes which part, so a sample may go to the node that has it cached. Each of P nodes has its own part of the samples
    (NOTE [ Ordering ]), and loads b samples in a step. A random batch has b samples of a node's part on average, with a
    standard deviation of sqrt(b (1 - 1/P)). A node with more than b hands its surplus to nodes with fewer: on average a share
    of sqrt((1 - 1/P) / (2 pi b)) of all samples, half the mean deviation. It hands over the last samples of its part, which its
    cache is least likely to hold.

    A stratified epoch has no surplus. Each step takes equally many samples from the part of each node, and within each part
    equally many that are cached (give or take one). So no rank has to wait for another that has more to read. This changes the
    order from a full shuffle: it is random within each *stratum* (of one part, the cached samples or the others), and each
    sample comes once in an epoch. A rank computes only its own samples, for any number of nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stocache.cache.placement import Ordering
from stocache.loader.samplers.permutation import MAX_LISTED, Indices, Permutation


def assign_ranks(positions: Indices, bounds: Indices, per_node: int) -> Indices:
    """Return the rank that loads each sample of some global batches.

    Args:
        positions: the positions of the samples in the ordering, of shape (steps, samples in a global batch).
        bounds: of the parts of the nodes, as in `Ordering`.
        per_node: ranks of each node.

    Every rank gets equally many samples. The ranks of a node share evenly the samples that its cache is likely to hold.
    """
    steps, width = positions.shape
    nodes = len(bounds) - 1
    room = width // nodes
    in_order = np.argsort(positions, axis=1)
    node = np.searchsorted(bounds, np.take_along_axis(positions, in_order, axis=1), side="right") - 1
    counts = np.bincount((np.arange(steps)[:, None] * nodes + node).ravel(), minlength=steps * nodes).reshape(steps, nodes)
    rank_in_node = np.arange(width) - np.take_along_axis(np.cumsum(counts, axis=1) - counts, node, axis=1)
    surplus = rank_in_node >= room
    _, node[surplus], rank_in_node[surplus] = np.nonzero(np.arange(room) >= counts[:, :, None])  # where there is room
    ranks = np.empty_like(node)
    np.put_along_axis(ranks, in_order, node * per_node + rank_in_node % per_node, axis=1)
    return ranks


@dataclass(frozen=True)
class EpochShape:
    """The size of an epoch of all ranks together, and the numbers that determine its order.

    Attributes:
        samples: in the dataset.
        world_size: number of ranks.
        batch_size: samples of each rank at a step.
        each: samples of each rank in the epoch. As in torch's DistributedSampler, all samples are padded with some of them to
            equal numbers, or the last ones are left out.
        seed, epoch: determine the order.
    """

    samples: int
    world_size: int
    batch_size: int
    each: int
    seed: int
    epoch: int

    @property
    def steps(self) -> int:
        """Number of steps in the epoch."""
        return -(-self.each // self.batch_size)


def torch_order(samples: int, seed: int, shuffle: bool) -> Callable[[Indices], Indices]:
    """Return a function that returns the samples at places of the order that torch's DistributedSampler has."""
    if not shuffle:
        return np.asarray
    order: Indices = torch.randperm(samples, generator=torch.Generator().manual_seed(seed), device="cpu").numpy()
    return order.__getitem__


class ShuffledEpoch:
    """An epoch in the order of torch's DistributedSampler; above 2^24 samples in an order that takes no memory."""

    def __init__(self, shape: EpochShape, shuffle: bool) -> None:
        self._shape = shape
        self._at = torch_order(shape.samples, shape.seed + shape.epoch, shuffle and shape.samples <= MAX_LISTED)
        if shuffle and shape.samples > MAX_LISTED:
            self._at = Permutation(shape.samples, shape.seed, shape.epoch).at

    def batches(self, begin: int, end: int) -> Indices:
        """Return the global batches of steps ``begin`` to ``end - 1``, one after the other."""
        shape = self._shape
        first, last = (min(step * shape.batch_size, shape.each) * shape.world_size for step in (begin, end))
        return self._at(np.arange(first, last) % shape.samples)


@dataclass(frozen=True)
class StrataLayout:
    """The machines that a stratified epoch is made for: ``nodes`` with ``per_node`` ranks each, and ``slots`` in each cache."""

    nodes: int
    per_node: int
    slots: int


class StratifiedEpoch:
    """A stratified epoch; see NOTE [ Assigning samples ].

    Each node goes through one stretch of the ordering, whose first samples its cache holds. All stretches have the same length.
    When the number of samples does not fit that, a few samples come twice or are left out: others in each epoch.
    """

    def __init__(self, shape: EpochShape, layout: StrataLayout, ordering: Ordering) -> None:
        self._shape, self._layout, self._ordering = shape, layout, ordering
        self._length = shape.each * layout.per_node
        self._surplus = shape.samples - shape.each * shape.world_size
        self._cut = int(np.random.SeedSequence((shape.seed, shape.epoch)).generate_state(1, np.uint64)[0] % shape.samples)

    def batches(self, begin: int, end: int) -> Indices:
        """Return the global batches of steps ``begin`` to ``end - 1``, one after the other."""
        ranks = range(self._shape.world_size)
        return np.concatenate([self.of_rank(rank, step, step + 1) for step in range(begin, end) for rank in ranks])

    def of_rank(self, rank: int, begin: int, end: int) -> Indices:
        """Return the samples of one rank at steps ``begin`` to ``end - 1``."""
        shape, per_node = self._shape, self._layout.per_node
        node, local = divmod(rank, per_node)
        start = node * self._length
        head = int(self._ordering.bounds[node])
        head_end = min(head + self._ordering.head(node, self._layout.slots) - max(0, self._surplus), start + self._length)
        head = max(head, start)
        each_cached = max(0, head_end - head) // per_node

        steps, columns = np.arange(begin, end + 1), np.arange(shape.batch_size)
        done = np.minimum(steps * shape.batch_size, shape.each)  # by a rank before each step
        done_from_cache = done * each_cached // shape.each
        size, hits = np.diff(done), np.diff(done_from_cache)
        within = self._mix_batch(rank)[(steps[:-1, None] + columns) % shape.batch_size]
        within[size < shape.batch_size] = columns  # only the last step has fewer; the rest of it is cut off below
        hit = within < hits[:, None]
        first_hit = per_node * done_from_cache[:-1] + local * hits
        first_other = per_node * (done - done_from_cache)[:-1] + local * (size - hits)
        turn = within + np.where(hit, first_hit[:, None], (first_other - hits)[:, None])
        hit, turn = (full.ravel()[: done[-1] - done[0]] for full in (hit, turn))
        cached = per_node * each_cached
        places = np.empty_like(turn)
        places[hit] = head + self._permutation(cached, node, 0).at(turn[hit])
        others = start + self._permutation(self._length - cached, node, 1).at(turn[~hit])
        places[~hit] = others + (others >= head) * cached
        return self._samples_at(places)

    def _mix_batch(self, rank: int) -> Indices:
        """Return the places in a batch in random order; without it, cached samples would always come first."""
        size = self._shape.batch_size
        return Permutation(size, self._shape.seed, self._shape.epoch, rank).at(np.arange(size))

    def _permutation(self, n: int, node: int, stratum: int) -> Permutation:
        return Permutation(n, self._shape.seed, self._shape.epoch, node, stratum)

    def _samples_at(self, places: Indices) -> Indices:
        """Return the samples at places. Places count over all stretches; there may be more of them than samples, or fewer."""
        samples = self._shape.samples
        if self._surplus < 0:
            positions = np.where(places < samples, places, (self._cut + places) % samples)
        else:
            positions = places + (places >= self._cut) * self._surplus
        found: Indices = self._ordering.samples(positions)
        return found
