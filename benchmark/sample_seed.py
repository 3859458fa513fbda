"""``DataLoader(sample_seed=17)``: one hash over workers, ranks, caches, batch sizes and restarts; and what that costs.

python -m benchmark sample_seed same    a hash of two epochs over 12 topologies, one of them killed and resumed
python -m benchmark sample_seed cost    CPU microseconds per sample, beside the same loader without sample_seed
"""

import hashlib
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, DistributedSampler

from stocache import CachedDataset, DataLoader, LocalityDistributedSampler, SampleSeed
from stocache.loader.order import EpochIndices
from stocache.loader.sample_seed import SeededDataset

CLAIM = "With sample_seed, augmented samples are the same over all topologies; it costs about 10 us a sample."

COUNT, SLOT, EPOCHS, SEED = 96, 3 * 40 * 40 + 8, 2, 17
SAMPLES, ROUNDS = 4096, 21


# ---------------------------------------------------------------------------------------------------- one hash


class Crop(torch.nn.Module):
    """A random crop and flip, with torch's numbers."""

    def forward(self, image: Any) -> Any:
        """Return the crop."""
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return image.flip(-1) if torch.rand(()) < 0.5 else image.clone()


class Erase(torch.nn.Module):
    """Erases a square, with numpy's numbers."""

    def forward(self, image: Any) -> Any:
        """Return the image, changed."""
        top, left = np.random.randint(0, 25, 2)
        image[:, top : top + 8, left : left + 8] = int(np.random.normal(128, 30))
        return image


class Jitter(torch.nn.Module):
    """Changes brightness, with Python's numbers."""

    def forward(self, image: Any) -> Any:
        """Return a float image."""
        return image.float() * random.uniform(0.5, 1.5) + random.gauss(0, 1)


class Images(Dataset[Any]):
    """Images with random transforms, which `CachedDataset` runs after the cache."""

    def __init__(self) -> None:
        self.transform = torch.nn.Sequential(Crop(), Erase(), Jitter())

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, idx: int) -> Any:
        return self.transform(torch.full((3, 40, 40), idx, dtype=torch.uint8)), idx


class Topology(NamedTuple):
    """Where and how samples are made. ``cached`` is the share of the dataset for which the cache has room; None without one."""

    workers: int = 0
    method: str = "fork"
    persistent: bool = False
    ranks: int = 1
    sampler: str = "shuffled"
    cached: float | None = None
    batch_size: int | None = 8


TOPOLOGIES = (
    Topology(),
    Topology(batch_size=1, sampler="in order"),
    Topology(2, cached=0.5),
    Topology(8, batch_size=32),
    Topology(2, "spawn", persistent=True, cached=1.0),
    Topology(2, "forkserver", cached=0.02),
    Topology(4, persistent=True, ranks=4, sampler="DistributedSampler", cached=1.0),
    Topology(2, ranks=2, sampler="LocalityDistributedSampler", cached=0.5, batch_size=3),
    Topology(0, cached=0.5, batch_size=32),
    Topology(0, cached=1.0, batch_size=None),
    Topology(2, ranks=4, sampler="DistributedSampler", batch_size=5),
    Topology(2, cached=0.5, batch_size=5, sampler="shuffled; killed, then 8 workers"),
)


def loader_of(dataset: Any, topology: Topology, rank: int, cls: Any, **options: Any) -> Any:
    """Return the loader of a rank."""
    sampler: Any = None
    if topology.sampler == "DistributedSampler":
        sampler = DistributedSampler(dataset, topology.ranks, rank)
    elif topology.sampler == "LocalityDistributedSampler":
        size = topology.batch_size or 1
        sampler = LocalityDistributedSampler(dataset, size, num_nodes=1, num_replicas=topology.ranks, rank=rank)
    if topology.workers:
        options |= {"multiprocessing_context": topology.method, "persistent_workers": topology.persistent}
    shuffle = topology.sampler.startswith("shuffled")
    return cls(dataset, topology.batch_size, shuffle, sampler, num_workers=topology.workers, **options)


def note(batch: Any, found: dict[int, bytes]) -> None:
    """Note the digest of each image of a batch."""
    images, labels = batch if isinstance(batch[1], torch.Tensor) else (batch[0][None], [batch[1]])
    for image, label in zip(images, labels, strict=True):
        found[int(label)] = hashlib.sha256(image.numpy()).digest()


def open_dataset(topology: Topology) -> Any:
    """Return the dataset, cached as the topology says."""
    room = 0 if topology.cached is None else int(COUNT * SLOT * topology.cached) + 2000
    return CachedDataset(Images(), f"{room}B") if room else Images()


def digest_of(topology: Topology, cls: Any, **options: Any) -> str:
    """Return one hash of all images of all epochs, over all ranks."""
    dataset, found = open_dataset(topology), [dict[int, bytes]() for _ in range(EPOCHS)]
    if "killed" in topology.sampler:
        path = Path(tempfile.mkdtemp()) / "state"
        victim = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(dataset, topology, path))
        victim.start()
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        found, state = torch.load(path, weights_only=False)
        loader = loader_of(dataset, topology._replace(workers=8), 0, cls, **options)
        loader.load_state_dict(state)
        for batch in loader:
            note(batch, found[1])
    else:
        for rank in range(topology.ranks):
            loader = loader_of(dataset, topology, rank, cls, **options)
            for epoch, its in enumerate(found):
                if isinstance(loader, DataLoader):
                    loader.set_epoch(epoch)
                elif hasattr(loader.sampler, "set_epoch"):
                    loader.sampler.set_epoch(epoch)
                for batch in loader:
                    note(batch, its)
            del loader
    if topology.cached is not None:
        dataset.close()
    assert all(len(its) == COUNT for its in found)
    return hashlib.sha256(b"".join(its[idx] for its in found for idx in range(COUNT))).hexdigest()[:12]


