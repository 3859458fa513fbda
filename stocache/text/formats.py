"""The formats of text: which lines are rows, which fields a row has, and which parser reads them.

A format is checked twice: by itself when it is made, and against the header and the first row when `TextFormat.parser` is
called.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any, ClassVar, Literal, TypedDict

import torch

from stocache.errors import StreamError
from stocache.system.hashing import callable_text
from stocache.system.limits import parse_size
from stocache.system.on_error import OnError, Retry, Skip, of_word, parse_on_error
from stocache.text.lines import Lines
from stocache.text.options import check_choice, check_integer
from stocache.text.parsers import Custom, Delimited, FixedWidth, JsonLines, RowParser, Target, fields_of, numpy_dtype

Column = int | str

_LONGEST_LINE = "16MiB"
_IDENTITY = {
    "kind": None,
    "delimiter": "\t",
    "widths": None,
    "columns": None,
    "label_columns": -1,
    "dtype": torch.float32,
    "label_dtype": torch.int64,
    "comments": "#",
    "nan": "error",
    "parse": None,
}
"""The fields that `TextFormat.identity` is made of, with the value of a format that lacks one. States and caches keep it."""


@dataclass(frozen=True, kw_only=True)
class TextFormat(ABC):
    """Base class of formats: which lines of a file are rows, and what happens to bad ones.

    Attributes:
        skip_header: lines at the beginning of each file that are not rows.
        comments: marker of a comment; None for no comments. In delimited text a comment may follow the fields of a row; in
            other formats it is a line of its own.
        on_error: "raise" stops at a bad line. "skip" leaves bad lines out, counts them and reports them; a `Skip` does so for
            up to a share of the lines of an epoch, which is checked at its end. A `Retry` reads a file again that could not be
            read. A list has one of each.
        max_line_bytes: limit for the length of a line, as a number of bytes or a size such as "64MiB". Comments, blank lines
            and headers are limited, too. A longer line is a bad line; in a header it is always an error. Reading a buffer
            takes about 16 MiB and a few lines of this length.

    Raises:
        StreamError: an argument is wrong, or two contradict each other.
        LimitError: ``max_line_bytes`` is a string that is not a size.
    """

    kind: ClassVar[str | None] = None

    skip_header: int = 0
    comments: str | None = "#"
    on_error: Literal["raise", "skip"] | OnError = "raise"
    max_line_bytes: int | str = _LONGEST_LINE

    def __post_init__(self) -> None:
        check_integer("skip_header", self.skip_header, 0)
        if self.comments is not None and not (isinstance(self.comments, str) and self.comments.strip()):
            raise StreamError(f"comments={self.comments!r} marks nothing. Use None for no comments.")
        if isinstance(self.on_error, str):
            check_choice("on_error", self.on_error, ("raise", "skip"))
        parse_on_error(of_word(self.on_error))
        _line_limit(self.max_line_bytes)

    @abstractmethod
    def parser(self, lines: Lines) -> RowParser:
        """Return the parser of these lines.

        Raises:
            StreamError: the first row does not fit the format, or a column is missing.
        """

    @property
    def skips(self) -> bool:
        """Whether bad lines are left out."""
        return self.skip is not None

    @property
    def skip(self) -> Skip | None:
        """How many bad lines may be left out; None if none may."""
        return parse_on_error(of_word(self.on_error))[1]

    @property
    def retry(self) -> Retry | None:
        """When a file that could not be read is read again; None for never."""
        return parse_on_error(of_word(self.on_error))[0]

    @property
    def line_limit(self) -> int:
        """``max_line_bytes`` as a number of bytes."""
        return _line_limit(self.max_line_bytes)

    @property
    def white_delimiter(self) -> str | None:
        """The delimiter, which may be white space; None for a format without one."""
        return None

    @property
    def identity(self) -> str:
        """A text that is equal only for formats that parse rows alike.

        A function of a module is identified by its name. A lambda, a function within a function and one of the main script
        are identified by their code and by the values they close over. Any other callable is identified by its class.
        """
        values = {name: getattr(self, name, default) for name, default in _IDENTITY.items()}
        if values["parse"] is not None:
            values["parse"] = callable_text(values["parse"])
        return repr(list(values.values()))

    @property
    def skip_identity(self) -> str:
        """A text that identifies the lines that are left out. It has a line limit of the user's only if lines are skipped."""
        limited = self.skips and self.line_limit != _line_limit(_LONGEST_LINE)
        kind = "skip" if self.skips else "raise"
        return f"{kind} {self.line_limit}" if limited else kind


