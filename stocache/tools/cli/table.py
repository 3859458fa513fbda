"""The table of ``stocache ls``."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stocache.system.limits import format_size
from stocache.tools.cli.listing import NamedCache, describe_users

_SHORTENED = {"name", "held by"}  # columns that become narrower than their texts if the terminal is


def table(caches: list[NamedCache]) -> Table:
    """Return a table with a row for each of some named caches."""
    stats = [cache.stats for cache in caches]
    columns: dict[str, Sequence[str | Text]] = {
        "name": [_in_one_line(cache.name) for cache in caches],
        "size": [format_size(cache.size_bytes) for cache in caches],
        "filled": [f"{each.fill_fraction:.0%}" if each else "" for each in stats],
        "hit rate": [cache.hit_percent for cache in caches],
        "state": [cache.state for cache in caches],
        "held by": [_holders(cache) for cache in caches],
    }
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
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
