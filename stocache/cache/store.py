"""SampleStore: what a cache needs of the place that keeps its samples."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stocache.errors import SampleError

_Indices = NDArray[np.int64]


class SampleStore(Protocol):
    """How the samples of a cache are stored and read. The cache takes the locks, and knows which samples are set.

    Attributes:
        gathers_from: the size from which batches are read by `load_many`; smaller ones are faster sample by sample.
        unreadable: why `load` returned MISSING in this process, if it did: the module of a sample's class is not imported here.
        may_miss: whether `load` may return MISSING for a sample that was set, because it is damaged. The sample is EMPTY then.
    """

    gathers_from: int = 16
    may_miss: bool = False

    @property
    def unreadable(self) -> str:
        """See the attributes."""
        return ""

    def encode(self, sample: object, where: str, /) -> Any:
        """Return a sample encoded for `write`. Raises SampleError, whose message begins with ``where``."""

    def encode_many(self, samples: list[Any]) -> list[Any] | None:
        """Return samples encoded for `write_many`; None if a sample does not fit: `encode` says which, and why."""
        try:
            return [self.encode(sample, "") for sample in samples]
        except SampleError:
            return None

    def write_many(self, items: list[Any], encoded: Sequence[Any]) -> list[int | None]:
        """Write encoded samples where `load` finds them. This thread has the claims to write them; the guard is free.

        Return for each the counter to raise, if any; FILLS means that the sample was written.
        """

    def slot(self, idx: int, /) -> int:
        """Return the slot of a sample that is set."""

    def load(self, slot: int, copy: bool, /) -> Any:
        """Return the sample in a slot; a private copy if asked for. MISSING if this process cannot read it."""

    def load_many(self, indices: _Indices) -> list[Any]:
        """Return private copies of samples. All of them are set."""

    def refused(self, idx: int) -> bool:
        """Return whether the machine has refused the memory for a sample that is not set."""

    def has_room_for(self, states: NDArray[np.uint8]) -> bool:
        """Return whether all samples that are EMPTY will have room, if they are as large as the samples that are SET."""
        return True

    def has_room(self, encoded: Collection[Any]) -> bool:
        """Return whether all of these encoded samples, none of which is outside the cache, can be written."""
        return True

    def clear(self) -> None:
        """Drop all samples: their states first, so that a kill leaves no state of a sample that is gone. No process writes."""

    def amounts(self, filled: int) -> dict[str, int]:
        """Return ``slots``, ``slot_bytes`` and ``capacity_bytes`` of `CacheStats` for ``filled`` cached samples.

        And ``reserved_bytes``, if they differ from the bytes of the segment.
        """
