"""Private copies of slots that cost nothing until they are written: views that the kernel copies on write.

NOTE [ Private views ]
    A sample that is handed out is the caller's own: writing to it must not reach the cache. To copy 150 KB takes longer than
    all else that is done to a sample, so large ones are handed out as views of a second mapping of the segment, MAP_PRIVATE:
    its pages are those of the cache until somebody writes to one, when the kernel gives this process a copy of it.

    A batch of samples is one lease. While it lasts, its slots and their neighbours, with which they may share a page (also the
    last of one column with the first of the next), are not handed out again in this way, but copied: what the caller wrote
    would show. When the last view of it is gone, the pages that were written are given back, and the mapping shows the cache
    again. Which these are, /proc/self/pagemap tells; where it cannot be read, all are given back.

    Samples that are set never change, so it makes no difference when a page is copied. Who overwrites or clears a cache changes
    the samples that are held, as it does for ``copy=False``.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from stocache.shm.leases import LeaseTracker

_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"

# Bits of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst): it is in memory or swapped; it is a file's
_THERE, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)

_Pages: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """The mapping as one batch sees it. No view of an array: numpy would leave it out of the chain."""


class PrivateViews:
    """A private mapping of a file, of which slots are leased.

    Args:
        fd: of the file; not kept. (Not by Python's mmap, which would: to close it would drop the locks of this process.)
        nbytes: of the file.
        columns: where in the file each column begins, and the bytes of a slot there.
        slots: how many each has.

    Raises:
        OSError: the kernel does not map it.
    """

    def __init__(self, fd: int, nbytes: int, columns: Sequence[tuple[int, int]], slots: int) -> None:
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        self._address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        self._memory: Any = (ctypes.c_ubyte * nbytes).from_address(self._address)
        weakref.finalize(self._memory, _libc.munmap, self._address, nbytes).atexit = False
        self._columns, self._slots = columns, slots
        self._leased: set[int] = set()
        self._leases: LeaseTracker[set[int]] = LeaseTracker()
        self._lock = threading.Lock()  # never waited for: a forked child may find it taken

    def lease(self, slots: list[int]) -> tuple[_Lease, list[bool]]:
        """Return the memory of the whole file for one batch, and for each of ``slots`` whether it may be used there."""
        memory: _Lease = _Lease((len(self._memory),), np.uint8, self._memory)
        if not self._lock.acquire(blocking=False):
            return memory, [False] * len(slots)
        try:
            self._take_back()
            own, leased, count = set(slots), self._leased, self._slots
            near = own | {(slot - 1) % count for slot in own} | {(slot + 1) % count for slot in own}
            usable = [True] * len(slots)
            if len(own) < len(slots) or not leased.isdisjoint(near):  # one asked for twice, or held by another batch
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
        """Have the mapping show the file again, where leases that are over were written to."""
        slots = [slot for its in self._leases.released() for slot in its]
        if slots:
            for at, nbytes in self._columns:
                begins = self._address + at + np.array(slots, np.int64) * nbytes
                first, stop = begins // _PAGE, -(-(begins + nbytes) // _PAGE)
                for page, end in zip(*_written(first, stop), strict=True):
                    if _libc.madvise(page * _PAGE, (end - page) * _PAGE, mmap.MADV_DONTNEED):
                        return  # of locked memory (mlockall): these slots are not handed out any more
            self._leased.difference_update(slots)


def _written(first: _Pages, stop: _Pages) -> tuple[list[int], list[int]]:
    """Return those ranges of pages, from ``first`` to ``stop``, that were written to; also where that cannot be told."""
    counts = 8 * (stop - first)
    ends = np.cumsum(counts)
    entries = np.empty(ends[-1] // 8, np.uint64)
    told = 0
    with contextlib.suppress(OSError), open(_PAGEMAP, "rb", buffering=0) as file:
        fd, target = file.fileno(), entries.data.cast("B")
        for page, end, nbytes in zip(first.tolist(), ends.tolist(), counts.tolist(), strict=True):
            told += os.preadv(fd, [target[end - nbytes : end]], 8 * page)
    if told < ends[-1]:
        return first.tolist(), stop.tolist()
    own = (entries & _THERE != 0) & (entries & _OF_FILE == 0)
    if not own.any():
        return [], []
    some = np.logical_or.reduceat(own, (ends - counts) // 8)
    return first[some].tolist(), stop[some].tolist()
