"""Read, parse and cache the rows of text, a buffer (``buffer_size`` rows) at a time.

NOTE [ Where a buffer begins ]
    Only a process that has read a buffer knows where the next one begins. So it publishes that position in a table in shared
    memory, for all workers. A process that needs a position that is not in the table reads on from the last one before it that
    is; this takes a twentieth of the time of parsing. A position is the end of all buffers if fewer rows lie before it than
    the buffers before it hold. Every process knows where the first buffer begins, so the table's first row holds the end.

    The table ends with the last process. So a cached buffer has its two positions beside its rows: a later run that finds it on
    the disk can read on behind it. The disk also keeps the whole table, under the last index of the share, from when the last
    buffer was read: a later run then reads nothing, not even to count the rows.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from stocache.cache.disk.cache import DiskCache
from stocache.cache.disk.tiers import Tiers
from stocache.cache.options import CacheOptions
from stocache.cache.shared import SharedCache
from stocache.cache.stats import MISSING
from stocache.errors import DamagedError, StateError, StreamError
from stocache.system.describe import describe, difference
from stocache.text.lines import LineLocation, LinePosition, Lines, TextChunk
from stocache.text.parsers import BadRows, Custom, RowParser, join_trees

logger = logging.getLogger("stocache")

RECORD_VERSION = 2
"""The version of the form in which a buffer is cached."""

_MAX_ROW_DENSITY = 4  # there is room for buffers of rows this many times shorter than the first; later buffers stay uncached
_COMPRESSION = 16  # the same for compressed files: this many bytes of text for each stored byte
_SHOWN = 1000  # bytes of a line that are decoded for an error, which shows the first characters
_TABLE_ROW = 3 * 8 + 1  # bytes of a row of the table, and of its state


Fault = tuple[LineLocation, str]
"""A bad line, and the reason."""


class RowBuffer(NamedTuple):
    """The parsed rows of a buffer.

    Attributes:
        arrays: a tree of arrays with one row for each good row of the text; None if no row is good.
        rows: number of rows that were read.
        skipped: number of bad ones among them, which the arrays lack.
        fault: the first bad one; None if all are good.
    """

    arrays: Any
    rows: int
    skipped: int
    fault: Fault | None


class Buffers:
    """The buffers of one rank's share of the rows, by their numbers in it.

    Args:
        lines: the share.
        parser: makes arrays of rows.
        skip: True leaves bad rows out; False makes them an error.
        full_only: True leaves out a last buffer that is not full.
        options: of the cache, whose samples are buffers. The table of positions has the same name, with ".lines" behind it.
        rank, world_size: of the share. The ranks of a machine have one cache.
    """

    def __init__(
        self,
        lines: Lines,
        parser: RowParser,
        skip: bool,
        full_only: bool,
        options: CacheOptions,
        rank: int,
        world_size: int,
    ) -> None:
        self.lines, self.parser = lines, parser
        self._skip, self._full_only = skip, full_only
        self._known: dict[int, LinePosition] = {0: lines.begin}
        self._end: LinePosition | None = None
        expected = lines.total_bytes * (_COMPRESSION if lines.compressed else 1) / lines.mean_row_bytes / lines.buffer_size
        self._len = int(_MAX_ROW_DENSITY * expected / (1 if lines.step > 1 else world_size)) + 16
        self._base = rank * self._len
        self._last, self._stale = sys.maxsize, False  # the last buffer that was asked for; see `_is_stale`
        self._sound = not lines.compressed  # whether the last buffer is known to be undamaged
        self.cache: Tiers | None = None
        if options.size_limit_gib != 0 or options.disk is not None:
            self.cache = Tiers.of_any_size(options, self._len * world_size, int(expected) + 2 * world_size)
        table_gib = _TABLE_ROW * self._len * world_size / 2**30
        table_name = None if options.name is None else f"{options.name}.lines"
        table = replace(options, size_limit_gib=table_gib, name=table_name)
        self._table = SharedCache.from_options(table, self._len * world_size, (3,), torch.int64)
        if positions := self._kept_positions(rank):
            self._known |= dict(enumerate(positions, 1))
            self._end, self._sound = positions[-1], True

    @property
    def _disk(self) -> DiskCache | None:
        return None if self.cache is None else self.cache.disk

    def position(self, number: int) -> LinePosition | None:
        """Return where a buffer begins; None if that is not known."""
        found = self._known.get(number)
        if found is None and number < self._len and (row := self._table.peek(self._base + number)) is not MISSING:
            found = self._known[number] = LinePosition(*row.tolist())
        return found

    def _publish(self, number: int, position: LinePosition) -> None:
        if self.position(number) is None:
            self._known[number] = position
            self._write(number, position)

    def _write(self, number: int, position: LinePosition) -> None:
        if number < self._len:
            self._table.set_if_empty([self._base + number], [torch.tensor(position, device="cpu")])

    def _find(self, number: int) -> LinePosition:
        """Return where a buffer begins; the end of all buffers for one after the last."""
        nearest = number
        if number > self._len and number not in self._known:  # a state may have any number
            nearest = max(self._len, *(known for known in self._known if known < number))
        while (position := self.position(nearest)) is None:
            nearest -= 1
        while nearest < number and position.rows == nearest * self.lines.buffer_size:
            _, position = self._read_from(nearest, position)
            nearest += 1
        return position

    def _read_from(self, number: int, begin: LinePosition) -> tuple[list[TextChunk], LinePosition]:
        chunks, end = self.lines.read(begin)
        self._note_end(number, end)
        return chunks, end

    def _note_end(self, number: int, end: LinePosition) -> None:
        """Publish where a buffer ends."""
        self._publish(number + 1, end)
        if end.rows < (number + 1) * self.lines.buffer_size:
            self._end = end
            self._write(0, end)

    @property
    def total_rows(self) -> int | None:
        """Rows of the share; None until a process has read to its end."""
        if self._end is None and (row := self._table.peek(self._base)) is not MISSING:
            self._end = LinePosition(*row.tolist())
        return None if self._end is None else self._end.rows

    def total_rows_of(self, rank: int) -> int | None:
        """Rows of the share of another rank, if a process of this machine has read to its end."""
        row = self._table.peek(rank * self._len)
        if row is not MISSING:
            return int(row[-1])
        positions = self._kept_positions(rank)
        return positions[-1].rows if positions else None

    def count(self, progress: Callable[[LinePosition], object] | None = None) -> int:
        """Find where every buffer begins, and return the number of rows. Calls ``progress`` with each position."""
        number = 0
        while (rows := self.total_rows) is None:
            number += 1
            position = self._find(number)
            if progress is not None:
                progress(position)
        self._keep_positions()
        return rows

    def _keep_positions(self) -> None:
        """Keep on the disk where all buffers begin, once that is known."""
        index, disk, rows = self._positions_at(self._base // self._len), self._disk, self.total_rows
        if disk is None or rows is None or not self._sound or not disk.fillable(index):
            return
        numbers = range(1, rows // self.lines.buffer_size + 2)  # the last position is the end
        positions = [self.position(number) for number in numbers if number < self._len]
        if len(positions) == len(numbers) and None not in positions:  # they are not all known if an epoch was resumed
            disk.set_if_empty([index], [torch.tensor(positions, device="cpu")])

    def _positions_at(self, rank: int) -> int:
        """Return the index under which the positions of a rank are on the disk; one for ranks that take every R-th buffer."""
        return (1 if self.lines.step > 1 else rank + 1) * self._len - 1

    def _kept_positions(self, rank: int) -> list[LinePosition]:
        """Return where the buffers of a rank begin, from number 1 on, if an earlier run has kept that; the last is the end."""
        found = MISSING if self._disk is None else self._disk.hit(self._positions_at(rank), True)
        return [] if found is MISSING else [LinePosition(*row) for row in found.tolist()]

    def resume_at(self, number: int, file: int, offset: int) -> None:
        """Set where a buffer begins, as given by a state.

        Raises:
            StateError: no line begins there.
        """
        position = LinePosition(file, offset, number * self.lines.buffer_size)
        if self.position(number) == position:
            return
        if not self.lines.begins_line(position):
            where = f"byte {offset} of file {file}"
            raise StateError(f"the files have changed since the state was taken: no line begins where {where} was.")
        self._publish(number, position)

    def fetch(self, number: int, copy: bool) -> RowBuffer | list[TextChunk] | None:
        """Return a buffer from the cache, or its text if it is not cached; None after the last.

        Args:
            number: of the buffer in the share.
            copy: False may return views of the cache's memory.

        Raises:
            DamagedError: a file has changed, or compressed data is cut.
        """
        index = self._index(number)
        if index is not None and self.cache is not None and not self._stale:
            cached = self.cache.hit(index, copy)
            if cached is not MISSING:
                buffer, begin, end = cached
                self._publish(number, begin)
                self._note_end(number, end)
                self.lines.check(begin, end)
                if self._is_stale(number, begin, buffer):
                    return self.fetch(number, copy)
                found = RowBuffer(*buffer)
                return None if self._full_only and found.rows < self.lines.buffer_size else found
        if self._is_over(number):
            self._check_files(number)
            self._keep_positions()
            return None
        begin = self._find(number)
        if begin.rows < number * self.lines.buffer_size:
            return None
        chunks, end = self._read_from(number, begin)
        damaged = next((chunk for chunk in chunks if chunk.damage), None)
        if damaged and not self._skip:
            raise DamagedError(f"{self.lines.where(damaged.location(damaged.rows))}: {damaged.damage}")
        if end.rows - begin.rows < self.lines.buffer_size:
            self._sound = True
            self._keep_positions()
            if self._full_only:
                return None
        return chunks or None

    def _is_stale(self, number: int, begin: LinePosition, buffer: Any) -> bool:
        """Whether the rows of a cached buffer differ from the rows that its text has now. Then the cache is not used any more.

        The function of a `CustomFormat` may have changed, or draw random numbers. So in each pass over the buffers,
        the first cached one is parsed as well.
        """
        again, self._last = number <= self._last, number
        if not again or not isinstance(self.parser, Custom) or not self.parser.audit:
            return False
        fresh = tuple(self._parse(self._read_from(number, begin)[0]))
        place = difference(describe(buffer, strides=False), describe(fresh, strides=False))
        if place is not None:
            self._stale = True
            logger.warning(
                "buffer %d differs from the cached one (%.200s): the parse of CustomFormat draws random numbers, or has "
                "changed. The cache is not used from now on. Put random steps into transform=.", number, place,
            )  # fmt: skip
        return place is not None

    def _is_over(self, number: int) -> bool:
        """Whether it is known that a buffer has no rows, or too few to be delivered."""
        rows, size = self.total_rows, self.lines.buffer_size
        if rows is None:
            return False
        return number * size >= rows or (self._full_only and self._sound and (number + 1) * size > rows)

    def parse(self, number: int, fetched: RowBuffer | list[TextChunk], copy: bool) -> RowBuffer:
        """Return what `fetch` returned; parse and cache it if it is text.

        Raises:
            StreamError: a row is bad.
        """
        if isinstance(fetched, RowBuffer):
            return fetched
        index = self._index(number)
        if index is None or self.cache is None or self._stale:
            return self._parse(fetched)

        def load(_: int) -> Any:
            return tuple(self._parse(fetched)), self.position(number), self.position(number + 1)

        return RowBuffer(*self.cache.get_or_load(index, load, copy=copy, strict=False)[0])

    def _index(self, number: int) -> int | None:
        return self._base + number if number < self._len - 1 else None  # the last has the positions

    def _check_files(self, number: int) -> None:
        begin, end = self.position(number), self.position(number + 1)
        if begin is not None and end is not None:
            self.lines.check(begin, end)

    def _parse(self, chunks: list[TextChunk]) -> RowBuffer:
        trees, faults, rows, skipped = [], list[Fault](), 0, 0
        for chunk in chunks:
            if chunk.fault:
                faults.append((chunk.location(0), chunk.fault))
                rows, skipped = rows + 1, skipped + 1
                continue
            tree, bad = self._parse_chunk(chunk)
            if tree is not None:
                trees.append(tree)
            if bad:
                number, reason = bad[0]
                line = chunk.data.split(b"\n")[number][:_SHOWN].decode(errors="replace")
                reason = f"{line!r:.200}: {reason}; expected {self.parser.expected}"
                faults.append((chunk.location(number), reason))
            if chunk.damage:
                faults.append((chunk.location(chunk.rows), chunk.damage))
            if faults and not self._skip:
                where = self.lines.where(faults[0][0])
                header = "skip_header=1 leaves a header out, " if where.endswith(", line 1") else ""
                raise StreamError(f"{where}: {faults[0][1]}. {header}on_error='skip' leaves such lines out.")
            rows += chunk.rows
            skipped += len(bad) + bool(chunk.damage)
        return RowBuffer(join_trees(trees) if trees else None, rows, skipped, faults[0] if faults else None)

    def _parse_chunk(self, chunk: TextChunk) -> tuple[Any, BadRows]:
        if not chunk.rows:
            return None, []
        try:
            return self.parser.bulk(chunk.data, chunk.rows), []
        except Exception:  # of an engine, or of the user's function
            tree, bad = self.parser.parse_row_by_row(chunk.data)
            if not bad and isinstance(self.parser, Custom):
                raise
            return tree, bad

    def flush(self) -> None:
        """Wait until the disk has the buffers that this process has parsed, so that the next epoch finds them; 60 s at most."""
        if self._disk is not None:
            self._disk.flush()

    def close(self) -> None:
        """Close files and release memory. May be called twice."""
        self.lines.close()
        self._table.close()
        if self.cache is not None:
            self.cache.close()
