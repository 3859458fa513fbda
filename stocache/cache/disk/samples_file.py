"""Write samples to a file, find them by an index, and read them back under a checksum.

NOTE [ The files ]
    ``samples``    after 4 KiB of zeros, the bytes of samples, each at a multiple of 8 and followed by its checksum
    ``index``      for each sample of the dataset two numbers of 64 bits: where its bytes are in ``samples``, and how many; both
                   are 0 if it is not there

    A checksum is the XXH3-64 of the bytes, with the key of the folder plus the index of the sample as its seed. So bytes of
    a different sample, of an older folder or of nothing do not pass, whatever the index says. Nothing is ever synchronised with
    the disk: after a power cut any part of both files may be missing, and a sample that is missing or torn is a miss.

    Room is taken under a lock, by raising a number in shared memory. The next run does not have that number. It begins
    behind all samples in the index. Rows are also written between others, if the index has no sample. No two samples
    have the same room (`_drop_overlapping`), so a damaged one is written where it was.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
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
_LARGE = 1 << 24  # bytes of a sample whose checksum is looked at before memory is taken
_CHUNK = 1 << 20  # entries of the index that are read at a time

_NOT_NOW = {errno.EAGAIN, errno.EOPNOTSUPP}  # some file systems cannot report which pages the page cache has

_hash = xxhash.xxh3_64_intdigest

_Numbers: TypeAlias = NDArray[np.uint64]
_Bytes: TypeAlias = NDArray[np.uint8]
_Indices: TypeAlias = NDArray[np.int64]
_Size = TypeVar("_Size", int, _Numbers)


def room_of(nbytes: _Size) -> _Size:
    """Return the bytes that a sample of ``nbytes`` bytes takes in the file; of an array of sizes, each."""
    return (nbytes + 7) // 8 * 8 + CHECKSUM_BYTES


def seed_of(key: int, idx: int) -> int:
    """Return the seed of a sample's checksum."""
    return key + idx & (1 << 64) - 1


def pack(buffers: Sequence[Any], seed: int) -> tuple[list[Any], int]:
    """Return the buffers to write for a sample, and the bytes of the sample in them, which come first."""
    digest, nbytes = xxhash.xxh3_64(seed=seed), 0
    for buffer in buffers:
        digest.update(buffer)
        nbytes += memoryview(buffer).nbytes
    padding = bytes(-nbytes & 7)
    digest.update(padding)
    return [*buffers, padding + digest.intdigest().to_bytes(CHECKSUM_BYTES, "little")], nbytes


def write(samples: int, at: int, buffers: list[Any]) -> None:
    """Write packed samples, which lie one behind the other. Raises OSError."""
    for begin in range(0, len(buffers), MOST_BUFFERS):
        part = buffers[begin : begin + MOST_BUFFERS]
        nbytes, written = sum(memoryview(buffer).nbytes for buffer in part), here.pwritev(samples, part, at)
        while written < nbytes:  # the disk is full, or a signal came
            more = here.pwrite(samples, b"".join(part)[written:], at + written)
            if not more:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += more
        at += nbytes


def read(samples: int, at: int, nbytes: int, seed: int) -> tuple[_Bytes, int] | None:
    """Return new memory that begins with the bytes of a sample, and how many they are; None if they are damaged.

    Raises:
        OSError: they cannot be read.
        MemoryError: the machine does not have the memory for them.
    """
    room, done = room_of(nbytes), 0
    if room > _LARGE and not any(here.pread(samples, CHECKSUM_BYTES, at + room - CHECKSUM_BYTES)):
        return None  # nothing was written there, so do not take memory for it
    data = np.empty(room, np.uint8)
    memory = memoryview(data)  # type: ignore[arg-type]
    while done < room:  # Linux reads at most 2 GiB at once
        count = here.preadv(samples, [memory[done:]], at + done)
        if not count:
            return None
        done += count
    found = int.from_bytes(memory[-CHECKSUM_BYTES:], "little")
    return (data, nbytes) if _hash(memory[:-CHECKSUM_BYTES], seed) == found else None


