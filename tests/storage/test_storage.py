"""The contract of all storages, and what becomes of files that are damaged."""

import errno
import io
import json
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark import damage
from stocache import InMemoryDataStorage, OnDiskBlockDataStorage, StorageDataset
from stocache.errors import DamagedError, LimitError, SampleError, SampleIndexError, StorageError
from stocache.storage import local
from stocache.storage.manifest import block_name
from stocache.system.hashing import embed_checksum
from stocache.system.platform import here
from tests.support.containers import Box
from tests.support.equality import same
from tests.support.processes import in_child
from tests.support.storages import N, files_of, read, sample, save

OURS = {
    "in memory": InMemoryDataStorage,
    "on disk": OnDiskBlockDataStorage,
    "on disk, blocks of 7": lambda path: OnDiskBlockDataStorage(path, 7),
    "on disk, blocks of 2 KB": lambda path: OnDiskBlockDataStorage(path, block_bytes="2KB"),
}


@pytest.fixture(params=OURS)
def make(request, tmp_path):
    return lambda name="data": OURS[request.param](tmp_path / name)


@pytest.fixture
def disk(tmp_path):
    with save(OnDiskBlockDataStorage(tmp_path / "data", 7), info=INFO) as storage:
        yield storage


INFO = {"mean": torch.ones(3)}
INFOS = [
    None, {"a": [1, 2.5, "x", None, True]}, {"mean": torch.ones(3), "std": np.ones(2)}, Box(1, (2, 3)), ["token"] * 3000,
    float("nan"), {1: "keys that JSON would change"}, (1, 2), "",
]  # fmt: skip


def change(value):
    value["image"] += 1
    value["tags"].append("more")


def test_samples_and_info_come_back_as_they_were_when_they_were_saved_once_all_are(make):
    storage, info = make(), {"classes": ["a", "b"], "count": N}
    with pytest.raises(StorageError, match="save_sample: call start_preparation first"):
        storage.save_sample(sample(0))
    storage.start_preparation()
    for idx in range(N):
        assert not storage.is_prepared()
        assert not make().is_prepared()
        storage.save_sample(value := sample(idx))
        change(value)
    storage.finish_preparation(info)
    for reader in (storage, make(), pickle.loads(pickle.dumps(make()))):
        assert reader.is_prepared()
        assert same(reader.load_dataset_info(), info)
        assert read(reader, (3, 0, N - 1))
        change(reader.load_sample(3))  # it is the caller's own
        assert read(reader)


def test_any_info_and_any_number_of_samples(make):
    for number, (count, info) in enumerate(zip([0, 1, 7, 8, 32, 33, 2, 2, 2], INFOS, strict=True)):
        storage = save(make(str(number)), count, info)
        assert read(storage, range(count))
        assert len(storage) == count
        assert same(make(str(number)).load_dataset_info(), info)


@pytest.mark.parametrize("name", OURS)
def test_wrong_indices_and_calls_out_of_turn_are_errors(name, tmp_path):
    make_ours = lambda: OURS[name](tmp_path / "data")
    with pytest.raises(StorageError, match="finish_preparation: call start_preparation first"):
        make_ours().finish_preparation(None)
    for look in (lambda: make_ours().load_sample(0), lambda: make_ours().load_dataset_info(), lambda: len(make_ours())):
        with pytest.raises(DamagedError, match="is missing: nothing was prepared there"):
            look()
    storage = save(make_ours())
    for idx in (-1, N, 10**30, 1.0, "1", None):
        with pytest.raises(SampleIndexError, match=r"load_sample\("):
            storage.load_sample(idx)
    with pytest.raises(StorageError, match=r"is prepared already\. Remove"):
        storage.start_preparation()
    assert read(storage, [3])


