"""DiskCache: keep samples in a folder on a local disk, for all processes of this machine and for later runs."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from stocache.cache.base import SampleCache
from stocache.cache.disk.folder import Folder
from stocache.cache.disk.formats import make_form, pack_example
from stocache.cache.disk.samples_file import DATA_OFFSET, index_bytes, room_of
from stocache.cache.disk.store import DiskStore, no_states, open_states
from stocache.cache.loading import nested, nesting, only
from stocache.cache.options import CacheOptions
from stocache.cache.placement import Placement
from stocache.cache.shared import SharedCache
from stocache.cache.stats import HITS
from stocache.errors import DiskError, LimitError, SegmentError
from stocache.samples.indices import check_len
from stocache.samples.spec import Structure
from stocache.shm.extents import DISK_WARNING
from stocache.shm.named import Identity
from stocache.shm.segment import Segment
from stocache.system.background import Background
from stocache.system.limits import format_size, parse_size

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)  # the samples

_MOST_BYTES = 64 << 20  # that wait to be written
_ENOUGH_BYTES = 4 << 20  # are written at once; fewer wait for others
_TOGETHER = 256  # parts that are taken together

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
        if not disk:
            raise DiskError(f"disk={disk!r} is not the path of a folder.")
        path, dataset_len, limit = os.path.abspath(disk), check_len(dataset_len), parse_size(disk_limit, "disk_limit")
        placement = placement if isinstance(placement, Placement) else Placement(placement)
        form = structure, self._by_key, codec, allow_pickle
        row_bytes = make_form(*form).nbytes
        capacity, least = max(0, limit - index_bytes(dataset_len)), DATA_OFFSET + room_of(row_bytes or 0)
        if dataset_len and capacity < least:
            raise LimitError(
                f"disk_limit={disk_limit!r} leaves {capacity} bytes after the index, which takes 16 for each sample; one "
                f"sample needs {least}. Raise disk_limit."
            )
        identity: Identity = {
            "dataset_len": dataset_len,
            "samples": structure.identity if structure is not None else "values by key" if self._by_key else "any size",
            "placement": "" if structure is None else str(placement),
            "codec": codec,
            "allow_pickle": allow_pickle,
        }
        folder: Folder | None = None
        try:
            folder = Folder(path, may_be_new=True)
            folder.take(identity, fingerprint, allow_pickle, {"memory_slots": memory_slots} | pack_example(structure))
            capacity = min(capacity, _room_in(folder, index_bytes(dataset_len), disk_limit, limit))
            segment = open_states(folder, dataset_len, disk_limit, row_bytes, placement, capacity)
            folder.share()
        except OSError as error:
            if folder is not None:
                folder.close()
            if isinstance(error, DiskError | SegmentError):
                raise
            logger.warning("disk=%r is not used: %s. Nothing is cached there.", path, error.strerror or error)
            folder, capacity, segment = None, 0, no_states(dataset_len)
        self._set_up((path, dataset_len, form, capacity), segment, folder)
        logger.info("%r", self)

    @classmethod
    def behind(cls, options: CacheOptions, dataset_len: int, memory: SharedCache | None = None) -> "DiskCache | None":
        """Return the disk that options name; None if none. ``memory``: the cache before it, for samples of one shape."""
        if options.disk is None or options.disk_limit is None:
            return None
        alike = {name: getattr(options, name) for name in ("fingerprint", "codec", "allow_pickle")}
        if memory is not None:
            alike |= {"structure": memory.structure, "placement": memory.placement, "memory_slots": len(memory)}
        return cls(options.disk, options.disk_limit, dataset_len, **alike)

    def _set_up(self, parts: tuple[Any, ...], segment: Segment, folder: Folder | None) -> None:
        """Set all attributes. Each process computes the attributes that follow from the arguments; they are not pickled."""
        self._parts, self._folder = parts, folder
        _, dataset_len, (structure, *others), capacity = parts
        form = make_form(structure, *others)
        self._fills_batches = form.fills_batches
        self._disk = store = DiskStore(segment, dataset_len, folder, form, capacity)
        self._writer = Background(
            "stocache writes to disk", _write, together=_TOGETHER, enough=_ENOUGH_BYTES, most=_MOST_BYTES, finishes=True
        )
        self._behind = threading.local()
        self._share(segment, dataset_len, store, str(structure or "samples of any size"))

    @property
    def disk(self) -> str:
        """The folder."""
        return str(self._parts[0])

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
        """Return the samples ``indices``: the samples that are here, and the results of ``load`` for the others.

        The loaded samples are written behind the caller, by a thread. Samples that memory also keeps (``kept``) are written
        only if the disk has room for the whole dataset. ``expected``: the number of samples, if ``dataset_len`` is an upper
        bound. A sample that another thread or process has claimed is waited for, but only after all claims of this thread were
        handed to its writer: so no two wait for each other.
        """
        taken, samples = set[int](), dict[int, Any]()
        has_room = self._disk.has_room_for(self._aux.numpy(), expected)

        def load_claimed(indices: list[int]) -> list[Any]:
            with nested(True):
                return list(load(indices))

        outer = getattr(self._behind, "wanted", None)
        try:
            self.claim_to_load(list(indices), taken)
            others = {idx for idx in indices if idx not in taken and self.fillable(idx)}
            ours = list(dict.fromkeys(idx for idx in indices if idx not in others))
            self._behind.wanted = lambda idx: has_room or not kept(idx)
            samples.update(zip(ours, self.get_or_load_many(ours, load_claimed, strict=False, claimed=taken), strict=True))
        finally:
            self._behind.wanted = outer
            if taken:
                self._writer.put(_Part(self, bool, {}, taken))
        with nested(outer is not None and nesting.samples):  # within the load of another sample this thread does not wait
            for idx in others:
                samples[idx] = self.get_or_load(idx, partial(only, load_claimed), strict=False)
        return [samples[idx] for idx in indices]

    def _publish(self, indices: list[int], encoded: Sequence[Any], overwrite: bool = False, count_races: bool = True) -> None:
        wanted = None if overwrite else getattr(self._behind, "wanted", None)
        if wanted is not None and count_races:
            samples = {idx: b"".join(buffers) for idx, buffers in zip(indices, encoded, strict=True)}
            return self._writer.put(_Part(self, wanted, samples, set()), sum(map(len, samples.values())))
        if wanted is not None:  # a block, which others may be waiting for
            rows = [row for row, idx in enumerate(indices) if wanted(idx)]
            indices, encoded = [indices[row] for row in rows], [encoded[row] for row in rows]
        super()._publish(indices, encoded, overwrite, count_races)

    def agrees(self, idx: int, sample: object) -> bool:
        """Return whether sample ``idx`` is not here, or has the bytes of ``sample``. Raises SampleError if it does not fit."""
        found = self._disk.read(idx) if self.holds(idx) else None
        return found is None or found[0][: found[1]].tobytes() == b"".join(self._disk.encode(sample, f"sample {idx}"))

    def flush(self) -> None:
        """Wait until all samples that `serve` has loaded in this process are written; 60 seconds at most."""
        self._writer.flush()

    def close(self) -> None:
        """Write the waiting samples, and close the files in this process. They stay on the disk. Twice is fine."""
        if not self.closed:
            self.flush()
        super().close()  # the files are closed with the last thread that uses them

    def __getstate__(self) -> tuple[Any, ...]:
        return self._parts, self._segment, self._folder and self._folder.key

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        parts, segment, key = state
        folder: Folder | None = None
        if key is not None:
            try:
                folder = Folder(parts[0])
                folder.join(key)
            except OSError as error:
                if folder is not None:
                    folder.close()
                with segment.guard:
                    first = segment.extents.first_to_warn(DISK_WARNING)
                if first:
                    problem = str(error).rstrip(".")
                    logger.warning("disk=%r is not used in process %d: %s.", parts[0], os.getpid(), problem)
                folder, segment = None, no_states(parts[1])
        self._set_up(parts, segment, folder)


def _room_in(folder: Folder, index: int, disk_limit: float | str, limit: int) -> int:
    """Return the bytes for samples on the disk of a folder, behind an index of ``index`` bytes; warn if ``limit`` has more."""
    room = max(index, folder.at.free_bytes() + sum(os.fstat(fd).st_size for fd in (folder.samples, folder.index)))
    if room < limit:
        logger.warning("disk_limit=%s is more than %r has room for: %s.", disk_limit, folder.path, format_size(room))
    return room - index


class _Part(NamedTuple):
    """Samples that `DiskCache.serve` has loaded, to publish if they are ``wanted``; and claims to release after that."""

    cache: DiskCache[Any]
    wanted: Callable[[int], bool]
    samples: Mapping[int, bytes]
    taken: set[int]


def _write(parts: list[_Part]) -> None:
    """Publish samples together. If that fails, the next ones may succeed; a sample that is missing is loaded again."""
    cache = parts[0].cache
    try:
        wanted = {idx: [data] for part in parts for idx, data in part.samples.items() if part.wanted(idx)}
        if wanted:
            SampleCache._publish(cache, list(wanted), list(wanted.values()))  # at once, even if there is no thread for it
    finally:
        for part in parts:
            cache.end_loading(part.taken)
