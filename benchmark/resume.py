"""Resumes loaders at five positions, and compares what follows with the run that was not interrupted; and what a state costs.

python -m benchmark resume [table | cost] [--workers 0 2 4] [--methods fork spawn] [--rounds N]
"""

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import stocache
from stocache import CachedDataset, StorageDataset, StreamLoader, prepare

CLAIM = "A loader resumes exactly at any position, and taking a state each step costs at most 100 us for 10^6 samples."
NEEDS = (("torchdata", "torchdata==0.11.0"), ("torch", "-e .[text]"))

POSITIONS = ("before the first", "in the middle", "before the last", "after the last", "after the end")
_SAMPLES = 41
_BATCH = 3


class Samples(Dataset[Any]):
    """A map-style dataset without a state."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return _SAMPLES

    def __getitem__(self, idx: int) -> Any:
        """Return a sample."""
        return torch.tensor([idx, idx * idx])


class Counting(Samples):
    """A map-style dataset whose samples depend on its state: how many it has given."""

    given = 0

    def __getitem__(self, idx: int) -> Any:
        self.given += 1
        return torch.tensor([idx, self.given])

    def state_dict(self) -> dict[str, int]:
        """Return the state."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a state."""
        self.given = state["given"]


class Stream(IterableDataset[Any]):
    """An iterable dataset without a state; each worker has a share."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, _SAMPLES, step):
            yield torch.tensor([number])


class StatefulStream(Stream):
    """An iterable dataset with a state: its position, and how many epochs it has given."""

    at = epoch = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = [int(value) for value in super().__iter__()]
        while self.at < len(numbers):
            self.at += 1
            yield torch.tensor([numbers[self.at - 1], self.epoch])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        """Return the state."""
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a state."""
        self.at, self.epoch = state["at"], state["epoch"]


def _loader(cls: Any, dataset: Any, workers: int, method: str, batch_size: int | None = _BATCH, **options: Any) -> Any:
    if workers:
        options |= {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": True}
    return cls(dataset, batch_size=batch_size, **options)


def _graph(workers: int, method: str) -> Any:
    from torch.utils.data.datapipes.iter import IterableWrapper

    from stocache.reading import DataLoader2, MultiProcessingReadingService

    pipe = IterableWrapper(range(_SAMPLES)).shuffle().sharding_filter().batch(_BATCH)
    return DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers, multiprocessing_context=method))


def contenders(folder: Path) -> dict[str, Callable[[Any, int, str], Any]]:
    """Return functions of (loader class, workers, start method) that make a loader."""
    text = folder / "rows.csv"
    text.write_text("".join(f"{n},{n * n}\n" for n in range(400)))
    storage = prepare(Samples(), folder / "blocks", block_size=8, progress=False)
    stream: Any = {"delimiter": ",", "batch_size": 16, "buffer_size": 32, "shuffle": True, "seed": 3}
    return {
        "map": lambda cls, workers, method: _loader(cls, Samples(), workers, method, shuffle=True),
        "map, cached": lambda cls, workers, method: _loader(cls, CachedDataset(Samples(), 0.01), workers, method, shuffle=True),
        "map with a state": lambda cls, workers, method: _loader(cls, Counting(), workers, method, shuffle=True),
        "iterable": lambda cls, workers, method: _loader(cls, Stream(), workers, method),
        "iterable with a state": lambda cls, workers, method: _loader(cls, StatefulStream(), workers, method),
        "prepared storage": lambda cls, workers, method: _loader(cls, StorageDataset(storage), workers, method, shuffle=True),
        "StreamLoader": lambda cls, workers, method: _loader(
            cls, StreamLoader(text, **stream), workers, method, batch_size=None
        ),
        "graph": lambda cls, workers, method: None if cls is not stocache.DataLoader else _graph(workers, method),
    }


def positions(make: Callable[[], Any]) -> list[bool | str]:
    """Return, for each of `POSITIONS`, whether a loader that resumes there gives the rest of the epoch and the next one."""
    torch.manual_seed(7)
    loader = make()
    states, came = [(loader.state_dict(), torch.get_rng_state())], []
    for batch in loader:
        came.append(batch)
        states.append((loader.state_dict(), torch.get_rng_state()))
    states.append((loader.state_dict(), torch.get_rng_state()))
    between = torch.get_rng_state()
    following = list(loader)
    equal: list[bool | str] = []
    for number in (0, len(came) // 2, len(came) - 1, len(came), len(came) + 1):
        torch.manual_seed(7)
        resumed = make()
        state, numbers = states[number]
        try:
            resumed.load_state_dict(state)
            torch.set_rng_state(numbers)  # a training's checkpoint has them
            rest = list(resumed) if number <= len(came) else []
            torch.set_rng_state(between)
            equal.append(_same(rest, came[number:]) and _same(list(resumed), following))
        except Exception as error:
            equal.append(type(error).__name__)
        del resumed
    return equal


def _same(a: list[Any], b: list[Any]) -> bool:
    plain = [[torch.as_tensor(part).tolist() for part in (x if isinstance(x, list | tuple) else [x])] for x in a]
    return plain == [[torch.as_tensor(part).tolist() for part in (x if isinstance(x, list | tuple) else [x])] for x in b]


def _table(workers: list[int], methods: list[str]) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    print(f"| dataset | workers | loader | {' | '.join(POSITIONS)} |\n| --- | --- | --- |{' --- |' * len(POSITIONS)}")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in contenders(Path(folder)).items():
            for count in workers:
                for method in methods if count else ["fork"]:
                    for cls in (stocache.DataLoader, StatefulDataLoader):
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            if make(cls, count, method) is None:
                                continue
                            equal = positions(partial(make, cls, count, method))
                        words = [{True: "equal", False: "not equal"}.get(each, each) for each in equal]  # type: ignore[call-overload]
                        label = f"{count} {method}" if count else "0"
                        print(f"| {name} | {label} | {cls.__module__.split('.')[0]} | {' | '.join(words)} |", flush=True)


class _Many(Dataset[Any]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, idx: int) -> int:
        return idx


def _cost(rounds: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    print("| a state each step, 10^6 samples shuffled | workers | us for a state | bytes as JSON |")
    print("| --- | ---: | ---: | ---: |")
    for workers in (0, 2):
        for cls in (stocache.DataLoader, StatefulDataLoader):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batches = iter(loader := cls(_Many(), 256, shuffle=True, num_workers=workers))
            times = []
            for _ in range(rounds):
                next(batches)
                began = time.perf_counter()
                state = loader.state_dict()
                times.append(time.perf_counter() - began)
            size = len(json.dumps(state, default=lambda tensor: tensor.tolist()))
            print(f"| {cls.__module__.split('.')[0]} | {workers} | {median(times) * 1e6:.0f} | {size} |", flush=True)
            del batches, loader


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmark resume")
    parser.add_argument("part", nargs="?", choices=["table", "cost"])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--methods", nargs="+", default=["fork", "spawn"])
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # both say that they skip samples
    if arguments.part != "cost":
        _table(arguments.workers, arguments.methods)
    if arguments.part != "table":
        _cost(arguments.rounds)


if __name__ == "__main__":
    main()
