"""Load the samples of a dataset block by block, and write the blocks, in any process."""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from stocache.samples.indices import spread
from stocache.storage.manifest import BlockFolderWriter, Entry
from stocache.storage.writer import PROBE, estimate_block_size
from stocache.system import rng
from stocache.system.children import in_children_or_here
from stocache.system.hashing import BytesLike


class DatasetBlocks:
    """The blocks of a dataset. Pickles, so that child processes and clusters load and write them."""

    def __init__(self, dataset: Any, plan: dict[str, Any], writer: BlockFolderWriter) -> None:
        self.dataset, self._writer = dataset, writer
        length, seed = len(dataset), plan["shuffle_seed"]
        self._order = np.arange(length) if seed is None else np.random.default_rng(seed).permutation(length)
        self.block_size: int = plan["block_size"] or next(
            in_children_or_here(dataset, [partial(_estimate_block_size, dataset, plan["block_bytes"], writer.allow_pickle)])
        )

    def __len__(self) -> int:
        return -(-len(self._order) // self.block_size)

    def write(self, number: int) -> tuple[int, Entry]:
        """Write a block, and return its number and its entry in the index."""
        return self._writer.write_encoded(*self._encode(number))

    def write_all(self, numbers: Sequence[int]) -> Iterator[tuple[int, Entry]]:
        """Write blocks, and yield their numbers and entries. A thread writes a block while the next one is loaded."""
        return in_threads(self._writer.write_encoded, map(self._encode, numbers), 1)

    def encode_all(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[bytes], Entry]]:
        """Yield the numbers of blocks, their files in pieces, and their entries in the index."""
        for number, pieces, entry in map(self._encode, numbers):
            yield number, list(map(bytes, pieces)), entry

    def _encode(self, number: int) -> tuple[int, list[BytesLike], Entry]:
        return number, *self._writer.encode_block(self._load(number), number * self.block_size)

    def _load(self, number: int) -> list[Any]:
        indices = self._order[number * self.block_size : (number + 1) * self.block_size].tolist()
        together = getattr(self.dataset, "__getitems__", None)
        with _seeded(number):
            return list(together(indices)) if together is not None else [self.dataset[idx] for idx in indices]


def in_threads(
    write: Callable[..., tuple[int, Entry]], calls: Iterable[tuple[Any, ...]], count: int
) -> Generator[tuple[int, Entry], None, None]:
    """Call ``write`` in so many threads, and yield its results in order. A few more calls are taken while threads write."""
    pending: deque[Future[tuple[int, Entry]]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for call in calls:
            pending.append(pool.submit(write, *call))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seed the random generators with the number of a block, and restore their states afterwards."""
    with rng.preserve_rng_state():
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        yield


def _estimate_block_size(dataset: Any, block_bytes: int, allow_pickle: bool) -> Iterator[int]:
    """Yield how many samples like some of the dataset make a block."""
    with _seeded(0):
        samples = [dataset[idx] for idx in spread(len(dataset), PROBE)]
    yield estimate_block_size(samples, block_bytes, allow_pickle)
