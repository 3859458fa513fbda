"""A ring of reusable buffers in shared memory, through which worker processes pass batches to their parent. One module, because
both sides change the same words of a buffer.

A *lane* is the set of buffers of one worker. A *slot* is the number of a buffer in the whole ring.

NOTE [ Who owns a buffer ]
    A worker takes a lane of buffers. A kernel lock marks the lane, and ends with the worker. The worker writes a batch into a
    FREE buffer, marks it SENT, and sends a few bytes that say where it is. The parent unpickles them, marks the buffer HELD,
    and builds tensors over the same memory. When the last tensor or view is gone, the buffer is FREE again. So in each state
    only one process may change the state, and no lock is needed. If no buffer is free, no process waits: the batch is sent as
    torch sends it. The word of a buffer also counts its batches, so a message about an earlier batch is refused.

    The end of a tensor is only recorded where it happens (`LeaseTracker`). `reap` frees the buffer when the next batch is
    requested or arrives.

    A loop that ends early leaves buffers SENT by workers that have exited. The next worker on the lane frees them once their
    iteration is over, that is, not among the iterations that the parent lists as live.

    The memory is a segment that is mostly untouched. Each buffer has STRIDE bytes of addresses, and takes memory only as its
    batches need it, each page once. So the sizes of batches need not be known before. If the machine has no
    shared memory for a batch, its bytes go through the pipe.
"""

import contextlib
import itertools
import logging
import math
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from ctypes import memmove, string_at
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import WorkerError
from stocache.shm.leases import LeaseTracker
from stocache.shm.ring.pickling import RingPickler, pack, unpack
from stocache.shm.ring.pinned import Pinned
from stocache.shm.segment import Segment
from stocache.system.limits import GIB, KIB, MIB, format_size
from stocache.system.platform import here
from stocache.system.spans import RECEIVE, span

logger = logging.getLogger("stocache")

_clock_ns = time.perf_counter_ns

STRIDE = 2 * GIB  # bytes of addresses of a buffer
_EXTENT = 2 * MIB  # a buffer takes memory in steps of this size
_ALIGNMENT = 64
# Bytes of a pickle that go through torch's queue; larger ones lie in the buffer, and come faster so. Measured in turns: both
# take the same time at 32 KiB
_SMALL = 32 * KIB

_FREE, _SENT, _HELD = range(3)  # the two low bits of a buffer's word; the bits above number its batch
_LIVE = 8  # most iterations over one loader at the same time
_LANE_WORDS = 4  # of a lane: its owner's iteration, pid, and number of the current batch plus 1; and its count of small batches

# Reasons for sending a batch without the ring
NO_BUFFER = "no buffer was free: the batches in them are still held"
NO_LANE = "no lane was free: other iterators over the loader have them"
NO_MEMORY = "the machine gave no shared memory"
TOO_LARGE = f"it has more than {format_size(STRIDE)}"
TOO_SMALL = "it is small, and has no tensors or arrays in host memory"

_said_no_memory = False

