"""Ranks read every row once, and as many batches each."""

import gzip
import json
import multiprocessing

import pytest

from stocache import CacheNameError, CustomFormat, StreamError, StreamLoader
from tests.support.processes import run_all
from tests.support.texts import N, numbers, ours, parse, rows


def rank_job(rank, path, world_size, folder, options):
    with StreamLoader(path, 10, 20, rank=rank, world_size=world_size, **options) as loader:
        epochs = [numbers(loader) for _ in range(2)]
        expected = len(loader) if options.get("count_rows") else None
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
    options = {"drop_last": drop_last, "count_rows": True}
    run_all(multiprocessing.get_context("fork"), 2, rank_job, path, 2, tmp_path, options)
    (first, expected), (second, expected_too) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert len(first[0]) == len(second[0]) == len(first[1]) == 10 * expected
    assert expected == expected_too > 20
    assert not set(first[0]) & set(second[0])


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


def test_ranks_are_those_of_torchrun(numbered, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StreamLoader(numbered, 10, 20, drop_last=False) as loader:
        found = numbers(loader)
    assert 100 < len(found) < 300
    assert found[-1] == N - 1
    with StreamLoader(numbered, 10, 20, drop_last=False, rank=0, world_size=1) as loader:
        assert len(numbers(loader)) == N


def test_ranks_that_parse_share_a_cache_by_name_alone(numbered):
    options = {"format": CustomFormat(parse), "rank": 0, "world_size": 2}
    with pytest.raises(CacheNameError, match="with a name, and with a fingerprint"):
        StreamLoader(numbered, 10, 20, size_limit_gib=0.1, **options)
    StreamLoader(numbered, 10, 20, **options).close()
