"""Write samples of any size as records: the bytes of each leaf, and a treedef that says how to put them together.

NOTE [ Records ]
    A record has three parts: a head, the bytes of the leaves, and integers.

    head       16 bytes: bytes of the leaves as stored; number of the treedef; how many integers, how wide each is (1, 2, 4 or
               8 bytes, whatever the largest needs), and whether the leaves are compressed
    leaves     in four streams: first the values whose addresses should be multiples of 8 bytes, then 4, 2, 1. So each lies
               where it can be used in place, without gaps
    integers   bytes of each stream but the last; then the shapes and lengths, in the order of the treedef; and if the leaves
               are compressed, their bytes before

    The treedef holds all that samples of one kind have in common: containers, keys, types of leaves, dtypes, numbers of
    dimensions, and the order of these if it is not the order of C (then shapes are stored as the values lie in memory). It is
    stored once for all of them (see arena.py), as a nested tuple, written as a Python literal:

        ("in", kind, class, keys, (), children)       a container; with "coded" at the end if types of keys are written
        ("items", "list" or "tuple", kinds)           a list of any length; items of several kinds each name theirs by number
        ("tensor", "float32", 2), ("str",) ...        a leaf; see NOTE [ Kinds of leaves ]

    A list of numbers is a leaf, stored as an array. Keys are written unchanged if all are str, int, bytes or None. Else
    they are written with their types, enum members by class and name. An enum member that is a leaf has its name in its bytes,
    so one treedef serves all members.

NOTE [ Items without bytes ]
    A list of None, or of empty dicts, has a length and nothing else, so a forged length could make objects without end. So the
    bytes of a record limit its lists. A *bare* node is a container, or a leaf without bytes and sizes. All lists of a record
    may make `BARE_NODES` (samples/leaves/kind.py) of them, and one more for each byte and integer in it. If a sample has
    more, zeros are put behind its leaves.
"""

import ast
import contextlib
import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from stocache.errors import SampleError
from stocache.samples.codecs import Codec
from stocache.samples.containers import flatten_one, keys_to_literals, name_container
from stocache.samples.leaves.kind import Differs, Encoded, Leaves, Write
from stocache.samples.leaves.kinds import ENCODERS, encode_other, kind_of, narrowed
from stocache.samples.leaves.plain_kinds import NUMBERS, SEQUENCES, NumbersKind, PickleKind
from stocache.samples.leaves.type_lookup import Unfit
from stocache.samples.pytree import DEEP, Container, sample_error

TreeDef: TypeAlias = tuple[Any, ...]

HEAD = struct.Struct("<QII")
_WIDTHS = "BHIQ"  # of 1, 2, 4 and 8 bytes
COMPRESSED = 4
"""A bit of `EncodedRecord.packed`, between the width of the integers and their count."""


