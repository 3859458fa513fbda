"""The audit: a cached dataset returns what the dataset would give now, whatever its samples depend on besides their index."""

import copy
import itertools
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import stocache
from stocache import CachedDataset, DatasetError
from stocache.system import generators
from stocache.system.describe import difference
from tests.support.depending import KINDS, Images, N
from tests.support.epochs import EPOCHS, LOADERS, epochs, seed
from tests.support.equality import same
from tests.support.images import Made
from tests.support.processes import in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*no accelerator is found")

SERVED = "transform in place", "set_transform, split"
DRAWS_IN_ORDER = {name for name, kind in KINDS.items() if kind.change is None} | {*SERVED}  # threads do in theirs
OTHERS = [name for name in LOADERS if name != "torch"]
ROWS = [(name, OTHERS[number % len(OTHERS)]) for number, name in enumerate(KINDS)]  # `python -m benchmark audit` runs all


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "loader"), [*((name, "torch") for name in KINDS), *ROWS])
def test_samples_are_those_without_the_cache_whatever_they_depend_on(name, loader, tmp_path):
    kind = KINDS[name]
    loader = "ours, 2 workers" if "thread" in loader and name in DRAWS_IN_ORDER else loader
    (tmp_path / "plain").mkdir(), (tmp_path / "cached").mkdir()
    plain = kind.make(tmp_path / "plain")
    expected = [epoch.samples for epoch in epochs(plain, loader, 8, plain, kind.change)]
    inner = kind.make(tmp_path / "cached")
    with CachedDataset(inner, 0.1) as cached:
        found = [epoch.samples for epoch in epochs(cached, loader, 8, inner, kind.change)]
        if kind.repeats:
            assert difference(found, expected) is None
        else:
            assert len({repr(sorted(map(repr, epoch))) for epoch in found}) == EPOCHS
        if loader == "torch":
            left = cached._audit.changed
            assert left == (name not in SERVED) or (name not in SERVED and kind.change is None)  # those that draw may be cut


class Source(Images):
    """Images that count how often each was loaded, by the process that asks, and do something more."""

    def __init__(self, more=lambda dataset, idx: None):
        super().__init__(loads=[0] * N, offset=0)
        self.more = more

    def __getitem__(self, idx):
        self.loads[idx] += 1
        self.more(self, idx)
        return self.image(idx) + self.offset


@pytest.mark.linux
def test_a_named_cache_of_an_earlier_run_is_compared_before_its_first_sample_is_served(caplog):
    with CachedDataset(Source(), 0.1, name="audit", fingerprint="v1") as first:
        first.warm(progress=False)
        edited = Source()
        edited.offset = 1
        with CachedDataset(edited, 0.1, name="audit", fingerprint="v1") as cached:
            assert all(torch.equal(cached[idx], edited.image(idx) + 1) for idx in range(N))
        assert "sample 0 of Source differs from the cached sample" in caplog.text
        assert torch.equal(first[5], Source().image(5))  # the other job goes on


def test_what_one_process_finds_all_others_know(caplog):
    source = Source()
    with CachedDataset(source, 0.1) as cached:
        cached.warm(progress=False)
        source.offset = 1
        assert in_child(cached.__getitem__, 3) == 0
        assert cached._audit.changed
        assert torch.equal(cached[7], source.image(7) + 1)
    assert not caplog.records  # the child has said it


def draw(dataset, idx):
    if idx in dataset.drawn:
        random.random(), np.random.rand(), torch.rand(())


@pytest.mark.parametrize("drawn", [range(N), [13], []])
def test_the_random_numbers_that_follow_are_those_without_a_cache_also_if_samples_do_not_depend_on_them(drawn):
    states = []
    for wrap in (lambda dataset: dataset, lambda dataset: CachedDataset(dataset, 0.1, audit=1)):
        source = Source(draw)
        source.drawn = drawn
        seed(3)
        dataset = wrap(source)
        for _ in range(EPOCHS):
            list(DataLoader(dataset, 8))
            states.append(generators.read())
    assert states[:EPOCHS] == states[EPOCHS:]


class Tables(Images):
    """Samples with an entry of a table, which loading may fill, or does not read; and with a NaN, which differs from itself."""

    def __init__(self, table, reads=True, fills=False):
        super().__init__(table=table, sizes=np.zeros(N), reads=reads, fills=fills)

    def __getitem__(self, idx):
        if self.fills:
            self.sizes[idx] = idx
        return self.image(idx), int(self.table[idx]) if self.reads else 0, float("nan")


TABLES = np.arange(N), torch.arange(N), list(range(N)), {idx: idx for idx in range(N)}, np.arange(1 << 18)


@pytest.mark.parametrize("table", TABLES, ids=["array", "tensor", "list", "dict", "large array"])
def test_an_entry_of_a_table_that_is_set_in_place_is_found_when_the_next_epoch_begins(table, caplog):
    with CachedDataset(Tables(table), 0.1) as cached:
        for epoch in range(2):
            cached.dataset.table[0] = epoch
            got = [int(label) for _, labels, _ in DataLoader(cached, 8) for label in labels]
            assert got == [int(cached.dataset.table[idx]) for idx in range(N)]
        assert "dataset.table of Tables was changed in place" in caplog.text


