"""A wrapped dataset is used as the dataset itself: its attributes, methods and indices; and transforms of parts of a sample."""

import copy
import io
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import stocache
from stocache import CachedDataset, DatasetError, StorageDataset, prepare
from stocache.datasets import proxy
from tests.support.containers import Box, Point
from tests.support.equality import same
from tests.support.images import Made
from tests.support.loading import THREADS

N = 20


class Folder(Dataset):
    """A dataset in the style of torchvision and timm."""

    tag, loads = "none", 0

    def __init__(self):
        self.transform, self.size, self.handle = None, 4, None

    def __len__(self):
        return N

    def __getitem__(self, idx):
        if self.handle is None:
            self.handle = object()
        self.loads += 1
        image = torch.full((3, self.size, self.size), idx, dtype=torch.uint8)
        return (image if self.transform is None else self.transform(image)), idx


def test_attributes_are_set_where_they_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Dataset))  # a module of the user's, not Hugging Face
    folder = Folder()
    with CachedDataset(folder, 0.1) as cached:
        cached.tag = "new"
        cached.other = 3
        assert (folder.tag, cached.tag, cached.other) == ("new", "new", 3)
        assert not hasattr(folder, "other")
        cached.handle = None  # what loading sets itself, samples are not made with
        cached.loads = 5
        assert cached.loads == 5


@pytest.mark.parametrize("name", ["transform", "size"])
def test_setting_what_cached_samples_are_made_with_is_refused_or_ends_the_cache(name, caplog):
    folder = Folder()
    with CachedDataset(folder, 0.1, split=False, on_change="raise") as cached:
        way = (
            r"its samples are made with it.*transform=, which runs after the cache.*transform={0: \.\.\.}.*before CachedDataset"
        )
        with pytest.raises(DatasetError, match=f"{name} of Folder was set: {way}"):
            setattr(cached, name, torch.flip if name == "transform" else 7)
        setattr(cached, name, getattr(folder, name))  # changes nothing
        assert (folder.transform, folder.size) == (None, 4)
        for own in ("dataset", "cache"):
            with pytest.raises(DatasetError, match=f"{own} of a CachedDataset cannot be replaced"):
                setattr(cached, own, folder)
    with CachedDataset(folder, 0) as uncached:
        setattr(uncached, name, 7)
        assert getattr(folder, name) == 7
    assert not caplog.records
    with CachedDataset(Folder(), 0.1, split=False) as cached:
        setattr(cached, name, None if name == "transform" else 2)
        assert cached._audit.changed == (name == "size")
    assert caplog.text.count("size of Folder was set") == (name == "size")


def test_isinstance_finds_the_class_of_a_dataset_of_torch_also_in_copies():
    with CachedDataset(Folder(), 0.1) as cached:
        for each in (cached, copy.copy(cached), copy.deepcopy(cached), pickle.loads(pickle.dumps(cached))):
            assert [isinstance(each, kind) for kind in (Folder, CachedDataset, IterableDataset)] == [True, True, False]
            assert (type(each), each.tag, each[4][1]) == (CachedDataset, "none", 4)
        assert len(ConcatDataset([cached, *torch.utils.data.random_split(cached, [2, N - 2])])) == 2 * N


def test_a_cached_dataset_in_another_is_not_taken_for_a_plain_one(tmp_path):
    samples = [(torch.tensor([number]),) for number in range(6)]
    storage = StorageDataset(prepare(samples, tmp_path / "blocks", block_size=2))
    for source in (storage, TensorDataset(torch.arange(6)[:, None]), torch.utils.data.StackDataset(samples)):
        with CachedDataset(source, "1MB", transform=str) as inner, CachedDataset(inner, "1MB") as outer:
            assert [outer[idx] for idx in range(6)] == outer.__getitems__(list(range(6))) == [inner[idx] for idx in range(6)]


def double(value):
    return value * 2


