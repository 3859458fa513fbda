"""Share the tables of a dataset between processes: one read-only copy of its lists, dicts, arrays and tensors.

NOTE [ Lists that grow in workers ]
    A forked worker shares the memory of its parent until one of them writes there. Python counts the references to an object in
    the object, so a list of ten million paths is copied page by page as its items are read, once for each worker
    (pytorch/pytorch#13246). A spawned worker gets a copy at once. Here the items lie in shared memory as bytes, before a table
    of their offsets, and an object is made of an item when it is read.
"""

import contextlib
import json
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from stocache.errors import SampleError
from stocache.shm.private import map_privately
from stocache.shm.segment import Segment
from stocache.system.objects import vars_of
from stocache.system.platform import here
from stocache.system.walking import walk

LARGE = 1 << 20  # bytes, from which an attribute of a dataset is worth sharing
_LOOKED_AT = 1000  # items, to estimate the size of a list
_AT_ONCE = 1 << 16  # items that are written at a time

_TEXT = "utf-8", "surrogatepass"
_ENCODE: dict[type, Callable[[Any], bytes]] = {
    str: lambda item: item.encode(*_TEXT),
    bytes: lambda item: item,
    type(Path()): lambda item: str(item).encode(*_TEXT),
}
_DECODE: dict[str, Callable[[bytes], Any]] = {
    "str": lambda data: data.decode(*_TEXT),
    "bytes": lambda data: data,
    "path": lambda data: Path(data.decode(*_TEXT)),
}
_TABLES: dict[str, Callable[[Any], Any]] = {  # by library: the size of a table
    "pandas": lambda table: np.sum(table.memory_usage(deep=False)),
    "pyarrow": lambda table: table.nbytes,
    "scipy": lambda matrix: matrix.data.nbytes + matrix.indices.nbytes,
}
_NAMES = {str: "str", bytes: "bytes", type(Path()): "path", int: "int", float: "float", bool: "bool"}
_DTYPES = {"int": np.dtype("<i8"), "float": np.dtype("<f8"), "bool": np.dtype("?")}


def share(value: Any) -> Any:
    """Return one read-only copy of a value for all processes that get it, forked or spawned; it pickles in 200 bytes or so.

        self.paths = stocache.share(paths)      # in a dataset
        dataset = stocache.share(dataset)       # or all its attributes of 1 MiB and more, in a copy of it

    Args:
        value: a list or tuple of str, of bytes, of paths or of numbers of one type; a dict of these; a numpy array, or a tensor
            on the CPU; a Series or DataFrame of pandas, a table or column of Arrow, a compressed sparse matrix of scipy; or an
            object with attributes, such as a dataset. Attributes that cannot be shared stay as they are.

    Returns:
        A list or tuple becomes a `Sequence`, a dict a `Mapping`, an array a read-only array, a tensor a tensor: writing to that
        changes it for one process alone. They are indexed, sliced and walked through as before. Slices of a sequence are lists.
        Those of pandas and scipy keep their classes; of Arrow comes a `SharedArrow`, whose ``value`` is what it stands for.

    Raises:
        SampleError: the items are of several types, or of another one; or the machine gives no shared memory.

    Examples:
        >>> import pickle
        >>> paths = share([f"photos/{number:06}.jpg" for number in range(100_000)])
        >>> paths[7], len(paths), len(pickle.dumps(paths)) < 300
        ('photos/000007.jpg', 100000, True)
    """
    if not here.SHARES_MEMORY:  # threads have it as it is
        return value
    if isinstance(value, SharedSequence | SharedMapping | SharedArray | SharedTensor):
        return value
    if (library := _library_of(value)) in _TABLES:
        return getattr(import_module("stocache.shm.tables.libraries"), f"share_{library}")(value)
    if isinstance(value, torch.Tensor):
        return SharedTensor.of(value)
    if type(value) is np.ndarray:  # a subclass, as a masked array, has more than its values
        return SharedArray.of(value)
    if type(value) in (list, tuple):
        return SharedSequence.of(value)
    if type(value) is dict:
        return SharedMapping.of(value)
    kind = type(value)
    has_finalizer = hasattr(kind, "__del__")  # which would close what the copy still has
    is_plain = getattr(kind, "__new__", None) is object.__new__ and not has_finalizer
    if not is_plain or isinstance(value, type) or any(vars(cls).get("__slots__") for cls in kind.__mro__):
        raise SampleError(f"a {kind.__name__} cannot be shared. Share a list, a dict, an array, a tensor, or a plain dataset.")
    return _with_shared_attributes(value)


