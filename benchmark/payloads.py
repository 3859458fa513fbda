"""Batches without tensors beside torch's DataLoader, SPDL and dataloader-rs: large payloads, and short samples.

All contenders live in one process and take turns, with workers that are kept. CPU seconds are the seconds of this process and
all its children, also of the contenders that wait. Cells of peers that are not installed stay empty: SPDL (``pip install
spdl==0.8.0``), dataloader-rs (``pip install dataloader-rs``, from Python 3.13 on).

``large``: each payload is copied in the worker before it is sent: torch's loader would send a tensor that it has shared before
for nothing. SPDL runs `iterate_in_subprocess` with each of its two arenas, and from Python 3.14 on `iterate_in_subinterpreter`,
which cannot import numpy or torch. Threads hand over the object itself: ours, and the batches of dataloader-rs.
"""

import functools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import stocache
from benchmark.support.datasets import Made
from benchmark.support.harness import Figures, Run, experiment, is_missing
from benchmark.support.measuring import settle
from benchmark.support.peers import KEPT, PREFETCH, in_rust
from benchmark.support.plain import PlainPayloads
from stocache.system.limits import KIB, MIB

try:
    import spdl.pipeline
except ImportError:
    spdl = None

CLAIM = (
    "Batches without tensors come as fast as through torch's DataLoader; 32 MiB of bytes, numpy and torch also as through SPDL."
)

Cost = tuple[float, float]
"""What an epoch costs per batch: seconds that pass, and CPU seconds, of this process and its children."""


def cost_of(batches: Iterable[Any]) -> Cost:
    """Run an epoch, and look at nothing but the number of its batches."""
    before, began, count = cpu_s(), time.perf_counter(), 0
    for _ in batches:
        count += 1
    return (time.perf_counter() - began) / count, (cpu_s() - before) / count


def cpu_s() -> float:
    """Return the CPU time of this process and its live children so far; the kernel counts it in nanoseconds."""
    this, total = psutil.Process(), 0
    for process in (this, *this.children(recursive=True)):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def costs_of(run: Run, contenders: dict[str, Iterable[Any]]) -> list[Figures]:
    """Return the seconds that pass for a batch, and the CPU seconds."""
    found = run.results({name: functools.partial(cost_of, batches) for name, batches in contenders.items()})
    return Figures.columns(found)


def loaders(dataset: Any, workers: int, **options: Any) -> dict[str, Iterable[Any]]:
    """Return torch's loader and ours over a dataset, with workers that are kept and have been forked."""
    options |= KEPT | {"num_workers": workers, "multiprocessing_context": "fork"}
    made = {"torch": torch.utils.data.DataLoader(dataset, **options), "ours": stocache.DataLoader(dataset, **options)}
    for loader in made.values():
        cost_of(loader)  # before there are threads and another interpreter
    return made


def in_threads(dataset: Any, workers: int, **options: Any) -> Iterable[Any]:
    """Return our loader with worker threads that are kept."""
    return stocache.DataLoader(dataset, num_workers=workers, worker_method="thread", **KEPT, **options)


def first(samples: list[Any]) -> Any:
    """Return the only sample: a collate function."""
    return samples[0]


# ---------------------------------------------------------------------------------------------------- large payloads

COPY: dict[str, Callable[[Any], Any]] = {"bytes": bytes, "numpy": np.copy, "torch": torch.clone}


class Payloads(Made):
    """Large payloads of one kind; a copy is made for each request."""

    def __init__(self, kind: str, nbytes: int, count: int) -> None:
        noise = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        value = {"bytes": noise.data, "numpy": noise, "torch": torch.from_numpy(noise)}[kind]
        super().__init__(count, lambda idx: COPY[kind](value))

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.count))


def in_spdl(kind: str, nbytes: int, count: int) -> dict[str, Iterable[Any]]:
    """Return SPDL's iterables over the same payloads, one for each of its arenas; empty without SPDL."""
    if spdl is None:
        return {}
    buffers = PREFETCH + 2  # one is written and one is read beside the batches that wait
    made = {
        "SPDL, ring": spdl.pipeline.SharedMemoryRingBuffer(buffers * (nbytes + 64 * KIB)),
        "SPDL, pool": spdl.pipeline.SharedMemorySegmentPool(nbytes + 64 * KIB, buffers),
    }
    options = {
        "buffer_size": PREFETCH,
        "initializer": functools.partial(torch.set_num_threads, 1),  # as in torch's workers: a fork breaks the other threads
        "mp_context": "fork",
    }
    source = functools.partial(Payloads, kind, nbytes, count)
    return {name: spdl.pipeline.iterate_in_subprocess(source, arena=arena, **options) for name, arena in made.items()}