@pytest.mark.parametrize("make_one", [InMemoryDataStorage, OnDiskBlockDataStorage])
def test_pickles_need_allow_pickle_on_both_sides(make_one, tmp_path):
    storage = save(make_one(tmp_path / "pickled", allow_pickle=True), 1, [...], lambda idx: ...)
    assert storage.load_sample(0) is ...
    assert storage.load_dataset_info() == [...]
    for look in (lambda storage: storage.load_sample(0), lambda storage: storage.load_dataset_info()):
        with pytest.raises(StorageError, match="partly pickled"):
            look(make_one(tmp_path / "pickled"))
    with pytest.raises(SampleError, match="sample 1: value is a ellipsis, which has no bytes of its own"):
        save(make_one(tmp_path / "fresh"), 2, None, [1, ...].__getitem__)


def test_blocks_have_the_size_that_is_asked_for(tmp_path):
    storage = OnDiskBlockDataStorage(tmp_path, block_bytes="100KB")
    save(storage, 200, None, lambda idx: (torch.zeros(3, 16, 16, dtype=torch.uint8), idx))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "blocks").iterdir())]
    assert all(90_000 < size < 115_000 for size in sizes[:-1])
    assert storage.block_size == storage.index.blocks[0].samples == round(100_000 / (768 + 8 + 8))
    for options in ({"block_size": 2.5}, {"block_bytes": "x"}, {"block_bytes": 0}):
        with pytest.raises(LimitError, match=r"block_size=2\.5|block_bytes=('x'|0)"):
            OnDiskBlockDataStorage(tmp_path, **options)


def text(idx):
    return f"{idx} " * (idx % 50), idx


@pytest.fixture
def texts(tmp_path):
    """200 texts in blocks of 80."""
    with OnDiskBlockDataStorage(tmp_path, 80) as storage:
        yield save(storage, 200, None, text)


def test_small_samples_come_by_the_range_and_by_the_block(texts):
    expected = [*map(text, range(200))]
    for begin, end in ((0, 200), (10, 60), (70, 130), (79, 81), (199, 200), (3, 3), (0, 0), (200, 200)):
        assert texts.load_range(begin, end) == expected[begin:end]
        assert StorageDataset(texts).__getitems__(range(begin, end)) == expected[begin:end]
        backwards = StorageDataset(texts, range(199, -1, -1))
        assert backwards.__getitems__(list(range(199 - begin, 199 - end, -1))) == expected[begin:end]
    assert [texts.load_block(number) for number in range(3)] == [expected[:80], expected[80:160], expected[160:]]
    for begin, end in ((-1, 3), (0, 201), (200, 201), (5, 4), (5, 2**70), ("0", 3)):
        with pytest.raises(SampleIndexError, match=r"load_range\(.*not within the 200 samples"):
            texts.load_range(begin, end)
    with pytest.raises(SampleIndexError, match=r"load_block\(3\)"):
        texts.load_block(3)


