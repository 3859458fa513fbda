"""Every row comes once, in an order that follows from seed and epoch alone, whoever parses, whatever is cached, and resumed."""

import itertools
import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stocache import CacheOptions, CustomFormat, ReadOptions, StateError, StreamError, StreamLoader, shuffle_quality
from tests.support.texts import FORK, N, Watch, epochs, numbers, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")
quick = pytest.mark.quick


@quick
@pytest.mark.parametrize("buffer_size", [10, 40, 430, 440])
def test_what_is_left_out(numbered, buffer_size, caplog):
    whole, full = N - N % buffer_size, N - N % 10
    for drop_last, wanted in ((False, N), ("batch", full), (True, whole)):
        with StreamLoader(numbered, 10, buffer_size, drop_last=drop_last) as loader:
            if not wanted:
                with pytest.raises(StreamError, match=r"437 rows, buffer_size=.*drop_last=True leaves no batch"):
                    list(loader)
                continue
            batches = list(loader)
            assert torch.cat([y for _, y in batches]).tolist() == list(range(wanted))
            assert {len(y) for _, y in batches[:-1]} <= {10}
            assert len(batches) == len(loader)
            assert loader.stats().rows == (wanted if drop_last is True else N)
            list(loader)
    left_out = f"the last {N % buffer_size} of {N} rows do not fill a buffer of {buffer_size} and are left out of each epoch"
    assert caplog.text.count(left_out) == bool(whole)


@quick
@pytest.mark.parametrize(("shuffle", "window"), [(True, 1), (True, 3), ("buffers", 1), ("buffers", 3)])
def test_orders_follow_from_seed_and_epoch(numbered, shuffle, window):
    options = {"shuffle": shuffle, "window": window, "drop_last": False}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = epochs(numbered, 3, **options)
    assert all(sorted(order) == list(range(N)) for order in first)
    assert len(set(map(tuple, first))) == 3
    assert epochs(numbered, 1, seed=1, **options)[0] not in first
    with StreamLoader(numbered, 10, 20, **options) as loader:
        for epoch in (2, 0):
            loader.set_epoch(epoch)
            assert numbers(loader) == first[epoch]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    order = [n // 20 for n in epochs(numbered, 1, **options | {"drop_last": True})[0]]  # in windows of that many buffers
    windows = [set(order[start : start + 20 * window]) for start in range(0, len(order), 20 * window)]
    assert {len(buffers) for buffers in windows} == {window}
    assert (sorted(windows, key=min) == windows) == (shuffle is True)
    mixed = [shuffle_quality(np.array(order), 20, batch_size=10).same_block for order in first]
    assert all(share < 1.2 / window for share in mixed)


WAYS = {
    "fork": {"num_workers": 2, "read": FORK, "size_limit_gib": "6KB"},
    "forkserver": {"num_workers": 2, "read": ReadOptions("numpy", "forkserver")},
    "spawn": {"num_workers": 1, "read": ReadOptions(multiprocessing_context="spawn"), "size_limit_gib": 0.01},
    "partly cached": {"size_limit_gib": "6KB"},
    "numpy, cached": {"read": ReadOptions("numpy"), "size_limit_gib": 0.01},
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "spawn")) for way in WAYS])
def test_the_order_is_the_same_whoever_parses_and_whatever_is_cached(numbered, tmp_path, way):
    options = dict(WAYS[way])
    if way == "forkserver":
        options["cache"] = CacheOptions("2KB", disk=tmp_path / "disk", disk_limit="4MB")
    kinds = [(True, 2, "batch"), (False, 1, False), ("buffers", 2, True)]
    for shuffle, window, drop_last in kinds[: 1 if way in ("forkserver", "spawn") else None]:
        order = {"shuffle": shuffle, "window": window, "drop_last": drop_last}
        with StreamLoader(numbered, 10, 20, **order, **options) as loader:
            assert [numbers(loader) for _ in range(3)] == epochs(numbered, 3, **order)
            assert way != "forkserver" or loader.stats().disk.hits > 20


def test_two_iterators_at_once_are_two_epochs(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True) as loader:
        one, two = zip(*((a, b) for (_, a), (_, b) in zip(loader, loader, strict=True)), strict=True)
        assert not torch.equal(torch.cat(one), torch.cat(two))
        for epoch in (one, two):
            assert sorted(torch.cat(epoch).tolist()) == list(range(420))


def test_with_workers_there_is_one_iterator_at_a_time(numbered):
    with StreamLoader(numbered, 10, 20, num_workers=2, read=FORK) as loader:
        first, second = iter(loader), iter(loader)
        assert next(first)[1].tolist() == next(second)[1].tolist() == list(range(10))
        with pytest.raises(StreamError, match="another iteration has begun"):
            list(first)
        assert torch.cat([y for _, y in second]).tolist() == list(range(10, 420))


def doubled(batch):
    x, y = batch
    assert len(x) == len(y) == 10
    return x * 2, os.getpid()


