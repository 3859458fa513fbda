"""StreamLoader: every row once, in an order that follows from seed and epoch alone, whoever parses and whatever is cached."""

import bz2
import contextlib
import functools
import gc
import gzip
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import zstandard
from torch.utils.data import DataLoader

import stocache
from stocache import ClosedError, DamagedError, LimitError, StateError, StreamError, StreamLoader, shuffle_quality
from stocache.cli import listing
from stocache.shm import named
from stocache.system import limits
from stocache.text import lines, open_file
from tests.support.processes import run_all

EMPLOYEES = """
-1 0.39 0 0 1 0.01 2; 1 0.59 1 0 0 0.02 0; -1 0.41 1 0 0 0.03 1; 1 0.50 0 1 0 0.04 1; 1 0.50 0 0 1 0.05 1
-1 0.36 1 0 0 0.06 1; 1 0.24 1 0 0 0.07 2; 1 0.27 0 1 0 0.08 2; 1 0.22 0 1 0 0.09 1; 1 0.63 0 1 0 0.10 0
1 0.34 1 0 0 0.11 1; -1 0.22 1 0 0 0.12 0; 1 0.35 0 0 1 0.13 2; -1 0.33 0 1 0 0.14 1; 1 0.45 0 1 0 0.15 1
1 0.42 0 1 0 0.16 1; -1 0.33 0 1 0 0.17 1; 1 0.25 0 0 1 0.18 1; -1 0.31 0 1 0 0.19 0; 1 0.27 1 0 0 0.20 2
1 0.48 1 0 0 0.21 1; -1 0.64 0 1 0 0.22 2; 1 0.61 0 1 0 0.23 0; 1 0.54 0 0 1 0.24 0; 1 0.29 1 0 0 0.25 0
1 0.50 0 0 1 0.26 1; 1 0.55 0 0 1 0.27 0; 1 0.40 1 0 0 0.28 0; 1 0.22 1 0 0 0.29 2; 1 0.68 0 1 0 0.30 0
-1 0.60 1 0 0 0.31 2; -1 0.34 0 0 1 0.32 1; -1 0.25 0 0 1 0.33 0; -1 0.31 0 1 0 0.34 1; 1 0.43 0 0 1 0.35 1
1 0.58 0 1 0 0.36 2; -1 0.55 0 1 0 0.37 2; -1 0.43 0 1 0 0.38 1; -1 0.21 1 0 0 0.39 0; -1 0.43 0 1 0 0.40 0
"""
N = 437  # rows of the file below

pytestmark = pytest.mark.filterwarnings("ignore:.*The old name goes:DeprecationWarning")  # most tests use flat arguments


@pytest.fixture
def employees(tmp_path):
    path = tmp_path / "employee_train_40.txt"
    path.write_text(EMPLOYEES.strip().replace("; ", "\n").replace(" ", "\t") + "\n")
    return path


@pytest.fixture
def numbered(tmp_path):
    """N rows, numbered, of lengths that vary."""
    path = tmp_path / "numbered.tsv"
    path.write_bytes(rows())
    return path


def rows(begin=0, end=N):
    return b"".join(b"%d\t%s\t%d\n" % (n, b"0" * (n * 7 % 13) + b"%d" % n, n) for n in range(begin, end))


def ours():
    """Paths of named caches that are not of another program, which may come and go at any moment."""
    return {cache.path for cache in listing.find() if cache.name.startswith(("rows-", "texts"))}


@pytest.fixture
def _removed():
    others = ours()
    yield
    for path in ours() - others:
        named.remove(path)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(f"/dev/shm/stocache-{os.getuid()}")


def numbers(loader):
    """The rows of an epoch by their numbers; checks that features and labels belong together."""
    found = []
    for x, y in loader:
        assert x.dtype == torch.float32
        assert torch.equal(x, torch.stack([y, y], 1).float())
        found += y.tolist()
    return found


# ---------------------------------------------------------------------------------------------------- the article


def test_the_demo_of_the_article_prints_its_items_in_order(employees, capsys, caplog):
    with StreamLoader(employees, 3, 12, shuffle=False) as loader:
        for epoch in range(4):
            print("\n == Epoch: " + str(epoch) + " ==")  # noqa: T201
            for b_idx, batch in enumerate(loader):
                print("epoch: " + str(epoch) + "   batch: " + str(b_idx))  # noqa: T201
                print(batch[0])  # noqa: T201
                print(batch[1])  # noqa: T201
        assert len(loader) == 12
    items = [[float(field) for field in line.split("\t")] for line in employees.read_text().splitlines()]
    wanted = ""
    for epoch in range(4):  # 36 items in three buffers; the last four fill none
        wanted += f"\n == Epoch: {epoch} ==\n"
        for b_idx in range(12):
            three = items[3 * b_idx : 3 * b_idx + 3]
            wanted += f"epoch: {epoch}   batch: {b_idx}\n{torch.tensor([item[:6] for item in three])}\n"
            wanted += f"{torch.tensor([int(item[6]) for item in three])}\n"
    assert capsys.readouterr().out == wanted
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "the last 4 of 40 rows do not fill a buffer of 12 and are left out of each epoch; drop_last='batch' leaves out only "
        "what does not fill a batch, drop_last=False nothing"
    ]


