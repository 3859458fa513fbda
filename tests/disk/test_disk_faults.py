"""A disk, or a process, that fails while samples are written: training goes on from the dataset, with one warning, and no
sample is wrong."""

import contextlib
import errno
import logging
import os
import random
import resource
import shutil
import signal
import threading

import numpy as np
import pytest
import torch

from stocache import CachedDataset, DiskCache
from stocache.disk import writer
from stocache.samples.spec import Structure
from tests.support.disks import COUNT, Samples, contents, loaded, open_disk, put, sample
from tests.support.equality import same
from tests.support.processes import in_child, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")


def failing(monkeypatch, name, cache, fails):
    """Have a function of os call ``fails`` with the file of samples, and what it was called with, before it does its work."""
    real, fd = getattr(os, name), cache._folder.samples

    def called(at, *arguments):
        result = fails(real, at, *arguments) if at == fd else None
        return real(at, *arguments) if result is None else result

    monkeypatch.setattr(os, name, called)


def after(number, act):
    """Return a function that calls ``act`` with its arguments from its call ``number`` on."""
    calls = []

    def fails(*arguments):
        calls.append(1)
        if len(calls) > number:
            act(*arguments)

    return fails


def error(code):
    """Return a function that raises an error of the kernel."""

    def raises(*_):
        raise OSError(code, os.strerror(code))

    return raises


def behind(kind, folder, **options):
    """Return a `CachedDataset` that keeps all samples on a disk."""
    structured = {"probe": 2} if kind == "rows" else {"probe": 0, "variable": True}
    codec = {"codec": "zstd"} if kind == "zstd" else {}
    options = {"disk": folder, "disk_limit": "1GB", "fingerprint": "1", "split": False} | structured | codec | options
    return CachedDataset(Samples(kind), 0, **options)


def epoch(dataset, kind):
    """Read all samples in batches, and demand that they are right."""
    for first in range(0, COUNT, 8):
        indices = list(range(first, first + 8))
        assert all(same(*pair) for pair in zip(dataset.__getitems__(indices), map(sample, [kind] * 8, indices), strict=True))
        dataset.disk_cache.flush()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_no_more_is_warned_of_once(tmp_path, kind, code, monkeypatch, warnings):
    with open_disk(kind, tmp_path) as cache:
        with monkeypatch.context() as broken:
            failing(broken, "pwritev", cache, after(20, error(code)))
            assert loaded(cache, kind) == list(range(COUNT))
            assert loaded(cache, kind) == list(range(20, COUNT))
            for first in (10, 40):
                indices = list(range(first, first + 20))
                found = cache.get_or_load_many(indices, lambda indices: [sample(kind, idx) for idx in indices])
                assert all(same(*pair) for pair in zip(found, map(sample, [kind] * 20, indices), strict=True))
        (warning,) = warnings()
        assert f"takes no more samples: {os.strerror(code)}. The others come from the dataset" in warning
        assert cache.stats().damaged == 0
    with open_disk(kind, tmp_path) as cache:
        assert loaded(cache, kind) == list(range(20, COUNT))
        assert loaded(cache, kind) == []


def half(real, at, parts, place):
    """Write the beginning of some parts."""
    return real(at, [b"".join(parts)[:100]], place)


@pytest.mark.parametrize("rest", [0, errno.ENOSPC])
def test_a_write_that_ends_early_is_not_a_sample(tmp_path, kind, rest, monkeypatch, warnings):
    with open_disk(kind, tmp_path) as cache:
        with monkeypatch.context() as broken:
            failing(broken, "pwritev", cache, half)
            failing(broken, "pwrite", cache, error(rest) if rest else lambda *_: 0)
            assert loaded(cache, kind)[10:] == list(range(10, COUNT))
        assert len(warnings()) == 1
        assert cache.stats().damaged == 0
    with open_disk(kind, tmp_path) as cache:
        assert len(loaded(cache, kind)) > COUNT // 2
        assert loaded(cache, kind) == []


@pytest.mark.parametrize("names", [["pwritev"], ["preadv", "pread", "pwritev", "pwrite", "posix_fadvise"]])
def test_a_dataset_goes_on_when_its_disk_takes_no_more_or_is_unplugged(tmp_path, kind, names, monkeypatch, warnings):
    with behind(kind, tmp_path) as dataset, monkeypatch.context() as broken:
        if len(names) > 1:
            epoch(dataset, kind)
        for name in names:
            failing(broken, name, dataset.disk_cache, error(errno.EIO))
        for _ in range(3):
            epoch(dataset, kind)
        assert len(warnings()) == 1
        assert dataset.disk_cache.stats().filled < COUNT
    for again in (False, True):
        with behind(kind, tmp_path) as dataset:  # it is there again
            epoch(dataset, kind)
            assert dataset.stats().disk.hits == COUNT or (names == ["pwritev"] and not again)


def test_a_limit_of_the_kernel_on_files_is_a_full_disk(tmp_path, kind):
    def limited():
        with open_disk(kind, tmp_path) as cache:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
            for _ in range(2):
                missed = loaded(cache, kind)
            assert 0 < len(missed) < COUNT

    assert in_child(limited) == 0
    with open_disk(kind, tmp_path) as cache:
        assert 0 < len(loaded(cache, kind)) < COUNT
        assert loaded(cache, kind) == []


