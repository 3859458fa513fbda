"""Datasets, iterators and samplers with states of their own, in each worker: what torchdata's StatefulDataLoader promises."""

import itertools
import random
import secrets
import time

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, get_worker_info

import stocache
from stocache import CachedDataset, StateError
from tests.support.edits import through_json
from tests.support.equality import same
from tests.support.resuming import Counting, State, check_resumes, play
from tests.support.versions import needs_in_order

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")


def shard(sizes=(7, 12, 3)):
    info = get_worker_info()
    number = 0 if info is None else info.id
    return number, sizes[number % len(sizes)]


class Plain(IterableDataset):
    """Without a state. Its workers have shards of different sizes."""

    def __iter__(self):
        number, size = shard()
        for step in range(size):
            yield torch.tensor([number, step])


class Stateful(State, IterableDataset):
    """The dataset has the state; each epoch is a different one."""

    kept = ("at", "epoch")
    at = epoch = 0

    def __iter__(self):
        number, size = shard()
        while self.at < size:
            self.at += 1
            yield torch.tensor([number, self.at, self.epoch])
        self.at = 0
        self.epoch += 1


class Steps(State):
    def __init__(self, number, size):
        self.number, self.size, self.at = number, size, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.number, self.at])


class Iterates(IterableDataset):
    """Its iterator has the state."""

    def __iter__(self):
        return Steps(*shard())


DATASETS = {"map": Counting, "plain": Plain, "dataset": Stateful, "iterator": Iterates}


def make(dataset, workers=0, state=None, **options):
    """Return a loader, which goes on from a state."""
    torch.manual_seed(5)
    loader = stocache.DataLoader(DATASETS[dataset]() if isinstance(dataset, str) else dataset, num_workers=workers, **options)
    if state is not None:
        loader.load_state_dict(through_json(state))
    return loader


