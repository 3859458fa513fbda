"""Rows parsed to arrays: in bulk and row by row they are equal to the values of Python, to the last bit."""

import json
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import StreamError
from stocache.text.arrow import BulkParseError
from stocache.text.parsers import Custom, Delimited, FixedWidth, JsonLines, Target
from tests.support.equality import same

F4, F8, I8, U1, BOOL = (np.dtype(name) for name in ("f4", "f8", "i8", "u1", "?"))


def target(columns=(0, 1), labels=(2,), single=True, dtype=F4, label_dtype=I8, keep_nan=False):
    return Target(tuple(columns), labels, single, dtype, label_dtype, keep_nan)


def refused(parser, data, rows):
    with pytest.raises(BulkParseError, match="these rows cannot be parsed in bulk"):
        parser.bulk(data, rows)
    return parser.parse_row_by_row(data)


NUMBER = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=64).map(repr),
    st.decimals(-10, 10, places=4).map(str),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(["0.1", "1e-3", "-0", "1E5", ".5", "5.", "inf", "-inf", "0.30000000000000004", "179769313486231e294"]),
)
LARGE = [2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1]  # float64 does not hold each
LABEL = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from(LARGE), st.integers(-9, 9)).map(str)
SPACE = st.sampled_from([" ", "  ", "\t", " \t ", "     "])


@given(
    rows=st.lists(st.tuples(SPACE, NUMBER, SPACE, NUMBER, SPACE, LABEL, SPACE), min_size=1, max_size=12),
    delimiter=st.sampled_from([",", "\t", ";", " ", "|", None]),
    end=st.sampled_from(["\n", "\r\n"]),
    dtype=st.sampled_from([F4, F8]),
)
def test_numbers_are_those_that_python_reads(rows, delimiter, end, dtype):
    lines = ["".join(row) if delimiter is None else delimiter.join(row[1::2]) for row in rows]
    data = "".join(line + end for line in lines).encode()
    parser = Delimited(target(dtype=dtype), 3, delimiter=delimiter)
    labels = [int(row[5]) for row in rows]
    with np.errstate(over="ignore"):
        wanted = np.array([[float(row[1]), float(row[3])] for row in rows]).astype(dtype), np.array(labels)
    assert same(parser.bulk(data, len(rows)), wanted)
    arrays, bad = parser.parse_row_by_row(data)
    assert not bad
    assert same(arrays, wanted)


@given(rows=st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.integers(-100, 100), LABEL), min_size=1))
def test_json_lines(rows):
    more = {"text": "x,{}\n", "more": [1, {}]}
    data = "".join(json.dumps({"b": b, **(more if b > 0 else {}), "label": int(c), "a": a}) + "\n" for a, b, c in rows).encode()
    parser = JsonLines(target((0, 1), (2,), dtype=F8), 3, names=("a", "b", "label"))
    wanted = np.array([[a, b] for a, b, _ in rows], F8), np.array([int(c) for *_, c in rows])
    assert same(parser.parse_row_by_row(data)[0], wanted)
    assert same(parser.bulk(data, len(rows)), wanted)


WIDE, HALVES = b"1,a,2.5,b,3,7\n4,c,5.5,d,6,8\n", b"0.5,1,1.0\n0.25,2,0e0\n"
WIDTHS = b"  1.5 hello  7\n-12.25abc  123\n1     x     -4  \n   .5 y      9\r\n"
KINDS = [  # of good rows: the number of fields, what is taken of them, options of the parser, the rows, features, labels
    (6, target((4, 2, 2), (0, 5), False, F8), {}, WIDE, [[3, 2.5, 2.5], [6, 5.5, 5.5]], [[1, 7], [4, 8]]),
    (6, target((0, 2), None), {}, WIDE, [[1, 2.5], [4, 5.5]], None),
    *((3, target(label_dtype=kind), {}, HALVES, [[0.5, 1], [0.25, 2]], [1, 0]) for kind in (I8, U1, BOOL)),
    (3, target(dtype=U1, label_dtype=U1), {}, b"0,255,7\n", [[0, 255]], [7]),
    (3, target(), {"comments": "#"}, b"1,2,3 # three\n4,5,6#six\n", [[1, 2], [4, 5]], [3, 6]),
    (2, target((0,), (1,)), {"delimiter": "\t", "comments": "#"}, b"-0\t2\t# c\n", [[-0.0]], [2]),
    (2, target((0,), (1,)), {"delimiter": None}, b" -0\x0b2 \n", [[-0.0]], [2]),
    (2, target((0,), (1,)), {}, b"1" * 400 + b",2\n", [[inf]], [2]),
    (3, target((0,)), {"widths": (6, 5, 3)}, WIDTHS, [[1.5], [-12.25], [1], [0.5]], [7, 123, -4, 9]),
    (3, target((0,), (2,)), {"widths": (3, 2, 2)}, b"1  \xe9  7 \n-0 ,, 7 \n", [[1], [-0.0]], [7, 7]),
]


@pytest.mark.parametrize("at", range(len(KINDS)))
def test_good_rows_are_the_same_in_bulk_and_beside_a_bad_one(at):
    width, what, options, data, features, labels = KINDS[at]
    parser, rows = (FixedWidth if "widths" in options else Delimited)(what, width, **options), len(features)
    wanted = np.array(features, what.dtype)
    if what.labels:
        wanted = wanted, np.array(labels, what.label_dtype)
    for _ in range(2):  # also when it remembers how
        assert same(parser.bulk(data, rows), wanted)
    arrays, bad = parser.parse_row_by_row(data + b"bad bad bad bad bad\n")
    assert [number for number, _ in bad] == [rows]
    assert same(arrays, wanted)


