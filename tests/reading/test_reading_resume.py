"""A state taken after any element, in any service and epoch: the rest and the epochs after it are those of one run."""

import base64
import contextlib
import pickle
import random
from itertools import islice

import pytest
import torch
from torch.utils.data import IterDataPipe

from stocache import StateError, reading
from stocache.reading import DataLoader2, InProcessReadingService, MultiProcessingReadingService, SequentialReadingService
from tests.support import graphs
from tests.support.edits import changed, leaves, places, through_json
from tests.support.graphs import COUNT, GRAPHS, WARNINGS, Counting, elements, loader, no_third, noise, source, square

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


def check(graph, before, after, epoch, position, **options):
    whole = run(graph, before, **options)
    rest = resumed(graph, after, broken_off(graph, before, epoch, position, **options), epoch, **options)
    assert rest == [whole[epoch][position:], *whole[epoch + 1 :]], f"after {position} elements of epoch {epoch}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_rest_is_that_of_one_run(name, workers):
    check(GRAPHS[name], workers, workers, epoch=random.randrange(2), position=random.randrange(1, 13))


@pytest.mark.parametrize(
    ("where", "workers", "seed"),
    [("in process", 0, 5), ("in workers", 2, None), ("dispatched", 2, 5), ("dispatched, noisy batches", 2, None)],
)
def test_every_position_can_be_resumed_and_the_next_epoch_follows(where, workers, seed):
    def graph():
        divided = graphs.dispatched(8) if "dispatched" in where else source(8).shuffle().sharding_filter()
        return divided.map(noise).batch(3) if "noisy" in where else divided.map(square).filter(no_third)

    with loader(graph(), workers, seed) as dataloader:
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
        with loader(graph(), workers, seed=None) as dataloader:
            dataloader.load_state_dict(state)
            assert [elements(dataloader), elements(dataloader)] == [second[position:], third]


@pytest.mark.parametrize(("name", "workers"), [("noisy batches", 0), ("noisy batches", 2), ("both", 2)])
def test_what_was_resumed_can_be_broken_off_again(name, workers):
    whole = run(GRAPHS[name], workers)
    state = broken_off(GRAPHS[name], workers, 1, 4)
    graphs.numbers(99)
    with loader(GRAPHS[name](), workers, seed=None) as dataloader:
        dataloader.load_state_dict(state)
        again = dataloader.state_dict()
        again["parts"]["graph"] = state["parts"]["graph"]  # the pickle of a shuffle holds a generator, which is set later
        assert again == state
        iter(dataloader)
        iterator = iter(dataloader)  # nothing was taken, so it is the same epoch
        list(islice(iterator, 5))
        state = dataloader.state_dict()
    assert resumed(GRAPHS[name], workers, state, 1) == [whole[1][9:], whole[2]]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("shuffled", 0, 2), ("filtered", 2, 3), ("filtered", 3, 0), ("dispatched", 2, 0), ("dispatched, filtered", 2, 3)],
)
def test_another_number_of_workers_goes_on_where_that_is_exact(name, before, after):
    check(GRAPHS[name], before, after, epoch=1, position=11)


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


def test_a_seed_that_is_set_in_an_epoch_or_before_its_rest_is_for_the_next():
    one, two = run(GRAPHS["shuffled"], 0)[:2]
    with loader(GRAPHS["shuffled"](), 0) as dataloader:
        next(iter(dataloader))
        dataloader.seed(5)
        states = [dataloader.state_dict()]
    with loader(GRAPHS["shuffled"](), 0, seed=None) as dataloader:
        dataloader.load_state_dict(broken_off(GRAPHS["shuffled"], 0, 0, 1))
        dataloader.seed(5)
        states.append(dataloader.state_dict())
    for state in states:
        assert resumed(GRAPHS["shuffled"], 0, state, 0) == [one[1:], one, two]


