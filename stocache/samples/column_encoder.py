"""Write the samples of a block as columns; see NOTE [ Columns ]. column_decoder.py reads them back.

NOTE [ Columns ]
    All samples of a block are taken apart together, from the outside in. The facts that they share are written once, in the
    *structure*, a tree of JSON. Their values go into columns, one for each leaf of the tree. A column is named by the path
    to its leaf ("image", "target/boxes").

        leaf, all of one shape        NAME            (n, *shape)
        leaf of varying shape         NAME            all values, one after the other
                                      NAME:offsets    (n + 1,) where the values of each leaf begin
                                      NAME:shapes     (n, dims), not written for one dimension
        list of varying length        NAME:offsets    (n + 1,) where the items of each list begin; they are the rows of NAME[]
        union: values of several      NAME:kinds      (n,) which kind; the values of kind k are the rows of NAME|k
        kinds

    Numbers and numpy scalars are leaves without dimensions. Leaves of one dimension are str, bytes, other values that have a
    text (see texts.py), enum members, whose text is their name, and lists and tuples of numbers. Other lists and tuples that
    all have one length (at most 16) are containers: each item is a node of its own. Offsets, shapes and kinds are int64.
    Tensors and arrays with an ``order`` (see NOTE [ Orders ]) are stored as they lie in memory, with their shapes in memory.
    Values of a dtype that safetensors does not know are stored as bytes, with one more dimension: the bytes of one value. A
    key that is a tuple is written {"tuple": [...]}, an enum member {"enum": [class, name]}, bytes {"bytes": hex digits}, a
    complex {"complex": [real, imaginary]}.

    NOTE [ Items without bytes ] limits the lists of a file by its size. Where they have more such items, one more column,
    ":room", makes the file larger with zeros.

    The checksum of a sample is the XXH3-64 of a walk through the tree: the length of a list, the kind in a union,
    the shape of a leaf of varying shape (int64s, little-endian), and the bytes of every leaf.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.samples.containers import describe, keys_to_json, take_apart
from stocache.samples.leaves.kind import Encoded, Kind
from stocache.samples.leaves.kinds import BULK_ENCODERS, ENCODERS, encode_pickle, kind_in, kind_of
from stocache.samples.leaves.layout import BARE_NODES
from stocache.samples.leaves.plain_kinds import NUMBERS
from stocache.samples.leaves.type_lookup import Unfit, import_class
from stocache.samples.pytree import DEEP, OBJECTS, Container, sample_error

Tree: TypeAlias = dict[str, Any] | None
_Key: TypeAlias = tuple[Any, ...]

CHECKS_COLUMN, ROOM_COLUMN = RESERVED_COLUMNS = ":checks", ":room"
"""Names of columns that are not of samples."""

_FIELDS = 16  # the most items of a list that get a column each


class Columns:
    """The columns of samples.

    Attributes:
        tree: their structure.
        tensors: the columns, by name.

    Args:
        samples: of any structures.
        first: the number of the first, for errors.
        allow_pickle: whether to pickle objects that have no bytes of their own.

    Raises:
        SampleError: as `EncodedRecord`.
    """

    def __init__(self, samples: Sequence[object], first: int = 0, allow_pickle: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._allow_pickle = allow_pickle
        try:
            self.tree = self._take(samples, "sample", 0)
        except Unfit as error:
            raise sample_error(error, f"sample {first + error.row}", pickles=not allow_pickle) from error.__cause__
        room = self._nodes(self.tree) - BARE_NODES
        if room > 0 and (room := room - sum(tensor.nbytes for tensor in self.tensors.values())) > 0:
            self.tensors[ROOM_COLUMN] = torch.zeros(room, dtype=torch.uint8, device="cpu")

    def _nodes(self, tree: Any) -> int:
        """Return how many nodes all lists of a tree make, as the reader counts them."""
        if tree is None:
            return 0
        if tree["kind"] in ("in", "union"):
            return sum(map(self._nodes, tree["children"]))
        if tree["kind"] not in ("list", "tuple"):
            return 0
        items = int(self.tensors[tree["offsets"]][-1])
        return items * max(1, bare_nodes(tree["items"])) + self._nodes(tree["items"])

    def _take(self, values: Sequence[object], path: str, depth: int, whole: frozenset[type] = frozenset()) -> Tree:
        """Add the values of one node, and return its tree; pickle those of the types ``whole``."""
        alike = None if whole else _leaves_of_one_kind(values) or _sequences_of_one_kind(values, depth)
        if alike is not None:
            return self._take_kind(*alike, path, depth)
        rows: dict[_Key, list[int]] = defaultdict(list)
        parts = []
        row = 0
        try:
            for row, value in enumerate(values):
                kind, part = self._kind(value, depth, whole)
                rows[kind].append(row)
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
            try:  # a part does not pickle; perhaps its container does
                return self._take(values, path, depth, whole | {cls})
            except Unfit as failure:
                raise (failure if failure.final else error) from error.__cause__

    def _take_kinds(self, rows: dict[_Key, list[int]], parts: list[Any], path: str, depth: int) -> Tree:
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

    def _kind(self, value: object, depth: int, whole: frozenset[type]) -> tuple[_Key, Any]:
        """Return the key of a value's kind, and the value's own part: bytes and shape of a leaf, the parts of all else."""
        if type(value) in whole:
            return _apart(encode_pickle(value))
        try:
            return self._kind_of_parts(value, depth)
        except Unfit as error:
            if error.final or not self._allow_pickle:
                raise
            return _apart(encode_pickle(value))

    def _kind_of_parts(self, value: object, depth: int) -> tuple[_Key, Any]:
        encoded, container, parts = take_apart(value, depth)
        if encoded is not None:
            return _apart(encoded)
        if container.cls in (list, tuple):
            return (container.kind,), parts
        name, extra = describe(container, parts, self._allow_pickle)
        keys, exact = container.keys, None
        if set(map(type, keys)) != {str}:
            exact = repr(keys_to_json(keys))  # 1, 1.0 and True are equal, and hash the same
        return ("in", container.kind, name, keys, extra, exact), parts

    def _take_kind(self, kind: _Key, parts: list[Any], path: str, depth: int) -> Tree:
        name, *rest = kind
        if name == "in":
            container, cls, keys, extra, _ = rest
            pickles = self._allow_pickle
            self._allow_pickle = pickles and container not in OBJECTS
            try:
                return self._take_container(container, cls, keys, extra, parts, path, depth)
            finally:
                self._allow_pickle = pickles
        if name not in ("list", "tuple"):
            leaf = kind_of(kind)
            facts = dict(zip(leaf.fields, rest))  # noqa: B905  some have an order
            facts.pop("dims", None)
            return {"kind": name} | facts | self._take_leaves(parts, leaf, path)
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
        described = {"container": container, "class": cls, "keys": keys_to_json(keys), "extra": extra}
        return {"kind": "in", **described, "children": children}

    def _take_leaves(self, parts: list[Any], leaf: Kind, path: str) -> dict[str, Any]:
        dtype, tail = leaf.stored_as
        data = bytearray().join(buffer for buffer, _ in parts)
        values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
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
        """Add a column, and return its name, changed where another has it."""
        while name in self.tensors or name in RESERVED_COLUMNS:
            name += "'"
        self.tensors[name] = column if isinstance(column, Tensor) else torch.from_numpy(column.astype(np.int64, copy=False))
        return name


def tree_of(sample: object) -> Tree:
    """Return the structure that a block of samples like this one has, as it is read from the file.

    Raises:
        SampleError: as `Columns`.
    """
    tree: Tree = json.loads(json.dumps(Columns([sample]).tree))
    return tree


def bytes_of_rows(tree: Tree, columns: Mapping[str, memoryview], count: int) -> list[Iterator[memoryview]] | None:
    """Return the bytes that a walk meets in each of ``count`` rows: iterators for each leaf and each shape that varies.

    None where rows meet different leaves: the tree has a union or a list of varying length.

    Args:
        columns: the bytes of the columns.
    """
    if tree is None or tree["kind"] in ("union", "list", "tuple"):
        return None
    if tree["kind"] == "in":
        children = [bytes_of_rows(child, columns, count) for child in tree["children"]]
        return None if None in children else [rows for child in children for rows in child or ()]
    data = columns[tree["column"]]
    if "shape" in tree:
        return [_cut(data, len(data) // count, count)]
    size, offsets = kind_in(tree).itemsize, np.frombuffer(columns[tree["offsets"]], np.int64)
    shapes = columns[tree["shapes"]] if "shapes" in tree else np.diff(offsets).view(np.uint8).data
    values = (data[begin:end] for begin, end in pairwise((offsets * size).tolist()))
    return [_cut(shapes, 8 * tree["dims"], count), values]


def _cut(data: memoryview, nbytes: int, count: int) -> Iterator[memoryview]:
    return (data[row * nbytes : (row + 1) * nbytes] for row in range(count))


def _leaves_of_one_kind(values: Sequence[object]) -> tuple[_Key, list[Any]] | None:
    """Return the key of leaves of one type, and their own parts; None for other values. One by one takes longer."""
    types = set(map(type, values))
    if len(types) != 1:
        return None
    cls = types.pop()
    if cls in BULK_ENCODERS and (leaves := BULK_ENCODERS[cls](values)) is not None:
        return leaves
    encode = ENCODERS.get(cls)
    if encode is None:
        return None
    try:
        kinds, _, *parts = zip(*map(encode, values), strict=True)
    except Unfit:  # one by one, the error names the value
        return None
    return (kinds[0], list(zip(*parts, strict=True))) if kinds.count(kinds[0]) == len(kinds) else None


def _sequences_of_one_kind(values: Sequence[Any], depth: int) -> tuple[_Key, list[Any]] | None:
    """Return the key of lists or tuples that do not begin with a number, and their own parts; None for other values."""
    cls = type(values[0]) if len(values) and depth < DEEP else None
    if cls not in (list, tuple) or not all(type(value) is cls and value and type(value[0]) not in NUMBERS for value in values):
        return None
    return (cls.__name__,), list(values)


def _apart(encoded: Encoded) -> tuple[_Key, Any]:
    description, _, data, shape = encoded
    return description, (data, shape)


def bare_nodes(tree: Any) -> int:
    """Return how many bare nodes a row has, without those in its lists; see NOTE [ Items without bytes ]."""
    if tree is None or tree["kind"] in ("list", "tuple"):
        return 0
    if tree["kind"] == "in":
        return 1 + sum(map(bare_nodes, tree["children"]))
    if tree["kind"] == "union":
        return max(map(bare_nodes, tree["children"]), default=0)
    return kind_in(tree).bare(tree["shape"]) if "shape" in tree else 0  # the others have offsets
