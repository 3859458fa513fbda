"""Datasets, iterators and samplers with states of their own, in each worker: what torchdata's StatefulDataLoader promises."""

import contextlib
import os
import random
import secrets

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import stocache
from stocache import CachedDataset, StateError
from tests.support.edits import changed, places, through_json
from tests.support.equality import same
from tests.support.versions import needs_in_order

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")


class Counting(Dataset):
    """A map-style dataset whose samples tell how many it has given, and in which worker."""

    def __init__(self, n=23):
        self.n, self.given = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        self.given += 1
        info = get_worker_info()
        return torch.tensor([idx, self.given, -1 if info is None else info.id])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Batched(Counting):
    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


def shard(sizes):
    info = get_worker_info()
    number = 0 if info is None else info.id
    return number, sizes[number % len(sizes)]


class Plain(IterableDataset):
    """Without a state. Its workers have shards of different sizes."""

    sizes = (7, 12, 3)

    def __iter__(self):
        number, size = shard(self.sizes)
        for step in range(size):
            yield torch.tensor([number, step])


class Stateful(IterableDataset):
    """The dataset has the state; each epoch is another one."""

    sizes = (7, 12, 3)

    def __init__(self):
        self.at = self.epoch = 0

    def __iter__(self):
        number, size = shard(self.sizes)
        while self.at < size:
            self.at += 1
            yield torch.tensor([number, self.at, self.epoch])
        self.at = 0
        self.epoch += 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


class Iterates(IterableDataset):
    """Its iterator has the state."""

    sizes = (7, 12, 3)

    def __iter__(self):
        return Steps(*shard(self.sizes))


class Steps:
    def __init__(self, number, size, end=int):
        self.number, self.size, self.at, self.end = number, size, 0, end

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.size:
            self.end()
            raise StopIteration
        self.at += 1
        return torch.tensor([self.number, self.at])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Both(Stateful):
    """The dataset and its iterator have states."""

    def __iter__(self):
        number, size = shard(self.sizes)
        return Steps(number + 100 * self.epoch, size, self.end)

    def end(self):
        self.epoch += 1


class Itself(Stateful):
    """The dataset is its own iterator."""

    def __iter__(self):
        self.number, self.size = shard(self.sizes)
        return self

    def __next__(self):
        if self.at == self.size:
            self.at = 0
            raise StopIteration
        self.at += 1
        return torch.tensor([self.number, self.at])


def pipe():
    return IterableWrapper([torch.tensor([n]) for n in range(20)]).shuffle(buffer_size=7).sharding_filter()


DATASETS = {
    "map": Counting,
    "map in batches": Batched,
    "plain": Plain,
    "dataset": Stateful,
    "iterator": Iterates,
    "both": Both,
    "itself": Itself,
    "pipe": pipe,
}


def make(dataset, workers, **options):
    if workers:
        options |= {"num_workers": workers}
    torch.manual_seed(5)
    return stocache.DataLoader(DATASETS[dataset](), **options)


def play(loader):
    """The batches of an epoch, and the state before and after each, and after the end."""
    states, batches = [loader.state_dict()], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    return batches, [*states, loader.state_dict()]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("dataset", DATASETS)
def test_each_state_without_workers_resumes_with_all_that_follows(dataset, batch_size):
    loader = make(dataset, 0, batch_size=batch_size)
    first, states = play(loader)
    globals_between = torch.get_rng_state()
    second, _ = play(loader)
    third = list(loader)
    for number, state in enumerate(states):
        resumed = make(dataset, 0, batch_size=batch_size)
        resumed.load_state_dict(through_json(state))
        if number < len(states) - 1:
            assert same(list(resumed), first[number:]), number
        torch.set_rng_state(globals_between)  # a user's checkpoint has it
        assert same(list(resumed), second), number
        assert same(list(resumed), third), number


