"""StreamLoader: its length and its life, its files, its cache and its ranks."""

import contextlib
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stocache import (
    CacheNameError,
    CacheOptions,
    ClosedError,
    CustomFormat,
    DamagedError,
    ReadOptions,
    StreamError,
    StreamLoader,
)
from tests.support.equality import same
from tests.support.processes import run_all, wait_until
from tests.support.texts import FORK, N, Watch, numbers, ours, parse, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")
quick = pytest.mark.quick

CONTEXT = multiprocessing.get_context("fork")


@quick
def test_the_length_is_known_after_a_first_pass_or_when_counted(numbered, capsys):
    for drop_last, batches in ((True, 42), ("batch", 43), (False, 44)):
        with StreamLoader(numbered, 10, 20, drop_last=drop_last) as loader:
            with pytest.raises(TypeError, match="known after its first epoch, or with count_rows=True"):
                len(loader)
            assert bool(loader)
            assert len(list(loader)) == len(loader) == batches
        for options in ({"count_rows": True}, {"shuffle": "buffers"}):
            read = ReadOptions(progress="count_rows" in options)
            with StreamLoader(numbered, 10, 20, drop_last=drop_last, read=read, **options) as loader:
                assert len(loader) == batches == len(list(loader))
            shown = capsys.readouterr().err
            assert ("counting rows" in shown, "epoch 0: " in shown) == (read.progress, read.progress)


@pytest.mark.parametrize("ways", [{}, {"num_workers": 2, "read": FORK}], ids=["threads", "workers"])
def test_a_loader_is_left_early_copied_and_closed_twice_and_leaves_no_file_open(numbered, ways):
    loader = StreamLoader(numbered, 10, 20, size_limit_gib=0.01, **ways)
    for count in (5, 3):
        with contextlib.closing(iter(loader)) as batches:
            assert len(list(itertools.islice(batches, count))) == count
    assert numbers(loader) == list(range(420))
    assert str(numbered) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    with pickle.loads(pickle.dumps(loader)) as copied:
        assert len(copied) == len(loader) == len(DataLoader(loader, batch_size=None)) == 42
        hits = copied.stats().cache.hits
        assert numbers(copied) == list(range(420))
        assert copied.stats().cache.hits == hits + 21
    loader.close()
    loader.close()
    with pytest.raises(ClosedError, match="the StreamLoader is closed"):
        next(iter(loader))
    with pytest.raises(ClosedError, match="the StreamLoader is closed"):
        len(loader)


@quick
def test_many_files_are_one_text(tmp_path):
    cuts = [0, 5, 6, 100, 300, N]
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        content = b"a\tb\tc\n" + rows(begin, end)
        (tmp_path / f"part{number}.tsv").write_bytes(content if number % 2 else content.rstrip(b"\n"))
        (tmp_path / f"part{number}.tsv.gz").write_bytes(gzip.compress(content))
    options = {"skip_header": 1, "drop_last": False, "columns": ["b", "a"], "label_columns": "c"}
    for pattern in ("part?.tsv", "part*.gz"):
        with StreamLoader(tmp_path / pattern, 10, 20, **options) as loader:
            assert numbers(loader) == numbers(loader) == list(range(N))
    with pytest.raises(StreamError, match=r"any byte, and .*part0\.tsv\.gz is gzip\. Use shuffle=True, with a window"):
        StreamLoader(tmp_path / "part*.gz", 10, 20, shuffle="buffers", **options)


