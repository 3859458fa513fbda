"""The measured loads, and the costs that are fitted to runs; the clock, the children and the runs are made up."""

import itertools
import logging
import os

import numpy as np
import pytest
import torch

from stocache import DatasetError
from stocache.loader.choice import measure, trials
from stocache.loader.choice.measure import fit_costs
from stocache.loader.choice.model import UNCACHED, Costs, Setting, WayCosts, predict, simulate
from stocache.loader.choice.trials import EpochRun, FilledCache, nbytes_of, time_busy_loads, time_loads
from stocache.system.loading.children import SlowError


class Clock:
    """Stands for the module `time`: it goes on while a sample is loaded, and for half of that a CPU is used."""

    now = 0.0
    perf_counter = monotonic = lambda self: self.now
    process_time = lambda self: self.now / 2


class Slow:
    """A dataset of numbers whose loads take ``cost_s``, the first time twice as long."""

    def __init__(self, clock, length, cost_s):
        self.clock, self.length, self.cost_s, self.seen = clock, length, cost_s, set()

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        self.clock.now += self.cost_s * (1 if idx in self.seen else 2)
        self.seen.add(idx)
        return idx

    def load_many(self, indices):
        return [self[idx] for idx in indices]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (trials, measure):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize("group", [1, 4])
def test_each_sample_is_loaded_twice_and_kept_once(group):
    kept, sizes, loaded = [], set(), []
    load = lambda indices: (sizes.add(len(indices)), loaded.extend(indices)) and indices
    found = list(time_loads(load, list(range(50)), group, 60.0, kept.append))
    assert [idx for part in found for idx in part.indices] == kept == list(range(50))
    assert sorted(loaded) == sorted([*range(50), *range(50)])
    assert all(len(part.first_s) == len(part.again_s) == len(part.indices) for part in found)
    assert sizes == {group, 50 % group or group}


def test_loads_are_timed_until_the_budget_ends_and_busy_ones_come_in_parts(clock):
    for budget_s, count in ((0.0, 1), (0.3, 9)):
        began, slow = clock.now, Slow(clock, 10**4, 0.01)
        found = list(time_loads(slow.load_many, range(10**4), 1, budget_s, lambda sample: None))
        assert sum(len(part.indices) for part in found) == count
        assert found[0].first_s == pytest.approx((0.02,))
        assert found[0].again_s == pytest.approx((0.01,) if budget_s else ())
        assert found[0].cpu_s == pytest.approx(0.005 if budget_s else 0.01)
        assert clock.now - began <= max(budget_s, 0.02) + 1e-9
    slow = Slow(clock, 9, 0.01)
    first, second = time_busy_loads(slow.load_many, [[1, 2, 3], [4, 5]], 1, 60.0)
    assert (first.indices, second.indices) == ((1, 2, 3), (4, 5))
    assert first.again_s == pytest.approx((0.01,) * 3)  # they were loaded before, and that was not timed
    assert first.cpu_s == pytest.approx(0.015)
    assert next(time_busy_loads(slow.load_many, [[1] * 99], 1, 0.255)).indices == (1,) * 23


WAYS = (None, "lz4", UNCACHED)
MADE = WayCosts({}, sample_bytes=16.0, extra_bytes=1.0, fill_s=0.002)


def run_of(way, workers, size, epoch_s, main_s, workers_s):
    return EpochRun(way, workers, size, 320, epoch_s, main_s, workers_s, 0.2 * workers)


def measured(monkeypatch, dataset, time_limit_s, runs=()):
    """Measure in this process, with 2 CPUs, and with made-up epochs."""

    def in_children(jobs, dataset, patience_s=None):
        level = logging.getLogger("stocache").level
        for job in jobs:
            yield from job()
        logging.getLogger("stocache").setLevel(level)

    def run_epochs(samples, finish, trials):
        assert (trials.batch_sizes, trials.make_loader, trials.passes) == ((8, 2), list, 2)
        for way in (None, UNCACHED):
            yield FilledCache(way, 320, MADE.sample_bytes, MADE.extra_bytes, MADE.fill_s, 64.0)
        yield "codec='zstd' is left out: it is not installed"
        yield from runs

    def progress(seconds, what):
        if "all CPUs" in what:
            dataset.cost_s *= 1.5
            dataset.seen.update(range(len(dataset)))

    monkeypatch.setattr(measure, "count_cores", lambda: 2)
    monkeypatch.setattr(measure, "in_children", in_children)
    monkeypatch.setattr(measure, "run_epochs", run_epochs)
    monkeypatch.setattr(measure, "plan_split", lambda *_: None)
    return measure.measure_costs(dataset, batch_sizes=(8,), make_loader=list, time_limit_s=time_limit_s, on_progress=progress)


