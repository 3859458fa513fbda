"""Find the rows among lines of text: leave out blank lines and comments."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]
_Bits = NDArray[np.bool_]
LineNumbers = NDArray[np.int64]

_BLANKS = " \t\v\f\r"
_IS_BLANK = np.isin(np.arange(256), list(_BLANKS.encode()))
_BLOCK = 1 << 20  # bytes of text that are searched line by line at a time


class FoundRows(NamedTuple):
    """The rows among some whole lines.

    Attributes:
        data: text of the rows, each with its newline.
        nbytes: length of all the lines.
        lines: number of lines.
        rows: number of rows.
        numbers: indices of the lines that are rows; None if all are.
    """

    data: bytes
    nbytes: int
    lines: int
    rows: int
    numbers: LineNumbers | None


class RowFinder:
    """Finds rows; see NOTE [ Rows and lines ].

    Args:
        comments: marker of a line that is a comment; None for no comments.
        delimiter: white space that makes a line a row; a different delimiter, or None, has no effect.
    """

    def __init__(self, comments: str | None, delimiter: str | None) -> None:
        self._marker = comments.encode() if comments else b""
        self._delimiter = ord(delimiter) if delimiter is not None and delimiter in _BLANKS else -1

    def find(self, text: bytes, size: int, want: int) -> FoundRows:
        """Return the first ``want`` rows in the first ``size`` bytes of a text, which are whole lines.

        Takes a twentieth of the time of parsing, unless a line begins with white space or the text has a comment.
        """
        if not size:
            return FoundRows(b"", 0, 0, 0, None)
        array = np.frombuffer(text, np.uint8, size)
        is_newline = array == 10
        has_comment = self._marker and text.find(self._marker, 0, size) >= 0
        if array[0] > 32 and not has_comment and not (is_newline[:-1] & (array[1:] <= 32)).any():
            rows = int(np.count_nonzero(is_newline))
            if rows > want:
                rows, size = want, _nth(is_newline, want) + 1
            return FoundRows(text if size == len(text) else text[:size], size, rows, rows, None)
        del is_newline
        found, at, rows = [], 0, 0
        while at < size and rows < want:
            end = text.rfind(b"\n", at, min(at + _BLOCK, size)) + 1 or text.index(b"\n", at) + 1
            found.append(self._find_in_block(array[at:end], want - rows))
            at, rows = at + found[-1].nbytes, rows + found[-1].rows
        return join_rows(found)

    def _find_in_block(self, block: _Bytes, want: int) -> FoundRows:
        newlines = np.flatnonzero(block == 10)
        is_row = self._are_rows(block, newlines)
        numbers = np.flatnonzero(is_row)
        if len(numbers) > want:  # the lines end with the last of these rows
            numbers = numbers[:want]
            newlines, is_row = newlines[: numbers[-1] + 1], is_row[: numbers[-1] + 1]
            block = block[: newlines[-1] + 1]
        if len(numbers) == len(newlines):
            return FoundRows(block.tobytes(), len(block), len(newlines), len(numbers), None)
        text = block[np.repeat(is_row, np.diff(newlines, prepend=-1))]
        return FoundRows(text.tobytes(), len(block), len(newlines), len(numbers), numbers)

    def _are_rows(self, block: _Bytes, newlines: Any) -> _Bits:
        """Return which lines are rows, by the first byte of each that is not blank; it may be the newline."""
        at = first = np.append(0, newlines[:-1] + 1)
        if _IS_BLANK[block[at]].any():
            filled = ~_IS_BLANK[block]
            if len(at) == 1:  # which may be far longer than a block
                first = np.array([filled.argmax()])
            else:
                counts = np.add.reduceat(filled, at, dtype=np.int64)
                first = np.flatnonzero(filled)[np.cumsum(counts) - counts]
        skipped: _Bits = block[first] == 10
        if self._delimiter >= 0:
            skipped &= ~np.logical_or.reduceat(block == self._delimiter, at)
        if self._marker:
            begin = first - (len(self._marker) - len(self._marker.lstrip(_BLANKS.encode())))
            marked = np.ones(len(at), bool)
            for ahead, byte in enumerate(self._marker):  # an index outside the block is the index of its last newline
                marked &= block[np.minimum(begin + ahead, len(block) - 1)] == byte
            skipped |= marked
        return ~skipped


def join_rows(found: Sequence[FoundRows]) -> FoundRows:
    """Return the rows of successive lines as one."""
    if len(found) == 1:
        return found[0]
    numbers = None
    if any(part.numbers is not None for part in found):
        begins = accumulate((part.lines for part in found), initial=0)
        numbers = np.concatenate(
            [
                begin + (np.arange(part.rows) if part.numbers is None else part.numbers)
                for begin, part in zip(begins, found, strict=False)
            ]
        )
    return FoundRows(
        b"".join([part.data for part in found]),
        sum(part.nbytes for part in found),
        sum(part.lines for part in found),
        sum(part.rows for part in found),
        numbers,
    )


def find_long_line(text: bytes, limit: int) -> int | None:
    """Return where the first line of more than ``limit`` bytes begins; None if no line is longer."""
    at = 0
    while len(text) - at > limit:
        end = text.rfind(b"\n", at, at + limit + 1)  # all lines up to this newline are short enough
        if end < 0:
            return at
        at = end + 1
    return None


def _nth(bits: _Bits, n: int) -> int:
    """Return the position of the n-th bit that is set. Halves the range, since counting is ten times as fast as finding."""
    begin, end = 0, len(bits)
    while end - begin > 4096:
        middle = (begin + end) // 2
        if (count := np.count_nonzero(bits[begin:middle])) >= n:
            end = middle
        else:
            begin, n = middle, n - count
    return begin + int(np.flatnonzero(bits[begin:end])[n - 1])
