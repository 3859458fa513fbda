"""Tables in memory: a loader of TensorDataset beside plain indexing, torch's loader, and Hugging Face's tables.

python -m benchmark tables rates      # microseconds per batch, by bytes of a row and by rows of a batch
python -m benchmark tables scripts    # an epoch of a table of 1,000,000 x 10, and of MNIST's size, as two reports time them
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from benchmark.support.measuring import alternate, run_one
from stocache import DataLoader

CLAIM = "A loader of a TensorDataset has batches of 1,024 rows and more at 0.6 of the rate of indexing; never behind torch."
NEEDS = (("datasets", '-e ".[test]"', "rates"),)

ROW_BYTES, BATCHES = (16, 256, 1024, 4096), (32, 256, 1024, 8192, 65536)
MOST_BYTES, LEAST_BATCHES = 256 << 20, 4


def drawn(batches: Iterable[object], count: int) -> Callable[[], object]:
    """Return a function that takes the first batches of an epoch."""
    return lambda: [None for _ in itertools.islice(batches, count)]


class Indexing:
    """A loop over the same table by hand."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], size: int) -> None:
        self.tensors, self.size = tensors, size

    def __iter__(self) -> Any:
        for rows in torch.randperm(len(self.tensors[0])).split(self.size):
            yield [tensor[rows] for tensor in self.tensors]


def contenders(dataset: TensorDataset, size: int, hugging_face: bool) -> dict[str, Iterable[object]]:
    """Return the loaders of a table, by name."""
    options: dict[str, Any] = {"batch_size": size, "shuffle": True}
    found: dict[str, Iterable[object]] = {
        "indexing": Indexing(dataset.tensors, size),
        "ours": DataLoader(dataset, **options),
        "ours, threads": DataLoader(dataset, **options, num_workers=2, worker_method="thread", persistent_workers=True),
        "torch": TorchLoader(dataset, **options),
    }
    if hugging_face:
        columns = {"x": dataset.tensors[0].numpy(), "y": dataset.tensors[1].numpy()}
        rows: Any = datasets.Dataset.from_dict(columns).with_format("torch")
        found |= {"Hugging Face, ours": DataLoader(rows, **options), "Hugging Face, torch": TorchLoader(rows, **options)}
    return found


def rates(rounds: int) -> None:
    """Print microseconds per batch."""
    print("| bytes of a row | rows of a batch | indexing, µs | ours | ours, threads | torch | indexing / ours | torch / ours |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row_bytes, size in itertools.product(ROW_BYTES, BATCHES):
        rows = max(LEAST_BATCHES * size, min(200_000, MOST_BYTES // row_bytes))
        dataset = TensorDataset(torch.rand(rows, row_bytes // 4), torch.arange(rows))
        count = max(2, min(rows // size, 20_000 // size))  # torch's loader takes seconds for more
        made = contenders(dataset, size, False)
        took = alternate({name: drawn(each, count) for name, each in made.items()}, rounds, count)
        shares = took["indexing"] / took["ours"], took["torch"] / took["ours"]
        cells = " | ".join(f"{took[name] * 1e6:.0f}" for name in made)
        print(f"| {row_bytes} | {size} | {cells} | {shares[0]:.2f} | {shares[1]:.1f} |", flush=True)
    dataset = TensorDataset(torch.rand(100_000, 8), torch.arange(100_000))
    made = contenders(dataset, 1024, True)
    took = alternate({name: drawn(each, 20) for name, each in made.items()}, rounds, 20)
    print("\n32 bytes, batches of 1,024: " + ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in took.items()))


def scripts(rounds: int) -> None:
    """Print seconds per epoch of two tables that were reported as slow: pytorch#106704 and #154318."""
    print("| table | batch | indexing, s | ours | torch | torch / ours |\n|---|---:|---:|---:|---:|---:|")
    for name, shape, size in (("1,000,000 x 10", (1_000_000, 10), 4096), ("60,000 x 784, as MNIST", (60_000, 784), 64)):
        dataset = TensorDataset(torch.rand(shape), torch.zeros(shape[0], dtype=torch.int64))
        made = contenders(dataset, size, False)
        took = alternate({key: drawn(made[key], 10**9) for key in ("indexing", "ours", "torch")}, rounds)
        cells = " | ".join(f"{seconds:.3f}" for seconds in took.values())
        print(f"| {name} | {size} | {cells} | {took['torch'] / took['ours']:.0f} |", flush=True)


if __name__ == "__main__":
    run_one(str(__doc__), {"rates": rates, "scripts": scripts}, rounds=5)
