"""Keep cached samples in the memory of a GPU: `DeviceTier`.

NOTE [ The model wins ]
    The tier takes its memory once, when the first samples are gathered, and leaves `_SPARE_BYTES` of the device free. If torch
    finds no memory for the training step later, the tier gives its memory back: the allocation that failed raises, as it would
    without a tier, and the next one finds the memory. A warning names ``device_limit_gib``.
"""

import logging
import weakref
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
        rows: the dtype of the words of a row, and how many words it has, for each column.

    Attributes:
        rows: for each column the rows of the tier.
        version: changes when the rows of samples are no longer theirs.
    """

    def __init__(self, limit: int, slots: int, rows: list[tuple[torch.dtype, int]], cuda: Any) -> None:
        row_bytes = sum(dtype.itemsize * words for dtype, words in rows)
        spare, total = cuda.spare_bytes()
        room = max(0, min(limit, spare - min(_SPARE_BYTES, total // 8)))
        count = min(slots, room // max(1, row_bytes))
        if count < min(slots, limit // max(1, row_bytes)):
            logger.warning(
                "device_limit_gib: %s has room for %s of samples beside the model, not for %s.",
                cuda.device, format_size(room), format_size(limit),
            )  # fmt: skip
        self._numbers = np.full(slots, -1, np.int32)  # by slot of the cache
        self._used, self._count, self.version = 0, int(count), 0
        self._overwritten = 0
        self._device: torch.device = cuda.device
        self.rows: list[Tensor] = [torch.empty((count, words), dtype=dtype, device=cuda.device) for dtype, words in rows]
        _tiers.add(self)
        _observe_out_of_memory()

    def numbers(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each slot; -1 where it has none."""
        return self._numbers[slots].astype(np.int64)

    def admit(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the slots may have a row, as long as there are some, and the rows: to be written, and then `keep`."""
        new, first = np.unique(slots, return_index=True)
        first = first[self._numbers[new] < 0][: self._count - self._used]
        return first, np.arange(self._used, self._used + len(first))

    def keep(self, slots: NDArray[np.int64], numbers: NDArray[np.int64], version: int) -> None:
        """Keep slots whose rows are written: an interrupt before that leaves none that is not. ``version``: when admitted."""
        if version == self.version:
            self._numbers[slots] = numbers
            self._used += len(numbers)

    def keep_since(self, overwritten: int) -> None:
        """Empty the tier if the number of samples that were overwritten is not that of the last call."""
        if overwritten != self._overwritten:
            self._numbers[:], self._used, self._overwritten = -1, 0, overwritten
            self.version += 1

    @property
    def is_full(self) -> bool:
        """Whether no row is free."""
        return self._used >= self._count

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the tier has taken."""
        return sum(int(rows.nbytes) for rows in self.rows)

    def release(self, device: int | None = None) -> bool:
        """Give the memory back; only that of one device, if it is given. Return whether there was any."""
        if not self.nbytes or device not in (None, self._device.index):
            return False
        logger.warning(
            "%s is out of memory. The %s of cached samples on it are given back to the model. Lower device_limit_gib.",
            self._device, format_size(self.nbytes),
        )  # fmt: skip
        self.version += 1
        self._numbers[:] = -1
        self._used = self._count = 0
        self.rows = [rows.new_empty((0, rows.shape[1])) for rows in self.rows]
        return True


_tiers: "weakref.WeakSet[DeviceTier]" = weakref.WeakSet()
_observed = False


def _observe_out_of_memory() -> None:
    """Have torch say when an allocation fails; see NOTE [ The model wins ]."""
    global _observed
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if not _observed and attach is not None:
        _observed = True
        attach(_on_out_of_memory)


def _on_out_of_memory(device: int, *sizes: int) -> None:
    for tier in list(_tiers):
        tier.release(device)
