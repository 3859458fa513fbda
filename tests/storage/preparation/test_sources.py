"""Files and folders as datasets: what they give, how they are read, and what is refused."""

import io
import os
import pickle
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from stocache import LimitError, SampleIndexError, StorageError
from stocache.storage.preparation.sources import open_source
from tests.support.equality import same
from tests.support.preparing import prepare_quietly

BYTES = {"cat/1.jpg": b"one", "cat/old/0.PNG": b"two", "cat-1/x.webp": b"three", "dog/y.jpeg": b"four"}


def library(name):
    """A library, or one of its modules; the test is skipped where it is not installed."""
    pytest.importorskip("datasets.arrow_dataset" if name == "datasets" else name, reason="comes with the extra test")
    return sys.modules[name]  # there is a folder "datasets" beside these tests, too


def write_files(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def classes(folder):
    write_files(folder / "photos", BYTES | {".hidden/a.jpg": b"x", "cat/._1.jpg": b"x", "cat/notes.txt": b"x"})
    order = [("cat/1.jpg", 0), ("cat/old/0.PNG", 0), ("cat-1/x.webp", 1), ("dog/y.jpeg", 2)]  # cat before cat-1
    samples = [{"image": BYTES[name], "name": name, "label": label} for name, label in order]
    return folder / "photos", samples, {"classes": ["cat", "cat-1", "dog"]}


def images(folder):
    write_files(folder / "flat", {"b.jpg": b"b", "a.jpg": b"a"})
    return folder / "flat", [{"image": b"a", "name": "a.jpg"}, {"image": b"b", "name": "b.jpg"}], {"classes": []}


def odd_names(folder):
    """A link to a folder that it lies in, and a name that is not UTF-8."""
    write_files(folder / "odd", {"cats/1.jpg": b"1", os.fsdecode(b"cats/caf\xe9.jpg"): b"2"})
    (folder / "odd" / "cats" / "again").symlink_to(folder / "odd", target_is_directory=True)
    samples = [{"image": b"1", "name": "cats/1.jpg", "label": 0}, {"image": b"2", "name": "cats/caf\\xe9.jpg", "label": 0}]
    return folder / "odd", samples, {"classes": ["cats"]}


def table(folder):
    library("datasets")
    text = '\ufeffn,x,text,code\r\n1,.5,"a ""b"",\r\nc",A7\r\n\r\n-2,1e3,é,12\r\n'
    (folder / "t.csv").write_bytes(text.encode())
    samples = [{"n": 1, "x": 0.5, "text": 'a "b",\r\nc', "code": "A7"}, {"n": -2, "x": 1000.0, "text": "é", "code": "12"}]
    return folder / "t.csv", samples, columns(n="int64", x="float64", text="large_string", code="large_string")


def tabs(folder):
    library("datasets")
    (folder / "t.TSV").write_text('a\tb,c\n1\t\n2.5\t"say ""hi"""')
    samples = [{"a": 1.0, "b,c": ""}, {"a": 2.5, "b,c": 'say "hi"'}]
    return folder / "t.TSV", samples, columns(**{"a": "float64", "b,c": "large_string"})


def lines(folder):
    library("datasets")
    (folder / "t.jsonl").write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": null}\n')
    return folder / "t.jsonl", [{"a": 1, "b": "x"}, {"a": 2, "b": None}], columns(a="int64", b="string")


def columns(**kinds):
    features = {name: {"dtype": kind, "_type": "Value"} for name, kind in kinds.items()}
    return {"columns": list(kinds), "features": features}


def rows(folder, array=None):
    array = np.arange(24, dtype=np.float32).reshape(4, 3, 2) if array is None else array
    np.save(folder / "a.npy", array)
    return folder / "a.npy", list(array), {}


def numbers(folder):
    return rows(folder, np.arange(4, dtype=np.int16))


ROWS = [{"a": n if n % 3 else None, "s": f"row {n}", "list": [n] * (n % 4), "raw": bytes([n]) * n} for n in range(25)]


def parquets(folder, groups=4, parts=(ROWS[:10], [], ROWS[10:])):
    arrow, write_table = library("pyarrow"), library("pyarrow.parquet").write_table
    library("datasets")
    (folder / "parts").mkdir()
    for number, part in enumerate(parts):
        schema = arrow.Table.from_pylist(ROWS).schema
        write_table(arrow.Table.from_pylist(part, schema), folder / "parts" / f"{number}.parquet", row_group_size=groups)
    info = columns(a="int64", s="string", list="", raw="binary")
    info["features"]["list"] = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
    return folder / "parts", ROWS, info


def parquet(folder):
    path, samples, info = parquets(folder, 7, [ROWS])
    return path / "0.parquet", samples, info


def saved(folder):
    datasets = library("datasets")
    datasets.disable_progress_bars()
    samples = [{"text": text, "label": number} for number, text in enumerate(["a", None, "bc"])]
    dataset = datasets.Dataset.from_list(samples)
    dataset.save_to_disk(folder / "saved")
    return folder / "saved", samples, {"columns": ["text", "label"], "features": dataset.features.to_dict()}


@pytest.mark.parametrize("make", [classes, images, odd_names, table, tabs, lines, rows, numbers, parquet, parquets, saved])
def test_a_source_gives_its_samples_and_its_info_and_is_prepared_as_it_is(make, tmp_path):
    path, samples, info = make(tmp_path)
    source = open_source(path)
    assert len(source) == len(samples)
    assert same(list(source), samples)
    assert same(source[len(samples) - 1], samples[-1])
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
        assert storage.load_dataset_info() == info


def test_workers_read_sources_that_their_parent_reads(tmp_path):
    made = [make(tmp_path) for make in (classes, table, rows, parquet)]
    dataset = ConcatDataset([open_source(path) for path, _, _ in made])
    samples = [sample for _, samples, _ in made for sample in samples]
    assert same(list(dataset), samples)
    options = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": None, "collate_fn": lambda sample: sample}
    assert same(list(DataLoader(dataset, **options)), samples)
    assert same(list(dataset), samples)


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


def test_size_is_for_images_and_needs_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    path = images(tmp_path)[0]
    assert len(open_source(path)) == 2
    with pytest.raises(StorageError, match=r"needs PIL: pip install 'stocache\[bench\]'"):
        open_source(path, size=8)
    with pytest.raises(StorageError, match=r"t\.csv is not a folder of images, and size=8 is for images. Leave it out"):
        open_source(table(tmp_path)[0], size=8)
    for size in (0, -1, 1.5, True):
        with pytest.raises(LimitError, match=r"is not the size of an image. Use 1 or more pixels"):
            open_source(path, size=size)


def test_a_file_that_is_empty_or_gone_and_a_folder_that_cannot_be_listed_are_named(tmp_path, monkeypatch):
    source = open_source(write_files(tmp_path / "a", {"empty.jpg": b"", "gone.jpg": b"x"}))
    (tmp_path / "a" / "gone.jpg").unlink()
    for idx, problem in enumerate((r"empty\.jpg cannot be read as an image: it is empty", r"gone\.jpg .*No such file")):
        with pytest.raises(StorageError, match=problem):
            source[idx]
    path, scandir = classes(tmp_path)[0], os.scandir
    monkeypatch.setattr(os, "scandir", lambda top: scandir(str(top).replace("cat/old", "gone")))
    with pytest.raises(StorageError, match=r"photos cannot be read as a folder of images: .*No such file.*/gone"):
        open_source(path)


def test_cells_of_a_table_are_numbers_if_all_of_a_column_are(tmp_path):
    library("datasets")
    (tmp_path / "t.csv").write_text("id,price,size,code,nothing\n1,2,1.5,007,\n2,,-2,NA,\n3,4.5,1e3,x,\n")
    rows = [(1, "2", 1.5, "007", ""), (2, "", -2.0, "NA", ""), (3, "4.5", 1000.0, "x", "")]
    names = ("id", "price", "size", "code", "nothing")
    assert same(list(open_source(tmp_path / "t.csv")), [dict(zip(names, row, strict=True)) for row in rows])


def test_a_table_that_was_edited_is_read_again(tmp_path):
    library("datasets")
    for time, text in ((1, "one"), (2, "two")):
        (tmp_path / "t.csv").write_text(f"a\n{text}\n")
        os.utime(tmp_path / "t.csv", ns=(time * 10**9, time * 10**9))
        assert list(open_source(tmp_path / "t.csv")) == [{"a": text}]


def test_other_columns_in_another_file_are_an_error(tmp_path):
    arrow, write_table = library("pyarrow"), library("pyarrow.parquet").write_table
    library("datasets")
    write_table(arrow.table({"a": list(range(1000))}), tmp_path / "1.parquet")
    write_table(arrow.table({"b": [1]}), tmp_path / "2.parquet")
    with pytest.raises(StorageError, match=r"cannot be read as a table: (?s:.*)column names"):
        open_source(tmp_path)
    write_table(arrow.table({"b": []}), tmp_path / "2.parquet")
    with pytest.raises(StorageError, match=r"2\.parquet (cannot be read as a table|holds no samples)"):
        open_source(tmp_path / "2.parquet")


def test_images_of_a_saved_dataset_stay_encoded_and_of_several_datasets_one_must_be_chosen(tmp_path):
    datasets, image = library("datasets"), library("PIL.Image")
    datasets.disable_progress_bars()
    image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    dataset = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "saved")
    with pytest.raises(StorageError, match=r"holds several datasets. Give one of them: .*/ and one of test, train"):
        open_source(tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "train")
    assert source[0]["image"]["bytes"] == (tmp_path / "a.png").read_bytes()
    assert source.info["features"]["image"]["decode"] is False


