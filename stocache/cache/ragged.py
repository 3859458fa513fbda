"""RaggedCache: samples of any size in shared memory, under the protocol and the byte limit of all caches."""

import contextlib
import logging
import operator
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stocache.cache import arena
from stocache.cache.admission import LATER, NEVER, CostAdmission
from stocache.cache.admission import control_bytes as admission_bytes
from stocache.cache.allocate import EMPTY, OOB, Blueprint, OnBusy, open_memory
from stocache.cache.arena import NO_MEMORY, Arena
from stocache.cache.base import MISSING, SampleCache
from stocache.cache.stats import FILLS, REFUSED
from stocache.errors import LimitError, SampleError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.indices import check_indices, check_len
from stocache.samples.record_decoder import RecordReader
from stocache.samples.record_encoder import HEAD, Record, integers_codec, pack_integers, write_treedef
from stocache.samples.type_lookup import NotImported
from stocache.shm.named import Plan
from stocache.shm.segment import Segment
from stocache.system.deprecation import renamed_arguments
from stocache.system.limits import affordable_bytes, asked_bytes, format_size

logger = logging.getLogger("stocache")

_unpack_head = HEAD.unpack_from
_COMPRESSED = 4  # a bit of the head's last number, between the width of the integers and their count
_READERS = 4096  # kinds of samples a process remembers how to read


class _Encoded(NamedTuple):
    """A sample as its record will hold it; the head and the number of the treedef are still missing."""

    treedef: bytes
    data: bytes
    packed: int
    tail: bytes

    @property
    def room(self) -> int:
        """Bytes of the arena that it takes."""
        return HEAD.size + len(self.data) + len(self.tail) + 7 & ~7


