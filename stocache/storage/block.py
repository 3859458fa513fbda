"""Encode samples as one file, a block, and read single samples from it; checksums cover every byte.

NOTE [ Blocks ]
    A block is a safetensors file: eight bytes with the length of the header, the header, the columns (see NOTE [ Columns ]) and
    one more column, ":checks", with the checksum of each sample. ``__metadata__`` has one entry, "stocache", a JSON object:

        checksum    16 hexadecimal digits: the XXH3-64 of the file up to the end of the header, with zeros in place of these
                    digits, followed by the column ":checks"
        version     1
        samples     number of samples
        structure   the tree of the columns

    So the checksum of a block covers the header and the checksums of the samples. These cover the rest. Reading one sample
    finds damage in it; there is no need to read the whole block.

    Blocks are read by pread, not through a mapping. Another process may truncate the file, and the disk may fail: pread then
    raises an error, where a mapping ends the process by SIGBUS. From a cold disk a mapping reads what lies around each page,
    or, with MADV_RANDOM, one page after the other; the parts of a batch of samples are requested together
    (POSIX_FADV_WILLNEED), which is several times as fast. A warm read takes a microsecond more.
"""

import contextlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import DamagedError, StorageError
from stocache.samples.column_decoder import Read, Walk, reader, union_rows, value_columns
from stocache.samples.column_encoder import CHECKS_COLUMN, Columns, Tree, bytes_of_rows
from stocache.samples.leaves.type_lookup import Unresolved, check_size
from stocache.storage.copying import NotCopied, RowGroup, RowTable, row_groups
from stocache.storage.files import HEAD_BYTES, BytesFile, ByteSource
from stocache.system.hashing import ZEROS, BytesLike, embed_checksum, read_checksum

BLOCK_VERSION = 1
PREPARE_AGAIN = "Prepare the folder again: 'stocache prepare SRC DIR --again', or prepare(..., again=True)."
"""The remedy for damage of any file."""
LIST_DAMAGE = f"'stocache check DIR' lists all damage. {PREPARE_AGAIN}"
"""The end of messages about a damaged block."""

_DTYPES = {  # in the order in which safetensors writes the columns
    **{torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16"},
    **{torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"},
}
_MARK = b'\\"checksum\\": \\"'
_SMALL = 4 << 10  # bytes of a sample, below which many are made at a time: larger ones are read into memory of their own
_TOGETHER = 32  # small samples, from which it takes less time to make them together (measured)


def encode(samples: Sequence[object], first: int = 0, allow_pickle: bool = False) -> tuple[list[BytesLike], str]:
    """Return the file of a block that holds ``samples``, in pieces, and its checksum.

    Args:
        samples: of any structures.
        first: the number of the first sample, for errors.
        allow_pickle: whether to pickle values of types that have no own encoding.

    Raises:
        SampleError: a sample cannot be stored, or would not come back the same.
    """
    columns = Columns(samples, first, allow_pickle)
    columns.tensors[CHECKS_COLUMN] = torch.zeros(len(samples), dtype=torch.int64, device="cpu")
    facts = {"checksum": ZEROS, "version": BLOCK_VERSION, "samples": len(samples), "structure": columns.tree}
    order = list(_DTYPES)
    tensors = dict(sorted(columns.tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])))
    head = _header(tensors, json.dumps(facts))
    pieces = {name: tensor.reshape(-1).view(torch.uint8).numpy().data for name, tensor in tensors.items()}
    block = Block(BytesFile(head, *pieces.values()), "a new block", decode=False, verify=False)
    rows = bytes_of_rows(columns.tree, pieces, len(samples))
    checks = list(map(_digest, zip(*rows, strict=True))) if rows else [block.check(row) for row in range(len(samples))]
    pieces[CHECKS_COLUMN] = memoryview(np.array(checks, dtype="<u8").tobytes())
    head = embed_checksum(head, _MARK, pieces[CHECKS_COLUMN])
    return [head, *pieces.values()], read_checksum(head, _MARK, pieces[CHECKS_COLUMN])


