"""Parse rows of text to arrays, in bulk with pyarrow.

NOTE [ In bulk and row by row ]
    pyarrow parses all rows of a chunk at once. It refuses all of them if one is bad: it has a different number of fields, or
    a field is missing or is not a number. Only then Python parses them row by row; it finds out which row is bad and why. Both
    parse to float64 or int64 and then convert, as `numpy.loadtxt` does. So values are the same either way, to the last bit.
"""

import csv
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import StreamError
from stocache.samples.containers import leaves, tree_map
from stocache.text.arrow import NULLS, BulkParseError, ColumnArrays, collapse_blanks, csv_by_arrow, json_by_arrow

BadRows = list[tuple[int, str]]
"""Bad rows: the number of each in its chunk, and the reason."""

_PADDING = 1024  # blanks after the last field of fixed width that are parsed in bulk
_EXACT = 2**53  # from here on, float64 cannot hold every integer


@dataclass(frozen=True)
class Target:
    """Which fields of a row become features and labels, and their dtypes.

    Attributes:
        columns: numbers of the fields that are features.
        labels: numbers of the fields that are labels; None for features alone.
        single: True makes labels of shape (rows,), False (rows, labels).
        dtype, label_dtype: numpy dtypes.
        keep_nan: True makes a missing value NaN; False makes it an error.
    """

    columns: tuple[int, ...]
    labels: tuple[int, ...] | None
    single: bool
    dtype: Any
    label_dtype: Any
    keep_nan: bool

    @property
    def wanted(self) -> list[tuple[int, Any]]:
        """The number of every field that is used, and the dtype of its column."""
        return [(n, self.dtype) for n in self.columns] + [(n, self.label_dtype) for n in self.labels or ()]

    def assemble(self, columns: ColumnArrays) -> Any:
        """Return features of shape (rows, columns), and labels of shape (rows,) or (rows, labels).

        Raises:
            BulkParseError: a value is missing, or does not fit its dtype.
        """
        for (_, dtype), column in zip(self.wanted, columns, strict=True):
            self._check(column, dtype)
        count = len(self.columns)
        features = _stack(columns[:count], self.dtype)
        if self.labels is None:
            return features
        if self.single:
            return features, _stack(columns[count:], self.label_dtype)[:, 0]
        return features, _stack(columns[count:], self.label_dtype)

    def _check(self, column: NDArray[Any], dtype: Any) -> None:
        if column.dtype.kind == "f" and not (self.keep_nan and dtype.kind == "f") and np.isnan(column.min(initial=0)):
            raise BulkParseError("a value is missing")
        if dtype.kind != "f" and len(column):
            low, high = _range(dtype)
            exact = column.dtype.kind != "f" or ((column == np.rint(column)).all() and (abs(column) < _EXACT).all())
            if not exact or column.min() < low or column.max() > high:
                raise BulkParseError(f"a value is not {dtype}")


def _range(dtype: Any) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, min(np.iinfo(dtype).max, 2**63 - 1))


def _stack(columns: ColumnArrays, dtype: Any) -> NDArray[Any]:
    stacked = np.empty((len(columns[0]) if columns else 0, len(columns)), dtype)
    with np.errstate(over="ignore"):
        for number, column in enumerate(columns):
            stacked[:, number] = column
    return stacked


def _parsed_kind(dtype: Any) -> str:
    return "f8" if dtype.kind == "f" else "i8"