def test_shuffling_stays_inside_the_buffer_and_has_a_generator_of_its_own(employees):
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with StreamLoader(employees, 3, 12, shuffle=True) as loader:
        epochs = [torch.cat([x[:, 5] for x, _ in loader]) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    for epoch in epochs:
        for number, buffer in enumerate(epoch.split(12)):
            assert sorted(buffer.tolist()) == [torch.tensor(0.01 * n).item() for n in range(12 * number + 1, 12 * number + 13)]
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3


# ---------------------------------------------------------------------------------------------------- every row once


@pytest.mark.parametrize("buffer_size", [10, 40, 430, 440, 1000])
def test_what_is_left_out(numbered, buffer_size):
    whole, full = N - N % buffer_size, N - N % 10
    for drop_last, wanted in ((False, N), ("batch", full), (True, whole)):
        with StreamLoader(numbered, 10, buffer_size, drop_last=drop_last) as loader:
            if not wanted:
                with pytest.raises(StreamError, match=r"437 rows, buffer_size=.*drop_last=True leaves no batch"):
                    list(loader)
                continue
            batches = list(loader)
            assert torch.cat([y for _, y in batches]).tolist() == list(range(wanted))
            assert {len(y) for _, y in batches[:-1]} <= {10}
            assert len(batches) == len(loader)
            assert loader.stats().rows == (wanted if drop_last is True else N)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("shuffle", [True, "buffers"])
def test_orders_follow_from_seed_and_epoch(numbered, shuffle, window):
    def orders(**options):
        with StreamLoader(numbered, 10, 20, shuffle=shuffle, window=window, drop_last=False, **options) as loader:
            return [numbers(loader) for _ in range(3)]

    first = orders()
    assert all(sorted(order) == list(range(N)) for order in first)
    assert len(set(map(tuple, first))) == 3
    assert orders() == first
    assert orders(seed=1)[0] not in first
    with StreamLoader(numbered, 10, 20, shuffle=shuffle, window=window, drop_last=False) as loader:
        loader.set_epoch(2)
        assert numbers(loader) == first[2]
    with StreamLoader(numbered, 10, 20, shuffle=shuffle, window=window) as loader:  # in windows of so many buffers
        order = [n // 20 for n in numbers(loader)]
        windows = [set(order[start : start + 20 * window]) for start in range(0, len(order), 20 * window)]
        assert {len(buffers) for buffers in windows} == {window}
        assert (sorted(windows, key=min) == windows) == (shuffle is True)
    mixed = [shuffle_quality(np.array(order), 20, batch_size=10).same_block for order in first]
    assert all(share < 1.2 / window for share in mixed)


WAYS = [
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "spawn", "size_limit_gib": 0.1},
    {"num_workers": 2, "multiprocessing_context": "forkserver", "engine": "numpy"},
    {"size_limit_gib": 0.1},
    {"size_limit_gib": "6KB"},
    {"num_workers": 2, "multiprocessing_context": "fork", "size_limit_gib": "6KB"},
    {"engine": "numpy"},
]


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.sampled(2)
def test_the_order_is_the_same_whoever_parses_and_whatever_is_cached(numbered, ways):
    for shuffle, window, drop_last in [(False, 1, False), (True, 2, "batch"), ("buffers", 2, True)]:
        options = {"shuffle": shuffle, "window": window, "drop_last": drop_last}
        with StreamLoader(numbered, 10, 20, **options) as alone, StreamLoader(numbered, 10, 20, **options, **ways) as loader:
            for _ in range(3):
                assert numbers(loader) == numbers(alone)
            assert loader.stats().rows == alone.stats().rows
            if ways.get("multiprocessing_context") in ("spawn", "forkserver"):
                return  # once is enough of what takes seconds


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_in_a_dataloader_of_torch_each_row_comes_once(numbered, context):
    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False, size_limit_gib=0.1) as loader:
        torchs = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context=context)
        epochs = [numbers(torchs) for _ in range(2)]
        assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
        assert epochs[0] != epochs[1]
        assert loader.stats().cache.fill_fraction > 0
        if context == "forkserver":
            return  # which takes seconds
        loader.set_epoch(5)
        told = [numbers(torchs) for _ in range(2)]
        assert told[0] == told[1]
        assert told[0] not in epochs


