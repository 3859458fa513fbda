"""Memory that is lent out with a batch, and comes back when the last view of it is gone."""

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class LeaseTracker(Generic[_T]):
    """Things, each lent with an object that stands for its memory, and back when that object has died.

    That it has died is noted where it happens, which may be anywhere, also within the garbage collector: by a C function, so no
    code of ours runs there. Threads may share it: single calls of a deque and a dict are all it takes, and no fork finds a lock
    held.
    """

    def __init__(self) -> None:
        self._leased: dict[int, tuple[weakref.ref[Any], _T]] = {}  # by the id of the reference
        self._dead: deque[weakref.ref[Any]] = deque()

    def acquire(self, thing: _T, memory: Any) -> None:
        """Lend ``thing`` until ``memory`` dies."""
        ref = weakref.ref(memory, self._dead.append)
        self._leased[id(ref)] = ref, thing

    def released(self) -> Iterator[_T]:
        """Yield what has come back since the last call."""
        while True:
            try:
                ref = self._dead.popleft()
            except IndexError:
                return
            yield self._leased.pop(id(ref))[1]

    def active(self) -> list[_T]:
        """Return what is lent now."""
        return [thing for ref, thing in list(self._leased.values()) if ref() is not None]
