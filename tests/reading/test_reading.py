"""DataLoader2 and the services that run its graph: order, shares, seeds, failures, and what is left behind."""

import inspect
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.datapipes.map import SequenceWrapper

from stocache import WorkerError
from stocache.errors import GraphError
from stocache.reading import (
    CheckpointableReadingServiceInterface,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    Prefetcher,
    ReadingServiceInterface,
    SequentialReadingService,
    ShardingRoundRobinDispatcher,
    Shuffle,
    find_dps,
    traverse_dps,
)
from stocache.reading.graph import pipes
from stocache.reading.graph.feed import Feed
from stocache.reading.graph.graph import pipes_of
from stocache.reading.graph.sharding import dispatched_end, replicable_end, share
from stocache.ring.ring import Ring
from tests.support.graphs import (
    GRAPHS,
    SAME_FOR_ANY_WORKERS,
    HomemadeError,
    dies,
    elements,
    fails,
    fails_at_once,
    large,
    loader,
    no_third,
    noise,
    numbers,
    plain,
    slow,
    source,
    square,
    tensor,
    twice,
    unpicklable,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")


# ---------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.sampled(3)
def test_the_order_is_a_function_of_seed_and_epoch(name):
    numbers(1)
    epochs = {}
    for workers in (0, 1, 3):
        with loader(GRAPHS[name](), workers) as dataloader:
            epochs[workers] = [elements(dataloader) for _ in range(2)]
            dataloader.seed(5)
            again = elements(dataloader)
            assert workers == 0 or again == epochs[workers][0]
    if name in SAME_FOR_ANY_WORKERS:
        assert epochs[0] == epochs[1] == epochs[3]
    for workers, (first, second) in epochs.items():
        with loader(GRAPHS[name](), workers) as dataloader:
            if any(part in name for part in ("filtered", "one to many", "dispatched, prefetched")):
                with pytest.raises(TypeError, match="len"):
                    len(dataloader)
            else:
                assert len(dataloader) == len(first) == len(second)


def test_without_a_seed_epochs_and_loaders_differ():
    graph = source().shuffle().sharding_filter()
    for workers in (0, 2):
        with loader(graph, workers, seed=None) as one, loader(graph, workers, seed=None) as two:
            orders = [list(one), list(one), list(two)]
        assert len({tuple(order) for order in orders}) == 3
        assert [sorted(order) for order in orders] == [list(range(40))] * 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["shuffled", "dispatched"])
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
    assert float(torch.rand(())) == after[0]
    torch.manual_seed(1)
    for _ in orders[0]:
        torch.empty((), dtype=torch.int64).random_()  # what torch's DataLoader draws for an epoch
    assert float(torch.rand(())) == after[0]


def test_the_order_does_not_depend_on_the_speed_of_workers():
    def uneven(value):
        time.sleep(0.01 * (value % 3 == 0))
        return value

    graph = source(30).shuffle().sharding_filter().map(uneven)
    with loader(graph, 0) as alone, loader(graph, 3, multiprocessing_context="fork") as together:
        assert list(together) == list(alone)


def test_a_loader_and_its_copy_do_not_share_a_graph():
    graph = source().shuffle().sharding_filter()
    with loader(graph, 0) as one, loader(graph, 0) as two:
        assert [pair for pair in zip(one, two, strict=True) if pair[0] != pair[1]] == []
    assert len(pipes_of(graph)) == 3


@pytest.mark.parametrize(("name", "method"), [("both", "spawn"), ("noisy", "forkserver")])
@pytest.mark.sampled(2)
def test_all_start_methods_give_the_same(name, method):
    with loader(GRAPHS[name](), 2) as forked, loader(GRAPHS[name](), 2, multiprocessing_context=method) as other:
        assert elements(other) == elements(forked)


def test_a_map_style_graph_is_iterated():
    with loader(SequenceWrapper(range(5)).map(square), 0) as dataloader:
        assert list(dataloader) == [0, 1, 4, 9, 16]


