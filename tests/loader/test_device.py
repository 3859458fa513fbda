"""Batches on a device: a device that is played by the memory of the host. What needs a GPU is in test_gpu.py."""

import contextlib
import gc
import itertools
import logging
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from stocache import CachedDataset, DataLoader
from stocache.errors import ClosedError, DatasetError
from stocache.loader import order
from stocache.loader.collate import as_is
from stocache.loader.device import gathering
from stocache.loader.device.gathering import DeviceGatherer
from stocache.system.limits import MIB
from tests.support.devices import Images, cached, play_device, registered
from tests.support.equality import identical, same
from tests.support.pairs import pairs
from tests.support.processes import wait_until
from tests.support.resuming import check_resumes
from tests.support.ways import WAYS

LENGTH, BATCH = 96, 8


SOURCE = Images(LENGTH)


@pytest.fixture(autouse=True)
def play(monkeypatch):
    """A device is played; a test may ask for a different one, or for its parts."""
    play_device(monkeypatch)
    yield lambda **attributes: play_device(monkeypatch, **attributes)
    gc.collect()


@pytest.fixture
def one_by_one(monkeypatch):
    """Batches are not gathered together, so that the next one is begun while the loop has one."""
    monkeypatch.setattr(gathering, "_TOGETHER", 1)


def on_device(dataset, batch_size=BATCH, **options):
    return DataLoader(dataset, batch_size, device="cuda", **options)


def batches_of(loader, epochs=2):
    """The batches of some epochs, after the memory that is reserved by then has been registered."""
    epochs_of = []
    for _ in range(epochs):
        torch.manual_seed(len(epochs_of))
        epochs_of.append(list(loader))
        registered(loader)
    return epochs_of


def of_torch(dataset, epochs, batch_size=BATCH, **options):
    return epochs * [list(TorchLoader(dataset, batch_size, **options))]


@contextlib.contextmanager
def ready(source=SOURCE, batch_size=BATCH, **options):
    """A full cache and a loader over it, which has registered all samples."""
    with cached(source, warm=True) as dataset:
        loader = on_device(dataset, batch_size, **options)
        batches_of(loader, 1)
        yield dataset, loader


@pytest.mark.parametrize(("workers", "share", "together"), [*pairs([*WAYS], [0.1, 0.5, 1], [1, 300_000])])
def test_batches_are_those_of_the_cpu(workers, share, together, monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", together)  # bytes: a batch, or two
    options = {"batch_size": BATCH, "shuffle": True, "sample_seed": 5 if share == 0.5 else None} | WAYS[workers]
    with cached(SOURCE, share) as dataset:
        expected = batches_of(DataLoader(dataset, **options), 3)
    with cached(SOURCE, share) as dataset:
        loader = on_device(dataset, **options)
        assert identical(batches_of(loader, 3), expected)
        stats = loader.stats().device
        if workers == "alone" or share == 1:  # else the batches that are held leave no buffer of the ring free
            assert stats.from_cache + stats.from_host == 3 * LENGTH
        assert stats.from_cache
        assert stats.registered_bytes


@pytest.mark.parametrize("most", [0, 1])
def test_memory_that_cannot_be_registered_is_gathered_by_the_cpu_with_one_warning(play, most, caplog, monkeypatch):
    _, runtime = play()
    runtime.most = most
    monkeypatch.setattr("stocache.loader.device.mapping._AT_ONCE", 2 * MIB)
    source = TensorDataset(torch.arange(6 << 17).view(-1, 512))  # 6 MiB of rows of 4 KiB
    with caplog.at_level(logging.WARNING, "stocache"), ready(source) as (_, loader):
        assert identical(batches_of(loader, 2), of_torch(source, 2))
        stats = loader.stats().device
        assert stats.from_host >= LENGTH
        assert stats.registered_bytes == most * 2 * MIB
        warnings = [record.message for record in caplog.records if "registers no more" in record.message]
        assert len(warnings) == 1
        assert "ulimit -l" in warnings[0]


def test_what_was_registered_is_released_with_the_cache_and_not_with_the_loader(play):
    _, runtime = play()
    with ready() as (dataset, loader):
        del loader
        gc.collect()
        batches_of(on_device(dataset))
        assert runtime.calls == ["register"]
    gc.collect()
    assert wait_until(lambda: not runtime.registered)


def test_a_cache_that_is_closed_under_way_is_an_error(one_by_one):
    with ready() as (dataset, loader):
        iterator = iter(loader)
        next(iterator)
        dataset.close()
        with pytest.raises(ClosedError, match="closed"):
            list(iterator)
        assert loader.stats().device.registered_bytes == 0


def test_a_device_without_memory_for_a_batch_is_the_error_of_torch_in_its_turn(play, one_by_one):
    kind, _ = play()
    with ready() as (_, loader):
        iterator = iter(loader)
        next(iterator)
        kind.full = 1  # the batch that is begun ahead
        next(iterator)
        kind.full = 10
        with pytest.raises(torch.cuda.OutOfMemoryError):
            list(iterator)


@pytest.mark.parametrize("workers", WAYS)
def test_states_are_those_of_the_delivered_batches(workers):
    with cached(SOURCE, 0.5) as dataset:

        def loader(state):
            made = on_device(dataset, shuffle=True, **WAYS[workers])
            made.load_state_dict(state)
            return made

        batches_of(loader({}))
        check_resumes(loader({}), loader, numbers=lambda length, count: (5,))


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, idx):
        return torch.rand(400)