COUNTED = {
    "after the shard": lambda count: source().shuffle().sharding_filter().map(count),
    "after the shard, batched": lambda count: source().shuffle().sharding_filter().map(count).batch(5),
    "after a dispatch": lambda count: graphs.dispatched().map(count),
    "before a dispatch": lambda count: source().map(count).sharding_round_robin_dispatch(),
    "before a filter": lambda count: source().shuffle().sharding_filter().map(count).filter(no_third),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", COUNTED)
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


class Pairs(IterDataPipe):
    def __init__(self, datapipe):
        self.datapipe = datapipe

    def __iter__(self):
        iterator = iter(self.datapipe)
        yield from zip(iterator, iterator)  # noqa: B905

    is_replicable = lambda self: False


AGAIN = {
    "a map with a generator of its own": lambda: source().sharding_filter().map(graphs.Stateful()),
    "a pipe of the main process": lambda: Pairs(source().shuffle().sharding_filter().map(square)),
    "and pipes behind it": lambda: Pairs(source().shuffle().sharding_filter()).shuffle().batch(2),
    "behind batches": lambda: Pairs(source().shuffle().sharding_filter().batch(2)),
    "behind random numbers": lambda: Pairs(source().sharding_filter().map(noise)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", AGAIN)
def test_what_must_see_all_elements_sees_them_again(what, workers):
    check(AGAIN[what], workers, workers, epoch=0 if "map" in what else 1, position=3)


@pytest.mark.parametrize("make", [lambda: source().shuffle().sharding_filter(), graphs.dispatched])
def test_functions_of_the_user_are_called_when_resuming_too(make):
    options = {"worker_init_fn": lambda datapipe, *_: datapipe.map(square), "multiprocessing_context": "fork"}
    check(make, 2, 2, epoch=0, position=7, **options)


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


def test_what_is_not_a_state_or_is_that_of_another_graph_is_refused():
    for wrong in (None, [1], {}, {"what": "DataLoader", "version": 2}):
        with pytest.raises(StateError, match="is not a state of a DataLoader2"):
            DataLoader2(source()).load_state_dict(wrong)
    with pytest.raises(StateError, match="reads states of version 2, and this state has version 1"):
        DataLoader2(source()).load_state_dict({"version": 1, "dropped": 0})
    state = broken_off(GRAPHS["shuffled"], 0, 0, 5)
    with pytest.raises(StateError, match=r"with graph \['Mapper.*; this one has \['Filter"):
        resumed(GRAPHS["filtered"], 0, state, 0)
    for cut, error in ("{", "the checkpoint of a InProcessReadingService is damaged"), (None, "is damaged"), (b"7", "is not a"):
        with pytest.raises(StateError, match=error):
            InProcessReadingService().restore(source(), cut)
    with pytest.raises(StateError, match="the graph of the state cannot be unpickled"):
        DataLoader2.from_state(changed(state, ("parts", "graph"), state["parts"]["graph"][:40]))
    with pytest.raises(StateError, match="6 elements of the loader are made from 6 of the reading service, which begins af"):
        resumed(GRAPHS["shuffled"], 0, changed(state, ("position", "delivered"), 6), 0)


WRONG = [None, -1, 10**30, "AAAA", [7], {"a": 1}, 0.5, object()]


@pytest.mark.parametrize("position", [0, 3, COUNT])
def test_a_damaged_state_is_refused_or_resumed_as_another(position):
    services = SequentialReadingService(Plain(), InProcessReadingService())
    with DataLoader2(GRAPHS["noisy"](), reading_service=services) as dataloader:
        list(islice(iter(dataloader), position))
        state = through_json(dataloader.state_dict())
    refused = 0
    for path in places(state):
        for number, wrong in enumerate(WRONG):
            with DataLoader2(GRAPHS["noisy"]() if number % 2 else None, reading_service=services) as dataloader:
                try:
                    dataloader.load_state_dict(changed(state, path, wrong))
                    elements(dataloader)
                except StateError:
                    refused += 1
    assert refused > 50


def test_a_damaged_state_of_workers_is_refused_or_resumed_as_another():
    graph = GRAPHS["dispatched, filtered"]
    state = broken_off(graph, 2, 0, 5)
    for path in leaves(state["parts"]["service"]["position"], ("parts", "service", "position")):
        for wrong in WRONG:
            with contextlib.suppress(StateError):
                resumed(graph, 2, changed(state, path, wrong), EPOCHS - 1)


ran = []


class Running:
    def __reduce__(self):
        return exec, (f"from {__name__} import ran; ran.append(1)",)


def test_a_loader_with_a_graph_unpickles_nothing():
    ran.clear()
    state = broken_off(GRAPHS["shuffled"], 0, 0, 5)
    code = base64.b64encode(pickle.dumps(Running())).decode()
    rest = resumed(GRAPHS["shuffled"], 0, changed(state, ("parts", "graph"), code), 0)
    assert rest[0] == run(GRAPHS["shuffled"], 0)[0][5:]
    for position in (code, {"a": code}, state["parts"]["service"] | {"parts": code}):
        with pytest.raises(StateError, match="reading service"):
            resumed(GRAPHS["shuffled"], 0, changed(state, ("parts", "service"), position), 0)
    assert ran == []
    with pytest.raises(StateError, match="the graph of the state is damaged: it is NoneType"):
        DataLoader2.from_state(changed(state, ("parts", "graph"), code))
    assert ran == [1]  # as its docstring says


def test_a_state_of_other_services_is_refused():
    whole = SequentialReadingService(InProcessReadingService())
    with DataLoader2(source(), reading_service=whole) as dataloader:
        next(iter(dataloader))
        state = dataloader.state_dict()
    for other, message in (
        (InProcessReadingService(), "is not a state of a reading service"),
        (SequentialReadingService(Plain(), InProcessReadingService()), "belongs to 1 reading services .*, but here are 2"),
        (Plain(), "Plain keeps no position"),
    ):
        with pytest.raises(StateError, match=message):
            list(DataLoader2.from_state(state, other))


class Plain(reading.ReadingServiceInterface):
    def initialize(self, datapipe):
        return datapipe.map(str)


class Knowing(reading.CheckpointableReadingServiceInterface):
    def initialize(self, datapipe):
        self.datapipe = Known(datapipe, 0)
        return self.datapipe

    def checkpoint(self):
        return str(self.datapipe.given).encode()

    def restore(self, datapipe, serialized_state):
        self.datapipe = Known(datapipe, int(serialized_state))
        return self.datapipe


class Known(IterDataPipe):
    def __init__(self, datapipe, begin):
        self.datapipe, self.given = datapipe, begin

    def __iter__(self):
        begin, self.given = self.given, 0
        for value in self.datapipe:
            self.given += 1
            if self.given > begin:
                yield value


SERVICES = [
    Plain, Knowing,
    lambda: SequentialReadingService(Plain()), lambda: SequentialReadingService(Plain(), Knowing()),
    lambda: graphs.service(0, Plain()), lambda: graphs.service(2, Plain()),
    lambda: SequentialReadingService(MultiProcessingReadingService(2), Plain()),
]  # fmt: skip


@pytest.mark.parametrize("make", SERVICES)
def test_services_of_the_user_are_resumed(make):
    with DataLoader2(source().sharding_filter(), reading_service=make()) as dataloader:
        iterator = iter(dataloader)
        list(islice(iterator, 6))
        state, rest = dataloader.state_dict(), elements(iterator)
    assert len(rest) == COUNT - 6
    with DataLoader2.from_state(state, make()) as dataloader:
        assert elements(dataloader) == rest
