"""What the kinds of leaves have in common: how a value becomes bytes, and is read from a record or a row.

NOTE [ Orders ]
    A tensor or array may be dense, but have its dimensions in another order in memory: channels_last, Fortran order, a permuted
    image. It is stored as it lies in memory, and comes back with the same strides. Its *order* lists the dimensions from the
    largest stride to the smallest; it is None for the order of C. A value that is not dense is stored in the order of C.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias, cast

from stocache.samples.leaves.type_lookup import Unfit, a

DimOrder: TypeAlias = tuple[int, ...] | None
"""See NOTE [ Orders ]."""


Make: TypeAlias = Callable[..., Any]
"""Makes a leaf, given a buffer, the position in it, the number of values there, their shape as they lie, and perhaps True for a
private copy. Else it may keep the buffer: tensors and arrays are views of it."""


BARE_NODES = 1 << 16
"""See NOTE [ Items without bytes ]."""


Description: TypeAlias = tuple[Any, ...]
"""The name of a kind, and the facts that its constructor takes."""


Encoded: TypeAlias = tuple[Description, int, Any, tuple[int, ...]]
"""A leaf: its description, the stream of its bytes in a record, its bytes, and its shape as they lie."""


Write: TypeAlias = Callable[[Any, "Leaves"], None]
"""Takes a value of one structure, and adds its leaves. Raises Differs or Unfit if the value is not of that structure."""


ALIGNMENTS = (8, 4, 2, 1)  # of the streams of a record, by number


BYTES = 3  # the stream of values that need no alignment


DAMAGED_RECORD = "the cache is damaged: a sample reaches beyond its record."


class Differs(Exception):
    """A value is not of the structure that a `Write` was made for."""


class Leaves:
    """The state of writing one record.

    Attributes:
        streams: the buffers of the leaves, which may be the memory of the sample.
        integers: shapes and lengths.
        bare: bare nodes in lists; see NOTE [ Items without bytes ].
    """

    __slots__ = ("bare", "integers", "streams")

    def __init__(self) -> None:
        self.streams: tuple[list[Any], ...] = ([], [], [], [])
        self.integers: list[int] = []
        self.bare = 0

    def pack(self) -> tuple[bytes, list[int]]:
        """Return the bytes of the leaves, and all integers."""
        leaves, _, integers = self.parts()
        return b"".join(leaves), integers

    def parts(self) -> tuple[list[Any], int, list[int]]:
        """Return the buffers of the leaves, their bytes, and all integers."""
        leaves: list[Any] = []
        lengths = []
        for stream in self.streams:
            if stream:
                leaves += stream
                lengths.append(sum([len(part) if type(part) is bytes else part.nbytes for part in stream]))
        integers, nbytes = [*lengths[:-1], *self.integers], sum(lengths)
        if self.bare > BARE_NODES:  # see NOTE [ Items without bytes ]
            leaves.append(bytes(padding := max(0, self.bare - BARE_NODES - nbytes - len(integers))))
            nbytes += padding
        return leaves, nbytes, integers

    def lengths(self) -> tuple[list[int], int, int]:
        """Return the present lengths, for `cut`."""
        return list(map(len, self.streams)), len(self.integers), self.bare

    def cut(self, lengths: tuple[list[int], int, int]) -> None:
        """Drop everything that was added since ``lengths``."""
        streams, integers, self.bare = lengths
        for stream, length in zip(self.streams, streams, strict=True):
            del stream[length:]
        del self.integers[integers:]


Step: TypeAlias = tuple[int, int, int, Callable[..., Any]]
"""How a leaf is read from a record: its stream; how many sizes it has; bytes of one value; and a `Make`.

