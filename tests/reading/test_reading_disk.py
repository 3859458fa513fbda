"""The cache of a graph with a disk behind it: values as without, and each map runs once in the life of the data."""

import logging
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

from stocache.disk.samples_file import SamplesFile
from stocache.errors import DiskError, LimitError
from stocache.reading import (
    CachingReadingService,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)
from tests.support.equality import same
from tests.support.graphs import COUNT, Counting, noise, source, tensor

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")

TIERS = [0, "4KB", "4MB"]  # of memory: nothing, a part, all


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


def run(graph, workers=0, method="fork", **options):
    """Return three epochs of a graph, and the counts of memory and disk; with ``options`` it is cached."""
    engine = MultiProcessingReadingService(workers, method) if workers else InProcessReadingService()
    services = [CachingReadingService(**options)] if options else []
    with DataLoader2(graph, reading_service=SequentialReadingService(*services, engine)) as loader:
        loader.seed(5)
        epochs = [list(loader) for _ in range(3)]
        caching = loader.reading_service.reading_services[0]
    if not services:
        return epochs
    stats = caching.cache.stats(), caching.disk_cache.stats()
    caching.cache.close()
    caching.disk_cache.close()
    return epochs, *stats


def options_of(folder, memory=0, limit="4MB", fingerprint="1", **options):
    return {"size_limit_gib": memory, "disk": folder, "disk_limit": limit, "fingerprint": fingerprint} | options


GRAPHS = {
    "shuffled": lambda count: source().map(count).map(tensor).shuffle().sharding_filter(),
    "sharded": lambda count: source().sharding_filter().map(count).map(tensor),
    "dispatched": lambda count: source().map(count).map(tensor).shuffle().sharding_round_robin_dispatch(),
}


