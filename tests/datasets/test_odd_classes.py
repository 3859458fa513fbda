"""Datasets whose classes answer any name, override a method or hide what they hold are cached as others are."""

import asyncio
import itertools
import random
from contextlib import closing

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import stocache
from stocache import CachedDataset, DatasetError, StorageDataset
from stocache.system.describe import describe
from tests.support.equality import same
from tests.support.images import Made
from tests.support.loading import THREADS

N = 24
LOADERS = {"none": {}, "processes": {"num_workers": 2}, "threads": THREADS | {"num_workers": 2}, "seeded": {"sample_seed": 1}}


class Numbers(Dataset):
    def __init__(self):
        self.length = N

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        return torch.full((2,), idx)


def raising(error):
    def answer(self, name):
        raise error(name)

    return answer


@pytest.mark.parametrize(("answer", "loader", "slots"), [
    (lambda self, name: None, "none", False), (lambda self, name: lambda *args, **kwargs: 7, "processes", True),
    (raising(KeyError), "threads", False), (raising(TypeError), "seeded", True),
], ids=["None", "a function", "a key error", "a type error"])  # fmt: skip
def test_a_class_that_answers_any_name(answer, loader, slots):
    namespace = {"__slots__": ("length",)} if slots else {}
    methods = {name: vars(Numbers)[name] for name in ("__init__", "__len__", "__getitem__")}
    dataset = type("Answers", (), methods | namespace | {"__getattr__": answer})()
    with CachedDataset(dataset, "1MB") as cached:
        batches = stocache.DataLoader(cached, 4, **LOADERS[loader])
        for epoch in range(2):
            batches.set_epoch(epoch)
            assert torch.cat(list(batches))[:, 0].tolist() == list(range(N))
        batches.load_state_dict(batches.state_dict())
        assert cached.stats().total.filled == N


class Together(Numbers):
    def __getitems__(self, indices):
        return [Numbers.__getitem__(self, idx) for idx in indices]


class Overridden(Together):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + 100


class Forwards:
    """Has the methods of another dataset, as far as it does not have its own."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return self.dataset[idx] + 100

    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Shifted(CachedDataset):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + 100


class ShiftedStorage(StorageDataset):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + 100


class Memory:
    def __len__(self):
        return N

    def load_sample(self, idx):
        return torch.full((2,), idx)


OVERRIDDEN = {
    "cached": lambda: Shifted(Together(), "1MB"), "subset of cached": lambda: Subset(Shifted(Together(), "1MB"), range(N)),
    "storage": lambda: ShiftedStorage(Memory()), "cached storage": lambda: CachedDataset(ShiftedStorage(Memory()), "1MB"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "loader"), [*zip(OVERRIDDEN, LOADERS, strict=True)])
def test_a_getitem_above_a_getitems_of_ours_is_asked(name, loader):
    batches = stocache.DataLoader(OVERRIDDEN[name](), 4, **LOADERS[loader])
    for _ in range(2):
        assert torch.cat(list(batches))[:, 0].tolist() == list(range(100, 100 + N))


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
    "overridden": Overridden, "subset": lambda: Subset(Overridden(), range(N)), "forwards": lambda: Forwards(Together()),
    "negatives": Negatives, "joined": Joined,
}  # fmt: skip
ROWS = [row for row in itertools.product(BATCHED, ["none", "processes", "threads"]) if row[0] not in ("subset", "forwards")]


@pytest.mark.parametrize(("name", "loader"), [*ROWS, ("overridden", "seeded"), ("subset", "seeded"), ("forwards", "none")])
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


def test_what_a_class_in_c_holds_besides_attributes_is_compared_and_not_where_it_lies(tmp_path):
    one, other, different = (describe([random.Random(seed)]) for seed in (1, 1, 2))
    assert one == other != different
    mapped = np.memmap(tmp_path / "rows", np.int64, "w+", shape=(3, 2))
    assert describe(mapped[1]) == describe(mapped[1].copy()) == describe(np.array(mapped[1]).view(np.memmap))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_method": "thread"}])
def test_datasets_and_samples_hold_objects_that_hide_their_attributes(options, caplog):
    with closing(asyncio.new_event_loop()) as loop:
        handle = asyncio.Future(loop=loop)  # vars() of it raises TypeError, as for an object of SWIG's
        with CachedDataset(Made(lambda its, idx: {"handle": its.handle, "idx": idx}, 4, handle=handle), 1) as cached:
            batches = list(stocache.DataLoader(cached, batch_size=2, collate_fn=list, **options))
    assert [sample["idx"] for batch in batches for sample in batch] == [0, 1, 2, 3]
    assert "is a Future, which has no bytes of its own" in caplog.text
