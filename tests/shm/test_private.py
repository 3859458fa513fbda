"""Large samples are handed out as views that are copied when they are written to: nothing of that reaches the cache."""

import pickle
import random

import numpy as np
import pytest
import torch

from stocache import CachedDataset, SharedCache
from stocache.cache.columns import LARGE_VALUE
from stocache.shm import private
from tests.support.processes import in_child

N = 24
SHAPE = (3, 100, 229)  # 68,700 bytes: more than LARGE_VALUE, and not a multiple of a page, so that neighbours share one


def sample(idx):
    return {"image": torch.full(SHAPE, idx, dtype=torch.uint8), "map": np.full((120, 151), idx, np.float32), "label": idx}


def warmed():
    cached = CachedDataset([sample(idx) for idx in range(N)], 0.1)
    cached.warm(progress=False)
    return cached


@pytest.fixture(params=[private._PAGEMAP, "no pagemap"])
def cached(request, monkeypatch):
    monkeypatch.setattr(private, "_PAGEMAP", request.param)
    with warmed() as cached:
        yield cached
        assert are_right(map(cached.cache.get_slot, range(N)), range(N))


def is_right(value, idx):
    return bool((value["image"] == idx).all() and (value["map"] == idx).all()) and value["label"] == idx


def are_right(values, indices):
    return all(map(is_right, values, indices))


def test_large_samples_are_views(cached):
    assert np.prod(SHAPE) > LARGE_VALUE
    batch = cached.__getitems__(range(N))
    addresses = [its["image"].data_ptr() for its in batch]
    del batch
    assert [its["image"].data_ptr() for its in cached.__getitems__(range(N))] == addresses  # of slots, not of copies
    assert cached.__getitems__([3])[0]["image"].untyped_storage().nbytes() == np.prod(SHAPE)
    assert len(pickle.dumps(cached.__getitems__([3])[0])) < 2 * np.prod(SHAPE) + 4 * 120 * 151
    first, second = cached.__getitems__([5, 5])
    first["image"].zero_()
    assert are_right([second, *cached.__getitems__([5])], [5, 5])  # while the others are held


def test_what_is_written_is_the_callers_own_and_gone_with_it(cached):
    rng = random.Random(0)
    held = []
    for step in range(60):
        indices = rng.choices(range(N), k=rng.randint(1, 8))
        batch = cached.__getitems__(indices)
        assert are_right(batch, indices)
        for position, its in enumerate(batch):
            if rng.random() < 0.5:
                its["image"].fill_(200 + position)
                its["map"][:] = -step
                its["label"] = step
                held.append((its, 200 + position, -step))
        for its, image, numbers in held:
            assert bool((its["image"] == image).all() and (its["map"] == numbers).all())
        rng.shuffle(held)
        del held[rng.randint(0, 6) :], batch, its


def test_a_slot_that_is_set_beside_one_that_was_written_to_is_right():
    read = lambda indices: [value.unique().tolist() for value in cache.get_or_load_many(indices, None)]
    with SharedCache(1, N, SHAPE) as cache:
        cache.set_slot(4, torch.full(SHAPE, 4, dtype=torch.uint8))
        held = cache.get_or_load_many([4], None)
        held[0].fill_(99)
        for idx in (3, 5):
            cache.set_slot(idx, torch.full(SHAPE, idx, dtype=torch.uint8))
        for _ in range(4):
            assert read([3, 5]) == [[3], [5]]
        assert bool((held[0] == 99).all())
        del held
        assert read([3, 4, 5]) == [[3], [4], [5]]


def test_a_forked_child_has_its_own(cached):
    held = cached.__getitems__([0, 1, 2])
    held[1]["image"].fill_(55)

    def use():
        torch.set_num_threads(1)  # the others are the parent's
        assert are_right(cached.__getitems__(range(N)), range(N))
        held[2]["image"].fill_(77)
        assert held[1]["image"].unique().tolist() == [55]

    assert in_child(use) == 0
    assert is_right(held[2], 2)


def test_without_address_space_samples_are_copied_and_they_outlive_the_cache(monkeypatch):
    for _ in range(2):
        with warmed() as cached:
            batch = cached.__getitems__(range(N))
        del cached
        assert are_right(batch, range(N))
        monkeypatch.setattr(private._libc, "mmap", lambda *arguments: private._FAILED)
