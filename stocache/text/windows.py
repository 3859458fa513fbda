"""Make the batches of an epoch out of windows of buffers, in this thread or in others."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from stocache.samples.containers import leaves, tree_map
from stocache.system.background import Background
from stocache.system.platform import here
from stocache.text.buffers import Buffers, Fault, RowBuffer
from stocache.text.lines import TextChunk
from stocache.text.parsers import join_trees

_MAX_THREADS = 4  # that parse

Shuffle = Literal[False, True, "buffers"]
ShuffleKey = tuple[int, ...]
"""The epoch's number, or torch's seed and the number. The order depends on this key and the loader's seed."""

Fetched = list[tuple[int, RowBuffer | list[TextChunk]]]
"""The buffers of a window by their numbers, parsed or as text."""


class WindowBatches(NamedTuple):
    """The batches of a window, and counts of its rows.

    Attributes:
        rows: number of rows that were read.
        skipped: number of bad ones among them.
        fault: the first bad one.
        dropped: number of good ones that do not fill a batch.
    """

    batches: list[Any]
    rows: int
    skipped: int
    fault: Fault | None
    dropped: int


@dataclass
class Windows:
    """The windows of an epoch. A window is a few buffers whose rows are shuffled together; a batch lies in one window.

    Attributes:
        buffers: of this rank.
        batch_size: rows in a batch.
        shuffle, window, seed, drop_last: as for `StreamLoader`.
        transform: called with each batch; None delivers batches unchanged.
        rank: part of the seed.
        limit: number of batches in an epoch, if the ranks were counted; None delivers all.
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

    def __post_init__(self) -> None:
        self._order: Any = None, None  # the key of an epoch, and the order of its buffers

    def _generator(self, key: Sequence[int], *more: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key, self.rank, *more])

    def numbers(self, key: Sequence[int], window: int) -> list[int]:
        """Return the numbers of the buffers in a window. Some may lie beyond the last buffer."""
        lines = self.buffers.lines
        positions = range(window * self.window, (window + 1) * self.window)
        if self.shuffle != "buffers":
            return [lines.first + position * lines.step for position in positions]
        if self._order[0] != key:
            full, rest = divmod(self.buffers.total_rows or 0, lines.buffer_size)
            order = self._generator(key).permutation(full)
            keeps_rest = rest and self.drop_last is not True
            self._order = key, np.append(order, full) if keeps_rest else order  # the buffer that is not full comes last
        return [int(number) for number in self._order[1][positions.start : positions.stop]]

    def batches_of(self, total_rows: int, first: int) -> int:
        """Return the number of batches in a share of rows if no line is skipped; ``first`` is the first row of its `Lines`."""
        lines = self.buffers.lines
        full, rest = divmod(total_rows, lines.buffer_size)
        batches = len(range(first, full, lines.step)) * (lines.buffer_size // self.batch_size)
        if self.drop_last is not True and full % lines.step == first:
            batches += rest // self.batch_size if self.drop_last else -(-rest // self.batch_size)
        return batches

    def _batches_before(self, window: int) -> int:
        return window * self.window * (self.buffers.lines.buffer_size // self.batch_size)

    def fetch(self, key: ShuffleKey, window: int) -> Fetched | None:
        """Return the buffers of a window, as text if they are not cached; None after the last window."""
        if self.limit is not None and self._batches_before(window) >= self.limit:
            return None
        numbered = [(number, self.buffers.fetch(number, not self.shuffle)) for number in self.numbers(key, window)]
        return [(number, found) for number, found in numbered if found is not None] or None

    def deliver(self, key: ShuffleKey, window: int, fetched: Fetched) -> WindowBatches:
        """Return the batches of a window that was fetched. Their tensors share no memory with the cache."""
        buffers = [self.buffers.parse(number, found, not self.shuffle) for number, found in fetched]
        trees = [buffer.arrays for buffer in buffers if buffer.arrays is not None]
        rows, skipped = sum(buffer.rows for buffer in buffers), sum(buffer.skipped for buffer in buffers)
        fault = next((buffer.fault for buffer in buffers if buffer.fault), None)
        batches = self._batches(key, window, join_trees(trees)) if trees else []
        parsed = sum(len(leaves(tree)[0]) for tree in trees)
        dropped = parsed % self.batch_size if self.drop_last else 0
        if self.limit is not None:
            batches = batches[: self.limit - self._batches_before(window)]
        if self.transform is not None:
            batches = [self.transform(batch) for batch in batches]
        return WindowBatches(batches, rows, skipped, fault, dropped)

    def _batches(self, key: ShuffleKey, window: int, tree: object) -> list[Any]:
        rows = len(leaves(tree)[0])
        if self.shuffle:
            order = self._generator(key, window).permutation(rows)
            tree = tree_map(lambda array: array.take(order, axis=0), tree)
        if self.drop_last:
            rows -= rows % self.batch_size
        if not rows:
            return []
        columns = [torch.split(torch.from_numpy(array)[:rows], self.batch_size) for array in leaves(tree)]
        batches = []
        for part in zip(*columns, strict=True):
            tensors = iter(part)
            batches.append(tree_map(lambda array: next(tensors), tree))  # noqa: B023  called at once
        return batches


Deliveries = Generator[tuple[int, WindowBatches], None, None]


def one_by_one(windows: Windows, key: ShuffleKey, start: int, step: int) -> Deliveries:
    """Yield windows ``start``, ``start + step`` and so on. This thread makes them."""
    for number in itertools.count(start, step):
        fetched = windows.fetch(key, number)
        if fetched is None:
            return
        yield number, windows.deliver(key, number, fetched)


def by_threads(windows: Windows, key: ShuffleKey, start: int) -> Deliveries:
    """Yield all windows from ``start`` on. One thread reads ahead, in order, and others parse.

    If no thread can be started any more, this thread does their work.
    """

    def deliver(number: int, fetching: "Future[Any]") -> WindowBatches | None:
        fetched = fetching.result()
        return None if fetched is None else windows.deliver(key, number, fetched)

    threads = min(_MAX_THREADS, here.usable_cpus())
    reader, *parsers = (Background("stocache-text") for _ in range(1 + threads))
    ahead: deque[Future[WindowBatches | None]] = deque()
    try:
        for number in itertools.count(start):
            while len(ahead) <= threads:
                following = number + len(ahead)
                fetching = reader.submit(windows.fetch, key, following)
                ahead.append(parsers[following % threads].submit(deliver, following, fetching))
            delivery = ahead.popleft().result()
            if delivery is None:
                return
            yield number, delivery
    finally:
        for thread in (reader, *parsers):
            thread.stop()
        for thread in (reader, *parsers):
            thread.stop(None)
