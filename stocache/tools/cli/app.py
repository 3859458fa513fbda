"""The commands bench, advise, info, prepare, inspect, check, ls, stat, rm, metrics, doctor and explain.

Each command imports what it needs: torch takes seconds to import, and info, ls, stat, rm, metrics, explain do without.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from stocache.system.figures import plural
from stocache.tools.cli import output
from stocache.tools.cli.caches import ls, metrics, rm, stat
from stocache.tools.cli.folders import check, inspect, prepare
from stocache.tools.cli.output import CORES, Json, argument, count_option, echo, fail, flag, print_rows, show, text_option

_AllowPickle = Annotated[bool, flag("--allow-pickle", "Cache samples that need pickle, too.")]
_CollateFn = Annotated[str | None, text_option("FUNCTION", "The collate_fn of the DataLoader, as module:function.")]


class _Command(TyperCommand):
    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help, whole: the list of commands breaks it into lines."""
        return super().get_short_help_str(10 * limit + 1000)


_Shares = Annotated[str, text_option("LIST", "Cached shares of the dataset to measure, in percent.")]
_FOR_BENCH = "Folder of JPEGs; or module:function, which returns a map-style dataset. Default: generated photos."
_JpegsOrFunction = Annotated[str | None, argument("SOURCE", _FOR_BENCH)]
_Out = Annotated[Path, text_option("PATH", "Folder for the results, or a path that ends in .csv, .png or .svg.")]


def bench(
    context: typer.Context,
    source: _JpegsOrFunction = None,
    fractions: _Shares = "0,25,50,75,100",
    workers: Annotated[int, count_option("DataLoader workers.", 0)] = CORES,
    batch_size: Annotated[int, count_option("Samples in a batch.")] = 32,
    repeats: Annotated[int, count_option("Run everything N times and report medians.")] = 1,
    out: _Out = Path(),
    size: Annotated[int, count_option("Photos: cache them as uint8 3 x N x N.")] = 256,
    photos: Annotated[int, count_option("Photos: generate N of 512 x 512 if there is no SOURCE.")] = 1000,
    warm_pages: Annotated[bool, flag("--warm-pages", "Photos: leave the files in the page cache.")] = False,
    allow_pickle: _AllowPickle = False,
    collate_fn: _CollateFn = None,
) -> None:
    """Measure the effect of a cache on your dataset. Runs a cold and a warm epoch at each cached share."""
    own = source is not None and ":" in source and not Path(source).is_dir()
    for module in ["matplotlib"] + ["PIL"] * (not own):
        output.need(module, "bench")
    _refuse(context, own)
    from stocache.tools import bench as experiment

    shares, (csv_path, picture_path) = _parse_percentages(fractions), _result_paths(out)
    photo_options = source, photos, size, warm_pages
    dataset, samples, how, options = _own(source, collate_fn, allow_pickle) if own else _photos(*photo_options)
    echo(f"{samples}, {how}; {workers} workers, batches of {batch_size}, shuffled; medians of {repeats}.")
    with _errors_of(source or "generated photos"):
        epochs = experiment.sweep(dataset, shares, workers=workers, batch_size=batch_size, repeats=repeats, **options)
    rows = experiment.summarize(epochs)
    output.console().print(experiment.table(rows))
    echo(_LEGEND)
    experiment.write_csv(rows, csv_path)
    experiment.draw(rows, picture_path, f"{samples}, {workers} workers")
    echo(f"wrote {csv_path} and {picture_path}")


_LEGEND = (
    "reads: samples that did not come from the cache. 1st epoch: how much longer the cold epoch took than without a cache; "
    "with fewer than --repeats 9 it varies too much to be of use."
)
_Measured: TypeAlias = tuple[Any, str, str, dict[str, Any]]
"""What ``bench`` measures: the dataset, its samples and the way in words, and options of `sweep`."""


def _own(source: Any, collate_fn: str | None, allow_pickle: bool) -> _Measured:
    from stocache.tools.bench import PartlyCached

    dataset, options = _load_source(source, collate_fn)
    options["make"] = partial(PartlyCached, allow_pickle=allow_pickle)
    samples = f"{plural(len(dataset), 'sample')} of {source}"
    return dataset, samples, f"{type(dataset).__name__}, files left in the page cache", options