class Drawing(torch.utils.data.Sampler):
    """Draws each index."""

    def __iter__(self):
        for _ in range(3 * BATCH):
            yield int(torch.randint(LENGTH, ()))

    def __len__(self):
        return 3 * BATCH


def test_without_workers_the_dataset_and_a_sampler_of_the_user_draw_in_the_order_of_the_loop():
    def drawn(loader):
        torch.manual_seed(0)
        return [(batch, torch.rand(1)) for batch in loader]

    with ready() as (dataset, _):
        for source, options in ((Draws(), {}), (dataset, {"sampler": Drawing()})):
            theirs = drawn(TorchLoader(source, BATCH, **options))
            assert identical(drawn(on_device(source, **options)), theirs)


class Failing(torch.utils.data.SequentialSampler):
    def __iter__(self):
        yield from range(2 * BATCH)
        raise KeyError("the third")


@pytest.mark.parametrize("together", [1, 1 << 30])
def test_batches_that_are_planned_together_come_before_an_error_in_one_of_them(together, monkeypatch):
    monkeypatch.setattr(gathering, "_TOGETHER", together)
    monkeypatch.setattr(order, "_DRAW_FIRST", {*order._DRAW_FIRST, Failing})
    with ready() as (dataset, _):
        iterator = iter(on_device(dataset, sampler=Failing(dataset)))
        batches = [next(iterator) for _ in range(2)]
        with pytest.raises(KeyError, match="the third"):
            next(iterator)
        assert all(same(batch["image"][0], SOURCE[int(batch["label"][0])]["image"]) for batch in batches)


def test_an_error_of_the_audit_comes_in_place_of_one_of_the_batches_that_are_planned_together():
    source, stale = Images(LENGTH, lambda sample, idx: sample | {"label": idx + stale[0]}), [0]
    with CachedDataset(source, 0.1, share_ranks=False, on_change="raise") as dataset:
        dataset.warm(progress=False)
        loader = on_device(dataset)
        batches_of(loader, 1)
        stale[0] = 1
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(DatasetError, match="stale of Images was changed in place"):
                next(iterator)
        stale[0] = 0
        assert [int(batch["label"][0]) for batch in iterator] == [*range(2 * BATCH, LENGTH, BATCH)]


@pytest.mark.unaudited
@pytest.mark.parametrize("workers", ["alone", "threads"])
def test_batches_of_a_full_cache_are_planned_many_at_once(workers, monkeypatch):
    sizes, plan = [], DeviceGatherer._plan
    monkeypatch.setattr(DeviceGatherer, "_plan", lambda own, batches: sizes.append(len(batches.sizes)) or plan(own, batches))
    options = {"batch_size": 2, "shuffle": True} | WAYS[workers]
    with ready(**options) as (dataset, loader):
        expected = batches_of(DataLoader(dataset, **options), 3)
        sizes.clear()
        torch.manual_seed(1)
        assert identical(list(itertools.islice(loader, 3)), expected[1][:3])
        torch.manual_seed(2)
        assert identical(list(loader), expected[2])
        assert max(sizes) > 8
        assert len(sizes) < 10


