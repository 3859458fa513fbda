"""CachedDataset with a tier on a disk: the source is read once in the life of the folder."""

import contextlib
import logging
import multiprocessing
import os
import tempfile
import time
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, StackDataset

import stocache
from stocache import (
    CachedDataset,
    DiskError,
    LimitError,
    LocalityDistributedSampler,
    MismatchError,
    OnDiskBlockDataStorage,
    Placement,
    StorageDataset,
    prepare,
)
from tests.support.equality import same
from tests.support.processes import run_all

N = 96
ONCE = N + 1  # the probe loads its first sample twice


class Counter:
    """Counts in a file, over all processes."""

    def __init__(self):
        fd, self.path = tempfile.mkstemp()
        os.close(fd)
        weakref.finalize(self, os.unlink, self.path)

    def count(self):
        with open(self.path, "ab") as file:
            file.write(b".")

    def counted(self):
        """The count since the last look."""
        size = os.path.getsize(self.path)
        os.truncate(self.path, 0)
        return size

    def __reduce__(self):
        return _CounterAt, (self.path,)


class _CounterAt(Counter):
    def __init__(self, path):
        self.path = path


class Source(Dataset):
    """Counts its reads."""

    def __init__(self, ragged=False, seconds=0.0):
        self.ragged, self.seconds, self.reads = ragged, seconds, Counter()

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.reads.count()
        time.sleep(self.seconds)
        return self.sample(idx)

    def sample(self, idx):
        generator = torch.Generator().manual_seed(idx)
        return torch.randint(0, 256, (3, 9 + self.ragged * (idx % 5), 7), generator=generator, dtype=torch.uint8), idx


MEMORY = {0.0: 0, 0.25: "5500B", 0.5: "11KB", 1.0: "1MB"}  # by the share of the samples that it has room for
SIZES = pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])


def open_tiers(source, folder, memory=0.25, **options):
    return CachedDataset(source, MEMORY[memory], disk=folder, **{"disk_limit": "1MB", "fingerprint": "1"} | options)


def check_epochs(cached, source, epochs=3, workers=0, loader=stocache.DataLoader, **options):
    for _ in range(epochs):
        batches = list(loader(cached, 16, shuffle=True, num_workers=workers, **options))
        images, labels = ([batch[part] for batch in batches] for part in range(2))
        rows = [(image, int(label)) for batch in zip(images, labels, strict=True) for image, label in zip(*batch, strict=True)]
        assert sorted(label for _, label in rows) == list(range(N))
        assert all(same(image, source.sample(label)[0]) for image, label in rows)


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