def test_a_range_is_read_at_once_and_a_damaged_sample_in_it_is_found(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("stocache.storage.files.HEAD_BYTES", 0)
    reads, real = [], here.pread
    monkeypatch.setattr(here, "pread", lambda fd, nbytes, at: reads.append(nbytes) or real(fd, nbytes, at))
    texts.load_sample(0)
    reads.clear()
    texts.load_range(10, 60)
    assert len(reads) < 10
    path = tmp_path / block_name(0)
    path.write_bytes(path.read_bytes().replace(b"57 57 57", b"57 58 57", 1))
    with pytest.raises(DamagedError, match=r"000000.safetensors is damaged \(sample 57 in it"):
        texts.load_range(10, 60)
    assert len(texts.load_range(10, 57)) == 47
    assert len(StorageDataset(texts).__getitems__([*range(56, 0, -1)])) == 56


def test_samples_that_are_asked_for_twice_are_two_objects(tmp_path):
    with save(OnDiskBlockDataStorage(tmp_path, 8), 8, None, lambda idx: torch.tensor([idx])) as storage:
        for rows in ([5, 5, 2, 5], [5, 5, 2], [*range(8), 0]):
            samples = StorageDataset(storage).__getitems__(rows)
            assert [int(sample.add_(100)) for sample in samples] == [100 + row for row in rows]


@pytest.fixture
def images(tmp_path):
    """100 samples of 12 KiB in one block."""
    with OnDiskBlockDataStorage(tmp_path, 100) as storage:
        yield save(storage, 100, None, lambda idx: (torch.full((3, 64, 64), idx, dtype=torch.uint8), idx))


def test_samples_are_read_without_their_block_and_those_of_a_batch_requested_before_the_first_is_read(images, monkeypatch):
    calls, advise, read = [], here.read_ahead, here.preadv
    monkeypatch.setattr(here, "read_ahead", lambda *arguments: (calls.append(("advise", *arguments)), advise(*arguments)))
    monkeypatch.setattr(here, "preadv", lambda fd, into, at: calls.append(("read", fd, at, len(into[0]))) or read(fd, into, at))
    assert images.load_sample(50)[0][0, 0, 0] == 50
    assert [kind for kind, *_ in calls if kind == "read"] == ["read"]  # besides the first 64 KiB
    calls.clear()
    samples = StorageDataset(images).__getitems__(batch := [90, 17, 55])
    assert [(int(image[0, 0, 0]), number) for image, number in samples] == [(idx, idx) for idx in batch]
    assert [call[0] for call in calls] == ["advise"] * 3 + ["read"] * 3
    assert [call[1:] for call in calls[:3]] == [call[1:] for call in calls[3:]]


def test_few_blocks_are_open_and_threads_and_forks_read_closed_ones_without_their_headers(tmp_path, monkeypatch):
    monkeypatch.setattr("stocache.storage.storage._OPEN_BLOCKS", 3)
    monkeypatch.setattr("stocache.storage.files.HEAD_BYTES", 0)
    with save(OnDiskBlockDataStorage(tmp_path / "data", 5)) as storage:
        opened, real, before = [], storage._open_file, len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(storage, "_open_file", lambda name, entry: (opened.append(name), real(name, entry))[1])
        assert read(storage)
        assert len(os.listdir("/proc/self/fd")) - before == 3
        look = lambda seed: read(storage, random.Random(seed).choices(range(N), k=200)) or os._exit(1)
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(look, range(6)))
        assert in_child(look, 7) == 0  # with files that were open before
        assert len(opened) == len(storage.index.blocks)
        assert read(storage)
        os.unlink(tmp_path / "data" / block_name(0))
        os.truncate(tmp_path / "data" / block_name(1), 100)
        for idx in (0, 5):
            with pytest.raises(DamagedError, match=f"00000{idx // 5}"):
                storage.load_sample(idx)
    assert len(os.listdir("/proc/self/fd")) == before


def test_every_flipped_bit_and_every_cut_is_found(disk):
    assert all(damage.flip_bit(file, seed)["found"] for file in damage.FILES for seed in range(33))
    for path in files_of(disk):
        data = path.read_bytes()
        for length in {0, 1, 7, 8, 100, len(data) - 1, random.randrange(len(data))}:
            path.write_bytes(data[:length])
            with pytest.raises(StorageError, match=path.name), OnDiskBlockDataStorage(disk.base_folder) as storage:
                assert (same(storage.load_dataset_info(), INFO), read(storage)) == (True, True)
        path.write_bytes(data)


def test_a_block_that_is_cut_while_it_is_open_is_an_error_and_no_signal(images, tmp_path):
    images.load_sample(99)
    os.truncate(tmp_path / block_name(0), 500_000)
    assert images.load_sample(3)[1] == 3
    for load in (lambda: images.load_sample(99), lambda: images.load_encoded(0, range(100))):
        with pytest.raises(DamagedError, match=r"000000.safetensors is damaged \(it is truncated\)"):
            load()


def test_what_is_no_index_is_an_error(tmp_path):
    for text, error, message in (
        *((text, DamagedError, "is damaged: it is not JSON") for text in (b"", b"\xff" * 100, b"[" * 100_000)),
        *((text, StorageError, "is not an index of stocache") for text in (b"[]", b'{"format": "another"}')),
        (b'{"format": "stocache blocks", "version": 3}', StorageError, "has version 3; this stocache reads version 2. Update"),
        (b'{"format": "stocache blocks", "version": 1}', StorageError, "has version 1; .*An earlier stocache.*again=True"),
        (b'{"format": "stocache blocks", "version": 2}', DamagedError, "is damaged"),
    ):
        (tmp_path / "index.json").write_bytes(text)
        with pytest.raises(error, match=f"index.json {message}"):
            len(OnDiskBlockDataStorage(tmp_path))


