"""Batches without tensors beside torch's DataLoader and SPDL: large payloads, short samples, and where the ring begins to gain.

python -m benchmark payloads large                       # 32 MiB of bytes, numpy and torch, from one worker
python -m benchmark payloads samples [--folder PHOTOS]   # strings, dictionaries, lists of numbers, JPEG bytes, from two workers
python -m benchmark payloads threshold                   # pickles of each size through torch's queue and through the ring

All contenders live in one process and take turns, round by round, with workers that are kept; a round that is not counted goes
first. Rates are medians, and ratios are medians of the ratios within a round, since other programs may use the machine.

``large``: each payload is copied in the worker before it is sent: torch's loader would send a tensor that it has shared before
for nothing. SPDL (``pip install spdl==0.8.0``) runs `iterate_in_subprocess` with each of its two arenas,
`SharedMemoryRingBuffer` and `SharedMemorySegmentPool`, and from Python 3.14 on `iterate_in_subinterpreter`, which cannot import
numpy or torch. Threads hand over the object itself: ours, and those of dataloader-rs (``pip install dataloader-rs``, from
Python 3.13 on). Cells of peers that are not installed stay empty. CPU seconds are those of this process and all its children,
also of the contenders that wait.
"""

import argparse
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

import stocache
from benchmark.__main__ import is_missing
from benchmark.support.measuring import machine, settle
from benchmark.support.peers import in_rust
from benchmark.support.plain import PlainPayloads
from stocache.shm.ring import ring
from stocache.system.limits import KIB, MIB
from stocache.tools.bench import find_jpegs

try:
    import spdl.pipeline
except ImportError:
    spdl = None

CLAIM = (
    "Batches without tensors come as fast as through torch's DataLoader; 32 MiB of bytes, numpy and torch also as through SPDL."
)
NEEDS = (("PIL", '-e ".[bench]"'),)

PREFETCH = 2  # batches of each worker
KEPT: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": PREFETCH}


class Cost(NamedTuple):
    """What an epoch costs per batch: seconds that pass, and CPU seconds, of this process and its children."""

    wall_s: float
    cpu_s: float


def epoch(batches: Iterable[Any]) -> Cost:
    """Run an epoch, and look at nothing but the number of its batches."""
    before, began, count = cpu_s(), time.perf_counter(), 0
    for _ in batches:
        count += 1
    wall_s = time.perf_counter() - began
    return Cost(wall_s / count, (cpu_s() - before) / count)


def cpu_s() -> float:
    """Return the CPU time of this process and its live children so far; the kernel counts it in nanoseconds."""
    this = psutil.Process()
    return sum(_cpu_s(process.pid) for process in (this, *this.children(recursive=True)))


