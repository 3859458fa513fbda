"""Describe samples of one structure: a tree of containers whose leaves each have a fixed dtype and shape.

A cache of these samples has one column of memory per leaf. `Structure` takes a sample apart into the bytes of its leaves,
checks every value against its leaf, and puts values together again into the same containers.

A leaf is a tensor, a numpy array or scalar, or a Python int, float, bool or complex. A value is converted only if the result
equals it.

NOTE [ Rows ]
    A row has the leaves of a record (NOTE [ Records ]), in its streams, up to a multiple of 8 bytes. The head and the integers
    are the same for all samples of a structure, and lie elsewhere. So a row is a record, and the leaves of a slot, in other
    places.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from stocache.errors import SampleError
from stocache.samples.containers import flatten_one
from stocache.samples.leaves.arrays import TensorKind
from stocache.samples.leaves.kind import Leaf
from stocache.samples.leaves.kinds import NarrowKind, leaf_of, numbers_of
from stocache.samples.leaves.narrow import Narrowing, find
from stocache.samples.leaves.type_lookup import TORCH_DTYPES, Unfit, a, class_text
from stocache.samples.pytree import Container, Tree, containers_of, joiner_of, key_text, leaves_of, sample_error, with_leaves
from stocache.samples.record_encoder import RecordEncoder

Node: TypeAlias = Tree | Leaf


def _build(sample: object, leaf: Callable[[Any], Leaf]) -> Node:
    parted = flatten_one(sample)
    if parted is None:
        return leaf(sample)
    container, parts = parted
    children = []
    for key, part in zip(container.keys, parts, strict=True):
        try:
            children.append(_build(part, leaf))
        except Unfit as error:
            raise error.within(container, key) from error.__cause__
    return Tree(container, tuple(children))


@dataclass(frozen=True)
class Structure:
    """The structure that all samples of a cache share. Make one with `of` or `from_dims`."""

    root: Node

    @classmethod
    def of(cls, sample: object, *, exact: bool = False) -> "Structure":
        """Return the structure of ``sample``.

        An ``exact`` one takes only samples that come back the same in every respect: no numpy array for a tensor, no GPU, no
        gradient.

        Raises:
            SampleError: a leaf has no fixed size, or (``exact``) would not come back the same.
        """
        try:
            return cls(_build(sample, partial(leaf_of, exact=exact)))
        except Unfit as error:
            raise sample_error(error, "sample") from error.__cause__

    @classmethod
    def from_dims(cls, data_dims: Any, dtype: Any) -> "Structure":
        """Return the structure of tensors with shape ``data_dims``: a shape, or a dict or tuple of shapes.

        ``dtype`` is one torch dtype for all, or the same containers holding one dtype each.

        Raises:
            SampleError: the shapes are not shapes, the dtypes not dtypes, or their containers differ.
        """
        if _is_shape(data_dims):
            shape = _shape(data_dims)
            return cls(Leaf(TensorKind(_checked_dtype(dtype), len(shape)), shape))
        parted = flatten_one(data_dims)
        if parted is None or not parted[1] or any(isinstance(part, int) for part in parted[1]):
            raise SampleError(f"data_dims={data_dims!r} is not a shape such as (3, 64, 64), nor a dict or tuple of shapes.")
        container, dims = parted
        dtypes = [dtype] * len(dims)
        if isinstance(dtype, dict | tuple | list):
            given = flatten_one(dtype)
            if given is None or given[0].cls is not container.cls or set(given[0].keys) != set(container.keys):
                raise SampleError(f"dtype={dtype!r} does not match data_dims={data_dims!r}. Give one dtype per shape.")
            by_key = dict(zip(given[0].keys, given[1], strict=True))
            dtypes = [by_key[key] for key in container.keys]
        return cls(Tree(container, tuple(cls.from_dims(d, t).root for d, t in zip(dims, dtypes, strict=True))))

    def narrowed(self, samples: Sequence[object]) -> "Structure":
        """Return a structure with a `NarrowKind` for values that are small integers in all ``samples``, or all but one."""
        values = self.part(samples)
        if not samples or values is None:
            return self
        return Structure(with_leaves(self.root, map(_narrowest, self.leaves, values)))

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves, in the order in which `encode` returns and `unflatten` takes them."""
        return leaves_of(self.root)

    @property
    def containers(self) -> list[Container]:
        """The containers, from the outside in."""
        return containers_of(self.root)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def is_narrow(self) -> bool:
        """Whether a leaf is stored in fewer bytes than it has in a batch."""
        return any(leaf.nbytes != leaf.batch_bytes for leaf in self.leaves)

    def encode(self, sample: object, where: str = "sample") -> list[Any]:
        """Return the bytes of each leaf of ``sample``, as buffers. ``where`` names the sample in errors.

        Raises:
            SampleError: a container or a leaf differs from this structure.
        """
        try:
            if not isinstance(self.root, Tree):
                return [self.root.encode(sample)]
            buffers: list[Any] = []
            _flatten(self.root, sample, lambda leaf, value: buffers.append(leaf.encode(value)))
            return buffers
        except Unfit as error:
            raise sample_error(error, where) from error.__cause__

    def part(self, samples: Sequence[object]) -> list[Sequence[Any]] | None:
        """Return the values of each leaf of many samples, unchecked; None if their containers differ, or are of a rare kind."""
        return _part(self.root, samples)

    def columns(self, batch: object, where: str = "batch") -> list[Any]:
        """Return the values of the leaves of a batch, unchecked. Its containers must be the containers of this structure."""
        values: list[Any] = []
        try:
            _flatten(self.root, batch, lambda leaf, value: values.append(value))
        except Unfit as error:
            raise sample_error(error, where, "batch") from error.__cause__
        return values

    def unflatten(self, values: list[Any]) -> Any:
        """Return the containers of this structure around ``values``, one per leaf."""
        return self.joiner()(values)

    def joiner(self) -> Callable[[Any], Any]:
        """Return the function that puts a sequence of values, one per leaf, into the containers of this structure."""
        return joiner_of(self.root)

    def example(self) -> Any:
        """Return a sample of this structure, whose values are zeros and lie in memory as the leaves of the cache do."""
        return self.unflatten([leaf.decoder()(bytearray(leaf.nbytes), 0, False) for leaf in self.leaves])

    @property
    def identity(self) -> str:
        """A text with whole dtypes, types of keys and modules of classes. Structures that differ have different texts.

        One exception: two classes that functions define under one name have the same text.
        """
        return _text(self.root, class_text)

    def __str__(self) -> str:
        return _text(self.root)


