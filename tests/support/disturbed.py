"""A program that disturbs its loader between two epochs: it draws, skips epochs, leaves loops early, loads states."""

import random

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from stocache import BlockSampler, DataLoader
from stocache.system import generators

LENGTH, BATCH, WORKERS = 23, 4, 2


class Draws:
    """Samples of random numbers of all kinds, and the epoch."""

    def __init__(self):
        self.epoch, self.own = 0, np.random.default_rng(3)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return LENGTH

    def __getitem__(self, idx):
        drawn = random.random(), float(np.random.rand()), float(torch.rand(1)), float(self.own.random())
        return torch.tensor([idx, self.epoch, *drawn], dtype=torch.float64)


SAMPLERS = {
    "in order": lambda dataset: {},
    "shuffled": lambda dataset: {"shuffle": True},
    "with replacement": lambda dataset: {"sampler": RandomSampler(dataset, replacement=True)},
    "weighted": lambda dataset: {"sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH)},
    "distributed": lambda dataset: {"sampler": DistributedSampler(dataset, 2, 1, seed=4)},
    "of blocks": lambda dataset: {"sampler": BlockSampler(range(LENGTH), 5, shuffle=True, seed=4)},
    "few batches": lambda dataset: {"sampler": RandomSampler(dataset, num_samples=5)},
    "own generator": lambda dataset: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
}


def disturb(loader, chance, epoch):
    """Change what the next epoch depends on, in one of several ways; mostly not."""
    way = chance.choice(["", "", "", "draw", "epoch", "batch size", "state"])
    if way == "draw":
        torch.rand(1)
    elif way == "epoch":
        loader.set_epoch(epoch + chance.randrange(5))
    elif way == "batch size":
        loader.batch_sampler.batch_size = chance.choice([3, 4])
    elif way == "state":
        loader.load_state_dict(loader.state_dict())


def play(sampler, seed, epochs, **options):
    """Return the batches, random states and positions of a program; programs of odd seeds only shuffle and set epochs."""
    generators.seed_all([7, 7, 7])
    chance, dataset, found = random.Random(seed), Draws(), []
    workers = {"num_workers": WORKERS, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, BATCH, **workers, **SAMPLERS[sampler](dataset), **options)
    for epoch in range(epochs):
        if seed % 2 or chance.random() < 0.7:
            loader.set_epoch(epoch)
        stop = None if seed % 2 else chance.choice([None, None, None, 1, 4, 6])
        for number, batch in enumerate(loader, 1):
            found.append(batch.tolist())
            if number == stop:
                break
        found.append((generators.states([]), loader.state_dict()["position"]))
        if not seed % 2:
            disturb(loader, chance, epoch)
    del loader
    return found
