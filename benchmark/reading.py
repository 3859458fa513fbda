"""DataLoader2 of stocache beside torchdata 0.9's, over the same graphs, and beside torch's DataLoader.

An epoch is timed from its first element on, with workers that run already.
"""

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from benchmark.support.harness import Figures, Run, experiment
from stocache.reading import (
    CachingReadingService,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)

CLAIM = "DataPipe graphs run 10 times as fast as in torchdata's DataLoader2, and photographs are cached across workers."

WORKERS = (0, 1, 2, 4)
WORKERS_OF_A_RANK = SHARDING_PRIORITIES.MULTIPROCESSING  # torchdata asks for it
Make = Callable[[Any, int], Any]


def square(value: int) -> int:
    """Return the square."""
    return value * value


def megabyte(value: int) -> torch.Tensor:
    """Return a tensor of 1 MB."""
    return torch.full((512, 512), float(value))


def read(path: str) -> bytes:
    """Return the bytes of a file."""
    return Path(path).read_bytes()


def decode(data: bytes) -> Any:
    """Return a photograph of 256x256."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((256, 256)))


# ---------------------------------------------------------------------------------------------------- contenders


def stocache(graph: Any, workers: int, *before: Any) -> Any:
    """Return our loader."""
    engine = MultiProcessingReadingService(workers) if workers else InProcessReadingService()
    return DataLoader2(graph, reading_service=SequentialReadingService(*before, engine))


def stocache_cached(graph: Any, workers: int) -> Any:
    """Return our loader with a cache."""
    return stocache(graph, workers, CachingReadingService(0.5))


def torchdata(graph: Any, workers: int) -> Any:
    """Return torchdata's."""
    from torchdata import dataloader2

    engine = dataloader2.MultiProcessingReadingService(workers) if workers else dataloader2.InProcessReadingService()
    return dataloader2.DataLoader2(graph, reading_service=engine)


def torch_loader(graph: Any, workers: int) -> Any:
    """Return torch's."""
    return torch.utils.data.DataLoader(graph, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def end(loader: Any) -> None:
    """End a loader's workers."""
    if hasattr(loader, "shutdown"):
        loader.shutdown()


def epoch_us(loader: Any) -> float:
    """Return microseconds an element, after the first element of an epoch."""
    iterator = iter(loader)
    next(iterator)
    began = time.perf_counter()
    count = sum(1 for _ in iterator)
    return (time.perf_counter() - began) / count * 1e6


def two_epochs_us(make: Make, graph: Callable[[], Any], workers: int) -> tuple[float, float]:
    """Return microseconds an element in two epochs of a new loader."""
    loader = make(graph(), workers)
    found = epoch_us(loader), epoch_us(loader)
    end(loader)
    return found


PEERS: dict[str, Make] = {"torchdata DataLoader2": torchdata, "torch DataLoader": torch_loader, "stocache": stocache}


# ---------------------------------------------------------------------------------------------------- speed


def mapped(function: Callable[[Any], Any], count: int) -> Any:
    """Return a graph that maps numbers."""
    return IterableWrapper(range(count)).shuffle().sharding_filter().map(function)


@experiment(rounds=3, needs="torchdata.dataloader2 requests")
def speed(run: Run) -> None:
    """Microseconds an element, small ones and tensors of 1 MB."""
    table, count = run.table("elements", "workers", *PEERS, "torchdata / stocache", "torch / stocache"), run.size(4000, 400)
    for name, function, elements in (("small", square, count), ("1 MB", megabyte, count // 10)):
        for workers in WORKERS:
            graph = partial(mapped, function, elements)
            found = run.results({peer: partial(two_epochs_us, make, graph, workers) for peer, make in PEERS.items()}, warm_up=0)
            took, _ = Figures.columns(found)
            ratios = (took.ratio(peer, "stocache") for peer in ("torchdata DataLoader2", "torch DataLoader"))
            table.row(name, workers, *map(took.median, PEERS), *ratios)
    small, large = (table.column("torchdata / stocache", elements=name)[1:] for name in ("small", "1 MB"))
    run.claim("with workers, small elements come 10 times as fast as from DataLoader2", min(small), least=10)
    run.claim("1 MB 3 times", min(large), least=3)
    run.claim("all as fast as from torch's DataLoader", min(table.column("torch / stocache")), least=1)


@experiment(rounds=3, needs="torchdata.dataloader2 requests PIL")
def photos(run: Run) -> None:
    """Microseconds a photograph, read, decoded and resized to 256x256, in two epochs: decoded, and cached."""
    paths = [str(path) for path in run.photos(160)[: run.size(None, 40)]]

    def decoded() -> Any:
        return IterableWrapper(paths).shuffle().sharding_filter().map(read).map(decode)

    def before_shuffle() -> Any:  # without a cache each worker would run the maps for all
        return IterableWrapper(paths).map(read).map(decode).shuffle().sharding_filter()

    table = run.table("workers", "contender", "epoch 1", "epoch 2", "epoch 1 / 2")
    for workers in WORKERS:
        contenders = {name: partial(two_epochs_us, make, decoded, workers) for name, make in PEERS.items()}
        contenders["stocache, cached"] = partial(two_epochs_us, stocache_cached, before_shuffle, workers)
        found = run.results(contenders, warm_up=0)
        first, second = Figures.columns(found)
        for name in found:
            table.row(workers, name, first.median(name), second.median(name), first.median(name) / second.median(name))
    ratios = table.column("epoch 1 / 2", contender="stocache, cached")
    run.claim("cached photographs come 5 times as fast in the second epoch", min(ratios), least=5)
