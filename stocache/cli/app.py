"""The commands bench, info, prepare, inspect, check, ls, stat, rm, top and doctor.

Each command imports what it needs: torch takes seconds to import, and info, ls, stat and rm work without it.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_CORES = min(4, len(os.sched_getaffinity(0)))
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")]


@app.callback()
def _about() -> None:
    """Cache any PyTorch dataset in shared memory, one copy per machine."""


@app.command()
def bench(
    folder: Annotated[Path | None, typer.Argument(help="Folder of JPEGs, searched recursively. Default: generated.")] = None,
    fractions: Annotated[str, typer.Option(help="Cached shares of the dataset to measure, in percent.")] = "0,25,50,75,100",
    workers: Annotated[int, typer.Option(min=0, help="DataLoader workers.")] = _CORES,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    size: Annotated[int, typer.Option(min=1, help="Photos are cached as uint8 3 x SIZE x SIZE.")] = 256,
    repeat_folder: Annotated[int, typer.Option(min=1, help="Use each photo of the folder so many times.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Run everything so many times and report medians.")] = 1,
    photos: Annotated[int, typer.Option(min=1, help="Number of 512x512 photos to generate if no folder is given.")] = 1000,
    warm_pages: Annotated[bool, typer.Option("--warm-pages", help="Leave the files in the page cache.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for stocache-bench.csv and stocache-bench.png.")] = Path(),
) -> None:
    """Measure the effect of a cache on a folder of photos. Runs a cold and a warm epoch at each cached fraction."""
    try:
        import matplotlib  # noqa: F401
        import PIL  # noqa: F401
    except ImportError as error:
        raise typer.BadParameter(f"this command needs {error.name}: pip install 'stocache[bench]'") from None
    from stocache.cli import bench as experiment

    shares = _parse_percentages(fractions)
    if folder is not None and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder.")
    if not out.is_dir():
        raise typer.BadParameter(f"{out} is not a folder. Give one for the results.")
    paths = experiment.find_jpegs(folder or experiment.photo_folder(photos)) * repeat_folder
    if not paths:
        raise typer.BadParameter(f"{folder} holds no .jpg or .jpeg files.")

    pages = "left in the page cache" if warm_pages else "dropped from the page cache before each epoch"
    typer.echo(
        f"{len(paths)} photos from {folder or 'generated files'}, {pages}; decoded and resized to 3x{size}x{size} uint8; "
        f"{workers} workers, batches of {batch_size}, shuffled; medians of {repeats}."
    )
    epochs = experiment.sweep(
        paths,
        fractions=shares,
        size=size,
        workers=workers,
        batch_size=batch_size,
        repeats=repeats,
        before_epoch=(lambda: None) if warm_pages else None,
    )
    rows = experiment.summarize(epochs)
    typer.echo(experiment.format_table(rows))
    typer.echo(
        "reads: samples read from their files. 1st epoch: how much longer the cold epoch took than without a cache; "
        "with fewer than --repeats 9 it varies too much to tell."
    )
    if len(rows) > 2:
        typer.echo(f"Warm seconds over cached share: R² of a straight line {experiment.linearity(rows):.4f}.")
    csv_path, png_path = out / "stocache-bench.csv", out / "stocache-bench.png"
    experiment.write_csv(rows, csv_path)
    experiment.plot(rows, png_path, f"{len(paths)} photos, {workers} workers")
    typer.echo(f"wrote {csv_path} and {png_path}")


def _parse_percentages(text: str) -> list[float]:
    try:
        percentages = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"--fractions {text!r}: write percentages such as 0,25,50,75,100.") from None
    if not all(0 <= percentage <= 100 for percentage in percentages):
        raise typer.BadParameter(f"--fractions {text!r}: percentages lie between 0 and 100.")
    return [percentage / 100 for percentage in percentages]


@app.command()
def info(as_json: _Json = False) -> None:
    """Show how much memory this machine has for a cache. Includes the size that size_limit_gib="auto" would choose."""
    from stocache.system import limits

    cgroup, memory = limits.cgroup_memory(), limits.memory()
    amounts = {
        "shm_total": limits.shm_total(),
        "shm_free": limits.shm_free(),
        "memory_total": memory.total,
        "memory_available": memory.available,
        "memory_floor": memory.floor,
        "cgroup_limit": cgroup.limit if cgroup else None,
        "cgroup_available": cgroup.available if cgroup else None,
        "shared_memory_room": limits.shared_memory_room(),
        "recommended_limit": limits.recommended_limit(),
    }
    facts = {
        "memfd": limits.has_memfd(),
        "memfd_huge_policy": limits.memfd_huge_policy(),
        "cgroup_path": cgroup.path if cgroup else None,
    }
    if as_json:
        typer.echo(json.dumps(amounts | facts, indent=2))
        return
    size = {name: "none" if amount is None else limits.format_size(amount) for name, amount in amounts.items()}
    rows = {
        limits.SHM_DIR: f"{size['shm_free']} free of {size['shm_total']}",
        "memfd": "allowed, not bounded by /dev/shm" if facts["memfd"] else "forbidden",
        "memory": f"{size['memory_available']} available of {size['memory_total']}",
        "cgroup limit": size["cgroup_limit"] + (f" ({cgroup.path})" if cgroup else ""),
        "kept free": f"{size['memory_floor']}: a cache stops growing before",
        "huge pages": _describe_huge_pages(str(facts["memfd_huge_policy"])),
        "largest cache": size["shared_memory_room"],
        '"auto" takes': size["recommended_limit"],
    }
    _print_rows(rows.items())


def _describe_huge_pages(policy: str) -> str:
    from stocache.system import limits

    if policy not in ("never", "deny"):
        return f"yes ({policy})"
    return f"no ({policy}): each process pays 2 MiB of page tables per GiB cached. As root: echo advise > {limits.SHMEM_HUGE}"


# ---------------------------------------------------------------------------------------------------- prepared folders

_Workers = Annotated[int, typer.Option(min=0, help="Worker processes; 0: this process does the work.")]
_Prepared = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that was prepared.")]


@app.command()
def prepare(
    src: Annotated[Path, typer.Argument(help="Folder of images, .csv, .tsv, .npy, .parquet, or saved Hugging Face dataset.")],
    dst: Annotated[str, typer.Argument(help="Folder or URL to prepare: new, empty, or of an interrupted preparation.")],
    address: Annotated[
        str | None, typer.Argument(help="With --ray: a running Ray. Default: $RAY_ADDRESS, else a Ray is started here.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Let a Ray cluster write the blocks.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Worker processes; 0: one that only loads. Default: {_CORES}; with --ray, all CPUs of the cluster.",
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Samples in a block. Default: as many as fit in --block-bytes.")
    ] = None,
    block_bytes: Annotated[str | None, typer.Option(help="Bytes of a block, such as 8MB. Default: 8MiB.")] = None,
    shuffle_seed: Annotated[int | None, typer.Option(min=0, help="Assign samples to blocks at random, with this seed.")] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Decode images to uint8 3 x SIZE x SIZE. Default: keep the files.")
    ] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start again if it was interrupted.")] = False,
    fingerprint: Annotated[str | None, typer.Option(help="Identifies the data. A folder with another one is refused.")] = None,
) -> None:
    """Prepare a dataset as a folder of blocks. After an interruption, the same command continues."""
    from stocache.preparation import sources
    from stocache.preparation.prepare import prepare as prepare_folder
    from stocache.storage.storage import OnDiskBlockDataStorage
    from stocache.storage.writer import BLOCK_BYTES
    from stocache.system.limits import format_size

    if block_size is not None and block_bytes is not None:
        raise typer.BadParameter("give --block-size or --block-bytes, not both.")
    if address is not None and not ray:
        raise typer.BadParameter(f"{address} is one argument too many, or the address of a Ray: then give --ray too.")
    if workers is None:
        workers = 0 if ray else _CORES
    nbytes: int | str = BLOCK_BYTES if block_bytes is None else block_bytes
    if isinstance(nbytes, str) and nbytes.isdecimal():
        nbytes = int(nbytes)  # a bare number is in bytes here; in a str it would be in GiB
    marks = [mark for mark in (fingerprint, size and f"size {size}") if mark]
    with _errors_in_one_line():
        source = sources.open_source(src.absolute() if ray else src, size=size)  # Ray's workers run in other directories
        before = OnDiskBlockDataStorage[Any, Any](dst).is_prepared()
        storage = prepare_folder(
            source if shuffle_seed is None else source.for_shuffling(),
            dst,
            num_workers=workers,
            block_size=block_size,
            block_bytes=nbytes,
            shuffle_seed=shuffle_seed,
            info=source.info,
            fingerprint=", ".join(marks) or None,
            resume=not no_resume,
            engine="ray" if ray else "local",
            address=address,
        )
        index = storage.index
    blocks = len(index.blocks)
    typer.echo(
        f"{dst}{' was prepared already' if before else ''}: {index.samples} samples in {blocks} block{'s' * (blocks != 1)} of "
        f"{index.block_size}, {format_size(index.nbytes)}. In Python: "
        f"stocache.StorageDataset(stocache.OnDiskBlockDataStorage({dst!r}))"
    )


@app.command()
def inspect(folder: _Prepared, as_json: _Json = False) -> None:
    """Describe a prepared folder. Shows its size, the structure of its samples and how it was prepared; reads no samples."""
    import reprlib

    from stocache.errors import DamagedError, StorageError
    from stocache.storage.inspection import describe_structure
    from stocache.storage.storage import OnDiskBlockDataStorage
    from stocache.system.limits import format_size

    with _errors_in_one_line():
        storage = OnDiskBlockDataStorage[Any, Any](folder)
        index = storage.index
        try:
            info = storage.load_dataset_info()
            shown = reprlib.repr(info)
        except DamagedError:
            raise
        except StorageError as error:  # it is pickled, or needs classes that are missing
            shown = f"not shown: {error}"
    if as_json:
        amounts = {
            "samples": index.samples,
            "blocks": len(index.blocks),
            "block_size": index.block_size,
            "bytes": index.nbytes,
        }
        facts = {"structure": index.structure, "info": shown if index.info_checksum else info, "plan": index.plan}
        typer.echo(json.dumps(amounts | facts, indent=2))
        return
    plan = ", ".join(f"{key} {value!r}" for key, value in index.plan.items() if value is not None)
    rows = [
        ("samples", str(index.samples)),
        ("blocks", f"{len(index.blocks)} of {index.block_size} samples"),
        ("size", format_size(index.nbytes)),
        ("plan", plan),
        ("info", shown),
        *describe_structure(index.structure),
    ]
    _print_rows(rows)


@app.command()
def check(folder: _Prepared, workers: _Workers = _CORES) -> None:
    """Read a whole prepared folder and list its damage. Exits with 1 if there is any."""
    from stocache.errors import StorageError
    from stocache.storage.inspection import find_damage
    from stocache.storage.storage import OnDiskBlockDataStorage

    with _errors_in_one_line():
        storage = OnDiskBlockDataStorage[Any, Any](folder)
        try:
            index = storage.index
        except StorageError as error:  # the rest cannot be checked without it
            problems = [str(error)]
        else:
            problems = find_damage(storage, workers)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{len(index.blocks)} blocks, {index.samples} samples, no damage")


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """End the command with one line for an error that the user can correct."""
    from stocache.errors import StocacheError

    try:
        yield
    except (StocacheError, OSError) as error:
        message = str(error)
        if "Original Traceback" in message:  # from a worker of a DataLoader: the last line is the error
            message = message.strip().splitlines()[-1].partition(": ")[2]
        _fail(" ".join(message.split()))


# ---------------------------------------------------------------------------------------------------- named caches

_User = Annotated[str | None, typer.Option("--user", help="Caches of this user (name or id), or of 'all'. Default: yours.")]


@app.command()
def ls(user: _User = None, as_json: _Json = False) -> None:
    """List named caches: memory, fill, hit rate, processes.

    States: live, in use; kept, not in use, persistent; dead, left by killed processes; bad, not a readable cache.
    """
    from stocache.cli import listing

    caches = listing.find(_uid(user))
    if as_json:
        typer.echo(json.dumps([cache.as_dict() for cache in caches], indent=2))
    elif caches:
        from stocache.cli import top

        top.print_table(top.table(caches, users=user is not None))
    else:
        typer.echo("no named caches")


@app.command()
def stat(name: str, user: _User = None, as_json: _Json = False) -> None:
    """Show everything about one named cache."""
    from stocache.cli import listing
    from stocache.system.limits import format_size

    cache = next((cache for cache in listing.find(_uid(user)) if cache.name == name), None)
    if cache is None:
        _fail(f"there is no cache {name!r}. 'stocache ls' lists all caches.")
    if as_json:
        typer.echo(json.dumps(cache.as_dict(), indent=2))
        return
    rows = {"name": cache.name, "user": cache.user, "file": cache.path, "state": cache.problem or cache.state}
    if cache.stats:
        stats = cache.stats
        rows |= {
            "persistent": "yes" if cache.persistent else "no",
            "age": cache.age,
            "samples": f"{stats.dataset_len} of {cache.samples}, {format_size(stats.slot_bytes)} each",
            "fingerprint": "none" if cache.fingerprint is None else cache.fingerprint,
            "memory": f"{format_size(cache.memory_bytes)}, at most {format_size(stats.capacity_bytes)}",
            "filled": f"{stats.filled} of {stats.slots} slots, {stats.fill_fraction:.1%} of the dataset",
            "hits": f"{stats.hits}, rate {cache.hit_percent}",
            "misses": str(stats.misses),
            "fills": f"{stats.fills}, late {stats.races}, refused {stats.refused}, rejected {stats.rejected}",
        }
    holders = [f"{holder.pid} {holder.command}" for holder in cache.holders]
    _print_rows([*rows.items(), *zip(["held by", *[""] * len(holders)], holders, strict=False)])


@app.command()
def rm(
    names: Annotated[list[str] | None, typer.Argument(help="Caches to remove.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Remove caches that killed processes left, if not persistent.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also remove caches in use, damaged, or of another user.")] = False,
    user: _User = None,
) -> None:
    """Remove named caches that are not in use. With --force, processes that use one keep it, but no other can join."""
    from stocache.cli import listing
    from stocache.errors import StocacheError
    from stocache.shm import named
    from stocache.system import limits

    if bool(names) == dead:
        raise typer.BadParameter("say which: stocache rm NAME..., or stocache rm --dead")
    uid = _uid(user)
    if dead:
        caches = [cache for cache in listing.find(uid) if cache.state == "dead"]
        paths, size = [cache.path for cache in caches], sum(cache.memory_bytes for cache in caches)
        typer.echo(f"{len(paths)} dead caches, {limits.format_size(size)}")
    else:
        if uid == -1:
            raise typer.BadParameter("--user all works with --dead only. Name one user.")
        paths = []
        for name in names or ():
            try:
                paths.append(named.find(name, uid))
            except StocacheError as error:
                _fail(str(error))
    failed = False
    for path in paths:
        try:
            named.remove(path, force, dead)
            typer.echo(f"removed {path}")
        except OSError as error:
            failed = True
            typer.echo(str(error), err=True)
    raise typer.Exit(failed)


@app.command()
def top(interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0, user: _User = None) -> None:
    """Watch named caches: fill, hit rate, hits per second. Quit with q."""
    import sys

    from stocache.cli import listing
    from stocache.cli.top import watch

    uid = _uid(user)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _fail("top needs a terminal. In scripts: stocache ls --json")
    watch(lambda: listing.find(uid), interval)


@app.command()
def doctor(
    size_limit_gib: Annotated[str | None, typer.Option(help="The limit of a planned cache, such as 32 or 500MB.")] = None,
    as_json: _Json = False,
) -> None:
    """Find settings of this machine that hinder a cache. Names the remedies. Exits with 1 if there is a problem."""
    from stocache.cli import doctor
    from stocache.errors import LimitError
    from stocache.system import limits

    try:
        size_limit = limits.parse_size(size_limit_gib) if size_limit_gib not in (None, "auto") else None
    except LimitError as error:
        raise typer.BadParameter(str(error)) from None
    findings = doctor.examine(size_limit)
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.kind}: {finding.what}\n    do: {finding.remedy}")
        typer.echo(f"{sum(finding.kind == 'problem' for finding in findings)} problems found")
    raise typer.Exit(any(finding.kind == "problem" for finding in findings))


def _uid(user: str | None) -> int | None:
    """Return a user's id; -1 for "all", None if no user is given."""
    import pwd

    if user is None or user == "all":
        return -1 if user else None
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise typer.BadParameter(f"there is no user {user!r} on this machine.") from None


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def main() -> None:
    """Run the command line."""
    app()
