"""KeyedCache: keep values by key in shared memory: frames, images, tiles, latents, once for all samples that need them."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from copy import deepcopy
from typing import Any, Generic

from typing_extensions import TypeVar

from stocache.cache.allocate import CacheLayout
from stocache.cache.keyed.disk import KeyedDisk, count_places
from stocache.cache.keyed.keys import Key, key_of
from stocache.cache.keyed.layout import BY_KEY, CONTROL_BYTES, STOPPED
from stocache.cache.keyed.store import KeyedStore
from stocache.cache.loading import LoadingCache
from stocache.cache.options import CacheOptions, shows_options, take_options
from stocache.cache.stats import HITS, MISSES, MISSING, CacheStats
from stocache.errors import BusyError, SlotError
from stocache.shm.claims import BLOCKS
from stocache.shm.extents import FULL_WARNING
from stocache.shm.job import Job
from stocache.shm.segment import FREE_THREADED, Segment
from stocache.system.describe import describe
from stocache.system.limits import format_size

logger = logging.getLogger("stocache")


_CLAIMS = 1 << 14
"""Words of claims. Keys whose hashes have one word exclude each other: one is loaded after the other."""


_TRIES = 8  # to claim one of the words that say that somebody writes


_MOST_MISSED = 1 << 16  # keys that a process remembers to have missed


_K = TypeVar("_K", default=Any)


_T = TypeVar("_T", default=Any)


KEYED = "name", "persist", "fingerprint", "on_busy", "codec", "allow_pickle", "disk", "disk_limit"
"""The options of a `KeyedCache`."""


class KeyedCache(LoadingCache[_T], Generic[_K, _T]):
    """A cache in shared memory for values that have keys: one copy for all samples and workers that need one.

        frames = KeyedCache(size_limit_gib=32)
        frame = frames.get_or_load((path, number), lambda key: decode(*key))

    A key is a str, bytes, int, bool, None, float, enum member or path, or a tuple of these. 1, 1.0 and True are three keys. A
    value is what a sample of a `RaggedCache` may be: tensors, arrays, numbers, texts, images, in any containers. It comes back
    equal. Nothing is evicted. When the cache is full, further keys are loaded each time, with one warning.

    Make it before worker processes start: a cache is shared with the processes that get it, by fork or pickled. With a
    ``fingerprint``, a text that says which data it is, it is one for all ranks of the job; with a ``name``, for all processes
    of the user that ask for that name.

    Args:
        size_limit_gib: GiB for the cache on this machine; "auto" for the memory that the machine can spare, 0 for no cache.
        codec: "zstd" or "lz4" to compress values without loss.
        allow_pickle: True to pickle objects that cannot be stored otherwise.
        disk, disk_limit: a folder on a local disk behind the memory, and the bytes that it may have. It keeps all values
            for the next run with the same fingerprint, and is emptied if that changes.
        name, persist, fingerprint, on_busy: to share the cache; `CacheOptions` describes all options in full.

    Raises:
        LimitError: the limit is not a size, or leaves no room.
        CodecError: the codec is unknown, or not installed.
        DiskError: the folder cannot be used; see `DiskCache`.
        CacheNameError, MismatchError, SegmentError, BusyError: as for `SharedCache`.

    Examples:
        >>> with KeyedCache(size_limit_gib="1MB") as frames:
        ...     for number in (3, 4, 3):
        ...         frame = frames.get_or_load(("a.mp4", number), lambda key: torch.full((2,), key[1]))
        ...     print(frame, len(frames), frames.stats().hits)
        tensor([3, 3]) 2 1
    """

    _records_loads = False  # the dataset that asks for values does
    _store: KeyedStore

    @shows_options(*KEYED)
    def __init__(self, size_limit_gib: float | str | CacheOptions = "auto", **options: Any) -> None:
        (taken,) = take_options(type(self).__name__, [size_limit_gib], options, {CacheOptions: KEYED})
        self._open(taken)

    def _open(self, options: CacheOptions, job: Job | None = None) -> None:
        identity = {"samples": BY_KEY, "codec": options.codec, "allow_pickle": options.allow_pickle}
        layout = CacheLayout(_CLAIMS, CONTROL_BYTES, identity)
        disk = KeyedDisk.behind(options, count_places(options))
        self._open_memory(layout, options, (options, disk), job=job)

    def _assemble(self, parts: tuple[Any, ...], segment: Segment, capacity: int) -> None:
        self._disk: KeyedDisk | None = parts[1]
        store = KeyedStore(segment, parts[0])
        self._attach(segment, store, _CLAIMS)
        self._arena, self._slot = store.arena, store.find
        # The generation of the table in which this process has found the cache full
        self._full_in = -1 if segment.data_bytes else store.generation

    @property
    def stopped(self) -> bool:
        """Whether a cached function has found in a process that its values are wrong by now. They are still served."""
        return self._store.words[STOPPED] != 0

    def stop(self) -> None:
        """See `stopped`."""
        self._store.words[STOPPED] = 1

    def get(self, key: _K, default: Any = None, *, copy: bool = True) -> Any:
        """Return the value of a key, or ``default`` if it is not cached.

        Args:
            key: see the class.
            copy: False returns a view of the shared memory itself: writing to it changes what others read.

        Raises:
            CacheKeyError: the key is of a different type, or NaN.

        Safe from any process and thread; a hit takes no lock. Copies the bytes of the value.
        """
        found = key_of(key)
        value = self.find(found, copy)
        if value is not MISSING:
            return value
        self._warn_of_unreadable([found])
        self._segment.count(MISSES)
        self._note_miss(found)
        return default

    def hit(self, item: Key, copy: bool) -> Any:
        """Return the value of a stored key, else MISSING. Other methods try this first. A miss is not counted."""
        slot = self._slot(item)
        if slot < 0:
            return MISSING
        value = self._load(slot, copy)
        if value is not MISSING:  # else it is of a class that is not imported here
            if FREE_THREADED:
                self._segment.count(HITS)
            else:
                self._segment.counters[HITS] += 1  # faster, and the GIL keeps other threads from it
        return value

    def find(self, item: Key, copy: bool = True) -> Any:
        """Return the value of a stored key from memory or the disk, else MISSING. A miss is not counted."""
        value = self.hit(item, copy)
        if value is MISSING and self._disk is not None and (value := self._disk.read(item)) is not MISSING:
            self._segment.count(HITS)
            if self._has_memory():
                super()._publish([item], [self._store.encode(value, "value")])
                if not self._disk.has(item):  # it was removed meanwhile, and maybe from memory before it was published there
                    self._store.remove(item)
        return value

    def peek(self, item: Key) -> Any:
        """Return a copy of the value of a stored key that is in memory, else MISSING. Do not count it."""
        slot = self._slot(item)
        return MISSING if slot < 0 else self._load(slot, True)

    def holds(self, item: Key) -> bool:
        """Return whether a stored key is cached, in memory or on the disk."""
        return self._slot(item) >= 0 or (self._disk is not None and self._disk.has(item))

    def fillable(self, item: Key) -> bool:
        """Return whether one more key may be cached. A process without its own counter row caches nothing."""
        return self._has_memory() or (self._disk is not None and self._disk.takes)

    def _has_memory(self) -> bool:
        is_full = self._full_in == self._store.generation or self._arena.refused
        return not is_full and self._segment.holder > 0

    def _note_miss(self, item: Key, since: float = 0.0) -> None:
        if self.fillable(item):
            if len(self._missed) >= _MOST_MISSED:
                self._missed.clear()
            super()._note_miss(item, since)

    def __contains__(self, key: _K) -> bool:
        found = key_of(key)
        if self.holds(found):
            return True
        self._note_miss(found)
        return False

    @property
    def room(self) -> tuple[int, int]:
        """The bytes that are free for values, and the bytes for all values."""
        return self._arena.capacity - self._arena.used, self._arena.capacity

    def __len__(self) -> int:
        """Return how many keys are cached in memory."""
        return len(self._store)

    def as_mapping(self) -> "KeyedMapping":
        """Return the cache as a mutable mapping, for programs that keep a dict.

        The value of a key does not change, and the keys are not listed: the bytes of a key are compared, and not read.
        """
        return KeyedMapping(self)

    def get_or_load(
        self, key: _K, load: Callable[[_K], _T], *, copy: bool = True, strict: bool = True, timeout_s: float = 10.0
    ) -> _T:
        """Return the value of a key from the cache, or else from ``load(key)``, which is then cached.

        If several threads, processes or jobs want a key that is not cached, one loads it and the others wait. A load may itself
        ask for other keys: then it waits for nobody.

        Args:
            key: see the class.
            load: called with ``key``. Its errors pass through; then the next caller loads the value.
            copy: as in `get`.
            strict: False returns a value that cannot be stored all the same: uncached, counted (``rejected``), and the first
                one with a warning.
            timeout_s: seconds to wait for another process that is loading the key, and may be stopped. Then this process loads
                it too. A process that has died is not waited for.

        Returns:
            The value: a private copy, or the object that ``load`` returned.

        Raises:
            CacheKeyError: the key is of a different type, or NaN.
            SampleError: the value cannot be stored.
        """
        found = key_of(key)
        value: _T = self.hit(found, copy)
        if value is not MISSING:
            return value
        return self._load_one(found, lambda: load(key), copy, strict, timeout_s)

    def get_or_load_many(
        self,
        keys: Sequence[_K],
        load_missing: Callable[[list[_K]], Iterable[_T]],
        *,
        copy: bool = True,
        strict: bool = True,
        timeout_s: float = 10.0,
    ) -> list[_T]:
        """Return the values of keys. Load the values that are not cached with one call of ``load_missing``, and cache them.

        Args:
            keys: in any order, repeats allowed.
            load_missing: called with the missing keys in their order, each once; returns or yields their values. Keys that
                another process is loading are waited for after that, and loaded with further calls if needed.
            copy, strict, timeout_s: as in `get_or_load`.

        Raises:
            CacheKeyError, SampleError: as `get_or_load`.
            ValueError: ``load_missing`` returns fewer or more values than keys. Those before are cached.
        """
        given = {key_of(key): key for key in keys}
        found = list(given)
        values = [self.find(each, copy) for each in found]
        if any(value is MISSING for value in values):
            self._load_many(
                found, values, lambda part: load_missing([given[each] for each in part]),
                copy=copy, strict=strict, timeout_s=timeout_s,
            )  # fmt: skip
        if len(found) == len(keys):
            return values
        first = dict(zip(found, values, strict=True))
        return [first[each] if given.pop(each, MISSING) is not MISSING else deepcopy(first[each]) for each in map(key_of, keys)]

    def put(self, key: _K, value: _T) -> bool:
        """Cache the value of a key. Return whether it is cached now: not if the cache is full.

        If several processes put one key, the first wins. A tensor on a GPU is copied to memory once.

        Raises:
            CacheKeyError: the key is of a different type, or NaN.
            SampleError: the value would not come back unchanged. Nothing is stored.
            SlotError: the key is cached with a different value, and this process has not missed it before.
        """
        found = key_of(key)
        missed, _ = self._take_miss(found)
        held = MISSING if missed else self.find(found)
        if held is not MISSING and describe(held) != describe(value):
            raise SlotError(f"put({key!r:.100}): the key is cached with another value, which does not change.")
        if not self.holds(found) and self.fillable(found):
            self._publish([found], [self._store.encode(_on_cpu(value), f"put({key!r:.100})")])
        return self.holds(found)

    def remove(self, key: _K) -> bool:
        """Remove a key, also from the disk. Return whether it was cached.

        Other threads and processes that have found the value read it to the end. The room of the value, in memory and on the
        disk, is not used again: in memory until `clear`, on the disk until the folder is emptied. A process that is loading the
        key meanwhile caches it after that.

        Raises:
            CacheKeyError: the key is of a different type, or NaN.
            BusyError: another process, which may be stopped, holds the lock of the cache.
            OSError: the disk does not allow it.
        """
        found = key_of(key)
        on_disk = self._disk is not None and self._disk.remove(found)  # first, or a reader could put it into memory again
        in_memory = self._store.remove(found)
        if on_disk is None or in_memory is None:
            raise BusyError("remove: another process, which may be stopped, holds the lock of the cache.")
        return in_memory or on_disk

    def _publish(self, items: list[Key], encoded: Sequence[Any], overwrite: bool = False, count_races: bool = True) -> None:
        if self._has_memory():
            super()._publish(items, encoded)
        if self._disk is not None:
            for key, record in zip(items, encoded, strict=True):
                self._disk.keep(key, record)

    def _write(self, items: list[Key], encoded: Sequence[object]) -> list[int | None]:
        counters = super()._write(items, encoded)
        if None in counters:
            self._note_full()
        return counters

    def _claim_to_write(self, items: list[Key], taken: set[int], overwrite: bool) -> list[Key]:
        first = items[0][1]
        for word in range(first, first + _TRIES):  # any will do: `clear` waits until none is taken
            self._claims.to_write([_CLAIMS + word % BLOCKS], taken)
            if taken:
                return [item for item in items if self._slot(item) < 0]
        return []  # a process that is stopped holds the lock of claims

    def _words(self, items: list[Key]) -> list[int]:
        return [number % _CLAIMS for _, number in items]

    def _empty(self, items: list[Key]) -> list[Key]:
        return items if items and self.fillable(items[0]) else []

    def _note_full(self) -> None:
        """Note that the cache is full, and warn once; unless a value like the others would still fit."""
        stats = self.stats()
        if self.room[0] > stats.slot_bytes > 0 or not stats.filled:
            return
        self._full_in = self._store.generation
        with self._segment.guard:
            first = self._disk is None and self._segment.extents.first_to_warn(FULL_WARNING)  # the disk has the values
        if first:
            logger.warning(
                "the cache of keys is full: %d keys of %s each in %s, hit rate %.0f %%. Further keys are loaded each time. "
                "For n such keys, a limit of n times %d bytes is needed.",
                stats.filled, format_size(stats.slot_bytes), format_size(stats.capacity_bytes), 100 * stats.hit_rate,
                stats.slot_bytes,
            )  # fmt: skip

    def close(self) -> None:
        """Release the memory in this process, and close the files of the disk, which stay. Twice is fine."""
        if not self.closed and self._disk is not None:
            self._disk.close()
        super().close()

    def _count(self) -> tuple[int, int]:
        return (filled := len(self._store)), filled

    def _describe(self, stats: CacheStats) -> str:
        return f"{stats.filled} keys, {format_size(self._arena.used)} of {format_size(stats.capacity_bytes)}"


def _on_cpu(value: Any) -> Any:
    """Return a tensor that lies on a device as one in memory; anything else unchanged."""
    return value.detach().cpu() if hasattr(value, "is_cpu") and not value.is_cpu else value


class KeyedMapping(MutableMapping[Any, Any]):
    """A `KeyedCache` as a mutable mapping. A full cache serves each thread the value that it has set last."""

    def __init__(self, cache: KeyedCache[Any, Any]) -> None:
        self.cache = cache
        self._uncached: dict[int, tuple[Key, Any]] = {}  # by thread

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedMapping, (self.cache,)

    def __getitem__(self, key: object) -> Any:
        value = self.cache.get(key, MISSING)
        if value is MISSING:
            last, value = self._uncached.get(threading.get_ident(), (None, None))
            if last != key_of(key):
                raise KeyError(key)
        return value

    def __setitem__(self, key: object, value: object) -> None:
        if self.cache.put(key, value):
            self._uncached.pop(threading.get_ident(), None)
        else:
            self._uncached[threading.get_ident()] = key_of(key), value

    def __delitem__(self, key: object) -> None:
        last, _ = self._uncached.get(threading.get_ident(), (None, None))
        if last == key_of(key):
            del self._uncached[threading.get_ident()]
        elif not self.cache.remove(key):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def clear(self) -> None:
        """Forget all keys; see `KeyedCache.clear`."""
        self._uncached.clear()
        self.cache.clear()

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("the keys of a KeyedCache are not listed. Ask for the keys that you need.")

    def __len__(self) -> int:
        return len(self.cache)
