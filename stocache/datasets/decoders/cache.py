"""Serve what decoders return from a cache: `DecoderCache`, and `cached_decoders` for programs without a dataset.

NOTE [ Serving decoders ]
    A process looks a decoded result up by its content, in all caches of decoders that are open. If no cache has it, the decoder
    runs. Its result is cached if decoding takes `_WORTH` times as long as a hit, and if half of the memory is free or the same
    content has been asked for before: random frames of long videos must not take the memory of what is asked for again. A table
    of bytes in the cache itself, one byte for many hashes, says what has been asked for.

    The first result of each decoder that a process would serve, and more within a share of the time, are decoded again and
    compared. If one differs, or if a decoder draws random numbers, no process serves results of that decoder any more.

    Decoders that a decoder calls are not looked at: its result is cached as a whole. Nor are the functions that a signal
    handler calls meanwhile, so no lock is taken twice.
"""

import contextlib
import itertools
import logging
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from stocache.cache.keyed.cache import KeyedCache
from stocache.cache.options import CacheOptions
from stocache.cache.stats import MISSING
from stocache.datasets.decoders import patches
from stocache.datasets.decoders.table import DECODERS
from stocache.errors import ClosedError, LimitError, MismatchError, SampleError, SlotError
from stocache.shm.job import ANYWHERE, Job, job_here
from stocache.system.describe import describe, difference
from stocache.system.generators import Kept, in_worker_thread

logger = logging.getLogger("stocache")

_WORTH = 5  # times as long as a hit, for a result to be cached
_HIT_S, _BYTE_S = 3e-5, 1.5e-10  # what a hit takes, besides the digest
_PATIENCE = 16  # results in a row that are not worth it; then only each `_RARELY`-th call is looked at
_RARELY = 32
_LOOKS = 3  # calls of each decoder that are watched for random numbers
_REQUESTS, _HITS, _OFF = range(3)  # words of each decoder in the cache
_CONTROL = np.dtype([("seed", "u8"), ("counts", "u8", (len(DECODERS), 3)), ("seen", "u1", 1 << 20)])
"""What is shared besides the results: the seed of the digests, these words, and a byte for many hashes: asked for before."""
_MARGIN = 1 << 10  # bytes of a record, besides the result

_open: "list[weakref.ref[DecoderCache]]" = []  # in this process
_local = threading.local()
_in_vain = [0] * len(DECODERS)  # results of each decoder in a row that were not worth it, and calls since then
_looks = [_LOOKS] * len(DECODERS)


