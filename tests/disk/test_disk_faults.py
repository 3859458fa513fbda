"""A disk that fails while it is in use: training goes on from the dataset, with one warning, and no sample is wrong."""

import contextlib
import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import threading
from collections import Counter

import numpy as np
import pytest
import torch

import stocache
from stocache import CachedDataset, DiskCache
from stocache.disk import writer
from stocache.samples.spec import Structure
from tests.support import traces
from tests.support.disks import COUNT, KINDS, Samples, contents, loaded, mounted, open_disk, put, row, sample
from tests.support.equality import same
from tests.support.processes import in_child, run_all, wait_until


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def failing(monkeypatch, name, cache, fails):
    """Have a function of os call ``fails`` with the file of samples, and what it was called with, before it does its work."""
    real, fd = getattr(os, name), cache._folder.samples

    def called(at, *arguments):
        result = fails(real, at, *arguments) if at == fd else None
        return real(at, *arguments) if result is None else result

    monkeypatch.setattr(os, name, called)


def after(number, code):
    """Return a function that raises an error of the kernel from its call ``number`` on."""
    calls = []

    def fails(*_):
        calls.append(1)
        if len(calls) > number:
            raise OSError(code, os.strerror(code))

    return fails


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


# ---------------------------------------------------------------------------------------------------- writing fails


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENODEV])
def test_a_disk_that_takes_no_more_is_warned_of_once(tmp_path, kind, code, monkeypatch, warnings):
    with open_disk(kind, tmp_path) as cache:
        with monkeypatch.context() as broken:
            failing(broken, "pwritev", cache, after(20, code))
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


@pytest.mark.parametrize("rest", [0, errno.ENOSPC])
def test_a_write_that_ends_early_is_not_a_sample(tmp_path, kind, rest, monkeypatch, warnings):
    with open_disk(kind, tmp_path) as cache:
        with monkeypatch.context() as broken:
            failing(broken, "pwritev", cache, lambda real, at, parts, place: real(at, [b"".join(parts)[:100]], place))
            if rest == 0:
                broken.setattr(os, "pwrite", zero_for(cache._folder.samples))
            else:
                failing(broken, "pwrite", cache, after(0, rest))
            assert loaded(cache, kind)[10:] == list(range(10, COUNT))
        assert len(warnings()) == 1
        assert cache.stats().damaged == 0
    with open_disk(kind, tmp_path) as cache:
        assert len(loaded(cache, kind)) > COUNT // 2
        assert loaded(cache, kind) == []


def zero_for(fd):
    real = os.pwrite
    return lambda at, *arguments: 0 if at == fd else real(at, *arguments)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_dataset_goes_on_when_its_thread_cannot_write(tmp_path, kind, code, monkeypatch, warnings):
    with behind(kind, tmp_path) as dataset:
        failing(monkeypatch, "pwritev", dataset.disk_cache, after(0, code))
        for _ in range(3):
            epoch(dataset, kind)
            dataset.disk_cache.flush()
        assert sum("takes no more samples" in warning for warning in warnings()) == 1
        assert dataset.disk_cache.stats().filled < COUNT
    monkeypatch.undo()
    with behind(kind, tmp_path) as dataset:
        epoch(dataset, kind)
        dataset.disk_cache.flush()
        assert dataset.disk_cache.stats().filled == COUNT


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


@contextlib.contextmanager
def small_disk(folder, size):
    if not traces.private or os.geteuid() != 0:
        pytest.skip("this process may not mount")
    with mounted(folder, f"size={size},mode=700"):
        yield folder / "disk"


@pytest.mark.parametrize("kind", ["rows", "records"])
def test_a_disk_that_others_fill_meanwhile(tmp_path, kind, warnings):
    with small_disk(tmp_path, "400k") as folder:
        with open_disk(kind, folder, limit="300kB") as cache:
            assert len(loaded(cache, kind, range(10))) == 10
            warnings()
            with contextlib.suppress(OSError), open(tmp_path / "others", "wb", buffering=0) as file:
                for _ in range(100):
                    file.write(bytes(4096))
            missed = loaded(cache, kind)
            assert len(missed) > 20
            assert loaded(cache, kind) == missed
            (warning,) = warnings()
            assert "takes no more samples: No space left on device" in warning
        (tmp_path / "others").unlink()
        with open_disk(kind, folder, limit="300kB") as cache:
            assert loaded(cache, kind) == missed
        del cache


@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_a_disk_of_a_few_megabytes(tmp_path, workers, warnings):
    with small_disk(tmp_path, "200k") as folder:
        dataset = behind("rows", folder)
        assert any("disk_limit=1GB is more than" in warning for warning in warnings())
        for _ in range(3):
            loader = stocache.DataLoader(dataset, 8, shuffle=True, num_workers=workers)
            seen = Counter()
            for images, numbers in loader:
                seen.update(numbers.tolist())
                for image, number in zip(images, numbers.tolist(), strict=True):
                    assert torch.equal(image, row(number)[0])
            assert seen == Counter(range(COUNT))
        assert len(warnings()) <= 1
        assert dataset.disk_cache.stats().filled in (30, 31)
        dataset.close()
        del loader, dataset


