"""Append samples to a file, find them by an index, and read them back under a checksum.

NOTE [ The files ]
    ``samples``    after 4 KiB of zeros, the bytes of samples, each at a multiple of 8 and followed by its checksum
    ``index``      for each sample of the dataset two numbers of 64 bits: where its bytes are in ``samples``, and how many; both
                   are 0 if it is not there

    A checksum is the XXH3-64 of the bytes, with the key of the folder plus the index of the sample as its seed. So bytes of
    another sample, of an older folder or of nothing do not pass, whatever the index says. Nothing is ever synchronised with the
    disk: after a power cut any part of both files may be missing, and a sample that is missing or torn is a miss.

    Room is taken under a lock, by raising a number in shared memory. The next run does not have that number. It begins
    behind all samples in the index. Rows are also written between others, where the index has no sample. No two samples
    have the same room (`_drop_overlapping`), so a damaged one is written where it was.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from stocache.cache.disk.folder import Folder
from stocache.shm.segment import MOST_BUFFERS
from stocache.system.platform import here

DATA_OFFSET = 4096
"""The offset of the first sample: an offset of 0 means no sample."""

CHECKSUM_BYTES = 8
ENTRY_BYTES = 16
"""Bytes of the index for each sample."""
_PIECE = 1 << 18  # bytes of a sample that are read and hashed at a time
_WINDOW = 32 << 20  # bytes, after which pages are dropped
_LARGE = 1 << 24  # bytes of a sample whose checksum is looked at before memory is taken
CHUNK = 1 << 20
"""Entries of the index that are read at a time."""

_NOT_NOW = {errno.EAGAIN, errno.EOPNOTSUPP}  # some file systems cannot report which pages the page cache has

_hash = xxhash.xxh3_64_intdigest

_Numbers: TypeAlias = NDArray[np.uint64]
_Bytes: TypeAlias = NDArray[np.uint8]
_Indices: TypeAlias = NDArray[np.int64]
_Size = TypeVar("_Size", int, _Numbers)


def _hash_row(columns: list[_Bytes], row: int, seed: int) -> int:
    if len(columns) == 1:
        return _hash(columns[0][row], seed)
    digest = xxhash.xxh3_64(seed=seed)
    for column in columns:
        digest.update(column[row])
    return digest.intdigest()


class SamplesFile:
    """The two files of a folder; see NOTE [ The files ].

    Args:
        offsets, sizes: of the samples, in shared memory.
    """

    def __init__(self, folder: Folder, offsets: memoryview, sizes: memoryview) -> None:
        self._folder = folder  # keeps the descriptors open: another file could have their numbers
        self._index, self._samples, self._seed = folder.index, folder.samples, folder.seed
        self.offsets, self.sizes = offsets, sizes
        self._advised = 0  # pages up to here were written to the disk, and dropped

    @staticmethod
    def room(nbytes: _Size) -> _Size:
        """Return the bytes that a sample of ``nbytes`` bytes takes in the file; of an array of sizes, each."""
        return (nbytes + 7) // 8 * 8 + CHECKSUM_BYTES

    def read(self, idx: int) -> tuple[NDArray[np.uint8], int] | None:
        """Return new memory that begins with the bytes of a sample, and how many they are; None where they are damaged.

        Raises:
            OSError: they cannot be read.
            MemoryError: the machine does not have the memory for them.
        """
        at, nbytes = self.offsets[idx], self.sizes[idx]
        room = self.room(nbytes)
        if room > _LARGE and not any(here.pread(self._samples, CHECKSUM_BYTES, at + room - CHECKSUM_BYTES)):
            return None  # nothing was written there, so do not take memory for it
        data = np.empty(room, np.uint8)
        memory = memoryview(data)  # type: ignore[arg-type]
        done = here.preadv(self._samples, [memory], at)
        while done < room:  # Linux reads at most 2 GiB at once
            count = here.preadv(self._samples, [memory[done:]], at + done)
            if not count:
                return None
            done += count
        found = int.from_bytes(memory[-CHECKSUM_BYTES:], "little")
        return (data, nbytes) if _hash(memory[:-CHECKSUM_BYTES], seed_of(self._seed, idx)) == found else None

    def places_of(self, indices: _Indices) -> tuple[_Numbers, _Numbers]:
        """Return where samples are, and their sizes; 0 for those that are not there."""
        return np.frombuffer(self.offsets, np.uint64)[indices], np.frombuffer(self.sizes, np.uint64)[indices]

    def read_into(
        self, indices: _Indices, offsets: _Numbers, columns: list[_Bytes], rows: _Indices, wait: bool
    ) -> list[bool | None]:
        """Read samples of one size into rows of a batch. Return for each whether it is there, and sound.

        Args:
            indices: of the samples.
            offsets: where they are.
            columns: of the batch; a row of all of them is as large as a sample.
            rows: of the batch, one for each sample.
            wait: False returns None for samples of which the page cache does not have all.
        """
        nbytes = sum([column.shape[1] for column in columns])
        whole = self.room(nbytes)
        ends = np.empty((len(columns[0]), whole - nbytes), np.uint8)  # padding and checksum
        seeds = (indices.view(np.uint64) + np.uint64(self._seed)).tolist()  # modulo 2^64
        read = self._read_pieces if nbytes > _PIECE else self._read_rows
        results = read(offsets.view(np.int64), columns, ends, rows, seeds, wait)
        checksums = ends[:, -CHECKSUM_BYTES:].view("<u8")[rows, 0].tolist()
        return [
            digest == checksum if count == whole else None if not wait and (count >= 0 or -count in _NOT_NOW) else False
            for (count, digest), checksum in zip(results, checksums, strict=True)
        ]

    def _read_rows(
        self, at: _Indices, columns: list[_Bytes], ends: _Bytes, rows: _Indices, seeds: list[int], wait: bool
    ) -> list[tuple[int, int]]:
        """Return of each row the bytes that were there, or minus the number of an error; and the hash without the checksum."""
        counts, parts = here.read_rows(self._samples, at, [*columns, ends], rows, wait), columns
        if ends.shape[1] > CHECKSUM_BYTES:
            parts = [*columns, ends[:, :-CHECKSUM_BYTES]]
        whole = sum([column.shape[1] for column in columns]) + ends.shape[1]
        return [
            (count, _hash_row(parts, row, seed) if count == whole else 0)
            for count, row, seed in zip(counts, rows.tolist(), seeds, strict=True)
        ]

    def _read_pieces(
        self, at: _Indices, columns: list[_Bytes], ends: _Bytes, rows: _Indices, seeds: list[int], wait: bool
    ) -> list[tuple[int, int]]:
        """Do the same for large samples: they are read in pieces, and each is hashed while it is in the CPU's caches."""
        results = []
        for begin, row, seed in zip(at.tolist(), rows.tolist(), seeds, strict=True):
            digest, count = xxhash.xxh3_64(seed=seed), 0
            try:
                for column in columns:
                    for first in range(0, column.shape[1], _PIECE):
                        piece = column[row, first : first + _PIECE]
                        count += here.preadv(self._samples, [piece], begin + count, wait)
                        digest.update(piece)  # type: ignore[arg-type]
                count += here.preadv(self._samples, [ends[row]], begin + count, wait)
                digest.update(ends[row, :-CHECKSUM_BYTES])  # type: ignore[arg-type]
            except OSError as error:
                count = -(error.errno or errno.EIO)
            results.append((count, digest.intdigest()))
        return results

    def read_ahead(self, idx: int) -> None:
        """Have the kernel read a sample into the page cache."""
        here.read_ahead(self._samples, self.offsets[idx], self.room(self.sizes[idx]))

    def pack(self, idx: int, buffers: Sequence[Any]) -> tuple[list[Any], int]:
        """Return the buffers to write for a sample, and their bytes in total."""
        digest = xxhash.xxh3_64(seed=seed_of(self._seed, idx))
        nbytes = 0
        for buffer in buffers:
            digest.update(buffer)
            nbytes += memoryview(buffer).nbytes
        padding = bytes(-nbytes & 7)
        digest.update(padding)
        return [*buffers, padding + digest.intdigest().to_bytes(CHECKSUM_BYTES, "little")], self.room(nbytes)

    def write(self, at: int, buffers: list[Any]) -> None:
        """Write packed samples, which lie one behind the other. Raises OSError."""
        for begin in range(0, len(buffers), MOST_BUFFERS):
            part = buffers[begin : begin + MOST_BUFFERS]
            nbytes = sum(memoryview(buffer).nbytes for buffer in part)
            written = here.pwritev(self._samples, part, at)
            if written != nbytes:  # the disk is full, or a signal came
                data = memoryview(b"".join(part))
                while written < nbytes:
                    more = here.pwrite(self._samples, data[written:], at + written)
                    if not more:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    written += more
            at += nbytes

    def drop_pages(self, end: int) -> None:
        """Have the kernel write the file up to ``end`` to the disk soon, and drop the pages that are there already.

        So samples that were written once, and are read an epoch later, do not fill the memory.
        """
        if end - self._advised >= 2 * _WINDOW:
            here.drop_pages(self._samples, self._advised, end - self._advised)
            self._advised = end - _WINDOW  # once more: these are being written

    def enter(self, idx: int, at: int, nbytes: int) -> None:
        """Enter a written sample of ``nbytes`` bytes into the index. Raises OSError."""
        here.pwrite(self._index, at.to_bytes(8, "little") + nbytes.to_bytes(8, "little"), idx * ENTRY_BYTES)
        self.offsets[idx], self.sizes[idx] = at, nbytes

    def begins_with(self, idx: int, data: bytes) -> bool:
        """Return whether the bytes of a sample begin with ``data``. Raises OSError."""
        return here.pread(self._samples, len(data), self.offsets[idx]) == data

    def forget(self, idx: int) -> None:
        """Remove a sample from the index file. Raises OSError."""
        here.pwrite(self._index, bytes(ENTRY_BYTES), idx * ENTRY_BYTES)

    def sync_index(self) -> None:
        """Have the disk write the index now. Raises OSError."""
        os.fsync(self._index)

    def clear(self) -> None:
        """Forget all samples, and give their room back to the disk. Raises OSError."""
        for numbers in (self.offsets, self.sizes):
            np.frombuffer(numbers, np.uint64).fill(0)
        os.ftruncate(self._index, 0)
        os.ftruncate(self._samples, 0)


