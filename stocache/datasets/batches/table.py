"""Batches of tables in memory, gathered by whole columns: of torch's TensorDataset, and of Hugging Face's tables of numbers.

NOTE [ Tables ]
    torch makes a batch of a table from one Python tuple for each row, which default_collate stacks. One ``index_select`` of
    each column returns the same bytes. Two rows are made both ways first: a table is gathered only if dtypes, shapes and bytes
    are equal. If a column has a different shape or dtype later, or an index is not the number of a row, the batch is made as
    torch makes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from stocache.cache.columns import as_bytes
from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.datasets.batches.rows import BatchRows
from stocache.datasets.batches.spec import BatchSpec
from stocache.datasets.batches.views import DatasetView
from stocache.samples.indices import as_array, length_of
from stocache.system.objects import get_many_of

_NUMBERS = "int", "uint", "float", "bool"


class LazyTable(DatasetView):
    """A table whose ``__getitems__`` returns a `LazyBatch`; see NOTE [ Tables ].

    Args:
        dataset: the table.
        spec: its batches.
        select: writes rows of the table into tensors of a batch; returns False if it cannot.
    """

    __slots__ = ("_batch_spec", "select")
    is_lazy = True

    def __init__(self, dataset: Any, spec: BatchSpec, select: "Select") -> None:
        self.dataset, self._batch_spec, self.select = dataset, spec, select

    def __reduce__(self) -> Any:
        return LazyTable, (self.dataset, self._batch_spec, self.select)

    def __getitem__(self, idx: Any) -> Any:
        return self.dataset[idx]

    def __getitems__(self, indices: Sequence[Any]) -> LazyBatch:
        """Return the rows ``indices`` as a batch that has read nothing yet."""
        return LazyBatch(self._batch_spec, TableRows(as_array(indices), self))


@dataclass(eq=False)
class TableRows(BatchRows):
    """The samples of a batch of a table.

    Attributes:
        indices: of the rows.
        table: has the rows.
    """

    indices: Any
    table: LazyTable

    @property
    def gathers(self) -> bool:
        """Whether the indices are numbers."""
        return isinstance(self.indices, np.ndarray)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in a collated batch."""
        return len(self.indices) * self.table._batch_spec.row_bytes

    def read(self) -> list[Any]:
        """Return the rows as the dataset makes them."""
        indices = self.indices.tolist() if isinstance(self.indices, np.ndarray) else self.indices
        get_many = get_many_of(self.table.dataset)
        return list(get_many(indices)) if get_many else [self.table.dataset[idx] for idx in indices]

    def fill(self, tensors: list[Tensor]) -> bool:
        """Write the rows into a batch. Return False if they have to be read."""
        return self.table.select(self.indices, tensors)


Select: TypeAlias = Callable[[NDArray[np.int64], list[Tensor]], bool]


def lazy_table(dataset: Any) -> LazyTable | None:
    """Return a view of a table that returns a `LazyBatch`; None if a dataset is no table, or has other batches with torch."""
    select, length = _select_of(dataset), length_of(dataset)
    if select is None or not length:
        return None
    tried = [0, length - 1]
    spec, expected = BatchSpec.collated([dataset[idx] for idx in tried]) or (None, [])
    if spec is None or not expected:
        return None
    tensors = [torch.empty_like(tensor) for tensor in expected]
    if not select(np.array(tried), tensors) or not all(map(_same_bytes, tensors, expected)):
        return None
    return LazyTable(dataset, spec, select)


def _select_of(dataset: Any) -> Select | None:
    """Return the function that writes rows of a table into tensors; None if a dataset is no table."""
    kind = type(dataset)
    if kind is TensorDataset and all(type(tensor) is Tensor for tensor in dataset.tensors):
        return partial(_select_tensors, dataset)
    if kind.__module__ == "datasets.arrow_dataset" and dataset.format["type"] in ("torch", "numpy"):
        return partial(_select_arrow, dataset) if all(map(_has_numbers, dataset.features.values())) else None
    return None


def _has_numbers(feature: Any) -> bool:
    """Return whether a column of Hugging Face's has numbers, or lists of them: others would be decoded, in this process."""
    inner = getattr(feature, "feature", None)
    return _has_numbers(inner) if inner is not None else str(getattr(feature, "dtype", "")).startswith(_NUMBERS)


def _select_tensors(dataset: TensorDataset, indices: NDArray[np.int64], out: list[Tensor]) -> bool:
    index, tensors = torch.from_numpy(indices), dataset.tensors
    if len(tensors) != len(out) or any(own.shape[1:] != made.shape[1:] for own, made in zip(tensors, out, strict=True)):
        return False
    try:
        for own, made in zip(tensors, out, strict=True):
            torch.index_select(own, 0, index, out=made)
    except (RuntimeError, IndexError, TypeError):  # an index outside, a negative one, a dtype that was changed
        return False
    return True


def _select_arrow(dataset: Any, indices: NDArray[np.int64], out: list[Tensor]) -> bool:
    try:
        columns = list(dataset[indices.tolist()].values())
    except (IndexError, TypeError, ValueError):
        return False
    if len(columns) != len(out):
        return False
    for column, made in zip(columns, out, strict=True):
        own = torch.from_numpy(column) if isinstance(column, np.ndarray) and column.dtype.kind in "biuf" else column
        if type(own) is not Tensor or own.shape != made.shape or own.dtype != made.dtype:
            return False
        made.copy_(own)
    return True


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return bool(np.array_equal(as_bytes(one), as_bytes(other)))
