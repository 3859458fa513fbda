"""Each worker thread has a dataset of its own: the samples are right whatever the dataset opens, counts and keeps."""

import array
import collections
import dataclasses
import datetime
import functools
import gc
import itertools
import logging
import queue
import re
import socket
import sqlite3
import struct
import threading
import time
import types
import weakref
import zipfile
from collections import defaultdict, deque
from io import BytesIO
from operator import itemgetter

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import stocache
from stocache import DatasetError
from stocache.loader.threads import crew
from stocache.system.loading.copies import copy_dataset, find_open_handle
from tests.support.loading import THREADS

try:
    import lmdb
except ImportError:
    lmdb = None

pytestmark = pytest.mark.filterwarnings(  # what datasets open is closed when Python finds them
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
needs_lmdb = pytest.mark.skipif(lmdb is None, reason="lmdb is not installed")

N = 60


def thread_loader(dataset, **options):
    return stocache.DataLoader(dataset, **THREADS | {"batch_size": 4, "num_workers": 4, **options})


def numbers_of(loader):
    return torch.cat(list(loader)).flatten().tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of numbers; beside it the same numbers for LMDB."""
    path = tmp_path_factory.mktemp("files") / "records"
    path.write_bytes(bytes(range(N)))
    if lmdb is not None:
        with lmdb.open(f"{path}.lmdb", subdir=False, map_size=1 << 24) as environment, environment.begin(write=True) as writes:
            for idx in range(N):
                writes.put(str(idx).encode(), bytes([idx]))
    return path


class Through(Dataset):
    """Reads through a function or an object."""

    def __init__(self, read):
        self.read = read

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return self.read(idx)


class Reader:
    """A plain object that opens what it reads when it is first asked, and cannot be pickled with it."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __getstate__(self):
        return {"path": self.path, "file": None}

    def open(self):
        return open(self.path, "rb", buffering=0)

    def read(self, idx):
        if self.file is None:
            self.file = self.open()
        return self.read_open(idx)

    def read_open(self, idx):
        self.file.seek(idx)
        time.sleep(0.0002)  # another thread that shared the file would move its position now
        return self.file.read(1)[0]


class Records(Reader, Through):
    """Keeps the file itself."""


class LmdbRecords(Records):
    """LMDB lets a process open an environment only once."""

    def open(self):
        return lmdb.open(f"{self.path}.lmdb", subdir=False, readonly=True, lock=False)

    def read_open(self, idx):
        with self.file.begin() as transaction:
            return transaction.get(str(idx).encode())[0]


def of_memory(file):
    def read(idx):
        file.seek(idx)
        time.sleep(0.0002)
        return ord(file.read(1))

    return Through(read)


LAZY = {
    **{"file": Records, "lmdb": LmdbRecords},
    "object": lambda path: Through(Reader(path).read),
    "bytes in memory": lambda path: of_memory(BytesIO(path.read_bytes())),
    "one for each sample": lambda path: ConcatDataset([Subset(Records(path), [idx % N]) for idx in range(1200)]),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_lmdb] * name.startswith("lmdb")) for name in LAZY])
def test_each_thread_opens_its_own(name, path):
    dataset = LAZY[name](path)
    before = dict(vars(dataset))
    assert numbers_of(thread_loader(dataset)) == [idx % N for idx in range(len(dataset))]
    assert vars(dataset) == before  # the user's own object is not used
    assert find_open_handle(dataset) is None


def test_what_is_open_already_is_read_by_one_thread_at_a_time(path, caplog):
    dataset = Records(path)
    dataset.file = dataset.open()
    loader = thread_loader(dataset)
    for _ in range(2):
        assert numbers_of(loader) == list(range(N))
    assert caplog.text.count("one sample at a time, because they share Records.file") == 1
    assert dataset[7] == 7  # it is not closed


class Tensors(Records):
    def __getitem__(self, idx):
        return torch.tensor([super().__getitem__(idx)])


def test_cached_samples_are_compared_by_the_thread_of_the_dataset(path, caplog):
    dataset = Tensors(path)
    dataset.file = dataset.open()
    with stocache.CachedDataset(dataset, "1MB", example=torch.tensor([1])) as cached:
        loader = thread_loader(cached, shuffle=True, num_workers=3)
        for _ in range(4):
            assert sorted(numbers_of(loader)) == list(range(N))
        assert cached.stats().compared > 4
    assert "differs" not in caplog.text


