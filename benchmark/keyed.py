"""Values by key: hits beside other stores, a million keys, and kills."""

import contextlib
import functools
import multiprocessing
import random
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmark.support.harness import Run, experiment
from stocache import KeyedCache
from tests.support.processes import kill_in

CLAIM = "A value by key is read in 10 µs, with a million keys too, and kills leave nothing wrong."


@experiment(rounds=9, needs="diskcache lmdb")
def hits(run: Run) -> None:
    """Microseconds of a hit of 20 KB by a text of 10 characters, beside other stores."""
    import diskcache
    import lmdb

    value, count = np.arange(20_000, dtype=np.uint8), run.size(2000, 500)
    names = [f"video{number % 20}/{number}" for number in range(count)]
    order = random.Random(0).choices(names, k=count)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cache = stack.enter_context(KeyedCache("200MB"))
        disk = stack.enter_context(diskcache.Cache(f"{folder}/diskcache"))
        shared = stack.enter_context(multiprocessing.get_context("fork").Manager()).dict()
        database = stack.enter_context(lmdb.open(f"{folder}/lmdb", map_size=1 << 30))
        own = functools.lru_cache(maxsize=None)(lambda name: value.copy())
        with database.begin(write=True) as transaction:
            for name in names:
                cache.put(name, value)
                disk[name] = shared[name] = value
                transaction.put(name.encode(), value.tobytes())
        reader = stack.enter_context(database.begin())

        def each(read: Callable[[str], object]) -> Callable[[], None]:
            def reads() -> None:
                for name in order:
                    read(name)

            return reads

        took = run.turns(
            {
                "KeyedCache, a copy": each(cache.get),
                "KeyedCache, a view": each(lambda name: cache.get(name, copy=False)),
                "functools.lru_cache, in one process": each(own),
                "functools.lru_cache, and a copy": each(lambda name: own(name).copy()),
                "LMDB on a disk, raw bytes, and a copy": each(
                    lambda name: np.frombuffer(reader.get(name.encode()), np.uint8).copy()
                ),
                "diskcache": each(lambda name: disk[name]),
                "dict of a Manager": each(lambda name: shared[name]),
            },
            calls=count,
        )
    table = run.table("store", "µs")
    for name in took:
        table.row(name, 1e6 * took.median(name))
    run.claim("a value is read in 10 µs", 1e6 * took.median("KeyedCache, a copy"), most=10)
    run.claim("its view in 5", 1e6 * took.median("KeyedCache, a view"), most=5)


@experiment(rounds=5)
def keys(run: Run) -> None:
    """The memory of a key, and a hit, with 1 %, 50 % and 99 % of a million keys."""
    limit, value = run.size("80MB", "8MB"), np.arange(16, dtype=np.uint8)

    def fill(cache: Any, keys: range) -> None:
        for begin in range(keys.start, keys.stop, 1000):
            part = range(begin, min(begin + 1000, keys.stop))
            cache.get_or_load_many(part, lambda missing: [value] * len(missing))

    with KeyedCache(limit) as cache:
        fill(cache, range(run.size(2_000_000, 200_000)))
        most = len(cache)
    table, at = run.table("full", "keys", "bytes of a key, 16 of them its value", "hit, µs", "miss, µs"), 0
    with KeyedCache(limit) as cache:
        for share in (0.01, 0.5, 0.99):
            fill(cache, range(at, int(share * most)))
            at = int(share * most)
            order = random.Random(0).choices(range(at), k=20_000)
            contenders: dict[str, Callable[[], object]] = {
                "hit": lambda order=order: [cache.get(key) for key in order],  # type: ignore[misc]
                "miss": lambda order=order: [-2 - key in cache for key in order],  # type: ignore[misc]
            }
            took = run.turns(contenders, calls=len(order))
            hit_us = 1e6 * took.median("hit")
            table.row(f"{share:.0%}", len(cache), cache.stats().slot_bytes, hit_us, 1e6 * took.median("miss"))
    run.claim("a value is read in 10 µs with a million keys", hit_us, most=10)


@experiment(rounds=1000, quick=30)
def kills(run: Run) -> None:
    """A process that fills is killed at random moments; then all values are compared."""
    rng = random.Random(run.seed)

    def made(key: int) -> Any:
        return np.full(1 + key % 500, key % 251, np.uint8)

    def fill(cache: KeyedCache[Any, Any], trial: int) -> None:
        for key in range(1_000_000):
            if trial % 2:
                cache.get_or_load(key, made)
            else:
                cache.get_or_load_many([2 * key, 2 * key + 1], lambda missing: list(map(made, missing)))

    wrong = missed = kept = 0
    for trial in run.seeds():
        with KeyedCache("4MB") as cache:
            kill_in(functools.partial(fill, cache, trial), rng.random() * 0.02)
            found = len(cache)
            kept += found
            for key in range(found + 50):
                wrong += not np.array_equal(cache.get_or_load(key, made), made(key))
            missed += cache.get(found + 49) is None
    run.table("kills", "values kept", "wrong", "could not be cached").row(run.rounds, kept, wrong, missed)
    run.claim("kills leave nothing wrong", not wrong and not missed)
