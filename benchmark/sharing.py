"""Sharing by name: one copy for all ranks, each sample read once for all jobs, a warm start; and lists of paths."""

import itertools
import os
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler

from benchmark.support.datasets import Made, images
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import pss, settle
from benchmark.support.peers import OverSlots, stocaching
from benchmark.support.processes import fork, in_interpreter, start_ranks, wait
from stocache import SharedCache, SharedCacheDDP, share
from stocache.shm import named
from stocache.system.limits import GIB, MIB
from stocache.tools.cli import listing

CLAIM = "All ranks and jobs of a machine hold one copy, read each sample once, and restart warm."

DIMS = (3, 224, 224)
SLOT_BYTES = 3 * 224 * 224
WORKERS = 4


class Source(OverSlots):
    """Samples through a cache, or not: ``bypass`` is shared with the workers."""

    def __init__(self, cache: Any, samples: int) -> None:
        super().__init__(images(samples, DIMS, labels=False), cache, labels=False)
        self.bypass = torch.ones(1, dtype=torch.bool).share_memory_()

    def __getitem__(self, idx: int) -> Any:
        return self.source[idx] if self.bypass else super().__getitem__(idx)


CACHES: dict[str, Callable[[int], Any]] = {
    "none": lambda samples: SharedCache(0, samples, DIMS),
    "stocache": lambda samples: SharedCacheDDP(4, samples, DIMS, name="benchmark-ranks", fingerprint="1"),
    "stocaching": lambda samples: stocaching(4 * GIB, samples, DIMS),
}


