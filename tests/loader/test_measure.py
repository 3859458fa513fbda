"""The settings that are tried, and what is made of their times; the times and the child process are made up."""

import math
from typing import ClassVar

import pytest
import torch
from torch.utils.data import Subset

from stocache import CachedDataset, DatasetError, SampleError
from stocache.loader.choice import measure as module
from stocache.loader.choice.choice import rank, worker_counts
from stocache.loader.choice.measure import Epoch, Samples, Setting, Study, measure
from stocache.system.loading.children import ChildError, SlowError


class Loader:
    """Stands for the loader; keeps what each was made of."""

    made: ClassVar = []

    def __init__(self, dataset, batch_size, **options):
        self.dataset, self.workers, self.method = dataset, options["num_workers"], options["worker_method"]
        self.batch_size, self.ended = batch_size, False
        assert options["persistent_workers"] == (self.workers > 0)
        self.made.append(self)

    def end_workers(self):
        self.ended = True


@pytest.fixture
def timed(monkeypatch):
    """Measure in this process, with seconds that a function returns for a loader."""

    def use(seconds):
        monkeypatch.setattr(Loader, "made", [])
        monkeypatch.setattr(module, "in_children", lambda jobs, dataset, patience_s: (item for job in jobs for item in job()))
        monkeypatch.setattr(module, "_time", lambda loader, samples, until: seconds(loader))

    return use


def tried(epochs):
    return [(each.setting.method[0], each.setting.workers) for each in epochs]


BOTH = ("multiprocessing", "thread")


@pytest.mark.parametrize(("step_s", "expected"), [
    (0.0, [("m", 0), ("m", 1), ("m", 2), ("m", 4), ("t", 1), ("t", 2), ("t", 4)]),  # 4 are no faster than 2
    (0.5, [("m", 0), ("m", 1), ("m", 2), ("t", 1), ("t", 2)]),  # 2 keep up with the step
])  # fmt: skip
def test_more_workers_are_tried_until_they_are_of_no_use(step_s, expected, timed):
    timed(lambda loader: 1 / min(2, max(1, loader.workers)))
    progress = []
    study = Study(Loader, [0, 1, 2, 4, 8], (4,), BOTH, step_s=step_s, on_progress=lambda seconds, what: progress.append(what))
    samples, epochs = measure(list(range(50)), study)
    assert (samples.timed, samples.draws, tried(epochs)) == (50, False, expected)
    assert all(loader.ended and isinstance(loader.dataset, Subset) for loader in Loader.made)
    assert progress[:2] == ["0 workers", "1 workers"]


def test_threads_are_not_tried_where_samples_draw_and_no_more_where_the_time_is_over(timed):
    class Drawn(list):
        def __getitem__(self, idx):
            return torch.rand(2)

    timed(lambda loader: None if loader.workers == 2 else 1.0)
    samples, epochs = measure(Drawn(range(9)), Study(Loader, [0, 1], (4,), BOTH))
    assert (samples.draws, tried(epochs)) == (True, [("m", 0), ("m", 1)])
    assert tried(measure(list(range(9)), Study(Loader, [0, 1, 2], (4,), BOTH))[1]) == [("m", 0), ("m", 1)]


@pytest.mark.linux
def test_the_limit_of_a_cache_is_in_proportion_to_the_part_of_the_dataset(timed):
    timed(lambda loader: 1.0)
    items = [torch.full((64,), idx, dtype=torch.int64) for idx in range(20_000)]
    limits = lambda samples: [(0, None), (samples.limit_for(None, len(items)) // 2, None)]
    samples, epochs = measure(items, Study(Loader, [0], (4,), codecs=(None, "none"), choose_caches=limits))
    assert samples.left_out == ("codec='none' is left out: codec='none' is unknown. Use 'zstd' or 'lz4', or None.",)
    assert [each.setting.limit_bytes for each in epochs] == [0, samples.limit_for(None, len(items)) // 2]
    cached = Loader.made[1].dataset
    assert isinstance(cached, CachedDataset)
    assert len(cached) <= 8192
    assert cached.stats().total.slots == pytest.approx(len(cached) / 2, rel=0.25)


def test_batches_of_slow_samples_are_smaller(timed, monkeypatch):
    timed(lambda loader: 1.0)
    samples = Samples(9, 0.02, False, {})
    monkeypatch.setattr(module, "_load", lambda *_: samples)
    measure(list(range(500)), Study(Loader, [0, 2], (64, 4)))
    assert [loader.batch_size for loader in Loader.made] == [5, 5, 4, 4]
    assert len(Loader.made[0].dataset) == 4 * 2 * 5


def test_without_a_child_process_only_settings_without_workers_are_tried(timed, monkeypatch):
    def fail(*_):
        raise ChildError("no process can be made")
        yield

    timed(lambda loader: 1.0)
    monkeypatch.setattr(module, "in_children", fail)
    assert tried(measure(list(range(9)), Study(Loader, [0, 1], (4,), BOTH))[1]) == [("m", 0)]


def test_a_child_that_is_slow_ends_the_measurement(monkeypatch):
    samples, epoch = Samples(9, 1.0, False, {}), Epoch(Setting(0, 4), 1.0)

    def slow(items):
        def in_children(*_):
            yield from items
            raise SlowError("it does not answer")

        return in_children

    monkeypatch.setattr(module, "in_children", slow([samples, epoch]))
    assert measure([1], Study(Loader, [0, 1], (4,))) == (samples, [epoch])
    monkeypatch.setattr(module, "in_children", slow([]))
    with pytest.raises(DatasetError, match=r"list: no sample was loaded in 5 s: it does not answer"):
        measure([1], Study(Loader, [0, 1], (4,)))


def test_a_sample_that_cannot_be_cached_leaves_out_the_cache(timed, monkeypatch):
    def refuse(*_, **__):
        raise SampleError("it holds a lock")

    timed(lambda loader: 1.0)
    monkeypatch.setattr(module, "CachedDataset", refuse)
    samples, _ = measure([1, 2], Study(Loader, [0], (4,), codecs=(None,), choose_caches=lambda samples: []))
    assert (samples.cached_bytes, samples.left_out) == ({}, ("the cache is left out: it holds a lock",))


@pytest.mark.parametrize(("samples_s", "until", "expected"), [((4.0, 2.0), math.inf, 0.2), ((4.0, 2.0), 0.0, None)])
def test_the_first_epoch_does_not_count(samples_s, until, expected, monkeypatch):
    class Clock:
        now, left = 0.0, list(samples_s)
        perf_counter = monotonic = lambda self: self.now

        def __iter__(self):
            self.now += self.left.pop(0)
            yield

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    assert module._time(clock, 10, until) == expected


def epoch(workers, sample_s, codec=None):
    return Epoch(Setting(workers, 32, 1, codec), sample_s)


def test_the_cheaper_of_equally_fast_settings_comes_first():
    fast, cheap, dear, slow = epoch(4, 1.0), epoch(1, 1.04), epoch(0, 1.0, "lz4"), epoch(0, 1.5)
    assert rank([slow, dear, fast, cheap], 0.0, 9) == [cheap, fast, dear, slow]
    assert rank([slow, dear, fast, cheap], 0.0, 1) == [cheap]
    assert rank([fast, cheap, slow], 2.0, 9) == [cheap, fast, slow]  # without workers, the step comes after the load
    assert (slow.with_step(2.0), cheap.with_step(2.0)) == (3.5, 2.0)


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (999, [0, 1, 2, 4, 8, 16, 32, 64, 128])]
)
def test_no_more_workers_than_cpus_are_tried(cores, counts):
    assert worker_counts(cores) == counts
