"""DiskStore: the samples of a DiskCache in its files, and their states and places in shared memory."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stocache.cache.disk import samples_file
from stocache.cache.disk.folder import Folder
from stocache.cache.disk.formats import Rows
from stocache.cache.disk.samples_file import DATA_OFFSET, free_rows, load_index, room_of, seed_of
from stocache.cache.placement import Placement, residency
from stocache.cache.stats import DAMAGED, EMPTY, FILLS, MISSING, OOB, READ_NS, REFUSED, SET
from stocache.errors import SegmentError
from stocache.samples.leaves.type_lookup import NotImported
from stocache.samples.record_decoder import Records
from stocache.shm import claims, named, registry
from stocache.shm.extents import DISK_WARNING
from stocache.shm.layout import Layout
from stocache.shm.named import Descriptor, Identity
from stocache.shm.segment import Segment
from stocache.system.platform import here

logger = logging.getLogger("stocache")

_WORDS_BYTES = 64
_USED, _FULL = 0, 1  # words: where the next sample can be written; whether the disk has refused one
_ENOUGH = 16  # samples from which the bytes of the others are estimated
_LOOK_S = 0.1  # for which an estimate counts: looking at all states is too slow for each sample
_LOCK = 1  # of the owner's locks; the claims have 0
_WINDOW = 32 << 20  # bytes, after which pages are dropped

_Indices = NDArray[np.int64]


def _control_bytes(dataset_len: int) -> int:
    """Return the bytes of the shared memory: 17 for each sample, 64, and the words of claims."""
    return claims.with_words(-(-dataset_len // 8) * 8 + _WORDS_BYTES + 16 * dataset_len, dataset_len)


def _parts_of(control: memoryview, dataset_len: int) -> tuple[memoryview, memoryview, memoryview, memoryview]:
    """Return the parts of the shared memory: a state for each sample, eight words, the offsets and the sizes of samples."""
    at = -(-dataset_len // 8) * 8
    words, places = control[at : at + _WORDS_BYTES], control[at + _WORDS_BYTES :][: 16 * dataset_len].cast("Q")
    return control[:dataset_len], words.cast("Q"), places[:dataset_len], places[dataset_len:]


def open_states(
    folder: Folder, dataset_len: int, limit: float | str, row_bytes: int | None, placement: Placement, capacity: int
) -> Segment:
    """Return the shared memory with the states of the samples of a folder, attached to or new.

    ``row_bytes``: the size of each sample, if it is one; ``placement`` then says which samples have room.
    """
    name, control = f"disk.{folder.key}", _control_bytes(dataset_len)
    initialise = partial(_initialise, folder, dataset_len, row_bytes, placement, capacity)
    if not here.SHARES_MEMORY:
        segment = Segment.create(control, 0, for_threads=True)
        initialise(segment.control)
        return segment
    identity: Identity = {"disk": folder.path, "dataset_len": dataset_len, "limit": str(limit), "fingerprint": folder.key}
    if folder.alone:  # shared memory that killed processes left behind is not newer than the index
        with contextlib.suppress(OSError):
            named.remove(registry.path_of(name), dead=True)
    descriptor = Descriptor(identity, {"dataset_len": dataset_len, "capacity": 0})
    layout = Layout.for_sizes(control, 0, descriptor.pack())
    found = named.join(name, identity, False, lambda: (layout, initialise))
    assert found is not None
    return found[0]


def no_states(dataset_len: int) -> Segment:
    """Return memory of this process and its children, for a cache that holds nothing."""
    segment = Segment.create(_control_bytes(dataset_len), 0)
    np.asarray(segment.control[:dataset_len]).fill(OOB)
    return segment


def _initialise(
    folder: Folder, count: int, row_bytes: int | None, placement: Placement, capacity: int, control: memoryview
) -> None:
    """Write the states and the places of ``count`` samples into new shared memory."""
    states, words, offsets, sizes = map(np.asarray, _parts_of(control, count))
    words[_USED] = load_index(folder, offsets, sizes, row_bytes)
    states[:] = np.where(offsets > 0, SET, EMPTY)
    if row_bytes is not None and count:
        slots, in_memory = (capacity - DATA_OFFSET) // room_of(row_bytes), int(folder.manifest["facts"]["memory_slots"])
        states[(states == EMPTY) & ~_resident(placement, count, in_memory, min(count, slots))] = OOB
        places, empty = free_rows(offsets, row_bytes, int(words[_USED])), np.flatnonzero(states == EMPTY)
        empty = empty[: len(places)]
        offsets[empty], sizes[empty] = places[: len(empty)], row_bytes


def _resident(placement: Placement, count: int, in_memory: int, slots: int) -> "NDArray[np.bool_]":
    """Return which samples have room on the disk: first those behind the ones in memory, then these, in the same order."""

    def first(number: int) -> "NDArray[np.bool_]":
        return residency(placement, count, min(count, number)).resident(np.arange(count))

    return (first(in_memory + slots) & ~first(in_memory)) | first(max(0, in_memory + slots - count))


class DiskStore:
    """The `SampleStore` of a DiskCache. The slot of a sample is its index.

    Attributes:
        may_miss: `load` may return MISSING, for a sample that is damaged: it is EMPTY then, and can be written again.
    """

    gathers_from = 2
    may_miss = True

    def __init__(self, segment: Segment, dataset_len: int, folder: Folder | None, form: Rows | Records, capacity: int) -> None:
        """``folder``: None for `no_states`, with which nothing is read or written."""
        self._segment, self._form, self._capacity = segment, form, capacity
        self._states, self._words, self._offsets, self._sizes = _parts_of(segment.control, dataset_len)
        self._folder = folder  # keeps the descriptors open: a different file could have their numbers
        self._index, self._samples, self._key = (-1, -1, 0) if folder is None else (folder.index, folder.samples, folder.seed)
        self._advised = 0  # pages up to here were written to the disk, and dropped
        self._room_for_all, self._looks_at = True, 0.0
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
        return self._words[_USED]

    @property
    def free(self) -> int:
        """Bytes of the file that may still be taken."""
        return self._capacity - self.used

    def encode_many(self, samples: list[Any]) -> list[list[Any]] | None:
        """See `SampleStore`: one by one."""
        return None

    def write_many(self, indices: list[int], encoded: Sequence[Any]) -> list[int | None]:
        """Append samples to the file, as long as there is room, and enter them into the index. See `SampleStore`."""
        if self._folder is None:
            return [REFUSED] * len(indices)
        packed = [samples_file.pack(buffers, seed_of(self._key, idx)) for idx, buffers in zip(indices, encoded, strict=True)]
        sizes = [nbytes for _, nbytes in packed]
        with self._segment.guard:
            places = self._segment.run_locked(_LOCK, lambda: self._take(indices, sizes), None)
        if places is None:
            return [REFUSED] * len(indices)
        try:
            self._write(places, packed)
            for idx, at, nbytes in zip(indices, places, sizes, strict=True):
                if at:
                    self._states[idx] = EMPTY  # nobody reads it while its place changes
                    samples_file.enter(self._index, idx, at, nbytes)
                    self._offsets[idx], self._sizes[idx] = at, nbytes
                else:
                    self._states[idx] = OOB  # room is never freed
        except OSError as error:
            self.stop(f"takes no more samples: {error.strerror}. The others come from the dataset.")
            return [REFUSED] * len(indices)
        return [FILLS if at else None for at in places]

    def _take(self, indices: list[int], sizes: list[int]) -> list[int]:
        """Take room for samples; return offsets, 0 for no room. A sample that was there with the same size keeps its room."""
        places, at = [], self.used
        for idx, nbytes in zip(indices, sizes, strict=True):
            if self._offsets[idx] and self._sizes[idx] == nbytes:
                places.append(self._offsets[idx])
            elif (end := at + room_of(nbytes)) <= self._capacity:
                places.append(at)
                at = end
            else:
                places.append(0)
        self._words[_USED] = at
        return places

    def _write(self, places: list[int], packed: list[tuple[list[Any], int]]) -> None:
        """Write packed samples, adjacent ones together.

        Have the kernel write the file up to there to the disk soon, and drop the pages that are there already. So samples that
        were written once, and are read an epoch later, do not fill the memory.
        """
        buffers: list[Any] = []
        begin = end = 0
        for at, (own, nbytes) in zip(places, packed, strict=True):
            if at:
                if at != end:
                    samples_file.write(self._samples, begin, buffers)
                    begin, buffers = at, []
                buffers += own
                end = at + room_of(nbytes)
        samples_file.write(self._samples, begin, buffers)
        if end - self._advised >= 2 * _WINDOW:
            here.drop_pages(self._samples, self._advised, end - self._advised)
            self._advised = end - _WINDOW  # once more: these are being written

    def refused(self, idx: int) -> bool:
        """Return whether the disk has refused a sample."""
        return self._folder is None or self._words[_FULL] != 0

    def has_room_for(self, states: "NDArray[np.uint8]", expected: int | None = None) -> bool:
        """Return whether all samples that are EMPTY will have room, with a quarter to spare; or too few are here to estimate.

        ``expected``: the number of samples, if ``dataset_len`` is an upper bound.
        """
        if self._form.nbytes is not None:  # which ones have room was decided beforehand
            return True
        if (now := time.monotonic()) >= self._looks_at:
            empty, filled = (int(np.count_nonzero(states == state)) for state in (EMPTY, SET))
            if expected is not None:
                empty = min(empty, max(0, expected - filled))
            self._room_for_all = filled < _ENOUGH or 1.25 * empty * (self.used - DATA_OFFSET) / filled <= self.free
            self._looks_at = now + _LOOK_S
        return self._room_for_all

    def has_room(self, encoded: Collection[Any]) -> bool:
        """Return whether all of these samples fit."""
        return sum(room_of(sum(memoryview(buffer).nbytes for buffer in buffers)) for buffers in encoded) <= self.free

    def stop(self, problem: str) -> None:
        """Accept no more samples, in any process. Warn once that the cache has a ``problem``."""
        self._words[_FULL] = 1
        self._warn(problem)

    def was_taken(self, idx: int) -> bool:
        """Return whether a sample is there, or was there and is damaged or removed."""
        return self._offsets[idx] != 0

    def begins_with(self, idx: int, data: bytes) -> bool:
        """Return whether the bytes of a sample begin with ``data``."""
        with contextlib.suppress(OSError):
            return here.pread(self._samples, len(data), self._offsets[idx]) == data
        return False

    def remove(self, indices: list[int], wanted: Callable[[int], bool]) -> bool | None:
        """Remove some samples that are ``wanted``, for later runs too. Return whether there was one.

        None if another process does not release the lock. Raises OSError: the disk does not allow it.
        """

        def remove_locked() -> bool:  # so that no process takes room in their places meanwhile
            removed = list(filter(wanted, indices))
            for idx in removed:
                samples_file.enter(self._index, idx, 0, 0)
                self._states[idx] = EMPTY
                self._sizes[idx] = 0  # the room is not used again; the offset stays: see `was_taken`
            return bool(removed)

        with self._segment.guard:
            removed = self._segment.run_locked(_LOCK, remove_locked, None)
        if removed:
            os.fsync(self._index)
        return removed

    def load(self, idx: int, copy: bool) -> Any:
        """Return a sample in memory of its own; MISSING if it is damaged, or its class is in a module that is not imported."""
        with self._timed():
            return self._load(idx)

    def load_many(self, indices: _Indices) -> list[Any]:
        """Return samples as `load` does; the kernel reads all that are not in its page cache at the same time."""
        numbers = indices.tolist()
        with self._timed():
            self._read_ahead(numbers)
            return [self._load(idx) for idx in numbers]

    def _load(self, idx: int) -> Any:
        at, found = self._offsets[idx], self.read(idx)
        if found is not None:
            try:
                return self._form.decode(*found)
            except NotImported:  # which says nothing about the sample
                return MISSING
            except SegmentError:
                pass
        self._lose(idx, at)
        return MISSING

    def read(self, idx: int) -> tuple[Any, int] | None:
        """Return memory that begins with the bytes of a sample, and how many they are; None if they are damaged."""
        with contextlib.suppress(OSError, MemoryError):  # the sample is written again, which may mend it
            return samples_file.read(self._samples, self._offsets[idx], self._sizes[idx], seed_of(self._key, idx))
        return None

    def _read_ahead(self, indices: list[int]) -> None:
        """Have the kernel read samples into its page cache."""
        with contextlib.suppress(OSError):
            for idx in indices:
                here.read_ahead(self._samples, self._offsets[idx], room_of(self._sizes[idx]))

    def fill(self, indices: _Indices, rows: _Indices, items: list[Any]) -> "NDArray[np.bool_]":
        """Read samples into rows of a contiguous batch. Return which of them are there.

        Read what the page cache has, then the others, which the kernel reads at the same time.
        """
        assert isinstance(self._form, Rows)
        offsets, sizes = (np.frombuffer(numbers, np.uint64)[indices] for numbers in (self._offsets, self._sizes))
        if not len(indices) or np.count_nonzero(sizes != self._form.nbytes):
            return np.zeros(len(indices), bool)
        with self._timed():
            columns = self._form.columns(items)
            found = samples_file.read_into(self._samples, self._key, indices, offsets, columns, rows, wait=False)
            if None in found:
                late = [number for number, there in enumerate(found) if there is None]
                self._read_ahead(indices[late].tolist())
                read = samples_file.read_into(
                    self._samples, self._key, indices[late], offsets[late], columns, rows[late], wait=True
                )
                for number, there in zip(late, read, strict=True):
                    found[number] = there
        if False in found:
            for idx, at, there in zip(indices.tolist(), offsets.tolist(), found, strict=True):
                if not there:
                    self._lose(idx, at)
        return np.array(found, bool)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._segment.count(READ_NS, time.perf_counter_ns() - began)

    def _lose(self, idx: int, at: int) -> None:
        """Note that a sample that was written at ``at`` is damaged: it is EMPTY from now on."""
        with self._segment.guard:
            if self._states[idx] != SET or self._offsets[idx] != at:
                return  # it was removed or written again meanwhile
            self._states[idx] = EMPTY
            self._segment.counters[DAMAGED] += 1
        self._warn("has lost samples, which are damaged or cannot be read. They come from the dataset, and are written again.")

    def _warn(self, problem: str) -> None:
        if not self._warned and self._folder is not None:
            self._warned = True
            with self._segment.guard:
                first = self._segment.extents.first_to_warn(DISK_WARNING)
            if first:
                logger.warning("the disk cache %s %s", self._folder.path, problem)

    def clear(self) -> None:
        """Forget all samples, and give their room back to the disk. Raises OSError."""
        if self._folder is not None:
            states = np.asarray(self._states)
            states[states == SET if self._form.nbytes is not None else slice(None)] = EMPTY
            for numbers in (self._offsets, self._sizes):
                np.frombuffer(numbers, np.uint64).fill(0)
            os.ftruncate(self._index, 0)
            os.ftruncate(self._samples, 0)
            self._words[_USED], self._words[_FULL] = DATA_OFFSET, 0

    def amounts(self, filled: int) -> dict[str, int]:
        """See `SampleStore`. The reserved bytes are the bytes taken on the disk."""
        slots = len(self._states) - int(np.count_nonzero(np.asarray(self._states) == OOB))
        taken, capacity_bytes = max(0, self.used - DATA_OFFSET), max(0, self._capacity - DATA_OFFSET)
        sizes = {"slot_bytes": taken // max(1, filled), "capacity_bytes": capacity_bytes, "reserved_bytes": taken}
        return {"slots": slots, **sizes}
