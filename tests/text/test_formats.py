"""Formats and options of `StreamLoader`: what they read, what they refuse, and the flat arguments they stand for."""

import pickle
import sys

import pytest
import torch

from stocache import CacheOptions, CsvFormat, FixedWidthFormat, JsonLinesFormat, StreamLoader
from stocache.errors import LimitError, StreamError

FORMATS = {
    "csv": (CsvFormat(","), "{n},{n}.0,{n}\n"),
    "blank": (CsvFormat(None), "  {n}   {n}\t{n} \n"),
    "headed": (CsvFormat(";", skip_header=1, columns=["b", "a"], label_columns="c"), "{n};{n};{n}\n"),
    "quoted": (CsvFormat(",", columns=[1, 2]), '"row, {n}",{n},{n},{n}\n'),
    "fixed": (FixedWidthFormat([5, 6, 4]), "{n:>5}{n:<6}{n:<4}\n"),
    "fixed, named": (FixedWidthFormat([2, 2, 5], skip_header=1, columns=["b;"], label_columns="c"), "{n:<2}{n:<2}{n:<5}\n"),
    "jsonl": (JsonLinesFormat(), '{{"a": {n}, "b": {n}.0, "c": {n}}}\n'),
    "keyed": (JsonLinesFormat(columns=["b", "a"], label_columns="c"), '{{"c": {n}, "a": {n}, "b": {n}}}\n'),
}  # fmt: skip


def test_each_format_reads_its_rows(tmp_path):
    for form, row in FORMATS.values():
        (path := tmp_path / "rows").write_text("a;b;c\n" * form.skip_header + "".join(row.format(n=n) for n in range(40)))
        assert pickle.loads(pickle.dumps(form)) == form
        with StreamLoader(path, 10, 20, format=form) as loader:
            batches = list(loader)
        assert torch.cat([y for _, y in batches]).tolist() == list(range(40)), row
        assert all(torch.equal(x, y.float()[:, None].expand(x.shape)) for x, y in batches), row


WRONG = [  # arguments of CsvFormat
    ({"delimiter": "||"}, r"delimiter='\|\|' is not a single ASCII character\. Use CustomFormat"),
    ({"on_error": "ignore"}, "on_error='ignore' is unknown. Use 'raise' or 'skip'"),
    ({"nan": "drop"}, "nan='drop' is unknown. Use 'error' or 'keep'"),
    ({"max_line_bytes": 0}, "at least 1 byte"),
    ({"columns": "a"}, r"columns='a' is one column\. Give a list: columns=\['a'\]"),
    ({"columns": [1.5]}, "must be column numbers or names"), ({"dtype": torch.complex64}, "is not a dtype"),
]  # fmt: skip
OPTIONS = [  # of a loader
    ({"format": "parquet"}, "format='parquet' is not a TextFormat"),
    ({"rank": 2, "world_size": 2}, "rank=2 is out of range for world_size=2"),
    ({"cache": CacheOptions(1), "size_limit_gib": 1}, r"size_limit_gib belongs to cache=\. Pass it to CacheOptions"),
    ({"batch_size": 3}, r"buffer_size=20 is not a multiple of batch_size=3\. Use for example 18"),
    ({"batch_size": 0}, "batch_size=0 is not an integer of at least 1"), ({"drop_last": "buffer"}, "drop_last='buffer' is"),
    ({"shuffle": "blocks"}, "shuffle='blocks' is unknown. Use False or True or 'buffers'"),
    ({"delimiter": ","}, r"numbered\.tsv: no column is left .* 1 fields split at ','.*delimiter='\\t' would make 3"),
    ({"columns": [3]}, r"there is no column 3\. .*numbered\.tsv: the first row has 3 fields split at '\\t'"),
    ({"columns": ["a"]}, r"columns \['a', -1\] are named, but there is no header\. Pass skip_header=1"),
    ({"columns": ["a"], "skip_header": 1}, r"there is no column 'a'\. The header has \['0', '0', '0'\]"),
    ({"label_columns": []}, "no column is left for the features, or the labels"),
    ({"format": JsonLinesFormat()}, r"numbered\.tsv: the first row is not a JSON object: '0\\t0\\t0'"),
    ({"format": JsonLinesFormat(), "columns": [0]}, r"columns belongs to format=\. Pass it to JsonLinesFormat"),
]  # fmt: skip


def test_wrong_values_and_options_that_contradict_each_other_are_refused_at_once(numbered):
    for options, message in WRONG:
        with pytest.raises(StreamError, match=message):
            CsvFormat(**{"delimiter": ","} | options)
    for widths in ([], 3, [2, 0]):
        with pytest.raises(StreamError, match=r"widths=.* must be numbers of bytes"):
            FixedWidthFormat(widths)
    for options, message in OPTIONS:
        with pytest.raises(StreamError, match=message):
            StreamLoader(numbered, **{"batch_size": 10, "buffer_size": 20, **options})
    with pytest.raises(LimitError, match="max_line_bytes='much' is not a size"):
        JsonLinesFormat(max_line_bytes="much")
    with pytest.raises(TypeError, match="StreamLoader has no argument 'quotes'"):
        StreamLoader(numbered, 10, 20, quotes=False)
    with pytest.raises(TypeError, match=r"DataLoader\(stream, batch_size=None, num_workers=…\)"):
        StreamLoader(numbered, 10, 20, num_workers=2)


def test_without_pyarrow_there_is_no_loader(numbered, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with pytest.raises(StreamError, match=r"needs pyarrow .*: pip install 'stocache\[text\]'"):
        StreamLoader(numbered, 10, 20)
