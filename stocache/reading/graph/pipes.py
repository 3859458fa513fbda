"""Define DataPipes that reading services need and torch lacks, under torchdata's names if these are free.

They are registered when `stocache.reading` is imported. If torchdata (up to 0.9) is installed, it is imported first, because it
could not be imported later; then its pipes have the names. The reading services accept both.
"""

import contextlib
import importlib
import importlib.util
import os
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory as _pin  # the function of torch's DataLoader
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from stocache.errors import GraphError, WorkerError
from stocache.system.background import Background

DEFAULT_TIMEOUT_S = 30 * 60
_PINNED_AHEAD = 2
_END = object()

if importlib.util.find_spec("torchdata") is not None and importlib.util.find_spec("torchdata.datapipes") is not None:
    with contextlib.suppress(Exception), warnings.catch_warnings():  # its own requirements may be missing
        warnings.simplefilter("ignore")
        importlib.import_module("torchdata.datapipes")

_Pipe = TypeVar("_Pipe", bound=type[Any])


def register(name: str) -> Callable[[_Pipe], _Pipe]:
    """Return a decorator that makes a pipe a method of every pipe, unless the name is taken."""

    def decorate(pipe: _Pipe) -> _Pipe:
        if name not in IterDataPipe.functions:
            IterDataPipe.register_datapipe_as_function(name, pipe)
        return pipe

    return decorate


class InOrder(IterDataPipe[Any]):
    """Iterates a map-style pipe from index 0 to its end."""

    def __init__(self, datapipe: MapDataPipe[Any]) -> None:
        self.datapipe = datapipe

    def __iter__(self) -> Iterator[Any]:
        for idx in range(len(self)):
            yield self.datapipe[idx]

    def __len__(self) -> int:
        return len(self.datapipe)  # raises TypeError if it has no length


class _Threaded(IterDataPipe[Any]):
    """A pipe that takes its elements in advance, in a thread."""

    _ahead: Background | None = None
    _patience_s: float | None = None  # how long to wait for a thread that is busy when it must stop

    @abstractmethod
    def _elements(self) -> Generator[Any, None, None]:
        """Yield the elements; runs in the thread."""

    def _taken_ahead(self, size: int) -> Iterator[Any]:
        """Yield the elements, of which up to ``size`` are taken in advance. An error takes the place of an element."""
        source, pid = self._elements(), os.getpid()
        ahead = self._ahead = Background("stocache-prefetch", idle_s=None, last=source.close)
        ready = deque(ahead.submit(next, source, _END) for _ in range(size))
        try:
            while (element := ready.popleft().result()) is not _END:
                ready.append(ahead.submit(next, source, _END))
                yield element
                if os.getpid() != pid:
                    raise WorkerError(
                        "the process was forked while a prefetching pipe was iterated. Begin a new iteration in the child."
                    )
        finally:
            if self._ahead is ahead:
                self.shutdown()

    def reset(self) -> None:
        """Stop the thread of an earlier iteration."""
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the thread."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop(self._patience_s)

    def pause(self) -> None:
        """Take no more elements until `resume`; return when the thread has paused."""
        if self._ahead is not None:
            self._ahead.hold(True)

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._ahead is not None:
            self._ahead.hold(False)

    def __getstate__(self) -> Any:
        return vars(self) | {"_ahead": None}

    def __del__(self) -> None:
        self.shutdown()


@register("prefetch")
class Prefetcher(_Threaded):
    """Take elements in advance, in a thread (functional name: ``prefetch``).

    Args:
        source_datapipe: the pipe to take from.
        buffer_size: elements that may wait.

    Raises:
        ValueError: ``buffer_size`` is less than 1.
    """

    def __init__(self, source_datapipe: IterDataPipe[Any], buffer_size: int = 10) -> None:
        if buffer_size < 1:
            raise ValueError(f"buffer_size={buffer_size} is less than 1.")
        self.source_datapipe, self.buffer_size = source_datapipe, buffer_size

    def _elements(self) -> Generator[Any, None, None]:
        yield from self.source_datapipe

    def __iter__(self) -> Iterator[Any]:
        yield from self._taken_ahead(self.buffer_size)

    def __len__(self) -> int:
        return len(self.source_datapipe)  # raises TypeError if it has no length


