"""A wrapped dataset is used as the dataset itself: its attributes, methods and indices; and transforms of parts of a sample."""

import collections
import logging
import pickle
from dataclasses import dataclass

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset, get_worker_info

import stocache
from stocache import CachedDataset, DatasetError, LimitError, RaggedCache, SampleIndexError
from tests.support.equality import same

N = 20


class Folder(Dataset):
    """A dataset in the style of torchvision and timm."""

    tag, loads, seen = "none", 0, None

    def __init__(self, transform=None, size=4):
        self.transform, self.size, self.handle = transform, size, None

    def __len__(self):
        return N

    def __getitem__(self, idx):
        if self.handle is None:
            self.handle = object()
        self.loads += 1
        image = torch.full((3, self.size, self.size), idx, dtype=torch.uint8)
        return (image if self.transform is None else self.transform(image)), idx


# ------------------------------------------------------------------------------------------------ attributes


def test_attributes_are_set_where_they_are_read():
    folder = Folder()
    with CachedDataset(folder, 1) as cached:
        cached.tag = "new"
        cached.other = 3
        assert (folder.tag, cached.tag, cached.other) == ("new", "new", 3)
        assert not hasattr(folder, "other")
        cached.handle = None  # what loading sets itself, samples are not made with
        cached.loads = 5
        assert cached.loads == 5


def set_tag(worker):
    get_worker_info().dataset.tag = "worker"


class Tagged(Folder):
    def __getitem__(self, idx):
        return self.tag


def test_a_worker_sets_attributes_of_its_dataset():
    with CachedDataset(Tagged(), 1, probe=0) as cached:
        loader = DataLoader(cached, None, num_workers=1, worker_init_fn=set_tag, multiprocessing_context="fork")
        assert set(loader) == {"worker"}
        assert cached.tag == "none"


@pytest.mark.parametrize("name", ["transform", "size"])
def test_what_cached_samples_are_made_with_cannot_be_set(name):
    folder = Folder()
    with CachedDataset(folder, 1, split=False) as cached:
        way = r"before CachedDataset.*CachedDataset\(\.\.\., transform=\.\.\.\).*transform={0: \.\.\.}"
        with pytest.raises(DatasetError, match=f"{name} of Folder cannot be set: its samples are made with it.*{way}"):
            setattr(cached, name, torch.flip)
        setattr(cached, name, getattr(folder, name))  # changes nothing
        assert (folder.transform, folder.size) == (None, 4)
        for own in ("dataset", "cache"):
            with pytest.raises(DatasetError, match=f"{own} of a CachedDataset cannot be replaced"):
                setattr(cached, own, folder)
    with CachedDataset(folder, 0) as uncached:
        setattr(uncached, name, 7)
        assert getattr(folder, name) == 7


class Own(CachedDataset):
    limit = 3

    def __init__(self, *args, **options):
        self.before = 1
        super().__init__(*args, **options)
        self.after = 2


def test_a_subclass_has_attributes_of_its_own():
    with Own(Folder(), 1) as cached:
        cached.limit = 4
        assert (cached.before, cached.after, cached.limit) == (1, 2, 4)
        again = pickle.loads(pickle.dumps(cached))
        assert (again.before, again.after, again.tag) == (1, 2, "none")
        again.close()


def test_the_transform_after_the_cache_can_be_set_where_the_dataset_has_none():
    with CachedDataset(TensorDataset(torch.arange(4)), 1) as cached:
        cached.transform = {0: torch.neg}
        assert same(cached[3], (torch.tensor(-3),))
        with pytest.raises(DatasetError, match="transform=3 is not callable"):
            cached.transform = 3


# ------------------------------------------------------------------------------------------------ transforms of parts

Pair = collections.namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: int


def double(value):
    return value * 2


IMAGE = torch.arange(6, dtype=torch.uint8).view(2, 3)


