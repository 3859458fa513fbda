"""Values by key: hits beside other stores, a million keys, jobs that want the same, kills, and windows over frames.

    python -m benchmark keyed hits                   # get of 20 KB: diskcache, LMDB, functools.lru_cache, a Manager's dict
    python -m benchmark keyed keys                   # memory of a key, and a hit, with 1 %, 50 % and 99 % of a million keys
    python -m benchmark keyed jobs                   # 4 programs over the same 100,000 keys: how often each is loaded
    python -m benchmark keyed kills [--count 1000]   # a process that fills is killed at random moments; then all is compared
    python -m benchmark keyed windows                # windows of 5 frames, 4 workers: decodes and memory; mosaics of 4 images

Contenders take turns; figures are medians. The frames and images are made by arithmetic: what is counted is how often.
"""

import argparse
import functools
import itertools
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmark.support.measuring import alternate
from stocache import KeyedCache, cache_method
from tests.support.processes import kill_in

CLAIM = "A value by key is read in 10 µs by every process, each key is loaded once, and windows decode each frame once."
NEEDS = (("diskcache", "diskcache"), ("lmdb", "lmdb"))

VALUE, KEYS = 20_000, 2000
LIMIT = "80MB"  # room for a million small values


def hits() -> None:
    """Print the time of a hit of 20 KB, for each store."""
    import diskcache
    import lmdb

    value = np.arange(VALUE, dtype=np.uint8)
    names = [f"video{number % 20}/{number}" for number in range(KEYS)]
    order = random.Random(0).choices(names, k=KEYS)
    with (
        KeyedCache("200MB") as cache,
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("fork").Manager() as manager,
        diskcache.Cache(f"{folder}/diskcache") as disk,
        lmdb.open(f"{folder}/lmdb", map_size=1 << 30) as database,
    ):
        shared = manager.dict()
        own = functools.lru_cache(maxsize=None)(lambda name: value.copy())
        for name in names:
            cache.put(name, value)
            disk[name] = value
            shared[name] = value
            own(name)
            with database.begin(write=True) as transaction:
                transaction.put(name.encode(), value.tobytes())
        reader = database.begin()

        def each(read: Callable[[str], object]) -> Callable[[], None]:
            def run() -> None:
                for name in order:
                    read(name)

            return run

        def from_lmdb(name: str) -> Any:
            return np.frombuffer(reader.get(name.encode()), np.uint8).copy()

        times = alternate(
            {
                "KeyedCache, a copy": each(cache.get),
                "KeyedCache, a view": each(lambda name: cache.get(name, copy=False)),
                "functools.lru_cache, in one process": each(own),
                "functools.lru_cache, and a copy": each(lambda name: own(name).copy()),
                "LMDB on a disk, raw bytes, and a copy": each(from_lmdb),
                "diskcache": each(lambda name: disk[name]),
                "dict of a Manager": each(lambda name: shared[name]),
            },
            rounds=9,
            calls=KEYS,
        )
        reader.abort()
    print("| 20 KB by a text of 10 characters | µs |\n| --- | ---: |")
    for store, seconds in times.items():
        print(f"| {store} | {1e6 * seconds:.1f} |")


def keys() -> None:
    """Print the memory of each key, and the time of a hit, as the cache fills up."""
    value = np.arange(16, dtype=np.uint8)

    def fill(cache: Any, keys: range) -> None:
        for begin in range(keys.start, keys.stop, 1000):
            part = range(begin, min(begin + 1000, keys.stop))
            cache.get_or_load_many(part, lambda missing: [value] * len(missing))

    with KeyedCache(LIMIT) as cache:
        fill(cache, range(2_000_000))
        most = len(cache)
    print("| full | keys | bytes of a key, 16 of them its value | hit, µs | miss, µs |\n| ---: | ---: | ---: | ---: | ---: |")
    with KeyedCache(LIMIT) as cache:
        at = 0
        for share in (0.01, 0.5, 0.99):
            fill(cache, range(at, int(share * most)))
            at = int(share * most)
            order = random.Random(0).choices(range(at), k=20_000)
            times = alternate(
                {
                    "hit": lambda order=order: [cache.get(key) for key in order],  # type: ignore[misc]
                    "miss": lambda order=order: [-2 - key in cache for key in order],  # type: ignore[misc]
                },
                rounds=5,
                calls=len(order),
            )
            each = cache.stats().slot_bytes
            print(
                f"| {share:.0%} | {len(cache):,} | {each} | {1e6 * times['hit']:.1f} | {1e6 * times['miss']:.1f} |", flush=True
            )


def job(seed: int, count: int, log: str) -> None:
    """Ask for all keys in an order of this job, by a name; note what is loaded."""

    def load(missing: list[int]) -> list[Any]:
        with open(log, "a") as file:
            file.writelines(f"{key}\n" for key in missing)
        return [np.full(64, key % 251, np.uint8) for key in missing]

    with KeyedCache("200MB", name="benchmark-keyed", fingerprint="jobs") as cache:
        order = random.Random(seed).sample(range(count), count) if seed else list(range(count))
        wrong = 0
        for begin in range(0, count, 100):
            part = order[begin : begin + 100]
            for key, value in zip(part, cache.get_or_load_many(part, load, timeout_s=60), strict=True):
                wrong += int(value[0] != key % 251)
        time.sleep(1)  # until the others have come, too
    print(wrong)


