"""What a user has replaced is used: collate functions, methods of storages, transforms, attributes of one object."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

import stocache
from stocache import CachedDataset, OnDiskBlockDataStorage, StorageDataset, prepare
from tests.support.equality import same
from tests.support.images import Images, N
from tests.support.processes import run_python
from tests.support.ways import WAYS

FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}
WAYS = WAYS | {"processes": FORKED}
every_way = pytest.mark.parametrize("workers", WAYS.values(), ids=WAYS)


def clean(batch, *, collate_fn_map=None):
    return torch.from_numpy(np.nan_to_num(np.stack(batch)))


def halved(batch, *, collate_fn_map=None):
    return torch.stack(batch).half()


def extend(worker):
    default_collate_fn_map[torch.Tensor] = halved


@every_way
def test_a_collate_function_that_depends_on_values_is_called(workers, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, np.ndarray, clean)
    data = [(np.array([idx, np.nan], np.float32), idx) for idx in range(8)]
    with CachedDataset(data, "1MB") as cached:
        for _ in range(2):
            assert same(list(stocache.DataLoader(cached, 4, **workers)), list(DataLoader(data, 4)))


def test_a_collate_function_that_each_worker_registers_is_called():
    with CachedDataset(Images(), 1) as cached:
        for dataset in (Images(), cached, cached):
            batches = list(stocache.DataLoader(dataset, 5, worker_init_fn=extend, **FORKED))
            assert [images.dtype for images, _ in batches] == [torch.float16] * 10


@pytest.mark.parametrize("way", ["alone", "threads"])  # worker processes have started before
def test_a_collate_function_that_is_registered_while_batches_come_is_called_soon(way, monkeypatch):
    with CachedDataset(Images(), 1) as cached:
        cached.warm(progress=False)
        dtypes = []
        for images, _ in stocache.DataLoader(cached, 1, **WAYS[way]):
            dtypes.append(images.dtype)
            monkeypatch.setitem(default_collate_fn_map, torch.Tensor, halved)
    assert (dtypes[0], dtypes[-1]) == (torch.uint8, torch.float16)


BEFORE_THE_IMPORT = """
import torch
from torch.utils.data import TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map
default_collate_fn_map[torch.Tensor] = lambda batch, *, collate_fn_map: torch.stack(batch).half()
import stocache
for workers in (0, 1):
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    print(next(iter(stocache.DataLoader(TensorDataset(torch.zeros(2, 1 << 19)), 2, **options)))[0].dtype)
"""


def test_a_collate_function_that_was_registered_before_the_import_is_called():
    assert run_python("-c", BEFORE_THE_IMPORT).stdout.split() == ["torch.float16"] * 2


class Scaled(OnDiskBlockDataStorage):
    factor = 1

    def load_sample(self, idx):
        return super().load_sample(idx) * self.factor


def test_the_samples_of_a_storage_that_makes_them_itself_are_compared(tmp_path):
    prepare([torch.tensor(idx) for idx in range(1, 9)], tmp_path / "data", block_size=4, progress=False).close()
    with Scaled(tmp_path / "data") as storage, CachedDataset(StorageDataset(storage), "1MB") as cached:
        for storage.factor in (1, 2, 3):
            assert torch.cat(list(DataLoader(cached, 4))).tolist() == [idx * storage.factor for idx in range(1, 9)]


class Folder(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 16

    def __getitem__(self, idx):
        sample = torch.tensor([float(idx)])
        return sample if self.transform is None else self.transform(sample)


def plus(sample):
    return sample + 1


@pytest.mark.parametrize(("way", "collate_fn"), [("alone", torch.stack), ("processes", None), ("threads", None)])
@pytest.mark.parametrize("first", [None, plus])
def test_a_transform_may_be_set_on_the_dataset_within(first, way, collate_fn):
    dataset = Folder(first)
    with CachedDataset(dataset, "1MB") as cached:
        loader = stocache.DataLoader(cached, 4, collate_fn=collate_fn, **WAYS[way])
        for dataset.transform in (first, torch.neg, first):
            assert torch.equal(torch.cat(list(loader)), torch.stack([*map(dataset.__getitem__, range(16))]))
        if way == "alone":
            batches = iter(loader)
            next(batches)
            dataset.transform = torch.neg  # while batches come
            assert torch.cat(list(batches)).flatten().tolist() == [*range(-4, -16, -1)]


def padded(batch):
    most = max(map(len, batch["ids"]))
    return {"ids": [ids + [0] * (most - len(ids)) for ids in batch["ids"]]}


def ids_of(samples):
    return [sample["ids"] for sample in samples]


@every_way
def test_a_transform_of_whole_batches_gets_whole_batches(workers):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_dict({"ids": [[1] * (idx % 4 + 1) for idx in range(64)]}).with_transform(padded)
    with CachedDataset(rows, "1MB") as cached:
        for _ in range(2):
            batches = list(stocache.DataLoader(cached, 32, collate_fn=ids_of, **workers))
            assert batches == list(DataLoader(rows, 32, collate_fn=ids_of))


@pytest.mark.parametrize("make", [DataLoader, stocache.DataLoader])
def test_a_batch_size_that_is_set_within_an_epoch_is_that_of_the_next_batch(make):
    loader, sizes = make(TensorDataset(torch.arange(12)), 2, shuffle=True), []
    for (batch,) in loader:
        sizes.append(len(batch))
        loader.batch_sampler.batch_size = 5
    assert sizes == [2, 5, 5]


@every_way
def test_methods_of_torchs_classes_that_are_replaced_are_called(workers, monkeypatch):
    original, labels = ConcatDataset.__getitem__, lambda loader: torch.cat([label for _, label in loader]).tolist()
    with CachedDataset(Images(), 1) as cached:
        part = Subset(cached, [5, 4, 3])
        part.__getitems__ = lambda indices: [cached[idx + 10] for idx in indices]
        assert labels(stocache.DataLoader(part, 3, **workers)) == labels(DataLoader(part, 3))
        monkeypatch.setattr(ConcatDataset, "__getitem__", lambda self, idx: original(self, N - idx - 1))
        both = ConcatDataset([cached, cached])
        assert labels(stocache.DataLoader(both, 3, **workers)) == labels(DataLoader(both, 3))


def test_a_method_that_one_object_has_instead_is_part_of_the_key():
    class Clips:
        def decode(self, idx):
            return idx

        @stocache.cached("1MB")
        def frame(self, idx):
            return torch.tensor(self.decode(idx))

    with contextlib.closing(Clips.frame):
        first, second = Clips(), Clips()
        assert [int(first.frame(3)) for _ in range(2)] == [3, 3]
        first.decode = lambda idx: idx + 7
        second.decode = functools.partial(int.__add__, 9)
        assert (int(first.frame(3)), int(second.frame(3)), int(Clips().frame(3))) == (10, 12, 3)