PERSISTENT = {"persistent_workers": True}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dataset", "workers", "options"), [
    ("map", 0, {"batch_size": 3, "shuffle": True}), ("plain", 0, {"batch_size": None}),
    ("dataset", 0, {"batch_size": 3, "drop_last": True}), ("iterator", 0, {"batch_size": None}),
    ("map", 3, {"batch_size": 2, "snapshot_every_n_steps": 4, **PERSISTENT}), ("map", 2, {"batch_size": None, "shuffle": True}),
    ("plain", 3, {"batch_size": None, **PERSISTENT}), ("dataset", 2, {"batch_size": 5, "drop_last": True}),
    ("iterator", 1, {"batch_size": 2, "multiprocessing_context": "spawn", **PERSISTENT}),
    ("iterator", 3, {"batch_size": None, "snapshot_every_n_steps": 100}),
])  # fmt: skip
def test_states_resume_with_all_that_follows(dataset, workers, options):
    numbers = None
    if workers:
        numbers = lambda length, count: (length // 2 + 1, count - 1)[: 1 if "multiprocessing_context" in options else 2]
    resume = lambda state: make(dataset, workers, state, **options)
    assert len(check_resumes(make(dataset, workers, **options), resume, numbers=numbers)) > workers


@pytest.mark.parametrize(("dataset", "methods", "options"), [
    ("map", ("multiprocessing", "thread"), {}), ("map", ("thread", "multiprocessing"), {"snapshot_every_n_steps": 3}),
    ("dataset", ("thread", "multiprocessing"), PERSISTENT), ("dataset", ("multiprocessing", "thread"), {}),
])  # fmt: skip
def test_threads_resume_what_processes_began_and_the_other_way(dataset, methods, options):
    first, second = ({"batch_size": 3, "worker_method": method, **options} for method in methods)
    resume = lambda state: make(dataset, 2, state, **second)
    check_resumes(make(dataset, 2, **first), resume, numbers=lambda length, count: (3, 4))


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": RandomSampler(range(9), generator=torch.Generator())}])
def test_the_epoch_after_one_with_persistent_workers_has_the_same_order_without_workers(options):
    resume = lambda state: make(range(9), 0, state, **options)
    check_resumes(make(range(9), 1, **options, **PERSISTENT), resume, numbers=lambda length, count: [count - 1])


class Gated(list):
    """The first sample comes when a file is there."""

    gate = None

    def __getitem__(self, idx):
        while idx == 0 and not self.gate.exists():
            time.sleep(0.001)
        return idx


@needs_in_order
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_without_order_the_state_tells_what_was_delivered(method, tmp_path):
    dataset = Gated(range(40))
    dataset.gate = tmp_path / "gate"
    loader = make(dataset, 2, batch_size=2, in_order=False, worker_method=method)
    batches = iter(loader)
    came = [next(batches).tolist() for _ in range(5)]
    assert [0, 1] not in came
    state = through_json(loader.state_dict())
    assert state["position"]["batches"] == 0
    assert len(state["position"]["ahead"]) == 5
    dataset.gate.touch()
    rest = sorted(batch.tolist() for batch in batches)
    assert sorted(came + rest) == [[n, n + 1] for n in range(0, 40, 2)]
    for workers in (2, 1, 0):
        resumed = make(dataset, workers, state, batch_size=2, in_order=False)
        assert sorted(batch.tolist() for batch in resumed) == rest
        assert len(list(resumed)) == 20


class Secretive(State, Sampler):
    """Chooses a seed that nobody can set, and can say where it stands."""

    kept = ("seed", "at")
    restored = False

    def __init__(self, size=17):
        self.size, self.seed, self.at = size, None, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        if not self.restored:
            self.seed, self.at = secrets.randbits(32), 0
        self.restored = False
        order = random.Random(self.seed).sample(range(self.size), self.size)
        while self.at < self.size:
            self.at += 1
            yield order[self.at - 1]

    def load_state_dict(self, state):
        super().load_state_dict(state | {"restored": True})


@pytest.mark.parametrize(("workers", "options"), [
    (0, lambda: {"sampler": Secretive(), "batch_size": None}),
    (0, lambda: {"batch_sampler": BatchSampler(Secretive(), 4, False)}),
    (2, lambda: {"batch_sampler": BatchSampler(Secretive(), 4, False), "snapshot_every_n_steps": 3}),
])  # fmt: skip
def test_a_sampler_that_cannot_be_replayed_goes_on_from_its_own_state(workers, options):
    came, states, _ = play(make(range(17), workers, **options()))
    for number in (1, len(came) // 2, len(came)):
        assert same(list(make(range(17), workers, states[number], **options())), came[number:]), number


@pytest.mark.parametrize(("dataset", "before", "after"), [("map", 1, 0), ("dataset", 0, 1)])
def test_one_worker_and_none_exchange_the_states_of_datasets(dataset, before, after):
    _, states, _ = play(make(dataset, before, batch_size=2))
    came = list(make(dataset, after, batch_size=2))
    assert same(list(make(dataset, after, states[2], batch_size=2)), came[2:])


class Fails(Stateful):
    def load_state_dict(self, state):
        raise KeyError("no such state")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_while_restoring_is_that_of_the_dataset(workers):
    _, states, _ = play(make("dataset", workers, batch_size=2))
    with pytest.raises(KeyError, match="no such state"):
        make(Fails(), workers, states[3], batch_size=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_after_an_error_the_same_worker_goes_on_with_the_next_batch(workers):
    dataset = Counting()
    dataset.broken = 9
    loader = make(dataset, workers, batch_size=3)
    batches = iter(loader)
    list(itertools.islice(batches, 3))
    with pytest.raises(KeyError, match="broken"):
        next(batches)
    assert same(list(make("map", workers, loader.state_dict(), batch_size=3)), list(batches))


def test_states_that_do_not_fit_are_refused_and_an_empty_one_begins_again():
    _, states, _ = play(make("plain", batch_size=2))
    states[3]["parts"]["workers"][0]["samples"] = 99
    with pytest.raises(StateError, match="the dataset has 7 samples for this worker; the state was taken after 99"):
        list(make("plain", 0, states[3], batch_size=2))
    _, states, _ = play(make("map", batch_size=2))
    with pytest.raises(StateError, match="does not have load_state_dict"):
        make(range(23), 0, states[2], batch_size=2)
    loader = make("dataset", 2, batch_size=2, **PERSISTENT)
    first, states, _ = play(loader)
    with pytest.raises(StateError, match="states of 2 workers; this loader has 3"):
        make("dataset", 3, states[3], batch_size=2)
    resumed = make("dataset", 3, states[0], batch_size=2)  # no worker has begun
    assert len(list(resumed)) == len(list(make("dataset", 3, batch_size=2)))
    loader.load_state_dict(states[4])
    loader.load_state_dict({})
    assert same(list(loader), first)


def test_a_cached_dataset_passes_on_the_state_of_its_dataset():
    with CachedDataset(Counting(), 0.1, probe=0) as dataset:
        loader = make(dataset, batch_size=4)
        next(iter(loader))
        assert loader.state_dict()["parts"]["dataset"] == {"given": 4}


def of_torchdata(dataset, delivered, **options):
    """Return a state of torchdata's loader, and the batches that it delivers after it."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    theirs = torchdata.StatefulDataLoader(dataset, **options)
    batches = iter(theirs)
    list(itertools.islice(batches, delivered))
    state = theirs.state_dict()
    return state, list(batches)


@pytest.mark.parametrize(("dataset", "workers", "options"), [
    ("map", 2, lambda: {"batch_size": 3, "shuffle": True}), ("map", 2, lambda: {"batch_size": 3, "sampler": Secretive(23)}),
    ("map", 0, lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(9)}),
    ("iterator", 0, lambda: {"batch_size": 2}), *((name, 2, lambda: {"batch_size": 2}) for name in ("dataset", "plain")),
])  # fmt: skip
def test_a_state_of_torchdata_goes_on_as_torchdata_does(dataset, workers, options):
    torch.manual_seed(5)
    state, rest = of_torchdata(DATASETS[dataset](), 3, num_workers=workers, **options())
    ours = make(dataset, workers, **options())
    if dataset == "plain" and workers:
        with pytest.raises(StateError, match="how many samples each worker"):
            ours.load_state_dict(state)
        return
    ours.load_state_dict(state)
    assert same(list(ours), rest)
    assert len(list(ours)) >= len(rest)
    with pytest.raises(StateError, match="the state of torchdata's StatefulDataLoader is damaged"):
        ours.load_state_dict({"_iterator_finished": False})
