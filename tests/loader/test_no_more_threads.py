"""Where the machine gives no more threads, what is done ahead or behind in a thread is done in the caller's."""

import threading

import pytest
import torch

import stocache
from stocache import CachedDataset, OnDiskBlockDataStorage, StorageDataset, WorkerError, prepare
from stocache.shm.ring.pinned import Pinned
from tests.support.equality import same
from tests.support.images import Images
from tests.support.processes import wait_until


def start_some(monkeypatch, count):
    """Let so few threads start; return the names of the others."""
    names, left, start = [], [None] * count, threading.Thread.start

    def start_if_few(thread):
        if not left:
            names.append(thread.name)
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_few)
    return names


@pytest.fixture
def refused(monkeypatch):
    """The names of threads that were not started: none is."""
    return start_some(monkeypatch, 0)


def test_worker_threads_that_cannot_start_are_an_error(monkeypatch):
    start_some(monkeypatch, 3)
    before = threading.active_count()
    with pytest.raises(WorkerError, match=r"cannot start worker thread 3 of 20: can't start new thread"):
        iter(stocache.DataLoader(Images(), num_workers=20, worker_method="thread"))
    wait_until(lambda: threading.active_count() <= before)


def test_samples_are_written_to_the_disk_by_the_one_who_loads_them(refused, tmp_path):
    options = {"disk": tmp_path / "disk", "disk_limit": "1MB", "fingerprint": "v1"}
    for _ in range(2):
        with CachedDataset(Images(), "20KB", **options) as dataset:
            assert same([dataset[idx] for idx in range(50)], [Images()[idx] for idx in range(50)])
            stats = dataset.stats()
    assert (stats.disk.filled, stats.total.misses) == (50, 50)  # in the life of the folder
    assert "stocache writes to disk" in refused


def test_blocks_are_not_admitted_and_samples_come(tmp_path, request):
    prepare(Images(), tmp_path / "blocks", block_size=10, progress=False).close()
    with OnDiskBlockDataStorage(tmp_path / "blocks") as storage:
        refused = request.getfixturevalue("refused")
        with CachedDataset(StorageDataset(storage), 1) as dataset:
            for _ in range(2):
                assert same([dataset[idx] for idx in range(50)], [Images()[idx] for idx in range(50)])
    assert "stocache admits blocks" in refused


def test_the_rest_of_a_text_is_parsed_where_it_is_iterated(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("".join(f"{row} {row % 7}\n" for row in range(200)))

    def epoch():
        with stocache.StreamLoader(tmp_path / "text", 4, 8, delimiter=" ", shuffle="buffers") as loader:
            return list(loader)

    whole = epoch()
    for count in range(3):
        with monkeypatch.context() as patch:
            start_some(patch, count)
            assert same(epoch(), whole)


def test_a_pinned_buffer_is_waited_for_by_the_one_who_frees_it(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    pinned, freed = Pinned(), []
    for buffer in (1, 2):
        pinned.after_copies(freed.append, buffer)
    assert (freed, refused) == ([1, 2], ["stocache-pinned"] * 2)
    pinned.close()
