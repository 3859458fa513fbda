"""Samples put together again from the columns of a block; see NOTE [ Columns ].

A structure is compiled once per block into functions ``read(walk, row)``, one for each node. What they read may be damaged or
forged: whatever they find, they raise, and neither run code of it nor take memory that its bytes do not fill.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.columnar import Tree
from stocache.containers import Container
from stocache.errors import StorageError
from stocache.records import NUMBER_TYPES, NUMBERS, class_of, freeze, thaw
from stocache.structure import NUMBER_CODECS


class Walk(Protocol):
    """One walk through the tree: where the bytes come from, and what has been met."""

    def take(self, at: int, nbytes: int, own: bool) -> tuple[Any, int]:
        """Return a buffer that holds ``nbytes`` of the file from ``at``, and where in it they begin; note them as met.

        ``own``: it is to be the caller's, to write to.
        """

    def note(self, *sizes: int) -> None:
        """Note sizes as met."""


class Table(Protocol):
    """The columns of a block."""

    def span(self, name: str) -> tuple[int, int]:
        """Return where a column begins, and its bytes."""

    def integers(self, name: str) -> Any:
        """Return a column of int64, whole."""


_Loads: TypeAlias = Callable[[Any], Any] | None
RAW = bytes
"""As what reads pickles: make nothing at all, neither of them nor of all else. For checking."""

Read: TypeAlias = Callable[[Walk, int], Any]
_Make: TypeAlias = Callable[[Any, int, int, tuple[int, ...]], Any]  # of a buffer, where in it, how many values, and their shape


def reader(tree: Tree, table: Table, loads: _Loads) -> Read:
    """Return the function that reads what a structure describes; ``loads`` reads pickles, where they are allowed.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError: it describes nothing.
        StorageError: it names classes that are not here.
    """
    if tree is None:
        return _nothing
    kind = tree["kind"]
    if kind == "in":
        return _read_container(tree, table, loads)
    if kind == "union":
        return _read_union(tree, table, loads)
    if kind in ("list", "tuple"):
        return _read_items(tree, table, loads)
    if kind == "pickle" and loads is None:
        raise StorageError("its samples are partly pickled. To run what the pickles say, pass allow_pickle=True.")
    size, make = _maker(kind, tree, loads)
    if loads is RAW:
        return _read_leaf(tree, table, size, False, _make_nothing)
    return _read_leaf(tree, table, size, kind in ("tensor", "array"), make)


def _nothing(walk: Walk, row: int) -> Any:
    raise ValueError("it has a row in a column of none")


def _read_container(tree: Any, table: Table, loads: _Loads) -> Read:
    join = list if loads is RAW else _container(tree, loads).joiner()
    reads = [reader(child, table, loads) for child in tree["children"]]
    return lambda walk, row: join([read(walk, row) for read in reads])


def _read_union(tree: Any, table: Table, loads: _Loads) -> Read:
    kinds = np.array(table.integers(tree["kinds"]), dtype=np.int64)
    reads = [reader(child, table, loads) for child in tree["children"]]
    if kinds.size and not 0 <= kinds.min() <= kinds.max() < len(reads):
        raise ValueError("a kind is none of its union")
    rows = np.zeros_like(kinds)
    for number in range(len(reads)):
        rows[kinds == number] = np.arange(np.count_nonzero(kinds == number))

    def read(walk: Walk, row: int) -> Any:
        kind = int(kinds[row])
        walk.note(kind)
        return reads[kind](walk, int(rows[row]))

    return read


def _read_items(tree: Any, table: Table, loads: _Loads) -> Read:
    cls = list if tree["kind"] == "list" else tuple
    offsets, read_item = table.integers(tree["offsets"]), reader(tree["items"], table, loads)

    def read(walk: Walk, row: int) -> Any:
        begin, end = offsets[row], offsets[row + 1]
        if not 0 <= begin <= end:
            raise ValueError("the items of a list end before they begin")
        walk.note(end - begin)
        return cls([read_item(walk, item) for item in range(begin, end)])

    return read


def _read_leaf(tree: Any, table: Table, size: int, own: bool, make: _Make) -> Read:
    """``own``: what is made keeps the bytes, and its owner may write to them."""
    begin, nbytes = table.span(tree["column"])
    if "shape" in tree:
        shape = tuple(map(int, tree["shape"]))
        count = math.prod(shape)
        width = count * size
        if min(shape, default=0) < 0 or width > nbytes:
            raise ValueError(f"the column {tree['column']!r} is too small for values of shape {shape}")

        def read(walk: Walk, row: int) -> Any:
            if (row + 1) * width > nbytes:
                raise ValueError("a column is too short")
            buffer, at = walk.take(begin + row * width, width, own)
            return make(buffer, at, count, shape)

        return read

    dims = int(tree["dims"])
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
        dtype = getattr(torch, tree["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{dtype!r:.50} is no dtype")
        return dtype.itemsize, _tensor(dtype)
    if kind in ("array", "scalar"):
        return _array(thaw(freeze(tree["dtype"])), kind == "scalar")
    if kind == "number":
        return _number(NUMBER_TYPES[tree["type"]])
    if kind == "numbers":
        return _numbers(NUMBER_TYPES[tree["type"]], list if tree["class"] == "list" else tuple)
    return 1, _bytes_to(loads) if kind == "pickle" and loads is not None else _FROM_BYTES[kind]


def _make_nothing(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> None:
    """Make nothing: the bytes have been met, and that is all."""


def _tensor(dtype: torch.dtype) -> _Make:
    def make(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Tensor:
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shape)

    return make


def _array(dtype: np.dtype[Any], scalar: bool) -> tuple[int, _Make]:
    def make(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Any:
        if not count or not dtype.itemsize:
            return np.empty(shape, dtype)
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
    return dtype.itemsize, lambda buffer, at, count, shape: outer(np.frombuffer(buffer, dtype, count, at).tolist())


def _bytes_to(make: Callable[[Any], Any]) -> _Make:
    def made(buffer: Any, at: int, count: int, shape: tuple[int, ...]) -> Any:
        return make(buffer if len(buffer) == count else memoryview(buffer)[at : at + count])

    return made


_FROM_BYTES: dict[str, _Make] = {
    "str": _bytes_to(lambda data: str(data, "utf-8", "surrogatepass")),
    "bytes": _bytes_to(bytes),
    "long": _bytes_to(lambda data: int.from_bytes(data, "little", signed=True)),
}

# ---------------------------------------------------------------------------------------------------- containers


def _container(tree: Any, loads: _Loads) -> Container:
    """Return the container that a tree describes, if making one runs no code that the tree could choose.

    So its class is one of Python's own, or what it should be by nature, and of a module that this process has imported anyway.
    """
    kind, name, keys = tree["container"], tree["class"], tuple(map(_key, tree["keys"]))
    module = name.partition(":")[0]
    if loads is None and module not in sys.modules:
        raise StorageError(f"its samples are made of {name}. Import {module} first, or pass allow_pickle=True.")
    try:
        cls: Any = class_of(name)
    except (ImportError, AttributeError) as error:
        raise StorageError(f"its samples are made of {name}, which is not here: {error}.") from None
    if not (isinstance(cls, type) and _NATURES[kind](cls)):
        raise StorageError(f"its samples are made of {name}, which is no {kind}.")
    if kind == "namedtuple" and getattr(cls, "_fields", ()) != keys:
        raise StorageError(f"its samples are made of {name} with the fields {list(keys)}, which it has no longer.")
    if len(keys) != len(tree["children"]):
        raise ValueError("a container has more or fewer keys than children")
    return Container(kind, cls, keys, tuple(tree["extra"]))


def _key(key: Any) -> Any:
    return tuple(map(_key, key["tuple"])) if isinstance(key, dict) else key


def _is_image(cls: type) -> bool:
    images = sys.modules.get("PIL.Image")
    return images is not None and issubclass(cls, images.Image)


_NATURES: dict[str, Callable[[Any], bool]] = {
    "dict": lambda cls: cls in (dict, OrderedDict),
    "list": lambda cls: cls is list,
    "tuple": lambda cls: issubclass(cls, tuple),
    "none": lambda cls: cls is type(None),
    "namedtuple": lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"),
    "mapping": lambda cls: issubclass(cls, Mapping),
    "tensordict": lambda cls: issubclass(cls, Mapping),
    "dataclass": is_dataclass,
    "tensor": lambda cls: issubclass(cls, Tensor),
    "image": _is_image,
}
