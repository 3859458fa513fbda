"""Parse rows of text in bulk with pyarrow: all rows of a chunk at once, or none.

With 2 threads pyarrow was the fastest of pyarrow, pandas, polars and numpy.loadtxt (`benchmark/notes/stream.md`, section
Engines), and it reads JSON, too.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stocache.errors import StreamError

ColumnArrays = list[NDArray[Any]]

NULLS = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"]
"""The texts that mean a missing value."""


class BulkParseError(Exception):
    """These rows cannot be parsed in bulk; row by row it may be possible."""


def check_arrow() -> None:
    """Raise StreamError if pyarrow is not installed."""
    try:
        import pyarrow.csv
        import pyarrow.json  # noqa: F401
    except ImportError as error:
        raise StreamError(f"a StreamLoader needs pyarrow ({error}): pip install 'stocache[text]'") from None


def csv_by_arrow(
    data: bytes, delimiter: str, width: int, kinds: list[tuple[int, str]], nulls: bool, quotes: bool
) -> ColumnArrays:
    """Return columns of delimited text.

    Args:
        width: number of fields in a row.
        kinds: number of each column, and "f8" or "i8".
        nulls: True makes missing values NaN.
        quotes: True allows quoted fields.
    """
    import pyarrow
    import pyarrow.csv

    if (b"x" in data or b"X" in data) and re.search(rb"0[xX]", data):
        raise BulkParseError("a number may be hexadecimal")  # pyarrow reads these as integers, Python does not
    types = {"f8": pyarrow.float64(), "i8": pyarrow.int64()}
    names = [str(n) for n in range(width)]
    table = pyarrow.csv.read_csv(
        pyarrow.BufferReader(data),
        pyarrow.csv.ReadOptions(column_names=names, use_threads=False, block_size=min(len(data) + 1, 2**31 - 1)),
        pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char='"' if quotes and b'"' in data else False),
        pyarrow.csv.ConvertOptions(
            column_types={str(n): types[kind] for n, kind in kinds},
            include_columns=list(dict.fromkeys(str(n) for n, _ in kinds)),
            null_values=NULLS if nulls else [],  # without them a missing value is an error, which is faster
            check_utf8=False,
        ),
    )
    return [_from_arrow(table.column(str(n)), kind) for n, kind in kinds]


def json_by_arrow(data: bytes, kinds: list[tuple[str, str]]) -> ColumnArrays:
    """Return columns of JSON objects; ``kinds`` has the key of each column, and "f8" or "i8"."""
    import pyarrow
    import pyarrow.json

    types = {"f8": pyarrow.float64(), "i8": pyarrow.int64()}
    table = pyarrow.json.read_json(
        pyarrow.BufferReader(data),
        pyarrow.json.ReadOptions(use_threads=False, block_size=min(len(data) + 1, 2**31 - 1)),
        pyarrow.json.ParseOptions(
            explicit_schema=pyarrow.schema([(name, types[kind]) for name, kind in kinds]), unexpected_field_behavior="ignore"
        ),
    )
    return [_from_arrow(table.column(name), kind) for name, kind in kinds]


def _from_arrow(column: Any, kind: str) -> NDArray[Any]:
    if kind == "i8" and column.null_count:
        raise BulkParseError("a value is missing")
    return np.asarray(column.to_numpy())


def collapse_blanks(data: bytes) -> bytes:
    """Return the rows with one blank between fields, and no blank before or after them."""
    array = np.frombuffer(data, np.uint8)
    blank = (array == 32) | ((array >= 9) & (array <= 13) & (array != 10))
    before = np.append(True, blank[:-1] | (array[:-1] == 10))
    kept = ~(blank & before)
    array, blank = array[kept], blank[kept]
    kept = ~(blank & np.append(array[1:] == 10, True))
    return bytes(np.where(blank, np.uint8(32), array)[kept].tobytes())
