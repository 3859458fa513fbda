"""Rows that are read with one system call are equal to rows that are read one by one, whatever interrupts it."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from stocache.system.platform import here, many_reads
from tests.support.processes import in_child

pytestmark = [pytest.mark.linux, pytest.mark.skipif(many_reads._CALLS is None, reason="the system has no such calls")]

WIDTHS = 5, 0, 16, 3
ROOM, COUNT = 24, 150


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, ROOM * COUNT, np.uint8).tobytes())
    fd = os.open(path, os.O_RDONLY)
    end_contexts()  # of earlier tests
    yield fd
    end_contexts()
    os.close(fd)


def end_contexts():
    while many_reads._free:
        many_reads._free.pop().end()


def in_thread(function):
    """Return what a function returns in a thread, or raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def read(fd, seed=0, wait=True):
    """Read rows in random order to random places. Return the results, and the rows in the order of the file."""
    rng = np.random.default_rng(seed)
    at, rows = rng.permutation(COUNT), rng.permutation(COUNT)
    columns = [np.zeros((COUNT, width), np.uint8) for width in WIDTHS]
    results = here.read_rows(fd, at * ROOM, columns, rows, wait)
    places = rows[np.argsort(at)]
    return results, [b"".join(column[row].tobytes() for column in columns) for row in places.tolist()]


def whole(fd):
    """Return what `read` returns if it reads all rows."""
    return [ROOM] * COUNT, [os.pread(fd, ROOM, row * ROOM) for row in range(COUNT)]


def test_rows_are_those_of_the_file(fd):
    for seed in range(3):
        assert in_thread(lambda seed=seed: read(fd, seed)) == whole(fd)
    assert len(many_reads._free) == 1  # the context is used again
    assert in_thread(lambda: read(fd, wait=False))[1] == read(fd)[1] == whole(fd)[1]

    def child():
        assert in_thread(lambda: read(fd)) == whole(fd)
        assert [queue.pid for queue in many_reads._free] == [os.getpid()]  # by a context of its own

    assert in_child(child) == 0


def test_short_rows_and_errors_are_reported_as_by_single_reads(fd):
    at, rows = np.array([0, ROOM * COUNT - 7, ROOM * COUNT, 1]), np.arange(4)
    columns = [np.zeros((4, ROOM), np.uint8)]
    assert in_thread(lambda: here.read_rows(fd, at, columns, rows, True)) == [ROOM, 7, 0, ROOM]
    closed = os.dup(fd)
    os.close(closed)
    for run in (in_thread, lambda function: function()):
        assert run(lambda: here.read_rows(closed, at, columns, rows, True)) == [-errno.EBADF] * 4
    assert in_thread(lambda: read(fd)) == whole(fd)


def test_an_exception_in_the_middle_leaves_nothing_for_later_calls(fd, monkeypatch):
    in_thread(lambda: read(fd))
    queue, call = many_reads._free[0], many_reads._Queue._call

    def interrupted(number, *arguments):
        if number == queue._wait:
            raise KeyboardInterrupt
        return call(number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(many_reads._Queue, "_call", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            in_thread(lambda: read(fd, 1))
    assert not many_reads._free
    assert in_thread(lambda: read(fd, 2)) == whole(fd)


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_what_the_kernel_does_not_take_is_read_row_by_row(fd, taken, monkeypatch):
    call, numbers = many_reads._Queue._call, many_reads._CALLS

    def taking(number, *arguments):
        if number == numbers[3] and len(arguments) > 1:
            if not taken:
                raise OSError(errno.EAGAIN, "no request left")
            context, count, *more = arguments
            arguments = context, min(count, taken), *more
        return call(number, *arguments)

    monkeypatch.setattr(many_reads._Queue, "_call", staticmethod(taking))
    assert in_thread(lambda: read(fd)) == whole(fd)
