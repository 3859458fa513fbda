"""The commands bench, advise, info, prepare, inspect, check, ls, stat, rm, top, metrics and doctor.

Each command imports what it needs: torch takes seconds to import, and info, ls, stat, rm, top and metrics work without it.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from stocache.cli.output import echo, print_rows, terminal_width
from stocache.system.figures import plural

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_CORES = min(4, len(os.sched_getaffinity(0)))
_AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Cache samples that need pickle, too, as CachedDataset(..., allow_pickle=True).")
]
_CollateFn = Annotated[
    str | None,
    typer.Option(
        metavar="FUNCTION",
        show_default=False,
        help="The collate_fn of the DataLoader, as module:function. Default: torch's, or lists if that does not fit.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")]


class _Command(TyperCommand):
    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help, whole: the list of commands breaks it into lines."""
        return super().get_short_help_str(10 * limit + 1000)


_command = partial(app.command, cls=_Command)


def _print_version(wanted: bool) -> None:
    import stocache

    if wanted:
        typer.echo(f"stocache {stocache.__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Cache any PyTorch dataset in shared memory, one copy per machine."""


@_command()
def bench(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            show_default=False,
            help="Folder of JPEGs, searched recursively; or module:function, a function of yours that returns a map-style "
            "dataset. Default: generated photos.",
        ),
    ] = None,
    fractions: Annotated[
        str, typer.Option(metavar="LIST", help="Cached shares of the dataset to measure, in percent.")
    ] = "0,25,50,75,100",
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="DataLoader workers.")] = _CORES,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Samples in a batch.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Run everything N times and report medians.")] = 1,
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="Folder for the results, or a path that ends in .csv or .png. Folders that are missing are made.",
        ),
    ] = Path(),
    size: Annotated[int, typer.Option(min=1, metavar="N", help="Photos: cache them as uint8 3 x N x N.")] = 256,
    repeat_folder: Annotated[int, typer.Option(min=1, metavar="N", help="Photos: use each one of the folder N times.")] = 1,
    photos: Annotated[
        int, typer.Option(min=1, metavar="N", help="Photos: generate N of 512 x 512 if there is no SOURCE.")
    ] = 1000,
    warm_pages: Annotated[bool, typer.Option("--warm-pages", help="Photos: leave the files in the page cache.")] = False,
    allow_pickle: _AllowPickle = False,
    collate_fn: _CollateFn = None,
) -> None:
    """Measure the effect of a cache on your dataset. Runs a cold and a warm epoch at each cached share."""
    folder = Path(source) if source is not None and (":" not in source or Path(source).is_dir()) else None
    by_function = source is not None and folder is None
    try:
        import matplotlib  # noqa: F401

        if not by_function:
            import PIL  # noqa: F401
    except ImportError as error:
        _fail(f"This command needs {error.name}: pip install 'stocache[bench]'", 2)
    from stocache.cli import bench as experiment

    shares = _parse_percentages(fractions)
    options: dict[str, Any] = {"fractions": shares, "workers": workers, "batch_size": batch_size, "repeats": repeats}
    if source is not None and by_function:
        _refuse(context, ("size", "repeat_folder", "photos", "warm_pages"), "photos. Leave it out for a dataset of yours")
        dataset, used = _load_source(source, allow_pickle, collate_fn)
        csv_path, png_path = _result_paths(out)
        samples = f"{plural(len(dataset), 'sample')} of {source}"
        how = f"{type(dataset).__name__}, files left in the page cache"
        run = partial(experiment.sweep_dataset, dataset, **options, **used)
    else:
        _refuse(context, ("allow_pickle", "collate_fn"), "a dataset of yours. Leave it out for photos")
        if folder is not None and not folder.is_dir():
            _fail(f"{folder} is not a folder. Give a folder of JPEGs, or module:function.", 2)
        csv_path, png_path = _result_paths(out)
        paths = experiment.find_jpegs(folder or experiment.photo_folder(photos)) * repeat_folder
        if not paths:
            _fail(f"{folder} holds no .jpg or .jpeg files.", 2)
        samples = f"{plural(len(paths), 'photo')} from {folder or 'generated files'}"
        pages = "left in the page cache" if warm_pages else "dropped from the page cache before each epoch"
        how = f"{pages}; decoded and resized to 3x{size}x{size} uint8"
        before_epoch = (lambda: None) if warm_pages else None
        run = partial(experiment.sweep, paths, size=size, before_epoch=before_epoch, **options)
    echo(f"{samples}, {how}; {workers} workers, batches of {batch_size}, shuffled; medians of {repeats}.")
    try:
        epochs = run()
    except Exception as error:
        if not by_function:
            raise
        from stocache.cli.dataset import describe_error

        _fail(f"{source}: a sample cannot be loaded or cached: {describe_error(error)}", 2)
    rows = experiment.summarize(epochs)
    typer.echo(experiment.format_table(rows, terminal_width()))
    echo(
        "reads: samples that did not come from the cache. 1st epoch: how much longer the cold epoch took than without a cache; "
        "with fewer than --repeats 9 it varies too much to be of use."
    )
    if len(rows) > 2:
        echo(f"Warm seconds over cached share: R² of a straight line {experiment.linearity(rows):.4f}.")
    experiment.write_csv(rows, csv_path)
    experiment.plot(rows, png_path, f"{samples}, {workers} workers")
    echo(f"wrote {csv_path} and {png_path}")


