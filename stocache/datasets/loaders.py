"""Load the samples that a cache misses: from any dataset, or by the block from a storage.

NOTE [ Admitting blocks ]
    In front of a storage of blocks, the cache keeps whole blocks. With 64 samples a block and memory for 90 % of them, caching
    single samples saves 0.1 % of the block reads; caching whole blocks saves 90 %. A batch waits only for the samples that it
    needs: they are read one by one, as without a cache, and cached. The rest of their blocks is admitted behind the batch, by a
    thread that works when nobody in this process has loaded for a while. So a process that is always loading admits nothing
    else, and loses nothing: each sample is read once in either case. The thread keeps numbers of blocks only, reads one block
    at a time, and ends when it has no more to do. Blocks that it has not admitted when the process ends are read when they are
    requested.

    A block is not made into samples if its bytes can be copied: the columns are checked, and cut into slots, if the samples
    have the structure of these, or into records (NOTE [ Copying rows ]). A damaged sample stays empty; the error is raised when
    it is requested. If a subclass changes the results of a `StorageDataset` or a storage, samples are made; even if
    records are compressed.

    Which blocks are kept is known beforehand, even if samples vary in size: the index of a storage has the bytes of each
    block, the first block shows how many of them are not values, and some samples how much more their records have. The blocks
    are evenly spread (NOTE [ Ordering ]), as many as have room by this estimate. If records are larger than that, the samples
    that come last have no room, and a few blocks are kept in part. The samples of all other blocks are marked as outside the
    cache when the first of them is wanted.

    Where that is not known (records are compressed, a subclass makes the samples) and not all will fit, a block is read once
    and admitted, all of it or nothing, before its samples are returned. Use it if reading one sample fetches its whole
    block each time (``reads_whole_blocks``: from a URL, without room for local copies of all blocks). When several threads and
    processes miss samples of one block at a time, one of them reads it and the others wait until it is cached. They wait for
    nothing else meanwhile, so there is no deadlock. Samples that may not be cached are read one by one; so are all samples of a
    block when one of them cannot be read.
"""

import contextlib
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, groupby
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from stocache.cache.base import SampleCache
from stocache.cache.placement import BlockBounds, Placement, residency
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache
from stocache.cache.stats import MISSING, SlotState
from stocache.errors import StorageError
from stocache.samples.spec import RowLayout
from stocache.storage.dataset import StorageDataset
from stocache.system.background import Background
from stocache.system.objects import attribute_of, get_many_of, newer_of, static_attribute

logger = logging.getLogger("stocache")

_IDLE_S = 0.05
_LONGEST_S = 10.0  # to wait for a block that is being read


_Mask = NDArray[np.bool_]
_T_co = TypeVar("_T_co", covariant=True)


