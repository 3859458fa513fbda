"""Read records back into samples; see NOTE [ Records ].

A record may be damaged or forged. So names in a treedef are only looked up (NOTE [ Names in data ]), sizes are compared with
the record before anything is allocated, and the length of lists is limited (NOTE [ Items without bytes ]). Most of that is
checked once, when a treedef is compiled.
"""

from collections.abc import Callable, Iterator
from ctypes import memmove
from typing import Any

import numpy as np

from stocache.errors import SegmentError
from stocache.samples.containers import container_of, keys_from_literals
from stocache.samples.kinds import (
    ALIGNMENTS,
    BARE_NODES,
    DAMAGED_RECORD,
    Cursor,
    Read,
    Size,
    Step,
    bytes_reader,
    kind_of,
    sequence_class,
)
from stocache.samples.pytree import DEEP, Container
from stocache.samples.record_encoder import PackedRecord, TreeDef, bare_nodes, parse_treedef
from stocache.samples.type_lookup import NotImported, Unresolved

_UNREADABLE = (ValueError, SyntaxError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


class RecordReader:
    """Reads the records of one treedef.

    Attributes:
        read: the function that reads one: ``read(memory, address, start, nbytes, integers, copy)``.

    Raises:
        SegmentError: the text is not a treedef, or names classes that are not here or have changed; or something was pickled,
            and ``allow_pickle`` is False.
        NotImported: it names a class whose module is not imported, and ``allow_pickle`` is False.
    """

    def __init__(self, text: bytes, allow_pickle: bool) -> None:
        try:
            treedef = parse_treedef(text.decode("utf-8", "surrogatepass"))
            read = _compile(treedef, allow_pickle, 0)
            self._streams = sorted(_streams(treedef))
            plan, join = _flat(treedef, allow_pickle)
            self._size = _size(treedef)
        except Unresolved as error:
            if error.module:
                raise NotImported(f"the cache holds samples that cannot be read here: {error}") from None
            raise _unreadable(error, text) from error
        except _UNREADABLE as error:
            raise _unreadable(error, text) from error
        self.read = _reading(read, plan, join, self._streams)

    def nbytes(self, integers: tuple[int, ...]) -> int:
        """Return the bytes of all leaves of a record, given its integers; a few more where lists have bare nodes.

        Raises:
            SegmentError: there are too few integers.
        """
        own = iter(integers[max(0, len(self._streams) - 1) :])
        try:
            return self._size if isinstance(self._size, int) else self._size(own)
        except (StopIteration, LookupError):
            raise SegmentError(DAMAGED_RECORD) from None


def unpack_sample(record: PackedRecord) -> Any:
    """Return the sample of a record that `pack_sample` has made."""
    treedef, data, integers = record
    address = np.frombuffer(data, np.uint8).ctypes.data if data else 0
    return RecordReader(treedef, True).read(data, address, 0, len(data), tuple(integers), True)


def _unreadable(error: Exception, text: bytes) -> SegmentError:
    return SegmentError(f"the cache holds samples that cannot be read here: {str(error).rstrip('.')}. Treedef: {text[:200]!r}")


def _reading(
    read: Read, plan: list[Step], join: Callable[[list[Any]], Any], streams: list[int]
) -> Callable[[Any, int, int, int, tuple[int, ...], bool], Any]:
    inner, last = streams[:-1], streams[-1] if streams else 0
    planned = len(inner) + sum(dims for _, dims, *_ in plan)

    def read_record(memory: Any, address: int, start: int, nbytes: int, integers: tuple[int, ...], copy: bool) -> Any:
        at, end = [start] * len(ALIGNMENTS), start + nbytes
        for length, stream in zip(integers, inner):  # noqa: B905  there are more integers
            at[stream] = start
            start += length
        at[last] = start
        try:
            if not copy or not plan:
                own = iter(integers[len(inner) :])
                sample = read(Cursor(memory, address, at, end, own, copy, BARE_NODES + nbytes + len(integers)))
                if next(own, None) is not None:
                    raise SegmentError(DAMAGED_RECORD)
                return sample
            values, used = [], len(inner)
            if len(integers) != planned:
                raise SegmentError(DAMAGED_RECORD)
            for stream, dims, size, new, make in plan:
                here = at[stream]
                if size is None:  # made of any number of bytes
                    after = here + integers[used]
                    used += 1
                    if after > end:
                        raise SegmentError(DAMAGED_RECORD)
                    value = make(memory[here:after])
                elif new is None:
                    after = here + size
                    if after > end:
                        raise SegmentError(DAMAGED_RECORD)
                    (value,) = make(memory, here)
                else:
                    shape = integers[used : used + dims]
                    used += dims
                    nbytes = size[shape]
                    after = here + nbytes
                    if after > end:
                        raise SegmentError(DAMAGED_RECORD)
                    value = new(*shape) if dims else new(())
                    memmove(value.data_ptr(), address + here, nbytes)
                at[stream] = after
                values.append(value)
            return join(values)
        except SegmentError:
            raise
        except Exception as error:  # whatever a class raises for parts it does not expect
            raise SegmentError(f"the cache is damaged, or holds a sample that cannot be read here: {error}") from error

    return read_record


def _flat(treedef: TreeDef, trusted: bool) -> tuple[list[Step], Callable[[list[Any]], Any]]:
    """Return the steps that read containers of tensors, numbers and texts, and the function that makes them; [] for others.

    Most samples are such containers, (image, label) and the like. To read them in one loop takes two thirds of the time.
    """
    found = _steps(treedef)
    if found is None:
        return [], list
    if treedef[0] == "in" and not any(child[0] == "in" for child in treedef[5]):
        return found, _container(treedef, trusted).unflatten_fn()
    join = _joiner(treedef, trusted)
    return found, lambda values: join(iter(values))


def _steps(treedef: TreeDef) -> list[Step] | None:
    """Return the steps that read a value, leaf by leaf; None where that takes a `Cursor`."""
    if treedef[0] == "items" or treedef[:2] == ("in", "image"):  # whose pixels are not copied twice
        return None
    if treedef[0] != "in":
        step = kind_of(treedef).step()
        return None if step is None else [step]
    found: list[Step] = []
    for child in treedef[5]:
        steps = _steps(child)
        if steps is None:
            return None
        found += steps
    return found


def _joiner(treedef: TreeDef, trusted: bool) -> Callable[[Iterator[Any]], Any]:
    """Return the function that takes leaves from an iterator, and puts them into containers."""
    if treedef[0] != "in":
        return next
    unflatten, joins = _container(treedef, trusted).unflatten_fn(), [_joiner(child, trusted) for child in treedef[5]]
    return lambda values: unflatten([join(values) for join in joins])


def _streams(treedef: TreeDef) -> set[int]:
    """Return the streams in which a treedef has leaves."""
    if treedef[0] in ("in", "items"):
        return set().union(*map(_streams, treedef[5 if treedef[0] == "in" else 2]))
    return {kind_of(treedef).stream}


def _size(treedef: TreeDef) -> Size:
    """Return the bytes of the leaves, or the function that counts them; a bare node in a list counts as one byte."""
    if treedef[0] == "in":
        return _sum_of([_size(child) for child in treedef[5]])
    if treedef[0] == "items":
        return _items_size([_size(item) for item in treedef[2]], max(map(bare_nodes, treedef[2])))
    return kind_of(treedef).size


def _sum_of(sizes: list[Any]) -> Size:
    fixed, counted = sum(size for size in sizes if isinstance(size, int)), [size for size in sizes if not isinstance(size, int)]
    return (lambda integers: sum([size(integers) for size in counted], fixed)) if counted else fixed


def _items_size(sizes: list[Any], bare: int) -> Size:
    def size(integers: Iterator[int]) -> int:
        count = next(integers)
        if len(sizes) == 1 and isinstance(sizes[0], int):
            return count * (sizes[0] + bare)
        total = count * bare
        for _ in range(count):  # each takes an integer
            its = sizes[next(integers)] if len(sizes) > 1 else sizes[0]
            total += its if isinstance(its, int) else its(integers)
        return total

    return size


_LEVELS = DEEP + 2


def _compile(treedef: TreeDef, trusted: bool, depth: int) -> Read:
    """Return the function that reads a value of a treedef; ``trusted`` as in `type_lookup.resolve`.

    Raises:
        ValueError, TypeError, LookupError: it is not a treedef.
        Unresolved: a class in it is not here, or may not be used.
    """
    if type(treedef) is not tuple or not treedef or depth > _LEVELS:
        raise ValueError(f"{treedef!r:.80} is not a treedef, or too deep")
    if treedef[0] == "in":
        return _read_container(treedef, trusted, depth)
    if treedef[0] == "items":
        return _read_items(treedef, [_compile(item, trusted, depth + 1) for item in treedef[2]])
    return kind_of(treedef).reader(trusted)


_PIXELS = 4  # their position among the parts of an image


def _read_container(treedef: TreeDef, trusted: bool, depth: int) -> Read:
    join = _container(treedef, trusted).unflatten_fn()
    reads = [_compile(child, trusted, depth + 1) for child in treedef[5]]
    if treedef[1] == "image" and treedef[5][_PIXELS] == ("bytes",):  # the image copies them
        reads[_PIXELS] = bytes_reader(lambda view: view)
    return lambda cursor: join([read(cursor) for read in reads])


def _container(treedef: TreeDef, trusted: bool) -> Container:
    """Return the container of a treedef. Raises as `container_of` and `keys_from_literals`."""
    _, kind, name, keys, extra, children, *coded = treedef
    return container_of(kind, name, keys_from_literals(keys, bool(coded), trusted), extra, len(children), trusted)


def _read_items(treedef: TreeDef, reads: list[Read]) -> Read:
    cls, bare = sequence_class(treedef[1]), max(map(bare_nodes, treedef[2]))
    if len(reads) == 1:
        (read,) = reads
        if not bare:  # each item takes bytes or an integer
            return lambda cursor: cls([read(cursor) for _ in range(next(cursor.integers))])
        return lambda cursor: cls([read(cursor) for _ in range(cursor.items(bare))])
    return lambda cursor: cls([reads[next(cursor.integers)](cursor) for _ in range(cursor.items(bare))])
