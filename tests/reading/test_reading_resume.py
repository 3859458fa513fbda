"""A state taken after any element, in any service and epoch: the rest and the epochs after it are those of one run."""

import itertools
import random
from itertools import islice

import pytest
import torch
from torch.utils.data import IterDataPipe

from stocache import StateError, reading
from stocache.reading import DataLoader2, InProcessReadingService, MultiProcessingReadingService, SequentialReadingService
from tests.support import graphs
from tests.support.edits import changed, through_json
from tests.support.graphs import COUNT, GRAPHS, WARNINGS, Counting, elements, loader, no_third, noise, source, square
from tests.support.ranks import slow

pytestmark = WARNINGS
EPOCHS = 3


def run(graph, workers, **options):
    graphs.numbers(1)
    with loader(graph(), workers, **options) as dataloader:
        return [elements(dataloader) for _ in range(EPOCHS)]


def broken_off(graph, workers, epoch, position, **options):
    graphs.numbers(1)
    with loader(graph(), workers, **options) as dataloader:
        for _ in range(epoch):
            elements(dataloader)
        list(islice(dataloader, position))
        return through_json(dataloader.state_dict())


def resumed(graph, workers, state, epoch, **options):
    """Return the elements from a state to the end of all epochs, in a process whose random numbers are elsewhere."""
    graphs.numbers(99)
    with loader(graph(), workers, seed=None, **options) as dataloader:
        dataloader.load_state_dict(state)
        return [elements(dataloader) for _ in range(EPOCHS - epoch)]


class Pairs(IterDataPipe):
    def __init__(self, datapipe):
        self.datapipe = datapipe

    def __iter__(self):
        iterator = iter(self.datapipe)
        yield from zip(iterator, iterator)  # noqa: B905

    is_replicable = lambda self: False


STATEFUL = "a map with a generator of its own"  # its second epoch depends on the first
AGAIN = {  # what must see all elements again
    STATEFUL: lambda: source().sharding_filter().map(graphs.Stateful()),
    "and pipes behind it": lambda: Pairs(source().shuffle().sharding_filter()).shuffle().batch(2),
    "behind random numbers": lambda: Pairs(source().sharding_filter().map(noise)),
}
ALL = AGAIN | GRAPHS
WORKERS = [("shuffled", (0, 2)), ("filtered", (3, 0)), ("dispatched, filtered", (2, 3))]
WORKERS += zip(AGAIN, itertools.cycle([(0, 0), (2, 2)]))
WORKERS += [slow(*row) if number % 3 else row for number, row in enumerate(zip(GRAPHS, itertools.cycle([(2, 2), (0, 0)])))]


@pytest.mark.parametrize(("name", "workers"), WORKERS)
def test_the_rest_is_that_of_one_run_also_with_another_number_of_workers_where_that_is_exact(name, workers):
    before, after = workers
    whole, epoch = run(ALL[name], before), 0 if name == STATEFUL else random.randrange(2)
    position = random.randrange(1, len(whole[epoch]) + 1)
    rest = resumed(ALL[name], after, broken_off(ALL[name], before, epoch, position), epoch)
    assert rest == [whole[epoch][position:], *whole[epoch + 1 :]], f"after {position} elements of epoch {epoch}"


def test_every_position_can_be_resumed_and_the_next_epoch_follows():
    graph = graphs.dispatched(8).map(noise).batch(3)
    with loader(graph, 2, seed=None) as dataloader:
        first, states = elements(dataloader), [(through_json(dataloader.state_dict()), torch.get_rng_state())]
        second = []
        for element in dataloader:
            second.append(repr(element))
            states.append((through_json(dataloader.state_dict()), torch.get_rng_state()))
        third = elements(dataloader)
    assert first != second != third
    for position, (state, of_torch) in enumerate(states):
        graphs.numbers(99)
        torch.set_rng_state(of_torch)
        with loader(graph, 2, seed=None) as dataloader:
            dataloader.load_state_dict(state)
            assert [elements(dataloader), elements(dataloader)] == [second[position:], third]


@pytest.mark.parametrize(("name", "workers"), [("noisy batches", 0), ("both", 2)])
def test_what_was_resumed_can_be_broken_off_again(name, workers):
    whole = run(GRAPHS[name], workers)
    state = broken_off(GRAPHS[name], workers, 1, 4)
    graphs.numbers(99)
    with loader(GRAPHS[name](), workers, seed=None) as dataloader:
        dataloader.load_state_dict(state)
        iter(dataloader)
        iterator = iter(dataloader)  # nothing was taken, so it is the same epoch
        list(islice(iterator, 5))
        state = dataloader.state_dict()
    assert resumed(GRAPHS[name], workers, state, 1) == [whole[1][9:], whole[2]]


@pytest.mark.parametrize(("name", "reason"), [("batched", "after the sharding_filter"), ("noisy", "its own random numbers")])
def test_another_number_of_workers_is_refused_where_that_is_not_exact(name, reason):
    state = broken_off(GRAPHS[name], 2, 0, 5)
    for workers in (0, 3):
        with pytest.raises(StateError, match=f"(?s)the state was taken with 2 workers.*now there are {workers}.*{reason}"):
            resumed(GRAPHS[name], workers, state, 0)


def test_a_state_between_epochs_goes_on_with_any_number_of_workers():
    whole = run(GRAPHS["batched"], 0)
    with loader(GRAPHS["batched"](), 2) as dataloader:
        for epoch in range(2):
            assert resumed(GRAPHS["batched"], 0, dataloader.state_dict(), epoch) == whole[epoch:]
            elements(dataloader)


