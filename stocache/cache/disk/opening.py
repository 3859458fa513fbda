"""Open the states of a disk cache in shared memory: how many samples have room, and which of them the folder holds."""

import contextlib
import dataclasses
import logging
import os
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.cache.disk.folder import MOST_TEXT, Folder, manifest_of
from stocache.cache.disk.formats import Rows, Values, pack_example, unpack_example
from stocache.cache.disk.samples_file import DATA_OFFSET, SamplesFile, free_rows, index_bytes, load_index
from stocache.cache.disk.store import USED, Control, control_bytes
from stocache.cache.placement import Placement, residency
from stocache.cache.stats import EMPTY, MISSING, OOB, SET
from stocache.errors import LimitError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.record_decoder import Records
from stocache.samples.spec import Structure
from stocache.shm import claims, named, registry
from stocache.shm.layout import Layout
from stocache.shm.named import Descriptor, Identity
from stocache.shm.segment import Segment
from stocache.system.limits import format_size
from stocache.system.platform import here

logger = logging.getLogger("stocache")


@dataclasses.dataclass(frozen=True)
class DiskOptions:
    """The options of a `DiskCache`, which describes them."""

    disk: str
    limit: float | str
    dataset_len: int
    structure: Structure | None
    placement: Placement
    memory_slots: int
    fingerprint: str | None
    codec: Literal["zstd", "lz4"] | None
    allow_pickle: bool
    by_key: bool

    def make_form(self) -> Rows | Records:
        """Return how samples become bytes."""
        if self.structure is not None:
            return Rows(self.structure)
        return (Values if self.by_key else Records)(self.allow_pickle, Codec(self.codec) if self.codec else None)

    @property
    def identity(self) -> Identity:
        """Identifies the content of the folder, but for the fingerprint. If that differs, the folder is emptied."""
        samples = "values by key" if self.by_key else "any size" if self.structure is None else self.structure.identity
        return {
            "dataset_len": self.dataset_len,
            "samples": samples,
            "placement": "" if self.structure is None else str(self.placement),
            "codec": self.codec,
            "allow_pickle": self.allow_pickle,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for later runs: which samples have room first, and an example of a sample if it is not too long."""
        facts = {"memory_slots": self.memory_slots}
        example = None if self.structure is None else pack_example(self.structure.example())
        return facts | {"example": example} if example is None or len(example) <= MOST_TEXT else facts


def known_example(disk: str | os.PathLike[str], dataset_len: int, fingerprint: str | None) -> Any:
    """Return a sample as a disk cache holds them; None where they vary in size; MISSING where there is no such cache."""
    manifest = manifest_of(disk)
    if manifest is None or (manifest["identity"]["dataset_len"], manifest["fingerprint"]) != (dataset_len, fingerprint):
        return MISSING
    try:
        example = manifest["facts"]["example"]
        return None if example is None else unpack_example(example)
    except (ValueError, LookupError, TypeError, SegmentError):
        return MISSING


def count_slots(options: DiskOptions, form: Rows | Records, limit: int) -> int:
    """Return the bytes that the file of samples may have. Raises LimitError where that is less than one sample."""
    capacity = max(0, limit - index_bytes(options.dataset_len))
    least = DATA_OFFSET + SamplesFile.room(form.nbytes or 0)
    if options.dataset_len and capacity < least:
        raise LimitError(
            f"disk_limit={options.limit!r} leaves {capacity} bytes after the index, which takes 16 for each sample; one sample "
            f"needs {least}. Raise disk_limit."
        )
    return capacity


def affordable(options: DiskOptions, folder: Folder, limit: int, capacity: int) -> int:
    """Return the capacity; or the room on the disk if that is less, with a warning."""
    if not folder.writable:
        logger.warning("disk=%r is read-only: its samples are read, and no others are added.", options.disk)
        return capacity
    room = folder.free_bytes + sum(os.fstat(fd).st_size for fd in (folder.samples, folder.index))
    room = max(0, room - index_bytes(options.dataset_len))
    if room < capacity:
        logger.warning(
            "disk_limit=%s is more than %r has room for: %s.", options.limit, options.disk, format_size(room + limit - capacity)
        )
    return min(capacity, room)


def open_control(options: DiskOptions, form: Rows | Records, folder: Folder, capacity: int) -> Segment:
    """Return the shared memory with the states of the samples of a folder, attached to or new."""
    name, control = f"disk.{folder.key}", claims.with_words(control_bytes(options.dataset_len), options.dataset_len)
    initialise = partial(_initialise, options, form.nbytes, folder, capacity)
    if not here.SHARES_MEMORY:
        segment = Segment.create(control, 0, for_threads=True)
        initialise(segment.control)
        return segment
    identity: Identity = {
        "disk": folder.path,
        "dataset_len": options.dataset_len,
        "limit": str(options.limit),
        "fingerprint": folder.key,
    }
    if folder.alone:  # shared memory that killed processes left behind is not newer than the index
        with contextlib.suppress(OSError):
            named.remove(registry.path_of(name), dead=True)
    descriptor = Descriptor(identity, {"dataset_len": options.dataset_len, "capacity": 0})
    layout = Layout.for_sizes(control, 0, descriptor.pack())
    found = named.join(name, identity, False, lambda: (layout, initialise))
    assert found is not None
    return found[0]


def blank(options: DiskOptions) -> Segment:
    """Return memory of this process and its children, for a cache that holds nothing."""
    segment = Segment.create(claims.with_words(control_bytes(options.dataset_len), options.dataset_len), 0)
    np.asarray(segment.control[: options.dataset_len]).fill(OOB)
    return segment


def _initialise(options: DiskOptions, row_bytes: int | None, folder: Folder, capacity: int, control: memoryview) -> None:
    """Write the states and the places of samples, each of ``row_bytes`` if that is one number, into new shared memory."""
    count = options.dataset_len
    states, words, offsets, sizes = map(np.asarray, Control.of(control, count))
    words[USED] = load_index(folder, offsets, sizes, row_bytes)
    states[:] = np.where(offsets > 0, SET, EMPTY)
    if not folder.writable:
        states[states == EMPTY] = OOB
    elif row_bytes is not None and count:
        slots = min(count, (capacity - DATA_OFFSET) // SamplesFile.room(row_bytes))
        chosen = _resident(options, int(folder.facts["memory_slots"]), slots)
        states[(states == EMPTY) & ~chosen] = OOB
    if row_bytes is not None:
        places, empty = free_rows(offsets, row_bytes, int(words[USED])), np.flatnonzero(states == EMPTY)
        empty = empty[: len(places)]
        offsets[empty], sizes[empty] = places[: len(empty)], row_bytes


def _resident(options: DiskOptions, memory_slots: int, slots: int) -> "NDArray[np.bool_]":
    """Return which samples have room on the disk: first those behind the ones in memory, then these, in the same order."""
    count = options.dataset_len
    indices = torch.arange(count, dtype=torch.int64, device="cpu")

    def first(number: int) -> Tensor:
        return residency(options.placement, count, min(count, number)).resident(indices)  # type: ignore[no-any-return]

    chosen = first(memory_slots + slots) & ~first(memory_slots)
    if memory_slots + slots > count:
        chosen |= first(memory_slots + slots - count)
    found: NDArray[np.bool_] = chosen.numpy()
    return found
