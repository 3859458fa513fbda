"""Rows of text: files cut at line ends into buffers of equal numbers of rows, and shared out among ranks.

NOTE [ Rows and lines ]
    A row is a line that holds data: lines of white space (other than the delimiter), lines that begin with the comment marker,
    a byte order mark and the lines of a header are none. The files are read as one text, in their order, so a buffer may reach
    from one file into the next. The last line of a file may lack its newline.

NOTE [ Ranks ]
    Rank r of R reads the bytes from r/R to (r+1)/R of all files, both moved on to the next beginning of a line: so every line
    belongs to the one rank in whose range it begins, however long it is, and nobody has to ask the others. Compressed files
    have no such bytes: ranks take whole files, or, where there are fewer files than ranks, every R-th buffer.
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
from stocache.textfiles import OpenFile, TextFile

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Bits = np.ndarray[Any, np.dtype[np.bool_]]
_Numbers = np.ndarray[Any, np.dtype[np.int64]]

_BOM = b"\xef\xbb\xbf"
_BLANKS = " \t\v\f\r"
_IS_BLANK = np.isin(np.arange(256), list(_BLANKS.encode()))
_HEAD = 1 << 16
_LONGEST = 1 << 28  # bytes of a line; more is no text, but a file without line ends


class Position(NamedTuple):
    """The beginning of a line, and how many rows of this rank's share lie before it."""

    file: int
    offset: int
    rows: int


@dataclass(frozen=True)
class Piece:
    """Whole lines of one file, as they stand there.

    Attributes:
        file, offset: where they begin.
        data: the lines, each with its newline.
        rows: of them.
        noise: the numbers of the lines that are none.
        damage: why the file ends here, though it should not.
    """

    file: int
    offset: int
    data: bytes
    rows: int
    noise: _Numbers
    damage: str | None = None

    def row_numbers(self) -> list[int]:
        """Return the numbers of the lines that are rows."""
        return np.delete(np.arange(self.rows + len(self.noise)), self.noise).tolist()  # type: ignore[no-any-return]

    def text(self) -> bytes:
        """Return the rows alone, each with its newline."""
        if not len(self.noise):
            return self.data
        lines = self.data.split(b"\n")
        return b"".join(lines[number] + b"\n" for number in self.row_numbers())

    def place(self, row: int) -> "Place":
        """Return where a row is, or, one past the last, where the piece ends."""
        rows = self.row_numbers()
        return self.file, self.offset, rows[row] if row < len(rows) else len(rows) + len(self.noise)


