"""With ``sample_seed``, the random numbers of a sample come from (seed, epoch, index), whoever makes it and whenever."""

import hashlib
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, DistributedSampler, IterableDataset, Subset, get_worker_info

import stocache
from stocache import CachedDataset, DatasetError, LimitError, LocalityDistributedSampler, SampleSeed, StateError
from stocache.system import generators
from tests.support.equality import same

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*suggested max number of worker", "ignore:'pin_memory' argument is set as true"
)

N, SLOT = 24, 3 * 12 * 12 + 8  # samples, and bytes of one in a cache


def loader(dataset, batch_size=4, seed=1, **options):
    return stocache.DataLoader(dataset, batch_size, sample_seed=seed, **options)


class Crop(torch.nn.Module):
    def forward(self, image):
        top, left = torch.randint(0, 5, (2,)).tolist()
        image = image[:, top : top + 8, left : left + 8].clone()
        image[:, np.random.randint(8)] = int(np.random.randn() * 20) % 256
        return image


class Jitter(torch.nn.Module):
    def forward(self, image):
        return (image.float() * random.uniform(0.5, 1.5) + random.gauss(0, 1) + torch.rand(())).to(torch.int32)


class Pictures(Dataset):
    """Pictures of their own, with transforms in an attribute, which `CachedDataset` cuts."""

    def __init__(self, transform=None):
        self.transform = transform

    def __len__(self):
        return N

    def __getitem__(self, idx):
        image = torch.arange(432).reshape(3, 12, 12).add(idx).to(torch.uint8)
        return (self.transform(image) if self.transform else image), idx


AUGMENT = torch.nn.Sequential(Crop(), Jitter())


def epochs(loaders, count=2):
    """A digest of each sample of each epoch, over the loaders of all ranks. A sample that comes twice comes the same."""
    found = []
    for epoch in range(count):
        found.append({})
        for each in loaders:
            each.set_epoch(epoch)
            for images, labels in each:
                pairs = zip(images, labels.tolist(), strict=True) if each.batch_size else [(images, labels)]
                for image, idx in pairs:
                    digest = hashlib.sha1(image.numpy()).hexdigest()
                    assert found[-1].setdefault(idx, digest) == digest
        assert len(found[-1]) == N
    return found


@pytest.fixture(scope="module")
def expected():
    return epochs([loader(Pictures(AUGMENT))])


TWO = {"num_workers": 2}


