"""Keep cached samples in the memory of a GPU: `DeviceTier`.

NOTE [ The model wins ]
    The tier takes its memory once, when the first samples are gathered, and leaves `_SPARE_BYTES` of the device free. If torch
    finds no memory for the training step later, the gatherer gives up the tier: the allocation that failed raises, as it would
    without a tier, and the next one finds the memory. A warning names ``device_limit_gib``.
"""

import functools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.system.limits import GIB, format_size

logger = logging.getLogger("stocache")

_SPARE_BYTES = GIB


class DeviceTier:
    """Rows of samples in device memory, written once and never evicted: the first samples that come have them.

    Args:
        limit: bytes of device memory.
        slots: of the cache.
        columns: the values of each column, as words, by its number.

    Attributes:
        rows: the rows of the tier for each column.
    """

    def __init__(self, limit: int, slots: int, columns: Mapping[int, Tensor], cuda: Any) -> None:
        row_bytes = sum(words.shape[1] * words.itemsize for words in columns.values())
        spare, total = cuda.spare_bytes()
        room = max(0, min(limit, spare - min(_SPARE_BYTES, total // 8)))
        count = min(slots, room // row_bytes)
        if count < min(slots, limit // row_bytes):
            logger.warning(
                "device_limit_gib: %s has room for %s of samples beside the model, not for %s.",
                cuda.device, format_size(room), format_size(limit),
            )  # fmt: skip
        self._numbers = np.full(slots, -1, np.int32)  # by slot of the cache
        self._used = self._overwritten = 0
        self._count = int(count)
        self.rows = {
            number: torch.empty((self._count, words.shape[1]), dtype=words.dtype, device=cuda.device)
            for number, words in columns.items()
        }

    def numbers(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each slot; -1 where it has none."""
        return self._numbers[slots].astype(np.int64)

    def admit(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the slots may have a row, as long as there are some, and the rows: to be written, and then `keep`."""
        new, first = np.unique(slots, return_index=True)
        first = first[self._numbers[new] < 0][: self._count - self._used]
        return first, np.arange(self._used, self._used + len(first))

    def keep(self, slots: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Keep slots whose rows are written: an interrupt before that leaves no slot whose row is not."""
        self._used += len(numbers)
        self._numbers[slots] = numbers

    def keep_since(self, overwritten: int) -> bool:
        """Empty the tier if the number of samples that were overwritten is not that of the last call. Return whether it is."""
        if overwritten == self._overwritten:
            return False
        self._numbers[:], self._used, self._overwritten = -1, 0, overwritten
        return True

    @property
    def is_full(self) -> bool:
        """Whether no row is free."""
        return self._used >= self._count

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the tier has taken."""
        return sum(rows.nbytes for rows in self.rows.values())


_holders: "weakref.WeakSet[Any]" = weakref.WeakSet()


def release_when_full(holder: Any) -> None:
    """Call ``holder.release`` with the number of a device that has no memory left; see NOTE [ The model wins ]."""
    _holders.add(holder)
    _observe_out_of_memory()


@functools.cache
def _observe_out_of_memory() -> None:
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_on_out_of_memory)


def _on_out_of_memory(device: int, *sizes: int) -> None:
    for holder in list(_holders):
        holder.release(device)
