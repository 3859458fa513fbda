"""stocache.advise, and num_workers="auto"."""

import logging
import multiprocessing
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

import stocache
from stocache import CachedDataset, DataLoader, DatasetError, LimitError, WorkerError, advise
from stocache.forecast.model import Setting

QUICK = {"time_limit_s": 8.0, "progress": False}


class Images(Dataset):
    """Small images; notes what is done to the object."""

    def __init__(self, length=64, load_s=0.0, breaks=None):
        self.length, self.load_s, self.breaks, self.loaded = length, load_s, breaks, 0

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if idx == self.breaks or self.breaks == "all":
            raise ValueError(f"sample {idx} is broken")
        self.loaded += 1
        time.sleep(self.load_s)
        return torch.full((3, 16, 16), idx % 256, dtype=torch.uint8), random.random() + np.random.rand() + torch.rand(()).item()


class Varying(Images):
    def __getitem__(self, idx):
        return torch.arange(idx + 1), "x" * idx


class Dying(Images):
    def __getitem__(self, idx):
        import os

        os._exit(3)


def state_of_generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_the_report_has_five_settings_each_with_its_line_of_code():
    dataset, before = Images(), state_of_generators()
    advice = advise(dataset, step_ms=5, batch_size=8, **QUICK)
    assert state_of_generators() == before
    assert vars(dataset) == vars(Images())  # nothing was loaded in this process
    assert not multiprocessing.active_children()
    assert len(advice.settings) == 5
    text = str(advice)
    for each in advice.settings:
        assert each.code in text
        forecast = each.forecast
        assert forecast.epoch_s >= 8 * 0.005
        assert 0 <= forecast.wait_share <= 1
        assert forecast.memory_bytes >= 0
    assert "Images: 64 samples" in text
    assert advice.costs.timed == 64
    assert advice.costs.took_s < 30
    assert advice.best is advice.settings[0]


def test_the_recommended_code_runs():
    dataset = Images()
    advice = advise(dataset, batch_size=8, **QUICK)
    for each in advice.settings:
        loader = eval(each.code, {"CachedDataset": CachedDataset, "DataLoader": DataLoader, "dataset": dataset})
        assert sum(len(images) for images, _ in loader) == 64
        assert loader.num_workers == each.forecast.setting.workers
        if isinstance(loader.dataset, CachedDataset):
            wanted = each.forecast.cached_share
            assert loader.dataset.stats().total.fill_fraction == pytest.approx(wanted, abs=0.1)
            cache = loader.dataset
            del loader
            cache.close()


def test_any_setting_can_be_predicted():
    advice = advise(Images(load_s=0.005), batch_size=(8, 16), step_ms=4, **QUICK)
    slow, fast = (advice.predict(Setting(limit, 1, None, 8)) for limit in (0, 2**30))
    assert slow.epoch_s > 64 * 0.005
    assert fast.epoch_s < slow.epoch_s
    assert advice.predict(Setting(2**30, 1, None, 16)).epoch_s > 4 * 0.008  # the step is in proportion to the batch


def test_a_transform_is_part_of_the_costs_and_of_the_code():
    advice = advise(Images(16), transform=_slowly, batch_size=4, **QUICK)
    assert advice.predict(Setting(2**30, 0, None, 4)).epoch_s > 16 * 0.004
    assert any("transform=transform" in each.code for each in advice.settings if each.size_limit_gib)


def _slowly(sample):
    time_s = time.process_time()
    while time.process_time() < time_s + 0.005:
        pass
    return sample


@pytest.mark.parametrize("collate_fn", [None, len])
def test_samples_that_torch_does_not_stack_are_measured(collate_fn):
    advice = advise(Varying(30), batch_size=4, collate_fn=collate_fn, **QUICK)
    assert not [text for text in advice.costs.missing if "cache" in text]
    assert ("collate_fn=collate_fn" in advice.best.code) == (collate_fn is not None)


def test_a_dataset_of_one_sample_is_measured():
    advice = advise(Images(1), **QUICK)
    assert advice.costs.timed == 1
    assert "rests on 1 sample only" in str(advice)


def test_slow_samples_leave_time_for_few_and_the_report_says_so():
    began = time.monotonic()
    advice = advise(Images(1000, load_s=1.0), time_limit_s=6, progress=False)
    assert time.monotonic() - began < 12  # it is the limit that is tested, with room for a busy machine
    assert advice.costs.timed < 5
    assert f"rests on {advice.costs.timed} sample" in str(advice)
    assert advice.costs.load_s == pytest.approx(1, rel=0.2)


