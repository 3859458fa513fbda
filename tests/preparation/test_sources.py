import csv
import io
import os
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader

from stocache import LimitError, SampleIndexError, StorageError, prepare
from stocache.preparation.sources import InOrder, open_source

BYTES = {"cat/1.jpg": b"one", "cat/old/0.PNG": b"two", "cat-1/x.webp": b"three", "dog/y.jpeg": b"four"}


def equal(sample, other):
    """Whether two samples are the same, in types and values."""
    if type(sample) is not type(other):
        return False
    if isinstance(sample, dict):
        return list(sample) == list(other) and all(equal(sample[key], other[key]) for key in sample)
    if isinstance(sample, np.ndarray | np.generic):
        return sample.dtype == other.dtype and np.array_equal(sample, other)
    return sample == other


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


def table(folder):
    text = '\ufeffn,x,text,code\r\n1,.5,"a ""b"",\r\nc",007\r\n\r\n-2,1e3,é,12\r\n'
    (folder / "t.csv").write_bytes(text.encode())
    samples = [{"n": 1, "x": 0.5, "text": 'a "b",\r\nc', "code": "007"}, {"n": -2, "x": 1000.0, "text": "é", "code": "12"}]
    return folder / "t.csv", samples, {"columns": ["n", "x", "text", "code"]}


def tabs(folder):
    (folder / "t.TSV").write_text('a\tb,c\n1\t\n2.5\tsay "hi"')
    return folder / "t.TSV", [{"a": 1.0, "b,c": ""}, {"a": 2.5, "b,c": 'say "hi"'}], {"columns": ["a", "b,c"]}


def rows(folder):
    array = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    np.save(folder / "a.npy", array)
    return folder / "a.npy", list(array), {}


def numbers(folder):
    array = np.asfortranarray(np.arange(4, dtype=np.int16))
    np.save(folder / "n.npy", array)
    return folder / "n.npy", list(array), {}


ROWS = [{"a": n if n % 3 else None, "s": f"row {n}", "list": [n] * (n % 4), "raw": bytes([n]) * n} for n in range(25)]


def parquet(folder):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra test")
    from pyarrow.parquet import write_table

    write_table(arrow.Table.from_pylist(ROWS), folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet", ROWS, {"columns": ["a", "s", "list", "raw"]}


def parquets(folder):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra test")
    from pyarrow.parquet import write_table

    (folder / "parts").mkdir()
    for number, part in enumerate((ROWS[:10], [], ROWS[10:])):
        schema = arrow.Table.from_pylist(ROWS).schema
        write_table(arrow.Table.from_pylist(part, schema), folder / "parts" / f"{number}.parquet", row_group_size=4)
    return folder / "parts", ROWS, {"columns": ["a", "s", "list", "raw"]}


def saved(folder):
    datasets = pytest.importorskip("datasets", reason="comes with the extra test")
    datasets.disable_progress_bars()
    samples = [{"text": text, "label": number} for number, text in enumerate(["a", None, "bc"])]
    dataset = datasets.Dataset.from_list(samples)
    dataset.save_to_disk(folder / "saved")
    return folder / "saved", samples, {"columns": ["text", "label"], "features": dataset.features.to_dict()}


ALL = (classes, images, table, tabs, rows, numbers, parquet, parquets, saved)


@pytest.fixture(params=ALL, ids=lambda make: make.__name__)
def made(request, tmp_path):
    path, samples, info = request.param(tmp_path)
    return open_source(path), samples, info


def test_a_source_gives_its_samples_and_its_info(made):
    source, samples, info = made
    assert len(source) == len(samples)
    assert all(map(equal, source, samples))
    assert equal(source[len(samples) - 1], samples[-1])
    assert source.info == info


def test_a_source_refuses_indices_it_does_not_have(made):
    source, samples, _ = made
    for idx in (len(samples), -1):
        with pytest.raises(SampleIndexError, match="outside the dataset"):
            source[idx]


@pytest.mark.parametrize("make", [parquet, parquets, saved])
def test_a_source_gives_many_at_once_in_any_order(make, tmp_path):
    path, samples, _ = make(tmp_path)
    source = open_source(path)
    for order in (range(len(samples)), np.random.default_rng(0).integers(0, len(samples), 40), []):
        assert all(map(equal, source.__getitems__(list(order)), [samples[idx] for idx in order]))


def test_a_source_that_was_used_pickles(made):
    source, samples, _ = made
    source[0]
    assert all(map(equal, pickle.loads(pickle.dumps(source)), samples))


def test_a_source_is_prepared_as_it_is(made, tmp_path):
    source, samples, info = made
    with prepare(source, tmp_path / "out", info=source.info, block_size=3, progress=False) as storage:
        assert all(equal(storage.load_sample(idx), sample) for idx, sample in enumerate(samples))
        assert storage.load_dataset_info() == info


def _first(batch):
    return batch[0]


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
def test_workers_read_sources_that_their_parent_reads(start_method, tmp_path):
    made = [make(tmp_path) for make in ALL]
    dataset = ConcatDataset([open_source(path) for path, _, _ in made])
    samples = [sample for _, samples, _ in made for sample in samples]
    assert all(map(equal, dataset, samples))
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context=start_method, collate_fn=_first)
    assert all(map(equal, list(loader), samples))
    assert all(map(equal, dataset, samples))