def read_into(
    samples: int, key: int, indices: _Indices, offsets: _Numbers, columns: list[_Bytes], rows: _Indices, wait: bool
) -> list[bool | None]:
    """Read samples of one size into rows of a batch. Return for each whether it is there, and sound.

    Args:
        samples, key: the file, and the key of the folder.
        indices: of the samples.
        offsets: where they are.
        columns: of the batch; a row of all of them is as large as a sample.
        rows: of the batch, one for each sample.
        wait: False returns None for samples of which the page cache does not have all.
    """
    nbytes = sum([column.shape[1] for column in columns])
    whole = room_of(nbytes)
    ends = np.empty((len(columns[0]), whole - nbytes), np.uint8)  # padding and checksum
    seeds = (indices.view(np.uint64) + np.uint64(key)).tolist()  # modulo 2^64
    read_each = _read_pieces if nbytes > _PIECE else _read_rows
    results = read_each(samples, offsets.view(np.int64), columns, ends, rows, seeds, wait)
    checksums = ends[:, -CHECKSUM_BYTES:].view("<u8")[rows, 0].tolist()
    return [
        digest == checksum if count == whole else None if not wait and (count >= 0 or -count in _NOT_NOW) else False
        for (count, digest), checksum in zip(results, checksums, strict=True)
    ]


def _read_rows(
    samples: int, at: _Indices, columns: list[_Bytes], ends: _Bytes, rows: _Indices, seeds: list[int], wait: bool
) -> list[tuple[int, int]]:
    """Return of each row the bytes that were there, or minus the number of an error; and the hash without the checksum."""
    counts, parts = here.read_rows(samples, at, [*columns, ends], rows, wait), columns
    if ends.shape[1] > CHECKSUM_BYTES:
        parts = [*columns, ends[:, :-CHECKSUM_BYTES]]
    whole = sum([column.shape[1] for column in columns]) + ends.shape[1]
    return [
        (count, _hash_row(parts, row, seed) if count == whole else 0)
        for count, row, seed in zip(counts, rows.tolist(), seeds, strict=True)
    ]


def _hash_row(columns: list[_Bytes], row: int, seed: int) -> int:
    if len(columns) == 1:
        return _hash(columns[0][row], seed)
    digest = xxhash.xxh3_64(seed=seed)
    for column in columns:
        digest.update(column[row])
    return digest.intdigest()


def _read_pieces(
    samples: int, at: _Indices, columns: list[_Bytes], ends: _Bytes, rows: _Indices, seeds: list[int], wait: bool
) -> list[tuple[int, int]]:
    """Do the same for large samples: they are read in pieces, and each is hashed while it is in the CPU's caches."""
    results = []
    for begin, row, seed in zip(at.tolist(), rows.tolist(), seeds, strict=True):
        digest, count = xxhash.xxh3_64(seed=seed), 0
        try:
            for column in columns:
                for first in range(0, column.shape[1], _PIECE):
                    piece = column[row, first : first + _PIECE]
                    count += here.preadv(samples, [piece], begin + count, wait)
                    digest.update(piece)  # type: ignore[arg-type]
            count += here.preadv(samples, [ends[row]], begin + count, wait)
            digest.update(ends[row, :-CHECKSUM_BYTES])  # type: ignore[arg-type]
        except OSError as error:
            count = -(error.errno or errno.EIO)
        results.append((count, digest.intdigest()))
    return results


def index_bytes(dataset_len: int) -> int:
    """Return the bytes that the index of ``dataset_len`` samples takes on the disk."""
    return ENTRY_BYTES * dataset_len


def enter(index: int, idx: int, at: int, nbytes: int) -> None:
    """Enter a sample of ``nbytes`` bytes at an offset into the index; 0 and 0 for no sample. Raises OSError."""
    here.pwrite(index, at.to_bytes(8, "little") + nbytes.to_bytes(8, "little"), idx * ENTRY_BYTES)