COUNTED = {
    "after the shard": lambda count: source().shuffle().sharding_filter().map(count),
    "after the shard, batched": lambda count: source().shuffle().sharding_filter().map(count).batch(5),
    "after a dispatch": lambda count: graphs.dispatched().map(count),
    "before a dispatch": lambda count: source().map(count).sharding_round_robin_dispatch(),
    "before a filter": lambda count: source().shuffle().sharding_filter().map(count).filter(no_third),
}


@pytest.mark.parametrize(("where", "workers"), [*((where, 2) for where in COUNTED), ("after the shard, batched", 0)])
def test_work_that_cannot_be_noticed_is_not_done_again(where, workers):
    count = Counting()
    graph, options = COUNTED[where](count), {"multiprocessing_context": "fork"} if workers else {}
    with loader(graph, workers, **options) as dataloader:
        iterator = iter(dataloader)
        list(islice(iterator, 5))
        state, rest = dataloader.state_dict(), elements(iterator)
    count.taken()
    with loader(graph, workers, **options) as dataloader:
        dataloader.load_state_dict(state)
        assert elements(dataloader) == rest
    assert count.taken() <= COUNT - 5 * (5 if "batched" in where else 1)


def test_functions_of_the_user_are_called_when_resuming_too():
    options = {"worker_init_fn": lambda datapipe, *_: datapipe.map(square), "multiprocessing_context": "fork"}
    for make in (lambda: source().shuffle().sharding_filter(), graphs.dispatched):
        state = broken_off(make, 2, 0, 7, **options)
        assert resumed(make, 2, state, 0, **options)[0] == run(make, 2, **options)[0][7:]


def test_from_state_brings_its_graph_and_the_beginning_of_the_epoch_can_be_had_instead():
    whole = run(GRAPHS["noisy"], 2)
    state = broken_off(GRAPHS["noisy"], 2, 1, 4)
    with DataLoader2.from_state(state, graphs.service(2)) as dataloader:
        assert elements(dataloader) == whole[1][4:]
    with DataLoader2(None, reading_service=graphs.service(2)) as dataloader:
        dataloader.load_state_dict(state)
        dataloader._restore_checkpoint_beginning_of_epoch()
        assert [elements(dataloader), elements(dataloader)] == whole[1:]


def test_a_state_is_loaded_before_iterating_with_the_same_graph_if_that_does_not_pickle():
    graph = source().sharding_filter().map(lambda value: value + 1)
    with loader(graph, 0) as dataloader:
        next(iter(dataloader))
        state = dataloader.state_dict()
        with pytest.raises(StateError, match=r"has begun to iterate. Load the state into a new one"):
            dataloader.load_state_dict(state)
    with pytest.raises(StateError, match=r"the graph of the state did not pickle. Make the loader with the same graph"):
        DataLoader2.from_state(state)
    with loader(graph, 0) as dataloader:
        dataloader.load_state_dict(state)
        assert list(dataloader) == list(range(2, 41))


class Plain(reading.ReadingServiceInterface):
    def initialize(self, datapipe):
        return datapipe.map(str)


def test_a_state_of_another_graph_or_service_is_refused():
    state = broken_off(GRAPHS["shuffled"], 0, 0, 5)
    with DataLoader2(source(), reading_service=SequentialReadingService(InProcessReadingService())) as dataloader:
        next(iter(dataloader))
        of_one = dataloader.state_dict()
    resume = lambda service: list(DataLoader2.from_state(of_one, service))
    two = SequentialReadingService(Plain(), InProcessReadingService())
    for call, arguments, message in (
        (resumed, [GRAPHS["filtered"], 0, state, 0], r"with graph \['Mapper.*; this one has \['Filter"),
        (resumed, [GRAPHS["shuffled"], 0, changed(state, ("position", "delivered"), 6), 0], "6 elements .* are made from 6"),
        (DataLoader2.from_state, [changed(state, ("parts", "graph"), state["parts"]["graph"][:40])], "cannot be unpickled"),
        (resume, [InProcessReadingService()], "is not a state of a reading service"),
        (resume, [two], "belongs to 1 reading services .*, but here are 2"),
        (resume, [Plain()], "Plain keeps no position"),
    ):
        with pytest.raises(StateError, match=message):
            call(*arguments)


class Skipping(reading.CheckpointableReadingServiceInterface):
    """Skips what was delivered."""

    def __init__(self):
        self.skipped = 0

    def initialize(self, datapipe):
        self.delivered = []
        return datapipe.map(lambda value: self.delivered.append(value) or value)

    def checkpoint(self):
        return str(self.skipped + len(self.delivered)).encode()

    def restore(self, datapipe, serialized_state):
        self.skipped = int(serialized_state)
        return self.initialize(datapipe.filter(lambda value: value >= self.skipped))


@pytest.mark.parametrize("make", [
    Plain, Skipping, lambda: SequentialReadingService(Skipping(), Plain()), lambda: graphs.service(2, Plain()),
    lambda: SequentialReadingService(MultiProcessingReadingService(2), Plain()),
])  # fmt: skip
def test_services_of_the_user_are_resumed(make):
    with DataLoader2(source().sharding_filter(), reading_service=make()) as dataloader:
        iterator = iter(dataloader)
        list(islice(iterator, 6))
        state, rest = dataloader.state_dict(), elements(iterator)
    assert len(rest) == COUNT - 6
    with DataLoader2.from_state(state, make()) as dataloader:
        assert elements(dataloader) == rest
