"""Lease memory to batches: it may be used again when the last view of a batch is gone, here and in forked children.

NOTE [ Leases of forked children ]
    A child that the user forks, for example to log a batch, inherits the batches of its parent, and reads them in the same
    memory. So each fork while shared memory is leased makes a pipe. Only the child and its own children keep the writing end:
    the pipe ends when the last of them has exited. Until then they lease what was leased at the fork.
"""

import contextlib
import functools
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any, Generic, TypeVar

from stocache.system.platform import here

_T = TypeVar("_T")


class LeaseTracker(Generic[_T]):
    """Leases items. An item is leased while the object lives that stands for its memory, and released when that object dies.

    The object may die anywhere, also within the garbage collector. There only a C function runs, which notes it.
    Threads may share a tracker: it uses single calls of a deque and a dict, and no lock that a fork could find held.

    Args:
        is_shared: whether forked children read the memory, too; see the NOTE. Then items are hashable.
    """

    def __init__(self, is_shared: bool = False) -> None:
        self._leased: dict[int, tuple[weakref.ref[Any], _T]] = {}  # by the id of the reference
        self._dead: deque[weakref.ref[Any]] = deque()
        self._children: list[tuple[_Pipe, frozenset[_T]]] = []  # with the items that they have inherited
        self._pid = os.getpid()
        if is_shared:
            _shared[:] = [other for other in _shared if other() is not None]
            _shared.append(weakref.ref(self))
            _watch_forks()

    def acquire(self, item: _T, memory: Any) -> None:
        """Lease ``item`` until ``memory`` dies."""
        ref = weakref.ref(memory, self._dead.append)
        self._leased[id(ref)] = ref, item

    @property
    def any_released(self) -> bool:
        """Whether an item was released here since the last call of `released`, or is leased by children alone."""
        return bool(self._dead)

    def released(self) -> Iterator[_T]:
        """Yield the items that were released since the last call. Living children have not inherited them."""
        inherited = self._inherited() if self._children else ()
        for _ in range(len(self._dead)):
            try:
                ref = self._dead.popleft()
            except IndexError:  # another thread has it
                return
            item = self._leased[id(ref)][1]
            if item in inherited:
                self._dead.append(ref)
            else:
                del self._leased[id(ref)]
                yield item

    def __len__(self) -> int:
        return len(self._leased) - len(self._dead)

    def _inherited(self) -> Container[_T]:
        """Return the items that living children have inherited."""
        for child in list(self._children):
            if child[0].ended():
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._children.remove(child)  # in place: another thread may fork at the same time
        return frozenset().union(*(items for _, items in list(self._children)))

    def _about_to_fork(self) -> None:
        self._inherited()
        items = frozenset(item for ref, item in list(self._leased.values()) if ref() is not None)
        if items:
            thread = threading.get_ident()
            if thread not in _forking:
                _forking[thread] = _Pipe()
            self._children.append((_forking[thread], items))


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


_shared: "list[weakref.ref[LeaseTracker[Any]]]" = []
_forking: dict[int, _Pipe] = {}  # by thread
_writers: list[int] = []  # writing ends that this process inherited; never closed


@functools.cache
def _watch_forks() -> None:
    here.at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    for ref in list(_shared):
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
    for ref in _shared:
        tracker = ref()
        if tracker is not None:
            tracker._children.clear()  # they belong to the parent
    _shared.clear()
