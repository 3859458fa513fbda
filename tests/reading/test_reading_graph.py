"""The graph of DataPipes: walked, searched, changed, copied; and where its random numbers come from."""

import pickle
import random
import threading
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper, ShardingFilter, Shuffler
from torch.utils.data.datapipes.map import SequenceWrapper

from stocache.errors import GraphError
from stocache.reading import SeedGenerator, find_dps, list_dps, remove_dp, replace_dp, set_graph_random_seed, traverse_dps
from stocache.reading.graph.graph import clone, sources
from stocache.reading.graph.seeds import is_pure
from stocache.system.rng import RngMonitor


class Untouchable:
    """Raises when it is pickled, copied, iterated or compared."""

    def __reduce__(self):
        raise AssertionError("pickled")

    __iter__ = __len__ = __eq__ = __deepcopy__ = __copy__ = __reduce__
    __hash__ = None


class Holder(IterDataPipe):
    """A pipe with sources of all kinds."""

    def __init__(self, *held):
        self.held = held

    def __iter__(self):
        raise AssertionError("started")
        yield


class Pair(NamedTuple):
    left: object
    right: object


def double(value):
    return 2 * value


@pytest.fixture
def chain():
    return IterableWrapper(range(10)).shuffle().sharding_filter().map(double)


def test_a_chain_is_listed_from_its_end(chain):
    assert [type(pipe) for pipe in list_dps(traverse_dps(chain))] == [Mapper, ShardingFilter, Shuffler, IterableWrapper]


def test_the_graph_names_each_pipe_with_its_sources(chain):
    ((number, (pipe, below)),) = traverse_dps(chain).items()
    assert number == id(chain)
    assert pipe is chain
    assert list(below) == [id(chain.datapipe)]


@pytest.mark.parametrize("wrap", [list, tuple, lambda its: {"one": its[0], "two": {its[1]: 1}}, lambda its: [{"deep": (its,)}]])
def test_sources_are_found_in_containers(wrap):
    pipes = [IterableWrapper([1]), IterableWrapper([2])]
    assert sources(Holder(wrap(pipes))) == pipes


def test_a_container_that_holds_itself_is_walked_once():
    pipe, endless = IterableWrapper([1]), []
    endless += [endless, endless, pipe]
    assert sources(Holder(endless)) == [pipe]


def test_a_diamond_is_linear_and_lists_shared_pipes_once():
    pipe = IterableWrapper(range(3))
    for _ in range(200):  # 2**200 ways through it
        pipe = Holder(pipe, [pipe])
    assert len(list_dps(traverse_dps(pipe))) == 201


def test_a_cycle_ends():
    first = Holder()
    second = Holder(first)
    first.held = (second,)
    assert list_dps(traverse_dps(second)) == [second, first]


def test_walking_neither_pickles_nor_starts_nor_changes_a_pipe():
    pipe = Holder(Untouchable(), IterableWrapper([Untouchable()]))
    before = dict(vars(pipe))
    assert len(list_dps(traverse_dps(pipe))) == 2
    assert vars(pipe) == before