@pytest.mark.parametrize("make", [DataLoader, stocache.DataLoader])
def test_persistent_workers_hear_of_epochs(numbered, make):
    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False) as loader:
        loaders = make(loader, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        torch.manual_seed(3)
        epochs = []
        for epoch in range(3):
            if make is stocache.DataLoader:
                loaders.set_epoch(epoch)
            epochs.append(numbers(loaders))
        assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 3
        del loaders


def test_torchs_seed_decides_in_its_dataloader(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True) as loader:
        epochs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            epochs.append(numbers(DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")))
    assert epochs[0] == epochs[1] != epochs[2]


def test_transforms_run_in_workers_and_get_whole_batches(numbered):
    with StreamLoader(numbered, 10, 20, transform=doubled, num_workers=2, multiprocessing_context="fork") as loader:
        for (x, pid), start in zip(loader, range(0, N, 10), strict=False):
            assert x[:, 0].tolist() == [2 * n for n in range(start, start + 10)]
            assert pid != os.getpid()
    with StreamLoader(numbered, 10, 20, transform=doubled) as loader:
        assert {pid for _, pid in loader} == {os.getpid()}


def doubled(batch):
    x, y = batch
    assert len(x) == len(y) == 10
    return x * 2, os.getpid()


def test_batches_are_the_users_to_write_to(numbered):
    for options in ({}, {"shuffle": True}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        with StreamLoader(numbered, 10, 20, size_limit_gib=0.1, **options) as loader:
            for _ in range(3):
                for x, y in loader:
                    assert torch.equal(x[:, 0].long(), y)
                    x.zero_()
                    y.zero_()


def test_kept_batches_stay_as_they_are(numbered):
    with StreamLoader(numbered, 10, 20, num_workers=2, multiprocessing_context="fork", drop_last=False) as loader:
        kept = [list(loader) for _ in range(3)]
    for epoch in kept:
        assert torch.cat([y for _, y in epoch]).tolist() == list(range(N))


# ---------------------------------------------------------------------------------------------------- where rows come from


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


def test_files_at_a_url():
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({"/texts/a.tsv": rows(0, 100), "/texts/b.tsv.gz": gzip.compress(rows(100, N))})
    try:
        with StreamLoader("memory://texts/*", 10, 20, drop_last=False, size_limit_gib=0.1) as loader:
            assert numbers(loader) == numbers(loader) == list(range(N))
            memory.pipe("/texts/a.tsv", rows(0, 90))
            assert numbers(loader) == [*range(90), *range(100, N)]
    finally:
        memory.rm("/texts", recursive=True)


def test_every_format_through_the_same_door(tmp_path):
    formats = {
        "csv": ({"delimiter": ","}, "{n},{n}.0,{n}\n"),
        "blank": ({"delimiter": None}, "  {n}   {n}\t{n} \n"),
        "fixed": ({"format": "fixed", "widths": [5, 6, 4]}, "{n:>5}{n:<6}{n:<4}\n"),
        "jsonl": ({"format": "jsonl"}, '{{"a": {n}, "b": {n}.0, "c": {n}}}\n'),
        "named": ({"format": "jsonl", "columns": ["b", "a"], "label_columns": "c"}, '{{"c": {n}, "a": {n}, "b": {n}}}\n'),
    }
    for name, (options, line) in formats.items():
        (tmp_path / name).write_text("".join(line.format(n=n) for n in range(N)))
        for engine in ("pyarrow", "numpy"):
            with StreamLoader(tmp_path / name, 10, 20, drop_last=False, engine=engine, **options) as loader:
                assert numbers(loader) == list(range(N)), name


def parse(found):
    numbers = [int(row.split("\t")[0]) for row in found]
    return {"tokens": torch.tensor([[n, n + 1, n + 2] for n in numbers]), "length": np.array([len(row) for row in found])}


@pytest.mark.parametrize("ways", [{}, {"num_workers": 2, "size_limit_gib": 0.1}], ids=str)
def test_a_parse_function_of_ones_own(numbered, ways):
    with StreamLoader(numbered, 10, 20, parse=parse, shuffle=True, drop_last=False, **ways) as loader:
        for _ in range(2):
            tokens = torch.cat([batch["tokens"] for batch in loader])
            assert sorted(tokens[:, 0].tolist()) == list(range(N))
            assert torch.equal(tokens[:, 2], tokens[:, 0] + 2)


def test_what_the_tensors_look_like(numbered):
    for label_columns, shape in ((-1, (10,)), ([0, 1], (10, 2)), ([2], (10, 1))):
        with StreamLoader(
            numbered, 10, 20, label_columns=label_columns, label_dtype=torch.int32, dtype=torch.float64
        ) as loader:
            x, y = next(iter(loader))
            assert (x.dtype, y.dtype, y.shape) == (torch.float64, torch.int32, shape)
            assert x.shape == (10, 3 - (shape[1] if len(shape) > 1 else 1))
    with StreamLoader(numbered, 10, 20, label_columns=None) as loader:
        assert next(iter(loader)).shape == (10, 3)


# ---------------------------------------------------------------------------------------------------- the cache


class Watch:
    """Counts rows that are parsed, and bytes that are read, in this process."""

    def __init__(self, monkeypatch):
        self.rows = self.bytes = 0
        read_at = open_file.OpenFile.read_at

        def reading(file, offset, nbytes):
            data = read_at(file, offset, nbytes)
            self.bytes += len(data)
            return data

        monkeypatch.setattr(open_file.OpenFile, "read_at", reading)
        monkeypatch.setattr(lines, "_HEAD", 64)

    def parse(self, found):
        self.rows += len(found)
        return np.array([[int(row.split("\t")[0])] for row in found])


@pytest.mark.parametrize("shuffle", [False, True, "buffers"])
def test_from_the_second_epoch_on_what_is_cached_is_neither_read_nor_parsed(numbered, monkeypatch, shuffle):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, parse=watch.parse, shuffle=shuffle, drop_last=False, size_limit_gib=0.1) as loader:
        for _ in range(3):
            assert sorted(torch.cat(list(loader)).flatten().tolist()) == list(range(N))
            assert watch.rows == N
            watch.bytes, before = 0, watch.bytes
            assert before == 0 or before >= numbered.stat().st_size
        assert loader.stats().cache.hits == 2 * 22


def test_what_is_not_cached_is_found_by_its_bytes(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, parse=watch.parse, drop_last=False, size_limit_gib="3KB") as loader:
        list(loader)
        cached = loader.stats().cache.filled
        assert 3 < cached < 20
        for _ in range(2):
            watch.rows = watch.bytes = 0
            assert torch.cat(list(loader)).flatten().tolist() == list(range(N))
            assert watch.rows == N - 20 * cached
            whole = len(rows(20 * cached))
            assert whole <= watch.bytes <= whole + 22 * 400  # and a bit beyond each buffer


def test_the_cache_stays_below_its_limit(numbered):
    with StreamLoader(numbered, 10, 20, size_limit_gib="4KB", drop_last=False) as loader:
        for _ in range(2):
            assert numbers(loader) == list(range(N))
        stats = loader.stats().cache
        assert 0 < stats.filled < 22
        assert stats.capacity_bytes <= 4000
    with StreamLoader(numbered, 10, 20, size_limit_gib=0) as loader:
        assert loader.stats().cache is None


CHANGES = {
    "appended": lambda path: path.write_bytes(rows(0, N + 20)),
    "replaced": lambda path: os.replace(shutil.copy(path.write_bytes(rows(1, N + 1)) and path, f"{path}.new"), path),
    "first line, same size and time": lambda path: keeping_time(path, rows().replace(b"1\t", b"2\t", 1)),
    "touched": lambda path: os.utime(path, ns=(0, 0)),
}


def keeping_time(path, content):
    facts = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("ways", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_never_served_stale(numbered, change, ways):
    with StreamLoader(numbered, 1, 20, drop_last=False, size_limit_gib=0.1, **ways) as loader:
        assert len(list(loader)) == len(list(loader)) == N
        CHANGES[change](numbered)
        with StreamLoader(numbered, 1, 20, drop_last=False) as fresh:
            for (x, y), (x_now, y_now) in zip(loader, fresh, strict=True):
                assert torch.equal(x, x_now)
                assert torch.equal(y, y_now)
            assert len(loader) == len(fresh)


def test_a_change_in_the_middle_of_an_epoch_is_an_error_also_for_what_is_cached(numbered):
    with StreamLoader(numbered, 10, 20, size_limit_gib=0.1) as loader:
        list(loader)
        batches = iter(loader)
        next(batches)
        keeping_time(numbered, rows(1, N + 1))
        os.utime(numbered)
        with pytest.raises(DamagedError, match=r"numbered\.tsv has changed while it was being read\. The next epoch will"):
            list(batches)
        assert numbers(loader)[0] == 1


def test_a_new_file_of_a_glob_is_seen_when_an_epoch_begins(tmp_path):
    (tmp_path / "a.tsv").write_bytes(rows(0, 40))
    with StreamLoader(tmp_path / "*.tsv", 10, 20, size_limit_gib=0.1) as loader:
        assert numbers(loader) == list(range(40))
        (tmp_path / "b.tsv").write_bytes(rows(40, 80))
        assert numbers(loader) == list(range(80))


def named_job(number, path, parsed):
    def parse(found):
        with parsed.get_lock():
            parsed.value += len(found)
        return np.array([[int(row.split("\t")[0])] for row in found])

    with StreamLoader(path, 10, 20, parse=parse, drop_last=False, size_limit_gib=0.1, name="texts", persist=True) as loader:
        for _ in range(2):
            assert torch.cat(list(loader)).flatten().tolist() == list(range(N))


@pytest.mark.usefixtures("_removed")
def test_jobs_share_a_named_cache_and_the_next_run_reads_nothing(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    parsed = multiprocessing.Value("q", 0)
    run_all(multiprocessing.get_context("fork"), 3, named_job, numbered, parsed)
    assert parsed.value == N
    parsed.value = 0
    run_all(multiprocessing.get_context("fork"), 1, named_job, numbered, parsed)
    assert parsed.value == 0
    named_job(0, numbered, parsed)
    assert watch.bytes < len(rows()) / 4  # the first row, to know what the columns are


@pytest.mark.usefixtures("_removed")
def test_a_cache_of_that_name_for_another_file_is_not_used(numbered, tmp_path):
    other = tmp_path / "other.tsv"
    other.write_bytes(rows(5, 105))
    options = {"size_limit_gib": 0.1, "name": "texts", "drop_last": False}
    with StreamLoader(numbered, 10, 20, **options) as loader:
        assert numbers(loader) == list(range(N))
        with pytest.raises(stocache.MismatchError, match="texts"):
            StreamLoader(other, 10, 20, **options)
    with StreamLoader(other, 10, 20, **options) as loader:
        assert numbers(loader) == list(range(5, 105))


# ---------------------------------------------------------------------------------------------------- ranks


def rank_job(rank, path, world_size, folder, options):
    with StreamLoader(path, 10, 20, rank=rank, world_size=world_size, **options) as loader:
        epochs = [numbers(loader) for _ in range(2)]
        expected = len(loader) if options.get("count") else None
    (folder / f"{rank}.json").write_text(json.dumps([epochs, expected]))


@pytest.mark.usefixtures("_removed")
@pytest.mark.parametrize("compression", ["plain", "gz"])
@pytest.mark.parametrize("options", [{}, {"size_limit_gib": 0.1, "shuffle": "buffers"}, {"num_workers": 2}], ids=str)
def test_ranks_read_every_row_once(tmp_path, options, compression):
    path = tmp_path / "rows.tsv"
    path.write_bytes(rows() if compression == "plain" else gzip.compress(rows()))
    if compression == "gz" and "shuffle" in options:
        options = options | {"shuffle": True}
    run_all(multiprocessing.get_context("fork"), 3, rank_job, path, 3, tmp_path, {"drop_last": False, **options})
    per_rank = [json.loads((tmp_path / f"{rank}.json").read_text())[0] for rank in range(3)]
    for epoch in range(2):
        assert sorted(n for epochs in per_rank for n in epochs[epoch]) == list(range(N))
    assert not ours()


@pytest.mark.parametrize("compression", ["plain", "gz"])
@pytest.mark.parametrize("drop_last", [True, "batch"])
def test_counted_ranks_deliver_equally_many_batches(tmp_path, drop_last, compression):
    path = tmp_path / "rows.tsv"
    content = rows() + b"".join(b"%d\t%d\t%d\n" % (n, n, n) for n in range(N, N + 300))  # shorter rows
    path.write_bytes(content if compression == "plain" else gzip.compress(content))
    run_all(
        multiprocessing.get_context("fork"), 2, rank_job, path, 2, tmp_path, {"drop_last": drop_last, "count": True}
    )  # fmt: skip
    (first, expected), (second, expected_too) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert len(first[0]) == len(second[0]) == len(first[1]) == 10 * expected
    assert expected == expected_too > 20
    assert not set(first[0]) & set(second[0])


def test_ranks_are_those_of_torchrun(numbered, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StreamLoader(numbered, 10, 20, drop_last=False) as loader:
        found = numbers(loader)
    assert 100 < len(found) < 300
    assert found[-1] == N - 1
    with StreamLoader(numbered, 10, 20, drop_last=False, rank=0, world_size=1) as loader:
        assert len(numbers(loader)) == N


# ---------------------------------------------------------------------------------------------------- resuming

RESUMED = [
    {},
    {"shuffle": True, "size_limit_gib": 0.1},
    {"shuffle": "buffers", "window": 2, "drop_last": False},
    {"shuffle": True, "num_workers": 2, "multiprocessing_context": "fork", "window": 3},
]


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_resumed_after_any_batch_it_delivers_the_rest_and_the_next_epoch(tmp_path, options):
    path = tmp_path / "rows.tsv"
    path.write_bytes(rows(0, 107))
    with StreamLoader(path, 10, 20, **options) as loader:
        epochs = [[y.tolist() for _, y in loader] for _ in range(3)]
        loader.set_epoch(1)
        states = [loader.state_dict()]
        states += [loader.state_dict() for _ in loader]
        states.append(loader.state_dict())
    assert len(states) == len(epochs[1]) + 2
    every = 1 if "num_workers" not in options else 3
    for delivered, state in list(enumerate(states))[::every]:
        state = json.loads(json.dumps(state))
        with StreamLoader(path, 10, 20, **options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            if delivered <= len(epochs[1]):
                assert [y.tolist() for _, y in loader] == epochs[1][delivered:]
            assert [y.tolist() for _, y in loader] == epochs[2]


def test_resuming_neither_reads_nor_parses_what_was_delivered(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, parse=watch.parse) as loader:
        for _ in itertools.islice(loader, 40):
            state = loader.state_dict()
    watch.rows = 0
    with StreamLoader(numbered, 10, 20, parse=watch.parse) as loader:
        loader.load_state_dict(state)
        watch.bytes = 0
        assert torch.cat(list(loader)).flatten().tolist() == list(range(400, 420))
        assert len(loader) == 42
    assert watch.rows <= 40
    assert watch.bytes < len(rows()) / 3


def test_another_number_of_workers_goes_on_where_one_stood(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True) as loader:
        whole = [y.tolist() for _, y in loader]
        loader.set_epoch(0)
        for _ in itertools.islice(loader, 17):
            state = loader.state_dict()
    with StreamLoader(numbered, 10, 20, shuffle=True, num_workers=2, multiprocessing_context="fork") as loader:
        loader.load_state_dict(state)
        assert [y.tolist() for _, y in loader] == whole[17:]


def test_states_that_do_not_belong(numbered, tmp_path):
    with StreamLoader(numbered, 10, 20) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for options in ({"seed": 1}, {"shuffle": True}, {"drop_last": False}, {"columns": [0]}, {"rank": 0, "world_size": 2}):
        with StreamLoader(numbered, 10, 20, **options) as loader:
            with pytest.raises(StateError, match="other files, or other arguments"):
                loader.load_state_dict(state)
    with StreamLoader(numbered, 10, 20) as loader:
        for wrong in (None, {}, {"version": 2}):
            with pytest.raises(StateError, match="is not a state of a StreamLoader"):
                loader.load_state_dict(wrong)
        with pytest.raises(StateError, match="reads states of version 2, and this state has version 1"):
            loader.load_state_dict({"version": 1, "identity": "", "epoch": 0, "key": None, "window": None, "batch": 0})
        loader.load_state_dict(state)
        numbered.write_bytes(rows(1, N))
        with pytest.raises(StateError, match="have changed since the state was taken"):
            list(loader)
    copied = tmp_path / "copied.tsv"
    copied.write_bytes(rows())
    with StreamLoader(copied, 10, 20) as loader:  # elsewhere, and at another time
        loader.load_state_dict(state)
        assert numbers(loader) == list(range(10, 420))


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_torchdatas_stateful_dataloader_resumes_it(numbered):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False) as loader:

        def make():
            return StatefulDataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")

        torch.manual_seed(1)
        first = make()
        came = []
        for _, y in first:
            came.append(y.tolist())
            if len(came) == 15:
                state = first.state_dict()
        second = make()
        second.load_state_dict(state)
        assert [y.tolist() for _, y in second] == came[15:]
        del first, second


# ---------------------------------------------------------------------------------------------------- its length


def test_the_length_is_known_after_a_first_pass_or_when_counted(numbered):
    for drop_last, batches in ((True, 42), ("batch", 43), (False, 44)):
        with StreamLoader(numbered, 10, 20, drop_last=drop_last) as loader:
            with pytest.raises(TypeError, match="known after its first epoch, or with count_rows=True"):
                len(loader)
            assert bool(loader)
            assert len(list(loader)) == len(loader) == batches
        for options in ({"count": True}, {"shuffle": "buffers"}):
            with StreamLoader(numbered, 10, 20, drop_last=drop_last, **options) as loader:
                assert len(loader) == batches
                assert len(list(loader)) == batches


def test_the_length_is_known_after_a_pass_of_workers(numbered):
    with StreamLoader(numbered, 10, 20, num_workers=2, multiprocessing_context="fork") as loader:
        assert len(list(loader)) == len(loader) == 42
        assert len(DataLoader(loader, batch_size=None)) == 42


# ---------------------------------------------------------------------------------------------------- bad input

GOOD = b"1\t1\t1\n2\t2\t2\n3\t3\t3\n"
BAD = {
    "ragged": (b"4\t4\n", r"line 4: '4\\t4': 2 fields; expected 3 fields split at '\\t'"),
    "long": (b"4\t4\t4\t4\n", r"line 4: '4\\t4\\t4\\t4': 4 fields; expected 3 fields"),
    "not a number": (b"4\tfour\t4\n", r"line 4: .*: column 1 is 'four', not a number; expected"),
    "missing": (b"4\t\t4\n", r"line 4: '4\\t\\t4': column 1 is missing"),
    "nan": (b"nan\t4\t4\n", r"line 4: .*: column 0 is missing"),
    "label": (b"4\t4\t4.5\n", r"line 4: .*: column 2 is '4.5', not int64"),
}


@pytest.mark.parametrize("engine", ["pyarrow", "numpy"])
@pytest.mark.parametrize("what", BAD)
def test_a_line_that_is_not_as_it_should_be_is_named(tmp_path, what, engine, caplog):
    line, message = BAD[what]
    path = tmp_path / "bad.tsv"
    path.write_bytes(GOOD + line + b"5\t5\t5\n\n# comment\n" + line)
    with StreamLoader(path, 2, 2, engine=engine) as loader:
        with pytest.raises(StreamError, match=r"bad\.tsv, " + message):
            list(loader)
    for ways in ({}, {"num_workers": 2, "multiprocessing_context": "fork", "size_limit_gib": 0.1}):
        caplog.clear()
        with StreamLoader(path, 2, 2, engine=engine, on_error="skip", drop_last=False, **ways) as loader:
            for epoch in range(2):
                assert numbers(loader) == [1, 2, 3, 5]
                assert loader.stats().skipped == 2 * (epoch + 1)
        messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [m for m in messages if "left out" in m and "bad.tsv, line 4" in m]
        assert messages.count("epoch 0: 2 of 6 lines were left out, and 0 good ones that then filled no batch") == 1


def test_workers_name_the_line_too(tmp_path):
    """And are gone then: nothing waits for the garbage collector."""
    path = tmp_path / "bad.tsv"
    path.write_bytes(GOOD * 20 + b"x\ty\tz\n")
    with StreamLoader(path, 2, 2, drop_last=False, num_workers=2, multiprocessing_context="fork") as loader:
        with pytest.raises(StreamError, match=r"bad\.tsv, line 61: .*column 0 is 'x', not a number"):
            list(loader)
        assert not multiprocessing.active_children()


def test_nan_may_be_kept(tmp_path):
    path = tmp_path / "nan.tsv"
    path.write_bytes(b"1\t\t1\nNA\t2\t2\n3\tnan\t3\n")
    for engine in ("pyarrow", "numpy"):
        with StreamLoader(path, 3, 3, nan="keep", engine=engine) as loader:
            ((x, y),) = loader
            assert torch.equal(x.isnan(), torch.tensor([[False, True], [True, False], [False, True]]))
            assert y.tolist() == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n", b"header\n"])
def test_files_without_data(tmp_path, content):
    path = tmp_path / "empty.tsv"
    path.write_bytes(content)
    with pytest.raises(StreamError, match=r"empty\.tsv(: no line holds data| is empty)"):
        with StreamLoader(path, 1, 1, skip_header=int(b"header" in content)) as loader:
            list(loader)
    full = tmp_path / "full.tsv"
    full.write_bytes(b"header\n" + GOOD if b"header" in content else GOOD)
    options = {"skip_header": int(b"header" in content)}
    if not content:
        with pytest.raises(StreamError, match=r"empty\.tsv is empty: a file of at least one line was expected"):
            StreamLoader([path, full], 1, 1, **options)
        options["on_error"] = "skip"
    with StreamLoader([path, full], 1, 1, **options) as loader:
        assert numbers(loader) == [1, 2, 3]


def test_where_nothing_is_left(tmp_path):
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"1\t2\t3\nx\ty\tz\n" + b"a\tb\tc\n" * 8)
    with StreamLoader(path, 2, 2, on_error="skip") as loader:
        with pytest.raises(
            StreamError, match=r"9 of 10 lines were left out, and the others fill no batch. The first: .*, line 2"
        ):
            list(loader)
    path.write_bytes(b"a\tb\tc\n" * 8)
    with StreamLoader(path, 2, 2, on_error="skip") as loader:
        with pytest.raises(StreamError, match="8 of 8 lines were left out"):
            list(loader)


def test_truncated_gzip(tmp_path, caplog):
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress(rows(0, 5000))[:-2000])
    for ways in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        with StreamLoader(path, 10, 20, **ways) as loader:
            with pytest.raises(DamagedError, match=r"cut\.tsv\.gz, line \d+: its gzip data is cut"):
                list(loader)
    with StreamLoader(path, 10, 20, drop_last=False, on_error="skip") as loader:
        found = numbers(loader)
        assert found == list(range(len(found)))
        assert 100 < len(found) < 5000
        assert loader.stats().skipped == 1
    assert "its gzip data is cut" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 3}, r"buffer_size=20 is not a multiple of batch_size=3\. Use for example 18"),
        ({"batch_size": 0}, "batch_size=0 is not an integer of at least 1"),
        ({"buffer_size": 2.5}, "buffer_size=2.5 is not an integer of at least 1"),
        ({"seed": -1}, "seed=-1 is not an integer of at least 0"),
        ({"num_workers": True}, "num_workers=True is not an integer"),
        ({"shuffle": "blocks"}, "shuffle='blocks' is unknown. Use False or True or 'buffers'"),
        ({"shuffle": 1}, "shuffle=1 is unknown"),
        ({"drop_last": "buffer"}, "drop_last='buffer' is unknown"),
        ({"nan": "drop"}, "nan='drop' is unknown. Use 'error' or 'keep'"),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown"),
        ({"format": "parquet"}, "format='parquet' is unknown"),
        ({"engine": "polars"}, "engine='polars' is unknown. Use 'auto' or 'pyarrow' or 'numpy'"),
        ({"delimiter": "||"}, r"delimiter='\|\|' is not a single ASCII character. Use CustomFormat"),
        ({"delimiter": ","}, r"numbered\.tsv: no column is left .* 1 fields split at ','.*delimiter='\\t' would make 3"),
        ({"columns": [3]}, r"there is no column 3\. .*numbered\.tsv: the first row has 3 fields split at '\\t'"),
        ({"columns": 1}, r"columns=1 is one column\. Give a list: columns=\[1\]"),
        ({"columns": ["a"]}, r"columns \['a', -1\] are named, but there is no header\. Pass skip_header=1"),
        ({"columns": ["a"], "skip_header": 1}, r"there is no column 'a'\. The header has \['0', '0', '0'\]"),
        ({"label_columns": 7}, "there is no column 7"),
        ({"format": "fixed"}, "widths are for format='fixed', which needs them"),
        ({"widths": [1, 2]}, "widths are for format='fixed'"),
        ({"format": "fixed", "widths": [0, 2]}, r"widths=\[0, 2\] must be numbers of bytes above 0"),
        ({"format": "jsonl"}, r"numbered\.tsv: the first row is not a JSON object: '0\\t0\\t0'"),
        ({"format": "jsonl", "parse": len}, "parse and format='jsonl' are two ways to parse"),
        ({"comments": ""}, "comments='' marks nothing"),
        ({"dtype": torch.complex64}, "dtype=torch.complex64 is not a dtype of real numbers"),
        ({"rank": 2, "world_size": 2}, "rank=2 is out of range for world_size=2"),
    ],
)
def test_arguments_that_make_no_sense(numbered, options, message):
    with pytest.raises(StreamError, match=message):
        StreamLoader(numbered, **{"batch_size": 10, "buffer_size": 20, **options})


