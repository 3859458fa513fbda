"""Rows that are read with one system call are those that are read one by one, whatever interrupts it."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stocache.system.platform import here, many_reads
from tests.support.processes import in_child

pytestmark = pytest.mark.skipif(many_reads._CALLS is None, reason="the system has no such calls")

WIDTHS = 5, 0, 16, 3
ROOM, COUNT = 24, 150


@pytest.fixture(name="fd")
def _fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "rows"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, ROOM * COUNT, np.uint8).tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def _ends_contexts() -> Iterator[None]:
    _end_contexts()  # of earlier tests
    yield
    _end_contexts()


def _end_contexts() -> None:
    while many_reads._free:
        many_reads._free.pop().end()


def in_thread(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a thread, or raise what it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def read(fd: int, seed: int = 0, count: int = COUNT, wait: bool = True) -> tuple[list[int], list[bytes]]:
    """Read rows in random order to random places. Return the results, and the rows in the order of the file."""
    rng = np.random.default_rng(seed)
    at, rows = rng.permutation(count), rng.permutation(count)
    columns = [np.zeros((count, width), np.uint8) for width in WIDTHS]
    results = here.read_rows(fd, at * ROOM, columns, rows, wait)
    places = rows[np.argsort(at)]
    return results, [b"".join(column[row].tobytes() for column in columns) for row in places.tolist()]


def content(fd: int) -> list[bytes]:
    """Return the rows of the file."""
    return [os.pread(fd, ROOM, row * ROOM) for row in range(COUNT)]


def test_rows_are_those_of_the_file(fd: int) -> None:
    for seed in range(3):
        results, rows = in_thread(lambda seed=seed: read(fd, seed))
        assert (results, rows) == ([ROOM] * COUNT, content(fd))
    assert len(many_reads._free) == 1  # the context is used again
    assert in_thread(lambda: read(fd, wait=False))[1] == content(fd)
    assert read(fd)[1] == content(fd)


def test_short_rows_and_errors_are_reported_as_by_single_reads(fd: int) -> None:
    at, rows = np.array([0, ROOM * COUNT - 7, ROOM * COUNT, 1]), np.arange(4)
    columns = [np.zeros((4, ROOM), np.uint8)]
    assert in_thread(lambda: here.read_rows(fd, at, columns, rows, True)) == [ROOM, 7, 0, ROOM]
    closed = os.dup(fd)
    os.close(closed)
    for run in (in_thread, lambda function: function()):
        assert run(lambda: here.read_rows(closed, at, columns, rows, True)) == [-errno.EBADF] * 4
    assert in_thread(lambda: read(fd))[1] == content(fd)


def test_a_forked_child_takes_a_context_of_its_own(fd: int) -> None:
    in_thread(lambda: read(fd))

    def child() -> None:
        assert in_thread(lambda: read(fd))[1] == content(fd)

    assert in_child(child) == 0


def test_an_exception_in_the_middle_leaves_nothing_for_later_calls(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_thread(lambda: read(fd))
    queue, call = many_reads._free[0], many_reads._Queue._call

    def interrupted(number: int, *arguments: int) -> int:
        if number == queue._wait:
            raise KeyboardInterrupt
        return call(number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(many_reads._Queue, "_call", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            in_thread(lambda: read(fd, 1))
    assert not many_reads._free
    assert in_thread(lambda: read(fd, 2)) == ([ROOM] * COUNT, content(fd))


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_what_the_kernel_does_not_take_is_read_row_by_row(fd: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call, numbers = many_reads._Queue._call, many_reads._CALLS

    def taking(number: int, context: int, count: int, *more: int) -> int:
        if numbers and number == numbers[3]:
            if not taken:
                raise OSError(errno.EAGAIN, "no request left")
            count = min(count, taken)
        return call(number, context, count, *more)

    monkeypatch.setattr(many_reads._Queue, "_call", staticmethod(lambda *a: taking(*a) if len(a) > 2 else call(*a)))
    assert in_thread(lambda: read(fd)) == ([ROOM] * COUNT, content(fd))


def test_interrupted_rows_are_read_again(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = many_reads._Queue.read

    def interrupted(*arguments: Any) -> list[int]:
        return [-errno.EINTR if number % 3 else result for number, result in enumerate(real(*arguments))]

    monkeypatch.setattr(many_reads._Queue, "read", interrupted)
    assert in_thread(lambda: read(fd)) == ([ROOM] * COUNT, content(fd))


def test_without_contexts_rows_are_read_one_by_one(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_reads, "_CALLS", None)
    monkeypatch.setattr(many_reads, "_free", type(many_reads._free)())
    assert in_thread(lambda: read(fd)) == ([ROOM] * COUNT, content(fd))
    assert not many_reads._free
