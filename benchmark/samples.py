"""The cost of one sample from a filled cache: CachedDataset, RaggedCache, and key-value stores with pickles beside them.

    python -m benchmark samples
    python -m benchmark samples narrow      # float images made of bytes, stored as float32 and as bytes: hits and epochs

All stores are in memory (/dev/shm), filled with the same samples, and asked for them in the same random order, by one process.
Contenders take turns, round by round, each with one pass over all samples before the clock starts; figures are medians.
"""

import argparse
import contextlib
import dbm.dumb
import pickle
import random
import shelve
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import diskcache
import lmdb
import torch
from torch.utils.data import Dataset

from benchmark.support.measuring import alternate, settle
from stocache import CachedDataset, DataLoader
from stocache.system.limits import GIB

CLAIM = "A hit takes at most 6 µs for (uint8 3x64x64, int), and at most 8 µs for 20 KB of varying shape."
NEEDS = (("diskcache", '-e ".[bench]"'), ("lmdb", '-e ".[bench]"'), ("lz4", '-e ".[bench]"'), ("zstandard", '-e ".[bench]"'))

COUNT, PASSES = 1000, 5


def fixed(idx: int) -> Any:
    """A sample of one shape."""
    return torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8), idx


def ragged(idx: int) -> Any:
    """A sample of about 20 KB, of varying shape."""
    return torch.randint(0, 256, (3, 70 + idx % 21, 85), dtype=torch.uint8), idx


def arrays(idx: int) -> Any:
    """The same as a numpy array, which pickle is fast at."""
    image, number = ragged(idx)
    return image.numpy(), number


def stores(samples: list[Any], folder: Path, stack: contextlib.ExitStack) -> dict[str, Callable[[int], Any]]:
    """Return a function for each contender that gets a sample by number."""
    gets: dict[str, Callable[[int], Any]] = {}
    for name, options in {
        "CachedDataset": {},
        "CachedDataset, copy=False": {"copy": False},
        "CachedDataset, variable=True": {"variable": True},
        "CachedDataset, codec='lz4'": {"codec": "lz4"},
        "CachedDataset, codec='zstd'": {"codec": "zstd"},
    }.items():
        cached = stack.enter_context(CachedDataset(samples, 1, **options))
        cached.warm(progress=False)
        gets[name] = cached.__getitem__

    pickles = [pickle.dumps(sample, protocol=5) for sample in samples]
    for idx, data in enumerate(pickles):
        (folder / f"{idx}.pickle").write_bytes(data)
    gets["a pickle per file in tmpfs"] = lambda idx: pickle.loads((folder / f"{idx}.pickle").read_bytes())

    environment = stack.enter_context(lmdb.open(str(folder / "lmdb"), map_size=GIB))
    with environment.begin(write=True) as transaction:
        for idx, data in enumerate(pickles):
            transaction.put(b"%d" % idx, data)

    def get_lmdb(idx: int) -> Any:
        with environment.begin(buffers=True) as reading:
            return pickle.loads(reading.get(b"%d" % idx))

    gets["LMDB + pickle"] = get_lmdb

    cache = stack.enter_context(diskcache.Cache(str(folder / "diskcache"), eviction_policy="none", size_limit=GIB))
    for idx, sample in enumerate(samples):
        cache[idx] = sample
    gets["diskcache"] = cache.__getitem__

    shelf = shelve.Shelf(dbm.dumb.open(str(folder / "shelve")), protocol=5)  # noqa: SIM115  closed by the stack
    stack.callback(shelf.close)
    for idx, sample in enumerate(samples):
        shelf[str(idx)] = sample
    gets["shelve (dbm.dumb)"] = lambda idx: shelf[str(idx)]
    return gets


