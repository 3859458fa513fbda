"""Training over a DataLoader on a /dev/shm that is tiny, small, full or read-only: it completes, and caches where memfd can.

    sudo python -m benchmark small_shm            # caches
    sudo python -m benchmark small_shm loaders    # large batches from worker processes: torch's DataLoader, and ours

Each case runs in a private mount namespace (``unshare -m``) with a tmpfs of its own over /dev/shm; the machine's stays
untouched. Needs root.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import stocache
from stocache import CachedDataset, SharedCache
from stocache.system import limits

CLAIM = "Training completes on a tiny, small, full or read-only /dev/shm, and caches where a memfd is possible (needs root)."


@dataclass(frozen=True)
class Case:
    """One job on one /dev/shm.

    Attributes:
        mount: options of its tmpfs; "ro" is applied after mounting.
        free: bytes another program's file leaves free, before the cache is made or (``late``) after; None for no such file.
        workers: of the DataLoader. Torch's batches and semaphores need 14 pages of /dev/shm for 2 workers, and as much again
            when a second epoch starts before the threads of the first have ended; so 0 where it has no space.
        numpy: batches go to the parent through a pipe instead of /dev/shm.
        memfd: whether memfd_create is allowed.
        samples: of 3 x 128 x 128 uint8, 48 KiB each.
    """

    name: str
    mount: str = "size=1m"
    free: int | None = None
    late: bool = False
    workers: int = 2
    numpy: bool = False
    memfd: bool = True
    samples: int = 256


CASES = [
    Case("1 MiB"),
    Case("64 MiB", "size=64m", samples=2048),
    Case("full but for 128 KiB", free=131072, numpy=True),
    Case("full", free=0, workers=0),
    Case("read-only", "size=64m,ro", workers=0),
    Case("1 MiB, no memfd", memfd=False, workers=0),
    Case("read-only, no memfd", "size=64m,ro", workers=0, memfd=False),
    Case("fills up while caching, no memfd", "size=64m", free=5 << 20, late=True, memfd=False, workers=0, samples=1024),
]

DIMS = (3, 128, 128)
PATTERN = (torch.arange(3 * 128 * 128) // 7).to(torch.uint8).view(DIMS)


class Noise(Dataset[tuple[int, torch.Tensor]]):
    """Samples that are a function of their index, cached; each with its index."""

    def __init__(self, samples: int, cache: SharedCache) -> None:
        self.samples, self.cache = samples, cache

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> tuple[int, torch.Tensor]:
        value = self.cache.get_slot(idx)
        if value is None:
            value = noise(idx)
            self.cache.set_slot(idx, value)
        return idx, value


def noise(idx: int) -> torch.Tensor:
    """Return sample ``idx``: no two of the first 65536 are equal."""
    return PATTERN * (idx % 256) + idx // 256


def to_numpy(batch: list[tuple[int, torch.Tensor]]) -> list[np.ndarray]:
    """Collate to arrays, which travel through a pipe."""
    return [np.stack([np.asarray(value) for value in part]) for part in zip(*batch, strict=True)]


def job(case: Case) -> None:
    """Train two epochs in this process's /dev/shm; print the counts of cached and read samples, as JSON."""
    torch.set_num_threads(1)
    if not case.memfd:
        limits.open_memfd = lambda: None
    if case.free is not None and not case.late:
        _occupy(case.free)
    cache = SharedCache(1, case.samples, DIMS)
    if case.free is not None and case.late:
        _occupy(case.free)
    loader = DataLoader(
        Noise(case.samples, cache),
        batch_size=2,
        shuffle=True,
        num_workers=case.workers,
        collate_fn=to_numpy if case.numpy else None,
    )
    for _ in range(2):
        for indices, values in loader:
            for idx, value in zip(indices.tolist(), values, strict=True):
                assert torch.equal(torch.as_tensor(value), noise(idx)), f"sample {idx} is wrong"
    stats = cache.stats()
    print(json.dumps({"backing": cache._segment.backing, **asdict(stats)}))


def _occupy(free: int) -> None:
    """Fill /dev/shm with another program's file until ``free`` bytes are left."""
    with open("/dev/shm/other", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, limits.shm_free() - free)


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of 3 x 224 x 224, of which a batch of 256 has 38.5 MB."""

    def __len__(self) -> int:
        return 2560

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 224, 224), idx % 251, dtype=torch.uint8), idx


LOADERS = {
    "torch, no cache": lambda options: torch.utils.data.DataLoader(Images(), **options),
    "ours, no cache": lambda options: stocache.DataLoader(Images(), **options),
    "torch, cached": lambda options: torch.utils.data.DataLoader(CachedDataset(Images(), 1), **options),
    "ours, cached": lambda options: stocache.DataLoader(CachedDataset(Images(), 1), **options),
}


def load(name: str) -> None:
    """Iterate two epochs with 4 workers in this process's /dev/shm; print the number of batches, as JSON."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    loader = LOADERS[name]({"batch_size": 256, "num_workers": 4})
    batches = 0
    for _ in range(2):
        for images, labels in loader:
            assert torch.equal(images[:, 0, 0, 0], (labels % 251).to(torch.uint8))
            assert torch.equal(images[:, 2, 223, 223], (labels % 251).to(torch.uint8))
            batches += 1
    outside = loader.stats().fallbacks if isinstance(loader, stocache.DataLoader) else {}
    print(json.dumps({"batches": batches, "outside": sum(outside.values())}))


def run(name: str, mount: str) -> dict[str, object]:
    """Run a job by its name in a mount namespace of its own; return its output.

    Raises:
        subprocess.CalledProcessError: the job failed, or was killed by a signal (a negative return code).
    """
    options, read_only = mount.removesuffix(",ro"), mount.endswith(",ro")
    script = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    script += " && mount -o remount,ro /dev/shm" if read_only else ""
    command = f"{script} && exec '{sys.executable}' -m benchmark.small_shm '{name}'"
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", command],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1], timeout=120,
    )  # fmt: skip
    return {**json.loads(result.stdout.splitlines()[-1]), "warnings": result.stderr.strip()}


def loaders() -> None:
    """Run all loaders on the 64 MiB that Docker gives, and print a table."""
    print("| DataLoader | two epochs of 10 batches of 38.5 MB, 4 workers, 64 MiB of /dev/shm |\n| --- | --- |")
    for name in LOADERS:
        try:
            result = run(name, "size=64m")
            outcome = f"{result['batches']} batches, {result['outside']} of them outside of the ring"
        except subprocess.CalledProcessError as error:
            errors = [line for line in error.stderr.splitlines() if re.match(r"\w*Error|.*[Bb]us error", line)]
            outcome = f"fails: {errors[-1]}"
        print(f"| {name} | {outcome} |", flush=True)


def main() -> None:
    """Run all cases and print a table; or, given a name, that case's job."""
    if sys.argv[1:] == ["loaders"]:
        loaders()
        return
    if sys.argv[1:] and sys.argv[1] in LOADERS:
        load(sys.argv[1])
        return
    if len(sys.argv) > 1:
        job(next(case for case in CASES if case.name == sys.argv[1]))
        return
    print(
        "| /dev/shm | workers | completes | cached in | cached of samples | refused |\n| --- | ---: | --- | --- | ---: | ---: |"
    )
    for case in CASES:
        result = run(case.name, case.mount)
        cached = f"{result['filled']} of {case.samples}"
        print(f"| {case.name} | {case.workers} | yes | {result['backing']} | {cached} | {result['refused']} |")


if __name__ == "__main__":
    main()
