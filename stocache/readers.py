"""Records read back into samples; see NOTE [ Records ]."""

import math
import pickle
from collections.abc import Callable, Iterator
from ctypes import memmove
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.containers import Container
from stocache.errors import SegmentError
from stocache.kinds import FROM_BYTES, class_of, member_of
from stocache.records import (
    ALIGNMENTS,
    BYTES,
    NUMBER_TYPES,
    NUMBERS,
    Skeleton,
    array_stream,
    decoded,
    parse_skeleton,
    read_extra,
    stream_of,
    thaw,
)
from stocache.structure import NUMBER_CODECS, inverse

_DAMAGED = "the cache is damaged: a sample reaches beyond its record."


class Reader:
    """Where reading a record stands.

    Attributes:
        memory: the buffer the leaves are in.
        address: where it begins in memory.
        at: where each stream stands.
        end: where the leaves end.
        integers: the iterator over those that are left.
        copy: whether tensors and arrays are to be private copies; else views of ``memory``.
    """

    __slots__ = ("address", "at", "copy", "end", "integers", "memory")

    def __init__(self, memory: Any, address: int, at: list[int], end: int, integers: Iterator[int], copy: bool) -> None:
        self.memory, self.address, self.at, self.end, self.integers, self.copy = memory, address, at, end, integers, copy

    def take(self, stream: int, nbytes: int) -> int:
        """Return where the next ``nbytes`` of a stream are."""
        at = self.at[stream]
        after = self.at[stream] = at + nbytes
        if after > self.end:
            raise SegmentError(_DAMAGED)
        return at


_Read: TypeAlias = Callable[[Reader], Any]


def reader_of(text: bytes, allow_pickle: bool) -> Callable[[Any, int, int, int, tuple[int, ...], bool], Any]:
    """Return the function that reads samples of a skeleton: ``read(memory, address, start, nbytes, integers, copy)``.

    Raises:
        SegmentError: the text is no skeleton, or of classes that are not here or have changed; or something was pickled, and
            ``allow_pickle`` is False.
    """
    try:
        skeleton = parse_skeleton(text.decode("utf-8", "surrogatepass"))
        streams = sorted(_streams(skeleton))
        read = _compile(skeleton, allow_pickle)
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, IndexError, ImportError) as error:
        raise SegmentError(f"the cache holds samples that cannot be read here: {error}. Skeleton: {text[:200]!r}") from error
    inner, last = streams[:-1], streams[-1] if streams else 0
    plan, join = _plan(skeleton)

    def read_record(memory: Any, address: int, start: int, nbytes: int, integers: tuple[int, ...], copy: bool) -> Any:
        at, end = [start] * len(ALIGNMENTS), start + nbytes
        for length, stream in zip(integers, inner):  # noqa: B905  integers has more than these
            at[stream] = start
            start += length
        at[last] = start
        if not copy or not plan:
            return read(Reader(memory, address, at, end, iter(integers[len(inner) :]), copy))
        values, used = [], len(inner)
        for stream, new, dims, unpack, size in plan:
            here = at[stream]
            if unpack is None:
                value = new(*integers[used : used + dims]) if dims else new(())
                used += dims
                size = value.nbytes
                if here + size > end:
                    raise SegmentError(_DAMAGED)
                memmove(value.data_ptr(), address + here, size)
            else:
                (value,) = unpack(memory, here)
            at[stream] = here + size
            values.append(value)
        return join(values)

    return read_record


def _plan(skeleton: Skeleton) -> tuple[list[tuple[int, Any, int, Any, int]], Callable[[list[Any]], Any]]:
    """Return the leaves of one container of tensors and numbers, and what puts them together; no leaves for all else.

    Such samples, (image, label) and the like, are most there are, and reading them in one loop takes two thirds of the time.
    """
    if skeleton[0] != "in":
        return [], list
    children = skeleton[5]
    plan: list[tuple[int, Any, int, Any, int]] = []
    for child in children:
        if child[0] == "tensor":
            dtype = getattr(torch, child[1])
            plan.append((stream_of(dtype.itemsize), _new_tensor(dtype, *child[2:]), child[2], None, 0))
        elif child[0] == "number" and child[1] != "complex":
            codec = NUMBER_CODECS[NUMBER_TYPES[child[1]]]
            plan.append((NUMBERS[NUMBER_TYPES[child[1]]][1], None, 0, codec.unpack_from, codec.size))
        else:
            return [], list
    return plan, _container(skeleton).joiner()


def _new_tensor(dtype: torch.dtype, dims: int, order: Any = None) -> Callable[..., Tensor]:
    """Return what makes an uninitialised tensor, given the sizes of its dimensions as they lie in memory."""
    new: Callable[..., Tensor] = torch.empty(0, dtype=dtype).new_empty
    if order is None:
        return new
    back = inverse(order, dims)
    return lambda *stored: new(*stored).permute(back)


def _streams(skeleton: Skeleton) -> set[int]:
    """Return the streams that a skeleton has leaves in."""
    kind = skeleton[0]
    if kind == "in":
        return set().union(*map(_streams, skeleton[5]))
    if kind == "items":
        return set().union(*map(_streams, skeleton[2]))
    if kind == "tensor":
        return {stream_of(getattr(torch, skeleton[1]).itemsize)}
    if kind in ("array", "scalar"):
        return {array_stream(thaw(skeleton[1]))}
    if kind in ("number", "numbers"):
        return {NUMBERS[NUMBER_TYPES[skeleton[-1]]][1]}
    return {BYTES}