def test_costs_hold_what_the_children_have_measured(clock, monkeypatch):
    runs = [run_of(way, workers, 8, 1.0, 0.04, 0.4) for way in (None, UNCACHED) for workers in (0, 2)]
    costs = measured(monkeypatch, Slow(clock, 70, 0.01), 60, runs)
    assert (costs.samples, costs.cores, costs.batch_sizes, costs.batch_bytes) == (70, 2, (2, 8), 64.0)
    assert costs.loads_s == pytest.approx((0.01,) * costs.timed)  # also of those that were loaded with all CPUs only
    assert 1.5 / 0.03 < costs.timed <= 70
    assert (costs.cpu_share, costs.busy_ratio, costs.worker_start_s) == pytest.approx((0.5, 1.5, 0.2))
    assert costs.cold_ratio == pytest.approx(2, rel=0.05)
    assert set(costs.ways) == {None, UNCACHED}
    cached = costs.ways[None]
    assert (cached.sample_bytes, cached.extra_bytes, cached.fill_s) == (16.0, 1.0, 0.002)
    assert cached.at(2).sample_s == pytest.approx(0.4 / 320)
    assert (cached.at(0).sample_s, cached.at(0).main_sample_s) == pytest.approx((0.04 / 320, 0))
    assert costs.missing == ("codec='zstd' is left out: it is not installed",)


def test_slow_samples_leave_time_for_few_and_none_in_time_is_an_error(clock, monkeypatch):
    costs = measured(monkeypatch, Slow(clock, 1000, 1.0), 7)
    assert (costs.timed, costs.load_s, costs.busy_ratio) == (1, pytest.approx(1), 1)
    assert clock.now < 7
    assert [text.partition(":")[0] for text in costs.missing] == [
        "samples are too slow to find out whether transforms can run after the cache",
        "codec='zstd' is left out",
        "loads with all CPUs were not timed; they are assumed to cost as much as alone",
        "batches could not be timed; they are assumed to cost nothing",
    ]
    assert predict(costs, Setting(0, 0, None, 8)).epoch_s == pytest.approx(1000)

    def hang(self, idx):
        raise SlowError("it does not answer")

    monkeypatch.setattr(Slow, "__getitem__", hang)
    with pytest.raises(DatasetError, match=r"Slow: no sample was loaded in 3 s: it does not answer"):
        measured(monkeypatch, Slow(clock, 9, 1.0), 7)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_costs_are_those_that_runs_were_made_with(workers):
    sample_s, batch_s, main_s, start_s = 1e-4, 1e-3, 2e-4, 5e-3
    runs = []
    for way, size in itertools.product((None, UNCACHED), (8, 32)):
        batches, cost_s = 320 // size, batch_s + sample_s * size
        if not workers:
            runs.append(run_of(way, 0, size, 9.0, cost_s * batches, 0.0))
            continue
        epoch_s = start_s + simulate([cost_s] * batches, [0.0] * batches, [main_s] * batches, 0.0, workers, 4)[-1]
        runs.append(run_of(way, workers, size, epoch_s, main_s * batches, cost_s * batches))
        runs.append(runs[-1]._replace(epoch_s=epoch_s * 3, workers_s=1.0))  # a pass that was disturbed
    costs = fit_costs(runs, 4)[None, workers]
    assert (costs.sample_s, costs.batch_s) == pytest.approx((sample_s, batch_s))
    assert costs.main_batch_s == pytest.approx(main_s if workers else 0)
    assert (costs.start_s, costs.wake_s) == pytest.approx((start_s if workers else 0, 0.0), abs=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_epoch_that_was_measured_is_predicted_as_it_was(workers):
    """Whatever it took beyond the model, and however other ways differ."""
    rng = np.random.default_rng(workers)
    runs = [run_of(way, workers, size, float(rng.uniform(0.5, 1.0)), 0.001, 0.4) for way in WAYS for size in (8, 32)]
    costs = fit_costs(runs, 2)
    ways = {way: WayCosts({workers: costs[way, workers]}, sample_bytes=1.0) for way in WAYS}
    known = Costs(320, 2, (0.0,), ways, batch_sizes=(8, 32))
    for run in runs:
        cached = run.way != UNCACHED
        setting = Setting(10**6 * cached, workers, run.way if cached else None, run.batch_size)
        assert predict(known, setting).epoch_s == pytest.approx(run.epoch_s)


@pytest.mark.linux
def test_processors_are_those_of_this_process_and_bytes_of_samples_are_counted_in_containers(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 9})
    assert measure.count_cores() == 3
    assert nbytes_of({"image": torch.zeros(3, 4, dtype=torch.int16), "name": "abc", "label": 7}) == 24 + 3 + 8
