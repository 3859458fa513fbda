"""A disk that is damaged or fails, and processes that are killed: never a wrong sample, and one warning at most."""

import contextlib
import errno
import itertools
import json
import logging
import os
import random
import shutil
import signal
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from stocache import CachedDataset, DataLoader, DiskCache
from stocache.cache.disk.formats import Rows
from stocache.cache.disk.samples_file import DATA_OFFSET, index_bytes, room_of
from stocache.samples.record_decoder import Records
from stocache.samples.spec import Structure
from stocache.system import background
from stocache.system.platform import here, many_reads
from tests.support.disks import COUNT, KINDS, Samples, after_power_cut, contents, flip, loaded, open_disk, put, row, sample
from tests.support.equality import same
from tests.support.pairs import pairs
from tests.support.processes import in_child, wait_until


def entries(folder):
    return np.frombuffer(Path(folder, "index").read_bytes(), "<u8").reshape(-1, 2).astype(object)


def enter(folder, idx, at, nbytes):
    """Have the index say something else of a sample."""
    with open(folder / "index", "r+b") as file:
        file.seek(16 * idx)
        file.write(at.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))


@pytest.mark.parametrize(("flips", "rounds"), [(1, 8), (10, 2)])
def test_flipped_bits_are_misses_or_harmless(kind, filled, flips, rounds):
    rng = random.Random(26)
    files = contents(filled)
    found = 0
    for number in range(rounds):
        damaged = dict(files)
        for place in range(flips):
            name = ("samples", "index")[(number + place) % 2]
            damaged[name] = flip(rng, damaged[name])
        put(filled, damaged)
        with open_disk(kind, filled) as cache:
            missed = loaded(cache, kind)
            assert len(missed) <= 2 * flips
            assert cache.stats().damaged <= len(missed)
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind) == []
        found += len(missed)
    assert found > rounds // 2


def test_batches_have_no_row_that_is_damaged(filled):
    with open_disk("rows", filled) as cache:
        with open(filled / "samples", "r+b") as file:
            file.seek(int(entries(filled)[5][0]) + 100)
            file.write(b"\xff\xfe")
        items = [torch.zeros(8, 6001, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)]
        there = cache.fill(np.arange(8), np.arange(8), items).tolist()
        assert there == [0, 1, 2, 3, 4, 6, 7]
        assert all(torch.equal(items[0][idx], row(idx)[0]) and items[1][idx] == idx for idx in there)
        assert loaded(cache, "rows") == [5]


@pytest.mark.parametrize("seed", range(2))
def test_after_a_power_cut_what_is_not_there_is_loaded_and_written_again(kind, seed, tmp_path):
    rng = random.Random(seed)
    count, limit = 150, "1GB"
    if kind == "rows":  # no more room than the samples need
        limit = f"{index_bytes(count) + DATA_OFFSET + count * room_of(Rows(Structure.of(row(0))).nbytes)}B"
    for _ in range(3):
        before = contents(tmp_path) if (tmp_path / "index").exists() else {}
        with open_disk(kind, tmp_path, count, limit) as cache:
            loaded(cache, kind, rng.sample(range(count), 40))
            if rng.random() < 0.5:
                before = contents(tmp_path)
            loaded(cache, kind, rng.sample(range(count), 40))
        put(tmp_path, after_power_cut(rng, before, contents(tmp_path)))
        with open_disk(kind, tmp_path, count, limit) as cache:
            loaded(cache, kind, rng.sample(range(count), 60))
    for again in range(2):
        with open_disk(kind, tmp_path, count, limit) as cache:
            assert loaded(cache, kind) == [] or not again


def test_files_of_zeros_or_of_another_folder_hold_nothing(kind, filled, tmp_path):
    with open_disk(kind, tmp_path / "other", fingerprint="2") as cache:
        loaded(cache, kind)
    zeros = [{"samples": bytes(len(contents(filled)["samples"]))}, {"index": bytes(16 * COUNT)}, {"samples": b""}]
    for files in (*zeros, contents(tmp_path / "other")):
        put(filled, files)
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind) == list(range(COUNT))


WILD = [
    0, 1, 8, DATA_OFFSET - 8, DATA_OFFSET, DATA_OFFSET + 1, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8,
    (1 << 64) - 1,
]  # fmt: skip


def test_an_index_with_wild_numbers_is_a_miss_and_takes_no_memory(kind, filled):
    for number, at in enumerate(WILD):
        for nbytes in (WILD[number - 1], 8):
            enter(filled, 7, at, nbytes)
            with open_disk(kind, filled) as cache:
                assert loaded(cache, kind, [7]) == [7]
                assert len(loaded(cache, kind)) <= 1  # of another one, the room may be taken
                assert loaded(cache, kind) == []
    os.truncate(filled / "samples", 1 << 42)
    for nbytes in (1 << 31, 1 << 36, 1 << 41):
        enter(filled, 7, 1 << 30, nbytes)
        with open_disk(kind, filled) as cache:
            tracemalloc.start()
            assert loaded(cache, kind, [7]) == [7]
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
            tracemalloc.stop()