def test_threads_may_walk_at_the_same_time(chain):
    found = []
    threads = [threading.Thread(target=lambda: found.extend(len(traverse_dps(chain)) for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 800


def test_a_map_style_pipe_is_walked_too():
    pipe = SequenceWrapper(range(3)).map(double)
    assert len(list_dps(traverse_dps(pipe))) == 2


@pytest.mark.parametrize("wrong", [None, [1], IterableWrapper])
def test_what_is_no_pipe_is_refused(wrong):
    with pytest.raises(GraphError, match="expected an IterDataPipe or MapDataPipe, got"):
        traverse_dps(wrong)


def test_pipes_are_found_by_their_very_type(chain):
    assert find_dps(traverse_dps(chain), Shuffler) == [chain.datapipe.source_datapipe]
    assert find_dps(traverse_dps(chain), IterDataPipe) == []


def test_excluded_pipes_are_left_out_with_what_leads_to_them(chain):
    graph = traverse_dps(chain)
    assert list_dps(graph, exclude_dps=chain.datapipe) == [chain]
    assert list_dps(graph, exclude_dps=[chain.datapipe, chain]) == []


def test_a_pipe_is_replaced_for_all_that_read_from_it():
    old, new = IterableWrapper([1]), IterableWrapper([2])
    end = old.map(double).zip(old, old.map(double))
    graph = replace_dp(traverse_dps(end), old, new)
    assert find_dps(graph, IterableWrapper) == [new]
    assert sources(end)[1] is new


def test_the_end_of_a_graph_is_replaced(chain):
    new = IterableWrapper([2])
    assert list(traverse_dps(new)) == list(replace_dp(traverse_dps(chain), chain, new))


def test_a_pipe_is_removed(chain):
    graph = remove_dp(traverse_dps(chain), chain.datapipe)
    assert [type(pipe) for pipe in list_dps(graph)] == [Mapper, Shuffler, IterableWrapper]
    assert list_dps(remove_dp(graph, chain))[0] is chain.datapipe


def test_a_source_and_a_junction_are_not_removed():
    one, two = IterableWrapper([1]), IterableWrapper([2])
    end = one.zip(two)
    for pipe, count in ((one, 0), (end, 2)):
        with pytest.raises(GraphError, match=f"has {count} sources, and only a pipe with one can be removed"):
            remove_dp(traverse_dps(end), pipe)


def test_a_named_tuple_of_pipes_stays_one():
    old, new = IterableWrapper([1]), IterableWrapper([2])
    end = Holder(Pair(old, [old]))
    replace_dp(traverse_dps(end), old, new)
    assert end.held == (Pair(new, [new]),)


class Remembering(IterDataPipe):
    """A pipe with a state of its own, and a function that does not pickle."""

    def __init__(self, datapipe):
        self.datapipe, self.seen, self.numbers = datapipe, [], random.Random(1)
        self.function = lambda value: value

    def __iter__(self):
        for value in self.datapipe:
            self.seen.append(value)
            yield self.function(value)


def test_a_copy_shares_no_state_but_data():
    data = list(range(5))
    pipe = Remembering(IterableWrapper(data))
    copy = clone(pipe)
    assert list(copy) == data
    assert pipe.seen == []
    assert copy.numbers is not pipe.numbers
    assert copy.datapipe is not pipe.datapipe
    assert copy.datapipe.iterable is data


def test_a_copy_of_what_cannot_be_copied_has_pipes_of_its_own():
    pipe = Remembering(IterableWrapper([1, 2]))
    pipe.lock = threading.Lock()
    copy = clone(pipe)
    assert list(copy) == [1, 2]
    assert pipe.seen == []
    assert copy.datapipe is not pipe.datapipe
    assert copy.lock is pipe.lock


def test_a_copy_is_made_of_a_pipe_that_refuses_to_be_pickled():
    class Refusing(Remembering):
        def __getstate__(self):
            raise TypeError("holds a connection")

    pipe = Refusing(IterableWrapper([1, 2]))
    copy = clone(pipe)
    assert list(copy) == [1, 2]
    assert copy is not pipe
    assert copy.datapipe is not pipe.datapipe


# ---------------------------------------------------------------------------------------------------- seeds


def test_seeds_are_a_function_of_seed_and_purpose():
    def draws(generator):
        return [generator.generate_shared_seed(), generator.generate_seed(), generator.generate_shared_seed()]

    assert draws(SeedGenerator(3)) == draws(SeedGenerator(3)) != draws(SeedGenerator(4))
    assert all(0 <= seed < 2**64 for seed in draws(SeedGenerator(2**64 - 1)))
    assert len(set(draws(SeedGenerator(3)))) == 3


def test_workers_share_the_shared_seeds_only():
    generator = SeedGenerator(3)
    generator.generate_shared_seed()
    one, two = generator.spawn(1), generator.spawn(2)
    shared = generator.generate_shared_seed()
    assert one.generate_shared_seed() == two.generate_shared_seed() == shared
    assert len({one.generate_seed(), two.generate_seed(), generator.generate_seed(), one.spawn(2).generate_seed()}) == 4


def test_a_generator_becomes_that_of_a_rank_in_place():
    generator, other = SeedGenerator(3), SeedGenerator(3)
    assert generator.spawn(1, inplace=True) is generator
    assert generator.generate_seed() == other.spawn(1).generate_seed()
    assert pickle.loads(pickle.dumps(generator)).generate_seed() == generator.generate_seed()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "one"])
def test_a_seed_is_an_unsigned_integer_of_64_bits(seed):
    with pytest.raises(ValueError, match=r"must be an integer in \[0, 2\*\*64\)"):
        SeedGenerator(seed)


def test_there_is_no_negative_worker():
    with pytest.raises(ValueError, match="worker_id=-1 is negative"):
        SeedGenerator(1).spawn(-1)


def test_without_a_seed_torch_gives_one():
    torch.manual_seed(1)
    first = SeedGenerator().generate_seed()
    assert SeedGenerator().generate_seed() != first
    torch.manual_seed(1)
    assert SeedGenerator().generate_seed() == first


def test_random_pipes_before_the_shard_have_shared_seeds_and_others_their_own():
    def orders(worker):
        pipe = IterableWrapper(range(100)).shuffle().sharding_filter().shuffle()
        set_graph_random_seed(pipe, SeedGenerator(5).spawn(worker))
        return list(pipe.datapipe), list(pipe)

    (before, after), (same, other) = orders(0), orders(1)
    assert before == same != sorted(before)
    assert after != other


def test_watch_sees_every_draw():
    for draw in (random.random, np.random.rand, lambda: torch.rand(1), lambda: np.random.normal(size=3)):
        watch = RngMonitor()
        assert not watch.changed()
        draw()
        assert watch.changed()
    previous = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        watch = RngMonitor()
        np.random.rand()
        assert watch.changed()
    finally:
        np.random.set_bit_generator(previous)


class Noisy:
    def __init__(self):
        self.parts = {"inner": [np.random.default_rng(1)]}

    def __call__(self, value):
        return value


def test_a_function_with_a_generator_in_it_is_not_pure():
    numbers = random.Random(1)
    assert is_pure(double)
    assert is_pure(partial(max, 3))
    assert not is_pure(lambda value: value + numbers.random())
    assert not is_pure(Noisy())
    assert not is_pure(Noisy().__call__)
    assert not is_pure(partial(double, torch.Generator()))
