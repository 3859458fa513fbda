"""Load what a cache misses, and publish it: of all processes that want an item, one loads it, and the others wait. One module,
because an item is claimed, loaded and published by one protocol.

An *item* is what a cache finds: the index of a sample in a `SampleCache`, a key in a `KeyedCache`. A `SampleStore` has the
bytes: `SlotArrays` in a `SharedCache`, records in a `RaggedCache` or a `KeyedCache`.

NOTE [ Nested loads ]
    Loading a sample may need other samples: A needs B, and in another process B needs A. Each process has claimed its own one
    and would wait for the other's. So a thread that loads a sample under a claim does not wait for claims of samples: it loads
    them at once, though another process may be loading them too. The same holds for a sample that its own load asks for. Within
    the load of a sample a thread waits for claims of blocks only, and within the load of a block it does not wait. A cache on a
    disk, which a cache in memory asks for its misses, may be waited for: a thread that has claimed a sample there waits for no
    other.

NOTE [ Publishing a slot ]
    Writers of one slot exclude each other by claims (NOTE [ Claims ]). A writer claims all samples of a batch at once, reads
    their state bytes again, copies the samples in, releases a lock and takes it again, and only then sets the bytes to
    SET. Releasing a lock and then taking one keeps the two stores in order on every CPU, also on ARM. A writer that is
    killed before it sets the bytes leaves empty slots, and its claims end with it; the next process to miss the samples fills
    the slots. A set slot never changes again. So a reader needs no lock: it reads the byte, then the row, in this order
    (NOTE [ Reading in order ]). Keys are published by their table: NOTE [ The table of keys ].

NOTE [ Races and errors ]
    A process that missed a sample will set it, and may find that another process was faster. That is not an error: the samples
    are equal. But setting a set slot *without* having missed it is an error: two samples then have one index. So each process
    remembers the samples that it has missed and not yet set, and how often (threads may miss one sample together).
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn

from typing_extensions import TypeVar

from stocache.cache.allocate import CacheLayout, Proof, open_memory
from stocache.cache.options import CacheOptions
from stocache.cache.stats import FILLS, HITS, LOAD_NS, MISSES, MISSING, RACES, REFUSED, REJECTED, CacheStats
from stocache.errors import BusyError, ClosedError, SampleError
from stocache.observe.recording.record import note_loads
from stocache.samples.record_encoder import EncodedRecord
from stocache.shm.claims import Claims
from stocache.shm.extents import REJECTED_WARNING
from stocache.shm.job import Job
from stocache.shm.segment import Segment
from stocache.shm.siblings import count_ranks
from stocache.system.spans import LOAD, in_spans, span
from stocache.system.waiting import LOCK_TIMEOUT_S, describe_process, wait_until

logger = logging.getLogger("stocache")

_PART_S = 0.02  # items that were loaded in this time are published together

_T = TypeVar("_T", default=Any)  # the samples, or values
_I = TypeVar("_I")  # the items
_Self = TypeVar("_Self", bound="LoadingCache[Any]")


class Nesting(threading.local):
    """Whether this thread is loading samples, or a block, under its own claims; see NOTE [ Nested loads ]."""

    samples = block = False


nesting = Nesting()


@contextlib.contextmanager
def nested(samples: bool) -> Iterator[None]:
    """Run a block as one that loads ``samples`` under a claim, or as one that may wait for samples."""
    outer, nesting.samples = nesting.samples, samples
    try:
        yield
    finally:
        nesting.samples = outer


def load_in_parts(
    items: list[_I], load: Callable[[list[_I]], Iterable[object]]
) -> Iterator[tuple[list[_I], list[Any], list[float]]]:
    """Load items, in parts that take `_PART_S` each. Yield the items of a part, their values and their costs.

    The cost of an item is its share of the call, and the seconds that the result of the call takes to yield it.

    Raises:
        ValueError: there are fewer or more results than items.
    """
    if not items:
        return
    started = began = time.perf_counter()
    with span(LOAD):
        values = load(items)
    share_s, began = (time.perf_counter() - began) / len(items), time.perf_counter()
    part: list[_I] = []
    loaded: list[Any] = []
    costs_s: list[float] = []
    try:
        for item, value in zip(items, in_spans(LOAD, values), strict=True):
            now = time.perf_counter()
            part.append(item)
            loaded.append(value)
            costs_s.append(share_s + now - began)
            began = now
            if now - started > _PART_S and type(values) is not list:  # a list was made at once
                yield part, loaded, costs_s
                part, loaded, costs_s = [], [], []
                started = began = time.perf_counter()
    except Exception:
        if part:
            yield part, loaded, costs_s
        raise
    if part:
        yield part, loaded, costs_s


class LoadingCache(Generic[_T]):
    """The base of all caches: load, publish and count items, whatever an item is."""

    thread_safe = True  # worker threads share it

    may_admit_later: bool = False
    """Whether an item that was not kept when it was set may be kept when it is set again."""

    _records_loads: ClassVar[bool] = True  # False for a cache behind another one, which does

    _warned_of_unreadable: bool = False

    _segment: Segment

    def _open_memory(
        self,
        layout: CacheLayout,
        options: CacheOptions,
        parts: tuple[object, ...],
        proof: Proof | None = None,
        job: Job | None = None,
    ) -> None:
        """Make this the cache of other processes, or a new one. ``parts``: what it is made of and pickled with."""
        self.__setstate__((parts, *open_memory(layout, options, proof, job)))
        logger.info("%r", self)

    @classmethod
    def from_options(cls: type[_Self], options: CacheOptions, *args: Any, **given: Any) -> _Self:
        """Return a cache with these options; the options that its class does not have are without effect.

        Further arguments are the arguments of the class after its size; ``proof``, a description of the samples, or ``job``, to
        share the cache with other ranks; and for samples of any size, ``expected_bytes`` of all of them.
        """
        cache = cls.__new__(cls)
        cache._open(options, *args, **given)
        return cache

    def _open(self, options: CacheOptions, *args: Any, **given: Any) -> None:
        """Call `_open_memory` for the arguments of the class."""
        raise NotImplementedError

    def __getstate__(self) -> tuple[Any, ...]:
        return self._parts, self._segment, self._capacity

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._parts, _, self._capacity = state
        self._assemble(*state)

    def _assemble(self, parts: tuple[Any, ...], segment: Segment, capacity: int) -> None:
        """Set all attributes that follow from the arguments: each process computes them again."""
        raise NotImplementedError

    def _attach(self, segment: Segment, store: Any, words: int) -> None:
        """Set the attributes of all caches. ``words``: how many words of claims there are."""
        self._segment, self._store, self._load, self._claims = segment, store, store.load, Claims(segment, words)
        self._missed: dict[Any, tuple[int, float]] = {}  # how often, and since when; see NOTE [ Races and errors ]

    def hit(self, item: Any, copy: bool) -> Any:
        """Return an item that is in memory, else MISSING. Other methods try this first. A miss is not counted."""
        raise NotImplementedError

    def find(self, item: Any, copy: bool = True) -> Any:
        """Return an item that is in memory, or on a disk that belongs to this cache; else MISSING. A miss is not counted."""
        return self.hit(item, copy)

    def peek(self, item: Any) -> Any:
        """Return a copy of an item that is in memory, else MISSING. Do not count it."""
        raise NotImplementedError

    def holds(self, item: Any) -> bool:
        """Return whether an item is cached."""
        raise NotImplementedError

    def fillable(self, item: Any) -> bool:
        """Return whether an item is not cached, and can be. A process without its own counter row caches nothing."""
        raise NotImplementedError

    def _words(self, items: list[Any]) -> list[int]:
        """Return the words of the claims to load items."""
        return items

    def _empty(self, items: list[Any]) -> list[Any]:
        """Return the items that may be published: items that are neither there nor outside the cache."""
        raise NotImplementedError

    def _claim_to_write(self, items: list[Any], taken: set[int], overwrite: bool) -> list[Any]:
        """Claim items to write them, and add the words to ``taken``. Return the part of the items that can be written now."""
        raise NotImplementedError

    def _set(self, items: list[Any]) -> None:
        """Have readers find items that were written. With the guard held."""

    def _shown(self, item: Any) -> str:
        """Return an item as messages show it."""
        return "value"

    def _count(self) -> tuple[int, int]:
        """Return how many items are cached, and ``dataset_len`` of `CacheStats`."""
        raise NotImplementedError

    def _describe(self, stats: CacheStats) -> str:
        """Return the content of the cache in words."""
        raise NotImplementedError

    def _load_one(self, item: Any, load: Callable[[], _T], copy: bool, strict: bool, timeout_s: float) -> _T:
        """Return an item that was not a hit; see `SampleCache.get_or_load`."""
        outer, taken = nesting.samples, set[int]()
        try:
            if self.fillable(item):
                patience_s = 0.0 if outer or nesting.block else timeout_s  # see NOTE [ Nested loads ]
                self._claims.wait_to_load(self._words([item])[0], taken, patience_s, lambda: self.holds(item))
            nesting.samples = outer or bool(taken)
            value: _T = self.find(item, copy)
            if value is MISSING:
                began = time.perf_counter()
                self._segment.count(MISSES)
                with span(LOAD):
                    value = load()
                cost_s = time.perf_counter() - began
                self._note_loads([cost_s])
                self._keep([item], [value], [cost_s], strict)
            return value
        finally:
            nesting.samples = outer
            self.end_loading(taken)

    def _load_many(
        self,
        items: Sequence[Any],
        values: list[Any],
        load: Callable[[list[Any]], Iterable[Any]],
        *,
        copy: bool = True,
        strict: bool = False,
        timeout_s: float = 10.0,
        claimed: Collection[Any] = (),
        ahead: Container[Any] = (),
        encode_rows: Callable[[list[int], list[Any]], list[Any] | None] | None = None,
    ) -> None:
        """Load and cache the items that are MISSING in ``values``, and put them there; see `SampleCache.get_or_load_many`.

        ``encode_rows`` is called with rows and their values, in place of `SampleStore.encode_many`.
        """
        rows: dict[Any, int] = {}  # by missing item: its first row
        for row, item in enumerate(items):
            if values[row] is MISSING:
                rows.setdefault(item, row)
        outer, taken = nesting.samples, set[int]()
        try:
            missing = self._claim_missing(list(rows), taken, claimed)
            nesting.samples = outer or bool(taken)
            self._segment.count(MISSES, len(missing))
            for part, loaded, costs_s in load_in_parts(missing, load):
                self._note_loads([cost_s for item, cost_s in zip(part, costs_s, strict=True) if item not in ahead])
                places = [rows[item] for item in part]
                for row, value in zip(places, loaded, strict=True):
                    values[row] = value
                self._keep(part, loaded, costs_s, strict, encode_rows and partial(encode_rows, places))
        finally:
            nesting.samples = outer
            self.end_loading(taken)
        for row, item in enumerate(items):
            if values[row] is MISSING:  # claimed by another process, or repeated
                value = self.hit(item, copy)
                if value is MISSING:
                    value = self._load_one(item, partial(only, load, item), copy, strict, timeout_s)
                values[row] = value

    def _claim_missing(self, items: list[Any], taken: set[int], claimed: Collection[Any]) -> list[Any]:
        """Claim items to load them. Return the items that this thread loads: not the items that others are loading."""
        empty = self._empty([item for item in items if item not in claimed])
        words = dict(zip(empty, self._words(empty), strict=True))
        if words:
            self._claims.to_load(list(dict.fromkeys(words.values())), taken)
        others = set[Any]()
        if len(taken) < len(words):
            others = {item for item, word in words.items() if word not in taken and self.fillable(item)}
        return [item for item in items if item not in others and not self.holds(item)]

    def end_loading(self, taken: set[int]) -> None:
        """Release claims to load, and empty ``taken``."""
        if taken:
            self._claims.end_loading(taken)
            taken.clear()

    def _note_loads(self, costs_s: Sequence[float]) -> None:
        """Count the seconds that items took to load."""
        if costs_s:
            self._segment.count(LOAD_NS, int(1e9 * sum(costs_s)))
            if self._records_loads:
                note_loads(costs_s)

    def _note_miss(self, item: Any, since: float) -> None:
        """Remember that this process has missed an item, and may set it although another process was faster."""
        with self._segment.guard:
            self._missed[item] = self._missed.get(item, (0, since))[0] + 1, since

    def _take_miss(self, item: Any) -> tuple[int, float]:
        """Return how often this process has missed an item, and since when. Forget one miss."""
        with self._segment.guard:
            missed, since = self._missed.pop(item, (0, 0.0))
            if missed > 1:
                self._missed[item] = missed - 1, since
        return missed, since

    def _keep(
        self,
        items: list[Any],
        values: list[Any],
        costs_s: list[float],
        strict: bool,
        encode: Callable[[list[Any]], list[Any] | None] | None = None,
    ) -> None:
        """Cache loaded values. One that does not fit raises SampleError; if not ``strict``, it stays outside the cache."""
        if self._store.unreadable:
            self._warn_of_unreadable(items)  # loading a sample has not imported its class
        empty = self._empty(items)
        if encode is None and not empty:
            return  # all are outside the cache
        encoded = (encode or self._store.encode_many)(values) if encode or len(values) > 1 else None
        among = set(empty)
        if encoded is None:
            pairs = zip(items, values, strict=True)
            encoded = [self._encode(item, value, strict) if item in among else None for item, value in pairs]
        encoded = self._with_costs(encoded, costs_s)
        if len(empty) < len(items) or None in encoded:
            pairs = zip(items, encoded, strict=True)
            kept = {item: record for item, record in pairs if record is not None and item in among}
            items, encoded = list(kept), list(kept.values())
        if items:
            self._publish(items, encoded)

    def _encode(self, item: Any, value: Any, strict: bool) -> Any:
        """Return an encoded value. If it does not fit, raise SampleError, or reject it and return None."""
        try:
            return self._store.encode(value, self._shown(item))
        except SampleError as error:
            if strict:
                raise
            self._reject(item, str(error))
            return None

    def _reject(self, item: Any, problem: str) -> None:
        """Count a value that does not fit, and warn of the first one, in any process."""
        with self._segment.guard:
            self._segment.counters[REJECTED] += 1
            first = self._segment.extents.first_to_warn(REJECTED_WARNING)
        if first:
            logger.warning(
                "%s does not fit and stays uncached. So will others like it, without a warning: %s", self._shown(item), problem
            )

    def _with_costs(self, encoded: list[Any], costs_s: Sequence[float | None]) -> list[Any]:
        """Return encoded samples; with the seconds that each took to load, if they are records that are admitted by cost."""
        if not self.may_admit_later:
            return encoded
        # At half the cost of _replace
        return [each and EncodedRecord._make((*each[:-1], cost_s)) for each, cost_s in zip(encoded, costs_s, strict=True)]

    def _publish(self, items: list[Any], encoded: Sequence[object], overwrite: bool = False, count_races: bool = True) -> None:
        """Store values, each once in ``items``, and count the outcomes. See NOTE [ Publishing a slot ]."""
        segment, taken, count = self._segment, set[int](), len(items)
        try:
            free = self._claim_to_write(items, taken, overwrite)
            if len(free) < count:
                left = set(free)
                encoded = [each for item, each in zip(items, encoded, strict=True) if item in left]
                items = free
            counters = self._write(items, encoded)
            filled = items
            if counters.count(FILLS) < len(items):
                filled = [item for item, counter in zip(items, counters, strict=True) if counter == FILLS]
            with segment.guard:
                self._set(filled)
                segment.counters[FILLS] += len(filled)
                if len(filled) < count:
                    segment.counters[REFUSED] += counters.count(REFUSED)
                    segment.counters[RACES] += counters.count(RACES) + (count - len(free)) * count_races
        finally:
            self._claims.end_writing(taken)

    def _write(self, items: list[Any], encoded: Sequence[object]) -> list[int | None]:
        """Write values as `SampleStore.write_many` does. Reserved memory does not run out; if it does, the job goes on."""
        try:
            return self._store.write_many(items, encoded) if items else []
        except OSError as error:
            logger.warning("%s stays uncached: %s", self._shown(items[0]), str(error))
            return [REFUSED] * len(items)

    def _warn_of_unreadable(self, items: list[Any]) -> None:
        """Warn once if items are missed here although they are cached: their class is not imported."""
        problem = "" if self._warned_of_unreadable else self._store.unreadable
        if problem and any(self.holds(item) and self.peek(item) is MISSING for item in items):
            self._warned_of_unreadable = True
            logger.warning("%s Until then such samples are loaded again, and count as misses.", problem)

    def clear(self) -> None:
        """Empty the cache; its memory stays reserved. Wait for writers. No process may read samples meanwhile.

        Raises:
            BusyError: another process, which may be stopped, is writing a sample; or other ranks use the cache. Nothing is
                cleared.
        """
        if self._segment.backing == "none":
            return
        if self.ranks > 1:
            raise BusyError("clear: other ranks of this job use the cache. Make a new one, or one with share_ranks=False.")
        if not wait_until(lambda: self._claims.run_unwritten(self._store.clear), LOCK_TIMEOUT_S):
            raise BusyError(
                f"clear: {describe_process(self._segment.pid_of(self._claims.writer()))} holds the lock of a slot. Resume or "
                f"end it."
            )

    @property
    def serves_ranks(self) -> bool:
        """Whether other ranks of this job may use the cache, now or later."""
        return self._segment.ranks > 0

    @property
    def ranks(self) -> int:
        """How many ranks of this job use the cache: 1 if it is not shared."""
        return max(1, count_ranks(self._segment.key)) if self._segment.ranks else 1

    def stats(self) -> CacheStats:
        """Return the current counts and sizes, summed over all processes. Reads one byte per sample, or eight per key.

        In a cache of keys ``dataset_len`` and ``slots`` are the cached keys.
        """
        filled, dataset_len = self._count()
        sizes = {"dataset_len": dataset_len, "filled": filled, "reserved_bytes": self._segment.extents.reserved_bytes}
        return CacheStats.of(self._segment.totals(), **(sizes | self._store.amounts(filled)))

    def counts(self) -> tuple[int, int, int]:
        """Return the hits, misses and fills of all processes so far. Cheaper than `stats`."""
        totals = self._segment.totals()
        return totals[HITS], totals[MISSES], totals[FILLS]

    @property
    def shared_name(self) -> str | None:
        """The name under which other processes find the cache; None for a cache without a name."""
        return None if self._segment.path is None else os.path.basename(self._segment.path)

    def close(self) -> None:
        """Release the memory in this process. The machine has it back when all processes have done so. Twice is fine.

        Views of the memory (``copy=False``) stay valid, and keep it.
        """
        for name in [name for name in vars(self) if name.startswith("_")]:
            vars(self).pop(name, None)

    @property
    def closed(self) -> bool:
        """Whether `close` was called in this process."""
        return "_segment" not in self.__dict__

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.closed:
            return f"<{name}, closed>"
        stats, ranks = self.stats(), self.ranks
        shared = f", shared by {ranks} ranks of this job" if ranks > 1 else ""
        place = self._segment.path or self._segment.backing
        return f"<{name} of {self._describe(stats)} in {place}{shared}, hit rate {stats.hit_rate:.0%}>"

    if not TYPE_CHECKING:  # else every misspelt attribute would pass

        def __getattr__(self, name: str) -> NoReturn:
            # Called only for missing attributes; a check in each method would cost time
            if self.closed and name.startswith("_") and not name.startswith("__"):
                raise ClosedError("the cache is closed. Make a new one, or close it later.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def only(load: Callable[[list[_I]], Iterable[Any]], item: _I) -> Any:
    """Load one item."""
    (value,) = load([item])
    return value
