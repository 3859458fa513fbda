"""Reading services on the ranks of torch.distributed."""

import itertools
import multiprocessing
import os
import pickle
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from stocache import StateError
from stocache.reading import DataLoader2, DistributedReadingService
from tests.support import graphs
from tests.support.graphs import COUNT, WARNINGS, HomemadeError, fails, noise, source, square
from tests.support.processes import run_all

pytestmark = WARNINGS


@pytest.fixture
def on_ranks(tmp_path):
    """Run ``function(rank)`` on several ranks, and return what it returns on each."""

    def run(count, function):
        run_all(multiprocessing.get_context("fork"), count, _rank, count, tmp_path, function, timeout_s=120)
        return [pickle.loads((tmp_path / f"{rank}").read_bytes()) for rank in range(count)]

    return run


def _rank(rank, count, folder, function):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=count)
    torch.manual_seed(rank)  # ranks have other random numbers
    (folder / f"{rank}").write_bytes(pickle.dumps(function(rank)))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def loader(graph, workers, seed=None, *before):
    return graphs.loader(graph, workers, seed, DistributedReadingService(timeout=60), *before, multiprocessing_context="fork")


def shuffled(count=COUNT):
    return source(count).shuffle().sharding_filter().map(square)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_have_shares_of_one_order_with_any_number_of_workers_end_together_and_draw_their_own_numbers(on_ranks, ranks):
    def run(rank):
        found = []
        for workers in (0, 1, 2):
            with loader(shuffled(50), workers, seed=3) as dataloader:
                found.append((len(dataloader), list(dataloader), list(dataloader)))
                assert len(list(islice(dataloader, 5))) == 5  # an epoch that is left early
                assert len(list(dataloader)) == len(dataloader)
        with loader(source(21).sharding_filter().map(noise), 2) as dataloader:
            return found, list(dataloader)

    found, noises = zip(*on_ranks(ranks, run), strict=True)
    for alone, one, two in found:
        assert alone == one == two
        assert alone[1] != alone[2]
    for epoch in (1, 2):
        shares = [its[epoch] for its, *_ in found]
        assert [length for (length, *_), *_ in found] == list(map(len, shares)) == [50 // ranks] * ranks
        assert len(set().union(*shares)) == 50 // ranks * ranks
    assert [len(set(column)) for column in zip(*itertools.chain(*noises), strict=True)] == [21] * 4  # in workers, too


def test_ranks_end_with_the_shortest_or_with_one_that_fails(on_ranks):
    def run(rank):
        found = []
        for workers in (0, 2):
            graph = source(60).sharding_filter().filter(lambda value: value % 2 == rank or value > 50)
            with loader(graph, workers) as dataloader:
                found += [len(list(dataloader)), len(list(dataloader))]
        with loader(source().sharding_filter().map(fails), 0) as dataloader:
            try:
                return found, len(list(dataloader))
            except HomemadeError:
                return found, "fails"

    (found, ended), (others, failed) = on_ranks(2, run)
    assert len({*found, *others} - {0}) == 1
    assert (ended, failed) == (6, "fails")


def test_without_a_seed_ranks_take_that_of_rank_0(on_ranks):
    def run(rank):
        with DataLoader2(shuffled(), reading_service=DistributedReadingService()) as dataloader:
            epochs = list(dataloader), list(dataloader)
            torch.manual_seed(0 if rank == 0 else 77)  # rank 0 as at the beginning
            assert list(dataloader) == epochs[0]
            return epochs

    (one, first), (two, second) = on_ranks(2, run)
    assert sorted(one + two) == sorted(first + second) == [value * value for value in range(COUNT)]
    assert one != first


def test_ranks_go_on_from_their_own_states_only(on_ranks):
    def run(rank):
        for before, after, position in ((0, 0, 7), (2, 2, 30), (2, 0, 7), (0, 2, 7)):
            with loader(shuffled(60), before, seed=3) as dataloader:
                list(dataloader)
                iterator = iter(dataloader)
                list(islice(iterator, position))
                state, rest = dataloader.state_dict(), [list(iterator), list(dataloader)]
            with loader(shuffled(60), after) as dataloader:
                dataloader.load_state_dict(state)
                assert [list(dataloader), list(dataloader)] == rest
        states = [None] * 2
        dist.all_gather_object(states, state)
        with loader(shuffled(60), 0) as dataloader:
            dataloader.load_state_dict(states[1 - rank])
            with pytest.raises(StateError, match=f"with rank {1 - rank}; this one has {rank}"):
                iter(dataloader)

    on_ranks(2, run)
