"""The ring: a buffer has one owner at a time, the receiver until the last tensor over it is dead, whoever is killed."""

import gc
import multiprocessing
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import torch

from stocache import WorkerError
from stocache.ring import ring as ring_module
from stocache.ring.ring import FULL, NO_LANE, NO_MEMORY, NOTHING, TOO_LARGE, Ring, fallback, ring_of
from stocache.system import limits
from tests.support.equality import same
from tests.support.faults import no_shared_memory
from tests.support.rings import free, numbers, states


def send(ring, batch, iteration=1):
    """What a worker does: returns the bytes of the message. The receiver asks for it first."""
    ring.reap()
    buffer = ring.lane(iteration).take()
    return pickle.dumps(buffer.publish(batch)) if buffer is not None else None


@pytest.fixture
def ring():
    ring = Ring(2, 3)
    assert ring.begin() == 1
    return ring


def test_a_batch_goes_through_in_a_few_bytes(ring):
    batch = {"image": torch.randn(100, 100), "label": numbers(0), "name": ["a"] * 3}
    message = send(ring, batch)
    assert len(message) < 400
    came = pickle.loads(message)
    assert same(came, batch)
    assert ring.received == 1
    assert ring.nbytes == 2 * limits.MIB
    assert all(ring.offset_of(came[key]) is not None for key in ("image", "label"))


def test_a_tensor_born_in_the_buffer_is_not_copied(ring):
    buffer = ring.lane(1).take()
    tensor = buffer.empty((10, 100), torch.float32)
    address = tensor.data_ptr()
    tensor.fill_(3)
    came = pickle.loads(pickle.dumps(buffer.publish([tensor])))[0]
    assert came.data_ptr() == address
    assert torch.equal(came, torch.full((10, 100), 3.0))


def test_batches_of_one_kind_are_packed_once(ring):
    for value in (1, 2):
        buffer = ring.lane(1).take()
        tensor = buffer.empty((5,), torch.int64).fill_(value)
        came = pickle.loads(pickle.dumps(buffer.publish([tensor], kind="five")))
        assert came[0].tolist() == [value] * 5
        del came, tensor
    assert len(ring.lane(1).packed) == 1


def values(kept):
    if isinstance(kept, dict):
        return values(kept["x"])
    return kept.tolist() if hasattr(kept, "tolist") else list(kept)


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch, lambda batch: batch["x"], lambda batch: batch["x"][5:7], lambda batch: batch["x"].numpy()[::2],
        lambda batch: memoryview(batch["x"].numpy()), lambda batch: batch["x"].view(10, 100).t(),
        lambda batch: batch["x"].untyped_storage(), lambda batch: np.from_dlpack(batch["x"]), lambda batch: batch["array"][3:],
    ],
)  # fmt: skip
def test_a_buffer_is_free_when_the_last_view_of_it_is_gone(ring, keep):
    batch = pickle.loads(send(ring, {"x": numbers(0), "array": np.arange(10)}))
    kept = keep(batch)
    before = values(kept)
    del batch
    assert free(ring) == 5
    for start in range(1, 4):  # which go elsewhere
        pickle.loads(send(ring, {"x": numbers(start), "array": np.arange(10) + start}))
    assert values(kept) == before
    del kept
    assert free(ring) == 6


def test_what_is_computed_from_a_batch_does_not_hold_it(ring):
    batch = pickle.loads(send(ring, numbers(0)))
    result = batch.double() + 1
    del batch
    assert free(ring) == 6
    assert result[0] == 1


def test_all_that_is_held_stays_and_a_full_ring_waits_for_nothing(ring):
    held = [pickle.loads(send(ring, numbers(start))) for start in range(3)]
    assert ring.lane(1).take() is None
    assert pickle.loads(pickle.dumps(fallback(ring.key, FULL, "torch's way"))) == "torch's way"
    assert ring.fallbacks[FULL] == 1
    assert all(same(batch, numbers(start)) for start, batch in enumerate(held))
    del held[1]
    assert same(pickle.loads(send(ring, numbers(9))), numbers(9))
    assert same(held, [numbers(0), numbers(2)])


def test_writing_to_a_batch_is_private_to_who_holds_it(ring):
    first = pickle.loads(send(ring, numbers(0)))
    first.zero_()
    second = pickle.loads(send(ring, numbers(0)))
    assert not first.any()
    assert same(second, numbers(0))


def test_a_buffer_that_was_not_published_stays_free(ring):
    for _ in range(10):
        buffer = ring.lane(1).take()
        buffer.empty((100,), torch.float32)
        del buffer
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"pickle|local object"):
        ring.lane(1).take().publish([torch.zeros(3), lambda: None])
    assert free(ring) == 6