def train_until_killed(dataset: Any, topology: Topology, path: Path) -> None:
    """Save the digests and the state of the loader after each batch, and be killed in the second epoch."""
    loader, found = loader_of(dataset, topology, 0, DataLoader, sample_seed=SEED), [dict[int, bytes]() for _ in range(EPOCHS)]
    for epoch, its in enumerate(found):
        loader.set_epoch(epoch)
        for batch in loader:
            note(batch, its)
            torch.save((found, loader.state_dict()), path)
            if epoch and len(its) > COUNT // 3:
                os.kill(os.getpid(), signal.SIGKILL)


def same() -> None:
    """Print the table of hashes."""
    print("| topology | sample_seed | torch's DataLoader, `torch.manual_seed` |\n| --- | --- | --- |")
    hashes: list[list[str]] = [[], []]
    for topology in TOPOLOGIES:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        row = [digest_of(topology, DataLoader, sample_seed=SEED)]
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        row.append("cannot resume" if "killed" in topology.sampler else digest_of(topology, TorchDataLoader))
        for its, digest in zip(hashes, row, strict=True):
            its.append(digest)
        persistent = ", persistent" * topology.persistent
        workers = f"{topology.workers} workers ({topology.method}{persistent})" if topology.workers else "no workers"
        cached = "no cache" if topology.cached is None else f"{topology.cached:.0%} cached"
        ranks = f"{topology.ranks} rank{'s' * (topology.ranks > 1)}"
        print(
            f"| {workers}, {ranks}, {topology.sampler}, {cached}, batches of {topology.batch_size} | {' | '.join(row)} |",
            flush=True,
        )
    print(f"\n{len(set(hashes[0]))} hash with sample_seed, {len(set(hashes[1]) - {'cannot resume'})} with torch's loader")


# ---------------------------------------------------------------------------------------------------- what it costs


class Numbers(Dataset[Any]):
    """Samples that draw from some of the generators."""

    def __init__(self, draws: int, count: int) -> None:
        self.draws, self.count, self.value = draws, count, torch.zeros(16)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Any:
        if self.draws > 0:
            torch.rand(())
        if self.draws > 1:
            np.random.random_sample()
            random.random()
        return self.value


def cost() -> None:
    """Print the table of costs."""
    print("| in | batch | no generator drawn from | torch's | all three | a sample without sample_seed |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for batch_size in (1, 8, 32, 256):
        show("the main process", batch_size, [loop_times(draws, batch_size) for draws in (0, 1, 3)])
    worker = DataLoader(InWorker(), None, num_workers=1)
    for batch_size, times in zip((1, 8, 32, 256), worker, strict=True):
        show("a worker", batch_size, times)


def show(where: str, batch_size: int, times: list[list[list[float]]]) -> None:
    """Print a row: for each dataset, the median of what sample_seed adds to a sample, in us."""
    extra = [statistics.median(after - before for before, after in zip(*its, strict=True)) * 1e6 for its in times]
    cells = " | ".join(f"{its:.2f}" for its in (*extra, statistics.median(times[0][0]) * 1e6))
    print(f"| {where} | {batch_size} | {cells} |", flush=True)


def loop_times(draws: int, batch_size: int) -> list[list[float]]:
    """Return CPU seconds per sample of loops over the loader, without sample_seed and with it."""
    dataset = Numbers(draws, min(SAMPLES, 512 * batch_size))
    loaders = [DataLoader(dataset, batch_size, sample_seed=seed) for seed in (None, SEED)]
    return alternate([partial(deque, loader, 0) for loader in loaders], len(dataset))


class InWorker(Dataset[Any]):
    """Measures where it is loaded what a worker does for its batches, without the way through the queues."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        indices = list(range((1, 8, 32, 256)[number]))
        return [fetch_times(Numbers(draws, SAMPLES), indices) for draws in (0, 1, 3)]


def fetch_times(dataset: Numbers, indices: list[int]) -> list[list[float]]:
    """Return CPU seconds per sample of making a batch, without sample_seed and with it."""
    seeded, count = SeededDataset(dataset, SampleSeed(SEED), False), max(1, 2048 // len(indices))

    def plain() -> None:
        for _ in range(count):
            [dataset[idx] for idx in indices]

    def with_seeds() -> None:
        for _ in range(count):
            seeded.__getitems__(EpochIndices(0, indices))

    return alternate([plain, with_seeds], count * len(indices))


def alternate(contenders: list[Callable[[], object]], count: int) -> list[list[float]]:
    """Run functions in turn, and return the CPU seconds per sample of each run: others use the machine, too."""
    times: list[list[float]] = [[] for _ in contenders]
    for number in range(ROUNDS + 1):
        turns = list(zip(times, contenders, strict=True))
        for its, contender in turns if number % 2 else turns[::-1]:
            began = time.process_time()
            contender()
            if number:  # the first round warms up
                its.append((time.process_time() - began) / count)
    return times


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This DataLoader will create")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    {"same": same, "cost": cost}[sys.argv[1] if sys.argv[1:] else "same"]()
