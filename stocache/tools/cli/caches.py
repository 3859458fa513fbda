"""The commands on named caches: ls, stat, rm and metrics. They work without torch, which takes seconds to import."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from stocache.system.figures import plural
from stocache.tools.cli.output import Json, argument, console, echo, errors_in_one_line, fail, flag, need, show, text_option


def ls(as_json: Json = False) -> None:
    """List your named caches: memory, fill, hit rate, processes.

    States: live, in use; kept, not in use, persistent; dead, left by killed processes; bad, not a readable cache.
    """
    from stocache.tools.cli import listing

    caches = listing.find()
    if as_json:
        typer.echo(json.dumps([cache.as_dict() for cache in caches], indent=2))
    elif caches:
        from stocache.tools.cli.table import table

        console().print(table(caches))
    else:
        typer.echo("no named caches")


def stat(
    name: Annotated[str, argument("NAME", "The name, as 'stocache ls' shows it; or a path with a '/', such as ./folder.")],
    as_json: Json = False,
) -> None:
    """Show everything about one named cache, or about the folder of a disk cache."""
    if _is_path(name):
        from stocache.tools.cli import disk

        with errors_in_one_line():
            facts, rows = disk.describe(name)
    else:
        facts, rows = _describe(name)
    show(facts, rows.items(), as_json)


def _describe(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return everything about a named cache, as JSON can hold it, and in words."""
    from stocache.system.limits import format_size
    from stocache.tools.cli import listing

    cache = next((cache for cache in listing.find() if cache.name == name), None)
    if cache is None:
        fail(f"there is no cache {name!r}. 'stocache ls' lists all caches.{_folder_hint(name)}")
    rows = {"name": cache.name, "file": cache.path, "state": cache.problem or cache.state}
    if cache.stats:
        stats = cache.stats
        rows |= {
            "persistent": "yes" if cache.persistent else "no",
            "age": listing.age_of(cache.created),
            "samples": f"{stats.dataset_len} of {cache.samples}, {format_size(stats.slot_bytes)} each",
            "fingerprint": "none" if cache.fingerprint is None else cache.fingerprint,
            "memory": f"{format_size(cache.memory_bytes)} reserved, at most {format_size(cache.max_memory_bytes)}: up to "
            f"{format_size(stats.capacity_bytes)} of samples, the rest for states and counters",
            "filled": f"{stats.filled} of {stats.slots} slots, {stats.fill_fraction:.1%} of the dataset",
        } | cache.describe_counts()
    return cache.as_dict(), rows | {"held by": "\n".join(listing.describe_users(cache.holders, cache.alive))}


_Names = Annotated[list[str] | None, argument("NAME", "Caches to remove; or folders, as paths with a '/', such as ./folder.")]


def rm(
    names: _Names = None,
    dead: Annotated[bool, flag("--dead", "Remove what killed processes have left: caches, records of loaders.")] = False,
    force: Annotated[bool, flag("--force", "Also remove caches that are in use or damaged.")] = False,
) -> None:
    """Remove named caches, or folders of disk caches, that are not in use.

    With --force, processes that use one keep it, but no other can join.
    """
    from stocache.shm import named, registry
    from stocache.system import limits
    from stocache.system.waiting import printable
    from stocache.tools.cli import listing

    if bool(names) == dead:
        fail("say which: stocache rm NAME..., or stocache rm --dead", 2)
    folders = [name for name in names or () if _is_path(name)]
    if dead:
        files = [file for file in listing.find_all() if file.state == "dead"]
        paths, size = [file.path for file in files], sum(file.memory_bytes for file in files)
        loaders = sum(file.kind == "loader" for file in files)
        of_loaders = f" and {plural(loaders, 'dead loader')}" if loaders else ""
        echo(f"{plural(len(files) - loaders, 'dead cache')}{of_loaders}, {limits.format_size(size)}")
    else:
        with errors_in_one_line():
            paths = [name if name in folders else registry.path_of(name) for name in names or ()]
    failed = False
    for path in paths:
        try:
            if path in folders:
                from stocache.cache.disk import inspection

                inspection.remove(path, force)
            else:
                named.remove(path, force, dead)
            echo(f"removed {printable(path)}")
        except OSError as error:
            failed = True
            is_missing = path not in folders and not os.path.exists(path)
            echo(f"{error}{_folder_hint(os.path.basename(path)) if is_missing else ''}", err=True)
    raise typer.Exit(failed)


def metrics(
    port: Annotated[int | None, text_option("PORT", "Serve them until Ctrl-C; 0: at a free port.", min=0, max=65535)] = None,
    address: Annotated[str, text_option("ADDRESS", "With --port: 0.0.0.0 lets other machines read them, too.")] = "127.0.0.1",
    dashboard: Annotated[bool, flag("--dashboard", "Print a dashboard for Grafana instead.")] = False,
) -> None:
    """Print the counts of named caches and their loaders, for Prometheus. Or serve them over HTTP."""
    if dashboard:
        if port is not None:
            fail("--dashboard goes alone: it prints a file that is the same for all.", 2)
        typer.echo(Path(__file__).with_name("grafana.json").read_text(), nl=False)
        return
    need("prometheus_client", "metrics")
    from stocache.tools.cli import metrics

    if port is None:
        typer.echo(metrics.text_of(), nl=False)
    else:
        metrics.serve(address, port)


def _is_path(name: str) -> bool:
    """Whether a name is the path of a folder: a cache's own name has no "/"."""
    return "/" in name or name in (".", "..")


def _folder_hint(name: str) -> str:
    return f" The folder is ./{name}" if os.path.isdir(name) else ""
