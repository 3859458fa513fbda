"""Samples that fail: loaded again or replaced, with the same batches on any number of workers and ranks."""

import functools
import os

import pytest
import torch
from torch.utils.data import Dataset

from stocache import CachedDataset, DataLoader, DatasetError, Retry, Skip, StatefulDistributedSampler
from tests.support.pairs import pairs
from tests.support.resuming import check_resumes
from tests.support.ways import WAYS

LENGTH = 96
ALWAYS = 5, 41, 77
ONCE = range(3, LENGTH, 8)


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


def played(dataset, **options):
    """The batches of two epochs, and the stats of the loader."""
    torch.manual_seed(1)
    loader, found = DataLoader(dataset, batch_size=8, shuffle=True, **options), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        found += [batch.tolist() for batch in loader]
    return found, loader.stats()


@pytest.mark.parametrize(("kind", "cached", "way"), [*pairs([Images, Batches, Drawing], [False, True], [*WAYS.values()])])
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


FIVE = {"num_workers": 5}


@pytest.mark.parametrize(("kind", "cached", "way"), [*pairs([Images, Batches], [False, True], [*WAYS.values(), FIVE])])
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
    def loader(state):
        made = DataLoader(Images(ALWAYS), batch_size=8, shuffle=True, on_error=Skip(0.1))
        made.load_state_dict(state)
        return made

    check_resumes(loader({}), loader, numbers=lambda length, count: (5, length + 1))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_more_failures_than_allowed_end_the_epoch_with_their_names(way):
    with pytest.raises(DatasetError, match=r"3 of 96 samples .*: 5, 41, 77\. Skip\(at_most=0\.02\) allows 2"):
        played(Images(ALWAYS), on_error=Skip(0.02), **way)


def test_a_cached_dataset_and_its_probe_go_on_by_themselves(tmp_path):
    failing, on_error = [0, 5, 41, LENGTH - 1], [Retry(backoff_s=0), Skip(0.1)]
    with CachedDataset(Images(failing, ONCE, str(tmp_path)), "1MB", on_error=on_error) as dataset:
        for _ in range(2):
            values = [int(dataset[idx][0]) for idx in range(LENGTH)]
            assert [idx for idx in range(LENGTH) if values[idx] != idx] == failing
        together = torch.cat(list(torch.utils.data.DataLoader(dataset, batch_size=32)))[:, 0]
        assert together.tolist() == values
        stats = dataset.stats()
        assert (stats.failed, stats.retried > 0, stats.total.filled) == (tuple(failing), True, LENGTH - 4)
