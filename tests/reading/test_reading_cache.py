"""The shared cache within a graph: hits skip reading and mapping, values and order stay those of the graph without."""

import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper

from stocache.errors import DatasetError, LimitError, SampleIndexError
from stocache.reading import (
    CachingReadingService,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
    SharedCacher,
    find_dps,
    traverse_dps,
)
from tests.support.graphs import (
    COUNT,
    Counting,
    elements,
    loader,
    no_third,
    noise,
    numbers,
    service,
    source,
    square,
    tensor,
    twice,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")


def cached(graph, workers, limit=0.01, seed=5, **options):
    engine = MultiProcessingReadingService(workers, "fork") if workers else InProcessReadingService()
    dataloader = DataLoader2(graph, reading_service=SequentialReadingService(CachingReadingService(limit, **options), engine))
    dataloader.seed(seed)
    return dataloader


def cache_of(dataloader):
    return dataloader.reading_service.reading_services[0].cache


def random_tensor(value):
    return torch.full((3, 4), value), np.full(value % 5 + 1, value)


CACHED = {
    "before a shuffle": lambda count: source().map(count).map(random_tensor).shuffle().sharding_filter(),
    "then mapped": lambda count: source().map(count).map(random_tensor).shuffle().sharding_filter().map(noise).batch(3),
    "after the shard": lambda count: source().sharding_filter().map(count).map(random_tensor).shuffle(buffer_size=6),
    "before a filter": lambda count: source().map(count).filter(no_third).shuffle().sharding_filter(),
    "after a filter": lambda count: source().filter(no_third).map(count).shuffle().sharding_filter(),
    "in order": lambda count: source().sharding_filter().map(count).map(random_tensor).batch(2),
    "dispatched": lambda count: source().map(count).map(random_tensor).shuffle().sharding_round_robin_dispatch(),
    "dispatched, in order": lambda count: source().sharding_round_robin_dispatch().map(count).map(random_tensor),
    "joined": lambda count: source().map(count).shuffle().sharding_filter().zip(source().sharding_filter()),
}


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("name", CACHED)
def test_a_cached_graph_gives_what_it_gave_without_and_works_once(name, workers, caplog):
    count = Counting()
    options = {"multiprocessing_context": "fork"} if workers else {}
    numbers(1)
    with loader(CACHED[name](count), workers, **options) as dataloader:
        expected = [elements(dataloader) for _ in range(3)]
    length = COUNT - len(range(0, COUNT, 3)) if name == "after a filter" else COUNT
    count.taken()
    numbers(1)
    with caplog.at_level(logging.WARNING, "stocache"), cached(CACHED[name](count), workers, dataset_len=COUNT) as dataloader:
        assert elements(dataloader) == expected[0]
        # before a filter, each worker looks at all elements, and may be the first to
        assert length <= count.taken() <= (length * max(1, workers) if name == "before a filter" else length)
        assert [elements(dataloader) for _ in range(2)] == expected[1:]
        assert count.taken() == 0
    assert caplog.text == ""


def test_a_cache_of_half_the_bytes_serves_half():
    count = Counting()
    graph = source(400).map(count).map(large_row).shuffle().sharding_filter()
    with cached(graph, 2, limit=400 * 4096 / 2 / 2**30) as dataloader:
        first = sorted(int(element[0]) for element in dataloader)
        assert first == list(range(400))
        count.taken()
        assert sorted(int(element[0]) for element in dataloader) == first
        missed = count.taken()
        resident = cache_of(dataloader).stats().filled
        assert missed == 400 - resident
        assert 150 < resident < 200


def large_row(value):
    return torch.full((1024,), float(value))


def test_the_last_chain_before_the_first_random_pipe_is_taken():
    graph = source().map(square).batch(1).map(len).shuffle().sharding_filter().map(twice)
    with cached(graph, 0) as dataloader:
        assert sorted(dataloader) == [[1, -1]] * COUNT
        (cacher,) = find_dps(traverse_dps(dataloader.datapipe), SharedCacher)
        maps = [pipe.fn for pipe in find_dps(traverse_dps(dataloader.datapipe), Mapper)]
        assert maps == [twice, square]
        assert cacher.cache is cache_of(dataloader)


def test_where_there_is_no_such_chain_a_warning_says_so(caplog):
    for graph, reason in (
        (source().shuffle().sharding_filter().map(square), "no map comes before the first random pipe"),
        (source().sharding_filter().filter(no_third).map(square), "are sharded already. Pass key_fn="),
        (source().sharding_filter().zip(source()).map(first), "are sharded already. Pass key_fn="),
        (source().map(Own()).shuffle(), "no map comes before the first random pipe"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "stocache"), cached(graph, 2, dataset_len=COUNT) as dataloader:
            assert len(list(dataloader)) > 0
            assert cache_of(dataloader) is None
        assert "nothing is cached" in caplog.text
        assert reason in caplog.text


def first(pair):
    return pair[0]


def test_without_a_length_a_warning_asks_for_it(caplog):
    with caplog.at_level(logging.WARNING, "stocache"), cached(source().filter(no_third).map(square).shuffle(), 0) as dataloader:
        assert len(list(dataloader)) > 0
        assert cache_of(dataloader) is None
    assert "nothing is cached: FilterIterDataPipe has no length. Pass dataset_len=" in caplog.text


class Own:
    """A map with a generator of its own."""

    def __init__(self):
        self.numbers = random.Random(1)

    def __call__(self, value):
        return value + self.numbers.random()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_made_with_random_numbers_is_not_kept(workers, caplog):
    numbers(1)
    with (
        caplog.at_level(logging.WARNING, "stocache"),
        cached(source().map(noise).shuffle().sharding_filter(), workers) as dataloader,
    ):
        first, second = sorted(dataloader), sorted(dataloader)
        assert cache_of(dataloader).stats().filled == 0
    assert [its[0] for its in first] == list(range(COUNT))
    assert first != second
    if not workers:
        assert "noise draw random numbers, so their results are not cached" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_key_function_finds_elements_wherever_they_come_from(workers):
    count = Counting()
    names = [f"name {number}" for number in range(COUNT)]
    key_of = {name: number for number, name in enumerate(names)}

    def graph():
        return IterableWrapper(names).shuffle().sharding_filter().map(count).map(str.upper).map(twice_named)

    options = {"multiprocessing_context": "fork"} if workers else {}
    with loader(graph(), workers, **options) as dataloader:
        expected = [elements(dataloader) for _ in range(2)]
    count.taken()
    explicit = graph().shared_cache(key_of.__getitem__, 0.01, dataset_len=COUNT)
    assert find_dps(traverse_dps(explicit), Mapper) == []
    assert len(explicit) == COUNT
    with loader(explicit, workers, **options) as dataloader:
        assert elements(dataloader) == expected[0]
        assert count.taken() == COUNT
        assert elements(dataloader) == expected[1]
        assert count.taken() == 0


def twice_named(name):
    return {"name": name, "length": torch.tensor(len(name))}


def test_the_cache_of_a_service_may_have_a_key_function():
    count = Counting()
    with cached(source().map(count).shuffle().sharding_filter(), 2, key_fn=reverse) as dataloader:
        first = elements(dataloader)
        assert elements(dataloader) != first
        assert count.taken() == COUNT


def reverse(value):
    return COUNT - 1 - value


def test_the_replay_of_a_resumed_epoch_is_hits():
    count = Counting()
    graph = source().shuffle().sharding_filter().map(count).map(random_tensor).shared_cache(int, 0.01, dataset_len=COUNT)
    graph = graph.shuffle(buffer_size=9)  # for which they must be made again
    with loader(graph, 2, multiprocessing_context="fork") as dataloader:
        elements(dataloader)
        iterator = iter(dataloader)
        for _ in range(13):
            next(iterator)
        state, rest = dataloader.state_dict(), elements(iterator)
    count.taken()
    with loader(graph, 2, multiprocessing_context="fork") as dataloader:
        dataloader.load_state_dict(state)
        assert elements(dataloader) == rest
    assert count.taken() == 0


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_all_start_methods_share_the_cache(method):
    graph = source().map(tensor).shuffle().sharding_filter()
    services = SequentialReadingService(CachingReadingService(0.01), MultiProcessingReadingService(2, method))
    with DataLoader2(graph, reading_service=services) as dataloader:
        dataloader.seed(5)
        first = [elements(dataloader), elements(dataloader)]
        stats = cache_of(dataloader).stats()
        assert (stats.fills, stats.hits) == (COUNT, COUNT)
    with DataLoader2(graph, reading_service=service(0)) as dataloader:
        dataloader.seed(5)
        assert [elements(dataloader), elements(dataloader)] == first


def test_a_named_cache_is_found_by_the_next_loader():
    count = Counting()
    name = "reading-test"
    kept = cached(source().map(count).shuffle(), 0, name=name)
    with kept:
        first = elements(kept)
        with cached(source().map(count).shuffle(), 0, name=name) as dataloader:
            assert elements(dataloader) == first
    assert count.taken() == COUNT


def test_a_source_that_is_longer_than_it_said_is_delivered_whole():
    with cached(source().map(square).shuffle(), 0, dataset_len=10) as dataloader:
        assert sorted(dataloader) == sorted(dataloader) == [value * value for value in range(COUNT)]


def test_wrong_arguments_are_refused():
    with pytest.raises(DatasetError, match="needs the number of keys"):
        source().filter(no_third).shared_cache(int)
    with pytest.raises(LimitError, match="size_limit_gib"):
        source().shared_cache(int, -1)
    with pytest.raises(SampleIndexError, match="40"):
        list(source().shared_cache(lambda value: COUNT, 0.01))
    with pytest.raises(TypeError, match="integer"):
        list(source().shared_cache(str, 0.01))
    with pytest.raises(LimitError, match="size_limit_gib"):
        iter(cached(source().map(square).shuffle(), 0, limit="much"))
