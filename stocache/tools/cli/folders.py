"""The commands on folders: prepare, inspect and check. Each imports what it needs, because torch takes seconds to import."""

import os
from enum import Enum
from typing import Annotated, Any

import typer

from stocache.system.figures import plural
from stocache.tools.cli.output import CORES, Json, argument, count_option, errors_in_one_line, flag, show, text_option


class _OnError(str, Enum):
    STOP, SKIP = "stop", "skip"


_Prepared = Annotated[str, argument("DIR", "A folder that was prepared.")]
_PreparedOrCache = Annotated[str, argument("DIR", "A folder that was prepared, or the folder of a disk cache.")]
_Source = Annotated[str, argument("SRC", "Folder of images, .csv, .tsv, .json, .jsonl, .npy, .parquet; Hugging Face dataset.")]
_Target = Annotated[str, argument("DST", "Folder or URL to prepare: new, empty, or of an interrupted preparation.")]
_Address = Annotated[str | None, argument("ADDRESS", "With --ray: a running Ray. Default: $RAY_ADDRESS, else a new one here.")]
_Workers = Annotated[int, count_option("Worker processes; 0: this process does the work.", 0)]
_LoadingWorkers = Annotated[int | None, count_option(f"Worker processes. Default: {CORES}; with --ray, all CPUs there.", 0)]
_BlockSize = Annotated[int | None, count_option("Samples in a block. Default: as many as fit in the bytes of a block.")]
_BlockBytes = Annotated[str | None, text_option("SIZE", "Bytes of a block, such as 8MB. Default: 8MiB.")]
_ShuffleSeed = Annotated[int | None, count_option("Assign samples to blocks at random, with this seed.", 0)]
_Size = Annotated[int | None, count_option("Decode images to uint8 3 x N x N. Default: keep the files.")]
_Skipping = Annotated[_OnError, typer.Option(help="If a sample cannot be loaded: stop, or skip and list it in skipped.json.")]
_Hash = Annotated[bool, flag("--hash", "Compare the contents of the source's files, not their sizes and times.")]
_Fingerprint = Annotated[str | None, text_option("TEXT", "Identifies the data. A folder with a different one is refused.")]


def prepare(
    src: _Source,
    dst: _Target,
    address: _Address = None,
    ray: Annotated[bool, flag("--ray", "Let a Ray cluster write the blocks.")] = False,
    workers: _LoadingWorkers = None,
    block_size: _BlockSize = None,
    block_bytes: _BlockBytes = None,
    shuffle_seed: _ShuffleSeed = None,
    size: _Size = None,
    no_resume: Annotated[bool, flag("--no-resume", "Start again if it was interrupted.")] = False,
    again: Annotated[bool, flag("--again", "Prepare a prepared folder again, also one that is damaged.")] = False,
    on_error: _Skipping = _OnError.STOP,
    hash_contents: _Hash = False,
    fingerprint: _Fingerprint = None,
) -> None:
    """Prepare a dataset as a folder of blocks. After an interruption, the same command continues."""
    if block_size is not None and block_bytes is not None:
        raise typer.BadParameter("give --block-size or --block-bytes, not both.")
    if address is not None and not ray:
        raise typer.BadParameter(f"{address} is one argument too many, or the address of a Ray: then give --ray too.")
    options: dict[str, Any] = {"block_size": block_size, "shuffle_seed": shuffle_seed, "fingerprint": fingerprint}
    options |= {"resume": not no_resume, "again": again, "on_error": on_error.value, "address": address}
    options |= {"engine": "ray" if ray else "local", "num_workers": 0 if ray else CORES}
    if workers is not None:
        options["num_workers"] = workers
    if block_bytes is not None:  # a bare number is in bytes here; in a str it would be in GiB
        options["block_bytes"] = int(block_bytes) if block_bytes.isdecimal() else block_bytes
    # Ray's workers run in other directories
    _prepare(os.path.abspath(src) if ray else src, dst, {"size": size, "hashes": hash_contents}, options)


def _prepare(src: str, dst: str, of_source: dict[str, Any], options: dict[str, Any]) -> None:
    """Prepare a folder, and say what is in it."""
    from stocache.storage.preparation import sources
    from stocache.storage.preparation.prepare import prepare as prepare_folder
    from stocache.storage.storage import OnDiskBlockDataStorage
    from stocache.system.limits import format_size

    with errors_in_one_line():
        source = sources.open_source(src, **of_source)
        before = OnDiskBlockDataStorage[Any, Any](dst).is_prepared()
        index = prepare_folder(source, dst, info=source.info, **options).index
    state = " was prepared already" if before and not options["again"] else ""
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
            return disk.check(folder, workers)
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