def test_buffers_in_random_order_need_files_that_can_be_sought(tmp_path):
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(gzip.compress(rows()))
    with pytest.raises(StreamError, match=r"any byte, and .*rows\.tsv\.gz is gzip\. Use shuffle=True, with a window"):
        StreamLoader(path, 10, 20, shuffle="buffers")


def test_a_header_that_does_not_fit_the_rows(tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("a,b,c,d\n1,2,3\n")
    with pytest.raises(StreamError, match=r"wrong\.csv: the header has 4 names, the first row 3 fields"):
        StreamLoader(path, 1, 1, delimiter=",", skip_header=1, columns=["a", "b"], label_columns="c")


def test_a_header_that_nobody_spoke_of(tmp_path):
    path = tmp_path / "headed.csv"
    path.write_text("a,b\n1,2\n")
    with StreamLoader(path, 1, 1, delimiter=",") as loader:
        with pytest.raises(
            StreamError, match=r"line 1: 'a,b': column 0 is 'a', not a number; .*skip_header=1 leaves a header out"
        ):
            list(loader)


def test_persist_and_fingerprint_need_a_name(numbered):
    for options in ({"persist": True}, {"fingerprint": "v1"}):
        with pytest.raises(stocache.CacheNameError, match="are for caches with a name"):
            StreamLoader(numbered, 10, 20, size_limit_gib=1, **options)


# ---------------------------------------------------------------------------------------------------- life


def test_leaving_early_leaves_nothing(numbered):
    for ways in ({}, {"num_workers": 2, "multiprocessing_context": "fork"}):
        loader = StreamLoader(numbered, 10, 20, size_limit_gib=0.1, **ways)
        for _ in range(3):
            for _ in itertools.islice(loader, 5):
                pass
        assert len(numbers(loader)) == 420
        loader.close()
        loader.close()
        with pytest.raises(ClosedError, match="the StreamLoader is closed"):
            next(iter(loader))
        with pytest.raises(ClosedError, match="the StreamLoader is closed"):
            len(loader)


def test_an_epoch_that_is_over_leaves_no_file_open(numbered):
    with StreamLoader(numbered, 10, 20) as loader:
        for wanted in (None, 3):
            with contextlib.closing(iter(loader)) as batches:
                assert list(itertools.islice(batches, wanted))
            names = [
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.islink(f"/proc/self/fd/{fd}")
            ]
            assert str(numbered) not in names


def test_two_iterators_at_once_are_two_epochs(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True) as loader:
        one, two = [], []
        for (_, a), (_, b) in zip(loader, loader, strict=True):
            one += a.tolist()
            two += b.tolist()
        assert sorted(one) == sorted(two) == list(range(420))
        assert one != two


def test_with_workers_there_is_one_iterator_at_a_time(numbered):
    with StreamLoader(numbered, 10, 20, num_workers=2, multiprocessing_context="fork") as loader:
        first, second = iter(loader), iter(loader)
        assert next(first)[1].tolist() == next(second)[1].tolist() == list(range(10))
        with pytest.raises(StreamError, match="another iteration has begun"):
            list(first)
        assert torch.cat([y for _, y in second]).tolist() == list(range(10, 420))
        assert len(numbers(loader)) == 420


def test_it_is_copied_with_what_it_knows(numbered):
    with StreamLoader(numbered, 10, 20, size_limit_gib=0.1) as loader:
        assert len(numbers(loader)) == 420
        with pickle.loads(pickle.dumps(loader)) as copied:
            assert len(copied) == 42
            assert numbers(copied) == list(range(420))
            assert copied.stats().cache.hits == 21


def test_it_reads_ahead_while_the_trainer_works(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, parse=watch.parse) as loader:
        batches = iter(loader)
        next(batches)
        deadline = time.monotonic() + 10
        while watch.rows < 40 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 40 <= watch.rows < 200
        batches.close()


def test_a_progress_bar(numbered, capsys):
    with StreamLoader(numbered, 10, 20, progress=True, count_rows=True) as loader:
        list(loader)
    shown = capsys.readouterr().err
    assert "counting rows" in shown
    assert "epoch 0: " in shown
    assert "437" in shown
    with StreamLoader(numbered, 10, 20) as loader:
        list(loader)
    assert not capsys.readouterr().err


def test_without_shared_memory_it_goes_on(numbered, monkeypatch, caplog):
    monkeypatch.setattr(limits, "open_memfd", lambda: None)
    monkeypatch.setattr(limits, "SHM_DIR", "/nowhere")
    with StreamLoader(numbered, 10, 20, drop_last=False, size_limit_gib=0.1) as loader:
        for _ in range(2):
            assert numbers(loader) == list(range(N))
        assert len(loader) == 44
    assert "no shared memory" in caplog.text


# ---------------------------------------------------------------------------------------------------- found in review


@pytest.mark.parametrize("drop_last", [True, "batch"])
def test_ranks_of_random_buffers_deliver_equally_many_batches(numbered, drop_last):
    counts = []
    for rank in range(3):
        options = {"shuffle": "buffers", "drop_last": drop_last, "rank": rank, "world_size": 3}
        with StreamLoader(numbered, 5, 20, **options) as loader:
            counts += [len(list(loader)) for _ in range(4)] + [len(loader)]
    assert len(set(counts)) == 1


def test_a_rank_without_a_batch_is_told_at_once(numbered):
    with pytest.raises(StreamError, match="with buffer_size=300, a rank of 2 has no batch"):
        StreamLoader(numbered, 10, 300, rank=0, world_size=2, count_rows=True)
    for options in ({"rank": 1}, {"world_size": 2}):
        with pytest.raises(StreamError, match="=None is not an integer"):
            StreamLoader(numbered, 10, 20, **options)


def test_ranks_that_parse_share_a_cache_by_name_alone(numbered):
    options = {"parse": parse, "rank": 0, "world_size": 2}
    with pytest.raises(stocache.CacheNameError, match="with a name, and with a fingerprint"):
        StreamLoader(numbered, 10, 20, size_limit_gib=0.1, **options)
    StreamLoader(numbered, 10, 20, **options).close()


def test_good_rows_that_fill_no_batch_are_counted(tmp_path, caplog):
    path = tmp_path / "bad.tsv"
    path.write_bytes(rows(0, 20) + b"x\n" + rows(21, 40) + b"y\n" + rows(41, 60))
    for drop_last, delivered in ((True, 40), ("batch", 40), (False, 58)):
        with StreamLoader(path, 10, 20, on_error="skip", drop_last=drop_last) as loader:
            assert len(numbers(loader)) == delivered
            stats = loader.stats()
            assert (stats.rows, stats.skipped, stats.dropped) == (60, 2, 58 - delivered)
    assert "2 of 60 lines were left out, and 18 good ones that then filled no batch" in caplog.text


def test_what_fails_before_its_first_batch_is_resumed_there(numbered):
    def fail(batch):
        raise KeyError("by the user")

    with StreamLoader(numbered, 10, 20) as loader:
        states = [loader.state_dict() for _ in itertools.islice(loader, 7)]
    for state in (None, states[-1]):
        with StreamLoader(numbered, 10, 20, transform=fail) as loader:
            if state is not None:
                loader.load_state_dict(state)
            before = loader.state_dict()
            with pytest.raises(KeyError, match="by the user"):
                next(iter(loader))
            assert loader.state_dict() == before


def test_a_state_that_would_begin_inside_a_line_is_refused(tmp_path):
    path = tmp_path / "long.tsv"
    path.write_bytes(rows(0, 20_000))
    with StreamLoader(path, 10, 20) as loader:
        state = [loader.state_dict() for _ in itertools.islice(loader, 1001)][-1]
    content, at = path.read_bytes(), state["position"]["line"][1]
    path.write_bytes(content[: at - 3] + b"0\n1" + content[at:])
    with StreamLoader(path, 10, 20) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="no line begins where"):
            next(iter(loader))


