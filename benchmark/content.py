"""The contents of a cache: its memory against the limit, admission by cost, and the gain of codecs.

    python -m benchmark content memory|cost|codecs [--folder PHOTOS]

memory    PSS of a job with 4 workers, over CachedDataset and without it, against the limit
cost      log-normal sizes, equal loading times: requests served by 20 % of the bytes, admission="cost" and "all"
codecs    bytes per sample and time per hit, for real photos and other data, without and with codecs
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmark.support.measuring import alternate, pss
from stocache import CachedDataset, RaggedCache
from stocache.system.limits import MIB
from stocache.tools.bench import photo_like

CLAIM = "A cache stays within its limit; admission by cost serves 55 % of requests from 20 % of the bytes; codecs save memory."
NEEDS = (("PIL", '-e ".[bench]"'), ("zstandard", '-e ".[bench]"', "codecs"), ("lz4", '-e ".[bench]"', "codecs"))


class Ragged(Dataset[Any]):
    """Tensors of log-normal sizes; loading takes the same time for each."""

    def __init__(self, count: int, mean_bytes: int, seconds: float = 0.0) -> None:
        sizes = np.random.default_rng(0).lognormal(0, 1, count)
        self.sizes = (sizes / sizes.mean() * mean_bytes).astype(int)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((int(self.sizes[idx]),), idx % 256, dtype=torch.uint8), idx


def _pss_of(cached: Any) -> int:
    """Return the memory of the cache in this process and its children; shared pages count once."""
    inode, here = os.fstat(cached.cache._segment.fd).st_ino, psutil.Process()
    maps = [entry for process in [here, *here.children(recursive=True)] for entry in process.memory_maps()]
    return sum(entry.pss for entry in maps if entry.path.endswith(f"#{inode}") or "memfd:stocache" in entry.path)


def memory() -> None:
    """Print how much a job grows with a cache."""
    print("| samples | limit MiB | cached MiB | PSS of the cache, MiB | of the limit | PSS of the whole job grows by MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    source = Ragged(20_000, 40_000)
    for title, dataset in {"of varying size": source, "of one shape": _Equal(20_000)}.items():
        for limit in (128, 512, 2048):
            with CachedDataset(dataset, f"{limit}MiB", audit=0) as cached:
                grown = []
                for data in (dataset, cached):
                    loader = DataLoader(data, 64, num_workers=4, persistent_workers=True, collate_fn=len)
                    for _ in range(3):
                        for _ in loader:
                            pass
                    grown.append(pss(os.getpid()))
                    own = _pss_of(cached)
                    del loader
                total = cached.stats().total
                print(
                    f"| {title} | {limit} | {total.filled_bytes / MIB:.1f} | {own / MIB:.1f} | {own / MIB / limit:.4f} "
                    f"| {(grown[1] - grown[0]) / MIB:.1f} |",
                    flush=True,
                )


class _Equal(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 100, 133), idx % 256, dtype=torch.uint8), idx


def cost() -> None:
    """Print the share of requests served by a fifth of the bytes."""
    print("| admission | epoch 2 | epoch 3 | epoch 4 |\n| --- | ---: | ---: | ---: |")
    source = Ragged(4000, 20_000, seconds=0.001)
    for admission in ("all", "cost"):
        with CachedDataset(source, f"{int(source.sizes.sum() * 0.2)}B", variable=True, admission=admission, audit=0) as cached:
            for epoch in range(4):
                for _ in DataLoader(cached, 64, shuffle=True, num_workers=4, collate_fn=len):
                    pass
                cached.set_epoch(epoch)
            shares = [f"{epoch.hit_rate:.1%}" for epoch in cached.stats().epochs[1:4]]
        print(f"| {admission!r} | " + " | ".join(shares) + " |", flush=True)
    sizes = np.sort(source.sizes)
    print(f"\nthe smallest samples that make up 20 % of these bytes: {(np.cumsum(sizes) <= sizes.sum() * 0.2).mean():.1%}")


def mask(image: Any) -> torch.Tensor:
    """Return the brightness of a picture in 4 classes."""
    return torch.from_numpy(np.array(image.convert("L").resize((200, 200)))).long() // 64


def codecs(folder: Path | None) -> None:
    """Print bytes and times for each kind of data and codec."""
    paths = sorted(folder.glob("*.JPEG"))[:40] if folder else []
    images = [Image.open(path).convert("RGB") for path in paths] or [photo_like(number, 400) for number in range(40)]
    generator = torch.Generator().manual_seed(0)
    kinds: dict[str, Callable[[int], Any]] = {
        "photo, uint8, native size": lambda i: torch.from_numpy(np.array(images[i])),
        "photo, uint8 3x64x64": lambda i: torch.from_numpy(np.array(images[i].resize((64, 64)))),
        "photo, float32 3x64x64": lambda i: torch.from_numpy(np.array(images[i].resize((64, 64)))).float() / 255,
        "mask of 4 classes, int64 200x200": lambda i: mask(images[i]),
        "tokens, list of 512 ints": lambda i: torch.randint(0, 30_000, (512,), generator=generator).tolist(),
        "text, 4 KB": lambda i: " ".join(f"word{int(n)}" for n in torch.randint(0, 500, (600,), generator=generator)),
        "embedding, float32 1024": lambda i: torch.randn(1024, generator=generator),
    }  # fmt: skip
    print("| data | codec | bytes per sample | of raw | µs per hit | of raw |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for title, make in kinds.items():
        samples = [make(number) for number in range(40)]
        caches = {codec: RaggedCache("1GiB", 40, codec=codec) for codec in (None, "lz4", "zstd")}
        for cache in caches.values():
            for number, sample in enumerate(samples):
                cache.set_slot(number, sample)
        runs = {str(codec): lambda cache=cache: [cache.get_slot(i) for i in range(40)] for codec, cache in caches.items()}
        seconds = alternate(runs, 15, 40)
        sizes = {str(codec): cache.stats().slot_bytes for codec, cache in caches.items()}
        for codec in runs:
            print(
                f"| {title} | {codec} | {sizes[codec]} | {sizes[codec] / sizes['None']:.2f} "
                f"| {seconds[codec] * 1e6:.1f} | {seconds[codec] / seconds['None']:.1f} |",
                flush=True,
            )
        for cache in caches.values():
            cache.close()


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "cost", "codecs"))
    parser.add_argument("--folder", type=Path, help="JPEGs; by default generated photos")
    arguments = parser.parse_args()
    if arguments.what == "memory":
        memory()
    elif arguments.what == "cost":
        cost()
    else:
        codecs(arguments.folder)


if __name__ == "__main__":
    main()
