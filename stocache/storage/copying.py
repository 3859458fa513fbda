"""Take the bytes of many samples out of the columns of a block, for a cache: the samples are not made.

NOTE [ Copying rows ]
    A block and a cache hold the same bytes of each leaf. A column has one leaf of all samples (NOTE [ Columns ]). A record has
    all leaves of one sample, by their alignment, and then their shapes (NOTE [ Records ]). A slot has them one by one. So the
    bytes are cut out of the columns, and put together in another order.

    Rows are taken thousands at a time: numpy computes their numbers, and no code of Python runs for a single row. So all rows
    of a *group* have the same treedef, and the same kind in each union. Lists of varying length have rows of their own, and are
    not copied, except lists of numbers, which are leaves. A list of fixed length becomes a container. Pickles are not copied,
    nor values that may be read only where names are trusted.

    A file may be damaged or forged. So all is checked that is checked when a sample is read (see column_decoder.py): the bounds
    of each value, the checksum of each sample, and that its classes are here and may be used. It remains to see that bytes make
    values, and values containers. Where that depends on the bytes, the value or the whole sample is made. Where it depends on
    types only, the first sample of each group is made.
"""

import contextlib
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from stocache.samples.column_decoder import ColumnTable, value_columns
from stocache.samples.column_encoder import Tree
from stocache.samples.containers import container_of, keys_from_json, keys_to_literals
from stocache.samples.leaves.kind import ALIGNMENTS, Kind
from stocache.samples.leaves.kinds import description_in, kind_in
from stocache.samples.leaves.type_lookup import check_dims, check_shape
from stocache.samples.pytree import DEEP
from stocache.samples.record_encoder import EncodedRecord, TreeDef, write_treedef

_AT_ONCE = 4096  # rows: other threads wait for that long
_CELLS = 1 << 20  # values that are cut at once: a structure may claim many leaves
_FEW = 2048  # bytes, up to which a copy costs less than a view (measured)
_GROUP = 16  # rows: samples of smaller groups are made in less time (measured)

_Integers = NDArray[np.int64]


class NotCopied(Exception):
    """Samples must be made: they vary in their structure."""


class _Mixed(Exception):
    """The rows of a group have several kinds in a union."""

    def __init__(self, kinds: _Integers) -> None:
        super().__init__()
        self.kinds = kinds


class RowTable:
    """The columns of a block in numpy's arrays.

    Args:
        table: the columns.
        read: reads the file, as `files.ByteSource.read`.
        whole: the file, if it has been read.
        ascending: the columns of offsets that are known to ascend.
    """

    def __init__(self, table: ColumnTable, read: Callable[..., tuple[Any, int]], whole: Any, ascending: set[str]) -> None:
        self._table, self._read, self._whole, self._ascending = table, read, whole, ascending
        self.span, self.union = table.span, table.union

    def integers(self, name: str) -> _Integers:
        """Return a column of int64."""
        return np.asarray(self._table.integers(name), np.int64)

    def offsets(self, name: str) -> _Integers:
        """Return a column of offsets. They ascend: so no bytes belong to two values, and all values are as large as the file.

        Raises:
            ValueError: they do not.
        """
        offsets = self.integers(name)
        if name not in self._ascending:
            if (offsets[1:] < offsets[:-1]).any() or offsets[0] < 0:
                raise ValueError("a value ends before it begins")
            self._ascending.add(name)
        return offsets

    def cut(self, begins: _Integers, nbytes: _Integers) -> list[Any]:
        """Return parts of the file. If they follow each other they are read at once."""
        ends, data, first = begins + nbytes, self._whole, 0
        following = (begins[1:] == ends[:-1]).all()
        if data is None and not following:
            places = zip(begins.tolist(), nbytes.tolist(), strict=True)
            found = [(self._read(begin, size, False), size) for begin, size in places]
            return [memoryview(buffer)[at : at + size] for (buffer, at), size in found]
        if data is None:
            data, at = self._read(int(begins[0]), int(ends[-1] - begins[0]), False)
            first = int(begins[0]) - at
        if nbytes.sum() > _FEW * len(nbytes):
            data = memoryview(data)
        elif following and type(data) is bytes:
            return _pieces(data, int(begins[0]) - first, nbytes.tolist())
        return list(map(data.__getitem__, map(slice, (begins - first).tolist(), (ends - first).tolist())))