def test_a_parse_function_returns_as_many_rows_as_lines(numbered):
    with StreamLoader(numbered, 10, 20, parse=lambda found: np.zeros((len(found) - 1, 2))) as loader:
        with pytest.raises(StreamError, match="arrays of"):
            list(loader)
    with StreamLoader(numbered, 10, 20, parse=functools.partial(parse)) as loader:  # any callable
        assert len(list(loader)) == 42

    def refuse(found):
        raise ValueError("not these")

    with StreamLoader(numbered, 10, 20, parse=refuse) as loader:
        with pytest.raises(StreamError, match=r"numbered\.tsv, line 1: '0\\t0\\t0': ValueError: not these"):
            list(loader)


@pytest.mark.slow
def test_a_torch_dataloader_says_that_there_is_nothing_and_follows_changes(numbered):
    with StreamLoader(numbered, 10, 440) as loader:
        with pytest.raises(StreamError, match="drop_last=True leaves no batch"):
            list(DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    gc.collect()  # of that loader, before children inherit it
    with StreamLoader(numbered, 10, 20, drop_last=False, size_limit_gib=0.1) as loader:
        torchs = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert len(numbers(torchs)) == N
        numbered.write_bytes(rows(3, N))
        for _ in range(2):
            assert sorted(numbers(torchs)) == list(range(3, N))
        gc.collect()


def test_a_file_that_was_bad_for_a_while_is_read_again_when_it_is_good(tmp_path):
    (tmp_path / "a.tsv").write_bytes(rows(0, 40))
    with StreamLoader(tmp_path / "*.tsv", 10, 20, size_limit_gib=0.1) as loader:
        assert numbers(loader) == list(range(40))
        (tmp_path / "b.tsv").write_bytes(b"")
        for _ in range(2):
            with pytest.raises(StreamError, match=r"b\.tsv is empty"):
                list(loader)
        (tmp_path / "b.tsv").unlink()
        assert numbers(loader) == list(range(40))


def test_every_buffer_of_short_rows_may_be_cached(tmp_path):
    path = tmp_path / "short.tsv"
    path.write_bytes(b"1\t1\n" * 20_000)
    with StreamLoader(path, 10, 100, size_limit_gib=0.1) as loader:
        list(loader)
        assert loader.stats().cache.filled == 200


def test_skipping_does_not_read_the_file_again_and_again(tmp_path, monkeypatch):
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"1\t1\nx\tx\n" * 2000)
    watch = Watch(monkeypatch)
    with StreamLoader(path, 2, 10, on_error="skip", drop_last=False) as loader:
        assert sum(len(y) for _, y in loader) == 2000
    assert watch.bytes < 60 * path.stat().st_size  # of which 50 are the last words of each buffer: it is small, rows are short


