"""Let a GPU read the slots of a cache: `MappedSegment` registers its memory with CUDA."""

import logging
import sys
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.shm.extents import runs_of
from stocache.shm.layout import RESERVED_EXTENT
from stocache.shm.ring.pinned import Pinned
from stocache.shm.segment import Segment
from stocache.system.background import Background
from stocache.system.limits import MIB, format_size
from stocache.system.platform import here

logger = logging.getLogger("stocache")

_AT_ONCE = 256 * MIB  # bytes that are registered by one call, at 50 to 600 ms for each GiB
_PATIENCE_S = 10.0


class MappedSegment:
    """The data of a segment, as a GPU reads it. A thread registers what is reserved, when the first sample is asked for.

    Attributes:
        registered: for each extent, whether the GPU may read it.
        is_complete: whether it may read all.
    """

    def __init__(self, segment: Segment, cuda: Any) -> None:
        self.registered = np.zeros(segment.layout.extent_count, bool)
        self.is_complete = False
        self._host, self._states = segment.tensor(0, segment.data_bytes), segment.extents.states[: len(self.registered)]
        self._layout, self._cuda = segment.layout, cuda
        self._pinned, self._closed, self._asked = Pinned(), not cuda.reads_host_memory, False
        self._views: dict[tuple[torch.device, int], Tensor | None] = {}
        self._background = Background("stocache-register")

    @staticmethod
    def of(segment: Segment, cuda: Any) -> "MappedSegment":
        """Return the mapping of a segment, the same for all loaders of this process."""
        found = _mapped.get(segment)
        if found is None:
            found = _mapped[segment] = MappedSegment(segment, cuda)
            weakref.finalize(segment, found.close).atexit = False
        return found

    def ask(self) -> None:
        """Have all that is reserved registered, unless that is under way, or was refused."""
        if not self._closed and not self._asked:
            self._asked = True
            self._background.put(self._register)

    def wait(self) -> None:
        """Wait until all that was reserved before is registered."""
        self.ask()
        self._background.flush()

    def view(self, cuda: Any, offset: int, rows: Tensor) -> Tensor | None:
        """Return rows at an offset of the data, as a device reads them; None as long as it cannot read the first one."""
        key = cuda.device, offset
        if self._views.get(key) is None and self.registered[offset // self._layout.extent_bytes]:
            self._views[key] = cuda.view(rows)
        return self._views.get(key)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return int(np.count_nonzero(self.registered)) * self._layout.extent_bytes

    def _register(self) -> None:
        with self._cuda.as_current():
            extent_bytes, base = self._layout.extent_bytes, self._host.data_ptr()
            step = max(1, _AT_ONCE // extent_bytes)
            wanted = np.flatnonzero((np.frombuffer(self._states, np.uint8) == RESERVED_EXTENT) & ~self.registered)
            for first, stop in runs_of(wanted.tolist()):
                for begin in range(first, stop, step):
                    if self._closed:
                        return
                    end = min(stop, begin + step)
                    nbytes = min(end * extent_bytes, self._layout.data_bytes) - begin * extent_bytes
                    self._pinned.register(base + begin * extent_bytes, nbytes)
                    if not self._pinned.works:
                        return self._refuse()
                    self.registered[begin:end] = True
        self.is_complete = bool(self.registered.all())
        self._asked = False

    def _refuse(self) -> None:
        soft, _ = here.limit_of("MEMLOCK")
        locked = "unlimited" if soft == sys.maxsize else format_size(soft)
        logger.warning(
            "CUDA registers no more than %s of a cache with %s: the CPU gathers the other samples. The machine may be short of "
            "memory that can be locked (ulimit -l: %s).",
            format_size(self.nbytes), format_size(self._layout.data_bytes), locked,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for the copies, and release all."""
        self._closed = True
        self._background.stop(_PATIENCE_S)
        self._views.clear()
        self.registered[:] = self.is_complete = False
        self._pinned.close()


_mapped: "weakref.WeakKeyDictionary[Segment, MappedSegment]" = weakref.WeakKeyDictionary()
