"""CachedDataset with a tier on a disk: the source is read once in the life of the folder."""

import logging
import multiprocessing

import pytest
import torch

import stocache
from stocache import CachedDataset
from tests.support.equality import same
from tests.support.images import Counted, many_sizes, one_size
from tests.support.processes import run_all

pytestmark = pytest.mark.unaudited

N = 96
ONCE = N + 1  # the probe loads its first sample twice
MEMORY = {0.0: 0, 0.25: "5500B", 0.5: "11KB"}  # by the share of the samples that it has room for
SIZES = pytest.mark.parametrize("size", [one_size, many_sizes], ids=["fixed", "ragged"])


def counted(reads):
    """The reads since the last look."""
    found = int(reads.sum())
    reads.zero_()
    return found


@pytest.fixture
def source():
    return Counted(N)


def open_tiers(source, folder, memory=0.25, **options):
    options = {"disk": folder / "disk", "disk_limit": "1MB", "fingerprint": "1", "audit": 0} | options
    return CachedDataset(source, MEMORY[memory], **options)


def check_epochs(cached, source, epochs=3, workers=0, loader=stocache.DataLoader, **options):
    options |= {"collate_fn": as_lists} if source.size is many_sizes else {}
    for _ in range(epochs):
        rows = []
        for images, labels in loader(cached, 16, shuffle=True, num_workers=workers, **options):
            rows += zip(images, map(int, labels), strict=True)
        assert sorted(label for _, label in rows) == list(range(N))
        assert all(same(image, source.sample(label)[0]) for image, label in rows)


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


@pytest.mark.linux
@pytest.mark.parametrize(("size", "memory", "options"), [
    (one_size, 0.0, {"workers": 2, "loader": torch.utils.data.DataLoader}), (many_sizes, 0.25, {"workers": 2}),
    (one_size, 0.25, {"workers": 2, "worker_method": "thread"}), (many_sizes, 0.0, {}),
    (one_size, 0.25, {"workers": 1, "multiprocessing_context": "forkserver"}),
])  # fmt: skip
def test_the_source_is_read_once_in_two_runs(tmp_path, size, memory, options):
    source = Counted(N, size)
    for run in range(2):
        with open_tiers(source, tmp_path, memory) as cached:
            check_epochs(cached, source, epochs=2, **options)
            assert counted(source.reads) == (0 if run else ONCE)


def _run_job(number, folder, source, ready):
    with open_tiers(source, folder) as cached:
        ready.wait(60)
        check_epochs(cached, source)


@pytest.mark.linux
def test_two_jobs_read_each_sample_once(tmp_path, source):
    context = multiprocessing.get_context("fork")
    run_all(context, 2, _run_job, tmp_path, source, context.Barrier(2))
    assert N <= counted(source.reads) <= ONCE + 9  # both probe, if both come before there is a folder
    with open_tiers(source, tmp_path) as cached:
        check_epochs(cached, source, epochs=1)
    assert counted(source.reads) == 0


@SIZES
def test_warm_fills_both_tiers_and_stats_count_the_hits_of_both(tmp_path, size):
    source = Counted(N, size)
    with open_tiers(source, tmp_path) as cached:
        before = cached.warm(num_workers=2, progress=False)
        assert counted(source.reads) == ONCE
        assert 0 < before.total.filled < N
        assert before.disk.filled >= N - before.total.filled
        check_epochs(cached, source, epochs=1)
        assert counted(source.reads) == 0
        after, in_memory = cached.stats(), int((cached.cache.aux_array == 1).sum())
        assert after.total.hits - before.total.hits == in_memory
        assert after.disk.hits - before.disk.hits == N - in_memory
        assert after.disk.misses == before.disk.misses
        assert after.disk.read_s > before.disk.read_s


def test_another_fingerprint_reads_the_source_again(tmp_path, source, caplog):
    for fingerprint, reads in (("1", ONCE), ("1", 0), ("2", ONCE)):
        with open_tiers(source, tmp_path, fingerprint=fingerprint) as cached:
            check_epochs(cached, source, epochs=1)
            assert counted(source.reads) == reads
    assert caplog.text.count("fingerprint '1', now '2'") == 1


@SIZES
def test_without_a_fingerprint_samples_are_compared(tmp_path, size, caplog, monkeypatch):
    for warned in (0, 0, 1):
        if warned:
            monkeypatch.setattr(Counted, "sample", lambda self, idx, real=Counted.sample: real(self, (idx + 1) % N))
        with open_tiers(Counted(N, size), tmp_path, fingerprint=None) as cached:
            assert caplog.text.count("is not the dataset's") == warned
            cached.warm(progress=False)


def test_a_disk_that_cannot_be_used_is_warned_of_once_and_the_source_is_read(tmp_path, source, caplog):
    (tmp_path / "disk").symlink_to("/proc/1/nothing/here")
    with open_tiers(source, tmp_path, 0.5) as cached, caplog.at_level(logging.WARNING):
        check_epochs(cached, source)
        assert cached.stats().disk.filled == 0
    assert [str(tmp_path / "disk") in record.message for record in caplog.records] == [True]