def _digest(parts: Iterable[BytesLike]) -> int:
    """Return the checksum of a sample, as `Block.check` does, from all bytes that a walk meets."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _header(tensors: dict[str, Tensor], facts: str) -> bytes:
    """Return the beginning of a file of these columns, as safetensors writes it.

    Not by safetensors, which copies the columns: the file has them as they are.
    """
    header: dict[str, Any] = {"__metadata__": {"stocache": facts}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Block:
    """An open block.

    Attributes:
        samples: number of samples.
        checksum: checksum of the block, as in the index of a storage.
        structure: the tree of its columns.
        begin: offset of the columns in the file.
        nbytes: bytes of the file.

    Args:
        source: the file.
        name: its name in errors.
        allow_pickle: whether to load pickled values. Loading runs the code that a pickle names.
        decode: False to check samples only, never to build them; no pickle is loaded then.
        verify: False while the file has no checksums yet.

    Raises:
        DamagedError: the file is not a block, or not as it was written.
        StorageError: it cannot be read here: it has another version, needs classes that are missing, or pickles that are not
            allowed.
    """

    def __init__(
        self, source: ByteSource, name: str, allow_pickle: bool = False, *, decode: bool = True, verify: bool = True
    ) -> None:
        self._source, self._name, self._reads = source, name, 0
        self._integers: dict[str, memoryview] = {}
        self._unions: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._ascending = set[str]()
        self.nbytes = source.nbytes
        try:
            facts = self._open(verify)
            self.samples, self.structure = check_size(facts["samples"]), facts["structure"]
            self._most_reads = 1 + self.samples // 4  # then the rest is read ahead: a smaller part costs less by itself
            if len(self._checks) != self.samples:
                raise ValueError(f"it claims {self.samples} samples, and has checksums of {len(self._checks)}")
            if decode:
                self._check = self._read = reader(self.structure, self, allow_pickle=allow_pickle)
            # Pickles are checked before they are loaded; however the JSON of the file is written, this finds them
            if not decode or (allow_pickle and '"kind": "pickle"' in json.dumps(self.structure)):
                self._check = reader(self.structure, self, decode=False)
        except Unresolved as error:
            raise StorageError(f"{name}: {error}") from None
        except StorageError as error:
            raise type(error)(f"{name}: {error}") from None
        except Exception as error:  # forged bytes may lead numpy, torch and classes to raise anything
            raise self._damaged(error) from error

    def _open(self, verify: bool) -> Any:
        """Read and check the header; return the facts in its metadata."""
        source = self._source
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > source.nbytes - 8:
            raise ValueError(f"its header claims {length} bytes, the file has {source.nbytes}")
        self.begin = 8 + length
        try:
            header = json.loads(self._bytes(8, length))
            text = header.pop("__metadata__")["stocache"]
            facts = json.loads(text)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError("its header is not one of a block") from error
        if facts["version"] != BLOCK_VERSION:
            raise StorageError(
                f"it has version {facts['version']!r:.20}; this stocache reads version {BLOCK_VERSION}. Update stocache."
            )
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for first, last, column in sorted((*map(check_size, entry["data_offsets"]), name) for name, entry in header.items()):
            if first != end or last < first:
                raise ValueError(f"its column {column!r:.80} does not begin where the one before it ends")
            self._spans[column] = self.begin + first, last - first
            end = last
        if self.begin + end != source.nbytes:
            raise ValueError(f"its columns end at {self.begin + end}, the file has {source.nbytes} bytes")
        checks = self._column(CHECKS_COLUMN)
        self._checks = checks.cast("Q")
        if verify:
            self.checksum = read_checksum(self._bytes(0, self.begin), _MARK, checks)
        return facts

    def _bytes(self, at: int, nbytes: int) -> bytes:
        buffer, begin = self._source.read(at, nbytes, writable=False)
        return bytes(memoryview(buffer)[begin : begin + nbytes])

    def _column(self, name: str) -> memoryview:
        return memoryview(self._bytes(*self.span(name)))

    def span(self, name: str) -> tuple[int, int]:
        """Return the offset of a column in the file, and its bytes."""
        return self._spans[name]

    def integers(self, name: str) -> memoryview:
        """Return a whole column of int64, which is read once."""
        if name not in self._integers:
            self._integers[name] = self._column(name).cast("q")
        return self._integers[name]

    def union(self, name: str, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `ColumnTable`."""
        if name not in self._unions:
            kinds = np.asarray(self.integers(name), np.int64)
            self._unions[name] = kinds, union_rows(kinds, count)
        return self._unions[name]

    @property
    def value_bytes(self) -> int:
        """Bytes of the columns that hold values: the others hold checksums, offsets, shapes and kinds."""
        return sum(self.span(column)[1] for column in value_columns(self.structure))

    def close(self) -> None:
        """Close the file until a sample is read again. Columns that were read with its header stay in memory."""
        self._source.close(self._head_bytes)

    @cached_property
    def _head_bytes(self) -> int:
        ends = [at + nbytes for at, nbytes in self._spans.values()]
        return max((end for end in ends if end <= HEAD_BYTES), default=0)

    def prefetch(self, row: int) -> None:
        """Ask for the bytes of a sample to be read ahead, unless the whole block was asked for.

        Raises:
            DamagedError: the block is damaged.
        """
        if self._reads < self._most_reads:
            try:
                self._request(Walk(self._source, ahead=True), row)
            except Exception as error:  # as in __init__
                raise self._damaged(error) from error

    @cached_property
    def _request(self) -> Read:
        return reader(self.structure, self, decode=False)

    def sample(self, row: int) -> Any:
        """Return a sample; the caller may change it.

        Reads the bytes of this sample only. After many calls, it also asks the kernel to read the whole block ahead.

        Raises:
            DamagedError: the sample is not as it was written.
        """
        self._note_reads(1)
        return self._sample(row)

    def _note_reads(self, count: int) -> None:
        before = self._reads
        self._reads += count
        if before < self._most_reads <= self._reads:  # reads in random order over many blocks close the block before that
            self._source.prefetch()

    def all(self) -> list[Any]:
        """Return all samples; the caller may change them.

        Raises:
            DamagedError: a sample is not as it was written.
        """
        self._source.prefetch()
        return self._made(range(self.samples))

    def some(self, rows: range) -> list[Any]:
        """Return samples that follow each other; the caller may change them. Small ones are read together.

        Raises:
            DamagedError: a sample is not as it was written.
        """
        if len(rows) >= self._together:
            self._note_reads(len(rows))
            return self._made(rows)
        for row in rows:
            self.prefetch(row)
        return list(map(self.sample, rows))

    @cached_property
    def _together(self) -> float:
        """From how many samples on they are made together; those of different kinds in a union are not."""
        unions = json.dumps(self.structure).count('"kind": "union"')
        return _TOGETHER << unions if self.value_bytes < _SMALL * self.samples else math.inf

    def _made(self, rows: range) -> list[Any]:
        made: dict[int, Any] = {}
        if len(rows) >= self._together:
            with contextlib.suppress(Exception):  # found again, and raised, when the sample is made by itself
                for group in self._groups(np.arange(rows.start, rows.stop))[1]:
                    group.compare(self._checks)
                    made.update(group.samples())
        if len(made) < len(rows):
            made |= {row: self._sample(row) for row in rows if row not in made}
        return list(map(made.__getitem__, rows))

    def encoded(self, rows: Sequence[int], tree: Tree = None) -> dict[int, Any] | None:
        """Return the bytes of samples by row, without making the samples: for a slot if there is a ``tree``, else as records.

        For a slot there is a buffer for each tensor, array and number. A sample that is not as it was written is left out. If
        ``rows`` are half of the block or more, the file is read at once.

        Returns:
            None if the samples must be made, see NOTE [ Copying rows ]; or do not all have the structure ``tree``.

        Raises:
            Exception: the block cannot be read.
        """
        if tree not in (None, self.structure):
            return None
        with contextlib.suppress(NotCopied):
            source, groups = self._groups(np.unique(rows))
            found: dict[int, Any] = {}
            for group in groups:
                group.check(self._checks, lambda row: self._read(Walk(source), row))
                found.update(group.buffers() if tree else group.records())
            return found
        return None

    def _groups(self, rows: NDArray[np.int64]) -> tuple[ByteSource, Iterator[RowGroup]]:
        """Return where rows are read, the whole file in memory if they are half of it or more, and groups of them."""
        source, whole = self._source, None
        if 2 * len(rows) >= self.samples:
            whole, _ = source.read(0, source.nbytes, writable=False)
            source = BytesFile(whole)
        return source, row_groups(self.structure, RowTable(self, source.read, whole, self._ascending), rows)

    def check(self, row: int) -> int:
        """Compute the checksum of a sample from its bytes."""
        walk = Walk(self._source)
        self._check(walk, row)
        return walk.hash.intdigest()

    def verify(self) -> None:
        """Read the whole block and check every sample.

        Raises:
            DamagedError: a sample is not as it was written.
        """
        self._source.prefetch()
        for row in range(self.samples):
            self._checked(row)

    def _sample(self, row: int) -> Any:
        value = self._checked(row)
        return value if self._check is self._read else self._read(Walk(self._source), row)

    def _checked(self, row: int) -> Any:
        walk = Walk(self._source)
        try:
            value = self._check(walk, row)
            if walk.hash.intdigest() != self._checks[row]:
                raise ValueError(f"sample {row} in it has the checksum {walk.hash.hexdigest()}, not {self._checks[row]:016x}")
        except Exception as error:  # as in __init__
            raise self._damaged(error) from error
        return value

    def _damaged(self, error: Exception) -> DamagedError:
        return DamagedError(f"{self._name} is damaged ({error}). {LIST_DAMAGE}")
