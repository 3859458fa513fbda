"""The order of a BlockSampler, and how well it mixes."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stocache
from stocache import BlockSampler, LimitError, SampleIndexError, StateError, shuffle_quality


@st.composite
def orders(draw):
    total = draw(st.integers(0, 200))
    indices = draw(st.permutations(range(total)))[: draw(st.integers(0, total))]
    options = {
        "block_size": draw(st.integers(1, 30)),
        "shuffle": draw(st.booleans()),
        "window": draw(st.integers(1, 8)),
        "seed": draw(st.integers(0, 3)),
        "drop_last": draw(st.booleans()),
    }
    return indices, options, draw(st.integers(1, 5))


@given(orders())
def test_shares_of_the_ranks_are_disjoint_and_exhaustive(order):
    indices, options, world_size = order
    shares = []
    for rank in range(world_size):
        sampler = BlockSampler(indices, **options, rank=rank, world_size=world_size)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    together = list(itertools.chain(*shares))
    assert len(set(together)) == len(together)
    assert max(map(len, shares)) - min(map(len, shares)) <= (not options["drop_last"])
    if options["drop_last"]:
        assert len(together) == len(indices) // world_size * world_size
    else:
        assert sorted(together) == list(range(len(indices)))


@given(orders())
def test_each_block_is_visited_once_and_within_its_window(order):
    indices, options, _ = order
    blocks = [indices[local] // options["block_size"] for local in BlockSampler(indices, **options)]
    if options["shuffle"]:
        seen: list = []
        for block in blocks:
            if block not in seen:
                seen.append(block)
        firsts = {block: blocks.index(block) for block in seen}
        lasts = {block: len(blocks) - 1 - blocks[::-1].index(block) for block in seen}
        at = [sum(first <= position <= lasts[block] for block, first in firsts.items()) for position in range(len(blocks))]
        assert max(at, default=0) <= options["window"]
    else:
        assert blocks == sorted(blocks)


@given(orders(), st.data())
def test_a_state_goes_on_where_it_was_taken_and_plays_the_next_epoch(order, data):
    indices, options, world_size = order
    rank = data.draw(st.integers(0, world_size - 1))
    make = lambda: BlockSampler(indices, **options, rank=rank, world_size=world_size)
    epochs = data.draw(st.integers(0, 2))
    sampler = make()
    for _ in range(epochs):
        list(sampler)
    running = iter(sampler)
    taken = list(itertools.islice(running, data.draw(st.integers(0, len(sampler)))))
    state = sampler.state_dict()
    rest = list(running)
    again = make()
    again.load_state_dict(state)
    resumed = list(again)
    whole = make()
    whole.set_epoch(epochs)
    assert taken + rest == list(whole)
    assert resumed == rest or (rest == [] and resumed == list(whole) == list(sampler))
    if rest:
        assert list(again) == list(sampler)


@given(orders())
def test_blocks_are_told_of_before_they_are_read_and_once(order):
    indices, options, world_size = order
    for rank in range(world_size):
        told: list = []
        sampler = BlockSampler(indices, **options, rank=rank, world_size=world_size, prefetch=told.extend)
        read = set()
        for local in sampler:
            block = indices[local] // options["block_size"]
            assert block in told
            read.add(block)
        assert len(told) == len(set(told))
        assert len(set(told) - read) <= 2 * options["window"]  # of the windows that are shared with other ranks


def test_unshuffled_samples_come_by_blocks_in_order():
    assert list(BlockSampler([9, 1, 5, 0, 4, 8], 4, shuffle=False)) == [3, 1, 4, 2, 5, 0]


def test_epochs_differ_and_depend_on_seed_and_epoch_alone():
    make = lambda seed=0: BlockSampler(range(100), 10, True, window=2, seed=seed)
    sampler = make()
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    torch.manual_seed(123)
    assert list(sampler) == first == list(make())
    assert list(make(1)) != first
    other = make()
    other.set_epoch(1)
    assert list(other) == second


def test_an_iteration_that_is_broken_off_does_not_count_for_the_next():
    sampler = BlockSampler(range(100), 10, True)
    whole = BlockSampler(range(100), 10, True)
    epochs = [list(whole), list(whole)]
    assert list(itertools.islice(sampler, 5)) == epochs[0][:5]
    assert list(sampler) == epochs[1]


def test_it_draws_no_random_numbers():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    list(BlockSampler(range(100), 10, True))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_trainers_take_it_for_a_distributed_sampler():
    assert isinstance(BlockSampler(range(10), 2, True), DistributedSampler)


@pytest.mark.parametrize("loader_class", [DataLoader, stocache.DataLoader])
def test_loaders_batch_its_order(loader_class):
    dataset = TensorDataset(torch.arange(100))
    sampler, wanted = (BlockSampler(range(100), 10, True, window=3) for _ in range(2))
    for _ in range(2):
        got = [batch.tolist() for (batch,) in loader_class(dataset, 8, sampler=sampler)]
        order = list(wanted)
        assert got == [order[at : at + 8] for at in range(0, 100, 8)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 3, 12])
def test_a_loader_resumes_it_after_an_epoch_that_was_broken_off(workers, stop):
    dataset = TensorDataset(torch.arange(100))
    make = lambda: stocache.DataLoader(dataset, 8, sampler=BlockSampler(range(100), 10, True), num_workers=workers)
    loader = make()
    for number, _ in enumerate(loader):
        if number == 4:
            break  # workers have asked for more by now
    running = iter(loader)
    for _ in range(stop):
        next(running)
    state = loader.state_dict()
    rest = [batch.tolist() for (batch,) in running]
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch.tolist() for (batch,) in resumed] == rest
    assert [batch.tolist() for (batch,) in resumed] == [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"window": 0}, "window=0"),
        ({"window": 1.5}, r"window=1\.5"),
        ({"seed": -1}, "seed=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2 is out of range for world_size=2"),
        ({"rank": -1}, "rank=-1"),
    ],
)
def test_options_that_are_none_are_errors(options, message):
    with pytest.raises(LimitError, match=message):
        BlockSampler(range(10), **{"block_size": 2, "shuffle": True} | options)


@pytest.mark.parametrize("indices", [[-1], [0.5], ["a"], [[1]]])
def test_indices_that_are_none_are_errors(indices):
    with pytest.raises(SampleIndexError, match="BlockSampler"):
        BlockSampler(indices, 2, True)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"window": 2}, {"world_size": 3}, {"indices": range(9)}, {"drop_last": True}, {"block_size": 3}]
)
def test_a_state_of_another_order_is_an_error(change):
    options = {"indices": range(10), "block_size": 2, "shuffle": True, "rank": 0, "world_size": 2}
    state = BlockSampler(**options).state_dict()
    with pytest.raises(StateError, match=f"of another order .*{next(iter(change)).replace('indices', 'samples')}="):
        BlockSampler(**options | change).load_state_dict(state)
    for wrong in (
        {},
        {"epoch": 0, "done": 0, "samples": 10, "shuffle": True, "window": 16, "seed": 0, "rank": 0, "world_size": 2},
    ):
        with pytest.raises(StateError, match="is not a state of a BlockSampler"):  # the second is one of an older release
            BlockSampler(**options).load_state_dict(wrong)


# ---------------------------------------------------------------------------------------------------- without lists


@given(st.integers(0, 60), st.integers(0, 200), st.integers(1, 30), st.booleans(), st.integers(1, 8), st.integers(1, 4))
def test_a_range_is_ordered_as_the_list_of_its_numbers(start, count, block_size, shuffle, window, world_size):
    indices, told = range(start, start + count), ([], [])
    for rank in range(world_size):
        options = {"window": window, "seed": 5, "rank": rank, "world_size": world_size}
        one, other = (
            BlockSampler(these, block_size, shuffle, prefetch=blocks.extend, **options)
            for these, blocks in zip((indices, list(indices)), told, strict=True)
        )
        assert list(one) == list(other)
        assert told[0] == told[1]


@pytest.mark.parametrize("listed", [range(10), [3, 1, 2]])
def test_orders_of_more_than_the_limit_are_computed(listed, monkeypatch):
    monkeypatch.setattr("stocache.samplers.block.MAX_LISTED", 0)
    monkeypatch.setattr("stocache.samplers.block._AT_ONCE", 2)
    samplers = [BlockSampler(listed, 2, True, window=2, rank=rank, world_size=2) for rank in range(2)]
    epochs = [list(itertools.chain(*samplers)) for _ in range(5)]
    assert all(sorted(epoch) == list(range(len(listed))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_the_order_of_a_billion_samples_takes_no_memory():
    sampler = BlockSampler(range(10**9), 1000, True, window=16, rank=1, world_size=1024)
    tracemalloc.start()
    try:
        taken = list(itertools.islice(sampler, 50_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(taken)) == 50_000
    assert len({sample // 1000 for sample in taken}) < 50 + 2 * 16
    assert len(sampler) == -(-(10**9) // 1024)
    assert peak < 2**24


# ---------------------------------------------------------------------------------------------------- quality


@pytest.mark.parametrize("window", [1, 4, 16, 64])
def test_windows_of_k_among_n_blocks_have_n_over_k_times_the_pairs_of_a_full_shuffle(window):
    order = list(BlockSampler(range(64 * 256), 64, True, window=window))
    quality = shuffle_quality(order, 64, batch_size=64)
    assert quality.same_block_ratio == pytest.approx(256 / window, rel=0.1)
    assert quality.design_effect == pytest.approx(1 + 63 * quality.same_block)


def test_a_full_shuffle_is_perfect():
    order = np.random.default_rng(0).permutation(64 * 256)
    quality = shuffle_quality(order, 64, order % 10)
    assert quality.same_block_ratio == pytest.approx(1, abs=0.05)
    assert quality.design_effect == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("kind", ["classes", "numbers", "many classes"])
def test_correlation_tells_sorted_labels_from_random_ones(kind):
    labels = np.repeat(np.arange(100 if kind == "many classes" else 10), 640)
    labels = labels.astype(float) if kind == "numbers" else labels
    shuffled = np.random.default_rng(0).permutation(labels)
    order = list(range(len(labels)))
    assert shuffle_quality(order, 64, labels).correlation == pytest.approx(1)
    assert shuffle_quality(order, 64, shuffled).correlation < 0.02
    assert shuffle_quality(order, 64, labels, batch_size=32).design_effect == pytest.approx(32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0], 2), LimitError, "two indices"),
        ((range(4), 0), LimitError, "block_size >= 1"),
        ((range(4), 2, [0]), LimitError, "1 labels, and indices up to 3"),
        (([-1, 2], 2), SampleIndexError, "shuffle_quality"),
    ],
)
def test_quality_of_nothing_is_an_error(arguments, error, message):
    with pytest.raises(error, match=message):
        shuffle_quality(*arguments)
