"""Pipes, sockets and queues: find the ones that a dataset reads, and close them in a child process.

NOTE [ Streams ]
    A process that reads from a pipe, a socket or a queue takes what it reads: other processes do not get it. A dataset that
    reads one may return the next record, whatever the index. So its samples are loaded only where the program loads them.

    Streams are looked for in the attributes of the dataset and of the user's objects in it, one level deep in objects of
    libraries (the pipes of a `subprocess.Popen`), and among the global variables that its code uses. The child closes all that
    it could read. It may connect anew, as some libraries do; any other use is an error. It may write to pipes.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Collection
from itertools import chain, count
from typing import Any

from stocache.system.loading.code import names_used, variables_of
from stocache.system.objects import static_attribute, vars_of
from stocache.system.platform import here
from stocache.system.walking import attribute_in, is_own, is_own_or_dataset, part_text, parts_of

_LOOPS = {"asyncio", "uvloop"}  # whose sockets wake up a loop


def find_stream(dataset: object) -> str | None:
    """Return the name and the class of a stream that a dataset may read; None if none is found."""
    named = variables_of(names_used(dataset)[0])
    roots = [(dataset, "dataset"), *((value, name) for value, name in named if not isinstance(value, type))]
    parts = chain.from_iterable(parts_of(*root, follow=is_own_or_dataset) for root in roots)
    found = next((part for part in parts if _is_stream(part[1])), None)
    found = found or next(((name, value) for value, name in named if _is_iterator(value)), None)
    return found and part_text(*found)


def find_iterator(dataset: object, reads: Collection[str]) -> str | None:
    """Return the name and the class of an iterator in one of the attributes ``reads`` of a dataset; None without one."""
    parts = parts_of(dataset, follow=is_own_or_dataset)
    return next((part_text(name, part) for name, part in parts if _is_iterator(part) and attribute_in(name) in reads), None)


def _is_iterator(value: object) -> bool:
    """Whether a value of a library's class returns other items each time: an iterator, not a file nor a counter."""
    kind = type(value)
    has_next = static_attribute(kind, "__next__") is not None and static_attribute(kind, "fileno") is None
    return has_next and (kind.__module__ == "builtins" or not is_own(value)) and kind is not count


def _is_stream(value: object) -> bool:
    kind = type(value)
    if all(static_attribute(kind, name) is not None for name in ("get_nowait", "put_nowait")) or _is_open_stream(value):
        return True
    in_library = not is_own(value) and kind.__module__.split(".")[0] not in _LOOPS
    return in_library and any(map(_is_open_stream, list(vars_of(value).values())))


def _is_open_stream(value: Any) -> bool:
    if static_attribute(type(value), "fileno") is None:
        return False
    try:
        fd = value.fileno()
        return _is_read_once(fd) or not stat.S_IFMT(os.fstat(fd).st_mode)  # a socket of ZeroMQ has an event
    except Exception:  # it is closed, or has no descriptor
        return False


def _is_read_once(fd: int) -> bool:
    """Whether a descriptor reads a pipe or a socket, besides standard output and standard error."""
    info = os.fstat(fd)
    is_stream = stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode)
    if not is_stream or here.open_mode(fd) & os.O_ACCMODE == os.O_WRONLY:
        return False
    for output in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if os.path.samestat(info, os.fstat(output)):
                return False
    return True


def close_streams(own: int) -> None:
    """Close the pipes and sockets that this process can read, besides ``own``; see NOTE [ Streams ].

    Their descriptors stay, so that no other file gets the number of one. Named pipes cannot be opened any more.
    """
    closed = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    for fd in map(int, os.listdir(here.OPEN_FILES)):
        with contextlib.suppress(OSError):  # the directory's own descriptor
            if fd != own and _is_read_once(fd):
                os.dup2(closed, fd, inheritable=os.get_inheritable(fd))
    os.close(closed)
    sys.addaudithook(_refuse_pipes)


def _refuse_pipes(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes):
        try:
            is_pipe = stat.S_ISFIFO(os.stat(arguments[0]).st_mode)
        except (OSError, ValueError):
            return
        if is_pipe:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), arguments[0])


def is_of_closed_stream(error: Exception) -> bool:
    """Whether an error of a child, with its traceback as the cause, says that a stream was closed by `close_streams`."""
    return any(os.strerror(number) in str(error.__cause__) for number in (errno.EBADF, errno.ENOTSOCK))
