"""The DataLoader beside torch's: warm epochs over a cache, uncached datasets with transforms, page faults, bytes in queues.

python -m benchmark loader warm                  # all cached: torch's DataLoader over stocaching, over stocache, and ours
python -m benchmark loader uncached [--folder]   # a dataset without a cache, with transforms of each sample
python -m benchmark loader costs                 # minor page faults, bytes through queues, CPU time, per batch
python -m benchmark loader large                 # samples of 200 MB
"""

import argparse
import contextlib
import gc
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import Dataset

import stocache
from benchmark.__main__ import is_missing
from benchmark.support.measuring import settle
from benchmark.support.peers import in_rust, stocaching
from stocache import CachedDataset
from stocache.tools.bench import find_jpegs

CLAIM = "Warm batches come 4 times as fast as through torch's DataLoader; without a cache they are never slower."
NEEDS = (("PIL", '-e ".[bench]"'), ("stocaching", "--no-deps stocaching==0.2.1", "warm", "costs"))

BATCH, WORKERS = 256, 2
SMALL, LARGE = (3, 64, 64), (3, 224, 224)
OPTIONS: dict[str, Any] = {"shuffle": True, "num_workers": WORKERS, "persistent_workers": True}


class Images(Dataset[Any]):
    """Random images, or pairs of an image and a label, created again at each access."""

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


def filled(source: Images) -> tuple[OverStocaching, CachedDataset]:
    """Return both caches of a dataset, with all its samples."""
    theirs, cached = OverStocaching(source), CachedDataset(source, 4)
    for idx in range(len(source)):
        theirs[idx]
    cached.warm(progress=False)
    return theirs, cached


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
    print("| samples | torch over stocaching | torch over stocache, ratio | ours, ratio |")
    print("| --- | ---: | ---: | ---: |")
    for dims, samples, labels in ((SMALL, 81_920, False), (SMALL, 81_920, True), (LARGE, 20_480, False), (LARGE, 20_480, True)):
        settle(4 * samples * torch.Size(dims).numel())
        theirs, cached = filled(Images(samples, dims, labels))
        loaders: dict[str, Iterable[Any]] = {
            "torch over stocaching": torch.utils.data.DataLoader(theirs, BATCH, **OPTIONS),
            "torch over stocache": torch.utils.data.DataLoader(cached, BATCH, **OPTIONS),
            "ours": stocache.DataLoader(cached, BATCH, **OPTIONS),
        }
        took = compare(loaders, rounds)
        theirs_s, *ours_s = took.values()
        rates = " | ".join(f"{samples / seconds:,.0f}/s, {theirs_s / seconds:.2f}" for seconds in ours_s)
        name = f"{'x'.join(map(str, dims))} uint8{', label' * labels}"
        print(f"| {name} | {samples / theirs_s:,.0f}/s | {rates} |", flush=True)
        del loaders, theirs, cached
        gc.collect()


