"""Formats and options of `StreamLoader`: what they refuse, what they stand for, and the flat arguments before them."""

import inspect
import json
import pickle
import re

import pytest
import torch

from stocache import (
    CacheOptions,
    CsvFormat,
    CustomFormat,
    FixedWidthFormat,
    JsonLinesFormat,
    LimitError,
    ReadOptions,
    StateError,
    StreamError,
    StreamLoader,
)

ROWS = "".join(f"{n}\t{n}\t{n}\n" for n in range(40))


@pytest.fixture
def numbered(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CsvFormat("||"), r"delimiter='\|\|' is not a single ASCII character\. Use CustomFormat"),
        (lambda: CsvFormat("é"), "delimiter='é' is not a single ASCII character"),
        (lambda: CsvFormat(""), "delimiter='' is not a single ASCII character"),
        (lambda: CsvFormat('"'), "delimiter='\"' is not a single ASCII character"),
        (lambda: CsvFormat(9), "delimiter=9 is not a single ASCII character"),
        (lambda: CsvFormat(",", skip_header=-1), "skip_header=-1 is not an integer of at least 0"),
        (lambda: CsvFormat(",", skip_header=True), "skip_header=True is not an integer"),
        (lambda: CsvFormat(",", comments=" "), "comments=' ' marks nothing. Use None for no comments"),
        (lambda: CsvFormat(",", comments=3), "comments=3 marks nothing"),
        (lambda: CsvFormat(",", on_error="ignore"), "on_error='ignore' is unknown. Use 'raise' or 'skip'"),
        (lambda: CsvFormat(",", nan="drop"), "nan='drop' is unknown. Use 'error' or 'keep'"),
        (lambda: CsvFormat(",", max_line_bytes=0), "max_line_bytes=0 must be at least 1 byte"),
        (lambda: CsvFormat(",", columns="a"), r"columns='a' is one column\. Give a list: columns=\['a'\]"),
        (lambda: CsvFormat(",", columns=[1.5]), r"columns=\[1.5\] must be column numbers or names"),
        (lambda: CsvFormat(",", columns={0}), r"columns=\{0\} must be column numbers or names"),
        (lambda: CsvFormat(",", label_columns=1.5), "label_columns=1.5 must be column numbers or names"),
        (lambda: CsvFormat(",", label_columns=[True]), r"label_columns=\[True\] must be column numbers or names"),
        (lambda: CsvFormat(",", dtype=torch.complex64), "dtype=torch.complex64 is not a dtype"),
        (lambda: CsvFormat(",", label_dtype="text"), "label_dtype='text' is not a dtype"),
        (lambda: FixedWidthFormat([]), r"widths=\[\] must be numbers of bytes above 0"),
        (lambda: FixedWidthFormat(3), "widths=3 must be numbers of bytes above 0"),
        (lambda: FixedWidthFormat([2, 0]), r"widths=\[2, 0\] must be numbers of bytes above 0"),
        (lambda: JsonLinesFormat(columns=["a"], label_columns={"b"}), "label_columns={'b'} must be column numbers or names"),
        (lambda: CustomFormat(3), "parse=3 is not a function"),
        (lambda: ReadOptions("polars"), "engine='polars' is unknown. Use 'auto' or 'pyarrow' or 'numpy'"),
        (lambda: ReadOptions(storage_options="anonymous"), "storage_options='anonymous' is not a dict"),
        (lambda: ReadOptions(progress=2), "progress=2 is unknown"),
    ],
)
def test_wrong_values_are_refused_at_once(make, message):
    with pytest.raises(StreamError, match=message):
        make()


