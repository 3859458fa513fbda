"""Load the samples that a cache misses: from any dataset, or by the block from a storage.

NOTE [ Admitting blocks ]
    In front of a storage of blocks, the cache keeps whole blocks. With 64 samples a block and memory for 90 % of them, caching
    single samples saves 0.1 % of the block reads; caching whole blocks saves 90 %. A batch waits only for the samples that it
    needs: they are read one by one, as without a cache, and cached. The rest of their blocks is admitted behind the batch, by a
    thread that works when nobody in this process has loaded for a while. So a process that is always loading admits nothing
    else, and loses nothing: each sample is read once in either case. The thread keeps numbers of blocks only, reads one block
    at a time, and ends when it has no more to do. What it has not admitted when the process ends is read when it is wanted.

    Where reading one sample fetches its whole block (``reads_whole_blocks``: from a URL), and where samples vary in size and
    not all will fit, a block is read once and admitted, all of it or nothing, before its samples are returned. When several
    threads and processes miss samples of one block at a time, one of them reads it and the others wait. They wait for nothing
    else meanwhile, so there is no deadlock. Samples that may not be cached are read one by one; so are all samples of a block
    when one of them cannot be read.
"""

import contextlib
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from stocache.cache.base import SampleCache, SlotState
from stocache.cache.placement import BlockBounds
from stocache.cache.stats import MISSING

logger = logging.getLogger("stocache")

_IDLE_S = 0.05
_LONGEST_S = 10.0  # to wait for a block that is being read


class SampleLoader:
    """Loads samples from a map-style dataset: by its own ``__getitems__``, where it has one, or one by one.

    Attributes:
        load: called with an index; returns a sample.
        load_many: called with a list of indices; returns, or yields, their samples.
    """

    __slots__ = ("_dataset", "load", "load_many")  # hidden from libraries that look through attributes for datasets

    load: Callable[[int], Any]
    load_many: Callable[[list[int]], Iterable[Any]]

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.load = dataset, partial(operator.getitem, dataset)
        self.load_many = getattr(dataset, "__getitems__", None) or partial(map, self.load)

    def __reduce__(self) -> Any:
        return SampleLoader, (self._dataset,)


class BlockLoader:
    """Loads samples of a storage, and admits the rest of their blocks; see NOTE [ Admitting blocks ]."""

    __slots__ = ("__weakref__", "_admitter", "_bounds", "_cache", "_dataset", "_whole")

    def __init__(self, dataset: Any, cache: SampleCache) -> None:
        self._dataset, self._cache = dataset, cache
        self._bounds: np.ndarray[Any, Any] = dataset.block_bounds
        self._whole = bool(getattr(getattr(dataset, "storage", None), "reads_whole_blocks", False))
        self._admitter: BlockAdmitter | None = None

    def __reduce__(self) -> Any:
        return BlockLoader, (self._dataset, self._cache)

    def load(self, idx: int) -> Any:
        """Return sample ``idx``."""
        return self.load_many([idx])[0]

    def load_many(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``."""
        blocks = (np.searchsorted(self._bounds, indices, side="right") - 1).tolist()
        if not self._whole and self._cache.holds_all():
            if self._admitter is None or self._admitter.pid != os.getpid():
                self._admitter = BlockAdmitter(self)
            with self._admitter.behind(blocks):
                return list(self._dataset.__getitems__(indices))
        found: dict[int, Any] = {}
        for block, group in groupby(sorted(zip(blocks, indices, strict=True)), key=lambda pair: pair[0]):
            found.update(self._load_from(block, [idx for _, idx in group]))
        return [found[idx] for idx in indices]

    def admit(self, block: int) -> None:
        """Cache the samples of a block that are empty, except those that another thread or process is loading."""
        with self._cache.claimed(range(int(self._bounds[block]), int(self._bounds[block + 1]))) as indices:
            samples = self._load_block(indices) if indices else None
            if samples is not None:
                self._cache.set_if_empty(indices, samples)

    def _load_from(self, block: int, indices: list[int]) -> Iterable[tuple[int, Any]]:
        cache = self._cache
        if any(map(cache.fillable, indices)):
            with cache.claim(block):
                members = range(int(self._bounds[block]), int(self._bounds[block + 1]))
                if any(map(cache.fillable, indices)) and (samples := self._load_block(members)) is not None:
                    cache.set_if_empty(members, samples)
                    return [(idx, samples[idx - members.start]) for idx in indices]
        found = {idx: cache.peek(idx) for idx in indices}  # another thread or process may have read the block meanwhile
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
        states = self._cache.aux_array.numpy()
        bounds = ((b, *np.searchsorted(indices, (b * size, (b + 1) * size))) for b in blocks)
        return [b for b, first, end in bounds if (states[first:end] != SlotState.SET).any()]

    def close(self) -> None:
        """Admit no more blocks."""
        if self._admitter is not None and self._admitter.pid == os.getpid():
            self._admitter.stop()

    def by_block(self, indices: list[int]) -> list[list[int]]:
        """Return ``indices`` in lists, one for each run of samples of one block."""
        blocks = np.searchsorted(self._bounds, indices, side="right").tolist()
        return [[idx for _, idx in group] for _, group in groupby(zip(blocks, indices, strict=True), key=lambda pair: pair[0])]


class BlockAdmitter:
    """Admits blocks in a thread while no other thread of this process loads samples; see NOTE [ Admitting blocks ]."""

    def __init__(self, loader: BlockLoader) -> None:
        self.pid = os.getpid()  # a forked child makes its own: it has no such thread
        self._loader = weakref.ref(loader)
        self._idle = threading.Condition()
        self._loading, self._loaded_at = 0, 0.0
        self._due: dict[int, None] = {}
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def behind(self, blocks: list[int]) -> Iterator[None]:
        """Stop admitting while a batch is loaded; then go on, with these blocks too."""
        with self._idle:
            self._loading += 1
        try:
            yield
        finally:
            with self._idle:
                self._loading -= 1
                self._loaded_at = time.monotonic()
                self._due.update(dict.fromkeys(blocks))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="stocache admits blocks")
                    self._thread.start()

    def stop(self) -> None:
        """Forget the blocks, and wait for the thread to end, while it reads one block at most."""
        with self._idle:
            self._due.clear()
            self._idle.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST_S)

    def _run(self) -> None:
        while (block := self._next()) is not None:
            loader = self._loader()
            if loader is None:
                return
            with contextlib.suppress(Exception):  # what is wrong with a sample is told when it is wanted
                loader.admit(block)
            del loader

    def _next(self) -> int | None:
        """Return a block when nobody has loaded for a while; None when there is nothing to do, or the program ends."""
        with self._idle:
            while self._due and threading.main_thread().is_alive():
                rest_s = self._loaded_at + _IDLE_S - time.monotonic()
                if not self._loading and rest_s <= 0:
                    block = next(iter(self._due))
                    del self._due[block]
                    return block
                self._idle.wait(max(rest_s, _IDLE_S))
            self._thread = None
            return None


def admission_unit(dataset: Any) -> int | BlockBounds | None:
    """Return the unit of admission for a dataset of blocks: their size, or their bounds. None for any other dataset."""
    bounds = getattr(dataset, "block_bounds", None)
    if bounds is None:
        return None
    sizes = np.diff(bounds)
    regular = (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]
    return int(sizes[0]) if regular else BlockBounds(bounds)