def test_samples_of_an_array_are_the_callers(tmp_path):
    source = open_source(rows(tmp_path)[0])
    sample = source[1]
    sample[:] = 0
    assert type(sample) is np.ndarray
    assert source[1].any()


def test_pickles_do_not_hold_the_array(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(100_000))
    source = open_source(tmp_path / "a.npy")
    source[0]
    assert len(pickle.dumps(source)) < 1000


# ---------------------------------------------------------------------------------------------------- images


def test_size_decodes_images(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    image.fromarray(pixels).save(tmp_path / "a" / "rgba.png")
    image.fromarray(pixels[..., 0]).save(tmp_path / "a" / "grey.bmp")
    grey, rgb = open_source(tmp_path, size=8)
    assert torch.equal(rgb["image"], torch.from_numpy(pixels[..., :3].transpose(2, 0, 1).copy()))
    assert torch.equal(grey["image"], torch.from_numpy(pixels[..., 0].copy()).expand(3, 8, 8))
    assert open_source(tmp_path, size=5)[0]["image"].shape == (3, 5, 5)


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
    file = io.BytesIO()
    image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file, "jpeg")
    write_files(tmp_path, {"a/no.jpg": b"no image", "a/cut.jpg": file.getvalue()[:1000]})
    source = open_source(tmp_path, size=8)
    for idx, name in enumerate(["cut", "no"]):
        with pytest.raises(StorageError, match=rf"a/{name}\.jpg cannot be read as an image: .* Repair, convert or remove it"):
            source[idx]


def test_size_needs_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    path = images(tmp_path)[0]
    assert len(open_source(path)) == 2
    with pytest.raises(StorageError, match=r"needs PIL: pip install 'stocache\[bench\]'"):
        open_source(path, size=8)


def test_a_file_that_is_empty_or_gone_is_named(tmp_path):
    write_files(tmp_path, {"empty.jpg": b"", "gone.jpg": b"x"})
    source = open_source(tmp_path)
    (tmp_path / "gone.jpg").unlink()
    with pytest.raises(StorageError, match=r"empty\.jpg cannot be read as an image: it is empty"):
        source[0]
    with pytest.raises(StorageError, match=r"gone\.jpg cannot be read as an image: .*No such file"):
        source[1]


def test_a_folder_that_cannot_be_listed_is_no_folder_without_images(tmp_path, monkeypatch):
    path, scandir = classes(tmp_path)[0], os.scandir
    monkeypatch.setattr(os, "scandir", lambda top: scandir(str(top).replace("cat/old", "gone")))
    with pytest.raises(StorageError, match=r"photos cannot be read as a folder of images: .*No such file.*/gone"):
        open_source(path)


# ---------------------------------------------------------------------------------------------------- tables

_CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


@given(st.lists(st.tuples(_CELLS, _CELLS), min_size=1), st.sampled_from(["csv", "tsv"]))
def test_cells_come_back_as_csv_reads_them(tmp_path_factory, cells, suffix):
    path = tmp_path_factory.mktemp("table") / f"t.{suffix}"
    delimiter = {"csv": ",", "tsv": "\t"}[suffix]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([("a", "b"), *cells, ("text", "text")])  # so all are str
    with path.open(newline="", encoding="utf-8") as file:
        expected = list(csv.DictReader(file, delimiter=delimiter))
    assert list(open_source(path)) == expected


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["1", str(2**70)], [1, 2**70]),
        (["1", "2.0", "-.5", "3.", "1E-3"], [1.0, 2.0, -0.5, 3.0, 0.001]),
        (["inf", "-INF", "1"], [float("inf"), float("-inf"), 1.0]),
        (["1", "x"], ["1", "x"]),
        (["1", '""'], ["1", ""]),
        (["1", " 2"], ["1", " 2"]),
        (["1_000"], ["1_000"]),
        (["007", "1"], ["007", "1"]),
        (["+49", "1"], ["+49", "1"]),
        (["007.5"], ["007.5"]),
        (["."], ["."]),
        (["٣"], ["٣"]),
    ],
)
def test_a_column_is_numbers_when_all_of_it_comes_back_as_them(tmp_path, cells, values):
    (tmp_path / "t.csv").write_text("\n".join(["a", *cells]), encoding="utf-8")
    source = open_source(tmp_path / "t.csv")
    assert all(equal(sample, {"a": value}) for sample, value in zip(source, values, strict=True))


