"""Orders: permutations, of torch's samplers, of a BlockSampler and how well it mixes, of a StatefulDistributedSampler."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from stocache import BlockSampler, LimitError, StatefulDistributedSampler
from stocache.errors import SampleIndexError, StateError
from stocache.loader import order as loader_order
from stocache.loader.samplers.permutation import Permutation
from stocache.system import generators
from tests.support.edits import through_json
from tests.support.shuffling import same_block


@st.composite
def orders(draw):
    total = draw(st.integers(0, 200))
    indices = draw(st.permutations(range(total)))[: draw(st.integers(0, total))]
    if draw(st.booleans()):  # a range is ordered without a list
        start = draw(st.integers(0, 60))
        indices = range(start, start + len(indices))
    options = {"block_size": draw(st.integers(1, 30)), "shuffle": draw(st.booleans()), "window": draw(st.integers(1, 8))}
    options |= {"seed": draw(st.integers(0, 3)), "drop_last": draw(st.booleans())}
    return indices, options, draw(st.integers(1, 5)), draw(st.integers(0, 200))


def shares_of(indices, options, world_size, taken):
    """The shares of all ranks; each reads only blocks that it has announced. A state after ``taken`` samples goes on there."""
    for rank in range(world_size):
        announced, read, share = [], set(), []
        ranks = {"rank": rank, "world_size": world_size, "prefetch": announced.extend}
        sampler, again = (BlockSampler(indices, **options, **ranks) for _ in range(2))
        for local in sampler:
            share.append(local)
            if len(share) == taken:
                again.load_state_dict(sampler.state_dict())
            read.add(indices[local] // options["block_size"])
            assert read <= set(announced)
        assert len(announced) == len(set(announced))
        assert len(set(announced) - read) <= 2 * options["window"]  # of the windows that are shared with other ranks
        assert list(BlockSampler(list(indices), **options, **ranks)) == share
        if taken < len(share):
            assert [list(again), list(again)] == [share[taken:], list(sampler)]
        assert len(share) == len(sampler)
        yield share


@given(orders())
def test_ranks_share_all_samples_and_read_each_block_once_within_its_window(order):
    indices, options, world_size, taken = order
    shares = list(shares_of(indices, options, world_size, taken))
    together = list(itertools.chain(*shares))
    assert len(set(together)) == len(together)
    if options["drop_last"]:
        assert {len(share) for share in shares} == {len(indices) // world_size}
    else:
        assert sorted(together) == list(range(len(indices)))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    blocks = [indices[local] // options["block_size"] for local in BlockSampler(indices, **options)]
    if options["shuffle"]:
        ends = [(blocks.index(block), len(blocks) - blocks[::-1].index(block)) for block in set(blocks)]
        open_at = [sum(first <= at < end for first, end in ends) for at in range(len(blocks))]
        assert max(open_at, default=0) <= options["window"]
    else:
        assert blocks == sorted(blocks)


def test_epochs_differ_depend_on_seed_and_epoch_alone_and_draw_nothing():
    make = lambda seed=0: BlockSampler(range(100), 10, True, window=2, seed=seed)
    sampler = make()
    before = generators.read()
    first, second = list(sampler), list(sampler)
    assert generators.read() == before
    assert first != second
    torch.manual_seed(123)
    assert list(make()) == first != list(make(1))
    assert isinstance(sampler, DistributedSampler)  # or trainers would replace it
    assert list(BlockSampler([9, 1, 5, 0, 4, 8], 4, shuffle=False)) == [3, 1, 4, 2, 5, 0]


def test_options_and_indices_out_of_range_are_errors():
    outside = {"rank": 2, "world_size": 2}
    for options in ({"block_size": 0}, {"window": 1.5}, {"seed": -1}, {"world_size": 0}, outside, {"rank": -1}):
        with pytest.raises(LimitError, match="{}={}".format(*next(iter(options.items())))):
            BlockSampler(range(10), **{"block_size": 2, "shuffle": True} | options)
    for indices in ([-1], [0.5], ["a"], [[1]]):
        with pytest.raises(SampleIndexError, match="BlockSampler"):
            BlockSampler(indices, 2, True)


def test_the_order_of_a_billion_samples_takes_no_memory():
    sampler = BlockSampler(range(10**9), 1000, True, window=16, rank=1, world_size=1024)
    tracemalloc.start()
    try:
        taken = list(itertools.islice(sampler, 20_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(taken)) == 20_000
    assert len({sample // 1000 for sample in taken}) < 20 + 2 * 16
    assert len(sampler) == -(-(10**9) // 1024)
    assert peak < 2**24


def test_windows_of_k_among_n_blocks_have_n_over_k_times_the_pairs_of_a_full_shuffle():
    shuffled = np.random.default_rng(0).permutation(64 * 256)
    orders = {window: list(BlockSampler(range(64 * 256), 64, True, window=window)) for window in (1, 16, 64)} | {256: shuffled}
    for window, order in orders.items():
        ratio = same_block(order, 64, 64) / same_block(order, 64, len(order))
        assert ratio == pytest.approx(256 / window, rel=0.1)


@st.composite
def arguments(draw):
    ranks = draw(st.integers(1, 6))
    options = {"shuffle": draw(st.booleans()), "seed": draw(st.integers(-3, 3)), "drop_last": draw(st.booleans())}
    return range(draw(st.integers(1, 40))), {"num_replicas": ranks, "rank": draw(st.integers(0, ranks - 1)), **options}


@given(arguments(), st.integers(0, 3), st.data())
def test_orders_are_those_of_torch_and_a_state_goes_on_where_it_was_taken(given_arguments, epoch, data):
    dataset, options = given_arguments
    torchs = DistributedSampler(dataset, **options)
    sampler, again = (StatefulDistributedSampler(dataset, **options) for _ in range(2))
    assert isinstance(sampler, DistributedSampler)
    for each in (torchs, sampler):
        each.set_epoch(epoch)
    whole = list(torchs)
    assert whole == list(sampler) == list(sampler)
    assert len(torchs) == len(sampler) == len(whole)
    running = iter(sampler)
    taken = list(itertools.islice(running, data.draw(st.integers(0, len(sampler)))))
    state, rest = through_json(sampler.state_dict()), list(running)
    assert taken + rest == whole
    again.load_state_dict(state)
    if data.draw(st.booleans()):
        again.set_epoch(epoch)  # as a training loop does
    assert list(again) == rest
    assert list(again) == whole
    again.load_state_dict(state)
    again.set_epoch(epoch + 1)
    torchs.set_epoch(epoch + 1)
    assert list(again) == list(torchs)


def of_ranks(ranks, state=None, samples=96, **options):
    samplers = [StatefulDistributedSampler(range(samples), ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(1)
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


def take(iterators, count):
    """The next samples of all ranks, step by step, and so in the order of one rank."""
    return [next(iterator) for _ in range(count) for iterator in iterators]


def test_other_numbers_of_ranks_share_what_is_left():
    (whole,) = map(list, of_ranks(1))
    state, came = None, []
    for ranks, steps in ((1, 8), (2, 4), (4, 6), (2, 6), (1, 12), (4, 7), (2, 2)):
        samplers = of_ranks(ranks, state)
        came += take(list(map(iter, samplers)), steps)
        state = through_json(samplers[-1].state_dict())
    assert came == whole
    assert [list(sampler) for sampler in of_ranks(4, state)] == [[]] * 4  # no rank has any left
    (sampler,) = of_ranks(1)
    take([iter(sampler)], 6)
    with pytest.raises(StateError, match="1 ranks have taken 6 samples, which 4 ranks cannot have taken evenly"):
        of_ranks(4, through_json(sampler.state_dict()))
    assert len(of_ranks(2, through_json(sampler.state_dict()))) == 2


def test_states_of_torchdata_are_loaded_for_the_epoch_that_is_set():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.sampler", reason="the states are torchdata's")
    theirs = torchdata.StatefulDistributedSampler(range(30), 2, 1, seed=3)
    theirs.set_epoch(4)
    running = iter(theirs)
    whole = list(itertools.islice(running, 6))
    state = theirs.state_dict()
    whole += running
    ours = StatefulDistributedSampler(range(30), 2, 1, seed=3)
    ours.load_state_dict(state)
    ours.set_epoch(4)
    assert (list(ours), list(ours)) == (whole[6:], whole)
    for wrong in (-1, 16, None, "3"):
        with pytest.raises(StateError, match="is damaged"):
            ours.load_state_dict({"yielded": wrong})


@given(st.integers(0, 3000), st.lists(st.integers(0, 2**70), max_size=4))
def test_every_number_has_one_place(n, key):
    order = Permutation(n, *key)
    numbers = order.at(np.arange(n))
    assert sorted(numbers) == list(range(n)) == list(range(len(order)))
    assert (Permutation(n, *key).at(np.arange(n)) == numbers).all()


class Reversed(RandomSampler):
    def __iter__(self):
        return iter(range(len(self))[::-1])


OURS = [RandomSampler(range(count)) for count in (2, 9, 10)]
OTHERS = [
    RandomSampler(range(7), True), RandomSampler(range(7), generator=torch.Generator()),
    RandomSampler(range(7), num_samples=20), RandomSampler(range(7), num_samples=4), Reversed(range(7)),
    SequentialSampler(range(7)),
]  # fmt: skip


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", [*OURS, *OTHERS])
def test_batches_are_those_of_torch_and_nothing_is_drawn_before_the_first(sampler, drop_last):
    batches = BatchSampler(sampler, 3, drop_last)
    generator = getattr(sampler, "generator", None) or torch.default_generator
    for seed, as_arrays in itertools.product(range(5), (False, True)):
        before = generator.manual_seed(seed).get_state()
        expected, after = list(batches), generator.get_state()
        generator.set_state(before)
        found = loader_order.begin(batches, as_arrays)
        assert (getattr(found, "gi_code", None) is loader_order._shuffled.__code__) == (sampler in OURS)
        assert torch.equal(generator.get_state(), before)
        assert [list(batch) for batch in found] == expected
        assert torch.equal(generator.get_state(), after)