def read_entries(index: int, first: int, count: int) -> _Numbers:
    """Return entries of the index with a descriptor, as rows of offset and size; fewer where the file ends."""
    data = here.pread(index, count * ENTRY_BYTES, first * ENTRY_BYTES)
    return np.frombuffer(data[: len(data) // ENTRY_BYTES * ENTRY_BYTES], "<u8").reshape(-1, 2)


def seed_of(key: int, idx: int) -> int:
    """Return the seed of a sample's checksum."""
    return key + idx & (1 << 64) - 1


def may_be_true(at: _Numbers, nbytes: _Numbers, size: int) -> "NDArray[np.bool_]":
    """Return which entries of an index can be true, for a file of samples of ``size`` bytes. 0 stands for no sample."""
    true: NDArray[np.bool_] = (at >= DATA_OFFSET) & (at <= size) & (nbytes <= size) & (at + SamplesFile.room(nbytes) <= size)
    return true


def index_bytes(dataset_len: int) -> int:
    """Return the bytes that the index of ``dataset_len`` samples takes on the disk."""
    return ENTRY_BYTES * dataset_len


def load_index(folder: Folder, offsets: _Numbers, sizes: _Numbers, row_bytes: int | None) -> int:
    """Read the index into shared memory. Return where the next sample can be written.

    Entries that cannot be true are deleted, those that are not true are found when a sample is read.

    Args:
        folder: has the index.
        offsets, sizes: of the samples; all 0.
        row_bytes: the size that each sample must have, if there is one.
    """
    size, there = os.fstat(folder.samples).st_size, np.zeros(len(offsets), bool)
    for first in range(0, len(offsets), CHUNK):
        entries = read_entries(folder.index, first, min(CHUNK, len(offsets) - first))
        at, nbytes = entries[:, 0], entries[:, 1]
        true = may_be_true(at, nbytes, size)
        if row_bytes is not None:
            true &= nbytes == row_bytes
        part = slice(first, first + len(entries))
        there[part] = entries.any(axis=1)
        offsets[part] = np.where(true, at, 0)
        sizes[part] = np.where(true, nbytes, 0)
    end = _drop_overlapping(offsets, sizes)
    if folder.writable:
        with contextlib.suppress(OSError):
            os.ftruncate(folder.index, os.fstat(folder.index).st_size // ENTRY_BYTES * ENTRY_BYTES)  # without a torn last one
            for idx in np.flatnonzero(there & (offsets == 0)).tolist():  # or they would point to later samples
                here.pwrite(folder.index, bytes(ENTRY_BYTES), idx * ENTRY_BYTES)
    return end


def _drop_overlapping(offsets: _Numbers, sizes: _Numbers) -> int:
    """Leave out each entry that reaches into the next one, in the order of the file. Return where the last one ends.

    So no two samples have the same room: one that is damaged is written where it was. And an entry with a wrong size takes the
    room of one other at most.
    """
    used = np.flatnonzero(offsets)
    used = used[np.argsort(offsets[used])]
    begins = offsets[used]
    ends = begins + SamplesFile.room(sizes[used])
    wrong = used[:-1][ends[:-1] > begins[1:]]
    offsets[wrong] = sizes[wrong] = 0
    return -(-max(DATA_OFFSET, int(ends[-1]) if len(ends) else 0) // 8) * 8


def free_rows(offsets: _Numbers, row_bytes: int, end: int) -> _Numbers:
    """Return where samples of ``row_bytes`` fit between the others: room that was taken before a kill or a power cut."""
    room = SamplesFile.room(row_bytes)
    taken = np.sort(offsets[offsets > 0]).astype(np.int64)
    begins = np.append(DATA_OFFSET, taken + room)
    counts = (np.append(taken, end) - begins) // room
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places: _Numbers = (np.repeat(begins, counts) + number * room).astype(np.uint64)
    return places
