"""Programs' subclasses of DataLoader have attributes and methods of any name. Libraries copy loaders and make them again."""

import copy
import gc
import inspect
import pickle

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

import stocache
from stocache import CachedDataset
from stocache.loader import dataloader
from stocache.loader.engine import LoaderEngine
from stocache.tools.run.loaders import ProgramLoader
from tests.support.images import Images
from tests.support.loading import THREADS

BASES = [stocache.DataLoader, ProgramLoader]
OPTIONS = {"device", "on_error", "prefetch_epochs", "sample_seed", "snapshot_every_n_steps", "worker_method"}
METHODS = {"end_workers", "load_state_dict", "set_epoch", "state_dict", "stats"}
ENGINE = {*dir(LoaderEngine), *vars(stocache.DataLoader([1])._stocache)}
ANY = {"close", "epoch", "name", "ready", "workers", "_iterator"}
NAMES = sorted(OPTIONS | METHODS | ANY | {name for name in ENGINE if not name.startswith("__")})


class Mine:
    """A value that nothing but its program may look at."""

    def __call__(self, *args, **kwargs):
        raise AssertionError("this is not a hook of torch")

    __bool__ = __iter__ = __eq__ = __getattr__ = __call__
    __hash__ = None


def subclass(base, kind, mine):
    """A subclass with attributes of the class, or set after torch's constructor."""

    def __init__(self, *args, **options):
        base.__init__(self, *args, **options)
        if kind == "after":
            for name, value in mine.items():
                setattr(self, name, value)

    return type("Own", (base,), {"__init__": __init__} | (mine if kind == "class" else {}))


def batches(loader):
    torch.manual_seed(3)
    return [[batch.tolist() for (batch,) in loader] for _ in range(2)], torch.get_rng_state().tolist()[:50]


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(("base", "kind", "options"), [
    *((base, kind, {}) for kind in ("after", "class") for base in BASES),
    (BASES[0], "after", PERSISTENT), (BASES[0], "after", THREADS | PERSISTENT),
])  # fmt: skip
def test_a_subclass_keeps_its_attributes_whatever_their_names_are(base, kind, options):
    taken = {} if kind == "after" and not options else {"_iterator"}  # torch sets it, and uses it with persistent workers
    mine = {name: Mine() for name in NAMES if name not in taken}
    given = {"dataset": TensorDataset(torch.arange(10)), "batch_size": 4, "shuffle": True}
    loader = subclass(base, kind, mine)(**given, **options)
    theirs = TorchLoader(**given, **{name: value for name, value in options.items() if name in PERSISTENT})
    assert batches(loader) == batches(theirs)
    assert all(getattr(loader, name) is value for name, value in mine.items())
    base.load_state_dict(loader, base.state_dict(loader))  # methods of ours, called like this, call each other
    assert base.stats(loader).batches == 6
    base.end_workers(loader)


def test_a_class_of_ours_adds_these_names_to_torchs():
    added = {name for base in BASES for name in {*dir(base), *vars(base([1]))}} - {*dir(TorchLoader), *vars(TorchLoader([1]))}
    assert {name for name in added if not name.startswith("__")} == {"_stocache"} | METHODS | OPTIONS
    assert not OPTIONS & {*dir(ProgramLoader), *vars(ProgramLoader([1]))}


@pytest.mark.parametrize("base", BASES)
def test_a_subclass_that_makes_its_iterators_is_asked_for_them(base):
    class Doubles(base):
        def _get_iterator(self):
            batches = super()._get_iterator()
            return (2 * batch for batch in batches)

    assert [batch.tolist() for batch in Doubles(range(3))] == [[0], [2], [4]]


WAYS = [{}, {"sample_seed": 3}, PERSISTENT, THREADS | PERSISTENT]
COPIES = [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]


def by_batch(loader):
    return [labels.tolist() for _, labels in loader]


def used(options):
    """Return a loader that has delivered a batch, and its iterator."""
    loader = stocache.DataLoader(CachedDataset(Images(10), "1MB"), 4, **options)
    batches = iter(loader)
    next(batches)
    return loader, batches


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_public_attributes_are_arguments_also_of_torch_s_loader(options):
    loader = used(options)[0]
    names = inspect.signature(TorchLoader).parameters
    public = {name: value for name, value in vars(loader).items() if name[0] != "_" and name != "batch_sampler"}
    assert by_batch(TorchLoader(**{name: public[name] for name in names if name in public})) == by_batch(loader)
    assert set(public) <= {*inspect.signature(stocache.DataLoader).parameters}


@pytest.mark.parametrize(("options", "copied"), [*zip(WAYS, [*COPIES, *COPIES], strict=False)])
def test_a_loader_in_use_is_copied_and_both_go_on_by_themselves(options, copied):
    loader, batches = used(options)
    another = copied(loader)
    assert another.state_dict()["position"]["batches"] == 0 == another.stats().batches
    assert by_batch(another) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loader.state_dict()["position"]["batches"] == 1
    assert by_batch(batches) == [[4, 5, 6, 7], [8, 9]]
    begun = used(options)[0]
    begun.load_state_dict(begun.state_dict())
    assert by_batch(copied(begun)) == by_batch(begun) == [[4, 5, 6, 7], [8, 9]]


def test_options_that_torch_s_loader_in_place_of_ours_does_not_have_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(dataloader, "_said_lost", False)
    dataset = Images(10)
    for options, said in (({}, 0), ({"sample_seed": 3}, 1), ({"sample_seed": 3}, 1)):
        loader = stocache.DataLoader(dataset, 4, **options)
        loader = TorchLoader(loader.dataset, batch_sampler=loader.batch_sampler)
        gc.collect()
        assert caplog.text.count("where sample_seed has no effect") == said
    assert by_batch(loader)
