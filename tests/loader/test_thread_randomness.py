"""Samples that draw from the thread's generators, and states, are those of worker processes, bit for bit."""

import itertools
import random
import threading

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import stocache
from stocache import CachedDataset, SampleSeed
from stocache.threads import crew
from tests.support.equality import same
from tests.support.pairs import pairs
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


class State:
    """How many samples it made."""

    made = 0

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Counts(State, Draws):
    def __getitem__(self, idx):
        self.made += 1
        return torch.tensor([idx, self.made])


class StatefulStream(State, IterableDataset):
    def __iter__(self):
        info, start = get_worker_info(), self.made
        for idx in range(info.id + start * info.num_workers, N + 5 * info.id, info.num_workers):
            self.made += 1
            yield idx
        self.made = 0


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


OPTIONS = [
    {}, {"shuffle": True, "persistent_workers": True}, {"batch_size": None}, {"prefetch_factor": 4, "num_workers": 3},
    {"collate_fn": collate},
]  # fmt: skip


@pytest.mark.parametrize(("make", "options"), [*zip([Draws, DrawsTogether, Counts, Own] * 2, OPTIONS * 2, strict=False)])
def test_epochs_and_those_that_are_broken_off_are_those_of_processes(make, options):
    threads, processes = loaders(make, **options)
    for count in (2, 1, N):
        assert same(*(list(itertools.islice(loader, count)) for loader in (threads, processes)))


def test_samples_that_draw_before_a_cache_do_not_hang():
    with CachedDataset(Draws(), 1, example=torch.zeros(3), on_change="keep") as dataset:
        for idx in range(0, N, 2):
            dataset[idx]  # of each batch, every second sample is a hit
        loader, _ = loaders(lambda: dataset, batch_size=8, num_workers=3)
        first, second = list(loader), list(loader)
        assert same(first, second)
        assert [int(value) for value in torch.cat(first)[:, 0]] == list(range(N))


BY_HAND = {"batch_sampler": [(3, 1), (4,), (1, 5)], "batch_size": 1, "collate_fn": collate}
ROWS = [*pairs([Draws, DrawsTogether], [{}, {"collate_fn": collate}, BY_HAND], [7, SampleSeed(7, hooks=(random.seed,))])]


@pytest.mark.parametrize(("make", "options", "seed"), ROWS)
def test_sample_seed_gives_the_samples_of_processes(make, options, seed):
    threads, processes = loaders(make, sample_seed=seed, **options)
    for _ in range(2):
        assert same(list(threads), list(processes))


@pytest.mark.parametrize(("make", "options", "step"), [
    (Draws, {"persistent_workers": True, "sample_seed": 5}, 3), (Counts, {}, 3), (Counts, {"snapshot_every_n_steps": 3}, 4),
    (StatefulStream, {"persistent_workers": True}, 0), (StatefulStream, {"snapshot_every_n_steps": 3}, 4),
])  # fmt: skip
def test_states_resume_with_threads_what_processes_began_and_the_other_way(make, options, step):
    states = []
    for loader in loaders(make, **options):
        iterator = iter(loader)
        [next(iterator) for _ in range(step)]
        states.insert(0, loader.state_dict())
    expected = [*iterator, *loader]
    for state, loader in zip(states, loaders(make, **options), strict=True):
        loader.load_state_dict(state)
        assert same([*loader, *loader], expected)


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


@pytest.fixture
def alone():
    """A crew without threads."""
    alone = crew.Crew(1, (None, list, None), 3, None, False, set())
    alone.stopped = lambda: False
    return alone


def test_numbers_drawn_while_the_loop_goes_on_are_not_taken_for_those_of_a_sample(alone, caplog):
    def load(meanwhile):
        with alone.loading():
            torch.rand(1)
            meanwhile()

    load(dict)  # the loop does not wait
    alone.begin_wait()
    load(lambda: setattr(alone, "waiting", False))  # it has got its batch
    alone.begin_wait()
    load(alone.begin_wait)  # it has, and waits for the next one
    assert not caplog.text
    load(dict)
    assert caplog.text.count("global random number generators") == 1


class DrawsFirst(Draws):
    """The second sample draws before the first one, as where it holds a lock that the first waits for."""

    def __init__(self):
        self.drawn = threading.Event()

    def __getitem__(self, idx):
        assert idx or self.drawn.wait(60)
        drawn = torch.rand((), generator=torch.random.thread_safe_generator())
        self.drawn.set()
        return drawn


def test_a_sample_that_waits_long_for_its_turn_is_told_and_with_a_sample_seed_none_waits(alone, monkeypatch, caplog):
    monkeypatch.setattr(crew, "_LONG_S", 0.0)
    alone.await_turn(lambda: bool(caplog.records))  # its turn comes with the warning
    assert "holds a lock while it draws" in caplog.text
    loader, _ = loaders(DrawsFirst, sample_seed=3)
    assert len(list(loader)) == 8
