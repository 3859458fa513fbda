"""Rows parsed to arrays: every engine agrees with every other and with Python, to the last bit."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import StreamError
from stocache.samples.pytree import leaves
from stocache.text import parsers
from stocache.text.engines import BulkParseError, engines
from stocache.text.parsers import Custom, Delimited, FixedWidth, JsonLines, Target, numpy_dtype

F4, F8, I8, U1, BOOL = (np.dtype(name) for name in ("f4", "f8", "i8", "u1", "?"))
ENGINES = ["pyarrow", "numpy"]


def target(columns=(0, 1), labels=(2,), single=True, dtype=F4, label_dtype=I8, keep_nan=False):
    return Target(tuple(columns), labels, single, dtype, label_dtype, keep_nan)


def same(ours, theirs):
    for one, other in zip(leaves(ours), leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)


NUMBER = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=64).map(repr),
    st.decimals(-10, 10, places=4).map(str),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(["0.1", "1e-3", "-0", "1E5", ".5", "5.", "inf", "-inf", "0.30000000000000004", "179769313486231e294"]),
)
LABEL = st.integers(-(2**63), 2**63 - 1).map(str)


@given(
    rows=st.lists(st.tuples(NUMBER, NUMBER, LABEL), min_size=1, max_size=20),
    delimiter=st.sampled_from([",", "\t", ";", " ", "|"]),
    ends=st.sampled_from(["\n", "\r\n"]),
)
@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_are_those_that_python_reads(rows, delimiter, ends, dtype, engine):
    data = "".join(delimiter.join(row) + ends for row in rows).encode()
    parser = Delimited(target(dtype=dtype), 3, [engine], delimiter=delimiter)
    with np.errstate(over="ignore"):
        wanted = np.array([[float(a), float(b)] for a, b, _ in rows]).astype(dtype), np.array([int(c) for *_, c in rows])
    if engine == "pyarrow" or max(abs(int(label)) for *_, label in rows) < 2**53:
        same(parser.bulk(data, len(rows)), wanted)
    arrays, bad = parser.parse_row_by_row(data)
    assert not bad
    same(arrays, wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_columns_are_taken_in_the_order_asked_for(engine):
    data = b"1,a,2.5,b,3,7\n4,c,5.5,d,6,8\n"
    parser = Delimited(target((4, 2, 2), (0, 5), False, F8), 6, [engine], delimiter=",")
    wanted = np.array([[3, 2.5, 2.5], [6, 5.5, 5.5]]), np.array([[1, 7], [4, 8]])
    same(parser.bulk(data, 2), wanted)
    same(parser.parse_row_by_row(data)[0], wanted)
    same(Delimited(target((0, 2), None), 6, [engine]).bulk(data, 2), np.array([[1, 2.5], [4, 5.5]], F4))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("label_dtype", [I8, U1, BOOL], ids=str)
def test_integers_may_be_written_as_floats(engine, label_dtype):
    data = b"0.5,1,1.0\n0.25,2,0e0\n"
    parser = Delimited(target(label_dtype=label_dtype), 3, [engine])
    wanted = np.array([[0.5, 1], [0.25, 2]], F4), np.array([1, 0], label_dtype)
    same(parser.bulk(data, 2), wanted)
    same(parser.bulk(data, 2), wanted)  # also where it remembers how
    same(parser.bulk(b"1,2,1\n", 1), (np.array([[1, 2]], F4), np.array([1], label_dtype)))
    same(parser.parse_row_by_row(data)[0], wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1,2", "2 fields"),
        ("1,2,3,4", "4 fields"),
        ("1,x,3", "column 1 is 'x', not a number"),
        ("1,,3", "column 1 is missing"),
        ("1,nan,3", "column 1 is missing"),
        ("NA,2,3", "column 0 is missing"),
        ("1,-NaN,3", "column 1 is missing"),
        ("1,2,3.5", "column 2 is '3.5', not int64"),
        ("1,2,9223372036854775808", "column 2 is '9223372036854775808', not int64"),
        ("1,2,inf", "column 2 is 'inf', not int64"),
        ("1,2,", "column 2 is missing"),
        ("1_0,2,3", "column 0 is '1_0', not a number"),
        ("1,2,0x1f", "column 2 is '0x1f', not a number"),
    ],
)
def test_rows_that_are_not_as_they_should_be_are_told(engine, row, why):
    parser = Delimited(target(), 3, [engine])
    data = f"1,2,3\n{row}\n4,5,6\n".encode()
    with pytest.raises(BulkParseError, match="no engine can parse these rows"):
        parser.bulk(data, 3)
    arrays, bad = parser.parse_row_by_row(data)
    assert bad == [(1, why)]
    same(arrays, (np.array([[1, 2], [4, 5]], F4), np.array([3, 6])))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_beyond_a_small_dtype_is_no_value_of_it(engine):
    parser = Delimited(target(dtype=U1, label_dtype=U1), 3, [engine])
    same(parser.bulk(b"0,255,7\n", 1), (np.array([[0, 255]], U1), np.array([7], U1)))
    for row in (b"0,256,7\n", b"-1,2,7\n", b"1,2.5,7\n", b"1,2,300\n"):
        with pytest.raises(BulkParseError, match="no engine can parse these rows"):
            parser.bulk(row, 1)
        assert "not uint8" in parser.parse_row_by_row(row)[1][0][1]


@pytest.mark.parametrize("engine", ENGINES)
def test_large_integers_are_exact_or_refused(engine):
    parser = Delimited(target(), 3, [engine])
    for label in (2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1):
        data = f"1,2,{label}\n".encode()
        try:
            assert parser.bulk(data, 1)[1].tolist() == [label]
        except BulkParseError:
            assert engine == "numpy"
            assert abs(label) >= 2**53
        assert parser.parse_row_by_row(data)[0][1].tolist() == [label]


@pytest.mark.parametrize("engine", ENGINES)
def test_missing_values_become_nan_where_they_are_to_be_kept(engine):
    parser = Delimited(target(keep_nan=True, dtype=F8), 3, [engine])
    data = b"1,,3\nNA,nan,4\nnull,5,6\n"
    wanted = np.array([[1, math.nan], [math.nan, math.nan], [math.nan, 5]]), np.array([3, 4, 6])
    if engine == "pyarrow":
        same(parser.bulk(data, 3), wanted)
    same(parser.parse_row_by_row(data)[0], wanted)
    assert parser.parse_row_by_row(b"1,2,\n")[1] == [(0, "column 2 is missing")]  # labels have no NaN
    with pytest.raises(BulkParseError, match="no engine can parse these rows"):
        parser.bulk(b"1,2,\n", 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_comments_end_a_row(engine):
    parser = Delimited(target(), 3, [engine], comments="#")
    data = b"1,2,3 # three\n4,5,6#six\n"
    wanted = np.array([[1, 2], [4, 5]], F4), np.array([3, 6])
    same(parser.bulk(data, 2), wanted)
    same(parser.parse_row_by_row(data)[0], wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_quoted_fields(engine, delimiter):
    data = f'"1"{delimiter}"a{delimiter}b"{delimiter}"2"\n3{delimiter}x{delimiter}4\n'.encode()
    parser = Delimited(target((0,)), 3, [engine], delimiter=delimiter)
    wanted = np.array([[1], [3]], F4), np.array([2, 4])
    if engine == "pyarrow":
        same(parser.bulk(data, 2), wanted)
    same(parser.parse_row_by_row(data)[0], wanted)
    assert [row[1] for row in csv.reader(data.decode().splitlines(), delimiter=delimiter)] == [f"a{delimiter}b", "x"]


SPACE = st.sampled_from([" ", "  ", "\t", " \t ", "     "])


@given(rows=st.lists(st.tuples(SPACE, NUMBER, SPACE, NUMBER, SPACE, LABEL, SPACE), min_size=1, max_size=9), strip=st.booleans())
@pytest.mark.parametrize("engine", ENGINES)
def test_white_space_of_any_kind_between_fields(rows, strip, engine):
    lines = ["".join(row) for row in rows]
    data = "".join((line.strip() if strip else line) + "\n" for line in lines).encode()
    parser = Delimited(target(dtype=F8), 3, [engine], delimiter=None)
    wanted = np.array([[float(row[1]), float(row[3])] for row in rows]), np.array([int(row[5]) for row in rows])
    if engine == "pyarrow" or max(abs(int(row[5])) for row in rows) < 2**53:
        same(parser.bulk(data, len(rows)), wanted)
    same(parser.parse_row_by_row(data)[0], wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_fields_of_fixed_width(engine):
    lines = ["  1.5 hello  7", "-12.25abc  123", "1     x     -4  ", "   .5 y      9\r"]
    data = "".join(line + "\n" for line in lines).encode()
    parser = FixedWidth(target((0,)), 3, [engine], widths=(6, 5, 3))
    wanted = np.array([[1.5], [-12.25], [1], [0.5]], F4), np.array([7, 123, -4, 9])
    same(parser.bulk(data, 4), wanted)
    same(parser.parse_row_by_row(data)[0], wanted)
    with pytest.raises(BulkParseError, match="no engine can parse these rows"):
        parser.bulk(b"  1.5 hello  7 8\n", 1)
    arrays, bad = parser.parse_row_by_row(b"  1.5 hello  7 8\n  1.5 hello\n 2    hello  8\n")
    assert bad == [(0, "16 bytes"), (1, "column 2 is missing")]
    same(arrays, (np.array([[2]], F4), np.array([8])))


@given(rows=st.lists(st.tuples(st.floats(allow_nan=False), st.integers(-100, 100), LABEL), min_size=1, max_size=9))
@pytest.mark.parametrize("engine", ENGINES)
def test_json_lines(rows, engine):
    rows = [(a if math.isfinite(a) else 0.5, b, int(c)) for a, b, c in rows]
    data = b"".join(
        json.dumps({"b": b, "text": "x,{}\n", "label": c, "a": a, **({"more": [1, {}]} if b > 0 else {})}).encode() + b"\n"
        for a, b, c in rows
    )
    parser = JsonLines(target((0, 1), (2,), dtype=F8), 3, [engine], names=("a", "b", "label"))
    wanted = np.array([[a, b] for a, b, _ in rows], F8), np.array([c for *_, c in rows])
    same(parser.parse_row_by_row(data)[0], wanted)
    same(parser.bulk(data, len(rows)), wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"a": 1, "label": 2', "not JSON: Expecting ',' delimiter"),
        ("[1, 2]", "not a JSON object"),
        ("3", "not a JSON object"),
        ('{"a": 1}', "'label' is missing"),
        ('{"a": null, "label": 2}', "'a' is missing"),
        ('{"a": "x", "label": 2}', "'a' is 'x', not a number"),
        ('{"a": [1], "label": 2}', "'a' is [1], not a number"),
        ('{"a": {"b": 1}, "label": 2}', "'a' is {\"b\": 1}, not a number"),
        ('{"a": 1, "label": 2.5}', "'label' is 2.5, not int64"),
        ('{"a": 1, "label": 2} {"a": 1, "label": 2}', "not JSON: Extra data"),
        ('{"a": 1, "label": 2},{"a": 1, "label": 2}', "not JSON: Extra data"),
    ],
)
def test_json_that_is_not_as_it_should_be(engine, row, why):
    parser = JsonLines(target((0,), (1,)), 2, [engine], names=("a", "label"))
    data = f'{{"a": 1, "label": 2}}\n{row}\n'.encode()
    with pytest.raises(BulkParseError, match="no engine can parse these rows"):
        parser.bulk(data, 2)
    arrays, ((number, said),) = parser.parse_row_by_row(data)
    assert number == 1
    assert said.startswith(why)
    same(arrays, (np.array([[1]], F4), np.array([2])))


def test_a_parse_function_may_return_any_tree_of_arrays_and_tensors():
    def parse(rows):
        lengths = [len(row) for row in rows]
        return {"length": torch.tensor(lengths), "parts": (np.array([[n, n] for n in lengths], F4), None)}

    parser = Custom(parse)
    found = parser.bulk(b"a\r\nbcd\n\xc3\xa4\n", 3)
    assert found["length"].tolist() == [1, 3, 1]
    assert found["parts"][0].shape == (3, 2)
    assert found["parts"][1] is None
    assert len(leaves(found)) == 2
    twice = parsers.join_trees([found, found])
    assert twice["length"].tolist() == [1, 3, 1, 1, 3, 1]


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (5, "parse returned a int; its leaves must be arrays or tensors"),
        (["a"], "parse returned a str"),
        (np.array(["a", None]), "parse returned a ndarray"),
        (torch.tensor(5), "parse returned a Tensor"),
        ((np.zeros(2), np.zeros(3)), r"arrays of \[2, 3\] rows for 2 lines"),
        ((), r"arrays of \[\] rows"),
        (np.zeros(3), r"arrays of \[3\] rows for 2 lines"),
        (torch.zeros(2, dtype=torch.bfloat16), "parse returned a Tensor"),
    ],
)
def test_a_parse_function_that_returns_something_else(returned, why):
    with pytest.raises(StreamError, match=why):
        Custom(lambda rows: returned).bulk(b"1\n2\n", 2)


def test_bytes_that_are_no_utf_8_are_no_numbers():
    parser = Delimited(target(), 3, ENGINES)
    arrays, bad = parser.parse_row_by_row(b"1,2,3\n1,\xff,3\n")
    assert bad[0][0] == 1
    assert "not a number" in bad[0][1]
    same(arrays, (np.array([[1, 2]], F4), np.array([3])))


def test_dtypes():
    assert numpy_dtype(torch.float16, "dtype") == np.float16
    assert numpy_dtype("float64", "dtype") == F8
    assert numpy_dtype(torch.bool, "dtype") == BOOL
    for wrong in (torch.complex64, torch.bfloat16, str, "nothing", None):
        with pytest.raises(StreamError, match=r"dtype=.* is not a dtype of real numbers"):
            numpy_dtype(wrong, "dtype")


def test_engines(monkeypatch):
    assert engines("auto") == ENGINES
    assert engines("numpy") == ["numpy"]
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.csv", None)
    assert engines("auto") == ["numpy"]
    with pytest.raises(StreamError, match=r"pip install 'stocache\[text\]'"):
        engines("pyarrow")


@pytest.mark.parametrize("engine", ENGINES)
def test_good_rows_are_the_same_beside_bad_ones(engine):
    """What the bulk reader takes, care takes too, to the same values."""
    fixed = FixedWidth(target((0,), (2,)), 3, [engine], widths=(3, 2, 2))
    for parser, good in (
        (fixed, b"1  \xe9  7 \n"),
        (fixed, b"-0 ,, 7 \n"),
        (Delimited(target((0,), (1,)), 2, [engine], delimiter="\t", comments="#"), b"-0\t2\t# c\n"),
        (Delimited(target((0,), (1,)), 2, [engine], delimiter=None), b" -0\x0b2 \n"),
        (Delimited(target((0,), (1,)), 2, [engine], delimiter=","), b"1" * 400 + b",2\n"),
    ):
        alone, (beside, bad) = parser.bulk(good, 1), parser.parse_row_by_row(good + b"bad bad bad bad bad\n")
        assert len(bad) == 1
        same(beside, alone)
        assert np.signbit(beside[0]).tolist() == np.signbit(alone[0]).tolist()
    blank = Delimited(target((0,), (2,)), 3, [engine], delimiter=None)
    for bad in (b'"3" "4" 5\n', b"1\x002 3\n", b'"a b" 1 2\n'):
        with pytest.raises(BulkParseError, match="no engine can parse these rows"):
            blank.bulk(bad, 1)
        assert len(blank.parse_row_by_row(bad)[1]) == 1


def test_quotes_that_never_close_are_told():
    parser = Delimited(target((0,), (1,)), 3, ENGINES)
    _, bad = parser.parse_row_by_row(b'1,2,"a"\n3,4,"see\n1,2,b"c\n')
    assert [number for number, _ in bad] == [1]
