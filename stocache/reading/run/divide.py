"""What a service has to know of the parts of a graph: their seeds, their lengths, and what is between them and the loop."""

from typing import Any

from torch.utils.data.datapipes.iter import Batcher
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import DataPipe, clone, end_of, pipes_of, remove_dp, traverse_dps
from stocache.reading.graph.pipes import FullSync, Prefetcher
from stocache.reading.graph.replay import trace
from stocache.reading.graph.seeds import SeedGenerator, random_pipes, shared_pipes
from stocache.reading.graph.sharding import share


class Seeding:
    """Draws the seeds of a graph's random pipes, in the same order however the graph is divided afterwards."""

    def __init__(self, datapipe: DataPipe) -> None:
        self._shared, self._all = shared_pipes(datapipe), random_pipes(datapipe)

    def divide(self, *parts: DataPipe) -> None:
        """Say which parts of the graph are run elsewhere, by their ends."""
        self._parts = [random_pipes(part) for part in parts]
        elsewhere = {id(pipe) for pipes in self._parts for pipe in pipes}
        self._here = [pipe for pipe in self._all if id(pipe) not in elsewhere]

    def draw(self, seed_generator: SeedGenerator) -> list[list[int | None]]:
        """Give the pipes their seeds that are run here, and return those of the parts: None for a pipe that draws its own."""
        seeds = {id(pipe): seed_generator.generate_shared_seed() for pipe in self._shared}
        for pipe in self._here:
            pipe.set_seed(seeds[id(pipe)] if id(pipe) in seeds else seed_generator.generate_seed())
        return [[seeds.get(id(pipe)) for pipe in pipes] for pipes in self._parts]


class Length:
    """Tells how many elements a part of a graph gives, for all workers together.

    Where the ranks are to end together, for the rank that has least: the last one.
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
        """Return the length; TypeError where a pipe has none."""
        total = 0
        for worker in range(self._num_workers):
            self._part = share(self._part, self._num_workers, worker)
            for pipe in pipes_of(self._part):
                if isinstance(pipe, Feed):
                    pipe.shares = self._num_workers, worker
            total += len(self._part)
        return total


def max_buffered(datapipe: DataPipe, part: DataPipe) -> int:
    """Return how many elements of a part the pipes behind it may have taken and not given on."""
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
    """Return a worker's graph without the pipes that prefetch, whose threads could not wait for the feed."""
    for pipe in pipes_of(datapipe):
        if isinstance(pipe, Prefetcher) or type(pipe).__name__ == "PrefetcherIterDataPipe":
            datapipe = end_of(remove_dp(traverse_dps(datapipe), pipe))
    return datapipe


def is_full_sync(datapipe: DataPipe) -> bool:
    """Whether a pipe ends the epoch of all ranks together; whoever registered it."""
    return isinstance(datapipe, FullSync) or type(datapipe).__name__ == "FullSyncIterDataPipe"
