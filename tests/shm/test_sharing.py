"""What is shared is read as before, is one copy for all processes, and is never changed for others."""

import copy
import enum
import gc
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import stocache
from stocache import SampleError, share
from stocache.shm.tables import sequences, sharing
from stocache.system import limits
from tests.support.equality import same
from tests.support.processes import in_child, run_all

LISTS = [
    [f"images/{number:06}.jpg" * (number % 3) for number in range(1000)], [b"", b"\x00ab", b"c" * 5000], ["ä€\udc80", "", "x"],
    [Path("a/b"), Path("c")], list(range(-500, 500)), [0.5, -0.0, float("inf"), 1e300], [True, False, True], [], ["one"],
    [-(2**63), 2**63 - 1],
]  # fmt: skip


@pytest.mark.parametrize("items", LISTS, ids=lambda items: f"{type(items[0] if items else None).__name__}-{len(items)}")
def test_a_list_is_indexed_sliced_and_walked_as_before(items):
    shared = share(items)
    assert len(shared) == len(items)
    assert list(shared) == items == shared
    assert [type(item) for item in shared] == [type(item) for item in items]
    for index in (slice(None), slice(1, -1), slice(None, None, -2), slice(5, 2)):
        assert shared[index] == items[index]
    for number in (0, -1, len(items) - 1, len(items) // 2) if items else ():
        assert shared[number] == items[number]
        assert shared[np.int64(number)] == items[number]
    for number in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            shared[number]
    with pytest.raises(TypeError):
        shared[0] = items
    assert list(reversed(shared)) == items[::-1]
    assert bool(shared) == bool(items)
    assert (shared == [*items, 1], shared == tuple(items), shared != items) == (False, True, False)
    if items:
        assert items[-1] in shared
        assert shared.index(items[-1]) == items.index(items[-1])
    assert len(ForkingPickler.dumps(shared)) <= 200
    assert pickle.loads(pickle.dumps(shared)) == items
    assert share(shared) is shared
    assert repr(shared).startswith(f"<shared list of {len(items)}")


def test_a_dict_is_looked_up_as_before(monkeypatch):
    for items in ({f"k{number}": number for number in range(500)}, {number: str(number) for number in range(-5, 300)}, {},
                  {0.5: b"x", 2.0: b"y"}, {Path("a"): 1.5}):  # fmt: skip
        shared = share(items)
        assert dict(shared) == items == shared
        assert list(shared) == list(items)
        assert [shared[key] for key in items] == list(items.values())
        assert (shared.get("no"), "no" in shared, [1] in [shared], None in shared) == (None, False, False, False)
        with pytest.raises(KeyError):
            shared["no"]
        assert pickle.loads(pickle.dumps(shared)) == items
    assert share({1: "a", 2: "b"})[1.0] == "a"
    assert share({2.0: "a"})[2] == "a"
    monkeypatch.setattr(sequences, "xxh3_64_intdigest", lambda text: 7)
    assert dict(share({"a": 1, "b": 2, "c": 3})) == {"a": 1, "b": 2, "c": 3}


ARRAYS = [
    np.arange(24).reshape(2, 3, 4), np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.zeros((0, 3)), np.array(5),
    np.array(["a", "bcd"]), np.arange(10)[::-2], np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), np.array([1 + 2j]),
    np.array(["2020-01-01"], "M8[D]"), np.zeros(2, [("a", [("b", "i8")])]),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}".replace("[", "").replace("]", ""))
def test_an_array_is_read_only_and_what_is_made_of_it_is_ordinary(array):
    shared = share(array)
    assert same(np.asarray(shared), array)
    assert shared.dtype == array.dtype
    assert not shared.flags.writeable
    copied = pickle.loads(pickle.dumps(shared))
    assert np.array_equal(copied, array)
    assert type(copied) is sharing.SharedArray
    assert len(pickle.dumps(shared)) <= 250 + 50 * len(array.dtype.names or ())
    if array.size:
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(shared)[(0,) * array.ndim] = array[(0,) * array.ndim]
        assert type(shared[..., :1] if array.ndim else shared[()]) is not sharing.SharedArray
    if array.dtype.kind in "if":
        assert type(shared + 1) is not sharing.SharedArray
        assert np.array_equal(shared + 1, array + 1)
        assert shared.sum() == array.sum()


