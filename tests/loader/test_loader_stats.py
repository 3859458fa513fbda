"""What a loader reports of its epochs is what happened: batches, hits and waits of each, whoever shares the cache."""

import itertools
import json
import logging
import math
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, SubsetRandomSampler

import stocache
from stocache import CachedDataset
from stocache.loader import epochs, iteration
from stocache.observe.verdict import Verdict
from tests.support.images import Images, N
from tests.support.ways import WAYS

WORKERS = WAYS | {"persistent": {"num_workers": 2, "persistent_workers": True}}


silent = SubsetRandomSampler(range(N))  # never asks for the length of the dataset
counts = lambda found: [(epoch.hits, epoch.misses) for epoch in found]


def check_flat(numbers, prefix):
    assert json.loads(json.dumps(numbers)) == numbers
    assert all(type(value) in (int, float) and name.startswith(f"{prefix}/") for name, value in numbers.items())
    return numbers


@pytest.mark.parametrize(
    ("workers", "transform"),
    [("alone", None), ("alone", tuple), ("processes", tuple), ("threads", None), ("threads", tuple), ("persistent", None)],
)
def test_epochs_have_their_figures_whatever_the_sampler_asks(workers, transform):
    options = WORKERS[workers]
    with CachedDataset(Images(), "3KB", transform=transform) as dataset:  # room for some of the samples
        loader = stocache.DataLoader(dataset, 7, sampler=silent, **options)
        check_flat(loader.stats().flat(), "loader")
        for _ in range(3):
            assert sum(len(labels) for _, labels in loader) == N
        mine, its, filled = loader.stats().epochs, dataset.stats().epochs, dataset.stats().total.filled
        assert 0 < filled < N
        assert sum(counts(mine)[0]) == N
        assert counts(mine)[1:] == [(filled, N - filled)] * 2
        assert counts(mine) == counts(its)
        assert [epoch.hit_rate for epoch in mine[1:]] == [filled / N] * 2
        for number, epoch in enumerate(mine):
            assert (epoch.number, epoch.complete, epoch.samples) == (number, True, N)
            assert epoch.batches == epoch.wait.count == epoch.collate.count == math.ceil(N / 7)
            assert epoch.load.count == epoch.misses
            assert 0 < epoch.waited_s <= epoch.seconds
            by_workers = sum(wait.count for wait in epoch.wait_by_worker)
            assert by_workers == (epoch.batches if options else 0) or (workers == "threads" and by_workers < epoch.batches)
        flat, its_flat = check_flat(loader.stats().flat(), "loader"), check_flat(dataset.stats().flat("train"), "train")
        assert flat["loader/epoch_wait_count"] == 8
        assert flat["loader/epoch_hits"] == its_flat["train/epoch_hits"] == filled
        assert ("loader/epoch_worker_1_wait_p95_s" in flat) == bool(options)
        assert ("loader/epoch_ring_occupancy" in flat) == (workers in ("processes", "persistent"))
        loader.end_workers()


@pytest.mark.parametrize("options", [{}, {**WAYS["threads"], "persistent_workers": True}], ids=["alone", "threads"])
def test_a_loop_that_is_left_early_is_an_epoch_of_its_own(options):
    with CachedDataset(Images(), 0.1) as dataset:
        loader = stocache.DataLoader(dataset, 5, **options)
        list(itertools.islice(loader, 4))
        assert not loader.stats().epochs[0].complete
        iter(loader)  # no batch is asked for
        list(loader)
        first, second = loader.stats().epochs
        assert (first.batches, second.batches, first.complete, second.samples) == (4, 10, True, N)
        if not options:  # else it made batches ahead
            assert [sum(each) for each in counts(dataset.stats().epochs)] == [20, N] == [*map(sum, counts([first, second]))]


def test_epochs_of_a_dataset_are_those_of_all_its_loaders_together_and_only_of_ours(caplog):
    caplog.set_level(logging.INFO, "stocache")
    with CachedDataset(Images(), 0.1, probe=0) as dataset:
        for _ in range(3):
            assert sum(len(labels) for _, labels in torch.utils.data.DataLoader(dataset, 12, num_workers=1)) == N
        assert counts(dataset.stats().epochs) == [(2 * N, N)]
        assert not any(message.startswith("epoch") for message in caplog.messages)
    with CachedDataset(Images(), 0.1, probe=0) as dataset:
        train = stocache.DataLoader(Subset(dataset, range(40)), 8, shuffle=True)
        for _ in range(3):
            list(train)
            list(stocache.DataLoader(Subset(dataset, range(40, N)), 8))
        assert counts(train.stats().epochs) == [(0, 40), (40, 0), (40, 0)]
        assert counts(dataset.stats().epochs) == [(0, N), (N, 0), (N, 0)]
    assert any(message.startswith("epoch") for message in caplog.messages)


