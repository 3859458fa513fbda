"""RaggedCache: keep samples of any size in shared memory, as records that are appended to an arena."""

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
from stocache.cache.allocate import CacheLayout, open_memory
from stocache.cache.arena import NO_MEMORY, Arena
from stocache.cache.base import MISSING, SampleCache
from stocache.cache.options import CacheOptions, OnBusy
from stocache.cache.stats import EMPTY, FILLS, OOB, REFUSED
from stocache.errors import SampleError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.indices import check_indices, check_len
from stocache.samples.record_decoder import RecordReader
from stocache.samples.record_encoder import HEAD, Record, integers_codec, pack_integers, write_skeleton
from stocache.samples.type_lookup import NotImported
from stocache.shm.named import Identity
from stocache.shm.segment import Segment
from stocache.system.deprecation import renamed_arguments
from stocache.system.limits import format_size

logger = logging.getLogger("stocache")

_unpack_head = HEAD.unpack_from
_COMPRESSED = 4  # a bit of the head's last number, between the width of the integers and their count
_READERS = 4096  # readers of skeletons that a process keeps


class _Encoded(NamedTuple):
    """The parts of a record, without its head and the number of its skeleton."""

    skeleton: bytes
    data: bytes
    packed: int
    tail: bytes

    @property
    def room(self) -> int:
        """Bytes of the arena that the record takes."""
        return HEAD.size + len(self.data) + len(self.tail) + 7 & ~7


