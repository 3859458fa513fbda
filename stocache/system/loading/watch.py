"""Let a tool look on at the loaders of this process, without a change to the program that makes them.

A loader tells `current` when it is made and when it is iterated. It does not know who looks on: nobody, or ``stocache run``,
which sets `current` before torch is imported. So this module imports nothing that takes time.
"""

from collections.abc import Callable, Iterator
from typing import Any


class Watch:
    """Looks on at loaders. The methods of this class do nothing."""

    def note(self, loader: Any) -> None:
        """Note a loader that was made."""

    def iterate(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the iterator that ``begin`` makes, or one over the same batches."""
        return begin()


current = Watch()