@pytest.mark.parametrize(
    ("sample", "parts", "expected"),
    [
        ((IMAGE, 3), {0: double}, (IMAGE * 2, 3)),
        ((IMAGE, 3), {-1: double, 0: double}, (IMAGE * 2, 6)),
        ([IMAGE, "text"], {1: double}, [IMAGE, "texttext"]),
        ({"image": IMAGE, "label": 3}, {"image": double}, {"image": IMAGE * 2, "label": 3}),
        ({"a": {"b": (1, IMAGE)}, "c": 2}, {"a": {"b": {0: double}}}, {"a": {"b": (2, IMAGE)}, "c": 2}),
        (Pair(IMAGE, 3), {"label": double}, Pair(IMAGE, 6)),
        (Pair(IMAGE, 3), {0: double}, Pair(IMAGE * 2, 3)),
        (Sample(IMAGE, 3), {"label": double}, Sample(IMAGE, 6)),
    ],
)
def test_a_transform_of_parts_leaves_the_others_as_they_are(sample, parts, expected):
    samples = [sample] * 3
    with CachedDataset(samples, 1, transform=parts) as cached:
        for _ in range(2):
            assert same(cached[1], expected)
            assert same(cached.__getitems__([0, 2])[1], expected)
        assert same(pickle.loads(pickle.dumps(cached.transform))(sample), expected)
    with CachedDataset(samples, 0, transform=parts) as uncached:
        assert same(uncached[1], expected)
    assert all(its is sample for its in samples)
    assert IMAGE.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("start_method", ["spawn"])
def test_a_transform_of_parts_goes_to_spawned_workers(start_method):
    with CachedDataset([(IMAGE.clone(), 3)] * 4, 1, transform={0: double}) as cached:  # which moves to shared memory
        loader = DataLoader(cached, 4, num_workers=1, multiprocessing_context=start_method)
        ((images, labels),) = loader
        assert torch.equal(images[1], IMAGE * 2)
        assert labels.tolist() == [3] * 4
        del loader


@pytest.mark.parametrize(
    ("sample", "transform", "message"),
    [
        ((IMAGE, 3), "flip", "transform='flip' is not callable. Give a function of a sample, or of parts"),
        ((IMAGE, 3), {}, "transform={} is not callable"),
        ((IMAGE, 3), {0: 7}, "transform=7 is not callable"),
        ((IMAGE, 3), {0: None}, "has a part without a function. Leave that part out"),
        ((IMAGE, 3), {2: double}, "transform={2: ...}: the sample has no such part, it is a tuple of 2"),
        ((IMAGE, 3), {"image": double}, "transform={'image': ...}: the sample has no such part, it is a tuple of 2"),
        (
            {"image": IMAGE},
            {"img": double},
            r"transform={'img': ...}: the sample has no such part, it is a dict with.*\['image'\]",
        ),
        (
            {"a": {"b": 1}},
            {"a": {"c": double}},
            r"transform={'c': ...}: the sample has no such part, it is a dict with.*\['b'\]",
        ),
        (IMAGE, {7: double}, "transform={7: ...}: the sample has no such part, it is a Tensor"),
    ],
)
def test_a_transform_that_cannot_run_is_refused_when_it_is_given(sample, transform, message):
    with pytest.raises(DatasetError, match=message):
        CachedDataset([sample] * 3, 1, transform=transform)


def test_a_tensor_has_no_parts():
    with CachedDataset([IMAGE] * 3, 1, transform={0: double}) as cached:
        with pytest.raises(DatasetError, match="the sample is a Tensor, which has no parts"):
            cached[0]


# ------------------------------------------------------------------------------------------------ indices


class Columns(Dataset):
    """Takes whatever numpy takes, as datasets over a memory map do."""

    def __init__(self):
        self.images = np.arange(N * 6, dtype=np.int32).reshape(N, 2, 3)
        self.labels = np.arange(N) % 3
        self.asked = []

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.asked.append(idx)
        return {"image": self.images[idx], "label": self.labels[idx]}


SEVERAL = [[1, 2, 5], [3], [-1, 0], slice(3), slice(None, None, 7), slice(-3, None), np.array([4, 4]), torch.tensor([2, 9])]


