"""Send parcels (pickled elements) from the dispatching process to the workers. The main process does not unpickle them.

The main process gets a round of parcels, one for each worker, through the ring of the dispatching process. It sends each worker
the offset of its parcel in that memory. The worker copies the parcel. The buffer is free after all workers have copied theirs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from ctypes import memmove
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterDataPipe

from stocache.shm.ring.pickling import pack, unpack
from stocache.shm.ring.ring import Ring

_ALIGNMENT = 64
_SCRATCH_BYTES = 1 << 16


class Parcel(NamedTuple):
    """Elements in transit: their number, their pickle, and their tensors' bytes, if any, at offsets ``places`` in ``block``."""

    size: int
    payload: bytes
    places: list[tuple[int, int]]
    block: Tensor | None


class ParcelRef(NamedTuple):
    """A parcel as workers get it: ``block`` is the offset and size in the dispatching process's ring, or the bytes."""

    payload: bytes
    places: list[tuple[int, int]]
    block: tuple[int, int] | bytes


class ParcelWriter:
    """Packs elements into a reused buffer. A parcel is valid until the next call of `clear`."""

    def __init__(self) -> None:
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Use the memory for new parcels."""
        self._used = 0

    def parcel(self, elements: list[Any]) -> Parcel:
        """Return a parcel of elements."""
        begin = self._used
        pieces, places = pack(elements, self._place)
        block = torch.from_numpy(self._scratch[begin : self._used]) if places else None
        return Parcel(len(elements), b"".join(pieces), [(at - begin, nbytes) for at, nbytes in places], block)

    def _place(self, address: int, nbytes: int) -> int:
        at = self._used
        if at + nbytes > len(self._scratch):
            larger = np.empty(2 * (at + nbytes), np.uint8)  # earlier parcels keep the old array
            larger[:at] = self._scratch[:at]
            self._scratch = larger
        memmove(self._scratch.ctypes.data + at, address, nbytes)
        self._used = at + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return at


def parcel_ref(parcel: Parcel, ring: Ring) -> ParcelRef:
    """Return a reference to send to a worker. Keep the parcel until the worker has answered."""
    if parcel.block is None:
        return ParcelRef(parcel.payload, [], b"")
    offset = ring.offset_of(parcel.block)
    block = parcel.block.numpy().tobytes() if offset is None else (offset, len(parcel.block))
    return ParcelRef(parcel.payload, parcel.places, block)


def unpack_parcel(ref: ParcelRef, ring: Ring) -> list[Any]:
    """Return the elements of a parcel, in private memory."""
    here = isinstance(ref.block, bytes)
    memory = np.frombuffer(bytearray(ref.block), np.uint8) if here else ring.copied(*ref.block)
    elements: list[Any] = unpack(ref.payload, memory.data, ref.places)
    return elements


class Feed(IterDataPipe[Any]):
    """Takes the place of the dispatched part in a worker's graph, and yields the elements that the worker got from it.

    Attributes:
        skipped: elements that the next iteration leaves out.
        taken: elements that the graph has taken, including the skipped ones.
        length: of the dispatched part; None if it has no length.
        shares: the number of workers, and the number of this one, for ``len``.
    """

    on_empty: Callable[[], None]  # called when the feed is empty; returns when it has elements, or is closed

    def __init__(self, length: int | None) -> None:
        self.length, self.shares = length, (1, 0)
        self.skipped = self.taken = 0
        self.begin()

    def begin(self) -> None:
        """Drop the elements of an earlier iteration."""
        self._waiting: deque[Any] = deque()
        self._closed = False

    def add(self, elements: Iterable[object], closed: bool) -> None:
        """Add elements; ``closed`` says that they are the last."""
        self._waiting.extend(elements)
        self._closed = closed

    @property
    def waiting(self) -> int:
        """Number of elements that the graph has not taken yet."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        self.taken = self.skipped
        while True:
            while not self._waiting:
                if self._closed:
                    return
                self.on_empty()
            self.taken += 1
            yield self._waiting.popleft()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the dispatched part of the graph has no length")
        workers, worker = self.shares
        return max(0, -(-(self.length - worker) // workers))
