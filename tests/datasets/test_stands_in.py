"""A cached dataset in the place of the user's: its class, names and life, for code that does not know it."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset, random_split

from stocache import CachedDataset, StorageDataset, prepare
from stocache.datasets import proxy


class Frames(Dataset):
    """Has attributes that a `CachedDataset` has for others."""

    stats = "mean"

    def __len__(self):
        return 6

    def __getitem__(self, idx):
        return torch.tensor([idx])

    def close(self):
        pass


class Own(CachedDataset):
    pass


COPIES = [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]


@pytest.mark.parametrize("cached_class", [CachedDataset, Own])
def test_isinstance_finds_the_class_of_a_dataset_of_torch_also_in_copies(cached_class):
    with cached_class(Frames(), "1MB") as dataset:
        for each in (dataset, *(copied(dataset) for copied in COPIES)):
            assert [isinstance(each, kind) for kind in (Frames, cached_class, IterableDataset)] == [True, True, False]
            assert (type(each), each[4].item()) == (cached_class, 4)
        assert len(ConcatDataset([dataset, *random_split(dataset, [2, 4])])) == 12


@pytest.mark.parametrize(
    "source", [Subset(Frames(), [1, 2]), [torch.zeros(1)] * 2, {0: 1, 1: 2}], ids=lambda x: type(x).__name__
)
def test_what_wraps_another_dataset_or_is_not_of_torch_is_not_found(source):
    with CachedDataset(source, "1MB") as dataset:
        assert not isinstance(dataset, type(source))


def test_a_cached_dataset_in_another_is_not_taken_for_a_plain_one(tmp_path):
    samples = [(torch.tensor([number]),) for number in range(6)]
    storage = StorageDataset(prepare(samples, tmp_path / "blocks", block_size=2))
    for source in (storage, TensorDataset(torch.arange(6)[:, None]), StackDataset(samples)):
        with CachedDataset(source, "1MB", transform=str) as inner, CachedDataset(inner, "1MB") as outer:
            assert [outer[idx] for idx in range(6)] == outer.__getitems__(list(range(6))) == [inner[idx] for idx in range(6)]


@pytest.mark.parametrize("variable", [False, True])
def test_reading_and_closing_change_neither_repr_nor_length(variable):
    dataset = CachedDataset(Frames(), "1MB", variable=variable)
    before = repr(dataset)
    assert [dataset[idx].item() for idx in range(6)] == list(range(6))
    stats = dataset.stats()
    dataset.close()
    dataset.close()
    assert (repr(dataset), len(dataset)) == (before, 6)
    assert (dataset.stats().total.hits, dataset.stats().total.filled) == (stats.total.hits, 6)


def test_attributes_that_ours_hide_are_said_once_and_missing_ones_name_the_dataset(caplog, monkeypatch):
    monkeypatch.setattr(proxy, "_said_hidden", set())
    for _ in range(2):
        with CachedDataset(Frames(), "1MB") as dataset:
            assert dataset.dataset.stats == "mean"
            for name in ("classes", "__classes__"):
                with pytest.raises(AttributeError, match=f"'Frames' object has no attribute '{name}'"):
                    getattr(dataset, name)
    assert caplog.text.count("attributes of its own called close, stats. Ask its `dataset` for those of Frames") == 1


class Speaks(Frames):
    """Takes more than an index, has an order of its own, and returns the index."""

    def __getitem__(self, idx, raw=False):
        return (idx, "raw") if raw else (torch.tensor([idx]), idx)

    def __iter__(self):
        yield from "abc"


def test_more_arguments_and_an_order_of_its_own_are_those_of_the_dataset():
    with CachedDataset(Speaks(), "1MB") as dataset:
        assert dataset.__getitem__(3, raw=True) == (3, "raw")
        assert list(dataset) == ["a", "b", "c"]
    with CachedDataset(Speaks(), "1MB", transform=str) as dataset:
        assert dataset.__getitem__(3, raw=True) == "(3, 'raw')"
        assert len(list(dataset)) == 6
    with CachedDataset(Frames(), "1MB") as dataset:
        assert [sample.item() for sample in dataset] == [*range(6)]


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor, bool])
def test_an_index_that_the_sample_holds_keeps_its_type(kind):
    with CachedDataset(Speaks(), "1MB") as dataset:
        assert type(dataset[kind(1)][1]) is type(dataset.__getitems__([kind(1)])[0][1]) is type(Speaks()[kind(1)][1])


class Pages(Frames):
    def __getitem__(self, idx):
        image, file = pytest.importorskip("PIL.Image"), io.BytesIO()
        image.new("L", (4, 4)).save(file, "TIFF", save_all=True, append_images=[image.new("L", (4, 4), 9)] * (idx % 2))
        return image.open(file)


@pytest.mark.parametrize("pickles", [False, True])
def test_an_image_keeps_all_its_pages(pickles):
    with CachedDataset(Pages(), "1MB", allow_pickle=pickles) as dataset:
        assert [getattr(dataset[idx], "n_frames", 1) for idx in (0, 1, 0, 1)] == [1, 2, 1, 2]
