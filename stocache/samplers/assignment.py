"""Which samples the steps of an epoch consist of, and which rank gets which of them: pure arithmetic, the same on all machines.

NOTE [ Sharing out ]
    At each step all ranks together train on one *global batch*. The sum of gradients over it does not depend on who computes
    which part, so its samples may go where they are cached. Each of P nodes has its own part of the line (NOTE [ Ordering ])
    and b of the samples of a step to load. Of a random batch, a node's own number b on the average, with a standard deviation
    of sqrt(b (1 - 1/P)). What a node has too many of, it gives to those that have too few: on the average a share of
    sqrt((1 - 1/P) / (2 pi b)) of all samples, half the mean deviation. It gives what stands last in its part, which is what
    its cache is least likely to hold.

    An epoch in strata has no such surplus: its steps take as many samples from each node's part, and in each part as many of
    those that the cache holds, up to one, so that no rank ever waits for an unlucky one. For that the order is another one than
    a full shuffle: the order within each stratum is random, and each sample comes once in an epoch. A rank computes its own
    samples only, whatever the number of nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stocache.cache.placement import BlockOrdering, Ordering
from stocache.samplers.permutation import LISTED, Numbers, Permutation


def share_out(positions: Numbers, bounds: Numbers, per_node: int) -> Numbers:
    """Return the ranks that get the samples of global batches.

    Args:
        positions: where the samples stand in line, of shape (steps, samples in a global batch).
        bounds: of the parts of the nodes, as of a `Ordering`.
        per_node: ranks of each node.

    Every rank gets as many; those of a node share evenly what its cache is likely to hold.
    """
    steps, width = positions.shape
    nodes = len(bounds) - 1
    room = width // nodes
    in_line = np.argsort(positions, axis=1)
    node = np.searchsorted(bounds, np.take_along_axis(positions, in_line, axis=1), side="right") - 1
    counts = np.bincount((np.arange(steps)[:, None] * nodes + node).ravel(), minlength=steps * nodes).reshape(steps, nodes)
    ahead = np.arange(width) - np.take_along_axis(np.cumsum(counts, axis=1) - counts, node, axis=1)  # of it in the node's part
    surplus = ahead >= room
    _, node[surplus], ahead[surplus] = np.nonzero(np.arange(room) >= counts[:, :, None])  # where there is room
    ranks = np.empty_like(node)
    np.put_along_axis(ranks, in_line, node * per_node + ahead % per_node, axis=1)
    return ranks


@dataclass(frozen=True)
class EpochShape:
    """What all ranks together go through in one epoch.

    Attributes:
        samples: in the dataset.
        world_size: ranks.
        batch_size: samples of each rank at a step.
        each: samples of each rank in the epoch, as torch's DistributedSampler has them: all samples, padded with some of them
            to equal numbers, or less the last ones.
        seed, epoch: what the order depends on.
    """

    samples: int
    world_size: int
    batch_size: int
    each: int
    seed: int
    epoch: int

    @property
    def steps(self) -> int:
        """Return how many steps it has."""
        return -(-self.each // self.batch_size)


class Shuffled:
    """An epoch in the order of torch's DistributedSampler; above 2^24 samples in one that takes no memory."""

    def __init__(self, epoch: EpochShape, shuffle: bool) -> None:
        self._epoch = epoch
        self._at: Callable[[Numbers], Numbers] = np.asarray
        if shuffle and epoch.samples > LISTED:
            self._at = Permutation(epoch.samples, epoch.seed, epoch.epoch).at
        elif shuffle:
            generator = torch.Generator().manual_seed(epoch.seed + epoch.epoch)
            self._at = torch.randperm(epoch.samples, generator=generator).numpy().__getitem__

    def batches(self, begin: int, end: int) -> Numbers:
        """Return the global batches of these steps, one after the other."""
        facts = self._epoch
        first, last = (min(step * facts.batch_size, facts.each) * facts.world_size for step in (begin, end))
        return self._at(np.arange(first, last) % facts.samples)


@dataclass(frozen=True)
class StrataLayout:
    """What the strata of an epoch are made for: ``nodes`` with ``per_node`` ranks each, and caches of so many ``slots``."""

    nodes: int
    per_node: int
    slots: int


class Stratified:
    """An epoch in strata; see NOTE [ Sharing out ].

    Each node goes through one stretch of the line, of which its cache holds the first samples; all stretches are of one length.
    As there are not as many samples as that takes, a few come twice, or are passed over: others in each epoch.
    """

    def __init__(self, epoch: EpochShape, layout: StrataLayout, line: Ordering | BlockOrdering) -> None:
        self._epoch, self._layout, self._line = epoch, layout, line
        self._length = epoch.each * layout.per_node
        self._surplus = epoch.samples - epoch.each * epoch.world_size
        self._cut = int(np.random.SeedSequence((epoch.seed, epoch.epoch)).generate_state(1, np.uint64)[0] % epoch.samples)

    def batches(self, begin: int, end: int) -> Numbers:
        """Return the global batches of these steps, one after the other."""
        ranks = range(self._epoch.world_size)
        return np.concatenate([self.of_rank(rank, step, step + 1) for step in range(begin, end) for rank in ranks])

    def of_rank(self, rank: int, begin: int, end: int) -> Numbers:
        """Return the samples of one rank at these steps."""
        facts, per_node = self._epoch, self._layout.per_node
        node, local = divmod(rank, per_node)
        start = node * self._length
        head = int(self._line.bounds[node])
        head_end = min(head + self._line.head(node, self._layout.slots) - max(0, self._surplus), start + self._length)
        head = max(head, start)
        each_held = max(0, head_end - head) // per_node

        steps, columns = np.arange(begin, end + 1), np.arange(facts.batch_size)
        had = np.minimum(steps * facts.batch_size, facts.each)  # by a rank before each step
        had_from_cache = had * each_held // facts.each
        size, hits = np.diff(had), np.diff(had_from_cache)
        within = self._mixed(rank)[(steps[:-1, None] + columns) % facts.batch_size]
        within[size < facts.batch_size] = columns  # only the last step of all has less: what is beyond it is cut off below
        hit = within < hits[:, None]
        first_hit = per_node * had_from_cache[:-1] + local * hits
        first_other = per_node * (had - had_from_cache)[:-1] + local * (size - hits)
        turn = within + np.where(hit, first_hit[:, None], (first_other - hits)[:, None])
        hit, turn = (of_all.ravel()[: had[-1] - had[0]] for of_all in (hit, turn))
        in_cache = per_node * each_held
        places = np.empty_like(turn)
        places[hit] = head + self._permutation(in_cache, node, 0).at(turn[hit])
        others = start + self._permutation(self._length - in_cache, node, 1).at(turn[~hit])
        places[~hit] = others + (others >= head) * in_cache
        return self._samples(places)

    def _mixed(self, rank: int) -> Numbers:
        """Return the places in a batch, mixed, or those that were cached would always come first."""
        size = self._epoch.batch_size
        return Permutation(size, self._epoch.seed, self._epoch.epoch, rank).at(np.arange(size))

    def _permutation(self, n: int, node: int, stratum: int) -> Permutation:
        return Permutation(n, self._epoch.seed, self._epoch.epoch, node, stratum)

    def _samples(self, places: Numbers) -> Numbers:
        """Return what stands at places of a line that were just as long as all stretches together."""
        samples = self._epoch.samples
        if self._surplus < 0:
            positions = np.where(places < samples, places, (self._cut + places) % samples)
        else:
            positions = places + (places >= self._cut) * self._surplus
        found: Numbers = self._line.samples(positions)
        return found
