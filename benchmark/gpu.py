"""Batches on a GPU: from the cache by the GPU itself, from the ring, and from torch's DataLoader.

Run with OMP_WAIT_POLICY=passive.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmark.support.datasets import Made
from benchmark.support.datasets import photos as decoded_photos
from benchmark.support.harness import Run, experiment
from stocache import CachedDataset, DataLoader

CLAIM = "A GPU reads cached samples of 150 KB at 45 GB/s and of 12 KB at 30 GB/s, with under 50 µs of CPU time for each batch."

SIZES = {"12 KB": 64, "48 KB": 128, "150 KB": 224, "600 KB": 448}  # the side of an image of 3 channels
BATCHES = 256, 1024
GIB = 1 << 30
TORCH = torch.utils.data.DataLoader
OPTIONS: dict[str, Any] = {"shuffle": True, "drop_last": True, "persistent_workers": True}
ALONE = OPTIONS | {"persistent_workers": False, "device": "cuda"}


def random_images(count: int, side: int) -> Tensor:
    """Return images of which no two are equal."""
    words = torch.arange(count * 3 * side * side // 8) * 0x9E3779B97F4A7C1
    return words.view(torch.uint8).view(count, 3, side, side)


def cached(images: Tensor, gib: float) -> CachedDataset:
    """Return images with their numbers as labels, from a cache that is filled as far as its limit allows."""
    images.share_memory_()
    dataset = CachedDataset(Made(len(images), lambda idx: (images[idx], idx)), gib, share_ranks=False)
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


def on_gpu(loader: Any) -> Callable[[], Iterator[Any]]:
    """Return a function that yields an epoch of batches on the GPU: of the loader's own, or moved as a training loop does."""
    if getattr(loader, "device", None) is None:
        return lambda: ([part.to("cuda", non_blocking=True) for part in batch] for batch in loader)
    return registered(loader).__iter__


def endless(epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from epoch()


def rate_of(make: Callable[[], Any], row: int, size: int) -> float:
    """Return the GB/s of a new loader."""
    batches = endless(on_gpu(make()))
    for _ in range(4):
        next(batches)
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.8 or count < 3:
        image, _ = next(batches)
        assert image.is_cuda
        count += 1
        if count % 4 == 0:
            torch.cuda.current_stream().synchronize()  # a loop that never waits for its GPU would queue without end
    torch.cuda.synchronize()
    return count * size * row / 1e9 / (time.perf_counter() - began)


@experiment(needs="gpu")
def rates(run: Run) -> None:
    """GB/s for rows and batches of several sizes."""
    table = run.table("row", "batch", "loader", "GB/s")
    for name, side in run.chosen(SIZES).items():
        row, gib = 3 * side * side, run.size(6.0, 1.0)
        with cached(random_images(int(gib * GIB) // row, side), 1.1 * gib) as dataset:
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
    """CPU microseconds of `next`, while the loop waits for the GPU after every 8 batches."""
    table = run.table("row", "batch", "workers", "mean, µs", "median, µs")
    ways: dict[str, dict[str, Any]] = {
        "none": {}, "2 threads": {"num_workers": 2, "worker_method": "thread"}, "2 processes": {"num_workers": 2},
    }  # fmt: skip
    for name, size in (("12 KB", 256), ("12 KB", 1024), ("150 KB", 256)):
        side, gib = SIZES[name], run.size(3.0, 0.5)
        with cached(random_images(int(gib * GIB) // (3 * side * side), side), 1.1 * gib) as dataset:
            for way, options in ways.items():
                loader = registered(DataLoader(dataset, size, shuffle=True, device="cuda", **options))
                times_of_next(loader)  # torch takes memory of the GPU for the first batches
                spent = [1e6 * each for _ in range(run.size(3, 1)) for each in times_of_next(loader)]
                table.row(name, size, way, statistics.mean(spent), statistics.median(spent))
                del loader
    medians = table.column("median, µs", row="12 KB", workers="none")
    run.claim("a batch of 12 KB samples costs 50 µs of CPU time, in the median", max(medians), most=50)


def times_of_next(loader: Any) -> list[float]:
    """Return the seconds of this thread on a CPU for each batch but the first."""
    batches, found = iter(loader), list[float]()
    next(batches)
    for number in range(len(loader) - 1):
        before = time.thread_time()
        next(batches)
        found.append(time.thread_time() - before)
        if number % 8 == 0:
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

    def seconds(self, batches: Callable[[], Iterator[Any]]) -> float:
        """Return the seconds of a step in the second epoch."""
        for _ in range(2):
            torch.cuda.synchronize()
            began, steps = time.perf_counter(), 0
            for image, label in batches():
                self.step(image, label)
                steps += 1
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps


@experiment(needs="gpu torchvision PIL")
def train(run: Run) -> None:
    """Train a ResNet-18 on photographs in the cache: how long the GPU waits for batches."""
    count, size, training = run.size(20_000, 4_096), 256, Training()
    images = crops(run, count)
    parts = zip(images[: 8 * size].split(size), torch.arange(8 * size).split(size), strict=True)
    resident = [(image.cuda(), label.cuda()) for image, label in parts]  # the same work: a GPU is faster on zeros
    table = run.table("loader", "step, ms", "GPU waits")
    with cached(images, 4) as dataset:
        kept = OPTIONS | {"batch_size": size}
        loaders: dict[str, Any] = {
            "device, no workers": DataLoader(dataset, size, **ALONE),
            "device, 2 threads": DataLoader(dataset, device="cuda", num_workers=2, worker_method="thread", **kept),
            "device, 4 processes": DataLoader(dataset, device="cuda", num_workers=4, **kept),
            "stocache, pin_memory, 8 workers": DataLoader(dataset, num_workers=8, pin_memory=True, **kept),
            "torch, pin_memory, 8 workers": TORCH(dataset, num_workers=8, pin_memory=True, **kept),
            "torch, pin_memory, 16 workers": TORCH(dataset, num_workers=16, pin_memory=True, **kept),
        }
        least = training.seconds(lambda: itertools.islice(itertools.cycle(resident), count // size))
        table.row("8 batches that stay on the GPU", 1e3 * least, None)
        for name in list(loaders):
            took = training.seconds(on_gpu(loaders.pop(name)))
            table.row(name, 1e3 * took, max(0.0, 1 - least / took))
    run.claim("training waits 2 %", max(table.column("GPU waits")[:3]), most=0.02)


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
    with cached(images, 1) as dataset:
        for name, (options, count) in ways.items():
            loader: Any = DataLoader(dataset, 64, shuffle=True, **options)
            wrong, held = torch.zeros((), dtype=torch.int64, device="cuda"), list[Any]()
            for image, label in itertools.islice(endless(loader.__iter__), count):
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
