"""The graph of DataPipes: walked, searched, changed, copied; where its random numbers come from; and the pipes that we add."""

import pickle
import random
import threading

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper, ShardingFilter, Shuffler
from torch.utils.data.datapipes.map import SequenceWrapper

from stocache.errors import GraphError
from stocache.reading import SeedGenerator, find_dps, list_dps, remove_dp, replace_dp, set_graph_random_seed, traverse_dps
from stocache.reading.graph.graph import clone, pipes_of, sources
from tests.support.graphs import COUNT, WARNINGS, HomemadeError, fails, source, square

pytestmark = WARNINGS


class Holder(IterDataPipe):
    def __init__(self, *held):
        self.held = held

    def __iter__(self):
        raise AssertionError("started")
        yield


@pytest.fixture
def chain():
    return IterableWrapper(range(10)).shuffle().sharding_filter().map(square)


@pytest.fixture
def two():
    return [IterableWrapper([1]), IterableWrapper([2])]


def test_pipes_are_listed_from_the_end_and_found_by_their_very_type(chain):
    graph = traverse_dps(chain)
    ((number, (pipe, below)),) = graph.items()
    assert number == id(chain)
    assert pipe is chain
    assert list(below) == [id(chain.datapipe)]
    assert [type(pipe) for pipe in list_dps(graph)] == [Mapper, ShardingFilter, Shuffler, IterableWrapper]
    assert list_dps(graph, exclude_dps=chain.datapipe) == [chain]
    assert find_dps(graph, Shuffler) == [chain.datapipe.source_datapipe]
    assert find_dps(graph, IterDataPipe) == []
    assert len(pipes_of(SequenceWrapper(range(3)).map(square))) == 2
    for wrong in (None, [1], IterableWrapper):
        with pytest.raises(GraphError, match="expected an IterDataPipe or MapDataPipe, got"):
            traverse_dps(wrong)


def test_sources_are_found_in_containers_and_each_is_walked_once(two):
    for held in (two, (*two,), {"one": two[0], "two": {two[1]: 1}}, [{"deep": (two,)}]):
        assert sources(Holder(held)) == two
    pipe = two[0]
    for _ in range(200):  # 2**200 ways through it
        pipe = Holder(pipe, [pipe])
    assert len(pipes_of(pipe)) == 201


def test_a_pipe_is_replaced_for_all_that_read_from_it(two):
    old, new = two
    end = old.map(square).zip(old, old.map(square))
    graph = replace_dp(traverse_dps(end), old, new)
    assert find_dps(graph, IterableWrapper) == [new]
    assert sources(end)[1] is new
    assert list(replace_dp(graph, end, old)) == list(traverse_dps(old))
    holder = Holder([old], {"a": {old}}, (old, frozenset({old})))
    replace_dp(traverse_dps(holder), old, new)
    assert holder.held == ([new], {"a": {new}}, (new, frozenset({new})))


def test_a_pipe_with_one_source_is_removed(chain, two):
    graph = remove_dp(traverse_dps(chain), chain.datapipe)
    assert [type(pipe) for pipe in list_dps(graph)] == [Mapper, Shuffler, IterableWrapper]
    assert list_dps(remove_dp(graph, chain))[0] is chain.datapipe
    end = two[0].zip(two[1])
    for pipe, count in ((two[0], 0), (end, 2)):
        with pytest.raises(GraphError, match=f"has {count} sources, and only a pipe with one can be removed"):
            remove_dp(traverse_dps(end), pipe)


class Remembering(IterDataPipe):
    def __init__(self, datapipe, **held):
        self.datapipe, self.seen, self.numbers = datapipe, [], random.Random(1)
        vars(self).update(held)

    def __iter__(self):
        for value in self.datapipe:
            self.seen.append(value)
            yield value


@pytest.mark.parametrize("held", [{}, {"lock": threading.Lock()}])
def test_a_copy_shares_its_state_only_if_that_cannot_be_copied(held):
    data = list(range(5))
    pipe = Remembering(IterableWrapper(data), **held)
    copy = clone(pipe)
    assert list(copy) == data
    assert pipe.seen == []
    assert copy.datapipe is not pipe.datapipe
    assert (copy.datapipe.iterable is data) == (copy.numbers is not pipe.numbers) == (not held)


def test_seeds_are_a_function_of_seed_purpose_and_worker():
    draws = lambda its: [its.generate_shared_seed(), its.generate_seed(), its.generate_shared_seed()]
    assert draws(SeedGenerator(3)) == draws(SeedGenerator(3)) != draws(SeedGenerator(4))
    assert all(0 <= seed < 2**64 for seed in draws(SeedGenerator(2**64 - 1)))
    generator = SeedGenerator(3)
    one, two = generator.spawn(1), pickle.loads(pickle.dumps(generator)).spawn(2)
    shared = generator.generate_shared_seed()
    assert one.generate_shared_seed() == two.generate_shared_seed() == shared
    assert len({shared, one.generate_seed(), two.generate_seed(), generator.generate_seed()}) == 4
    torch.manual_seed(1)
    first, second = (SeedGenerator().generate_seed() for _ in range(2))
    torch.manual_seed(1)
    assert SeedGenerator().generate_seed() == first != second
    for seed in (-1, 2**64, 1.5, "one"):
        with pytest.raises(ValueError, match=r"must be an integer in \[0, 2\*\*64\)"):
            SeedGenerator(seed)


def test_random_pipes_before_the_shard_have_shared_seeds_and_others_their_own():
    def orders(worker):
        pipe = IterableWrapper(range(100)).shuffle().sharding_filter().shuffle()
        set_graph_random_seed(pipe, SeedGenerator(5).spawn(worker))
        return list(pipe.datapipe), list(pipe)

    (before, after), (same, other) = orders(0), orders(1)
    assert before == same != sorted(before)
    assert after != other


def test_prefetch_delivers_all_in_order_and_raises_what_the_source_does():
    assert list(source().prefetch(3)) == list(range(COUNT))
    assert len(source().prefetch()) == COUNT
    iterator = iter(source().map(fails).prefetch(3))
    assert [next(iterator) for _ in range(13)] == list(range(13))
    with pytest.raises(HomemadeError, match="thirteen"):
        next(iterator)
    with pytest.raises(ValueError, match="buffer_size=0 is less than 1"):
        source().prefetch(0)


def test_unzip_splits_columns():
    rows = IterableWrapper([(i, -i, str(i)) for i in range(5)])
    assert [*map(list, rows.unzip(3, columns_to_skip=[1]))] == [[*range(5)], [*"01234"]]
    with pytest.raises(ValueError, match=r"names columns outside \[0, 3\)"):
        rows.unzip(3, columns_to_skip=[3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_pinning_needs_cuda():
    with pytest.raises(RuntimeError, match="pin_memory needs CUDA"):
        source().pin_memory()
