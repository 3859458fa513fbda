"""Each worker thread has a dataset of its own: the samples are right whatever the dataset opens, counts and keeps."""

import functools
import logging
import queue
import socket
import sqlite3
import struct
import tarfile
import threading
import time
import zipfile
from collections import OrderedDict, defaultdict
from io import BytesIO

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import stocache
from stocache.threads import crew
from stocache.threads.copies import copy_dataset, find_open_handle

try:
    import lmdb
except ImportError:
    lmdb = None

pytestmark = pytest.mark.filterwarnings(  # what datasets open is closed when Python finds them
    "ignore:.*suggested max number of worker", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
needs_lmdb = pytest.mark.skipif(lmdb is None, reason="lmdb is not installed")

N = 60
_RECORD = struct.Struct("<q")


def thread_loader(dataset, **options):
    options = {"batch_size": 4, "num_workers": 4, "timeout": 60, **options}
    return stocache.DataLoader(dataset, worker_method="thread", **options)


def numbers_of(loader):
    return torch.cat(list(loader)).flatten().tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of records; beside it the same records for LMDB."""
    path = tmp_path_factory.mktemp("files") / "records"
    path.write_bytes(b"".join(map(_RECORD.pack, range(N))))
    if lmdb is not None:
        with (
            lmdb.open(f"{path}.lmdb", subdir=False, map_size=1 << 24) as environment,
            environment.begin(write=True) as transaction,
        ):
            for idx in range(N):
                transaction.put(str(idx).encode(), _RECORD.pack(idx))
    return path


opened = functools.partial(open, mode="rb", buffering=0)


def read_at(file, idx):
    file.seek(_RECORD.size * idx)
    time.sleep(0.0002)  # another thread that shared the file would move its position now
    return _RECORD.unpack(file.read(_RECORD.size))[0]


class Records(Dataset):
    """Opens what it reads when it is first asked, and keeps it in an attribute."""

    def __init__(self, path):
        self.path, self.file, self.reads = path, None, 0

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.reads += 1
        if self.file is None:
            self.file = self.open()
        return self.read(idx)

    def open(self):
        return opened(self.path)

    def read(self, idx):
        return read_at(self.file, idx)


class LmdbRecords(Records):
    """LMDB lets a process open an environment only once."""

    def open(self):
        return lmdb.open(f"{self.path}.lmdb", subdir=False, readonly=True, lock=False)

    def read(self, idx):
        with self.file.begin() as transaction:
            return _RECORD.unpack(transaction.get(str(idx).encode()))[0]


class LmdbBatches(LmdbRecords):
    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class LmdbTransaction(LmdbRecords):
    def open(self):
        return super().open().begin()

    def read(self, idx):
        return _RECORD.unpack(self.file.get(str(idx).encode()))[0]


class Through(Dataset):
    """Reads through a function or an object."""

    def __init__(self, read):
        self.read = read

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return self.read(idx)


class OpensInDict(Through):
    """Keeps files in a dict of some kind, by the number of the part."""

    def __init__(self, path, files):
        self.path, self.files = path, files

    def read(self, idx):
        if idx % 3 not in self.files:
            self.files[idx % 3] = opened(self.path)
        return read_at(self.files[idx % 3], idx)


class Reader:
    """A plain object that opens its file late, and cannot be pickled with it."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __getstate__(self):
        return {"path": self.path, "file": None}

    def read(self, idx):
        if self.file is None:
            self.file = opened(self.path)
        return read_at(self.file, idx)


class ReducedReader(Reader):
    """Pickles and copies as a call."""

    def __reduce__(self):
        return type(self), (self.path,)

    __copy__ = None


class Opened(dict):
    """Opens what is missing."""

    def __init__(self, path):
        self.path = path

    def __missing__(self, part):
        self[part] = file = opened(self.path)
        return file

    def __setitem__(self, part, file):
        assert type(part) is int  # a copy does not call this
        super().__setitem__(part, file)

    def __len__(self):
        raise RuntimeError("how many there will be is not known")

    def read(self, idx):
        return read_at(self[idx % 3], idx)


class OpenedOrdered(Opened, OrderedDict):
    pass


class OpenedDefault(Opened, defaultdict):
    pass


class OpenedList(list):
    def __init__(self, path):
        super().__init__([None] * 3)
        self.path = path

    def read(self, idx):
        if self[idx % 3] is None:
            self[idx % 3] = opened(self.path)
        return read_at(self[idx % 3], idx)


class OnlySlots:
    __slots__ = ("__weakref__", "file", "path")

    def __init__(self, path):
        self.path = path  # file is not set

    def read(self, idx):
        if not hasattr(self, "file"):
            self.file = opened(self.path)
        return read_at(self.file, idx)


class SlottedDataset(Through):
    __slots__ = ("reader",)

    def __init__(self, path):
        self.reader = OnlySlots(path)

    def read(self, idx):
        return self.reader.read(idx)


class WithMethod(Records):
    def __init__(self, path):
        super().__init__(path)
        self.transform = functools.partial(super().__getitem__)

    def __getitem__(self, idx):
        return self.transform(idx)


class WithKeptOpen(Through):
    """Keeps open files in an `lru_cache` of its own."""

    def __init__(self, path):
        self.path, self.kept = path, functools.lru_cache(maxsize=4)(self.open_part)

    def open_part(self, part):
        return opened(self.path)

    def read(self, idx):
        return read_at(self.kept(idx % 2), idx)


class Forwards(Dataset):
    """Forwards every attribute, also those that nobody has."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, idx):
        return self.inner[idx]


class Settings(dict):
    """A dict whose keys are attributes, and that raises the wrong error."""

    __getattr__ = dict.__getitem__


class Strange:
    """An object that any question breaks."""

    def __getattr__(self, name):
        raise KeyError(name)


class WithStrange(Records):
    def __init__(self, path):
        super().__init__(path)
        self.settings, self.strange, self.itself = Settings(size=3), Strange(), self


def in_closure(path):
    file = None

    def read(idx):
        nonlocal file
        if file is None:
            file = opened(path)
        return read_at(file, idx)

    return Through(read)


LAZY = {
    "file": Records,
    "lmdb": LmdbRecords,
    "lmdb by batches": LmdbBatches,
    "dict": lambda path: OpensInDict(path, {}),
    "ordered dict": lambda path: OpensInDict(path, OrderedDict()),
    "default dict": lambda path: OpensInDict(path, defaultdict(list)),
    "object": lambda path: Through(Reader(path).read),
    "reduced object": lambda path: Through(ReducedReader(path).read),
    "subclass of dict": lambda path: Through(Opened(path).read),
    "subclass of OrderedDict": lambda path: Through(OpenedOrdered(path).read),
    "subclass of defaultdict": lambda path: Through(OpenedDefault(path).read),
    "subclass of list": lambda path: Through(OpenedList(path).read),
    "slots": SlottedDataset,
    "partial of method": WithMethod,
    "lru_cache": WithKeptOpen,
    "closure": in_closure,
    "strange": WithStrange,
    "one for each sample": lambda path: ConcatDataset([Subset(Records(path), [idx % N]) for idx in range(1200)]),
    "subset": lambda path: Subset(Forwards(Records(path)), range(N)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_lmdb] * name.startswith("lmdb")) for name in LAZY])
@pytest.mark.leaves_descriptors
def test_each_thread_opens_its_own(name, path):
    dataset = LAZY[name](path)
    before = dict(vars(dataset))
    assert numbers_of(thread_loader(dataset)) == [idx % N for idx in range(len(dataset))]
    assert vars(dataset) == before  # the user's own object is not used
    assert find_open_handle(dataset) is None


@pytest.mark.parametrize("kind", [Records, pytest.param(LmdbTransaction, marks=needs_lmdb)])
def test_what_is_open_already_is_read_by_one_thread_at_a_time(kind, path, caplog):
    dataset = kind(path)
    dataset.file = dataset.open()
    loader = thread_loader(dataset)
    for _ in range(2):
        assert numbers_of(loader) == list(range(N))
    (message,) = {record.getMessage() for record in caplog.records if "one sample at a time" in record.getMessage()}
    assert f"{kind.__name__}.file" in message
    assert caplog.text.count("one sample at a time") == 1
    assert dataset[7] == 7  # it is not closed


def h5(path):
    return pytest.importorskip("h5py").File(path, "w")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (functools.partial(open, mode="wb"), "BufferedWriter"), (functools.partial(zipfile.ZipFile, mode="w"), "ZipFile"),
        (functools.partial(tarfile.open, mode="w"), "TarFile"), (sqlite3.connect, "sqlite3.Connection"), (h5, "h5py"),
        (lambda path: socket.socket(), "socket"),
    ],
)  # fmt: skip
def test_handles_are_found_wherever_a_dataset_holds_them(make, name, tmp_path):
    handle = make(tmp_path / "file")
    partial = functools.partial(print, file=handle)
    for value in (handle, [{"a": handle}], lambda: handle, partial, functools.lru_cache(partial)):
        assert name in find_open_handle(Through(value))
    handle.close()
    if name in ("BufferedWriter", "socket"):
        assert find_open_handle(Through(handle)) is None
    function = lambda: unset
    assert find_open_handle(Through([function, function, None, BytesIO()])) is None
    unset = None


@needs_lmdb
def test_an_environment_of_lmdb_is_for_all_threads(path, caplog, monkeypatch):
    monkeypatch.setattr(crew, "_OPENING_S", 0.1)
    dataset = LmdbRecords(path)
    with dataset.open() as dataset.file:
        assert numbers_of(thread_loader(dataset)) == list(range(N))
        with pytest.raises(lmdb.Error, match="already open"):  # by someone who does not share it
            list(thread_loader(LmdbRecords(path)))
    assert "one sample at a time" not in caplog.text


class Alone(Through):
    """Notices that two threads are in it."""

    thread_safe = False
    inside = most = 0

    def __init__(self):
        pass

    def read(self, idx):
        Alone.inside += 1
        Alone.most = max(Alone.most, Alone.inside)
        time.sleep(0.0005)
        Alone.inside -= 1
        return idx


def test_a_dataset_that_is_not_thread_safe_is_used_by_one_thread_at_a_time():
    Alone.most = 0
    assert numbers_of(thread_loader(Alone(), batch_size=5)) == list(range(N))
    assert Alone.most == 1


class Drawing(Records):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + torch.rand((), generator=torch.random.thread_safe_generator()).item()


def test_samples_that_draw_do_not_wait_for_those_that_wait_for_the_dataset(path):
    dataset = Drawing(path)
    batches = []
    for method in ("multiprocessing", "thread"):
        options = {"batch_size": 8, "num_workers": 3, "worker_method": method, "timeout": 60}
        batches.append(numbers_of(stocache.DataLoader(dataset, generator=torch.Generator().manual_seed(3), **options)))
        dataset.file = dataset.open()
    assert batches[0] == batches[1]


class Counts(Through):
    thread_safe = True

    def __init__(self):
        self.lock, self.reads = threading.Lock(), 0

    def read(self, idx):
        with self.lock:
            self.reads += 1
        return idx


def test_a_dataset_that_says_that_it_is_thread_safe_is_shared():
    dataset = Counts()
    list(thread_loader(dataset))
    assert dataset.reads == N
    dataset.thread_safe = None
    list(thread_loader(dataset))
    assert dataset.reads == N


class Stateful(torch.nn.Module):
    """A transform that keeps its parameters in an attribute between two steps, as kornia's do."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.parameters_of_sample = None

    def forward(self, idx):
        self.parameters_of_sample = idx
        time.sleep(0.0005)
        return self.parameters_of_sample * self.weight


def test_modules_are_copied_and_share_their_parameters():
    module = torch.nn.Sequential(Stateful())
    assert numbers_of(thread_loader(Through(module))) == list(range(N))
    assert module[0].parameters_of_sample is None
    assert copy_dataset(Through(module)).read[0].weight is module[0].weight


class Missing:
    def __init__(self):
        self.name = "missing"

    def __reduce__(self):
        return self.name


missing = Missing()


def test_what_is_made_to_be_shared_is_shared_and_what_is_small_is_copied():
    dataset = Through(None)
    dataset.event, dataset.queue, dataset.lock, dataset.local = (
        threading.Event(),
        queue.Queue(),
        threading.Lock(),
        threading.local(),
    )
    dataset.large, dataset.table, dataset.array = list(range(100_000)), torch.arange(N), np.arange(N)
    dataset.names, dataset.logger = {str(idx): idx for idx in range(5000)}, logging.getLogger("stocache")
    dataset.sentinel = missing
    copied = {"memo": {}, "short": [[1], [2]], "object": Missing()}
    vars(dataset).update(copied)
    mine = copy_dataset(dataset)
    assert {name for name, value in vars(dataset).items() if getattr(mine, name) is not value} == {*copied}
    assert mine.short == dataset.short
    assert mine.short[0] is not dataset.short[0]


def test_a_copy_is_whole():
    first, second = Reader("a"), Reader("b")
    dataset = Through(first)
    dataset.again, dataset.itself, dataset.pair = first, dataset, (first, second)
    dataset.method, dataset.function = first.read, lambda: (dataset, first)
    mine = copy_dataset(dataset)
    assert mine is not dataset
    assert mine.read is mine.again is mine.pair[0] is mine.method.__self__
    assert mine.read is not first
    assert mine.itself is mine
    assert mine.function() == (mine, mine.read)


def test_a_function_that_calls_itself_is_copied():
    def count(idx):
        return idx if idx < 10 else count(idx - 10)

    @functools.wraps(count)
    def counted(idx, *, by=1):
        return count(idx) * by

    counted.kept = True
    mine = copy_dataset(Through(counted)).read
    assert mine is not counted
    assert (mine(23), mine(23, by=2), mine.__name__, mine.__qualname__, mine.kept) == (
        3, 6, "count", counted.__qualname__, True
    )  # fmt: skip


class Closes(Reader):
    """Closes what it was given when it goes."""

    def __del__(self):
        self.file.close()


def test_an_object_that_would_close_the_file_of_the_users_is_not_copied(path):
    with opened(path) as file:
        reader = Closes(path)
        reader.file = file
        for _ in range(2):
            assert numbers_of(thread_loader(Through(reader.read))) == list(range(N))
        assert not file.closed


@pytest.mark.parametrize("count", [3, 2000])
@pytest.mark.parametrize("base", [dict, list])
def test_subclasses_of_containers_are_copied_whole(base, count):
    class Squares(base):
        pass

    value = Squares({idx: [idx] for idx in range(count)} if base is dict else ([idx] for idx in range(count)))
    value.name = "squares"
    mine = copy_dataset(Through(value)).read
    assert (mine, mine.name, type(mine)) == (value, "squares", type(value))
    assert mine is not value
    assert (mine[0] is value[0]) == (count > 1000)