def _compile(skeleton: Skeleton, allow_pickle: bool) -> _Read:
    """Return the function that reads what a skeleton describes."""
    kind, *rest = skeleton
    if kind == "in":
        return _read_container(skeleton, allow_pickle)
    if kind == "items":
        return _read_items(list if rest[0] == "list" else tuple, [_compile(item, allow_pickle) for item in rest[1]])
    if kind == "tensor":
        return _read_tensor(getattr(torch, rest[0]), *rest[1:])
    if kind in ("array", "scalar"):
        return _read_array(thaw(rest[0]), kind == "scalar", *rest[1:])
    if kind == "number":
        return _read_number(NUMBER_TYPES[rest[0]])
    if kind == "numbers":
        return _read_numbers(list if rest[0] == "list" else tuple, *NUMBERS[NUMBER_TYPES[rest[1]]])
    if kind == "enum":
        cls = class_of(rest[0])
        return _read_bytes(lambda data: member_of(cls, str(data, "utf-8")))
    if kind == "pickle":
        if not allow_pickle:
            raise ValueError("something in them was pickled, which needs allow_pickle=True")
        return _read_bytes(pickle.loads)
    return _read_bytes(FROM_BYTES[kind])


_PIXELS = 4  # position among the parts of an image


def _read_container(skeleton: Skeleton, allow_pickle: bool) -> _Read:
    join, reads = _container(skeleton).joiner(), [_compile(child, allow_pickle) for child in skeleton[5]]
    if skeleton[1] == "image" and skeleton[5][_PIXELS] == ("bytes",):  # which the image copies
        reads[_PIXELS] = _read_bytes(lambda view: view)
    return lambda reader: join([read(reader) for read in reads])


def _container(skeleton: Skeleton) -> Container:
    """Return the container of a skeleton.

    Raises:
        ValueError: its class has changed.
    """
    _, kind, name, keys, extra, _, *coded = skeleton
    cls = class_of(name)
    if kind == "namedtuple" and cls._fields != keys:
        raise ValueError(f"{name} had the fields {list(keys)}, it has {list(cls._fields)}")
    return Container(kind, cls, tuple(map(decoded, keys)) if coded else keys, read_extra(kind, extra))


def _read_items(cls: type, reads: list[_Read]) -> _Read:
    if len(reads) == 1:
        (read,) = reads
        return lambda reader: cls([read(reader) for _ in range(next(reader.integers))])
    return lambda reader: cls([reads[next(reader.integers)](reader) for _ in range(next(reader.integers))])


def _read_tensor(dtype: torch.dtype, dims: int, order: Any = None) -> _Read:
    stream, size = stream_of(dtype.itemsize), dtype.itemsize
    new, back = _new_tensor(dtype, dims, order), None if order is None else inverse(order, dims)

    def read(reader: Reader) -> Tensor:
        shape = list(islice(reader.integers, dims))
        count = math.prod(shape)
        at = reader.take(stream, count * size)
        if not count:
            return new(*shape) if shape else new(())
        if reader.copy:
            value = new(*shape) if shape else new(())
            memmove(value.data_ptr(), reader.address + at, count * size)
            return value
        value = torch.frombuffer(reader.memory, dtype=dtype, count=count, offset=at).view(shape)
        return value if back is None else value.permute(back)

    return read


def _read_array(dtype: np.dtype[Any], scalar: bool, dims: int, order: Any = None) -> _Read:
    stream, back = array_stream(dtype), None if order is None else inverse(order, dims)

    def read(reader: Reader) -> Any:
        shape = list(islice(reader.integers, dims))
        count = math.prod(shape)
        at = reader.take(stream, count * dtype.itemsize)
        value: Any = np.ndarray(shape, dtype, reader.memory, at) if count * dtype.itemsize else np.empty(shape, dtype)
        if scalar:
            return value.copy()[()]
        value = value.copy() if reader.copy else value
        return value if back is None else value.transpose(back)

    return read


def _read_number(cls: type) -> _Read:
    codec, stream = NUMBER_CODECS[cls], NUMBERS[cls][1]
    unpack, size = codec.unpack_from, codec.size

    def read(reader: Reader) -> Any:
        numbers = unpack(reader.memory, reader.take(stream, size))
        return complex(*numbers) if cls is complex else numbers[0]

    return read


def _read_numbers(cls: type, dtype: str, stream: int) -> _Read:
    size = np.dtype(dtype).itemsize

    def read(reader: Reader) -> Any:
        count = next(reader.integers)
        values = np.frombuffer(reader.memory, dtype, count, reader.take(stream, count * size)).tolist()
        return values if cls is list else tuple(values)

    return read


def _read_bytes(make: Callable[[memoryview], Any]) -> _Read:
    def read(reader: Reader) -> Any:
        nbytes = next(reader.integers)
        at = reader.take(BYTES, nbytes)
        try:
            return make(memoryview(reader.memory)[at : at + nbytes])
        except ValueError as error:
            raise SegmentError(f"the cache is damaged, or holds what cannot be read here: {error}") from error

    return read