def test_what_has_no_bytes_is_passed_by(ring):
    batch = {"names": ["a", "b"], "empty": torch.empty(0)}
    assert same(pickle.loads(send(ring, batch)), batch)
    assert ring.fallbacks[NOTHING] == 1
    assert free(ring) == 6


@pytest.mark.leaves_descriptors
def test_batches_larger_than_a_buffer_go_the_way_of_torch(monkeypatch):
    monkeypatch.setattr(ring_module, "STRIDE", 2 * limits.MIB)
    ring = Ring(1, 2)
    ring.begin()
    buffer = ring.lane(1).take()
    assert buffer.empty((3 * limits.MIB,), torch.uint8) is None
    large = torch.arange(300_000)
    assert same(pickle.loads(pickle.dumps(buffer.publish(large))), large)
    assert ring.fallbacks[TOO_LARGE] == 1
    small = numbers(1)
    assert same(pickle.loads(send(ring, small)), small)
    del buffer


@pytest.mark.leaves_descriptors
def test_where_the_machine_gives_no_memory_batches_go_the_way_of_torch(ring, monkeypatch, caplog):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for _ in range(3):
        assert same(pickle.loads(send(ring, numbers(4))), numbers(4))
    assert ring.fallbacks[NO_MEMORY] == 3
    assert ring.nbytes == 0
    assert "cache" not in caplog.text  # it is none


def test_buffers_grow_with_their_batches(ring):
    for megabytes in (1, 3, 9, 2):
        batch = torch.arange(megabytes * 131072)
        came = pickle.loads(send(ring, batch))
        assert torch.equal(came, batch)
        del came
    assert ring.nbytes == 10 * limits.MIB


def test_a_machine_without_shared_memory_has_no_ring(monkeypatch):
    no_shared_memory(monkeypatch)
    ring = Ring(2, 2)
    assert not ring.works
    assert ring.lane(ring.begin()) is None


# ---------------------------------------------------------------------------------------------------- processes


def worker(ring, iteration, queue, starts, then):
    for start in starts:
        queue.put(send(ring, numbers(start), iteration))
    queue.close()
    queue.join_thread()
    then()


def run(ring, iteration, starts, then=os.getpid, context=None):
    """Return the messages of a process that has ended."""
    context = context or multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=worker, args=(ring, iteration, queue, starts, then))
    process.start()
    messages = [queue.get(timeout=20) for _ in starts]
    process.join(20)
    assert process.exitcode is not None
    process.close()
    queue.close()
    queue.join_thread()
    return messages


def test_workers_of_any_start_method_send(ring, start_method):
    messages = run(ring, 1, range(3), context=multiprocessing.get_context(start_method))
    for start, message in enumerate(messages):
        assert same(pickle.loads(message), numbers(start))
    assert free(ring) == 6


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_worker_sent_arrives(ring):
    messages = run(ring, 1, [5, 6], kill)
    assert same([pickle.loads(message) for message in messages], [numbers(5), numbers(6)])


def test_what_was_never_received_is_free_again_when_its_iteration_is_over(ring):
    for _ in range(4):  # the loop is left early, again and again
        iteration = ring.begin()
        run(ring, iteration, range(3), kill)
        ring.end(iteration)
    assert states(ring)[1] == 3  # one lane, not all


def test_what_will_yet_be_received_is_not_given_to_the_next_worker(ring):
    first = run(ring, 1, range(3))
    second = run(ring, 1, range(10, 13))
    assert ring.nbytes == 6 * 2 * limits.MIB
    assert same([pickle.loads(message) for message in first + second], [numbers(n) for n in (0, 1, 2, 10, 11, 12)])


def test_no_more_workers_than_lanes(ring):
    first, second = run(ring, 1, [1]), run(ring, 1, [2])
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(ring.lane(1) is not None))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    assert same([pickle.loads(message) for message in first + second], [numbers(1), numbers(2)])


def test_a_batch_whose_buffer_was_given_to_another_is_refused(ring):
    (message,) = run(ring, 1, [1])
    ring.end(1)
    iteration = ring.begin()
    (other,) = run(ring, iteration, [2])
    with pytest.raises(WorkerError, match="a batch is lost"):
        pickle.loads(message)
    assert same(pickle.loads(other), numbers(2))


def test_too_many_iterations_get_no_lane(ring):
    begun = [ring.begin() for _ in range(8)]
    assert begun[:7] == list(range(2, 9))
    assert begun[7] == 0
    assert ring.lane(0) is None
    ring.end(3)
    assert ring.begin() != 0


