"""``worker_method="auto"`` chooses threads where making a sample leaves the GIL free."""

import logging
import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import stocache
from stocache import CachedDataset, SampleSeed
from stocache.loader.choice import choice
from stocache.loader.choice.choice import GilTrial, choose_method
from tests.support.images import Images, N


class NeverTried(GilTrial):
    def speed_up(self, dataset):
        raise AssertionError("threads were tried")


@pytest.fixture
def rounds(monkeypatch):
    """Have other rounds take the place of those that children would measure, on a machine of 8 CPUs."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def use(*found):
        monkeypatch.setattr(choice, "in_children", lambda *_: iter(found))
        return GilTrial()

    return use


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
def test_datasets_that_threads_would_share_choose_processes(dataset, hooks, reason, caplog, tmp_path):
    caplog.set_level(logging.INFO, "stocache")
    with open(tmp_path / "file", "wb") as file:
        if reason == "file":
            dataset.file = file
        assert choose_method(dataset, hooks, NeverTried()) == "multiprocessing"
    assert reason in caplog.text


@pytest.mark.linux
@pytest.mark.parametrize(("found", "method"), [
    ([(0.01, 0.02, 0, 9)], "multiprocessing"),  # two threads are not faster than one
    ([(0.01, 0.011, 2, 4), (0.01, 0.011, 2, 4)], "thread"),
    ([(0.01, 0.011, 2, 4), (0.01, 0.011, 4, 4)], "multiprocessing"),  # the GIL is held too often
    ([(0.01, 0.0167, 0, 9)], "multiprocessing"),  # hardly faster
    ([], "multiprocessing"),
])  # fmt: skip
def test_what_was_measured_decides(found, method, rounds, monkeypatch):
    assert choose_method(Images(), False, rounds(*found)) == method
    with CachedDataset(Images(), 1) as dataset:
        assert choose_method(dataset, False, rounds(*found)) == method
        dataset.warm(progress=False)
        assert choose_method(dataset, False, NeverTried()) == "thread"  # of a full cache
        dataset.after_cache = tuple
        assert choose_method(dataset, False, rounds(*found)) == method
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert choose_method(Images(), False, NeverTried()) == "thread"


@pytest.mark.linux
@pytest.mark.parametrize(("together_s", "uses_threads"), [(0.02, False), (0.01, True)])
def test_a_loader_uses_what_was_chosen(together_s, uses_threads, rounds):
    rounds((0.01, together_s, 0, 9))
    loader = stocache.DataLoader(Images(), batch_size=8, num_workers=2, worker_method="auto")
    assert (type(iter(loader)._batches).__name__ == "ThreadIterator") == uses_threads
    rounds()
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


def test_a_real_trial_leaves_the_dataset_and_the_generators_as_they_were():
    dataset, states = Watched(), (random.getstate(), torch.get_rng_state())
    trial = GilTrial()
    assert trial.speed_up(dataset) > 0
    assert 0 <= trial.held <= 1
    assert vars(dataset) == vars(Watched())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("dataset", [Watched(breaks=True), Watched(0), Watched(1), Watched(4), Stream()])
def test_what_cannot_be_tried_is_not_an_error(dataset, capfd):
    assert GilTrial().speed_up(dataset) is None
    assert capfd.readouterr().err == ""
