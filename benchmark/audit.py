"""What the audit finds: kinds of samples that depend on more than their index, with several loaders.

A sample is wrong if it differs from the sample of the dataset without a cache, in the same loader, with the same seeds. If the
samples of two runs cannot be the same (the time, ``os.urandom``), an epoch that repeats another counts as wrong. The kinds are
those of tests/support/depending.py. Worker threads draw in no fixed order, so kinds that draw are left out there.
"""

import operator
import tempfile
from pathlib import Path

from benchmark.support.harness import Run, experiment
from stocache import CachedDataset
from tests.support.depending import KINDS
from tests.support.epochs import LOADERS, Epoch, epochs

CLAIM = "A sample that depends on more than its index is found before a wrong batch is handed over."


def wrong(name: str, loader: str) -> int | None:
    """Return how many samples are wrong; None if threads would draw."""
    kind = KINDS[name]
    if "threads" in loader and (kind.change is None or "split" in name or name in ("transform set", "transform in place")):
        return None
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plain = kind.make(Path(one))
        expected = _texts(epochs(plain, loader, 8, plain, kind.change))
        inner = kind.make(Path(other))
        with CachedDataset(inner, 1) as cached:
            found = _texts(epochs(cached, loader, 8, inner, kind.change))
    if not kind.repeats:
        return sum(sorted(found[0]) == sorted(epoch) for epoch in found[1:]) * len(found[0])
    return sum(sum(map(operator.ne, *pair)) for pair in zip(found, expected, strict=True))


def _texts(epochs: list[Epoch]) -> list[list[str]]:
    return [list(map(repr, epoch.samples)) for epoch in epochs]


@experiment()
def kinds(run: Run) -> None:
    """Compare the samples of three epochs, by kind and loader."""
    loaders = run.size([name for name in LOADERS if name != "ours, thread"], ["torch", "ours, 2 workers"])
    table = run.table("kind", *loaders)
    for name in list(run.chosen(KINDS))[:: run.size(1, 5)]:
        table.row(name, *(wrong(name, loader) for loader in loaders))
    run.claim("no sample is wrong", not any(any(table.column(loader)) for loader in loaders))
