"""With ``sample_seed``, the random numbers of a sample come from (seed, epoch, index), whoever makes it and whenever."""

import hashlib
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, DistributedSampler, IterableDataset, Subset, get_worker_info

import stocache
from stocache import CachedDataset, DatasetError, LimitError, LocalityDistributedSampler, SampleSeed, StateError
from stocache.system import generators
from tests.support.equality import same
from tests.support.processes import in_child

N, SLOT = 24, 3 * 12 * 12 + 8  # samples, and bytes of one in a cache


def crop(image):
    top, left = torch.randint(0, 5, (2,)).tolist()
    return image[:, top : top + 8, left : left + 8]


def flip(image):
    return image.flip(-1) if torch.rand(()) < 0.5 else image.clone()


def erase(image):
    row = np.random.randint(8)
    image[:, row] = int(np.random.randn() * 20) % 256
    return image


def jitter(image):
    return (image.float() * random.uniform(0.5, 1.5) + random.gauss(0, 1)).to(torch.int32)


class Pictures(Dataset):
    """Pictures of their own, with transforms in an attribute, which `CachedDataset` cuts."""

    def __init__(self, *transforms):
        self.transform = list(transforms) and torch.nn.Sequential(*map(Step, transforms))

    def __len__(self):
        return N

    def __getitem__(self, idx):
        image = torch.arange(432).reshape(3, 12, 12).add(idx).to(torch.uint8)
        return (self.transform(image) if self.transform else image), idx


class Step(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, image):
        return self.function(image)


AUGMENT = crop, flip, erase, jitter


def digest(batch, into):
    """Note the digests of the images of a batch; an image that comes twice must come the same."""
    for image, idx in zip(*batch, strict=True):
        found = hashlib.sha1(image.numpy()).hexdigest()
        assert into.setdefault(int(idx), found) == found


def epochs(loaders, count=2):
    """A digest of each sample of each epoch, over the loaders of all ranks."""
    found = []
    for epoch in range(count):
        found.append({})
        for loader in loaders:
            loader.set_epoch(epoch)
            for batch in loader:
                batch = batch if loader.batch_size or loader.batch_sampler else (batch[0][None], [batch[1]])
                digest(batch, found[-1])
        assert len(found[-1]) == N
    return found


@pytest.fixture(scope="module")
def expected():
    return epochs([stocache.DataLoader(Pictures(*AUGMENT), sample_seed=17)])