@_command()
def advise(
    source: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", show_default=False, help="A function that returns a map-style dataset."),
    ],
    step_ms: Annotated[
        float, typer.Option(metavar="MS", help="Milliseconds of a training step, which is assumed to use no CPU time.")
    ] = 0.0,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            show_default="32",
            help="Samples in a batch. Give it several times to choose among sizes: the step is that of the first.",
        ),
    ] = None,
    time_limit_s: Annotated[float, typer.Option(metavar="S", help="Seconds after which it ends.")] = 60.0,
    allow_pickle: _AllowPickle = False,
    collate_fn: _CollateFn = None,
) -> None:
    """Measure a dataset for a while, and recommend a limit, workers and a codec. Predicts the seconds of an epoch."""
    from stocache.cli.dataset import describe_error
    from stocache.errors import DatasetError, LimitError
    from stocache.observe.advice.advise import advise as measure_and_rank

    dataset, used = _load_source(source, allow_pickle, collate_fn)
    try:
        advice = measure_and_rank(dataset, step_ms=step_ms, batch_size=batch_size or 32, time_limit_s=time_limit_s, **used)
    except (DatasetError, LimitError) as error:
        _fail(" ".join(str(error).split()), 2)
    except Exception as error:
        _fail(f"{source}: a sample cannot be loaded: {describe_error(error)}", 2)
    for line in str(advice).splitlines():
        text = line.lstrip()
        indent = " " * (len(line) - len(text))
        echo(text, indent, f"{indent}  ")


def _refuse(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Fail if an option is given that is for something else."""
    for name in names:
        origin = context.get_parameter_source(name)
        if origin is not None and origin.name == "COMMANDLINE":
            _fail(f"--{name.replace('_', '-')} is for {reason}.", 2)


def _load_source(source: str, allow_pickle: bool, collate_fn: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of ``module:function``, and the options with which it is used."""
    from stocache.cli.dataset import load_dataset, load_function
    from stocache.errors import DatasetError

    used: dict[str, Any] = {"allow_pickle": True} if allow_pickle else {}
    try:
        return load_dataset(source), used if collate_fn is None else used | {"collate_fn": load_function(collate_fn)}
    except DatasetError as error:
        _fail(str(error), 2)


def _result_paths(out: Path) -> tuple[Path, Path]:
    """Return the paths of the results, a table and a plot, in a folder that exists."""
    stem = out.with_suffix("") if out.suffix in (".csv", ".png") and not out.is_dir() else out / "stocache-bench"
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"--out {out}: {stem.parent} cannot be made: {error.strerror}.", 2)
    return stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.png")