class RowParser(ABC):
    """Base class of parsers. Each subclass reads one format."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """What a good row looks like, for error messages."""

    @abstractmethod
    def bulk(self, data: bytes, rows: int) -> Any:
        """Return the arrays of all rows, or raise an error if one is bad.

        Args:
            data: the rows, each with its newline.
            rows: number of rows.
        """

    @abstractmethod
    def parse_row_by_row(self, data: bytes) -> tuple[Any, BadRows]:
        """Return the arrays of the good rows, and the bad rows."""


@dataclass
class FieldParser(RowParser):
    """Base class of parsers of rows that have fields.

    Attributes:
        target: which fields are used, and how.
        width: number of fields in a row.
    """

    target: Target
    width: int
    _floats: bool = field(default=False, compare=False)  # whether integers were written as 2.0 in the last chunk

    @abstractmethod
    def fields_of(self, row: str) -> list[Any]:
        """Return the fields of a row. Raises ValueError with the reason if the row is bad."""

    @abstractmethod
    def _bulk(self, data: bytes, kinds: list[tuple[int, str]]) -> ColumnArrays:
        """Return columns as "f8" or "i8". Raises BulkParseError, or an error of pyarrow."""

    def bulk(self, data: bytes, rows: int) -> Any:
        """Return the arrays of all rows. Raises BulkParseError if they cannot be parsed."""
        exact = [(n, _parsed_kind(dtype)) for n, dtype in self.target.wanted]
        has_integers = any(kind == "i8" for _, kind in exact)
        for floats in [self._floats, not self._floats] if has_integers else [False]:
            try:
                columns = self._bulk(data, [(n, "f8") for n, _ in exact] if floats else exact)
                if all(len(column) == rows for column in columns):
                    arrays = self.target.assemble(columns)
                    self._floats = floats
                    return arrays
            except Exception:  # pyarrow raises many kinds; parse_row_by_row finds the reason
                continue
        raise BulkParseError("these rows cannot be parsed in bulk")

    def parse_row_by_row(self, data: bytes) -> tuple[Any, BadRows]:  # noqa: D102
        bad: BadRows = []
        kept = []
        for number, row in enumerate(_split(data)):
            try:
                fields = self.fields_of(row)
                if len(fields) != self.width:
                    raise ValueError(f"{len(fields)} fields")
                kept.append([self._value(fields[n], n, dtype) for n, dtype in self.target.wanted])
            except ValueError as error:
                bad.append((number, str(error)))
        columns = [np.array([row[n] for row in kept], _parsed_kind(dtype)) for n, (_, dtype) in enumerate(self.target.wanted)]
        return self.target.assemble(columns), bad

    def _value(self, text: Any, number: int, dtype: Any) -> float | int:
        """Return a field as a number. Raises ValueError with the reason if it is missing or does not fit the dtype."""
        value = text.strip() if isinstance(text, str) else text
        if value is None or (isinstance(value, str) and value in NULLS) or value != value:
            if self.target.keep_nan and dtype.kind == "f":
                return math.nan
            raise ValueError(f"{self._column_name(number)} is missing")
        if isinstance(value, str):
            value = _to_number(value, dtype, self._column_name(number))
        elif not isinstance(value, int | float):
            raise ValueError(f"{self._column_name(number)} is {json.dumps(value)[:60]}, not a number")
        if dtype.kind == "f":
            if value != value:
                return self._value(None, number, dtype)
            try:
                return float(value)
            except OverflowError:  # an integer in JSON; in text it is inf already
                return math.copysign(math.inf, value)
        low, high = _range(dtype)
        if value != value or value in (math.inf, -math.inf) or value != int(value) or not low <= value <= high:
            raise ValueError(f"{self._column_name(number)} is {text!r:.60}, not {dtype}")
        return int(value)

    def _column_name(self, number: int) -> str:
        return f"column {number}"


def _to_number(text: str, dtype: Any, name: str) -> float | int:
    try:
        if "_" not in text:
            return int(text) if dtype.kind != "f" and text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        pass
    raise ValueError(f"{name} is {text!r:.60}, not a number")


@dataclass
class Delimited(FieldParser):
    """Fields between delimiters; with None, between white space."""

    delimiter: str | None = ","
    comments: str | None = None

    @property
    def expected(self) -> str:  # noqa: D102
        return f"{self.width} fields {'between white space' if self.delimiter is None else f'split at {self.delimiter!r}'}"

    def fields_of(self, row: str) -> list[Any]:  # noqa: D102
        return fields_of(row, self.delimiter, self.comments)

    def _bulk(self, data: bytes, kinds: list[tuple[int, str]]) -> ColumnArrays:
        if self.comments and self.comments.encode() in data:
            data = re.sub(rb"(?<![ \t])[ \t]*" + re.escape(self.comments.encode()) + rb"[^\n]*", b"", data)
        if self.delimiter is None:
            data = collapse_blanks(data)
        return csv_by_arrow(
            data, self.delimiter or " ", self.width, kinds, self.target.keep_nan, quotes=self.delimiter is not None
        )


def fields_of(row: str, delimiter: str | None, comments: str | None) -> list[str]:
    """Return the fields of a row of delimited text."""
    if comments:
        row = row.partition(comments)[0].rstrip(" \t") if comments in row else row
    if delimiter is None:
        return row.split()
    if '"' not in row:
        return row.split(delimiter)
    try:
        return next(csv.reader([row], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise ValueError(str(error)) from None


@dataclass
class FixedWidth(FieldParser):
    """Fields of fixed widths in bytes, padded with blanks."""

    widths: tuple[int, ...] = ()

    @property
    def expected(self) -> str:  # noqa: D102
        return f"fields of {', '.join(map(str, self.widths))} bytes"

    def fields_of(self, row: str) -> list[Any]:  # noqa: D102
        data, ends = row.encode(errors="surrogateescape"), np.cumsum(self.widths)
        if data[ends[-1] :].strip():
            raise ValueError(f"{len(data)} bytes")
        return [data[end - width : end].decode(errors="replace") for end, width in zip(ends, self.widths, strict=True)]

    def _bulk(self, data: bytes, kinds: list[tuple[int, str]]) -> ColumnArrays:
        # rewrites the wanted fields as delimited text, which pyarrow reads
        array = np.frombuffer(data, np.uint8)
        newlines = np.flatnonzero(array == 10)
        lengths = np.diff(newlines, prepend=-1) - 1
        if lengths.max() > sum(self.widths) + _PADDING:  # every row would be padded to this length
            raise BulkParseError("a row is far too long")
        padded = np.full((len(lengths), max(int(lengths.max()), sum(self.widths))), 32, np.uint8)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = array[array != 10]
        padded[padded == 13] = 32
        ends = np.cumsum(self.widths)
        if (padded[:, ends[-1] :] != 32).any():
            raise BulkParseError("a row is too long")
        mark = np.full((len(lengths), 1), ord(","), np.uint8)
        parts = [part for n, _ in kinds for part in (padded[:, ends[n] - self.widths[n] : ends[n]], mark)]
        parts[-1] = np.full_like(mark, 10)
        data = np.concatenate(parts, axis=1).tobytes()
        if data.count(b",") != len(lengths) * (len(kinds) - 1):
            raise BulkParseError("a field contains a comma")
        kinds = [(n, kind) for n, (_, kind) in enumerate(kinds)]
        return csv_by_arrow(data, ",", len(kinds), kinds, self.target.keep_nan, quotes=False)


@dataclass
class JsonLines(FieldParser):
    """Rows that are JSON objects; ``names`` are the keys of the fields."""

    names: tuple[str, ...] = ()

    @property
    def expected(self) -> str:  # noqa: D102
        return f"a JSON object with {', '.join(self.names[n] for n, _ in self.target.wanted)}"

    def fields_of(self, row: str) -> list[Any]:  # noqa: D102
        try:
            found = json.loads(row)
        except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        return [found.get(name) for name in self.names]

    def _column_name(self, number: int) -> str:
        return repr(self.names[number])

    def _bulk(self, data: bytes, kinds: list[tuple[int, str]]) -> ColumnArrays:
        return json_by_arrow(data, [(self.names[n], kind) for n, kind in kinds])


@dataclass
class Custom(RowParser):
    """Rows that a function of the user parses. It takes lines without line ends, and returns arrays with one row each."""

    function: Callable[[list[str]], Any]
    audit: bool = True

    @property
    def expected(self) -> str:  # noqa: D102
        return "a row that the parse function takes"

    def bulk(self, data: bytes, rows: int) -> Any:
        """Return the arrays of all rows. Errors of the function pass through."""
        return _checked_arrays(self.function(_split(data)), rows)

    def parse_row_by_row(self, data: bytes) -> tuple[Any, BadRows]:
        """Return the arrays of the rows that the function can parse one by one, and the bad rows."""
        bad: BadRows = []
        kept = []
        for number, row in enumerate(_split(data)):
            try:
                _checked_arrays(self.function([row]), 1)
                kept.append(row)
            except Exception as error:  # of the function
                bad.append((number, f"{type(error).__name__}: {error}"))
        return _checked_arrays(self.function(kept), len(kept)) if kept else None, bad


def _split(data: bytes) -> list[str]:
    return [row.removesuffix("\r") for row in data.decode(errors="surrogateescape").split("\n")[:-1]]


def join_trees(trees: Sequence[object]) -> Any:
    """Concatenate the arrays of trees that have the same structure."""
    if len(trees) == 1:
        return trees[0]
    columns = zip(*map(leaves, trees), strict=True)
    arrays = iter([np.concatenate(column) for column in columns])
    return tree_map(lambda leaf: next(arrays), trees[0])


def _checked_arrays(tree: object, rows: int) -> Any:
    """Return the result of a parse function, with arrays in place of tensors.

    Raises:
        StreamError: it contains something else, or nothing, or a different number of rows.
    """

    def array_of(leaf: object) -> NDArray[Any]:
        try:
            array = np.ascontiguousarray(leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf)
            torch.from_numpy(array[:0])
        except (TypeError, ValueError):
            array = None
        if array is None or not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim == 0:
            kind = "array of objects" if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject else type(leaf).__name__
            raise StreamError(f"parse returned a {kind}; its leaves must be arrays or tensors of numbers, one row a line.")
        return array

    tree = tree_map(array_of, tree)
    found = {len(leaf) for leaf in leaves(tree)}
    if found != {rows}:
        raise StreamError(f"parse returned arrays of {sorted(found)} rows for {rows} lines.")
    return tree


def numpy_dtype(dtype: Any, name: str) -> Any:
    """Return a dtype of torch or numpy as a numpy dtype.

    Raises:
        StreamError: it is not a dtype, or not one of real numbers that numpy has.
    """
    try:
        from_torch = isinstance(dtype, torch.dtype)
        known = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype if from_torch else dtype
        found = None if dtype is None else np.dtype(known)
        torch.from_numpy(np.empty(0, found))
    except TypeError:
        found = None
    if found is None or found.kind not in "fiub":
        raise StreamError(f"{name}={dtype!r} is not a dtype of real numbers. Use for example torch.float32 or torch.int64.")
    return found
