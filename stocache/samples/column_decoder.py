"""Samples put together again from the columns of a block; see NOTE [ Columns ].

A structure is compiled once per block into functions ``read(walk, row)``, one for each node. What they read may be damaged or
forged: whatever they find, they raise, and neither run code of it nor take memory that its bytes do not fill.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.errors import StorageError
from stocache.samples.column_encoder import Tree, bare_columns
from stocache.samples.kinds import FROM_BYTES
from stocache.samples.pytree import DEEP, Container
from stocache.samples.record_encoder import NUMBER_TYPES, NUMBERS, dtype_from_key, empty_array, read_extra
from stocache.samples.spec import NUMBER_CODECS, inverse
from stocache.samples.type_lookup import check_class, check_dims, check_shape, enum_class, member_of, resolve, torch_dtype


class Walk(Protocol):
    """One walk through the tree: where the bytes come from, and what has been met."""

    def take(self, at: int, nbytes: int, own: bool) -> tuple[Any, int]:
        """Return a buffer that holds ``nbytes`` of the file from ``at``, and where in it they begin; note them as met.

        ``own``: it is to be the caller's, to write to.
        """

    def note(self, *sizes: int) -> None:
        """Note sizes as met."""

    def make(self, nodes: int) -> None:
        """Count nodes that are about to be made. Raises ValueError where they are more than the file accounts for."""


class ColumnTable(Protocol):
    """The columns of a block."""

    def span(self, name: str) -> tuple[int, int]:
        """Return where a column begins, and its bytes."""

    def integers(self, name: str) -> Any:
        """Return a column of int64, whole."""


_Loads: TypeAlias = Callable[[Any], Any] | None
CHECK_ONLY = bytes
"""As what reads pickles: make nothing at all, neither of them nor of all else. For checking."""

Read: TypeAlias = Callable[[Walk, int], Any]
_Make: TypeAlias = Callable[[Any, int, int, tuple[int, ...]], Any]  # of a buffer, where in it, how many values, and their shape


_LEVELS = 4 * DEEP  # of a tree, in which a list may be a union of lists


class _Once:
    """A table each of whose columns is asked for once, so that what is made of it has no more bytes than it."""

    def __init__(self, table: ColumnTable) -> None:
        self._table, self._used = table, set[str]()

    def _use(self, name: Any) -> str:
        if type(name) is not str or name in self._used:
            raise ValueError(f"the column {name!r:.80} is of two leaves, or not a name")
        self._used.add(name)
        return name

    def span(self, name: str) -> tuple[int, int]:
        return self._table.span(self._use(name))

    def integers(self, name: str) -> Any:
        return self._table.integers(self._use(name))


def reader(tree: Tree, table: ColumnTable, loads: _Loads) -> Read:
    """Return the function that reads what a structure describes; ``loads`` reads pickles, where they are allowed.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError: it describes nothing.
        Unresolved: it names classes that are not here, or may not be used so.
        StorageError: it has pickles, which are not allowed.
    """
    return _reader(tree, _Once(table), loads, 0)


def _reader(tree: Any, table: ColumnTable, loads: _Loads, level: int) -> Read:
    if tree is None:
        return _nothing
    if level > _LEVELS:
        raise ValueError(f"its structure has more than {_LEVELS} levels")
    kind = tree["kind"]
    if kind == "in":
        return _read_container(tree, table, loads, level + 1)
    if kind == "union":
        return _read_union(tree, table, loads, level + 1)
    if kind in ("list", "tuple"):
        return _read_items(tree, table, loads, level + 1)
    if kind == "pickle" and loads is None:
        raise StorageError("its samples are partly pickled. To run what the pickles say, pass allow_pickle=True.")
    size, make = _maker(kind, tree, loads)
    if loads is CHECK_ONLY:
        return _read_leaf(tree, table, size, False, _make_nothing)
    return _read_leaf(tree, table, size, kind in ("tensor", "array"), make)


def _nothing(walk: Walk, row: int) -> Any:
    raise ValueError("it has a row in a column of none")


def _read_container(tree: Any, table: ColumnTable, loads: _Loads, level: int) -> Read:
    join = list if loads is CHECK_ONLY else _container(tree, loads).unflatten_fn()
    reads = [_reader(child, table, loads, level) for child in tree["children"]]
    return lambda walk, row: join([read(walk, row) for read in reads])


def _read_union(tree: Any, table: ColumnTable, loads: _Loads, level: int) -> Read:
    kinds = np.array(table.integers(tree["kinds"]), dtype=np.int64)
    reads = [_reader(child, table, loads, level) for child in tree["children"]]
    if kinds.size and not 0 <= kinds.min() <= kinds.max() < len(reads):
        raise ValueError("a kind is not one of its union")
    rows, order = np.zeros_like(kinds), np.argsort(kinds, kind="stable")  # one pass, however many kinds it claims to have
    counts = np.bincount(kinds, minlength=1)
    rows[order] = np.arange(len(kinds)) - np.repeat(np.cumsum(counts) - counts, counts)

    def read(walk: Walk, row: int) -> Any:
        kind = int(kinds[row])
        walk.note(kind)
        return reads[kind](walk, int(rows[row]))

    return read


def _read_items(tree: Any, table: ColumnTable, loads: _Loads, level: int) -> Read:
    cls = list if tree["kind"] == "list" else tuple
    offsets, read_item = table.integers(tree["offsets"]), _reader(tree["items"], table, loads, level)
    each = max(1, bare_columns(tree["items"]))

    def read(walk: Walk, row: int) -> Any:
        begin, end = offsets[row], offsets[row + 1]
        if not 0 <= begin <= end:
            raise ValueError("the items of a list end before they begin")
        walk.note(end - begin)
        walk.make((end - begin) * each)
        return cls([read_item(walk, item) for item in range(begin, end)])

    return read


def _read_leaf(tree: Any, table: ColumnTable, size: int, own: bool, make: _Make) -> Read:
    """``own``: what is made keeps the bytes, and its owner may write to them."""
    begin, nbytes = table.span(tree["column"])
    if "shape" in tree:
        shape = check_shape(tree["shape"])
        count = math.prod(shape)
        width = count * size
        if width > nbytes:
            raise ValueError(f"the column {tree['column']!r} is too small for values of shape {shape}")

        def read(walk: Walk, row: int) -> Any:
            if (row + 1) * width > nbytes:
                raise ValueError("a column is too short")
            buffer, at = walk.take(begin + row * width, width, own)
            return make(buffer, at, count, shape)

        return read

    dims = check_dims(tree["dims"])
    if not dims:
        raise ValueError("a value of no dimensions cannot vary in shape")
    offsets, shapes = table.integers(tree["offsets"]), table.integers(tree["shapes"]) if dims > 1 else None

    def read_varying(walk: Walk, row: int) -> Any:
        first, last = offsets[row], offsets[row + 1]
        shape = (last - first,) if shapes is None else tuple(shapes[row * dims : (row + 1) * dims])
        count = math.prod(shape)
        if not 0 <= first <= last or last * size > nbytes or count != last - first or min(shape) < 0:
            raise ValueError("a value reaches beyond its column, or does not have the shape it should")
        walk.note(*shape)
        buffer, at = walk.take(begin + first * size, count * size, own)
        return make(buffer, at, count, shape)

    return read_varying


# ---------------------------------------------------------------------------------------------------- leaves


def _maker(kind: str, tree: Any, loads: _Loads) -> tuple[int, _Make]:
    """Return the bytes of one value of a leaf, and what makes the leaf of bytes, which it may keep as they are."""
    if kind == "tensor":
        dtype = torch_dtype(tree["dtype"])
        return dtype.itemsize, _ordered(_tensor(dtype), tree)
    if kind in ("array", "scalar"):
        if kind == "scalar" and tree.get("shape") != []:
            raise ValueError("a scalar has no dimensions")
        size, make = _array(dtype_from_key(tree["dtype"]), kind == "scalar")
        return size, _ordered(make, tree)
    if kind == "number":
        return _number(NUMBER_TYPES[tree["type"]])
    if kind == "numbers":
        return _numbers(NUMBER_TYPES[tree["type"]], list if tree["class"] == "list" else tuple)
    if kind == "enum":
        cls = None if loads is CHECK_ONLY else enum_class(tree["class"], loads is not None)
        return 1, _bytes_to(lambda data: member_of(cls, str(data, "utf-8")))
    return 1, _bytes_to(loads if kind == "pickle" and loads is not None else FROM_BYTES[kind])


def _make_nothing(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> None:
    """Make nothing: the bytes have been met, and that is all."""


def _ordered(make: _Make, tree: Any) -> _Make:
    """Return what makes a tensor or array with its dimensions in the order that a tree says, if any."""
    if "order" not in tree:
        return make
    back = inverse(tree["order"], int(tree["dims"]) if "dims" in tree else len(tree["shape"]))

    def made(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Any:
        value = make(buffer, at, count, shape)
        return value.permute(back) if isinstance(value, Tensor) else value.transpose(back)

    return made


def _tensor(dtype: torch.dtype) -> _Make:
    def make(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Tensor:
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shape)

    return make


def _array(dtype: np.dtype[Any], scalar: bool) -> tuple[int, _Make]:
    def make(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Any:
        if not count or not dtype.itemsize:
            return empty_array(shape, dtype)[()] if scalar else empty_array(shape, dtype)
        value = np.ndarray(shape, dtype, buffer, at)
        return value.copy()[()] if scalar else value

    return dtype.itemsize, make


def _number(cls: Any) -> tuple[int, _Make]:
    unpack, size = NUMBER_CODECS[cls].unpack_from, NUMBER_CODECS[cls].size
    if cls is complex:
        return size, lambda buffer, at, count, shape: complex(*unpack(buffer, at))
    return size, lambda buffer, at, count, shape: unpack(buffer, at)[0]


def _numbers(cls: Any, outer: Any) -> tuple[int, _Make]:
    dtype = np.dtype(NUMBERS[cls][0])
    return dtype.itemsize, lambda buffer, at, count, shape: outer(
        np.frombuffer(buffer, dtype, count, at).tolist() if count else []
    )


def _bytes_to(make: Callable[[Any], Any]) -> _Make:
    def made(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Any:
        return make(buffer if len(buffer) == count else memoryview(buffer)[at : at + count])

    return made


# ---------------------------------------------------------------------------------------------------- containers


def _container(tree: Any, loads: _Loads) -> Container:
    """Return the container that a tree describes. Raises Unresolved, or ValueError and the like; see NOTE [ Names in data ]."""
    kind, name, extra, trusted = tree["container"], tree["class"], tree["extra"], loads is not None
    cls = resolve(name, trusted)
    keys = tuple(_key(key, loads) for key in tree["keys"])
    if len(keys) != len(tree["children"]):
        raise ValueError("a container has more or fewer keys than children")
    hash(keys)
    check_class(kind, cls, name, keys, extra)
    return Container(kind, cls, keys, read_extra(kind, extra, trusted))


def _key(key: Any, loads: _Loads) -> Any:
    if not isinstance(key, dict):
        return key
    ((kind, value),) = key.items()
    if kind == "enum":
        name, member = value
        return member_of(enum_class(name, loads is not None), member)
    if kind == "tuple":
        return tuple(_key(part, loads) for part in value)
    if kind not in ("bytes", "complex"):
        raise ValueError(f"{key!r:.80} is not a key")
    return bytes.fromhex(value) if kind == "bytes" else complex(*value)
