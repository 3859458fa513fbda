"""The DataLoader beside torch's: warm epochs over a cache, uncached datasets with transforms, page faults, bytes in queues.

python -m benchmark.loader warm       # everything cached: torch's DataLoader over stocaching, over stocache, and ours
python -m benchmark.loader uncached   # a dataset without a cache, with transforms of each sample
python -m benchmark.loader costs      # minor page faults, bytes through queues, processor time, per batch
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

import stocache
from benchmark.micro import settle
from benchmark.peers import stocaching
from stocache import CachedDataset

BATCH, WORKERS = 256, 2
SMALL, LARGE = (3, 64, 64), (3, 224, 224)


class Images(Dataset[Any]):
    """Random images, or pairs of an image and a label, made anew each time."""

    def __init__(self, samples: int, dims: tuple[int, ...], labels: bool) -> None:
        self.samples, self.dims, self.labels = samples, dims, labels

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> Any:
        image = torch.randint(0, 256, self.dims, dtype=torch.uint8, generator=torch.Generator().manual_seed(idx))
        return (image, idx) if self.labels else image


class OverStocaching(Dataset[Any]):
    """The same, cached with stocaching, as its documentation shows."""

    def __init__(self, source: Images) -> None:
        self.source = source
        nbytes = torch.Size(source.dims).numel() * source.samples
        self.cache = stocaching(2 * nbytes, source.samples, source.dims)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int) -> Any:
        image = self.cache.get_slot(idx)
        if image is None:
            sample = self.source[idx]
            image = sample[0] if self.source.labels else sample
            self.cache.set_slot(idx, image)
        return (image, idx) if self.source.labels else image


def epoch(loader: Iterable[Any]) -> float:
    """Return how long an epoch takes."""
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


WARM_UP = 3  # rounds: until each worker has touched most of the cache, whose pages are mapped into it one by one


def compare(loaders: dict[str, Iterable[Any]], rounds: int) -> dict[str, float]:
    """Run an epoch of each, in turns; return the median seconds of each, without the first rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(WARM_UP + rounds):
        for name, loader in loaders.items():
            took = epoch(loader)
            if number >= WARM_UP:
                seconds[name].append(took)
    return {name: statistics.median(times) for name, times in seconds.items()}


def warm(rounds: int) -> None:
    """Everything cached, shuffled, workers kept from epoch to epoch."""
    print("| samples | torch over stocaching | torch over stocache | ours | ratio to stocaching |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for dims, samples, labels in ((SMALL, 40_960, False), (SMALL, 40_960, True), (LARGE, 8_192, False), (LARGE, 8_192, True)):
        settle(4 * samples * torch.Size(dims).numel())
        source = Images(samples, dims, labels)
        theirs, cached = OverStocaching(source), CachedDataset(source, 4)
        for idx in range(samples):
            theirs[idx]
        cached.warm(progress=False)
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": WORKERS, "persistent_workers": True}
        loaders: dict[str, Iterable[Any]] = {
            "torch over stocaching": torch.utils.data.DataLoader(theirs, **options),
            "torch over stocache": torch.utils.data.DataLoader(cached, **options),
            "ours": stocache.DataLoader(cached, **options),
        }
        took = compare(loaders, rounds)
        rates = " | ".join(f"{samples / seconds:,.0f}/s" for seconds in took.values())
        name = f"{'x'.join(map(str, dims))} uint8{', label' * labels}"
        print(f"| {name} | {rates} | {took['torch over stocaching'] / took['ours']:.2f} |", flush=True)
        del loaders, theirs, cached
        gc.collect()


def main() -> None:
    """Run one of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["warm", "uncached", "costs"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    globals()[arguments.experiment](arguments.rounds)


if __name__ == "__main__":
    main()
