"""DataLoader2 of stocache beside torchdata 0.9's, over the same graphs, and beside torch's DataLoader.

    python -m benchmark reading speed [--elements 4000] [--rounds 3]     # microseconds an element, small ones and of 1 MB
    python -m benchmark reading photos FOLDER [--rounds 3]               # photographs: decoded, and cached
    python -m benchmark reading hits [--elements 400]                    # how often maps are run, by epoch and by cache
    python -m benchmark reading resume                                   # which states resume exactly
    python -m benchmark reading soak [--trials 200] [--seed 0]           # random graphs, services, start methods and exits

``speed`` and ``photos`` time an epoch from its first element on, with workers that run already. Contenders take turns, and
figures are medians.
"""

import argparse
import faulthandler
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from stocache.reading import (
    CachingReadingService,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)

CLAIM = "DataPipe graphs run 10 times as fast as in torchdata's DataLoader2, cache across workers, and resume exactly."
NEEDS = (
    ("PIL", '-e ".[bench]"'),
    ("torchdata.dataloader2", "--no-deps torchdata==0.9.0", "speed", "photos", "hits", "resume"),
    ("requests", "requests", "speed", "photos", "hits", "resume"),
)

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
    import io

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((256, 256)))


# ---------------------------------------------------------------------------------------------------- contenders


def stocache(graph: Any, workers: int, *before: Any, **options: Any) -> Any:
    """Return our loader."""
    engine = MultiProcessingReadingService(workers, **options) if workers else InProcessReadingService()
    return DataLoader2(graph, reading_service=SequentialReadingService(*before, engine))


def stocache_cached(graph: Any, workers: int, **options: Any) -> Any:
    """Return our loader with a cache."""
    return stocache(graph, workers, CachingReadingService(0.5), **options)


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


def table(rows: list[list[str]]) -> None:
    """Print rows as Markdown, the first as its head."""
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows[1:]:
        print("| " + " | ".join(row) + " |")


# ---------------------------------------------------------------------------------------------------- speed


