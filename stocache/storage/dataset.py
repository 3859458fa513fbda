"""Use the samples of a storage, or some of them, as a dataset: `StorageDataset`."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from stocache.errors import DamagedError, DatasetError
from stocache.samples.indices import check_indices
from stocache.samples.spec import RowLayout
from stocache.storage.storage import DataStorage, OnDiskBlockDataStorage
from stocache.system.objects import has_methods, newer_of

TSample = TypeVar("TSample", covariant=True)


class StorageDataset(Dataset[TSample]):
    """The samples of a storage at ``indices``, as a dataset.

    A sample has a *global* index in the storage, and a *local* index in this dataset: local index i is global index
    ``indices[i]``.

    Args:
        storage: is prepared, or will be prepared before the first sample is requested; in that case give ``indices``.
        indices: global indices, a list, range or array. None takes all samples of a storage that has a length. Sorted indices
            keep the samples of a block together, so that a cache in front can admit whole blocks.

    Raises:
        DatasetError: ``indices`` is None, and the storage has no length.
        SampleIndexError: an index is not an integer, or is outside a storage that has a length.

    Source: the article on block storage in PyTorch Lightning.

    Examples:
        >>> storage = prepare(TensorDataset(torch.arange(10)), "numbers", block_size=4, progress=False)
        >>> dataset = StorageDataset(storage, indices=range(5, 10))
        >>> len(dataset), dataset[0]
        (5, (tensor(5),))
    """

    def __init__(self, storage: DataStorage[TSample, Any], indices: Sequence[int] | NDArray[Any] | None = None) -> None:
        self.storage = storage
        length = len(storage) if hasattr(storage, "__len__") else None
        if indices is None:
            if length is None:
                raise DatasetError(f"{type(storage).__name__} has no length. Give the indices of its samples.")
            self.indices: Any = range(length)
        else:
            self.indices = check_indices(indices, 2**62 if length is None else length, "StorageDataset")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.indices)

    def __getitem__(self, idx: int) -> TSample:
        """Return the sample at local index ``idx``. A negative ``idx`` counts from the end.

        Raises:
            IndexError: ``idx`` is outside the dataset.
            DamagedError: the sample has changed since it was written.
        """
        return self.storage.load_sample(int(self.indices[idx]))

    def __getitems__(self, indices: Sequence[int]) -> list[TSample]:
        """Return the samples at local ``indices``. If they are half of one block or more, the block is read once.

        Small samples that follow each other are read together. Else the disk is asked for all of them before the first is read.
        """
        if newer_of(self) is None:  # a subclass has a __getitem__ of its own
            return [self[idx] for idx in indices]
        wanted = [int(self.indices[idx]) for idx in indices]  # global indices
        first, size = wanted[0] if wanted else 0, getattr(self.storage, "block_size", None) or 0
        if len(wanted) > 1 and wanted == list(range(first, first + len(wanted))) and self.reads_blocks:
            return self.storage.load_range(first, first + len(wanted))  # type: ignore[attr-defined,no-any-return]
        load_block = newer_of(self.storage, "load_block", "load_sample")
        are_alike = load_block is not None and newer_of(self.storage, "load_sample", "load_block") is not None
        in_one = are_alike and size and len({idx // size for idx in wanted}) == 1
        if in_one and len(set(wanted)) >= max(2, size // 2, len(wanted)):  # each once: the caller may change them
            with contextlib.suppress(DamagedError):  # perhaps of a different sample
                block: list[TSample] = load_block(first // size)
                return [block[idx % size] for idx in wanted]
        if (prefetch := getattr(self.storage, "prefetch_samples", None)) is not None and len(wanted) > 1:
            prefetch(wanted)
        return [self.storage.load_sample(idx) for idx in wanted]

    def load_encoded(self, indices: Sequence[int], layout: RowLayout | None = None) -> dict[int, Any] | None:
        """Return the bytes of the samples at local ``indices``, all of one block, by index, without making the samples.

        If there is a ``layout``, these are the leaves of rows; else records. A damaged sample is left out.

        Returns:
            None if the samples must be made: they are not rows of this layout, or pickles, or are not made by this class and
            the storage's, but by methods of a subclass.

        Raises:
            Exception: the block cannot be read.
        """
        if not self.reads_blocks:
            return None
        size = self.storage.block_size  # type: ignore[attr-defined]
        block = int(self.indices[indices[0]]) // size
        rows = [int(self.indices[idx]) - block * size for idx in indices]
        found = self.storage.load_encoded(block, rows, layout)  # type: ignore[attr-defined]
        return None if found is None else {idx: found[row] for idx, row in zip(indices, rows, strict=True) if row in found}

    def record_bytes(self) -> NDArray[np.float64] | None:
        """Return about how many bytes the samples of each block take as records, in the order of `block_bounds`.

        If this dataset has a part of a block, the samples of the block count as equally large.

        Returns:
            None as `load_encoded`, but whatever their structures; and if there are no blocks.

        Raises:
            DamagedError: a block cannot be read.
        """
        bounds, storage = self.block_bounds, self.storage
        if bounds is None or not self.reads_blocks or not isinstance(storage, OnDiskBlockDataStorage):
            return None
        blocks = self._blocks[bounds[:-1]]
        sizes = np.array([entry.samples for entry in storage.index.blocks])[blocks]
        nbytes: NDArray[np.float64] = np.array(storage.record_bytes())[blocks] * np.diff(bounds) / sizes
        return nbytes

    @property
    def reads_blocks(self) -> bool:
        """Whether samples are as in the blocks of an `OnDiskBlockDataStorage`: no method that makes them was replaced."""
        return has_methods(self, StorageDataset, "__getitem__", "__getitems__") and has_methods(
            self.storage, OnDiskBlockDataStorage, "load_sample", "load_block", "load_encoded"
        )

    def prefetch_blocks(self, blocks: Iterable[int]) -> None:
        """Have the storage read blocks ahead, if it can. A `BlockSampler` calls it."""
        prefetch = getattr(self.storage, "prefetch_blocks", None)
        if prefetch is not None:
            prefetch(blocks)

    @cached_property
    def block_bounds(self) -> NDArray[np.int64] | None:
        """The local indices at which the blocks begin, and the end of the last block.

        None when the storage has no blocks, or the samples of a block are not next to each other in this dataset.
        """
        if getattr(self.storage, "block_size", None) is None or not len(self.indices):
            return None
        blocks = self._blocks
        begins = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1]))
        if len(np.unique(blocks[begins])) != len(begins):
            return None
        return np.append(begins, len(blocks))

    @property
    def _blocks(self) -> NDArray[np.int64]:
        """The block of each sample."""
        storage: Any = self.storage
        blocks: NDArray[np.int64] = np.asarray(self.indices, dtype=np.int64) // storage.block_size
        return blocks
