"""Show named caches as a table: once for ``stocache ls``, live for ``stocache top``."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stocache.system.limits import format_size
from stocache.tools.cli.listing import NamedCache

_LEAST_NAME, _LEAST_HELD = 16, 20  # columns of the terminal
_SIZES = ["memory", "size"]


@dataclass(frozen=True)
class _Column:
    """A column of a table.

    Attributes:
        least: the column may become as narrow as this: str cells are shortened in the middle. None: it keeps its width.
    """

    heading: str
    cells: Sequence[str | Text]
    right: bool = False
    least: int | None = None

    @property
    def width(self) -> int:
        """The width of the longest cell."""
        return max(cell_len(str(cell)) for cell in (self.heading, *self.cells))

    @property
    def min_width(self) -> int:
        return self.width if self.least is None else min(self.width, self.least)


def print_table(caches: list[NamedCache]) -> None:
    """Print the table of ``stocache ls`` as wide as the terminal; in a file or a pipe, 240 columns wide."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table(caches, console.width))


def table(caches: list[NamedCache], width: int) -> Table:
    """Return the table of ``stocache ls``."""
    stats = [cache.stats for cache in caches]
    columns = [
        _Column("name", [cache.name for cache in caches], least=_LEAST_NAME),
        *_sizes(caches),
        _Column("filled", [f"{each.fill_fraction:.0%}" if each else "" for each in stats], right=True),
        _Column("samples", [f"{each.filled} of {each.dataset_len}" if each else "" for each in stats], right=True),
        _Column("hit rate", [cache.hit_percent for cache in caches], right=True),
        _Column("state", [cache.state for cache in caches]),
        _Column("keep", ["yes" if cache.persistent or cache.folder else "no" for cache in caches]),
        _Column("age", [cache.age for cache in caches]),
        _Column("held by", [_holders(cache) for cache in caches], least=_LEAST_HELD),
    ]
    return _fit(columns, width, ["keep", "age", "limit", "samples", "held by", "kind", "hit rate", *_SIZES])


def _sizes(caches: list[NamedCache]) -> list[_Column]:
    """Return the columns that say how large caches are: their memory, or more where there are disk caches among them."""
    if not any(cache.folder for cache in caches):
        return [_Column("memory", [format_size(cache.memory_bytes) for cache in caches], right=True)]
    return [
        _Column("kind", [cache.kind for cache in caches]),
        _Column("size", [format_size(cache.size_bytes) for cache in caches], right=True),
        _Column("limit", ["" if cache.limit_bytes is None else format_size(cache.limit_bytes) for cache in caches], right=True),
    ]


def _fit(columns: list[_Column], width: int, spare: Sequence[str], title: str | None = None) -> Table:
    """Return a table that is at most ``width`` wide if possible.

    Columns that may become narrower share the width that the others leave. ``spare`` names those to leave out, in this order.
    """
    for heading in ["", *spare]:
        columns = [column for column in columns if column.heading != heading or not heading]
        left = width - sum(column.min_width for column in columns) - 2 * (len(columns) - 1)
        if left >= 0:
            break
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    cells = []
    for column in columns:
        columns_wide = min(column.width, column.min_width + max(0, left))
        left -= columns_wide - column.min_width
        justify: Literal["left", "right"] = "right" if column.right else "left"
        view.add_column(column.heading, justify=justify, width=columns_wide)
        cells.append([Text(_shorten(cell, columns_wide)) if isinstance(cell, str) else cell for cell in column.cells])
    for row in zip(*cells, strict=True):
        view.add_row(*row)
    return view


def _shorten(text: str, width: int) -> str:
    """Return a text with its middle left out, if it is longer than ``width``."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def _holders(cache: NamedCache) -> Text:
    if cache.problem:
        return Text(cache.problem.removeprefix(f"{cache.path} "), overflow="fold")
    if not cache.holders:
        return Text("a process of another container" if cache.alive else "nobody")
    first, more = cache.holders[0], len(cache.holders) - 1
    return Text(f"{first.pid} " + f"(+{more}) " * bool(more) + first.command, no_wrap=True, overflow="ellipsis")


class Rates:
    """Hits per second of each cache, between two updates."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def update(self, caches: list[NamedCache], now: float) -> dict[str, float]:
        """Return the hits per second since the last update, by path; 0 at the first update."""
        rates = {}
        for cache in caches:
            hits = cache.stats.hits if cache.stats else 0
            since, before = self._last.get(cache.path, (now, hits))
            rates[cache.path] = max(0, hits - before) / (now - since) if now > since else 0.0
            self._last[cache.path] = now, hits
        return rates


def live_table(caches: list[NamedCache], rates: dict[str, float], width: int) -> Table:
    """Return the table of ``stocache top``, the busiest cache first."""
    caches = sorted(caches, key=lambda cache: (-rates[cache.path], cache.name))
    stats = [cache.stats for cache in caches]
    shares = [each.filled / max(1, each.slots) if each else 0.0 for each in stats]
    columns = [
        _Column("name", [cache.name for cache in caches], least=_LEAST_NAME),
        *_sizes(caches),
        _Column("samples", [f"{each.filled} of {each.slots}" if each else "" for each in stats], right=True),
        _Column("bar", ["█" * round(10 * share) + "░" * (10 - round(10 * share)) for share in shares]),
        _Column("full", [f"{share:.0%}" for share in shares], right=True),
        _Column("hit rate", [cache.hit_percent for cache in caches], right=True),
        _Column("hits/s", [f"{rates[cache.path]:,.0f}" for cache in caches], right=True),
        _Column("misses", [f"{each.misses:,}" if each else "" for each in stats], right=True),
        _Column("processes", [str(len(cache.holders)) for cache in caches], right=True),
        _Column("state", [cache.state for cache in caches]),
    ]
    title = "stocache top: quit with Ctrl-C" + ". There are no named caches." * (not caches)
    return _fit(columns, width, ["misses", "samples", "bar", "kind", "limit", "processes", *_SIZES, "state", "hit rate"], title)


def watch(look: Callable[[], list[NamedCache]], interval_s: float) -> None:
    """Show the live table, updated every ``interval_s`` seconds, until Ctrl-C."""
    rates, console = Rates(), Console()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            caches = look()
            live.update(live_table(caches, rates.update(caches, time.monotonic()), console.width), refresh=True)
            time.sleep(interval_s)