CACHES = {"off": 0, "tiny": SLOT * 3, "half": SLOT * N // 2, "full": SLOT * N * 2}
TOPOLOGIES = [  # cache, batch size, ranks, and arguments of the loader; each of two values meets somewhere
    ("off", 32, 1, {}),
    ("full", 1, 2, {"prefetch_factor": 2}),
    ("half", None, 1, {}),
    ("tiny", 5, 1, {"num_workers": 2, "multiprocessing_context": "fork"}),
    ("half", 1, 2, {"num_workers": 4, "multiprocessing_context": "fork", "persistent_workers": True}),
    ("full", 32, 1, {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}),
    (
        "off",
        5,
        1,
        {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True, "prefetch_factor": 3},
    ),
    ("off", None, 2, {"num_workers": 2, "multiprocessing_context": "fork", "pin_memory": True}),
]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize(("cache", "batch_size", "ranks", "options"), TOPOLOGIES)
def test_samples_are_the_same_over_topologies(cache, batch_size, ranks, options, expected):
    dataset = Pictures(*AUGMENT)
    if cache != "off":
        dataset = CachedDataset(dataset, f"{CACHES[cache] + 500}B")
    samplers = [DistributedSampler(dataset, ranks, rank) for rank in range(ranks)] if ranks > 1 else [None]
    loaders = [
        stocache.DataLoader(dataset, batch_size, sampler is None and batch_size != 32, sampler, sample_seed=17, **options)
        for sampler in samplers
    ]
    assert epochs(loaders) == expected
    if cache != "off":
        dataset.close()


def test_a_transform_after_the_cache_is_seeded_as_one_of_the_dataset(expected):
    with CachedDataset(Pictures(), f"{CACHES['half']}B", transform={0: Pictures(*AUGMENT).transform}) as dataset:
        samplers = [LocalityDistributedSampler(dataset, 3, num_nodes=1, num_replicas=2, rank=rank) for rank in range(2)]
        assert epochs([stocache.DataLoader(dataset, 3, sampler=its, sample_seed=17) for its in samplers]) == expected
        assert 0 < dataset.stats().total.hits < 2 * N


def test_epochs_and_samples_differ(expected):
    first, second = expected
    assert all(first[idx] != second[idx] for idx in range(N))
    seed = SampleSeed(17)
    numbers = {seed.numbers(epoch, idx) for epoch in range(3) for idx in (*range(9), -1, 2**70, "1", (1, 2), "1 batch")}
    numbers |= {SampleSeed(18).numbers(0, 1), seed.numbers(0, 1, " batch")}
    assert len(numbers) == 3 * 14 + 2
    assert seed.numbers(2, np.int64(5)) == seed.numbers(2, torch.tensor(5)) == seed.numbers(2, 5)


def test_the_numbers_do_not_change_from_release_to_release():
    assert SampleSeed(17).numbers(3, 5)[0] == 16412968395233079743
    assert SampleSeed(17).numbers(3, ("a", 1))[3] == 4889874775595153946


# ------------------------------------------------------------------------------------------------ epochs, and resuming


def values(loader):
    return [image.tolist() for images, _ in loader for image in images]


class Elementary(Dataset):
    """Random numbers, with the index."""

    def __init__(self, draw=torch.rand, n=N):
        self.draw, self.n = draw, n

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        return self.draw(3), idx


def test_the_epoch_is_that_of_set_epoch_or_of_the_sampler_or_counts_iterations():
    def make(sampler=None):
        return stocache.DataLoader(Elementary(), 4, sampler=sampler, sample_seed=1)

    loader = make()
    counted = [values(loader) for _ in range(3)]
    assert counted[0] != counted[1] != counted[2] != counted[0]
    loader.set_epoch(1)
    assert values(loader) == values(loader) == counted[1]
    sampler = DistributedSampler(range(N), 1, 0, shuffle=False)
    sampler.set_epoch(2)
    assert values(make(sampler)) == counted[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_after_any_batch_it_makes_the_same_samples(workers):
    def make(workers=workers, seed=3):
        order = torch.Generator().manual_seed(5)
        return stocache.DataLoader(Elementary(), 5, True, num_workers=workers, sample_seed=seed, generator=order)

    loader, came, states = make(), [], []
    for _ in range(3):
        for batch in loader:
            came.append(batch)
            states.append(loader.state_dict())
        states[-1] = loader.state_dict()  # after the end
    for at in (1, 4, 7):
        resumed = make(workers=2 if at == 7 else 0)
        resumed.load_state_dict(states[at])
        rest = [batch for _ in range(2 + (at != 4)) for batch in resumed]
        assert same(rest[: 14 - at], came[at + 1 :]), at
    with pytest.raises(StateError, match=r"sample_seed 3; this one has 4"):
        make(seed=4).load_state_dict(states[1])


def test_a_killed_job_is_resumed_by_another_with_other_workers(tmp_path, expected):
    def train(dataset, loader, delivered, path):
        for epoch in range(2):
            loader.set_epoch(epoch)
            for images, labels in loader:
                digest((images, labels), delivered[epoch])
                torch.save((epoch, delivered, loader.state_dict()), path)
                if epoch and len(delivered[1]) == 10:
                    os.kill(os.getpid(), signal.SIGKILL)

    def make(limit, workers):
        dataset = CachedDataset(Pictures(*AUGMENT), f"{limit}B")
        order = torch.Generator().manual_seed(0)
        return dataset, stocache.DataLoader(dataset, 5, True, num_workers=workers, sample_seed=17, generator=order)

    assert in_child(lambda: train(*make(CACHES["full"], 0), [{}, {}], tmp_path / "state")) == signal.SIGKILL
    epoch, delivered, state = torch.load(tmp_path / "state")
    dataset, loader = make(CACHES["half"], 2)
    loader.load_state_dict(state)
    assert (epoch, len(delivered[1])) == (1, 10)
    for batch in loader:
        digest(batch, delivered[1])
    assert delivered == expected
    dataset.close()


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
    found = torch.cat([values for values, _ in stocache.DataLoader(kind(n=150), 8, sample_seed=17, num_workers=workers)])
    one_by_one = torch.cat([values for values, _ in stocache.DataLoader(kind(n=150), 1, sample_seed=17)])
    assert found.nonzero().flatten().tolist() == [11, 61, 111]
    assert found.tolist() == one_by_one.tolist()


def test_what_draws_nothing_is_made_as_without_a_seed():
    dataset = Together(n=10)
    list(stocache.DataLoader(dataset, 4, sample_seed=1))
    assert dataset.asked == [4, 4, 2]
    with CachedDataset(Elementary(lambda n: torch.zeros(n)), 1) as cached:
        loader = stocache.DataLoader(cached, 4, num_workers=1, multiprocessing_context="fork", sample_seed=1)
        assert len(list(loader)) == loader.stats().ring == 6


def test_a_dataset_that_returns_no_list_of_samples_cannot_be_seeded():
    class Joined(Elementary):
        def __getitems__(self, indices):
            return {"values": torch.rand(len(indices))}

    with pytest.raises(DatasetError, match=r"__getitems__ of Joined does not return a list of samples"):
        list(stocache.DataLoader(Joined(), 4, collate_fn=dict, sample_seed=1))


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


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, Mosaic, lambda dataset: ConcatDataset([dataset]), Subset])
def test_hits_and_misses_give_a_transform_the_same_random_numbers(wrap):
    wrapped = (lambda dataset: Subset(dataset, range(N))) if wrap is Subset else wrap
    found = []
    for limit in (100, 300, 10000):
        with CachedDataset(Loads(), f"{limit}B", transform={0: shake}) as dataset:
            found.append([list(stocache.DataLoader(wrapped(dataset), 4, sample_seed=1)) for _ in range(2)])
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert same(found[0][0], found[0][1])


