"""How a graph is brought to where it was: by iterating it again, without the work that can be left out.

NOTE [ Replay ]
    The first elements of a graph are given again by its sources, and dropped. Where each of a pipe's elements is made of the
    same number of its source's, the source's are dropped instead, and the pipe never sees them: so goes the way from the end of
    a graph through maps, batches and shards, until a pipe comes for which all must have been seen, such as a shuffle.

    A map is passed over only if that cannot be noticed: when it holds no generator of random numbers, and nothing in the epoch
    has drawn from the global ones. For else the numbers after it would be others.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher, Collator, Mapper

from stocache.reading.graph.caching import Numbered, SharedCacher
from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import DataPipe, pipes_of, relink, remove_dp, traverse_dps
from stocache.reading.graph.pipes import FullSync, PinMemory, Prefetcher, ShardingRoundRobinDispatcher
from stocache.reading.graph.seeds import is_pure
from stocache.reading.graph.sharding import Counted, Shard


class Skip(IterDataPipe[Any]):
    """All but the first ``count`` elements of a pipe."""

    def __init__(self, datapipe: DataPipe, count: int) -> None:
        self.datapipe, self.count = datapipe, count

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.datapipe, self.count, None)


def trace(datapipe: DataPipe, count: int) -> list[tuple[Any, int]]:
    """Return the pipes from the end of a graph to the first that must be iterated for itself, and of each how many elements
    the first ``count`` ones of the graph are made of."""
    path: list[tuple[Any, int]] = [(datapipe, count)]
    while (step := _step(*path[-1])) is not None:
        path.append(step)
    return path


def fast_forward(datapipe: DataPipe, count: int) -> DataPipe:
    """Let the next iteration of a graph begin after its first ``count`` elements, and return the graph."""
    path = trace(datapipe, count)
    for (pipe, _), (_, below) in pairwise(path):
        if isinstance(pipe, Shard | Counted | Numbered):
            pipe.skipped = below
    source, dropped = path[-1]
    if isinstance(source, Feed):  # which is sent the rest only
        source.skipped = dropped
    if not dropped or isinstance(source, Feed):
        return datapipe
    if len(path) == 1:
        return Skip(source, dropped)
    relink(path[-2][0], source, Skip(source, dropped))
    return datapipe


def rewind(datapipe: DataPipe) -> DataPipe:
    """Undo `fast_forward`, and return the graph."""
    for pipe in pipes_of(datapipe):
        if isinstance(pipe, Shard | Counted | Numbered | Feed):
            pipe.skipped = 0
        elif isinstance(pipe, Skip):
            if pipe is datapipe:
                datapipe = pipe.datapipe
            else:
                remove_dp(traverse_dps(datapipe), pipe)
    return datapipe


def _step(pipe: Any, count: int) -> tuple[Any, int] | None:
    """Return a pipe's source, and how many of its elements ``count`` of the pipe's are made of; None if that is not known."""
    kind = type(pipe)
    if kind in (Mapper, Collator):
        return (pipe.datapipe, count) if is_pure(pipe.fn) else None
    if kind in (SharedCacher, Numbered, Counted, FullSync):
        return pipe.datapipe, count
    if kind in (Prefetcher, PinMemory, ShardingRoundRobinDispatcher):
        return pipe.source_datapipe, count
    if kind is Batcher:
        return pipe.datapipe, count * pipe.batch_size
    if kind is Shard:
        return pipe.source_datapipe, (count - 1) * pipe.num_of_instances + pipe.instance_id + 1 if count else 0
    return None