@register("pin_memory")
class PinMemory(Prefetcher):
    """Put the tensors of each element into pinned memory in advance, in a thread (functional name: ``pin_memory``).

    It stays in the main process, also if worker processes run all pipes before it.

    Args:
        source_datapipe: the pipe to take from.
        device: passed to ``pin_memory_fn``; by default the current CUDA device.
        pin_memory_fn: called with an element and the device; by default the function of torch's DataLoader.

    Raises:
        RuntimeError: CUDA is not available.
    """

    def __init__(
        self, source_datapipe: IterDataPipe[Any], device: Any = None, pin_memory_fn: Callable[[Any, Any], object] = _pin
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("pin_memory needs CUDA, and torch.cuda.is_available() is False. Leave the pipe out.")
        super().__init__(source_datapipe, _PINNED_AHEAD)
        self.device = torch.cuda.current_device() if device is None else device
        self.pin_memory_fn = pin_memory_fn

    def _elements(self) -> Generator[Any, None, None]:
        for element in self.source_datapipe:
            yield self.pin_memory_fn(element, None if self.pin_memory_fn is _pin else self.device)

    def is_replicable(self) -> bool:
        """Return False: the main process has the only one."""
        return False


@register("sharding_round_robin_dispatch")
class ShardingRoundRobinDispatcherIterDataPipe(IterDataPipe[Any]):
    """Send the elements of pipes that cannot be replicated to the workers in turn (functional name:
    ``sharding_round_robin_dispatch``).

    With a `MultiProcessingReadingService` one process of its own runs all pipes before this one. With other services this pipe
    has no effect.

    Args:
        source_datapipe: the pipe whose elements are dispatched.
        sharding_group_filter: SHARDING_PRIORITIES.MULTIPROCESSING, or None, which means the same.

    Raises:
        GraphError: ``sharding_group_filter`` is any other group.
    """

    def __init__(self, source_datapipe: IterDataPipe[Any], sharding_group_filter: SHARDING_PRIORITIES | None = None) -> None:
        if sharding_group_filter not in (None, SHARDING_PRIORITIES.MULTIPROCESSING):
            raise GraphError(
                f"sharding_group_filter={sharding_group_filter!r}: elements are dispatched to the workers of one rank. Use "
                f"SHARDING_PRIORITIES.MULTIPROCESSING, and put a sharding_filter before it to divide among ranks."
            )
        self.source_datapipe, self.sharding_group_filter = source_datapipe, sharding_group_filter

    def __iter__(self) -> Iterator[Any]:
        yield from self.source_datapipe

    def __len__(self) -> int:
        return len(self.source_datapipe)


ShardingRoundRobinDispatcher = ShardingRoundRobinDispatcherIterDataPipe


@register("fullsync")
class FullSync(_Threaded):
    """End each epoch on all ranks when the shortest rank ends (functional name: ``fullsync``).

    A rank goes on only after every rank has reported that it has its next element. A thread does this while the last
    element is in use. A rank that leaves its loop early ends the epoch of the others; they do not wait for it.
    `DistributedReadingService` puts this pipe at the end of a graph.

    Args:
        datapipe: the pipe of this rank.
        timeout: seconds to wait for the other ranks.

    Raises:
        RuntimeError: while iterating: torch.distributed is not initialized, or a rank is gone or late.
    """

    _patience_s = 5.0  # other ranks may be late

    def __init__(self, datapipe: IterDataPipe[Any], timeout: int = DEFAULT_TIMEOUT_S) -> None:
        self.datapipe, self.timeout = datapipe, timeout
        self._group: Any = None
        # kept: torch 2.4 hangs when a group ends whose thread is the last to let go of a tensor
        self._vote = torch.tensor(0, dtype=torch.int64, device="cpu")

    def __iter__(self) -> Iterator[Any]:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("fullsync needs torch.distributed. Call init_process_group first, or start with torchrun.")
        if dist.get_world_size() == 1:
            yield from self.datapipe
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        yield from self._taken_ahead(1)

    def _elements(self) -> Generator[Any, None, None]:
        # Every rank votes in every round, until a round in which one rank has no element or leaves. So all ranks vote equally
        # often, whichever leaves when, and no rank waits for a vote that does not come.
        iterator = iter(self.datapipe)
        while True:
            element, has = None, True
            try:
                element = next(iterator)
            except StopIteration:
                has = False
            except BaseException:
                self._all_have(False)
                raise
            if not self._all_have(has):
                return
            try:
                yield element
            except GeneratorExit:
                self._all_have(False)
                raise

    def _all_have(self, one: bool) -> bool:
        self._vote.fill_(one)
        dist.all_reduce(self._vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(self._vote)

    def __len__(self) -> int:
        return len(self.datapipe)  # raises TypeError if it has no length

    def leave(self) -> None:
        """Stop the thread, and leave the group of the ranks."""
        self.shutdown()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def is_replicable(self) -> bool:
        """Return False: the main process has the only one."""
        return False

    def __getstate__(self) -> Any:
        return super().__getstate__() | {"_group": None}


@register("unzip")
class UnZipper(IterDataPipe[Any]):
    """Split elements that are sequences into a pipe for each of their columns (functional name: ``unzip``).

    Args:
        source_datapipe: pipe of sequences.
        sequence_length: columns in each.
        buffer_size: how many elements one of the pipes may be ahead of the slowest; -1 for any number.
        columns_to_skip: columns that get no pipe.

    Returns:
        A list of pipes.

    Raises:
        ValueError: a column to skip does not exist, or all are skipped.
    """

    def __new__(  # type: ignore[misc]  # like torch's fork and demux: a class that returns several pipes
        cls,
        source_datapipe: IterDataPipe[Any],
        sequence_length: int,
        buffer_size: int = 1000,
        columns_to_skip: Sequence[int] | None = None,
    ) -> list[IterDataPipe[Any]]:
        """Return the pipes."""
        skipped = set(columns_to_skip or ())
        if not skipped <= set(range(sequence_length)):
            raise ValueError(f"columns_to_skip={columns_to_skip!r} names columns outside [0, {sequence_length}).")
        columns = [column for column in range(sequence_length) if column not in skipped]
        if not columns:
            raise ValueError("all columns are skipped, so no pipe is left. Keep at least one column.")
        forked = source_datapipe.fork(num_instances=len(columns), buffer_size=buffer_size)
        pipes: Any = [forked] if len(columns) == 1 else forked
        return [pipe.map(itemgetter(column)) for pipe, column in zip(pipes, columns, strict=True)]
