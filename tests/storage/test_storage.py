"""The contract of all storages, and what becomes of files that are damaged."""

import errno
import json
import os
import pickle
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark import damage
from stocache import (
    DamagedError,
    InMemoryDataStorage,
    LimitError,
    OnDiskBlockDataStorage,
    SampleError,
    SampleIndexError,
    StorageDataset,
    StorageError,
)
from stocache.storage import local
from stocache.storage.manifest import block_name
from stocache.system.hashing import embed_checksum
from tests.support.containers import Box
from tests.support.equality import same
from tests.support.storages import FilePerSample, N, files_of, sample, save

MAKERS = {
    "in memory": lambda path: InMemoryDataStorage(path / "data"),
    "on disk": lambda path: OnDiskBlockDataStorage(path / "data"),
    "on disk, blocks of 1": lambda path: OnDiskBlockDataStorage(path / "data", 1),
    "on disk, blocks of 7": lambda path: OnDiskBlockDataStorage(path / "data", 7),
    "on disk, blocks of 2 KB": lambda path: OnDiskBlockDataStorage(path / "data", block_bytes="2KB"),
    "a user's": lambda path: FilePerSample(path / "data"),
}


@pytest.fixture(params=MAKERS)
def make(request, tmp_path):
    return lambda: MAKERS[request.param](tmp_path)


@pytest.fixture
def disk(tmp_path):
    storage = save(OnDiskBlockDataStorage(tmp_path / "data", 7), info={"mean": torch.ones(3)})
    yield storage
    storage.close()


# ---------------------------------------------------------------------------------------------------- the contract


def test_samples_and_info_come_back_as_they_were_saved(make):
    assert not make().is_prepared()
    info = {"classes": ["a", "b"], "count": N}
    storage = save(make(), info=info)
    for reader in (storage, make(), pickle.loads(pickle.dumps(make()))):
        assert reader.is_prepared()
        assert same(reader.load_dataset_info(), info)
        for idx in (3, 0, N - 1, *range(N)):
            assert same(reader.load_sample(idx), sample(idx))


def test_a_storage_is_not_prepared_before_the_end(make):
    storage = make()
    storage.start_preparation()
    for idx in range(N):
        storage.save_sample(sample(idx))
        assert not storage.is_prepared()
        assert not make().is_prepared()
    storage.finish_preparation(None)
    assert storage.is_prepared()
    assert make().is_prepared()


def test_saving_before_the_start_is_an_error(make):
    with pytest.raises(RuntimeError, match="call start_preparation first"):
        make().save_sample(sample(0))


@pytest.mark.parametrize(
    "info",
    [
        None,
        {"a": [1, 2.5, "x", None, True]},
        {"mean": torch.ones(3), "std": np.ones(2)},
        Box(1, (2, 3)),
        ["token"] * 3000,
        float("nan"),
        {1: "keys that JSON would change"},
        (1, 2),
        "",
    ],
    ids=lambda info: str(info)[:20],
)
def test_any_info_comes_back(make, info):
    save(make(), 3, info)
    assert same(make().load_dataset_info(), info)


def test_a_loaded_sample_is_the_callers_own(make):
    storage = save(make())
    storage.load_sample(3)["image"].zero_()
    storage.load_sample(3)["tags"].append("more")
    assert same(storage.load_sample(3), sample(3))


def test_a_sample_is_saved_as_it_is_at_that_moment(make):
    storage, value = make(), sample(3)
    storage.start_preparation()
    storage.save_sample(value)
    value["image"] += 1
    value["tags"].append("more")
    storage.save_sample(value)
    storage.finish_preparation(None)
    assert same(storage.load_sample(0), sample(3))
    assert same(storage.load_sample(1), value)


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 31, 32, 33])
def test_any_number_of_samples(make, count):
    storage = save(make(), count)
    assert all(same(storage.load_sample(idx), sample(idx)) for idx in range(count))
    if hasattr(storage, "__len__"):
        assert len(storage) == count


# ---------------------------------------------------------------------------------------------------- ours

OURS = {name: maker for name, maker in MAKERS.items() if "user" not in name}


@pytest.fixture(params=OURS)
def make_ours(request, tmp_path):
    return lambda: OURS[request.param](tmp_path)


