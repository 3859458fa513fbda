"""Formats and options of `StreamLoader`: what they refuse, and what they stand for."""

import inspect
import json
import pickle

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
from tests.support.texts import numbers

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
    "jsonl": (JsonLinesFormat(), '{{"a": {n}, "b": {n}.0, "c": {n}}}\n'),
    "keyed": (JsonLinesFormat(columns=["b", "a"], label_columns="c"), '{{"c": {n}, "a": {n}, "b": {n}}}\n'),
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


def test_what_the_tensors_look_like(numbered):
    for label_columns, shape in ((-1, (10,)), ([0, 1], (10, 2)), ([2], (10, 1))):
        form = CsvFormat("\t", label_columns=label_columns, label_dtype=torch.int32, dtype=torch.float64)
        with StreamLoader(numbered, 10, 20, format=form) as loader:
            x, y = next(iter(loader))
            assert (x.dtype, y.dtype, y.shape) == (torch.float64, torch.int32, shape)
            assert x.shape == (10, 3 - (shape[1] if len(shape) > 1 else 1))
    with StreamLoader(numbered, 10, 20, label_columns=None) as loader:
        assert next(iter(loader)).shape == (10, 3)


def test_nan_may_be_kept(tmp_path):
    path = tmp_path / "nan.tsv"
    path.write_bytes(b"1\t\t1\nNA\t2\t2\n3\tnan\t3\n")
    for engine in ("pyarrow", "numpy"):
        with StreamLoader(path, 3, 3, format=CsvFormat("\t", nan="keep"), read=ReadOptions(engine)) as loader:
            ((x, y),) = loader
            assert torch.equal(x.isnan(), torch.tensor([[False, True], [True, False], [False, True]]))
            assert y.tolist() == [1, 2, 3]


def test_names_of_columns_of_fixed_width(tmp_path):
    path = tmp_path / "fixed.txt"
    path.write_text("first   second  third\n" + "".join(f"{n:<8}{n:<8}{n:<5}\n" for n in range(40)))
    form = FixedWidthFormat([8, 8, 5], skip_header=1, columns=["second", "first"], label_columns="third")
    with StreamLoader(path, 10, 20, format=form) as loader:
        assert numbers(loader) == list(range(40))


def test_lines_of_delimiters_alone_are_rows_of_missing_values(tmp_path):
    path = tmp_path / "missing.tsv"
    path.write_bytes(b"1\t2\n\t\n \n3\t4\n")
    for engine in ("pyarrow", "numpy"):
        form = CsvFormat("\t", nan="keep", label_columns=None)
        with StreamLoader(path, 3, 3, format=form, read=ReadOptions(engine)) as loader:
            (x,) = loader
            assert x.nan_to_num(-1).tolist() == [[1, 2], [-1, -1], [3, 4]]


def test_quoted_text_beside_numbers(tmp_path):
    path = tmp_path / "quoted.csv"
    path.write_text("".join(f'"row, {n}",{n},{n},{n}\n' for n in range(40)))
    for engine in ("pyarrow", "numpy"):
        with StreamLoader(path, 10, 20, delimiter=",", columns=[1, 2], read=ReadOptions(engine)) as loader:
            assert numbers(loader) == list(range(40))


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


def test_the_short_form_does_not_warn(numbered):
    with StreamLoader(numbered, 5, 10, delimiter="\t", columns=[1, 0], label_columns=2, skip_header=1) as loader:
        assert next(iter(loader))[1].tolist() == [1, 2, 3, 4, 5]
