"""Each recommendation of SYMPTOMS.md and of the verdict: a small program has the problem, follows the advice, and is rid of it.

A case is called twice: without the advice and with it. It counts what the symptom is about: loads from the dataset, warnings,
errors, started workers, batches beside the ring. The first count must not be 0, the second must.
"""

import collections
import io
import logging
import random
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.utils.data as data
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import stocache
from stocache import CachedDataset, DataLoader
from stocache.tools.run import caching

Image = pytest.importorskip("PIL.Image", reason="comes with the extra bench")
ImageFile = pytest.importorskip("PIL.ImageFile")

CASES = {}
LOADED = []  # the indices of samples that this process has loaded
SMALL = {"size_limit_gib": "1MB", "audit": 0}
AUDITED = 3  # samples of an epoch, or pictures, that are loaded again at most, to compare them


def case(*codes):
    """Take a function as the case of some codes. It takes whether to follow the advice, and the test."""

    def take(function):
        CASES[f"{', '.join(codes)}: {function.__name__}"] = function
        return function

    return take


class Numbers(Dataset):
    """Samples that take their time, and depend on their index."""

    def __len__(self):
        return 12

    def __getitem__(self, idx):
        return self.load(idx)

    def load(self, idx):
        LOADED.append(idx)
        time.sleep(0.002)
        return torch.full((4,), float(idx))


class DrawsFirst(Numbers):
    def __getitem__(self, idx):
        other = random.randrange(12)
        return self.load(other)


class DrawsLater(Numbers):
    def __getitem__(self, idx):
        sample = self.load(idx)
        return sample + random.random()


def loads_of(loader, epoch=2):
    """The samples that are loaded from the dataset in an epoch."""
    for _ in range(epoch):
        LOADED.clear()
        list(loader)
    return len(LOADED)


@case("S01, run")
def make_the_dataset_once(follow, test):
    def loop(cache):
        dataset = Numbers()
        with stocache.use_everywhere(cache) as everywhere:
            everywhere.on_epoch = print  # as `stocache run`, which asks at the end of each epoch
            for _ in range(3):
                LOADED.clear()
                list(data.DataLoader(dataset if follow else Numbers(), batch_size=4, shuffle=True))
            return max(0, len(LOADED) - AUDITED), everywhere.report()

    assert ("Make the dataset once" in loop(None)[1]) is not follow
    return loop("64MB")[0]


@case("W05", "source")
def put_random_steps_into_the_transform(follow, test):
    dataset, transform = (Numbers(), lambda sample: sample + random.random()) if follow else (DrawsFirst(), None)
    with CachedDataset(dataset, **SMALL, transform=transform) as cached:
        return loads_of(DataLoader(cached, batch_size=4))


@case("W06")
def change_a_copy_of_the_row(follow, test):
    class InPlace(Numbers):
        rows = np.zeros((12, 1 << 20), np.float32)

        def __getitem__(self, idx):
            row = self.rows[idx].copy() if follow else self.rows[idx]
            row += 1
            return torch.from_numpy(row[:4])

    dataset = InPlace()
    dataset.rows = dataset.rows.copy()
    list(DataLoader(dataset, num_workers=1, worker_method="thread"))
    return test.warnings("was changed while they made samples")


@case("W20")
def give_the_iterable_a_state(follow, test):
    class Source(IterableDataset):
        at = 0

        def __iter__(self):
            while self.at < 12:
                self.at += 1
                yield self.at

    if follow:
        Source.state_dict, Source.load_state_dict = (lambda self: {"at": self.at}), lambda self, state: vars(self).update(state)
    loader, again = DataLoader(Source(), batch_size=2), DataLoader(Source(), batch_size=2)
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    next(iter(again))
    return test.warnings("samples are loaded and skipped")


@case("source")
def take_the_limit_that_the_verdict_names(follow, test):
    if not follow:
        test.limit = "100B"
    with CachedDataset(Numbers(), size_limit_gib=test.limit, audit=0) as cached:
        loader = DataLoader(cached, batch_size=4)
        loads = loads_of(loader, 3)
        if not follow:
            test.limit = float(re.search(r"size_limit_gib=([\d.e-]+)", str(loader.stats().verdict))[1])
        return loads


def batches_beside_the_ring(held, prefetch_factor):
    loader = DataLoader(TensorDataset(torch.zeros(400, 64)), batch_size=4, num_workers=1, prefetch_factor=prefetch_factor)
    collections.deque(loader, maxlen=held)
    return sum(loader.stats().fallbacks.values())


@case("ring")
def hold_fewer_batches(follow, test):
    return batches_beside_the_ring(1 if follow else 100, 1)


@case("ring")
def raise_the_prefetch_factor(follow, test):
    return batches_beside_the_ring(10, 32 if follow else 1)


