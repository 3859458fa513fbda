"""Divide the elements of a graph among ranks and workers, and the graph among processes.

NOTE [ Shares ]
    A ``sharding_filter`` passes on every n-th element. The ranks divide the elements first, and the workers of a rank divide
    its share. So a rank has the same elements for any number of workers. With D ranks of W workers, worker w of rank r has the
    elements ``r + D*w``, ``r + D*w + D*W``, and so on. (torch divides among the workers first.)

NOTE [ Three parts of a graph ]
    The pipes before a ``sharding_round_robin_dispatch`` cannot be replicated. One dispatching process runs them, up to the
    lowest common ancestor of all such pipes. The main process runs the pipes after one that is not replicable, such as
    ``fullsync`` (see ``is_replicable``). Each worker runs a replica of the part between.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES, ShardingFilterIterDataPipe

from stocache.errors import GraphError
from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import DataPipe, is_replicable, is_sharding, pipes_of, replaced, sources
from stocache.reading.graph.seeds import is_dispatching


class Shard(ShardingFilterIterDataPipe):
    """A ``sharding_filter`` that divides as NOTE [ Shares ] says, and counts. It replaces torch's.

    Attributes:
        skipped: elements that the source leaves out at the beginning of the next iteration.
        taken: elements passed on; it includes the elements of the skipped ones that this shard would have passed on.
    """

    def __init__(self, pipe: ShardingFilterIterDataPipe) -> None:
        super().__init__(pipe.source_datapipe, pipe.sharding_group_filter)
        self.groups = pipe.groups
        self.skipped = self.taken = 0

    def apply_sharding(  # type: ignore[override]  # torch's base class is not typed
        self, num_of_instances: int, instance_id: int, sharding_group: SHARDING_PRIORITIES = SHARDING_PRIORITIES.DEFAULT
    ) -> None:
        """Set the number and the count of instances in one group: the ranks, or the workers of a rank."""
        super().apply_sharding(num_of_instances, instance_id, sharding_group)  # type: ignore[no-untyped-call]
        if self.sharding_group_filter is None:
            ranks, rank = self.groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
            workers, worker = self.groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0))
            self.num_of_instances, self.instance_id = ranks * workers, rank + ranks * worker

    def __iter__(self) -> Iterator[Any]:
        count, mine = self.num_of_instances, self.instance_id
        self.taken = -(-(self.skipped - mine) // count) if self.skipped > mine else 0
        for number, element in enumerate(self.source_datapipe, self.skipped):
            if number % count == mine:
                self.taken += 1
                yield element


class CountedPipe(IterDataPipe[Any]):
    """Counts the elements that would be dispatched if there were workers.

    Attributes:
        skipped, taken: as in `Shard`.
    """

    def __init__(self, datapipe: DataPipe) -> None:
        self.datapipe: Any = datapipe
        self.skipped = self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        self.taken = self.skipped
        for element in self.datapipe:
            self.taken += 1
            yield element

    def __len__(self) -> int:
        return len(self.datapipe)


def apply_sharding(
    datapipe: DataPipe,
    num_of_instances: int,
    instance_id: int,
    sharding_group: SHARDING_PRIORITIES = SHARDING_PRIORITIES.DEFAULT,
) -> None:
    """Set the number and the count of instances in each sharding pipe of a graph.

    Raises:
        GraphError: one sharding pipe follows another, so most elements would be lost.
    """
    sharding = [pipe for pipe in pipes_of(datapipe) if is_sharding(pipe) and not _is_fed(pipe)]
    for pipe in sharding:
        before = [other for other in pipes_of(pipe) if other is not pipe and is_sharding(other)]
        if before:
            raise GraphError(f"{pipe} shards what {before[0]} has sharded already, so elements would be lost. Remove one.")
    for pipe in sharding:
        numbers = (num_of_instances, instance_id)
        if getattr(pipe, "groups", {}).get(SHARDING_PRIORITIES.DEFAULT) == (1, 0):
            del pipe.groups[SHARDING_PRIORITIES.DEFAULT]  # torch's DataLoader leaves it on a graph
        if len(inspect.signature(pipe.apply_sharding).parameters) < 3:
            pipe.apply_sharding(*numbers)
        else:
            pipe.apply_sharding(*numbers, sharding_group=sharding_group)


def worker_share(datapipe: DataPipe, num_workers: int, worker_id: int) -> DataPipe:
    """Return the graph with a `Shard` for each ``sharding_filter``, set to a worker's share; dispatched parts stay whole."""
    for pipe in pipes_of(datapipe):
        if type(pipe) is ShardingFilterIterDataPipe and not _is_fed(pipe):
            datapipe = replaced(datapipe, pipe, Shard(pipe))
    apply_sharding(datapipe, num_workers, worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
    return datapipe


def _is_fed(datapipe: DataPipe) -> bool:
    """Whether a pipe gets dispatched elements, which other workers do not get."""
    return any(isinstance(pipe, Feed) for pipe in pipes_of(datapipe))


def replicable_end(datapipe: DataPipe) -> DataPipe:
    """Return the last pipe before the pipes that stay in the main process.

    Raises:
        GraphError: no pipe can leave the main process, or the pipes that can have several ends.
    """
    here = {id(pipe): any(not is_replicable(other) for other in pipes_of(pipe)) for pipe in pipes_of(datapipe)}
    if not here[id(datapipe)]:
        return datapipe
    ends = {
        id(source): source for pipe in pipes_of(datapipe) if here[id(pipe)] for source in sources(pipe) if not here[id(source)]
    }
    if len(ends) != 1:
        raise GraphError(
            f"{len(ends)} parts of the graph lead to pipes that stay in the main process, but workers can run only one part. "
            f"Put pipes that are not replicable (fullsync, pin_memory) at the end of the graph."
        )
    return next(iter(ends.values()))


def dispatched_end(datapipe: DataPipe) -> DataPipe | None:
    """Return the last pipe of the dispatching process: the lowest common ancestor of all dispatching pipes; or None."""
    alone = {id(before) for pipe in pipes_of(datapipe) if is_dispatching(pipe) for before in pipes_of(pipe)}
    return _ancestor(datapipe, alone, {})


def _ancestor(pipe: DataPipe, alone: set[int], known: dict[int, DataPipe | None]) -> DataPipe | None:
    if id(pipe) not in known:
        known[id(pipe)] = None  # also for a pipe that leads back to itself
        found = {id(end): end for source in sources(pipe) if (end := _ancestor(source, alone, known)) is not None}
        if id(pipe) in alone or len(found) > 1:
            known[id(pipe)] = pipe
        elif found:
            known[id(pipe)] = next(iter(found.values()))
    return known[id(pipe)]