@experiment(rounds=7)
def large(run: Run) -> None:
    """Payloads of 32 MiB, from one worker: MB/s, and CPU seconds per GB."""
    torch.set_num_threads(1)
    names = "torch", "SPDL, ring", "SPDL, pool", "ours", "SPDL, interpreter", "dataloader-rs", "ours, threads"
    table, (nbytes, count) = run.table("payload", "what", *names), run.size((32 * MIB, 24), (4 * MIB, 4))
    ratios = []
    for kind in COPY:
        settle(16 * nbytes)
        dataset = Payloads(kind, nbytes, count)
        contenders = in_spdl(kind, nbytes, count) | loaders(dataset, 1, batch_size=1, collate_fn=first)
        if kind == "bytes" and spdl is not None and sys.version_info >= (3, 14):
            source = functools.partial(PlainPayloads, nbytes, count)
            contenders["SPDL, interpreter"] = spdl.pipeline.iterate_in_subinterpreter(source, buffer_size=PREFETCH)
        if not is_missing("dataloader_rs"):
            contenders["dataloader-rs"] = in_rust(dataset, 1, 1, first)
        contenders["ours, threads"] = in_threads(dataset, 1, batch_size=1, collate_fn=first)
        wall, cpu = costs_of(run, contenders)
        table.row(kind, "MB/s", *(nbytes / wall.median(name) / 1e6 if name in wall else None for name in names))
        table.row(kind, "CPU s per GB", *(cpu.median(name) / nbytes * 1e9 if name in cpu else None for name in names))
        ratios += [wall.ratio(peer, "ours") for peer in names[:3] if peer in wall]
        del contenders
    run.claim("32 MiB come at least as fast as through torch and SPDL", min(ratios), least=1)


# ---------------------------------------------------------------------------------------------------- short samples


def texts(count: int) -> list[str]:
    """Return strings of 10 to 200 characters."""
    generator = random.Random(0)
    return ["".join(generator.choices("abcdefghij ", k=generator.randint(10, 200))) for _ in range(count)]


@experiment(rounds=7)
def samples(run: Run) -> None:
    """Samples without tensors, in memory, so that only the loaders take time: samples per second from two workers."""
    torch.set_num_threads(1)
    names = "torch", "ours", "dataloader-rs", "ours, threads", "ours, no workers"
    table = run.table("samples", "batch", *names, "ours to torch", "of its CPU time")
    for name, values, batch, collate_fn in cases(run):
        options = {"batch_size": batch, "shuffle": True, "collate_fn": collate_fn}
        contenders = loaders(values, 2, **options)
        if not is_missing("dataloader_rs"):
            contenders["dataloader-rs"] = in_rust(values, batch, 2, collate_fn)
        contenders["ours, threads"] = in_threads(values, 2, **options)
        contenders["ours, no workers"] = stocache.DataLoader(values, **options)
        wall, cpu = costs_of(run, contenders)
        rates = [batch / wall.median(each) if each in wall else None for each in names]
        table.row(name, batch, *rates, wall.ratio("torch", "ours"), cpu.ratio("ours", "torch"))
        del contenders
    run.claim("all samples come at least as fast as through torch", min(table.column("ours to torch")), least=1)


def cases(run: Run) -> Iterator[tuple[str, list[Any], int, Any]]:
    """Yield samples: their name, values, the size of batches, and how they are collated."""
    count = run.size(400, 40)
    for batch in run.size((32, 256), (32,)):
        strings = texts(batch * count)
        pairs = [{"text": text, "name": text[:10]} for text in strings]
        yield "strings of 10 to 200 characters", strings, batch, None
        yield "bytes, 10 to 200 of them", [text.encode() for text in strings], batch, None
        yield "dictionaries of 2 strings", pairs, batch, None
        yield "the same, collate_fn=list", pairs, batch, list
        yield "dictionaries of a string and a number", [{"text": text, "n": n} for n, text in enumerate(strings)], batch, None
        yield "numbers, collate_fn=list", list(range(len(strings))), batch, list
    encoded = [path.read_bytes() for path in run.photos(160)]
    encoded = [encoded[n % len(encoded)] for n in range(64 * count // 10)]
    yield "JPEG bytes", encoded, 64, None
    yield "dictionaries of JPEG bytes and a name", [{"jpeg": jpeg, "name": "a"} for jpeg in encoded], 64, None
