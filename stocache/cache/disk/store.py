"""DiskStore: the samples of a DiskCache in its files, and their states and places in shared memory."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stocache.cache.disk.folder import Folder
from stocache.cache.disk.formats import Rows
from stocache.cache.disk.samples_file import DATA_OFFSET, SamplesFile
from stocache.cache.stats import DAMAGED, EMPTY, FILLS, MISSING, OOB, READ_NS, REFUSED, SET
from stocache.errors import SegmentError
from stocache.samples.leaves.type_lookup import NotImported
from stocache.samples.record_decoder import Records
from stocache.shm.extents import DISK_WARNING
from stocache.shm.segment import Segment

logger = logging.getLogger("stocache")

_WORDS_BYTES = 64
USED, FULL = 0, 1
"""Words: where the next sample can be written; whether the disk has refused one."""
_ENOUGH = 16  # samples from which the bytes of the others are estimated
_LOCK = 1  # of the owner's locks; 0 is that of the claims

_Indices = NDArray[np.int64]


class Control(NamedTuple):
    """The shared memory of a disk cache.

    Attributes:
        states: a byte for each sample.
        words: eight numbers; see `USED`.
        offsets, sizes: of the samples in their file.
    """

    states: memoryview
    words: memoryview
    offsets: memoryview
    sizes: memoryview

    @classmethod
    def of(cls, memory: memoryview, dataset_len: int) -> "Control":
        """Return the parts of `control_bytes` bytes."""
        at = -(-dataset_len // 8) * 8
        words, places = memory[at : at + _WORDS_BYTES], memory[at + _WORDS_BYTES : control_bytes(dataset_len)].cast("Q")
        return cls(memory[:dataset_len], words.cast("Q"), places[:dataset_len], places[dataset_len:])


def control_bytes(dataset_len: int) -> int:
    """Return the bytes of a `Control`: 17 for each sample, and 64."""
    return -(-dataset_len // 8) * 8 + _WORDS_BYTES + 16 * dataset_len


class DiskStore:
    """The `SampleStore` of a DiskCache. The slot of a sample is its index.

    Attributes:
        may_miss: `load` may return MISSING, for a sample that is damaged: it is EMPTY then, and can be written again.
    """

    gathers_from = 2
    may_miss = True

    def __init__(self, segment: Segment, dataset_len: int, folder: Folder | None, form: Rows | Records, capacity: int) -> None:
        self._segment, self._form, self._capacity = segment, form, capacity
        self._states, self._words, offsets, sizes = Control.of(segment.control, dataset_len)
        self.file = None if folder is None else SamplesFile(folder, offsets, sizes)
        self._writable = folder is not None and folder.writable
        self._path = "" if folder is None else folder.path
        self._warned = False
        self.slot = int
        self.encode = form.encode

    @property
    def unreadable(self) -> str:
        """See `SampleStore`."""
        return self._form.unreadable

    @property
    def used(self) -> int:
        """Bytes of the file that are taken."""
        return self._words[USED]

    def encode_many(self, samples: list[Any]) -> list[list[Any]] | None:
        """See `SampleStore`: one by one."""
        return None

    def write_many(self, indices: list[int], encoded: Sequence[Any]) -> list[int | None]:
        """Append samples to the file, as long as there is room, and enter them into the index. See `SampleStore`."""
        if self.file is None or not self._writable:
            return [REFUSED] * len(indices)
        packed = [self.file.pack(idx, buffers) for idx, buffers in zip(indices, encoded, strict=True)]
        sizes = [sum(memoryview(buffer).nbytes for buffer in buffers) for buffers in encoded]
        with self._segment.guard:
            places = self._segment.run_locked(_LOCK, lambda: self._take(indices, sizes, [room for _, room in packed]), None)
        if places is None:
            return [REFUSED] * len(indices)
        try:
            self._write(places, packed)
            for idx, at, nbytes in zip(indices, places, sizes, strict=True):
                if at:
                    self._states[idx] = EMPTY  # nobody reads it while its place changes
                    self.file.enter(idx, at, nbytes)
        except OSError as error:
            self.stop(f"takes no more samples: {error.strerror}. The others come from the dataset.")
            return [REFUSED] * len(indices)
        return [self._outcome(idx, at) for idx, at in zip(indices, places, strict=True)]

    def _take(self, indices: list[int], sizes: list[int], rooms: list[int]) -> list[int]:
        """Take room for samples; return offsets, 0 for no room. A sample that was there with the same size keeps its room."""
        assert self.file is not None
        places, at = [], self._words[USED]
        for idx, nbytes, room in zip(indices, sizes, rooms, strict=True):
            if self.file.offsets[idx] and self.file.sizes[idx] == nbytes:
                places.append(self.file.offsets[idx])
            elif at + room <= self._capacity:
                places.append(at)
                at += room
            else:
                places.append(0)
        self._words[USED] = at
        return places

    def _write(self, places: list[int], packed: list[tuple[list[Any], int]]) -> None:
        """Write packed samples, those that lie one behind the other together."""
        assert self.file is not None
        buffers: list[Any] = []
        begin = end = 0
        for at, (own, room) in zip(places, packed, strict=True):
            if at:
                if at != end:
                    self.file.write(begin, buffers)
                    begin, buffers = at, []
                buffers += own
                end = at + room
        self.file.write(begin, buffers)
        self.file.drop_pages(end)

    def _outcome(self, idx: int, at: int) -> int | None:
        if at:
            return FILLS
        self._states[idx] = OOB  # room is never freed
        return None

    def refused(self, idx: int) -> bool:
        """Return whether the disk has refused a sample."""
        return not self._writable or self._words[FULL] != 0

    def has_room_for(self, states: "NDArray[np.uint8]", expected: int | None = None) -> bool:
        """Return whether all samples that are EMPTY will have room, with a quarter to spare; or too few are here to estimate.

        ``expected``: the number of samples, where ``dataset_len`` is an upper bound.
        """
        if self._form.nbytes is not None:  # which ones have room was decided beforehand
            return True
        empty, filled = (int(np.count_nonzero(states == state)) for state in (EMPTY, SET))
        if expected is not None:
            empty = min(empty, max(0, expected - filled))
        return filled < _ENOUGH or 1.25 * empty * (self.used - DATA_OFFSET) / filled <= self._capacity - self.used

    def has_room(self, encoded: Collection[Any]) -> bool:
        """Return whether all of these samples fit."""
        rooms = sum(SamplesFile.room(sum(memoryview(buffer).nbytes for buffer in buffers)) for buffers in encoded)
        return rooms <= self.free

    @property
    def free(self) -> int:
        """Bytes of the file that may still be taken."""
        return self._capacity - self.used

    def stop(self, problem: str) -> None:
        """Accept no more samples, in any process. Warn once that the cache has a ``problem``."""
        self._words[FULL] = 1
        self._warn(problem)

    def was_taken(self, idx: int) -> bool:
        """Return whether a sample is there, or was there and is damaged or removed."""
        return self.file is not None and self.file.offsets[idx] != 0

    def begins_with(self, idx: int, data: bytes) -> bool:
        """Return whether the bytes of a sample begin with ``data``."""
        with contextlib.suppress(OSError):
            return self.file is not None and self.file.begins_with(idx, data)
        return False

    def remove(self, indices: list[int], wanted: Callable[[int], bool]) -> bool | None:
        """Remove those of some samples that are ``wanted``, for later runs too. Return whether there was one.

        None if another process does not release the lock. Raises OSError: the disk does not allow it.
        """
        file = self.file
        if file is None:
            return False
        with self._segment.guard:
            removed = self._segment.run_locked(_LOCK, lambda: self._remove(file, list(filter(wanted, indices))), None)
        if removed:
            file.sync_index()
        return None if removed is None else bool(removed)

    def _remove(self, file: SamplesFile, indices: list[int]) -> list[int]:
        """Remove samples that are set. With the lock held, so that no process takes room in their places meanwhile."""
        for idx in indices:
            file.forget(idx)
            self._states[idx] = EMPTY
            file.sizes[idx] = 0  # the room is not used again; the offset stays: see `was_taken`
        return indices

    def load(self, idx: int, copy: bool) -> Any:
        """Return a sample in memory of its own; MISSING if it is damaged, or its class is in a module that is not imported."""
        with self._timed():
            return self._load(idx)

    def _load(self, idx: int) -> Any:
        if self.file is None:  # which says nothing about the sample
            return MISSING
        at, found = self.file.offsets[idx], self._read(self.file, idx)
        if found is not None:
            try:
                return self._form.decode(*found)
            except NotImported:
                return MISSING
            except SegmentError:
                pass
        self.lose(idx, at)
        return MISSING

    def read(self, idx: int) -> bytes | None:
        """Return the bytes of a sample; None where they are damaged, or cannot be read."""
        found = None if self.file is None else self._read(self.file, idx)
        return None if found is None else found[0][: found[1]].tobytes()

    def _read(self, file: SamplesFile, idx: int) -> tuple[Any, int] | None:
        """Return the result of `SamplesFile.read`. Treat an error as damage: the sample is written again, which may mend it."""
        with contextlib.suppress(OSError, MemoryError):
            return file.read(idx)
        return None

    def load_many(self, indices: _Indices) -> list[Any]:
        """Return samples as `load` does; the kernel reads all that are not in its page cache at the same time."""
        numbers = indices.tolist()
        with self._timed():
            self.read_ahead(numbers)
            return [self._load(idx) for idx in numbers]

    def read_ahead(self, indices: list[int]) -> None:
        """Have the kernel read samples into its page cache."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                for idx in indices:
                    self.file.read_ahead(idx)

    def fill(self, indices: _Indices, rows: _Indices, items: list[Any]) -> "NDArray[np.bool_]":
        """Read samples into rows of a contiguous batch. Return which of them are there."""
        nothing = np.zeros(len(indices), bool)
        if self.file is None or not len(indices):
            return nothing
        assert isinstance(self._form, Rows)
        with self._timed():
            offsets, sizes = self.file.places_of(indices)
            if np.count_nonzero(sizes != self._form.nbytes):
                return nothing
            return np.array(self._read_rows(self.file, indices, offsets, self._form.columns(items), rows))

    def _read_rows(
        self, file: SamplesFile, indices: _Indices, offsets: Any, columns: list[NDArray[np.uint8]], rows: _Indices
    ) -> list[bool]:
        """Read samples that the page cache has, then the others, which the kernel reads at the same time."""
        found = file.read_into(indices, offsets, columns, rows, wait=False)
        if None in found:
            late = [number for number, there in enumerate(found) if there is None]
            self.read_ahead(indices[late].tolist())
            read = file.read_into(indices[late], offsets[late], columns, rows[late], wait=True)
            for number, there in zip(late, read, strict=True):
                found[number] = there
        if False in found:
            for idx, at, there in zip(indices.tolist(), offsets.tolist(), found, strict=True):
                if not there:
                    self.lose(idx, at)
        return list(map(bool, found))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._segment.count(READ_NS, time.perf_counter_ns() - began)

    def lose(self, idx: int, at: int) -> None:
        """Note that a sample that was written at ``at`` is damaged: it is EMPTY from now on."""
        with self._segment.guard:
            if self._states[idx] != SET or self.file is None or self.file.offsets[idx] != at:
                return  # it was removed or written again meanwhile
            self._states[idx] = EMPTY
            self._segment.counters[DAMAGED] += 1
        self._warn("has lost samples, which are damaged or cannot be read. They come from the dataset, and are written again.")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            with self._segment.guard:
                first = self._segment.extents.first_to_warn(DISK_WARNING)
            if first:
                logger.warning("the disk cache %s %s", self._path, problem)

    def clear(self) -> None:
        """Give all room back to the disk."""
        if self.file is not None:
            self.file.clear()
        self._words[USED], self._words[FULL] = DATA_OFFSET, 0
        if self._form.nbytes is None:
            np.asarray(self._states).fill(EMPTY)

    def amounts(self, filled: int) -> dict[str, int]:
        """See `SampleStore`."""
        slots = len(self._states) - int(np.count_nonzero(np.asarray(self._states) == OOB))
        return {
            "slots": slots,
            "slot_bytes": max(0, self.used - DATA_OFFSET) // max(1, filled),
            "capacity_bytes": max(0, self._capacity - DATA_OFFSET),
        }