def test_what_is_not_parsed_in_bulk_is_right_row_by_row():
    quoted = b'"1";"a;b";"2"\n3;x;4\n', (np.array([[1], [3]], F4), np.array([2, 4]))
    missing = b"1;;3\nNA;nan;4\nnull;5;6\n", (np.array([[1, nan], [nan, nan], [nan, 5]], F4), np.array([3, 4, 6]))
    for (data, wanted), what in ((quoted, target((0,))), (missing, target(keep_nan=True))):
        parser = Delimited(what, 3, delimiter=";")
        assert same(parser.bulk(data, data.count(b"\n")), wanted)
        assert same(parser.parse_row_by_row(data)[0], wanted)
    assert refused(parser, b"1;2;\n", 1)[1] == [(0, "column 2 is missing")]  # labels have no NaN
    arrays, bad = refused(FixedWidth(target((0,), (1,)), 2, widths=(2, 2)), b"1 2" + b" " * 1030 + b"\n3 4\n", 2)
    assert (arrays[1].tolist(), bad) == ([2, 4], [])  # a row that is longer than others does not widen them
    arrays, bad = refused(FixedWidth(target((0,), (1,)), 2, widths=(3, 2)), b"1,23 \n4  5 \n", 2)
    assert (arrays[1].tolist(), [number for number, _ in bad]) == ([5], [0])  # a comma is not the end of a field


BAD = {
    "1,2": "2 fields", "1,2,3,4": "4 fields", '1,2,"see': "unexpected end of data",
    "1,x,3": "column 1 is 'x', not a number", "1,nan,3": "column 1 is missing", "1,-NaN,3": "column 1 is missing",
    "1,2,3.5": "column 2 is '3.5', not int64", "1,2,9223372036854775808": "column 2 is '9223372036854775808', not int64",
    "1_0,2,3": "column 0 is '1_0', not a number", "1,2,0x1f": "column 2 is '0x1f', not a number",
    "1,\udcff,3": "column 1 is '\\udcff', not a number",
}  # fmt: skip
BAD_JSON = {
    '{"a": 1, "label": 2': "not JSON: Expecting ',' delimiter", '{"a": 1, "label": 2},{}': "not JSON: Extra data",
    "[1, 2]": "not a JSON object", '{"a": 1}': "'label' is missing", '{"a": null, "label": 2}': "'a' is missing",
    '{"a": "x", "label": 2}': "'a' is 'x', not a number", '{"a": [1], "label": 2}': "'a' is [1], not a number",
    '{"a": 1, "label": 2.5}': "'label' is 2.5, not int64",
}  # fmt: skip
BAD_WIDTHS = {"  1.5 hello  7 8": "16 bytes", "  1.5 hello": "column 2 is missing"}
BAD_BLANKS = {'"3" "4" 5': "column 0 is '\"3\"', not a number", "1\x002 3": "2 fields", '"a b" 1 2': "4 fields"}
BAD_BYTES = {
    "0,256,7": "column 1 is '256', not uint8", "-1,2,7": "column 0 is '-1', not uint8",
    "1,2.5,7": "column 1 is '2.5', not uint8", "1,2,300": "column 2 is '300', not uint8",
}  # fmt: skip
CSV, JSON = "1,2,3", '{"a": 1, "label": 3}'
PARSERS = {  # the parser, a good row, and bad ones
    "csv": (lambda: Delimited(target(), 3), CSV, BAD),
    "bytes": (lambda: Delimited(target(dtype=U1, label_dtype=U1), 3), CSV, BAD_BYTES),
    "blanks": (lambda: Delimited(target((0,), (2,)), 3, delimiter=None), "1 x 3", BAD_BLANKS),
    "widths": (lambda: FixedWidth(target((0,)), 3, widths=(6, 5, 3)), "  1.0 hello  3", BAD_WIDTHS),
    "json": (lambda: JsonLines(target((0,), (1,)), 2, names=("a", "label")), JSON, BAD_JSON),
}


@pytest.mark.parametrize("kind", PARSERS)
def test_bad_rows_are_refused_in_bulk_and_named_row_by_row(kind):
    make, good, rows = PARSERS[kind]
    parser = make()
    for row, why in rows.items():
        (features, labels), bad = refused(parser, f"{good}\n{row}\n{good}\n".encode(errors="surrogateescape"), 3)
        assert [(number, reason[: len(why)]) for number, reason in bad] == [(1, why)], row
        assert (features[:, 0].tolist(), labels.tolist()) == ([1, 1], [3, 3])


def test_a_parse_function_that_returns_something_else_is_an_error():
    for returned, why in (
        (5, "parse returned a int; its leaves must be arrays or tensors"),
        (np.array(["a", None]), "parse returned a array of objects"),
        (torch.tensor(5), "parse returned a Tensor"), ((np.zeros(2), np.zeros(3)), r"arrays of \[2, 3\] rows for 2 lines"),
    ):  # fmt: skip
        with pytest.raises(StreamError, match=why):
            Custom(lambda rows, returned=returned: returned).bulk(b"1\n2\n", 2)
