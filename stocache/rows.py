"""Samples put together again from the columns of a block; see NOTE [ Columns ].

A structure is compiled once per block into functions ``read(walk, row)``, one for each node. What they read may be damaged or
forged: whatever they find, they raise, and neither run code of it nor take memory that its bytes do not fill.
"""

import math
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.columnar import Tree
from stocache.containers import Container
from stocache.errors import StorageError
from stocache.kinds import FACTORIES, FROM_BYTES, class_of, member_of
from stocache.records import NUMBER_TYPES, NUMBERS, freeze, read_extra, thaw
from stocache.structure import NUMBER_CODECS, inverse


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
        return dtype.itemsize, _ordered(_tensor(dtype), tree)
    if kind in ("array", "scalar"):
        size, make = _array(thaw(freeze(tree["dtype"])), kind == "scalar")
        return size, _ordered(make, tree)
    if kind == "number":
        return _number(NUMBER_TYPES[tree["type"]])
    if kind == "numbers":
        return _numbers(NUMBER_TYPES[tree["type"]], list if tree["class"] == "list" else tuple)
    if kind == "enum":
        cls = None if loads is RAW else _enum(tree["class"], loads)
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


# ---------------------------------------------------------------------------------------------------- containers


def _container(tree: Any, loads: _Loads) -> Container:
    """Return the container that a tree describes, if making one runs no code that the tree could choose.

    So its class is one of Python's own, or what it should be by nature, and of a module that this process has imported anyway.
    """
    kind, name = tree["container"], tree["class"]
    keys = tuple(_key(key, loads) for key in tree["keys"])
    cls = _class(name, loads)
    if not (isinstance(cls, type) and _NATURES[kind](cls)):
        raise StorageError(f"its samples are made of {name}, which is no {kind}.")
    if kind == "namedtuple" and getattr(cls, "_fields", ()) != keys:
        raise StorageError(f"its samples are made of {name} with the fields {list(keys)}, which it has no longer.")
    if len(keys) != len(tree["children"]):
        raise ValueError("a container has more or fewer keys than children")
    extra = tree["extra"]
    if kind == "defaultdict" and loads is None and not FACTORIES.issuperset(filter(None, extra)):
        raise StorageError(f"its samples have the default_factory {extra[0]}. To call it, pass allow_pickle=True.")
    return Container(kind, cls, keys, read_extra(kind, extra))


def _class(name: str, loads: _Loads) -> Any:
    """Return the class of a name, if its module is imported already or pickles are allowed anyway."""
    module = name.partition(":")[0]
    if loads is None and module not in sys.modules:
        raise StorageError(f"its samples are made of {name}. Import {module} first, or pass allow_pickle=True.")
    try:
        return class_of(name)
    except (ImportError, AttributeError) as error:
        raise StorageError(f"its samples are made of {name}, which is not here: {error}.") from None


def _enum(name: str, loads: _Loads) -> Any:
    cls = _class(name, loads)
    if not (isinstance(cls, type) and issubclass(cls, Enum)):
        raise StorageError(f"its samples have members of {name}, which is not an enum.")
    return cls


def _key(key: Any, loads: _Loads) -> Any:
    if not isinstance(key, dict):
        return key
    ((kind, value),) = key.items()
    if kind == "enum":
        name, member = value
        return member_of(_enum(name, loads), member)
    if kind == "tuple":
        return tuple(_key(part, loads) for part in value)
    return bytes.fromhex(value) if kind == "bytes" else complex(*value)


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
    "set": lambda cls: cls in (set, frozenset),
    "deque": lambda cls: cls is deque,
    "slice": lambda cls: cls is slice,
    "defaultdict": lambda cls: cls is defaultdict,
    "memmap": lambda cls: cls is np.memmap,
}