def test_waits_are_the_times_that_the_loop_sees(monkeypatch):
    clock = SimpleNamespace(now=1)
    clock.perf_counter_ns, clock.process_time = lambda: clock.now, time.process_time
    for module in (iteration, epochs):
        monkeypatch.setattr(module, "time", clock)

    class Slow(Images):
        def __getitem__(self, idx):
            clock.now += (30 if idx % 10 == 3 else 2) * 10**6
            return super().__getitem__(idx)

    loader = stocache.DataLoader(Slow(), 1)
    batches = iter(loader)
    clock.now += 10**8  # the program does something else before it asks
    for _ in batches:
        clock.now += 10**6  # the training step
    (epoch,) = loader.stats().epochs
    waits_s = np.array([0.002] * 45 + [0.03] * 5)
    assert (epoch.waited_s, epoch.steps_s, epoch.overhead_s) == pytest.approx((waits_s.sum(), 0.05, 0.0))
    assert epoch.seconds == pytest.approx(waits_s.sum() + 0.05)
    assert epoch.wait.mean_s == pytest.approx(waits_s.mean())
    assert (epoch.wait.p50_s, epoch.wait.p95_s, epoch.wait.max_s) == pytest.approx((0.002, 0.03, 0.03), rel=0.016)


def test_the_verdict_is_logged_when_an_epoch_ends(caplog, monkeypatch):
    judged = []
    monkeypatch.setattr(epochs, "judge", lambda *both: judged.append(both) or Verdict("source", 0.5, "loading is slow"))
    with CachedDataset(Images(), 0.1, probe=0) as dataset, caplog.at_level(logging.INFO, "stocache"):
        loader = stocache.DataLoader(dataset, 5)
        assert loader.stats().verdict is None
        list(loader)
        assert str(loader.stats().verdict) == "loading is slow"
        requests = f"{N} samples requested, 0.0 % from the cache, {N} read from the dataset, {N} newly cached"
        assert re.search(rf"epoch 1: {requests}, \d+\.\d s; loading is slow", caplog.text)
        stats, facts = judged[0]
        assert (stats.batches, stats.samples, stats.misses, facts.workers, facts.starts_workers) == (10, N, N, 0, False)
        cache = facts.cache()
        assert (cache.fills, cache.filled, cache.dataset_len, cache.sample_bytes) == (N, N, N, dataset.stats().total.slot_bytes)
        assert cache.room_bytes > N * cache.sample_bytes
        loader = stocache.DataLoader(dataset, 5, **WORKERS["persistent"])
        assert len(list(loader)) == len(list(loader))
        assert [(facts.starts_workers, facts.persistent) for _, facts in judged[1:]] == [(True, True), (False, True)]


def names(*arguments, **options):
    """Return how often each step occurs in the trace of an epoch."""
    with torch.profiler.profile() as profile:
        assert torch.autograd.profiler._is_profiler_enabled is True  # as spans expect
        list(stocache.DataLoader(*arguments, **options))
    found = [event.name for event in profile.events() if event.name.startswith("stocache: ")]
    return {name.removeprefix("stocache: "): found.count(name) for name in found}


def test_a_trace_names_what_the_main_process_does_and_what_comes_from_workers():
    assert names(Images(), 10) == {"wait for a batch": 6, "collate": 5}  # the last one: the epoch is over
    with CachedDataset(Images(), "3KB") as dataset:
        assert names(dataset, 10)["load samples that are not cached"] >= 5  # batches
        cached = torch.nonzero(dataset.cache.aux_array == 1).ravel().tolist()
        assert names(Subset(dataset, cached), len(cached)) == {"wait for a batch": 2, "gather cached samples": 1}
        assert names(dataset, 10, num_workers=1) == {"wait for a batch": 6, "receive a batch from a worker": 5}
