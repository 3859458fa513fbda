"""Each worker thread has a dataset of its own: the samples are right whatever the dataset opens, counts and keeps."""

import functools
import logging
import queue
import sqlite3
import struct
import tarfile
import threading
import time
import zipfile
from collections import OrderedDict, UserDict, defaultdict
from io import BytesIO

import h5py
import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import stocache
from stocache.threads.copies import copy_dataset, find_open_handle

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")

N = 60
_RECORD = struct.Struct("<q")


def thread_loader(dataset, **options):
    options = {"batch_size": 4, "num_workers": 4, "timeout": 20, **options}
    return stocache.DataLoader(dataset, worker_method="thread", **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "records").write_bytes(b"".join(map(_RECORD.pack, range(N))))
    with sqlite3.connect(folder / "records.sqlite") as base:
        base.execute("create table records (idx integer, value integer)")
        base.executemany("insert into records values (?, ?)", [(idx, idx) for idx in range(N)])
    base.close()
    with zipfile.ZipFile(folder / "records.zip", "w") as archive, tarfile.open(folder / "records.tar", "w") as tape:
        for idx in range(N):
            archive.writestr(str(idx), _RECORD.pack(idx))
            info = tarfile.TarInfo(str(idx))
            info.size = _RECORD.size
            tape.addfile(info, BytesIO(_RECORD.pack(idx)))
    with h5py.File(folder / "records.h5", "w") as file:
        file["records"] = np.arange(N)
    with (
        lmdb.open(str(folder / "records.lmdb"), subdir=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        for idx in range(N):
            transaction.put(str(idx).encode(), _RECORD.pack(idx))
    return folder


class Records(Dataset):
    """Opens what it reads when it is first asked, and keeps it in an attribute."""

    def __init__(self, folder):
        self.folder, self.opened, self.reads = folder, None, 0

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.reads += 1
        if self.opened is None:
            self.opened = self.open()
        return self.read(self.opened, idx)


class FileRecords(Records):
    def open(self):
        return open(self.folder / "records", "rb", buffering=0)

    def read(self, file, idx):
        file.seek(_RECORD.size * idx)
        time.sleep(0.0002)  # another thread that shared the file would move its position now
        return _RECORD.unpack(file.read(_RECORD.size))[0]

    def __del__(self):
        if self.opened is not None:
            self.opened.close()


class SqliteRecords(Records):
    def open(self):
        return sqlite3.connect(self.folder / "records.sqlite")  # refuses other threads

    def read(self, base, idx):
        return base.execute("select value from records where idx = ?", (idx,)).fetchone()[0]

    def __del__(self):
        if self.opened is not None and threading.current_thread() is not threading.main_thread():
            self.opened.close()


class ZipRecords(Records):
    def open(self):
        return zipfile.ZipFile(self.folder / "records.zip")

    def read(self, archive, idx):
        return _RECORD.unpack(archive.read(str(idx)))[0]


class TarRecords(Records):
    def open(self):
        return tarfile.open(self.folder / "records.tar")

    def read(self, tape, idx):
        return _RECORD.unpack(tape.extractfile(str(idx)).read())[0]


class H5Records(Records):
    def open(self):
        return h5py.File(self.folder / "records.h5")

    def read(self, file, idx):
        return int(file["records"][idx])

    def __del__(self):
        if self.opened:
            self.opened.close()


class LmdbRecords(Records):
    """LMDB lets a process open an environment only once."""

    def open(self):
        return lmdb.open(str(self.folder / "records.lmdb"), subdir=False, readonly=True, lock=False)

    def read(self, environment, idx):
        with environment.begin() as transaction:
            return _RECORD.unpack(transaction.get(str(idx).encode()))[0]


class LmdbBatches(LmdbRecords):
    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class LmdbTransaction(LmdbRecords):
    def open(self):
        return super().open().begin()

    def read(self, transaction, idx):
        return _RECORD.unpack(transaction.get(str(idx).encode()))[0]


def read_at(file, idx):
    return FileRecords.read(None, file, idx)


class OpensInDict(FileRecords):
    """Keeps files in a dict of some kind, by the number of the part."""

    def __init__(self, folder, files):
        super().__init__(folder)
        self.files = files

    def __getitem__(self, idx):
        if idx % 3 not in self.files:
            self.files[idx % 3] = self.open()
        return self.read(self.files[idx % 3], idx)

    def __del__(self):
        for file in self.files.values():
            file.close()


class Reader:
    """A plain object that opens its file late, and cannot be pickled with it."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __getstate__(self):
        return {"path": self.path, "file": None}

    def __setstate__(self, state):
        vars(self).update(state)

    def read(self, idx):
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        return read_at(self.file, idx)

    def __del__(self):
        if self.file is not None:
            self.file.close()


class SlottedReader(Reader):
    __slots__ = ()


class ReducedReader(Reader):
    """Pickles and copies as a call."""

    def __reduce__(self):
        return type(self), (self.path,)

    __copy__ = None


class Opened(dict):
    """Opens what is missing."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, part):
        self[part] = file = open(self.folder / "records", "rb", buffering=0)  # noqa: SIM115
        return file

    def __setitem__(self, part, file):
        assert type(part) is int  # a copy does not call this
        super().__setitem__(part, file)

    def __len__(self):
        raise RuntimeError("how many there will be is not known")

    def read(self, idx):
        return read_at(self[idx % 3], idx)

    def __del__(self):
        for file in self.values():
            file.close()


class OpenedOrdered(Opened, OrderedDict):
    pass


class OpenedDefault(Opened, defaultdict):
    pass


class OpenedUser(UserDict):
    read, __missing__, __del__ = Opened.read, Opened.__missing__, Opened.__del__

    def __init__(self, folder):
        super().__init__()
        self.folder = folder


class OpenedList(list):
    def __init__(self, folder):
        super().__init__([None] * 3)
        self.folder = folder

    def read(self, idx):
        if self[idx % 3] is None:
            self[idx % 3] = open(self.folder / "records", "rb", buffering=0)  # noqa: SIM115
        return read_at(self[idx % 3], idx)

    def __del__(self):
        for file in filter(None, self):
            file.close()


class OnlySlots:
    __slots__ = ("__weakref__", "file", "path")

    def __init__(self, path):
        self.path = path  # file is not set

    def read(self, idx):
        if not hasattr(self, "file"):
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        return read_at(self.file, idx)

    def __del__(self):
        if hasattr(self, "file"):
            self.file.close()


class Through(Dataset):
    """Reads through a function or an object."""

    def __init__(self, read):
        self.read = read

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return self.read(idx)


class SlottedDataset(Dataset):
    __slots__ = ("reader",)

    def __init__(self, path):
        self.reader = OnlySlots(path)

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return self.reader.read(idx)


class WithLambda(FileRecords):
    def __init__(self, folder):
        super().__init__(folder)
        self.transform = lambda idx: FileRecords.__getitem__(self, idx)

    def __getitem__(self, idx):
        return self.transform(idx)


class WithMethod(FileRecords):
    def __init__(self, folder):
        super().__init__(folder)
        self.transform = functools.partial(super().__getitem__)

    def __getitem__(self, idx):
        return self.transform(idx)


class WithKeptOpen(FileRecords):
    """Keeps open files in an `lru_cache` of its own."""

    def __init__(self, folder):
        super().__init__(folder)
        self.kept = functools.lru_cache(maxsize=4)(self.open_part)

    def open_part(self, part):
        return self.open()

    def __getitem__(self, idx):
        return self.read(self.kept(idx % 2), idx)


class Forwards(Dataset):
    """Forwards every attribute, also those that nobody has."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return self.inner[idx]


class Settings(dict):
    """A dict whose keys are attributes, and that raises the wrong error."""

    __getattr__ = dict.__getitem__


class Strange:
    """An object that any question breaks."""

    def __getattr__(self, name):
        raise KeyError(name)


class WithStrange(FileRecords):
    def __init__(self, folder):
        super().__init__(folder)
        self.settings, self.strange, self.itself = Settings(size=3), Strange(), self


def in_closure(folder):
    opened = None

    def read(idx):
        nonlocal opened
        if opened is None:
            opened = open(folder / "records", "rb", buffering=0)  # noqa: SIM115
        return read_at(opened, idx)

    return read


def of_many(folder):
    """One dataset for each sample, as for a folder of files."""
    return ConcatDataset([Subset(FileRecords(folder), [idx % N]) for idx in range(1200)])


LAZY = {
    "file": FileRecords,
    "sqlite": SqliteRecords,
    "zip": ZipRecords,
    "tar": TarRecords,
    "h5": H5Records,
    "lmdb": LmdbRecords,
    "lmdb by batches": LmdbBatches,
    "dict": lambda folder: OpensInDict(folder, {}),
    "ordered dict": lambda folder: OpensInDict(folder, OrderedDict()),
    "default dict": lambda folder: OpensInDict(folder, defaultdict(list)),
    "object": lambda folder: Through(Reader(folder / "records").read),
    "object in slots": lambda folder: Through(SlottedReader(folder / "records").read),
    "reduced object": lambda folder: Through(ReducedReader(folder / "records").read),
    "subclass of dict": lambda folder: Through(Opened(folder).read),
    "subclass of OrderedDict": lambda folder: Through(OpenedOrdered(folder).read),
    "subclass of defaultdict": lambda folder: Through(OpenedDefault(folder).read),
    "subclass of UserDict": lambda folder: Through(OpenedUser(folder).read),
    "subclass of list": lambda folder: Through(OpenedList(folder).read),
    "only slots": lambda folder: Through(OnlySlots(folder / "records").read),
    "dataset with slots": lambda folder: SlottedDataset(folder / "records"),
    "lambda": WithLambda,
    "partial of method": WithMethod,
    "lru_cache": WithKeptOpen,
    "closure": lambda folder: Through(in_closure(folder)),
    "forwards": lambda folder: Forwards(FileRecords(folder)),
    "strange": WithStrange,
    "concatenated": of_many,
    "subset": lambda folder: Subset(Forwards(FileRecords(folder)), range(N)),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.leaves_descriptors  # what datasets open is closed when Python finds them
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_each_thread_opens_its_own(name, files):
    dataset = LAZY[name](files)
    before = dict(vars(dataset))
    came = torch.cat(list(thread_loader(dataset))).tolist()
    assert came == [idx % N for idx in range(len(dataset))]
    assert vars(dataset) == before
    assert getattr(dataset, "reads", 0) == 0  # of the user's own object
    assert getattr(dataset, "opened", None) is None
    assert find_open_handle(dataset) is None


@pytest.mark.parametrize("kind", [FileRecords, ZipRecords, TarRecords, H5Records, LmdbTransaction])
def test_what_is_open_already_is_read_by_one_thread_at_a_time(kind, files, caplog):
    dataset = kind(files)
    dataset.opened = dataset.open()
    loader = thread_loader(dataset)
    with caplog.at_level(logging.WARNING, "stocache"):
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == list(range(N))
    assert [record.getMessage() for record in caplog.records if "one sample at a time" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert f"{kind.__name__}.opened" in caplog.text
    assert dataset[7] == 7  # it is not closed
    if hasattr(dataset.opened, "close"):
        dataset.opened.close()


def test_an_environment_of_lmdb_is_for_all_threads(files, caplog):
    dataset = LmdbRecords(files)
    with dataset.open() as dataset.opened:
        assert torch.cat(list(thread_loader(dataset))).tolist() == list(range(N))
        with pytest.raises(lmdb.Error, match="already open"):  # by someone who does not share it
            list(thread_loader(LmdbRecords(files)))
    assert "one sample at a time" not in caplog.text


class Alone(Dataset):
    """Notices that two threads are in it."""

    thread_safe = False
    inside = 0
    most = 0

    def __len__(self):
        return N

    def __getitem__(self, idx):
        cls = type(self)
        cls.inside += 1
        cls.most = max(cls.most, cls.inside)
        time.sleep(0.0005)
        cls.inside -= 1
        return idx


def test_a_dataset_that_is_not_thread_safe_is_used_by_one_thread_at_a_time():
    Alone.most = 0
    assert torch.cat(list(thread_loader(Alone()))).tolist() == list(range(N))
    assert Alone.most == 1


class Drawing(FileRecords):
    def __getitem__(self, idx):
        value = super().__getitem__(idx)
        return value + torch.rand((), generator=torch.random.thread_safe_generator()).item()


def test_samples_that_draw_do_not_wait_for_those_that_wait_for_the_dataset(files):
    dataset = Drawing(files)
    dataset.opened = dataset.open()
    make = lambda method: stocache.DataLoader(
        dataset, batch_size=8, num_workers=3, worker_method=method, timeout=20, generator=torch.Generator().manual_seed(3)
    )
    threads = list(make("thread"))
    dataset.opened.close()
    dataset.opened = None
    assert same_values(threads, list(make("multiprocessing")))


def same_values(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


class Counts(Dataset):
    thread_safe = True

    def __init__(self):
        self.lock, self.reads = threading.Lock(), 0

    def __len__(self):
        return N

    def __getitem__(self, idx):
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
    dataset = Through(module)
    assert torch.cat(list(thread_loader(dataset))).flatten().tolist() == list(range(N))
    assert module[0].parameters_of_sample is None
    assert copy_dataset(dataset).read[0].weight is module[0].weight


class Holds(Dataset):
    def __init__(self):
        self.event, self.queue, self.lock, self.local = threading.Event(), queue.Queue(), threading.Lock(), threading.local()
        self.large, self.table = list(range(100_000)), torch.arange(N)
        self.array, self.names = np.arange(N), {str(idx): idx for idx in range(5000)}
        self.memo, self.short = {}, [[1], [2]]
        self.logger = logging.getLogger("stocache")


def test_what_is_made_to_be_shared_is_shared_and_what_is_small_is_copied():
    dataset = Holds()
    mine = copy_dataset(dataset)
    for name, value in vars(dataset).items():
        assert (getattr(mine, name) is value) == (name not in ("memo", "short")), name
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

    counted.told = True
    dataset = Through(counted)
    mine = copy_dataset(dataset).read
    assert mine is not counted
    assert (mine(23), mine(23, by=2), mine.__name__, mine.__qualname__, mine.told) == (
        3, 6, "count", counted.__qualname__, True
    )  # fmt: skip


class Closes(Reader):
    """Closes what it was given when it goes."""

    def __del__(self):
        self.file.close()


def test_an_object_that_would_close_the_file_of_the_users_is_not_copied(files):
    with open(files / "records", "rb", buffering=0) as file:
        reader = Closes(files / "records")
        reader.file = file
        dataset = Through(reader.read)
        for _ in range(2):
            assert torch.cat(list(thread_loader(dataset))).tolist() == list(range(N))
        assert not file.closed


class Missing:
    def __init__(self):
        self.name = "missing"

    def __reduce__(self):
        return self.name


missing = Missing()


def test_sentinels_are_shared_and_open_files_are_found_in_any_object(files):
    assert copy_dataset(Through(missing)).read is missing
    assert copy_dataset(Through(Missing())).read is not missing
    for reader, place in ((ReducedReader(files / "records"), "read.file"), (Opened(files), "read[0]")):
        assert find_open_handle(Through(reader.read)) is None
        reader.read(3)
        assert place in find_open_handle(Through(reader.read))


@pytest.mark.parametrize("count", [3, 2000])
def test_subclasses_of_containers_are_copied_whole(count):
    class Table(dict):
        pass

    class Rows(list):
        pass

    table, rows = Table({idx: [idx] for idx in range(count)}), Rows([idx] for idx in range(count))
    table.name = rows.name = "squares"
    for value in (table, rows):
        mine = copy_dataset(Through(value)).read
        assert (mine, mine.name, type(mine)) == (value, "squares", type(value))
        assert mine is not value
        assert (mine[0] is value[0]) == (count > 1000)


def test_sockets_are_handles():
    import socket

    with socket.socket() as opened:
        assert "socket" in find_open_handle(Through([{"a": opened}]))
    assert find_open_handle(Through(opened)) is None
    assert find_open_handle(Through(None)) is None


@pytest.mark.parametrize("place", [lambda file: lambda: file, lambda file: functools.partial(print, file=file)])
def test_handles_are_found_in_functions(place, files):
    with open(files / "records", "rb") as file:
        assert "FileIO" in find_open_handle(Through(place(file))) or "Buffered" in find_open_handle(Through(place(file)))
        function = lambda: unset
        assert find_open_handle(Through([function, function])) is None
        unset = None