@pytest.mark.parametrize("idx", [-1, N, 10**30, 1.0, "1", None])
def test_indices_outside_are_errors(make_ours, idx):
    storage = save(make_ours())
    with pytest.raises(SampleIndexError, match=r"load_sample\("):
        storage.load_sample(idx)


def test_preparing_twice_is_an_error(make_ours):
    storage = save(make_ours())
    with pytest.raises(StorageError, match=r"is prepared already\. Remove"):
        storage.start_preparation()
    assert same(storage.load_sample(3), sample(3))


def test_finishing_before_the_start_is_an_error(make_ours):
    with pytest.raises(StorageError, match="finish_preparation: call start_preparation first"):
        make_ours().finish_preparation(None)


def test_reading_what_is_not_prepared_is_an_error(make_ours):
    for read in (lambda: make_ours().load_sample(0), lambda: make_ours().load_dataset_info(), lambda: len(make_ours())):
        with pytest.raises(DamagedError, match="is missing: nothing was prepared there"):
            read()


def test_pickles_need_allow_pickle_on_both_sides(tmp_path):
    for make in (InMemoryDataStorage, OnDiskBlockDataStorage):
        storage = make(tmp_path / make.__name__, allow_pickle=True)
        storage.start_preparation()
        storage.save_sample(...)
        storage.finish_preparation([...])
        assert storage.load_sample(0) is ...
        assert storage.load_dataset_info() == [...]
        for read in ("load_sample", "load_dataset_info"):
            with pytest.raises(StorageError, match="partly pickled"):
                getattr(make(tmp_path / make.__name__), read)(*[0] * (read == "load_sample"))
        fresh = make(tmp_path / "fresh")
        fresh.start_preparation()
        with pytest.raises(SampleError, match="sample 1: value is a ellipsis, which has no bytes of its own"):
            [fresh.save_sample(value) for value in (1, ...)] and fresh.finish_preparation(None)
        if hasattr(fresh, "close"):
            fresh.close()
            shutil.rmtree(tmp_path / "fresh")


def test_blocks_have_the_size_that_is_asked_for(tmp_path):
    storage = OnDiskBlockDataStorage(tmp_path, block_bytes="100KB")
    storage.start_preparation()
    for idx in range(200):
        storage.save_sample((torch.zeros(3, 16, 16, dtype=torch.uint8), idx))
    storage.finish_preparation(None)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "blocks").iterdir())]
    assert all(90_000 < size < 115_000 for size in sizes[:-1])
    assert storage.block_size == storage.index.blocks[0].samples == round(100_000 / (768 + 8 + 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0 is not a number of samples"),
        ({"block_size": True}, "block_size=True"),
        ({"block_size": 2.5}, r"block_size=2\.5"),
        ({"block_bytes": 0}, "block_bytes=0 is not a number of bytes"),
        ({"block_bytes": "many"}, "many"),
        ({"block_bytes": -5}, "block_bytes=-5"),
    ],
)
def test_sizes_that_are_none_are_errors(tmp_path, options, message):
    with pytest.raises(LimitError, match=message):
        OnDiskBlockDataStorage(tmp_path, **options)


def test_load_block_gives_all_samples_of_a_block(disk):
    assert [len(disk.load_block(b)) for b in range(8)] == [7] * 7 + [1]
    assert all(same(disk.load_block(idx // 7)[idx % 7], sample(idx)) for idx in range(N))
    with pytest.raises(SampleIndexError, match=r"load_block\(8\)"):
        disk.load_block(8)


@pytest.fixture
def images(tmp_path):
    """100 samples of 12 KiB in one block."""
    storage = OnDiskBlockDataStorage(tmp_path, 100)
    storage.start_preparation()
    for idx in range(100):
        storage.save_sample((torch.full((3, 64, 64), idx, dtype=torch.uint8), idx))
    storage.finish_preparation(None)
    yield storage
    storage.close()


def test_a_sample_is_read_without_its_block(images, monkeypatch):
    read = []
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at, real=os.preadv: (read.append(at), real(fd, buffers, at))[1])
    assert images.load_sample(50)[0][0, 0, 0] == 50
    assert len(read) == 1  # besides the first 64 KiB


def test_the_samples_of_a_batch_are_requested_before_the_first_is_read(images, monkeypatch):
    batch, calls, advise, read = [90, 17, 55], [], os.posix_fadvise, os.preadv
    images.load_sample(0)  # opens the block
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: (calls.append(("advise", *arguments[:3])), advise(*arguments)))
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: (calls.append(("read", fd, at, len(buffers[0]))), read(fd, buffers, at))[1]
    )
    samples = StorageDataset(images).__getitems__(batch)
    assert [(int(image[0, 0, 0]), number) for image, number in samples] == [(idx, idx) for idx in batch]
    assert [call[0] for call in calls] == ["advise"] * 3 + ["read"] * 3
    assert [call[1:] for call in calls[:3]] == [call[1:] for call in calls[3:]]