def _photos(folder: str | None, count: int, size: int, warm_pages: bool) -> _Measured:
    from stocache.tools.bench import JpegFolder, drop_pages, find_jpegs, photo_folder

    if folder is not None and not Path(folder).is_dir():
        fail(f"{folder} is not a folder. Give a folder of JPEGs, or module:function.", 2)
    paths = find_jpegs(Path(folder or photo_folder(count))) or fail(f"{folder} holds no .jpg or .jpeg files.", 2)
    samples, options = f"{plural(len(paths), 'photo')} from {folder or 'generated files'}", {}
    how = "left in the page cache"
    if not warm_pages:
        how, options["before_epoch"] = "dropped from the page cache before each epoch", partial(drop_pages, paths)
    return JpegFolder(paths, size), samples, f"{how}; decoded and resized to 3x{size}x{size} uint8", options


_HOW_MANY = "Samples in a batch. Give it several times to choose among sizes: the step is that of the first."
_BatchSizes = Annotated[list[int] | None, text_option("N", _HOW_MANY, show_default="32")]


def advise(
    source: Annotated[str, argument("MODULE:FUNCTION", "A function that returns a map-style dataset.")],
    step_ms: Annotated[float, text_option("MS", "Milliseconds of a training step, which is assumed to use no CPU time.")] = 0.0,
    batch_size: _BatchSizes = None,
    time_limit_s: Annotated[float, text_option("S", "Seconds after which it ends.")] = 60.0,
    allow_pickle: _AllowPickle = False,
    collate_fn: _CollateFn = None,
) -> None:
    """Measure a dataset for a while, and recommend a limit, workers and a codec."""
    from stocache.tools.advise import advise as measure_and_rank

    dataset, used = _load_source(source, collate_fn)
    used |= {"step_ms": step_ms, "batch_size": batch_size or 32, "time_limit_s": time_limit_s, "allow_pickle": allow_pickle}
    with _errors_of(source):
        advice = measure_and_rank(dataset, **used)
    for line in str(advice).splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        echo(line.lstrip(), indent, f"{indent}  ")


def _refuse(context: typer.Context, own: bool) -> None:
    """Fail if an option of ``bench`` is given that is for photos, and the dataset is the user's own; or the other way round."""
    for name in ("size", "photos", "warm_pages") if own else ("allow_pickle", "collate_fn"):
        origin = context.get_parameter_source(name)
        if origin is not None and origin.name == "COMMANDLINE":
            other, this = ("photos", "a dataset of yours") if own else ("a dataset of yours", "photos")
            fail(f"--{name.replace('_', '-')} is for {other}. Leave it out for {this}.", 2)


@contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """End the command with one line for an error of a dataset."""
    from stocache.errors import DatasetError, LimitError
    from stocache.tools.cli.dataset import describe_error

    try:
        yield
    except (DatasetError, LimitError) as error:
        fail(" ".join(str(error).split()), 2)
    except Exception as error:
        fail(f"{source}: a sample cannot be loaded or cached: {describe_error(error)}", 2)


