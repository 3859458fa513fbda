"""A batch taken apart into a short pickle and the bytes of its tensors and arrays, which are placed in memory outside of it.

By pickle's own out-of-band buffers (PEP 574), so whatever pickles can be a batch, and what cannot be placed stays in the pickle
or takes torch's way between processes. Tensors come back as pickling them would bring them: strides, and storages they share.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

PlaceBytes: TypeAlias = Callable[[int, int], int | None]
"""Called with the address of bytes and how many; returns the offset they are placed at, or None where there is no room."""

_ANY = pickle.PickleBuffer(bytearray())  # stands for bytes that are placed already


def pack(batch: Any, place: PlaceBytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the pickle of ``batch``, and offset and size of all that was placed, in the order in which `unpack` needs it.

    What pickling raises passes through.
    """
    file, places = io.BytesIO(), _Places(place)
    _Packer(file, places).dump(batch)
    return file.getvalue(), places.found


def unpack(payload: bytes, memory: memoryview, places: Sequence[tuple[int, int]]) -> Any:
    """Return the batch; its tensors and arrays lie in ``memory``, and keep the object that is behind it."""
    return pickle.loads(payload, buffers=[memory[at : at + nbytes] for at, nbytes in places])


class _Packer(ForkingPickler):
    """The pickler that is multiprocessing's, with torch's reductions, but for the tensors that can be placed."""

    def __init__(self, file: io.BytesIO, places: "_Places") -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, _stays)
        self._places = places

    def reducer_override(self, value: Any) -> Any:
        """Return how a plain tensor or array is rebuilt over placed bytes; all else goes its usual way."""
        if type(value) is np.ndarray:
            return self._array(value)
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        storage, nbytes = value.untyped_storage(), value.numel() * value.itemsize
        whole = storage.data_ptr(), storage.nbytes()
        if storage.nbytes() <= 2 * nbytes or whole in self._places.known:
            address, size, offset = *whole, value.storage_offset()
        elif value.is_contiguous():  # a small part of a large storage, which would be too much to take along
            address, size, offset = value.data_ptr(), nbytes, 0
        else:
            return NotImplemented
        if not self._places.find(address, size):
            return NotImplemented
        if size == nbytes and value.is_contiguous():
            return _rebuild, (_ANY, value.dtype, tuple(value.shape))
        return _rebuild_strided, (_ANY, value.dtype, tuple(value.shape), value.stride(), offset)

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if value.dtype.hasobject or not value.nbytes or not value.flags.c_contiguous:
            return NotImplemented
        if not self._places.find(value.ctypes.data, value.nbytes, shared=False):  # as pickled arrays share nothing
            return NotImplemented
        return _rebuild_array, (_ANY, value.dtype, value.shape)


class _Places:
    """Where things are placed, in the order in which the pickle names them; tensors that share memory have one place."""

    def __init__(self, place: PlaceBytes) -> None:
        self.found: list[tuple[int, int]] = []
        self.known: dict[tuple[int, int], int] = {}
        self._place = place

    def find(self, address: int, nbytes: int, shared: bool = True) -> bool:
        """Find a place for bytes; False where there is none."""
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
    """Whether an out-of-band buffer is to stay within the pickle."""
    return buffer is not _ANY


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes in host memory, dtype, shape and strides are all there is to a tensor."""
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


def _rebuild_array(memory: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return np.ndarray(shape, dtype, memory)