def test_pipes_and_arguments_at_the_edge(tmp_path, numbered):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StreamError, match="pipe is not a regular file, so it cannot be read twice"):
        StreamLoader(tmp_path / "pipe", 1, 1)
    for options, message in (
        ({"seed": 2**63}, "has more than 63 bits"),
        ({"label_columns": []}, "no column is left for the features, or the labels"),
        ({"columns": []}, "no column is left for the features, or the labels"),
    ):
        with pytest.raises(StreamError, match=message):
            StreamLoader(numbered, 10, 20, **options)
    with StreamLoader(numbered, 10, 20) as loader:
        for epoch in (-1, 1.5):
            with pytest.raises(StreamError, match="is not an integer of at least 0"):
                loader.set_epoch(epoch)


def test_names_of_columns_of_fixed_width(tmp_path):
    path = tmp_path / "fixed.txt"
    path.write_text("first   second  third\n" + "".join(f"{n:<8}{n:<8}{n:<5}\n" for n in range(40)))
    options = {"format": "fixed", "widths": [8, 8, 5], "skip_header": 1, "label_columns": "third"}
    with StreamLoader(path, 10, 20, columns=["second", "first"], **options) as loader:
        assert numbers(loader) == list(range(40))


def test_lines_of_delimiters_alone_are_rows_of_missing_values(tmp_path):
    path = tmp_path / "missing.tsv"
    path.write_bytes(b"1\t2\n\t\n \n3\t4\n")
    for engine in ("pyarrow", "numpy"):
        with StreamLoader(path, 3, 3, nan="keep", label_columns=None, engine=engine) as loader:
            (x,) = loader
            assert x.nan_to_num(-1).tolist() == [[1, 2], [-1, -1], [3, 4]]