IMAGE = torch.arange(6, dtype=torch.uint8).view(2, 3)
PARTS = [
    ((IMAGE, 3), {-1: double, 0: double}, (IMAGE * 2, 6)), ([IMAGE, "text"], {1: double}, [IMAGE, "texttext"]),
    ({"a": {"b": (1, IMAGE)}, "c": 2}, {"a": {"b": {0: double}}}, {"a": {"b": (2, IMAGE)}, "c": 2}),
    (Point(IMAGE, 3), {"y": double}, Point(IMAGE, 6)), (Point(IMAGE, 3), {0: double}, Point(IMAGE * 2, 3)),
    (Box(IMAGE, 3), {"label": double}, Box(IMAGE, 6)),
]  # fmt: skip


@pytest.mark.parametrize(("sample", "parts", "expected"), PARTS)
def test_a_transform_of_parts_leaves_the_others_as_they_are(sample, parts, expected):
    samples = [sample] * 3
    with CachedDataset(samples, 0.1, transform=parts) as cached:
        for _ in range(2):
            assert same(cached[1], expected)
            assert same(cached.__getitems__([0, 2])[1], expected)
        assert same(pickle.loads(pickle.dumps(cached.transform))(sample), expected)
    with CachedDataset(samples, 0, transform=parts) as uncached:
        assert same(uncached[1], expected)
    with CachedDataset(samples, 0.1) as cached:
        cached.transform = parts  # when the dataset has none
        assert same(cached[1], expected)
        with pytest.raises(DatasetError, match="transform=3 is not callable"):
            cached.transform = 3
    assert all(its is sample for its in samples)
    assert IMAGE.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("sample", "transform", "message"), [
    ((IMAGE, 3), "flip", "transform='flip' is not callable. Give a function of a sample, or of parts"),
    ((IMAGE, 3), {0: None}, "has a part without a function. Leave that part out"),
    ((IMAGE, 3), {2: double}, "transform={2: ...}: the sample has no such part, it is a tuple of 2"),
    ({"a": {"b": 1}}, {"a": {"c": double}}, r"{'c': ...}: the sample has no such part, it is a dict with.*\['b'\]"),
    (IMAGE, {7: double}, "transform={7: ...}: the sample has no such part, it is a Tensor"),
    (IMAGE, {0: double}, "the sample is a Tensor, which has no parts"),  # when it is asked for
])  # fmt: skip
def test_a_transform_that_cannot_run_is_refused(sample, transform, message):
    with pytest.raises(DatasetError, match=message):
        with CachedDataset([sample] * 3, 0.1, transform=transform) as cached:
            cached[0]


class Columns(Dataset):
    """Takes whatever numpy takes, as datasets over a memory map do."""

    def __init__(self):
        self.images = np.arange(N * 6, dtype=np.int32).reshape(N, 2, 3)
        self.labels = np.arange(N) % 3

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return {"image": self.images[idx], "label": self.labels[idx]}


def hugging_face(form=None, **columns):
    pytest.importorskip("datasets.arrow_dataset", reason="Hugging Face datasets is not installed")
    import datasets

    return datasets.Dataset.from_dict(columns).with_format(form)


SEVERAL = [
    [], [3], [-1, 0], slice(3), slice(None, None, 7), slice(-3, None), np.array([4, 4]), torch.tensor([2, 9]), np.arange(N) > 3,
]  # fmt: skip


@pytest.mark.parametrize("make", [
    Columns, lambda: TensorDataset(torch.arange(N * 6).view(N, 2, 3), torch.arange(N)),
    lambda: hugging_face(text=list("abcdefghij") * 2, label=list(range(N))),
    lambda: hugging_face("torch", x=[[1] * (n % 3 + 1) for n in range(N)], y=[[1.0, 2.0]] * N),
], ids=["columns", "tensors", "hugging face", "hugging face torch"])  # fmt: skip
def test_several_indices_return_what_the_dataset_returns(make):
    dataset = make()
    with CachedDataset(dataset, 0.1) as cached:
        for _ in range(2):
            for indices in SEVERAL:
                assert same(cached[indices], dataset[indices]), indices
        with pytest.raises(IndexError, match=r"out of (bounds|range)"):
            cached[[N]]