class RaggedCache(SampleCache):
    """A cache of samples whose sizes vary: images as they are, detection targets, text, token lists, point clouds.

        cache = RaggedCache(size_limit_gib=32, dataset_len=len(dataset))
        sample = cache.get_or_load(idx, load)       # or get_slot and set_slot, as with SharedCache

    A sample is any tree of dicts, lists, tuples, namedtuples, dataclasses, sets, deques and other mappings, with tensors (and
    their subclasses: MetaTensors, tv_tensors), numpy arrays, Python numbers, str, bytes, None, enum members, paths, dates,
    times, Decimals, Fractions, ranges, slices and PIL images in it; each sample may differ from the others. It comes back equal
    in type, structure, dtype, shape, strides (of what is dense) and value. Nothing is pickled unless allowed.

    Samples name their classes; a process that reads one looks for its class in the modules it has imported, and imports none
    for it. Where it is not there, the sample is a miss: it is loaded again, which is counted, and warned of once.

    Samples are kept in the order in which they come until the limit is reached, and then stay: under shuffling a random share.

    Args:
        size_limit_gib: GiB for the cache on this machine, as for `SharedCache`. Covers all: besides its own bytes a sample
            takes 9 bytes for its place, 16 for a head, 1, 2 or 4 for each size in it, and up to 7 to the next multiple of 8.
        dataset_len: samples in the whole dataset.
        admission: "all", or "cost": the time each sample takes to load is measured when it is first loaded, and those with the
            highest cost per byte are kept. Most of them in the first epoch, if its order is random; all in the second.
        codec: compress samples without loss: "zstd" (smaller) or "lz4" (faster); needs ``pip install 'stocache[codecs]'``.
        allow_pickle: True to pickle what has no bytes of its own: other objects, sparse tensors, arrays of objects, whatever
            pickles. Reading such a cache runs what the pickles say: never give it a name that others of your user use for other
            things.
        name, persist, fingerprint, on_busy: as for `SharedCache`.

    Raises:
        LimitError: the limit is no size, or leaves no room for samples; or ``admission`` is unknown.
        CodecError: the codec is unknown, or not installed.
        CacheNameError, MismatchError, SegmentError, BusyError: as for `SharedCache`.
    """

    _RELEASED = (*SampleCache._RELEASED, "_arena", "_offsets", "_memory", "_admission")

    @renamed_arguments(admit="admission")
    def __init__(
        self,
        size_limit_gib: float | str,
        dataset_len: int,
        *,
        admission: Literal["all", "cost"] = "all",
        codec: Literal["zstd", "lz4"] | None = None,
        allow_pickle: bool = False,
        name: str | None = None,
        persist: bool = False,
        fingerprint: str | None = None,
        on_busy: OnBusy = "uncached",
    ) -> None:
        if admission not in ("all", "cost"):
            raise LimitError(f"admission={admission!r} is unknown. Use 'all' or 'cost'.")
        if codec is not None:
            Codec(codec)  # raises
        dataset_len = check_len(dataset_len)
        blueprint = _Blueprint(size_limit_gib, dataset_len, admission, codec, allow_pickle)
        segment, _ = open_memory(blueprint, name, persist, fingerprint, on_busy)
        self._assemble(dataset_len, admission, codec, allow_pickle, segment)
        logger.info("%r", self)

    def _assemble(self, dataset_len: int, admission: str, codec: str | None, allow_pickle: bool, segment: Segment) -> None:
        """Set every attribute; what follows from the arguments is rebuilt in each process rather than pickled."""
        self._share(segment, dataset_len)
        self._admission_rule, self._codec_name, self._allow_pickle = admission, codec, allow_pickle
        self._codec = Codec(codec) if codec is not None else None
        self._arena = Arena(segment, dataset_len)
        self._offsets = self._arena.offsets
        self._memory = segment.view(0, segment.data_bytes)
        self._address = segment.tensor(0, segment.data_bytes).data_ptr()
        self._readers: dict[int, RecordReader] = {}
        self._reads: dict[int, Any] = {}  # their functions, which are looked up more quickly
        self._admission = None
        self.revises = admission == "cost"
        if self.revises:
            control = segment.control[arena.control_bytes(dataset_len) :]
            self._admission = CostAdmission(control, dataset_len, segment.data_bytes)
        self._samples, self._room = "samples of any size", format_size(segment.data_bytes)

    # ------------------------------------------------------------------------------------------------ how samples are held

    def _encode(self, value: Any, where: str) -> _Encoded:
        record = Record(value, where, self._allow_pickle)
        data, integers = record.pack()
        tail, packed = pack_integers(integers)
        if self._codec is not None and (smaller := self._codec.compress(data)) is not None:
            data, packed = smaller, packed | _COMPRESSED
        return _Encoded(write_treedef(record.treedef), data, packed, tail)

    def _store(self, idx: int, encoded: _Encoded, cost_s: float | None) -> int | None:
        treedef, data, packed, tail = encoded
        if self._admission is not None and cost_s is not None:
            judge = partial(self._admission.judge, idx, cost_s, encoded.room, self._arena.used)
            verdict = self._arena.run_locked(judge, LATER)
            if verdict in (LATER, NEVER):
                if verdict == NEVER:
                    self._states[idx] = OOB
                return None
        at = number = self._arena.number_of(treedef)
        if number >= 0:
            at = self._arena.append(b"".join((HEAD.pack(len(data), number, packed), data, tail)))
        if at == NO_MEMORY:
            return REFUSED
        if at < 0:
            if self._states[idx] == EMPTY:
                self._states[idx] = OOB  # room is never given back
            return None
        self._offsets[idx] = at
        return FILLS

    _slot = staticmethod(operator.index)

    def _load(self, idx: int, copy: bool) -> Any:
        memory, at = self._memory, self._offsets[idx]
        try:
            nbytes, number, packed = _unpack_head(memory, at)
            at += HEAD.size
            integers = integers_codec(packed).unpack_from(memory, at + nbytes)
        except (struct.error, OverflowError, MemoryError):
            raise SegmentError(f"the cache is damaged: the record of sample {idx} reaches beyond it.") from None
        read = self._reads.get(number)
        if read is None:
            reader = self._reader(number)
            if reader is None:
                return MISSING
            read = reader.read
        if packed & _COMPRESSED:
            data = self._decompressed(memory[at : at + nbytes], self._readers[number].nbytes(integers))
            address = np.frombuffer(data, np.uint8).ctypes.data if data else 0
            return read(data, address, 0, len(data), integers, True)
        return read(memory, self._address, at, nbytes, integers, copy)

    def _reader(self, number: int) -> RecordReader | None:
        """Return what reads the records of a treedef; None where a module is not imported here: that is a miss."""
        if len(self._readers) >= _READERS:
            self._readers.clear()
            self._reads.clear()
        try:
            reader = RecordReader(self._arena.skeleton(number), self._allow_pickle)
        except NotImported as error:
            self._unread = str(error)
            return None
        self._readers[number], self._reads[number] = reader, reader.read
        return reader

    def _decompressed(self, data: Any, limit: int) -> bytes:
        if self._codec is None:
            raise SegmentError("the cache is damaged: it has a compressed sample, and no codec.")
        try:
            return self._codec.decompress(data, limit)
        except (ValueError, MemoryError) as error:
            raise SegmentError(f"the cache is damaged: {error}.") from error

    def offer(self, indices: Iterable[int], values: Iterable[Any]) -> None:
        """Cache samples that were loaded along with one that was missed: all that are empty, or none if not all have room."""
        encoded: dict[int, _Encoded] = {}
        for idx, value in zip(indices, values, strict=True):
            if self._states[idx] == EMPTY:
                with contextlib.suppress(SampleError):  # which is reported when it is asked for
                    encoded[idx] = self._encode(value, f"sample {idx}")
        room = sum(item.room for item in encoded.values()) <= self._segment.data_bytes - self._arena.used
        for idx, item in encoded.items():
            if room:
                self._offer(idx, item)
            else:
                with self._segment.guard:
                    self._shut_out(idx)

    def _refused(self, idx: int) -> bool:
        return self._arena.refused

    def _load_many(self, index: np.ndarray[Any, np.dtype[np.int64]]) -> list[Any]:
        return [self._load(idx, True) for idx in index.tolist()]

    def _forget(self) -> None:
        self._arena.forget()
        if self._admission is not None:
            self._admission.forget()
        self._aux.numpy().fill(EMPTY if self._segment.data_bytes else OOB)
        self._segment.forget()

    def _amounts(self, filled: int) -> dict[str, int]:
        words = self._segment.control[arena.words_at(self._dataset_len) :]
        return arena.amounts(words, self._dataset_len, self._segment.data_bytes, filled)

    # ------------------------------------------------------------------------------------------------ many samples

    def get_slots(self, indices: Sequence[int] | Tensor) -> tuple[list[Any], Tensor]:
        """Return the samples ``indices``, None where one is not cached, and which of them were there.

        Returns:
            ``(samples, mask)``: a list of B samples, and a bool tensor of shape (B,).

        Raises:
            SampleIndexError: an index is no integer or outside the dataset.
        """
        index = check_indices(indices, self._dataset_len, "get_slots")
        samples = [self.hit(idx, True) for idx in index.tolist()]
        mask = np.array([sample is not MISSING for sample in samples], dtype=bool)
        if self._unread and self.set_among(index[~mask]).any():
            self._warn_of_unread()
        self._miss_many(index[~mask])
        return [None if sample is MISSING else sample for sample in samples], torch.from_numpy(mask)

    def set_slots(
        self, indices: Sequence[int] | Tensor, values: Sequence[Any], allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Cache B samples: `set_slot` for each of ``indices`` with its item of ``values``.

        Raises:
            SampleError: there are not B values; or as `set_slot`, when samples before the one at fault are stored.
            SampleIndexError, SlotError: as `set_slot`.
        """
        index = check_indices(indices, self._dataset_len, "set_slots")
        if len(values) != len(index):
            raise SampleError(f"set_slots: {len(values)} values for {len(index)} indices.")
        for idx, value in zip(index.tolist(), values, strict=True):
            self.set_slot(idx, value, allow_oob_idx, allow_overwrite)

    # ------------------------------------------------------------------------------------------------ life

    def __getstate__(self) -> tuple[Any, ...]:
        return self._dataset_len, self._admission_rule, self._codec_name, self._allow_pickle, self._segment

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._assemble(*state)
        if self._segment.backing == "none":  # nothing is shared then, the states neither
            self._aux.numpy().fill(OOB)


class _Blueprint(Blueprint):
    """The memory of a `RaggedCache`: control and an arena, whose bytes are the capacity."""

    def __init__(self, limit: float | str, dataset_len: int, admission: str, codec: str | None, allow_pickle: bool) -> None:
        self._limit, self._dataset_len = limit, dataset_len
        self._control_bytes = arena.control_bytes(dataset_len)
        if admission == "cost":
            self._control_bytes += admission_bytes(dataset_len)
        asked = asked_bytes(limit, self._control_bytes)
        self.wanted = {"dataset_len": dataset_len, "samples": "any size", "admission": admission, "codec": codec}
        self.wanted["allow_pickle"] = allow_pickle
        if asked is not None:
            self.wanted["bytes"] = asked

    def afford(self, named: bool) -> int:
        return affordable_bytes(self._limit, self._control_bytes, named)

    def plan(self, capacity: int) -> Plan:
        def initialise(control: memoryview) -> None:
            if not capacity and self._dataset_len:
                control[: self._dataset_len] = bytes([OOB]) * self._dataset_len

        return Plan(
            control_bytes=self._control_bytes,
            data_bytes=capacity,
            identity={"bytes": capacity} | self.wanted,
            facts={"dataset_len": self._dataset_len, "capacity": capacity},
            initialise=initialise,
        )