def test_the_header_of_a_block_that_was_closed_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("stocache.storage.storage._OPEN_BLOCKS", 2)
    storage = save(OnDiskBlockDataStorage(tmp_path / "data", 5))
    opened, real = [], storage._open_file
    monkeypatch.setattr(storage, "_open_file", lambda name, entry: (opened.append(name), real(name, entry))[1])
    for idx in [*range(N), *reversed(range(N))]:
        assert same(storage.load_sample(idx), sample(idx))
    assert len(opened) == len(storage.index.blocks)
    monkeypatch.setattr("stocache.storage.storage._CLOSED_SAMPLES", 15)
    for idx in range(N):
        assert same(storage.load_sample(idx), sample(idx))
    assert len(storage._closed_blocks) == 3
    storage.close()


def test_a_block_that_is_removed_or_cut_after_it_was_closed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("stocache.storage.storage._OPEN_BLOCKS", 1)
    monkeypatch.setattr("stocache.storage.block.HEAD_BYTES", 0)
    storage = save(OnDiskBlockDataStorage(tmp_path / "data", 5))
    for idx in (0, 5, 10):
        storage.load_sample(idx)
    os.unlink(tmp_path / "data" / block_name(0))
    with pytest.raises(DamagedError, match="000000"):
        storage.load_sample(0)
    os.truncate(tmp_path / "data" / block_name(1), 100)
    with pytest.raises(DamagedError, match="000001"):
        storage.load_sample(5)
    storage.close()


def test_many_blocks_are_open_at_a_time_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("stocache.storage.storage._OPEN_BLOCKS", 5)
    storage = save(OnDiskBlockDataStorage(tmp_path / "data", 1))
    before = len(os.listdir("/proc/self/fd"))
    for idx in range(N):
        assert same(storage.load_sample(idx), sample(idx))
    assert len(os.listdir("/proc/self/fd")) - before == 5
    storage.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_read_together(tmp_path, monkeypatch):
    monkeypatch.setattr("stocache.storage.storage._OPEN_BLOCKS", 3)
    storage = save(OnDiskBlockDataStorage(tmp_path / "data", 5))

    def read(seed):
        return all(same(storage.load_sample(idx), sample(idx)) for idx in random.Random(seed).choices(range(N), k=300))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(6)))
    storage.close()


def _read_all(number, storage):
    order = list(range(N))
    random.Random(number).shuffle(order)
    assert all(same(storage.load_sample(idx), sample(idx)) for idx in order)
    storage.close()


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
def test_processes_read_together(disk, run_processes):
    disk.load_sample(3)  # with a block open
    run_processes(3, _read_all, disk)


# ---------------------------------------------------------------------------------------------------- damage


def outcome(folder):
    """What a reader gets of a folder: every sample and the info, or the error in its place."""
    storage = OnDiskBlockDataStorage(folder)
    reads = [storage.load_dataset_info, *(lambda idx=idx: storage.load_sample(idx) for idx in range(N))]
    found = []
    for read in reads:
        try:
            found.append(read())
        except StorageError as error:
            found.append(error)
    storage.close()
    return found


INFO = {"mean": torch.ones(3)}
WHOLE = [INFO, *map(sample, range(N))]


@pytest.mark.parametrize("seed", range(4))
def test_every_flipped_bit_is_found(seed):
    counts = damage.trials(100, seed)
    assert {outcome for _, outcome in counts} == {"found"}