def speed(arguments: argparse.Namespace) -> None:
    """Print microseconds an element."""
    contenders: dict[str, Make] = {"torchdata DataLoader2": torchdata, "torch DataLoader": torch_loader, "stocache": stocache}
    for name, function, count in (
        ("small elements", square, arguments.elements),
        ("tensors of 1 MB", megabyte, arguments.elements // 10),
    ):
        print(f"\n{name}, us each\n")
        rows = [["workers", *contenders, "torchdata / stocache", "torch / stocache"]]
        for workers in WORKERS:
            timed: dict[str, list[float]] = {contender: [] for contender in contenders}
            for _ in range(arguments.rounds):
                for contender, make in contenders.items():
                    loader = make(IterableWrapper(range(count)).shuffle().sharding_filter().map(function), workers)
                    timed[contender].append(epoch_us(loader))
                    end(loader)
                    del loader
            medians = {contender: statistics.median(values) for contender, values in timed.items()}
            ours = medians["stocache"]
            ratios = [f"{medians[other] / ours:.1f}" for other in contenders if other != "stocache"]
            rows.append([str(workers), *(f"{value:.1f}" for value in medians.values()), *ratios])
        table(rows)


def photos(arguments: argparse.Namespace) -> None:
    """Print microseconds a photograph."""
    paths = sorted(str(path) for path in arguments.folder.iterdir()) * arguments.repeat
    contenders: dict[str, Make] = {
        "torchdata DataLoader2": torchdata,
        "torch DataLoader": torch_loader,
        "stocache": stocache,
        "stocache, cached": stocache_cached,
    }
    rows = [["workers", *(f"{name}, epoch {epoch}" for name in contenders for epoch in (1, 2)), "cached, epoch 1 / 2"]]
    for workers in WORKERS:
        timed: dict[str, list[tuple[float, float]]] = {contender: [] for contender in contenders}
        for _ in range(arguments.rounds):
            for contender, make in contenders.items():
                graph = IterableWrapper(paths).map(read).map(decode).shuffle().sharding_filter()
                if contender != "stocache, cached":  # where a map comes before the shuffle, each worker would run it for all
                    graph = IterableWrapper(paths).shuffle().sharding_filter().map(read).map(decode)
                loader = make(graph, workers)
                timed[contender].append((epoch_us(loader), epoch_us(loader)))
                end(loader)
                del loader
        medians = {name: [statistics.median(its) for its in zip(*values, strict=True)] for name, values in timed.items()}
        first, second = medians["stocache, cached"]
        rows.append([str(workers), *(f"{value:.0f}" for its in medians.values() for value in its), f"{first / second:.1f}"])
    print(f"{len(paths)} photographs, read, decoded and resized to 256x256: us each\n")
    table(rows)


# ---------------------------------------------------------------------------------------------------- hits


class Tally:
    """A map that counts its calls in a file, whichever process they are in."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, value: int) -> Any:
        """Count a call."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        os.close(descriptor)
        return torch.full((64,), value)

    def taken(self) -> int:
        """Return how many calls there were since the last time."""
        size = os.path.getsize(self.path) if os.path.exists(self.path) else 0
        if size:
            os.truncate(self.path, 0)
        return size


class Remembering:
    """A cache as people write it: a dict in each process."""

    def __init__(self, function: Any) -> None:
        self.function, self.known = function, {}  # type: Any, dict[int, Any]

    def __call__(self, value: int) -> Any:
        """Return the value from the dict, or make it."""
        if value not in self.known:
            self.known[value] = self.function(value)
        return self.known[value]


def hits(arguments: argparse.Namespace) -> None:
    """Print how often maps are run."""
    count, epochs = arguments.elements, 4
    rows = [["cache", "workers", *(f"epoch {epoch}" for epoch in range(1, epochs + 1)), "order changes"]]
    with tempfile.TemporaryDirectory() as folder:
        tally = Tally(f"{folder}/calls")
        source = partial(IterableWrapper, range(count))
        graphs: dict[str, tuple[Callable[[], Any], Make]] = {
            "torchdata in_memory_cache before the shuffle": (
                lambda: source().map(tally).in_memory_cache().shuffle().sharding_filter(),
                torchdata,
            ),
            "torchdata in_memory_cache after the shard": (
                lambda: source().shuffle().sharding_filter().map(tally).in_memory_cache(),
                torchdata,
            ),
            "a dict in each worker": (lambda: source().shuffle().sharding_filter().map(Remembering(tally)), stocache),
            "stocache": (lambda: source().map(tally).shuffle().sharding_filter(), stocache_cached),
        }
        for name, (graph, make) in graphs.items():
            for workers in WORKERS[1:]:
                loader = make(graph(), workers)
                runs, orders = [], []
                for epoch in range(epochs):
                    if make is torchdata:
                        loader.seed(epoch)  # or its epochs have one order
                    orders.append([int(element[0]) for element in loader])
                    runs.append(tally.taken())
                end(loader)
                changes = len({tuple(order) for order in orders}) == epochs
                rows.append([name, str(workers), *(f"{run / count:.2f}" for run in runs), "yes" if changes else "no"])
    print("Share of the elements for which the map was run, by epoch\n")
    table(rows)


# ---------------------------------------------------------------------------------------------------- resuming


def third(value: Any) -> bool:
    """Whether to keep a number."""
    return bool(value % 3)


def noisy(value: Any) -> Any:
    """Return a value with random numbers."""
    return value, random.random(), float(torch.rand(())), float(np.random.rand())


def both(value: Any) -> list[Any]:
    """Return two elements."""
    return [value, -value]


def numbers(count: int = 60) -> Any:
    """Return a source."""
    return IterableWrapper(range(count))


RESUMED: dict[str, Callable[[], Any]] = {
    "shuffle, shard, map": lambda: numbers().shuffle().sharding_filter().map(square),
    "..., filter": lambda: numbers().shuffle().sharding_filter().map(square).filter(third),
    "..., random map": lambda: numbers().shuffle().sharding_filter().map(noisy),
    "..., random map, shuffle, batch": lambda: numbers().shuffle().sharding_filter().map(noisy).shuffle().batch(4),
    "..., one to many": lambda: numbers().shuffle().sharding_filter().map(both).unbatch(),
    "dispatch, map": lambda: numbers().shuffle().sharding_round_robin_dispatch(WORKERS_OF_A_RANK).map(square),
    "dispatch, random map, batch": lambda: (
        numbers().shuffle().sharding_round_robin_dispatch(WORKERS_OF_A_RANK).map(noisy).batch(4)
    ),
    "dispatch beside shard": lambda: (
        numbers().shuffle().sharding_filter().zip(numbers().shuffle().sharding_round_robin_dispatch(WORKERS_OF_A_RANK))
    ),
}


def reseed(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def goes_on(make: Make, load: Any, graph: Any, workers: int, epoch: int, position: int, epochs: int = 3) -> str:
    """Return whether the rest of an epoch, and the epochs after it, are those of one run: "=", "no" or an error."""
    reseed(1)
    loader = make(graph(), workers)
    loader.seed(5)
    whole = [[repr(element) for element in loader] for _ in range(epochs)]
    end(loader)
    reseed(1)
    loader = make(graph(), workers)
    loader.seed(5)
    for _ in range(epoch):
        list(loader)
    iterator = iter(loader)
    for _ in range(min(position, len(whole[epoch]))):
        next(iterator)
    state = loader.state_dict()
    del iterator
    end(loader)
    reseed(2)
    loader = load(graph, workers, state)
    rest = [[repr(element) for element in loader] for _ in range(epochs - epoch)]
    end(loader)
    return "=" if rest == [whole[epoch][position:], *whole[epoch + 1 :]] else "no"


def loaded(make: Make, graph: Any, workers: int, state: Any) -> Any:
    """Return a loader that has loaded a state."""
    loader = make(graph(), workers)
    loader.load_state_dict(state)
    return loader


def peer(arguments: argparse.Namespace) -> None:
    """Print how torchdata resumes at one place; in a process of its own, as it may hang."""
    place = arguments.epoch, arguments.position
    print(goes_on(torchdata, partial(loaded, torchdata), RESUMED[arguments.graph], arguments.workers, *place), flush=True)
    os._exit(0)


def peer_answer(graph: str, workers: int, epoch: int, position: int) -> str:
    """Return the output of `peer`, or how it fails."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmark.reading",
        "peer",
        graph,
        str(workers),
        str(epoch),
        str(position),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, failed = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too, which would continue
            return "hangs"
    return output.strip() or failed.strip().splitlines()[-1].split(":")[0]


def resume(arguments: argparse.Namespace) -> None:
    """Print a table: after a state of each graph, with each number of workers, taken at each place, is the rest the same?"""
    positions = [(0, 0), (0, 1), (0, 9), (1, 13), (1, 60), (2, 5)]
    peers = [(0, 9), (1, 13)]
    head = [f"epoch {epoch + 1}, after {position}" for epoch, position in positions]
    rows = [["graph", "workers", *head, *(f"torchdata, epoch {epoch + 1}, after {position}" for epoch, position in peers)]]
    for name, graph in RESUMED.items():
        for workers in (0, 1, 2):
            answers = [goes_on(stocache, partial(loaded, stocache), graph, workers, *place) for place in positions]
            rows.append([name, str(workers), *answers, *(peer_answer(name, workers, *place) for place in peers)])
            print(rows[-1], file=sys.stderr, flush=True)
    table(rows)


# ---------------------------------------------------------------------------------------------------- soak


def failing(value: Any) -> Any:
    """Fail at one element."""
    if value == 7:
        raise ValueError("seven")
    return value


def killing(value: Any) -> Any:
    """Die at one element."""
    if value == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def tensor(value: Any) -> Any:
    """Return a sample with a tensor."""
    return {"value": torch.full((50, 40), float(value)), "number": value}


def random_graph(draw: random.Random) -> tuple[list[str], Callable[[], Any]]:
    """Return the names of the steps of a graph, and a function that makes it."""
    count = draw.choice((0, 1, 3, 17, 60, 200))
    kind = draw.choice(("shard", "shard", "dispatch", "both", "none"))
    before = [step for step in ("map", "shuffle") if draw.random() < 0.6]
    after = [step for step in ("filter", "noisy", "tensor", "shuffle", "prefetch", "batch") if draw.random() < 0.3]

    def part(kind: str) -> Any:
        graph = numbers(count)
        for step in before:
            graph = graph.map(square) if step == "map" else graph.shuffle(buffer_size=20)
        if kind == "shard":
            return graph.sharding_filter()
        return graph.sharding_round_robin_dispatch(WORKERS_OF_A_RANK) if kind == "dispatch" else graph

    def make() -> Any:
        graph = part("shard").zip(part("dispatch")).map(first) if kind == "both" else part(kind)
        for step in after:
            graph = {
                "filter": lambda graph: graph.filter(third),
                "noisy": lambda graph: graph.map(noisy).map(first),
                "tensor": lambda graph: graph.map(tensor).map(number_of),
                "shuffle": lambda graph: graph.shuffle(buffer_size=9),
                "prefetch": lambda graph: graph.prefetch(3),
                "batch": lambda graph: graph.batch(4),
            }[step](graph)
        return graph

    return [str(count), *before, kind, *after], make


def first(pair: Any) -> Any:
    """Return the first of a pair."""
    return pair[0]


def number_of(sample: Any) -> Any:
    """Return the number of a sample."""
    return sample["number"]


def holdings() -> tuple[int, list[str], list[str]]:
    """Return the open descriptors, the names in /dev/shm and the workers."""
    return (
        len(os.listdir("/proc/self/fd")),
        sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem.")),
        [child.name for child in multiprocessing.active_children()],
    )


def trial(seed: int) -> tuple[str, str]:
    """Run one trial; return its description and how it ended."""
    draw = random.Random(seed)
    steps, make = random_graph(draw)
    workers, method = draw.choice((0, 1, 2, 3)), draw.choice(("fork", "fork", "fork", "spawn", "forkserver"))
    ending = draw.choice(("whole", "early", "early", "dropped", "resumed", "resumed", "failing", "killed"))
    cached = draw.random() < 0.3
    what = f"{workers} workers by {method}, {' '.join(steps)}{', cached' if cached else ''}: {ending}"

    def load(graph: Any) -> Any:
        before = [CachingReadingService(0.01)] if cached else []
        loader = stocache(graph, workers, *before, **({"multiprocessing_context": method} if workers else {}))
        loader.seed(seed)
        return loader

    reseed(seed)
    loader = load(make())
    whole = [[repr(element) for element in loader] for _ in range(2)]
    if ending == "whole":
        again = load(make())
        reseed(seed)
        assert [[repr(element) for element in again] for _ in range(2)] == whole, "another order"
        again.shutdown()
    elif ending in ("early", "dropped"):
        iterator: Iterator[Any] = iter(loader)
        for _, _element in zip(range(draw.randrange(1, 10)), iterator, strict=False):
            pass
        if ending == "early":
            assert sum(1 for _ in loader) == len(whole[0]), "another length"
    elif ending == "resumed":
        position = draw.randrange(len(whole[1]) + 1)
        reseed(seed)
        broken = load(make())
        list(broken)
        iterator = iter(broken)
        for _ in range(position):
            next(iterator)
        state = broken.state_dict()
        broken.shutdown()
        other = load(make())
        other.load_state_dict(state)
        assert [repr(element) for element in other] == whole[1][position:], "another rest"
        other.shutdown()
    else:
        graph = numbers(30)
        graph = graph.sharding_round_robin_dispatch(WORKERS_OF_A_RANK) if draw.random() < 0.5 else graph.sharding_filter()
        bad = load(graph.map(killing if ending == "killed" and workers else failing))
        began = time.monotonic()
        try:
            list(bad)
        except (ValueError, RuntimeError):
            assert time.monotonic() - began < (20 if method != "fork" else 6), "late"
        else:
            raise AssertionError("no error")
    if ending != "dropped":
        loader.shutdown()
    return what, "ok"


def soak(arguments: argparse.Namespace) -> None:
    """Run trials, and print those that end badly."""
    import gc
    import multiprocessing
    from multiprocessing import forkserver, resource_tracker

    import torch.multiprocessing  # noqa: F401

    forkserver.ensure_running()
    resource_tracker.ensure_running()
    multiprocessing.Barrier(1)
    trial(0)  # makes what stays open for good
    gc.collect()
    time.sleep(0.5)
    before, bad, began = holdings(), 0, time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        faulthandler.dump_traceback_later(90, exit=True)  # a hang ends it all
        try:
            what, ended = trial(seed)
        except Exception as error:
            bad += 1
            print(f"{seed}: {type(error).__name__}: {error}", flush=True)
            continue
        finally:
            faulthandler.cancel_dump_traceback_later()
        gc.collect()
        deadline = time.monotonic() + 10
        while holdings() != before and time.monotonic() < deadline:
            time.sleep(0.02)  # threads of queues that are closed
        if holdings() != before:
            bad += 1
            print(f"{seed}: {what}: leaves {holdings()}, was {before}", flush=True)
            before = holdings()
        elif arguments.verbose:
            print(f"{seed}: {what}: {ended}", flush=True)
    print(f"{arguments.trials} trials in {time.monotonic() - began:.0f} s: {bad} bad, no hang")


def main() -> None:
    """Run one of the experiments."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (speed, photos, hits, resume, peer, soak):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        if function is photos:
            command.add_argument("folder", type=Path)
            command.add_argument("--repeat", type=int, default=1)
        if function in (speed, photos):
            command.add_argument("--rounds", type=int, default=3)
        if function is speed:
            command.add_argument("--elements", type=int, default=4000)
        if function is hits:
            command.add_argument("--elements", type=int, default=400)
        if function is peer:
            command.add_argument("graph")
            for number in ("workers", "epoch", "position"):
                command.add_argument(number, type=int)
        if function is soak:
            command.add_argument("--trials", type=int, default=200)
            command.add_argument("--seed", type=int, default=0)
            command.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
