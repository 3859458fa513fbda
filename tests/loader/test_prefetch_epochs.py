"""``prefetch_epochs``: the first batches of the next epoch are made during this one, and nothing else changes."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from stocache import BlockSampler, CachedDataset, DataLoader
from stocache.system import generators as rng
from tests.support.processes import wait_until

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


class Counts(Draws):
    """Counts the samples that all processes have loaded, and fails at some."""

    def __init__(self, failing=()):
        super().__init__()
        self.loaded, self.failing = torch.zeros(LENGTH, dtype=torch.int64).share_memory_(), failing

    def __getitem__(self, idx):
        self.loaded[idx] += 1
        if idx in self.failing and self.loaded[idx] > 1:
            raise ValueError(f"sample {idx} is gone")
        return torch.tensor([idx])


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
    elif way == "batch size" and loader.batch_sampler is not None:
        loader.batch_sampler.batch_size = chance.choice([3, 4])
    elif way == "state":
        loader.load_state_dict(loader.state_dict())


def epochs_of(make, count, seed, **options):
    """The batches, random states and states of the loader of some epochs with disturbances between and within them."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    chance, dataset, found = random.Random(seed), Draws(), []
    loader = DataLoader(
        dataset, BATCH, num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork", **make(dataset), **options
    )
    for epoch in range(count):
        if chance.random() < 0.7:
            loader.set_epoch(epoch)
        stop = chance.choice([None, None, None, 1, 4, 6])
        for number, batch in enumerate(loader, 1):
            found.append(batch.tolist())
            if number == stop:
                break
        found.append((rng.states([]), loader.state_dict()["position"]))
        disturb(loader, chance, epoch)
    del loader
    return found


@pytest.mark.linux
@pytest.mark.parametrize("seed", [{}, {"sample_seed": 3}], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_and_random_numbers_and_states_are_as_without(sampler, seed):
    trial = len(sampler)
    expected = epochs_of(SAMPLERS[sampler], 8, trial, **seed)
    assert epochs_of(SAMPLERS[sampler], 8, trial, prefetch_epochs=True, **seed) == expected


@pytest.mark.linux
@pytest.mark.parametrize("options", [{"shuffle": True}, {"device": "cpu"}, {"sample_seed": 3, "shuffle": True}], ids=str)
def test_the_first_batches_of_the_next_epoch_are_made_during_this_one(options):
    dataset = Counts()
    loader = DataLoader(dataset, BATCH, num_workers=2, persistent_workers=True, prefetch_epochs=True, **options)
    for epoch in range(1, 4):
        assert sum(1 for _ in loader) == 6
        made = epoch * LENGTH + 2 * 2 * BATCH
        assert wait_until(lambda made=made: int(dataset.loaded.sum()) == made), (dataset.loaded, made)
    del loader


@pytest.mark.linux
def test_without_it_nothing_is_made_between_two_epochs():
    dataset = Counts()
    loader = DataLoader(dataset, BATCH, num_workers=2, persistent_workers=True)
    assert [sum(1 for _ in loader) for _ in range(2)] == [6, 6]
    assert int(dataset.loaded.sum()) == 2 * LENGTH
    del loader


@pytest.mark.linux
def test_an_error_of_a_batch_made_ahead_is_raised_in_its_epoch():
    dataset = Counts(failing=[5])
    loader = DataLoader(dataset, BATCH, num_workers=2, persistent_workers=True, prefetch_epochs=True)
    assert sum(1 for _ in loader) == 6
    batches = iter(loader)
    assert next(batches).flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="sample 5 is gone"):
        next(batches)
    assert [batch[0].item() for batch in batches] == [8, 12, 16, 20]
    del loader, batches


@pytest.mark.linux
def test_batches_of_a_cache_are_gathered_ahead():
    images = [torch.full((3, 8, 8), idx, dtype=torch.uint8) for idx in range(64)]
    with CachedDataset(images, "1MB", audit=0) as cached:
        loader = DataLoader(cached, 8, shuffle=True, num_workers=2, persistent_workers=True, prefetch_epochs=True)
        for _ in range(4):
            seen = torch.cat([batch[:, 0, 0, 0] for batch in loader])
            assert sorted(seen.tolist()) == list(range(64))
        del loader
