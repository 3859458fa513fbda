"""Rows of text: files cut at line ends into buffers of equal numbers of rows, and shared out among ranks.

NOTE [ Rows and lines ]
    A row is a line that holds data: lines of white space (other than the delimiter), lines that begin with the comment marker,
    a byte order mark and the lines of a header are none. The files are read as one text, in their order, so a buffer may reach
    from one file into the next. The last line of a file may lack its newline.

NOTE [ Ranks ]
    Rank r of R reads the bytes from r/R to (r+1)/R of all files, both moved on to the next beginning of a line: so every line
    belongs to the one rank in whose range it begins, however long it is, and nobody has to ask the others. Compressed files
    have no such bytes: ranks take whole files, or, where there are fewer files than ranks, every R-th buffer.

NOTE [ Bounded memory ]
    A file may be hostile: a line of gigabytes, or a KiB of compressed data that becomes a terabyte. So nothing is read until a
    line ends, however long that takes. Every line is limited, also comments, blank lines and those of a header. Text is read in
    pieces of bounded size, of which only the rows are kept, and what takes memory for each line works on a MiB at a time.
"""

import contextlib
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from stocache.errors import StreamError
from stocache.text.files import OpenFile, TextFile

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Bits = np.ndarray[Any, np.dtype[np.bool_]]
_Numbers = np.ndarray[Any, np.dtype[np.int64]]

_BOM = b"\xef\xbb\xbf"
_BLANKS = " \t\v\f\r"
_IS_BLANK = np.isin(np.arange(256), list(_BLANKS.encode()))
_HEAD = 1 << 16
_LONGEST = 16 << 20  # bytes of a line, unless the user says otherwise
_PIECE = 16 << 20  # of text that is read before its rows are handed on, unless one line is longer
_BLOCK = 1 << 20  # of text that is looked through line by line
_DEEPEST = 64  # blanks before the text of a line that are looked at for all lines together


class LinePosition(NamedTuple):
    """The beginning of a line, and how many rows of this rank's share lie before it."""

    file: int
    offset: int
    rows: int


@dataclass(frozen=True)
class TextChunk:
    """The rows among whole lines of one file.

    Attributes:
        file, offset: where the lines begin.
        nbytes: of the lines.
        lines: how many they are.
        data: the rows, each with its newline.
        rows: how many they are.
        numbers: which of the lines they are; None where all are.
        damage: why the file ends here, though it should not.
        fault: why the only row is left out, unread; None where that is not so.
    """

    file: int
    offset: int
    nbytes: int
    lines: int
    data: bytes
    rows: int
    numbers: _Numbers | None = None
    damage: str | None = None
    fault: str | None = None

    def text(self) -> bytes:
        """Return the rows alone, each with its newline."""
        return self.data

    def place(self, row: int) -> "LinePlace":
        """Return where a row is, or, one past the last, where the piece ends."""
        if row >= self.rows:
            return self.file, self.offset, self.lines
        return self.file, self.offset, row if self.numbers is None else int(self.numbers[row])


LinePlace = tuple[int, int, int]
"""A line: its file, where the piece begins that it is in, and how many lines of the piece come before it."""


