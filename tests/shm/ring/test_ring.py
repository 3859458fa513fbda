"""The ring: a buffer has one owner at a time, the receiver until the last tensor over it is dead, whoever is killed."""

import os
import pickle
import signal
import tempfile
import threading

import numpy as np
import pytest
import torch

from stocache import WorkerError
from stocache.shm.ring import ring as ring_module
from stocache.shm.ring.ring import NO_BUFFER, NO_MEMORY, TOO_LARGE, TOO_SMALL, Ring, fallback
from stocache.system import limits
from tests.support.equality import same
from tests.support.processes import in_child, stop, stopped
from tests.support.rings import filling, free, numbers, states


def send(ring, batch, iteration=1):
    """What a worker does: returns the bytes of the message. The receiver asks for it first."""
    ring.reap()
    return pickle.dumps(filling(ring, iteration).publish(batch))


def through(ring, batch):
    return pickle.loads(send(ring, batch))


@pytest.fixture
def ring():
    ring = Ring(2, 3)
    assert ring.begin() == 1
    return ring


def test_a_batch_goes_through_in_a_few_bytes_and_buffers_grow_with_their_batches(ring):
    batch = {"image": torch.randn(100, 100), "label": numbers(0), "name": ["a"] * 3}
    message = send(ring, batch)
    assert len(message) < 400
    came = pickle.loads(message)
    assert same(came, batch)
    assert ring.received == 1
    assert ring.nbytes == 2 * limits.MIB
    assert all(ring.offset_of(came[key]) is not None for key in ("image", "label"))
    del came
    for megabytes in (1, 3, 9, 2):
        batch = torch.arange(megabytes * 131072)
        assert torch.equal(through(ring, batch), batch)
    assert ring.nbytes == 10 * limits.MIB


def test_a_tensor_born_in_the_buffer_is_not_copied_and_batches_of_one_kind_are_packed_once(ring):
    for value in (1, 2):
        buffer = filling(ring)
        tensor = buffer.empty((10, 100), torch.float32).fill_(value)
        (came,) = pickle.loads(pickle.dumps(buffer.publish([tensor], kind="ten")))
        assert came.data_ptr() == tensor.data_ptr()
        assert torch.equal(came, torch.full((10, 100), float(value)))
        del came, tensor
    assert len(ring.lane(1)._packed) == 1


def values(kept):
    return kept.tolist() if hasattr(kept, "tolist") else list(kept)


@pytest.mark.parametrize("keep", [
    lambda batch: batch["x"][5:7], lambda batch: memoryview(batch["x"].numpy()), lambda batch: batch["x"].untyped_storage(),
    lambda batch: np.from_dlpack(batch["x"]), lambda batch: batch["array"][3:],
])  # fmt: skip
def test_a_buffer_is_free_when_the_last_view_of_it_is_gone(ring, keep):
    batch = through(ring, {"x": numbers(0), "array": np.arange(10)})
    kept, computed = keep(batch), batch["x"].double() + 1
    before = values(kept)
    del batch
    assert free(ring) == 5
    for start in range(1, 4):  # which go elsewhere
        through(ring, {"x": numbers(start), "array": np.arange(10) + start})
    assert values(kept) == before
    del kept
    assert free(ring) == 6  # what was computed does not hold it
    assert computed[0] == 1


def test_all_that_is_held_stays_and_a_full_ring_waits_for_nothing(ring):
    held = [through(ring, numbers(start)) for start in range(3)]
    assert not ring.lane(1).take()
    assert pickle.loads(pickle.dumps(fallback(ring.key, NO_BUFFER, "torch's way"))) == "torch's way"
    assert ring.fallbacks[NO_BUFFER] == 1
    assert all(same(batch, numbers(start)) for start, batch in enumerate(held))
    del held[1]
    first = through(ring, numbers(9))
    first.zero_()  # what its holder writes is its own
    del first
    assert same(through(ring, numbers(9)), numbers(9))
    assert same(held, [numbers(0), numbers(2)])


def test_a_buffer_that_was_not_published_stays_free(ring):
    for _ in range(10):
        filling(ring).empty((100,), torch.float32)
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"pickle|local object"):
        filling(ring).publish([torch.zeros(3), lambda: None])
    batch = {"names": ["a", "b"], "empty": torch.empty(0)}  # without bytes
    assert same(through(ring, batch), batch)
    assert ring.fallbacks[TOO_SMALL] == 1
    assert free(ring) == 6


@pytest.mark.leaves_descriptors
def test_batches_larger_than_a_buffer_go_the_way_of_torch(monkeypatch):
    monkeypatch.setattr(ring_module, "STRIDE", 2 * limits.MIB)
    ring = Ring(1, 2)
    buffer = filling(ring, ring.begin())
    assert buffer.empty((3 * limits.MIB,), torch.uint8) is None
    large = torch.arange(300_000)
    assert same(pickle.loads(pickle.dumps(buffer.publish(large))), large)
    del buffer
    assert same(through(ring, numbers(1)), numbers(1))
    text = b"x" * 3 * limits.MIB  # a pickle without tensors
    assert through(ring, text) == text
    assert ring.fallbacks[TOO_LARGE] == 2
    assert free(ring) == 2