@case("collate, workers")
def take_the_number_of_workers_that_the_verdict_names(follow, test):
    loader = DataLoader(range(60), num_workers=test.workers if follow else 0, collate_fn=lambda batch: time.sleep(0.02))
    for _ in loader:
        time.sleep(0.015)
    verdict = loader.stats().verdict
    if not follow:
        test.workers = int(re.search(r"num_workers=(\d+) would remove it", str(verdict))[1])
    return verdict is not None and verdict.limit == "collate"


def limit_of(loader):
    """What the trainer waits for in an epoch."""
    collections.deque(loader, maxlen=0)
    print(loader.stats().verdict)  # noqa: T201  # for the report of a failure
    return getattr(loader.stats().verdict, "limit", None)


@case("start")
def take_no_workers(follow, test):
    return limit_of(DataLoader(range(8), batch_size=4, num_workers=0 if follow else 2)) == "start"


@case("GIL")
def take_processes_for_code_that_holds_the_gil(follow, test):
    class Python(Numbers):
        def __len__(self):
            return 200

        def load(self, idx):
            return sum(range(300_000))

    return limit_of(DataLoader(Python(), num_workers=2, worker_method="multiprocessing" if follow else "thread")) == "GIL"


@case("stalls")
def raise_the_prefetch_factor_for_slow_samples(follow, test):
    class Uneven(Numbers):
        def __len__(self):
            return 200_000  # of 800 KB: the memory of no machine holds them

        def load(self, idx):
            time.sleep(0.001 if idx % 7 else 0.1)
            return torch.full((200_000,), float(idx))

    with CachedDataset(Uneven(), 0.016, audit=0) as cached:
        workers = {"num_workers": 2, "prefetch_factor": 16 if follow else 1, "persistent_workers": True}
        loader = DataLoader(cached, sampler=range(72), **workers)
        limit_of(loader)  # starts the workers, which takes a time of its own
        return limit_of(loader) == "stalls"


class Pictures(Numbers):
    """Random pictures, which are decoded: two of them."""

    def __getitem__(self, idx):
        return torch.from_numpy(np.array(Image.open(io.BytesIO(FILES[random.randrange(2)]))))[0, 0]


class Objects(Numbers):
    """Samples of a class that a cache does not know. Its loader makes no tensors of them."""

    def __getitem__(self, idx):
        return SimpleNamespace(sample=self.load(idx))


ADVICE = {  # what `stocache run` says of a program, and the program that follows it
    "--cache auto would make them once": (Numbers, Numbers),
    "--cache auto would make a part of each once: .*run each time: line": (DrawsLater, DrawsLater),
    "; --cache auto would keep what Pillow decodes": (Pictures, Pictures),
    r"in line \d+ of DrawsFirst.__getitem__; nothing .* Load first and draw random numbers later, or": (DrawsFirst, DrawsLater),
    "none of the probed samples can be cached": (Objects, Numbers),
    "it has a state_dict": (type("Stateful", (Numbers,), {"state_dict": lambda self: {}, "load_state_dict": print}), Numbers),
}
FILES = []


def of_run(says):
    """Return the case of a program that `stocache run` runs: how many samples are loaded, or pictures decoded, in an epoch."""

    def follow_run(follow, test):
        with stocache.use_everywhere("64MB" if follow else None) as everywhere:
            loader = data.DataLoader(ADVICE[says][follow](), batch_size=4, shuffle=True, collate_fn=list)
            loads = loads_of(loader, 3)
            assert bool(re.search(says, everywhere.report())) is not follow, everywhere.report()
        return max(0, loads - AUDITED) if follow else loads

    return follow_run


for says in ADVICE:
    CASES[f"S02, source, run: {says[:40]}"] = of_run(says)


@pytest.fixture
def test(caplog, monkeypatch, clean):
    decode = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: LOADED.append("decoded") or decode(image))
    monkeypatch.setattr(caching, "_TRIAL_S", 60.0)  # other programs may keep the machine busy
    caplog.set_level(logging.WARNING, "stocache")
    if not FILES:
        for seed in range(2):
            pixels = np.random.RandomState(seed).randint(0, 255, (900, 900, 3), np.uint8)
            Image.fromarray(pixels).save(file := io.BytesIO(), "png")
            FILES.append(file.getvalue())
    return SimpleNamespace(warnings=lambda text: sum(text in message for message in caplog.messages))


@pytest.mark.linux
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("collate")) for name in CASES])
def test_who_follows_a_recommendation_is_rid_of_the_problem(name, test, caplog):
    assert CASES[name](False, test) > 0, "the program does not have the problem"
    caplog.clear()
    assert CASES[name](True, test) == 0
