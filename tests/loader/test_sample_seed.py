"""With ``sample_seed``, the random numbers of a sample come from (seed, epoch, index), whoever makes it and whenever."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Subset

import stocache
from stocache import CachedDataset, DatasetError, LimitError, SampleSeed, StateError, StorageDataset
from stocache.loader import sample_seed
from stocache.system import generators
from tests.support.equality import same
from tests.support.resuming import check_resumes

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

N = 24


def loader(dataset, batch_size=4, seed=1, **options):
    return stocache.DataLoader(dataset, batch_size, sample_seed=seed, **options)


numbers_of_the_user = lambda: (generators.read(), random.getstate(), repr(np.random.get_state(legacy=False)))


class Made(Dataset):
    """Pairs of what a function makes, and the index; with a transform in an attribute, which `CachedDataset` cuts."""

    def __init__(self, make=lambda idx: torch.rand(3), transform=None, n=N):
        self.make, self.transform, self.n = make, transform, n

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        value = self.make(idx)
        return (self.transform(value) if self.transform else value), idx


class Together(Made):
    """Makes samples together, if it is asked to."""

    asked = ()

    def __getitems__(self, indices):
        self.asked = [*self.asked, len(indices)]
        return [self[idx] for idx in indices]


def plain(idx):
    return torch.full((3,), float(idx))


def shake(value):
    return value + torch.rand(3) + random.random() + random.gauss(0, 1) + torch.from_numpy(np.random.randn(3))


shaken = lambda idx: shake(plain(idx))


def rare(idx):
    """One sample in 50 draws, each time from a different generator."""
    return {11: random.random, 61: np.random.standard_normal, 111: lambda: torch.rand(()).item()}.get(idx, float)()


OWN = []
set_own = lambda seed: OWN.__setitem__(slice(None), [np.random.default_rng(seed)])
own = lambda idx: torch.from_numpy(OWN[0].random(3))


def expected(make, indices, epoch, seed):
    """The samples that a function makes with the numbers of a seed."""
    before, found = generators.read(), {}
    for idx in indices:
        *numbers, last = seed.numbers(epoch, idx)
        generators.seed_all(numbers)
        for hook in seed.hooks:
            hook(last % 2**32)
        found[idx] = make(idx)
    generators.restore_all(before)
    return found


@pytest.fixture
def cached(request):
    """Make a cached dataset of some bytes, which is closed after the test."""

    def make(limit, dataset, **options):
        dataset = CachedDataset(dataset, f"{limit}B", **options)
        request.addfinalizer(dataset.close)
        return dataset

    return make


before_cache = lambda limit: lambda cached: cached(limit, Made(plain, shake))


def after_cache(limit, make=shake):
    """A dataset whose transform comes after the cache."""
    return lambda cached: cached(limit, Made(plain), transform={0: make})


TWO = {"num_workers": 2}
PERSISTENT = TWO | {"persistent_workers": True}
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
HOOK = SampleSeed(17, hooks=(set_own,))


@pytest.mark.linux
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("make", "function", "batch_size", "ranks", "options"), [
    (lambda cached: Made(shaken), shaken, None, 2, TWO | {"pin_memory": True}),
    (lambda cached: Made(shaken), shaken, 5, 1, PERSISTENT | {"prefetch_factor": 3, "shuffle": True}),
    (before_cache(2000), shaken, 1, 2, {}), (before_cache(300), shaken, 1, 2, PERSISTENT),
    (after_cache(2000), shaken, 4, 1, {}), (before_cache(2000), shaken, 32, 1, SPAWNED),
    (lambda cached: Subset(after_cache(300)(cached), range(N)), shaken, 4, 1, {}),
    (lambda cached: cached(99_000, Made(rare, n=150)), rare, 8, 1, {}),
    (lambda cached: Together(rare, n=150), rare, 8, 1, {}),
    (lambda cached: Made(own), own, 5, 1, {"seed": HOOK, "num_workers": 1}),
    (after_cache(2000, lambda value: own(0)), own, 5, 1, {"seed": HOOK}),
])  # fmt: skip
def test_samples_come_from_seed_epoch_and_index_alone(make, function, batch_size, ranks, options, cached):
    dataset, options = make(cached), {"seed": SampleSeed(17)} | options
    samplers = [DistributedSampler(dataset, 2, rank) for rank in range(2)] if ranks == 2 else [None]
    loaders = [loader(dataset, batch_size, sampler=sampler, **options) for sampler in samplers]
    random.gauss(0, 1), np.random.randn(), torch.rand(1)  # each keeps the second number of a pair
    for epoch in range(2):
        wanted, found = expected(function, range(len(dataset)), epoch, options["seed"]), set()
        for each in loaders:
            each.set_epoch(epoch)
            batches = iter(each)
            assert len(batches)  # begins, with a draw from torch's generator, as torch's own does
            before = numbers_of_the_user()
            for values, indices in batches:
                pairs = zip(values, indices.tolist(), strict=True) if batch_size else [(values, indices)]
                for value, idx in pairs:
                    found.add(idx)
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(wanted[idx], dtype=torch.as_tensor(value).dtype))
            assert numbers_of_the_user() == before
        assert found == set(range(len(dataset)))


def test_numbers_differ_and_stay_as_they_are_from_release_to_release():
    seed = SampleSeed(17)
    numbers = {seed.numbers(epoch, idx) for epoch in range(3) for idx in (*range(9), -1, 2**70, "1", (1, 2), "1 batch")}
    numbers |= {SampleSeed(18).numbers(0, 1), seed.numbers(0, 1, " batch")}
    assert len(numbers) == 3 * 14 + 2
    assert seed.numbers(2, np.int64(5)) == seed.numbers(2, torch.tensor(5)) == seed.numbers(2, 5)
    assert seed.numbers(3, 5)[0] == 16412968395233079743
    assert seed.numbers(3, ("a", 1))[3] == 4889874775595153946


def test_the_epoch_is_that_of_set_epoch_or_of_the_sampler_or_counts_iterations():
    first = loader(Made(), N)
    counted = [next(iter(first))[0] for _ in range(3)]
    assert len(torch.cat(counted).unique()) == 3 * 3 * N
    first.set_epoch(1)
    assert same([next(iter(first))[0] for _ in range(2)], [counted[1]] * 2)
    sampler = DistributedSampler(range(N), 1, 0, shuffle=False)
    sampler.set_epoch(2)
    assert same(next(iter(loader(Made(), N, sampler=sampler)))[0], counted[2])


@pytest.mark.linux
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_after_any_batch_it_makes_the_same_samples(workers):
    def make(workers, state, seed=3):
        options = {"shuffle": True, "num_workers": workers, "generator": torch.Generator().manual_seed(5)}
        made = loader(Together(shaken), 5, seed, **options)
        made.load_state_dict(state)
        return made

    check_resumes(make(workers, {}), lambda state: make(2 - workers, state), 2, lambda length, count: (2, length, length + 3))
    with pytest.raises(StateError, match=r"sample_seed 3; this one has 4"):
        make(0, make(0, {}).state_dict(), seed=4)


@pytest.mark.linux
def test_samples_that_draw_nothing_are_made_without_seeds(cached, tmp_path, monkeypatch):
    dataset = Together(plain, n=10)
    list(loader(dataset))
    assert dataset.asked == [1] * 10
    storage = StorageDataset(stocache.prepare(Made(plain), tmp_path, block_size=8, progress=False))
    dataset = cached(2000, Made(plain))
    one = loader(dataset, num_workers=1, multiprocessing_context="fork")
    assert len(list(one)) == one.stats().ring == 6
    monkeypatch.setattr(sample_seed, "seed_all", None)
    for drawless in (dataset, storage, cached(2000, storage)):
        assert len(list(loader(drawless))) == 6


def mix(samples):
    return torch.stack([values for values, _ in samples]) * random.random() + torch.rand(()) + np.random.randn()


def test_a_collate_function_is_seeded_for_its_batch():
    seeds = []
    make = lambda seed=1, **options: list(loader(Made(plain), seed=seed, collate_fn=mix, **options))
    alone, before = make(), numbers_of_the_user()[1:]
    assert same(alone, make(num_workers=2))
    assert same(alone, make(seed=SampleSeed(1, (seeds.append,))))
    assert numbers_of_the_user()[1:] == before
    assert len({(batch - batch[0]).sum().item() for batch in alone}) == N // 4
    assert not same(alone, make(seed=2))
    assert len({number for number in seeds if 0 <= number < 2**32}) == N + N // 4  # of each sample and each batch


def break_ninth(idx):
    if idx == 9:
        raise KeyError("sample 9 is broken")
    return torch.rand(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_samples_pass_through_and_the_loader_goes_on(workers):
    batches = iter(loader(Made(break_ninth), num_workers=workers))
    before = generators.read()
    came = [next(batches), next(batches)]
    with pytest.raises(KeyError, match="sample 9 is broken"):
        next(batches)
    came += batches
    assert generators.read() == before
    others = list(loader(Made()))
    assert same(came, others[:2] + others[3:])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_what_is_not_a_seed_or_cannot_be_seeded_is_refused():
    for seed in (True, -1, 2**64, 1.0, "1"):
        with pytest.raises(LimitError, match=r"sample_seed=.* is not a seed\. Use an int from 0 to 2\*\*64 - 1"):
            loader(Made(), seed=seed)
    for hooks in (print, [print], (1,)):
        with pytest.raises(LimitError, match=r"is not a tuple of functions\. Use hooks=\(function,\)"):
            SampleSeed(1, hooks)
    with pytest.raises(DatasetError, match="sample_seed needs a map-style dataset"):
        loader(Stream())
    assert len(list(loader(Stream(), seed=None))) == 1
    assert loader(Made(), seed=2**64 - 1).sample_seed == SampleSeed(2**64 - 1)  # an attribute, which trainers see
