"""Samples that fail: loaded again or replaced, with the same batches on any number of workers and ranks."""

import functools
import hashlib
import os
import pickle

import pytest
import torch
from torch.utils.data import Dataset, Subset

from stocache import CachedDataset, DataLoader, DatasetError, Retry, Skip, StatefulDistributedSampler
from stocache.datasets.failing import Failures

LENGTH = 96
ALWAYS = 5, 41, 77
ONCE = range(3, LENGTH, 8)
WAYS = {"main": {}, "processes": {"num_workers": 2}, "threads": {"num_workers": 2, "worker_method": "thread"}}


class Images(Dataset):
    """Samples of which some fail always, and some once, which files in a folder note."""

    def __init__(self, always=(), once=(), folder=None, error=OSError):
        self.always, self.once, self.folder, self.error = {*always}, {*once}, folder, error

    def __len__(self):
        return LENGTH

    def __getitem__(self, idx):
        if idx in self.always:
            raise self.error(f"image {idx} is truncated")
        if idx in self.once and not os.path.exists(path := f"{self.folder}/{idx}"):
            open(path, "x").close()
            raise self.error(f"refused {idx}")
        return torch.full((2,), idx)


class Batches(Images):
    """Makes whole batches."""

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class Drawing(Images):
    """Draws a random number before it may fail."""

    def __getitem__(self, idx):
        noise = torch.rand(1)
        return super().__getitem__(idx) + noise


def digest(loader, epochs=2):
    found = hashlib.sha256()
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            found.update(batch.numpy().tobytes())
    return found.hexdigest()


def played(dataset, **options):
    torch.manual_seed(1)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, **options)
    return digest(loader), loader.stats()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [Images, Batches, Drawing])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_a_sample_that_fails_once_is_that_of_a_run_without_failures(kind, cached, way, tmp_path):
    if kind is Drawing and "num_workers" in way:
        way = way | {"worker_method": "multiprocessing"}  # threads share the global generators
    wrap = functools.partial(CachedDataset, size_limit_gib="1MB", probe=1) if cached else lambda dataset: dataset
    seed = {"sample_seed": 3} if kind is Drawing else {}
    expected, _ = played(wrap(kind()), **way, **seed)
    found, stats = played(wrap(kind(once=ONCE, folder=str(tmp_path))), on_error=Retry(backoff_s=0), **way, **seed)
    assert found == expected
    assert (stats.retried > 0 or cached, stats.failed) == (True, ())  # the probe may load one first


@functools.cache
def expected_with_substitutes(kind):
    return played(kind(ALWAYS), on_error=Skip(0.1))[0]


@pytest.mark.parametrize("way", [*WAYS.values(), {"num_workers": 5}], ids=[*WAYS, "5 processes"])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("kind", [Images, Batches])
def test_a_substitute_is_the_same_for_all_workers(kind, cached, way, caplog):
    dataset = CachedDataset(kind(ALWAYS), "1MB", probe=1) if cached else kind(ALWAYS)
    expected = expected_with_substitutes(kind)
    caplog.clear()
    found, stats = played(dataset, on_error=[Retry(1, 0), Skip(0.1)], **way)
    assert found == expected
    assert stats.failed == ALWAYS
    (said,) = [record.message for record in caplog.records if "took their places" in record.message]
    assert said.startswith(f"3 of {LENGTH} samples could not be loaded, and others took their places: 5, 41, 77. stats()")
    if cached:
        assert dataset.cache.aux_array[list(ALWAYS)].tolist() == [0] * len(ALWAYS)  # never cached


