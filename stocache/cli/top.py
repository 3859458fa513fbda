"""Show named caches as a table: once for ``stocache ls``, live for ``stocache top``."""

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


def print_table(view: Table) -> None:
    """Print a table as wide as the terminal; in a file or a pipe, 240 columns wide."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(view)


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
            Text(cache.name),  # not a str: brackets in it would be markup
            format_size(cache.memory_bytes),
            f"{stats.filled} of {stats.dataset_len} ({stats.fill_fraction:.0%})" if stats else "",
            cache.hit_percent,
            cache.state,
            "yes" if cache.persistent else "no",
            cache.age,
            Text(cache.problem or _holders(cache)),
        )
    return view


def _holders(cache: NamedCache) -> str:
    if not cache.holders:
        return "a process of another container" if cache.alive else "nobody"
    first, more = cache.holders[0], len(cache.holders) - 1
    return f"{first.pid} {first.command}" + (f" (+{more})" if more else "")


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


def live_table(caches: list[NamedCache], rates: dict[str, float]) -> Table:
    """Return the table of ``stocache top``, the busiest cache first."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="stocache top: quit with q", title_justify="left")
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
            cache.hit_percent,
            f"{rates[cache.path]:,.0f}",
            f"{stats.misses:,}" if stats else "",
            str(len(cache.holders)),
            cache.state,
        )
    return view


def watch(look: Callable[[], list[NamedCache]], interval_s: float) -> None:
    """Show the live table, updated every ``interval_s`` seconds, until the user types q or ends the input."""
    rates = Rates()

    def view() -> Table:
        caches = look()
        return live_table(caches, rates.update(caches, time.monotonic()))

    with _keys() as typed, Live(view(), console=Console(), screen=True, auto_refresh=False) as live:
        while not typed(interval_s):
            live.update(view(), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Enter with a function that waits for a number of seconds and returns whether q was typed meanwhile."""
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
