"""Loads that fail once: jobs that end, samples that differ, and the time beside no failures."""

import hashlib
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from stocache import DataLoader, Retry

CLAIM = "With on_error, no job ends by loads that fail, and no sample differs."


def requested(marks: str | None, idx: int) -> torch.Tensor:
    """Return a sample of 0.2 ms. With a folder, one load in 100 fails once, which a file marks."""
    time.sleep(0.0002)
    if marks is not None and idx % 100 == 3 and not (mark := Path(marks, str(idx))).exists():
        mark.touch()
        raise ConnectionError(f"request {idx} was refused")
    return torch.full((16,), float(idx)) + torch.rand(1)


def epoch(length: int, workers: int, fails: bool, found: Counter[str]) -> None:
    """Run an epoch, in which loads fail or not; count its hash, or that the job has ended."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        dataset = Made(length, partial(requested, folder if fails else None))
        on_error, digest = Retry(times=3, backoff_s=0.001) if fails else None, hashlib.sha256()
        try:
            for batch in DataLoader(dataset, 80, shuffle=True, sample_seed=5, on_error=on_error, num_workers=workers):
                digest.update(batch.numpy().tobytes())
            found[digest.hexdigest()] += 1
        except ConnectionError:
            found["ended"] += 1


@experiment(rounds=3)
def once(run: Run) -> None:
    """Epochs in which 1 % of the loads fail once."""
    length = run.size(20_000, 2_000)
    table = run.table("workers", "failures", "jobs that ended", "samples that differ", "epoch, s", "beside none")
    ended, differ = 0, False
    for workers in (0, 2, 8):
        found = Counter[str]()
        kinds = {"failing": True, "plain": False}
        took = run.turns({name: partial(epoch, length, workers, fails, found) for name, fails in kinds.items()}, warm_up=0)
        ended, differ = ended + found["ended"], differ or len(set(found) - {"ended"}) > 1
        table.row(workers, length // 100, ended, differ, took.median("failing"), took.ratio("failing", "plain"))
    run.claim("no job ends, and no sample differs", not ended and not differ)