@pytest.mark.parametrize("indices", SEVERAL, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        Columns,
        lambda: TensorDataset(torch.arange(N * 6).view(N, 2, 3), torch.arange(N)),
        lambda: datasets.Dataset.from_dict({"text": list("abcdefghij") * 2, "label": list(range(N))}),
        lambda: datasets.Dataset.from_dict({"x": [[1.0, 2.0]] * N, "y": list(range(N))}).with_format("torch"),
        lambda: datasets.Dataset.from_dict({"x": [[1] * (n % 3 + 1) for n in range(N)]}).with_format("torch"),
    ],
    ids=["columns", "tensors", "hugging face", "hugging face torch", "hugging face ragged"],
)
@pytest.mark.sampled(2)
def test_several_indices_give_what_they_give_of_the_dataset(make, indices):
    dataset = make()
    with CachedDataset(dataset, 1) as cached:
        for _ in range(3):
            assert same(cached[indices], dataset[indices])


def test_several_indices_are_served_from_the_cache():
    dataset = Columns()
    with CachedDataset(dataset, 1) as cached:
        cached.warm(progress=False)
        for first in range(3):
            assert same(cached[[first, 7]], {"image": dataset.images[[first, 7]], "label": dataset.labels[[first, 7]]})
        assert dataset.asked == [[0, 7]]  # to find out how it puts samples together
        assert cached[[]]["image"].shape == (0, 2, 3)
        for other in (np.arange(N) > 3, torch.zeros(2, 2, dtype=torch.int64)):
            assert same(cached[other], dataset[other])
        with pytest.raises(IndexError, match="out of bounds"):
            cached[[N]]


def test_a_sequence_gives_slices():
    numbers = list(range(N))
    with CachedDataset(numbers, 1) as cached:
        assert cached[2:5] == [2, 3, 4]
        assert cached[::-1] == numbers[::-1]
        with pytest.raises(TypeError, match="list indices must be integers or slices"):
            cached[[1, 2]]


@pytest.mark.parametrize("loader_of", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_batch_sampler_as_torch_documents_them(loader_of, workers):
    dataset = Columns()
    seen = []
    for its in (dataset, CachedDataset(dataset, 1)):
        sampler = BatchSampler(RandomSampler(its, generator=torch.Generator().manual_seed(0)), 6, drop_last=False)
        loader = loader_of(its, batch_size=None, sampler=sampler, num_workers=workers)
        seen.append([batch for _ in range(2) for batch in loader])
        del loader
    its.close()
    assert same(seen[0], seen[1])


def test_a_transform_runs_on_each_of_several():
    with CachedDataset(Columns(), 1, transform={"label": double}) as cached:
        for _ in range(2):
            assert cached[[1, 2]]["label"].tolist() == [2, 4]
        assert cached[3]["label"] == 0

    class Sums(Columns):
        def __getitem__(self, idx):
            return self.labels[idx].sum()

    with CachedDataset(Sums(), 1, transform=double) as cached:
        with pytest.raises(DatasetError, match=r"Sums\[\[1, 2\]\] is not made of its samples, so transform= cannot run on it"):
            cached[[1, 2]]


def test_a_dataset_whose_length_changes_is_told():
    numbers = list(range(10))
    with CachedDataset(numbers, 1) as cached:
        numbers.append(10)
        for ask in (lambda: len(cached), lambda: cached[10], lambda: RandomSampler(cached).num_samples):
            with pytest.raises(DatasetError, match=r"list had 10 samples when it was wrapped, and has 11 now. Wrap it when"):
                ask()
        assert cached[9] == 9
        del numbers[5:]
        with pytest.raises(DatasetError, match="list had 10 samples when it was wrapped, and has 5 now"):
            len(cached)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"train": [1], "test": [2]}, r"dict is a mapping with the keys \['train', 'test'\].*CachedDataset\(dict\['train'\]\)"),
        ({1: "a", 2: "b"}, r"dict is a mapping with the keys \[1, 2\], not with the indices 0 to 1.*list\(dict.values\(\)\)"),
        (datasets.DatasetDict(train=datasets.Dataset.from_dict({"a": [1]})), r"DatasetDict is a mapping.*\['train'\]"),
    ],
)
def test_a_mapping_of_other_keys_is_refused(dataset, message):
    with pytest.raises(DatasetError, match=message):
        CachedDataset(dataset, 1)


def test_a_mapping_of_indices_is_a_dataset():
    with CachedDataset({0: "a", 1: "b"}, 1) as cached:
        assert [cached[0], cached[1]] == ["a", "b"]


# ------------------------------------------------------------------------------------------------ Hugging Face