def _load_source(source: str, collate_fn: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of ``module:function``, and the options of its loader."""
    from stocache.tools.cli.dataset import load_dataset, load_function

    with _errors_of(source):
        return load_dataset(source), {} if collate_fn is None else {"collate_fn": load_function(collate_fn)}


def _result_paths(out: Path) -> tuple[Path, Path]:
    """Return the paths of the results, a table and a plot, in a folder that exists."""
    ending = "" if out.is_dir() else out.suffix
    stem = out.with_suffix("") if ending in (".csv", ".png", ".svg") else out / "stocache-bench"
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out}: {stem.parent} cannot be made: {error.strerror}.", 2)
    return stem.with_name(f"{stem.name}.csv"), stem.with_name(stem.name + (ending if ending == ".svg" else ".png"))


def _parse_percentages(text: str) -> list[float]:
    try:
        percentages = sorted({float(part) for part in text.split(",")})
    except ValueError:
        fail(f"--fractions {text!r}: write percentages such as 0,25,50,75,100.", 2)
    if not all(0 <= percentage <= 100 for percentage in percentages):
        fail(f"--fractions {text!r}: percentages lie between 0 and 100.", 2)
    return [percentage / 100 for percentage in percentages]


def info(as_json: Json = False) -> None:
    """Show how much memory this machine has for a cache, what "auto" would take, and the caches without a name."""
    from stocache.shm import registry, siblings
    from stocache.system import limits
    from stocache.system.platform import here

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
    size = {name: "none" if amount is None else limits.format_size(amount) for name, amount in amounts.items()}
    rows = {"shared memory": "none on this system: the threads of a process have a cache"}
    if here.SHARES_MEMORY:
        rows = {
            limits.SHM_DIR: f"{size['shm_free']} free of {size['shm_total']}",
            "memfd": "allowed, not bounded by /dev/shm" if facts["memfd"] else "forbidden",
            "huge pages": f"{facts['memfd_huge_policy']}; 'stocache doctor' says what that means",
        }
    rows |= {
        "memory": f"{size['memory_available']} available of {size['memory_total']}",
        "cgroup limit": size["cgroup_limit"] + (f" ({cgroup.path})" if cgroup else ""),
        "kept free": f"{size['memory_floor']}: a cache stops growing before",
        "largest cache": size["shared_memory_room"],
        '"auto" takes': size["recommended_limit"],
    }
    for cache in caches:
        ranks = f"shared by {cache['ranks']} ranks of a job" if cache["ranks"] != 1 else "of one process"
        used = f"{limits.format_size(cache['reserved_bytes'])} of {limits.format_size(cache['max_bytes'])}"
        rows[f"cache at {cache['place']}"] = f"{used}, {ranks}"
    show(amounts | facts | {"caches_without_a_name": caches}, rows.items(), as_json)


def explain(
    code: Annotated[str | None, argument("CODE", "As a warning or an error says it: W12, LimitError. Or a message.")] = None,
) -> None:
    """Explain a warning or a symptom: the cause, what helps, and how to check. Without a code, list all."""
    from stocache.tools.cli.symptoms import symptom_of, symptoms

    found = {each.code.lower(): each for each in symptoms()}
    if code is None:
        print_rows((each.code, each.title) for each in found.values())
    elif each := found.get(code.lower()) or symptom_of(code):
        typer.echo(f"{each.code}: {each.title}\n\n{each.text}")
    else:
        fail(f"{code!r} is unknown. 'stocache explain' lists all, and finds one by its message.", 2)


def doctor(
    size_limit_gib: Annotated[str | None, text_option("SIZE", "The limit of a planned cache, such as 32 or 500MB.")] = None,
    disk: Annotated[str | None, text_option("FOLDER", "The folder of a planned disk cache.")] = None,
    disk_limit: Annotated[str | None, text_option("SIZE", "With --disk: the limit of the disk cache, such as 500GB.")] = None,
    as_json: Json = False,
) -> None:
    """Find settings of this machine that hinder a cache. Names the remedies. Exits with 1 if there is a problem."""
    from stocache.errors import LimitError
    from stocache.system import limits
    from stocache.tools.cli import doctor

    try:
        size_limit = limits.parse_size(size_limit_gib) if size_limit_gib not in (None, "auto") else None
        limit = None if disk_limit is None else limits.parse_size(disk_limit, "disk_limit")
    except LimitError as error:
        fail(str(error), 2)
    if limit is not None and disk is None:
        fail("--disk-limit needs --disk FOLDER.", 2)
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


app = typer.Typer(invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_COMMANDS: tuple[Callable[..., None], ...] = (
    bench, advise, info, prepare, inspect, check, ls, stat, rm, metrics, doctor, explain,
)  # fmt: skip
for each in _COMMANDS:
    app.command(cls=_Command)(each)


@app.command(cls=_Command, add_help_option=False, context_settings={"ignore_unknown_options": True})
def run(arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT|-m MODULE ...")] = None) -> None:
    """Run a program with stocache's DataLoader in place of torch's, and report what its training waits for."""
    from stocache.tools.run import run

    run.main(arguments or [])


_FIRST = {
    "stocache run train.py": "run your program as Python would, and say what its training waits for",
    "stocache run --cache auto train.py": "the same with its datasets cached; batches stay equal, bit for bit",
    "stocache bench": "measure what a cache changes, on generated photos or your own",
    "stocache --help": "all commands",
}


@app.callback()
def _about(context: typer.Context, version: Annotated[bool, flag("--version", "Show the version and exit.")] = False) -> None:
    """Cache any PyTorch dataset in shared memory, one copy per machine."""
    if version:
        import stocache

        typer.echo(f"stocache {stocache.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print_rows(_FIRST.items())
