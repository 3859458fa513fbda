"""The cost of one sample from a filled cache: CachedDataset, RaggedCache, and key-value stores with pickles beside them.

All stores are in memory (/dev/shm), filled with the same samples, and asked for them in the same random order, by one process.
"""

import contextlib
import pickle
import random
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import epoch_s, for_each, settle
from stocache import CachedDataset, DataLoader
from stocache.system.limits import GIB

CLAIM = "A hit takes at most 6 µs for (uint8 3x64x64, int), and at most 8 µs for 20 KB of varying shape."

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
    import diskcache
    import lmdb

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
    environment = stack.enter_context(lmdb.open(str(folder / "lmdb"), map_size=GIB))
    cache = stack.enter_context(diskcache.Cache(str(folder / "diskcache"), eviction_policy="none", size_limit=GIB))
    with environment.begin(write=True) as transaction:
        for idx, sample in enumerate(samples):
            transaction.put(b"%d" % idx, pickle.dumps(sample, protocol=5))
            cache[idx] = sample

    def get_lmdb(idx: int) -> Any:
        with environment.begin(buffers=True) as reading:
            return pickle.loads(reading.get(b"%d" % idx))

    return gets | {"LMDB + pickle": get_lmdb, "diskcache": cache.__getitem__}


@experiment(rounds=9, needs="diskcache lmdb lz4 zstandard")
def hits(run: Run) -> None:
    """Microseconds of a hit."""
    torch.manual_seed(0)
    table = run.table("sample", "store", "µs", "of CachedDataset's")
    titles = {
        "uint8 tensor 3x64x64, int": fixed,
        "tensor of 20 KB, varying, int": ragged,
        "numpy array of 20 KB, varying, int": arrays,
    }
    for title, make in titles.items():
        samples, order = [make(idx) for idx in range(COUNT)], random.Random(0).sample(range(COUNT), COUNT)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="samples-")))
            gets = stores(samples, folder, stack)
            settle(GIB)
            for name, get in gets.items():
                got = get(order[0])
                assert (got[0] == samples[order[0]][0]).all(), name
                assert got[1] == order[0], name

            def passes(get: Callable[[int], Any], order: list[int] = order) -> float:
                epoch_s(map(get, order))  # the contender before has filled the CPU's caches
                return sum(epoch_s(map(get, order)) for _ in range(PASSES)) / PASSES / COUNT

            took = run.turns({name: partial(passes, get) for name, get in gets.items()}, warm_up=0)
        for name in took:
            table.row(title, name, 1e6 * took.median(name), took.ratio(name, "CachedDataset"))
    of_fixed, of_ragged, _ = table.column("µs", store="CachedDataset")
    run.claim("a hit of (uint8 3x64x64, int) takes 6 µs", of_fixed, most=6)
    run.claim("a hit of 20 KB of varying shape takes 8 µs", of_ragged, most=8)


MEAN, STD = (torch.tensor(numbers).view(-1, 1, 1) for numbers in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
OF_BYTES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x / 255": lambda image: image.float() / 255,
    "normalised": lambda image: image.float().div(255).sub_(MEAN).div_(STD),
    "int64": lambda image: image.long(),
    "16 bits": lambda image: image.float() * 256 - 32768,
}


@experiment(rounds=9)
def narrow(run: Run) -> None:
    """Microseconds of a sample of images made of bytes, stored unchanged and narrow: hits, and epochs in batches of 64."""
    torch.set_num_threads(1)
    loaders: dict[str, dict[str, Any]] = {
        "alone": {},
        "ring": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
        "threads": {"num_workers": 2, "worker_method": "thread"},
    }
    table, ratios = run.table("shape", "made as", "stored", "bytes", "hit", *loaders), []
    for (shape, length), (made, make) in product((((3, 64, 64), 4000), ((3, 224, 224), 600)), OF_BYTES.items()):
        image, length = torch.randint(0, 256, shape, dtype=torch.uint8), length // run.size(1, 10)
        source = Made(length, lambda idx, image=image, make=make: (make(image.roll(idx % 7)), idx))  # type: ignore[misc]
        contenders: dict[str, Callable[[], object]] = {}
        with contextlib.ExitStack() as stack:
            sizes = []
            for stored, is_narrow in (("wide", False), ("narrow", True)):
                dataset = stack.enter_context(CachedDataset(source, 2, narrow=is_narrow, audit=0))
                dataset.warm(progress=False)
                sizes.append(dataset.cache.stats().slot_bytes)
                contenders[f"{stored} hit"] = partial(for_each, range(length), dataset.__getitem__)
                for name, options in loaders.items():
                    contenders[f"{stored} {name}"] = partial(epoch_s, DataLoader(dataset, 64, shuffle=True, **options))
            took = run.turns(contenders)
            contenders.clear()
        for stored, nbytes in zip(("wide", "narrow"), sizes, strict=True):
            each_us = (1e6 * took.median(f"{stored} {name}") / length for name in ("hit", *loaders))
            table.row(str(shape), made, stored, nbytes, *each_us)
        ratios.append(took.ratio("narrow hit", "wide hit"))
    run.claim("a narrow hit takes 1.2 times a wide one's", max(ratios), most=1.2)
