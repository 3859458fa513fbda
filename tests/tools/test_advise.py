"""stocache.advise, and num_workers="auto": what they make of costs. Only the last tests measure any."""

import logging
import math
import multiprocessing
import os
import random
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from stocache import CachedDataset, DataLoader, DatasetError, LimitError, WorkerError, advise
from stocache.loader.choice import measure, trials
from stocache.loader.choice.model import UNCACHED, BatchCosts, Costs, Setting, WayCosts
from stocache.loader.choice.trials import EpochRun, EpochTrials, FilledCache, run_epochs

CORES, PACKS = len(os.sched_getaffinity(0)), find_spec("lz4") is not None
CHEAP, FREE = BatchCosts(1e-5, 1e-5), BatchCosts(0.0, 0.0)


class Images(Dataset):
    """Small images, with numbers that are drawn; a sample is broken, or all are, or each ends the process."""

    def __init__(self, length=64, breaks=None):
        self.length, self.breaks = length, breaks

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if self.breaks in (idx, "all"):
            raise ValueError(f"sample {idx} is broken")
        if self.breaks == "dies":
            os._exit(3)
        return torch.full((3, 16, 16), idx % 256, dtype=torch.uint8), random.random() + np.random.rand() + torch.rand(()).item()


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def costs_of(load_s=0.001, cpu_share=1.0, cores=CORES, batch=CHEAP, packs=PACKS, **more):
    """Costs of 64 samples of 776 bytes; of half as many with a codec, if ``packs``."""
    ways = {
        way: WayCosts({0: batch, 1: batch}, sample_bytes, 9.0, 1e-6)
        for way, sample_bytes in ((UNCACHED, 0.0), (None, 776.0), ("lz4", 388.0))[: 2 + packs]
    }
    return Costs(64, cores, (load_s,) * 30, ways, cpu_share=cpu_share, batch_bytes=776.0, **{"timed": 30} | more)


@pytest.fixture
def measured(monkeypatch):
    """Have other costs take the place of those that would be measured; return the arguments of `measure_costs`."""

    def use(costs, **arguments):
        def found(dataset, **given):
            arguments.update(given, dataset=dataset)
            if isinstance(costs, Exception):
                raise costs
            return costs

        for user in ("stocache.tools.advise", "stocache.loader.choice.choice"):
            monkeypatch.setattr(f"{user}.measure_costs", found)
        monkeypatch.setattr("stocache.tools.advise.recommended_limit", lambda: 1 << 20)
        return arguments

    return use


def state_of_generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("cpu_share", [1.0, 0.05], ids=["CPUs", "waiting"])
def test_the_code_of_each_setting_runs_as_it_was_predicted(cpu_share, measured):
    """Without a warning of torch, also where more workers than CPUs would be of use."""
    dataset = Images()
    arguments = measured(costs_of(cpu_share=cpu_share))
    advice = advise(dataset, step_ms=5, batch_size=(8, 16), progress=False)
    assert (arguments["dataset"], arguments["batch_sizes"], arguments["make_loader"]) == (dataset, (8, 16), DataLoader)
    assert (len(advice.settings), advice.best) == (5, advice.settings[0])
    loaders = []
    for each in advice.settings:
        assert each.code in str(advice)
        forecast, setting = each.forecast, each.forecast.setting
        assert forecast.epoch_s >= 64 * 0.005 / 8
        assert setting.workers <= CORES
        loader = eval(each.code, {"CachedDataset": CachedDataset, "DataLoader": DataLoader, "dataset": dataset})
        assert (loader.num_workers, loader.batch_size) == (setting.workers, setting.batch_size)
        assert isinstance(loader.dataset, CachedDataset) == bool(each.size_limit_gib)
        if each.size_limit_gib:
            assert loader.dataset.stats().total.reserved_bytes <= setting.limit_bytes * 1.01
        loaders.append(loader)
    assert sum(len(images) for images, _ in loaders[0]) == 64
    loaders[0].end_workers()
    for loader in loaders:
        if isinstance(loader.dataset, CachedDataset):
            loader.dataset.close()


