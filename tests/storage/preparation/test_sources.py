"""Files and folders as datasets: what they give, how they are read, and what is refused."""

import io
import os
import pickle
import sys
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from stocache import LimitError, SampleIndexError, StorageError
from stocache.storage.preparation.sources import open_source
from tests.support.equality import same
from tests.support.preparing import prepare_quietly


def library(name):
    """A library, or one of its modules; the test is skipped if it is not installed."""
    pytest.importorskip("datasets.arrow_dataset" if name == "datasets" else name, reason="comes with the extra test")
    return sys.modules[name]  # there is a folder "datasets" beside these tests, too


def write_files(folder, files):
    """Write files by their paths: bytes, or what a function returns."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data() if callable(data) else data)
    return folder


def array(value):
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def parquet(rows, like):
    arrow, file = library("pyarrow"), io.BytesIO()
    table = arrow.Table.from_pylist(rows, arrow.Table.from_pylist(like).schema)
    library("pyarrow.parquet").write_table(table, file, row_group_size=4)
    return file.getvalue()


IMAGES = {"cat/1.jpg": b"one", "cat/old/0.PNG": b"two", "cat-1/x.webp": b"three", "dog/y.jpeg": b"four"}
LABELS = [("cat/1.jpg", 0), ("cat/old/0.PNG", 0), ("cat-1/x.webp", 1), ("dog/y.jpeg", 2)]  # cat before cat-1
CSV = '\ufeffn,x,text,code,price,nothing\r\n1,.5,"a ""b"",\r\nc",007,2,\r\n\r\n-2,1e3,é,NA,,\r\n'.encode()
CELLS = [(1, 0.5, 'a "b",\r\nc', "007", "2", ""), (-2, 1000.0, "é", "NA", "", "")]
TABLE = [dict(zip(("n", "x", "text", "code", "price", "nothing"), row, strict=True)) for row in CELLS]
NUMBER, TEXT = ({"dtype": kind, "_type": "Value"} for kind in ("int64", "string"))
ROWS = [{"a": n if n % 3 else None, "s": f"row {n}", "list": [n] * (n % 4), "raw": bytes([n]) * n} for n in range(25)]
NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
SOURCES = {  # files; the one that is opened, or "" for the folder; the samples; and the info
    "classes": (
        IMAGES | {".hidden/a.jpg": b"x", "cat/._1.jpg": b"x", "cat/notes.txt": b"x"}, "",
        [{"image": IMAGES[name], "name": name, "label": label} for name, label in LABELS],
        {"classes": ["cat", "cat-1", "dog"]},
    ),
    "images": (
        {"b.jpg": b"b", "a.jpg": b"a"}, "", [{"image": b"a", "name": "a.jpg"}, {"image": b"b", "name": "b.jpg"}],
        {"classes": []},
    ),
    "table": ({"t.csv": CSV}, "t.csv", TABLE, {"columns": [*TABLE[0]], "features": ANY}),
    "lines": (
        {"t.jsonl": b'{"a": 1, "b": "x"}\n{"a": 2, "b": null}\n'}, "t.jsonl", [{"a": 1, "b": "x"}, {"a": 2, "b": None}],
        {"columns": ["a", "b"], "features": {"a": NUMBER, "b": TEXT}},
    ),
    "array": ({"a.npy": array(NUMBERS)}, "a.npy", list(NUMBERS), {}),
    "parquets": (
        {f"{n}.parquet": lambda part=part: parquet(part, ROWS) for n, part in enumerate((ROWS[:10], [], ROWS[10:]))}, "", ROWS,
        {"columns": [*ROWS[0]], "features": ANY},
    ),
}  # fmt: skip
TABLES = "table", "lines", "parquets"


def saved(folder):
    """A dataset with an image, as Hugging Face datasets saves it beside a different one. The image stays encoded."""
    datasets, image, file = library("datasets"), library("PIL.Image"), io.BytesIO()
    datasets.disable_progress_bars()
    image.new("RGB", (4, 4)).save(file, "png")
    samples = [{"image": {"bytes": file.getvalue(), "path": None}, "text": text} for text in ("a", None, "bc")]
    features = {"image": datasets.Image(), "text": datasets.Value("string")}
    dataset = datasets.Dataset.from_list(samples, datasets.Features(features))
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(folder)
    with pytest.raises(StorageError, match=r"holds several datasets. Give one of them: .*/ and one of test, train"):
        open_source(folder)
    features["image"].decode = False
    return open_source(folder / "train"), samples, {"columns": [*features], "features": datasets.Features(features).to_dict()}


def opened(name, folder):
    if name in TABLES:
        library("datasets")
    files, opens, samples, info = SOURCES[name]
    return open_source(write_files(folder, files) / opens), samples, info


@pytest.mark.parametrize("name", [*SOURCES, "saved"])
def test_a_source_gives_its_samples_and_its_info_and_is_prepared_as_it_is(name, tmp_path):
    source, samples, info = saved(tmp_path / "in") if name == "saved" else opened(name, tmp_path / "in")
    assert len(source) == len(samples)
    assert same(list(source), samples)
    assert source.info == info
    for idx in (len(samples), -1):
        with pytest.raises(SampleIndexError, match="outside the dataset"):
            source[idx]
    if hasattr(source, "__getitems__"):
        for order in (range(len(samples)), np.random.randint(0, len(samples), 40), []):
            assert same(source.__getitems__(list(order)), [samples[idx] for idx in order])
    assert same(list(pickle.loads(pickle.dumps(source))), samples)
    with prepare_quietly(source, tmp_path / "out", info=source.info, block_size=3) as storage:
        assert same([storage.load_sample(idx) for idx in range(len(samples))], samples)
        assert storage.load_dataset_info() == source.info


def test_workers_read_sources_that_their_parent_reads(tmp_path):
    sources, parts, _ = zip(*(opened(name, tmp_path / name) for name in ("classes", "table", "array", "parquets")), strict=True)
    dataset, samples = ConcatDataset(sources), [sample for part in parts for sample in part]
    options = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": None, "collate_fn": lambda sample: sample}
    for reader in (dataset, DataLoader(dataset, **options), dataset):
        assert same(list(reader), samples)


def test_samples_of_an_array_are_the_callers_and_pickles_do_not_hold_it(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((1000, 100)))
    source = open_source(tmp_path / "a.npy")
    sample = source[1]
    sample[:] = 0
    assert type(sample) is np.ndarray
    assert source[1].any()
    assert len(pickle.dumps(source)) < 1000


def test_size_decodes_images_and_names_those_that_cannot_be(tmp_path):
    image = library("PIL.Image")
    pixels, file = np.random.randint(0, 256, (8, 8, 4), dtype=np.uint8), io.BytesIO()
    image.fromarray(np.random.randint(0, 256, (64, 64, 3), dtype=np.uint8)).save(file, "jpeg")
    write_files(tmp_path, {"a/x_no.jpg": b"no image", "a/x_cut.jpg": file.getvalue()[:1000]})
    image.fromarray(pixels).save(tmp_path / "a" / "rgba.png")
    image.fromarray(pixels[..., 0]).save(tmp_path / "a" / "grey.bmp")
    source = open_source(tmp_path, size=8)
    assert torch.equal(source[0]["image"], torch.from_numpy(pixels[..., 0].copy()).expand(3, 8, 8))
    assert torch.equal(source[1]["image"], torch.from_numpy(pixels[..., :3].transpose(2, 0, 1).copy()))
    assert open_source(tmp_path, size=5)[0]["image"].shape == (3, 5, 5)
    for idx, name in ((2, "cut"), (3, "no")):
        with pytest.raises(StorageError, match=rf"a/x_{name}\.jpg cannot be read as an image: .* Repair, convert or remove it"):
            source[idx]


def test_size_is_for_images(tmp_path):
    write_files(tmp_path, {"a.npy": array(NUMBERS), "1.jpg": b"1"})
    with pytest.raises(StorageError, match=r"a\.npy is not a folder of images, and size=8 is for images. Leave it out"):
        open_source(tmp_path / "a.npy", size=8)
    with pytest.raises(LimitError, match=r"is not the size of an image\. Use 1 or more pixels"):
        open_source(tmp_path, size=0)


def test_a_file_that_is_empty_or_gone_is_named(tmp_path):
    source = open_source(write_files(tmp_path, {"old/empty.jpg": b"", "old/gone.jpg": b"x"}))
    (tmp_path / "old" / "gone.jpg").unlink()
    for idx, problem in enumerate((r"empty\.jpg cannot be read as an image: it is empty", r"gone\.jpg .*No such file")):
        with pytest.raises(StorageError, match=problem):
            source[idx]


def test_a_table_that_was_edited_is_read_again(tmp_path):
    library("datasets")
    for time, text in ((1, "one"), (2, "two")):
        (tmp_path / "t.csv").write_text(f"a\n{text}\n")
        os.utime(tmp_path / "t.csv", ns=(time * 10**9, time * 10**9))
        assert list(open_source(tmp_path / "t.csv")) == [{"a": text}]


@pytest.mark.parametrize(("files", "name", "message"), [
    ({}, "nothing", r"nothing does not exist\. Accepted: a folder of images, .*\.npy"),
    ({"a.txt": b"x"}, "a.txt", r"a\.txt is not a file that can be prepared\. Accepted: a folder of images"),
    ({"a.txt": b"x"}, "", r"holds no images \(\.jpg, .*\)\. Accepted: "),
    ({"a/1.jpg": b"x", "b/notes": b"x"}, "", "the folder 'b' would be a class, but holds no images. Remove it"),
    ({"a/1.jpg": b"x", "2.jpg": b"x"}, "", r"holds images, such as '2\.jpg', beside the folder 'a'.*, or none"),
    ({"t.csv": b"a,b\n1,2\n1,2,3\n"}, "t.csv", "cannot be read as a table: .*Expected 2 fields in line 3, saw 3.* remove it"),
    ({"a.npy": array(np.array([{}, 1], dtype=object))}, "a.npy", "cannot be read as an array: .*Python objects"),
    ({"a.npy": array(np.float32(1))}, "a.npy", "one value without dimensions. Give an array with a row for each sample"),
    ({"a.npy": array(np.zeros((0, 3)))}, "a.npy", "holds no samples"),
    ({"t.parquet": b"x"}, "", "cannot be read as a table"),
    ({"state.json": b"{}", "dataset_info.json": b"{}"}, "", "cannot be read as a Hugging Face dataset"),
])  # fmt: skip
def test_what_is_no_source_is_refused(tmp_path, files, name, message):
    if {"t.csv", "t.jsonl", "t.parquet", "state.json"} & files.keys():
        library("datasets")
    write_files(tmp_path, files)
    with pytest.raises(StorageError, match=f"(?s){message}"):
        open_source(tmp_path / name)


@pytest.mark.parametrize(("files", "options", "message"), [
    ({"1.jpg": b"x"}, {"size": 8}, r"needs PIL: pip install 'stocache\[bench\]'"),
    ({"t.parquet": b""}, {}, "this source needs datasets: pip install datasets"),
    ({"state.json": b"{}", "dataset_info.json": b"{}"}, {}, "this source needs datasets: pip install datasets"),
])  # fmt: skip
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, files, options, message):
    for name in ("PIL", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StorageError, match=message):
        open_source(write_files(tmp_path, files), **options)
