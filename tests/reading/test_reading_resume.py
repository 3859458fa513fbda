"""A state taken after any element, in any service and epoch: the rest and the epochs after it are those of one run."""

import base64
import contextlib
import json
import pickle
import random

import pytest
import torch
from torch.utils.data import IterDataPipe

from stocache import StateError
from stocache.reading import (
    CheckpointableReadingServiceInterface,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)
from tests.support.edits import changed, leaves
from tests.support.graphs import (
    COUNT,
    GRAPHS,
    SAME_FOR_ANY_WORKERS,
    Counting,
    elements,
    loader,
    no_third,
    noise,
    numbers,
    plain,
    service,
    source,
    square,
    tensor,
    twice,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")
EPOCHS = 3


def run(graph, workers, **options):
    """Return the elements of all epochs."""
    numbers(1)
    with loader(graph(), workers, **options) as dataloader:
        return [elements(dataloader) for _ in range(EPOCHS)]


def saved(dataloader):
    """Return the state of a loader, after JSON has saved it."""
    return json.loads(json.dumps(dataloader.state_dict()))


def broken_off(graph, workers, epoch, position, **options):
    """Return the state that is taken in an epoch, after so many elements."""
    numbers(1)
    with loader(graph(), workers, **options) as dataloader:
        for _ in range(epoch):
            elements(dataloader)
        iterator = iter(dataloader)
        for _ in range(position):
            next(iterator)
        return saved(dataloader)


def resumed(graph, workers, state, epoch, **options):
    """Return the elements from a state to the end of all epochs, in a process whose random numbers are elsewhere."""
    numbers(99)
    with loader(graph(), workers, seed=None, **options) as dataloader:
        dataloader.load_state_dict(state)
        return [elements(dataloader) for _ in range(EPOCHS - epoch)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.sampled(3)
def test_the_rest_is_that_of_one_run(name, workers):
    whole = run(GRAPHS[name], workers)
    draw = random.Random(f"{name} {workers}")
    places = [(0, 0), (draw.randrange(EPOCHS), draw.randrange(1, len(whole[0]))), (1, len(whole[1]))]
    for epoch, position in places:
        state = broken_off(GRAPHS[name], workers, epoch, position)
        rest = resumed(GRAPHS[name], workers, state, epoch)
        assert rest == [whole[epoch][position:], *whole[epoch + 1 :]], f"after {position} elements of epoch {epoch}"


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize(
    ("where", "workers"), [("in process", 0), ("in workers", 2), ("dispatched", 2), ("dispatched, noisy batches", 2)]
)
def test_every_position_can_be_resumed_and_the_next_epoch_follows(where, workers, seed):
    def graph():
        shuffled = source(14).shuffle()
        if "noisy" in where:
            return shuffled.sharding_round_robin_dispatch().map(noise).batch(3)
        divided = shuffled.sharding_round_robin_dispatch() if where == "dispatched" else shuffled.sharding_filter()
        return divided.map(square).filter(no_third)

    numbers(1)
    with loader(graph(), workers, seed) as dataloader:
        first, states = elements(dataloader), [(saved(dataloader), torch.get_rng_state())]
        second = []
        for element in dataloader:
            second.append(plain(element))
            states.append((saved(dataloader), torch.get_rng_state()))
        third = elements(dataloader)
    assert first != second != third
    for position, (state, of_torch) in enumerate(states):
        numbers(99)
        torch.set_rng_state(of_torch)
        with loader(graph(), workers, seed=None) as dataloader:
            dataloader.load_state_dict(state)
            assert [elements(dataloader), elements(dataloader)] == [second[position:], third]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["noisy batches", "filtered", "both"])
def test_what_was_resumed_can_be_broken_off_again(name, workers):
    whole = run(GRAPHS[name], workers)
    state = broken_off(GRAPHS[name], workers, 1, 4)
    numbers(99)
    with loader(GRAPHS[name](), workers, seed=None) as dataloader:
        dataloader.load_state_dict(state)
        again = dataloader.state_dict()
        again["parts"]["graph"] = state["parts"]["graph"]  # the pickle of a shuffle holds a generator, which is set later
        assert again == state
        iter(dataloader)
        iterator = iter(dataloader)  # nothing was taken, so it is the same epoch
        for _ in range(5):
            next(iterator)
        state = dataloader.state_dict()
    assert resumed(GRAPHS[name], workers, state, 1) == [whole[1][9:], whole[2]]


@pytest.mark.parametrize("name", sorted(SAME_FOR_ANY_WORKERS - {"both", "both, branches of dispatched", "prefetched"}))
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3), (3, 0)])
@pytest.mark.sampled(3)
def test_another_number_of_workers_goes_on_where_that_is_exact(name, before, after):
    whole = run(GRAPHS[name], 0)
    for position in (1, 11):
        state = broken_off(GRAPHS[name], before, 1, position)
        assert resumed(GRAPHS[name], after, state, 1) == [whole[1][position:], whole[2]]


