"""Samples taken apart into columns; see NOTE [ Columns ]. `rows.py` puts them together again.

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

    Numbers and numpy scalars are leaves without dimensions; str, bytes, lists and tuples of numbers are leaves of one. Tuples
    and lists of other things that all have one length (at most 16) are containers: each item is a node of its own. Offsets,
    shapes and kinds are int64. Values of a dtype that safetensors does not know are kept as bytes, with one more dimension: the
    bytes of one. A key of a container that is a tuple is written {"tuple": [...]}.

    The checksum of a sample is the XXH3-64 of what is met on a walk through the tree: of a list its length, of a union the
    kind, of a leaf of varying shape the shape (int64s, little-endian), and of every leaf the bytes.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.containers import split
from stocache.errors import SampleError
from stocache.records import NUMBER_TYPES, NUMBERS, array_descr, long_bytes, name_of, number_bytes, pickled, thaw
from stocache.structure import array_bytes, check_dtype, check_exact, tensor_bytes

Tree: TypeAlias = dict[str, Any] | None
_Kind: TypeAlias = tuple[Any, ...]

CHECKS, INFO = RESERVED = ":checks", ":info"
"""Names of columns that are not of samples."""

_FIELDS = 16  # items of a list that get a column each, at most
_DEEP = 60  # containers within each other, at most
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
        SampleError: a leaf has no bytes of its own, and may not be pickled; or would not come back the same: on a GPU, with a
            gradient.
    """

    def __init__(self, samples: Sequence[Any], first: int = 0, allow_pickle: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._allow_pickle = allow_pickle
        self.tree = self._take(samples, "sample", range(first, first + len(samples)), 0)

    def _take(self, values: Sequence[Any], path: str, numbers: Sequence[int], depth: int) -> Tree:
        """Add the values of one node, and return its tree; ``numbers`` are those of the samples they are of, for errors."""
        if depth > _DEEP:
            raise SampleError(f"sample {numbers[0]}: more than {_DEEP} containers within each other.")
        rows: dict[_Kind, list[int]] = {}
        parts = []
        for row, value in enumerate(values):
            kind, part = self._kind(value, f"sample {numbers[row]}" if depth == 0 else f"sample {numbers[row]} ({path})")
            rows.setdefault(kind, []).append(row)
            parts.append(part)
        if len(rows) == 1:
            return self._take_kind(next(iter(rows)), parts, path, numbers, depth)
        if not rows:
            return None
        kinds = np.empty(len(values), np.int64)
        children = []
        for number, (kind, own) in enumerate(rows.items()):
            kinds[own] = number
            mine, theirs = [parts[row] for row in own], [numbers[row] for row in own]
            children.append(self._take_kind(kind, mine, f"{path}|{number}", theirs, depth + 1))
        return {"kind": "union", "kinds": self._add(f"{path}:kinds", kinds), "children": children}

    def _kind(self, value: Any, where: str) -> tuple[_Kind, Any]:
        """Return what values of one kind have in common, and what differs: of a leaf its bytes and its shape."""
        cls = type(value)
        if cls in NUMBERS:
            if cls is int and not -(2**63) <= value < 2**63:
                return _bytes("long", long_bytes(value))
            return ("number", cls.__name__), (number_bytes(value), ())
        if cls is str:
            return _bytes("str", value.encode("utf-8", "surrogatepass"))
        if cls is bytes:
            return _bytes("bytes", value)
        if cls is Tensor:
            check_exact(value, Tensor, where)
            dtype = str(check_dtype(value.dtype)).removeprefix("torch.")
            return ("tensor", dtype, value.dim()), (tensor_bytes(value, where), tuple(value.shape))
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            kind = "scalar" if isinstance(value, np.generic) else "array"
            return (kind, array_descr(value, where), value.ndim), (array_bytes(value), value.shape)
        if cls is list or cls is tuple:
            return self._sequence_kind(value)
        parted = split(value)
        if parted is not None and all(map(_is_plain, parted[0].keys)):
            container, items = parted
            told = repr(container.keys)  # 1, 1.0 and True are equal, and hash the same
            return ("in", container.kind, name_of(container.cls, where), container.keys, container.extra, told), items
        problem = "has no bytes of its own" if parted is None else "has keys that are not str, numbers or tuples of such"
        return _bytes("pickle", pickled(value, where, self._allow_pickle, problem))

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

    def _take_kind(self, kind: _Kind, parts: list[Any], path: str, numbers: Sequence[int], depth: int) -> Tree:
        name, *rest = kind
        if name == "in":
            container, cls, keys, extra, _ = rest
            return self._take_container(container, cls, keys, extra, parts, path, numbers, depth)
        if name not in ("list", "tuple"):
            described = dict(zip(_DESCRIBED.get(name, ()), rest))  # noqa: B905  the number of dimensions follows from the shapes
            return {"kind": name} | described | self._take_leaves(parts, *stored_as(name, rest), path)
        lengths = list(map(len, parts))
        if len(set(lengths)) == 1 and lengths[0] <= _FIELDS:
            keys = tuple(range(lengths[0]))
            return self._take_container(name, f"builtins:{name}", keys, (), parts, path, numbers, depth)
        offsets = self._add(f"{path}:offsets", np.cumsum([0, *lengths]))
        items = [item for part in parts for item in part]
        theirs = [number for number, length in zip(numbers, lengths, strict=True) for _ in range(length)]
        return {"kind": name, "offsets": offsets, "items": self._take(items, f"{path}[]", theirs, depth + 1)}

    def _take_container(
        self, container: str, cls: str, keys: Any, extra: Any, parts: list[Any], path: str, numbers: Sequence[int], depth: int
    ) -> Tree:
        children = []
        for position, key in enumerate(keys):
            name = str(key).encode("utf-8", "replace").decode()
            within = name if depth == 0 else f"{path}/{name}"
            children.append(self._take([part[position] for part in parts], within, numbers, depth + 1))
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


_DESCRIBED = {
    "number": ("type",),
    "numbers": ("class", "type"),
    "tensor": ("dtype",),
    "array": ("dtype",),
    "scalar": ("dtype",),
}


def _is_plain(key: Any) -> bool:
    return all(map(_is_plain, key)) if type(key) is tuple else type(key) in (str, int, float, bool, type(None))


def _json_key(key: Any) -> Any:
    return {"tuple": list(map(_json_key, key))} if type(key) is tuple else key


def _bytes(kind: str, data: bytes) -> tuple[_Kind, Any]:
    return (kind,), (data, (len(data),))


def stored_as(kind: str, described: Sequence[Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype in which the values of a leaf are stored, and the dimensions that takes besides their own.

    Raises:
        KeyError, ValueError, TypeError: the leaf is of no known type.
    """
    if kind == "tensor":
        dtype = getattr(torch, described[0])
        return (dtype, ()) if dtype in _KNOWN else (torch.uint8, (dtype.itemsize,))
    if kind not in ("array", "scalar", "number", "numbers"):
        return torch.uint8, ()
    plain = thaw(described[0]) if kind in ("array", "scalar") else np.dtype(NUMBERS[NUMBER_TYPES[described[-1]]][0])
    if plain.kind in "biuf" and plain.isnative:
        dtype = getattr(torch, plain.name, None)
        if dtype in _KNOWN:
            return dtype, ()
    return torch.uint8, (plain.itemsize,)
