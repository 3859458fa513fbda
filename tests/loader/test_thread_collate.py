"""A collate function that draws, counts or makes a generator gives with worker threads what it gives in worker processes."""

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

import stocache
from tests.support.equality import same

N = 22


class Numbers(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, idx):
        sum(range(idx % 5 * 3000))
        return torch.tensor([float(idx)])


class Draws(Numbers):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + torch.rand(1, generator=torch.random.thread_safe_generator())


class Counts(Numbers):
    """Its collate function tells how many samples were made before."""

    made = 0

    def __getitem__(self, idx):
        self.made += 1
        return super().__getitem__(idx)

    def collate(self, samples):
        return torch.stack(samples) + torch.rand(1), self.made


class Stateful(Counts):
    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(torch.arange(info.id, N, info.num_workers, dtype=torch.float32))


def draw(samples):
    random.shuffle(samples)
    return torch.stack(samples) + torch.rand(1), np.random.normal(), torch.initial_seed(), get_worker_info().id


def mix(alpha, samples):
    return np.random.beta(alpha, alpha) * torch.stack(samples)[torch.randperm(len(samples))]


def sometimes(samples):
    return torch.stack(samples) + (torch.rand(1) if samples[0] % 3 == 0 else 0)


class Lazy:
    """Makes its generator at the first call, and counts."""

    generator, calls = None, 0

    def __call__(self, samples):
        self.calls += 1
        self.generator = self.generator or torch.Generator().manual_seed(get_worker_info().seed)
        return torch.stack(samples) + torch.rand(1, generator=self.generator), self.calls


def seed_all(worker):
    random.seed(torch.initial_seed() % 2**32)
    np.random.seed(torch.initial_seed() % 2**32)


ROWS = [
    (Numbers, draw, {}), (Draws, draw, {"worker_init_fn": seed_all}), (Numbers, functools.partial(mix, 0.4), {}),
    (Numbers, sometimes, {"num_workers": 3, "prefetch_factor": 4}), (Numbers, Lazy(), {"persistent_workers": True}),
    (Counts, "collate", {"prefetch_factor": 1}), (Stateful, "collate", {"persistent_workers": True}), (Stream, draw, {}),
    (Numbers, lambda sample: sample + torch.rand(1), {"batch_size": None}), (Numbers, draw, {"sample_seed": 5}),
]  # fmt: skip


def all_draws():
    return torch.rand(1), random.random(), np.random.random()


def epochs(make, collate, options, method):
    """The batches of three epochs, the first of which is broken off, each with draws of the training step."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    dataset = make()
    collate = getattr(dataset, collate) if isinstance(collate, str) else collate
    options = {"batch_size": 4, "num_workers": 2, "collate_fn": collate} | options
    loader = stocache.DataLoader(dataset, worker_method=method, **options)
    return [(batch, all_draws()) for count in (2, N, N) for batch in itertools.islice(loader, count)]


@pytest.mark.parametrize(("make", "collate", "options"), ROWS)
def test_batches_and_the_numbers_of_the_training_step_are_those_of_processes(make, collate, options):
    first, second = (epochs(make, collate, options, "thread") for _ in range(2))
    assert same(first, second)
    assert same(first, epochs(make, collate, options, "multiprocessing"))


class Marked(float):
    pass


class MarkedNumbers(Numbers):
    def __getitem__(self, idx):
        return Marked(idx)


def test_default_collate_that_was_extended_counts_as_a_function_of_the_user(monkeypatch):
    def stack(samples, *, collate_fn_map):
        return torch.tensor(samples) + torch.rand(1)

    monkeypatch.setitem(default_collate_fn_map, Marked, stack)
    batches = [epochs(MarkedNumbers, default_collate, {}, method) for method in ("thread", "multiprocessing")]
    assert same(*batches)


def test_an_error_of_a_collate_function_takes_the_place_of_its_batch():
    def fail(samples):
        if samples[0] == 4:
            raise ValueError("not this one")
        return torch.stack(samples)

    iterator = iter(stocache.DataLoader(Numbers(), 4, num_workers=2, collate_fn=fail, worker_method="thread"))
    assert next(iterator)[0] == 0
    with pytest.raises(ValueError, match="not this one"):
        next(iterator)
    assert [int(batch[0]) for batch in iterator] == [8, 12, 16, 20]
