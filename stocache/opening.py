"""The memory a cache lives in: how many slots it may have, and the segment for them, its own or one found by name."""

import logging
import os

import torch

from stocache import limits, named
from stocache.columns import column_offsets
from stocache.errors import CacheNameError, SegmentError
from stocache.placement import Placement, Residency
from stocache.segment import Segment
from stocache.structure import Structure

logger = logging.getLogger("stocache")

EMPTY, SET, OOB = 0, 1, 2  # the state byte of a sample; plain ints, for an enum look-up costs as much as the byte itself

_CHUNK = 1 << 16  # samples marked at a time: half a MiB of indices


def open_own(size_limit_gib: float | str, dataset_len: int, structure: Structure, placement: Placement) -> tuple[int, Segment]:
    """Return a number of slots and a new anonymous segment for them, its states marked.

    Raises:
        LimitError: the limit is no size, or leaves no room for one slot.
    """
    return _own(limits.affordable_slots(size_limit_gib, dataset_len, structure.nbytes), dataset_len, structure, placement)


def _own(slots: int, dataset_len: int, structure: Structure, placement: Placement) -> tuple[int, Segment]:
    segment = Segment.create(dataset_len, column_offsets(structure, slots)[-1])
    if segment.backing == "none":
        slots = 0
    mark_outsiders(segment.control, Residency(placement, dataset_len, slots))
    return slots, segment


def open_named(
    name: str,
    persist: bool,
    fingerprint: str | None,
    size_limit_gib: float | str,
    dataset_len: int,
    structure: Structure,
    placement: Placement,
) -> tuple[int, Segment]:
    """Return the named segment, attached to or new, and its number of slots; where none can be made, 0 slots of its own.

    Raises:
        LimitError: the limit is no size, or leaves no room for one slot.
        CacheNameError: the name or the fingerprint is none.
        SegmentError: what is there under that name is no segment of this user's, or damaged.
        MismatchError: it is in use for other data.
    """
    if not isinstance(fingerprint, str | None):
        raise CacheNameError(f"fingerprint={fingerprint!r:.100} is a {type(fingerprint).__name__}. Give a str, or None.")
    wanted: dict[str, str | int | None] = {
        "dataset_len": dataset_len,
        "samples": str(structure),
        "placement": str(placement),
        "fingerprint": fingerprint,
    }
    asked = limits.asked_slots(size_limit_gib, dataset_len, structure.nbytes)
    if asked is not None:  # "auto" takes what is there, else ranks that look at different moments would not agree
        wanted["slots"] = asked

    def plan() -> named.Plan | None:
        slots = limits.affordable_slots(size_limit_gib, dataset_len, structure.nbytes, named=True)
        if not slots:
            return None
        residency = Residency(placement, dataset_len, slots)
        return named.Plan(
            control_bytes=dataset_len,
            data_bytes=column_offsets(structure, slots)[-1],
            identity={"slots": slots} | wanted,
            facts={"dataset_len": dataset_len, "slots": slots, "slot_bytes": structure.nbytes},
            initialise=lambda control: mark_outsiders(control, residency),
        )

    found = None
    try:
        found = named.join(name, wanted, persist, plan)
    except SegmentError:
        raise
    except OSError as error:
        logger.warning(
            "cache %r holds nothing: %s: %s. In Docker: --shm-size=…; on a host: mount -o remount,rw,size=… %s",
            name, limits.SHM_DIR, os.strerror(error.errno or 0), limits.SHM_DIR,
        )  # fmt: skip
    if found is None:  # not a cache of its own instead: each process would take the limit, which is one machine's
        return _own(0, dataset_len, structure, placement)
    segment, descriptor = found
    slots = int(descriptor.facts["slots"])
    layout = segment.layout
    if (layout.control_bytes, layout.data_bytes) != (dataset_len, column_offsets(structure, slots)[-1]):
        raise SegmentError(f"{segment.path} is damaged: its sizes do not belong to {slots} slots of {structure}.")
    return slots, segment


def mark_outsiders(control: memoryview, residency: Residency) -> None:
    """Set the state bytes of all samples that are not resident to OOB."""
    if residency.slot_count == residency.dataset_len:
        return
    states = torch.frombuffer(control, dtype=torch.uint8)
    for start in range(0, residency.dataset_len, _CHUNK):
        indices = torch.arange(start, min(start + _CHUNK, residency.dataset_len))
        states[start : start + _CHUNK].masked_fill_(~residency.resident(indices), OOB)
