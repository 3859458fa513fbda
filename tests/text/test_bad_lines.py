"""Lines that do not fit: each is named, or left out and counted."""

import functools
import gzip
import logging
import multiprocessing

import numpy as np
import pytest

from stocache import CsvFormat, CustomFormat, DamagedError, JsonLinesFormat, ReadOptions, StreamError, StreamLoader
from tests.support.texts import FORK, SKIP, numbers, parse, rows

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
    with StreamLoader(path, 2, 2, read=ReadOptions(engine)) as loader:
        with pytest.raises(StreamError, match=r"bad\.tsv, " + message):
            list(loader)
    for ways in ({}, {"num_workers": 2, "size_limit_gib": 0.1}):
        caplog.clear()
        read = ReadOptions(engine, "fork")
        with StreamLoader(path, 2, 2, format=SKIP, read=read, drop_last=False, **ways) as loader:
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
    with StreamLoader(path, 2, 2, drop_last=False, num_workers=2, read=FORK) as loader:
        with pytest.raises(StreamError, match=r"bad\.tsv, line 61: .*column 0 is 'x', not a number"):
            list(loader)
        assert not multiprocessing.active_children()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n", b"header\n"])
def test_files_without_data(tmp_path, content):
    path = tmp_path / "empty.tsv"
    path.write_bytes(content)
    with pytest.raises(StreamError, match=r"empty\.tsv(: no line holds data| is empty)"):
        with StreamLoader(path, 1, 1, skip_header=int(b"header" in content)) as loader:
            list(loader)
    full = tmp_path / "full.tsv"
    full.write_bytes(b"header\n" + GOOD if b"header" in content else GOOD)
    skip_header = int(b"header" in content)
    if not content:
        with pytest.raises(StreamError, match=r"empty\.tsv is empty: a file of at least one line was expected"):
            StreamLoader([path, full], 1, 1)
    form = CsvFormat("\t", skip_header=skip_header, on_error="raise" if content else "skip")
    with StreamLoader([path, full], 1, 1, format=form) as loader:
        assert numbers(loader) == [1, 2, 3]


def test_where_nothing_is_left(tmp_path):
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"1\t2\t3\nx\ty\tz\n" + b"a\tb\tc\n" * 8)
    with StreamLoader(path, 2, 2, format=SKIP) as loader:
        with pytest.raises(
            StreamError, match=r"9 of 10 lines were left out, and the others fill no batch. The first: .*, line 2"
        ):
            list(loader)
    path.write_bytes(b"a\tb\tc\n" * 8)
    with StreamLoader(path, 2, 2, format=SKIP) as loader:
        with pytest.raises(StreamError, match="8 of 8 lines were left out"):
            list(loader)


def test_truncated_gzip(tmp_path, caplog):
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress(rows(0, 5000))[:-2000])
    for ways in ({}, {"num_workers": 1, "read": FORK}):
        with StreamLoader(path, 10, 20, **ways) as loader:
            with pytest.raises(DamagedError, match=r"cut\.tsv\.gz, line \d+: its gzip data is cut"):
                list(loader)
    with StreamLoader(path, 10, 20, format=SKIP, drop_last=False) as loader:
        found = numbers(loader)
        assert found == list(range(len(found)))
        assert 100 < len(found) < 5000
        assert loader.stats().skipped == 1
    assert "its gzip data is cut" in caplog.text


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


def test_good_rows_that_fill_no_batch_are_counted(tmp_path, caplog):
    path = tmp_path / "bad.tsv"
    path.write_bytes(rows(0, 20) + b"x\n" + rows(21, 40) + b"y\n" + rows(41, 60))
    for drop_last, delivered in ((True, 40), ("batch", 40), (False, 58)):
        with StreamLoader(path, 10, 20, format=SKIP, drop_last=drop_last) as loader:
            assert len(numbers(loader)) == delivered
            stats = loader.stats()
            assert (stats.rows, stats.skipped, stats.dropped) == (60, 2, 58 - delivered)
    assert "2 of 60 lines were left out, and 18 good ones that then filled no batch" in caplog.text


def test_a_parse_function_returns_as_many_rows_as_lines(numbered):
    with StreamLoader(numbered, 10, 20, format=CustomFormat(lambda found: np.zeros((len(found) - 1, 2)))) as loader:
        with pytest.raises(StreamError, match="arrays of"):
            list(loader)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(functools.partial(parse))) as loader:  # any callable
        assert len(list(loader)) == 42

    def refuse(found):
        raise ValueError("not these")

    with StreamLoader(numbered, 10, 20, format=CustomFormat(refuse)) as loader:
        with pytest.raises(StreamError, match=r"numbered\.tsv, line 1: '0\\t0\\t0': ValueError: not these"):
            list(loader)


def test_json_that_is_nested_too_deep_is_a_bad_line(tmp_path):
    path, form = tmp_path / "a.jsonl", JsonLinesFormat(columns=["a"], label_columns="b")
    for bad in ('{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "b": 1}', '{"a": ' + "1" * 5000 + ', "b": 1}'):
        path.write_text('{"a": 1, "b": 1}\n' + bad + "\n")
        with (
            StreamLoader(path, 1, 2, format=form, read=ReadOptions("numpy")) as loader,
            pytest.raises(StreamError, match=r"a\.jsonl, line 2: "),
        ):
            list(loader)
        path.write_text(bad + "\n")
        with pytest.raises(StreamError, match="the first row is not a JSON object"):
            StreamLoader(path, 1, 2, format=form)
