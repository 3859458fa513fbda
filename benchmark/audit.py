"""What the audit finds, and what it costs: kinds of samples that depend on more than their index, with several loaders.

    python -m benchmark audit               # wrong samples of three epochs, by kind and loader
    python -m benchmark audit --cost        # epochs over cheap and dear samples, with the audit and without

A sample is wrong if it differs from that of the dataset without a cache, in the same loader, with the same seeds. Where the
samples of two runs cannot be the same (the time, ``os.urandom``), an epoch that repeats another counts as wrong. The kinds are
those of tests/support/depending.py. Worker threads draw in no fixed order, so kinds that draw are left out there.
"""

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import stocache
from stocache import CachedDataset
from tests.support.depending import KINDS, Kind
from tests.support.epochs import LOADERS
from tests.support.epochs import epochs as epochs_of

CLAIM = "A sample that depends on more than its index is found before a wrong batch is handed over, for 1 % of the time."


def epochs(kind: Kind, dataset: Any, inner: Any, loader: str) -> list[list[str]]:
    """Return descriptions of the samples of each epoch."""
    return [list(map(repr, epoch.samples)) for epoch in epochs_of(dataset, loader, 8, inner, kind.change)]


def wrong(name: str, loader: str, **options: Any) -> str:
    """Return how many samples are wrong, and whether the cache was still served."""
    kind = KINDS[name]
    if "threads" in loader and (kind.change is None or "split" in name or name in ("transform set", "transform in place")):
        return ""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plain, inner = kind.make(Path(one)), kind.make(Path(other))
        expected = epochs(kind, plain, plain, loader)
        with CachedDataset(inner, 1, **dict(kind.options) | options) as cached:
            found = epochs(kind, cached, inner, loader)
            served = "" if cached._audit.changed else ", cached"
    if kind.repeats is False:
        return f"{sum(sorted(found[0]) == sorted(epoch) for epoch in found[1:]) * len(found[0])}{served}"
    if kind.repeats is None:
        found, expected = [sorted(epoch) for epoch in found], [sorted(epoch) for epoch in expected]
    pairs = zip((each for epoch in found for each in epoch), (each for epoch in expected for each in epoch), strict=True)
    return f"{sum(one != other for one, other in pairs)}{served}"


class Timed(Dataset[Any]):
    """Samples that take some time."""

    def __init__(self, cost_s: float, count: int) -> None:
        self.cost_s, self.count = cost_s, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> torch.Tensor:
        if self.cost_s > 0.001:
            time.sleep(self.cost_s)
        else:
            began = time.perf_counter()
            while time.perf_counter() - began < self.cost_s:
                pass
        return torch.full((3, 16, 16), idx % 251, dtype=torch.uint8)


def cost(cost_s: float, count: int, epochs: int, repeats: int) -> None:
    """Print a row: the median seconds of a warm epoch, and the loads of the audit in it."""
    seconds: dict[float, list[float]] = {0: [], 0.01: []}
    loads: dict[float, list[int]] = {0: [], 0.01: []}
    for _ in range(repeats):
        for audit in seconds:
            source = Timed(cost_s, count)
            with CachedDataset(source, 1, audit=audit, example=source[0]) as cached:
                batches = stocache.DataLoader(cached, 64, shuffle=True)
                list(batches)
                for _ in range(epochs):
                    before, began = cached.stats().compared, time.perf_counter()
                    list(batches)
                    seconds[audit].append(time.perf_counter() - began)
                    loads[audit].append(cached.stats().compared - before)
    without, with_it = (statistics.median(each) for each in seconds.values())
    print(
        f"| {cost_s * 1e6:.0f} µs | {count} | {count * cost_s:.1f} s | {without * 1000:.1f} ms | {with_it * 1000:.1f} ms | "
        f"{statistics.median(loads[0.01]):.0f} |"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    options = parser.parse_args()
    logging.getLogger("stocache").setLevel(logging.ERROR)
    if options.cost:
        print("| a sample | samples | uncached epoch | warm epoch without the audit | with it | loads of the audit |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        for cost_s, count in ((20e-6, 100_000), (2e-3, 10_000), (20e-3, 200)):
            cost(cost_s, count, 5, 3)
        return
    loaders = [name for name in LOADERS if name != "ours, thread"]
    print(f"| kind | {' | '.join(loaders)} |\n| --- {'| ---: ' * len(loaders)}|")
    for name in options.kinds:
        print(f"| {name} | {' | '.join(wrong(name, loader) for loader in loaders)} |", flush=True)


if __name__ == "__main__":
    main()