class DecoderCache:
    """A cache for what decoders return, shared by the processes of a job.

    Args:
        cache: holds the results.
        audit: the share of the time for decoding cached results again.

    It pickles as a handle, and serves in each process that gets one. It has slots to hide its attributes from libraries that
    walk through the attributes of a dataset.
    """

    __slots__ = ("__weakref__", "_audit", "_cache", "_counts", "_next_s", "_seed", "_seen")
    thread_safe = True

    def __init__(self, cache: KeyedCache[Any, Any], audit: float) -> None:
        self._cache, self._audit = cache, audit
        self._next_s = [0.0 if audit else math.inf] * len(DECODERS)  # when to compare the next result
        if "control" not in cache:
            cache.put("control", _new_control())  # of several processes, the first wins
        control = cache.get("control", copy=False)
        control = (_new_control() if control is None else control).view(_CONTROL)[0]  # None: the machine has no memory
        self._seed, self._counts, self._seen = int(control["seed"]), control["counts"], control["seen"]
        _caches()  # takes the patches back that caches have left which nobody has closed
        _open.append(weakref.ref(self))
        _in_vain[:] = [0] * len(DECODERS)  # files of this dataset may be larger than all before
        patches.install(_serve)

    def __reduce__(self) -> Any:
        return DecoderCache, (self._cache, self._audit)

    @property
    def closed(self) -> bool:
        """Whether it serves nothing."""
        return bool(self._cache.closed)

    def close(self) -> None:
        """Release the memory. The last one that is closed takes the patches of this process back. Twice is fine."""
        self._counts, self._seen = self._counts.copy(), np.zeros(0, np.uint8)
        self._cache.close()
        _caches()

    def stats(self) -> dict[str, tuple[int, int]]:
        """Return for each library how many results were asked for, and how many came from memory; of all processes."""
        counts: dict[str, tuple[int, int]] = {}
        for row, found in zip(DECODERS, self._counts.tolist(), strict=True):
            requests, hits = counts.get(row.shown, (0, 0))
            counts[row.shown] = requests + found[_REQUESTS], hits + found[_HITS]
        return {shown: pair for shown, pair in counts.items() if pair[0]}

    def __str__(self) -> str:
        each = (f"{name} {hits / requests:.0%} of {requests:,}" for name, (requests, hits) in self.stats().items())
        return f"decoders: {text} from memory" if (text := ", ".join(each)) else ""

    def key(self, number: int, call: Any) -> bytes:
        """Return the key of a call."""
        row = DECODERS[number]
        return f"{row.module}.{row.name} {row.version} {call.text} ".encode() + self.digest(call.content.data)

    def digest(self, data: Any) -> bytes:
        """Return the digest of a content."""
        return xxhash.xxh3_128_digest(data, self._seed)

    def is_off(self, number: int) -> bool:
        """Whether results of a decoder are not served any more, in any process."""
        return bool(self._counts[number, _OFF])

    def find(self, number: int, key: bytes, call: Any, decode: Callable[[], Any]) -> Any:
        """Return a cached result, or when that is due, a new one with which it was compared; MISSING if it is not cached."""
        self._counts[number, _REQUESTS] += 1
        found = MISSING
        with contextlib.suppress(ClosedError):  # by another thread, now
            found = self._cache.get(key, MISSING, copy=call.copies)
        if found is MISSING:
            return found
        self._counts[number, _HITS] += 1
        if time.monotonic() < self._next_s[number]:
            return call.apply(found)
        value, took_s = _timed(decode)
        if self._is_unchanged(call.content, key):
            self._next_s[number] = time.monotonic() + took_s / self._audit
            if (place := difference(describe(found), describe(_result(call, value)))) is not None:
                self.refuse(number, f"it returns another result for the same content now ({place:.300})")
        return value

    def _is_unchanged(self, content: Any, key: bytes) -> bool:
        """Whether the content is what the key stands for, also after it was decoded."""
        data = None if content.again is None else content.again()
        return content.again is None or (data is not None and key.endswith(self.digest(data)))

    def refuse(self, number: int, reason: str) -> None:
        """Serve no results of a decoder from now on, in any process."""
        if not self.is_off(number):
            self._counts[number, _OFF] = 1
            logger.warning("%s.%s is not cached: %s.", DECODERS[number].module, DECODERS[number].name, reason)

    def admits(self, key: bytes, nbytes: int) -> bool:
        """Return whether there is room for a result: half of the memory is free, or it was asked for before."""
        if self.closed or not len(self._seen):
            return False
        place = xxhash.xxh3_64_intdigest(key) % len(self._seen)
        again, self._seen[place] = bool(self._seen[place]), 1
        free, capacity = self._cache.room
        return nbytes + _MARGIN <= free and (again or 2 * free >= capacity)

    def put(self, key: bytes, call: Any, value: Any) -> None:
        """Cache a result, if its content is still there."""
        result = _result(call, value) if self._is_unchanged(call.content, key) else None
        if result is not None:
            with contextlib.suppress(ClosedError, SlotError, SampleError):  # another process has put a different result
                self._cache.put(key, result)


def _new_control() -> Any:
    return np.frombuffer(bytearray(os.urandom(8) + bytes(_CONTROL.itemsize - 8)), np.uint8)


def _caches() -> list[DecoderCache]:
    """Return the caches that are open in this process. If there is none, take the patches back."""
    found = [cache for each in _open if (cache := each()) is not None and not cache.closed]
    if len(found) < len(_open):
        _open[:] = map(weakref.ref, found)
    if not found:
        patches.uninstall()
    return found


def _is_skipped(number: int) -> bool:
    """Whether the next call of a decoder is not looked at, because its results were not worth it."""
    if _in_vain[number] < _PATIENCE:
        return False
    _in_vain[number] += 1
    return _in_vain[number] % _RARELY != 0


