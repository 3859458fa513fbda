"""Register the buffers of a ring as pinned memory with CUDA, so that torch need not copy batches to pin them.

NOTE [ Copies in flight ]
    ``batch.to("cuda", non_blocking=True)`` returns before the GPU has read the batch. torch tracks these copies only for memory
    that it pinned itself. So when the tensors of a buffer are gone, a thread waits for the devices before the buffer is free.
    Meanwhile workers use other buffers.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stocache.system.background import Background

logger = logging.getLogger("stocache")


class Pinned:
    """The buffers of a ring that this process has registered with CUDA."""

    def __init__(self) -> None:
        self.works, self._pid = True, os.getpid()
        self._registered: dict[int, int] = {}  # address: bytes
        self._background = Background("stocache-pinned")

    def register(self, address: int, nbytes: int) -> None:
        """Pin a buffer whose batch nobody holds yet."""
        if not self.works or self._registered.get(address, 0) >= nbytes:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if self._registered.pop(address, 0):  # it has grown, and a copy must not span two registrations
            runtime.cudaHostUnregister(address)
        error = int(runtime.cudaHostRegister(address, nbytes, 0))
        if error:
            _clear_error()
            logger.debug("cudaHostRegister of %d bytes: error %d; torch pins a copy of each batch", nbytes, error)
            self.works = False
        else:
            self._registered[address] = nbytes

    def after_copies(self, free: Callable[[Any], None], buffer: Any) -> None:
        """Call ``free(buffer)`` when no GPU can still read from it."""
        # see NOTE [ Copies in flight ]
        self._background.put(partial(_free_after_copies, free, buffer))

    def close(self) -> None:
        """Unregister all buffers; nobody holds a batch. Does nothing in a forked child, in which CUDA does not work."""
        if self._pid == os.getpid():
            _wait_for_copies()
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
            self._registered.clear()


def _clear_error() -> None:
    """Clear the last error of CUDA in this thread: torch's next launch would raise it, though it is not of that launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, dtype=torch.uint8, device="cuda")


def _free_after_copies(free: Callable[[Any], None], buffer: Any) -> None:
    _wait_for_copies()  # raises if the GPU has failed, which may still be reading
    free(buffer)


def _wait_for_copies() -> None:
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):  # else nothing was copied there, and waiting would start CUDA on it
            torch.cuda.synchronize(device)