_rings: "weakref.WeakValueDictionary[str, Ring]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Ring:
    """``lanes`` times ``depth`` buffers. The receiving process makes it, and pickles it to the senders.

    Args:
        pinned: whether to register the buffers with CUDA.
        keeps: whether a pinned buffer is kept until the GPUs were waited for. Else the receiver holds it until its copy ends.

    Attributes:
        received: batches that came through the ring.
        record: a `TimingRecord` that the senders get with the ring; None if nothing is recorded.
        note_hand_over: called by the receiver with the nanoseconds that a batch took from its sender; or None.
    """

    record: Any = None
    note_hand_over: Callable[[int], object] | None = None

    def __init__(self, lanes: int, depth: int, pinned: bool = False, keeps: bool = True) -> None:
        words = _LIVE + lanes * (_LANE_WORDS + depth)
        segment = Segment.create(words * 8, lanes * depth * STRIDE, _EXTENT)
        self._assemble(f"{os.getpid()}-{next(_numbers)}", lanes, depth, segment)
        self.received, self._fallbacks = 0, dict.fromkeys((NO_BUFFER, NO_LANE, NO_MEMORY, TOO_LARGE, TOO_SMALL), 0)
        self._pid = os.getpid()
        self._iterations = itertools.count(1)
        self._leases: LeaseTracker[int] = LeaseTracker(is_shared=True)  # the slots of held batches
        self._copied: deque[int] = deque()  # slots whose batches are gone, and are copied to GPUs
        self._reaping = threading.Lock()
        self._mapped = [0] * (lanes * depth)
        self._pinned, self._keeps = Pinned() if pinned else None, keeps
        if self._pinned is not None:
            weakref.finalize(self, self._pinned.close).atexit = False

    def _assemble(self, key: str, lanes: int, depth: int, segment: Segment) -> None:
        self.key, self.lanes, self.depth, self._segment = key, lanes, depth, segment
        words = segment.control.cast("Q")
        self._live, rest = words[:_LIVE], words[_LIVE:]
        self._owners, self._words = rest[: lanes * _LANE_WORDS], rest[lanes * _LANE_WORDS :]
        self._data = segment.view(0, segment.data_bytes)
        self._address = segment.tensor(0, 1).data_ptr() if self.works else 0
        self._lane: Lane | None = None
        _rings[key] = self

    def __getstate__(self) -> tuple[Any, ...]:
        return self.record, self.key, self.lanes, self.depth, self._segment

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.record, *own = state
        self._assemble(*own)
        self._pid = 0  # another process made it

    def last_request_of(self, pid: int) -> int | None:
        """Return the number of the last batch that a worker began; None before its first."""
        for at in range(0, len(self._owners), _LANE_WORDS):
            if self._owners[at + 1] == pid and self._owners[at + 2]:
                return int(self._owners[at + 2]) - 1
        return None

    @property
    def mine(self) -> bool:
        """Whether this process made the ring; False in a forked child."""
        return self._pid == os.getpid()

    @property
    def works(self) -> bool:
        """Whether the machine has shared memory for the ring."""
        return self._segment.backing != "none"

    @property
    def fallbacks(self) -> dict[str, int]:
        """The number of batches that were sent without the ring, by reason."""
        small = sum(self._owners[at + 3] for at in range(0, len(self._owners), _LANE_WORDS))
        return self._fallbacks | {TOO_SMALL: self._fallbacks[TOO_SMALL] + small}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffers take now."""
        return self._segment.extents.reserved_bytes

    @property
    def occupancy(self) -> float:
        """The share of all buffers that hold a batch: one on its way, or one that the user holds."""
        words = np.frombuffer(self._words, np.uint64)
        return float(np.count_nonzero(words & np.uint64(3))) / max(1, len(words))

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a contiguous tensor in the memory of the buffers; None if it lies elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if self.works and 0 <= offset < self.lanes * self.depth * STRIDE else None

    def copied(self, offset: int, nbytes: int) -> "NDArray[np.uint8]":
        """Return a private copy of bytes of the buffers, in any process that has the ring."""
        return np.array(np.frombuffer(self._data[offset : offset + nbytes], np.uint8))

    def begin(self) -> int:
        """Return the number of a new iteration, live until its `end`; 0, which gets no lane, if too many are live."""
        number = next(self._iterations)
        for at in range(_LIVE):
            if not self._live[at]:
                self._live[at] = number
                return number
        return 0

    def end(self, iteration: int) -> None:
        """End an iteration: batches that were sent for it will not be received any more."""
        if self.mine:  # a forked child inherits the finalizer that calls this
            for at in range(_LIVE):
                if self._live[at] == iteration:
                    self._live[at] = 0

    def lane(self, iteration: int) -> "Lane | None":
        """Return the lane of this process, taken at the first call; None if no lane is free."""
        if (self._lane is None or not self._lane.mine) and self.works and iteration:
            self._lane = self._claim(iteration)
        return self._lane

    def _claim(self, iteration: int) -> "Lane | None":
        segment = self._segment
        # last come lanes of workers that died in this iteration: their owner words say at which batch
        for number in sorted(range(self.lanes), key=lambda number: self._owners[number * _LANE_WORDS] == iteration):
            owner = self._owners[number * _LANE_WORDS : (number + 1) * _LANE_WORDS]
            first = number * self.depth
            words = self._words[first : first + self.depth]
            with segment.guard:
                if not segment.try_lock(number):
                    continue
                if owner[0] in self._live and any(word & 3 == _SENT for word in words):
                    segment.unlock(number)  # the parent will still receive these
                    continue
                owner[0], owner[1], owner[2] = iteration, os.getpid(), 0
            return Lane(self.key, segment, self._data, self._address, first, owner, words)
        return None

    def receive(
        self, slot: int, batch: int, nbytes: int, places: list[tuple[int, int]], payload: bytes | tuple[int, int]
    ) -> Any:
        """Return the batch in a buffer. The buffer is held until the last tensor or array over it is gone.

        ``payload``: its pickle; or the offset and the size of that in the buffer.
        """
        # see NOTE [ Who owns a buffer ]
        if self._words[slot] != batch << 2 | _SENT:
            raise WorkerError(
                f"a batch is lost: its worker has exited, and another worker uses buffer {slot}. Restart the loop."
            )
        self._words[slot] = batch << 2 | _HELD
        self.received += 1
        start = slot * STRIDE
        if nbytes > self._mapped[slot]:
            self._segment.extents.populate(start, start + nbytes)
            self._mapped[slot] = nbytes
        memory = _Memory(nbytes, np.uint8, self._data[start : start + nbytes])
        self._leases.acquire(slot, memory)
        if self._pinned is not None and places:
            self._pinned.register(self._address + start, -(-nbytes // _EXTENT) * _EXTENT)
            memory.ring = self  # a live ring keeps it registered
        self.reap()
        content = memory.data
        pickled = payload if isinstance(payload, bytes) else content[payload[0] : payload[0] + payload[1]]
        return unpack(pickled, content, places)

    def record_fallback(self, reason: str) -> None:
        """Count a batch that arrived without the ring. Warn, once, if that is slow."""
        global _said_no_memory
        if reason == NO_MEMORY and not _said_no_memory and here.SHARES_MEMORY:
            _said_no_memory = True
            logger.warning(
                "there is no shared memory for batches: they go through a pipe, which is slower. In Docker, raise --shm-size."
            )
        self._fallbacks[reason] += 1
        self.reap()

    def reap(self) -> None:
        """Free the buffers whose tensors are gone, unless a GPU still reads them or a living child has inherited them."""
        if not self.mine or not (self._copied or self._leases.any_released) or not self._reaping.acquire(blocking=False):
            return  # another thread is freeing them
        try:
            for slot in self._leases.released():
                if self._pinned is not None and self._pinned.works and self._keeps:
                    self._pinned.after_copies(self._copied.append, slot)
                else:
                    self._copied.append(slot)
            while self._copied:
                slot = self._copied.popleft()  # a lock taken since orders the last read of the tensors before this write
                self._words[slot] = self._words[slot] & ~3 | _FREE
        finally:
            self._reaping.release()


class _Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of one batch. It owns its buffer: arrays over a mere view would keep its base alive, not the view."""

    ring: Ring


