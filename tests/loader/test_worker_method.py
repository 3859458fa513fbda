"""``worker_method="auto"`` chooses threads where making a sample leaves the GIL free."""

import logging
import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

import stocache
from stocache import CachedDataset, SampleSeed
from stocache.loader.choice import choice
from stocache.loader.choice.choice import choose_method, try_methods
from stocache.loader.choice.measure import Epoch, Samples, Setting, Study
from tests.support.images import Images, N

STUDY = Study(stocache.DataLoader, (2,), (8,), ("multiprocessing", "thread"))


@pytest.fixture
def measured(monkeypatch):
    """Have other seconds take the place of those that a child would measure, on a machine of 8 CPUs; none: it fails."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def use(seconds, draws=False):
        def measure(*_):
            assert seconds is not None, "threads were tried"
            methods = ("multiprocessing", "thread")
            epochs = [Epoch(Setting(2, 8, method=name), each_s) for name, each_s in zip(methods, seconds, strict=False)]
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
    (with_(random=random.Random(3)), False, "generator"), (with_(part=[torch.Generator()]), False, "generator"),
    (with_(thread_safe=False), False, "thread_safe = False"), (Images(), True, "hooks"), (with_(file=open), False, "file"),
], ids=["iterable", "state", "random", "torch", "unsafe", "hooks", "file"])  # fmt: skip
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
    with CachedDataset(Images(), 1) as dataset:
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
@pytest.mark.parametrize(("thread_s", "uses_threads"), [(0.02, False), (0.01, True)])
def test_a_loader_uses_what_was_chosen(thread_s, uses_threads, measured):
    measured((0.01, thread_s))
    loader = stocache.DataLoader(Images(), batch_size=8, num_workers=2, worker_method="auto")
    assert (type(iter(loader)._batches).__name__ == "ThreadIterator") == uses_threads
    measured(())
    assert (type(iter(loader)._batches).__name__ == "ThreadIterator") == uses_threads  # it was measured once
    assert torch.cat([batch[1] for batch in loader]).tolist() == list(range(N))
    alone = stocache.DataLoader(Images(), batch_size=8, worker_method="auto", sample_seed=SampleSeed(3, hooks=(random.seed,)))
    assert torch.cat([batch[1] for batch in alone]).tolist() == list(range(N))


class Watched(Dataset):
    def __init__(self, n=400, breaks=False):
        self.n, self.reads, self.breaks = n, 0, breaks

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        self.reads += 1
        if self.breaks:
            raise ValueError("not this one")
        return torch.rand(3) + random.random()


@pytest.mark.linux
def test_a_real_trial_leaves_the_dataset_and_the_generators_as_they_were():
    dataset, states = Watched(), (random.getstate(), torch.get_rng_state())
    method, reason = try_methods(dataset, STUDY)
    assert (method, "draw from the global random number generators" in reason) == ("multiprocessing", True)
    assert vars(dataset) == vars(Watched())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("dataset", [Watched(breaks=True), Watched(0), Stream()])
def test_what_cannot_be_tried_is_not_an_error(dataset, capfd):
    assert try_methods(dataset, STUDY) == ("multiprocessing", "threads could not be tried")
    assert capfd.readouterr().err == ""