# ---------------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shares_are_exclusive_and_exhaustive_and_ranks_come_first(ranks, workers):
    found = []
    for rank in range(ranks):
        of_rank = []
        for worker in range(workers):
            pipe = source(23).sharding_filter()
            pipe.apply_sharding(ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            pipe = share(pipe, workers, worker)
            its = list(pipe)
            assert len(pipe) == len(its)
            of_rank += its
        assert sorted(of_rank) == list(range(rank, 23, ranks))
        found += of_rank
    assert sorted(found) == list(range(23))


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("name", ["filter", "dispatch", "both"])
def test_more_workers_than_elements_and_uneven_shares(name, count):
    graph = {
        "filter": lambda: source(count).shuffle().sharding_filter(),
        "dispatch": lambda: source(count).shuffle().sharding_round_robin_dispatch(),
        "both": lambda: source(count).sharding_filter().zip(source(count).sharding_round_robin_dispatch()),
    }[name]()
    with loader(graph, 3) as dataloader:
        assert len(dataloader) == count
        for _ in range(2):
            assert sorted(dataloader) == sorted((i, i) if name == "both" else i for i in range(count))


@pytest.mark.parametrize("seed", range(8))
def test_random_lengths_of_workers_are_delivered_whole(seed):
    draw = random.Random(seed)
    count, workers, divisor = draw.randrange(60), draw.randrange(1, 4), draw.randrange(1, 7)

    def some(value):
        return value % divisor == 0

    graph = source(count).sharding_filter().filter(some).map(twice).unbatch()
    with loader(graph, workers, multiprocessing_context="fork") as dataloader:
        expected = [number for value in range(count) if some(value) for number in (value, -value)]
        assert sorted(dataloader) == sorted(expected)


def test_sharding_twice_on_one_path_is_refused():
    with loader(source().sharding_filter().map(square).sharding_filter(), 2) as dataloader:
        with pytest.raises(GraphError, match="has sharded already, so elements would be lost"):
            list(dataloader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_graph_that_torchs_loader_has_iterated_can_be_sharded(workers):
    graph = source().sharding_filter()
    assert list(torch.utils.data.DataLoader(graph, batch_size=None)) == list(range(40))
    with loader(graph, workers) as dataloader:
        assert list(dataloader) == list(range(40))


def test_dispatched_parts_end_at_their_lowest_common_ancestor():
    one, two = source().sharding_round_robin_dispatch(), source().sharding_round_robin_dispatch()
    joined = one.zip(two)
    end = source().sharding_filter().zip(joined.map(square))
    assert dispatched_end(end) is joined
    assert dispatched_end(source().sharding_filter()) is None
    single = source().sharding_round_robin_dispatch()
    assert dispatched_end(single.map(square)) is single


def test_what_is_dispatched_runs_in_one_process_and_the_rest_in_the_workers():
    def tag(value):
        return value, os.getpid()

    graph = source().map(tag).sharding_round_robin_dispatch().map(lambda pair: (*pair, os.getpid()))
    with loader(graph, 2, multiprocessing_context="fork") as dataloader:
        found = list(dataloader)
    assert [value for value, _, _ in found] == list(range(40))
    assert len({dispatcher for _, dispatcher, _ in found}) == 1
    assert len({worker for _, _, worker in found}) == 2
    assert not {dispatcher for _, dispatcher, _ in found} & {worker for _, _, worker in found}


def test_dispatched_elements_may_be_used_up_at_different_rates():
    graph = source(300).sharding_round_robin_dispatch().filter(lambda value: value % 2 == 0 or value > 280)
    with loader(graph, 2, multiprocessing_context="fork") as dataloader:  # one worker's elements are nearly all dropped
        assert list(dataloader) == [value for value in range(300) if value % 2 == 0 or value > 280]


class Alone(IterDataPipe):
    """A pipe that must not be replicated."""

    def __init__(self, *datapipes):
        self.datapipes = datapipes

    def __iter__(self):
        for values in zip(*self.datapipes, strict=True):
            yield *values, os.getpid()

    def is_replicable(self):
        return False


def test_pipes_that_are_not_replicable_stay_in_the_main_process():
    graph = Alone(source().sharding_filter()).map(lambda pair: (*pair, os.getpid()))
    assert type(replicable_end(graph)).__name__ == "ShardingFilterIterDataPipe"
    with loader(graph, 2, multiprocessing_context="fork") as dataloader:
        assert list(dataloader) == [(value, os.getpid(), os.getpid()) for value in range(40)]


def test_a_graph_whose_parts_meet_in_the_main_process_is_refused():
    with loader(Alone(source(), source()), 2) as dataloader:
        with pytest.raises(GraphError, match="2 parts of the graph lead to pipes that stay in the main process"):
            iter(dataloader)


class Threaded(IterDataPipe):
    """A pipe with a thread of its own, of which nobody knows."""

    def __init__(self, datapipe):
        self.datapipe = datapipe

    def __iter__(self):
        with ThreadPoolExecutor(1) as thread:
            iterator = iter(self.datapipe)
            for _ in range(40):
                yield thread.submit(next, iterator).result()


def test_a_thread_cannot_read_what_is_dispatched():
    with loader(Threaded(source().sharding_round_robin_dispatch()), 2) as dataloader:
        with pytest.raises(GraphError, match=r"a pipe with a thread of its own reads dispatched elements. Put it before"):
            list(dataloader)


def test_dispatch_takes_workers_only():
    with pytest.raises(GraphError, match="elements are dispatched to the workers of one rank"):
        source().sharding_round_robin_dispatch(SHARDING_PRIORITIES.DISTRIBUTED)
    assert len(ShardingRoundRobinDispatcher(source(), SHARDING_PRIORITIES.MULTIPROCESSING)) == 40


# ---------------------------------------------------------------------------------------------------- random numbers


def test_random_maps_after_the_shard_differ_by_worker_and_repeat_by_seed():
    with loader(source().sharding_filter().map(noise), 2) as dataloader:
        first = list(dataloader)
        dataloader.seed(5)
        assert list(dataloader) == first
    for column in (1, 2, 3):
        assert len({element[column] for element in first}) == 40


def test_workers_leave_the_random_numbers_of_this_process_alone():
    numbers(1)
    expected = random.random(), float(torch.rand(())), np.random.rand()
    numbers(1)
    with loader(GRAPHS["noisy"](), 2) as dataloader:
        list(dataloader)
    assert (random.random(), float(torch.rand(())), np.random.rand()) == expected


def test_shuffle_switches_shuffles_on_and_off():
    graph = source().shuffle()
    assert list(DataLoader2(graph, Shuffle(False))) == list(range(40))
    assert list(DataLoader2(graph, [Shuffle(False), Shuffle(True)])) != list(range(40))
    assert list(DataLoader2(graph.set_shuffle(False), Shuffle(None))) == list(range(40))
    with pytest.warns(UserWarning, match="the graph has no shuffle, so one was added at its end"):
        assert list(DataLoader2(source(), Shuffle())) != list(range(40))


def test_functions_of_the_user_are_called_in_each_worker_and_epoch():
    def init(datapipe, info):
        return datapipe.map(lambda value: (value, info.worker_id, info.num_workers))

    def reset(datapipe, info, generator):
        seed = generator.generate_seed()
        return datapipe.map(lambda its: (*its, seed))

    def service(workers, **options):
        if not workers:
            return InProcessReadingService(init_fn=init, reset_fn=reset)
        return MultiProcessingReadingService(workers, "fork", worker_init_fn=init, worker_reset_fn=reset, **options)

    for workers in (0, 2):
        with DataLoader2(source(6).sharding_filter(), reading_service=service(workers)) as dataloader:
            dataloader.seed(3)
            first, second = list(dataloader), list(dataloader)
        assert [its[:3] for its in first] == [(value, value % max(1, workers), max(1, workers)) for value in range(6)]
        assert len({its[3] for its in first}) == max(1, workers)
        assert len(second[0]) == 5  # the graph goes on being changed, as in torchdata
        assert first[0][3] == second[0][3] != second[0][4]


def test_prefetching_in_process_takes_elements_ahead():
    taken = []
    graph = source().map(lambda value: taken.append(value) or value)
    with DataLoader2(graph, reading_service=InProcessReadingService(prefetch_cnt=5)) as dataloader:
        iterator = iter(dataloader)
        assert next(iterator) == 0
        deadline = time.monotonic() + 10
        while len(taken) < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert taken == list(range(6))
        assert list(iterator) == list(range(1, 40))


@pytest.mark.parametrize(("ahead", "most"), [(0, 3), (4, 8)])
def test_workers_make_no_more_than_the_prefetching_counts_allow(ahead, most):
    graph = source(400).sharding_filter().map(lambda value: (value, os.getpid()))
    counted = torch.zeros(1, dtype=torch.int64).share_memory_()

    def count(pair):
        counted[0] += 1
        return pair

    service = MultiProcessingReadingService(1, "fork", worker_prefetch_cnt=ahead, main_prefetch_cnt=0)
    with DataLoader2(graph.map(count), reading_service=service) as dataloader:
        for delivered, _ in enumerate(dataloader, 1):
            time.sleep(0.0005)
            assert counted[0] <= delivered + most
            if delivered == 50:
                break


# ---------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("place", ["after", "dispatched"])
def test_tensors_come_through_the_ring_unchanged(place, monkeypatch):
    received, receive = [], Ring.receive
    monkeypatch.setattr(Ring, "receive", lambda ring, *content: received.append(1) or receive(ring, *content))
    graph = source().sharding_filter().map(tensor) if place == "after" else source().map(tensor).sharding_round_robin_dispatch()
    with loader(graph, 2) as dataloader:
        found = list(dataloader)  # all held at once
    for value, element in enumerate(found):
        assert plain(element) == plain(tensor(value))
    assert received


def test_large_dispatched_tensors_are_the_workers_own():
    graph = source(60).map(large).sharding_round_robin_dispatch().shuffle(buffer_size=50)
    with loader(graph, 2) as dataloader:
        values = sorted(float(element.unique().item()) for element in dataloader)
    assert values == [float(value) for value in range(60)]


# ---------------------------------------------------------------------------------------------------- iterators


def test_there_is_one_iterator_at_a_time():
    with loader(source().sharding_filter(), 2) as dataloader:
        old = iter(dataloader)
        assert next(old) == 0
        new = iter(dataloader)
        with pytest.raises(GraphError, match="this iterator has been invalidated"):
            next(old)
        assert list(new) == list(range(40))


def test_an_epoch_of_which_nothing_was_taken_is_not_lost():
    with loader(source().shuffle().sharding_filter(), 0) as dataloader:
        iter(dataloader)
        first = list(dataloader)
    with loader(source().shuffle().sharding_filter(), 0) as dataloader:
        assert list(dataloader) == first


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
        with pytest.warns(UserWarning, match="not paused, so there is nothing to resume"):
            iterator.resume()
        with pytest.raises(ValueError, match="num_batches=0 is less than 1"):
            iterator.limit(0)


@pytest.mark.parametrize("name", ["shuffled", "dispatched", "both", "prefetched"])
def test_leaving_early_and_beginning_again(name):
    with loader(GRAPHS[name](), 2) as dataloader:
        for count in (1, 5, 3, 17):
            iterator = iter(dataloader)
            for _ in range(count):
                next(iterator)
        del iterator
        whole = elements(dataloader)
    with loader(GRAPHS[name](), 0) as dataloader:
        assert [elements(dataloader) for _ in range(5)][4] == whole


def test_an_attribute_of_the_pipes_iterator_is_found():
    with loader(source(), 0) as dataloader:
        assert iter(dataloader).close is not None
        with pytest.raises(AttributeError, match="nothing_there"):
            iter(dataloader).nothing_there  # noqa: B018


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("place", ["worker", "dispatcher", "after dispatch"])
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (fails, HomemadeError, "(?s)Caught HomemadeError in {place}.\nOriginal Traceback.*in fails.*HomemadeError: thirteen"),
        (unpicklable, TypeError, "(?s)Caught TypeError in (DataLoader )?{place}.*cannot pickle '_thread.lock' object"),
        (dies, WorkerError, r"was killed by signal 9 \(SIGKILL\)"),
    ],
)
def test_a_failure_is_raised_with_its_traceback(function, error, message, place):
    graph = {
        "worker": lambda: source().sharding_filter().map(function),
        "dispatcher": lambda: source().map(function).sharding_round_robin_dispatch(),
        "after dispatch": lambda: source().sharding_round_robin_dispatch().map(function),
    }[place]()
    message = message.format(place="dispatching process" if place == "dispatcher" else "worker process [01]")
    began = time.monotonic()
    with loader(graph, 2) as dataloader:
        with pytest.raises(error, match=message):
            list(dataloader)
        with pytest.raises(GraphError, match="is shut down"):
            iter(dataloader)
    assert time.monotonic() - began < 20  # instead of for ever


