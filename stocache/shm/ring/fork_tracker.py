"""Track which memory forked children may still read, so that it is not reused while they live.

A child that the user forks, for example to log a batch, inherits the batches of its parent, and reads them in the same memory.
So each fork while batches are held makes a pipe. Only the child and its own children keep the writing end: the pipe ends when
the last of them has exited.
"""

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable

from stocache.system.platform import here


class ForkTracker:
    """The children that may read memory that this process held when it forked them; ``held`` returns what it holds now."""

    def __init__(self, held: Callable[[], Iterable[Hashable]]) -> None:
        self._held, self._pid = held, os.getpid()
        self._inherited: list[tuple[_Pipe, frozenset[Hashable]]] = []
        _all[:] = [other for other in _all if other() is not None]
        _all.append(weakref.ref(self))
        _watch_forks()

    def seen(self) -> frozenset[Hashable]:
        """Return the memory that living children have inherited."""
        self._forget_the_dead()
        return frozenset().union(*(seen for _, seen in list(self._inherited)))

    def _forget_the_dead(self) -> None:
        for fork in list(self._inherited):  # in place: another thread may fork at the same time
            if fork[0].ended():
                with contextlib.suppress(ValueError):  # the other thread has removed it
                    self._inherited.remove(fork)

    def _about_to_fork(self) -> None:
        self._forget_the_dead()
        held = frozenset(self._held())
        if held:
            thread = threading.get_ident()
            if thread not in _forking:
                _forking[thread] = _Pipe()
            self._inherited.append((_forking[thread], held))


class _Pipe:
    """The pipe of one fork."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()  # both closed on exec

    def ended(self) -> bool:
        """Return whether every process with the writing end has exited."""
        poll = select.poll()
        poll.register(self.reader, 0)
        return bool(poll.poll(0))  # POLLHUP is always reported

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit the module may be gone before
        close(self.reader)


_all: "list[weakref.ref[ForkTracker]]" = []
_forking: dict[int, _Pipe] = {}  # by thread
_writers: list[int] = []  # writing ends that this process inherited; never closed
_watching = False


def _watch_forks() -> None:
    global _watching
    if not _watching:
        _watching = True
        here.at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    for ref in list(_all):
        tracker = ref()
        if tracker is not None and tracker._pid == os.getpid():
            tracker._about_to_fork()


def _in_parent() -> None:
    pipe = _forking.pop(threading.get_ident(), None)
    if pipe is not None:
        os.close(pipe.writer)


def _in_child() -> None:
    pipe = _forking.pop(threading.get_ident(), None)
    if pipe is not None:
        _writers.append(pipe.writer)
    for ref in _all:
        tracker = ref()
        if tracker is not None:
            tracker._inherited.clear()  # they belong to the parent
    _all.clear()
