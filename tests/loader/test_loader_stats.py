"""What a loader tells of its epochs is what happened: batches, hits and waits of each, whoever shares the cache."""

import itertools
import json
import logging
import math
import multiprocessing
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler, Subset, default_collate

import stocache
from stocache import CachedDataset
from stocache.timing.record import COLLATE_NS, MAKE_NS, SAMPLES
from tests.support.images import Images, N, image

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")

WORKERS = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "worker_method": "thread"},
    {"num_workers": 2, "persistent_workers": True},
]
LIMIT = "3KB"  # of some of the samples
IDS = ["alone", "processes", "threads", "persistent"]


class Silent(Sampler):
    """Never asks for the length of the dataset."""

    def __iter__(self):
        return iter(torch.randperm(N).tolist())

    def __len__(self):
        return N


class Same:
    """A transform after the cache."""

    def __call__(self, sample):
        return sample


def counts(epochs):
    return [(epoch.hits, epoch.misses) for epoch in epochs]


@pytest.mark.parametrize("transform", [None, Same()], ids=["gathered", "transformed"])
@pytest.mark.parametrize("options", WORKERS, ids=IDS)
def test_epochs_are_told_apart_whatever_the_sampler_asks(options, transform):
    with CachedDataset(Images(), LIMIT, transform=transform) as dataset:
        loader = stocache.DataLoader(dataset, 7, sampler=Silent(), **options)
        for _ in range(3):
            assert sum(len(labels) for _, labels in loader) == N
        mine, its, filled = loader.stats().epochs, dataset.stats().epochs, dataset.stats().total.filled
        assert 0 < filled < N
        assert [hits + misses for hits, misses in counts(mine)] == [N] * 3
        assert counts(mine) == counts(its)
        assert counts(mine)[1:] == [(filled, N - filled)] * 2
        assert [epoch.hit_rate for epoch in mine[1:]] == [filled / N] * 2
        assert [epoch.number for epoch in mine] == [0, 1, 2]
        assert all(epoch.complete for epoch in mine)
        for epoch in mine:
            assert epoch.batches == epoch.wait.count == epoch.collate.count == math.ceil(N / 7)
            assert epoch.samples == N
            assert epoch.load.count == epoch.misses
            assert 0 < epoch.waited_s <= epoch.seconds
            assert sum(wait.count for wait in epoch.wait_by_worker) == (epoch.batches if options else 0)
        loader.end_workers()


def test_a_loop_that_is_left_early_is_an_epoch_of_its_own():
    with CachedDataset(Images(), 1) as dataset:
        loader = stocache.DataLoader(dataset, 5)
        for _ in itertools.islice(loader, 4):
            pass
        assert not loader.stats().epochs[0].complete
        list(loader)
        first, second = loader.stats().epochs
        assert (first.batches, second.batches) == (4, 10)
        assert first.complete
        assert first.hits + first.misses == 20
        assert [epoch.hits + epoch.misses for epoch in dataset.stats().epochs] == [20, N]


def test_loaders_of_parts_of_a_dataset_make_up_its_epochs_together():
    with CachedDataset(Images(), 1, probe=0) as dataset:
        train, val = Subset(dataset, range(40)), Subset(dataset, range(40, N))
        loader = stocache.DataLoader(train, 8, shuffle=True)
        for _ in range(3):
            list(loader)
            list(stocache.DataLoader(val, 8))
        assert [epoch.hits + epoch.misses for epoch in dataset.stats().epochs] == [N] * 3
        assert counts(loader.stats().epochs) == [(0, 40), (40, 0), (40, 0)]


@pytest.mark.parametrize("make", [stocache.DataLoader, torch.utils.data.DataLoader], ids=["ours", "torch's"])
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "drop_last": True}], ids=str)
def test_a_new_loader_for_each_epoch_begins_an_epoch(make, options):
    with CachedDataset(Images(), 1, probe=0) as dataset:
        for _ in range(3):
            for _ in make(dataset, 12, sampler=Silent(), **options):
                pass
        each = N if "drop_last" not in options else N // 12 * 12
        assert [epoch.hits + epoch.misses for epoch in dataset.stats().epochs] == [each] * 3