def test_transforms_run_in_workers_and_get_whole_batches(numbered):
    for workers in (0, 2):
        with StreamLoader(numbered, 10, 20, transform=doubled, num_workers=workers, read=FORK) as loader:
            for (x, pid), start in zip(loader, range(0, N, 10), strict=False):
                assert x[:, 0].tolist() == [2 * n for n in range(start, start + 10)]
                assert (pid != os.getpid()) == bool(workers)


def test_batches_are_the_users_to_keep_and_to_write_to(numbered):
    for options in ({}, {"shuffle": True}, {"num_workers": 1, "read": FORK}):
        with StreamLoader(numbered, 10, 20, size_limit_gib=0.01, **options) as loader:
            kept = [list(loader) for _ in range(2)]
            for epoch in (*kept, loader):
                for x, y in epoch:
                    assert torch.equal(x[:, 0].long(), y)
                    x.zero_()
                    y.zero_()


def test_in_a_dataloader_of_torch_each_row_comes_once_in_an_order_by_torchs_seed_or_the_epoch(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False, size_limit_gib=0.01) as loader:
        torchs, epochs = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork"), []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            epochs.append(numbers(torchs))
        assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
        assert epochs[0] == epochs[1] != epochs[2]
        assert loader.stats().cache.fill_fraction > 0
        loader.set_epoch(5)
        set_once = [numbers(torchs) for _ in range(2)]
        assert set_once[0] == set_once[1]
        assert set_once[0] not in epochs
        numbered.write_bytes(rows(3, N))
        for _ in range(2):
            assert sorted(numbers(torchs)) == list(range(3, N))


def nth_state(loader, count):
    """The state after that many batches; resuming from each is in tests/system/test_state_contract.py."""
    for _ in itertools.islice(loader, count):
        state = loader.state_dict()
    return state


def test_resuming_neither_reads_nor_parses_what_was_delivered(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse)) as loader:
        state = nth_state(loader, 40)
    watch.rows = 0
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse)) as loader:
        loader.load_state_dict(state)
        watch.bytes = 0
        assert torch.cat(list(loader)).flatten().tolist() == list(range(400, 420))
        assert len(loader) == 42
    assert watch.rows <= 40
    assert watch.bytes < len(rows()) / 3


def test_another_number_of_workers_goes_on_where_one_stood(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True) as loader:
        whole = [y.tolist() for _, y in loader]
        loader.set_epoch(0)
        state = nth_state(loader, 17)
    with StreamLoader(numbered, 10, 20, shuffle=True, num_workers=2, read=FORK) as loader:
        loader.load_state_dict(state)
        assert [y.tolist() for _, y in loader] == whole[17:]


def test_what_fails_before_its_first_batch_is_resumed_there(numbered):
    def fail(batch):
        raise KeyError("by the user")

    with StreamLoader(numbered, 10, 20) as loader:
        state = nth_state(loader, 7)
    with StreamLoader(numbered, 10, 20, transform=fail) as loader:
        for load in (lambda: None, lambda: loader.load_state_dict(state)):
            load()
            before = loader.state_dict()
            with pytest.raises(KeyError, match="by the user"):
                next(iter(loader))
            assert loader.state_dict() == before


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_torchdatas_stateful_dataloader_resumes_it(numbered):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata's loader is torchdata's")
    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False) as loader:
        options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork"}
        first, second = (torchdata.StatefulDataLoader(loader, **options) for _ in range(2))
        torch.manual_seed(1)
        came, states = zip(*((y.tolist(), first.state_dict()) for _, y in first), strict=True)
        second.load_state_dict(states[14])
        assert tuple(y.tolist() for _, y in second) == came[15:]
        del first, second


def test_states_that_do_not_belong_are_refused(numbered, tmp_path):
    with StreamLoader(numbered, 10, 20) as loader:
        state = nth_state(loader, 1)
    for options in ({"seed": 1}, {"shuffle": True}, {"drop_last": False}, {"columns": [0]}, {"rank": 0, "world_size": 2}):
        with StreamLoader(numbered, 10, 20, **options) as loader:
            with pytest.raises(StateError, match="other files, or other arguments"):
                loader.load_state_dict(state)
    with StreamLoader(numbered, 10, 20) as loader:
        with pytest.raises(StateError, match="reads states of version 2, and this state has version 1"):
            loader.load_state_dict({"version": 1, "identity": "", "epoch": 0, "key": None, "window": None, "batch": 0})
        loader.load_state_dict(state)
        numbered.write_bytes(rows(1, N))
        with pytest.raises(StateError, match="have changed since the state was taken"):
            list(loader)
    copied = tmp_path / "copied.tsv"
    copied.write_bytes(rows())
    with StreamLoader(copied, 10, 20) as loader:  # elsewhere, and at another time
        loader.load_state_dict(state)
        assert numbers(loader) == list(range(10, 420))


def test_a_state_that_would_begin_inside_a_line_is_refused(tmp_path):
    path = tmp_path / "long.tsv"
    path.write_bytes(rows(0, 20_000))
    with StreamLoader(path, 100, 200) as loader:
        state = nth_state(loader, 101)
    content, at = path.read_bytes(), state["position"]["line"][1]
    path.write_bytes(content[: at - 3] + b"0\n1" + content[at:])
    with StreamLoader(path, 100, 200) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="no line begins where"):
            next(iter(loader))