def measure(samples: list[Any], rounds: int) -> dict[str, float]:
    """Return the median seconds per get of each contender; each turn is ``PASSES`` over all samples."""
    order = random.Random(0).sample(range(COUNT), COUNT)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="samples-")))
        gets = stores(samples, folder, stack)
        for name, get in gets.items():
            for idx in order[:50]:
                got = get(idx)
                assert (got[0] == samples[idx][0]).all(), name
                assert got[1] == idx, name
        settle(GIB)

        seconds: dict[str, list[float]] = {name: [] for name in gets}
        for _ in range(rounds):
            for name, get in gets.items():
                for idx in order:  # the contender before has filled the CPU's caches
                    get(idx)
                start = time.perf_counter()
                for _ in range(PASSES):
                    for idx in order:
                        get(idx)
                seconds[name].append((time.perf_counter() - start) / PASSES / COUNT)
        return {name: statistics.median(times) for name, times in seconds.items()}


class FloatImages(Dataset[Any]):
    """Images of float32, made of random bytes / 255, and their index."""

    def __init__(self, shape: tuple[int, ...], length: int, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.image, self.length, self.make = torch.randint(0, 256, shape, dtype=torch.uint8), length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        return self.make(self.image.roll(idx % 7)), idx


_MEAN, _STD = (torch.tensor(numbers).view(-1, 1, 1) for numbers in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
_MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x / 255": lambda image: image.float() / 255,
    "normalised": lambda image: image.float().div(255).sub_(_MEAN).div_(_STD),
    "int64": lambda image: image.long(),
    "16 bits": lambda image: image.float() * 256 - 32768,
}


def narrow(rounds: int) -> None:
    """Print bytes, hits and epochs of float images, wide and narrow."""
    torch.set_num_threads(1)
    print("| shape | made as | stored | bytes | hit | alone | ring | threads |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    loaders: dict[str, dict[str, Any]] = {
        "alone": {},
        "ring": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
        "threads": {"num_workers": 2, "worker_method": "thread"},
    }
    for (shape, length), (made, make) in product((((3, 64, 64), 4000), ((3, 224, 224), 600)), _MADE.items()):
        with contextlib.ExitStack() as stack:
            contenders: dict[str, Callable[[], object]] = {}
            nbytes = {}
            for is_narrow in (False, True):
                dataset = CachedDataset(FloatImages(shape, length, make), 2, narrow=is_narrow, audit=0)
                stack.enter_context(dataset)
                for idx in range(length):
                    _ = dataset[idx]
                nbytes[is_narrow] = dataset.cache.stats().slot_bytes
                contenders[f"{is_narrow} hit"] = lambda it=dataset: [it[idx] for idx in range(len(it))]  # type: ignore[misc]
                for name, options in loaders.items():
                    loader = DataLoader(dataset, 64, shuffle=True, **options)
                    contenders[f"{is_narrow} {name}"] = lambda it=loader: [None for _ in it]  # type: ignore[misc]
            times = alternate(contenders, rounds, length)
            contenders.clear()
        for is_narrow, kind in ((False, "wide"), (True, "narrow")):
            figures = [f"{1e6 * times[f'{is_narrow} {name}']:.1f}" for name in ("hit", *loaders)]
            print(f"| {shape} | {made} | {kind} | {nbytes[is_narrow]} |", " | ".join(figures), "|", flush=True)


def main() -> None:
    """Print a table for each kind of sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="?", choices=["narrow"])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.of == "narrow":
        narrow(rounds)
        return
    torch.manual_seed(0)
    for make, title in {
        fixed: "(uint8 tensor 3x64x64, int)",
        ragged: "(uint8 tensor of about 20 KB, of varying shape, int)",
        arrays: "(uint8 numpy array of about 20 KB, of varying shape, int)",
    }.items():
        seconds = measure([make(idx) for idx in range(COUNT)], rounds)
        print(f"\n### A hit of {title}\n\n| store | µs | of CachedDataset's |\n| --- | ---: | ---: |")
        for name, time_s in seconds.items():
            print(f"| {name} | {time_s * 1e6:.1f} | {time_s / seconds['CachedDataset']:.1f} |")


if __name__ == "__main__":
    main()