def test_long_cells_are_read_and_the_limit_of_csv_stays(tmp_path):
    (tmp_path / "t.csv").write_text("a\n" + "x" * 200_000)
    limit = csv.field_size_limit()
    assert len(open_source(tmp_path / "t.csv")[0]["a"]) == 200_000
    assert csv.field_size_limit() == limit


def test_a_table_that_was_cut_meanwhile_is_named(tmp_path):
    path, _, _ = table(tmp_path)
    source = open_source(path)
    path.write_text("n\n")
    with pytest.raises(StorageError, match=r"t\.csv cannot be read as a table: it is cut"):
        source[1]


# ---------------------------------------------------------------------------------------------------- parquet


def test_row_groups_are_read_once_in_order_and_once_for_many(tmp_path, monkeypatch):
    path, samples, _ = parquet(tmp_path)
    from pyarrow.parquet import ParquetFile

    read, groups = ParquetFile.read_row_group, []
    monkeypatch.setattr(
        ParquetFile, "read_row_group", lambda file, group, **kw: groups.append(group) or read(file, group, **kw)
    )
    source = open_source(path)
    assert list(source) == samples
    assert groups == [0, 1, 2, 3]
    del groups[:]
    source.__getitems__([20, 3, 19, 0, 20])
    assert groups == [0, 2]
    assert len(pickle.dumps(source)) < 5000


def test_in_order_yields_what_random_access_gives(tmp_path):
    path, samples, info = parquet(tmp_path)
    source = open_source(path)
    outs = [
        prepare(InOrder(source), tmp_path / "1", shuffle_seed=1, block_size=4, progress=False),
        prepare(source, tmp_path / "2", shuffle_seed=1, block_size=4, info=info, progress=False),
    ]
    assert [[out.load_sample(idx) for idx in range(len(samples))] for out in outs] == [
        [samples[idx] for idx in np.random.default_rng(1).permutation(len(samples))]
    ] * 2
    assert outs[0].load_dataset_info() == info


def test_damage_of_a_row_group_is_named(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra test")
    from pyarrow.parquet import write_table

    path = tmp_path / "t.parquet"
    write_table(arrow.table({"a": list(range(1000))}), path)
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(1000) + data[1004:])
    with pytest.raises(StorageError, match=r"t\.parquet cannot be read as parquet"):
        open_source(path)[0]


# ---------------------------------------------------------------------------------------------------- Hugging Face


def test_images_of_a_saved_dataset_stay_encoded(tmp_path):
    datasets = pytest.importorskip("datasets", reason="comes with the extra test")
    image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
    datasets.disable_progress_bars()
    image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    dataset = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}).cast_column("image", datasets.Image())
    dataset.save_to_disk(tmp_path / "saved")
    source = open_source(tmp_path / "saved")
    assert source[0]["image"]["bytes"] == (tmp_path / "a.png").read_bytes()
    assert source.info["features"]["image"]["decode"] is False


