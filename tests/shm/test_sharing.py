"""What is shared is read as before, is one copy for all processes, and is never changed for others."""

import copy
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
from tests.support.equality import same
from tests.support.processes import in_child, run_all

LISTS = [
    [f"images/{number:06}.jpg" * (number % 3) for number in range(1000)], [b"", b"\x00ab", b"c" * 5000], ["ä€\udc80", ""],
    [Path("a/b"), Path("c")], [0.5, -0.0, float("inf"), 1e300], [True, False, True], [], [-(2**63), 2**63 - 1],
]  # fmt: skip


@pytest.mark.parametrize("items", LISTS, ids=lambda items: f"{type(items[0] if items else None).__name__}-{len(items)}")
def test_a_list_is_indexed_sliced_and_walked_as_before(items):
    shared = share(items)
    assert len(shared) == len(items)
    assert list(shared) == items == shared == pickle.loads(pickle.dumps(shared))
    assert [type(item) for item in shared] == [type(item) for item in items]
    for index in (slice(None), slice(1, -1), slice(None, None, -2), slice(5, 2)):
        assert shared[index] == items[index]
    for number in (0, -1, len(items) // 2) if items else ():
        assert shared[number] == shared[np.int64(number)] == items[number]
        assert items[number] in shared
        assert shared.index(items[number]) == items.index(items[number])
    for number, error in ((len(items), IndexError), (-len(items) - 1, IndexError), ("x", TypeError)):
        with pytest.raises(error):
            shared[number]
    assert (shared == [*items, 1], shared == tuple(items), shared != items) == (False, True, False)
    assert handle_bytes(shared) <= 200
    assert share(shared) is shared
    assert copy.copy(shared)._segment is copy.deepcopy(shared)._segment is shared._segment
    assert repr(shared).startswith(f"<shared list of {len(items)}")


DICTS = [
    {f"k{number}": number for number in range(500)}, {number: str(number) for number in range(-5, 300)}, {},
    {0.5: b"x", 2.0: b"y"}, {Path("a"): 1.5},
]  # fmt: skip


def test_a_dict_is_looked_up_as_before_by_what_equals_a_key(monkeypatch):
    for items in DICTS:
        shared = share(items)
        assert dict(shared) == items == shared == pickle.loads(pickle.dumps(shared))
        assert list(shared) == list(items)
        assert [shared[key] for key in items] == list(items.values())
        assert not any(key in shared for key in ("no", None, 10**5000))
        with pytest.raises(KeyError):
            shared["no"]
    for key, other in ((0.5, np.float64(0.5)), (1, np.bool_(True)), (1, 1.0), (2.0, 2)):
        assert share({key: 1})[other] == 1
    monkeypatch.setattr(sequences, "xxh3_64_intdigest", lambda text: 7)
    assert dict(share({"a": 1, "b": 2, "c": 3})) == {"a": 1, "b": 2, "c": 3}


ARRAYS = [
    np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.zeros((0, 3)), np.array(5), np.array(["a", "bc"]), np.arange(10)[::-2],
    np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
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
    assert not np.asarray(shared).flags.writeable
    if array.dtype.kind in "if":
        assert type(shared[..., :1] if array.ndim else shared[()]) is not sharing.SharedArray
        assert type(shared + 1) is not sharing.SharedArray
        assert np.array_equal(shared + 1, array + 1)


@pytest.mark.parametrize("tensor", [torch.zeros(0, 2), torch.arange(12.0).view(3, 4).T, torch.ones(3, dtype=torch.bfloat16)])
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


class Closing(Files):
    def __del__(self):
        pass


def test_a_dataset_is_copied_with_its_large_tables_shared_and_stays_as_it_was():
    dataset = Files()
    dataset.masked = np.ma.masked_array(np.arange(300_000.0), mask=np.arange(300_000) % 2 == 0)
    dataset.store = torch.zeros(400_000).share_memory_()
    before = dict(vars(dataset))
    shared = share(dataset)
    assert all(vars(dataset)[name] is value for name, value in before.items())
    assert [shared[idx] for idx in range(0, 30_000, 997)] == [dataset[idx] for idx in range(0, 30_000, 997)]
    assert (type(shared), type(shared.paths), type(dataset.paths)) == (Files, sharing.SharedSequence, list)
    for name in ("small", "objects", "masked", "store"):  # what is small, or more than its values
        assert getattr(shared, name) is getattr(dataset, name)
    for few in (Dataset(), Subset(Dataset(), [0]), ConcatDataset([["a"], ["b"]])):
        assert share(few) is few


@pytest.mark.parametrize(("cls", "kind", "warning"), [(Files, sharing.SharedSequence, ""), (Closing, list, "has no effect")])
def test_a_cached_dataset_shares_the_tables_below_it_if_it_can(cls, kind, warning, caplog):
    with stocache.CachedDataset(cls(), "1MB", share=True) as cached:
        assert cached[5] == Files()[5]
        assert type(cached.dataset.paths) is kind
    assert warning in caplog.text


class Kinds(Files):
    def __getitem__(self, idx):
        return self.paths[idx], type(self.paths).__name__


def test_tables_of_inner_datasets_are_shared_too_and_workers_of_a_program_share_them():
    outer = ConcatDataset([Subset(Kinds(), [5, 3, 1]), Kinds()])
    paths = tuple(outer[idx][0] for idx in range(3))
    assert [share(outer)[idx] for idx in range(3)] == [(path, "SharedSequence") for path in paths]
    with stocache.use_everywhere(share=True):
        from torch.utils.data import DataLoader

        few = Subset(outer, range(3))
        assert [*DataLoader(few, 3)] == [[paths, ("list",) * 3]]
        assert [*DataLoader(few, 3, num_workers=2, multiprocessing_context="fork")] == [[paths, ("SharedSequence",) * 3]]


def frame(by=(), **more):
    pandas = pytest.importorskip("pandas", "3")
    columns = {"path": LISTS[0], "size": np.arange(1000), "time": pandas.date_range("2020", periods=1000, freq="s")}
    columns |= {"share": np.linspace(0, 1, 1000), "large": np.arange(1000) % 2 == 0}
    rows = pandas.DataFrame(columns | {name: pandas.array(*array) for name, array in more.items()}).drop_duplicates("path")
    return rows.set_index(list(by)) if by else rows.reset_index(drop=True)


def arrow():
    return pytest.importorskip("pyarrow").table({"a": [1, None, 3], "text": ["x", "y", None], "list": [[1], [], None]})


def sparse(kind, rows=300):
    numbers = np.random.default_rng(0).integers(0, 4, (rows, 200)) // 3 * 1.5
    return getattr(pytest.importorskip("scipy.sparse"), kind)(numbers)


TABLES = {
    "rows by time": lambda: frame(["time"]), "rows by two columns": lambda: frame(["path", "size"]),
    "categories": lambda: frame(other=(["a", "b"] * 500, "category")),
    "missing values": lambda: frame(other=([1, None] * 500, "Int64")), "column by text": lambda: frame(["path"])["size"],
    "Arrow": arrow, "column of Arrow": lambda: arrow()["text"], "batch of Arrow": lambda: arrow().to_batches()[0],
    **{kind: lambda kind=kind: sparse(kind) for kind in ("csr_matrix", "coo_matrix")},
}  # fmt: skip


def sent(value):
    """Return a value as another process gets it."""
    return pickle.loads(bytes(ForkingPickler.dumps(value)))


def handle_bytes(value):
    return len(ForkingPickler.dumps(value))


def is_same(one, other):
    if hasattr(one, "nnz"):  # of scipy
        return (one != other).nnz == 0
    if hasattr(one, "dtypes"):  # of pandas, for which numbers of two types are equal
        return one.equals(other) and one.index.dtype == other.index.dtype and repr(one.dtypes) == repr(other.dtypes)
    return one.equals(other)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_a_library_keeps_its_class_and_travels_as_a_handle(name):
    table = TABLES[name]()
    kept = share(table)
    copied, twice = sent(kept), sent(sent(kept))
    for each in (kept, copied, twice, pickle.loads(pickle.dumps(kept))):
        assert type(each) is type(table)
        assert is_same(each, table)
    del kept
    assert max(map(handle_bytes, (copied, twice))) < 2500


def test_parts_of_tables_of_arrow_are_shared_without_what_they_were_cut_from():
    pa = pytest.importorskip("pyarrow")
    many = pa.table({"a": np.arange(100_000), "text": list(map(str, range(100_000)))})
    for whole in (many, pa.concat_tables([many, many])):
        assert handle_bytes(share(whole)) < 2000
    for part in (many.slice(50_000, 10_000), pa.concat_tables([many.slice(at, 10_000) for at in (5, 50_000)])):
        shared = share(part)
        assert shared == part
        assert shared.get_total_buffer_size() < 1.1 * part.nbytes
    with pytest.raises(SampleError, match=r"cannot be shared: it holds no arrays. Share a table, column"):
        share(pa.schema([]))


def test_large_tables_of_a_dataset_are_shared_whatever_the_library():
    pandas, pa = pytest.importorskip("pandas", "3"), pytest.importorskip("pyarrow")
    dataset = Files()
    dataset.frame = pandas.DataFrame({"path": dataset.paths * 3})
    dataset.column, dataset.matrix = pa.array(dataset.paths * 3), sparse("csr_matrix", 3000)
    shared = share(dataset)
    del shared.objects
    assert handle_bytes(shared) < 4000
    assert shared.frame["path"][5] == shared.column[5].as_py() == dataset.paths[5]
    assert np.array_equal(shared.matrix @ np.ones(200), dataset.matrix @ np.ones(200))
    with pytest.raises(ValueError, match="read-only"):
        shared.matrix.data[0] = 1
    with pytest.raises(SampleError, match=r"cannot be shared: .*tocsr\(\)"):
        share(sparse("dok_matrix"))


@pytest.mark.parametrize("value", [
    [1, "a"], [1, True], [object()], [2**63], np.array([object()]), torch.zeros(2, requires_grad=True), 5, {"a": 1, "b": "c"},
    {(1, 2): 3}, torch.zeros(2).to_sparse(), Closing(), np.ma.masked_array([1, 2], mask=[True, False]),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_cannot_be_shared_is_refused(value):
    with pytest.raises(SampleError, match=r"shared|64 bits"):
        share(value)


def read(number, paths, lengths, tables):
    gc.disable()  # in a forked child it would copy all that the parent has
    order = np.random.default_rng(number).permutation(len(paths))
    assert len(paths[3]) > 3
    before = psutil.Process().memory_full_info().uss
    assert sum(len(paths[idx]) for idx in order) == lengths
    assert psutil.Process().memory_full_info().uss - before < 12_000_000  # not the items, which are 20 MB as objects
    assert all(is_same(*pair) for pair in tables)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_read_one_copy(method):
    paths = [f"a/folder/of/images/with/a/long/name/{number:09}.jpg" for number in range(200_000)]
    tables = [(share(table), table) for table in (frame(), arrow(), sparse("csr_matrix"))]
    run_all(multiprocessing.get_context(method), 2, read, share(paths), sum(map(len, paths)), tables)
