"""stocache.advise, and num_workers="auto": what they make of measured epochs. Only the last tests measure any."""

import logging
import math
import multiprocessing
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from stocache import CachedDataset, DataLoader, DatasetError, LimitError, WorkerError, advise
from stocache.loader.choice import measure as module
from stocache.loader.choice.measure import Epoch, Samples, Setting
from tests.support.images import Made, image

CORES = len(os.sched_getaffinity(0))
MOST = 1 << 30


def drawn(dataset, idx):
    """Make a small image, with numbers that are drawn; a sample is broken, or each ends the process."""
    if idx == dataset.breaks:
        raise ValueError(f"sample {idx} is broken")
    if dataset.breaks == "dies":
        os._exit(3)
    return image(idx), random.random() + np.random.rand() + torch.rand(()).item()


def images(length=64, breaks=None):
    return Made(drawn, length, breaks=breaks)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@pytest.fixture
def measured(monkeypatch):
    """Have other samples and epochs take the place of the samples that would be measured; return the plan of `measure`."""

    def use(samples, *epochs):
        plan = {}

        def measure(dataset, given):
            plan.update(vars(given), dataset=dataset)
            if isinstance(samples, Exception):
                raise samples
            return samples, list(epochs)

        for user in ("stocache.tools.advise", "stocache.loader.choice.choice"):
            monkeypatch.setattr(f"{user}.measure", measure)
        monkeypatch.setattr("stocache.tools.advise.recommended_limit", lambda: MOST)
        return plan

    return use


def samples_of(draws=False, left_out=(), **cached_bytes):
    return Samples(30, 0.001, draws, {None: 776.0} | cached_bytes, left_out)


@pytest.mark.linux
def test_the_code_of_each_setting_runs_as_it_was_measured(measured):
    dataset, limit = images(), MOST // 256
    epochs = [
        Epoch(Setting(1, 8, limit, None, "thread"), 0.0001), Epoch(Setting(0, 16, limit, "zstd"), 0.0002),
        Epoch(Setting(1, 8, limit), 0.0004), Epoch(Setting(0, 16), 0.0008), Epoch(Setting(1, 16), 0.0016),
        Epoch(Setting(1, 8), 0.0032),
    ]  # fmt: skip
    plan = measured(samples_of(), *epochs)
    advice = advise(dataset, batch_size=(8, 16), progress=False)
    assert (plan["dataset"], plan["batch_sizes"], plan["make_loader"]) == (dataset, (8, 16), DataLoader)
    assert (plan["workers"][0], plan["workers"][-1]) == (0, CORES)
    assert (plan["methods"], plan["codecs"]) == (("multiprocessing", "thread"), (None, "lz4", "zstd"))
    assert [each.setting for each in advice.settings] == [each.setting for each in epochs[:5]]
    assert (advice.best, advice.best.epoch_s, advice.epochs) == (advice.settings[0], pytest.approx(64 * 0.0001), tuple(epochs))
    for each in advice.settings:
        assert each.code in str(advice)
        if each.setting.codec is not None:
            continue  # its package may not be installed
        loader = eval(each.code, {"CachedDataset": CachedDataset, "DataLoader": DataLoader, "dataset": dataset})
        assert (loader.num_workers, loader.batch_size) == (each.setting.workers, each.setting.batch_size)
        assert loader.worker_method == each.setting.method
        assert isinstance(loader.dataset, CachedDataset) == bool(each.size_limit_gib)
        assert sum(len(images) for images, _ in loader) == 64
        loader.end_workers()
        if isinstance(loader.dataset, CachedDataset):
            loader.dataset.close()


def test_a_step_hides_what_workers_load_in_its_time_and_the_dataset_says_whether_threads_are_tried(measured):
    plan = measured(samples_of(), Epoch(Setting(0, 8), 0.0004), Epoch(Setting(2, 8), 0.0002), Epoch(Setting(1, 8), 0.0005))
    (dataset := images()).thread_safe = False
    advice = advise(dataset, batch_size=8, step_ms=4, progress=False)
    assert (plan["step_s"], plan["methods"]) == (pytest.approx(0.0005), ("multiprocessing",))
    assert [each.setting.workers for each in advice.settings] == [1, 2, 0]
    assert [each.epoch_s for each in advice.settings] == pytest.approx([64 * 0.0005, 64 * 0.0005, 64 * 0.0009])