# ---------------------------------------------------------------------------------------------------- reading fails


def test_a_sample_that_cannot_be_read_is_written_again(tmp_path, kind, monkeypatch, warnings):
    rng = random.Random(30)
    with open_disk(kind, tmp_path) as cache:
        loaded(cache, kind)
        with monkeypatch.context() as broken:
            failing(broken, "preadv", cache, lambda *_: after(0, errno.EIO)() if rng.random() < 0.2 else None)
            missed = loaded(cache, kind)
        assert 0 < len(missed) < COUNT
        assert cache.stats().damaged == len(missed)
        assert loaded(cache, kind) == []
    assert ["has lost samples" in warning for warning in warnings()] == [True]


def test_reads_that_end_early_are_completed(tmp_path, kind, monkeypatch):
    with open_disk(kind, tmp_path) as cache:
        loaded(cache, kind)
        failing(monkeypatch, "preadv", cache, lambda real, at, parts, *rest: real(at, [memoryview(parts[0])[:1000]], *rest))
        assert loaded(cache, kind) == []
        assert cache.stats().damaged == 0


def test_a_disk_that_is_unplugged(tmp_path, kind, monkeypatch, warnings):
    with behind(kind, tmp_path) as dataset:
        epoch(dataset, kind)
        dataset.disk_cache.flush()
        for name in ("preadv", "pread", "pwritev", "pwrite", "posix_fadvise"):
            failing(monkeypatch, name, dataset.disk_cache, after(0, errno.EIO))
        for _ in range(3):
            epoch(dataset, kind)
            dataset.disk_cache.flush()
        assert len(warnings()) == 1
    monkeypatch.undo()
    with behind(kind, tmp_path) as dataset:  # it is there again
        epoch(dataset, kind)
        assert dataset.stats().disk.hits == COUNT


def read_damaged(number, cache, kind, log):
    handler = logging.FileHandler(log)
    logging.getLogger("stocache").addHandler(handler)
    loaded(cache, kind, random.Random(number).sample(range(COUNT), COUNT))


def test_all_processes_together_warn_once(tmp_path, kind, start_method):
    context = multiprocessing.get_context(start_method)
    with open_disk(kind, tmp_path / "disk") as cache:
        loaded(cache, kind)
        put(tmp_path / "disk", {"samples": bytes(len(contents(tmp_path / "disk")["samples"]))})
        run_all(context, 2, read_damaged, cache, kind, tmp_path / "log")
        assert loaded(cache, kind) == []
    assert (tmp_path / "log").read_text().count("has lost samples") == 1


# ---------------------------------------------------------------------------------------------------- deleted under way


def read_without_folder(number, cache, kind):
    assert loaded(cache, kind) == list(range(COUNT))
    assert loaded(cache, kind) == list(range(COUNT))


def test_a_folder_that_is_deleted_goes_on_where_it_is_open(tmp_path, kind, warnings, capfd):
    with open_disk(kind, tmp_path / "disk") as cache:
        loaded(cache, kind, range(30))
        shutil.rmtree(tmp_path / "disk")
        assert loaded(cache, kind) == list(range(30, COUNT))
        assert loaded(cache, kind) == []
        assert in_child(lambda: [loaded(cache, kind) == [] or os._exit(1)]) == 0
        with open_disk(kind, tmp_path / "disk") as other:  # a new one
            assert len(loaded(other, kind)) == COUNT
            assert loaded(cache, kind) == []
        run_all(multiprocessing.get_context("spawn"), 2, read_without_folder, cache, kind)
        assert loaded(cache, kind) == []
        assert cache.stats().damaged == 0
    assert warnings() == []
    assert capfd.readouterr().err.count("is not used in process") == 1
    with open_disk(kind, tmp_path / "disk") as cache:
        assert loaded(cache, kind) == []


# ---------------------------------------------------------------------------------------------------- closing


def test_a_disk_that_hangs_does_not_write_into_other_files(tmp_path, monkeypatch):
    """After close, the numbers of its descriptors may be those of other files."""
    goes_on, hangs = threading.Event(), threading.Event()

    def hang(*_):
        hangs.set()
        assert goes_on.wait(20)

    dataset = behind("rows", tmp_path / "disk")
    dataset.disk_cache.flush()
    failing(monkeypatch, "pwritev", dataset.disk_cache, hang)
    monkeypatch.setattr(writer, "_LONGEST_S", 0.1)
    epoch(dataset, "rows")
    assert hangs.wait(20)
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
