"""Buffers of rows: found in the cache, or read where they begin and parsed; where each begins is known to all workers.

NOTE [ Where a buffer begins ]
    Only who has read a buffer knows where the next one begins. So whoever reads one publishes that, in a table in shared
    memory that all workers have; who needs a beginning that is not there yet reads on from the last one that is, which takes
    a twentieth of the time of parsing. A beginning with fewer rows before it than all buffers before have room for is the end.
    The table's first row, of the buffer whose beginning everybody knows, is where the end is noted.
"""

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stocache.cache.base import MISSING
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache
from stocache.errors import DamagedError, StateError, StreamError
from stocache.text.lines import LinePlace, LinePosition, Lines, TextChunk
from stocache.text.parsers import Bad, Custom, RowParser, joined

logger = logging.getLogger("stocache")

_MAX_ROW_DENSITY = 4  # times as short as in the first buffer: if rows are shorter on average, buffers stay uncached
_COMPRESSION = 16  # the same, how much more text may come out of compressed files than there are bytes
_SHOWN = 1000  # bytes of a line that an error may show, of which it takes the first characters
_ROW = 3 * 8  # bytes of a row of the table; and one more for its state


Fault = tuple[LinePlace, str]


class RowBuffer(NamedTuple):
    """Parsed rows.

    Attributes:
        arrays: a tree of arrays, with as many rows each.
        rows: read; those that were not as they should be are missing in the arrays.
        skipped: how many these are.
        fault: where the first of them is, and what is wrong with it; None where nothing is.
    """

    arrays: Any
    rows: int
    skipped: int
    fault: Fault | None


@dataclass(frozen=True)
class CacheOptions:
    """How buffers are cached: as `StreamLoader` has it."""

    size_limit_gib: float | str | None
    name: str | None
    persist: bool
    fingerprint: str