def test_a_transform_runs_on_one_sample_only():
    with CachedDataset(Columns(), 0.1, transform={"label": double}) as cached:
        assert [sample["label"] for sample in cached.__getitems__([1, 2])] == [2, 4]
        for key in ([1, 2], slice(2), (1, 2), np.arange(3), torch.tensor([1]), []):
            with pytest.raises(DatasetError, match=r"Columns\[.*\] is not one sample, so transform= cannot run on it"):
                cached[key]
    with CachedDataset(hugging_face(label=[1, 2]), 0.1, transform={"label": double}) as cached:
        assert (list(cached["label"]), cached[1]) == ([1, 2], {"label": 4})


@pytest.mark.parametrize(("length", "on_change"), [(12, "uncached"), (8, "uncached"), (11, "raise"), (11, "keep")])
def test_a_dataset_whose_length_changes_makes_its_samples_itself_or_is_refused_if_asked_for(length, on_change):
    numbers = list(range(10))
    with CachedDataset(numbers, 0.1, on_change=on_change) as cached:
        numbers[:] = range(length)
        if on_change != "uncached":
            for ask in (lambda: len(cached), lambda: cached[10], lambda: RandomSampler(cached).num_samples):
                with pytest.raises(DatasetError, match=r"list had 10 samples when it was wrapped, and has 11 now"):
                    ask()
            return
        assert cached[length - 1] == length - 1
        assert len(cached) == RandomSampler(cached).num_samples == length
        assert torch.cat(list(stocache.DataLoader(cached, 5, num_workers=2))).tolist() == numbers
        with pytest.raises(IndexError):
            cached[length]


class Rows(Dataset):
    """Slices and methods that return a part, as of torch_geometric."""

    def __init__(self, rows=range(N)):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        return torch.full((4,), float(self.rows[idx])) if isinstance(idx, int) else Rows(self.rows[idx])

    def shuffle(self):
        return Rows(self.rows[::-1])

    def split(self, count):
        return self[:count], self[count:]


def test_methods_and_parts_of_a_dataset_are_its_own():
    with CachedDataset(source := Rows(), 0.1) as cached:
        assert [type(part) for part in (cached[3:15], cached.shuffle(), *cached.split(5))] == [Rows] * 4
        assert torch.equal(cached.shuffle()[0], source[N - 1])


class Speaks(Rows):
    """Has attributes that a `CachedDataset` has for others, takes more than an index, and has an order of its own."""

    stats, close = "mean", None

    def __getitem__(self, idx, raw=False):
        return "raw" if raw else idx

    def __iter__(self):
        yield from "abc"


def test_attributes_that_ours_hide_are_said_once_and_missing_ones_name_the_dataset(caplog, monkeypatch):
    monkeypatch.setattr(proxy, "_said_hidden", set())
    for _ in range(2):
        with CachedDataset(Speaks(), 0.1) as cached:
            assert (cached.dataset.stats, cached.__getitem__(3, raw=True), list(cached)) == ("mean", "raw", ["a", "b", "c"])
            with pytest.raises(AttributeError, match="'Speaks' object has no attribute 'classes'"):
                cached.classes  # noqa: B018
    assert caplog.text.count("attributes of its own called close, stats. Ask its `dataset` for those of Speaks") == 1


@pytest.mark.parametrize("pickles", [False, True])
def test_an_image_keeps_all_its_pages(pickles):
    library, file = pytest.importorskip("PIL.Image"), io.BytesIO()
    library.new("L", (4, 4)).save(file, "TIFF", save_all=True, append_images=[library.new("L", (4, 4), 9)])
    make = lambda its, idx: library.open(io.BytesIO(file.getvalue()))
    with CachedDataset(Made(make, 6), 0.1, allow_pickle=pickles) as cached:
        assert [cached[idx].n_frames for idx in (0, 1, 0, 1)] == [2] * 4


