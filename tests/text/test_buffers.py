"""Buffers of parsed rows: what is cached is neither read nor parsed again; the rest is read ahead."""

import multiprocessing
import time

import numpy as np
import pytest
import torch

from stocache import CacheOptions, CustomFormat, MismatchError, StreamLoader
from tests.support.faults import no_shared_memory
from tests.support.processes import run_all
from tests.support.texts import SKIP, N, Watch, numbers, parse, rows


@pytest.mark.parametrize("shuffle", [False, True, "buffers"])
def test_from_the_second_epoch_on_what_is_cached_is_neither_read_nor_parsed(numbered, monkeypatch, shuffle):
    watch = Watch(monkeypatch)
    options = {"shuffle": shuffle, "drop_last": False, "size_limit_gib": 0.1}
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse), **options) as loader:
        for _ in range(3):
            assert sorted(torch.cat(list(loader)).flatten().tolist()) == list(range(N))
            assert watch.rows == N
            watch.bytes, before = 0, watch.bytes
            assert before == 0 or before >= numbered.stat().st_size
        assert loader.stats().cache.hits == 2 * 22


def test_what_is_not_cached_is_found_by_its_bytes(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    form = CustomFormat(watch.parse)
    with StreamLoader(numbered, 10, 20, format=form, drop_last=False, size_limit_gib="4KB") as loader:
        list(loader)
        cached = loader.stats().cache.filled
        assert 3 < cached < 20
        for _ in range(2):
            watch.rows = watch.bytes = 0
            assert torch.cat(list(loader)).flatten().tolist() == list(range(N))
            assert watch.rows == N - 20 * cached
            whole = len(rows(20 * cached))
            assert whole <= watch.bytes <= whole + 22 * 400  # and a bit beyond each buffer


@pytest.mark.parametrize("ways", [{}, {"num_workers": 2, "size_limit_gib": 0.1}], ids=str)
def test_a_parse_function_of_ones_own(numbered, ways):
    with StreamLoader(numbered, 10, 20, format=CustomFormat(parse), shuffle=True, drop_last=False, **ways) as loader:
        for _ in range(2):
            tokens = torch.cat([batch["tokens"] for batch in loader])
            assert sorted(tokens[:, 0].tolist()) == list(range(N))
            assert torch.equal(tokens[:, 2], tokens[:, 0] + 2)


def test_the_cache_stays_below_its_limit(numbered):
    with StreamLoader(numbered, 10, 20, size_limit_gib="4KB", drop_last=False) as loader:
        for _ in range(2):
            assert numbers(loader) == list(range(N))
        stats = loader.stats().cache
        assert 0 < stats.filled < 22
        assert stats.capacity_bytes <= 4000
    with StreamLoader(numbered, 10, 20, size_limit_gib=0) as loader:
        assert loader.stats().cache is None


def test_every_buffer_of_short_rows_may_be_cached(tmp_path):
    path = tmp_path / "short.tsv"
    path.write_bytes(b"1\t1\n" * 20_000)
    with StreamLoader(path, 10, 100, size_limit_gib=0.1) as loader:
        list(loader)
        assert loader.stats().cache.filled == 200


def test_without_shared_memory_it_goes_on(numbered, monkeypatch, caplog):
    no_shared_memory(monkeypatch)
    with StreamLoader(numbered, 10, 20, drop_last=False, size_limit_gib=0.1) as loader:
        for _ in range(2):
            assert numbers(loader) == list(range(N))
        assert len(loader) == 44
    assert "no shared memory" in caplog.text


def named_job(number, path, parsed):
    def parse(found):
        with parsed.get_lock():
            parsed.value += len(found)
        return np.array([[int(row.split("\t")[0])] for row in found])

    cache = CacheOptions(0.1, name="texts", persist=True)
    with StreamLoader(path, 10, 20, format=CustomFormat(parse), drop_last=False, cache=cache) as loader:
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
    options = {"cache": CacheOptions(0.1, name="texts"), "drop_last": False}
    with StreamLoader(numbered, 10, 20, **options) as loader:
        assert numbers(loader) == list(range(N))
        with pytest.raises(MismatchError, match="texts"):
            StreamLoader(other, 10, 20, **options)
    with StreamLoader(other, 10, 20, **options) as loader:
        assert numbers(loader) == list(range(5, 105))


def test_it_reads_ahead_while_the_trainer_works(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse)) as loader:
        batches = iter(loader)
        next(batches)
        deadline = time.monotonic() + 10
        while watch.rows < 40 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 40 <= watch.rows < 200
        batches.close()


def test_skipping_does_not_read_the_file_again_and_again(tmp_path, monkeypatch):
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"1\t1\nx\tx\n" * 2000)
    watch = Watch(monkeypatch)
    with StreamLoader(path, 2, 10, format=SKIP, drop_last=False) as loader:
        assert sum(len(y) for _, y in loader) == 2000
    assert watch.bytes < 60 * path.stat().st_size  # of which 50 are the last words of each buffer: it is small, rows are short
