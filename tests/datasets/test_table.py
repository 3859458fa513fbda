"""Batches of tables in memory, gathered by columns, are those of torch's DataLoader."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import StackDataset, Subset, TensorDataset, random_split

from stocache import DataLoader
from stocache.datasets.batches.lazy_batch import LazyBatch
from stocache.datasets.lazy import with_lazy_batches
from tests.support.equality import identical

ROWS = 103
DTYPES = torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64


def table(rows=ROWS):
    return TensorDataset(torch.rand(rows, 3), torch.arange(rows), torch.rand(rows, 2, 2) < 0.5)


def arrow(kind, *left_out):
    pytest.importorskip("datasets.arrow_dataset", reason="Hugging Face datasets is not installed")
    import datasets

    values = np.random.default_rng(0).normal(size=(ROWS, 2))
    columns = {"a": values[:, 0], "b": values.astype(np.float32), "n": np.arange(ROWS), "flag": np.arange(ROWS) % 3 == 0}
    columns |= {"pair": np.arange(2 * ROWS).reshape(ROWS, 2).tolist()}
    columns = {name: column for name, column in columns.items() if name not in left_out}
    return datasets.Dataset.from_dict(columns).with_format(kind).select(range(1, ROWS))


TABLES = {
    "dtypes": lambda: TensorDataset(*(torch.randint(0, 2, (ROWS, 2)).to(dtype) for dtype in DTYPES)),
    "a view": lambda: TensorDataset(torch.rand(ROWS, 8)[:, 2:6]),
    "channels_last": lambda: TensorDataset(torch.rand(ROWS, 3, 4, 4).to(memory_format=torch.channels_last)),
    "Subset": lambda: Subset(table(), range(ROWS - 1, 0, -2)),
    "random_split": lambda: random_split(table(), [0.7, 0.3], generator=torch.Generator().manual_seed(1))[0],
    "Hugging Face, numpy": lambda: arrow("numpy", "a"),
}
IN_WORKERS = {"plain": table, "Hugging Face, torch": lambda: arrow("torch")}
WORKERS = [{"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}]


def played(kind, dataset, **options):
    torch.manual_seed(5)
    random.seed(5)
    batches = [batch for _ in range(2) for batch in kind(dataset, batch_size=16, shuffle=True, **options)]
    return batches, torch.rand(2), random.random()


@pytest.mark.parametrize(("name", "options"), [
    *((name, {}) for name in TABLES | IN_WORKERS), *((name, options) for name in IN_WORKERS for options in WORKERS),
])  # fmt: skip
def test_batches_of_a_table_are_those_of_torch(name, options):
    dataset = (TABLES | IN_WORKERS)[name]()
    ours = played(DataLoader, dataset, **options)
    own = {name: value for name, value in options.items() if name != "worker_method"}
    expected = played(TorchLoader, dataset, **own)
    assert isinstance(with_lazy_batches(dataset).__getitems__([3, 1]), LazyBatch)
    assert identical(ours, expected)


class Own(TensorDataset):
    """Makes rows in its own way."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0] + 1


NO_TABLES = {
    "a subclass": lambda: Own(torch.rand(ROWS, 2)),
    "a stack": lambda: StackDataset(table(), table()),
    "gradients": lambda: TensorDataset(torch.rand(ROWS, 2, requires_grad=True)),
    "sparse": lambda: TensorDataset(torch.eye(ROWS).to_sparse()),
    "no rows": lambda: TensorDataset(torch.rand(0, 2)),
    "text": lambda: arrow("torch").add_column("text", ["a"] * (ROWS - 1)),
    "rows of float64 in batches of float32": lambda: arrow("numpy"),
    "without a format": lambda: arrow(None),
}


@pytest.mark.parametrize("make", NO_TABLES.values(), ids=NO_TABLES)
def test_other_tables_are_made_as_torch_makes_them(make):
    assert with_lazy_batches(make()) is None


def test_a_column_may_change_between_batches():
    dataset = table()
    batches = iter(DataLoader(dataset, batch_size=4))
    next(batches)
    dataset.tensors = tuple(torch.ones(ROWS, 1, dtype=torch.int32) for _ in range(3))
    assert [(column.dtype, column.shape) for column in next(batches)] == [(torch.int32, (4, 1))] * 3
    dataset.tensors = dataset.tensors[:2]
    assert len(next(batches)) == 2


@pytest.mark.parametrize("indices", [[0, -1], [-ROWS], [np.int64(3), 2], [torch.tensor(5)]], ids=str)
def test_indices_mean_what_they_mean_to_torch(indices):
    dataset = table()
    found, expected = (iter(kind(dataset, batch_sampler=[indices, [ROWS]])) for kind in (DataLoader, TorchLoader))
    assert identical(next(found), next(expected))
    for batches in (found, expected):
        with pytest.raises(IndexError, match=f"index {ROWS} is out of bounds"):
            next(batches)


def test_a_batch_is_memory_of_its_own_and_a_collate_function_of_the_user_gets_the_rows():
    dataset = table()
    batch = next(iter(DataLoader(dataset, batch_size=ROWS)))
    batch[0][:] = -1
    assert (dataset.tensors[0] >= 0).all()
    assert [type(row) for row in next(iter(DataLoader(dataset, batch_size=3, collate_fn=list)))] == [tuple] * 3
