"""Training on many machines: samples go to the machine whose cache holds them."""

import dataclasses
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Subset

from stocache.cache.placement import Placement, ordering_of
from stocache.cache.shared import SharedCache
from stocache.errors import LimitError, StateError
from stocache.samplers.assignment import EpochShape, Shuffled, StrataLayout, Stratified, share_out
from stocache.samplers.block import ResumableSampler
from stocache.samplers.permutation import Numbers
from stocache.system.ranks import ranks_here

_PLANNED = 1 << 16  # samples that are planned together


class LocalityDistributedSampler(ResumableSampler):
    """A DistributedSampler whose global batches are shared out by where their samples are cached.

        dataset = CachedDataset(photos, size_limit_gib=64, placement=Placement.from_env())
        sampler = LocalityDistributedSampler(dataset, batch_size=256)
        loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=8)

    At each step all ranks together have the samples that torch's DistributedSampler gives them for this seed and epoch, and
    each of them as many; but a sample goes to a rank of the node in whose part it is (`Placement`). So the caches of P nodes,
    of a share c of the dataset each, serve min(1, P c) of it in place of c, less what a node has too many of at a step: see
    NOTE [ Sharing out ] of the source. The ranks of a node evenly share what its cache holds.

    Nothing is sent: every rank plans each global batch by itself, in some 0.1 us for each of its samples.

    Args:
        dataset: what is trained on, a `CachedDataset` with a placement by nodes, or anything with a length.
        batch_size: of each rank, as for its DataLoader.
        placement: None for that of the cache of the dataset; of a dataset without one, scattered.
        num_nodes, node_rank: the machines, and which one this is; None for what the placement says, or torchrun or Slurm.
        num_replicas, rank: the ranks, and which one this is; None for what torch.distributed, torchrun or Slurm say. Each node
            has as many, and the first node the first ones.
        shuffle: False takes the samples in ascending order.
        seed: the same for all ranks.
        drop_last: leave out the last samples, so that all ranks have as many; else some come twice.
        stratify: make up each step of as many samples from each node's part, and give each rank as many that are cached, up to
            one from step to step. No rank waits for another that has more to read, and nothing but what no cache holds is read.
            The order of an epoch, still random and of each sample once, is another one than torch's. A rank plans its
            own samples only. Needs a `CachedDataset` with samples of one shape and caches of one size on all nodes.

    Raises:
        LimitError: numbers that are none, or do not go together; ``stratify`` without what it needs.

    As for torch's, `set_epoch` says which epoch it is, or each is the same. Above 2^24 samples the order is not that of torch,
    and takes no memory. A state may be taken up by another number of ranks and nodes with the same global batch.
    """

    _counts_epochs = False

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
                raise LimitError(f"{name}={number!r} is not a number of {least} or more.")
        if type(rank) is not int or not 0 <= rank < num_replicas:
            raise LimitError(f"rank={rank!r} is none of num_replicas={num_replicas}.")
        DistributedSampler.__init__(self, dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        if isinstance(dataset, Subset):
            raise LimitError("samples of a Subset have other numbers in its dataset. Put the CachedDataset around the Subset.")
        cache = getattr(dataset, "cache", None)
        placed = cache.placement if isinstance(cache, SharedCache) else None
        self._placement = _agreed(placement, placed, num_nodes, here.nodes)
        nodes = self._placement.nodes
        per_node, over = divmod(num_replicas, nodes)
        if over or not per_node:
            raise LimitError(f"num_replicas={num_replicas} are not as many on each of {nodes} nodes.")
        said = {
            "node_rank": node_rank,
            "the placement of the cache": placed and placed.node,
            "the launcher": here.node if here.nodes == nodes else None,
        }
        for who, node in said.items():
            if node not in (None, rank // per_node):
                raise LimitError(
                    f"{who} says node {node}, but rank {rank} of {num_replicas}, {per_node} on each node, is of node "
                    f"{rank // per_node}. The first node must have the first ranks."
                )
        self.batch_size, self._line = batch_size, ordering_of(self._placement, len(dataset))
        self._layout: StrataLayout | None = None
        if stratify:
            if not (isinstance(cache, SharedCache) and shuffle):
                raise LimitError("stratify needs shuffle=True, and a CachedDataset with samples of one shape. Leave it out.")
            self._layout = StrataLayout(nodes, per_node, len(cache))
        self._resumed: tuple[int, StrataLayout | None] = -1, None  # an epoch that was begun with other nodes, and those

    def __len__(self) -> int:
        """Return the number of samples of this rank in an epoch."""
        return self.num_samples

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks at a step."""
        return self.batch_size * self.num_replicas

    def _order(self, epoch: int, done: int) -> Iterator[list[int]]:
        facts, plan, width = self._plan(epoch)
        together = max(1, _PLANNED // width)
        for begin in range(done // self.batch_size, facts.steps, together):
            planned = plan(begin, min(begin + together, facts.steps))
            yield planned[max(0, done - begin * self.batch_size) :].tolist()

    def _plan(self, epoch: int) -> tuple[EpochShape, Callable[[int, int], Numbers], int]:
        """Return what an epoch consists of, the function that plans steps of it, and how many samples it looks at for each."""
        layout = self._layout_of(epoch)
        world_size = layout.nodes * layout.per_node if layout else self.num_replicas
        samples = len(self.dataset)  # type: ignore[arg-type]
        each = samples // world_size if self.drop_last else -(-samples // world_size)
        facts = EpochShape(samples, world_size, self.global_batch_size // world_size, each, self.seed, epoch)
        if layout is None:
            batches = Shuffled(facts, self.shuffle).batches
        else:
            placement = dataclasses.replace(self._placement, node=0, nodes=layout.nodes)
            strata = Stratified(facts, layout, ordering_of(placement, samples))
            if layout == self._layout:
                return facts, partial(strata.of_rank, self.rank), self.batch_size
            batches = strata.batches
        return facts, lambda begin, end: self._share(batches(begin, end)), self.global_batch_size

    def _share(self, batches: Numbers) -> Numbers:
        """Return what this rank gets of global batches, the last of which may have less samples."""
        width, ranks = self.global_batch_size, self.num_replicas
        whole = len(batches) // width * width
        parts = [batches[:whole].reshape(-1, width)]
        left = len(batches) - whole
        if left % ranks:  # in an epoch that was begun with another number of ranks
            left = left // ranks * ranks if self.drop_last else -(-left // ranks) * ranks
        if left:
            parts.append(np.resize(batches[whole:], (1, left)))
        bounds, per_node = self._line.bounds, ranks // self._placement.nodes
        return np.concatenate([part[share_out(self._line.positions(part), bounds, per_node) == self.rank] for part in parts])

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": len(self.dataset),  # type: ignore[arg-type]
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "global_batch_size": self.global_batch_size,
            "stratify": self._layout is not None,
        }

    def _layout_of(self, epoch: int) -> StrataLayout | None:
        """Return what an epoch is stratified for: it goes on as it was begun."""
        return self._resumed[1] if epoch == self._resumed[0] else self._layout

    def _state(self, epoch: int, done: int) -> dict[str, Any]:
        layout = self._layout_of(epoch)
        begun_for = {"batch_size": self.batch_size, "layout": dataclasses.asdict(layout) if layout else None}
        return super()._state(epoch, done) | begun_for

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, also of another number of ranks and nodes with the same global batch.

        Raises:
            StateError: it is the state of another order, or taken within a batch of another size.
        """
        super().load_state_dict(state)
        steps, within = divmod(self._done, state["batch_size"])
        if state["batch_size"] != self.batch_size:
            if within:
                raise StateError(f"load_state_dict: the state is of within a batch of {state['batch_size']}, not of after one.")
            self._done = steps * self.batch_size
        layout = state["layout"]
        self._resumed = state["epoch"], None if layout is None else StrataLayout(**layout)


def _agreed(given: Placement | None, placed: Placement | None, num_nodes: int | None, nodes_here: int) -> Placement:
    """Return the placement by which samples are shared out.

    Raises:
        LimitError: what is given differs from that of the cache, or is for another number of nodes.
    """
    if given is not None and placed is not None and (given.order, given.nodes) != (placed.order, placed.nodes):
        raise LimitError(f"placement={given}, and the cache of the dataset has {placed}. Leave it out.")
    placement = placed or given
    nodes = num_nodes or (placement.nodes if placement is not None and placement.nodes > 1 else nodes_here)
    if placement is None:
        return Placement("scattered", nodes=nodes)
    if placement.nodes != nodes:
        raise LimitError(
            f"the placement is for {placement.nodes} nodes, and there are {nodes}: the caches would not add up. Give "
            f"CachedDataset placement=Placement.from_env()."
        )
    return placement