In place of the number of sizes: NUMBER, and the last is `struct.Struct.unpack_from` of one number; TEXT, one size, and the
last makes a value of its bytes; ITEMS, a list, and the last is the function that reads it.
"""


NUMBER, TEXT, ITEMS = -1, -2, -3


class Kind(ABC):
    """A kind of leaf.

    Attributes:
        name: the name of the kind in records.
        types: its values are of these exact types,
        base: or of any subclass of this one.
        stream: the stream of a record that holds the bytes.
        itemsize: bytes of one value.
        dims: how many sizes a record holds for each leaf.
        order: see NOTE [ Orders ].
        array_dtype: the dtype that numpy has for the values of a tensor or array; None for a kind of other values.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[type, ...]] = ()
    base: ClassVar[type | None] = None
    stream: Any = BYTES
    itemsize: Any = 1
    dims: Any = 1
    order: Any = None
    array_dtype: Any = None

    @classmethod
    def parse(cls, *facts: Any) -> "Kind":
        """Return the kind that facts of a description describe.

        Raises:
            ValueError, TypeError, LookupError: they describe nothing: they may be forged.
        """
        return cls(*facts)

    @classmethod
    @abstractmethod
    def encode(cls, value: object) -> Encoded:
        """Return a value, encoded. Raises Unfit if it would not come back the same."""

    def holds(self, value: object) -> bool:
        """Return whether `encode` is for values of this type. They may be of another kind all the same."""
        return type(value) in self.types or (self.base is not None and isinstance(value, self.base))

    def writer(self, description: Description) -> Write:
        """Return the function that adds a leaf to a record as `encode` returns it; ``description`` is the kind's."""
        stream, holds, encode = self.stream, self.holds, self.encode

        def write(value: object, leaves: Leaves) -> None:
            if not holds(value):
                raise Differs
            its, _, data, shape = encode(value)
            if its != description:
                raise Differs
            leaves.streams[stream].append(data)
            leaves.integers.extend(shape)

        return write

    def step(self) -> Step:
        """Return how a leaf is read from a record. Raises Unresolved as `maker`."""
        return self.stream, self.dims, self.itemsize, self.maker()

    @abstractmethod
    def maker(self) -> Make:
        """Return the function that makes a leaf of bytes.

        Raises:
            Unresolved: its class is not here.
        """

    @property
    def back(self) -> DimOrder:
        """The permutation of the dimensions in memory to those of the value; None if they are the same."""
        return None if self.order is None else tuple(sorted(range(self.dims), key=self.order.__getitem__))

    def nbytes(self, stored: tuple[int, ...]) -> int:
        """Return the bytes of a value, given its shape in memory."""
        return math.prod(stored) * int(self.itemsize)

    def pack(self, value: Any, leaf: "Leaf") -> Any:
        """Return the bytes of a value of a row, a buffer. Raises Unfit if it is not as its leaf says."""
        raise NotImplementedError

    def text(self, shape: tuple[int, ...]) -> str:
        """Return the kind of values of a shape, for the user."""
        return f"{list(shape)}" if self.order is None else f"{list(shape)} order {list(self.order)}"


@dataclass(frozen=True)
class Leaf:
    """A leaf of samples of one structure.

    Attributes:
        kind: its kind, which has `Kind.pack`.
        stored: the shape of a value as it lies in memory.
        exact: whether it takes only values that come back the same.
    """

    kind: Any
    stored: tuple[int, ...] = ()
    exact: bool = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of a value."""
        return self.stored if self.kind.back is None else tuple(self.stored[dim] for dim in self.kind.back)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return int(self.kind.nbytes(self.stored))

    @property
    def batch_bytes(self) -> int:
        """Bytes of one value in a batch: more than `nbytes` if it is made of small integers."""
        return int(getattr(self.kind, "wide", self.kind).nbytes(self.stored))

    def encode(self, value: object) -> Any:
        """Return the bytes of a value, a buffer. Raises Unfit if it has a different type, dtype or shape, or no data."""
        return self.kind.pack(value, self)

    def decoder(self) -> Callable[..., Any]:
        """Return the function that makes a value, given a buffer, the position of its bytes there, and whether to copy them."""
        make, count, stored = self.kind.maker(), math.prod(self.stored), self.stored
        return lambda buffer, at, copy: make(buffer, at, count, stored, copy)

    def __str__(self) -> str:
        return str(self.kind.text(self.shape))


class DenseKind(Kind):
    """A kind of values of one dtype of torch or numpy, one after the other.

    Attributes:
        dtype: the dtype.
    """

    dtype: Any

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return int(self.dtype.itemsize)

    @property
    def stream(self) -> int:
        """The stream of values whose addresses should be multiples of the dtype's alignment."""
        return stream_of(self.dtype)

    def writer(self, description: Description) -> Write:
        """See `Kind.writer`. Most values are contiguous, and their own buffers."""
        rest, stream, dims, dtype = super().writer(description), self.stream, self.dims, self.array_dtype
        is_array, cls = self.name == "array", cast(Any, self.base)

        def write(value: Any, leaves: Leaves) -> None:
            if type(value) is cls:
                try:
                    array = value if is_array else value.numpy()
                except (TypeError, RuntimeError):  # see tensor_bytes
                    return rest(value, leaves)
                if array.dtype == dtype and array.ndim == dims and array.flags.c_contiguous:
                    leaves.streams[stream].append(array)
                    leaves.integers.extend(array.shape)
                    return None
            return rest(value, leaves)

        is_buffer = self.order is None and dtype is not None and dtype.kind in "biufc"  # other values need not be buffers
        return write if is_buffer else rest


def stream_of(dtype: Any) -> int:
    """Return the stream of values of a dtype of torch or numpy."""
    alignment = getattr(dtype, "alignment", dtype.itemsize)
    is_record = getattr(dtype, "kind", "") == "V"  # whose fields need not be aligned
    return ALIGNMENTS.index(min(alignment, 8)) if alignment in (1, 2, 4, 8, 16) and not is_record else BYTES


def no_bytes(value: object) -> Unfit:
    """Return the error of a value that is not of any kind that can be stored."""
    return Unfit(
        f"is {a(value)}, which has no bytes of its own",
        "Turn it into tensors, arrays, numbers, str or bytes, in dicts, lists, tuples or dataclasses, before the cache",
    )