def _serve(number: int, true: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a decoder, from a cache or from the decoder ``true``. See NOTE [ Serving decoders ]."""
    if getattr(_local, "busy", False) or _is_skipped(number):
        return true(*args, **kwargs)
    caches = [each for each in _caches() if not each.is_off(number)]
    if not caches:
        return true(*args, **kwargs)
    _local.busy = True
    try:
        began, call = time.perf_counter(), None
        with contextlib.suppress(Exception):  # of arguments that the decoder does not take; it says so
            call = DECODERS[number].call(*args, **dict(kwargs))
        if call is not None:
            return _look_up(number, call, caches, lambda: true(*args, **kwargs), began)
    finally:
        _local.busy = False
    return true(*args, **kwargs)


def _look_up(number: int, call: Any, caches: list[DecoderCache], decode: Callable[[], Any], began: float) -> Any:
    """Return the result of a call that can be cached. ``began``: when its content was first looked at."""
    keys = {cache: cache.key(number, call) for cache in caches}
    call.content = call.content._replace(data=None)  # the decoder may need the buffer
    key_s = time.perf_counter() - began
    for cache, key in keys.items():
        if (found := cache.find(number, key, call, decode)) is not MISSING:
            return found
    monitor = Kept() if _looks[number] > 0 and not in_worker_thread() else None
    value, took_s = _timed(decode)
    _looks[number] -= 1
    if monitor is not None and monitor.drawn():
        for cache in keys:
            cache.refuse(number, "it draws random numbers")
        return value
    nbytes = call.nbytes(value)
    if not nbytes or took_s < _WORTH * (key_s + _HIT_S + _BYTE_S * nbytes):
        _in_vain[number] += _in_vain[number] < _PATIENCE
        return value
    _in_vain[number] = 0
    taking = next((cache for cache, key in keys.items() if cache.admits(key, nbytes)), None)
    if taking is not None:
        taking.put(keys[taking], call, value)
    return value


def _result(call: Any, value: Any) -> Any:
    """Return what is cached of a result; None if nothing is."""
    with contextlib.suppress(Exception):  # of a stream that the decoder has closed
        return call.result(value)
    return None


def _timed(decode: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result, and the seconds that it took."""
    began = time.perf_counter()
    return decode(), time.perf_counter() - began


_numbers = itertools.count(1)  # of the caches of this process, for the ranks of its job to share


def decoders_job() -> tuple[Job, str]:
    """Return the processes that share a cache, opened by the first that needs it: ranks, or this process and its workers."""
    job = job_here()
    shared = job if job.ranks > 1 else Job(uuid.uuid4().hex, True, 1)
    return shared._replace(key=ANYWHERE + shared.key), f"decoders {next(_numbers)}"


def open_decoders(limit: float | str, job: tuple[Job, str], audit: float) -> DecoderCache:
    """Return a cache. If the limit leaves no room, it is an empty one.

    Raises:
        LimitError: the limit is not a size.
    """
    options = CacheOptions(limit, fingerprint=job[1])
    try:
        cache = KeyedCache.from_options(options, job[0])
    except (LimitError, MismatchError) as error:
        logger.info("results of decoders are not cached: %s", str(error))
        cache = KeyedCache.from_options(replace(options, size_limit_gib=0), job[0])
    return DecoderCache(cache, audit)


@contextlib.contextmanager
def cached_decoders(size_limit_gib: float | str = "auto", audit: float = 0.01) -> Iterator[DecoderCache]:
    """Cache what decoders of libraries return for the same bytes, in shared memory, within a ``with`` block.

        with stocache.cached_decoders("8GiB"):
            train()

    Pillow, OpenCV, torchvision, numpy's archives, soundfile, nibabel and more (`DECODERS` lists them) decode each content once
    for this process and all that it forks in the block. Results are equal to the results of the library, and the caller's own.
    A `CachedDataset` does so by itself if its samples cannot be cached.

    Args:
        size_limit_gib: GiB for the results on this machine; "auto" for the memory that the machine can spare.
        audit: the share of the time for decoding cached results again, to compare them; with 0 none is.

    Yields:
        The cache. ``stats()`` returns the requests and hits of each library.

    Raises:
        LimitError: the limit is not a size.

    Examples:
        >>> with cached_decoders("64MB") as decoders:
        ...     for _ in range(2):
        ...         numbers = np.loadtxt([str(number) for number in range(3)])  # a list, so it is not cached
        >>> decoders.stats()
        {}
    """
    decoders = open_decoders(size_limit_gib, decoders_job(), audit)
    try:
        yield decoders
    finally:
        decoders.close()
