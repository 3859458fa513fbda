"""DiskCache: keep samples in a folder on a local disk, for all processes of this machine and for later runs."""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from stocache.cache.base import nested
from stocache.cache.disk.folder import MOST_TEXT, Folder, manifest_of
from stocache.cache.disk.formats import Rows, pack_example, unpack_example
from stocache.cache.disk.samples_file import DATA_OFFSET, SamplesFile, free_rows, index_bytes, load_index
from stocache.cache.disk.store import USED, Control, DiskStore, control_bytes
from stocache.cache.options import CacheOptions
from stocache.cache.placement import Placement, residency
from stocache.cache.ragged import ListCache
from stocache.cache.shared import SharedCache
from stocache.cache.stats import EMPTY, HITS, MISSING, OOB, SET, CacheStats
from stocache.errors import ClosedError, DiskError, LimitError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.indices import check_len
from stocache.samples.record_decoder import Records
from stocache.samples.spec import Structure
from stocache.shm import claims, named, registry
from stocache.shm.extents import DISK_WARNING
from stocache.shm.layout import Layout
from stocache.shm.named import Descriptor, Identity
from stocache.shm.segment import Segment
from stocache.system.background import Background
from stocache.system.limits import format_size, parse_size
from stocache.system.platform import here

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)  # the samples

_LOOK_S = 0.1
_MOST_BYTES = 64 << 20  # that wait to be written
_ENOUGH_BYTES = 4 << 20  # are written at once; fewer wait for others
_TOGETHER = 256  # samples, and releases of claims, that are taken together

_Indices = NDArray[np.int64]


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

    def make_form(self) -> Rows | Records:
        """Return how samples become bytes."""
        if self.structure is not None:
            return Rows(self.structure)
        return Records(self.allow_pickle, Codec(self.codec) if self.codec else None)

    @property
    def identity(self) -> Identity:
        """Identifies the content of the folder, but for the fingerprint. If that differs, the folder is emptied."""
        samples = "any size" if self.structure is None else self.structure.identity
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


