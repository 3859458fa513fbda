"""The command line: bench, info, prepare, inspect, check, ls, stat, rm, top, doctor.

Heavy modules are imported by the command that needs them.
"""

import json
import os
from collections.abc import Iterator
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
    fractions: Annotated[str, typer.Option(help="Cached shares of the dataset to run, in percent.")] = "0,25,50,75,100",
    workers: Annotated[int, typer.Option(min=0, help="DataLoader workers.")] = _CORES,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    size: Annotated[int, typer.Option(min=1, help="Photos are cached as uint8 3 x SIZE x SIZE.")] = 256,
    repeat_folder: Annotated[int, typer.Option(min=1, help="Take the folder this many times, to make it bigger.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Run everything this often and report medians.")] = 1,
    photos: Annotated[int, typer.Option(min=1, help="How many 512x512 photos to generate when no folder is given.")] = 1000,
    warm_pages: Annotated[bool, typer.Option("--warm-pages", help="Leave the files in the page cache.")] = False,
    out: Annotated[Path, typer.Option(help="Where stocache-bench.csv and stocache-bench.png go.")] = Path(),
) -> None:
    """Measure what caching a folder of photos brings: a cold and a warm epoch at each cached fraction."""
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
        raise typer.BadParameter(f"{out} is not a folder to write the results to.")
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
        f"reads: samples read from their files. 1st epoch: how much longer the cold epoch took than without a cache; "
        f"below --repeats 9 that is mostly noise. "
        f"Warm seconds over cached share: R² of a straight line {experiment.linearity(rows):.4f}."
    )
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
    """Show what this machine can give to a cache, and what size_limit_gib="auto" would take."""
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
    typer.echo(f"{limits.SHM_DIR}       {size['shm_free']} free of {size['shm_total']}")
    typer.echo(f"memfd          {'allowed, not bounded by /dev/shm' if facts['memfd'] else 'forbidden'}")
    typer.echo(f"memory         {size['memory_available']} available of {size['memory_total']}")
    typer.echo(f"cgroup limit   {size['cgroup_limit']}" + (f" ({facts['cgroup_path']})" if cgroup else ""))
    typer.echo(f"kept free      {size['memory_floor']}: a cache stops growing before")
    typer.echo(f"huge pages     {_huge_advice(str(facts['memfd_huge_policy']))}")
    typer.echo(f"largest cache  {size['shared_memory_room']}")
    typer.echo(f'"auto" takes   {size["recommended_limit"]}')


def _huge_advice(policy: str) -> str:
    from stocache.system import limits

    if policy not in ("never", "deny"):
        return f"yes ({policy})"
    return f"no ({policy}): each process pays 2 MiB of page tables per GiB cached. As root: echo advise > {limits.SHMEM_HUGE}"


# ---------------------------------------------------------------------------------------------------- prepared folders

_Workers = Annotated[int, typer.Option(min=0, help="Worker processes; 0 for none.")]
_Prepared = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that was prepared.")]


