"""Samples that draw from the thread's generators, and states, are those of worker processes, bit for bit."""

import logging
import random
import threading

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info

import stocache
from stocache import CachedDataset, SampleSeed
from tests.support.equality import same

N = 48

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")


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


class Counts(Draws):
    """Has a state: how many samples it made."""

    made = 0

    def __getitem__(self, idx):
        self.made += 1
        return torch.tensor([idx, self.made])

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, N + 5 * info.id, info.num_workers)


class StatefulStream(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        info, start = get_worker_info(), self.at
        for idx in range(info.id + start * info.num_workers, N + 5 * info.id, info.num_workers):
            self.at += 1
            yield idx
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


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
    for method in ("thread", "multiprocessing"):
        generator = torch.Generator().manual_seed(3)
        yield stocache.DataLoader(
            make(), worker_method=method, generator=generator, timeout=20, **{"num_workers": 3, **options}
        )


DATASETS = [Draws, DrawsTogether, Counts, Own]
OPTIONS = [
    {"batch_size": 4}, {"batch_size": 5, "shuffle": True, "persistent_workers": True}, {"batch_size": None, "num_workers": 2},
    {"batch_size": 8, "prefetch_factor": 4, "num_workers": 4},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", DATASETS)
def test_epochs_are_those_of_processes(make, options):
    threads, processes = loaders(make, **options)
    for _ in range(3):
        assert same(list(threads), list(processes))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", DATASETS)
def test_epochs_that_are_broken_off_are_those_of_processes(make, persistent):
    threads, processes = loaders(make, batch_size=4, persistent_workers=persistent)
    for count in (2, 1, 5):
        assert same(*([batch for batch, _ in zip(loader, range(count), strict=False)] for loader in (threads, processes)))


def test_a_collate_function_that_draws():
    threads, processes = loaders(Draws, batch_size=4, collate_fn=collate)
    assert same(list(threads), list(processes))


def test_samples_that_draw_before_a_cache_do_not_hang():
    with CachedDataset(Draws(), 1, example=torch.zeros(3)) as dataset:
        for idx in range(0, N, 2):
            dataset[idx]  # of each batch, every second sample is a hit
        loader = stocache.DataLoader(dataset, batch_size=8, num_workers=3, worker_method="thread", timeout=20)
        first, second = list(loader), list(loader)
        assert same(first, second)
        assert [int(value) for value in torch.cat(first)[:, 0]] == list(range(N))
        del loader


@pytest.mark.parametrize("seed", [7, SampleSeed(7, hooks=(random.seed,))], ids=["seed", "hooks"])
@pytest.mark.parametrize(
    "options", [{}, {"collate_fn": collate}, {"batch_sampler": [(3, 1), (4,), (1, 5)], "collate_fn": collate}]
)
@pytest.mark.parametrize("make", [Draws, DrawsTogether])
def test_sample_seed_gives_the_samples_of_processes(make, options, seed):
    options = {"batch_size": 4, **options} if "batch_sampler" not in options else options
    threads, processes = loaders(make, sample_seed=seed, **options)
    for _ in range(2):
        assert same(list(threads), list(processes))


class RaisesAtRandom(Draws):
    def __getitem__(self, idx):
        value = super().__getitem__(idx)
        if value[0] - idx < 0.03:
            raise ValueError(f"{idx} drew {value[0] - idx:.9f}")
        return value


def test_errors_that_depend_on_the_numbers_are_those_of_processes():
    found = []
    for loader in loaders(RaisesAtRandom, sample_seed=7, batch_size=2, num_workers=2):
        found.append([])
        iterator = iter(loader)
        for _ in range(N // 2):
            try:
                found[-1].append(next(iterator))
            except ValueError as error:
                found[-1].append(str(error).splitlines()[-1])
    assert same(*found)
    assert {type(batch) for batch in found[0]} == {str, torch.Tensor}


@pytest.mark.parametrize("make", [Draws, Counts, Stream, StatefulStream])
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"snapshot_every_n_steps": 3}], ids=str)
def test_states_resume_with_threads_what_processes_began(make, options):
    options = {"batch_size": 4, "num_workers": 2, "sample_seed": 5 if make is Draws else None, **options}
    for step in (0, 3, 7):
        threads, processes = loaders(make, **options)
        states = []
        for loader in (threads, processes):
            iterator = iter(loader)
            [next(iterator) for _ in range(step)]
            states.append(loader.state_dict())
        expected = [*iterator, *loader]
        for state in states:
            for loader in loaders(make, **options):
                loader.load_state_dict(state)
                assert same([*loader, *loader], expected)


def test_the_epoch_of_a_distributed_sampler():
    make = lambda: [
        stocache.DataLoader(
            Draws(), 4, sampler=DistributedSampler(range(N), 2, 1), num_workers=2, worker_method=method, sample_seed=3
        )
        for method in ("thread", "multiprocessing")
    ]
    threads, processes = make()
    for epoch in (0, 3, 4):
        threads.set_epoch(epoch)
        processes.set_epoch(epoch)
        assert same(list(threads), list(processes))


# ---------------------------------------------------------------------------------------------------- the global generators


class Global(Draws):
    def __getitem__(self, idx):
        return idx + torch.rand(2)


def warnings_of(caplog):
    return [record for record in caplog.records if "global random number generators" in record.getMessage()]


def test_samples_that_draw_from_the_global_generators_are_told_once(caplog):
    loader = stocache.DataLoader(Global(), batch_size=4, num_workers=2, worker_method="thread")
    for _ in range(3):
        list(loader)
    assert len(warnings_of(caplog)) == 1


class Slow(Draws):
    """Is being made while the training step draws."""

    def __getitem__(self, idx):
        torch.mm(torch.ones(60, 60), torch.ones(60, 60))
        sum(range(20_000))
        return torch.tensor(idx)


@pytest.mark.parametrize("make", [Slow, Draws])
def test_a_training_step_that_draws_is_not_taken_for_a_sample(make, caplog):
    caplog.set_level(logging.WARNING, "stocache")
    for _ in range(3):
        for _ in stocache.DataLoader(make(), batch_size=3, num_workers=3, worker_method="thread"):
            torch.rand(3)
            random.random()
    assert not warnings_of(caplog)


class DrawsUnderLock(Dataset):
    """A sample draws while it holds a lock that an earlier sample waits for."""

    def __init__(self):
        self.lock, self.held = threading.Lock(), threading.Event()

    def __len__(self):
        return 2

    def __getitem__(self, idx):
        if idx == 0:
            self.held.wait()
        with self.lock:
            self.held.set()
            return torch.rand((), generator=torch.random.thread_safe_generator())


def test_a_sample_that_holds_a_lock_while_it_draws_is_told(monkeypatch, caplog):
    monkeypatch.setattr("stocache.threads.crew._LONG_S", 0.2)
    loader = stocache.DataLoader(DrawsUnderLock(), batch_size=2, num_workers=2, worker_method="thread", timeout=2)
    with caplog.at_level(logging.WARNING, "stocache"), pytest.raises(RuntimeError, match="timed out"):
        list(loader)
    (message,) = {record.getMessage() for record in caplog.records}
    assert "holds a lock while it draws" in message
    loader = stocache.DataLoader(
        DrawsUnderLock(), batch_size=2, num_workers=2, worker_method="thread", timeout=20, sample_seed=3
    )
    assert len(list(loader)) == 1
