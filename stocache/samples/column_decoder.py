"""Read samples back from the columns of a block; see NOTE [ Columns ].

A structure is compiled once per block into functions ``read(walk, row)``, one for each node. A block may be damaged or forged:
then they raise an error. They never run code that it names, nor take more memory than its bytes fill.
"""

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from stocache.samples.column_encoder import Tree, bare_nodes
from stocache.samples.containers import container_of, keys_from_json
from stocache.samples.leaves.kinds import kind_in
from stocache.samples.leaves.layout import BARE_NODES, Make
from stocache.samples.leaves.plain_kinds import sequence_class
from stocache.samples.leaves.type_lookup import check_dims, check_shape
from stocache.samples.pytree import DEEP


class Walk:
    """One walk through the tree: it reads and hashes the bytes of one sample, and limits its size.

    Args:
        source: the file, as `files.ByteSource`.
        ahead: True to ask for the bytes to be read ahead, and to read nothing.

    Attributes:
        hash: what it has met.
    """

    __slots__ = ("_ahead", "_bytes", "_nodes", "_source", "hash")

    def __init__(self, source: Any, ahead: bool = False) -> None:
        self._source, self._ahead, self.hash = source, ahead, xxhash.xxh3_64()
        # What the sample may still use. Twice the nodes that a writer leaves room for: earlier writers left no room
        self._bytes, self._nodes = source.nbytes, BARE_NODES + 2 * source.nbytes

    def take(self, at: int, nbytes: int, writable: bool) -> tuple[Any, int]:
        """Return a buffer that holds ``nbytes`` of the file from ``at``, and where in it they begin; hash them.

        ``writable``: whether the buffer is the caller's own, to write to.
        """
        self._bytes -= nbytes
        if self._bytes < 0:
            raise ValueError("a sample has more bytes than its file")
        if self._ahead:
            self._source.prefetch(at, nbytes)
            return b"", 0
        buffer, begin = self._source.read(at, nbytes, writable)
        self.hash.update(buffer if len(buffer) == nbytes else memoryview(buffer)[begin : begin + nbytes])
        return buffer, begin

    def note(self, *sizes: int) -> None:
        """Hash sizes."""
        self.hash.update(struct.pack(f"<{len(sizes)}q", *sizes))

    def make(self, nodes: int) -> None:
        """Count nodes that will be made. Raises ValueError where they are more than the size of the file allows."""
        self._nodes -= nodes
        if self._nodes < 0:
            raise ValueError("a list has more items than its file has bytes for")


