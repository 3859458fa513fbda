"""Show named caches as a table: once for ``stocache ls``, live for ``stocache top``."""

import contextlib
import time
from collections.abc import Callable, Sequence

from rich import box
from rich.cells import cell_len
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stocache.system.limits import format_size
from stocache.tools.cli.listing import NamedCache, describe_users
from stocache.tools.cli.output import console

_LEAST = {"name": 16, "held by": 20}  # width of the columns that may become narrower
_LEFT = {"name", "kind", "state", "keep", "age", "held by"}  # the others are numbers


def table(caches: list[NamedCache], width: int, rates: dict[str, float] | None = None) -> Table:
    """Return the table of ``stocache ls``; with ``rates``, hits per second by path, that of ``stocache top``, busiest first."""
    title = None
    if rates is not None:
        caches = sorted(caches, key=lambda cache: (-rates[cache.path], cache.name))
        title = "stocache top: quit with Ctrl-C" + ". There are no named caches." * (not caches)
    stats = [cache.stats for cache in caches]
    columns: dict[str, Sequence[str | Text]] = {
        "name": [cache.name for cache in caches],
        "memory": [format_size(cache.memory_bytes) for cache in caches],
        "kind": [cache.kind for cache in caches],
        "size": [format_size(cache.size_bytes) for cache in caches],
        "limit": ["" if cache.limit_bytes is None else format_size(cache.limit_bytes) for cache in caches],
        "filled": [f"{each.fill_fraction:.0%}" if each else "" for each in stats],
        "samples": [f"{each.filled} of {each.dataset_len}" if each else "" for each in stats],
        "hit rate": [cache.hit_percent for cache in caches],
        "hits/s": [] if rates is None else [f"{rates[cache.path]:,.0f}" for cache in caches],
        "state": [cache.state for cache in caches],
        "keep": ["yes" if cache.persistent or cache.folder else "no" for cache in caches],
        "age": [cache.age for cache in caches],
        "held by": [_holders(cache) for cache in caches],
    }
    unwanted = ["memory"] if any(cache.folder for cache in caches) else ["kind", "size", "limit"]
    for heading in unwanted + ["hits/s"] * (rates is None):
        del columns[heading]
    return _fit(columns, width, ["keep", "age", "limit", "samples", "held by", "kind", "hit rate", "memory", "size"], title)


def _fit(columns: dict[str, Sequence[str | Text]], width: int, spare: Sequence[str], title: str | None) -> Table:
    """Return a table that is at most ``width`` wide if possible.

    Columns that may become narrower share the width that the others leave. ``spare`` names those to leave out, in this order.
    """
    widths = {heading: max(cell_len(str(cell)) for cell in (heading, *cells)) for heading, cells in columns.items()}
    least = {heading: min(wide, _LEAST.get(heading, wide)) for heading, wide in widths.items()}
    for heading in ["", *spare]:
        columns.pop(heading, None)
        left = width - sum(least[heading] for heading in columns) - 2 * (len(columns) - 1)
        if left >= 0:
            break
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    shown = []
    for heading, cells in columns.items():
        wide = min(widths[heading], least[heading] + max(0, left))
        left -= wide - least[heading]
        view.add_column(heading, justify="left" if heading in _LEFT else "right", width=wide)
        shown.append([Text(_shorten(cell, wide)) if isinstance(cell, str) else cell for cell in cells])
    for row in zip(*shown, strict=True):
        view.add_row(*row)
    return view


def _shorten(text: str, width: int) -> str:
    """Return a text with its middle left out, if it is longer than ``width``."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def _holders(cache: NamedCache) -> Text:
    if cache.problem:
        return Text(cache.problem.removeprefix(f"{cache.path} "), overflow="fold")
    users = describe_users(cache.holders, cache.alive)
    (first, rest), more = users[0].split(" ", 1), len(users) - 1
    return Text(f"{first} " + f"(+{more}) " * bool(more) + rest, no_wrap=True, overflow="ellipsis")


def update_rates(last: dict[str, tuple[float, int]], caches: list[NamedCache], now: float) -> dict[str, float]:
    """Return the hits per second of each cache since ``last``, by path, and set that to now; 0 at the first update."""
    rates = {}
    for cache in caches:
        hits = cache.stats.hits if cache.stats else 0
        since, before = last.get(cache.path, (now, hits))
        rates[cache.path] = max(0, hits - before) / (now - since) if now > since else 0.0
        last[cache.path] = now, hits
    return rates


def watch(look: Callable[[], list[NamedCache]], interval_s: float) -> None:
    """Show the live table, updated every ``interval_s`` seconds, until Ctrl-C."""
    last: dict[str, tuple[float, int]] = {}
    with contextlib.suppress(KeyboardInterrupt), Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            caches = look()
            live.update(table(caches, live.console.width, update_rates(last, caches, time.monotonic())), refresh=True)
            time.sleep(interval_s)
