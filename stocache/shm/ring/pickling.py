"""Pickle a batch into a short pickle, and place the bytes of its tensors and arrays in memory outside of it.

It uses pickle's out-of-band buffers (PEP 574), so anything that pickles can be a batch. Other objects stay in the
pickle, or are sent as torch sends them. Tensors keep their strides and shared storages, as with plain pickle.
The pickle comes in pieces, and large bytes objects are pieces of their own. So they are copied once: to where the pickle goes.
"""

import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PlaceBytes: TypeAlias = Callable[[int, int], int | None]
"""Called with an address and a number of bytes. Copies them, and returns their offset, or None if there is no room."""

_ANY = pickle.PickleBuffer(bytearray())  # stands for bytes that are already placed


def pack(batch: object, place: PlaceBytes) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Pack a batch with a new `RingPickler`; see `RingPickler.pack`."""
    return RingPickler().pack(batch, place)


def unpack(payload: bytes | memoryview, memory: memoryview, places: Sequence[tuple[int, int]]) -> Any:
    """Return the batch. Its tensors and arrays lie in ``memory``, and keep the owner of that memory alive."""
    return pickle.loads(payload, buffers=[memory[at : at + nbytes] for at, nbytes in places])


class _Pieces(list[bytes]):
    """A file that keeps the written pieces, without copying them."""

    write = list.append


class RingPickler(ForkingPickler):
    """multiprocessing's pickler with torch's reductions; it places plain tensors and arrays outside of the pickle.

    It packs any number of batches: to make a pickler takes as long as to pickle 32 short strings.
    """

    def __init__(self) -> None:
        self._pieces = _Pieces()
        super().__init__(self._pieces, pickle.HIGHEST_PROTOCOL, True, _stays)

    def pack(self, batch: object, place: PlaceBytes) -> tuple[list[bytes], list[tuple[int, int]]]:
        """Return the pickle of ``batch``, in pieces, and the offset and size of each placed tensor or array, for `unpack`.

        Pieces may be bytearrays of the batch. Errors of pickling pass through.
        """
        self._places = _Places(place)
        try:
            self.dump(batch)
            return self._pieces[:], self._places.found
        finally:
            del self._places
            self._pieces.clear()
            self.clear_memo()

    def reducer_override(self, value: object) -> Any:
        """Return how a plain tensor or array is rebuilt from placed bytes; NotImplemented for other objects."""
        if type(value) is np.ndarray:
            return self._array(value)
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        storage, nbytes = value.untyped_storage(), value.numel() * value.itemsize
        whole = storage.data_ptr(), storage.nbytes()
        if storage.nbytes() <= 2 * nbytes or whole in self._places.known:
            address, size, offset = *whole, value.storage_offset()
        elif value.is_contiguous():  # a small part of a large storage: place the part only
            address, size, offset = value.data_ptr(), nbytes, 0
        else:
            return NotImplemented
        if not self._places.find(address, size):
            return NotImplemented
        if size == nbytes and value.is_contiguous():
            return _rebuild, (_ANY, value.dtype, tuple(value.shape))
        return _rebuild_strided, (_ANY, value.dtype, tuple(value.shape), value.stride(), offset)

    def _array(self, value: NDArray[Any]) -> Any:
        order: Literal["C", "F"] = "C" if value.flags.c_contiguous else "F"
        placeable = value.nbytes and value.flags.forc and value.dtype.isnative and not value.dtype.hasobject
        if placeable and self._places.find(value.ctypes.data, value.nbytes, shared=False):  # pickled arrays do not share memory
            return _rebuild_array, (_ANY, value.dtype, value.shape, order)
        return value.__reduce__()  # as torch sends it: protocol 5 would make a frozen array frozen where it arrives


class _Places:
    """The places of tensors and arrays, in the order of the pickle. Tensors that share memory have one place."""

    def __init__(self, place: PlaceBytes) -> None:
        self.found: list[tuple[int, int]] = []
        self.known: dict[tuple[int, int], int] = {}
        self._place = place

    def find(self, address: int, nbytes: int, shared: bool = True) -> bool:
        """Place bytes, and return whether there was room."""
        at = self.known.get((address, nbytes)) if shared else None
        if at is None:
            at = self._place(address, nbytes)
            if at is None:
                return False
            if shared:
                self.known[address, nbytes] = at
        self.found.append((at, nbytes))
        return True


def _stays(buffer: pickle.PickleBuffer) -> bool:
    """Return whether a buffer stays in the pickle: all do, except the buffers that are placed."""
    return buffer is not _ANY


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor consists of bytes in host memory, dtype, shape and strides only."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_nested
    )


def _rebuild(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _rebuild_strided(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride, offset)


def _rebuild_array(memory: Any, dtype: Any, shape: tuple[int, ...], order: Literal["C", "F"]) -> Any:
    return np.ndarray(shape, dtype, memory, order=order)
