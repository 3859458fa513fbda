"""DataLoader2 and the services that run its graph: order, shares, seeds, failures, and what is left behind."""

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Mapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.datapipes.map import SequenceWrapper

from stocache import WorkerError, reading
from stocache.errors import DatasetError, GraphError
from stocache.reading import DataLoader2, InProcessReadingService, MultiProcessingReadingService, Shuffle
from stocache.shm.ring.ring import Ring
from tests.support import graphs
from tests.support.graphs import COUNT, EXACT, GRAPHS, WARNINGS, HomemadeError, elements, loader, numbers, source, square

pytestmark = WARNINGS
FORK = {"multiprocessing_context": "fork"}
ALL = list(range(COUNT))
DIVIDES = "sharding_filter", "sharding_round_robin_dispatch"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GRAPHS)
def test_order_and_length_are_functions_of_seed_and_epoch_also_after_epochs_that_were_left_early(name):
    epochs = {}
    numbers(1)
    drawn = graphs.noise(0)
    for workers in (0, 3):
        numbers(1)
        with loader(GRAPHS[name](), workers) as dataloader:
            first, second = elements(dataloader), elements(dataloader)
            for count in (1, 5):
                list(islice(dataloader, count))
            epochs[workers] = first, second, elements(dataloader)
            dataloader.seed(5)
            assert workers == 0 or elements(dataloader) == first
            if any(part in name for part in ("filtered", "one to many", "dispatched, prefetched")):
                with pytest.raises(TypeError, match="len"):
                    len(dataloader)
            else:
                assert len(dataloader) == len(first) == len(second)
    assert graphs.noise(0) == drawn  # workers have drawn from their own generators
    if name in EXACT:
        assert epochs[0] == epochs[3]


@pytest.mark.parametrize(("name", "workers"), [("shuffled", 0), ("dispatched", 2)])
def test_without_a_seed_the_order_is_that_of_torchs_generator(name, workers):
    orders, after = [], []
    with loader(GRAPHS[name](), workers, seed=None) as dataloader:
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            orders.append((elements(dataloader), elements(dataloader)))
            after.append(float(torch.rand(())))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]
    torch.manual_seed(1)
    with loader(GRAPHS[name](), 0, seed=None) as alone:
        assert (elements(alone), elements(alone)) == orders[0]  # with any service
    torch.manual_seed(1)
    for _ in orders[0]:
        torch.empty((), dtype=torch.int64).random_()  # what torch's DataLoader draws for an epoch
    assert float(torch.rand(())) == after[0]


def test_loaders_do_not_share_a_graph_and_an_epoch_of_which_nothing_was_taken_is_not_lost():
    graph = source().shuffle().sharding_filter()
    with loader(graph, 0) as one, loader(graph, 0) as two:
        iter(one)
        assert all(a == b for a, b in zip(one, two, strict=True))
    list(torch.utils.data.DataLoader(graph, batch_size=None))  # which shards it
    with loader(graph, 2) as dataloader:
        assert sorted(dataloader) == ALL


@pytest.mark.parametrize("divide", DIVIDES)
def test_uneven_shares_and_random_lengths_are_delivered_whole(divide):
    for count in (0, 2):
        with loader(getattr(source(count).shuffle(), divide)(), 3) as dataloader:
            assert len(dataloader) == count
            assert sorted(dataloader) == sorted(dataloader) == list(range(count))
    graph = getattr(source(90), divide)().filter(lambda value: value % 3 == 0).map(graphs.twice).unbatch()
    with loader(graph, 3, **FORK) as dataloader:  # of what is dispatched, one worker gets all that the filter lets through
        assert sorted(dataloader) == sorted(number for value in range(0, 90, 3) for number in (value, -value))


class Alone(IterDataPipe):
    def __init__(self, *datapipes):
        self.datapipes = datapipes

    def __iter__(self):
        for values in zip(*self.datapipes, strict=True):
            yield *values, os.getpid()

    is_replicable = lambda self: False


class Threaded(Mapper):
    def __iter__(self):
        with ThreadPoolExecutor(1) as thread:
            iterator = iter(self.datapipe)
            for _ in ALL:
                yield thread.submit(next, iterator).result()


def started(graph):
    with loader(graph, 2) as dataloader:
        list(dataloader)


