"""The shared cache within a graph, with or without a disk behind it: hits skip reading and mapping, values and order stay."""

import logging
from functools import partial

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper

from stocache.errors import DatasetError, DiskError, SampleIndexError
from stocache.reading import CachingReadingService, SharedCacher, find_dps, traverse_dps
from tests.support import graphs
from tests.support.graphs import COUNT, WARNINGS, Counting, elements, no_third, noise, numbers, source, square, tensor

pytestmark = [*WARNINGS, pytest.mark.unaudited]


@pytest.fixture
def count():
    return Counting()


def cached(graph, workers=0, limit="16MB", method="fork", **options):
    caching = [] if limit is None else [CachingReadingService(limit, **options)]
    return graphs.loader(graph, workers, 5, *caching, multiprocessing_context=method)


def cache_of(dataloader):
    return dataloader.reading_service.reading_services[0].cache


def run(graph, workers=0, limit=None, **options):
    """Return three epochs of a graph, and the counts of memory and disk if it is cached."""
    with cached(graph, workers, limit, **options) as dataloader:
        epochs = [elements(dataloader) for _ in range(3)]
    if limit is None:
        return epochs
    caching = dataloader.reading_service.reading_services[0]
    caches = [cache for cache in (caching.cache, caching.disk_cache) if cache is not None]
    stats = [cache.stats() for cache in caches]
    for cache in caches:
        cache.close()
    return epochs, *stats


