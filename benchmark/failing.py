"""Samples that fail: loads that fail once, and samples that always fail, over workers, ranks and a resume.

python -m benchmark failing once      # 1 % of the loads fail once: jobs that end, samples that differ, time beside no failures
python -m benchmark failing always    # 0.01 % of the samples always fail: one hash over workers, ranks and a resume
"""

import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmark.support.measuring import run_one
from stocache import CachedDataset, DataLoader, Retry, Skip, StatefulDistributedSampler

CLAIM = "With on_error, no job ends by loads that fail, and batches are the same over workers, ranks and a resume."

LENGTH, BATCH = 20_000, 80


class Requests(Dataset[Any]):
    """Samples that take 0.2 ms each. Some fail always; some once, which files in a folder note."""

    def __init__(self, once: str | None = None, always: int = 0) -> None:
        self.once, self.always = once, always

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, idx: int) -> Any:
        time.sleep(0.0002)
        if self.always and idx % self.always == 17:
            raise ValueError(f"object {idx} is truncated")
        if self.once is not None and idx % 100 == 3 and not (mark := Path(self.once, str(idx))).exists():
            mark.touch()
            raise ConnectionError(f"request {idx} was refused")
        return torch.full((16,), float(idx)) + torch.rand(1)


def digest(batches: Any) -> str:
    """Return a hash of batches."""
    found = hashlib.sha256()
    for batch in batches:
        found.update(batch.numpy().tobytes())
    return found.hexdigest()[:12]


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader in one order, whose samples have random numbers of their own."""
    torch.manual_seed(1)
    return DataLoader(dataset, batch_size=BATCH, shuffle="sampler" not in options, sample_seed=5, **options)


def once(rounds: int) -> None:
    """Print the time and the hash of epochs in which 1 % of the loads fail once."""
    on_error = Retry(times=3, backoff_s=0.001)
    print("| workers | failures | jobs that ended | samples that differ | epoch, s | beside none |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, options in {"0": {}, "2": {"num_workers": 2}, "8": {"num_workers": 8}}.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        hashes, ended = set(), 0
        for _, fails in [(number, fails) for number in range(rounds) for fails in seconds]:
            with tempfile.TemporaryDirectory() as folder:
                made = loader(Requests(folder if fails else None), on_error=on_error if fails else None, **options)
                began = time.perf_counter()
                try:
                    hashes.add(digest(made))
                except ConnectionError:
                    ended += 1
                seconds[fails].append(time.perf_counter() - began)
        plain, failed = (statistics.median(seconds[fails]) for fails in (False, True))
        differ = 0 if len(hashes) == 1 else "some"
        print(f"| {name} | {LENGTH // 100} | {ended} | {differ} | {failed:.2f} | {failed / plain:.3f} |", flush=True)


def always() -> None:
    """Print the hash of all samples of an epoch of which 0.01 % always fail."""
    dataset, on_error = Requests(always=LENGTH // 2), [Retry(1, 0.0), Skip(at_most=0.001)]
    print("| topology | hash | replaced |\n|---|---|---|")
    for workers in (0, 2, 8):
        made = loader(dataset, on_error=on_error, num_workers=workers)
        print(f"| {workers} workers | {digest(made)} | {made.stats().failed} |", flush=True)
    with CachedDataset(dataset, "64MB", on_error=on_error) as cached:
        made = loader(cached)
        print(f"| a CachedDataset | {digest(made)} | {made.stats().failed} |", flush=True)
    first = loader(dataset, on_error=on_error, num_workers=2)
    batches, head = iter(first), []
    for _ in range(LENGTH // BATCH // 2):
        head.append(next(batches))
    resumed = loader(dataset, on_error=on_error)
    resumed.load_state_dict(first.state_dict())
    print(f"| resumed in the middle | {digest([*head, *resumed])} | {resumed.stats().failed} |", flush=True)
    for ranks in (1, 2, 4):
        own = []
        for rank in range(ranks):
            sampler = StatefulDistributedSampler(dataset, ranks, rank, shuffle=True, seed=3)
            made = loader(dataset, sampler=sampler, on_error=on_error, num_workers=2)
            own.append(torch.cat(list(made)))
        together = torch.stack(own, 1).flatten(0, 1)  # rank r has the samples r, r + ranks, ...
        print(f"| {ranks} ranks, by the order of all | {digest([together])} | |", flush=True)


if __name__ == "__main__":
    run_one(str(__doc__), {"once": once, "always": lambda rounds: always()}, rounds=3)
