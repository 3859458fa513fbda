"""What the fields of a row are, as the user says it, held against the header and the first row of the files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from stocache.errors import StreamError
from stocache.system.function_hash import callable_text
from stocache.text.engines import engines
from stocache.text.lines import Lines
from stocache.text.parsers import Custom, Delimited, FixedWidth, JsonLines, RowParser, Target, fields_of, numpy_dtype

Column = int | str
Format = Literal["delimited", "fixed", "jsonl"]


@dataclass(frozen=True)
class Schema:
    """The arguments of `StreamLoader` that say how rows are parsed.

    Raises:
        StreamError: they contradict each other.
    """

    format: Format | None
    delimiter: str | None
    widths: Sequence[int] | None
    columns: Sequence[Column] | None
    label_columns: Column | Sequence[Column] | None
    dtype: Any
    label_dtype: Any
    comments: str | None
    nan: Literal["error", "keep"]
    parse: Callable[[list[str]], Any] | None
    engine: Literal["auto", "pyarrow", "numpy"]

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or ord(self.delimiter) > 127 or self.delimiter in '"\r\n'):
            raise StreamError(f"delimiter={self.delimiter!r} is no single ASCII character. Use parse=… for rows of that kind.")
        if self.comments is not None and (not self.comments or self.comments.isspace()):
            raise StreamError(f"comments={self.comments!r} marks nothing. Use None for no comments.")
        if self.parse is not None and self.format is not None:
            raise StreamError(f"parse and format={self.format!r} are two ways to parse. Give one.")
        if (self.widths is None) == (self.format == "fixed"):
            raise StreamError(
                f"format={self.format!r} with widths={self.widths}: widths are for format='fixed', which needs them."
            )
        if self.widths is not None and not (len(self.widths) and all(isinstance(w, int) and w > 0 for w in self.widths)):
            raise StreamError(f"widths={self.widths} are no positive numbers of bytes.")
        if isinstance(self.columns, str | int):
            raise StreamError(f"columns={self.columns!r} is one column. Give a list: columns=[{self.columns!r}].")
        numpy_dtype(self.dtype, "dtype")
        numpy_dtype(self.label_dtype, "label_dtype")
        engines(self.engine)

    def parser(self, lines: Lines) -> RowParser | Custom:
        """Return what parses these lines.

        Raises:
            StreamError: a column is missing in the header or the first row.
        """
        if self.parse is not None:
            return Custom(self.parse)
        first = lines.first_row().decode(errors="replace")
        where, names = lines.files[0].path, self._names(lines)
        if not first:
            raise StreamError(f"{where}: no line holds data.")
        if self.format == "jsonl":
            try:
                found = json.loads(first)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise StreamError(f"{where}: the first row is no JSON object: {first!r:.200}")
            return self._json(where, list(found))
        fields = list(self.widths) if self.widths is not None else self._fields(first, where)
        if names and len(names) != len(fields):
            found = f"{where}: the header has {len(names)} names, the first row {len(fields)} fields"
            raise StreamError(f"{found}: {first!r:.200}. Is {self.delimiter!r} the delimiter? skip_header counts lines.")
        target = self._target(names, len(fields), where, lambda: self._seen(first, len(fields)))
        if self.widths is not None:
            return FixedWidth(target, len(fields), engines(self.engine), widths=tuple(self.widths))
        return Delimited(target, len(fields), engines(self.engine), delimiter=self.delimiter, comments=self.comments)

    @property
    def white_delimiter(self) -> str | None:
        """The delimiter, where it is one of text that may be white space."""
        return self.delimiter if self.parse is None and self.format in (None, "delimited") else None

    @property
    def identity(self) -> str:
        """What parsed rows follow from, apart from the text.

        A function of a module is its name. A lambda, one within a function and one of the script that runs are their code,
        too, and what they close over: many have one name. Of another callable it is the class: change ``fingerprint`` when
        what it parses changes.
        """
        parse = None if self.parse is None else callable_text(self.parse)
        return repr([parse if name == "parse" else value for name, value in vars(self).items() if name != "engine"])

    @property
    def _label_list(self) -> list[Column] | None:
        if self.label_columns is None:
            return None
        return [self.label_columns] if isinstance(self.label_columns, int | str) else list(self.label_columns)

    def _target(self, names: list[str], width: int, where: str, seen: Callable[[], str]) -> Target:
        """Return what is made of rows of so many fields; ``seen``: says what the first row looks like."""
        labels = self._numbers(self._label_list, names, width, where, seen)
        columns = self._numbers(self.columns, names, width, where, seen)
        if columns is None:
            columns = tuple(n for n in range(width) if n not in (labels or ()))
        if not columns or labels == ():
            raise StreamError(f"{where}: no column is left for the features, or the labels: {seen()}.")
        dtypes = numpy_dtype(self.dtype, "dtype"), numpy_dtype(self.label_dtype, "label_dtype")
        return Target(columns, labels, isinstance(self.label_columns, int | str), *dtypes, self.nan == "keep")

    def _names(self, lines: Lines) -> list[str]:
        """Return the names of the columns, where columns are named."""
        asked = [*(self.columns or ()), *(self._label_list or ())]
        if self.format == "jsonl" or not any(isinstance(column, str) for column in asked):
            return []
        header = lines.header()
        if not header:
            raise StreamError(f"columns {asked} are named, but there is no header. Say skip_header=1, or give numbers from 0.")
        if self.widths is not None:
            ends = list(accumulate(self.widths))
            return [header[end - width : end].strip() for end, width in zip(ends, self.widths, strict=True)]
        return [name.strip() for name in self._fields(header.lstrip((self.comments or "") + " "), "the header")]

    def _fields(self, line: str, where: str) -> list[str]:
        try:
            return fields_of(line, self.delimiter, self.comments)
        except ValueError as error:
            raise StreamError(f"{where}: {line!r:.200}: {error}") from None

    def _json(self, where: str, keys: list[str]) -> JsonLines:
        for name in [*(self.columns or ()), *(self._label_list or ())]:
            if isinstance(name, str) and name not in keys:
                raise StreamError(f"{where}: the first row has no {name!r}; it has {keys}.")
        target = self._target(keys, len(keys), where, lambda: f"the first row has {keys}")
        return JsonLines(target, len(keys), engines(self.engine), names=tuple(keys))

    def _numbers(
        self, columns: Sequence[Column] | None, names: list[str], width: int, where: str, seen: Callable[[], str]
    ) -> tuple[int, ...] | None:
        """Return columns as their numbers."""
        if columns is None:
            return None
        found = []
        for column in columns:
            if isinstance(column, str):
                if column not in names:
                    raise StreamError(f"there is no column {column!r}. The header has {names}.")
                found.append(names.index(column))
            elif -width <= column < width:
                found.append(column % width)
            else:
                raise StreamError(f"there is no column {column}. {where}: {seen()}.")
        return tuple(found)

    def _seen(self, first: str, width: int) -> str:
        """Say what the first row looks like."""
        seen = f"the first row has {width} fields split at {self.delimiter!r}: {first!r:.200}"
        counts = {mark: first.count(mark) + 1 for mark in (",", "\t", ";", " ")} | {None: len(first.split())}
        likely = max(counts, key=lambda mark: counts[mark])
        if width == 1 and counts[likely] > 1:
            seen += f" (delimiter={likely!r} would make {counts[likely]})"
        return seen