# ------------------------------------------------------------------------------------------------ the user's numbers


def now():
    return generators.read()


@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("kind", [Rare, lambda n: Elementary(shake_zeros, n), Together])
def test_without_workers_the_numbers_of_the_user_stay_as_they_are(kind, collate_fn):
    random.gauss(0, 1), np.random.randn(), torch.rand(1)  # each keeps the second number of a pair
    loader = stocache.DataLoader(kind(n=150), 10, collate_fn=collate_fn, sample_seed=1)
    batches = iter(loader)  # which draws from torch's generator, as torch's own does
    before = now()
    kept = random.getstate(), np.random.get_state(legacy=False)
    list(batches)
    assert now() == before
    assert random.getstate() == kept[0]
    assert repr(np.random.get_state(legacy=False)) == repr(kept[1])


def shake_zeros(count):
    return shake(torch.zeros(count))


def test_workers_leave_the_numbers_of_the_user_as_those_of_torch_do():
    states = []
    for make in (torch.utils.data.DataLoader, lambda *args, **kwargs: stocache.DataLoader(*args, **kwargs, sample_seed=1)):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        list(make(Elementary(), 5, shuffle=True, num_workers=2))
        states.append(now())
    assert states[0] == states[1]


def test_numbers_of_another_kind_of_numpys_generator_are_seeded_and_kept():
    try:
        found = []
        for kind in (np.random.PCG64, np.random.MT19937):
            np.random.set_bit_generator(kind(3))
            np.random.randn()
            loader = stocache.DataLoader(Elementary(np.random.randn), 6, sample_seed=1)
            before = now()
            found.append(list(loader))
            loader.set_epoch(0)
            assert same(list(loader), found[-1])
            assert now()[1] == before[1]
        assert not same(*found)
    finally:
        np.random.set_bit_generator(np.random.MT19937())


