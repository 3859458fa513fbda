"""Blocks from a URL: fetched whole, once per machine, into a folder of limited size."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from stocache import DamagedError, LimitError, OnDiskBlockDataStorage, StorageError
from stocache.folder import block_name
from tests.conftest import run_all
from tests.test_storage import N, files_of, sample, save
from tests.test_structure import same

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


@pytest.mark.parametrize("start_method", ["fork", "spawn"], indirect=True)
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


def test_a_url_is_not_prepared(tmp_path):
    with pytest.raises(StorageError, match=r"is a URL\. Prepare a local folder, and copy it there"):
        OnDiskBlockDataStorage("memory://photos", local_folder=tmp_path).start_preparation()


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
