"""Allocate the memory of a cache: a new segment, or the one that other processes use under the same name."""

import logging
import os
from dataclasses import dataclass
from functools import partial

import torch

from stocache.cache.options import CacheOptions
from stocache.cache.placement import Placement, residency
from stocache.cache.slots import column_offsets
from stocache.cache.stats import OOB
from stocache.errors import BusyError, LimitError, SegmentError
from stocache.samples.spec import Structure
from stocache.shm import claims, named
from stocache.shm.layout import Layout
from stocache.shm.named import Descriptor, Identity, NewSegment
from stocache.shm.registry import ForeignError
from stocache.shm.segment import Segment
from stocache.system import limits
from stocache.system.limits import format_size, parse_size
from stocache.system.ranks import ranks_here

logger = logging.getLogger("stocache")

_CHUNK = 1 << 16  # samples marked at a time: half a MiB of indices
_SLOT_EXTENT = 1 << 16  # bytes: the first batch, of slots at random, reserves an extent for each sample


@dataclass(frozen=True)
class CacheLayout:
    """The memory of a cache for any capacity. The capacity counts slots; or bytes, if samples vary in size.

    Attributes:
        control_bytes: bytes of the cache's state, which begins with one state byte per sample of the dataset. The limit of the
            cache counts them. It does not count the words of claims, 4 bytes per sample, which follow them.
        identity: must be equal, like the number of samples, before another process may attach to a cache of the same name.
        structure: the structure of each sample; None if samples vary in size.
        placement: which samples get the slots; None if samples vary in size.
    """

    dataset_len: int
    control_bytes: int
    identity: Identity
    structure: Structure | None = None
    placement: Placement | None = None

    @property
    def all_control_bytes(self) -> int:
        """The control bytes, with the words of claims."""
        return claims.with_words(self.control_bytes, self.dataset_len)

    @property
    def extent_bytes(self) -> int | None:
        """The size of an extent, for `Layout.for_sizes`."""
        return None if self.structure is None else _SLOT_EXTENT

    @property
    def unit(self) -> str:
        """What the capacity counts: "slots" or "bytes"."""
        return "bytes" if self.structure is None else "slots"

    def capacity_within(self, limit: int) -> int:
        """Return the capacity that fits into ``limit`` bytes, together with the control bytes."""
        left = limit - self.control_bytes
        if self.structure is None:
            return max(0, left)
        if self.structure.nbytes == 0:
            return self.dataset_len if left >= 0 else 0
        return max(0, min(self.dataset_len, left // self.structure.nbytes))

    def capacity_of(self, size_limit_gib: float | str) -> int:
        """Return the capacity that a limit, except "auto", stands for, whatever the machine can give.

        Raises:
            LimitError: the limit is not a size; or it is not 0, and leaves no room for one slot.
        """
        limit = parse_size(size_limit_gib)
        capacity = self.capacity_within(limit)
        if limit and self.dataset_len and not capacity:
            needed = "" if self.structure is None else f"; one slot needs {self.structure.nbytes} bytes"
            raise LimitError(
                f"cache holds 0 {self.unit}: size_limit_gib={size_limit_gib} leaves {max(0, limit - self.control_bytes)} bytes "
                f"after the {self.control_bytes}-byte state array{needed}. Raise size_limit_gib, or pass 0 for no cache."
            )
        return capacity

    def affordable(self, size_limit_gib: float | str, named: bool) -> int:
        """Return the capacity that a limit stands for; or what the machine can give if that is less, with a warning.

        Raises:
            LimitError: as `capacity_of`.
        """
        if size_limit_gib == "auto":
            limit = limits.recommended_limit(named)
            capacity = self.capacity_within(limit)
            if self.dataset_len and not capacity:
                needed = "" if self.structure is None else f" of {format_size(self.structure.nbytes)}"
                logger.warning("size_limit_gib='auto' leaves no room for one sample%s. Nothing is cached.", needed)
        else:
            limit, capacity = parse_size(size_limit_gib), self.capacity_of(size_limit_gib)
        fitting = min(capacity, self.capacity_within(limits.shared_memory_room(named)))
        if fitting < capacity:
            caching = format_size(fitting) if self.structure is None else f"{fitting} of {self.dataset_len} samples"
            limits.warn_short(limit, caching, named)
        return fitting

    def data_bytes(self, capacity: int) -> int:
        """Return the bytes of data for a capacity."""
        return capacity if self.structure is None else column_offsets(self.structure, capacity)[-1]

    def segment_layout(self, capacity: int, identity: Identity) -> Layout:
        """Return the layout of a named segment for a capacity, with the descriptor that other processes read."""
        facts = {"dataset_len": self.dataset_len, "capacity": capacity}
        if self.structure is not None:
            facts["slot_bytes"] = self.structure.nbytes
        descriptor = Descriptor({self.unit: capacity} | dict(identity), facts)
        return Layout.for_sizes(self.all_control_bytes, self.data_bytes(capacity), descriptor.pack(), self.extent_bytes)

    def mark_outsiders(self, control: memoryview, capacity: int) -> None:
        """Set the state bytes of all samples that have no room to OOB. Before, all of ``control`` is zero."""
        if self.placement is None:
            if capacity == 0:
                control[: self.dataset_len] = bytes([OOB]) * self.dataset_len
            return
        chosen = residency(self.placement, self.dataset_len, capacity)
        if capacity < self.dataset_len:
            states = torch.frombuffer(control, dtype=torch.uint8, count=self.dataset_len)
            for start in range(0, self.dataset_len, _CHUNK):
                indices = torch.arange(start, min(start + _CHUNK, self.dataset_len))
                states[start : start + _CHUNK].masked_fill_(~chosen.resident(indices), OOB)


def open_memory(layout: CacheLayout, options: CacheOptions) -> tuple[Segment, int]:
    """Return the segment of a cache, and its capacity. With a name it may be a segment that exists; without, it is new.

    If the machine gives no shared memory, the backing of the segment is "none", and the capacity 0.

    Raises:
        LimitError: the limit leaves no room for one slot.
        CacheNameError: the name is not valid.
        SegmentError: the file of that name is not a segment of this user, or is damaged.
        MismatchError: the name is in use for other data.
        BusyError: another process holds the lock of the named caches, and ``on_busy`` is "raise".
    """
    limit, name = options.size_limit_gib, options.name
    if name is None:
        return _open_own(layout, layout.affordable(limit, False))
    identity = {"dataset_len": layout.dataset_len, **layout.identity}
    if limit != "auto":  # which differs from rank to rank: they look at different moments
        identity[layout.unit] = layout.capacity_of(limit)
    identity["fingerprint"] = options.fingerprint

    def new() -> NewSegment | None:
        capacity = layout.affordable(limit, True)
        if capacity == 0:
            return None
        return layout.segment_layout(capacity, identity), partial(layout.mark_outsiders, capacity=capacity)

    found = None
    try:
        found = named.join(name, identity, options.persist, new)
    except BusyError as error:
        if options.on_busy == "raise":
            raise
        logger.warning("cache %r holds nothing: %s", name, str(error))
    except ForeignError as error:
        return _open_part(layout, options, str(error))
    except SegmentError:
        raise
    except OSError as error:
        if not os.path.isdir(limits.SHM_DIR):
            return _open_part(layout, options, f"There is no {limits.SHM_DIR}.")
        logger.warning(
            "cache %r holds nothing: %s: %s. In Docker: --shm-size=…; on a host: mount -o remount,rw,size=… %s",
            name, limits.SHM_DIR, os.strerror(error.errno or 0), limits.SHM_DIR,
        )  # fmt: skip
    if found is None:  # a cache of its own instead would take the limit, which is for the machine, in each process
        return _open_own(layout, 0)
    segment, descriptor = found
    capacity = int(descriptor.facts["capacity"])
    if (segment.layout.control_bytes, segment.data_bytes) != (layout.all_control_bytes, layout.data_bytes(capacity)):
        raise SegmentError(f"{segment.path} is damaged: its sizes do not belong to a capacity of {capacity}.")
    return segment, capacity


def _open_part(layout: CacheLayout, options: CacheOptions, problem: str) -> tuple[Segment, int]:
    """Return a segment for this process only, with its part of the limit, because a named one cannot be made."""
    logger.warning("%s Cache %r is not shared: this process has its own part of the limit.", problem, options.name)
    ranks = ranks_here()
    capacity = layout.affordable(options.size_limit_gib, False)
    return _open_own(layout, capacity // max(1, ranks.world_size // ranks.nodes))


def _open_own(layout: CacheLayout, capacity: int) -> tuple[Segment, int]:
    segment = Segment.create(layout.all_control_bytes, layout.data_bytes(capacity), layout.extent_bytes)
    if segment.backing == "none":
        capacity = 0
    layout.mark_outsiders(segment.control, capacity)
    return segment, capacity
