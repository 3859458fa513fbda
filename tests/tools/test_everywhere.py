"""`use_everywhere`: programs find stocache's loader in place of torch's, and all that they do with it works as before."""

import logging
import re
import sys
import time
import types
import weakref

import pytest
import torch
import torch.utils.data as data
from torch.utils.data import dataloader
from torch.utils.data.datapipes.iter import IterableWrapper

import stocache
from stocache.loader.dataloader import DataLoader
from stocache.reading import DataLoader2
from stocache.system.objects import TorchLoader
from stocache.tools.run import caching
from tests.support.equality import same


class Squares(data.Dataset):
    """Samples that depend on their index alone."""

    def __init__(self, length=24):
        self.length, self.loads = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        self.loads += 1
        time.sleep(0.0005)  # more than a cached sample takes
        return torch.full((4,), float(idx)) ** 2, idx


class Random(Squares):
    """Samples that draw random numbers."""

    def __getitem__(self, idx):
        return torch.rand(4), idx


class Slow(Squares):
    """Samples that take their time."""

    def __getitem__(self, idx):
        time.sleep(0.01)
        return super().__getitem__(idx)


class Endless:
    """A batch sampler that begins again, as in Ultralytics and timm."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        while True:
            yield from iter(self.batch_sampler)


def infinite(base):
    class InfiniteDataLoader(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))  # past torch's guard
            self.iterator = super().__iter__()

        def __len__(self):
            return len(self.batch_sampler.batch_sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

    return InfiniteDataLoader


def to_device(base):
    class Prefetching(base):
        def __iter__(self):
            for images, labels in super().__iter__():
                yield images.double(), labels

    return Prefetching


KINDS = {"plain": lambda base: base, "infinite": infinite, "to_device": to_device}


def epochs(make, dataset, **options):
    """The batches of three epochs, each after the other, and the random state that they leave."""
    torch.manual_seed(7)
    loader = make(dataset, batch_size=5, **options)
    return [list(loader) for _ in range(3)], torch.get_rng_state()


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(caching, "_TRIAL_S", 60.0)  # other programs may keep the machine busy
    with stocache.use_everywhere("1MB") as everywhere:
        yield everywhere


def test_programs_find_it_by_all_names_and_torch_has_its_own_again_after_undo():
    with stocache.use_everywhere() as everywhere:
        from torch.utils.data import DataLoader as by_name

        assert by_name is data.DataLoader is dataloader.DataLoader
        assert issubclass(by_name, DataLoader)
        assert isinstance(by_name([1]), TorchLoader)
        assert stocache.use_everywhere() is everywhere
    assert data.DataLoader is dataloader.DataLoader is TorchLoader
    with stocache.use_everywhere():
        data.DataLoader = int  # a program that sets the name itself
        assert data.DataLoader is int
    data.DataLoader = TorchLoader


ALL_WORKERS = [{}, {"num_workers": 2}, {"shuffle": True, "num_workers": 1, "persistent_workers": True}]


@pytest.mark.parametrize(("kind", "options"), [
    (kind, options) for kind in KINDS for options in (ALL_WORKERS if kind == "plain" else ALL_WORKERS[::2])
])  # fmt: skip
def test_batches_and_random_numbers_are_those_of_torch(kind, options, everywhere):
    for dataset in (Squares, Random):
        theirs = epochs(KINDS[kind](TorchLoader), dataset(), **options)
        assert same(epochs(KINDS[kind](data.DataLoader), dataset(), **options), theirs)


@pytest.mark.unaudited
def test_a_dataset_for_training_is_read_once_and_one_in_order_from_the_second_time_on(everywhere):
    training, validation = Squares(), Squares()
    shuffled, in_order = data.DataLoader(training, shuffle=True), data.DataLoader(validation)
    for _ in range(3):
        list(shuffled), list(in_order)
    assert shuffled.dataset is training  # what the program sees
    assert (training.loads, validation.loads) == (16, 24 + 16)  # a child process has loaded the other 8
    assert "cached: 24 of 24 samples" in everywhere.report()


def test_one_limit_is_for_all_datasets_together():
    with stocache.use_everywhere("1000B") as everywhere:
        loaders = [data.DataLoader(Squares(length), shuffle=True) for length in (30, 31, 32)]
        for loader in loaders:
            list(loader)
        served = [loader._stocache.served for loader in loaders if loader._stocache.served is not None]
        assert 0 < sum(cached.cache.stats().capacity_bytes for cached in served) <= 1000
        assert len(everywhere.lines()) == 3


def test_a_dataset_is_gone_with_its_loader_if_the_program_does_not_hold_it_and_is_kept_cached_if_it_does():
    with stocache.use_everywhere("1MB") as everywhere:
        loaders = [data.DataLoader(Squares(8), shuffle=True) for _ in range(caching._KEPT + 2)]
        datasets = [weakref.ref(loader.dataset) for loader in loaders]
        for loader in loaders:
            assert [len(list(loader)) for _ in range(3)] == [8] * 3
        del loader, loaders
        assert [dataset() for dataset in datasets] == [None] * len(datasets)
        assert all(line.state.startswith("cached: 8 of 8 samples") for line in everywhere.lines()), everywhere.report()
        held = Squares(8)
        for _ in range(3):
            list(data.DataLoader(held, shuffle=True))
        assert held.loads < 2 * 8


class Stateful(Squares):
    state_dict = load_state_dict = lambda self, state=None: state


def test_what_cannot_be_cached_is_listed_with_the_reason_and_iterated_as_it_is(everywhere):
    iterable = type("Iterable", (data.IterableDataset,), {"__iter__": lambda self: iter(range(3))})()
    quick, cached = data.TensorDataset(torch.arange(4.0)), stocache.CachedDataset(Squares(), "1MB")
    for dataset in (iterable, Stateful(), cached, quick):
        assert len(list(data.DataLoader(dataset, sampler=None if dataset is iterable else [0, 1]))) in (2, 3)
    report = everywhere.report()
    for reason in ("it is iterable", "it has a state_dict", "the program caches it itself", "a cached sample takes"):
        assert f"not cached: {reason}" in report


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_epoch_is_timed_also_of_loaders_that_iterate_in_their_own_way(kind, workers, everywhere):
    loader = KINDS[kind](data.DataLoader)(Slow(8), batch_size=4, num_workers=workers)
    for _ in range(2):
        assert len(list(loader)) == 2
    (line,) = everywhere.lines()
    assert [epoch.batches for epoch in line.epochs] == [2, 2]
    assert line.waited_s > (0 if workers else 0.08)  # without workers, the loop waits while samples are made
    assert bool(line.note) == (kind != "plain")
    assert bool(line.epochs[0].samples) == (not line.note)  # the steps of loading are timed in stocache's iterators


def graph():
    return IterableWrapper(range(8)).sharding_filter().map(torch.tensor).batch(4)


def stream(path):
    pytest.importorskip("pyarrow")
    path.write_text("1,2\n" * 8)
    return stocache.StreamLoader(path, 4, 4, delimiter=",")


OWN = {  # what a program takes from stocache, and the class in the report
    "a loader": (lambda path: stocache.loader.DataLoader(Slow(8), batch_size=4), "Slow of 8 samples"),
    "workers": (lambda path: stocache.DataLoader(Slow(8), batch_size=4, num_workers=1), "Slow of 8 samples"),
    "a subclass": (lambda path: to_device(stocache.DataLoader)(Slow(8), batch_size=4), "Slow of 8 samples"),
    "a graph": (lambda path: DataLoader2(graph()), "DataLoader2"),
    "a stream": (stream, "StreamLoader"),
}


@pytest.mark.parametrize("what", OWN)
def test_loaders_that_a_program_takes_from_stocache_are_reported_too(what, tmp_path):
    make, name = OWN[what]
    with stocache.use_everywhere() as everywhere:
        loader = make(tmp_path / "rows.csv")
        assert [len(list(loader)) for _ in range(2)] == [2, 2]
        (line,) = everywhere.lines()
        assert [(epoch.batches, epoch.complete) for epoch in line.epochs] == [(2, True)] * 2
        assert re.fullmatch(rf"test_everywhere\.py:\d+: {name}", line.heading)
        assert "in loops over 1 loader" in everywhere.report()
        assert bool(line.note) == (what not in ("a loader", "workers", "a subclass"))
        if name != "StreamLoader":
            assert "the trainer waited" in str(line.epochs[0].verdict) or "graph" in what
    assert [len(list(loader)), len(line.epochs)] == [2, 2]  # afterwards nobody looks on
    getattr(loader, "shutdown", getattr(loader, "close", lambda: None))()


@pytest.mark.parametrize(("module", "count"), [("stocache.integrations.lightning", 1), ("stocache.loader.choice.measure", 0)])
def test_loaders_that_an_adapter_makes_are_reported_and_those_that_stocache_makes_for_itself_are_not(module, count):
    with stocache.use_everywhere() as everywhere:
        eval("list(DataLoader(dataset, batch_size=4))", {"__name__": module, "DataLoader": DataLoader, "dataset": Slow(8)})
        assert len(everywhere.lines()) == count


@pytest.mark.unaudited
def test_a_loader_of_stocaches_own_is_cached_too_and_keeps_its_arguments(everywhere):
    dataset = Squares()
    loader = stocache.DataLoader(dataset, shuffle=True, worker_method="multiprocessing")
    for _ in range(2):
        list(loader)
    assert type(loader) is stocache.DataLoader
    assert dataset.loads == 16
    (line,) = everywhere.lines()
    assert "cached: 24 of 24 samples" in line.state


def test_modules_that_hold_torchs_loader_already_are_named(monkeypatch, caplog):
    module = types.ModuleType("an_early_module")
    module.Loader = TorchLoader
    monkeypatch.setitem(sys.modules, "an_early_module", module)
    caplog.set_level(logging.WARNING, "stocache")
    with stocache.use_everywhere():
        assert "an_early_module" in caplog.text


def test_a_second_call_changes_nothing(caplog):
    with stocache.use_everywhere("1MB") as everywhere:
        assert stocache.use_everywhere("2MB") is everywhere
        assert "which stays" in caplog.text


@pytest.mark.parametrize(("options", "match"), [
    ({"cache": "much"}, "cache='much' is not a size"), ({"num_workers": 3}, "neither None nor 'auto'"),
    ({"worker_method": "fibre"}, "unknown"), ({"disk": "/tmp", "disk_limit": 1}, "Give cache, too"),
])  # fmt: skip
def test_wrong_arguments_are_refused_and_change_nothing(options, match):
    with pytest.raises(ValueError, match=match):
        stocache.use_everywhere(**options)
    assert data.DataLoader is TorchLoader


def test_torchdatas_loader_is_stood_in_for_if_asked():
    module = pytest.importorskip("torchdata.stateful_dataloader")
    theirs = module.StatefulDataLoader
    with stocache.use_everywhere(stateful=True):
        loader = module.StatefulDataLoader(Squares(8), batch_size=2)
        iterator = iter(loader)
        next(iterator)
        state, rest = loader.state_dict(), list(iterator)
        again = module.StatefulDataLoader(Squares(8), batch_size=2)
        again.load_state_dict(state)
        assert [ids.tolist() for _, ids in again] == [ids.tolist() for _, ids in rest] == [[2, 3], [4, 5], [6, 7]]
    assert module.StatefulDataLoader is theirs


@pytest.mark.linux
def test_the_program_goes_on_while_a_child_process_tries_a_cache(tmp_path, monkeypatch, clean):
    monkeypatch.setattr(caching, "_TRIAL_S", 60.0)

    class Waits(Slow):
        def __getitem__(self, idx):
            while data.get_worker_info() is not None and not (tmp_path / "go").exists():
                time.sleep(0.01)
            return super().__getitem__(idx)

    said = []
    with stocache.use_everywhere() as everywhere:
        everywhere.on_epoch = lambda name, epoch: said.append(str(epoch.verdict))
        loader = data.DataLoader(Waits(12), batch_size=4, shuffle=True)
        assert [len(list(loader)) for _ in range(2)] == [3, 3]
        (tmp_path / "go").touch()
        assert "--cache auto would make them once" in everywhere.report()
    assert [text.endswith("is the limit") for text in said] == [True, True]