def test_samples_that_never_come_are_an_error_in_time():
    with pytest.raises(DatasetError, match=r"Images: no sample was loaded in 1 s"):
        advise(Images(load_s=1000), time_limit_s=4, progress=False)


def test_the_error_of_a_sample_is_raised():
    with pytest.raises(ValueError, match=r"sample \d+ is broken"):
        advise(Images(breaks="all"), **QUICK)
    with pytest.raises(ValueError, match="sample 7 is broken"):
        advise(Images(breaks=7), **QUICK)
    with pytest.raises(WorkerError, match="exited with code 3"):
        advise(Dying(), **QUICK)


@pytest.mark.parametrize("step_ms", [-1, float("nan"), float("inf"), "40", True, None])
def test_a_step_that_is_not_a_time_is_refused(step_ms):
    with pytest.raises(LimitError, match=r"step_ms=.* must be a finite number of milliseconds, 0 or more"):
        advise(Images(), step_ms=step_ms)


@pytest.mark.parametrize("batch_size", [0, -3, 2.5, "32", [], [32, 0], True, None, 2**40])
def test_a_batch_size_that_is_not_one_is_refused(batch_size):
    with pytest.raises(LimitError, match=r"batch_size=.* must be a number of samples from 1 to"):
        advise(Images(), batch_size=batch_size)


@pytest.mark.parametrize("time_limit_s", [0, -1, float("nan"), float("inf"), "10"])
def test_a_time_limit_that_is_not_one_is_refused(time_limit_s):
    with pytest.raises(LimitError, match=r"time_limit_s=.* must be a positive number of seconds"):
        advise(Images(), time_limit_s=time_limit_s)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_datasets_that_cannot_be_cached_are_refused():
    with pytest.raises(DatasetError, match="Numbers has no samples by number"):
        advise(Numbers())
    with pytest.raises(DatasetError, match=r"Images has length 0\. There is nothing to measure"):
        advise(Images(0))
    with CachedDataset([1, 2], 1) as cached, pytest.raises(DatasetError, match="Give the dataset in it"):
        advise(Subset(cached, [0]))


def test_advise_is_exported():
    assert stocache.advise is advise
    assert stocache.Advice.__name__ == "Advice"


# ---------------------------------------------------------------------------------------------------- num_workers="auto"


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "stocache")
    return lambda: [record.getMessage() for record in caplog.records if "num_workers='auto'" in record.getMessage()]


def test_auto_takes_no_workers_for_samples_that_cost_nothing(messages):
    before = state_of_generators()
    loader = DataLoader(
        torch.zeros(64, 2), 8, num_workers="auto", persistent_workers=True, prefetch_factor=2, multiprocessing_context="fork"
    )
    assert state_of_generators() == before
    assert loader.num_workers == 0
    assert len(list(loader)) == 8
    (message,) = messages()
    assert message.startswith("num_workers='auto' chooses 0: an epoch is predicted to take")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors
def test_auto_takes_workers_for_samples_that_wait(messages):
    dataset = Images(64, load_s=0.02)
    loader = DataLoader(dataset, batch_size=4, num_workers="auto", persistent_workers=True, prefetch_factor=3)
    assert loader.num_workers > 1
    assert loader.prefetch_factor == 3
    assert loader.persistent_workers
    assert dataset.loaded == 0
    assert len(messages()) == 1


def test_auto_leaves_a_cached_dataset_as_it_was():
    with CachedDataset(Images(64), 1) as dataset:
        before = dataset.stats()
        loader = DataLoader(dataset, batch_size=4, num_workers="auto")
        assert dataset.stats() == before
        assert isinstance(loader.num_workers, int)


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Numbers(), "chooses 0: the dataset is iterable"),
        (Images(0), "chooses 0: the dataset has no samples"),
        (Images(breaks="all"), r"samples cannot be measured (ValueError: sample"),
    ],
)
def test_auto_falls_back_where_it_cannot_measure(dataset, reason, messages):
    loader = DataLoader(dataset, num_workers="auto")
    assert isinstance(loader.num_workers, int)
    (message,) = messages()
    assert reason in message


def test_arguments_by_position_are_kept():
    loader = DataLoader(torch.zeros(64, 2), 8, False, None, None, 2, drop_last=True, prefetch_factor=3)
    assert (loader.num_workers, loader.prefetch_factor, loader.drop_last) == (2, 3, True)
    loader = DataLoader(torch.zeros(64, 2), 8, False, None, None, "auto", drop_last=True)
    assert (loader.num_workers, loader.batch_size, loader.drop_last) == (0, 8, True)


def test_other_texts_are_refused_as_by_torch():
    with pytest.raises(TypeError, match="not supported between instances of"):
        DataLoader([1], num_workers="many")