def test_another_number_of_workers_is_refused_where_that_is_not_exact():
    for name, reason in (("batched", "an element after the sharding_filter"), ("noisy", "its own random numbers")):
        state = broken_off(GRAPHS[name], 2, 0, 5)
        for workers in (0, 3):
            with pytest.raises(StateError, match=f"(?s)the state was taken with 2 workers.*now there are {workers}.*{reason}"):
                resumed(GRAPHS[name], workers, state, 0)


def test_a_state_between_epochs_goes_on_with_any_number_of_workers():
    with loader(GRAPHS["shuffled"](), 2) as dataloader:
        first = elements(dataloader)
        state = dataloader.state_dict()
        second = elements(dataloader)
    assert first != second
    assert resumed(GRAPHS["shuffled"], 0, state, 1)[0] == second


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_seed_the_rest_is_the_same_and_torch_decides_about_later_epochs(workers):
    numbers(1)
    with loader(GRAPHS["shuffled"](), workers, seed=None) as dataloader:
        iterator = iter(dataloader)
        next(iterator)
        state = saved(dataloader)
        rest = elements(iterator)
        torch.manual_seed(3)
        later = elements(dataloader)
    numbers(99)
    with loader(GRAPHS["shuffled"](), workers, seed=None) as dataloader:
        dataloader.load_state_dict(state)
        assert elements(dataloader) == rest
        torch.manual_seed(3)
        assert elements(dataloader) == later


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
        with loader(GRAPHS["shuffled"](), 0, seed=None) as dataloader:
            dataloader.load_state_dict(state)
            assert [elements(dataloader) for _ in range(3)] == [one[1:], one, two]


def test_a_state_that_nothing_was_taken_of_begins_at_the_beginning():
    dataloader = loader(GRAPHS["shuffled"](), 0)
    assert resumed(GRAPHS["shuffled"], 0, dataloader.state_dict(), 0) == run(GRAPHS["shuffled"], 0)


# ---------------------------------------------------------------------------------------------------- how it is done


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "where", ["after the shard", "after the shard, batched", "after a dispatch", "before a dispatch", "before a filter"]
)
def test_work_that_cannot_be_noticed_is_not_done_again(where, workers):
    count = Counting()
    graph = {
        "after the shard": lambda: source().shuffle().sharding_filter().map(count),
        "after the shard, batched": lambda: source().shuffle().sharding_filter().map(count).batch(5),
        "after a dispatch": lambda: source().shuffle().sharding_round_robin_dispatch().map(count),
        "before a dispatch": lambda: source().map(count).sharding_round_robin_dispatch(),
        "before a filter": lambda: source().shuffle().sharding_filter().map(count).filter(no_third),
    }[where]
    with loader(graph(), workers, **({"multiprocessing_context": "fork"} if workers else {})) as dataloader:
        iterator = iter(dataloader)
        delivered = len([next(iterator) for _ in range(5)])
        state = dataloader.state_dict()
        rest = elements(iterator)
    count.taken()
    with loader(graph(), workers, **({"multiprocessing_context": "fork"} if workers else {})) as dataloader:
        dataloader.load_state_dict(state)
        assert elements(dataloader) == rest
    done = delivered * (5 if "batched" in where else 1)
    if where == "before a filter":  # 5 that it let through, and those in front of the next that it did not
        assert count.taken() <= COUNT - done
    else:
        assert count.taken() == COUNT - done


class Stateful:
    """A map with a generator of its own."""

    def __init__(self):
        self.numbers = random.Random(3)

    def __call__(self, value):
        return value, self.numbers.random()


def test_a_map_with_a_generator_of_its_own_is_run_again():
    def graph():
        return source().sharding_filter().map(Stateful())

    with loader(graph(), 2) as dataloader:
        iterator = iter(dataloader)
        for _ in range(7):
            next(iterator)
        state, rest = dataloader.state_dict(), elements(iterator)
    with loader(graph(), 2) as dataloader:
        dataloader.load_state_dict(state)
        assert elements(dataloader) == rest


def test_functions_of_the_user_are_called_when_resuming_too():
    def change(datapipe, *_):
        return datapipe.map(square)

    options = {"worker_init_fn": change, "multiprocessing_context": "fork"}
    for name in ("filtered", "dispatched, noisy batches", "batched"):
        graph = GRAPHS["plain"] if name == "batched" else (lambda: source().shuffle().sharding_round_robin_dispatch())
        whole = run(graph, 2, **options)
        state = broken_off(graph, 2, 0, 7, **options)
        assert resumed(graph, 2, state, 0, **options) == [whole[0][7:], *whole[1:]]


