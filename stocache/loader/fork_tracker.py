"""Which memory forked children may still see, so that it is not reused under them.

A child forked by the user (a process that logs a batch, say) has inherited the batches its parent held, and reads them where
they lie. Each fork while something is held makes a pipe, whose writing end only the child and its own children keep: as long as
one of them lives, the pipe has not ended.
"""

import os
import select
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable


class ForkTracker:
    """The children that may see what this process held when it forked them; ``held`` says what that is at any time."""

    def __init__(self, held: Callable[[], Iterable[Hashable]]) -> None:
        self._held, self._pid = held, os.getpid()
        self._inherited: list[tuple[_Pipe, frozenset[Hashable]]] = []
        _all[:] = [other for other in _all if other() is not None]
        _all.append(weakref.ref(self))
        _watch_forks()

    def seen(self) -> frozenset[Hashable]:
        """Return what children that are alive have inherited."""
        self._forget_the_dead()
        return frozenset().union(*(seen for _, seen in list(self._inherited)))

    def _forget_the_dead(self) -> None:
        for fork in list(self._inherited):  # in place, for another thread may fork meanwhile
            if fork[0].ended():
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
        """Whether nobody has the writing end any more."""
        poll = select.poll()
        poll.register(self.reader, 0)
        return bool(poll.poll(0))  # POLLHUP, which needs no asking for

    def __del__(self) -> None:
        os.close(self.reader)


_all: "list[weakref.ref[ForkTracker]]" = []
_forking: dict[int, _Pipe] = {}  # by thread
_writers: list[int] = []  # the writing ends this process has inherited
_watching = False


def _watch_forks() -> None:
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


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
            tracker._inherited.clear()  # of the parent's children
    _all.clear()
