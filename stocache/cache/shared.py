"""SharedCache: keep samples of one shape in shared memory, in a slot for each resident sample."""

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from stocache.cache.allocate import CacheLayout, Proof
from stocache.cache.base import SampleCache
from stocache.cache.columns import as_bytes
from stocache.cache.loading import only
from stocache.cache.options import SHARING, CacheOptions, shows_options, take_options
from stocache.cache.placement import Placement, residency
from stocache.cache.slots import SlotArrays
from stocache.cache.stats import HITS, MISSES, MISSING, OOB
from stocache.errors import SampleError, SampleIndexError, SegmentError
from stocache.observe.recording.record import note_loads
from stocache.samples.indices import check_indices, check_len
from stocache.samples.spec import Structure
from stocache.shm.segment import Segment
from stocache.system.limits import format_size
from stocache.system.spans import GATHER, span

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)  # the samples


class NextTier(Protocol):
    """A cache behind one in memory, such as a `DiskCache`."""

    def has_rows(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the samples ``indices`` `fill` can read."""

    def fill(self, indices: NDArray[np.int64], rows: NDArray[np.int64], items: list[Any]) -> NDArray[np.int64]:
        """Read those samples that are there into rows of a contiguous batch. Return the rows that were filled."""


class SharedCache(SampleCache[_T]):
    """A cache in shared memory for samples of one shape: one copy for a process and its workers.

    Make it in the parent process, keep it in your dataset, and ask it before you load:

        x = self.cache.get_slot(idx)
        if x is None:                      # empty, or not resident
            x = load(idx)
            self.cache.set_slot(idx, x)    # does nothing if idx is not resident

    Workers share it whatever the start method (fork, spawn, forkserver). Ranks of a job share it if it has a ``name`` or a
    ``fingerprint``, or is a `SharedCacheDDP`. When the limit is below the size of the dataset, some samples are resident and
    can be cached; the others always miss. Memory is taken as slots are filled. When the machine has no more to give, samples
    stay uncached and training goes on.

    Args:
        size_limit_gib: GiB for the cache on this machine; "auto" for the memory that the machine can spare, 0 for no cache.
        dataset_len: samples in the whole dataset.
        data_dims: shape of one sample without the batch dimension. For samples of several parts: a dict or tuple of shapes,
            or a `Structure`; `get_slot` then returns a dict or tuple.
        dtype: torch dtype of the sample; or the same containers as ``data_dims`` with a dtype each.
        placement: which samples are resident: "prefix", the first ones; "scattered", evenly spread; or a `Placement`.
        name, persist, fingerprint, on_busy, share_ranks: to share the cache with other ranks, jobs and later runs.
            `CacheOptions` describes these and ``size_limit_gib`` in full.

    Raises:
        LimitError: the limit is not a size, or leaves no room for one slot.
        SampleError: ``data_dims`` or ``dtype`` do not describe samples of a fixed size.
        CacheNameError: ``name`` has characters that a name cannot have, or the options do not fit together.
        MismatchError: the name is in use for a cache of other arguments.
        SegmentError: the file of that name is damaged, is a link, or belongs to another user.
        BusyError: another process holds the lock of the named caches, and ``on_busy`` is "raise".

    If the machine cannot give the limit, the cache is smaller; if it has no shared memory at all, the cache holds
    nothing. If another user has taken the directory of this user's named caches, the cache is not shared, and each rank has its
    part of the limit. All of this is logged as a warning on the logger "stocache".
    Source: the API and the idea of stocaching 0.2 (C. Jones, MIT).

    Examples:
        >>> with SharedCache(size_limit_gib="1MB", dataset_len=10, data_dims=(2,), dtype=torch.float32) as cache:
        ...     cache.set_slot(3, torch.ones(2))
        ...     print(cache.get_slot(3), cache.get_slot(4), cache.get_or_load(4, lambda idx: torch.zeros(2)))
        tensor([1., 1.]) None tensor([0., 0.])
    """

    _proof: ClassVar[Proof | None] = None

    @shows_options(*SHARING)
    def __init__(
        self,
        size_limit_gib: float | str | CacheOptions,
        dataset_len: int,
        data_dims: Any,
        dtype: Any = torch.uint8,
        *,
        placement: Literal["prefix", "scattered"] | Placement = "prefix",
        **sharing: Any,
    ) -> None:
        (options,) = take_options(type(self).__name__, [size_limit_gib], sharing, {CacheOptions: SHARING})
        self._open(options, dataset_len, data_dims, dtype, placement)

    def _open(
        self,
        options: CacheOptions,
        dataset_len: int,
        data_dims: Any,
        dtype: Any = torch.uint8,
        placement: Literal["prefix", "scattered"] | Placement = "prefix",
        proof: Proof | None = None,
    ) -> None:
        structure = data_dims if isinstance(data_dims, Structure) else Structure.from_dims(data_dims, dtype)
        dataset_len = check_len(dataset_len)
        placement = placement if isinstance(placement, Placement) else Placement(placement)
        identity = {"samples": structure.identity, "placement": str(placement)}
        layout = CacheLayout(dataset_len, dataset_len, identity, structure, placement)
        self._open_memory(layout, options, (structure, placement, dataset_len), proof or self._proof)

    @classmethod
    def like(cls, sample: object, size_limit_gib: float | str, dataset_len: int, **options: Any) -> "SharedCache":
        """Return a cache for samples with the structure of ``sample``. `get_slot` returns samples of the same structure.

        Args:
            sample: tensors, numpy arrays and numbers in dicts, lists, tuples, namedtuples and dataclasses.
            options: the other arguments of the class.

        Raises:
            SampleError: a part of ``sample`` has no fixed size.
        """
        return cls(size_limit_gib, dataset_len, Structure.of(sample), **options)

    def _assemble(self, parts: tuple[Any, ...], segment: Segment, capacity: int) -> None:
        structure: Structure
        placement: Placement
        structure, placement, dataset_len = parts
        self._structure, self._placement, self._slots = structure, placement, capacity
        capacity = 0 if segment.backing == "none" else capacity  # as in a process that cannot have the memory of this one
        self._columns = SlotArrays(structure, segment, residency(placement, dataset_len, capacity))
        self._share(segment, dataset_len, self._columns, str(structure))

    def settle(self) -> int:
        """Return the bytes that this cache may have."""
        return self._segment.data_bytes

    def get_slots(self, indices: Sequence[int] | Tensor, *, out: Any = None) -> tuple[Any, Tensor]:
        """Return the samples ``indices`` in one gather, and which of them are cached.

        Args:
            indices: B sample indices, in any order, repeats allowed: a list, range, numpy array or int64 tensor.
            out: contiguous memory for the rows, as an earlier call returned it. Reusing it is twice as fast as new memory.

        Returns:
            ``(rows, mask)``. Rows have shape (B, *data_dims) and the cache's dtype, and are zero if a sample is not cached.
            They are in the containers of the cache; Python numbers become a tensor, numpy leaves a numpy array. The mask is a
            bool tensor of shape (B,), True where a sample is cached.

        Raises:
            SampleIndexError: an index is not an integer or lies outside the dataset.
            SampleError: ``out`` does not fit.

        Safe from any process and thread; hits take no lock.
        """
        index = check_indices(indices, self._dataset_len, "get_slots")
        columns, count = self._columns, len(index)
        items = columns.new_batch(count) if out is None else columns.split_batch(out, count, "get_slots: out", contiguous=True)
        mask, hits = self._gather_hits(index, items)
        if hits < count:
            columns.erase(~mask, items)
            self._miss(index[~mask].tolist())
        return self._structure.unflatten(items), torch.from_numpy(mask)

    def _gather_hits(self, index: NDArray[np.int64], items: list[Any]) -> tuple[Any, int]:
        """Copy the samples that are set into their rows of a contiguous batch. Return which they are, and how many."""
        mask = self.set_among(index)
        hits = int(np.count_nonzero(mask))
        if hits:
            # for each missing sample a row of a hit is gathered: its memory is safe to touch
            there = index if hits == len(index) else np.where(mask, index, index[mask.argmax()])
            with span(GATHER):
                self._columns.gather(there, items)
        self._segment.count(HITS, hits)
        return mask, hits

    def count_hits(self, hits: int) -> None:
        """Count hits: samples that are set, which the caller gathers."""
        self._segment.count(HITS, hits)

    @property
    def slot_arrays(self) -> SlotArrays:
        """The slots.

        Raises:
            ClosedError: the cache is closed.
        """
        return self._columns

    def outside(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the samples ``indices`` have no slot."""
        outside: NDArray[np.bool_] = self._aux.numpy()[indices] == OOB
        return outside

    def gather(self, indices: NDArray[np.int64], items: list[Any]) -> None:
        """Copy samples that are set into the rows of a contiguous batch, in one thread."""
        with span(GATHER):
            self._columns.gather(indices, items, parallel=False)
        self._segment.count(HITS, len(indices))

    @property
    def structure(self) -> Structure:
        """The structure of each sample."""
        return self._structure

    def samples_of(self, items: list[Any], count: int) -> list[Any]:
        """Return the ``count`` samples whose bytes in a batch are the rows of ``items``, one uint8 tensor for each leaf."""
        batch = self._columns.new_batch(count)
        for own, rows in zip(batch, items, strict=True):
            if rows.numel():
                as_bytes(own)[...] = rows.numpy()
        return self._columns.samples(batch, count)

    def fill_batch(
        self,
        indices: Sequence[int],
        items: list[Tensor],
        load: Callable[[list[int]], Iterable[Any]],
        claimed: Collection[int] = (),
        next_tier: NextTier | None = None,
        ahead: Container[int] = (),
    ) -> list[Any] | None:
        """Write the samples ``indices`` into memory of the caller. Samples that are not cached come from ``load``.

        Args:
            indices: B sample indices.
            items: for each leaf of the structure a contiguous tensor of any dtype, with B times the bytes of the leaf.
            load, claimed, ahead: as in `get_or_load_many`.
            next_tier: a cache that has samples outside of this one.

        Returns:
            None. If a loaded sample does not fit: the list of samples; the content of ``items`` is then undefined.
        """
        index = check_indices(indices, self._dataset_len, "fill_batch")
        mask, hits = self._gather_hits(index, items)
        if hits == len(index):
            return None
        columns, filled = self._columns, mask.copy()
        if next_tier is not None:
            outside, began = np.flatnonzero(self.outside(index)), time.perf_counter()
            read = next_tier.fill(index[outside], outside, items)
            filled[read] = True
            self._segment.count(MISSES, len(read))
            note_loads([(time.perf_counter() - began) / max(1, len(read))] * len(read))
        by_tiers = filled.copy()
        samples: list[Any] = [None if row else MISSING for row in filled.tolist()]

        def encode_rows(rows: list[int], values: list[Any]) -> list[Any] | None:
            begin, end = rows[0], rows[0] + len(rows)
            in_line = rows == list(range(begin, end))
            at: Any = slice(begin, end) if in_line else rows
            places = [item[at] for item in items] if in_line else columns.new_batch(len(rows))
            encoded = columns.pack(values, places)
            if encoded is not None and not in_line:
                for item, place in zip(items, places, strict=True):
                    as_bytes(item)[rows] = as_bytes(place)
            filled[at] = encoded is not None
            return encoded

        self._load_many(index.tolist(), samples, load, claimed=claimed, ahead=ahead, encode_rows=encode_rows)
        try:
            for row in np.flatnonzero(~filled).tolist():  # not alike; or another process was loading it; or repeated
                columns.put(items, row, self._structure.encode(samples[row], "sample"))
        except SampleError:
            for row in np.flatnonzero(by_tiers).tolist():
                idx = int(index[row])
                samples[row] = self.peek(idx) if mask[row] else self.get_or_load(idx, partial(only, load), strict=False)
            return samples
        return None

    def set_slots(
        self, indices: Sequence[int] | Tensor, values: object, allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Cache B samples: `set_slot` for each of ``indices`` with its row of ``values``, a batch as `get_slots` returns it.

        Raises:
            SampleError: ``values`` does not hold B rows of the cache's dtype and shape. Nothing is stored.
            SampleIndexError, SlotError: as `set_slot`. The samples before the wrong one are stored.
        """
        index = check_indices(indices, self._dataset_len, "set_slots")
        columns, items = self._columns, self._columns.split_batch(values, len(index), "set_slots: values")

        def encode(rows: slice) -> list[Any]:
            return columns.buffers([item[rows] for item in items], len(index[rows]))

        self._set_many(index, encode, allow_oob_idx, allow_overwrite)

    @property
    def array(self) -> Any:
        """The live slots: a tensor of shape (slots, *data_dims); for samples of several parts, containers of these tensors.

        Writing to it checks nothing, and does not mark samples as set. It reserves the memory of *all* slots: a process that
        touches a page that the machine cannot give is killed.

        Raises:
            SegmentError: the machine does not give that memory.
        """
        self._reserve_raw(0, self._slots)
        return self._columns.rows(slice(None))

    @property
    def placement(self) -> Placement:
        """Which samples are resident."""
        return self._placement

    def __len__(self) -> int:
        """Return the number of slots, at most ``dataset_len``."""
        return self._slots

    def __getitem__(self, slot: Any) -> Any:
        """Return the live memory of a slot, set or not. With placement "prefix" a slot number is a sample index."""
        if not isinstance(slot, int):
            return self.array[slot]
        slot = self._raw_slot(slot)
        return self._columns.rows(slot)

    def __setitem__(self, slot: Any, value: object) -> None:
        """Write to the memory of a slot without marking it as set. With an integer slot the value must fit unchanged."""
        if not isinstance(slot, int):
            self.array[slot] = value
            return
        slot = self._raw_slot(slot)
        self._columns.write_slot(slot, self._structure.encode(value, f"cache[{slot}]"))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sample."""
        return self._structure.nbytes

    def _reserve_raw(self, start: int, stop: int) -> None:
        with self._segment.guard:
            if not self._columns.reserve(start, stop):
                raise SegmentError(
                    f"slots {start} to {stop - 1} need {format_size((stop - start) * self.slot_bytes)}, which the machine does "
                    f"not give. Use get_slot and set_slot, which skip such slots, or lower size_limit_gib."
                )

    def _raw_slot(self, slot: int) -> int:
        if not -self._slots <= slot < self._slots:
            raise SampleIndexError(f"cache[{slot}]: outside the cache of {self._slots} slots.")
        slot %= self._slots
        self._reserve_raw(slot, slot + 1)
        return slot


class SharedCacheDDP(SharedCache):
    """A `SharedCache` for DDP: one copy for all ranks of this job on this machine; with a ``name``, for other jobs, too.

        cache = SharedCacheDDP(32, len(dataset), (3, 224, 224))

    Every rank makes it with the same arguments, at the same place of the program. The ranks may be started by torchrun,
    `torch.multiprocessing.spawn` or by hand, and need no process group. The class declares that all ranks have the same
    samples: they are not compared.
    Source: announced as a plan by the article on stocaching (C. Jones).
    """

    _proof = Proof()