def test_of_several_datasets_one_must_be_chosen(tmp_path):
    datasets = pytest.importorskip("datasets", reason="comes with the extra test")
    datasets.disable_progress_bars()
    one = datasets.Dataset.from_dict({"a": [1]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path)
    with pytest.raises(StorageError, match=r"holds several datasets. Give one of them: .*/ and one of test, train"):
        open_source(tmp_path)
    assert open_source(tmp_path / "test")[0] == {"a": 1}


# ---------------------------------------------------------------------------------------------------- what is none


def array(value):
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "nothing", r"nothing does not exist\. Accepted: a folder of images, .*\.npy"),
        ({"a.txt": b"x"}, "a.txt", r"a\.txt is not a file that can be prepared\. Accepted: a folder of images"),
        ({"a.txt": b"x"}, "", r"holds no images \(\.jpg, .*\)\. Accepted: "),
        ({}, "", r"holds no images"),
        ({"a/1.jpg": b"x", "b/notes": b"x"}, "", "the folder 'b' would be a class, but holds no images. Remove it"),
        ({"a/1.jpg": b"x", "2.jpg": b"x"}, "", r"holds images, such as '2\.jpg', beside the folder 'a'.*, or none"),
        ({"t.csv": b""}, "t.csv", "holds no samples"),
        ({"t.csv": b"a,b\n\n"}, "t.csv", "holds no samples"),
        ({"t.csv": b"a,b\n1,2\n3\n"}, "t.csv", "line 3: 1 cells, in a table of 2 columns. Repair, convert or remove it"),
        ({"t.csv": b"a,b\n1,2,3\n"}, "t.csv", "line 2: 3 cells, in a table of 2 columns"),
        ({"t.csv": b"a,b,a\n1,2,3\n"}, "t.csv", "it has two columns 'a'"),
        ({"t.csv": b'a,b\n1,"2\n3,4\n'}, "t.csv", "line 3: unexpected end of data"),
        ({"t.csv": "a\né".encode("latin-1")}, "t.csv", "'utf-8' codec can't decode"),
        ({"a.npy": array(np.array([{}, 1], dtype=object))}, "a.npy", "cannot be read as an array: .*Python objects"),
        ({"a.npy": array(np.zeros(10))[:-1]}, "a.npy", "cannot be read as an array"),
        ({"a.npy": b"x"}, "a.npy", "cannot be read as an array"),
        ({"a.npy": array(np.float32(1))}, "a.npy", "one value without dimensions. Give an array with a row for each sample"),
        ({"a.npy": array(np.zeros((0, 3)))}, "a.npy", "holds no samples"),
        ({"t.parquet": b"x"}, "t.parquet", "cannot be read as parquet"),
        ({"t.parquet": b"x"}, "", "cannot be read as parquet"),
        ({"state.json": b"{}", "dataset_info.json": b"{}"}, "", "cannot be read as a Hugging Face dataset"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path, files, name, message):
    if library := {"t.parquet": "pyarrow", "state.json": "datasets"}.get(next(iter(files), "")):
        pytest.importorskip(library, reason="comes with the extra test")
    write_files(tmp_path, files)
    with pytest.raises(StorageError, match=f"(?s){message}"):
        open_source(tmp_path / name)


def test_parquet_files_of_one_folder_have_one_set_of_columns(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra test")
    from pyarrow.parquet import write_table

    write_table(arrow.table({"a": [1]}), tmp_path / "1.parquet")
    write_table(arrow.table({"b": [1]}), tmp_path / "2.parquet")
    with pytest.raises(StorageError, match=r"2\.parquet cannot .*: its columns are \['b'\], those of .*1\.parquet are \['a'\]"):
        open_source(tmp_path)
    write_table(arrow.table({"b": []}), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").unlink()
    with pytest.raises(StorageError, match="holds no samples"):
        open_source(tmp_path)


@pytest.mark.parametrize(("make", "library"), [(parquet, "pyarrow"), (saved, "datasets")])
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, make, library):
    path = make(tmp_path)[0]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.parquet", None)
    with pytest.raises(StorageError, match=f"this source needs {library}: pip install {library}"):
        open_source(path)


def test_size_is_for_images(tmp_path):
    path = table(tmp_path)[0]
    with pytest.raises(StorageError, match=r"t\.csv is not a folder of images, and size=8 is for images. Leave it out"):
        open_source(path, size=8)
    for size in (0, -1, 1.5, True):
        with pytest.raises(LimitError, match=r"is not the size of an image. Use 1 or more pixels"):
            open_source(path, size=size)


@pytest.mark.parametrize("nan", [False, True])
def test_blank_cells_are_str_or_nan_and_a_warning_says_so(tmp_path, caplog, nan):
    (tmp_path / "t.csv").write_text("id,price,name,nothing\n1,2,a,\n2,,,\n3,4.5,c,\n")
    with prepare(open_source(tmp_path / "t.csv", nan=nan), tmp_path / "out", progress=False) as storage:
        first, second, third = (storage.load_sample(row) for row in range(3))
    if nan:
        assert (first["price"], third["price"]) == (2.0, 4.5)
        assert second["price"] != second["price"]
        assert not caplog.records
    else:
        assert [row["price"] for row in (first, second, third)] == ["2", "", "4.5"]
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path}/t.csv: the column 'price' holds numbers and blank cells (1 of 3), so it is str. With nan=True, --nan, "
            f"these are NaN."
        ]
    assert [row["id"] for row in (first, second, third)] == [1, 2, 3]
    assert [row["name"] for row in (first, second, third)] == ["a", "", "c"]
    assert second["nothing"] == ""
    with pytest.raises(StorageError, match="blank cells of the source"):
        prepare(open_source(tmp_path / "t.csv", nan=not nan), tmp_path / "out", progress=False)