def rows():
    labels = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    return datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(N)], "label": [n % 2 for n in range(N)]}, features)


CHOICES = {
    "select": lambda its: its.select([5, 3, 3, 9]),
    "select range": lambda its: its.select(range(4, 9)),
    "shuffle": lambda its: its.shuffle(seed=3),
    "shuffle unseeded": lambda its: its.shuffle(),
    "shuffle generator": lambda its: its.shuffle(generator=np.random.default_rng(4)),
    "shard": lambda its: its.shard(3, 1),
    "shard contiguous": lambda its: its.shard(num_shards=4, index=2, contiguous=True),
    "skip": lambda its: its.skip(15),
    "take": lambda its: its.take(3),
    "train": lambda its: its.train_test_split(0.25, seed=1)["train"],
    "stratified": lambda its: its.train_test_split(test_size=6, seed=1, stratify_by_column="label")["test"],
    "twice": lambda its: its.shuffle(seed=3).select([1, 2]).shard(2, 0),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("variable", [True, None])
@pytest.mark.sampled(2)
def test_rows_that_are_chosen_are_a_view_of_the_cached_dataset(choose, variable):
    source = rows() if variable else rows().select_columns(["label"])
    with CachedDataset(source, 1, variable=variable) as cached:
        cached.warm(progress=False)
        misses = cached.stats().total.misses
        np.random.seed(5)
        expected = choose(source)
        drawn = np.random.rand()
        np.random.seed(5)
        view = choose(cached)
        assert np.random.rand() == drawn
        assert isinstance(view, CachedDataset)
        assert len(view) == len(expected)
        assert [view[idx] for idx in range(len(view))] == list(expected)
        assert view.__getitems__([0, -1]) == [expected[0], expected[len(expected) - 1]]
        assert same(list(stocache.DataLoader(view, 3)), list(DataLoader(expected, 3)))
        assert view[:2] == expected[:2]
        assert view["label"][:] == expected["label"][:]
        assert view.features == source.features
        assert cached.stats().total.misses == misses
        with pytest.raises(SampleIndexError, match=f"outside the dataset of {len(expected)} samples"):
            view[len(expected)]


def test_a_view_warms_its_own_rows():
    with CachedDataset(rows(), 1, probe=1) as cached:
        cached.select([3, 4]).warm(progress=False)
        assert cached.cache.aux_array.nonzero().flatten().tolist() == [0, 3, 4]
        split = cached.train_test_split(5, seed=0)
        assert isinstance(split, datasets.DatasetDict)
        assert sorted(split) == ["test", "train"]


@pytest.mark.parametrize(
    "call",
    [
        lambda its: its.set_format("torch"),
        lambda its: its.set_transform(double),
        lambda its: its.with_transform(double),
        lambda its: its.map(double),
        lambda its: its.filter(bool),
        lambda its: its.remove_columns("text"),
        lambda its: its.sort("text"),
    ],
)
def test_what_changes_a_hugging_face_dataset_is_refused_once_it_is_wrapped(call):
    source = rows()
    with CachedDataset(source, 1) as cached:
        with pytest.raises(
            DatasetError, match=r"\(\) (changes|makes another).*Call it before CachedDataset: CachedDataset\(data"
        ):
            call(cached)
        assert source.format["type"] is None
        assert cached.unique("label") == [0, 1]
        assert cached.num_rows == N


# ------------------------------------------------------------------------------------------------ an example, or no probe


def test_an_example_takes_the_place_of_the_probe(caplog):
    caplog.set_level(logging.INFO, "stocache")
    folder = Folder()
    with CachedDataset(folder, 1, example=folder[3]) as cached:
        assert cached.stats().total.misses == 0
        assert "the example: all are tuple(0: uint8[3, 4, 4], 1: int)" in caplog.text
        assert same(cached[5], folder[5])
        assert cached.stats().total.rejected == 0
    with CachedDataset(folder, 1, probe=0) as cached:
        assert isinstance(cached.cache, RaggedCache)
        assert same(cached[5], folder[5])
    for options in ({"probe": -1}, {"probe": "all"}, {"probe": 0, "variable": False}):
        with pytest.raises(LimitError, match=r"probe=.* is not a number of samples|Give example=sample"):
            CachedDataset(folder, 1, **options)
