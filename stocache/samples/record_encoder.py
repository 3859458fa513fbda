"""Writes samples of any size as records: the bytes of each leaf, and a treedef that says how to put them together.

NOTE [ Records ]
    A record has three parts: a head, the bytes of the leaves, and integers.

    head       16 bytes: bytes of the leaves as stored; number of the treedef; how many integers, how wide each is (1, 2, 4 or
               8 bytes, whatever the largest needs), and whether the leaves are compressed
    leaves     in four streams: first the values whose addresses should be multiples of 8 bytes, then 4, 2, 1. So each lies
               where it can be used in place, without gaps
    integers   bytes of each stream but the last; then the shapes and lengths, in the order of the treedef

    The treedef holds all that samples of one kind have in common: containers, keys, types of leaves, dtypes, numbers of
    dimensions, and the order of these where it is not that of C (then shapes are stored as the values lie in memory). It is
    stored once for all of them (see arena.py), as a nested tuple, written as a Python literal:

        ("in", kind, class, keys, extra, children)    a container; with "coded" at the end where types of keys are written
        ("items", "list" or "tuple", kinds)           a list of any length; items of several kinds each name theirs by number
        ("tensor", "float32", 2), ("str",) ...        a leaf; see NOTE [ Kinds of leaves ]

    A list of numbers is a leaf, stored as an array. Keys are written as they are where all are str, int, bytes or None. Else
    they are written with their types, enum members by class and name. An enum member that is a leaf has its name in its bytes,
    so one treedef serves all members.

NOTE [ Items without bytes ]
    A list of None, or of empty dicts, has a length and nothing else, so a forged length could make objects without end. So the
    bytes of a record limit its lists. A *bare* node is a container, or a leaf without bytes and sizes. All lists of a record
    may make `BARE_NODES` of them, and one more for each byte and integer in it. Where a sample has more, zeros are put behind
    its leaves. Blocks count in the same way (see NOTE [ Columns ]).
"""

import ast
import functools
import struct
from typing import Any, NamedTuple, TypeAlias

from stocache.errors import SampleError
from stocache.samples.containers import describe, keys_to_literals, too_deep
from stocache.samples.kinds import (
    BARE_NODES,
    ENCODERS,
    NUMBERS,
    Encoded,
    encode_numbers,
    encode_other,
    encode_pickle,
    kind_of,
)
from stocache.samples.pytree import DEEP, Container, flatten_one, sample_error
from stocache.samples.type_lookup import Unfit

TreeDef: TypeAlias = tuple[Any, ...]

HEAD = struct.Struct("<QII")
_WIDTHS = "BHIQ"  # of 1, 2, 4 and 8 bytes

# ---------------------------------------------------------------------------------------------------- writing