class Pairs(IterDataPipe):
    """A pipe of the main process that is made of two elements each, in a way that nobody knows."""

    def __init__(self, datapipe):
        self.datapipe = datapipe

    def __iter__(self):
        iterator = iter(self.datapipe)
        yield from zip(iterator, iterator)  # noqa: B905

    def is_replicable(self):
        return False


@pytest.mark.parametrize("workers", [0, 2])
def test_pipes_of_the_main_process_are_brought_along(workers):
    graphs = (
        lambda: Pairs(source().shuffle().sharding_filter().map(square)),
        lambda: Pairs(source().shuffle().sharding_filter()).shuffle().batch(2),
        lambda: Pairs(source().shuffle().sharding_filter().batch(2)),
        lambda: Pairs(source().sharding_filter().map(noise)),
    )
    for graph in graphs:
        whole = run(graph, workers)
        state = broken_off(graph, workers, 1, 3)
        assert resumed(graph, workers, state, 1) == [whole[1][3:], whole[2]]


# ---------------------------------------------------------------------------------------------------- states


def test_from_state_brings_its_graph():
    state = broken_off(GRAPHS["shuffled"], 2, 1, 4)
    whole = run(GRAPHS["shuffled"], 2)
    with DataLoader2.from_state(state, service(2)) as dataloader:
        assert elements(dataloader) == whole[1][4:]
    with DataLoader2(None, reading_service=service(2)) as dataloader:
        dataloader.load_state_dict(state)
        assert elements(dataloader) == whole[1][4:]


def test_a_graph_that_does_not_pickle_is_to_be_made_again():
    graph = source().sharding_filter().map(lambda value: value + 1)
    with loader(graph, 0) as dataloader:
        next(iter(dataloader))
        state = dataloader.state_dict()
    with pytest.raises(StateError, match=r"the graph of the state did not pickle. Make the loader with the same graph"):
        DataLoader2.from_state(state)
    with loader(graph, 0) as dataloader:
        dataloader.load_state_dict(state)
        assert list(dataloader) == list(range(2, 41))


def test_the_beginning_of_the_epoch_can_be_had_instead():
    whole = run(GRAPHS["noisy"], 2)
    with loader(GRAPHS["noisy"](), 2, seed=None) as dataloader:
        dataloader.load_state_dict(broken_off(GRAPHS["noisy"], 2, 1, 9))
        dataloader._restore_checkpoint_beginning_of_epoch()
        assert [elements(dataloader), elements(dataloader)] == whole[1:]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "is not a state of a DataLoader2"),
        ([1], "is not a state of a DataLoader2"),
        ({}, "is not a state of a DataLoader2"),
        ({"version": 1, "dropped": 0}, "reads states of version 2, and this state has version 1"),
        ({"what": "DataLoader", "version": 2}, "is not a state of a DataLoader2"),
    ],
)
def test_what_is_not_a_state_is_refused(wrong, message):
    with pytest.raises(StateError, match=message):
        DataLoader2(source()).load_state_dict(wrong)


def test_the_state_of_another_graph_is_refused():
    state = broken_off(GRAPHS["shuffled"], 0, 0, 5)
    with pytest.raises(StateError, match=r"with graph \['Mapper.*; this one has \['Filter"):
        resumed(GRAPHS["filtered"], 0, state, 0)
    with pytest.raises(
        StateError, match="6 elements of the loader are made from 6 of the reading service, which begins after 5"
    ):
        resumed(GRAPHS["shuffled"], 0, changed(state, ("position", "delivered"), 6), 0)


WRONG = [None, -1, 10**30, 3, "", "AAAA", [], [7], {}, {"a": 1}, True, 0.5, object()]


@pytest.mark.parametrize("position", [0, 3, COUNT])
def test_a_damaged_state_is_refused_or_resumed_as_another(position):
    numbers(1)
    services = SequentialReadingService(Unchanging(), InProcessReadingService())
    with DataLoader2(source().shuffle().sharding_filter().map(noise), reading_service=services) as dataloader:
        if position == COUNT:
            list(dataloader)
        else:
            for _ in zip(range(position), dataloader, strict=False):
                pass
        state = saved(dataloader)
    assert len(list(leaves(state))) > (30 if 0 < position < COUNT else 8)
    refused = 0
    for path in [*leaves(state), *[path[:-1] for path in leaves(state) if len(path) > 1]]:
        for wrong in WRONG:
            for graph in (source().shuffle().sharding_filter().map(noise), None):
                with DataLoader2(graph, reading_service=services) as dataloader:
                    try:
                        dataloader.load_state_dict(changed(state, path, wrong))
                        elements(dataloader)
                    except StateError:
                        refused += 1
    assert refused > 100


