"""Pinned buffers: registered once, free only when the GPU has been waited for; with a runtime that is played, or a real GPU."""

import gc
import os
import pickle
import threading

import pytest
import torch

import stocache
from stocache.shm.ring.pinned import Pinned
from stocache.shm.ring.ring import Ring
from stocache.system import limits
from tests.support.devices import PlayedRuntime
from tests.support.equality import same
from tests.support.processes import in_child, wait_until
from tests.support.rings import filling, free, numbers


@pytest.fixture
def runtime(monkeypatch):
    yield PlayedRuntime().play(monkeypatch)
    wait_until(no_thread)


def no_thread():
    gc.collect()
    return not any(thread.name == "stocache-pinned" for thread in threading.enumerate())


def make_ring():
    """Made in the tests, for it must be gone before the runtime is."""
    ring = Ring(1, 3, pinned=True)
    ring.begin()
    return ring


def arrive(ring, batch):
    return pickle.loads(pickle.dumps(filling(ring).publish(batch)))


def test_a_buffer_is_registered_once_with_all_it_has_and_again_when_it_has_grown(runtime):
    ring = make_ring()
    for start in range(5):
        batch = arrive(ring, numbers(start))
        assert same(batch, numbers(start))
        address = batch.data_ptr() - ring.offset_of(batch)
        del batch
        wait_until(lambda: free(ring) == 3)
    assert runtime.registered == {address: 2 * limits.MIB}
    large = torch.arange(600_000)
    assert torch.equal(arrive(ring, large), large)
    assert list(runtime.registered.values()) == [6 * limits.MIB]
    assert [call for call in runtime.calls if "sync" not in call] == ["register", "unregister", "register"]


def test_a_buffer_is_not_free_while_a_gpu_may_read_it(runtime):
    ring = make_ring()
    runtime.copies_done.clear()
    first = arrive(ring, numbers(0))
    address = first.data_ptr()
    del first
    second = arrive(ring, numbers(1))
    assert second.data_ptr() != address
    assert free(ring) == 1
    runtime.copies_done.set()
    assert wait_until(lambda: free(ring) == 2)
    assert {call for call in runtime.calls if "sync" in call} == {"synchronize 1"}  # the device that has been used
    del second
    assert wait_until(lambda: free(ring) == 3)


def test_when_the_ring_goes_all_is_unregistered_and_the_thread_ends(runtime):
    ring = make_ring()
    batch = arrive(ring, numbers(3))
    del ring
    gc.collect()
    assert runtime.registered  # held
    assert same(batch, numbers(3))
    del batch
    assert wait_until(lambda: no_thread() and not runtime.registered)


def test_where_registering_fails_batches_are_not_pinned_and_nothing_else_changes(runtime):
    runtime.error = 2
    ring = make_ring()
    for start in range(4):
        assert same(arrive(ring, numbers(start)), numbers(start))
    assert (runtime.calls, free(ring)) == (["register", "clear"], 3)


def test_a_forked_child_unregisters_nothing(runtime):
    pinned = Pinned()
    pinned.register(4096, 4096)
    assert in_child(lambda: (pinned.close(), os._exit(len(runtime.registered) != 1))) == 0
    pinned.close()
    assert runtime.registered == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.leaves_descriptors
def test_on_a_gpu_batches_are_born_pinned_and_arrive_whole():
    rows = torch.arange(4096 * 192).view(4096, 192)
    with stocache.CachedDataset(torch.utils.data.TensorDataset(rows), 0.1) as dataset:
        loader = stocache.DataLoader(dataset, 256, num_workers=2, pin_memory=True)
        on_gpu = []
        for (values,) in loader:
            assert values.is_pinned()
            assert loader._stocache.ring.offset_of(values) is not None  # not a pinned copy
            on_gpu.append(values.to("cuda", non_blocking=True))
            del values
        assert torch.equal(torch.cat(on_gpu).cpu(), rows)
        del loader
        gc.collect()
