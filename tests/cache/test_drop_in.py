"""``import stocache as stocaching``: the same names, results and exceptions as stocaching 0.2.1."""

import inspect
import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stocache as stocaching
from stocache import SharedCache


def test_names_and_positions_of_arguments_are_those_of_stocaching():
    def names(function):
        return [
            (name, p.default) for name, p in inspect.signature(function).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]

    empty = inspect.Parameter.empty
    assert names(SharedCache) == [
        ("size_limit_gib", empty), ("dataset_len", empty), ("data_dims", empty), ("dtype", torch.uint8),
    ]  # fmt: skip
    assert names(SharedCache.get_slot) == [
        ("self", empty), ("idx", empty), ("allow_oob_idx", True), ("allow_empty_slot", True),
    ]  # fmt: skip
    assert names(SharedCache.set_slot) == [
        ("self", empty), ("idx", empty), ("value", empty), ("allow_oob_idx", True), ("allow_overwrite", False),
    ]  # fmt: skip
    assert isinstance(stocaching.get_shm_size(), int)
    assert [(state.name, state.value) for state in stocaching.SlotState] == [("EMPTY", 0), ("SET", 1), ("OOB", 2)]


class MyDataset(Dataset):
    """The use that stocaching's article shows."""

    def __init__(self, n, limit):
        self.n = n
        self.cache = stocaching.SharedCache(size_limit_gib=limit, dataset_len=n, data_dims=(3, 8, 8), dtype=torch.uint8)

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        x = self.cache.get_slot(idx)
        if x is None:
            x = torch.full((3, 8, 8), idx, dtype=torch.uint8)
            self.cache.set_slot(idx, x)
        return x


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_the_articles_dataset_reads_exactly_what_is_not_resident(workers, persistent):
    dataset = MyDataset(40, f"{40 + 30 * 192}B")
    orders = []
    for each in (dataset, range(40)):
        loader = DataLoader(
            each, 8, shuffle=True, num_workers=workers, persistent_workers=persistent,
            multiprocessing_context="fork" if workers else None, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        for epoch in range(3):
            before = dataset.cache.stats().misses
            batches = torch.cat(list(loader))
            orders.append(batches.view(40, -1)[:, 0].tolist())
            assert (batches.view(40, -1) == batches.view(40, -1)[:, :1]).all()
            assert each is not dataset or dataset.cache.stats().misses - before == (10 if epoch else 40)
    assert orders[:3] == orders[3:]  # the cache takes no random number
    dataset.cache.close()


ACTIONS = {
    "get": lambda cache, idx, value, flags: cache.get_slot(idx, *flags),
    "set": lambda cache, idx, value, flags: cache.set_slot(idx, value, *flags),
    "item": lambda cache, idx, value, flags: cache[idx],
    "store": lambda cache, idx, value, flags: cache.__setitem__(idx, value),
    "clear": lambda cache, idx, value, flags: cache.clear(),
}


def outcome(cache, action, *arguments):
    try:
        result = ACTIONS[action](cache, *arguments)
    except Exception as error:
        return error
    return None if result is None else (result.dtype, result.tolist())


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_end_as_in_stocaching(seed, capsys):
    """Differs only where stocaching's behaviour is a race (a second set after a miss) or damage (values that do not fit)."""
    peer = pytest.importorskip("stocaching", reason="pip install --no-deps stocaching==0.2.1")
    rng = random.Random(seed)
    n, dims = rng.randint(1, 12), rng.choice([(), (3,), (2, 3)])
    dtype = rng.choice([torch.uint8, torch.int16, torch.float32, torch.int64])
    nbytes = dtype.itemsize * torch.Size(dims).numel()
    limit = (n + rng.randint(1, n) * nbytes) / 2**30
    ours, theirs = SharedCache(limit, n, dims, dtype), peer.SharedCache(limit, n, dims, dtype)
    assert len(ours) == len(theirs)
    missed = set()
    for _ in range(200):
        idx, value = rng.randint(-1, n), torch.randint(0, 2, dims).to(dtype)
        flags = rng.random() < 0.5, rng.random() < 0.5
        action = rng.choice(["get", "get", "set", "set", "item", "store", "clear" if rng.random() < 0.1 else "get"])
        if action == "set" and idx in missed and not flags[1] and 0 <= idx < n and theirs.aux_array[idx] == 1:
            continue  # a lost race, as far as we can tell; stocaching raises
        mine, peers = (outcome(cache, action, idx, value, flags) for cache in (ours, theirs))
        if action == "get" and mine is None:
            missed.add(idx)
        assert isinstance(mine, type(peers)) if isinstance(peers, Exception) else mine == peers, (action, idx, flags)
        assert torch.equal(ours.aux_array, theirs.aux_array)
        assert torch.equal(ours.array, theirs.array)
    ours.close()
