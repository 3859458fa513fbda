"""A cache in front of blocks: whole blocks are admitted, by copying their bytes where it can be, and each is read once."""

import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import stocache
from stocache import CachedDataset, DamagedError, OnDiskBlockDataStorage, RaggedCache, SharedCache, StorageDataset
from stocache.datasets.loaders import BlockAdmitter
from stocache.storage.block import Block
from stocache.storage.manifest import block_name
from tests.support.equality import identical
from tests.support.processes import run_all, wait_until
from tests.support.storages import COPIED, ROWS, STRUCTURES, pixels

pytestmark = pytest.mark.unaudited

SIZE, N = 8, 29  # the last block has 5
MANY = 160


class Counting(OnDiskBlockDataStorage):
    """Counts, over all processes, reads of whole blocks and of samples by themselves."""

    pause_s = 0.0

    def __init__(self, folder, **options):
        super().__init__(folder, **options)
        self.blocks, self.samples = (torch.zeros(len(self), dtype=torch.int64).share_memory_() for _ in range(2))

    def load_block(self, b):
        self.blocks[b] += 1
        time.sleep(self.pause_s)
        return super().load_block(b)

    def load_sample(self, idx):
        self.samples[idx] += 1
        return super().load_sample(idx)

    def counts(self):
        """Blocks that were read whole, blocks that were touched, and samples read by themselves; since the last look."""
        touched = {*np.flatnonzero(self.blocks), *(np.flatnonzero(self.samples) // SIZE)}
        found = int(self.blocks.sum()), len(touched), int(self.samples.sum())
        self.blocks.zero_(), self.samples.zero_()
        return found


@pytest.fixture
def prepared(tmp_path):
    """Return a function that writes samples into blocks, and returns their storage."""
    storages = []

    def prepared(make, count=N, storage=OnDiskBlockDataStorage, **options):
        stocache.prepare(list(map(make, range(count))), tmp_path / "blocks", block_size=SIZE, progress=False, **options).close()
        storages.append(storage(tmp_path / "blocks", **options))
        return storages[-1]

    yield prepared
    for storage in storages:
        storage.close()


@pytest.fixture
def made(monkeypatch):
    """A list with an item for each sample that was made of a block."""
    count, sample, some = [], Block.sample, Block.some
    monkeypatch.setattr(Block, "sample", lambda self, row: count.append(1) or sample(self, row))
    monkeypatch.setattr(Block, "some", lambda self, rows: count.extend(rows) or some(self, rows))
    return count


def admit_all(cached):
    """Admit all blocks, in some order."""
    for block in np.random.permutation(len(cached.dataset.block_bounds) - 1).tolist():
        cached._loader.admit(block)


def cached_set(cached):
    return np.flatnonzero(cached.cache.aux_array.numpy() == 1).tolist()


def wait_until_admitted(cached):
    BlockAdmitter.of(cached._loader, cached.cache)._background.flush()


def in_blocks(cached):
    """Return the blocks of which all samples are cached, as a set of numbers; demand that of the others none is."""
    states = cached.cache.aux_array.numpy() == 1
    parts = dict(enumerate(np.split(states, cached.dataset.block_bounds[1:-1])))
    assert all(part.all() or not part.any() for part in parts.values())
    return {number for number, part in parts.items() if part.all()}


def tensor(idx):
    return torch.from_numpy(pixels(idx, 3, 5))


def text(idx):
    return {"image": bytes([idx % 256]) * (300 + 37 * (idx % 11)), "label": idx}


def no_bytes(idx):
    return torch.zeros(idx if idx < N // 2 else 0)


FIXED = {name: make for name, make in ROWS.items() if name != "text of one length"}
RAGGED = {"text": text, "bytes": COPIED["bytes"], "a structure each": STRUCTURES["a structure each"], "no bytes": no_bytes}
SOME = [("all alignments", [3, 1, 0, 7, 14, 9, 28]), ("text", [0, 0, 9, 8, 9]), ("text", list(range(2, 27)))]


@pytest.mark.parametrize(("kind", "indices"), [*((kind, range(N)) for kind in FIXED | RAGGED), *SOME])
def test_bytes_of_blocks_are_copied_into_the_cache(prepared, made, kind, indices):
    make = (FIXED | RAGGED)[kind]
    with CachedDataset(StorageDataset(prepared(make), indices), "100MB") as cached:
        assert isinstance(cached.cache, SharedCache if kind in FIXED else RaggedCache)
        made.clear()
        admit_all(cached)
        assert made == []
        assert all(identical(cached.cache.get_slot(local), make(idx)) for local, idx in enumerate(indices))
        total = cached.stats().total
        assert (total.fills, total.misses) == (len(indices), 0)


class Doubled(StorageDataset):
    def __getitem__(self, idx):
        return super().__getitem__(idx) * 2

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class DoublingStorage(OnDiskBlockDataStorage):
    def load_sample(self, idx):
        return super().load_sample(idx) * 2


NOT_COPIED = {
    "another order of keys": (lambda idx: {"a": idx, "b": 1.5} if idx < 10 else {"b": 1.5, "a": idx}, {"variable": False}),
    "another order of dimensions": (lambda idx: np.asarray(pixels(idx, 3, 4), order="FC"[idx < 10]), {"variable": False}),
    "compressed": (lambda idx: bytes(9 * idx), {"codec": "zstd"}),
    "pickled": (lambda idx: [bytes(idx), {frozenset(): idx}], {"allow_pickle": True}),
    "changed by the dataset": (lambda idx: pixels(idx, 3, 5), {}), "changed by the storage": (COPIED["bytes"], {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_COPIED)
def test_what_cannot_be_copied_is_made_into_samples(prepared, made, kind):
    make, options = NOT_COPIED[kind]
    if "codec" in options:
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    own = {"allow_pickle": True} if "allow_pickle" in options else {}
    storage = DoublingStorage if kind == "changed by the storage" else OnDiskBlockDataStorage
    dataset = (Doubled if kind == "changed by the dataset" else StorageDataset)(prepared(make, storage=storage, **own))
    with CachedDataset(dataset, "100MB", **options) as cached:
        made.clear()
        admit_all(cached)
        assert len(made) > 0
        assert cached_set(cached) == list(range(N))
        for idx in range(N):
            np.testing.assert_equal(cached.cache.get_slot(idx), make(idx) * 2 if "changed" in kind else make(idx))


@pytest.mark.parametrize("make", [tensor, lambda idx: bytes([idx]) * 15 + bytes(idx)], ids=["fixed", "ragged"])
def test_a_damaged_sample_is_left_out_and_an_error_when_it_is_wanted(prepared, caplog, make):
    storage = prepared(make)
    block = storage._open(1)
    begin = block._begin + block._bounds[2]  # of sample 10
    storage.close()
    with open(Path(storage.base_folder) / block_name(1), "r+b") as file:
        file.seek(begin + (3 if make is tensor else 17))
        file.write(b"\xff")
    with CachedDataset(StorageDataset(storage), "100MB") as cached:
        assert identical(cached[12], make(12))
        admit_all(cached)
        wait_until(lambda: cached_set(cached) == [idx for idx in range(N) if idx != 10])
        assert not caplog.records
        with pytest.raises(DamagedError, match=r"000001.safetensors is damaged \(sample 2 in it"):
            cached[10]
        with pytest.raises(DamagedError, match=r"000001.safetensors is damaged"):
            cached.warm(progress=False)


def half(dataset):
    """Bytes that hold half of the samples."""
    with CachedDataset(dataset, "10MB") as cached:
        cached.warm(progress=False)
        stats = cached.stats().total
        each = 1 if isinstance(cached.cache, SharedCache) else 9  # a sample's state, and place
        return f"{stats.filled * stats.slot_bytes // 2 + each * len(dataset)}B"


SUBSETS = {"all": None, "irregular": np.sort(np.random.default_rng(0).permutation(MANY)[: MANY * 3 // 4])}
BLOCKS = MANY // SIZE


def labelled(idx):
    return tensor(idx), idx


@pytest.mark.linux
@pytest.mark.parametrize(
    ("make", "subset", "workers", "loader_class"),
    [(labelled, "all", 2, torch.utils.data.DataLoader), (text, "irregular", 0, stocache.DataLoader)],
)
def test_with_half_of_it_cached_half_of_the_blocks_are_read(prepared, make, subset, workers, loader_class):
    storage = prepared(make, MANY, Counting)
    dataset = StorageDataset(storage, SUBSETS[subset])
    ahead = []
    storage.prefetch_blocks = ahead.extend
    with CachedDataset(dataset, half(dataset)) as cached:
        storage.counts()
        sampler = stocache.BlockSampler(dataset.indices, SIZE, True, window=4, prefetch=cached.prefetch_blocks)
        loader = loader_class(cached, 8, sampler=sampler, num_workers=workers, collate_fn=list)
        for epoch in range(3):
            seen = [sample for batch in loader for sample in batch]
            seen = sorted(seen, key=lambda sample: sample["label" if make is text else 1])
            assert all(identical(sample, make(int(idx))) for sample, idx in zip(seen, dataset.indices, strict=True))
            _, touched, _ = storage.counts()
            others = set(range(BLOCKS)) - in_blocks(cached)
            assert not epoch or touched == len(others)
            assert abs(len(others) - BLOCKS / 2) <= 2
            assert set(ahead) == (others if epoch else set(range(BLOCKS)))  # blocks that are cached are not read ahead
            ahead.clear()
        del loader


@pytest.mark.parametrize(("room", "chosen"), [("10MB", BLOCKS), (f"{9 * MANY + 40_000}B", BLOCKS // 2)])
def test_wanted_samples_come_first_and_whole_blocks_are_kept(prepared, made, room, chosen):
    with CachedDataset(StorageDataset(prepared(text, MANY)), room) as cached:
        for order in (np.random.permutation(MANY).tolist(), range(MANY)):
            made.clear()
            assert cached[100]["label"] == 100
            assert made == [1]
            assert [cached[idx]["label"] for idx in order] == list(order)
            wait_until_admitted(cached)
            held = in_blocks(cached)
            assert abs(len(held) - chosen) <= 2
            cached.cache.clear()  # after which the same blocks are chosen
        cached._loaded_here = True  # so that the samples are counted here, and not in a child process
        made.clear()
        cached.warm(progress=False)
        assert made == []
        assert in_blocks(cached) == held


@pytest.mark.parametrize(("make", "each", "room"), [(labelled, 1, 5 * 24), (text, 9, 3000)], ids=["fixed", "ragged"])
def test_a_limit_below_one_block_is_warned_of(prepared, caplog, make, each, room):
    with CachedDataset(StorageDataset(prepared(make)), f"{each * N + room}B") as cached:
        assert "is less than a block of the storage: nothing is cached." in caplog.text
        assert identical(cached[3], make(3))
        assert cached_set(cached) == []


@pytest.mark.parametrize("make", [labelled, text], ids=["fixed", "ragged"])
def test_the_rest_of_a_missed_block_is_admitted_behind_while_nobody_loads_and_not_read_again(prepared, made, make):
    with CachedDataset(StorageDataset(prepared(make)), "10MB") as cached:
        made.clear()
        for idx in [3, 5, 9, 3, 12, 11]:
            assert identical(cached[idx], make(idx))
        wait_until(lambda: cached_set(cached) == list(range(16)))
        assert len(made) <= 5
        wait_until_admitted(cached)
        cached.cache.clear()
        admitter = BlockAdmitter(cached._loader)
        with admitter.behind([]):
            with admitter.behind([2]):
                pass
            admitter._background._thread.join(0.2)
            assert cached_set(cached) == []
        wait_until(lambda: cached_set(cached) == list(range(16, 24)))


def _read(number, cached, barrier):
    barrier.wait()
    for idx in sorted(range(N), key=lambda idx: (idx // SIZE, (idx + number) % SIZE)):  # each a different one of a block
        assert cached[idx]["label"] == idx


@pytest.mark.linux
@pytest.mark.parametrize("whole", [False, True])
def test_each_block_or_sample_is_read_once(prepared, monkeypatch, whole):
    monkeypatch.setattr(Counting, "reads_whole_blocks", whole)  # as of a URL
    monkeypatch.setattr(Counting, "pause_s", 0.02)  # so that the others come meanwhile
    storage = prepared(text, storage=Counting)
    context = multiprocessing.get_context("fork")
    with CachedDataset(StorageDataset(storage), "10MB") as cached:
        storage.counts()
        for idx in (3, 5, 9, 3, 12, 11):
            assert cached[idx]["label"] == idx
        assert not whole or storage.counts() == (2, 2, 0)
        run_all(context, 4, _read, cached, context.Barrier(4))
        stats = cached.stats().total
        assert (stats.fills, stats.races) == (N, 0)
        assert not whole or storage.counts() == (2, 2, 0)
        for workers in (0, 2):
            storage.counts()  # before, as a thread that admits blocks may be due at any time
            cached.cache.clear()
            assert cached.warm(workers, progress=False).total.filled == N
            assert storage.counts() == (4, 4, 0)


@pytest.mark.parametrize("has_room", [True, False])
def test_blocks_at_a_url_are_fetched_whole_only_if_there_is_no_room_for_all(prepared, made, tmp_path, has_room):
    source = prepared(text)
    limit = sum(entry.nbytes for entry in source.index.blocks) - (0 if has_room else 1)
    options = {"local_folder": tmp_path / "local", "local_limit": limit}
    with OnDiskBlockDataStorage(f"file://{source.base_folder}", **options) as storage:
        with CachedDataset(StorageDataset(storage), "100MB", example=text(0)) as cached:
            assert cached[9]["label"] == 9
            assert made == [1] if has_room else cached_set(cached)[-8:] == list(range(8, 16))


def test_a_getitem_of_a_subclass_is_asked_for_batches_too(prepared):
    own = type("Own", (StorageDataset,), {"__getitem__": lambda its, idx: -idx})(prepared(labelled))
    with CachedDataset(own, 0.1) as cached:
        assert own.__getitems__([1, 2]) == cached.__getitems__([1, 2]) == [-1, -2]


def test_local_and_global_indices(prepared):
    numbers = SimpleNamespace(load_sample=lambda idx: idx)
    dataset = StorageDataset(numbers, [40, 3, 7])
    assert [dataset[idx] for idx in (0, 1, 2, -1)] == [40, 3, 7, 7]
    assert dataset.block_bounds is None
    with pytest.raises(stocache.DatasetError, match=r"SimpleNamespace has no length\. Give the indices"):
        StorageDataset(numbers)
    storage = prepared(labelled)
    for indices in ([N], [-1], ["a"], range(N + 1)):
        with pytest.raises(stocache.SampleIndexError, match="StorageDataset"):
            StorageDataset(storage, indices)
    unsorted = StorageDataset(storage, [9, 1, 8, 0])
    assert unsorted.block_bounds is None
    with CachedDataset(unsorted, "10MB") as cached:
        assert [cached[idx][1] for idx in range(4)] == [9, 1, 8, 0]
