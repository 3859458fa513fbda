"""Show named caches as a table: once for ``stocache ls``, live for ``stocache top``."""

import contextlib
import time
from collections.abc import Callable, Sequence

from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stocache.system.limits import format_size
from stocache.tools.cli.listing import NamedCache, describe_users
from stocache.tools.cli.output import console

_SHORTENED = {"name", "held by"}  # columns that become narrower than their texts if the terminal is


def table(caches: list[NamedCache], rates: dict[str, float] | None = None) -> Table:
    """Return the table of ``stocache ls``; with ``rates``, hits per second by path, that of ``stocache top``, busiest first."""
    title = None
    if rates is not None:
        caches = sorted(caches, key=lambda cache: (-rates[cache.path], cache.name))
        title = "stocache top: quit with Ctrl-C" + ". There are no named caches." * (not caches)
    stats = [cache.stats for cache in caches]
    columns: dict[str, Sequence[str | Text]] = {
        "name": [_in_one_line(cache.name) for cache in caches],
        "size": [format_size(cache.size_bytes) for cache in caches],
        "filled": [f"{each.fill_fraction:.0%}" if each else "" for each in stats],
        "hit rate": [cache.hit_percent for cache in caches],
        "hits/s": [] if rates is None else [f"{rates[cache.path]:,.0f}" for cache in caches],
        "state": [cache.state for cache in caches],
        "held by": [_holders(cache) for cache in caches],
    }
    if rates is None:
        del columns["hits/s"]
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in columns:
        is_text = heading in {*_SHORTENED, "state"}
        view.add_column(heading, justify="left" if is_text else "right", no_wrap=heading not in _SHORTENED)
    for row in zip(*columns.values(), strict=True):
        view.add_row(*row)
    return view


def _in_one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _holders(cache: NamedCache) -> Text:
    if cache.problem:
        return Text(cache.problem.removeprefix(f"{cache.path} "), overflow="fold")
    users = describe_users(cache.holders, cache.alive)
    (first, rest), more = users[0].split(" ", 1), len(users) - 1
    return _in_one_line(f"{first} " + f"(+{more}) " * bool(more) + rest)


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
            live.update(table(caches, update_rates(last, caches, time.monotonic())), refresh=True)
            time.sleep(interval_s)