def test_a_file_that_is_cut_is_found(disk):
    rng = random.Random(0)
    for path in files_of(disk):
        whole = path.read_bytes()
        for length in {0, 1, 7, 8, 100, len(whole) - 1, rng.randrange(len(whole))}:
            path.write_bytes(whole[:length])
            got = outcome(disk.base_folder)
            assert all(isinstance(value, StorageError) or same(value, wanted) for value, wanted in zip(got, WHOLE, strict=True))
            assert any(isinstance(value, StorageError) and path.name in str(value) for value in got)
        path.write_bytes(whole)


def test_a_block_that_is_cut_while_it_is_open_is_an_error_and_no_signal(images, tmp_path):
    images.load_sample(99)
    os.truncate(tmp_path / block_name(0), 500_000)
    assert images.load_sample(3)[1] == 3
    with pytest.raises(DamagedError, match=r"000000.safetensors is damaged \(it is cut\)"):
        images.load_sample(99)


def test_blocks_that_are_swapped_are_found(disk):
    first, second = (Path(disk.base_folder, block_name(number)) for number in (2, 3))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    for idx in (14, 21):
        with pytest.raises(DamagedError, match=f"00000{idx // 7}.safetensors is not the block in the index"):
            disk.load_sample(idx)
    assert same(disk.load_sample(0), sample(0))


def test_a_block_of_another_folder_is_found(disk, tmp_path):
    other = OnDiskBlockDataStorage(tmp_path / "other", 7)
    other.start_preparation()
    for idx in range(N):
        other.save_sample(sample(idx) | {"image": torch.zeros(3, 4, dtype=torch.uint8)})
    other.finish_preparation(None)
    shutil.copy(Path(other.base_folder, block_name(1)), Path(disk.base_folder, block_name(1)))
    with pytest.raises(DamagedError, match="is not the block in the index"):
        disk.load_sample(8)


def test_a_missing_block_is_named(disk):
    os.unlink(Path(disk.base_folder, block_name(1)))
    with pytest.raises(DamagedError, match=r"blocks/000001.safetensors is missing"):
        disk.load_sample(8)
    assert same(disk.load_sample(14), sample(14))
    assert [number for number in range(8) if disk.check(number)] == [1]


def test_check_tells_what_is_damaged(disk):
    assert [disk.check(number) for number in range(8)] == [None] * 8
    path = Path(disk.base_folder, block_name(3))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [number for number in range(8) if disk.check(number)] == [3]
    assert "000003.safetensors is damaged (sample" in disk.check(3)


def test_a_header_that_claims_2_to_the_60_bytes_is_an_error(disk):
    path = Path(disk.base_folder, block_name(0))
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(DamagedError, match=r"000000.safetensors is damaged \(its header claims 1152921504606846976 bytes"):
        disk.load_sample(0)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"", DamagedError, "is damaged: it is not JSON"),
        (b"[]", StorageError, "is not an index of stocache"),
        (b'{"format": "another"}', StorageError, "is not an index of stocache"),
        (b"\xff" * 100, DamagedError, "is damaged: it is not JSON"),
        (b"[" * 100_000, DamagedError, "is damaged: it is not JSON"),
        (b'{"format": "stocache blocks", "version": 2}', StorageError, "has version 2; this stocache reads version 1"),
        (b'{"format": "stocache blocks", "version": 1}', DamagedError, "is damaged"),
    ],
)
def test_an_index_that_is_none_is_an_error(disk, text, error, message):
    Path(disk.base_folder, "index.json").write_bytes(text)
    with pytest.raises(error, match=f"index.json {message}"):
        len(OnDiskBlockDataStorage(disk.base_folder))


