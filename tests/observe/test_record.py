"""Each worker records in a row of its own, whatever ends it; named records are found, read and removed."""

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from stocache.observe.recording import record as recording
from stocache.observe.recording.record import TimingRecord
from stocache.shm import registry
from stocache.shm.layout import Layout
from tests.support.processes import in_child

batches_of = lambda counted: [counted.distribution(recording.COLLATE_NS, row).count for row in range(len(counted.rows))]


def work(record, worker, batches, ready):
    row = record.claim(worker)
    for _ in range(batches):
        row.begin_step(samples=5)
        row.add_loads([0.001] * 3)
        row.add_batch(time.perf_counter_ns(), row.loaded_ns, time.perf_counter_ns())
    ready.set()
    threading.Event().wait()


@pytest.mark.linux
@pytest.mark.leaves_descriptors
def test_a_process_adds_to_a_row_of_its_own_which_a_killed_one_leaves_to_the_next():
    context, record, living, expected = multiprocessing.get_context("fork"), TimingRecord(2, True), [], [0, 8, 5, 3, 0]
    for worker, batches, ends in ((0, 4, True), (0, 4, False), (1, 5, False), (0, 3, False)):
        ready = context.Event()
        process = context.Process(target=work, args=(record, worker, batches, ready), daemon=True)
        process.start()
        assert ready.wait(60)
        assert process.pid in record.read().rows[:, recording.PID]
        living.append(process)
        if ends:
            kill(living.pop())
    counted = record.read()
    assert batches_of(counted) == expected
    numbers = zip(expected, (0, 1, 2, 1, 2), strict=True)
    assert counted.rows[:, recording.WORKER].tolist() == [number if count else 0 for count, number in numbers]
    assert counted.sum(recording.SAMPLES_MADE) == 5 * sum(expected)
    assert [counted.distribution(recording.LOAD_NS, row).count for row in range(5)] == [3 * count for count in expected]
    assert counted.workers == 2
    for process in living:
        kill(process)


def kill(process):
    process.kill()
    process.join()
    process.close()


@pytest.mark.linux
def test_a_forked_worker_does_not_write_what_its_parent_has_noted():
    record = TimingRecord(1, True)
    record.row(1).add_later(recording.WAIT_NS, 5000)
    assert in_child(lambda: record.claim(0).write()) == 0
    assert record.read().distribution(recording.WAIT_NS).count == 1


def test_loads_are_not_part_of_the_step_in_which_they_happen(monkeypatch):
    now = [1]
    monkeypatch.setattr(recording, "_clock_ns", lambda: now[0])
    record = TimingRecord(0, False)
    row, advance = record.main, lambda ms: now.__setitem__(0, now[0] + ms * 10**6)
    row.begin_step()
    advance(50)
    row.add_loads([0.02])
    row.add_making(4)
    advance(7)
    row.add_loads([0.004] * 10)  # counted by numpy
    row.add_collating()
    counted = record.read()
    assert (counted.sum(recording.LOAD_NS), counted.sum(recording.MAKE_NS)) == (60_000_000, 30_000_000)
    assert counted.sum(recording.COLLATE_NS) == 0  # in 7 ms, 40 ms of loads were noted
    assert (counted.sum(recording.SAMPLES_MADE), counted.distribution(recording.LOAD_NS).count) == (4, 11)


@pytest.mark.linux
def test_a_named_record_is_read_by_another_process_and_ends_with_its_loader():
    left = []
    assert in_child(lambda: left.append(TimingRecord(1, True, "photos"))) == 0  # which does not remove it
    folder = registry.directory_of()
    assert len(os.listdir(folder)) == 1
    record = TimingRecord(1, True, "photos", 3)
    record.main.add(recording.LOAD_NS, 5_000_000)
    (name,) = os.listdir(folder)  # the dead process's is gone
    assert name.startswith(f"photos{recording.SUFFIX}{os.getpid()}-")
    fd = record._segment.fd
    assert np.array_equal(recording.read_named(fd, Layout.read(fd)).rows, record.read().rows)
    del record
    assert not os.path.exists(folder)
