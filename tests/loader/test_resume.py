"""A DataLoader goes on where its state was taken: after any batch, exactly, without loading what was delivered."""

import contextlib
import copy
import gc
import io
import random

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

import stocache
from stocache import CachedDataset, StateError
from tests.support.equality import same
from tests.support.versions import needs_in_order

N = 30


class Recorded(Dataset):
    """Numbers; remembers (without workers) which were loaded."""

    def __init__(self, n=N):
        self.n, self.loaded = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        self.loaded.append(idx)
        return torch.tensor([idx, idx * idx])


class Restless:
    """A sampler with a generator of its own kind, that can say where it stands."""

    def __init__(self):
        self.random = random.Random(5)

    def __len__(self):
        return N

    def __iter__(self):
        return iter(self.random.sample(range(N), N))

    def state_dict(self):
        return {"random": self.random.getstate()}

    def load_state_dict(self, state):
        self.random.setstate(state["random"])


def generator(seed):
    return torch.Generator().manual_seed(seed)


class Eager:
    """Draws from the global generators when it is asked for an iterator, not later."""

    def __len__(self):
        return N

    def __iter__(self):
        order = torch.randperm(N).tolist()
        random.shuffle(order)
        return iter(order)


SAMPLERS = {
    "in order": lambda seed: {},
    "shuffled by the global generator": lambda seed: {"shuffle": True},
    "shuffled by its own generator": lambda seed: {"shuffle": True, "generator": generator(seed)},
    "a sampler with its own generator": lambda seed: {"sampler": RandomSampler(range(N), generator=generator(seed))},
    "with replacement": lambda seed: {"sampler": RandomSampler(range(N), True, 25, generator=generator(seed))},
    "weighted": lambda seed: {"sampler": WeightedRandomSampler(torch.arange(N) + 1.0, 40, generator=generator(seed))},
    "eager": lambda seed: {"sampler": Eager()},
    "stateful": lambda seed: {"sampler": Restless()},
    "batches": lambda seed: {"batch_sampler": BatchSampler(RandomSampler(range(N), generator=generator(seed)), 4, False)},
    "one by one": lambda seed: {"batch_size": None, "shuffle": True, "generator": generator(seed)},
}
WORKERS = {
    "alone": {},
    "ahead": {"prefetch_factor": 2},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def make(sampler, workers, seed=1, dataset=None):
    options = SAMPLERS[sampler](seed) | WORKERS[workers]
    if "batch_sampler" not in options:
        options.setdefault("batch_size", 4)
    return stocache.DataLoader(dataset or Recorded(), **options)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.sampled(4)
def test_resumed_after_any_batch_it_delivers_what_would_have_come(sampler, workers):
    loader = make(sampler, workers)
    torch.manual_seed(11)
    states, came = [loader.state_dict()], []
    random.seed(11)
    globals_after = [(torch.get_rng_state(), random.getstate())]
    for _ in range(2):
        for batch in loader:
            came.append(batch)
            states.append(loader.state_dict())
            globals_after.append((torch.get_rng_state(), random.getstate()))
    between = loader.state_dict()
    third = list(loader)
    picks = range(len(states)) if workers in ("alone", "ahead") else (0, 1, len(states) // 2, len(states) - 1)
    for number in picks:
        resumed = make(sampler, workers, seed=99)
        resumed.load_state_dict(saved(states[number]))
        torch.set_rng_state(globals_after[number][0])  # a user's checkpoint has them
        random.setstate(globals_after[number][1])
        rest = list(resumed)
        if number <= len(came) // 2:
            rest += list(resumed)
        assert same(rest, came[number:]), number
        assert same(list(resumed), third), number
    resumed = make(sampler, workers, seed=99)
    resumed.load_state_dict(saved(between))
    torch.set_rng_state(globals_after[-1][0])
    random.setstate(globals_after[-1][1])
    assert same(list(resumed), third)


def saved(state):
    """A state as it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Broken(Recorded):
    def __getitem__(self, idx):
        if idx == 9:
            raise ValueError("sample 9 is broken")
        return super().__getitem__(idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_raised_is_not_tried_again(workers):
    loader = stocache.DataLoader(Broken(), 4, num_workers=workers)
    batches = iter(loader)
    for _ in range(4):
        with contextlib.suppress(ValueError):
            next(batches)
    resumed = stocache.DataLoader(Broken(), 4, num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert same(next(iter(resumed)), next(batches))


def test_a_state_outlives_an_iterator_that_could_not_be_made(monkeypatch):
    loader = make("in order", "workers")
    batches = iter(loader)
    next(batches)
    resumed = make("in order", "workers")
    resumed.load_state_dict(loader.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.data.DataLoader, "__iter__", refuse)
        with pytest.raises(OSError, match="no processes"):
            iter(resumed)
    assert same(list(resumed), list(batches))


def refuse(loader):
    raise OSError("no processes")


def test_other_bit_generators_of_numpy_and_datasets_and_samplers_without_length():
    import numpy as np

    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        loader = stocache.DataLoader(Endless(), 2, sampler=iter(range(6)))
        batches = iter(loader)
        next(batches)
        state = saved(loader.state_dict())
        resumed = stocache.DataLoader(Endless(), 2, sampler=range(6))
        with pytest.raises(StateError, match="batches None"):
            resumed.load_state_dict(state)
        loader = stocache.DataLoader(Endless(), 2, sampler=range(6))
        next(iter(loader))
        resumed.load_state_dict(saved(loader.state_dict()))
        assert [batch.tolist() for batch in resumed] == [[2, 3], [4, 5]]
    finally:
        np.random.set_bit_generator(before)


class Endless:
    def __getitem__(self, idx):
        return idx


def test_the_samples_that_were_delivered_are_not_loaded_again():
    loader = make("shuffled by its own generator", "alone")
    batches = iter(loader)
    done = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    dataset = Recorded()
    resumed = make("shuffled by its own generator", "alone", dataset=dataset)
    resumed.load_state_dict(state)
    list(resumed)
    delivered = {row[0].item() for batch in done for row in batch}
    assert set(dataset.loaded) == set(range(N)) - delivered


def test_taking_and_loading_a_state_leaves_the_global_generators_alone():
    loader = make("shuffled by the global generator", "alone")
    batches = iter(loader)
    next(batches)
    before = torch.get_rng_state(), random.getstate()
    state = loader.state_dict()
    resumed = make("shuffled by the global generator", "alone")
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_resumed_epoch_can_be_interrupted_and_resumed():
    loader = make("shuffled by the global generator", "workers")
    torch.manual_seed(3)
    expected = list(loader)
    torch.manual_seed(3)
    came = []
    state = None
    for _ in range(4):
        loader = make("shuffled by the global generator", "workers")
        if state is not None:
            loader.load_state_dict(state)
            assert same(loader.state_dict(), state)
        batches = iter(loader)
        came += [next(batches), next(batches)]
        state = loader.state_dict()
    assert same(came, expected)


def test_a_state_does_not_change_with_its_loader():
    loader = make("shuffled by its own generator", "alone")
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    list(batches)
    list(loader)
    assert same(saved(state), saved(before))


def test_the_epoch_is_resumed_too():
    def loader():
        return stocache.DataLoader(Recorded(), 4, sampler=DistributedSampler(Recorded(), 2, 1, seed=3))

    first = loader()
    first.set_epoch(7)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.sampler.epoch == 7
    assert same(list(resumed), list(batches))


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_as_torchdata_does(workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    orders = []
    for cls in (stocache.DataLoader, torchdata.StatefulDataLoader):
        loader = cls(Recorded(), 4, shuffle=True, num_workers=workers, generator=generator(2))
        batches = iter(loader)
        head = [next(batches) for _ in range(3)]
        state = loader.state_dict()
        resumed = cls(Recorded(), 4, shuffle=True, num_workers=workers, generator=generator(2))
        resumed.load_state_dict(state)
        orders.append([head, list(resumed)])
        assert len(orders[-1][1]) == 5
        ended = cls(Recorded(), 4, num_workers=workers)
        list(ended)
        again = cls(Recorded(), 4, num_workers=workers)
        again.load_state_dict(ended.state_dict())
        orders[-1].append(list(again))
    ours, theirs = orders
    assert same(sorted(row[0].item() for batch in ours[0] + ours[1] for row in batch), list(range(N)))
    assert [len(part) for part in ours] == [len(part) for part in theirs]


def test_a_cached_dataset_resumes_with_its_fingerprint():
    with CachedDataset(Recorded(), 1, name="resume", fingerprint="v1") as dataset:
        loader = stocache.DataLoader(dataset, 4)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        del loader, batches
        gc.collect()
    with CachedDataset(Recorded(), 1, name="resume", fingerprint="v2") as dataset:
        loader = stocache.DataLoader(dataset, 4)
        with pytest.raises(StateError, match="fingerprint 'v1'; this one has 'v2'"):
            loader.load_state_dict(state)
        del loader
        gc.collect()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: stocache.DataLoader(Recorded(31), 4), "samples 30; this one has 31"),
        (lambda: stocache.DataLoader(Recorded(), 5), "batches 8; this one has 6"),
        (lambda: stocache.DataLoader(Recorded(), 4, drop_last=True), "batches 8; this one has 7"),
        (lambda: stocache.DataLoader(Recorded(), 4, shuffle=True, generator=generator(1)), "0 random number generators"),
    ],
)
def test_the_state_of_another_loader_is_refused(other, words):
    loader = stocache.DataLoader(Recorded(), 4)
    next(iter(loader))
    with pytest.raises(StateError, match=words):
        other().load_state_dict(loader.state_dict())


@pytest.mark.parametrize("state", [None, {}, {"version": 99}, [1], {"_num_yielded": 3}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(StateError, match="not a DataLoader state"):
        stocache.DataLoader(Recorded()).load_state_dict(state)


def test_states_of_iterable_datasets_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    with pytest.raises(StateError, match="iterable"):
        stocache.DataLoader(Stream()).state_dict()


@needs_in_order
def test_with_in_order_false_states_are_taken_between_epochs():
    loader = stocache.DataLoader(Recorded(), 4, num_workers=2, in_order=False)
    loader.state_dict()
    batches = iter(loader)
    next(batches)
    with pytest.raises(StateError, match="in_order=False"):
        loader.state_dict()
    list(batches)
    loader.state_dict()