class MapStyle(Protocol[_T_co]):
    """What a dataset needs: a length, and samples by their index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, idx: int, /) -> _T_co:
        """Return a sample."""


class SampleLoader:
    """Loads samples from a map-style dataset: by its own ``__getitems__``, if it has one, or one by one.

    Attributes:
        load: called with an index; returns a sample.
        load_many: called with a list of indices; returns, or yields, their samples.
    """

    __slots__ = ("_dataset", "load", "load_many")  # hidden from libraries that look through attributes for datasets
    _holds_dataset = True

    load: Callable[[int], Any]
    load_many: Callable[[list[int]], Iterable[Any]]

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.load = dataset, partial(operator.getitem, dataset)
        self.load_many = get_many_of(dataset) or partial(map, self.load)

    def __reduce__(self) -> Any:
        return SampleLoader, (self._dataset,)


class BlockLoader:
    """Loads samples of a storage, and admits the rest of their blocks; see NOTE [ Admitting blocks ].

    Args:
        dataset: the samples of a storage, by the block.
        cache: has room for whole blocks.
        chosen: which blocks will be cached; None if that is decided when they are read.
        disk: the cache behind that one, or None. It keeps samples, not blocks; but of a block that has been fetched, all.
    """

    __slots__ = ("__weakref__", "_bounds", "_cache", "_chosen", "_copies", "_dataset", "_disk", "_layout", "_whole")
    _holds_dataset = True

    def __init__(self, dataset: Any, cache: SampleCache, chosen: _Mask | None = None, disk: SampleCache | None = None) -> None:
        self._dataset, self._cache, self._chosen, self._disk = dataset, cache, chosen, disk
        self._bounds: NDArray[Any] = dataset.block_bounds
        self._whole = bool(attribute_of(attribute_of(dataset, "storage"), "reads_whole_blocks", False))
        reads = issubclass(type(dataset), StorageDataset)
        self._layout = RowLayout(cache.structure) if reads and isinstance(cache, SharedCache) else None  # of slots
        # Whether bytes of samples can be copied
        self._copies = self._layout is not None or (reads and isinstance(cache, RaggedCache) and cache.codec is None)

    def __reduce__(self) -> Any:
        return BlockLoader, (self._dataset, self._cache, self._chosen, self._disk)

    def load(self, idx: int) -> Any:
        """Return sample ``idx``."""
        return self.load_many([idx])[0]

    def load_many(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``."""
        if not self._whole and (self._chosen is not None or self._cache.holds_all()):
            with BlockAdmitter.of(self, self._cache).behind(self._leave_out(indices)):
                return list(self._dataset.__getitems__(indices))
        found: dict[int, Any] = {}
        for group in self.by_block(sorted(indices)):
            found.update(self._load_from(group))
        return [found[idx] for idx in indices]

    def _blocks_of(self, indices: Sequence[int]) -> list[int]:
        blocks: list[int] = (np.searchsorted(self._bounds, indices, side="right") - 1).tolist()
        return blocks

    def _members(self, block: int) -> range:
        return range(int(self._bounds[block]), int(self._bounds[block + 1]))

    def admit(self, block: int) -> None:
        """Cache the samples of a block that are empty, except the samples that another thread or process is loading."""
        with self._cache.claimed(self._members(block)) as indices:
            if indices and not self._copy(indices) and (samples := self._load_block(indices)) is not None:
                self._cache.set_if_empty(indices, samples)

    def copy_samples(self, indices: Sequence[int]) -> None:
        """Cache the part of some samples of one block that can be cached without making them."""
        if (self._chosen is not None or self._cache.holds_all()) and self._leave_out(indices[:1]):
            with self._cache.claimed(indices) as empty:
                if empty:
                    self._copy(empty)

    def _copy(self, indices: Sequence[int]) -> bool:
        """Cache those samples of one block that are sound, without making them. Return False if they must be made."""
        if not self._copies:
            return False
        try:
            encoded: Mapping[int, Any] | None = self._dataset.load_encoded(indices, self._layout)
        except Exception as error:  # a damaged file may raise anything; it is raised again when a sample is requested
            logger.debug("samples %d to %d: %s", indices[0], indices[-1], str(error))
            return False
        if encoded is not None:
            self._cache.set_encoded_if_empty(encoded)
        return encoded is not None

    def _leave_out(self, indices: Sequence[int]) -> list[int]:
        """Exclude those blocks of wanted samples that will not be cached. Return the other blocks."""
        blocks = self._blocks_of(indices)
        if self._chosen is None:
            return blocks
        kept = self._chosen[blocks].tolist()
        for block, idx in compress(zip(blocks, indices, strict=True), map(operator.not_, kept)):
            if self._cache.fillable(idx):
                self._cache.exclude(self._members(block))
        return list(compress(blocks, kept))

    def _load_from(self, indices: list[int]) -> Iterable[tuple[int, Any]]:
        """Return samples of one block, and cache all of it if one of them can be cached."""
        (block,), caches = self._blocks_of(indices[:1]), [self._cache] if self._disk is None else [self._cache, self._disk]

        def fillable() -> bool:
            return any(each.fillable(idx) for each in caches for idx in indices)

        if fillable():
            with self._cache.claim(block):
                members = self._members(block)
                if fillable() and (samples := self._load_block(members)) is not None:
                    for each in caches:
                        each.set_if_empty(members, samples)
                    return [(idx, samples[idx - members.start]) for idx in indices]
        found = dict.fromkeys(indices, MISSING)
        for each in caches:  # another thread or process may have read the block meanwhile
            found.update({idx: each.peek(idx) for idx, sample in found.items() if sample is MISSING})
        missing = [idx for idx in indices if found[idx] is MISSING]
        found.update(zip(missing, self._dataset.__getitems__(missing), strict=True))
        return found.items()

    def _load_block(self, indices: Sequence[int]) -> list[Any] | None:
        """Return the samples of a block, or None when one of them raises: the wanted ones are then loaded one by one."""
        try:
            return list(self._dataset.__getitems__(indices))
        except Exception as error:
            logger.debug("samples %d to %d: %s", indices[0], indices[-1], str(error))
            return None

    def uncached(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks of the storage that are not cached."""
        indices, size = self._dataset.indices, self._dataset.storage.block_size
        cached = self._cache.aux_array.numpy() == SlotState.SET
        if self._disk is not None:
            cached |= self._disk.aux_array.numpy() == SlotState.SET
        bounds = ((b, *np.searchsorted(indices, (b * size, (b + 1) * size))) for b in blocks)
        return [b for b, first, end in bounds if not cached[first:end].all()]

    def close(self) -> None:
        """Admit no more blocks."""
        BlockAdmitter.of(self, self._cache).stop()

    def by_block(self, indices: list[int]) -> list[list[int]]:
        """Return ``indices`` in lists, one for each run of samples of one block."""
        blocks = self._blocks_of(indices)
        return [[idx for _, idx in group] for _, group in groupby(zip(blocks, indices, strict=True), key=lambda pair: pair[0])]


class BlockAdmitter:
    """Admits blocks in a thread while no other thread of this process loads samples; see NOTE [ Admitting blocks ].

    A process has one for each cache. Worker threads, which have loaders of their own, share it.
    """

    @classmethod
    def of(cls, loader: BlockLoader, cache: SampleCache) -> "BlockAdmitter":
        """Return the admitter of a cache. If it has no loader any more, ``loader`` becomes that."""
        admitter = _admitters.get(cache)
        if admitter is None or admitter.pid != os.getpid() or admitter._loader() is None:
            admitter = _admitters[cache] = cls(loader)
        return admitter

    def __init__(self, loader: BlockLoader) -> None:
        self.pid = os.getpid()  # a forked child makes its own: the loads that go on are not in it
        self._loader, self._background = weakref.ref(loader), Background("stocache admits blocks")
        self._lock, self._loading, self._loaded_at = threading.Lock(), 0, 0.0
        self._due: set[int] = set()

    @contextlib.contextmanager
    def behind(self, blocks: list[int]) -> Iterator[None]:
        """Stop admitting while a batch is loaded; then go on, with these blocks too."""
        with self._lock:
            self._loading += 1
        try:
            yield
        finally:
            with self._lock:
                self._loading, self._loaded_at = self._loading - 1, time.monotonic()
                due = [block for block in dict.fromkeys(blocks) if block not in self._due]
                self._due.update(due)
            for block in due:
                self._background.put(partial(self._admit, block))

    def stop(self) -> None:
        """Forget the blocks, and wait for the thread to end, while it reads one block at most."""
        with self._lock:
            self._due.clear()
        self._background.stop(_LONGEST_S)

    def _admit(self, block: int) -> None:
        """Admit a block when nobody has loaded for a while, unless it was forgotten meanwhile."""
        while block in self._due and (self._loading or time.monotonic() < self._loaded_at + _IDLE_S):
            time.sleep(_IDLE_S)
        loader = self._loader()
        if loader is not None and block in self._due:
            self._due.discard(block)
            loader.admit(block)  # an error is raised again when a sample is requested


_admitters: "weakref.WeakKeyDictionary[SampleCache, BlockAdmitter]" = weakref.WeakKeyDictionary()


def choose_blocks(dataset: Any, cache: SampleCache, samples: Iterable[object]) -> _Mask | None:
    """Return which blocks of a dataset a cache for samples of varying size will hold, evenly spread; see NOTE [ Admitting
    blocks ]. None if their sizes in the cache are not known before they are read.

    Args:
        samples: some samples of the dataset.
    """
    if not isinstance(cache, RaggedCache) or not issubclass(type(dataset), StorageDataset):
        return None
    try:
        record_bytes = dataset.record_bytes()
    except (StorageError, OSError):  # the error is raised when a sample of that block is requested
        return None
    shared, block_bounds = cache.treedef_bytes(samples), dataset.block_bounds
    if shared is None or record_bytes is None or block_bounds is None:
        return None
    bounds = np.append(0, np.cumsum(np.maximum(1, np.ceil(record_bytes)).astype(np.int64)))
    room = max(0, cache.stats().capacity_bytes - shared)
    chosen = residency(Placement("scattered", BlockBounds(bounds)), int(bounds[-1]), room)
    return chosen.resident(bounds[:-1])


def admission_unit(dataset: object) -> int | BlockBounds | None:
    """Return the unit of admission for a dataset of blocks: their size, or their bounds. None for any other dataset."""
    own = static_attribute(type(dataset), "block_bounds") is not None  # not one that __getattr__ passes on
    bounds = attribute_of(dataset, "block_bounds") if own and newer_of(dataset) is not None else None
    if bounds is None:
        return None
    sizes = np.diff(bounds)
    regular = (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]
    return int(sizes[0]) if regular else BlockBounds(bounds)
