"""torch's iterators and Python's queues, made quicker, do what they did."""

import gc
import multiprocessing
import multiprocessing.queues
import pickle
import queue
import select
import warnings
from multiprocessing.context import ForkContext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import IterableDataset

import stocache
from stocache.loader.torch_iterators import QuickQueue, _is_ready, _kept, with_quick_queues

WAYS = {
    "main": {},
    "processes": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}


def is_quick(some):
    return getattr(some._poll, "func", None) is _is_ready


def _answer(requests, answers):
    answers.put((is_quick(requests), is_quick(answers), requests.get(timeout=20)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.leaves_descriptors  # the semaphores of a queue
def test_queues_are_quick_in_each_process(method):
    context = with_quick_queues(multiprocessing.get_context(method))
    requests, answers = context.Queue(), context.Queue()
    process = context.Process(target=_answer, args=(requests, answers))
    process.start()
    requests.put("a")
    assert answers.get(timeout=20) == (True, True, "a")
    assert is_quick(answers)
    process.join()
    for timeout in (0.0, 0.01, -1.0):
        with pytest.raises(queue.Empty):
            answers.get(timeout=timeout)
    with pytest.raises(queue.Empty):
        answers.get(block=False)
    for some in (requests, answers):
        some.close()
        some.join_thread()


@pytest.fixture
def quick():
    some = QuickQueue(ctx=multiprocessing.get_context("fork"))
    yield some
    some.close()
    some.join_thread()
    some._reader.close()
    some._writer.close()


@pytest.mark.leaves_descriptors  # the semaphores of a queue
def test_small_messages_are_sent_at_once_and_the_order_stays(quick):
    largest = bytes(select.PIPE_BUF - 4 - len(pickle.dumps(bytes(5000))) + 5000)
    quick.put("a")
    quick.put(largest)
    assert quick._thread is None
    assert (quick.get(timeout=20), quick.get(timeout=20)) == ("a", largest)
    messages = ["b", largest + b"0", bytes(100_000), *range(100)]
    for message in messages:
        quick.put(message)
    assert quick._thread is not None
    assert [quick.get(timeout=20) for _ in messages] == messages


@pytest.mark.leaves_descriptors
def test_nobody_waits_for_a_full_pipe_or_for_a_process_that_was_killed_while_it_sent(quick):
    for number in range(10_000):
        quick.put(number)
    assert [quick.get(timeout=20) for _ in range(10_000)] == list(range(10_000))
    other = QuickQueue(ctx=multiprocessing.get_context("fork"))
    other._wlock.acquire()
    other.put("a")  # a thread waits now
    other._wlock.release()
    assert other.get(timeout=20) == "a"


@pytest.mark.leaves_descriptors
def test_what_cannot_be_pickled_is_an_error_of_the_caller(quick):
    with pytest.raises((AttributeError, pickle.PicklingError)):
        quick.put(lambda: 1)
    quick.put("a")
    assert quick.get(timeout=20) == "a"
    quick.close()
    with pytest.raises(ValueError, match="closed"):
        quick.put("a")


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_several_processes_send_at_once(method):
    context = with_quick_queues(multiprocessing.get_context(method))
    answers = context.Queue()
    processes = [context.Process(target=_send_all, args=(answers, number)) for number in range(3)]
    for process in processes:
        process.start()
    came = [answers.get(timeout=25) for _ in range(3 * _COUNT)]
    for process in processes:
        process.join()
    for number in range(3):  # the messages of each are whole, and in order
        assert [message for message in came if message[0] == number] == [(number, at, _body(at)) for at in range(_COUNT)]


_COUNT = 3000


def _body(at):
    return bytes([at % 251]) * (at * 37 % 4096 if at < _COUNT - 50 else at * 7)


def _send_all(answers, number):
    for at in range(_COUNT):
        answers.put((number, at, _body(at)))


def test_a_queue_whose_writers_have_gone_raises_as_before():
    context = multiprocessing.get_context("fork")
    for kind in (multiprocessing.queues.Queue, QuickQueue):
        some = kind(ctx=context)
        some._writer.close()
        with pytest.raises(EOFError):
            some.get(timeout=20)
        some._reader.close()


def test_the_loader_uses_quick_queues_and_leaves_the_context_alone():
    context = multiprocessing.get_context("fork")
    loader = stocache.DataLoader(list(range(8)), num_workers=1, multiprocessing_context=context)
    iterator = iter(loader)
    assert loader.multiprocessing_context is context
    assert type(context.Queue()) is multiprocessing.queues.Queue
    assert type(iterator._worker_result_queue) is type(iterator._index_queues[0]) is QuickQueue
    assert torch.cat(list(iterator)).tolist() == list(range(8))


def test_an_iterator_that_the_garbage_collector_finds_ends_its_workers():
    iterator = iter(stocache.DataLoader(list(range(80)), num_workers=2, multiprocessing_context="fork"))
    next(iterator)
    workers = iterator._workers
    (key,) = (key for key, queues in _kept.items() if queues == [iterator._worker_result_queue, *iterator._index_queues])
    began = {"itself": iterator, "queues": [iterator._worker_result_queue, *iterator._index_queues]}
    began["around"] = began
    del iterator, began
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]  # not ended by a signal after 5 seconds
    assert key not in _kept


class OwnQueue(multiprocessing.queues.Queue):
    pass


class OwnContext(ForkContext):
    def Queue(self, maxsize=0):
        return OwnQueue(maxsize, ctx=self.get_context())


def test_the_queues_of_a_context_of_the_user_are_used():
    loader = stocache.DataLoader(list(range(8)), num_workers=1, multiprocessing_context=OwnContext())
    iterator = iter(loader)
    assert type(iterator._index_queues[0]) is OwnQueue
    assert torch.cat(list(iterator)).tolist() == list(range(8))


@pytest.mark.parametrize("way", WAYS)
def test_a_profiler_sees_each_batch_as_with_torch(way):
    seen = []
    for make in (torch.utils.data.DataLoader, stocache.DataLoader):
        options = {key: value for key, value in WAYS[way].items() if make is stocache.DataLoader or key != "worker_method"}
        loader = make(list(range(40)), batch_size=4, **options)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            assert len(list(loader)) == 10
        seen.append(sum(event.name.startswith("enumerate(DataLoader)") for event in profiler.events()))
        assert len(list(loader)) == 10
    assert seen[0] == seen[1] >= 10


class Short(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_length_is_told_as_by_torch(way):
    loader = stocache.DataLoader(Short(), **WAYS[way] | ({"num_workers": 1} if way != "main" else {}))
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="was reported to be 3"):
        list(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(stocache.DataLoader(list(range(5)), **WAYS[way]))