def test_files_at_a_url():
    fsspec = pytest.importorskip("fsspec", reason="URLs need fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe({"/texts/a.tsv": rows(0, 100), "/texts/b.tsv.gz": gzip.compress(rows(100, N))})
    try:
        with StreamLoader("memory://texts/*", 10, 20, drop_last=False, size_limit_gib=0.01) as loader:
            assert numbers(loader) == numbers(loader) == list(range(N))
            memory.pipe("/texts/a.tsv", rows(0, 90))
            assert numbers(loader) == [*range(90), *range(100, N)]
    finally:
        memory.rm("/texts", recursive=True)


def keeping_time(path, content):
    facts = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


CHANGES = [
    lambda path: os.replace(shutil.copy(path.write_bytes(rows(1, N + 1)) and path, f"{path}.new"), path),
    lambda path: path.write_bytes(rows(0, N + 20)),
    lambda path: keeping_time(path, rows().replace(b"1\t", b"2\t", 1)),  # of the same size and time
    lambda path: os.utime(path, ns=(0, 0)),
]


@pytest.mark.parametrize("ways", [{}, {"num_workers": 2, "read": FORK}], ids=["threads", "workers"])
def test_a_file_that_changed_is_never_served_stale(numbered, ways):
    for change in CHANGES[: 1 if ways else None]:
        numbered.write_bytes(rows())
        with StreamLoader(numbered, 1, 20, drop_last=False, size_limit_gib=0.01, **ways) as loader:
            assert len(list(loader)) == len(list(loader)) == N
            change(numbered)
            with StreamLoader(numbered, 1, 20, drop_last=False) as fresh:
                assert same(list(loader), list(fresh))
                assert len(loader) == len(fresh)


@quick
def test_a_change_in_the_middle_of_an_epoch_is_an_error_also_for_what_is_cached(numbered):
    with StreamLoader(numbered, 10, 20, size_limit_gib=0.01) as loader:
        list(loader)
        batches, delivered = iter(loader), []
        next(batches)
        numbered.write_bytes(rows(1, N + 1))
        os.utime(numbered)
        with pytest.raises(DamagedError, match=r"numbered\.tsv has changed while it was being read\. The next epoch will"):
            delivered.extend(batches)
        assert len(delivered) < 30  # of 42: what was read ahead
        assert numbers(loader)[0] == 1


def test_the_files_of_a_glob_are_those_that_are_there_when_an_epoch_begins(tmp_path):
    (tmp_path / "a.tsv").write_bytes(rows(0, 40))
    with StreamLoader(tmp_path / "*.tsv", 10, 20, size_limit_gib=0.01) as loader:
        assert numbers(loader) == list(range(40))
        (tmp_path / "b.tsv").write_bytes(b"")
        for _ in range(2):
            with pytest.raises(StreamError, match=r"b\.tsv is empty"):
                list(loader)
        (tmp_path / "b.tsv").write_bytes(rows(40, 80))
        assert numbers(loader) == list(range(80))


@quick
@pytest.mark.parametrize("shuffle", [False, True, "buffers"])
def test_from_the_second_epoch_on_what_is_cached_is_neither_read_nor_parsed(numbered, monkeypatch, shuffle):
    watch = Watch(monkeypatch)
    options = {"shuffle": shuffle, "drop_last": False, "size_limit_gib": 0.01}
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse), **options) as loader:
        for _ in range(3):
            assert sorted(torch.cat(list(loader)).flatten().tolist()) == list(range(N))
            assert watch.rows == N
            watch.bytes, before = 0, watch.bytes
            assert before == 0 or before >= numbered.stat().st_size
        assert loader.stats().cache.hits == 2 * 22


@quick
def test_what_is_not_cached_is_found_by_its_bytes(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    form = CustomFormat(watch.parse)
    with StreamLoader(numbered, 10, 20, format=form, drop_last=False, size_limit_gib="4KB") as loader:
        list(loader)
        cached = loader.stats().cache.filled
        assert 3 < cached < 20
        assert loader.stats().cache.capacity_bytes <= 4000
        for _ in range(2):
            watch.rows = watch.bytes = 0
            assert torch.cat(list(loader)).flatten().tolist() == list(range(N))
            assert watch.rows == N - 20 * cached
            whole = len(rows(20 * cached))
            assert whole <= watch.bytes <= whole + 22 * 400  # and a bit beyond each buffer
    with StreamLoader(numbered, 10, 20, size_limit_gib=0) as loader:
        assert loader.stats().cache is None


def named_job(number, path, parsed):
    def parse(found):
        with parsed.get_lock():
            parsed.value += len(found)
        return np.array([[int(row.split("\t")[0])] for row in found])

    cache = CacheOptions(0.01, name="texts", persist=True)
    with StreamLoader(path, 10, 20, format=CustomFormat(parse), drop_last=False, cache=cache) as loader:
        for _ in range(2):
            assert torch.cat(list(loader)).flatten().tolist() == list(range(N))


@pytest.mark.usefixtures("_removed")
def test_jobs_share_a_named_cache_and_the_next_run_reads_nothing(numbered, monkeypatch):
    watch, parsed = Watch(monkeypatch), CONTEXT.Value("q", 0)
    run_all(CONTEXT, 3, named_job, numbered, parsed)
    named_job(0, numbered, parsed)
    assert parsed.value == N
    assert watch.bytes < len(rows()) / 4  # the first row, to know what the columns are


def test_it_reads_ahead_while_the_trainer_works(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse)) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: watch.rows >= 40)
        assert watch.rows < 200
        batches.close()


