"""What is measured of loads, and the costs that are fitted to runs."""

import itertools
import time

import numpy as np
import pytest
import torch

from stocache.forecast.costs import UNCACHED, Costs, WayCosts
from stocache.forecast.epochs import Run, nbytes_of
from stocache.forecast.loads import time_busy_loads, time_loads
from stocache.forecast.measure import fit_costs
from stocache.forecast.model import Setting, play, predict


def load_slowly(indices):
    for idx in indices:
        time.sleep(0.01)
        yield idx


def test_each_sample_is_loaded_twice_and_kept_once():
    kept, loaded = [], []
    load = lambda indices: loaded.extend(indices) or indices
    found = list(time_loads(load, list(range(50)), 1, 60.0, kept.append))
    assert [idx for loads in found for idx in loads.indices] == kept == list(range(50))
    assert sorted(loaded) == sorted([*range(50), *range(50)])
    assert all(len(loads.first_s) == len(loads.again_s) == len(loads.indices) for loads in found)


def test_one_sample_is_loaded_whatever_the_budget():
    (loads,) = time_loads(load_slowly, list(range(50)), 1, 0.0, lambda sample: None)
    assert (loads.indices, loads.again_s) == ((0,), ())
    assert loads.first_s[0] >= 0.01


def test_the_budget_ends_the_loads():
    found = list(time_loads(load_slowly, list(range(10**4)), 1, 0.3, lambda sample: None))
    assert 1 <= sum(len(loads.indices) for loads in found) < 30


def test_groups_are_loaded_together():
    sizes = []
    load = lambda indices: sizes.append(len(indices)) or indices
    list(time_loads(load, list(range(10)), 4, 60.0, lambda sample: None))
    assert set(sizes) == {4, 2}


def test_busy_loads_come_in_parts():
    first, second = time_busy_loads(load_slowly, [[1, 2, 3], [4, 5]], 1, 60.0)
    assert (first.indices, second.indices) == ((1, 2, 3), (4, 5))
    assert min(first.again_s + second.again_s) >= 0.01


@pytest.mark.parametrize("workers", [1, 2])
def test_costs_are_those_that_runs_were_made_with(workers):
    sample_s, batch_s, main_s, start_s = 1e-4, 1e-3, 2e-4, 5e-3
    runs = []
    for way, size in itertools.product((None, UNCACHED), (8, 32)):
        batches = 320 // size
        cost_s = batch_s + sample_s * size
        epoch_s = start_s + play([cost_s] * batches, [0.0] * batches, [main_s] * batches, 0.0, workers, 4)[-1]
        runs.append(Run(way, workers, size, 320, epoch_s, main_s * batches, cost_s * batches, 0.0))
        runs.append(runs[-1]._replace(epoch_s=epoch_s * 3, workers_s=1.0))  # a pass that was disturbed
    costs = fit_costs(runs, 4)[None, workers]
    assert (costs.sample_s, costs.batch_s) == pytest.approx((sample_s, batch_s))
    assert costs.main_batch_s == pytest.approx(main_s)
    assert (costs.start_s, costs.wake_s) == pytest.approx((start_s, 0.0), abs=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_epoch_that_was_measured_is_predicted_as_it_was(workers):
    """Whatever it took beyond the model, and however other ways differ."""
    sizes, rng = (8, 32), np.random.default_rng(workers)
    runs = [
        Run(way, workers, size, 320, float(rng.uniform(0.5, 1.0)), 0.001, 0.4, 0.0)
        for way in (None, "lz4", UNCACHED)
        for size in sizes
    ]
    costs = fit_costs(runs, 2)
    ways = {way: WayCosts({workers: costs[way, workers]}, sample_bytes=1.0) for way in (None, "lz4", UNCACHED)}
    known = Costs(320, 2, (0.0,), ways, batch_sizes=sizes)
    for run in runs:
        setting = Setting(
            0 if run.way == UNCACHED else 10**6, workers, None if run.way == UNCACHED else run.way, run.batch_size
        )
        assert predict(known, setting).epoch_s == pytest.approx(run.epoch_s)


def test_without_workers_the_main_process_has_all_costs():
    runs = [Run(None, 0, size, 320, 9.0, 320 / size * (0.001 + size * 1e-4), 0.0, 0.0) for size in (8, 32)]
    costs = fit_costs(runs, 2)[None, 0]
    assert (costs.sample_s, costs.batch_s, costs.start_s) == pytest.approx((1e-4, 1e-3, 0.0))


def test_bytes_of_samples_are_counted_in_containers():
    sample = {"image": torch.zeros(3, 4, dtype=torch.int16), "name": "abc", "label": 7}
    assert nbytes_of(sample) == 24 + 3 + 8
