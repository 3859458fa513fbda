"""A GPU and the stream on which batches are copied to it.

NOTE [ Copies on a stream of their own ]
    Batches are copied, and gathered, on one stream, while the training step runs on a different one. An event on it marks the
    end of each batch. The stream of the step waits for this event, the CPU does not. ``record_stream`` keeps the memory of a
    batch from being used again before the step has ended, if the user frees the batch before.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.shm.pool import NUMPY_DTYPES, pinned_memory

_CAN_USE_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM of cuDeviceGetAttribute
_cuda: Any = torch.cuda  # parts of it have no types


def as_device(device: Any) -> torch.device | None:
    """Return the GPU that ``device`` names; None for None and the CPU.

    Raises:
        ValueError: it is not a device of CUDA, or this machine does not have it.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device={device!r:.100} is not a device of torch. Use 'cuda', 'cuda:1', or None.") from error
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ValueError(f"device='{found}': batches are delivered on 'cuda', or on the CPU. Leave the option out.")
    if not torch.cuda.is_available():
        has = "sees no GPU" if torch.version.cuda else "was built without CUDA"
        raise ValueError(f"device='{found}': torch {torch.__version__} {has}. Leave the option out, or use 'cpu'.")
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise ValueError(f"device='{found}' does not exist: torch sees {torch.cuda.device_count()} GPU(s).")
    return found


class Cuda:
    """A GPU of this process, with a stream for copies; see NOTE [ Copies on a stream of their own ]."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._index: int = self.device.index  # torch looks for the number of a device in 10 µs
        self._stream = _cuda.Stream(self.device)
        self._step = torch.cuda.current_stream(self._index)
        self._here = threading.local()

    def copying(self) -> Any:
        """Return a context in which this thread copies on the stream for copies."""
        if not hasattr(self._stream, "__enter__"):  # torch before 2.7
            return _cuda.stream(self._stream)
        own = getattr(self._here, "stream", None)  # a stream is no context for two threads
        if own is None:
            names = "stream_id", "device_index", "device_type"
            own = self._here.stream = _cuda.Stream(**{name: getattr(self._stream, name) for name in names})
        return own  # at 1 µs; torch.cuda.stream takes 10

    @contextlib.contextmanager
    def on_step(self) -> Iterator[None]:
        """Copy on the stream of the step, which then need not keep the memory. What is marked next comes after that."""
        with _cuda.stream(self._step):
            yield
        self._stream.wait_stream(self._step)

    def mark(self) -> torch.cuda.Event:
        """Return an event that comes when all copies that were begun so far have ended."""
        event: torch.cuda.Event = _cuda.Event()
        event.record(self._stream)
        return event

    def hand_over(self, event: torch.cuda.Event, tensors: Iterable[Tensor]) -> None:
        """Have the current stream wait for an event, and keep the memory of tensors until it has used them."""
        self._step = stream = torch.cuda.current_stream(self._index)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)

    def wait(self) -> None:
        """Wait until all copies have ended."""
        self._stream.synchronize()

    def as_current(self) -> Any:
        """Return a context in which this is the current device, as threads need it."""
        return torch.cuda.device(self.device)

    @property
    def reads_host_memory(self) -> bool:
        """Whether a kernel may read registered host memory at its address in this process."""
        value = ctypes.c_int(0)
        with contextlib.suppress(OSError, AttributeError):  # not a driver of NVIDIA
            driver = ctypes.CDLL("libcuda.so.1")
            if driver.cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTERS, self.device.index):
                return False
        return bool(value.value)

    def view(self, rows: Tensor) -> Tensor | None:
        """Return the tensor of the device over registered host memory; None if the first row is not registered."""
        try:
            view = torch.as_tensor(_Interface(rows), dtype=rows.dtype, device=self.device)
        except RuntimeError:
            return None
        return view if view.data_ptr() == rows.data_ptr() else None  # else it is a copy


class _Interface:
    """The CUDA array interface of a host tensor, which it keeps."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        kind, data = np.dtype(NUMPY_DTYPES[rows.dtype]).str, (rows.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": tuple(rows.shape), "typestr": kind, "data": data, "version": 3}


def send_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy contiguous arrays of int64, or of bytes, to a device. Return them there, of one dimension.

    They go in one copy: each copy costs the CPU some microseconds, whatever its size.
    """
    ends = list(accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays))
    host = pinned_memory(ends[-1] if ends else 0)
    places = [slice(begin, begin + array.nbytes) for begin, array in zip([0, *ends], arrays, strict=False)]
    memory = host.numpy()
    for place, array in zip(places, arrays, strict=True):
        memory[place] = array.reshape(-1).view(np.uint8)
    there: Tensor = host.to(device, non_blocking=True)
    parts = [there[place] for place in places]
    return [part if array.dtype == np.uint8 else part.view(torch.int64) for part, array in zip(parts, arrays, strict=True)]


_ALIGNMENT = 16  # of an array in a copy
