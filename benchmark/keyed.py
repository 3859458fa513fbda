"""Values by key: hits beside other stores, a million keys, and kills."""

import contextlib
import functools
import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmark.support.faults import trials
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import for_each
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

        reads: dict[str, Callable[[str], object]] = {
            "KeyedCache, a copy": cache.get,
            "KeyedCache, a view": lambda name: cache.get(name, copy=False),
            "functools.lru_cache, in one process": own,
            "functools.lru_cache, and a copy": lambda name: own(name).copy(),
            "LMDB on a disk, raw bytes, and a copy": lambda name: np.frombuffer(reader.get(name.encode()), np.uint8).copy(),
            "diskcache": lambda name: disk[name],
            "dict of a Manager": lambda name: shared[name],
        }
        took = run.turns({name: partial(for_each, order, read) for name, read in reads.items()}, calls=count)
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


def made(key: int) -> Any:
    """Return the value of a key."""
    return np.full(1 + key % 500, key % 251, np.uint8)


def load_all(cache: KeyedCache[Any, Any], many: bool) -> None:
    """Load values, one by one or two at a time."""
    for key in range(0, 2_000_000, 2):
        if many:
            cache.get_or_load_many([key, key + 1], lambda missing: list(map(made, missing)))
        else:
            cache.get_or_load(key // 2, made)


def kill(many: bool, seed: int) -> Counter[str]:
    """Kill a process that fills a cache at a random moment; compare all values, and load more of them."""
    with KeyedCache("4MB") as cache:
        kill_in(partial(load_all, cache, many), random.Random(seed).random() * 0.02)
        kept = len(cache)
        for key in range(kept + 50):
            assert np.array_equal(cache.get_or_load(key, made), made(key)), f"value {key} is wrong"
        assert cache.get(kept + 49) is not None, "a value could not be cached"
    return Counter({"values kept": kept})


@experiment(rounds=500, quick=15)
def kills(run: Run) -> None:
    """Kill a process that fills a cache."""
    trials(run, {"get_or_load": partial(kill, False), "get_or_load_many": partial(kill, True)})
