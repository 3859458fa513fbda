"""Reading services on the ranks of torch.distributed."""

import multiprocessing
import os
import pickle
import random
import socket
import time

import pytest
import torch
import torch.distributed as dist

from stocache import StateError
from stocache.reading import (
    CachingReadingService,
    DataLoader2,
    DistributedReadingService,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)
from tests.support.graphs import COUNT, elements, large, no_third, noise, source, square
from tests.support.processes import run_all

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")


def on_ranks(folder, count, function, *args):
    """Run ``function(rank, *args)`` on so many ranks, and return what it returns on each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_all(multiprocessing.get_context("fork"), count, _rank, count, port, folder, function, args)
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(count)]


def _rank(rank, count, port, folder, function, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    torch.manual_seed(rank)  # ranks have other random numbers
    found = function(rank, *args)
    (folder / f"{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def services(workers):
    engine = MultiProcessingReadingService(workers, "fork") if workers else InProcessReadingService()
    return SequentialReadingService(DistributedReadingService(timeout=20), engine)


def shuffled(count=COUNT):
    return source(count).shuffle().sharding_filter().map(square)


def epochs(rank, workers, count):
    with DataLoader2(shuffled(count), reading_service=services(workers)) as dataloader:
        dataloader.seed(3)
        return len(dataloader), list(dataloader), list(dataloader)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_ranks_have_shares_of_one_order_and_end_together(tmp_path, workers):
    found = on_ranks(tmp_path, 2, epochs, workers, 41)
    with DataLoader2(shuffled(41)) as dataloader:
        dataloader.seed(3)
        alone = list(dataloader)
    for epoch in (1, 2):
        one, two = (its[epoch] for its in found)
        assert found[0][0] == len(one) == len(two) == 20
        assert len({*one, *two}) == 40
    assert sorted([*found[0][1], *found[1][1]]) != alone
    assert found[0][1] != found[0][2]


def test_the_order_of_a_rank_does_not_depend_on_its_workers(tmp_path):
    found = [on_ranks(tmp_path, 3, epochs, workers, 50) for workers in (0, 1, 2)]
    assert found[0] == found[1] == found[2]


def uneven(rank, workers):
    graph = source(60).sharding_filter().filter(lambda value: value % 2 == rank or value > 50)
    with DataLoader2(graph, reading_service=services(workers)) as dataloader:
        return list(dataloader), list(dataloader)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_unequal_length_end_with_the_shortest(tmp_path, workers):
    (one, again), (two, _) = on_ranks(tmp_path, 2, uneven, workers)
    assert len(one) == len(two) == len(again) > 0
    assert one == again


def unseeded(rank):
    with DataLoader2(shuffled(), reading_service=DistributedReadingService()) as dataloader:
        epochs = list(dataloader), list(dataloader)
        torch.manual_seed(0 if rank == 0 else 77)  # rank 0 as at the beginning
        assert list(dataloader) == epochs[0]
        return epochs


def test_without_a_seed_ranks_take_that_of_rank_0(tmp_path):
    (one, first), (two, second) = on_ranks(tmp_path, 2, unseeded)
    assert sorted(one + two) == sorted(first + second) == [value * value for value in range(COUNT)]
    assert one != first


def noisy(rank):
    graph = source(20).sharding_filter().map(noise)
    with DataLoader2(graph, reading_service=services(2)) as dataloader:
        return list(dataloader)


def test_random_maps_differ_by_rank_and_worker(tmp_path):
    found = [element for its in on_ranks(tmp_path, 2, noisy) for element in its]
    for column in (1, 2, 3):
        assert len({element[column] for element in found}) == 20


def leaving(rank, counts, workers):
    with DataLoader2(shuffled(400), reading_service=services(workers)) as dataloader:
        dataloader.seed(1)
        began = time.monotonic()
        taken = []
        for epoch in counts:
            iterator = iter(dataloader)
            taken.append([element for _, element in zip(range(epoch[rank]), iterator, strict=False)])
        whole = list(dataloader)
    return taken, whole, time.monotonic() - began


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_may_leave_an_epoch_early_and_at_different_times(tmp_path, workers):
    counts = [(5, 5), (0, 0), (1, 1), (7, 3), (2, 9)]
    (one, whole, took), (two, other, took_too) = on_ranks(tmp_path, 2, leaving, counts, workers)
    for epoch, (first, second) in enumerate(counts):
        assert len(one[epoch]) <= first
        assert len(two[epoch]) <= second
    assert [len(its) for its in one[:3]] == [len(its) for its in two[:3]] == [5, 0, 1]
    assert len(whole) == len(other) == 200
    assert max(took, took_too) < 15


def broken_off(rank, workers, position):
    with DataLoader2(shuffled(60), reading_service=services(workers)) as dataloader:
        dataloader.seed(3)
        list(dataloader)
        iterator = iter(dataloader)
        for _ in range(position):
            next(iterator)
        return dataloader.state_dict(), list(iterator), list(dataloader)


def go_on(rank, states, workers):
    with DataLoader2(shuffled(60), reading_service=services(workers)) as dataloader:
        dataloader.load_state_dict(states[rank])
        return list(dataloader), list(dataloader)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2), (2, 0), (0, 2)])
def test_ranks_go_on_from_their_states(tmp_path, before, after):
    for position in (7, 30) if before == after else (7,):
        found = on_ranks(tmp_path, 2, broken_off, before, position)
        rest = on_ranks(tmp_path, 2, go_on, [state for state, *_ in found], after)
        assert rest == [(its, then) for _, its, then in found]


def swapped(rank, states):
    with DataLoader2(shuffled(60), reading_service=services(0)) as dataloader:
        dataloader.load_state_dict(states[1 - rank])
        with pytest.raises(StateError, match=f"with rank {1 - rank}; this one has {rank}"):
            iter(dataloader)


def test_the_state_of_another_rank_is_refused(tmp_path):
    states = [state for state, *_ in on_ranks(tmp_path, 2, broken_off, 0, 3)]
    on_ranks(tmp_path, 2, swapped, states)


def with_cache(rank, name):
    graph = source(60).map(large).shuffle().sharding_filter()
    sequence = DistributedReadingService(), CachingReadingService(0.1, name=name), MultiProcessingReadingService(2, "fork")
    with DataLoader2(graph, reading_service=SequentialReadingService(*sequence)) as dataloader:
        dataloader.seed(random.Random(1).getrandbits(64))
        found = [sorted(float(element[0]) for element in dataloader) for _ in range(3)]
        dist.barrier()
        stats = dataloader.reading_service.reading_services[1].cache.stats()
        dist.barrier()
    return found, stats.fills


def test_ranks_share_a_named_cache(tmp_path):
    (one, fills), (two, same) = on_ranks(tmp_path, 2, with_cache, "reading-ranks")
    assert fills == same == 60
    for epoch in range(3):
        assert sorted(one[epoch] + two[epoch]) == [float(value) for value in range(60)]


def failing(rank):
    graph = source(20).sharding_filter().map(fails_on_even)
    with DataLoader2(graph, reading_service=services(0)) as dataloader:
        try:
            return len(list(dataloader))
        except ValueError as error:
            return str(error)[:4]


def fails_on_even(value):
    if value == 8:
        raise ValueError("here")
    return value


def test_a_failure_on_one_rank_ends_the_epoch_of_the_others(tmp_path):
    assert on_ranks(tmp_path, 2, failing) == ["here", 4]


def alone(rank):
    with DataLoader2(shuffled(), reading_service=DistributedReadingService()) as dataloader:
        return len(dataloader), elements(dataloader)


def test_one_rank_has_it_all(tmp_path):
    ((length, found),) = on_ranks(tmp_path, 1, alone)
    assert length == len(found) == COUNT


def test_distributed_reading_needs_a_process_group():
    with DataLoader2(source().filter(no_third), reading_service=DistributedReadingService()) as dataloader:
        with pytest.raises(RuntimeError, match=r"torch.distributed is not initialized. Call init_process_group first"):
            iter(dataloader)
    with pytest.raises(RuntimeError, match=r"fullsync needs torch.distributed"):
        list(source().fullsync())
