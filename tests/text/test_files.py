"""Many files and URLs are one text, and files that change are never served stale."""

import contextlib
import gzip
import itertools
import os
import shutil

import pytest
import torch

from stocache import DamagedError, StreamError, StreamLoader
from tests.support.texts import FORK, N, numbers, rows


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


def test_buffers_in_random_order_need_files_that_can_be_sought(tmp_path):
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(gzip.compress(rows()))
    with pytest.raises(StreamError, match=r"any byte, and .*rows\.tsv\.gz is gzip\. Use shuffle=True, with a window"):
        StreamLoader(path, 10, 20, shuffle="buffers")


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


@pytest.mark.parametrize("ways", [{}, {"num_workers": 2, "read": FORK}], ids=["threads", "workers"])
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
