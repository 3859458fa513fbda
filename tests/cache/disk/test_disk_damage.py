"""A disk that is damaged or fails, and processes that are killed: never a wrong sample, and one warning at most."""

import contextlib
import errno
import functools
import itertools
import json
import os
import random
import signal
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from benchmark.disk_faults import cut
from stocache import CachedDataset
from stocache.cache.disk.samples_file import DATA_OFFSET
from stocache.samples.record_decoder import Records
from stocache.system import background, limits
from stocache.system.platform import here
from tests.support.disks import COUNT, KINDS, Samples, contents, flip, loaded, open_disk, put, row, sample
from tests.support.equality import same
from tests.support.pairs import pairs
from tests.support.processes import in_child, wait_until


def entry(at, nbytes):
    return at.to_bytes(8, "little") + nbytes.to_bytes(8, "little")


def enter(folder, idx, at, nbytes):
    """Have the index say something else of a sample."""
    with open(folder / "index", "r+b") as file:
        file.seek(16 * idx)
        file.write(entry(at, nbytes))


WILD = [0, 1, 8, DATA_OFFSET - 8, DATA_OFFSET, DATA_OFFSET + 1, 1 << 31, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]


def damages(rng, other, samples, index):
    """Yield files that are damaged, which samples have to be missing then, and how many may be."""
    for flips in (1, 1, 1, 1, 10):
        for name, data in (("samples", samples), ("index", index)):
            yield {name: functools.reduce(lambda data, _: flip(rng, data), range(flips), data)}, set(), 2 * flips
    for files in ({"samples": bytes(len(samples))}, {"index": bytes(len(index))}, {"samples": b""}, other):
        yield files, {*range(COUNT)}, COUNT
    for at, nbytes in itertools.chain(zip(WILD, WILD[1:] + WILD[:1], strict=True), itertools.product(WILD[::3], [8])):
        yield {"index": index[: 16 * 7] + entry(at, nbytes) + index[16 * 8 :]}, {7}, 2  # a neighbour's room may be taken
    yield {"index": index[: 16 * 7] + index[16 * 8 : 16 * 9] + index[16 * 8 :]}, set(), 2  # a neighbour's place
    yield {"index": index[: 16 * 50 + 9]}, {*range(51, COUNT)}, COUNT - 50


def test_what_is_damaged_or_of_another_folder_is_a_miss_and_is_written_again(kind, filled, tmp_path):
    with open_disk(kind, tmp_path / "other", fingerprint="2") as cache:
        loaded(cache, kind)
    files, missing = contents(filled), 0
    for damaged, lost, most in damages(random.Random(26), contents(tmp_path / "other"), **files):
        put(filled, files | damaged)
        with open_disk(kind, filled) as cache:
            missed = loaded(cache, kind)
            assert lost <= {*missed}
            assert cache.stats().damaged <= len(missed) <= most
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind) == []
        missing += len(missed)
    assert missing > 4 * COUNT + len(WILD)


def test_an_index_with_wild_numbers_takes_no_memory(kind, filled):
    os.truncate(filled / "samples", 1 << 42)
    for nbytes in (1 << 31, 1 << 36, 1 << 41):
        enter(filled, 7, 1 << 30, nbytes)
        with open_disk(kind, filled) as cache:
            tracemalloc.start()
            assert loaded(cache, kind, [7]) == [7]
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
            tracemalloc.stop()


def test_batches_have_no_row_that_is_damaged(filled):
    with open_disk("rows", filled) as cache:
        with open(filled / "samples", "r+b") as file:
            file.seek(int.from_bytes((filled / "index").read_bytes()[16 * 5 : 16 * 5 + 8], "little") + 100)
            file.write(b"\xff\xfe")
        items = [torch.zeros(8, 6001, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)]
        there = cache.fill(np.arange(8), np.arange(8), items).tolist()
        assert there == [0, 1, 2, 3, 4, 6, 7]
        assert all(torch.equal(items[0][idx], row(idx)[0]) and items[1][idx] == idx for idx in there)
        assert loaded(cache, "rows") == [5]


@pytest.mark.parametrize("seed", range(2))
def test_after_a_power_cut_what_is_not_there_is_loaded_and_written_again(kind, seed):
    cut(kind, seed)


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
        batch = dataset.__getitems__(list(range(first, first + 8)))
        assert all(same(value, sample(kind, idx)) for idx, value in enumerate(batch, first))
        dataset.disk_cache.flush()


def half(real, at, parts, place):
    """Write the beginning of some parts."""
    return real(at, [b"".join(parts)[:100]], place)


FULL, BROKEN = error(errno.ENOSPC), error(errno.EIO)