class ColumnTable(Protocol):
    """The columns of a block."""

    def span(self, name: str) -> tuple[int, int]:
        """Return where a column begins, and how many bytes it has."""

    def integers(self, name: str) -> Any:
        """Return a column of int64, whole."""

    def union(self, name: str, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the kinds of a union's values, and which row of its kind each is. Raises ValueError as `union_rows`."""


Read: TypeAlias = Callable[[Walk, int], Any]

_LEVELS = 4 * DEEP  # the most of a tree, in which a list may be a union of lists


def reader(tree: Tree, table: ColumnTable, *, allow_pickle: bool = False, decode: bool = True) -> Read:
    """Return the function that reads a row of a structure.

    Args:
        allow_pickle: True to load pickles, and to import the modules of classes.
        decode: False to make no values and look up no classes: the walk meets the bytes, and that is all. For checksums.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError: it is not a structure.
        Unresolved: it names classes that are not here or may not be used; or it has pickles, which are not allowed.
    """
    return _Compiler(table, allow_pickle, decode).reader(tree, 0)


def value_columns(tree: Tree) -> Iterator[str]:
    """Yield the names of the columns of a structure that hold values. Raises KeyError, TypeError: it is not a structure."""
    if tree is not None:
        children = [tree["items"]] if "items" in tree else tree.get("children", ())
        for child in children:
            yield from value_columns(child)
        if "column" in tree:
            yield tree["column"]


def union_rows(kinds: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return for each value of a union of ``count`` kinds which row of its kind it is.

    Raises:
        ValueError: a kind is not one of them.
    """
    if kinds.size and not 0 <= kinds.min() <= kinds.max() < count:
        raise ValueError("a kind is not one of its union")
    rows, order = np.zeros_like(kinds), np.argsort(kinds, kind="stable")  # one pass, however many kinds it claims
    counts = np.bincount(kinds, minlength=1)
    rows[order] = np.arange(len(kinds)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows


class _Compiler:
    """Compiles the nodes of one structure; arguments as for `reader`."""

    def __init__(self, table: ColumnTable, trusted: bool, decode: bool) -> None:
        self._table, self._trusted, self._decode, self._used = table, trusted, decode, set[Any]()

    def _once(self, name: object) -> str:
        """Return the name of a column, which no other leaf has: else samples would have more bytes than the table."""
        if type(name) is not str or name in self._used:
            raise ValueError(f"the column {name!r:.80} belongs to two leaves, or is not a name")
        self._used.add(name)
        return name

    def _integers(self, name: object) -> Any:
        return self._table.integers(self._once(name))

    def reader(self, tree: Any, level: int) -> Read:
        """Return the function that reads one node."""
        if tree is None:
            return _nothing
        if level > _LEVELS:
            raise ValueError(f"its structure has more than {_LEVELS} levels")
        kind = tree["kind"]
        if kind == "in":
            return self._container(tree, level + 1)
        if kind == "union":
            return self._union(tree, level + 1)
        if kind in ("list", "tuple"):
            return self._items(tree, level + 1)
        return self._leaf(tree)

    def _container(self, tree: Any, level: int) -> Read:
        join: Callable[[list[Any]], Any] = list
        if self._decode:
            keys = keys_from_json(tree["keys"], self._trusted)
            name, parts = tree["container"], len(tree["children"])
            join = container_of(name, tree["class"], keys, tree["extra"], parts, self._trusted).unflatten_fn()
        reads = [self.reader(child, level) for child in tree["children"]]
        return lambda walk, row: join([read(walk, row) for read in reads])

    def _union(self, tree: Any, level: int) -> Read:
        name = self._once(tree["kinds"])
        reads = [self.reader(child, level) for child in tree["children"]]
        kinds, rows = self._table.union(name, len(reads))

        def read(walk: Walk, row: int) -> Any:
            kind = int(kinds[row])
            walk.note(kind)
            return reads[kind](walk, int(rows[row]))

        return read

    def _items(self, tree: Any, level: int) -> Read:
        cls = sequence_class(tree["kind"])
        offsets, read_item = self._integers(tree["offsets"]), self.reader(tree["items"], level)
        each = max(1, bare_nodes(tree["items"]))

        def read(walk: Walk, row: int) -> Any:
            begin, end = offsets[row], offsets[row + 1]
            if not 0 <= begin <= end:
                raise ValueError("the items of a list end before they begin")
            walk.note(end - begin)
            walk.make((end - begin) * each)
            return cls([read_item(walk, item) for item in range(begin, end)])

        return read

    def _leaf(self, tree: Any) -> Read:
        kind = kind_in(tree)
        size, writable = kind.itemsize, kind.writable and self._decode
        make: Make = kind.maker(self._trusted) if self._decode else _make_nothing
        begin, nbytes = self._table.span(self._once(tree["column"]))
        if "shape" in tree:
            shape = check_shape(tree["shape"])
            count = math.prod(shape)
            width = count * size
            if width > nbytes:
                raise ValueError(f"the column {tree['column']!r} is too small for values of shape {shape}")

            def read(walk: Walk, row: int) -> Any:
                if (row + 1) * width > nbytes:
                    raise ValueError("a column is too short")
                buffer, at = walk.take(begin + row * width, width, writable)
                return make(buffer, at, count, shape)

            return read

        dims = check_dims(tree["dims"])
        if not dims:
            raise ValueError("a value of no dimensions cannot vary in shape")
        offsets, shapes = self._integers(tree["offsets"]), self._integers(tree["shapes"]) if dims > 1 else None

        def read_varying(walk: Walk, row: int) -> Any:
            first, last = offsets[row], offsets[row + 1]
            shape = (last - first,) if shapes is None else tuple(shapes[row * dims : (row + 1) * dims])
            count = math.prod(shape)
            if not 0 <= first <= last or last * size > nbytes or count != last - first or min(shape) < 0:
                raise ValueError("a value reaches beyond its column, or its shape does not fit its offsets")
            walk.note(*shape)
            buffer, at = walk.take(begin + first * size, count * size, writable)
            return make(buffer, at, count, shape)

        return read_varying


def _nothing(walk: Walk, row: int) -> Any:
    raise ValueError("it has a row in an empty column")


def _make_nothing(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> None:
    """Return nothing: the walk has met the bytes."""
