"""Buffers as pinned memory of CUDA, so that torch finds their batches pinned and copies nothing.

NOTE [ Copies in flight ]
    ``batch.to("cuda", non_blocking=True)`` returns before the GPU has read the batch. Of memory it has pinned itself torch
    knows who still reads it; of ours it does not. So a buffer whose tensors are dead is free only after the devices have been
    waited for, which a thread does; meanwhile workers use other buffers.
"""

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

logger = logging.getLogger("stocache")


class Pinned:
    """The buffers of a ring that are registered with CUDA in this process."""

    def __init__(self) -> None:
        self.works, self._pid = True, os.getpid()
        self._registered: dict[int, int] = {}  # bytes from an address
        self._released: SimpleQueue[tuple[Callable[[Any], None], Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def register(self, address: int, nbytes: int) -> None:
        """Have a buffer pinned, which nobody holds."""
        if not self.works or self._registered.get(address, 0) >= nbytes:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if self._registered.pop(address, 0):  # it has grown; a copy must not span two registrations
            runtime.cudaHostUnregister(address)
        error = int(runtime.cudaHostRegister(address, nbytes, 0))
        if error:
            logger.debug("cudaHostRegister of %d bytes: error %d; torch pins a copy of each batch", nbytes, error)
            self.works = False
        else:
            self._registered[address] = nbytes

    def after_copies(self, free: Callable[[Any], None], buffer: Any) -> None:
        """Call ``free(buffer)`` when no GPU can be reading from it any more."""
        # see NOTE [ Copies in flight ]
        if self._thread is None:
            self._thread = threading.Thread(target=_wait, args=(self._released,), name="stocache-pinned", daemon=True)
            self._thread.start()
        self._released.put((free, buffer))

    def close(self) -> None:
        """Let go of all buffers; nobody holds any. Does nothing in a forked child, for which CUDA does not work."""
        if self._pid == os.getpid():
            _wait_for_copies()
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
            self._registered.clear()
            self._released.put(None)


def _wait(released: "SimpleQueue[tuple[Callable[[Any], None], Any] | None]") -> None:
    while (item := released.get()) is not None:
        free, buffer = item
        try:
            _wait_for_copies()
            free(buffer)
        except RuntimeError as error:  # the GPU has failed, and may be reading for all we know
            logger.debug("cannot wait for the GPU: %s", str(error))
        del item, free, buffer  # with the last one the ring may go


def _wait_for_copies() -> None:
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):  # else nothing was copied there, and waiting would wake it up
            torch.cuda.synchronize(device)
