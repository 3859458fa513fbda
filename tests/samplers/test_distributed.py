"""StatefulDistributedSampler: the orders of torch, the contract of torchdata, and other numbers of ranks."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from stocache import StateError, StatefulDistributedSampler

pytestmark = pytest.mark.quick


def saved(value):
    return json.loads(json.dumps(value.state_dict()))


@st.composite
def arguments(draw):
    ranks = draw(st.integers(1, 6))
    options = {"shuffle": draw(st.booleans()), "seed": draw(st.integers(-3, 3)), "drop_last": draw(st.booleans())}
    return range(draw(st.integers(1, 40))), {"num_replicas": ranks, "rank": draw(st.integers(0, ranks - 1)), **options}


@given(arguments(), st.integers(0, 3), st.data())
def test_orders_are_those_of_torch_and_a_state_goes_on_where_it_was_taken(given_arguments, epoch, data):
    dataset, options = given_arguments
    torchs, sampler, again = (
        DistributedSampler(dataset, **options),
        *(StatefulDistributedSampler(dataset, **options) for _ in range(2)),
    )
    assert isinstance(sampler, DistributedSampler)
    for each in (torchs, sampler):
        each.set_epoch(epoch)
    whole = list(torchs)
    assert whole == list(sampler) == list(sampler)
    assert len(torchs) == len(sampler) == len(whole)
    running = iter(sampler)
    taken = list(itertools.islice(running, data.draw(st.integers(0, len(sampler)))))
    state, rest = saved(sampler), list(running)
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
        state = saved(samplers[-1])
    assert came == whole
    assert [list(sampler) for sampler in of_ranks(4, state)] == [[]] * 4  # no rank has any left
    (sampler,) = of_ranks(1)
    take([iter(sampler)], 6)
    with pytest.raises(StateError, match="1 ranks have taken 6 samples, which 4 ranks cannot have taken evenly"):
        of_ranks(4, saved(sampler))
    assert len(of_ranks(2, saved(sampler))) == 2


@pytest.mark.parametrize(("drop_last", "left"), [(False, {1: 0, 2: 0, 3: 0, 4: 0}), (True, {1: 3, 2: 2, 4: 0})])
def test_an_epoch_that_does_not_divide_ends_for_any_number_of_ranks(drop_last, left):
    before = of_ranks(4, samples=23, drop_last=drop_last)[1]  # of which 20 are taken, or all
    running = iter(before)
    list(itertools.islice(running, len(before)))
    state = saved(before)
    assert {ranks: sum(map(len, map(list, of_ranks(ranks, state, 23, drop_last=drop_last)))) for ranks in left} == left


def test_states_of_torchdata_are_loaded_for_the_epoch_that_is_set():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.sampler", reason="the states are torchdata's")
    theirs = torchdata.StatefulDistributedSampler(range(30), 2, 1, seed=3)
    theirs.set_epoch(4)
    running = iter(theirs)
    whole = list(itertools.islice(running, 6))
    state = theirs.state_dict()
    whole += running
    for early in (False, True):
        ours = StatefulDistributedSampler(range(30), 2, 1, seed=3)
        ours.set_epoch(4 * early)
        ours.load_state_dict(state)
        ours.set_epoch(4)
        assert (list(ours), list(ours)) == (whole[6:], whole)
    for wrong in (-1, 16, None, "3", [1], 1.5):
        with pytest.raises(StateError, match="is damaged"):
            ours.load_state_dict({"yielded": wrong})
