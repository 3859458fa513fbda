"""Load the samples of a dataset block by block, and write the blocks, in any process."""

import operator
import random
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from stocache.errors import StorageError
from stocache.samples.indices import spread
from stocache.storage.manifest import BlockFolderWriter, Entry
from stocache.storage.skipped import SkippedSample
from stocache.storage.writer import PROBE, estimate_block_size
from stocache.system import generators as rng
from stocache.system.hashing import BytesLike
from stocache.system.loading.children import pack_error
from stocache.system.loading.fallback import in_children_or_here
from stocache.system.objects import attribute_of, newer_of
from stocache.system.on_error import Retry

_LONGEST_REASON = 500  # characters


Result: TypeAlias = Entry | list[SkippedSample]
"""The result for a block: its entry in the index; or, if it is not written, the samples that cannot be loaded."""


class DatasetBlocks:
    """The blocks of a dataset. It can be pickled, so that child processes and clusters load and write them.

    Args:
        dataset: a map-style dataset.
        plan: how it is prepared.
        writer: writes the blocks.
        retry: when samples that failed are loaded again; None for never.
        skip: report the samples that cannot be loaded; without it, the error is raised.
        known: samples that cannot be loaded, by index. They are not loaded to estimate the size of blocks.

    Raises:
        StorageError: ``skip`` is True, and not one sample can be loaded.
    """

    def __init__(
        self,
        dataset: Any,
        plan: dict[str, Any],
        writer: BlockFolderWriter,
        retry: Retry | None,
        skip: bool,
        known: dict[int, SkippedSample],
    ) -> None:
        self.dataset, self._writer, self._retry, self._skip, self._known = dataset, writer, retry, skip, known
        length, seed = len(dataset), plan["shuffle_seed"]
        self._all = np.arange(length) if seed is None else np.random.default_rng(seed).permutation(length)
        self._order = self._all
        self.block_size: int = plan["block_size"]
        if skip or not self.block_size:
            probe = partial(self._probe, plan["block_size"], plan["block_bytes"])
            self.block_size, self._good = next(in_children_or_here(dataset, [probe]))

    def __len__(self) -> int:
        return -(-len(self._order) // self.block_size)

    def leave_out(self, samples: Collection[int]) -> list[int]:
        """Leave exactly these samples out; return the numbers of the blocks that change. See NOTE [ Skipped samples ]."""
        before, blocks, size = self._order, len(self), self.block_size
        skipped = np.isin(self._all, list(samples))
        count = len(self._all) - np.count_nonzero(skipped)
        self._order = self._all[:count].copy()
        self._order[skipped[:count]] = self._all[count:][~skipped[count:]]
        numbers = range(max(blocks, len(self)))
        return [n for n in numbers if not np.array_equal(before[n * size : (n + 1) * size], self._indices(n))]

    def numbers_of(self, samples: Collection[int]) -> set[int]:
        """Return the numbers of the blocks that have one of these samples."""
        return set((np.flatnonzero(np.isin(self._order, list(samples))) // self.block_size).tolist())

    def write(self, number: int) -> tuple[int, Result]:
        """Write a block, and return its number and its result."""
        return self.save(*self._encode(number))

    def write_all(self, numbers: Sequence[int]) -> Iterator[tuple[int, Result]]:
        """Write blocks, and yield the results of `write`. A thread writes a block while the next one is loaded."""
        return in_threads(self.save, map(self._encode, numbers), 1)

    def encode_all(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[bytes], Result]]:
        """Yield arguments of `save` for blocks: their numbers, their files in pieces, and their results."""
        for number, pieces, result in map(self._encode, numbers):
            yield number, list(map(bytes, pieces)), result

    def save(self, number: int, pieces: Sequence[BytesLike], result: Result) -> tuple[int, Result]:
        """Write a block that was encoded, unless samples of it cannot be loaded; return its number and its result."""
        return self._writer.write_encoded(number, pieces, result) if isinstance(result, Entry) else (number, result)

    def _encode(self, number: int) -> tuple[int, list[BytesLike], Result]:
        samples, failures = self._load(number)
        return (number, [], failures) if failures else (number, *self._writer.encode_block(samples, number * self.block_size))

    def _indices(self, number: int) -> NDArray[Any]:
        return self._order[number * self.block_size : (number + 1) * self.block_size]

    def _load(self, number: int) -> tuple[list[Any], list[SkippedSample]]:
        """Return the samples of a block, and the samples that cannot be loaded."""
        indices = self._indices(number).tolist()
        together = newer_of(self.dataset)
        if together is not None:
            try:
                with _seeded(number):
                    return list(together(indices)), []
            except Exception as error:
                if not self._goes_on_after(error) and not (self._retry and self._retry.covers(error)):
                    raise
        with _seeded(number):
            loaded, failures = self._load_each(indices)
            if failures:  # if this one cannot be loaded any more, the error is not about these samples: raise it
                self.dataset[self._good]
        return list(loaded.values()), failures

    def _load_each(self, indices: Iterable[int]) -> tuple[dict[int, Any], list[SkippedSample]]:
        loaded, failures = {}, []
        for idx in indices:
            if idx in self._known:
                failures.append(self._known[idx])
                continue
            try:
                loaded[idx] = self._load_one(idx)
            except Exception as error:
                if not self._goes_on_after(error):
                    raise
                failures.append(
                    SkippedSample(idx, self._name_of(idx), " ".join(pack_error(error)[1].split())[:_LONGEST_REASON])
                )
        return loaded, failures

    def _load_one(self, idx: int) -> Any:
        load = partial(operator.getitem, self.dataset, idx)
        return load() if self._retry is None else self._retry.call(load, rng.Kept().restore)

    def _goes_on_after(self, error: Exception) -> bool:
        return self._skip and not isinstance(error, MemoryError)

    def _name_of(self, idx: int) -> str | None:
        """Return the dataset's name of a sample; None if it has no name."""
        name_of = attribute_of(self.dataset, "describe_sample")
        with suppress(Exception):
            return str(name_of(idx)) if callable(name_of) else None
        return None

    def _probe(self, size: int | None, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the size of blocks, estimated if it is None, and the index of a sample that can be loaded."""
        length = len(self.dataset)
        few = spread(length, 1 if size else PROBE)
        for indices in chain([few], ([idx] for idx in range(length))):
            with _seeded(0):
                loaded, failures = self._load_each(indices)
            if loaded or not length:
                break
        else:
            raise StorageError(
                f"Not one of the {length} samples of the source can be loaded. The last one: {failures[-1].reason}"
            )
        yield size or estimate_block_size(list(loaded.values()), nbytes, self._writer.allow_pickle), next(iter(loaded), 0)


def in_threads(
    write: Callable[..., tuple[int, object]], calls: Iterable[tuple[object, ...]], count: int
) -> Generator[tuple[int, Any], None, None]:
    """Call ``write`` in ``count`` threads, and yield its results in order. Up to ``count`` results wait to be yielded."""
    pending: deque[Future[tuple[int, Any]]] = deque()
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
    with rng.Kept():
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        yield
