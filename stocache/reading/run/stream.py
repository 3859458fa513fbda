"""What the main process sees of the part of a graph that workers could run, and where it stands."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from stocache.errors import StateError
from stocache.reading.run.replica import Replica, ReplicaEpoch, Resume
from stocache.system import rng
from stocache.system.rng import States


@dataclass(frozen=True)
class GraphPosition:
    """Where a stream stands.

    Attributes:
        workers: how many there are; 0 where the main process does it all.
        counts: elements delivered of each; empty where only their sum is known, as there were other workers before.
        count: their sum.
        place: of the last of them in the order before it was sharded, from 0; -1 before the first, None where it is not known.
        drawn: whether random numbers were drawn in the epoch.
    """

    workers: int
    counts: tuple[int, ...]
    count: int
    place: int | None
    drawn: bool

    def resumed(self, workers: int) -> list[Resume]:
        """Return where each of so many workers goes on; one where it is 0.

        Raises:
            StateError: that is not the number of workers of the state, and would not be exact.
        """
        numbers = range(max(1, workers))
        same = self.counts and workers == self.workers
        if self.place is not None and not self.drawn:
            taken = [(self.place - worker) // len(numbers) + 1 for worker in numbers]
            counts = self.counts if same else [0] * len(numbers)
            return [Resume(count, its) for count, its in zip(counts, taken, strict=True)]
        if same:
            return self.again(workers) if self.drawn else [Resume(count) for count in self.counts]
        reason = (
            "random numbers were drawn, which each worker draws for itself"
            if self.drawn
            else "not every element after the sharding_filter is made of one before it"
        )
        raise self._error(workers, reason)

    def again(self, workers: int) -> list[Resume]:
        """Return the same, for workers that are to make all elements again.

        Raises:
            StateError: that is not the number of workers of the state.
        """
        if not self.counts or workers != self.workers:
            raise self._error(workers, "they must be made again by those who made them")
        return [Resume(count, None, count > 0) for count in self.counts]

    def _error(self, workers: int, reason: str) -> StateError:
        return StateError(
            f"the state is of {self.workers} workers, or has been resumed by others than it was taken of, and now there are "
            f"{workers}: with these the elements would be others, as {reason}. Use {self.workers} workers for this epoch."
        )


class Stream(IterDataPipe[Any]):
    """The pipe of the main process that gives what the replicable part of a graph makes.

    Args:
        workers: how many make it; 0 for this process.
        max_buffered: elements that pipes behind it may have taken, and not given on.
        length: called for ``len``.
    """

    def __init__(self, workers: int, max_buffered: int, length: Callable[[], int]) -> None:
        self.workers, self._length = workers, length
        self._given: deque[tuple[int, int | None]] = deque(
            maxlen=max_buffered + 1
        )  # the newest: of which worker, at which place
        self.begin_epoch([], None)

    def begin_epoch(self, epochs: list[ReplicaEpoch], begun: GraphPosition | None) -> None:
        """Say what the next iteration's epoch is to each worker, and where it begins if not at the beginning."""
        self._epochs = epochs
        self._begun = begun or GraphPosition(self.workers, (0,) * max(1, self.workers), 0, -1, False)
        self._counts = list(self._begun.counts) if self._begun.workers == self.workers else []
        self._count, self.drawn = self._begun.count, self._begun.drawn
        self._given.clear()

    def _give(self, worker: int, place: int | None) -> None:
        """Note that an element is given."""
        self._count += 1
        if self._counts:
            self._counts[worker] += 1
        self._given.append((worker, place))

    def position(self, count: int) -> GraphPosition:
        """Return where the stream stood when it had given ``count`` elements: all, or less those that its readers hold back."""
        given, counts = list(self._given), list(self._counts)
        for worker, _ in reversed(given[len(given) - (self._count - count) :]):
            if counts:
                counts[worker] -= 1
        before = given[: len(given) - (self._count - count)]
        place = before[-1][1] if before else self._begun.place
        return GraphPosition(self.workers, tuple(counts), count, place, self.drawn)

    def close(self) -> None:
        """End what works for the stream."""

    def __len__(self) -> int:
        return self._length()


class LocalStream(Stream):
    """A stream that this process makes."""

    def __init__(self, replica: Replica, max_buffered: int, length: Callable[[], int]) -> None:
        super().__init__(0, max_buffered, length)
        self.datapipe, self._replica = replica.end, replica
        self._numbers_at: tuple[States, States] | None = None
        self._numbers_begun: States | None = None  # of the epoch that is being made

    def begin_epoch(
        self, epochs: list[ReplicaEpoch], begun: GraphPosition | None, numbers: tuple[States, States] | None = None
    ) -> None:
        """Say what the next iteration's epoch is, and, where it has begun, what `numbers` said there.

        Then the global generators are put where they were when the epoch began, for elements that are made again, and when
        these are made where they were when the state was taken.
        """
        super().begin_epoch(epochs, begun)
        self._numbers_at, self._numbers_begun = numbers, None

    def numbers(self) -> tuple[States, States]:
        """Return the states of this process's global generators when the epoch began, and now."""
        now = rng.states()
        return self._numbers_at or (self._numbers_begun or now, now)

    def __iter__(self) -> Iterator[Any]:
        states, self._numbers_at = self._numbers_at, None
        self._numbers_begun = rng.states() if states is None else states[0]
        (epoch,) = self._epochs
        self._replica.begin(epoch)
        self.datapipe = self._replica.end
        if states is not None and epoch.resume.again:
            self._replica.replaying = partial(_with_numbers, *states)
        elif states is not None:
            rng.set_rng_state(states[1])
        replica, clock, give = self._replica, self._replica.clock, self._given.append
        for element in replica.iterator:  # with few calls for each, as this is all there is between a graph and its loop
            replica.count += 1
            self._count += 1
            give((0, None if clock is None else clock.taken - 1))
            yield element

    def position(self, count: int) -> GraphPosition:
        """Return where the stream stood when it had given ``count`` elements."""
        if self._counts:
            self._counts = [self._count]
        self.drawn = self.drawn or (self._numbers_begun is not None and self._replica.drawn())
        return super().position(count)


@contextlib.contextmanager
def _with_numbers(before: States, after: States) -> Iterator[None]:
    rng.set_rng_state(before)
    yield
    rng.set_rng_state(after)