@pytest.mark.parametrize(
    "change",
    [
        {"samples": N + 1},
        {"samples": 2**60},
        {"block_size": 0},
        {"block_size": 8},
        {"blocks": [[7, 100, "0"]]},
        {"blocks": 7},
        {"blocks": [["7", 100, "0"]]},
        {"blocks": [[2**60, 2**60, "0"]], "samples": 2**60, "block_size": 2**60},
        {"blocks": [[N, 100, "0"]], "block_size": N},
        {"blocks": [[float(N), 10_000, "0"]], "block_size": N},
        {"blocks": [[N, 10_000, 0]], "block_size": N},
        {"blocks": [[True, 100, "0"]], "samples": 1},
        {"samples": float(N)},
        {"block_size": 7.0},
        {"plan": []},
        {"info_checksum": 1},
        {"unknown": 1},
        {"plan": None, "structure": None, "info": None, "info_checksum": None, "blocks": None},
    ],
    ids=str,
)
def test_a_forged_index_is_an_error(disk, change):
    path = Path(disk.base_folder, "index.json")
    facts = json.loads(path.read_bytes()) | change | {"checksum": "0" * 16}
    path.write_bytes(embed_checksum(json.dumps(facts).encode(), b'"checksum": "'))
    with pytest.raises(DamagedError, match=r"index\.json is damaged"):
        len(OnDiskBlockDataStorage(disk.base_folder))


def test_a_block_of_another_version_is_an_error(disk):
    path = Path(disk.base_folder, block_name(0))
    path.write_bytes(path.read_bytes().replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    with pytest.raises(StorageError, match=r"000000.safetensors: it has version 9"):
        disk.load_sample(0)


@pytest.mark.parametrize("name", ["photo.jpg", "blocks", "index.json.bak"])
def test_a_folder_with_files_of_others_is_not_written_to(tmp_path, name):
    (tmp_path / name).mkdir() if name == "blocks" else (tmp_path / name).write_text("mine")
    with pytest.raises(StorageError, match=f"holds '{name}', which stocache did not write"):
        OnDiskBlockDataStorage(tmp_path).start_preparation()
    assert os.listdir(tmp_path) == [name]


def test_a_file_where_the_folder_should_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="File exists"):
        OnDiskBlockDataStorage(tmp_path / "file").start_preparation()
    with pytest.raises(DamagedError, match="is missing"):
        len(OnDiskBlockDataStorage(tmp_path / "file"))


def test_two_may_not_prepare_one_folder_at_a_time(tmp_path):
    first, second = OnDiskBlockDataStorage(tmp_path / "data"), OnDiskBlockDataStorage(tmp_path / "data")
    first.start_preparation()
    with pytest.raises(StorageError, match="is being prepared by another process"):
        second.start_preparation()
    first.close()
    save(second)
    assert second.is_prepared()


@pytest.mark.parametrize("make_one", [OURS["in memory"], OURS["on disk, blocks of 7"]])
def test_a_full_disk_is_an_error_at_any_byte(make_one, tmp_path, monkeypatch):
    """A disk that takes a certain number of bytes, and no more, for every number there is to try."""
    budget = 0

    class Disk:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            nonlocal budget
            if not budget:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = min(budget, len(data))
            budget -= taken
            return self._file.write(data[:taken])

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self._file.close()

    def open_file(*arguments, **options):
        file = open(*arguments, **options)  # noqa: SIM115
        return Disk(file) if "wb" in arguments else file

    monkeypatch.setattr(local, "open", open_file, raising=False)
    for attempt in range(100):
        budget = 997 * attempt
        storage = make_one(tmp_path)
        try:
            save(storage, info=INFO)
            break
        except OSError as error:
            problem = error
        assert problem.errno == errno.ENOSPC
        assert "data" in problem.filename
        assert not storage.is_prepared()
        if hasattr(storage, "close"):
            storage.close()
    assert attempt >= 6
    assert all(same(storage.load_sample(idx), sample(idx)) for idx in range(N))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_lock_is_not_left_behind(tmp_path):
    storage = OnDiskBlockDataStorage(tmp_path / "data")
    storage.start_preparation()
    del storage
    save(OnDiskBlockDataStorage(tmp_path / "data"))


def test_a_block_of_another_size_than_the_index_says_is_an_error(disk):
    path = Path(disk.base_folder, "index.json")
    facts = json.loads(path.read_bytes())
    facts["blocks"][0][1] += 1
    path.write_bytes(embed_checksum(json.dumps(facts | {"checksum": "0" * 16}).encode(), b'"checksum": "'))
    with pytest.raises(DamagedError, match="is not the block in the index"):
        OnDiskBlockDataStorage(disk.base_folder).load_sample(0)
