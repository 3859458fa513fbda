"""Read the rows of text files in order, a buffer at a time, and divide them among ranks.

NOTE [ Rows and lines ]
    A row is a line that holds data. These are not rows: lines of white space alone, unless it contains the delimiter; lines
    that begin with the comment marker; a byte order mark; the lines of a header. The files are read as one text, in their
    order, so a buffer may reach from one file into the next. The last line of a file may lack its newline.

NOTE [ Ranks ]
    Rank r of R reads the bytes from r/R to (r+1)/R of all files. Both ends are moved to the next beginning of a line. So every
    line belongs to the one rank in whose range it begins, however long it is, and ranks need not exchange anything. Compressed
    files cannot be divided by bytes: ranks take whole files. If there are fewer files than ranks, they take every R-th buffer.

NOTE [ Bounded memory ]
    A file may be hostile: it may have a line of gigabytes, or a KiB of compressed data may become a terabyte. So nothing is
    read just because a line has not ended. Every line has a limit, also comments, blank lines and headers. Text is read in
    chunks of bounded size, and only their rows are kept. Work that takes memory for each line is done on one MiB at a time.
"""

import contextlib
import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from stocache.errors import StreamError
from stocache.system.on_error import Retry
from stocache.text.files import FileReader, TextFile
from stocache.text.rows import FoundRows, LineNumbers, RowFinder, find_long_line, join_rows

_BOM = b"\xef\xbb\xbf"
_HEAD = 1 << 16  # bytes that are read at a time to find the end of a line
_LONGEST = 16 << 20  # default limit of a line, in bytes
_CHUNK = 16 << 20  # bytes of text in a chunk, unless one line is longer


class LinePosition(NamedTuple):
    """The beginning of a line, and the number of rows of this rank's share before it."""

    file: int
    offset: int
    rows: int


LineLocation = tuple[int, int, int]
"""A line: number of its file, offset of the chunk it is in, and number of lines before it in the chunk."""


@dataclass(frozen=True)
class TextChunk:
    """The rows among some whole lines of one file.

    Attributes:
        file, offset: where the lines begin.
        nbytes: length of the lines.
        lines: number of lines.
        data: text of the rows, each with its newline.
        rows: number of rows.
        numbers: indices of the lines that are rows; None if all are.
        damage: why the file ends here, though it should not; None if it does not.
        fault: why the only row was left out without being read; None if it was read.
    """

    file: int
    offset: int
    nbytes: int
    lines: int
    data: bytes
    rows: int
    numbers: LineNumbers | None = None
    damage: str | None = None
    fault: str | None = None

    def location(self, row: int) -> LineLocation:
        """Return the line of a row; for one past the last row, the end of the chunk."""
        if row >= self.rows:
            return self.file, self.offset, self.lines
        return self.file, self.offset, row if self.numbers is None else int(self.numbers[row])


