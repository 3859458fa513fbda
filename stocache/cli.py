"""The command line: ``stocache bench``, ``stocache info``. Heavy modules are imported by the command that needs them."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _about() -> None:
    """Cache any PyTorch dataset in shared memory, one copy per machine."""


@app.command()
def bench(
    folder: Annotated[Path | None, typer.Argument(help="Folder of JPEGs, searched recursively. Default: generated.")] = None,
    fractions: Annotated[str, typer.Option(help="Cached shares of the dataset to run, in percent.")] = "0,25,50,75,100",
    workers: Annotated[int, typer.Option(min=0, help="DataLoader workers.")] = min(4, len(os.sched_getaffinity(0))),
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
    from stocache import bench as experiment

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
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all amounts in bytes.")] = False) -> None:
    """Show what this machine can give to a cache, and what size_limit_gib="auto" would take."""
    from stocache import limits

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
    from stocache import limits

    if policy not in ("never", "deny"):
        return f"yes ({policy})"
    return f"no ({policy}): each process pays 2 MiB of page tables per GiB cached. As root: echo advise > {limits.SHMEM_HUGE}"


def main() -> None:
    """Run the command line."""
    app()
