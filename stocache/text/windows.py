"""What an epoch over text delivers: buffers in their order, shuffled, cut into batches; and who makes that, ahead of time."""

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from stocache.samples.pytree import leaves, tree_map
from stocache.text.buffers import Buffers, Fault, RowBuffer
from stocache.text.lines import TextChunk
from stocache.text.parsers import joined

_THREADS = 4  # that parse, at most

Shuffle = Literal[False, True, "buffers"]
ShuffleKey = tuple[int, ...]
"""What the order of an epoch follows from, besides the seed: its number."""


class WindowBatches(NamedTuple):
    """The batches of a window, and what had to be left out of it.

    Attributes:
        rows: read for it.
        skipped: of these, lines that were not as they should be.
        fault: the first of them.
        dropped: rows that fill no batch.
    """

    batches: list[Any]
    rows: int
    skipped: int
    fault: Fault | None
    dropped: int


@dataclass
class Windows:
    """The windows of an epoch: so many buffers each, whose rows are shuffled together. Batches do not reach beyond them.

    Attributes:
        buffers: of this rank.
        batch_size: rows in a batch.
        shuffle, window, seed, drop_last: as `StreamLoader` has them.
        transform: called with each batch; None for none.
        rank: whose epoch it is.
        limit: batches of an epoch, where another rank has no more; None where that is not known.
    """

    buffers: Buffers
    batch_size: int
    shuffle: Shuffle
    window: int
    seed: int
    drop_last: bool | Literal["batch"]
    transform: Callable[[Any], Any] | None
    rank: int
    limit: int | None = None

    # ------------------------------------------------------------------------------------------------ which buffers

    def __post_init__(self) -> None:
        self._drawn: Any = None, None  # for which epoch, and which order

    def _generator(self, key: Sequence[int], *more: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key, self.rank, *more])

    def numbers(self, key: Sequence[int], window: int) -> list[int]:
        """Return the numbers of the buffers of a window, some of which may lie beyond the last."""
        lines = self.buffers.lines
        positions = range(window * self.window, (window + 1) * self.window)
        if self.shuffle != "buffers":
            return [lines.first + position * lines.step for position in positions]
        if self._drawn[0] != key:
            full, rest = divmod(self.buffers.total_rows or 0, lines.buffer_size)
            order = self._generator(key).permutation(full)
            self._drawn = key, np.append(order, full) if rest and self.drop_last is not True else order  # last: it is not full
        return [int(number) for number in self._drawn[1][positions.start : positions.stop]]

    def batches_of(self, total_rows: int, first: int) -> int:
        """Return the number of batches of a share of so many rows, if no line is skipped; ``first``: as of its `Lines`."""
        lines = self.buffers.lines
        full, rest = divmod(total_rows, lines.buffer_size)
        batches = len(range(first, full, lines.step)) * (lines.buffer_size // self.batch_size)
        if self.drop_last is not True and full % lines.step == first:
            batches += rest // self.batch_size if self.drop_last else -(-rest // self.batch_size)
        return batches

    def _batches_before(self, window: int) -> int:
        return window * self.window * (self.buffers.lines.buffer_size // self.batch_size)

    # ------------------------------------------------------------------------------------------------ what is delivered

    def fetch(self, key: ShuffleKey, window: int) -> list[tuple[int, RowBuffer | list[TextChunk]]] | None:
        """Return what `deliver` needs of the buffers of a window; None after the last."""
        if self.limit is not None and self._batches_before(window) >= self.limit:
            return None
        numbered = [(number, self.buffers.fetch(number, not self.shuffle)) for number in self.numbers(key, window)]
        return [(number, found) for number, found in numbered if found is not None] or None

    def deliver(self, key: ShuffleKey, window: int, fetched: list[tuple[int, RowBuffer | list[TextChunk]]]) -> WindowBatches:
        """Return the batches of a window; their tensors are nobody else's."""
        buffers = [self.buffers.parse(number, found, not self.shuffle) for number, found in fetched]
        trees = [buffer.arrays for buffer in buffers if buffer.arrays is not None]
        rows, skipped = sum(buffer.rows for buffer in buffers), sum(buffer.skipped for buffer in buffers)
        fault = next((buffer.fault for buffer in buffers if buffer.fault), None)
        batches = self._batches(key, window, joined(trees)) if trees else []
        parsed = sum(len(leaves(tree)[0]) for tree in trees)
        dropped = parsed % self.batch_size if self.drop_last else 0
        if self.limit is not None:
            batches = batches[: self.limit - self._batches_before(window)]
        if self.transform is not None:
            batches = [self.transform(batch) for batch in batches]
        return WindowBatches(batches, rows, skipped, fault, dropped)

    def _batches(self, key: ShuffleKey, window: int, tree: Any) -> list[Any]:
        rows = len(leaves(tree)[0])
        if self.shuffle:
            order = self._generator(key, window).permutation(rows)
            tree = tree_map(lambda array: array.take(order, axis=0), tree)
        if self.drop_last:
            rows -= rows % self.batch_size
        if not rows:
            return []
        parts = iter(
            zip(*[torch.split(torch.from_numpy(array)[:rows], self.batch_size) for array in leaves(tree)], strict=True)
        )
        batches = []
        for part in parts:
            tensors = iter(part)
            batches.append(tree_map(lambda array: next(tensors), tree))  # noqa: B023  called at once
        return batches


# ---------------------------------------------------------------------------------------------------- who makes the windows


Deliveries = Generator[tuple[int, WindowBatches], None, None]


def one_by_one(windows: Windows, key: ShuffleKey, start: int, step: int) -> Deliveries:
    """Yield windows ``start``, ``start + step`` and so on, made in this thread."""
    with contextlib.closing(windows.buffers.lines):
        for number in itertools.count(start, step):
            fetched = windows.fetch(key, number)
            if fetched is None:
                return
            yield number, windows.deliver(key, number, fetched)


def by_threads(windows: Windows, key: ShuffleKey, start: int) -> Deliveries:
    """Yield all windows from ``start`` on: one thread reads ahead, in order, and others parse."""

    def deliver(number: int, fetching: "Future[Any]") -> WindowBatches | None:
        fetched = fetching.result()
        return None if fetched is None else windows.deliver(key, number, fetched)

    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    ahead: deque[tuple[int, Future[WindowBatches | None]]] = deque()
    numbers = itertools.count(start)
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(threads) as parsers:
        try:
            while True:
                while len(ahead) <= threads:
                    number = next(numbers)
                    ahead.append((number, parsers.submit(deliver, number, reader.submit(windows.fetch, key, number))))
                number, future = ahead.popleft()
                delivery = future.result()
                if delivery is None:
                    return
                yield number, delivery
        finally:
            for _, future in ahead:
                future.cancel()


class WorkerShard(IterableDataset[tuple[int, WindowBatches]]):
    """The windows that one worker process makes of each epoch.

    Args:
        epoch: the first one.
        start: the window from which on they are made in it; later ones are made from the beginning.
    """

    def __init__(self, windows: Windows, epoch: int, start: int) -> None:
        self._windows, self._epoch, self._start = windows, epoch, start

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, WindowBatches]]:
        worker = get_worker_info()
        assert worker is not None
        start, self._start = self._start, 0
        yield from one_by_one(self._windows, (self._epoch,), start + worker.id, worker.num_workers)
