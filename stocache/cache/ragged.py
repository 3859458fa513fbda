"""RaggedCache: keep samples of any size in shared memory, as records that are appended to an arena."""

from collections.abc import Iterable
from typing import Any

from typing_extensions import TypeVar

from stocache.cache.allocate import CacheLayout, Proof
from stocache.cache.arena import Arena
from stocache.cache.base import SampleCache
from stocache.cache.options import RECORDS, SHARING, CacheOptions, shows_options, take_options
from stocache.cache.records import RecordStore, control_bytes
from stocache.cache.stats import OOB
from stocache.samples.indices import check_len
from stocache.shm.named import Identity
from stocache.shm.segment import Segment

_T = TypeVar("_T", default=Any)  # the samples


class RaggedCache(SampleCache[_T]):
    """A cache in shared memory for samples that vary in size: images, detection targets, text, token lists, point clouds.

        cache = RaggedCache(size_limit_gib=32, dataset_len=len(dataset))
        sample = cache.get_or_load(idx, load)       # or get_slot and set_slot, as with SharedCache

    A sample is any tree of dicts and other mappings, lists, tuples, namedtuples and dataclasses, with tensors (and
    their subclasses: MetaTensors, tv_tensors), numpy arrays, Python numbers, str, bytes, None, enum members, paths, dates,
    times, Decimals, Fractions, ranges and PIL images in it. Each sample may differ from the others. It comes back equal
    in type, structure, dtype, shape, strides (if dense) and value. Nothing is pickled unless allowed.

    Ranks of a job share the cache if it has a ``name`` or a ``fingerprint``.

    Records name the classes of their samples. A process that reads a record looks for these classes in the modules that it has
    imported; it imports nothing for that. If a class is missing the sample is a miss: it is loaded again and counted, with
    one warning.

    Args:
        size_limit_gib: GiB for the cache on this machine; "auto" for the memory that the machine can spare, 0 for no cache.
        dataset_len: samples in the whole dataset.
        admission: "all" keeps the first samples until the limit is reached; "cost" the samples that cost most to load per byte.
        codec: "zstd" or "lz4" to compress samples without loss.
        allow_pickle: True to pickle objects that cannot be stored otherwise.
        narrow: True to keep numbers that are made of 8-bit or 16-bit integers as these.
        name, persist, fingerprint, on_busy, share_ranks: to share the cache with other ranks, jobs and later runs.
            `CacheOptions` describes all options in full.

    Raises:
        LimitError: the limit is not a size, or leaves no room for samples; or ``admission`` is unknown.
        CodecError: the codec is unknown, or not installed.
        CacheNameError, MismatchError, SegmentError, BusyError: as for `SharedCache`.

    Examples:
        >>> with RaggedCache(size_limit_gib="1MB", dataset_len=10) as cache:
        ...     cache.set_slot(3, {"text": "two cats", "boxes": torch.zeros(2, 4)})
        ...     cache.set_slot(4, {"text": "a cat", "boxes": torch.ones(1, 4)})
        ...     print(cache.get_slot(4), cache.get_slot(5))
        {'text': 'a cat', 'boxes': tensor([[1., 1., 1., 1.]])} None
    """

    @shows_options(*RECORDS, *SHARING)
    def __init__(self, size_limit_gib: float | str | CacheOptions, dataset_len: int, **options: Any) -> None:
        names = {CacheOptions: (*RECORDS, *SHARING)}
        (taken,) = take_options(type(self).__name__, [size_limit_gib], options, names)
        self._open(taken, dataset_len)

    def _open(
        self, options: CacheOptions, dataset_len: int, proof: Proof | None = None, expected_bytes: int | None = None
    ) -> None:
        """``expected_bytes``: of all samples."""
        dataset_len = check_len(dataset_len)
        names = ("admission", "codec", "allow_pickle")
        identity: Identity = {"samples": "any size"} | {name: getattr(options, name) for name in names}
        layout = CacheLayout(dataset_len, control_bytes(dataset_len, options), identity, expected_bytes=expected_bytes)
        self._open_memory(layout, options, (dataset_len, options), proof)

    def settle(self) -> int:
        """Reserve no more memory. Return the bytes that are reserved."""
        extents = self._segment.extents
        extents.limit = extents.reserved_bytes
        return extents.reserved_bytes

    def _assemble(self, parts: tuple[Any, ...], segment: Segment, capacity: int) -> None:
        dataset_len, options = parts
        self._options: CacheOptions = options
        self.may_admit_later = options.admission == "cost"
        self._records = RecordStore(segment, dataset_len, options)
        self._share(segment, dataset_len, self._records, "samples of any size")
        if segment.data_bytes == 0:
            self._aux.fill_(OOB)

    @property
    def codec(self) -> str | None:
        """The codec that records are compressed with; None if they are not."""
        return self._options.codec

    def treedef_bytes(self, samples: Iterable[object]) -> int | None:
        """Return the bytes that all records of these samples share.

        None if there are no samples, one does not fit, or records are compressed.
        """
        records = None if self.codec is not None else self._records.encode_many(list(samples))
        return Arena.bytes_of({record.treedef for record in records}) if records else None