class EncodedSample(Leaves):
    """A sample in parts.

    Attributes:
        treedef: its containers, and the types of its leaves.

    Raises:
        SampleError: a part has no bytes of its own, and ``allow_pickle`` is False or it does not pickle; or a part would not
            come back the same: it is on a GPU, or requires a gradient.
    """

    def __init__(self, sample: Any, where: str = "sample", allow_pickle: bool = False, narrow: bool = False) -> None:
        super().__init__()
        self._allow_pickle, self._narrow = allow_pickle, narrow
        try:
            self.treedef = self._take(sample, 0)
        except Unfit as error:
            raise sample_error(error, where, pickles=not allow_pickle) from error.__cause__

    def _take(self, value: object, depth: int) -> TreeDef:
        """Add a value, pickled if it must be and may be, and return its treedef."""
        if not self._allow_pickle or type(value) in NUMBERS:
            return self._take_parts(value, depth)
        own, lengths = self.integers, self.lengths()
        try:
            return self._take_parts(value, depth)
        except Unfit as error:
            if error.final:
                raise
            try:
                encoded = PickleKind.encode(value)
            except Unfit as failure:
                raise (error if error.steps else failure) from failure.__cause__
        self.integers = own
        self.cut(lengths)
        return self._take_leaf(encoded)

    def _take_parts(self, value: object, depth: int) -> TreeDef:
        encode, parted = ENCODERS.get(type(value)), None
        if encode is not None:
            return self._take_leaf(encode(value))
        if type(value) in (list, tuple) and value:
            with contextlib.suppress(Differs):
                return self._take_leaf(NumbersKind.encode(value))
        elif (parted := flatten_one(value)) is None:
            return self._take_leaf(encode_other(value))
        if depth >= DEEP:
            raise Unfit(f"is a container within {DEEP} others, which is the limit", "Use fewer levels")
        if parted is None:
            return self._take_sequence(value, depth)
        container, parts = parted
        name = name_container(container, parts)
        keys, coded = keys_to_literals(container.keys)
        children, pickles = [], self._allow_pickle
        self._allow_pickle = pickles and container.kind != "dataclass"  # it is pickled whole: a part may refer to it
        try:
            for key, part in zip(container.keys, parts, strict=True):
                try:
                    children.append(self._take(part, depth + 1))
                except Unfit as error:
                    raise error.within(container, key) from error.__cause__
        finally:
            self._allow_pickle = pickles
        return ("in", container.kind, name, keys, (), tuple(children), *coded)

    def _take_leaf(self, encoded: Encoded) -> TreeDef:
        treedef, stream, data, shape = narrowed(encoded) if self._narrow else encoded
        self.streams[stream].append(data)
        self.integers += shape
        return treedef

    def _take_sequence(self, values: Any, depth: int) -> TreeDef:
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
        self.bare += len(values) * max(map(bare_nodes, kinds))
        for treedef, own in items:  # of several kinds: each item has the number of its kind
            self.integers += own if len(kinds) == 1 else [kinds.index(treedef), *own]
        return "items", cls.__name__, tuple(kinds)


class RecordEncoder:
    """Takes samples apart as `EncodedSample` does, each structure by functions that are made once for it.

    To find them, it looks at the types of a sample and its parts. A sample of a new structure goes to `EncodedSample`.
    With ``narrow``, leaves that are made of small integers are stored as these.
    """

    def __init__(self, allow_pickle: bool, codec: Codec | None = None, narrow: bool = False) -> None:
        self._allow_pickle, self._codec, self._narrow = allow_pickle, codec, narrow
        self._writers: dict[Any, tuple[tuple[Write, bytes], ...]] = {}

    def encode(self, sample: object, where: str) -> tuple[bytes, Leaves]:
        """Return the text of a sample's treedef, and its leaves. Raises SampleError as `EncodedSample`."""
        key = _key(sample)
        known = self._writers.get(key, ())
        for write, text in known:
            leaves = Leaves()
            try:
                write(sample, leaves)
            except (Differs, Unfit):
                continue
            return text, leaves
        record = EncodedSample(sample, where, self._allow_pickle, self._narrow)
        text = write_treedef(record.treedef)
        if len(known) < _ALTERNATIVES and (known or len(self._writers) < _KEYS):
            self._writers[key] = *known, (_compile(record.treedef), text)
        return text, record

    def pack(self, sample: object, where: str) -> "EncodedRecord":
        """Return the parts of a sample's record, compressed if that makes it smaller. Raises SampleError as `encode`."""
        treedef, sample_leaves = self.encode(sample, where)
        leaves, nbytes, integers = sample_leaves.parts()
        smaller = self._codec.compress(b"".join(leaves)) if self._codec is not None else None
        if smaller is not None:
            leaves, nbytes, integers = [smaller], len(smaller), [*integers, nbytes]
        tail, packed = pack_integers(integers)
        packed |= COMPRESSED * (smaller is not None)
        return EncodedRecord(treedef, leaves, nbytes, packed, tail + bytes(-(nbytes + len(tail)) & 7))


_PARTS = 16  # the most parts of a sample whose types are in its key
_KEYS, _ALTERNATIVES = 1024, 4  # the most keys, and structures for each of them


def _key(sample: Any) -> Any:
    """Return the key of samples of one structure: their type and the types of their parts; of lists, the type of the first."""
    cls = type(sample)
    parts: Any = sample.values() if cls is dict else sample if cls is tuple else sample[:1] if cls is list else ()
    return (cls, *map(type, parts)) if len(parts) <= _PARTS else cls


