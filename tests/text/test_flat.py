"""The flat arguments of `StreamLoader` before its formats and options: they warn, and mean the same."""

import re

import pytest
import torch

from stocache import (
    CacheOptions,
    CsvFormat,
    CustomFormat,
    FixedWidthFormat,
    JsonLinesFormat,
    ReadOptions,
    StreamError,
    StreamLoader,
)
from tests.support.equality import everywhere, identical


def lengths(lines):
    return torch.tensor([len(line) for line in lines])


FORMATS = [
    (
        {"delimiter": ",", "on_error": "skip"},
        CsvFormat(",", on_error="skip"),
        "1,2\nx,y\n",
        r"on_error= is now format=CsvFormat\(on_error=…\)",
    ),
    (
        {"nan": "keep", "dtype": torch.float64},
        CsvFormat("\t", nan="keep", dtype=torch.float64),
        "0.1\t\t2\n",
        "nan= is now format=CsvFormat",
    ),
    ({"format": "delimited", "delimiter": None}, CsvFormat(None), "1  2\n", r"format='delimited' is now format=CsvFormat\(…\)"),
    (
        {"format": "fixed", "widths": [2, 3, 1], "columns": [0]},
        FixedWidthFormat([2, 3, 1], columns=[0]),
        "1 2  3\n",
        "format='fixed' is now",
    ),
    (
        {"format": "jsonl", "skip_header": 1},
        JsonLinesFormat(skip_header=1),
        '[]\n{"a": 1, "b": 2}\n',
        r"format='jsonl' is now format=JsonLines",
    ),
    (
        {"parse": lengths, "comments": None},
        CustomFormat(lengths, comments=None),
        "# one\n2\n",
        "parse= is now format=CustomFormat",
    ),
]


@pytest.mark.parametrize(
    ("flat", "form", "text", "message"), FORMATS, ids=lambda part: "-".join(part) if type(part) is dict else ""
)
def test_arguments_of_a_format(tmp_path, flat, form, text, message):
    path = tmp_path / "rows"
    path.write_text(text)
    with pytest.warns(DeprecationWarning, match="is now format=") as warned:
        loader = StreamLoader(path, 1, 1, **flat)
    assert any(re.search(message, str(warning.message)) for warning in warned)
    assert {warning.filename for warning in warned} == {__file__}
    with loader, StreamLoader(path, 1, 1, format=form) as wanted:
        same_identity = loader.state_dict()["identity"] == wanted.state_dict()["identity"]
        assert same_identity == ("delimited" not in flat.values())  # which the states of that time contain
        batches = list(loader)
        assert batches
        assert everywhere(identical, batches, list(wanted))


def test_a_limit_of_the_length_of_lines(tmp_path):
    path = tmp_path / "rows"
    path.write_text("1\t2\n1\t2000\n")
    with pytest.warns(DeprecationWarning, match="max_line_bytes= is now format=CsvFormat"):
        loader = StreamLoader(path, 1, 1, max_line_bytes=5)
    with loader, pytest.raises(StreamError, match="line 2: the line is longer than 5 bytes"):
        list(loader)


def test_arguments_of_the_cache_and_of_reading(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"{n}\t{n}\n" for n in range(40)))
    flat = {"name": "rows", "fingerprint": "v1", "engine": "numpy", "progress": False}
    with pytest.warns(DeprecationWarning, match=r"is now (cache=CacheOptions|read=ReadOptions)\(") as warned:
        loader = StreamLoader(path, 5, 5, size_limit_gib=0.01, **flat)
    assert len(warned) == len(flat)
    objects = {"cache": CacheOptions(0.01, name="rows", fingerprint="v1"), "read": ReadOptions("numpy")}
    with loader, StreamLoader(path, 5, 5, **objects) as wanted:  # or the caches would not match
        assert [y.tolist() for _, y in loader] == [y.tolist() for _, y in wanted]
        assert wanted.stats().cache.hits > 0


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"format": "parquet"}, "format='parquet' is unknown"),
        ({"format": "fixed"}, "widths are for format='fixed', which needs them"),
        ({"widths": [1, 2]}, "widths are for format='fixed'"),
        ({"format": "jsonl", "parse": len}, "parse and format='jsonl' are two ways to parse"),
        ({"format": CsvFormat(","), "nan": "keep"}, r"nan belongs to format=\. Pass it to CsvFormat"),
        ({"read": ReadOptions(), "engine": "numpy"}, r"engine belongs to read=\. Pass it to ReadOptions"),
    ],
)
def test_arguments_that_contradict_each_other(flat, message):
    with pytest.raises(StreamError, match=message):
        StreamLoader("rows.tsv", 10, 20, **flat)
