"""A DataLoader resumes at its state: after any batch, exactly, without loading what was delivered."""

import copy
import io
import itertools
import random

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, WeightedRandomSampler

import stocache
from stocache import CachedDataset, StateError
from tests.support.edits import through_json
from tests.support.equality import same
from tests.support.ranks import slow
from tests.support.resuming import check_resumes

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

    def set_epoch(self, epoch):
        self.epoch = epoch


class Eager:
    """Draws from the global generators when it is asked for an iterator, not later."""

    def __len__(self):
        return N

    def __iter__(self):
        return iter(random.sample(torch.randperm(N).tolist(), N))


class Lazy(Eager):
    """Draws from a global generator as it goes."""

    def __iter__(self):
        for _ in range(N):
            yield int(torch.randint(1000, ()))


generator = lambda seed: torch.Generator().manual_seed(seed)
shuffled = lambda seed: RandomSampler(range(N), generator=generator(seed))
SAMPLERS = {
    "in order": lambda seed: {}, "global": lambda seed: {"shuffle": True},
    "own": lambda seed: {"shuffle": True, "generator": generator(seed)},
    "sampler's": lambda seed: {"sampler": shuffled(seed)},
    "weighted": lambda seed: {"sampler": WeightedRandomSampler(torch.arange(N) + 1.0, 40, generator=generator(seed))},
    "eager": lambda seed: {"sampler": Eager()},
    "batches": lambda seed: {"batch_sampler": BatchSampler(shuffled(seed), 4, False)},
    "lazy": lambda seed: {"sampler": Lazy()},
    "one by one": lambda seed: {"batch_size": None, "shuffle": True, "generator": generator(seed)},
}  # fmt: skip
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
WORKERS = {"alone": {}, "workers": {"num_workers": 2}, "persistent": PERSISTENT}


def make(sampler="in order", workers="alone", seed=1, dataset=None, state=None, kind=stocache.DataLoader):
    """Return a loader, which goes on from a state."""
    options = SAMPLERS[sampler](seed) | WORKERS[workers]
    if "batch_sampler" not in options:
        options.setdefault("batch_size", 4)
    loader = kind(dataset or Recorded(), **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def after(loader, count):
    """Return the iterator of a loader after some batches, and the state then."""
    batches = iter(loader)
    list(itertools.islice(batches, count))
    return batches, loader.state_dict()


def saved(state):
    """A state as it comes from a file."""
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize(("sampler", "workers", "others"), [
    *((sampler, "alone", "alone") for sampler in SAMPLERS), ("sampler's", "alone", "workers"), ("lazy", "workers", "workers"),
    ("one by one", "persistent", "persistent"), slow("global", "workers", "alone"), slow("eager", "persistent", "persistent"),
])  # fmt: skip
def test_resumed_after_any_batch_it_delivers_what_would_have_come_in_the_order_of_torch(sampler, workers, others):
    def numbers(length, count):
        return range(0, count, 3) if workers == others == "alone" else (2, length)

    def seeded(loader):
        torch.manual_seed(3)
        random.seed(3)
        return loader

    resume = lambda state: make(sampler, others, 99, state=saved(state))
    came = check_resumes(seeded(make(sampler, workers)), resume, 2, numbers)
    if workers == "alone":
        theirs = seeded(make(sampler, kind=torch.utils.data.DataLoader))
        assert same(came, [batch for _ in range(2) for batch in theirs])


def test_taking_and_loading_a_state_draws_nothing_and_loads_nothing_again():
    loader = make("global")
    loader.set_epoch(7)
    batches, state = after(loader, 3)
    before, kept = (torch.get_rng_state(), random.getstate()), copy.deepcopy(state)
    dataset = Recorded()
    resumed = make("global", dataset=dataset, state=state)
    assert same(resumed.state_dict(), state)
    assert dataset.epoch == 7
    resumed = iter(resumed)
    next(resumed)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert same(len(list(resumed)), len(list(batches)) - 1)
    assert len(dataset.loaded) == len(set(dataset.loaded)) == N - 3 * 4
    assert not set(dataset.loaded) & set(loader.dataset.loaded[: 3 * 4])
    list(loader)
    assert same(saved(state), saved(kept))  # it did not change with its loader


def test_a_state_of_another_loader_is_refused():
    _, state = after(make(), 1)
    for options, words in (
        ({"dataset": Recorded(31)}, "samples 30; this one has 31"), ({"batch_size": 5}, "batches 8; this one has 6"),
        ({"drop_last": True}, "batches 8; this one has 7"), ({"generator": generator(1)}, "0 random number generators"),
        ({"shuffle": True}, "'RandomSampler'"),
    ):  # fmt: skip
        with pytest.raises(StateError, match=words):
            stocache.DataLoader(**{"dataset": Recorded(), "batch_size": 4} | options).load_state_dict(state)
    with CachedDataset(Recorded(), 0.1, name="resume", fingerprint="v1") as dataset:
        _, state = after(make(dataset=dataset), 1)
    with CachedDataset(Recorded(), 0.1, name="resume", fingerprint="v2") as dataset:
        with pytest.raises(StateError, match="fingerprint 'v1'; this one has 'v2'"):
            make(dataset=dataset, state=state)


def ranked(ranks, rank, batch_size, state=None, **options):
    loader = stocache.DataLoader(range(37), batch_size, sampler=DistributedSampler(range(37), ranks, rank, seed=4), **options)
    if state is not None:
        loader.load_state_dict(through_json(state))
    return loader


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 4), (4, 1), (4, 4)])
def test_a_state_loads_with_other_ranks_that_share_the_same_batches(before, now):
    states, came, rest = [], [], []
    for rank in range(before):
        loader = ranked(before, rank, 8 // before)
        loader.sampler.set_epoch(3)  # as trainers do
        batches = iter(loader)
        came += [index for _ in range(2) for index in next(batches).tolist()]
        states.append(loader.state_dict())
    for rank in range(now):
        loader = ranked(now, rank, 8 // now, states[rank % before])
        assert loader.sampler.epoch == 3
        rest += [index for batch in loader for index in batch.tolist()]
    assert len(came) == 16
    assert set(came) | set(rest) == set(range(37))
    assert len(came) + len(rest) == -(-37 // now) * now  # the sampler fills up the last batch
    with pytest.raises(StateError, match="batch"):
        ranked(now, 0, 5, states[0])


@pytest.mark.parametrize("options", [{}, PERSISTENT], ids=["alone", "persistent"])
def test_the_epoch_that_was_set_is_resumed(options):
    first = ranked(2, 1, 3, **options)
    first.set_epoch(4)
    numbers = (lambda length, count: (1, length + 1)) if options else None
    check_resumes(first, lambda state: ranked(2, 1, 3, state, **options), numbers=numbers)


@pytest.mark.parametrize(("delivered", "epoch"), [(0, 2), (1, 0), (1, 1), (8, 2)])
def test_the_epoch_may_be_set_after_the_iterator_is_made(delivered, epoch):
    whole, first = (ranked(1, 0, 5, num_workers=2) for _ in range(2))
    whole.set_epoch(epoch)
    first.sampler.set_epoch(1)
    resumed = ranked(1, 0, 5, after(first, delivered)[1], num_workers=2)
    iterator = iter(resumed)
    resumed.sampler.set_epoch(epoch)
    assert same(list(iterator), list(whole)[delivered if epoch == 1 else 0 :])
