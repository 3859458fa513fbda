"""Blocks at a URL: fetched whole, once per machine, into a folder of limited size; and prepared there."""

import contextlib
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from stocache import DamagedError, LimitError, OnDiskBlockDataStorage, StorageError, prepare
from stocache.storage.manifest import block_name
from tests.support.equality import same
from tests.support.preparing import Broken, Images, Preparer, content, written
from tests.support.processes import run_all
from tests.support.storages import N, files_of, sample, save

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def source(tmp_path):
    with save(OnDiskBlockDataStorage(tmp_path / "source", 5), info={1: "needs a file of its own"}) as storage:
        return storage


@pytest.fixture
def fetched(monkeypatch):
    """The names of the files that were fetched, by this process."""
    from fsspec.implementations.local import LocalFileSystem

    names = []
    real = LocalFileSystem.get_file

    def get_file(self, path, local, **options):
        names.append(os.path.basename(path))
        return real(self, path, local, **options)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    return names


@pytest.fixture
def remote(source, tmp_path):
    with OnDiskBlockDataStorage(f"file://{source.base_folder}", local_folder=tmp_path / "local") as storage:
        yield storage


def local_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def test_samples_come_from_a_url(remote, fetched):
    assert remote.is_prepared()
    assert len(remote) == N
    assert remote.load_dataset_info() == {1: "needs a file of its own"}
    for idx in (7, 3, 8, *range(N)):
        assert same(remote.load_sample(idx), sample(idx))
    assert sorted(fetched) == sorted([*(os.path.basename(block_name(b)) for b in range(N // 5)), "info.safetensors"])


def test_any_file_system_will_do(source, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(source.base_folder, "/photos", recursive=True)
    with OnDiskBlockDataStorage("memory://photos", local_folder=tmp_path / "local") as storage:
        assert same(storage.load_sample(7), sample(7))
    memory.rm("/photos", recursive=True)


def test_what_was_fetched_is_fetched_by_no_other(remote, source, tmp_path, fetched):
    remote.load_sample(0)
    with OnDiskBlockDataStorage(f"file://{source.base_folder}", local_folder=tmp_path / "local") as other:
        other.load_sample(1)
    assert fetched == ["000000.safetensors"]


def test_the_folder_stays_within_its_limit_and_the_latest_stay(source, tmp_path, fetched):
    size = max(path.stat().st_size for path in files_of(source) if "blocks" in str(path))
    options = {"local_folder": tmp_path / "local", "local_limit": 3 * size}
    with OnDiskBlockDataStorage(f"file://{source.base_folder}", **options) as storage:
        for idx in range(N):
            assert same(storage.load_sample(idx), sample(idx))
            assert local_bytes(tmp_path / "local") <= 3 * size
        storage.close()
        fetched.clear()
        assert same(storage.load_sample(N - 1), sample(N - 1))
        assert fetched == []
        assert same(storage.load_sample(0), sample(0))
        assert fetched == ["000000.safetensors"]


def _read_all(number, url, local, limit, log):
    from fsspec.implementations.local import LocalFileSystem

    real = LocalFileSystem.get_file

    def get_file(self, path, target, **options):
        with open(log, "a") as file:
            file.write(f"{os.path.basename(path)}\n")
        return real(self, path, target, **options)

    LocalFileSystem.get_file = get_file
    with OnDiskBlockDataStorage(url, local_folder=local, local_limit=limit) as storage:
        assert all(same(storage.load_sample(idx), sample(idx)) for idx in range(N))


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
def test_processes_fetch_each_block_once(source, tmp_path, run_processes):
    log = tmp_path / "log"
    run_processes(3, _read_all, f"file://{source.base_folder}", tmp_path / "local", "1GB", log)
    assert sorted(log.read_text().split()) == [os.path.basename(block_name(b)) for b in range(N // 5)]


def test_processes_read_while_others_make_room(source, tmp_path):
    limit = 1  # byte: each file that comes removes the others
    arguments = (f"file://{source.base_folder}", tmp_path / "local", limit, tmp_path / "log")
    run_all(multiprocessing.get_context("fork"), 3, _read_all, *arguments)


def test_threads_fetch_each_block_once(remote, fetched):
    threads = [threading.Thread(target=remote.load_sample, args=(3,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["000000.safetensors"]


def _fetch_slowly(url, local, ready):
    from fsspec.implementations.local import LocalFileSystem

    def get_file(self, path, target, **options):
        Path(target).write_bytes(b"half of it")
        ready.set()
        signal.pause()

    LocalFileSystem.get_file = get_file
    OnDiskBlockDataStorage(url, local_folder=local).load_sample(0)


def test_a_fetch_that_was_killed_is_done_anew(source, remote, tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_fetch_slowly, args=(f"file://{source.base_folder}", tmp_path / "local", ready))
    process.start()
    assert ready.wait(20)
    process.kill()
    process.join()
    process.close()
    assert same(remote.load_sample(0), sample(0))


def test_what_was_fetched_before_it_was_prepared_anew_is_fetched_again(source, remote, tmp_path, fetched):
    remote.load_sample(0)
    for path in files_of(source):
        path.unlink()
    Path(source.base_folder, "blocks").rmdir()
    save(OnDiskBlockDataStorage(source.base_folder, 4), info=None)
    with OnDiskBlockDataStorage(f"file://{source.base_folder}", local_folder=tmp_path / "local") as again:
        assert same(again.load_sample(0), sample(0))
    assert fetched == ["000000.safetensors"] * 2


def test_a_damaged_block_at_the_url_is_an_error(source, remote):
    path = Path(source.base_folder, block_name(1))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"file://.*/blocks/000001.safetensors is damaged"):
        remote.load_sample(5)


def test_a_missing_block_at_the_url_is_an_error(source, remote, tmp_path):
    Path(source.base_folder, block_name(1)).unlink()
    with pytest.raises(DamagedError, match=r"file://.*/blocks/000001.safetensors is missing"):
        remote.load_sample(5)
    assert not list(Path(tmp_path, "local").rglob("*.part"))


def test_what_cannot_be_fetched_is_an_error(remote, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    def fail(self, path, local, **options):
        raise TimeoutError("no answer")

    monkeypatch.setattr(LocalFileSystem, "get_file", fail)
    with pytest.raises(StorageError, match=r"000000.safetensors cannot be fetched: TimeoutError: no answer"):
        remote.load_sample(0)


def test_nothing_at_the_url_is_an_error(tmp_path):
    storage = OnDiskBlockDataStorage(f"file://{tmp_path}/nothing", local_folder=tmp_path / "local")
    assert not storage.is_prepared()
    with pytest.raises(DamagedError, match=r"index\.json is missing: nothing was prepared there"):
        len(storage)


@pytest.mark.parametrize(
    ("url", "options", "error", "message"),
    [
        ("nothing://photos", {}, StorageError, "nothing://photos cannot be opened: Protocol not known"),
        ("memory://photos", {"local_limit": 0}, LimitError, "local_limit=0"),
        ("memory://photos", {"local_limit": "x"}, LimitError, "x"),
    ],
)
def test_wrong_urls_and_limits_are_errors(url, options, error, message):
    with pytest.raises(error, match=message):
        OnDiskBlockDataStorage(url, **options)


# ---------------------------------------------------------------------------------------------------- prepared there


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A URL in this process's memory; what is fetched from there goes away with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield "memory://stocache/photos"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/stocache", recursive=True)


def there(url):
    """What is at a URL in memory, as `content` has it of a folder."""
    fs, path = fsspec.core.url_to_fs(url)
    return {name.removeprefix(f"{path}/"): fs.cat_file(name) for name in fs.find(path)}


@pytest.mark.parametrize(
    ("source", "options"),
    [(Images(seeded=True), {}), (Images(), {"shuffle_seed": 3}), (Preparer(), {}), (Preparer(), {"num_workers": 2})],
    ids=["dataset", "shuffled", "preparer", "preparer, by threads"],
)
def test_what_is_prepared_at_a_url_is_the_same_as_in_a_folder(tmp_path, memory, source, options):
    options |= {"block_size": 7, "progress": False}
    with prepare(source, memory, **options) as storage:
        first = storage.load_sample(3)
    source.yielded = 0
    with prepare(source, tmp_path / "a", **options) as storage:
        assert same(storage.load_sample(3), first)
    assert there(memory) == content(tmp_path / "a")
    before = there(memory)
    source.yielded = 0
    prepare(source, memory, **options).close()
    assert there(memory) == before
    with pytest.raises(StorageError, match="memory://stocache/photos is prepared in another way"):
        prepare(source, memory, **options | {"block_size": 8})


def test_worker_processes_prepare_at_a_url(tmp_path):
    for folder in (f"file://{tmp_path}/deep/a", tmp_path / "b"):
        prepare(Images(), folder, num_workers=2, block_size=7, progress=False).close()
    assert content(tmp_path / "deep" / "a") == content(tmp_path / "b")


def test_workers_that_write_elsewhere_are_found_out(memory):
    with pytest.raises(StorageError, match=r"blocks/000000\.safetensors is missing although a worker wrote it"):
        prepare(Images(), memory, num_workers=2, block_size=7, progress=False)  # each process has a memory of its own
    assert not OnDiskBlockDataStorage(memory).is_prepared()


def test_a_storage_takes_samples_at_a_url(memory):
    with save(OnDiskBlockDataStorage(memory, 5), info={1: "needs a file of its own"}) as storage:
        assert storage.load_dataset_info() == {1: "needs a file of its own"}
        assert all(same(storage.load_sample(idx), sample(idx)) for idx in range(N))
        with pytest.raises(StorageError, match="is prepared already"):
            storage.start_preparation()


def test_an_interrupted_preparation_at_a_url_goes_on_and_writes_a_cut_block_anew(tmp_path):
    url, blocks = f"file://{tmp_path}/a", tmp_path / "a" / "blocks"
    options = {"block_size": 7, "progress": False}
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        prepare(Preparer(stop_at=60), url, **options)
    assert not OnDiskBlockDataStorage(url).is_prepared()
    kept = written(tmp_path / "a")
    assert len(kept) == 8
    os.truncate(tmp_path / "a" / block_name(3), 50)
    os.truncate(tmp_path / "a" / block_name(4), 0)
    (blocks / "000099.safetensors").write_bytes(b"of another one")
    prepare(Preparer(), url, **options).close()
    prepare(Preparer(), tmp_path / "b", **options).close()
    assert content(tmp_path / "a") == content(tmp_path / "b")
    again = written(tmp_path / "a")
    assert {name for name in kept if kept[name] == again[name]} == {f"{b:06d}.safetensors" for b in (0, 1, 2, 5, 6, 7)}


def test_whole_blocks_of_a_dataset_at_a_url_are_not_written_again(tmp_path, memory):
    flag = tmp_path / "flag"
    flag.touch()
    options = {"block_size": 7, "progress": False}
    with pytest.raises(ValueError, match="photo 60"):
        prepare(Broken(flag), memory, **options)
    fs = fsspec.filesystem("memory")
    kept = {name: fs.modified(name) for name in fs.find("/stocache/photos/blocks")}
    assert kept
    flag.unlink()
    prepare(Broken(flag), memory, **options).close()
    assert kept.items() <= {name: fs.modified(name) for name in fs.find("/stocache/photos/blocks")}.items()
    prepare(Broken(flag), tmp_path / "a", **options).close()
    assert there(memory) == content(tmp_path / "a")


def test_a_block_at_a_url_that_cannot_be_looked_at_is_an_error_and_stays(memory, monkeypatch):
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        prepare(Preparer(stop_at=60), memory, block_size=7, progress=False)
    before = there(memory)

    def fail(self, path, start=None, end=None, **options):
        if "blocks" in path:
            raise TimeoutError("no answer")
        return real(self, path, start, end, **options)

    real = type(fsspec.filesystem("memory")).cat_file
    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
        with pytest.raises(StorageError, match=r"safetensors cannot be read: TimeoutError: no answer"):
            prepare(Preparer(), memory, block_size=7, progress=False)
    assert there(memory) == before


def test_files_of_others_at_a_url_are_left_alone(memory):
    fsspec.filesystem("memory").pipe_file("/stocache/photos/letter.txt", b"dear")
    with pytest.raises(StorageError, match=r"holds 'letter\.txt', which stocache did not write"):
        prepare(Images(), memory, progress=False)
    assert there(memory) == {"letter.txt": b"dear"}


def test_a_url_that_cannot_be_written_to_is_an_error(memory, monkeypatch):
    def fail(self, path, value, **options):
        raise PermissionError("read only")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", fail)
    with pytest.raises(StorageError, match=r"preparing\.json cannot be written: PermissionError: read only"):
        prepare(Images(), memory, progress=False)


class Locked(type(fsspec.filesystem("memory"))):
    """A file system with a password."""

    protocol = "locked"

    def __init__(self, password=None, **options):
        super().__init__(**options)
        if password != "please":
            raise ValueError("wrong password")


def test_storage_options_are_those_of_the_file_system(memory, monkeypatch):
    fsspec.register_implementation("locked", Locked, clobber=True)
    url = memory.replace("memory", "locked")
    with pytest.raises(StorageError, match="locked://stocache/photos cannot be opened: wrong password"):
        prepare(Images(), url, progress=False)
    with prepare(Images(), url, progress=False, storage_options={"password": "please"}) as storage:
        assert same(storage.load_sample(7), Images()[7])


def test_a_preparer_is_not_shuffled_at_a_url(memory):
    with pytest.raises(StorageError, match="are shuffled by way of a local folder"):
        prepare(Preparer(), memory, shuffle_seed=1, progress=False)
    assert there(memory) == {}
