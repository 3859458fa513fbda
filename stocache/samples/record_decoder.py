"""Records read back into samples; see NOTE [ Records ].

What is read may be damaged or forged: names in a skeleton are looked up as NOTE [ Names in data ] has it, sizes are held
against the record before anything is allocated, and what a list may make is bounded (NOTE [ Items without bytes ]). Most of
that is checked once, when a skeleton is compiled.
"""

import math
import pickle
from collections.abc import Callable, Iterator
from ctypes import memmove
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.errors import SegmentError
from stocache.samples.kinds import FROM_BYTES
from stocache.samples.pytree import DEEP, Container
from stocache.samples.record_encoder import (
    ALIGNMENTS,
    BARE_NODES,
    BYTES,
    NUMBER_TYPES,
    NUMBERS,
    Skeleton,
    array_stream,
    bare_nodes,
    check_plain_keys,
    decoded,
    dtype_from_key,
    empty_array,
    parse_skeleton,
    read_extra,
    stream_of,
)
from stocache.samples.spec import NUMBER_CODECS, inverse
from stocache.samples.type_lookup import (
    NotImported,
    Unresolved,
    check_class,
    check_dims,
    enum_class,
    member_of,
    resolve,
    torch_dtype,
)

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
        bare: bare nodes that lists may still make; see NOTE [ Items without bytes ].
    """

    __slots__ = ("address", "at", "bare", "copy", "end", "integers", "memory")

    def __init__(
        self, memory: Any, address: int, at: list[int], end: int, integers: Iterator[int], copy: bool, bare: int
    ) -> None:
        self.memory, self.address, self.at, self.end, self.integers, self.copy = memory, address, at, end, integers, copy
        self.bare = bare

    def items(self, bare: int) -> int:
        """Return the next length of a list whose items have so many bare nodes each."""
        count = next(self.integers)
        self.bare -= count * bare
        if self.bare < 0:
            raise SegmentError(_DAMAGED)
        return count

    def take(self, stream: int, nbytes: int) -> int:
        """Return where the next ``nbytes`` of a stream are."""
        at = self.at[stream]
        after = self.at[stream] = at + nbytes
        if after > self.end:
            raise SegmentError(_DAMAGED)
        return at


_Read: TypeAlias = Callable[[Reader], Any]

_UNREADABLE = (ValueError, SyntaxError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


class RecordReader:
    """What reads the records of one skeleton.

    Attributes:
        read: the function that does: ``read(memory, address, start, nbytes, integers, copy)``.

    Raises:
        SegmentError: the text is not a skeleton, or of classes that are not here or have changed; or something was pickled,
            and ``allow_pickle`` is False.
        NotImported: it is of a class whose module is not imported, and ``allow_pickle`` is False.
    """

    def __init__(self, text: bytes, allow_pickle: bool) -> None:
        try:
            skeleton = parse_skeleton(text.decode("utf-8", "surrogatepass"))
            read = _compile(skeleton, allow_pickle, 0)
            self._streams = sorted(_streams(skeleton))
            plan, join = _plan(skeleton, allow_pickle)
            self._size = _sizer(skeleton)
        except Unresolved as error:
            if error.module:
                raise NotImported(f"the cache holds samples that cannot be read here: {error}") from None
            raise _unreadable(error, text) from error
        except _UNREADABLE as error:
            raise _unreadable(error, text) from error
        self.read = _reading(read, plan, join, self._streams)

    def nbytes(self, integers: tuple[int, ...]) -> int:
        """Return the bytes that all leaves of a record take together, given its integers; a few more for bare nodes.

        Raises:
            SegmentError: there are fewer integers than it takes.
        """
        own = iter(integers[max(0, len(self._streams) - 1) :])
        try:
            return self._size if isinstance(self._size, int) else self._size(own)
        except (StopIteration, LookupError):
            raise SegmentError(_DAMAGED) from None


def _unreadable(error: Exception, text: bytes) -> SegmentError:
    return SegmentError(f"the cache holds samples that cannot be read here: {str(error).rstrip('.')}. Skeleton: {text[:200]!r}")


def reader_of(text: bytes, allow_pickle: bool) -> Callable[[Any, int, int, int, tuple[int, ...], bool], Any]:
    """Return the function that reads samples of a skeleton. Raises as `RecordReader`."""
    return RecordReader(text, allow_pickle).read


def _reading(
    read: _Read, plan: list[tuple[int, Any, int, Any, Any]], join: Callable[[list[Any]], Any], streams: list[int]
) -> Callable[[Any, int, int, int, tuple[int, ...], bool], Any]:
    inner, last = streams[:-1], streams[-1] if streams else 0
    planned = len(inner) + sum(dims for _, _, dims, _, _ in plan)

    def read_record(memory: Any, address: int, start: int, nbytes: int, integers: tuple[int, ...], copy: bool) -> Any:
        at, end = [start] * len(ALIGNMENTS), start + nbytes
        for length, stream in zip(integers, inner):  # noqa: B905  integers has more than these
            at[stream] = start
            start += length
        at[last] = start
        try:
            if not copy or not plan:
                own = iter(integers[len(inner) :])
                sample = read(Reader(memory, address, at, end, own, copy, BARE_NODES + nbytes + len(integers)))
                if next(own, None) is not None:
                    raise SegmentError(_DAMAGED)
                return sample
            values, used = [], len(inner)
            if len(integers) != planned:
                raise SegmentError(_DAMAGED)
            for stream, new, dims, unpack, size in plan:
                here = at[stream]
                if unpack is None:
                    shape = integers[used : used + dims]
                    used += dims
                    nbytes = size[shape]
                    after = here + nbytes
                    if after > end:
                        raise SegmentError(_DAMAGED)
                    value = new(*shape) if dims else new(())
                    memmove(value.data_ptr(), address + here, nbytes)
                else:
                    after = here + size
                    if after > end:
                        raise SegmentError(_DAMAGED)
                    (value,) = unpack(memory, here)
                at[stream] = after
                values.append(value)
            return join(values)
        except SegmentError:
            raise
        except Exception as error:  # whatever classes raise that are given parts they do not expect
            raise SegmentError(f"the cache is damaged, or holds what cannot be read here: {error}") from error

    return read_record


class _Sizes(dict[tuple[int, ...], int]):
    """The bytes of values by shape: looking them up costs a third of computing them."""

    def __init__(self, itemsize: int) -> None:
        super().__init__()
        self._itemsize = itemsize

    def __missing__(self, shape: tuple[int, ...]) -> int:
        nbytes = math.prod(shape) * self._itemsize
        if len(self) < _SHAPES:
            self[shape] = nbytes
        return nbytes


_SHAPES = 1024  # that are remembered for a leaf


def _plan(skeleton: Skeleton, trusted: bool) -> tuple[list[tuple[int, Any, int, Any, Any]], Callable[[list[Any]], Any]]:
    """Return the leaves of one container of tensors and numbers, and what puts them together; no leaves for all else.

    Such samples, (image, label) and the like, are most there are, and reading them in one loop takes two thirds of the time.
    """
    if skeleton[0] != "in":
        return [], list
    children = skeleton[5]
    plan: list[tuple[int, Any, int, Any, Any]] = []
    for child in children:
        if child[0] == "tensor":
            dtype = torch_dtype(child[1])
            plan.append((stream_of(dtype.itemsize), _new_tensor(dtype, *child[2:]), child[2], None, _Sizes(dtype.itemsize)))
        elif child[0] == "number" and child[1] != "complex":
            codec = NUMBER_CODECS[NUMBER_TYPES[child[1]]]
            plan.append((NUMBERS[NUMBER_TYPES[child[1]]][1], None, 0, codec.unpack_from, codec.size))
        else:
            return [], list
    return plan, _container(skeleton, trusted).unflatten_fn()


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
        return {stream_of(torch_dtype(skeleton[1]).itemsize)}
    if kind in ("array", "scalar"):
        return {array_stream(dtype_from_key(skeleton[1]))}
    if kind in ("number", "numbers"):
        return {NUMBERS[NUMBER_TYPES[skeleton[-1]]][1]}
    return {BYTES}


def _sizer(skeleton: Skeleton) -> int | Callable[[Iterator[int]], int]:
    """Return how many bytes the leaves take, or what counts them, given the integers; bare nodes in lists count as one."""
    kind = skeleton[0]
    if kind == "in":
        return _sum_of([_sizer(child) for child in skeleton[5]])
    if kind == "items":
        return _items_sizer([_sizer(item) for item in skeleton[2]], max(map(bare_nodes, skeleton[2])))
    if kind == "number":
        return NUMBER_CODECS[NUMBER_TYPES[skeleton[1]]].size
    size, dims = 1, 1
    if kind == "numbers":
        size = np.dtype(NUMBERS[NUMBER_TYPES[skeleton[2]]][0]).itemsize
    elif kind == "tensor":
        size, dims = torch_dtype(skeleton[1]).itemsize, skeleton[2]
    elif kind in ("array", "scalar"):
        size, dims = dtype_from_key(skeleton[1]).itemsize, skeleton[2]
    return (lambda integers: math.prod(_next(integers, dims)) * size) if dims else size


def _next(integers: Iterator[int], dims: int) -> list[int]:
    return [next(integers) for _ in range(dims)]


def _sum_of(sizes: list[Any]) -> int | Callable[[Iterator[int]], int]:
    fixed, counted = sum(size for size in sizes if isinstance(size, int)), [size for size in sizes if not isinstance(size, int)]
    return (lambda integers: sum([size(integers) for size in counted], fixed)) if counted else fixed


def _items_sizer(sizes: list[Any], bare: int) -> Callable[[Iterator[int]], int]:
    def size(integers: Iterator[int]) -> int:
        count = next(integers)
        if len(sizes) == 1 and isinstance(sizes[0], int):
            return count * (sizes[0] + bare)
        total = count * bare
        for _ in range(count):  # each of which takes an integer
            its = sizes[next(integers)] if len(sizes) > 1 else sizes[0]
            total += its if isinstance(its, int) else its(integers)
        return total

    return size


_LEVELS = DEEP + 2


def _compile(skeleton: Skeleton, trusted: bool, depth: int) -> _Read:
    """Return the function that reads what a skeleton describes.

    Raises:
        ValueError, TypeError, LookupError, Unresolved: it is not a skeleton, or of what is not here.
    """
    if type(skeleton) is not tuple or not skeleton or depth > _LEVELS:
        raise ValueError(f"{skeleton!r:.80} is not a skeleton, or too deep")
    kind, *rest = skeleton
    if kind == "in":
        return _read_container(skeleton, trusted, depth)
    if kind == "items":
        return _read_items(skeleton, [_compile(item, trusted, depth + 1) for item in rest[1]])
    if kind == "tensor":
        return _read_tensor(torch_dtype(rest[0]), check_dims(rest[1]), *rest[2:])
    if kind in ("array", "scalar"):
        return _read_array(dtype_from_key(rest[0]), kind == "scalar", check_dims(rest[1]), *rest[2:])
    if kind == "number":
        return _read_number(NUMBER_TYPES[rest[0]])
    if kind == "numbers":
        return _read_numbers(_sequence(rest[0]), *NUMBERS[NUMBER_TYPES[rest[1]]])
    if kind == "enum":
        cls = enum_class(rest[0], trusted)
        return _read_bytes(lambda data: member_of(cls, str(data, "utf-8")))
    if kind == "pickle":
        if not trusted:
            raise ValueError("something in them was pickled, which needs allow_pickle=True")
        return _read_bytes(pickle.loads)
    return _read_bytes(FROM_BYTES[kind])


def _sequence(name: Any) -> type:
    """Return list or tuple. Raises ValueError where the name is another one."""
    if name not in ("list", "tuple"):
        raise ValueError(f"{name!r:.50} is not a list or tuple")
    return list if name == "list" else tuple


_PIXELS = 4  # position among the parts of an image


def _read_container(skeleton: Skeleton, trusted: bool, depth: int) -> _Read:
    join = _container(skeleton, trusted).unflatten_fn()
    reads = [_compile(child, trusted, depth + 1) for child in skeleton[5]]
    if skeleton[1] == "image" and skeleton[5][_PIXELS] == ("bytes",):  # which the image copies
        reads[_PIXELS] = _read_bytes(lambda view: view)
    return lambda reader: join([read(reader) for read in reads])


def _container(skeleton: Skeleton, trusted: bool) -> Container:
    """Return the container of a skeleton.

    Raises:
        Unresolved: its class is not here, has changed, or may not be used so.
        ValueError, TypeError: it is not a container.
    """
    _, kind, name, keys, extra, children, *coded = skeleton
    cls = resolve(name, trusted)
    keys = tuple(decoded(key, trusted) for key in keys) if coded else check_plain_keys(keys)
    if len(keys) != len(children):
        raise ValueError("a container has more or fewer keys than parts")
    hash(keys)
    check_class(kind, cls, name, keys, extra)
    return Container(kind, cls, keys, read_extra(kind, extra, trusted))


def _read_items(skeleton: Skeleton, reads: list[_Read]) -> _Read:
    cls, bare = _sequence(skeleton[1]), max(map(bare_nodes, skeleton[2]))
    if len(reads) == 1:
        (read,) = reads
        if not bare:  # then each item takes bytes or an integer
            return lambda reader: cls([read(reader) for _ in range(next(reader.integers))])
        return lambda reader: cls([read(reader) for _ in range(reader.items(bare))])
    return lambda reader: cls([reads[next(reader.integers)](reader) for _ in range(reader.items(bare))])


def _read_tensor(dtype: torch.dtype, dims: int, order: Any = None) -> _Read:
    stream, size = stream_of(dtype.itemsize), dtype.itemsize
    new, back = _new_tensor(dtype, dims, order), None if order is None else inverse(order, dims)

    def read(reader: Reader) -> Tensor:
        shape = list(islice(reader.integers, dims))
        if len(shape) != dims:
            raise SegmentError(_DAMAGED)
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
    if scalar and (dims or order is not None):
        raise ValueError("a scalar has no dimensions")

    def read(reader: Reader) -> Any:
        shape = list(islice(reader.integers, dims))
        if len(shape) != dims:
            raise SegmentError(_DAMAGED)
        nbytes = math.prod(shape) * dtype.itemsize
        at = reader.take(stream, nbytes)
        value: Any = np.ndarray(shape, dtype, reader.memory, at) if nbytes else empty_array(shape, dtype)
        if scalar:
            return value.copy()[()]
        value = value.copy() if reader.copy and nbytes else value
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
        at = reader.take(stream, count * size)
        values = np.frombuffer(reader.memory, dtype, count, at).tolist() if count else []
        return values if cls is list else tuple(values)

    return read


def _read_bytes(make: Callable[[memoryview], Any]) -> _Read:
    def read(reader: Reader) -> Any:
        nbytes = next(reader.integers)
        at = reader.take(BYTES, nbytes)
        return make(memoryview(reader.memory)[at : at + nbytes])

    return read