@pytest.mark.linux
@pytest.mark.parametrize("asks", [True, False])
def test_an_epoch_that_does_not_ask_the_cache_is_warned_of_once(asks, caplog):
    with CachedDataset(Rows(), 0.1) as cached:
        loader = DataLoader(cached if asks else Made(lambda its, idx: its.within.dataset[idx], N, within=cached), 4)
        for epoch in range(4):
            cached.set_epoch(epoch)
            list(loader)
        assert caplog.text.count("no sample was requested from the cache") == (not asks)


class Sizes(Rows):
    """Takes pairs of an index and a size besides indices."""

    def __getitem__(self, key):
        idx, size = key if isinstance(key, tuple) else (key, 4)
        return torch.full((3, size), float(idx))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}])
def test_batches_of_pairs_are_those_of_the_dataset(options):
    batches = [[(idx, 4 + idx % 2) for idx in range(at, at + 6, 2)] for at in range(10)] + [[3, 4]]
    expected = list(DataLoader(Sizes(), batch_sampler=batches))
    with CachedDataset(Sizes(), 0.1) as cached:
        assert same(list(stocache.DataLoader(cached, batch_sampler=batches, **options)), expected)
        assert same(list(DataLoader(cached, batch_sampler=batches)), expected)


class Stream(IterableDataset):
    """Is read by number, too, as the streams of LitData and MosaicML."""

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return torch.full((4,), idx)

    def __iter__(self):
        yield from map(self.__getitem__, reversed(range(N)))


def test_a_stream_that_is_read_by_number_too_is_cached_by_number():
    with CachedDataset(Stream(), "1MB") as cached:
        assert [batch[:, 0].tolist() for batch in DataLoader(cached, 5)] == [list(range(at, at + 5)) for at in range(0, N, 5)]
        assert cached.stats().total.filled == N


class Overridden(Rows):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + 100

    def __getitems__(self, indices):
        return [Rows.__getitem__(self, idx) for idx in indices]


class Joined(Rows):
    """Returns a batch, not a list of samples."""

    def __getitems__(self, indices):
        return {"numbers": torch.tensor(indices)}


@pytest.mark.parametrize(("make", "options"), [
    (Overridden, {}), (Overridden, {"sample_seed": 1}), (Joined, {"collate_fn": dict}),
    (Joined, {"collate_fn": dict} | THREADS),
])  # fmt: skip
def test_batches_are_torchs_where_getitems_returns_other_samples_than_getitem(make, options, caplog):
    collate_fn = options.get("collate_fn")
    wanted = [batch for _ in range(2) for batch in torch.utils.data.DataLoader(make(), 4, collate_fn=collate_fn)]
    with CachedDataset(make(), "1MB") as cached:
        loader = stocache.DataLoader(cached, 4, **options)
        assert same([batch for _ in range(2) for batch in loader], wanted)
    assert "by __getitems__" in caplog.text


@pytest.mark.parametrize("how", ["clone", "lock_", "share_memory_", "memmap_"])
def test_rows_of_a_tensordict(how):
    library = pytest.importorskip("tensordict", reason="comes with the extra test")
    table = getattr(library.TensorDict({"a": torch.arange(N), "b": {"c": torch.ones(N, 2)}}, [N]), how)()
    with pytest.raises(DatasetError, match=r"TensorDict is in memory already.*Use it without a cache, or give a Dataset"):
        CachedDataset(table, "1MB")
    with CachedDataset(Made(lambda its, idx: its.table[idx], N, table=table), "1MB") as cached:
        for idx in [*range(N)] * 2:
            got, wanted = cached[idx], table[idx]
            assert (got == wanted).all()
            kinds = [(type(its), its.is_locked, its.is_shared(), its.is_memmap()) for its in (got, wanted)]
            assert kinds[0] == kinds[1]
