"""Each worker records in a row of its own, whatever ends it; named records are found, read and removed."""

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from stocache.shm import registry
from stocache.shm.layout import Layout
from stocache.timing import record as recording
from stocache.timing.record import COLLATE_NS, LOAD_NS, MAKE_NS, PID, ROW_WORDS, SAMPLES, WAIT_NS, WORKER, Record


def batches_of(counted):
    return [counted.distribution(COLLATE_NS, row).count for row in range(len(counted.rows))]


def work(record, worker, batches, ready):
    row = record.claim(worker)
    for _ in range(batches):
        row.begin_step(samples=5)
        row.add_loads([0.001] * 3)
        row.add_batch(time.perf_counter_ns(), row.loaded_ns, time.perf_counter_ns())
    ready.set()
    threading.Event().wait()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.leaves_descriptors
def test_processes_add_to_rows_of_their_own_and_a_killed_one_leaves_its_counts(method):
    context, record = multiprocessing.get_context(method), Record(2, True)
    for _ in range(2):  # the second worker 0 takes the row of the first, which was killed
        workers, ready = [], [context.Event() for _ in range(2)]
        for worker in range(2):
            workers.append(context.Process(target=work, args=(record, worker, 4 + worker, ready[worker])))
            workers[-1].start()
        assert all(event.wait(60) for event in ready)
        pids = [process.pid for process in workers]
        assert [record.read().rows[1 + worker, PID] for worker in range(2)] == pids
        for process in workers:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            process.close()
    counted = record.read()
    assert batches_of(counted) == [0, 8, 10, 0, 0]
    assert counted.rows[:, WORKER].tolist() == [0, 1, 2, 0, 0]
    assert counted.sum(SAMPLES) == 5 * 18
    assert counted.distribution(LOAD_NS).count == 3 * 18
    assert counted.distribution(LOAD_NS, 1).count == 3 * 8
    assert counted.workers == 2


def test_two_workers_of_one_number_have_two_rows():
    context, record = multiprocessing.get_context("fork"), Record(1, True)
    ready, workers = [context.Event() for _ in range(2)], []
    for number in range(2):
        workers.append(context.Process(target=work, args=(record, 0, 3, ready[number])))
        workers[-1].start()
        assert ready[number].wait(60)
    assert batches_of(record.read()) == [0, 3, 3]
    for process in workers:
        process.kill()
        process.join()
        process.close()


def test_a_forked_worker_does_not_write_what_its_parent_has_noted():
    record = Record(1, True)
    record.row(1).add_later(WAIT_NS, 5000)
    pid = os.fork()
    if pid == 0:
        failed = True
        try:
            record.claim(0).write()
            failed = False
        finally:
            os._exit(failed)
    assert os.waitpid(pid, 0)[1] == 0
    assert record.read().distribution(WAIT_NS).count == 1


def test_threads_take_rows_that_no_living_thread_has():
    record, rows, go = Record(2, False), [], threading.Event()

    def take(worker):
        rows.append(record.take(worker))
        go.wait()

    threads = [threading.Thread(target=take, args=(worker,)) for worker in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    while len(rows) < 4:
        threading.Event().wait(0.01)
    for row in rows:
        row.begin_step()
        row.add_making(1)
        row.add_collating()
    go.set()
    for thread in threads:
        thread.join()
    assert batches_of(record.read()) == [0, 1, 1, 1, 1]


def test_loads_are_not_part_of_the_step_in_which_they_happen(monkeypatch):
    now = [1]
    monkeypatch.setattr(recording, "_clock_ns", lambda: now[0])
    record = Record(0, False)
    row = record.main
    row.begin_step()
    now[0] += 50_000_000
    row.add_loads([0.02])
    row.add_making(4)
    now[0] += 7_000_000
    row.add_loads([0.004] * 10)  # counted by numpy
    row.add_collating()
    now[0] += 9_000_000
    row.begin_step()
    now[0] += 3_000_000
    row.add_making(4)
    row.add_collating()
    counted = record.read()
    assert counted.sum(LOAD_NS) == 60_000_000
    assert counted.sum(MAKE_NS) == 33_000_000
    assert counted.sum(COLLATE_NS) == 0  # 7 ms, in which 40 ms of loads were noted
    assert counted.distribution(LOAD_NS).count == 11
    assert counted.sum(SAMPLES) == 8


def test_a_named_record_is_read_by_another_process_and_ends_with_its_loader():
    record = Record(1, True, "photos", 3)
    record.main.add(LOAD_NS, 5_000_000)
    folder = registry.directory_of()
    (name,) = os.listdir(folder)
    assert name.startswith(f"photos{recording.SUFFIX}{os.getpid()}-")
    fd = record._segment.fd
    counted = recording.read_named(fd, Layout.read(fd))
    assert np.array_equal(counted.rows, record.read().rows)
    del record
    assert not os.path.exists(folder)


def test_a_new_record_removes_those_that_killed_processes_left_for_the_same_cache():
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def leave():
        kept = Record(1, True, "photos")
        ready.set()
        threading.Event().wait()
        assert kept

    process = context.Process(target=leave)
    process.start()
    assert ready.wait(60)
    process.kill()
    process.join()
    process.close()
    folder = registry.directory_of()
    assert len(os.listdir(folder)) == 1
    record = Record(1, True, "photos")
    assert os.listdir(folder) == [os.path.basename(record._segment.path)]
    del record


@pytest.mark.parametrize(
    ("nbytes", "problem"),
    [(ROW_WORDS * 8 - 8, "is not the record"), (0, "is not the record"), (ROW_WORDS * 8 * 10**7, "is not")],
)
def test_a_file_that_claims_another_size_is_refused(nbytes, problem, tmp_path):
    layout = Layout(nbytes, 0, 4096)
    with (tmp_path / "forged").open("w+b") as file:
        with pytest.raises(ValueError, match=problem):
            recording.read_named(file.fileno(), layout)


def test_forged_counts_overflow_nothing(tmp_path):
    layout = Layout(3 * ROW_WORDS * 8, 0, 4096)
    with (tmp_path / "forged").open("w+b") as file:
        os.pwrite(file.fileno(), b"\xff\x7f" * (layout.control_bytes // 2), layout.control_at)
        counted = recording.read_named(file.fileno(), layout)
        assert counted.distribution(LOAD_NS).count > 0
        assert counted.sum(SAMPLES) >= 0
        with pytest.raises(ValueError, match="was cut"):
            recording.read_named(file.fileno(), Layout(5 * ROW_WORDS * 8, 0, 4096))