class RaggedCache(SampleCache):
    """A cache in shared memory for samples that vary in size: images, detection targets, text, token lists, point clouds.

        cache = RaggedCache(size_limit_gib=32, dataset_len=len(dataset))
        sample = cache.get_or_load(idx, load)       # or get_slot and set_slot, as with SharedCache

    A sample is any tree of dicts, lists, tuples, namedtuples, dataclasses, sets, deques and other mappings, with tensors (and
    their subclasses: MetaTensors, tv_tensors), numpy arrays, Python numbers, str, bytes, None, enum members, paths, dates,
    times, Decimals, Fractions, ranges, slices and PIL images in it. Each sample may differ from the others. It comes back equal
    in type, structure, dtype, shape, strides (if dense) and value. Nothing is pickled unless allowed.

    Records name the classes of their samples. A process that reads a record looks for these classes in the modules that it has
    imported; it imports nothing for that. Where a class is missing the sample is a miss: it is loaded again and counted, with
    one warning.

    Args:
        size_limit_gib: GiB for the cache on this machine; "auto" for what the machine can spare, 0 for no cache.
        dataset_len: samples in the whole dataset.
        admission: "all" keeps the first samples until the limit is reached; "cost" those that cost most to load per byte.
        codec: "zstd" or "lz4" to compress samples without loss.
        allow_pickle: True to pickle objects that cannot be stored otherwise.
        name, persist, fingerprint, on_busy: to share the cache with other jobs and later runs. `CacheOptions` describes all
            options in full.

    Raises:
        LimitError: the limit is not a size, or leaves no room for samples; or ``admission`` is unknown.
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
        options = CacheOptions(
            size_limit_gib,
            name=name,
            persist=persist,
            fingerprint=fingerprint,
            on_busy=on_busy,
            admission=admission,
            codec=codec,
            allow_pickle=allow_pickle,
        )
        dataset_len = check_len(dataset_len)
        control_bytes = arena.control_bytes(dataset_len) + (admission_bytes(dataset_len) if admission == "cost" else 0)
        identity: Identity = {"samples": "any size", "admission": admission, "codec": codec, "allow_pickle": allow_pickle}
        segment, _ = open_memory(CacheLayout(dataset_len, control_bytes, identity), options)
        self._assemble(dataset_len, options, segment)
        logger.info("%r", self)

    @classmethod
    def from_options(cls, options: CacheOptions, dataset_len: int) -> "RaggedCache":
        """Return a cache with these options."""
        return cls(dataset_len=dataset_len, **vars(options))

    def _assemble(self, dataset_len: int, options: CacheOptions, segment: Segment) -> None:
        """Set all attributes. Each process computes those that follow from the arguments; they are not pickled."""
        self._share(segment, dataset_len, "samples of any size", format_size(segment.data_bytes))
        self._options, self._allow_pickle = options, options.allow_pickle
        self._codec = Codec(options.codec) if options.codec is not None else None
        self._arena = Arena(segment, dataset_len)
        self._offsets = self._arena.offsets
        self._memory = segment.view(0, segment.data_bytes)
        self._address = segment.tensor(0, segment.data_bytes).data_ptr()
        self._readers: dict[int, RecordReader] = {}
        self._reads: dict[int, Any] = {}  # their read functions: one look-up less for each sample
        self._admission = None
        self.revises = options.admission == "cost"
        if self.revises:
            control = segment.control[arena.control_bytes(dataset_len) :]
            self._admission = CostAdmission(control, dataset_len, segment.data_bytes)

    # ------------------------------------------------------------------------------------------------ how samples are held

    def _encode(self, value: Any, where: str) -> _Encoded:
        record = Record(value, where, self._allow_pickle)
        data, integers = record.pack()
        tail, packed = pack_integers(integers)
        if self._codec is not None and (smaller := self._codec.compress(data)) is not None:
            data, packed = smaller, packed | _COMPRESSED
        return _Encoded(write_skeleton(record.skeleton), data, packed, tail)

    def _store(self, idx: int, encoded: _Encoded, cost_s: float | None) -> int | None:
        skeleton, data, packed, tail = encoded
        if self._admission is not None and cost_s is not None:
            decide = partial(self._admission.decide, idx, cost_s, encoded.room, self._arena.used)
            decision = self._arena.run_locked(decide, LATER)
            if decision in (LATER, NEVER):
                if decision == NEVER:
                    self._states[idx] = OOB
                return None
        at = number = self._arena.number_of(skeleton)
        if number >= 0:
            at = self._arena.append(b"".join((HEAD.pack(len(data), number, packed), data, tail)))
        if at == NO_MEMORY:
            return REFUSED
        if at < 0:
            if self._states[idx] == EMPTY:
                self._states[idx] = OOB  # room is never freed
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
        """Return the reader for records of a skeleton; None if it needs a module that is not imported here: that is a miss."""
        if len(self._readers) >= _READERS:
            self._readers.clear()
            self._reads.clear()
        try:
            reader = RecordReader(self._arena.skeleton(number), self._allow_pickle)
        except NotImported as error:
            self._unreadable = str(error)
            return None
        self._readers[number], self._reads[number] = reader, reader.read
        return reader

    def _decompressed(self, data: Any, limit: int) -> bytes:
        if self._codec is None:
            raise SegmentError("the cache is damaged: it has a compressed sample, but no codec.")
        try:
            return self._codec.decompress(data, limit)
        except (ValueError, MemoryError) as error:
            raise SegmentError(f"the cache is damaged: {error}.") from error

    def set_if_empty(self, indices: Iterable[int], values: Iterable[Any]) -> None:
        """Cache samples that were loaded together with one that was missed: all empty ones; or none, if not all have room."""
        encoded: dict[int, _Encoded] = {}
        for idx, value in zip(indices, values, strict=True):
            if self._states[idx] == EMPTY:
                with contextlib.suppress(SampleError):  # reported when this sample is asked for
                    encoded[idx] = self._encode(value, f"sample {idx}")
        room = sum(item.room for item in encoded.values()) <= self._segment.data_bytes - self._arena.used
        for idx, item in encoded.items():
            if room:
                self._set_if_empty(idx, item)
            else:
                with self._segment.guard:
                    self._exclude(idx)

    def _refused(self, idx: int) -> bool:
        return self._arena.refused

    def _load_many(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> list[Any]:
        return [self._load(idx, True) for idx in indices.tolist()]

    def _clear(self) -> None:
        self._arena.clear()
        if self._admission is not None:
            self._admission.clear()
        self._aux.numpy().fill(EMPTY if self._segment.data_bytes else OOB)
        self._segment.clear()

    def _amounts(self, filled: int) -> dict[str, int]:
        words = self._segment.control[arena.words_at(self._dataset_len) :]
        return arena.amounts(words, self._dataset_len, self._segment.data_bytes, filled)

    # ------------------------------------------------------------------------------------------------ many samples

    def get_slots(self, indices: Sequence[int] | Tensor) -> tuple[list[Any], Tensor]:
        """Return the samples ``indices``, with None for those that are not cached, and a mask of those that are.

        Returns:
            ``(samples, mask)``: a list of B samples, and a bool tensor of shape (B,).

        Raises:
            SampleIndexError: an index is not an integer or lies outside the dataset.
        """
        index = check_indices(indices, self._dataset_len, "get_slots")
        samples = [self.hit(idx, True) for idx in index.tolist()]
        mask = np.array([sample is not MISSING for sample in samples], dtype=bool)
        if self._unreadable and self.set_among(index[~mask]).any():
            self._warn_of_unreadable()
        self._miss_many(index[~mask])
        return [None if sample is MISSING else sample for sample in samples], torch.from_numpy(mask)

    def set_slots(
        self, indices: Sequence[int] | Tensor, values: Sequence[Any], allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Cache B samples: `set_slot` for each of ``indices`` with its item of ``values``.

        Raises:
            SampleError: there are not B values, and nothing is stored; or as `set_slot`.
            SampleIndexError, SlotError: as `set_slot`. The samples before the wrong one are stored.
        """
        index = check_indices(indices, self._dataset_len, "set_slots")
        if len(values) != len(index):
            raise SampleError(f"set_slots: {len(values)} values for {len(index)} indices.")
        for idx, value in zip(index.tolist(), values, strict=True):
            self.set_slot(idx, value, allow_oob_idx, allow_overwrite)

    # ------------------------------------------------------------------------------------------------ life

    def __getstate__(self) -> tuple[Any, ...]:
        return self._dataset_len, self._options, self._segment

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._assemble(*state)
