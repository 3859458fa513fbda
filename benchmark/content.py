"""The contents of a cache: its memory against the limit, and admission by cost."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import pss
from stocache import CachedDataset
from stocache.system.limits import MIB

CLAIM = "A cache stays within its limit; admission by cost serves 55 % of requests from 20 % of the bytes."


def sizes(count: int, mean_bytes: int) -> Any:
    """Return log-normal sizes of samples."""
    drawn = np.random.default_rng(0).lognormal(0, 1, count)
    return (drawn / drawn.mean() * mean_bytes).astype(int)


def ragged(nbytes: Any, cost_s: float, idx: int) -> tuple[torch.Tensor, int]:
    """Return a tensor of the size of an index; loading takes the same time for each."""
    time.sleep(cost_s)
    return torch.full((int(nbytes[idx]),), idx % 256, dtype=torch.uint8), idx


def equal(idx: int) -> tuple[torch.Tensor, int]:
    """Return a tensor of one shape."""
    return torch.full((3, 100, 133), idx % 256, dtype=torch.uint8), idx


def _pss_of(cached: Any) -> int:
    """Return the memory of the cache in this process and its children; shared pages count once."""
    inode, here = os.fstat(cached.cache._segment.fd).st_ino, psutil.Process()
    maps = [entry for process in [here, *here.children(recursive=True)] for entry in process.memory_maps()]
    return sum(entry.pss for entry in maps if entry.path.endswith(f"#{inode}") or "memfd:stocache" in entry.path)


@experiment()
def memory(run: Run) -> None:
    """Compare the memory of a job with 4 workers, with a cache and without it, with the limit."""
    table = run.table("samples", "limit, MiB", "cached, MiB", "PSS of the cache, MiB", "of the limit", "the job grows by, MiB")
    makers: tuple[Callable[[int], Any], ...] = partial(ragged, sizes(20_000, 40_000), 0), equal
    for title, make in zip(("of varying size", "of one shape"), makers, strict=True):
        dataset = Made(20_000, make)
        for limit in run.size((128, 512, 2048), (128,)):
            with CachedDataset(dataset, f"{limit}MiB", audit=0) as cached:
                grown = []
                for data in (dataset, cached):
                    loader = DataLoader(data, 64, num_workers=4, persistent_workers=True, collate_fn=len)
                    for _ in range(run.size(3, 2)):  # filling maps few pages
                        for _ in loader:
                            pass
                    grown.append(pss(os.getpid()) / MIB)
                    own = _pss_of(cached) / MIB
                    del loader
                filled = cached.stats().total.filled_bytes / MIB
            table.row(title, limit, filled, own, own / limit, grown[1] - grown[0])
    run.claim("the cache is within its limit, but for its header and counters", max(table.column("of the limit")), most=1.002)


@experiment()
def cost(run: Run) -> None:
    """Compare the requests that a fifth of the bytes serves, with admission by cost and without."""
    nbytes = sizes(run.size(4000, 400), 20_000)
    source = Made(len(nbytes), partial(ragged, nbytes, 0.001))
    table = run.table("admission", "epoch 2", "epoch 3", "epoch 4")
    for admission in ("all", "cost"):
        with CachedDataset(source, f"{int(nbytes.sum() * 0.2)}B", variable=True, admission=admission, audit=0) as cached:
            for epoch in range(4):
                for _ in DataLoader(cached, 64, shuffle=True, num_workers=4, collate_fn=len):
                    pass
                cached.set_epoch(epoch)
            table.row(admission, *(epoch.hit_rate for epoch in cached.stats().epochs[1:4]))
    (share,) = table.column("epoch 4", admission="cost")
    run.claim("admission by cost serves 55 % of the requests", share, least=run.size(0.55, 0.5))