def _parse_percentages(text: str) -> list[float]:
    try:
        percentages = sorted({float(part) for part in text.split(",")})
    except ValueError:
        _fail(f"--fractions {text!r}: write percentages such as 0,25,50,75,100.", 2)
    if not all(0 <= percentage <= 100 for percentage in percentages):
        _fail(f"--fractions {text!r}: percentages lie between 0 and 100.", 2)
    return [percentage / 100 for percentage in percentages]


@_command()
def info(as_json: _Json = False) -> None:
    """Show how much memory this machine has for a cache, what "auto" would take, and the caches without a name."""
    from stocache.shm import registry, siblings
    from stocache.system import limits

    cgroup, memory = limits.cgroup_memory(), limits.memory()
    with registry.attaching, siblings.siblings() as found:
        caches: list[dict[str, Any]] = [
            {
                "place": sibling.descriptor.identity["place"],
                "ranks": siblings.count_ranks(sibling.key),
                "reserved_bytes": sibling.layout.count_reserved(sibling.fd),
                "max_bytes": sibling.layout.data_bytes,
            }
            for sibling in found
            if "place" in sibling.descriptor.identity
        ]
    amounts = {
        "shm_total": limits.shm_total(),
        "shm_free": limits.shm_free(),
        "memory_total": memory.total,
        "memory_available": memory.available,
        "memory_floor": memory.floor,
        "cgroup_limit": cgroup.limit if cgroup else None,
        "cgroup_available": cgroup.available if cgroup else None,
        "shared_memory_room": limits.shared_memory_room(),
        "recommended_limit": limits.recommended_limit(False, registry.run_attaching(siblings.promised_bytes)),
    }
    facts = {
        "memfd": limits.has_memfd(),
        "memfd_huge_policy": limits.memfd_huge_policy(),
        "cgroup_path": cgroup.path if cgroup else None,
    }
    if as_json:
        typer.echo(json.dumps(amounts | facts | {"caches_without_a_name": caches}, indent=2))
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
    for cache in caches:
        ranks = f"shared by {cache['ranks']} ranks of a job" if cache["ranks"] != 1 else "of one process"
        used = f"{limits.format_size(cache['reserved_bytes'])} of {limits.format_size(cache['max_bytes'])}"
        rows[f"cache at {cache['place']}"] = f"{used}, {ranks}"
    print_rows(rows.items())


def _describe_huge_pages(policy: str) -> str:
    from stocache.system import limits

    if policy not in ("never", "deny"):
        return f"yes ({policy})"
    return f"no ({policy}): each process pays 2 MiB of page tables per GiB cached. As root: echo advise > {limits.SHMEM_HUGE}"


# ---------------------------------------------------------------------------------------------------- prepared folders

_Workers = Annotated[int, typer.Option(min=0, metavar="N", help="Worker processes; 0: this process does the work.")]


class _OnError(str, Enum):
    STOP, SKIP = "stop", "skip"


_Prepared = Annotated[Path, typer.Argument(metavar="DIR", readable=False, help="A folder that was prepared.")]
_PreparedOrCache = Annotated[
    Path, typer.Argument(metavar="DIR", readable=False, help="A folder that was prepared, or the folder of a disk cache.")
]