class Transformed(Images):
    """Images through a transform of each sample, as for training: crop, flip, to floats, normalised."""

    def __getitem__(self, idx: int) -> Any:
        image = torch.randint(0, 256, self.dims, dtype=torch.uint8)
        top, left = (int(torch.randint(0, size // 8, ())) for size in self.dims[1:])
        image = image[:, top : top + self.dims[1] * 7 // 8, left : left + self.dims[2] * 7 // 8]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image.float().div_(255).sub_(0.45).div_(0.225), idx


class Photos(Dataset[Any]):
    """Photographs, decoded and resized each time, with a label."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.paths = find_jpegs(folder)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> Any:
        with Image.open(self.paths[idx % len(self.paths)]) as photo:
            photo.draft("RGB", (256, 256))
            pixels = np.array(photo.convert("RGB").resize((224, 224)))
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), idx


class Items(Dataset[Any]):
    """A number, a vector and a name each: they cost nothing to load, so only the loader takes time."""

    def __init__(self, samples: int) -> None:
        self.samples, self.vectors = samples, torch.randn(samples, 32)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> Any:
        return {"vector": self.vectors[idx], "label": idx, "name": str(idx)}


def mixed_up(samples: list[Any]) -> list[torch.Tensor]:
    """Collate as for mixup: default_collate, then new tensors made of its batch."""
    images, labels = torch.utils.data.default_collate(samples)
    return [images.roll(1, 0).mul_(0.3).add_(images, alpha=0.7), labels]


def uncached(rounds: int, folder: Path | None) -> None:
    """No cache: the gain or cost of the ring alone."""
    cases: dict[str, tuple[Dataset[Any], int, Any]] = {
        "3x64x64, transforms": (Transformed(20_480, SMALL, True), BATCH, None),
        "3x224x224, transforms": (Transformed(2_048, LARGE, True), 64, None),
        "the same, mixup as collate_fn": (Transformed(2_048, LARGE, True), 64, mixed_up),
        "a vector, a number, a string": (Items(102_400), BATCH, None),
        "the same, batches of 16": (Items(20_480), 16, None),
        "the same, collate_fn=list": (Items(20_480), BATCH, list),
    }
    if folder is not None:
        cases["photographs, decoded"] = Photos(folder, 640), 64, None
    peers = ["torch"] if is_missing("dataloader_rs") else ["torch", "dataloader-rs"]
    own = ["ours", "ours, threads"]
    names = [*peers, *own, *(f"{mine} to {peer}" for mine, peer in zip(own, peers, strict=False))]
    print(f"| samples | batch | {' | '.join(names)} |\n| --- |{' ---: |' * (1 + len(names))}")
    for name, (dataset, batch, collate_fn) in cases.items():
        options = OPTIONS | {"batch_size": batch, "collate_fn": collate_fn}
        loaders: dict[str, Iterable[Any]] = {"torch": torch.utils.data.DataLoader(dataset, **options)}
        if "dataloader-rs" in peers:
            loaders["dataloader-rs"] = in_rust(dataset, batch, WORKERS, collate_fn)
        loaders["ours"] = stocache.DataLoader(dataset, **options)
        loaders["ours, threads"] = stocache.DataLoader(dataset, **options, worker_method="thread")
        took = compare(loaders, rounds)
        rates = " | ".join(f"{len(dataset) / seconds:,.0f}/s" for seconds in took.values())  # type: ignore[arg-type]
        ratios = " | ".join(f"{took[peer] / took[mine]:.2f}" for mine, peer in zip(own, peers, strict=False))
        print(f"| {name} | {batch} | {rates} | {ratios} |", flush=True)
        del loaders
        gc.collect()


def costs(rounds: int) -> None:
    """The cost of a warm batch of 256 besides its time: in the worker processes, and in the one that iterates."""
    print("| samples | loader | faults per batch, iterating / workers | bytes through queues, to / from workers | CPU ms |")
    print("| --- | --- | ---: | ---: | ---: |")
    for dims, samples in ((SMALL, 16_384), (LARGE, 4_096)):
        theirs, cached = filled(Images(samples, dims, True))
        for name, make, dataset in (
            ("torch over stocaching", torch.utils.data.DataLoader, theirs),
            ("ours", stocache.DataLoader, cached),
        ):
            written = torch.zeros(2, dtype=torch.int64).share_memory_()
            with counted_writes(written):
                loader = make(dataset, BATCH, **OPTIONS)
                for _ in range(20):  # until every worker has touched every page of the cache
                    epoch(loader)
                processes = [psutil.Process(), *psutil.Process().children()]
                before, sent = [usage(process) for process in processes], written.clone()
                for _ in range(rounds):
                    epoch(loader)
                after, sent = [usage(process) for process in processes], written - sent
            batches = rounds * samples // BATCH
            faults = [(now[0] - then[0]) / batches for now, then in zip(after, before, strict=True)]
            cpu_ms = sum(now[1] - then[1] for now, then in zip(after, before, strict=True)) / batches * 1e3
            to, back = (sent / batches).tolist()
            shown = f"{'x'.join(map(str, dims))} | {name} | {faults[0]:.1f} / {sum(faults[1:]):.1f} | {to:.0f} / {back:.0f}"
            print(f"| {shown} | {cpu_ms:.2f} |", flush=True)
            del loader, processes
            gc.collect()
        del theirs, cached


class Volumes(Dataset[Any]):
    """Samples of 200 MB, created again at each access."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> Any:
        return torch.full((200 << 20,), idx, dtype=torch.uint8), idx


def large(rounds: int) -> None:
    """Samples of 200 MB: in batches of 1, 2 and 4 without a cache, and in batches of 1 from a filled one."""
    print("| samples of 200 MB | torch | ours | ratio |\n| --- | ---: | ---: | ---: |")
    with CachedDataset(Volumes(24), 6) as cached:
        cached.warm(progress=False)
        for name, dataset, batch in (
            ("16, batches of 1", Volumes(16), 1),
            ("24, batches of 2", Volumes(24), 2),
            ("16, batches of 4", Volumes(16), 4),
            ("24 from the cache, batches of 1", cached, 1),
        ):
            seconds: dict[Any, list[float]] = {torch.utils.data.DataLoader: [], stocache.DataLoader: []}
            for _ in range(rounds):
                for make, times in seconds.items():
                    times.append(epoch(make(dataset, batch, num_workers=WORKERS)))
                    gc.collect()
            theirs, ours = map(statistics.median, seconds.values())
            print(f"| {name} | {theirs:.1f} s | {ours:.1f} s | {theirs / ours:.2f} |", flush=True)


def usage(process: psutil.Process) -> tuple[int, float]:
    """Return the minor page faults of a process so far, and its CPU time in seconds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    times = process.cpu_times()
    return int(fields[7]), times.user + times.system


@contextlib.contextmanager
def counted_writes(written: torch.Tensor) -> Iterator[None]:
    """Count the bytes in the pipes of multiprocessing's queues: ``written[0]`` by this process, ``[1]`` by forked ones."""
    write, parent = Connection._send_bytes, os.getpid()

    def counting(self: Any, data: Any) -> None:
        written[int(os.getpid() != parent)] += len(data)
        write(self, data)

    with mock.patch.object(Connection, "_send_bytes", counting):
        yield


def main() -> None:
    """Run one of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["warm", "uncached", "costs", "large"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="of photographs, for uncached")
    arguments = parser.parse_args()
    if arguments.experiment == "uncached":
        uncached(arguments.rounds, arguments.folder)
    else:
        {"warm": warm, "costs": costs, "large": large}[arguments.experiment](arguments.rounds)


if __name__ == "__main__":
    main()
