"""The reading service of several ranks: each gets its share of a graph."""

import copy
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from stocache.reading.graph.graph import Adapt, DataPipe
from stocache.reading.graph.pipes import DEFAULT_TIMEOUT_S, FullSync
from stocache.reading.graph.seeds import SeedGenerator, dist_share_seed, set_graph_random_seed
from stocache.reading.graph.sharding import apply_sharding
from stocache.reading.run.divide import is_full_sync
from stocache.reading.states import StatefulService
from stocache.system.state import StateForm

_DISTRIBUTED = StateForm("DistributedReadingService", 1, {}, {})


class DistributedReadingService(StatefulService):
    """Give each rank of torch.distributed its share of the graph, with the same seeds and epochs of equal length.

    Args:
        timeout: seconds to wait for other ranks.

    Raises:
        RuntimeError: torch.distributed is not available, or, at the beginning, not initialized.
    """

    def __init__(self, timeout: int = DEFAULT_TIMEOUT_S) -> None:
        if not dist.is_available():
            raise RuntimeError("this torch was built without torch.distributed, which DistributedReadingService needs.")
        self._timeout = timeout
        self._group: Any = None
        self._sync: FullSync | None = None

    def initialize(self, datapipe: Any) -> Any:
        """Return the graph of this rank, with ``fullsync`` at its end."""
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized. Call init_process_group first, or start with torchrun.")
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        apply_sharding(datapipe, dist.get_world_size(), dist.get_rank(), SHARDING_PRIORITIES.DISTRIBUTED)
        if not is_full_sync(datapipe):
            datapipe = self._sync = FullSync(datapipe, self._timeout)
        self._datapipe = datapipe
        return datapipe

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None = None) -> Adapt | None:
        """Agree with the other ranks on the seed of the epoch."""
        seed_generator.seed(dist_share_seed(seed_generator.generate_shared_seed(), self._group))
        seed_generator.spawn(dist.get_rank(), inplace=True)
        set_graph_random_seed(self._datapipe, copy.copy(seed_generator))  # in case no later service does
        return iter_reset_fn

    def json_state(self) -> dict[str, Any]:
        """Return the number of ranks, and of this rank."""
        return _DISTRIBUTED.make(self._identity(), {})

    def restore_json(self, datapipe: DataPipe, state: object) -> DataPipe:
        """Return the graph of this rank."""
        knows_rank = dist.is_initialized()
        if knows_rank:  # before it joins the others: none may leave while one joins
            _DISTRIBUTED.read(state, self._identity())
        datapipe = self.initialize(datapipe)
        if not knows_rank:
            _DISTRIBUTED.read(state, self._identity())
        return datapipe

    def _identity(self) -> dict[str, int]:
        return {"ranks": dist.get_world_size(), "rank": dist.get_rank()}

    def finalize(self) -> None:
        """Leave the process groups of the ranks."""
        if self._sync is not None:
            self._sync.leave()
            self._sync = None
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
