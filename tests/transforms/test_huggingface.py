"""Datasets of Hugging Face whose format makes wider numbers than are stored: it is said, and what is advised keeps them."""

import re

import datasets
import numpy as np
import pytest
import torch
from datasets import Array2D, Array3D, ClassLabel, Features, Image, Sequence, Value

from stocache import CachedDataset, SharedCache

N = 6


def image(idx):
    return np.full((3, 8, 8), 250 + idx % 6, np.uint8)


def make(features, **columns):
    return datasets.Dataset.from_dict({name: list(map(of, range(N))) for name, of in columns.items()}, Features(features))


def labelled(label=lambda idx: 290 + idx):
    features = {"image": Array3D((3, 8, 8), "uint8"), "label": ClassLabel(num_classes=300)}
    return make(features, image=image, label=label)


def warning(dataset, caplog):
    """What is said when the dataset is wrapped; None for nothing."""
    caplog.clear()
    with CachedDataset(dataset, "10MB") as cached:
        cached[0]
        slot_bytes = cached.cache.slot_bytes if isinstance(cached.cache, SharedCache) else None
    found = [record.getMessage() for record in caplog.records if "widens" in record.getMessage()]
    assert len(found) <= 1
    if found and slot_bytes is not None:
        assert f"a sample has {slot_bytes} bytes" in found[0]
    return found[0] if found else None


def followed(dataset, text):
    """The dataset after what the warning advises, and the bytes that it promises."""
    remedy = re.search(r"Use (dataset\..*?\))(\.$|: )", text)[1]
    promised = int(re.search(r"would have (\d+)\.", text)[1])
    return eval(remedy, {"dataset": dataset, "torch": torch, "numpy": np}), promised


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_what_is_advised_keeps_images_beside_labels(form, caplog):
    dataset = labelled()
    text = warning(dataset.with_format(form), caplog)
    assert f"with_format('{form}') widens image (uint8): a sample has 1544 bytes, and would have 200." in text
    narrow, promised = followed(dataset.with_format(form), text)
    assert warning(narrow, caplog) is None
    with CachedDataset(narrow, "10MB") as cached:
        assert cached.cache.slot_bytes == promised == 3 * 8 * 8 + 8
        for _ in range(2):
            for idx in range(N):
                sample = cached[idx]
                assert str(sample["image"].dtype).endswith("uint8")
                assert np.array_equal(sample["image"], image(idx))
                assert sample["label"] == 290 + idx  # dtype=torch.uint8 for all columns would make it 34 + idx
        loader = torch.utils.data.DataLoader(cached, 2)
        assert next(iter(loader))["label"].tolist() == [290, 291]


WIDENED = {
    "2-D": ({"x": Array2D((4, 9), "uint8")}, lambda idx: np.full((4, 9), idx, np.uint8), "uint8", 36),
    "signed": ({"x": Array2D((4, 9), "int16")}, lambda idx: np.full((4, 9), -idx, np.int16), "int16", 72),
    "list": ({"x": Sequence(Value("uint8"), length=30)}, lambda idx: [idx] * 30, "uint8", 30),
    "list of lists": ({"x": Sequence(Sequence(Value("uint8")))}, lambda idx: [[idx] * 30] * 2, "uint8", 60),
    "unsigned": ({"x": Sequence(Value("uint16"), length=30)}, lambda idx: [idx] * 30, "uint16", 60),
}


@pytest.mark.parametrize("form", ["torch", "numpy"])
@pytest.mark.parametrize("case", WIDENED)
def test_arrays_and_lists_of_small_numbers_are_widened(form, case, caplog):
    features, of, dtype, nbytes = WIDENED[case]
    dataset = make(features, x=of).with_format(form)
    text = warning(dataset, caplog)
    assert f"widens x ({dtype})" in text
    narrow, promised = followed(dataset, text)
    assert promised == nbytes
    assert warning(narrow, caplog) is None
    assert all(str(narrow[idx]["x"].dtype).endswith(dtype) for idx in range(N))
    assert all(np.array_equal(narrow[idx]["x"], np.asarray(of(idx))) for idx in range(N))


def test_a_list_of_varying_length_is_widened(caplog):
    dataset = make({"x": Sequence(Value("int8")), "y": Value("string")}, x=lambda idx: [idx] * (90 + idx), y=str)
    narrow, _ = followed(dataset, warning(dataset.with_format("torch"), caplog))
    assert [narrow[idx]["x"].tolist() for idx in range(N)] == [[idx] * (90 + idx) for idx in range(N)]
    assert narrow[1]["x"].dtype == torch.int8


def test_columns_that_the_format_leaves_out_stay_out(caplog):
    dataset = labelled().add_column("other", list(range(N))).with_format("torch", columns=["image", "label"])
    narrow, _ = followed(dataset, warning(dataset, caplog))
    assert set(narrow[0]) == {"image", "label"}


@pytest.mark.parametrize(
    "beside", [{"v": Sequence(Value("float32"), length=4)}, {"v": Array2D((2, 2), "int16")}], ids=["a vector", "another dtype"]
)
def test_beside_other_arrays_samples_are_to_be_narrowed_by_the_user(beside, caplog):
    dataset = make({"image": Array3D((3, 8, 8), "uint8"), **beside}, image=image, v=lambda idx: np.ones(beside_shape(beside)))
    text = warning(dataset.with_format("torch"), caplog)
    assert text.endswith("whose __getitem__ has row['image'] = row['image'].to(torch.uint8).")


def beside_shape(beside):
    return (2, 2) if isinstance(beside["v"], Array2D) else (4,)


def files():
    features = {"image": Image(), "label": Value("uint8")}
    return make(features, image=lambda idx: image(idx).transpose(1, 2, 0), label=lambda idx: idx)


NOT_WIDENED = {
    "no format": labelled,
    "int64": lambda: make({"x": Sequence(Value("int64"), length=3)}, x=lambda idx: [idx] * 3).with_format("torch"),
    "float64": lambda: make({"x": Sequence(Value("float64"), length=3)}, x=lambda idx: [0.5] * 3).with_format("torch"),
    "float32": lambda: make({"x": Array2D((2, 3), "float32")}, x=lambda idx: np.ones((2, 3))).with_format("numpy"),
    "text": lambda: make({"x": Value("string")}, x=str).with_format("torch"),
    "half": lambda: make({"x": Sequence(Value("float16"), length=9)}, x=lambda idx: [np.float16(idx)] * 9).with_format("torch"),
    "tokens": lambda: make(
        {"input_ids": Sequence(Value("int32")), "attention_mask": Sequence(Value("int8"))},
        input_ids=lambda idx: [idx] * 512,
        attention_mask=lambda idx: [1] * 512,
    ).with_format("torch"),
    "image files": lambda: files().with_format("torch"),
    "a dtype of the user's": lambda: labelled(lambda idx: idx).with_format("torch", dtype=torch.float32),
    "left out": lambda: labelled().with_format("torch", columns=["label"]),
    "nested": lambda: make({"x": {"y": Value("uint8")}}, x=lambda idx: {"y": idx}).with_format("torch"),
}


@pytest.mark.parametrize("case", NOT_WIDENED)
def test_nothing_is_said_where_nothing_grows(case, caplog):
    assert warning(NOT_WIDENED[case](), caplog) is None


def test_other_datasets_and_empty_ones_are_left_alone(caplog):
    assert warning([{"x": torch.zeros(3, dtype=torch.int64)}], caplog) is None
    with CachedDataset(labelled().select([]).with_format("torch"), "10MB"):
        assert not [record for record in caplog.records if "widens" in record.getMessage()]