class Lines:
    """One rank's share of the rows of some files.

    Args:
        files: in the order in which they are read.
        buffer_size: rows in a buffer.
        skip_header: lines at the beginning of each file that are not rows.
        comments: marker of a line that is a comment; None for no comments.
        delimiter: white space that makes a line a row.
        rank, world_size: see NOTE [ Ranks ].
        max_line_bytes: limit of a line, without its newline.
        skip_long: True makes a longer line a row with a fault; False makes it an error.
        retry: when a file that could not be read is read again; None for never.

    Raises:
        StreamError: a line is too long, and is in a header or at an end of the share.

    Attributes:
        begin, end: of the share.
        first, step: this rank's buffers are number first, first + step and so on of the share.

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
        retry: Retry | None = None,
    ) -> None:
        self.files, self.buffer_size = list(files), buffer_size
        self._finder, self._reader = RowFinder(comments, delimiter), FileReader(self.files, retry)
        self._skip_header = skip_header
        self._max_line_bytes, self._skip_long, self._retry = max_line_bytes, skip_long, retry
        self._headers: dict[int, tuple[int, int]] = {}
        self._bounds = [0, *accumulate(file.size for file in self.files)]  # where each file begins among all bytes
        self.total_bytes = self._bounds[-1]
        try:
            head = self._reader.read_at(0, self._start_of(0), _HEAD)[0]
            self._seen = len(head) + 1, 1 + head.count(b"\n")  # bytes, and about how many rows they have
            self._set_share(rank, world_size)
        except BaseException:
            self.close()
            raise

    @property
    def compressed(self) -> bool:
        """Whether a file is compressed, and so has to be read from its beginning."""
        return any(file.compression is not None for file in self.files)

    @property
    def mean_row_bytes(self) -> float:
        """Average length of the rows that were read so far."""
        nbytes, rows = self._seen
        return nbytes / rows

    def share_of(self, rank: int, world_size: int) -> "Lines":
        """Return the share of another rank."""
        other = copy.copy(self)
        other._reader = FileReader(self.files, self._retry)
        try:
            other._set_share(rank, world_size)
        except BaseException:
            other.close()
            raise
        return other

    def _set_share(self, rank: int, world_size: int) -> None:
        self.first, self.step = 0, 1
        begin, self.end = (0, self._start_of(0)), (len(self.files), 0)
        if not self.compressed:
            begin = self._line_from(self.total_bytes * rank // world_size)
            self.end = self._line_from(self.total_bytes * (rank + 1) // world_size)
        else:
            owners = [offset * world_size // max(1, self.total_bytes) for offset in self._bounds[:-1]]
            if len(set(owners)) == world_size:
                number = owners.index(rank)
                begin, self.end = (number, self._start_of(number)), (number + owners.count(rank), 0)
            else:
                self.first, self.step = rank, world_size
        self.begin = LinePosition(*begin, 0)

    def _line_from(self, at: int) -> tuple[int, int]:
        """Return the first line that begins at or after a byte, counted over all files."""
        number = bisect_right(self._bounds, at) - 1
        if number >= len(self.files):
            return len(self.files), 0
        start = self._start_of(number)
        at -= self._bounds[number]
        if at <= start:
            return number, start
        end, whole = self._line_end(number, at - 1, self._skip_long)  # a newline at this byte ends the line before
        if whole and end < self.files[number].size:
            return number, end
        number += 1
        return (number, self._start_of(number)) if number < len(self.files) else (number, 0)

    def _line_end(self, number: int, begin: int, skip: bool = False) -> tuple[int, bool]:
        """Return where the next line begins, and True; at the end of a file without a newline, that end, and False.

        Raises:
            StreamError: the line is too long, and ``skip`` is False.
        """
        at = begin
        while data := self._reader.read_at(number, at, _HEAD)[0]:
            end = data.find(b"\n")
            if not skip and (at + end if end >= 0 else at + len(data)) - begin > self._max_line_bytes:
                raise self._too_long(number, begin, "")
            if end >= 0:
                return at + end + 1, True
            at += len(data)
        return at, False

    def _too_long(self, number: int, offset: int, alternative: str) -> StreamError:
        where, limit = self.where((number, offset, 0)), _size(self._max_line_bytes)
        return StreamError(f"{where}: the line is longer than {limit}. Raise max_line_bytes if it is text{alternative}.")

    def _start_of(self, number: int) -> int:
        """Return where the lines after the header of a file begin."""
        return self._header_of(number)[1]

    def _header_of(self, number: int) -> tuple[int, int]:
        """Return where the last line of a file's header begins, and where the header ends."""
        if number not in self._headers:
            begin = end = len(_BOM) if self._reader.read_at(number, 0, _HEAD)[0].startswith(_BOM) else 0
            whole = True
            for _ in range(self._skip_header):
                if whole:
                    begin = end
                    end, whole = self._line_end(number, begin)
            self._headers[number] = begin, end
        return self._headers[number]

    def header(self) -> str:
        """Return the last line of the first file's header."""
        begin, end = self._header_of(0)
        lines = self._reader.read_at(0, begin, end - begin)[0].splitlines()
        return lines[-1].decode(errors="replace") if lines else ""

    def first_row(self) -> bytes:
        """Return the first row of all files without its line end; b"" if there is no row."""
        everything = self.share_of(0, 1)
        with contextlib.closing(everything):
            chunks, _ = everything.read(everything.begin, 1)
        return chunks[0].data.rstrip(b"\r\n") if chunks else b""

    def count(self) -> int:
        """Return the number of rows of the share. Reads all of it."""
        position, rows = self.begin, -1
        while rows < position.rows:
            rows = position.rows
            _, position = self.read(position)
        return rows

    def read(self, start: LinePosition, rows: int | None = None) -> tuple[list[TextChunk], LinePosition]:
        """Return the next ``rows`` rows, by default a buffer of them, and the position after them."""
        want = self.buffer_size if rows is None else rows
        chunks: list[TextChunk] = []
        number, offset, before = start
        got = 0
        while got < want and (number, offset) < self.end:
            chunk, file_ends = self._read_chunk(number, offset, want - got)
            if chunk.rows or chunk.damage:
                chunks.append(chunk)
            got += chunk.rows
            offset += chunk.nbytes
            if file_ends:
                number += 1
                offset = self._start_of(number) if number < len(self.files) else 0
        return chunks, LinePosition(number, offset, before + got)

    def _read_chunk(self, number: int, offset: int, want: int) -> tuple[TextChunk, bool]:
        """Return up to ``want`` rows of one file, and whether it ends there; see NOTE [ Bounded memory ]."""
        limit = self.end[1] - offset if number == self.end[0] else None
        size = min(int(want * self.mean_row_bytes * 1.02) + 256, _CHUNK)
        if self.files[number].compression is None:
            size = min(size, self.files[number].size - offset + 1)  # one more, to see the end
        found: list[FoundRows] = []
        taken, rows, rest = 0, 0, b""  # bytes of the lines so far; rows in them; the text after them
        while True:
            asked = (size if limit is None else min(size, limit)) - taken - len(rest)
            more, damage = self._reader.read_at(number, offset + taken + len(rest), asked)
            text = rest + more if rest else more
            file_ends = len(more) < asked
            if (file_ends or taken + len(text) == limit) and text and not text.endswith(b"\n"):
                text = text[: text.rfind(b"\n") + 1] if damage else text + b"\n"
            long = find_long_line(text, self._max_line_bytes)
            if long == taken == 0:
                return self._skip_line(number, offset)
            found.append(self._finder.find(text, text.rfind(b"\n", 0, long) + 1, want - rows))
            taken, rows = taken + found[-1].nbytes, rows + found[-1].rows
            rest = text[found[-1].nbytes :]
            have = taken + len(rest)
            if rows >= want or file_ends or long is not None or have == limit or (taken and have >= _CHUNK):
                break
            missing = int((want - rows) * max(self.mean_row_bytes, have / max(1, rows)))
            # perhaps only comments follow, or one long line: read at most as much again
            size = min(have + min(missing, have) + _HEAD, _CHUNK) if have < _CHUNK else min(2 * have, self._max_line_bytes + 1)
        self.files[number].check()
        self._seen = self._seen[0] + taken, self._seen[1] + rows
        if rest:
            file_ends, damage = False, None
        data, _, lines, _, numbers = join_rows(found)
        return TextChunk(number, offset, taken, lines, data, rows, numbers, damage), file_ends

    def _skip_line(self, number: int, offset: int) -> tuple[TextChunk, bool]:
        """Return a line that is too long as one row without text, and whether the file ends after it.

        Raises:
            StreamError: long lines are errors.
        """
        if not self._skip_long:
            raise self._too_long(number, offset, ", or leave such lines out: on_error='skip'")
        end, whole = self._line_end(number, offset, skip=True)
        self.files[number].check()
        damage = None if whole else self._reader.read_at(number, end, 1)[1]
        fault = None if damage else f"the line is longer than {_size(self._max_line_bytes)}"
        return TextChunk(number, offset, end - offset, 1, b"", int(not damage), damage=damage, fault=fault), not whole

    def close(self) -> None:
        """Close the open file. Reading opens it again."""
        self._reader.close()

    def where(self, location: LineLocation) -> str:
        """Return the path and the line number, from 1, for an error message. Reads the file up to there."""
        number, offset, before = location
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
        """Whether a line begins at a position."""
        number, offset, _ = position
        if number >= len(self.files):
            return (number, offset) == (len(self.files), 0)
        start, file = self._start_of(number), self.files[number]
        if offset <= start or (offset > file.size and file.compression is None):
            return offset == start
        return self._reader.read_at(number, offset - 1, 1)[0] == b"\n"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
