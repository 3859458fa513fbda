"""Batches without tensors beside torch's DataLoader, SPDL and dataloader-rs: large payloads, and short samples.

All contenders live in one process and take turns, with workers that are kept. Cells of peers that are not installed stay empty:
SPDL (``pip install spdl==0.8.0``), dataloader-rs (``pip install dataloader-rs``, from Python 3.13 on).

``large``: each payload is copied in the worker before it is sent: torch's loader would send a tensor that it has shared before
for nothing. SPDL runs `iterate_in_subprocess` with each of its two arenas. Threads hand over the object itself: ours, and the
batches of dataloader-rs.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment, is_missing
from benchmark.support.measuring import epoch_s, settle
from benchmark.support.peers import PREFETCH, in_rust, in_torch, ours
from stocache.system.limits import KIB, MIB

CLAIM = (
    "Batches without tensors come as fast as through torch's DataLoader; 32 MiB of bytes, numpy and torch also as through SPDL."
)


def loaders(dataset: Any, batch: int, workers: int, **options: Any) -> dict[str, Iterable[Any]]:
    """Return the loaders of a dataset. Their workers are kept, and processes are forked before there are threads."""
    fork = {"multiprocessing_context": "fork"}
    made = {
        "torch": in_torch(dataset, batch, workers, **fork, **options),
        "ours": ours(dataset, batch, workers, "multiprocessing", **fork, **options),
    }
    for loader in made.values():
        epoch_s(loader)
    if not is_missing("dataloader_rs"):
        made["dataloader-rs"] = in_rust(dataset, batch, workers, options["collate_fn"])
    return made | {"ours, threads": ours(dataset, batch, workers, "thread", **options)}


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
    if is_missing("spdl"):
        return {}
    import spdl.pipeline

    buffers = PREFETCH + 2  # one is written and one is read beside the batches that wait
    made = {
        "SPDL, ring": spdl.pipeline.SharedMemoryRingBuffer(buffers * (nbytes + 64 * KIB)),
        "SPDL, pool": spdl.pipeline.SharedMemorySegmentPool(nbytes + 64 * KIB, buffers),
    }
    options = {
        "buffer_size": PREFETCH,
        "initializer": partial(torch.set_num_threads, 1),  # as in torch's workers: a fork breaks the other threads
        "mp_context": "fork",
    }
    source = partial(Payloads, kind, nbytes, count)
    return {name: spdl.pipeline.iterate_in_subprocess(source, arena=arena, **options) for name, arena in made.items()}


@experiment(rounds=7)
def large(run: Run) -> None:
    """Payloads of 32 MiB, from one worker: MB/s."""
    torch.set_num_threads(1)
    names = "torch", "SPDL, ring", "SPDL, pool", "ours", "dataloader-rs", "ours, threads"
    table, (nbytes, count) = run.table("payload", *names), run.size((32 * MIB, 24), (4 * MIB, 4))
    ratios = []
    for kind in COPY:
        settle(16 * nbytes)
        dataset = Payloads(kind, nbytes, count)
        contenders = in_spdl(kind, nbytes, count) | loaders(dataset, 1, 1, collate_fn=itemgetter(0), shuffle=False)
        took = run.turns({name: partial(epoch_s, batches) for name, batches in contenders.items()})
        table.row(kind, *(count * nbytes / took.median(name) / 1e6 if name in took else None for name in names))
        ratios += [took.ratio(peer, "ours") for peer in names[:3] if peer in took]
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
    names = "torch", "ours", "dataloader-rs", "ours, threads"
    table = run.table("samples", "batch", *names, "ours to torch")
    for name, values, batch, collate_fn in cases(run):
        contenders = loaders(values, batch, 2, collate_fn=collate_fn)
        took = run.turns({name: partial(epoch_s, batches) for name, batches in contenders.items()})
        rates = [len(values) / took.median(each) if each in took else None for each in names]
        table.row(name, batch, *rates, took.ratio("torch", "ours"))
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