@app.command()
def prepare(
    src: Annotated[Path, typer.Argument(help="Folder of images, .csv, .tsv, .npy, .parquet, or saved Hugging Face dataset.")],
    dst: Annotated[str, typer.Argument(help="Folder or URL to prepare: new, empty, or one in which this was interrupted.")],
    address: Annotated[
        str | None, typer.Argument(help="With --ray: a running Ray. Default: $RAY_ADDRESS, else one started here, for this.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Have blocks written by a Ray cluster.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help=f"Worker processes; 0 for none. Default: {_CORES}; with --ray, for all the cluster's CPUs."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Samples in a block. Default: what --block-bytes hold.")] = None,
    block_bytes: Annotated[str | None, typer.Option(help="Bytes of a block, such as 8MB. Default: 8MiB.")] = None,
    shuffle_seed: Annotated[int | None, typer.Option(min=0, help="Assign samples to blocks at random, by this seed.")] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Decode images, to uint8 3 x SIZE x SIZE. Default: keep the files.")
    ] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start again if it was interrupted.")] = False,
    fingerprint: Annotated[str | None, typer.Option(help="Says which data this is. Other data is refused.")] = None,
) -> None:
    """Prepare a dataset as a folder of blocks. If it was interrupted, the same command goes on where it stopped."""
    from stocache.preparation import sources
    from stocache.preparation.prepare import prepare as prepare_folder
    from stocache.storage.storage import OnDiskBlockDataStorage
    from stocache.storage.writer import BLOCK_BYTES
    from stocache.system.limits import format_size

    if block_size is not None and block_bytes is not None:
        raise typer.BadParameter("give --block-size or --block-bytes, not both.")
    if address is not None and not ray:
        raise typer.BadParameter(f"{address} is one argument too many, or the address of a Ray: give --ray, too.")
    if workers is None:
        workers = 0 if ray else _CORES
    nbytes: int | str = BLOCK_BYTES if block_bytes is None else block_bytes
    if isinstance(nbytes, str) and nbytes.isdecimal():
        nbytes = int(nbytes)  # else it would be in GiB, as in a size limit
    marks = [mark for mark in (fingerprint, size and f"size {size}") if mark]
    with _errors_in_one_line():
        source: Any = sources.open_source(src.absolute() if ray else src, size=size)  # Ray's workers are in other directories
        info, before = source.info, OnDiskBlockDataStorage[Any, Any](dst).is_prepared()
        if shuffle_seed is not None and isinstance(source, sources.ParquetFiles):
            source = sources.InOrder(source)
        storage = prepare_folder(
            source,
            dst,
            num_workers=workers,
            block_size=block_size,
            block_bytes=nbytes,
            shuffle_seed=shuffle_seed,
            info=info,
            fingerprint=", ".join(marks) or None,
            resume=not no_resume,
            engine="ray" if ray else "local",
            address=address,
        )
        index = storage.index
    typer.echo(
        f"{dst}{' was prepared already' if before else ''}: {index.samples} samples in "
        f"{len(index.blocks)} block{'s' * (len(index.blocks) != 1)} of "
        f"{index.block_size}, {format_size(_bytes(index))}. In Python: "
        f"stocache.StorageDataset(stocache.OnDiskBlockDataStorage({dst!r}))"
    )


@app.command()
def inspect(folder: _Prepared, as_json: _Json = False) -> None:
    """Show what is in a prepared folder: how much, what samples look like, how they were prepared. Reads no samples."""
    import reprlib

    from stocache.errors import DamagedError, StorageError
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
        except StorageError as error:  # it is pickled, or made of classes that are not here
            shown = f"not shown: {error}"
    if as_json:
        amounts = {
            "samples": index.samples,
            "blocks": len(index.blocks),
            "block_size": index.block_size,
            "bytes": _bytes(index),
        }
        facts = {"structure": index.structure, "info": shown if index.info_checksum else info, "plan": index.plan}
        typer.echo(json.dumps(amounts | facts, indent=2))
        return
    plan = ", ".join(f"{key} {value!r}" for key, value in index.plan.items() if value is not None)
    rows = [
        ("samples", str(index.samples)),
        ("blocks", f"{len(index.blocks)} of {index.block_size} samples"),
        ("size", format_size(_bytes(index))),
        ("plan", plan),
        ("info", shown),
        *_tree("structure", index.structure),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


@app.command()
def check(folder: _Prepared, workers: _Workers = _CORES) -> None:
    """Read everything in a prepared folder, and list what is damaged. Exits with 1 if anything is."""
    from stocache.errors import StorageError
    from stocache.storage.storage import OnDiskBlockDataStorage

    with _errors_in_one_line():
        storage = OnDiskBlockDataStorage[Any, Any](folder)
        try:
            index = storage.index
        except StorageError as error:  # without which nothing can be told of the rest
            problems = [str(error)]
        else:
            problems = _problems(storage, workers)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{len(index.blocks)} blocks, {index.samples} samples, no damage")


def _problems(storage: Any, workers: int) -> list[str]:
    """Return what is wrong with the blocks and the info of a storage, and which files are none of its."""
    from torch.utils.data import DataLoader
    from tqdm import tqdm

    from stocache.errors import StorageError
    from stocache.storage.manifest import INFO, Entry, block_name, open_block

    index, folder = storage.index, Path(storage.base_folder)
    blocks: Any = _Checks(storage)
    loader = DataLoader(blocks, batch_size=None, num_workers=min(workers, len(blocks)))
    problems = [problem for problem in tqdm(loader, desc=f"checking {folder}", unit="block") if problem]
    if index.info_checksum is not None:
        path = str(folder / INFO)
        try:
            open_block(path, path, Entry(1, 0, index.info_checksum), decode=False).verify()
        except (StorageError, OSError) as error:
            problems.append(str(error))
    names = {folder / block_name(number) for number in range(len(blocks))}
    strange = sorted(set(folder.joinpath(block_name(0)).parent.glob("*")) - names)
    return problems + [f"{path} is not in the index: nothing reads it. Remove it." for path in strange]


class _Checks:
    """What is wrong with each block of a storage, "" for nothing; as a dataset, so that a DataLoader's workers look."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __len__(self) -> int:
        return len(self._storage.index.blocks)

    def __getitem__(self, number: int) -> str:
        try:
            return self._storage.check(number) or ""
        except OSError as error:  # the disk fails
            from stocache.storage.manifest import block_name

            return f"{self._storage.base_folder}/{block_name(number)} cannot be read: {error}."


def _bytes(index: Any) -> int:
    return sum(entry.nbytes for entry in index.blocks)


def _tree(name: str, node: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the structure of samples, or of a part of them, in lines of two columns."""
    what, parts = _describe(node)
    yield "  " * depth + name, what
    for inner, part in parts:
        yield from _tree(inner, part, depth + 1)


def _describe(node: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return what a part of a structure is, and its own parts."""
    if node is None:
        return "no samples", []
    kind = node["kind"]
    if kind == "in":
        cls = node["class"].removeprefix("builtins:")
        return cls.replace("NoneType", "None"), list(zip(map(repr, node["keys"]), node["children"], strict=True))
    if kind == "union":
        return "one of", [("or", child) for child in node["children"]]
    if kind in ("list", "tuple"):
        return f"{kind} of any length", [("each", node["items"])]
    if "dtype" not in node and "type" not in node:  # str, bytes, dates, …; members of an enum, which has a class
        return {"long": "int", "pickle": "pickled"}.get(kind, node.get("class", kind)), []
    words = [node["class"], "of", node["type"]] if kind == "numbers" else [node["type"] if kind == "number" else kind]
    if "dtype" in node:
        words.append(str(node["dtype"]))
    sizes = ["?"] * node["dims"] if "dims" in node else list(map(str, node["shape"]))  # ?: it varies
    if sizes:
        words.append("x".join(sizes))
    return " ".join(words), []


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """End the command with the message of an error that is the user's to mend."""
    from stocache.errors import StocacheError

    try:
        yield
    except (StocacheError, OSError) as error:
        message = str(error)
        if "Original Traceback" in message:  # of a worker of a DataLoader: the last line names the error
            message = message.strip().splitlines()[-1].partition(": ")[2]
        _fail(" ".join(message.split()))


# ---------------------------------------------------------------------------------------------------- named caches

_User = Annotated[str | None, typer.Option("--user", help="Caches of this user (name or number), or of 'all'. Default: yours.")]


@app.command()
def ls(user: _User = None, as_json: _Json = False) -> None:
    """List named caches: memory, fill, hit rate, who holds them.

    States: live, somebody holds it; kept, nobody does, but it is to stay; dead, left behind by killed processes; bad, no cache.
    """
    from stocache.cli import listing, top

    caches = listing.find(_uid(user))
    if as_json:
        typer.echo(json.dumps([cache.as_dict() for cache in caches], indent=2))
    elif caches:
        _print(top.table(caches, users=user is not None))
    else:
        typer.echo("no named caches")


@app.command()
def stat(name: str, user: _User = None, as_json: _Json = False) -> None:
    """Show everything about one named cache."""
    from stocache.cli import listing, top
    from stocache.system.limits import format_size

    cache = next((cache for cache in listing.find(_uid(user)) if cache.name == name), None)
    if cache is None:
        _fail(f"there is no cache {name!r}. stocache ls lists those there are.")
    if as_json:
        typer.echo(json.dumps(cache.as_dict(), indent=2))
        return
    rows = {"name": cache.name, "user": cache.user, "file": cache.path, "state": cache.problem or cache.state}
    if cache.stats:
        stats = cache.stats
        rows |= {
            "persistent": "yes" if cache.persistent else "no",
            "age": top.age(cache),
            "samples": f"{stats.dataset_len} of {cache.samples}, {format_size(stats.slot_bytes)} each",
            "fingerprint": "none" if cache.fingerprint is None else cache.fingerprint,
            "memory": f"{format_size(cache.memory_bytes)}, at most {format_size(stats.capacity_bytes)}",
            "filled": f"{stats.filled} of {stats.slots} slots, {stats.fill_fraction:.1%} of the dataset",
            "hits": f"{stats.hits}, rate {top.hit_rate(cache)}",
            "misses": str(stats.misses),
            "fills": f"{stats.fills}, late {stats.races}, refused {stats.refused}, rejected {stats.rejected}",
        }
    for key, value in rows.items():
        typer.echo(f"{key:<12} {value}")
    for number, holder in enumerate(cache.holders):
        typer.echo(f"{'held by' if number == 0 else '':<12} {holder.pid} {holder.command}")


@app.command()
def rm(
    names: Annotated[list[str] | None, typer.Argument(help="Caches to remove.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Remove what killed processes left behind, but nothing kept.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what is in use, damaged, or another user's.")] = False,
    user: _User = None,
) -> None:
    """Remove named caches that nobody holds. With --force, those who hold one go on, but nobody finds it any more."""
    from stocache.cli import listing
    from stocache.errors import StocacheError
    from stocache.shm import named
    from stocache.system import limits

    if bool(names) == dead:
        raise typer.BadParameter("say which: stocache rm NAME..., or stocache rm --dead")
    uid = _uid(user)
    if dead:
        doomed = [cache for cache in listing.find(uid) if cache.state == "dead"]
        paths, size = [cache.path for cache in doomed], sum(cache.memory_bytes for cache in doomed)
        typer.echo(f"{len(paths)} dead caches, {limits.format_size(size)}")
    else:
        if uid == -1:
            raise typer.BadParameter("--user all goes with --dead; name one user.")
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
def top(interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0, user: _User = None) -> None:
    """Watch named caches live: fill, hit rate, hits per second. q leaves."""
    import sys

    from stocache.cli import listing
    from stocache.cli.top import watch

    uid = _uid(user)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _fail("top needs a terminal. In scripts: stocache ls --json")
    watch(lambda: listing.find(uid), interval)


@app.command()
def doctor(
    size_limit_gib: Annotated[str | None, typer.Option(help="The limit you mean to give a cache, such as 32 or 500MB.")] = None,
    as_json: _Json = False,
) -> None:
    """Look for what stands in a cache's way on this machine, and say what to do. Exits with 1 if there is a problem."""
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
    """Return the number of a user, -1 for "all", None for none given."""
    import pwd

    if user is None or user == "all":
        return -1 if user else None
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise typer.BadParameter(f"there is no user {user!r} here.") from None


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


def _print(table: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=240)  # a file or a pipe has room
    console.print(table)


def main() -> None:
    """Run the command line."""
    app()
