"""The time to wrap a dataset of a million paths, beyond the loading of the samples that are probed.

python -m benchmark wrapping
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from stocache import CachedDataset

CLAIM = "Wrapping a dataset of a million paths takes at most 100 ms beyond the loading of a few samples."

COUNT, ROUNDS = 1_000_000, 9


class Folder(Dataset[Any]):
    """An ImageFolder's list of samples, whose loading costs nothing."""

    def __init__(self, count: int) -> None:
        self.samples = [(f"/data/train/class_{idx % 1000:04d}/image_{idx:08d}.jpg", idx % 1000) for idx in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> Any:
        path, label = self.samples[idx]
        return torch.full((3, 64, 64), len(path), dtype=torch.uint8), label


def main() -> None:
    """Print the table."""
    dataset = Folder(COUNT)
    probed = [0, *np.linspace(0, COUNT - 1, 8).astype(int).tolist()]
    example = dataset[0]
    seconds: dict[str, list[float]] = {"loading the samples of the probe": [], "CachedDataset": [], "with example=": []}
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for idx in probed:
            dataset[idx]
        seconds["loading the samples of the probe"].append(time.perf_counter() - began)
        for name, options in (("CachedDataset", {}), ("with example=", {"example": example})):
            began = time.perf_counter()
            cached = CachedDataset(dataset, 1, **options)  # type: ignore[arg-type]
            seconds[name].append(time.perf_counter() - began)
            cached.close()
    print(f"| {COUNT:,} paths | median | largest |\n| --- | ---: | ---: |")
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times) * 1e3:.1f} ms | {max(times) * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