def _with_shared_attributes(value: Any) -> Any:
    changed = _shared_tables(value)
    for name, inner in vars(value).items():
        if name == "dataset" and (made := _of_inner(inner)) is not inner:  # as of torch's Subset
            changed[name] = made
        elif name == "datasets" and type(inner) is list:  # as of ConcatDataset
            made = list(map(_of_inner, inner))
            if any(map(operator.is_not, made, inner)):
                changed[name] = made
    if not changed:
        return value
    made = object.__new__(type(value))  # no code of the user runs
    vars(made).update(vars(value) | changed)
    return made


def _of_inner(dataset: Any) -> Any:
    with contextlib.suppress(SampleError):
        return share(dataset) if vars_of(dataset) else dataset
    return dataset


def _shared_tables(value: Any) -> dict[str, Any]:
    """Return the large attributes of an object that can be shared, by name, as shared ones."""
    shared = {}
    for name, attribute in vars_of(value).items():
        if size_of(attribute) >= LARGE:
            with contextlib.suppress(Exception):  # of objects, or of a kind that cannot be shared
                shared[name] = share(attribute)
    return shared


@contextlib.contextmanager
def tables_shared(dataset: object) -> Iterator[None]:
    """Share the large attributes of a dataset, and of those within it, with the processes that are started meanwhile."""
    kept = []
    try:
        for each in walk(dataset):
            shared, attributes = _shared_tables(each), vars_of(each)
            kept.append((attributes, {name: attributes[name] for name in shared}))
            attributes.update(shared)
        yield
    finally:
        for attributes, own in kept:
            attributes.update(own)


def _library_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def size_of(value: Any) -> int:
    """Return about how many bytes a value that can be shared takes; 0 for others."""
    if (library := _library_of(value)) in _TABLES:
        with contextlib.suppress(Exception):  # another class of that library
            return int(_TABLES[library](value))
    if type(value) is np.ndarray:
        return value.nbytes
    if isinstance(value, torch.Tensor):
        plain = value.device.type == "cpu" and value.layout == torch.strided
        return (
            value.nbytes if plain and not value.untyped_storage().is_shared() else 0
        )  # what is shared already may be written to
    if type(value) in (list, tuple, dict):
        items = list(islice(value.items() if type(value) is dict else ((item,) for item in value), _LOOKED_AT))
        each = sum(sys.getsizeof(part) for item in items for part in item) / max(1, len(items))
        return sys.getsizeof(value) + int(each * len(value))
    return 0


def _segment_for(nbytes: int, description: Any) -> Segment:
    """Return a new segment with ``nbytes`` of reserved data, whose control bytes hold a description."""
    text = json.dumps(description).encode()
    segment = Segment.create(8 + len(text), nbytes)
    if segment.data_bytes < nbytes or not segment.extents.reserve(0, nbytes, warn=False):
        raise SampleError(f"the machine gives no shared memory for {nbytes} bytes. Free memory, or do not share this value.")
    segment.control[:8] = len(text).to_bytes(8, "little")
    segment.control[8 : 8 + len(text)] = text
    return segment


def _description_of(segment: Segment) -> Any:
    return json.loads(bytes(segment.control[8 : 8 + int.from_bytes(segment.control[:8], "little")]))


