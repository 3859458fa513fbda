"""``worker_method="auto"`` chooses threads where making a sample leaves the GIL free."""

import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import stocache
from stocache import CachedDataset, SampleSeed
from stocache.loader.worker_method import Trial, choose_method
from tests.support.images import Images, N

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")


class NeverTried(Trial):
    def speed_up(self, dataset):
        raise AssertionError("threads were tried")


class Measured(Trial):
    def __init__(self, speed_up):
        super().__init__()
        self.found = speed_up

    def speed_up(self, dataset):
        return self.found


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Stateful(Images):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def with_(**attributes):
    dataset = Images()
    vars(dataset).update(attributes)
    return dataset


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Stream(), "iterable"), (Stateful(), "state"), (with_(random=random.Random(3)), "generator"),
        (with_(part=[torch.Generator()]), "generator"), (with_(thread_safe=False), "thread_safe = False"),
    ],
    ids=["iterable", "state", "random", "torch", "unsafe"],
)  # fmt: skip
def test_datasets_that_threads_would_share_choose_processes(dataset, reason, caplog):
    caplog.set_level(logging.INFO, "stocache")
    assert choose_method(dataset, False, NeverTried()) == "multiprocessing"
    assert reason in caplog.text


def test_open_files_and_hooks_choose_processes(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        assert choose_method(with_(file=file), False, NeverTried()) == "multiprocessing"
    assert choose_method(Images(), True, NeverTried()) == "multiprocessing"


def test_a_full_cache_chooses_threads():
    with CachedDataset(Images(), 1) as dataset:
        assert choose_method(dataset, False, Measured(1.0)) == "multiprocessing"
        dataset.warm(progress=False)
        assert choose_method(dataset, False, NeverTried()) == "thread"
        dataset.after_cache = tuple
        assert choose_method(dataset, False, Measured(1.0)) == "multiprocessing"


@pytest.mark.parametrize(("speed_up", "method"), [(1.0, "multiprocessing"), (1.9, "thread"), (None, "multiprocessing")])
def test_the_measured_speed_up_decides(speed_up, method, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert choose_method(Images(), False, Measured(speed_up)) == method
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert choose_method(Images(), False, NeverTried()) == "thread"


@pytest.mark.parametrize(("speed_up", "uses_threads"), [(1.0, False), (1.9, True)])
def test_a_loader_uses_what_was_chosen(speed_up, uses_threads, monkeypatch):
    monkeypatch.setattr(Trial, "speed_up", lambda *_: speed_up)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    loader = stocache.DataLoader(Images(), batch_size=8, num_workers=2, worker_method="auto")
    methods = {type(batches._batches).__name__ == "ThreadIterator" for batches in (iter(loader), iter(loader))}
    assert methods == {uses_threads}
    assert torch.cat([batch[1] for batch in loader]).tolist() == list(range(N))
    alone = stocache.DataLoader(Images(), batch_size=8, worker_method="auto", sample_seed=SampleSeed(3, hooks=(random.seed,)))
    assert torch.cat([batch[1] for batch in alone]).tolist() == list(range(N))


class Watched(Dataset):
    def __init__(self, n=400):
        self.n, self.reads, self.opened = n, 0, None

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        self.reads += 1
        self.opened = idx
        return torch.rand(3) + random.random()


def test_a_trial_leaves_the_dataset_and_the_generators_as_they_were():
    dataset = Watched()
    before, states = dict(vars(dataset)), (random.getstate(), torch.get_rng_state())
    trial = Trial()
    found = trial.speed_up(dataset)
    assert found > 0
    assert trial.speed_up(dataset) == found  # it is measured once
    assert vars(dataset) == before
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


class Raises(Watched):
    def __getitem__(self, idx):
        if idx % 5 == 0:
            raise ValueError("not this one")
        return idx


@pytest.mark.parametrize("dataset", [Raises(), Watched(0), Watched(1), Watched(4), Stream()])
def test_what_cannot_be_tried_is_not_an_error(dataset, capfd):
    assert Trial().speed_up(dataset) is None
    assert capfd.readouterr().err == ""


class InPython(Watched):
    def __getitem__(self, idx):
        return sum(range(20_000))


class InC(Watched):
    def __getitem__(self, idx):
        array = np.ones((300, 300))
        for _ in range(10):
            array = np.sqrt(array)
        return array


@pytest.mark.slow
def test_a_real_measurement_tells_python_from_c():
    measured = [[Trial().speed_up(kind()) for _ in range(3)] for kind in (InPython, InC)]
    assert max(measured[1]) > min(measured[0])