def test_codecs_are_tried_where_not_all_samples_fit_without(measured):
    plan = measured(samples_of(), Epoch(Setting(0, 8), 0.0004))
    advise(images(), progress=False)
    none, whole = plan["choose_caches"](samples_of(lz4=388.0))
    assert (none, whole[1], 64 * 776 < whole[0] < 2 * 2**20) == ((0, None), None, True)
    advise(images(2 * 10**6), progress=False)
    none, plain, packed = plan["choose_caches"](samples_of(lz4=388.0))
    assert (none, plain[1], packed[1]) == ((0, None), None, "lz4")
    assert 0.99 * MOST < plain[0] <= MOST  # as many as fit
    assert 2 * 10**6 * 388 < packed[0] <= MOST


def test_the_report_says_what_was_measured(measured):
    samples = samples_of(True, ("codec='zstd' is left out: it is not installed",), lz4=388.0)
    plan = measured(samples, Epoch(Setting(1, 8, MOST // 256, "lz4"), 0.001))
    text = str(advise(images(), collate_fn=len, transform=tuple, batch_size=8, progress=False))
    assert (plan["collate_fn"], plan["options"]) == (len, {"transform": tuple, "allow_pickle": False})
    for words in (
        "Made: 64 samples. Measured 1 setting in ", "load      1 ms (mean of 30 samples)",
        "cache     776 B for each sample, 1.0 MiB for all", "codec lz4 388 B for each sample (ratio 2.00), 1.0 MiB for all",
        "memory    1.0 GiB for a cache", "1. 64 ms an epoch, 1,000 samples/s, with a cache of 4.0 MiB:\n   DataLoader(",
        "codec='lz4', transform=transform), batch_size=8, shuffle=True", ", collate_fn=collate_fn)",
        "With no training step, which uses no CPU time.", "only processes were tried",
        "Codec='zstd' is left out: it is not installed.",
    ):  # fmt: skip
        assert words in text


IMPOSSIBLE = {
    "step_ms": ([-1, math.nan, math.inf, "40", True, None], "must be a finite number of milliseconds, 0 or more"),
    "batch_size": ([0, 2.5, "32", [], [32, 0], True, None, 2**40], "must be a number of samples from 1 to"),
    "time_limit_s": ([0, -1, math.nan, math.inf, "10"], "must be a positive number of seconds"),
}


def test_numbers_that_are_not_possible_and_datasets_that_cannot_be_cached_are_refused(measured):
    for name, (values, message) in IMPOSSIBLE.items():
        for value in values:
            with pytest.raises(LimitError, match=f"{name}=.* {message}"):
                advise(images(), **{name: value})
    for dataset, message in ((Numbers(), "Numbers has no samples by number"), (images(0), r"has length 0\. There is nothing")):
        with pytest.raises(DatasetError, match=message):
            advise(dataset)
    with CachedDataset([1, 2], 0.1) as cached, pytest.raises(DatasetError, match="Pass the dataset inside it"):
        advise(Subset(cached, [0]))
    measured(samples_of())
    with pytest.raises(DatasetError, match=r"Made: no epoch was run in 9 s\. Use a longer time_limit_s\."):
        advise(images(), time_limit_s=9, progress=False)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "stocache")
    return lambda: [record.getMessage() for record in caplog.records if "num_workers='auto'" in record.getMessage()]


BY_WORKERS = [Epoch(Setting(workers, 8), sample_s) for workers, sample_s in ((0, 0.4), (1, 0.41), (2, 0.2), (4, 0.195))]


@pytest.mark.parametrize(("samples", "epochs", "workers", "reason"), [
    (samples_of(), BY_WORKERS[:2], 0, "epochs take 25.6 s with 0 workers, 26.2 s with 1 workers"),
    (samples_of(), BY_WORKERS, 2, "epochs take 25.6 s with 0 workers"), (samples_of(), (), 8, "samples are too slow"),
    (ValueError("no such\nfile"), (), 8, "samples cannot be measured (ValueError: no such file)"),
], ids=["no faster", "faster", "slow", "unknown"])  # fmt: skip
def test_auto_takes_the_fewest_workers_of_the_fastest(samples, epochs, workers, reason, measured, monkeypatch, messages):
    monkeypatch.setattr("stocache.system.platform.here.usable_cpus", lambda: 99)
    plan = measured(samples, *epochs)
    options = {"persistent_workers": True, "prefetch_factor": 3, "multiprocessing_context": "fork", "drop_last": True}
    loader = DataLoader(range(64), 8, False, None, None, "auto", **options)
    assert (loader.num_workers, loader.batch_size, loader.drop_last) == (workers, 8, True)
    assert (loader.prefetch_factor, loader.persistent_workers) == ((3, True) if workers else (None, False))
    assert (list(plan["batch_sizes"]), plan["workers"][-1], plan["time_limit_s"]) == ([8], 99, 10)
    (message,) = messages()
    assert message.startswith(f"num_workers='auto' chooses {workers}: {reason}")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "50")
    DataLoader(range(64), 8, num_workers="auto", worker_method="thread")
    assert (plan["workers"], list(plan["methods"])) == ([0, 1], ["thread"])  # for each rank


@pytest.mark.linux
def test_auto_measures_what_is_behind_a_cached_dataset(measured):
    with CachedDataset(TensorDataset(torch.rand(64, 3, 16, 16)), 0.1, transform=tuple) as dataset:
        plan = measured(samples_of(), Epoch(Setting(0, 4), 0.1))
        assert DataLoader(dataset, 4, num_workers="auto", collate_fn=len).num_workers == 0
        assert (plan["dataset"], plan["options"]["transform"], plan["collate_fn"]) == (dataset.dataset, tuple, len)
        narrow = Samples(9, 0.1, False, {None: dataset.cache.stats().slot_bytes})
        assert plan["choose_caches"](narrow) == [(narrow.limit_for(None, 64), None)]  # it holds all samples
        large = Samples(9, 0.1, False, {None: 1e6})
        assert plan["choose_caches"](large) == [(dataset.cache.stats().capacity_bytes, None)]
        plan.clear()
        assert DataLoader(Subset(dataset, [1]), num_workers="auto").num_workers == min(8, CORES)
        assert not plan


def test_auto_takes_no_workers_if_there_is_nothing_to_measure(messages):
    for dataset, reason in ((Numbers(), "the dataset is iterable"), (images(0), "has no samples")):
        assert DataLoader(dataset, num_workers="auto").num_workers == 0
        assert reason in messages()[-1]


@pytest.fixture
def short(monkeypatch):
    """Let epochs be short, and not exact."""
    for name in ("_LOADS_S", "_BATCH_S", "_EPOCH_S", "_TIMED_S", "_FILL_S"):
        monkeypatch.setattr(module, name, 0.001)


@pytest.mark.linux
def test_a_real_measurement_leaves_this_process_as_it_was(short, messages):
    state_of = lambda: (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    dataset, before = images(), state_of()
    advice = advise(dataset, batch_size=8, progress=False)
    with CachedDataset(dataset, 0.1) as cached:
        stats = cached.stats()
        assert DataLoader(cached, 8, num_workers="auto").num_workers <= CORES
        assert cached.stats() == stats
    assert "epochs take " in messages()[0]
    assert state_of() == before
    assert vars(dataset) == vars(images())
    assert not multiprocessing.active_children()
    assert {bool(each.setting.limit_bytes) for each in advice.epochs} == {False, True}
    assert advice.samples.draws


@pytest.mark.linux
@pytest.mark.parametrize(("breaks", "error", "message"), [
    (7, ValueError, "sample 7 is broken"), ("dies", WorkerError, "exited with code 3"),
])  # fmt: skip
def test_the_error_of_a_sample_is_raised(breaks, error, message):
    with pytest.raises(error, match=message):
        advise(images(8, breaks), progress=False)