def test_a_sample_that_cannot_be_read_is_written_again(tmp_path, kind, monkeypatch, warnings):
    rng = random.Random(30)
    with open_disk(kind, tmp_path) as cache:
        loaded(cache, kind)
        with monkeypatch.context() as broken:
            failing(broken, "preadv", cache, lambda *_: error(errno.EIO)() if rng.random() < 0.2 else None)
            missed = loaded(cache, kind)
        assert 0 < len(missed) < COUNT
        assert cache.stats().damaged == len(missed)
        assert loaded(cache, kind) == []
        assert ["has lost samples" in warning for warning in warnings()] == [True]
        failing(monkeypatch, "preadv", cache, lambda real, at, parts, *rest: real(at, [memoryview(parts[0])[:1000]], *rest))
        assert loaded(cache, kind) == []  # reads that end early are completed
        assert cache.stats().damaged == len(missed)


def read_damaged(number, cache, kind, log):
    logging.getLogger("stocache").addHandler(logging.FileHandler(log))
    loaded(cache, kind, random.Random(number).sample(range(COUNT), COUNT))


@pytest.mark.parametrize("start_method", ["fork"], indirect=True)
def test_all_processes_together_warn_once(tmp_path, filled, run_processes):
    with open_disk("rows", filled) as cache:
        put(filled, {"samples": bytes(len(contents(filled)["samples"]))})
        run_processes(2, read_damaged, cache, "rows", tmp_path / "log")
        assert loaded(cache, "rows") == []
    assert (tmp_path / "log").read_text().count("has lost samples") == 1


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_halfway(*arguments):
    half(*arguments)
    die()


def fill_and_die(kind, folder, opened, name, act):
    """Fill a disk cache, or one behind a dataset, and be killed at a write of the samples, or of the index."""
    with pytest.MonkeyPatch.context() as patch:
        with opened or behind(kind, folder) as cache:
            disk = cache if isinstance(cache, DiskCache) else cache.disk_cache
            if name == "index":
                file = disk._folder.index
                real, late = os.pwrite, after(10, die)
                patch.setattr(os, "pwrite", lambda at, *rest: (late() if at == file else None, real(at, *rest))[1])
            else:
                failing(patch, "pwritev", disk, after(3, act))
            for _ in range(2):
                loaded(cache, kind) if cache is disk else epoch(cache, kind)


@pytest.mark.parametrize("way", ["shared", "alone"])
@pytest.mark.parametrize(("name", "act"), [("samples", die), ("samples", die_halfway), ("index", die)])
def test_a_kill_at_any_write_leaves_no_wrong_sample(tmp_path, kind, way, name, act):
    with open_disk(kind, tmp_path) if way == "shared" else contextlib.nullcontext() as shared:
        assert in_child(fill_and_die, kind, tmp_path, shared, name, act) == signal.SIGKILL
        if shared:
            assert 0 < len(loaded(shared, kind)) < COUNT
            assert loaded(shared, kind) == []
    with open_disk(kind, tmp_path) as cache:
        missed = loaded(cache, kind)
        assert len(missed) < COUNT
        assert not shared or missed == []
        assert cache.stats().damaged == 0
    with open_disk(kind, tmp_path) as cache:
        assert loaded(cache, kind) == []


def test_a_folder_that_is_deleted_goes_on_where_it_is_open(tmp_path, kind, warnings):
    with open_disk(kind, tmp_path / "disk") as cache:
        loaded(cache, kind, range(30))
        shutil.rmtree(tmp_path / "disk")
        assert loaded(cache, kind) == list(range(30, COUNT))
        assert loaded(cache, kind) == []
        assert in_child(lambda: [loaded(cache, kind) == [] or os._exit(1)]) == 0
        with open_disk(kind, tmp_path / "disk") as other:  # a new one
            assert len(loaded(other, kind)) == COUNT
            assert loaded(cache, kind) == []
        assert warnings() == []
        assert loaded(cache, kind) == []
        assert cache.stats().damaged == 0
    with open_disk(kind, tmp_path / "disk") as cache:
        assert loaded(cache, kind) == []


def test_a_disk_that_hangs_does_not_write_into_other_files(tmp_path, monkeypatch):
    """After close, the numbers of its descriptors may be those of other files."""
    goes_on, hangs = threading.Event(), threading.Event()

    def hang(*_):
        hangs.set()
        assert goes_on.wait(60)

    dataset = behind("rows", tmp_path / "disk")
    dataset.disk_cache.flush()
    failing(monkeypatch, "pwritev", dataset.disk_cache, hang)
    monkeypatch.setattr(writer, "_LONGEST_S", 0.1)
    epoch(dataset, "rows")
    assert hangs.wait(60)
    dataset.close()
    others = [os.open(tmp_path / f"other {number}", os.O_RDWR | os.O_CREAT) for number in range(20)]
    goes_on.set()
    wait_until(lambda: not any("stocache writes" in thread.name for thread in threading.enumerate()))
    assert [os.fstat(other).st_size for other in others] == [0] * 20
    for other in others:
        os.close(other)
    with open_disk("rows", tmp_path / "disk") as cache:
        loaded(cache, "rows")


def test_samples_of_more_parts_than_one_call_takes(tmp_path):
    parts = {f"part {number}": torch.tensor([number]) for number in range(1500)}
    with DiskCache(tmp_path, "1GB", 3, structure=Structure.of(parts), fingerprint="1") as cache:
        for _ in range(2):
            assert same(cache.get_or_load(1, lambda idx: parts), parts)
        assert cache.stats().hits == 1
        assert not cache.has_rows(np.arange(3)).any()