@dataclass(frozen=True, kw_only=True)
class ColumnFormat(TextFormat):
    """Base class of formats whose rows have fields. The fields become features and labels.

    Attributes:
        columns: the features, as numbers from 0 or names. Names are the names in the last line of the header, or JSON keys.
            None for all fields that are not labels.
        label_columns: the labels. A number or a name makes labels of shape (batch,), a sequence makes (batch, labels), and
            None makes batches of features alone.
        dtype, label_dtype: of the tensors, from torch or numpy.
        nan: "error" makes a missing value ("", NA, nan, null, …) an error. "keep" makes it NaN if the dtype has one.
    """

    columns: Sequence[Column] | None = None
    label_columns: Column | Sequence[Column] | None = -1
    dtype: Any = torch.float32
    label_dtype: Any = torch.int64
    nan: Literal["error", "keep"] = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.columns, str | int):
            raise StreamError(f"columns={self.columns!r} is one column. Give a list: columns=[{self.columns!r}].")
        for name, columns in (("columns", self.columns), ("label_columns", self._label_list)):
            if columns is not None and not (isinstance(columns, Sequence) and all(map(_is_column, columns))):
                raise StreamError(f"{name}={columns!r} must be column numbers or names.")
        numpy_dtype(self.dtype, "dtype")
        numpy_dtype(self.label_dtype, "label_dtype")
        check_choice("nan", self.nan, ("error", "keep"))

    @property
    def _label_list(self) -> Sequence[Column] | None:
        return [self.label_columns] if isinstance(self.label_columns, int | str) else self.label_columns

    @property
    def _asked(self) -> list[Column]:
        return [*(self.columns or ()), *(self._label_list or ())]

    def _target(self, path: str, names: Sequence[str], width: int, describe: Callable[[], str]) -> Target:
        """Return the target of rows of ``width`` fields; ``describe`` returns the first row for an error message."""

        def numbers_of(columns: Sequence[Column] | None) -> tuple[int, ...] | None:
            return None if columns is None else tuple(number_of(column) for column in columns)

        def number_of(column: Column) -> int:
            if isinstance(column, str):
                if column not in names:
                    raise StreamError(f"there is no column {column!r}. The header has {list(names)}.")
                return names.index(column)
            if not -width <= column < width:
                raise StreamError(f"there is no column {column}. {path}: {describe()}.")
            return column % width

        labels, columns = numbers_of(self._label_list), numbers_of(self.columns)
        if columns is None:
            columns = tuple(n for n in range(width) if n not in (labels or ()))
        if not columns or labels == ():
            raise StreamError(f"{path}: no column is left for the features, or the labels: {describe()}.")
        dtypes = numpy_dtype(self.dtype, "dtype"), numpy_dtype(self.label_dtype, "label_dtype")
        return Target(columns, labels, isinstance(self.label_columns, int | str), *dtypes, self.nan == "keep")

    def _header(self, lines: Lines) -> str | None:
        """Return the header if columns are named; else None.

        Raises:
            StreamError: columns are named, but the files have no header.
        """
        if not any(isinstance(column, str) for column in self._asked):
            return None
        header = lines.header()
        if not header:
            raise StreamError(
                f"columns {self._asked} are named, but there is no header. Pass skip_header=1, or give numbers from 0."
            )
        return header