@SIZES
@pytest.mark.parametrize("memory", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.sampled(4)
def test_the_source_is_read_once_in_three_runs_of_three_epochs(tmp_path, ragged, memory, workers):
    source = Source(ragged)
    for run in range(3):
        with open_tiers(source, tmp_path / "disk", memory) as cached:
            check_epochs(cached, source, workers=workers, collate_fn=as_lists)
            assert source.reads.counted() == (0 if run else ONCE)


@pytest.mark.parametrize("method", ["thread", "multiprocessing"])
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("memory", [0.0, 0.25])
def test_batches_are_read_from_the_disk_into_tensors(tmp_path, loader, memory, method):
    if loader is torch.utils.data.DataLoader and method == "thread":
        pytest.skip("torch has no worker threads")
    source, options = Source(), {"worker_method": method} if loader is stocache.DataLoader else {}
    for run in range(2):
        with open_tiers(source, tmp_path / "disk", memory) as cached:
            check_epochs(cached, source, workers=2, loader=loader, **options)
            assert source.reads.counted() == (0 if run else ONCE)


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_workers_that_do_not_inherit_the_folder_open_it(tmp_path, start):
    source = Source()
    for run in range(2):
        with open_tiers(source, tmp_path / "disk") as cached:
            check_epochs(cached, source, epochs=1, workers=2, multiprocessing_context=start)
            assert source.reads.counted() == (0 if run else ONCE)


def _run_job(number, folder, source, ready):
    with open_tiers(source, folder) as cached:
        ready.wait(30)
        check_epochs(cached, source, workers=0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_jobs_read_each_sample_once(tmp_path, method):
    context = multiprocessing.get_context(method)
    source = Source(seconds=0.001)
    run_all(context, 2, _run_job, str(tmp_path / "disk"), source, context.Barrier(2))
    assert ONCE <= source.reads.counted() <= ONCE + 9  # both probe, if both come before there is a folder
    run_all(context, 2, _run_job, str(tmp_path / "disk"), source, context.Barrier(2))
    assert source.reads.counted() == 0


@SIZES
def test_warm_fills_both_tiers(tmp_path, ragged):
    source = Source(ragged)
    with open_tiers(source, tmp_path / "disk") as cached:
        stats = cached.warm(num_workers=2, progress=False)
        assert source.reads.counted() == ONCE
        assert 0 < stats.total.filled < N
        assert stats.disk.filled >= N - stats.total.filled
        check_epochs(cached, source, collate_fn=as_lists)
        assert source.reads.counted() == 0


def test_what_fits_in_memory_is_not_written_to_a_small_disk(tmp_path):
    source = Source()
    with open_tiers(source, tmp_path / "disk", 0.5, disk_limit="12KB") as cached:
        cached.warm(progress=False)
        stats = cached.stats()
        in_memory = cached.cache.aux_array == 1
        on_disk = cached.disk_cache.aux_array == 1
        assert stats.total.filled + stats.disk.filled == (in_memory | on_disk).sum()
        assert 0 < stats.disk.filled < N - stats.total.filled
        source.reads.counted()
        check_epochs(cached, source, epochs=1)
        assert source.reads.counted() == N - stats.total.filled - stats.disk.filled


class Costly(Source):
    def __getitem__(self, idx):
        time.sleep(0.02 if idx % 4 == 0 else 0.0)
        return super().__getitem__(idx)


def test_by_cost_the_costly_are_in_memory_and_the_others_on_the_disk(tmp_path):
    source = Costly()
    with open_tiers(source, tmp_path / "disk", 0.5, admission="cost") as cached:
        check_epochs(cached, source, epochs=3, collate_fn=as_lists)
        cached.disk_cache.flush()
        assert source.reads.counted() <= ONCE + 8  # the probe's samples are loaded again, to be timed
        in_memory = cached.cache.aux_array.numpy() == 1
        on_disk = cached.disk_cache.aux_array.numpy() == 1
        assert in_memory[::4].mean() > 0.6  # costs are measured, and the machine may be busy
        assert (in_memory | on_disk).all()
        check_epochs(cached, source, epochs=1, collate_fn=as_lists)
        assert source.reads.counted() == 0


class Url(OnDiskBlockDataStorage):
    """A storage that fetches whole blocks, and counts them."""

    reads_whole_blocks = True

    def __init__(self, folder):
        super().__init__(folder)
        self.fetches = Counter()

    def load_samples(self, indices):
        for _ in {idx // 8 for idx in indices}:
            self.fetches.count()
        return super().load_samples(indices)

    def load_sample(self, idx):
        self.fetches.count()
        return super().load_sample(idx)

    def load_block(self, b):
        self.fetches.count()
        return super().load_block(b)


@SIZES
@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_storage_at_a_url_each_block_is_fetched_once(tmp_path, ragged, workers):
    source = Source(ragged)
    prepare(source, tmp_path / "blocks", block_size=8, progress=False).close()
    for run in range(2):
        storage = Url(tmp_path / "blocks")
        with open_tiers(StorageDataset(storage), tmp_path / "disk") as cached:
            probed = storage.fetches.counted()
            check_epochs(cached, source, workers=workers, collate_fn=as_lists)
            fetched = storage.fetches.counted()
            assert fetched == 0 if run else fetched <= N // 8 <= fetched + probed
        storage.close()


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_codecs(tmp_path, codec):
    source = StackDataset(torch.arange(N), torch.zeros(N, 3000, dtype=torch.uint8))
    for _ in range(2):
        with CachedDataset(source, 0, disk=tmp_path / "disk", disk_limit="1MB", fingerprint="1", codec=codec) as cached:
            for idx in range(N):
                assert same(cached[idx], source[idx])
            cached.disk_cache.flush()
            per_sample = cached.stats().disk.slot_bytes
            assert per_sample < 300 if codec else per_sample > 3000


def test_a_transform_runs_after_both_tiers_and_cut_is_kept(tmp_path):
    class Transformed(Source):
        def __init__(self):
            super().__init__()
            self.transform = lambda image: image.float() + torch.rand(())

        def __getitem__(self, idx):
            image, label = super().__getitem__(idx)
            return self.transform(image), label

    for run in range(2):
        source = Transformed()
        with CachedDataset(
            source, 0, disk=tmp_path / "disk", disk_limit="1MB", fingerprint="1", transform=lambda s: s
        ) as cached:
            torch.manual_seed(0)
            found = [cached[idx] for idx in range(N)]
            torch.manual_seed(0)
            expected = [source[idx] for idx in range(N)]
        if run == 0:
            assert len({float((image - source.sample(label)[0]).mean()) for image, label in found}) > 1
        assert all(same(a, b) for a, b in zip(found, expected, strict=True)), run


def test_another_fingerprint_reads_the_source_again(tmp_path, caplog):
    source = Source()
    for fingerprint, reads in (("1", ONCE), ("1", 0), ("2", ONCE), ("2", 0)):
        with open_tiers(source, tmp_path / "disk", fingerprint=fingerprint) as cached:
            check_epochs(cached, source, epochs=1)
            assert source.reads.counted() == reads
    assert caplog.text.count("fingerprint '1', now '2'") == 1


def test_samples_that_are_too_large_to_be_described_are_probed_again(tmp_path, monkeypatch):
    monkeypatch.setattr("stocache.disk.cache.MOST_TEXT", 10)
    source = Source()
    for reads in (ONCE, 9):  # the probe loads 8 samples, the first one twice
        with open_tiers(source, tmp_path / "disk") as cached:
            check_epochs(cached, source, epochs=1)
            assert source.reads.counted() == reads


@SIZES
def test_without_a_fingerprint_samples_are_compared(tmp_path, ragged, caplog):
    class Others(Source):
        def sample(self, idx):
            image, label = super().sample(idx)
            return 255 - image, label

    for kind, told in ((Source, 0), (Source, 0), (Others, 1)):
        caplog.clear()
        with open_tiers(kind(ragged), tmp_path / "disk", fingerprint=None) as cached:
            assert caplog.text.count("is not that of the dataset") == told
            cached.warm(progress=False)


def test_another_structure_is_refused(tmp_path):
    with open_tiers(Source(), tmp_path / "disk") as cached:
        cached.warm(progress=False)
    with pytest.raises(MismatchError, match="samples"):
        open_tiers(Source(), tmp_path / "disk", variable=True, probe=0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"disk_limit": None}, LimitError, "disk_limit"),
        ({"disk": None}, LimitError, "go together"),
        ({"disk_limit": "lots"}, LimitError, "disk_limit"),
        ({"disk_limit": "1KB"}, LimitError, "one sample needs"),
        ({"disk_limit": -1}, LimitError, "disk_limit"),
    ],
)
def test_wrong_options(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        CachedDataset(Source(), 1, **{"disk": tmp_path / "disk", "disk_limit": "1MB"} | options)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "disk").write_text("mine")
    with pytest.raises(DiskError, match="is a file"):
        open_tiers(Source(), tmp_path / "disk")
    assert (tmp_path / "disk").read_text() == "mine"


