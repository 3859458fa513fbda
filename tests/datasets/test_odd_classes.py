"""Datasets whose batches are made in a way of their own, and rows of a tensordict, are cached as others are."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, Subset

import stocache
from stocache import CachedDataset, DatasetError, StorageDataset
from tests.support.equality import same
from tests.support.images import Made
from tests.support.loading import THREADS

N = 24
LOADERS = {"none": {}, "processes": {"num_workers": 2}, "threads": THREADS | {"num_workers": 2}, "seeded": {"sample_seed": 1}}


class Numbers(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, idx):
        return torch.full((2,), idx)


class Together(Numbers):
    def __getitems__(self, indices):
        return [Numbers.__getitem__(self, idx) for idx in indices]


class Overridden(Together):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + 100


class OwnStorage(StorageDataset):
    """A dataset over a storage of the user's, with a `__getitem__` of its own."""

    def __init__(self):
        super().__init__(SimpleNamespace(load_sample=Numbers().__getitem__), range(N))

    def __getitem__(self, idx):
        return super().__getitem__(idx) + 100


@pytest.mark.parametrize("loader", ["none", "threads"])
def test_a_getitem_above_a_getitems_of_ours_is_asked(loader):
    with CachedDataset(OwnStorage(), "1MB") as cached:
        for dataset in (OwnStorage(), cached):
            assert torch.cat(list(stocache.DataLoader(dataset, 4, **LOADERS[loader])))[:, 0].tolist() == [*range(100, 100 + N)]


class Negatives(Numbers):
    """Makes more of a batch than its samples."""

    def __getitem__(self, idx):
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices):
        return [torch.tensor([idx, indices[at - 1]]) for at, idx in enumerate(indices)]


class Joined(Together):
    """Returns a batch, not a list of samples."""

    def __getitems__(self, indices):
        return {"numbers": torch.tensor(indices)}


BATCHED = {
    "overridden": Overridden, "subset": lambda: Subset(Overridden(), range(N)), "negatives": Negatives, "joined": Joined,
}  # fmt: skip


@pytest.mark.parametrize(("name", "loader"), [
    ("overridden", "none"), ("overridden", "seeded"), ("subset", "threads"), ("negatives", "processes"), ("joined", "none"),
    ("joined", "threads"),
])  # fmt: skip
def test_batches_are_torchs_where_getitems_returns_other_samples_than_getitem(name, loader, caplog):
    collate_fn = {"collate_fn": dict} if name == "joined" else {}
    wanted = [batch for _ in range(2) for batch in torch.utils.data.DataLoader(BATCHED[name](), 4, **collate_fn)]
    with CachedDataset(BATCHED[name](), "1MB") as cached:
        loader = stocache.DataLoader(cached, 4, **LOADERS[loader], **collate_fn)
        assert same([batch for _ in range(2) for batch in loader], wanted)
    assert "by __getitems__" in caplog.text


@pytest.mark.parametrize("how", ["clone", "lock_", "share_memory_", "memmap_"])
def test_rows_of_a_tensordict(how):
    library = pytest.importorskip("tensordict", reason="comes with the extra test")
    table = getattr(library.TensorDict({"a": torch.arange(N), "b": {"c": torch.ones(N, 2)}}, [N]), how)()
    with pytest.raises(DatasetError, match=r"TensorDict is in memory already.*Use it without a cache, or give a Dataset"):
        CachedDataset(table, "1MB")
    with CachedDataset(Made(lambda its, idx: its.table[idx], N, table=table), "1MB") as cached:
        for _ in range(2):
            for idx in range(N):
                got, wanted = cached[idx], table[idx]
                assert type(got) is type(wanted)
                assert (got == wanted).all()
                kinds = [(its.is_locked, its.is_shared(), its.is_memmap()) for its in (got, wanted)]
                assert kinds[0] == kinds[1]