class Lines:
    """The share that one rank has of the rows of some files.

    Args:
        files: in the order in which they are read.
        buffer_size: rows in a buffer.
        skip_header: lines at the beginning of each file that are no rows.
        comments: what a line that is no row begins with; None if there are none such.
        delimiter: white space that makes a line a row.
        rank, world_size: see NOTE [ Ranks ].
        max_line_bytes: of a line without its newline.
        skip_long: whether a longer line is a row with a fault, rather than an error.

    Raises:
        StreamError: a line of a header, or one where the share begins or ends, is too long.

    Attributes:
        begin, end: of the share.
        first, step: which buffers of it are this rank's: first, first + step, and so on.

    Safe from any thread.
    """

    def __init__(
        self,
        files: Sequence[TextFile],
        buffer_size: int,
        skip_header: int,
        comments: str | None,
        delimiter: str | None,
        rank: int,
        world_size: int,
        max_line_bytes: int = _LONGEST,
        skip_long: bool = False,
    ) -> None:
        self.files, self.buffer_size = list(files), buffer_size
        self._skip_header = skip_header
        self._mark = comments.encode() if comments else b""
        self._delimiter = ord(delimiter) if delimiter is not None and delimiter in _BLANKS else -1
        self._max_line_bytes, self._skip_long = max_line_bytes, skip_long
        self._tops: dict[int, tuple[int, int]] = {}
        self._open: tuple[int, OpenFile] | None = None
        self._drop_handle()
        self._bounds = [0, *accumulate(file.size for file in self.files)]  # where each file begins among all bytes
        self.total_bytes = self._bounds[-1]
        try:
            head = self._read_at(0, self._start_of(0), _HEAD)[0]
            self._seen = len(head) + 1, 1 + head.count(b"\n")  # bytes, and about how many rows they have
            begin, end = self._share(rank, world_size)
        except BaseException:
            self._close()
            raise
        self.begin, self.end = LinePosition(*begin, 0), end

    @property
    def compressed(self) -> bool:
        """Whether any file has to be read from its beginning."""
        return any(file.compression is not None for file in self.files)

    @property
    def mean(self) -> float:
        """Bytes of a row, on the average of those read so far."""
        nbytes, rows = self._seen
        return nbytes / rows

    # ------------------------------------------------------------------------------------------------ shares

    def share_of(self, rank: int, world_size: int) -> "Lines":
        """Return the share of another rank."""
        other = object.__new__(Lines)
        other.__dict__.update(self.__getstate__())
        other._drop_handle()
        try:
            begin, other.end = other._share(rank, world_size)
        except BaseException:
            other._close()
            raise
        other.begin = LinePosition(*begin, 0)
        return other

    def _share(self, rank: int, world_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        self.first, self.step = 0, 1
        if not self.compressed:
            cuts = (self.total_bytes * rank // world_size, self.total_bytes * (rank + 1) // world_size)
            return self._line_from(cuts[0]), self._line_from(cuts[1])
        owners = [begin * world_size // max(1, self.total_bytes) for begin in self._bounds[:-1]]
        if len(set(owners)) == world_size:
            number = owners.index(rank)
            return (number, self._start_of(number)), (number + owners.count(rank), 0)
        self.first, self.step = rank, world_size
        return (0, self._start_of(0)), (len(self.files), 0)

    def _line_from(self, at: int) -> tuple[int, int]:
        """Return the first line that begins at or after a byte among all."""
        number = bisect_right(self._bounds, at) - 1
        if number >= len(self.files):
            return len(self.files), 0
        start = self._start_of(number)
        at -= self._bounds[number]
        if at <= start:
            return number, start
        end, whole = self._line_end(number, at - 1, self._skip_long)  # a newline there ends the line before
        if whole and end < self.files[number].size:
            return number, end
        number += 1
        return (number, self._start_of(number)) if number < len(self.files) else (number, 0)

    def _line_end(self, number: int, begin: int, skip: bool = False) -> tuple[int, bool]:
        """Return where the next line begins, and whether there is a newline before that; else it is the end of the file.

        Raises:
            StreamError: the line is too long, unless it is to be skipped.
        """
        at = begin
        while data := self._read_at(number, at, _HEAD)[0]:
            end = data.find(b"\n")
            if not skip and (at + end if end >= 0 else at + len(data)) - begin > self._max_line_bytes:
                raise self._too_long(number, begin, "")
            if end >= 0:
                return at + end + 1, True
            at += len(data)
        return at, False

    def _too_long(self, number: int, offset: int, other_way: str) -> StreamError:
        where, limit = self.where((number, offset, 0)), _size(self._max_line_bytes)
        return StreamError(f"{where}: the line is longer than {limit}. Raise max_line_bytes if it is text{other_way}.")

    def _start_of(self, number: int) -> int:
        """Return where the lines of a file begin that may be rows."""
        return self._top_of(number)[1]

    def _top_of(self, number: int) -> tuple[int, int]:
        """Return where the last line of a file's header begins, and where the header ends."""
        if number not in self._tops:
            begin = end = len(_BOM) if self._read_at(number, 0, _HEAD)[0].startswith(_BOM) else 0
            whole = True
            for _ in range(self._skip_header):
                if whole:
                    begin = end
                    end, whole = self._line_end(number, begin)
            self._tops[number] = begin, end
        return self._tops[number]

    def header(self) -> str:
        """Return the last line of the first file's header."""
        begin, end = self._top_of(0)
        lines = self._read_at(0, begin, end - begin)[0].splitlines()
        return lines[-1].decode(errors="replace") if lines else ""

    def first_row(self) -> bytes:
        """Return the first row of all, without its line end; nothing if there is none."""
        everything = self.share_of(0, 1)
        with contextlib.closing(everything):
            pieces, _ = everything.read(everything.begin, 1)
        return pieces[0].text().rstrip(b"\r\n") if pieces else b""

    def count(self) -> int:
        """Return the number of rows of the share; reads all of it."""
        begin, rows = self.begin, -1
        while rows < begin.rows:
            rows = begin.rows
            _, begin = self.read(begin)
        return rows

    # ------------------------------------------------------------------------------------------------ reading

    def read(self, start: LinePosition, rows: int | None = None) -> tuple[list[TextChunk], LinePosition]:
        """Return the lines of the next ``rows`` rows, or of a buffer; and where they end."""
        want = self.buffer_size if rows is None else rows
        pieces: list[TextChunk] = []
        number, offset, before = start
        got = 0
        while got < want and (number, offset) < self.end:
            piece, ends = self._read_piece(number, offset, want - got)
            if piece.rows or piece.damage:
                pieces.append(piece)
            got += piece.rows
            offset += piece.nbytes
            if ends:
                number += 1
                offset = self._start_of(number) if number < len(self.files) else 0
        return pieces, LinePosition(number, offset, before + got)

    def _read_piece(self, number: int, offset: int, want: int) -> tuple[TextChunk, bool]:
        """Return up to ``want`` rows of one file, and whether it ends there; see NOTE [ Bounded memory ]."""
        limit = self.end[1] - offset if number == self.end[0] else None
        size = min(int(want * self.mean * 1.02) + 256, _PIECE)
        if self.files[number].compression is None:
            size = min(size, self.files[number].size - offset + 1)  # one more, to see the end
        found: list[_Rows] = []
        taken, rows, rest = 0, 0, b""  # of the rest no line has ended yet
        while True:
            asked = (size if limit is None else min(size, limit)) - taken - len(rest)
            more, damage = self._read_at(number, offset + taken + len(rest), asked)
            chunk = rest + more if rest else more
            ends = len(more) < asked
            if (ends or taken + len(chunk) == limit) and chunk and not chunk.endswith(b"\n"):
                chunk = chunk[: chunk.rfind(b"\n") + 1] if damage else chunk + b"\n"
            long = self._find_long(chunk)
            if long == taken == 0:
                return self._skip_line(number, offset)
            found.append(self._find_rows(chunk, chunk.rfind(b"\n", 0, long) + 1, want - rows))
            taken, rows = taken + found[-1].nbytes, rows + found[-1].rows
            rest = chunk[found[-1].nbytes :]
            have = taken + len(rest)
            if rows >= want or ends or long is not None or have == limit or (taken and have >= _PIECE):
                break
            missing = int((want - rows) * max(self.mean, have / max(1, rows)))
            # comments may be all that follows, or one long line has come
            size = min(have + min(missing, have) + _HEAD, _PIECE) if have < _PIECE else min(2 * have, self._max_line_bytes + 1)
        self.files[number].check()
        self._seen = self._seen[0] + taken, self._seen[1] + rows
        data = b"".join([its.data for its in found]) if len(found) > 1 else found[0].data
        lines, numbers = sum(its.lines for its in found), _numbers_in(found)
        if rest:  # the file does not end here
            return TextChunk(number, offset, taken, lines, data, rows, numbers), False
        return TextChunk(number, offset, taken, lines, data, rows, numbers, damage), ends

    def _find_long(self, chunk: bytes) -> int | None:
        """Return where the first line of some that is too long begins; None where none is."""
        at, most = 0, self._max_line_bytes
        while len(chunk) - at > most:
            end = chunk.rfind(b"\n", at, at + most + 1)  # of one of the lines that begin there, which thus are not
            if end < 0:
                return at
            at = end + 1
        return None

    def _skip_line(self, number: int, offset: int) -> tuple[TextChunk, bool]:
        """Return a line that is too long, as one row without its text, and whether the file ends after it.

        Raises:
            StreamError: such lines are not to be skipped.
        """
        if not self._skip_long:
            raise self._too_long(number, offset, ", or leave such lines out: on_error='skip'")
        end, whole = self._line_end(number, offset, skip=True)
        self.files[number].check()
        damage = None if whole else self._read_at(number, end, 1)[1]
        fault = f"the line is longer than {_size(self._max_line_bytes)}"
        piece = TextChunk(number, offset, end - offset, 1, b"", int(not damage), damage=damage, fault=None if damage else fault)
        return piece, not whole

    def _find_rows(self, chunk: bytes, size: int, want: int) -> "_Rows":
        """Return the first ``want`` rows in ``size`` bytes, which are whole lines.

        Takes a twentieth of the time of parsing, unless some line begins with white space or there is a comment.
        """
        if not size:
            return _Rows(b"", 0, 0, 0, None)
        array = np.frombuffer(chunk, np.uint8, size)
        is_newline = array == 10
        marked = self._mark and chunk.find(self._mark, 0, size) >= 0
        if array[0] > 32 and not marked and not (is_newline[:-1] & (array[1:] <= 32)).any():
            rows = int(np.count_nonzero(is_newline))
            if rows > want:
                rows, size = want, _nth(is_newline, want) + 1
            return _Rows(chunk if size == len(chunk) else chunk[:size], size, rows, rows, None)
        del is_newline
        found, at, rows = [], 0, 0
        while at < size and rows < want:
            end = chunk.rfind(b"\n", at, min(at + _BLOCK, size)) + 1 or chunk.index(b"\n", at) + 1
            found.append(self._rows_of_block(array[at:end], want - rows))
            at, rows = at + found[-1].nbytes, rows + found[-1].rows
        return _Rows(b"".join([its.data for its in found]), at, sum(its.lines for its in found), rows, _numbers_in(found))

    def _rows_of_block(self, block: _Bytes, want: int) -> "_Rows":
        """Return the first ``want`` rows of whole lines."""
        newlines = np.flatnonzero(block == 10)
        is_row = self._are_rows(block, newlines)
        numbers = np.flatnonzero(is_row)
        if len(numbers) > want:  # the lines end with the last of these rows
            numbers = numbers[:want]
            newlines, is_row = newlines[: numbers[-1] + 1], is_row[: numbers[-1] + 1]
            block = block[: newlines[-1] + 1]
        if len(numbers) == len(newlines):
            return _Rows(block.tobytes(), len(block), len(newlines), len(numbers), None)
        text = block[np.repeat(is_row, np.diff(newlines, prepend=-1))]
        return _Rows(text.tobytes(), len(block), len(newlines), len(numbers), numbers)

    def _are_rows(self, block: _Bytes, newlines: Any) -> _Bits:
        """Return which lines are rows."""
        at = np.append(0, newlines[:-1] + 1)
        delimited = np.zeros(len(at), bool)
        skipped_lines = np.zeros(len(at), bool)
        lines = np.arange(len(at))
        mark = self._mark
        for _ in range(_DEEPEST):  # as often as the longest indentation is long
            if not len(lines):
                return ~skipped_lines
            first = block[at[lines]]
            skipped_lines[lines[(first == 10) & ~delimited[lines]]] = True
            delimited[lines[first == self._delimiter]] = True
            if mark:
                marked = lines[first == mark[0]]
                for ahead in range(1, len(mark)):
                    marked = marked[block[np.minimum(at[marked] + ahead, len(block) - 1)] == mark[ahead]]
                skipped_lines[marked] = True
            lines = lines[_IS_BLANK[first]]
            at[lines] += 1
        for line in lines.tolist():
            text = block[at[line] : newlines[line]].tobytes()
            begun = text.lstrip(_BLANKS.encode())
            if not begun:
                skipped_lines[line] = not delimited[line] and (self._delimiter < 0 or self._delimiter not in text)
            elif mark:
                skipped_lines[line] = begun.startswith(mark)
        return ~skipped_lines

    # ------------------------------------------------------------------------------------------------ bytes

    def _read_at(self, number: int, offset: int, nbytes: int) -> tuple[bytes, str | None]:
        """Return bytes of a file, and, where it ends before them, why it does though it should not."""
        with self._locked():
            if self._open is None or self._open[0] != number:
                self._close()
                self._open = number, self.files[number].open()
            file = self._open[1]
            data = file.read_at(offset, nbytes)
            return data, file.damage if len(data) < nbytes else None

    def _locked(self) -> threading.Lock:
        if self._pid != os.getpid():  # forked: a file's offset would be the parent's too, and the lock may be held for ever
            self._drop_handle()
        return self._lock

    def _drop_handle(self) -> None:
        self._pid, self._lock, self._open = os.getpid(), threading.Lock(), None

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def close(self) -> None:
        """Give the descriptor back; reading opens the file again."""
        with self._locked():
            self._close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_pid", "_lock", "_open")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._drop_handle()

    # ------------------------------------------------------------------------------------------------ what to tell a person

    def where(self, place: LinePlace) -> str:
        """Return the file and the number of a line, counted from 1; reads the file up to there."""
        number, offset, before = place
        at = 0
        with contextlib.closing(self.files[number].open()) as file:
            while at < offset and (data := file.read_at(at, min(1 << 20, offset - at))):
                before += data.count(b"\n")
                at += len(data)
        return f"{self.files[number].path}, line {before + 1}"

    def check(self, start: LinePosition, end: LinePosition) -> None:
        """Raise DamagedError if a file between two positions has changed."""
        for file in self.files[start.file : end.file + bool(end.offset)]:
            file.check()

    def begins_line(self, position: LinePosition) -> bool:
        """Whether a line begins at a position, as somebody says who read these files before."""
        number, offset, _ = position
        if number >= len(self.files):
            return (number, offset) == (len(self.files), 0)
        start = self._start_of(number)
        return offset == start or (offset > start and self._read_at(number, offset - 1, 1)[0] == b"\n")


class _Rows(NamedTuple):
    """Rows of some lines: their text, the bytes and number of the lines, the number of the rows, and which lines they are."""

    data: bytes
    nbytes: int
    lines: int
    rows: int
    numbers: _Numbers | None


def _numbers_in(found: list[_Rows]) -> _Numbers | None:
    """Return which of all lines are rows; None where all are."""
    if all(its.numbers is None for its in found):
        return None
    begins = accumulate((its.lines for its in found), initial=0)
    numbers = [np.arange(its.rows) if its.numbers is None else its.numbers for its in found]
    return np.concatenate([begin + its for begin, its in zip(begins, numbers, strict=False)])


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


def _nth(bits: _Bits, n: int) -> int:
    """Return where the n-th of many bits is that is set; by halves, since counting is ten times as fast as finding."""
    begin, end = 0, len(bits)
    while end - begin > 4096:
        middle = (begin + end) // 2
        if (count := np.count_nonzero(bits[begin:middle])) >= n:
            end = middle
        else:
            begin, n = middle, n - count
    return begin + int(np.flatnonzero(bits[begin:end])[n - 1])