def rank_job(rank, path, world_size, folder, options):
    with StreamLoader(path, 10, 20, rank=rank, world_size=world_size, **options) as loader:
        epochs = [numbers(loader) for _ in range(2)]
        (folder / str(rank)).write_text(json.dumps([*epochs, len(loader)]))


def run_ranks(folder, content, world_size, **options):
    """The numbers of two epochs of each rank, and its length."""
    (path := folder / "rows.tsv").write_bytes(content)
    run_all(CONTEXT, world_size, rank_job, path, world_size, folder, options)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(world_size)]


@pytest.mark.usefixtures("_removed")
@pytest.mark.parametrize("compress", [gzip.compress, bytes])
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"size_limit_gib": 0.01, "shuffle": True}], ids=["workers", "cached"])
def test_ranks_read_every_row_once(tmp_path, compress, options):
    per_rank = run_ranks(tmp_path, compress(rows()), 3, drop_last=False, **options)
    for epoch in zip(*per_rank, strict=True):
        assert isinstance(epoch[0], int) or sorted(itertools.chain(*epoch)) == list(range(N))
    assert not ours()


COUNTED, BUFFERS = {"count_rows": True}, {"shuffle": "buffers", "size_limit_gib": 0.01}


@pytest.mark.usefixtures("_removed")
@pytest.mark.parametrize(
    ("drop_last", "compress", "options"),
    [(True, gzip.compress, COUNTED), ("batch", gzip.compress, COUNTED), ("batch", bytes, COUNTED)]
    + [(drop_last, bytes, BUFFERS) for drop_last in (True, "batch", False)],
)
def test_counted_ranks_and_those_of_random_buffers_deliver_equally_many_batches(tmp_path, drop_last, compress, options):
    content = rows() + b"".join(b"%d\t%d\t%d\n" % (n, n, n) for n in range(N, N + 300))  # shorter rows
    ranks = run_ranks(tmp_path, compress(content), 2, drop_last=drop_last, **options)
    for epoch in range(2):
        first, second = (rank[epoch] for rank in ranks)
        assert not set(first) & set(second)
        if drop_last:
            assert len(first) == len(second) == 10 * ranks[0][2] == 10 * ranks[1][2] > 200
        else:
            assert sorted(first + second) == list(range(N + 300))


def test_ranks_are_those_of_torchrun_unless_they_are_given(numbered, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options, first in (({}, 200), ({"rank": 0, "world_size": 1}, 0)):
        with StreamLoader(numbered, 10, 20, drop_last=False, **options) as loader:
            found = numbers(loader)
        assert found == list(range(found[0], N))
        assert first <= found[0] <= first + 50


def test_ranks_without_a_batch_and_caches_of_unknown_functions_are_refused_at_once(numbered, tmp_path):
    with pytest.raises(StreamError, match="with buffer_size=300, a rank of 2 has no batch"):
        StreamLoader(numbered, 10, 300, rank=0, world_size=2, count_rows=True)
    form = CustomFormat(parse)
    with pytest.raises(CacheNameError, match="with a name, and with a fingerprint"):
        StreamLoader(numbered, 10, 20, size_limit_gib=0.01, format=form, rank=0, world_size=2)
    with pytest.raises(CacheNameError, match="change the fingerprint with the function"):
        StreamLoader(numbered, 10, 20, format=form, cache=CacheOptions(0, disk=tmp_path / "disk", disk_limit="4MB"))
    StreamLoader(numbered, 10, 20, format=form, rank=0, world_size=2).close()