@_command()
def prepare(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            readable=False,  # the source says it in one line
            help="Folder of images, .csv, .tsv, .npy, .parquet, or saved Hugging Face dataset.",
        ),
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="Folder or URL to prepare: new, empty, or of an interrupted preparation.")
    ],
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="With --ray: a running Ray. Default: $RAY_ADDRESS, else a Ray is started here."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Let a Ray cluster write the blocks.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help=f"Worker processes; 0: one that only loads. Default: {_CORES}; with --ray, all CPUs of the cluster.",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Samples in a block. Default: as many as fit in the bytes of a block."),
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of a block, such as 8MB. Default: 8MiB.")
    ] = None,
    shuffle_seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Assign samples to blocks at random, with this seed.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Decode images to uint8 3 x N x N. Default: keep the files.")
    ] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start again if it was interrupted.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Prepare a prepared folder again.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Write the damaged blocks of a prepared folder again.")] = False,
    on_error: Annotated[
        _OnError,
        typer.Option(
            "--on-error",
            help="Where a sample cannot be loaded: stop, or skip it and list it in DST/skipped.json. The last samples take the "
            "places of skipped ones.",
        ),
    ] = _OnError.STOP,
    nan: Annotated[
        bool, typer.Option("--nan", help="Blank cells of a table are NaN where the other cells of the column are numbers.")
    ] = False,
    hash_contents: Annotated[
        bool, typer.Option("--hash", help="Compare the contents of the source's files, not their sizes and times of change.")
    ] = False,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Identifies the data. A folder with another one is refused.")
    ] = None,
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
    with _errors_in_one_line():
        source = sources.open_source(
            src.absolute() if ray else src, size=size, hashes=hash_contents, nan=nan
        )  # Ray's workers run in other directories
        before = OnDiskBlockDataStorage[Any, Any](dst).is_prepared()
        storage = prepare_folder(
            source if shuffle_seed is None else source.for_shuffling(),
            dst,
            num_workers=workers,
            block_size=block_size,
            block_bytes=nbytes,
            shuffle_seed=shuffle_seed,
            info=source.info,
            fingerprint=fingerprint,
            resume=not no_resume,
            again=again,
            repair=repair,
            on_error=on_error.value,
            engine="ray" if ray else "local",
            address=address,
        )
        index = storage.index
    blocks = plural(len(index.blocks), "block")
    state = " is whole" if repair else " was prepared already" if before and not again else ""
    typer.echo(
        f"{dst}{state}: {index.samples} samples in {blocks} of "
        f"{index.block_size}, {format_size(index.nbytes)}. In Python: "
        f"stocache.StorageDataset(stocache.OnDiskBlockDataStorage({dst!r}))"
    )


@_command()
def inspect(folder: _Prepared, as_json: _Json = False) -> None:
    """Describe a prepared folder. Shows its size, the structure of its samples and how it was prepared; reads no samples."""
    import reprlib

    from stocache.errors import DamagedError, StorageError
    from stocache.storage.inspection import describe_structure
    from stocache.storage.skipped import SKIPPED
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
            "skipped": index.skipped,
        }
        facts = {"structure": index.structure, "info": shown if index.info_checksum else info, "plan": index.plan}
        typer.echo(json.dumps(amounts | facts, indent=2))
        return
    plan = ", ".join(f"{key} {value!r}" for key, value in index.plan.items() if value is not None)
    rows = [
        ("samples", str(index.samples)),
        ("blocks", f"{len(index.blocks)} of {index.block_size} samples"),
        ("size", format_size(index.nbytes)),
        *([("skipped", f"{index.skipped} of the source, see {SKIPPED}")] if index.skipped else []),
        ("plan", plan),
        ("info", shown),
        *describe_structure(index.structure),
    ]
    print_rows(rows)


@_command()
def check(folder: _PreparedOrCache, workers: _Workers = _CORES) -> None:
    """Read a whole prepared folder, or all samples of a disk cache, and list the damage. Exits with 1 if there is any."""
    from stocache.disk.inspection import is_disk_cache

    if is_disk_cache(folder):
        from stocache.cli import disk

        with _errors_in_one_line():
            disk.check(str(folder), workers)
        return
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
            if problems and "--repair" not in problems[0]:
                typer.echo(f"Repair it: stocache prepare SRC {folder} --repair", err=True)
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
        _fail("\n".join(" ".join(line.split()) for line in message.splitlines()))