@pytest.mark.leaves_descriptors
def test_where_the_machine_gives_no_memory_batches_go_through_the_pipe(ring, monkeypatch, caplog):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for _ in range(3):
        assert same(through(ring, numbers(4)), numbers(4))
    assert ring.fallbacks[NO_MEMORY] == 3
    assert ring.nbytes == 0
    assert "cache " not in caplog.text.replace("stocache explain", "")  # no warning of a cache


@pytest.mark.parametrize("large", [bytearray(100_000), ["a"] * 50_000], ids=type)
def test_a_large_pickle_lies_in_the_buffer_which_is_free_when_it_has_come(ring, large):
    batch = {"names": ["a", "b"], "large": large}
    message = send(ring, batch)
    assert len(message) < 200
    came = pickle.loads(message)
    assert came == batch
    assert type(came["large"]) is type(large)
    assert ring.received == 1
    assert free(ring) == 6
    beside = through(ring, [numbers(3), large, np.arange(5)])
    assert same(beside, [numbers(3), large, np.arange(5)])
    assert ring.offset_of(beside[0]) is not None
    assert came == batch


class Unbuilt:
    """It pickles, and does not unpickle."""

    def __reduce__(self):
        return int, ("seven",)


def test_what_does_not_unpickle_frees_its_buffer_and_what_does_not_pickle_is_an_error_at_once(ring):
    for nbytes in (10, 100_000):
        with pytest.raises(ValueError, match="invalid literal"):
            through(ring, [bytes(nbytes), np.arange(10), Unbuilt()])
        assert free(ring) == 6
    with pytest.raises(TypeError, match="cannot pickle"):  # and not in the thread of a queue, which would lose it
        fallback("key", NO_BUFFER, threading.Lock())


def from_child(action, then=os.getpid):
    """Return what an action returns in a forked child that has ended."""
    with tempfile.TemporaryFile() as file:
        in_child(lambda: (pickle.dump(action(), file), file.flush(), then()))
        file.seek(0)
        return pickle.load(file)


def run(ring, iteration, starts, then=os.getpid):
    """Return the messages of a process that has ended."""
    return from_child(lambda: [send(ring, numbers(start), iteration) for start in starts], then)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_worker_sent_arrives_and_is_not_given_to_the_next_worker(ring):
    first, second = run(ring, 1, range(3), kill), run(ring, 1, range(10, 13))
    assert ring.nbytes == 6 * 2 * limits.MIB
    assert in_child(lambda: os._exit(ring.lane(1) is not None)) == 0  # no more workers than lanes
    assert [int(pickle.loads(message)[0]) for message in first + second] == [0, 1, 2, 10, 11, 12]


def test_what_was_never_received_is_free_again_when_its_iteration_is_over(ring):
    for _ in range(4):  # the loop is left early, again and again
        iteration = ring.begin()
        run(ring, iteration, range(3), kill)
        ring.end(iteration)
    assert states(ring)[1] == 3  # one lane, not all


def test_a_batch_whose_buffer_was_given_to_another_is_refused(ring):
    (message,) = run(ring, 1, [1])
    ring.end(1)
    (other,) = run(ring, ring.begin(), [2])
    with pytest.raises(WorkerError, match="a batch is lost"):
        pickle.loads(message)
    assert pickle.loads(other)[0] == 2


def test_too_many_iterations_get_no_lane(ring):
    assert [ring.begin() for _ in range(8)] == [*range(2, 9), 0]
    assert ring.lane(0) is None
    ring.end(3)
    assert ring.begin() != 0


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_batch_that_a_forked_child_has_inherited_is_not_overwritten_until_it_ends(ring):
    def look_later():
        stop()
        assert same(held, [numbers(0)])

    held = [through(ring, numbers(0))]
    with stopped(look_later) as pid:
        held.clear()
        assert free(ring) == 5
        for start in range(1, 20):
            assert same(through(ring, numbers(start)), numbers(start))
        os.kill(pid, signal.SIGCONT)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])  # it has looked
    through(ring, numbers(1))
    through(ring, numbers(1))
    assert free(ring) == 6


def test_children_that_have_ended_hold_nothing_and_free_nothing(ring):
    before = descriptors()
    with stopped(os.getpid), stopped(os.getpid):
        assert descriptors() == before  # while nothing is held
    held = [through(ring, numbers(start)) for start in range(3)]
    for _ in range(10):
        assert in_child(held.clear) == 0
    assert descriptors() <= before + 1
    assert free(ring) == 3
    assert same(held, [numbers(start) for start in range(3)])
    held.clear()
    assert free(ring) == 6