@pytest.mark.parametrize(("make", "name"), [
    (functools.partial(open, mode="wb"), "BufferedWriter"), (functools.partial(zipfile.ZipFile, mode="w"), "ZipFile"),
    (sqlite3.connect, "sqlite3.Connection"), (lambda path: socket.socket(), "socket"),
    (lambda path: pytest.importorskip("lmdb").open(str(path), subdir=False).begin(), "Transaction"),
])  # fmt: skip
def test_handles_are_found_wherever_a_dataset_holds_them(make, name, tmp_path):
    handle = make(tmp_path / "file")
    partial = functools.partial(print, file=handle)
    for value in (handle, [{"a": handle}], lambda: handle, partial, functools.lru_cache(partial)):
        assert name in find_open_handle(Through(value))
    getattr(handle, "close", gc.collect)()
    if name in ("BufferedWriter", "socket"):
        assert find_open_handle(Through(handle)) is None


def test_values_of_classes_in_c_are_not_handles():
    values = [
        re.compile("a"), struct.Struct("i"), {}.keys(), memoryview(b"a"), datetime.datetime.now(), threading.RLock(),
        weakref.ref(Reader), torch.Size([1]), array.array("i", [1]), np.add, itemgetter(1), queue.SimpleQueue(), BytesIO(),
    ]  # fmt: skip
    assert [find_open_handle(Through(value)) for value in values] == [None] * len(values)


RUNNING = {
    "generator": lambda: (idx for idx in range(9)), "cycle": lambda: itertools.cycle([1]),
    "database": lambda: sqlite3.connect(":memory:"), "cursor": lambda: sqlite3.connect(":memory:").cursor(),
}  # fmt: skip


@pytest.mark.linux
@pytest.mark.parametrize("name", RUNNING)
def test_threads_are_refused_what_is_at_one_place_or_of_another_thread(name):
    dataset = Through(int)
    dataset.held = [RUNNING[name]()]
    with pytest.raises(DatasetError, match=r"cannot use Through\.held\[0\], a .* each thread has its own.*multiprocessing"):
        list(thread_loader(dataset))


def test_a_database_for_all_threads_is_used_in_turns(caplog):
    dataset = Through(int)
    dataset.database = sqlite3.connect(":memory:", check_same_thread=False)
    assert numbers_of(thread_loader(dataset)) == list(range(N))
    assert "one sample at a time" in caplog.text
    dataset.database.close()


@needs_lmdb
def test_an_environment_of_lmdb_is_for_all_threads(path, caplog, monkeypatch):
    monkeypatch.setattr(crew, "_OPENING_S", 0.1)
    dataset = LmdbRecords(path)
    with dataset.open() as dataset.file:
        assert numbers_of(thread_loader(dataset)) == list(range(N))
        with pytest.raises(lmdb.Error, match="already open"):  # by someone who does not share it
            list(thread_loader(LmdbRecords(path)))
    assert "one sample at a time" not in caplog.text


class Drawing(Records):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + torch.rand((), generator=torch.random.thread_safe_generator()).item()


def test_samples_that_draw_do_not_wait_for_those_that_wait_for_the_dataset(path):
    dataset = Drawing(path)
    with dataset.open() as dataset.file:
        assert [int(number) for number in numbers_of(thread_loader(dataset, batch_size=8, num_workers=3))] == list(range(N))


def boxes(parts, idx):
    parts[idx][:, 2:] += parts[idx][:, :2]
    return parts[idx].sum().item()


def painted(parts, idx):
    parts[idx].putpixel((0, 0), parts[idx].getpixel((0, 0)) + 1)
    return parts[idx].getpixel((0, 0))


def counted(parts, idx):
    parts[idx % len(parts)]["counts"][0] += 1
    return parts[idx % len(parts)]["counts"][0]


CHANGED = {
    "tensors": (lambda: [torch.ones(2, 4) for _ in range(N)], boxes),
    "many dicts": (lambda: [{"counts": [0]} for _ in range(5000)], counted),
    "images": (lambda: [pytest.importorskip("PIL.Image").new("L", (2, 2)) for _ in range(N)], painted),
}


class ChangesInPlace(Dataset):
    """Makes each sample by a function that changes a part of the dataset."""

    def __init__(self, name):
        make, self.change = CHANGED[name]
        self.parts = make()

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return float(self.change(self.parts, idx))


@pytest.mark.parametrize("name", CHANGED)
def test_threads_change_their_own_arrays_in_place_as_processes_do(name):
    dataset, once = ChangesInPlace(name), ChangesInPlace(name)
    expected = [once[idx] for idx in range(N)]
    loader = thread_loader(dataset)
    assert [numbers_of(loader) for _ in range(2)] == [expected] * 2
    assert [dataset[idx] for idx in range(N)] == expected