# ---------------------------------------------------------------------------------------------------- named caches

_User = Annotated[
    str | None, typer.Option("--user", metavar="USER", help="Caches of this user (name or id), or of 'all'. Default: yours.")
]


@_command()
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

        top.print_table(caches, users=user is not None)
    else:
        typer.echo("no named caches")


@_command()
def stat(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The name, as 'stocache ls' shows it; or a path with a '/', such as ./folder."),
    ],
    user: _User = None,
    as_json: _Json = False,
) -> None:
    """Show everything about one named cache, or about the folder of a disk cache."""
    if _is_path(name):
        from stocache.cli import disk

        with _errors_in_one_line():
            if as_json:
                typer.echo(json.dumps(disk.as_dict(name), indent=2))
            else:
                disk.show(name)
        return
    from stocache.cli import listing
    from stocache.system.limits import format_size

    cache = next((cache for cache in listing.find(_uid(user)) if cache.name == name), None)
    if cache is None:
        _fail(f"there is no cache {name!r}. 'stocache ls' lists all caches.{_folder_hint(name)}")
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
            "memory": f"{format_size(cache.memory_bytes)} reserved, at most {format_size(cache.max_memory_bytes)}: up to "
            f"{format_size(stats.capacity_bytes)} of samples, the rest for states and counters",
            "filled": f"{stats.filled} of {stats.slots} slots, {stats.fill_fraction:.1%} of the dataset",
            "hits": f"{stats.hits}, rate {cache.hit_percent}",
            "misses": str(stats.misses),
            "fills": f"{stats.fills}, late {stats.races}, refused {stats.refused}, rejected {stats.rejected}",
        }
    holders = [f"{holder.pid} {holder.command}" for holder in cache.holders]
    print_rows([*rows.items(), *zip(["held by", *[""] * len(holders)], holders, strict=False)])


@_command()
def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Caches to remove; or folders, as paths with a '/', such as ./folder."),
    ] = None,
    dead: Annotated[
        bool,
        typer.Option("--dead", help="Remove leftovers of killed processes: caches, if not persistent, and records of loaders."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also remove caches in use, damaged, or of another user.")] = False,
    user: _User = None,
) -> None:
    """Remove named caches, or folders of disk caches, that are not in use.

    With --force, processes that use one keep it, but no other can join.
    """
    from stocache.cli import listing
    from stocache.errors import StocacheError
    from stocache.shm import named
    from stocache.system import limits
    from stocache.system.waiting import printable

    if bool(names) == dead:
        _fail("say which: stocache rm NAME..., or stocache rm --dead", 2)
    uid, folders = _uid(user), [name for name in names or () if _is_path(name)]
    if dead:
        caches = [cache for cache in listing.find(uid) if cache.state == "dead"]
        loaders = [loader for loader in listing.find_loaders(uid, count=False) if loader.state == "dead"]
        files: list[listing.NamedFile] = [*caches, *loaders]
        paths, size = [file.path for file in files], sum(file.memory_bytes for file in files)
        of_loaders = f" and {plural(len(loaders), 'dead loader')}" if loaders else ""
        echo(f"{plural(len(caches), 'dead cache')}{of_loaders}, {limits.format_size(size)}")
    else:
        if uid == -1:
            _fail("--user all works with --dead only. Name one user.", 2)
        paths = []
        for name in names or ():
            try:
                paths.append(name if name in folders else named.find(name, uid))
            except StocacheError as error:
                _fail(str(error))
    failed = False
    for path in paths:
        try:
            if path in folders:
                from stocache.disk import inspection

                inspection.remove(path, force)
            else:
                named.remove(path, force, dead)
            echo(f"removed {printable(path)}")
        except OSError as error:
            failed = True
            is_missing = path not in folders and not os.path.exists(path)
            echo(f"{error}{_folder_hint(os.path.basename(path)) if is_missing else ''}", err=True)
    raise typer.Exit(failed)


@_command()
def top(
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds between updates.")] = 1.0,
    user: _User = None,
) -> None:
    """Watch named caches: fill, hit rate, hits per second. Quit with q."""
    import sys

    from stocache.cli import listing
    from stocache.cli.top import watch

    uid = _uid(user)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _fail("top needs a terminal. In scripts: stocache ls --json")
    watch(lambda: listing.find(uid), interval)


@_command()
def metrics(
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve the metrics over HTTP until Ctrl-C, at /metrics. Default host: 127.0.0.1; port 0 takes a free one.",
        ),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="With --listen: let other machines read the metrics, without a password.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Print a dashboard for Grafana, to import there, instead of metrics.")
    ] = False,
    user: _User = None,
) -> None:
    """Print the counts of named caches and their loaders, for Prometheus. Or serve them over HTTP."""
    if dashboard:
        if listen is not None or allow_remote or user is not None:
            _fail("--dashboard goes alone: it prints a file that is the same for all.", 2)
        typer.echo(Path(__file__).with_name("grafana.json").read_text(), nl=False)
        return
    if allow_remote and listen is None:
        _fail("--allow-remote needs --listen HOST:PORT.", 2)
    uid = _uid(user)
    try:
        from stocache.cli import metrics, metrics_server
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        _fail("This command needs prometheus-client: pip install 'stocache[metrics]'", 2)
    if listen is None:
        typer.echo(metrics.text_of(uid), nl=False)
        return
    with metrics_server.until_ended():
        try:
            addresses = metrics_server.resolve(listen, allow_remote)
        except metrics_server.ListenError as error:
            _fail(str(error), 2)
        try:
            server = metrics_server.open_server(addresses, metrics.registry_of(uid))
        except OSError as error:
            hint = " Choose another port, or end what uses this one." if error.errno == errno.EADDRINUSE else ""
            _fail(f"--listen {listen}: {error.strerror or error}.{hint}")
        with server:
            echo(f"serving {server.url} until Ctrl-C")
            server.serve_forever()


