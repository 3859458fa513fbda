"""Bring a graph to an earlier position: iterate it again, and leave out work if possible.

NOTE [ Replay ]
    The sources give the first elements of a graph again, and these are dropped. If each element of a pipe is made from a fixed
    number of its source's elements, then the source's elements are dropped instead, and the pipe does not see them. So the
    place to drop moves from the end of the graph through maps, batches and shards, up to a pipe that must see all elements, for
    example a shuffle.

    A map is left out only if this has no effect: it holds no random number generator, and nothing in the epoch has drawn from
    the global ones. Otherwise the random numbers that follow would differ.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher, Collator, Mapper

from stocache.reading.graph.caching import Numbered, SharedCacher
from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import DataPipe, pipes_of, relink, removed
from stocache.reading.graph.pipes import FullSync, PinMemory, Prefetcher, ShardingRoundRobinDispatcher
from stocache.reading.graph.seeds import holds_no_generator
from stocache.reading.graph.sharding import CountedPipe, Shard


class SkipFirst(IterDataPipe[Any]):
    """All but the first ``count`` elements of a pipe."""

    def __init__(self, datapipe: DataPipe, count: int) -> None:
        self.datapipe, self.count = datapipe, count

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.datapipe)
        drop(iterator, self.count)
        yield from iterator


def drop(iterator: Iterator[object], count: int) -> None:
    """Take the first ``count`` elements of an iterator, or all if it has fewer."""
    for _ in zip(range(count), iterator, strict=False):  # islice takes no count above sys.maxsize, which a state may have
        pass


def trace(datapipe: DataPipe, count: int) -> list[tuple[Any, int]]:
    """Return the pipes from the end of a graph back to the first that must see all elements.

    With each pipe comes the number of its elements that the first ``count`` elements of the graph are made from.
    """
    path: list[tuple[Any, int]] = [(datapipe, count)]
    while (step := _step(*path[-1])) is not None:
        path.append(step)
    return path


def fast_forward(datapipe: DataPipe, count: int) -> DataPipe:
    """Make the next iteration of a graph begin after its first ``count`` elements, and return the graph."""
    path = trace(datapipe, count)
    for (pipe, _), (_, below) in pairwise(path):
        if isinstance(pipe, Shard | CountedPipe | Numbered):
            pipe.skipped = below
    source, dropped = path[-1]
    if isinstance(source, Feed):  # it gets only the remaining elements
        source.skipped = dropped
    if not dropped or isinstance(source, Feed):
        return datapipe
    if len(path) == 1:
        return SkipFirst(source, dropped)
    relink(path[-2][0], source, SkipFirst(source, dropped))
    return datapipe


def rewind(datapipe: DataPipe) -> DataPipe:
    """Undo `fast_forward`, and return the graph."""
    for pipe in pipes_of(datapipe):
        if isinstance(pipe, Shard | CountedPipe | Numbered | Feed):
            pipe.skipped = 0
        elif isinstance(pipe, SkipFirst):
            datapipe = removed(datapipe, pipe)
    return datapipe


def _step(pipe: Any, count: int) -> tuple[Any, int] | None:
    """Return a pipe's source, and how many of its elements make ``count`` of the pipe's; None if that is unknown."""
    kind = type(pipe)
    if kind in (Mapper, Collator):
        return (pipe.datapipe, count) if holds_no_generator(pipe.fn) else None
    if kind in (SharedCacher, Numbered, CountedPipe, FullSync):
        return pipe.datapipe, count
    if kind in (Prefetcher, PinMemory, ShardingRoundRobinDispatcher):
        return pipe.source_datapipe, count
    if kind is Batcher:
        return pipe.datapipe, count * pipe.batch_size
    if kind is Shard:
        return pipe.source_datapipe, (count - 1) * pipe.num_of_instances + pipe.instance_id + 1 if count else 0
    return None