@pytest.mark.parametrize("which", ["worker_init_fn", "worker_reset_fn"])
@pytest.mark.parametrize("name", ["shuffled", "dispatched"])
def test_a_failure_of_the_users_functions_is_raised(which, name):
    with loader(GRAPHS[name](), 2, **{which: fails_at_once}) as dataloader:
        with pytest.raises(HomemadeError, match=r"(?s)Caught HomemadeError in worker process \d.*in fails_at_once.*at once"):
            list(dataloader)


def test_a_failure_whose_type_does_not_pickle_is_raised():
    class LocalError(Exception):
        pass

    def function(value):
        raise LocalError("here")

    with loader(source().sharding_filter().map(function), 2, multiprocessing_context="fork") as dataloader:
        with pytest.raises(WorkerError, match=r"(?s)in worker process \d.*LocalError: here.*Traceback"):
            list(dataloader)


def read_on_without(pid, iterator):
    os.kill(pid, signal.SIGKILL)
    for _ in iterator:
        pass


@pytest.mark.parametrize("name", ["shuffled", "dispatched"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_from_outside_is_noticed(name, victim):
    graph = (
        source(4000).sharding_filter().map(slow)
        if name == "shuffled"
        else source(4000).sharding_round_robin_dispatch().map(slow)
    )
    with loader(graph, 2) as dataloader:
        iterator = iter(dataloader)
        next(iterator)
        with pytest.raises(RuntimeError, match=r"(?i)killed by signal"):  # of torch, when this process is just here
            read_on_without(sorted(workers_alive())[victim], iterator)


def test_a_users_function_must_return_a_graph():
    with loader(source().sharding_filter(), 2, worker_init_fn=print) as dataloader:
        with pytest.raises(GraphError, match=r"returned NoneType\. It must return the last pipe of a graph"):
            list(dataloader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1 must be an integer"),
        ({"num_workers": 1, "worker_prefetch_cnt": -1}, "worker_prefetch_cnt=-1 must be an integer"),
        ({"num_workers": 1, "main_prefetch_cnt": 1.5}, "main_prefetch_cnt=1.5 must be an integer"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "'thread' is not a start method. Use one of fork"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiProcessingReadingService(**arguments)
    with pytest.raises(ValueError, match="prefetch_cnt=-1 must be an integer of 0 or more"):
        InProcessReadingService(prefetch_cnt=-1)


def test_no_workers_are_allowed_with_a_warning():
    with pytest.warns(UserWarning, match="num_workers=0 runs the graph in this process"):
        service = MultiProcessingReadingService(0)
    with DataLoader2(source().sharding_filter(), reading_service=service) as dataloader:
        assert list(dataloader) == list(range(40))


def test_a_loader_needs_a_graph():
    with pytest.raises(GraphError, match="has no graph"):
        iter(DataLoader2(None))
    with pytest.raises(GraphError, match="expected an IterDataPipe or MapDataPipe, got list"):
        DataLoader2([1, 2])


def test_a_graph_without_a_length_has_none():
    with loader(source().filter(no_third), 0) as dataloader:
        with pytest.raises(TypeError, match="has no len"):
            len(dataloader)


# ---------------------------------------------------------------------------------------------------- the user's services


class Recording(ReadingServiceInterface):
    """A service of the user's, which says what it is asked."""

    calls: list  # of the class: a loader works with a copy

    def initialize(self, datapipe):
        self.calls.append("initialize")
        return datapipe.map(square)

    def initialize_iteration(self, seed_generator, iter_reset_fn=None):
        self.calls.append("initialize_iteration")
        return iter_reset_fn

    def finalize_iteration(self):
        self.calls.append("finalize_iteration")

    def finalize(self):
        self.calls.append("finalize")


@pytest.mark.parametrize("sequence", [False, True])
def test_services_of_the_user_are_called_in_their_turn(sequence):
    Recording.calls = []
    service = SequentialReadingService(Recording(), MultiProcessingReadingService(2)) if sequence else Recording()
    dataloader = DataLoader2(source(5).sharding_filter(), reading_service=service)
    assert list(dataloader) == [0, 1, 4, 9, 16]
    assert list(dataloader) == [0, 1, 4, 9, 16]
    dataloader.shutdown()
    dataloader.shutdown()
    epoch = ["initialize_iteration", "finalize_iteration"]
    assert Recording.calls == ["initialize", *epoch, *epoch, "finalize_iteration", "finalize"]


class Adding(Recording):
    """A service that wants the next one to change the graph in each epoch."""

    def initialize_iteration(self, seed_generator, iter_reset_fn=None):
        return add_map


def add_map(datapipe):
    return datapipe.map(square)


@pytest.mark.parametrize("engine", [InProcessReadingService(), MultiProcessingReadingService(2), None])
def test_a_service_may_have_the_next_one_change_the_graph(engine):
    Recording.calls = []
    service = Adding() if engine is None else SequentialReadingService(Adding(), engine)
    with DataLoader2(source(4).sharding_filter(), reading_service=service) as dataloader:
        assert list(dataloader) == [0, 1, 16, 81]


def test_interfaces_are_abstract():
    for interface in (ReadingServiceInterface, CheckpointableReadingServiceInterface):
        with pytest.raises(TypeError, match="abstract"):
            interface()


# ---------------------------------------------------------------------------------------------------- what is left behind


def workers_alive():
    return [child.pid for child in multiprocessing.active_children()]


@pytest.mark.parametrize("name", ["shuffled", "dispatched"])
def test_a_loader_that_is_dropped_leaves_nothing(name):
    for _ in range(15):
        dataloader = loader(GRAPHS[name](), 2)
        iterator = iter(dataloader)
        next(iterator)
        del dataloader, iterator
        assert workers_alive() == []


def test_two_threads_may_each_have_a_loader():
    found = {}

    def run(number):
        with loader(GRAPHS["shuffled"](), 2, seed=number) as dataloader:
            found[number] = list(dataloader), list(dataloader)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        with loader(GRAPHS["shuffled"](), 0, seed=number) as dataloader:
            assert found[number] == (list(dataloader), list(dataloader))


def test_idle_workers_sleep():
    with loader(GRAPHS["both"](), 2) as dataloader:
        iterator = iter(dataloader)
        next(iterator)
        time.sleep(0.2)  # they have made what they may
        processes = [psutil.Process(pid) for pid in workers_alive()]
        before = [process.num_ctx_switches() for process in processes]
        time.sleep(0.5)
        after = [process.num_ctx_switches() for process in processes]
        switches = [sum(now) - sum(then) for now, then in zip(after, before, strict=True)]
        assert max(switches) < 15  # a queue that is polled has hundreds


def test_a_failing_adapter_leaves_no_half_a_loader():
    with pytest.raises(HomemadeError, match="at once"):
        DataLoader2(source(), fails_at_once)


# ---------------------------------------------------------------------------------------------------- pipes


def test_prefetch_delivers_all_in_order_and_raises_what_the_source_does():
    assert list(source().prefetch(3)) == list(range(40))
    assert len(source().prefetch()) == 40
    iterator = iter(source().map(fails).prefetch(3))
    assert [next(iterator) for _ in range(13)] == list(range(13))
    with pytest.raises(HomemadeError, match="thirteen"):
        next(iterator)
    with pytest.raises(ValueError, match="buffer_size=0 is less than 1"):
        source().prefetch(0)


def test_prefetch_pauses_and_resumes():
    taken = []
    pipe = Prefetcher(source().map(lambda value: taken.append(value) or value), 3)
    pipe.pause()  # nothing to pause yet
    iterator = iter(pipe)
    assert next(iterator) == 0
    pipe.pause()
    count = len(taken)
    assert list(range(1, count)) == [next(iterator) for _ in range(count - 1)]
    time.sleep(0.01)
    assert len(taken) == count
    pipe.resume()
    assert list(iterator) == list(range(count, 40))


def test_unzip_splits_columns():
    rows = IterableWrapper([(i, -i, str(i)) for i in range(5)])
    one, three = rows.unzip(3, columns_to_skip=[1])
    assert list(zip(one, three, strict=True)) == [(i, str(i)) for i in range(5)]
    (only,) = IterableWrapper([(1, 2)]).unzip(2, columns_to_skip=[0])
    assert list(only) == [2]
    with pytest.raises(ValueError, match=r"names columns outside \[0, 3\)"):
        rows.unzip(3, columns_to_skip=[3])
    with pytest.raises(ValueError, match="all columns are skipped"):
        rows.unzip(1, columns_to_skip=[0])


def test_torch_pins_as_pin_memory_has_it():
    assert list(inspect.signature(pipes._pin).parameters)[:2] == ["data", "device"]
    assert pipes._pin({"text": ["one", 2]}, None) == {"text": ["one", 2]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_pin_memory_needs_cuda():
    with pytest.raises(RuntimeError, match="pin_memory needs CUDA"):
        source().pin_memory()


def holds_a_feed(datapipe, _):
    assert find_dps(traverse_dps(datapipe), Feed)
    return datapipe


def test_a_feed_stands_for_what_is_dispatched():
    with loader(GRAPHS["dispatched"](), 2, worker_init_fn=holds_a_feed) as dataloader:
        assert list(dataloader)


def test_a_prefetching_pipe_that_a_fork_has_inherited_says_so():
    pipe = source().prefetch(2)
    iterator = iter(pipe)
    next(iterator)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            next(iterator)
        except WorkerError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert "the process was forked" in os.read(reader, 200).decode()
    os.close(reader)
    assert list(iterator) == list(range(1, 40))
