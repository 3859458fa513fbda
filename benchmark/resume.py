"""Loaders that resume at five positions: what follows is as in the run that was not interrupted. And what a state costs."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

import stocache
from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from stocache import CachedDataset, StorageDataset, StreamLoader, prepare
from stocache.reading import DataLoader2, MultiProcessingReadingService
from tests.support.equality import same
from tests.support.resuming import Counting, State, play

CLAIM = "A loader resumes exactly at any position, and taking a state each step costs at most 100 us for 10^6 samples."

POSITIONS = "before the first", "in the middle", "before the last", "after the last", "after the end"
LOADERS = {"stocache": stocache.DataLoader, "torchdata": StatefulDataLoader}
_SAMPLES, _BATCH = 41, 3


def square(idx: int) -> torch.Tensor:
    """Return a sample of a map-style dataset without a state."""
    return torch.tensor([idx, idx * idx])


MAP = Made(_SAMPLES, square)


class Stream(IterableDataset[Any]):
    """An iterable dataset without a state; each worker has a share."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, _SAMPLES, step):
            yield torch.tensor([number])


class StatefulStream(State, Stream):
    """An iterable dataset with a state: its position, and how many epochs it has given."""

    kept = "at", "epoch"
    at = epoch = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = [int(value) for value in super().__iter__()]
        while self.at < len(numbers):
            self.at += 1
            yield torch.tensor([numbers[self.at - 1], self.epoch])
        self.at, self.epoch = 0, self.epoch + 1


def _graph(workers: int, method: str) -> Any:
    pipe = IterableWrapper(range(_SAMPLES)).shuffle().sharding_filter().batch(_BATCH)
    return DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers, multiprocessing_context=method))


def makers(folder: Path) -> dict[str, Callable[[Any, int, str], Any]]:
    """Return functions of (loader class, workers, start method) that make a loader."""
    text = folder / "rows.csv"
    text.write_text("".join(f"{n},{n * n}\n" for n in range(400)))
    storage = prepare(MAP, folder / "blocks", block_size=8, progress=False)
    stream = partial(StreamLoader, text, delimiter=",", batch_size=16, buffer_size=32, shuffle=True, seed=3)

    def over(dataset: Callable[[], Any], **options: Any) -> Callable[[Any, int, str], Any]:
        options = {"batch_size": _BATCH} | options

        def make(cls: Any, workers: int, method: str) -> Any:
            more = {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": True} if workers else {}
            return cls(dataset(), **options, **more)

        return make

    return {
        "map": over(lambda: MAP, shuffle=True),
        "map, cached": over(lambda: CachedDataset(MAP, 0.01), shuffle=True),
        "map with a state": over(Counting, shuffle=True),
        "iterable": over(Stream),
        "iterable with a state": over(StatefulStream),
        "prepared storage": over(lambda: StorageDataset(storage), shuffle=True),
        "StreamLoader": over(stream, batch_size=None),
        "graph": lambda cls, workers, method: _graph(workers, method),
    }


def positions(make: Callable[[], Any]) -> list[str]:
    """Return, for each of `POSITIONS`, whether a loader that resumes there yields the rest of the epoch and the next one."""
    torch.manual_seed(7)
    loader = make()
    came, states, generators = play(loader)
    following, found = list(loader), []
    for number in (0, len(came) // 2, len(came) - 1, len(came), len(came) + 1):
        torch.manual_seed(7)
        resumed = make()
        try:
            resumed.load_state_dict(states[number])
            torch.set_rng_state(generators[number][0])  # a training's checkpoint has them
            rest = list(resumed) if number <= len(came) else []
            torch.set_rng_state(generators[-1][0])
            equal = same(rest, came[number:]) and same(list(resumed), following)
            found.append("equal" if equal else "not equal")
        except Exception as error:
            found.append(type(error).__name__)
        del resumed
    return found


@experiment()
def table(run: Run) -> None:
    """Resume loaders over eight kinds of datasets at five positions."""
    table = run.table("dataset", "workers", "loader", *POSITIONS)
    ways = [(0, "fork"), (2, "fork"), *run.size([(2, "spawn"), (4, "fork"), (4, "spawn")], [])]
    with tempfile.TemporaryDirectory() as folder:
        for name, make in run.chosen(makers(Path(folder))).items():
            for workers, method in ways:
                for title, cls in LOADERS.items():
                    if name != "graph" or title == "stocache":
                        table.row(name, f"{workers} {method}", title, *positions(partial(make, cls, workers, method)))
    found = {each for position in POSITIONS for each in table.column(position, loader="stocache")}
    run.claim("stocache's loader resumes exactly at each position", found == {"equal"})


@experiment(rounds=300, quick=30)
def cost(run: Run) -> None:
    """Time a state after each batch of 10^6 shuffled samples."""
    table = run.table("loader", "workers", "us for a state", "bytes as JSON")
    for workers in (0, 2):
        for title, cls in LOADERS.items():
            batches = iter(loader := cls(range(1_000_000), 256, shuffle=True, num_workers=workers))

            def timed(loader: Any = loader, batches: Iterator[Any] = batches) -> float:
                next(batches)
                began = time.perf_counter()
                loader.state_dict()
                return time.perf_counter() - began

            took_s = run.turns({title: timed}).median(title)
            nbytes = len(json.dumps(loader.state_dict(), default=lambda tensor: tensor.tolist()))
            table.row(title, workers, took_s * 1e6, nbytes)
            del batches, loader, timed
    run.claim("microseconds that a state costs", max(table.column("us for a state", loader="stocache")), most=100)
