"""torch's iterators and Python's queues, made quicker, do what they did."""

import gc
import multiprocessing
import multiprocessing.queues
import queue

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import IterableDataset

import stocache
from stocache.loader.torch_iterators import QuickQueue, _is_ready, _kept, with_quick_queues

FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.leaves_descriptors  # the semaphores of a queue


COUNT = 600


def _send_all(number, requests, answers):
    assert requests._poll.func is answers._poll.func is _is_ready
    assert requests.get(timeout=60) == "a"
    for at in range(COUNT):
        answers.put((number, bytes([at % 251]) * (at * 37)))


@pytest.mark.parametrize(("method", "count"), [("fork", 3), ("forkserver", 1)])
def test_queues_are_quick_in_each_process_and_several_send_at_once(method, count):
    context = with_quick_queues(multiprocessing.get_context(method))
    requests, answers = context.Queue(), context.Queue()
    processes = [context.Process(target=_send_all, args=(number, requests, answers)) for number in range(count)]
    for process in processes:
        process.start()
        requests.put("a")
    came = [answers.get(timeout=60) for _ in range(count * COUNT)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    came.sort(key=lambda message: message[0])  # the messages of each are whole, and in order
    assert came == [(number, bytes([at % 251]) * (at * 37)) for number in range(count) for at in range(COUNT)]
    for options in ({"timeout": 0.01}, {"timeout": -1.0}, {"block": False}):
        with pytest.raises(queue.Empty, match=r"^$"):
            answers.get(**options)


def test_nobody_waits_for_a_process_that_was_killed_while_it_sent():
    quick = QuickQueue(ctx=FORK)
    with quick._wlock:
        quick.put("a")  # a thread waits now
    assert quick.get(timeout=60) == "a"
    quick.close()
    quick.join_thread()
    quick._reader.close()
    quick._writer.close()


def test_the_loader_uses_quick_queues_and_leaves_the_context_of_the_user_alone():
    loader = stocache.DataLoader(list(range(8)), num_workers=1, multiprocessing_context=FORK)
    iterator = iter(loader)
    assert loader.multiprocessing_context is FORK
    assert type(FORK.Queue()) is multiprocessing.queues.Queue
    assert type(iterator._worker_result_queue) is type(iterator._index_queues[0]) is QuickQueue
    assert torch.cat(list(iterator)).tolist() == list(range(8))


def test_an_iterator_that_the_garbage_collector_finds_ends_its_workers():
    iterator = iter(stocache.DataLoader(list(range(80)), num_workers=1, multiprocessing_context="fork"))
    next(iterator)
    workers, queues = iterator._workers, [iterator._worker_result_queue, *iterator._index_queues]
    (key,) = (key for key, kept in _kept.items() if kept == queues)
    began = {"itself": iterator, "queues": queues}
    began["around"] = began
    del queues, iterator, began
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0]  # not ended by a signal after 5 seconds
    assert key not in _kept


class Short(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(5))


FORKED = {"num_workers": 1, "multiprocessing_context": "fork"}


@pytest.mark.parametrize("options", [{}, FORKED, {"num_workers": 1, "worker_method": "thread"}], ids=str)
def test_a_profiler_sees_each_batch_and_a_wrong_length_is_told_as_by_torch(options):
    seen = []
    for loader in (torch.utils.data.DataLoader(range(40), 4), stocache.DataLoader(range(40), 4, **options)):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            assert len(list(loader)) == 10
        seen.append(sum(event.name.startswith("enumerate(DataLoader)") for event in profiler.events()))
    assert seen[0] == seen[1] >= 10
    short = stocache.DataLoader(Short(), **options)
    assert len(short) == 3
    with pytest.warns(UserWarning, match="was reported to be 3"):
        list(short)
