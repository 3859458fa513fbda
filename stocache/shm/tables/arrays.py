"""Keep arrays and tensors in shared memory: `SharedArray`, `SharedTensor`, and the segment that they lie in."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from stocache.errors import SampleError
from stocache.shm.private import map_privately
from stocache.shm.segment import Segment

_ALIGNMENT = 64  # bytes, of the arrays in a segment: as Arrow has its buffers


def new_segment(nbytes: int) -> Segment:
    """Return a new segment with ``nbytes`` of reserved data. Raises SampleError: the machine has no shared memory."""
    segment = Segment.create(8, max(1, nbytes))
    if segment.data_bytes < nbytes or not segment.extents.reserve(0, max(1, nbytes), warn=False):
        raise SampleError(f"the machine has no shared memory for {nbytes} bytes. Free memory, or do not share this value.")
    return segment


def write_array(segment: Segment, at: int, array: NDArray[Any]) -> None:
    """Write a contiguous array to reserved data."""
    if array.nbytes:
        segment.write(at, array.view(np.uint8).reshape(-1), array.nbytes)


class SharedArray(np.ndarray):
    """A read-only array in shared memory. Its parts, and what is computed with it, are ordinary arrays, and pickle as such.

    A view of it in a different shape, as pandas makes, pickles as a handle.
    """

    _segment: Segment | None

    @classmethod
    def of(cls, array: Any) -> "SharedArray":
        """Return the array in shared memory. Raises SampleError: it is of objects."""
        return cls.all_of([np.asarray(array)])[0]

    @classmethod
    def all_of(cls, arrays: Sequence[NDArray[Any]]) -> list["SharedArray"]:
        """Return the arrays in one segment. Raises SampleError: one is of objects."""
        begins = [0]
        for array in arrays:
            if array.dtype.hasobject:
                raise SampleError(
                    f"an array of {array.dtype} cannot be shared. Share its fields, or a list of texts or of numbers."
                )
            begins.append(begins[-1] + -(-max(1, array.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        segment = new_segment(begins[-1])
        made = []
        for begin, array in zip(begins, arrays, strict=False):
            order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
            write_array(segment, begin, np.ascontiguousarray(array.T if order == "F" else array))
            made.append(_array_in(segment, begin, array.dtype, array.shape, order))
        return made

    def __array_finalize__(self, made_of: Any) -> None:
        self._segment = getattr(made_of, "_segment", None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __reduce_ex__(self, protocol: Any) -> Any:
        order = "C" if self.flags.c_contiguous else "F"
        if self._segment is not None and (order == "C" or self.flags.f_contiguous):
            at = self.ctypes.data - np.frombuffer(self._segment.view(0, 1), np.uint8).ctypes.data
            if 0 <= at <= self._segment.data_bytes - self.nbytes:  # else it is a copy
                return _array_in, (self._segment, at, self.dtype, self.shape, order)
        return np.asarray(self).__reduce_ex__(protocol)


def _array_in(segment: Segment, at: int, dtype: "np.dtype[Any]", shape: tuple[int, ...], order: Any) -> SharedArray:
    """Return the array that lies in a segment from offset ``at``."""
    made: SharedArray = np.ndarray(shape, dtype, segment.view(0, segment.data_bytes), at, order=order).view(SharedArray)
    made.flags.writeable = False
    made._segment = segment
    return made


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
        segment = new_segment(tensor.nbytes)
        write_array(segment, 0, tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return _tensor_in(segment, tensor.dtype, tuple(tensor.shape))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _tensor_in, (self._segment, self.dtype, tuple(self.shape))


def _tensor_in(segment: Segment, dtype: torch.dtype, shape: tuple[int, ...]) -> SharedTensor:
    """Return the tensor that a segment holds, over a private view of it."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
    if nbytes:
        memory = map_privately(segment.fd, segment.layout.size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=segment.layout.data_at, count=nbytes)
    made: SharedTensor = tensor.view(dtype).view(shape).as_subclass(SharedTensor)
    made._segment = segment
    return made
