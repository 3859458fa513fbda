"""Tables in memory: a loader of TensorDataset beside plain indexing and torch's loader."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from benchmark.support.harness import Run, experiment
from stocache import DataLoader

CLAIM = "A loader of a TensorDataset has batches of 1,024 rows and more at 0.6 of the rate of indexing; never behind torch."


class Indexing:
    """A loop over the same table by hand."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], size: int) -> None:
        self.tensors, self.size = tensors, size

    def __iter__(self) -> Iterator[Any]:
        for rows in torch.randperm(len(self.tensors[0])).split(self.size):
            yield [tensor[rows] for tensor in self.tensors]


def contenders(dataset: TensorDataset, size: int, count: int | None = None) -> dict[str, Callable[[], object]]:
    """Return functions that take the first batches of an epoch from each loader of a table."""
    options: dict[str, Any] = {"batch_size": size, "shuffle": True}
    loaders: dict[str, Iterable[object]] = {
        "indexing": Indexing(dataset.tensors, size),
        "ours": DataLoader(dataset, **options),
        "ours, threads": DataLoader(dataset, **options, num_workers=2, worker_method="thread", persistent_workers=True),
        "torch": TorchLoader(dataset, **options),
    }
    return {name: lambda each=each: deque(itertools.islice(each, count), 0) for name, each in loaders.items()}


@experiment(rounds=5)
def rates(run: Run) -> None:
    """Microseconds per batch, by bytes of a row and by rows of a batch."""
    loaders, sizes = ("indexing, µs", "ours", "ours, threads", "torch"), run.size((32, 256, 1024, 8192, 65536), (32, 1024))
    table = run.table("bytes of a row", "rows", *loaders, "indexing / ours", "torch / ours")
    for row_bytes, size in itertools.product((16, 256, 1024, 4096), sizes):
        rows = max(4 * size, min(200_000, 256 * 2**20 // row_bytes))
        dataset = TensorDataset(torch.rand(rows, row_bytes // 4), torch.arange(rows))
        count = max(2, min(rows // size, 20_000 // size))  # torch's loader takes seconds for more
        took = run.turns(contenders(dataset, size, count), calls=count)
        times = (1e6 * took.median(name) for name in took)
        table.row(row_bytes, size, *times, took.ratio("indexing", "ours"), took.ratio("torch", "ours"))
    large = [ratio for size in sizes if size >= 1024 for ratio in table.column("indexing / ours", rows=size)]
    run.claim("batches of 1,024 rows and more come at 0.6 of the rate of indexing", min(large), least=0.6)
    run.claim("no batch comes slower than through torch", min(table.column("torch / ours")), least=1)


@experiment(rounds=5)
def scripts(run: Run) -> None:
    """Seconds per epoch of two tables that were reported as slow: pytorch#106704 and #154318."""
    table = run.table("table", "batch", "indexing, s", "ours", "ours, threads", "torch", "torch / ours")
    for name, shape, size in (("1,000,000 x 10", (1_000_000, 10), 4096), ("60,000 x 784, as MNIST", (60_000, 784), 64)):
        rows = shape[0] // run.size(1, 10)
        took = run.turns(contenders(TensorDataset(torch.rand(rows, shape[1]), torch.zeros(rows, dtype=torch.int64)), size))
        table.row(name, size, *map(took.median, took), took.ratio("torch", "ours"))
