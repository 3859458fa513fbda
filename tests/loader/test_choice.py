"""The settings that are tried, and what is chosen by their times: the number of workers, and processes or threads."""

import logging
import random

import pytest
import torch
from torch.utils.data import IterableDataset, Subset

import stocache
from stocache import CachedDataset, DatasetError, SampleSeed
from stocache.loader.choice import choice
from stocache.loader.choice import measure as module
from stocache.loader.choice.choice import choose_method, try_methods, worker_counts
from stocache.loader.choice.measure import Epoch, Samples, Setting, Study, measure
from stocache.system.loading.children import ChildError, SlowError
from tests.support.images import Images, N


@pytest.fixture
def timed(monkeypatch):
    """Measure in this process, with seconds that a function returns for a loader."""

    def use(seconds):
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
    timed(lambda loader: 1 / min(2, max(1, loader.num_workers)))
    progress = []
    study = Study(
        stocache.DataLoader, [0, 1, 2, 4, 8], (4,), BOTH, step_s=step_s, on_progress=lambda seconds, what: progress.append(what)
    )
    samples, epochs = measure(list(range(50)), study)
    assert (samples.timed, samples.draws, tried(epochs)) == (50, False, expected)
    assert progress[:2] == ["0 workers", "1 workers"]


class Drawn(list):
    def __getitem__(self, idx):
        return torch.rand(2)


def test_threads_are_not_tried_where_samples_draw_and_no_more_where_the_time_is_over(timed):
    timed(lambda loader: None if loader.num_workers == 2 else 1.0)
    samples, epochs = measure(Drawn(range(9)), Study(stocache.DataLoader, [0, 1], (4,), BOTH))
    assert (samples.draws, tried(epochs)) == (True, [("m", 0), ("m", 1)])
    assert tried(measure(list(range(9)), Study(stocache.DataLoader, [0, 1, 2], (4,), BOTH))[1]) == [("m", 0), ("m", 1)]


def failing(error, *items):
    def in_children(*_):
        yield from items
        raise error

    return in_children


def test_without_a_child_process_only_settings_without_workers_are_tried(timed, monkeypatch):
    timed(lambda loader: 1.0)
    monkeypatch.setattr(module, "in_children", failing(ChildError("no process can be made")))
    assert tried(measure(list(range(9)), Study(stocache.DataLoader, [0, 1], (4,), BOTH))[1]) == [("m", 0)]


def test_a_child_that_is_slow_ends_the_measurement(monkeypatch):
    samples, epoch = Samples(9, 1.0, False, {}), Epoch(Setting(0, 4), 1.0)
    monkeypatch.setattr(module, "in_children", failing(SlowError("it does not answer"), samples, epoch))
    assert measure([1], Study(stocache.DataLoader, [0, 1], (4,))) == (samples, [epoch])
    monkeypatch.setattr(module, "in_children", failing(SlowError("it does not answer")))
    with pytest.raises(DatasetError, match=r"list: no sample was loaded in 5 s: it does not answer"):
        measure([1], Study(stocache.DataLoader, [0, 1], (4,)))


def test_no_more_workers_than_cpus_are_tried():
    assert worker_counts(6) == [0, 1, 2, 4, 6]
    assert worker_counts(999)[-2:] == [64, 128]


STUDY = Study(stocache.DataLoader, (2,), (8,), BOTH)


@pytest.fixture
def measured(monkeypatch):
    """Have other seconds take the place of the seconds that a child would measure, on a machine of 8 CPUs; none: it fails."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def use(seconds, draws=False):
        def measure(*_):
            assert seconds is not None, "threads were tried"
            epochs = [Epoch(Setting(2, 8, method=name), each_s) for name, each_s in zip(BOTH, seconds, strict=False)]
            return Samples(9, 0.01, draws, {}), epochs

        monkeypatch.setattr(choice, "_measure", measure)

    return use


def chosen(dataset, hooks=False):
    return choose_method(dataset, hooks, STUDY, False)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


def with_(**attributes):
    dataset = Images()
    vars(dataset).update(attributes)
    return dataset


@pytest.mark.parametrize(("dataset", "hooks", "reason"), [
    (Stream(), False, "iterable"), (with_(state_dict=dict, load_state_dict=vars), False, "state"),
    (with_(part=[torch.Generator()]), False, "generator"), (with_(thread_safe=False), False, "thread_safe = False"),
    (Images(), True, "hooks"), (with_(file=open), False, "file"),
], ids=["iterable", "state", "generator", "unsafe", "hooks", "file"])  # fmt: skip
def test_datasets_that_threads_would_share_choose_processes(dataset, hooks, reason, measured, caplog, tmp_path):
    measured(None)
    caplog.set_level(logging.INFO, "stocache")
    with open(tmp_path / "file", "wb") as file:
        if reason == "file":
            dataset.file = file
        assert chosen(dataset, hooks) == "multiprocessing"
    assert reason in caplog.text


@pytest.mark.linux
@pytest.mark.parametrize(("seconds", "draws", "method"), [
    ((0.01, 0.02), False, "multiprocessing"), ((0.01, 0.01), False, "thread"),
    ((0.01, 0.0104), False, "thread"),  # as fast
    ((0.01, 0.005), True, "multiprocessing"),  # threads would share the generators
    ((0.01,), False, "multiprocessing"), ((), False, "multiprocessing"),  # not tried in time
])  # fmt: skip
def test_what_was_measured_decides(seconds, draws, method, measured, monkeypatch):
    measured(seconds, draws)
    assert chosen(Images()) == method
    with CachedDataset(Images(), 0.1) as dataset:
        assert chosen(dataset) == method
        measured(None)
        assert chosen(Subset(dataset, [0])) == "multiprocessing"  # it wraps the cache
        dataset.warm(progress=False)
        assert chosen(dataset) == "thread"  # of a full cache
        dataset.after_cache = tuple
        measured(seconds, draws)
        assert chosen(dataset) == method
    measured(None)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert chosen(Images()) == "thread"


@pytest.mark.linux
@pytest.mark.parametrize(("seconds", "uses_threads"), [((0.01, 0.02), False), ((0.01, 0.01), True)])
def test_a_loader_uses_what_was_chosen(seconds, uses_threads, measured):
    measured(seconds)
    loader = stocache.DataLoader(Images(), batch_size=8, num_workers=2, worker_method="auto")
    assert (type(iter(loader)._batches).__name__ == "ThreadIterator") == uses_threads
    measured(())
    assert (type(iter(loader)._batches).__name__ == "ThreadIterator") == uses_threads  # it was measured once
    assert torch.cat([batch[1] for batch in loader]).tolist() == list(range(N))
    alone = stocache.DataLoader(Images(), batch_size=8, worker_method="auto", sample_seed=SampleSeed(3, hooks=(random.seed,)))
    assert torch.cat([batch[1] for batch in alone]).tolist() == list(range(N))


def test_what_cannot_be_tried_is_not_an_error():
    assert try_methods([], STUDY) == ("multiprocessing", "threads could not be tried")