def rank(library: str, samples: int, folder: str, job: int) -> None:
    """One rank under torchrun: all samples past the cache; then two epochs through it; then all samples again, compared."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    number = torch.distributed.get_rank()
    dataset, indices = Source(CACHES[library](samples), samples), list[int]()
    loader = DataLoader(dataset, batch_size=8, sampler=indices, num_workers=WORKERS, persistent_workers=True)

    def read(order: Iterable[int]) -> int:
        indices[:], checksum = order, 0
        for batch in loader:
            checksum = zlib.crc32(batch.numpy(), checksum)
        return checksum

    def meet(moment: str) -> None:
        Path(folder, f"{moment}-{job}-{number}").touch()
        while not Path(folder, f"go-{moment}").exists():
            time.sleep(0.05)

    expected = read(range(samples))
    meet("started")
    dataset.bypass[0] = False
    shard: DistributedSampler[Any] = DistributedSampler(dataset, torch.distributed.get_world_size(), number, seed=job)
    for epoch in range(2):
        shard.set_epoch(epoch)
        read(shard)
        torch.distributed.barrier()
    assert read(range(samples)) == expected
    meet("filled")
    torch.distributed.destroy_process_group()


@experiment(needs="stocaching")
def ranks(run: Run) -> None:
    """Memory of 2 jobs of 4 ranks of 4 workers over one cache."""
    samples, (jobs, ranks) = run.size(1024, 32) * MIB // SLOT_BYTES, run.size((2, 4), (1, 2))
    size, grown = samples * SLOT_BYTES, dict[str, float]()
    table = run.table(
        "cache", "PSS before filling, MiB", "after, MiB", "grows by, of the cached bytes", "more than without a cache"
    )
    for library in list(CACHES)[: run.size(None, 2)]:
        settle(2 * size)
        with tempfile.TemporaryDirectory() as folder:
            started = [start_ranks(ranks, 29600 + job, rank, library, samples, folder, job) for job in range(jobs)]
            before, after = (memory_at(Path(folder), moment, started, jobs * ranks) for moment in ("started", "filled"))
            assert all(job.wait() == 0 for job in started)
        grown[library] = after
        table.row(library, before / MIB, after / MIB, (after - before) / size, (after - grown["none"]) / size)
    run.claim("they hold one copy: of the cached bytes", (grown["stocache"] - grown["none"]) / size, most=1.05)
    run.claim("no named cache is left", not listing.find())


def memory_at(folder: Path, moment: str, jobs: list[subprocess.Popen[str]], ranks: int) -> int:
    """Wait until all ranks have reached a point, take the sum of their memory, and let them continue."""
    while len(list(folder.glob(f"{moment}-*"))) < ranks:
        assert all(job.poll() is None for job in jobs), "a job failed"
        time.sleep(0.1)
    total = sum(pss(job.pid) for job in jobs)
    (folder / f"go-{moment}").touch()
    return total


# ---------------------------------------------------------------------------------------------------- jobs


def jobs_cache(share: float, samples: int) -> SharedCacheDDP:
    """Open the cache of the jobs by its name."""
    limit = f"{samples + int(share * samples) * 64}B"
    return SharedCacheDDP(limit, samples, (64,), name="benchmark-jobs", placement="scattered")


def job(share: float, samples: int, seed: int, epoch: int, one_flight: bool) -> None:
    """One job of two processes, which reads an epoch in a random order."""
    cache = jobs_cache(share, samples)

    def slow(idx: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((64,), idx % 256, dtype=torch.uint8)

    def read(indices: list[int]) -> None:
        for idx in indices:
            value = cache.get_or_load(idx, slow) if one_flight else cache.get_slot(idx)
            if value is None:
                value = slow(idx)
                cache.set_slot(idx, value)
            assert value[0] == idx % 256

    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
    pids = [fork(partial(read, half)) for half in (order[::2], order[1::2])]
    assert all(wait(pid, 300) == 0 for pid in pids)


@experiment(rounds=2000, quick=200)
def jobs(run: Run) -> None:
    """How often K jobs of 2 processes read a source of 2 ms a sample, together, over one cold cache by a name."""
    table = run.table("jobs", "cached", "order", "call", "epoch", "reads", "cN + K(1-c)N", "without sharing")
    cases = (2, 1.0, "own"), (4, 1.0, "own"), (4, 0.5, "own"), (4, 1.0, "same")
    for (count, part, order), one_flight in itertools.product(cases, (False, True)):
        with jobs_cache(part, run.rounds) as cache:
            for epoch in range(2):
                before = cache.stats().misses
                seeds = range(count) if order == "own" else [0] * count
                pids = [fork(partial(job, part, run.rounds, seed, epoch, one_flight)) for seed in seeds]
                assert all(wait(pid, 300) == 0 for pid in pids)
                reads, resident = cache.stats().misses - before, len(cache)
                bound = (resident if epoch == 0 else 0) + count * (run.rounds - resident)
                call = "get_or_load" if one_flight else "get_slot, set_slot"
                table.row(count, f"{part:.0%}", order, call, epoch + 1, reads, bound, count * run.rounds)
    reads, bounds = (table.column(title, call="get_or_load") for title in ("reads", "cN + K(1-c)N"))
    run.claim("with get_or_load, K jobs read each sample once", reads == bounds)


# ---------------------------------------------------------------------------------------------------- warm


def persisted(share: float, samples: int) -> tuple[float, int, int]:
    """Return the ms to open a cache that stays, how many samples are read in an epoch, and how many it can hold."""
    began = time.perf_counter()
    limit = f"{samples + int(share * samples) * SLOT_BYTES}B"
    options: dict[str, Any] = {"persist": True, "fingerprint": "1", "placement": "scattered"}
    cache = SharedCacheDDP(limit, samples, DIMS, name="benchmark-warm", **options)
    attached = time.perf_counter() - began
    image, reads = torch.zeros(DIMS, dtype=torch.uint8), 0
    for idx in torch.randperm(samples).tolist():
        if cache.get_slot(idx, copy=False) is None:
            reads += 1
            cache.set_slot(idx, image)
    return 1e3 * attached, reads, len(cache)


@experiment(needs="stocaching")
def warm(run: Run) -> None:
    """A second run over a cache of 4 GiB that stays: reads of its first epoch, and the time to attach."""
    samples = run.size(4096, 128) * MIB // SLOT_BYTES
    settle(samples * SLOT_BYTES)
    table = run.table("cached", "run", "attaching, ms", "reads", "(1-c)N")
    for part in run.size((1.0, 0.5), (0.5,)):
        for name in ("makes it", "finds it"):
            ms, reads, slots = in_interpreter(persisted, part, samples)
            table.row(f"{part:.0%}", name, ms, reads, samples - slots)
        for cache in listing.find():
            named.remove(cache.path)
    run.claim("a second run has its cache in 100 ms", max(table.column("attaching, ms", run="finds it")), most=100)
    reads, missing = (table.column(title, run="finds it") for title in ("reads", "(1-c)N"))
    run.claim("and reads what is not cached", reads == missing)
    began = time.perf_counter()
    stocaching(samples * SLOT_BYTES, samples, DIMS)
    print(f"\nstocaching, which finds nothing of an earlier run, makes as much in {time.perf_counter() - began:.2f} s")


# ---------------------------------------------------------------------------------------------------- lists


def list_of(way: str, method: str, count: int) -> tuple[float, float]:
    """Read a whole list with 8 workers; return the GiB of memory at its peak, and the seconds until the first batch."""
    paths: Any = [f"data/train/class{number % 1000:04}/{number:010}.jpg" for number in range(count)]
    if way == "numpy strings":
        paths = np.array(paths, dtype=np.bytes_)
    dataset: Any = Made(count, partial(length_of, paths))
    if way == "share":
        dataset = share(dataset)
    del paths
    loader = DataLoader(dataset, count // 200, shuffle=True, num_workers=8, multiprocessing_context=method)
    began, first_s, most = time.perf_counter(), 0.0, 0
    for number, _ in enumerate(loader):
        first_s = first_s or time.perf_counter() - began
        if number % 20 == 0 or number == len(loader) - 2:
            most = max(most, pss(os.getpid()))
    return most / GIB, first_s


def length_of(paths: Any, idx: int) -> int:
    """Return the length of a path."""
    return len(paths[idx])


@experiment(rounds=10_000_000, quick=100_000)
def lists(run: Run) -> None:
    """Memory of 8 workers and their parent over a dataset with a list of 10^7 paths, and the first batch."""
    table, found = run.table("list", "workers", "memory of all, GiB", "first batch, s"), {}
    methods = run.size(("fork", "spawn"), ("fork",))
    for method in methods:
        for way in ("list", "numpy strings", "share"):
            environment = os.environ | {"PYTHONWARNINGS": "ignore"}
            found[method, way] = in_interpreter(list_of, way, method, run.rounds, env=environment)
            table.row(way, method, *found[method, way])
    for method in methods:
        less = found[method, "share"][0] / found[method, "list"][0]
        run.claim(f"share holds one list, {method}: of the memory of a list", less, most=0.25)