FORGED = [
    {"samples": 0, "blocks": [], "block_size": 0},
    {"samples": 2**60}, {"samples": float(N)}, {"block_size": 8}, {"blocks": 7}, {"blocks": [["7", 100, "0"]]},
    {"blocks": [[2**60, 2**60, "0"]], "samples": 2**60, "block_size": 2**60}, {"blocks": [[N, 100, "0"]], "block_size": N},
    {"blocks": [[N, 10_000, 0]], "block_size": N}, {"plan": []}, {"info_checksum": 1}, {"unknown": 1},
]  # fmt: skip


def test_a_forged_index_is_an_error(disk):
    path = Path(disk.base_folder, "index.json")
    facts = json.loads(path.read_bytes())
    blocks = [(samples, nbytes + 1, checksum) for samples, nbytes, checksum in disk.index.blocks]
    for change in (*FORGED, {"blocks": blocks}):  # also of a different size than the block has
        forged = json.dumps(facts | change | {"checksum": "0" * 16}).encode()
        path.write_bytes(embed_checksum(forged, b'"checksum": "'))
        message = "is not the block in the index" if change.get("blocks") is blocks else r"index\.json is damaged"
        with pytest.raises(DamagedError, match=message):
            OnDiskBlockDataStorage(disk.base_folder).load_sample(0)


@pytest.mark.parametrize("name", ["photo.jpg", "blocks", "index.json.bak"])
def test_a_folder_with_files_of_others_is_not_written_to(tmp_path, name):
    (tmp_path / name).mkdir() if name == "blocks" else (tmp_path / name).write_text("mine")
    with pytest.raises(StorageError, match=f"holds '{name}', which stocache did not write"):
        OnDiskBlockDataStorage(tmp_path).start_preparation()
    assert os.listdir(tmp_path) == [name]


@pytest.mark.linux
def test_two_may_not_prepare_one_folder_at_a_time_and_no_lock_is_left_behind(tmp_path):
    first, second, third = (OnDiskBlockDataStorage(tmp_path / "data") for _ in range(3))
    first.start_preparation()
    with pytest.raises(StorageError, match="is being prepared by another process"):
        second.start_preparation()
    first.close()
    second.start_preparation()
    del second
    assert save(third).is_prepared()


def test_a_full_disk_is_an_error_at_any_byte(tmp_path, monkeypatch):
    class Disk(io.FileIO):
        budget = 0  # bytes that all of it takes

        def write(self, data):
            if not Disk.budget:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = min(Disk.budget, len(data))
            Disk.budget -= taken
            return super().write(data[:taken])

    open_file = lambda path, mode, **options: Disk(path, mode) if mode == "wb" else open(path, mode, **options)  # noqa: SIM115
    monkeypatch.setattr(local, "open", open_file, raising=False)
    for budget in range(0, 4500, 499):
        Disk.budget = budget
        with OnDiskBlockDataStorage(tmp_path / "data", 7) as storage:
            with pytest.raises(OSError, match=r"No space left on device.*data"):
                save(storage, info=INFO)
            assert not storage.is_prepared()
    monkeypatch.undo()
    assert read(save(OnDiskBlockDataStorage(tmp_path / "data", 7)))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_storage_in_memory_is_one_block_that_is_read_once(tmp_path):
    save(InMemoryDataStorage(tmp_path / "data"), info=INFO)
    assert [path.name for path in (tmp_path / "data" / "blocks").iterdir()] == ["000000.safetensors"]
    storage = InMemoryDataStorage(tmp_path / "data")
    assert read(storage, [3])
    (tmp_path / "data" / "blocks" / "000000.safetensors").unlink()
    assert read(storage)
    dataset = StorageDataset(storage)
    assert dataset.block_bounds is None  # samplers and caches take the samples one by one, as of any storage
    assert all(same(found, sample(idx)) for found, idx in zip(dataset.__getitems__([4, 5, 6]), (4, 5, 6), strict=True))
