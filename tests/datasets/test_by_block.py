"""A cache in front of blocks: whole blocks are admitted, and each is read once for that."""

import itertools
import multiprocessing
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stocache
from stocache import (
    BlockSampler,
    CachedDataset,
    DatasetError,
    LimitError,
    LocalityDistributedSampler,
    OnDiskBlockDataStorage,
    Placement,
    RaggedCache,
    SampleIndexError,
    SharedCache,
    StorageDataset,
    prepare,
)
from stocache.cache.placement import BlockBounds, BlockResidency, residency
from stocache.datasets.loaders import BlockAdmitter
from tests.support.processes import run_all
from tests.support.storages import FilePerSample, save

BLOCKS, SIZE = 20, 10
N = BLOCKS * SIZE


class Samples:
    def __init__(self, ragged):
        self.ragged = ragged

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return torch.full((3, 8 + (idx % 5 if self.ragged else 0)), idx, dtype=torch.uint8), idx


class Counting(OnDiskBlockDataStorage):
    """Counts, over all processes, reads of whole blocks and of samples by themselves."""

    def __init__(self, folder):
        super().__init__(folder)
        self.blocks, self.samples = multiprocessing.Array("q", BLOCKS), multiprocessing.Array("q", N)

    def load_block(self, b):
        with self.blocks.get_lock():
            self.blocks[b] += 1
        return super().load_block(b)

    def load_sample(self, idx):
        with self.samples.get_lock():
            self.samples[idx] += 1
        return super().load_sample(idx)

    def counts(self):
        """Blocks that were read whole, blocks that were touched, and samples read by themselves; since the last look."""
        blocks, samples = list(self.blocks), list(self.samples)
        self.blocks[:], self.samples[:] = [0] * BLOCKS, [0] * N
        touched = {b for b in range(BLOCKS) if blocks[b]} | {idx // SIZE for idx in range(N) if samples[idx]}
        return sum(blocks), len(touched), sum(samples)


@pytest.fixture(params=[False, True], ids=["fixed", "ragged"])
def storage(request, tmp_path):
    prepare(Samples(request.param), tmp_path, block_size=SIZE, progress=False).close()
    storage = Counting(tmp_path)
    yield storage
    storage.close()


def half(dataset):
    """Bytes that hold half of the samples."""
    with CachedDataset(dataset, "10MB") as cached:
        cached.warm(progress=False)
        stats = cached.stats().total
        each = 1 if isinstance(cached.cache, SharedCache) else 9  # a sample's state, and place
        return f"{stats.filled * stats.slot_bytes // 2 + each * len(dataset)}B"


SUBSETS = {"all": None, "irregular": np.sort(np.random.default_rng(0).permutation(N)[: N * 3 // 4])}


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader_class", [torch.utils.data.DataLoader, stocache.DataLoader])
@pytest.mark.sampled(4)
def test_with_half_of_it_cached_half_of_the_blocks_are_read(storage, subset, workers, loader_class):
    dataset = StorageDataset(storage, SUBSETS[subset])
    with CachedDataset(dataset, half(dataset)) as cached:
        storage.counts()
        sampler = BlockSampler(dataset.indices, SIZE, True, window=4)
        loader = loader_class(cached, 8, sampler=sampler, num_workers=workers, collate_fn=list)
        for epoch in range(3):
            batches = list(loader)
            labels = sorted(label for batch in batches for _, label in batch)
            assert labels == list(dataset.indices)
            assert all((image == label).all() for batch in batches for image, label in batch)
            _, touched, _ = storage.counts()
            if epoch:
                assert touched == BLOCKS - len(blocks_in(cached))
                assert abs(touched - BLOCKS / 2) <= 1
            else:
                assert abs(cached.stats().total.filled - len(dataset) / 2) <= SIZE
        del loader, batches


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("storage", [False], indirect=True)
def test_the_caches_of_two_machines_hold_all_blocks_between_them(storage, subset):
    dataset = StorageDataset(storage, SUBSETS[subset])
    held, reads, seen = [], [], []
    for node in range(2):
        placement = Placement("scattered", node=node, nodes=2)
        room = len(dataset) + (len(dataset) // 2 + SIZE) * 32  # for half of all samples, and one block
        with CachedDataset(dataset, f"{room}B", placement=placement) as cached:
            sampler = LocalityDistributedSampler(cached, 10, num_replicas=2, rank=node, stratify=True)
            seen += sampler
            cached.warm(progress=False)
            before = cached.stats().total.misses
            for idx in sampler:
                assert cached[idx][1] == dataset.indices[idx]
            held.append(blocks_in(cached))
            reads.append(cached.stats().total.misses - before)
    assert sorted(seen) == list(range(len(dataset)))
    assert held[0] | held[1] == set(range(BLOCKS))
    assert max(reads) <= SIZE  # parts are of whole blocks, and stretches are not


def blocks_in(cached):
    """Blocks of which all samples of the dataset are cached; asserts that there are no others."""
    cached_blocks, others = set(), set()
    for local, state in enumerate(cached.cache.aux_array.tolist()):
        (cached_blocks if state == 1 else others).add(int(cached.indices[local]) // SIZE)
    assert not cached_blocks & others
    return cached_blocks


def wait_until_filled(cached, count):
    deadline = time.monotonic() + 20
    while (filled := cached.stats().total.filled) != count:
        assert time.monotonic() < deadline, f"{filled} samples are cached, not {count}"
        time.sleep(0.01)


def test_the_rest_of_a_missed_block_is_admitted_behind_and_not_read_again(storage):
    dataset = StorageDataset(storage)
    with CachedDataset(dataset, "10MB") as cached:
        probed = set(np.flatnonzero(cached.cache.aux_array).tolist())
        storage.counts()
        for idx in (3, 5, 9, 3, 12, 11):
            assert cached[idx][1] == idx
        wait_until_filled(cached, len(probed | set(range(20))))
        _, touched, samples = storage.counts()
        assert touched == 2
        assert samples <= 20
        assert [label for _, label in cached.__getitems__([*range(20), 30, 31, 32, 199])] == [*range(20), 30, 31, 32, 199]
        wait_until_filled(cached, len(probed | set(range(20)) | set(range(30, 40)) | set(range(190, 200))))
        _, touched, samples = storage.counts()
        assert touched == 2
        assert samples <= 20


def test_a_block_is_admitted_only_while_nobody_loads(storage):
    dataset = StorageDataset(storage)
    with CachedDataset(dataset, "10MB") as cached:
        before = cached.stats().total.filled
        admitter = BlockAdmitter(cached._loader)
        with admitter.behind([]):
            with admitter.behind([4]):
                pass
            time.sleep(0.05)
            assert cached.stats().total.filled == before
        wait_until_filled(cached, before + SIZE - np.count_nonzero(cached.cache.aux_array[40:50]))


def test_a_block_of_a_url_is_read_once_and_whole(storage, monkeypatch):
    monkeypatch.setattr(Counting, "reads_whole_blocks", True)
    dataset = StorageDataset(storage)
    with CachedDataset(dataset, "10MB") as cached:
        storage.counts()
        for idx in (3, 5, 9, 3, 12, 11):
            assert cached[idx][1] == idx
        assert storage.counts() == (2, 2, 0)


def _read(number, cached, barrier):
    barrier.wait()
    for idx in np.random.default_rng(number).permutation(N).tolist():
        assert cached[idx][1] == idx


@pytest.mark.parametrize("whole", [False, True])
def test_processes_that_miss_one_block_load_its_samples_once(storage, monkeypatch, whole):
    monkeypatch.setattr(Counting, "reads_whole_blocks", whole)
    context = multiprocessing.get_context("fork")
    with CachedDataset(StorageDataset(storage), "10MB") as cached:
        storage.counts()
        run_all(context, 4, _read, cached, context.Barrier(4))
        stats = cached.stats().total
        assert (stats.fills, stats.races) == (N, 0)
        if whole:
            assert storage.counts() == (BLOCKS, BLOCKS, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_warming_reads_each_block_once(storage, workers):
    with CachedDataset(StorageDataset(storage), "10MB") as cached:
        storage.counts()
        assert cached.warm(workers, progress=False).total.filled == N
        assert storage.counts() == (BLOCKS, BLOCKS, 0)


def test_epochs_are_counted_by_what_was_asked_for(storage):
    with CachedDataset(StorageDataset(storage), "10MB") as cached:
        for _ in range(2):
            cached.set_epoch(0)
            for idx in range(N):
                cached[idx]
        first, second = cached.stats().epochs
        assert BLOCKS <= first.misses == N - first.hits
        assert first.fills == N
        assert (second.misses, second.hits, second.fills) == (0, N, 0)
        assert cached.stats().total.races == 0


def test_a_block_that_has_no_room_leaves_alone_what_others_have_cached_meanwhile(monkeypatch):
    with RaggedCache("4KB", 3) as cache:

        def encode(value, where, real=cache._store.encode):
            monkeypatch.undo()
            cache.get_slot(0)
            cache.set_slot(0, "by another one")
            return real(value, where)

        monkeypatch.setattr(cache._store, "encode", encode)
        cache.set_if_empty([0, 1, 2], ["a", bytes(3000), bytes(3000)])
        assert cache.get_slot(0) == "by another one"
        assert cache.aux_array.tolist() == [1, 2, 2]


def test_a_limit_below_one_block_is_said(tmp_path, caplog):
    prepare(Samples(False), tmp_path, block_size=SIZE, progress=False).close()
    with OnDiskBlockDataStorage(tmp_path) as storage, CachedDataset(StorageDataset(storage), f"{N + 5 * 32}B") as cached:
        assert "is less than a block of the storage: nothing is cached." in caplog.text
        assert cached[3][1] == 3


def test_unsorted_indices_are_cached_by_the_sample(storage):
    indices = np.random.default_rng(0).permutation(N)
    dataset = StorageDataset(storage, indices)
    assert dataset.block_bounds is None
    with CachedDataset(dataset, "10MB") as cached:
        assert [cached[idx][1] for idx in range(N)] == indices.tolist()
        assert storage.counts()[0] == 0


@pytest.mark.parametrize("subset", SUBSETS)
def test_blocks_that_are_cached_are_not_read_ahead(storage, subset, monkeypatch):
    dataset = StorageDataset(storage, SUBSETS[subset])
    expected = []
    monkeypatch.setattr(storage, "prefetch_blocks", expected.extend)
    with CachedDataset(dataset, half(dataset)) as cached:
        sampler = BlockSampler(dataset.indices, SIZE, True, window=4, prefetch=cached.prefetch_blocks)
        for local in sampler:
            cached[local]
        assert set(expected) == set(range(BLOCKS))
        expected.clear()
        for local in sampler:
            cached[local]
        assert sorted(expected) == sorted(set(range(BLOCKS)) - blocks_in(cached))


def test_reading_ahead_changes_nothing_and_leaves_out_what_is_missing(storage):
    dataset = StorageDataset(storage)
    dataset.prefetch_blocks(range(BLOCKS + 5))
    assert all(dataset[idx][1] == idx for idx in range(N))


def test_an_error_of_the_storage_passes_through_and_the_next_one_reads(storage, monkeypatch):
    with CachedDataset(StorageDataset(storage), "10MB") as cached:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "load_block", lambda b: 1 / 0)
            assert cached[4][1] == 4  # read by itself
            patch.setattr(storage, "load_sample", lambda idx: 1 / 0)
            with pytest.raises(ZeroDivisionError, match="division by zero"):
                cached[3]
        assert cached[3][1] == 3


# ---------------------------------------------------------------------------------------------------- StorageDataset


def test_local_and_global_indices(tmp_path):
    storage = save(FilePerSample(tmp_path / "data"))
    dataset = StorageDataset(storage, [40, 3, 7])
    assert len(dataset) == 3
    assert [dataset[idx]["box"].label for idx in range(3)] == [40, 3, 7]
    assert dataset[-1]["box"].label == 7
    assert dataset.block_bounds is None
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        dataset[3]
    with pytest.raises(DatasetError, match=r"FilePerSample has no length\. Give the indices"):
        StorageDataset(storage)


@pytest.mark.parametrize("indices", [[N], [-1], ["a"], range(N + 1), range(-1, 5)])
def test_indices_outside_the_storage_are_errors(storage, indices):
    with pytest.raises(SampleIndexError, match="StorageDataset"):
        StorageDataset(storage, indices)


# ---------------------------------------------------------------------------------------------------- placement by units


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.data())
def test_units_are_resident_whole_and_their_slots_do_not_meet(sizes, data):
    bounds = np.cumsum([0, *sizes])
    total = int(bounds[-1])
    slots = data.draw(st.integers(0, total + 3))
    nodes = data.draw(st.integers(1, 4))
    placement = Placement(
        data.draw(st.sampled_from(["prefix", "scattered"])), BlockBounds(bounds), data.draw(st.integers(0, nodes - 1)), nodes
    )
    chosen = residency(placement, total, slots)
    assert isinstance(chosen, BlockResidency)
    everything = torch.arange(total)
    resident = chosen.resident(everything)
    for begin, end in itertools.pairwise(bounds.tolist()):
        assert resident[begin:end].all() or not resident[begin:end].any()
    there = everything[resident]
    got = chosen.slots(there).tolist()
    assert sorted(got) == list(range(len(there)))
    assert [chosen.slot(idx) for idx in there.tolist()] == got
    assert len(there) > slots - max(sizes) or slots >= total == len(there)
    assert len(there) <= slots


def test_units_of_one_size_are_chosen_as_by_that_size():
    units = BlockBounds(range(0, 101, 10))
    for order in ("prefix", "scattered"):
        one, other = residency(Placement(order, units), 100, 45), residency(Placement(order, 10), 100, 45)
        everything = torch.arange(100)
        assert torch.equal(one.resident(everything), other.resident(everything))


@pytest.mark.parametrize("bounds", [[], [1, 2], [0, 2, 2], [0, 3, 1], [[0, 1]]])
def test_bounds_that_are_none_are_errors(bounds):
    with pytest.raises(LimitError, match="bounds of blocks must ascend from 0"):
        BlockBounds(bounds)


def test_units_of_another_dataset_are_an_error():
    with pytest.raises(LimitError, match="blocks of 5 samples in all, the dataset has 6"):
        residency(Placement("prefix", BlockBounds([0, 5])), 6, 3)


def test_units_tell_caches_apart():
    assert BlockBounds([0, 2, 5]) == BlockBounds([0, 2, 5])
    assert BlockBounds([0, 2, 5]) != BlockBounds([0, 3, 5])
    assert str(BlockBounds([0, 2, 5])) != str(BlockBounds([0, 3, 5]))
    assert hash(BlockBounds([0, 2])) == hash(BlockBounds([0, 2]))


class Sick(StorageDataset):
    """Sample 13 cannot be read."""

    def __getitem__(self, idx):
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices):
        if 13 in indices:
            raise OSError("sample 13 cannot be read")
        return super().__getitems__(indices)


def test_a_sample_that_cannot_be_read_costs_only_itself(storage):
    with CachedDataset(Sick(storage), 1) as cached:
        for _ in range(2):
            for idx in range(10, 30):
                if idx == 13:
                    with pytest.raises(OSError, match="sample 13 cannot be read"):
                        cached[idx]
                else:
                    assert cached[idx][1] == idx
        assert cached.cache.aux_array[20:30].tolist() == [1] * 10