@pytest.mark.linux  # spawned processes share the memory of a tensor that is sent to them
@pytest.mark.parametrize("name", ["tensors", "many dicts"])
def test_persistent_threads_go_on_with_what_each_has_changed(name):
    found = []
    for method in ("multiprocessing", "thread"):
        options = {"worker_method": method, "generator": torch.Generator().manual_seed(3), "persistent_workers": True}
        loader = thread_loader(ChangesInPlace(name), shuffle=True, **options)
        found.append([numbers_of(loader) for _ in range(3)])
    assert found[0] == found[1]


def test_a_large_array_that_is_changed_is_said_once(caplog):
    parts = torch.zeros(N, 1 << 18)
    loader = thread_loader(Through(lambda idx: parts[idx].add_(1)[0].item()))
    for _ in range(3):
        numbers_of(loader)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["an array of 60.0 MiB"]


def test_what_is_made_to_be_shared_is_shared_and_what_is_small_is_copied():
    names, module = {str(idx): idx for idx in range(5000)}, torch.nn.Sequential(torch.nn.Linear(1, 1))
    shared = [threading.Event(), queue.Queue(), logging.getLogger("stocache"), names, torch.zeros(1 << 24)]
    small = [{"a": [1]}, defaultdict(list, a=[1]), [[1]], ([1],), deque([[1]], 5)]
    mine = copy_dataset(Through([*shared, module, *small])).read
    assert [value is copied for value, copied in zip(shared, mine, strict=False)] == [True] * len(shared)
    assert mine[len(shared)] is not module
    assert mine[len(shared)][0].weight is module[0].weight
    for value, copied in zip(small, mine[len(shared) + 1 :], strict=True):
        assert (copied, type(copied)) == (value, type(value))
        (inner,), (inner_of_mine,) = (each.values() if isinstance(value, dict) else each for each in (value, copied))
        assert inner is not inner_of_mine


class Settings(dict):
    """A dict whose keys are attributes, and that raises the wrong error."""

    __getattr__ = dict.__getitem__


@dataclasses.dataclass(slots=True)
class Slotted:
    reader: Reader


class MadeOnce:
    """Its class makes its objects itself, as MONAI's transforms of dicts do."""

    def __new__(cls, *args):
        made = super().__new__(cls)
        made.extra = args
        return made


Pair = collections.namedtuple("Pair", "name reader")


def test_a_copy_is_whole():
    first, second = Reader("a"), Reader("b")
    dataset = Through(first)
    dataset.again, dataset.itself, dataset.pair, dataset.method = first, dataset, (first, second), first.read
    dataset.function, dataset.part = lambda: (dataset, first), functools.partial(first.read)
    dataset.kept = functools.lru_cache(maxsize=4)(first.__getstate__)
    dataset.kept()
    dataset.namespace, dataset.default = types.SimpleNamespace(reader=first), lambda idx, *, reader=first: reader
    dataset.holders = [Pair("a", first), Settings(reader=first), Slotted(first), MadeOnce(first)]
    mine = copy_dataset(dataset)
    assert mine is not dataset
    assert mine.read is mine.again is mine.pair[0] is mine.method.__self__ is mine.part.func.__self__
    assert mine.kept.__wrapped__.__self__ is mine.read is not first
    assert (mine.kept.cache_info().currsize, mine.kept.cache_info().maxsize) == (0, 4)  # what it keeps may be open files
    assert mine.itself is mine
    assert mine.function() == (mine, mine.read)
    named, settings, slotted, made = mine.holders
    assert mine.namespace.reader is mine.default(0) is named.reader is settings["reader"] is mine.read
    assert slotted.reader is made.extra[0] is mine.read
    assert list(map(type, mine.holders)) == list(map(type, dataset.holders))
    assert find_open_handle(dataset) is None


class Closes(Reader):
    """Closes what it was given when it goes."""

    def __del__(self):
        if self.file is not None:
            self.file.close()


def test_what_says_so_or_would_close_the_file_of_the_users_is_not_copied(path):
    owner, safe, unsafe = Closes(path), Reader(path), Reader(path)
    safe.thread_safe, unsafe.thread_safe = True, False
    copied = [copy_dataset(Through(each)).read is not each for each in (owner, safe, unsafe)]
    assert copied == [False, False, True]  # whatever the owner has: a copy would let go of that when it dies
    assert "Closes" in find_open_handle(Through(owner))
    assert find_open_handle(Through(safe)) is None
    assert "Reader" in find_open_handle(Through(unsafe))  # one thread at a time may use it