def test_a_limit_that_is_not_a_size_is_a_limit_error():
    with pytest.raises(LimitError, match="max_line_bytes='much' is not a size"):
        JsonLinesFormat(max_line_bytes="much")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "format='csv' is unknown"),
        ({"format": 3}, "format=3 is not a TextFormat"),
        ({"format": CsvFormat}, "is not a TextFormat"),
        ({"rank": 2, "world_size": 2}, "rank=2 is out of range for world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1 is not an integer of at least 0"),
        ({"rank": 0, "world_size": 0}, "world_size=0 is not an integer of at least 1"),
        ({"rank": 0}, "world_size=None is not an integer"),
        ({"read": "auto"}, "read='auto' is not a ReadOptions"),
        ({"cache": "rows"}, "cache='rows' is not a CacheOptions"),
        ({"cache": CacheOptions(1), "size_limit_gib": 1}, r"size_limit_gib belongs to cache=\. Pass it to CacheOptions"),
        ({"format": JsonLinesFormat(), "columns": [0]}, r"columns belongs to format=\. Pass it to JsonLinesFormat"),
        ({"format": CsvFormat(","), "nan": "keep"}, r"nan belongs to format=\. Pass it to CsvFormat"),
        ({"read": ReadOptions(), "engine": "numpy"}, r"engine belongs to read=\. Pass it to ReadOptions"),
    ],
)
def test_a_loader_refuses_options_of_the_wrong_kind_or_given_twice(numbered, options, message):
    with pytest.raises(StreamError, match=message):
        StreamLoader(numbered, 10, 20, **options)


def test_an_unknown_argument_is_a_type_error(numbered):
    with pytest.raises(TypeError, match="StreamLoader has no argument 'quotes'"):
        StreamLoader(numbered, 10, 20, quotes=False)


def test_the_signature_is_short():
    assert len(inspect.signature(StreamLoader).parameters) <= 17


FORMATS = {
    "csv": (CsvFormat(","), "{n},{n}.0,{n}\n"),
    "blank": (CsvFormat(None), "  {n}   {n}\t{n} \n"),
    "headed": (CsvFormat(";", skip_header=1, columns=["b", "a"], label_columns="c"), "{n};{n};{n}\n"),
    "fixed": (FixedWidthFormat([5, 6, 4]), "{n:>5}{n:<6}{n:<4}\n"),
    "jsonl": (JsonLinesFormat(columns=["b", "a"], label_columns="c"), '{{"c": {n}, "a": {n}, "b": {n}}}\n'),
}