many = partial(MultiProcessingReadingService, num_workers=1)
by_ranks = SHARDING_PRIORITIES.DISTRIBUTED
REFUSED = [
    (lambda: started(source().sharding_filter().map(square).sharding_filter()), GraphError, "has sharded already, so elements"),
    (lambda: started(Alone(source(), source())), GraphError, "2 parts of the graph lead to pipes that stay in the main"),
    (lambda: started(Threaded(graphs.dispatched(), square)), GraphError, "a pipe with a thread of its own reads dispatched"),
    (lambda: started(source().sharding_round_robin_dispatch(by_ranks)), GraphError, "dispatched to the workers of one rank"),
    (lambda: iter(DataLoader2(None)), GraphError, "has no graph"),
    (lambda: DataLoader2(source(), graphs.fails_at_once), HomemadeError, "at once"),
    (lambda: many(num_workers=-1), ValueError, "num_workers=-1 must be an integer"),
    (lambda: many(multiprocessing_context="thread"), ValueError, "Use one of fork"),
    (lambda: iter(DataLoader2(source(), None, reading.DistributedReadingService())), RuntimeError, "is not initialized"),
    (lambda: list(source().fullsync()), RuntimeError, "fullsync needs torch.distributed"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_graphs_that_cannot_be_divided_and_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_graph_may_be_map_style_and_no_workers_are_allowed_with_a_warning():
    with pytest.warns(UserWarning, match="num_workers=0 runs the graph in this process"):
        service = many(num_workers=0)
    for each in (service, None):
        assert list(DataLoader2(SequenceWrapper(range(3)).map(square), reading_service=each)) == [0, 1, 4]


def test_each_part_of_a_graph_runs_in_its_processes():
    note = lambda its: (*its, os.getpid())
    graph = Alone(source().map(lambda value: (value,)).map(note).sharding_round_robin_dispatch().map(note)).map(note)
    with loader(graph, 2, **FORK) as dataloader:
        values, dispatchers, workers, alone, here = zip(*((*its, *pids) for its, *pids in dataloader), strict=True)
    assert list(values) == ALL
    assert len(set(dispatchers)) == 1
    assert len(set(workers)) == 2
    assert {*alone, *here} == {os.getpid()}
    assert not {*dispatchers, os.getpid()} & set(workers)


def test_shuffle_switches_shuffles_on_and_off():
    graph = source().shuffle()
    assert list(DataLoader2(graph, Shuffle(False))) == ALL
    assert list(DataLoader2(graph, [Shuffle(False), Shuffle(True)])) != ALL
    assert list(DataLoader2(graph.set_shuffle(False), Shuffle(None))) == ALL
    with pytest.warns(UserWarning, match="the graph has no shuffle, so one was added at its end"):
        assert list(DataLoader2(source(), Shuffle())) != ALL


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_of_the_user_are_called_in_each_worker_and_epoch(workers):
    def reset(datapipe, info, generator):
        seed = generator.generate_seed()
        return datapipe.map(lambda its: (*its, seed))

    init = lambda datapipe, info: datapipe.map(lambda value: (value, info.worker_id, info.num_workers))
    service = InProcessReadingService(prefetch_cnt=2, init_fn=init, reset_fn=reset)
    if workers:
        service = MultiProcessingReadingService(workers, "fork", worker_init_fn=init, worker_reset_fn=reset)
    with DataLoader2(source(6).sharding_filter(), reading_service=service) as dataloader:
        dataloader.seed(3)
        first, second = list(dataloader), list(dataloader)
    assert [its[:3] for its in first] == [(value, value % max(1, workers), max(1, workers)) for value in range(6)]
    assert len({its[3] for its in first}) == max(1, workers)
    assert len(second[0]) == 5  # the graph goes on being changed, as in torchdata
    assert first[0][3] == second[0][3] != second[0][4]


@pytest.mark.parametrize(("ahead", "most"), [(0, 3), (4, 8)])
def test_workers_make_no_more_than_the_prefetching_counts_allow(ahead, most):
    count = graphs.Counting()
    service = MultiProcessingReadingService(1, "fork", worker_prefetch_cnt=ahead, main_prefetch_cnt=0)
    with DataLoader2(source(400).sharding_filter().map(count), reading_service=service) as dataloader:
        for delivered, _ in zip(range(1, 51), dataloader, strict=False):
            time.sleep(0.0005)
            assert count.calls.sum() <= delivered + most


@pytest.mark.parametrize("divide", DIVIDES)
def test_tensors_come_through_the_ring_unchanged(divide, monkeypatch):
    received, receive = [], Ring.receive
    monkeypatch.setattr(Ring, "receive", lambda ring, *content: received.append(1) or receive(ring, *content))
    with loader(getattr(source().map(graphs.large), divide)(), 2) as dataloader:
        found = list(dataloader)  # all held at once
    assert sorted(element.unique().item() for element in found) == ALL
    assert received


def test_there_is_one_iterator_at_a_time():
    with loader(source().sharding_filter(), 2) as dataloader:
        old = iter(dataloader)
        assert next(old) == 0
        new = iter(dataloader)
        with pytest.raises(GraphError, match="this iterator has been invalidated"):
            next(old)
        assert new.close is not None  # an attribute of the pipe's iterator
        assert list(new) == ALL


@pytest.mark.parametrize("workers", [0, 2])
def test_a_limit_pauses_until_resumed(workers):
    with loader(source(10).sharding_filter().prefetch(2), workers) as dataloader:
        iterator = iter(dataloader)
        iterator.limit(4)
        assert list(iterator) == [0, 1, 2, 3]
        assert list(iterator) == []
        iterator.resume()
        assert list(iterator) == [4, 5, 6, 7]
        iterator.limit(None)
        iterator.resume()
        assert list(iterator) == [8, 9]


sharded, caught = source().sharding_filter(), "(?s)Caught {} in {} process.*Original Traceback.*{}".format
FAILURES = [  # the graph, options of the service, the error and its message
    (sharded.map(graphs.fails), {}, HomemadeError, caught("HomemadeError", "worker", "in fails.*HomemadeError: thirteen")),
    (source().map(graphs.fails_locally).sharding_round_robin_dispatch(), {}, WorkerError, "(?s)dispatching.*LocalError: here"),
    (graphs.dispatched().map(graphs.unpicklable), {}, TypeError, "(?s)in (DataLoader )?worker process [01].*_thread.lock"),
    (sharded.map(graphs.dies), {}, WorkerError, r"was killed by signal 9 \(SIGKILL\)"),
    (source().map(graphs.dies).sharding_round_robin_dispatch(), {}, WorkerError, r"was killed by signal 9 \(SIGKILL\)"),
    (sharded, {"worker_init_fn": graphs.fails_at_once}, HomemadeError, caught("HomemadeError", "worker", "in fails_at_once")),
    (graphs.dispatched(), {"worker_reset_fn": print}, GraphError, r"returned NoneType\. It must return the last pipe"),
]


@pytest.mark.parametrize(("graph", "options", "error", "message"), FAILURES)
def test_a_failure_is_raised_with_its_traceback_and_ends_the_loader(graph, options, error, message):
    with loader(graph, 2, **options) as dataloader:
        with pytest.raises(error, match=message):
            list(dataloader)
        with pytest.raises(GraphError, match="is shut down"):
            iter(dataloader)


def workers_alive():
    return sorted(child.pid for child in multiprocessing.active_children())


class Recording(reading.ReadingServiceInterface):
    calls: list  # of the class: a loader works with a copy

    def __init__(self, change=None):
        self.change = change

    finalize_iteration = lambda self: self.calls.append("finalize_iteration")
    finalize = lambda self: self.calls.append("finalize")

    def initialize(self, datapipe):
        self.calls.append("initialize")
        return datapipe.map(square)

    def initialize_iteration(self, seed_generator, iter_reset_fn=None):
        self.calls.append("initialize_iteration")
        return self.change


squared = partial(Mapper, fn=square)


@pytest.mark.parametrize(
    ("engine", "change"), [(None, squared), (InProcessReadingService(), None), (MultiProcessingReadingService(2), squared)]
)
def test_services_of_the_user_are_called_in_their_turn(engine, change):
    Recording.calls = []
    service = Recording(change) if engine is None else reading.SequentialReadingService(Recording(change), engine)
    dataloader = DataLoader2(source(4).sharding_filter(), reading_service=service)
    assert list(dataloader) == [value ** (4 if change else 2) for value in range(4)]
    assert len(list(dataloader)) == 4
    dataloader.shutdown()
    dataloader.shutdown()
    epoch = ["initialize_iteration", "finalize_iteration"]
    assert Recording.calls == ["initialize", *epoch, *epoch, "finalize_iteration", "finalize"]


def test_a_loader_that_is_dropped_leaves_nothing():
    for _ in range(2):
        dataloader = loader(GRAPHS["dispatched"](), 2)
        iterator = iter(dataloader)
        next(iterator)
        del dataloader, iterator
        assert workers_alive() == []


@pytest.mark.parametrize(("on_change", "workers"), [("uncached", 2), ("raise", 0)])
def test_a_map_that_has_changed_is_found_before_its_old_results_are_served(on_change, workers, tmp_path):
    path = tmp_path / "factor"
    path.write_text("1")
    graph = source().map(lambda value: value * int(path.read_text())).shuffle().sharding_filter()
    caching, options = reading.CachingReadingService(1, on_change=on_change), FORK if workers else {}
    with loader(graph, workers, 5, caching, **options) as dataloader:
        assert sorted(map(int, dataloader)) == ALL
        path.write_text("3")
        if on_change == "raise":
            with pytest.raises(DatasetError, match="differs from the cached sample"):
                list(dataloader)
        else:
            assert sorted(map(int, dataloader)) == [3 * number for number in ALL]