CACHED = {
    "shuffled": lambda count: source().map(count).map(tensor).shuffle().sharding_filter(),
    "then mapped": lambda count: source().map(count).map(tensor).shuffle().sharding_filter().map(noise).batch(3),
    "after the shard": lambda count: source().sharding_filter().map(count).map(tensor).shuffle(buffer_size=6),
    "before a filter": lambda count: source().map(count).filter(no_third).shuffle().sharding_filter(),
    "after a filter": lambda count: source().filter(no_third).map(count).shuffle().sharding_filter(),
    "in order": lambda count: source().sharding_filter().map(count).map(tensor).batch(2),
    "dispatched": lambda count: source().map(count).map(tensor).shuffle().sharding_round_robin_dispatch(),
    "joined": lambda count: source().map(count).shuffle().sharding_filter().zip(source().sharding_filter()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("name", CACHED)
def test_a_cached_graph_gives_what_it_gave_without_and_works_once(count, name, workers, caplog):
    numbers(1)
    expected = run(CACHED[name](count), workers)
    length = COUNT - len(range(0, COUNT, 3)) if name == "after a filter" else COUNT
    count.taken()
    numbers(1)
    with caplog.at_level(logging.WARNING, "stocache"):
        assert run(CACHED[name](count), workers, "16MB", dataset_len=COUNT)[0] == expected
    # before a filter, each worker looks at all elements, and may be the first to
    assert length <= count.taken() <= (length * max(1, workers) if name == "before a filter" else length)
    assert caplog.text == ""


def test_the_last_chain_before_the_first_random_pipe_is_taken():
    with cached(source().map(square).batch(1).map(len).shuffle().sharding_filter().map(str)) as dataloader:
        assert list(dataloader) == ["1"] * COUNT
        graph = traverse_dps(dataloader.datapipe)
        (cacher,) = find_dps(graph, SharedCacher)
        assert [pipe.fn for pipe in find_dps(graph, Mapper)] == [str, square]
        assert cacher.cache is cache_of(dataloader)


NOISY = graphs.Stateful(), graphs.Stateful().__call__, partial(torch.rand, 1, generator=torch.Generator())
UNCACHED = [
    (lambda: source().shuffle().sharding_filter().map(square), "no map comes before the first random pipe"),
    *((lambda noisy=noisy: source().map(noisy).shuffle(), "no map comes before the first random pipe") for noisy in NOISY),
    (lambda: source().sharding_filter().filter(no_third).map(square), "are sharded already. Pass key_fn="),
    (lambda: source().sharding_filter().zip(source()).map(len), "are sharded already. Pass key_fn="),
    (lambda: source().filter(no_third).map(square).shuffle(), "FilterIterDataPipe has no length. Pass dataset_len="),
]


@pytest.mark.parametrize(("graph", "reason"), UNCACHED)
def test_where_there_is_no_such_chain_or_no_length_a_warning_says_so(graph, reason, caplog):
    options = {} if "length" in reason else {"dataset_len": COUNT}
    with caplog.at_level(logging.WARNING, "stocache"), cached(graph(), **options) as dataloader:
        assert len(list(dataloader)) > 0
        assert cache_of(dataloader) is None
    assert "nothing is cached" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize(("workers", "on_disk"), [(0, False), (2, False), (0, True)])
def test_what_is_made_with_random_numbers_is_not_kept(workers, on_disk, tmp_path, caplog):
    options = options_of(tmp_path) if on_disk else {"limit": "4MB"}
    with caplog.at_level(logging.WARNING, "stocache"):
        (one, two, _), *stats = run(source().map(noise).shuffle().sharding_filter(), workers, **options)
    assert [each.filled for each in stats] == [0] * (1 + on_disk)
    assert not set(one) & set(two)
    assert workers or "noise draw random numbers, so their results are not cached" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_key_function_finds_elements_wherever_they_come_from(count, workers):
    key_of = {f"name {number}": number for number in range(COUNT)}
    graph = IterableWrapper([*key_of]).shuffle().sharding_filter().map(count).map(str.upper)
    expected = run(graph, workers)
    count.taken()
    explicit = graph.shared_cache(key_of.__getitem__, "4MB", dataset_len=COUNT)
    assert find_dps(traverse_dps(explicit), Mapper) == []
    assert len(explicit) == COUNT
    assert run(explicit, workers) == expected
    assert count.taken() == COUNT


def test_the_cache_of_a_service_may_have_a_name(count):
    with cached(source().map(count).shuffle(), name="reading-test") as kept:
        found = [elements(kept), elements(kept)]
        assert found[0] != found[1]
        with cached(source().map(count).shuffle(), name="reading-test") as dataloader:
            assert [elements(dataloader), elements(dataloader)] == found
    assert count.taken() == COUNT


def test_what_cannot_be_cached_and_a_source_that_is_longer_than_it_said_are_delivered_whole():
    with cached(source().map(square).shuffle(), dataset_len=10) as dataloader:
        assert sorted(dataloader) == sorted(dataloader) == [value * value for value in range(COUNT)]
    with cached(source().map(type)) as dataloader:
        assert list(dataloader) == [int] * COUNT
        assert cache_of(dataloader).stats().filled == 0


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: source().filter(no_third).shared_cache(int), DatasetError, "needs the number of keys"),
    (lambda: list(source().shared_cache(lambda value: COUNT, 0.01)), SampleIndexError, "40"),
    (lambda: list(source().shared_cache(str, 0.01)), TypeError, "integer"),
    (lambda: run(source().map(tensor), **options_of(__file__)), DiskError, r"Not a directory\. Give a folder"),
])  # fmt: skip
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def options_of(folder, memory=0, limit="4MB", fingerprint="1"):
    return {"limit": memory, "disk": folder, "disk_limit": limit, "fingerprint": fingerprint}


@pytest.mark.parametrize(
    ("name", "workers", "memory"), [("shuffled", 0, "4MB"), ("after the shard", 2, "4KB"), ("dispatched", 2, 0)]
)
def test_two_runs_of_three_epochs_run_the_maps_once(count, name, workers, memory, tmp_path):
    expected = run(CACHED[name](count), workers)
    count.taken()
    for calls in (COUNT, 0):
        found, in_memory, on_disk = run(CACHED[name](count), workers, **options_of(tmp_path, memory))
        assert found == expected
        assert count.taken() == calls == on_disk.misses
        assert on_disk.filled == COUNT  # once the loader is shut down
        assert in_memory.filled == {0: 0, "4KB": in_memory.filled, "4MB": COUNT}[memory]
        assert (memory == "4KB") is (0 < in_memory.filled < COUNT)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_all_start_methods_give_the_same_and_share_the_caches(count, method, tmp_path):
    expected = run(CACHED["dispatched"](count))
    count.taken()
    for workers, calls in ((2, COUNT), (0, 0)):
        assert run(CACHED["dispatched"](count), workers, method=method, **options_of(tmp_path, "4KB"))[0] == expected
        assert count.taken() == calls