@pytest.mark.linux
@pytest.mark.parametrize(("first", "rest", "problem"), [
    (BROKEN, BROKEN, errno.EIO), (half, FULL, errno.ENOSPC), (half, lambda *_: 0, errno.ENOSPC),
], ids=["an error", "no space for the rest", "nothing of the rest"])  # fmt: skip
def test_a_disk_that_takes_no_more_is_warned_of_once(tmp_path, kind, first, rest, problem, monkeypatch, warnings):
    with open_disk(kind, tmp_path) as cache:
        with monkeypatch.context() as broken:
            failing(broken, "pwritev", cache, after(20, first))
            failing(broken, "pwrite", cache, rest)
            assert loaded(cache, kind) == list(range(COUNT))
            assert loaded(cache, kind) == list(range(20, COUNT))
            found = cache.get_or_load_many(range(COUNT), lambda indices: [sample(kind, idx) for idx in indices])
            assert all(same(value, sample(kind, idx)) for idx, value in enumerate(found))
        (warning,) = warnings()
        assert f"takes no more samples: {os.strerror(problem)}. The others come from the dataset" in warning
        assert cache.stats().damaged == 0
    for missing in (list(range(20, COUNT)), []):  # what was written in part is not a sample
        with open_disk(kind, tmp_path) as cache:
            assert loaded(cache, kind) == missing


@pytest.mark.linux
def test_a_dataset_goes_on_when_its_disk_is_unplugged(tmp_path, kind, monkeypatch, warnings):
    with behind(kind, tmp_path) as dataset, monkeypatch.context() as broken:
        epoch(dataset, kind)
        for name in ("preadv", "pread", "pwritev", "pwrite", "posix_fadvise"):
            failing(broken, name, dataset.disk_cache, BROKEN)
        for _ in range(2):
            epoch(dataset, kind)
        assert len(warnings()) == 1
        assert dataset.disk_cache.stats().filled < COUNT
    with behind(kind, tmp_path) as dataset:  # it is there again
        epoch(dataset, kind)
        assert dataset.stats().disk.hits == COUNT


@pytest.mark.parametrize("lost", [True, False])
def test_samples_that_are_lost_or_cannot_be_read_are_written_again(kind, filled, lost, monkeypatch, warnings):
    rng, files = random.Random(30), contents(filled)
    with open_disk(kind, filled) as cache:
        with monkeypatch.context() as broken:
            if lost:
                put(filled, {"samples": files["samples"][: len(files["samples"]) // 2]})
            else:
                failing(broken, "preadv", cache, lambda *_: BROKEN() if rng.random() < 0.2 else None)
            missed = loaded(cache, kind)
        assert 0 < len(missed) == cache.stats().damaged < COUNT
        assert loaded(cache, kind) == []
        assert ["has lost samples" in warning for warning in warnings()] == [True]
        assert contents(filled) == files


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


KILLS = {"before": ("pwritev", die), "within": ("pwritev", lambda *call: die(half(*call))), "index": ("pwrite", die)}


@pytest.mark.linux
@pytest.mark.parametrize(("kind", "way", "kill"), [*pairs(KINDS, ["shared", "alone"], [*KILLS])], indirect=["kind"])
def test_a_kill_at_any_write_leaves_no_wrong_sample(tmp_path, kind, way, kill):
    def fill_and_die():
        name, act = KILLS[kill]
        with pytest.MonkeyPatch.context() as patch, shared or open_disk(kind, tmp_path) as cache:
            failing(patch, name, cache, after(5, act), cache._folder.index if kill == "index" else None)
            loaded(cache, kind)

    with open_disk(kind, tmp_path) if way == "shared" else contextlib.nullcontext() as shared:
        assert in_child(fill_and_die) == signal.SIGKILL
        if shared:
            assert 0 < len(loaded(shared, kind)) < COUNT
            assert loaded(shared, kind) == []
    with open_disk(kind, tmp_path) as cache:
        assert len(loaded(cache, kind)) < (1 if shared else COUNT)
        assert cache.stats().damaged == 0
    key = json.loads((tmp_path / "cache.json").read_text())["key"]
    assert not list(Path(limits.SHM_DIR).rglob(f"disk.{key}"))  # what killed processes leave in shared memory goes, too


def test_a_disk_that_hangs_does_not_write_into_other_files(tmp_path, monkeypatch):
    """After close, the numbers of its descriptors may belong to other files."""
    goes_on, hangs = threading.Event(), threading.Event()

    def hang(*_):
        hangs.set()
        assert goes_on.wait(60)

    cache = open_disk("rows", tmp_path / "disk")
    failing(monkeypatch, "pwritev", cache, hang)
    monkeypatch.setattr(background, "_LONGEST_S", 0.1)
    cache.serve(lambda missing: [row(idx) for idx in missing], lambda idx: False, [5])
    assert hangs.wait(60)
    cache.close()
    others = [open(tmp_path / f"other {number}", "w+b", buffering=0) for number in range(20)]  # noqa: SIM115
    goes_on.set()
    wait_until(lambda: not any("stocache writes" in thread.name for thread in threading.enumerate()))
    for other in others:
        assert other.read() == b""
        other.close()
