"""KeyedCache: keep values by key in shared memory: frames, images, tiles, latents, once for all samples that need them. One
module, because reading, claiming and writing a key follow one protocol.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Generic

from typing_extensions import TypeVar

from stocache.cache.allocate import CacheLayout, open_memory
from stocache.cache.arena import MEMORY_REFUSED, NO_ROOM
from stocache.cache.base import load_in_parts, nesting
from stocache.cache.keyed.disk import KeyedDisk
from stocache.cache.keyed.keys import Key, decode, key_of
from stocache.cache.keyed.layout import BY_KEY, CONTROL_BYTES
from stocache.cache.keyed.mapping import KeyedMapping
from stocache.cache.keyed.store import KeyedStore
from stocache.cache.keyed.table import KeyTable
from stocache.cache.options import CacheOptions, shows_options, take_options
from stocache.cache.publishing import count_rejected
from stocache.cache.states import Attached
from stocache.cache.stats import FILLS, HITS, LOAD_NS, MISSES, MISSING, RACES, REFUSED, CacheStats
from stocache.errors import BusyError, SampleError, SlotError
from stocache.samples.record_encoder import EncodedRecord
from stocache.shm.claims import BLOCKS, Claims
from stocache.shm.extents import FULL_WARNING
from stocache.shm.job import Job
from stocache.shm.segment import FREE_THREADED, Segment
from stocache.system.describe import describe
from stocache.system.limits import format_size
from stocache.system.spans import LOAD, span
from stocache.system.waiting import LOCK_TIMEOUT_S, describe_process, wait_until

logger = logging.getLogger("stocache")


_CLAIMS = 1 << 14
"""Words of claims. Keys whose hashes have one word exclude each other: one is loaded after the other."""


_RACED = -4  # in place of an offset, beside NO_ROOM and MEMORY_REFUSED: the key is there by now


_TRIES = 8  # to claim one of the words that say that somebody writes


_MOST_MISSED = 1 << 16  # keys that a process remembers to have missed


_K = TypeVar("_K", default=Any)


_T = TypeVar("_T", default=Any)


KEYED = "name", "persist", "fingerprint", "on_busy", "codec", "allow_pickle", "disk", "disk_limit"
"""The options of a `KeyedCache`."""


class KeyedCache(Attached, Generic[_K, _T]):
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

    thread_safe = True  # worker threads share it

    @shows_options(*KEYED)
    def __init__(self, size_limit_gib: float | str | CacheOptions = "auto", **options: Any) -> None:
        (taken,) = take_options(type(self).__name__, [size_limit_gib], options, {CacheOptions: KEYED})
        self._open(taken, job=None)

    def _open(self, options: CacheOptions, job: Job | None) -> None:
        codec, allow_pickle = options.codec, options.allow_pickle
        layout = CacheLayout(_CLAIMS, CONTROL_BYTES, {"samples": BY_KEY, "codec": codec, "allow_pickle": allow_pickle})
        disk = KeyedDisk.of(options)
        segment, _ = open_memory(layout, options, job=job)
        self.__setstate__((options, segment, disk))
        logger.info("%r", self)

    @classmethod
    def from_options(cls, options: CacheOptions, job: Job | None = None) -> "KeyedCache[Any, Any]":
        """Return a cache with these options. ``job``: the processes that share one with this fingerprint, if not the ranks."""
        cache = cls.__new__(cls)
        cache._open(options, job)
        return cache

    def __getstate__(self) -> tuple[Any, ...]:
        return self._options, self._segment, self._disk

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._options, segment, self._disk = state
        self._segment: Segment = segment
        self._store = KeyedStore(segment, self._options)
        self._arena, self._load = self._store.arena, self._store.load
        self._table = KeyTable(segment, self._arena)
        self._claims = Claims(segment, _CLAIMS)
        self._missed: dict[bytes, int] = {}  # by prefix: how often this process has missed a key, and not yet put it
        self._full_in = -1  # the generation of the table in which this process has found the cache full
        if segment.data_bytes == 0:
            segment.control[:CONTROL_BYTES] = bytes(CONTROL_BYTES)
        self._warned_of_unreadable = False

    @property
    def stopped(self) -> bool:
        """Whether a cached function has found in a process that its values are wrong by now. They are still served."""
        return self._table.stopped

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._table.stopped = stopped

    def get(self, key: _K, default: Any = None, *, copy: bool = True) -> Any:
        """Return the value of a key, or ``default`` where it is not cached.

        Args:
            key: see the class.
            copy: False returns a view of the shared memory itself: writing to it changes what others read.

        Raises:
            CacheKeyError: the key is of another type, or NaN.

        Safe from any process and thread; a hit takes no lock. Copies the bytes of the value.
        """
        found = key_of(key)
        value = self.find(found, copy)
        if value is not MISSING:
            return value
        self._segment.count(MISSES)
        self._note_miss(found)
        return default

    def _note_miss(self, key: Key) -> None:
        """Remember that this process has missed a key, so that it may put the key although another one was faster."""
        if self._fillable():
            if len(self._missed) >= _MOST_MISSED:
                self._missed.clear()
            self._missed[key[0]] = self._missed.get(key[0], 0) + 1

    def find(self, key: Key, copy: bool = True) -> Any:
        """Return the value of a stored key from memory or the disk, else MISSING. A miss is not counted."""
        value = self.hit(key, copy)
        return self._from_disk(key) if value is MISSING else value

    def __contains__(self, key: _K) -> bool:
        found = key_of(key)
        if self._holds(found):
            return True
        self._note_miss(found)
        return False

    def _holds(self, key: Key) -> bool:
        return self._table.find(key) >= 0 or (self._disk is not None and self._disk.has(key))

    @property
    def room(self) -> tuple[int, int]:
        """The bytes that are free for values, and those for all values."""
        return self._arena.capacity - self._arena.used, self._arena.capacity

    def __len__(self) -> int:
        """Return how many keys are cached in memory."""
        return len(self._table)

    def keys(self) -> Iterator[_K]:
        """Yield the keys that are cached in memory, in no order. Paths come as ``Path``, and numbers of numpy as Python's.

        Raises:
            CacheKeyError: one is a member of an enum whose module is not imported here.
        """
        return map(decode, self._table.texts())

    def as_mapping(self) -> "KeyedMapping":
        """Return the cache as a mutable mapping, for programs that keep a dict. The value of a key does not change."""
        return KeyedMapping(self)

    def hit(self, key: Key, copy: bool) -> Any:
        """Return the value of a stored key, else MISSING. Other methods try this first. A miss is not counted."""
        slot = self._table.find(key)
        if slot < 0:
            return MISSING
        value = self._load(slot, copy)
        if value is not MISSING:
            if FREE_THREADED:
                self._segment.count(HITS)
            else:
                self._segment.counters[HITS] += 1  # faster, and the GIL keeps other threads from it
        elif not self._warned_of_unreadable:
            self._warned_of_unreadable = True
            logger.warning("%s Until then such values are loaded again, and count as misses.", self._store.unreadable)
        return value

    def _from_disk(self, key: Key) -> Any:
        """Return the value of a stored key from the disk, or MISSING. Keep it in memory, where there is room by now."""
        if self._disk is None or (value := self._disk.find(key)) is MISSING:
            return MISSING
        self._segment.count(HITS)
        self._keep([key], [value], strict=False, on_disk=True)
        if not self._disk.has(key):  # it was removed from the disk meanwhile, and maybe from memory before it was kept there
            self._remove_from_memory(key)
        return value

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
            CacheKeyError: the key is of another type, or NaN.
            SampleError: the value cannot be stored.
        """
        found = key_of(key)
        value: _T = self.hit(found, copy)
        if value is not MISSING:
            return value
        outer, taken, word = nesting.samples, set[int](), found[1] % _CLAIMS
        try:
            if self._fillable():
                if outer or nesting.block:  # see NOTE [ Nested loads ]
                    self._claims.to_load([word], taken)
                else:
                    self._claims.wait_to_load(word, taken, timeout_s, lambda: self._table.find(found) >= 0)
            nesting.samples = outer or bool(taken)
            value = self.find(found, copy)
            if value is MISSING:
                began = time.perf_counter()
                self._segment.count(MISSES)
                with span(LOAD):
                    value = load(key)
                self._segment.count(LOAD_NS, int(1e9 * (time.perf_counter() - began)))
                self._keep([found], [value], strict)
            return value
        finally:
            nesting.samples = outer
            if taken:
                self._claims.end_loading(taken)

    def get_or_load_many(
        self,
        keys: Sequence[_K],
        load_missing: Callable[[list[_K]], Iterable[_T]],
        *,
        copy: bool = True,
        strict: bool = True,
        timeout_s: float = 10.0,
    ) -> list[_T]:
        """Return the values of keys. Load those that are not cached with one call of ``load_missing``, and cache them.

        Args:
            keys: in any order, repeats allowed.
            load_missing: called with the missing keys in their order, each once; returns or yields their values. Keys that
                another process is loading are waited for after that, and loaded with further calls if needed.
            copy, strict, timeout_s: as in `get_or_load`.

        Raises:
            CacheKeyError, SampleError: as `get_or_load`.
            ValueError: ``load_missing`` gives fewer or more values than keys. Those before are cached.
        """
        found = [key_of(key) for key in keys]
        values = [self.hit(each, copy) for each in found]
        missing: dict[Key, Any] = {}
        for each, key, value in zip(found, keys, values, strict=True):
            if value is MISSING:
                missing.setdefault(each, key)
        outer, taken = nesting.samples, set[int]()
        loaded: dict[Key, Any] = {}
        try:
            fillable = bool(missing) and self._fillable()
            if fillable:
                self._claims.to_load(list({each[1] % _CLAIMS for each in missing}), taken)
                nesting.samples = outer or bool(taken)
            wanted = [each for each in missing if not fillable or each[1] % _CLAIMS in taken]
            wanted = [each for each in wanted if self._table.find(each) < 0 or self._store.unreadable]  # put meanwhile
            if self._disk is not None:
                loaded = {each: value for each in wanted if (value := self._from_disk(each)) is not MISSING}
                wanted = [each for each in wanted if each not in loaded]
            for part, costs_s in load_in_parts(
                wanted, lambda part: load_missing([missing[each] for each in part]), self._segment
            ):
                self._segment.count(LOAD_NS, int(1e9 * sum(costs_s)))
                loaded |= part
                self._keep(list(part), list(part.values()), strict)
        finally:
            nesting.samples = outer
            if taken:
                self._claims.end_loading(taken)
        given = set[Key]()
        for row, (each, key) in enumerate(zip(found, keys, strict=True)):
            if values[row] is not MISSING:
                continue
            if each not in loaded:  # another process loads it
                load = partial(_load_one, load_missing)
                values[row] = self.get_or_load(key, load, copy=copy, strict=strict, timeout_s=timeout_s)
            elif each not in given:
                values[row] = loaded[each]
            else:  # each row has a value of its own
                value = self.hit(each, copy)
                values[row] = deepcopy(loaded[each]) if value is MISSING else value
            given.add(each)
        return values

    @property
    def _full(self) -> bool:
        return self._segment.data_bytes == 0 or self._full_in == self._table.generation

    def _fillable(self) -> bool:
        """Return whether another key may be cached. A process without its own counter row caches nothing."""
        has_room = not (self._full or self._arena.refused) or (self._disk is not None and self._disk.takes)
        return has_room and self._segment.holder > 0

    def put(self, key: _K, value: _T) -> bool:
        """Cache the value of a key. Return whether it is cached now: not if the cache is full.

        If several processes put one key, the first wins. A tensor on a GPU is copied to memory once.

        Raises:
            CacheKeyError: the key is of another type, or NaN.
            SampleError: the value would not come back unchanged. Nothing is stored.
            SlotError: the key is cached with another value, and this process has not missed it before.
        """
        found = key_of(key)
        missed = self._missed.pop(found[0], 0)
        if missed > 1:
            self._missed[found[0]] = missed - 1
        if self._holds(found):
            if not missed and describe(self.find(found)) != describe(value):
                raise SlotError(f"put({key!r:.100}): the key is cached with another value, which does not change.")
            return True
        if self._fillable():
            self._keep([found], [_on_cpu(value)], strict=True, where=f"put({key!r:.100})")
        return self._holds(found)

    def remove(self, key: _K) -> bool:
        """Remove a key, also from the disk. Return whether it was cached.

        Other threads and processes that have found the value read it to the end. The room of the value, in memory and on the
        disk, is not used again: in memory until `clear`, on the disk until the folder is emptied. A process that is loading the
        key meanwhile caches it after that.

        Raises:
            CacheKeyError: the key is of another type, or NaN.
            BusyError: another process, which may be stopped, holds the lock of the cache.
            DiskError: the disk does not allow it.
        """
        found = key_of(key)
        on_disk = self._disk is not None and self._disk.remove(found)  # first, or a reader could put it into memory again
        return self._remove_from_memory(found) or on_disk

    def _remove_from_memory(self, key: Key) -> bool:
        with self._segment.guard:
            removed = self._arena.run_locked(lambda: self._table.remove(key), None)
        if removed is None:
            raise BusyError("remove: another process, which may be stopped, holds the lock of the cache.")
        return removed

    def _keep(self, keys: list[Key], values: list[Any], strict: bool, where: str = "value", on_disk: bool = False) -> None:
        """Cache loaded values in memory, and on the disk, unless they came from there.

        One that cannot be stored raises SampleError, if ``strict``, whose message begins with ``where``; else it is counted.
        """
        if not self._fillable() and not strict:
            return
        kept, records = [], []
        for key, value in zip(keys, values, strict=True):
            try:
                records.append(self._store.encode(value, where))
                kept.append(key)
            except SampleError as error:
                if strict:
                    self._publish(kept, records)
                    raise
                self._reject(error)
        self._publish(kept, records)
        if self._disk is not None and not on_disk:
            for key, record in zip(kept, records, strict=True):
                self._disk.keep(key, record)

    def _reject(self, error: SampleError) -> None:
        if count_rejected(self._segment):
            logger.warning(
                "a value cannot be stored and stays uncached. So will others like it, without a warning: %s", str(error)
            )

    def _publish(self, keys: list[Key], records: list[EncodedRecord]) -> None:
        """Store values, and count the outcomes; see NOTE [ The table of keys ]."""
        segment, taken = self._segment, set[int]()
        refused: list[int | None] = [REFUSED] * len(keys)
        if not keys or self._full or self._segment.holder == 0 or self._arena.refused:
            return
        try:
            first = keys[0][1] % BLOCKS
            for word in range(first, first + _TRIES):  # any will do: `clear` waits until none is taken
                self._claims.to_write([_CLAIMS + word % BLOCKS], taken)
                if taken:
                    break
            else:  # a process that is stopped holds the lock of claims
                return
            with segment.guard:
                places = self._arena.run_locked(lambda: list(map(self._place, keys, records)), None)
            places = self._write(keys, records, places or [(MEMORY_REFUSED, 0)] * len(keys))
            with segment.guard:
                outcomes = self._arena.run_locked(lambda: self._add_all(keys, records, places), refused)
                for counter in (FILLS, RACES, REFUSED):
                    segment.counters[counter] += outcomes.count(counter)
            if any(at == NO_ROOM for at, _ in places) or None in outcomes:
                self._note_full()
        finally:
            self._claims.end_writing(taken)

    def _place(self, key: Key, record: EncodedRecord) -> tuple[int, int]:
        return (_RACED, 0) if self._table.find(key) >= 0 else self._store.place(key, record)

    def _write(self, keys: list[Key], records: list[EncodedRecord], places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Write records at their places. Reserved memory does not run out; if it does, the job goes on."""
        for row, (key, record, (at, number)) in enumerate(zip(keys, records, places, strict=True)):
            if at >= 0:
                try:
                    self._store.write(key, record, at, number)
                except OSError as error:
                    logger.warning("a value stays uncached: %s", str(error))
                    places[row] = MEMORY_REFUSED, 0
        return places

    def _add_all(self, keys: list[Key], records: list[EncodedRecord], places: list[tuple[int, int]]) -> list[int | None]:
        """Make written values known. With the arena's lock held. Return for each the counter to raise."""
        outcomes: list[int | None] = []
        for key, record, (at, _) in zip(keys, records, places, strict=True):
            if at < 0:
                outcomes.append({_RACED: RACES, MEMORY_REFUSED: REFUSED}.get(at))
            elif self._table.find(key) >= 0:  # another process was faster
                outcomes.append(RACES)
            else:
                outcomes.append(FILLS if self._table.add(key, at, record.room) else None)
        return outcomes

    def _note_full(self) -> None:
        """Note that the cache is full, and warn once; unless a value like the others would still fit."""
        stats = self.stats()
        if self._arena.capacity - self._arena.used > stats.slot_bytes > 0 or not stats.filled:
            return
        self._full_in = self._table.generation
        with self._segment.guard:
            first = self._segment.extents.first_to_warn(FULL_WARNING)
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

    def clear(self) -> None:
        """Forget all keys in memory, which stays reserved. Wait for writers. No process may read values meanwhile.

        Raises:
            BusyError: another process, which may be stopped, is writing a value. Nothing is cleared.
        """
        if self._segment.backing == "none":
            return

        def drop() -> None:
            self._table.clear()
            self._arena.clear()
            self._segment.extents.clear()

        if not wait_until(lambda: self._claims.run_unwritten(drop), LOCK_TIMEOUT_S):
            raise BusyError(
                f"clear: {describe_process(self._segment.pid_of(self._claims.writer()))} is writing a value. Resume or end it."
            )

    def stats(self) -> CacheStats:
        """Return the current counts and sizes, summed over all processes. ``dataset_len`` and ``slots`` are the cached keys."""
        filled = len(self._table)
        return CacheStats.of(
            self._segment.totals(),
            dataset_len=filled,
            filled=filled,
            slots=filled,
            slot_bytes=self._arena.used // max(1, filled),
            capacity_bytes=self._segment.data_bytes,
            reserved_bytes=self._segment.extents.reserved_bytes,
        )

    def __repr__(self) -> str:
        if self.closed:
            return "<KeyedCache, closed>"
        stats = self.stats()
        return (
            f"<KeyedCache: {stats.filled} keys, {format_size(self._arena.used)} of {format_size(stats.capacity_bytes)} in "
            f"{self._segment.path or self._segment.backing}, hit rate {stats.hit_rate:.0%}>"
        )


def _load_one(load_missing: Callable[[list[_K]], Iterable[_T]], key: _K) -> _T:
    (value,) = load_missing([key])
    return value


def _on_cpu(value: Any) -> Any:
    """Return a tensor that lies on a device as one in memory; anything else as it is."""
    return value.detach().cpu() if hasattr(value, "is_cpu") and not value.is_cpu else value
