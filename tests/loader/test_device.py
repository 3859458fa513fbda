"""Batches on a device: a device that is played by the memory of the host. What needs a GPU is in test_gpu.py."""

import gc
import itertools
import logging
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, DistributedSampler, Subset, TensorDataset

from stocache import BlockSampler, CachedDataset, DataLoader, LocalityDistributedSampler, Placement
from stocache.datasets.lazy import with_lazy_batches
from stocache.errors import ClosedError, DatasetError, SampleIndexError
from stocache.loader import order
from stocache.loader.collate import as_is
from stocache.loader.device import gathering, kernels
from stocache.loader.device.gathering import DeviceStats
from stocache.loader.device.tier import _on_out_of_memory
from stocache.system.limits import MIB
from tests.support.devices import play_device
from tests.support.equality import identical, same
from tests.support.processes import wait_until

LENGTH, BATCH = 96, 8


class Images(torch.utils.data.Dataset):
    """Samples with a large and a small column, and one that no word of 8 bytes divides."""

    def __init__(self, length=LENGTH):
        self.length, self.loads = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        self.loads += 1
        rng = np.random.default_rng(idx)
        image = torch.from_numpy(rng.integers(0, 255, (3, 30, 30), np.uint8))
        return {"image": image, "label": idx, "mask": torch.from_numpy(rng.integers(0, 255, 1501, np.uint8))}


@pytest.fixture(autouse=True)
def play(monkeypatch):
    """A device is played; a test may ask for another one, or for its parts."""
    play_device(monkeypatch)
    yield lambda **attributes: play_device(monkeypatch, **attributes)
    gc.collect()


def slots_of(share, source):
    """The limit of a cache for a share of the samples."""
    return f"{int(share * len(source) * (2700 + 8 + 1501 + 64))}B"


def cached(share, source=None, warm=False):
    source = Images() if source is None else source
    dataset = CachedDataset(source, slots_of(share, source), share_ranks=False)
    if warm:
        dataset.warm(progress=False)
    return dataset


def batches_of(loader, epochs=2):
    """The batches of some epochs, after the memory that is reserved by then has been registered."""
    epochs_of = []
    for _ in range(epochs):
        torch.manual_seed(len(epochs_of))
        epochs_of.append(list(loader))
        if loader._stocache._stage is not None and loader._stocache._stage.gatherer is not None:
            loader._stocache._stage.gatherer.wait()
    return epochs_of


WORKERS = {"alone": {}, "processes": {"num_workers": 2}, "threads": {"num_workers": 2, "worker_method": "thread"}}


