"""Read rows of a file into the memory of a batch, many of them with one system call.

NOTE [ Many reads in one call ]
    With ``preadv`` each row takes the GIL once more, so threads that read side by side wait for each other most of the time.
    ``io_submit`` (Linux, man 2 io_submit) takes many reads. From files that were opened without O_DIRECT it reads before it
    returns, one row after the other; ``io_getevents`` then returns the results, and waits for the results that are still
    missing.

    The kernel keeps the requests of a process in a context, which a forked child does not have. A thread takes a context for
    each call, and returns it if all went well: an exception, or a signal handler that reads, cannot leave results for a
    later call. The end of a context, or of a process that has one, takes the kernel some 40 ms. So the main thread, which alone
    reads in a worker process, reads row by row. So does a system without these calls, or without a context left
    (``/proc/sys/fs/aio-max-nr``).
"""

import contextlib
import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_MOST = 64
"""Requests of a context."""
_PREADV = 7  # IOCB_CMD_PREADV of linux/aio_abi.h, which also describes a request and a result
_REQUEST = np.dtype(
    {
        "names": ["number", "flags", "command", "fd", "buffers", "count", "at"],
        "formats": ["u8", "i4", "u2", "u4", "u8", "u8", "i8"],
        "offsets": [0, 12, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_RESULT = np.dtype({"names": ["number", "result"], "formats": ["i8", "i8"], "offsets": [0, 16], "itemsize": 32})

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}.get(platform.machine())
"""The numbers of io_setup, io_destroy, io_getevents and io_submit."""
if sys.platform != "linux" or sys.maxsize < 1 << 32:
    _CALLS = None

Columns: TypeAlias = Sequence[NDArray[np.uint8]]
"""Contiguous arrays of two dimensions, each with the same rows."""
Indices: TypeAlias = NDArray[np.int64]

if _CALLS is not None:
    _system = ctypes.CDLL(None, use_errno=True).syscall
    _system.argtypes, _system.restype = [ctypes.c_long] * 6, ctypes.c_long

_free: "list[_Queue]" = []  # queues that no thread uses, also the queues of the process that forked this one


def read_rows(preadv: Callable[..., int], fd: int, at: Indices, columns: Columns, rows: Indices, wait: bool) -> list[int]:
    """Read rows of a file, each into a row of all columns. Return the bytes of each, or minus the number of an error.

    Args:
        preadv: reads one row, if the kernel does not take many.
        fd: of the file.
        at: where the rows are in the file.
        columns: where they come, one behind the other.
        rows: of the columns, one for each of ``at``.
        wait: False has an error, or fewer bytes, if the page cache does not have all of a row.
    """
    found = list[int]()
    if threading.current_thread() is not threading.main_thread():
        with contextlib.suppress(OSError), _queue() as queue:
            for begin in range(0, len(rows), _MOST):
                part = slice(begin, begin + _MOST)
                found += queue.read(fd, at[part], columns, rows[part], 0 if wait else os.RWF_NOWAIT)
                if len(found) < min(begin + _MOST, len(rows)):
                    break
    while -errno.EINTR in found:  # a signal; Python's functions begin again
        number = found.index(-errno.EINTR)
        found[number : number + 1] = read_row_by_row(preadv, fd, at[number:][:1], columns, rows[number:][:1], wait)
    return found + read_row_by_row(preadv, fd, at[len(found) :], columns, rows[len(found) :], wait)


def read_row_by_row(preadv: Callable[..., int], fd: int, at: Indices, columns: Columns, rows: Indices, wait: bool) -> list[int]:
    """See `read_rows`."""
    found = []
    for begin, row in zip(at.tolist(), rows.tolist(), strict=True):
        try:
            found.append(preadv(fd, [column[row] for column in columns], begin, wait))
        except OSError as error:
            found.append(-(error.errno or errno.EIO))
    return found


@contextlib.contextmanager
def _queue() -> "Iterator[_Queue]":
    """Take a queue that no other thread uses. An exception ends it. Raises OSError as `_Queue`."""
    queue = _Queue.take()
    try:
        yield queue
    except BaseException:
        queue.end()
        raise
    _free.append(queue)


class _Queue:
    """A context of the kernel. Raises OSError if the kernel has no context to give."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        if _CALLS is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        begin, self._end, self._wait, self._submit = _CALLS
        context = ctypes.c_long()
        self._call(begin, _MOST, ctypes.addressof(context))
        self._context = context.value
        requests, results = np.zeros(_MOST, _REQUEST), np.zeros(_MOST, _RESULT)
        requests["number"], requests["command"] = np.arange(_MOST), _PREADV
        self._requests, self._results = ({name: of[name] for name in of.dtype.names or ()} for of in (requests, results))
        self._pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(_MOST)
        self._places = self._pointers.ctypes.data, results.ctypes.data
        self._use(())

    @classmethod
    def take(cls) -> "_Queue":
        """Return a queue that no other thread uses."""
        while _free:
            with contextlib.suppress(IndexError):  # another thread took the last one
                if (queue := _free.pop()).pid == os.getpid():
                    return queue
        return cls()

    def end(self) -> None:
        """Give the context back to the kernel, which waits for its requests."""
        self._call(self._end, self._context)

    @staticmethod
    def _call(*arguments: int) -> int:
        result: int = _system(*arguments, *[0] * (6 - len(arguments)))
        if result < 0:
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
        return result

    def _use(self, widths: tuple[int, ...]) -> None:
        """Take columns of these widths from now on."""
        self._widths, self._buffers = widths, np.empty((_MOST, len(widths), 2), np.int64)  # struct iovec
        self._buffers[:, :, 1] = widths
        self._requests["buffers"][:] = self._buffers.ctypes.data + self._buffers.strides[0] * np.arange(_MOST)
        self._requests["count"][:] = len(widths)

    def read(self, fd: int, at: Indices, columns: Columns, rows: Indices, flags: int) -> list[int]:
        """Read at most `_MOST` rows; see `read_rows`. The list has no results of the rows that the kernel does not take."""
        widths, count = tuple([column.shape[1] for column in columns]), len(rows)
        if widths != self._widths:
            self._use(widths)
        for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
            np.add(rows * width, column.ctypes.data, out=self._buffers[:count, number, 0])
        self._requests["at"][:count] = at
        self._requests["fd"][:count], self._requests["flags"][:count] = fd, flags
        try:
            count = self._call(self._submit, self._context, count, self._places[0])
        except OSError as error:  # the file system cannot read without waiting, or a different error of the first request
            return [-error.errno] * count if error.errno == errno.EOPNOTSUPP else []
        found, missing = np.empty(count, np.int64), count
        while missing:
            with contextlib.suppress(InterruptedError):
                done = self._call(self._wait, self._context, missing, missing, self._places[1])
                found[self._results["number"][:done]] = self._results["result"][:done]
                missing -= done
        results: list[int] = found.tolist()
        return results
