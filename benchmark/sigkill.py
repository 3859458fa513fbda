"""SIGKILLs in the middle of filling a cache.

A trial forks processes that fill one cache, each in an order of its own, kills one of them at a random moment, and lets a
survivor finish the work. Each slot that is set must hold its sample at that moment and at the end. Then each slot must be set,
and each lock free.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmark.support.faults import Step, kill_one, trials
from benchmark.support.harness import Run, experiment
from stocache import CachedDataset, RaggedCache, SharedCache, StorageDataset, prepare
from stocache.cache.stats import FILLS
from stocache.datasets.loaders import BlockLoader

CLAIM = "A SIGKILL while a cache fills leaves each set slot exact and each lock free."


class Filling(NamedTuple):
    """A new cache, and how processes fill it."""

    cache: Any
    fill: Callable[[list[int], Step], object]
    """Called with an order of all indices: caches the samples that are not cached yet, in steps."""
    samples: Sequence[torch.Tensor]
    """What the cache must hold."""
    at_once: int
    """How many samples are published in a step, before they are counted."""


Maker = Callable[[random.Random], Filling]
BATCH = 16


def samples(count: int, dims: tuple[int, ...]) -> torch.Tensor:
    """Return samples whose every byte depends on their index, so that a mixture or a hole shows."""
    row = torch.arange(torch.Size(dims).numel()) % 251
    return torch.stack([(row * (idx + 1) % 256).to(torch.uint8).view(dims) for idx in range(count)])


SAMPLES = samples(96, (64, 1024)), samples(1024, (3, 25, 40))  # slots of whole pages, and slots that share pages
VARYING = [[sample.flatten()[idx % 40 * 7 :] for idx, sample in enumerate(each)] for each in SAMPLES]


def _set_slot(cache: Any, expected: torch.Tensor, order: list[int], step: Step) -> None:
    for idx in order:
        step()
        if cache.get_slot(idx, copy=False) is None:
            cache.set_slot(idx, expected[idx])


def _batches(order: list[int], step: Step) -> Iterator[list[int]]:
    for at in range(0, len(order), BATCH):
        step()
        yield order[at : at + BATCH]


def _set_slots(cache: Any, expected: torch.Tensor, order: list[int], step: Step) -> None:
    for batch in _batches(order, step):
        _, there = cache.get_slots(batch)
        left = torch.tensor(batch)[~there]
        cache.set_slots(left, expected[left])


def _get_or_load_many(cache: Any, expected: torch.Tensor, order: list[int], step: Step) -> None:
    for batch in _batches(order, step):
        cache.get_or_load_many(batch, lambda indices: expected[indices].unbind())


def by_calls(fill: Callable[..., None], at_once: int = BATCH, ragged: bool = False) -> Maker:
    """Return a function that makes a cache, which is filled by calls of one of its methods."""

    def make(rng: random.Random) -> Filling:
        expected = rng.choice(SAMPLES)
        uniform = partial(SharedCache, data_dims=expected[0].shape, placement=rng.choice(["prefix", "scattered"]))
        cache = RaggedCache(1, len(expected)) if ragged else uniform(1, len(expected))
        return Filling(cache, partial(fill, cache, expected), expected, at_once)

    return make


def by_block(folder: Path, samples_of: Sequence[Sequence[torch.Tensor]]) -> Maker:
    """Prepare samples in a folder; return a function that makes a cache, which is filled by admitting blocks."""
    prepared = [
        (prepare(expected, folder / f"{number}", block_size=len(expected) // 12, progress=False), expected)
        for number, expected in enumerate(samples_of)
    ]
    for storage, _ in prepared:
        storage.load_sample(0)  # opens files, which stay open

    def make(rng: random.Random) -> Filling:
        storage, expected = rng.choice(prepared)
        cached = CachedDataset(StorageDataset(storage), 1, example=expected[0], variable=samples_of is VARYING)
        assert isinstance(cached._loader, BlockLoader)
        loader, size = cached._loader, storage.block_size

        def fill(order: list[int], step: Step) -> None:
            for block in dict.fromkeys(idx // size for idx in order):
                step()
                loader.admit(block)

        return Filling(cached.cache, fill, expected, size)

    return make


WAYS = {
    "set_slot": by_calls(_set_slot, at_once=1),
    "set_slots": by_calls(_set_slots),
    "get_or_load_many": by_calls(_get_or_load_many),
    "get_or_load_many, records": by_calls(_get_or_load_many, ragged=True),
}


def trial(make: Maker, seed: int) -> Counter[str]:
    """Kill a process that fills a cache; return what happened. AssertionError: a slot or lock was wrong, or a survivor."""
    rng = random.Random(seed)
    cache, fill, expected, at_once = make(rng)
    count = len(expected)
    check = partial(_check, cache, expected)
    killed, filled = kill_one(rng, count, fill, count // at_once, check)
    assert check() == count, "the survivors left slots empty"
    with cache._segment.guard:
        assert all(cache._segment.try_lock(idx) for idx in range(count)), "a lock outlived its process"
    # fills are counted after they are published, so a kill between the two may lose the counts of one call, never more
    assert count - at_once <= cache._segment.totals()[FILLS] <= count, str(cache.stats())
    cache.close()
    return Counter({"midway": killed, "with a part set": killed and 0 < filled < count, "samples": filled + count})


def _check(cache: Any, expected: Sequence[torch.Tensor]) -> int:
    """Compare every SET slot with its sample; return how many there are."""
    filled = (cache.aux_array == 1).nonzero().flatten().tolist()
    for idx in filled:
        assert torch.equal(cache.get_slot(idx, copy=False), expected[idx]), f"slot {idx} is set and wrong"
    return len(filled)


@experiment(rounds=1000, quick=10)
def kills(run: Run) -> None:
    """Kill processes that fill a cache in six ways."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        blocks = {
            "blocks to slots": by_block(Path(folder, "slots"), SAMPLES),
            "blocks to records": by_block(Path(folder, "records"), VARYING),
        }
        trials(run, {name: partial(trial, make) for name, make in (WAYS | blocks).items()})