class DiskCache(ListCache[_T]):
    """A cache in a folder on a local disk: for samples that come from a network, or take long to make.

        cache = DiskCache("/nvme/photos", "500GB", dataset_len=len(dataset), fingerprint="v1")
        sample = cache.get_or_load(idx, load)       # or get_slot and set_slot, as with SharedCache

    The folder stays. Later runs find its samples, and all processes of this machine use it together. Each sample is under a
    checksum, which every read checks: one that is torn, damaged or lost is a miss. The states of samples are in shared memory,
    21 bytes for each sample of the dataset.

    Args:
        disk: the folder. It is made if it does not exist. It must be this user's own, and holds nothing else.
        disk_limit: bytes for the folder: 500 (GiB), "500GB".
        dataset_len: samples in the whole dataset.
        structure: the `Structure` of all samples, if they have one; None if they vary in size.
        placement: which samples are kept if not all have room, for samples of one structure. Others are kept in the order in
            which they come.
        memory_slots: how many samples a `SharedCache` with the same placement holds. The others have room here first.
        fingerprint: a text that identifies the samples. Change it whenever they change: the folder is then emptied.
        codec, allow_pickle: as in `CacheOptions`, for samples of any size.

    Raises:
        LimitError: the limit is not a size, or leaves no room for one sample.
        CodecError: the codec is unknown, or not installed.
        DiskError: the folder is a file, another user's, open to others, or in use by another machine or container.
        MismatchError: the folder is for samples of another dataset.

    If the disk does not take the folder (read-only, full, not there), the cache holds nothing, and says so once.

    Examples:
        >>> with DiskCache("photos", "1MB", dataset_len=10, fingerprint="v1") as cache:
        ...     photo = cache.get_or_load(7, lambda idx: torch.full((3,), idx))
        >>> with DiskCache("photos", "1MB", dataset_len=10, fingerprint="v1") as cache:  # in a later run
        ...     print(cache.get_slot(7), cache.get_slot(8))
        tensor([7, 7, 7]) None
    """

    _records_loads = False  # the cache in memory does

    def __init__(
        self,
        disk: str | os.PathLike[str],
        disk_limit: float | str,
        dataset_len: int,
        *,
        structure: Structure | None = None,
        placement: Placement | Literal["prefix", "scattered"] = "scattered",
        memory_slots: int = 0,
        fingerprint: str | None = None,
        codec: Literal["zstd", "lz4"] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        if codec is not None:
            Codec(codec)
        options = DiskOptions(
            os.path.abspath(os.fspath(disk)),
            disk_limit,
            check_len(dataset_len),
            structure,
            placement if isinstance(placement, Placement) else Placement(placement),
            memory_slots,
            fingerprint,
            codec,
            allow_pickle,
        )
        limit, form = parse_size(disk_limit, "disk_limit"), options.make_form()
        capacity = _capacity(options, form, limit)
        folder: Folder | None = None
        try:
            folder = Folder(options.disk, options.identity, fingerprint, allow_pickle, options.facts)
            capacity = _affordable(options, folder, limit, capacity)
            segment = _open_control(options, form, folder, capacity)
            folder.share()
        except OSError as error:
            if folder is not None:
                folder.close()
            if isinstance(error, DiskError | SegmentError):
                raise
            logger.warning("disk=%r is not used: %s. Nothing is cached there.", options.disk, error.strerror or error)
            folder, capacity = None, 0
            segment = _blank(options)
        self._assemble(options, form, capacity, segment, folder)
        logger.info("%r", self)

    @classmethod
    def from_options(cls, options: CacheOptions, dataset_len: int, memory: SharedCache | None = None) -> "DiskCache | None":
        """Return a cache with these options, None without a disk. ``memory``: the cache before it, for samples of one shape."""
        if options.disk is None or options.disk_limit is None:
            return None
        return cls(
            options.disk,
            options.disk_limit,
            dataset_len,
            structure=None if memory is None else memory.structure,
            placement="scattered" if memory is None else memory.placement,
            memory_slots=0 if memory is None else len(memory),
            fingerprint=options.fingerprint,
            codec=options.codec,
            allow_pickle=options.allow_pickle,
        )

    def _assemble(
        self, options: DiskOptions, form: Rows | Records, capacity: int, segment: Segment, folder: Folder | None
    ) -> None:
        """Set all attributes. Each process computes those that follow from the arguments; they are not pickled."""
        self._options, self._capacity, self._folder = options, capacity, folder
        self._fills_batches = form.fills_batches
        self._disk = store = DiskStore(segment, options.dataset_len, folder, form, capacity)
        self._writer = Background(
            "stocache writes to disk", _write, together=_TOGETHER, enough=_ENOUGH_BYTES, most=_MOST_BYTES, finishes=True
        )
        self._behind = threading.local()
        self._has_room_for_all, self._looks_at = True, 0.0
        samples, room = "samples of any size", max(0, capacity - DATA_OFFSET)
        room_text = format_size(room)
        if form.nbytes is not None:
            samples = str(options.structure)
            room_text = f"{min(options.dataset_len, room // SamplesFile.room(form.nbytes))} ({room_text})"
        self._share(segment, options.dataset_len, store, samples, room_text)

    @property
    def disk(self) -> str:
        """The folder."""
        return self._options.disk

    def has_rows(self, indices: _Indices) -> NDArray[np.bool_]:
        """Return which of the samples ``indices`` are here, in a form in which `fill` can read them into batches."""
        return self.set_among(indices) if self._fills_batches else np.zeros(len(indices), bool)

    def fill(self, indices: _Indices, rows: _Indices, items: list[Any]) -> _Indices:
        """Read those samples that are here into rows of a contiguous batch, as `SharedCache.fill_batch` has it.

        Return the rows that were filled.
        """
        there = self.has_rows(indices)
        if np.count_nonzero(there) < len(there):
            indices, rows = indices[there], rows[there]
        filled: _Indices = rows[self._disk.fill(indices, rows, items)]
        self._segment.count(HITS, len(filled))
        return filled

    def serve(
        self,
        load: Callable[[list[int]], Iterable[object]],
        kept: Callable[[int], bool],
        indices: Sequence[int],
        expected: int | None = None,
    ) -> list[Any]:
        """Return the samples ``indices``: those that are here, and the results of ``load`` for the others.

        The loaded samples are written behind the caller, by a thread. Samples that memory also keeps (``kept``) are written
        only if the disk has room for the whole dataset. ``expected``: the number of samples, where ``dataset_len`` is an upper
        bound. A sample that another thread or process has claimed is waited for, but only after all claims of this thread were
        handed to its writer: so no two wait for each other.
        """
        taken, samples = set[int](), dict[int, Any]()
        has_room = self._has_room(expected)
        load_claimed, outer = partial(self.loading, load=load), getattr(self._behind, "wanted", None)
        try:
            self.claim_to_load(list(indices), taken)
            others = {idx for idx in indices if idx not in taken and self.fillable(idx)}
            ours = list(dict.fromkeys(idx for idx in indices if idx not in others))
            self._behind.wanted = lambda idx: has_room or not kept(idx)
            samples.update(zip(ours, self.get_or_load_many(ours, load_claimed, strict=False, claimed=taken), strict=True))
        finally:
            self._behind.wanted = outer
            end = partial(self.end_loading, taken)
            if self._writer.is_busy:  # with samples that must be written before
                self._writer.put(end)
            else:
                end()
        # Within the load of another sample this thread does not wait
        with nested(False) if outer is None else contextlib.nullcontext():
            for idx in others:
                samples[idx] = self.get_or_load(idx, lambda idx: next(iter(load_claimed([idx]))), strict=False)
        return [samples[idx] for idx in indices]

    def _has_room(self, expected: int | None) -> bool:
        """Return whether all samples will have room on the disk. Looking at all states is too slow for each sample."""
        now = time.monotonic()
        if now >= self._looks_at:
            self._has_room_for_all, self._looks_at = self._disk.has_room_for(self._aux.numpy(), expected), now + _LOOK_S
        return self._has_room_for_all

    def _publish(
        self,
        indices: list[int],
        encoded: Sequence[Any],
        overwrite: bool = False,
        count_races: bool = True,
    ) -> None:
        publish, wanted = super()._publish, getattr(self._behind, "wanted", None)
        if wanted is None or overwrite:
            publish(indices, encoded, overwrite, count_races)
        elif not count_races:  # a block, which others may be waiting for
            rows = [row for row, idx in enumerate(indices) if wanted(idx)]
            publish([indices[row] for row in rows], [encoded[row] for row in rows], False, False)
        else:
            for idx, buffers in zip(indices, encoded, strict=True):
                data = b"".join(buffers)
                self._writer.put(_Sample(publish, wanted, idx, data), len(data))

    def agrees(self, idx: int, sample: object) -> bool:
        """Return whether sample ``idx`` is not here, or has the bytes of ``sample``. Raises SampleError if it does not fit."""
        found = self._disk.read(idx) if self.holds(idx) else None
        return found is None or found == b"".join(self._disk.encode(sample, f"sample {idx}"))

    def flush(self) -> None:
        """Wait until all samples that `serve` has loaded in this process are written; 60 seconds at most."""
        self._writer.flush()

    def stats(self) -> CacheStats:
        """Return the current counts and sizes, summed over all processes. ``reserved_bytes`` are those taken on the disk."""
        return dataclasses.replace(super().stats(), reserved_bytes=max(0, self._disk.used - DATA_OFFSET))

    def close(self) -> None:
        """Write the waiting samples, and close the files in this process. They stay on the disk. Twice is fine."""
        if not self.closed:
            self.flush()
        super().close()  # the files are closed with the last thread that uses them

    def __getstate__(self) -> tuple[Any, ...]:
        return self._options, self._capacity, self._segment, self._folder and self._folder.key

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        options, capacity, segment, key = state
        folder = None
        if key is not None:
            try:
                folder = Folder.reopen(options.disk, key)
            except OSError as error:
                with segment.guard:
                    first = segment.extents.first_to_warn(DISK_WARNING)
                if first:
                    problem = str(error).rstrip(".")
                    logger.warning("disk=%r is not used in process %d: %s.", options.disk, os.getpid(), problem)
        self._assemble(options, options.make_form(), capacity, segment, folder)


class _Sample(NamedTuple):
    """A sample to publish if it is ``wanted`` then."""

    publish: Callable[[list[int], list[Any]], None]
    wanted: Callable[[int], bool]
    idx: int
    data: bytes


def _write(tasks: list[_Sample | Callable[[], None]]) -> None:
    """Publish samples together, then call the functions among the tasks."""
    samples = [task for task in tasks if isinstance(task, _Sample)]
    wanted = [sample for sample in samples if sample.wanted(sample.idx)]
    try:
        if wanted:
            wanted[0].publish([sample.idx for sample in wanted], [[sample.data] for sample in wanted])
    except Exception as error:  # the next ones may succeed; a sample that is missing is loaded again
        logger.debug("not written: %s", error)
    for task in tasks:
        if not isinstance(task, _Sample):
            with contextlib.suppress(ClosedError):  # while the disk did not take the samples before
                task()


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


def _capacity(options: DiskOptions, form: Rows | Records, limit: int) -> int:
    """Return the bytes that the file of samples may have. Raises LimitError where that is less than one sample."""
    capacity = max(0, limit - index_bytes(options.dataset_len))
    least = DATA_OFFSET + SamplesFile.room(form.nbytes or 0)
    if options.dataset_len and capacity < least:
        raise LimitError(
            f"disk_limit={options.limit!r} leaves {capacity} bytes after the index, which takes 16 for each sample; one sample "
            f"needs {least}. Raise disk_limit."
        )
    return capacity


def _affordable(options: DiskOptions, folder: Folder, limit: int, capacity: int) -> int:
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


def _open_control(options: DiskOptions, form: Rows | Records, folder: Folder, capacity: int) -> Segment:
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


def _blank(options: DiskOptions) -> Segment:
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
        return residency(options.placement, count, min(count, number)).resident(indices)

    chosen = first(memory_slots + slots) & ~first(memory_slots)
    if memory_slots + slots > count:
        chosen |= first(memory_slots + slots - count)
    found: NDArray[np.bool_] = chosen.numpy()
    return found
