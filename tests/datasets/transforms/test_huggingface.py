"""Datasets of Hugging Face: as they are, what their methods return, and a format that widens the numbers that are stored."""

import re
import sys
import types

import numpy as np
import pytest
import torch

import stocache
from stocache import CachedDataset, DatasetError, SharedCache
from stocache.datasets.transforms import huggingface

pytest.importorskip("datasets.arrow_dataset", reason="Hugging Face datasets is not installed")  # "datasets" is a folder here
import datasets
from datasets import Array2D, Array3D, ClassLabel, Features, Sequence, Value

N = 6


def rows(count=20):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b"]), "tokens": Sequence(Value("int64"))})
    columns = {"text": [f"text {n}" for n in range(count)], "label": [n % 2 for n in range(count)]}
    return datasets.Dataset.from_dict(columns | {"tokens": [list(range(n % 7)) for n in range(count)]}, features)


def test_datasets_of_hugging_face_work_unchanged():
    source = rows()
    with CachedDataset(source, 1) as cached:
        assert [cached[idx] for idx in range(20)] == list(source)
        assert cached.__getitems__([3, -1]) == [source[3], source[19]]
        assert cached.features == source.features
        assert (cached.num_rows, cached.unique("label")) == (20, [0, 1])
    with CachedDataset(source.select_columns(["label"]).with_format("torch"), 1) as cached:
        assert isinstance(cached.cache, SharedCache)
        assert [int(cached[idx]["label"]) for idx in range(20)] == source["label"][:]
    for wrong, message in (
        (source.to_iterable_dataset(), "IterableDataset has no samples by number.*load it with streaming=False"),
        (datasets.DatasetDict(train=source), r"DatasetDict is a mapping.*\['train'\]"),
    ):
        with pytest.raises(DatasetError, match=message):
            CachedDataset(wrong, 1)


CHOICES = {
    "select": lambda its: its.select([5, 3, 3, 9]), "skip": lambda its: its.skip(15), "take": lambda its: its.take(3),
    "shuffle": lambda its: its.shuffle(), "shard": lambda its: its.shard(num_shards=4, index=2),
    "train_test_split": lambda its: its.train_test_split(0.25, seed=1),
}  # fmt: skip


def rows_of(found):
    return {part: list(own) for part, own in found.items()} if isinstance(found, dict) else list(found)


@pytest.mark.parametrize("name", CHOICES)
def test_rows_that_are_chosen_are_the_dataset_s_own_with_one_warning(name, caplog, monkeypatch):
    monkeypatch.setattr(huggingface, "_warned", set())
    source, choose = rows(), CHOICES[name]
    with CachedDataset(source, 1) as cached:
        assert hasattr(cached, name)
        assert not caplog.records  # before it is called
        for _ in range(2):
            np.random.seed(5)
            expected, drawn = choose(source), np.random.rand()
            np.random.seed(5)
            found = choose(cached)
            assert np.random.rand() == drawn
            assert type(found) is type(expected)
            assert rows_of(found) == rows_of(expected)
        assert caplog.text.count(f"{name}() returns a dataset without the cache. Call it before CachedDataset") == 1


def test_what_changes_a_dataset_is_refused_once_it_is_wrapped():
    source = rows()
    with CachedDataset(source, 1, probe=1) as cached:
        for name in ("set_format", "set_transform", "with_transform", "map", "filter", "remove_columns", "sort"):
            why = r"\(\) (changes|makes another).*Call it before CachedDataset: "
            how = r"dataset\.set_\w+\(...\); Cached" if name.startswith("set_") else r"CachedDataset\(dataset\."
            with pytest.raises(DatasetError, match=name + why + how):
                getattr(cached, name)("text")
        assert source.format["type"] is None


def image(idx):
    return np.full((3, 8, 8), 250 + idx % 6, np.uint8)


def make(features, form=None, **columns):
    columns = {name: list(map(of, range(N))) for name, of in columns.items()}
    return datasets.Dataset.from_dict(columns, Features(features)).with_format(form)


def labelled(label=lambda idx: 290 + idx):
    features = {"image": Array3D((3, 8, 8), "uint8"), "label": ClassLabel(num_classes=300)}
    return make(features, image=image, label=label)


def warning(dataset, caplog):
    """Return what is said when the dataset is wrapped; None for nothing."""
    caplog.clear()
    with CachedDataset(dataset, "10MB") as cached:
        slot_bytes = cached.cache.slot_bytes if isinstance(cached.cache, SharedCache) else ""
    found = [record.getMessage() for record in caplog.records if "widens" in record.getMessage()]
    assert len(found) <= 1
    assert not found or f"a sample has {slot_bytes}" in found[0]
    return found[0].removesuffix(" (stocache explain W07)") if found else None