def test_entries_that_were_cut_or_have_the_place_of_another_harm_no_sample(kind, filled):
    files = contents(filled)
    enter(filled, 7, *map(int, entries(filled)[8]))
    for _ in range(2):
        with open_disk(kind, filled) as cache:
            missed = loaded(cache, kind)
            assert set(missed) <= {7, 8}
            assert loaded(cache, kind) == []
    assert missed == []
    put(filled, files)
    enter(filled, 50, *map(int, entries(filled)[7]))
    put(filled, {"index": (filled / "index").read_bytes()[: 16 * 50 + 9]})
    for missing in ([55, 56, 57, 58, 59], []):
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind, range(40)) == []
            assert loaded(cache, kind, range(55, 60)) == missing


class Named:
    """A class that only pickle can make."""

    def __reduce__(self):
        return Path("/tmp/no such path/made").mkdir, ()


def test_a_forged_record_under_the_right_checksum_runs_no_code_and_raises_nothing(tmp_path):
    with open_disk("records", tmp_path) as cache:
        loaded(cache, "records")
    key, at = int(json.loads((tmp_path / "cache.json").read_text())["key"], 16), 1 << 20
    good = b"".join(map(bytes, Records(True, None).encode({"made": Named()}, "sample")))
    for data in (good, good[: len(good) // 2], bytes(len(good)), good[::-1]):
        data += bytes(-len(data) & 7)
        enter(tmp_path, 7, at, len(data))
        with open(tmp_path / "samples", "r+b") as file:
            file.seek(at)
            file.write(data + xxhash.xxh3_64_intdigest(data, key + 7 & (1 << 64) - 1).to_bytes(8, "little"))
        with open_disk("records", tmp_path) as cache:
            assert loaded(cache, "records") == [7]


def failing(monkeypatch, name, cache, fails, file=None):
    """Have a function call ``fails`` with the file of samples, and what it was called with, before it does its work."""
    module = here if hasattr(here, name) else os
    real, fd = getattr(module, name), file or cache._folder.samples

    def called(at, *arguments):
        result = fails(real, at, *arguments) if at == fd else None
        return real(at, *arguments) if result is None else result

    monkeypatch.setattr(module, name, called)


def after(number, act):
    """Return a function that calls ``act`` with its arguments from its call ``number`` on."""
    calls = itertools.count()
    return lambda *arguments: act(*arguments) if next(calls) >= number else None


def error(code):
    """Return a function that raises an error of the kernel."""

    def raises(*_):
        raise OSError(code, os.strerror(code))

    return raises


def behind(kind, folder):
    """Return a `CachedDataset` that keeps all samples on a disk."""
    options = {"rows": {"probe": 2}, "zstd": {"codec": "zstd"}}.get(kind, {})
    options |= {} if kind == "rows" else {"probe": 0, "variable": True}
    return CachedDataset(Samples(kind), 0, disk=folder, disk_limit="1GB", fingerprint="1", split=False, **options)


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


@pytest.mark.parametrize("names", [["pwritev"], ["preadv", "pread", "pwritev", "pwrite", "posix_fadvise"]])
def test_a_dataset_goes_on_when_its_disk_takes_no_more_or_is_unplugged(tmp_path, kind, names, monkeypatch, warnings):
    with behind(kind, tmp_path) as dataset, monkeypatch.context() as broken:
        if len(names) > 1:
            epoch(dataset, kind)
        for name in names:
            failing(broken, name, dataset.disk_cache, error(errno.EIO))
        for _ in range(2):
            epoch(dataset, kind)
        assert len(warnings()) == 1
        assert dataset.disk_cache.stats().filled < COUNT
    for again in (False, True):
        with behind(kind, tmp_path) as dataset:  # it is there again
            epoch(dataset, kind)
            assert dataset.stats().disk.hits == COUNT or (names == ["pwritev"] and not again)


def test_samples_that_are_lost_or_cannot_be_read_are_written_again(kind, filled, monkeypatch, warnings):
    rng, files = random.Random(30), contents(filled)
    for lost in (True, False):
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind) == []
            with monkeypatch.context() as broken:
                if lost:
                    put(filled, {"samples": files["samples"][: len(files["samples"]) // 2]})
                else:
                    failing(broken, "preadv", cache, lambda *_: error(errno.EIO)() if rng.random() < 0.2 else None)
                missed = loaded(cache, kind)
            assert 0 < len(missed) < COUNT
            assert cache.stats().damaged == len(missed)
            assert loaded(cache, kind) == []
            assert ["has lost samples" in warning for warning in warnings()] == [True]
            assert contents(filled) == files
    with open_disk(kind, filled) as cache:
        failing(monkeypatch, "preadv", cache, lambda real, at, parts, *rest: real(at, [memoryview(parts[0])[:1000]], *rest))
        assert loaded(cache, kind) == []  # reads that end early are completed


@pytest.mark.linux
def test_rows_that_worker_threads_cannot_read_come_from_the_dataset(tmp_path, monkeypatch, warnings):
    rng, read, calls = random.Random(31), many_reads._Queue.read, []

    def failing_often(*arguments):
        calls.append(rng.random())
        return [-errno.EIO if rng.random() < 0.2 else result for result in read(*arguments)]

    with behind("rows", tmp_path) as dataset:
        epoch(dataset, "rows")
        loader = DataLoader(dataset, 8, num_workers=2, worker_method="thread", persistent_workers=True)
        for broken in (True, False):
            with monkeypatch.context() as patch:
                if broken:
                    patch.setattr(many_reads._Queue, "read", failing_often)
                pixels, numbers = map(torch.cat, zip(*loader, strict=True))
                dataset.disk_cache.flush()
            assert same((pixels, numbers), (torch.stack([row(idx)[0] for idx in range(COUNT)]), torch.arange(COUNT)))
        assert calls
        assert 0 < dataset.disk_cache.stats().damaged < COUNT
        assert dataset.stats().disk.filled == COUNT
        assert ["has lost samples" in warning for warning in warnings()] == [True]


def read_damaged(number, cache, log):
    logging.getLogger("stocache").addHandler(logging.FileHandler(log))
    loaded(cache, "rows", random.Random(number).sample(range(COUNT), COUNT))


@pytest.mark.linux
@pytest.mark.parametrize("start_method", ["fork"], indirect=True)
def test_all_processes_together_warn_once(tmp_path, filled, run_processes):
    with open_disk("rows", filled) as cache:
        put(filled, {"samples": bytes(len(contents(filled)["samples"]))})
        run_processes(2, read_damaged, cache, tmp_path / "log")
        assert loaded(cache, "rows") == []
    assert (tmp_path / "log").read_text().count("has lost samples") == 1


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def fill_and_die(kind, folder, opened, name, act):
    """Fill a disk cache, which may be open already, and be killed at a write of the samples, or of the index."""
    with pytest.MonkeyPatch.context() as patch, opened or open_disk(kind, folder) as cache:
        if name == "index":
            failing(patch, "pwrite", cache, after(10, act), cache._folder.index)
        else:
            failing(patch, "pwritev", cache, after(3, act))
        loaded(cache, kind)


KILLS = {"before": ("samples", die), "within": ("samples", lambda *call: die(half(*call))), "index": ("index", die)}


@pytest.mark.linux
@pytest.mark.parametrize(("kind", "way", "kill"), [*pairs(KINDS, ["shared", "alone"], [*KILLS])], indirect=["kind"])
def test_a_kill_at_any_write_leaves_no_wrong_sample(tmp_path, kind, way, kill):
    name, act = KILLS[kill]
    with open_disk(kind, tmp_path) if way == "shared" else contextlib.nullcontext() as shared:
        assert in_child(fill_and_die, kind, tmp_path, shared, name, act) == signal.SIGKILL
        if shared:
            assert 0 < len(loaded(shared, kind)) < COUNT
            assert loaded(shared, kind) == []
    with open_disk(kind, tmp_path) as cache:
        assert len(loaded(cache, kind)) < (1 if shared else COUNT)
        assert cache.stats().damaged == 0


def test_a_folder_that_is_deleted_goes_on_where_it_is_open(tmp_path, kind, warnings):
    with open_disk(kind, tmp_path / "disk") as cache:
        loaded(cache, kind, range(30))
        shutil.rmtree(tmp_path / "disk")
        assert loaded(cache, kind) == list(range(30, COUNT))
        assert loaded(cache, kind) == []
        assert in_child(lambda: [loaded(cache, kind) == [] or os._exit(1)]) == 0
        with open_disk(kind, tmp_path / "disk") as other:  # a new one
            assert len(loaded(other, kind)) == COUNT
        assert loaded(cache, kind) == warnings() == []
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
    monkeypatch.setattr(background, "_LONGEST_S", 0.1)
    epoch(dataset, "rows")
    assert hangs.wait(60)
    dataset.close()
    others = [os.open(tmp_path / f"other {number}", os.O_RDWR | os.O_CREAT) for number in range(20)]
    goes_on.set()
    wait_until(lambda: not any("stocache writes" in thread.name for thread in threading.enumerate()))
    assert [os.fstat(other).st_size for other in others] == [0] * 20
    for other in others:
        os.close(other)


def test_samples_of_more_parts_than_one_call_takes(tmp_path):
    parts = {f"part {number}": torch.tensor([number]) for number in range(1500)}
    with DiskCache(tmp_path, "1GB", 3, structure=Structure.of(parts), fingerprint="1") as cache:
        for _ in range(2):
            assert same(cache.get_or_load(1, lambda idx: parts), parts)
        assert cache.stats().hits == 1
        assert not cache.has_rows(np.arange(3)).any()