def entry_of(index: int, idx: int) -> tuple[int, int]:
    """Return the offset and the size of a sample; 0 if it is not there. Raises OSError."""
    data = here.pread(index, ENTRY_BYTES, idx * ENTRY_BYTES).ljust(ENTRY_BYTES, b"\0")
    return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")


def read_index(index: int, dataset_len: int) -> Iterator[tuple[int, _Numbers]]:
    """Yield the entries of all samples in parts, each with the number of its first sample: rows of offset and size."""
    end = min(dataset_len, os.fstat(index).st_size // ENTRY_BYTES)
    for begin in range(0, end, _CHUNK):
        data = here.pread(index, min(_CHUNK, end - begin) * ENTRY_BYTES, begin * ENTRY_BYTES)
        yield begin, np.frombuffer(data[: len(data) // ENTRY_BYTES * ENTRY_BYTES], "<u8").reshape(-1, 2)


def may_be_true(entries: _Numbers, size: int) -> "NDArray[np.bool_]":
    """Return which entries of an index can be true, for a file of samples of ``size`` bytes. 0 stands for no sample."""
    at, nbytes = entries.T
    true: NDArray[np.bool_] = (at >= DATA_OFFSET) & (at <= size) & (nbytes <= size) & (at + room_of(nbytes) <= size)
    return true


def load_index(folder: Folder, offsets: _Numbers, sizes: _Numbers, row_bytes: int | None) -> int:
    """Read the index into shared memory. Return where the next sample can be written.

    Entries that cannot be true are deleted, and entries that are not true are found when a sample is read.

    Args:
        folder: has the index.
        offsets, sizes: of the samples; all 0.
        row_bytes: the size that each sample must have, if there is one.
    """
    size, there = os.fstat(folder.samples).st_size, np.zeros(len(offsets), bool)
    for first, entries in read_index(folder.index, len(offsets)):
        true = may_be_true(entries, size)
        if row_bytes is not None:
            true &= entries[:, 1] == row_bytes
        part = slice(first, first + len(entries))
        there[part] = entries.any(axis=1)
        offsets[part], sizes[part] = np.where(true, entries.T, 0)
    end = _drop_overlapping(offsets, sizes)
    with contextlib.suppress(OSError):
        os.ftruncate(folder.index, os.fstat(folder.index).st_size // ENTRY_BYTES * ENTRY_BYTES)  # without a torn last one
        for idx in np.flatnonzero(there & (offsets == 0)).tolist():  # or they would point to later samples
            enter(folder.index, idx, 0, 0)
    return end


def _drop_overlapping(offsets: _Numbers, sizes: _Numbers) -> int:
    """Leave out each entry that reaches into the next one, in the order of the file. Return where the last one ends.

    So no two samples have the same room: one that is damaged is written where it was. And an entry with a wrong size takes the
    room of one other at most.
    """
    used = np.flatnonzero(offsets)
    used = used[np.argsort(offsets[used])]
    begins = offsets[used]
    ends = begins + room_of(sizes[used])
    wrong = used[:-1][ends[:-1] > begins[1:]]
    offsets[wrong] = sizes[wrong] = 0
    return -(-max(DATA_OFFSET, int(ends[-1]) if len(ends) else 0) // 8) * 8


def free_rows(offsets: _Numbers, row_bytes: int, end: int) -> _Numbers:
    """Return where samples of ``row_bytes`` fit between the others: room that was taken before a kill or a power cut."""
    room = room_of(row_bytes)
    taken = np.sort(offsets[offsets > 0]).astype(np.int64)
    begins = np.append(DATA_OFFSET, taken + room)
    counts = (np.append(taken, end) - begins) // room
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places: _Numbers = (np.repeat(begins, counts) + number * room).astype(np.uint64)
    return places