def followed(dataset, text):
    """Return the dataset after what the warning advises, and the bytes that it promises."""
    remedy = re.search(r"Use (dataset\..*?\))(\.$|: )", text)[1]
    promised = int(re.search(r"would have (\d+)\.", text)[1])
    return eval(remedy, {"dataset": dataset, "torch": torch, "numpy": np}), promised


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_what_is_advised_keeps_images_beside_labels(form, caplog):
    dataset = labelled().add_column("other", list(range(N))).with_format(form, columns=["image", "label"])
    text = warning(dataset, caplog)
    assert f"with_format('{form}') widens image (uint8): a sample has 1544 bytes, and would have 200." in text
    narrow, promised = followed(dataset, text)
    assert warning(narrow, caplog) is None
    assert set(narrow[0]) == {"image", "label"}  # columns that the format leaves out stay out
    with CachedDataset(narrow, "10MB") as cached:
        assert cached.cache.slot_bytes == promised == 3 * 8 * 8 + 8
        for _ in range(2):
            for idx in range(N):
                sample = cached[idx]
                assert str(sample["image"].dtype).endswith("uint8")
                assert np.array_equal(sample["image"], image(idx))
                assert sample["label"] == 290 + idx  # dtype=torch.uint8 for all columns would make it 34 + idx


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_arrays_and_lists_of_small_numbers_are_widened(form, caplog):
    for feature, of, dtype, nbytes in (
        (Array2D((4, 9), "int16"), lambda idx: np.full((4, 9), -idx, np.int16), "int16", 72),
        (Sequence(Value("uint8"), length=30), lambda idx: [idx] * 30, "uint8", 30),
        (Sequence(Sequence(Value("uint8"))), lambda idx: [[idx] * 30] * 2, "uint8", 60),
        (Sequence(Value("int8")), lambda idx: [idx] * (90 + idx), "int8", None),  # of varying length
    ):
        dataset = make({"x": feature}, form, x=of)
        text = warning(dataset, caplog)
        assert f"widens x ({dtype})" in text
        narrow, promised = followed(dataset, text)
        assert nbytes in (promised, None)
        assert warning(narrow, caplog) is None
        assert all(np.array_equal(narrow[idx]["x"], np.asarray(of(idx))) for idx in range(N))
        assert str(narrow[0]["x"].dtype).endswith(dtype)


@pytest.mark.parametrize(("beside", "shape"), [(Sequence(Value("float32"), length=2), 2), (Array2D((2, 2), "int16"), (2, 2))])
def test_beside_other_arrays_samples_are_to_be_narrowed_by_the_user(beside, shape, caplog):
    features = {"image": Array3D((3, 8, 8), "uint8"), "v": beside}
    text = warning(make(features, "torch", image=image, v=lambda idx: np.ones(shape)), caplog)
    assert text.endswith("whose __getitem__ has row['image'] = row['image'].to(torch.uint8).")


def test_nothing_is_said_where_nothing_grows(caplog):
    tokens = {"ids": Sequence(Value("int32")), "mask": Sequence(Value("int8"))}
    for dataset in (
        labelled(),
        make({"x": Sequence(Value("int64"), length=3)}, "torch", x=lambda idx: [idx] * 3),
        make({"x": Array2D((2, 3), "float32")}, "numpy", x=lambda idx: np.ones((2, 3))),
        make({"x": Value("string")}, "torch", x=str),
        make(tokens, "torch", ids=lambda idx: [idx] * 512, mask=lambda idx: [1] * 512),
        labelled(lambda idx: idx).with_format("torch", dtype=torch.float32),  # which the user has chosen
        labelled().with_format("torch", columns=["label"]),
        make({"x": {"y": Value("uint8")}}, "torch", x=lambda idx: {"y": idx}),
        labelled().select([]).with_format("torch"),
        [{"x": torch.zeros(3, dtype=torch.int64)}],
    ):
        assert warning(dataset, caplog) is None, dataset


class VideoDecoder:
    """Decodes when it is asked, as that of torchcodec: a copy of its attributes would hold a pointer of another process."""

    def __init__(self, source, **options):
        self.metadata, self.source = types.SimpleNamespace(), source
        self.pointer = torch.tensor([id(self)])

    def read(self):
        return self.source if isinstance(self.source, bytes) else open(self.source, "rb").read()


@pytest.fixture
def torchcodec(monkeypatch):
    decoders = types.SimpleNamespace(VideoDecoder=VideoDecoder, AudioDecoder=VideoDecoder)
    monkeypatch.setattr(datasets.config, "TORCHCODEC_AVAILABLE", True, raising=False)
    for name in ("torchcodec.decoders", "datasets.features._torchcodec"):
        monkeypatch.setitem(sys.modules, name, decoders)


def read_all(samples):
    return [(type(sample["clip"]).__name__, sample["clip"].read(), sample["n"]) for sample in samples]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("kind", ["Audio", "Video"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_audio_and_video_are_cached_as_files_and_decoders_are_not(kind, allow_pickle, split, torchcodec, tmp_path):
    if not hasattr(datasets, kind):
        pytest.skip("this version has no such columns")
    paths = [tmp_path / str(idx) for idx in range(8)]
    for idx, path in enumerate(paths):
        path.write_bytes(bytes([idx] * idx))
    source = datasets.Dataset.from_dict({"clip": list(map(str, paths)), "n": range(8)})
    source = source.cast_column("clip", getattr(datasets, kind)())
    with CachedDataset(source, "1MB", allow_pickle=allow_pickle, split=split) as cached:
        for workers in (0, 2):
            loader = stocache.DataLoader(cached, 4, collate_fn=read_all, num_workers=workers)
            assert [each for batch in loader for each in batch] == read_all(source[idx] for idx in range(8))
        assert cached.stats().total.filled == (8 if split else 0)
