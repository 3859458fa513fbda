"""Compare our DataLoader with torch's."""

import random

import numpy as np
import torch

import stocache
from tests.support.epochs import seed
from tests.support.equality import same

THREADS = {"num_workers": 2, "worker_method": "thread", "timeout": 60}


def both(dataset, theirs=None, worker_method="multiprocessing", **options):
    """Our loader and torch's, with generators of the same seed."""
    make = lambda: {"generator": torch.Generator().manual_seed(3), **options}
    ours = stocache.DataLoader(dataset, worker_method=worker_method, **make())
    return ours, torch.utils.data.DataLoader(theirs or dataset, **make())


def seed_all():
    seed(0)


def agree(ours, theirs, epochs=2):
    """Demand that two loaders make the same batches, and leave the random numbers the same."""
    seed_all()
    expected = [list(theirs) for _ in range(epochs)]
    after = torch.rand(1), random.random(), np.random.rand()
    seed_all()
    for batches in expected:
        came = list(ours)
        assert len(came) == len(batches)
        assert same(came, batches)
    assert (torch.rand(1), random.random(), np.random.rand()) == after


def labels_of(batches):
    """The labels of pairs of images and labels, in order."""
    return [label for _, labels in batches for label in labels.tolist()]
