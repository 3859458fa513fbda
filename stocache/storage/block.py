"""Encode samples as one file, a block, and read single samples from it; checksums cover every byte.

NOTE [ Blocks ]
    A block is a safetensors file: eight bytes with the length of the header, the header, and these columns:

        checks     (n,) the XXH3-64 of the bytes of each sample, as int64
        offsets    (n + 1,) where the record of each sample begins, and where the last one ends; int64; not for rows
        samples    the bytes of the samples: rows (n, bytes of a row), or records one after the other; uint8

    Samples are *rows* if all of them have one treedef and the same integers. A row consists of the leaves of a record (NOTE [
    Records ]) and is padded to a multiple of 8 bytes. Other samples are *records*, as they are in memory.

    ``__metadata__`` has one entry, "stocache", a JSON object:

        checksum    16 hexadecimal digits: the XXH3-64 of the file up to the column "samples", with zeros in their place
        version     2
        samples     number of samples
        treedefs    the treedefs of the samples; the head of a record has the number of one
        row         of rows: the bytes of the leaves, and the integers; null for records

    So the checksum of a block covers everything but the samples, and the checksums of the samples cover the rest. Reading one
    sample finds damage in it; there is no need to read the whole block.

    Blocks are read by pread, not through a mapping. Another process may truncate the file, and the disk may fail: pread then
    raises an error; but a mapping ends the process by SIGBUS. From a cold disk a mapping reads what lies around each page,
    or, with MADV_RANDOM, one page after the other; the samples of a batch are requested together (POSIX_FADV_WILLNEED), which
    is several times as fast. A warm read takes a microsecond more.
"""

import contextlib
import functools
import json
import struct
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import xxhash

from stocache.errors import DamagedError, StorageError
from stocache.samples.leaves.type_lookup import Unresolved, check_size
from stocache.samples.record_decoder import RecordReader
from stocache.samples.record_encoder import COMPRESSED, HEAD, EncodedRecord, RecordEncoder, integers_codec, pack_integers
from stocache.samples.spec import RowLayout
from stocache.storage.files import ByteSource
from stocache.system.hashing import ZEROS, BytesLike, embed_checksum, read_checksum

BLOCK_VERSION = 2
PREPARE_AGAIN = "Prepare the folder again: 'stocache prepare SRC DIR --again', or prepare(..., again=True)."
"""The remedy for damage of any file."""
LIST_DAMAGE = f"'stocache check DIR' lists all damage. {PREPARE_AGAIN}"
"""The end of messages about a damaged block."""

_MARK = b'\\"checksum\\": \\"'
_SMALL = 4 << 10  # bytes of a sample, below which its leaves are copied: the leaves of larger ones are read in place
_READERS = 1024  # readers of treedefs that a process keeps


def version_error(version: object, own: int) -> str:
    """Return the text about a file of a different version."""
    is_older = type(version) is int and version < own
    remedy = f"An earlier stocache wrote it. {PREPARE_AGAIN}" if is_older else "Update stocache."
    return f"has version {version!r:.20}; this stocache reads version {own}. {remedy}"


def encode(samples: Sequence[object], first: int = 0, allow_pickle: bool = False) -> tuple[list[BytesLike], str]:
    """Return the file of a block that holds ``samples``, in pieces, and its checksum.

    Args:
        samples: of any structures.
        first: the number of the first sample, for errors.
        allow_pickle: whether to pickle values of types that have no own encoding.

    Raises:
        SampleError: a sample cannot be stored, or would not come back the same.
    """
    encoder, texts = RecordEncoder(allow_pickle), dict[bytes, int]()
    records = [encoder.pack(sample, f"sample {first + row}") for row, sample in enumerate(samples)]
    for record in records:
        texts.setdefault(record.treedef, len(texts))
    facts: dict[str, Any] = {"checksum": ZEROS, "version": BLOCK_VERSION, "samples": len(samples), "row": None}
    facts["treedefs"] = [text.decode("utf-8", "surrogatepass") for text in texts]
    columns: dict[str, BytesLike] = {}
    if len({(record.treedef, record.nbytes, record.packed, record.tail) for record in records}) == 1:
        facts["row"] = [records[0].nbytes, records[0].integers]
        bounds, gap = _row_bounds(records[0].nbytes, len(samples)), bytes(-records[0].nbytes & 7)
        pieces = [piece for record in records for piece in (*record.leaves, gap)]
    else:
        bounds = list(accumulate([record.room for record in records], initial=0))
        columns["offsets"] = np.array(bounds, "<i8").tobytes()
        pieces = []
        for record in records:
            pieces += (HEAD.pack(record.nbytes, texts[record.treedef], record.packed), *record.leaves, record.tail)
    data = memoryview(b"".join(pieces))
    digests = map(xxhash.xxh3_64_intdigest, map(data.__getitem__, map(slice, bounds, bounds[1:])))
    columns = {"checks": np.fromiter(digests, "<u8", len(samples)).tobytes(), **columns, "samples": data}
    shape = [len(samples), bounds[1]] if facts["row"] else [len(data)]
    head, covered = _header(columns, shape, json.dumps(facts)), b"".join(list(columns.values())[:-1])
    head = embed_checksum(head, _MARK, covered)
    return [head, *columns.values()], read_checksum(head, _MARK, covered)


