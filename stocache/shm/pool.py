"""Private memory for batches that is used again when the last view of them is gone.

Fresh memory costs a page fault for each 4 KiB, several times what it costs to copy as many bytes to it (measured).
"""

import contextlib
import math
import mmap
from collections import deque

import numpy as np
import torch
from torch import Tensor

from stocache.shm.leases import LeaseTracker

_SMALL = 1 << 16  # bytes; less comes from malloc, which uses it again anyway
_SPARE = 16  # pieces of memory of one size that wait to be used again, at most


class Pool:
    """Memory of this process alone: a forked child has a copy of it, as of all its parent's. Threads may share it."""

    def __init__(self) -> None:
        self._spare: dict[int, deque[mmap.mmap]] = {}  # by size
        self._leases: LeaseTracker[mmap.mmap] = LeaseTracker()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Pool, ()  # another process has its own

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, whose memory is its own as long as there is a view of it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALL:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (nbytes - 1).bit_length()  # few sizes, whatever the batches; what is not touched takes no memory
        for memory in self._leases.released():
            self._spare.setdefault(len(memory), deque(maxlen=_SPARE)).append(memory)
        try:
            memory = self._spare[size].pop()
        except LookupError:
            memory = _new(size)
        owner = np.frombuffer(memory, np.uint8)
        self._leases.acquire(memory, owner)
        return torch.frombuffer(owner.data[:nbytes], dtype=dtype).view(shape)


def _new(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
