"""Samples that draw from the thread's generators, collate functions and states are those of worker processes, bit for bit."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import stocache
from stocache import CachedDataset, SampleSeed
from stocache.loader.threads import crew
from tests.support.equality import same
from tests.support.processes import wait_until

N = 30


class Draws(Dataset):
    """Draws as transforms that know worker threads do; samples take different times."""

    def __len__(self):
        return N

    def __getitem__(self, idx):
        sum(range(idx % 7 * 3000))
        return idx + torch.rand(3, generator=torch.random.thread_safe_generator())


class DrawsTogether(Draws):
    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class Own(Draws):
    """Has a generator of its own."""

    def __init__(self):
        self.generator, self.random = torch.Generator().manual_seed(4), random.Random(3)

    def __getitem__(self, idx):
        return idx + torch.rand(2, generator=self.generator) + self.random.random()


def collate(samples):
    return torch.stack(samples) + torch.rand((), generator=torch.random.thread_safe_generator())


def loaders(make, **options):
    """A loader with threads, and one with processes."""
    options = {"num_workers": 2, "batch_size": 4, "timeout": 60} | options
    for method in ("thread", "multiprocessing"):
        yield stocache.DataLoader(make(), worker_method=method, generator=torch.Generator().manual_seed(3), **options)


def test_samples_that_draw_before_a_cache_do_not_hang():
    with CachedDataset(Draws(), 0.1, example=torch.zeros(3), on_change="keep") as dataset:
        for idx in range(0, N, 2):
            dataset[idx]  # of each batch, every second sample is a hit
        loader, _ = loaders(lambda: dataset, batch_size=8, num_workers=3)
        first, *others = (list(loader) for _ in range(30))  # the parts of a batch may come after the parts of later ones
        assert all(same(first, other) for other in others)
        assert [int(value) for value in torch.cat(first)[:, 0]] == list(range(N))


BY_HAND = {"batch_sampler": [(3, 1), (4,), (1, 5)], "batch_size": 1, "collate_fn": collate}
HOOK = SampleSeed(7, hooks=(random.seed,))


@pytest.mark.linux
@pytest.mark.parametrize(("make", "options", "seed"), [
    (Draws, BY_HAND, HOOK), (DrawsTogether, {"collate_fn": collate}, 7),
])  # fmt: skip
def test_sample_seed_gives_the_samples_of_processes(make, options, seed):
    threads, processes = loaders(make, sample_seed=seed, **options)
    for _ in range(2):
        assert same(list(threads), list(processes))


class Numbers(Draws):
    def __getitem__(self, idx):
        return torch.tensor([float(idx)])


def draw(samples):
    random.shuffle(samples)
    return torch.stack(samples) + torch.rand(1), np.random.normal(), torch.initial_seed(), get_worker_info().id


class Counted(Numbers):
    """Its collate function returns how many samples were made before, and how often it was called."""

    made = calls = 0

    def __getitem__(self, idx):
        self.made += 1
        return super().__getitem__(idx)

    def collate(self, samples):
        self.calls += 1
        return torch.stack(samples) + torch.rand(1), self.made, self.calls


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(torch.arange(info.id, N, info.num_workers, dtype=torch.float32))


def seed_all(worker):
    random.seed(torch.initial_seed() % 2**32)
    np.random.seed(torch.initial_seed() % 2**32)


COLLATES = [
    (Numbers, draw, {}), (Draws, draw, {"worker_init_fn": seed_all}), (Counted, Counted.collate, {"prefetch_factor": 1}),
    (Numbers, draw, {"sample_seed": 5}),
    (DrawsTogether, None, {"shuffle": True, "persistent_workers": True}), (Stream, draw, {}),
    (Own, None, {"prefetch_factor": 4, "num_workers": 3}),
]  # fmt: skip


def epochs(make, collate, options, method):
    """The batches of two epochs, the first of which is broken off, each with draws of the training step."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    dataset = make()
    collate = dataset.collate if make is Counted else collate
    options = {"batch_size": 4, "num_workers": 2, "collate_fn": collate} | options
    loader = stocache.DataLoader(dataset, worker_method=method, **options)
    return [
        (batch, torch.rand(1), random.random(), np.random.random())
        for count in (2, N)
        for batch in itertools.islice(loader, count)
    ]


@pytest.mark.linux
@pytest.mark.parametrize(("make", "collate", "options"), COLLATES)
def test_batches_and_the_numbers_of_the_training_step_are_those_of_processes(make, collate, options):
    first, second = (epochs(make, collate, options, "thread") for _ in range(2))
    assert same(first, second)
    assert same(first, epochs(make, collate, options, "multiprocessing"))


class Global(Draws):
    thread_safe, crew = True, None

    def __getitem__(self, idx):
        if idx == 0:  # until the loop waits for the batch of this sample
            wait_until(lambda: self.crew is not None and self.crew.waiting)
        return idx + torch.rand(2)


def test_samples_that_draw_from_the_global_generators_are_told_once(caplog):
    dataset = Global()
    loader = stocache.DataLoader(dataset, batch_size=N, num_workers=1, worker_method="thread")
    for _ in range(3):
        dataset.crew = None
        iterator = iter(loader)
        dataset.crew = iterator._batches._maker.crew
        assert len(list(iterator)) == 1
    assert caplog.text.count("global random number generators") == 1


class Held(Draws):
    """Its first sample comes once the other, which draws after it, is told of."""

    thread_safe, is_told = True, None

    def __getitem__(self, idx):
        assert idx or wait_until(self.is_told)
        return super().__getitem__(idx)


def test_a_sample_that_waits_long_for_its_turn_to_draw_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(crew, "_LONG_S", 0)
    dataset = Held()
    dataset.is_told = lambda: "holds a lock while it draws" in caplog.text
    assert len(list(stocache.DataLoader(dataset, batch_size=2, num_workers=2, worker_method="thread"))) == N // 2
    assert caplog.text.count("has waited 0 s for its random numbers") == 1
