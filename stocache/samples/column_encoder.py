"""Samples taken apart into columns; see NOTE [ Columns ]. `column_decoder.py` puts them together again.

NOTE [ Columns ]
    All samples of a block are taken apart together, from the outside in. What is the same for all of them is said once, in the
    *structure*, a tree that can be written as JSON; what differs goes into columns, one for each leaf of the tree, named by the
    way to it ("image", "target/boxes").

        leaf, all of one shape        NAME            (n, *shape)
        leaf of varying shape         NAME            all values, one after the other
                                      NAME:offsets    (n + 1,) where each one's values begin
                                      NAME:shapes     (n, dims), unless they have one dimension
        list of varying length        NAME:offsets    (n + 1,) where each one's items begin, which are the rows of NAME[]
        union: values of several      NAME:kinds      (n,) which kind; those of kind k are the rows of NAME|k
        kinds

    Numbers and numpy scalars are leaves without dimensions; str, bytes, lists and tuples of numbers are leaves of one, and so
    is whatever has text or bytes of its own (see kinds.py), and an enum member, whose text is its name. Tuples and lists of
    other things that all have one length (at most 16) are containers: each item is a node of its own. Offsets, shapes and kinds
    are int64. Tensors and arrays that have an ``order`` (see NOTE [ Orders ]) are kept as they lie in memory, and their shapes
    are those in memory. Values of a dtype that safetensors does not know are kept as bytes, with one more dimension: the bytes
    of one. A key that is a tuple is written {"tuple": [...]}, an enum member {"enum": [class, name]}, bytes {"bytes": hex
    digits}, a complex {"complex": [real, imaginary]}.

    Where lists have more items without bytes than NOTE [ Items without bytes ] lets a file of this size have, one more column,
    ":room", makes up for it with zeros.

    The checksum of a sample is the XXH3-64 of what is met on a walk through the tree: of a list its length, of a union the
    kind, of a leaf of varying shape the shape (int64s, little-endian), and of every leaf the bytes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.samples.kinds import KIND_NAMES, Unfit, long_bytes, name_of
from stocache.samples.pytree import DEEP, Container, split, told
from stocache.samples.record_encoder import (
    BARE_NODES,
    NUMBER_TYPES,
    NUMBERS,
    check_container,
    check_key,
    dense_leaf,
    dtype_from_key,
    kind_bytes,
    literal_extra,
    member_bytes,
    number_bytes,
    pickled,
    too_deep,
)
from stocache.samples.type_lookup import TORCH_DTYPES, import_class

Tree: TypeAlias = dict[str, Any] | None
_Kind: TypeAlias = tuple[Any, ...]

CHECKS, INFO, ROOM = RESERVED = ":checks", ":info", ":room"
"""Names of columns that are not of samples."""

_FIELDS = 16  # items of a list that get a column each, at most
_KNOWN = {  # to safetensors, in all its versions
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class Columns:
    """Samples taken apart.

    Attributes:
        tree: their structure.
        tensors: the columns, by name.

    Args:
        samples: of any structures.
        first: the number of the first, for errors.
        allow_pickle: whether to pickle what has no bytes of its own.

    Raises:
        SampleError: a part has no bytes of its own, and may not be pickled or does not pickle; or it would not come back the
            same: on a GPU, with a gradient.
    """

    def __init__(self, samples: Sequence[Any], first: int = 0, allow_pickle: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._allow_pickle = allow_pickle
        try:
            self.tree = self._take(samples, "sample", 0)
        except Unfit as error:
            raise told(error, f"sample {first + error.row}", pickles=not allow_pickle) from error.__cause__
        room = self._nodes(self.tree) - BARE_NODES
        if room > 0 and (room := room - sum(tensor.nbytes for tensor in self.tensors.values())) > 0:
            self.tensors[ROOM] = torch.zeros(room, dtype=torch.uint8)

    def _nodes(self, tree: Any) -> int:
        """Return how many nodes all lists of a tree make, as its reader counts them."""
        if tree is None:
            return 0
        if tree["kind"] in ("in", "union"):
            return sum(map(self._nodes, tree["children"]))
        if tree["kind"] not in ("list", "tuple"):
            return 0
        items = int(self.tensors[tree["offsets"]][-1])
        return items * max(1, bare_columns(tree["items"])) + self._nodes(tree["items"])

    def _take(self, values: Sequence[Any], path: str, depth: int, whole: frozenset[type] = frozenset()) -> Tree:
        """Add the values of one node, and return its tree; those of the types ``whole`` as pickles."""
        rows: dict[_Kind, list[int]] = {}
        parts = []
        row = 0
        try:
            for row, value in enumerate(values):
                kind, part = self._kind(value, depth, whole)
                rows.setdefault(kind, []).append(row)
                parts.append(part)
        except Unfit as error:
            error.row = row
            raise
        before = len(self.tensors)
        try:
            return self._take_kinds(rows, parts, path, depth)
        except Unfit as error:
            cls = type(values[error.row])
            if error.final or not self._allow_pickle or cls in whole:
                raise
            while len(self.tensors) > before:
                self.tensors.popitem()
            try:  # a part does not pickle; perhaps what it is in does
                return self._take(values, path, depth, whole | {cls})
            except Unfit as failure:
                raise (failure if failure.final else error) from error.__cause__

    def _take_kinds(self, rows: dict[_Kind, list[int]], parts: list[Any], path: str, depth: int) -> Tree:
        """Add values of several kinds: ``rows`` says which are of each."""
        if len(rows) == 1:
            return self._take_kind(next(iter(rows)), parts, path, depth)
        if not rows:
            return None
        kinds = np.empty(len(parts), np.int64)
        children = []
        for number, (kind, own) in enumerate(rows.items()):
            kinds[own] = number
            try:
                children.append(self._take_kind(kind, [parts[row] for row in own], f"{path}|{number}", depth + 1))
            except Unfit as error:
                error.row = own[error.row]
                raise
        return {"kind": "union", "kinds": self._add(f"{path}:kinds", kinds), "children": children}

    def _kind(self, value: Any, depth: int, whole: frozenset[type]) -> tuple[_Kind, Any]:
        """Return what values of one kind have in common, and what differs: of a leaf its bytes and its shape."""
        cls = type(value)
        if cls in NUMBERS:
            if cls is int and not -(2**63) <= value < 2**63:
                return _bytes("long", long_bytes(value))
            return ("number", cls.__name__), (number_bytes(value), ())
        if cls in whole:
            return _bytes("pickle", pickled(value))
        try:
            return self._kind_of_parts(value, depth)
        except Unfit as error:
            if error.final or not self._allow_pickle:
                raise
            return _bytes("pickle", pickled(value))

    def _kind_of_parts(self, value: Any, depth: int) -> tuple[_Kind, Any]:
        cls = type(value)
        if cls in KIND_NAMES:
            return _bytes(*kind_bytes(value))
        if cls is list or cls is tuple:
            kind, part = self._sequence_kind(value)
            if depth >= DEEP and len(kind) == 1:
                raise too_deep()
            return kind, part
        if cls is Tensor or cls is np.ndarray or (parted := split(value)) is None:
            if isinstance(value, Enum):
                name, data = member_bytes(value)
                return ("enum", name), (data, (len(data),))
            kind, _, data, shape = dense_leaf(value)
            return kind, (data, shape)
        if depth >= DEEP:
            raise too_deep()
        container, items = parted
        keys, told = container.keys, None
        if set(map(type, keys)) != {str}:
            for key in keys:
                check_key(key)
            told = repr(list(map(_json_key, keys)))  # 1, 1.0 and True are equal, and hash the same
        extra = literal_extra(container)
        name = name_of(container.cls)
        check_container(container, name, extra, items, self._allow_pickle)
        return ("in", container.kind, name, keys, extra, told), items

    def _sequence_kind(self, value: Any) -> tuple[_Kind, Any]:
        name, types = type(value).__name__, set(map(type, value))
        if len(types) == 1 and (cls := types.pop()) in NUMBERS:
            try:
                data = np.array(value, dtype=NUMBERS[cls][0])
            except OverflowError:  # an int beyond 64 bits
                pass
            else:
                return ("numbers", name, cls.__name__), (data, (len(value),))
        return (name,), value

    def _take_kind(self, kind: _Kind, parts: list[Any], path: str, depth: int) -> Tree:
        name, *rest = kind
        if name == "in":
            container, cls, keys, extra, _ = rest
            return self._take_container(container, cls, keys, extra, parts, path, depth)
        if name not in ("list", "tuple"):
            described = dict(zip(_DESCRIBED.get(name, ()), rest))  # noqa: B905  some have an order
            described.pop("", None)
            return {"kind": name} | described | self._take_leaves(parts, *stored_as(name, rest), path)
        lengths = list(map(len, parts))
        if len(set(lengths)) == 1 and lengths[0] <= _FIELDS:
            keys = tuple(range(lengths[0]))
            return self._take_container(name, f"builtins:{name}", keys, (), parts, path, depth)
        bounds = np.cumsum([0, *lengths])
        offsets = self._add(f"{path}:offsets", bounds)
        try:
            items = self._take([item for part in parts for item in part], f"{path}[]", depth + 1)
        except Unfit as error:
            item, error.row = error.row, bisect_right(bounds.tolist(), error.row) - 1
            raise error.within(Container(name, list, ()), item - int(bounds[error.row])) from error.__cause__
        return {"kind": name, "offsets": offsets, "items": items}

    def _take_container(self, container: str, cls: str, keys: Any, extra: Any, parts: list[Any], path: str, depth: int) -> Tree:
        children = []
        for position, key in enumerate(keys):
            name = str(key).encode("utf-8", "replace").decode()
            within = name if depth == 0 else f"{path}/{name}"
            try:
                children.append(self._take([part[position] for part in parts], within, depth + 1))
            except Unfit as error:
                raise error.within(Container(container, import_class(cls), keys), key) from error.__cause__
        described = {"container": container, "class": cls, "keys": list(map(_json_key, keys)), "extra": extra}
        return {"kind": "in", **described, "children": children}

    def _take_leaves(self, parts: list[Any], dtype: torch.dtype, tail: tuple[int, ...], path: str) -> dict[str, Any]:
        data = bytearray().join(buffer for buffer, _ in parts)
        values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        shapes = [shape for _, shape in parts]
        if len(set(shapes)) == 1:
            return {"shape": shapes[0], "column": self._add(path, values.view(len(parts), *shapes[0], *tail))}
        column = self._add(path, values.view(-1, *tail) if values.numel() else values.view(0, *tail))
        table = np.array(shapes, dtype=np.int64)
        tree = {"dims": table.shape[1], "column": column}
        tree["offsets"] = self._add(f"{path}:offsets", np.cumsum([0, *table.prod(axis=1).tolist()]))
        if table.shape[1] > 1:
            tree["shapes"] = self._add(f"{path}:shapes", table)
        return tree

    def _add(self, name: str, column: Any) -> str:
        """Add a column, and return its name, which no other has."""
        while name in self.tensors or name in RESERVED:
            name += "'"
        self.tensors[name] = column if isinstance(column, Tensor) else torch.from_numpy(column.astype(np.int64, copy=False))
        return name


_DESCRIBED = {  # the number of dimensions, "", follows from the shapes
    "number": ("type",),
    "numbers": ("class", "type"),
    "tensor": ("dtype", "", "order"),
    "array": ("dtype", "", "order"),
    "scalar": ("dtype", ""),
    "enum": ("class",),
}


def _json_key(key: Any) -> Any:
    if isinstance(key, Enum):
        name, data = member_bytes(key)
        return {"enum": [name, data.decode()]}
    if type(key) is bytes:
        return {"bytes": key.hex()}
    if type(key) is complex:
        return {"complex": [key.real, key.imag]}
    return {"tuple": list(map(_json_key, key))} if type(key) is tuple else key


def _bytes(kind: str, data: bytes) -> tuple[_Kind, Any]:
    return (kind,), (data, (len(data),))


def bare_columns(tree: Any) -> int:
    """Return how many nodes of a tree have no bytes in a row, outside of lists in it; see NOTE [ Items without bytes ]."""
    if tree is None:
        return 0
    if tree["kind"] == "in":
        return 1 + sum(map(bare_columns, tree["children"]))
    if tree["kind"] == "union":
        return max(map(bare_columns, tree["children"]), default=0)
    if tree["kind"] in ("list", "tuple") or "shape" not in tree:  # which have offsets
        return 0
    return int(0 in tree["shape"] or (tree["kind"] in ("array", "scalar") and not dtype_from_key(tree["dtype"]).itemsize))


def stored_as(kind: str, described: Sequence[Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype in which the values of a leaf are stored, and the dimensions that takes besides their own.

    Raises:
        KeyError, ValueError, TypeError: the leaf is of no known type.
    """
    if kind == "tensor":
        dtype = TORCH_DTYPES[described[0]]
        return (dtype, ()) if dtype in _KNOWN else (torch.uint8, (dtype.itemsize,))
    if kind not in ("array", "scalar", "number", "numbers"):
        return torch.uint8, ()
    plain = dtype_from_key(described[0]) if kind in ("array", "scalar") else np.dtype(NUMBERS[NUMBER_TYPES[described[-1]]][0])
    if plain.kind in "biuf" and plain.isnative:
        known: Any = getattr(torch, plain.name, None)
        if known in _KNOWN:
            return known, ()
    return torch.uint8, (plain.itemsize,)