def _text(node: Node, name: Callable[[Any], str] = operator.attrgetter("__name__")) -> str:
    """Return a tree as text, given what to call the classes of its containers."""
    if not isinstance(node, Tree):
        return str(node)
    parts = zip(map(key_text, node.container.keys), node.children, strict=True)
    return f"{name(node.container.cls)}({', '.join(f'{key}: {_text(child, name)}' for key, child in parts)})"


def _narrowest(leaf: Leaf, values: Sequence[object]) -> Leaf:
    """Return the leaf that stores some values in the fewest bytes."""
    dtype, narrowing = leaf.kind.array_dtype, None
    if dtype is not None and leaf.nbytes:
        with contextlib.suppress(Unfit):  # a value differs
            narrowing = _way_of_most([numbers_of(leaf.encode(value), dtype) for value in values], leaf.stored)
    return leaf if narrowing is None else Leaf(NarrowKind(leaf.kind, narrowing), leaf.stored, leaf.exact)


def _way_of_most(values: list[NDArray[Any]], shape: tuple[int, ...]) -> Narrowing | None:
    """Return the way to store all of some arrays, or all but one: an odd sample has no part in what the others cost."""
    half = len(values) // 2
    ways = [find(values, shape)]
    if ways[0] is None and half > 1:
        ways = [find(values[:half], shape), find(values[half:], shape)]
    for way in ways:
        if way is not None and sum(way.narrow(array.reshape(-1)) is None for array in values) <= 1:
            return way
    return None


