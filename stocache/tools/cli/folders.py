"""The commands on folders: prepare, inspect and check. Each imports what it needs, because torch takes seconds to import."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from stocache.system.figures import plural
from stocache.tools.cli.output import CORES, Json, count_option, errors_in_one_line, flag, show, text_option

_Workers = Annotated[int, count_option("Worker processes; 0: this process does the work.", 0)]


class _OnError(str, Enum):
    STOP, SKIP = "stop", "skip"


_Prepared = Annotated[Path, typer.Argument(metavar="DIR", readable=False, help="A folder that was prepared.")]
_PreparedOrCache = Annotated[
    Path, typer.Argument(metavar="DIR", readable=False, help="A folder that was prepared, or the folder of a disk cache.")
]


def prepare(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            readable=False,  # the source says it in one line
            help="Folder of images, .csv, .tsv, .json, .jsonl, .npy, .parquet, or saved Hugging Face dataset.",
        ),
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="Folder or URL to prepare: new, empty, or of an interrupted preparation.")
    ],
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="With --ray: a running Ray. Default: $RAY_ADDRESS, else a Ray is started here."),
    ] = None,
    ray: Annotated[bool, flag("--ray", "Let a Ray cluster write the blocks.")] = False,
    workers: Annotated[
        int | None,
        text_option(
            "N", f"Worker processes; 0: one that only loads. Default: {CORES}; with --ray, all CPUs of the cluster.", min=0
        ),
    ] = None,
    block_size: Annotated[
        int | None, count_option("Samples in a block. Default: as many as fit in the bytes of a block.")
    ] = None,
    block_bytes: Annotated[str | None, text_option("SIZE", "Bytes of a block, such as 8MB. Default: 8MiB.")] = None,
    shuffle_seed: Annotated[int | None, count_option("Assign samples to blocks at random, with this seed.", 0)] = None,
    size: Annotated[int | None, count_option("Decode images to uint8 3 x N x N. Default: keep the files.")] = None,
    no_resume: Annotated[bool, flag("--no-resume", "Start again if it was interrupted.")] = False,
    again: Annotated[bool, flag("--again", "Prepare a prepared folder again, also one that is damaged.")] = False,
    on_error: Annotated[
        _OnError,
        typer.Option(
            "--on-error",
            help="Where a sample cannot be loaded: stop, or skip it and list it in DST/skipped.json. The last samples take the "
            "places of skipped ones.",
        ),
    ] = _OnError.STOP,
    hash_contents: Annotated[
        bool, flag("--hash", "Compare the contents of the source's files, not their sizes and times of change.")
    ] = False,
    fingerprint: Annotated[
        str | None, text_option("TEXT", "Identifies the data. A folder with another one is refused.")
    ] = None,
) -> None:
    """Prepare a dataset as a folder of blocks. After an interruption, the same command continues."""
    from stocache.storage.preparation import sources
    from stocache.storage.preparation.prepare import prepare as prepare_folder
    from stocache.storage.storage import OnDiskBlockDataStorage
    from stocache.storage.writer import BLOCK_BYTES
    from stocache.system.limits import format_size

    if block_size is not None and block_bytes is not None:
        raise typer.BadParameter("give --block-size or --block-bytes, not both.")
    if address is not None and not ray:
        raise typer.BadParameter(f"{address} is one argument too many, or the address of a Ray: then give --ray too.")
    if workers is None:
        workers = 0 if ray else CORES
    nbytes: int | str = BLOCK_BYTES if block_bytes is None else block_bytes
    if isinstance(nbytes, str) and nbytes.isdecimal():
        nbytes = int(nbytes)  # a bare number is in bytes here; in a str it would be in GiB
    with errors_in_one_line():
        # Ray's workers run in other directories
        source = sources.open_source(src.absolute() if ray else src, size=size, hashes=hash_contents)
        before = OnDiskBlockDataStorage[Any, Any](dst).is_prepared()
        storage = prepare_folder(
            source,
            dst,
            num_workers=workers,
            block_size=block_size,
            block_bytes=nbytes,
            shuffle_seed=shuffle_seed,
            info=source.info,
            fingerprint=fingerprint,
            resume=not no_resume,
            again=again,
            on_error=on_error.value,
            engine="ray" if ray else "local",
            address=address,
        )
        index = storage.index
    state = " was prepared already" if before and not again else ""
    typer.echo(
        f"{dst}{state}: {index.samples} samples in {plural(len(index.blocks), 'block')} of "
        f"{index.block_size}, {format_size(index.nbytes)}. In Python: "
        f"stocache.StorageDataset(stocache.OnDiskBlockDataStorage({dst!r}))"
    )


def inspect(folder: _Prepared, as_json: Json = False) -> None:
    """Describe a prepared folder. Shows its size, the structure of its samples and how it was prepared; reads no samples."""
    import reprlib

    from stocache.errors import DamagedError, StorageError
    from stocache.storage.inspection import describe_structure
    from stocache.storage.skipped import SKIPPED
    from stocache.storage.storage import OnDiskBlockDataStorage
    from stocache.system.limits import format_size

    with errors_in_one_line():
        storage = OnDiskBlockDataStorage[Any, Any](folder)
        index = storage.index
        try:
            info = storage.load_dataset_info()
            shown = reprlib.repr(info)
        except DamagedError:
            raise
        except StorageError as error:  # it is pickled, or needs classes that are missing
            shown = f"not shown: {error}"
    facts = {name: getattr(index, name) for name in ("samples", "block_size", "skipped", "structure", "plan")}
    facts |= {"blocks": len(index.blocks), "bytes": index.nbytes, "info": shown if index.info_checksum else info}
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
    show(facts, rows, as_json)


def check(folder: _PreparedOrCache, workers: _Workers = CORES) -> None:
    """Read a whole prepared folder, or all samples of a disk cache, and list the damage. Exits with 1 if there is any."""
    from stocache.cache.disk.inspection import is_disk_cache
    from stocache.errors import StorageError
    from stocache.storage.inspection import find_damage
    from stocache.storage.storage import OnDiskBlockDataStorage
    from stocache.tools.cli import disk

    with errors_in_one_line():
        if is_disk_cache(folder):
            return disk.check(str(folder), workers)
        storage = OnDiskBlockDataStorage[Any, Any](folder)
        try:
            index = storage.index
        except StorageError as error:  # the rest cannot be checked without it
            problems = [str(error)]
        else:
            problems = find_damage(storage, workers)
            if problems:
                typer.echo(f"Prepare it again: stocache prepare SRC {folder} --again", err=True)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{len(index.blocks)} blocks, {index.samples} samples, no damage")
