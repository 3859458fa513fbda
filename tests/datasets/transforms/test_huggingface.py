"""Datasets of Hugging Face: as they are, as views of chosen rows, and with transforms of their own."""

import sys
import types

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import stocache
from stocache import CachedDataset, DatasetError, SampleIndexError, SharedCache
from tests.support.equality import same

pytest.importorskip("datasets.arrow_dataset", reason="Hugging Face datasets is not installed")  # "datasets" is a folder here
import datasets
from datasets import ClassLabel, Features, Sequence, Value


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


CHOICES = [
    lambda its: its.select([5, 3, 3, 9]), lambda its: its.skip(15), lambda its: its.take(3),
    lambda its: its.shuffle(), lambda its: its.shuffle(generator=np.random.default_rng(4)),
    lambda its: its.shard(num_shards=4, index=2, contiguous=True), lambda its: its.train_test_split(0.25, seed=1)["train"],
    lambda its: its.train_test_split(test_size=6, seed=1, stratify_by_column="label")["test"],
    lambda its: its.shuffle(seed=3).select(range(1, 9)).shard(2, 0),
]  # fmt: skip


@pytest.mark.parametrize("variable", [True, None])
def test_rows_that_are_chosen_are_a_view_of_the_cached_dataset(variable):
    source = rows() if variable else rows().select_columns(["label"])
    with CachedDataset(source, 1, variable=variable) as cached:
        cached.warm(progress=False)
        misses = cached.stats().total.misses
        for choose in CHOICES:
            np.random.seed(5)
            expected, drawn = choose(source), np.random.rand()
            np.random.seed(5)
            view = choose(cached)
            assert np.random.rand() == drawn
            assert isinstance(view, CachedDataset)
            assert len(view) == len(expected)
            assert [view[idx] for idx in range(len(view))] == list(expected)
            assert view.__getitems__([0, -1]) == [expected[0], expected[len(expected) - 1]]
            if not variable:
                assert same(list(stocache.DataLoader(view, 3)), list(DataLoader(expected, 3)))
            assert view[:2] == expected[:2]
            assert view["label"][:] == expected["label"][:]
            assert view.features == source.features
            with pytest.raises(SampleIndexError, match=f"outside the dataset of {len(expected)} samples"):
                view[len(expected)]
        assert cached.stats().total.misses == misses


def test_a_view_warms_its_own_rows_and_what_changes_a_dataset_is_refused_once_it_is_wrapped():
    source = rows()
    with CachedDataset(source, 1, probe=1) as cached:
        cached.select([3, 4]).warm(progress=False)
        assert cached.cache.aux_array.nonzero().flatten().tolist() == [0, 3, 4]
        assert sorted(cached.train_test_split(5, seed=0)) == ["test", "train"]
        for name in ("set_format", "set_transform", "with_transform", "map", "filter", "remove_columns", "sort"):
            why = r"\(\) (changes|makes another).*Call it before CachedDataset: "
            how = r"dataset\.set_\w+\(...\); Cached" if name.startswith("set_") else r"CachedDataset\(dataset\."
            with pytest.raises(DatasetError, match=name + why + how):
                getattr(cached, name)("text")
        assert source.format["type"] is None


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