def _pieces(data: Any, begin: int, sizes: Iterable[int]) -> list[bytes]:
    """Return bytes of some sizes that follow each other. (This takes a third of the time of slices.)"""
    stream = io.BytesIO(data)
    stream.seek(begin)
    return list(map(stream.read, sizes))


class _Leaf(NamedTuple):
    """The values of a leaf in the rows of a group.

    Attributes:
        kind: their kind.
        shapes: (rows, dimensions), as they lie in memory.
        nbytes: (rows,).
        pieces: their bytes, a buffer for each row.
        values: those that had to be made to see whether their bytes make a value.
    """

    kind: Kind
    shapes: _Integers
    nbytes: _Integers
    pieces: list[Any]
    values: list[Any]

    def make_all(self) -> list[Any]:
        """Return its values."""
        if self.values:
            return self.values
        if (values := self.kind.make_all(self.pieces)) is not None:
            return values
        make, writable = self.kind.maker(False), self.kind.writable
        counts = (self.nbytes // max(1, self.kind.itemsize)).tolist()
        return [
            make(bytearray(piece) if writable else piece, 0, count, shape)
            for piece, count, shape in zip(self.pieces, counts, _tuples(self.shapes), strict=True)
        ]


def _tuples(shapes: _Integers) -> Iterable[tuple[int, ...]]:
    """Return the rows as tuples. (Lists of a row each would have the garbage collector look at all of them.)"""
    return zip(*shapes.T.tolist(), strict=True) if shapes.shape[1] else itertools.repeat((), len(shapes))


class RowGroup:
    """Rows of a block whose samples have one structure.

    Attributes:
        rows: their numbers.
        sound: which of them are as they were written, and make samples.
    """

    def __init__(self, tree: Tree, table: RowTable, rows: _Integers) -> None:
        self.rows, self.sound = rows, np.ones(len(rows), bool)
        self._tree, self._table, self._leaves, self._any_values = tree, table, list[_Leaf](), True
        self._containers: list[Any] = []  # in the order in which `_take` meets them
        self._found: list[tuple[bytes | dict[str, Any], _Integers]] = []  # kinds in unions; leaves, and their rows
        self._treedef = self._take(tree, rows, 0)  # before anything is cut: it may raise
        self._met: list[Iterable[Any]] = [itertools.repeat(b"", len(rows))]  # the bytes that the checksums cover
        for kind_or_leaf, rows in self._found:
            if isinstance(kind_or_leaf, bytes):
                self._met.append(itertools.repeat(kind_or_leaf, len(rows)))
            else:
                self._cut(kind_or_leaf, rows)

    def _take(self, tree: Tree, rows: _Integers, depth: int) -> TreeDef:
        """Find the leaves in the rows of a node, and return their treedef."""
        if tree is None or tree["kind"] in ("list", "tuple"):
            raise NotCopied
        if tree["kind"] == "union":
            kinds, within = self._table.union(tree["kinds"], len(tree["children"]))
            kinds = kinds[rows]
            if (kinds != kinds[0]).any():
                raise _Mixed(kinds)
            self._found.append((kinds[0].tobytes(), rows))
            return self._take(tree["children"][kinds[0]], within[rows], depth)
        if tree["kind"] != "in":
            self._found.append((tree, rows))
            return description_in(tree)
        if depth == DEEP:
            raise NotCopied
        keys, parts = keys_from_json(tree["keys"], False), len(tree["children"])
        container = container_of(tree["container"], tree["class"], keys, tree["extra"], parts, False)
        self._any_values &= container.any_values
        self._containers.append(container)
        children = tuple(self._take(child, rows, depth + 1) for child in tree["children"])
        literals, coded = keys_to_literals(keys)
        return "in", tree["container"], tree["class"], literals, tuple(tree["extra"]), children, *coded

    def _cut(self, tree: dict[str, Any], rows: _Integers) -> None:
        """Add the rows of a leaf."""
        kind = kind_in(tree)
        begin, nbytes = self._table.span(tree["column"])
        if "shape" in tree:
            shape = check_shape(tree["shape"])
            width = math.prod(shape) * kind.itemsize
            if width and rows.max() >= nbytes // width:
                raise ValueError("a column is too short")
            begins, sizes = rows * width, np.full(len(rows), width)
            shapes = np.full((len(rows), len(shape)), shape, np.int64)
        else:
            begins, shapes, sizes = self._varying(tree, rows, nbytes, kind.itemsize)
            self._met.append(_pieces(shapes.tobytes(), 0, itertools.repeat(8 * shapes.shape[1], len(rows))))
        if shapes.shape[1] != kind.dims:
            raise ValueError(f"{tree['kind']!r:.50} does not have {shapes.shape[1]} dimensions")
        leaf = _Leaf(kind, shapes, sizes, self._table.cut(begin + begins, sizes), [])
        self._met.append(leaf.pieces)
        self._leaves.append(leaf)
        self._check(leaf)

    def _varying(
        self, tree: dict[str, Any], rows: _Integers, nbytes: int, itemsize: int
    ) -> tuple[_Integers, _Integers, _Integers]:
        """Return where the values of a leaf begin in its column of ``nbytes`` bytes; their shapes; and their bytes."""
        offsets, dims = self._table.offsets(tree["offsets"]), check_dims(tree["dims"])
        first, last = offsets[rows], offsets[rows + 1]
        if itemsize and last.max() > nbytes // itemsize:
            raise ValueError("a value reaches beyond its column")
        counts = last - first
        shapes = counts[:, None]
        if dims != 1:
            shapes = self._table.integers(tree["shapes"]).reshape(-1, dims)[rows]
            if shapes.min() < 0 or list(map(math.prod, shapes.tolist())) != counts.tolist():
                raise ValueError("a shape does not fit its offsets")
        return first * itemsize, shapes, counts * itemsize

    def _check(self, leaf: _Leaf) -> None:
        """Note the rows whose bytes do not make a value of a leaf: make those values of which that is not known."""
        make = leaf.kind.maker(False)
        if leaf.kind.of_any_bytes:
            for shape in () if leaf.nbytes.all() else set(_tuples(leaf.shapes[leaf.nbytes == 0])):
                make(b"", 0, math.prod(shape), shape)
            return
        with contextlib.suppress(Exception):
            leaf.values.extend(leaf.kind.make_all(leaf.pieces) or ())
        for row, (piece, shape) in () if leaf.values else enumerate(zip(leaf.pieces, _tuples(leaf.shapes), strict=True)):
            value = None
            try:
                value = make(piece, 0, len(piece), shape)
            except Exception:  # as in `block.Block`
                self.sound[row] = False
            leaf.values.append(value)

    def check(self, checks: object, make: Callable[[int], object]) -> None:
        """Note the rows whose bytes are not as they were written, or do not make a sample.

        Args:
            checks: the checksums of all samples of the block.
            make: makes the sample of a row.
        """
        self.compare(checks)
        for position in np.flatnonzero(self.sound).tolist():
            try:
                make(int(self.rows[position]))
                if self._any_values:
                    break
            except Exception:  # as in `block.Block`
                self.sound[position] = False

    def compare(self, checks: object) -> None:
        """Note the rows whose bytes are not as they were written. ``checks``: the checksums of all samples of the block."""
        digests = np.fromiter(map(xxhash.xxh3_64_intdigest, map(b"".join, zip(*self._met, strict=True))), np.uint64)
        self.sound &= digests == np.asarray(checks)[self.rows]

    def samples(self) -> Iterator[tuple[int, Any]]:
        """Yield the numbers of sound rows, each with its sample. Raises what a class raises that refuses its parts."""
        kinds = iter([int.from_bytes(found, "little") for found, _ in self._found if isinstance(found, bytes)])
        return self._sound(self._join(self._tree, kinds, iter(self._containers), iter(self._leaves)))

    def _join(self, tree: Any, kinds: Iterator[int], containers: Iterator[Any], leaves: Iterator[_Leaf]) -> Iterable[Any]:
        """Return the values of a node, of all rows."""
        if tree["kind"] == "union":
            return self._join(tree["children"][next(kinds)], kinds, containers, leaves)
        if tree["kind"] != "in":
            return next(leaves).make_all()
        make = next(containers).unflatten_fn()
        parts = [self._join(child, kinds, containers, leaves) for child in tree["children"]]
        rows = zip(*parts, strict=True) if parts else [() for _ in self.rows]
        return rows if make is tuple else map(make, map(list, rows))

    def _sound(self, encoded: Iterable[object]) -> Iterator[tuple[int, Any]]:
        """Yield the numbers of sound rows, each with its item of ``encoded``."""
        return itertools.compress(zip(self.rows.tolist(), encoded, strict=True), self.sound.tolist())

    def buffers(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the numbers of sound rows, each with a buffer for each tensor, array and number, as a slot has them."""
        columns: list[list[Any]] = []
        for leaf in self._leaves:
            step = leaf.kind.itemsize
            if leaf.kind.name == "numbers":
                columns += ([piece[at : at + step] for piece in leaf.pieces] for at in range(0, int(leaf.nbytes[0]), step))
            else:
                columns.append(leaf.pieces)
        return self._sound(map(list, zip(*columns, strict=True)) if columns else [[]] * len(self.rows))

    def records(self) -> Iterator[tuple[int, EncodedRecord]]:
        """Yield the numbers of sound rows, each with its record. Raises SampleError as `write_treedef`."""
        count, text = len(self.rows), write_treedef(self._treedef)
        none = np.empty((count, 0), np.int64)
        streams = [[leaf for leaf in self._leaves if leaf.kind.stream == stream] for stream in range(len(ALIGNMENTS))]
        lengths = [np.column_stack([leaf.nbytes for leaf in leaves]).sum(1) for leaves in streams if leaves]
        integers = np.column_stack([none, *lengths[:-1], *(leaf.shapes for leaf in self._leaves)])
        nbytes: _Integers = np.column_stack([none, *lengths]).sum(1)
        packed, tails = _pack_integers(integers, nbytes)
        pieces = zip(*(leaf.pieces for leaves in streams for leaf in leaves), strict=True) if self._leaves else [()] * count
        records = zip(itertools.repeat(text, count), pieces, nbytes.tolist(), packed.tolist(), tails, strict=True)
        return self._sound(itertools.starmap(EncodedRecord, records))


def _pack_integers(integers: _Integers, nbytes: _Integers) -> tuple[_Integers, list[bytes]]:
    """Return the result of `record_encoder.pack_integers` for each row, with zeros up to a multiple of 8 bytes of the record.

    ``nbytes``: the bytes of the leaves.
    """
    count = integers.shape[1]
    codes = np.searchsorted([1 << 8, 1 << 16, 1 << 32], integers.max(axis=1, initial=0), side="right")
    sizes = count << codes
    tails = np.zeros((len(integers), 8 * count + 7), np.uint8)
    for code in np.unique(codes).tolist():
        tails[codes == code, : count << code] = integers[codes == code].astype(f"<u{1 << code}").view(np.uint8)
    sizes += -(nbytes + sizes) & 7
    begins, data = range(0, tails.size, tails.shape[1]), tails.tobytes()
    return count << 3 | codes, [data[begin : begin + size] for begin, size in zip(begins, sizes.tolist(), strict=True)]


def row_groups(tree: Tree, table: RowTable, rows: _Integers) -> Iterator[RowGroup]:
    """Yield rows in groups.

    Raises:
        NotCopied: see there. There may be groups before it.
        Unresolved, ValueError, LookupError, TypeError: the block cannot be read.
    """
    columns = sum(1 for _ in value_columns(tree))
    step = max(1, min(_AT_ONCE, _CELLS // max(1, columns)))
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        for number, group in enumerate(_split(tree, table, part)):
            if number * _GROUP > len(part) + 4 * _GROUP:
                raise NotCopied
            yield group


def _split(tree: Tree, table: RowTable, rows: _Integers) -> Iterator[RowGroup]:
    try:
        yield RowGroup(tree, table, rows)
    except _Mixed as mixed:
        for kind in np.unique(mixed.kinds):
            yield from _split(tree, table, rows[mixed.kinds == kind])
