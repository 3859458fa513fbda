"""Blocks at a URL: fetched whole, once per machine, into a folder of limited size; and prepared there."""

import contextlib
import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from stocache import DamagedError, LimitError, OnDiskBlockDataStorage, StorageError, prepare
from stocache.storage.manifest import block_name
from tests.support.equality import same
from tests.support.preparing import Images, Preparer, content
from tests.support.processes import in_child, run_all
from tests.support.storages import N, files_of, read, save

fsspec = pytest.importorskip("fsspec", reason="it opens URLs")
from fsspec.implementations.local import LocalFileSystem  # noqa: E402

BLOCKS = [f"{b:06d}.safetensors" for b in range(N // 5)]
MEMORY = fsspec.get_filesystem_class("memory")
QUIET = {"block_size": 7, "progress": False}


@pytest.fixture
def source(tmp_path):
    with save(OnDiskBlockDataStorage(tmp_path / "source", 5), info={1: "needs a file of its own"}) as storage:
        return storage


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Return the names of the files that were fetched since the last call, by this process and its forks."""
    log, real = tmp_path / "log", LocalFileSystem.get_file
    log.touch()

    def get_file(self, path, local, **options):
        with open(log, "a") as file:
            file.write(f"{os.path.basename(path)}\n")
        return real(self, path, local, **options)

    def names():
        found = log.read_text().split()
        log.write_text("")
        return found

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    return names


@pytest.fixture
def open_remote(source, tmp_path):
    return lambda **options: OnDiskBlockDataStorage(f"file://{tmp_path}/source", local_folder=tmp_path / "local", **options)


@pytest.fixture
def remote(open_remote):
    with open_remote() as storage:
        yield storage


def test_samples_come_from_a_url(remote, fetched, open_remote):
    assert remote.is_prepared()
    assert len(remote) == N
    assert remote.load_dataset_info() == {1: "needs a file of its own"}
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(remote.load_sample, [7] * 5))
    assert read(remote, (7, 3, 8, *range(N)))
    assert sorted(fetched()) == [*BLOCKS, "info.safetensors"]
    with open_remote() as other:
        assert read(other)
    assert fetched() == []


def test_the_folder_stays_within_its_limit_and_the_latest_stay(source, open_remote, tmp_path, fetched):
    size = max(path.stat().st_size for path in files_of(source) if "blocks" in str(path))
    with open_remote(local_limit=3 * size) as storage:
        for idx in range(N):
            assert read(storage, [idx])
            assert sum(path.stat().st_size for path in (tmp_path / "local").rglob("*.safetensors")) <= 3 * size
        storage.close()
        fetched()
        assert read(storage, [N - 1])
        assert fetched() == []
        assert read(storage, [0])
        assert fetched() == BLOCKS[:1]


@pytest.mark.linux
@pytest.mark.parametrize("limit", ["1GB", 1])  # a byte: each file that comes removes the others
def test_processes_fetch_each_block_once_and_read_while_others_make_room(open_remote, limit, fetched):
    def read_all(_):
        with open_remote(local_limit=limit) as storage:
            assert read(storage)

    run_all(multiprocessing.get_context("fork"), 3, read_all)
    names = fetched()
    assert set(names) == set(BLOCKS)
    assert limit == 1 or len(names) == len(BLOCKS)


def test_a_fetch_that_was_killed_is_done_again(remote, open_remote):
    def fetch():
        def get_file(self, path, target, **options):
            Path(target).write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)

        LocalFileSystem.get_file = get_file
        open_remote().load_sample(0)

    assert in_child(fetch) == signal.SIGKILL
    assert read(remote, [0])


def test_what_was_fetched_before_it_was_prepared_again_is_fetched_again(source, remote, open_remote, fetched):
    remote.load_sample(0)
    shutil.rmtree(source.base_folder)
    save(OnDiskBlockDataStorage(source.base_folder, 4), info=None)
    with open_remote() as again:
        assert read(again, [0])
    assert fetched() == BLOCKS[:1] * 2


@pytest.mark.parametrize(("harm", "message"), [(lambda path: os.truncate(path, 1999), "damaged"), (os.unlink, "missing")])
def test_a_damaged_or_missing_block_at_the_url_is_an_error(source, remote, tmp_path, harm, message):
    harm(Path(source.base_folder, block_name(1)))
    with pytest.raises(DamagedError, match=rf"file://.*/blocks/000001.safetensors is {message}"):
        remote.load_sample(5)
    assert not list((tmp_path / "local").rglob("*.part"))


def test_what_cannot_be_fetched_is_an_error(remote, monkeypatch):
    monkeypatch.setattr(LocalFileSystem, "get_file", mock.Mock(side_effect=TimeoutError("no answer")))
    with pytest.raises(StorageError, match=r"000000.safetensors cannot be fetched: TimeoutError: no answer"):
        remote.load_sample(0)


def test_wrong_urls_and_limits_are_errors():
    with pytest.raises(StorageError, match="nothing://photos cannot be opened: Protocol not known"):
        OnDiskBlockDataStorage("nothing://photos")
    for limit in (0, "x"):
        with pytest.raises(LimitError, match=f"{limit}"):
            OnDiskBlockDataStorage("memory://photos", local_limit=limit)


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
    ("source", "options"), [(Images(seeded=True), {}), (Images(), {"shuffle_seed": 3}), (Preparer(), {"num_workers": 2})]
)
def test_what_is_prepared_at_a_url_is_the_same_as_in_a_folder(tmp_path, memory, source, options):
    options = QUIET | options
    with prepare(source, memory, **options) as storage:
        first = storage.load_sample(3)
    source.yielded = 0
    with prepare(source, tmp_path / "a", **options) as storage:
        assert same(storage.load_sample(3), first)
    before = there(memory)
    assert before == content(tmp_path / "a")
    prepare(source, memory, **options).close()
    assert there(memory) == before
    with pytest.raises(StorageError, match="memory://stocache/photos is prepared in another way"):
        prepare(source, memory, **options | {"block_size": 8})


@pytest.mark.linux
def test_worker_processes_prepare_at_a_url_that_all_of_them_see(tmp_path, memory):
    for folder in (f"file://{tmp_path}/deep/a", tmp_path / "b"):
        prepare(Images(), folder, num_workers=2, **QUIET).close()
    assert content(tmp_path / "deep" / "a") == content(tmp_path / "b")
    with pytest.raises(StorageError, match=r"blocks/000000\.safetensors is missing although a worker wrote it"):
        prepare(Images(), memory, num_workers=2, **QUIET)  # each process has a memory of its own
    assert not OnDiskBlockDataStorage(memory).is_prepared()


def test_storage_options_are_those_of_the_file_system(memory):
    with mock.patch.object(MEMORY, "__init__", autospec=True, side_effect=MEMORY.__init__) as made:
        with prepare(Images(), memory, progress=False, storage_options={"password": "please"}) as storage:
            assert same(storage.load_sample(7), Images()[7])
    assert {call.kwargs.get("password") for call in made.call_args_list} == {"please"}
