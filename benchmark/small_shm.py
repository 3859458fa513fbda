"""Training over a DataLoader on a /dev/shm that is tiny, small, full or read-only: it completes, and caches where memfd can.

Each case runs in a private mount namespace (``unshare -m``) with a tmpfs of its own over /dev/shm; the machine's stays
untouched.
"""

import io
import itertools
import logging
import os
import re
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import stocache
from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.peers import OverSlots
from benchmark.support.processes import in_interpreter
from stocache import CachedDataset, SharedCache
from stocache.system import limits

CLAIM = "Training completes on a tiny, small, full or read-only /dev/shm, and caches where a memfd is possible (needs root)."


def in_shm(mount: str, job: Any, *arguments: Any) -> Any:
    """Return what a job returns in a mount namespace with a /dev/shm of its own; "ro" is applied after mounting.

    Raises:
        subprocess.CalledProcessError: the job failed, or was killed by a signal (a negative return code).
    """
    script = f"mount -t tmpfs -o {mount.removesuffix(',ro')} tmpfs /dev/shm"
    script += " && mount -o remount,ro /dev/shm" if mount.endswith(",ro") else ""
    before = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{script} && exec "$0" "$@"']
    return in_interpreter(job, *arguments, before=before, stderr=subprocess.PIPE, timeout=120)


@dataclass(frozen=True)
class Case:
    """One job on one /dev/shm.

    Attributes:
        mount: options of its tmpfs.
        free: bytes another program's file leaves free, before the cache is made or (``late``) after; None for no such file.
        workers: of the DataLoader. Torch's batches and semaphores need 14 pages of /dev/shm for 2 workers, and as much again
            when a second epoch starts before the threads of the first have ended; so 0 if it has no space.
        numpy: batches go to the parent through a pipe instead of /dev/shm.
        memfd: whether memfd_create is allowed.
        samples: of 3 x 128 x 128 uint8, 48 KiB each.
    """

    mount: str = "size=1m"
    free: int | None = None
    late: bool = False
    workers: int = 2
    numpy: bool = False
    memfd: bool = True
    samples: int = 256


CASES = {
    "1 MiB": Case(),
    "64 MiB": Case("size=64m", samples=2048),
    "full but for 128 KiB": Case(free=131072, numpy=True),
    "full": Case(free=0, workers=0),
    "read-only": Case("size=64m,ro", workers=0),
    "1 MiB, no memfd": Case(memfd=False, workers=0),
    "read-only, no memfd": Case("size=64m,ro", workers=0, memfd=False),
    "fills up while caching, no memfd": Case("size=64m", free=5 << 20, late=True, memfd=False, workers=0, samples=1024),
}

DIMS = (3, 128, 128)
PATTERN = (torch.arange(3 * 128 * 128) // 7).to(torch.uint8).view(DIMS)


def noise(idx: int) -> torch.Tensor:
    """Return sample ``idx``: no two of the first 65536 are equal."""
    return PATTERN * (idx % 256) + idx // 256


def to_numpy(batch: list[tuple[torch.Tensor, int]]) -> list[np.ndarray]:
    """Collate to arrays, which travel through a pipe."""
    return [np.stack([np.asarray(value) for value in part]) for part in zip(*batch, strict=True)]


def train(name: str) -> dict[str, Any]:
    """Train two epochs in this process's /dev/shm; return the statistics of the cache, where it is, and the warnings."""
    case, said = CASES[name], io.StringIO()
    logging.basicConfig(stream=said)
    torch.set_num_threads(1)
    if not case.memfd:
        limits.open_memfd = lambda: None
    if case.free is not None and not case.late:
        _occupy(case.free)
    cache = SharedCache(1, case.samples, DIMS)
    if case.free is not None and case.late:
        _occupy(case.free)
    collate = to_numpy if case.numpy else None
    dataset = OverSlots(Made(case.samples, lambda idx: (noise(idx), idx)), cache, labels=True)
    loader = DataLoader(dataset, 2, shuffle=True, num_workers=case.workers, collate_fn=collate)
    for _ in range(2):
        for values, indices in loader:
            for idx, value in zip(indices.tolist(), values, strict=True):
                assert torch.equal(torch.as_tensor(value), noise(idx)), f"sample {idx} is wrong"
    return {"backing": cache._segment.backing, "warnings": said.getvalue(), **asdict(cache.stats())}


def _occupy(free: int) -> None:
    """Fill /dev/shm with another program's file until ``free`` bytes are left."""
    with open("/dev/shm/other", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, limits.shm_free() - free)


def run_case(name: str) -> dict[str, Any]:
    """Return the result of `train` on the /dev/shm of a case."""
    return in_shm(CASES[name].mount, train, name)


@experiment(needs="root")
def caches(run: Run) -> None:
    """Train two epochs over a cache."""
    table = run.table("/dev/shm", "workers", "cached in", "cached of samples", "refused")
    for name in list(run.chosen(CASES))[:: run.size(1, 3)]:
        case, result = CASES[name], run_case(name)
        table.row(name, case.workers, result["backing"], f"{result['filled']} of {case.samples}", result["refused"])
    run.claim("all cases complete, with right samples", True)


def image(idx: int) -> tuple[torch.Tensor, int]:
    """Return an image, of which a batch of 256 has 38.5 MB."""
    return torch.full((3, 224, 224), idx % 251, dtype=torch.uint8), idx


def load(ours: bool, cached: bool) -> dict[str, int]:
    """Iterate two epochs with 4 workers in this process's /dev/shm; return the number of batches."""
    cls = stocache.DataLoader if ours else DataLoader
    dataset = Made(2560, image)
    loader = cls(CachedDataset(dataset, 1) if cached else dataset, batch_size=256, num_workers=4)
    batches = 0
    for _ in range(2):
        for images, labels in loader:
            for corner in (images[:, 0, 0, 0], images[:, 2, 223, 223]):
                assert torch.equal(corner, (labels % 251).to(torch.uint8))
            batches += 1
    return {"batches": batches, "outside": sum(loader.stats().fallbacks.values()) if ours else 0}


@experiment(needs="root")
def loaders(run: Run) -> None:
    """Load batches of 38.5 MB by 4 workers in the 64 MiB of /dev/shm that Docker has."""
    table = run.table("DataLoader", "cached", "two epochs of 10 batches")
    for ours, cached in itertools.product(run.size((False, True), (True,)), (False, True)):
        try:
            result = in_shm("size=64m", load, ours, cached)
            outcome = f"{result['batches']} batches, {result['outside']} of them outside of the ring"
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if re.match(r"\w*Error|.*[Bb]us error", line)]
            outcome = f"fails: {lines[-1]}"
        table.row("stocache" if ours else "torch", cached, outcome)
    ours_only = set(table.column("two epochs of 10 batches", DataLoader="stocache"))
    run.claim("our batches pass", ours_only == {"20 batches, 0 of them outside of the ring"})