def _compile(treedef: TreeDef) -> Write:
    """Return the function that takes a value of a treedef."""
    if treedef[0] == "in":
        return _write_container(treedef)
    if treedef[0] == "items":
        return _write_items(treedef, [_compile(item) for item in treedef[2]])
    return kind_of(treedef).writer(treedef)


def _write_container(treedef: TreeDef) -> Write:
    _, kind, name, keys, _, children, *coded = treedef
    writes = [_compile(child) for child in children]
    types, literals = list(map(type, keys)), (keys, tuple(coded))

    def write_dict(value: object, leaves: Leaves) -> None:
        if type(value) is not dict or tuple(value) != keys or list(map(type, value)) != types:
            raise Differs
        for write, part in zip(writes, value.values(), strict=True):
            write(part, leaves)

    def write_tuple(value: object, leaves: Leaves) -> None:
        if type(value) is not tuple or len(value) != len(writes):
            raise Differs
        for write, part in zip(writes, value, strict=True):
            write(part, leaves)

    def write_other(value: object, leaves: Leaves) -> None:
        parted = flatten_one(value) if type(value) not in ENCODERS else None
        if parted is None or parted[0].kind != kind or len(parted[1]) != len(writes):
            raise Differs
        container, parts = parted
        if name_container(container, parts) != name or keys_to_literals(container.keys) != literals:
            raise Differs
        for write, part in zip(writes, parts, strict=True):
            write(part, leaves)

    if name == "builtins:dict" and not coded:
        return write_dict
    return write_tuple if name == "builtins:tuple" else write_other


def _write_items(treedef: TreeDef, writes: list[Write]) -> Write:
    cls: Any = SEQUENCES[treedef[1]]
    bare = max(map(bare_nodes, treedef[2]))
    first, *others = writes

    def write_items(value: Any, leaves: Leaves) -> None:
        if type(value) is not cls or not value:
            raise Differs
        leaves.bare += len(value) * bare
        leaves.integers.append(len(value))
        if not others:
            for part in value:
                first(part, leaves)
        elif {write_one(part, leaves) for part in value} != set(range(len(writes))):
            raise Differs  # it has fewer kinds

    def write_one(part: object, leaves: Leaves) -> int:
        lengths = leaves.lengths()
        for number, write in enumerate(writes):
            leaves.integers.append(number)
            try:
                write(part, leaves)
            except (Differs, Unfit):
                leaves.cut(lengths)
            else:
                return number
        raise Differs

    return write_items


class EncodedRecord(NamedTuple):
    """The parts of a record, without its head and the number of its treedef.

    Attributes:
        treedef: as text.
        leaves: buffers, which may be the memory of the sample itself: write the record before the sample is changed.
        nbytes: bytes of the leaves.
        packed: the number for the head that describes the integers.
        tail: the integers, up to a multiple of 8 bytes of the record.
        cost_s: the seconds that the sample took to load; None if that is not known. It is not stored.
    """

    treedef: bytes
    leaves: Sequence[Any]
    nbytes: int
    packed: int
    tail: bytes
    cost_s: float | None = None

    @property
    def room(self) -> int:
        """Bytes of the arena that the record takes."""
        return HEAD.size + self.nbytes + len(self.tail)

    @property
    def integers(self) -> tuple[int, ...]:
        """The integers."""
        return integers_codec(self.packed).unpack_from(self.tail)


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


@functools.lru_cache(maxsize=1024)
def bare_nodes(treedef: TreeDef) -> int:
    """Return how many bare nodes a value has, without the nodes in its lists; see NOTE [ Items without bytes ]."""
    if treedef[0] == "in":
        return 1 + sum(map(bare_nodes, treedef[5]))
    if treedef[0] == "items":
        return 0
    kind = kind_of(treedef)
    return int(not kind.dims and not kind.nbytes(()))


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
    text = repr(treedef)
    try:
        good = repr(parse_treedef(text)) == text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        good = False
    if not good:
        raise SampleError(f"sample: its containers cannot be written down: {text:.300}. Use plain keys.")
    return text.encode("utf-8", "surrogatepass")