@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_state_of_workers_is_refused_or_resumed_as_another(wrong):
    state = broken_off(GRAPHS["dispatched, filtered"], 2, 0, 5)
    for path in leaves(state["parts"]["service"]["position"], ("parts", "service", "position")):
        with contextlib.suppress(StateError):
            resumed(GRAPHS["dispatched, filtered"], 2, changed(state, path, wrong), EPOCHS - 1)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_cut_state_is_refused(share):
    state = broken_off(GRAPHS["noisy"], 0, 0, 5)
    graph, service = state["parts"]["graph"], json.dumps(state["parts"]["service"])
    with pytest.raises(StateError, match="the graph of the state cannot be unpickled"):
        DataLoader2.from_state(changed(state, ("parts", "graph"), graph[: int(share * len(graph)) // 4 * 4]))
    with pytest.raises(StateError, match="the checkpoint of a InProcessReadingService is damaged"):
        InProcessReadingService().restore(source(), service[: int(share * len(service))].encode())


ran = []


class Running:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return run_code, ()


def run_code():
    ran.append(1)


def test_a_loader_with_a_graph_unpickles_nothing():
    state = broken_off(GRAPHS["shuffled"], 0, 0, 5)
    code = base64.b64encode(pickle.dumps(Running())).decode()
    with loader(GRAPHS["shuffled"](), 0) as dataloader:
        dataloader.load_state_dict(changed(state, ("parts", "graph"), code))
        assert elements(dataloader) == run(GRAPHS["shuffled"], 0)[0][5:]
    for position in (code, {"a": code}, state["parts"]["service"] | {"parts": code}):
        with loader(GRAPHS["shuffled"](), 0) as dataloader:
            dataloader.load_state_dict(changed(state, ("parts", "service"), position))
            with pytest.raises(StateError, match="reading service"):
                iter(dataloader)
    assert ran == []
    with pytest.raises(StateError, match="the graph of the state is damaged: it is NoneType"):
        DataLoader2.from_state(changed(state, ("parts", "graph"), code))
    assert ran == [1]  # as its docstring says


def test_a_state_is_loaded_before_iterating():
    with loader(source(), 0) as dataloader:
        next(iter(dataloader))
        with pytest.raises(StateError, match=r"has begun to iterate. Load the state into a new one"):
            dataloader.load_state_dict(dataloader.state_dict())


def test_a_state_of_other_services_is_refused():
    whole = SequentialReadingService(InProcessReadingService())
    with DataLoader2(source(), reading_service=whole) as dataloader:
        next(iter(dataloader))
        state = dataloader.state_dict()
    with pytest.raises(StateError, match="is not a state of a reading service"):
        list(DataLoader2.from_state(state, InProcessReadingService()))
    with pytest.raises(StateError, match="the state belongs to 1 reading services in sequence, but here are 2"):
        list(DataLoader2.from_state(state, SequentialReadingService(Plain(), InProcessReadingService())))
    with pytest.raises(StateError, match="Plain keeps no position"):
        list(DataLoader2.from_state(state, Plain()))


# ---------------------------------------------------------------------------------------------------- the user's services


class Plain(ReadingServiceInterface):
    """A service that knows nothing of checkpoints."""

    def initialize(self, datapipe):
        return datapipe.map(square)


class Unchanging(Plain):
    """A service that leaves the graph as it is."""

    def initialize(self, datapipe):
        return datapipe


class Knowing(CheckpointableReadingServiceInterface):
    """A service that keeps where it is."""

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


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        Knowing,
        lambda: SequentialReadingService(Plain(), InProcessReadingService()),
        lambda: SequentialReadingService(Plain(), MultiProcessingReadingService(2)),
        lambda: SequentialReadingService(MultiProcessingReadingService(2), Plain()),
        lambda: SequentialReadingService(Plain()),
        lambda: SequentialReadingService(Plain(), Knowing()),
    ],
)
def test_services_of_the_user_are_resumed(make):
    with DataLoader2(source().sharding_filter(), reading_service=make()) as dataloader:
        iterator = iter(dataloader)
        for _ in range(6):
            next(iterator)
        state, rest = dataloader.state_dict(), elements(iterator)
    assert len(rest) == COUNT - 6
    with DataLoader2.from_state(state, make()) as dataloader:
        assert elements(dataloader) == rest


def test_tensors_are_resumed():
    def graph():
        return source().map(tensor).sharding_round_robin_dispatch().map(noise).shuffle()

    whole = run(graph, 2)
    state = broken_off(graph, 2, 0, 11)
    assert resumed(graph, 2, state, 0) == [whole[0][11:], *whole[1:]]


def test_one_to_many_is_resumed_midway_through_one():
    def graph():
        return source().shuffle().sharding_filter().map(twice).unbatch().map(plain)

    whole = run(graph, 2)
    state = broken_off(graph, 2, 0, 11)
    assert resumed(graph, 2, state, 0) == [whole[0][11:], *whole[1:]]