def test_python_generators_are_read_where_their_memory_is_unknown(monkeypatch):
    assert generators.PYTHON._memory is not None
    monkeypatch.setattr(generators.PYTHON, "_memory", None)
    random.gauss(0, 1)
    before = random.getstate()
    loader = stocache.DataLoader(Elementary(shake_zeros), 6, sample_seed=1)
    found = list(loader)
    assert random.getstate() == before
    monkeypatch.undo()
    loader.set_epoch(0)
    assert same(list(loader), found)


# ------------------------------------------------------------------------------------------------ hooks, collating, errors

OWN = np.random.default_rng()


def set_own(seed):
    global OWN
    OWN = np.random.default_rng(seed)


def draw_own(count):
    return torch.from_numpy(OWN.random(count))


def test_a_hook_is_called_before_each_sample_in_the_process_that_makes_it():
    def make(batch_size, **options):
        seed = SampleSeed(17, hooks=(set_own,))
        return list(stocache.DataLoader(Elementary(draw_own), batch_size, sample_seed=seed, **options))

    whole = make(N)
    assert same(whole, make(N, num_workers=1))
    assert torch.equal(torch.cat([values for values, _ in make(5)]), whole[0][0])
    with CachedDataset(Elementary(torch.zeros), 1, transform={0: lambda zeros: draw_own(3)}) as dataset:
        seed = SampleSeed(17, hooks=(set_own,))
        for _ in range(2):
            assert same(list(stocache.DataLoader(dataset, N, sample_seed=seed)), whole)
    seeds = []
    list(stocache.DataLoader(range(40), 4, sample_seed=SampleSeed(1, (seeds.append,))))
    assert len(set(seeds)) == 40
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_draw_that_is_put_back_needs_a_hook():
    def fork(count):
        with torch.random.fork_rng():
            return torch.rand(count)

    seed = SampleSeed(2, hooks=(torch.manual_seed,))
    whole, single = (
        torch.cat([values for values, _ in stocache.DataLoader(Elementary(fork), size, sample_seed=seed)]) for size in (N, 1)
    )
    assert torch.equal(whole, single)
    assert len(whole.unique()) == 3 * N


def mix(samples):
    return torch.stack([values for values, _ in samples]) * random.random() + torch.rand(()) + np.random.randn()


def test_a_collate_function_is_seeded_for_its_batch():
    def make(seed=1, **options):
        return list(stocache.DataLoader(Elementary(torch.zeros), 4, collate_fn=mix, sample_seed=seed, **options))

    alone = make()
    assert same(alone, make(num_workers=2))
    assert same(alone, make())
    assert len(torch.stack(alone).unique()) == N // 4
    assert not same(alone, make(seed=2))


class Named(Dataset):
    def __init__(self, draw=torch.rand):
        self.draw = draw

    def __getitem__(self, key):
        return self.draw(2)


@pytest.mark.parametrize("keys", [[("a", 1), ("b", 2)] * 2, ["x", "y"] * 2, [-1, -2, 3, -1], [None, 1.5, None, 2.5]])
def test_any_index_seeds_its_sample(keys):
    found = []
    for options in ({"batch_size": 2, "sampler": keys}, {"batch_sampler": [keys]}, {"batch_size": None, "sampler": keys}):
        for workers in (0, 1):
            loader = stocache.DataLoader(Named(), num_workers=workers, sample_seed=5, **options)
            found.append(torch.stack(list(loader)).reshape(-1, 2))
    assert all(torch.equal(found[0], its) for its in found)
    assert len(found[0].unique()) == 2 * len(set(keys))