Place = tuple[int, int, int]
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
    ) -> None:
        self.files, self.buffer_size = list(files), buffer_size
        self._skip_header = skip_header
        self._mark = comments.encode() if comments else b""
        self._delimiter = ord(delimiter) if delimiter is not None and delimiter in _BLANKS else -1
        self._starts: dict[int, int] = {}
        self._open: tuple[int, OpenFile] | None = None
        self._drop_handle()
        self._bounds = [0, *accumulate(file.size for file in self.files)]  # where each file begins among all bytes
        self.total_bytes = self._bounds[-1]
        head = self._read_at(0, self._start_of(0), _HEAD)[0]
        self._seen = len(head) + 1, 1 + head.count(b"\n")  # bytes, and about how many rows they have
        begin, end = self._share(rank, world_size)
        self.begin, self.end = Position(*begin, 0), end

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
        begin, other.end = other._share(rank, world_size)
        other.begin = Position(*begin, 0)
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
        at -= 1  # if this is a newline, the line begins where it was asked for
        while data := self._read_at(number, at, _HEAD)[0]:
            end = data.find(b"\n")
            if end >= 0 and at + end + 1 < self.files[number].size:
                return number, at + end + 1
            at += len(data)
        number += 1
        return (number, self._start_of(number)) if number < len(self.files) else (number, 0)

    def _start_of(self, number: int) -> int:
        """Return where the lines of a file begin that may be rows."""
        if number not in self._starts:
            self._starts[number] = len(self._top_of(number, self._skip_header))
        return self._starts[number]

    def _top_of(self, number: int, lines: int) -> bytes:
        """Return a byte order mark and the first ``lines`` lines of a file."""
        head = self._read_at(number, 0, _HEAD)[0]
        at = len(_BOM) if head.startswith(_BOM) else 0
        for _ in range(lines):
            while (end := head.find(b"\n", at)) < 0:
                if not (more := self._read_at(number, len(head), len(head))[0]):
                    return head
                head += more
            at = end + 1
        return head[:at]

    def header(self) -> str:
        """Return the last line of the first file's header."""
        lines = self._top_of(0, self._skip_header).removeprefix(_BOM).splitlines()
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

    def read(self, start: Position, rows: int | None = None) -> tuple[list[Piece], Position]:
        """Return the lines of the next ``rows`` rows, or of a buffer; and where they end."""
        want = self.buffer_size if rows is None else rows
        pieces: list[Piece] = []
        number, offset, before = start
        got = 0
        while got < want and (number, offset) < self.end:
            piece, ends = self._read_piece(number, offset, want - got)
            if piece.rows or piece.damage:
                pieces.append(piece)
            got += piece.rows
            offset += len(piece.data)
            if ends:
                number += 1
                offset = self._start_of(number) if number < len(self.files) else 0
        return pieces, Position(number, offset, before + got)

    def _read_piece(self, number: int, offset: int, want: int) -> tuple[Piece, bool]:
        """Return lines of one file, up to ``want`` rows, and whether it ends there."""
        limit = self.end[1] - offset if number == self.end[0] else None
        size, data, ends = min(int(want * self.mean * 1.02) + 256, _LONGEST), b"", False
        if self.files[number].compression is None:
            size = min(size, self.files[number].size - offset + 1)  # one more, to see the end
        while True:
            asked = (size if limit is None else min(size, limit)) - len(data)
            more, damage = self._read_at(number, offset + len(data), asked)
            data += more
            ends = len(more) < asked
            if ends and data and not data.endswith(b"\n"):
                data = data[: data.rfind(b"\n") + 1] if damage else data + b"\n"
            is_end, noise = self._row_ends(data)
            rows = int(np.count_nonzero(is_end))
            if rows >= want or ends or len(data) == limit:
                break
            if len(data) >= _LONGEST and b"\n" not in data:
                raise StreamError(f"{self.files[number].path}: no line ends in {_LONGEST >> 20} MiB from byte {offset} on.")
            missing = int((want - rows) * max(self.mean, len(data) / max(1, rows)))
            size = len(data) + min(missing, len(data)) + _HEAD  # comments may be all that follows, or one long line have come
        self.files[number].check()
        if rows >= want and (cut := _nth(is_end, want) + 1) < len(data):
            data, rows, ends, damage = data[:cut], want, False, None
            noise = noise[noise < data.count(b"\n")] if len(noise) else noise
        self._seen = self._seen[0] + len(data), self._seen[1] + rows
        return Piece(number, offset, data, rows, noise, damage), ends

    def _row_ends(self, data: bytes) -> tuple[_Bits, _Numbers]:
        """Return which bytes of whole lines end a row, and the numbers of the lines that are none.

        Takes a twentieth of the time of parsing, unless some line begins with white space or there is a comment.
        """
        array = np.frombuffer(data, np.uint8)
        is_newline = array == 10
        if data[:1] > b" " and not (is_newline[:-1] & (array[1:] <= 32)).any() and not (self._mark and self._mark in data):
            return is_newline, np.zeros(0, np.int64)
        newlines = np.flatnonzero(is_newline)
        noise = self._noise(array, newlines)
        is_newline[newlines[noise]] = False
        return is_newline, noise

    def _noise(self, array: _Bytes, newlines: Any) -> _Numbers:
        """Return the numbers of the lines that are no rows."""
        if not len(newlines):
            return np.zeros(0, np.int64)
        at = np.append(0, newlines[:-1] + 1)
        delimited = np.zeros(len(at), bool)
        noise = np.zeros(len(at), bool)
        lines = np.arange(len(at))
        mark = self._mark
        while len(lines):  # as often as the longest indentation is long
            first = array[at[lines]]
            noise[lines[(first == 10) & ~delimited[lines]]] = True
            delimited[lines[first == self._delimiter]] = True
            if mark:
                noise[[line for line in lines[first == mark[0]] if array[at[line] :][: len(mark)].tobytes() == mark]] = True
            lines = lines[_IS_BLANK[first]]
            at[lines] += 1
        return np.flatnonzero(noise)

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

    def where(self, place: Place) -> str:
        """Return the file and the number of a line, counted from 1; reads the file up to there."""
        number, offset, before = place
        at = 0
        with contextlib.closing(self.files[number].open()) as file:
            while at < offset and (data := file.read_at(at, min(1 << 20, offset - at))):
                before += data.count(b"\n")
                at += len(data)
        return f"{self.files[number].path}, line {before + 1}"

    def check(self, start: Position, end: Position) -> None:
        """Raise DamagedError if a file between two positions has changed."""
        for file in self.files[start.file : end.file + bool(end.offset)]:
            file.check()

    def begins_line(self, position: Position) -> bool:
        """Whether a line begins at a position, as somebody says who read these files before."""
        number, offset, _ = position
        if number >= len(self.files):
            return (number, offset) == (len(self.files), 0)
        start = self._start_of(number)
        return offset == start or (offset > start and self._read_at(number, offset - 1, 1)[0] == b"\n")


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