@pytest.mark.parametrize("memory", TIERS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_three_runs_of_three_epochs_run_the_maps_once(name, workers, memory, folder):
    count = Counting()
    expected = run(GRAPHS[name](count), workers)
    count.taken()
    for calls in (COUNT, 0, 0):
        found, in_memory, on_disk = run(GRAPHS[name](count), workers, **options_of(folder, memory))
        assert same(found, expected)
        assert count.taken() == calls == on_disk.misses
        assert in_memory.filled == {0: 0, "4KB": in_memory.filled, "4MB": COUNT}[memory]
        assert (memory == "4KB") is (0 < in_memory.filled < COUNT)


def test_spawned_workers_use_the_disk(folder):
    count = Counting()
    expected = run(GRAPHS["shuffled"](count))
    count.taken()
    for workers, calls in ((2, COUNT), (0, 0)):
        assert same(run(GRAPHS["shuffled"](count), workers, "spawn", **options_of(folder, "4KB"))[0], expected)
        assert count.taken() == calls


def number_of(value):
    return value


def test_shared_cache_of_a_graph_takes_a_disk(folder):
    count = Counting()

    def graph(**options):
        pipe = source().shuffle().sharding_filter().map(count).map(tensor)
        return pipe.shared_cache(number_of, 0, dataset_len=COUNT, **options) if options else pipe

    expected = run(graph())
    count.taken()
    for calls in (COUNT, 0):
        pipe = graph(disk=folder, disk_limit="4MB", fingerprint="1")
        assert same(run(pipe), expected)
        assert count.taken() == calls
        copied = pickle.loads(pickle.dumps(pipe))
        assert copied.disk_cache.stats() == pipe.disk_cache.stats()
        for each in (pipe, copied):
            each.cache.close()
            each.disk_cache.close()
    assert graph(admission="all").disk_cache is None


def test_results_with_random_numbers_are_not_kept(folder, caplog):
    with caplog.at_level(logging.WARNING, "stocache"):
        torch.manual_seed(0)
        found, in_memory, on_disk = run(source().map(noise).shuffle(), **options_of(folder, "4MB"))
    assert "noise draw random numbers, so their results are not cached" in caplog.text
    assert in_memory.filled == on_disk.filled == 0
    assert len({element[2] for epoch in found for element in epoch}) > 2 * COUNT


def test_another_fingerprint_or_length_makes_the_folder_anew(folder, caplog):
    count = Counting()
    for number, (fingerprint, length) in enumerate([("1", COUNT), ("2", COUNT), ("2", COUNT), ("3", 2 * COUNT)]):
        caplog.clear()
        found = run(source(length).map(count).map(tensor), **options_of(folder, fingerprint=fingerprint))[0]
        assert [element["value"][0, 0] for element in found[2]] == list(range(length))
        assert count.taken() == (0 if number == 2 else length)
        assert ("was left behind for other data" in caplog.text) is (number in (1, 3))


def test_what_cannot_be_a_disk_is_refused_at_once(folder):
    folder.touch()
    with pytest.raises(DiskError, match=r"is a file or below one\. Give a folder of its own"):
        run(source().map(tensor), **options_of(folder))
    with pytest.raises(LimitError, match="disk and disk_limit go together"):
        source().map(tensor).shared_cache(number_of, 0, disk=folder)


# ---------------------------------------------------------------------------------------------------- disks that fail


def test_a_full_disk_keeps_what_it_has_room_for(folder):
    count = Counting()
    expected = run(GRAPHS["shuffled"](count))
    for _ in range(3):
        count.taken()
        found, _, stats = run(GRAPHS["shuffled"](count), 2, **options_of(folder, limit=f"{16 * COUNT + 4096 + 5000}B"))
        assert same(found, expected)
    assert 5 < stats.filled < COUNT
    assert count.taken() == 3 * (COUNT - stats.filled)


@pytest.mark.parametrize("failing", ["write", "read"])
def test_a_disk_that_fails_is_reported_once(failing, folder, monkeypatch, caplog):
    def fail(*_):
        raise OSError(5, "Input/output error")

    expected = run(GRAPHS["shuffled"](Counting()))
    if failing == "read":
        run(GRAPHS["shuffled"](Counting()), **options_of(folder))
    monkeypatch.setattr(SamplesFile, failing, fail)
    with caplog.at_level(logging.WARNING, "stocache"):
        assert same(run(GRAPHS["shuffled"](Counting()), **options_of(folder))[0], expected)
    assert caplog.text.count("the disk cache ") == 1
    assert ("takes no more samples" if failing == "write" else "has lost samples") in caplog.text


def test_a_folder_that_is_deleted_under_way_is_made_anew_by_the_next_run(folder):
    count = Counting()
    services = SequentialReadingService(CachingReadingService(**options_of(folder)), InProcessReadingService())
    with DataLoader2(GRAPHS["sharded"](count), reading_service=services) as loader:
        expected = list(loader)
        shutil.rmtree(folder)
        assert same(list(loader), expected)
    assert count.taken() == COUNT
    for calls in (COUNT, 0):
        assert same(run(GRAPHS["sharded"](count), **options_of(folder))[0][0], expected)
        assert count.taken() == calls


def test_a_damaged_sample_is_made_again_and_kept(folder):
    count = Counting()
    expected = run(GRAPHS["shuffled"](count), **options_of(folder))[0]
    at, nbytes = np.frombuffer((folder / "index").read_bytes(), "<u8").reshape(-1, 2)[3].tolist()
    with open(folder / "samples", "r+b") as file:
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at + nbytes - 20)[0] ^ 4]), at + nbytes - 20)
    count.taken()
    for calls in (1, 0):
        found, _, stats = run(GRAPHS["shuffled"](count), **options_of(folder))
        assert same(found, expected)
        assert count.taken() == calls == stats.damaged


def test_a_state_goes_on_from_the_disk(folder):
    count = Counting()

    def loader():
        services = SequentialReadingService(CachingReadingService(**options_of(folder, "4KB")), InProcessReadingService())
        loader = DataLoader2(GRAPHS["shuffled"](count), reading_service=services)
        loader.seed(5)
        return loader

    with loader() as first:
        elements = iter(first)
        for _ in range(COUNT // 2):
            next(elements)
        state = first.state_dict()
        rest = list(elements)
    assert count.taken() == COUNT
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert same(list(resumed), rest)
    assert count.taken() == 0