def test_a_disk_that_cannot_be_used_is_told_once_and_the_source_is_read(tmp_path, caplog):
    (tmp_path / "sealed").symlink_to("/proc/1/nothing/here")
    source = Source()
    with open_tiers(source, tmp_path / "sealed", 0.5) as cached, caplog.at_level(logging.WARNING):
        check_epochs(cached, source)
        assert cached.stats().disk.filled == 0
    assert sum("sealed" in record.message for record in caplog.records if record.levelno >= logging.WARNING) == 1


def test_stats_tell_hits_of_both_tiers(tmp_path):
    source = Source()
    with open_tiers(source, tmp_path / "disk", 0.5) as cached:
        cached.warm(progress=False)
        before = cached.stats()
        check_epochs(cached, source, epochs=1)
        after = cached.stats()
        in_memory = int((cached.cache.aux_array == 1).sum())
        assert after.total.hits - before.total.hits == in_memory
        assert after.disk.hits - before.disk.hits == N - in_memory
        assert after.disk.misses == before.disk.misses
        assert after.disk.load_s == before.disk.load_s > 0
        assert after.disk.read_s > before.disk.read_s
        assert after.total.read_s == 0
        assert after.disk.hit_bytes == after.disk.hits * after.disk.slot_bytes


def test_views_of_some_samples_use_the_disk(tmp_path):
    source = Source()
    with open_tiers(source, tmp_path / "disk", 0.0) as cached:
        subset = torch.utils.data.Subset(cached, np.arange(0, N, 2).tolist())
        for _ in range(2):
            for idx in range(len(subset)):
                assert same(subset[idx], source.sample(2 * idx))
            cached.disk_cache.flush()
        assert source.reads.counted() <= N // 2 + 9  # the probe looks at others, too


@pytest.mark.parametrize("stratify", [False, True])
def test_the_disks_of_two_machines_add_up_as_their_memories_do(tmp_path, stratify):
    sources, reads = [Source(), Source()], []
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                open_tiers(source, tmp_path / str(node), disk_limit="10KB", placement=Placement(nodes=2, node=node))
            )
            for node, source in enumerate(sources)
        ]
        samplers = [
            LocalityDistributedSampler(cached, 8, num_replicas=2, rank=node, num_nodes=2, stratify=stratify)
            for node, cached in enumerate(nodes)
        ]
        for epoch in range(3):
            for sampler, cached, source in zip(samplers, nodes, sources, strict=True):
                sampler.set_epoch(epoch)
                for idx in sampler:
                    assert same(cached[idx], source.sample(idx))
                cached.disk_cache.flush()
            reads.append(sum(source.reads.counted() for source in sources))
        kept = [(cached.cache.aux_array == 1) | (cached.disk_cache.aux_array == 1) for cached in nodes]
    assert N / 4 < kept[0].sum() <= N / 2  # so much more than memory has room for
    assert not (kept[0] & kept[1]).any()
    missing = N - int((kept[0] | kept[1]).sum())
    assert reads[0] >= N
    assert reads[2] == missing if stratify else missing <= reads[2] < N / 2
