"""Batches on a GPU: from the cache by the GPU itself, from its own memory, from the ring, and from torch's DataLoader.

Run with OMP_WAIT_POLICY=passive.
"""

import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmark.support.datasets import Made
from benchmark.support.datasets import photos as decoded_photos
from benchmark.support.harness import Run, experiment
from stocache import CachedDataset, DataLoader
from stocache.datasets.batches.planned import PlannedBatch

CLAIM = "A GPU reads cached samples of 150 KB at 45 GB/s and of 12 KB at 30 GB/s, with under 50 µs of CPU time for each batch."

SIZES = {"12 KB": 64, "48 KB": 128, "150 KB": 224, "600 KB": 448}  # the side of an image of 3 channels
BATCHES = 256, 1024
GIB = 1 << 30
TORCH = torch.utils.data.DataLoader
OPTIONS: dict[str, Any] = {"shuffle": True, "drop_last": True, "persistent_workers": True}
ALONE = OPTIONS | {"persistent_workers": False, "device": "cuda"}


def rows(images: Tensor) -> Made:
    """Return images in memory, with their numbers as labels."""
    images.share_memory_()
    return Made(len(images), lambda idx: (images[idx], idx))


def random_images(count: int, side: int) -> Tensor:
    """Return images of which no two are equal."""
    words = torch.arange(count * 3 * side * side // 8) * 0x9E3779B97F4A7C1
    return words.view(torch.uint8).view(count, 3, side, side)


def cached(source: Made, gib: float) -> CachedDataset:
    """Return a cached dataset that is filled as far as its limit allows."""
    logging.getLogger("stocache").setLevel(logging.ERROR)
    dataset = CachedDataset(source, gib, share_ranks=False)
    dataset.warm(num_workers=8, progress=False)
    return dataset


def registered(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader after the GPU may read all that is cached."""
    batches = iter(loader)
    next(batches)
    del batches
    if loader._stocache._stage is not None and loader._stocache._stage.gatherer is not None:
        loader._stocache._stage.gatherer.wait()
    return loader


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from loader


def to_device(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches on the GPU, as a training loop moves them."""
    for batch in batches:
        yield [part.to("cuda", non_blocking=True) for part in batch]


def rate(batches: Iterator[Any], seconds: float = 0.8, warm: int = 4) -> float:
    """Return how many batches come in a second. Each is read on the GPU."""
    for _ in range(warm):
        image, _ = next(batches)
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or count < 3:
        image, _ = next(batches)
        assert image.is_cuda
        count += 1
        if count % 4 == 0:
            torch.cuda.current_stream().synchronize()  # a loop that never waits for its GPU would queue without end
    torch.cuda.synchronize()
    return count / (time.perf_counter() - began)


def rate_of(make: Callable[[], Any], row: int, size: int) -> float:
    """Return the GB/s of a new loader."""
    loader = make()
    if getattr(loader, "device", None) is None:
        return rate(to_device(endless(loader))) * size * row / 1e9
    registered(loader)
    return rate(endless(loader)) * size * row / 1e9


@experiment(needs="gpu")
def rates(run: Run) -> None:
    """GB/s for rows and batches of several sizes."""
    table = run.table("row", "batch", "loader", "GB/s")
    for name, side in run.chosen(SIZES).items():
        row, gib = 3 * side * side, run.size(6.0, 1.0)
        with cached(rows(random_images(int(gib * GIB) // row, side)), 1.1 * gib) as dataset:
            for size in BATCHES:
                kept = OPTIONS | {"batch_size": size}
                makers: dict[str, Callable[[], Any]] = {
                    "no workers": partial(DataLoader, dataset, size, **ALONE),
                    "2 threads": partial(DataLoader, dataset, num_workers=2, worker_method="thread", device="cuda", **kept),
                    "2 processes": partial(DataLoader, dataset, num_workers=2, device="cuda", **kept),
                    "ring, 8 workers": partial(DataLoader, dataset, num_workers=8, pin_memory=True, **kept),
                }
                for workers in (2, 8, 16):
                    makers[f"torch, {workers}"] = partial(TORCH, dataset, num_workers=workers, pin_memory=True, **kept)
                speed = run.turns({loader: partial(rate_of, make, row, size) for loader, make in makers.items()}, warm_up=0)
                for loader in speed:
                    table.row(name, size, loader, speed.median(loader))
    table.row(None, None, "bare copy", bare_copy())
    for name, least in (("150 KB", 45), ("12 KB", 30)):
        most = max(table.column("GB/s", row=name, loader="no workers"), default=0)
        run.claim(f"a GPU reads samples of {name} at {least} GB/s", most, least=least)


def bare_copy() -> float:
    """Return the GB/s of copies of 1 GiB of pinned memory."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    there.copy_(host)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * GIB / 1e9 / (time.perf_counter() - began)


@experiment(needs="gpu")
def cpu(run: Run) -> None:
    """CPU microseconds of `next`, beside the calls which none can do without; the loop waits for the GPU now and then."""
    columns = (f"{what}, waiting after {batches}" for batches in ("8 batches", "each") for what in ("mean", "median"))
    table = run.table("row", "batch", "workers", *columns)
    ways: dict[str, dict[str, Any]] = {
        "none": {}, "2 threads": {"num_workers": 2, "worker_method": "thread"}, "2 processes": {"num_workers": 2},
    }  # fmt: skip
    for name, size in (("12 KB", 256), ("12 KB", 1024), ("150 KB", 256)):
        side, gib = SIZES[name], run.size(3.0, 0.5)
        with cached(rows(random_images(int(gib * GIB) // (3 * side * side), side)), 1.1 * gib) as dataset:
            for way, options in ways.items():
                loader = registered(DataLoader(dataset, size, shuffle=True, device="cuda", **options))
                times_of_next(loader, 8)  # torch takes memory of the GPU for the first batches
                table.row(name, size, way, *spent_in_next(loader, run.size(3, 1)))
                del loader
        table.row(name, size, "bare calls", *spent_in_next(BareCalls(size, side), 1))
    medians = table.column("median, waiting after 8 batches", row="12 KB", workers="none")
    run.claim("a batch of 12 KB samples costs 50 µs of CPU time, in the median", max(medians), most=50)


def spent_in_next(loader: Any, epochs: int) -> list[float]:
    """Return the mean and median CPU µs of ``next``, waiting for the GPU after every 8 batches and after each."""
    found = []
    for every in (8, 1):
        spent = [each for _ in range(epochs) for each in times_of_next(loader, every)]
        found += [1e6 * statistics.mean(spent), 1e6 * statistics.median(spent)]
    return found


class BareCalls:
    """Two tensors of a batch, without values: their memory, and that the stream of the step waits for them and keeps them."""

    def __init__(self, size: int, side: int) -> None:
        self._shape = size, 3, side, side

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[list[Tensor]]:
        device, other = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
        copied = other.record_event()
        for _ in range(len(self)):
            with other:
                image = torch.empty(self._shape, dtype=torch.uint8, device=device)
                batch = [image, torch.empty(self._shape[:1], dtype=torch.int64, device=device)]
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copied)
            for tensor in batch:
                tensor.record_stream(stream)
            yield batch


def times_of_next(loader: Any, every: int) -> list[float]:
    """Return the seconds of this thread on a CPU for each batch but the first, waiting for the GPU after each few."""
    batches, found = iter(loader), list[float]()
    next(batches)
    for number in range(len(loader) - 1):
        before = time.thread_time()
        next(batches)
        found.append(time.thread_time() - before)
        if number % every == 0:
            torch.cuda.synchronize()
    return found


def crops(run: Run, count: int) -> Tensor:
    """Return random crops of photographs."""
    paths = run.photos(160)[: run.size(None, 40)]
    images, rng = [image for image, _ in map(decoded_photos(len(paths), paths).make, range(len(paths)))], random.Random(0)
    found = torch.empty((count, 3, 224, 224), dtype=torch.uint8)
    for idx in range(count):
        top, left = rng.randrange(32), rng.randrange(32)
        found[idx] = images[idx % len(images)][:, top : top + 224, left : left + 224]
    return found


class Training:
    """A ResNet-18 in bfloat16."""

    def __init__(self) -> None:
        import torchvision

        self.model = torchvision.models.resnet18().cuda().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, image: Tensor, label: Tensor) -> None:
        """Take a step."""
        with torch.autocast("cuda", torch.bfloat16):
            found = self.model(image.to(memory_format=torch.channels_last).float().div_(255))
            loss = torch.nn.functional.cross_entropy(found, label % 160)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self, batches: Callable[[], Iterator[Any]], every: int) -> float:
        """Return the seconds of a step in the second epoch. ``every``: steps after which it waits, as if it read its loss."""
        for _ in range(2):
            torch.cuda.synchronize()
            began, steps = time.perf_counter(), 0
            for image, label in batches():
                self.step(image, label)
                steps += 1
                if every and steps % every == 0:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps


@experiment(needs="gpu torchvision PIL")
def train(run: Run) -> None:
    """Train a ResNet-18 on photographs in the cache: how long the GPU waits for batches."""
    count, size, training = run.size(20_000, 4_096), 256, Training()
    images = crops(run, count)
    parts = zip(images[: 8 * size].split(size), torch.arange(8 * size).split(size), strict=True)
    resident = [(image.cuda(), label.cuda()) for image, label in parts]  # the same work: a GPU is faster on zeros
    table = run.table("loader", "step, ms", "GPU waits", "step, loss read each time, ms", "then waits")
    with cached(rows(images), 4) as dataset:
        kept = OPTIONS | {"batch_size": size}
        loaders: dict[str, Any] = {
            "device, no workers": DataLoader(dataset, size, **ALONE),
            "device, 2 threads": DataLoader(dataset, device="cuda", num_workers=2, worker_method="thread", **kept),
            "device, 4 processes": DataLoader(dataset, device="cuda", num_workers=4, **kept),
            "stocache, pin_memory, 8 workers": DataLoader(dataset, num_workers=8, pin_memory=True, **kept),
            "torch, pin_memory, 8 workers": TORCH(dataset, num_workers=8, pin_memory=True, **kept),
            "torch, pin_memory, 16 workers": TORCH(dataset, num_workers=16, pin_memory=True, **kept),
        }
        bare = [training.seconds(lambda: itertools.islice(itertools.cycle(resident), count // size), every) for every in (0, 1)]
        table.row("8 batches that stay on the GPU", 1e3 * bare[0], None, 1e3 * bare[1], None)
        stage = registered(loaders["device, no workers"])._stocache._stage
        order = np.random.default_rng(0).permutation(count)

        def gathers_beside() -> Iterator[Any]:
            for at in range(0, count - size + 1, size):
                with stage.cuda.copying():
                    stage.gatherer.gather(PlannedBatch.alone(order[at : at + size]))
                yield resident[at // size % 8]

        def row(name: str, batches: Callable[[], Iterator[Any]]) -> float:
            took = [training.seconds(batches, every) for every in (0, 1)]
            waits = [max(0.0, 1 - least / each) for each, least in zip(took, bare, strict=True)]
            table.row(name, 1e3 * took[0], f"{waits[0]:.1%}", 1e3 * took[1], f"{waits[1]:.1%}")
            return waits[0]

        row("the same, with a gather of a batch beside", gathers_beside)
        waits = []
        for name in list(loaders):
            loader = loaders.pop(name)
            if getattr(loader, "device", None) is None:
                row(name, lambda loader=loader: to_device(iter(loader)))  # type: ignore[misc]
            else:
                waits.append(row(name, registered(loader).__iter__))
            del loader
    run.claim("training waits 2 %", max(waits), most=0.02)


@experiment(rounds=100_000, quick=500, needs="gpu")
def soak(run: Run) -> None:
    """Check on the GPU the values of batches that are copied from the pinned ring by the loop itself, and by ``device``."""
    images, table, all_wrong = random_images(16384, 16), run.table("loader", "batches", "wrong samples"), 0
    weights = torch.arange(1, 3 * 16 * 16 + 1, device="cuda", dtype=torch.float32)

    def sums_of(image: Tensor) -> Tensor:
        return (image.view(len(image), -1).float() * weights).sum(1)

    sums = torch.cat([sums_of(part.cuda()) for part in images.split(4096)])
    ways: dict[str, tuple[dict[str, Any], int]] = {
        "pin_memory": ({"pin_memory": True, "num_workers": 4}, run.rounds // 2),
        "device, processes": ({"device": "cuda", "num_workers": 4}, run.rounds // 4),
        "device": ({"device": "cuda"}, run.rounds // 4),
    }
    with cached(rows(images), 1) as dataset:
        for name, (options, count) in ways.items():
            loader: Any = DataLoader(dataset, 64, shuffle=True, **options)
            wrong, held = torch.zeros((), dtype=torch.int64, device="cuda"), list[Any]()
            for image, label in itertools.islice(endless(loader), count):
                image, label = image.to("cuda", non_blocking=True), label.to("cuda", non_blocking=True)
                found = sums_of(image)
                wrong += (found != sums[label]).sum()
                if random.random() < 0.02:
                    held = [*held, (image, found)][-20:]
                    wrong += sum((sums_of(a) != b).sum() for a, b in held)
            table.row(name, count, int(wrong))
            all_wrong += int(wrong)
            del loader, image, label, held
    run.claim("no sample is wrong", all_wrong == 0)