@dataclass(frozen=True)
class CsvFormat(ColumnFormat):
    """Rows of fields between delimiters: CSV, TSV or white space.

        CsvFormat(",", skip_header=1, columns=["weight", "height"], label_columns="kind")

    A field may be quoted, but may not contain a line end.

    Attributes:
        delimiter: one ASCII character; None for any white space.

    Examples:
        >>> np.savetxt("people.csv", [[180, 75, 0], [165, 60, 1]], "%g", delimiter=",", header="cm,kg,kind", comments="")
        >>> people = CsvFormat(",", skip_header=1, columns=["kg"], label_columns="kind")
        >>> with StreamLoader("people.csv", batch_size=2, buffer_size=2, format=people) as loader:
        ...     x, y = next(iter(loader))
        >>> x.tolist(), y.tolist()
        ([[75.0], [60.0]], [0, 1])
    """

    delimiter: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delimiter is None:
            return
        if (
            not isinstance(self.delimiter, str)
            or len(self.delimiter) != 1
            or ord(self.delimiter) > 127
            or self.delimiter in '"\r\n'
        ):
            raise StreamError(f"delimiter={self.delimiter!r} is not a single ASCII character. Use CustomFormat for such rows.")

    @property
    def white_delimiter(self) -> str | None:  # noqa: D102
        return self.delimiter

    def parser(self, lines: Lines) -> RowParser:  # noqa: D102
        path, first = lines.files[0].path, _first_row(lines)
        fields, header = self._fields(first, path), self._header(lines)
        names = None if header is None else self._fields(header.lstrip((self.comments or "") + " "), "the header")
        if names is not None and len(names) != len(fields):
            raise StreamError(
                f"{path}: the header has {len(names)} names, the first row {len(fields)} fields: {first!r:.200}. "
                f"Is {self.delimiter!r} the delimiter? skip_header counts lines."
            )
        names = [name.strip() for name in names or ()]
        target = self._target(path, names, len(fields), lambda: self._description(first, len(fields)))
        return Delimited(target, len(fields), delimiter=self.delimiter, comments=self.comments)

    def _fields(self, line: str, where: str) -> list[str]:
        try:
            return fields_of(line, self.delimiter, self.comments)
        except ValueError as error:
            raise StreamError(f"{where}: {line!r:.200}: {error}") from None

    def _description(self, first: str, width: int) -> str:
        """Describe the first row; name a different delimiter if it would split a row that has one field."""
        counts = {mark: first.count(mark) + 1 for mark in (",", "\t", ";", " ")} | {None: len(first.split())}
        likely = max(counts, key=lambda mark: counts[mark])
        hint = f" (delimiter={likely!r} would make {counts[likely]})" if width == 1 and counts[likely] > 1 else ""
        return f"the first row has {width} fields split at {self.delimiter!r}: {first!r:.200}{hint}"


@dataclass(frozen=True)
class FixedWidthFormat(ColumnFormat):
    """Rows of fields that have the same width in every row, padded with blanks.

    Attributes:
        widths: of the fields, in bytes.

    Examples:
        >>> np.savetxt("rows.txt", ["1.75  7 0", " 0.5 12 1"], "%s")
        >>> with StreamLoader("rows.txt", batch_size=2, buffer_size=2, format=FixedWidthFormat([4, 3, 2])) as loader:
        ...     x, y = next(iter(loader))
        >>> x.tolist(), y.tolist()
        ([[1.75, 7.0], [0.5, 12.0]], [0, 1])
    """

    kind: ClassVar[str | None] = "fixed"

    widths: Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.widths, Sequence) or not self.widths or not all(type(w) is int and w > 0 for w in self.widths):
            raise StreamError(f"widths={self.widths!r} must be numbers of bytes above 0.")

    def parser(self, lines: Lines) -> RowParser:  # noqa: D102
        first, header = _first_row(lines), self._header(lines)
        spans = [slice(end - width, end) for end, width in zip(accumulate(self.widths), self.widths, strict=True)]
        names = [] if header is None else [header[span].strip() for span in spans]
        width = len(self.widths)
        target = self._target(lines.files[0].path, names, width, lambda: f"rows have {width} fields: {first!r:.200}")
        return FixedWidth(target, width, widths=tuple(self.widths))


