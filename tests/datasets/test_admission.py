"""The columns of a block are copied into the slots of a cache; blocks of samples of varying size are chosen beforehand."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from stocache import (
    BlockSampler,
    CachedDataset,
    DamagedError,
    DataLoader,
    OnDiskBlockDataStorage,
    RaggedCache,
    SharedCache,
    StorageDataset,
    prepare,
)
from stocache.datasets.loaders import BlockAdmitter, BlockLoader
from stocache.datasets.stored import StorageDataset as Stored
from stocache.samples.record_encoder import pack_sample
from stocache.samples.spec import Structure
from stocache.storage.block import Block
from stocache.storage.manifest import block_name
from tests.support.containers import Box, Point
from tests.support.equality import identical
from tests.support.processes import run_all, wait_until
from tests.support.storages import COPIED, MADE

SIZE, N = 8, 29  # the last block has 5


def array(idx, shape, dtype="uint8", order="C"):
    return np.asarray(np.random.default_rng(idx).integers(0, 200, shape).astype(dtype), order=order)


def tensor(idx, shape, dtype=torch.uint8):
    return torch.from_numpy(array(idx, shape)).to(dtype)


RECORD = np.dtype([("a", "<i2"), ("b", ">f8", 3)])

KINDS = {
    "tensor": lambda idx: tensor(idx, (3, 5)),
    "large": lambda idx: tensor(idx, (3, 200, 120)),
    "bfloat16": lambda idx: tensor(idx, (7,), torch.bfloat16),
    "complex": lambda idx: torch.complex(tensor(idx, 4, torch.float32), tensor(idx + 1, 4, torch.float32)),
    "array": lambda idx: array(idx, (4, 2), "<f4"),
    "big-endian": lambda idx: array(idx, 3, ">i4"),
    "record": lambda idx: np.array([(idx, (1, 2, idx))] * 2, RECORD),
    "scalar": lambda idx: np.float32(idx / 7),
    "numbers": lambda idx: (idx - 5, idx / 3, idx % 2 == 0, complex(idx, -idx)),
    "a list of numbers": lambda idx: {"box": [idx, idx + 1, -1], "scores": (0.5, float(idx)), "flags": [True, idx % 2 == 0]},
    "nested": lambda idx: {"a": [Point(tensor(idx, 3), Box(array(idx, 2), idx))], "b": {"c": (idx, {"d": tensor(idx, ())})}},
    "channels_last": lambda idx: torch.stack([tensor(idx, (2, 3, 4))]).to(memory_format=torch.channels_last),
    "permuted": lambda idx: (tensor(idx, (2, 3, 4)).permute(2, 0, 1), array(idx, (2, 3, 4), "i4").transpose(1, 2, 0)),
    "fortran": lambda idx: array(idx, (3, 4), "f8", "F"),
    "without values": lambda idx: (torch.empty(0, 3), np.empty((2, 0), "f4"), idx, np.str_("")),
    "without bytes": lambda idx: (torch.empty(0), {}),
}


class Made:
    def __init__(self, make, count=N):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, idx):
        return self.make(idx)


@pytest.fixture
def prepared(tmp_path):
    storages = []

    def prepared(make, count=N, size=SIZE, **options):
        prepare(Made(make, count), tmp_path / "blocks", block_size=size, progress=False, **options).close()
        storages.append(OnDiskBlockDataStorage(tmp_path / "blocks", **options))
        return storages[-1]

    yield prepared
    for storage in storages:
        storage.close()


@pytest.fixture
def made(monkeypatch):
    """How many samples were made of blocks."""
    count = []
    real = Block.sample, Block.all
    monkeypatch.setattr(Block, "sample", lambda self, row: (count.append(1), real[0](self, row))[1])
    monkeypatch.setattr(Block, "all", lambda self: (count.extend([1] * self.samples), real[1](self))[1])
    return count


def cached_set(cached):
    return np.flatnonzero(cached.cache.aux_array.numpy() == 1).tolist()


def check(cached, make, indices=None):
    for local, idx in enumerate(range(N) if indices is None else indices):
        found = cached.cache.get_slot(local)
        assert identical(found, make(idx)), (found, make(idx))


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_every_kind_are_copied_into_slots(prepared, made, kind):
    make = KINDS[kind]
    with CachedDataset(StorageDataset(prepared(make)), "100MB") as cached:
        assert isinstance(cached.cache, SharedCache)
        made.clear()
        for block in range(4):
            cached._loader.admit(block)
        assert made == []
        assert cached_set(cached) == list(range(N))
        check(cached, make)
        assert cached.stats().total.fills == N


@pytest.mark.parametrize("kind", ["tensor", "a list of numbers", "permuted"])
@pytest.mark.parametrize("indices", [[3, 1, 0, 7, 14, 9, 28], [0, 0, 9, 8, 9], list(range(2, 27))])
def test_so_are_those_of_some_samples_in_any_order(prepared, made, kind, indices):
    make = KINDS[kind]
    dataset = StorageDataset(prepared(make), indices)
    with CachedDataset(dataset, "100MB") as cached:
        made.clear()
        for block in range(len(dataset.block_bounds) - 1):
            cached._loader.admit(block)
        assert made == []
        check(cached, make, indices)


SLOW = {
    "another order of keys in some blocks": lambda idx: {"a": idx, "b": 1.5} if idx < 10 else {"b": 1.5, "a": idx},
    "another order of dimensions in some blocks": lambda idx: array(idx, (3, 4), "i4", "C" if idx < 10 else "F"),
    "a long list of arrays": lambda idx: [array(idx + n, 2) for n in range(17)],
}


@pytest.mark.parametrize("kind", SLOW)
def test_columns_that_do_not_fit_the_slots_are_made_into_samples(prepared, made, kind):
    make = SLOW[kind]
    with CachedDataset(StorageDataset(prepared(make)), "100MB", variable=False) as cached:
        made.clear()
        for block in range(4):
            cached._loader.admit(block)
        assert len(made) > 0
        assert cached_set(cached) == list(range(N))
        for idx in range(N):
            np.testing.assert_equal(cached.cache.get_slot(idx), make(idx))


class Doubled(Stored):
    def __getitem__(self, idx):
        return super().__getitem__(idx) * 2

    def __getitems__(self, indices):
        return [sample * 2 for sample in super().__getitems__(indices)]


class DoublingStorage(OnDiskBlockDataStorage):
    def load_sample(self, idx):
        return super().load_sample(idx) * 2

    def load_block(self, b):
        return [sample * 2 for sample in super().load_block(b)]


@pytest.mark.parametrize("by", ["dataset", "storage", "method of an object"])
def test_samples_that_are_changed_on_the_way_are_cached_as_changed(prepared, monkeypatch, by):
    storage = prepared(KINDS["tensor"])
    if by == "storage":
        storage = DoublingStorage(storage.base_folder)
    dataset = (Doubled if by == "dataset" else StorageDataset)(storage)
    if by == "method of an object":
        real = dataset.__getitems__
        monkeypatch.setattr(dataset, "__getitems__", lambda indices: [sample * 2 for sample in real(indices)], raising=False)
        monkeypatch.setattr(storage, "load_sample", lambda idx: Block.sample(storage._open(idx // SIZE), idx % SIZE) * 2)
    with CachedDataset(dataset, "100MB") as cached, storage:
        cached._loader.admit(1)
        assert cached_set(cached) == list(range(8, 16))
        assert all(torch.equal(cached.cache.get_slot(idx), tensor(idx, (3, 5)) * 2) for idx in range(8, 16))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_several_processes_admit_at_once(prepared, context):
    with CachedDataset(StorageDataset(prepared(KINDS["nested"])), "100MB") as cached:
        run_all(multiprocessing.get_context(context), 3, _admit_all, cached)
        check(cached, KINDS["nested"])
        assert cached.stats().total.fills == N


def _admit_all(number, cached):
    for block in np.random.default_rng(number).permutation(4).tolist():
        cached._loader.admit(block)


def flip(storage, block, at):
    path = Path(storage.base_folder) / block_name(block)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_sample_is_left_out_and_told_when_it_is_wanted(prepared, caplog):
    storage = prepared(KINDS["tensor"])
    begin, _ = storage._open(1).span("sample")
    storage.close()
    flip(storage, 1, begin + 2 * 15 + 4)  # in sample 10
    with CachedDataset(StorageDataset(storage), "100MB") as cached:
        assert torch.equal(cached[12], tensor(12, (3, 5)))
        wait_until(lambda: cached_set(cached) == [8, 9, 11, 12, 13, 14, 15])
        assert not caplog.records
        with pytest.raises(DamagedError, match=r"000001.safetensors is damaged \(sample 2 in it"):
            cached[10]
        with pytest.raises(DamagedError, match=r"000001.safetensors is damaged"):
            cached.warm(progress=False)


def test_a_block_whose_file_is_gone_or_cut_is_told_when_it_is_wanted(prepared, caplog):
    storage = prepared(KINDS["tensor"])
    with CachedDataset(StorageDataset(storage), "100MB") as cached:
        storage.close()
        path = Path(storage.base_folder) / block_name(2)
        os.truncate(path, path.stat().st_size - 40)
        cached[0]
        with BlockAdmitter.of(cached._loader, cached.cache).behind([2]):
            pass
        wait_until(lambda: BlockAdmitter.of(cached._loader, cached.cache)._thread is None)
        assert cached_set(cached) == list(range(8))
        assert not caplog.records
        with pytest.raises(DamagedError, match=r"000002.safetensors is damaged"):
            cached[17]


def test_the_bytes_of_samples_are_those_of_the_structure(prepared):
    make = KINDS["nested"]
    storage = prepared(make)
    structure = Structure.of(make(0), exact=True)
    with CachedDataset(StorageDataset(storage), "100MB") as cached:
        encoded = cached.dataset.load_encoded([9, 8], cached._loader._tree)
        assert list(encoded) == [9, 8]
        for idx, buffers in encoded.items():
            assert list(map(bytes, buffers)) == [bytes(memoryview(part).cast("B")) for part in structure.encode(make(idx))]
        assert identical(structure.example(), structure.unflatten([leaf.example() for leaf in structure.leaves]))


def test_admission_reads_one_block_at_a_time(prepared, monkeypatch):
    alive, most = set(), []
    real = StorageDataset.load_encoded

    class Buffers(dict):
        def __init__(self, found):
            super().__init__(found)
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self):
            alive.discard(id(self))

    monkeypatch.setattr(
        "stocache.datasets.loaders.StorageDataset.load_encoded", lambda self, *args: Buffers(real(self, *args)), raising=True
    )
    with CachedDataset(StorageDataset(prepared(KINDS["tensor"])), "100MB") as cached:
        cached.__getitems__([0, 9, 17, 25])
        wait_until(lambda: len(cached_set(cached)) == N)
        assert len(most) == 4
        assert max(most) == 1


# ---------------------------------------------------------------------------------------------------- copied records


def admit_all(cached):
    for block in range(4):
        cached._loader.admit(block)


def check_records(cached, make, indices=range(N)):
    for idx in indices:
        assert pack_sample(cached.cache.get_slot(idx, allow_empty_slot=False)) == pack_sample(make(idx))


@pytest.mark.parametrize("kind", COPIED)
def test_records_of_every_kind_are_copied_into_the_arena(prepared, made, kind):
    dataset = StorageDataset(prepared(COPIED[kind]))
    with CachedDataset(dataset, "100MB", variable=True) as cached:
        made.clear()
        admit_all(cached)
        assert made == []
        assert cached_set(cached) == list(range(N))
        check_records(cached, COPIED[kind])
        check_records(cached, dataset.__getitem__)
        assert cached.stats().total.fills == N


@pytest.mark.parametrize("kind", MADE)
def test_samples_that_vary_in_their_structure_are_made(prepared, made, kind):
    with CachedDataset(StorageDataset(prepared(MADE[kind])), "100MB", variable=True) as cached:
        made.clear()
        admit_all(cached)
        assert len(made) >= 3 * SIZE  # the last block has fewer structures
        check_records(cached, MADE[kind])


@pytest.mark.parametrize("options", [{"codec": "zstd"}, {"allow_pickle": True}])
def test_compressed_and_pickled_samples_are_made(prepared, made, options):
    pytest.importorskip("zstandard")
    pickles = "allow_pickle" in options
    make = (lambda idx: [bytes(idx), np.array([None, idx])]) if pickles else COPIED["bytes"]
    with CachedDataset(StorageDataset(prepared(make, allow_pickle=pickles)), "100MB", variable=True, **options) as cached:
        made.clear()
        admit_all(cached)
        assert len(made) == N
        check_records(cached, make)


class Longer(Stored):
    def __getitem__(self, idx):
        return super().__getitem__(idx) + b"!"

    def __getitems__(self, indices):
        return [sample + b"!" for sample in super().__getitems__(indices)]


def test_records_of_samples_that_a_subclass_changes_are_those_of_the_changed_samples(prepared):
    with CachedDataset(Longer(prepared(COPIED["bytes"])), "100MB") as cached:
        admit_all(cached)
        check_records(cached, lambda idx: COPIED["bytes"](idx) + b"!")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_several_processes_admit_records_at_once(prepared, context):
    with CachedDataset(StorageDataset(prepared(COPIED["encoded images"])), "100MB") as cached:
        run_all(multiprocessing.get_context(context), 3, _admit_all, cached)
        check_records(cached, COPIED["encoded images"])
        assert cached.stats().total.fills == N


def test_a_damaged_record_is_left_out_and_told_when_it_is_wanted(prepared, caplog):
    storage = prepared(lambda idx: bytes([idx]) * 100 + bytes(idx))
    begin, _ = storage._open(1).span("sample")
    storage.close()
    flip(storage, 1, begin + 240)  # in sample 10
    with CachedDataset(StorageDataset(storage), "100MB") as cached:
        admit_all(cached)
        assert cached_set(cached) == [idx for idx in range(N) if idx != 10]
        assert not caplog.records
        with pytest.raises(DamagedError, match=r"000001.safetensors is damaged \(sample 2 in it"):
            cached[10]


def test_a_block_that_does_not_fit_into_the_arena_is_left_out_whole(prepared, made):
    make = lambda idx: bytes([idx]) * (1000 if idx < 8 else 4000 + idx)
    with CachedDataset(StorageDataset(prepared(make)), "100MB") as filled:
        assert filled._loader._chosen.all()
        cache = RaggedCache("60KB", N)
        loader = BlockLoader(filled.dataset, cache, filled._loader._chosen)
        made.clear()
        for block in (1, 2, 0, 3):
            loader.admit(block)
        assert made == []
        assert cache.aux_array.tolist() == [1] * 16 + [2] * 8 + [2] * 5
        assert [cache.get_slot(idx) for idx in range(16)] == [make(idx) for idx in range(16)]


def test_warming_copies_the_records_of_the_blocks_that_have_room(prepared, made):
    make = lambda idx: {"image": bytes([idx % 256]) * (300 + 37 * (idx % 11)), "label": idx}
    dataset = StorageDataset(prepared(make, COUNT))
    with CachedDataset(dataset, f"{9 * COUNT + 100_000}B") as cached:
        cached._loaded_here = True  # so that the samples are counted here, and not in a child process
        made.clear()
        cached.warm(progress=False)
        counts = in_blocks(cached)
        assert all(inside == 0 or outside == 0 for inside, outside in counts)
        assert 0.4 * COUNT < sum(inside for inside, _ in counts) < 0.5 * COUNT
        assert made == []
        check_records(cached, make, cached_set(cached))


# ---------------------------------------------------------------------------------------------------- samples of varying size


def text(idx):
    return {"image": bytes([idx % 256]) * (300 + 37 * (idx % 11)), "label": idx, "words": ["ab"] * (idx % 3)}


COUNT = 400


def in_blocks(cached):
    """For each block, how many samples are cached, and how many are not."""
    states = cached.cache.aux_array.numpy() == 1
    return [(int(part.sum()), int((~part).sum())) for part in np.split(states, cached._loader._bounds[1:-1])]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["random", "by block"])
def test_wanted_samples_come_first_and_whole_blocks_are_kept_also_where_not_all_fit(prepared, made, workers, order):
    dataset = StorageDataset(prepared(text, COUNT))
    room = 9 * COUNT + 200_000 // 2  # of 212 KB of records
    with CachedDataset(dataset, f"{room}B") as cached:
        assert isinstance(cached.cache, RaggedCache)
        made.clear()
        cached[100]
        assert made == [1]
        sampler = (
            BlockSampler(range(COUNT), SIZE, True)
            if order == "by block"
            else np.random.default_rng(0).permutation(COUNT).tolist()
        )
        loader = DataLoader(cached, 16, sampler=sampler, num_workers=workers, collate_fn=list)
        for _ in range(2):
            before = cached.stats().total.misses
            assert sorted(sample["label"] for batch in loader for sample in batch) == list(range(COUNT))
        counts = in_blocks(cached)
        assert all(inside == 0 or outside == 0 for inside, outside in counts)
        held = sum(inside for inside, _ in counts)
        assert 0.4 * COUNT < held < 0.5 * COUNT
        assert cached.stats().total.misses - before == COUNT - held


def test_where_all_fit_the_first_sample_is_read_alone(prepared, made):
    dataset = StorageDataset(prepared(text, COUNT))
    with CachedDataset(dataset, "10MB") as cached:
        made.clear()
        assert cached[100]["label"] == 100
        assert made == [1]
        assert cached._loader._chosen.all()


def test_blocks_are_chosen_again_after_clear(prepared):
    dataset = StorageDataset(prepared(text, COUNT))
    with CachedDataset(dataset, f"{9 * COUNT + 100_000}B") as cached:
        held = []
        for _ in range(2):
            for idx in range(COUNT):
                assert cached[idx]["label"] == idx
            held.append(in_blocks(cached))
            cached.cache.clear()
        assert held[0] == held[1]
        assert 0 < sum(inside for inside, _ in held[0]) < COUNT


def test_a_limit_below_one_block_is_said(prepared, caplog):
    with CachedDataset(StorageDataset(prepared(text, COUNT)), f"{9 * COUNT + 3000}B") as cached:
        assert "is less than a block of the storage: nothing is cached." in caplog.text
        assert cached[3]["label"] == 3
        assert cached_set(cached) == []


def test_where_the_first_block_is_damaged_blocks_are_read_whole(prepared):
    storage = prepared(text)
    storage.close()
    flip(storage, 0, 40)
    with CachedDataset(StorageDataset(storage), "10MB") as cached:
        assert cached._loader._chosen is None
        assert cached[12]["label"] == 12
        wait_until(lambda: cached_set(cached) == list(range(8, 16)))
        with pytest.raises(DamagedError, match=r"000000.safetensors is damaged"):
            cached[0]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_samples_are_admitted_when_their_size_is_known(prepared, codec):
    pytest.importorskip({"zstd": "zstandard", "lz4": "lz4.block"}[codec])
    dataset = StorageDataset(prepared(text, COUNT))
    with CachedDataset(dataset, f"{9 * COUNT + 20_000}B", codec=codec) as cached:
        assert cached._loader._chosen is None
        for _ in range(2):
            assert [cached[idx]["label"] for idx in range(COUNT)] == list(range(COUNT))
        counts = in_blocks(cached)
        assert all(inside == 0 or outside == 0 for inside, outside in counts)
        assert sum(inside for inside, _ in counts) > 0


@pytest.mark.parametrize("sizes", ["even", "by block"])
def test_the_bytes_of_values_are_known_without_reading_them(prepared, sizes):
    make = text if sizes == "even" else lambda idx: {"image": bytes(100 * (1 + idx // SIZE)), "label": idx, "words": []}
    storage = prepared(make, N)
    values = storage.value_bytes()
    for block, nbytes in enumerate(values):
        own = [make(idx) for idx in range(block * SIZE, min(N, block * SIZE + SIZE))]
        wanted = sum(len(sample["image"]) + 8 + sum(map(len, sample["words"])) for sample in own)
        assert abs(nbytes - wanted) < 200, (block, nbytes, wanted)


# ---------------------------------------------------------------------------------------------------- from a URL


@pytest.fixture
def fetched(monkeypatch):
    """The names of the files that were fetched, by this process and its children."""
    from fsspec.implementations.local import LocalFileSystem

    counts = multiprocessing.Array("q", 100)
    real = LocalFileSystem.get_file

    def get_file(self, path, local, **options):
        with counts.get_lock():
            counts[int(Path(path).stem)] += 1
        return real(self, path, local, **options)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    return counts


@pytest.mark.parametrize("make", [KINDS["tensor"], text], ids=["fixed", "ragged"])
def test_from_a_url_wanted_samples_come_first_and_each_block_is_fetched_once(prepared, made, fetched, tmp_path, make):
    source = prepared(make)
    with OnDiskBlockDataStorage(f"file://{source.base_folder}", local_folder=tmp_path / "local") as storage:
        assert not storage.reads_whole_blocks
        with CachedDataset(StorageDataset(storage), "100MB") as cached:
            made.clear()
            cached[9]
            assert len(made) == 1
            loader = DataLoader(cached, 4, shuffle=True, num_workers=2, collate_fn=list)
            assert sum(map(len, loader)) == N
            assert list(fetched)[:5] == [1, 1, 1, 1, 0]
            check(cached, make)


def test_blocks_without_room_for_local_copies_are_fetched_whole(prepared, fetched, tmp_path):
    source = prepared(KINDS["tensor"])
    options = {"local_folder": tmp_path / "local", "local_limit": sum(entry.nbytes for entry in source.index.blocks) - 1}
    with OnDiskBlockDataStorage(f"file://{source.base_folder}", **options) as storage:
        assert storage.reads_whole_blocks
        with CachedDataset(StorageDataset(storage), "100MB", example=KINDS["tensor"](0)) as cached:
            cached[9]
            assert cached_set(cached) == list(range(8, 16))