@pytest.mark.parametrize("tensor", [
    torch.arange(24).view(2, 3, 4), torch.zeros(0, 2), torch.tensor(1.5), torch.arange(12.0).view(3, 4).T, torch.tensor([True]),
    torch.ones(3, dtype=torch.bfloat16),
], ids=str)  # fmt: skip
def test_a_tensor_is_written_to_for_one_process_alone(tensor):
    shared = share(tensor)
    assert torch.equal(shared, tensor)
    assert type(shared + 0) is type(shared[...]) is torch.Tensor
    copied = pickle.loads(bytes(ForkingPickler.dumps(shared)))
    assert len(ForkingPickler.dumps(shared)) <= 250
    if tensor.numel():
        assert in_child(shared.fill_, 0) == 0
        shared.fill_(1)
    assert torch.equal(copied, tensor)


class Files(Dataset):
    def __init__(self):
        self.paths = [f"folder/{number:09}.jpg" for number in range(30_000)]
        self.labels = np.arange(200_000)
        self.objects = [object()] * 200_000
        self.small = ["a", "b"]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, idx):
        return self.paths[idx], int(self.labels[idx])


def test_a_dataset_is_copied_with_its_large_tables_shared_and_stays_as_it_was():
    dataset = Files()
    before = dict(vars(dataset))
    shared = share(dataset)
    assert vars(dataset) == before
    assert [shared[idx] for idx in range(0, 30_000, 997)] == [dataset[idx] for idx in range(0, 30_000, 997)]
    assert type(shared) is Files
    assert (shared.small, shared.objects) == (dataset.small, dataset.objects)
    del shared.objects
    assert len(ForkingPickler.dumps(shared)) < 1000
    with stocache.CachedDataset(dataset, "1MB", share=True) as cached:
        assert cached[5] == dataset[5]
        assert type(cached.dataset.paths) is sharing.SharedSequence
    assert type(dataset.paths) is list
    for few in (Dataset(), Subset(Dataset(), [0]), ConcatDataset([["a"], ["b"]])):
        assert share(few) is few


class Kinds(Files):
    def __getitem__(self, idx):
        return self.paths[idx] == f"folder/{idx:09}.jpg", type(self.paths).__name__


