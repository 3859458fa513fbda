"""Show, check and remove the folders of disk caches."""

import dataclasses
import os
import time
from typing import Any

import typer

from stocache.cache.disk import inspection
from stocache.system.limits import format_size
from stocache.system.waiting import printable
from stocache.tools.cli import listing
from stocache.tools.cli.output import echo


def describe(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return everything about the folder of a disk cache, as JSON can hold it, and in words. Raises DiskError."""
    facts = inspection.describe(path)
    name, pids = f"disk.{facts['key']}", set(facts.pop("pids"))
    live = next((cache for cache in listing.find() if os.path.basename(cache.path) == name and cache.alive), None)
    holders = [] if live is None else live.holders
    holders = [*holders, *listing.find_holders(sorted(pids - {holder["pid"] for holder in holders}))]
    facts |= {
        "in_use": bool(live or holders),
        "holders": holders,
        "limit_bytes": live and live.limit_bytes,
        "stats": live and live.stats and dataclasses.asdict(live.stats),
    }
    limit = "" if live is None or live.limit_bytes is None else f", limit {format_size(live.limit_bytes)}"
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["created"]))
    rows = {
        "folder": printable(facts["path"]),
        "user": listing.user_name(facts["uid"]),
        "created": f"{created}, {listing.age_of(facts['created'])} ago",
        "samples": f"{facts['filled']} of {facts['dataset_len']} are there",
        "structure": printable(facts["samples"]),
        "fingerprint": "none" if facts["fingerprint"] is None else printable(facts["fingerprint"]),
        "size": f"{format_size(facts['disk_bytes'])} on the disk{limit}",
        "disk": f"{format_size(facts['free_bytes'])} free, {facts['file_system'] or 'unknown file system'}",
    }
    if live is not None and live.stats is not None:
        rows |= live.describe_counts() | {"damaged": f"{live.stats.damaged} found by reading"}
    return facts, rows | {"in use by": "\n".join(listing.describe_users(holders, live is not None))}


def check(path: str, workers: int) -> None:
    """Read all samples of a disk cache, and print the damaged ones. Raises DiskError; Exit if there is damage."""
    damage = inspection.find_damage(path, workers)
    there = f"{damage.filled} of {damage.dataset_len} samples are there"
    if not damage.damaged:
        typer.echo(f"{there}, no damage")
        return
    numbers = ", ".join(map(str, damage.first)) + ", …" * (damage.damaged > len(damage.first))
    typer.echo(f"{there}: {damage.filled - damage.damaged} sound, {damage.damaged} damaged: {numbers}")
    echo("A damaged sample is loaded again when it is requested. You need not do anything.", err=True)
    raise typer.Exit(1)