def test_a_batch_that_is_held_holds_no_others():
    source = Images(LENGTH, lambda sample, idx: sample | {"vector": torch.full((100,), idx), "none": torch.empty(0)})
    with ready(source, shuffle=True) as (_, loader):
        torch.manual_seed(3)
        planned = list(loader)
        assert loader.stats().device.from_cache >= LENGTH
        for batch in planned:
            for name in ("image", "mask", "vector", "label"):
                assert batch[name].untyped_storage().nbytes() == batch[name].nbytes
        torch.manual_seed(3)
        assert identical([planned], of_torch(source, 1, shuffle=True))


def test_small_parts_of_batches_may_be_changed_while_others_have_gradients():
    weight = torch.ones(8, requires_grad=True)
    with ready(TensorDataset(torch.arange(400.0), torch.arange(400.0))) as (_, loader):
        first, *_ = batches = list(loader)
        loss = (weight * first[0]).sum()
        first[1].add_(1)
        batches[1][0].add_(1)
        loss.backward()
        batches[2][0].mul_(weight)


@pytest.mark.parametrize("workers", WAYS)
def test_an_error_comes_in_its_turn_and_the_loop_may_go_on(workers):
    def broken(sample, idx):
        if idx == 40:
            raise KeyError("sample 40")
        return sample

    loader = on_device(Images(LENGTH, broken), **WAYS[workers])
    iterator, batches = iter(loader), []
    for _ in range(5):
        if workers != "alone":
            wait_until(iterator._source._batches.is_ready)  # so that it is begun ahead
        batches.append(next(iterator))
    with pytest.raises(KeyError, match="sample 40"):
        next(iterator)
    batches += list(iterator)
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [idx for idx in range(LENGTH) if not 40 <= idx < 48]
    del loader, iterator


def test_a_batch_is_kept_until_its_copy_has_ended():
    loader = on_device(TensorDataset(torch.arange(80_000).view(80, 1000)), 4, num_workers=1)
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


Pair = namedtuple("Pair", "left right")


def test_any_structure_arrives_and_what_is_no_tensor_stays_on_the_host():
    tensor = torch.arange(6)
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    batch = {"pair": Pair(tensor, [tensor, "text", None]), "array": np.arange(3), "packed": packed, "size": tensor.shape}
    loader = on_device([batch], None, collate_fn=as_is)
    (arrived,) = loader
    assert type(arrived["pair"]) is Pair
    assert arrived["pair"].left is arrived["pair"].right[0]
    assert arrived["pair"].right[1:] == ["text", None]
    assert same(arrived["array"], batch["array"])
    assert not np.shares_memory(arrived["array"], batch["array"])  # which may be that of the ring
    assert same(arrived["packed"].data, batch["packed"].data)
    assert arrived["packed"].batch_sizes.device.type == "cpu"
    assert type(arrived["size"]) is torch.Size
    assert loader._stocache._stage.cuda.handed == [1]


WRAPS = {
    "subset": lambda dataset: Subset(dataset, range(0, LENGTH, 3)),
    "concatenated": lambda dataset: ConcatDataset([dataset, Subset(dataset, [1, 2, 3])]),
    "uncached": lambda dataset: TensorDataset(torch.arange(5000).view(50, 100)),
}


@pytest.mark.parametrize(("workers", "wrap"), [*zip(WAYS, WRAPS, strict=True), *zip(WAYS, [*WRAPS][1:], strict=False)])
def test_wrapped_and_uncached_datasets_arrive(workers, wrap):
    with cached(SOURCE, 0.5) as dataset:
        loader = on_device(WRAPS[wrap](dataset), **WAYS[workers])
        assert identical(batches_of(loader), of_torch(WRAPS[wrap](SOURCE), 2))


def ragged(samples):
    return [sample["image"].sum() for sample in samples]


@pytest.mark.parametrize("workers", WAYS)
def test_samples_that_do_not_fit_and_functions_of_the_user(workers):
    odd = Images(LENGTH, lambda sample, idx: sample | {"image": sample["image"][:, :1, :1]} if idx == 37 else sample)
    with CachedDataset(odd, 0.1) as dataset:
        loader = on_device(dataset, collate_fn=ragged, **WAYS[workers])
        assert identical(batches_of(loader), of_torch(odd, 2, collate_fn=ragged))