def test_a_process_that_did_not_make_the_ring_says_so():
    ring = Ring(1, 1)
    message = pickle.dumps(fallback(ring.key, NO_LANE, 1))
    key = ring.key
    del ring
    with pytest.raises(WorkerError, match="did not make its DataLoader"):
        pickle.loads(message)
    with pytest.raises(WorkerError, match="did not make its DataLoader"):
        ring_of(key)


# ---------------------------------------------------------------------------------------------------- forks of the user


def child_of(batch, go, answer):
    go.wait(20)
    answer.put(bool(torch.equal(batch, numbers(0))))
    answer.close()
    answer.join_thread()


def test_a_batch_that_a_forked_child_has_inherited_is_not_overwritten_until_it_ends(ring):
    batch = pickle.loads(send(ring, numbers(0)))
    context = multiprocessing.get_context("fork")
    go, answer = context.Event(), context.Queue()
    child = context.Process(target=child_of, args=(batch, go, answer))
    child.start()
    del batch
    assert free(ring) == 5
    for start in range(1, 20):
        assert same(pickle.loads(send(ring, numbers(start))), numbers(start))
    go.set()
    assert answer.get(timeout=20)
    child.join(20)
    child.close()
    answer.close()
    answer.join_thread()
    pickle.loads(send(ring, numbers(1)))
    pickle.loads(send(ring, numbers(1)))
    assert free(ring) == 6


def test_a_ring_all_of_whose_batches_a_child_has_inherited_lives_on_when_the_child_has_ended(ring):
    held = [pickle.loads(send(ring, numbers(start))) for start in range(3)]
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    del held
    assert free(ring) == 6


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_ended_children_leave_no_descriptors(ring):
    batch = pickle.loads(send(ring, numbers(0)))
    before = descriptors()
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    assert descriptors() <= before + 1
    assert same(batch, numbers(0))


@pytest.mark.leaves_descriptors
def test_what_cannot_be_placed_is_pickled_once(ring):
    """Of a pickle that is thrown away, descriptors would wait to be fetched for ever."""
    counts = []
    for _ in range(5):
        value = torch.arange(3.0).requires_grad_()
        assert torch.equal(pickle.loads(send(ring, value)), value)
        del value
        gc.collect()
        counts.append(descriptors())
    assert counts[-1] <= counts[1]


def test_a_forked_child_frees_nothing_of_its_parent(ring):
    batch = pickle.loads(send(ring, numbers(0)))
    pid = os.fork()
    if pid == 0:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert free(ring) == 5
    assert same(batch, numbers(0))


def test_forks_while_nothing_is_held_cost_no_descriptors(ring):
    before = descriptors()
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        children.append(pid)
    assert descriptors() == before
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_goes_outside_and_does_not_pickle_is_an_error_at_once():
    with pytest.raises(TypeError, match="cannot pickle"):  # and not in the thread of a queue, which would lose it
        ring_module.fallback("key", ring_module.FULL, threading.Lock())


def test_which_batch_a_process_ended_at_is_known_when_others_have_come():
    ring = Ring(3, 2)
    iteration = ring.begin()
    ended = []
    for number in (5, 6):
        pid = os.fork()
        if pid == 0:
            ring.lane(iteration).record_request(number)
            os._exit(0)
        os.waitpid(pid, 0)
        ended.append(pid)
    assert [ring.last_request_of(pid) for pid in ended] == [5, 6]
    ring.end(iteration)


@pytest.mark.parametrize(
    "large",
    [b"a" * 100_000, bytearray(100_000), "é" * 50_000, ["a"] * 50_000, {"jpeg": b"x" * 40_000}],
)
def test_a_large_pickle_lies_in_the_buffer_which_is_free_when_it_has_come(ring, large):
    batch = {"names": ["a", "b"], "large": large}
    message = send(ring, batch)
    assert len(message) < 200
    came = pickle.loads(message)
    assert came == batch
    assert type(came["large"]) is type(large)
    assert ring.received == 1
    assert free(ring) == 6
    pickle.loads(send(ring, b"other" * 50_000))
    assert came == batch


def test_a_large_pickle_and_tensors_share_a_buffer(ring):
    batch = [numbers(3), b"x" * 100_000, np.arange(5)]
    came = pickle.loads(send(ring, batch))
    assert same(came, batch)
    assert ring.offset_of(came[0]) is not None


def test_a_large_pickle_without_room_is_sent_as_torch_sends_it(monkeypatch):
    monkeypatch.setattr(ring_module, "STRIDE", 2 * limits.MIB)
    ring = Ring(1, 2)
    ring.begin()
    large = b"x" * 3 * limits.MIB
    assert pickle.loads(send(ring, large)) == large
    assert ring.fallbacks[TOO_LARGE] == 1
    assert free(ring) == 2