def rank(number, world, out):
    with CachedDataset(Images(), 1, name="stats-ranks", fingerprint="v1", probe=0) as dataset:
        sampler = DistributedSampler(dataset, world, number, seed=3)
        loader = stocache.DataLoader(dataset, 5, sampler=sampler, num_workers=1)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            list(loader)
        out.put((number, counts(loader.stats().epochs), loader.stats().hit_rate))


@pytest.mark.leaves_descriptors
def test_shares_of_ranks_add_up():
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(number, 2, out)) for number in range(2)]
    for process in ranks:
        process.start()
    found = [out.get() for _ in ranks]
    for process in ranks:
        process.join()
        assert process.exitcode == 0
        process.close()
    out.close()
    for epoch in range(3):
        shares = [own[epoch] for _, own, _ in found]
        assert [hits + misses for hits, misses in shares] == [N // 2] * 2
    assert sum(misses for _, own, _ in found for _, misses in own) >= N  # each sample was loaded, by one rank or the other
    for _, own, hit_rate in found:
        assert hit_rate == pytest.approx(sum(hits for hits, _ in own) / (3 * N // 2))


def test_a_private_cache_of_one_rank_has_epochs_of_its_share():
    with CachedDataset(Images(), 1, probe=0) as dataset:
        loader = stocache.DataLoader(dataset, 5, sampler=DistributedSampler(dataset, 2, 0, shuffle=False))
        for _ in range(3):
            list(loader)
        assert [(epoch.hits, epoch.misses) for epoch in dataset.stats().epochs] == [(0, 25), (25, 0), (25, 0)]


class Slow(Dataset):
    def __init__(self, costs_s):
        self.costs_s = costs_s

    def __len__(self):
        return len(self.costs_s)

    def __getitem__(self, idx):
        time.sleep(self.costs_s[idx])
        return image(idx), idx


@pytest.mark.parametrize("options", WORKERS[:3], ids=IDS[:3])
def test_percentiles_are_those_of_the_times_that_the_loop_sees(options):
    costs_s = np.random.default_rng(0).permutation([0.002] * 45 + [0.03] * 5)
    with CachedDataset(Slow(costs_s), 1, probe=0) as dataset:
        loader, waits_s = stocache.DataLoader(dataset, 5, **options), []
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            if next(batches, None) is None:
                break
            waits_s.append(time.perf_counter() - began)
        (epoch,) = loader.stats().epochs
    for share, found_s in ((50, epoch.wait.p50_s), (95, epoch.wait.p95_s), (100, epoch.wait.max_s)):
        exact_s = np.percentile(waits_s, share, method="inverted_cdf")
        assert found_s == pytest.approx(exact_s, rel=0.03, abs=3e-4)  # 2 %, and what the loop itself takes
    assert epoch.load.p50_s >= 0.00196
    assert epoch.load.p95_s >= 0.0294
    assert epoch.load.p50_s < 0.03  # not blurred by the slow ones


@pytest.mark.parametrize("options", WORKERS, ids=IDS)
def test_a_flat_dict_has_numbers_only(options):
    with CachedDataset(Images(), LIMIT) as dataset:
        loader = stocache.DataLoader(dataset, 5, **options)
        before = loader.stats().flat()
        list(loader)
        for numbers, prefix in (
            (loader.stats().flat(), "loader"),
            (dataset.stats().flat("train"), "train"),
            (before, "loader"),
        ):
            assert json.loads(json.dumps(numbers)) == numbers
            assert all(type(value) in (int, float) and name.startswith(f"{prefix}/") for name, value in numbers.items())
        flat = loader.stats().flat()
        assert flat["loader/epoch_wait_count"] == flat["loader/batches"] == 10
        assert flat["loader/epoch_hits"] + flat["loader/epoch_misses"] == N
        assert dataset.stats().flat("train")["train/epoch_hits"] == flat["loader/epoch_hits"]
        assert ("loader/epoch_worker_1_wait_p95_s" in flat) == bool(options)
        assert ("loader/epoch_ring_occupancy" in flat) == (bool(options) and "worker_method" not in options)
        loader.end_workers()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


@pytest.mark.parametrize("dataset", [Stream(), Images()], ids=["iterable", "uncached"])
@pytest.mark.parametrize("options", WORKERS, ids=IDS)
def test_loaders_without_a_cache_tell_waits_too(dataset, options):
    loader = stocache.DataLoader(dataset, 5, **options)
    for _ in range(2):
        batches = len(list(loader))
    stats = loader.stats()
    assert [epoch.wait.count for epoch in stats.epochs] == [batches] * 2
    assert stats.wait.count == 2 * batches
    assert stats.hit_rate is None
    assert {epoch.hits for epoch in stats.epochs} == {epoch.hit_rate for epoch in stats.epochs} == {None}
    assert stats.epochs[1].samples == (50 if isinstance(dataset, Images) else stats.epochs[1].samples)
    loader.end_workers()


class Sleeping(Images):
    """Takes 4 ms for each sample."""

    def __getitem__(self, idx):
        time.sleep(0.004)
        return super().__getitem__(idx)


class SleepingBatches(Sleeping):
    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


def sleeping_collate(samples):
    time.sleep(0.02)
    return default_collate(samples)


@pytest.mark.parametrize("dataset", [Sleeping(), SleepingBatches()], ids=["samples", "batches"])
@pytest.mark.parametrize("options", WORKERS, ids=IDS)
def test_making_and_collating_are_told_apart_whoever_does_them(dataset, options):
    loader = stocache.DataLoader(dataset, 10, collate_fn=sleeping_collate, **options)
    list(loader)
    counted = loader._record.read()
    assert counted.sum(SAMPLES) == N
    assert counted.batches == N // 10
    assert counted.sum(MAKE_NS) >= 4e6 * N
    assert counted.sum(COLLATE_NS) >= 20e6 * N / 10
    assert counted.distribution(COLLATE_NS).p50_s >= 0.019
    loader.end_workers()


def test_the_verdict_is_logged_when_an_epoch_ends(caplog):
    with CachedDataset(Slow([0.005] * 40), 1, probe=0) as dataset, caplog.at_level(logging.INFO, "stocache"):
        loader = stocache.DataLoader(dataset, 5)
        assert loader.stats().verdict is None
        list(loader)
        verdict = loader.stats().verdict
        assert verdict.limit == "cold cache"
        assert verdict is loader.stats().epochs[0].verdict
        assert f"epoch 1: {verdict}" in caplog.messages


class TestTraces:
    def names(self, loop):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loop()
        found = [event.name for event in profile.events() if event.name.startswith("stocache: ")]
        return {name: found.count(name) for name in found}

    def test_a_trace_names_what_the_main_process_does(self):
        with CachedDataset(Images(), LIMIT) as dataset:
            cold = self.names(lambda: list(stocache.DataLoader(dataset, 10)))
            filled = dataset.stats().total.filled
            assert cold["stocache: wait for a batch"] == 6  # the last one tells that the epoch is over
            assert cold["stocache: load samples that are not cached"] >= 5  # batches
            warm = self.names(lambda: list(stocache.DataLoader(Subset(dataset, dataset_set(dataset)), filled)))
            assert warm == {"stocache: wait for a batch": 2, "stocache: gather cached samples": 1}

    def test_a_trace_names_what_comes_from_workers(self):
        with CachedDataset(Images(), 1) as dataset:
            names = self.names(lambda: list(stocache.DataLoader(dataset, 10, num_workers=2)))
            assert names == {"stocache: wait for a batch": 6, "stocache: receive a batch from a worker": 5}

    def test_a_trace_names_collating(self):
        names = self.names(lambda: list(stocache.DataLoader(Images(), 10)))
        assert names == {"stocache: wait for a batch": 6, "stocache: collate": 5}

    def test_ranges_exist_only_while_a_profiler_is_on(self, monkeypatch):
        made = []
        monkeypatch.setattr(torch.autograd.profiler, "record_function", made.append)
        with CachedDataset(Images(), 1) as dataset:
            list(stocache.DataLoader(dataset, 10))
        assert made == []

    @pytest.mark.parametrize("profiler", [torch.profiler.profile, torch.autograd.profiler.profile])
    def test_torch_says_that_a_profiler_is_on_as_spans_expect(self, profiler):
        assert torch.autograd.profiler._is_profiler_enabled is False
        with profiler():
            assert torch.autograd.profiler._is_profiler_enabled is True
        assert torch.autograd.profiler._is_profiler_enabled is False


def dataset_set(dataset):
    return torch.nonzero(dataset.cache.aux_array == 1).ravel().tolist()
