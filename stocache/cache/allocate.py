"""The memory a cache lives in: planned by the kind of cache, then made, or found by name."""

import logging
import os
from typing import Literal, TypeAlias

import torch

from stocache.cache.placement import BlockResidency, Residency
from stocache.errors import BusyError, CacheNameError, SegmentError
from stocache.shm import named
from stocache.shm.named import Plan
from stocache.shm.registry import ForeignError
from stocache.shm.segment import Segment
from stocache.system import limits
from stocache.system.ranks import ranks_here

logger = logging.getLogger("stocache")

OnBusy: TypeAlias = Literal["uncached", "raise"]
"""What to do when another process keeps the lock that it takes to open a named cache."""

EMPTY, SET, OOB = 0, 1, 2  # the state byte of a sample; plain ints, for an enum look-up costs as much as the byte itself

_CHUNK = 1 << 16  # samples marked at a time: half a MiB of indices


class Blueprint:
    """What memory a cache wants. Its capacity is counted in what the kind of cache counts in: slots, or bytes.

    Attributes:
        wanted: what must agree before another process may attach under the same name.
    """

    wanted: dict[str, str | int | None]

    def afford(self, named: bool) -> int:
        """Return the capacity the limit pays for and the machine can give; warn where that is less."""
        raise NotImplementedError

    def plan(self, capacity: int) -> Plan:
        """Return the plan of a segment for that capacity, which is its fact "capacity"."""
        raise NotImplementedError


def open_memory(
    blueprint: Blueprint, name: str | None, persist: bool, fingerprint: str | None, on_busy: OnBusy
) -> tuple[Segment, int]:
    """Return a segment and its capacity: a new anonymous one, or the one of that name, attached to or new.

    Where there is no shared memory, its backing is "none", and its capacity 0.

    Raises:
        CacheNameError: the name or the fingerprint cannot be one, or options are given that need a name.
        SegmentError: what is there under that name is not a segment of this user's, or damaged.
        MismatchError: it is in use for other data.
        BusyError: another process keeps the lock that it takes to open it, and ``on_busy`` is "raise".
    """
    if on_busy not in ("uncached", "raise"):
        raise CacheNameError(f"on_busy={on_busy!r} is unknown. Use 'uncached' or 'raise'.")
    if name is None:
        if persist or fingerprint is not None:
            raise CacheNameError("persist and fingerprint are for caches with a name. Give one.")
        return _open_own(blueprint, blueprint.afford(False))
    if not isinstance(fingerprint, str | None):
        raise CacheNameError(f"fingerprint={fingerprint!r:.100} is a {type(fingerprint).__name__}. Give a str, or None.")
    blueprint.wanted["fingerprint"] = fingerprint

    def plan() -> Plan | None:
        capacity = blueprint.afford(True)
        return blueprint.plan(capacity) if capacity else None

    found = None
    try:
        found = named.join(name, blueprint.wanted, persist, plan)
    except BusyError as error:
        if on_busy == "raise":
            raise
        logger.warning("cache %r holds nothing: %s", name, str(error))
    except ForeignError as error:
        return _open_part(blueprint, name, str(error))
    except SegmentError:
        raise
    except OSError as error:
        if not os.path.isdir(limits.SHM_DIR):
            return _open_part(blueprint, name, f"There is no {limits.SHM_DIR}.")
        logger.warning(
            "cache %r holds nothing: %s: %s. In Docker: --shm-size=…; on a host: mount -o remount,rw,size=… %s",
            name, limits.SHM_DIR, os.strerror(error.errno or 0), limits.SHM_DIR,
        )  # fmt: skip
    if found is None:  # not a cache of its own instead: each process would take the limit, which is one machine's
        return _open_own(blueprint, 0)
    segment, descriptor = found
    capacity = int(descriptor.facts["capacity"])
    its = blueprint.plan(capacity)
    if (segment.layout.control_bytes, segment.data_bytes) != (its.control_bytes, its.data_bytes):
        raise SegmentError(f"{segment.path} is damaged: its sizes do not belong to a capacity of {capacity}.")
    return segment, capacity


def _open_part(blueprint: Blueprint, name: str, problem: str) -> tuple[Segment, int]:
    """Return a segment of this process's own, with its part of the limit, where a named one cannot be had."""
    logger.warning("%s Cache %r is not shared: this process has its own part of the limit.", problem, name)
    ranks = ranks_here()
    return _open_own(blueprint, blueprint.afford(False) // max(1, ranks.world_size // ranks.nodes))


def _open_own(blueprint: Blueprint, capacity: int) -> tuple[Segment, int]:
    plan = blueprint.plan(capacity)
    segment = Segment.create(plan.control_bytes, plan.data_bytes)
    if segment.backing == "none":
        plan = blueprint.plan(capacity := 0)
    plan.initialise(segment.control)
    return segment, capacity


def mark_outsiders(control: memoryview, residency: Residency | BlockResidency) -> None:
    """Set the state bytes of all samples that are not resident to OOB."""
    if residency.slot_count == residency.dataset_len:
        return
    states = torch.frombuffer(control, dtype=torch.uint8)
    for start in range(0, residency.dataset_len, _CHUNK):
        indices = torch.arange(start, min(start + _CHUNK, residency.dataset_len))
        states[start : start + _CHUNK].masked_fill_(~residency.resident(indices), OOB)
