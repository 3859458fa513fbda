"""Keep lists and dicts in shared memory: `SharedSequence` and `SharedMapping`."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from stocache.errors import SampleError
from stocache.shm.segment import Segment
from stocache.shm.tables.arrays import SharedArray, new_segment, write_array

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
_NAMES = {str: "str", bytes: "bytes", type(Path()): "path", int: "int", float: "float", bool: "bool"}
_DTYPES = {"int": np.dtype("<i8"), "float": np.dtype("<f8"), "bool": np.dtype("?")}


class SharedSequence(Sequence[Any]):
    """A list of str, bytes, paths or numbers in shared memory."""

    def __init__(self, segment: Segment, kind: str, length: int, nbytes: int) -> None:
        self._segment, self._kind, self._length, self._nbytes = segment, kind, length, nbytes
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
        """Return the items in shared memory. Raises SampleError: they are of several types, or of one that is not shared."""
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
            segment = new_segment(numbers.nbytes)
            write_array(segment, 0, numbers)
            return cls(segment, kind, len(items), numbers.nbytes)
        encode = _ENCODE[next(iter(types), str)]
        lengths = np.fromiter((len(encode(item)) for item in items), np.uint64, len(items))
        offsets = np.zeros(len(items) + 1, np.uint64)
        np.cumsum(lengths, out=offsets[1:])
        nbytes = int(offsets[-1])
        table = -(-nbytes // 8) * 8
        segment = new_segment(table + offsets.nbytes)
        at = 0
        for begin in range(0, len(items), _AT_ONCE):
            data = b"".join(map(encode, items[begin : begin + _AT_ONCE]))
            if data:
                segment.write(at, data, len(data))
            at += len(data)
        write_array(segment, table, offsets)
        return cls(segment, kind, len(items), nbytes)

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
        return SharedSequence, (self._segment, self._kind, self._length, self._nbytes)


class SharedMapping(Mapping[Any, Any]):
    """A dict in shared memory: its keys, its values, and the hashes of the keys in order."""

    def __init__(self, keys: SharedSequence, values: SharedSequence, hashes: SharedArray, places: SharedArray) -> None:
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