@pytest.mark.parametrize("engine", ["pyarrow", "numpy"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_reads_its_rows(tmp_path, name, engine):
    form, row = FORMATS[name]
    text = "a;b;c\n" * form.skip_header + "".join(row.format(n=n) for n in range(40))
    (tmp_path / name).write_text(text)
    assert pickle.loads(pickle.dumps(form)) == form
    with StreamLoader(tmp_path / name, 10, 20, format=form, read=ReadOptions(engine)) as loader:
        batches = list(loader)
    assert torch.cat([y for _, y in batches]).tolist() == list(range(40))
    assert all(torch.equal(x, torch.stack([y, y], 1).float()) for x, y in batches)


def lengths(lines):
    return torch.tensor([len(line) for line in lines])


def test_a_custom_format_calls_its_function(numbered):
    with StreamLoader(numbered, 10, 20, format=CustomFormat(lengths)) as loader:
        assert torch.cat(list(loader)).tolist() == [len(line) for line in ROWS.splitlines()]


def test_two_shards_hold_every_row_once(numbered):
    found = []
    for rank in range(2):
        with StreamLoader(numbered, 5, 5, drop_last=False, rank=rank, world_size=2) as loader:
            found += [n for _, y in loader for n in y.tolist()]
    assert sorted(found) == list(range(40))


# ---------------------------------------------------------------------------------------------------- before

STATES = {  # identities, as of the version that had flat arguments alone, of files that the test writes
    "7743eb45bad5ce5f": ("rows.tsv", {"shuffle": True}),
    "113d44f457556a93": (
        "rows.tsv",
        {"rank": 0, "world_size": 2, "format": CsvFormat("\t", on_error="skip", max_line_bytes=1000)},
    ),
    "8a45d0eb17c1d87f": (
        "rows.csv",
        {"format": CsvFormat(",", skip_header=1, columns=["b", "a"], label_columns="c", nan="keep", dtype=torch.float64)},
    ),
    "e79479af3159aef0": ("rows.txt", {"format": FixedWidthFormat([4, 4, 4])}),
    "b38c95050299f03c": ("rows.jsonl", {"format": JsonLinesFormat(columns=["b", "a"], label_columns="c", comments=None)}),
    "e0c11619489987c5": ("rows.tsv", {"format": CustomFormat(json.loads)}),
}
TEXTS = {
    "rows.tsv": ROWS,
    "rows.csv": "a,b,c\n" + ROWS.replace("\t", ","),
    "rows.txt": "".join(f"{n:<4}{n:<4}{n:<4}\n" for n in range(40)),
    "rows.jsonl": "".join(f'{{"a": {n}, "b": {n}, "c": {n}}}\n' for n in range(40)),
}


@pytest.mark.parametrize("identity", STATES)
def test_the_identities_of_states_stay(tmp_path, identity):
    name, options = STATES[identity]
    (tmp_path / name).write_text(TEXTS[name])
    with StreamLoader(tmp_path / name, 5, 10, **options) as loader:
        state = loader.state_dict()
        assert state["identity"] == {"checksum": identity}
        with pytest.raises(StateError, match="other files, or other arguments"):
            loader.load_state_dict(state | {"identity": {"checksum": "0" * 16}})


FLAT = [
    (
        {"delimiter": ",", "on_error": "skip"},
        CsvFormat(",", on_error="skip"),
        r"on_error= is now format=CsvFormat\(on_error=…\)",
    ),
    ({"nan": "keep", "dtype": torch.float64}, CsvFormat("\t", nan="keep", dtype=torch.float64), "nan= is now format=CsvFormat"),
    ({"format": "delimited", "delimiter": None}, CsvFormat(None), r"format='delimited' is now format=CsvFormat\(…\)"),
    ({"format": "fixed", "widths": [2, 3], "columns": [0]}, FixedWidthFormat([2, 3], columns=[0]), "format='fixed' is now"),
    (
        {"format": "jsonl", "skip_header": 1},
        JsonLinesFormat(skip_header=1),
        r"format='jsonl' is now format=JsonLines",
    ),
    ({"parse": lengths, "comments": None}, CustomFormat(lengths, comments=None), "parse= is now format=CustomFormat"),
]


@pytest.mark.parametrize(("flat", "wanted", "message"), FLAT, ids=lambda part: "-".join(part) if type(part) is dict else "")
def test_flat_arguments_of_a_format_warn_and_mean_the_same(monkeypatch, flat, wanted, message):
    formats = []
    monkeypatch.setattr("stocache.text.loader.find_files", lambda *_: [])
    monkeypatch.setattr(StreamLoader, "_open", lambda loader, files: formats.append(loader._format))
    with pytest.warns(DeprecationWarning, match="is now format=") as warned:
        StreamLoader("rows", 10, 20, **flat)
    assert any(re.search(message, str(warning.message)) for warning in warned)
    assert {warning.filename for warning in warned} == {__file__}
    (found,) = formats
    assert isinstance(found, type(wanted))
    assert vars(found) == vars(wanted)


def test_the_other_flat_arguments_warn_and_mean_the_same(numbered):
    flat = {"name": "rows", "fingerprint": "v1", "engine": "numpy", "progress": False}
    with pytest.warns(DeprecationWarning, match=r"is now (cache=CacheOptions|read=ReadOptions)\(") as warned:
        loader = StreamLoader(numbered, 5, 5, size_limit_gib=0.01, **flat)
    assert len(warned) == len(flat)
    objects = {"cache": CacheOptions(0.01, name="rows", fingerprint="v1"), "read": ReadOptions("numpy")}
    with loader, StreamLoader(numbered, 5, 5, **objects) as same:  # or the caches would not match
        assert [y.tolist() for _, y in loader] == [y.tolist() for _, y in same]
        assert same.stats().cache.hits > 0


def test_the_short_form_does_not_warn(numbered):
    with StreamLoader(numbered, 5, 10, delimiter="\t", columns=[1, 0], label_columns=2, skip_header=1) as loader:
        assert next(iter(loader))[1].tolist() == [1, 2, 3, 4, 5]