def test_quoted_text_beside_numbers(tmp_path):
    path = tmp_path / "quoted.csv"
    path.write_text("".join(f'"row, {n}",{n},{n},{n}\n' for n in range(40)))
    for engine in ("pyarrow", "numpy"):
        with StreamLoader(path, 10, 20, delimiter=",", columns=[1, 2], engine=engine) as loader:
            assert numbers(loader) == list(range(40))


# ---------------------------------------------------------------------------------------------------- lines that are too long

READING = """
import json, sys
from stocache import StreamLoader

def ints(lines):
    import numpy
    return numpy.array([[int(field) for field in line.split(",")] for line in lines])

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

if __name__ == "__main__":
    before, found = peak(), []
    for options in json.loads(sys.argv[2]):
        if options.pop("parse", False):
            options["parse"] = ints
        rows, skipped, error = 0, None, None
        try:
            with StreamLoader(sys.argv[1], 2, 1000, delimiter=",", drop_last=False, **options) as loader:
                for batch in loader:
                    rows += len(batch if "parse" in options else batch[0])
                skipped = loader.stats().skipped
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found.append([rows, skipped, error])
    print(json.dumps([*found, (peak() - before) // 1024]))
"""


def read_in_a_child(path, *options):
    """Return rows, skipped lines and the error for each reading of a file, and the MiB of memory that they took at most."""
    command = [sys.executable, "-c", READING, str(path), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout)


