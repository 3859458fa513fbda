"""Give the main process the elements of the workers' part of a graph, and its position."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from stocache.errors import StateError
from stocache.reading.run.replica import Replica, ReplicaEpoch, Resume
from stocache.system import generators as rng
from stocache.system.generators import States


@dataclass(frozen=True)
class GraphPosition:
    """The position of a stream.

    Attributes:
        workers: number of workers; 0 if the main process runs the graph.
        counts: elements delivered from each worker; empty if only the sum is known, because the number of workers changed.
        count: the sum.
        passed: elements of the order before sharding, up to the one that the last was made from; None if unknown.
        drawn: whether random numbers were drawn in the epoch.
    """

    workers: int
    counts: tuple[int, ...]
    count: int
    passed: int | None
    drawn: bool

    @classmethod
    def of(cls, position: dict[str, Any]) -> "GraphPosition":
        """Return the position in a state.

        Raises:
            StateError: the state is damaged.
        """
        workers, counts = position["workers"], position["counts"]
        if any(type(count) is not int or count < 0 for count in counts) or len(counts) not in (0, max(1, workers)):
            raise StateError(f"the state of a reading service is damaged: {workers!r:.100} workers have made {counts!r:.100}.")
        return cls(**position | {"counts": tuple(counts)})

    def resumed(self, workers: int) -> list[Resume]:
        """Return where each of ``workers`` workers continues; one position for the main process if it is 0.

        Raises:
            StateError: the state has a different number of workers, and resuming would not be exact.
        """
        numbers = range(max(1, workers))
        same = self.counts and workers == self.workers
        if self.passed is not None and not self.drawn:
            taken = [max(0, -(-(self.passed - worker) // len(numbers))) for worker in numbers]
            counts = self.counts if same else [0] * len(numbers)
            return [Resume(*each) for each in zip(counts, taken, strict=True)]
        if same:
            return self.again(workers) if self.drawn else [Resume(count) for count in self.counts]
        reason = (
            "each worker draws its own random numbers"
            if self.drawn
            else "an element after the sharding_filter is not always made from one before it"
        )
        raise self._error(workers, reason)

    def again(self, workers: int) -> list[Resume]:
        """Return where each worker continues, if all elements must be made again.

        Raises:
            StateError: the state has a different number of workers.
        """
        if not self.counts or workers != self.workers:
            raise self._error(workers, "each worker must make its own elements again")
        return [Resume(count, None, count > 0) for count in self.counts]

    def _error(self, workers: int, reason: str) -> StateError:
        return StateError(
            f"the state was taken with {self.workers} workers, or resumed from another number, and now there are {workers}. "
            f"The elements would differ, because {reason}. Use {self.workers} workers for this epoch."
        )


class Stream(IterDataPipe[Any]):
    """A pipe of the main process that yields the elements of the replicable part of a graph.

    Args:
        workers: number of workers; 0 for this process.
        max_buffered: elements that pipes behind it may have taken and not yet passed on.
        length: called for ``len``.

    Attributes:
        begun: the position where the current epoch began here.
    """

    def __init__(self, workers: int, max_buffered: int, length: Callable[[], int]) -> None:
        self.workers, self._length = workers, length
        self._given: deque[tuple[int, int | None]] = deque(maxlen=max_buffered + 1)  # worker and passed
        self.begin_epoch([], None)

    def begin_epoch(self, epochs: list[ReplicaEpoch], begun: GraphPosition | None) -> None:
        """Set the next epoch: the instructions for each worker, and the position where it resumes, if any."""
        self._epochs = epochs
        self.begun = begun or GraphPosition(self.workers, (0,) * max(1, self.workers), 0, 0, False)
        self._counts = list(self.begun.counts) if self.begun.workers == self.workers else []
        self._count, self.drawn = self.begun.count, self.begun.drawn
        self._given.clear()

    def _give(self, worker: int, passed: int | None) -> None:
        """Count an element that is delivered."""
        self._count += 1
        if self._counts:
            self._counts[worker] += 1
        self._given.append((worker, passed))

    def position(self, count: int) -> GraphPosition:
        """Return the position after ``count`` elements: all that were taken, or fewer if its readers hold some back.

        Only the newest are known one by one. So ``count`` may also be 0, for readers that take all elements again.
        """
        if not count:
            known = self.begun.passed is not None and all(passed is not None for _, passed in self._given)
            return GraphPosition(self.workers, (0,) * len(self._counts), 0, 0 if known else None, self.drawn)
        given, counts = list(self._given), list(self._counts)
        for worker, _ in reversed(given[len(given) - (self._count - count) :]):
            if counts:
                counts[worker] -= 1
        before = given[: len(given) - (self._count - count)]
        passed = before[-1][1] if before else self.begun.passed
        return GraphPosition(self.workers, tuple(counts), count, passed, self.drawn)

    def close(self) -> None:
        """End the processes of the stream."""

    def __len__(self) -> int:
        return self._length()


class LocalStream(Stream):
    """A stream whose elements this process makes."""

    def __init__(self, replica: Replica, max_buffered: int, length: Callable[[], int]) -> None:
        super().__init__(0, max_buffered, length)
        self.datapipe, self._replica = replica.end, replica
        self._saved_rng: tuple[States, States] | None = None
        self._rng_at_start: States | None = None  # of the current epoch

    def begin_epoch(
        self, epochs: list[ReplicaEpoch], begun: GraphPosition | None, rng_states: tuple[States, States] | None = None
    ) -> None:
        """Set the next epoch, and for one that is resumed the result of `rng_states` when the state was taken.

        While elements are made again, the global generators continue from the beginning of the epoch. Afterwards they get the
        states of the moment when the state was taken.
        """
        super().begin_epoch(epochs, begun)
        self._saved_rng, self._rng_at_start = rng_states, None

    def rng_states(self) -> tuple[States, States]:
        """Return the states of this process's global generators when the epoch began, and now."""
        now = rng.states()
        return self._saved_rng or (self._rng_at_start or now, now)

    def __iter__(self) -> Iterator[Any]:
        states, self._saved_rng = self._saved_rng, None
        self._rng_at_start = rng.states() if states is None else states[0]
        (epoch,) = self._epochs
        self._replica.begin(epoch)
        self.datapipe = self._replica.end
        if states is not None and epoch.resume.again:
            self._replica.replaying = partial(_with_rng_states, *states)
        elif states is not None:
            rng.set_rng_state(states[1])
        replica, clock, give = self._replica, self._replica.clock, self._given.append
        for element in replica.iterator:  # few calls per element: no other code is between graph and loop
            replica.count += 1
            self._count += 1
            give((0, None if clock is None else clock.taken))
            yield element

    def position(self, count: int) -> GraphPosition:
        """Return the position after ``count`` elements."""
        if self._counts:
            self._counts = [self._count]
        self.drawn = self.drawn or (self._rng_at_start is not None and self._replica.drawn())
        return super().position(count)


@contextlib.contextmanager
def _with_rng_states(before: States, after: States) -> Iterator[None]:
    rng.set_rng_state(before)
    yield
    rng.set_rng_state(after)
