"""A long run of the DataLoader with batches and views of them held at random: contents right, memory flat.

    python -m benchmark soak --batches 100000

Every sample is a function of its index, so all that is held can be checked at any time: once when it comes, again at random,
and again when it is released. Loops are left early at random, iterators overlap, and forked children go on reading the batches
they inherited. Each tenth of the run prints this process's own memory, the memory of the rings, and open descriptors.
"""

import argparse
import gc
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from stocache import CachedDataset, DataLoader
from stocache.system.limits import format_size

CLAIM = "Over 100,000 batches no batch changes while it is held, and memory stays flat."

N, DIMS = 8192, (3, 24, 24)
TABLE = torch.randint(0, 256, (N, *DIMS), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SUMS = TABLE.long().flatten(1) @ torch.arange(1, TABLE[0].numel() + 1)  # a swap of two bytes changes the checksum, too


class Source(Dataset[Any]):
    """Rows of a table, with their index."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, idx: int) -> Any:
        return TABLE[idx].clone(), idx


def wrong(images: torch.Tensor, labels: torch.Tensor) -> int:
    """Return how many images are not those of their labels, by checksum."""
    weights = torch.arange(1, TABLE[0].numel() + 1)
    return int((images.long().flatten(1) @ weights != SUMS[labels]).sum())


class Holder:
    """Parts of old batches that the user holds: all of one, some rows, a numpy array of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: list[tuple[Any, torch.Tensor]] = []
        self.checks = self.errors = 0

    def take(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Hold a part of a batch, or nothing; check and release others."""
        self._check(images, labels)
        start, stop = sorted(self.rng.sample(range(len(labels) + 1), 2))
        rows, of_rows = images[start:stop], labels[start:stop]
        for view, of in self.rng.choice([[], [(images, labels)], [(rows, of_rows)], [(rows.numpy(), of_rows)]]):
            self.held.append((view, of.clone() if self.rng.random() < 0.5 else of))
        while len(self.held) > self.most:
            view, of = self.held.pop(self.rng.randrange(len(self.held)))
            self._check(torch.as_tensor(view), of)
        if self.held and self.rng.random() < 0.1:
            view, of = self.rng.choice(self.held)
            self._check(torch.as_tensor(view), of)

    @property
    def most(self) -> int:
        """How many are held now: few, and at times more than the ring has buffers."""
        return 40 if self.checks // 20_000 % 2 else 3

    def _check(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.checks += 1
        self.errors += wrong(images, labels)


def child(holder: Holder) -> int:
    """Fork a child that reads inherited batches for a while; return its pid. It exits with 0 if they stay right."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            for _ in range(5):
                time.sleep(0.05)
                code = sum(wrong(torch.as_tensor(view), of) for view, of in holder.held)
                if code:
                    break
        finally:
            os._exit(min(code, 255))
    return pid


def anonymous() -> int:
    """Return the bytes of memory that this process does not share."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def main() -> None:
    """Run, print a table, and fail if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, torch_seed = random.Random(arguments.seed), torch.manual_seed(arguments.seed)
    cached = CachedDataset(Source(), 1)
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "generator": torch_seed}
    loaders = [
        DataLoader(cached, num_workers=2, **options),
        DataLoader(cached, num_workers=2, persistent_workers=True, **options),
        DataLoader(Source(), num_workers=1, **options),
        DataLoader(cached, prefetch_factor=2, **options),
    ]
    holder, done, left, inherited, children = Holder(rng), 0, 0, 0, []
    print("| batches | own memory | memory of the rings | descriptors |\n| ---: | ---: | ---: | ---: |")
    with tqdm(total=arguments.batches, unit="batch", file=sys.stderr) as bar:
        while done < arguments.batches:
            iterators = [iter(rng.choice(loaders)) for _ in range(rng.choice([1, 1, 1, 2]))]
            stop = rng.choice([rng.randrange(1, 400), 10**9])
            for number, batches in enumerate(zip(*iterators, strict=False)):
                for images, labels in batches:
                    holder.take(images, labels)
                    done += 1
                    if done % (arguments.batches // 10) == 0:
                        gc.collect()
                        rings = format_size(sum(loader.stats().ring_bytes for loader in loaders))
                        descriptors = len(os.listdir("/proc/self/fd"))
                        print(f"| {done:,} | {format_size(anonymous())} | {rings} | {descriptors} |", flush=True)
                bar.update(len(batches))
                if rng.random() < 0.0005 and len(children) < 2:
                    children.append(child(holder))
                for pid in list(children):
                    ended, code = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        children.remove(pid)
                        inherited += 1
                        holder.errors += code != 0
                if number >= stop or done >= arguments.batches:
                    left += 1
                    break
            del iterators, batches, images, labels
    stats = [loader.stats() for loader in loaders]
    outside = sum(sum(each.fallbacks.values()) for each in stats)
    print(f"\n{done:,} batches, {holder.checks:,} checksums, {holder.errors} wrong; {left} loops left early, {inherited} forks")
    print(f"{sum(each.ring for each in stats):,} through the ring, {outside:,} outside of it")
    if holder.errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