def write_bomb(path, text, times, before=b"", after=b"\n"):
    """Write ``text`` so many times; compressed as the name of the file says."""
    open_one = {
        ".gz": functools.partial(gzip.open, compresslevel=1),
        ".bz2": functools.partial(bz2.open, compresslevel=1),
        ".zst": functools.partial(zstandard.open, cctx=zstandard.ZstdCompressor(level=1)),
        ".csv": open,
    }[path.suffix]
    with open_one(path, "wb") as file:
        file.write(b"1,2,0\n3,4,1\n" + before)
        for _ in range(times):
            file.write(text)
        file.write(after + b"5,6,2\n")
    return path


MIB = 1 << 20
BOMBS = {"row": b"x" * MIB, "blank": b" " * MIB, "comment": b"#" + b"x" * (MIB - 1), "numbers": b"12345678" * (MIB // 8)}


@pytest.mark.parametrize(
    ("content", "name", "mib"),
    [
        ("row", "a.zst", 600),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("blank", "a.zst", 600),
                ("comment", "a.zst", 600),
                ("numbers", "a.zst", 600),
                ("row", "a.csv", 300),
                ("row", "a.gz", 200),
                ("blank", "a.bz2", 100),
            ]
        ),
    ],
)
def test_a_line_that_is_too_long_is_refused_in_bounded_memory(tmp_path, content, name, mib):
    path = write_bomb(tmp_path / name, BOMBS[content], mib)
    refused, skipped, grown = read_in_a_child(path, {}, {"on_error": "skip", "max_line_bytes": "8MiB"})
    assert re.search(rf"StreamError: .*{name}, line 3: the line is longer than 16 MiB\. Raise max_line_bytes", refused[2])
    assert skipped == [3, 1, None]
    assert grown < 300


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"parse": True}, {"num_workers": 1}, {"skip_header": 3}, {"format": "jsonl"}], ids=str)
def test_long_lines_are_refused_however_they_would_be_read(tmp_path, options):
    path = write_bomb(tmp_path / "a.zst", b"x" * MIB, 600)
    if "format" in options:
        path = write_bomb(tmp_path / "b.zst", b"[" * MIB, 600)
        options |= {"comments": "1", "skip_header": 2, "label_columns": None}
    (rows, _, error), grown = read_in_a_child(path, options)
    assert "line 3: the line is longer than 16 MiB" in error
    assert rows == 0
    assert grown < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [b"\n" * MIB, b"#\n" * (MIB // 2), b" \n" * (MIB // 2), b"7,8,1\n" + b"\n" * (MIB - 6)],
    ids=["empty", "#", "blank", "rare"],
)
def test_lines_that_are_not_rows_take_no_memory_however_many(tmp_path, text):
    path = write_bomb(tmp_path / "a.zst", text, 100, after=b"")
    found, grown = read_in_a_child(path, {})
    assert found == [3 + text.count(b"7,8") * 100, 0, None]
    assert grown < 300


def test_a_kib_of_zstd_is_not_decompressed_at_once(tmp_path):
    block = (MIB // 8) << 3 | 0b010  # one byte, 128 Ki times
    frame = zstandard.compress(b"1,2,0\n" * 9, level=1)[:4] + b"\x00\x70" + (block.to_bytes(3, "little") + b"x") * 16000
    (tmp_path / "a.zst").write_bytes(frame)
    (_, _, error), grown = read_in_a_child(tmp_path / "a.zst", {"label_columns": None})
    assert "line 1: the line is longer than 16 MiB" in error
    assert grown < 300


@pytest.mark.parametrize("workers", [0, 1])
def test_what_max_line_bytes_may_be(tmp_path, workers):
    path = tmp_path / "a.csv"
    path.write_text("1,2,0\n" + "3,4" + " " * 2000 + ",1\n5,6,2\n")
    for limit in (3000, "3000", "3KB", "2.5KiB"):
        with StreamLoader(path, 1, 1, delimiter=",", max_line_bytes=limit, num_workers=workers) as loader:
            assert [y.item() for _, y in loader] == [0, 1, 2]
    for limit in (2004, "2kb", "1KiB"):
        with (
            StreamLoader(path, 1, 1, delimiter=",", max_line_bytes=limit, num_workers=workers) as loader,
            pytest.raises(StreamError, match=r"a\.csv, line 2: the line is longer than"),
        ):
            list(loader)
    for limit in (0, -1, True, 1.5, None, "0MiB", b"1"):
        with pytest.raises(StreamError, match=r"max_line_bytes=.* must be at least 1 byte"):
            StreamLoader(path, 1, 1, delimiter=",", max_line_bytes=limit)
    with pytest.raises(LimitError, match=r"max_line_bytes='much' is not a size"):
        StreamLoader(path, 1, 1, delimiter=",", max_line_bytes="much")


def test_max_line_bytes_is_not_part_of_a_state_unless_lines_are_left_out_for_it(numbered):
    def state(**options):
        with StreamLoader(numbered, 4, 8, **options) as loader:
            next(iter(loader))
            return loader.state_dict()

    assert state(max_line_bytes="1MiB") == state()
    with StreamLoader(numbered, 4, 8, max_line_bytes=10_000) as loader:
        loader.load_state_dict(state())
    with (
        StreamLoader(numbered, 4, 8, max_line_bytes=10_000, on_error="skip") as loader,
        pytest.raises(StateError, match="other arguments"),
    ):
        loader.load_state_dict(state(on_error="skip"))


def test_long_lines_are_left_out_counted_and_reported_once(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text("".join(f"{n},{n},{n}{' ' * 500 * (n % 10 == 3)}\n" for n in range(40)))
    options = {"delimiter": ",", "on_error": "skip", "max_line_bytes": 100, "drop_last": False, "size_limit_gib": 0.01}
    with StreamLoader(path, 3, 9, **options) as loader:
        for _ in range(2):  # the second time out of the cache
            assert [n for _, y in loader for n in y.tolist()] == [n for n in range(40) if n % 10 != 3]
        assert loader.stats().skipped == 8
    assert caplog.text.count("line 4: the line is longer than 100 bytes") == 1


@pytest.mark.slow
def test_a_line_in_fixed_widths_that_is_longer_than_others_does_not_widen_them(tmp_path):
    path = write_bomb(tmp_path / "a.csv", b"1 2 0\n", 100_000, before=b"1 2 0" + b" " * 8 * MIB + b"\n", after=b"")
    path.write_bytes(path.read_bytes().replace(b",", b" "))
    found, grown = read_in_a_child(path, {"format": "fixed", "widths": [2, 2, 1]})
    assert found == [100_004, 0, None]
    assert grown < 400


def test_json_that_is_nested_too_deep_is_a_bad_line(tmp_path):
    path = tmp_path / "a.jsonl"
    for bad in ('{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "b": 1}', '{"a": ' + "1" * 5000 + ', "b": 1}'):
        path.write_text('{"a": 1, "b": 1}\n' + bad + "\n")
        with (
            StreamLoader(path, 1, 2, format="jsonl", columns=["a"], label_columns="b", engine="numpy") as loader,
            pytest.raises(StreamError, match=r"a\.jsonl, line 2: "),
        ):
            list(loader)
        path.write_text(bad + "\n")
        with pytest.raises(StreamError, match="the first row is not a JSON object"):
            StreamLoader(path, 1, 2, format="jsonl", columns=["a"], label_columns="b")
