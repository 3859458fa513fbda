"""Give private copies of slots as views that the kernel copies on write: they cost nothing until they are written.

NOTE [ Private views ]
    A sample belongs to the caller that reads it: writing to it must not change the cache. Copying 150 KB takes longer than
    everything else that happens to a sample. So large samples are views of a second mapping of the segment, MAP_PRIVATE. Its
    pages are pages of the cache until this process writes to one; then the kernel makes it a copy of that page.

    A batch of samples is one lease. Slots may share a page with their neighbours (also the last slot of one column with the
    first of the next). So while the lease lasts, its slots and their neighbours are copied for other batches: a view would show
    the caller's writes. When the last view of the batch is gone, its written pages are dropped, and the mapping shows the
    cache again. /proc/self/pagemap shows which pages were written; if it cannot be read, all pages of the batch are dropped.

    Samples that are set never change, so a page may be copied at any time. Overwriting a sample or clearing the cache
    changes the samples that callers hold, as it does with ``copy=False``.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stocache.shm.leases import LeaseTracker
from stocache.system.platform import here

_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"

# Bits of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst): in memory or swapped; a page of a file
_THERE, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)

_Pages: TypeAlias = NDArray[np.int64]

if here.SHARES_MEMORY:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """The mapping, as one batch sees it. It is not a view of an array: numpy would leave it out of the chain of bases."""


def map_privately(fd: int, nbytes: int) -> Any:
    """Return the bytes of a file, as a ctypes array that may be written to: that changes them for this process alone.

    The descriptor is not kept. (Python's mmap would keep a duplicate, and closing that would drop the locks of this process.)

    Raises:
        OSError: the kernel does not map the file.
    """
    if not here.SHARES_MEMORY:
        raise OSError(errno.ENOTSUP, "mmap")
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return memory


class PrivateViews:
    """A private mapping of a file, whose slots are leased to batches.

    Args:
        fd: descriptor of the file. It is not kept.
        nbytes: size of the file.
        columns: for each column its offset in the file, and the bytes of a slot.
        slots: number of slots of each column.

    Raises:
        OSError: the kernel does not map the file.
    """

    def __init__(self, fd: int, nbytes: int, columns: Sequence[tuple[int, int]], slots: int) -> None:
        self._memory = map_privately(fd, nbytes)
        self._address = ctypes.addressof(self._memory)
        self._columns, self._slots = columns, slots
        self._leased: set[int] = set()
        self._leases: LeaseTracker[set[int]] = LeaseTracker()
        self._lock = threading.Lock()  # no thread waits for it: a forked child may find it taken

    def lease(self, slots: list[int]) -> tuple[_Lease, list[bool]]:
        """Return the memory of the whole file for one batch, and for each of ``slots`` whether the batch may use it there."""
        memory: _Lease = _Lease((len(self._memory),), np.uint8, self._memory)
        if not self._lock.acquire(blocking=False):
            return memory, [False] * len(slots)
        try:
            self._take_back()
            own, leased, count = set(slots), self._leased, self._slots
            near = own | {(slot - 1) % count for slot in own} | {(slot + 1) % count for slot in own}
            usable = [True] * len(slots)
            if len(own) < len(slots) or not leased.isdisjoint(near):  # a slot comes twice, or a different batch has one nearby
                own.clear()
                for position, slot in enumerate(slots):
                    usable[position] = slot not in own and leased.isdisjoint(((slot - 1) % count, slot, (slot + 1) % count))
                    if usable[position]:
                        own.add(slot)
            leased |= own
            self._leases.acquire(own, memory)
            return memory, usable
        finally:
            self._lock.release()

    def _take_back(self) -> None:
        """Drop the written pages of leases that are over: the mapping shows the file again."""
        slots = [slot for lease in self._leases.released() for slot in lease]
        if slots:
            for at, nbytes in self._columns:
                begins = self._address + at + np.array(slots, np.int64) * nbytes
                first, stop = begins // _PAGE, -(-(begins + nbytes) // _PAGE)
                for page, end in zip(*_written(first, stop), strict=True):
                    if _libc.madvise(page * _PAGE, (end - page) * _PAGE, mmap.MADV_DONTNEED):
                        return  # locked memory (mlockall): these slots are not leased any more
            self._leased.difference_update(slots)


def _written(first: _Pages, stop: _Pages) -> tuple[list[int], list[int]]:
    """Return the ranges of pages, from ``first`` to ``stop``, that were written; all ranges if the kernel does not show it."""
    counts = 8 * (stop - first)
    ends = np.cumsum(counts)
    entries = np.empty(ends[-1] // 8, np.uint64)
    read = 0
    with contextlib.suppress(OSError), open(_PAGEMAP, "rb", buffering=0) as file:
        fd, target = file.fileno(), entries.data.cast("B")
        for page, end, nbytes in zip(first.tolist(), ends.tolist(), counts.tolist(), strict=True):
            read += os.preadv(fd, [target[end - nbytes : end]], 8 * page)
    if read < ends[-1]:
        return first.tolist(), stop.tolist()
    own = (entries & _THERE != 0) & (entries & _OF_FILE == 0)
    if not own.any():
        return [], []
    some = np.logical_or.reduceat(own, (ends - counts) // 8)
    return first[some].tolist(), stop[some].tolist()