@pytest.mark.parametrize(
    ("dataset", "workers", "options"),
    [
        ("map", 2, {"batch_size": 3}),
        ("map", 3, {"batch_size": 2, "snapshot_every_n_steps": 4, "persistent_workers": True}),
        ("map", 2, {"batch_size": None, "shuffle": True}),
        ("map in batches", 3, {"batch_size": 2, "persistent_workers": True, "shuffle": True}),
        ("plain", 2, {"batch_size": 2}),
        ("plain", 3, {"batch_size": None, "persistent_workers": True}),
        ("dataset", 1, {"batch_size": 3}),
        ("dataset", 2, {"batch_size": 2, "persistent_workers": True}),
        ("dataset", 3, {"batch_size": 2, "snapshot_every_n_steps": 2}),
        ("dataset", 3, {"batch_size": 1, "snapshot_every_n_steps": 5, "persistent_workers": True}),
        ("dataset", 2, {"batch_size": 5, "drop_last": True}),
        ("iterator", 2, {"batch_size": 2, "multiprocessing_context": "spawn", "persistent_workers": True}),
        ("iterator", 3, {"batch_size": None, "snapshot_every_n_steps": 100}),
        ("both", 2, {"batch_size": 2, "persistent_workers": True}),
        ("itself", 2, {"batch_size": 2, "multiprocessing_context": "forkserver", "persistent_workers": True}),
        ("pipe", 2, {"batch_size": 2}),
    ],
)
def test_states_with_workers_resume_with_all_that_follows(dataset, workers, options):
    loader = make(dataset, workers, **options)
    first, states = play(loader)
    persistent = options.get("persistent_workers", False)
    globals_between = torch.get_rng_state()
    second = list(loader)
    del loader
    assert len(first) > workers
    numbers = {0, 1, len(first) // 2 + 1, len(first), len(states) - 1}
    if "multiprocessing_context" in options:
        numbers = {workers + 1}
    for number in sorted(numbers):
        resumed = make(dataset, workers, **options)
        resumed.load_state_dict(through_json(states[number]))
        if number < len(states) - 1:
            assert same(list(resumed), first[number:]), number
        torch.set_rng_state(globals_between)
        assert same(list(resumed), second), (number, persistent)


def test_a_state_with_snapshots_holds_the_steps_since_the_last_one():
    loader = make("dataset", 2, batch_size=1, snapshot_every_n_steps=4)
    batches, counts = iter(loader), []
    for _ in range(9):
        next(batches)
        position = loader.state_dict()["position"]
        counts.append((position["batches"], position["replay"]))
    assert counts == [(0, 1), (0, 2), (0, 3), (4, 0), (4, 1), (4, 2), (4, 3), (8, 0), (8, 1)]


class Seeds(IterableDataset):
    """Gives the seed of its worker."""

    def __iter__(self):
        return iter([get_worker_info().seed] * 4)


@pytest.mark.parametrize("make_generator", [lambda: None, lambda: torch.Generator().manual_seed(3)], ids=["global", "own"])
def test_persistent_workers_have_the_seeds_of_those_that_they_replace(make_generator):
    def loader():
        return stocache.DataLoader(Seeds(), 2, num_workers=2, persistent_workers=True, generator=make_generator())

    first = loader()
    epochs = [play(first) for _ in range(3)]
    assert same(epochs[0][0], epochs[2][0])
    for number in (1, len(epochs[1][1]) - 1):
        resumed = loader()
        resumed.load_state_dict(epochs[1][1][number])
        assert same(list(resumed), epochs[1][0][number % 5 :])
        assert same(list(resumed), epochs[2][0])


def test_a_resumed_loader_has_the_state_that_it_was_given_and_then_its_own():
    loader = make("dataset", 2, batch_size=2, snapshot_every_n_steps=3)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    rest = list(batches)
    again = make("dataset", 2, batch_size=2, snapshot_every_n_steps=3)
    again.load_state_dict(state)
    assert same(again.state_dict(), state)
    iterator = iter(again)
    assert again.state_dict()["position"] == state["position"]
    assert same(next(iterator), rest[0])
    third = make("dataset", 2, batch_size=2, snapshot_every_n_steps=3)
    third.load_state_dict(again.state_dict())
    assert same(list(third), rest[1:])


def test_the_dataset_in_a_worker_is_that_of_the_user():
    def note(number):
        assert type(get_worker_info().dataset) is Stateful
        get_worker_info().dataset.at = 2

    loader = make("dataset", 1, batch_size=None, worker_init_fn=note)
    batches = iter(loader)
    assert next(batches)[1] == 3
    state = loader.state_dict()
    resumed = make("dataset", 1, batch_size=None, worker_init_fn=note)
    resumed.load_state_dict(state)
    assert same(list(resumed), list(batches))


@needs_in_order
def test_without_order_the_state_tells_what_was_delivered():
    class Slow(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, idx):
            if idx == 0:
                while not os.path.exists(gate):
                    pass
            return idx

    gate = f"/dev/shm/gate-{os.getpid()}-{secrets.token_hex(4)}"
    loader = stocache.DataLoader(Slow(), 2, num_workers=2, in_order=False, shuffle=False)
    batches = iter(loader)
    came = [next(batches).tolist() for _ in range(5)]
    assert [0, 1] not in came
    state = through_json(loader.state_dict())
    assert state["position"]["batches"] == 0
    assert len(state["position"]["ahead"]) == 5
    with open(gate, "w"):
        rest = [batch.tolist() for batch in batches]
        resumed = stocache.DataLoader(Slow(), 2, num_workers=2, in_order=False)
        resumed.load_state_dict(state)
        again = [batch.tolist() for batch in resumed]
        assert sorted(again) == sorted(rest)
        assert sorted(came + again) == [[n, n + 1] for n in range(0, 40, 2)]
        assert len(list(resumed)) == 20
    os.unlink(gate)


# ---------------------------------------------------------------------------------------------------- samplers


class Secretive(Sampler):
    """Chooses a seed that nobody can set, and can say where it stands."""

    def __init__(self, size=17):
        self.size, self.seed, self.at, self.restored = size, None, 0, False

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

    def state_dict(self):
        return {"seed": self.seed, "at": self.at}

    def load_state_dict(self, state):
        self.seed, self.at, self.restored = state["seed"], state["at"], True


class SecretiveBatches(Secretive):
    def __iter__(self):
        indices = super().__iter__()
        while batch := [index for _, index in zip(range(4), indices, strict=False)]:
            yield batch

    def __len__(self):
        return -(-self.size // 4)


class OfIterators:
    """Only its iterators have a state."""

    def __len__(self):
        return 5

    def __iter__(self):
        return RandomSteps()


class RandomSteps:
    def __init__(self):
        self.seed, self.at = secrets.randbits(32), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return random.Random(self.seed + self.at).sample(range(17), 3)

    def state_dict(self):
        return {"seed": self.seed, "at": self.at}

    def load_state_dict(self, state):
        self.seed, self.at = state["seed"], state["at"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"sampler": Secretive(), "batch_size": 4},
        lambda: {"sampler": Secretive(), "batch_size": None},
        lambda: {"batch_sampler": BatchSampler(Secretive(), 4, False)},
        lambda: {"batch_sampler": SecretiveBatches()},
        lambda: {"batch_sampler": OfIterators()},
    ],
    ids=["sampler", "one by one", "batch sampler", "own batch sampler", "iterator"],
)
def test_a_sampler_that_cannot_be_replayed_goes_on_from_its_own_state(options, workers):
    loader = stocache.DataLoader(range(17), num_workers=workers, **options())
    came, states = play(loader)
    for number in (1, len(came) // 2, len(came)):
        resumed = stocache.DataLoader(range(17), num_workers=workers, **options())
        resumed.load_state_dict(through_json(states[number]))
        assert same(list(resumed), came[number:]), number


# ---------------------------------------------------------------------------------------------------- numbers of workers


def test_a_state_loads_with_another_number_of_workers_where_they_have_no_states():
    def loader(workers):
        torch.manual_seed(3)
        return stocache.DataLoader(range(40), 3, shuffle=True, num_workers=workers)

    came, states = play(loader(2))
    for workers in (0, 1, 3):
        resumed = loader(workers)
        resumed.load_state_dict(states[5])
        assert same(list(resumed), came[5:])


def test_one_worker_and_none_exchange_the_states_of_datasets():
    for dataset in ("map", "dataset", "iterator", "plain", "both"):
        for before, after in ((0, 1), (1, 0)):
            _, states = play(make(dataset, before, batch_size=2))
            came = list(make(dataset, after, batch_size=2))
            resumed = make(dataset, after, batch_size=2)
            resumed.load_state_dict(through_json(states[2]))
            assert same(list(resumed), came[2:]), (dataset, before)


def test_the_states_of_workers_need_as_many_workers():
    _, states = play(make("dataset", 2, batch_size=2))
    resumed = make("dataset", 3, batch_size=2)
    with pytest.raises(StateError, match="states of 2 workers; this loader has 3"):
        resumed.load_state_dict(states[3])
    resumed.load_state_dict(states[0])  # no worker has begun
    assert len(list(resumed)) == len(list(make("dataset", 3, batch_size=2)))


# ---------------------------------------------------------------------------------------------------- bad moments


class Fails(Stateful):
    def load_state_dict(self, state):
        raise KeyError("no such state")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_while_restoring_is_that_of_the_dataset(workers):
    _, states = play(make("dataset", workers, batch_size=2))
    resumed = stocache.DataLoader(Fails(), 2, num_workers=workers)
    with pytest.raises(KeyError, match="no such state"):
        resumed.load_state_dict(states[3])
    states[3]["parts"]["dataset"] = None
    if workers:
        resumed.load_state_dict(states[3])
        batches = iter(resumed)
        with pytest.raises(KeyError, match="no such state"):
            next(batches)


class Fragile(Counting):
    def __getitem__(self, idx):
        if idx == 9:
            raise KeyError("nine")
        return super().__getitem__(idx)


def test_after_an_error_the_turns_of_the_workers_are_the_same():
    loader = stocache.DataLoader(Fragile(), 3, num_workers=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(KeyError, match="nine"):
        next(batches)
    state = loader.state_dict()
    resumed = stocache.DataLoader(Fragile(), 3, num_workers=2)
    resumed.load_state_dict(state)
    assert same([batch[:, [0, 2]] for batch in resumed], [batch[:, [0, 2]] for batch in batches])


@needs_in_order
def test_without_order_and_states_the_number_of_workers_may_change():
    loader = stocache.DataLoader(range(20), 2, num_workers=2, in_order=False)
    batches = iter(loader)
    came = [next(batches).tolist() for _ in range(5)]
    for workers in (0, 1):
        resumed = stocache.DataLoader(range(20), 2, num_workers=workers, in_order=False)
        resumed.load_state_dict(loader.state_dict())
        assert sorted(came + [batch.tolist() for batch in resumed]) == [[n, n + 1] for n in range(0, 20, 2)]


def test_a_dataset_that_became_shorter_is_told():
    class Short(Plain):
        sizes = (2,)

    _, states = play(make("plain", 0, batch_size=2))
    resumed = stocache.DataLoader(Short(), 2)
    resumed.load_state_dict(states[3])
    with pytest.raises(StateError, match="2 samples for this worker; the state was taken after"):
        list(resumed)


def test_an_empty_state_begins_anew():
    loader = make("dataset", 2, batch_size=2, persistent_workers=True)
    first, states = play(loader)
    loader.load_state_dict(states[4])
    loader.load_state_dict({})
    assert same(list(loader), first)


def test_a_dataset_without_a_state_refuses_one():
    _, states = play(make("map", 0, batch_size=2))
    with pytest.raises(StateError, match="does not have load_state_dict"):
        stocache.DataLoader(range(23), 2).load_state_dict(states[2])


@pytest.mark.parametrize("dataset", ["map", "dataset", "iterator", "plain"])
def test_edited_states_are_refused_or_resumed(dataset):
    loader = make(dataset, 0, batch_size=2)
    batches = iter(loader)
    next(batches)
    state = through_json(loader.state_dict())
    for path in places(state):
        if path[:2] in (("parts", "dataset"), ("parts", "workers")):
            continue  # given to the user's objects
        for bad in (None, -1, 10**30, "", "AAAA", [], {}, [1], 1.5, object()):
            edited = changed(state, path, bad)
            resumed = make(dataset, 0, batch_size=2)
            try:
                resumed.load_state_dict(edited)
                for _ in zip(range(3), resumed, strict=False):
                    pass
            except StateError:
                continue


def test_steps_between_snapshots_must_be_a_positive_number():
    for steps in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            stocache.DataLoader(range(3), snapshot_every_n_steps=steps)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        stocache.DataLoader(range(3), snapshot_every_n_steps=1.5)
    assert len(list(stocache.DataLoader(range(3), snapshot_every_n_steps=None))) == 3


def test_the_class_is_generic():
    loader: stocache.DataLoader[int] = stocache.DataLoader[int](range(3))
    assert type(loader) is stocache.DataLoader


def test_a_cached_dataset_passes_on_the_state_of_its_dataset():
    came = []
    for number in (None, 3):
        with CachedDataset(Counting(), 1, probe=0) as dataset:
            loader = stocache.DataLoader(dataset, 4, num_workers=2)
            batches = iter(loader)
            if number is None:
                came = [next(batches) for _ in range(3)]
                state = through_json(loader.state_dict())
                rest = list(batches)
            else:
                loader.load_state_dict(state)
                assert same([batch[:, 0] for batch in loader], [batch[:, 0] for batch in rest])
            del loader, batches
    assert np.concatenate([batch[:, 0].numpy() for batch in came + rest]).tolist() == list(range(23))


# ---------------------------------------------------------------------------------------------------- ranks and epochs


def ranked(ranks, rank, batch_size, sampler=DistributedSampler):
    return stocache.DataLoader(range(37), batch_size, sampler=sampler(range(37), ranks, rank, seed=4))


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_state_loads_with_other_ranks_that_share_the_same_batches(before, after):
    states, came = [], []
    for rank in range(before):
        loader = ranked(before, rank, 8 // before)
        loader.sampler.set_epoch(3)  # as trainers do
        batches = iter(loader)
        came += [index for _ in range(2) for index in next(batches).tolist()]
        states.append(through_json(loader.state_dict()))
    rest = []
    for rank in range(after):
        loader = ranked(after, rank, 8 // after)
        loader.load_state_dict(states[rank % before])
        assert loader.sampler.epoch == 3
        rest += [index for batch in loader for index in batch.tolist()]
    assert len(came) == 16
    assert set(came) | set(rest) == set(range(37))
    assert len(came) + len(rest) == -(-37 // after) * after  # the sampler fills up the last batch


def test_another_global_batch_is_refused():
    loader = ranked(2, 0, 4)
    next(iter(loader))
    with pytest.raises(StateError, match="batch"):
        ranked(4, 0, 4).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_that_a_trainer_set_on_the_sampler_is_resumed(workers):
    def loader():
        sampler = DistributedSampler(range(23), 2, 1, seed=4)
        return stocache.DataLoader(range(23), 3, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)

    epochs = []
    first = loader()
    for epoch in range(4):
        first.sampler.set_epoch(epoch)
        epochs.append(play(first))
    for epoch in range(3):
        came, states = epochs[epoch]
        for number in range(len(states) - 1):
            resumed = loader()
            resumed.load_state_dict(through_json(states[number]))
            assert same(list(resumed), came[number:]), (epoch, number)
            resumed.sampler.set_epoch(epoch + 1)
            assert same(list(resumed), epochs[epoch + 1][0])
            if workers:
                break


# ---------------------------------------------------------------------------------------------------- torchdata's states


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        ("map", lambda: {"batch_size": 3}),
        ("map", lambda: {"batch_size": 3, "shuffle": True}),
        ("map", lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(9)}),
        ("map", lambda: {"batch_size": 3, "sampler": Secretive(23)}),
        ("dataset", lambda: {"batch_size": 2}),
        ("iterator", lambda: {"batch_size": 2}),
        ("both", lambda: {"batch_size": 2}),
        ("itself", lambda: {"batch_size": 2}),
        ("plain", lambda: {"batch_size": 2}),
    ],
    ids=["map", "shuffled", "generator", "sampler", "dataset", "iterator", "both", "itself", "plain"],
)
def test_a_state_of_torchdata_goes_on_as_torchdata_does(dataset, options, workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(5)
    theirs = torchdata.StatefulDataLoader(DATASETS[dataset](), num_workers=workers, **options())
    batches = iter(theirs)
    for _ in range(3):
        next(batches)
    state = theirs.state_dict()
    rest = list(batches)
    ours = make(dataset, workers, **options())
    if dataset == "plain" and workers:
        with pytest.raises(StateError, match="how many samples each worker"):
            ours.load_state_dict(state)
        return
    ours.load_state_dict(state)
    assert same(list(ours), rest)
    assert len(list(ours)) >= len(rest)


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("delivered", [3, 6])
def test_a_state_of_torchdata_goes_on_in_the_epoch_that_the_user_sets(delivered, workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(cls):
        return cls(range(23), 3, sampler=DistributedSampler(range(23), 1, 0, seed=4), num_workers=workers)

    theirs = loader(torchdata.StatefulDataLoader)
    theirs.sampler.set_epoch(2)
    batches = iter(theirs)
    for _ in range(delivered):
        next(batches)
    state = theirs.state_dict()
    rest = list(batches)
    for _ in range(2):  # also in the state of the loader that resumed
        ours = loader(stocache.DataLoader)
        ours.load_state_dict(state)
        ours.set_epoch(2)
        batches = iter(ours)
        next(batches)
        state = ours.state_dict()
        assert same(list(batches), rest[1:])
        rest = rest[1:]


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_a_damaged_state_of_torchdata_is_refused():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        theirs = torchdata.StatefulDataLoader(Stateful(), 2, num_workers=workers)
        batches = iter(theirs)
        next(batches)
        state = through_json(theirs.state_dict())
        for path in places(state):
            if path[-1] in ("dataset_state", "at", "epoch", "_iterator_finished"):
                continue
            for bad in (None, -1, 10**30, "", [], object()):
                edited = changed(state, path, bad)
                with contextlib.suppress(StateError):
                    make("dataset", workers, batch_size=2).load_state_dict(edited)
        del theirs, batches