@pytest.mark.parametrize(
    ("room", "batch_size", "ranks", "options"),  # each of two values meets somewhere
    [
        (0, 32, 1, {}),
        (2 * N, 1, 2, {"prefetch_factor": 2}),
        (N // 2, None, 1, {}),
        (3, 5, 1, TWO),
        (N // 2, 1, 2, TWO | {"persistent_workers": True}),
        (2 * N, 32, 1, {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}),
        (0, 5, 1, TWO | {"persistent_workers": True, "prefetch_factor": 3}),
        (0, None, 2, TWO | {"pin_memory": True}),
    ],
)
def test_samples_are_the_same_over_topologies(room, batch_size, ranks, options, expected):
    dataset = Pictures(AUGMENT)
    if room:
        dataset = CachedDataset(dataset, f"{SLOT * room + 500}B")
    samplers = [DistributedSampler(dataset, ranks, rank) for rank in range(ranks)] if ranks > 1 else [None]
    shuffle = ranks == 1 and batch_size != 32
    assert epochs([loader(dataset, batch_size, shuffle=shuffle, sampler=each, **options) for each in samplers]) == expected
    if room:
        dataset.close()


def test_a_transform_after_the_cache_is_seeded_as_one_of_the_dataset(expected):
    with CachedDataset(Pictures(), f"{SLOT * N // 2}B", transform={0: AUGMENT}) as dataset:
        samplers = [LocalityDistributedSampler(dataset, 3, num_nodes=1, num_replicas=2, rank=rank) for rank in range(2)]
        assert epochs([loader(dataset, 3, sampler=each) for each in samplers]) == expected
        assert 0 < dataset.stats().total.hits < 2 * N


@pytest.mark.quick
def test_epochs_and_samples_differ_and_stay_so_from_release_to_release(expected):
    assert all(expected[0][idx] != expected[1][idx] for idx in range(N))
    seed = SampleSeed(17)
    numbers = {seed.numbers(epoch, idx) for epoch in range(3) for idx in (*range(9), -1, 2**70, "1", (1, 2), "1 batch")}
    numbers |= {SampleSeed(18).numbers(0, 1), seed.numbers(0, 1, " batch")}
    assert len(numbers) == 3 * 14 + 2
    assert seed.numbers(2, np.int64(5)) == seed.numbers(2, torch.tensor(5)) == seed.numbers(2, 5)
    assert seed.numbers(3, 5)[0] == 16412968395233079743
    assert seed.numbers(3, ("a", 1))[3] == 4889874775595153946


# ------------------------------------------------------------------------------------------------ epochs, and resuming


class Elementary(Dataset):
    """Random numbers, with the index."""

    def __init__(self, draw=torch.rand, n=N):
        self.draw, self.n = draw, n

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        return self.draw(3), idx


def test_the_epoch_is_that_of_set_epoch_or_of_the_sampler_or_counts_iterations():
    first = loader(Elementary())
    counted = [list(first) for _ in range(3)]
    assert not any(same(one, other) for one, other in ((counted[0], counted[1]), (counted[0], counted[2]), counted[1:]))
    first.set_epoch(1)
    assert same(list(first), counted[1])
    assert same(list(first), counted[1])
    sampler = DistributedSampler(range(N), 1, 0, shuffle=False)
    sampler.set_epoch(2)
    assert same(list(loader(Elementary(), sampler=sampler)), counted[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_after_any_batch_it_makes_the_same_samples(workers):
    def make(workers, seed=3):
        return loader(Elementary(), 5, seed, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5))

    whole, came, states = make(workers), [], []
    for _ in range(3):
        for batch in whole:
            came.append(batch)
            states.append(whole.state_dict())
        states[-1] = whole.state_dict()  # after the end
    for at, other in ((1, 0), (4, 0), (7, 2)):
        resumed = make(other)
        resumed.load_state_dict(states[at])
        rest = [batch for _ in range(2 + (at != 4)) for batch in resumed]
        assert same(rest[: 14 - at], came[at + 1 :]), at
    with pytest.raises(StateError, match=r"sample_seed 3; this one has 4"):
        make(0, seed=4).load_state_dict(states[1])


# ------------------------------------------------------------------------------------------------ only what is drawn from


class Rare(Elementary):
    """One sample in 50 draws, each time from another generator."""

    def __getitem__(self, idx):
        draws = {11: random.random, 61: np.random.standard_normal, 111: lambda: torch.rand(()).item()}
        return draws.get(idx, float)(), idx


class Together(Rare):
    """Makes samples together, where it is asked to."""

    asked = ()

    def __getitems__(self, indices):
        self.asked = [*self.asked, len(indices)]
        return [self[idx] for idx in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Rare, Together])
def test_a_rare_draw_is_found(kind, workers):
    found = torch.cat([values for values, _ in loader(kind(n=150), 8, num_workers=workers)])
    one_by_one = torch.cat([values for values, _ in loader(kind(n=150), 1)])
    assert found.nonzero().flatten().tolist() == [11, 61, 111]
    assert found.tolist() == one_by_one.tolist()


def test_what_draws_nothing_is_made_as_without_a_seed():
    dataset = Together(n=10)
    list(loader(dataset))
    assert dataset.asked == [4, 4, 2]
    with CachedDataset(Elementary(torch.zeros), 1) as cached:
        one = loader(cached, num_workers=1, multiprocessing_context="fork")
        assert len(list(one)) == one.stats().ring == 6


class Loads(Elementary):
    """Draws while it loads, but its samples are the same each time."""

    transform = None

    def __getitem__(self, idx):
        random.random(), np.random.random_sample(), torch.rand(())
        return torch.full((3,), float(idx)), idx


class Mosaic(Elementary):
    """Makes a sample of several others."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def __getitem__(self, idx):
        parts = self.dataset.__getitems__([idx, (idx + 5) % N])
        return torch.stack([self.dataset[(idx + 7) % N][0], *(part for part, _ in parts)]), idx


def shake(values):
    return values + torch.rand(3) + random.random() + torch.from_numpy(np.random.randn(3))


WRAPPERS = {
    "itself": lambda dataset: dataset,
    "mosaic": Mosaic,
    "concat": lambda dataset: ConcatDataset([dataset]),
    "subset": lambda dataset: Subset(dataset, range(N)),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_hits_and_misses_give_a_transform_the_same_random_numbers(wrap):
    found = []
    for limit in (100, 300, 10000):
        with CachedDataset(Loads(), f"{limit}B", transform={0: shake}) as dataset:
            found += [list(loader(WRAPPERS[wrap](dataset))) for _ in range(2)]
    assert all(same(found[0], each) for each in found[1:])


# ------------------------------------------------------------------------------------------------ the user's numbers


def shaken(count):
    return shake(torch.zeros(3))


@pytest.mark.quick
@pytest.mark.parametrize(("draw", "collate_fn"), [(None, list), (torch.rand, None), (shaken, None), (shaken, list)])
def test_without_workers_the_numbers_of_the_user_stay_as_they_are(draw, collate_fn):
    random.gauss(0, 1), np.random.randn(), torch.rand(1)  # each keeps the second number of a pair
    batches = iter(loader(Elementary(draw) if draw else Together(n=150), collate_fn=collate_fn))  # draws, as torch's own does
    before, kept = generators.read(), (random.getstate(), repr(np.random.get_state(legacy=False)))
    list(batches)
    assert generators.read() == before
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == kept


def test_workers_leave_the_numbers_of_the_user_as_those_of_torch_do():
    states = []
    for make in (torch.utils.data.DataLoader, loader):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        list(make(Elementary(), 5, shuffle=True, num_workers=2))
        states.append(generators.read())
    assert states[0] == states[1]


@pytest.mark.quick
def test_numbers_of_another_kind_of_numpys_generator_are_seeded_and_kept():
    found = []
    try:
        for kind in (np.random.PCG64, np.random.MT19937):
            np.random.set_bit_generator(kind(3))
            np.random.randn()
            before = generators.read()
            found.append(list(loader(Elementary(np.random.randn))))
            assert same(list(loader(Elementary(np.random.randn))), found[-1])
            assert generators.read()[1] == before[1]
    finally:
        np.random.set_bit_generator(np.random.MT19937())
    assert not same(*found)


@pytest.mark.quick
def test_python_generators_are_read_where_their_memory_is_unknown(monkeypatch):
    assert generators.PYTHON._memory is not None
    known = list(loader(Elementary(shaken)))
    monkeypatch.setattr(generators.PYTHON, "_memory", None)
    random.gauss(0, 1)
    before = random.getstate()
    assert same(list(loader(Elementary(shaken))), known)
    assert random.getstate() == before


# ------------------------------------------------------------------------------------------------ hooks, collating, errors

OWN = []


def set_own(seed):
    OWN[:] = [np.random.default_rng(seed)]


def draw_own(count):
    return torch.from_numpy(OWN[0].random(3))


def forked(count):
    with torch.random.fork_rng():
        return torch.rand(count)


@pytest.mark.parametrize(("draw", "hook"), [(draw_own, set_own), (forked, torch.manual_seed)])
def test_a_hook_is_called_before_each_sample_in_the_process_that_makes_it(draw, hook):
    seed = SampleSeed(17, hooks=(hook,))
    whole = list(loader(Elementary(draw), N, seed))
    assert same(list(loader(Elementary(draw), N, seed, num_workers=1)), whole)
    assert torch.equal(torch.cat([values for values, _ in loader(Elementary(draw), 5, seed)]), whole[0][0])
    assert len(whole[0][0].unique()) == 3 * N
    with CachedDataset(Elementary(torch.zeros), 1, transform={0: draw}) as dataset:
        for _ in range(2 * (draw is draw_own)):
            assert same(list(loader(dataset, N, seed)), whole)
    seeds = []
    list(loader(range(40), seed=SampleSeed(1, (seeds.append,))))
    assert len({number for number in seeds if 0 <= number < 2**32}) == 40


def mix(samples):
    return torch.stack([values for values, _ in samples]) * random.random() + torch.rand(()) + np.random.randn()


def test_a_collate_function_is_seeded_for_its_batch():
    def make(seed=1, **options):
        return list(loader(Elementary(torch.zeros), seed=seed, collate_fn=mix, **options))

    alone = make()
    assert same(alone, make(num_workers=2))
    assert same(alone, make())
    assert len(torch.stack(alone).unique()) == N // 4
    assert not same(alone, make(seed=2))


class Named(Dataset):
    def __getitem__(self, key):
        return torch.rand(2)


@pytest.mark.quick
@pytest.mark.parametrize("keys", [[("a", 1), ("b", 2)] * 2, ["x", "y"] * 2, [-1, -2, 3, -1], [None, 1.5, None, 2.5]])
def test_any_index_seeds_its_sample(keys):
    found = []
    for options in ({"batch_size": 2, "sampler": keys}, {"batch_sampler": [keys]}, {"batch_size": None, "sampler": keys}):
        found.append(torch.stack(list(stocache.DataLoader(Named(), sample_seed=5, **options))).reshape(-1, 2))
    assert all(torch.equal(found[0], its) for its in found)
    assert len(found[0].unique()) == 2 * len(set(keys))


class Several(Elementary):
    def __getitem__(self, indices):
        return torch.rand(len(indices))


class Joined(Elementary):
    def __getitems__(self, indices):
        return {"values": torch.rand(len(indices))}


@pytest.mark.quick
def test_several_samples_at_a_time_are_made_one_by_one_or_by_loaders_that_do_not_batch():
    first, second = (list(loader(Several(), None, sampler=BatchSampler(range(N), 4, False))) for _ in range(2))
    assert same(first, second)
    assert len(torch.cat(first).unique()) == N
    with pytest.raises(DatasetError, match=r"__getitems__ of Joined does not return a list of samples"):
        list(loader(Joined(), collate_fn=dict))


class Failing(Elementary):
    def __getitem__(self, idx):
        if idx == 9:
            raise KeyError("sample 9 is broken")
        return super().__getitem__(idx)


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_samples_pass_through_and_the_loader_goes_on(workers):
    batches, came = iter(loader(Failing(), num_workers=workers)), []
    before = generators.read()
    for number in range(N // 4):
        if number == 2:
            with pytest.raises(KeyError, match="sample 9 is broken"):
                next(batches)
        else:
            came.append(next(batches))
    assert next(batches, None) is None
    assert generators.read() == before
    others = list(loader(Elementary()))
    assert same(came, others[:2] + others[3:])


class Lucky(Together):
    """Fails with some random numbers; the seeded ones are not among them."""

    def __getitem__(self, idx):
        if idx == 9 and torch.initial_seed() == 5:
            torch.rand(())
            raise ValueError("unlucky")
        return idx


@pytest.mark.quick
def test_an_error_of_random_numbers_that_were_not_seeded_does_not_count():
    torch.manual_seed(5)
    assert torch.cat(list(loader(Lucky()))).tolist() == list(range(N))


def test_worker_init_fn_reads_and_sets_attributes_of_the_dataset():
    def prepare(number):
        dataset = get_worker_info().dataset
        dataset.draw = lambda count: torch.full((count,), float(dataset.n + len(dataset)))

    (batch,) = loader(Elementary(None), N, num_workers=1, worker_init_fn=prepare)
    assert (batch[0] == 2 * N).all()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.quick
def test_what_is_not_a_seed_is_refused():
    for seed in (True, -1, 2**64, 1.0, "1", [1], None):
        with pytest.raises(LimitError, match=r"sample_seed=.* is not a seed\. Use an int from 0 to 2\*\*64 - 1"):
            SampleSeed(seed) if seed is None else loader(Elementary(), seed=seed)
    for hooks in (print, [print], (1,)):
        with pytest.raises(LimitError, match=r"is not a tuple of functions\. Use hooks=\(function,\)"):
            SampleSeed(1, hooks)
    with pytest.raises(DatasetError, match="sample_seed needs a map-style dataset"):
        loader(Stream())
    assert len(list(loader(Stream(), seed=None))) == 1
    made = loader(Elementary(), seed=2**64 - 1)
    assert made.sample_seed == SampleSeed(2**64 - 1)  # an attribute, which trainers see
    assert same(list(loader(made.dataset, seed=made.sample_seed)), list(loader(made.dataset, seed=2**64 - 1)))
    assert loader(Elementary(), seed=None).sample_seed is None
