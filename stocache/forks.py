"""Which memory forked children may still see, so that it is not reused under them.

A child forked by the user (a process that logs a batch, say) has inherited the batches its parent held, and reads them where
they lie. Each fork while something is held makes a pipe, whose writing end only the child and its own children keep: as long as
one of them lives, the pipe has not ended.
"""

import os
import select
import threading
import weakref
from collections.abc import Hashable, Iterable


class Holdings:
    """What this process holds, and what its children may have inherited of it. Belongs to the process that makes it."""

    def __init__(self) -> None:
        self.held: set[Hashable] = set()
        self._pid = os.getpid()
        self._inherited: list[tuple[_Pipe, frozenset[Hashable]]] = []
        _all.add(self)
        _watch_forks()

    @property
    def watched(self) -> bool:
        """Whether there may be children that have inherited something."""
        return bool(self._inherited)

    def unseen(self, items: Iterable[Hashable]) -> list[Hashable]:
        """Return those of ``items`` that no living child has inherited."""
        self._inherited = [(pipe, seen) for pipe, seen in self._inherited if not pipe.ended()]
        return [item for item in items if not any(item in seen for _, seen in self._inherited)]


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


_all: "weakref.WeakSet[Holdings]" = weakref.WeakSet()
_forking: dict[int, _Pipe] = {}  # by thread
_kept: list[int] = []  # the writing ends this process has inherited
_watching = False


def _watch_forks() -> None:
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    holders = [holdings for holdings in _all if holdings.held and holdings._pid == os.getpid()]
    if holders:
        pipe = _forking[threading.get_ident()] = _Pipe()
        for holdings in holders:
            holdings._inherited.append((pipe, frozenset(holdings.held)))


def _in_parent() -> None:
    pipe = _forking.pop(threading.get_ident(), None)
    if pipe is not None:
        os.close(pipe.writer)


def _in_child() -> None:
    pipe = _forking.pop(threading.get_ident(), None)
    if pipe is not None:
        _kept.append(pipe.writer)
    for holdings in list(_all):
        holdings._inherited.clear()  # of the parent's children
    _all.clear()