class Lane:
    """The buffers of one sending process, for one of its threads. It fills one of them at a time.

    Attributes:
        problem: why the last batch is sent without the ring, if it is.
    """

    def __init__(
        self,
        key: str,
        segment: Segment,
        data: memoryview,
        address: int,
        first: int,
        owner: "memoryview[int]",
        words: "memoryview[int]",
    ) -> None:
        self._key, self._segment, self._data, self._ring_address, self._first = key, segment, data, address, first
        self._words, self._owner = words, owner  # of this lane only
        self._pid = os.getpid()
        for at, word in enumerate(words):
            if word & 3 == _SENT:  # by a worker that has exited, for an iteration that is over
                words[at] = word & ~3 | _FREE
        self._packer = RingPickler()
        self._packed: dict[Hashable, tuple[list[bytes], list[tuple[int, int]]]] = {}  # by kind of batch; see `publish`
        self._ready = [0] * len(words)  # bytes from the start of a buffer that are reserved and mapped here
        self._at = self._start = self._used = 0  # the buffer that is filled, where it starts, and its bytes that are used
        self.problem = TOO_SMALL

    @property
    def mine(self) -> bool:
        """Whether this process took the lane; False in a forked child."""
        return self._pid == os.getpid()

    def record_request(self, number: int) -> None:
        """Record the number of the batch that is made now."""
        self._owner[2] = number + 1

    def take(self) -> bool:
        """Fill the first free buffer from now on. It stays free until it is published. False if all are in use."""
        for at, word in enumerate(self._words):
            if word & 3 == _FREE:
                self._at, self._start, self._used, self.problem = at, (self._first + at) * STRIDE, 0, TOO_SMALL
                return True
        return False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialised tensor in the buffer; None if it has no room."""
        nbytes = math.prod(shape) * dtype.itemsize
        at = self._allocate(nbytes)
        if at is None:
            return None
        if not nbytes:  # which torch.frombuffer refuses
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = torch.frombuffer(self._data, dtype=torch.uint8, offset=self._start + at, count=nbytes)
        return memory.view(dtype).view(shape)

    def publish(self, batch: object, kind: Hashable = None) -> "RemoteCall":
        """Return the message to send in place of ``batch``. From then on the buffer belongs to the receiver.

        Args:
            kind: equal for batches that differ in their values only, and whose tensors all lie in the buffer. They are pickled
                once.
        """
        began_ns, packed = _clock_ns(), None if kind is None else self._packed.get(kind)
        if packed is None:
            try:
                packed = self._packer.pack(batch, self._place)
            except (RuntimeError, OSError):
                if self.problem is not NO_MEMORY:
                    raise
                return fallback(self._key, NO_MEMORY, batch)
            if kind is not None:
                self._packed[kind] = packed
        pieces, places = packed
        payload = self._write(pieces) or b"".join(pieces)
        if not places and isinstance(payload, bytes):  # send this very payload: it may hold descriptors to be fetched
            if self.problem is TOO_SMALL:
                self._owner[3] += 1
                return RemoteCall(pickle.loads, payload)
            return RemoteCall(_receive_fallback, _clock_ns() - began_ns, self._key, self.problem, payload)
        number = (self._words[self._at] >> 2) + 1
        self._words[self._at] = number << 2 | _SENT
        content = self._first + self._at, number, self._used, places, payload
        return RemoteCall(_receive, _clock_ns() - began_ns, self._key, *content)

    def _write(self, pieces: list[bytes]) -> tuple[int, int] | None:
        """Write a pickle into the buffer, and return its offset and size; None if it is small, or if there is no room."""
        nbytes = sum(map(len, pieces))
        start = self._allocate(nbytes) if nbytes > _SMALL else None
        if start is None:
            return None
        at = self._start + start
        for piece in pieces:
            self._data[at : at + len(piece)] = piece
            at += len(piece)
        return start, nbytes

    def _place(self, address: int, nbytes: int) -> int | None:
        begin = self._ring_address + self._start
        if begin <= address < begin + self._used:  # it lies in this buffer
            return address - begin
        at = self._allocate(nbytes)
        if at is not None:
            memmove(begin + at, address, nbytes)
        return at

    def _allocate(self, nbytes: int) -> int | None:
        at = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if at + nbytes > STRIDE:
            self.problem = TOO_LARGE
            return None
        if not self._ensure(at + nbytes):
            self.problem = NO_MEMORY
            return None
        self._used = at + nbytes
        return at

    def _ensure(self, nbytes: int) -> bool:
        """Reserve the first ``nbytes`` of the buffer, and return whether they may be written."""
        ready = self._ready[self._at]
        if nbytes <= ready:
            return True
        stop = -(-nbytes // _EXTENT) * _EXTENT
        with self._segment.guard:
            if not self._segment.extents.reserve(self._start + ready, self._start + stop, warn=False):
                return False
        self._segment.extents.populate(self._start + ready, self._start + stop)
        self._ready[self._at] = stop
        return True


class RemoteCall:
    """A message to another process: a call that is made when the message is unpickled, and whose result takes its place."""

    __slots__ = ("_arguments", "function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self._arguments


def fallback(key: str, reason: str, batch: object) -> RemoteCall:
    """Return the message to send if a batch cannot go through the ring ``key``, for that ``reason``.

    The batch is pickled here, so that the caller sees errors. A queue pickles in a thread of its own, which would lose the
    batch, and the parent would wait for ever. If torch has no shared memory for its tensors, their bytes are sent.
    """
    began_ns = _clock_ns()
    if reason is not NO_MEMORY:
        with contextlib.suppress(RuntimeError, OSError):
            pieces, _ = pack(batch, lambda address, nbytes: None)
            return RemoteCall(_receive_fallback, _clock_ns() - began_ns, key, reason, b"".join(pieces))
    memory = bytearray()
    pieces, places = pack(batch, partial(_append, memory))
    return RemoteCall(_receive_fallback, _clock_ns() - began_ns, key, NO_MEMORY, b"".join(pieces), memory, places)


def _append(memory: bytearray, address: int, nbytes: int) -> int:
    memory.extend(bytes(-len(memory) % _ALIGNMENT) + string_at(address, nbytes))
    return len(memory) - nbytes


def _receive(packing_ns: int, key: str, *content: Any) -> Any:
    began_ns, ring = _clock_ns(), ring_of(key)
    with span(RECEIVE):
        batch = ring.receive(*content)
    if ring.note_hand_over is not None:
        ring.note_hand_over(packing_ns + _clock_ns() - began_ns)
    return batch


def _receive_fallback(
    packing_ns: int,
    key: str,
    reason: str,
    payload: bytes,
    memory: bytes | bytearray = b"",
    places: Sequence[tuple[int, int]] = (),
) -> Any:
    began_ns, ring = _clock_ns(), ring_of(key)
    with span(RECEIVE):
        batch = unpack(payload, memoryview(memory), places)
    ring.record_fallback(reason)
    if ring.note_hand_over is not None:
        ring.note_hand_over(packing_ns + _clock_ns() - began_ns)
    return batch


def ring_of(key: str) -> Ring:
    """Return the ring of that key.

    Raises:
        WorkerError: this process neither made nor received it.
    """
    ring = _rings.get(key)
    if ring is None:
        raise WorkerError("a batch arrived in a process that did not make its DataLoader. Iterate it where it was made.")
    return ring