def jobs(count: int = 100_000) -> None:
    """Print how often each key was loaded by four programs at once."""
    print("| orders | keys | loaded | loaded more than once | wrong | s |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, seeds in {"the same": (0, 0, 0, 0), "four": (1, 2, 3, 4)}.items():
        with tempfile.TemporaryDirectory() as folder:
            log = f"{folder}/log"
            code = "from benchmark.keyed import job; import sys; job(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
            began = time.perf_counter()
            running = [
                subprocess.Popen([sys.executable, "-c", code, str(seed), str(count), log], stdout=subprocess.PIPE)
                for seed in seeds
            ]
            wrong = sum(int(process.communicate()[0]) for process in running)
            took = time.perf_counter() - began
            loaded = Path(log).read_text().split()
        print(f"| {name} | {count:,} | {len(loaded):,} | {len(loaded) - len(set(loaded))} | {wrong} | {took:.1f} |", flush=True)


def kills(count: int) -> None:
    """Kill a process that fills a cache, at random moments; compare all values each time."""
    rng = random.Random(0)

    def made(key: int) -> Any:
        return np.full(1 + key % 500, key % 251, np.uint8)

    def fill(cache: KeyedCache[Any, Any], trial: int) -> None:
        for key in range(1_000_000):
            if trial % 2:
                cache.get_or_load(key, made)
            else:
                cache.get_or_load_many([2 * key, 2 * key + 1], lambda missing: list(map(made, missing)))

    wrong = missed = kept = 0
    began = time.perf_counter()
    for trial in range(count):
        with KeyedCache("4MB") as cache:
            kill_in(functools.partial(fill, cache, trial), rng.random() * 0.02)
            found = len(cache)
            kept += found
            for key in range(found + 50):
                wrong += not np.array_equal(cache.get_or_load(key, made), made(key))
            missed += cache.get(found + 49) is None
    print(
        f"{count} kills in {time.perf_counter() - began:.0f} s: {kept} values kept, {wrong} wrong, {missed} could not be cached"
    )


class Windows(Dataset[Any]):
    """Overlapping windows of frames that are decoded by arithmetic; each decode is noted."""

    def __init__(self, frames: int, size: int, log: str) -> None:
        self.frames, self.size, self.log = frames, size, log

    def decode(self, number: int) -> torch.Tensor:
        """Return a frame of 96 KB."""
        with open(self.log, "a") as file:
            file.write(f"{number}\n")
        return torch.full((3, 180, 182), number % 251, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.frames - self.size + 1

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.stack([self.decode(number) for number in range(idx, idx + self.size)])


class Mosaics(Windows):
    """Each sample is made of an image and three others that random numbers choose."""

    def __len__(self) -> int:
        return self.frames

    def __getitem__(self, idx: int) -> torch.Tensor:
        others = [random.randrange(self.frames) for _ in range(3)]
        return torch.cat([self.decode(number) for number in (idx, *others)])


def windows() -> None:
    """Print decodes and memory of an epoch, cold and warm, and whether all samples are those without a cache."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs, which is wanted
    titles = "dataset", "audit", "epoch", "decodes without", "with", "memory / frames", "equal"
    print("|", " | ".join(titles), "|\n| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for make, audit in itertools.product((Windows, Mosaics), (0, 0.01)):
        with tempfile.TemporaryDirectory() as folder:
            plain, cached = (make(600, 5, f"{folder}/{name}") for name in ("plain", "cached"))
            with cache_method(cached, "decode", "200MB", audit=audit, key=lambda self, number: number) as method:
                before = [0, 0]
                for epoch in range(2):
                    sums = []
                    for dataset in (plain, cached):
                        torch.manual_seed(epoch)
                        loader = DataLoader(dataset, 8, shuffle=True, num_workers=4, worker_init_fn=_seeded)
                        sums.append([int(batch.long().sum()) for batch in loader])
                    counts = [len(Path(dataset.log).read_text().split()) for dataset in (plain, cached)]
                    decodes = [count - one for count, one in zip(counts, before, strict=True)]
                    before = counts
                    used = method.stats().filled_bytes / (method.stats().filled * 3 * 180 * 182)
                    row = make.__name__, audit, epoch + 1, *decodes, f"{used:.3f}", "yes" if sums[0] == sums[1] else "no"
                    print("|", " | ".join(map(str, row)), "|", flush=True)


def _seeded(number: int) -> None:
    random.seed(number)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmark keyed", description=__doc__)
    parser.add_argument("of", choices=["hits", "keys", "jobs", "kills", "windows"])
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.of == "kills":
        kills(arguments.count)
    else:
        {"hits": hits, "keys": keys, "jobs": jobs, "windows": windows}[arguments.of]()


if __name__ == "__main__":
    main()
