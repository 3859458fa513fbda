"""Copy the arrays, tensors, images and table frames of a dataset for a worker thread.

NOTE [ Arrays that a thread may change ]
    ``__getitem__`` may change an array in place. A worker process has its own, by copy-on-write of the kernel, so each thread
    gets a copy. Views of one memory stay views of one. Memory that processes share is shared by threads, and so are parameters
    of modules, read-only arrays, and whatever does not fit into `_MOST_BYTES` for each thread. `Arrays` finds changes of memory
    that is shared because it is too large.
"""

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stocache.system.limits import format_size

_MOST_BYTES = 32 << 20  # of arrays that are copied
_MOST_OBJECTS = 1000  # of an array of objects
_MOST_ITEMS = 50_000  # of all long lists and dicts that are copied, with the items of their items
_LOOKED_AT = 4096  # bytes of an array that is too large


class Arrays:
    """The memory of arrays that threads share because it is too large for a copy for each.

    Attributes:
        copied: whether an array, a table, or a long list was copied.
    """

    def __init__(self) -> None:
        self.copied = False
        self._before: dict[tuple[int, int], tuple[Any, bytes]] = {}  # by address and size: the owner, and some bytes

    def add(self, owner: Any) -> None:
        """Add an array or storage that owns memory."""
        place = _place_of(owner)
        self._before[place] = owner, _some_bytes(*place)

    def changed(self) -> str:
        """Return the size of memory that is not as it was when it was added; "" if all is."""
        for place, (owner, before) in self._before.items():
            if _place_of(owner) == place and _some_bytes(*place) != before:
                return format_size(place[1])
        return ""


def _place_of(owner: Any) -> tuple[int, int]:
    """Return the address and the size of the memory of an array or storage."""
    is_array = isinstance(owner, np.ndarray)
    return owner.__array_interface__["data"][0] if is_array else owner.data_ptr(), owner.nbytes if is_array else owner.nbytes()


def _some_bytes(address: int, nbytes: int) -> bytes:
    step = nbytes // _LOOKED_AT | 1  # odd, so that it is not always the same byte of a number
    return memoryview((ctypes.c_char * nbytes).from_address(address))[::step].tobytes()


class ArrayCopier:
    """Copies the arrays of one dataset, as long as there is room."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays, self._bytes, self._items = arrays, _MOST_BYTES, _MOST_ITEMS
        self._memory: dict[tuple[int, int], bytearray | None] = {}  # copies, by address and size

    def takes_items(self, count: int) -> bool:
        """Whether there is room for a copy of a long list of so many items, which are counted."""
        takes = count <= self._items
        self._items -= count * takes
        self._arrays.copied |= takes
        return takes

    def _takes(self, nbytes: int) -> bool:
        takes = nbytes <= self._bytes
        self._bytes -= nbytes * takes
        self._arrays.copied |= takes
        return takes

    def copy(self, value: Any, copy_item: Callable[[Any], Any]) -> Any:
        """Return a copy of a tensor or array; itself if it is shared. ``copy_item`` copies an item of an array of objects."""
        if type(value) is torch.Tensor:
            return self._copy_tensor(value)
        if type(value) is not np.ndarray or not value.flags.writeable:
            return value
        if value.dtype == object and value.size <= _MOST_OBJECTS:
            copied = np.empty(value.size, object)
            for number, item in enumerate(value.reshape(-1).tolist()):
                copied[number] = copy_item(item)
            return copied.reshape(value.shape)
        owner = value
        while type(owner.base) is np.ndarray:
            owner = owner.base
        memory = None if value.dtype.hasobject else self._copied_memory(owner, owner.base is not None)
        at = _place_of(value)[0] - _place_of(owner)[0]
        return value if memory is None else np.ndarray(value.shape, value.dtype, memory, at, value.strides)

    def _copy_tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout != torch.strided or not value.is_cpu or value.is_conj() or value.is_neg() or value.requires_grad:
            return value
        storage = value.untyped_storage()
        memory = None if storage.is_shared() else self._copied_memory(storage, not storage.resizable())
        if memory is None:
            return value
        flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device="cpu")
        return empty.set_(flat, value.storage_offset(), value.shape, value.stride())

    def copy_table(self, value: Any) -> Any:
        """Return a copy of an image in memory, a table frame or a series; itself if it is too large."""
        try:
            is_table = hasattr(value, "iloc")
            nbytes = np.sum(value.memory_usage(index=False)) if is_table else value.width * value.height * len(value.getbands())
        except (AttributeError, TypeError):  # of a different class
            return value
        return value.copy() if self._takes(nbytes) else value

    def _copied_memory(self, owner: Any, is_borrowed: bool) -> Any:
        """Return a copy of the memory of an array or storage, as bytes; None if it is shared.

        ``is_borrowed``: whether it may belong to a different object, and be shared between processes.
        """
        place = address, nbytes = _place_of(owner)
        if place not in self._memory:
            self._memory[place] = None
            if not nbytes or (is_borrowed and _is_mapped_shared(address)):
                pass
            elif self._takes(nbytes):
                self._memory[place] = bytearray(ctypes.string_at(address, nbytes))
            else:
                self._arrays.add(owner)
        return self._memory[place]


def _is_mapped_shared(address: int) -> bool:
    """Whether an address is in memory that processes share; True if that is unknown."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, flags, *_ = line.split(maxsplit=2)
            first, end = (int(number, 16) for number in span.split("-"))
            if first <= address < end:
                return "s" in flags
    return True
