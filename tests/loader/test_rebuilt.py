"""Libraries make loaders again from the attributes of ours, and copy them."""

import copy
import gc
import inspect
import pickle

import pytest
from torch.utils.data import DataLoader

import stocache
from stocache import CachedDataset
from stocache.loader import dataloader
from tests.support.images import Images
from tests.support.loading import THREADS

OPTIONS = [
    {}, {"sample_seed": 3}, {"num_workers": 1, "persistent_workers": True},
    {**THREADS, "persistent_workers": True},
]  # fmt: skip
COPIES = [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]


def labels(loader):
    return [labels.tolist() for _, labels in loader]


def used(options):
    """Return a loader that has delivered a batch, and its iterator."""
    loader = stocache.DataLoader(CachedDataset(Images(10), "1MB"), 4, **options)
    batches = iter(loader)
    next(batches)
    return loader, batches


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loader_class", [stocache.DataLoader, DataLoader])
def test_public_attributes_are_arguments_also_of_torch_s_loader(options, loader_class):
    loader = used(options)[0]
    names = inspect.signature(loader_class).parameters
    public = {name: value for name, value in vars(loader).items() if name[0] != "_" and name != "batch_sampler"}
    assert labels(loader_class(**{name: public[name] for name in names if name in public})) == labels(loader)
    assert loader_class is DataLoader or set(public) <= set(names)


@pytest.mark.parametrize(("options", "copied"), [*zip(OPTIONS, [*COPIES, *COPIES], strict=False)])
def test_a_loader_in_use_is_copied_and_both_go_on_by_themselves(options, copied):
    loader, batches = used(options)
    another = copied(loader)
    assert another.state_dict()["position"]["batches"] == 0 == another.stats().batches
    assert labels(another) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loader.state_dict()["position"]["batches"] == 1
    assert labels(batches) == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_continues_from_a_state_that_was_loaded_before(copied):
    loader = used({})[0]
    loader.load_state_dict(loader.state_dict())
    assert labels(copied(loader)) == labels(loader) == [[4, 5, 6, 7], [8, 9]]


def test_options_that_torch_s_loader_in_place_of_ours_does_not_have_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(dataloader, "_said_lost", False)
    dataset = Images(10)
    for options, said in (({}, 0), ({"sample_seed": 3}, 1), ({"sample_seed": 3}, 1)):
        loader = stocache.DataLoader(dataset, 4, **options)
        loader = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
        gc.collect()
        assert caplog.text.count("where sample_seed has no effect") == said
    assert labels(loader)


def test_iterators_of_one_loader_at_a_time_do_not_look_like_loops_without_the_cache(caplog):
    loader = stocache.DataLoader(CachedDataset(Images(10), "1MB"), 4)
    assert [len(batches) for batches in zip(iter(loader), iter(loader), strict=True)] == [2, 2, 2]
    assert "no sample was requested" not in caplog.text