def array(value):
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


@pytest.mark.parametrize(("files", "name", "message"), [
    ({}, "nothing", r"nothing does not exist\. Accepted: a folder of images, .*\.npy"),
    ({"a.txt": b"x"}, "a.txt", r"a\.txt is not a file that can be prepared\. Accepted: a folder of images"),
    ({"a.txt": b"x"}, "", r"holds no images \(\.jpg, .*\)\. Accepted: "), ({}, "", r"holds no images"),
    ({"a/1.jpg": b"x", "b/notes": b"x"}, "", "the folder 'b' would be a class, but holds no images. Remove it"),
    ({"a/1.jpg": b"x", "2.jpg": b"x"}, "", r"holds images, such as '2\.jpg', beside the folder 'a'.*, or none"),
    ({"t.csv": b""}, "t.csv", "cannot be read as a table"), ({"t.csv": b"a,b\n\n"}, "t.csv", "cannot be read as a table"),
    ({"t.csv": b"a,b\n1,2\n1,2,3\n"}, "t.csv", "cannot be read as a table: .*Expected 2 fields in line 3, saw 3.* remove it"),
    ({"t.csv": b'a,b\n1,"2\n3,4\n'}, "t.csv", "EOF inside string"), ({"t.jsonl": b"{"}, "t.jsonl", "JSON parse error"),
    ({"t.csv": "a\né".encode("latin-1")}, "t.csv", "'utf-8' codec can't decode"),
    ({"a.npy": array(np.array([{}, 1], dtype=object))}, "a.npy", "cannot be read as an array: .*Python objects"),
    ({"a.npy": array(np.zeros(10))[:-1]}, "a.npy", "cannot be read as an array"),
    ({"a.npy": b"x"}, "a.npy", "cannot be read as an array"),
    ({"a.npy": array(np.float32(1))}, "a.npy", "one value without dimensions. Give an array with a row for each sample"),
    ({"a.npy": array(np.zeros((0, 3)))}, "a.npy", "holds no samples"),
    ({"t.parquet": b"x"}, "t.parquet", "cannot be read as a table"), ({"t.parquet": b"x"}, "", "cannot be read as a table"),
    ({"state.json": b"{}", "dataset_info.json": b"{}"}, "", "cannot be read as a Hugging Face dataset"),
])  # fmt: skip
def test_what_is_no_source_is_refused(tmp_path, files, name, message):
    if {"t.csv", "t.jsonl", "t.parquet", "state.json"} & files.keys():
        library("datasets")
    write_files(tmp_path, files)
    with pytest.raises(StorageError, match=f"(?s){message}"):
        open_source(tmp_path / name)


@pytest.mark.parametrize("files", [{"t.parquet": b""}, {"state.json": b"{}", "dataset_info.json": b"{}"}])
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, files):
    write_files(tmp_path, files)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(StorageError, match="this source needs datasets: pip install datasets"):
        open_source(tmp_path)