def _flatten(node: Node, sample: Any, take: Callable[[Leaf, Any], None]) -> None:
    if not isinstance(node, Tree):
        take(node, sample)
        return
    wanted, parted = node.container, flatten_one(sample)
    if parted is None or parted[0].cls is not wanted.cls:
        raise Unfit(f"is {a(sample)}, the cache holds {_text(node)}")
    container, parts = parted
    alike = _keys_alike(container, wanted)
    if container != wanted or not alike:
        if container.cls is not dict or not alike:
            entries, held = list(container.keys), list(wanted.keys)
            raise Unfit(f"has the entries {entries}, the cache holds the entries {held}")
        parts = [sample[key] for key in wanted.keys]
    for key, child, part in zip(wanted.keys, node.children, parts, strict=True):
        try:
            _flatten(child, part, take)
        except Unfit as error:
            raise error.within(wanted, key) from error.__cause__


def _part(node: Node, samples: Sequence[Any]) -> list[Sequence[Any]] | None:
    if not isinstance(node, Tree):
        return [samples]
    kind, keys = node.container.kind, list(node.container.keys)
    parts: Iterable[Sequence[Any]]
    if set(map(type, samples)) != {node.container.cls}:
        return None
    if kind in ("tuple", "list", "namedtuple") and set(map(len, samples)) == {len(keys)}:
        parts = zip(*samples, strict=True)
    elif kind == "dict" and all(list(sample) == keys for sample in samples) and set(map(type, chain(keys, *samples))) == {str}:
        parts = zip(*(sample.values() for sample in samples), strict=True)
    elif kind == "memmap":
        parts = [list(map(np.asarray, samples))]
    else:
        return None
    columns: list[Sequence[Any]] = []
    for child, values in zip(node.children, parts, strict=False):  # no parts if there are no children
        inner = _part(child, values)
        if inner is None:
            return None
        columns += inner
    return columns


def _keys_alike(container: Container, wanted: Container) -> bool:
    """Return whether two containers have the same keys, in any order. Types count: 1 is not True, "a" is not a str-Enum."""
    if container.kind in ("list", "tuple"):
        return len(container.keys) == len(wanted.keys)
    own, others = ({key: type(key) for key in keys} for keys in (container.keys, wanted.keys))
    return own == others


def _checked_dtype(dtype: Any) -> torch.dtype:
    """Return a torch dtype whose values each take whole bytes. Raises SampleError for others."""
    if not isinstance(dtype, torch.dtype):
        raise SampleError(f"dtype {dtype!r} is not a torch dtype. Use for example torch.uint8.")
    if dtype not in TORCH_DTYPES.values():
        raise SampleError(f"dtype {dtype} cannot be cached: quantized tensors hold their scale outside of their bytes.")
    return dtype


def _is_shape(dims: Any) -> bool:
    return isinstance(dims, tuple | list) and all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in dims)


def _shape(dims: Sequence[int]) -> tuple[int, ...]:
    if any(n < 0 for n in dims):
        raise SampleError(f"data_dims={tuple(dims)} has a negative size.")
    return tuple(int(n) for n in dims)


class RowLayout:
    """Where the leaves of a sample lie in a row.

    Attributes:
        nbytes: bytes of a row.
        order: the numbers of the leaves, in the order in which they lie.
        begins: of each leaf, where it begins.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure, self._sizes = structure, [leaf.nbytes for leaf in structure.leaves]
        self.order = sorted(range(len(self._sizes)), key=lambda number: structure.leaves[number].kind.stream)
        self.begins, self.nbytes = [0] * len(self._sizes), 0
        for number in self.order:
            self.begins[number] = self.nbytes
            self.nbytes += self._sizes[number]
        self.gap = -self.nbytes & 7
        self.nbytes += self.gap

    @cached_property
    def row(self) -> tuple[bytes, int, tuple[int, ...]] | None:
        """The treedef of the samples, the bytes of their leaves, and their integers.

        None if leaves are narrow, or a class of the samples refuses the zeros of an example.
        """
        if not self._structure.is_narrow:
            with contextlib.suppress(Exception):
                record = RecordEncoder(allow_pickle=False).pack(self._structure.example(), "example")
                return record.treedef, record.nbytes, record.integers
        return None

    def leaves_of(self, row: Any) -> list[Any]:
        """Return the bytes of each leaf in a row, as `Structure.encode` returns them."""
        return [row[begin : begin + size] for begin, size in zip(self.begins, self._sizes, strict=True)]