@_command()
def doctor(
    size_limit_gib: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The limit of a planned cache, such as 32 or 500MB.")
    ] = None,
    disk: Annotated[str | None, typer.Option(metavar="FOLDER", help="The folder of a planned disk cache.")] = None,
    disk_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --disk: the limit of the planned disk cache, such as 500GB.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Find settings of this machine that hinder a cache. Names the remedies. Exits with 1 if there is a problem."""
    from stocache.cli import doctor
    from stocache.errors import LimitError
    from stocache.system import limits

    try:
        size_limit = limits.parse_size(size_limit_gib) if size_limit_gib not in (None, "auto") else None
        limit = None if disk_limit is None else limits.parse_size(disk_limit, "disk_limit")
    except LimitError as error:
        _fail(str(error), 2)
    if limit is not None and disk is None:
        _fail("--disk-limit needs --disk FOLDER.", 2)
    findings = doctor.examine(size_limit, disk, limit)
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            echo(finding.what, f"{finding.kind}: ", " " * 4)
            echo(finding.remedy, "    do: ", " " * 8)
        problems = sum(finding.kind == "problem" for finding in findings)
        echo(f"{plural(problems, 'problem')} found")
    raise typer.Exit(any(finding.kind == "problem" for finding in findings))


def _is_path(name: str) -> bool:
    """Whether a name is the path of a folder: a cache's own name has no "/"."""
    return "/" in name or name in (".", "..")


def _folder_hint(name: str) -> str:
    return f" The folder is ./{name}" if os.path.isdir(name) else ""


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
        _fail(f"there is no user {user!r} on this machine.", 2)


def _fail(message: str, code: int = 1) -> NoReturn:
    """End the command with a message; ``code`` 2 says that the command line is at fault."""
    for line in message.splitlines() or [""]:
        echo(" ".join(line.split()), err=True)
    raise typer.Exit(code) from None


def main() -> None:
    """Run the command line."""
    app()