def test_any_setting_can_be_predicted(measured):
    measured(costs_of(0.005))
    advice = advise(Images(), batch_size=(8, 16), step_ms=4, progress=False)
    slow, fast = (advice.predict(Setting(limit, 0, None, 8)) for limit in (0, 2**30))
    assert slow.epoch_s == pytest.approx(64 * 0.00501 + 8 * 0.00401)
    assert fast.epoch_s == pytest.approx(64 * 1e-5 + 8 * 0.00401)
    assert advice.predict(Setting(2**30, 0, None, 16)).epoch_s == pytest.approx(64 * 1e-5 + 4 * 0.00801)  # a step in proportion


def test_the_report_says_what_was_measured(measured):
    missing = ("codec='zstd' is left out: it is not installed",)
    arguments = measured(costs_of(packs=True, timed=7, cold_ratio=2.0, has_transform=True, missing=missing))
    text = str(advise(Images(), collate_fn=len, transform=tuple, batch_size=8, progress=False))
    assert (arguments["collate_fn"], arguments["transform"]) == (len, tuple)
    for words in (
        "Images: 64 samples, 776 B each in a batch. Measured for ", f" s, on 7 samples, with {CORES} CPUs.",
        "load      1 ms (median 1 ms, 95 % 1 ms, longest 1 ms), 100% of it CPU time, the first time 2.00 times as long",
        "cache     776 B for each sample, 1 µs to fill, read and batched in 11.2 µs (a worker: 88,889/s)",
        "codec lz4 388 B for each sample (ratio 2.00)", "memory    1.0 MiB for a cache",
        "transform=transform), batch_size=8, shuffle=True", ", collate_fn=collate_fn)",
        "Predicted, with no training step, which uses no CPU time.",
        "Transforms of the dataset run after the cache",
        "This rests on 7 samples only.", "Codec='zstd' is left out: it is not installed.",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(("load_s", "limit_s", "tried"), [(0.001, 60, True), (0.06, 60, False), (0.001, 30, False)])
def test_threads_are_tried_where_samples_are_fast_and_time_is_left(load_s, limit_s, tried, measured, monkeypatch):
    measured(costs_of(load_s))
    monkeypatch.setattr("stocache.tools.advise.GilTrial.speed_up", lambda self, dataset: 1.75)
    advice = advise(Images(), time_limit_s=limit_s, progress=False)
    assert advice.costs.thread_speed_up == (1.75 if tried else None)
    assert ("two make 1.75 times as many samples as one" in str(advice)) == tried


def test_numbers_that_are_not_possible_and_datasets_that_cannot_be_cached_are_refused():
    for name, wrong, message in (
        ("step_ms", [-1, math.nan, math.inf, "40", True, None], "must be a finite number of milliseconds, 0 or more"),
        ("batch_size", [0, 2.5, "32", [], [32, 0], True, None, 2**40], "must be a number of samples from 1 to"),
        ("time_limit_s", [0, -1, math.nan, math.inf, "10"], "must be a positive number of seconds"),
    ):
        for value in wrong:
            with pytest.raises(LimitError, match=f"{name}=.* {message}"):
                advise(Images(), **{name: value})
    for dataset, message in ((Numbers(), "Numbers has no samples by number"), (Images(0), r"has length 0\. There is nothing")):
        with pytest.raises(DatasetError, match=message):
            advise(dataset)
    with CachedDataset([1, 2], 1) as cached, pytest.raises(DatasetError, match="Pass the dataset inside it"):
        advise(Subset(cached, [0]))


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "stocache")
    return lambda: [record.getMessage() for record in caplog.records if "num_workers='auto'" in record.getMessage()]


@pytest.mark.parametrize(("costs", "ranks", "workers"), [
    (costs_of(0.0, cores=4, batch=FREE), "", 0), (costs_of(0.1, cpu_share=0.01, cores=4), "", 4),
    (costs_of(0.1, cpu_share=0.01, cores=4), "2", 2), (ValueError("no such\nfile"), "", 8),
], ids=["free", "waiting", "ranks", "unknown"])  # fmt: skip
def test_auto_takes_as_many_workers_as_make_an_epoch_short(costs, ranks, workers, measured, monkeypatch, messages):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("stocache.loader.choice.choice.count_cores", lambda: 4 if isinstance(costs, Costs) else 99)
    arguments = measured(costs)
    options = {"persistent_workers": True, "prefetch_factor": 3, "multiprocessing_context": "fork", "drop_last": True}
    loader = DataLoader(range(64), 8, False, None, None, "auto", **options)
    assert (loader.num_workers, loader.batch_size, loader.drop_last) == (workers, 8, True)
    assert (loader.prefetch_factor, loader.persistent_workers) == ((3, True) if workers else (None, False))
    assert (arguments["batch_sizes"], arguments["codecs"], arguments["passes"]) == ((8,), (None,), 1)
    (message,) = messages()
    unknown = r"samples cannot be measured (ValueError: no such file)"
    reason = "an epoch is predicted to take" if isinstance(costs, Costs) else unknown
    assert message.startswith(f"num_workers='auto' chooses {workers}: {reason}")