class Buffers:
    """The buffers of one rank's share of the rows, by their numbers in it.

    Args:
        lines: the share.
        parser: makes arrays of rows.
        skip: whether rows that are not as they should be are left out, rather than an error.
        whole: whether a last buffer that is not full is left out.
        rank, world_size: whose share it is. Ranks of one machine have one cache.
    """

    def __init__(
        self,
        lines: Lines,
        parser: RowParser | Custom,
        skip: bool,
        whole: bool,
        keeping: CacheOptions,
        rank: int,
        world_size: int,
    ) -> None:
        self.lines, self.parser = lines, parser
        self._skip, self._whole = skip, whole
        self._rank, self._world_size = rank, world_size
        self._known: dict[int, LinePosition] = {0: lines.begin}
        self._end: LinePosition | None = None
        expected = lines.total_bytes * (_COMPRESSION if lines.compressed else 1) / lines.mean / lines.buffer_size
        self._len = int(_MAX_ROW_DENSITY * expected / (1 if lines.step > 1 else world_size)) + 16
        self._base = rank * self._len
        named: dict[str, Any] = {}
        if keeping.name is not None:
            named = {"name": keeping.name, "persist": keeping.persist, "fingerprint": keeping.fingerprint}
        self.cache: RaggedCache | None = None
        if keeping.size_limit_gib is not None and keeping.size_limit_gib != 0:
            self.cache = RaggedCache(keeping.size_limit_gib, self._len * world_size, **named)
        if named:
            named["name"] += ".lines"
        nbytes = (_ROW + 1) * self._len * world_size
        self._table = SharedCache(nbytes / 2**30, self._len * world_size, (3,), torch.int64, **named)

    # ------------------------------------------------------------------------------------------------ where they begin

    def _look_up(self, number: int) -> LinePosition | None:
        found = self._known.get(number)
        if found is None and number < self._len and (row := self._table.peek(self._base + number)) is not MISSING:
            found = self._known[number] = LinePosition(*row.tolist())
        return found

    def _publish(self, number: int, position: LinePosition) -> None:
        if self._look_up(number) is None:
            self._known[number] = position
            self._note(number, position)

    def _note(self, number: int, position: LinePosition) -> None:
        if number < self._len:
            self._table.set_if_empty([self._base + number], [torch.tensor(position)])

    def _find(self, number: int) -> LinePosition:
        """Return where a buffer begins, or where all end."""
        nearest = number
        while (position := self._look_up(nearest)) is None:
            nearest -= 1
        while nearest < number and position.rows == nearest * self.lines.buffer_size:
            _, position = self._read_from(nearest, position)
            nearest += 1
        return position

    def _read_from(self, number: int, begin: LinePosition) -> tuple[list[TextChunk], LinePosition]:
        pieces, end = self.lines.read(begin)
        self._publish(number + 1, end)
        if end.rows < (number + 1) * self.lines.buffer_size:
            self._end = end
            self._note(0, end)
        return pieces, end

    @property
    def total_rows(self) -> int | None:
        """Rows of the share; None as long as nobody has come to its end."""
        if self._end is None and (row := self._table.peek(self._base)) is not MISSING:
            self._end = LinePosition(*row.tolist())
        return None if self._end is None else self._end.rows

    def count(self, progress: Any = None) -> int:
        """Find the beginning of every buffer; return the number of rows."""
        number = 0
        while (rows := self.total_rows) is None:
            number += 1
            position = self._find(number)
            if progress is not None:
                progress(position)
        return rows

    def resume_at(self, number: int, position: LinePosition) -> None:
        """Take another's word for where a buffer begins.

        Raises:
            StateError: no line begins there.
        """
        if not self.lines.begins_line(position):
            raise StateError(f"the files have changed since the state was taken: no line begins where {tuple(position)} was.")
        self._publish(number, position)

    def position(self, number: int) -> LinePosition | None:
        """Return where a buffer begins, if that is known."""
        return self._look_up(number)

    # ------------------------------------------------------------------------------------------------ what is in them

    def fetch(self, number: int, copy: bool) -> RowBuffer | list[TextChunk] | None:
        """Return a cached buffer, or the text of one that is not; None after the last.

        Args:
            number: of the buffer in the share.
            copy: False for a cached one to be a view of the shared memory.

        Raises:
            DamagedError: a file has changed, or compressed data is cut.
        """
        index = self._index(number)
        if index is not None and self.cache is not None:
            cached = self.cache.hit(index, copy)
            if cached is not MISSING:
                self._check_files(number)
                found = RowBuffer(*cached)
                return None if self._whole and found.rows < self.lines.buffer_size else found
        begin = self._find(number)
        if begin.rows < number * self.lines.buffer_size:
            return None
        pieces, end = self._read_from(number, begin)
        damaged = next((piece for piece in pieces if piece.damage), None)
        if damaged and not self._skip:
            raise DamagedError(f"{self.lines.where(damaged.place(damaged.rows))}: {damaged.damage}")
        if self._whole and end.rows - begin.rows < self.lines.buffer_size:
            return None
        return pieces or None

    def parse(self, number: int, fetched: RowBuffer | list[TextChunk], copy: bool) -> RowBuffer:
        """Return a buffer that was fetched, parsed and cached if it was not.

        Raises:
            StreamError: a row is not as it should be.
        """
        if isinstance(fetched, RowBuffer):
            return fetched
        index = self._index(number)
        if index is None or self.cache is None:
            return self._parse(fetched)
        return RowBuffer(*self.cache.get_or_load(index, lambda _: tuple(self._parse(fetched)), copy=copy, strict=False))

    def _index(self, number: int) -> int | None:
        return self._base + number if number < self._len else None

    def _check_files(self, number: int) -> None:
        begin, end = self._look_up(number), self._look_up(number + 1)
        if begin is not None and end is not None:
            self.lines.check(begin, end)

    def _parse(self, pieces: list[TextChunk]) -> RowBuffer:
        trees, faults, rows, skipped = [], list[Fault](), 0, 0
        for piece in pieces:
            if piece.fault:
                faults.append((piece.place(0), piece.fault))
                rows, skipped = rows + 1, skipped + 1
                continue
            tree, bad = self._parse_piece(piece)
            if tree is not None:
                trees.append(tree)
            if bad:
                number, reason = bad[0]
                line = piece.text().split(b"\n")[number][:_SHOWN].decode(errors="replace")
                reason = f"{line!r:.200}: {reason}; expected {self.parser.expected}"
                faults.append((piece.place(number), reason))
            if piece.damage:
                faults.append((piece.place(piece.rows), piece.damage))
            if faults and not self._skip:
                where = self.lines.where(faults[0][0])
                header = "skip_header=1 leaves a header out, " if where.endswith(", line 1") else ""
                raise StreamError(f"{where}: {faults[0][1]}. {header}on_error='skip' leaves such lines out.")
            rows += piece.rows
            skipped += len(bad) + bool(piece.damage)
        return RowBuffer(joined(trees) if trees else None, rows, skipped, faults[0] if faults else None)

    def _parse_piece(self, piece: TextChunk) -> tuple[Any, Bad]:
        if not piece.rows:
            return None, []
        data = piece.text()
        try:
            return self.parser.bulk(data, piece.rows), []
        except Exception:  # what an engine or the user's function raises
            tree, bad = self.parser.parse_row_by_row(data)
            if not bad and isinstance(self.parser, Custom):
                raise
            return tree, bad

    # ------------------------------------------------------------------------------------------------ life

    def close(self) -> None:
        """Let go of files and memory. Twice is fine."""
        self.lines.close()
        self._table.close()
        if self.cache is not None:
            self.cache.close()
