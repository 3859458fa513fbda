"""Track memory that is leased to a batch, until the last view of it is gone."""

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class LeaseTracker(Generic[_T]):
    """Leases items. An item is leased while the object lives that stands for its memory, and released when that object dies.

    The object may die anywhere, also within the garbage collector. There only a C function runs, which notes it.
    Threads may share a tracker: it uses single calls of a deque and a dict, and no lock that a fork could find held.
    """

    def __init__(self) -> None:
        self._leased: dict[int, tuple[weakref.ref[Any], _T]] = {}  # by the id of the reference
        self._dead: deque[weakref.ref[Any]] = deque()

    def acquire(self, item: _T, memory: Any) -> None:
        """Lease ``item`` until ``memory`` dies."""
        ref = weakref.ref(memory, self._dead.append)
        self._leased[id(ref)] = ref, item

    @property
    def any_released(self) -> bool:
        """Whether an item was released since the last call of `released`."""
        return bool(self._dead)

    def released(self) -> Iterator[_T]:
        """Yield the items that were released since the last call."""
        while True:
            try:
                ref = self._dead.popleft()
            except IndexError:
                return
            yield self._leased.pop(id(ref))[1]

    def active(self) -> list[_T]:
        """Return the items that are leased now."""
        return [item for ref, item in list(self._leased.values()) if ref() is not None]