class SharedSequence(Sequence[Any]):
    """A list of str, bytes, paths or numbers in shared memory."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        kind, self._length, nbytes = _description_of(segment)
        self._decode = _DECODE.get(kind)
        view = segment.view(0, segment.data_bytes)
        if self._decode is None:
            self._items: Any = np.frombuffer(view, _DTYPES[kind], self._length)
        else:
            self._items = view[:nbytes]
            at = segment.data_bytes - 8 * (self._length + 1)
            self._offsets = view[at:].cast("Q")

    @classmethod
    def of(cls, items: Sequence[Any]) -> "SharedSequence":
        """Return the items in shared memory. Raises SampleError: they are of several types, or of another one."""
        types = set(map(type, items))
        kind = _NAMES.get(next(iter(types), str)) if len(types) < 2 else None
        if kind is None:
            names = ", ".join(sorted(each.__name__ for each in types))
            raise SampleError(f"items of {names} cannot be shared: all must be str, or bytes, Path, int, float, or bool.")
        if kind in _DTYPES:
            try:
                numbers = np.array(items, _DTYPES[kind])
            except OverflowError:
                raise SampleError("an int is larger than 64 bits. Share a list of texts.") from None
            segment = _segment_for(max(1, numbers.nbytes), [kind, len(items), numbers.nbytes])
            _write(segment, 0, numbers)
            return cls(segment)
        encode = _ENCODE[next(iter(types), str)]
        lengths = np.fromiter((len(encode(item)) for item in items), np.uint64, len(items))
        offsets = np.zeros(len(items) + 1, np.uint64)
        np.cumsum(lengths, out=offsets[1:])
        nbytes = int(offsets[-1])
        table = -(-nbytes // 8) * 8
        segment = _segment_for(table + offsets.nbytes, [kind, len(items), nbytes])
        at = 0
        for begin in range(0, len(items), _AT_ONCE):
            data = b"".join(map(encode, items[begin : begin + _AT_ONCE]))
            if data:
                segment.write(at, data, len(data))
            at += len(data)
        _write(segment, table, offsets)
        return cls(segment)

    def __len__(self) -> int:
        return int(self._length)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._item(number) for number in range(*index.indices(self._length))]
        number = operator.index(index)
        if number < 0:
            number += self._length
        if not 0 <= number < self._length:
            raise IndexError("list index out of range")
        return self._item(number)

    def _item(self, number: int) -> Any:
        if self._decode is None:
            return self._items[number].item()
        return self._decode(bytes(self._items[self._offsets[number] : self._offsets[number + 1]]))

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, range(self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | SharedSequence) or len(other) != self._length:
            return NotImplemented if not isinstance(other, list | tuple | SharedSequence) else False
        return all(mine == yours for mine, yours in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self[:3]))
        return f"<shared list of {self._length}: {first}{', …' * (self._length > 3)}>"

    def __reduce__(self) -> Any:
        return SharedSequence, (self._segment,)


class SharedMapping(Mapping[Any, Any]):
    """A dict in shared memory: its keys, its values, and the hashes of the keys in order."""

    def __init__(self, keys: SharedSequence, values: SharedSequence, hashes: "SharedArray", places: "SharedArray") -> None:
        self._keys, self._values, self._hashes, self._places = keys, values, hashes, places

    @classmethod
    def of(cls, items: Mapping[Any, Any]) -> "SharedMapping":
        """Return the items in shared memory. Raises SampleError as `SharedSequence.of`."""
        keys, values = SharedSequence.of(list(items)), SharedSequence.of(list(items.values()))
        hashes = np.fromiter(map(_hash_of, items), np.uint64, len(items))
        places = np.argsort(hashes, kind="stable")
        return cls(keys, values, SharedArray.of(hashes[places]), SharedArray.of(places))

    def _place_of(self, key: object) -> int:
        """Return the place of a key among the items; -1 if it is not there."""
        try:
            number = _hash_of(key)
        except (TypeError, AttributeError, OverflowError, ValueError):
            return -1
        hashes: NDArray[Any] = self._hashes
        for at in range(int(np.searchsorted(hashes, np.uint64(number))), len(hashes)):
            if hashes[at] != number:
                break
            place = int(self._places[at])
            if self._keys[place] == key:
                return place
        return -1

    def __getitem__(self, key: object) -> Any:
        place = self._place_of(key)
        if place < 0:
            raise KeyError(key)
        return self._values[place]

    def __contains__(self, key: object) -> bool:
        return self._place_of(key) >= 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __repr__(self) -> str:
        return f"<shared dict of {len(self)}>"

    def __reduce__(self) -> Any:
        return SharedMapping, (self._keys, self._values, self._hashes, self._places)


def _hash_of(key: Any) -> int:
    if isinstance(key, str):
        return xxh3_64_intdigest(str.encode(key, *_TEXT))
    if isinstance(key, np.generic):
        key = key.item()
    if isinstance(key, float) and key.is_integer():  # equal numbers are one key of a dict
        key = int(key)
    if isinstance(key, int | float):
        return xxh3_64_intdigest(repr(int(key) if isinstance(key, int) else float(key)).encode())
    return xxh3_64_intdigest(key if isinstance(key, bytes) else str(key).encode(*_TEXT))


class SharedArray(np.ndarray):
    """A read-only array in shared memory. Its parts, and what is computed with it, are ordinary arrays, and pickle as such.

    A view of all of it in another shape, as pandas makes, pickles as a handle.
    """

    _segment: Segment | None

    @classmethod
    def of(cls, array: Any) -> "SharedArray":
        """Return the array in shared memory. Raises SampleError: it is of objects."""
        array = np.asarray(array)
        text = json.loads(json.dumps(_dtype_text(array.dtype)))
        if array.dtype.hasobject or not _is_dtype_of(text, array.dtype):
            raise SampleError(
                f"an array of {array.dtype} cannot be shared. Share its fields, or a list of texts or of numbers."
            )
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        segment = _segment_for(max(1, array.nbytes), {"dtype": _dtype_text(array.dtype), "shape": array.shape, "order": order})
        if array.nbytes:
            _write(segment, 0, np.ascontiguousarray(array.T if order == "F" else array))
        return cls.from_segment(segment)

    @classmethod
    def from_segment(cls, segment: Segment, shape: tuple[int, ...] | None = None) -> "SharedArray":
        """Return the array that a segment holds."""
        found = _description_of(segment)
        dtype, shape, order = _dtype_of(found["dtype"]), shape or tuple(found["shape"]), found["order"]
        made: SharedArray = np.ndarray(shape, dtype, segment.view(0, segment.data_bytes), order=order).view(cls)
        made.flags.writeable = False
        made._segment = segment
        return made

    def __array_finalize__(self, made_of: Any) -> None:
        self._segment = getattr(made_of, "_segment", None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = None if self._segment is None else SharedArray.from_segment(self._segment)
        if whole is None or whole.ctypes.data != self.ctypes.data or whole.nbytes != self.nbytes or whole.dtype != self.dtype:
            return np.asarray(self).__reduce_ex__(protocol)
        if whole.strides == self.strides and whole.shape == self.shape:
            return SharedArray.from_segment, (self._segment,)
        if whole.flags.c_contiguous and self.flags.c_contiguous:
            return SharedArray.from_segment, (self._segment, self.shape)
        return np.asarray(self).__reduce_ex__(protocol)


class SharedTensor(torch.Tensor):
    """A tensor in shared memory. What is computed with it is an ordinary tensor."""

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl  # results are plain tensors
    _segment: Segment

    @staticmethod
    def of(tensor: torch.Tensor) -> "SharedTensor":
        """Return the tensor in shared memory. Raises SampleError: it is not a plain tensor in memory."""
        plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not plain or tensor.requires_grad:
            raise SampleError("only a plain, dense tensor on the CPU can be shared, without a gradient.")
        tensor = tensor.resolve_conj().resolve_neg()
        name = str(tensor.dtype).removeprefix("torch.")
        segment = _segment_for(max(1, tensor.nbytes), {"dtype": name, "shape": list(tensor.shape)})
        if tensor.nbytes:
            _write(segment, 0, tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return SharedTensor.from_segment(segment)

    @staticmethod
    def from_segment(segment: Segment) -> "SharedTensor":
        """Return the tensor that a segment holds, over a private view of it."""
        found = _description_of(segment)
        dtype, shape = getattr(torch, found["dtype"]), tuple(found["shape"])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        if nbytes:
            memory = map_privately(segment.fd, segment.layout.size)
            tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=segment.layout.data_at, count=nbytes)
        made: SharedTensor = tensor.view(dtype).view(shape).as_subclass(SharedTensor)
        made._segment = segment
        return made

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SharedTensor.from_segment, (self._segment,)


def _write(segment: Segment, at: int, array: NDArray[Any]) -> None:
    if array.nbytes:
        segment.write(at, array.view(np.uint8).reshape(-1), array.nbytes)


def _dtype_text(dtype: "np.dtype[Any]") -> Any:
    return dtype.str if dtype.names is None else dtype.descr


def _is_dtype_of(text: Any, dtype: "np.dtype[Any]") -> bool:
    try:
        return _dtype_of(text) == dtype
    except (TypeError, ValueError):  # nested, or with offsets
        return False


def _dtype_of(found: Any) -> "np.dtype[Any]":
    return np.dtype(found if isinstance(found, str) else [tuple(each) for each in found])
