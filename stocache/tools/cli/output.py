"""Print text that reads well on a terminal of any width, and errors in one line; declare options that several commands have.

In a pipe or a file, lines are not broken.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from stocache.system.platform import here

if TYPE_CHECKING:
    from rich.console import Console

CORES = min(4, here.usable_cpus())
Json = Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")]


def count_option(help: str, least: int = 1) -> Any:
    """Return an option that is a number of ``least`` or more."""
    return typer.Option(min=least, metavar="N", help=help)


def argument(metavar: str, help: str) -> Any:
    """Return an argument, which is found by its place."""
    return typer.Argument(metavar=metavar, help=help)


def text_option(metavar: str, help: str, **more: Any) -> Any:
    """Return an option that is a text, or a number of any kind."""
    return typer.Option(metavar=metavar, help=help, **more)


def flag(name: str, help: str) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=help)


def echo(text: str, first: str = "", rest: str = "", *, err: bool = False) -> None:
    """Print a text after ``first``. A terminal gets it broken between words, with ``rest`` before the second line and later."""
    width = terminal_width(err)
    if width is not None and text:
        whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, **whole)
        typer.echo("\n".join(lines), err=err)
    else:
        typer.echo(first + text, err=err)


def terminal_width(err: bool = False) -> int | None:
    """Return the columns of the terminal that shows the output, or the errors; None if it goes elsewhere."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def console() -> "Console":
    """Return the console for tables, as wide as the terminal; in a file or a pipe, 240 columns wide."""
    from rich.console import Console  # here: most commands do without

    console = Console()
    return console if console.is_terminal else Console(width=240)


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns. A value may have several lines."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        for number, line in enumerate(value.split("\n")):
            echo(line, f"{'' if number else name:<{width}}  ", " " * (width + 2))


def show(facts: Mapping[str, object], rows: Iterable[tuple[str, str]], as_json: bool) -> None:
    """Print facts as JSON, or the same as rows in words."""
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_rows(rows)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with a message; ``code`` 2 says that the command line is at fault."""
    for line in message.splitlines() or [""]:
        echo(" ".join(line.split()), err=True)
    raise typer.Exit(code) from None


def need(module: str, extra: str) -> None:
    """End the command if a package of an extra is not installed."""
    if find_spec(module) is None:
        fail(f"This command needs {module.replace('_', '-')}: pip install 'stocache[{extra}]'", 2)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the command with one line for an error that the user can correct."""
    from stocache.errors import StocacheError

    try:
        yield
    except (StocacheError, OSError) as error:
        message = str(error)
        if "Original Traceback" in message:  # from a worker of a DataLoader: the last line is the error
            message = message.strip().splitlines()[-1].partition(": ")[2]
        fail(message)
