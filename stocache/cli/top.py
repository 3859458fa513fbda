"""``stocache ls`` and ``stocache top``: the named caches as a table, once or live."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stocache.cli.listing import NamedCache
from stocache.system.limits import format_size


def table(caches: list[NamedCache], users: bool = False) -> Table:
    """Return the table of ``stocache ls``; ``users`` adds a column."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ["user"] * users + ["name"]:
        view.add_column(column, overflow="fold")
    for column in ("memory", "filled", "hit rate"):
        view.add_column(column, justify="right", no_wrap=True)
    for column in ("state", "keep", "age"):
        view.add_column(column, no_wrap=True)
    view.add_column("held by", overflow="fold")
    for cache in caches:
        stats = cache.stats
        view.add_row(
            *[cache.user] * users,
            Text(cache.name),  # as it is: brackets of a str would be taken for markup
            format_size(cache.memory_bytes),
            f"{stats.filled} of {stats.dataset_len} ({stats.fill_fraction:.0%})" if stats else "",
            hit_rate(cache),
            cache.state,
            "yes" if cache.persistent else "no",
            age(cache),
            Text(cache.problem or _holders(cache)),
        )
    return view


def hit_rate(cache: NamedCache) -> str:
    """Return the hit rate in percent; "-" before the first get."""
    stats = cache.stats
    return f"{stats.hit_rate:.1%}" if stats and stats.hits + stats.misses else "-"


def age(cache: NamedCache) -> str:
    """Return how long ago a cache was made: "3 h"."""
    seconds = max(0.0, time.time() - cache.created)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s" if cache.created else ""


def _holders(cache: NamedCache) -> str:
    if not cache.holders:
        return "a process of another container" if cache.alive else "nobody"
    first, more = cache.holders[0], len(cache.holders) - 1
    return f"{first.pid} {first.command}" + (f" (+{more})" if more else "")


class Rates:
    """Hits per second of each cache, between one look and the next."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def update(self, caches: list[NamedCache], now: float) -> dict[str, float]:
        """Return the hits per second since the last look, by path; 0 at the first."""
        rates = {}
        for cache in caches:
            hits = cache.stats.hits if cache.stats else 0
            since, before = self._last.get(cache.path, (now, hits))
            rates[cache.path] = max(0, hits - before) / (now - since) if now > since else 0.0
            self._last[cache.path] = now, hits
        return rates


def live_table(caches: list[NamedCache], rates: dict[str, float]) -> Table:
    """Return the table of ``stocache top``, the busiest cache first."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="stocache top: q leaves", title_justify="left")
    view.add_column("name", overflow="fold")
    for column in ("memory", "filled", "", "hit rate", "hits/s", "misses", "processes"):
        view.add_column(column, justify="right")
    view.add_column("state")
    for cache in sorted(caches, key=lambda cache: (-rates[cache.path], cache.name)):
        stats = cache.stats
        share = stats.filled / max(1, stats.slots) if stats else 0.0
        view.add_row(
            Text(cache.name),
            format_size(cache.memory_bytes),
            f"{stats.filled} of {stats.slots}" if stats else "",
            "█" * round(10 * share) + "░" * (10 - round(10 * share)),
            hit_rate(cache),
            f"{rates[cache.path]:,.0f}",
            f"{stats.misses:,}" if stats else "",
            str(len(cache.holders)),
            cache.state,
        )
    return view


def watch(look: Callable[[], list[NamedCache]], interval_s: float) -> None:
    """Show the live table until the user types q or ends the input."""
    rates = Rates()

    def view() -> Table:
        caches = look()
        return live_table(caches, rates.update(caches, time.monotonic()))

    with _keys() as typed, Live(view(), console=Console(), screen=True, auto_refresh=False) as live:
        while not typed(interval_s):
            live.update(view(), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits so many seconds, and tells whether q was typed meanwhile."""
    stdin = sys.stdin.fileno()
    settings = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)

    def typed(timeout_s: float) -> bool:
        ready, _, _ = select.select([stdin], [], [], timeout_s)
        return bool(ready) and os.read(stdin, 1) in (b"q", b"Q", b"")

    try:
        yield typed
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, settings)
