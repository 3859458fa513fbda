"""Batches on a GPU: from the cache by the GPU itself, from its own memory, from the ring, and from torch's DataLoader.

OMP_WAIT_POLICY=passive python -m benchmark gpu copies | rates [--row "12 KB"] | cpu | train PHOTOS | equal | soak
"""

import argparse
import ctypes
import itertools
import logging
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmark.support.measuring import machine
from stocache import CachedDataset, DataLoader
from stocache.datasets.batches.planned import PlannedBatch
from stocache.loader.device import kernels
from stocache.loader.device.cuda import Cuda

CLAIM = "A GPU reads cached samples of 150 KB at 45 GB/s and of 12 KB at 30 GB/s, with under 50 µs of CPU time for each batch."

SIZES = {"12 KB": 64, "48 KB": 128, "150 KB": 224, "600 KB": 448}  # the side of an image of 3 channels
BATCHES = 256, 1024
PEERS = 2, 8, 16  # workers
GIB = 1 << 30
EPOCHS = 3  # of the CPU time, of 3 GiB each


class Rows(Dataset[Any]):
    """Images in memory, with their numbers as labels."""

    def __init__(self, images: Tensor) -> None:
        self.images = images.share_memory_()

    @classmethod
    def random(cls, count: int, side: int) -> "Rows":
        """Return images of which no two are equal."""
        words = torch.arange(count * 3 * side * side // 8) * 0x9E3779B97F4A7C1
        return cls(words.view(torch.uint8).view(count, 3, side, side))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        return self.images[idx], idx


def cached(source: Rows, gib: float) -> CachedDataset:
    """Return a cached dataset that is filled as far as its limit allows."""
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


def rates(sizes: list[str], peers: bool = True) -> None:
    """Print GB/s and samples/s for rows and batches of several sizes."""
    print("| row | batch | GPU from the cache | … with 2 threads | … 2 processes | from `device_limit_gib` "
          "| ring, 8 workers | torch, pinned, 2 | 8 | 16 workers | bare copy |\n|" + " --- |" * 11)  # fmt: skip
    limit = bare_copy()
    for name in sizes or SIZES:
        side = SIZES[name]
        row = 3 * side * side
        source = Rows.random(6 * GIB // row, side)
        with cached(source, 6.6) as dataset:
            for size in BATCHES:
                options: dict[str, Any] = {"batch_size": size, "shuffle": True, "drop_last": True, "persistent_workers": True}
                device = options | {"device": "cuda"}
                loaders: list[Callable[[], Any]] = [
                    partial(DataLoader, dataset, **device | {"persistent_workers": False}),
                    partial(DataLoader, dataset, num_workers=2, worker_method="thread", **device),
                    partial(DataLoader, dataset, num_workers=2, **device),
                    partial(DataLoader, dataset, device_limit_gib=8, **device | {"persistent_workers": False}),
                    partial(DataLoader, dataset, num_workers=8, pin_memory=True, **options),
                ]
                loaders += [
                    partial(torch.utils.data.DataLoader, dataset, num_workers=workers, pin_memory=True, **options)
                    for workers in PEERS
                ]
                cells = []
                for make in loaders if peers else loaders[:4]:
                    loader = make()
                    if isinstance(loader, DataLoader) and loader.device is not None:
                        registered(loader)
                        if loader.device_limit_gib:
                            for _ in range(2):
                                list(itertools.islice(loader, len(loader)))
                        batches = endless(loader)
                    else:
                        batches = to_device(endless(loader))
                    found = rate(batches)
                    cells.append(f"{found * size * row / 1e9:.1f} GB/s, {found * size:,.0f}/s")
                    del batches, loader
                print(f"| {name} | {size} | {' | '.join(cells)} | {limit:.1f} GB/s |", flush=True)
        del source


def bare_copy() -> float:
    """Return the GB/s of one copy of 1 GiB of pinned memory."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    return GIB / 1e9 / seconds_of(partial(there.copy_, host, non_blocking=True))


def seconds_of(function: Callable[[], object], rounds: int = 9) -> float:
    """Return the median seconds of the GPU for a function, on the current stream."""
    found = []
    for number in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        if number > 1:
            found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint)]


def batched_copies(sources: Any, out: Tensor, nbytes: int) -> None:
    """Copy rows of host memory by one call of cudaMemcpyBatchAsync (CUDA 13): one copy of the copy engine for each row."""
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line)
    count, first = len(sources), ctypes.c_size_t(0)
    targets = np.arange(count, dtype=np.uint64) * np.uint64(nbytes) + np.uint64(out.data_ptr())
    sizes, attributes = np.full(count, nbytes, np.uint64), _Attributes(3, _Location(), _Location(), 0)
    error = ctypes.CDLL(path).cudaMemcpyBatchAsync(
        ctypes.c_void_p(targets.ctypes.data), ctypes.c_void_p(sources.ctypes.data), ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(count), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )  # fmt: skip
    assert not error, error


def copies() -> None:
    """Print the rates of the ways to copy rows of registered memory, and what they cost matrix products beside them."""
    memory = torch.empty(4 * GIB, dtype=torch.uint8).random_(256)
    began = time.perf_counter()
    assert not int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 4 * GIB, 0))  # type: ignore[no-untyped-call]
    print(f"registering: {(time.perf_counter() - began) / 4 * 1e3:.0f} ms for each GiB")
    cuda = Cuda(torch.device("cuda"))
    torch.cuda.set_stream(torch.cuda.Stream())  # batched copies do not work on the default stream
    left = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    print("| row | batch | kernel | index_select | batched copies | 30 products beside 10: kernel | index_select | alone |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, side), size in itertools.product(SIZES.items(), BATCHES):
        row = 3 * side * side
        count = 4 * GIB // row
        rows = memory[: count * row].view(torch.int64).view(count, -1)
        view = cuda.view(rows)
        assert view is not None
        out = torch.empty((size, row // 8), dtype=torch.int64, device="cuda")
        chosen = [np.random.default_rng(number).permutation(count)[:size] for number in range(8)]
        numbers = itertools.cycle([torch.from_numpy(each).to("cuda") for each in chosen])
        places = itertools.cycle([(each * row + memory.data_ptr()).astype(np.uint64) for each in chosen])
        kernels._LARGE = kernels._WIDE = 0
        ways: dict[str, Callable[[], object]] = {
            "kernel": partial(of_next, numbers, partial(kernels.copy_rows, view), out),
            "index_select": partial(of_next, numbers, partial(kernels.select_rows, view), out),
            "copies": partial(of_next, places, batched_copies, out, row),
        }
        cells = [f"{size * row / 1e9 / seconds_of(way):.1f} GB/s" for way in ways.values()]
        for way in (ways["kernel"], ways["index_select"], None):
            cells.append(f"{products_beside(left, way) * 1e3:.0f} ms")
        print(f"| {name} | {size} | {' | '.join(cells)} |", flush=True)


def of_next(arguments: Iterator[Any], function: Callable[..., object], *rest: Any) -> None:
    """Call a function with the next argument, and the rest."""
    function(next(arguments), *rest)


def products_beside(left: Tensor, way: Callable[[], object] | None) -> float:
    """Return the seconds of 30 matrix products, with 10 gathers on another stream."""
    other = torch.cuda.Stream()

    def both() -> None:
        if way is not None:
            with torch.cuda.stream(other):
                for _ in range(10):
                    way()
        for _ in range(30):
            torch.matmul(left, left)

    return seconds_of(both, 3)


def cpu() -> None:
    """Print the CPU time that a step of the loop spends in ``next``, by way, and that of the calls which none can do without.

    The loop waits for the GPU now and then.
    """
    print("| row | batch | workers | mean CPU time of `next`, waiting every 8 batches | median | waiting each batch | median |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    ways: dict[str, dict[str, Any]] = {
        "none": {}, "2 threads": {"num_workers": 2, "worker_method": "thread"}, "2 processes": {"num_workers": 2},
    }  # fmt: skip
    for row, size in (("12 KB", 256), ("12 KB", 1024), ("150 KB", 256)):
        side = SIZES[row]
        with cached(Rows.random(3 * GIB // (3 * side * side), side), 3.3) as dataset:
            for name, options in ways.items():
                loader = registered(DataLoader(dataset, size, shuffle=True, device="cuda", **options))
                times_of_next(loader, 8)  # torch takes memory of the GPU for the first batches
                print(f"| {row} | {size} | {name} | {cells_of_next(loader, EPOCHS)} |", flush=True)
                del loader
        print(f"| {row} | {size} | bare calls | {cells_of_next(BareCalls(size, side), 1)} |", flush=True)


def cells_of_next(loader: Any, epochs: int) -> str:
    """Return the mean and median CPU time of ``next``, waiting for the GPU after every 8 batches and after each."""
    cells = []
    for every in (8, 1):
        spent = [each for _ in range(epochs) for each in times_of_next(loader, every)]
        cells += [f"{statistics.mean(spent) * 1e6:.0f} µs", f"{statistics.median(spent) * 1e6:.0f} µs"]
    return " | ".join(cells)


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


def train(photos: Path, count: int = 20_000, epochs: int = 1) -> None:
    """Train a ResNet-18 on photographs in the cache, and print how long the GPU waits for batches."""
    import torchvision

    images = torch.from_numpy(np.load(photos))  # (n, 3, 256, 256)
    random.seed(0)
    crops = torch.empty((count, 3, 224, 224), dtype=torch.uint8)
    for idx in range(count):
        top, left = random.randrange(32), random.randrange(32)
        crops[idx] = images[idx % len(images), :, top : top + 224, left : left + 224]
    source = Rows(crops)
    model = torchvision.models.resnet18().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(image: Tensor, label: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(
                model(image.to(memory_format=torch.channels_last).float().div_(255)), label % 160
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def seconds(batches: Callable[[], Iterator[Any]], every: int) -> float:
        found = []
        for epoch in range(epochs + 1):
            torch.cuda.synchronize()
            began, steps = time.perf_counter(), 0
            for image, label in batches():
                step(image, label)
                steps += 1
                if every and steps % every == 0:
                    torch.cuda.synchronize()  # as a loop that reads its loss
            torch.cuda.synchronize()
            if epoch:
                found.append((time.perf_counter() - began) / steps)
        return statistics.median(found)

    size = 256
    parts = zip(crops[: 8 * size].split(size), torch.arange(8 * size).split(size), strict=True)
    resident = [(image.cuda(), label.cuda()) for image, label in parts]  # the same work: a GPU is faster on zeros
    with cached(source, 4) as dataset:
        options: dict[str, Any] = {"batch_size": size, "shuffle": True, "drop_last": True, "persistent_workers": True}
        alone = options | {"persistent_workers": False}
        loaders: dict[str, Any] = {
            "device, no workers": DataLoader(dataset, device="cuda", **alone),
            "device, 2 threads": DataLoader(dataset, device="cuda", num_workers=2, worker_method="thread", **options),
            "device, 4 processes": DataLoader(dataset, device="cuda", num_workers=4, **options),
            "device, device_limit_gib=4": DataLoader(dataset, device="cuda", device_limit_gib=4, **alone),
            "stocache, pin_memory, 8 workers": DataLoader(dataset, num_workers=8, pin_memory=True, **options),
            "torch, pin_memory, 8 workers": torch.utils.data.DataLoader(dataset, num_workers=8, pin_memory=True, **options),
            "torch, pin_memory, 16 workers": torch.utils.data.DataLoader(dataset, num_workers=16, pin_memory=True, **options),
        }
        print("| loader | step | GPU waits | step, loss read each time | GPU waits |\n| --- | --- | --- | --- | --- |")
        bare = [seconds(lambda: itertools.islice(itertools.cycle(resident), count // size), every) for every in (0, 1)]
        print(f"| 8 batches that stay on the GPU | {bare[0] * 1e3:.2f} ms | | {bare[1] * 1e3:.2f} ms | |")
        stage = registered(loaders["device, no workers"])._stocache._stage
        order = np.random.default_rng(0).permutation(count)

        def gathers_beside() -> Iterator[Any]:
            for at in range(0, count - size + 1, size):
                with stage.cuda.copying():
                    stage.gatherer.gather(PlannedBatch.alone(order[at : at + size]))
                yield resident[at // size % 8]

        beside = [seconds(gathers_beside, every) for every in (0, 1)]
        print(f"| the same, with a gather of a batch beside | {beside[0] * 1e3:.2f} ms | | {beside[1] * 1e3:.2f} ms | |")
        for name in list(loaders):
            loader, cells = loaders.pop(name), []
            for every, least in zip((0, 1), bare, strict=True):

                def batches(loader: Any = loader) -> Iterator[Any]:
                    return iter(loader) if getattr(loader, "device", None) is not None else to_device(iter(loader))

                if getattr(loader, "device", None) is not None:
                    registered(loader)
                took = seconds(batches, every)
                cells.append(f"{took * 1e3:.2f} ms | {max(0.0, 1 - least / took):.1%}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
            del loader


def equal(batches: int = 10_000) -> None:
    """Compare the batches of the device with those of the CPU, with half of the samples missing."""
    source = Rows.random(4096, 64)
    with cached(source, 0.5 * 4096 * 12296 / GIB) as dataset:
        compared, wrong = 0, 0
        options: dict[str, Any] = {"batch_size": 64, "shuffle": True}
        kinds: list[dict[str, Any]] = [{}, {"num_workers": 2, "worker_method": "thread"}, {"num_workers": 2}]
        for kind in kinds:
            for limit in (0, "10MB"):
                loader = registered(DataLoader(dataset, device="cuda", device_limit_gib=limit, **options, **kind))
                for epoch in range(-(-batches // (6 * 64))):
                    torch.manual_seed(epoch)
                    expected = list(torch.utils.data.DataLoader(range(4096), **options))
                    torch.manual_seed(epoch)
                    for (image, label), indices in zip(loader, expected, strict=True):
                        there = source.images[indices].to("cuda")
                        wrong += int(not torch.equal(image, there) or not torch.equal(label.cpu(), indices))
                        compared += 1
                print(kind, limit, loader.stats().device, flush=True)
                del loader
    print(f"{compared} batches compared, {wrong} differ")


def soak(batches: int = 100_000) -> None:
    """Check on the GPU the values of batches that are copied from the pinned ring by the loop itself, and by ``device``."""
    source = Rows.random(16384, 16)
    weights = torch.arange(1, 3 * 16 * 16 + 1, device="cuda", dtype=torch.float32)
    sums = torch.cat([(part.cuda().view(len(part), -1).float() * weights).sum(1) for part in source.images.split(4096)])
    with cached(source, 1) as dataset:
        for name, options in {
            "pin_memory": {"pin_memory": True, "num_workers": 4},
            "device, processes": {"device": "cuda", "num_workers": 4},
            "device": {"device": "cuda"},
        }.items():
            loader: Any = DataLoader(dataset, 64, shuffle=True, **options)
            wrong, count, held = torch.zeros((), dtype=torch.int64, device="cuda"), 0, list[Any]()
            began = time.perf_counter()
            for image, label in itertools.islice(endless(loader), batches // 2 if name == "pin_memory" else batches // 4):
                image, label = image.to("cuda", non_blocking=True), label.to("cuda", non_blocking=True)
                found = (image.view(len(image), -1).float() * weights).sum(1)
                wrong += (found != sums[label]).sum()
                count += 1
                if random.random() < 0.02:
                    held.append((image, found))
                    held = held[-20:]
                    wrong += sum(((a.view(len(a), -1).float() * weights).sum(1) != b).sum() for a, b in held)
            seconds = time.perf_counter() - began
            print(f"{name}: {count} batches, {int(wrong)} wrong samples, {seconds / count * 1e6:.0f} µs each", flush=True)
            del loader, image, label, held


def main() -> None:
    """Run one experiment."""
    parser = argparse.ArgumentParser(prog="python -m benchmark gpu")
    parser.add_argument("experiment", choices=["copies", "rates", "cpu", "train", "equal", "soak"])
    parser.add_argument("photos", type=Path, nargs="?", help="of train: a .npy file of uint8 (n, 3, 256, 256)")
    parser.add_argument("--row", action="append", choices=SIZES, help="of rates: this size only")
    parser.add_argument("--no-peers", action="store_true", help="of rates: without the ring and torch's loader")
    arguments = parser.parse_args()
    logging.getLogger("stocache").setLevel(logging.ERROR)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    print(f"{driver.stdout.strip()}, CUDA {torch.version.cuda}; {machine()}, {len(os.sched_getaffinity(0))} in use")
    if arguments.experiment == "train":
        train(arguments.photos)
    else:
        of_rates = partial(rates, arguments.row, not arguments.no_peers)
        experiments = {"copies": copies, "rates": of_rates, "cpu": cpu, "equal": equal, "soak": soak}
        experiments[arguments.experiment]()


if __name__ == "__main__":
    main()