@dataclass(frozen=True)
class JsonLinesFormat(ColumnFormat):
    """Rows that are JSON objects. Columns are named by their keys, or numbered as in the first row.

    Examples:
        >>> np.savetxt("rows.jsonl", ['{"kind": 0, "height": 1.5}', '{"kind": 1, "height": 1.75}'], "%s")
        >>> rows = JsonLinesFormat(columns=["height"], label_columns="kind")
        >>> with StreamLoader("rows.jsonl", batch_size=2, buffer_size=2, format=rows) as loader:
        ...     x, y = next(iter(loader))
        >>> x.tolist(), y.tolist()
        ([[1.5], [1.75]], [0, 1])
    """

    kind: ClassVar[str | None] = "jsonl"

    def parser(self, lines: Lines) -> RowParser:  # noqa: D102
        path, first = lines.files[0].path, _first_row(lines)
        try:
            found = json.loads(first)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise StreamError(f"{path}: the first row is not a JSON object: {first!r:.200}")
        keys = tuple(found)
        for name in self._asked:
            if isinstance(name, str) and name not in keys:
                raise StreamError(f"{path}: the first row has no {name!r}; it has {list(keys)}.")
        target = self._target(path, keys, len(keys), lambda: f"the first row has {list(keys)}")
        return JsonLines(target, len(keys), names=keys)


@dataclass(frozen=True)
class CustomFormat(TextFormat):
    """Rows that a function parses.

    Attributes:
        parse: takes a list of lines, and returns arrays or tensors, or a tree of them, with one row for each line. The rows
            of an array have the same shape for all lines.
        audit: whether one buffer that is cached is parsed again in each epoch, to notice that ``parse`` yields other rows.

    Examples:
        >>> np.savetxt("points.txt", ["1/2", "3/4"], "%s")
        >>> points = CustomFormat(lambda lines: np.array([line.split("/") for line in lines], dtype=np.int64))
        >>> with StreamLoader("points.txt", batch_size=2, buffer_size=2, format=points) as loader:
        ...     print(list(loader))
        [tensor([[1, 2],
                [3, 4]])]
    """

    parse: Callable[[list[str]], Any]
    audit: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.parse):
            raise StreamError(f"parse={self.parse!r} is not a function.")

    def parser(self, lines: Lines) -> RowParser:  # noqa: D102
        return Custom(self.parse, self.audit)


def _is_column(column: Any) -> bool:
    return isinstance(column, str | Integral) and not isinstance(column, bool)


def _first_row(lines: Lines) -> str:
    """Return the first row of all files.

    Raises:
        StreamError: there is no row.
    """
    first = lines.first_row().decode(errors="replace")
    if not first:
        raise StreamError(f"{lines.files[0].path}: no line holds data.")
    return first


def _line_limit(size: int | str) -> int:
    """Return ``max_line_bytes`` as a number of bytes.

    Raises:
        LimitError: it is a string that is not a size.
        StreamError: it is not a size of at least one byte.
    """
    found = parse_size(size, "max_line_bytes") if isinstance(size, str) and not size.strip().isdecimal() else size
    if isinstance(found, str):
        found = int(found)
    if type(found) is not int or found < 1:
        raise StreamError(f"max_line_bytes={size!r} must be at least 1 byte: a number of bytes, or a size such as '64MiB'.")
    return found


class CsvArguments(TypedDict, total=False):
    """Fields of a `CsvFormat` that `StreamLoader` takes directly, in place of a format."""

    delimiter: str | None
    skip_header: int
    columns: Sequence[Column] | None
    label_columns: Column | Sequence[Column] | None