@pytest.mark.parametrize("together", [1, 70_000])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("share", "limit"), [(0.1, "100KB"), (0.5, 0), (1, "100KB")])
def test_batches_are_those_of_the_cpu(workers, share, limit, together, monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", together)  # bytes: a batch, or two
    options = {"batch_size": BATCH, "shuffle": True} | WORKERS[workers]
    with cached(share) as dataset:
        expected = batches_of(DataLoader(dataset, **options), 3)
    with cached(share) as dataset:
        loader = DataLoader(dataset, device="cuda", device_limit_gib=limit, **options)
        assert identical(batches_of(loader, 3), expected)
        stats = loader.stats().device
        if "num_workers" not in options or share == 1:  # else the batches that are held leave no buffer of the ring free
            assert stats.from_tier + stats.from_cache + stats.from_host == 3 * LENGTH
        assert stats.from_cache
        assert stats.registered_bytes
        assert bool(stats.from_tier) == bool(limit)
        gc.collect()


def test_the_first_epoch_loads_and_the_next_are_read_by_the_device():
    with cached(1) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda")
        batches_of(loader, 1)
        probed = 8
        assert loader.stats().device.from_host >= LENGTH - probed
        before = loader.stats().device.from_cache
        batches_of(loader, 2)
        assert loader.stats().device.from_cache - before == 2 * LENGTH
        counts = dataset.stats().total.hits, dataset.stats().total.misses
    with cached(1) as dataset:
        batches_of(DataLoader(dataset, BATCH), 3)
        assert counts == (dataset.stats().total.hits, dataset.stats().total.misses)


def test_what_is_not_registered_yet_is_gathered_by_the_cpu():
    with cached(1, warm=True) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda")
        first = next(iter(loader))
        assert same(first["image"], torch.stack([Images()[idx]["image"] for idx in range(BATCH)]))
        assert loader.stats().device.from_host >= BATCH
        loader._stocache._stage.gatherer.wait()
        assert loader.stats().device.registered_bytes
        before = loader.stats().device.from_host
        list(loader)
        assert loader.stats().device.from_host == before


@pytest.mark.parametrize("most", [0, 1])
def test_memory_that_cannot_be_registered_is_gathered_by_the_cpu_with_one_warning(play, most, caplog, monkeypatch):
    _, runtime = play()
    runtime.most = most
    monkeypatch.setattr("stocache.loader.device.mapping._AT_ONCE", 2 * MIB)
    source = TensorDataset(torch.arange(6 << 17).view(-1, 512))  # 6 MiB of rows of 4 KiB
    with CachedDataset(source, 1, share_ranks=False) as dataset, caplog.at_level(logging.WARNING, "stocache"):
        dataset.warm(progress=False)
        loader = DataLoader(dataset, BATCH, device="cuda")
        assert identical(batches_of(loader, 2), 2 * [list(torch.utils.data.DataLoader(source, BATCH))])
        stats = loader.stats().device
        assert stats.from_host >= LENGTH
        assert stats.registered_bytes == most * 2 * MIB
        warnings = [record.message for record in caplog.records if "registers no more" in record.message]
        assert len(warnings) == 1
        assert "ulimit -l" in warnings[0]


def test_a_device_that_cannot_read_host_memory_gets_copies(play):
    _, runtime = play(reads_host_memory=False)
    with cached(1) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda")
        assert identical(batches_of(loader, 2), 2 * [list(torch.utils.data.DataLoader(Images(), BATCH))])
        assert loader.stats().device == DeviceStats(from_host=2 * LENGTH)
        assert "register" not in runtime.calls


def test_what_was_registered_is_released_with_the_cache_and_not_with_the_loader(play):
    _, runtime = play()
    with cached(1, warm=True) as dataset:
        for _ in range(2):
            loader = DataLoader(dataset, BATCH, device="cuda")
            batches_of(loader)
            del loader
            gc.collect()
            assert runtime.calls == ["register"]
    gc.collect()
    assert wait_until(lambda: not runtime.registered)


def test_a_cache_that_is_closed_under_way_is_an_error(monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", 1)
    dataset = cached(1)
    loader = DataLoader(dataset, BATCH, device="cuda")
    batches_of(loader)
    iterator = iter(loader)
    next(iterator)
    dataset.close()
    with pytest.raises(ClosedError, match="closed"):
        list(iterator)
    assert loader.stats().device.registered_bytes == 0


# ---------------------------------------------------------------------------------------------------- the tier


def test_the_tier_keeps_the_first_samples_that_come_and_no_others():
    with cached(1, warm=True) as dataset:
        loader = DataLoader(dataset, BATCH, shuffle=True, device="cuda", device_limit_gib="100KB")
        loader.generator = torch.Generator().manual_seed(3)
        loader.sampler.generator = loader.generator
        room = 100_000 // (2700 + 1501)
        next(iter(loader))
        loader._stocache._stage.gatherer.wait()
        before = loader.stats().device.from_tier
        list(loader)
        kept = loader._stocache._stage.gatherer._tier._numbers.copy()
        assert (kept >= 0).sum() == room == len(set(kept[kept >= 0]))
        first = loader.stats().device.from_tier - before
        for epoch in range(2, 5):
            list(loader)
            assert (loader._stocache._stage.gatherer._tier._numbers == kept).all()
            assert loader.stats().device.from_tier - before - first == (epoch - 1) * room
        assert 0 < loader.stats().device.tier_bytes <= 100_000


def test_samples_that_are_overwritten_are_not_those_of_the_tier():
    source = TensorDataset(torch.arange(40 * 2000).view(40, 2000))
    with CachedDataset(source, 1, share_ranks=False, audit=0) as dataset:
        loader = DataLoader(dataset, 8, device="cuda", device_limit_gib=1)
        batches_of(loader, 3)
        assert loader.stats().device.from_tier
        dataset.cache.set_slots(range(40), (-source.tensors[0],), allow_overwrite=True)
        assert torch.equal(torch.cat([batch[0] for batch in loader]), -source.tensors[0])
        dataset.cache.clear()
        assert torch.equal(torch.cat([batch[0] for batch in loader]), source.tensors[0])


def test_an_interrupt_leaves_no_sample_in_the_tier_that_is_not_written(monkeypatch):
    copy_rows, calls = gathering.copy_rows, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        copy_rows(*arguments)

    with cached(1, warm=True) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda", device_limit_gib="1MB")
        next(iter(loader))
        loader._stocache._stage.gatherer.wait()
        monkeypatch.setattr(gathering, "copy_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert identical(batches_of(loader), 2 * [list(torch.utils.data.DataLoader(Images(), BATCH))])
        assert loader.stats().device.from_tier


def test_a_batch_that_is_begun_again_after_an_error_takes_no_rows_of_the_tier_from_others(monkeypatch):
    monkeypatch.setattr(order, "_MOST_PLANNED", 1)
    copy_rows, calls = gathering.copy_rows, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 4:  # the second column of the batch that is begun ahead
            raise RuntimeError("once")
        copy_rows(*arguments)

    with cached(1, warm=True) as dataset:
        loader = DataLoader(dataset, BATCH, shuffle=True, device="cuda", device_limit_gib="1MB")
        loader._stocache._open_device(with_lazy_batches(dataset, on_device=True))
        loader._stocache._stage.gatherer.wait()
        torch.manual_seed(0)
        iterator, other = iter(loader), iter(loader)
        monkeypatch.setattr(gathering, "copy_rows", failing)
        batches = [next(iterator), next(other)]
        batches += [batch for epoch in (iterator, other, loader) for batch in epoch]
        for batch in batches:
            assert same(batch["image"], torch.stack([Images()[idx]["image"] for idx in batch["label"].tolist()]))
        assert loader.stats().device.from_tier >= LENGTH


def test_an_error_of_a_batch_that_is_begun_ahead_is_raised_in_its_turn():
    with cached(1, warm=True) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda")
        iterator = iter(loader)
        batches = [next(iterator)]
        gatherer = loader._stocache._stage.gatherer
        gather = gatherer.gather

        def failing(batch):
            if batch.indices[0] == 3 * BATCH:  # the next one that is begun
                raise RuntimeError("the fourth")
            return gather(batch)

        gatherer.gather = failing
        batches += [next(iterator), next(iterator)]
        with pytest.raises(RuntimeError, match="the fourth"):
            next(iterator)
        assert torch.cat([batch["label"] for batch in batches]).tolist() == list(range(3 * BATCH))
        gatherer.gather = gather


def test_the_tier_leaves_room_for_the_model_and_says_so(play, caplog):
    play(spare=(60_000, 80_000))
    with cached(1) as dataset, caplog.at_level(logging.WARNING, "stocache"):
        loader = DataLoader(dataset, BATCH, device="cuda", device_limit_gib="100KB")
        assert identical(batches_of(loader, 3), 3 * [list(torch.utils.data.DataLoader(Images(), BATCH))])
        assert loader.stats().device.tier_bytes == 50_000 // 4201 * 4201
        assert "device_limit_gib" in caplog.text


def test_the_tier_gives_way_where_the_device_is_full(play, caplog):
    kind, _ = play()
    with cached(1) as dataset, caplog.at_level(logging.WARNING, "stocache"):
        loader = DataLoader(dataset, BATCH, device="cuda", device_limit_gib="100KB")
        batches_of(loader, 2)
        assert loader.stats().device.tier_bytes
        kind.full = 1
        assert identical(batches_of(loader, 1), [list(torch.utils.data.DataLoader(Images(), BATCH))])
        assert loader.stats().device.tier_bytes == 0
        assert "Lower device_limit_gib" in caplog.text


def test_a_device_without_memory_for_a_batch_is_the_error_of_torch_in_its_turn(play, monkeypatch):
    kind, _ = play()
    monkeypatch.setattr(gathering, "_TOGETHER", 1)  # else no batch is left to be begun
    with cached(1) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda")
        batches_of(loader)
        iterator = iter(loader)
        next(iterator)
        kind.full = 1  # the batch that is begun ahead
        next(iterator)
        kind.full = 10
        with pytest.raises(torch.cuda.OutOfMemoryError):
            list(iterator)
        kind.full = 0


# ---------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("workers", WORKERS)
def test_states_are_those_of_the_delivered_batches(workers):
    options = {"batch_size": BATCH, "shuffle": True, "device": "cuda"} | WORKERS[workers]
    with cached(0.5) as dataset:
        loader = DataLoader(dataset, **options)
        batches_of(loader, 2)
        torch.manual_seed(9)
        epoch, state = [], None
        for number, batch in enumerate(loader):
            epoch.append(batch)
            if number == 4:
                state = loader.state_dict()
        resumed = DataLoader(dataset, **options)
        resumed.load_state_dict(state)
        assert identical(list(resumed), epoch[5:])


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, idx):
        return torch.rand(400)


def test_without_workers_the_dataset_draws_in_the_order_of_the_loop():
    drawn = []
    for kind, options in ((torch.utils.data.DataLoader, {}), (DataLoader, {"device": "cuda"})):
        torch.manual_seed(0)
        drawn.append([(batch, torch.rand(1)) for batch in kind(Draws(), 4, **options)])
    assert identical(*drawn)


class Drawing(torch.utils.data.Sampler):
    """Draws each index, and one that is not in the dataset in the end."""

    def __init__(self, last):
        self.last = last

    def __iter__(self):
        for _ in range(3 * BATCH):
            yield int(torch.randint(LENGTH, ()))
        yield self.last

    def __len__(self):
        return 3 * BATCH + 1


def test_a_sampler_of_the_user_draws_when_its_batch_is_asked_for():
    with cached(1, warm=True) as dataset:
        drawn = []
        for kind, options in ((torch.utils.data.DataLoader, {}), (DataLoader, {"device": "cuda"})):
            torch.manual_seed(0)
            loader = kind(dataset, BATCH, sampler=Drawing(0), **options)
            drawn.append([(batch["label"], torch.rand(1)) for batch in loader])
            del loader
        assert identical(*drawn)


class Failing(torch.utils.data.SequentialSampler):
    def __iter__(self):
        yield from range(2 * BATCH)
        raise KeyError("the third")


@pytest.mark.parametrize("together", [1, 1 << 30])
def test_batches_that_are_planned_together_come_before_an_error_in_one_of_them(together, monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", together)
    monkeypatch.setattr(order, "_DRAW_FIRST", {*order._DRAW_FIRST, Failing, Drawing})
    with cached(1, warm=True) as dataset:
        for sampler, error in ((Failing(dataset), KeyError), (Drawing(LENGTH), SampleIndexError)):
            loader = DataLoader(dataset, BATCH, sampler=sampler, device="cuda")
            next(iter(loader))
            loader._stocache._stage.gatherer.wait()
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(2 if error is KeyError else 3)]
            with pytest.raises(error):
                next(iterator)
            assert all(same(batch["image"][0], Images()[int(batch["label"][0])]["image"]) for batch in batches)
            del loader, iterator


@pytest.mark.unaudited
@pytest.mark.parametrize("workers", ["alone", "threads"])
def test_batches_of_a_full_cache_are_planned_many_at_once(workers, monkeypatch):
    sizes, plan = [], gathering.DeviceGatherer._plan
    monkeypatch.setattr(
        gathering.DeviceGatherer, "_plan", lambda own, batches: sizes.append(len(batches.sizes)) or plan(own, batches)
    )
    options = {"batch_size": 2, "shuffle": True} | WORKERS[workers]
    with cached(1, warm=True) as dataset:
        expected = batches_of(DataLoader(dataset, **options), 3)
        loader = DataLoader(dataset, device="cuda", **options)
        assert identical(batches_of(loader, 1), expected[:1])
        sizes.clear()
        torch.manual_seed(1)
        left = list(itertools.islice(loader, 3))
        assert identical(left, expected[1][:3])
        torch.manual_seed(2)
        assert identical(list(loader), expected[2])
        assert max(sizes) > 8
        assert len(sizes) < 10


class Vectors(Images):
    def __getitem__(self, idx):
        return super().__getitem__(idx) | {"vector": torch.full((100,), idx), "none": torch.empty(0)}


def test_a_batch_that_is_held_holds_no_others():
    with CachedDataset(Vectors(), 1, share_ranks=False) as dataset:
        dataset.warm(progress=False)
        loader = DataLoader(dataset, BATCH, shuffle=True, device="cuda")
        batches_of(loader, 1)
        torch.manual_seed(3)
        planned = list(loader)
        assert loader.stats().device.from_cache >= LENGTH
        for batch in planned:
            for name in ("image", "mask", "vector", "label"):
                assert batch[name].untyped_storage().nbytes() == batch[name].nbytes
        torch.manual_seed(3)
        assert identical(planned, list(torch.utils.data.DataLoader(Vectors(), BATCH, shuffle=True)))


@pytest.mark.parametrize("adds_up", [True, False])
def test_the_memories_of_several_gpus_add_up_with_a_sampler_that_sends_samples_to_their_rank(adds_up):
    source = Images(480)
    seen, shares = [], []
    with cached(1, source, warm=True) as dataset:
        for rank in range(2):
            if adds_up:
                placement = Placement("scattered", node=rank, nodes=2)
                sampler = LocalityDistributedSampler(range(480), 40, placement=placement, num_replicas=2, rank=rank)
            else:
                sampler = DistributedSampler(range(480), 2, rank)
            loader = DataLoader(dataset, 40, sampler=sampler, device="cuda", device_limit_gib=slots_of(0.45, source))
            served = [0]
            for epoch in range(4):
                sampler.set_epoch(epoch)
                seen += [(epoch, int(label)) for batch in loader for label in batch["label"]]
                served.append(loader.stats().device.from_tier)
            shares.append((served[-1] - served[-2]) / 240)
            del loader
    assert sorted(seen) == [(epoch, idx) for epoch in range(4) for idx in range(480)]
    assert all(share > 0.75 if adds_up else share < 0.55 for share in shares)


def test_samples_without_a_large_part_are_planned_together_and_no_more_than_that():
    source = TensorDataset(torch.arange(1000), torch.arange(1000 * 100).view(1000, 100))
    with CachedDataset(source, 1, share_ranks=False) as dataset:
        dataset.warm(progress=False)
        loader = DataLoader(dataset, 7, device="cuda")
        assert identical(batches_of(loader, 3), 3 * [list(torch.utils.data.DataLoader(source, 7))])
        iterator = iter(loader)
        next(iterator)
        assert len(iterator._source._waiting) <= 64


@pytest.mark.parametrize("share", [0.5, 1])
def test_small_parts_of_batches_may_be_changed_while_others_have_gradients(share):
    source = TensorDataset(torch.arange(400.0), torch.arange(400.0))
    weight = torch.ones(8, requires_grad=True)
    with CachedDataset(source, f"{int(share * 400 * 8)}B", share_ranks=False) as dataset:
        dataset.warm(progress=False)
        loader = DataLoader(dataset, 8, device="cuda")
        batches_of(loader, 1)
        first, *_ = batches = list(loader)
        loss = (weight * first[0]).sum()
        first[1].add_(1)
        batches[1][0].add_(1)
        loss.backward()
        batches[2][0].mul_(weight)


def test_a_sampler_that_counts_is_asked_for_few_batches_ahead():
    with cached(1, warm=True) as dataset:
        sampler = BlockSampler(range(LENGTH), 2 * BATCH, shuffle=False)
        loader = DataLoader(dataset, BATCH, sampler=sampler, device="cuda")
        batches_of(loader, 1)
        iterator = iter(loader)
        next(iterator)
        assert sampler.state_dict()["position"]["done"] <= 4 * 2 * BATCH
        assert len(iterator._source._waiting) <= 2


class Scaled(Images):
    scale = 1

    def set_scale(self, scale):
        self.scale = scale

    def __getitem__(self, idx):
        return super().__getitem__(idx) | {"label": idx * self.scale}


def test_a_change_that_the_audit_finds_is_an_error_of_the_loop(monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", 1)
    source = Scaled(2000)
    with CachedDataset(source, 1, share_ranks=False, on_change="raise", audit=0.01) as dataset:
        dataset.warm(progress=False)
        loader = DataLoader(dataset, BATCH, device="cuda")
        batches_of(loader, 1)
        iterator = iter(loader)
        next(iterator)
        dataset.set_scale(2)
        with pytest.raises(DatasetError):
            list(iterator)


def test_a_tier_that_gives_way_takes_no_batch_with_it_that_is_begun(monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", 1)
    with cached(1) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda", device_limit_gib=1)
        batches_of(loader, 3)
        iterator = iter(loader)
        found = [next(iterator)]
        assert iterator._source._waiting[0].placed
        gatherer = loader._stocache._stage.gatherer
        memory = [weakref.ref(rows) for rows in gatherer._tier.rows.values()]
        _on_out_of_memory(gatherer._cuda.device.index)
        assert not any(ref() for ref in memory)  # it is free at once
        found += iterator
        assert identical(found, list(torch.utils.data.DataLoader(Images(), BATCH)))


def test_a_tier_that_gives_way_under_way_takes_nothing_from_the_batch(monkeypatch):
    copied = []

    def copy(*arguments):
        copied.append(arguments)
        if len(copied) == 3:
            _on_out_of_memory(None)
        kernels.select_rows(*arguments)

    with cached(1) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda", device_limit_gib="100KB")
        batches_of(loader, 3)
        assert loader.stats().device.from_tier
        monkeypatch.setattr(gathering, "select_rows", copy)
        assert identical(batches_of(loader, 2), 2 * [list(torch.utils.data.DataLoader(Images(), BATCH))])
        assert len(copied) > 3
        assert loader.stats().device.tier_bytes == 0


def test_an_epoch_that_begins_after_samples_were_overwritten_changes_no_other_sample_of_one_that_runs(monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", 1)
    source = TensorDataset(torch.arange(1, 40 * 2000 + 1).view(40, 2000))
    with CachedDataset(source, 1, share_ranks=False, audit=0) as dataset:
        loader = DataLoader(dataset, 4, shuffle=True, device="cuda", device_limit_gib=1)
        batches_of(loader, 3)
        iterator = iter(loader)
        found = [next(iterator)]
        dataset.cache.set_slots(range(40), (-source.tensors[0],), allow_overwrite=True)
        other = iter(loader)  # the tier is filled anew, from here on
        for batch in iterator:
            found.append(batch)
            next(other, None)
        rows = torch.cat([batch[0] for batch in found]).abs()
        assert torch.equal(rows[rows[:, 0].argsort()], source.tensors[0])


class Broken(Images):
    def __getitem__(self, idx):
        if idx == 5 * BATCH:
            raise KeyError("sample 40")
        return super().__getitem__(idx)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_comes_in_its_turn_and_the_loop_may_go_on(workers):
    loader = DataLoader(Broken(), BATCH, device="cuda", **WORKERS[workers])
    iterator, batches = iter(loader), []
    for _ in range(5):
        batches.append(next(iterator))
    with pytest.raises(KeyError, match="sample 40"):
        next(iterator)
    batches += list(iterator)
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [idx for idx in range(LENGTH) if not 40 <= idx < 48]
    del loader, iterator


def test_a_batch_is_kept_until_its_copy_has_ended():
    loader = DataLoader(TensorDataset(torch.arange(80_000).view(80, 1000)), 4, num_workers=1, device="cuda")
    iterator = iter(loader)
    next(iterator)
    cuda = loader._stocache._stage.cuda
    cuda.asynchronous = True
    held = [next(iterator) for _ in range(5)]
    begun = [event for event in cuda.events if not event.done]
    kept = list(loader._stocache._stage._copied)
    assert len(kept) >= len(begun) > 0
    for event in begun[:-1]:
        event.done = True
    while len(loader._stocache._stage._copied) >= len(kept):  # what is ready is delivered before the next copy begins
        next(iterator)
    del held, kept, iterator, loader
    gc.collect()
    assert cuda.waited == 1


# ---------------------------------------------------------------------------------------------------- any structure

Pair = namedtuple("Pair", "left right")


def test_any_structure_arrives_and_what_is_no_tensor_stays_on_the_host():
    tensor = torch.arange(6)
    batch = {
        "pair": Pair(tensor, [tensor, "text", None]), "array": np.arange(3),
        "packed": pack_sequence([torch.arange(3), torch.arange(2)]), "tuple": (1, 2.5, b"bytes", tensor), "size": tensor.shape,
    }  # fmt: skip
    loader = DataLoader([batch], None, collate_fn=as_is, device="cuda")
    (arrived,) = loader
    assert type(arrived["pair"]) is Pair
    assert arrived["pair"].left is arrived["pair"].right[0] is arrived["tuple"][3]
    assert arrived["pair"].right[1:] == ["text", None]
    assert same(arrived["array"], batch["array"])
    assert not np.shares_memory(arrived["array"], batch["array"])  # which may be that of the ring
    assert same(arrived["packed"].data, batch["packed"].data)
    assert arrived["packed"].batch_sizes.device.type == "cpu"
    assert type(arrived["size"]) is torch.Size
    assert arrived["tuple"][:3] == (1, 2.5, b"bytes")
    assert loader._stocache._stage.cuda.handed == [1]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda dataset: Subset(dataset, range(0, LENGTH, 3)),
        lambda dataset: ConcatDataset([dataset, Subset(dataset, [1, 2, 3])]),
        lambda dataset: TensorDataset(torch.arange(5000).view(50, 100)),
    ],
    ids=["subset", "concat", "uncached"],
)
def test_wrapped_and_uncached_datasets_arrive(workers, wrap):
    with cached(0.5) as dataset:
        loader = DataLoader(wrap(dataset), BATCH, device="cuda", **WORKERS[workers])
        assert identical(batches_of(loader), 2 * [list(torch.utils.data.DataLoader(wrap(Images()), BATCH))])


class Odd(Images):
    """One sample has another shape than the others, so that its batch cannot be gathered."""

    def __getitem__(self, idx):
        sample = super().__getitem__(idx)
        return sample | {"image": sample["image"][:, :1, :1]} if idx == 37 else sample


def ragged(samples):
    return [sample["image"].sum() for sample in samples]


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_that_do_not_fit_and_functions_of_the_user(workers):
    with CachedDataset(Odd(), 1) as dataset:
        loader = DataLoader(dataset, BATCH, device="cuda", collate_fn=ragged, **WORKERS[workers])
        assert identical(batches_of(loader), 2 * [list(torch.utils.data.DataLoader(Odd(), BATCH, collate_fn=ragged))])


def test_sample_seed_and_persistent_workers():
    batches = []
    for options in ({}, {"device": "cuda"}):
        with cached(0.5) as dataset:
            loader = DataLoader(dataset, BATCH, shuffle=True, sample_seed=5, num_workers=2, persistent_workers=True, **options)
            batches.append(batches_of(loader, 3))
            del loader
    assert identical(*batches)