def _cpu_s(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def take_turns(contenders: dict[str, Iterable[Any]], rounds: int) -> dict[str, list[Cost]]:
    """Return the costs of the epochs of each contender, round by round."""
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, batches in contenders.items():
            cost = epoch(batches)
            if number:
                costs[name].append(cost)
    return costs


def ratio(costs: list[Cost], ours: list[Cost]) -> float:
    """Return the median, over the rounds, of how many times as fast ours is."""
    return statistics.median(theirs.wall_s / mine.wall_s for theirs, mine in zip(costs, ours, strict=True))


def cpu_ratio(costs: list[Cost], ours: list[Cost]) -> float:
    """Return the same for CPU seconds."""
    return statistics.median(theirs.cpu_s / mine.cpu_s for theirs, mine in zip(costs, ours, strict=True))


def loaders(dataset: Any, workers: int, **options: Any) -> dict[str, Iterable[Any]]:
    """Return torch's loader and ours over a dataset, with workers that are kept."""
    options |= KEPT | {"num_workers": workers, "multiprocessing_context": "fork"}
    return {"torch": torch.utils.data.DataLoader(dataset, **options), "ours": stocache.DataLoader(dataset, **options)}


def in_threads(dataset: Any, workers: int, **options: Any) -> Iterable[Any]:
    """Return our loader with worker threads that are kept."""
    return stocache.DataLoader(dataset, num_workers=workers, worker_method="thread", **KEPT, **options)


def first(samples: list[Any]) -> Any:
    """Return the only sample: a collate function."""
    return samples[0]


# ---------------------------------------------------------------------------------------------------- large payloads

COPY: dict[str, Callable[[Any], Any]] = {"bytes": bytes, "numpy": np.copy, "torch": torch.clone}


class Payloads(Dataset[Any]):
    """Large payloads of one kind; a copy is made for each request."""

    def __init__(self, kind: str, nbytes: int, count: int) -> None:
        noise = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        self.value = {"bytes": noise.data, "numpy": noise, "torch": torch.from_numpy(noise)}[kind]
        self.copy, self.count = COPY[kind], count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Any:
        return self.copy(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[idx] for idx in range(self.count))


def arenas(kind: str, nbytes: int, count: int) -> dict[str, Iterable[Any]]:
    """Return SPDL's iterables over the same payloads, one for each of its arenas; empty without SPDL."""
    if spdl is None:
        return {}
    buffers = PREFETCH + 2  # one is written and one is read beside those that wait
    made = {
        "SPDL, ring": spdl.pipeline.SharedMemoryRingBuffer(buffers * (nbytes + 64 * KIB)),
        "SPDL, pool": spdl.pipeline.SharedMemorySegmentPool(nbytes + 64 * KIB, buffers),
    }
    source = functools.partial(Payloads, kind, nbytes, count)
    return {
        name: spdl.pipeline.iterate_in_subprocess(
            source,
            buffer_size=PREFETCH,
            initializer=functools.partial(torch.set_num_threads, 1),  # as in torch's workers: a fork breaks the other threads
            mp_context="fork",
            arena=arena,
        )
        for name, arena in made.items()
    }


def in_this_process(kind: str, nbytes: int, count: int) -> dict[str, Iterable[Any]]:
    """Return the iterables over the same payloads that start no process: another interpreter, and threads."""
    dataset, made = Payloads(kind, nbytes, count), dict[str, Iterable[Any]]()
    if kind == "bytes" and spdl is not None and sys.version_info >= (3, 14):
        source = functools.partial(PlainPayloads, nbytes, count)
        made["SPDL, interpreter"] = spdl.pipeline.iterate_in_subinterpreter(source, buffer_size=PREFETCH)
    if not is_missing("dataloader_rs"):
        made["dataloader-rs"] = in_rust(dataset, 1, 1, first, PREFETCH)
    made["ours, threads"] = in_threads(dataset, 1, batch_size=1, collate_fn=first)
    return made


def large(rounds: int, mib: int, batches: int) -> None:
    """Payloads of many MiB, from one worker; SPDL has one process."""
    names = ("torch", "SPDL, ring", "SPDL, pool", "ours", "SPDL, interpreter", "dataloader-rs", "ours, threads")
    print(f"Payloads of {mib} MiB, {batches} in an epoch, {rounds} rounds: MB/s; CPU seconds per GB\n")
    pairs = [("ours", name) for name in names[:3]] + [("ours, threads", name) for name in names[4:6]]
    print(f"| payload | {' | '.join(names)} | {' | '.join(f'{mine} to {name}' for mine, name in pairs)} |")
    print(f"| --- |{' ---: |' * (len(names) + len(pairs))}")
    for kind in COPY:
        nbytes = mib * MIB
        settle(16 * nbytes)
        peers = arenas(kind, nbytes, batches)
        contenders = peers | loaders(Payloads(kind, nbytes, batches), 1, batch_size=1, collate_fn=first)
        take_turns(contenders, 0)  # forks the workers, before there are threads and another interpreter
        contenders |= in_this_process(kind, nbytes, batches)
        costs = take_turns(contenders, rounds)
        cells = [_rate(costs.get(name), nbytes) for name in names]
        cells += [f"{ratio(costs[name], costs[mine]):.2f}" if name in costs else "" for mine, name in pairs]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
        del contenders, peers


def _rate(costs: list[Cost] | None, nbytes: int) -> str:
    if costs is None:
        return ""
    wall_s, cpu_s = (statistics.median(values) for values in zip(*costs, strict=True))
    return f"{nbytes / wall_s / 1e6:,.0f}; {cpu_s / nbytes * 1e9:.2f}"


# ---------------------------------------------------------------------------------------------------- short samples


NAMES = "torch", "ours", "dataloader-rs", "ours, threads", "ours, no workers"
PAIRS = ("torch", "ours"), ("dataloader-rs", "ours, threads"), ("dataloader-rs", "ours, no workers")


def texts(count: int) -> list[str]:
    """Return strings of 10 to 200 characters."""
    generator = random.Random(0)
    return ["".join(generator.choices("abcdefghij ", k=generator.randint(10, 200))) for _ in range(count)]


def samples(rounds: int, folder: Path | None, batches: int) -> None:
    """Samples without tensors, in memory, so that only the loaders take time."""
    print(f"{batches} batches in an epoch, 2 workers, shuffled, {rounds} rounds: samples per second; CPU µs per batch\n")
    ratios = (f"{mine} to {name}{kind}" for name, mine in PAIRS for kind in ("", ", CPU"))
    print(f"| samples | batch | {' | '.join((*NAMES, *ratios))} |\n| --- |{' ---: |' * (1 + len(NAMES) + 2 * len(PAIRS))}")
    for batch in (32, 256):
        strings = texts(batch * batches)
        cases: dict[str, tuple[list[Any], Any]] = {
            "strings of 10 to 200 characters": (strings, None),
            "bytes, 10 to 200 of them": ([text.encode() for text in strings], None),
            "dictionaries of 2 strings": ([{"text": text, "name": text[:10]} for text in strings], None),
            "the same, collate_fn=list": ([{"text": text, "name": text[:10]} for text in strings], list),
            "dictionaries of a string and a number": ([{"text": text, "n": n} for n, text in enumerate(strings)], None),
            "numbers, collate_fn=list": (list(range(len(strings))), list),
        }
        for name, (values, collate_fn) in cases.items():
            _compare(name, values, batch, collate_fn, rounds)
    if folder is not None:
        photos = [path.read_bytes() for path in find_jpegs(folder)]
        encoded = [photos[n % len(photos)] for n in range(64 * max(1, batches // 10))]
        _compare(f"JPEG bytes, {sum(map(len, photos)) // len(photos) / 1e3:.0f} KB", encoded, 64, None, rounds)
        _compare("dictionaries of JPEG bytes and a name", [{"jpeg": jpeg, "name": "a"} for jpeg in encoded], 64, None, rounds)


def _compare(name: str, values: list[Any], batch: int, collate_fn: Any, rounds: int) -> None:
    options = {"batch_size": batch, "shuffle": True, "collate_fn": collate_fn}
    contenders = loaders(values, 2, **options)
    if not is_missing("dataloader_rs"):
        contenders["dataloader-rs"] = in_rust(values, batch, 2, collate_fn, PREFETCH)
    contenders["ours, threads"] = in_threads(values, 2, **options)
    contenders["ours, no workers"] = stocache.DataLoader(values, **options)
    costs = take_turns(contenders, rounds)
    cells = [_samples_rate(costs.get(name), batch) for name in NAMES]
    for theirs, ours in ((costs.get(peer), costs[mine]) for peer, mine in PAIRS):
        cells += ["", ""] if theirs is None else [f"{ratio(theirs, ours):.2f}", f"{cpu_ratio(theirs, ours):.2f}"]
    print(f"| {name} | {batch} | {' | '.join(cells)} |", flush=True)


def _samples_rate(costs: list[Cost] | None, batch: int) -> str:
    if costs is None:
        return ""
    wall_s, cpu_s = (statistics.median(values) for values in zip(*costs, strict=True))
    return f"{batch / wall_s:,.0f}/s; {cpu_s * 1e6:,.0f}"


# ---------------------------------------------------------------------------------------------------- where the ring gains


def threshold(rounds: int, batches: int) -> None:
    """Batches that are one bytes object, or strings of 100 characters, sent through torch's queue and through the ring."""
    print(f"{batches} batches in an epoch, 2 workers, {rounds} rounds: µs per batch\n")
    print("| pickle | torch | ours, queue | ours, ring | ring to queue | ring to torch |\n| --- |" + " ---: |" * 5)
    for kind in ("bytes", "strings"):
        for kib in (4, 8, 16, 32, 64, 128, 256):
            nbytes = kib * KIB
            one = bytes(nbytes) if kind == "bytes" else [f"{n:0100d}" for n in range(nbytes // 103)]
            contenders = {"torch": loader_of(torch.utils.data.DataLoader, one, batches)}
            for way, small in (("ours, queue", 2 * nbytes), ("ours, ring", 0)):
                with mock.patch.object(ring, "_SMALL", small):
                    contenders[way] = loader_of(stocache.DataLoader, one, batches)
            costs = take_turns(contenders, rounds)
            cells = [f"{statistics.median(cost.wall_s for cost in costs[name]) * 1e6:.0f}" for name in contenders]
            gains = [f"{ratio(costs[name], costs['ours, ring']):.2f}" for name in ("ours, queue", "torch")]
            print(f"| {kind}, {kib} KiB | {' | '.join(cells + gains)} |", flush=True)
            del contenders


def loader_of(make: Any, batch: Any, batches: int) -> Iterable[Any]:
    """Return a loader that gives one batch many times, with its workers forked."""
    loader: Iterable[Any] = make([batch] * batches, 1, num_workers=2, persistent_workers=True, collate_fn=first)
    epoch(loader)
    return loader


def main() -> None:
    """Run one of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["large", "samples", "threshold"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, help="in an epoch: 24 of large, 400 of samples, 200 of threshold")
    parser.add_argument("--mib", type=int, default=32, help="size of a payload of large")
    parser.add_argument("--folder", type=Path, help="of photographs, for samples")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}\n")
    if arguments.experiment == "large":
        large(arguments.rounds, arguments.mib, arguments.batches or 24)
    elif arguments.experiment == "samples":
        samples(arguments.rounds, arguments.folder, arguments.batches or 400)
    else:
        threshold(arguments.rounds, arguments.batches or 200)


if __name__ == "__main__":
    main()