def test_auto_measures_what_is_behind_a_cached_dataset(measured):
    with CachedDataset(Images(), 1, transform=tuple) as dataset:
        arguments = measured(costs_of(0.1))
        assert DataLoader(dataset, 4, num_workers="auto", collate_fn=len).num_workers == 0  # all of it is cached
        assert (arguments["dataset"], arguments["transform"], arguments["collate_fn"]) == (dataset.dataset, tuple, len)
        arguments.clear()
        assert DataLoader(Subset(dataset, [1]), num_workers="auto").num_workers == min(8, CORES)
        assert not arguments


def test_auto_takes_no_workers_where_there_is_nothing_to_measure_and_other_texts_are_refused(messages):
    for dataset, reason in ((Numbers(), "the dataset is iterable"), (Images(0), "has no samples")):
        assert DataLoader(dataset, num_workers="auto").num_workers == 0
        assert reason in messages()[-1]
    with pytest.raises(TypeError, match="not supported between instances of"):
        DataLoader([1], num_workers="many")


@pytest.fixture
def short(monkeypatch):
    """Let measurements be short, and not exact."""
    for name in ("_ALONE_S", "_BUSY_S"):
        monkeypatch.setattr(measure, name, 0.01)
    for name in ("_FILL_S", "_ROUND_S", "_WARM_UP_S"):
        monkeypatch.setattr(trials, name, 0.001)
    monkeypatch.setattr(measure, "CACHE_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "_MOST_WORKERS", 1)


@pytest.mark.parametrize("collate_fn", [None, len])
def test_epochs_are_run_over_samples_of_any_kind(collate_fn, short):
    samples = [(torch.arange(idx + 1), "x" * idx) for idx in range(30)]
    trials = EpochTrials(("none", None, UNCACHED), (0, 1), (4,), 32, 1 << 16, DataLoader, collate_fn, 1, math.inf)
    skipped, cached, uncached, *runs = run_epochs(samples, None, trials)
    assert skipped == "codec='none' is left out: codec='none' is unknown. Use 'zstd' or 'lz4', or None."
    assert all(isinstance(each, FilledCache) and each.samples >= 8 for each in (cached, uncached))
    assert cached.sample_bytes > uncached.sample_bytes == 0
    assert all(isinstance(run, EpochRun) and run.epoch_s > 0 and run.begin_s > 0 for run in runs)
    assert [(run.way, run.workers) for run in runs] == [(None, 0), (UNCACHED, 0), (None, 1), (UNCACHED, 1)]


@pytest.mark.linux
def test_a_real_measurement_leaves_this_process_as_it_was(short, monkeypatch, messages):
    monkeypatch.setattr("stocache.tools.advise.measure_costs", partial(measure.measure_costs, codecs=(None,), passes=1))
    dataset, before = Images(), state_of_generators()
    advice = advise(dataset, batch_size=8, progress=False)
    with CachedDataset(dataset, 1) as cached:
        stats = cached.stats()
        assert DataLoader(cached, 8, num_workers="auto").num_workers <= CORES
        assert cached.stats() == stats
    assert "an epoch is predicted to take" in messages()[0]
    assert state_of_generators() == before
    assert vars(dataset) == vars(Images())
    assert not multiprocessing.active_children()
    assert all(each.forecast.setting.workers <= CORES for each in advice.settings)
    assert advice.costs.timed >= 1
    assert set(advice.costs.ways) == {None, UNCACHED}


@pytest.mark.linux
def test_the_error_of_a_sample_is_raised(monkeypatch):
    monkeypatch.setattr(measure, "_ALONE_S", 60.0)  # the time to load all samples
    for breaks, error, message in (
        ("all", ValueError, r"sample \d+ is broken"),
        (7, ValueError, "sample 7 is broken"),
        ("dies", WorkerError, "exited with code 3"),
    ):
        with pytest.raises(error, match=message):
            advise(Images(8, breaks), progress=False)