def _header(columns: dict[str, BytesLike], shape: list[int], facts: str) -> bytes:
    """Return the beginning of a file of these columns, as safetensors writes it. ``shape``: the shape of the samples."""
    header: dict[str, Any] = {"__metadata__": {"stocache": facts}}
    end = 0
    for name, column in columns.items():
        begin, end = end, end + len(column)
        kind = {"dtype": "U8", "shape": shape} if name == "samples" else {"dtype": "I64", "shape": [len(column) // 8]}
        header[name] = kind | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _row_bounds(nbytes: int, count: int) -> Sequence[int]:
    """Return where ``count`` rows begin, and where the last one ends, given the bytes of their leaves."""
    width = nbytes + (-nbytes & 7)
    return range(0, (count + 1) * width, width) if width else [0] * (count + 1)


class _Rows:
    """The rows of a block.

    Attributes:
        bounds: where the samples begin in their column, and where the last one ends.

    Args:
        text: their treedef.
        row: the bytes of the leaves, and the integers.
        count: number of rows.
        allow_pickle: as for `Block`.
    """

    def __init__(self, text: str, row: Any, count: int, allow_pickle: bool) -> None:
        self._text, self._reader = text, partial(_reader, text, allow_pickle)
        self._leaves, self._integers = check_size(row[0]), tuple(map(check_size, row[1]))
        self.bounds = _row_bounds(self._leaves, count)

    def make(self, memory: Any, copy: bool | None) -> Any:
        """Return the sample in a row. ``copy``: as for `RecordReader.read`."""
        return self._reader().read(memory, 0, self._leaves, 0, copy, self._integers)

    @cached_property
    def _tail(self) -> tuple[bytes, int]:
        tail, packed = pack_integers(list(self._integers))
        return tail + bytes(-(self._leaves + len(tail)) & 7), packed

    def record(self, memory: memoryview) -> EncodedRecord:
        """Return a row as a record."""
        tail, packed = self._tail
        return EncodedRecord(_encoded(self._text), [memory[: self._leaves]], self._leaves, packed, tail)

    def are_of(self, layout: RowLayout) -> bool:
        """Return whether these are rows of a layout."""
        return layout.row == (_encoded(self._text), self._leaves, self._integers)


class _Records:
    """The records of a block. It has the attributes and methods of `_Rows`.

    Args:
        texts: the treedefs.
        offsets: where the records begin, and where the last one ends.
        allow_pickle: as for `Block`.

    Raises:
        ValueError: two records overlap.
    """

    def __init__(self, texts: list[str], offsets: memoryview, allow_pickle: bool) -> None:
        self._texts, self._allow_pickle, self.bounds = texts, allow_pickle, offsets
        if offsets[0] or (np.diff(offsets) < HEAD.size).any():
            raise ValueError("its records do not follow each other")

    def make(self, memory: Any, copy: bool | None) -> Any:
        """Return the sample in a record."""
        text, leaves, _, integers = self._parts(memory)
        return _reader(text, self._allow_pickle).read(memory, HEAD.size, leaves, 0, copy, integers)

    def _parts(self, memory: Any) -> tuple[str, int, int, tuple[int, ...]]:
        """Return the treedef of a record, the bytes of its leaves, and its integers, packed and unpacked."""
        leaves, number, packed = HEAD.unpack_from(memory)
        codec, end = integers_codec(packed), HEAD.size + leaves
        if end + codec.size > len(memory) or packed & COMPRESSED:
            raise ValueError("a record ends before its leaves")
        return self._texts[number], leaves, packed, codec.unpack_from(memory, end)

    def record(self, memory: memoryview) -> EncodedRecord:
        """Return a record without its head."""
        text, leaves, packed, _ = self._parts(memory)
        end = HEAD.size + leaves
        return EncodedRecord(_encoded(text), [memory[HEAD.size : end]], leaves, packed, bytes(memory[end:]))

    def are_of(self, layout: RowLayout) -> bool:
        """Return False: these are no rows."""
        return False


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@functools.lru_cache(_READERS)
def _reader(text: str, allow_pickle: bool) -> RecordReader:
    return RecordReader(_encoded(text), allow_pickle)


class Block:
    """An open block.

    Attributes:
        samples: number of samples.
        checksum: checksum of the block, as in the index of a storage.
        treedefs: the treedefs of its samples, as texts.
        row: of rows: the bytes of their leaves, and their integers; else None.
        nbytes: bytes of the file.

    Args:
        source: the file.
        name: its name in errors.
        allow_pickle: whether to load pickled values. Loading runs the code that a pickle names.

    Raises:
        DamagedError: the file is not a block, or has changed since it was written.
        StorageError: it has a different version.
    """

    def __init__(self, source: ByteSource, name: str, allow_pickle: bool = False) -> None:
        self._source, self._name, self._reads = source, name, 0
        self.nbytes = source.nbytes
        try:
            self._open(allow_pickle)
        except StorageError as error:
            raise type(error)(f"{name}: {error}") from None
        except Exception as error:  # forged bytes may lead numpy to raise anything
            raise self._damaged(error) from error
        self._most_reads = 1 + self.samples // 4  # then the rest is read ahead: a smaller part costs less by itself

    def _open(self, allow_pickle: bool) -> None:
        """Read and check the header, the checksums of the samples and their offsets."""
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > self.nbytes - 8:
            raise ValueError(f"its header claims {length} bytes, the file has {self.nbytes}")
        head = self._bytes(0, 8 + length)
        try:
            header = json.loads(head[8:])
            facts = json.loads(header.pop("__metadata__")["stocache"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError("its header is not one of a block") from error
        if facts["version"] != BLOCK_VERSION:
            raise StorageError(f"it {version_error(facts['version'], BLOCK_VERSION)}")
        names = ["checks", "samples"] if facts["row"] else ["checks", "offsets", "samples"]
        bounds = [0, *(header[name]["data_offsets"][1] for name in names)]
        if list(header) != names or len(head) + bounds[-1] != self.nbytes or sorted(map(check_size, bounds)) != bounds:
            raise ValueError(f"its {self.nbytes} bytes are not the columns of a block")
        covered = memoryview(self._bytes(len(head), bounds[-2]))
        self.checksum = read_checksum(head, _MARK, covered)
        self.samples, self.treedefs, self.row = check_size(facts["samples"]), facts["treedefs"], facts["row"]
        if 8 * self.samples != bounds[1]:
            raise ValueError(f"it claims {self.samples} samples, and has checksums of {bounds[1] // 8}")
        if not all(type(text) is str for text in self.treedefs):
            raise ValueError("its treedefs are not texts")
        self._begin, self._checks = len(head) + bounds[-2], covered[: bounds[1]].cast("Q")
        self._layout: _Rows | _Records
        if self.row:
            self._layout = _Rows(self.treedefs[0], self.row, self.samples, allow_pickle)
        else:
            self._layout = _Records(self.treedefs, covered[bounds[1] :].cast("q"), allow_pickle)
        self._bounds = self._layout.bounds
        if len(self._bounds) != self.samples + 1 or self._bounds[-1] != bounds[-1] - bounds[-2]:
            raise ValueError("its samples have more or fewer bytes than they should")

    def _bytes(self, at: int, nbytes: int) -> bytes:
        buffer, begin = self._source.read(at, nbytes, writable=False)
        return bytes(memoryview(buffer)[begin : begin + nbytes])

    def record_bytes(self, samples: int, nbytes: int) -> int:
        """Return about how many bytes the samples of a block like this one, a file of ``nbytes``, take as records."""
        each = 8 if self.row else 16  # the checksum and the offset
        size: int = nbytes - self._begin + each * (self.samples - samples)
        if self.row:
            size += samples * (self._layout.record(memoryview(b"")).room - self._bounds[1])
        return max(0, size)

    def close(self) -> None:
        """Close the file until a sample is read again. The checksums and offsets of the samples stay in memory."""
        self._source.close()

    def prefetch(self, row: int) -> None:
        """Ask for the bytes of a sample to be read ahead, unless the whole block was asked for."""
        if self._reads < self._most_reads:
            begin, end = self._bounds[row : row + 2]
            self._source.prefetch(self._begin + begin, end - begin)

    def sample(self, row: int) -> Any:
        """Return a sample; the caller may change it.

        Reads the bytes of this sample only. After many calls, it also asks the kernel to read the whole block ahead.

        Raises:
            DamagedError: the sample has changed since it was written.
            StorageError: it needs classes that are missing, or pickles that are not allowed.
        """
        self._note_reads(1)
        is_small = self._bounds[row + 1] - self._bounds[row] < _SMALL
        return self._make(row, self._read(row, row + 1, not is_small), is_small or None)

    def _note_reads(self, count: int) -> None:
        before = self._reads
        self._reads += count
        if before < self._most_reads <= self._reads:  # reads in random order over many blocks close the block before that
            self._source.prefetch()

    def all(self) -> list[Any]:
        """Return all samples; the caller may change them.

        Raises:
            DamagedError, StorageError: as `sample`.
        """
        self._source.prefetch()
        return self.some(range(self.samples))

    def some(self, rows: range) -> list[Any]:
        """Return samples that follow each other; the caller may change them. Small ones are read together.

        Raises:
            DamagedError, StorageError: as `sample`.
        """
        if self._bounds[rows.stop] - self._bounds[rows.start] < _SMALL * len(rows):
            self._note_reads(len(rows))
            pieces, make = self._pieces(rows), self._layout.make
            if list(map(xxhash.xxh3_64_intdigest, pieces)) == self._checks[rows.start : rows.stop].tolist():
                with contextlib.suppress(Exception):  # found again, and raised, when the sample is made by itself
                    return [make(piece, True) for piece in pieces]
            return [self._make(row, piece, True) for row, piece in zip(rows, pieces, strict=True)]
        for row in rows:
            self.prefetch(row)
        return list(map(self.sample, rows))

    def encoded(self, rows: Sequence[int], layout: RowLayout | None = None) -> dict[int, Any] | None:
        """Return the bytes of samples by row, as a cache stores them: leaves if there is a ``layout``, else records.

        A sample that has changed since it was written is left out. If ``rows`` are half of the block or more, it is read at
        once.

        Returns:
            None if the samples must be made: they are not rows of ``layout``, or pickles.

        Raises:
            DamagedError, StorageError: the block cannot be read, or none of its samples can be made here.
        """
        if any("'pickle'" in text for text in self.treedefs) or not (layout is None or self._layout.are_of(layout)):
            return None
        if 2 * len(rows) >= self.samples:
            pieces = dict(enumerate(self._pieces(range(self.samples), writable=True)))
        else:
            pieces = {row: self._read(row, row + 1, writable=True) for row in rows}
        sound = [row for row in rows if xxhash.xxh3_64_intdigest(pieces[row]) == self._checks[row]]
        if sound:
            self._make(sound[0], pieces[sound[0]], False)
        encode = self._layout.record if layout is None else layout.leaves_of
        try:
            return {row: encode(pieces[row]) for row in sound}
        except Exception as error:  # forged heads
            raise self._damaged(error) from error

    def verify(self) -> None:
        """Read the whole block and check every sample, without building it.

        Raises:
            DamagedError: a sample has changed since it was written.
        """
        self._source.prefetch()
        for row in range(self.samples):
            self._check(row, self._read(row, row + 1))

    def _read(self, first: int, last: int, writable: bool = False) -> Any:
        """Return the bytes of the samples from ``first`` up to ``last``, read at once. Raises DamagedError."""
        begin = self._bounds[first]
        nbytes = self._bounds[last] - begin
        try:
            buffer, at = self._source.read(self._begin + begin, nbytes, writable)
        except (ValueError, OSError) as error:
            raise self._damaged(error) from error
        return buffer if type(buffer) is bytes and len(buffer) == nbytes else memoryview(buffer)[at : at + nbytes]

    def _pieces(self, rows: range, writable: bool = False) -> list[Any]:
        """Return the bytes of samples that follow each other, which are read at once. Raises DamagedError."""
        data, bounds = self._read(rows.start, rows.stop, writable), self._bounds[rows.start : rows.stop + 1]
        begin = bounds[0]
        return [data[one - begin : other - begin] for one, other in pairwise(bounds)]

    def _check(self, row: int, memory: Any) -> None:
        """Raise DamagedError if a sample has changed since it was written."""
        if xxhash.xxh3_64_intdigest(memory) != self._checks[row]:
            found = xxhash.xxh3_64_hexdigest(memory)
            raise self._damaged(f"sample {row} in it has the checksum {found}, not {self._checks[row]:016x}")

    def _make(self, row: int, memory: Any, copy: bool | None) -> Any:
        """Return a sample after checking its bytes. ``copy``: as for `RecordReader.read`."""
        self._check(row, memory)
        try:
            return self._layout.make(memory, copy)
        except Unresolved as error:
            raise StorageError(f"{self._name}: {error}") from None
        except Exception as error:  # whatever a class raises for parts it does not expect
            raise self._damaged(error) from error

    def _damaged(self, error: object) -> DamagedError:
        return DamagedError(f"{self._name} is damaged ({error}). {LIST_DAMAGE}")