def test_loaders_that_do_not_batch_may_ask_for_several_samples_at_a_time():
    class Several(Elementary):
        def __getitem__(self, indices):
            return torch.rand(len(indices))

    sampler = torch.utils.data.BatchSampler(range(N), 4, False)
    first, second = (list(stocache.DataLoader(Several(), None, sampler=sampler, sample_seed=1)) for _ in range(2))
    assert same(first, second)
    assert len(torch.cat(first).unique()) == N


class Failing(Elementary):
    def __getitem__(self, idx):
        if idx == 9:
            raise KeyError("sample 9 is broken")
        return super().__getitem__(idx)


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_samples_pass_through_and_the_loader_goes_on(workers):
    loader = stocache.DataLoader(Failing(), 4, num_workers=workers, sample_seed=1)
    batches, came = iter(loader), []
    before = now()
    for number in range(N // 4):
        if number == 2:
            with pytest.raises(KeyError, match="sample 9 is broken"):
                next(batches)
        else:
            came.append(next(batches))
    assert next(batches, None) is None
    assert now() == before
    others = list(stocache.DataLoader(Elementary(), 4, sample_seed=1))
    assert same(came, others[:2] + others[3:])


class Lucky(Elementary):
    """Fails with some random numbers; the seeded ones are not among them."""

    def __getitem__(self, idx):
        if idx == 9 and torch.initial_seed() == 5:
            torch.rand(())
            raise ValueError("unlucky")
        return idx


def test_an_error_of_random_numbers_that_were_not_seeded_does_not_count():
    torch.manual_seed(5)
    dataset = Together(n=N)
    dataset.__class__ = type("LuckyTogether", (Together,), {"__getitem__": Lucky.__getitem__})
    assert torch.cat(list(stocache.DataLoader(dataset, 4, sample_seed=1))).tolist() == list(range(N))


def test_worker_init_fn_reads_and_sets_attributes_of_the_dataset():
    def prepare(number):
        dataset = get_worker_info().dataset
        dataset.draw = lambda count: torch.full((count,), float(dataset.n + len(dataset)))

    (batch,) = stocache.DataLoader(Elementary(None), N, num_workers=1, worker_init_fn=prepare, sample_seed=1)
    assert (batch[0] == 2 * N).all()


@pytest.mark.parametrize("seed", [True, -1, 2**64, 1.0, "1", [1], None])
def test_what_is_not_a_seed_is_refused(seed):
    with pytest.raises(LimitError, match=r"sample_seed=.* is not a seed\. Use an int from 0 to 2\*\*64 - 1"):
        SampleSeed(seed)
    if seed is not None:
        with pytest.raises(LimitError, match="is not a seed"):
            stocache.DataLoader(Elementary(), sample_seed=seed)


def test_hooks_must_be_a_tuple_of_functions():
    for hooks in (print, [print], (1,)):
        with pytest.raises(LimitError, match=r"is not a tuple of functions\. Use hooks=\(function,\)"):
            SampleSeed(1, hooks)


def test_an_iterable_dataset_has_no_samples_to_seed():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(DatasetError, match="sample_seed needs a map-style dataset"):
        stocache.DataLoader(Stream(), sample_seed=1)
    assert list(stocache.DataLoader(Stream(), sample_seed=None)) == [0, 1, 2]


def test_it_is_an_argument_that_trainers_see():
    loader = stocache.DataLoader(Elementary(), sample_seed=2**64 - 1)
    assert loader.sample_seed == SampleSeed(2**64 - 1)
    assert same(list(stocache.DataLoader(loader.dataset, sample_seed=loader.sample_seed)), list(loader))
    assert stocache.DataLoader(Elementary()).sample_seed is None