class Record:
    """A sample in parts.

    Attributes:
        treedef: its containers, and the types of its leaves.
        streams: the buffers of its leaves.
        integers: shapes and lengths.

    Raises:
        SampleError: a part has no bytes of its own, and ``allow_pickle`` is False or it does not pickle; or a part would not
            come back the same: it is on a GPU, or requires a gradient.
    """

    def __init__(self, sample: Any, where: str = "sample", allow_pickle: bool = False) -> None:
        self.streams: tuple[list[Any], ...] = ([], [], [], [])
        self.integers: list[int] = []
        self._allow_pickle, self._bare = allow_pickle, 0
        try:
            self.treedef = self._take(sample, 0)
        except Unfit as error:
            raise sample_error(error, where, pickles=not allow_pickle) from error.__cause__

    def pack(self) -> tuple[bytes, list[int]]:
        """Return the bytes of the leaves, and all integers."""
        leaves, _, integers = self.parts()
        return b"".join(leaves), integers

    def parts(self) -> tuple[list[Any], int, list[int]]:
        """Return the buffers of the leaves, which may be the memory of the sample, their bytes, and all integers."""
        leaves: list[Any] = []
        lengths = []
        for stream in self.streams:
            if stream:
                leaves += stream
                lengths.append(sum([len(part) if type(part) is bytes else part.nbytes for part in stream]))
        integers, nbytes = [*lengths[:-1], *self.integers], sum(lengths)
        if self._bare > BARE_NODES:  # see NOTE [ Items without bytes ]
            leaves.append(bytes(padding := max(0, self._bare - BARE_NODES - nbytes - len(integers))))
            nbytes += padding
        return leaves, nbytes, integers

    def _take(self, value: Any, depth: int) -> TreeDef:
        """Add a value, pickled where it must be and may be, and return its treedef."""
        if not self._allow_pickle or type(value) in NUMBERS:
            return self._take_parts(value, depth)
        before = [len(stream) for stream in self.streams], self.integers, len(self.integers)
        bare = self._bare
        try:
            return self._take_parts(value, depth)
        except Unfit as error:
            if error.final:
                raise
            try:
                encoded = encode_pickle(value)
            except Unfit as failure:
                raise (error if error.steps else failure) from failure.__cause__
        lengths, self.integers, count = before
        for stream, length in zip(self.streams, lengths, strict=True):
            del stream[length:]
        del self.integers[count:]
        self._bare = bare
        return self._take_leaf(encoded)

    def _take_parts(self, value: Any, depth: int) -> TreeDef:
        cls = type(value)
        encode = ENCODERS.get(cls)
        if encode is not None:
            return self._take_leaf(encode(value))
        if (cls is list or cls is tuple) and value:
            return self._take_sequence(value, depth)
        parted = flatten_one(value)
        if parted is None:
            return self._take_leaf(encode_other(value))
        if depth >= DEEP:
            raise too_deep()
        container, parts = parted
        name, extra = describe(container, parts, self._allow_pickle)
        keys, coded = keys_to_literals(container.keys)
        children = []
        for key, part in zip(container.keys, parts, strict=True):
            try:
                children.append(self._take(part, depth + 1))
            except Unfit as error:
                raise error.within(container, key) from error.__cause__
        return ("in", container.kind, name, keys, extra, tuple(children), *coded)

    def _take_leaf(self, encoded: Encoded) -> TreeDef:
        treedef, stream, data, shape = encoded
        self.streams[stream].append(data)
        self.integers += shape
        return treedef

    def _take_sequence(self, values: Any, depth: int) -> TreeDef:
        numbers = encode_numbers(values)
        if numbers is not None:
            return self._take_leaf(numbers)
        if depth >= DEEP:
            raise too_deep()
        cls, outer, items = type(values), self.integers, []
        for position, value in enumerate(values):
            self.integers = []
            try:
                items.append((self._take(value, depth + 1), self.integers))
            except Unfit as error:
                raise error.within(Container(cls.__name__, cls, ()), position) from error.__cause__
        self.integers = outer
        kinds = sorted({treedef for treedef, _ in items}, key=repr)
        if cls is tuple and len(kinds) > 1:
            for _, own in items:
                self.integers += own
            children = tuple(treedef for treedef, _ in items)
            return "in", "tuple", "builtins:tuple", tuple(range(len(values))), (), children
        self.integers.append(len(values))
        self._bare += len(values) * max(map(bare_nodes, kinds))
        for treedef, own in items:  # of several kinds: each item has the number of its kind
            self.integers += own if len(kinds) == 1 else [kinds.index(treedef), *own]
        return "items", cls.__name__, tuple(kinds)


class PackedRecord(NamedTuple):
    """A sample as plain bytes and numbers, to send and to compare: the text of its treedef, its leaves, and all integers."""

    treedef: bytes
    data: bytes
    integers: list[int]

    @property
    def has_pickles(self) -> bool:
        """Whether a part is a pickle. Equal objects may have different pickles."""
        return b"'pickle'" in self.treedef


def pack_sample(sample: Any, where: str = "sample") -> PackedRecord:
    """Return a sample as a packed record; what has no bytes of its own is pickled. Raises SampleError as `Record`."""
    record = Record(sample, where, allow_pickle=True)
    return PackedRecord(write_treedef(record.treedef), *record.pack())


def pack_integers(integers: list[int]) -> tuple[bytes, int]:
    """Return integers as bytes, and the number for the head that says how many there are and how wide."""
    largest = max(integers, default=0)
    code = 0 if largest < 1 << 8 else 1 if largest < 1 << 16 else 2 if largest < 1 << 32 else 3
    packed = len(integers) << 3 | code
    return integers_codec(packed).pack(*integers), packed


@functools.lru_cache(maxsize=4096)
def integers_codec(packed: int) -> struct.Struct:
    """Return the layout of integers, given the number for the head."""
    return struct.Struct(f"<{packed >> 3}{_WIDTHS[packed & 3]}")


# ---------------------------------------------------------------------------------------------------- treedefs


@functools.lru_cache(maxsize=1024)
def bare_nodes(treedef: TreeDef) -> int:
    """Return how many bare nodes a value has, without those in its lists; see NOTE [ Items without bytes ]."""
    if treedef[0] == "in":
        return 1 + sum(map(bare_nodes, treedef[5]))
    if treedef[0] == "items":
        return 0
    kind = kind_of(treedef)
    return 0 if kind.dims else kind.bare(())


def parse_treedef(text: str) -> Any:
    """Return the treedef of a text. Raises ValueError, SyntaxError, RecursionError or MemoryError (of the parser)."""
    try:
        return ast.literal_eval(text)
    except SystemError:  # python/cpython#106905: a finalizer or another thread parsed something meanwhile
        return ast.literal_eval(text)


@functools.lru_cache(maxsize=1024)
def write_treedef(treedef: TreeDef) -> bytes:
    """Return a treedef as text.

    Raises:
        SampleError: the text could not be read again: a key or extra of a container is not a literal.
    """
    text = ""
    try:
        text = repr(treedef)
        good = repr(parse_treedef(text)) == text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        good = False
    if not good:
        raise SampleError(f"sample: its containers cannot be written down: {text:.300}. Use plain keys.")
    return text.encode("utf-8", "surrogatepass")
