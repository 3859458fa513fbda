"""Find the lengths and buffers of the parts into which a graph is divided."""

from typing import Any

from torch.utils.data.datapipes.iter import Batcher
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import DataPipe, clone, pipes_of, removed
from stocache.reading.graph.pipes import FullSync, Prefetcher
from stocache.reading.graph.replay import trace
from stocache.reading.graph.sharding import worker_share


class Length:
    """Counts the elements of a part of a graph, for all workers together.

    If all ranks end together, it counts the elements of the last rank, which has the fewest.
    """

    def __init__(self, datapipe: DataPipe, part: DataPipe, num_workers: int) -> None:
        self._part: Any = clone(part)
        self._num_workers = num_workers
        if any(is_full_sync(pipe) for pipe in pipes_of(datapipe)):
            for pipe in pipes_of(self._part):
                groups = getattr(pipe, "groups", {})
                if SHARDING_PRIORITIES.DISTRIBUTED in groups:
                    ranks, _ = groups[SHARDING_PRIORITIES.DISTRIBUTED]
                    groups[SHARDING_PRIORITIES.DISTRIBUTED] = ranks, ranks - 1

    def __call__(self) -> int:
        """Return the length; raises TypeError if a pipe has no length."""
        total = 0
        for worker in range(self._num_workers):
            self._part = worker_share(self._part, self._num_workers, worker)
            for pipe in pipes_of(self._part):
                if isinstance(pipe, Feed):
                    pipe.shares = self._num_workers, worker
            total += len(self._part)
        return total


def max_buffered(datapipe: DataPipe, part: DataPipe) -> int:
    """Return how many elements of a part the pipes behind it may have taken and not yet passed on."""
    held = 0
    for pipe, _ in trace(datapipe, 1):
        if pipe is part:
            break
        if isinstance(pipe, Prefetcher):
            held += pipe.buffer_size + 1
        elif isinstance(pipe, FullSync):
            held += 2
        elif isinstance(pipe, Batcher):
            held = (held + 1) * pipe.batch_size
    return held


def without_prefetching(datapipe: DataPipe) -> DataPipe:
    """Return a worker's graph without pipes that prefetch: their threads must not read the feed."""
    for pipe in pipes_of(datapipe):
        if isinstance(pipe, Prefetcher) or type(pipe).__name__ == "PrefetcherIterDataPipe":
            datapipe = removed(datapipe, pipe)
    return datapipe


def is_full_sync(datapipe: DataPipe) -> bool:
    """Whether a pipe ends the epoch of all ranks together; for stocache's pipe and torchdata's."""
    return isinstance(datapipe, FullSync) or type(datapipe).__name__ == "FullSyncIterDataPipe"