@pytest.mark.parametrize("options", [{"reads": False}, {"fills": True}], ids=["not read", "filled by loading"])
def test_a_table_that_samples_do_not_depend_on_is_no_reason_to_leave_a_cache(options, caplog):
    with CachedDataset(Tables(np.arange(N), **options), 0.1) as cached:
        for epoch in range(4):
            if not cached.dataset.reads:
                cached.dataset.table[epoch] += 1
            list(DataLoader(cached, 8))
        assert (cached.stats().left, cached.stats().total.hits > N) == (False, True)
    assert not caplog.records


class Rounded(Images):
    """Samples that differ in their last digits by the number of threads, as long sums do."""

    def __getitem__(self, idx):
        return self.image(idx) + 1e-6 * torch.get_num_threads()


def test_digits_that_depend_on_the_number_of_threads_are_no_change(caplog):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with caplog.at_level("INFO"), CachedDataset(Rounded(), 0.1) as cached:
            for _ in range(3):
                list(DataLoader(cached, 8))
            assert (cached.stats().left, cached.stats().total.hits >= N) == (False, True)
            assert "by the number of torch's threads" in caplog.text
            type(cached.dataset).image = lambda dataset, idx: Images.image(dataset, idx) * 1.0001
            list(DataLoader(cached, 8))
            assert cached.stats().left
    finally:
        torch.set_num_threads(before)


def test_how_many_samples_are_compared_and_none_is_loaded_that_is_not_requested(monkeypatch):
    with CachedDataset(source := Source(), 0.1, audit=1e-9) as cached:
        source.loads[:] = [0] * N
        for epoch in range(3):
            cached.set_epoch(epoch)
            for _ in range(2):
                assert len(cached.__getitems__(range(N // 2))) == N // 2
            assert cached.stats().compared == epoch + 1
        assert not any(source.loads[N // 2 :])
        assert callable(cached.image)  # a method might have changed it
        assert cached[0] is not None
        assert cached.stats().compared == 3 + 1
    seconds = itertools.count()  # a comparison takes one, and there is time for it
    with monkeypatch.context() as patched, CachedDataset(Source(), 0.1, audit=1) as cached:
        patched.setattr("stocache.datasets.audit.time", SimpleNamespace(monotonic=lambda: next(seconds)))
        cached.warm(progress=False)
        for _ in range(10):
            list(cached)
        assert 10 < cached.stats().compared <= 10 * 5


def once(dataset, idx):
    if dataset.loads[idx] > 1:
        raise OSError("it can be had once")


def test_samples_that_cannot_be_had_again_are_served_from_the_cache_with_one_warning(caplog):
    with CachedDataset(Source(once), 0.1, example=torch.zeros(3, 4, dtype=torch.int64)) as cached:
        for _ in range(2):
            assert all(torch.equal(cached[idx], Source().image(idx)) for idx in range(N))
            cached.set_epoch(0)
        assert not cached._audit.changed
    (record,) = caplog.records
    assert "sample 0 of Source, which is cached, cannot be loaded any more: OSError('it can be had once')" in record.message


def test_a_change_is_an_error_or_kept_if_asked_for(caplog):
    for on_change in ("raise", "keep"):
        with CachedDataset(Source(), 0.1, on_change=on_change) as cached:
            assert torch.equal(cached[3], cached.dataset.image(3))
            cached.dataset.offset = 1
            cached.set_epoch(1)
            if on_change == "keep":
                assert torch.equal(cached[3], cached.dataset.image(3))
                continue
            words = r"dataset\.offset of Source was set: its samples are made with it.*transform="
            for ask in (lambda: cached[3], lambda: cached.__getitems__([3, 4]), lambda: list(stocache.DataLoader(cached))):
                with pytest.raises(DatasetError, match=words):
                    ask()
    assert not caplog.records
    drawn = r"random numbers are drawn to load sample 0 of Images, in line \d+ of mosaic; nothing"
    with pytest.raises(DatasetError, match=drawn):
        CachedDataset(Images("mosaic"), 0.1, on_change="raise")


def test_stats_and_the_verdict_say_that_the_cache_is_left():
    source = Source(lambda dataset, idx: time.sleep(0.002))
    with CachedDataset(source, 0.1) as cached:
        loader = stocache.DataLoader(cached, 8, num_workers=2)
        for epoch in range(3):
            source.offset = epoch // 2
            list(loader)
            assert cached.stats().left == (epoch == 2)
        assert 4 <= cached.stats().compared <= N * 2
        assert "because samples depend on more than their index" in str(loader.stats().epochs[2].verdict)
        assert cached.stats().flat()["cache/left"] == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_changed_by_itself(copied):
    train = Made(lambda its, idx: torch.tensor(idx) if its.train else "", train=True, paths=[str(idx) for idx in range(N)])
    with CachedDataset(train, 0.1) as cached, copied(cached) as val:
        assert (val.paths is train.paths) == (copied is copy.copy)
        assert same([cached[1], val[1]], [torch.tensor(1)] * 2)
        val.train = False
        assert (val[1], val.is_left, cached.is_left, train.train) == ("", True, False, True)
        assert same(cached[1], torch.tensor(1))
