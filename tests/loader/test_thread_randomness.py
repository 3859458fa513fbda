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
        options = {"num_workers": 2, "batch_size": 4, "timeout": 60, **options, "generator": torch.Generator().manual_seed(3)}
        yield stocache.DataLoader(make(), worker_method=method, **options)


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
    with CachedDataset(Draws(), 1, example=torch.zeros(3)) as dataset:
        for idx in range(0, N, 2):
            dataset[idx]  # of each batch, every second sample is a hit
        loader, _ = loaders(lambda: dataset, batch_size=8, num_workers=3)
        first, second = list(loader), list(loader)
        assert same(first, second)
        assert [int(value) for value in torch.cat(first)[:, 0]] == list(range(N))


BY_HAND = {"batch_sampler": [(3, 1), (4,), (1, 5)], "batch_size": 1, "collate_fn": collate}


@pytest.mark.parametrize(
    ("make", "options", "seed"),
    [*pairs([Draws, DrawsTogether], [{}, {"collate_fn": collate}, BY_HAND], [7, SampleSeed(7, hooks=(random.seed,))])],
)
def test_sample_seed_gives_the_samples_of_processes(make, options, seed):
    threads, processes = loaders(make, sample_seed=seed, **options)
    for _ in range(2):
        assert same(list(threads), list(processes))


@pytest.mark.parametrize(
    ("make", "options", "step"),
    [
        (Draws, {"persistent_workers": True, "sample_seed": 5}, 3), (Counts, {}, 3), (Counts, {"snapshot_every_n_steps": 3}, 4),
        (StatefulStream, {"persistent_workers": True}, 0), (StatefulStream, {"snapshot_every_n_steps": 3}, 4),
    ],
)  # fmt: skip
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


# ---------------------------------------------------------------------------------------------------- the global generators


def warnings_of(caplog):
    return [record for record in caplog.records if "global random number generators" in record.getMessage()]


crews = []


class Global(Draws):
    def __getitem__(self, idx):
        if idx == 0:  # until the loop waits for the batch of this sample
            wait_until(lambda: crews[-1].waiting)
        return idx + torch.rand(2)


def test_samples_that_draw_from_the_global_generators_are_told_once(caplog):
    loader = stocache.DataLoader(Global(), batch_size=N, num_workers=1, worker_method="thread")
    for _ in range(3):
        crews.append(None)
        crews[-1] = type("NotYet", (), {"waiting": False})
        iterator = iter(loader)
        crews[-1] = iterator._batches._maker.crew
        assert len(list(iterator)) == 1
    assert len(warnings_of(caplog)) == 1
    crews.clear()


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
    assert not warnings_of(caplog)
    load(dict)
    assert len(warnings_of(caplog)) == 1


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


def test_a_sample_that_waits_long_for_its_turn_is_told_and_with_a_sample_seed_none_waits(alone, monkeypatch, caplog):
    monkeypatch.setattr(crew, "_LONG_S", 0.0)
    alone.await_turn(lambda: bool(caplog.records))  # its turn comes with the warning
    assert "holds a lock while it draws" in caplog.text
    loader, _ = loaders(DrawsUnderLock, sample_seed=3)
    assert len(list(loader)) == 1
