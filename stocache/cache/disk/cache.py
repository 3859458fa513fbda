"""DiskCache: keep samples in a folder on a local disk, for all processes of this machine and for later runs."""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from stocache.cache.base import SampleCache
from stocache.cache.disk.folder import Folder
from stocache.cache.disk.formats import Rows
from stocache.cache.disk.opening import DiskOptions, affordable, blank, count_slots, open_control
from stocache.cache.disk.samples_file import DATA_OFFSET, SamplesFile
from stocache.cache.disk.store import DiskStore
from stocache.cache.loading import nested
from stocache.cache.options import CacheOptions
from stocache.cache.placement import Placement
from stocache.cache.shared import SharedCache
from stocache.cache.stats import HITS, CacheStats
from stocache.errors import ClosedError, DiskError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.indices import check_len
from stocache.samples.record_decoder import Records
from stocache.samples.spec import Structure
from stocache.shm.extents import DISK_WARNING
from stocache.shm.segment import Segment
from stocache.system.background import Background
from stocache.system.limits import format_size, parse_size

logger = logging.getLogger("stocache")


_T = TypeVar("_T", default=Any)  # the samples


_LOOK_S = 0.1


_MOST_BYTES = 64 << 20  # that wait to be written


_ENOUGH_BYTES = 4 << 20  # are written at once; fewer wait for others


_TOGETHER = 256  # samples, and releases of claims, that are taken together


_Indices = NDArray[np.int64]


class DiskCache(SampleCache[_T]):
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
    _by_key: ClassVar[bool] = False

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
        if not disk:
            raise DiskError(f"disk={disk!r} is not the path of a folder.")
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
            self._by_key,
        )
        limit, form = parse_size(disk_limit, "disk_limit"), options.make_form()
        capacity = count_slots(options, form, limit)
        folder: Folder | None = None
        try:
            folder = Folder(options.disk, options.identity, fingerprint, allow_pickle, options.facts)
            capacity = affordable(options, folder, limit, capacity)
            segment = open_control(options, form, folder, capacity)
            folder.share()
        except OSError as error:
            if folder is not None:
                folder.close()
            if isinstance(error, DiskError | SegmentError):
                raise
            logger.warning("disk=%r is not used: %s. Nothing is cached there.", options.disk, error.strerror or error)
            folder, capacity = None, 0
            segment = blank(options)
        self._set_up(options, form, capacity, segment, folder)
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

    def _set_up(
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
        samples, room = "values by key" if self._by_key else "samples of any size", max(0, capacity - DATA_OFFSET)
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
        self._set_up(options, options.make_form(), capacity, segment, folder)


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
