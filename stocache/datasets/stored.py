"""Use the samples of a storage, or some of them, as a dataset: `StorageDataset`."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Dataset

from stocache.errors import DatasetError
from stocache.samples.indices import check_indices
from stocache.storage.storage import DataStorage
from stocache.system.deprecation import old_name

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
    """

    def __init__(self, storage: DataStorage[TSample, Any], indices: Sequence[int] | np.ndarray[Any, Any] | None = None) -> None:
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
            DamagedError: the sample is not as it was written.
        """
        return self.storage.load_sample(int(self.indices[idx]))

    def __getitems__(self, indices: Sequence[int]) -> list[TSample]:
        """Return the samples at local ``indices``. If they are half of one block or more, the block is read once."""
        wanted = [int(self.indices[idx]) for idx in indices]  # global indices
        size = getattr(self.storage, "block_size", None)
        if size is None or len(wanted) < max(2, size // 2) or len({idx // size for idx in wanted}) > 1:
            return [self.storage.load_sample(idx) for idx in wanted]
        block: list[TSample] = self.storage.load_block(wanted[0] // size)  # type: ignore[attr-defined]
        return [block[idx % size] for idx in wanted]

    def prefetch_blocks(self, blocks: Iterable[int]) -> None:
        """Have the storage read blocks ahead, if it can. A `BlockSampler` calls it."""
        prefetch = getattr(self.storage, "prefetch_blocks", None)
        if prefetch is not None:
            prefetch(blocks)

    expect = old_name("expect", "prefetch_blocks")

    @cached_property
    def block_bounds(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The local indices at which the blocks begin, and the end of the last block.

        None when the storage has no blocks, or the samples of a block are not next to each other in this dataset.
        """
        size = getattr(self.storage, "block_size", None)
        if size is None or not len(self.indices):
            return None
        blocks = np.asarray(self.indices, dtype=np.int64) // size
        begins = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1]))
        if len(np.unique(blocks[begins])) != len(begins):
            return None
        return np.append(begins, len(blocks))