WRAPPERS = {
    "itself": lambda dataset: dataset, "subset": lambda dataset: Subset(dataset, [3, 1, 2]),
    "parts": lambda dataset: ConcatDataset([Subset(dataset, [5]), [(True, "SharedSequence")], dataset]),
}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_tables_of_inner_datasets_are_shared_too_and_workers_of_a_program_share_them(wrap):
    dataset = Kinds()
    outer = wrap(dataset)
    shared = [share(outer)[idx] for idx in range(3)]
    assert shared == [(True, "SharedSequence")] * 3
    with stocache.use_everywhere(share=True):
        from torch.utils.data import DataLoader

        for workers in (0, 2):
            loader = DataLoader(
                Subset(outer, range(3)), 3, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
            ((right, kinds),) = list(loader)
            assert right.all()
            assert set(kinds) == ({"SharedSequence"} if workers else {outer[0][1], outer[1][1]})
    assert type(dataset.paths) is list


def table(pandas):
    columns = {"path": LISTS[0], "size": np.arange(1000), "time": pandas.date_range("2020", periods=1000, freq="s")}
    return pandas.DataFrame(columns | {"share": np.linspace(0, 1, 1000), "large": np.arange(1000) % 2 == 0})


def sent(value):
    """Return a value as another process gets it."""
    return pickle.loads(bytes(ForkingPickler.dumps(value)))


def handle_bytes(value):
    return len(ForkingPickler.dumps(value))


@pytest.mark.parametrize("index", ["range", "path", "size", "time", "both"])
def test_tables_of_pandas_are_shared_until_a_column_is_replaced(index):
    pandas = pytest.importorskip("pandas", "3")
    frame = table(pandas).drop_duplicates("path")
    columns = {"range": [], "both": ["path", "size"]}.get(index, [index])
    frame = frame.set_index(columns) if columns else frame.reset_index(drop=True)
    shared = share(frame)
    copied = sent(shared)
    for each in (shared, copied, sent(copied)):
        pandas.testing.assert_frame_equal(each, frame)
        assert type(each) is pandas.DataFrame
        assert handle_bytes(each) < 2000
    pandas.testing.assert_frame_equal(pickle.loads(pickle.dumps(shared)), frame)
    for name in frame.columns if index in ("range", "path") else ():
        column = share(frame[name])
        assert sent(column).equals(frame[name])
        assert handle_bytes(column) < 1300
    copied["share"] += 1
    changed = sent(copied)
    pandas.testing.assert_frame_equal(changed, frame.assign(share=frame["share"] + 1))
    if "path" in changed:
        changed.loc[changed.index[3], "path"] = "other"
        assert sent(changed).iloc[3]["path"] == "other"
    pandas.testing.assert_frame_equal(shared, frame)
    with pytest.raises(ValueError, match="read-only"):
        shared["share"].to_numpy()[0] = 1


def test_columns_of_pandas_of_any_kind_but_objects_are_shared():
    pandas = pytest.importorskip("pandas", "3")
    frame = table(pandas)
    for column in (pandas.Categorical(["a", "b"] * 500), pandas.array([1, None] * 500, dtype="Int64")):
        shared = sent(share(frame.assign(other=column)))
        assert shared.equals(frame.assign(other=column))
        assert list(shared.dtypes) == list(frame.assign(other=column).dtypes)
        assert handle_bytes(shared) < 2500
    few = pandas.DataFrame({"other": [{1}, None]})
    pandas.testing.assert_frame_equal(sent(share(few)), few)
    many = pandas.DataFrame({"other": [(number,) for number in range(20_000)]})
    with pytest.raises(SampleError, match=r"a DataFrame cannot be shared: more than 65536 bytes .* Convert Python objects"):
        share(many)
    with pytest.raises(SampleError, match="a Series cannot be shared: more than 65536 bytes"):  # pickles its index as a copy
        share(pandas.Series(np.arange(20_000), pandas.date_range("2020", periods=20_000, freq="s")))


def test_tables_and_columns_of_arrow():
    pa = pytest.importorskip("pyarrow")
    numbers = pa.table({"a": [1, None, 3], "text": ["x", "y", None], "list": [[1], [], None]})
    for value in (numbers, numbers["text"], numbers.to_batches()[0], pa.array([1.5, None])):
        kept = share(value)
        shared = sent(kept)
        assert handle_bytes(shared) < 1000
        assert type(shared) is type(value)
        assert shared == kept == value == pickle.loads(pickle.dumps(shared))
        del kept
        assert handle_bytes(shared) < 1000
    many = pa.table({"a": np.arange(100_000), "text": list(map(str, range(100_000)))})
    for whole in (many, pa.concat_tables([many, many])):
        assert handle_bytes(share(whole)) < 2000
    for part in (many.slice(50_000, 10_000), pa.concat_tables([many.slice(at, 10_000) for at in (5, 50_000)])):
        shared = share(part)
        assert shared == part
        assert shared.get_total_buffer_size() < 1.1 * part.nbytes  # not all that it was cut from
    buffer = pa.py_buffer(b"abc")
    assert sent(buffer) == buffer
    with pytest.raises(SampleError, match=r"cannot be shared: it holds no arrays. Share a table, column"):
        share(pa.schema([]))


@pytest.mark.parametrize("kind", ["csr_matrix", "csr_array", "csc_matrix", "csc_array"])
def test_sparse_matrices(kind):
    sparse = pytest.importorskip("scipy.sparse")
    matrix = getattr(sparse, kind)(np.random.default_rng(0).integers(0, 4, (300, 200)) // 3 * 1.5)
    kept = share(matrix)
    shared = pickle.loads(pickle.dumps(kept))
    assert type(shared) is type(matrix)
    assert len(pickle.dumps(shared)) < 600
    assert (shared != matrix).nnz == 0
    assert np.array_equal(shared[7:9].toarray(), matrix[7:9].toarray())
    assert np.array_equal(shared @ np.ones(200), matrix @ np.ones(200))
    with pytest.raises(ValueError, match="read-only"):
        shared.data[0] = 1
    assert (sent(share(matrix.tocoo())) != matrix).nnz == 0
    with pytest.raises(SampleError, match=r"cannot be shared: .*tocsr\(\)"):
        share(matrix.todok())


def test_large_tables_of_a_dataset_are_shared_whatever_the_library():
    pandas, pa, sparse = pytest.importorskip("pandas", "3"), pytest.importorskip("pyarrow"), pytest.importorskip("scipy.sparse")
    dataset = Files()
    dataset.frame = pandas.DataFrame({"path": dataset.paths * 3})
    dataset.column, dataset.matrix = pa.array(dataset.paths * 3), sparse.eye(200_000, format="csr")
    shared = share(dataset)
    del shared.objects
    assert len(ForkingPickler.dumps(shared)) < 4000
    assert shared.frame["path"][5] == shared.column[5].as_py() == dataset.paths[5]


@pytest.mark.parametrize("value", [
    [1, "a"], [1, True], [object()], [[1]], [None], [2**63], np.array([object()]), torch.zeros(2, requires_grad=True), 5,
    "text", None, {"a": 1, "b": "c"}, {(1, 2): 3}, int, torch.zeros(2).to_sparse(),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_cannot_be_shared_is_refused(value):
    with pytest.raises(SampleError, match=r"shared|64 bits"):
        share(value)


def test_where_the_machine_gives_no_shared_memory_that_is_said(monkeypatch):
    monkeypatch.setattr(limits, "open_memfd", lambda: None)
    monkeypatch.setattr(limits, "SHM_DIR", "/no/such/folder")
    with pytest.raises(SampleError, match="gives no shared memory for 24 bytes"):
        share(["a"])


def read(number, paths, lengths):
    gc.disable()  # in a forked child it would copy all that the parent has
    order = np.random.default_rng(number).permutation(len(paths))
    assert len(paths[3]) > 3
    before = psutil.Process().memory_full_info().uss
    assert sum(len(paths[idx]) for idx in order) == lengths
    assert psutil.Process().memory_full_info().uss - before < 25_000_000  # not the items, which are 40 MB as objects


METHODS = ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]


@pytest.mark.parametrize("method", METHODS)
def test_processes_read_one_copy(method):
    paths = [f"a/folder/of/images/with/a/long/name/{number:09}.jpg" for number in range(400_000)]
    run_all(multiprocessing.get_context(method), 2, read, share(paths), sum(map(len, paths)))


def read_tables(number, frame, values, matrix):
    assert list(frame["size"]) == values.to_pylist()[0] == [*range(1000)]
    assert frame["path"][999] == LISTS[0][999]
    assert matrix.sum() == 200
    assert max(map(handle_bytes, (frame, values, matrix))) < 2000


@pytest.mark.parametrize("method", METHODS)
def test_processes_get_handles_of_tables(method):
    pandas, pa, sparse = pytest.importorskip("pandas", "3"), pytest.importorskip("pyarrow"), pytest.importorskip("scipy.sparse")
    tables = table(pandas), pa.array([np.arange(1000)]), sparse.eye(200, format="csr")
    run_all(multiprocessing.get_context(method), 2, read_tables, *map(share, tables))


def test_a_copy_refers_to_the_same_memory():
    shared = share(["a", "b"])
    for made in (copy.copy(shared), copy.deepcopy(shared)):
        assert made._segment is shared._segment


class Letter(str, enum.Enum):
    A = "a"


def test_a_shared_dict_finds_what_equals_a_key():
    assert share({"a": 1})[Letter.A] == 1
    assert share({0.5: 1})[np.float64(0.5)] == 1
    assert share({2: 1})[np.float32(2)] == share({1: 1})[np.bool_(True)] == 1
    assert share({1: 1}).get(10**5000) is None
    with pytest.raises(TypeError):
        share(["a"])["x"]


def test_what_is_more_than_its_values_is_left_as_it_is(caplog):
    class Closing(Files):
        def __del__(self):
            pass

    class Slots:
        __slots__ = ("paths",)

    class Named(list):
        pass

    for value in (
        Closing(), Slots(), Named("ab"), np.ma.masked_array([1, 2], mask=[True, False]), np.zeros((1, 1)).view(np.matrix),
    ):  # fmt: skip
        with pytest.raises(SampleError, match="cannot be shared"):
            share(value)
    with stocache.CachedDataset(Closing(), "1MB", share=True) as cached:
        assert type(cached.dataset.paths) is list
    assert "share=True has no effect" in caplog.text
    dataset = Files()
    dataset.masked = np.ma.masked_array(np.arange(300_000.0), mask=np.arange(300_000) % 2 == 0)
    dataset.store = torch.zeros(400_000).share_memory_()
    dataset.conjugate = torch.zeros(200_000, dtype=torch.complex64).conj()
    shared = share(dataset)
    assert shared.masked is dataset.masked
    assert shared.store is dataset.store
    assert torch.equal(shared.conjugate, dataset.conjugate)
    assert type(shared.paths) is sharing.SharedSequence
    assert type(copy.deepcopy(shared).conjugate) is torch.Tensor