def test_ranks_replace_a_sample_alike():
    found = set()
    for ranks in (1, 2, 4):
        rows = {}
        for rank in range(ranks):
            dataset = Images(ALWAYS)
            sampler = StatefulDistributedSampler(dataset, ranks, rank, shuffle=True)
            batches = DataLoader(dataset, batch_size=LENGTH // ranks, sampler=sampler, on_error=Skip(0.1))
            rows |= dict(zip(list(sampler), next(iter(batches))[:, 0].tolist(), strict=True))
        found.add(tuple(sorted(rows.items())))
    assert len(found) == 1


def test_a_resumed_loader_replaces_the_same_samples():
    def loader():
        torch.manual_seed(4)
        return DataLoader(Images(ALWAYS), batch_size=8, shuffle=True, on_error=Skip(0.1))

    first = loader()
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state, expected = first.state_dict(), list(batches)
    resumed = loader()
    resumed.load_state_dict(state)
    assert all(map(torch.equal, resumed, expected))


def test_another_epoch_has_other_substitutes():
    loader = DataLoader(Images(ALWAYS), batch_size=LENGTH, on_error=Skip(0.1))
    found = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        found.append(next(iter(loader))[list(ALWAYS), 0].tolist())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_more_failures_than_allowed_end_the_epoch_with_their_names(way):
    with pytest.raises(DatasetError, match=r"3 of 96 samples .*: 5, 41, 77\. Skip\(at_most=0\.02\) allows 2"):
        played(Images(ALWAYS), on_error=Skip(0.02), **way)


def test_a_dataset_without_a_good_sample_ends_with_the_first_error():
    with pytest.raises(DatasetError, match="sample 30 cannot be loaded, and neither can 8 samples"):
        played(Images(range(LENGTH)), on_error=Skip(1.0))


class Interrupted(BaseException):
    """Is no Exception."""


@pytest.mark.parametrize("error", [ValueError, Interrupted])
def test_other_errors_are_raised(error):
    with pytest.raises(error, match="image 5"):
        played(Images([5], error=error), on_error=Retry(backoff_s=0))


def test_only_a_map_style_dataset_has_substitutes():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(DatasetError, match="on_error needs a map-style dataset: Stream has no length"):
        DataLoader(Stream(), on_error=Skip())


def test_a_cached_dataset_goes_on_by_itself(tmp_path):
    dataset = CachedDataset(Images([5, 41], ONCE, str(tmp_path)), "1MB", probe=1, on_error=[Retry(backoff_s=0), Skip(0.1)])
    with dataset:
        for _ in range(2):
            values = [int(dataset[idx][0]) for idx in range(LENGTH)]
            assert [idx for idx in range(LENGTH) if values[idx] != idx] == [5, 41]
        together = torch.cat(list(torch.utils.data.DataLoader(dataset, batch_size=32)))[:, 0]
        assert together.tolist() == values
        stats = dataset.stats()
        assert (stats.failed, stats.retried > 0, stats.total.filled) == ((5, 41), True, LENGTH - 2)


def test_the_probe_goes_on_as_well():
    with CachedDataset(Images([0, LENGTH - 1]), "1MB", on_error=Skip(0.1)) as dataset:
        assert len(torch.cat(list(DataLoader(dataset, batch_size=32)))) == LENGTH
        assert dataset.stats().failed == (0, LENGTH - 1)


def test_a_subset_of_a_cache_has_substitutes():
    with CachedDataset(Images(ALWAYS), "1MB", probe=1) as dataset:
        part = Subset(dataset, [41, 2, 5, 1])
        (batch,) = DataLoader(part, batch_size=4, on_error=Skip(1.0))
        assert {*batch[[0, 2], 0].tolist()} <= {1, 2}


def test_failures_are_one_table_for_all_copies():
    failures = Failures(10)
    other = pickle.loads(pickle.dumps(failures))
    other.note_retry()
    assert [other.note_failed(idx) for idx in (7, 3, 7, 9, 0)] == [1, 2, 2, 3, 4]
    assert failures.counts() == (1, (0, 3, 7, 9))
    assert str(failures) == "4 of 10 samples could not be loaded, and others took their places: 0, 3, 7, ..."


def test_nothing_is_kept_without_on_error():
    loader = DataLoader(Images(), batch_size=8)
    assert (len(list(loader)), loader.stats().failed, loader.stats().retried) == (12, (), 0)
