"""Datasets of Hugging Face: unchanged, what their methods return, and with transforms of their own."""

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
from datasets import ClassLabel, Features, Sequence, Value


def rows(count=20):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b"]), "tokens": Sequence(Value("int64"))})
    columns = {"text": [f"text {n}" for n in range(count)], "label": [n % 2 for n in range(count)]}
    return datasets.Dataset.from_dict(columns | {"tokens": [list(range(n % 7)) for n in range(count)]}, features)


def test_datasets_of_hugging_face_work_unchanged():
    source = rows()
    with CachedDataset(source, 0.1) as cached:
        assert [cached[idx] for idx in range(20)] == list(source)
        assert cached.__getitems__([3, -1]) == [source[3], source[19]]
        assert cached.unique("label") == [0, 1]
    with CachedDataset(source.select_columns(["label"]).with_format("torch"), 0.1) as cached:
        assert isinstance(cached.cache, SharedCache)
        assert [int(cached[idx]["label"]) for idx in range(20)] == source["label"][:]
    for wrong, message in (
        (source.to_iterable_dataset(), "IterableDataset has no samples by number.*load it with streaming=False"),
        (datasets.DatasetDict(train=source), r"DatasetDict is a mapping.*\['train'\]"),
    ):
        with pytest.raises(DatasetError, match=message):
            CachedDataset(wrong, 0.1)


CHOICES = {
    "select": lambda its: its.select([5, 3, 3, 9]), "shuffle": lambda its: its.shuffle(),
    "shard": lambda its: its.shard(num_shards=4, index=2), "train_test_split": lambda its: its.train_test_split(0.25, seed=1),
}  # fmt: skip


def rows_of(found):
    return type(found), {part: list(own) for part, own in found.items()} if isinstance(found, dict) else list(found)


@pytest.mark.parametrize("name", CHOICES)
def test_rows_that_are_chosen_are_the_dataset_s_own_with_one_warning(name, caplog, monkeypatch):
    monkeypatch.setattr(huggingface, "_warned", set())
    source, choose = rows(), CHOICES[name]
    with CachedDataset(source, 0.1) as cached:
        assert hasattr(cached, name)
        assert not caplog.records  # before it is called
        found, drawn = [], []
        for dataset in (source, cached, cached):
            np.random.seed(5)
            found.append(rows_of(choose(dataset)))
            drawn.append(np.random.rand())
        assert (found, drawn) == (found[:1] * 3, drawn[:1] * 3)
        assert caplog.text.count(f"{name}() returns a dataset without the cache. Call it before CachedDataset") == 1


def test_what_changes_a_dataset_is_refused_once_it_is_wrapped():
    source = rows()
    with CachedDataset(source, 0.1, probe=1) as cached:
        for name in ("set_format", "set_transform", "with_transform", "map", "filter", "remove_columns", "sort"):
            why = r"\(\) (changes|makes another).*Call it before CachedDataset: "
            how = r"dataset\.set_\w+\(...\); Cached" if name.startswith("set_") else r"CachedDataset\(dataset\."
            with pytest.raises(DatasetError, match=name + why + how):
                getattr(cached, name)("text")
        assert source.format["type"] is None


class VideoDecoder:
    """Decodes when asked, as torchcodec's decoder: a copy of its attributes would hold a pointer of another process."""

    def __init__(self, source, **options):
        self.metadata, self.source = types.SimpleNamespace(), source
        self.pointer = torch.tensor([id(self)])

    def read(self):
        return self.source if isinstance(self.source, bytes) else open(self.source, "rb").read()


def read_all(samples):
    return [(type(sample["clip"]).__name__, sample["clip"].read(), sample["n"]) for sample in samples]


@pytest.mark.parametrize(
    ("kind", "allow_pickle", "split"), [("Audio", False, True), ("Video", True, True), ("Video", False, False)]
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_audio_and_video_are_cached_as_files_and_decoders_are_not(kind, allow_pickle, split, monkeypatch, tmp_path):
    if not hasattr(datasets, kind):
        pytest.skip("this version has no such columns")
    decoders = types.SimpleNamespace(VideoDecoder=VideoDecoder, AudioDecoder=VideoDecoder)
    monkeypatch.setattr(datasets.config, "TORCHCODEC_AVAILABLE", True, raising=False)
    for name in ("torchcodec.decoders", "datasets.features._torchcodec"):
        monkeypatch.setitem(sys.modules, name, decoders)
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
