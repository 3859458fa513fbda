"""Reserve the data of a segment, extent by extent, so that touching it cannot fail."""

import contextlib
import errno
import logging
import mmap
import os
import re
from collections.abc import Iterator, Sequence

from stocache.shm.layout import (
    EXTENTS_AT,
    LIMIT,
    LIMIT_AT,
    REFUSED_EXTENT,
    RESERVED_EXTENT,
    UNRESERVED_EXTENT,
    WARNED_AT,
    Layout,
)
from stocache.shm.locks import EXTENTS_LOCK, FileLocks
from stocache.system import limits
from stocache.system.limits import MIB, format_size
from stocache.system.platform import here

logger = logging.getLogger("stocache")

REFUSED_WARNING, REJECTED_WARNING, DISK_WARNING, FULL_WARNING = 1, 2, 4, 8  # bits of the byte of given warnings

_AT_ONCE = 16 * MIB  # bytes that are reserved under one lock
_LOOKED_AT_EVERY = 16 * MIB  # bytes that a process reserves at most before it looks again how much memory is left
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet named in the mmap module


class Extents:
    """The extents of the data of a segment, as one process sees them. Call what changes them with the segment's guard held.

    Attributes:
        states: the state of each extent, a byte of `layout`. Read it only.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap, fds: list[int], locks: FileLocks, backing: str, huge: bool) -> None:
        self._layout, self._mmap, self._locks, self._backing, self._huge = layout, memory, locks, backing, huge
        self._fds = fds or [-1]  # the platform reserves nothing if segments have no file
        self._bytes = memoryview(memory)
        self.states = self._bytes[EXTENTS_AT : layout.control_at]
        self._known_spare = 0  # bytes of memory that this process may reserve before it looks again how much is left

    def reserve(self, start: int, stop: int, warn: bool = True) -> bool:
        """Make data bytes ``[start, stop)`` safe to touch. False if the machine does not give them, now or before.

        Whole extents are reserved, each once. ``warn``: log a warning that the cache stops growing.
        """
        extents = range(start // self._layout.extent_bytes, -(-stop // self._layout.extent_bytes))
        return self.has(start, stop) or self.reserve_extents(extents, warn)

    def reserve_extents(self, extents: Sequence[int], warn: bool = True) -> bool:
        """Reserve the memory of extents, in ascending order, that is not reserved; see `reserve`. Stop at the first refusal.

        The lock is held for `_AT_ONCE` bytes at a time.
        """
        states, count = self.states, max(1, _AT_ONCE // self._layout.extent_bytes)
        wanted = [extent for extent in extents if states[extent] != RESERVED_EXTENT]
        return all(self._reserve_extents(wanted[at : at + count], warn) for at in range(0, len(wanted), count))

    def populate(self, start: int, stop: int) -> None:
        """Map reserved data ``[start, stop)`` into this process now, instead of page by page when it is touched."""
        at = (self._layout.data_at + start) // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._mmap.madvise(_MADV_POPULATE_WRITE, at, self._layout.data_at + stop - at)
        except OSError as error:  # an old kernel: then page by page
            logger.debug("madvise(MADV_POPULATE_WRITE): %s", error)

    def has(self, start: int, stop: int) -> bool:
        """Return whether data bytes ``[start, stop)`` exist and are reserved."""
        first, last = start // self._layout.extent_bytes, -(-stop // self._layout.extent_bytes)
        return stop <= self._layout.data_bytes and self.states[first:last].tobytes().count(RESERVED_EXTENT) == last - first

    def refused(self, start: int, stop: int) -> bool:
        """Return whether the machine has refused memory for some of the data bytes ``[start, stop)``."""
        extent_bytes = self._layout.extent_bytes
        return REFUSED_EXTENT in self.states[start // extent_bytes : -(-stop // extent_bytes)].tobytes()

    def _reserve_extents(self, wanted: list[int], warn: bool) -> bool:
        states = self.states

        def work() -> bool:
            runs = runs_of([extent for extent in wanted if states[extent] == UNRESERVED_EXTENT])
            return all(self._reserve_run(first, stop, warn) for first, stop in runs) and all(
                states[extent] == RESERVED_EXTENT for extent in wanted
            )

        # one lock for all extents: together they must not take more than the spare memory
        return self._locks.run(EXTENTS_LOCK, work, False)

    def _reserve_run(self, first: int, stop: int, warn: bool) -> bool:
        """Reserve the extents ``[first, stop)`` together; or, if the machine does not give all of them, the first ones."""
        at, (last_at, last_bytes) = self._layout.span(first)[0], self._layout.span(stop - 1)
        problem = self._over_limit(last_at + last_bytes - at) or self._allocate(at, last_at + last_bytes - at)
        if problem and stop - first > 1:
            middle = (first + stop) // 2
            return self._reserve_run(first, middle, warn) and self._reserve_run(middle, stop, warn)
        self.states[first:stop] = bytes([REFUSED_EXTENT if problem else RESERVED_EXTENT]) * (stop - first)
        if problem and warn:
            self._warn_refused(problem)
        return not problem

    def _over_limit(self, nbytes: int) -> str:
        """Return "", or why ``nbytes`` more may not be reserved."""
        if not self.limit or self.reserved_bytes + nbytes <= self.limit:
            return ""
        return f"its part of size_limit_gib is {format_size(self.limit)}: other ranks of this job have caches of their own"

    def _allocate(self, at: int, nbytes: int) -> str:
        """Reserve memory for a part of the file. Return "", or why it failed."""
        if self._known_spare < nbytes:
            memory = limits.memory()
            if memory.spare < nbytes:
                left, floor = format_size(memory.available), format_size(memory.floor)
                return f"{left} of memory are available, of which {floor} stay free"
            self._known_spare = nbytes + min(memory.spare // 64, _LOOKED_AT_EVERY)
        self._known_spare -= nbytes
        if self._huge:
            # Under the "advise" policy only a fault through the advised mapping brings huge pages; fallocate would fill the
            # range with small ones. If this fails (an old kernel, no memory), fallocate does the rest, or reports the error.
            self.populate(at - self._layout.data_at, at - self._layout.data_at + nbytes)
        try:
            here.reserve(self._fds[0], at, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # give back the part that was taken, if the kernel can
                self._mmap.madvise(mmap.MADV_REMOVE, at, nbytes)
            return f"{self._backing} gave no more: {os.strerror(error.errno or errno.ENOSPC)}"
        return ""

    def first_to_warn(self, warning: int) -> bool:
        """Return whether no process has given this warning yet, and note that it is given."""
        return self._locks.run(EXTENTS_LOCK, lambda: self._first_to_warn(warning), False)  # else two processes may warn

    def _first_to_warn(self, warning: int) -> bool:
        given = self._bytes[WARNED_AT]
        self._bytes[WARNED_AT] = given | warning
        return not given & warning

    def _warn_refused(self, problem: str) -> None:
        if not self._first_to_warn(REFUSED_WARNING):
            return
        logger.warning(
            "cache stops growing at %s of %s: %s. Samples beyond stay uncached, training goes on. "
            "Lower size_limit_gib, or free memory; in Docker raise --memory or --shm-size.",
            format_size(self.reserved_bytes), format_size(self._layout.data_bytes), problem,
        )  # fmt: skip

    def clear(self) -> None:
        """Zero all reserved data, and allow refused extents to be reserved again. Call it only while no process writes."""
        zeros = memoryview(bytes(MIB))
        for run in re.finditer(b"%c+" % RESERVED_EXTENT, self.states):
            at, (last_at, last_bytes) = self._layout.span(run.start())[0], self._layout.span(run.end() - 1)
            for start in range(at, last_at + last_bytes, MIB):
                stop = min(start + MIB, last_at + last_bytes)
                self._bytes[start:stop] = zeros[: stop - start]
        self.states[:] = self.states.tobytes().replace(bytes([REFUSED_EXTENT]), bytes([UNRESERVED_EXTENT]))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of data that are reserved now."""
        return self._layout.reserved_bytes(self.states)

    @property
    def limit(self) -> int:
        """Bytes of data that may be reserved; 0 for all of it."""
        return LIMIT.unpack_from(self._bytes, LIMIT_AT)[0]  # type: ignore[no-any-return]

    @limit.setter
    def limit(self, nbytes: int) -> None:
        LIMIT.pack_into(self._bytes, LIMIT_AT, max(1, nbytes))

    @property
    def promised_bytes(self) -> int:
        """Bytes of data that may still be reserved."""
        return self._layout.promised_bytes(self.reserved_bytes, self.limit)


def runs_of(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number of each run of consecutive ones, and the number after its last."""
    first = 0
    for row, number in enumerate(numbers, 1):
        if row == len(numbers) or numbers[row] != number + 1:
            yield numbers[first], number + 1
            first = row
