"""Train on many machines: each sample goes to a machine whose cache holds it."""

import dataclasses
from collections.abc import Callable, Iterator, Sized
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Subset

from stocache.cache.placement import Placement, ordering_of
from stocache.cache.shared import SharedCache
from stocache.cache.stats import SlotState
from stocache.errors import LimitError, StateError
from stocache.loader.samplers.assignment import EpochShape, ShuffledEpoch, StrataLayout, StratifiedEpoch, assign_ranks
from stocache.loader.samplers.block import ResumableSampler, sampler_form
from stocache.loader.samplers.permutation import Indices
from stocache.system.ranks import ranks_here

_PLANNED = 1 << 16  # samples that are planned together


class LocalityDistributedSampler(ResumableSampler):
    """A DistributedSampler that gives each sample of a global batch to a node that has it cached.

        dataset = CachedDataset(photos, size_limit_gib=64, placement=Placement.from_env())
        sampler = LocalityDistributedSampler(dataset, batch_size=256)
        loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=8)

    At each step all ranks together get the samples that torch's DistributedSampler gives them for this seed and epoch, and each
    rank gets equally many. But a sample goes to a rank of the node that it belongs to (`Placement`). So if the cache of each of
    P nodes holds a share c of the dataset, a share of min(1, P c) comes from caches instead of c, less the surplus that a node
    has at a step: see NOTE [ Assigning samples ] in the source. The ranks of a node share evenly the samples in its cache.

    The ranks exchange no messages: every rank plans each global batch by itself, in about 0.1 us for each of its samples.

    Args:
        dataset: a `CachedDataset` with a placement by nodes, or anything with a length.
        batch_size: samples of each rank at a step, as for its DataLoader.
        placement: None takes the placement of the dataset's cache; for a dataset without a cache, scattered.
        num_nodes, node_rank: number of machines, and of this machine. None takes those of the placement, torchrun or Slurm.
        num_replicas, rank: number of ranks, and of this rank. None takes those of torch.distributed, torchrun or Slurm.
            All nodes have equally many ranks, and the first node has the first ones.
        shuffle: False takes the samples in ascending order.
        seed: the same for all ranks.
        drop_last: True leaves out the last samples, so that all ranks have equally many; else some samples come twice.
        stratify: True takes equally many samples from the part of each node at each step, and gives each rank equally many
            cached samples (give or take one), in memory or on its disk. No rank waits for another that has more to read, and
            only samples that no cache holds are read. The order is still random, with each sample once in an epoch, but not
            the order of torch. A rank plans only its own samples. Needs a `CachedDataset` with samples of one shape, and caches
            of one size on all nodes.

    Raises:
        LimitError: a number is out of range, or numbers contradict each other; the dataset is a `Subset`; the dataset or
            ``shuffle`` does not fit ``stratify``.

    As with torch's sampler, call `set_epoch` for each epoch, or all have the same order. Above 2^24 samples the order differs
    from torch's, and takes no memory. A state can be resumed with a different number of ranks and nodes if the global batch has
    the same size, and the state was not taken within a batch of a different size.

    Examples:
        >>> for node in range(2):  # the first has samples 0 to 3 cached, the other 4 to 7
        ...     placement = Placement("prefix", node=node, nodes=2)
        ...     print(list(LocalityDistributedSampler(range(8), 2, placement=placement, num_replicas=2, rank=node)))
        [0, 3, 2, 1]
        [4, 7, 5, 6]
    """

    _form = sampler_form("LocalityDistributedSampler", batch_size=(int,), layout=(dict, NoneType))
    advances_epoch = False

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        placement: Placement | None = None,
        num_nodes: int | None = None,
        node_rank: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        stratify: bool = False,
    ) -> None:
        super().__init__()
        here = ranks_here()
        num_replicas = here.world_size if num_replicas is None else num_replicas
        rank = here.rank if rank is None else rank
        for name, number, least in (("batch_size", batch_size, 1), ("num_replicas", num_replicas, 1), ("seed", seed, 0)):
            if type(number) is not int or number < least:
                raise LimitError(f"{name}={number!r} is not an integer of {least} or more.")
        if type(rank) is not int or not 0 <= rank < num_replicas:
            raise LimitError(f"rank={rank!r} is out of range for num_replicas={num_replicas}.")
        DistributedSampler.__init__(self, dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        if isinstance(dataset, Subset):
            raise LimitError("a Subset has other indices than its dataset. Put the CachedDataset around the Subset.")
        cache = getattr(dataset, "cache", None)
        placed = cache.placement if isinstance(cache, SharedCache) else None
        self._placement = _choose_placement(placement, placed, num_nodes, here.nodes)
        nodes = self._placement.nodes
        per_node, over = divmod(num_replicas, nodes)
        if over or not per_node:
            raise LimitError(f"num_replicas={num_replicas} cannot be divided evenly among {nodes} nodes.")
        sources = {
            "node_rank": node_rank,
            "the placement of the cache": placed and placed.node,
            "the launcher": here.node if here.nodes == nodes else None,
        }
        for source, node in sources.items():
            if node not in (None, rank // per_node):
                raise LimitError(
                    f"{source} says node {node}, but rank {rank} of {num_replicas}, {per_node} on each node, is on node "
                    f"{rank // per_node}. The first node must have the first ranks."
                )
        self.batch_size, self._ordering = batch_size, ordering_of(self._placement, len(dataset))
        self._layout: StrataLayout | None = None
        if stratify:
            if not (isinstance(cache, SharedCache) and shuffle):
                raise LimitError("stratify needs shuffle=True, and a CachedDataset with samples of one shape. Leave it out.")
            self._layout = StrataLayout(nodes, per_node, _slots_of(dataset, cache))
        self._resumed: tuple[int, StrataLayout | None] = -1, None  # a resumed epoch, and the layout it was begun with

    def __len__(self) -> int:
        """Return the number of samples of this rank in an epoch."""
        return self.num_samples

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks at a step."""
        return self.batch_size * self.num_replicas

    def _order(self, epoch: int, done: int) -> Iterator[list[int]]:
        shape, plan, width = self._plan(epoch)
        at_once = max(1, _PLANNED // width)
        for begin in range(done // self.batch_size, shape.steps, at_once):
            planned = plan(begin, min(begin + at_once, shape.steps))
            yield planned[max(0, done - begin * self.batch_size) :].tolist()

    def _plan(self, epoch: int) -> tuple[EpochShape, Callable[[int, int], Indices], int]:
        """Return the shape of an epoch, a function that plans steps of it, and how many samples this computes for each step."""
        layout = self._layout_of(epoch)
        world_size = layout.nodes * layout.per_node if layout else self.num_replicas
        samples = len(self.dataset)  # type: ignore[arg-type]
        each = samples // world_size if self.drop_last else -(-samples // world_size)
        shape = EpochShape(samples, world_size, self.global_batch_size // world_size, each, self.seed, epoch)
        if layout is None:
            batches = ShuffledEpoch(shape, self.shuffle).batches
        else:
            placement = dataclasses.replace(self._placement, node=0, nodes=layout.nodes)
            strata = StratifiedEpoch(shape, layout, ordering_of(placement, samples))
            if layout == self._layout:
                return shape, partial(strata.of_rank, self.rank), self.batch_size
            batches = strata.batches
        return shape, lambda begin, end: self._own_part(batches(begin, end)), self.global_batch_size

    def _own_part(self, batches: Indices) -> Indices:
        """Return the samples of this rank in global batches, the last of which may have fewer samples."""
        width, ranks = self.global_batch_size, self.num_replicas
        whole = len(batches) // width * width
        parts = [batches[:whole].reshape(-1, width)]
        left = len(batches) - whole
        if left % ranks:  # in an epoch that was begun with another number of ranks
            left = left // ranks * ranks if self.drop_last else -(-left // ranks) * ranks
        if left:
            parts.append(np.resize(batches[whole:], (1, left)))
        bounds, per_node = self._ordering.bounds, ranks // self._placement.nodes
        return np.concatenate(
            [part[assign_ranks(self._ordering.positions(part), bounds, per_node) == self.rank] for part in parts]
        )

    def _identity(self) -> dict[str, Any]:
        own = {"global_batch_size": self.global_batch_size, "stratify": self._layout is not None}
        return super()._identity() | own

    def _layout_of(self, epoch: int) -> StrataLayout | None:
        """Return the layout of an epoch: a resumed epoch keeps the layout that it was begun with."""
        return self._resumed[1] if epoch == self._resumed[0] else self._layout

    def _position(self, epoch: int) -> dict[str, Any]:
        layout = self._layout_of(epoch)
        return {"batch_size": self.batch_size, "layout": dataclasses.asdict(layout) if layout else None}

    def _resume(self, position: dict[str, Any]) -> int:
        done, batch_size, width = position["done"], position["batch_size"], self.global_batch_size
        layout = self._read_layout(position["layout"])
        steps = -(-len(self.dataset) // width)  # type: ignore[arg-type]
        if not batch_size or width % batch_size or done > steps * batch_size:
            raise StateError(f"the state is damaged: {done} samples are done, of {steps} batches of {batch_size}.")
        if batch_size != self.batch_size:
            if done % batch_size:
                raise StateError(
                    f"load_state_dict: the state was taken within a batch of {batch_size}, but this sampler has "
                    f"batch_size={self.batch_size}. Save it between two batches, or use that batch size."
                )
            done = done // batch_size * self.batch_size
        self._resumed = position["epoch"], layout
        return done  # type: ignore[no-any-return]

    def _read_layout(self, saved: dict[str, Any] | None) -> StrataLayout | None:
        """Return the layout in a state.

        Raises:
            StateError: it is damaged.
        """
        if saved is None and self._layout is None:
            return None
        if saved is not None and self._layout is not None and saved.keys() == dataclasses.asdict(self._layout).keys():
            layout = StrataLayout(**saved)
            numbers = all(type(value) is int and 0 <= value < 1 << 62 for value in saved.values())
            if numbers and (ranks := layout.nodes * layout.per_node) and not self.global_batch_size % ranks:
                return layout
        raise StateError(f"the state is damaged: its layout is {saved!r:.100}.")


def _slots_of(dataset: object, cache: SharedCache) -> int:
    """Return how many samples have room on this node: in memory, or on its disk."""
    disk = getattr(dataset, "disk_cache", None)
    if disk is None:
        return len(cache)
    kept = (cache.aux_array != SlotState.OOB) | (disk.aux_array != SlotState.OOB)
    return int(kept.sum())


def _choose_placement(given: Placement | None, placed: Placement | None, num_nodes: int | None, nodes_here: int) -> Placement:
    """Return the placement that says which node a sample belongs to.

    Raises:
        LimitError: the ``given`` placement differs from the placement of the cache, or is for a different number of nodes.
    """
    if given is not None and placed is not None and (given.order, given.nodes) != (placed.order, placed.nodes):
        raise LimitError(f"placement={given}, but the cache of the dataset has {placed}. Leave it out.")
    placement = placed or given
    nodes = num_nodes or (placement.nodes if placement is not None and placement.nodes > 1 else nodes_here)
    if placement is None:
        return Placement("scattered", nodes=nodes)
    if placement.nodes != nodes:
        raise LimitError(
            f"the placement is for {placement.nodes} nodes, but there are {nodes}: their caches would overlap. Give "
            f"CachedDataset placement=Placement.from_env()."
        )
    return placement
